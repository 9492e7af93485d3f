"""The counter: every rule with exact values, on the CPU and over Gloo."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_musa_headpar.testing.counters import Counts, counting

pytestmark = pytest.mark.cpu

KIB = 1024
INFERENCE = [contextlib.nullcontext, torch.inference_mode, torch.no_grad]


def matrix() -> torch.Tensor:
    """4 x 256 bytes."""
    return torch.arange(256, dtype=torch.float32).reshape(4, 64)


@pytest.mark.parametrize("mode", INFERENCE)
def test_copies_count_the_bytes_that_they_write(mode: Any) -> None:
    with mode():
        x = matrix()
        target = torch.empty(4, 64, dtype=torch.float64)
        with counting() as counts:
            target.copy_(x)
        assert (counts.bytes_copied, counts.bytes_allocated, counts.launches) == (2 * KIB, 0, 1)
        with counting() as counts:
            x.clone()
        assert (counts.bytes_copied, counts.bytes_allocated, counts.launches) == (KIB, KIB, 1)
        with counting() as counts:
            x.to(torch.bfloat16)
        assert (counts.bytes_copied, counts.bytes_allocated, counts.launches) == (KIB // 2, KIB // 2, 1)
        with counting() as counts:
            torch.cat([x, x[:2]])
        assert (counts.bytes_copied, counts.bytes_allocated, counts.launches) == (1536, 1536, 1)
        with counting() as counts:
            torch.cat([x[:1], x[1:]], out=x.new_empty(4, 64))
        assert (counts.bytes_copied, counts.bytes_allocated, counts.launches) == (KIB, KIB, 1)
        with counting() as counts:
            x.t().contiguous()
            x.t().reshape(-1)
        assert (counts.bytes_copied, counts.bytes_allocated, counts.launches) == (2 * KIB, 2 * KIB, 2)


@pytest.mark.parametrize("mode", INFERENCE)
def test_views_and_bare_allocations_launch_nothing(mode: Any) -> None:
    with mode():
        x = matrix()
        with counting() as counts:
            x.view(torch.uint8).view(-1)[3:].as_strided((2, 2), (4, 1))
            x.contiguous().reshape(2, -1).split(1)
            x.unbind(0), x.t(), x.detach(), x.expand(2, 4, 64), x.to(torch.float32)
            x.chunk(2)[0].permute(1, 0).unsqueeze(0)
        assert counts == Counts()
        with counting() as counts:
            torch.empty(4, 64), x.new_empty(4, 64), torch.empty_like(x), torch.empty_strided((2, 2), (64, 1))
        assert counts == Counts(bytes_allocated=3 * KIB + 66 * 4)


def test_kernels_launch_and_empty_ones_do_not() -> None:
    x = matrix()
    with counting() as counts:
        x + x
        x.mul_(2)
        x.index_select(0, torch.tensor([1, 0]))
        torch.zeros(4, 64)
    assert (counts.launches, counts.bytes_copied) == (4, 0)
    assert counts.bytes_allocated == KIB + 2 * 256 + KIB
    with counting() as counts:
        x[:0].clone()
        x[:0].copy_(x[:0])
        x[:, :0] + 1
        torch.cat([x[:0], x[:0]])
    assert counts == Counts()


@pytest.mark.parametrize("mode", INFERENCE)
def test_host_reads(mode: Any) -> None:
    with mode():
        x = matrix()
        with counting() as counts:
            x[0, 1].item(), int(x[0, 1]), float(x[0, 1]), bool(x[0, 1])
        assert counts == Counts(host_syncs=4)
        with counting() as counts:
            x.tolist(), x.cpu(), x.numpy()
        assert counts == Counts(host_syncs=3)
        with counting() as counts:
            x.nonzero()
            x[x > 3]
            torch.equal(x, x)
        assert counts.host_syncs == 3
        with counting() as counts:
            x[torch.tensor([0, 1])]
        assert counts.host_syncs == 0


def test_blocks_nest_and_leave_everything_as_it_was() -> None:
    x = matrix()
    names = ("all_reduce", "all_to_all_single", "batch_isend_irecv", "barrier", "broadcast")
    before = [getattr(dist, name) for name in names]
    methods = dict(vars(torch.Tensor))
    with counting() as outer:
        x.clone()
        with counting() as inner:
            x.clone()
            x.tolist()
        with pytest.raises(ZeroDivisionError), counting():
            raise ZeroDivisionError
        x.tolist()
    assert (inner.bytes_copied, inner.host_syncs) == (KIB, 1)
    assert (outer.bytes_copied, outer.host_syncs) == (2 * KIB, 2)
    x.clone()
    assert outer.bytes_copied == 2 * KIB
    assert [getattr(dist, name) for name in names] == before
    assert dict(vars(torch.Tensor)) == methods


def test_a_wrapper_put_over_the_counter_survives_it() -> None:
    before = dist.batch_isend_irecv
    try:
        with counting():
            counted = dist.batch_isend_irecv
            wrapper = dist.batch_isend_irecv = lambda operations: counted(operations)
        assert dist.batch_isend_irecv is wrapper
        with pytest.raises(IndexError):
            wrapper([])
    finally:
        dist.batch_isend_irecv = before


def test_a_call_that_raises_counts_nothing() -> None:
    with counting() as counts, pytest.raises(IndexError):
        dist.batch_isend_irecv([])
    assert counts == Counts()


def communicate(rank: int, nproc: int, store: str) -> dict[str, Counts]:
    """Each collective once, in 3 ranks over Gloo, with tensors of 96 bytes for the most part."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nproc)
    pair = dist.new_group([0, 1])
    x = torch.arange(24, dtype=torch.float32)
    results: dict[str, Counts] = {}

    kept = dist.all_to_all_single
    with counting() as results["kept from before"]:
        kept(x.clone(), x)
    with counting() as results["all_to_all_single"]:
        dist.all_to_all_single(torch.empty(24), x)
    # Rank r has r + 1 rows of 8 bytes for every rank.
    mine, sizes = torch.zeros(3 * (rank + 1), 2), [rank + 1] * 3
    with counting() as results["uneven"]:
        dist.all_to_all_single(
            torch.empty(6, 2), mine, output_split_sizes=[1, 2, 3], input_split_sizes=sizes, group=None
        )
    with counting() as results["all_gather"]:
        dist.all_gather([torch.empty(24) for _ in range(3)], x)
    with counting() as results["all_gather_into_tensor"]:
        dist.all_gather_into_tensor(torch.empty(72), x)
    with counting() as results["all_reduce"]:
        dist.all_reduce(x.clone())
    with counting() as results["broadcast"]:
        dist.broadcast(x, src=1)
    with counting() as results["reduce"]:
        dist.reduce(x.clone(), 1)
    with counting() as results["gather"]:
        dist.gather(x, [torch.empty(24) for _ in range(3)] if rank == 2 else None, dst=2)
    with counting() as results["scatter"]:
        dist.scatter(torch.empty(24), [x, x, x] if rank == 0 else None, src=0)
    with counting() as results["barrier"]:
        dist.barrier()
    with counting() as results["all_gather_object"]:
        dist.all_gather_object([None] * 3, rank)
    if rank < 2:
        with counting() as results["subgroup"]:
            dist.all_reduce(x.clone(), group=pair)
    received = [torch.empty(24), torch.empty(24)]
    with counting() as results["batch"]:
        operations = [dist.P2POp(dist.isend, x, group_peer=(rank + step) % 3) for step in (1, 2)]
        operations += [dist.P2POp(dist.irecv, received[step - 1], group_peer=(rank - step) % 3) for step in (1, 2)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    with counting() as outer, counting() as results["nested"]:
        dist.all_reduce(x.clone())
    assert outer == results["nested"]
    with counting() as results["after a failure"]:
        with contextlib.suppress(Exception):
            dist.all_to_all_single(torch.empty(3), torch.empty(5))
        dist.barrier()
    dist.destroy_process_group()
    return results


def one(name: str, **others: int) -> Counts:
    counts = Counts(launches=1, **others)
    counts.collectives[name] = 1
    return counts


def test_communication(ranks: Any) -> None:
    n = 96
    for rank, results in enumerate(ranks(communicate, 3)):
        gathered = 2 * n
        assert results["kept from before"].total_collectives == 0
        assert results["all_to_all_single"] == one("all_to_all_single", bytes_between_ranks=64, bytes_allocated=n)
        assert results["uneven"] == one("all_to_all_single", bytes_between_ranks=2 * 8 * (rank + 1), bytes_allocated=48)
        assert results["all_gather"] == one("all_gather", bytes_between_ranks=gathered, bytes_allocated=3 * n)
        assert results["all_gather_into_tensor"] == one(
            "all_gather_into_tensor", bytes_between_ranks=gathered, bytes_allocated=3 * n
        )
        reduced = results["all_reduce"]
        assert reduced.bytes_between_ranks == 2 * n * 2 // 3
        assert (reduced.launches, reduced.bytes_copied) == (2, n), "the clone is one, the reduction the other"
        assert (reduced.total_collectives, reduced.communication_launches) == (1, 1)
        assert results["broadcast"] == one("broadcast", bytes_between_ranks=gathered if rank == 1 else 0)
        assert results["reduce"].bytes_between_ranks == (0 if rank == 1 else n)
        assert results["gather"].bytes_between_ranks == (0 if rank == 2 else n)
        assert results["scatter"].bytes_between_ranks == (gathered if rank == 0 else 0)
        assert results["barrier"] == one("barrier", host_syncs=1)
        assert results["all_gather_object"] == one("all_gather_object", host_syncs=1)
        assert results["batch"] == Counts(batches=1, messages=2, launches=1, bytes_between_ranks=gathered)
        assert results["batch"].communication_launches == 1
        assert results["after a failure"].collectives == {"barrier": 1}
        if rank < 2:
            assert results["subgroup"].bytes_between_ranks == n
