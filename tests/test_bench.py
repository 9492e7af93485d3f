"""The bench, run as a user runs it, with tiny shapes. Counts are exact; times are only there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_in import build

from vllm_musa_headpar.bench import exchange, world
from vllm_musa_headpar.bench.rounds import ticks
from vllm_musa_headpar.testing.ranks import run_ranks

pytestmark = pytest.mark.cpu

needs_host = pytest.mark.skipif(importlib.util.find_spec("vllm_omni") is None, reason="needs vLLM-Omni")
RUN = "from vllm_musa_headpar.cli import main; raise SystemExit(main())"


def bench(*arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **variables},
    )


def measured(path: Path, *arguments: str, **options: Any) -> Any:
    done = bench(*arguments, "--json", str(path), **options)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


def test_an_equal_exchange(tmp_path: Path) -> None:
    report = measured(tmp_path / "report.json", "--nproc", "2", "--tokens", "128", "--rounds", "3")
    assert (report["machine"]["ranks"], report["machine"]["backend"]) == (2, "gloo")
    assert report["automatic"] == "all_to_all"
    assert not report["not_used"]
    (case,) = report["cases"]
    assert case["case"] == {"counts": [128, 128], "heads": 12, "dim": 256, "dtype": "bfloat16"}
    payload = 128 * 12 * 256 * 2  # messages of 384 KiB: p2p's own, where smaller ones use the reference on Gloo
    assert case["payload_dispatch"] == case["payload_return"] == [payload] * 2
    assert case["own_block"] == [payload // 2] * 2
    lines = {line["name"]: line for line in case["lines"]}
    assert list(lines) == ["stock", "all_to_all", "p2p", "shared", "bare collective"]
    launches = {"stock": 2, "all_to_all": 2, "p2p": 3, "bare collective": 1}
    # Nothing is sent to other ranks; what goes to them is copied twice; the signal is a barrier.
    for counts in map(lines.pop("shared")["counts"].get, ("dispatch", "return")):
        assert counts["bytes_between_ranks"] == [0] * 2
        assert counts["bytes_copied"] == [payload // 2 * 3] * 2
        assert (counts["launches"], counts["communication_launches"], counts["host_syncs"]) == (
            [4] * 2,
            [1] * 2,
            [1] * 2,
        )
    for name, line in lines.items():
        for direction in ("dispatch", "return"):
            counts = line["counts"][direction]
            assert counts["bytes_between_ranks"] == [payload // 2] * 2
            assert counts["bytes_copied"] == [0 if name == "bare collective" else payload] * 2
            assert counts["launches"] == [launches[name]] * 2
            assert counts["communication_launches"] == [1] * 2
            assert counts["host_syncs"] == [0] * 2
        for timed in ("dispatch", "back", "round_trip"):
            spread = line[timed]
            assert 0 < spread["p10_ms"] <= spread["median_ms"] <= spread["p90_ms"]
    assert lines["stock"]["times_stock"] == lines["bare collective"]["times_bare"] == 1
    assert report["advice"].startswith("At 128 tokens per rank on gloo ")


def test_uneven_counts_one_implementation_and_random_bits_of_a_float(tmp_path: Path) -> None:
    arguments = ("--counts", "5,0,3", "--heads", "3", "--dim", "4", "--dtype", "float32")
    report = measured(tmp_path / "report.json", *arguments, "--exchange", "p2p", "--rounds", "2")
    (case,) = report["cases"]
    assert [line["name"] for line in case["lines"]] == ["stock", "p2p", "bare collective"]
    row = 4 * 4
    assert case["payload_dispatch"] == [5 * 3 * row, 0, 3 * 3 * row]
    assert case["payload_return"] == [8 * row] * 3
    for line in case["lines"]:
        assert line["counts"]["dispatch"]["bytes_between_ranks"] == [10 * row, 0, 6 * row]
        assert line["counts"]["return"]["bytes_between_ranks"] == [3 * row, 8 * row, 5 * row]


def test_a_plot_measures_smaller_counts_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "times.png"
    arguments = ("--tokens", "40", "--dim", "4", "--rounds", "2", "--plot", str(picture))
    report = measured(tmp_path / "report.json", *arguments)
    assert [case["case"]["counts"] for case in report["cases"]] == [[10, 10], [40, 40]]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_token_counts_of_a_plot() -> None:
    assert list(ticks(3702)) == [14, 57, 231, 925, 3702]
    assert list(ticks(3)) == [3]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--exchange", "nothing"), "'nothing' is not known: expected one of all_to_all, p2p, shared"),
        (("--heads", "3"), "--heads 3 must be divisible by the 2 ranks"),
        (("--dtype", "bfloat17"), "'bfloat17' is no torch element type"),
        (("--nproc", "1"), "at least 2 ranks"),
        (("--counts", "0,0"), "all token counts are 0"),
        (("--counts", "1,2", "--plot", "x.png"), "give --tokens, not --counts"),
        (("--layer", "--counts", "1,2"), "--counts does not go with --layer"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: tuple[str, ...], told: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_device_is_said(tmp_path: Path) -> None:
    done = bench("--backend", "mccl", "--tokens", "2", "--rounds", "1")
    assert done.returncode == 2
    assert "needs a MUSA device" in done.stderr


def test_a_torchrun_world(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    script = tmp_path / "run.py"
    script.write_text(RUN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = ["bench", "--tokens", "4", "--dim", "4", "--rounds", "2", "--json", str(path)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text(encoding="utf-8"))["machine"]["ranks"] == 2
    assert done.stdout.count("tokens per rank on gloo") == 1, "rank 0 alone reports"


def on_the_simulated_device(rank: int, nproc: int, store: str) -> Any:
    from vllm_musa_headpar.testing import mccl

    mccl.install()
    case = exchange.Case((8,) * nproc, 4, 16, "bfloat16")
    return world.run_rank(exchange.run, rank, nproc, f"file://{store}", "auto", 60.0, ((case,), 2, ()))


@pytest.mark.musa
def test_the_same_counts_on_mccl() -> None:
    """Simulated where there is no device: the counts hold there too, the times mean nothing."""
    for report in run_ranks(on_the_simulated_device, 2, timeout=90):
        assert (report.machine["backend"], report.machine["device"]) == ("mccl", "musa")
        assert (report.automatic, report.not_used) == ("p2p", {"shared": "all_to_all"})
        (case,) = report.cases
        for line in case.lines:
            for direction in ("dispatch", "return"):
                counts = line.counts[direction]
                assert counts["bytes_between_ranks"] == [8 * 4 * 16 * 2 // 2] * 2
                assert counts["communication_launches"] == [1, 1]
                assert counts["host_syncs"] == [0, 0]


def layer(
    tmp_path: Path, nproc: int, tokens: int, timeout: float, *more: str, **variables: str
) -> dict[tuple[str, str], dict[str, Any]]:
    arguments = ("--layer", "--nproc", str(nproc), "--tokens", str(tokens), "--rounds", "1", "--timeout", str(timeout))
    rows = measured(tmp_path / "layer.json", *arguments, *more, timeout=timeout + 30, **variables)
    return {(row["part"], row["variant"]): row for row in rows}


def check_layer(rows: dict[tuple[str, str], dict[str, Any]], nproc: int) -> None:
    """What holds for any number of ranks."""
    assert len(rows) == 9
    for name in ("all_to_all", "p2p"):
        before, after = rows["MoE layer", "stock"], rows["MoE layer", f"plugin, {name}"]
        assert (before["collectives"], after["collectives"]) == (3, 2)
        assert (before["host_syncs"], after["host_syncs"]) == (nproc, 0)
        before, after = (rows["attention dispatch", variant] for variant in ("stock", f"plugin, {name}"))
        assert before["bytes_copied"] == 2 * before["payload"]
        assert after["bytes_copied"] == after["payload"]
        for part in ("attention dispatch", "attention return"):
            before, after = rows[part, "stock"], rows[part, f"plugin, {name}"]
            assert (before["collectives"], after["collectives"]) == (1, 1)
            assert (
                before["bytes_between_ranks"]
                == after["bytes_between_ranks"]
                == before["payload"] // nproc * (nproc - 1)
            )
            assert after["bytes_allocated"] <= before["bytes_allocated"]


# The all_gather of the stock layer's token counts: 8 bytes from each rank to each other.
def metadata(nproc: int) -> int:
    return 8 * nproc * (nproc - 1)


@needs_host
@pytest.mark.slow
def test_a_layer_with_two_ranks(tmp_path: Path) -> None:
    rows = layer(tmp_path, 2, 6, timeout=150)
    check_layer(rows, 2)
    before, after = rows["MoE layer", "stock"], rows["MoE layer", "plugin, p2p"]
    payload = 6 * 2 * 12 * 256 * 2
    assert before["payload"] == payload
    assert after["bytes_between_ranks"] == 2 * payload // 2
    assert before["bytes_between_ranks"] == 2 * payload // 2 + metadata(2)
    assert after["bytes_copied"] == 2 * payload


@needs_host
@pytest.mark.slow
def test_a_layer_with_heads_that_eight_ranks_do_not_divide(tmp_path: Path) -> None:
    rows = layer(tmp_path, 8, 4, timeout=400)
    check_layer(rows, 8)
    before = rows["MoE layer", "stock"]
    payload = 4 * 8 * 12 * 256 * 2
    padded = payload * 16 // 12
    exchanged = before["bytes_between_ranks"] - metadata(8)
    assert exchanged == 2 * padded * 7 // 8
    for name in ("all_to_all", "p2p"):
        after = rows["MoE layer", f"plugin, {name}"]
        assert after["bytes_between_ranks"] == exchanged * 3 // 4
        assert after["bytes_copied"] == 2 * payload, "each direction once, and no padded copy"
        assert before["bytes_copied"] - after["bytes_copied"] >= padded


@needs_host
@pytest.mark.slow
def test_a_layer_with_experts_on_half_of_the_ranks(tmp_path: Path) -> None:
    """The split over all ranks tells the counts of the experts' group: nothing is asked for or waited for."""
    rows = layer(tmp_path, 4, 6, 300, "--replicas", "2")
    payload = 4 * 6 * 12 * 256 * 2
    for name in ("all_to_all", "p2p"):
        before, after = rows["MoE layer", "stock"], rows["MoE layer", f"plugin, {name}"]
        assert (before["collectives"], after["collectives"]) == (3, 2)
        assert (before["host_syncs"], after["host_syncs"]) == (2, 0)
        assert before["bytes_between_ranks"] - 2 * metadata(2) == after["bytes_between_ranks"] == 2 * payload // 2
    refused = bench("--layer", "--replicas", "3", "--nproc", "4")
    assert refused.returncode == 2
    assert "--replicas must divide the 4 ranks into groups of at least 2 for the experts, got 3" in refused.stderr


@pytest.mark.slow
def test_a_layer_of_a_newer_host(tmp_path: Path) -> None:
    """A stand-in with the exchange module, whose MoE layer dispatches over all ranks: half of each one's tokens."""
    tree = build(tmp_path / "host", "replicas", attention=True, moe=True)
    rows = layer(tmp_path, 4, 6, 300, "--replicas", "2", PYTHONPATH=tree)
    assert len(rows) == 9
    payload = 4 * 6 * 12 * 256 * 2
    for (part, variant), row in rows.items():
        assert row["collectives"] == (2 if part == "MoE layer" else 1), variant
        assert row["host_syncs"] == 0
        if part == "MoE layer":
            assert row["bytes_between_ranks"] == 2 * payload * 3 // 4
            assert row["bytes_copied"] == {"stock": 4, "plugin, all_to_all": 2, "plugin, p2p": 2}[variant] * payload


@needs_host
@pytest.mark.slow
def test_an_attention_of_the_other_models(tmp_path: Path) -> None:
    """Launches and copied payloads of stock and plugin, with a batch of 2; a shape that stock refuses is refused."""
    file = tmp_path / "ulysses.json"
    rows = measured(file, "--ulysses", "--batch", "2", "--tokens", "512", "--rounds", "1", timeout=300)
    found = {
        (row["part"], row["variant"]): (row["collectives"], row["bytes_copied"] / row["payload"])
        for row in rows
        if row["part"] != "both"
    }
    assert found == {
        ("Q, K and V", "stock"): (3, 2.0),
        ("Q, K and V", "plugin, all_to_all"): (3, 2.0),
        ("Q, K and V", "plugin, p2p"): (1, 1.0),
        ("return", "stock"): (1, 2.0),
        ("return", "plugin, all_to_all"): (1, 2.0),
        ("return", "plugin, p2p"): (1, 1.0),
    }
    refused = bench("--ulysses", "--heads", "3", "--nproc", "2", "--rounds", "1")
    assert refused.returncode == 2
    assert "3 heads must be divisible by the 2 ranks" in refused.stderr
