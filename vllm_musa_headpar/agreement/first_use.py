"""First use of a group: which implementation its ranks use, and whether they check.

The ranks tell each other, over the store, what each would use; no collective. Where all have asked for nothing that
would need the others, each leaves a note and goes on. Whoever could do otherwise waits for the
others' notes, and settles with those that wait as well. If ranks differ, all use the reference.

Threads may be at the first use of one group at the same time: it is settled once, and the others wait for that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import choice, config, registry
from ..log import logger, warn_once
from ..version import __version__
from .board import Board, BoardError, NoStoreError, Note, board_of, quoted


@dataclass
class GroupState:
    """What holds for a group's exchanges on one device type.

    Attributes:
        backend: name of the communication backend, None if it cannot be found out.
        registration: the implementation in use, where its size does not decide.
        check: compare the ranks' exchanges before each one.
        proven: the warm-up and self-test are behind us, or not needed.
        used: the first exchange has been logged.
        by_size: what to use for which size; None where it is the same for all.
    """

    backend: str | None
    registration: registry.Registration
    check: bool
    proven: bool
    used: bool = False
    by_size: choice.BySize | None = None

    @property
    def name(self) -> str:
        """What is in use: an implementation's name, or "auto" where a profile decides."""
        return config.AUTO if self.by_size is not None and self.by_size.name else self.registration.name

    @property
    def candidates(self) -> list[registry.Registration]:
        """All that may be used."""
        return list(dict.fromkeys([self.registration, *(self.by_size.registrations() if self.by_size else ())]))


# Hung on the group weakly: a group made anew, even at the same address, settles anew.
states: weakref.WeakKeyDictionary[Any, dict[str, GroupState]] = weakref.WeakKeyDictionary()
_locks: weakref.WeakKeyDictionary[Any, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def state_of(group: Any, device: torch.device) -> GroupState:
    """The state of a group for a device; settled with the other ranks on the first call, once per process.

    Raises:
        ValueError: the group has no backend for the device; or strict mode and an unknown implementation.
        DisagreementError: a rank does not come to settle.
        BoardError: the store cannot be reached, or what is in it is no note.
        NoStoreError: the check is asked for and there is no store to do it over.
    """
    try:
        return states[group][device.type]
    except (KeyError, TypeError):
        pass
    with once(group, device):
        state = known_states(group).get(device.type)  # another thread may have been here meanwhile
        if state is None:
            state = _settle(group, device)
            try:
                with _lock:
                    states.setdefault(group, {})[device.type] = state
            except TypeError:  # a group of the caller's own kind that cannot be referred to weakly: nothing is kept
                state.used = True
    return state


def once(group: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Context: what is done once per process for a group and a device type. Another thread waits.

    Threads at other groups do not, nor those at another device type of this one: the ranks of each meet on their own.
    """
    try:
        with _lock:
            return _locks.setdefault(group, {}).setdefault(device.type, threading.Lock())
    except TypeError:
        return nullcontext()


def known_states(group: Any) -> Mapping[str, GroupState]:
    """The states of a group that have been settled so far, by device type."""
    try:
        return states.get(group, {})
    except TypeError:
        return {}


def _settle(group: Any, device: torch.device) -> GroupState:
    settings = config.read()
    backend = registry.backend_of(group, device)
    exchange = _known_exchange(settings)
    registration = registry.select(backend, exchange)
    claimed = registry.claim(backend) is not None
    by_profile = backend is not None and choice.asked(settings, exchange)
    waits = settings.check or claimed or by_profile or registration is not registry.REFERENCE
    followed, unusable = choice.Followed(), {}
    if backend is not None and waits:
        if by_profile and settings.profile is not None:
            ranks = dist.get_world_size(group)
            followed = choice.follow(settings.profile, registration, backend, device, ranks)
        unusable = _unusable([registration, *followed.registrations()], group, device, backend)
    proposal = {
        "exchange": registration.name,
        "check": settings.check,
        "version": __version__,
        "unusable": unusable,
        "profile": followed.digest,
        "profile_problem": followed.problem,
    }
    topic = f"the first exchange on {device.type}"
    if not waits:  # nothing else can come of it here, but the others may be waiting
        try:
            board_of(group).announce(topic, proposal)
        except (NoStoreError, BoardError) as error:
            logger.debug("no rank could be told that nothing is settled here: %s", error)
        return GroupState(backend, registry.REFERENCE, False, proven=True)
    try:
        board = board_of(group)
    except NoStoreError as error:
        if settings.check:
            raise
        warn_once(f"the stock exchange is used on backend {backend}: {error}")
        return GroupState(backend, registry.REFERENCE, False, proven=True)
    notes, away = board.settle(topic, proposal)
    where = f"on a group of {dist.get_world_size(group)} ranks, backend {backend}"
    if away:
        unchecked = f", and {config.CHECK} is off for this group" if settings.check else ""
        warn_once(
            f"the stock exchange is used {where}{unchecked}: {board.name_ranks(away)} asked for nothing else and did "
            "not wait (the environment must be the same on all ranks)"
        )
        return GroupState(backend, registry.REFERENCE, False, proven=True)
    return _from_proposals(board, [notes[rank] for rank in sorted(notes)], registration, followed, backend, device)


def _from_proposals(
    board: Board,
    proposals: list[Note],
    registration: registry.Registration,
    followed: choice.Followed,
    backend: str | None,
    device: torch.device,
) -> GroupState:
    """What comes of the proposals of all ranks, the same on each of them."""
    where = f"on a group of {len(proposals)} ranks, backend {backend}"
    reason = _why_reference(board, proposals)
    check = any(other.get("check") for other in proposals)
    if not all(other.get("check") for other in proposals) and check:
        warn_once(f"{config.CHECK} is on for some ranks only; it is now on for all of this group")
    if reason is not None:
        warn_once(f"the stock exchange is used {where}: {reason}")
        registration = registry.REFERENCE
    if backend is None:
        return GroupState(backend, registration, check, proven=True)
    without = None if _of_another_version(proposals) else _why_without_profile(board, proposals)
    if without is not None:
        warn_once(f"no profile is used {where}: {without}")
    elif reason is None and followed.by_size is not None:
        refused = {name: why for proposal in proposals for name, why in proposal["unusable"].items()}
        for name, why in refused.items():
            warn_once(f"the stock exchange is used in the place of the profile's {name} {where}: {why}")
        return _state(backend, registration, check, followed.by_size.without(refused))
    return _state(backend, registration, check, choice.limit(registration, backend, device, len(proposals)))


def _of_another_version(proposals: list[Note]) -> bool:
    """Whether ranks run different versions of this package, whose notes may have other fields."""
    return any(proposal.get("version") != __version__ for proposal in proposals)


def _state(backend: str, registration: registry.Registration, check: bool, by_size: choice.BySize | None) -> GroupState:
    state = GroupState(backend, registration, check, proven=False, by_size=by_size)
    state.proven = state.candidates == [registry.REFERENCE]
    return state


def _known_exchange(settings: config.Settings) -> str:
    """The exchange asked for, "auto" for an unknown one."""
    if settings.exchange == config.AUTO or registry.find(settings.exchange) is not None:
        return settings.exchange
    problem = (
        f"{config.EXCHANGE}={settings.exchange!r} is not known: "
        f"expected {config.AUTO} or one of {', '.join(registry.registered())}"
    )
    if settings.strict:
        raise ValueError(problem)
    warn_once(f"{problem}. Using {config.AUTO}.")
    return config.AUTO


def _unusable(
    candidates: Iterable[registry.Registration], group: Any, device: torch.device, backend: str
) -> dict[str, str]:
    """Which implementations must not be used on a group, and why."""
    reasons = {}
    for candidate in candidates:
        try:
            reason = candidate.unusable(group, device, backend) if candidate.unusable is not None else None
        except Exception as error:
            reason = f"{candidate.name} cannot tell whether it may be used: {error}"
        if reason is not None:
            reasons[candidate.name] = reason
    return reasons


def _why_reference(board: Board, proposals: list[Note]) -> str | None:
    """Why the ranks cannot all use what they propose, the same words on every rank; None if they can."""
    if _of_another_version(proposals):
        return f"the ranks differ in {board.differences('version', proposals)}"
    for rank, proposal in enumerate(proposals):
        if proposal["exchange"] in proposal["unusable"]:
            return f"{board.name_ranks([rank])}: {quoted(str(proposal['unusable'][proposal['exchange']]))}"
    if len({proposal["exchange"] for proposal in proposals}) > 1:
        return f"the ranks differ in {board.differences('exchange', proposals)}"
    return None


def _why_without_profile(board: Board, proposals: list[Note]) -> str | None:
    """Why the ranks cannot follow their profiles, the same words on every rank; None if they can, or have none."""
    told: dict[str, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        if proposal["profile_problem"] is not None:
            told.setdefault(proposal["profile_problem"], []).append(rank)
    if told:
        return "; ".join(f"{board.name_ranks(ranks)}: {problem}" for problem, ranks in told.items())
    if len({proposal["profile"] for proposal in proposals}) > 1:
        return f"the ranks differ in {board.differences('profile', proposals)}"
    return None
