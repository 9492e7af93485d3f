"""What the ranks of a group agree on, a file per job.

    board       where ranks leave notes for each other: the store, no collective
    first_use   which implementation a group uses, settled when it is first used
    self_test   that implementation tried out, before it moves anything
    check       every exchange compared across the ranks, where that is asked for
    trial       a host's function of unknown body compared with its replacement
    telling     the others told that this rank refuses and will not come

An exchange comes in by one door, `admit`; what is done before it stands in `telling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import check, first_use, self_test
from .board import Note
from .first_use import GroupState, state_of
from .telling import telling

__all__ = ["GroupState", "admit", "state_of", "telling"]


def admit(group: Any, device: torch.device, name: str, describe: Callable[[], Note], anything: bool) -> GroupState:
    """Let an exchange of a group in: settle at its first use, compare with the other ranks, try out.

    Args:
        name: what is to be exchanged, "dispatch" say; the same on all ranks.
        describe: called with the check on only; what all ranks must bring alike, by field.
        anything: whether anything is to be moved. All ranks must say the same.

    Returns:
        What holds for the group on this device; nothing has to be agreed on any more.

    Raises:
        ValueError: the group has no backend for the device; or strict mode and an unknown implementation.
        DisagreementError: the ranks bring different exchanges, or one does not come.
        ExchangeError: the store cannot be reached, or the self-test broke off.
        NoStoreError: the check is asked for and there is no store to do it over.
    """
    try:
        state = first_use.states[group][device.type]
    except (KeyError, TypeError):
        with telling(group, device, name):
            state = state_of(group, device)
    if state.check:
        with telling(group, device, name):
            check.compare(group, name, {**describe(), "implementation": state.name})
    if anything and not state.used:
        self_test.prove(state, group, device)
    return state
