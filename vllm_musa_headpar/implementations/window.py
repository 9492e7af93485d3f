"""Memory that the ranks of one machine can all read: what `shared` needs of it, and POSIX shared memory that has it.

A window has two halves that take turns: an exchange writes into one, signals and reads the other ranks' same half; the
next uses the other. So one signal per exchange is enough: who signals for the next exchange has read all of this one,
and nobody writes into what is still being read.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = "/dev/shm"
MAX_NOTE = 4096  # numbers
_STEP = 1 << 20  # a half is a multiple of these bytes: layouts that differ by little need no new one


class Window(Protocol):
    """Memory of this rank that its peers can read, and theirs. All ranks make the same calls in the same order."""

    def allocate(self, size: int) -> Tensor | None:
        """Memory for this rank's next exchange, bytes `[at least size]`; None where there is none left."""
        ...

    def signal(self, note: Sequence[int]) -> list[list[int]] | None:
        """Tell the others that this rank has written, and wait until all have.

        Args:
            note: at most `MAX_NOTE` numbers for the others.

        Returns:
            The notes in rank order; None, on every rank, where one had no memory to write into.

        Raises:
            RuntimeError: the ranks are not at the same exchange, or one cannot be reached.
        """
        ...

    def view(self, rank: int, start: int, size: int) -> Tensor:
        """Bytes `[size]` of what a rank has written, to be read before the next call."""
        ...


class _Segment:
    """Shared memory without a name, so that nothing is left of it when its processes are gone, killed or not.

    Peers open it through its owner's open files, which `/proc` shows.

    Raises:
        OSError: there is not so much memory. A write into what has been made cannot fail later.
    """

    def __init__(self, size: int) -> None:
        # Asked first: to reserve more than there is takes the memory of everything else on the machine.
        room = _room()
        if size > room:
            raise OSError(errno.ENOSPC, f"{size} bytes of shared memory are needed, and {room} can be had in {FOLDER}")
        self.file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(self.file, 0, size)
            self.map = mmap.mmap(self.file, size)
        except OSError:
            os.close(self.file)
            raise

    def __del__(self) -> None:
        if hasattr(self, "map"):  # what peers have mapped, and tensors still show, stays until they let go
            os.close(self.file)


def _room() -> int:
    """Bytes of shared memory that can be had: what the file system allows, and not the machine's last memory."""
    status = os.statvfs(FOLDER)
    allowed = status.f_bavail * status.f_frsize
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        (available,) = (line for line in file if line.startswith("MemAvailable:"))
        allowed = min(allowed, int(available.split()[1]) * 1024 // 2)
    return allowed


def _map_of(pid: int, file: int) -> mmap.mmap:
    """Another process's segment."""
    opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    try:
        return mmap.mmap(opened, 0)
    finally:
        os.close(opened)


def _bytes_of(mapped: mmap.mmap) -> Tensor:
    with torch.inference_mode(False):  # memory made in inference mode may not be written outside of it later
        return torch.frombuffer(mapped, dtype=torch.uint8)


class _Record(NamedTuple):
    """What a rank says of one exchange, in numbers; its note follows."""

    sequence: int
    has_memory: int
    segment: int  # counted up with each new one
    file: int  # the segment's, in its owner's process
    length: int  # of the note


class PosixWindow:
    """A window in POSIX shared memory, between the processes of one machine. The signal is the group's barrier.

    Besides its segment, whose halves grow as exchanges do, each rank has a small one that stays, for its records.

    Raises:
        RuntimeError: on every rank, where one cannot open another's memory.
    """

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)  # which this must not outlive, nor keep alive
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sequence = 0
        self._segment: _Segment | None = None
        self._before: _Segment | None = None  # peers may be about to open it
        self._segments = 0
        self._own: Tensor | None = None  # [both halves] bytes
        self._has_memory = False
        self._now: list[_Record] = []
        self._views: list[tuple[int, Tensor] | None] = [None] * ranks  # by rank: number of the segment, both halves
        self._pids, self._records = self._meet(group, ranks)

    def _meet(self, group: Any, ranks: int) -> tuple[list[int], list[memoryview]]:
        """Open each other's records. Two numbers drawn at random tell that the process is the one that is meant."""
        mark = [secrets.randbits(62), secrets.randbits(62)]
        problem = ""
        try:
            self._board = _Segment(2 * 8 * (len(_Record._fields) + MAX_NOTE))
            own = memoryview(self._board.map).cast("q")
            own[0], own[1] = mark
            here = torch.tensor([os.getpid(), self._board.file, *mark])
        except OSError as error:
            problem = f"rank {self._rank} has no shared memory: {error}"
            here = torch.zeros(4, dtype=torch.int64)
        everyone = [torch.empty_like(here) for _ in range(ranks)]
        dist.all_gather(everyone, here, group=group)
        pids, records = [], []
        for rank, (pid, file, *expected) in enumerate(there.tolist() for there in everyone):
            pids.append(pid)
            try:
                records.append(memoryview(_map_of(pid, file)).cast("q"))
                if records[-1][:2].tolist() != expected:
                    raise OSError(f"process {pid} here is another one")
            except (OSError, ValueError) as error:
                problem = problem or f"rank {self._rank} cannot open the memory of rank {rank}: {error}"
        opened = torch.tensor([int(not problem)])
        dist.all_reduce(opened, op=dist.ReduceOp.MIN, group=group)
        if not int(opened):
            raise RuntimeError(problem or "a rank cannot open the memory of another: they are not all on one machine")
        return pids, records

    def allocate(self, size: int) -> Tensor | None:
        self._sequence += 1
        self._has_memory = True
        if self._own is None or 2 * size > self._own.numel():
            try:
                larger = _Segment(2 * -(-max(size, 1) // _STEP) * _STEP)
            except OSError:
                self._has_memory = False
                return None
            self._before, self._segment = self._segment, larger
            self._own = _bytes_of(larger.map)
            self._segments += 1
        return self._half_of(self._own)

    def signal(self, note: Sequence[int]) -> list[list[int]] | None:
        file = self._segment.file if self._segment is not None else 0
        record = _Record(self._sequence, int(self._has_memory), self._segments, file, len(note))
        fields = len(record)
        start = self._sequence % 2 * (fields + MAX_NOTE)
        for place, number in enumerate((*record, *note), start):
            self._records[self._rank][place] = number
        dist.barrier(group=self._group())
        self._now = [_Record(*records[start : start + fields].tolist()) for records in self._records]
        for rank, told in enumerate(self._now):
            if told.sequence != self._sequence:
                raise RuntimeError(
                    f"rank {rank} is at exchange {told.sequence} in shared memory and rank {self._rank} at exchange "
                    f"{self._sequence}: an earlier one failed on one of them"
                )
        if not all(told.has_memory for told in self._now):
            return None
        notes = zip(self._records, self._now, strict=True)
        return [records[start + fields : start + fields + told.length].tolist() for records, told in notes]

    def view(self, rank: int, start: int, size: int) -> Tensor:
        told, known = self._now[rank], self._views[rank]
        if known is None or known[0] != told.segment:
            self._views[rank] = known = (told.segment, _bytes_of(_map_of(self._pids[rank], told.file)))
        return self._half_of(known[1])[start : start + size]

    def _half_of(self, both: Tensor) -> Tensor:
        half = both.numel() // 2
        return both[half:] if self._sequence % 2 else both[:half]
