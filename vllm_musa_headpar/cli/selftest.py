"""`vllm-musa-headpar selftest`: spawn workers and compare their exchanges with exact values."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import config
from .arguments import seconds, whole_number

if TYPE_CHECKING:
    from ..testing.two_worker import CaseResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, shared with `entrypoints/two_worker.py`."""
    parser.add_argument(
        "--nproc", type=whole_number(2), default=2, help="workers (default 2); under torchrun its ranks"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "mccl"),
        default="auto",
        help="communication backend; auto is mccl on MUSA, else gloo (default auto)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, help="seconds after which a process group gives up (default 60)"
    )
    parser.add_argument(
        "--simulate-musa", action="store_true", help="run on the simulated MUSA device and MCCL, over CPU memory"
    )


def run(arguments: argparse.Namespace) -> int:
    """Spawn the workers, print a line per case and `PASS n cases` or `FAIL ...`; returns the exit code."""
    from ..bench.world import BenchError, has_musa, torchrun_world
    from ..testing import two_worker
    from ..testing.ranks import RankError, RankFailure, run_ranks

    if arguments.simulate_musa and arguments.backend == "gloo":
        print("--simulate-musa runs on the simulated MCCL: it does not go with --backend gloo", file=sys.stderr)
        return 2
    if arguments.backend == "mccl" and not arguments.simulate_musa and not has_musa():
        print("--backend mccl needs a MUSA device, and torch finds none: see --simulate-musa", file=sys.stderr)
        return 2
    backend = "mccl" if arguments.simulate_musa else _chosen(arguments.backend, has_musa())
    if not config.read().enabled:
        os.environ[config.FLAG] = "1"
        print(f"{config.FLAG} is switched on for this check")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        world = torchrun_world()
        if world is not None:
            rank, size = world
            own = two_worker.work(rank, size, "", backend, arguments.simulate_musa, arguments.timeout)
            return _print_own(rank, size, own)
    except (BenchError, RankError) as error:
        print(f"FAIL {error}")
        return 1
    started = f"{arguments.nproc} workers, backend {backend}{', simulated' if arguments.simulate_musa else ''}"
    print(f"two-worker check: {started}", flush=True)
    try:
        # Starting a worker takes seconds, and more where the host is imported by many at once.
        limit = 3 * arguments.timeout + 60 + 15 * arguments.nproc
        by_rank = run_ranks(
            two_worker.work, arguments.nproc, backend, arguments.simulate_musa, arguments.timeout, timeout=limit
        )
    except RankFailure as failure:
        print(f"{failure}\nFAIL the workers did not finish: {failure.cause}")
        return 1
    except OSError as error:  # no folder for what the workers share, or no process for them
        print(f"FAIL the workers could not be started: {error}")
        return 1
    return _print_results(by_rank)


def _print_own(rank: int, size: int, results: Sequence[CaseResult]) -> int:
    """In a torchrun world each worker tells its own failures, and the first one tells all of its cases."""
    failed = any(result.problem for result in results)
    if rank != 0 and not failed:
        return 0
    print(f"two-worker check: worker {rank} of {size}")
    return _print_results([results], first=rank)


def _print_results(by_rank: Sequence[Sequence[CaseResult]], first: int = 0) -> int:
    counts: Counter[str] = Counter()
    for results in zip(*by_rank, strict=True):
        case = results[0]
        problems = [f"rank {rank}: {result.problem}" for rank, result in enumerate(results, first) if result.problem]
        if problems:
            counts["failed"] += 1
            print(f"failed   {case.name}: {'; '.join(problems)}")
        elif case.skipped:
            counts["skipped"] += 1
            print(f"skipped  {case.name}: {case.skipped}")
        else:
            counts["passed"] += 1
            print(f"ok       {case.name}")
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    if counts["failed"]:
        print(f"FAIL {counts['failed']} of {sum(counts.values())} cases{skipped}")
        return 1
    print(f"PASS {counts['passed']} cases{skipped}")
    return 0


def _chosen(backend: str, has_musa: bool) -> str:
    if backend != "auto":
        return backend
    return "mccl" if has_musa else "gloo"
