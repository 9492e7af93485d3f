"""Hosts newer than 0.30.0, which have the exchange module; and hosts that are not known at all. Stand-ins."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import process_group
from stand_in import HERE, MAGI2, MODULES, build, changed, fresh_plugin, snapshot

from vllm_musa_headpar.testing.ranks import run_ranks

pytestmark = pytest.mark.cpu

PACKAGE = "vllm_omni.diffusion.distributed"
HEAD_PARALLEL = f"{PACKAGE}.head_parallel"
FUNCTIONS = ("scatter_heads_gather_tokens", "scatter_tokens_gather_heads")
BRIDGED = {
    *((HEAD_PARALLEL, name) for name in FUNCTIONS),
    *((f"{MAGI2}.parallel", name) for name in FUNCTIONS),
    (f"{MAGI2}.attention", "to_all_tokens"),
}
REGISTER = "register_head_parallel_exchange"

# (token counts, replicas); replica counts are token counts split evenly
PLAIN_CASES = [((4, 4), 1), ((6, 2), 1), ((0, 4), 1), ((0, 0), 1)]
REPLICA_CASES = [*PLAIN_CASES, ((4, 4), 2), ((6, 2), 2)]


def load_host(tree: str) -> list[Any]:
    """Import a stand-in; its modules and classes."""
    sys.path.insert(0, tree)
    modules = [importlib.import_module(HEAD_PARALLEL), *(importlib.import_module(f"{MAGI2}.{m}") for m in MODULES)]
    assert all(str(module.__file__).startswith(tree) for module in modules)
    classes = [modules[0].HeadParallelLayout, modules[2].Magi2MultiHeadMoE, modules[4].Magi2TransformerLayer]
    return [importlib.import_module("vllm_omni"), importlib.import_module(PACKAGE), *modules, *classes]


def unload_host(tree: str) -> None:
    sys.path.remove(tree)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm_omni"]:
        del sys.modules[name]


def tokens_of(rank: int, counts: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
    """Every value is another one."""
    start = 1000 * rank
    return torch.arange(start, start + counts[rank] * heads * dim, dtype=torch.float32).view(-1, heads, dim)


def expected_dispatch(rank: int, counts: tuple[int, ...], replicas: int, heads: int, dim: int) -> torch.Tensor:
    """`[owned_tokens, local_heads, dim]`, from what all ranks hold."""
    shards = len(counts) // replicas
    part, shard = divmod(rank, shards)
    local = heads // shards
    rows = [tokens_of(source, counts, heads, dim) for source in range(len(counts))]
    if replicas > 1:
        rows = [tokens.chunk(replicas)[part] for tokens in rows]
    return torch.cat(rows)[:, shard * local : (shard + 1) * local]


def exchange_all(rank: int, group: Any, host: Any, cases: list[tuple[tuple[int, ...], int]]) -> int:
    """Dispatch, layer and return of every case with exact values; how many exchanges moved anything."""
    module, parallel, moe, modeling = host
    heads, dim, moved = 4, 3, 0
    for counts, replicas in cases:
        mine = tokens_of(rank, counts, heads, dim)
        ep_group = parallel.Magi2ParallelGroup(group, len(counts), rank)
        routed = parallel.ep_dispatch(mine, ep_group, list(counts), *([replicas] if replicas > 1 else []))
        assert torch.equal(routed, expected_dispatch(rank, counts, replicas, heads, dim)), (counts, replicas)
        back = parallel.ep_undispatch(routed, ep_group, list(counts), *([replicas] if replicas > 1 else []))
        assert torch.equal(back, mine), (counts, replicas)

        layer = modeling.Magi2TransformerLayer(moe.Magi2MultiHeadMoE(heads, dim, ep_group, replicas))
        shards = len(counts) // replicas
        factors = torch.arange(heads).div(heads // shards, rounding_mode="floor").view(1, -1, 1) + 1
        output = layer(mine.view(-1, heads * dim), None, None, None, list(counts))
        assert torch.equal(output, (mine + mine * factors).view(-1, heads * dim)), (counts, replicas)
        moved += 4 if sum(counts) else 0

        fields = {"replica_counts": module.replica_token_counts(counts, replicas)} if replicas > 1 else {}
        layout = module.HeadParallelLayout(counts, rank, **fields)
        with pytest.raises(ValueError, match=r"tokens|layout"):
            module.scatter_heads_gather_tokens(mine.new_zeros(counts[rank] + 1, heads, dim), group, layout)
        with pytest.raises(ValueError, match="caller-owned process group"):
            module.scatter_heads_gather_tokens(mine, None, layout)
    single = torch.ones(2, 3, 1)
    assert module.scatter_heads_gather_tokens(single, None, module.HeadParallelLayout((2,), 0)) is single
    return moved


def bridge(rank: int, nproc: int, store: str, tree: str, cases: list[tuple[tuple[int, ...], int]]) -> None:
    os.environ["VLLM_MUSA_HEADPAR"] = "strict"
    owners = load_host(tree)
    module, parallel, moe, _, modeling = owners[2:7]
    host = module, parallel, moe, modeling
    from vllm_musa_headpar import plugin, register, registry

    before = snapshot(*owners)
    with process_group(rank, nproc, store) as group, fresh_plugin() as log:
        exchange_all(rank, group, host, cases)  # the stand-in itself is right

        register()
        assert changed(before, *owners) == {*BRIDGED, (HEAD_PARALLEL, REGISTER)}
        assert {record.name: record.status for record in plugin.report()} == {
            record.name: "applied" if record.name == "head_parallel.bridge" else "not needed"
            for record in plugin.report()
        }
        assert [level for level, _ in log] == ["INFO"]
        assert getattr(module, REGISTER) is registry.register_head_parallel_exchange

        counted = []

        def counting(exchange: Any, group: Any) -> Any:
            counted.append(exchange.name)
            return registry.REFERENCE.implementation(exchange, group)

        getattr(module, REGISTER)("counting", counting, backends=("gloo",))
        moved = exchange_all(rank, group, host, cases)
        self_test = 2
        assert len(counted) == moved + self_test

        assert plugin.undo() == []
        assert changed(before, *owners) == set()
        exchange_all(rank, group, host, cases)
        assert len(counted) == moved + self_test


@pytest.mark.parametrize(
    ("variant", "cases"), [("plain", PLAIN_CASES), ("replicas", REPLICA_CASES)], ids=["plain", "replicas"]
)
def test_a_host_with_the_exchange_module_is_bridged(tmp_path: Path, variant: str, cases: Any) -> None:
    run_ranks(bridge, 2, build(tmp_path, variant), cases, timeout=90)


def stock_source(old: str = "", new: str = "") -> str:
    source = (HERE / "head_parallel_plain.py").read_text()
    assert old in source
    return source.replace(old, new)


def refuse_or_leave(rank: int, nproc: int, store: str, root: str) -> None:
    """Hosts of which nothing may be touched, one after the other in one process."""
    from vllm_musa_headpar import plugin, register

    signature = "scatter_tokens_gather_heads(tensor: torch.Tensor, group: Any, layout: HeadParallelLayout)"
    drifted = {
        "parameter added": stock_source(signature, signature[:-1] + ", replicas: int = 1)"),
        "parameter renamed": stock_source(signature, signature.replace("layout:", "plan:")).replace(
            "= layout.", "= plan."
        ),
        "function gone": stock_source("def scatter_tokens_gather_heads", "def gather_heads"),
        "wrapped": stock_source()
        + "\nimport functools\n_stock = scatter_tokens_gather_heads\n"
        + "@functools.wraps(_stock)\ndef scatter_tokens_gather_heads(*args):\n    return _stock(*args)\n",
    }
    for number, (kind, source) in enumerate(drifted.items()):
        tree = build(Path(root, f"drifted{number}"), source)
        if kind == "function gone":  # whoever imports it has moved along
            file = Path(tree, *f"{MAGI2}.parallel".split(".")).with_suffix(".py")
            file.write_text(
                file.read_text().replace(
                    "    scatter_tokens_gather_heads,", "    gather_heads as scatter_tokens_gather_heads,"
                )
            )
        owners = load_host(tree)
        before = snapshot(*owners)
        with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            register()
            register()
            assert changed(before, *owners) == set(), kind
            statuses = {record.name: record for record in plugin.report()}
            bridged = statuses.pop("head_parallel.bridge")
            assert bridged.status == "refused", kind
            assert "scatter_tokens_gather_heads" in bridged.reason, kind
            assert {record.status for record in statuses.values()} == {"not needed"}, kind
            assert [level for level, _ in log] == ["WARNING"], (kind, log)
            assert "head_parallel.bridge" in log[0][1]
            assert bridged.reason in log[0][1]
        with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="strict"), fresh_plugin() as log:
            with pytest.raises(plugin.StrictModeError, match=r"head_parallel\.bridge"):
                register()
            assert changed(before, *owners) == set(), kind
        unload_host(tree)


def unknown_host(rank: int, nproc: int, store: str, root: str) -> None:
    from vllm_musa_headpar import plugin, register

    tree = build(Path(root), None)
    sys.path.insert(0, tree)
    names = ("vllm_omni", "vllm_omni.diffusion", PACKAGE, "vllm_omni.diffusion.models")
    owners = [importlib.import_module(name) for name in names]
    before, modules = snapshot(*owners), {name for name in sys.modules if name.startswith("vllm_omni")}
    with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
        register()
        register()
        assert changed(before, *owners) == set()
        assert {name for name in sys.modules if name.startswith("vllm_omni")} == modules
        assert {record.status for record in plugin.report()} == {"not needed"}
        assert [level for level, _ in log] == ["WARNING"], log
        assert "nothing to patch" in log[0][1]
    with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="strict"), fresh_plugin():
        with pytest.raises(plugin.StrictModeError, match="nothing to patch"):
            register()
        assert changed(before, *owners) == set()
    unload_host(tree)


def own_registration(rank: int, nproc: int, store: str, root: str) -> None:
    """A host that has a registration of its own keeps it; its layout class stays, whatever it is."""
    from vllm_musa_headpar import register

    tree = build(Path(root), stock_source() + "\n\ndef register_head_parallel_exchange(*args): ...\n")
    owners = load_host(tree)
    before = snapshot(*owners)
    with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="strict"), fresh_plugin():
        register()
        assert changed(before, *owners) == BRIDGED
        assert dataclasses.is_dataclass(owners[2].HeadParallelLayout)
    assert changed(before, *owners) == set()
    unload_host(tree)


def broken_host(rank: int, nproc: int, store: str, root: str) -> None:
    """A host that cannot be imported stops nothing."""
    from vllm_musa_headpar import diagnosis, plugin, register

    tree = build(Path(root), "plain")
    file = Path(tree, *PACKAGE.split("."), "__init__.py")
    file.write_text("raise RuntimeError('broken')\n")
    sys.path.insert(0, tree)
    importlib.import_module("vllm_omni")
    with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
        register()
        refused = {record.name for record in plugin.report() if record.status == "refused"}
        assert refused >= {"head_parallel.bridge", "head_parallel.publish", "magi2.ep_dispatch"}
        assert {record.status for record in plugin.report()} == {"refused", "not needed"}
        assert {level for level, _ in log} == {"WARNING"}
        assert all("RuntimeError: broken" in message for _, message in log)
        found = diagnosis.diagnose()
        assert not found.active
        assert (found.host["kind"], found.host["reason"]) == ("broken", "RuntimeError: broken")
    unload_host(tree)


def doctors_view(rank: int, nproc: int, store: str, root: str) -> None:
    """The doctor loads a newer host's plugins as that host does, and tells what it is."""
    from vllm_musa_headpar import diagnosis, plugin

    for number, (variant, kind) in enumerate((("replicas", "head_parallel"), (None, "unknown"))):
        tree = build(Path(root, str(number)), variant)
        sys.path.insert(0, tree)
        with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            found = diagnosis.diagnose()
            assert found.host["kind"] == kind
            assert found.records == [record.as_dict() for record in plugin.report()]
            checks = {check.name: check for check in found.checks}
            if variant is None:
                assert not found.active
                assert checks["host"].verdict == "problem"
            else:
                assert found.active, found.why
                assert (found.host["platform"], found.host["runs_magi2"]) == ("musa", True)
                assert checks["patches"].seen == "applied: head_parallel.bridge"
            assert len(log) == (variant is None)  # the doctor keeps the line that the plugin is on to itself
        unload_host(tree)


def unknown_attention(rank: int, nproc: int, store: str, root: str) -> None:
    """Attention functions that are not known: the exchange module is bridged, they are left alone, and it is said."""
    from vllm_musa_headpar import diagnosis, plugin, register

    unlike = {
        "with another parameter": (" | None = None\n", " | None = None, plan=None\n"),
        "by another name": ("scatter_", "swap_"),
    }
    for number, (kind, (old, new)) in enumerate(unlike.items()):
        tree = build(Path(root, str(number)), "plain", attention=True)
        for module, begin in (("parallel", "def get_magi2_ulysses_group"), ("attention", "")):
            file = Path(tree, *f"{MAGI2}.{module}".split(".")).with_suffix(".py")
            text = file.read_text()
            start = text.index(begin)
            file.write_text(text[:start] + text[start:].replace(old, new))
        owners = load_host(tree)
        before = snapshot(*owners)
        expected = {*BRIDGED, (HEAD_PARALLEL, REGISTER)} - {(f"{MAGI2}.attention", "to_all_tokens")}
        with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR="1"), fresh_plugin() as log:
            register()
            assert changed(before, *owners) == expected, kind
            statuses = {record.name: record for record in plugin.report()}
            assert statuses["head_parallel.bridge"].status == "applied"
            attention_records = [statuses[name] for name in diagnosis.ATTENTION_RECORDS]
            warned = [message for level, message in log if level == "WARNING"]
            found = diagnosis.diagnose()
            said = next(check.seen for check in found.checks if check.name == "MAGI-2's exchanges")
            assert "head_parallel.bridge" in said.partition("Not covered")[0]
            for record in attention_records:
                assert record.status == ("refused" if new.endswith("plan=None\n") else "not needed"), record
                function = record.replaces.partition(":")[2]
                assert f"{function} ({record.reason})" in said.partition("Not covered in attention")[2], kind
                assert any(record.reason in message for message in warned) == (record.status == "refused"), kind
            assert found.active
        unload_host(tree)


SCENARIOS = (refuse_or_leave, unknown_host, unknown_attention, own_registration, broken_host, doctors_view)


def others(rank: int, nproc: int, store: str) -> None:
    for number, scenario in enumerate(SCENARIOS):
        with tempfile.TemporaryDirectory(prefix=f"headpar-{number}-") as root:
            scenario(rank, nproc, store, root)


def test_hosts_that_do_not_fit_are_left_alone() -> None:
    run_ranks(others, 1, timeout=90)
