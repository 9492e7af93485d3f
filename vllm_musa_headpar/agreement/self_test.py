"""The self-test: before a tuned implementation moves anything, it is tried out on all ranks of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import blocks, config, registry
from ..errors import ExchangeError
from ..layout import HeadParallelLayout
from ..log import logger, warn_once
from .first_use import GroupState
from .trial import running as trials


def prove(state: GroupState, group: Any, device: torch.device) -> None:
    """Before the first exchange that moves anything: warm the communicator and try out what may be used.

    Two small all-reduces, for each tuned implementation an exchange there and back through the reference and through
    it, one host sync; nothing where the reference is in use. On failure on any rank all ranks go over to the reference.

    Raises:
        ExchangeError: the warm-up or the self-test broke off.
    """
    if not state.proven:
        try:
            _prove(state, group, device)
        except (ExchangeError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise ExchangeError(f"the first exchange of a group, through {state.name}, failed: {error}") from error
        state.proven = True
    if not state.used:
        state.used = True
        logger.info(
            "first exchange of a group: %d ranks, backend %s, exchange %s%s%s",
            dist.get_world_size(group),
            state.backend,
            f"{state.name} {state.by_size}" if state.name == config.AUTO else state.name,
            ", checked across ranks" if state.check else "",
            f"; on trial: {', '.join(sorted(trial.name for trial in trials))}" if trials else "",
        )


def _prove(state: GroupState, group: Any, device: torch.device) -> None:
    candidates = [candidate for candidate in state.candidates if candidate is not registry.REFERENCE]
    # A true collective first: in a communicator's first point-to-point batch every rank must take part.
    dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), group=group)
    trials = [_try_out(candidate.implementation, group, device) for candidate in candidates]
    passed = torch.cat([result for result, _ in trials])
    try:
        dist.all_reduce(passed, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        names = ", ".join(f"{one.name}{why}" for one, (_, why) in zip(candidates, trials, strict=True))
        raise ExchangeError(f"the self-test of {names} broke off: {error}") from error
    for candidate, (_, reason), good in zip(candidates, trials, passed.tolist(), strict=True):
        if good:
            continue
        warn_once(
            f"the stock exchange is used on a group of {dist.get_world_size(group)} ranks, backend {state.backend}"
            f": {candidate.name} failed its self-test on this rank or another{reason}"
        )
        if state.registration is candidate:
            state.registration = registry.REFERENCE
        if state.by_size is not None:
            state.by_size = state.by_size.without([candidate.name])


def _try_out(implementation: Callable[..., Any], group: Any, device: torch.device) -> tuple[Tensor, str]:
    """A small exchange of random bytes, there and back, uneven and with an empty rank, against the reference.

    Returns:
        1 or 0 on the device, `[1]` int32; and the error here, in words, if there was one.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    counts = tuple(0 if other == world_size // 2 else 3 + other % 4 for other in range(world_size))
    layout = HeadParallelLayout(counts, rank)
    generator = torch.Generator("cpu").manual_seed(rank)  # its own: the model's random numbers stay what they were
    heads = 2 * world_size
    shape = (counts[rank], heads, 5)
    data = torch.randint(256, shape, dtype=torch.uint8, generator=generator, device="cpu").to(device)
    reference = registry.REFERENCE.implementation

    there = blocks.dispatch((data,), layout, data.dtype)
    reference(there, group).wait()
    back = blocks.undispatch(there.result, layout, heads)
    reference(back, group).wait()
    passed, reason = torch.ones(1, dtype=torch.int32, device=device), ""
    tried = blocks.dispatch((data,), layout, data.dtype), blocks.undispatch(there.result, layout, heads)
    for trial, expected in zip(tried, (there, back), strict=True):
        trial.result.copy_(expected.result.bitwise_not())  # fresh memory may hold right bytes: now all are wrong
        try:  # each by itself: a rank that fails in one still comes to the other
            if implementation(trial, group).wait() is not trial.result:
                raise TypeError("wait() did not return the exchange's result")
            passed *= (trial.result == expected.result).all()
        except Exception as error:
            passed.zero_()
            reason = f"; here it raised {type(error).__name__}: {error}"
    return passed, reason
