"""`vllm-musa-headpar selftest`: spawn workers and compare their exchanges with exact values."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence

from .. import config
from .arguments import seconds, whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, shared with `entrypoints/two_worker.py`."""
    parser.add_argument("--nproc", type=whole_number(2), default=2, help="workers (default 2)")
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
    from ..bench.world import has_musa
    from ..testing import two_worker
    from ..testing.ranks import RankFailure, run_ranks

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


def _print_results(by_rank: Sequence[Sequence[object]]) -> int:
    from ..testing.two_worker import CaseResult

    counts: Counter[str] = Counter()
    for results in zip(*by_rank, strict=True):
        first = results[0]
        assert isinstance(first, CaseResult)
        problems = [f"rank {rank}: {result.problem}" for rank, result in enumerate(results) if result.problem]
        if problems:
            counts["failed"] += 1
            print(f"failed   {first.name}: {'; '.join(problems)}")
        elif first.skipped:
            counts["skipped"] += 1
            print(f"skipped  {first.name}: {first.skipped}")
        else:
            counts["passed"] += 1
            print(f"ok       {first.name}")
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
