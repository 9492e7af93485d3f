"""The table and the picture of a `tune` run."""

from __future__ import annotations

from typing import Any

from ..choice import size
from ..profiles import DIRECTIONS
from .show import console, spread, table_of
from .tune import Timed, Tuned
from .world import require


def print_table(tuned: Tuned) -> None:
    """What is the fastest where, and all times."""
    output = console()
    machine = tuned.machine
    rows = [
        (
            timed.direction,
            size(timed.bytes),
            timed.best,
            str(len(next(iter(timed.seconds.values())))),
            *(spread(point.times[name]) for name in tuned.exchanges),
        )
        for timed in tuned.timed
        for point in (timed.point(),)
    ]
    title = f"{machine['ranks']} ranks on {tuned.machines} machine(s), {machine['backend']} on {tuned.device}"
    caption = (
        "Times in ms on the slowest rank: median, below it 10th to 90th percentile. Where the fastest is not surely "
        "and clearly faster than all_to_all, all_to_all is taken."
    )
    headings = ("", "per message", "fastest", "rounds", *tuned.exchanges)
    output.print(table_of(title, caption, headings, rows, words=3))
    for name, used in tuned.not_used.items():
        output.print(f"{name} is not measured: the ranks settled on {used} instead (see the warning).")
    if not tuned.in_time:
        left = sum(not timed.settled for timed in tuned.timed)
        output.print(f"Time was over before the order was settled at {left} of {len(tuned.timed)} points.")


def plot(path: str, tuned: Tuned) -> None:
    """Time over message size, a panel for each direction and a curve for each implementation, spread as a band."""
    require("matplotlib", "plot")
    draw(tuned).savefig(path, dpi=110)


def draw(tuned: Tuned) -> Any:
    """The figure of `plot`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        _panel(axes, direction, [timed for timed in tuned.timed if timed.direction == direction])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms, slowest rank (band: 10th to 90th percentile)")
    panels[0].legend()
    machine = tuned.machine
    figure.suptitle(f"{machine['ranks']} ranks, {machine['backend']} on {tuned.device}; ringed: what the profile takes")
    return figure


def _panel(axes: Any, direction: str, timed: list[Timed]) -> None:
    sizes, points = [each.bytes for each in timed], [each.point() for each in timed]
    for number, name in enumerate(timed[0].seconds):
        times = [point.times[name] for point in points]
        axes.plot(sizes, [each.median_ms for each in times], marker="o", label=name, color=f"C{number}")
        low, high = [each.p10_ms for each in times], [each.p90_ms for each in times]
        axes.fill_between(sizes, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
    taken = [point.times[point.exchange].median_ms for point in points]
    axes.scatter(sizes, taken, s=110, facecolors="none", edgecolors="black", zorder=3)
    axes.set(xscale="log", yscale="log", title=direction, xlabel="mean size of a message")
    axes.set_xticks(sizes, [size(number) for number in sizes], rotation=30)
