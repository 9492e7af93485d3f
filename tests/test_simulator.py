"""The simulated MUSA device and MCCL group.

torch's device registration cannot be undone, so all cases run in processes of their own: the device cases
in one, the group cases in three ranks, each case on a new group. A test here only reads what its case came
to. Cases that say what any MUSA device does are marked `musa`, those about the simulator itself `cpu`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_musa_headpar.testing import mccl, musa
from vllm_musa_headpar.testing.counters import counting
from vllm_musa_headpar.testing.mccl import HostSyncError, MCCLRuleError
from vllm_musa_headpar.testing.ranks import run_ranks

SIMULATED = importlib.util.find_spec("torch_musa") is None
Group = Any

DEVICE_CASES: dict[str, Callable[[], None]] = {}
GROUP_CASES: dict[str, Callable[[int, int, Group], None]] = {}
MARKS: dict[str, str] = {}


def case(mark: str, cases: dict[str, Any]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        cases[function.__name__] = function
        MARKS[function.__name__] = mark
        return function

    return register


def on_device(values: torch.Tensor) -> torch.Tensor:
    return values.to("musa")


def breaks(rule: str) -> Any:
    return pytest.raises(MCCLRuleError, match=f"rule '{rule}' broken")


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """For breaches that only waiting can find. Elsewhere a busy machine may keep a rank waiting."""
    mccl.install(patience=timedelta(seconds=1))
    yield
    mccl.install(patience=timedelta(seconds=20))


# --- The device ---------------------------------------------------------------------------------------


@case("musa", DEVICE_CASES)
def making_tensors() -> None:
    for tensor in (
        torch.empty(2, 3, device="musa"),
        torch.empty((2, 3), device="musa:0", dtype=torch.bfloat16),
        torch.empty_strided((2, 3), (3, 1), device="musa"),
        torch.zeros(2, 3, device="musa"),
        torch.ones(2, 3, device="musa"),
        torch.full((2, 3), 5, device="musa"),
        torch.randn(2, 3, device="musa"),
        torch.arange(6, device="musa").view(2, 3),
        torch.tensor([[1, 2, 3], [4, 5, 6]], device="musa"),
        torch.zeros(2, 3).to("musa"),
        torch.zeros(2, 3, device="musa").new_empty(2, 3),
        torch.zeros(2, 3, device="musa").new_zeros((2, 3)),
        torch.empty_like(torch.zeros(2, 3, device="musa")),
    ):
        assert str(tensor.device) == "musa:0"
        assert tensor.device.type == "musa"
        assert tensor.shape == (2, 3)
        assert tensor.is_contiguous()
    assert torch.ones(2, device="musa").tolist() == [1, 1]
    assert torch.arange(1, 7, 2, device="musa").tolist() == [1, 3, 5]
    assert torch.tensor([1.5], device="musa").item() == 1.5
    assert torch.ones(2, device="musa").new_zeros(2, device="cpu").device.type == "cpu"


@case("musa", DEVICE_CASES)
def values_go_there_and_back() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        values = torch.randint(0, 2, (3, 4)).to(dtype)
        back = on_device(values).cpu()
        assert back.device.type == "cpu"
        assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))
    x = torch.zeros(4, device="musa")
    x.copy_(torch.arange(4.0))
    host = torch.empty(4)
    host.copy_(x)
    assert host.tolist() == x.tolist() == [0, 1, 2, 3]
    assert x.to("cpu", torch.int32).dtype == torch.int32


def check_views() -> None:
    expected = torch.arange(24.0).reshape(2, 3, 4)
    x = on_device(expected.clone())
    for view in (
        lambda t: t[1],
        lambda t: t[:, 1:, ::2],
        lambda t: t.transpose(0, 2),
        lambda t: t.permute(2, 0, 1)[1:, :, 1],
        lambda t: t.view(6, 4)[2:5],
        lambda t: t.as_strided((2, 2), (5, 2), 3),
        lambda t: t.split([1, 2], dim=1)[1],
        lambda t: t.unbind(2)[3],
        lambda t: t.flatten(0, 1).narrow(0, 1, 3).unflatten(1, (2, 2)),
        lambda t: t.view(torch.uint8)[..., 4:8].view(torch.float32),
        lambda t: t[0].expand(3, 3, 4),
    ):
        ours, theirs = view(x), view(expected)
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        assert ours.storage_offset() == theirs.storage_offset()
        assert ours.is_contiguous() == theirs.is_contiguous()
        assert ours.tolist() == theirs.tolist()
        assert ours.contiguous().is_contiguous()
    view_of_view = x[1:].view(-1)[2:10].view(2, 4)[:, 1]
    view_of_view.fill_(-1)
    expected[1:].view(-1)[2:10].view(2, 4)[:, 1] = -1
    assert torch.equal(x.cpu(), expected)
    x[0].copy_(x[1])
    expected[0].copy_(expected[1])
    x.view(torch.uint8)[:, 0, :4] = 255
    expected.view(torch.uint8)[:, 0, :4] = 255
    assert torch.equal(x.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert x.reshape(-1).view(2, 3, 4)[1, 2, 3].item() == expected[1, 2, 3].item()


@case("musa", DEVICE_CASES)
def views_share_memory() -> None:
    check_views()
    with torch.no_grad():
        check_views()
    with torch.inference_mode():
        check_views()


@case("musa", DEVICE_CASES)
def computing() -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 3)
    x, y = on_device(a), on_device(b)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close((x @ y).cpu(), a @ b)
            assert torch.equal(torch.cat([x, x[:2]]).cpu(), torch.cat([a, a[:2]]))
            out = torch.empty(8, 6, device="musa")
            torch.cat([x, x], out=out)
            assert torch.equal(out.cpu(), torch.cat([a, a]))
            assert bool((x == x).all())
            assert x.min().item() == a.min().item()
            order = torch.tensor([2, 0])
            assert torch.equal(x[on_device(order)].cpu(), a[order])
            assert torch.equal(x.index_select(0, on_device(order)).cpu(), a[order])
            assert torch.equal(x.topk(2).values.cpu(), a.topk(2).values)
            linear = torch.nn.Linear(6, 2)
            expected = linear(a)
            torch.testing.assert_close(linear.to("musa")(x).cpu(), expected)
            assert linear.to(torch.bfloat16).weight.dtype == torch.bfloat16
            q = on_device(torch.randn(1, 2, 5, 8))
            assert torch.nn.functional.scaled_dot_product_attention(q, q, q).device.type == "musa"
    target = torch.zeros(4, 6, device="musa")
    target[on_device(torch.tensor([1]))] = x[:1]
    assert torch.equal(target[1].cpu(), a[0])


@case("musa", DEVICE_CASES)
def gradients() -> None:
    x = on_device(torch.randn(3, 3)).requires_grad_()
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "musa"
    torch.testing.assert_close(x.grad.cpu(), 2 * x.detach().cpu())
    assert not x.detach().requires_grad


@case("musa", DEVICE_CASES)
def devices_do_not_mix() -> None:
    x, host = torch.ones(3, device="musa"), torch.ones(3)
    for mix in (
        lambda: x + host,
        lambda: host + x,
        lambda: torch.cat([x, host]),
        lambda: x.add_(host),
        lambda: torch.where(x > 0, x, host),
        lambda: torch.mm(x[None], host[:, None]),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            mix()
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert (torch.tensor(1.0) - x).device.type == "musa"


@case("cpu", DEVICE_CASES)
def installing_twice_changes_nothing() -> None:
    before = dist.batch_isend_irecv
    musa.install()
    mccl.install()
    assert dist.batch_isend_irecv is before
    assert torch.musa.is_available()  # type: ignore[attr-defined]
    assert dist.get_default_backend_for_device("musa") == "mccl"


@case("cpu", DEVICE_CASES)
def what_the_simulator_cannot_do_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="resize"):
        torch.cat([torch.ones(2, device="musa")], out=torch.empty(0, device="musa"))
    with pytest.raises(TypeError, match="simulated MUSA"):
        musa.raw_of(torch.ones(1))


@case("cpu", DEVICE_CASES)
def host_syncs_can_be_forbidden() -> None:
    x = torch.ones(3, device="musa")
    for sync in (
        lambda: x[0].item(),
        lambda: bool(x[0]),
        lambda: int(x[0]),
        lambda: float(x.sum()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x.to("cpu"),
        lambda: torch.empty(3).copy_(x),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
        lambda: torch.musa.synchronize(),  # type: ignore[attr-defined]
    ):
        sync()
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode(), musa.forbid_host_sync(), pytest.raises(HostSyncError, match="rule 'no host sync' broken"):
                sync()
    with musa.forbid_host_sync():
        x.clone().copy_(x + 1)
        torch.ones(3).to("musa")
        x[on_device(torch.tensor([0]))]
    assert x.tolist() == [1, 1, 1]


@case("cpu", DEVICE_CASES)
def counting_on_the_device_is_counting_on_the_cpu() -> None:
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            counts = []
            for device in ("cpu", "musa"):
                x = torch.zeros(4, 64).to(device)
                with counting() as count:
                    torch.empty(4, 64, device=device).copy_(x)
                    torch.cat([x.t().contiguous(), x.t().reshape(64, 4)])
                    torch.zeros(4, device=device).add_(x[0, 0]).view(2, 2).to(torch.float64)
                    x[0].tolist(), x[0].cpu(), x[0, 0].item(), x.nonzero()
                counts.append(count)
            assert counts[0] == counts[1]
            assert counts[0].host_syncs == 4


@case("cpu", DEVICE_CASES)
def overlaps_are_exact() -> None:
    base = torch.arange(240).view(6, 8, 5)
    views = [
        base,
        base[:, :3],
        base[:, 3:],
        base[:, 3:4, 2:],
        base[1:4],
        base[2, 5],
        base[::2],
        base[1::2, :, 1],
        base[..., ::2],
        base[..., 1::2],
        base.transpose(0, 2)[1:3, 2:4],
        base.as_strided((4, 3), (7, 2), 11),
        base[3, 3, 3],
        base[0].expand(2, 8, 5),
        base[2:2],
    ]
    for one in views:
        for other in views:
            shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
            assert musa.overlap(one, other) == bool(shared), (one.shape, other.shape)
    assert not musa.overlap(base, base.clone())
    assert musa.overlap(base.view(torch.uint8)[0, 0, 3:5], base[0, 0, 0])
    assert not musa.overlap(base.view(torch.uint8)[0, 0, 3:5], base[0, 0, 1])


@case("cpu", DEVICE_CASES)
def buffers_in_flight_are_guarded() -> None:
    sent, received = torch.zeros(4, 6, device="musa"), torch.zeros(4, 6, device="musa")
    flight = musa.begin_flight([sent[1:3].raw], [received[:, 2:4].raw])  # type: ignore[attr-defined]
    for touch in (
        lambda: received.cpu(),
        lambda: received.sum(),
        lambda: received[0, 3].item(),
        lambda: received.fill_(1),
        lambda: received.view(-1)[8:10].zero_(),
        lambda: torch.cat([sent, received]),
        lambda: sent.copy_(received),
        lambda: sent.zero_(),
        lambda: sent.view(torch.uint8)[2, 3].fill_(0),
        lambda: torch.add(sent[0], 1, out=sent[2]),
    ):
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode(), breaks("wait first"):
                touch()
    # What lies beside, what only reads a send buffer, and what touches no elements is allowed.
    received[:, :2].copy_(sent[:, :2])
    received[:, 4:].fill_(1)
    sent[0].fill_(1)
    sent.sum()
    torch.empty_like(received), received.new_zeros(3), received.t()[2:4].view(2, 4)
    musa.end_flight(flight)
    received.fill_(2)
    sent.fill_(2)


# --- The group ----------------------------------------------------------------------------------------


def ring(rank: int, nproc: int, group: Group, sent: torch.Tensor, received: torch.Tensor) -> list[dist.P2POp]:
    return [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % nproc),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % nproc),
    ]


def warm(group: Group) -> None:
    dist.all_reduce(torch.ones(1, device="musa"), group=group)


@case("musa", GROUP_CASES)
def collectives(rank: int, nproc: int, group: Group) -> None:
    x = torch.full((2,), float(rank), device="musa")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3, 3]
    flags = torch.tensor([rank == 1, False], device="musa")
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    assert flags.tolist() == [True, False]
    parts = [torch.empty(2, dtype=torch.int64, device="musa") for _ in range(nproc)]
    dist.all_gather(parts, torch.tensor([rank, 7], device="musa"), group=group)
    assert [part.tolist() for part in parts] == [[0, 7], [1, 7], [2, 7]]
    parts = [torch.empty(r, device="musa") for r in range(nproc)]
    dist.all_gather(parts, torch.full((rank,), float(rank), device="musa"), group=group)
    assert [part.tolist() for part in parts] == [[], [1], [2, 2]]
    whole = torch.empty(nproc, 2, dtype=torch.bfloat16, device="musa")
    dist.all_gather_into_tensor(whole, torch.full((2,), rank, dtype=torch.bfloat16, device="musa"), group=group)
    assert whole.tolist() == [[0, 0], [1, 1], [2, 2]]
    x = torch.full((), float(rank), device="musa")
    dist.broadcast(x, group_src=2, group=group)
    assert x.item() == 2
    dist.barrier(group=group)
    objects: list[Any] = [None] * nproc
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert x.item() == 6


@case("musa", GROUP_CASES)
def all_to_all(rank: int, nproc: int, group: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2):
        x = torch.arange(rank * 6, rank * 6 + 6).reshape(3, 2).to(dtype)
        out = torch.empty(3, 2, dtype=dtype, device="musa")
        with counting() as counts:
            dist.all_to_all_single(out, on_device(x), group=group)
        expected = torch.stack([torch.arange(r * 6 + 2 * rank, r * 6 + 2 * rank + 2) for r in range(3)]).to(dtype)
        assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert counts.collectives == {"all_to_all_single": 1}
        assert counts.bytes_between_ranks == 4 * dtype.itemsize
        # the copy to the device
        assert (counts.launches, counts.bytes_copied, counts.host_syncs) == (2, 6 * dtype.itemsize, 0)
    # Rank r sends r * (peer + 1) rows to each peer; rank 0 sends nothing.
    sizes, takes = [rank * (peer + 1) for peer in range(3)], [r * (rank + 1) for r in range(3)]
    x = torch.full((sum(sizes), 5), float(rank), device="musa")
    out = torch.empty(sum(takes), 5, device="musa")
    dist.all_to_all_single(out, x, takes, sizes, group=group)
    assert out[:, 0].tolist() == [float(r) for r in range(3) for _ in range(takes[r])]
    blocks = [torch.empty(1, device="musa") for _ in range(3)]
    dist.all_to_all(blocks, [torch.full((1,), rank * 10.0 + peer, device="musa") for peer in range(3)], group=group)
    assert [block.item() for block in blocks] == [float(r * 10 + rank) for r in range(3)]


@case("musa", GROUP_CASES)
def a_batch_is_one_launch_and_one_work(rank: int, nproc: int, group: Group) -> None:
    sent = torch.full((4,), float(rank), device="musa", requires_grad=True)
    received, own = torch.empty(4, device="musa"), torch.empty(4, device="musa")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            operations = ring(rank, nproc, group, sent, received)
            operations += [
                dist.P2POp(dist.isend, sent, group=group, group_peer=rank),
                dist.P2POp(dist.irecv, own, group=group, group_peer=rank),
            ]
            with counting() as counts:
                works = dist.batch_isend_irecv(operations)
                assert len(works) == 1
                works[0].wait()
            assert received.tolist() == [(rank - 1) % nproc] * 4
            assert own.tolist() == [rank] * 4
            assert (counts.batches, counts.messages, counts.launches) == (1, 2, 1)
            assert (counts.bytes_between_ranks, counts.bytes_copied, counts.host_syncs) == (16, 0, 0)
            received.zero_()
    with pytest.raises(IndexError):
        dist.batch_isend_irecv([])


@case("musa", GROUP_CASES)
def a_subset_may_batch_after_a_collective(rank: int, nproc: int, group: Group) -> None:
    warm(group)
    if rank < 2:
        received = torch.empty(3, device="musa")
        for work in dist.batch_isend_irecv(
            ring(rank, 2, group, torch.full((3,), float(rank), device="musa"), received)
        ):
            work.wait()
        assert received.tolist() == [1 - rank] * 3


@case("musa", GROUP_CASES)
def subgroups(rank: int, nproc: int, group: Group) -> None:
    for _ in range(2):  # destroyed and made anew
        check_pair(rank, dist.new_group([1, 2]))


def check_pair(rank: int, pair: Group) -> None:
    if rank > 0:
        assert dist.get_backend(pair) == "mccl"
        x = torch.full((2,), float(rank), device="musa")
        received = torch.empty(2, device="musa")
        dist.batch_isend_irecv(ring(rank - 1, 2, pair, x, received))[0].wait()
        assert received.tolist() == [3 - rank] * 2
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [3, 3]
        dist.destroy_process_group(pair)


@case("musa", GROUP_CASES)
def two_batches_in_flight(rank: int, nproc: int, group: Group) -> None:
    for order in ((0, 1), (1, 0)):
        sent = [torch.full((5,), 10.0 * k + rank, device="musa") for k in range(2)]
        received = [torch.empty(5, device="musa") for _ in range(2)]
        works = [dist.batch_isend_irecv(ring(rank, nproc, group, sent[k], received[k]))[0] for k in range(2)]
        for k in order:
            works[k].wait()
            assert received[k].tolist() == [10.0 * k + (rank - 1) % nproc] * 5


@case("cpu", GROUP_CASES)
def a_handle_dropped_unwaited_swallows_nothing(rank: int, nproc: int, group: Group) -> None:
    lost, received = torch.zeros(2, device="musa"), torch.zeros(2, device="musa")
    dist.batch_isend_irecv(ring(rank, nproc, group, torch.full((2,), 5.0, device="musa"), lost))
    with breaks("wait first"):
        lost.sum()
    work = dist.batch_isend_irecv(ring(rank, nproc, group, torch.full((2,), 6.0, device="musa"), received))[0]
    work.wait()
    assert received.tolist() == [6, 6]
    assert lost.tolist() == [5, 5], "it has been received into its own buffer, before the later one"


@case("cpu", GROUP_CASES)
def the_own_block_is_copied_while_others_are_received(rank: int, nproc: int, group: Group) -> None:
    result = torch.zeros(3, 2, 4, device="musa")
    sent = torch.full((2, 4), float(rank), device="musa")
    source = (rank - 1) % nproc
    (work,) = dist.batch_isend_irecv(ring(rank, nproc, group, sent, result[source]))
    result[rank].copy_(sent)
    with breaks("wait first"):
        result[source].sum()
    with breaks("wait first"):
        result[:, 0].fill_(0)
    with breaks("wait first"):
        sent.fill_(0)
    with breaks("wait first"):
        dist.all_reduce(result, group=group)
    work.wait()
    assert result[:, 0, 0].tolist() == [float(r) if r in (rank, source) else 0.0 for r in range(3)]
    sent.fill_(0)
    x = torch.ones(2, device="musa")
    work = dist.all_reduce(x, group=group, async_op=True)  # type: ignore[assignment]
    with breaks("wait first"):
        x.sum()
    work.wait()
    assert x.sum().item() == 6


@case("cpu", GROUP_CASES)
def element_types(rank: int, nproc: int, group: Group) -> None:
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fnuz):
        x = torch.zeros(3, dtype=dtype, device="musa")
        with breaks("element type"):
            dist.all_to_all_single(torch.empty_like(x), x, group=group)
        with breaks("element type"):
            dist.batch_isend_irecv(ring(rank, nproc, group, x, torch.empty_like(x)))
    refused = {31: [], 22: [torch.float8_e4m3fn, torch.float8_e5m2], 21: [torch.bfloat16, torch.float8_e5m2]}
    for architecture, dtypes in refused.items():
        mccl.install(architecture=architecture)
        for dtype in dtypes:
            with breaks("element type"):
                dist.all_reduce(torch.zeros(3, device="musa").to(dtype), group=group)
    mccl.install(architecture=31)


@case("cpu", GROUP_CASES)
def what_is_handed_over(rank: int, nproc: int, group: Group) -> None:
    x, out = torch.zeros(4, 4, device="musa"), torch.zeros(4, 4, device="musa")
    with breaks("device"):
        dist.all_reduce(torch.zeros(3), group=group)
    with breaks("device"):
        dist.batch_isend_irecv(ring(rank, nproc, group, torch.zeros(4, 4), out))
    with breaks("contiguous"):
        dist.batch_isend_irecv(ring(rank, nproc, group, x[:, 1], out[0]))
    with breaks("contiguous"):
        dist.batch_isend_irecv(ring(rank, nproc, group, x[0], out[:, 0]))
    with breaks("contiguous"):
        dist.all_to_all_single(out[:3, :3], x[:3].view(-1)[:9].view(3, 3), group=group)
    with breaks("disjoint"):
        dist.batch_isend_irecv(ring(rank, nproc, group, x[:2], x[1:3]))
    for lone in (
        lambda: dist.isend(x, group=group, group_dst=(rank + 1) % nproc),
        lambda: dist.irecv(x, group=group, group_src=(rank + 1) % nproc),
        lambda: dist.send(x, group=group, group_dst=(rank + 1) % nproc),
    ):
        with breaks("always batch"):
            lone()
    with pytest.raises(MCCLRuleError, match="any source"):
        dist.irecv(x, group=group)


@case("cpu", GROUP_CASES)
def a_subset_in_the_first_batch(rank: int, nproc: int, group: Group) -> None:
    if rank < 2:
        with (
            impatient(),
            pytest.raises(MCCLRuleError, match=r"rule 'first batch' broken: rank\(s\) \[2\] take no part"),
        ):
            dist.batch_isend_irecv(ring(rank, 2, group, torch.ones(1, device="musa"), torch.ones(1, device="musa")))


@case("cpu", GROUP_CASES)
def sends_and_receives_must_match(rank: int, nproc: int, group: Group) -> None:
    def operation(kind: Any, peer: int, count: int, dtype: torch.dtype = torch.float32) -> dist.P2POp:
        return dist.P2POp(kind, torch.zeros(count, dtype=dtype, device="musa"), group=group, group_peer=peer)

    def attempt(first: dist.P2POp, second: dist.P2POp, what: str) -> None:
        with pytest.raises(MCCLRuleError, match=f"rule 'matched' broken: {what}"):
            dist.batch_isend_irecv([first if rank == 0 else second])

    warm(group)
    if rank == 2:
        with breaks("matched"):
            dist.batch_isend_irecv([operation(dist.isend, 2, 3)])
        return
    me, it = ("sends", "receives") if rank == 0 else ("receives", "sends")
    where = f"{'to' if rank == 0 else 'from'} rank {1 - rank}"
    attempt(
        operation(dist.isend, 1, 3),
        operation(dist.irecv, 0, 4),
        f"rank {rank} {me} {3 + rank} x float32 {where}, which {it} {4 - rank} x float32",
    )
    attempt(operation(dist.isend, 1, 2), operation(dist.irecv, 0, 2, torch.int32), f"rank {rank} {me} 2 x ")
    # Both send, nobody receives: an error after the bounded wait, on both.
    with impatient():
        attempt(
            operation(dist.isend, 1, 3), operation(dist.isend, 0, 3), f"rank {rank} sends .* which receives nothing"
        )


@case("cpu", GROUP_CASES)
def a_silent_peer_is_an_error_not_a_hang(rank: int, nproc: int, group: Group) -> None:
    warm(group)
    if rank == 0:
        x = torch.zeros(2, dtype=torch.int64, device="musa")
        with (
            impatient(),
            pytest.raises(MCCLRuleError, match="rank 0 receives 2 x int64 from rank 1, which sends nothing"),
        ):
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, group=group, group_peer=1)])


@case("cpu", GROUP_CASES)
def all_to_all_checks_what_ranks_agree_on(rank: int, nproc: int, group: Group) -> None:
    # Rank 1 believes that rank 0 sends 2 rows, rank 0 sends 1.
    takes = [2 if rank == 1 else 1, 1, 1]
    x, out = torch.zeros(3, device="musa"), torch.zeros(sum(takes), device="musa")
    with impatient(), breaks("matched"):  # on rank 2 because its peers give up
        dist.all_to_all_single(out, x, takes, [1, 1, 1], group=group)


@case("cpu", GROUP_CASES)
def what_blocks_the_host(rank: int, nproc: int, group: Group) -> None:
    x = torch.ones(2, device="musa")
    received = torch.zeros(2, device="musa")
    with musa.forbid_host_sync():
        dist.all_reduce(x, group=group)
        dist.batch_isend_irecv(ring(rank, nproc, group, x, received))[0].wait()
        with pytest.raises(HostSyncError, match="barrier"):
            dist.barrier(group=group)
        (work,) = dist.batch_isend_irecv(ring(rank, nproc, group, x, received))
        with pytest.raises(HostSyncError, match="timeout"):
            work.wait(timedelta(seconds=1))
        work.wait()
    assert received.tolist() == [3, 3]


@case("cpu", GROUP_CASES)
def coalescing_can_be_switched_off(rank: int, nproc: int, group: Group) -> None:
    device = torch.device("musa")
    x = torch.ones(2, device="musa")
    assert group._get_backend(device).supports_coalescing
    with mccl.without_coalescing():
        assert not group._get_backend(device).supports_coalescing
        with breaks("always batch"):
            dist.batch_isend_irecv(ring(rank, nproc, group, x, torch.empty_like(x)))
    mccl.install(coalescing=False)
    assert not group._get_backend(device).supports_coalescing
    mccl.install(coalescing=True)
    assert group._get_backend(device).supports_coalescing
    with pytest.raises(RuntimeError, match="device type cpu"):
        group._get_backend(torch.device("cpu"))


# --- Running them -------------------------------------------------------------------------------------


def outcome(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except BaseException:
        return traceback.format_exc()
    return ""


def prepare(rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if SIMULATED:
        mccl.install()
    else:
        importlib.import_module("torchada")
        torch.musa.set_device(rank)  # type: ignore[attr-defined]


def chosen(cases: dict[str, Any]) -> dict[str, Any]:
    return {name: function for name, function in cases.items() if SIMULATED or MARKS[name] == "musa"}


def run_device_cases(rank: int, nproc: int, store: str) -> dict[str, str]:
    prepare(rank)
    return {name: outcome(function) for name, function in chosen(DEVICE_CASES).items()}


def run_group_cases(rank: int, nproc: int, store: str) -> dict[str, str]:
    prepare(rank)
    dist.init_process_group(
        "mccl", init_method=f"file://{store}", rank=rank, world_size=nproc, timeout=timedelta(seconds=20)
    )
    outcomes = {}
    for name, function in chosen(GROUP_CASES).items():
        outcomes[name] = outcome(function, rank, nproc, dist.new_group())
    dist.destroy_process_group()
    return outcomes


def run_mixed_group(rank: int, nproc: int, store: str) -> str:
    with counting():  # which wraps what the simulator wraps: the order must not matter
        prepare(rank)
    dist.init_process_group("cpu:gloo,musa:mccl", init_method=f"file://{store}", rank=rank, world_size=nproc)
    for device in ("cpu", "musa"):
        x = torch.full((2,), float(rank), device=device)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
        received = torch.empty(2, device=device)
        with counting() as counts:
            works = dist.batch_isend_irecv(ring(rank, nproc, dist.group.WORLD, x, received))
        assert (counts.batches, counts.messages, counts.launches) == (1, 1, 1)
        assert len(works) == {"cpu": 2, "musa": 1}[device]
        for work in works:
            work.wait()
        assert received.tolist() == [1, 1]
        out = torch.empty(2, device=device)
        dist.all_to_all_single(out, torch.tensor([1.0, 2.0]).to(device))
        assert out.tolist() == [rank + 1.0] * 2
    objects: list[Any] = [None] * nproc
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]
    backend = dist.get_backend_config(dist.new_group([0, 1]))
    dist.barrier()
    dist.destroy_process_group()
    return backend


@pytest.fixture(scope="module")
def device_outcomes() -> dict[str, str]:
    return run_ranks(run_device_cases, 1)[0]


@pytest.fixture(scope="module")
def group_outcomes() -> list[dict[str, str]]:
    return run_ranks(run_group_cases, 3, timeout=120)


def parameters(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=getattr(pytest.mark, MARKS[name])) for name in chosen(cases)]


@pytest.mark.parametrize("name", parameters(DEVICE_CASES))
def test_device(name: str, device_outcomes: dict[str, str]) -> None:
    assert device_outcomes[name] == "", device_outcomes[name]


@pytest.mark.parametrize("name", parameters(GROUP_CASES))
def test_group(name: str, group_outcomes: list[dict[str, str]]) -> None:
    failures = {rank: found[name] for rank, found in enumerate(group_outcomes) if found[name]}
    assert not failures, "\n".join(f"rank {rank}: {story}" for rank, story in failures.items())


@pytest.mark.musa
def test_a_group_for_host_and_device() -> None:
    for backend in run_ranks(run_mixed_group, 2):
        assert backend == "cpu:gloo,musa:mccl"
