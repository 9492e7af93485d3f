"""Tables, JSON and the picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .exchange import BARE, STOCK, CaseReport, LineReport, Report
from .rounds import Spread
from .world import require


def console() -> Any:
    """A console that is wide enough for the tables where the output is no terminal."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=120)


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
    table = _table(
        f"{tokens} tokens per rank x {shape.heads} heads x {shape.dim}, {shape.dtype}; "
        f"{len(shape.counts)} ranks, {report.machine['backend']}, {report.rounds} rounds",
        "Times in ms on the slowest rank: median, below it 10th to 90th percentile. Ratios of the medians of both, "
        "above 1 is faster. MB and launches: dispatch + return, of the rank with the most.",
    )
    table.add_column("", no_wrap=True)
    for heading in ("dispatch", "return", "both", "x stock", "x bare", "MB sent", "MB copied", "launches"):
        table.add_column(heading, justify="right")
    for line in case.lines:
        table.add_row(
            line.name,
            *map(spread, (line.dispatch, line.back, line.round_trip)),
            f"{line.times_stock:.2f}",
            f"{line.times_bare:.2f}",
            *(_there_and_back(line, name, megabytes) for name in ("bytes_between_ranks", "bytes_copied")),
            _there_and_back(line, "launches", str),
        )
    return table


def _there_and_back(line: LineReport, name: str, write: Callable[[int], str]) -> str:
    return "+".join(write(max(line.counts[direction][name])) for direction in ("dispatch", "return"))


def spread(times: Spread) -> str:
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


def plot(path: str, report: Report) -> None:
    """Round-trip time over tokens per rank, one curve per line, spread as a band; and how each compares to stock."""
    require("matplotlib", "plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    tokens = [case.case.counts[0] for case in report.cases]
    names = [line.name for line in report.cases[0].lines]
    for number, name in enumerate(names):
        lines = [next(line for line in case.lines if line.name == name) for case in report.cases]
        style: dict[str, Any] = {"color": _colour(name, number), "linestyle": "--" if name == BARE else "-"}
        times.plot(tokens, [line.round_trip.median_ms for line in lines], marker="o", label=name, **style)
        low, high = ([getattr(line.round_trip, end) for line in lines] for end in ("p10_ms", "p90_ms"))
        times.fill_between(tokens, low, high, color=style["color"], alpha=0.12, linewidth=0)
        ratios.plot(tokens, [line.times_stock for line in lines], marker="o", **style)
        ratios.annotate(
            f"{lines[-1].times_stock:.2f}",
            (tokens[-1], lines[-1].times_stock),
            xytext=(6, -3),
            textcoords="offset points",
            color=style["color"],
        )
    times.set(xscale="log", yscale="log", title="Round trip", ylabel="ms, slowest rank (band: 10th to 90th percentile)")
    ratios.set(xscale="log", title="Speed relative to stock", ylabel="stock time / time (above 1 is faster)")
    ratios.set_ylim(bottom=0)
    times.legend()
    for axes in (times, ratios):
        axes.set_xlabel("tokens per rank")
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    times.yaxis.set_major_formatter(ScalarFormatter())
    shape = report.cases[0].case
    figure.suptitle(
        f"{len(shape.counts)} ranks, {shape.heads} heads x {shape.dim}, {shape.dtype}, "
        f"{report.machine['backend']} on {report.machine['device']}, {report.rounds} rounds"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _colour(name: str, number: int) -> str:
    return {STOCK: "tab:red", BARE: "tab:gray"}.get(name, f"C{(number + 1) % 3 * 2}" if number < 4 else f"C{number}")


def table_of(title: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table whose first two columns are words and the others numbers; a rule where the first changes."""
    table = _table(title, caption)
    for number, heading in enumerate(headings):
        words = number < 2
        table.add_column(heading, justify="left" if words else "right", no_wrap=words)
    for number, row in enumerate(rows):
        if number and row[0] != rows[number - 1][0]:
            table.add_section()
        repeated = bool(number) and row[0] == rows[number - 1][0]
        table.add_row("" if repeated else row[0], *row[1:])
    return table


def _table(title: str, caption: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left")
