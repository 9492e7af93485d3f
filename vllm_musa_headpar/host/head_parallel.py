"""The exchange's own module in the host: published where the host lacks it, bridged where it has it.

`vllm_omni.diffusion.distributed.head_parallel` exists in development versions of vLLM-Omni only. There its
two functions are the one thing patched: the wrappers that call them are the host's own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .. import exchange, layout, registry
from .ledger import HOST, MISSING, Binding, NotNeeded, Record, Refused, imports_of, load, stock_function

PACKAGE = "vllm_omni.diffusion.distributed"
MODULE = f"{PACKAGE}.head_parallel"
MAGI2 = "vllm_omni.diffusion.models.magi2"
SIGNATURE = "(tensor, group, layout)"
FUNCTIONS = {
    "scatter_heads_gather_tokens": exchange.scatter_heads_gather_tokens,
    "scatter_tokens_gather_heads": exchange.scatter_tokens_gather_heads,
}


def host_has_module() -> bool:
    """Whether the exchange module is the host's own, as in the versions after 0.30.0."""
    loaded = sys.modules.get(MODULE)
    if loaded is not None:
        return not _is_ours(loaded)
    try:
        return importlib.util.find_spec(MODULE) is not None
    except (ImportError, ValueError):
        return False


def require_stock_wrappers() -> ModuleType:
    """MAGI-2's `parallel` module on a host of 0.30.0's kind, whose wrappers do the exchange themselves.

    Raises:
        NotNeeded: the host has the exchange module, or no MAGI-2 at all.
    """
    if host_has_module():
        raise NotNeeded(f"this host's own wrappers call {MODULE}")
    try:
        known = importlib.util.find_spec(f"{MAGI2}.parallel") is not None
    except (ImportError, ValueError):
        known = False
    if not known:
        raise NotNeeded("this host is not known: it has neither the exchange module nor MAGI-2")
    return load(f"{MAGI2}.parallel")


def _publish() -> list[Binding]:
    require_stock_wrappers()
    module = ModuleType(MODULE, "The head-parallel exchange, published by vllm-musa-headpar.")
    module.__spec__ = ModuleSpec(MODULE, None, origin=__name__)
    vars(module).update(
        FUNCTIONS,
        HeadParallelLayout=layout.HeadParallelLayout,
        replica_token_counts=layout.replica_token_counts,
        register_head_parallel_exchange=registry.register_head_parallel_exchange,
    )
    parent = load(PACKAGE)
    name = MODULE.rpartition(".")[2]
    if hasattr(parent, name):
        raise Refused(f"{PACKAGE}.{name} exists, but is no module: {getattr(parent, name)!r}")
    return [Binding(sys.modules, MODULE, MISSING, module), Binding(parent, name, MISSING, module)]


def _bridge() -> list[Binding]:
    if not host_has_module():
        raise NotNeeded(f"this host has no {MODULE}")
    module = load(MODULE)
    load_users()
    bindings = []
    for name, ours in FUNCTIONS.items():
        _, _, original = stock_function(module, name, SIGNATURE, None)
        replacement = _bridged(ours, original)
        bindings += [Binding(user, alias, original, replacement) for user, alias in imports_of(original, HOST)]
    register = "register_head_parallel_exchange"
    if not hasattr(module, register):
        bindings.append(Binding(module, register, MISSING, registry.register_head_parallel_exchange))
    return bindings


def _bridged(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, but the host's own for a layout that makes use of a field of a newer contract."""

    def bridged(tensor: Any, group: Any, layout: Any) -> Any:
        function = ours if exchange.extension_of(layout) is None else stock
        return function(tensor, group, layout)

    bridged.__doc__ = ours.__doc__
    return bridged


def load_users() -> None:
    """Import the modules of MAGI-2 that may have the functions by name; a host may lack some."""
    for name in ("parallel", "mh_moe", "attention", "modeling_magi2"):
        try:
            found = importlib.util.find_spec(f"{MAGI2}.{name}")
        except (ImportError, ValueError):
            return
        if found is not None:
            load(f"{MAGI2}.{name}")


def _is_ours(module: ModuleType) -> bool:
    return getattr(module.__spec__, "origin", None) == __name__


RECORDS = (
    Record(
        name="head_parallel.publish",
        replaces=f"{MODULE} (nothing: the host lacks it)",
        why="code written for newer hosts runs on this one, and others can register exchanges",
        how="puts the contract's names into the module table and the parent package",
        hosts="vLLM-Omni 0.30.0 and others without that module",
        until="a vLLM-Omni that has the module",
        bindings=_publish,
    ),
    Record(
        name="head_parallel.bridge",
        replaces=f"{MODULE}:{', '.join(FUNCTIONS)}",
        why="the host's wrappers use the exchange that suits the backend",
        how="rebinds the two functions, also where they were imported by name; adds the registration",
        hosts="vLLM-Omni development versions with that module",
        until="a vLLM-Omni whose module selects the exchange by backend itself",
        bindings=_bridge,
    ),
)
