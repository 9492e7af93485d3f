"""One MoE layer and one attention exchange of the installed MAGI-2, stock and with the plugin, side by side.

The MoE layer is the host's own, at MAGI-2's width, with few and narrow experts, so that it runs on a CPU. It is
called as the transformer calls it, through `Magi2TransformerLayer.forward`, whose attention and dense parts
are replaced by nothing. What the experts do is left out of all numbers: it is the same with and without.

On hosts with the exchange module the MoE layer takes the token split itself and is called alone, and may dispatch
over a wider group than its experts' own: with replicas.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from .. import config, plugin
from ..host import ledger
from ..host.head_parallel import host_has_module
from ..testing.counters import Counts, counting
from .rounds import WARM_UP, Spread, interleave, progress
from .world import BenchError, World, gather_counts, group_using, launch, ranks_here, require, same_bytes

EXCHANGES = ("all_to_all", "p2p")
STOCK = "stock"
MOE_DIM = 256  # elements per MoE head: MAGI-2's width at 12 heads
ATTENTION_HEADS, ATTENTION_DIM = 24, 128
EXPERTS, TOP_K, EXPERT_WIDTH = 4, 2, 16  # MAGI-2 has 256 experts and takes 6
MAGI2 = "vllm_omni.diffusion.models.magi2"
# The records whose work is compared: with one of them missing, so is a part of the comparison.
COMPARED = (
    "magi2.ep_dispatch",
    "magi2.ep_undispatch",
    "magi2.known_counts",
    "magi2.moe_forward",
    "magi2.attention_dispatch",
    "magi2.attention_return",
)
# The same where the host has the exchange module.
COMPARED_THERE = ("head_parallel.bridge", "magi2.attention_dispatch", "magi2.attention_return")
PARTS = ("MoE layer", "attention dispatch", "attention return")


@dataclass(frozen=True)
class Row:
    """One part of the model, done in one way.

    Attributes:
        part: of `PARTS`.
        variant: "stock", or "plugin, " and the exchange.
        time: on the slowest rank, outside of expert compute.
        times_stock: stock's median over this one's: above 1 is faster.
        collectives: collectives and point-to-point batches, the most on any rank.
        host_syncs: reads of device values by the host, outside of expert compute, the most on any rank.
        bytes_between_ranks, bytes_copied, bytes_allocated: summed over the ranks, outside of expert compute.
        payload: bytes of the activations that the part exchanges, of all ranks together, in one direction.
    """

    part: str
    variant: str
    time: Spread
    times_stock: float
    collectives: int
    host_syncs: int
    bytes_between_ranks: int
    bytes_copied: int
    bytes_allocated: int
    payload: int


def measure(
    nproc: int = 2,
    tokens: int = 3702,
    rounds: int = 10,
    *,
    exchanges: Sequence[str] = EXCHANGES,
    heads: int = 12,
    replicas: int = 1,
    backend: str = "auto",
    timeout: float = 600.0,
) -> list[Row] | None:
    """Measure in ranks spawned here, or in those of a torchrun world.

    Args:
        nproc: ranks to spawn.
        tokens: per rank.
        rounds: interleaved rounds to time.
        exchanges: implementations to use in the plugin's variants.
        heads: MoE heads, of any number; hidden width is 256 times that.
        replicas: how often the ranks have all experts: they are spread over `nproc / replicas` of them.
        timeout: seconds for the whole.

    Returns:
        The rows by part and variant; None on the other ranks of a torchrun world.

    Raises:
        BenchError: there is no MAGI-2 here, or not the one that the plugin patches; or the replicas do not divide the
            ranks into groups of at least two.
    """
    ranks = ranks_here(nproc)
    if ranks % replicas or ranks == replicas:
        raise BenchError(
            f"--replicas must divide the {ranks} ranks into groups of at least 2 for the experts, got {replicas}"
        )
    if importlib.util.find_spec("vllm_omni") is None:
        raise BenchError("the layer bench needs vLLM-Omni with MAGI-2: it measures the host's own layer")
    rows: list[Row] | None = launch(
        _measure, nproc, backend, timeout, tokens, rounds, tuple(exchanges), heads, replicas
    )
    return rows


def print_table(rows: Sequence[Row]) -> None:
    """Stock and plugin side by side."""
    require("rich", "cli")
    from .show import console, megabytes, spread, table_of

    headings = ("", "", "ms", "x stock", "collectives", "syncs", "MB sent", "MB copied", "MB new")
    cells = [
        (
            row.part,
            row.variant,
            spread(row.time),
            f"{row.times_stock:.2f}",
            str(row.collectives),
            str(row.host_syncs),
            *map(megabytes, (row.bytes_between_ranks, row.bytes_copied, row.bytes_allocated)),
        )
        for row in rows
    ]
    caption = (
        "All without expert compute. Times on the slowest rank: median, below it 10th to 90th percentile. MB summed "
        "over ranks: sent to other ranks, copied, newly allocated. Collectives: point-to-point batches included. "
        "Syncs: device values that the host waits for."
    )
    console().print(table_of("One MAGI-2 layer's exchanges, stock and plugin", caption, headings, cells))


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [asdict(row) for row in rows]


def _measure(
    world: World, tokens: int, rounds: int, exchanges: tuple[str, ...], heads: int, replicas: int
) -> list[Row]:
    # Before the host is imported: nothing is to be fetched, and its start is no news here.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with torch.inference_mode():
        shards = world.size // replicas
        bench = _Bench(world, tokens, heads, shards)
        sizes = (world.size, shards) if replicas > 1 else (world.size,)
        variants: dict[str, tuple[Any, Any]] = {STOCK: _wide_and_narrow([world.new_group(size) for size in sizes])}
        for exchange in exchanges:
            groups, used = zip(*(group_using(exchange, world, size) for size in sizes), strict=True)
            if set(used) == {exchange}:
                variants[f"plugin, {exchange}"] = _wide_and_narrow(groups)
        try:
            counts = _checked_counts(bench, variants)
            lines = [partial(_time, bench, name, groups) for name, groups in variants.items()]
            with progress(world, f"layer, {world.size} ranks", rounds + WARM_UP) as advance:
                seconds = interleave(lines, rounds, world, advance)
        finally:
            plugin.undo()
    slowest = seconds.amax(dim=0)  # [rounds, variants, parts]
    return [
        row_of(part, name, slowest[:, :, place], number, counts[number][place], bench.payloads[place])
        for place, part in enumerate(PARTS)
        for number, name in enumerate(variants)
    ]


def _wide_and_narrow(groups: Sequence[Any]) -> tuple[Any, Any]:
    """The group of all ranks, and the one that the experts are spread over, which may be the same."""
    return groups[0], groups[-1]


@contextlib.contextmanager
def _variant(bench: _Bench, name: str, groups: tuple[Any, Any]) -> Iterator[tuple[Callable[[], Any], ...]]:
    """The plugin on or off, and the three parts to run with it in the order of `PARTS`."""
    if name == STOCK:
        plugin.undo()
    else:
        with mock.patch.dict(os.environ, {config.FLAG: "1"}):
            plugin.register()
        _require_applied()
    wide, narrow = map(bench.magi2_group, groups)
    bench.moe.ep_group = narrow
    if bench.takes_split:
        bench.moe.set_dispatch_group(wide)
    moe = partial(bench.moe, bench.hidden, bench.split)
    if bench.layer is not None:
        moe = partial(bench.layer, bench.hidden, None, None, None, bench.split)
    # Through the module: that is where the plugin puts its own.
    dispatch = partial(bench.attention.scatter_heads_gather_seqlen, bench.qkv, bench.split, wide)
    give_back = partial(bench.attention.scatter_seqlen_gather_heads, bench.attended, bench.split, wide)
    if bench.takes_split and name != STOCK:  # on trial there, each time anew; what that costs is not measured
        dispatch(), give_back()
    with mock.patch.object(bench.parallel, "get_magi2_ulysses_group", return_value=wide):
        yield moe, dispatch, give_back


def _require_applied() -> None:
    compared = COMPARED_THERE if host_has_module() else COMPARED
    working = (ledger.APPLIED, ledger.ON_TRIAL, ledger.PROVEN)
    missing = [record for record in plugin.report() if record.name in compared and record.status not in working]
    if missing:
        told = "; ".join(f"{record.name} is {record.status}: {record.reason}" for record in missing)
        raise BenchError(f"the plugin does not patch all of this host's MAGI-2, so there is nothing to compare: {told}")


def _checked_counts(bench: _Bench, variants: dict[str, tuple[Any, Any]]) -> list[list[dict[str, list[int]]]]:
    """Run each variant once, compare its bits with stock's and count, by variant and part."""
    counts, expected = [], None
    for name, groups in variants.items():
        with _variant(bench, name, groups) as parts:
            found = [bench.counted(part) for part in parts]
        outputs = [output for output, _ in found]
        expected = expected or outputs
        if not bench.world.all_true(same_outputs(outputs, expected)):
            raise BenchError(f"{name} does not give the bits of the stock host: not measured")
        counts.append([gather_counts(count, bench.world) for _, count in found])
    return counts


def same_outputs(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Equal bits, of tensors and lists of tensors."""
    return all(map(_same, found, expected))


def _same(left: Any, right: Any) -> bool:
    """Equal bits, of a tensor or of a list of tensors."""
    pairs = zip(*((value if isinstance(value, list) else [value]) for value in (left, right)), strict=True)
    return all(same_bytes(*pair) for pair in pairs)


def _time(bench: _Bench, name: str, groups: tuple[Any, Any]) -> tuple[float, ...]:
    with _variant(bench, name, groups) as parts:
        return tuple(map(bench.world.timed, parts))


def row_of(part: str, variant: str, times: Tensor, number: int, counts: dict[str, list[int]], payload: int) -> Row:
    medians = torch.quantile(times, 0.5, dim=0)
    return Row(
        part,
        variant,
        Spread.of(times[:, number]),
        round(float(medians[0] / medians[number]), 4),
        collectives=max(counts["communication_launches"]),
        host_syncs=max(counts["host_syncs"]),
        bytes_between_ranks=sum(counts["bytes_between_ranks"]),
        bytes_copied=sum(counts["bytes_copied"]),
        bytes_allocated=sum(counts["bytes_allocated"]),
        payload=payload,
    )


class _Bench:
    """The host's modules, a layer of theirs and its inputs; runs parts of it without expert compute.

    Attributes:
        takes_split: the MoE layer takes the token split, and may be set to dispatch over a wider group.
        hidden: `[tokens, heads * 256]`, the MoE layer's input.
        qkv: three of `[tokens, heads, 128]`.
        attended: `[tokens of all ranks, local heads, 128]`, what attention would have made of them.
        payloads: bytes of all ranks together, by part.
    """

    def __init__(self, world: World, tokens: int, heads: int, shards: int) -> None:
        self.world = world
        self.parallel, self.mh_moe, self.attention, self.modeling = (
            importlib.import_module(f"{MAGI2}.{name}") for name in ("parallel", "mh_moe", "attention", "modeling_magi2")
        )
        self.split = [tokens] * world.size
        self._generator = torch.Generator().manual_seed(world.rank)
        attention_heads = -(-ATTENTION_HEADS // world.size) * world.size
        self.hidden = self._random(tokens, heads * MOE_DIM)
        self.qkv = [self._random(tokens, attention_heads, ATTENTION_DIM) for _ in range(3)]
        self.attended = self._random(tokens * world.size, attention_heads // world.size, ATTENTION_DIM)
        moe, attention = (tensor.nbytes * world.size for tensor in (self.hidden, self.attended))
        self.payloads = (moe, 3 * attention, attention)
        self.moe = self._moe(heads, shards)
        self.takes_split = hasattr(self.moe, "set_dispatch_group")
        self.layer = None if self.takes_split else self._layer()
        self._experts_do: Counts | None = None
        self._experts_give: Tensor | None = None

    def magi2_group(self, group: Any) -> Any:
        """A process group as the host has it."""
        return self.parallel.Magi2ParallelGroup(group, dist.get_world_size(group), dist.get_rank(group))

    def counted(self, part: Callable[[], Any]) -> tuple[Any, Counts]:
        """The part's output, and what it does without expert compute."""
        self._experts_do = Counts()
        with counting() as counts:
            output = part()
        for name in ("bytes_copied", "bytes_allocated", "launches", "host_syncs"):
            setattr(counts, name, getattr(counts, name) - getattr(self._experts_do, name))
        self._experts_do = None
        return output, counts

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(torch.bfloat16).to(self.world.device)

    def _moe(self, heads: int, shards: int) -> Any:
        """The host's MoE; its weights are random, as it makes them uninitialised."""
        settings = self.mh_moe.Magi2MultiHeadMoEConfig(
            heads * MOE_DIM, heads, EXPERTS, TOP_K, EXPERT_WIDTH, torch.bfloat16
        )
        group = self.parallel.Magi2ParallelGroup(dist.group.WORLD, shards, self.world.rank % shards)  # replaced later
        moe = self.mh_moe.Magi2MultiHeadMoE(settings, ep_group=group).to(self.world.device)
        for parameter in (moe.gate, moe.W_gate, moe.W_up, moe.W_down):
            parameter.copy_(self._random(*parameter.shape) / MOE_DIM**0.5)
        moe._local_forward = partial(self._left_out, moe._local_forward)
        return moe

    def _left_out(self, experts: Callable[[Tensor], Tensor], x_heads: Tensor) -> Tensor:
        """Expert compute, counted to be subtracted; where nothing is counted, its output of last time."""
        if self._experts_do is None:
            assert self._experts_give is not None
            return self._experts_give
        with counting() as self._experts_do:
            self._experts_give = experts(x_heads)
        return self._experts_give

    def _layer(self) -> Any:
        """The host's transformer layer with the MoE in it and nothing else."""
        layer, mlp = (
            owner.__new__(owner)
            for owner in (self.modeling.Magi2TransformerLayer, self.modeling.Magi2MultiHeadMoELayer)
        )
        for module in (layer, mlp):
            torch.nn.Module.__init__(module)
        mlp.moe_mlp = self.moe
        layer.mlp = mlp
        layer.attention = SimpleNamespace(attend=lambda query, *_: query)
        layer._attention_input = lambda hidden, *_: (hidden, None, hidden, None, None, None)
        layer._moe_input = lambda streams, *_: (streams, None, None, streams)
        layer._moe_output = lambda streams, logits, normalized, routed, dispatcher: routed
        return layer
