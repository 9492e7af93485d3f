"""The ledger: every patch of other people's software is a record here, applied, reported and undone alike."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from .stock import why_not_stock

if TYPE_CHECKING:
    from ..agreement.trial import Trial

HOST = "vllm_omni"
MISSING = object()

# Statuses
OFF = "off"  # the plugin has not been switched on in this process
PENDING = "pending"  # the host is not loaded yet
APPLIED = "applied"
NOT_NEEDED = "not needed"
REFUSED = "refused"  # drift, or another's patch in the way; nothing was touched
OVERLAID = "overlaid"  # applied, and since wrapped or replaced by someone else
UNDONE = "undone"
ON_TRIAL = "on trial"  # applied to a function of unknown body; nothing has been compared yet
PROVEN = "proven"  # applied to a function of unknown body, and right wherever it was compared
GAVE_WAY = "gave way"  # applied, but the host's own function is used where the results differed
IN_FORCE = (APPLIED, OVERLAID, ON_TRIAL, PROVEN, GAVE_WAY)


class Refused(Exception):
    """The record does not fit what is there. The message is its status's reason."""


class NotNeeded(Exception):
    """This host does without the record. The message is its status's reason."""


@dataclass(frozen=True)
class Binding:
    """One name that is given another value: an attribute, or a key of a dict.

    `trial` is how a replacement does that is compared with a stock function of unknown body.
    """

    owner: Any
    name: str
    original: Any
    replacement: Any
    trial: Trial | None = None

    @property
    def current(self) -> Any:
        return _namespace(self.owner).get(self.name, MISSING)

    def put(self) -> None:
        """Give the name its replacement; a function takes over the stock function's names."""
        carry_names(self.original, self.replacement)
        self.set(self.replacement)

    def set(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            if value is MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True)
class Record:
    """One patch.

    Args:
        name: short and unique.
        replaces: what it replaces, `module:qualified name`.
        why: what is better with it.
        how: what it does.
        hosts: where it applies.
        until: what makes it unnecessary.
        bindings: finds the names to give other values, without touching any. Raises Refused or NotNeeded.
    """

    name: str
    replaces: str
    why: str
    how: str
    hosts: str
    until: str
    bindings: Callable[[], list[Binding]] = field(repr=False)


@dataclass(frozen=True)
class RecordStatus:
    """A record with what became of it in this process."""

    name: str
    status: str
    reason: str
    replaces: str
    why: str
    how: str
    hosts: str
    until: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class _Entry:
    record: Record
    status: str = OFF
    reason: str = "the plugin has not been switched on in this process"
    applied: list[Binding] = field(default_factory=list)


class Ledger:
    """All records of one process. Not thread-safe by itself: the plugin holds a lock."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._entries = [_Entry(record) for record in records]

    def apply(self) -> list[RecordStatus]:
        """Apply what can be applied and is not yet; what an earlier call refused is looked at anew.

        Returns:
            The records that were refused in this call.
        """
        waiting = why_pending()
        refused = []
        for entry in self._entries:
            if entry.status == APPLIED:
                continue
            if waiting is not None:
                entry.status, entry.reason = PENDING, waiting
                continue
            self._apply(entry)
            if entry.status == REFUSED:
                refused.append(_status(entry))
        return refused

    @staticmethod
    def _apply(entry: _Entry) -> None:
        done: list[Binding] = []
        try:
            for binding in entry.record.bindings():
                binding.put()
                done.append(binding)
        except NotNeeded as reason:
            entry.status, entry.reason = NOT_NEEDED, str(reason)
        except Refused as reason:
            entry.status, entry.reason = REFUSED, str(reason)
        except Exception as error:  # whatever a host may hold: one record is lost, not the server
            entry.status, entry.reason = REFUSED, f"{type(error).__name__}: {error}"
        else:
            entry.status, entry.reason, entry.applied = APPLIED, "", done
            return
        for binding in reversed(done):
            binding.set(binding.original)

    def report(self) -> list[RecordStatus]:
        """Every record with its status as of now."""
        return [_status(entry) for entry in self._entries]

    def undo(self) -> list[RecordStatus]:
        """Give every name its original value back, wherever it has been imported since.

        What was found out about the other records is forgotten too: the next `apply` looks anew.

        Returns:
            The records that could not be undone because someone has patched over them.
        """
        kept = []
        for entry in reversed(self._entries):
            if entry.status == OFF:
                continue
            if _overlaid(entry) is not None:
                kept.append(_status(entry))
                continue
            for binding in reversed(entry.applied):
                binding.set(binding.original)
                if binding.original is not MISSING:
                    for owner, name in imports_of(binding.replacement, HOST):
                        setattr(owner, name, binding.original)
            reason = "taken back" if entry.applied else "there was nothing to take back"
            entry.status, entry.reason, entry.applied = UNDONE, reason, []
        return kept


def why_pending() -> str | None:
    """Why the host cannot be patched yet; None if it can."""
    host = sys.modules.get(HOST)
    if host is None:
        return f"{HOST} is not loaded in this process"
    if getattr(getattr(host, "__spec__", None), "_initializing", False):
        return f"{HOST} is still being imported"
    return None


def load(module: str) -> ModuleType:
    """Import a module of the host.

    Raises:
        Refused: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Refused(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def stock_function(module: ModuleType, qualname: str, signature: str, fingerprint: str | None) -> tuple[Any, str, Any]:
    """Where a stock function hangs: its owner, its name there, and itself.

    Raises:
        Refused: there is none of that name, or it is not the one expected.
    """
    path, _, name = qualname.rpartition(".")
    owner: Any = module
    for step in filter(None, path.split(".")):
        owner = _namespace(owner).get(step)
    function = _namespace(owner).get(name, MISSING) if owner is not None else MISSING
    if function is MISSING:
        raise Refused(f"{module.__name__} has no {qualname}")
    reason = why_not_stock(function, module, signature, fingerprint)
    if reason is not None:
        raise Refused(f"{module.__name__}.{qualname} is not the one this patch was written for: {reason}")
    return owner, name, function


def carry_names(original: Any, replacement: Any) -> None:
    """Let a replacement made for a stock function go by that function's names.

    Pickle stores a function as its module's and its own name, and finds it there again: with the stock function's
    names, what was picklable stays so, and a process without the patch gets the stock function. A function that can
    be found under its own name keeps it. `__wrapped__` is not set: it marks what is laid over a function.
    """
    if not (isinstance(original, FunctionType) and isinstance(replacement, FunctionType)):
        return
    home = sys.modules.get(replacement.__module__)
    if getattr(home, replacement.__qualname__, None) is replacement:
        return
    for name in ("__module__", "__qualname__", "__name__"):
        setattr(replacement, name, getattr(original, name))


def imports_of(value: Any, package: str) -> list[tuple[ModuleType, str]]:
    """Every module-level name that is bound to this very object.

    Within the package that is any name. In the process's other modules, a hardware plugin's worker say, it is the
    object's own name alone: one look-up per module. Only dictionaries are looked into, so that no module is asked
    to import anything.
    """
    own_name = getattr(value, "__name__", None)
    found = []
    modules: list[tuple[str, Any]] = sorted(sys.modules.items())  # some put other things there
    for module_name, module in modules:
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        if module_name == package or module_name.startswith(f"{package}."):
            found += [(module, name) for name, bound in list(names.items()) if bound is value]
        elif own_name is not None and names.get(own_name) is value:
            found.append((module, own_name))
    return found


def _namespace(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _overlaid(entry: _Entry) -> str | None:
    for binding in entry.applied:
        current = binding.current
        if current is not binding.replacement:
            what = "gone" if current is MISSING else f"{current!r}"
            owner = getattr(binding.owner, "__name__", "the module table")
            return f"{owner}.{binding.name} has been replaced since; it is now {what}"
    return None


def _of_trial(trial: Trial) -> tuple[str, str]:
    if trial.gave_way:
        return GAVE_WAY, f"gave way: {trial.gave_way}"
    if trial.layouts:
        return PROVEN, f"proven for {trial.layouts} layout{'s' if trial.layouts > 1 else ''}"
    return ON_TRIAL, "the host's function has an unknown body: the first call of each layout compares the two"


def _status(entry: _Entry) -> RecordStatus:
    status, reason = entry.status, entry.reason
    if status == APPLIED and (overlaid := _overlaid(entry)) is not None:
        status, reason = OVERLAID, overlaid
    elif status == APPLIED:
        trials = [binding.trial for binding in entry.applied if binding.trial is not None]
        if trials:
            status, reason = _of_trial(trials[0])
    record = entry.record
    return RecordStatus(
        record.name, status, reason, record.replaces, record.why, record.how, record.hosts, record.until
    )
