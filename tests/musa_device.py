"""The MUSA device of the tests: a real one where torch_musa is, else the simulated one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pool import process_group

SIMULATED = importlib.util.find_spec("torch_musa") is None


def device_of(rank: int) -> Any:
    """The device of a rank, in a process that then has MCCL."""
    import torch

    if SIMULATED:
        from vllm_musa_headpar.testing import mccl

        mccl.install()
        return torch.device("musa")
    import torchada  # noqa: F401

    torch.musa.set_device(rank)
    return torch.device("musa", rank)


@contextmanager
def mccl_group(rank: int, nproc: int, store: str, backend: str = "mccl", timeout: float = 30.0) -> Iterator[Any]:
    """A default MCCL group for the time of the block; yields the rank's device."""
    device = device_of(rank)
    with process_group(rank, nproc, store, backend, timeout):
        yield device


def no_host_sync() -> AbstractContextManager[Any]:
    """On the simulated device any host sync within the block raises."""
    if not SIMULATED:
        return nullcontext()
    from vllm_musa_headpar.testing import musa

    return musa.forbid_host_sync()
