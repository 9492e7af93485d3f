"""Hosts that cannot be installed, and the real one with changes, for the tests of what the plugin does to them."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
MAGI2 = "vllm_omni.diffusion.models.magi2"
MODULES = ("parallel", "mh_moe", "attention", "modeling_magi2")


def build(root: Path, variant: str | None, *, attention: bool = False, layers: bool = False, moe: bool = False) -> str:
    """A tree to be put first on `sys.path`, with `head_parallel` "plain", "replicas" or another source text.

    Without a variant the host has neither the exchange nor MAGI-2.

    Args:
        attention: MAGI-2 has attention exchanges of its own, beside that module.
        layers: it has no `mh_moe.py` but one per platform in `layers/`.
        moe: its MoE layer has experts, and may have them on fewer ranks than the tokens.
    """
    package = root / "vllm_omni"
    shutil.copytree(HERE / "host" / "vllm_omni", package, ignore=shutil.ignore_patterns("__pycache__"))
    if variant is None:
        shutil.rmtree(package / "diffusion/models/magi2")
    else:
        known = HERE / f"head_parallel_{variant}.py" if variant.isidentifier() else None
        source = known.read_text() if known else variant
        (package / "diffusion/distributed/head_parallel.py").write_text(source)
    magi2 = package / "diffusion/models/magi2"
    if attention:
        with (magi2 / "parallel.py").open("a") as parallel:
            parallel.write((HERE / "attention_exchange.py").read_text().partition("# --- appended ---")[2])
        (magi2 / "attention.py").write_text((HERE / "attention.py").read_text())
    if moe:
        (magi2 / "mh_moe.py").write_text((HERE / "moe.py").read_text())
    if layers:
        for platform in ("native", "cuda", "npu"):
            (magi2 / "layers" / platform).mkdir(parents=True)
            text = (magi2 / "mh_moe.py").read_text().replace("from .parallel", "from ...parallel")
            (magi2 / "layers" / platform / "mh_moe.py").write_text(text)
        (magi2 / "mh_moe.py").unlink()
        modeling = (magi2 / "modeling_magi2.py").read_text()
        (magi2 / "modeling_magi2.py").write_text(modeling.replace(".mh_moe", ".layers.native.mh_moe"))
    return str(root)


@contextmanager
def fresh_plugin() -> Iterator[list[tuple[str, str]]]:
    """The plugin as if never loaded in this process; yields its log as (level, message). Undoes on the way out."""
    from vllm_musa_headpar import log, plugin

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append((record.levelname, record.getMessage()))

    told: list[tuple[str, str]] = []
    collector = Collector()
    kept = plugin._ledger, plugin._announced, set(log._said), log.logger.level
    plugin._ledger, plugin._announced = None, False
    log._said.clear()
    log.logger.setLevel(logging.INFO)
    log.logger.addHandler(collector)
    try:
        yield told
    finally:
        plugin.undo()
        log.logger.removeHandler(collector)
        plugin._ledger, plugin._announced, said, level = kept
        log._said.clear()
        log._said.update(said)
        log.logger.setLevel(level)


@contextmanager
def modified_magi2(root: Path, edits: dict[str, str] | None = None) -> Iterator[dict[str, ModuleType]]:
    """The host's MAGI-2 modules, imported anew from a copy on disk; `edits` maps a file to its new source.

    Everything is as it was afterwards. Modules that an edit breaks are missing from what is yielded.
    """
    models = importlib.import_module(MAGI2.rpartition(".")[0])
    original = Path(importlib.import_module(MAGI2).__path__[0])
    target = root / "magi2"
    shutil.copytree(original, target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, source in (edits or {}).items():
        (target / name).write_text(source)
    path, attribute = list(models.__path__), models.magi2
    kept = _take_modules()
    models.__path__ = [str(root), *path]
    importlib.invalidate_caches()
    try:
        modules = {}
        for name in MODULES:
            try:
                modules[name] = importlib.import_module(f"{MAGI2}.{name}")
            except RuntimeError:
                continue
        assert all(str(module.__file__).startswith(str(root)) for module in modules.values())
        yield modules
    finally:
        _take_modules()
        sys.modules.update(kept)
        models.__path__, models.magi2 = path, attribute


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == MAGI2 or name.startswith(f"{MAGI2}.")]
    return {name: sys.modules.pop(name) for name in names}


def snapshot(*owners: Any) -> dict[tuple[str, str], Any]:
    """Every attribute of modules and classes, held so that identities stay comparable."""
    return {(owner.__name__, name): value for owner in owners for name, value in list(vars(owner).items())}


def changed(before: dict[tuple[str, str], Any], *owners: Any) -> set[tuple[str, str]]:
    """The attributes that are not the same object any more, that are new or gone."""
    after = snapshot(*owners)
    missing = object()
    return {key for key in {*before, *after} if before.get(key, missing) is not after.get(key, missing)}
