"""The head-parallel exchange: validate -> blocks -> allocate -> the group's implementation -> result.

The contract is upstream's (see NOTICE). All ranks must bring the same counts, dtype and heads; what is
checked here is local, before any collective, and no agreement between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from . import agreement, blocks, registry
from .errors import DisagreementError, ExchangeError
from .layout import HeadParallelLayout

# What validation raises. With the check on, the other ranks are told.
REFUSALS = (ValueError, TypeError, IndexError)


def scatter_heads_gather_tokens(tensor: Tensor, group: Any, layout: Any) -> Tensor:
    """Dispatch: from my tokens with all heads to all tokens with my heads.

    Args:
        tensor: `[local_tokens, heads, dim]`, of any strides and element type that the group's backend takes.
        group: the caller's process group; may be None for a single rank.
        layout: a `HeadParallelLayout`, or the host's own class of that name.

    Returns:
        `[owned_tokens, local_heads, dim]`: tokens in rank order, this rank's contiguous head shard.
        Contiguous and without gradient. On a single rank `tensor` itself.

    Raises:
        ValueError: before any collective, where the layout, the group and the tensor do not fit together.
        ExchangeError: the exchange failed on its way.
    """
    try:
        if not isinstance(layout, HeadParallelLayout):
            layout = as_layout(layout)
        layout.validate_group(group)
        _require_tensor(tensor, layout.local_tokens, "local tokens")
        _require_positive(tensor)
        heads = tensor.shape[1]
        if layout.head_counts is None and heads % layout.shards:
            raise ValueError(f"{heads} heads must be divisible by the {layout.shards} head shards")
        if layout.head_counts is not None and heads != sum(layout.head_counts):
            raise ValueError(
                f"{heads} heads must be the sum of the layout's head_counts {layout.head_counts}, "
                f"{sum(layout.head_counts)}"
            )
    except REFUSALS as error:
        agreement.publish_refusal(group, tensor, "dispatch", error)
        raise
    if layout.world_size == 1:
        return tensor
    return dispatch((tensor,), group, layout, tensor.dtype)


def scatter_tokens_gather_heads(tensor: Tensor, group: Any, layout: Any) -> Tensor:
    """Return: from all tokens with my heads to my tokens with all heads; the exact reverse of dispatch.

    Args:
        tensor: `[owned_tokens, local_heads, dim]`, of any strides and element type that the group's backend
            takes.
        group: the caller's process group; may be None for a single rank.
        layout: the dispatch's.

    Returns:
        `[local_tokens, heads, dim]`: this rank's tokens, heads in shard order. Contiguous and without
        gradient. On a single rank `tensor` itself.

    Raises:
        ValueError: before any collective, where the layout, the group and the tensor do not fit together.
        ExchangeError: the exchange failed on its way.
    """
    try:
        if not isinstance(layout, HeadParallelLayout):
            layout = as_layout(layout)
        layout.validate_group(group)
        _require_tensor(tensor, layout.owned_tokens, "owned tokens")
        local_heads = tensor.shape[1]
        if layout.head_counts is None:
            _require_positive(tensor)
            heads = layout.shards * local_heads
        else:
            _require_own_heads(tensor, layout)
            heads = sum(layout.head_counts)
    except REFUSALS as error:
        agreement.publish_refusal(group, tensor, "return", error)
        raise
    if layout.world_size == 1:
        return tensor
    return undispatch(tensor, group, layout, heads)


def dispatch(parts: tuple[Tensor, ...], group: Any, layout: HeadParallelLayout, dtype: torch.dtype) -> Tensor:
    """Dispatch several validated tensors as one exchange.

    Args:
        parts: each `[local_tokens, heads_i, dim]`; converted to `dtype` on the way.

    Returns:
        `[owned_tokens, sum of local heads_i, dim]`: the parts side by side on the head axis.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _run(blocks.dispatch(parts, layout, dtype), group, layout)
    return _run(blocks.dispatch(parts, layout, dtype), group, layout)


def undispatch(tensor: Tensor, group: Any, layout: HeadParallelLayout, heads: int) -> Tensor:
    """Return one validated tensor, `[owned_tokens, local_heads, dim] -> [local_tokens, heads, dim]`."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _run(blocks.undispatch(tensor, layout, heads), group, layout)
    return _run(blocks.undispatch(tensor, layout, heads), group, layout)


def discover_counts(local_tokens: int, group: Any, device: torch.device) -> tuple[int, ...]:
    """Each rank's token count where only the own one is known: one collective and one host sync.

    Raises:
        ExchangeError: the collective failed.
    """
    if agreement.state_of(group, device).check:
        agreement.compare(group, "count discovery", {"device": device.type})
    try:
        local = torch.tensor([local_tokens], dtype=torch.int64, device=device)
        counts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, local, group=group)
        return tuple(torch.cat(counts).tolist())
    except RuntimeError as error:
        raise ExchangeError(f"head-parallel count discovery with {local_tokens} own tokens failed: {error}") from error


def _run(exchange: blocks.Exchange, group: Any, layout: HeadParallelLayout) -> Tensor:
    device = exchange.result.device
    try:
        state = agreement.state_of(group, device)
    except REFUSALS as error:
        agreement.publish_refusal(group, exchange.result, exchange.name, error)
        raise
    if state.check:
        agreement.compare(group, exchange.name, _note(exchange, layout, state.registration.name))
    if not exchange.numel:
        return exchange.result
    used = state.registration
    try:
        if not state.used:
            agreement.prove(state, group, device)
            used = state.registration
        if exchange.numel * exchange.result.element_size() < state.min_message_bytes * layout.world_size**2:
            used = registry.REFERENCE
        if _profiling():  # without a profiler a range costs more than a small exchange's copy
            with record_function(f"headpar.{exchange.name}"):
                used.implementation(exchange, group).wait()
        else:
            used.implementation(exchange, group).wait()
        return exchange.result
    except (DisagreementError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise ExchangeError(f"{exchange} through {used.name} failed: {error}") from error


_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def _note(exchange: blocks.Exchange, layout: HeadParallelLayout, implementation: str) -> dict[str, Any]:
    """What all ranks must bring alike. Heads are those of the outer side, which every rank can tell."""
    outer = exchange.send if exchange.name == "dispatch" else exchange.recv
    return {
        "tokens": layout.token_counts,
        "replicas": layout.replica_counts,
        "head_counts": layout.head_counts,
        "heads": [heads for _, heads in outer.grid.shapes],
        "dim": outer.grid.dim,
        "dtype": str(exchange.result.dtype),
        "device": exchange.result.device.type,
        "implementation": implementation,
    }


def as_layout(layout: Any) -> HeadParallelLayout:
    """This package's layout for any object with the attributes of the contract.

    Raises:
        TypeError: the object has no `token_counts` or `rank`.
        ValueError: they do not make a layout.
    """
    try:
        fields = (layout.token_counts, layout.rank, getattr(layout, "replica_counts", None))
    except AttributeError as error:
        raise TypeError(
            f"layout must have token_counts and rank as a HeadParallelLayout has, got {layout!r}"
        ) from error
    return HeadParallelLayout(*fields)


@lru_cache(maxsize=512)
def cached_layout(
    token_counts: tuple[int, ...], rank: int, head_counts: tuple[int, ...] | None = None
) -> HeadParallelLayout:
    """A layout for callers who come with plain counts each time. All must be ints: True would pass for 1."""
    return HeadParallelLayout(token_counts, rank, head_counts=head_counts)


def require_dense(tensor: Any) -> None:
    """Refuse what is no tensor with its elements in strided memory.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a torch.Tensor [tokens, heads, dim], got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = f"{tensor.layout}, nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"expected a strided tensor [tokens, heads, dim], got a tensor of layout {kind}")
    if tensor.is_meta:
        raise ValueError("expected a tensor with data, got one on device meta")
    if tensor.is_quantized:
        raise ValueError(f"expected a tensor of plain elements, got a quantized one, {tensor.dtype}")


def _require_tensor(tensor: Any, tokens: int, what: str) -> None:
    require_dense(tensor)
    if tensor.ndim != 3:
        raise ValueError(f"expected a tensor [tokens, heads, dim], got shape {list(tensor.shape)}")
    if tensor.shape[0] != tokens:
        raise ValueError(f"the layout says {tokens} {what}, got a tensor {list(tensor.shape)} with {tensor.shape[0]}")


def _require_positive(tensor: Tensor) -> None:
    if tensor.shape[1] < 1 or tensor.shape[2] < 1:
        raise ValueError(f"heads and dim must be positive, got a tensor {list(tensor.shape)}")


def _require_own_heads(tensor: Tensor, layout: HeadParallelLayout) -> None:
    assert layout.head_counts is not None
    own = layout.head_counts[layout.rank % layout.shards]
    if tensor.shape[1] != own or tensor.shape[2] < 1 or not any(layout.head_counts):
        raise ValueError(
            f"the layout's head_counts {layout.head_counts} give rank {layout.rank} {own} heads, and all heads "
            f"together and dim must be positive: got a tensor {list(tensor.shape)}"
        )
