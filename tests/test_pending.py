"""Handles of exchanges under way: several on one group, waited in any order, or dropped."""

from __future__ import annotations

import gc
from typing import Any

import model
import pytest
import torch
import torch.distributed as dist
from pool import environment, process_group

from vllm_musa_headpar import blocks, scatter_heads_gather_tokens
from vllm_musa_headpar.implementations import Pending, p2p, reference
from vllm_musa_headpar.layout import HeadParallelLayout, replica_token_counts

pytestmark = pytest.mark.cpu

IMPLEMENTATIONS = {"all_to_all": reference.all_to_all, "p2p": p2p.p2p}
PLACES = pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("mccl", "musa", marks=pytest.mark.musa)]
)
BOTH = pytest.mark.parametrize("name", IMPLEMENTATIONS)
RANKS = 3
HEADS = 6
CASES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 1, 2), 1),
    ((2, 0, 5), 1),
    ((0, 4, 0), 1),
    ((3, 4, 2), 3),
)


class Message:
    """One exchange of known content: `number` makes its bits different from every other's."""

    def __init__(self, number: int, rank: int, device: str) -> None:
        counts, replicas = CASES[number % len(CASES)]
        parts = replica_token_counts(counts, replicas) if replicas > 1 else None
        self.layouts = [HeadParallelLayout(counts, other, parts) for other in range(RANKS)]
        self.rank, self.device = rank, device
        self.outer = [self._random(number, layout, layout.local_tokens, HEADS) for layout in self.layouts]
        local = HEADS // self.layouts[0].shards
        self.inner = [self._random(-number - 1, layout, layout.owned_tokens, local) for layout in self.layouts]

    @staticmethod
    def _random(number: int, layout: HeadParallelLayout, tokens: int, heads: int) -> torch.Tensor:
        return model.random_tensor(f"{number}/{layout.rank}", tokens, heads, 3, torch.float32)

    def dispatch(self, name: str, group: Any) -> Pending:
        mine = self.outer[self.rank].to(self.device)
        exchange = blocks.dispatch((mine,), self.layouts[self.rank], mine.dtype)
        return IMPLEMENTATIONS[name](exchange, group)

    def undispatch(self, name: str, group: Any) -> Pending:
        mine = self.inner[self.rank].to(self.device)
        return IMPLEMENTATIONS[name](blocks.undispatch(mine, self.layouts[self.rank], HEADS), group)

    def dispatched(self) -> model.Tokens:
        return model.dispatch([model.bits(x) for x in self.outer], self.layouts[0].parts, HEADS)[self.rank]

    def returned(self) -> model.Tokens:
        return model.undispatch([model.bits(x) for x in self.inner], self.layouts[0].parts, HEADS)[self.rank]


def install(backend: str) -> None:
    if backend == "mccl":
        from vllm_musa_headpar.testing import mccl

        mccl.install()


def warm(device: str) -> None:
    dist.all_reduce(torch.zeros(1, device=device))


def two_in_flight(rank: int, nproc: int, store: str, backend: str, device: str, name: str) -> None:
    install(backend)
    with process_group(rank, nproc, store, backend):
        warm(device)
        group = dist.group.WORLD
        for first in range(4):
            for order in ((0, 1), (1, 0)):
                one, two = Message(first, rank, device), Message(first + 1, rank, device)
                handles = (one.dispatch(name, group), two.undispatch(name, group))
                results = {index: handles[index].wait() for index in order}
                assert model.bits(results[0]) == one.dispatched()
                assert model.bits(results[1]) == two.returned()
        # Four at once, waited back to front; not in the same order on all ranks.
        messages = [Message(number, rank, device) for number in range(4)]
        handles4 = [message.dispatch(name, group) for message in messages]
        for index in (3, 2, 1, 0) if rank else (1, 3, 0, 2):
            assert model.bits(handles4[index].wait()) == messages[index].dispatched()


@PLACES
@BOTH
def test_two_in_flight_are_waited_in_either_order(ranks: Any, backend: str, device: str, name: str) -> None:
    ranks(two_in_flight, RANKS, backend, device, name)


def dropped(rank: int, nproc: int, store: str, backend: str, device: str, name: str) -> None:
    install(backend)
    with process_group(rank, nproc, store, backend):
        warm(device)
        group = dist.group.WORLD
        number = 0

        def check_next() -> None:
            nonlocal number
            number += 1
            message = Message(number, rank, device)
            assert model.bits(message.dispatch(name, group).wait()) == message.dispatched()
            assert model.bits(message.undispatch(name, group).wait()) == message.returned()

        for who in ((0, 1, 2), (1,), (0, 2)):
            for first in (0, 2):
                handle = Message(first + 100, rank, device).dispatch(name, group)
                if rank not in who:
                    handle.wait()
                del handle
                gc.collect()
                check_next()
        # Several dropped at once, out of order, with one between them that is waited for later.
        handles = [Message(first + 200, rank, device).undispatch(name, group) for first in range(4)]
        kept = handles[2]
        del handles[3], handles[0], handles
        gc.collect()
        check_next()
        assert model.bits(kept.wait()) == Message(202, rank, device).returned()
        # The next message goes through the other implementation, and through the public function.
        del kept
        Message(300, rank, device).dispatch(name, group)
        other = Message(301, rank, device)
        name_of_other = next(candidate for candidate in IMPLEMENTATIONS if candidate != name)
        assert model.bits(other.dispatch(name_of_other, group).wait()) == other.dispatched()
        Message(302, rank, device).dispatch(name, group)
        with environment(VLLM_MUSA_HEADPAR_EXCHANGE=name):
            result = scatter_heads_gather_tokens(other.outer[rank].to(device), group, other.layouts[rank])
        assert model.bits(result) == other.dispatched()
        assert len(p2p._abandoned) == 0 or name != "p2p"


@PLACES
@BOTH
def test_a_dropped_handle_takes_nothing_from_the_next(ranks: Any, backend: str, device: str, name: str) -> None:
    ranks(dropped, RANKS, backend, device, name)


def waited_twice(rank: int, nproc: int, store: str, backend: str, device: str, name: str) -> None:
    install(backend)
    with process_group(rank, nproc, store, backend):
        warm(device)
        for start in ("dispatch", "undispatch"):
            for number in range(4):
                handle = getattr(Message(number, rank, device), start)(name, dist.group.WORLD)
                result = handle.wait()
                result.fill_(7)
                assert handle.wait() is result
                assert handle.wait().cpu().eq(7).all()


@PLACES
@BOTH
def test_waiting_again_returns_the_same_and_writes_nothing(ranks: Any, backend: str, device: str, name: str) -> None:
    ranks(waited_twice, RANKS, backend, device, name)


def inputs_gone(rank: int, nproc: int, store: str, backend: str, device: str, name: str) -> None:
    """The caller drops the input, whose memory is then asked for again, before the transfer is waited for."""
    install(backend)
    with process_group(rank, nproc, store, backend):
        warm(device)
        for number in range(4):
            message = Message(number, rank, device)
            handles = [message.dispatch(name, dist.group.WORLD), message.undispatch(name, dist.group.WORLD)]
            gc.collect()
            noise = [torch.full((size,), 3.25, device=device) for size in (9, 18, 27, 36, 54, 90) for _ in range(4)]
            assert model.bits(handles[1].wait()) == message.returned()
            assert model.bits(handles[0].wait()) == message.dispatched()
            del noise


@PLACES
@BOTH
def test_the_handle_keeps_what_it_needs(ranks: Any, backend: str, device: str, name: str) -> None:
    ranks(inputs_gone, RANKS, backend, device, name)


def dropped_with_its_group(rank: int, nproc: int, store: str) -> None:
    """An abandoned transfer neither outlives its group nor reaches the next one."""
    with process_group(rank, nproc, store):
        for number in range(4):
            group = dist.new_group(list(range(nproc)))
            Message(number, rank, "cpu").dispatch("p2p", group)
            dist.barrier()
            dist.destroy_process_group(group)
            del group
            gc.collect()
            message = Message(number + 1, rank, "cpu")
            assert model.bits(message.dispatch("p2p", dist.group.WORLD).wait()) == message.dispatched()
        assert len(p2p._abandoned) == 0


def test_a_dropped_handle_goes_with_its_group(ranks: Any) -> None:
    ranks(dropped_with_its_group, RANKS)


class Broken:
    """A work that fails, as after a peer's death."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


class Group:
    """Something that states can hang on."""


@pytest.mark.parametrize("failed", [False, True])
def test_what_was_left_of_a_failed_exchange_is_not_called_dropped(failed: bool) -> None:
    group = Group()
    transfer = p2p.Transfer(group, [Broken(), Broken()], [], ())
    posted = p2p.Posted([], group, transfer, [], None)
    if failed:
        with pytest.raises(RuntimeError, match="closed by peer"):
            posted.wait()
    del posted
    gc.collect()
    with pytest.raises(RuntimeError, match="which had failed before" if failed else "whose handle was dropped"):
        p2p._end_abandoned(group)


def test_a_handle_that_was_made_half_is_dropped_in_silence() -> None:
    p2p.Posted.__new__(p2p.Posted).__del__()
