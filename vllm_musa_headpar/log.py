"""The package's logger and warnings that are said once."""

from __future__ import annotations

import logging

# vLLM configures only loggers under its own name: from any other, INFO lines do not appear.
logger = logging.getLogger("vllm.musa_headpar")

_said: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless this process has already."""
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)


def forget() -> None:
    """Let every warning be said again: in a new process, for example."""
    _said.clear()
