"""MAGI-2's hot path on the real host: known counts, uneven heads, attention. Every result against the stock one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import magi2
import pytest
import torch
import torch.distributed as dist
from pool import RankPool, process_group

from vllm_musa_headpar.testing.counters import counting

pytestmark = pytest.mark.cpu

DIM = 8


def moe_layer(heads: int, group: Any) -> Any:
    """A MoE layer on a group; weights differ per head and are zero for padded ones, as the loader leaves them."""
    from vllm_omni.diffusion.models.magi2.mh_moe import Magi2MultiHeadMoE, Magi2MultiHeadMoEConfig

    config = Magi2MultiHeadMoEConfig(heads * DIM, heads, 3, 2, 4, torch.bfloat16)
    layer = Magi2MultiHeadMoE(config, ep_group=group)
    generator = torch.Generator().manual_seed(heads)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            whole = torch.randn((heads * 3, *parameter.shape[1:]), generator=generator)
            parameter.copy_(layer.ep_slice(whole) if parameter.ndim else whole)
            assert parameter.shape[0] == layer.local_num_heads * 3, name
    return layer.eval()


def group_of(group: Any, size: int, rank: int) -> Any:
    from vllm_omni.diffusion.models.magi2.parallel import Magi2ParallelGroup

    return Magi2ParallelGroup(group, size, rank)


@contextmanager
def ulysses(group: Any) -> Iterator[None]:
    """MAGI-2's Ulysses group for the time of the block, where MAGI-2 looks for it."""
    from unittest import mock

    from vllm_omni.diffusion.models.magi2 import parallel

    with mock.patch.object(parallel, "get_magi2_ulysses_group", return_value=group):
        yield


def in_layer(split: Any, compute: Callable[[], Any]) -> Any:
    """Call something as the transformer layer calls it while it holds a token split."""
    from vllm_musa_headpar.host import magi2 as patches

    def stock(self: Any, hidden: Any, rope: Any, varlen: Any, dispatcher: Any, split: Any) -> Any:
        return compute()

    return patches.make_layer_forward(stock)(None, None, None, None, None, split)


def tokens_of(counts: list[int], rank: int, heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + heads)
    return torch.randn((counts[rank], heads * DIM), generator=generator).to(torch.bfloat16)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int16).flatten().tolist()


# --- uneven heads ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all_to_all", "p2p"])
def test_every_head_count_on_every_group_size_gives_the_stock_bits(ranks: RankPool, exchange: str) -> None:
    """Heads 1..16 on 1..8 ranks; uneven tokens, and in every second case a rank without any."""
    for wrong in ranks(all_head_counts, 8, exchange):
        assert wrong == []


def all_head_counts(rank: int, nproc: int, store: str, exchange: str) -> list[str]:
    wrong = []
    with process_group(rank, nproc, store):
        groups = [dist.new_group(list(range(size))) for size in range(1, nproc + 1)]
        cases = [(size, heads) for size, heads in itertools.product(range(1, nproc + 1), range(1, 17)) if rank < size]
        with magi2.plugin(None):
            expected = {case: moe_output(*case, groups, rank) for case in cases}
        with magi2.plugin(exchange):
            for case in cases:
                if bits(moe_output(*case, groups, rank)) != bits(expected[case]):
                    wrong.append(f"{case[1]} heads on {case[0]} ranks")
            assert magi2.used_exchanges(groups[max(rank, 1) :]) == {exchange}
        dist.barrier()
    return wrong


def moe_output(size: int, heads: int, groups: list[Any], rank: int) -> torch.Tensor:
    counts = [0 if heads % 2 and other == (heads // 2) % size else 2 + other % 3 for other in range(size)]
    layer = moe_layer(heads, group_of(groups[size - 1], size, rank))
    with torch.inference_mode():
        return layer(tokens_of(counts, rank, heads))


def test_a_padded_layer_moves_only_real_heads(ranks: RankPool) -> None:
    """6 heads on 4 ranks, shards of 2: the bytes of 8 heads between ranks become those of 6, a quarter less."""
    results = ranks(padded_traffic, 4)
    assert sum(on for on, _ in results) * 4 == sum(off for _, off in results) * 3
    row = 5 * 2 * DIM * 2  # 5 tokens x 2 heads x DIM x bfloat16
    assert [on for on, _ in results] == [2 * row + 3 * row] * 3 + [3 * row]


def padded_traffic(rank: int, nproc: int, store: str) -> tuple[int, int]:
    """Bytes that this rank sends in one MoE layer, plugin on and off."""
    sent = []
    with process_group(rank, nproc, store):
        layer = moe_layer(6, group_of(dist.group.WORLD, nproc, rank))
        x = tokens_of([5] * nproc, rank, 6)
        for exchange in ("all_to_all", None):
            with magi2.plugin(exchange), torch.inference_mode(), ulysses(layer.ep_group):
                in_layer([5] * nproc, lambda: layer(x))  # the first use settles
                with counting() as counts:
                    in_layer([5] * nproc, lambda: layer(x))
                gathered = 8 * (nproc - 1) * counts.collectives["all_gather"]
                sent.append(counts.bytes_between_ranks - gathered)
    return sent[0], sent[1]


def test_heads_and_tokens_may_both_be_missing_on_a_rank_of_a_fresh_group(ranks: RankPool) -> None:
    for found, expected in ranks(nothing_on_a_rank, 4):
        assert found == expected


def nothing_on_a_rank(rank: int, nproc: int, store: str) -> tuple[list[int], list[int]]:
    """Rank 3 owns no head and brings no token: it sends and receives nothing, in the first exchange of the group."""
    counts = [3, 1, 2, 0]
    outputs = []
    with process_group(rank, nproc, store):
        for exchange in (None, "p2p"):
            with magi2.plugin(exchange), torch.inference_mode():
                layer = moe_layer(3, group_of(dist.new_group(), nproc, rank))
                outputs.append(bits(layer(tokens_of(counts, rank, 3))))
    return outputs[1], outputs[0]


# --- known counts ---------------------------------------------------------------------------------------------


def test_known_counts_save_the_collective_and_every_host_sync(ranks: RankPool) -> None:
    for stock, plugin in ranks(moe_costs, 4):
        assert stock == ({"all_gather": 1, "all_to_all_single": 2}, 4)
        assert plugin == ({"all_to_all_single": 2}, 0)


def moe_costs(rank: int, nproc: int, store: str) -> list[tuple[dict[str, int], int]]:
    """Collectives and host syncs of one MoE layer outside expert compute, stock and plugin."""
    costs = []
    with process_group(rank, nproc, store):
        layer = moe_layer(4, group_of(dist.group.WORLD, nproc, rank))
        layer._local_forward = lambda x_heads: x_heads * 2  # expert compute on CPU has host syncs of its own
        x = tokens_of([3] * nproc, rank, 4)
        for exchange in (None, "auto"):
            with magi2.plugin(exchange), torch.inference_mode(), ulysses(layer.ep_group):
                in_layer([3] * nproc, lambda: layer(x))
                with counting() as counts:
                    in_layer([3] * nproc, lambda: layer(x))
                costs.append((dict(counts.collectives), counts.host_syncs))
    return costs


def test_counts_are_discovered_where_the_split_does_not_describe_the_group(ranks: RankPool) -> None:
    for gathers in ranks(discoveries, 2):
        assert gathers == {
            "known": 0,
            "outside of a layer": 1,
            "a tensor": 1,
            "not ints": 1,
            "of another length": 1,
            "of another group": 1,
        }


def discoveries(rank: int, nproc: int, store: str) -> dict[str, int]:
    seen = {}
    with process_group(rank, nproc, store), magi2.plugin("auto"), torch.inference_mode():
        group, other = group_of(dist.group.WORLD, nproc, rank), group_of(dist.new_group(), nproc, rank)
        layer = moe_layer(4, group)
        x = tokens_of([3] * nproc, rank, 4)

        def gathers(call: Callable[[], Any], of: Any = group) -> int:
            with ulysses(of), counting() as counts:
                call()
            return counts.collectives["all_gather"]

        splits: dict[str, Any] = {
            "known": [3, 3],
            "a tensor": torch.tensor([3, 3]),
            "not ints": [3.0, 3.0],
            "of another length": [3, 3, 3],
        }
        seen = {name: gathers(lambda split=split: in_layer(split, lambda: layer(x))) for name, split in splits.items()}
        seen["outside of a layer"] = gathers(lambda: layer(x))
        seen["of another group"] = gathers(lambda: in_layer([3, 3], lambda: layer(x)), other)
    return seen


def test_a_contradicting_split_raises_before_any_collective_and_leaves_nothing_behind(ranks: RankPool) -> None:
    for message, launches, held in ranks(contradiction, 2):
        assert "[4, 2]" in message
        assert "has 3" in message
        assert launches == 0
        assert held is None


def contradiction(rank: int, nproc: int, store: str) -> tuple[str, int, Any]:
    from vllm_musa_headpar.host import magi2 as patches

    with process_group(rank, nproc, store), magi2.plugin("auto"):
        layer = moe_layer(4, group_of(dist.group.WORLD, nproc, rank))
        x = tokens_of([3, 3], rank, 4)
        with ulysses(layer.ep_group), counting() as counts:
            try:
                in_layer([4, 2], lambda: layer(x))
                message = "nothing was raised"
            except ValueError as error:
                message = str(error)
        return message, counts.communication_launches, patches._token_split.get()


def test_a_patch_laid_over_the_wrappers_later_is_not_gone_past(ranks: RankPool) -> None:
    for calls, same, uninstalled in ranks(patched_over_later, 2):
        assert calls == ["dispatch"]
        assert same
        assert uninstalled == ["magi2.ep_dispatch"]


def patched_over_later(rank: int, nproc: int, store: str) -> tuple[list[str], bool, list[str]]:
    """Another plugin wraps mh_moe.ep_dispatch after us: it is called, and undo leaves it alone."""
    import functools

    from vllm_omni.diffusion.models.magi2 import mh_moe

    from vllm_musa_headpar import plugin

    calls: list[str] = []
    with process_group(rank, nproc, store), torch.inference_mode():
        layer, x = moe_layer(3, group_of(dist.group.WORLD, nproc, rank)), tokens_of([3, 2], rank, 3)
        stock = layer(x)
        with magi2.plugin("auto"):
            ours = mh_moe.ep_dispatch

            @functools.wraps(ours)
            def theirs(*arguments: Any, **named: Any) -> Any:
                calls.append("dispatch")
                return ours(*arguments, **named)

            mh_moe.ep_dispatch = theirs
            try:
                output = layer(x)
                kept = [record.name for record in plugin.undo()]
            finally:
                mh_moe.ep_dispatch = ours
    return calls, bits(output) == bits(stock), kept


# --- attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["all_to_all", "p2p"])
def test_attention_gives_the_stock_bits_strides_and_buffer(ranks: RankPool, exchange: str) -> None:
    for wrong in ranks(attention_cases, 4, exchange):
        assert wrong == []


def attention_cases(rank: int, nproc: int, store: str, exchange: str) -> list[str]:
    with process_group(rank, nproc, store):
        with magi2.plugin(None):
            stock = {name: attention(rank, nproc, *case) for name, case in ATTENTION.items()}
        with magi2.plugin(exchange):
            found = {name: attention(rank, nproc, *case) for name, case in ATTENTION.items()}
    return [name for name in ATTENTION if described(found[name]) != described(stock[name])]


F32, BF16 = torch.float32, torch.bfloat16
# name -> token split, heads of Q, K and V, their types
ATTENTION: dict[str, tuple[list[int], tuple[int, ...], tuple[torch.dtype, ...]]] = {
    "equal": ([3, 3, 3, 3], (8, 8, 8), (BF16, BF16, BF16)),
    "uneven": ([5, 0, 2, 1], (8, 8, 8), (BF16, BF16, BF16)),
    "empty": ([0, 0, 0, 0], (8, 8, 8), (BF16, BF16, BF16)),
    "grouped queries": ([2, 1, 4, 3], (16, 4, 4), (BF16, BF16, BF16)),
    "mixed types": ([2, 1, 4, 3], (8, 4, 4), (BF16, F32, torch.float16)),
    "integers and floats": ([2, 1, 4, 3], (4, 4, 4), (torch.int32, BF16, torch.uint8)),
    "one without heads": ([2, 1, 4, 3], (8, 0, 4), (BF16, BF16, BF16)),
    "no heads at all": ([2, 1, 4, 3], (0, 0, 0), (BF16, F32, BF16)),
}


def attention(
    rank: int, nproc: int, split: list[int], heads: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> list[torch.Tensor]:
    """Q, K, V there, and the first of them back; the exchange functions as `attention` imported them."""
    from vllm_omni.diffusion.models.magi2 import attention as host

    group = group_of(dist.group.WORLD, nproc, rank)
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        (torch.randn((split[rank], count, DIM), generator=generator) * 50).to(dtype)
        for count, dtype in zip(heads, dtypes, strict=True)
    ]
    there = host.scatter_heads_gather_seqlen(tensors, split, group)
    assert len({tensor.untyped_storage().data_ptr() for tensor in there}) == 1
    back = host.scatter_seqlen_gather_heads(there[0].contiguous(), split, group)
    return [*there, back.contiguous()]  # stock leaves a strided view where each rank has one head; ours is contiguous


def described(tensors: list[torch.Tensor]) -> list[Any]:
    return [
        (tensor.dtype, tensor.shape, tensor.stride(), tensor.contiguous().view(-1).view(torch.uint8).tolist())
        for tensor in tensors
    ]


def test_attention_stages_q_k_and_v_once(ranks: RankPool) -> None:
    """One payload instead of two: a packed copy of each and their concatenation."""
    for stock, plugin, payload in ranks(attention_costs, 2):
        assert (stock, plugin) == (2 * payload, payload)


def attention_costs(rank: int, nproc: int, store: str) -> tuple[int, int, int]:
    """Bytes copied by dispatching Q, K and V; and the bytes of the three."""
    from vllm_omni.diffusion.models.magi2 import attention as host

    copied = []
    with process_group(rank, nproc, store):
        group = group_of(dist.group.WORLD, nproc, rank)
        tensors = [torch.randn(6, 8, DIM).to(BF16) for _ in range(3)]
        for exchange in (None, "all_to_all"):
            with magi2.plugin(exchange):
                host.scatter_heads_gather_seqlen(tensors, [6, 6], group)
                with counting() as counts:
                    host.scatter_heads_gather_seqlen(tensors, [6, 6], group)
                copied.append(counts.bytes_copied)
    return copied[0], copied[1], sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", ["too few sizes", "wrong sizes", "shape", "heads", "strided return"])
def test_attention_keeps_the_stock_messages(ranks: RankPool, name: str) -> None:
    (stock, plugin), _ = ranks(attention_refusals, 2, name)
    assert plugin == stock
    assert stock.startswith(("ValueError", "IndexError"))


def attention_refusals(rank: int, nproc: int, store: str, name: str) -> list[str]:
    from vllm_omni.diffusion.models.magi2 import attention as host

    with process_group(rank, nproc, store):
        group = group_of(dist.group.WORLD, nproc, rank)
        good = torch.zeros(3, 4, DIM)
        calls: dict[str, Callable[[], Any]] = {
            "too few sizes": lambda: host.scatter_heads_gather_seqlen([good], [3], group),
            "wrong sizes": lambda: host.scatter_seqlen_gather_heads(good, [3, 3], group),
            "shape": lambda: host.scatter_heads_gather_seqlen([good, good[0]], [3, 3], group),
            "heads": lambda: host.scatter_heads_gather_seqlen([good[:, :3]], [3, 3], group),
            "strided return": lambda: host.scatter_seqlen_gather_heads(good[:, :2], [1, 2], group),
        }
        told = []
        for exchange in (None, "auto"):
            with magi2.plugin(exchange), counting() as counts:
                try:
                    calls[name]()
                    told.append("nothing was raised")
                except (ValueError, IndexError) as error:
                    told.append(f"{type(error).__name__}: {error}")
            assert counts.communication_launches == 0
        return told
