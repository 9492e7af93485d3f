from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pool import RankPool

# Rank processes are plenty and the cores are few; and nothing is to be fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a top-level function in several rank processes: `ranks(function, nproc, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def musa_ranks() -> Iterator[RankPool]:
    """Rank processes for tests on a MUSA device; a simulated one cannot be taken out of a process again."""
    pool = RankPool()
    yield pool
    pool.close()
