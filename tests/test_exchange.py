"""The two public functions on real ranks, with both implementations, bit for bit against the model.

The random sequences print the seed that failed: `HEADPAR_SEED=17 pytest tests/test_exchange.py -k sequences`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import model
import pytest
import torch
import torch.distributed as dist
from pool import environment, process_group

from vllm_musa_headpar import agreement, scatter_heads_gather_tokens, scatter_tokens_gather_heads
from vllm_musa_headpar.layout import HeadParallelLayout, replica_token_counts

pytestmark = pytest.mark.cpu

EXCHANGES = ("all_to_all", "p2p", "shared")
# What Gloo's all-to-all takes, and what it refuses and gets as bytes.
GLOO_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
MORE_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex128,
)
# Element types of MCCL on architecture 31.
MCCL_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass
class Place:
    """Where a rank is: a group, its members as global ranks, the device and the implementation in use."""

    group: Any
    members: tuple[int, ...]
    device: str = "cpu"
    exchange: str = "all_to_all"

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


@contextmanager
def using(exchange: str) -> Iterator[None]:
    with environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange):
        yield


SPLITS = {
    "world": ((0, 1, 2, 3),),
    "contiguous": ((0, 1), (2, 3)),
    "non-contiguous": ((0, 2), (1, 3)),
    "three of four": ((0, 2, 3), (1,)),
}


def make_places(split: tuple[tuple[int, ...], ...], device: str = "cpu") -> list[Place]:
    """For each implementation, this rank's group of a split. Called on all ranks alike."""
    here = dist.get_rank()
    places = []
    for exchange in EXCHANGES if device == "cpu" else ("all_to_all", "p2p"):
        for members in split:
            group = dist.new_group(list(members))
            if here in members:
                places.append(Place(group, members, device, exchange))
    return places


def dispatched(layouts: list[HeadParallelLayout], inputs: list[torch.Tensor], heads: int) -> list[model.Tokens]:
    return model.dispatch([model.bits(x) for x in inputs], layouts[0].parts, heads, layouts[0].head_counts)


def returned(layouts: list[HeadParallelLayout], inputs: list[torch.Tensor], heads: int) -> list[model.Tokens]:
    return model.undispatch([model.bits(x) for x in inputs], layouts[0].parts, heads, layouts[0].head_counts)


def own_heads(layout: HeadParallelLayout, heads: int) -> int:
    return len(model.shard_range(heads, layout.rank % layout.shards, layout.shards, layout.head_counts))


def check_result(mine: torch.Tensor, result: torch.Tensor, expected: model.Tokens, ranks: int) -> None:
    assert model.bits(result) == expected
    assert (result.dtype, result.device) == (mine.dtype, mine.device)
    assert (result is mine) == (ranks == 1)
    if ranks > 1:
        assert result.is_contiguous()
        assert not result.requires_grad


def check_dispatch(
    place: Place,
    layouts: list[HeadParallelLayout],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    style: str = "contiguous",
    seed: str = "",
) -> None:
    inputs = [
        model.random_tensor(f"{seed}/{layout.rank}", layout.local_tokens, heads, dim, dtype) for layout in layouts
    ]
    expected = dispatched(layouts, inputs, heads)[place.rank]
    with using(place.exchange):
        mine = model.in_style(inputs[place.rank].to(place.device), style)
        result = scatter_heads_gather_tokens(mine, place.group, layouts[place.rank])
    check_result(mine, result, expected, len(layouts))
    assert result.shape == (layouts[place.rank].owned_tokens, own_heads(layouts[place.rank], heads), dim)


def check_return(
    place: Place,
    layouts: list[HeadParallelLayout],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    style: str = "contiguous",
    seed: str = "",
) -> None:
    """Each owner brings random bits of its own: a return alone, not only a dispatch undone."""
    inputs = [
        model.random_tensor(f"{seed}/back/{layout.rank}", layout.owned_tokens, own_heads(layout, heads), dim, dtype)
        for layout in layouts
    ]
    expected = returned(layouts, inputs, heads)[place.rank]
    with using(place.exchange):
        mine = model.in_style(inputs[place.rank].to(place.device), style)
        result = scatter_tokens_gather_heads(mine, place.group, layouts[place.rank])
    check_result(mine, result, expected, len(layouts))
    assert result.shape == (layouts[place.rank].local_tokens, heads, dim)


def layouts_of(
    counts: tuple[int, ...], replicas: int = 1, head_counts: tuple[int, ...] | None = None
) -> list[HeadParallelLayout]:
    parts = replica_token_counts(counts, replicas) if replicas > 1 else None
    return [HeadParallelLayout(counts, rank, parts, head_counts=head_counts) for rank in range(len(counts))]


# --- Groups and layouts ---------------------------------------------------------------------------------

# World size -> token counts, replicas, head counts, heads.
LAYOUTS: dict[int, list[tuple[tuple[int, ...], int, tuple[int, ...] | None, int]]] = {
    1: [((3,), 1, None, 2)],
    2: [
        ((3, 3), 1, None, 4),
        ((5, 0), 1, None, 2),
        ((0, 0), 1, None, 2),
        ((3, 4), 1, (3, 0), 3),
        ((3, 1), 2, None, 1),
    ],
    3: [((4, 0, 2), 1, None, 6), ((1, 2, 3), 1, (0, 2, 3), 5), ((1, 5, 3), 3, None, 2)],
    4: [
        ((3, 3, 3, 3), 1, None, 8),
        ((3, 0, 1, 7), 1, None, 4),
        ((0, 0, 1, 0), 1, None, 4),
        ((0, 0, 0, 0), 1, None, 4),
        ((6, 2, 4, 0), 2, None, 6),
        ((9, 1, 0, 2), 4, None, 3),
        ((0, 0, 0, 0), 2, None, 2),
        ((2, 3, 4, 5), 1, (2, 2, 2, 0), 6),
        ((2, 0, 4, 5), 1, (0, 1, 0, 4), 5),
        ((6, 2, 4, 0), 2, (3, 1), 4),
    ],
}


def groups_and_layouts(rank: int, nproc: int, store: str) -> int:
    checked = 0
    with process_group(rank, nproc, store):
        for split in SPLITS.values():
            for place in make_places(split):
                for counts, replicas, head_counts, heads in LAYOUTS[len(place.members)]:
                    layouts = layouts_of(counts, replicas, head_counts)
                    for style in model.STYLES:
                        check_dispatch(place, layouts, heads, 3, torch.float32, style)
                        check_return(place, layouts, heads, 3, torch.float32, style)
                        checked += 2
                if rank in place.members and len(place.members) > 1:
                    settled = agreement.state_of(place.group, torch.device(place.device)).registration
                    assert settled.name == place.exchange
        # The default group itself, in the implementation of its first exchange.
        check_dispatch(Place(dist.group.WORLD, (0, 1, 2, 3), "cpu", "p2p"), layouts_of((3, 0, 1, 2)), 4, 3, torch.half)
    return checked


def test_groups_and_layouts(ranks: Any) -> None:
    assert all(checked > 200 for checked in ranks(groups_and_layouts, 4))


def replicas_by_hand(rank: int, nproc: int, store: str) -> None:
    """Parts that `replica_token_counts` would not choose."""
    with process_group(rank, nproc, store):
        parts = ((0, 4), (3, 0), (1, 1), (0, 0))
        layouts = [HeadParallelLayout((4, 3, 2, 0), other, parts) for other in range(4)]
        single = [HeadParallelLayout((4, 3, 2, 0), other, ((4,), (3,), (2,), (0,))) for other in range(4)]
        for place in make_places(SPLITS["world"]):
            for case in (layouts, single):
                check_dispatch(place, case, 4, 2, torch.int32, "sliced")
                check_return(place, case, 4, 2, torch.int32, "transposed")


def test_replicas_by_hand(ranks: Any) -> None:
    ranks(replicas_by_hand, 4)


def one_element(rank: int, nproc: int, store: str, exchange: str) -> None:
    with process_group(rank, nproc, store):
        place = next(place for place in make_places(((0, 1),)) if place.exchange == exchange)
        for style in model.STYLES:
            for counts in ((1, 0), (0, 1), (1, 1)):
                check_dispatch(place, layouts_of(counts), 2, 1, torch.float32, style)
                check_return(place, layouts_of(counts), 2, 1, torch.float32, style)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_messages_of_one_element_in_any_strides(ranks: Any, exchange: str) -> None:
    """torch calls a tensor of one element contiguous whatever its strides are."""
    ranks(one_element, 2, exchange)


# --- Element types and kinds of tensors -------------------------------------------------------------------


def element_types(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store):
        for place in make_places(SPLITS["world"]):
            for dtype in GLOO_DTYPES + MORE_DTYPES:
                for style in ("contiguous", "strided"):
                    check_dispatch(place, layouts_of((2, 0, 3, 1)), 4, 5, dtype, style)
                    check_return(place, layouts_of((2, 0, 3, 1)), 4, 5, dtype, style)


def test_element_types(ranks: Any) -> None:
    ranks(element_types, 4)


SPECIAL_BITS = (0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800002, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000)


def special_floats() -> torch.Tensor:
    """`[4, 2, 2]` of quiet and signalling NaNs with payloads, -0.0, denormals and infinities."""
    signed = [value - (1 << 32) if value >= 1 << 31 else value for value in SPECIAL_BITS]
    return torch.tensor(signed * 2, dtype=torch.int32).reshape(4, 2, 2).view(torch.float32)


def bit_patterns(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store):
        layouts = layouts_of((4, 4))
        for place in make_places(((0, 1),)):
            for style in model.STYLES:
                mine = model.in_style(special_floats(), style)
                assert model.bits(mine) == model.bits(special_floats())
                with using(place.exchange):
                    there = scatter_heads_gather_tokens(mine, place.group, layouts[rank])
                    back = scatter_tokens_gather_heads(model.in_style(there, style), place.group, layouts[rank])
                assert model.bits(back) == model.bits(mine)
                assert model.bits(there) == dispatched(layouts, [special_floats()] * 2, 2)[rank]


def test_nan_payloads_and_signed_zeros_are_kept(ranks: Any) -> None:
    ranks(bit_patterns, 2)


def kinds_of_tensors() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """From a complex64 `[3, 4, 2]` to inputs of other kinds with the same shape."""
    return {
        "conj": lambda x: x.conj(),
        "neg": lambda x: x.conj().imag,
        "real part": lambda x: x.real,
        "requires grad": lambda x: x.real.clone().requires_grad_(),
        "not a leaf": lambda x: x.real.clone().requires_grad_() * 2,
        "parameter": lambda x: torch.nn.Parameter(x.real.clone()),
        "expanded": lambda x: x.real[:1].expand(3, 4, 2),
        "expanded heads": lambda x: x.real[:, :1].expand(3, 4, 2),
        "expanded scalar": lambda x: torch.tensor(2.5).expand(3, 4, 2),
        "flipped view": lambda x: x.real.flip(0).permute(0, 1, 2),
        "permuted": lambda x: x.real.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "overlapping": lambda x: x.real.contiguous().as_strided((3, 4, 2), (2, 1, 1)),
    }


def other_tensors(rank: int, nproc: int, store: str) -> None:
    layouts = layouts_of((3, 3))
    with process_group(rank, nproc, store):
        for place in make_places(((0, 1),)):
            for name, kind in kinds_of_tensors().items():
                whole = [torch.randn(3, 4, 2, dtype=torch.complex64, generator=seeded(other)) for other in (0, 1)]
                inputs = [kind(x) for x in whole]
                before = model.bits(inputs[rank])
                with using(place.exchange):
                    there = scatter_heads_gather_tokens(inputs[rank], place.group, layouts[rank])
                    back = scatter_tokens_gather_heads(there, place.group, layouts[rank])
                check_result(inputs[rank], there, dispatched(layouts, inputs, 4)[rank], 2)
                check_result(inputs[rank], back, before, 2)
                assert model.bits(inputs[rank]) == before, name
                assert not there.is_conj()
                assert not there.is_neg()
                assert there.grad_fn is back.grad_fn is None


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gradients_and_lazy_and_expanded_inputs(ranks: Any) -> None:
    ranks(other_tensors, 2)


MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


def modes(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store):
        for place in make_places(((0, 1),)):
            layouts = layouts_of((3, 2))
            for first in MODES.values():
                for second in MODES.values():
                    # Tensors of one mode are used in the other: the layer's mode is not the exchange's.
                    with using(place.exchange):
                        with first():
                            mine = model.random_tensor(
                                str(rank), layouts[rank].local_tokens, 4, 3, torch.float32
                            ).clone()
                        with second():
                            there = scatter_heads_gather_tokens(mine, place.group, layouts[rank])
                        with first():
                            back = scatter_tokens_gather_heads(there, place.group, layouts[rank])
                    assert model.bits(back) == model.bits(mine)
                    assert not back.requires_grad
            assert torch.is_grad_enabled()


def test_inference_mode_and_its_tensors(ranks: Any) -> None:
    ranks(modes, 2)


# --- What is launched ---------------------------------------------------------------------------------------


def test_a_single_rank_gets_its_own_tensor_back() -> None:
    layout = HeadParallelLayout((3,), 0)
    tensor = torch.randn(3, 4, 2, requires_grad=True)
    with model.no_collectives():
        assert scatter_heads_gather_tokens(tensor, None, layout) is tensor
        assert scatter_tokens_gather_heads(tensor, None, layout) is tensor
        strided = torch.randn(4, 3, 2).transpose(0, 1)
        assert scatter_heads_gather_tokens(strided, None, layout) is strided
        with pytest.raises(ValueError, match="3 local tokens"):
            scatter_heads_gather_tokens(tensor[:2], None, layout)


def single_rank_group(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store), model.no_collectives():
        tensor = torch.randn(3, 4, 2)
        for group in (dist.group.WORLD, None):
            assert scatter_heads_gather_tokens(tensor, group, HeadParallelLayout((3,), 0)) is tensor
            assert scatter_tokens_gather_heads(tensor, group, HeadParallelLayout((3,), 0)) is tensor
        with pytest.raises(ValueError, match=r"process group size/rank"):
            scatter_heads_gather_tokens(tensor, dist.group.WORLD, HeadParallelLayout((3, 3), 0))


def test_a_group_of_one(ranks: Any) -> None:
    ranks(single_rank_group, 1)


def empty_exchanges(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store):
        for place in make_places(((0, 1),)):
            for layouts in (layouts_of((0, 0)), layouts_of((0, 0), 2), layouts_of((0, 0), 1, (1, 3))):
                shards = layouts[0].shards
                mine = torch.empty(0, 4, 3, dtype=torch.bfloat16)
                with using(place.exchange), model.no_collectives():
                    there = scatter_heads_gather_tokens(mine, place.group, layouts[rank])
                    back = scatter_tokens_gather_heads(there, place.group, layouts[rank])
                assert there.shape == (0, own_heads(layouts[rank], 4), 3)
                assert back.shape == (0, 4, 3)
                assert there.dtype == back.dtype == torch.bfloat16
                assert there.device == back.device == mine.device
                assert shards in (1, 2)


def test_an_empty_exchange_launches_nothing(ranks: Any) -> None:
    ranks(empty_exchanges, 2)


class Opaque:
    """A group of the caller's own kind."""


class Unhashable:
    def __eq__(self, other: object) -> bool:
        return self is other


class Slotted:
    __slots__ = ()


OPAQUE = [Opaque, Unhashable, Slotted, object, lambda: "a group", lambda: ("a", "group"), lambda: [1]]


@pytest.mark.parametrize("exchange", ["auto", "all_to_all", "p2p"])
@pytest.mark.parametrize("make", OPAQUE)
def test_the_reference_asks_an_opaque_group_for_nothing(
    monkeypatch: pytest.MonkeyPatch, make: Any, exchange: str
) -> None:
    group = make()
    calls: list[tuple[tuple[int, ...], list[int], list[int]]] = []

    def all_to_all_single(output: Any, input: Any, **keywords: Any) -> None:
        assert set(keywords) == {"output_split_sizes", "input_split_sizes", "group"}
        assert keywords["group"] is group
        assert output.ndim == input.ndim == 1
        sizes = keywords["output_split_sizes"], keywords["input_split_sizes"]
        assert all(type(size) is list and all(type(one) is int for one in size) for size in sizes)
        calls.append(((output.numel(), input.numel()), *sizes))
        output.zero_()

    layout = HeadParallelLayout((3, 2), 1)
    with (
        model.no_collectives(),
        model.warnings_logged() as warnings,
        environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange),
    ):
        monkeypatch.setattr(dist, "get_world_size", lambda asked: 2)
        monkeypatch.setattr(dist, "get_rank", lambda asked: 1)
        monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
        for _ in range(2):
            there = scatter_heads_gather_tokens(torch.ones(2, 4, 5), group, layout)
            back = scatter_tokens_gather_heads(torch.ones(5, 2, 5), group, layout)
    assert (there.shape, back.shape) == ((5, 2, 5), (2, 4, 5))
    assert calls == [((50, 40), [30, 20], [20, 20]), ((40, 50), [20, 20], [30, 20])] * 2
    assert warnings == []


def counted(rank: int, nproc: int, store: str) -> None:
    """Each exchange is one call, found through the module at call time, and no other."""
    with process_group(rank, nproc, store):
        for place in make_places(SPLITS["world"]):
            layouts = layouts_of((3, 1, 0, 2))
            check_dispatch(place, layouts, 4, 3, torch.float32)  # the first exchange settles
            name = {"all_to_all": "all_to_all_single", "p2p": "batch_isend_irecv", "shared": "barrier"}[place.exchange]
            real, seen = getattr(dist, name), Counter()  # type: ignore[var-annotated]

            def counting(*args: Any, real: Any = real, seen: Any = seen, **keywords: Any) -> Any:
                seen["calls"] += 1
                return real(*args, **keywords)

            with mock.patch.object(dist, name, counting):
                check_dispatch(place, layouts, 4, 3, torch.float32)
                check_return(place, layouts, 4, 3, torch.float32)
            assert seen == {"calls": 2}


def test_an_exchange_is_one_call(ranks: Any) -> None:
    ranks(counted, 4)


def foreign_layouts(rank: int, nproc: int, store: str) -> None:
    """The host's own class, without and with `replica_counts`, is read and not asked for its type."""
    from types import SimpleNamespace

    with process_group(rank, nproc, store):
        mine = model.random_tensor(str(rank), (3, 1)[rank], 2, 3, torch.float32)
        ours = scatter_heads_gather_tokens(mine, dist.group.WORLD, HeadParallelLayout((3, 1), rank))
        for more in ({}, {"replica_counts": None}, {"replica_counts": ((3,), (1,))}):
            layout = SimpleNamespace(token_counts=(3, 1), rank=rank, **more)
            there = scatter_heads_gather_tokens(mine, dist.group.WORLD, layout)
            assert model.bits(there) == model.bits(ours)
            assert model.bits(scatter_tokens_gather_heads(there, dist.group.WORLD, layout)) == model.bits(mine)


def test_layouts_of_the_hosts_own_class(ranks: Any) -> None:
    ranks(foreign_layouts, 2)


# --- MAGI-2's sizes -------------------------------------------------------------------------------------------


def code(tokens: range, heads: range, dim: int) -> torch.Tensor:
    """bfloat16 whose bits tell token, head and position: the exchange in closed form."""
    t = torch.arange(tokens.start, tokens.stop, dtype=torch.int32).view(-1, 1, 1)
    h = torch.arange(heads.start, heads.stop, dtype=torch.int32).view(1, -1, 1)
    d = torch.arange(dim, dtype=torch.int32).view(1, 1, -1)
    return (t * 40503 + h * 5119 + d * 77).to(torch.int16).view(torch.bfloat16)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def magi2_sizes(rank: int, nproc: int, store: str) -> None:
    cases = (
        ((7404,) * 4, None),
        ((7404, 7403, 7403, 7403), None),
        ((7404, 7403, 7403, 7403), (4, 4, 4, 0)),
    )
    with process_group(rank, nproc, store, timeout=60):
        for place in make_places(SPLITS["world"]):
            for counts, head_counts in cases:
                layout = HeadParallelLayout(counts, rank, head_counts=head_counts)
                start = sum(counts[:rank])
                mine = code(range(start, start + counts[rank]), range(12), 256)
                own = model.shard_range(12, rank, 4, head_counts)
                with using(place.exchange):
                    there = scatter_heads_gather_tokens(mine, place.group, layout)
                    assert same_bits(there, code(range(sum(counts)), own, 256))
                    assert same_bits(scatter_tokens_gather_heads(there, place.group, layout), mine)


def test_magi2_token_counts_at_full_width(ranks: Any) -> None:
    ranks(magi2_sizes, 4)


# --- Random sequences ------------------------------------------------------------------------------------------


SEQUENCES = 200


def run_sequences(rank: int, nproc: int, store: str, seeds: list[int], backend: str, device: str) -> int:
    """Random sequences of exchanges on groups that are used over and over. Returns how many were checked."""
    if backend == "mccl":
        from vllm_musa_headpar.testing import mccl

        mccl.install()
    checked = 0
    with process_group(rank, nproc, store, backend=backend):
        places = [place for split in SPLITS.values() for place in make_places(split, device)]
        for seed in seeds:
            try:
                checked += run_sequence(seed, places)
            except Exception as error:
                raise AssertionError(f"HEADPAR_SEED={seed} on backend {backend}: {error}") from error
    return checked


def run_sequence(seed: int, places: list[Place]) -> int:
    """All ranks draw the same: a rank's place `index` is its own group of the same split."""
    rng = random.Random(seed)
    steps = rng.randint(1, 8)
    for step in range(steps):
        index = rng.randrange(len(places))
        check = rng.choice((check_dispatch, check_return))
        dim, style, draw = rng.randint(1, 5), rng.choice(model.STYLES), rng.random()
        place = places[index]
        # Groups of one split differ in size: what depends on the size is drawn apart.
        layouts, heads = model.random_layouts(random.Random(f"{seed}/{step}"), len(place.members))
        dtypes = dtypes_for(place)
        check(place, layouts, heads, dim, dtypes[int(draw * len(dtypes))], style, f"{seed}/{step}")
    return steps


def dtypes_for(place: Place) -> tuple[torch.dtype, ...]:
    return MCCL_DTYPES if place.device != "cpu" else GLOO_DTYPES + MORE_DTYPES


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), pytest.param("mccl", "musa", marks=[pytest.mark.musa, pytest.mark.slow])],
)
def test_random_sequences(ranks: Any, backend: str, device: str) -> None:
    asked = os.environ.get("HEADPAR_SEED")
    seeds = [int(asked)] if asked else list(range(SEQUENCES))
    assert min(ranks(run_sequences, 4, seeds, backend, device)) >= len(seeds)
