"""What users get: a source distribution that is whole, a wheel with the package alone, an install line that works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from vllm_musa_headpar import __version__

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
# What building, testing and version control leave in a working tree.
LEFT = (".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis", "*.pyc")
NAME = f"vllm_musa_headpar-{__version__}"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Standard output of a command that must succeed; nothing of the environment's is imported by accident."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_tree(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT)))


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def build(folder: Path, kind: str) -> Path:
    """The distribution, built by the dev environment's own setuptools."""
    tree = copy_of_the_tree(folder)
    run(sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", folder / "dist", tree, cwd=folder)
    (file,) = (folder / "dist").iterdir()
    return file


def test_the_source_distribution_is_whole_and_its_tests_run(tmp_path: Path) -> None:
    archive = build(tmp_path, "--sdist")
    assert archive.name == f"{NAME}.tar.gz"
    unpacked = tmp_path / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    source = unpacked / NAME
    found = files_below(source)
    generated = {name for name in found if name.startswith("vllm_musa_headpar.egg-info/")} | {"PKG-INFO"}
    expected = files_below(tmp_path / "tree")
    assert found - generated == expected - {name for name in expected if ".egg-info/" in name}
    where = "import vllm_musa_headpar; print(vllm_musa_headpar.__file__)"
    assert run(sys.executable, "-c", where, cwd=source, PYTHONPATH=str(source)).startswith(str(source))
    quick = ("tests/test_layout.py", "tests/test_contributing.py", "-k", "not example or every")
    assert " passed" in run(sys.executable, "-m", "pytest", "-q", *quick, cwd=source, PYTHONPATH=str(source))


def test_the_wheel_has_the_package_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path, "--wheel")) as wheel:
        names = wheel.namelist()
        points = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
        told = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"vllm_musa_headpar", f"{NAME}.dist-info"}
    package = {f"vllm_musa_headpar/{name}" for name in files_below(tmp_path / "tree" / "vllm_musa_headpar")}
    assert package <= set(names), "data files too"
    assert points.count("musa_headpar = vllm_musa_headpar.plugin:register") == 2
    assert "vllm-musa-headpar = vllm_musa_headpar.cli:main" in points
    assert not [line for line in told.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]


def wheel_of_setuptools(folder: Path) -> None:
    """The installed setuptools as the wheel that it came from, so that pip finds one without an index."""
    distribution = metadata.distribution("setuptools")
    folder.mkdir()
    with zipfile.ZipFile(folder / f"setuptools-{distribution.version}-py3-none-any.whl", "w") as wheel:
        for file in distribution.files or ():
            if (
                ".." not in file.parts
                and "__pycache__" not in file.parts
                and file.name not in ("INSTALLER", "REQUESTED")
            ):
                wheel.write(str(distribution.locate_file(file)), str(file))


INSTALL = re.search(r"^pip (install --no-deps .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("isolated", [True, False], ids=["as in the README", "without an index"])
def test_the_readmes_line_works_in_a_fresh_environment(tmp_path: Path, isolated: bool) -> None:
    """No wheel package and no setuptools that is recent enough: as Python 3.10 to 3.13 make environments."""
    assert INSTALL is not None
    line = INSTALL[1].split()
    assert "--no-build-isolation" not in line
    wheel_of_setuptools(tmp_path / "wheels")
    venv.create(tmp_path / "fresh", with_pip=True, symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if not isolated:  # what the README says that it needs then, and nothing else
        run(python, "-m", "pip", "install", "--upgrade", "setuptools", cwd=tmp_path, **offline)
        line.append("--no-build-isolation")
    tree = copy_of_the_tree(tmp_path)
    run(python, "-m", "pip", *line, cwd=tree, **offline)
    installed = run(python, "-m", "pip", "list", "--format=json", cwd=tmp_path)
    names = {found["name"] for found in json.loads(installed)}
    assert names - {"pip", "setuptools"} == {"vllm-musa-headpar"}
    command = python.with_name("vllm-musa-headpar")
    assert run(command, "--version", cwd=tmp_path) == f"vllm-musa-headpar {__version__}\n"
    assert run(python, "-m", "vllm_musa_headpar", "--version", cwd=tmp_path) == f"vllm-musa-headpar {__version__}\n"
