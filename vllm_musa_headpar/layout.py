"""Who owns which tokens and which heads. Pure Python: torch is not imported here.

The interface and its rules follow vLLM-Omni's head-parallel exchange contract (see NOTICE);
`head_counts` is this package's own extension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class HeadParallelLayout:
    """The tokens and heads of one exchange, the same on every rank but for `rank`.

    Outside the exchange a rank holds its own tokens with all heads, inside it all tokens with its own
    heads. The heads are cut into `shards` contiguous shards, each rank's tokens into `replicas`
    contiguous parts: rank r owns head shard `r % shards` for part `r // shards` of every rank's tokens.

    Args:
        token_counts: input tokens of each rank, in process-group rank order.
        rank: this process's rank in the group.
        replica_counts: for each rank how its tokens split into parts; None for one part per rank.
        head_counts: heads of each head shard, zero allowed; None for equal shards. All ranks must
            bring the same counts.

    Raises:
        ValueError: a count, the rank or a tuple is not of the type, length or sum described here.
    """

    token_counts: tuple[int, ...]
    rank: int
    replica_counts: tuple[tuple[int, ...], ...] | None = None
    head_counts: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _require_counts(self.token_counts, "token_counts")
        if not _is_int(self.rank) or not 0 <= self.rank < len(self.token_counts):
            raise ValueError(f"rank must be an int in [0, {len(self.token_counts)}), got {self.rank!r}")
        if self.replica_counts is not None:
            self._validate_replicas(self.replica_counts)
        if self.head_counts is not None:
            _require_counts(self.head_counts, "head_counts")
            if len(self.head_counts) != self.shards:
                raise ValueError(
                    f"head_counts must have one count per head shard, {self.shards}, got {self.head_counts!r}"
                )

    def _validate_replicas(self, replica_counts: tuple[tuple[int, ...], ...]) -> None:
        if not isinstance(replica_counts, tuple) or len(replica_counts) != self.world_size:
            raise ValueError(
                f"replica_counts must be a tuple with one tuple for each of the {self.world_size} ranks, "
                f"got {replica_counts!r}"
            )
        for rank, parts in enumerate(replica_counts):
            _require_counts(parts, f"replica_counts[{rank}]")
            if len(parts) != len(replica_counts[0]):
                raise ValueError(f"every rank must have the same number of replicas, got {replica_counts!r}")
            if sum(parts) != self.token_counts[rank]:
                raise ValueError(
                    f"replica_counts[{rank}] must sum to the {self.token_counts[rank]} tokens of rank {rank}, "
                    f"got {parts!r}"
                )
        if self.world_size % self.replicas:
            raise ValueError(f"{self.replicas} replicas must divide the group size {self.world_size}")

    @cached_property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.token_counts)

    @cached_property
    def replicas(self) -> int:
        """Parts that each rank's tokens are split into; 1 without `replica_counts`."""
        return 1 if self.replica_counts is None else len(self.replica_counts[0])

    @cached_property
    def shards(self) -> int:
        """Head shards; ranks of the same shard are replicas of each other."""
        return self.world_size // self.replicas

    @cached_property
    def local_tokens(self) -> int:
        """Tokens that this rank brings."""
        return self.token_counts[self.rank]

    @cached_property
    def total_tokens(self) -> int:
        """Tokens of all ranks together."""
        return sum(self.token_counts)

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the sizes of the contiguous parts of its tokens."""
        if self.replica_counts is None:
            return tuple((count,) for count in self.token_counts)
        return self.replica_counts

    @cached_property
    def local_parts(self) -> tuple[int, ...]:
        """Sizes of the contiguous parts of this rank's tokens."""
        return self.parts[self.rank]

    @cached_property
    def owned_counts(self) -> tuple[int, ...]:
        """Tokens that this rank's head shard receives from each rank."""
        part = self.rank // self.shards
        return tuple(parts[part] for parts in self.parts)

    @cached_property
    def owned_tokens(self) -> int:
        """Tokens that this rank's head shard receives in all."""
        return sum(self.owned_counts)

    def validate_group(self, group: Any) -> None:
        """Raise ValueError unless `group` has this layout's size and this process that rank in it.

        `None` is accepted for a single rank only: the caller owns the group.
        """
        if group is None:
            if self.world_size > 1:
                raise ValueError(f"a layout of {self.world_size} ranks needs a caller-owned process group, got None")
            return
        # Through the module at call time: callers may replace the two functions for a group of their own kind.
        import torch.distributed as dist

        try:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
        except Exception as error:
            raise ValueError(
                f"cannot ask the process group {group!r} for its size and rank, "
                f"expected size {self.world_size} and rank {self.rank}: {error}"
            ) from error
        if (size, rank) != (self.world_size, self.rank):
            raise ValueError(
                f"the process group size/rank is {size}/{rank}, but the layout says {self.world_size}/{self.rank}"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_counts(counts: object, name: str) -> None:
    """A non-empty tuple of non-negative ints; bool is no count."""
    if not isinstance(counts, tuple) or not counts:
        raise ValueError(f"{name} must be a non-empty tuple of ints, got {counts!r}")
    for count in counts:
        if not _is_int(count) or count < 0:
            raise ValueError(f"{name} must hold non-negative ints, got {count!r} in {counts!r}")


def offsets(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Where each of the consecutive blocks of these sizes starts, and where the last one ends."""
    return (0, *accumulate(counts))


def replica_token_counts(token_counts: tuple[int, ...], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Split every rank's tokens into `replicas` parts so that the parts fit the ranks' own totals.

    Part i of all ranks goes to the ranks `[i * shards, (i + 1) * shards)`. Each rank starts from a
    balanced split, extra tokens on early parts; then tokens are moved between the parts of a rank, ranks
    in order, until part i holds as many tokens as those ranks bring, as far as that goes.

    Args:
        token_counts: tokens of each rank, in process-group rank order.
        replicas: parts per rank; must divide the number of ranks.

    Returns:
        Per rank, the sizes of its parts. Equal inputs return the same object.

    Raises:
        ValueError: `replicas` is below 1 or does not divide the group size, or a count is no count.
    """
    _require_counts(token_counts, "token_counts")
    world_size = len(token_counts)
    if not _is_int(replicas) or replicas < 1 or world_size % replicas:
        raise ValueError(f"replicas must be at least 1 and divide the group size {world_size}, got {replicas!r}")
    return _replica_token_counts(token_counts, replicas)


# Cached behind the validation: 1 and True are one cache key.
@lru_cache(maxsize=1024)
def _replica_token_counts(token_counts: tuple[int, ...], replicas: int) -> tuple[tuple[int, ...], ...]:
    shards = len(token_counts) // replicas
    parts = [[count // replicas + (part < count % replicas) for part in range(replicas)] for count in token_counts]
    excess = [
        sum(rank_parts[part] for rank_parts in parts) - sum(token_counts[part * shards : (part + 1) * shards])
        for part in range(replicas)
    ]
    for rank_parts in parts:
        for give in range(replicas):
            for take in range(replicas):
                moved = min(excess[give], -excess[take], rank_parts[give])
                if moved > 0:
                    rank_parts[give] -= moved
                    rank_parts[take] += moved
                    excess[give] -= moved
                    excess[take] += moved
    return tuple(tuple(rank_parts) for rank_parts in parts)
