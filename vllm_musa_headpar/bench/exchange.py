"""One exchange there and back: the stock formula, each implementation and the bare collective."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import config, registry
from ..exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads
from ..layout import HeadParallelLayout
from ..testing.counters import counting
from ..version import __version__
from . import stock
from .rounds import WARM_UP, Spread, interleave, progress
from .world import BenchError, World, first_use_shown, gather_counts, group_using, same_bytes

STOCK, BARE = "stock", "bare collective"
# An implementation is advised over the reference only where it is faster by more than a machine's noise.
CLEARLY = 1.05
FEW = 10  # rounds


@dataclass(frozen=True)
class Case:
    """One shape: tokens of each rank, heads of all ranks together, elements per head, name of a torch dtype."""

    counts: tuple[int, ...]
    heads: int
    dim: int
    dtype: str

    def element_type(self) -> torch.dtype:
        """The torch dtype.

        Raises:
            BenchError: torch has none of that name.
        """
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise BenchError(f"--dtype {self.dtype!r} is no torch element type: bfloat16, float16, float32, ...")
        return found


@dataclass(frozen=True)
class Line:
    """Something to time: dispatch and return, and what their results must be, bit for bit."""

    name: str
    dispatch: Callable[[], Tensor]
    back: Callable[[], Tensor]
    expected_dispatch: Tensor
    expected_back: Tensor


@dataclass(frozen=True)
class LineReport:
    """What was measured of one line. Times are those of the slowest rank of each round.

    Attributes:
        times_stock: the stock round trip's median over this one's: above 1 is faster than stock.
        times_bare: the same against the bare collective.
        counts: by direction and name, one number per rank.
    """

    name: str
    dispatch: Spread
    back: Spread
    round_trip: Spread
    times_stock: float
    times_bare: float
    counts: dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class CaseReport:
    """What was measured of one shape. Bytes are one number per rank."""

    case: Case
    payload_dispatch: list[int]
    payload_return: list[int]
    own_block: list[int]
    lines: list[LineReport]


@dataclass(frozen=True)
class Report:
    """A whole run. `not_used`: implementations asked for that the ranks did not settle on, and what instead."""

    machine: dict[str, Any]
    rounds: int
    cases: list[CaseReport]
    automatic: str
    not_used: dict[str, str] = field(default_factory=dict)
    version: str = __version__

    def advice(self) -> str:
        """Which implementation to use here, by the largest shape."""
        lines = [line for line in self.cases[-1].lines if line.name not in (STOCK, BARE)]
        if not lines:
            return "No implementation could be measured here: keep auto."
        times = {line.name: line.round_trip.median_ms for line in lines}
        best = min(times, key=lambda name: times[name])
        reference = registry.REFERENCE.name
        if reference in times and times[reference] < CLEARLY * times[best]:
            best = reference
        (line,) = (line for line in lines if line.name == best)
        shape = f"At {max(self.cases[-1].case.counts)} tokens per rank on {self.machine['backend']}"
        if line.times_stock <= CLEARLY:
            return f"{shape} nothing is clearly faster than stock: keep auto, which selects {self.automatic}."
        setting = "auto selects it" if best in (config.AUTO, self.automatic) else f"VLLM_MUSA_HEADPAR_EXCHANGE={best}"
        few = "" if self.rounds >= FEW else f" {self.rounds} rounds are few: measure more to be sure."
        return f"{shape} use {best} ({setting}): its round trip is {line.times_stock:.2f} times as fast as stock.{few}"


@torch.inference_mode()
def run(world: World, cases: tuple[Case, ...], rounds: int, exchanges: tuple[str, ...]) -> Report:
    """Measure on every rank of a world, in inference mode as the host runs. The report is the same on all of them.

    Args:
        exchanges: names of implementations; empty for all that are registered, and for what a profile decides.
    """
    # Every line has a group of its own, so that none runs over connections that another, or the barrier, keeps warm.
    groups: dict[str, Any] = {STOCK: world.new_group(), BARE: world.new_group()}
    not_used: dict[str, str] = {}
    by_profile = (config.AUTO,) if config.read().profile is not None and not exchanges else ()
    for name in (*(exchanges or registry.registered()), *by_profile):
        with first_use_shown(world) if by_profile and name == config.AUTO else nullcontext():
            group, used = group_using(name, world)
        if used == name:
            groups[name] = group
        else:
            not_used[name] = used
    reports = []
    title = f"{world.size} ranks, {world.backend}"
    with progress(world, title, len(cases) * (rounds + WARM_UP)) as advance:
        for case in cases:
            reports.append(_measure(world, case, rounds, groups, advance))
    automatic = registry.select(world.backend).name
    return Report(world.describe(), rounds, reports, automatic, not_used)


def _measure(world: World, case: Case, rounds: int, groups: dict[str, Any], advance: Callable[[], None]) -> CaseReport:
    lines = lines_of(world, case, groups)
    counts = [_checked_counts(world, line) for line in lines]
    seconds = interleave([partial(_time, world, line) for line in lines], rounds, world, advance)
    dispatch, back = seconds.amax(dim=0).unbind(-1)  # [rounds, lines], the slowest rank
    round_trip = seconds.sum(dim=-1).amax(dim=0)
    medians = {line.name: Spread.of(round_trip[:, index]).median_ms for index, line in enumerate(lines)}
    reports = [
        LineReport(
            line.name,
            Spread.of(dispatch[:, index]),
            Spread.of(back[:, index]),
            Spread.of(round_trip[:, index]),
            round(medians[STOCK] / medians[line.name], 4),
            round(medians[BARE] / medians[line.name], 4),
            counts[index],
        )
        for index, line in enumerate(lines)
    ]
    row = case.heads // world.size * case.dim * case.element_type().itemsize  # bytes of one token's local heads
    return CaseReport(
        case,
        payload_dispatch=[count * row * world.size for count in case.counts],
        payload_return=[sum(case.counts) * row] * world.size,
        own_block=[count * row for count in case.counts],
        lines=reports,
    )


def _time(world: World, line: Line) -> tuple[float, float]:
    return world.timed(line.dispatch), world.timed(line.back)


def _checked_counts(world: World, line: Line) -> dict[str, dict[str, list[int]]]:
    """Run a line once each way, compare the bits and count."""
    with counting() as there:
        dispatched = line.dispatch()
    with counting() as back:
        returned = line.back()
    require_bits(world, line, dispatched, returned)
    return {"dispatch": gather_counts(there, world), "return": gather_counts(back, world)}


def require_bits(world: World, line: Line, dispatched: Tensor, returned: Tensor) -> None:
    """What is timed is right.

    Raises:
        BenchError: on all ranks, where a line's results are not the expected bits on one.
    """
    equal = same_bytes(dispatched, line.expected_dispatch) and same_bytes(returned, line.expected_back)
    if not world.all_true(equal):
        raise BenchError(f"{line.name} does not give the bits of the stock formula: not measured")


def lines_of(world: World, case: Case, groups: dict[str, Any]) -> list[Line]:
    """What there is to time of one shape: stock, an implementation for each further group, the bare collective.

    Args:
        groups: by name; `STOCK` and `BARE` are among them.
    """
    dtype, counts = case.element_type(), case.counts
    generator = torch.Generator().manual_seed(world.rank)
    shape = (counts[world.rank], case.heads, case.dim)
    # Random bytes: NaN payloads, negative zeros and denormals are among them.
    data = torch.randint(256, (*shape[:2], case.dim * dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = data.view(dtype).to(world.device)
    layout = HeadParallelLayout(counts, world.rank)

    routed = stock.dispatch(tensor, counts, groups[STOCK])
    lines = [
        Line(
            STOCK,
            partial(stock.dispatch, tensor, counts, groups[STOCK]),
            partial(stock.undispatch, routed, counts, world.rank, groups[STOCK]),
            routed,
            tensor,
        )
    ]
    for name, group in groups.items():
        if name not in (STOCK, BARE):
            dispatch = partial(scatter_heads_gather_tokens, tensor, group, layout)
            back = partial(scatter_tokens_gather_heads, routed, group, layout)
            lines.append(Line(name, dispatch, back, routed, tensor))
    # The same bytes, already packed, into buffers that are there: what the link alone takes.
    wire = stock.pack_heads(tensor, world.size)
    lines.append(
        Line(
            BARE,
            partial(stock.send_heads, wire, torch.empty_like(routed), counts, groups[BARE]),
            partial(stock.send_tokens, routed, torch.empty_like(wire), counts, groups[BARE]),
            routed,
            wire,
        )
    )
    return lines
