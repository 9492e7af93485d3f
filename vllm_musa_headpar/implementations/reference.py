"""`all_to_all`: the exchange as upstream does it, one packed `all_to_all_single`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..blocks import Exchange

NAME = "all_to_all"

# What every backend's collective takes. Other types travel as their bytes, at every size: Gloo refuses most of
# them, and which ones MCCL takes depends on the card.
CARRIED = frozenset(
    (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)


class Received:
    """The collective has been issued and waited for; only the unpacking is left."""

    def __init__(self, exchange: Exchange, wire: Tensor) -> None:
        self._exchange = exchange
        self._wire: Tensor | None = wire  # [elements of all messages], staging unless it aliases the result

    def wait(self) -> Tensor:
        recv = self._exchange.recv
        if self._wire is not None and recv.flat is None:
            recv.unpack(self._wire, recv.grid.all_runs)
        self._wire = None
        return self._exchange.result


def all_to_all(exchange: Exchange, group: Any) -> Received:
    """One `torch.distributed.all_to_all_single` of flat buffers, sizes in elements (in bytes where the type is
    not one of `CARRIED`).

    Sides that already are wire format are used in place; a strided one is packed or unpacked by one copy.
    """
    send, recv = exchange.send, exchange.recv
    outgoing, incoming = send.flat, recv.flat
    if outgoing is None:
        outgoing = send.packed(send.grid.all_runs)
    if incoming is None:
        incoming = recv.staging(recv.grid.all_runs)
    received_sizes, sent_sizes = recv.grid.sizes, send.grid.sizes
    received, sent = incoming, outgoing
    if recv.dtype not in CARRIED:
        width = recv.dtype.itemsize
        received, sent = incoming.view(torch.uint8), outgoing.view(torch.uint8)
        received_sizes = [size * width for size in received_sizes]
        sent_sizes = [size * width for size in sent_sizes]
    dist.all_to_all_single(received, sent, output_split_sizes=received_sizes, input_split_sizes=sent_sizes, group=group)
    return Received(exchange, incoming)
