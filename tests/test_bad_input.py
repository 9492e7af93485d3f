"""Everything a caller can hand over wrongly: refused before any collective, with the value and what was expected.

What is no layout is in test_layout.py. What vLLM-Omni 0.30.0's own functions accept is compared with them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import model
import pytest
import torch
import torch.distributed as dist
from pool import environment, process_group

from vllm_musa_headpar import (
    blocks,
    config,
    exchange,
    register_head_parallel_exchange,
    registry,
    scatter_heads_gather_tokens,
    scatter_tokens_gather_heads,
)
from vllm_musa_headpar.errors import DisagreementError
from vllm_musa_headpar.host import magi2
from vllm_musa_headpar.layout import HeadParallelLayout

pytestmark = pytest.mark.cpu

RANKS, RANK = 4, 1
COUNTS = (3, 2, 0, 4)
LAYOUT = HeadParallelLayout(COUNTS, RANK)  # this rank has 2 tokens and 9 in its shard
UNEVEN = HeadParallelLayout(COUNTS, RANK, head_counts=(1, 2, 0, 5))


class Group:
    """A group that can be asked for its size and rank only."""

    def __repr__(self) -> str:
        return "the group"


GROUP = Group()


@pytest.fixture(autouse=True)
def _plain_environment() -> Iterator[None]:
    with environment():
        yield


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 1 of `GROUP`'s four; whatever communicates fails the test."""
    with model.no_collectives():
        monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS if group is GROUP else -1)
        monkeypatch.setattr(dist, "get_rank", lambda group: RANK if group is GROUP else -1)
        yield


def quantized(*shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(*shape), 0.1, 0, torch.quint8)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(8, 3), torch.zeros(8, 3)], layout=layout)


class Wrapper(torch.Tensor):
    """A tensor whose elements are another one's."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*unwrapped, **(kwargs or {}))


def masked(*shape: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.zeros(shape), torch.ones(shape, dtype=torch.bool))


def fake(*shape: int) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(shape)


# Name -> tensor, exception, what the message must contain. For a dispatch of [2, 8, dim].
NO_TENSORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "None": (lambda: None, TypeError, r"torch\.Tensor \[tokens, heads, dim\].*NoneType"),
    "list": (lambda: [[[1.0] * 3] * 8] * 2, TypeError, r"torch\.Tensor \[tokens, heads, dim\].*list"),
    "numpy": (lambda: torch.zeros(2, 8, 3).numpy(), TypeError, r"torch\.Tensor \[tokens, heads, dim\].*ndarray"),
    "int": (lambda: 3, TypeError, r"torch\.Tensor \[tokens, heads, dim\].*int"),
    "sparse": (lambda: torch.zeros(2, 8, 3).to_sparse(), ValueError, r"strided.*sparse_coo"),
    "sparse csr": (lambda: torch.zeros(2, 8, 3).to_sparse_csr(), ValueError, r"strided.*sparse_csr"),
    "mkldnn": (lambda: torch.zeros(2, 8, 3).to_mkldnn(), ValueError, r"strided.*mkldnn"),
    "meta": (lambda: torch.zeros(2, 8, 3, device="meta"), ValueError, r"data.*meta"),
    "quantized": (lambda: quantized(2, 8, 3), ValueError, r"quint8|quantized"),
    "nested jagged": (lambda: nested(torch.jagged), ValueError, r"strided.*jagged"),
    "nested strided": (lambda: nested(torch.strided), ValueError, r"nested"),
    "functional": (lambda: torch._to_functional_tensor(torch.zeros(2, 8, 3)), ValueError, r"memory.*functional tensor"),
    "fake": (lambda: fake(2, 8, 3), ValueError, r"memory.*FakeTensor"),
    "masked": (lambda: masked(2, 8, 3), ValueError, r"memory.*MaskedTensor"),
    "wrapper": (lambda: Wrapper(torch.zeros(2, 8, 3)), ValueError, r"memory.*Wrapper"),
    "zero tensor": (lambda: torch._efficientzerotensor(2, 8, 3), ValueError, r"memory.*torch transform"),
}
WRONG_DISPATCHES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **NO_TENSORS,
    "scalar": (lambda: torch.tensor(1.0), ValueError, r"\[tokens, heads, dim\].*shape \[\]"),
    "vector": (lambda: torch.zeros(2), ValueError, r"\[tokens, heads, dim\].*shape \[2\]"),
    "matrix": (lambda: torch.zeros(2, 24), ValueError, r"\[tokens, heads, dim\].*shape \[2, 24\]"),
    "four dimensions": (lambda: torch.zeros(1, 2, 8, 3), ValueError, r"shape \[1, 2, 8, 3\]"),
    "fewer tokens": (lambda: torch.zeros(1, 8, 3), ValueError, r"2 local tokens.*\[1, 8, 3\]"),
    "more tokens": (lambda: torch.zeros(3, 8, 3), ValueError, r"2 local tokens.*\[3, 8, 3\]"),
    "no tokens": (lambda: torch.zeros(0, 8, 3), ValueError, r"2 local tokens.*\[0, 8, 3\]"),
    "owned tokens": (lambda: torch.zeros(9, 8, 3), ValueError, r"2 local tokens.*\[9, 8, 3\]"),
    "no heads": (lambda: torch.zeros(2, 0, 3), ValueError, r"positive.*\[2, 0, 3\]"),
    "no dim": (lambda: torch.zeros(2, 8, 0), ValueError, r"positive.*\[2, 8, 0\]"),
    "neither": (lambda: torch.zeros(2, 0, 0), ValueError, r"positive.*\[2, 0, 0\]"),
    "heads that do not divide": (lambda: torch.zeros(2, 6, 3), ValueError, r"6 heads.*divisible by the 4"),
    "fewer heads than ranks": (lambda: torch.zeros(2, 2, 3), ValueError, r"2 heads.*divisible by the 4"),
}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("case", WRONG_DISPATCHES)
def test_wrong_tensors_for_a_dispatch(case: str) -> None:
    make, error, words = WRONG_DISPATCHES[case]
    with pytest.raises(error, match=words):
        scatter_heads_gather_tokens(make(), GROUP, LAYOUT)


WRONG_RETURNS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **NO_TENSORS,
    "vector": (lambda: torch.zeros(9), ValueError, r"\[tokens, heads, dim\].*shape \[9\]"),
    "matrix": (lambda: torch.zeros(9, 6), ValueError, r"\[tokens, heads, dim\].*shape \[9, 6\]"),
    "four dimensions": (lambda: torch.zeros(9, 2, 3, 1), ValueError, r"shape \[9, 2, 3, 1\]"),
    "local tokens": (lambda: torch.zeros(2, 2, 3), ValueError, r"9 owned tokens.*\[2, 2, 3\]"),
    "no tokens": (lambda: torch.zeros(0, 2, 3), ValueError, r"9 owned tokens.*\[0, 2, 3\]"),
    "no heads": (lambda: torch.zeros(9, 0, 3), ValueError, r"positive.*\[9, 0, 3\]"),
    "no dim": (lambda: torch.zeros(9, 2, 0), ValueError, r"positive.*\[9, 2, 0\]"),
}


@pytest.mark.usefixtures("four_ranks")
def test_tensors_of_a_torch_transform_are_no_plain_memory() -> None:
    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match=r"memory.*torch transform"):
            scatter_heads_gather_tokens(tensor, GROUP, LAYOUT)
        return tensor.sum()

    torch.vmap(exchange)(torch.zeros(5, 2, 8, 3))
    torch.func.grad(exchange)(torch.zeros(2, 8, 3))


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("case", WRONG_RETURNS)
def test_wrong_tensors_for_a_return(case: str) -> None:
    make, error, words = WRONG_RETURNS[case]
    with pytest.raises(error, match=words):
        scatter_tokens_gather_heads(make(), GROUP, LAYOUT)


@pytest.mark.usefixtures("four_ranks")
def test_tensors_that_do_not_fit_the_head_counts() -> None:
    with pytest.raises(ValueError, match=r"7 heads.*\(1, 2, 0, 5\).*8"):
        scatter_heads_gather_tokens(torch.zeros(2, 7, 3), GROUP, UNEVEN)
    with pytest.raises(ValueError, match=r"positive.*\[2, 0, 3\]"):
        scatter_heads_gather_tokens(torch.zeros(2, 0, 3), GROUP, UNEVEN)
    for heads in (0, 1, 3, 8):
        with pytest.raises(ValueError, match=rf"\(1, 2, 0, 5\).*2 heads.*\[9, {heads}, 3\]"):
            scatter_tokens_gather_heads(torch.zeros(9, heads, 3), GROUP, UNEVEN)
    with pytest.raises(ValueError, match=r"positive.*\[9, 2, 0\]"):
        scatter_tokens_gather_heads(torch.zeros(9, 2, 0), GROUP, UNEVEN)
    no_heads_anywhere = HeadParallelLayout(COUNTS, RANK, head_counts=(0, 0, 0, 0))
    with pytest.raises(ValueError, match="positive"):
        scatter_heads_gather_tokens(torch.zeros(2, 0, 3), GROUP, no_heads_anywhere)
    with pytest.raises(ValueError, match="positive"):
        scatter_tokens_gather_heads(torch.zeros(9, 0, 3), GROUP, no_heads_anywhere)


WRONG_LAYOUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, r"HeadParallelLayout.*None"),
    "string": ("layout", TypeError, r"HeadParallelLayout.*'layout'"),
    "counts alone": (COUNTS, TypeError, r"HeadParallelLayout.*\(3, 2, 0, 4\)"),
    "dict": ({"token_counts": COUNTS, "rank": 1}, TypeError, r"HeadParallelLayout"),
    "the class": (HeadParallelLayout, TypeError, r"HeadParallelLayout"),
    "no rank": (SimpleNamespace(token_counts=COUNTS), TypeError, r"token_counts and rank"),
    "list of counts": (SimpleNamespace(token_counts=list(COUNTS), rank=1), ValueError, r"token_counts.*\[3, 2, 0, 4\]"),
    "float count": (SimpleNamespace(token_counts=(3, 2.0, 0, 4), rank=1), ValueError, r"token_counts.*2\.0"),
    "rank": (SimpleNamespace(token_counts=COUNTS, rank=4), ValueError, r"rank.*\[0, 4\).*4"),
    "another rank": (HeadParallelLayout(COUNTS, 2), ValueError, r"process group size/rank is 4/1.*4/2"),
    "another size": (HeadParallelLayout((3, 2), 1), ValueError, r"process group size/rank is 4/1.*2/1"),
    "a single rank": (HeadParallelLayout((2,), 0), ValueError, r"process group size/rank is 4/1.*1/0"),
    "replicas": (
        SimpleNamespace(token_counts=COUNTS, rank=1, replica_counts=((3,), (1,), (0,), (4,))),
        ValueError,
        r"replica_counts\[1\] must sum to the 2 tokens",
    ),
}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("case", WRONG_LAYOUTS)
def test_wrong_layouts(case: str) -> None:
    layout, error, words = WRONG_LAYOUTS[case]
    with pytest.raises(error, match=words):
        scatter_heads_gather_tokens(torch.zeros(2, 8, 3), GROUP, layout)
    with pytest.raises(error, match=words):
        scatter_tokens_gather_heads(torch.zeros(9, 2, 3), GROUP, layout)


NO_GROUPS: dict[str, tuple[Any, str]] = {
    "None": (None, r"4 ranks.*caller-owned process group.*None"),
    "string": ("world", r"process group 'world'.*size 4 and rank 1"),
    "int": (0, r"process group 0 .*size 4 and rank 1"),
    "object": (object(), r"process group <object.*size 4 and rank 1"),
    "list": ([0, 1, 2, 3], r"process group \[0, 1, 2, 3\].*size 4 and rank 1"),
    "namespace": (SimpleNamespace(size=4), r"process group namespace.*size 4 and rank 1"),
    "not a member": (dist.GroupMember.NON_GROUP_MEMBER, r"process group size/rank is -1/-1.*4/1"),
}


@pytest.mark.parametrize("case", NO_GROUPS)
def test_what_is_no_group(case: str) -> None:
    """With torch's own functions, and no default group there."""
    group, words = NO_GROUPS[case]
    with model.no_collectives():
        with pytest.raises(ValueError, match=words):
            scatter_heads_gather_tokens(torch.zeros(2, 8, 3), group, LAYOUT)
        with pytest.raises(ValueError, match=words):
            scatter_tokens_gather_heads(torch.zeros(9, 2, 3), group, LAYOUT)


@pytest.mark.parametrize("case", [case for case in NO_GROUPS if case != "None"])
def test_what_is_no_group_is_none_for_a_single_rank_either(case: str) -> None:
    group, _ = NO_GROUPS[case]
    with model.no_collectives(), pytest.raises(ValueError, match="process group"):
        scatter_heads_gather_tokens(torch.zeros(2, 8, 3), group, HeadParallelLayout((2,), 0))


@contextmanager
def connected() -> Iterator[None]:
    """No rank leaves before all have come: what is in the block does not communicate."""
    shared = dist.distributed_c10d._get_default_store()
    yield
    shared.set(f"done/{dist.get_rank()}", "1")
    shared.wait([f"done/{rank}" for rank in range(dist.get_world_size())])


def no_groups_beside_real_ones(rank: int, nproc: int, store: str) -> None:
    """The same with a default group there: torch reads some of these as that one."""
    with process_group(rank, nproc, store), connected(), model.no_collectives():
        layout = HeadParallelLayout((3, 2), rank)
        for group, _ in NO_GROUPS.values():
            with pytest.raises(ValueError, match="process group"):
                scatter_heads_gather_tokens(torch.zeros(layout.local_tokens, 2, 3), group, layout)
            with pytest.raises(ValueError, match="process group"):
                scatter_tokens_gather_heads(torch.zeros(5, 1, 3), group, layout)


def test_what_is_no_group_beside_real_ones(ranks: Any) -> None:
    ranks(no_groups_beside_real_ones, 2)


def foreign_group(rank: int, nproc: int, store: str) -> None:
    """A rank that is no member of a group, and a group that is gone."""
    with process_group(rank, nproc, store):
        group = dist.new_group([0, 1])
        gone = dist.new_group([0, 1, 2])
        dist.destroy_process_group(gone)
        with model.no_collectives():
            if rank == 2:
                with pytest.raises(ValueError, match=r"process group size/rank is -1/-1.*2/0"):
                    scatter_heads_gather_tokens(torch.zeros(3, 2, 3), group, HeadParallelLayout((3, 3), 0))
            with pytest.raises(ValueError, match=r"cannot ask the process group .*size 3 and rank"):
                scatter_heads_gather_tokens(torch.zeros(3, 3, 3), gone, HeadParallelLayout((3, 3, 3), rank))


def test_groups_without_this_rank_and_groups_that_are_gone(ranks: Any) -> None:
    ranks(foreign_group, 3)


def wrong_device(rank: int, nproc: int, store: str) -> None:
    from vllm_musa_headpar.testing import mccl

    mccl.install()
    with process_group(rank, nproc, store, backend="mccl"), connected(), model.no_collectives():
        with pytest.raises(ValueError, match=r"cpu.*musa|musa.*cpu"):
            scatter_heads_gather_tokens(torch.zeros(3, 2, 3), dist.group.WORLD, HeadParallelLayout((3, 3), rank))
        with pytest.raises(ValueError, match=r"cpu.*musa|musa.*cpu"):
            scatter_tokens_gather_heads(torch.zeros(6, 1, 3), dist.group.WORLD, HeadParallelLayout((3, 3), rank))


@pytest.mark.musa
def test_a_tensor_on_a_device_that_the_group_has_no_backend_for(ranks: Any) -> None:
    ranks(wrong_device, 2)


# --- Counts beyond 32 bits -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four_ranks")
def test_counts_beyond_32_bits() -> None:
    huge = HeadParallelLayout((2**40, 2, 0, 1), RANK)
    assert huge.owned_tokens == huge.total_tokens == 2**40 + 3
    with pytest.raises(ValueError, match=r"2 local tokens.*\[3, 8, 3\]"):
        scatter_heads_gather_tokens(torch.zeros(3, 8, 3), GROUP, huge)
    with pytest.raises(ValueError, match=rf"{2**40 + 3} owned tokens.*\[9, 2, 3\]"):
        scatter_tokens_gather_heads(torch.zeros(9, 2, 3), GROUP, huge)
    sides = blocks.plan(huge, (8,), 256)
    assert sides.inner.numel == (2**49, 1024, 0, 512)
    assert sides.inner.starts[-1] == 2**49 + 1536
    own = HeadParallelLayout((2**40, 2), 0)
    grid = blocks.plan(own, (2,), 4).outer
    assert [(run.start, run.numel) for run in grid.all_runs] == [(0, 2**43)]


# --- What is accepted ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four_ranks")
def test_zero_size_everything() -> None:
    empty = HeadParallelLayout((0, 0, 0, 0), RANK)
    assert scatter_heads_gather_tokens(torch.zeros(0, 8, 3), GROUP, empty).shape == (0, 2, 3)
    assert scatter_tokens_gather_heads(torch.zeros(0, 2, 3), GROUP, empty).shape == (0, 8, 3)
    replicas = HeadParallelLayout((0,) * 4, RANK, ((0, 0),) * 4)
    assert scatter_heads_gather_tokens(torch.zeros(0, 8, 3), GROUP, replicas).shape == (0, 4, 3)
    for shape in ((0, 0, 3), (0, 8, 0), (0, 0, 0)):
        with pytest.raises(ValueError, match="positive"):
            scatter_heads_gather_tokens(torch.zeros(shape), GROUP, empty)
    nobody_here = HeadParallelLayout((0,) * 4, RANK, head_counts=(4, 0, 4, 0))
    assert scatter_heads_gather_tokens(torch.zeros(0, 8, 3), GROUP, nobody_here).shape == (0, 0, 3)
    assert scatter_tokens_gather_heads(torch.zeros(0, 0, 3), GROUP, nobody_here).shape == (0, 8, 3)


@pytest.mark.usefixtures("four_ranks")
def test_gradients_are_accepted_and_not_carried() -> None:
    empty = HeadParallelLayout((0,) * 4, RANK)
    tensor = torch.zeros(0, 8, 3, requires_grad=True)
    assert not scatter_heads_gather_tokens(tensor, GROUP, empty).requires_grad


# --- Registration --------------------------------------------------------------------------------------------------


def other(exchange: Any, group: Any) -> Any:
    raise NotImplementedError


WRONG_REGISTRATIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "name None": ((None, other), {"backends": ()}, r"name.*None"),
    "name empty": (("", other), {"backends": ()}, r"name.*''"),
    "name blank": (("  ", other), {"backends": ()}, r"name.*'  '"),
    "name int": ((3, other), {"backends": ()}, r"name.*3"),
    "name auto": (("auto", other), {"backends": ()}, r"name.*'auto'"),
    "not callable": (("new", 3), {"backends": ()}, r"callable.*3"),
    "None": (("new", None), {"backends": ()}, r"callable.*None"),
    "backends string": (("new", other), {"backends": "mccl"}, r"backends.*'mccl'"),
    "backends ints": (("new", other), {"backends": [1]}, r"backends.*1"),
    "backends None": (("new", other), {"backends": None}, r"None"),
    "no backends": (("new", other), {}, r"backends"),
    "priority string": (("new", other), {"backends": (), "priority": "high"}, r"priority.*'high'"),
    "priority float": (("new", other), {"backends": (), "priority": 1.5}, r"priority.*1\.5"),
    "taken": (("p2p", other), {"backends": ()}, r"'p2p' is already registered"),
    "taken reference": (("all_to_all", other), {"backends": ()}, r"'all_to_all' is already registered"),
    "unusable not callable": (("new", other), {"backends": (), "unusable": "never"}, r"unusable.*'never'"),
}


@pytest.mark.parametrize("case", WRONG_REGISTRATIONS)
def test_wrong_registrations(case: str) -> None:
    arguments, keywords, words = WRONG_REGISTRATIONS[case]
    before = dict(registry._registrations)
    try:
        with pytest.raises((TypeError, ValueError), match=words):
            register_head_parallel_exchange(*arguments, **keywords)
        assert registry._registrations == before
    finally:
        registry._registrations.clear()
        registry._registrations.update(before)


def test_the_spelling_of_a_name() -> None:
    """Capitals do not matter, unless two names differ in nothing else."""
    for spelled in ("p2p", "P2P", "P2p"):
        assert registry.select("gloo", spelled).name == "p2p"
    assert registry.find("All_To_All") is registry.REFERENCE
    assert registry.find("p2p ") is None
    try:
        register_head_parallel_exchange("Fast", other, backends=())
        assert [registry.select("gloo", spelled).name for spelled in ("Fast", "fast", "FAST")] == ["Fast"] * 3
        register_head_parallel_exchange("fast", other, backends=())
        assert [registry.select("gloo", spelled).name for spelled in ("Fast", "fast")] == ["Fast", "fast"]
        for name in ("Auto", " AUTO "):
            with pytest.raises(ValueError, match="other than 'auto'"):
                register_head_parallel_exchange(name, other, backends=())
    finally:
        for name in ("Fast", "fast"):
            registry._registrations.pop(name, None)


def test_right_registrations() -> None:
    try:
        register_head_parallel_exchange("late", other, backends=["MCCL"], priority=3)
        register_head_parallel_exchange("late", other, backends=["mccl"], priority=3)
        register_head_parallel_exchange("early", other, backends=iter(["mccl", "gloo"]), priority=99)
        register_head_parallel_exchange("also", other, backends={"gloo"}, priority=99)
        assert registry.select("mccl").name == "early"
        assert registry.select("gloo").name == "also"
        assert registry.select("gloo", "late").name == "late"
        assert registry.select("ucc").name == "all_to_all"
        assert registry.select(None, "late").name == "all_to_all"
    finally:
        for name in ("late", "early", "also"):
            registry._registrations.pop(name, None)


# --- Environment ---------------------------------------------------------------------------------------------------

OFF = config.Settings()
SETTINGS: dict[str, tuple[dict[str, str], config.Settings]] = {
    "nothing": ({}, OFF),
    **{f"off {value!r}": ({config.FLAG: value}, OFF) for value in ("", "0", "false", "off", "no", "OFF", " No ")},
    **{
        f"on {value!r}": ({config.FLAG: value}, config.Settings(enabled=True))
        for value in ("1", "true", "on", "yes", "TRUE", " On ")
    },
    "strict": ({config.FLAG: "strict"}, config.Settings(enabled=True, strict=True)),
    "exchange": ({config.EXCHANGE: "p2p"}, config.Settings(exchange="p2p")),
    "exchange empty": ({config.EXCHANGE: ""}, OFF),
    "exchange blank": ({config.EXCHANGE: "  "}, OFF),
    "exchange padded": ({config.EXCHANGE: " p2p "}, config.Settings(exchange="p2p")),
    "check": ({config.CHECK: "1"}, config.Settings(check=True)),
    "check off": ({config.CHECK: "0"}, OFF),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str) -> None:
    environ, expected = SETTINGS[case]
    assert config.read(environ) == expected


@pytest.mark.parametrize("name", [config.FLAG, config.CHECK])
@pytest.mark.parametrize("value", ["2", "-1", "maybe", "1;0", "yes please", "\u4e00", "0x1", "None", "\n1\n1"])
def test_a_value_that_is_not_allowed_counts_as_off_and_is_told(name: str, value: str) -> None:
    settings = config.read({name: value})
    assert not settings.enabled
    assert not settings.check
    assert not settings.strict
    (problem,) = settings.problems
    assert f"{name}={value!r}" in problem
    assert "expected" in problem
    assert "off" in problem


# --- MAGI-2's wrappers ---------------------------------------------------------------------------------------------

MAGI2_GROUP = SimpleNamespace(group=GROUP, world_size=RANKS, rank=RANK, replicated_sequence=False)
SIZES = list(COUNTS)
PARALLEL: Any = SimpleNamespace(get_magi2_ep_group=lambda: MAGI2_GROUP, get_magi2_ulysses_group=lambda: MAGI2_GROUP)
EP_DISPATCH = magi2.make_ep_dispatch(PARALLEL)
EP_UNDISPATCH = magi2.make_ep_undispatch(PARALLEL)
SCATTER_HEADS = magi2.make_scatter_heads_gather_seqlen(PARALLEL)
SCATTER_SEQLEN = magi2.make_scatter_seqlen_gather_heads(PARALLEL)

# Messages of 0.30.0 are verbatim; the others have the value.
DISPATCH_HEADS = "MoE head count {} must divide by EP size 4"
DISPATCH_SIZES = "EP sequence split sizes do not describe the local tensor"
RETURN_SIZES = "EP sequence split sizes do not partition the global tensor"
ULYSSES_SIZES = "split_sizes length must equal the Ulysses world size"
WRONG_WRAPPER_CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "dispatch matrix": (lambda: EP_DISPATCH(torch.zeros(2, 8), None, SIZES), DISPATCH_HEADS.format(8)),
    "dispatch vector": (lambda: EP_DISPATCH(torch.zeros(2), None, SIZES), DISPATCH_HEADS.format(r"\?")),
    "dispatch heads": (lambda: EP_DISPATCH(torch.zeros(2, 6, 3), None, SIZES), DISPATCH_HEADS.format(6)),
    "dispatch heads, no sizes": (lambda: EP_DISPATCH(torch.zeros(2, 6, 3)), DISPATCH_HEADS.format(6)),
    "dispatch few sizes": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3), None, SIZES[:3]), DISPATCH_SIZES),
    "dispatch many sizes": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3), None, [*SIZES, 1]), DISPATCH_SIZES),
    "dispatch other size": (lambda: EP_DISPATCH(torch.zeros(3, 8, 3), None, SIZES), DISPATCH_SIZES),
    "dispatch negative": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3), None, [-3, 2, 0, 4]), "-3"),
    "dispatch float": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3), None, [3.5, 2, 0, 4]), "float"),
    "dispatch string": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3), None, ["3", 2, 0, 4]), "str"),
    "dispatch int": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3), None, 9), "int"),
    "dispatch meta": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3, device="meta"), None, SIZES), "meta"),
    "dispatch sparse": (lambda: EP_DISPATCH(torch.zeros(2, 8, 3).to_sparse(), None, SIZES), "sparse"),
    "dispatch quantized": (lambda: EP_DISPATCH(quantized(2, 8, 3), None, SIZES), "quint8|quantized"),
    "dispatch no tensor": (lambda: EP_DISPATCH([1.0], None, SIZES), "list"),
    "dispatch another rank": (
        lambda: EP_DISPATCH(
            torch.zeros(0, 8, 3), SimpleNamespace(group=GROUP, world_size=4, rank=2, replicated_sequence=False), SIZES
        ),
        "process group size/rank is 4/1.*4/2",
    ),
    "return matrix": (
        lambda: EP_UNDISPATCH(torch.zeros(9, 2), None, SIZES),
        re.escape("[global_tokens,local_heads,dim]"),
    ),
    "return uneven": (lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3)), "uneven EP sequence requires explicit split sizes"),
    "return few sizes": (lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3), None, SIZES[:3]), RETURN_SIZES),
    "return other sum": (lambda: EP_UNDISPATCH(torch.zeros(8, 2, 3), None, SIZES), RETURN_SIZES),
    "return negative": (lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3), None, [-3, 2, 6, 4]), "-3"),
    "return float": (lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3), None, [3.5, 1.5, 0, 4]), "float"),
    "return meta": (lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3, device="meta"), None, SIZES), "meta"),
    "return sparse": (lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3).to_sparse(), None, SIZES), "sparse"),
    "return quantized": (lambda: EP_UNDISPATCH(quantized(9, 2, 3), None, SIZES), "quint8|quantized"),
    "return no tensor": (lambda: EP_UNDISPATCH([1.0], None, SIZES), "list"),
    "heads few sizes": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3)], SIZES[:3]), ULYSSES_SIZES),
    "heads one size": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3)], [3]), ULYSSES_SIZES),
    "heads other size": (
        lambda: SCATTER_HEADS([torch.zeros(2, 8, 3), torch.zeros(3, 8, 3)], SIZES),
        re.escape("all Ulysses inputs must be [local_tokens, heads, dim]"),
    ),
    "heads matrix": (
        lambda: SCATTER_HEADS([torch.zeros(2, 8)], SIZES),
        re.escape("all Ulysses inputs must be [local_tokens, heads, dim]"),
    ),
    "heads dims differ": (
        lambda: SCATTER_HEADS([torch.zeros(2, 8, 3), torch.zeros(2, 8, 4)], SIZES),
        "attention heads must divide evenly across Ulysses ranks",
    ),
    "heads do not divide": (
        lambda: SCATTER_HEADS([torch.zeros(2, 8, 3), torch.zeros(2, 6, 3)], SIZES),
        "attention heads must divide evenly across Ulysses ranks",
    ),
    "heads negative": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3)], [-3, 2, 0, 4]), "-3"),
    "heads float": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3)], [3.5, 2, 0, 4]), "float"),
    "heads sizes None": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3)], None), "NoneType"),
    "heads devices": (
        lambda: SCATTER_HEADS([torch.zeros(2, 8, 3), torch.zeros(2, 8, 3, device="meta")], SIZES),
        "device meta",
    ),
    "heads meta": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3, device="meta")], SIZES), "meta"),
    "heads sparse": (lambda: SCATTER_HEADS([torch.zeros(2, 8, 3).to_sparse()], SIZES), "sparse"),
    "heads quantized": (lambda: SCATTER_HEADS([quantized(2, 8, 3)], SIZES), "quint8|quantized"),
    "heads no tensor": (lambda: SCATTER_HEADS([[1.0]], SIZES), "list"),
    "heads None": (lambda: SCATTER_HEADS(None, SIZES), "NoneType"),
    "seqlen matrix": (
        lambda: SCATTER_SEQLEN(torch.zeros(9, 2), SIZES),
        re.escape("Ulysses attention input must be contiguous [S,H,D]"),
    ),
    "seqlen strided": (
        lambda: SCATTER_SEQLEN(torch.zeros(2, 9, 3).transpose(0, 1), SIZES),
        re.escape("Ulysses attention input must be contiguous [S,H,D]"),
    ),
    "seqlen sizes": (lambda: SCATTER_SEQLEN(torch.zeros(9, 2, 3), SIZES[:3]), "split_sizes must partition"),
    "seqlen sum": (lambda: SCATTER_SEQLEN(torch.zeros(8, 2, 3), SIZES), "split_sizes must partition"),
    "seqlen negative": (lambda: SCATTER_SEQLEN(torch.zeros(9, 2, 3), [-3, 2, 6, 4]), "-3"),
    "seqlen meta": (lambda: SCATTER_SEQLEN(torch.zeros(9, 2, 3, device="meta"), SIZES), "meta"),
    "seqlen quantized": (lambda: SCATTER_SEQLEN(quantized(9, 2, 3), SIZES), "quint8|quantized"),
    "seqlen no tensor": (lambda: SCATTER_SEQLEN([1.0], SIZES), "list"),
}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("case", WRONG_WRAPPER_CALLS)
def test_wrong_calls_of_the_wrappers(case: str) -> None:
    call, words = WRONG_WRAPPER_CALLS[case]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("inner", [group for name, (group, _) in NO_GROUPS.items() if name != "None"])
def test_wrappers_with_what_is_no_group_inside(inner: Any) -> None:
    group = SimpleNamespace(group=inner, world_size=RANKS, rank=RANK, replicated_sequence=False)
    for call in (
        lambda: EP_DISPATCH(torch.zeros(2, 8, 3), group, SIZES),
        lambda: EP_UNDISPATCH(torch.zeros(9, 2, 3), group, SIZES),
        lambda: SCATTER_HEADS([torch.zeros(2, 8, 3)], SIZES, group),
        lambda: SCATTER_SEQLEN(torch.zeros(9, 2, 3), SIZES, group),
    ):
        with pytest.raises(ValueError, match="process group"):
            call()


def test_a_single_rank_is_not_validated() -> None:
    single = SimpleNamespace(group=None, world_size=1, rank=0, replicated_sequence=False)
    for anything in (torch.zeros(2), "not a tensor", None):
        assert EP_DISPATCH(anything, single, "no sizes") is anything
        assert EP_UNDISPATCH(anything, single, "no sizes") is anything
        assert SCATTER_SEQLEN(anything, "no sizes", single) is anything
        (same,) = SCATTER_HEADS([anything], "no sizes", single)
        assert same is anything


# --- What 0.30.0 accepts stays accepted ----------------------------------------------------------------------------


def stock_parallel() -> ModuleType:
    """The host's own module from its file, without the seconds that importing vllm_omni takes."""
    host = importlib.util.find_spec("vllm_omni")
    if host is None or not host.submodule_search_locations:
        pytest.skip("vLLM-Omni is not installed")
    path = f"{host.submodule_search_locations[0]}/diffusion/models/magi2/parallel.py"
    spec = importlib.util.spec_from_file_location("stock_magi2_parallel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def sizes_of_all_kinds(sizes: list[int]) -> dict[str, Any]:
    import numpy

    return {
        "list": sizes,
        "tuple": tuple(sizes),
        "torch.Size": torch.Size(sizes),
        "numpy array": numpy.array(sizes),
        "numpy int32": [numpy.int32(size) for size in sizes],
        "0-d tensors": [torch.tensor(size) for size in sizes],
        "1-d tensor": torch.tensor(sizes),
        "0-d arrays": [numpy.array(size) for size in sizes],
    }


def accepted_cases(parallel: Any, rank: int, group: Any) -> dict[str, Callable[[], Any]]:
    """Calls of the four functions, made on both ranks alike, of a module or namespace `parallel`."""
    cases: dict[str, Callable[[], Any]] = {}
    tensor = torch.arange(3 * 4 * 2, dtype=torch.float32).reshape(3, 4, 2)[: (3, 1)[rank]] + 100 * rank
    gathered = torch.arange(4 * 2 * 2, dtype=torch.float32).reshape(4, 2, 2) + 100 * rank
    for name, sizes in sizes_of_all_kinds([3, 1]).items():
        cases[f"ep_dispatch {name}"] = lambda s=sizes: parallel.ep_dispatch(tensor, group, s)
        cases[f"ep_undispatch {name}"] = lambda s=sizes: parallel.ep_undispatch(gathered, group, s)
        cases[f"heads {name}"] = lambda s=sizes: parallel.scatter_heads_gather_seqlen([tensor, tensor * 2], s, group)
        cases[f"seqlen {name}"] = lambda s=sizes: parallel.scatter_seqlen_gather_heads(gathered, s, group)
    one = tensor[:1]
    cases["bool sizes"] = lambda: parallel.ep_dispatch(one, group, [True, True])
    cases["bool sizes back"] = lambda: parallel.ep_undispatch(gathered[:2], group, [True, True])
    cases["bool sizes heads"] = lambda: parallel.scatter_heads_gather_seqlen([one], [True, True], group)
    cases["bool sizes seqlen"] = lambda: parallel.scatter_seqlen_gather_heads(gathered[:2], [True, True], group)
    cases["inferred"] = lambda: parallel.ep_dispatch(tensor, group)
    cases["inferred back"] = lambda: parallel.ep_undispatch(gathered, group)
    cases["keywords"] = lambda: parallel.ep_dispatch(tensor=tensor, group=group, sequence_split_sizes=[3, 1])
    cases["keywords back"] = lambda: parallel.ep_undispatch(tensor=gathered, group=group, sequence_split_sizes=[3, 1])
    cases["keywords heads"] = lambda: parallel.scatter_heads_gather_seqlen(
        tensors=iter([tensor]), split_sizes=[3, 1], group=group
    )
    cases["no inputs"] = lambda: parallel.scatter_heads_gather_seqlen([], [3, 1], group)
    cases["mixed types"] = lambda: parallel.scatter_heads_gather_seqlen(
        [tensor.bfloat16(), tensor.half(), tensor], [3, 1], group
    )
    cases["int and float"] = lambda: parallel.scatter_heads_gather_seqlen([tensor.long(), tensor.half()], [3, 1], group)
    cases["uneven heads of inputs"] = lambda: parallel.scatter_heads_gather_seqlen(
        [tensor, tensor[:, :2], tensor[:, :0]], [3, 1], group
    )
    for shape in ((0, 2), (4, 0), (0, 0)):
        cases[f"empty {shape}"] = lambda s=shape: parallel.ep_dispatch(torch.zeros(len(tensor), *s), group, [3, 1])
        cases[f"empty back {shape}"] = lambda s=shape: parallel.ep_undispatch(torch.zeros(4, *s), group, [3, 1])
        cases[f"empty heads {shape}"] = lambda s=shape: parallel.scatter_heads_gather_seqlen(
            [torch.zeros(len(tensor), *s)], [3, 1], group
        )
        cases[f"empty seqlen {shape}"] = lambda s=shape: parallel.scatter_seqlen_gather_heads(
            torch.zeros(4, *s), [3, 1], group
        )
    cases["no tokens"] = lambda: parallel.ep_dispatch(tensor[:0], group, [0, 0])
    cases["no tokens back"] = lambda: parallel.ep_undispatch(gathered[:0], group, [0, 0])
    cases["no tokens heads"] = lambda: parallel.scatter_heads_gather_seqlen([tensor[:0]], [0, 0], group)
    cases["no tokens seqlen"] = lambda: parallel.scatter_seqlen_gather_heads(gathered[:0], [0, 0], group)
    cases["strided"] = lambda: parallel.ep_dispatch(tensor.transpose(1, 2), group, [3, 1])
    cases["strided back"] = lambda: parallel.ep_undispatch(gathered.transpose(1, 2), group, [3, 1])
    cases["grad"] = lambda: parallel.ep_dispatch(tensor.clone().requires_grad_(), group, [3, 1])
    cases["grad back"] = lambda: parallel.ep_undispatch(gathered.clone().requires_grad_(), group, [3, 1])
    cases["grad seqlen"] = lambda: parallel.scatter_seqlen_gather_heads(
        gathered.clone().requires_grad_(), [3, 1], group
    )
    cases["bool tensor"] = lambda: parallel.ep_dispatch(tensor > 3, group, [3, 1])
    cases["int tensor"] = lambda: parallel.ep_undispatch(gathered.long(), group, [3, 1])
    return cases


def told(call: Callable[[], Any]) -> Any:
    """What a call gives, comparable: per tensor type, shape, strides and bits; or the kind of its error."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__
    tensors = result if isinstance(result, list) else [result]
    return type(result).__name__, [
        (str(x.dtype), tuple(x.shape), x.stride() if x.numel() else None, x.requires_grad, model.bits(x))
        for x in tensors
    ]


# torch takes no bools and no tensor for a list of sizes; ours reads any integers.
REFUSED_BY_STOCK = {
    "bool sizes back",
    "bool sizes heads",
    "bool sizes seqlen",
    "heads 1-d tensor",
    "seqlen 1-d tensor",
}


def stock_and_ours(rank: int, nproc: int, store: str) -> dict[str, tuple[Any, Any]]:
    stock = stock_parallel()
    ours: Any = SimpleNamespace(
        ep_dispatch=magi2.make_ep_dispatch(stock),
        ep_undispatch=magi2.make_ep_undispatch(stock),
        scatter_heads_gather_seqlen=magi2.make_scatter_heads_gather_seqlen(stock),
        scatter_seqlen_gather_heads=magi2.make_scatter_seqlen_gather_heads(stock),
    )
    seen = {}
    with process_group(rank, nproc, store), environment():
        for group in (dist.group.WORLD, None):  # None within means the default group, as torch reads it
            where = stock.Magi2ParallelGroup(group, nproc, rank)
            theirs, mine = (accepted_cases(parallel, rank, where) for parallel in (stock, ours))
            for name in theirs:
                seen[f"{name}, group {'None' if group is None else 'WORLD'}"] = told(theirs[name]), told(mine[name])
    return seen


def test_what_stock_accepts_stays_accepted(ranks: Any) -> None:
    stock_parallel()
    for seen in ranks(stock_and_ours, 2):
        different = {name: pair for name, pair in seen.items() if not isinstance(pair[0], str) and pair[0] != pair[1]}
        assert different == {}
        refused = {name.rsplit(", group", 1)[0] for name, (stock, _) in seen.items() if isinstance(stock, str)}
        assert refused == REFUSED_BY_STOCK


# --- What looks like no plain tensor and is one -------------------------------------------------------


class Subclass(torch.Tensor):
    """Ordinary memory under another name."""


def plain_after_all(rank: int, nproc: int, store: str) -> None:
    layout = HeadParallelLayout((2, 2), rank)
    data = torch.arange(2 * 4 * 3, dtype=torch.float32).view(2, 4, 3)
    expected = torch.cat([data, data])[:, 2 * rank : 2 * rank + 2]
    with process_group(rank, nproc, store) as group:
        for tensor in (torch.nn.Parameter(data.clone()), data.clone().as_subclass(Subclass)):
            found = scatter_heads_gather_tokens(tensor, group, layout)
            assert torch.equal(found.detach().as_subclass(torch.Tensor), expected)


def test_parameters_and_subclasses_with_memory_are_exchanged(ranks: Any) -> None:
    ranks(plain_after_all, 2)


def distributed_tensor_on_one_rank(rank: int, nproc: int, store: str) -> str:
    """Rank 0 brings a DTensor; with the check on every rank is told."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    data = torch.zeros(2, 4, 3)
    with process_group(rank, nproc, store) as group, environment(**{config.CHECK: "1"}):
        mesh = init_device_mesh("cpu", (nproc,))
        tensor = DTensor.from_local(data, mesh, [Replicate()], run_check=False) if rank == 0 else data
        with pytest.raises((ValueError, DisagreementError)) as caught:
            scatter_heads_gather_tokens(tensor, group, HeadParallelLayout((2, 2), rank))
    assert type(caught.value) is (ValueError if rank == 0 else DisagreementError)
    return str(caught.value)


def test_a_distributed_tensor_is_refused_and_told(ranks: Any) -> None:
    first, second = ranks(distributed_tensor_on_one_rank, 2)
    assert "got a DTensor" in first
    assert "DTensor" in second
    assert "rank 0" in second


# --- Layouts of a newer contract ----------------------------------------------------------------------


@dataclass(frozen=True)
class Newer:
    """A host's layout with a field that came later."""

    token_counts: tuple[int, ...]
    rank: int
    replica_counts: tuple[tuple[int, ...], ...] | None = None
    head_order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NewerStill:
    """One whose new field must be given."""

    token_counts: tuple[int, ...]
    rank: int
    chunks: int


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Newer(LAYOUT.token_counts, RANK, head_order=(1, 0, 3, 2)), r"head_order=\(1, 0, 3, 2\)"),
        (NewerStill(LAYOUT.token_counts, RANK, 1), "chunks=1"),
    ],
)
def test_a_field_that_is_not_known_is_refused_unless_it_is_the_default(layout: Any, told: str) -> None:
    for function, tensor in (
        (scatter_heads_gather_tokens, torch.zeros(LAYOUT.local_tokens, 8, 3)),
        (scatter_tokens_gather_heads, torch.zeros(LAYOUT.owned_tokens, 2, 3)),
    ):
        with pytest.raises(ValueError, match=told):
            function(tensor, GROUP, layout)
    assert exchange.as_layout(Newer(LAYOUT.token_counts, RANK)) == LAYOUT


def test_on_the_bridge_such_a_layout_goes_to_the_hosts_own_function() -> None:
    from vllm_musa_headpar.host.head_parallel import _bridged

    bridged = _bridged(lambda *args: ("ours", *args), lambda *args: ("stock", *args))
    plain, further = Newer((1, 1), 0), Newer((1, 1), 0, head_order=(1, 0))
    assert bridged("tensor", "group", plain) == ("ours", "tensor", "group", plain)
    assert bridged("tensor", "group", further) == ("stock", "tensor", "group", further)
