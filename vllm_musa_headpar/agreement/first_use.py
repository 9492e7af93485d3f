"""First use of a group, where a tuned implementation can be chosen: which one its ranks use, and whether they check.

The ranks tell each other, over the store, what each would use; no collective. If they differ, all use the reference.
Where only the reference can be chosen there is nothing to settle.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import choice, config, registry
from ..log import warn_once
from ..version import __version__
from .board import Board, NoStoreError, Note, board_of


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


def state_of(group: Any, device: torch.device) -> GroupState:
    """The state of a group for a device; settled with the other ranks on the first call.

    Raises:
        ValueError: the group has no backend for the device; or strict mode and an unknown implementation.
        DisagreementError: a rank does not come to settle.
        NoStoreError: the check is asked for and there is no store to do it over.
    """
    try:
        return states[group][device.type]
    except (KeyError, TypeError):
        pass
    state = _settle(group, device)
    try:
        states.setdefault(group, {})[device.type] = state
    except TypeError:  # a group of the caller's own kind that cannot be referred to weakly: nothing is kept
        state.used = True
    return state


def known_states(group: Any) -> Iterable[GroupState]:
    """The states of a group that have been settled so far."""
    return states.get(group, {}).values()


def _settle(group: Any, device: torch.device) -> GroupState:
    settings = config.read()
    backend = registry.backend_of(group, device)
    exchange = _known_exchange(settings)
    registration = registry.select(backend, exchange)
    if settings.check:
        board_of(group)
    claimed = registry.claim(backend) is not None
    by_profile = choice.asked(settings, exchange)
    if backend is None or (registration is registry.REFERENCE and not claimed and not by_profile):
        return GroupState(backend, registration, settings.check, proven=True)
    ranks = dist.get_world_size(group)
    followed = choice.Followed()
    if by_profile and settings.profile is not None:
        followed = choice.follow(settings.profile, registration, backend, device, ranks)
    unusable = _unusable([registration, *followed.registrations()], group, device, backend)
    # With the check on, ranks that were not asked to use another exchange do not come to settle.
    if settings.check and not claimed and not by_profile:
        if unusable:
            warn_once(f"the stock exchange is used on backend {backend}: {unusable[registration.name]}")
            registration = registry.REFERENCE
        return _state(backend, registration, True, choice.limit(registration, backend, device, ranks))
    proposal = {
        "exchange": registration.name,
        "check": settings.check,
        "version": __version__,
        "unusable": unusable,
        "profile": followed.digest,
        "profile_problem": followed.problem,
    }
    try:
        board = board_of(group)
    except NoStoreError as error:
        warn_once(f"the stock exchange is used on backend {backend}: {error}")
        return GroupState(backend, registry.REFERENCE, False, proven=True)
    proposals = board.meet(f"the first exchange on {device.type}", proposal)
    check = any(other["check"] for other in proposals)
    if not all(other["check"] == check for other in proposals):
        warn_once(f"{config.CHECK} is on for some ranks only; it is now on for all of this group")
    where = f"on a group of {len(proposals)} ranks, backend {backend}"
    reason = _why_reference(board, proposals)
    if reason is not None:
        warn_once(f"the stock exchange is used {where}: {reason}")
        registration = registry.REFERENCE
    without = _why_without_profile(board, proposals)
    if without is not None:
        warn_once(f"no profile is used {where}: {without}")
    elif reason is None and followed.by_size is not None:
        refused = {name: why for proposal in proposals for name, why in proposal["unusable"].items()}
        for name, why in refused.items():
            warn_once(f"the stock exchange is used in the place of the profile's {name} {where}: {why}")
        return _state(backend, registration, check, followed.by_size.without(refused))
    return _state(backend, registration, check, choice.limit(registration, backend, device, ranks))


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
    for rank, proposal in enumerate(proposals):
        if proposal["exchange"] in proposal["unusable"]:
            return f"{board.name_ranks([rank])}: {proposal['unusable'][proposal['exchange']]}"
    for field in ("exchange", "version"):
        if len({proposal[field] for proposal in proposals}) > 1:
            return f"the ranks differ in {board.differences(field, proposals)}"
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
