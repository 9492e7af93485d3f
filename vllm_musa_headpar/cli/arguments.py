"""The kinds of values that the commands take; each says in plain words what it expected.

`ArgumentTypeError` always: on any other error argparse shows the name of the function here.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

LONGEST = 7 * 24 * 3600  # seconds; a mistyped number is more likely than a longer run


def whole_number(minimum: int) -> Callable[[str], int]:
    """A type: whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, got {text!r}")
        return number

    return parse


def whole_numbers(minimum: int) -> Callable[[str], tuple[int, ...]]:
    """A type: whole numbers from `minimum` on, with commas between them."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(map(whole_number(minimum), text.split(",")))
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"expected whole numbers of at least {minimum} with commas between them, got {text!r}"
            ) from None

    return parse


def seconds(text: str) -> float:
    """A type: a time that is worth waiting for, and that every clock can hold."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= LONGEST:
        raise argparse.ArgumentTypeError(f"expected a number of seconds from 1 to {LONGEST} (a week), got {text!r}")
    return number


def require_writable(option: str, file: str) -> None:
    """Find out before the work whether its result can be written. What is there is left as it is.

    Raises:
        ValueError: it cannot; names the option, the file and the reason.
    """
    reason = _why_not_writable(Path(file))
    if reason is not None:
        raise ValueError(f"{option} {file} cannot be written: {reason}")


def _why_not_writable(path: Path) -> str | None:
    try:
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if path.is_dir():
            return "it is a folder"
        is_new = not path.exists()
        if not is_new and not path.is_file():  # a pipe or a device: to open it may be more than a look
            return None if os.access(path, os.W_OK) else "permission denied"
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
