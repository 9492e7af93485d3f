from __future__ import annotations

import torch

from .parallel import Magi2ParallelGroup, ep_dispatch, ep_undispatch


class Magi2MultiHeadMoE(torch.nn.Module):
    """The exchange of the MoE layer around something that differs for each head."""

    def __init__(self, num_heads: int, d_head: int, ep_group: Magi2ParallelGroup, replicas: int = 1) -> None:
        super().__init__()
        self.num_heads, self.d_head, self.ep_group, self.replicas = num_heads, d_head, ep_group, replicas

    def _local_forward(self, heads: torch.Tensor) -> torch.Tensor:
        return heads * (1 + self.ep_group.rank % (self.ep_group.world_size // self.replicas))

    def forward(self, x: torch.Tensor, sequence_split_sizes: list[int] | None = None) -> torch.Tensor:
        heads = x.view(-1, self.num_heads, self.d_head)
        sizes = sequence_split_sizes or [heads.shape[0]] * self.ep_group.world_size
        routed = self._local_forward(ep_dispatch(heads, self.ep_group, sizes, self.replicas))
        return ep_undispatch(routed, self.ep_group, sizes, self.replicas).reshape(x.shape)
