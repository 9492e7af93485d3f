"""Runs vLLM-Omni's engine where there is no accelerator, and writes down what its workers compute.

Test tools, no part of the product. With the folder above on `PYTHONPATH`, vLLM-Omni finds the platform through
its entry point group `vllm_omni.platform_plugins`; without it, it finds nothing of this.

`cpu`         the platform: vLLM's CPU platform with what vLLM-Omni asks of a platform
`attention`   the attention that it uses
`checkpoint`  a tiny Qwen-Image model with random weights
`record`      what each worker's transformer gives, and with how many exchanges and collectives
`run`         one engine from start to stop: `python -m headpar_engine.run --help`
"""

from __future__ import annotations


def platform() -> str | None:
    """Name of the platform class; None where vLLM-Omni has a platform of its own for this machine."""
    from vllm_omni.platforms import builtin_omni_platform_plugins

    if any(detect() is not None for detect in builtin_omni_platform_plugins.values()):
        return None
    return "headpar_engine.cpu.CpuPlatform"
