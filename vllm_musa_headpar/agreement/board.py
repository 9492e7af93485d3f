"""Where the ranks of a group leave notes for each other: the default group's key-value store.

It needs no group of its own, no device and no collective, so a rank that does not come can be named.

*Lives.* A store may outlive its process groups, and keep whatever notes an earlier life left under the same names:
refused, given up, half read. None of them is taken for one of this life:

- `settle` is a handshake. Each rank writes a fresh random id and the ids that it has seen of the others, again and
  again as they change, and is done when all ranks have seen the same ids. An old note cannot have seen an id that was
  drawn just now, so who has seen mine is of my life, and whose notes I act on has seen mine. Ranks may come in any
  order, and an earlier life may have ended anywhere: an old id is overwritten when its rank comes, and nobody is done
  before. A rank that gave up may come again, with another id.
- `meet` and `leave` write under a name made of all those ids. Nobody wrote under it before.
- `announce` waits for nobody, so nothing can have been seen. Its note carries what the making of the group itself
  left of this rank in the store (Gloo's address, which differs from life to life and is there before any rank has the
  group); another is ignored. On a backend that leaves nothing the note counts as it is, which is safe: it only ever
  means that the reference is used, and those that use anything else have come through the handshake together.

*All or none.* One rank may find everybody there in the moment in which another gives up. So whoever is done and
whoever gives up writes that down where only the first to write is heard (`_decide`), and follows what stands there.

*Threads.* Nothing waits inside the store: one connection serves a process, and whoever waited in it would keep the
other threads' notes out. So waiting is asking again after a pause, on a connection of the boards' own where the store
has connections. Each thread may be at another group's board. A note that somebody waits for is never taken away,
else it could be gone between the look whether it is there and the reading, which then waits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ..errors import DisagreementError, ExchangeError

Note = dict[str, Any]
_DONE = "done"  # what came of a meeting, where it was not given up; else the rank that gave up first
_FORMAT = 2  # part of every key: notes written otherwise are not seen at all
_OURS = "headpar"  # what a note stands under, so that it is told from what others may have written

_LONGEST = 300  # characters of a value in a message
_BEGINNING = 80  # bytes of what is no note

_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class NoStoreError(RuntimeError):
    """There is no store to leave notes in."""


class BoardError(ExchangeError):
    """The ranks could not read each other's notes."""


class Settled(NamedTuple):
    """What came of `settle`.

    Attributes:
        notes: by rank; of all ranks, unless some do not wait.
        away: the ranks that have announced their note and do not wait.
    """

    notes: dict[int, Note]
    away: list[int]


class Board:
    """Notes of one group. Every rank must call `settle`, `meet` and `leave` in the same order.

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
        try:
            self._left_by_group: Any = group.get_group_store()
        except Exception:
            self._left_by_group = None
        self._default = store
        self._prefix = f"headpar/{_FORMAT}/{name}"
        self._life: str | None = None
        self._patience: timedelta = self._default.timeout  # the process groups' own timeout
        self._given_up: Counter[str] = Counter()
        self.sequence = 0

    def announce(self, topic: str, note: Note) -> None:
        """Publish this rank's note for those that settle, without waiting for them.

        Raises:
            BoardError: the store cannot be reached.
        """
        try:
            self._announce(self._default, topic, note)
        except RuntimeError as error:
            raise self._broken(topic, error) from error

    def settle(self, topic: str, note: Note, at_most: timedelta = timedelta.max) -> Settled:
        """Publish this rank's note and wait for everyone's, until all ranks have seen each other.

        Where a rank does not wait nobody does: then this one's note is announced as well, and all that is known
        returned. Otherwise the board is of this life from here on.

        Args:
            at_most: how long to wait; never longer than the store's timeout, which is the process groups'.

        Raises:
            DisagreementError: a rank did not come in time; the message names it.
            BoardError: the store cannot be reached, or what is in it is no note.
        """
        patience = min(self._patience, at_most)
        try:
            return self._settle(_connection(self._default), topic, note, patience)
        except ExchangeError:
            raise
        except RuntimeError as error:
            raise self._broken(topic, error) from error

    def _settle(self, store: Any, topic: str, note: Note, patience: timedelta) -> Settled:
        own = secrets.token_hex(8)
        seen: list[str | None] = [None] * len(self._ranks)
        seen[self._rank] = own
        said: list[str | None] = []
        here = {self._rank}
        pause = _Pause(patience)
        while True:
            mine: Note = {"id": own, "seen": list(seen), "left": None, "note": note}
            if said != seen:
                said = list(seen)
                store.set(self._key(topic, self._rank), _write(mine))
            found: dict[int, Note] = {self._rank: mine}
            for rank in range(len(self._ranks)):
                other = self._look(store, topic, rank) if rank != self._rank else None
                if other is not None:
                    found[rank] = other
            notes = {rank: found[rank]["note"] for rank in sorted(found)}
            away = [rank for rank, other in found.items() if other["id"] is None and self._is_fresh(rank, other)]
            if away:
                self._announce(store, topic, note)
                return Settled(notes, sorted(away))
            for rank, other in found.items():
                seen[rank] = other["id"]
                if other["seen"] is not None and other["seen"][self._rank] == own:
                    here.add(rank)
            done = None not in seen and all(other["seen"] == seen for other in found.values())
            if not done and (said != seen or pause.wait()):
                continue
            if None not in seen:  # before this rank has said that it has seen everyone nobody is done
                life = hashlib.sha256("/".join(map(str, seen)).encode()).hexdigest()[:16]
                first = self._decide(store, self._outcome(life, topic), done)
                if first is None:
                    self._life = self._life or life
                    return Settled(notes, [])
                if done:
                    raise self._had_given_up(first, topic)
            others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
            raise self._did_not_arrive([rank for rank in others if rank not in here] or others, topic, patience)

    def meet(self, topic: str, note: Note, at_most: timedelta = timedelta.max) -> list[Note]:
        """Publish this rank's note, wait for everyone's and return them in rank order. After `settle` only.

        Args:
            at_most: as for `settle`.

        Raises:
            DisagreementError: a rank did not publish in time; the message names it.
            BoardError: the store cannot be reached, or what is in it is no note.
        """
        # Who comes late to a meeting that others have given up must not be taken for one of their next.
        attempt = f"{topic}/{self._given_up[topic]}"
        keys, patience = self._keys(attempt), min(self._patience, at_most)
        try:
            store = _connection(self._default)
            store.set(keys[self._rank], _write(note))
            absent = self._wait(store, keys, patience)
            first = self._decide(store, self._outcome(self._life, attempt), not absent)
            if first is None:
                notes = [self._parse(store.get(key), rank, key) for rank, key in enumerate(keys)]
                self._read(store, attempt, keys)
                return notes
        except BoardError:
            raise
        except RuntimeError as error:
            raise self._broken(topic, error) from error
        self._given_up[topic] += 1
        raise self._did_not_arrive(absent, topic, patience) if absent else self._had_given_up(first, topic)

    def leave(self, topic: str, note: Note) -> None:
        """Publish this rank's note where the others meet, without waiting for theirs. After `settle` only."""
        attempt = f"{topic}/{self._given_up[topic]}"
        keys, store = self._keys(attempt), _connection(self._default)
        store.set(keys[self._rank], _write(note))
        self._read(store, attempt, keys)

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
        return f"{field}: " + ", ".join(f"{quoted(value)} on {self.name_ranks(ranks)}" for value, ranks in groups)

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"

    def _keys(self, topic: str) -> list[str]:
        if self._life is None:
            raise BoardError(f"the ranks cannot meet for {topic}: they have not settled on the life of their group")
        return [f"{self._prefix}/{self._life}/{topic}/{rank}" for rank in range(len(self._ranks))]

    def _outcome(self, life: str | None, topic: str) -> str:
        return f"{self._prefix}/{life}/{topic}/outcome"

    def _decide(self, store: Any, key: str, done: bool) -> int | None:
        """Say that this rank is done, or gives up, unless another was first: None if done, or who gave up first."""
        ours = _DONE if done else str(self._rank)
        first = store.compare_set(key, "", ours).decode(errors="replace")
        if first == _DONE:
            return None
        if first not in map(str, range(len(self._ranks))):
            raise BoardError(f"what stands under {key!r} in the default group's store is no rank: {quoted(first)}")
        return int(first)

    def _announce(self, store: Any, topic: str, note: Note) -> None:
        told = {"id": None, "seen": None, "left": self._left_by(self._rank), "note": note}
        store.set(self._key(topic, self._rank), _write(told))

    def _is_fresh(self, rank: int, told: Note) -> bool:
        """Whether an announcement is of this life, as far as that can be told."""
        return told["left"] is None or told["left"] == self._left_by(rank)

    def _left_by(self, rank: int) -> str | None:
        """What the making of the group left of a rank in the store, in short; None if nothing is found.

        Gloo's rendezvous writes each rank's address under this key, and no rank gets the group before all have.
        """
        key = f"cpu//0/{rank}"
        try:
            if self._left_by_group is None or not self._left_by_group.check([key]):
                return None
            return hashlib.sha256(self._left_by_group.get(key)).hexdigest()[:16]
        except RuntimeError:
            return None

    def _look(self, store: Any, topic: str, rank: int) -> Note | None:
        """What a rank has written for `settle`, if anything."""
        key = self._key(topic, rank)
        if not store.check([key]):
            return None
        raw = store.get(key)
        told = self._parse(raw, rank, key)
        seen = told.get("seen")
        if not (
            isinstance(told.get("id", 0), str | None)
            and isinstance(told.get("left"), str | None)
            and isinstance(told.get("note"), dict)
            and (seen is None or (isinstance(seen, list) and len(seen) == len(self._ranks)))
        ):
            raise self._not_a_note(raw, rank, key)
        return told

    def _parse(self, raw: bytes, rank: int, key: str) -> Note:
        try:
            note = json.loads(raw)[_OURS]
        except (ValueError, LookupError, TypeError, RecursionError):
            note = None
        if not isinstance(note, dict):
            raise self._not_a_note(raw, rank, key)
        return note

    def _not_a_note(self, raw: bytes, rank: int, key: str) -> BoardError:
        return BoardError(
            f"what {self.name_ranks([rank])} has under {key!r} in the default group's store is no note of this "
            f"package: {len(raw)} bytes, {raw[:_BEGINNING]!r}"
        )

    def _broken(self, topic: str, error: Exception) -> BoardError:
        return BoardError(f"the ranks cannot meet for {topic}: the default group's store failed: {error}")

    def _did_not_arrive(self, absent: Sequence[int], topic: str, patience: timedelta) -> DisagreementError:
        return DisagreementError(
            f"{self.name_ranks(absent)} did not arrive at {topic} within {patience.total_seconds():g} s: dead, "
            "stuck, in another call, or set up differently (the environment must be the same on all ranks)"
        )

    def _had_given_up(self, first: int, topic: str) -> DisagreementError:
        return DisagreementError(
            f"{self.name_ranks([self._rank])} came to {topic} when {self.name_ranks([first])} had given up waiting"
        )

    def _wait(self, store: Any, keys: Sequence[str], patience: timedelta) -> list[int]:
        """Wait for the keys; the ranks whose key has not come in time."""
        missing, pause = dict(enumerate(keys)), _Pause(patience)
        while True:
            missing = {rank: key for rank, key in missing.items() if not store.check([key])}
            if not missing or not pause.wait():
                return list(missing)

    def _read(self, store: Any, topic: str, keys: Sequence[str]) -> None:
        """Whoever is the last to have read clears the notes away."""
        counter = f"{self._prefix}/{self._life}/{topic}/read"
        if store.add(counter, 1) == len(keys):
            for key in (*keys, counter, self._outcome(self._life, topic)):
                store.delete_key(key)


class _Pause:
    """Ever longer pauses between two looks at the store: at first next to none, for ranks that come together."""

    def __init__(self, patience: timedelta) -> None:
        self._end = time.monotonic() + patience.total_seconds()
        self._seconds = 0.0001

    def wait(self) -> bool:
        """Sleep; False, without sleeping, when the patience is at its end."""
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._seconds, left))
        self._seconds = min(self._seconds * 1.5, 0.02)
        return True


def board_of(group: Any) -> Board:
    """The board of a group, the same one as long as the group lives.

    Raises:
        NoStoreError: the default process group has no store, or does not know the group.
    """
    try:
        with _lock:
            board = _boards.get(group)
            if board is None:
                board = _boards[group] = Board(group)
    except TypeError as error:
        raise NoStoreError(f"the ranks of {group!r} have no store to meet in: {error}") from error
    return board


def _write(note: Note) -> str:
    return json.dumps({_OURS: note})


def quoted(value: str) -> str:
    """A value from another rank for a message: as it is if it is short and plain, else quoted, and cut."""
    plain = value.isprintable()
    return _cut(value if plain else repr(value[: 2 * _LONGEST]))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _connection(store: Any) -> Any:
    """A connection of the boards' own: in the store's, torch itself or another thread may be waiting.

    Only a TCPStore has connections. One that cannot be cloned is shared, and so is any other store.
    """
    with _lock:
        own = _connections.get(store)
        if own is None:
            own = _connections[store] = _clone(store)
    return own


def _clone(store: Any) -> Any:
    kinds: Any = dist
    innermost = store
    while isinstance(innermost, kinds.PrefixStore):
        innermost = innermost.underlying_store
    if isinstance(innermost, kinds.TCPStore):
        try:
            return store.clone()
        except (AttributeError, RuntimeError):
            pass
    return store


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
