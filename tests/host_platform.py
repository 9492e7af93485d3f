"""What vLLM-Omni's diffusion models need of a platform, on a machine without an accelerator.

The host finds no platform here and takes its own "unspecified" one, which is CPU but knows no attention backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import vllm_omni.platforms
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.utils import default_unquantized_gemm
from vllm_omni.diffusion.attention import selector
from vllm_omni.diffusion.attention.backends.ring import ring_kernels
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.platforms import current_omni_platform


@contextmanager
def current_platform(platform: object) -> Iterator[None]:
    """The host's platform for the time of the block, also for modules that are imported inside and keep it by name."""
    stock = current_omni_platform
    with mock.patch.object(vllm_omni.platforms, "_current_omni_platform", platform):
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                if name.startswith("vllm_omni.") and vars(module).get("current_omni_platform") is platform:
                    vars(module)["current_omni_platform"] = stock


@contextmanager
def plain_platform() -> Iterator[None]:
    """Models that are made and run inside the block compute with plain torch, as the host's own fallbacks do.

    Attention is the host's SDPA. Its dispatch knows five devices by name and refuses all others; what it calls on
    CUDA and MUSA is plain torch. Ring attention asks aten for one device's kernel by name: here it is the CPU's.
    Linear layers, which vLLM on CPU would hand to oneDNN, are torch's.
    """

    def backend(selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False) -> str:
        return f"{SDPABackend.__module__}.{SDPABackend.__qualname__}"

    def ring_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        kept = {name: options[name] for name in ("dropout_p", "is_causal", "scale")}
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **kept)

    def gemm(linear_backend: str = "auto") -> object:
        return default_unquantized_gemm

    platform = type(current_omni_platform)
    with (
        mock.patch.object(platform, "get_diffusion_attn_backend_cls", staticmethod(backend)),
        mock.patch.object(SDPAImpl, "forward", SDPAImpl.forward_cuda),
        mock.patch.object(ring_kernels, "_scaled_dot_product_efficient_attention", ring_kernel),
        mock.patch.object(linear, "dispatch_unquantized_gemm", gemm),
    ):
        selector._cached_get_backend_cls.cache_clear()
        try:
            yield
        finally:
            selector._cached_get_backend_cls.cache_clear()
