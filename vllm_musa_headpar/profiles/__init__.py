"""Profiles: which implementation was measured to be the fastest, on what, at which message sizes. No torch here.

A profile is a JSON file that `vllm-musa-headpar tune` writes and `VLLM_MUSA_HEADPAR_PROFILE` names. It comes from
outside and decides what a server does, so it is read strictly: what is not exactly as written here is refused, in a
sentence that says where.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

FORMAT = 1
DIRECTIONS = ("dispatch", "return")
MAX_FILE_BYTES = 1 << 20  # a measurement of two directions at nine sizes with six implementations has 20 KB
_MAX_NUMBER = 1 << 50
_MAX_TEXT = 200

# What the package itself knows from measurements, docs/performance.md: on Gloo, small messages are slower by p2p.
SHIPPED = Path(__file__).with_name("shipped.json")


class ProfileError(ValueError):
    """A file is no profile; the message is one sentence that names it."""


@dataclass(frozen=True)
class Times:
    """Milliseconds on the slowest rank, over the rounds: the median, the 10th and the 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float


@dataclass(frozen=True)
class Point:
    """The implementation to use for one direction at one size.

    Attributes:
        direction: "dispatch" or "return".
        bytes: of one message, in the mean over all pairs of ranks.
        exchange: the implementation's name.
        times: by implementation; may be empty.
    """

    direction: str
    bytes: int
    exchange: str
    times: Mapping[str, Times]


@dataclass(frozen=True)
class Step:
    """An implementation, and the mean bytes per message from which on it is used."""

    start: float
    exchange: str


@dataclass(frozen=True)
class Measurement:
    """What was measured in one world.

    Attributes:
        package: version of this package.
        torch: version of torch.
        backend: of the groups, "mccl" for example.
        device: name of the device as torch has it; "cpu".
        ranks: in the world; None for any number of them.
        machines: that the ranks were on.
        date: day of the measurement.
        exchanges: the implementations that were compared.
        points: no two of the same direction and size.
    """

    package: str
    torch: str
    backend: str
    device: str
    ranks: int | None
    machines: int
    date: str
    exchanges: tuple[str, ...]
    points: tuple[Point, ...]

    def world(self) -> tuple[str, str, int | None]:
        """What an exchange must have in common with the measurement."""
        return self.backend, self.device, self.ranks

    def steps(self, direction: str) -> tuple[Step, ...]:
        """What to use from which size on: of the nearest point in log scale, so a step lies midway between two points.

        Empty where the direction was not measured, else the first step is from 0 bytes on.
        """
        points = sorted((point for point in self.points if point.direction == direction), key=lambda point: point.bytes)
        steps: list[Step] = []
        for number, point in enumerate(points):
            if not steps or steps[-1].exchange != point.exchange:
                start = math.sqrt(points[number - 1].bytes * point.bytes) if number else 0.0
                steps.append(Step(start, point.exchange))
        return tuple(steps)


@dataclass(frozen=True)
class Profile:
    """A profile as it was read.

    Attributes:
        name: of the file, without its folder.
        digest: of the file's bytes, in hexadecimal.
        measurements: no two of the same world.
    """

    name: str
    digest: str
    measurements: tuple[Measurement, ...]

    def measurement(self, backend: str, device: str, ranks: int) -> Measurement | None:
        """The measurement that fits a group; None if there is none."""
        by_world = {measurement.world(): measurement for measurement in self.measurements}
        return by_world.get((backend, device, ranks)) or by_world.get((backend, device, None))


@lru_cache(maxsize=8)
def once(path: str) -> Profile | str:
    """The profile of a file, or why there is none. Read once in a process: a file that changes must not make one group
    of a server decide otherwise than another.
    """
    try:
        return load(path)
    except ProfileError as error:
        return str(error)


def load(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: the file cannot be read, or is no profile.
    """
    data = _read(Path(path))
    try:
        tree = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        measurements = _Reader().profile(tree)
    except _WrongError as error:
        raise ProfileError(f"{path} is no profile: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is no profile: it is not JSON in UTF-8 ({error})") from None
    return Profile(Path(path).name, hashlib.sha256(data).hexdigest(), measurements)


def dump(measurements: tuple[Measurement, ...]) -> str:
    """The text of a profile."""
    return json.dumps({"format": FORMAT, "measurements": [asdict(one) for one in measurements]}, indent=1) + "\n"


def merged(measurement: Measurement, others: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    """`others` with a new measurement in the place of the one of the same world."""
    return (*(other for other in others if other.world() != measurement.world()), measurement)


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise ProfileError(f"{path} is {kind}: expected a profile, a JSON file that `tune --out` writes")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"the profile {str(path)!r} cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ProfileError(f"{path} is no profile: it has {status.st_size} bytes, expected at most {MAX_FILE_BYTES}")
    return data


class _WrongError(ValueError):
    """What is wrong, and where in the file."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _WrongError(f"the field {_shown(twice)} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _WrongError(f"{name} is no number here")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class _Reader:
    """Goes through the tree that JSON gave; `where` is the place in it."""

    def profile(self, tree: Any) -> tuple[Measurement, ...]:
        if isinstance(tree, dict) and tree.get("format") != FORMAT:
            self._wrong("format", tree.get("format"), f"{FORMAT}, the version that this package reads")
        found = self._fields("the file", tree, {"format": self._whole, "measurements": self._list})
        measurements = tuple(
            self._measurement(f"measurements[{number}]", entry) for number, entry in enumerate(found["measurements"])
        )
        self._unique("measurements", [measurement.world() for measurement in measurements])
        return measurements

    def _measurement(self, where: str, tree: Any) -> Measurement:
        text, whole = self._text, self._whole
        found = self._fields(
            where,
            tree,
            {
                "package": text,
                "torch": text,
                "backend": text,
                "device": text,
                "ranks": lambda where, value: None if value is None else whole(where, value),
                "machines": whole,
                "date": text,
                "exchanges": self._list,
                "points": self._list,
            },
        )
        exchanges = tuple(
            text(f"{where}.exchanges[{number}]", name) for number, name in enumerate(found.pop("exchanges"))
        )
        points = tuple(
            self._point(f"{where}.points[{number}]", entry, exchanges)
            for number, entry in enumerate(found.pop("points"))
        )
        self._unique(f"{where}.points", [(point.direction, point.bytes) for point in points])
        return Measurement(**found, exchanges=exchanges, points=points)

    def _point(self, where: str, tree: Any, exchanges: tuple[str, ...]) -> Point:
        found = self._fields(
            where,
            tree,
            {"direction": self._text, "bytes": self._whole, "exchange": self._text, "times": self._times},
        )
        if found["direction"] not in DIRECTIONS:
            self._wrong(f"{where}.direction", found["direction"], " or ".join(DIRECTIONS))
        for name in (found["exchange"], *found["times"]):
            if name not in exchanges:
                self._wrong(where, name, f"one of the exchanges that were compared, {', '.join(exchanges)}")
        return Point(**found)

    def _times(self, where: str, tree: Any) -> Mapping[str, Times]:
        if not isinstance(tree, dict):
            self._wrong(where, tree, "an object of times by implementation")
        fields = dict.fromkeys(Times.__dataclass_fields__, self._time)
        return {name: Times(**self._fields(f"{where}.{_shown(name)}", entry, fields)) for name, entry in tree.items()}

    def _fields(self, where: str, tree: Any, readers: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
        """Exactly these fields, each read."""
        if not isinstance(tree, dict):
            self._wrong(where, tree, f"an object with the fields {', '.join(readers)}")
        for name in tree:
            if name not in readers:
                raise _WrongError(f"{where} has an unknown field {_shown(name)}: expected {', '.join(readers)}")
        for name in readers:
            if name not in tree:
                raise _WrongError(f"{where} lacks the field {name!r}")
        return {name: read(f"{where}.{name}", tree[name]) for name, read in readers.items()}

    def _text(self, where: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > _MAX_TEXT:
            self._wrong(where, value, f"a text of 1 to {_MAX_TEXT} characters")
        return str(value)

    def _whole(self, where: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= _MAX_NUMBER:
            self._wrong(where, value, "a whole number above 0")
        return int(value)

    def _time(self, where: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value <= _MAX_NUMBER:
            self._wrong(where, value, "milliseconds, not negative")
        return float(value)

    def _list(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            self._wrong(where, value, "a list")
        return list(value)

    def _unique(self, where: str, keys: list[Any]) -> None:
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise _WrongError(f"{where}[{number}] is for {key}, and so is one before it")

    def _wrong(self, where: str, value: Any, expected: str) -> NoReturn:
        raise _WrongError(f"{where} is {_shown(value)}, expected {expected}")


def every_exchange(profile: Profile) -> Iterator[str]:
    """The names of all implementations that a profile selects, each once."""
    yield from dict.fromkeys(point.exchange for one in profile.measurements for point in one.points)
