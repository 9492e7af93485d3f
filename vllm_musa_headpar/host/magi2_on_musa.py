"""What keeps MAGI-2 from starting on MUSA where vLLM-Omni's own pipeline refuses it, as 0.30.0 does.

Start compatibility, made from public descriptions of the same change upstream: simulated, never run on a card, and
slow in attention. Each record applies on a MUSA platform only, and only where the host still refuses it.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .head_parallel import MAGI2
from .ledger import HOST, Binding, NotNeeded, Record, Refused, imports_of, load, stock_function

Function = Callable[..., Any]
PIPELINE = f"{MAGI2}.pipeline_magi2"
PLATFORMS = f"{HOST}.platforms"
SCORES_BOUND = 2**30  # bytes of float32 scores at a time; the host's reference holds up to four such tensors


def pipeline_requires_cuda() -> bool:
    """Whether MAGI-2's pipeline raises that it requires CUDA. Read, not imported: it needs much.

    Raises:
        ImportError: there is no such pipeline.
    """
    spec = find_spec(PIPELINE)
    source = getattr(spec.loader, "get_source", lambda name: None)(PIPELINE) if spec is not None else None
    if source is None:
        raise ImportError(f"there is no source of {PIPELINE}")
    return _refuses_musa(source)


@lru_cache(maxsize=4)
def _refuses_musa(source: str) -> bool:
    raises = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    texts = (node.value for statement in raises for node in ast.walk(statement) if isinstance(node, ast.Constant))
    return any(isinstance(text, str) and "requires CUDA" in text and "MUSA" not in text for text in texts)


def _require_refused_musa() -> None:
    """NotNeeded unless this is a MUSA platform on which the host refuses MAGI-2."""
    try:
        refused = pipeline_requires_cuda()
    except ImportError as error:
        raise NotNeeded(f"this host has no MAGI-2: {error}") from error
    if not refused:
        raise NotNeeded("this host's MAGI-2 does not refuse MUSA")
    try:
        on_musa = importlib.import_module(PLATFORMS).current_omni_platform.is_musa()
    except Exception as error:
        raise NotNeeded(f"this host's platform cannot be told: {type(error).__name__}: {error}") from error
    if not on_musa:
        raise NotNeeded("the platform is not MUSA")


class PlatformForMagi2:
    """The platform as MAGI-2's pipeline is to see it: MUSA stands where it asks for CUDA; all else as it is."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda(self) -> bool:
        return bool(self._platform.is_cuda() or self._platform.is_musa())


def make_packed_attention(stock: Function, attention: ModuleType, scores_bound: int = SCORES_BOUND) -> Function:
    """Packed attention that keeps MUSA tensors from the bundled CUDA kernel.

    Args:
        scores_bound: bytes that a slice's float32 scores `[heads, queries, keys and sinks]` may take, where a
            single query does not take more.
    """

    def packed_attention_with_sink(
        q: Tensor, k: Tensor, v: Tensor, varlen: Any, *, softcap: float = -1.0, sink: Tensor | None = None
    ) -> Tensor:
        """`[queries, heads, dim]`, and `[keys, KV heads, dim]` twice `-> [queries, heads, dim]`."""
        if q.device.type != "musa":
            unchanged: Tensor = stock(q, k, v, varlen, softcap=softcap, sink=sink)
            return unchanged
        cu_q, cu_k, _, _ = varlen.resolved(q.shape[0], k.shape[0])
        cu_q, cu_k = cu_q.cpu(), cu_k.cpu()  # the reference reads them on the host, sequence by sequence
        reference = attention.torch_varlen_attention_with_sink
        if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or cu_q.numel() != cu_k.numel():
            refused: Tensor = reference(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, softcap=softcap, sink=sink)
            return refused
        output = torch.empty_like(q)
        sinks = 0 if sink is None or not sink.numel() else sink.shape[0]
        for queries, keys in zip(_ranges(cu_q), _ranges(cu_k), strict=True):
            row = 4 * q.shape[1] * max(1, len(keys) + sinks)
            step = max(1, scores_bound // row)
            part = slice(keys.start, keys.stop)
            for start in range(queries.start, queries.stop, step):
                rows = slice(start, min(start + step, queries.stop))
                output[rows] = reference(
                    q[rows],
                    k[part],
                    v[part],
                    cu_seqlens_q=torch.tensor([0, rows.stop - rows.start]),
                    cu_seqlens_k=torch.tensor([0, len(keys)]),
                    softcap=softcap,
                    sink=sink,
                )
        return output

    return packed_attention_with_sink


def _ranges(cumulative: Tensor) -> list[range]:
    ends = [int(end) for end in cumulative.tolist()]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def make_moe_kernel(stock: Function) -> Function:
    def triton_mh_moe_forward(
        x: Tensor,
        gather_ids: Tensor,
        probs: Tensor,
        expert_offsets: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        *,
        deterministic: bool = False,
    ) -> Tensor:
        """The stock kernel; MUSA's Triton has no atomic add of bfloat16, so there it stores without one."""
        no_atomics = x.device.type == "musa" and x.dtype == torch.bfloat16
        output: Tensor = stock(
            x, gather_ids, probs, expert_offsets, w_gate, w_up, w_down, deterministic=deterministic or no_atomics
        )
        return output

    return triton_mh_moe_forward


# --- The records ---


def _device() -> list[Binding]:
    _require_refused_musa()
    name, pipeline = "current_omni_platform", load(PIPELINE)
    platform = vars(pipeline).get(name)
    if not (hasattr(platform, "is_cuda") and hasattr(platform, "is_musa")):
        raise Refused(f"{PIPELINE} has no {name} that can be asked, but {platform!r}")
    return [Binding(pipeline, name, platform, PlatformForMagi2(platform))]


def _attention() -> list[Binding]:
    _require_refused_musa()
    attention = load(f"{MAGI2}.attention")
    signature = "(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softcap=-1.0, sink=None)"
    stock_function(attention, "torch_varlen_attention_with_sink", signature, "7de4263c3b5e9797")
    signature = "(q, k, v, varlen, *, softcap=-1.0, sink=None)"
    _, _, original = stock_function(attention, "packed_attention_with_sink", signature, "332d2c787c2baab6")
    replacement = make_packed_attention(original, attention)
    return [Binding(module, name, original, replacement) for module, name in imports_of(original, HOST)]


def _moe() -> list[Binding]:
    _require_refused_musa()
    signature = "(x, gather_ids, probs, expert_offsets, w_gate, w_up, w_down, *, deterministic=False)"
    # The argument is what counts: the body stays the host's.
    _, _, original = stock_function(load(f"{MAGI2}.mh_moe"), "triton_mh_moe_forward", signature, None)
    replacement = make_moe_kernel(original)
    return [Binding(module, name, original, replacement) for module, name in imports_of(original, HOST)]


_HOSTS = "vLLM-Omni 0.30.0 and others whose pipeline requires CUDA, on a MUSA platform (simulated, never run on a card)"
_UNTIL = "a vLLM-Omni whose MAGI-2 supports MUSA"

RECORDS = (
    Record(
        name="magi2.musa_device",
        replaces=f"{PIPELINE}:current_omni_platform",
        why="the pipeline refuses every platform but CUDA, and synchronises and measures memory on CUDA only",
        how="in that module alone the name stands for the platform and answers for MUSA where it is asked for CUDA",
        hosts=_HOSTS,
        until=_UNTIL,
        bindings=_device,
    ),
    Record(
        name="magi2.musa_attention",
        replaces=f"{MAGI2}.attention:packed_attention_with_sink",
        why="MUSA tensors may claim to be CUDA tensors and must not reach the bundled CUDA FlashAttention",
        how="the module's own dense reference for MUSA tensors, in slices of queries whose scores stay under 1 GiB; "
        "slow: it lets the model start, it is no optimised attention",
        hosts=_HOSTS,
        until=_UNTIL,
        bindings=_attention,
    ),
    Record(
        name="magi2.musa_moe",
        replaces=f"{MAGI2}.mh_moe:triton_mh_moe_forward",
        why="the kernel's atomic add of bfloat16 is not supported by MUSA's Triton",
        how="asks for the kernel's output without atomics for bfloat16 on MUSA; everything else as before",
        hosts=_HOSTS,
        until=_UNTIL,
        bindings=_moe,
    ),
)
