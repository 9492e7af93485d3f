"""The worst day: ranks that die, raise, are late, or whose group is broken. Every case ends within its timeout.

A rank writes what it saw to a file beside the store: of processes that are killed nothing else remains.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import model
import pytest
import torch
import torch.distributed as dist
from pool import environment, process_group, use_p2p_for_all_sizes

from vllm_musa_headpar import scatter_heads_gather_tokens, scatter_tokens_gather_heads
from vllm_musa_headpar.agreement import first_use
from vllm_musa_headpar.errors import ExchangeError
from vllm_musa_headpar.host import magi2
from vllm_musa_headpar.implementations import p2p
from vllm_musa_headpar.layout import HeadParallelLayout
from vllm_musa_headpar.testing.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.cpu

EXCHANGES = pytest.mark.parametrize("exchange", ["all_to_all", "p2p"])
PATIENCE = 6.0  # seconds of the process groups' timeout
VICTIM = 2
Outcome = tuple[str, str]


def outcome(call: Callable[[], Any]) -> Outcome:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "right", ""


def round_trip(group: Any, counts: tuple[int, ...], heads_per_rank: int = 2, dim: int = 3) -> None:
    ranks, rank = len(counts), dist.get_rank(group)
    inputs = [
        model.random_tensor(str(other), tokens, heads_per_rank * ranks, dim, torch.float32)
        for other, tokens in enumerate(counts)
    ]
    layout = HeadParallelLayout(counts, rank)
    there = scatter_heads_gather_tokens(inputs[rank], group, layout)
    expected = model.dispatch([model.bits(x) for x in inputs], layout.parts, heads_per_rank * ranks)
    assert model.bits(there) == expected[rank]
    assert model.bits(scatter_tokens_gather_heads(there, group, layout)) == model.bits(inputs[rank])


def exchange_on(group: Any, rank: int, counts: tuple[int, ...]) -> None:
    """A dispatch on a group that torch itself may know no more."""
    scatter_heads_gather_tokens(torch.zeros(counts[rank], len(counts), 3), group, HeadParallelLayout(counts, rank))


def large_exchanges(group: Any, count: int = 10_000) -> None:
    """More than any timeout allows for: 16 MB per rank, over and over."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    layout = HeadParallelLayout((1024,) * ranks, rank)
    tensor = torch.zeros(1024, 16, 256)
    for _ in range(count):
        scatter_heads_gather_tokens(tensor, group, layout)


def kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


# --- A rank that is killed ---------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before(group: Any) -> None:
    if dist.get_rank() == VICTIM:
        die()
    round_trip(group, (3, 0, 1, 2))


def dies_amid(group: Any) -> None:
    """By a timer, while all are in large exchanges: at whatever point that is."""
    if dist.get_rank() == VICTIM:
        kill_after(0.5)
    large_exchanges(group)


def dies_between_its_messages(group: Any) -> None:
    """After it has posted its receives and one of its sends; the others are not sent."""
    sent = 0
    isend, batch = dist.isend, dist.batch_isend_irecv

    def one_by_one(operations: list[Any]) -> list[Any]:
        nonlocal sent
        works = []
        for operation in operations:
            if operation.op is isend:
                sent += 1
                if sent == 2:
                    works[-1].wait()
                    die()
            works += batch([operation])
        return works

    patch = mock.patch.object(dist, "batch_isend_irecv", one_by_one) if dist.get_rank() == VICTIM else nullcontext()
    with patch:
        large_exchanges(group, 1)


def dies_after(group: Any) -> None:
    """Between two exchanges, the first of which was right."""
    round_trip(group, (1, 1, 1, 1))
    dist.barrier()
    if dist.get_rank() == VICTIM:
        die()
    round_trip(group, (3, 0, 1, 2))


def killed(rank: int, nproc: int, store: str, folder: str, exchange: str, scenario: Callable[[Any], None]) -> None:
    use_p2p_for_all_sizes()
    with environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange):
        with process_group(rank, nproc, store, timeout=PATIENCE):
            round_trip(dist.group.WORLD, (1, 2, 0, 1)) if scenario is not dies_before else None
            seen = [outcome(lambda: scenario(dist.group.WORLD))]
            group = dist.group.WORLD
        # The survivors go on, on a group of their own, in the same processes.
        survivors = [other for other in range(nproc) if other != VICTIM]
        with process_group(survivors.index(rank), len(survivors), f"{store}.survivors", timeout=30):
            for _ in range(2):
                seen.append(outcome(lambda: round_trip(dist.group.WORLD, (2, 0, 3))))
            seen.append(outcome(lambda: exchange_on(group, rank, (1, 1, 1, 1))))  # the old group is gone
            seen.append(outcome(lambda: round_trip(dist.group.WORLD, (1, 1, 1))))
            dist.barrier()
    Path(folder, str(rank)).write_text(json.dumps(seen))


SCENARIOS = {
    "before": dies_before,
    "amid": dies_amid,
    "between its messages": dies_between_its_messages,
    "after": dies_after,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "exchange"),
    [
        ("before", "all_to_all"),
        ("amid", "all_to_all"),
        ("amid", "p2p"),
        ("between its messages", "p2p"),
        ("after", "p2p"),
    ],
)
def test_a_killed_rank_is_an_error_on_the_others_and_they_go_on(tmp_path: Path, when: str, exchange: str) -> None:
    with pytest.raises(RankFailure, match=f"rank {VICTIM}: the process died with exit code -9"):
        run_ranks(killed, 4, str(tmp_path), exchange, SCENARIOS[when], timeout=90)
    for rank in (0, 1, 3):
        first, *fresh, gone, last = json.loads((tmp_path / str(rank)).read_text())
        # The one message that was sent before the end went to the next rank: that one may have all it needs.
        served = when == "between its messages" and rank == (VICTIM + 1) % 4
        if not (served and first[0] == "right"):
            assert first[0] == "ExchangeError"
            assert first[1].startswith("head-parallel ")
            assert f"on rank {rank} of 4 through {exchange} failed" in first[1]
        assert fresh == [["right", ""]] * 2
        assert gone[0] == "ValueError"
        assert "process group" in gone[1]
        assert last == ["right", ""]


# --- Ranks that stay alive ---------------------------------------------------------------------------------------


def anew(rank: int, nproc: int, store: str, seen: list[Outcome]) -> list[Outcome]:
    """Two exchanges on a default group made anew in the same processes, then nothing left behind."""
    with process_group(rank, nproc, f"{store}.anew"):
        for _ in range(2):
            seen.append(outcome(lambda: round_trip(dist.group.WORLD, (3, 0, 1, 2)[:nproc])))
        dist.barrier()
    return seen


def raises_alone(rank: int, nproc: int, store: str, exchange: str) -> list[Outcome]:
    """Rank 2 refuses its own input, the others enter; with the check off nobody tells them."""
    with environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange):
        with process_group(rank, nproc, store, timeout=4):
            round_trip(dist.group.WORLD, (1, 1, 1, 1))
            layout = HeadParallelLayout((2, 2, 2, 2), rank)
            tensor = torch.zeros(2, 4, 3) if rank != VICTIM else torch.zeros(3, 4, 3)
            seen = [outcome(lambda: scatter_heads_gather_tokens(tensor, dist.group.WORLD, layout))]
        return anew(rank, nproc, store, seen)


@EXCHANGES
def test_a_rank_that_raises_alone_is_an_error_on_the_others(ranks: Any, exchange: str) -> None:
    told = ranks(raises_alone, 4, exchange)
    for rank, (first, *fresh) in enumerate(told):
        kind, words = (
            ("ValueError", "2 local tokens") if rank == VICTIM else ("ExchangeError", "head-parallel dispatch")
        )
        assert first[0] == kind
        assert words in first[1]
        assert fresh == [("right", "")] * 2


def destroyed(rank: int, nproc: int, store: str, exchange: str) -> list[Outcome]:
    with environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange):
        with process_group(rank, nproc, store):
            group = dist.new_group([0, 1])
            round_trip(group, (1, 2))
            dist.destroy_process_group(group)
            with model.no_collectives():
                seen = [outcome(lambda: exchange_on(group, rank, (1, 2)))]
            world = dist.group.WORLD
            round_trip(world, (1, 2))
        with model.no_collectives():
            seen.append(outcome(lambda: exchange_on(world, rank, (1, 2))))
        return anew(rank, nproc, store, seen)


@EXCHANGES
def test_an_exchange_on_a_destroyed_group(ranks: Any, exchange: str) -> None:
    for subgroup, world, *fresh in ranks(destroyed, 2, exchange):
        for kind, text in (subgroup, world):
            assert kind == "ValueError"
            assert "process group" in text
        assert fresh == [("right", "")] * 2


def broken_collective(rank: int, nproc: int, store: str, exchange: str) -> list[Outcome]:
    def broken(*args: Any, **keywords: Any) -> None:
        raise RuntimeError("the switch is on fire")

    name = "all_to_all_single" if exchange == "all_to_all" else "batch_isend_irecv"
    seen = []
    with environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange):
        with process_group(rank, nproc, store):
            group = dist.group.WORLD
            if exchange == "p2p":  # else its self-test fails and the reference takes over
                round_trip(group, (1, 2))
            for _ in range(2):
                with mock.patch.object(dist, name, broken):
                    seen.append(outcome(lambda: round_trip(group, (1, 2))))
                seen.append(outcome(lambda: round_trip(group, (1, 2))))
        return anew(rank, nproc, store, seen)


@EXCHANGES
def test_a_collective_that_raises_is_named(ranks: Any, exchange: str) -> None:
    for told in ranks(broken_collective, 2, exchange):
        for kind, text in (told[0], told[2]):
            assert kind == "ExchangeError"
            assert text.startswith("head-parallel dispatch of [")
            assert text.endswith(f"through {exchange} failed: the switch is on fire")
        assert [told[index] for index in (1, 3, 4, 5)] == [("right", "")] * 4


def cause_is_kept(rank: int, nproc: int, store: str) -> None:
    cause = RuntimeError("the switch is on fire")
    with (
        environment(),
        process_group(rank, nproc, store),
        mock.patch.object(dist, "all_to_all_single", side_effect=cause),
    ):
        with pytest.raises(ExchangeError) as caught:
            round_trip(dist.group.WORLD, (1, 2))
        assert caught.value.__cause__ is cause


def test_the_error_keeps_its_cause(ranks: Any) -> None:
    ranks(cause_is_kept, 2)


def slow_rank(rank: int, nproc: int, store: str, exchange: str) -> list[Outcome]:
    """Rank 2 comes when rank 0 is known to be under way, and some time after that."""
    with (
        environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange),
        process_group(rank, nproc, store),
    ):
        group, shared = dist.group.WORLD, dist.distributed_c10d._get_default_store()
        round_trip(group, (1, 1, 1, 1))
        if rank == VICTIM:
            shared.wait(["under way"], timedelta(seconds=20))
            threading.Event().wait(1.5)
        if rank == 0:
            shared.set("under way", "1")
        seen = [outcome(lambda: round_trip(group, (3, 0, 1, 2))), outcome(lambda: round_trip(group, (1, 1, 1, 1)))]
        dist.barrier()
        return seen


@EXCHANGES
def test_a_slow_rank_is_waited_for(ranks: Any, exchange: str) -> None:
    assert ranks(slow_rank, 4, exchange) == [[("right", "")] * 2] * 4


def layer_raises(rank: int, nproc: int, store: str, exchange: str) -> list[Outcome]:
    """Between dispatch and return the experts raise, on every rank; the next forward is a healthy one."""
    with environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange), process_group(rank, nproc, store):
        where = SimpleNamespace(group=dist.group.WORLD, world_size=nproc, rank=rank, replicated_sequence=False)
        parallel: Any = SimpleNamespace(get_magi2_ulysses_group=lambda: where)
        forward = magi2.make_layer_forward(layer)
        mh_moe: Any = SimpleNamespace(ep_dispatch=None, ep_undispatch=None)  # what nobody has patched
        moe = SimpleNamespace(forward=magi2.make_moe_forward(stock_moe_forward, parallel, mh_moe), **moe_of(where))
        tensors = [torch.randn(count, 14, generator=torch.Generator().manual_seed(7 + count)) for count in (3, 1, 2, 4)]
        seen = []
        for fails in (False, True, True, False):
            moe.fails = fails
            seen.append(outcome(lambda: check_layer(forward, moe, tensors, rank)))
            assert magi2._token_split.get() is None
        return seen


def moe_of(where: Any) -> dict[str, Any]:
    """What the patched forward asks of the host's layer: 7 heads in shards of 2, the last one padded."""
    return {
        "ep_group": where,
        "num_heads": 7,
        "d_head": 2,
        "local_num_heads": 2,
        "has_real_moe_heads": True,
    }


def stock_moe_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the stock forward has no part in this")


def layer(
    self: Any, hidden_states: Any, rope: Any, varlen_handler: Any, modality_dispatcher: Any, cp_split_sizes: Any
) -> torch.Tensor:
    def experts(routed: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ArithmeticError("an expert is out of range")
        return routed * 2 + 1

    self._local_forward = experts
    result: torch.Tensor = self.forward(self, hidden_states)
    return result


def check_layer(forward: Any, moe: Any, tensors: list[torch.Tensor], rank: int) -> None:
    with known_counts_are_used():
        result = forward(moe, tensors[rank], None, None, None, [len(x) for x in tensors])
    assert torch.equal(result, tensors[rank] * 2 + 1)


def known_counts_are_used() -> Any:
    """The layer's split is known, so nothing may be gathered."""
    return mock.patch.object(dist, "all_gather", side_effect=AssertionError("counts were gathered"))


@EXCHANGES
def test_an_exception_inside_a_layer_leaves_the_next_forward_healthy(ranks: Any, exchange: str) -> None:
    raised = ("ArithmeticError", "an expert is out of range")
    assert ranks(layer_raises, 4, exchange) == [[("right", ""), raised, raised, ("right", "")]] * 4


# --- MAGI-2's own collective: the counts -------------------------------------------------------------------------


def counts_broken(rank: int, nproc: int, store: str) -> list[Outcome]:
    with environment(), process_group(rank, nproc, store):
        where = SimpleNamespace(group=dist.group.WORLD, world_size=nproc, rank=rank, replicated_sequence=False)
        ep_dispatch = magi2.make_ep_dispatch(SimpleNamespace())  # type: ignore[arg-type]
        with mock.patch.object(dist, "all_gather", side_effect=RuntimeError("the switch is on fire")):
            seen = [outcome(lambda: ep_dispatch(torch.zeros(2, 4, 3), where))]
        seen.append(outcome(lambda: ep_dispatch(torch.zeros(2, 4, 3), where)))
        return seen


def test_a_count_discovery_that_fails_names_the_exchange(ranks: Any) -> None:
    for (kind, text), healthy in ranks(counts_broken, 2):
        assert kind == "ExchangeError"
        assert "head-parallel" in text
        assert "the switch is on fire" in text
        assert healthy == ("right", "")


# --- No stale state ----------------------------------------------------------------------------------------------


def nothing_left(rank: int, nproc: int, store: str) -> tuple[int, int]:
    import gc

    gc.collect()
    states, abandoned = len(first_use.states), len(p2p._abandoned)  # of groups that torch itself still holds
    for round_number in range(3):
        with (
            environment(VLLM_MUSA_HEADPAR_EXCHANGE="p2p"),
            process_group(rank, nproc, f"{store}{round_number}", timeout=4),
        ):
            round_trip(dist.group.WORLD, (1, 2))
            if rank == 0:
                outcome(lambda: round_trip(dist.group.WORLD, (1, 2)))  # its peer does not come
    gc.collect()
    return len(first_use.states) - states, len(p2p._abandoned) - abandoned


def test_groups_that_are_gone_leave_nothing_behind(ranks: Any) -> None:
    ranks(nothing_left, 2)
    assert ranks(nothing_left, 2) == [(0, 0), (0, 0)]
