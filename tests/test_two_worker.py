"""The two-worker check as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).parents[1]

# Read by every interpreter at start, the workers' too: as if the package were not installed.
WITHOUT_HOST = """
import importlib.machinery as machinery

found = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *rest: None if name == "vllm_omni" else found(name, *rest)
"""


def check(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "entrypoints/two_worker.py", *options],
        cwd=ROOT,
        env={**plain, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_case_passes_on_real_vllm_omni() -> None:
    done = check("--nproc", "3")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "PASS 47 cases"
    assert sum(line.startswith("ok ") for line in lines) == 47


def test_without_vllm_omni_the_wrapper_cases_are_skipped_and_the_rest_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HOST)
    done = check(PYTHONPATH=str(tmp_path))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "PASS 37 cases, 10 skipped"
    assert sum("skipped" in line and "vLLM-Omni is not installed" in line for line in lines) == 10


def test_a_plugin_that_does_not_come_up_fails_the_check_with_its_exit_code() -> None:
    """The vendor's documented allow-list keeps us out."""
    done = check(VLLM_PLUGINS="musa,musa_custom_ops")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("FAIL 1 of 47 cases")
    assert "plugin came up through the host's loader" in done.stdout
    assert "not been switched on" in done.stdout


def test_a_single_worker_is_refused() -> None:
    done = check("--nproc", "1")
    assert done.returncode == 2
    assert "expected a whole number of at least 2, got '1'" in done.stderr
