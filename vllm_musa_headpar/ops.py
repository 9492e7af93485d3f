"""The exchange as the compiler sees it: one opaque operator per call, in the `torch.library` namespace `headpar`.

Traced code cannot look into an exchange, nor break its graph at one: groups go by name, shapes are symbolic, and
no result aliases an input. What an operator does when the graph runs, `exchange.py` gives; so a group settles at
its first exchange there too, and ranks may compile at different times.

Here W is the group's size. Optional lists are empty where there is nothing to say: `replica_counts` (flat, R per
rank), `head_counts` (W); `room` is -1 for the heads that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_library: Any = torch.library.Library("headpar", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "dispatch(Tensor[] parts, SymInt[] token_counts, SymInt[] replica_counts, SymInt[] head_counts, int rank, "
    "SymInt room, str group) -> Tensor"
)
_library.define(
    "dispatch_each(Tensor[] tensors, SymInt[] token_counts, SymInt[] head_counts, SymInt[] rooms, int rank, "
    "str group) -> Tensor[]"
)
_library.define(
    "undispatch(Tensor tensor, SymInt[] token_counts, SymInt[] replica_counts, SymInt[] head_counts, int rank, "
    "SymInt heads, int parts, str group) -> Tensor"
)


def implement(name: str, function: Callable[..., Any]) -> None:
    """Say what an operator does when a graph runs, on tensors of every device."""
    _library.impl(name, function, "CompositeExplicitAutograd")


def group_of(name: str) -> Any:
    """The process group of a name, which is how a graph refers to it."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name)


def dispatch(
    parts: Sequence[Tensor],
    token_counts: Sequence[int],
    rank: int,
    group: Any,
    *,
    replica_counts: Sequence[Sequence[int]] | None = None,
    head_counts: Sequence[int] | None = None,
    room: int | None = None,
) -> Tensor:
    """`exchange.dispatch` in traced code, `[(B,) T, H_i, D]` each -> `[(B,) owned_tokens, sum of local H_i, D]`."""
    result: Tensor = torch.ops.headpar.dispatch(
        [part.detach() for part in parts],
        token_counts,
        _flat(replica_counts),
        [] if head_counts is None else head_counts,
        rank,
        -1 if room is None else room,
        group.group_name,
    )
    return result


def dispatch_each(
    tensors: Sequence[Tensor],
    token_counts: Sequence[Sequence[int]],
    rank: int,
    group: Any,
    *,
    head_counts: Sequence[int] | None = None,
    room: int | None = None,
) -> list[Tensor]:
    """`exchange.dispatch_each` in traced code; tensors with head counts and room must be alike in their heads.

    Args:
        token_counts: per tensor, each rank's tokens.
    """
    results: list[Tensor] = torch.ops.headpar.dispatch_each(
        [tensor.detach() for tensor in tensors],
        _flat(token_counts),
        ([] if head_counts is None else list(head_counts)),
        [-1 if room is None else room] * len(tensors),
        rank,
        group.group_name,
    )
    return results


def undispatch(
    tensor: Tensor,
    token_counts: Sequence[int],
    rank: int,
    group: Any,
    heads: int,
    *,
    replica_counts: Sequence[Sequence[int]] | None = None,
    head_counts: Sequence[int] | None = None,
    parts: int = 1,
) -> Tensor:
    """`exchange.undispatch` in traced code, `[(B,) owned_tokens, local H, D] -> [(B,) T, (parts,) H, D]`."""
    result: Tensor = torch.ops.headpar.undispatch(
        tensor.detach(),
        token_counts,
        _flat(replica_counts),
        [] if head_counts is None else head_counts,
        rank,
        heads,
        parts,
        group.group_name,
    )
    return result


def rows_of(flat: Sequence[int], length: int) -> tuple[tuple[int, ...], ...]:
    """A flat list as rows of a length, the reverse of what the operators get."""
    return tuple(tuple(flat[start : start + length]) for start in range(0, len(flat), length))


def _flat(rows: Sequence[Sequence[int]] | None) -> list[int]:
    return [] if rows is None else [number for row in rows for number in row]


def _shape_of_result(
    tensor: Tensor, heads: int, token_counts: Sequence[int], replica_counts: Sequence[int], rank: int, room: int
) -> tuple[int, ...]:
    """`room` or `heads` heads, and the tokens that this rank's head shard owns."""
    ranks = len(token_counts)
    replicas = max(1, len(replica_counts) // ranks)
    part = rank // (ranks // replicas)
    owned = sum(replica_counts[part::replicas]) if replica_counts else sum(token_counts)
    return (*tensor.shape[:-3], owned, heads if room < 0 else room, tensor.shape[-1])


def _fake_dispatch(
    parts: Sequence[Tensor],
    token_counts: Sequence[int],
    replica_counts: Sequence[int],
    head_counts: Sequence[int],
    rank: int,
    room: int,
    group: str,
) -> Tensor:
    shards = len(token_counts) // max(1, len(replica_counts) // len(token_counts))
    heads = head_counts[rank % shards] if head_counts else sum(part.shape[-2] // shards for part in parts)
    shape = _shape_of_result(parts[0], heads, token_counts, replica_counts, rank, room)
    return parts[0].new_empty(shape, dtype=reduce(torch.promote_types, (part.dtype for part in parts)))


def _fake_dispatch_each(
    tensors: Sequence[Tensor],
    token_counts: Sequence[int],
    head_counts: Sequence[int],
    rooms: Sequence[int],
    rank: int,
    group: str,
) -> list[Tensor]:
    ranks = len(token_counts) // len(tensors)
    results = []
    for tensor, room, counts in zip(tensors, rooms, rows_of(token_counts, ranks), strict=True):
        heads = head_counts[rank] if head_counts else tensor.shape[-2] // ranks
        results.append(tensor.new_empty(_shape_of_result(tensor, heads, counts, (), rank, room)))
    return results


def _fake_undispatch(
    tensor: Tensor,
    token_counts: Sequence[int],
    replica_counts: Sequence[int],
    head_counts: Sequence[int],
    rank: int,
    heads: int,
    parts: int,
    group: str,
) -> Tensor:
    middle = () if parts == 1 else (parts,)
    return tensor.new_empty((*tensor.shape[:-3], token_counts[rank], *middle, heads, tensor.shape[-1]))


def _register_fakes() -> None:
    register: Any = torch.library.register_fake
    register("headpar::dispatch", _fake_dispatch, lib=_library)
    register("headpar::dispatch_each", _fake_dispatch_each, lib=_library)
    register("headpar::undispatch", _fake_undispatch, lib=_library)


_register_fakes()
