"""The host's own exchange, as published later: head shards may be replicated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class HeadParallelLayout:
    token_counts: tuple[int, ...]
    rank: int
    replica_counts: tuple[tuple[int, ...], ...] | None = None

    @property
    def world_size(self) -> int:
        return len(self.token_counts)

    @property
    def replicas(self) -> int:
        return 1 if self.replica_counts is None else len(self.replica_counts[0])

    @property
    def shards(self) -> int:
        return self.world_size // self.replicas

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return self.replica_counts or tuple((count,) for count in self.token_counts)

    @property
    def local_tokens(self) -> int:
        return self.token_counts[self.rank]

    @property
    def total_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def local_parts(self) -> tuple[int, ...]:
        return self.parts[self.rank]

    @property
    def owned_counts(self) -> tuple[int, ...]:
        return tuple(parts[self.rank // self.shards] for parts in self.parts)

    @property
    def owned_tokens(self) -> int:
        return sum(self.owned_counts)

    def validate_group(self, group: Any) -> None:
        if group is None and self.world_size > 1:
            raise ValueError("more than one rank needs a caller-owned process group")
        if group is not None and (dist.get_world_size(group), dist.get_rank(group)) != (self.world_size, self.rank):
            raise ValueError("process group size/rank differ from the layout's")


@lru_cache
def replica_token_counts(token_counts: tuple[int, ...], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Only what these tests need of it: each rank's tokens in equal parts, odd ones on early parts."""
    if replicas < 1 or len(token_counts) % replicas:
        raise ValueError(f"{replicas} replicas do not divide {len(token_counts)} ranks")
    return tuple(tuple((count + replicas - 1 - i) // replicas for i in range(replicas)) for count in token_counts)


def scatter_heads_gather_tokens(tensor: torch.Tensor, group: Any, layout: HeadParallelLayout) -> torch.Tensor:
    layout.validate_group(group)
    if tensor.ndim != 3 or tensor.shape[0] != layout.local_tokens or tensor.shape[1] % layout.shards:
        raise ValueError(f"the layout does not fit a tensor {list(tensor.shape)}")
    if layout.world_size == 1:
        return tensor
    local_heads, dim = tensor.shape[1] // layout.shards, tensor.shape[2]
    blocks = [
        part[:, shard * local_heads : (shard + 1) * local_heads].reshape(-1)
        for part in tensor.split(list(layout.local_parts))
        for shard in range(layout.shards)
    ]
    received = tensor.new_empty(layout.owned_tokens * local_heads * dim)
    dist.all_to_all_single(
        received,
        torch.cat(blocks),
        output_split_sizes=[count * local_heads * dim for count in layout.owned_counts],
        input_split_sizes=[block.numel() for block in blocks],
        group=group,
    )
    return received.view(layout.owned_tokens, local_heads, dim)


def scatter_tokens_gather_heads(tensor: torch.Tensor, group: Any, layout: HeadParallelLayout) -> torch.Tensor:
    layout.validate_group(group)
    if tensor.ndim != 3 or tensor.shape[0] != layout.owned_tokens:
        raise ValueError(f"the layout does not fit a tensor {list(tensor.shape)}")
    if layout.world_size == 1:
        return tensor
    _, local_heads, dim = tensor.shape
    sizes = [count * local_heads * dim for count in layout.local_parts for _ in range(layout.shards)]
    received = tensor.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        tensor.contiguous().view(-1),
        output_split_sizes=sizes,
        input_split_sizes=[count * local_heads * dim for count in layout.owned_counts],
        group=group,
    )
    blocks = [block.view(-1, local_heads, dim) for block in received.split(sizes)]
    parts = [
        torch.cat(blocks[part * layout.shards : (part + 1) * layout.shards], dim=1) for part in range(layout.replicas)
    ]
    return torch.cat(parts)
