"""`p2p`: grouped point-to-point, shaped for MCCL.

MCCL has no native all-to-all: `all_to_all_single` becomes one group of sends and receives with every rank,
including the rank itself. Posting that group ourselves saves what the collective cannot: the own block is one
copy from box to box, made while the transfer is under way, and is never staged; contiguous sides are sent and
received in place, one message per batch element; strided ones are staged without it. Several exchanges (the
queries, keys and values of one attention) are one group.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..blocks import Exchange, Side

NAME = "p2p"

# The classes of group whose batches `batch_isend_irecv` makes one launch: exactly this one in torch, which asks for the
# type itself and not for a class derived from it. Who replaces that function for a class of their own adds it.
GROUPED: set[type] = {dist.ProcessGroup}

# Transfers whose handle was dropped before `wait()`, per group: an abandoned receive would swallow the
# next message of its peer, so its buffers live on and the next exchange of the group ends it first.
_abandoned: weakref.WeakKeyDictionary[Any, list[Transfer]] = weakref.WeakKeyDictionary()


# Staging to be used again, per group. On CPU only: there a large allocation is new pages each time, which cost
# about as much as the copy into them; a device's allocator keeps its memory, and knows about streams.
_spare: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
_SPARES = 4  # what an attention stages at a time: queries, keys, values and a gate


class Transfer:
    """The works of one batch with every tensor they touch. The first works are the receives' where the
    backend returns one work per message; a coalesced batch has one work for all.

    Args:
        staging: bytes `[at least the wire's]`, owned here until released.
        touched: what else is read or written.
    """

    def __init__(self, group: Any, works: list[Any], staging: list[Tensor], touched: tuple[Tensor, ...]) -> None:
        self.works = works
        self.failed = False  # whoever waited for it has been told already
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
    with torch.inference_mode(False):  # memory made in inference mode may not be written outside of it later
        return torch.empty(size, dtype=torch.uint8, device=device)


class Messages:
    """The other ranks' messages of one side, where they lie: in the side's own memory or in staging.

    A message per batch element, so that both ends have as many of them whichever of them stages.
    """

    def __init__(self, exchange: Exchange, side: Side, staging: list[Tensor], group: Any) -> None:
        self.side = side
        self.wire: Tensor | None = None  # [elements of the other ranks' messages], None where nothing is staged
        if side.rows is None:
            grid = side.grid
            size = (grid.total - grid.numel[grid.rank]) * side.dtype.itemsize
            staging.append(_borrow(size, exchange.result.device, group))
            self.wire = staging[-1][:size].view(side.dtype)

    def of(self, peer: int) -> Iterator[Tensor]:
        """One peer's messages as bytes: MCCL refuses some element types, and none of their bits matter here."""
        grid, batch = self.side.grid, self.side.grid.batch
        start, numel = grid.starts[peer], grid.numel[peer] // batch
        if self.wire is None:
            assert self.side.rows is not None
            for row in self.side.rows:
                yield row[start // batch : start // batch + numel].view(torch.uint8)
            return
        if peer > grid.rank:
            start -= grid.numel[grid.rank]
        for element in range(batch):
            yield self.wire[start + element * numel : start + (element + 1) * numel].view(torch.uint8)

    def unpack(self, peer: int) -> None:
        """Copy one peer's messages from the staging into their boxes."""
        if self.wire is None:
            return
        start = self.side.grid.starts[peer]
        if peer > self.side.grid.rank:
            start -= self.side.grid.numel[self.side.grid.rank]
        self.side.unpack(self.wire[start : start + self.side.grid.numel[peer]], self.side.grid.peer_runs[peer])


@dataclass(frozen=True)
class Arrival:
    """What the first works of a batch bring: the messages of one peer for one exchange."""

    messages: Messages
    peer: int


class Posted:
    """A posted batch; owns the staging until done."""

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        group: Any,
        transfer: Transfer,
        incoming: Sequence[Messages],
        arrivals: Sequence[Arrival] | None,
    ) -> None:
        self._exchanges = exchanges
        self._group = group
        self._transfer = transfer
        self._incoming = incoming
        self._failed = False
        self._arrivals = arrivals  # in the order of the first works, None where one work is all

    def wait(self) -> Tensor:
        if self._failed:
            raise RuntimeError("this exchange has failed before; its result is undefined")
        incoming, self._incoming = self._incoming, ()
        try:
            if any(messages.wire is not None for messages in incoming):
                self._unpack(incoming)
            self._transfer.wait()
            self._transfer.release()
        except BaseException:
            self._failed = True
            raise
        return self._exchanges[0].result

    def _unpack(self, incoming: Sequence[Messages]) -> None:
        if self._arrivals is None:
            self._transfer.wait()
            for messages in incoming:
                if messages.wire is not None:
                    messages.side.unpack(messages.wire, messages.side.grid.other_runs)
            return
        works = self._transfer.works
        for arrival in self._arrivals:
            for _ in range(arrival.messages.side.grid.batch):
                works.pop(0).wait()
            arrival.messages.unpack(arrival.peer)

    def __del__(self) -> None:
        transfer = getattr(self, "_transfer", None)  # made half, there is nothing under way yet
        if transfer is not None and transfer.works:
            transfer.failed = self._failed
            _abandoned.setdefault(self._group, []).append(transfer)


def p2p(exchange: Exchange, group: Any) -> Posted:
    """One `batch_isend_irecv` per exchange. Empty messages are left out on both ends by the same rule."""
    return together((exchange,), group)


def together(exchanges: Sequence[Exchange], group: Any) -> Posted:
    """One `batch_isend_irecv` for several exchanges, in one order on all ranks. `wait()` completes all of them."""
    _end_abandoned(group)
    staging: list[Tensor] = []
    receives: list[Any] = []
    sends: list[Any] = []
    incoming: list[Messages] = []
    arrivals: list[Arrival] = []
    for exchange in exchanges:
        send, recv = exchange.send, exchange.recv
        outgoing = Messages(exchange, send, staging, group)
        if outgoing.wire is not None:
            send.pack(outgoing.wire, send.grid.other_runs)
        arriving = Messages(exchange, recv, staging, group)
        incoming.append(arriving)
        for peer in _peers(exchange, recv, step=-1):
            arrivals.append(Arrival(arriving, peer))
            receives += [dist.P2POp(dist.irecv, part, group=group, group_peer=peer) for part in arriving.of(peer)]
        for peer in _peers(exchange, send, step=1):
            sends += [dist.P2POp(dist.isend, part, group=group, group_peer=peer) for part in outgoing.of(peer)]
    operations = receives + sends
    works = list(dist.batch_isend_irecv(operations)) if operations else []
    touched = [tensor for exchange in exchanges for tensor in (exchange.result, *exchange.send.parts)]
    transfer = Transfer(group, works, staging, tuple(touched))
    per_message = len(works) == len(operations)
    posted = Posted(exchanges, group, transfer, incoming, arrivals if per_message else None)
    for exchange in exchanges:
        exchange.copy_own()
    return posted


def _end_abandoned(group: Any) -> None:
    abandoned = _abandoned.get(group, [])
    while abandoned:
        try:
            abandoned[0].wait()
        except RuntimeError as error:
            which = "which had failed before," if abandoned[0].failed else "whose handle was dropped,"
            raise RuntimeError(f"what was left of an earlier exchange, {which} failed: {error}") from error
        abandoned.pop(0)
    _abandoned.pop(group, None)


def unusable(group: Any, device: torch.device, backend: str) -> str | None:
    """Why this must not be used on a group: on MCCL only a coalesced batch is one launch without deadlock."""
    if backend == "gloo":  # its sends and receives are independent of each other
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":  # asked once per group
            return "TORCH_DISTRIBUTED_DEBUG=DETAIL counts point-to-point among Gloo's collectives, and the ranks differ"
        return None
    if type(group) not in GROUPED:
        return f"torch groups point-to-point batches of a plain ProcessGroup only, not of a {type(group).__name__}"
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
