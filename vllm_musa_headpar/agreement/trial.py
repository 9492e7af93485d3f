"""Trials: a host's function of unknown body that only moves data, compared with its replacement layout by layout.

What an exchange moves depends on the layout alone, and every rank sees that alike. So the first call of each group
and layout runs both, and the ranks agree in one small all-reduce whether the results are the same on all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import config
from ..errors import ExchangeError
from ..log import warn_once

Function = Callable[..., Any]


class Trial:
    """How a replacement of one function has done so far.

    Attributes:
        name: the patch record's.
        layouts: how many layouts it has proven to be right for, all groups together.
        gave_way: why the host's own function is used on a group; empty where it is used on none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.layouts = 0
        self.gave_way = ""
        # Per group: the ranks of one group have all seen the same calls, those of another have not.
        self._proven: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()
        self._lost: weakref.WeakSet[Any] = weakref.WeakSet()
        running.add(self)

    def call(self, group: Any, layout: Hashable, ours: Function, stock: Function, given: Mapping[str, Any]) -> Any:
        """Call `ours` where it has proven right for the layout, `stock` where it gave way on this group; else try it.

        Args:
            group: the process group that both exchange on.
            layout: all that the exchange depends on, the same on every rank.
            given: the arguments, by name.

        What `ours` raises is a difference like any other, as long as `stock` then takes the same arguments.

        Raises:
            ExchangeError: strict mode, and the results differ; or what the check of all ranks found before.
        """
        try:
            proven = self._proven[group]
        except KeyError:
            proven = self._proven[group] = set()
        if layout in proven:
            return ours(**given)
        if group in self._lost:
            return stock(**given)
        result, expected, reason = None, None, None
        try:
            result = ours(**given)  # first: it leaves its input alone, which is not known of the other
        except ExchangeError:
            raise  # the ranks do not do the same thing: no function could
        except Exception as error:
            reason = f"it refuses what the host's own takes: {type(error).__name__}: {error}"
        expected = stock(**given)
        reason = reason or _told_difference(result, expected)
        if self._same_on_all(group, _device_of(expected), reason is None):
            proven.add(layout)
            self.layouts += 1
            return result
        self._lost.add(group)
        self.gave_way = f"{reason or 'another rank found a difference'} (for {layout})"
        told = f"{self.name} gave way to the host's own function on a group: {self.gave_way}"
        if config.read().strict:
            raise ExchangeError(told)
        warn_once(told)
        return expected

    def _same_on_all(self, group: Any, device: torch.device, same: bool) -> bool:
        flag = torch.tensor([int(same)], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())


running: weakref.WeakSet[Trial] = weakref.WeakSet()


def _told_difference(found: Any, expected: Any) -> str | None:
    """The difference; also that there was none to be found out, since the other ranks wait for what this one says."""
    try:
        return difference(found, expected)
    except Exception as error:  # memory, say
        return f"the results could not be compared: {type(error).__name__}: {error}"


def difference(found: Any, expected: Any) -> str | None:
    """How one function's result differs from another's: type, shape, element type, strides, memory, bits."""
    if type(found) is not type(expected):
        return f"a {type(expected).__name__} is expected, it gives a {type(found).__name__}"
    if isinstance(found, Tensor):
        return _tensor_difference(found, expected)
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, Tensor) for one in (*found, *expected)):
        return f"a {type(expected).__name__} of something else than tensors cannot be compared"
    if len(found) != len(expected):
        return f"{len(expected)} tensors are expected, it gives {len(found)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        reason = _tensor_difference(one, other)
        if reason is None and one.numel() and _distance(one, found[0]) != _distance(other, expected[0]):
            reason = "the tensors lie in memory in another way"
        if reason is not None:
            return f"tensor {number}: {reason}"
    return None


def _tensor_difference(found: Tensor, expected: Tensor) -> str | None:
    for name in ("shape", "dtype", "device"):
        one, other = getattr(found, name), getattr(expected, name)
        if one != other:
            one, other = (list(one), list(other)) if name == "shape" else (one, other)
            return f"{name} {other} is expected, it gives {one}"
    if not found.numel():
        return None
    steps = [_steps(tensor) for tensor in (found, expected)]
    if steps[0] != steps[1]:
        return f"strides {list(expected.stride())} are expected, it gives {list(found.stride())}"
    return None if torch.equal(_bytes(found), _bytes(expected)) else "the elements differ"


def _steps(tensor: Tensor) -> list[int]:
    """The strides that matter."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _distance(tensor: Tensor, first: Tensor) -> int:
    """Bytes from one tensor's memory to another's: the same wherever both are views of one buffer."""
    return tensor.data_ptr() - first.data_ptr()


def _device_of(result: Any) -> torch.device:
    device: torch.device = (result if isinstance(result, Tensor) else result[0]).device
    return device
