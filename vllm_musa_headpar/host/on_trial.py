"""Replacements of MAGI-2's exchange functions where the host's have a body that is not known: taken on trial."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..agreement.trial import Trial

Function = Callable[..., Any]


def trying(
    trial: Trial,
    stock: Function,
    ours: Function,
    group_of: Callable[[Any], Any],
    process_group_of: Callable[[Any], Any],
) -> Function:
    """A function with the parameters of `stock` that calls `ours` where the trial has proven it, or tries it.

    Under the compiler, on a single rank and for counts that are not told, the host's own is called.

    Args:
        group_of: MAGI-2's group for the one given, which may be None.
        process_group_of: the torch group of that.
    """
    names = list(signature(stock).parameters)
    subject, sizes = names[0], next(name for name in names if name.endswith("split_sizes"))

    def tried(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return stock(*args, **named)
        given = {**dict(zip(names, args, strict=False)), **named}
        if len(given) < len(args) + len(named) or subject not in given:
            return stock(*args, **named)  # which says what is wrong with the call
        tensors = given[subject]
        if not isinstance(tensors, Tensor):
            tensors = given[subject] = list(tensors)
        group = group_of(given.get("group"))
        layout = layout_of([tensors] if isinstance(tensors, Tensor) else tensors, given.get(sizes), group.world_size)
        if group.world_size == 1 or layout is None:
            return stock(**given)
        return trial.call(process_group_of(group), layout, ours, stock, given)

    tried.headpar_stock = stock  # type: ignore[attr-defined]
    return tried


def layout_of(tensors: Sequence[Any], counts: Any, ranks: int) -> Hashable:
    """All that the exchange depends on, alike on every rank; None where that is not told."""
    if type(counts) not in (list, tuple) or len(counts) != ranks or not all(type(count) is int for count in counts):
        return None
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    return (tuple(counts), *((tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors))


def packed_wire(tensors: Sequence[Tensor]) -> Tensor | None:
    """The buffer `[ranks, tokens, all heads, dim]` of which these are all head slices, in order.

    Args:
        tensors: `[tokens, ranks, heads_i, dim]` each.

    Returns:
        A view of it; None where they are no such slices.
    """
    first = tensors[0]
    tokens, ranks, _, dim = first.shape
    heads = sum(tensor.shape[2] for tensor in tensors)
    strides = (heads * dim, tokens * heads * dim, dim, 1)
    address = first.data_ptr()
    for tensor in tensors:
        steps = zip(tensor.shape, tensor.stride(), strides, strict=True)
        if tensor.data_ptr() != address or any(size > 1 and found != step for size, found, step in steps):
            return None
        if tensor.dtype != first.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        address += tensor.shape[2] * dim * tensor.element_size()
    return first.as_strided((ranks, tokens, heads, dim), (tokens * heads * dim, heads * dim, dim, 1))
