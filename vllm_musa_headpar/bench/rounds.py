"""Interleaved timing: every line once per round, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..profiles import Times
from .world import World

WARM_UP = 2  # rounds that are not counted
NOW_AND_THEN = 10.0  # seconds


class Spread(Times):
    """Times over the rounds."""

    @classmethod
    def of(cls, seconds: Tensor) -> Spread:
        """Of `[rounds]` seconds."""
        quantiles = torch.quantile(seconds.double() * 1e3, torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64))
        return cls(*(round(float(value), 4) for value in quantiles))


def interleave(
    lines: Sequence[Callable[[], tuple[float, ...]]], rounds: int, world: World, advance: Callable[[], None]
) -> Tensor:
    """Time lines round by round, in another order each time: a line that always followed a like one would find the
    caches warm. The orders are the same on all ranks.

    Args:
        lines: each returns the seconds that its steps took on this rank, the same number of steps for all.
        advance: called after each round, warm-up included.

    Returns:
        `[ranks, rounds, lines, steps]` seconds.
    """
    times = []
    for number in range(-WARM_UP, rounds):
        order = random.Random(number).sample(range(len(lines)), len(lines))
        measured = {index: lines[index]() for index in order}
        if number >= 0:
            times.append([measured[index] for index in range(len(lines))])
        advance()
    return world.gather(torch.tensor(times, dtype=torch.float64))


class progress:
    """Context of the progress on standard error, on rank 0; its value is the function that advances it by a round.

    On a terminal a bar; elsewhere a line at the start and one now and then, so that a log shows that it goes on.
    """

    def __init__(self, world: World, title: str, total: int) -> None:
        self._shown = world.rank == 0
        self._title, self._total, self._done = title, total, 0
        self._bar: Any = None

    def __enter__(self) -> Callable[[], None]:
        if not self._shown:
            return lambda: None
        from rich.console import Console
        from rich.progress import Progress

        output = Console(stderr=True)
        if not output.is_terminal:
            self._started = self._told = time.monotonic()
            self._tell()
            return self._advance
        self._bar = Progress(console=output, transient=True)
        self._bar.start()
        task = self._bar.add_task(self._title, total=self._total)
        return lambda: self._bar.advance(task)

    def _advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._told >= NOW_AND_THEN:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        passed = time.monotonic() - self._started
        print(f"{self._title}: {self._done} of {self._total} rounds, {passed:.0f} s", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def ticks(total: int) -> Iterator[int]:
    """Token counts up to `total`, each a quarter of the next, not below 8."""
    if total >= 32:
        yield from ticks(total // 4)
    yield total
