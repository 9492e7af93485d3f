"""The command `vllm-musa-headpar`: doctor, selftest, bench, tune."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from ..version import __version__

PROGRAM = "vllm-musa-headpar"

# Each module has add_arguments(parser) and run(arguments) -> exit code, and imports what it needs in run.
COMMANDS = {
    "doctor": "would the plugin be active here, and if not, why and what to do",
    "selftest": "spawn workers and compare their exchanges with exact values",
    "bench": "time the exchange against the stock host and the bare collective",
    "tune": "measure which exchange is the fastest here at which size, and write it down for auto to follow",
}
WITHOUT_TORCH = ("doctor",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f".{name}", __name__)
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args(argv)
    if arguments.command not in WITHOUT_TORCH and (problem := _no_torch()):
        print(f"{PROGRAM} {arguments.command}: {problem}", file=sys.stderr)
        return 2
    code: int = import_module(f".{arguments.command}", __name__).run(arguments)
    return code


def _no_torch() -> str | None:
    """Why torch cannot be used, in a sentence; None if it can."""
    with suppress(Exception):  # what is wrong with it is the doctor's to say
        import torchada  # noqa: F401 - before torch: on a MUSA platform it patches torch
    try:
        import torch.distributed as dist
    except Exception as error:
        return f"torch cannot be imported ({type(error).__name__}: {error}): install it for {sys.executable}"
    if not dist.is_available():
        return f"the torch of {sys.executable} is built without torch.distributed, which every exchange needs"
    return None
