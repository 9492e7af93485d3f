"""Loads the entry points of the host's own group; vLLM's are not there without vLLM."""

from importlib.metadata import entry_points


def load_omni_general_plugins() -> None:
    for point in entry_points(group="vllm_omni.general_plugins"):
        point.load()()
