"""Rank processes that stay: starting one costs seconds, so the tests share them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_musa_headpar.testing.ranks import RankFailure, results_of


@contextmanager
def process_group(rank: int, nproc: int, store: str, backend: str = "gloo", timeout: float = 30.0) -> Iterator[Any]:
    """A default process group for the time of the block; yields it."""
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=nproc, timeout=timedelta(seconds=timeout)
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def environment(**variables: str) -> Any:
    """Environment variables for the time of the block; those of the plugin that are not named are unset."""
    from vllm_musa_headpar.config import VARIABLES

    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return mock.patch.dict(os.environ, {**plain, **variables}, clear=True)


def use_p2p_for_all_sizes() -> None:
    """Tests are small, and on Gloo small exchanges would go through the reference whatever is asked for."""
    from vllm_musa_headpar import profiles

    profiles.SHIPPED = Path(os.devnull)


class RankPool:
    """Like `run_ranks`, in processes that are kept. After a failure all of them are replaced.

    A function must leave its process as it found it: process groups, environment, patches.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], nproc: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(rank, nproc, store, *args)` in `nproc` ranks; their results in rank order."""
        while len(self._workers) < nproc:
            self._workers.append(_start())
        workers = self._workers[:nproc]
        with tempfile.TemporaryDirectory(prefix="headpar-") as folder:
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((function, rank, nproc, os.path.join(folder, "store"), args))
            try:
                return results_of([pipe for _, pipe in workers], [process for process, _ in workers], timeout)
            except RankFailure:
                self.close()
                raise

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    use_p2p_for_all_sizes()
    while True:
        try:
            function, rank, nproc, store, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, nproc, store, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
