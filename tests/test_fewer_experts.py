"""MAGI-2's MoE layer with its experts spread over fewer ranks than the tokens: 4 of 8, say, as the vendor runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import process_group
from stand_in import build, fresh_plugin
from test_newer_hosts import load_host

from vllm_musa_headpar.testing.counters import counting
from vllm_musa_headpar.testing.ranks import run_ranks

pytestmark = pytest.mark.cpu

HEADS, DIM, EXPERTS, TOP_K, WIDTH = 12, 4, 3, 2, 3
TOKENS = (5, 0, 3, 1, 4, 2, 7, 0)
BANKS = ("gate", "W_gate", "W_up", "W_down")


def moe_of(modules: Any, ep_group: Any) -> Any:
    """The layer with this rank's part of weights that are small whole numbers: sums are exact in any order."""
    moe = modules.Magi2MultiHeadMoE(
        modules.Magi2MultiHeadMoEConfig(HEADS * DIM, HEADS, EXPERTS, TOP_K, WIDTH, torch.float32), ep_group=ep_group
    )
    generator = torch.Generator().manual_seed(5)
    rows = moe.local_num_heads * EXPERTS
    for name in BANKS:
        bank = getattr(moe, name)
        whole = torch.randint(-2, 3, (HEADS * EXPERTS, *bank.shape[1:]), generator=generator).float()
        bank.copy_(whole[ep_group.rank * rows : (ep_group.rank + 1) * rows])
    return moe


def whole_layer(rank: int, nproc: int, store: str, tree: str, replicas: int) -> None:
    os.environ["VLLM_MUSA_HEADPAR"] = "strict"
    _, _, _, parallel, mh_moe, *_ = load_host(tree)
    from vllm_musa_headpar import plugin, register, registry

    counts = TOKENS[:nproc]
    shards = nproc // replicas
    hidden = torch.randint(-2, 3, (sum(counts), HEADS * DIM), generator=torch.Generator().manual_seed(6)).float()
    alone = moe_of(mh_moe, parallel.Magi2ParallelGroup(None, 1, 0))(hidden)
    assert alone.unique().numel() > 100
    mine, expected = (every.split(list(counts))[rank] for every in (hidden, alone))

    with process_group(rank, nproc, store) as group, fresh_plugin():
        narrow, _ = dist.new_subgroups(shards)
        moe = moe_of(mh_moe, parallel.Magi2ParallelGroup(narrow, shards, rank % shards))
        moe.set_dispatch_group(parallel.Magi2ParallelGroup(group, nproc, rank))
        assert moe.dispatch_replicas == replicas
        assert torch.equal(moe(mine, list(counts)), expected)  # the stand-in itself is right

        register()
        used: list[tuple[str, int]] = []

        def noted(exchange: Any, group: Any) -> Any:
            used.append((exchange.name, dist.get_world_size(group)))
            return registry.REFERENCE.implementation(exchange, group)

        registry.register_head_parallel_exchange("noted", noted, backends=("gloo",))
        for name, collectives in (("noted", 2), ("p2p", 2)):
            with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR_EXCHANGE=name):
                wide = dist.new_group()
                moe.set_dispatch_group(parallel.Magi2ParallelGroup(wide, nproc, rank))
                assert torch.equal(moe(mine, list(counts)), expected)  # and the group is settled
                used.clear()
                with counting() as counted:
                    assert torch.equal(moe(mine, list(counts)), expected)
                assert counted.communication_launches == collectives
                assert used == ([("dispatch", nproc), ("return", nproc)] if name == "noted" else [])

        # Of another run of tokens the split does not tell: the layer's own group, and counts that are asked for.
        short = [count // 2 for count in counts]
        with mock.patch.dict(os.environ, VLLM_MUSA_HEADPAR_EXCHANGE="noted"):
            half = moe(mine[: short[rank]], list(counts) if short[rank] != counts[rank] else None)
        assert torch.equal(half, expected[: short[rank]])
        assert used[-2:] == [("dispatch", shards), ("return", shards)]
        assert plugin.undo() == []


@pytest.mark.parametrize(("nproc", "replicas"), [(4, 2), (8, 2), (8, 4)])
def test_a_whole_layer_gives_one_ranks_bits(tmp_path: Path, nproc: int, replicas: int) -> None:
    run_ranks(whole_layer, nproc, build(tmp_path, "replicas", moe=True), replicas, timeout=150)
