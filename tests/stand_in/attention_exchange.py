"""What `parallel.py` has in addition on hosts whose attention exchanges heads by itself. Written from descriptions."""

from __future__ import annotations

from typing import Any

import torch

Magi2ParallelGroup = Any

# --- appended ---


def get_magi2_ulysses_group() -> Magi2ParallelGroup:
    return Magi2ParallelGroup(None, 1, 0)


def pack_ulysses_head_shards(tensors: list[torch.Tensor], world_size: int) -> list[torch.Tensor]:
    """Views `[S, world_size, H_i, D]` of one send buffer `[world_size, S, all H, D]`."""
    tokens, _, dim = tensors[0].shape
    heads = [tensor.shape[1] // world_size for tensor in tensors]
    wire = tensors[0].new_empty(world_size, tokens, sum(heads), dim)
    views = list(wire.permute(1, 0, 2, 3).split(heads, dim=2))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor.view(tokens, world_size, -1, dim))
    return views


def scatter_heads_gather_seqlen(
    tensors: list[torch.Tensor], split_sizes: list[int], group: Magi2ParallelGroup | None = None
) -> list[torch.Tensor]:
    import torch.distributed as dist

    group = group or get_magi2_ulysses_group()
    tensors = list(tensors)
    if group.world_size == 1:
        return tensors
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors are on several devices")
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    packed = all(tensor.ndim == 4 for tensor in tensors)
    heads = [tensor.shape[2] if packed else tensor.shape[1] // group.world_size for tensor in tensors]
    tokens, dim = tensors[0].shape[0], tensors[0].shape[-1]
    if packed:
        shape = (group.world_size, tokens, sum(heads), dim)
        wire = tensors[0].as_strided(shape, (tokens * sum(heads) * dim, sum(heads) * dim, dim, 1))
    else:
        wire = torch.empty(group.world_size, tokens, sum(heads), dim, dtype=dtype, device=tensors[0].device)
        views = wire.permute(1, 0, 2, 3).split(heads, dim=2)
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor.reshape(tokens, group.world_size, -1, dim))
    received = torch.empty(sum(split_sizes), sum(heads), dim, dtype=wire.dtype, device=wire.device)
    sizes = [tokens] * group.world_size
    dist.all_to_all_single(received, wire.view(-1, sum(heads), dim), split_sizes, sizes, group=group.group)
    return list(received.split(heads, dim=1))


def scatter_seqlen_gather_head_shards(
    tensor: torch.Tensor, split_sizes: list[int], group: Magi2ParallelGroup | None = None
) -> torch.Tensor:
    import torch.distributed as dist

    group = group or get_magi2_ulysses_group()
    if group.world_size == 1:
        return tensor.unsqueeze(1)
    tokens = split_sizes[group.rank]
    received = tensor.new_empty(group.world_size * tokens, *tensor.shape[1:])
    sizes = [tokens] * group.world_size
    dist.all_to_all_single(received, tensor.contiguous(), sizes, split_sizes, group=group.group)
    return received.view(group.world_size, tokens, *tensor.shape[1:]).permute(1, 0, 2, 3)


def scatter_seqlen_gather_heads(
    tensor: torch.Tensor, split_sizes: list[int], group: Magi2ParallelGroup | None = None
) -> torch.Tensor:
    group = group or get_magi2_ulysses_group()
    if group.world_size == 1:
        return tensor
    return scatter_seqlen_gather_head_shards(tensor, split_sizes, group).flatten(1, 2)
