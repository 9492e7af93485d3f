"""Layout + tensors -> what goes to and comes from each peer.

One idea carries every exchange: per peer a box of tokens x heads to send and one to receive. There are two
sides to a layout, and they are the same for both directions:

    outer   my tokens, all heads     [local_tokens, heads, dim]          send side of dispatch, receive side of return
    inner   all tokens, my heads     [owned_tokens, local_heads, dim]    receive side of dispatch, send side of return

A batch is the same box in each of its elements. Suffixes below: B batch, T tokens, H heads, D dim, P peers. A
*message* is what one peer sends to another: their boxes of all parts (Q, K and V, say) side by side on the head
axis, `[B, T, sum(H), D]`, flat. A *wire* is a flat buffer of messages in ascending peer order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .layout import HeadParallelLayout, offsets


@dataclass(frozen=True)
class Box:
    """A block of one tensor `[tokens, heads, dim]`, whole in dim."""

    tokens: slice
    heads: slice

    @cached_property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)

    @cached_property
    def num_heads(self) -> int:
        return int(self.heads.stop - self.heads.start)


@dataclass(frozen=True)
class Run:
    """Consecutive messages that one strided copy per part moves.

    Either `columns` messages of the same tokens whose heads follow each other in equal steps, or (with
    one column and no batch) messages of the same heads whose tokens follow each other.
    """

    start: int  # elements into the wire
    numel: int
    columns: int
    boxes: tuple[Box, ...]  # per part: all the run's tokens x all the run's heads

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int, int], ...]:
        """Per part: tokens, heads of one column, first token, first head."""
        return tuple(
            (box.num_tokens, box.num_heads // self.columns, box.tokens.start, box.heads.start) for box in self.boxes
        )


@dataclass(frozen=True, eq=False)
class Grid:
    """The boxes of one side, integers only.

    Args:
        rank: the rank whose side this is.
        boxes: `boxes[peer][part]`. Boxes of one peer have the same tokens in every part.
        shapes: per part `(tokens, heads)`.
        dim: elements per head.
        batch: elements of the batch axis, 1 without one.
    """

    rank: int
    boxes: tuple[tuple[Box, ...], ...]
    shapes: tuple[tuple[int, int], ...]
    dim: int
    batch: int = 1

    @cached_property
    def numel(self) -> tuple[int, ...]:
        """Elements of each peer's message."""
        row = self.dim * self.batch
        return tuple(sum(box.num_tokens * box.num_heads for box in boxes) * row for boxes in self.boxes)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Of the one part of a side that has one: tokens, heads, dim."""
        ((tokens, heads),) = self.shapes
        return tokens, heads, self.dim

    @cached_property
    def sizes(self) -> list[int]:
        """`numel` as the list that collectives take. Not to be changed."""
        return list(self.numel)

    @cached_property
    def total(self) -> int:
        """Elements of all messages."""
        return sum(self.numel)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each peer's message starts in the wire of all peers, in elements; last, where it ends."""
        return offsets(self.numel)

    @cached_property
    def is_wire(self) -> bool:
        """Whether a contiguous batch element of this side already is the wire of all peers for that element."""
        if len(self.shapes) != 1:
            return False
        (_, heads) = self.shapes[0]
        for (box,), numel, start in zip(self.boxes, self.numel, self.starts, strict=False):
            rows = box.num_heads == heads or box.num_tokens == 1
            if numel and not (rows and (box.tokens.start * heads + box.heads.start) * self.dim * self.batch == start):
                return False
        return True

    @cached_property
    def all_runs(self) -> tuple[Run, ...]:
        """The runs of the wire of all peers."""
        return self.runs(range(len(self.boxes)))

    @cached_property
    def other_runs(self) -> tuple[Run, ...]:
        """The runs of the wire of all peers but this rank itself."""
        return self.runs([peer for peer in range(len(self.boxes)) if peer != self.rank])

    @cached_property
    def peer_runs(self) -> tuple[tuple[Run, ...], ...]:
        """Per peer, the runs of its message alone: none or one."""
        return tuple(self.runs([peer]) for peer in range(len(self.boxes)))

    def runs(self, peers: Sequence[int]) -> tuple[Run, ...]:
        """As few runs as the boxes of these peers allow. Empty messages are no part of any."""
        found: list[Run] = []
        start = 0
        for peer in peers:
            if not self.numel[peer]:
                continue
            joined = _join(found[-1], self.boxes[peer], self.numel[peer], self.batch) if found else None
            if joined is not None:
                found[-1] = joined
            else:
                found.append(Run(start, self.numel[peer], 1, self.boxes[peer]))
            start += self.numel[peer]
        return tuple(found)


def _join(run: Run, boxes: tuple[Box, ...], numel: int, batch: int) -> Run | None:
    """`run` with one more message, where that still is one strided copy."""
    pairs = list(zip(run.boxes, boxes, strict=True))
    if all(
        last.tokens == box.tokens
        and last.heads.stop == box.heads.start
        and last.num_heads == run.columns * box.num_heads
        for last, box in pairs
    ):
        wider = tuple(Box(box.tokens, slice(last.heads.start, box.heads.stop)) for last, box in pairs)
        return Run(run.start, run.numel + numel, run.columns + 1, wider)
    if batch == run.columns == 1 and all(
        last.heads == box.heads and last.tokens.stop == box.tokens.start for last, box in pairs
    ):
        longer = tuple(Box(slice(last.tokens.start, box.tokens.stop), box.heads) for last, box in pairs)
        return Run(run.start, run.numel + numel, 1, longer)
    return None


@dataclass(frozen=True, eq=False)
class Plan:
    """Both sides of a layout for tensors of given head counts and dim."""

    outer: Grid
    inner: Grid
    numel: int  # elements that the tensors of all ranks have together


@lru_cache(maxsize=512)
def plan(layout: HeadParallelLayout, heads: tuple[int, ...], dim: int, batch: int = 1) -> Plan:
    """The boxes of an exchange, cached; no tensors.

    Args:
        layout: whose tokens and heads.
        heads: heads of each part of the outer side, all shards together. The inner side has one part.
        dim: elements per head.
        batch: elements of the batch axis.
    """
    shard_starts = [offsets(shard_heads(layout, part_heads)) for part_heads in heads]
    token_starts = offsets(layout.local_parts)
    owned_starts = offsets(layout.owned_counts)
    ranks = range(layout.world_size)

    def outer_boxes(peer: int) -> tuple[Box, ...]:
        replica, shard = divmod(peer, layout.shards)
        tokens = slice(token_starts[replica], token_starts[replica + 1])
        return tuple(Box(tokens, slice(starts[shard], starts[shard + 1])) for starts in shard_starts)

    shard = layout.rank % layout.shards
    local_heads = sum(starts[shard + 1] - starts[shard] for starts in shard_starts)

    def inner_box(peer: int) -> Box:
        return Box(slice(owned_starts[peer], owned_starts[peer + 1]), slice(0, local_heads))

    return Plan(
        outer=Grid(
            layout.rank,
            tuple(outer_boxes(peer) for peer in ranks),
            tuple((layout.local_tokens, part_heads) for part_heads in heads),
            dim,
            batch,
        ),
        inner=Grid(
            layout.rank,
            tuple((inner_box(peer),) for peer in ranks),
            ((layout.owned_tokens, local_heads),),
            dim,
            batch,
        ),
        numel=layout.total_tokens * sum(heads) * dim * batch,
    )


def shard_heads(layout: HeadParallelLayout, heads: int) -> tuple[int, ...]:
    """Heads of each shard of a tensor with `heads` heads: the layout's own counts, else equal shards."""
    if layout.head_counts is not None:
        return layout.head_counts
    return (heads // layout.shards,) * layout.shards


class Side:
    """One side of an exchange: tensors in the boxes of a grid.

    Args:
        grid: the boxes.
        parts: one tensor `[tokens, heads, dim]` or `[batch, tokens, heads, dim]` per part of the grid, of any strides.
        dtype: element type on the wire; parts of another type are converted by the copy.
        fresh: the one part has just been allocated, contiguous.

    Attributes:
        flat: 1-D alias of the wire of all peers, where the parts already are that: nothing to copy.
        rows: per batch element, 1-D alias of the wire of all peers for that element, where the part's memory is
            that: nothing to copy either for who sends a message per batch element. Without a batch, `(flat,)`.
    """

    __slots__ = ("dtype", "flat", "grid", "parts", "rows")

    def __init__(self, grid: Grid, parts: tuple[Tensor, ...], dtype: torch.dtype, *, fresh: bool = False) -> None:
        self.grid = grid
        self.parts = parts
        self.dtype = dtype
        self.flat: Tensor | None = None
        self.rows: tuple[Tensor, ...] | None = None
        if grid.is_wire and (fresh or _has_wire_bytes(parts[0], dtype)):
            # Not view(-1): of a single element it may keep a stride other than 1.
            if grid.batch == 1:
                self.flat = parts[0].as_strided((grid.total,), (1,))
                self.rows = (self.flat,)
            else:
                (part,), shape = parts, (grid.total // grid.batch,)
                start, step = part.storage_offset(), part.stride(0)
                self.rows = tuple(part.as_strided(shape, (1,), start + step * b) for b in range(grid.batch))

    def staging(self, runs: tuple[Run, ...]) -> Tensor:
        """An uninitialised wire of these runs, on the parts' device."""
        numel = sum(run.numel for run in runs)
        return torch.empty(numel, dtype=self.dtype, device=self.parts[0].device)

    def packed(self, runs: tuple[Run, ...]) -> Tensor:
        """A new wire of these runs with the boxes copied into it."""
        if len(runs) == 1 and len(self.parts) == 1 and _is_plain(self.parts[0], self.dtype):
            return self._box(self.parts[0], runs[0], 0).clone(memory_format=torch.contiguous_format).view(-1)
        wire = self.staging(runs)
        self.pack(wire, runs)
        return wire

    def pack(self, wire: Tensor, runs: tuple[Run, ...]) -> None:
        """Copy the boxes of these runs into their wire, one strided copy per run and part."""
        for run in runs:
            for message, box in self._views(wire, run):
                message.copy_(box)

    def unpack(self, wire: Tensor, runs: tuple[Run, ...]) -> None:
        """Copy the wire of these runs into their boxes, one strided copy per run and part."""
        for run in runs:
            for message, box in self._views(wire, run):
                box.copy_(message)

    def box(self, part: int, box: Box) -> Tensor:
        """The view `[tokens, heads, dim]`, or with the batch in front, of one box."""
        tokens = self.parts[part].narrow(-3, box.tokens.start, box.num_tokens)
        return tokens.narrow(-2, box.heads.start, box.num_heads)

    def _views(self, wire: Tensor, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
        """Per part the same elements `[P, B, T, H, D]`, once in the wire and once in the part.

        `as_strided`, since each view on the way costs a small exchange about as much as the copy itself.
        """
        tokens, batch, dim = run.pieces[0][0], self.grid.batch, self.grid.dim
        element = run.numel // (run.columns * batch)  # elements of one batch element in a message
        row = element // tokens  # and of one token in it
        start = wire.storage_offset() + run.start
        strides = (batch * element, element, row, dim, 1)
        for part, tensor in enumerate(self.parts):
            heads = run.pieces[part][1]
            yield (
                wire.as_strided((run.columns, batch, tokens, heads, dim), strides, start),
                self._box(tensor, run, part),
            )
            start += heads * dim

    def _box(self, tensor: Tensor, run: Run, part: int) -> Tensor:
        """A run's elements in one part, `[P, B, T, H, D]`."""
        tokens, heads, first_token, first_head = run.pieces[part]
        *stride_B, stride_T, stride_H, stride_D = tensor.stride()
        return tensor.as_strided(
            (run.columns, self.grid.batch, tokens, heads, self.grid.dim),
            (heads * stride_H, stride_B[0] if stride_B else 0, stride_T, stride_H, stride_D),
            tensor.storage_offset() + first_token * stride_T + first_head * stride_H,
        )


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor's elements in memory are those of `dtype` that it stands for."""
    return tensor.dtype == dtype and not tensor.is_conj() and not tensor.is_neg()


def _has_wire_bytes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of each batch element, read in order, is its elements in `dtype`."""
    if not _is_plain(tensor, dtype):
        return False
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.shape[0] > 0 and tensor[0].is_contiguous())


class Exchange:
    """What an implementation gets: two sides, and the tensor that the receive side makes.

    Args:
        name: "dispatch" or "return".
        send: what goes out. Owned by the caller, not to be written.
        recv: where it arrives, freshly allocated memory.
        layout: whose tokens and heads.
        numel: elements that the tensors of all ranks have together, the same number on every rank.
        result: what the caller gets; the receive side's parts are this tensor or views of it.

    Attributes:
        rank: this rank in the group.
    """

    __slots__ = ("layout", "name", "numel", "rank", "recv", "result", "send")

    def __init__(
        self, name: str, send: Side, recv: Side, layout: HeadParallelLayout, numel: int, result: Tensor
    ) -> None:
        self.name = name
        self.layout = layout
        self.send = send
        self.recv = recv
        self.numel = numel
        self.rank = recv.grid.rank
        self.result = result

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.send.grid.boxes)

    def copy_own(self) -> None:
        """Move the rank's own block from the input to the result, box to box."""
        if not self.recv.grid.numel[self.rank]:
            return
        sources = [self.send.box(part, box) for part, box in enumerate(self.send.grid.boxes[self.rank])]
        targets = [self.recv.box(part, box) for part, box in enumerate(self.recv.grid.boxes[self.rank])]
        # Where one side has several parts, the other has one, with theirs side by side.
        if len(sources) > len(targets):
            targets = list(torch.split(targets[0], [source.shape[-2] for source in sources], dim=-2))
        elif len(targets) > len(sources):
            sources = list(torch.split(sources[0], [target.shape[-2] for target in targets], dim=-2))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def __str__(self) -> str:
        shapes = ", ".join(str(list(part.shape)) for part in self.send.parts)
        return f"head-parallel {self.name} of {shapes} {self.result.dtype} on rank {self.rank} of {self.world_size}"


def dispatch(
    parts: tuple[Tensor, ...], layout: HeadParallelLayout, dtype: torch.dtype, room: int | None = None
) -> Exchange:
    """The exchange `[local_tokens, heads_i, dim]` each -> `[owned_tokens, sum of local heads_i, dim]`.

    With a batch, both have it in front. The result is allocated here, uninitialised.

    Args:
        room: heads of the result where they are to be more than those that arrive: zero heads behind them.
    """
    first = parts[0]
    heads = (first.shape[-2],) if len(parts) == 1 else tuple(part.shape[-2] for part in parts)
    leading = first.shape[:-3]
    sides = plan(layout, heads, first.shape[-1], leading[0] if leading else 1)
    tokens, local_heads, dim = sides.inner.shape
    if room is None or room == local_heads:
        result = arriving = first.new_empty((*leading, tokens, local_heads, dim), dtype=dtype)
    else:
        result = first.new_empty((*leading, tokens, room, dim), dtype=dtype)
        arriving = result.narrow(-2, 0, local_heads)
        result.narrow(-2, local_heads, room - local_heads).zero_()
    recv = Side(sides.inner, (arriving,), dtype, fresh=arriving is result)
    return Exchange("dispatch", Side(sides.outer, parts, dtype), recv, layout, sides.numel, result)


def undispatch(tensor: Tensor, layout: HeadParallelLayout, heads: int, parts: int = 1) -> Exchange:
    """The exchange `[owned_tokens, local_heads, dim] -> [local_tokens, heads, dim]`, dispatch reversed.

    With a batch, both have it in front. The result is allocated here, uninitialised.

    Args:
        heads: heads of each part, all shards together.
        parts: parts that lie side by side in the tensor; more than one make a result
            `[local_tokens, parts, heads, dim]`.
    """
    leading, dim = tensor.shape[:-3], tensor.shape[-1]
    sides = plan(layout, (heads,) * parts, dim, leading[0] if leading else 1)
    send = Side(sides.inner, (tensor,), tensor.dtype)
    if parts == 1:
        result = tensor.new_empty((*leading, layout.local_tokens, heads, dim))
        recv = Side(sides.outer, (result,), tensor.dtype, fresh=True)
    else:
        result = tensor.new_empty((*leading, layout.local_tokens, parts, heads, dim))
        recv = Side(sides.outer, result.unbind(-3), tensor.dtype)
    return Exchange("return", send, recv, layout, sides.numel, result)


# --- Head shards: the wire itself as a tensor ---


def dispatch_shards(wire: Tensor, layout: HeadParallelLayout) -> Exchange:
    """The exchange of a contiguous send buffer `[shards, local_tokens, local_heads, dim]`, sent in place.

    The result is `[owned_tokens, local_heads, dim]`, as of a dispatch.
    """
    sides, send = _with_wire(wire, layout)
    result = wire.new_empty(sides.inner.shape)
    recv = Side(sides.inner, (result,), wire.dtype, fresh=True)
    return Exchange("dispatch", send, recv, layout, sides.numel, result)


def undispatch_shards(tensor: Tensor, layout: HeadParallelLayout) -> Exchange:
    """The exchange `[owned_tokens, local_heads, dim] -> [local_tokens, shards, local_heads, dim]`.

    The result is the receive buffer `[shards, local_tokens, local_heads, dim]` itself, permuted.
    """
    _, heads, dim = tensor.shape
    wire = tensor.new_empty((layout.shards, layout.local_tokens, heads, dim))
    sides, recv = _with_wire(wire, layout)
    send = Side(sides.inner, (tensor,), tensor.dtype)
    return Exchange("return", send, recv, layout, sides.numel, wire.permute(1, 0, 2, 3))


def _with_wire(wire: Tensor, layout: HeadParallelLayout) -> tuple[Plan, Side]:
    """The plan of a layout without replicas, and the outer side as its wire: a block of tokens per shard."""
    shards, tokens, heads, dim = wire.shape
    return plan(layout, (shards * heads,), dim), Side(
        _wire_grid(layout.rank, shards, tokens, heads, dim), (wire.view(-1, heads, dim),), wire.dtype, fresh=True
    )


@lru_cache(maxsize=512)
def _wire_grid(rank: int, shards: int, tokens: int, heads: int, dim: int) -> Grid:
    boxes = tuple((Box(slice(shard * tokens, (shard + 1) * tokens), slice(0, heads)),) for shard in range(shards))
    return Grid(rank, boxes, ((shards * tokens, heads),), dim, 1)
