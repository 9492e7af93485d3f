"""Who owns what: construction, properties and the split over replicas, without torch."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_musa_headpar.layout import HeadParallelLayout, offsets, replica_token_counts

pytestmark = pytest.mark.cpu


def test_the_layout_needs_no_torch() -> None:
    code = (
        "import sys; from vllm_musa_headpar.layout import HeadParallelLayout as L, replica_token_counts as r;"
        "l = L((3, 1), 1, r((3, 1), 2)); l.owned_tokens; l.validate_group; L((4,), 0).validate_group(None);"
        "assert not {'torch', 'vllm', 'vllm_omni'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_top_level_names_are_the_same_objects() -> None:
    import vllm_musa_headpar

    assert vllm_musa_headpar.HeadParallelLayout is HeadParallelLayout
    assert vllm_musa_headpar.replica_token_counts is replica_token_counts


# Arguments, what the message must contain: the offending value and the expectation.
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "counts list": (([3, 4], 0), {}, r"token_counts .*tuple.*\[3, 4\]"),
    "counts empty": (((), 0), {}, r"token_counts .*non-empty.*\(\)"),
    "counts int": ((5, 0), {}, r"token_counts .*tuple.*5"),
    "counts None": ((None, 0), {}, r"token_counts .*tuple.*None"),
    "counts string": (("34", 0), {}, r"token_counts .*tuple.*'34'"),
    "count negative": (((3, -1), 0), {}, r"token_counts .*non-negative.*-1"),
    "count bool": (((3, True), 0), {}, r"token_counts .*ints.*True"),
    "count float": (((3, 4.0), 0), {}, r"token_counts .*ints.*4\.0"),
    "count string": (((3, "4"), 0), {}, r"token_counts .*ints.*'4'"),
    "count None": (((3, None), 0), {}, r"token_counts .*ints.*None"),
    "count nested": (((3, (4,)), 0), {}, r"token_counts .*ints.*\(4,\)"),
    "rank bool": (((3, 4), True), {}, r"rank .*int in \[0, 2\).*True"),
    "rank float": (((3, 4), 1.0), {}, r"rank .*1\.0"),
    "rank None": (((3, 4), None), {}, r"rank .*None"),
    "rank string": (((3, 4), "0"), {}, r"rank .*'0'"),
    "rank beyond": (((3, 4), 2), {}, r"rank .*\[0, 2\).*2"),
    "rank negative": (((3, 4), -1), {}, r"rank .*-1"),
    "replicas list": (((2, 2), 0, [(1, 1), (1, 1)]), {}, r"replica_counts .*tuple.*\["),
    "replicas of lists": (((2, 2), 0, ([1, 1], [1, 1])), {}, r"replica_counts\[0\] .*tuple.*\[1, 1\]"),
    "replicas of one list": (((2, 2), 0, ((1, 1), [1, 1])), {}, r"replica_counts\[1\] .*tuple.*\[1, 1\]"),
    "replicas too few ranks": (((2, 2), 0, ((1, 1),)), {}, r"each of the 2 ranks.*\(\(1, 1\),\)"),
    "replicas too many ranks": (((2,), 0, ((1, 1), (1, 1))), {}, r"each of the 1 ranks"),
    "replicas none": (((2, 2), 0, ()), {}, r"each of the 2 ranks.*\(\)"),
    "replicas empty": (((0, 0), 0, ((), ())), {}, r"replica_counts\[0\] .*non-empty.*\(\)"),
    "replicas ragged": (((2, 2), 0, ((1, 1), (2,))), {}, r"same number of replicas.*\(2,\)"),
    "replicas sum": (((2, 3), 0, ((1, 1), (1, 1))), {}, r"replica_counts\[1\] must sum to the 3 tokens.*\(1, 1\)"),
    "replicas not dividing": (((2, 2), 0, ((1, 1, 0), (1, 1, 0))), {}, r"3 replicas must divide .*2"),
    "replicas negative": (((2, 2), 0, ((3, -1), (1, 1))), {}, r"replica_counts\[0\] .*non-negative.*-1"),
    "replicas bool": (((2, 2), 0, ((True, 1), (1, 1))), {}, r"replica_counts\[0\] .*True"),
    "replicas float": (((2, 2), 0, ((1, 1), (1.0, 1))), {}, r"replica_counts\[1\] .*1\.0"),
    "replicas int": (((2, 2), 0, 1), {}, r"replica_counts .*tuple.*1"),
    "heads list": (((2, 2), 0), {"head_counts": [1, 1]}, r"head_counts .*tuple.*\[1, 1\]"),
    "heads empty": (((2, 2), 0), {"head_counts": ()}, r"head_counts .*non-empty"),
    "heads too few": (((2, 2), 0), {"head_counts": (1,)}, r"head_counts .*2, got \(1,\)"),
    "heads of ranks instead of shards": (
        ((2, 2), 0, ((1, 1), (1, 1))),
        {"head_counts": (1, 1)},
        r"head_counts .*1, got \(1, 1\)",
    ),
    "heads negative": (((2, 2), 0), {"head_counts": (3, -1)}, r"head_counts .*-1"),
    "heads bool": (((2, 2), 0), {"head_counts": (True, 1)}, r"head_counts .*True"),
    "heads float": (((2, 2), 0), {"head_counts": (1, 1.0)}, r"head_counts .*1\.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_layout_is_refused_with_the_value(case: str) -> None:
    arguments, keywords, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        HeadParallelLayout(*arguments, **keywords)


def test_numpy_integers_are_no_counts() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="token_counts"):
        HeadParallelLayout((numpy.int64(3), 4), 0)
    with pytest.raises(ValueError, match="rank"):
        HeadParallelLayout((3, 4), numpy.int64(0))


def test_head_counts_are_not_positional() -> None:
    with pytest.raises(TypeError):
        HeadParallelLayout((3, 4), 0, None, (1, 1))  # type: ignore[misc]


def test_the_plain_layout() -> None:
    layout = HeadParallelLayout((3, 0, 4), 2)
    assert (layout.world_size, layout.replicas, layout.shards) == (3, 1, 3)
    assert (layout.local_tokens, layout.total_tokens) == (4, 7)
    assert layout.local_parts == (4,)
    assert (layout.owned_counts, layout.owned_tokens) == ((3, 0, 4), 7)
    assert layout.replica_counts is None
    assert layout.head_counts is None


def test_a_layout_with_replicas() -> None:
    parts = ((5, 1), (1, 1), (2, 2), (0, 0))
    owned = [HeadParallelLayout((6, 2, 4, 0), rank, parts).owned_counts for rank in range(4)]
    assert owned == [(5, 1, 2, 0), (5, 1, 2, 0), (1, 1, 2, 0), (1, 1, 2, 0)]
    layout = HeadParallelLayout((6, 2, 4, 0), 2, parts)
    assert (layout.replicas, layout.shards, layout.local_parts) == (2, 2, (2, 2))
    assert (layout.owned_tokens, layout.total_tokens, layout.local_tokens) == (4, 12, 4)


def test_one_part_per_rank_is_the_plain_layout() -> None:
    plain = HeadParallelLayout((3, 4), 1)
    parts = HeadParallelLayout((3, 4), 1, ((3,), (4,)))
    for name in ("replicas", "shards", "local_parts", "owned_counts", "owned_tokens", "total_tokens"):
        assert getattr(plain, name) == getattr(parts, name)


def test_as_many_replicas_as_ranks() -> None:
    parts = replica_token_counts((9, 1, 0, 2), 4)
    layout = HeadParallelLayout((9, 1, 0, 2), 3, parts)
    assert (layout.shards, layout.owned_counts) == (1, (2, 0, 0, 0))


def test_zero_tokens_everywhere_is_a_layout() -> None:
    layout = HeadParallelLayout((0, 0), 1, ((0, 0), (0, 0)))
    assert (layout.total_tokens, layout.owned_tokens, layout.local_tokens) == (0, 0, 0)


def test_counts_beyond_32_bits() -> None:
    layout = HeadParallelLayout((2**40, 2**40 + 1), 1)
    assert layout.total_tokens == 2**41 + 1
    assert layout.owned_counts == (2**40, 2**40 + 1)
    assert replica_token_counts((2**40 + 1, 1), 2) == ((2**40, 1), (1, 0))


def test_it_is_a_frozen_value() -> None:
    layout = HeadParallelLayout((3, 4), 1, ((3,), (4,)), head_counts=(1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.rank = 0  # type: ignore[misc]
    same = HeadParallelLayout((3, 4), 1, ((3,), (4,)), head_counts=(1, 2))
    assert layout == same
    assert hash(layout) == hash(same)
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    assert layout != HeadParallelLayout((3, 4), 1, ((3,), (4,)))
    assert [field.name for field in dataclasses.fields(layout)][:3] == ["token_counts", "rank", "replica_counts"]


def test_the_group_is_asked_for_its_size_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    group = SimpleNamespace()
    monkeypatch.setattr(dist, "get_world_size", lambda asked: {id(group): 2}[id(asked)])
    monkeypatch.setattr(dist, "get_rank", lambda asked: {id(group): 1}[id(asked)])
    HeadParallelLayout((3, 4), 1).validate_group(group)
    with pytest.raises(ValueError, match=r"process group size/rank is 2/1.*2/0"):
        HeadParallelLayout((3, 4), 0).validate_group(group)
    with pytest.raises(ValueError, match=r"process group size/rank is 2/1.*3/1"):
        HeadParallelLayout((3, 4, 5), 1).validate_group(group)
    with pytest.raises(ValueError, match=r"process group size/rank"):
        HeadParallelLayout((3,), 0).validate_group(group)


def test_no_group_is_a_group_of_one() -> None:
    HeadParallelLayout((3,), 0).validate_group(None)
    with pytest.raises(ValueError, match="caller-owned process group"):
        HeadParallelLayout((3, 4), 0).validate_group(None)


# --- The split over replicas ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "replicas", "parts"),
    [
        ((3702,) * 8, 2, ((1851, 1851),) * 8),
        ((6, 2, 4, 0), 2, ((5, 1), (1, 1), (2, 2), (0, 0))),
        ((9, 1, 0, 2), 4, ((7, 0, 0, 2), (1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 0))),
        ((5, 1, 0, 3, 8, 2), 3, ((0, 0, 5), (1, 0, 0), (0, 0, 0), (1, 0, 2), (3, 2, 3), (1, 1, 0))),
        ((3, 4), 1, ((3,), (4,))),
        ((7,), 1, ((7,),)),
        ((0, 0), 2, ((0, 0), (0, 0))),
    ],
)
def test_replica_token_counts_has_the_values_of_the_contract(
    counts: tuple[int, ...], replicas: int, parts: tuple[tuple[int, ...], ...]
) -> None:
    assert replica_token_counts(counts, replicas) == parts


def test_equal_inputs_return_the_same_object() -> None:
    first = replica_token_counts((6, 2, 4, 0), 2)
    assert replica_token_counts(tuple(map(int, (6, 2, 4, 0))), 2) is first
    assert replica_token_counts((6, 2, 4, 0), 4) is not first


@pytest.mark.parametrize("replicas", [0, -1, -2, 3, 5, 8, True, 2.0, None, "2"])
def test_replicas_must_divide_the_group(replicas: Any) -> None:
    with pytest.raises(ValueError, match=r"replicas must be at least 1 and divide the group size 4, got"):
        replica_token_counts((1, 2, 3, 4), replicas)


@pytest.mark.parametrize("counts", [(), [1, 2], (1, -2), (1, True), (1, 2.0), None, 3, "12"])
def test_replicas_of_what_are_no_counts(counts: Any) -> None:
    with pytest.raises(ValueError, match="token_counts"):
        replica_token_counts(counts, 1)


def test_a_cached_answer_does_not_let_a_bool_pass() -> None:
    assert replica_token_counts((1, 1), 1) == ((1,), (1,))
    for counts, replicas in (((True, 1), 1), ((1, 1), True)):
        with pytest.raises(ValueError, match="True"):
            replica_token_counts(counts, replicas)


@st.composite
def groups_and_replicas(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    ranks = draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks))
    return tuple(counts), draw(st.sampled_from([value for value in range(1, ranks + 1) if ranks % value == 0]))


@given(groups_and_replicas())
def test_every_token_is_in_one_part(case: tuple[tuple[int, ...], int]) -> None:
    counts, replicas = case
    parts = replica_token_counts(counts, replicas)
    for rank in range(len(counts)):
        layout = HeadParallelLayout(counts, rank, parts)
        assert (layout.replicas, layout.local_parts) == (replicas, parts[rank])
        assert sum(layout.local_parts) == layout.local_tokens
    # The ranks of one head shard own every token once.
    for shard in range(layout.shards):
        owners = [HeadParallelLayout(counts, rank, parts) for rank in range(shard, len(counts), layout.shards)]
        assert sum(owner.owned_tokens for owner in owners) == sum(counts)


@given(groups_and_replicas())
def test_the_split_is_the_formula_of_the_contract(case: tuple[tuple[int, ...], int]) -> None:
    counts, replicas = case
    shards = len(counts) // replicas
    parts = [[c // replicas + (1 if i < c % replicas else 0) for i in range(replicas)] for c in counts]
    excess = [sum(p[i] for p in parts) - sum(counts[i * shards : (i + 1) * shards]) for i in range(replicas)]
    for part in parts:
        for give in range(replicas):
            for take in range(replicas):
                move = min(excess[give], -excess[take], part[give])
                if move > 0:
                    part[give], part[take] = part[give] - move, part[take] + move
                    excess[give], excess[take] = excess[give] - move, excess[take] + move
    assert replica_token_counts(counts, replicas) == tuple(map(tuple, parts))


@given(st.lists(st.integers(0, 9), min_size=1).map(tuple))
def test_offsets(counts: tuple[int, ...]) -> None:
    assert offsets(counts) == tuple(sum(counts[:index]) for index in range(len(counts) + 1))
