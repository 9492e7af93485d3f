"""What a worker's transformer gives and what it costs, one line of JSON per call.

The engine takes `RecordTransformer` as its `worker_extension_cls` and mixes it into its worker class. Counts come
from torch's profiler, so they hold for compiled code too, and whoever makes the calls.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

FOLDER = "HEADPAR_ENGINE_FOLDER"  # the environment variable that says where to

EXCHANGES = ("headpar.dispatch", "headpar.return")  # the plugin's ranges
COMMUNICATION = "c10d::"  # torch's communication operators; compiled code comes to them too


class RecordTransformer:
    """A worker that writes `rank-N.jsonl`."""

    rank: int
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as the host does, then listen to its transformer."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        path = Path(os.environ[FOLDER]) / f"rank-{self.rank}.jsonl"
        recorder = _Recorder(path)
        transformer = self.model_runner.pipeline.transformer
        transformer.register_forward_pre_hook(recorder.before)
        transformer.register_forward_hook(recorder.after)


class _Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.profile: Any = None

    def before(self, module: Any, inputs: Any) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    def after(self, module: Any, inputs: Any, output: Any) -> None:
        self.profile.stop()
        names = Counter(event.name for event in self.profile.events())
        line = {
            "pid": os.getpid(),
            "output": digest(output),
            "exchanges": {name: count for name, count in names.items() if name in EXCHANGES},
            "communication": {name: count for name, count in names.items() if name.startswith(COMMUNICATION)},
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def digest(output: Any) -> str:
    """SHA-256 of the tensors in a module's output: types, shapes and bits."""
    found = hashlib.sha256()
    for tensor in _tensors(output):
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
