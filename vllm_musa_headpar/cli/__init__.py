"""The command `vllm-musa-headpar`: doctor, selftest, bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

# Each module has add_arguments(parser) and run(arguments) -> exit code, and imports what it needs in run.
COMMANDS = {
    "doctor": "would the plugin be active here, and if not, why and what to do",
    "selftest": "spawn workers and compare their exchanges with exact values",
    "bench": "time the exchange against the stock host and the bare collective",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="vllm-musa-headpar", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f".{name}", __name__)
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args(argv)
    code: int = import_module(f".{arguments.command}", __name__).run(arguments)
    return code
