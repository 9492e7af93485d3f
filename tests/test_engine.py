"""The real engine on a CPU: entry point, spawned workers, exchanges, picture. Starts are slow, and so few."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
LAYERS = 2
STOCK = {"c10d::alltoall_base_": 4 * LAYERS, "c10d::allgather_": LAYERS, "c10d::_allgather_base_": 1}
EXCHANGES = {"headpar.dispatch": LAYERS, "headpar.return": LAYERS}  # query, key and value are one
LINE = re.compile(r"^plugin (\w+) .* per step and rank (\d+) exchanges by the plugin, (\d+) collectives; ")


def entrypoint() -> ModuleType:
    """`entrypoints/generate.py` as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "entrypoints" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


generate = entrypoint()


def as_a_user(folder: Path, *options: str) -> dict[str, Any]:
    """Run the command; the reports of its two engines, off and on. Fails unless it says that they gave the same."""
    done = subprocess.run(
        [sys.executable, "entrypoints/generate.py", "--out", str(folder), *options],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    off, on, verdict = done.stdout.splitlines()
    assert verdict.startswith("PASS 2 pictures"), done.stdout
    assert [told(off), told(on)] == [("off", 0, 11), ("on", 2 * LAYERS, 11)], done.stdout
    return {name: json.loads((folder / name / "run.json").read_text()) for name in ("off", "on")}


def told(line: str) -> tuple[str, int, int]:
    """A run's name, exchanges and collectives as printed."""
    found = LINE.match(line)
    assert found is not None, line
    return found[1], int(found[2]), int(found[3])


def communication(report: Any) -> list[Any]:
    """What the steps of a run communicated, without repetitions."""
    found = []
    for call in generate.calls(report):
        if call["communication"] not in found:
            found.append(call["communication"])
    return found


def ranges(report: Any) -> list[Any]:
    """The plugin's ranges in the steps of a run, without repetitions."""
    found = []
    for call in generate.calls(report):
        if call["exchanges"] not in found:
            found.append(call["exchanges"])
    return found


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The command with its defaults: its folder and its reports."""
    folder = tmp_path_factory.mktemp("strict")
    return folder, as_a_user(folder)


def test_pictures_are_the_same_off_and_on(strict: tuple[Path, dict[str, Any]]) -> None:
    from PIL import Image

    folder, reports = strict
    assert communication(reports["off"]) == communication(reports["on"]) == [STOCK]
    assert ranges(reports["on"]) == [EXCHANGES]
    for report in reports.values():
        assert [picture["size"] for picture in report["pictures"]] == [64, 48]
        outputs = [call["output"] for call in generate.calls(report)]
        assert len(outputs) == 2 * 2 * 2  # pictures, ranks, steps
        assert len(set(outputs)) == 4, "every step of every picture is another, and alike on both ranks"
    for name in ("off/64x64.png", "on/64x64.png", "off/48x48.png", "on/48x48.png"):
        assert len(set(Image.open(folder / name).tobytes())) > 20, f"{name} shows nothing"


def test_each_process_says_once_that_it_is_on(strict: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = strict
    assert "musa-headpar" not in (folder / "off" / "log.txt").read_text()
    text = (folder / "on" / "log.txt").read_text()
    # The front end and two workers; each worker's group. What workers write at the same time can share a line.
    assert len(re.findall(r"vllm-musa-headpar \S+ is on: exchange auto; patched .*ulysses.all_to_all_4d", text)) == 3
    assert text.count("first exchange of a group: 2 ranks, backend gloo, exchange all_to_all") == 2
    warnings = [line for line in text.splitlines() if "WARNING" in line and "headpar_engine" not in line]
    assert not [line for line in warnings if "headpar" in line.lower()]


def test_uneven_tokens_and_heads(tmp_path: Path) -> None:
    """Five heads over two workers; nine tokens."""
    reports = as_a_user(tmp_path, "--mode", "advanced_uaa")
    assert ranges(reports["on"]) == [EXCHANGES]


def test_compiled_as_the_host_does_by_default(tmp_path: Path) -> None:
    reports = as_a_user(tmp_path, "--compile")
    assert ranges(reports["on"]) == [EXCHANGES]


def test_strict_flag_with_the_check_and_point_to_point(strict: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """As a profile says it; without one, messages as small as these would stay with the collective on Gloo."""
    profile = tmp_path / "profile.json"
    points = [{"direction": side, "bytes": 1, "exchange": "p2p", "times": {}} for side in ("dispatch", "return")]
    measured = {"package": "0.1.0", "torch": "2.13.0+cpu", "backend": "gloo", "device": "cpu", "ranks": 2}
    measured |= {"machines": 1, "date": "2026-01-01", "exchanges": ["all_to_all", "p2p"], "points": points}
    profile.write_text(json.dumps({"format": 1, "measurements": [measured]}))
    report = generate.run(
        generate.Engine(),
        tmp_path / "on",
        VLLM_MUSA_HEADPAR="strict",
        VLLM_MUSA_HEADPAR_CHECK="1",
        VLLM_MUSA_HEADPAR_PROFILE=str(profile),
    )
    assert generate.differences(strict[1]["off"], report) == []
    # Query, key and value in one launch, so four messages each way per layer and no all-to-all at all.
    assert ranges(report) == [EXCHANGES]
    messages = {"c10d::send": 4 * LAYERS, "c10d::recv_": 4 * LAYERS}
    assert communication(report) == [{name: n for name, n in STOCK.items() if "alltoall" not in name} | messages]
    assert "cross-rank check" in (tmp_path / "on" / "log.txt").read_text()


def test_layerwise_offload(strict: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The host's own. Sleep it offers only with CUDA's memory pool."""
    report = generate.run(generate.Engine(offload=True), tmp_path / "on", VLLM_MUSA_HEADPAR="1")
    assert "Layer-wise offloading enabled on 2 layers" in (tmp_path / "on" / "log.txt").read_text()
    assert generate.differences(strict[1]["off"], report) == []
    assert ranges(report) == [EXCHANGES]


def test_an_allow_list_without_us_is_off_and_only_the_doctor_says_so(
    strict: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    variables = {"VLLM_MUSA_HEADPAR": "1", "VLLM_PLUGINS": "headpar_cpu,vllm_omni_register_models"}
    report = generate.run(generate.Engine(), tmp_path / "kept_out", **variables)
    assert report["pictures"] == [
        picture | {key: report["pictures"][number][key] for key in ("seconds", "calls")}
        for number, picture in enumerate(strict[1]["off"]["pictures"])
    ]
    assert communication(report) == [STOCK]
    assert ranges(report) == [{}]
    assert "vllm-musa-headpar" not in (tmp_path / "kept_out" / "log.txt").read_text()
    doctor = subprocess.run(
        [sys.executable, "-m", "vllm_musa_headpar", "doctor"],
        env=generate.environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert doctor.returncode == 1
    assert "VLLM_PLUGINS" in doctor.stdout


def test_a_server_and_an_openai_client(strict: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """`vllm-omni serve` as the README has it, and a client that knows nothing of any of this."""
    import openai
    from PIL import Image

    engine = generate.Engine()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm-omni")), "serve", str(engine.model), "--omni"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--ulysses-degree", "2", "--dtype", "float32"]
    command += ["--enforce-eager", "--step-execution", "--stage-init-timeout", "300"]
    command += ["--worker-extension-cls", "headpar_engine.record.RecordTransformer"]
    variables = generate.environment(VLLM_MUSA_HEADPAR="1", HEADPAR_ENGINE_FOLDER=str(tmp_path))
    variables["PYTHONPATH"] = f"{ROOT / 'tests' / 'server_parts'}{os.pathsep}{variables['PYTHONPATH']}"
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        server = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: server.poll() is not None or "Application startup complete" in log.read_text(), 400)
        assert server.poll() is None, log.read_text()
        before = [len(recorded(tmp_path, rank)) for rank in range(2)]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)
        answer = client.images.generate(
            prompt="a cat",
            size="64x64",
            response_format="b64_json",
            extra_body={"seed": 1, "num_inference_steps": 2, "true_cfg_scale": 1.0},
        )
        picture = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
        expected = strict[1]["off"]["pictures"][0]
        assert hashlib.sha256(picture.tobytes()).hexdigest() == expected["digest"]
        wait_until(lambda: all(len(recorded(tmp_path, rank)) == before[rank] + 2 for rank in range(2)), 30)
        for rank in range(2):
            calls = recorded(tmp_path, rank)[-2:]
            assert [call["exchanges"] for call in calls] == [EXCHANGES] * 2
            assert [call["output"] for call in calls] == [call["output"] for call in expected["calls"][rank]]
        server.terminate()
        server.wait(60)
    finally:
        server.kill()


def test_a_worker_killed_in_the_middle_of_a_request(tmp_path: Path) -> None:
    """The engine reports it and ends; the worker that is left, and waits in an exchange, too."""
    *_, command = generate.Engine(steps=1000, sizes=(64,)).commands(tmp_path)
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=generate.environment(VLLM_MUSA_HEADPAR="1"), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is not None or len(recorded(tmp_path, 1)) > 5, 300)
        assert process.poll() is None, log.read_text()
        pids = [recorded(tmp_path, rank)[0]["pid"] for rank in range(2)]
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(120) != 0
        wait_until(lambda: not any(alive(pid) for pid in pids), 30)
    finally:
        process.kill()
    # The one that is left waits for the other: in an exchange mostly, or else in one of the host's own collectives.
    error = log.read_text().split("Traceback (most recent call last):")[-1]
    assert "Worker failed with error 'head-parallel" in error or "Connection closed by peer" in error, error
    assert not (tmp_path / "run.json").exists()


def recorded(folder: Path, rank: int) -> list[Any]:
    """The calls that a rank has recorded so far."""
    path = folder / f"rank-{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait for something, and fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and is not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
