"""What the ranks of a group settle with each other: at first use, and before each exchange if asked to.

First use, where a tuned implementation can be chosen:
    1. the ranks tell each other, over the store, what each would use and whether it checks (no collective);
    2. before the first exchange with anything in it, one collective warms the communicator and a small
       exchange goes through the tuned implementation and the reference: they must agree bit for bit.
If ranks differ, or the test fails on any, all use the reference. Where only the reference can be chosen there
is nothing to settle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import blocks, choice, config, registry
from .board import Board, NoStoreError, Note, board_of
from .errors import DisagreementError
from .layout import HeadParallelLayout
from .log import logger, warn_once

# The check is for finding a rank that is missing: it does not wait as long as a process group may.
CHECK_PATIENCE = timedelta(minutes=5)


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
_states: weakref.WeakKeyDictionary[Any, dict[str, GroupState]] = weakref.WeakKeyDictionary()


def state_of(group: Any, device: torch.device) -> GroupState:
    """The state of a group for a device; settled with the other ranks on the first call.

    Raises:
        ValueError: the group has no backend for the device; or strict mode and an unknown implementation.
        DisagreementError: a rank does not come to settle.
        NoStoreError: the check is asked for and there is no store to do it over.
    """
    try:
        return _states[group][device.type]
    except (KeyError, TypeError):
        pass
    state = _settle(group, device)
    try:
        _states.setdefault(group, {})[device.type] = state
    except TypeError:  # a group of the caller's own kind that cannot be referred to weakly: nothing is kept
        state.used = True
    return state


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
        "version": _version(),
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
            return f"the ranks differ in {_differences(board, field, proposals)}"
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
        return f"the ranks differ in {_differences(board, 'profile', proposals)}"
    return None


def _version() -> str:
    from . import __version__

    return __version__


def prove(state: GroupState, group: Any, device: torch.device) -> None:
    """Before the first exchange that moves anything: warm the communicator and try out what may be used.

    Two small all-reduces, for each tuned implementation an exchange there and back through the reference and through
    it, one host sync; nothing where the reference is in use. On failure on any rank all ranks go over to the reference.
    """
    if not state.proven:
        candidates = [candidate for candidate in state.candidates if candidate is not registry.REFERENCE]
        # A true collective first: in a communicator's first point-to-point batch every rank must take part.
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), group=group)
        trials = [_try_out(candidate.implementation, group, device) for candidate in candidates]
        passed = torch.cat([result for result, _ in trials])
        try:
            dist.all_reduce(passed, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            names = ", ".join(f"{one.name}{why}" for one, (_, why) in zip(candidates, trials, strict=True))
            raise RuntimeError(f"the self-test of {names} broke off: {error}") from error
        for candidate, (_, reason), good in zip(candidates, trials, passed.tolist(), strict=True):
            if good:
                continue
            warn_once(
                f"the stock exchange is used on a group of {dist.get_world_size(group)} ranks, backend {state.backend}"
                f": {candidate.name} failed its self-test on this rank or another{reason}"
            )
            if state.registration is candidate:
                state.registration = registry.REFERENCE
            if state.by_size is not None:
                state.by_size = state.by_size.without([candidate.name])
        state.proven = True
    if not state.used:
        state.used = True
        logger.info(
            "first exchange of a group: %d ranks, backend %s, exchange %s%s",
            dist.get_world_size(group),
            state.backend,
            f"{state.name} {state.by_size}" if state.name == config.AUTO else state.name,
            ", checked across ranks" if state.check else "",
        )


def _try_out(implementation: Callable[..., Any], group: Any, device: torch.device) -> tuple[Tensor, str]:
    """A small exchange of random bytes, there and back, uneven and with an empty rank, against the reference.

    Returns:
        1 or 0 on the device, `[1]` int32; and the error here, in words, if there was one.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    counts = tuple(0 if other == world_size // 2 else 3 + other % 4 for other in range(world_size))
    layout = HeadParallelLayout(counts, rank)
    generator = torch.Generator("cpu").manual_seed(rank)  # its own: the model's random numbers stay what they were
    heads = 2 * world_size
    shape = (counts[rank], heads, 5)
    data = torch.randint(256, shape, dtype=torch.uint8, generator=generator, device="cpu").to(device)
    reference = registry.REFERENCE.implementation

    there = blocks.dispatch((data,), layout, data.dtype)
    reference(there, group).wait()
    back = blocks.undispatch(there.result, layout, heads)
    reference(back, group).wait()
    passed, reason = torch.ones(1, dtype=torch.int32, device=device), ""
    tried = blocks.dispatch((data,), layout, data.dtype), blocks.undispatch(there.result, layout, heads)
    for trial, expected in zip(tried, (there, back), strict=True):
        trial.result.copy_(expected.result.bitwise_not())  # fresh memory may hold right bytes: now all are wrong
        try:  # each by itself: a rank that fails in one still comes to the other
            if implementation(trial, group).wait() is not trial.result:
                raise TypeError("wait() did not return the exchange's result")
            passed *= (trial.result == expected.result).all()
        except Exception as error:
            passed.zero_()
            reason = f"; here it raised {type(error).__name__}: {error}"
    return passed, reason


def compare(group: Any, name: str, note: Note) -> None:
    """The cross-rank check: meet over the store and compare what every rank is about to do.

    Raises:
        DisagreementError: the same on every rank, naming ranks, field and values, where the ranks differ;
            or, on those that did arrive, naming those that did not.
    """
    board = board_of(group)
    note = {"sequence": board.sequence, "direction": name, "error": None, **note}
    topic = _topic(board)
    notes = board.meet(topic, note, CHECK_PATIENCE)
    refused = [rank for rank, other in enumerate(notes) if other["error"] is not None]
    if refused:
        told = "; ".join(f"{board.name_ranks([rank])}: {notes[rank]['error']}" for rank in refused)
        raise DisagreementError(f"the ranks disagree at {topic}: refused by its own rank, {told}")
    fields = [field for field in note if len({str(other.get(field)) for other in notes}) > 1]
    if fields:
        told = "; ".join(_differences(board, field, notes) for field in fields)
        raise DisagreementError(f"the ranks disagree at {topic}: {told}")


def _topic(board: Board) -> str:
    """The next numbered meeting."""
    topic = f"exchange {board.sequence}"
    board.sequence += 1
    return topic


def _differences(board: Board, field: str, notes: list[Note]) -> str:
    """`field` with its values and who brings each, most ranks last: the odd ones come first."""
    by_value: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        by_value.setdefault(str(note.get(field)), []).append(rank)
    groups = sorted(by_value.items(), key=lambda item: (len(item[1]), item[1]))
    return f"{field}: " + ", ".join(f"{value} on {board.name_ranks(ranks)}" for value, ranks in groups)


def publish_refusal(group: Any, tensor: object, name: str, error: Exception) -> None:
    """Tell the other ranks, with the check on, that this one refuses its own input and will not come.

    Never raises: the refusal itself is what the caller must see.
    """
    try:
        known: Iterable[GroupState] = _states.get(group, {}).values()
        if not any(state.check for state in known) and not config.read().check:
            return
        _settle_first(group, getattr(tensor, "device", None))
        board = board_of(group)
        sequence = board.sequence
        told = f"{type(error).__name__}: {error}"
        board.leave(_topic(board), {"sequence": sequence, "direction": name, "error": told})
    except Exception as failure:
        logger.debug("a refusal could not be published: %s", failure)


def _settle_first(group: Any, device: object) -> None:
    """Come to settle as the others do first, also where the refused tensor is on no device of the group."""
    own = [device] if isinstance(device, torch.device) else []
    for candidate in (*own, *map(torch.device, registry.device_types(group)), torch.device("cpu")):
        with suppress(ValueError):
            state_of(group, candidate)
            return
