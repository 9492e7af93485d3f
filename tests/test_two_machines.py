"""Two machines, as far as the network can tell: two network namespaces with a link between them, two ranks in each."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_musa_headpar import profiles

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

RUN = "from vllm_musa_headpar.cli import main; raise SystemExit(main())"
RANKS_EACH = 2
Torchrun = Callable[..., list["subprocess.CompletedProcess[str]"]]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Machines:
    """Two namespaces, `names`, with addresses on one link; the first one's is `address`."""

    def __init__(self) -> None:
        self.names = [f"headpar-{os.getpid()}-{number}" for number in range(2)]
        # A network of its own for each run, in the block that is reserved for benchmarks between machines.
        network = f"198.18.{os.getpid() % 256}"
        self.address = f"{network}.1"
        self._addresses = [f"{network}.{number + 1}/24" for number in range(2)]
        self.link = "headpar0"

    def __enter__(self) -> Machines:
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ends = ("type", "veth", "peer", "name", self.link, "netns", second)
        ip("link", "add", self.link, "netns", first, *ends)
        for name, address in zip(self.names, self._addresses, strict=True):
            for arguments in (
                ("addr", "add", address, "dev", self.link),
                ("link", "set", self.link, "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *arguments)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    if shutil.which("ip") is None:
        pytest.skip("two machines are two network namespaces, and there is no ip command to make them (iproute2)")
    made = Machines()
    try:
        made.__enter__()
    except subprocess.CalledProcessError as error:
        made.__exit__()
        pytest.skip(f"two machines are two network namespaces, which are not permitted here: {error.stderr.strip()}")
    yield made
    made.__exit__()


@pytest.fixture
def torchrun(machines: Machines, tmp_path: Path) -> Torchrun:
    """Runs a command of ours on both machines at once."""
    script = tmp_path / "run.py"
    script.write_text(RUN, encoding="utf-8")
    ports = itertools.count(29_500)

    def run(*arguments: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
        port = str(next(ports))
        here = os.pathsep.join(filter(None, [str(Path(profiles.__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        plain = {**os.environ, "GLOO_SOCKET_IFNAME": machines.link, "PYTHONPATH": here, **variables}
        started = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", name),
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                    *("--nproc-per-node", str(RANKS_EACH)),
                    *("--master-addr", machines.address, "--master-port", port),
                    str(script),
                    *arguments,
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=plain,
            )
            for number, name in enumerate(machines.names)
        ]
        try:
            outputs = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
        done = [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(started, outputs, strict=True)
        ]
        for each in done:
            assert each.returncode == 0, each.stdout + each.stderr
        return done

    return run


def test_the_self_test(torchrun: Torchrun) -> None:
    first, second = torchrun("selftest", "--timeout", "120")
    assert f"two-worker check: worker 0 of {2 * RANKS_EACH}" in first.stdout
    assert "PASS " in first.stdout
    assert "FAIL" not in first.stdout + second.stdout


def test_the_bench_and_tune(torchrun: Torchrun, tmp_path: Path) -> None:
    report, profile = tmp_path / "report.json", tmp_path / "p.json"
    first, _ = torchrun("tune", "--max-seconds", "1", "--out", str(profile))
    assert "4 ranks on 2 machine(s), gloo on cpu" in first.stdout
    (measured,) = profiles.load(profile).measurements
    assert (measured.ranks, measured.machines) == (4, 2)
    assert {"all_to_all", "p2p"} <= set(measured.exchanges)

    arguments = ("bench", "--tokens", "8", "--dim", "4", "--rounds", "2", "--json", str(report))
    first, _ = torchrun(*arguments, VLLM_MUSA_HEADPAR_PROFILE=str(profile))
    assert "first exchange of a group: 4 ranks, backend gloo, exchange auto by profile p.json" in first.stderr
    (case,) = json.loads(report.read_text(encoding="utf-8"))["cases"]
    payload = 8 * 12 * 4 * 2
    for line in case["lines"]:
        if line["name"] in ("shared", "auto"):  # the memory of these two machines is one after all
            continue
        assert line["counts"]["dispatch"]["bytes_between_ranks"] == [payload * 3 // 4] * 4
