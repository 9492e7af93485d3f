"""vLLM-Omni's own transformers under Ulysses: the plugin on and off give the same bits, through its exchanges."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import host_models
import magi2
import pytest
import torch
from host_models import MODELS, HostModel, Topology
from pool import RankPool

from vllm_musa_headpar.testing.counters import counting

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

EXCHANGES = ("p2p", "all_to_all")
EVEN, ODD, MORE = (4, 4), (3, 5), (4, 6)  # tokens that two and four ranks share evenly, and not
Counts = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A model as its ranks run it; compared at both batch sizes, each number of tokens and element type."""

    name: str
    topology: Topology
    heads: int
    mode: str = "strict"
    grids: tuple[tuple[int, int], ...] = (EVEN,)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    batches: tuple[int, ...] = (1, 2)
    backend: str | None = None  # the compiler's; None for eager

    @property
    def model(self) -> HostModel:
        return MODELS[self.name]

    def __str__(self) -> str:
        how = "eager" if self.backend is None else f"compiled by {self.backend}"
        return f"{self.name}, {self.topology}, {self.heads} heads, {self.mode}, {how}"


def strict_grids(name: str) -> tuple[tuple[int, int], ...]:
    """Uneven tokens too where the host pads them; else it refuses them in strict mode."""
    return (EVEN, ODD) if MODELS[name].pads else (EVEN,)


def uaa_grids(name: str) -> tuple[tuple[int, int], ...]:
    """Uneven tokens too; but LTX-2's audio goes through an exchange of equal counts in any mode."""
    return (EVEN,) if name == "LTX-2" else (EVEN, ODD)


def dtypes(name: str) -> tuple[torch.dtype, ...]:
    """HunyuanVideo mixes types in a layer norm where the host runs under autocast, which torch on CPU refuses."""
    return (torch.float32,) if name == "HunyuanVideo 1.5" else (torch.float32, torch.bfloat16)


CASES = [
    *(Case(name, Topology(2), 4, "strict", strict_grids(name), dtypes(name)) for name in MODELS),
    *(Case(name, Topology(4), 8, "strict", strict_grids(name)) for name in MODELS),
    *(Case(name, Topology(2), 3, "advanced_uaa", uaa_grids(name)) for name in MODELS),  # 2 and 1 heads
    *(Case(name, Topology(4), 6, "advanced_uaa", uaa_grids(name), dtypes(name)) for name in MODELS),  # 2, 2, 2 and none
    Case("Qwen-Image", Topology(2), 4, "advanced_uaa", (EVEN, ODD)),
    Case("LongCat-Image", Topology(4), 4, "advanced_uaa", (EVEN, ODD)),
    # With ring attention the host refuses masks, which HunyuanVideo has, and LTX-2 altogether.
    *(Case(name, Topology(4, ring=2), 4) for name in MODELS if name not in ("HunyuanVideo 1.5", "LTX-2")),
    Case("LongCat-Image", Topology(4, ring=2), 3, "advanced_uaa"),
    Case("Wan 2.2", Topology(4, cfg=2), 4),
    Case("LTX-2", Topology(4, cfg=2), 4),
    Case("Qwen-Image", Topology(4, tp=2), 4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_with_the_plugin_on_and_off(ranks: RankPool, case: Case) -> None:
    for different, exchanged in ranks(compare, case.topology.nproc, case):
        assert different == []
        assert exchanged == expected_exchanges(case, exchanged["forwards"])


def expected_exchanges(case: Case, forwards: int) -> Counts:
    assert forwards > 0
    return {
        "forwards": forwards,
        "dispatch": forwards * case.model.dispatches,
        "return": forwards * case.model.returns,
    }


def compare(rank: int, nproc: int, store: str, case: Case) -> tuple[list[str], Counts]:
    """What differs between plugin off and on, and what the plugin exchanged."""
    expected, _ = run(rank, store, case, None)
    different, total = [], collections.Counter[str]()
    for exchange in EXCHANGES:
        found, exchanged = run(rank, store, case, exchange)
        for what, outputs in found.items():
            different += unequal(f"{exchange}, {what}", outputs, expected[what])
        total += exchanged
        total["forwards"] += len(found)
    return different, dict(total)


def run(
    rank: int, store: str, case: Case, exchange: str | None
) -> tuple[dict[str, list[torch.Tensor]], collections.Counter[str]]:
    """The outputs of one forward for each element type, batch and number of tokens, and what the plugin exchanged.

    Each run has fresh groups: ranks settle an exchange once per group.
    """
    from vllm_omni.diffusion.compile import regionally_compile

    outputs, model = {}, case.model
    groups = host_models.parallel_state(rank, f"{store}-{exchange}", case.topology)
    with groups, plugin(exchange) as exchanged:
        for dtype in case.dtypes:
            with host_models.transformer(model, case.topology, case.heads, case.mode, dtype) as made:
                if case.backend is not None:
                    regionally_compile(made, dynamic=True, backend=case.backend)
                for batch, grid in itertools.product(case.batches, case.grids):
                    given = host_models.inputs(model, batch, grid, dtype)
                    outputs[f"B={batch}, {grid} tokens, {dtype}"] = host_models.forward(made, given)
    return outputs, exchanged


def compiled(name: str, heads: int, mode: str, backend: str = "eager", batches: tuple[int, ...] = (2,)) -> Case:
    return Case(name, Topology(2), heads, mode, (EVEN, MORE), batches=batches, backend=backend)


COMPILED = [
    *(compiled(name, 4, "strict") for name in MODELS if name not in ("Qwen-Image", "Wan 2.2")),
    compiled("Qwen-Image", 3, "advanced_uaa", "eager", (1, 2)),
    compiled("Wan 2.2", 4, "strict", "aot_eager", (1, 2)),
    compiled("Qwen-Image", 4, "strict", "inductor"),
]


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_same_bits_compiled(ranks: RankPool, case: Case) -> None:
    """As the host compiles its blocks: the plugin breaks no graph, and nothing is compiled again because of it."""
    for outcome in ranks(compare_compiled, case.topology.nproc, case, timeout=500.0):
        assert outcome["different"] == []
        assert outcome["exchanged"] == expected_exchanges(case, outcome["exchanged"]["forwards"])
        assert outcome["breaks on"] == outcome["breaks off"]
        assert outcome["graphs on"] == outcome["graphs off"] > 0


def compare_compiled(rank: int, nproc: int, store: str, case: Case) -> dict[str, Any]:
    """What differs between plugin off and on, and what the compiler did in each."""
    outcome: dict[str, Any] = {}
    results = []
    for switch, exchange in {"off": None, "on": "p2p"}.items():
        with fresh_compiler() as counters:
            results.append(run(rank, store, case, exchange))
            outcome[f"graphs {switch}"] = counters["stats"]["unique_graphs"]
            outcome[f"breaks {switch}"] = set(counters["graph_break"])
    (expected, _), (found, exchanged) = results
    outcome["different"] = [each for what in found for each in unequal(what, found[what], expected[what])]
    outcome["exchanged"] = {**exchanged, "forwards": len(found)}
    return outcome


@contextmanager
def fresh_compiler() -> Iterator[Any]:
    """Nothing compiled before and nothing left behind; yields the compiler's counters."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    try:
        yield counters
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("topology", [Topology(1), Topology(2, tp=2)], ids=str)
@pytest.mark.parametrize("name", ["Qwen-Image", "Wan 2.2"])
def test_costs_nothing_where_no_heads_are_exchanged(ranks: RankPool, name: str, topology: Topology) -> None:
    for off, on, exchanged in ranks(count_a_forward, topology.nproc, topology, name):
        assert on == off
        assert exchanged == {}


def count_a_forward(rank: int, nproc: int, store: str, topology: Topology, name: str) -> tuple[Any, Any, Counts]:
    """What one forward costs with the plugin off and on."""
    seen = []
    for exchange in (None, "p2p"):
        groups = host_models.parallel_state(rank, f"{store}-{exchange}", topology)
        with groups, plugin(exchange) as exchanged, host_models.transformer(MODELS[name], topology, 4) as made:
            given = host_models.inputs(MODELS[name], 2, EVEN)
            host_models.forward(made, given)  # what the host keeps, it keeps from here on
            with counting() as counts:
                host_models.forward(made, given)
        seen.append(counts)
    return seen[0], seen[1], dict(exchanged)


# --- On MUSA with MCCL, simulated where there is no card ----------------------------------------------


@pytest.mark.musa
@pytest.mark.parametrize(("name", "heads", "mode"), [("Qwen-Image", 4, "strict"), ("FLUX.2", 3, "advanced_uaa")])
def test_a_whole_model_on_mccl(musa_ranks: RankPool, name: str, heads: int, mode: str) -> None:
    """`auto` there is point-to-point, with all tensors of an attention in one batch."""
    case = Case(name, Topology(2), heads, mode)
    for different, exchanged, batches in musa_ranks(compare_on_mccl, 2, case, timeout=500.0):
        assert different == []
        assert exchanged == expected_exchanges(case, exchanged["forwards"])
        assert batches == 2 * case.model.returns


def compare_on_mccl(rank: int, nproc: int, store: str, case: Case) -> tuple[list[str], Counts, int]:
    """What differs between plugin off and on, what the plugin exchanged, and its batches in one forward."""
    from musa_device import device_of

    device = device_of(rank)
    seen: list[list[list[torch.Tensor]]] = []
    for exchange in (None, "auto"):
        groups = host_models.parallel_state(rank, f"{store}-{exchange}", case.topology, "mccl")
        with (
            groups,
            plugin(exchange, "p2p" if exchange else None) as exchanged,
            host_models.transformer(case.model, case.topology, case.heads, case.mode, device=device) as made,
        ):
            outputs = []
            for batch in case.batches:
                given = on_device(host_models.inputs(case.model, batch, EVEN), device)
                with counting() as counts:
                    outputs.append(host_models.forward(made, given))
            assert {each.device.type for output in outputs for each in output} == {"musa"}
            seen.append([[each.cpu() for each in output] for output in outputs])
    different = [
        each
        for batch, found, expected in zip(case.batches, seen[1], seen[0], strict=True)
        for each in unequal(f"B={batch}", found, expected)
    ]
    return different, {**exchanged, "forwards": len(case.batches)}, counts.batches


def on_device(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def unequal(case: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    assert len(found) == len(expected) > 0
    pairs = enumerate(zip(found, expected, strict=True))
    return [f"{case}: output {number}" for number, pair in pairs if not same_bits(*pair)]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    assert left.isfinite().all()
    assert left.std() > 0.01, "the model computes nothing that could differ"
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@contextmanager
def plugin(exchange: str | None, used: str | None = None) -> Iterator[collections.Counter[str]]:
    """The plugin on with an exchange, or off (None), for the time of the block; counts the tensors that go through it,
    by direction. `used` is what the exchange comes to, where that is not itself."""
    from vllm_musa_headpar import exchange as core

    exchanged = collections.Counter[str]()
    carry_out = core._carry_out

    def counted(registrations: Any, exchanges: Any, group: Any) -> None:
        assert {each.name for each in registrations} == {used or exchange}
        exchanged.update(each.name for each in exchanges)
        carry_out(registrations, exchanges, group)

    with magi2.plugin(exchange), mock.patch.object(core, "_carry_out", counted):
        yield exchanged
