"""`shared`: through memory that the ranks of one machine can all read, for CPU groups.

Each rank packs its messages into its window, signals, and copies its boxes out of its peers' windows: two copies and
no transfer. What the copies cost is what an exchange between processes of one machine costs at least.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import Exchange
from ..log import warn_once
from . import reference
from .window import FOLDER, MAX_NOTE, PosixWindow, Window

NAME = "shared"
_ALIGNED = 64  # bytes: every element type can start there, and no two exchanges share a cache line

_windows: weakref.WeakKeyDictionary[Any, Window] = weakref.WeakKeyDictionary()


class Done:
    """An exchange that is over; a peer's window is not to be read any later."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


def shared(exchange: Exchange, group: Any) -> Done:
    """Write, one signal, read. Peers without a message take part in the signal all the same."""
    return together((exchange,), group)


def together(exchanges: Sequence[Exchange], group: Any) -> Done:
    """Several exchanges with one signal. Where a rank's machine has no shared memory left, through the reference."""
    first = exchanges[0]
    if 2 * len(exchanges) * first.world_size > MAX_NOTE:
        for exchange in exchanges:
            shared(exchange, group)
        return Done(first.result)
    window = _windows.get(group)
    if window is None:
        window = _windows[group] = PosixWindow(group)
    notes = window.signal(_write(exchanges, window))
    if notes is None:
        warn_once(f"an exchange went through {reference.NAME}: {FOLDER} has no room for it on a rank of its group")
        for exchange in exchanges:
            reference.all_to_all(exchange, group).wait()
        return Done(first.result)
    for number, exchange in enumerate(exchanges):
        exchange.copy_own()
        _read(exchange, window, notes, number)
    return Done(first.result)


def _write(exchanges: Sequence[Exchange], window: Window) -> list[int]:
    """Pack all messages for others into the window.

    Returns:
        For each exchange and rank, where that rank's message starts and how long it is, in bytes.
    """
    wires, note, start = [], [], 0
    for exchange in exchanges:
        grid, width = exchange.send.grid, exchange.send.dtype.itemsize
        first = start
        for peer, numel in enumerate(grid.numel):
            size = 0 if peer == exchange.rank else numel * width
            note += [start, size]
            start += size
        wires.append((first, start))
        start = -(-start // _ALIGNED) * _ALIGNED
    memory = window.allocate(start)
    if memory is not None:
        for exchange, (first, end) in zip(exchanges, wires, strict=True):
            exchange.send.pack(memory[first:end].view(exchange.send.dtype), exchange.send.grid.other_runs)
    return note


def _read(exchange: Exchange, window: Window, notes: list[list[int]], number: int) -> None:
    """Copy this rank's boxes out of its peers' windows, from the next one on, so that not all read the same at once."""
    recv, rank, ranks = exchange.recv, exchange.rank, exchange.world_size
    place = 2 * (number * ranks + rank)
    for distance in range(1, ranks):
        peer = (rank + distance) % ranks
        expected = recv.grid.numel[peer] * recv.dtype.itemsize
        start, size = notes[peer][place : place + 2]
        if size != expected:
            raise RuntimeError(f"rank {peer} sends {size} bytes, and rank {rank} expects {expected}: they disagree")
        if size:
            recv.unpack(window.view(peer, start, size).view(recv.dtype), recv.grid.peer_runs[peer])


def unusable(group: Any, device: torch.device, backend: str) -> str | None:
    """Why this must not be used on a group. Whether the ranks are on one machine shows when they first meet."""
    if device.type != "cpu":
        return f"{NAME} is for CPU tensors, not for {device.type}"
    if not sys.platform.startswith("linux"):
        return f"{NAME} needs Linux, this is {sys.platform}"
    if not os.access(FOLDER, os.W_OK):
        return f"{NAME} needs POSIX shared memory, and {FOLDER} cannot be written"
    return None
