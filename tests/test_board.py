"""The board that ranks leave notes on: second lives on one store, threads, and notes that are not ours."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import model
import pytest
import torch
import torch.distributed as dist
from pool import environment, process_group
from test_agreement import bring, claiming, counted_round_trip, in_use, outcome, round_trip, say

from vllm_musa_headpar import agreement
from vllm_musa_headpar.agreement import board as boards
from vllm_musa_headpar.agreement import first_use
from vllm_musa_headpar.agreement.board import board_of, quoted

pytestmark = pytest.mark.cpu

CHECKED = {"VLLM_MUSA_HEADPAR_CHECK": "1"}
CPU = torch.device("cpu")

# --- Lives --------------------------------------------------------------------------------------------------------


def open_store(kind: str, path: str, rank: int, nproc: int) -> Any:
    """One store that outlives the process groups made on it."""
    if kind == "file":
        return dist.FileStore(path, nproc)
    port_of = dist.FileStore(path, nproc)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, nproc, True, timedelta(seconds=20), wait_for_workers=False)
        port_of.set("port", str(server.port))
        return server
    return dist.TCPStore("127.0.0.1", int(port_of.get("port")), nproc, False, timedelta(seconds=20))


def in_step(store: Any, nproc: int, name: str, rank: int) -> None:
    """All ranks have come this far: a life begins where every rank has left the one before."""
    store.set(f"step/{name}/{rank}", "")
    store.wait([f"step/{name}/{other}" for other in range(nproc)], timedelta(seconds=20))


def end(store: Any, nproc: int, name: str, rank: int) -> None:
    """End a life. What Gloo itself left would be read by Gloo in the next one, so that goes; our notes stay."""
    in_step(store, nproc, name, rank)
    default = dist.distributed_c10d._get_default_store()
    for key in (f"cpu//0/{rank}", f"1//cpu//0/{rank}"):
        default.delete_key(key)
    dist.destroy_process_group()


def given_up(group: Any, rank: int) -> None:
    """Rank 1 leaves an exchange out, the others give up."""
    round_trip(group, (1, 1))
    if rank == 0:
        assert outcome(lambda: bring(group, say((2, 2), heads=4)))[0] == "DisagreementError"


def refused(group: Any, rank: int) -> None:
    """Rank 1 refuses its input, and nobody reads that."""
    round_trip(group, (1, 1))
    if rank == 1:
        assert outcome(lambda: bring(group, say((2, 2), heads=3)))[0] == "ValueError"


def half_settled(group: Any, rank: int) -> None:
    """Only rank 0 comes to its first use, and gives up."""
    if rank == 0:
        assert outcome(lambda: round_trip(group, (1, 1)))[0] == "DisagreementError"


def half_settled_and_killed(group: Any, rank: int) -> None:
    """Only rank 1 comes, and is gone before it can take its note away: as when its process is killed."""
    if rank == 1:
        with mock.patch.object(boards, "_Pause", side_effect=KeyboardInterrupt):
            try:
                round_trip(group, (1, 1))
            except KeyboardInterrupt:
                return
        raise AssertionError("rank 1 did not come to wait")


def asked_nothing(group: Any, rank: int) -> None:
    with environment():
        round_trip(group, (1, 1))


def nothing(group: Any, rank: int) -> None:
    pass


ENDINGS = (given_up, refused, half_settled, half_settled_and_killed, asked_nothing, nothing)


def lives(rank: int, nproc: int, path: str, kind: str, order: int) -> None:
    """One life after the other under the same names; each must find nothing of those before."""
    store = open_store(kind, path, rank, nproc)
    endings = ENDINGS[order:] + ENDINGS[:order]
    for life, ending in enumerate(endings):
        in_step(store, nproc, f"begin {life}", rank)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("the same", store),
            rank=rank,
            world_size=nproc,
            timeout=timedelta(seconds=20),
        )
        try:
            with claiming(), environment(**CHECKED):
                for group in (dist.group.WORLD, dist.new_group([0, 1])):
                    store.set_timeout(timedelta(seconds=1 if ending in (given_up, half_settled) else 20))
                    ending(group, rank)
                    store.set_timeout(timedelta(seconds=20))
                    in_step(store, nproc, f"ended {life} {group.group_name}", rank)
        finally:
            end(store, nproc, f"end {life}", rank)
        # A life without a fault, in which rank 0 or rank 1 comes first.
        in_step(store, nproc, f"begin right {life}", rank)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("the same", store),
            rank=rank,
            world_size=nproc,
            timeout=timedelta(seconds=20),
        )
        try:
            with claiming(), environment(**CHECKED), model.warnings_logged() as warnings:
                for group in (dist.group.WORLD, dist.new_group([0, 1])):
                    if rank == life % 2:
                        store.wait([f"came/{life}/{group.group_name}"], timedelta(seconds=20))
                    else:
                        threading.Timer(0.2, store.set, (f"came/{life}/{group.group_name}", "")).start()
                    for _ in range(4):
                        round_trip(group, (2, 1))
                    assert first_use.state_of(group, CPU).check
                    assert in_use(group, (1, 2)) == "p2p"
                    kind_of, text = outcome(lambda group=group: bring(group, say((2, 2), heads=4, dim=rank + 1)))
                    assert kind_of == "DisagreementError"
                    assert "dim: 1 on rank 0 (global 0), 2 on rank 1 (global 1)" in text
                assert warnings == [], (ending, warnings)
        finally:
            end(store, nproc, f"end right {life}", rank)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_no_life_reads_what_an_earlier_one_left(ranks: Any, kind: str) -> None:
    ranks(lives, 2, kind, 0 if kind == "tcp" else 3)


def unproven(rank: int, nproc: int, store: str) -> list[str]:
    """Where the making of a group leaves nothing in the store, an old announcement can only mean the reference."""
    with process_group(rank, nproc, store), mock.patch.object(boards.Board, "_left_by", return_value=None):
        group = dist.group.WORLD
        if rank == 1:  # as an earlier life may have left it
            board_of(group).announce("the first exchange on cpu", {"exchange": "all_to_all", "check": False})
        dist.barrier()
        with environment(VLLM_MUSA_HEADPAR_EXCHANGE="p2p"), model.warnings_logged():
            if rank == 0:
                first_use.state_of(group, CPU)  # rank 1 comes only when this is settled
            dist.barrier()
            round_trip(group, (1, 2))
            return [first_use.state_of(group, CPU).name]


def test_an_announcement_whose_age_cannot_be_told_leads_all_ranks_to_the_reference(ranks: Any) -> None:
    assert ranks(unproven, 2) == [["all_to_all"], ["all_to_all"]]


# --- The end of the patience ----------------------------------------------------------------------------------------


class Watched:
    """A store with hooks that are called before, or after, each call of a name."""

    def __init__(self, store: Any, **hooks: Callable[..., None]) -> None:
        self._store, self._hooks = store, hooks

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._hooks.get(f"before_{name}", ignore)(*args)
            result = getattr(self._store, name)(*args)
            self._hooks.get(f"after_{name}", ignore)(result)
            return result

        return call


def ignore(*args: Any) -> None:
    pass


def watched(**hooks: Callable[..., None]) -> Any:
    """Patch: the boards' store with hooks."""
    connection = boards._connection
    return mock.patch.object(boards, "_connection", lambda store: Watched(connection(store), **hooks))


def patience_ends(when: Callable[[], None]) -> Any:
    """Patch: the boards' patience is at its end at the first pause, once `when` has returned."""

    def wait(pause: Any) -> bool:
        when()
        return False

    return mock.patch.object(boards._Pause, "wait", wait)


def gives_up_while_read(rank: int, nproc: int, path: str) -> tuple[str, str]:
    """Rank 2 does not come. Rank 0 gives up just when rank 1 has seen that its note is there."""
    with process_group(rank, nproc, path) as group:
        default = dist.distributed_c10d._get_default_store()

        written: list[None] = []

        def rank_0_is_there(there: bool) -> None:
            if there and len(written) == 2 and not default.check(["seen"]):  # and rank 0 can know that this one is
                default.set("seen", "")
                default.wait(["gave up"])

        hooks = watched(after_set=written.append, after_check=rank_0_is_there)
        told = ("", "")
        if rank != 2:
            with hooks if rank == 1 else contextlib.nullcontext():
                told = outcome(lambda: board_of(group).settle("a first exchange", {}, timedelta(seconds=2)))
        if rank == 0:
            default.wait(["seen"])
            default.set("gave up", "")
        dist.barrier()
        return told


def test_who_gives_up_does_not_hold_up_who_reads_its_note(ranks: Any) -> None:
    told = ranks(gives_up_while_read, 3)
    for kind, text in told[:2]:
        assert kind == "DisagreementError"
        assert "rank 2 (global 2) did not arrive" in text


def last_moment(rank: int, nproc: int, path: str, meeting: str, first: str) -> list[tuple[str, str]]:
    """Rank 0's patience ends after rank 1 has come, and before rank 0 has looked again: rank 1 finds all there.

    It has written that down by then ("done"), or is about to ("gives up").
    """
    with process_group(rank, nproc, path) as group:
        board = board_of(group)
        default = dist.distributed_c10d._get_default_store()
        written: list[str] = []

        def meets() -> None:
            notes: Any = board.meet("a topic", {"rank": rank}) if meeting == "meet" else None
            if notes is None:
                settled = board.settle("a topic", {"rank": rank}).notes
                notes = [settled[other] for other in range(nproc)]
            assert [note["rank"] for note in notes] == [0, 1]

        def before_set(*args: Any) -> None:
            """What tells rank 0 that rank 1 has come, or that it has seen rank 0, is held up."""
            written.append("")
            if len(written) == (1 if meeting == "meet" else 2):
                default.wait(["rank 0 has looked"])

        def after_set(result: None) -> None:
            default.set("rank 1 has come", "")

        def before_compare_set(*args: Any) -> None:
            if first == "gives up":
                default.set("rank 1 found all", "")
                default.wait(["rank 0 gave up"])

        def after_compare_set(result: bytes) -> None:
            default.set("rank 1 found all", "")

        def looked() -> None:
            default.set("rank 0 has looked", "")
            default.wait(["rank 1 found all"])

        if meeting == "meet":
            board.settle("a first exchange", {})
        elif rank == 0:
            default.wait(["rank 1 has come"])
        hooks = (before_set, after_set, before_compare_set, after_compare_set)
        held = watched(**{hook.__name__: hook for hook in hooks}) if rank == 1 else patience_ends(looked)
        with held:
            told = [outcome(meets)]
        default.set(f"rank {rank} gave up", "")
        dist.barrier()
        told.append(outcome(meets))
        dist.barrier()
        return told


@pytest.mark.parametrize("meeting", ["settle", "meet"])
def test_at_the_last_moment_all_are_done_or_none(ranks: Any, meeting: str) -> None:
    assert ranks(last_moment, 2, meeting, "done") == [[("right", "")] * 2] * 2
    first, second = ranks(last_moment, 2, meeting, "gives up")
    assert first[0][0] == second[0][0] == "DisagreementError"
    assert "rank 1 (global 1) did not arrive at a topic" in first[0][1]
    assert "rank 1 (global 1) came to a topic when rank 0 (global 0) had given up waiting" in second[0][1]
    assert first[1] == second[1] == ("right", "")


def foreign_outcome(rank: int, nproc: int, path: str) -> tuple[str, str]:
    with process_group(rank, nproc, path) as group:
        board = board_of(group)
        board.settle("a first exchange", {})
        dist.distributed_c10d._get_default_store().set(board._outcome(board._life, "a topic/0"), "\x1b[2J7")
        dist.barrier()
        told = outcome(lambda: board.meet("a topic", {}))
        dist.barrier()
        return told


def test_an_outcome_that_is_not_ours_is_named(ranks: Any) -> None:
    for kind, text in ranks(foreign_outcome, 2):
        assert kind == "BoardError"
        assert "outcome" in text
        assert text.isprintable()


# --- Threads ------------------------------------------------------------------------------------------------------


def in_threads(*calls: Callable[[], Any]) -> None:
    """Run at the same time; raises what one of them raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "stuck"
    if failures:
        raise failures[0]


def two_groups(rank: int, nproc: int, path: str, kind: str, crossed: bool, cloned: bool) -> None:
    store = open_store(kind, path, rank, nproc)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nproc, timeout=timedelta(seconds=20))
    try:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        order = groups[::-1] if crossed and rank else groups
        first = threading.Event()

        def exchanges(group: Any, waits: bool) -> None:
            # The thread that goes first waits for a rank whose thread for this group goes second.
            if waits:
                assert first.wait(10)
            else:
                threading.Timer(0.3, first.set).start()
            for _ in range(3):
                round_trip(group, (2, 1))

        unclonable = mock.patch.object(boards, "_clone", lambda store: store)
        with (
            claiming(),
            environment(**CHECKED),
            model.warnings_logged() as warnings,
            unclonable if not cloned else mock.patch.dict({}),
        ):
            in_threads(lambda: exchanges(order[0], False), lambda: exchanges(order[1], True))
            assert warnings == []
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize(("kind", "cloned"), [("tcp", True), ("tcp", False), ("file", True)])
def test_threads_at_different_groups_do_not_stall(ranks: Any, kind: str, crossed: bool, cloned: bool) -> None:
    ranks(two_groups, 2, kind, crossed, cloned, timeout=60)


def busy_connection(rank: int, nproc: int, path: str) -> None:
    """Another thread waits inside the process's one store connection, as torch itself does at times."""
    store = open_store("tcp", path, rank, nproc)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nproc, timeout=timedelta(seconds=20))
    try:
        group = dist.new_group([0, 1])
        with claiming(), environment(**CHECKED):
            board_of(group)
            another, awaited = store.clone(), f"rank {rank} may go on"
            waiting = threading.Thread(target=store.wait, args=([awaited], timedelta(seconds=50)), daemon=True)
            waiting.start()
            first_use.state_of(group, CPU)
            agreement.admit(group, CPU, "dispatch", lambda: {"rank": 0}, anything=False)
            assert waiting.is_alive()
            another.set(awaited, "")
            waiting.join()
    finally:
        dist.destroy_process_group()


def test_the_boards_have_a_connection_of_their_own(ranks: Any) -> None:
    ranks(busy_connection, 2)


def one_group(rank: int, nproc: int, store: str) -> None:
    """Two threads come to the first use of one group at the same time: it is settled and tried out once."""
    with process_group(rank, nproc, store), claiming(), environment(), model.warnings_logged() as warnings:
        for _ in range(5):
            group = dist.new_group([0, 1])
            together = threading.Barrier(2)
            states: list[Any] = []
            counted = mock.patch.object(first_use, "_settle", side_effect=first_use._settle)

            def first(group: Any = group, together: Any = together, states: list[Any] = states) -> None:
                together.wait()
                states.append(agreement.admit(group, CPU, "dispatch", dict, anything=True))

            with counted as settled:
                in_threads(first, first)
            assert settled.call_count == 1
            assert states[0] is states[1]
            assert (states[0].name, states[0].proven, states[0].used) == ("tuned", True, True)
            seen = counted_round_trip(group, (1, 2))
            assert (seen.total_collectives, seen.batches, seen.host_syncs) == (0, 2, 0)
        assert warnings == []


def test_a_first_use_that_overlaps_is_settled_once(ranks: Any) -> None:
    ranks(one_group, 2)


# --- Notes that are not ours --------------------------------------------------------------------------------------

FOREIGN = {
    "no JSON": "{",
    "no text": b"\xff\xfe\x00",
    "a list": "[1, 2]",
    "an empty object": "{}",
    "another object": '{"error": null}',
    "a number": "7",
    "null under our name": '{"headpar": null}',
    "deep": "[" * 100_000,
    "control characters": "\x1b[2J\r\n\x07",
    "megabytes": "x" * 3_000_000,
}


def foreign_notes(rank: int, nproc: int, path: str) -> list[tuple[str, str]]:
    """Rank 1's note is written over by someone else: at the first use, and at a later comparison."""
    seen = []
    with process_group(rank, nproc, path), claiming(), environment(**CHECKED):
        store = dist.distributed_c10d._get_default_store()
        for foreign in FOREIGN.values():
            group = dist.new_group([0, 1])
            board = board_of(group)
            if rank == 0:
                key = board._key("the first exchange on cpu", 1)
                store.set(key, foreign)
                seen.append(outcome(lambda group=group: round_trip(group, (1, 1))))
                store.delete_key(key)
            dist.barrier()
            round_trip(group, (1, 1))
            if rank == 0:
                store.set(board._keys(f"exchange {board.sequence}/0")[1], foreign)
                seen.append(outcome(lambda group=group: bring(group, say((2, 2), heads=4))))
            dist.barrier()
    return seen


def test_a_note_that_is_not_ours_is_named_with_its_rank_and_key(ranks: Any) -> None:
    told, _ = ranks(foreign_notes, 2)
    assert len(told) == 2 * len(FOREIGN)
    for kind, text in told:
        assert kind == "BoardError"
        assert "rank 1 (global 1)" in text
        assert "headpar/2/" in text
        assert text.isprintable()
        assert len(text) < 1000


def long_refusal(rank: int, nproc: int, path: str) -> tuple[str, str]:
    with process_group(rank, nproc, path, timeout=10), environment(**CHECKED):
        group = dist.group.WORLD
        round_trip(group, (1, 1))
        if rank == 1:

            def refuse() -> None:
                with agreement.telling(group, torch.zeros(1), "dispatch"):
                    raise KeyError("\x1b[2J\n" + "y" * 1_000_000)

            return outcome(refuse)
        return outcome(lambda: bring(group, say((2, 2), heads=4)))


def test_what_another_rank_says_is_quoted_and_cut(ranks: Any) -> None:
    kind, text = ranks(long_refusal, 2)[0]
    assert kind == "DisagreementError"
    assert "refused by its own rank, rank 1 (global 1): " in text
    assert "KeyError" in text
    assert text.isprintable()
    assert len(text) < 1000


def test_plain_values_stand_as_they_are_in_messages() -> None:
    assert quoted("torch.float32") == "torch.float32"
    assert quoted("a\nb") == repr("a\nb")
    assert quoted("z" * 10_000).startswith("zzz")
    assert len(quoted("z" * 10_000)) < 400


# --- Any exception is told, once ----------------------------------------------------------------------------------


class OddError(Exception):
    pass


def told_once(rank: int, nproc: int, path: str) -> list[tuple[str, str]]:
    """Exceptions of any type, through one or several contexts, and those that are not told at all."""
    seen = []
    with process_group(rank, nproc, path, timeout=20), environment(**CHECKED):
        group = dist.group.WORLD
        for error in (OddError("odd"), RuntimeError("as_strided"), AssertionError("asserted"), MemoryError("none")):

            def refuse(error: Exception = error) -> None:
                tensor = torch.zeros(1)
                with agreement.telling(group, tensor, "dispatch"), agreement.telling(group, CPU, "dispatch"):
                    raise error

            seen.append(outcome(refuse if rank == 1 else lambda: bring(group, say((2, 2), heads=4))))
            round_trip(group, (1, 2))  # the numbers are the same on both ranks still
            with agreement.telling(group, CPU, "dispatch"):  # what the comparison raises is not told again
                assert outcome(lambda: bring(group, say((2, 2), heads=4, dim=rank + 1)))[0] == "DisagreementError"
            round_trip(group, (1, 2))

            def disagree() -> None:
                with agreement.telling(group, CPU, "dispatch"):
                    bring(group, say((2, 2), heads=4, dim=rank + 1))

            assert outcome(disagree)[0] == "DisagreementError"
            round_trip(group, (1, 2))
    return seen


def test_any_exception_before_the_launch_is_told_once(ranks: Any) -> None:
    told, own = ranks(told_once, 2)
    for (kind, text), (raised, words) in zip(told, own, strict=True):
        assert kind == "DisagreementError"
        assert f"refused by its own rank, rank 1 (global 1): {raised}: {words}" in text


def test_with_the_check_off_nothing_is_told() -> None:
    with environment(), mock.patch.object(dist.distributed_c10d, "_get_default_store") as store:
        with pytest.raises(KeyError), agreement.telling(object(), CPU, "dispatch"):
            raise KeyError("own")
        assert store.call_count == 0


def test_notes_are_plain_json() -> None:
    assert json.loads(boards._write({"tokens": (1, 2)})) == {"headpar": {"tokens": [1, 2]}}
