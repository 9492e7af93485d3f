"""Which implementation is the fastest at which message size: what a profile is made of.

All usable implementations are timed side by side at each size, in rounds whose order is drawn anew, on a group each.
A size gets more rounds until the order of its two best is settled in both directions, or time is over.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import math
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import agreement, choice, registry
from ..profiles import DIRECTIONS, Measurement, Point, Times
from ..version import __version__
from .exchange import BARE, CLEARLY, STOCK, Case, Line, lines_of, require_bits
from .rounds import WARM_UP, Spread, progress
from .world import World, group_using

SMALLEST = 4096  # bytes per message
STEP = 4
# MAGI-2 on 8 ranks: tokens per rank, MoE heads, elements per head. 22.7 MB per rank in bfloat16.
MAGI2 = Case((3702,) * 8, 12, 256, "bfloat16")
MIN_ROUNDS, MAX_ROUNDS = 8, 60
CERTAIN = 0.01  # how often an order that is none would be taken for one


@dataclass(frozen=True)
class Timed:
    """One direction at one size.

    Attributes:
        seconds: by implementation, of the slowest rank in each round.
    """

    direction: str
    bytes: int
    seconds: dict[str, list[float]]

    @property
    def settled(self) -> bool:
        """Whether the order of the two best is more than chance."""
        return _settled(self.seconds)

    @property
    def best(self) -> str:
        """The fastest implementation; the reference where the difference to it is within the noise."""
        best = _ranked(self.seconds)[0]
        reference = registry.REFERENCE.name
        if reference not in self.seconds or best == reference:
            return best
        clearly = CLEARLY * _median(self.seconds[best]) < _median(self.seconds[reference])
        return best if clearly and surely_less(self.seconds[best], self.seconds[reference]) else reference

    def point(self) -> Point:
        """As a profile has it."""
        times = {name: Times(**asdict(Spread.of(torch.tensor(values)))) for name, values in self.seconds.items()}
        return Point(self.direction, self.bytes, self.best, times)


@dataclass(frozen=True)
class Tuned:
    """A whole run, the same on all ranks.

    Attributes:
        not_used: implementations that the ranks could not settle on, and what they settled on instead.
        in_time: no size was left unsettled for want of time.
    """

    machine: dict[str, Any]
    machines: int
    device: str
    timed: list[Timed]
    not_used: dict[str, str]
    in_time: bool

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The implementations that were compared."""
        return tuple(self.timed[0].seconds)

    def measurement(self) -> Measurement:
        """As a profile has it."""
        return Measurement(
            package=__version__,
            torch=self.machine["torch"],
            backend=self.machine["backend"],
            device=self.device,
            ranks=self.machine["ranks"],
            machines=self.machines,
            date=datetime.date.today().isoformat(),
            exchanges=self.exchanges,
            points=tuple(timed.point() for timed in self.timed),
        )


def cases(ranks: int, smallest: int = SMALLEST, largest: int | None = None) -> tuple[Case, ...]:
    """Equal layouts whose messages are from `smallest` bytes up to those of MAGI-2's 22.7 MB per rank.

    Args:
        largest: bytes per rank instead of MAGI-2's.
    """
    heads = -(-MAGI2.heads // ranks) * ranks
    row = heads // ranks * MAGI2.dim * MAGI2.element_type().itemsize  # bytes of one token in a message
    if largest is None:
        largest = MAGI2.counts[0] * MAGI2.heads * MAGI2.dim * MAGI2.element_type().itemsize
    most = max(1, round(largest / ranks / row))
    tokens = []
    size = smallest
    while (count := max(1, round(size / row))) < most / math.sqrt(STEP):
        tokens.append(count)
        size *= STEP
    counts = dict.fromkeys([*tokens, most])
    return tuple(Case((count,) * ranks, heads, MAGI2.dim, MAGI2.dtype) for count in counts)


@torch.inference_mode()
def run(world: World, shapes: tuple[Case, ...], max_seconds: float, modules: tuple[str, ...]) -> Tuned:
    """Measure on every rank of a world.

    Args:
        max_seconds: for the rounds; what is settled before ends before.
        modules: to be imported first: they register further implementations.
    """
    for module in modules:
        import_module(module)
    start = time.monotonic()
    groups: dict[str, Any] = {}
    not_used: dict[str, str] = {}
    for name in registry.registered():
        group, used = group_using(name, world)
        if used == name:
            agreement.state_of(group, world.device).by_size = None  # itself, at sizes that it would hand on too
            groups[name] = group
        else:
            not_used[name] = used
    plain = dict.fromkeys((STOCK, BARE), world.new_group())
    lines = [[line for line in lines_of(world, shape, {**plain, **groups}) if line.name in groups] for shape in shapes]
    for line in itertools.chain(*lines):
        require_bits(world, line, line.dispatch(), line.back())
    seconds: list[list[Tensor]] = [[] for _ in shapes]
    title = f"tune, {world.size} ranks, {world.backend}"
    with progress(world, title, len(shapes) * MAX_ROUNDS) as advance:
        in_time = _rounds(world, lines, seconds, start + max_seconds, advance)
    timed = [
        Timed(direction, _bytes(shape), _by_name(of_shape, rounds, direction))
        for direction in DIRECTIONS
        for shape, of_shape, rounds in zip(shapes, lines, seconds, strict=True)
    ]
    return Tuned(world.describe(), _machines(world), choice.device_name(world.device), timed, not_used, in_time)


def _rounds(
    world: World,
    lines: Sequence[Sequence[Line]],
    seconds: list[list[Tensor]],
    deadline: float,
    advance: Callable[[], None],
) -> bool:
    """Rounds over all sizes that are not settled. What ends them is the same on all ranks: the times of the slowest
    rank, and the first rank's clock. Adds to `seconds`, by size, `[lines, 2]` for each round.

    Returns:
        Whether it ended before the deadline.
    """
    every = range(len(lines))
    for number in range(-WARM_UP, MAX_ROUNDS):
        going = [
            index for index in range(len(lines)) if number < MIN_ROUNDS or not _both_settled(lines, seconds, index)
        ]
        if not going:
            break
        measured = torch.zeros(len(lines), max(map(len, lines)), 2, dtype=torch.float64)
        for index in going:
            order = random.Random(f"{number}/{index}").sample(range(len(lines[index])), len(lines[index]))
            for place in order:
                line = lines[index][place]
                measured[index, place] = torch.tensor([world.timed(line.dispatch), world.timed(line.back)])
            advance()
        over = float(time.monotonic() > deadline)
        gathered = world.gather(torch.cat([measured.flatten(), torch.tensor([over], dtype=torch.float64)]))
        if number >= 0:
            slowest = gathered[:, :-1].amax(dim=0).view_as(measured)
            for index in going:
                seconds[index].append(slowest[index, : len(lines[index])])
        if gathered[0, -1] and number >= 0:
            return all(_both_settled(lines, seconds, index) for index in every)
    return True


def _both_settled(lines: Sequence[Sequence[Line]], seconds: list[list[Tensor]], index: int) -> bool:
    return all(_settled(_by_name(lines[index], seconds[index], direction)) for direction in DIRECTIONS)


def _by_name(lines: Sequence[Line], rounds: Sequence[Tensor], direction: str) -> dict[str, list[float]]:
    step = DIRECTIONS.index(direction)
    return {line.name: [float(times[place, step]) for times in rounds] for place, line in enumerate(lines)}


def _ranked(seconds: dict[str, list[float]]) -> list[str]:
    return sorted(seconds, key=lambda name: (_median(seconds[name]), name))


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def _settled(seconds: dict[str, list[float]]) -> bool:
    if len(seconds) < 2:
        return True
    first, second = (seconds[name] for name in _ranked(seconds)[:2])
    return len(first) >= MIN_ROUNDS and surely_less(first, second)


def surely_less(first: Sequence[float], second: Sequence[float]) -> bool:
    """Sign test over the rounds, in which both were measured next to each other: whether the first is less in so many
    of them that equals would show that in less than one of a hundred runs.
    """
    rounds = len(first)
    losses = sum(not one < other for one, other in zip(first, second, strict=True))
    as_few = sum(math.comb(rounds, count) for count in range(losses + 1))  # of the 2^rounds ways in which equals differ
    return bool(as_few < CERTAIN * 2**rounds)


def _bytes(shape: Case) -> int:
    return shape.counts[0] * (shape.heads // len(shape.counts)) * shape.dim * shape.element_type().itemsize


def _machines(world: World) -> int:
    """How many different machines the ranks are on. A network of its own, as a container has, makes one."""
    here = platform.node()
    if os.path.exists("/proc/self/ns/net"):
        here += os.readlink("/proc/self/ns/net")
    digest = int.from_bytes(hashlib.sha256(here.encode()).digest()[:7], "big")
    return len(set(world.gather(torch.tensor([digest], dtype=torch.int64)).flatten().tolist()))
