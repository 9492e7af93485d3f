"""Head-parallel exchange for MAGI-2 on vLLM-Omni, tuned for Moore Threads GPUs and MCCL.

Importing the package imports neither torch nor vLLM: the public names are resolved when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads
    from .layout import HeadParallelLayout, replica_token_counts
    from .plugin import register, report
    from .registry import register_head_parallel_exchange

__all__ = [
    "HeadParallelLayout",
    "__version__",
    "register",
    "register_head_parallel_exchange",
    "replica_token_counts",
    "report",
    "scatter_heads_gather_tokens",
    "scatter_tokens_gather_heads",
]

_MODULES = {
    "HeadParallelLayout": "layout",
    "replica_token_counts": "layout",
    "scatter_heads_gather_tokens": "exchange",
    "scatter_tokens_gather_heads": "exchange",
    "register_head_parallel_exchange": "registry",
    "register": "plugin",
    "report": "plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
