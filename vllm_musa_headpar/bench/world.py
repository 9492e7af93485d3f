"""The ranks of a bench: spawned here, or those of a torchrun world."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from .. import agreement, config
from ..exchange import scatter_heads_gather_tokens
from ..layout import HeadParallelLayout
from ..log import logger
from ..testing.counters import Counts
from ..testing.ranks import RENDEZVOUS, RankError, default_group, run_ranks


class BenchError(RankError):
    """The bench cannot run as asked; the message says why."""


@dataclass(frozen=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int
    backend: str
    device: torch.device
    timeout: float  # seconds

    def new_group(self, size: int | None = None) -> Any:
        """A process group of all ranks, or this rank's of those of `size` ranks each."""
        timeout = timedelta(seconds=self.timeout)
        if size in (None, self.size):
            return dist.new_group(timeout=timeout)
        return dist.new_subgroups(size, timeout=timeout)[0]  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait for the device; nothing to do on the CPU."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds that a call takes here, device work included; all ranks start together."""
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        result = call()
        self.synchronize()
        seconds = time.perf_counter() - start
        del result  # freed outside of the time measured
        return seconds

    def gather(self, values: Tensor) -> Tensor:
        """`[...]` on every rank, of one shape -> `[ranks, ...]` on the CPU."""
        values = values.to(self.device)
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values)
        return torch.stack(gathered).cpu()

    def all_true(self, value: bool) -> bool:
        """Whether a value is true on every rank."""
        return bool(self.gather(torch.tensor([value], dtype=torch.int32)).all())

    def describe(self) -> dict[str, Any]:
        """The machine, in words."""
        return {
            "ranks": self.size,
            "backend": self.backend,
            "device": self.device.type,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }


def ranks_here(nproc: int) -> int:
    """Number of ranks that `launch` will have: torchrun's, where there is one, else `nproc`.

    Raises:
        BenchError: too few, or the variables that torchrun sets do not describe a world.
    """
    world = torchrun_world()
    size = nproc if world is None else world[1]
    if size < 2:
        told = "" if world is None else f" from WORLD_SIZE; {_UNSET}"
        raise BenchError(f"an exchange needs at least 2 ranks, got {size}{told}")
    return size


def launch(function: Callable[..., Any], nproc: int, backend: str, timeout: float, *args: Any) -> Any:
    """Call `function(world, *args)` on every rank of a torchrun world, or of one spawned here.

    Args:
        function: importable by name. What it returns must be the same on every rank.
        nproc: ranks to spawn.
        backend: "gloo", "mccl", or "auto" for mccl where there is a MUSA device.
        timeout: seconds for the whole.

    Returns:
        What rank 0 returned; None on the other ranks of a torchrun world.

    Raises:
        BenchError: mccl without a MUSA device, too few ranks, or the ranks of a torchrun world could not meet.
        RankFailure: a rank spawned here failed, or the time is over.
    """
    if backend == "mccl" and not has_musa():
        raise BenchError("backend mccl needs a MUSA device, and torch finds none: use --backend gloo")
    ranks_here(nproc)
    world = torchrun_world()
    if world is None:
        return run_ranks(_rank, nproc, function, backend, timeout, args, timeout=timeout)[0]
    rank, size = world
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # not torchrun: others may never come
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"rank {rank} waits for {size} ranks to meet at {where}; {_UNSET}", file=sys.stderr, flush=True)
    try:
        result = run_rank(function, rank, size, "env://", backend, timeout, args)
    except BenchError:
        raise
    except RankError as error:
        raise BenchError(f"{_UNSET}, or start all of them with torchrun: {error}") from error
    return result if rank == 0 else None


_UNSET = "unset RANK and WORLD_SIZE to have the ranks spawned here"


def torchrun_world() -> tuple[int, int] | None:
    """This process's rank and the number of ranks as torchrun tells them; None where it does not.

    Raises:
        BenchError: what it tells is incomplete or no world.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    told = ", ".join(f"{name}={os.environ[name]!r}" for name in RENDEZVOUS if name in os.environ)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise BenchError(
            f"{told} but no {' and no '.join(missing)} in the environment: start with torchrun, or {_UNSET}"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise BenchError(f"{told} in the environment, where {name} is no whole number of at least 0: {_UNSET}")
        numbers[name] = int(value)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise BenchError(f"{told} in the environment, where RANK is not below WORLD_SIZE: {_UNSET}")
    return numbers["RANK"], numbers["WORLD_SIZE"]


def _rank(
    rank: int,
    nproc: int,
    store: str,
    function: Callable[..., Any],
    backend: str,
    timeout: float,
    args: tuple[Any, ...],
) -> Any:
    return run_rank(function, rank, nproc, f"file://{store}", backend, timeout, args)


def run_rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    init_method: str,
    backend: str,
    timeout: float,
    args: tuple[Any, ...],
) -> Any:
    """One rank: join the world, call `function(world, *args)` and leave."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank)) if init_method == "env://" else rank
    backend, device = _device(backend, local_rank)
    with default_group(rank, size, init_method, backend, timeout):
        return function(World(rank, size, backend, device, timeout), *args)


def _device(backend: str, index: int) -> tuple[str, torch.device]:
    """The backend, decided, and the device of this rank."""
    if backend == "gloo" or not has_musa():
        torch.set_num_threads(1)  # as many threads as ranks, not more
        return "gloo", torch.device("cpu")
    torch.get_device_module("musa").set_device(index)
    return "mccl", torch.device("musa", index)


def has_musa() -> bool:
    with contextlib.suppress(ImportError):  # torchada first: on a MUSA platform it patches torch
        import torchada  # noqa: F401
    musa = getattr(torch, "musa", None)
    return musa is not None and bool(musa.is_available())


@contextlib.contextmanager
def exchange_setting(name: str) -> Iterator[None]:
    """`VLLM_MUSA_HEADPAR_EXCHANGE` for the time of the block."""
    with mock.patch.dict(os.environ, {config.EXCHANGE: name}):
        yield


def group_using(exchange: str, world: World, size: int | None = None) -> tuple[Any, str]:
    """A group, as `World.new_group` makes it, whose exchanges go through an implementation, whatever the settings say.

    Its first exchange is behind it: warm-up, agreement and self-test are not part of what is measured.

    Returns:
        The group and the name of the implementation that the ranks settled on.
    """
    group = world.new_group(size)
    size = dist.get_world_size(group)
    layout = HeadParallelLayout((1,) * size, dist.get_rank(group))
    with exchange_setting(exchange):
        scatter_heads_gather_tokens(torch.zeros(1, size, 1, device=world.device), group, layout)
    return group, agreement.state_of(group, world.device).name


@contextlib.contextmanager
def first_use_shown(world: World) -> Iterator[None]:
    """What is said at the first exchange of a group, on standard error of rank 0. A server shows it by itself."""
    if world.rank != 0:
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have equal shape, type and bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


# The counts that are numbers, communication launches among them.
COUNTED = (*(field.name for field in fields(Counts) if field.name != "collectives"), "communication_launches")


def gather_counts(counts: Counts, world: World) -> dict[str, list[int]]:
    """Each count by its name, as a list over the ranks."""
    values = world.gather(torch.tensor([getattr(counts, name) for name in COUNTED], dtype=torch.int64))
    return {name: values[:, column].tolist() for column, name in enumerate(COUNTED)}


def require(module: str, extra: str) -> None:
    """Say what to install where an optional package is missing.

    Raises:
        BenchError: it is.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise BenchError(
            f"this needs {module} ({error}): pip install --no-deps {module} with what it lacks, or the extra [{extra}] "
            "where pip may change other packages"
        ) from error
