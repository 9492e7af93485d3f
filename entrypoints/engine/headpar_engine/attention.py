"""Attention on a CPU. In a file of its own: the host's attention needs to know the platform when it is imported."""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class PlainAttention(SDPAImpl):  # type: ignore[misc]
    """torch's attention. The host chooses an implementation by device type and refuses the CPU; all are alike."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As on any device without an attention of its own."""
        return self.forward_xpu(*args, **kwargs)


class Attention(SDPABackend):  # type: ignore[misc]
    """The backend that hands it out."""

    @staticmethod
    def get_impl_cls() -> type[PlainAttention]:
        """The implementation."""
        return PlainAttention
