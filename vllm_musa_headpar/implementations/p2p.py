"""`p2p`: grouped point-to-point, shaped for MCCL.

MCCL has no native all-to-all: `all_to_all_single` becomes one group of sends and receives with every rank,
including the rank itself. Posting that group ourselves saves what the collective cannot: the own block is one
copy from box to box, made while the transfer is under way, and is never staged; contiguous sides are sent and
received in place; strided ones are staged without it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..blocks import Exchange, Side

NAME = "p2p"

# Gloo does not coalesce: every message is posted and waited for by itself, which below this size costs more than
# the saved copies (measured, docs/performance.md). On MCCL a batch is one launch of any size.
MIN_MESSAGE_BYTES = {"gloo": 256 * 1024}

# Transfers whose handle was dropped before `wait()`, per group: an abandoned receive would swallow the
# next message of its peer, so its buffers live on and the next exchange of the group ends it first.
_abandoned: weakref.WeakKeyDictionary[Any, list[Transfer]] = weakref.WeakKeyDictionary()


# Staging to be used again, per group. On CPU only: there a large allocation is new pages each time, which cost
# about as much as the copy into them; a device's allocator keeps its memory, and knows about streams.
_spare: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
_SPARES = 2


class Transfer:
    """The works of one batch with every tensor they touch. The first works are the receives' where the
    backend returns one work per message; a coalesced batch has one work for all.

    Args:
        staging: bytes `[at least the wire's]`, owned here until released.
        touched: what else is read or written.
    """

    def __init__(self, group: Any, works: list[Any], staging: list[Tensor], touched: tuple[Tensor, ...]) -> None:
        self.works = works
        self._group = weakref.ref(group)
        self._staging = staging
        self._touched = touched

    def wait(self) -> None:
        while self.works:
            self.works.pop(0).wait()
        self._touched = ()

    def release(self) -> None:
        """Nothing reads or writes the staging any more."""
        staging, self._staging = self._staging, []
        group = self._group()
        for buffer in staging:
            if group is not None and buffer.device.type == "cpu" and buffer.numel():
                spare = _spare.setdefault(group, [])
                spare.append(buffer)
                del spare[:-_SPARES]


def _borrow(size: int, device: torch.device, group: Any) -> Tensor:
    """Uninitialised staging of at least `size` bytes, not more than twice that."""
    spare = _spare.get(group, [])
    for index, buffer in enumerate(spare):
        if size <= buffer.numel() <= 2 * size:
            return spare.pop(index)
    return torch.empty(size, dtype=torch.uint8, device=device)


class Posted:
    """A posted batch; owns the staging until done."""

    def __init__(
        self,
        exchange: Exchange,
        group: Any,
        transfer: Transfer,
        incoming: Tensor | None,
        sources: list[int] | None,
    ) -> None:
        self._exchange = exchange
        self._group = group
        self._transfer = transfer
        self._incoming = incoming  # [elements of the other ranks' messages] staging, None where received in place
        self._failed = False
        self._sources = sources  # the peers whose messages the first works are, None where one work is all

    def wait(self) -> Tensor:
        if self._failed:
            raise RuntimeError("this exchange has failed before; its result is undefined")
        incoming, self._incoming = self._incoming, None
        try:
            if incoming is not None:
                self._unpack(incoming)
            self._transfer.wait()
            self._transfer.release()
        except BaseException:
            self._failed = True
            raise
        return self._exchange.result

    def _unpack(self, incoming: Tensor) -> None:
        recv, works = self._exchange.recv, self._transfer.works
        if self._sources is None:
            self._transfer.wait()
            recv.unpack(incoming, recv.grid.other_runs)
            return
        for peer in self._sources:
            works.pop(0).wait()
            recv.unpack(_message(recv, incoming, peer), recv.grid.peer_runs[peer])

    def __del__(self) -> None:
        if self._transfer.works:
            _abandoned.setdefault(self._group, []).append(self._transfer)


def p2p(exchange: Exchange, group: Any) -> Posted:
    """One `batch_isend_irecv` per exchange. Empty messages are left out on both ends by the same rule.

    Everything travels as bytes: MCCL refuses some element types, and none of their bits matter here.
    """
    _end_abandoned(group)
    send, recv = exchange.send, exchange.recv
    staging: list[Tensor] = []

    def wire_of(side: Side) -> Tensor | None:
        """Staging for the other ranks' messages; None where the side's own memory is the wire."""
        if side.flat is not None:
            return None
        size = (side.grid.total - side.grid.numel[exchange.rank]) * side.dtype.itemsize
        staging.append(_borrow(size, exchange.result.device, group))
        return staging[-1][:size].view(side.dtype)

    outgoing = wire_of(send)
    if outgoing is not None:
        send.pack(outgoing, send.grid.other_runs)
    incoming = wire_of(recv)
    receives = [
        (peer, dist.P2POp(dist.irecv, _bytes(_message(recv, incoming, peer)), group=group, group_peer=peer))
        for peer in _peers(exchange, recv, step=-1)
    ]
    sends = [
        dist.P2POp(dist.isend, _bytes(_message(send, outgoing, peer)), group=group, group_peer=peer)
        for peer in _peers(exchange, send, step=1)
    ]
    operations = [operation for _, operation in receives] + sends
    works = list(dist.batch_isend_irecv(operations)) if operations else []
    transfer = Transfer(group, works, staging, (exchange.result, *send.parts))
    per_message = len(works) == len(operations)
    posted = Posted(exchange, group, transfer, incoming, [peer for peer, _ in receives] if per_message else None)
    exchange.copy_own()
    return posted


def _end_abandoned(group: Any) -> None:
    abandoned = _abandoned.get(group, [])
    while abandoned:
        try:
            abandoned[0].wait()
        except RuntimeError as error:
            raise RuntimeError(f"an earlier exchange, whose handle was dropped, failed: {error}") from error
        abandoned.pop(0)
    _abandoned.pop(group, None)


def unusable(group: Any, device: torch.device, backend: str) -> str | None:
    """Why this must not be used on a group: on MCCL only a coalesced batch is one launch without deadlock."""
    if backend == "gloo":  # its sends and receives are independent of each other
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":  # asked once per group
            return "TORCH_DISTRIBUTED_DEBUG=DETAIL counts point-to-point among Gloo's collectives, and the ranks differ"
        return None
    try:
        coalesces = bool(group._get_backend(device).supports_coalescing)
    except Exception as error:
        return f"cannot ask backend {backend} whether it coalesces point-to-point batches: {error}"
    return None if coalesces else f"backend {backend} does not coalesce point-to-point batches"


def _peers(exchange: Exchange, side: Side, step: int) -> Iterator[int]:
    """The ranks with a message on this side, from the next one on, so that not all start on rank 0."""
    for distance in range(1, exchange.world_size):
        peer = (exchange.rank + step * distance) % exchange.world_size
        if side.grid.numel[peer]:
            yield peer


def _message(side: Side, staging: Tensor | None, peer: int) -> Tensor:
    """One peer's message in the staging, or in the side's own memory."""
    start, numel = side.grid.starts[peer], side.grid.numel[peer]
    if staging is None:
        assert side.flat is not None
        return side.flat[start : start + numel]
    if peer > side.grid.rank:
        start -= side.grid.numel[side.grid.rank]
    return staging[start : start + numel]


def _bytes(message: Tensor) -> Tensor:
    return message.view(torch.uint8)
