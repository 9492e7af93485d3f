"""Tables, JSON and the picture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..profiles import Times
from .exchange import BARE, STOCK, CaseReport, LineReport, Report
from .world import require


def console() -> Any:
    """A console as wide as the terminal; where there is none, wide enough for most tables."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=120)


def print_report(report: Report) -> None:
    """A table for each shape, and the advice."""
    output = console()
    for case in report.cases:
        output.print(_case_table(report, case))
    for name, used in report.not_used.items():
        output.print(f"{name} is not measured: the ranks settled on {used} instead (see the warning).")
    output.print(report.advice())


def _case_table(report: Report, case: CaseReport) -> Any:
    shape = case.case
    tokens = f"{shape.counts[0]}" if len(set(shape.counts)) == 1 else ", ".join(map(str, shape.counts))
    rows = [
        (
            line.name,
            *map(spread, (line.dispatch, line.back, line.round_trip)),
            f"{line.times_stock:.2f}",
            f"{line.times_bare:.2f}",
            *(_there_and_back(line, name, megabytes) for name in ("bytes_between_ranks", "bytes_copied")),
            _there_and_back(line, "launches", str),
        )
        for line in case.lines
    ]
    return table_of(
        f"{tokens} tokens per rank x {shape.heads} heads x {shape.dim}, {shape.dtype}; "
        f"{len(shape.counts)} ranks, {report.machine['backend']}, {report.rounds} rounds",
        "Times in ms on the slowest rank: median, below it 10th to 90th percentile. Ratios of the medians of both, "
        "above 1 is faster. MB and launches: dispatch + return, of the rank with the most.",
        ("", "dispatch", "return", "both", "x stock", "x bare", "MB sent", "MB copied", "launches"),
        rows,
        words=1,
    )


def _there_and_back(line: LineReport, name: str, write: Callable[[int], str]) -> str:
    return "+".join(write(max(line.counts[direction][name])) for direction in ("dispatch", "return"))


def spread(times: Times) -> str:
    """The median, and on a line of its own the 10th to 90th percentile, in ms."""
    digits = 1 if times.median_ms >= 10 else 2
    return f"{times.median_ms:.{digits}f}\n[dim]{times.p10_ms:.{digits}f}-{times.p90_ms:.{digits}f}[/dim]"


def megabytes(number: int) -> str:
    """Bytes in MB, with as many digits as small ones need."""
    value = number / 1e6
    return f"{value:.1f}" if value >= 1 or not value else f"{value:.2g}"


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data, advice included."""
    return {**asdict(report), "advice": report.advice()}


def write_json(path: str, data: Any) -> None:
    """Write plain data to a file."""
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def require_picture(path: str) -> None:
    """Find out before measuring whether matplotlib can write a picture of that kind.

    Raises:
        ValueError: it cannot.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in kinds:
        raise ValueError(
            f"--plot {path}: expected a name that ends in one of {', '.join(f'.{kind}' for kind in kinds)}"
        )


def plot(path: str, report: Report) -> None:
    """Round-trip time over tokens per rank, one curve per line, spread as a band; and how each compares to stock."""
    require("matplotlib", "plot")
    draw(report).savefig(path, dpi=110)


def draw(report: Report) -> Any:
    """The figure of `plot`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, ScalarFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    tokens = [case.case.counts[0] for case in report.cases]
    names = [line.name for line in report.cases[0].lines]
    ends = []
    for number, name in enumerate(names):
        lines = [next(line for line in case.lines if line.name == name) for case in report.cases]
        style: dict[str, Any] = {"color": _colour(name, number), "linestyle": "--" if name == BARE else "-"}
        times.plot(tokens, [line.round_trip.median_ms for line in lines], marker="o", label=name, **style)
        low, high = ([getattr(line.round_trip, end) for line in lines] for end in ("p10_ms", "p90_ms"))
        times.fill_between(tokens, low, high, color=style["color"], alpha=0.12, linewidth=0)
        ratios.plot(tokens, [line.times_stock for line in lines], marker="o", **style)
        ends.append((lines[-1].times_stock, style["color"]))
    times.set(xscale="log", yscale="log", title="Round trip", ylabel="ms, slowest rank (band: 10th to 90th percentile)")
    ratios.set(xscale="log", title="Speed relative to stock", ylabel="stock time / time (above 1 is faster)")
    ratios.set_ylim(0, 1.1 * max(line.times_stock for case in report.cases for line in case.lines))
    times.legend()
    for axes in (times, ratios):
        axes.set_xlabel("tokens per rank")
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    # Round numbers that do not crowd, however many decades there are.
    times.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    times.yaxis.set_major_formatter(ScalarFormatter())
    times.yaxis.set_minor_formatter(NullFormatter())
    shape = report.cases[0].case
    figure.suptitle(
        f"{len(shape.counts)} ranks, {shape.heads} heads x {shape.dim}, {shape.dtype}, "
        f"{report.machine['backend']} on {report.machine['device']}, {report.rounds} rounds"
    )
    _label_ends(ratios, ends)
    return figure


def _label_ends(axes: Any, ends: Sequence[tuple[float, str]]) -> None:
    """Write each curve's last value on the right of the frame, moved up where two would overlap."""
    axes.figure.draw_without_rendering()  # the layout is known from here on
    size, pixels = 10.0, axes.figure.dpi / 72  # of a letter in points, of a point
    lowest = float("-inf")
    for value, colour in sorted(ends):
        at = axes.transData.transform((1, value))[1] / pixels
        lowest = max(at, lowest + 1.3 * size)
        axes.annotate(
            f"{value:.2f}",
            (1, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, lowest - at),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=size,
            color=colour,
        )


def _colour(name: str, number: int) -> str:
    return {STOCK: "tab:red", BARE: "tab:gray"}.get(name, f"C{(number + 1) % 3 * 2}" if number < 4 else f"C{number}")


def table_of(
    title: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 2
) -> Any:
    """A table that fits the console, whose first columns are words and the others numbers.

    A number is whole or absent: where the width does not suffice for all columns, those on the right are left out and
    the caption names them. With two columns of words there is a rule where the first changes.

    Args:
        words: how many columns are words; they and the first number always stay.
    """
    width, shown = console().width, len(headings)
    table = _table(title, caption, headings, rows, words, shown)
    while shown > words + 1 and _whole(table) > width:
        shown -= 1
        missing = ", ".join(headings[shown:])
        note = f"{caption} For want of width without: {missing} (--json has all)."
        table = _table(title, note, headings, rows, words, shown)
    if _whole(table) > width:  # the words give way, not the number
        for column in table.columns[:words]:
            column.no_wrap, column.overflow = False, "fold"
    return table


def _whole(table: Any) -> int:
    """The width at which nothing of a table is cut."""
    from rich.console import Console

    width: int = Console(width=10_000).measure(table).maximum
    return width


def _table(
    title: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int, shown: int
) -> Any:
    """The first `shown` columns, each as wide as its widest cell."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left")
    for number, heading in enumerate(headings[:shown]):
        table.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    for number, row in enumerate(rows):
        repeated = words > 1 and bool(number) and row[0] == rows[number - 1][0]
        if words > 1 and number and not repeated:
            table.add_section()
        table.add_row("" if repeated else row[0], *row[1:shown])
    return table
