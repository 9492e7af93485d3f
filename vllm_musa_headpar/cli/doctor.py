"""`vllm-musa-headpar doctor`: presents what `diagnosis` finds."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from ..diagnosis import INFORMATION, OK, PROBLEM, WARNING, Diagnosis, diagnose

_COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "bold red", INFORMATION: "blue"}
_STATUS_COLOURS = {
    "applied": "green",
    "refused": "bold red",
    "overlaid": "yellow",
    "pending": "yellow",
    "on trial": "yellow",
    "proven": "green",
    "gave way": "yellow",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object with stable keys, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0 if the plugin would be active here, else 1."""
    # A server's start-up messages are not what was asked for. An explicit setting stays.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with _stdout_kept_clean():
        diagnosis = diagnose()
    if arguments.json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    elif not sys.stdout.isatty() or not _show_tables(diagnosis):
        print(_as_text(diagnosis))
    return 0 if diagnosis.active else 1


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """What is written to standard output meanwhile goes to standard error, by C code too."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):  # log handlers made meanwhile hold on to this one
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _summary(diagnosis: Diagnosis) -> str:
    if not diagnosis.active:
        return "\n".join(["NOT ACTIVE here", *(f"- {reason}" for reason in diagnosis.why)])
    warnings = sum(check.verdict == WARNING for check in diagnosis.checks)
    return f"ACTIVE here{f', with {warnings} warning(s)' if warnings else ''}"


def _by_records(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Families that the same records serve, together: the records' names and the families'."""
    together: dict[str, list[str]] = {}
    for family, records in diagnosis.models.items():
        together.setdefault(", ".join(records), []).append(family)
    return [(names, ", ".join(families)) for names, families in together.items()]


def _as_text(diagnosis: Diagnosis) -> str:
    """Plain lines, one per fact, for pipes and files."""
    lines = []
    for check in diagnosis.checks:
        lines.append(f"{check.verdict:<12}{check.name}: {check.seen}")
        if check.todo:
            lines.append(f"{'':<12}-> {check.todo}")
    for record in diagnosis.records:
        reason = f" ({record['reason']})" if record["reason"] else ""
        lines.append(f"{'record':<12}{record['name']}: {record['status']}{reason}")
        lines.append(f"{'':<12}replaces {record['replaces']}; until {record['until']}")
    for names, families in _by_records(diagnosis):
        lines.append(f"{'models':<12}{families}")
        lines.append(f"{'':<12}served by {names}")
    lines += [f"{'exchange':<12}{backend}: {name}" for backend, name in diagnosis.exchange.items()]
    return "\n".join([*lines, "", _summary(diagnosis)])


def _show_tables(diagnosis: Diagnosis) -> bool:
    """Tables with colour, for a terminal. False, and a message, if rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("rich is not installed, so this is plain text: pip install rich", file=sys.stderr)
        return False

    def folded(text: str) -> Text:
        """Names are long and must stay whole: broken over lines, not cut short."""
        return Text(text, overflow="fold")

    console = Console()
    checks = Table("check", "verdict", "what was seen", "what to do", title="vllm-musa-headpar doctor")
    for check in diagnosis.checks:
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        checks.add_row(Text(check.name), verdict, folded(check.seen), folded(check.todo))
    console.print(checks)
    if diagnosis.records:
        records = Table("patch", "status", "reason", "replaces", "unnecessary with")
        for record in diagnosis.records:
            status = Text(record["status"], style=_STATUS_COLOURS.get(record["status"], ""))
            told = (folded(record[key]) for key in ("reason", "replaces", "until"))
            records.add_row(Text(record["name"]), status, *told)
        console.print(records)
    if diagnosis.models:
        models = Table("models that exchange heads", "served by")
        for names, families in _by_records(diagnosis):
            models.add_row(folded(families), folded(names))
        console.print(models)
    if diagnosis.exchange:
        exchange = Table("backend", "exchange")
        for backend, name in diagnosis.exchange.items():
            exchange.add_row(Text(backend), Text(name))
        console.print(exchange)
    console.print(Text(_summary(diagnosis), style="green" if diagnosis.active else "bold red"))
    return True
