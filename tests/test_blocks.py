"""Boxes, grids and runs: all ranks of a group in one process, messages carried by hand, against the model."""

from __future__ import annotations

import random
from functools import reduce
from itertools import chain
from typing import Any

import model
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_musa_headpar import blocks
from vllm_musa_headpar.blocks import Box, Exchange
from vllm_musa_headpar.layout import HeadParallelLayout, replica_token_counts

pytestmark = pytest.mark.cpu

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]


class Copies(TorchDispatchMode):
    """How many copies a block makes, and how many tensors it allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.copies += name in ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat")
        self.allocations += name.startswith(
            ("aten::empty", "aten::new_empty", "aten::clone", "aten::_to_copy", "aten::cat")
        )
        return func(*args, **(kwargs or {}))


def wire_of(exchange: Exchange) -> torch.Tensor:
    send = exchange.send
    if send.flat is not None:
        return send.flat
    wire = torch.empty(send.grid.total, dtype=exchange.result.dtype)
    send.pack(wire, send.grid.all_runs)
    return wire


def carry(exchanges: list[Exchange]) -> list[torch.Tensor]:
    """Everything through wires of all peers, own messages included: as `all_to_all` does it."""
    wires = [wire_of(exchange) for exchange in exchanges]
    for rank, exchange in enumerate(exchanges):
        messages = []
        for source, wire in enumerate(wires):
            grid = exchanges[source].send.grid
            messages.append(wire[grid.starts[rank] : grid.starts[rank] + grid.numel[rank]])
            assert grid.numel[rank] == exchange.recv.grid.numel[source]
        incoming = torch.cat(messages)
        if exchange.recv.flat is not None:
            exchange.recv.flat.copy_(incoming)
        else:
            exchange.recv.unpack(incoming, exchange.recv.grid.all_runs)
    return [exchange.result for exchange in exchanges]


def carry_without_own(exchanges: list[Exchange]) -> list[torch.Tensor]:
    """Own blocks from box to box, the rest peer by peer through wires without them: as `p2p` does it."""
    wires = []
    for exchange in exchanges:
        grid = exchange.send.grid
        wire = torch.empty(grid.total - grid.numel[exchange.rank], dtype=exchange.result.dtype)
        exchange.send.pack(wire, grid.other_runs)
        wires.append(wire)
        exchange.copy_own()
    for rank, exchange in enumerate(exchanges):
        for source in range(len(exchanges)):
            grid = exchanges[source].send.grid
            if source == rank:
                continue
            start = grid.starts[rank] - (grid.numel[source] if rank > source else 0)
            message = wires[source][start : start + grid.numel[rank]]
            exchange.recv.unpack(message, exchange.recv.grid.peer_runs[source])
    return [exchange.result for exchange in exchanges]


CARRIERS = pytest.mark.parametrize("carrier", [carry, carry_without_own])


def tensors_for(
    seed: str, layouts: list[HeadParallelLayout], heads: int, dim: int, dtype: torch.dtype, style: str
) -> list[torch.Tensor]:
    return [
        model.in_style(model.random_tensor(f"{seed}/{layout.rank}", layout.local_tokens, heads, dim, dtype), style)
        for layout in layouts
    ]


def check_round_trip(
    layouts: list[HeadParallelLayout], heads: int, dim: int, dtype: torch.dtype, style: str, carrier: Any
) -> None:
    parts, head_counts = layouts[0].parts, layouts[0].head_counts
    inputs = tensors_for("there", layouts, heads, dim, dtype, style)
    there = carrier([blocks.dispatch((x,), layout, dtype) for x, layout in zip(inputs, layouts, strict=True)])
    plain = [model.bits(x) for x in inputs]
    expected = model.dispatch(plain, parts, heads, head_counts)
    assert [model.bits(x) for x in there] == expected
    assert all(x.is_contiguous() for x in there)
    restyled = [model.in_style(x, style) for x in there]
    back = carrier([blocks.undispatch(x, layout, heads) for x, layout in zip(restyled, layouts, strict=True)])
    assert [model.bits(x) for x in back] == model.undispatch(expected, parts, heads, head_counts) == plain


def layouts_of(
    counts: tuple[int, ...], replicas: int = 1, head_counts: tuple[int, ...] | None = None
) -> list[HeadParallelLayout]:
    parts = replica_token_counts(counts, replicas) if replicas > 1 else None
    return [HeadParallelLayout(counts, rank, parts, head_counts=head_counts) for rank in range(len(counts))]


@CARRIERS
@pytest.mark.parametrize("style", model.STYLES)
@pytest.mark.parametrize(
    ("counts", "replicas", "head_counts", "heads"),
    [
        ((3, 3, 3, 3), 1, None, 8),
        ((3, 0, 1, 5), 1, None, 4),
        ((0, 0, 1, 0), 1, None, 4),
        ((0, 0), 1, None, 2),
        ((1, 1), 1, None, 6),
        ((6, 2, 4, 0), 2, None, 6),
        ((9, 1, 0, 2), 4, None, 3),
        ((5, 1, 0, 3, 8, 2), 3, None, 4),
        ((2, 3, 4, 5), 1, (2, 2, 2, 0), 6),
        ((2, 3, 4, 5), 1, (0, 1, 0, 4), 5),
        ((6, 2, 4, 0), 2, (3, 1), 4),
    ],
)
def test_round_trips(
    counts: tuple[int, ...], replicas: int, head_counts: tuple[int, ...] | None, heads: int, style: str, carrier: Any
) -> None:
    check_round_trip(layouts_of(counts, replicas, head_counts), heads, 3, torch.float32, style, carrier)


@CARRIERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_keeps_its_bits(dtype: torch.dtype, carrier: Any) -> None:
    for style in ("contiguous", "transposed"):
        check_round_trip(layouts_of((2, 3, 0, 1)), 4, 5, dtype, style, carrier)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    dim=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    style=st.sampled_from(model.STYLES),
    carrier=st.sampled_from([carry, carry_without_own]),
)
def test_random_layouts(seed: int, ranks: int, dim: int, dtype: torch.dtype, style: str, carrier: Any) -> None:
    layouts, heads = model.random_layouts(random.Random(seed), ranks)
    check_round_trip(layouts, heads, dim, dtype, style, carrier)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.sampled_from([2, 3, 4, 6]),
    kinds=st.lists(
        st.tuples(
            st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
            st.integers(0, 3),
            st.sampled_from(model.STYLES),
        ),
        min_size=1,
        max_size=4,
    ),
    carrier=st.sampled_from([carry, carry_without_own]),
)
def test_several_parts_are_side_by_side_on_the_head_axis(
    seed: int, ranks: int, kinds: list[tuple[torch.dtype, int, str]], carrier: Any
) -> None:
    layouts, _ = model.random_layouts(random.Random(seed), ranks)
    layouts = [HeadParallelLayout(layout.token_counts, layout.rank, layout.replica_counts) for layout in layouts]
    shards, parts = layouts[0].shards, layouts[0].parts
    dtype = reduce(torch.promote_types, (kind for kind, _, _ in kinds))
    columns = [
        [model.in_style(torch.randn(layout.local_tokens, heads * shards, 3).to(kind), style) for layout in layouts]
        for kind, heads, style in kinds
    ]
    results = carrier(
        [blocks.dispatch(tuple(inputs), layout, dtype) for layout, *inputs in zip(layouts, *columns, strict=True)]
    )
    each = [
        model.dispatch([model.bits(x.to(dtype)) for x in column], parts, heads * shards)
        for column, (_, heads, _) in zip(columns, kinds, strict=True)
    ]
    for rank, result in enumerate(results):
        side_by_side = [list(chain(*heads)) for heads in zip(*(expected[rank] for expected in each), strict=True)]
        assert result.dtype == dtype
        assert model.bits(result) == side_by_side


@CARRIERS
def test_lazily_negated_and_conjugated_parts(carrier: Any) -> None:
    layouts = layouts_of((2, 1))
    whole = torch.randn(3, 4, 2, dtype=torch.complex64)
    for view in (whole.conj(), whole.conj().imag, whole.real):
        inputs = list(view.split([2, 1]))
        dtype = view.dtype
        results = carrier([blocks.dispatch((x,), layout, dtype) for x, layout in zip(inputs, layouts, strict=True)])
        assert [model.bits(x) for x in results] == model.dispatch([model.bits(x) for x in inputs], layouts[0].parts, 4)
        back = carrier([blocks.undispatch(x, layout, 4) for x, layout in zip(view.chunk(2, 1), layouts, strict=True)])
        assert torch.equal(torch.cat(back), view.resolve_conj().resolve_neg())


# --- Boxes ---------------------------------------------------------------------------------------------


def test_the_boxes_of_a_plain_layout() -> None:
    sides = blocks.plan(HeadParallelLayout((3, 0, 2), 2), (6,), 5)
    assert sides.outer.boxes == tuple((Box(slice(0, 2), slice(start, start + 2)),) for start in (0, 2, 4))
    assert sides.inner.boxes == tuple((Box(slice(*ends), slice(0, 2)),) for ends in ((0, 3), (3, 3), (3, 5)))
    assert (sides.outer.shapes, sides.inner.shapes) == (((2, 6),), ((5, 2),))
    assert (sides.outer.numel, sides.inner.numel) == ((20, 20, 20), (30, 0, 20))
    assert (sides.outer.starts, sides.inner.starts) == ((0, 20, 40, 60), (0, 30, 30, 50))


def test_the_boxes_of_replicas() -> None:
    layout = HeadParallelLayout((6, 2, 4, 0), 0, replica_token_counts((6, 2, 4, 0), 2))
    sides = blocks.plan(layout, (4,), 1)
    assert [box for (box,) in sides.outer.boxes] == [
        Box(slice(0, 5), slice(0, 2)),
        Box(slice(0, 5), slice(2, 4)),
        Box(slice(5, 6), slice(0, 2)),
        Box(slice(5, 6), slice(2, 4)),
    ]
    assert sides.inner.numel == (10, 2, 4, 0)


def test_plans_are_cached_and_hold_no_tensors() -> None:
    first = blocks.plan(HeadParallelLayout((3, 1), 0), (4,), 8)
    assert blocks.plan(HeadParallelLayout((3, 1), 0), (4,), 8) is first
    assert blocks.plan(HeadParallelLayout((3, 1), 1), (4,), 8) is not first


def test_a_plan_beyond_32_bits() -> None:
    sides = blocks.plan(HeadParallelLayout((2**40, 3, 2**33), 0), (6,), 256)
    assert sides.outer.numel == (2**49,) * 3
    assert sides.inner.numel == (2**49, 3 * 512, 2**42)
    assert sides.inner.starts == (0, 2**49, 2**49 + 1536, 2**49 + 1536 + 2**42)
    assert [run.numel for run in sides.outer.all_runs] == [3 * 2**49]
    assert [(run.start, run.numel) for run in sides.outer.other_runs] == [(0, 2**50)]


# --- Copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_regular_grid_is_packed_by_one_copy_and_by_two_without_the_own_block(ranks: int) -> None:
    for rank in range(ranks):
        layout = HeadParallelLayout((3,) * ranks, rank)
        exchange = blocks.dispatch((torch.randn(3, 2 * ranks, 4),), layout, torch.float32)
        grid = exchange.send.grid
        wire = torch.empty(grid.total)
        with Copies() as packed:
            exchange.send.pack(wire, grid.all_runs)
        with Copies() as others:
            exchange.send.pack(wire, grid.other_runs)
        assert (packed.copies, packed.allocations) == (1, 0)
        assert (others.copies, others.allocations) == (1 if rank in (0, ranks - 1) else 2, 0)

        back = blocks.undispatch(torch.randn(3 * ranks, 2, 4), layout, 2 * ranks)
        with Copies() as unpacked:
            back.recv.unpack(wire, back.recv.grid.all_runs)
        assert (unpacked.copies, unpacked.allocations) == (1, 0)


def test_several_parts_take_one_copy_each() -> None:
    parts = (torch.randn(3, 8, 4), torch.randn(3, 4, 4).bfloat16(), torch.randn(4, 3, 4).transpose(0, 1))
    exchange = blocks.dispatch(parts, HeadParallelLayout((3,) * 4, 1), torch.float32)
    grid = exchange.send.grid
    wire = torch.empty(grid.total)
    with Copies() as packed:
        exchange.send.pack(wire, grid.all_runs)
    with Copies() as others:
        exchange.send.pack(wire, grid.other_runs)
    assert (packed.copies, others.copies) == (3, 6)
    assert (packed.allocations, others.allocations) == (0, 0)


def test_replicas_take_one_copy_per_replica() -> None:
    layout = HeadParallelLayout((4, 4, 4, 4), 1, ((2, 2),) * 4)
    exchange = blocks.dispatch((torch.randn(4, 4, 3),), layout, torch.float32)
    with Copies() as packed:
        exchange.send.pack(torch.empty(exchange.send.grid.total), exchange.send.grid.all_runs)
    assert packed.copies == 2


def test_empty_messages_take_no_copy() -> None:
    layout = HeadParallelLayout((4, 0, 4), 0, head_counts=(2, 0, 2))
    exchange = blocks.dispatch((torch.randn(4, 4, 3),), layout, torch.float32)
    assert [len(runs) for runs in exchange.send.grid.peer_runs] == [1, 0, 1]
    empty = blocks.dispatch((torch.randn(0, 4, 3),), HeadParallelLayout((4, 0), 1), torch.float32)
    assert empty.send.grid.all_runs == empty.send.grid.other_runs == ()


# --- What already is wire format is used in place --------------------------------------------------------


def pointers(side: blocks.Side) -> tuple[int, int | None]:
    return side.parts[0].data_ptr(), None if side.flat is None else side.flat.data_ptr()


@pytest.mark.parametrize(("counts", "replicas"), [((3, 1, 4, 0), 1), ((6, 2, 4, 1), 2)])
def test_the_inner_side_is_never_copied(counts: tuple[int, ...], replicas: int) -> None:
    for layout in layouts_of(counts, replicas):
        shards = layout.shards
        with Copies() as seen:
            there = blocks.dispatch((torch.empty(layout.local_tokens, 2 * shards, 3),), layout, torch.float32)
            back = blocks.undispatch(torch.empty(layout.owned_tokens, 2, 3), layout, 2 * shards)
        assert seen.copies == 0
        assert seen.allocations == 4  # two inputs, two results
        for side in (there.recv, back.send):
            part, flat = pointers(side)
            assert part == flat
            assert side.flat is not None
            assert side.flat.shape == (layout.owned_tokens * 2 * 3,)
        assert there.recv.parts[0] is there.result


def test_the_outer_side_of_one_shard_or_one_token_is_wire_format() -> None:
    one_shard = HeadParallelLayout((4, 4), 0, ((2, 2), (2, 2)))
    one_token = HeadParallelLayout((1, 4), 0)
    for layout, tokens in ((one_shard, 4), (one_token, 1)):
        exchange = blocks.dispatch((torch.empty(tokens, 4, 3),), layout, torch.float32)
        part, flat = pointers(exchange.send)
        assert part == flat
    several = blocks.dispatch((torch.empty(4, 4, 3),), HeadParallelLayout((4, 4), 0), torch.float32)
    assert several.send.flat is None


def test_other_strides_or_types_are_not_wire_format() -> None:
    layout = HeadParallelLayout((2, 2), 0)
    whole = torch.randn(4, 2, 3, dtype=torch.complex64)
    for tensor in (whole.conj(), whole.conj().imag, model.in_style(whole, "sliced"), whole.transpose(1, 2)):
        assert blocks.undispatch(tensor, layout, 2 * tensor.shape[1]).send.flat is None
    one_part = HeadParallelLayout((2, 2), 0, ((1, 1), (1, 1)))
    assert blocks.dispatch((torch.ones(2, 2, 3),), one_part, torch.float64).send.flat is None


def test_an_exchange_tells_what_it_is() -> None:
    exchange = blocks.dispatch((torch.empty(3, 4, 2),), HeadParallelLayout((3, 1), 0), torch.float32)
    assert str(exchange) == "head-parallel dispatch of [3, 4, 2] torch.float32 on rank 0 of 2"
    assert exchange.world_size == 2
