"""The Ulysses records on the real host: what stock gives, the plugin gives, bit for bit and stride for stride."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
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
    done = 0
    with process_group(rank, ranks, store):
        stock_group = dist.new_group()
        groups = {exchange: dist.new_group() for exchange in ("all_to_all", "p2p")}
        for call in random_calls(seed, rank, ranks, number):
            with torch.inference_mode():
                expected = call(stock_group)
            for exchange, group in groups.items():
                with patched(exchange), torch.inference_mode() if done % 2 else torch.no_grad():
                    found = call(group)
                with told(f"{exchange}: {call}"):
                    same(found, expected)
            done += 1
    return done


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_random_calls_give_what_stock_gives(ranks: Any, nproc: int) -> None:
    assert ranks(compare_random_calls, nproc, 7 + nproc, 60, timeout=400.0) == [60] * nproc
