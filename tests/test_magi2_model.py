"""The tiny MAGI-2 on the real host: the plugin on and off give the same bits, through the expected exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import magi2
import pytest
import torch
from magi2 import Topology
from pool import RankPool

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

TOPOLOGIES = [
    Topology(4, tp=4),
    Topology(4, tp=4, dtype=torch.bfloat16),
    Topology(4, tp=2),
    Topology(4, tp=2, dtype=torch.bfloat16),
    Topology(4),
    Topology(4, dtype=torch.bfloat16),
    Topology(2, moe_heads=3),  # shards of 2 and 1 real heads
    Topology(4, moe_heads=6, dtype=torch.bfloat16),  # shards of 2, 2, 2 and none
    Topology(8, heads=8, moe_heads=12, dtype=torch.bfloat16, steps=3),  # MAGI-2's own: two ranks own none
    Topology(8, tp=2, heads=8),
    Topology(4, cfg=2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_same_bits_with_the_plugin_on_and_off(ranks: RankPool, topology: Topology) -> None:
    for outcome in ranks(compare_on_and_off, topology.nproc, topology):
        assert outcome["exchanges"] == topology.expected_exchanges()
        assert outcome["different"] == []


def compare_on_and_off(rank: int, nproc: int, store: str, topology: Topology) -> dict[str, object]:
    torch.manual_seed(0)
    off, none = magi2.run_model(rank, nproc, store, None, topology)
    on, exchanges = magi2.run_model(rank, nproc, store, "counted", topology)
    p2p, _ = magi2.run_model(rank, nproc, store, "p2p", topology)
    assert none == []
    return {
        "exchanges": exchanges,
        "different": differences(off, on) + differences(off, p2p),
    }


def differences(one: magi2.Trace, other: magi2.Trace) -> list[str]:
    """What is not the same bits in two runs."""
    assert len(one.outputs) == len(other.outputs) > 0
    pairs = {f"step {step}": pair for step, pair in enumerate(zip(one.outputs, other.outputs, strict=True))}
    pairs |= {"video": (one.video, other.video), "audio": (one.audio, other.audio)}
    return [name for name, (left, right) in pairs.items() if not same_bits(left, right)]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


SINGLE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", SINGLE, ids=str)
def test_agrees_with_the_single_rank_model(ranks: RankPool, dtype: torch.dtype) -> None:
    """Not bit for bit, since other shapes and tensor parallelism sum in another order: the norm of the difference
    stays below 1e-4 of the output's in float32 and 5e-2 in bfloat16 (8 bits of precision). Every token goes to
    every expert here: with a choice, a rounding can flip it, and the outputs are not close then."""
    (expected,) = ranks(first_output, 1, Topology(1, top_k=4, dtype=dtype), None)
    for tp in (4, 2, 1):
        topology = Topology(4, tp=tp, top_k=4, dtype=dtype)
        for found in ranks(first_output, topology.nproc, topology, "auto"):
            assert (found - expected).norm() <= SINGLE[dtype] * expected.norm()


def first_output(rank: int, nproc: int, store: str, topology: Topology, exchange: str | None) -> torch.Tensor:
    return magi2.run_model(rank, nproc, store, exchange, topology)[0].outputs[0]


def test_compiled_regions_neither_break_nor_recompile_because_of_the_plugin(ranks: RankPool) -> None:
    """The eager backend stands in for the host's inductor; fullgraph=True makes any graph break an error."""
    topology = Topology(4, moe_heads=6)
    for off, on in ranks(with_compiled_regions, topology.nproc, topology):
        assert off["graphs"] == on["graphs"] > 0
        assert off["breaks"] == on["breaks"] == {}
        assert differences(off["trace"], on["trace"]) == []


def with_compiled_regions(rank: int, nproc: int, store: str, topology: Topology) -> list[dict[str, object]]:
    from torch._dynamo.utils import counters

    seen = []
    for exchange in (None, "counted"):
        torch._dynamo.reset()
        counters.clear()
        trace, _ = magi2.run_model(rank, nproc, store, exchange, topology, compile_regions)
        graphs = counters["stats"]["unique_graphs"]
        seen.append({"trace": trace, "graphs": graphs, "breaks": dict(counters["graph_break"])})
    torch._dynamo.reset()
    return seen


@contextmanager
def compile_regions(model: torch.nn.Module) -> Iterator[None]:
    model.compile_regions(fullgraph=True, backend="eager")
    yield


def test_goes_together_with_cache_dit(ranks: RankPool) -> None:
    """As the host enables it. Cached steps skip layers on all ranks alike, so there are fewer exchanges."""
    topology = Topology(2, moe_heads=3, steps=5)
    for different, exchanges in ranks(compare_prepared, topology.nproc, topology, "cache_dit"):
        assert different == []
        assert 2 < len(exchanges) < len(topology.expected_exchanges())


def test_goes_together_with_the_layerwise_offloader(ranks: RankPool) -> None:
    """The host's offloading backend itself, on CPU; the host's own set-up would ask for a device that can offload."""
    topology = Topology(2, moe_heads=3)
    for different, exchanges in ranks(compare_prepared, topology.nproc, topology, "offload"):
        assert different == []
        assert exchanges == topology.expected_exchanges()


def compare_prepared(rank: int, nproc: int, store: str, topology: Topology, how: str) -> tuple[list[str], list[str]]:
    prepare = {"cache_dit": enable_cache_dit, "offload": enable_layerwise_offload}[how]
    off, _ = magi2.run_model(rank, nproc, store, None, topology, prepare)
    on, exchanges = magi2.run_model(rank, nproc, store, "counted", topology, prepare)
    return differences(off, on), exchanges


def pipeline_of(model: torch.nn.Module) -> torch.nn.Module:
    """The host looks its enablers up by the pipeline class's name, and Cache-DiT marks that class."""
    pipeline = type("Magi2Pipeline", (torch.nn.Module,), {})()
    pipeline.transformer = model
    return pipeline


@contextmanager
def enable_cache_dit(model: torch.nn.Module) -> Iterator[None]:
    from vllm_omni.diffusion.cache.cachedit import CacheDiTBackend

    pipeline = pipeline_of(model)
    options = {"Fn_compute_blocks": 1, "max_warmup_steps": 1, "residual_diff_threshold": 10.0}
    backend = CacheDiTBackend(options)
    backend.enable(pipeline)
    backend.refresh(pipeline, 5)
    yield
    backend.disable(pipeline)


@contextmanager
def enable_layerwise_offload(model: torch.nn.Module) -> Iterator[None]:
    from vllm_omni.diffusion.offloader.base import OffloadConfig
    from vllm_omni.diffusion.offloader.config import OffloadStrategy
    from vllm_omni.diffusion.offloader.layerwise_backend import LayerWiseOffloadBackend

    config = OffloadConfig(strategy=OffloadStrategy.LAYER_WISE, pin_cpu_memory=False)
    backend = LayerWiseOffloadBackend(config, torch.device("cpu"))
    backend.enable(pipeline_of(model))
    assert backend.enabled
    yield
    backend.disable()


def test_undoing_gives_the_stock_functions_back(ranks: RankPool) -> None:
    (changed, restored) = ranks(on_and_undone, 1)[0]
    assert changed
    assert restored


def on_and_undone(rank: int, nproc: int, store: str) -> tuple[bool, bool]:
    from vllm_omni.diffusion.models.magi2 import attention, mh_moe, modeling_magi2, parallel

    def current() -> list[object]:
        owners = [
            (parallel, ("ep_dispatch", "ep_undispatch", "scatter_heads_gather_seqlen", "scatter_seqlen_gather_heads")),
            (mh_moe, ("ep_dispatch", "ep_undispatch")),
            (attention, ("scatter_heads_gather_seqlen", "scatter_seqlen_gather_heads")),
            (mh_moe.Magi2MultiHeadMoE, ("forward",)),
            (modeling_magi2.Magi2TransformerLayer, ("forward",)),
        ]
        return [vars(owner)[name] for owner, names in owners for name in names]

    stock = current()
    with magi2.plugin("auto"):
        changed = all(now is not before for now, before in zip(current(), stock, strict=True))
    return changed, all(now is before for now, before in zip(current(), stock, strict=True))
