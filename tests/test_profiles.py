"""Profiles: read strictly, looked up alike on all ranks, followed by `auto`, and left when ranks differ."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool, environment, process_group

from vllm_musa_headpar import (
    HeadParallelLayout,
    agreement,
    choice,
    config,
    diagnosis,
    log,
    plugin,
    profiles,
    registry,
    scatter_heads_gather_tokens,
    scatter_tokens_gather_heads,
)
from vllm_musa_headpar.config import CHECK, EXCHANGE, FLAG, PROFILE
from vllm_musa_headpar.testing.counters import counting

pytestmark = pytest.mark.cpu

KIB = 1024


def measurement(points: list[tuple[str, int, str]], **changed: Any) -> dict[str, Any]:
    """A measurement as a file has it, of `(direction, bytes, exchange)`."""
    plain = {
        "package": "0.1.0",
        "torch": "2.13.0",
        "backend": "gloo",
        "device": "cpu",
        "ranks": 2,
        "machines": 1,
        "date": "2026-12-01",
        "exchanges": ["all_to_all", "p2p"],
        "points": [
            {"direction": direction, "bytes": size, "exchange": exchange, "times": {}}
            for direction, size, exchange in points
        ],
    }
    return {**plain, **changed}


SMALL_AND_LARGE = [("dispatch", 4 * KIB, "all_to_all"), ("dispatch", 16 * KIB, "p2p"), ("return", KIB, "p2p")]


def write(path: Path, *measurements: dict[str, Any], **changed: Any) -> str:
    path.write_text(json.dumps({"format": 1, "measurements": list(measurements), **changed}), encoding="utf-8")
    return str(path)


# --- The file -------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    times = {"p2p": {"median_ms": 1.5, "p10_ms": 1, "p90_ms": 2.0}}
    entry = measurement(SMALL_AND_LARGE)
    entry["points"][0]["times"] = times
    other = measurement([], ranks=None)
    profile = profiles.load(write(tmp_path / "p.json", entry, other))
    again = tmp_path / "again.json"
    again.write_text(profiles.dump(profile.measurements), encoding="utf-8")
    assert profiles.load(again).measurements == profile.measurements
    assert profile.name == "p.json"
    assert profile.measurement("gloo", "cpu", 2) == profile.measurements[0]
    assert profile.measurement("gloo", "cpu", 3) == profile.measurements[1], "any number of ranks"
    assert profile.measurement("mccl", "cpu", 2) is None
    assert profile.measurement("gloo", "MTT S5000", 2) is None
    assert profile.measurements[0].points[0].times == {"p2p": profiles.Times(1.5, 1.0, 2.0)}
    new = profiles.load(write(tmp_path / "new.json", measurement([("return", 5, "p2p")]))).measurements[0]
    assert profiles.merged(new, profile.measurements) == (profile.measurements[1], new)


def test_the_nearest_point_in_log_scale() -> None:
    entry = measurement([("dispatch", 100, "p2p"), ("dispatch", 10_000, "all_to_all"), ("dispatch", 40_000, "p2p")])
    entry["points"].reverse()  # their order in the file means nothing
    (found,) = profiles._Reader().profile({"format": 1, "measurements": [entry]})
    assert found.steps("dispatch") == (
        profiles.Step(0.0, "p2p"),
        profiles.Step(1000.0, "all_to_all"),
        profiles.Step(20_000.0, "p2p"),
    )
    assert found.steps("return") == ()


def test_the_shipped_profile_is_one() -> None:
    shipped = profiles.load(profiles.SHIPPED)
    assert [one.world() for one in shipped.measurements] == [("gloo", "cpu", None)]
    assert shipped.measurements[0].steps("return")[1] == profiles.Step(256.0 * KIB, "p2p")


def changed(**fields: Any) -> Callable[[], Any]:
    return lambda: {**measurement(SMALL_AND_LARGE), **fields}


def point(**fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        entry = measurement(SMALL_AND_LARGE)
        entry["points"][1].update(fields)
        return entry

    return make


def lacking(field: str) -> Callable[[], Any]:
    def make() -> Any:
        entry = measurement(SMALL_AND_LARGE)
        del entry[field]
        return entry

    return make


WRONG: list[tuple[Callable[[], Any], str]] = [
    (changed(colour="red"), "measurements[0] has an unknown field 'colour': expected package, torch, backend"),
    (lacking("date"), "measurements[0] lacks the field 'date'"),
    (changed(ranks=0), "measurements[0].ranks is 0, expected a whole number above 0"),
    (changed(ranks=True), "measurements[0].ranks is True"),
    (changed(ranks=2.0), "measurements[0].ranks is 2.0"),
    (changed(machines=-1), "measurements[0].machines is -1"),
    (changed(backend=""), "measurements[0].backend is '', expected a text"),
    (changed(device="x" * 300), "measurements[0].device is 'xxx"),
    (changed(exchanges="p2p"), "measurements[0].exchanges is 'p2p', expected a list"),
    (changed(points={}), "measurements[0].points is {}, expected a list"),
    (changed(points=[None]), "measurements[0].points[0] is None, expected an object with the fields direction"),
    (lambda: [], "measurements[0] is [], expected an object"),
    (point(bytes=-4096), "measurements[0].points[1].bytes is -4096, expected a whole number above 0"),
    (point(bytes=0), "points[1].bytes is 0"),
    (point(bytes=10**40), "points[1].bytes is 1000"),
    (point(bytes="4096"), "points[1].bytes is '4096'"),
    (point(direction="up"), "measurements[0].points[1].direction is 'up', expected dispatch or return"),
    (point(direction=["return"]), "points[1].direction is ['return']"),
    (point(exchange="fast"), "points[1] is 'fast', expected one of the exchanges that were compared, all_to_all, p2p"),
    (point(bytes=4 * KIB), "points[1] is for ('dispatch', 4096), and so is one before it"),
    (point(times=[]), "points[1].times is []"),
    (point(times={"p2p": {"median_ms": 1}}), "points[1].times.'p2p' lacks the field 'p10_ms'"),
    (point(times={"p2p": {"median_ms": -1, "p10_ms": 0, "p90_ms": 0}}), "median_ms is -1, expected milliseconds"),
    (point(times={"p2p": {"median_ms": float("nan"), "p10_ms": 0, "p90_ms": 0}}), "NaN is no number here"),
]


@pytest.mark.parametrize(("make", "told"), WRONG)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, make: Callable[[], Any], told: str) -> None:
    path = write(tmp_path / "wrong.json", make())
    with pytest.raises(profiles.ProfileError) as raised:
        profiles.load(path)
    assert told in str(raised.value)
    assert str(raised.value).startswith(f"{path} is no profile: ")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(path) + 400
    assert profiles.once(path) == str(raised.value)


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    def said(path: Path | str) -> str:
        with pytest.raises(profiles.ProfileError) as raised:
            profiles.load(path)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def text(data: bytes) -> str:
        path = tmp_path / "file.json"
        path.write_bytes(data)
        return said(path)

    assert "No such file" in said(tmp_path / "none.json")
    assert said(tmp_path) == f"{tmp_path} is a directory: expected a profile, a JSON file that `tune --out` writes"
    assert "is no regular file" in said("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in said(tmp_path / "pipe")
    assert "cannot be read" in said("a\0b")
    assert "cannot be read" in said("x" * 5000)
    assert "it has 10000000 bytes, expected at most 1048576" in text(b" " * 10_000_000)
    assert "it is not JSON in UTF-8" in text(b"")
    assert "it is not JSON in UTF-8" in text(b"\xff\xfe")
    assert "it is not JSON in UTF-8" in text(b"[" * 100_000)
    assert "it is not JSON in UTF-8" in text(b'{"format": 1' + b"0" * 10_000 + b"}")
    assert "the file is [], expected an object with the fields format, measurements" in text(b"[]")
    assert "format is 2, expected 1, the version that this package reads" in text(b'{"format": 2, "new": 0}')
    assert "format is None" in text(b"{}")
    assert "format is True" in text(b'{"format": true, "measurements": []}')
    assert "the field 'format' is there twice" in text(b'{"format": 1, "format": 1, "measurements": []}')
    twice = measurement([])
    assert "measurements[1] is for ('gloo', 'cpu', 2), and so is one before it" in said(
        write(tmp_path / "twice.json", twice, twice)
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_no_value_in_any_place_is_more_than_a_sentence(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whatever JSON stands in whatever place: a profile, or one sentence."""
    tree: Any = {"format": 1, "measurements": [measurement(SMALL_AND_LARGE)]}
    place = tree
    while True:
        key = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    read = profiles.once.__wrapped__(str(path))
    assert isinstance(read, profiles.Profile) or "\n" not in read


# --- The choice -----------------------------------------------------------------------------------------


def test_a_choice_by_size(tmp_path: Path) -> None:
    p2p, reference = registry.find("p2p"), registry.REFERENCE
    assert p2p is not None
    path, cpu = write(tmp_path / "p.json", measurement(SMALL_AND_LARGE)), torch.device("cpu")
    followed = choice.follow(path, reference, "gloo", cpu, 2)
    assert followed.problem is None
    by_size = followed.by_size
    assert by_size is not None
    assert [by_size.at("dispatch", size) for size in (0, 8 * KIB - 0.5, 8 * KIB, 1e12)] == [reference] * 2 + [p2p] * 2
    assert by_size.at("return", 1) is p2p
    assert str(by_size) == "by profile p.json: dispatch all_to_all then p2p from 8 KiB, return p2p"
    assert by_size.without(["p2p"]).registrations() == [reference]
    assert choice.follow(path, p2p, "gloo", cpu, 3).by_size is None, "measured with another number of ranks"
    assert choice.follow(path, p2p, "mccl", cpu, 2).by_size is None
    assert choice.follow(path, p2p, "gloo", cpu, 3).digest is not None, "the ranks still compare their files"
    one_way = write(tmp_path / "one.json", measurement([("return", KIB, "all_to_all")]))
    by_size = choice.follow(one_way, p2p, "gloo", cpu, 2).by_size
    assert by_size is not None
    assert by_size.at("dispatch", KIB) is p2p, "not measured: the claims"
    other = write(tmp_path / "other.json", measurement([("return", KIB, "fast")], exchanges=["fast"]))
    problem = choice.follow(other, p2p, "gloo", cpu, 2).problem
    assert problem == f"{other} names the exchange 'fast', which is not registered here: expected one of " + ", ".join(
        registry.registered()
    )


def test_the_limit_of_a_named_implementation() -> None:
    p2p, cpu = registry.find("p2p"), torch.device("cpu")
    assert p2p is not None
    limit = choice.limit(p2p, "gloo", cpu, 7)
    assert limit is not None
    assert [limit.at("dispatch", size).name for size in (256 * KIB - 1, 256 * KIB)] == ["all_to_all", "p2p"]
    assert choice.limit(p2p, "mccl", cpu, 7) is None
    assert choice.limit(registry.REFERENCE, "gloo", cpu, 7) is None
    third = registry.Registration("third", p2p.implementation)
    assert choice.limit(third, "gloo", cpu, 7) is None, "nothing is known of it"


# --- Between ranks --------------------------------------------------------------------------------------


class Said:
    """What this process's logger says meanwhile."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        log.forget()
        self._patch = mock.patch.multiple(
            log.logger,
            info=lambda text, *args: self.lines.append(text % args),
            warning=lambda text, *args: self.lines.append(text % args),
        )

    def __enter__(self) -> list[str]:
        self._patch.__enter__()
        return self.lines

    def __exit__(self, *reason: Any) -> None:
        self._patch.__exit__(*reason)


def there_and_back(group: Any, rank: int, nproc: int, dim: int) -> list[tuple[int, int]]:
    """An exchange of `4 * dim` bytes per message, each way; batches and collectives of each."""
    layout = HeadParallelLayout((2,) * nproc, rank)
    tensor = torch.arange(2 * nproc * 2 * dim, dtype=torch.uint8).view(2, 2 * nproc, dim)
    with counting() as there:
        mine = scatter_heads_gather_tokens(tensor, group, layout)
    with counting() as back:
        assert torch.equal(scatter_tokens_gather_heads(mine, group, layout), tensor)
    return [(counts.batches, counts.total_collectives) for counts in (there, back)]


def followed(rank: int, nproc: int, store: str, paths: list[str], exchange: str, check: bool) -> Any:
    variables = {PROFILE: paths[rank], EXCHANGE: exchange} | ({CHECK: "1"} if check else {})
    with process_group(rank, nproc, store) as group, environment(**variables), Said() as lines:
        there_and_back(group, rank, nproc, 1)  # the first use is behind us
        small, large = (there_and_back(group, rank, nproc, dim) for dim in (2 * KIB - 1, 2 * KIB))
        return small, large, agreement.state_of(group, torch.device("cpu")).name, lines


COLLECTIVE, BATCH = (0, 1), (1, 0)


@pytest.mark.parametrize("check", [False, True])
def test_auto_follows_the_profile(ranks: RankPool, tmp_path: Path, check: bool) -> None:
    paths = [write(tmp_path / f"{rank}.json", measurement(SMALL_AND_LARGE)) for rank in range(2)]
    for rank, (small, large, name, lines) in enumerate(ranks(followed, 2, paths, "auto", check)):
        assert small == [COLLECTIVE, BATCH]
        assert large == [BATCH, BATCH]
        assert name == "auto"
        told = f"exchange auto by profile {rank}.json: dispatch all_to_all then p2p from 8 KiB, return p2p"
        ending = ", checked across ranks" if check else ""
        assert lines == [f"first exchange of a group: 2 ranks, backend gloo, {told}{ending}"]


def test_a_name_is_used_whatever_the_profile_says(ranks: RankPool, tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", measurement(SMALL_AND_LARGE))
    for small, large, name, _ in ranks(followed, 2, [path] * 2, "p2p", False):
        assert small == large == [BATCH, BATCH]
        assert name == "p2p"


def test_no_measurement_that_fits(ranks: RankPool, tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", measurement(SMALL_AND_LARGE, ranks=3))
    for small, large, name, lines in ranks(followed, 2, [path] * 2, "auto", False):
        assert small == large == [COLLECTIVE, COLLECTIVE]
        assert name == "all_to_all"
        assert lines == ["first exchange of a group: 2 ranks, backend gloo, exchange all_to_all"]


def test_ranks_with_different_or_unreadable_files_go_without(ranks: RankPool, tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", measurement(SMALL_AND_LARGE))
    two = write(tmp_path / "two.json", measurement(SMALL_AND_LARGE[1:]))
    where = "no profile is used on a group of 3 ranks, backend gloo: "

    def warning(paths: list[str]) -> str:
        answers = ranks(followed, 3, paths, "auto", False)
        for small, large, name, lines in answers:
            assert small == large == [COLLECTIVE, COLLECTIVE]
            assert name == "all_to_all"
            assert len(lines) == 2
            assert lines[0] == answers[0][3][0], "the same words on every rank"
        return str(answers[0][3][0])

    digests = [profiles.load(path).digest[:16] for path in (one, two)]
    assert warning([one, one, two]) == (
        f"{where}the ranks differ in profile: {digests[1]} for gloo on cpu on rank 2 (global 2), "
        f"{digests[0]} for gloo on cpu on ranks 0, 1 (global 0, 1)"
    )
    assert warning([one, str(tmp_path), one]) == (
        f"{where}rank 1 (global 1): {tmp_path} is a directory: expected a profile, a JSON file that `tune --out` writes"
    )
    missing = str(tmp_path / "none.json")
    assert warning([missing] * 3).startswith(f"{where}ranks 0, 1, 2 (global 0, 1, 2): the profile '{missing}' cannot")


def broken(exchange: Any, group: Any) -> Any:
    raise RuntimeError("broken here")


def failing(rank: int, nproc: int, store: str, path: str) -> Any:
    registry.register_head_parallel_exchange("broken", broken, backends=())
    try:
        return followed(rank, nproc, store, [path] * nproc, "auto", False)
    finally:
        del registry._registrations["broken"]


def test_what_fails_its_self_test_is_replaced_in_the_profile(ranks: RankPool, tmp_path: Path) -> None:
    points = [("dispatch", KIB, "broken"), ("return", KIB, "p2p")]
    path = write(tmp_path / "p.json", measurement(points, exchanges=["broken", "p2p"]))
    for small, large, _, lines in ranks(failing, 2, path):
        assert small == large == [COLLECTIVE, BATCH]
        assert "broken failed its self-test on this rank or another" in lines[0]
        assert lines[1].endswith("exchange auto by profile p.json: dispatch all_to_all, return p2p")


def refusing(rank: int, nproc: int, store: str, path: str) -> Any:
    def unusable(group: Any, device: Any, backend: str) -> str | None:
        return "no memory left" if rank == 1 else None

    registry.register_head_parallel_exchange(
        "third", registry._registrations["p2p"].implementation, backends=(), unusable=unusable
    )
    try:
        return followed(rank, nproc, store, [path] * nproc, "auto", False)
    finally:
        del registry._registrations["third"]


def test_what_one_rank_cannot_use_is_replaced_on_all(ranks: RankPool, tmp_path: Path) -> None:
    points = [("dispatch", KIB, "third"), ("return", KIB, "p2p")]
    path = write(tmp_path / "p.json", measurement(points, exchanges=["third", "p2p"]))
    for small, large, _, lines in ranks(refusing, 2, path):
        assert small == large == [COLLECTIVE, BATCH]
        assert lines[0].endswith(
            "in the place of the profile's third on a group of 2 ranks, backend gloo: no memory left"
        )


# --- What the user sees ---------------------------------------------------------------------------------


def test_the_doctor_tells_what_the_profile_says_for_magi2(tmp_path: Path) -> None:
    points = [("dispatch", 4 * KIB, "all_to_all"), ("dispatch", 10 << 20, "p2p"), ("return", KIB, "all_to_all")]
    path = write(tmp_path / "p.json", measurement(points, ranks=8))
    digest = profiles.load(path).digest[:16]

    def check(**changed: Any) -> diagnosis.Check:
        plain = config.Settings(enabled=True, profile=path)
        return diagnosis._check_profile(dataclasses.replace(plain, **changed), {"gloo": "all_to_all"})

    found = check()
    assert found.verdict == "ok"
    assert found.seen == (
        f"auto follows {path}, digest {digest}. For MAGI-2: 8 ranks, gloo on cpu: MoE dispatch (2.71 MiB per message) "
        "p2p, MoE return (2.71 MiB per message) all_to_all, attention dispatch (8.13 MiB per message) p2p, "
        "attention return (2.71 MiB per message) all_to_all"
    )
    assert check(profile=None).verdict == "information"
    named = check(exchange="p2p")
    assert named.verdict == "warning"
    assert named.seen.startswith(f"is not followed: {EXCHANGE} names an exchange")
    wrong = check(profile=str(tmp_path))
    assert (wrong.verdict, wrong.seen) == (
        "warning",
        f"{profiles.once(str(tmp_path))}: auto goes by the backend, without a profile",
    )
    assert "tune --out" in wrong.todo
    assert check(profile=str(tmp_path), strict=True).verdict == "problem"


def test_strict_mode_refuses_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_switch_on", lambda settings: [])
    with environment(**{FLAG: "strict", PROFILE: str(tmp_path)}), pytest.raises(plugin.StrictModeError) as raised:
        plugin.register()
    assert str(raised.value) == f"{PROFILE}: {profiles.once(str(tmp_path))}"
    with environment(**{FLAG: "1", PROFILE: str(tmp_path)}), Said() as lines:
        plugin.register()
    assert lines == [], "the ranks tell at the first exchange, once and with their names"
