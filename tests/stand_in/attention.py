"""MAGI-2's attention where it exchanges heads by itself, around something that differs for each head."""

from __future__ import annotations

from typing import Any

import torch

from .parallel import (
    pack_ulysses_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)


def attend(qkv: list[torch.Tensor], split_sizes: list[int], group: Any, shards: bool) -> torch.Tensor:
    """`[S, ranks * H, D]` three times -> `[S, ranks * H, D]`, or as head shards `[S, ranks, H, D]`."""
    packed = pack_ulysses_head_shards(qkv, group.world_size) if shards else qkv
    q, k, v = scatter_heads_gather_seqlen(packed, split_sizes, group)
    output = ((q + k) * v * (1 + group.rank)).contiguous()
    back = scatter_seqlen_gather_head_shards if shards else scatter_seqlen_gather_heads
    return back(output, split_sizes, group)
