"""The examples of CONTRIBUTING.md do what they say."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, environment, process_group

pytestmark = pytest.mark.cpu

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def run_example(name: str) -> dict[str, Any]:
    """Run the code block that begins with `# example: NAME`; its names."""
    (code,) = re.findall(rf"```python\n(# example: {re.escape(name)}\n.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, f"CONTRIBUTING.md: {name}", "exec"), names)
    return names


def test_every_example_is_run() -> None:
    assert re.findall(r"# example: (.*)", TEXT) == ["an implementation", "a patch record", "a host's fingerprint"]
    assert TEXT.count("```python") == 3


def test_the_implementation_gives_the_references_bits(ranks: RankPool) -> None:
    for used, equal in ranks(use_the_implementation, 3):
        assert used == "pairwise"
        assert equal


def use_the_implementation(rank: int, nproc: int, store: str) -> tuple[str, bool]:
    from vllm_musa_headpar import (
        HeadParallelLayout,
        agreement,
        scatter_heads_gather_tokens,
        scatter_tokens_gather_heads,
    )
    from vllm_musa_headpar.registry import _registrations

    run_example("an implementation")
    layout = HeadParallelLayout((4, 0, 3), rank)
    tensor = torch.arange(layout.local_tokens * 6 * 5.0).reshape(-1, 6, 5) + 1000 * rank
    try:
        with process_group(rank, nproc, store) as group:
            expected = scatter_heads_gather_tokens(tensor, group, layout)
            with environment(VLLM_MUSA_HEADPAR_EXCHANGE="pairwise"):
                other = dist.new_group()
                there = scatter_heads_gather_tokens(tensor, other, layout)
                back = scatter_tokens_gather_heads(there, other, layout)
            used = agreement.state_of(other, tensor.device).registration.name
            return used, torch.equal(there, expected) and torch.equal(back, tensor)
    finally:
        del _registrations["pairwise"]


def test_the_record_is_applied_and_undone(ranks: RankPool) -> None:
    ((status, patched, undone),) = ranks(use_the_record, 1)
    assert status == "applied"
    assert patched == [7, 0, 0]
    assert undone == [3, 2, 2]


def use_the_record(rank: int, nproc: int, store: str) -> tuple[str, list[int], list[int]]:
    from vllm_omni.diffusion.models.magi2 import parallel

    names = run_example("a patch record")
    assert names["refused"] == []
    (status,) = names["ledger"].report()
    patched = parallel.balanced_split_sizes(7, 3)
    assert names["ledger"].undo() == []
    return status.status, patched, parallel.balanced_split_sizes(7, 3)


def test_the_fingerprint_is_the_one_that_the_record_expects(ranks: RankPool) -> None:
    ((found, expected),) = ranks(use_the_fingerprint, 1)
    assert found == expected


def use_the_fingerprint(rank: int, nproc: int, store: str) -> tuple[Any, Any]:
    from vllm_musa_headpar.host.magi2 import _EP_FINGERPRINTS, _EP_SIGNATURE

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return run_example("a host's fingerprint")["expected"], (_EP_SIGNATURE, _EP_FINGERPRINTS["ep_dispatch"])
