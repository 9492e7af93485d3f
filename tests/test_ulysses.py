"""The Ulysses records on the real host: what stock gives, the plugin gives, bit for bit and stride for stride."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from pool import environment, process_group

pytestmark = pytest.mark.cpu

COMM = "vllm_omni.diffusion.distributed.comm"
ULYSSES = "vllm_omni.diffusion.attention.parallel.ulysses"


@contextmanager
def patched(exchange: str, **variables: str) -> Iterator[None]:
    """The plugin switched on in this process for the time of the block."""
    from vllm_musa_headpar import plugin

    with environment(VLLM_MUSA_HEADPAR="strict", VLLM_MUSA_HEADPAR_EXCHANGE=exchange, **variables):
        plugin.register()
        try:
            yield
        finally:
            assert not plugin.undo()


def host() -> Any:
    import vllm_omni  # noqa: F401
    from vllm_omni.diffusion.attention.parallel import ulysses
    from vllm_omni.diffusion.distributed import comm

    return comm, ulysses


def random_bits(generator: random.Random, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor of random bytes: NaN payloads, negative zeros and denormals are among them."""
    import torch

    seed = torch.Generator().manual_seed(generator.randrange(2**31))
    width = dtype.itemsize
    raw = torch.randint(256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=seed)
    return raw.view(dtype)


def strided(tensor: Any, how: int) -> Any:
    """The same values in other strides: as they are, heads before tokens, a gap behind each row, a slice of tokens."""
    import torch

    if how == 1:
        return tensor.transpose(1, -2).contiguous().transpose(1, -2)
    if how == 2:
        room = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
        room[..., : tensor.shape[-1]] = tensor
        return room[..., : tensor.shape[-1]]
    if how == 3:
        room = torch.zeros((tensor.shape[0], tensor.shape[1] + 2, *tensor.shape[2:]), dtype=tensor.dtype)
        room[:, 1:-1] = tensor
        return room[:, 1:-1]
    return tensor


def same(found: Any, expected: Any) -> None:
    import torch

    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        assert found[1] == expected[1]
        found, expected = found[0], expected[0]
    assert (found.shape, found.dtype, visible(found)) == (expected.shape, expected.dtype, visible(expected))
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def visible(tensor: Any) -> Any:
    """The strides that a consumer can see: nobody steps along a dimension of one element."""
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return steps if tensor.numel() else "empty"


@dataclass
class Call:
    """One call of a host function, the same on all ranks but for the tensor."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        shapes = [f"{list(arg.shape)} {arg.dtype}" if hasattr(arg, "shape") else arg for arg in self.args]
        return f"{self.name} {shapes} {self.kwargs}"

    def __call__(self, group: Any) -> Any:
        comm, ulysses = host()
        if self.module == COMM:
            return getattr(comm, self.name)(*self.args, group=group, **self.kwargs)
        return getattr(ulysses, self.name)(group, *self.args, **self.kwargs)


def random_calls(seed: int, rank: int, ranks: int, number: int) -> Iterator[Call]:
    """Random calls of all four functions, in random shapes, types and strides."""
    import torch

    alike = random.Random(seed)  # the same on every rank
    mine = random.Random(seed * 100 + rank)
    types = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.complex64, torch.bool, torch.int8]
    for _ in range(number):
        kind = alike.choice(["4D in", "4D out", "5D in", "5D out", "uaa in", "uaa in", "uaa out", "uaa out"])
        batch, tokens, heads, dim = (
            alike.choice(choice) for choice in ((1, 1, 2, 3), (1, 2, 5, 16), (1, 2, 3), (1, 8, 5))
        )
        dtype, how = alike.choice(types), alike.randrange(4)
        counts = [alike.choice((0, 1, 3, 7)) for _ in range(ranks)]
        counts[alike.randrange(ranks)] = 2
        if dtype == torch.bool:
            make = lambda *shape: random_bits(mine, shape, torch.uint8) > 99  # noqa: E731
        else:
            make = lambda *shape, dtype=dtype: random_bits(mine, shape, dtype)  # noqa: E731
        if kind == "4D in":
            yield Call(COMM, "all_to_all_4D", (strided(make(batch, tokens, ranks * heads, dim), how), 2, 1), {})
        elif kind == "4D out":
            yield Call(COMM, "all_to_all_4D", (strided(make(batch, ranks * tokens, heads, dim), how), 1, 2), {})
        elif kind == "5D in":
            yield Call(COMM, "all_to_all_5D", (strided(make(batch, tokens, 3, ranks * heads, dim), how), 3, 1), {})
        elif kind == "5D out":
            yield Call(COMM, "all_to_all_5D", (strided(make(batch, ranks * tokens, 3, heads, dim), how), 1, 3), {})
        elif kind == "uaa in":
            whole = alike.randrange(1, 2 * ranks + 2)
            padded = alike.choice([None, -(-whole // ranks) * ranks, (-(-whole // ranks) + 1) * ranks])
            kwargs = {"seq_lens": counts, "use_sync": False, "padded_head_cnt": padded}
            x = make(batch, counts[rank], whole, dim)
            yield Call(ULYSSES, "_ulysses_all_to_all_any_qkv", (strided(x, how),), kwargs)
        else:
            whole = alike.randrange(1, heads * ranks + 1)
            kwargs = {"seq_lens": counts, "local_seq_len": counts[rank], "orig_head_cnt": whole, "use_sync": False}
            x = make(batch, sum(counts), heads, dim)
            yield Call(ULYSSES, "_ulysses_all_to_all_any_o", (strided(x, how),), kwargs)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say in an error what was called."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(what) from error


def compare_random_calls(rank: int, ranks: int, store: str, seed: int, number: int) -> int:
    import torch
    import torch.distributed as dist

    host()
    with process_group(rank, ranks, store, timeout=120.0):
        group = dist.new_group()
        calls = list(random_calls(seed, rank, ranks, number))
        with torch.inference_mode():
            expected = [call(group) for call in calls]
        for exchange in ("all_to_all", "p2p"):
            group = dist.new_group()
            with patched(exchange):
                for turn, (call, right) in enumerate(zip(calls, expected, strict=True)):
                    with told(f"{exchange}: {call}"), torch.inference_mode() if turn % 2 else torch.no_grad():
                        same(call(group), right)
    return len(calls)


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_random_calls_give_what_stock_gives(ranks: Any, nproc: int) -> None:
    assert ranks(compare_random_calls, nproc, 7 + nproc, 60, timeout=400.0) == [60] * nproc


# --- One launch for the tensors of an attention ---


def attention_of(group: Any) -> Any:
    """The host's own Ulysses attention over a group."""
    from types import SimpleNamespace

    import torch.distributed as dist

    _, ulysses = host()
    ranks = dist.get_world_size(group)
    sp_group = SimpleNamespace(
        ulysses_group=group, ulysses_world_size=ranks, ulysses_rank=dist.get_rank(group), ring_world_size=1
    )
    return ulysses.UlyssesParallelAttention(sp_group, 2, 1, False)


def attend(attention: Any, query: Any, key: Any, value: Any, gate: Any = None) -> list[Any]:
    """The exchanges of one attention: what its kernel gets, and what comes back of the queries."""
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    metadata = None if gate is None else AttentionMetadata(extra={"gate_compress": gate})
    query, key, value, metadata, context = attention.pre_attention(query, key, value, metadata)
    gates = [] if gate is None else [metadata.extra["gate_compress"]]
    return [query, key, value, *gates, attention.post_attention(query, context)]


def count_attention(rank: int, ranks: int, store: str, exchange: str, mode: str) -> dict[str, list[int]]:
    """Launches and copied, sent and expected bytes of one attention, by case; its bits are compared with stock's."""
    from unittest import mock

    import torch
    import torch.distributed as dist

    from vllm_musa_headpar.host import ulysses as records
    from vllm_musa_headpar.testing.counters import counting

    _, ulysses = host()
    generator = random.Random(rank)
    seen = {}
    shapes = {
        "plain": [(1, 5, 4, 8)] * 3,
        "batch": [(2, 5, 4, 8)] * 3,
        "grouped": [(2, 5, 8, 8), (2, 5, 4, 8), (2, 5, 4, 8)],
        "gate": [(1, 5, 4, 8)] * 4,
        "same object": [(1, 5, 4, 8)],
    }
    with (
        process_group(rank, ranks, store, timeout=120.0),
        torch.inference_mode(),
        mock.patch.object(ulysses, "get_ulysses_mode", return_value=mode),
    ):
        stock, group = attention_of(dist.new_group()), dist.new_group()
        for name, case in shapes.items():
            tensors = [random_bits(generator, shape, torch.bfloat16) for shape in case]
            tensors *= 3 if name == "same object" else 1
            expected = attend(stock, *tensors)
            with patched(exchange):
                attention = attention_of(group)
                attend(attention, *tensors)  # the first use is settled
                with counting() as counts:
                    found = attend(attention, *tensors)
                assert records._attention.announced is None
            for one, other in zip(found, expected, strict=True):
                same(one, other)
            payload = sum(tensor.nbytes for tensor in (*tensors, tensors[0]))
            seen[name] = [
                counts.communication_launches - (mode != "strict"),  # less the host's own count of tokens
                counts.bytes_copied * 100 // payload,
                counts.messages,
            ]
    return seen


@pytest.mark.parametrize("mode", ["strict", "advanced_uaa"])
def test_an_attention_is_two_launches_on_p2p_and_one_copy_per_direction(ranks: Any, mode: str) -> None:
    for seen in ranks(count_attention, 2, "p2p", mode, timeout=400.0):
        launches = {name: values[0] for name, values in seen.items()}
        assert launches == {"plain": 2, "batch": 2, "grouped": 2, "gate": 2, "same object": 2}
        # Half of each payload is packed or unpacked, the other half is the rank's own block: 100 % in all.
        assert {name: values[1] for name, values in seen.items()} == dict.fromkeys(seen, 100)
        assert seen["batch"][2] == 2 * seen["plain"][2] == 8


@pytest.mark.parametrize("mode", ["strict", "advanced_uaa"])
def test_the_stock_collective_stays_four_launches(ranks: Any, mode: str) -> None:
    for seen in ranks(count_attention, 2, "all_to_all", mode, timeout=400.0):
        assert {name: values[0] for name, values in seen.items()} == {
            "plain": 4,
            "batch": 4,
            "grouped": 4,
            "gate": 5,
            "same object": 4,
        }


def announce_and_stray(rank: int, ranks: int, store: str) -> list[str]:
    """Tensors that are not the announced ones, and an attention that fails on its way."""
    import torch
    import torch.distributed as dist

    from vllm_musa_headpar.host import ulysses as records

    comm, _ = host()
    generator = random.Random(rank)
    problems = []
    with process_group(rank, ranks, store, timeout=120.0), torch.inference_mode():
        stock_group, group = dist.new_group(), dist.new_group()
        q, k, v, other = (random_bits(generator, (1, 3, 4, 8), torch.float32) for _ in range(4))
        expected = [comm.all_to_all_4D(each, 2, 1, group=stock_group) for each in (other, q, k)]
        with patched("p2p"):
            records._attention.announced = announced = records.Announcement((q, k, v))
            try:
                for each, right in zip((other, q, k), expected, strict=True):
                    same(comm.all_to_all_4D(each, 2, 1, group=group), right)
                again = comm.all_to_all_4D(k, 2, 1, group=group)  # fetched once: now by itself
                same(again, expected[2])
                if len(announced.arrived) != 1 or announced.arrived[0][0] is not v:
                    problems.append("the values should wait to be fetched")
            finally:
                records._attention.announced = None
            attention = attention_of(group)
            try:
                attention.pre_attention(q, k[:, :, :3], v, None)
                problems.append("3 heads on 2 ranks should be refused")
            except ValueError:
                pass
            if records._attention.announced is not None:
                problems.append("an attention that failed left its announcement behind")
    return problems


def test_what_was_not_announced_goes_by_itself_and_nothing_outlives_its_attention(ranks: Any) -> None:
    assert ranks(announce_and_stray, 2, timeout=400.0) == [[], []]


# --- Padding and refusals ---


def count_uaa_bytes(rank: int, ranks: int, store: str) -> tuple[int, int]:
    """Bytes between ranks of a dispatch and a return of 5 heads on 4 ranks, padded to 8."""
    import torch
    import torch.distributed as dist

    from vllm_musa_headpar.testing.counters import counting

    _, ulysses = host()
    with process_group(rank, ranks, store, timeout=120.0) as world, torch.inference_mode():
        x = torch.ones(2, 3, 5, 4)
        with patched("p2p"):
            group = dist.new_group()
            for _ in range(2):
                with counting() as there:
                    wide, heads = ulysses._ulysses_all_to_all_any_qkv(group, x, seq_lens=[3] * ranks, use_sync=False)
                with counting() as back:
                    ulysses._ulysses_all_to_all_any_o(
                        group, wide, seq_lens=[3] * ranks, local_seq_len=3, orig_head_cnt=heads, use_sync=False
                    )
        assert world is not None
        assert wide.shape == (2, 12, 2, 4)
        assert wide.sum() == 2 * 12 * 4 * (2, 2, 1, 0)[rank]
    return there.bytes_between_ranks, back.bytes_between_ranks


def test_padded_heads_do_not_travel(ranks: Any) -> None:
    seen = ranks(count_uaa_bytes, 4, timeout=400.0)
    row = 2 * 3 * 4 * 4  # bytes of one head of one rank's tokens, both batch elements
    assert [there for there, _ in seen] == [(5 - own) * row for own in (2, 2, 1, 0)]
    assert [back for _, back in seen] == [3 * own * row for own in (2, 2, 1, 0)]


REFUSED = {
    "not 4-D": ("all_to_all_4D", (3, 4, 8), (2, 1), {}),
    "another pair": ("all_to_all_4D", (1, 2, 4, 8), (1, 3), {}),
    "heads do not divide": ("all_to_all_4D", (1, 2, 3, 8), (2, 1), {}),
    "tokens do not divide": ("all_to_all_4D", (1, 3, 2, 8), (1, 2), {}),
    "not 5-D": ("all_to_all_5D", (1, 2, 4, 8), (3, 1), {}),
    "four tensors": ("all_to_all_5D", (1, 2, 4, 4, 8), (3, 1), {}),
    "5-D tokens do not divide": ("all_to_all_5D", (1, 3, 3, 2, 8), (1, 3), {}),
    "too little padding": (
        "_ulysses_all_to_all_any_qkv",
        (1, 2, 4, 8),
        (),
        {"seq_lens": [2, 2], "use_sync": False, "padded_head_cnt": 2},
    ),
    "odd padding": (
        "_ulysses_all_to_all_any_qkv",
        (1, 2, 4, 8),
        (),
        {"seq_lens": [2, 2], "use_sync": False, "padded_head_cnt": 5},
    ),
}


def compare_refusals(rank: int, ranks: int, store: str) -> list[str]:
    """Wrong calls that differ between stock and plugin, in words."""
    import torch
    import torch.distributed as dist

    comm, ulysses = host()
    problems = []
    with process_group(rank, ranks, store, timeout=120.0):
        group = dist.new_group()
        for case, (name, shape, args, kwargs) in REFUSED.items():
            module = ulysses if name.startswith("_") else comm
            call = Call(ULYSSES if module is ulysses else COMM, name, (torch.zeros(shape), *args), kwargs)
            answers = []
            for exchange in ("", "p2p", "all_to_all"):
                try:
                    if exchange:
                        with patched(exchange):
                            call(group)
                    else:
                        call(group)
                    answers.append("accepted")
                except Exception as error:
                    answers.append(f"{type(error).__name__}: {error}")
            if len(set(answers)) != 1 or answers[0] == "accepted":
                problems.append(f"{case}: {answers}")
    return problems


def test_what_stock_refuses_is_refused_in_its_words(ranks: Any) -> None:
    assert ranks(compare_refusals, 2, timeout=400.0) == [[], []]


def single_rank(rank: int, ranks: int, store: str) -> None:
    import torch

    from vllm_musa_headpar.testing.counters import counting

    comm, ulysses = host()
    with process_group(rank, ranks, store, timeout=120.0) as group, patched("p2p"), counting() as counts:
        x = torch.rand(1, 4, 2, 8, requires_grad=True)
        comm.all_to_all_4D(x, 2, 1, group=group).sum().backward()  # stock's permutations carry gradients
        assert torch.equal(x.grad, torch.ones_like(x))
        assert ulysses._ulysses_all_to_all_any_qkv(group, x, seq_lens=[4], use_sync=False)[0] is x
    assert not counts.communication_launches


def test_a_single_rank_is_left_to_stock(ranks: Any) -> None:
    ranks(single_rank, 1, timeout=400.0)


def exchange_uneven_with_check(rank: int, ranks: int, store: str) -> str:
    import torch
    import torch.distributed as dist

    comm, _ = host()
    with (
        process_group(rank, ranks, store, timeout=120.0),
        patched("p2p", VLLM_MUSA_HEADPAR_CHECK="1"),
        pytest.raises(RuntimeError) as caught,
    ):
        comm.all_to_all_4D(torch.zeros(1, 3 + rank, 4, 8), 2, 1, group=dist.new_group())
    return str(caught.value)


def test_with_the_check_on_an_uneven_split_names_the_ranks(ranks: Any) -> None:
    first, second = ranks(exchange_uneven_with_check, 2, timeout=400.0)
    assert first == second
    assert "tokens" in first
    assert "rank 0" in first
    assert "rank 1" in first


# --- Compiled ---


def compile_attention(rank: int, ranks: int, store: str, exchange: str, backend: str) -> list[str]:
    """One attention's exchanges compiled whole, with dynamic token counts; what is not as it should be, in words."""
    import torch
    import torch.distributed as dist

    comm, ulysses = host()
    problems = []
    generator = random.Random(rank)
    with process_group(rank, ranks, store, timeout=120.0), torch.inference_mode():
        stock, group = attention_of(dist.new_group()), dist.new_group()
        uaa_group, five_group = dist.new_group(), dist.new_group()

        def uaa(x: Any, seq_lens: list[int], to: Any) -> Any:
            wide, heads = ulysses._ulysses_all_to_all_any_qkv(to, x, seq_lens=seq_lens, use_sync=False)
            wide = wide * 2
            return ulysses._ulysses_all_to_all_any_o(
                to, wide, seq_lens=seq_lens, local_seq_len=x.shape[1], orig_head_cnt=heads, use_sync=False
            )

        def five(x: Any, to: Any) -> Any:
            return comm.all_to_all_5D(comm.all_to_all_5D(x, group=to), 1, 3, group=to)

        with patched(exchange):
            attention = attention_of(group)

            def whole(query: Any, key: Any, value: Any) -> Any:
                return attend(attention, query * 2, key * 2, value * 2)

            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend=backend)
            outputs = []
            for tokens in (3, 5, 8):
                tensors = [
                    torch.rand((2, tokens, heads, 8), generator=None) for heads in (4 * ranks, 2 * ranks, 2 * ranks)
                ]
                outputs.append((tensors, compiled(*tensors)))
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            if graphs != 1:
                problems.append(f"one attention: {graphs} graphs for three token counts")
            compiled_uaa = torch.compile(uaa, fullgraph=True, dynamic=True, backend=backend)
            compiled_five = torch.compile(five, fullgraph=True, dynamic=True, backend=backend)
            more = []
            for tokens in (3, 6):
                counts = [tokens + other for other in range(ranks)]
                x = random_bits(generator, (1, counts[rank], ranks + 1, 4), torch.int32).float()
                packed = random_bits(generator, (1, tokens, 3, 2 * ranks, 4), torch.int32)
                more.append((x, counts, compiled_uaa(x, counts, uaa_group), packed, compiled_five(packed, five_group)))
        for tensors, found in outputs:
            for one, other in zip(found, attend(stock, *(tensor * 2 for tensor in tensors)), strict=True):
                same(one, other)
        for x, counts, found, packed, back in more:
            same(found, uaa(x, counts, dist.group.WORLD))
            same(back, packed)
    return problems


@pytest.mark.parametrize(("exchange", "backend"), [("p2p", "aot_eager"), ("all_to_all", "inductor")])
def test_compiled_whole_without_a_break_or_recompiles(ranks: Any, exchange: str, backend: str) -> None:
    """Also the first use of a group: it settles inside the compiled call."""
    assert ranks(compile_attention, 2, exchange, backend, timeout=600.0) == [[], []]


def compile_on_one_rank(rank: int, ranks: int, store: str, exchange: str) -> None:
    """Rank 1 runs eagerly what rank 0 has compiled, then the other way round, with the check on."""
    import torch
    import torch.distributed as dist

    host()
    with process_group(rank, ranks, store, timeout=120.0), torch.inference_mode():
        stock, group = attention_of(dist.new_group()), dist.new_group()
        with patched(exchange, VLLM_MUSA_HEADPAR_CHECK="1"):
            attention = attention_of(group)

            def whole(*tensors: Any) -> Any:
                return attend(attention, *tensors)

            torch._dynamo.reset()
            compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend="aot_eager")
            tensors = [torch.rand(1, 4, heads, 8) for heads in (4, 2, 2)]
            outputs = [(compiled if rank == turn else whole)(*tensors) for turn in range(2)]
        expected = attend(stock, *tensors)
        for found in outputs:
            for one, other in zip(found, expected, strict=True):
                same(one, other)


@pytest.mark.parametrize("exchange", ["p2p", "all_to_all"])
def test_a_rank_that_compiles_meets_one_that_does_not(ranks: Any, exchange: str) -> None:
    ranks(compile_on_one_rank, 2, exchange, timeout=400.0)


def compile_contract(rank: int, ranks: int, store: str) -> list[str]:
    """The public functions and MAGI-2's wrappers, compiled whole; what differs from eager, in words."""
    import torch
    import torch.distributed as dist

    from vllm_musa_headpar import HeadParallelLayout, scatter_heads_gather_tokens, scatter_tokens_gather_heads

    host()
    from vllm_omni.diffusion.models.magi2 import mh_moe, parallel

    problems = []
    torch._dynamo.reset()

    def there_and_back(x: Any, layout: Any, group: Any) -> Any:
        mine = scatter_heads_gather_tokens(x + 1, group, layout)
        return mine * 1, scatter_tokens_gather_heads(mine, group, layout)

    def wrappers(x: Any, group: Any, counts: list[int]) -> Any:
        moe = mh_moe.ep_undispatch(mh_moe.ep_dispatch(x * 2, group, counts) + 1, group, counts)
        qkv = parallel.scatter_heads_gather_seqlen([x * 2, x[:, :ranks] * 3], counts, group)
        return moe, *qkv, parallel.scatter_seqlen_gather_heads(qkv[0].contiguous(), counts, group)

    with process_group(rank, ranks, store, timeout=120.0) as world, torch.inference_mode():
        for replicas in (None, ((1, 2), (2, 1))):
            compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
            layout = HeadParallelLayout((3, 3), rank, replicas)
            x = torch.rand(3, 4, 5)
            for one, other in zip(compiled(x, layout, world), there_and_back(x, layout, world), strict=True):
                same(one, other)
        try:
            compiled(torch.rand(3, 3, 5), HeadParallelLayout((3, 3), rank), world)
            problems.append("3 heads on 2 shards were accepted")
        except ValueError as error:
            if "divisible" not in str(error):
                problems.append(f"3 heads on 2 shards: {error}")
        group = parallel.Magi2ParallelGroup(dist.new_group(), ranks, rank)
        for counts in ([2, 4], [5, 3]):
            x = torch.rand(counts[rank], 2 * ranks, 6)
            expected = wrappers(x, group, counts)
            with patched("p2p"):
                compiled = torch.compile(wrappers, fullgraph=True, dynamic=True, backend="aot_eager")
                for one, other in zip(compiled(x, group, counts), expected, strict=True):
                    same(one, other)
    return problems


def test_the_contract_and_magi2_compile_whole(ranks: Any) -> None:
    assert ranks(compile_contract, 2, timeout=600.0) == [[], []]


# --- On MUSA with MCCL, simulated where there is no card ----------------------------------------------


def attend_on_mccl(rank: int, ranks: int, store: str, mode: str) -> list[int]:
    """One attention of uneven heads and a batch of 2, stock and plugin, on the device; what the plugin launched."""
    from unittest import mock

    import torch
    import torch.distributed as dist
    from musa_device import mccl_group, no_host_sync

    from vllm_musa_headpar.testing.counters import counting

    _, ulysses = host()
    generator = random.Random(rank)
    heads = (4 * ranks, 2 * ranks, 2 * ranks) if mode == "strict" else (2 * ranks - 1,) * 3
    launches = []
    with (
        mccl_group(rank, ranks, store, timeout=120.0) as device,
        torch.inference_mode(),
        mock.patch.object(ulysses, "get_ulysses_mode", return_value=mode),
    ):
        tensors = [random_bits(generator, (2, 5, count, 8), torch.bfloat16).to(device) for count in heads]
        expected = [each.cpu() for each in attend(attention_of(dist.new_group()), *tensors)]
        with patched("auto"):
            attention = attention_of(dist.new_group())
            attend(attention, *tensors)  # the first use is settled
            with counting() as counts, no_host_sync() if mode == "strict" else nullcontext():
                found = attend(attention, *tensors)
            launches += [counts.batches, counts.communication_launches]
        for one, other in zip(found, expected, strict=True):
            assert one.device.type == "musa"
            same(one.cpu(), other)
    return launches


@pytest.mark.musa
@pytest.mark.parametrize("mode", ["strict", "advanced_uaa"])
def test_an_attention_on_mccl_is_two_launches(musa_ranks: Any, mode: str) -> None:
    """`auto` on MCCL: point-to-point, its rules kept, the bits of stock; UAA counts tokens with a collective more."""
    counted = 0 if mode == "strict" else 1
    assert musa_ranks(attend_on_mccl, 2, mode, timeout=400.0) == [[2, 2 + counted]] * 2
