"""Name -> implementation, selected by the group's backend for the tensor's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .config import AUTO
from .implementations import Implementation, Together, p2p, reference, shared

# Why an implementation must not be used on a group, or None: (group, device, backend) -> reason
Unusable = Callable[[Any, torch.device, str], "str | None"]


@dataclass(frozen=True)
class Registration:
    """One implementation and the backends that it claims."""

    name: str
    implementation: Implementation
    backends: frozenset[str] = frozenset()
    priority: int = 0
    unusable: Unusable | None = None
    together: Together | None = None


_registrations: dict[str, Registration] = {}


def register_head_parallel_exchange(
    name: str,
    implementation: Implementation,
    *,
    backends: Iterable[str],
    priority: int = 0,
    unusable: Unusable | None = None,
    together: Together | None = None,
) -> None:
    """Make an exchange implementation known.

    Args:
        name: as in `VLLM_MUSA_HEADPAR_EXCHANGE`, where capitals do not matter.
        implementation: `(Exchange, ProcessGroup) -> Pending`.
        backends: names of the communication backends that it claims, "mccl" for example; may be empty.
        priority: the highest one that claims a backend is selected there, ties by name.
        unusable: asked at the first exchange of a group with the group, the tensors' device and the backend;
            a sentence why the implementation must not be used there, or None.
        together: `(Exchanges, ProcessGroup) -> Pending`, several exchanges in one launch, if it can.

    Raises:
        TypeError, ValueError: an argument is not of these kinds, or the name is taken by another object.
            The same name with the same object again changes nothing.
    """
    if not isinstance(name, str) or not name.strip() or name.strip().lower() == AUTO:
        raise ValueError(f"an exchange's name must be a non-empty string other than {AUTO!r}, got {name!r}")
    if not callable(implementation):
        raise TypeError(f"the exchange {name!r} must be callable as (Exchange, group), got {implementation!r}")
    if unusable is not None and not callable(unusable):
        raise TypeError(f"unusable must be callable as (group, device, backend) or None, got {unusable!r}")
    if together is not None and not callable(together):
        raise TypeError(f"together must be callable as (Exchanges, group) or None, got {together!r}")
    if isinstance(backends, str):
        raise TypeError(f"backends must be an iterable of names, got the string {backends!r}")
    claimed = frozenset(backends)
    if not all(isinstance(backend, str) for backend in claimed):
        raise TypeError(f"backends must be names, got {sorted(map(repr, claimed))}")
    if not isinstance(priority, int):
        raise TypeError(f"priority must be an int, got {priority!r}")
    taken = _registrations.get(name)
    if taken is not None:
        if taken.implementation is not implementation:
            raise ValueError(f"the exchange {name!r} is already registered as {taken.implementation!r}")
        return
    _registrations[name] = Registration(
        name,
        implementation,
        frozenset(map(str.lower, claimed)),
        priority,
        unusable,
        together,
    )


def registered() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_registrations))


def find(name: str) -> Registration | None:
    """The implementation of a name: spelled exactly so first, else whatever its capitals; None if there is none."""
    alike = (known for known in registered() if known.lower() == name.lower())
    return _registrations.get(name) or _registrations.get(next(alike, ""))


def claimed_backends() -> frozenset[str]:
    """All backends that an implementation claims."""
    return frozenset().union(*(registration.backends for registration in _registrations.values()))


def claim(backend: str | None) -> Registration | None:
    """Which implementation claims a backend: the highest priority, ties by name. None if none does."""
    claims = [registration for registration in _registrations.values() if backend in registration.backends]
    return min(claims, key=lambda registration: (-registration.priority, registration.name), default=None)


def select(backend: str | None, exchange: str = AUTO) -> Registration:
    """The implementation for a backend: a known name first, then the claims, then the reference.

    An unknown backend (None) gets the reference whatever was asked for.
    """
    if backend is None:
        return REFERENCE
    return find(exchange) or claim(backend) or REFERENCE


def backend_of(group: Any, device: torch.device) -> str | None:
    """Name of the backend that a group uses for a device; None if that cannot be found out.

    Raises:
        ValueError: the tensor is on the CPU, and the group has backends for other devices only.

    By name, not by class: `TORCH_DISTRIBUTED_DEBUG=DETAIL` wraps groups, and one group can have several
    backends, "cpu:gloo,musa:mccl" for example.
    """
    names = _backends(group)
    if names is None:
        return None
    if device.type == "cpu" and not names.keys() & {"cpu", ""}:
        raise ValueError(f"expected a tensor on a device that the group has a backend for, {names}, got {device}")
    # Under torchada "cuda" means MUSA.
    return names.get(device.type) or names.get("") or (names.get("cuda") if device.type == "musa" else None)


def device_types(group: Any) -> tuple[str, ...]:
    """The device types that a group has backends for, as far as that can be found out."""
    return tuple(filter(None, _backends(group) or {}))


def _backends(group: Any) -> dict[str, str] | None:
    """Device type -> backend; "" for one that is for all. None if that cannot be found out."""
    try:
        config = dist.get_backend_config(group)
    except Exception:
        return None
    names: dict[str, str] = {}
    for entry in config.lower().split(","):
        name, _, backend = entry.strip().rpartition(":")
        names[name] = backend
    return names


def exchange_for(group: Any, device: torch.device, exchange: str = AUTO) -> str:
    """Name of the implementation that a group would get for tensors on a device, before the ranks settle."""
    return select(backend_of(group, device), exchange).name


register_head_parallel_exchange(reference.NAME, reference.all_to_all, backends=())
register_head_parallel_exchange(
    p2p.NAME,
    p2p.p2p,
    backends=("mccl",),
    priority=10,
    unusable=p2p.unusable,
    together=p2p.together,
)
register_head_parallel_exchange(
    shared.NAME, shared.shared, backends=(), unusable=shared.unusable, together=shared.together
)
REFERENCE = _registrations[reference.NAME]
