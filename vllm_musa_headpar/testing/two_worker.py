"""The two-worker check: every rank of a small group compares its exchanges with exact values from the CPU.

In each worker the plugin comes up as vLLM-Omni's diffusion worker brings it up, through the host's own loader.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

with suppress(ImportError):
    import torchada  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import HeadParallelLayout
from .counters import counting
from .ranks import default_group

DIM = 8
HEADS_PER_RANK = 2

# float32 bit patterns that arithmetic or a cast would not survive: quiet and signalling NaNs with payloads,
# -0.0, a denormal, -inf, and an ordinary number
BIT_PATTERNS = (
    0x7FC12345,
    0xFFA00001 - (1 << 32),
    0x80000000 - (1 << 32),
    0x00000001,
    0xFF800000 - (1 << 32),
    0x40490FDB,
)


@dataclass(frozen=True)
class CaseResult:
    """One case on one rank. `problem` is None if it passed, else what was seen; `skipped` says why it did not run."""

    name: str
    problem: str | None = None
    skipped: str | None = None


class Skip(Exception):
    """The case cannot run here. The message says why."""


@dataclass(frozen=True)
class Worker:
    """What the cases of one rank share."""

    rank: int
    size: int
    group: Any
    device: torch.device

    def layout(self, counts: tuple[int, ...]) -> HeadParallelLayout:
        return HeadParallelLayout(counts, self.rank)

    def inputs(self, counts: tuple[int, ...], dtype: str) -> list[Tensor]:
        """Every rank's input on the CPU, `[tokens, heads, DIM]` each, all values different where the type allows."""
        return [_values(rank, (count, self.size * HEADS_PER_RANK, DIM), dtype) for rank, count in enumerate(counts)]

    def dispatched(self, inputs: list[Tensor]) -> Tensor:
        """What this rank must receive of these inputs, `[tokens of all, HEADS_PER_RANK, DIM]`."""
        mine = slice(self.rank * HEADS_PER_RANK, (self.rank + 1) * HEADS_PER_RANK)
        return torch.cat([tensor[:, mine] for tensor in inputs])

    def processed(self, tensor: Tensor) -> Tensor:
        """A transformation that differs per head owner and per element."""
        return transformed(tensor, self.rank)

    def returned(self, own_input: Tensor) -> Tensor:
        """What this rank must get back when each owner has processed its heads."""
        shards = torch.split(own_input, HEADS_PER_RANK, dim=1)
        return torch.cat([transformed(shard, owner) for owner, shard in enumerate(shards)], dim=1)


def transformed(tensor: Tensor, owner: int) -> Tensor:
    """The bits of every element rotated by the owner's number plus one: exact in every type."""
    if tensor.dtype == torch.bfloat16:
        return (tensor.view(torch.int16) ^ (owner + 1)).view(torch.bfloat16)
    return (tensor.view(torch.int32) ^ (owner + 1)).view(torch.float32)


def _values(rank: int, shape: tuple[int, int, int], dtype: str) -> Tensor:
    numel = shape[0] * shape[1] * shape[2]
    if dtype == "bits":
        index = torch.arange(numel) + rank
        patterns = torch.tensor(BIT_PATTERNS, dtype=torch.int32)[index % len(BIT_PATTERNS)]
        return (patterns ^ (index.to(torch.int32) << 3 & 0xFFF8)).view(torch.float32).reshape(shape)
    if dtype == "bfloat16":  # all 2**16 bit patterns, in turn
        return (torch.arange(numel) * 3 + 257 * rank).to(torch.int16).view(torch.bfloat16).reshape(shape)
    return (torch.arange(numel, dtype=torch.float32) + 10000.0 * rank).reshape(shape)


def require_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Same shape, type and bits; `found` is brought to the CPU."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: got {list(found.shape)} {found.dtype}, expected {list(expected.shape)} {expected.dtype}"
        )
    found_bytes, expected_bytes = (tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (found, expected))
    torch.testing.assert_close(found_bytes, expected_bytes, rtol=0, atol=0, msg=lambda told: f"{what}: {told}")


def partitions(size: int) -> dict[str, tuple[int, ...]]:
    """Token counts per rank for each way to split that the check goes through."""
    return {
        "equal": (5,) * size,
        "uneven": tuple(3 + 4 * (rank % 3) for rank in range(size)),
        "one empty": (0, *(4 + rank for rank in range(1, size))),
        "all empty": (0,) * size,
    }


def run(worker: Worker, has_host: bool) -> list[CaseResult]:
    """All cases, in the same order on every rank."""
    return [_outcome(name, case, worker) for name, case in _cases(has_host)]


Case = Callable[[Worker], None]


def _outcome(name: str, case: Case, worker: Worker) -> CaseResult:
    try:
        case(worker)
    except Skip as reason:
        return CaseResult(name, skipped=str(reason))
    except Exception as error:
        return CaseResult(name, problem=f"{type(error).__name__}: {error}")
    return CaseResult(name)


def _cases(has_host: bool) -> Iterator[tuple[str, Case]]:
    yield "plugin came up through the host's loader", _plugin_is_on if has_host else _skip_without_host
    for split in ("equal", "uneven", "one empty", "all empty"):
        for dtype in ("float32", "bfloat16", "bits"):
            yield f"dispatch, {split}, {dtype}", _bind(_dispatch, split, dtype)
            yield f"return after processing by head owner, {split}, {dtype}", _bind(_round_trip, split, dtype)
            yield f"non-contiguous input, {split}, {dtype}", _bind(_non_contiguous, split, dtype)
    for split in ("equal", "uneven", "one empty", "all empty"):
        wrappers = _bind(_wrappers_explicit, split) if has_host else _skip_without_host
        yield f"MAGI-2 wrappers, explicit counts, {split}", wrappers
        wrappers = _bind(_wrappers_inferred, split) if has_host else _skip_without_host
        yield f"MAGI-2 wrappers, inferred counts, {split}", wrappers
    yield "wrong shapes and ranks raise before any collective", _wrong_input
    yield "MAGI-2 wrappers refuse before any collective", _wrong_wrapper_input if has_host else _skip_without_host


def _bind(case: Callable[..., None], *arguments: Any) -> Case:
    return lambda worker: case(worker, *arguments)


def _skip_without_host(worker: Worker) -> None:
    raise Skip("vLLM-Omni is not installed")


def _plugin_is_on(worker: Worker) -> None:
    from ..plugin import report

    statuses = {record.name: f"{record.status} {record.reason}" for record in report()}
    expected = ("applied ", "not needed")
    unfit = {name: status for name, status in statuses.items() if not status.startswith(expected)}
    if unfit:
        raise AssertionError(f"expected every patch record applied or not needed, got {unfit}")


def _dispatch(worker: Worker, split: str, dtype: str) -> None:
    from ..exchange import scatter_heads_gather_tokens

    counts = partitions(worker.size)[split]
    inputs = worker.inputs(counts, dtype)
    found = scatter_heads_gather_tokens(inputs[worker.rank].to(worker.device), worker.group, worker.layout(counts))
    require_equal(found, worker.dispatched(inputs), "dispatch")


def _round_trip(worker: Worker, split: str, dtype: str) -> None:
    from ..exchange import scatter_tokens_gather_heads

    counts = partitions(worker.size)[split]
    inputs = worker.inputs(counts, dtype)
    processed = worker.processed(worker.dispatched(inputs)).to(worker.device)
    found = scatter_tokens_gather_heads(processed, worker.group, worker.layout(counts))
    require_equal(found, worker.returned(inputs[worker.rank]), "return")


def _non_contiguous(worker: Worker, split: str, dtype: str) -> None:
    from ..exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads

    counts = partitions(worker.size)[split]
    inputs = worker.inputs(counts, dtype)
    strided = strided_copy(inputs[worker.rank].to(worker.device))
    found = scatter_heads_gather_tokens(strided, worker.group, worker.layout(counts))
    require_equal(found, worker.dispatched(inputs), "dispatch of a strided tensor")
    processed = strided_copy(worker.processed(worker.dispatched(inputs)).to(worker.device))
    found = scatter_tokens_gather_heads(processed, worker.group, worker.layout(counts))
    require_equal(found, worker.returned(inputs[worker.rank]), "return of a strided tensor")


def strided_copy(tensor: Tensor) -> Tensor:
    """The same values `[T, H, D]` with the heads outermost in memory and a gap behind each."""
    tokens, heads, dim = tensor.shape
    room = torch.zeros((heads, tokens, dim + 3), dtype=tensor.dtype, device=tensor.device)
    view = room[:, :, :dim].transpose(0, 1)
    view.copy_(tensor)
    return view


def _magi2_group(worker: Worker) -> tuple[Any, Any]:
    from vllm_omni.diffusion.models.magi2 import mh_moe, parallel

    return mh_moe, parallel.Magi2ParallelGroup(worker.group, worker.size, worker.rank)


def _wrappers_explicit(worker: Worker, split: str) -> None:
    mh_moe, group = _magi2_group(worker)
    counts = partitions(worker.size)[split]
    inputs = worker.inputs(counts, "bfloat16")
    found = mh_moe.ep_dispatch(inputs[worker.rank].to(worker.device), group, list(counts))
    require_equal(found, worker.dispatched(inputs), "ep_dispatch")
    processed = worker.processed(worker.dispatched(inputs)).to(worker.device)
    found = mh_moe.ep_undispatch(processed, group, list(counts))
    require_equal(found, worker.returned(inputs[worker.rank]), "ep_undispatch")


def _wrappers_inferred(worker: Worker, split: str) -> None:
    mh_moe, group = _magi2_group(worker)
    counts = partitions(worker.size)[split]
    inputs = worker.inputs(counts, "float32")
    found = mh_moe.ep_dispatch(inputs[worker.rank].to(worker.device), group)
    require_equal(found, worker.dispatched(inputs), "ep_dispatch")
    processed = worker.processed(worker.dispatched(inputs)).to(worker.device)
    if sum(counts) % worker.size:
        with expect(ValueError, "uneven EP sequence requires explicit split sizes"):
            mh_moe.ep_undispatch(processed, group)
    elif len(set(counts)) == 1:  # the wrapper takes an equal split for granted
        require_equal(mh_moe.ep_undispatch(processed, group), worker.returned(inputs[worker.rank]), "ep_undispatch")


def _wrong_input(worker: Worker) -> None:
    from ..exchange import scatter_heads_gather_tokens as dispatch
    from ..exchange import scatter_tokens_gather_heads as undispatch

    counts = partitions(worker.size)["uneven"]
    layout, tokens, heads = worker.layout(counts), counts[worker.rank], worker.size * HEADS_PER_RANK
    good = torch.zeros(tokens, heads, DIM, device=worker.device)
    owned = torch.zeros(sum(counts), HEADS_PER_RANK, DIM, device=worker.device)
    other = HeadParallelLayout(counts, (worker.rank + 1) % worker.size)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("rank", lambda: dispatch(good, worker.group, HeadParallelLayout((*counts, 1), worker.rank))),
        ("rank", lambda: undispatch(owned, worker.group, other)),
        ("caller-owned process group", lambda: dispatch(good, None, layout)),
        ("tokens, heads, dim", lambda: dispatch(good[0], worker.group, layout)),
        ("local tokens", lambda: dispatch(good[:-1], worker.group, layout)),
        ("owned tokens", lambda: undispatch(owned[:-1], worker.group, layout)),
        ("divisible", lambda: dispatch(good[:, :-1], worker.group, layout)),
        ("positive", lambda: dispatch(good[:, :0], worker.group, layout)),
        ("positive", lambda: undispatch(owned[:, :, :0], worker.group, layout)),
    ]
    with counting() as counts_made:
        for fragment, call in wrong:
            with expect(ValueError, fragment):
                call()
    _require_no_communication(counts_made)


def _wrong_wrapper_input(worker: Worker) -> None:
    mh_moe, group = _magi2_group(worker)
    heads = worker.size * HEADS_PER_RANK
    good = torch.zeros(4, heads, DIM, device=worker.device)
    with counting() as counts_made:
        with expect(ValueError, f"MoE head count {heads - 1} must divide by EP size {worker.size}"):
            mh_moe.ep_dispatch(good[:, :-1], group, [4] * worker.size)
        with expect(ValueError, "EP sequence split sizes do not describe the local tensor"):
            mh_moe.ep_dispatch(good, group, [3] * worker.size)
        with expect(ValueError, "EP-dispatched tensor must be [global_tokens,local_heads,dim]"):
            mh_moe.ep_undispatch(good[0], group)
        with expect(ValueError, "EP sequence split sizes do not partition the global tensor"):
            mh_moe.ep_undispatch(good, group, [4] * worker.size)
    _require_no_communication(counts_made)


class expect:
    """Context that demands an error with a fragment in its message."""

    def __init__(self, kind: type[Exception], fragment: str) -> None:
        self._kind, self._fragment = kind, fragment

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"expected a {self._kind.__name__} with {self._fragment!r}, nothing was raised")
        if not isinstance(error, self._kind) or self._fragment not in str(error):
            raise AssertionError(
                f"expected a {self._kind.__name__} with {self._fragment!r}, got {type(error).__name__}: {error}"
            )
        return True


def _require_no_communication(made: Any) -> None:
    if made.communication_launches:
        raise AssertionError(f"expected no collective before the errors, got {made}")


def work(rank: int, size: int, store: str, backend: str, simulate: bool, timeout: float) -> list[CaseResult]:
    """One worker, as `run_ranks` calls it; without a store, one of a torchrun world."""
    if simulate:
        from . import mccl

        mccl.install()
    has_host = importlib.util.find_spec("vllm_omni") is not None
    if has_host:
        from vllm_omni.plugins import load_omni_general_plugins

        load_omni_general_plugins()
    device = _device(backend, rank if store else int(os.environ.get("LOCAL_RANK", rank)))
    with default_group(rank, size, f"file://{store}" if store else "env://", backend, timeout):
        return run(Worker(rank, size, dist.group.WORLD, device), has_host)


def _device(backend: str, rank: int) -> torch.device:
    if backend != "mccl":
        return torch.device("cpu")
    musa = getattr(torch, "musa", None)
    if musa is not None and hasattr(musa, "set_device"):
        musa.set_device(rank)
        return torch.device("musa", rank)
    return torch.device("musa")
