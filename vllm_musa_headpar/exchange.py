"""The head-parallel exchange: validate -> blocks -> allocate -> the group's implementation -> result.

The contract is upstream's (see NOTICE). All ranks must bring the same counts, dtype and heads; what is
checked here is local, before any collective, and no agreement between ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from . import agreement, blocks, choice, ops, registry
from .errors import ExchangeError
from .layout import HeadParallelLayout


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
        TypeError: likewise, where one of them is no such thing at all.
        ExchangeError: the exchange failed on its way.
    """
    if torch.compiler.is_compiling() and len(layout.token_counts) > 1 and group is not None:
        return _traced(tensor, group, layout, inward=True)
    with agreement.telling(group, tensor, "dispatch"):
        if type(layout) is not HeadParallelLayout:
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
        TypeError: likewise, where one of them is no such thing at all.
        ExchangeError: the exchange failed on its way.
    """
    if torch.compiler.is_compiling() and len(layout.token_counts) > 1 and group is not None:
        return _traced(tensor, group, layout, inward=False)
    with agreement.telling(group, tensor, "return"):
        if type(layout) is not HeadParallelLayout:
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
    if layout.world_size == 1:
        return tensor
    return undispatch(tensor, group, layout, heads)


def _traced(tensor: Tensor, group: Any, layout: Any, *, inward: bool) -> Tensor:
    """One of the two functions above as an operator; it makes their checks when the graph runs."""
    counts = layout.token_counts
    replicas, heads = getattr(layout, "replica_counts", None), getattr(layout, "head_counts", None)
    if inward:
        return ops.dispatch((tensor,), counts, layout.rank, group, replica_counts=replicas, head_counts=heads)
    shards = len(counts) if replicas is None else len(counts) // len(replicas[0])
    outer_heads = shards * tensor.shape[1] if heads is None else sum(heads)
    return ops.undispatch(tensor, counts, layout.rank, group, outer_heads, replica_counts=replicas, head_counts=heads)


def dispatch(
    parts: tuple[Tensor, ...], group: Any, layout: HeadParallelLayout, dtype: torch.dtype, room: int | None = None
) -> Tensor:
    """Dispatch several validated tensors as one exchange.

    Args:
        parts: each `[local_tokens, heads_i, dim]` or `[batch, local_tokens, heads_i, dim]`; converted to `dtype`
            on the way.
        room: heads of the result where they are to be more than those that arrive: zero heads behind them.

    Returns:
        `[owned_tokens, sum of local heads_i, dim]`, the batch in front: the parts side by side on the head axis.
    """
    with _no_grad():
        with agreement.telling(group, parts[0], "dispatch"):
            exchange = blocks.dispatch(parts, layout, dtype, room)
        return _run((exchange,), group)[0]


def dispatch_each(
    tensors: Sequence[Tensor], group: Any, layouts: Sequence[HeadParallelLayout], rooms: Sequence[int | None]
) -> list[Tensor]:
    """Dispatch several validated tensors, each with a result of its own, in one launch where the implementation of
    all of them can; else one after the other.

    Args:
        tensors: as for `dispatch`, each of any shape and element type of its own.
        layouts: one per tensor.
        rooms: one per tensor.
    """
    with _no_grad():
        with agreement.telling(group, tensors[0], "dispatch"):
            exchanges = [
                blocks.dispatch((tensor,), layout, tensor.dtype, room)
                for tensor, layout, room in zip(tensors, layouts, rooms, strict=True)
            ]
        return _run(exchanges, group)


def undispatch(tensor: Tensor, group: Any, layout: HeadParallelLayout, heads: int, parts: int = 1) -> Tensor:
    """Return one validated tensor, `[owned_tokens, local_heads, dim] -> [local_tokens, heads, dim]`.

    Args:
        tensor: a batch may be in front, and is in front of the result then.
        parts: parts of `heads` heads that lie side by side in the tensor; with more than one the result is
            `[local_tokens, parts, heads, dim]`.
    """
    with _no_grad():
        with agreement.telling(group, tensor, "return"):
            exchange = blocks.undispatch(tensor, layout, heads, parts)
        return _run((exchange,), group)[0]


def dispatch_shards(wire: Tensor, group: Any, layout: HeadParallelLayout) -> Tensor:
    """Dispatch a validated, contiguous send buffer `[ranks, local_tokens, local_heads, dim]` in place.

    Returns:
        `[owned_tokens, local_heads, dim]`.
    """
    with _no_grad():
        with agreement.telling(group, wire, "dispatch"):
            exchange = blocks.dispatch_shards(wire, layout)
        return _run((exchange,), group)[0]


def undispatch_shards(tensor: Tensor, group: Any, layout: HeadParallelLayout) -> Tensor:
    """Return one validated tensor `[owned_tokens, local_heads, dim]` without unpacking what arrives.

    Returns:
        `[local_tokens, ranks, local_heads, dim]`: the receive buffer, permuted.
    """
    with _no_grad():
        with agreement.telling(group, tensor, "return"):
            exchange = blocks.undispatch_shards(tensor, layout)
        return _run((exchange,), group)[0]


def _no_grad() -> AbstractContextManager[Any]:
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING: AbstractContextManager[Any] = nullcontext()


def discover_counts(local_tokens: int, group: Any, device: torch.device) -> tuple[int, ...]:
    """Each rank's token count where only the own one is known: one collective and one host sync.

    Raises:
        ExchangeError: the collective failed.
    """
    agreement.admit(group, device, "count discovery", lambda: {"device": device.type}, anything=False)
    try:
        local = torch.tensor([local_tokens], dtype=torch.int64, device=device)
        counts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, local, group=group)
        return tuple(torch.cat(counts).tolist())
    except RuntimeError as error:
        raise ExchangeError(f"head-parallel count discovery with {local_tokens} own tokens failed: {error}") from error


def _run(exchanges: Sequence[blocks.Exchange], group: Any) -> list[Tensor]:
    """Carry out exchanges of one direction; in one launch where there are several and the implementation can."""
    first = exchanges[0]
    moving = [exchange for exchange in exchanges if exchange.numel]
    state = agreement.admit(group, first.result.device, first.name, lambda: _note(exchanges), bool(moving))
    results = [exchange.result for exchange in exchanges]
    if not moving:
        return results
    used = [state.registration if state.by_size is None else _by_size(state.by_size, each) for each in moving]
    try:
        if _profiling():  # without a profiler a range costs more than a small exchange's copy
            with record_function(f"headpar.{first.name}"):
                _carry_out(used, moving, group)
        else:
            _carry_out(used, moving, group)
        return results
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        names = " and ".join(dict.fromkeys(each.name for each in used))
        raise ExchangeError(f"{'; '.join(map(str, moving))} through {names} failed: {error}") from error


def _by_size(by_size: choice.BySize, exchange: blocks.Exchange) -> registry.Registration:
    moved = exchange.numel * exchange.result.element_size()
    return by_size.at(exchange.name, moved / exchange.world_size**2)


def _carry_out(used: Sequence[registry.Registration], exchanges: Sequence[blocks.Exchange], group: Any) -> None:
    """Together where one implementation has all and can; every rank comes to the same, from the layouts alone."""
    together = used[0].together
    if len(exchanges) > 1 and together is not None and all(each is used[0] for each in used):
        together(exchanges, group).wait()
        return
    for each, exchange in zip(used, exchanges, strict=True):
        each.implementation(exchange, group).wait()


_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def _note(exchanges: Sequence[blocks.Exchange]) -> dict[str, Any]:
    """What all ranks must bring alike. Heads are those of the outer side, which every rank can tell."""
    outers = [exchange.send if exchange.name == "dispatch" else exchange.recv for exchange in exchanges]

    def of_each(values: Iterable[Any]) -> Any:
        """The one value, or a list of several."""
        found = list(values)
        return found[0] if len(found) == 1 else found

    return {
        "tokens": of_each(exchange.layout.token_counts for exchange in exchanges),
        "replicas": of_each(exchange.layout.replica_counts for exchange in exchanges),
        "head_counts": of_each(exchange.layout.head_counts for exchange in exchanges),
        "batch": of_each(outer.grid.batch for outer in outers),
        "heads": [heads for outer in outers for _, heads in outer.grid.shapes],
        "dim": of_each(outer.grid.dim for outer in outers),
        "dtype": of_each(str(exchange.result.dtype) for exchange in exchanges),
        "device": exchanges[0].result.device.type,
    }


def as_layout(layout: Any) -> HeadParallelLayout:
    """This package's layout for any object with the attributes of the contract.

    Raises:
        TypeError: the object has no `token_counts` or `rank`.
        ValueError: they do not make a layout, or it has a field that this contract does not know.
    """
    extended = extension_of(layout)
    if extended is not None:
        raise ValueError(
            f"the layout's field {extended} is not known here, and only its default can be left out: expected "
            f"token_counts, rank and replica_counts, got {layout!r}"
        )
    if isinstance(layout, HeadParallelLayout):
        return layout
    try:
        fields = (layout.token_counts, layout.rank, getattr(layout, "replica_counts", None))
    except AttributeError as error:
        raise TypeError(
            f"layout must have token_counts and rank as a HeadParallelLayout has, got {layout!r}"
        ) from error
    return HeadParallelLayout(*fields)


def extension_of(layout: Any) -> str | None:
    """A field of a newer contract that the layout makes use of, as `name=value`; None if there is none."""
    kind: Any = type(layout)
    for name, default in _further_fields(kind):
        value = getattr(layout, name, default)
        if value is not default and value != default:
            return f"{name}={value!r}"
    return None


@lru_cache(maxsize=32)
def _further_fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The fields of a layout's class that the contract does not have, with their defaults."""
    own = {field.name for field in dataclasses.fields(HeadParallelLayout)}
    if not issubclass(kind, HeadParallelLayout):
        own.remove("head_counts")  # this package's own; what another contract means by it is not known
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(
        (field.name, _REQUIRED if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(kind)
        if field.name not in own
    )


_REQUIRED = object()  # no value equals it: a field that must be given is always made use of


@lru_cache(maxsize=512)
def cached_layout(
    token_counts: tuple[int, ...],
    rank: int,
    head_counts: tuple[int, ...] | None = None,
    replica_counts: tuple[tuple[int, ...], ...] | None = None,
) -> HeadParallelLayout:
    """A layout for callers who come with plain counts each time. All must be ints: True would pass for 1."""
    return HeadParallelLayout(token_counts, rank, replica_counts, head_counts=head_counts)


def require_dense(tensor: Any) -> None:
    """Refuse what is no tensor with its elements in strided memory of its own.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a torch.Tensor [tokens, heads, dim], got {type(tensor).__name__}")
    reason = why_not_dense(tensor)
    if reason is not None:
        raise ValueError(reason)


def why_not_dense(tensor: Tensor) -> str | None:
    """Why a tensor's elements are not in strided memory of its own; None if they are."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = f"{tensor.layout}, nested" if tensor.is_nested else str(tensor.layout)
        return f"expected a strided tensor [tokens, heads, dim], got a tensor of layout {kind}"
    if tensor.is_meta:
        return "expected a tensor with data, got one on device meta"
    if tensor.is_quantized:
        return f"expected a tensor of plain elements, got a quantized one, {tensor.dtype}"
    if not _has_memory(tensor):
        return (
            f"expected a tensor whose elements are in memory of its own, got a {_kind_of(tensor)}: "
            "exchange the tensor that it wraps"
        )
    return None


def _has_memory(tensor: Tensor) -> bool:
    """Whether the elements are where the tensor says: not so for wrappers (DTensor, functional, masked, fake, vmap)."""
    if not tensor.numel():
        return True
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _kind_of(tensor: Tensor) -> str:
    if type(tensor) is not Tensor:
        return type(tensor).__name__
    return (
        "functional tensor" if torch._is_functional_tensor(tensor) else "tensor of a torch transform (vmap, grad, zero)"
    )


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


# --- What the operators of traced code do when their graph runs ---


def _op_layout(
    token_counts: Sequence[int], rank: int, head_counts: Sequence[int], replica_counts: Sequence[int] = ()
) -> HeadParallelLayout:
    replicas = ops.rows_of(replica_counts, len(replica_counts) // len(token_counts)) if replica_counts else None
    return cached_layout(tuple(token_counts), rank, tuple(head_counts) if head_counts else None, replicas)


def _op_dispatch(
    parts: Sequence[Tensor],
    token_counts: Sequence[int],
    replica_counts: Sequence[int],
    head_counts: Sequence[int],
    rank: int,
    room: int,
    group_name: str,
) -> Tensor:
    group = ops.group_of(group_name)
    layout = _op_layout(token_counts, rank, head_counts, replica_counts)
    if len(parts) == 1 and parts[0].ndim == 3 and room < 0:
        return scatter_heads_gather_tokens(parts[0], group, layout)  # with its checks
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    return dispatch(tuple(parts), group, layout, dtype, None if room < 0 else room)


def _op_dispatch_each(
    tensors: Sequence[Tensor],
    token_counts: Sequence[int],
    head_counts: Sequence[int],
    rooms: Sequence[int],
    rank: int,
    group_name: str,
) -> list[Tensor]:
    group = ops.group_of(group_name)
    ranks = len(token_counts) // len(tensors)
    layouts = [_op_layout(counts, rank, head_counts) for counts in ops.rows_of(token_counts, ranks)]
    return dispatch_each(tensors, group, layouts, [None if room < 0 else room for room in rooms])


def _op_undispatch(
    tensor: Tensor,
    token_counts: Sequence[int],
    replica_counts: Sequence[int],
    head_counts: Sequence[int],
    rank: int,
    heads: int,
    parts: int,
    group_name: str,
) -> Tensor:
    group = ops.group_of(group_name)
    layout = _op_layout(token_counts, rank, head_counts, replica_counts)
    if parts == 1 and tensor.ndim == 3:
        return scatter_tokens_gather_heads(tensor, group, layout)  # with its checks
    return undispatch(tensor, group, layout, heads, parts)


ops.implement("dispatch", _op_dispatch)
ops.implement("dispatch_each", _op_dispatch_each)
ops.implement("undispatch", _op_undispatch)
