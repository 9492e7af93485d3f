"""The exchange on MUSA with MCCL: simulated where there is no card. The simulator raises on every breach of MCCL's
rules, so that these also show that none is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import magi2
import pytest
import torch
import torch.distributed as dist
from musa_device import SIMULATED, mccl_group, no_host_sync
from pool import RankPool, environment

import vllm_musa_headpar as headpar
from vllm_musa_headpar import agreement
from vllm_musa_headpar.testing.counters import counting

pytestmark = pytest.mark.musa

ROOT = Path(__file__).parents[1]
DIM = 4


def layouts(nproc: int) -> dict[str, dict[str, Any]]:
    counts = tuple(1 + 2 * (rank % 3) for rank in range(nproc))
    replicas = 2 if nproc % 2 == 0 else nproc
    return {
        "equal": {"token_counts": (3,) * nproc},
        "uneven": {"token_counts": counts},
        "one empty": {"token_counts": (0, *counts[1:])},
        "one brings all": {"token_counts": (0,) * (nproc - 1) + (5,)},
        "replicas": {
            "token_counts": counts,
            "replica_counts": headpar.replica_token_counts(counts, replicas),
        },
        "uneven heads": {"token_counts": counts, "head_counts": (2,) * (nproc - 1) + (0,)},
    }


def round_trip(name: str, rank: int, nproc: int, group: Any, device: torch.device, dtype: torch.dtype) -> None:
    """There and back, compared with the same on the CPU's own arithmetic."""
    layout = headpar.HeadParallelLayout(rank=rank, **layouts(nproc)[name])
    heads = 2 * layout.shards if layout.head_counts is None else sum(layout.head_counts)
    inputs = [numbered(other, (count, heads, DIM), dtype) for other, count in enumerate(layout.token_counts)]
    there = headpar.scatter_heads_gather_tokens(inputs[rank].to(device), group, layout)
    back = headpar.scatter_tokens_gather_heads(there, group, layout)
    shard, part = rank % layout.shards, rank // layout.shards
    heads_here = slice(2 * shard, 2 * shard + 2)  # of the shards that have any, all have two
    pieces = [tensor.split(layout.parts[other])[part][:, heads_here] for other, tensor in enumerate(inputs)]
    assert torch.equal(there.cpu(), torch.cat(pieces)), f"dispatch, {name}, {dtype}"
    assert torch.equal(back.cpu(), inputs[rank]), f"return, {name}, {dtype}"


def numbered(rank: int, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape) + 50 * rank).to(dtype)


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_layout_gives_the_right_bits(musa_ranks: RankPool, nproc: int) -> None:
    for used in musa_ranks(all_layouts, nproc):
        assert used == "p2p"


def all_layouts(rank: int, nproc: int, store: str) -> str:
    with mccl_group(rank, nproc, store) as device:
        group = dist.group.WORLD
        for name in layouts(nproc):
            for dtype in (torch.bfloat16, torch.float32, torch.int16, torch.bool):
                round_trip(name, rank, nproc, group, device, dtype)
        return agreement.state_of(group, device).registration.name


def test_after_the_first_exchange_one_launch_and_no_host_sync(musa_ranks: RankPool) -> None:
    for there, back, payload, own in musa_ranks(costs, 4):
        for counts in (there, back):
            assert counts.batches == counts.communication_launches == 1
            assert counts.host_syncs == 0
            assert counts.bytes_between_ranks == payload - own
            assert counts.bytes_copied <= payload
            assert counts.launches <= 1 + 3  # the batch, the peers below and above, the own block


def costs(rank: int, nproc: int, store: str) -> tuple[Any, Any, int, int]:
    with mccl_group(rank, nproc, store) as device:
        layout = headpar.HeadParallelLayout((6,) * nproc, rank)
        tensor = numbered(rank, (6, 2 * nproc, DIM), torch.bfloat16).to(device)
        headpar.scatter_heads_gather_tokens(tensor, dist.group.WORLD, layout)
        with no_host_sync():
            with counting() as there:
                received = headpar.scatter_heads_gather_tokens(tensor, dist.group.WORLD, layout)
            with counting() as back:
                headpar.scatter_tokens_gather_heads(received, dist.group.WORLD, layout)
        return there, back, tensor.nbytes, tensor.nbytes // nproc


def test_a_rank_with_nothing_to_move_takes_part_in_the_first_exchange(musa_ranks: RankPool) -> None:
    """Rank 3 owns no heads and brings no tokens; an MCCL communicator's first batch needs it all the same."""
    for returned in musa_ranks(first_exchange_without_rank_3, 4):
        assert returned


def first_exchange_without_rank_3(rank: int, nproc: int, store: str) -> bool:
    with mccl_group(rank, nproc, store) as device:
        layout = headpar.HeadParallelLayout((2, 1, 3, 0), rank, head_counts=(1, 2, 1, 0))
        mine = numbered(rank, (layout.local_tokens, 4, DIM), torch.bfloat16)
        there = headpar.scatter_heads_gather_tokens(mine.to(device), dist.group.WORLD, layout)
        back = headpar.scatter_tokens_gather_heads(there, dist.group.WORLD, layout)
        return torch.equal(back.cpu(), mine)


def test_first_use_settles_within_its_allowance(musa_ranks: RankPool) -> None:
    for collectives, host_syncs in musa_ranks(first_use, 2):
        assert collectives == {"all_reduce": 2, "all_to_all_single": 2}
        assert host_syncs <= 2


def first_use(rank: int, nproc: int, store: str) -> tuple[dict[str, int], int]:
    with mccl_group(rank, nproc, store) as device, counting() as counts:
        layout = headpar.HeadParallelLayout((2, 2), rank)
        headpar.scatter_heads_gather_tokens(torch.zeros(2, 2, DIM, device=device), dist.group.WORLD, layout)
        return dict(counts.collectives), counts.host_syncs


@pytest.mark.parametrize("members", [[0, 1], [1, 3], [0, 2, 3]], ids=str)
def test_subgroups(musa_ranks: RankPool, members: list[int]) -> None:
    musa_ranks(in_subgroup, 4, members)


def in_subgroup(rank: int, nproc: int, store: str, members: list[int]) -> None:
    with mccl_group(rank, nproc, store) as device:
        group = dist.new_group(members)
        if rank in members:
            for name in ("equal", "uneven", "one empty", "uneven heads"):
                round_trip(name, members.index(rank), len(members), group, device, torch.bfloat16)
        dist.barrier()


def test_one_group_with_a_backend_per_device(musa_ranks: RankPool) -> None:
    for used in musa_ranks(mixed_group, 2):
        assert used == ("all_to_all", "p2p")


def mixed_group(rank: int, nproc: int, store: str) -> tuple[str, str]:
    with mccl_group(rank, nproc, store, "cpu:gloo,musa:mccl") as device:
        group, cpu = dist.group.WORLD, torch.device("cpu")
        for where in (cpu, device):
            round_trip("uneven heads", rank, nproc, group, where, torch.bfloat16)
        return agreement.state_of(group, cpu).registration.name, agreement.state_of(group, device).registration.name


@pytest.mark.skipif(not SIMULATED, reason="a real MCCL coalesces or not as it is built")
def test_without_coalescing_the_reference_is_used_and_said_once(musa_ranks: RankPool) -> None:
    for used, batches, warnings in musa_ranks(uncoalesced, 2):
        assert used == "all_to_all"
        assert batches == 0
        assert len(warnings) == 1
        assert "does not coalesce" in warnings[0]


def uncoalesced(rank: int, nproc: int, store: str) -> tuple[str, int, list[str]]:
    from vllm_musa_headpar.testing import mccl

    with mccl_group(rank, nproc, store) as device, mccl.without_coalescing(), warnings_of() as said:
        with counting() as counts:
            round_trip("equal", rank, nproc, dist.group.WORLD, device, torch.bfloat16)
        return agreement.state_of(dist.group.WORLD, device).registration.name, counts.batches, said


def test_the_kill_switch_on_one_rank_settles_all_on_the_stock_exchange(musa_ranks: RankPool) -> None:
    for used, warnings in musa_ranks(one_rank_differs, 2):
        assert used == "all_to_all"
        assert len(warnings) == 1
        assert "all_to_all on rank 1 (global 1)" in warnings[0]


def one_rank_differs(rank: int, nproc: int, store: str) -> tuple[str, list[str]]:
    settings = {"VLLM_MUSA_HEADPAR_EXCHANGE": "all_to_all"} if rank == 1 else {}
    with environment(**settings), mccl_group(rank, nproc, store) as device, warnings_of() as said:
        round_trip("uneven", rank, nproc, dist.group.WORLD, device, torch.bfloat16)
        return agreement.state_of(dist.group.WORLD, device).registration.name, said


class warnings_of:
    """Context that yields the package's warnings of the block, even those that the process has said before."""

    def __enter__(self) -> list[str]:
        import logging

        from vllm_musa_headpar import log

        self.said: list[str] = []
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        log.logger.addHandler(self._handler)
        log._said.clear()
        return self.said

    def __exit__(self, *_: Any) -> None:
        from vllm_musa_headpar import log

        log.logger.removeHandler(self._handler)


@pytest.mark.slow
def test_the_whole_model_gives_the_same_bits_with_the_plugin_on_and_off(musa_ranks: RankPool) -> None:
    """On real hardware this needs MAGI2_DETERMINISTIC=1: the host's MoE kernels use atomics otherwise."""
    for off, on, batches in musa_ranks(model_on_and_off, 2):
        assert on == off
        assert batches == 2 + 2 * (3 + 2)  # self-test; three attention layers and two MoE layers, there and back


def model_on_and_off(rank: int, nproc: int, store: str) -> tuple[list[float], list[float], int]:
    import os

    os.environ["MAGI2_DETERMINISTIC"] = "1"
    from unittest import mock

    from vllm_omni.diffusion.models.magi2 import attention, mh_moe, parallel

    config = magi2.tiny_config(torch.bfloat16, moe_heads=3)
    weights = magi2.checkpoint(config)
    outputs, batches = [], 0
    with mccl_group(rank, nproc, store) as device:
        for exchange in (None, "auto"):
            group = parallel.Magi2ParallelGroup(dist.new_group(), nproc, rank)
            patches = [
                mock.patch.object(module, name, return_value=group)
                for module, name in (
                    (parallel, "get_magi2_ulysses_group"),
                    (attention, "get_magi2_ulysses_group"),
                    (mh_moe, "get_magi2_ep_group"),
                )
            ]
            with magi2.plugin(exchange), patches[0], patches[1], patches[2], torch.inference_mode():
                model = magi2.transformer(config, weights).to(device)
                arguments = [to_device(argument, device) for argument in magi2.packed_input()]
                with counting() as counts:
                    outputs.append(model(*arguments).float().cpu().flatten().tolist())
                batches = counts.batches
    return outputs[0], outputs[1], batches


def to_device(argument: Any, device: torch.device) -> Any:
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.slow
@pytest.mark.skipif(not SIMULATED, reason="that command's purpose is a machine without MUSA")
def test_the_two_worker_check_passes_on_the_simulated_device() -> None:
    command = [sys.executable, "entrypoints/two_worker.py", "--simulate-musa"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS 47 cases"
