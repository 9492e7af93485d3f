"""Where the ranks of a group leave notes for each other: the default group's key-value store.

It needs no group of its own, no device and no collective, so a rank that does not come can be named.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import DisagreementError, ExchangeError

Note = dict[str, Any]
_GAVE_UP = "gave_up"

_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()
# Groups made anew under an old name must not read old notes: per store, how often a name was used.
_generations: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class NoStoreError(RuntimeError):
    """There is no store to leave notes in."""


class BoardError(ExchangeError):
    """The ranks could not read each other's notes."""


class Board:
    """Notes of one group. Every rank must call `meet` and `leave` in the same order.

    Attributes:
        sequence: how many numbered meetings this group has had.
    """

    def __init__(self, group: Any) -> None:
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            self._ranks = dist.get_process_group_ranks(group)
            self._rank = dist.get_rank(group)
            name = str(group.group_name)
        except Exception as error:
            raise NoStoreError(f"the ranks of {group!r} have no store to meet in: {error}") from error
        used = _generations.setdefault(store, Counter())
        self._prefix = f"headpar/{name}/{used[name]}"
        used[name] += 1
        self._store = store
        self._patience = store.timeout  # the process groups' own timeout, a timedelta
        self._given_up: Counter[str] = Counter()
        self.sequence = 0

    def meet(self, topic: str, note: Note, at_most: timedelta = timedelta.max) -> list[Note]:
        """Publish this rank's note, wait for everyone's and return them in rank order.

        Args:
            at_most: how long to wait; never longer than the store's timeout, which is the process groups'.

        Raises:
            DisagreementError: a rank did not publish in time; the message names it.
            BoardError: the store cannot be reached.
        """
        # Who comes late to a meeting that others have given up must not be taken for one of their next.
        attempt = self._given_up[topic]
        keys, patience = self._keys(f"{topic}/{attempt}"), min(self._patience, at_most)
        try:
            self._store.set(keys[self._rank], json.dumps(note))
            absent = self._wait(keys, patience)
            if absent:  # the note stays, marked, so that no other rank takes this one for absent
                self._store.set(keys[self._rank], json.dumps({**note, _GAVE_UP: True}))
                notes, gave_up = [], []
            else:
                notes = [json.loads(self._store.get(key)) for key in keys]
                gave_up = [rank for rank, other in enumerate(notes) if other.get(_GAVE_UP)]
                if not gave_up:
                    self._read(f"{topic}/{attempt}", keys)
        except RuntimeError as error:
            raise BoardError(f"the ranks cannot meet for {topic}: the default group's store failed: {error}") from error
        if absent or gave_up:
            self._given_up[topic] += 1
        if absent:
            raise DisagreementError(
                f"{self.name_ranks(absent)} did not arrive at {topic} within {patience.total_seconds():g} s: dead, "
                "stuck, in another call, or set up differently (the environment must be the same on all ranks)"
            )
        if gave_up:
            raise DisagreementError(
                f"{self.name_ranks([self._rank])} came to {topic} when {self.name_ranks(gave_up)} had given up waiting"
            )
        return notes

    def leave(self, topic: str, note: Note) -> None:
        """Publish this rank's note without waiting for the others'."""
        keys = self._keys(f"{topic}/{self._given_up[topic]}")
        self._store.set(keys[self._rank], json.dumps(note))
        self._read(f"{topic}/{self._given_up[topic]}", keys)

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """The ranks in words, in the group and global."""
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"{noun} {_join(ranks)} (global {_join([self._ranks[rank] for rank in ranks])})"

    def differences(self, field: str, notes: Sequence[Note]) -> str:
        """`field` with its values and who brings each, most ranks last: the odd ones come first."""
        by_value: dict[str, list[int]] = {}
        for rank, note in enumerate(notes):
            by_value.setdefault(str(note.get(field)), []).append(rank)
        groups = sorted(by_value.items(), key=lambda item: (len(item[1]), item[1]))
        return f"{field}: " + ", ".join(f"{value} on {self.name_ranks(ranks)}" for value, ranks in groups)

    def _keys(self, topic: str) -> list[str]:
        return [f"{self._prefix}/{topic}/{rank}" for rank in range(len(self._ranks))]

    def _wait(self, keys: list[str], patience: timedelta) -> list[int]:
        """Wait for the keys; the ranks whose key has not come in time."""
        try:
            self._store.wait(keys, patience)
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return []

    def _read(self, topic: str, keys: list[str]) -> None:
        """Whoever is the last to have read clears the notes away."""
        counter = f"{self._prefix}/{topic}/read"
        if self._store.add(counter, 1) == len(keys):
            for key in (*keys, counter):
                self._store.delete_key(key)


def board_of(group: Any) -> Board:
    """The board of a group, the same one as long as the group lives.

    Raises:
        NoStoreError: the default process group has no store, or does not know the group.
    """
    try:
        board = _boards.get(group)
        if board is None:
            board = _boards[group] = Board(group)
    except TypeError as error:
        raise NoStoreError(f"the ranks of {group!r} have no store to meet in: {error}") from error
    return board


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
