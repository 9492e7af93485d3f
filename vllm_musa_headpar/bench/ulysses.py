"""The exchanges of one Ulysses attention of the installed vLLM-Omni, stock and with the plugin, side by side.

What runs is the host's own `UlyssesParallelAttention`: `pre_attention` with queries, keys and values, and
`post_attention` with as much as one of them. Nothing is computed in between.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import config, plugin
from ..testing.counters import counting
from .layer import EXCHANGES, STOCK, Row, row_of, same_outputs
from .rounds import WARM_UP, interleave, progress
from .world import BenchError, World, gather_counts, group_using, launch, ranks_here, require

HEADS, DIM = 24, 128
ULYSSES = "vllm_omni.diffusion.attention.parallel.ulysses"
PARTS = ("Q, K and V", "return", "both")


def measure(
    nproc: int = 2,
    batch: int = 1,
    tokens: int = 3702,
    heads: int = HEADS,
    dim: int = DIM,
    rounds: int = 20,
    *,
    exchanges: Sequence[str] = EXCHANGES,
    backend: str = "auto",
    timeout: float = 600.0,
) -> list[Row] | None:
    """Measure in ranks spawned here, or in those of a torchrun world.

    Args:
        nproc: ranks to spawn.
        batch, tokens, heads, dim: of each rank's queries, keys and values, `[batch, tokens, heads, dim]` bfloat16.
        rounds: interleaved rounds to time.
        exchanges: implementations to use in the plugin's variants.
        timeout: seconds for the whole.

    Returns:
        The rows by part and variant; None on the other ranks of a torchrun world.

    Raises:
        BenchError: there is no such host here, or not the one that the plugin patches.
    """
    if importlib.util.find_spec("vllm_omni") is None:
        raise BenchError("the Ulysses bench needs vLLM-Omni: it measures the host's own attention exchanges")
    if heads % ranks_here(nproc):
        raise BenchError(f"{heads} heads must be divisible by the {ranks_here(nproc)} ranks: stock needs that")
    shape = (batch, tokens, heads, dim)
    rows: list[Row] | None = launch(_measure, nproc, backend, timeout, shape, rounds, tuple(exchanges))
    return rows


def print_table(rows: Sequence[Row], shape: tuple[int, int, int, int], ranks: int) -> None:
    """Stock and plugin side by side."""
    require("rich", "cli")
    from .show import console, megabytes, spread, table_of

    headings = ("", "", "ms", "x stock", "launches", "MB sent", "MB copied", "MB new")
    cells = [
        (
            row.part,
            row.variant,
            spread(row.time),
            f"{row.times_stock:.2f}",
            str(row.collectives),
            *map(megabytes, (row.bytes_between_ranks, row.bytes_copied, row.bytes_allocated)),
        )
        for row in rows
    ]
    caption = (
        "Times on the slowest rank: median, below it 10th to 90th percentile. Launches: collectives and point-to-point "
        "batches. MB summed over ranks: sent to other ranks, copied, newly allocated."
    )
    title = f"One Ulysses attention's exchanges, {list(shape)} bfloat16 on each of {ranks} ranks"
    console().print(table_of(title, caption, headings, cells))


def _measure(world: World, shape: tuple[int, int, int, int], rounds: int, exchanges: tuple[str, ...]) -> list[Row]:
    # Before the host is imported: nothing is to be fetched, and its start is no news here.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    ulysses = importlib.import_module(ULYSSES)
    generator = torch.Generator().manual_seed(world.rank)
    qkv = [torch.randn(shape, generator=generator).to(torch.bfloat16).to(world.device) for _ in range(3)]
    variants = {STOCK: world.new_group()}
    with torch.inference_mode():
        for exchange in exchanges:
            group, used = group_using(exchange, world)
            if used == exchange:
                variants[f"plugin, {exchange}"] = group
        try:
            counts = _checked_counts(world, ulysses, variants, qkv)
            lines = [partial(_time, world, ulysses, name, group, qkv) for name, group in variants.items()]
            with progress(world, f"attention, {world.size} ranks", rounds + WARM_UP) as advance:
                seconds = interleave(lines, rounds, world, advance)
        finally:
            plugin.undo()
    slowest = seconds.amax(dim=0)  # [rounds, variants, parts]
    payload = qkv[0].nbytes * world.size
    return [
        row_of(part, name, slowest[:, :, place], number, counts[number][place], payloads * payload)
        for place, (part, payloads) in enumerate(zip(PARTS, (3, 1, 4), strict=True))
        for number, name in enumerate(variants)
    ]


@contextlib.contextmanager
def _variant(world: World, ulysses: Any, name: str, group: Any) -> Iterator[Any]:
    """The plugin on or off, and the host's attention over a group with it."""
    if name == STOCK:
        plugin.undo()
    else:
        with mock.patch.dict(os.environ, {config.FLAG: "1"}):
            plugin.register()
        missing = [record for record in plugin.report() if ULYSSES in record.replaces and record.status != "applied"]
        if missing:
            told = "; ".join(f"{record.name} is {record.status}: {record.reason}" for record in missing)
            raise BenchError(f"the plugin does not patch this host's Ulysses attention: {told}")
    sp_group = SimpleNamespace(
        ulysses_group=group, ulysses_world_size=world.size, ulysses_rank=world.rank, ring_world_size=1
    )
    yield ulysses.UlyssesParallelAttention(sp_group, scatter_idx=2, gather_idx=1, use_sync=False)


def _parts(attention: Any, qkv: Sequence[Tensor]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def before() -> Any:
        return attention.pre_attention(*qkv, None)

    def after(results: Any) -> Any:
        query, *_, context = results
        return attention.post_attention(query, context)

    return before, after


def _checked_counts(
    world: World, ulysses: Any, variants: dict[str, Any], qkv: Sequence[Tensor]
) -> list[list[dict[str, list[int]]]]:
    """Run each variant once, compare its bits with stock's and count, by variant and part."""
    counts, expected = [], None
    for name, group in variants.items():
        with _variant(world, ulysses, name, group) as attention:
            before, after = _parts(attention, qkv)
            with counting() as both:
                with counting() as there:
                    results = before()
                with counting() as back:
                    returned = after(results)
        outputs = [*results[:3], returned]
        expected = expected or outputs
        if not world.all_true(same_outputs(outputs, expected)):
            raise BenchError(f"{name} does not give the bits of the stock host: not measured")
        counts.append([gather_counts(count, world) for count in (there, back, both)])
    return counts


def _time(world: World, ulysses: Any, name: str, group: Any, qkv: Sequence[Tensor]) -> tuple[float, ...]:
    with _variant(world, ulysses, name, group) as attention:
        before, after = _parts(attention, qkv)
        there = world.timed(before)
        results = before()
        back = world.timed(partial(after, results))
    return there, back, there + back
