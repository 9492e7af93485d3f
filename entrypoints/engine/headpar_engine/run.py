"""One engine from start to stop: pictures of given sizes, and what its workers recorded, in one folder."""

import torchada  # noqa: F401, I001 - before torch is imported, here and in every spawned worker

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from headpar_engine.record import FOLDER

SEED = 1
PATIENCE_S = 180


def main() -> None:
    """Start, make the pictures one after the other, stop; `run.json` has what came of it."""
    arguments = _arguments()
    folder: Path = arguments.folder.resolve()
    os.environ[FOLDER] = str(folder)
    started = time.monotonic()
    omni = _start(arguments)
    report: dict[str, Any] = {"start_s": time.monotonic() - started, "pictures": []}
    try:
        for size in arguments.sizes:
            report["pictures"].append(_picture(omni, size, arguments.steps, arguments.nproc, folder))
    finally:
        omni.close()
    (folder / "run.json").write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headpar_engine.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="an existing folder, for what comes of it")
    parser.add_argument("--model", required=True, help="the checkpoint's folder")
    parser.add_argument("--mode", default="strict", help="ulysses_mode")
    parser.add_argument("--nproc", type=int, default=2, help="workers")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--offload", action="store_true", help="the host's layerwise offload")
    parser.add_argument("sizes", type=int, nargs="+", help="width and height of each picture, in pixels")
    return parser.parse_args()


def _start(arguments: argparse.Namespace) -> Any:
    from vllm_omni import Omni
    from vllm_omni.diffusion.data import DiffusionParallelConfig
    from vllm_omni.platforms import current_omni_platform

    return Omni(
        model=arguments.model,
        parallel_config=DiffusionParallelConfig(ulysses_degree=arguments.nproc, ulysses_mode=arguments.mode),
        dtype="float32" if current_omni_platform.is_cpu() else "bfloat16",
        enforce_eager=not arguments.compile,
        enable_layerwise_offload=arguments.offload,
        pin_cpu_memory=False,  # there is no device to pin it for
        step_execution=True,  # the other mode needs a stream of the device
        worker_extension_cls="headpar_engine.record.RecordTransformer",
        stage_init_timeout=PATIENCE_S,
    )


def _picture(omni: Any, size: int, steps: int, nproc: int, folder: Path) -> dict[str, Any]:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    sampling = OmniDiffusionSamplingParams(
        height=size, width=size, num_inference_steps=steps, seed=SEED, output_type="pil", true_cfg_scale=1.0
    )
    before = [_lines(folder, rank) for rank in range(nproc)]
    started = time.monotonic()
    picture = omni.generate({"prompt": "a cat"}, sampling, use_tqdm=False)[0].images[0]
    seconds = time.monotonic() - started
    picture.save(folder / f"{size}x{size}.png")
    digest = hashlib.sha256(picture.tobytes()).hexdigest()
    calls = [_new_lines(folder, rank, len(before[rank]), steps) for rank in range(nproc)]
    return {"size": size, "seconds": seconds, "digest": digest, "calls": calls}


def _new_lines(folder: Path, rank: int, known: int, expected: int) -> list[Any]:
    """What a rank has recorded since; only rank 0 has surely done so when its picture is there."""
    deadline = time.monotonic() + PATIENCE_S
    while len(lines := _lines(folder, rank)[known:]) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return lines


def _lines(folder: Path, rank: int) -> list[Any]:
    """What a rank has recorded so far."""
    with (folder / f"rank-{rank}.jsonl").open() as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    main()
