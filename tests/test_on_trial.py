"""Functions of unknown body, taken on trial: MAGI-2's wrappers that drifted, and development hosts' attention."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import RankPool, environment, process_group
from stand_in import MAGI2, build, fresh_plugin, modified_magi2
from test_drift import Edits, sources

from vllm_musa_headpar.errors import ExchangeError
from vllm_musa_headpar.testing.counters import counting
from vllm_musa_headpar.testing.ranks import run_ranks

pytestmark = pytest.mark.cpu

COUNTS = [3, 2]
DIM = 4
# The body is another one, what it does is not.
HARMLESS: Edits = [
    ("parallel.py", "ep_dispatch", "send = tensor.contiguous()", "send = tensor.clone().contiguous()"),
    ("parallel.py", "ep_undispatch", "send = tensor.contiguous()", "send = tensor.clone()"),
    ("parallel.py", "scatter_heads_gather_seqlen", "tensors = list(tensors)", "tensors = [*tensors]"),
    ("parallel.py", "scatter_seqlen_gather_heads", "local_tokens = split_sizes", "local_tokens = +split_sizes"),
]
PERMUTED = ".permute(1, 0, 2, 3)\n        .reshape(local_tokens,"
PARTS = "list(torch.split(output, local_head_counts, dim=1))"
EP_OUTPUT = "dist.all_to_all_single(\n        output.view(-1),"
# What a body may do otherwise: function, its text, what becomes of it, part of what is said on the ranks that see it
DIFFERENCES: dict[str, tuple[str, str, str, str]] = {
    "another head order": (
        "scatter_seqlen_gather_heads",
        PERMUTED,
        PERMUTED.replace("1, 0, 2, 3", "1, 2, 0, 3"),
        "the elements differ",
    ),
    "another token order": (
        "scatter_heads_gather_seqlen",
        PARTS,
        PARTS.replace("output", "output.flip(0)"),
        "the elements differ",
    ),
    "copies, not views": ("scatter_heads_gather_seqlen", PARTS, f"[one.clone() for one in {PARTS}]", "strides"),
    "another promotion": (
        "scatter_heads_gather_seqlen",
        "torch.cat(reshaped, dim=1)",
        "torch.cat([one.to(reshaped[0].dtype) for one in reshaped], dim=1)",
        "dtype torch.bfloat16 is expected, it gives torch.float32",
    ),
    "scales": ("ep_undispatch", "send = tensor.contiguous()", "send = tensor * 2", "the elements differ"),
    "scales what it was given": ("ep_dispatch", "send = tensor", "send = tensor.mul_(2)", "the elements differ"),
    "differs on one rank": (
        "ep_dispatch",
        "send = tensor",
        "send = (tensor + (group.rank == 1))",
        "the elements differ",
    ),
}
RECORDS = {
    "ep_dispatch": "magi2.ep_dispatch",
    "ep_undispatch": "magi2.ep_undispatch",
    "scatter_heads_gather_seqlen": "magi2.attention_dispatch",
    "scatter_seqlen_gather_heads": "magi2.attention_return",
}


def prepare(parallel: Any, function: str, group: Any, heads: int = 4) -> Callable[[], Any]:
    """A call of a function with inputs of this rank's own; the same inputs each time."""
    generator = torch.Generator().manual_seed(group.rank)
    inward = function in ("ep_dispatch", "scatter_heads_gather_seqlen")
    shape = (COUNTS[group.rank], heads, DIM) if inward else (sum(COUNTS), heads // 2, DIM)
    tensor = torch.randn(shape, generator=generator)
    arguments: tuple[Any, ...] = (tensor, group, COUNTS)
    if function == "scatter_heads_gather_seqlen":
        arguments = ([tensor.bfloat16(), tensor + 1, 3 * tensor], COUNTS, group)
    elif function == "scatter_seqlen_gather_heads":
        arguments = (tensor, COUNTS, group)
    return lambda: getattr(parallel, function)(*arguments)


def call(parallel: Any, function: str, group: Any, heads: int = 4) -> Any:
    return prepare(parallel, function, group, heads)()


def told(name: str) -> tuple[str, str]:
    from vllm_musa_headpar import report

    return next((record.status, record.reason) for record in report() if record.name == name)


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(torch.equal(found, expected)) and found.stride() == expected.stride()


def proven(rank: int, nproc: int, store: str, check: str) -> None:
    from vllm_musa_headpar import plugin, register

    with tempfile.TemporaryDirectory() as root, modified_magi2(Path(root), sources(HARMLESS)) as modules:
        parallel = modules["parallel"]
        with process_group(rank, nproc, store) as world:
            group = parallel.Magi2ParallelGroup(world, nproc, rank)
            expected = {name: call(parallel, name, group) for name in RECORDS}
            with environment(VLLM_MUSA_HEADPAR="1", VLLM_MUSA_HEADPAR_CHECK=check), fresh_plugin() as log:
                register()
                assert told("magi2.moe_forward")[0] == "refused", "it computes"
                for name, record in RECORDS.items():
                    assert told(record)[0] == "on trial", told(record)
                    again = prepare(parallel, name, group)
                    with counting() as first:
                        found = again()
                    assert same(found, expected[name])
                    assert told(record) == ("proven", "proven for 1 layout")
                    assert first.collectives["all_to_all_single"] >= 2
                    assert first.collectives["all_reduce"] >= 1
                    with counting() as later:
                        found = again()
                    assert same(found, expected[name])
                    assert dict(later.collectives) == {"all_to_all_single": 1}, name
                    assert later.host_syncs == 0, name
                    call(parallel, name, group, heads=8)
                    assert told(record) == ("proven", "proven for 2 layouts")
                lines = [line for level, line in log if level == "INFO"]
                assert "magi2.ep_dispatch (on trial)" in lines[0]
                assert "on trial: magi2.attention_dispatch, magi2.attention_return, magi2.ep_" in lines[1]
                traced = torch.compile(lambda: call(parallel, "ep_undispatch", group, heads=12), backend="eager")
                traced()
                assert told("magi2.ep_undispatch") == ("proven", "proven for 2 layouts"), "not under the compiler"
                assert plugin.undo() == []


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_harmless_body_is_proven_and_costs_nothing_from_then_on(ranks: RankPool, check: str) -> None:
    ranks(proven, 2, check, timeout=400)


def gives_way(rank: int, nproc: int, store: str, kinds: list[str]) -> None:
    from vllm_musa_headpar import diagnosis, register

    with process_group(rank, nproc, store) as world:
        for kind in kinds:
            function, old, new, reason = DIFFERENCES[kind]
            edits = sources([("parallel.py", function, old, new)])
            with tempfile.TemporaryDirectory() as root, modified_magi2(Path(root), edits) as modules:
                parallel, record = modules["parallel"], RECORDS[function]
                group = parallel.Magi2ParallelGroup(world, nproc, rank)
                expected = call(parallel, function, group)
                with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
                    register()
                    assert told(record)[0] == "on trial"
                    assert same(call(parallel, function, group), expected), kind
                    status, said = told(record)
                    assert status == "gave way"
                    assert said.startswith("gave way: ")
                    if kind != "differs on one rank":
                        assert reason in said
                    with counting() as later:
                        call(parallel, function, group)
                        call(parallel, function, group, heads=8)
                    assert dict(later.collectives) == {"all_to_all_single": 2}, "for good, whatever the layout"
                    warnings = [line for level, line in log if level == "WARNING" and "gave way" in line]
                    assert len(warnings) == 1
                    assert record in warnings[0]
                    odd = next(check for check in diagnosis.diagnose().checks if check.name == "patches")
                    assert f"{record} gave way" in odd.seen
                with environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin():
                    if "ep" not in function.split("_")[0]:  # else the MoE forward is refused, which ends a strict start
                        register()
                        with pytest.raises(ExchangeError, match="gave way"):
                            call(parallel, function, group)


def test_every_difference_is_found_on_every_rank(ranks: RankPool) -> None:
    ranks(gives_way, 2, list(DIFFERENCES), timeout=400)


def fails(rank: int, nproc: int, store: str) -> None:
    from vllm_musa_headpar import exchange, register
    from vllm_musa_headpar.agreement import trial

    function, record = "ep_dispatch", RECORDS["ep_dispatch"]
    no_memory = torch.OutOfMemoryError("no memory for 5 GiB")
    faults = {
        "the exchange raises": (exchange, "dispatch", True, "OutOfMemoryError: no memory for 5 GiB"),
        "the comparison raises": (trial, "difference", rank == 1, "could not be compared"),
    }
    with process_group(rank, nproc, store) as world:
        for fault, (module, name, hit, reason) in faults.items():
            with tempfile.TemporaryDirectory() as root, modified_magi2(Path(root), sources(HARMLESS[:1])) as modules:
                parallel = modules["parallel"]
                group = parallel.Magi2ParallelGroup(world, nproc, rank)
                expected = call(parallel, function, group)
                with environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin():
                    register()
                    assert told(record)[0] == "on trial"
                    with mock.patch.object(module, name, side_effect=no_memory) if hit else nullcontext():
                        assert same(call(parallel, function, group), expected), fault
                    status, said = told(record)
                    assert status == "gave way", fault
                    assert (reason if hit else "another rank found a difference") in said
                    assert same(call(parallel, function, group), expected), fault


def test_what_fails_while_on_trial_gives_way_on_every_rank(ranks: RankPool) -> None:
    ranks(fails, 2, timeout=400)


# --- Development hosts ---


def development_host(rank: int, nproc: int, store: str, tree: str, device: str) -> None:
    sys.path.insert(0, tree)
    parallel = importlib.import_module(f"{MAGI2}.parallel")
    attention = importlib.import_module(f"{MAGI2}.attention")
    assert str(parallel.__file__).startswith(tree)
    from vllm_musa_headpar import plugin, register, registry

    if device == "musa":
        import torchada  # noqa: F401, before the device is there

        from vllm_musa_headpar.testing import mccl

        mccl.install()
    names = ("magi2.attention_dispatch", "magi2.attention_return", "magi2.attention_shards")
    counts = [rank % 3 + 1 for rank in range(nproc)]
    with process_group(rank, nproc, store, "mccl" if device == "musa" else "gloo") as world:
        group = parallel.Magi2ParallelGroup(world, nproc, rank)
        qkv = [torch.randn(counts[rank], heads * nproc, DIM).to(device) for heads in (2, 2, 2)]
        expected = {shards: attention.attend(qkv, counts, group, shards) for shards in (False, True)}
        stock_pack = attention.pack_ulysses_head_shards
        with environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin() as log:
            register()
            assert [told(name)[0] for name in names] == ["on trial"] * 3
            assert told("head_parallel.bridge")[0] == "applied"
            assert told("magi2.moe_forward")[0] == "not needed"
            assert attention.pack_ulysses_head_shards is stock_pack
            counted: list[str] = []

            def counting_exchange(exchange: Any, group: Any) -> Any:
                counted.append(exchange.name)
                return registry.REFERENCE.implementation(exchange, group)

            if device == "cpu":
                registry.register_head_parallel_exchange("counting", counting_exchange, backends=("gloo",))
            for shards in (False, True):
                found = attention.attend(qkv, counts, group, shards)
                assert torch.equal(found.cpu(), expected[shards].cpu())
                assert found.stride() == expected[shards].stride()
            assert [told(name)[0] for name in names] == ["proven"] * 3
            # The self-test, twice each; and the host's return of plain heads calls its return of head shards.
            assert (counted.count("dispatch"), counted.count("return")) == ((3, 4) if device == "cpu" else (0, 0))
            packed = parallel.pack_ulysses_head_shards(qkv, nproc)
            output = torch.randn(sum(counts), 2, DIM).to(device)
            with counting() as there:
                parallel.scatter_heads_gather_seqlen(packed, counts, group)
            with counting() as back:
                parallel.scatter_seqlen_gather_head_shards(output, counts, group)
            for cost in (there, back):
                assert cost.communication_launches == 1
                assert cost.host_syncs == 0
                own = 2 * DIM * 4 * counts[rank] * (3 if cost is there else 1)
                assert cost.bytes_copied <= (own if device == "musa" else 0), "only p2p's own block"
            assert plugin.undo() == []
            assert not [line for level, line in log if level == "WARNING"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("musa", marks=pytest.mark.musa)])
def test_a_development_hosts_attention_goes_through_the_exchange(tmp_path: Path, device: str) -> None:
    run_ranks(development_host, 2, build(tmp_path, "replicas", attention=True), device, timeout=300)


def layers_variant(rank: int, nproc: int, store: str, tree: str) -> None:
    sys.path.insert(0, tree)
    importlib.import_module(f"{MAGI2}.modeling_magi2")
    from vllm_musa_headpar import register, report

    with environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin():
        register()
        found = {record.name: record for record in report()}
        assert found["head_parallel.bridge"].status == "applied"
        for name in ("magi2.ep_dispatch", "magi2.ep_undispatch", "magi2.known_counts", "magi2.moe_forward"):
            assert found[name].status == "not needed"
            assert "this host's own wrappers call" in found[name].reason


def test_a_host_whose_moe_is_a_layer_per_platform(tmp_path: Path) -> None:
    run_ranks(layers_variant, 1, build(tmp_path, "replicas", layers=True), timeout=300)
