"""The exchange in plain Python: the measure for all tests.

A tensor is a nested list `[tokens][heads]` of opaque head values; nothing here slices tensors. `inputs` and
`outputs` are lists over the ranks of a group. Below the model: what the tests need to bring tensors to it.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from vllm_musa_headpar import log
from vllm_musa_headpar.layout import HeadParallelLayout

Heads = list[Any]
Tokens = list[Heads]


def shard_range(heads: int, shard: int, shards: int, head_counts: Sequence[int] | None) -> range:
    """The heads of a shard: its own count after those of the shards before it."""
    counts = list(head_counts) if head_counts is not None else [heads // shards] * shards
    start = sum(counts[:shard])
    return range(start, start + counts[shard])


def part_range(parts: Sequence[Sequence[int]], rank: int, part: int) -> range:
    """The tokens of one part of a rank."""
    start = sum(parts[rank][:part])
    return range(start, start + parts[rank][part])


def dispatch(
    inputs: list[Tokens], parts: Sequence[Sequence[int]], heads: int, head_counts: Sequence[int] | None = None
) -> list[Tokens]:
    """What each rank has after a dispatch: its part of every rank's tokens, ranks in order, its heads."""
    shards = len(parts) // len(parts[0])
    outputs = []
    for rank in range(len(parts)):
        own = shard_range(heads, rank % shards, shards, head_counts)
        outputs.append(
            [
                [inputs[source][token][head] for head in own]
                for source in range(len(parts))
                for token in part_range(parts, source, rank // shards)
            ]
        )
    return outputs


def undispatch(
    inputs: list[Tokens], parts: Sequence[Sequence[int]], heads: int, head_counts: Sequence[int] | None = None
) -> list[Tokens]:
    """What each rank has after a return: its own tokens in order, the heads of all shards."""
    ranks, replicas = len(parts), len(parts[0])
    shards = ranks // replicas
    outputs = []
    for rank in range(ranks):
        tokens: Tokens = []
        for part in range(replicas):
            for index in range(parts[rank][part]):
                token: Heads = []
                for shard in range(shards):
                    owner = part * shards + shard
                    before = sum(parts[source][part] for source in range(rank))
                    own = shard_range(heads, shard, shards, head_counts)
                    token += [inputs[owner][before + index][position] for position in range(len(own))]
                tokens.append(token)
        outputs.append(tokens)
    return outputs


# --- Layouts ------------------------------------------------------------------------------------------


def random_layouts(rng: random.Random, ranks: int, most: int = 6) -> tuple[list[HeadParallelLayout], int]:
    """One layout as every rank has it, and a number of heads that fits."""
    replicas = rng.choice([divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0])
    shards = ranks // replicas
    parts = tuple(tuple(rng.choice((0, 1, rng.randint(0, most))) for _ in range(replicas)) for _ in range(ranks))
    counts = tuple(map(sum, parts))
    head_counts = None
    heads = shards * rng.randint(1, 3)
    if rng.random() < 0.3:
        head_counts = tuple(rng.randint(0, 3) for _ in range(shards))
        if not sum(head_counts):
            head_counts = (*head_counts[:-1], 1)
        heads = sum(head_counts)
    replica_counts = parts if replicas > 1 or rng.random() < 0.5 else None
    layouts = [
        HeadParallelLayout(counts, rank, replica_counts=replica_counts, head_counts=head_counts)
        for rank in range(ranks)
    ]
    return layouts, heads


# --- Tensors ------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> Tokens:
    """A tensor `[tokens, heads, dim]` of any device as `[tokens][heads]` of bytes."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    rows = plain.view(torch.uint8).reshape(*plain.shape[:2], plain.shape[2] * plain.element_size()).tolist()
    return [[bytes(head) for head in token] for token in rows]


def random_tensor(seed: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits of a type, NaN payloads, infinities and denormals among them; the same for the same seed."""
    rng = random.Random(seed)
    raw = bytearray(rng.randbytes(tokens * heads * dim * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(tokens, heads, dim, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(tokens, heads, dim)


STYLES = ("contiguous", "transposed", "sliced", "strided", "offset")


def in_style(tensor: torch.Tensor, style: str) -> torch.Tensor:
    """The same elements, laid out in memory in another way."""
    tokens, heads, dim = tensor.shape
    if style == "transposed":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if style == "sliced":
        wide = tensor.new_zeros((tokens, heads + 3, dim))
        wide[:, 1 : heads + 1] = tensor
        return wide[:, 1 : heads + 1]
    if style == "strided":
        wide = tensor.new_zeros((tokens, heads, 2 * dim))
        wide[:, :, ::2] = tensor
        return wide[:, :, ::2]
    if style == "offset":
        longer = tensor.new_zeros((tokens + 2, heads, dim))
        longer[2:] = tensor
        return longer[2:]
    return tensor.contiguous()


# --- Groups -------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


class CollectiveLaunched(AssertionError):
    """A collective was called where none may be."""


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Inside the block every function of torch.distributed that communicates fails the test."""

    def forbidden(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            raise CollectiveLaunched(f"torch.distributed.{name} was called")

        return call

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, forbidden(name)))
        yield


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """The package's warnings inside the block, also those that this process has given before."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    with mock.patch.object(log, "_said", set()):
        log.logger.addHandler(handler)
        try:
            yield seen
        finally:
            log.logger.removeHandler(handler)
