"""`shared`: what is its own besides being an exchange, which the tests of exchanges see to."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, environment, process_group

from vllm_musa_headpar import HeadParallelLayout, scatter_heads_gather_tokens, scatter_tokens_gather_heads
from vllm_musa_headpar import exchange as core
from vllm_musa_headpar.config import EXCHANGE
from vllm_musa_headpar.errors import ExchangeError
from vllm_musa_headpar.implementations import shared, window
from vllm_musa_headpar.testing.counters import counting
from vllm_musa_headpar.testing.ranks import RankFailure, run_ranks

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not Path(window.FOLDER).is_dir(), reason=f"needs POSIX shared memory in {window.FOLDER}"),
]


def there_and_back(group: Any, counts: tuple[int, ...], dim: int, seed: int = 0) -> None:
    rank = dist.get_rank(group)
    layout = HeadParallelLayout(counts, rank)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tensor = torch.randint(256, (counts[rank], 2 * len(counts), dim), dtype=torch.uint8, generator=generator)
    mine = scatter_heads_gather_tokens(tensor, group, layout)
    assert torch.equal(scatter_tokens_gather_heads(mine, group, layout), tensor)


def named() -> set[str]:
    """What is in shared memory under a name, but for what Python and torch keep there in other processes."""
    return {name for name in os.listdir(window.FOLDER) if not name.startswith(("sem.", "psm_", "torch_"))}


def open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def segments(but: frozenset[str] = frozenset()) -> list[str]:
    """Shared memory that this process has mapped, a name (of its inode) each time; without some of them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[5] for line in lines if f"{window.FOLDER}/" in line]
    return [name for name in names if name not in but]


def growing(rank: int, nproc: int, store: str) -> tuple[int, int, int]:
    """Sizes up and down, uneven ones, in and out of inference mode; how many segments are mapped at the end, how many
    of them are files that are open, and how many remain without the group.
    """
    earlier = frozenset(segments())  # Python's semaphores are there too, of which other tests may have made some
    with process_group(rank, nproc, store), environment(**{EXCHANGE: "shared"}):
        group = dist.new_group()
        for number, dim in enumerate((1, 100_000, 5, 300_000, 300_001, 900_000, 7)):
            counts = tuple((number + other) % 3 for other in range(nproc))
            with torch.inference_mode(number % 2 == 0):
                there_and_back(group, counts, dim, number)
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()]
        files = sum(name.startswith(f"{window.FOLDER}/") and name not in earlier for name in opened)
        mapped = len(segments(earlier))
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return mapped, files, len(segments(earlier))


def test_segments_grow_and_go_with_their_group(ranks: RankPool) -> None:
    before = named()
    for mapped, files, left in ranks(growing, 3):
        # The records and the segment of each rank, and this rank's own last but one.
        assert 6 <= mapped <= 3 + 3 + 2
        assert files <= mapped + 3, "Python keeps a file open for each mapping; the owner has another for its peers"
        assert left == 0
    assert named() <= before


def killed(rank: int, nproc: int, store: str) -> None:
    with process_group(rank, nproc, store, timeout=10) as group, environment(**{EXCHANGE: "shared"}):
        there_and_back(group, (3,) * nproc, 100_000)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        there_and_back(group, (3,) * nproc, 100_000)


def test_nothing_is_left_of_a_process_that_is_killed_and_its_peers_fail() -> None:
    before = named()
    with pytest.raises(RankFailure) as raised:
        run_ranks(killed, 2, timeout=60)
    assert "through shared failed" in str(raised.value)
    assert named() <= before


def without_room(rank: int, nproc: int, store: str) -> tuple[list[int], list[str]]:
    """Memory is short on one rank for a while: those exchanges go through the reference on all."""
    said: list[str] = []
    seen = []
    with process_group(rank, nproc, store) as group, environment(**{EXCHANGE: "shared"}):
        there_and_back(group, (2,) * nproc, 1)
        none_left = mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device"))
        with mock.patch.object(shared, "warn_once", said.append):
            for short in (True, False, True):
                with none_left if short and rank == 1 else nullcontext(), counting() as counts:
                    there_and_back(group, (2,) * nproc, 1_000_000 * (1 + len(seen)))
                seen.append(counts.collectives["all_to_all_single"])
    return seen, said


def test_where_memory_is_short_all_ranks_use_the_reference(ranks: RankPool) -> None:
    for seen, said in ranks(without_room, 3):
        assert seen == [2, 0, 2]
        assert set(said) == {"an exchange went through all_to_all: /dev/shm has no room for it on a rank of its group"}


def test_more_than_there_is_is_refused_before_it_is_taken() -> None:
    """Never really asked for: the kernel would take the memory of everything else on the machine for it."""
    room = window._room()
    real = os.statvfs(window.FOLDER)
    assert 0 < room <= real.f_bavail * real.f_frsize
    with mock.patch.object(os, "posix_fallocate") as reserve:
        with pytest.raises(OSError, match=r"bytes of shared memory are needed, and \d+ can be had in /dev/shm"):
            window._Segment(4 * room)
        small = mock.Mock(f_bavail=16, f_frsize=4096)
        with mock.patch.object(os, "statvfs", return_value=small):
            assert window._room() == 65536
            with pytest.raises(OSError, match="65537 bytes of shared memory are needed, and 65536 can be had"):
                window._Segment(65537)
        reserve.assert_not_called()


def elsewhere(rank: int, nproc: int, store: str) -> tuple[str, list[str]]:
    """Rank 1 says that it is a process that is not here, as one on another machine would."""
    said: list[str] = []
    from vllm_musa_headpar import agreement
    from vllm_musa_headpar.agreement import self_test

    number = os.getpid() if rank == 0 else 1
    with (
        process_group(rank, nproc, store) as group,
        environment(**{EXCHANGE: "shared"}),
        mock.patch.object(os, "getpid", return_value=number),
        mock.patch.object(self_test, "warn_once", said.append),
    ):
        there_and_back(group, (2,) * nproc, 5)
        return agreement.state_of(group, torch.device("cpu")).name, said


def test_ranks_on_several_machines_use_the_reference(ranks: RankPool) -> None:
    for name, said in ranks(elsewhere, 3):
        assert name == "all_to_all"
        assert len(said) == 1
        assert "shared failed its self-test" in said[0]
        assert "cannot open the memory of" in said[0]


def disagreeing(rank: int, nproc: int, store: str) -> str:
    with process_group(rank, nproc, store) as group, environment(**{EXCHANGE: "shared"}):
        there_and_back(group, (2,) * nproc, 5)
        with pytest.raises(ExchangeError) as raised:
            there_and_back(group, (2,) * nproc, 5 + rank)
        return str(raised.value)


def test_ranks_that_bring_different_sizes_are_told(ranks: RankPool) -> None:
    for rank, text in enumerate(ranks(disagreeing, 2)):
        other = 1 - rank
        assert f"rank {other} sends {4 * (5 + other)} bytes, and rank {rank} expects {4 * (5 + rank)}" in text


def one_signal(rank: int, nproc: int, store: str) -> tuple[int, int]:
    """Queries, keys and values of several types and sizes as one launch."""
    with process_group(rank, nproc, store) as group, environment(**{EXCHANGE: "shared"}):
        there_and_back(group, (2,) * nproc, 5)
        layout = HeadParallelLayout((3, 2), rank)
        tensors = [
            torch.arange(layout.local_tokens * 4 * dim).view(layout.local_tokens, 4, dim).to(dtype) + rank
            for dim, dtype in ((3, torch.uint8), (5, torch.float64), (1, torch.bfloat16))
        ]
        with counting() as counts:
            found = core.dispatch_each(tensors, group, [layout] * 3, [None] * 3)
        for tensor, result in zip(tensors, found, strict=True):
            with environment(**{EXCHANGE: "all_to_all"}):
                assert torch.equal(scatter_heads_gather_tokens(tensor, dist.group.WORLD, layout), result)
        return counts.total_collectives, counts.bytes_between_ranks


def test_several_exchanges_have_one_signal(ranks: RankPool) -> None:
    assert ranks(one_signal, 2) == [(1, 0)] * 2


def test_where_it_cannot_be_used() -> None:
    cpu = torch.device("cpu")
    assert shared.unusable(None, cpu, "gloo") is None
    assert shared.unusable(None, torch.device("meta"), "gloo") == "shared is for CPU tensors, not for meta"
    with mock.patch.object(shared, "FOLDER", "/nowhere"):
        told = shared.unusable(None, cpu, "gloo")
    assert told == "shared needs POSIX shared memory, and /nowhere cannot be written"
    with mock.patch.object(shared.sys, "platform", "darwin"):
        assert shared.unusable(None, cpu, "gloo") == "shared needs Linux, this is darwin"
