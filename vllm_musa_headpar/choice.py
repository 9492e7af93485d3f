"""Which implementation an exchange goes through by its size, from what was measured.

All ranks must choose alike without asking each other, so a choice depends on what they all know: the direction and
the mean bytes per message, which follow from the layout alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from . import config, profiles, registry
from .registry import Registration


class BySize:
    """An implementation for each direction and size.

    Args:
        steps: by direction, what to use from which mean bytes per message on; the first of them from 0.
        name: what to call it: of the profile, or empty for a limit of the named implementation's own.
    """

    def __init__(self, steps: Mapping[str, tuple[tuple[float, Registration], ...]], name: str = "") -> None:
        self.name = name
        self._steps = dict(steps)
        self._starts = {direction: [start for start, _ in found[1:]] for direction, found in steps.items()}
        self._used = {direction: [used for _, used in found] for direction, found in steps.items()}

    def at(self, direction: str, mean_bytes: float) -> Registration:
        """For one direction and size."""
        return self._used[direction][bisect_right(self._starts[direction], mean_bytes)]

    def registrations(self) -> list[Registration]:
        """All that may be used, each once."""
        return list(dict.fromkeys(used for found in self._used.values() for used in found))

    def without(self, names: Iterable[str]) -> BySize:
        """The reference in the place of some."""
        refused = set(names)
        return BySize(
            {
                direction: tuple((start, registry.REFERENCE if used.name in refused else used) for start, used in found)
                for direction, found in self._steps.items()
            },
            self.name,
        )

    def __str__(self) -> str:
        told = ", ".join(f"{direction} {_told(found)}" for direction, found in self._steps.items())
        return f"by {self.name}: {told}" if self.name else told


def _told(steps: Iterable[tuple[float, Registration]]) -> str:
    return " then ".join(f"{used.name}{f' from {size(start)}' if start else ''}" for start, used in steps)


def size(number: float) -> str:
    """Bytes in words."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{_digits(number / unit)} {name}"
    return f"{_digits(number)} B"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True)
class Followed:
    """What comes of a profile on this rank for one group.

    Attributes:
        by_size: None where the profile has no measurement that fits the group, or there is no profile.
        digest: must be the same on all ranks; None where no profile was asked for.
        problem: why the profile cannot be used here.
    """

    by_size: BySize | None = None
    digest: str | None = None
    problem: str | None = None

    def registrations(self) -> list[Registration]:
        """All that may be used by it."""
        return [] if self.by_size is None else self.by_size.registrations()


def asked(settings: config.Settings, exchange: str) -> bool:
    """Whether a profile is to decide: one is given, and no implementation is asked for by name."""
    return settings.profile is not None and exchange == config.AUTO


def follow(path: str, fallback: Registration, backend: str, device: torch.device, ranks: int) -> Followed:
    """What a profile says for a group.

    Args:
        fallback: for a direction that was not measured.
    """
    profile = read(path)
    if isinstance(profile, str):
        return Followed(digest="unusable", problem=profile)
    measured = profile.measurement(backend, device_name(device), ranks)
    digest = f"{profile.digest[:16]} for {backend} on {device_name(device)}"
    if measured is None:
        return Followed(digest=digest)
    by_direction = {
        direction: tuple((step.start, registry.find(step.exchange) or fallback) for step in measured.steps(direction))
        or ((0.0, fallback),)
        for direction in profiles.DIRECTIONS
    }
    return Followed(BySize(by_direction, f"profile {profile.name}"), digest)


def read(path: str) -> profiles.Profile | str:
    """The profile of a file, whose implementations are all registered here; or why it cannot be used."""
    profile = profiles.once(path)
    if isinstance(profile, str):
        return profile
    unknown = [name for name in profiles.every_exchange(profile) if registry.find(name) is None]
    if unknown:
        known = ", ".join(registry.registered())
        return f"{path} names the exchange {unknown[0]!r}, which is not registered here: expected one of {known}"
    return profile


def limit(registration: Registration, backend: str | None, device: torch.device, ranks: int) -> BySize | None:
    """Where the reference is faster than an implementation that was chosen by name or claim, as far as the package
    itself knows; None if it knows of none.
    """
    if registration is registry.REFERENCE or backend is None:
        return None
    shipped = profiles.once(str(profiles.SHIPPED))
    if isinstance(shipped, str):
        return None
    measured = shipped.measurement(backend, device_name(device), ranks)
    if measured is None or registration.name not in measured.exchanges:
        return None
    reference = registry.REFERENCE
    return BySize(
        {
            direction: tuple(
                (step.start, reference if step.exchange == reference.name else registration)
                for step in measured.steps(direction)
            )
            for direction in profiles.DIRECTIONS
        }
    )


# MAGI-2's request of 10 s at 272p, packed: tokens of all ranks, bytes of one token's activations in bfloat16.
MAGI2_TOKENS, MAGI2_TOKEN_BYTES = 29_616, 3072 * 2
# What each exchange moves of these; queries, keys and values go together.
MAGI2_EXCHANGES = (
    ("MoE", "dispatch", 1),
    ("MoE", "return", 1),
    ("attention", "dispatch", 3),
    ("attention", "return", 1),
)


def for_magi2(measured: profiles.Measurement) -> str:
    """What a measurement says for MAGI-2's exchanges, in words."""
    ranks = measured.ranks or 8
    told = []
    for part, direction, tensors in MAGI2_EXCHANGES:
        mean = tensors * MAGI2_TOKENS * MAGI2_TOKEN_BYTES / ranks**2
        used = [step.exchange for step in measured.steps(direction) if step.start <= mean]
        told.append(f"{part} {direction} ({size(mean)} per message) {used[-1] if used else 'not measured'}")
    return f"{ranks} ranks, {measured.backend} on {measured.device}: {', '.join(told)}"


def device_name(device: torch.device) -> str:
    """Name of a device as torch has it, "MTT S5000" for example; the type of one that has none, "cpu"."""
    if device.type == "cpu":
        return "cpu"
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except (AttributeError, RuntimeError):
        return device.type
