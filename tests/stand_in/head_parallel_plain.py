"""The host's own exchange, as first published: no replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class HeadParallelLayout:
    token_counts: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.token_counts, tuple) or not self.token_counts:
            raise ValueError(f"token_counts must be a non-empty tuple, got {self.token_counts!r}")
        if not 0 <= self.rank < len(self.token_counts):
            raise ValueError(f"rank {self.rank} does not index {self.token_counts}")

    @property
    def world_size(self) -> int:
        return len(self.token_counts)

    @property
    def local_tokens(self) -> int:
        return self.token_counts[self.rank]

    @property
    def total_tokens(self) -> int:
        return sum(self.token_counts)

    def validate_group(self, group: Any) -> None:
        if group is None and self.world_size > 1:
            raise ValueError("more than one rank needs a caller-owned process group")
        if group is not None and (dist.get_world_size(group), dist.get_rank(group)) != (self.world_size, self.rank):
            raise ValueError("process group size/rank differ from the layout's")


def scatter_heads_gather_tokens(tensor: torch.Tensor, group: Any, layout: HeadParallelLayout) -> torch.Tensor:
    layout.validate_group(group)
    if tensor.ndim != 3 or tensor.shape[0] != layout.local_tokens or tensor.shape[1] % layout.world_size:
        raise ValueError(f"the layout does not fit a tensor {list(tensor.shape)}")
    if layout.world_size == 1:
        return tensor
    local_heads, dim = tensor.shape[1] // layout.world_size, tensor.shape[2]
    send = torch.cat([block.reshape(-1) for block in tensor.split(local_heads, dim=1)])
    received = tensor.new_empty(layout.total_tokens * local_heads * dim)
    dist.all_to_all_single(
        received,
        send,
        output_split_sizes=[count * local_heads * dim for count in layout.token_counts],
        input_split_sizes=[layout.local_tokens * local_heads * dim] * layout.world_size,
        group=group,
    )
    return received.view(layout.total_tokens, local_heads, dim)


def scatter_tokens_gather_heads(tensor: torch.Tensor, group: Any, layout: HeadParallelLayout) -> torch.Tensor:
    layout.validate_group(group)
    if tensor.ndim != 3 or tensor.shape[0] != layout.total_tokens:
        raise ValueError(f"the layout does not fit a tensor {list(tensor.shape)}")
    if layout.world_size == 1:
        return tensor
    _, local_heads, dim = tensor.shape
    received = tensor.new_empty(layout.world_size * layout.local_tokens * local_heads * dim)
    dist.all_to_all_single(
        received,
        tensor.contiguous().view(-1),
        output_split_sizes=[layout.local_tokens * local_heads * dim] * layout.world_size,
        input_split_sizes=[count * local_heads * dim for count in layout.token_counts],
        group=group,
    )
    return torch.cat(list(received.view(layout.world_size, layout.local_tokens, local_heads, dim)), dim=1)
