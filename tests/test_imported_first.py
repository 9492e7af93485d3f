"""Functions that were imported by name before the plugin was loaded, by a hardware plugin's worker class say."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from pool import RankPool, environment
from stand_in import MAGI2, fresh_plugin

pytestmark = pytest.mark.cpu

WORKER = f"""
from vllm_omni.diffusion.attention.parallel.ulysses import _ulysses_all_to_all_any_qkv
from vllm_omni.diffusion.distributed.comm import all_to_all_4D
from {MAGI2}.parallel import balanced_split_sizes, ep_dispatch, scatter_heads_gather_seqlen
ours = ep_dispatch
"""
REBOUND = ("_ulysses_all_to_all_any_qkv", "all_to_all_4D", "ep_dispatch", "scatter_heads_gather_seqlen")


class Lazy(ModuleType):
    """Imports what it is asked for, as the lazy modules of large packages do. It must not be asked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect asks every module where it comes from
            raise AttributeError(name)
        raise AssertionError(f"asked for {name}")


def module(name: str, source: str = "", kind: type[ModuleType] = ModuleType) -> ModuleType:
    made = kind(name)
    exec(source, vars(made))
    return made


def test_they_are_rebound_and_given_back(ranks: RankPool) -> None:
    ranks(imported_first, 1)


def imported_first(rank: int, nproc: int, store: str) -> None:
    import vllm_omni.diffusion.models.magi2.parallel as parallel

    from vllm_musa_headpar import plugin

    worker = module("vendor_worker", WORKER)
    stock = {name: vars(worker)[name] for name in (*REBOUND, "balanced_split_sizes", "ours")}
    same_name = module("another", "def ep_dispatch(): ...")
    own = same_name.ep_dispatch
    others: dict[str, Any] = {"vendor_worker": worker, "another": same_name, "lazy": module("lazy", kind=Lazy)}
    others["no_module"] = object()
    with mock.patch.dict(sys.modules, others), environment(VLLM_MUSA_HEADPAR="strict"), fresh_plugin():
        plugin.register()
        for name in REBOUND:
            assert vars(worker)[name] is not stock[name], name
        assert worker.ep_dispatch is parallel.ep_dispatch
        assert worker.balanced_split_sizes is stock["balanced_split_sizes"]
        assert worker.ours is stock["ours"], (
            "under another name, outside the host: only the function's own is looked up"
        )
        assert same_name.ep_dispatch is own
        later = sys.modules["later"] = module("later", WORKER)
        assert later.ep_dispatch is parallel.ep_dispatch
        assert plugin.undo() == []
        for name in REBOUND:
            assert vars(worker)[name] is stock[name], name
            assert vars(later)[name] is stock[name], name


def test_somebody_elses_patch_of_the_worker_is_left_to_stand(ranks: RankPool) -> None:
    ranks(patched_over, 1)


def patched_over(rank: int, nproc: int, store: str) -> None:
    import vllm_omni.diffusion.models.magi2.parallel as parallel

    from vllm_musa_headpar import plugin, report

    worker = module("vendor_worker", WORKER)
    stock = worker.ep_dispatch
    with mock.patch.dict(sys.modules, vendor_worker=worker), environment(VLLM_MUSA_HEADPAR="1"), fresh_plugin():
        plugin.register()
        patched = worker.ep_dispatch
        theirs = worker.ep_dispatch = lambda *given: patched(*given)
        found = {record.name: (record.status, record.reason) for record in report()}["magi2.ep_dispatch"]
        assert found[0] == "overlaid"
        assert "vendor_worker.ep_dispatch" in found[1]
        assert [record.name for record in plugin.undo()] == ["magi2.ep_dispatch"]
        assert worker.ep_dispatch is theirs
        worker.ep_dispatch = patched
        assert plugin.undo() == []
        assert worker.ep_dispatch is stock is parallel.ep_dispatch
