"""A simulated MUSA device: device type "musa" in pure Python over CPU memory.

A `MusaTensor` has the metadata of a device tensor (device, sizes, strides, storage offset) and no memory;
its elements are in a CPU tensor, `raw`, of the same geometry. Views of a `MusaTensor` hold views of that
CPU tensor, so aliasing is the CPU's own. What the device forbids is forbidden here too: host and device
tensors do not mix in one operation, and while a transfer is in flight (`begin_flight`) its receive buffers
must not be touched and its send buffers must not be written.

Nothing here runs at the speed of a device, or asynchronously: only what may be done is simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from vllm_musa_headpar.testing.counters import arguments_of, syncs_host, tensors_in

DEVICE_COUNT = 8

# May take tensors of the host and of the device.
_CROSS_DEVICE = frozenset({"aten::copy_", "aten::_to_copy", "aten::set_data", "aten::_copy_from"})
# May take index tensors of the host.
_INDEXING = frozenset({"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})
# Take a tensor for its metadata only.
_METADATA_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like",
        "full_like",
        "ones_like",
        "zeros_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "_unsafe_view",
        "record_stream",
    )
)
# Factories that allocate an empty `out` and resize it, which a wrapper cannot follow.
_RESIZING_FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "logspace",
    "randperm",
    "randperm.generator",
    "tril_indices",
    "triu_indices",
)


class MCCLRuleError(RuntimeError):
    """A rule of MUSA or MCCL was broken. `rule` is its short name and is part of the message."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"rule '{rule}' broken: {what}")
        self.rule = rule


class HostSyncError(MCCLRuleError):
    """The host waited for the device inside `forbid_host_sync()`."""

    def __init__(self, what: str) -> None:
        super().__init__("no host sync", f"{what} makes the host wait for the device")


class MusaTensor(torch.Tensor):
    """A tensor on the simulated device. `raw` is the CPU tensor with its elements."""

    raw: torch.Tensor
    # Functions of torch see a plain tensor; only the operations below them are handled here.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor, device: torch.device) -> MusaTensor:
        wrapper: MusaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        wrapper.raw = raw
        return wrapper

    def __init__(self, raw: torch.Tensor, device: torch.device) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MusaTensor({self.raw!r}, device='{self.device}')"

    def data_ptr(self) -> int:
        """The address of the elements: as on a real device, they are in memory of the tensor's own."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        # torch refuses this for every subclass. One host sync: the list is then made from host memory.
        return torch._C.TensorBase.tolist(self.cpu())

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = raw_of(value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Under inference_mode composite operations come here whole; their parts are what the device runs.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        return _run(func, args, kwargs)


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor behind a tensor on the simulated device."""
    if not isinstance(tensor, MusaTensor):
        raise TypeError(f"expected a tensor on the simulated MUSA device, got one on {tensor.device}")
    return tensor.raw


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if _host_sync_forbidden and syncs_host(func, args, kwargs):
        raise HostSyncError(name)
    inputs = tensors_in([*args, *kwargs.values()])
    device = next(tensor.device for tensor in inputs if isinstance(tensor, MusaTensor))
    _check_devices(name, inputs, args)
    if not (func.is_view or name in _METADATA_ONLY):
        for value, written in arguments_of(func, args, kwargs):
            for tensor in tensors_in(value):
                if isinstance(tensor, MusaTensor):
                    check_access(tensor.raw, written, name)
    if name == "aten::_fused_sdp_choice":
        return 0  # the plain formula: fused attention kernels of the CPU know only CPU tensors

    raw_kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        device = _indexed(torch.device(kwargs["device"]))
        raw_kwargs["device"] = torch.device("cpu")
    raw_kwargs.pop("pin_memory", None)
    raw_args, raw_kwargs = pytree.tree_map_only(MusaTensor, lambda tensor: tensor.raw, (tuple(args), raw_kwargs))
    result = func(*raw_args, **raw_kwargs)
    _check_geometry(name, inputs)

    # In-place operations and `out=` return what they were given.
    given = {id(tensor.raw if isinstance(tensor, MusaTensor) else tensor): tensor for tensor in inputs}

    normal = not any(tensor.is_inference() for tensor in inputs)

    def wrap(raw: torch.Tensor) -> torch.Tensor:
        if id(raw) in given:
            return given[id(raw)]
        if device.type != "musa":
            return raw
        # Under inference_mode a view of a normal tensor is a normal tensor.
        with torch.inference_mode(torch.is_inference_mode_enabled() and not (func.is_view and normal)):
            return MusaTensor(raw, device)

    return pytree.tree_map_only(torch.Tensor, wrap, result)


def _check_devices(name: str, inputs: list[torch.Tensor], args: Sequence[Any]) -> None:
    if name in _CROSS_DEVICE:
        return
    if name in _INDEXING:
        indices = {id(tensor) for tensor in tensors_in(args[1])}
        inputs = [tensor for tensor in inputs if id(tensor) not in indices]
    devices = {str(tensor.device) for tensor in inputs if tensor.dim() > 0 or tensor.device.type != "cpu"}
    if len(devices) > 1:
        found = " and ".join(sorted(devices))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {found}! ({name})"
        )


def _check_geometry(name: str, inputs: list[torch.Tensor]) -> None:
    for tensor in inputs:
        if isinstance(tensor, MusaTensor) and (
            tensor.size() != tensor.raw.size() or tensor.stride() != tensor.raw.stride()
        ):
            raise NotImplementedError(f"the simulated MUSA device cannot resize a tensor in place ({name})")


# --- Host syncs --------------------------------------------------------------------------------------

_host_sync_forbidden = 0


@contextlib.contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Inside the block whatever makes the host wait for the device raises `HostSyncError`."""
    global _host_sync_forbidden
    _host_sync_forbidden += 1
    try:
        yield
    finally:
        _host_sync_forbidden -= 1


def host_sync(what: str) -> None:
    """Called by what blocks the host and is no tensor operation (barrier, synchronize)."""
    if _host_sync_forbidden:
        raise HostSyncError(what)


# --- Transfers in flight -----------------------------------------------------------------------------


class Flight:
    """CPU tensors that a transfer reads (`sends`) and writes (`receives`) until it is waited for."""

    def __init__(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        self.sends = tuple(sends)
        self.receives = tuple(receives)


_flights: list[Flight] = []


def begin_flight(sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Flight:
    """Put CPU tensors in flight: they stay alive, and guarded, until `end_flight`."""
    flight = Flight(sends, receives)
    _flights.append(flight)
    return flight


def end_flight(flight: Flight) -> None:
    """The transfer is complete for everything that the host issues from now on."""
    if flight in _flights:
        _flights.remove(flight)


def check_access(raw: torch.Tensor, write: bool, what: str) -> None:
    """Raise `MCCLRuleError` if reading or writing these elements breaks into a transfer in flight."""
    for flight in _flights:
        if any(overlap(raw, buffer) for buffer in flight.receives):
            raise MCCLRuleError("wait first", f"{what} touches a receive buffer before wait()")
        if write and any(overlap(raw, buffer) for buffer in flight.sends):
            raise MCCLRuleError("wait first", f"{what} writes to a send buffer before wait()")


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two CPU tensors share a byte, exactly, strides included."""
    if one.numel() == 0 or other.numel() == 0:
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one is other:
        return True
    with _disable_current_modes(), torch.inference_mode():
        (first, length), (second, width) = _runs(one), _runs(other)
        if first[0] >= second[-1] + width or second[0] >= first[-1] + length:
            return False
        # A run of `one` at a meets those runs of `other` that start inside (a - width, a + length).
        low = torch.searchsorted(second, first - width, right=True)
        high = torch.searchsorted(second, first + length, right=False)
        return bool((high > low).any())


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The bytes of a tensor as runs of equal length: sorted starts in its storage, and the length."""
    item = tensor.element_size()
    dims = sorted((step, size) for size, step in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)
    run = 1
    while dims and dims[0][0] <= run:
        # Steps smaller than the run (expanded or overlapping views) lengthen it without gaps as well.
        step, size = dims.pop(0)
        run += step * (size - 1)
    starts = torch.tensor([tensor.storage_offset()])
    for step, size in dims:
        starts = (starts[:, None] + torch.arange(size) * step).flatten()
    return starts.sort().values * item, run * item


# --- The device module and its registration ----------------------------------------------------------


class _MusaModule:
    """What `torch.musa` offers, as far as programs ask for it."""

    def __init__(self) -> None:
        self._current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICE_COUNT

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: int | str | torch.device) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._current = index or 0

    def synchronize(self, device: object = None) -> None:
        host_sync("synchronize")

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        # torch.manual_seed calls this; the elements come from the CPU's generator, which it seeds itself.
        pass

    def empty_cache(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_module = _MusaModule()
_library: Any = None  # unregisters its kernels when it goes


def _indexed(device: torch.device | str | None) -> torch.device:
    device = torch.device("musa" if device is None else device)
    if str(device) == "musa":  # without an index
        return torch.device("musa", _module.current_device())
    return device


def _factory(operator: Any) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = _indexed(kwargs.pop("device", None))
        kwargs.pop("pin_memory", None)
        return MusaTensor(operator(*args, **kwargs, device="cpu"), device)

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    # torch.tensor(..., device="musa") copies with the handling of subclasses switched off.
    elements = source.raw if isinstance(source, MusaTensor) else source
    (target.raw if isinstance(target, MusaTensor) else target).copy_(elements)
    return target


def install() -> None:
    """Make device type "musa" known to torch in this process. Calling it again changes nothing."""
    global _library
    if _library is not None:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise RuntimeError(
            f"the simulated MUSA device needs a torch that takes devices in Python (2.13 does), got {torch.__version__}"
        ) from error

    _setup_privateuseone_for_python_backend("musa", backend_module=_module)
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("empty.memory_format", "empty_strided", *_RESIZING_FACTORIES):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _library.impl(name, _factory(operator), "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
