"""Telling the other ranks, with the check on, that this one refuses and will not come."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from .. import config, registry
from ..errors import DisagreementError
from ..log import logger
from . import check
from .board import BoardError, NoStoreError, board_of
from .first_use import GroupState, known_states, state_of

# What comes of the meeting itself: the others are in it, or there is none. Nothing is left to be told.
_OF_THE_MEETING = (DisagreementError, BoardError, NoStoreError)


class telling:
    """Context: whatever is raised in it before a launch is told to the other ranks, with the check on.

    Otherwise they would wait for this one at their next comparison. An error is told once, however many of
    these it passes; what the comparison itself raises is not told.

    Args:
        group: the group whose ranks are told.
        where: the tensor that was brought, or its device; anything at all where that is what is refused.
        name: the exchange that will not be.
    """

    __slots__ = ("_group", "_name", "_where")

    def __init__(self, group: Any, where: object, name: str) -> None:
        self._group = group
        self._where = where
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            _tell(self._group, self._where, self._name, error)


def _tell(group: Any, where: object, name: str, error: Exception) -> None:
    """Never raises: the refusal itself is what the caller must see."""
    try:
        if isinstance(error, _OF_THE_MEETING) or hasattr(error, "_headpar_told"):
            return
        if not any(state.check for state in known_states(group).values()) and not config.read().check:
            return
        error._headpar_told = True  # type: ignore[attr-defined]
        if not _settle_first(group, where).check:
            return
        check.refuse(board_of(group), name, f"{type(error).__name__}: {error}")
    except Exception as failure:
        logger.debug("a refusal could not be published: %s", failure)


def _settle_first(group: Any, where: object) -> GroupState:
    """Come to settle as the others do first, also where the refused tensor is on no device of the group."""
    device = where if isinstance(where, torch.device) else getattr(where, "device", None)
    types = registry.device_types(group) or ("cpu",)
    if isinstance(device, torch.device) and device.type in types:
        return state_of(group, device)
    settled = [state for state in known_states(group).values() if state.check]
    return settled[0] if settled else state_of(group, torch.device(types[0]))
