"""What holds on any hardware: what an exchange sends, copies and launches, by implementation, counted over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import RankPool, environment, process_group

from vllm_musa_headpar import HeadParallelLayout, profiles, scatter_heads_gather_tokens, scatter_tokens_gather_heads
from vllm_musa_headpar import exchange as core
from vllm_musa_headpar.bench import stock
from vllm_musa_headpar.config import EXCHANGE
from vllm_musa_headpar.testing.counters import Counts, counting

pytestmark = pytest.mark.cpu

TOKENS, LOCAL_HEADS, DIM = 6, 3, 8
DTYPE = torch.bfloat16


def payload(nproc: int) -> int:
    """Bytes of one rank's input, the same in both directions."""
    return TOKENS * nproc * LOCAL_HEADS * DIM * DTYPE.itemsize


def own_block(nproc: int) -> int:
    return payload(nproc) // nproc


def there_and_back(rank: int, nproc: int, store: str, name: str) -> dict[str, Counts]:
    """Counts of a dispatch and a return, after the group's first exchange; with inputs of several strides."""
    layout = HeadParallelLayout((TOKENS,) * nproc, rank)
    outer = torch.randn(TOKENS, nproc * LOCAL_HEADS, DIM).to(DTYPE)
    inner = torch.randn(TOKENS * nproc, LOCAL_HEADS, DIM).to(DTYPE)
    strided_outer = outer.transpose(0, 1).contiguous().transpose(0, 1)
    strided_inner = inner.transpose(0, 1).contiguous().transpose(0, 1)
    results: dict[str, Counts] = {}
    with process_group(rank, nproc, store) as group, environment(**{EXCHANGE: name}):
        scatter_heads_gather_tokens(outer, group, layout)
        with counting() as results["dispatch"]:
            scatter_heads_gather_tokens(outer, group, layout)
        with counting() as results["return"]:
            scatter_tokens_gather_heads(inner, group, layout)
        with counting() as results["strided dispatch"]:
            scatter_heads_gather_tokens(strided_outer, group, layout)
        with counting() as results["strided return"]:
            scatter_tokens_gather_heads(strided_inner, group, layout)
    return results


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("name", ["all_to_all", "p2p"])
def test_an_equal_layout(ranks: RankPool, name: str, nproc: int) -> None:
    for results in ranks(there_and_back, nproc, name):
        for direction in ("dispatch", "return"):
            counts = results[direction]
            assert counts.bytes_between_ranks == payload(nproc) - own_block(nproc)
            assert counts.bytes_copied <= payload(nproc)
            assert counts.communication_launches == 1
            assert counts.host_syncs == 0
        for direction in ("strided dispatch", "strided return"):
            assert results[direction].bytes_between_ranks == payload(nproc) - own_block(nproc)
            assert results[direction].communication_launches == 1
            assert results[direction].host_syncs == 0
        # Not made contiguous first: packing reads the strides as they are.
        assert results["strided dispatch"].bytes_copied <= payload(nproc)


@pytest.mark.parametrize("nproc", [2, 4])
def test_the_reference_is_one_collective_and_one_copy(ranks: RankPool, nproc: int) -> None:
    for results in ranks(there_and_back, nproc, "all_to_all"):
        for direction in ("dispatch", "return"):
            counts = results[direction]
            assert counts.collectives == {"all_to_all_single": 1}
            assert counts.batches == 0
            # All peers in one strided copy, and the other side, which is wire format already, not at all.
            assert counts.launches == 1 + 1
            assert counts.bytes_copied == payload(nproc)
            assert counts.bytes_allocated == 2 * payload(nproc), "the result, and the strided side's wire"


@pytest.mark.parametrize("nproc", [2, 4])
def test_p2p_is_one_batch_and_never_stages_the_own_block(ranks: RankPool, nproc: int) -> None:
    for rank, results in enumerate(ranks(there_and_back, nproc, "p2p")):
        for direction in ("dispatch", "return"):
            counts = results[direction]
            assert not counts.collectives
            assert (counts.batches, counts.messages) == (1, nproc - 1)
            assert counts.bytes_copied == payload(nproc)
            assert counts.bytes_allocated == payload(nproc), "the result; the staging of before is used again"
        # The peers below the rank and those above it are a copy each; the own block is one more.
        runs = (rank > 0) + (rank < nproc - 1)
        assert results["dispatch"].launches == 1 + runs + 1


def one_token(rank: int, nproc: int, store: str, name: str) -> tuple[Counts, Counts]:
    """Counts where a rank has a single token: both sides are wire format."""
    layout = HeadParallelLayout((1,) * nproc, rank)
    with process_group(rank, nproc, store) as group, environment(**{EXCHANGE: name}):
        scatter_heads_gather_tokens(torch.randn(1, nproc, DIM), group, layout)
        with counting() as there:
            scatter_heads_gather_tokens(torch.randn(1, nproc, DIM), group, layout)
        with counting() as back:
            scatter_tokens_gather_heads(torch.randn(nproc, 1, DIM), group, layout)
    return there, back


def test_what_is_wire_format_is_not_copied(ranks: RankPool) -> None:
    for counts in ranks(one_token, 2, "all_to_all"):
        assert [direction.bytes_copied for direction in counts] == [0, 0]
    for counts in ranks(one_token, 2, "p2p"):
        assert [direction.bytes_copied for direction in counts] == [4 * DIM, 4 * DIM], "the own block alone"


def query_key_value(rank: int, nproc: int, store: str, name: str) -> dict[str, Any]:
    """Counts of Q, K and V as one exchange, stock and ours."""
    layout = HeadParallelLayout((TOKENS,) * nproc, rank)
    tensors = tuple(torch.randn(TOKENS, nproc * LOCAL_HEADS, DIM).to(DTYPE) for _ in range(3))
    with process_group(rank, nproc, store) as group, environment(**{EXCHANGE: name}):
        core.dispatch(tensors, group, layout, DTYPE)
        with counting() as before:
            expected = stock.attention_dispatch(tensors, layout.token_counts, group)
        with counting() as after:
            fused = core.dispatch(tensors, group, layout, DTYPE)
    assert torch.equal(torch.cat(expected, dim=1), fused)
    return {"stock": before, "ours": after}


@pytest.mark.parametrize("name", ["all_to_all", "p2p"])
def test_query_key_and_value_are_copied_once_instead_of_twice(ranks: RankPool, name: str) -> None:
    for results in ranks(query_key_value, 2, name):
        assert results["stock"].bytes_copied == 2 * 3 * payload(2)
        assert results["ours"].bytes_copied == 3 * payload(2)
        assert results["ours"].bytes_between_ranks == results["stock"].bytes_between_ranks == 3 * payload(2) // 2


def the_stock_formula(rank: int, nproc: int, store: str) -> bool:
    """The bench's stock formula against the installed host's own functions, uneven counts included."""
    from vllm_omni.diffusion.models.magi2 import parallel

    counts = [5, 2, 0][:nproc]
    generator = torch.Generator().manual_seed(rank)
    outer = torch.randn(counts[rank], nproc * LOCAL_HEADS, DIM, generator=generator)
    with process_group(rank, nproc, store) as group:
        host_group = parallel.Magi2ParallelGroup(group, nproc, rank)
        inner = stock.dispatch(outer, counts, group)
        same = torch.equal(inner, parallel.ep_dispatch(outer, host_group, counts))
        back = stock.undispatch(inner, counts, rank, group)
        same &= torch.equal(back, outer)
        same &= torch.equal(back, parallel.ep_undispatch(inner, host_group, counts))
        theirs = parallel.scatter_heads_gather_seqlen([outer, outer], counts, host_group)
        ours = stock.attention_dispatch([outer, outer], counts, group)
        same &= all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        same &= torch.equal(
            stock.attention_return(inner, counts, rank, group),
            parallel.scatter_seqlen_gather_heads(inner, counts, host_group),
        )
    return same


@pytest.mark.parametrize("nproc", [2, 3])
def test_the_stock_formula_is_the_hosts(ranks: RankPool, nproc: int) -> None:
    pytest.importorskip("vllm_omni")
    assert all(ranks(the_stock_formula, nproc))


def by_message_size(rank: int, nproc: int, store: str) -> list[tuple[int, int]]:
    """Batches and collectives of one exchange on either side of p2p's smallest message on Gloo, as a user has it."""
    seen = []
    as_shipped = mock.patch.object(profiles, "SHIPPED", Path(profiles.__file__).with_name("shipped.json"))
    with as_shipped, process_group(rank, nproc, store) as group, environment(**{EXCHANGE: "p2p"}):
        # 4 tokens of 2 heads: the mean of the 4 messages is 2 dim bytes, whatever this rank's own are.
        for dim in (128 * 1024 - 1, 128 * 1024):
            layout = HeadParallelLayout((1, 3), rank)
            tensor = torch.zeros(layout.local_tokens, 2, dim, dtype=torch.uint8)
            scatter_heads_gather_tokens(tensor, group, layout)
            with counting() as counts:
                scatter_heads_gather_tokens(tensor, group, layout)
            seen.append((counts.batches, counts.total_collectives))
    return seen


def test_on_gloo_small_messages_go_through_the_reference_on_all_ranks_alike(ranks: RankPool) -> None:
    assert ranks(by_message_size, 2) == [[(0, 1), (1, 0)]] * 2
