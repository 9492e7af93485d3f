"""The entry point that vLLM and vLLM-Omni call in each of their processes.

Nothing here may raise except in strict mode: an exception from a plugin kills the server at start.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from . import config, profiles
from .log import forget, logger, warn_once

if TYPE_CHECKING:
    from .host.ledger import Ledger, RecordStatus

_lock = threading.RLock()
_ledger: Ledger | None = None
_announced = False
_problems: tuple[str, ...] = ()  # what the last call warned of


class StrictModeError(RuntimeError):
    """`VLLM_MUSA_HEADPAR=strict`, and something does not fit."""


def register() -> None:
    """Switch the plugin on in this process, if the environment says so.

    Called by vLLM for each entry point group, in any order and any number of times; completes what an
    earlier call had to leave pending, and looks again at what it refused. When off, it imports nothing.

    Raises:
        StrictModeError: in strict mode only, where anything does not fit.
    """
    with suppress(Exception):  # vLLM's warning of names that it does not know is no reason to fail
        config.announce_to_vllm()
    settings = config.read()
    problems = list(settings.problems)
    if settings.strict and settings.profile is not None:  # else the ranks say at the first exchange whose is wrong
        read = profiles.once(settings.profile)
        problems += [f"{config.PROFILE}: {read}"] if isinstance(read, str) else []
    if settings.enabled:
        try:
            with _lock:
                problems += _switch_on(settings)
        except Exception as error:
            problems.append(f"the plugin could not be switched on: {type(error).__name__}: {error}")
    if problems and settings.strict:
        raise StrictModeError("; ".join(problems))
    global _problems
    _problems = tuple(problems)
    for problem in problems:
        warn_once(problem)


def report() -> list[RecordStatus]:
    """Every patch record with its status in this process, the reason, and what it is about."""
    with _lock:
        return _the_ledger().report()


def undo() -> list[RecordStatus]:
    """Take all patches back in this process.

    Returns:
        The records that stay because someone has patched over them since.
    """
    with _lock:
        return _the_ledger().undo()


def _switch_on(settings: config.Settings) -> list[str]:
    """What does not fit, in sentences."""
    problem = import_torchada()
    if problem is not None:
        return [problem]
    refused = _the_ledger().apply()
    problems = [f"{record.name} is not applied: {record.reason}" for record in refused]
    if not problems:
        problems = _nothing_to_do()
    _announce(settings)
    return problems


def import_torchada() -> str | None:
    """Import torchada, which must come before the MUSA device is initialised. Why that failed, or None."""
    if "torchada" not in sys.modules and _musa_is_initialized():  # too late: it would patch a torch in use
        return (
            "the MUSA device was initialised before torchada was imported, so torch could not be fully patched: "
            f"import torchada first, or set {config.FLAG}=0"
        )
    try:
        import torchada
    except Exception as error:
        return f"torchada cannot be imported ({type(error).__name__}: {error}): install it, or set {config.FLAG}=0"
    if torchada.is_musa_platform() and not torchada.is_patched():
        return f"torchada has not patched torch on this MUSA platform: update torchada, or set {config.FLAG}=0"
    return None


def _musa_is_initialized() -> bool:
    musa = getattr(sys.modules.get("torch"), "musa", None)
    is_initialized = getattr(musa, "is_initialized", None)
    return bool(is_initialized and is_initialized())


def _the_ledger() -> Ledger:
    global _ledger
    if _ledger is None:
        from .host import head_parallel, magi2, magi2_on_musa, ulysses
        from .host.ledger import Ledger

        _ledger = Ledger([*head_parallel.RECORDS, *magi2.RECORDS, *magi2_on_musa.RECORDS, *ulysses.RECORDS])
    return _ledger


def _nothing_to_do() -> list[str]:
    records = report()
    if all(record.status == "not needed" for record in records):
        return [f"nothing to patch: {records[0].reason}"]
    return []


def _announce(settings: config.Settings) -> None:
    """The one INFO line of a process, where there is something to say."""
    global _announced
    line = _is_on(settings)
    if line is not None and not _announced:
        _announced = True
        logger.info("%s", line)


def _is_on(settings: config.Settings) -> str | None:
    from .host.ledger import IN_FORCE
    from .version import __version__

    records = report()
    applied = [_with_trial(record) for record in records if record.status in IN_FORCE]
    waiting = next((record.reason for record in records if record.status == "pending"), None)
    if not applied and waiting is None:
        return None
    check = ", cross-rank check" if settings.check else ""
    done = f"waiting: {waiting}" if waiting else f"patched {', '.join(applied)}"
    return f"vllm-musa-headpar {__version__} is on: exchange {settings.exchange}{check}; {done}"


def _with_trial(record: RecordStatus) -> str:
    return f"{record.name} ({record.status})" if record.status in ("on trial", "gave way") else record.name


def _in_forked_child() -> None:
    """A forked process has its parent's patches, and vLLM does not call `register` there again: say what is on."""
    global _lock, _announced
    _lock = threading.RLock()  # another thread of the parent may have held it
    forget()
    if _announced:
        _announced = False
        _announce(config.read())
    for problem in _problems:
        warn_once(problem)


os.register_at_fork(after_in_child=_in_forked_child)
