"""The cross-rank check: what every rank is about to do is compared before each exchange, over the store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..errors import DisagreementError
from .board import Board, Note, board_of, quoted

# The check is for finding a rank that is missing: it does not wait as long as a process group may.
PATIENCE = timedelta(minutes=5)


def compare(group: Any, name: str, note: Note) -> None:
    """Meet over the store and compare what every rank is about to do.

    Raises:
        DisagreementError: the same on every rank, naming ranks, field and values, where the ranks differ;
            or, on those that did arrive, naming those that did not.
    """
    board = board_of(group)
    note = {"sequence": board.sequence, "direction": name, "error": None, **note}
    topic = _next_topic(board)
    notes = board.meet(topic, note, PATIENCE)
    refused = [rank for rank, other in enumerate(notes) if other.get("error") is not None]
    if refused:
        told = "; ".join(f"{board.name_ranks([rank])}: {quoted(str(notes[rank]['error']))}" for rank in refused)
        raise DisagreementError(f"the ranks disagree at {topic}: refused by its own rank, {told}")
    fields = [field for field in note if len({str(other.get(field)) for other in notes}) > 1]
    if fields:
        told = "; ".join(board.differences(field, notes) for field in fields)
        raise DisagreementError(f"the ranks disagree at {topic}: {told}")


def refuse(board: Board, name: str, told: str) -> None:
    """Leave at the next comparison, without waiting for it, that this rank refuses; `told` is why."""
    sequence = board.sequence
    board.leave(_next_topic(board), {"sequence": sequence, "direction": name, "error": told})


def _next_topic(board: Board) -> str:
    """The next numbered meeting."""
    topic = f"exchange {board.sequence}"
    board.sequence += 1
    return topic
