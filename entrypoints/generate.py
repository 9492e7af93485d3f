"""Make pictures with vLLM-Omni's engine, the plugin off and on, and compare them bit by bit; `--help` for the options.

A tiny Qwen-Image model with random weights, Ulysses over the workers: the installed package, its entry point, the
flag, spawned workers, the first use of a group, the exchanges, the picture. Without an accelerator the engine runs
on the CPU, by means of the test tools in `entrypoints/engine`.
"""

import torchada  # noqa: F401, I001 - before torch is imported

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_musa_headpar import config
from vllm_musa_headpar.cli.arguments import whole_number

HERE = Path(__file__).resolve().parent
TOOLS = HERE / "engine"
CHECKPOINTS = HERE.parent / "build" / "engine"
PARTS = Path(sys.prefix) / "engine"  # what `make` installs from requirements/engine.txt
SIZES = (64, 48)  # 16 tokens, and 9: a number that two workers cannot share alike
FIRST_EXCHANGE = re.compile(r"first exchange of a group: .*, exchange (\w+)")


@dataclass(frozen=True)
class Engine:
    """What an engine is started with.

    Attributes:
        mode: Ulysses's; "strict" or "advanced_uaa", where ranks may have different numbers of tokens and heads.
        nproc: workers.
        compiled: compiled blocks, the host's default; else eager.
        steps: denoising steps per picture.
        sizes: width and height of each picture in pixels.
        offload: the host's layerwise offload, which keeps blocks away from the device until they are used.
    """

    mode: str = "strict"
    nproc: int = 2
    compiled: bool = False
    steps: int = 2
    sizes: tuple[int, ...] = SIZES
    offload: bool = False

    @property
    def heads(self) -> int:
        """Attention heads of the model: as many on each worker, unless the mode is for other numbers."""
        return 2 * self.nproc + (self.mode == "advanced_uaa")

    @property
    def model(self) -> Path:
        """The checkpoint, made at first use and kept for later runs."""
        return CHECKPOINTS / f"qwen-image-{self.heads}-heads"

    def commands(self, folder: Path) -> Iterator[list[str]]:
        """What to run one after the other: make the checkpoint, then the pictures."""
        yield [sys.executable, "-m", "headpar_engine.checkpoint", str(self.model), str(self.heads)]
        options = ["--model", str(self.model), "--mode", self.mode, "--nproc", str(self.nproc)]
        options += ["--steps", str(self.steps), *(["--compile"] if self.compiled else [])]
        options += ["--offload"] if self.offload else []
        yield [sys.executable, "-m", "headpar_engine.run", str(folder), *options, *map(str, self.sizes)]


def main() -> int:
    """Two runs and the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("strict", "advanced_uaa"), default="strict", help="ulysses_mode")
    parser.add_argument("--compile", action="store_true", help="compiled blocks, the host's default; else eager")
    parser.add_argument("--nproc", type=whole_number(2), default=2, help="workers (default 2)")
    parser.add_argument("--exchange", default=config.AUTO, help=f"{config.EXCHANGE} of the run with the plugin on")
    parser.add_argument("--out", type=Path, help="keep the pictures and the engine's log in this folder")
    arguments = parser.parse_args()
    engine = Engine(arguments.mode, arguments.nproc, arguments.compile)
    with tempfile.TemporaryDirectory(prefix="headpar-") as temporary:
        out: Path = arguments.out or Path(temporary)
        try:
            off = run(engine, out / "off")
            print(line("plugin off", off), flush=True)
            on = run(engine, out / "on", **{config.FLAG: "1", config.EXCHANGE: arguments.exchange})
            print(line("plugin on", on), flush=True)
        except RuntimeError as error:
            print(f"{error}\nFAIL the engine did not finish")
            return 1
    problems = differences(off, on)
    if problems:
        print(f"FAIL {'; '.join(problems)}")
        return 1
    where = f"; see {arguments.out}" if arguments.out else ""
    print(f"PASS {len(off['pictures'])} pictures and every step on every rank, the same bits off and on{where}")
    return 0


def run(engine: Engine, folder: Path, **variables: str) -> Any:
    """Run an engine in processes of its own, with these variables of the plugin and no others.

    Args:
        folder: for the pictures and `log.txt`.

    Returns:
        `start_s`; `pictures`, each with size, seconds, digest and the calls of the transformer on each rank;
        `exchange`, the implementation that the log names, or None.

    Raises:
        RuntimeError: the engine failed. The message is the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with log.open("w") as file:
        for command in engine.commands(folder):
            done = subprocess.run(
                command, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode:
                raise RuntimeError("\n".join(log.read_text().splitlines()[-40:]))
    report = json.loads((folder / "run.json").read_text())
    return report | {"exchange": next(iter(FIRST_EXCHANGE.findall(log.read_text())), None)}


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with the test tools to be found and only these variables of the plugin."""
    plain = {name: value for name, value in os.environ.items() if name not in config.VARIABLES}
    path = [str(TOOLS), str(PARTS), *filter(None, [plain.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **plain, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"} | variables


def line(name: str, report: Any) -> str:
    """What is told of a run."""
    pictures = ", ".join(f"{size_of(picture)} {picture['seconds']:.1f} s" for picture in report["pictures"])
    return (
        f"{name:<10}  start {report['start_s']:.0f} s, {pictures}; per step and rank "
        f"{per_step(report, exchanges)} exchanges by the plugin, {per_step(report, collectives)} collectives; "
        f"exchange {report['exchange'] or 'stock'}"
    )


def size_of(picture: Any) -> str:
    """Width and height as they are written."""
    return f"{picture['size']}x{picture['size']}"


def per_step(report: Any, count: Callable[[Any], int]) -> str:
    """A number that each step of each picture has on each rank, or the least and the most."""
    found = {count(call) for call in calls(report)}
    return " to ".join(str(number) for number in sorted({min(found), max(found)}))


def exchanges(call: Any) -> int:
    """How often a step entered the plugin's exchange."""
    return sum(call["exchanges"].values())


def collectives(call: Any) -> int:
    """Collectives of a step; sends and receives of single messages are none."""
    return sum(count for name, count in call["communication"].items() if name not in ("c10d::send", "c10d::recv_"))


def calls(report: Any) -> list[Any]:
    """Every step of every picture on every rank."""
    return [call for picture in report["pictures"] for steps in picture["calls"] for call in steps]


def differences(off: Any, on: Any) -> list[str]:
    """What is not as it must be between a run without the plugin and one with it, in sentences."""
    problems = []
    if any(exchanges(call) for call in calls(off)):
        problems.append("the run with the plugin off went through the plugin")
    if not all(exchanges(call) for call in calls(on)):
        problems.append("not every step with the plugin on went through the plugin")
    for without, using in zip(off["pictures"], on["pictures"], strict=True):
        size = size_of(without)
        if without["digest"] != using["digest"]:
            problems.append(f"the {size} pictures differ")
        for rank, (before, after) in enumerate(zip(without["calls"], using["calls"], strict=True)):
            outputs = [[call["output"] for call in steps] for steps in (before, after)]
            if not before or outputs[0] != outputs[1]:
                problems.append(f"the transformer's outputs for {size} differ on rank {rank}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
