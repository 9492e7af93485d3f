"""vLLM-Omni's diffusion platform for a machine without an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform as VllmCpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

MOST_WORKERS = 16


class CpuPlatform(OmniPlatform, VllmCpuPlatform):  # type: ignore[misc]
    """Each worker is a process on the same CPU."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """The one attention that needs no device."""
        return "headpar_engine.attention.Attention"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """The CPU for every rank."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """How many workers the host lets start."""
        return MOST_WORKERS

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """Where the host's own platforms have it."""
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Compilation is the host's default, and works on a CPU."""
        return True

    # A platform looks up what it does not define in torch's module for the device; `torch.cpu` has none of these.

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs behind the host's back."""

    @classmethod
    def empty_cache(cls) -> None:
        """Nothing is cached."""

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """Memory is not measured."""

    @classmethod
    def max_memory_reserved(cls) -> int:
        """Bytes; not measured."""
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        """Bytes; not measured."""
        return 0
