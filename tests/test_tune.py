"""`tune`, run as a user runs it. What it measures differs from machine to machine; what it does with it does not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_musa_headpar import profiles
from vllm_musa_headpar.bench import tune, world
from vllm_musa_headpar.bench.tune import Timed, surely_less
from vllm_musa_headpar.testing.ranks import run_ranks

pytestmark = pytest.mark.cpu

RUN = "from vllm_musa_headpar.cli import main; raise SystemExit(main())"
SMALL = tune.cases(2, 4096, 100_000)

THIRD = """
from vllm_musa_headpar import register_head_parallel_exchange
from vllm_musa_headpar.implementations import reference

def third(exchange, group):
    return reference.all_to_all(exchange, group)

def never(group, device, backend):
    return "it is never usable"

register_head_parallel_exchange("third", third, backends=())
register_head_parallel_exchange("unusable", lambda exchange, group: None, backends=(), unusable=never)
"""


def command(*arguments: str, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **variables},
    )


# --- Decisions ------------------------------------------------------------------------------------------


def test_sizes_go_from_4_kib_to_magi2s() -> None:
    for ranks in (2, 3, 4, 8, 16):
        sizes = [tune._bytes(case) for case in tune.cases(ranks)]
        assert sizes == sorted(set(sizes))
        assert 2048 <= sizes[0] <= 8192
        assert sizes[-1] * ranks == pytest.approx(3702 * 12 * 256 * 2, rel=0.01)
        assert all(larger / smaller < 8.5 for smaller, larger in itertools.pairwise(sizes))
    assert [case.counts for case in tune.cases(2)][-1] == (3702, 3702), "MAGI-2's own shape"


def test_an_order_is_sure_only_where_chance_would_not_make_it() -> None:
    one, two = [1.0] * 6, [2.0] * 6
    assert not surely_less(one, two), "six of six may be chance"
    assert surely_less([1.0] * 7, [2.0] * 7)
    assert not surely_less([2.0] * 7, [1.0] * 7)
    assert not surely_less([1.0] * 30, [1.0] * 30)
    mixed = [1.0] * 8 + [3.0] * 2
    assert not surely_less(mixed, [2.0] * 10)
    assert surely_less(mixed * 3, [2.0] * 30)


def timed(**seconds: list[float]) -> Timed:
    return Timed("return", 4096, seconds)


def test_the_reference_where_nothing_is_surely_and_clearly_faster() -> None:
    assert timed(all_to_all=[2.0] * 8, p2p=[1.0] * 8).best == "p2p"
    assert timed(all_to_all=[2.0] * 5, p2p=[1.0] * 5).best == "all_to_all", "not sure"
    assert timed(all_to_all=[2.0] * 8, p2p=[1.95] * 8).best == "all_to_all", "sure, but within the noise"
    assert timed(all_to_all=[1.0] * 8, p2p=[2.0] * 8).best == "all_to_all"
    both_faster = timed(all_to_all=[2.0] * 8, p2p=[1.0] * 8, third=[1.0] * 8)
    assert both_faster.best == "p2p"
    assert not both_faster.settled
    assert timed(p2p=[1.0] * 8).settled
    assert not timed(all_to_all=[2.0] * 7, p2p=[1.0] * 7).settled, "too few rounds"
    point = timed(all_to_all=[2.0] * 8, p2p=[1.0] * 8).point()
    assert point == profiles.Point(
        "return",
        4096,
        "p2p",
        {"all_to_all": profiles.Times(2000.0, 2000.0, 2000.0), "p2p": profiles.Times(1000.0, 1000.0, 1000.0)},
    )


# --- Runs -----------------------------------------------------------------------------------------------


def test_a_profile_of_all_that_is_registered_and_a_bench_that_follows_it(tmp_path: Path) -> None:
    (tmp_path / "third.py").write_text(THIRD, encoding="utf-8")
    out, plot = tmp_path / "p.json", tmp_path / "p.png"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ("--nproc", "2", "--max-seconds", "1", "--import", "third", "--out", str(out), "--plot", str(plot))
    done = command("tune", *arguments, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "unusable is not measured: the ranks settled on all_to_all instead" in done.stdout
    assert f"Follow it with VLLM_MUSA_HEADPAR_PROFILE={out}" in done.stdout
    assert "points" in done.stdout, "one second is not enough to settle anything"
    assert plot.read_bytes().startswith(b"\x89PNG")
    (measured,) = profiles.load(out).measurements
    assert (measured.backend, measured.device, measured.ranks, measured.machines) == ("gloo", "cpu", 2, 1)
    assert {"all_to_all", "p2p", "third"} <= set(measured.exchanges)
    assert "unusable" not in measured.exchanges
    assert [(point.direction, point.bytes) for point in measured.points] == [
        (direction, tune._bytes(case)) for direction in profiles.DIRECTIONS for case in tune.cases(2)
    ]
    assert all(set(point.times) == set(measured.exchanges) for point in measured.points)

    bench = ("bench", "--nproc", "2", "--tokens", "4", "--rounds", "1", "--json", str(tmp_path / "bench.json"))
    done = command(*bench, VLLM_MUSA_HEADPAR_PROFILE=str(out))
    assert done.returncode == 0, done.stderr
    assert "first exchange of a group: 2 ranks, backend gloo, exchange auto by profile p.json: dispatch " in done.stderr
    lines = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["cases"][0]["lines"]
    assert "auto" in [line["name"] for line in lines]


def test_measurements_of_other_worlds_stay_in_the_file(tmp_path: Path) -> None:
    tuned = world.launch(tune.run, 2, "gloo", 120.0, SMALL, 1.0, ())
    here = tuned.measurement()
    other = profiles.Measurement(**{**vars(here), "ranks": 8})
    out = tmp_path / "p.json"
    out.write_text(profiles.dump(profiles.merged(here, (other, here))), encoding="utf-8")
    assert profiles.load(out).measurements == (other, here)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("folder", "--out {path} cannot be written: it is a folder"),
        ("text.json", "{path} is no profile: it is not JSON"),
        ("none/p.json", "--out {path} cannot be written: there is no folder"),
    ],
)
def test_a_target_that_is_no_profile_is_refused_before_measuring(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("measured", encoding="utf-8")
    path = str(tmp_path / name)
    done = command("tune", "--out", path)
    assert done.returncode == 2
    assert told.format(path=path) in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "text.json").read_text(encoding="utf-8") == "measured"


def test_a_module_that_is_not_there_is_said() -> None:
    done = command("tune", "--import", "nothing_of_that_name")
    assert done.returncode == 2
    assert "No module named 'nothing_of_that_name'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_torchrun_world(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command_line = [*ranks, str(tmp_path / "run.py"), "tune", "--max-seconds", "1", "--out", str(out)]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Follow it with") == 1, "rank 0 alone reports"
    assert profiles.load(out).measurements[0].ranks == 2


def on_the_simulated_device(rank: int, nproc: int, store: str) -> tune.Tuned:
    from vllm_musa_headpar.testing import mccl

    mccl.install()
    return world.run_rank(tune.run, rank, nproc, f"file://{store}", "auto", 60.0, (SMALL, 1.0, ()))


@pytest.mark.musa
def test_on_mccl() -> None:
    """Simulated where there is no device: the same run there, the times mean nothing."""
    tuned = run_ranks(on_the_simulated_device, 2, timeout=120)
    assert tuned[0] == tuned[1]
    measured = tuned[0].measurement()
    assert (measured.backend, measured.ranks) == ("mccl", 2)
    assert {"all_to_all", "p2p"} <= set(measured.exchanges)
