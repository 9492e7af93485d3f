"""Run one function as several ranks, each in a process of its own.

Used by the two-worker check, the bench and the tests. The processes are spawned, not forked: torch's
threads and process groups do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailure(RuntimeError):
    """One or more ranks raised, died or did not finish in time. The message has each one's story."""


def _child(
    function: Callable[..., Any], rank: int, nproc: int, store: str, args: tuple[Any, ...], out: Connection
) -> None:
    try:
        result = (True, function(rank, nproc, store, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    out.send(result)
    out.close()


def run_ranks(function: Callable[..., Any], nproc: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `function(rank, nproc, store, *args)` in `nproc` spawned processes.

    Args:
        function: importable by name in a fresh interpreter. `store` is the path of a file that does not
            exist yet, for `init_process_group(init_method=f"file://{store}", ...)`.
        nproc: number of ranks.
        timeout: seconds after which the ranks that still run are killed.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailure: a rank raised, died or was still running at the timeout. The other ranks get a few
            seconds to finish of themselves first, so that their errors are reported too.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="headpar-") as folder:
        store = os.path.join(folder, "store")
        receivers, processes = [], []
        for rank in range(nproc):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(function, rank, nproc, store, args, sender), daemon=True)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return results_of(receivers, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()


def results_of(receivers: list[Connection], processes: list[Any], timeout: float, grace: float = 15.0) -> list[Any]:
    """What each rank sent, `(True, result)` or `(False, story)`, in rank order; the results if all succeeded.

    Raises:
        RankFailure: a rank failed, died or has sent nothing at the timeout, which a failure shortens to `grace`.
    """
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    while pending and (remaining := deadline - time.monotonic()) > 0:
        for ready in wait(list(pending), remaining):
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            try:
                succeeded, value = ready.recv()
            except EOFError:
                processes[rank].join(5)
                succeeded, value = False, f"the process died with exit code {processes[rank].exitcode}"
            (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + grace)
    for rank in pending.values():
        failures[rank] = "still running at the time limit, killed"
    if failures:
        raise RankFailure("\n".join(f"rank {rank}: {failures[rank].rstrip()}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(receivers))]
