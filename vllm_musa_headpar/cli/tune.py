"""`tune`: measure which exchange is the fastest here at which size, and write it down for `auto` to follow."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config, profiles
from .arguments import require_writable, seconds, whole_number

if TYPE_CHECKING:
    from ..bench.tune import Tuned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--nproc", type=whole_number(2), default=2, help="ranks to spawn (2); under torchrun its ranks")
    parser.add_argument("--backend", choices=("auto", "gloo", "mccl"), default="auto")
    parser.add_argument(
        "--max-seconds",
        type=seconds,
        default=120.0,
        help="time for the rounds (120); each size ends before, once the order of its two best is settled",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that registers further implementations, repeatable",
    )
    parser.add_argument(
        "--out",
        metavar="FILE.json",
        help=f"write a profile there, for {config.PROFILE}; measurements of other worlds that it has are kept",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw time over size for each implementation")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write; 0, or 2 where it cannot run as asked, or 1 where a rank failed."""
    from ..bench.world import BenchError, require
    from ..testing.ranks import RankFailure

    try:
        require("rich", "cli")
        if arguments.plot:
            require("matplotlib", "plot")
        known = _known_before(arguments)
        tuned = _measure(arguments)
        if tuned is not None:  # else not rank 0 of a torchrun world
            _show(arguments, tuned, known)
    except (BenchError, ImportError, ValueError, OSError) as error:
        print(f"vllm-musa-headpar tune: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"vllm-musa-headpar tune: {failure}", file=sys.stderr)
        return 1
    return 0


def _known_before(arguments: argparse.Namespace) -> tuple[profiles.Measurement, ...]:
    """What the output file has already. Before measuring: the targets can be written."""
    from ..bench.show import require_picture

    if os.environ.get("RANK", "0") != "0":
        return ()
    for option, file in (("--out", arguments.out), ("--plot", arguments.plot)):
        if file:
            require_writable(option, file)
    if arguments.plot:
        require_picture(arguments.plot)
    if arguments.out and Path(arguments.out).exists():
        return profiles.load(arguments.out).measurements
    return ()


def _measure(arguments: argparse.Namespace) -> Tuned | None:
    from importlib import import_module

    from ..bench import tune, world

    for module in arguments.modules:
        import_module(module)  # a name that is wrong is said here, not by every rank
    size = world.ranks_here(arguments.nproc)
    timeout = arguments.max_seconds + 300  # for the start of the ranks, and what comes before the rounds
    tuned: Tuned | None = world.launch(
        tune.run,
        size,
        arguments.backend,
        timeout,
        tune.cases(size),
        arguments.max_seconds,
        tuple(arguments.modules),
    )
    return tuned


def _show(arguments: argparse.Namespace, tuned: Tuned, known: tuple[profiles.Measurement, ...]) -> None:
    from ..bench import tune_show

    tune_show.print_table(tuned)
    if arguments.out:
        text = profiles.dump(profiles.merged(tuned.measurement(), known))
        Path(arguments.out).write_text(text, encoding="utf-8")
        print(f"Follow it with {config.PROFILE}={arguments.out}")
    if arguments.plot:
        tune_show.plot(arguments.plot, tuned)
