"""Counts what a piece of code does: communication, copies, allocations, launches, host syncs.

The numbers come from the calls themselves, not from a clock, so they mean the same on Gloo, on the
simulated MUSA device and on a real one. Tensor operations are seen by a `TorchDispatchMode` (of the
calling thread), communication by wrapping the functions of `torch.distributed` as module attributes
(code that keeps `from torch.distributed import ...` names from before is not seen), and reads of a whole
tensor by wrapping methods of `torch.Tensor`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that copy elements unchanged. Gathers with computed indices (index_select, index) are compute.
_COPIES = frozenset(
    f"aten::{name}"
    for name in ("copy_", "clone", "_to_copy", "cat", "stack", "_foreach_copy_", "split_with_sizes_copy")
)
# Operations that are no views by their schema and run no kernel all the same.
_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "record_stream",
        "_unsafe_view",
        "_local_scalar_dense",
    )
)
# Aliases its input although its schema does not say so.
_SILENT_ALIASES = frozenset({"aten::_unsafe_view"})
_NOT_KERNELS_OF_THE_DEVICE = frozenset({"c10d", "_c10d_functional", "c10d_functional", "prim", "prims", "profiler"})
_HOST_READS = ("tolist", "numpy", "cpu")


@dataclass
class Counts:
    """What was done inside one `counting()` block, on this rank.

    collectives: calls by function name of `torch.distributed` (barriers and object collectives too, point
        to point not).
    batches: calls of `batch_isend_irecv`; each is one grouped launch.
    messages: sends in those batches.
    bytes_between_ranks: bytes that this rank sends to *other* ranks. Blocks and messages to itself are
        left out. For W ranks and a tensor of n bytes: all_gather n x (W-1); all_reduce 2 x n x (W-1) / W
        (ring); reduce_scatter what it has for the others; broadcast n x (W-1) at the source, else 0;
        reduce and gather n except at the destination; scatter the others' parts at the source; barrier
        and object collectives 0.
    bytes_copied: bytes written by copy_, clone, _to_copy, cat, stack and their like (`contiguous` and
        `reshape` of strided tensors are clones).
    bytes_allocated: bytes of new storage: outputs that alias no input.
    launches: communication launches, and tensor operations that run a kernel: no views, no bare
        allocations, nothing on zero elements.
    host_syncs: reads of device values by the host: item, bool, int, tolist, numpy, cpu, copies to the
        host, operations whose output shape depends on values (nonzero, masks), barriers. A copy to the
        host counts as this only.
    """

    collectives: collections.Counter[str] = field(default_factory=collections.Counter)
    batches: int = 0
    messages: int = 0
    bytes_between_ranks: int = 0
    bytes_copied: int = 0
    bytes_allocated: int = 0
    launches: int = 0
    host_syncs: int = 0

    @property
    def total_collectives(self) -> int:
        """Collectives of every kind."""
        return sum(self.collectives.values())

    @property
    def communication_launches(self) -> int:
        """Collectives and batches: each is one launch on the device."""
        return self.total_collectives + self.batches


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count what the block does. Blocks nest (an outer one counts what an inner one does too).

    Yields:
        The counts, which grow while the block runs and stay as they are after it.
    """
    counter = _Counter()
    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(_wrapped(dist, name, functools.partial(counter.collective, name)))
        stack.enter_context(_wrapped(dist, "batch_isend_irecv", counter.batch))
        for name in _HOST_READS:
            stack.enter_context(_wrapped(torch.Tensor, name, counter.host_read))
        stack.enter_context(_AtenMode(counter))
        yield counter.counts


class _Counter:
    """Adds calls to the counts, and nothing that happens inside a call already counted."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.quiet = False

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.quiet = True
        try:
            return function(*args, **kwargs)
        finally:
            self.quiet = False

    def collective(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.quiet:
            return function(*args, **kwargs)
        result = self._call(function, args, kwargs)
        parameters, rule = _COLLECTIVES[name]
        call = _Call(dict(zip(parameters, args, strict=False)) | kwargs)
        if call.rank >= 0:  # else a rank outside the group: a no-op by torch's rules
            self.counts.collectives[name] += 1
            self.counts.launches += 1
            self.counts.bytes_between_ranks += rule(call)
            self.counts.host_syncs += "barrier" in name or "object" in name
        return result

    def batch(self, function: Callable[..., Any], p2p_op_list: Sequence[Any]) -> Any:
        if self.quiet:
            return function(p2p_op_list)
        result = self._call(function, (p2p_op_list,), {})
        sends = [op for op in p2p_op_list if getattr(op.op, "__name__", "") == "isend"]
        rank = dist.get_rank(p2p_op_list[0].group)
        self.counts.batches += 1
        self.counts.launches += 1
        self.counts.messages += len(sends)
        self.counts.bytes_between_ranks += sum(_bytes(op.tensor) for op in sends if op.group_peer != rank)
        return result

    def host_read(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.quiet:
            return function(*args, **kwargs)
        self.counts.host_syncs += 1
        return self._call(function, args, kwargs)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if syncs_host(func, args, kwargs):
            self.counts.host_syncs += 1
            if copies_to_host(func, args, kwargs):
                return
        name = func._schema.name
        new = _new_outputs(func, result)
        written = new + _mutated(func, args, kwargs)
        self.counts.bytes_allocated += sum(_span(tensor) for tensor in new)
        if name in _COPIES:
            self.counts.bytes_copied += sum(_bytes(tensor) for tensor in written)
        if func.is_view or name in _NO_KERNEL:
            return
        touched = written or tensors_in(args)
        self.counts.launches += any(tensor.numel() for tensor in touched)


class _AtenMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor operation of this thread, decomposed as the device would run it."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.counter.quiet or func.namespace in _NOT_KERNELS_OF_THE_DEVICE:
            return func(*args, **kwargs)
        # Under inference_mode composite operations come here whole (`contiguous`, `reshape`, `item`).
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            self.counter.operation(func, args, kwargs, result)
        return result


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `owner.name` go through `around(original, ...)`; leave `owner` as it was afterwards."""
    original = getattr(owner, name)
    inherited = name not in vars(owner)
    active = True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if active else original(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        # Somebody may have wrapped our wrapper in the meantime and keeps it: then it only passes calls on.
        active = False
        if vars(owner).get(name) is wrapper:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def syncs_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this aten operation makes the host wait for values of the device."""
    if torch.Tag.data_dependent_output in func.tags or copies_to_host(func, args, kwargs):
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._schema.name == "aten::index":  # integer indices tell the shape, masks do not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def copies_to_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this aten operation copies a device tensor to host memory."""
    if func._schema.name == "aten::_to_copy":
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"
    if func._schema.name == "aten::copy_":
        return bool(args[0].device.type == "cpu" and args[1].device.type != "cpu")
    return False


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, and in lists and tuples in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Each argument of an aten operation with whether the operation writes to it."""
    for position, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if position < len(args):
            yield args[position], written
        elif argument.name in kwargs:
            yield kwargs[argument.name], written


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for value, written in arguments_of(func, args, kwargs) if written for tensor in tensors_in(value)]


def _new_outputs(func: Any, result: Any) -> list[torch.Tensor]:
    if func._schema.name in _SILENT_ALIASES:
        return []
    returns = func._schema.returns
    values = result if len(returns) > 1 else (result,)
    return [
        tensor
        for declared, value in zip(returns, values, strict=False)
        if declared.alias_info is None
        for tensor in tensors_in(value)
    ]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element: what a new storage of this tensor takes."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


class _Call:
    """One call of a collective by its parameter names."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.group = arguments.get("group")
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group) if self.rank >= 0 else 0

    def bytes(self, name: str) -> int:
        return _bytes(self.arguments[name])

    def bytes_for_others(self, name: str) -> int:
        """Bytes of a list of tensors, one per rank, without this rank's."""
        tensors = self.arguments[name]
        return sum(_bytes(tensor) for peer, tensor in enumerate(tensors) if peer != self.rank)

    def is_root(self, end: str) -> bool:
        """Whether this rank is the `src` or `dst` of the call, given as a global or a group rank."""
        in_group = self.arguments.get(f"group_{end}")
        if in_group is not None:
            return bool(in_group == self.rank)
        return bool((self.arguments.get(end) or 0) == dist.get_rank())


def _all_to_all_single(call: _Call) -> int:
    tensor, sizes = call.arguments["input"], call.arguments.get("input_split_sizes")
    if not sizes:
        return _bytes(tensor) // call.size * (call.size - 1)
    row = _bytes(tensor) // max(tensor.size(0), 1)
    others = sum(size for peer, size in enumerate(sizes) if peer != call.rank)
    return int(row * others)


def _nothing(call: _Call) -> int:
    return 0


# Function of torch.distributed -> its leading parameters, and the rule for bytes_between_ranks.
_COLLECTIVES: dict[str, tuple[tuple[str, ...], Callable[[_Call], int]]] = {
    "all_to_all_single": (
        ("output", "input", "output_split_sizes", "input_split_sizes", "group"),
        _all_to_all_single,
    ),
    "all_to_all": (
        ("output_tensor_list", "input_tensor_list", "group"),
        lambda call: call.bytes_for_others("input_tensor_list"),
    ),
    "all_gather": (
        ("tensor_list", "tensor", "group"),
        lambda call: call.bytes("tensor") * (call.size - 1),
    ),
    "all_reduce": (
        ("tensor", "op", "group"),
        lambda call: 2 * call.bytes("tensor") * (call.size - 1) // call.size,
    ),
    "reduce_scatter": (
        ("output", "input_list", "op", "group"),
        lambda call: call.bytes_for_others("input_list"),
    ),
    "broadcast": (
        ("tensor", "src", "group", "async_op", "group_src"),
        lambda call: call.bytes("tensor") * (call.size - 1) if call.is_root("src") else 0,
    ),
    "reduce": (
        ("tensor", "dst", "op", "group", "async_op", "group_dst"),
        lambda call: 0 if call.is_root("dst") else call.bytes("tensor"),
    ),
    "gather": (
        ("tensor", "gather_list", "dst", "group", "async_op", "group_dst"),
        lambda call: 0 if call.is_root("dst") else call.bytes("tensor"),
    ),
    "scatter": (
        ("tensor", "scatter_list", "src", "group", "async_op", "group_src"),
        lambda call: call.bytes_for_others("scatter_list") if call.is_root("src") else 0,
    ),
    "barrier": (("group",), _nothing),
    "monitored_barrier": (("group",), _nothing),
    "all_gather_object": (("object_list", "obj", "group"), _nothing),
    "broadcast_object_list": (("object_list", "src", "group"), _nothing),
    "gather_object": (("obj", "object_gather_list", "dst", "group"), _nothing),
    "scatter_object_list": (
        ("scatter_object_output_list", "scatter_object_input_list", "src", "group"),
        _nothing,
    ),
}
# Newer names of the same calls are in some versions of torch only.
for _name in ("all_gather_into_tensor", "all_gather_single", "_all_gather_base"):
    _COLLECTIVES[_name] = (
        ("output_tensor", "input_tensor", "group"),
        lambda call: call.bytes("input_tensor") * (call.size - 1),
    )
for _name in ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"):
    _COLLECTIVES[_name] = (
        ("output", "input", "op", "group"),
        lambda call: call.bytes("input") // call.size * (call.size - 1),
    )
