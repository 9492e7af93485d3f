"""MAGI-2's MoE layer on hosts whose experts may be spread over fewer ranks than the tokens. From descriptions.

Its own group has a shard of the heads for each rank. Set to dispatch over a wider one, whose ranks have the same
shards several times over, each of those serves a part of every rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .parallel import Magi2ParallelGroup, ep_dispatch, ep_undispatch, get_magi2_ep_group


@dataclass(frozen=True)
class Magi2MultiHeadMoEConfig:
    hidden_size: int
    num_heads: int
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    params_dtype: torch.dtype


class Magi2MultiHeadMoE(torch.nn.Module):
    def __init__(self, config: Magi2MultiHeadMoEConfig, *, ep_group: Magi2ParallelGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.d_head = config.num_heads, config.hidden_size // config.num_heads
        self.ep_group = self.dispatch_group = ep_group or get_magi2_ep_group()
        self.dispatch_replicas = 1
        self.local_num_heads = self.num_heads // self.ep_group.world_size
        rows, width = self.local_num_heads * config.num_experts, config.expert_intermediate_size

        def bank(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(rows, *shape, dtype=config.params_dtype), requires_grad=False)

        self.gate = bank(self.d_head)
        self.W_gate, self.W_up, self.W_down = (
            bank(self.d_head, width),
            bank(self.d_head, width),
            bank(width, self.d_head),
        )

    def set_dispatch_group(self, sp: Magi2ParallelGroup) -> None:
        if sp.world_size % self.ep_group.world_size or sp.rank % self.ep_group.world_size != self.ep_group.rank:
            raise ValueError("the wider group does not repeat the experts' one")
        self.dispatch_group, self.dispatch_replicas = sp, sp.world_size // self.ep_group.world_size

    def _local_forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, local heads, d_head]`: of each head's experts those with the highest scores, weighted by them."""
        experts = self.config.num_experts
        gate = self.gate.view(self.local_num_heads, experts, -1)
        ties = torch.arange(experts, device=x.device) / experts  # of experts with equal whole scores the last one
        weights, chosen = (torch.einsum("thd,hed->the", x.float(), gate.float()) + ties).topk(self.config.top_k)
        output = torch.zeros_like(x)
        for head in range(self.local_num_heads):
            for expert in range(experts):
                token, choice = (chosen[:, head] == expert).nonzero(as_tuple=True)
                row = head * experts + expert
                mine = x[token, head]
                hidden = (mine @ self.W_gate[row]).relu() * (mine @ self.W_up[row])
                weight = weights[token, head, choice].floor().to(x.dtype)
                output[:, head].index_add_(0, token, weight.unsqueeze(1) * (hidden @ self.W_down[row]))
        return output

    def forward(self, x: torch.Tensor, sequence_split_sizes: list[int] | None = None) -> torch.Tensor:
        heads = x.view(-1, self.num_heads, self.d_head)
        group, replicas, sizes = self.dispatch_group, self.dispatch_replicas, sequence_split_sizes
        if not isinstance(sizes, list) or len(sizes) != group.world_size or sizes[group.rank] != heads.shape[0]:
            group, replicas, sizes = self.ep_group, 1, self._token_counts(heads.shape[0])
        routed = self._local_forward(ep_dispatch(heads, group, sizes, replicas))
        return ep_undispatch(routed, group, sizes, replicas).reshape(x.shape)

    def _token_counts(self, tokens: int) -> list[int]:
        if self.ep_group.world_size == 1:
            return [tokens]
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ep_group.world_size)]
        dist.all_gather(counts, torch.tensor([tokens]), group=self.ep_group.group)
        return [int(count) for count in counts]
