"""MAGI-2's wrappers on a host that has the exchange: they only choose the group and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.diffusion.distributed import head_parallel
from vllm_omni.diffusion.distributed.head_parallel import (
    HeadParallelLayout,
    scatter_heads_gather_tokens,
    scatter_tokens_gather_heads,
)


@dataclass(frozen=True)
class Magi2ParallelGroup:
    group: Any
    world_size: int
    rank: int
    replicated_sequence: bool = False


def get_magi2_ep_group() -> Magi2ParallelGroup:
    return Magi2ParallelGroup(None, 1, 0)


def _layout(group: Magi2ParallelGroup, sizes: list[int], replicas: int) -> HeadParallelLayout:
    counts = tuple(sizes)
    if replicas == 1:
        return HeadParallelLayout(counts, group.rank)
    return HeadParallelLayout(counts, group.rank, head_parallel.replica_token_counts(counts, replicas))


def ep_dispatch(
    tensor: torch.Tensor, group: Magi2ParallelGroup | None, sequence_split_sizes: list[int], replicas: int = 1
) -> torch.Tensor:
    group = group or get_magi2_ep_group()
    return scatter_heads_gather_tokens(tensor, group.group, _layout(group, sequence_split_sizes, replicas))


def ep_undispatch(
    tensor: torch.Tensor, group: Magi2ParallelGroup | None, sequence_split_sizes: list[int], replicas: int = 1
) -> torch.Tensor:
    group = group or get_magi2_ep_group()
    return scatter_tokens_gather_heads(tensor, group.group, _layout(group, sequence_split_sizes, replicas))
