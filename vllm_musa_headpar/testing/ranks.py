"""Run one function as several ranks, each in a process of its own.

Used by the two-worker check, the bench and the tests. The processes are spawned, not forked: torch's
threads and process groups do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


class RankError(RuntimeError):
    """What a rank raises where the message is the whole story, and a traceback would only hide it."""


class RankFailure(RuntimeError):
    """One or more ranks raised, died or did not finish in time. The message has each one's story.

    Attributes:
        cause: the first one's error, in a line.
    """

    def __init__(self, stories: Mapping[int, str]) -> None:
        """Of each rank's story, the first that came in first."""
        first = next(iter(stories))
        self.cause = f"rank {first}: {_error_in(stories[first])}"
        told: dict[str, list[int]] = {}
        for rank in sorted(stories):
            told.setdefault(stories[rank].rstrip(), []).append(rank)
        super().__init__("\n".join(f"{_ranks(ranks)}: {story}" for story, ranks in told.items()))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _error_in(story: str) -> str:
    """The line of a traceback that names the error; errors of torch go on behind it."""
    lines = story.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failure|Interrupt|Exit)\b", line)]
    return (errors or lines or ["no story"])[-1]


def _child(
    function: Callable[..., Any], rank: int, nproc: int, store: str, args: tuple[Any, ...], out: Connection
) -> None:
    try:
        result = (True, function(rank, nproc, store, *args))
    except RankError as error:
        result = (False, str(error))
    except BaseException:
        result = (False, traceback.format_exc())
    out.send(result)
    out.close()


# Variables that say where ranks meet; torchrun sets the first five.
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def default_group(rank: int, size: int, init_method: str, backend: str, timeout: float) -> Iterator[None]:
    """The default process group for the time of the block.

    Args:
        init_method: "env://", or "file://" and a path.
        timeout: seconds after which the group gives up.

    Raises:
        RankError: the ranks could not meet: the environment variables that say where, and the cause.
    """
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
    except (RuntimeError, ValueError, OSError) as error:
        names = [name for name in sorted(os.environ) if name.endswith("_SOCKET_IFNAME")]
        names += [name for name in RENDEZVOUS if init_method == "env://" and name in os.environ]
        told = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RankError(
            f"{size} ranks could not meet over {backend}{f', with {told} in the environment' if told else ''}: {cause}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


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
        failures[rank] = f"still running at the time limit of {timeout:g} s, killed"
    if failures:
        raise RankFailure(failures)
    return [results[rank] for rank in range(len(receivers))]
