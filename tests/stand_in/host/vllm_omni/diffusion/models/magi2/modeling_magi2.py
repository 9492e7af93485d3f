from __future__ import annotations

from typing import Any

import torch

from .mh_moe import Magi2MultiHeadMoE


class Magi2TransformerLayer(torch.nn.Module):
    def __init__(self, mlp: Magi2MultiHeadMoE) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self,
        hidden_states: torch.Tensor,
        rope: Any,
        varlen_handler: Any,
        modality_dispatcher: Any,
        cp_split_sizes: list[int],
    ) -> torch.Tensor:
        return hidden_states + self.mlp(hidden_states, cp_split_sizes)
