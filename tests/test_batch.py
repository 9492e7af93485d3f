"""Exchanges with a batch, several in one launch, and in every mode of gradients: against the plain model."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model import random_layouts
from musa_device import mccl_group
from pool import RankPool, environment, process_group

from vllm_musa_headpar import exchange
from vllm_musa_headpar.layout import HeadParallelLayout, offsets
from vllm_musa_headpar.testing.counters import counting

pytestmark = pytest.mark.cpu

CASES = 250
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
CPU_ONLY = (torch.int16, torch.uint16, torch.complex128)  # MCCL takes none of these


def make(seed: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes; of bool only the two that there are."""
    generator = torch.Generator().manual_seed(random.Random(seed).randrange(2**40))
    raw = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw > 99 if dtype == torch.bool else raw.view(dtype)


def shards_of(layout: HeadParallelLayout, heads: int) -> tuple[int, ...]:
    return offsets(layout.head_counts or (heads // layout.shards,) * layout.shards)


def dispatched(inputs: list[torch.Tensor], layout: HeadParallelLayout) -> torch.Tensor:
    """`[B, T_r, H, D]` of all ranks -> what this rank must get, `[B, owned, local, D]`."""
    starts = shards_of(layout, inputs[0].shape[2])
    shard, part = layout.rank % layout.shards, layout.rank // layout.shards
    pieces = [tensor.split(layout.parts[rank], dim=1)[part] for rank, tensor in enumerate(inputs)]
    return torch.cat(pieces, dim=1)[:, :, starts[shard] : starts[shard + 1]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def require_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    assert found.is_contiguous(), what
    assert torch.equal(bits(found), bits(expected)), what


def run_cases(rank: int, ranks: int, seed: int, device: torch.device, groups: list[Any], number: int) -> int:
    """Random batched exchanges there and back, alone and several at once, over groups that are used on and on."""
    alike = random.Random(seed)
    dtypes = DTYPES + (CPU_ONLY if device.type == "cpu" else ())
    modes = (torch.inference_mode, torch.no_grad, nullcontext)
    for case in range(number):
        name = f"case {case} of seed {seed}"
        layouts, heads = random_layouts(random.Random(f"{seed}/{case}"), ranks)
        layout, group = layouts[rank], alike.choice(groups)
        several = []
        for number_of_tensor in range(alike.choice((1, 1, 3))):
            batch, dim, dtype = alike.choice((1, 2, 3)), alike.choice((1, 3, 8)), alike.choice(dtypes)
            key = f"{seed}/{case}/{number_of_tensor}"
            every = [
                make(f"{key}/{other}", (batch, count, heads, dim), dtype)
                for other, count in enumerate(layout.token_counts)
            ]
            several.append(every)
        own = [every[rank].to(device) for every in several]
        if alike.random() < 0.5:  # heads before tokens in memory
            own = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in own]
        room = alike.choice((None, max(layout.head_counts or (heads // layout.shards,)) + 1))
        with alike.choice(modes)():
            there = exchange.dispatch_each(own, group, [layout] * len(own), [room] * len(own))
        with alike.choice(modes)():
            for every, result in zip(several, there, strict=True):
                expected = dispatched(every, layout)
                real = expected.shape[2]
                if room is not None:
                    assert result.shape[2] == room, name
                    assert not bits(result[:, :, real:]).any(), name
                    result = result[:, :, :real]
                require_same(result.contiguous(), expected, name)
                back = exchange.undispatch(result, group, layout, heads)
                require_same(back, every[rank], name)
    return number


def on_gloo(rank: int, ranks: int, store: str) -> int:
    with process_group(rank, ranks, store, timeout=60.0):
        groups = []
        for name in ("all_to_all", "p2p"):
            with environment(VLLM_MUSA_HEADPAR_EXCHANGE=name):
                groups.append(dist.new_group())
                exchange.dispatch(
                    (torch.ones(1, ranks, 1),), groups[-1], HeadParallelLayout((1,) * ranks, rank), torch.float32
                )
        return run_cases(rank, ranks, ranks, torch.device("cpu"), groups, CASES)


@pytest.mark.parametrize("nproc", [2, 4])
def test_random_batches_on_gloo(ranks: Any, nproc: int) -> None:
    """Staging made in one mode of gradients is used again in every other, with the same type and others."""
    assert ranks(on_gloo, nproc, timeout=300.0) == [CASES] * nproc


def on_mccl(rank: int, ranks: int, store: str) -> int:
    with mccl_group(rank, ranks, store, timeout=60.0) as device:
        return run_cases(rank, ranks, 100 + ranks, device, [dist.group.WORLD], 60)


@pytest.mark.musa
def test_random_batches_on_mccl(musa_ranks: RankPool) -> None:
    assert musa_ranks(on_mccl, 3, timeout=300.0) == [60] * 3


def count_batches(rank: int, ranks: int, store: str) -> list[tuple[int, int, int]]:
    """Launches, sent bytes and copied bytes of a dispatch and its return, by batch size."""
    seen = []
    with process_group(rank, ranks, store), environment(VLLM_MUSA_HEADPAR_EXCHANGE="p2p"), torch.inference_mode():
        layout, group = HeadParallelLayout((4,) * ranks, rank), dist.new_group()
        for batch in (1, 2, 5):
            x = torch.ones(batch, 4, 2 * ranks, 8)
            for _ in range(2):
                with counting() as there:
                    wide = exchange.dispatch((x,), group, layout, x.dtype)
                with counting() as back:
                    exchange.undispatch(wide, group, layout, 2 * ranks)
            for counts in (there, back):
                seen.append((counts.batches, counts.messages // batch, counts.bytes_copied * 100 // x.nbytes))
    return seen


def test_one_launch_and_one_copied_payload_at_any_batch(ranks: Any) -> None:
    for seen in ranks(count_batches, 2):
        assert seen == [(1, 1, 100)] * 6


# --- One answer at every size -------------------------------------------------------------------------


def every_size(rank: int, ranks: int, store: str, sizes: list[int]) -> list[str]:
    """Types that a pair of exchanges does not carry alike at every size, in words."""
    problems = []
    with process_group(rank, ranks, store):
        for name in ("all_to_all", "p2p"):
            with environment(VLLM_MUSA_HEADPAR_EXCHANGE=name):
                group = dist.new_group()
                for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, *DTYPES):
                    for tokens in sizes:
                        every = [make(f"{other}/{dtype}", (1, tokens, ranks, 64), dtype) for other in range(ranks)]
                        layout = HeadParallelLayout((tokens,) * ranks, rank)
                        found = exchange.dispatch((every[rank],), group, layout, dtype)
                        if not torch.equal(bits(found), bits(dispatched(every, layout))):
                            problems.append(f"{name}, {dtype}, {tokens} tokens")
    return problems


def test_every_type_is_carried_at_every_size(ranks: Any) -> None:
    """Messages of 64 bytes and of half a megabyte, on both sides of where exchanges may go another way."""
    assert ranks(every_size, 2, [1, 8192], timeout=300.0) == [[], []]


# --- Where point-to-point is no single launch ---------------------------------------------------------


def refuse_to_coalesce(rank: int, ranks: int, store: str) -> tuple[str | None, str | None]:
    """Why p2p would not be used on a group of a class of its own, before and after that class is made known."""
    from vllm_musa_headpar.implementations import p2p
    from vllm_musa_headpar.testing.mccl import MCCLGroup

    with mccl_group(rank, ranks, store) as device:
        group = dist.group.WORLD
        p2p.GROUPED.discard(MCCLGroup)
        try:
            before = p2p.unusable(group, device, "mccl")
        finally:
            p2p.GROUPED.add(MCCLGroup)
        return before, p2p.unusable(group, device, "mccl")


@pytest.mark.musa
def test_a_group_class_that_torch_does_not_coalesce_gets_no_point_to_point(musa_ranks: RankPool) -> None:
    for before, after in musa_ranks(refuse_to_coalesce, 2):
        assert before is not None
        assert "MCCLGroup" in before
        assert after is None
