"""What ranks settle: the first use of a group, and the check before every exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import model
import pytest
import torch
import torch.distributed as dist
from pool import environment, process_group

from vllm_musa_headpar import registry, scatter_heads_gather_tokens, scatter_tokens_gather_heads
from vllm_musa_headpar.agreement import first_use
from vllm_musa_headpar.agreement.board import board_of
from vllm_musa_headpar.blocks import Exchange
from vllm_musa_headpar.errors import DisagreementError
from vllm_musa_headpar.host import magi2
from vllm_musa_headpar.implementations import p2p
from vllm_musa_headpar.layout import HeadParallelLayout, replica_token_counts
from vllm_musa_headpar.testing.counters import Counts, counting

pytestmark = pytest.mark.cpu

Outcome = tuple[str, str]


@contextmanager
def claiming(implementation: Callable[..., Any] = p2p.p2p, **keywords: Any) -> Iterator[None]:
    """An implementation "tuned" that claims Gloo, in this process, for the time of the block."""
    registry.register_head_parallel_exchange("tuned", implementation, backends=("gloo",), **keywords)
    try:
        yield
    finally:
        del registry._registrations["tuned"]


def random_inputs(counts: tuple[int, ...], heads: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [model.random_tensor(f"{rank}", tokens, heads, 3, dtype) for rank, tokens in enumerate(counts)]


def round_trip(group: Any, counts: tuple[int, ...], heads_per_rank: int = 2) -> None:
    """A dispatch and a return on a group, checked."""
    ranks, rank = len(counts), dist.get_rank(group)
    inputs = random_inputs(counts, heads_per_rank * ranks)
    layout = HeadParallelLayout(counts, rank)
    there = scatter_heads_gather_tokens(inputs[rank], group, layout)
    expected = model.dispatch([model.bits(x) for x in inputs], layout.parts, heads_per_rank * ranks)
    assert model.bits(there) == expected[rank]
    assert model.bits(scatter_tokens_gather_heads(there, group, layout)) == model.bits(inputs[rank])


def counted_round_trip(group: Any, counts: tuple[int, ...]) -> Counts:
    """What the exchanges of a round trip launch, without what the comparison with the model does."""
    rank, ranks = dist.get_rank(group), len(counts)
    (tensor, layout) = random_inputs(counts, 2 * ranks)[rank], HeadParallelLayout(counts, rank)
    with counting() as seen:
        there = scatter_heads_gather_tokens(tensor, group, layout)
        back = scatter_tokens_gather_heads(there, group, layout)
    assert model.bits(back) == model.bits(tensor)
    return seen


def in_use(group: Any, counts: tuple[int, ...]) -> str:
    """Which implementation the exchanges of a group go through, by what they call."""
    seen = counted_round_trip(group, counts)
    kind = {(2, 0): "all_to_all", (0, 2): "p2p"}[seen.total_collectives, seen.batches]
    assert seen.host_syncs == 0
    return kind


def outcome(call: Callable[[], Any]) -> Outcome:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "right", ""


# --- First use -----------------------------------------------------------------------------------------------


def settles_once(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store), claiming(), environment(), model.warnings_logged() as warnings:
        for group in (dist.group.WORLD, dist.new_group([0, 1, 2, 3])):
            first = counted_round_trip(group, (3, 0, 1, 2))
            assert first.host_syncs <= 2
            assert first.total_collectives >= 1
            later = counted_round_trip(group, (3, 0, 1, 2))
            assert (later.total_collectives, later.batches, later.host_syncs) == (0, 2, 0)
            other = counted_round_trip(group, (1, 1, 1, 1))
            assert (other.total_collectives, other.batches, other.host_syncs) == (0, 2, 0)
        assert warnings == []


def test_a_group_settles_once(ranks: Any) -> None:
    ranks(settles_once, 4)


def nothing_to_settle(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store):
        for name, collectives, batches in (("auto", 2, 0), ("all_to_all", 2, 0)):
            group = dist.new_group([0, 1])
            with environment(VLLM_MUSA_HEADPAR_EXCHANGE=name), model.warnings_logged() as warnings:
                seen = counted_round_trip(group, (3, 1))
            assert (seen.total_collectives, seen.batches, seen.host_syncs) == (collectives, batches, 0)
            assert warnings == []


def test_where_only_the_reference_can_be_chosen_nothing_is_settled(ranks: Any) -> None:
    ranks(nothing_to_settle, 2)


def different_settings(rank: int, nproc: int, store: str) -> list[list[str]]:
    told = []
    with process_group(rank, nproc, store), claiming():
        for settings in (("all_to_all", "auto", "auto", "auto"), ("auto", "p2p", "all_to_all", "tuned")):
            group = dist.new_group([0, 1, 2, 3])
            with environment(VLLM_MUSA_HEADPAR_EXCHANGE=settings[rank]), model.warnings_logged() as warnings:
                round_trip(group, (3, 0, 1, 2))
                assert in_use(group, (2, 2, 2, 2)) == "all_to_all"
                round_trip(group, (3, 0, 1, 2))
            told.append(list(warnings))
    return told


def test_ranks_with_different_settings_meet_and_settle_on_the_reference(ranks: Any) -> None:
    told = ranks(different_settings, 4)
    assert told[0] == told[1] == told[2] == told[3]
    first, second = told[0]
    assert len(first) == len(second) == 1
    assert "all_to_all on rank 0 (global 0), tuned on ranks 1, 2, 3 (global 1, 2, 3)" in first[0]
    assert "p2p on rank 1 (global 1)" in second[0]


# What one rank of two has set, and the other has not; no backend is claimed.
ONE_RANKS: tuple[dict[str, str], ...] = (
    {"VLLM_MUSA_HEADPAR_EXCHANGE": "p2p"},
    {"VLLM_MUSA_HEADPAR_CHECK": "1"},
    {"VLLM_MUSA_HEADPAR_EXCHANGE": "p2p", "VLLM_MUSA_HEADPAR_CHECK": "1"},
)


def set_on_one_rank(rank: int, nproc: int, store: str) -> list[list[str]]:
    told = []
    with process_group(rank, nproc, store, timeout=20):
        for variables in ONE_RANKS:
            for odd in range(nproc):
                for others in ({}, {"VLLM_MUSA_HEADPAR_EXCHANGE": "all_to_all"}):
                    group = dist.new_group(list(range(nproc)))
                    with (
                        environment(**(variables if rank == odd else others)),
                        model.warnings_logged() as warnings,
                    ):
                        round_trip(group, (2, 1))
                        assert in_use(group, (1, 2)) == "all_to_all"
                        round_trip(group, (0, 1))
                    told.append([*warnings, f"from {odd}"] if rank == odd else list(warnings))
    return told


def test_ranks_with_different_settings_meet_on_a_backend_that_nobody_claims(ranks: Any) -> None:
    for rank, told in enumerate(ranks(set_on_one_rank, 2)):
        assert len(told) == 12
        for warnings in told:
            if warnings[-1:] == [f"from {rank}"]:
                (said, _) = warnings
                assert "the stock exchange is used on a group of 2 ranks, backend gloo" in said
                assert f"rank {1 - rank} (global {1 - rank}) asked for nothing else and did not wait" in said
            else:
                assert warnings == []


def one_of_three_waits_for_nobody(rank: int, nproc: int, store: str) -> list[str]:
    exchange = "auto" if rank == 1 else "p2p"
    with process_group(rank, nproc, store), environment(VLLM_MUSA_HEADPAR_EXCHANGE=exchange):
        if rank == 2:  # the others are there already, one of them waiting
            dist.distributed_c10d._get_default_store().wait(["rank 1 was here"])
        with model.warnings_logged() as warnings:
            state = first_use.state_of(dist.group.WORLD, torch.device("cpu"))
        if rank == 1:
            dist.distributed_c10d._get_default_store().set("rank 1 was here", "")
        assert (state.name, state.check) == ("all_to_all", False)
        round_trip(dist.group.WORLD, (2, 1, 0))
        return list(warnings)


def test_those_that_wait_come_to_the_same_end_where_one_does_not(ranks: Any) -> None:
    told = ranks(one_of_three_waits_for_nobody, 3)
    assert told[1] == []
    for warnings in (told[0], told[2]):
        assert len(warnings) == 1
        assert "did not wait" in warnings[0]


def alone(rank: int, nproc: int, store: str) -> None:
    """Nobody asks for anything: no rank waits for another at its first use."""
    with process_group(rank, nproc, store, timeout=5), environment():
        if rank == 0:
            state = first_use.state_of(dist.group.WORLD, torch.device("cpu"))  # the others come only later
            assert state.name == "all_to_all"
        dist.barrier()
        round_trip(dist.group.WORLD, (1, 2))


def test_where_nobody_asks_for_anything_nobody_waits(ranks: Any) -> None:
    ranks(alone, 2)


def same_override(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store), claiming(), model.warnings_logged() as warnings:
        for name, kind in (("all_to_all", "all_to_all"), ("p2p", "p2p"), ("auto", "p2p"), ("tuned", "p2p")):
            with environment(VLLM_MUSA_HEADPAR_EXCHANGE=name):
                group = dist.new_group([0, 1])
                round_trip(group, (1, 2))
                assert in_use(group, (1, 2)) == kind
        assert warnings == []


def test_the_same_override_on_all_ranks_is_no_disagreement(ranks: Any) -> None:
    ranks(same_override, 2)


def unlike_ranks(rank: int, nproc: int, store: str) -> list[str]:
    """Ranks of different versions, and one on which the implementation cannot be used."""
    told = []

    def unusable(group: Any, device: torch.device, backend: str) -> str | None:
        assert (device, backend) == (torch.device("cpu"), "gloo")
        return "the cable is unplugged" if dist.get_rank(group) == 1 else None

    def unsure(group: Any, device: torch.device, backend: str) -> str | None:
        raise KeyError("no such cable")

    version: Any = mock.patch.object(first_use, "__version__", f"0.{rank}")
    for keywords, patch in (({}, version), ({"unusable": unusable}, None), ({"unusable": unsure}, None)):
        with (
            process_group(rank, nproc, f"{store}{len(told)}"),
            claiming(**keywords),
            environment(),
            patch or contextlib.nullcontext(),
            model.warnings_logged() as warnings,
        ):
            group = dist.group.WORLD
            round_trip(group, (1, 2))
            assert in_use(group, (1, 2)) == "all_to_all"
            assert len(warnings) == 1
            told += warnings
    return told


def test_ranks_that_differ_otherwise_use_the_reference(ranks: Any) -> None:
    told = ranks(unlike_ranks, 2)
    assert told[0] == told[1]
    assert "version: 0.0 on rank 0 (global 0), 0.1 on rank 1 (global 1)" in told[0][0]
    assert "rank 1 (global 1): the cable is unplugged" in told[0][1]
    assert "no such cable" in told[0][2]


class Planted:
    """Point-to-point with a fault. `wait` is the handle's."""

    def __init__(self, exchange: Exchange, group: Any, fault: Callable[[torch.Tensor], Any]) -> None:
        self._pending, self._fault = p2p.p2p(exchange, group), fault

    def wait(self) -> Any:
        return self._fault(self._pending.wait())


def planted(fault: str, at_rank: int | None) -> Callable[[Exchange, Any], Any]:
    def flip(result: torch.Tensor, index: int) -> torch.Tensor:
        data = result.view(-1).view(torch.uint8)
        if data.numel():
            data[index] ^= 1
        return result

    def raises(result: torch.Tensor) -> torch.Tensor:
        raise TypeError("a planted mistake")

    faults: dict[str, Callable[[torch.Tensor], Any]] = {
        "first byte": lambda result: flip(result, 0),
        "last byte": lambda result: flip(result, -1),
        "raises": raises,
        "None": lambda result: None,
        "shape": lambda result: result[:, :1],
        "dispatch": lambda result: flip(result, 0) if result.shape[1] == 2 else result,
        "return": lambda result: flip(result, 0) if result.shape[1] != 2 else result,
    }

    def implementation(exchange: Exchange, group: Any) -> Any:
        if at_rank is not None and dist.get_rank(group) != at_rank:
            return p2p.p2p(exchange, group)
        return Planted(exchange, group, faults[fault])

    return implementation


FAULTS: tuple[tuple[str, int | None], ...] = (
    ("first byte", 1),
    ("last byte", 3),
    ("dispatch", 2),
    ("return", 0),
    ("raises", None),
    ("None", None),
    ("shape", None),
)


def planted_faults(rank: int, nproc: int, store: str) -> list[list[str]]:
    told = []
    with process_group(rank, nproc, store), environment():
        for fault, at_rank in FAULTS:
            group = dist.new_group([0, 1, 2, 3])
            with claiming(planted(fault, at_rank)), model.warnings_logged() as warnings:
                round_trip(group, (3, 0, 1, 2))
                assert in_use(group, (2, 2, 2, 2)) == "all_to_all"
            told.append(list(warnings))
    return told


def test_a_wrong_implementation_is_caught_on_every_rank(ranks: Any) -> None:
    for told in ranks(planted_faults, 4):
        for (fault, _), warnings in zip(FAULTS, told, strict=True):
            assert len(warnings) == 1, fault
            assert "tuned failed its self-test" in warnings[0]
            assert "backend gloo" in warnings[0]
        assert "TypeError: a planted mistake" in told[4][0]


def broken_reference(rank: int, nproc: int, store: str) -> list[Outcome]:
    """The backend's own collective goes wrong, on one rank or on all: zeros, nothing written, or an error."""
    seen = []
    real = dist.all_to_all_single

    def zeroes(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        real(output, *args, **kwargs)
        output.zero_()

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a broken collective")

    def silent(*args: Any, **kwargs: Any) -> Any:
        return None

    with process_group(rank, nproc, store, timeout=10), claiming(), environment():
        for broken, on in ((zeroes, (0, 1)), (zeroes, (1,)), (silent, (0, 1)), (raises, (0, 1))):
            group = dist.new_group([0, 1])
            with (
                mock.patch.object(dist, "all_to_all_single", broken if rank in on else real),
                model.warnings_logged() as warnings,
            ):
                for _ in range(2):  # it does not get better by coming again
                    seen.append(outcome(lambda group=group: round_trip(group, (2, 1))))
            assert warnings == []
            round_trip(group, (2, 1))  # mended, the group is as good as any
            assert in_use(group, (2, 1)) == "p2p"
    return seen


def test_a_wrong_reference_is_an_error_on_all_ranks_and_never_used(ranks: Any) -> None:
    told = ranks(broken_reference, 2)
    for kind, text in (*told[0], *told[1]):
        assert kind == "ExchangeError"
        assert "the stock exchange itself, all_to_all, fails the self-test" in text
        assert "all_to_all_single is wrong there" in text
    assert "a broken collective" in told[0][-1][1]


def silent_rank(rank: int, nproc: int, store: str) -> None:
    """Rank 1 neither sends nor receives anything in the first exchange."""
    with process_group(rank, nproc, store), claiming(), environment(), model.warnings_logged() as warnings:
        layout = HeadParallelLayout((3, 0, 2), rank, head_counts=(2, 0, 1))
        inputs = random_inputs((3, 0, 2), 3)
        group = dist.group.WORLD
        there = scatter_heads_gather_tokens(inputs[rank], group, layout)
        assert model.bits(there) == model.dispatch([model.bits(x) for x in inputs], layout.parts, 3, (2, 0, 1))[rank]
        assert model.bits(scatter_tokens_gather_heads(there, group, layout)) == model.bits(inputs[rank])
        assert in_use(group, (2, 2, 2)) == "p2p"
        assert warnings == []


def test_a_rank_with_nothing_to_move_takes_part_in_the_first_exchange(ranks: Any) -> None:
    ranks(silent_rank, 3)


def empty_first(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store), claiming(), environment(), model.warnings_logged() as warnings:
        group = dist.group.WORLD
        with model.no_collectives():
            result = scatter_heads_gather_tokens(torch.empty(0, 4, 3), group, HeadParallelLayout((0, 0), rank))
        assert result.shape == (0, 2, 3)
        round_trip(group, (3, 0))
        assert in_use(group, (1, 2)) == "p2p"
        assert warnings == []


def test_an_empty_first_exchange_launches_nothing_and_leaves_the_test_to_the_next(ranks: Any) -> None:
    ranks(empty_first, 2)


def subgroups(rank: int, nproc: int, store: str) -> list[str]:
    """Two groups at the same time: in one the ranks differ, in the other not."""
    with process_group(rank, nproc, store), claiming(), model.warnings_logged() as warnings:
        groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        mine = groups[rank % 2]
        with environment(VLLM_MUSA_HEADPAR_EXCHANGE="all_to_all" if rank == 2 else "auto"):
            round_trip(mine, (3, 1))
            assert in_use(mine, (1, 2)) == ("all_to_all" if rank in (0, 2) else "p2p")
        with environment():  # the world settles for itself
            round_trip(dist.group.WORLD, (3, 1, 0, 2))
            assert in_use(dist.group.WORLD, (1, 1, 1, 1)) == "p2p"
            assert in_use(mine, (1, 2)) == ("all_to_all" if rank in (0, 2) else "p2p")
        return list(warnings)


def test_subgroups_settle_for_themselves(ranks: Any) -> None:
    told = ranks(subgroups, 4)
    assert told[1] == told[3] == []
    assert told[0] == told[2]
    assert "all_to_all on rank 1 (global 2), tuned on rank 0 (global 0)" in told[0][0] or (
        "tuned on rank 0 (global 0), all_to_all on rank 1 (global 2)" in told[0][0]
    )


def made_anew(rank: int, nproc: int, store: str) -> None:
    with claiming(), model.warnings_logged():
        for round_number, name in enumerate(("all_to_all", "p2p", "all_to_all", "auto")):
            kind = "p2p" if name == "auto" else name
            with (
                process_group(rank, nproc, f"{store}{round_number}"),
                environment(VLLM_MUSA_HEADPAR_EXCHANGE=name),
            ):
                round_trip(dist.group.WORLD, (1, 2))
                assert in_use(dist.group.WORLD, (1, 2)) == kind
        with process_group(rank, nproc, f"{store}last"):
            for name, kind in (("all_to_all", "all_to_all"), ("p2p", "p2p"), ("all_to_all", "all_to_all")):
                with environment(VLLM_MUSA_HEADPAR_EXCHANGE=name):
                    group = dist.new_group([0, 1])
                    round_trip(group, (1, 2))
                    assert in_use(group, (1, 2)) == kind
                    dist.destroy_process_group(group)


def test_a_group_made_anew_settles_anew(ranks: Any) -> None:
    ranks(made_anew, 2)


def unknown_name(rank: int, nproc: int, store: str) -> list[Any]:
    seen: list[Any] = []
    with process_group(rank, nproc, store):
        with environment(VLLM_MUSA_HEADPAR_EXCHANGE="teleport"), model.warnings_logged() as warnings:
            for group in (dist.group.WORLD, dist.new_group([0, 1])):
                round_trip(group, (1, 2))
                assert in_use(group, (1, 2)) == "all_to_all"
            seen.append(list(warnings))
        strict = environment(VLLM_MUSA_HEADPAR_EXCHANGE="teleport", VLLM_MUSA_HEADPAR="strict")
        group = dist.new_group([0, 1])
        with strict, model.no_collectives():
            seen.append(outcome(lambda: round_trip(group, (1, 2))))
    return seen


def test_an_unknown_exchange_is_auto_with_one_warning_and_an_error_when_strict(ranks: Any) -> None:
    for warnings, (kind, text) in ranks(unknown_name, 2):
        assert len(warnings) == 1
        for message in (warnings[0], text):
            assert "VLLM_MUSA_HEADPAR_EXCHANGE='teleport'" in message
            assert "auto" in message
            assert "all_to_all, p2p, shared" in message
        assert kind == "ValueError"


# --- The check: what all ranks must bring alike ------------------------------------------------------------------

MEMBERS = (0, 2, 3)  # a group in which rank 1 is global 2
ODD = 1


def say(counts: tuple[int, ...], **change: Any) -> dict[str, Any]:
    return {"counts": counts, "replicas": None, "head_counts": None, "heads": 6, "dim": 4, **change}


# Field -> what most ranks bring, what the odd rank brings, words in the error.
PLAIN = say((2, 2, 2))
DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tokens": (PLAIN, say((2, 2, 3)), "tokens: [2, 2, 3] on rank 1 (global 2), [2, 2, 2] on ranks 0, 2 (global 0, 3)"),
    "replicas": (
        say((2, 2, 2), replicas=((1, 0, 1),) * 3),
        say((2, 2, 2), replicas=((1, 1, 0),) * 3),
        "replicas: [[1, 1, 0], [1, 1, 0], [1, 1, 0]] on rank 1 (global 2)",
    ),
    "replicas of one": (PLAIN, say((2, 2, 2), replicas=((2, 0, 0),) * 3), "replicas: [[2, 0, 0], "),
    "head counts": (
        say((2, 2, 2), head_counts=(2, 2, 2)),
        say((2, 2, 2), head_counts=(1, 2, 3)),
        "head_counts: [1, 2, 3] on rank 1 (global 2), [2, 2, 2] on ranks 0, 2 (global 0, 3)",
    ),
    "heads": (PLAIN, say((2, 2, 2), heads=3), "heads: [3] on rank 1 (global 2), [6] on ranks 0, 2 (global 0, 3)"),
    "dim": (PLAIN, say((2, 2, 2), dim=5), "dim: 5 on rank 1 (global 2), 4 on ranks 0, 2 (global 0, 3)"),
    "dtype": (
        PLAIN,
        say((2, 2, 2), dtype=torch.int32),
        "dtype: torch.int32 on rank 1 (global 2), torch.float32 on ranks 0, 2 (global 0, 3)",
    ),
    "direction": (
        PLAIN,
        say((2, 2, 2), back=True),
        "direction: return on rank 1 (global 2), dispatch on ranks 0, 2 (global 0, 3)",
    ),
    "empty on one": (say((2, 0, 2)), say((0, 0, 0)), "tokens: [0, 0, 0] on rank 1 (global 2), [2, 0, 2] on ranks 0, 2"),
    "empty": (say((0, 0, 0)), say((0, 0, 0), dim=5), "dim: 5 on rank 1 (global 2), 4 on ranks 0, 2 (global 0, 3)"),
    "empty on most": (say((0, 0, 0)), say((0, 1, 0)), "tokens: [0, 1, 0] on rank 1 (global 2), [0, 0, 0] on ranks 0"),
}


def bring(group: Any, said: dict[str, Any]) -> torch.Tensor:
    layout = HeadParallelLayout(said["counts"], dist.get_rank(group), said["replicas"], head_counts=said["head_counts"])
    dtype = said.get("dtype", torch.float32)
    if said.get("back"):
        return scatter_tokens_gather_heads(
            torch.zeros(layout.owned_tokens, said["heads"] // layout.shards, said["dim"], dtype=dtype), group, layout
        )
    return scatter_heads_gather_tokens(
        torch.zeros(layout.local_tokens, said["heads"], said["dim"], dtype=dtype), group, layout
    )


def disagreements(rank: int, nproc: int, store: str) -> dict[str, Outcome]:
    seen: dict[str, Outcome] = {}
    with process_group(rank, nproc, store), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        group = dist.new_group(list(MEMBERS))
        if rank not in MEMBERS:
            return seen
        for name, (most, odd, _) in DISAGREEMENTS.items():
            said = odd if dist.get_rank(group) == ODD else most
            with model.no_collectives():
                seen[name] = outcome(lambda said=said: bring(group, said))
            round_trip(group, (2, 0, 1))  # the group is as good as before
    return seen


def test_every_disagreement_is_the_same_error_on_every_rank(ranks: Any) -> None:
    seen = [each for each in ranks(disagreements, 4) if each]
    assert len(seen) == 3
    for name, (_, _, words) in DISAGREEMENTS.items():
        told = {each[name] for each in seen}
        assert len(told) == 1, (name, told)
        ((kind, text),) = told
        assert (name, kind) == (name, "DisagreementError")
        assert words in text


def different_implementations(rank: int, nproc: int, store: str) -> list[str]:
    exchange = "p2p" if rank == 1 else "all_to_all"
    with (
        process_group(rank, nproc, store, timeout=4),
        environment(VLLM_MUSA_HEADPAR_CHECK="1", VLLM_MUSA_HEADPAR_EXCHANGE=exchange),
        model.warnings_logged() as warnings,
    ):
        round_trip(dist.group.WORLD, (2, 2))
        assert in_use(dist.group.WORLD, (2, 2)) == "all_to_all"
        with model.no_collectives():
            kind, _ = outcome(lambda: bring(dist.group.WORLD, say((2, 2), heads=4, dim=rank + 1)))
        assert kind == "DisagreementError"
        return list(warnings)


def test_with_the_check_on_ranks_settle_on_any_backend(ranks: Any) -> None:
    told = ranks(different_implementations, 2)
    assert told[0] == told[1]
    assert len(told[0]) == 1
    assert "exchange: all_to_all on rank 0 (global 0), p2p on rank 1 (global 1)" in told[0][0]


def skipped(rank: int, nproc: int, store: str) -> list[Outcome]:
    """Rank 1 leaves an exchange out."""
    with process_group(rank, nproc, store, timeout=3), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        group = dist.group.WORLD
        round_trip(group, (1, 1))
        seen = []
        if rank != 1:
            seen.append(outcome(lambda: bring(group, say((2, 2), heads=4))))
        seen.append(outcome(lambda: bring(group, say((2, 2), heads=4, dim=9))))
        return seen


def test_a_rank_that_skips_an_exchange_is_found_at_the_next(ranks: Any) -> None:
    told = ranks(skipped, 2)
    assert told[0][0] == told[1][0]
    kind, text = told[0][0]
    assert kind == "DisagreementError"
    assert "dim: 4 on rank 0 (global 0), 9 on rank 1 (global 1)" in text
    assert told[0][1][0] == "DisagreementError"  # nobody comes to its second exchange
    assert "rank 1 (global 1) did not arrive" in told[0][1][1]


def late(rank: int, nproc: int, store: str) -> list[Outcome]:
    with process_group(rank, nproc, store, timeout=4), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        group = dist.new_group([0, 2, 3])
        if rank in (0, 3):
            return [outcome(lambda: round_trip(group, (1, 1, 1)))]
        return []


def test_a_rank_that_does_not_arrive_is_named_on_the_others(ranks: Any) -> None:
    told = ranks(late, 4)
    assert told[0] == told[3]
    ((kind, text),) = told[0]
    assert kind == "DisagreementError"
    assert "rank 1 (global 2) did not arrive" in text
    assert "4 s" in text


# --- The check: a rank that refuses its own input ----------------------------------------------------------------

PLAIN_LAYOUT = (2, 2, 2)


def refused_inputs(layout: HeadParallelLayout) -> dict[str, tuple[Any, Any, str]]:
    """What one rank hands over: a tensor, a layout, and a word of the complaint."""
    good = torch.zeros(2, 6, 4)
    return {
        "token count": (torch.zeros(3, 6, 4), layout, "2 local tokens"),
        "heads": (torch.zeros(2, 5, 4), layout, "5 heads"),
        "rank of the tensor": (torch.zeros(2, 6), layout, "[2, 6]"),
        "no tensor": ([1, 2], layout, "list"),
        "meta": (torch.zeros(2, 6, 4, device="meta"), layout, "meta"),
        "group": (good, HeadParallelLayout(PLAIN_LAYOUT, (layout.rank + 1) % 3), "process group size/rank"),
        "no layout": (good, "a layout", "a layout"),
        "layout of another class": (good, SimpleNamespace(token_counts=[2, 2, 2], rank=layout.rank), "token_counts"),
    }


REFUSALS = tuple(refused_inputs(HeadParallelLayout(PLAIN_LAYOUT, 0)))


def refusals(rank: int, nproc: int, store: str, case: str, claimed: bool) -> list[Outcome]:
    with (
        process_group(rank, nproc, store, timeout=4),
        claiming() if claimed else contextlib.nullcontext(),
        environment(VLLM_MUSA_HEADPAR_CHECK="1"),
    ):
        group = dist.new_group(list(MEMBERS))
        if rank not in MEMBERS:
            return []
        layout = HeadParallelLayout(PLAIN_LAYOUT, dist.get_rank(group))
        tensor, said, _ = refused_inputs(layout)[case] if layout.rank == ODD else (torch.zeros(2, 6, 4), layout, "")
        seen = []
        for _ in range(2):  # the first exchange of the group, and a later one
            with model.no_collectives():
                seen.append(outcome(lambda: scatter_heads_gather_tokens(tensor, group, said)))
            seen.append(outcome(lambda: round_trip(group, (1, 0, 2))))
        return seen


@pytest.mark.parametrize(("case", "claimed"), [*((case, False) for case in REFUSALS), ("heads", True)])
def test_a_rank_that_refuses_its_input_tells_the_others(ranks: Any, case: str, claimed: bool) -> None:
    _, _, words = refused_inputs(HeadParallelLayout(PLAIN_LAYOUT, ODD))[case]
    told = ranks(refusals, 4, case, claimed)
    assert told[0] == told[3]
    assert [kind for kind, _ in told[0][1::2]] == ["right", "right"]
    for (own, own_text), (kind, text) in zip(told[2][::2], told[0][::2], strict=True):
        assert own in ("ValueError", "TypeError")
        assert words in own_text
        assert kind == "DisagreementError"
        assert "rank 1 (global 2)" in text
        assert own_text in text


# --- The check: MAGI-2's wrappers, which have shortcuts of their own ------------------------------------------------


def wrapper_shortcuts(rank: int, nproc: int, store: str) -> list[Outcome]:
    """No heads or no dim: nothing is exchanged, and it is compared all the same."""
    seen = []
    with process_group(rank, nproc, store, timeout=3), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        group = SimpleNamespace(group=dist.group.WORLD, world_size=nproc, rank=rank, replicated_sequence=False)
        parallel: Any = SimpleNamespace()
        calls: list[Callable[[int], torch.Tensor]] = [
            lambda dim: magi2.make_ep_dispatch(parallel)(torch.zeros(2, 4, dim), group, [2, 2]),
            lambda dim: magi2.make_ep_undispatch(parallel)(torch.zeros(4, 2, dim), group, [2, 2]),
            lambda dim: magi2.make_scatter_heads_gather_seqlen(parallel)([torch.zeros(2, 4, dim)], [2, 2], group)[0],
            lambda dim: magi2.make_scatter_seqlen_gather_heads(parallel)(torch.zeros(4, 2, dim), [2, 2], group),
        ]
        for call in calls:
            assert outcome(lambda call=call: call(0)) == ("right", "")
            seen.append(outcome(lambda call=call: call(0 if rank == 1 else 3)))
    return seen


def test_the_wrappers_shortcuts_are_checked_too(ranks: Any) -> None:
    told = ranks(wrapper_shortcuts, 2)
    assert told[0] == told[1]
    for kind, text in told[0]:
        assert kind == "DisagreementError"
        assert "dim: 3 on rank 0 (global 0), 0 on rank 1 (global 1)" in text


# --- The check: when it is on --------------------------------------------------------------------------------------


def on_for_some(rank: int, nproc: int, store: str) -> tuple[list[str], Outcome]:
    check = {"VLLM_MUSA_HEADPAR_CHECK": "1"} if rank == 2 else {}
    with process_group(rank, nproc, store), claiming(), environment(**check), model.warnings_logged() as warnings:
        group = dist.group.WORLD
        round_trip(group, (1, 0, 2))
        return list(warnings), outcome(lambda: bring(group, say((2, 2, 2), dim=rank + 1)))


def test_the_check_is_on_for_all_where_it_is_on_for_some(ranks: Any) -> None:
    told = ranks(on_for_some, 3)
    assert told[0] == told[1] == told[2]
    warnings, (kind, text) = told[0]
    assert len(warnings) == 1
    assert "VLLM_MUSA_HEADPAR_CHECK" in warnings[0]
    assert kind == "DisagreementError"
    assert "1 on rank 0 (global 0), 2 on rank 1 (global 1), 3 on rank 2 (global 2)" in text


def checked_cost(rank: int, nproc: int, store: str) -> None:
    """With the check on an exchange still launches nothing beside its own, and leaves no keys behind."""
    with process_group(rank, nproc, store), claiming(), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        group = dist.new_group([0, 1, 2])
        round_trip(group, (1, 0, 2))
        shared = dist.distributed_c10d._get_default_store()
        dist.barrier()
        before = shared.num_keys()
        dist.barrier()
        for _ in range(5):
            assert in_use(group, (2, 1, 2)) == "p2p"
            outcome(lambda: bring(group, say((2, 2, 2), dim=rank + 1)))
            wrong = rank == 1
            outcome(lambda wrong=wrong: bring(group, say((2, 2, 2), heads=5 if wrong else 6)))
            bring(group, say((0, 0, 0)))
        dist.barrier()
        after = shared.num_keys()
        dist.barrier()
        assert after == before


def test_the_check_costs_no_collective_and_leaves_no_keys(ranks: Any) -> None:
    ranks(checked_cost, 3)


def values_are_right(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        parts = replica_token_counts((3, 1, 0, 2), 2)
        layout = HeadParallelLayout((3, 1, 0, 2), rank, parts)
        inputs = random_inputs((3, 1, 0, 2), 4)
        there = scatter_heads_gather_tokens(inputs[rank], dist.group.WORLD, layout)
        assert model.bits(there) == model.dispatch([model.bits(x) for x in inputs], parts, 4)[rank]
        back = scatter_tokens_gather_heads(there, dist.group.WORLD, layout)
        assert model.bits(back) == model.bits(inputs[rank])


def test_checked_exchanges_are_right(ranks: Any) -> None:
    ranks(values_are_right, 4)


def without_store(rank: int, nproc: int, store: str) -> list[Outcome]:
    seen = []

    def no_store() -> Any:
        raise ValueError("no default store")

    with (
        process_group(rank, nproc, store),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", no_store),
    ):
        with environment(VLLM_MUSA_HEADPAR_CHECK="1"), model.no_collectives():
            for _ in range(2):
                seen.append(outcome(lambda: round_trip(dist.group.WORLD, (1, 2))))
        with environment():
            round_trip(dist.group.WORLD, (1, 2))
        with environment(), claiming(), model.warnings_logged() as warnings:
            round_trip(dist.group.WORLD, (1, 2))
            assert warnings == []
    return seen


def test_without_a_store_the_check_refuses(ranks: Any) -> None:
    for told in ranks(without_store, 2):
        assert len(told) == 2
        for kind, text in told:
            assert kind == "NoStoreError"
            assert "no default store" in text


def test_an_opaque_group_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with model.no_collectives(), environment(VLLM_MUSA_HEADPAR_CHECK="1"):
        monkeypatch.setattr(dist, "get_world_size", lambda asked: 2)
        monkeypatch.setattr(dist, "get_rank", lambda asked: 1)
        with pytest.raises(RuntimeError, match="store"):
            scatter_heads_gather_tokens(torch.ones(2, 4, 5), object(), HeadParallelLayout((3, 2), 1))


def test_a_disagreement_is_an_exchange_error() -> None:
    assert issubclass(DisagreementError, RuntimeError)


def gives_up_and_comes_again(rank: int, nproc: int, store: str) -> list[list[int]]:
    """Rank 0 gives up, then settles again; rank 1 comes only then. Both must have both notes."""
    with process_group(rank, nproc, store) as group:
        board = board_of(group)
        if rank == 0:
            with pytest.raises(DisagreementError, match="rank 1"):
                board.settle("a first exchange", {"rank": rank}, timedelta(milliseconds=300))
        dist.barrier()
        settled = board.settle("a first exchange", {"rank": rank})
        notes = [[note["rank"] for note in settled.notes.values()]]
        notes.append([note["rank"] for note in board.meet("another", {"rank": rank})])
        dist.barrier()
        return notes


def test_a_rank_that_gave_up_can_meet_again(ranks: Any) -> None:
    for notes in ranks(gives_up_and_comes_again, 2):
        assert notes == [[0, 1], [0, 1]]
