"""Uses the exchange under a name of its own."""

from vllm_omni.diffusion.distributed.head_parallel import scatter_heads_gather_tokens as to_all_tokens

from .parallel import Magi2ParallelGroup

__all__ = ["Magi2ParallelGroup", "to_all_tokens"]
