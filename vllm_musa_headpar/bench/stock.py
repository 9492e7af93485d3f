"""The exchange as vLLM-Omni 0.30.0 computes it, to be measured against. Written anew; the bits are the host's.

All of it assumes heads that divide by the ranks (W below); H is the heads of one rank, S the tokens of one
rank, D elements per head. A wire is the flat buffer that the collective sends or receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def pack_heads(tensor: Tensor, ranks: int) -> Tensor:
    """`[S, W*H, D]` -> wire `[W, S, H, D]`: one copy, which is what the collective needs."""
    tokens, heads, dim = tensor.shape
    by_rank = tensor.contiguous().view(tokens, ranks, heads // ranks, dim)
    return by_rank.permute(1, 0, 2, 3).contiguous()


def unpack_heads(wire: Tensor) -> Tensor:
    """Wire `[W, S, H, D]` -> `[S, W*H, D]`: one copy again."""
    ranks, tokens, heads, dim = wire.shape
    return wire.permute(1, 0, 2, 3).contiguous().view(tokens, ranks * heads, dim)


def send_heads(wire: Tensor, received: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """The collective of a dispatch: wire `[W, S, H, D]` into `received` `[sum(S_r), H, D]`."""
    row, block = received.shape[1] * received.shape[2], wire[0].numel()
    dist.all_to_all_single(
        received.view(-1),
        wire.view(-1),
        output_split_sizes=[count * row for count in counts],
        input_split_sizes=[block] * wire.shape[0],
        group=group,
    )
    return received


def send_tokens(tensor: Tensor, received: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """The collective of a return: `[sum(S_r), H, D]` into the wire `received` `[W, S, H, D]`."""
    row, block = tensor.shape[1] * tensor.shape[2], received[0].numel()
    dist.all_to_all_single(
        received.view(-1),
        tensor.view(-1),
        output_split_sizes=[block] * received.shape[0],
        input_split_sizes=[count * row for count in counts],
        group=group,
    )
    return received


def dispatch(tensor: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """MoE dispatch with known token counts, `[S, W*H, D] -> [sum(S_r), H, D]`."""
    wire = pack_heads(tensor, len(counts))
    received = tensor.new_empty((sum(counts), *wire.shape[2:]))
    return send_heads(wire, received, counts, group)


def undispatch(tensor: Tensor, counts: Sequence[int], rank: int, group: Any) -> Tensor:
    """MoE return with known token counts, `[sum(S_r), H, D] -> [S, W*H, D]`."""
    tensor = tensor.contiguous()
    received = tensor.new_empty((len(counts), counts[rank], *tensor.shape[1:]))
    return unpack_heads(send_tokens(tensor, received, counts, group))


def attention_dispatch(tensors: Sequence[Tensor], counts: Sequence[int], group: Any) -> list[Tensor]:
    """Q, K and V in one collective: each is packed, then the packed ones are copied once more by `cat`.

    Returns:
        Views `[sum(S_r), H_i, D]` of one buffer.
    """
    packed = [pack_heads(tensor, len(counts)) for tensor in tensors]
    wire = torch.cat(packed, dim=2)
    received = wire.new_empty((sum(counts), *wire.shape[2:]))
    send_heads(wire, received, counts, group)
    return list(torch.split(received, [part.shape[2] for part in packed], dim=1))


def attention_return(tensor: Tensor, counts: Sequence[int], rank: int, group: Any) -> Tensor:
    """The attention output back, `[sum(S_r), H, D] -> [S, W*H, D]`: the same formula as the MoE return."""
    return undispatch(tensor, counts, rank, group)
