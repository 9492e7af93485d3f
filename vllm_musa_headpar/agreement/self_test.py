"""The self-test: before a tuned implementation moves anything, it is tried out on all ranks of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import blocks, config, registry
from ..errors import ExchangeError
from ..layout import HeadParallelLayout
from ..log import logger, warn_once
from .first_use import GroupState, once
from .trial import running as trials


@dataclass(frozen=True)
class Case:
    """An exchange to be tried, with the result that it must have on this rank, known without any exchange.

    Attributes:
        make: makes the exchange anew.
        expected: of the result's shape and type.
    """

    make: Callable[[], blocks.Exchange]
    expected: Tensor


def prove(state: GroupState, group: Any, device: torch.device) -> None:
    """Before the first exchange that moves anything: warm the communicator and try out what may be used.

    Two small all-reduces, an exchange there and back through the reference and through each tuned implementation, one
    host sync; nothing where only the reference can be used. An implementation that fails on any rank is used on none.

    Raises:
        ExchangeError: on all ranks, the reference is wrong on one of them; or the warm-up or the self-test broke off.
    """
    with once(group, device):
        if state.used:
            return
        if not state.proven:
            try:
                _prove(state, group, device)
            except (ExchangeError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                raise ExchangeError(f"the first exchange of a group, through {state.name}, failed: {error}") from error
            state.proven = True
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
    tuned = [candidate for candidate in state.candidates if candidate is not registry.REFERENCE]
    candidates = [registry.REFERENCE, *tuned]
    # A true collective first: in a communicator's first point-to-point batch every rank must take part.
    dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), group=group)
    cases = _cases(dist.get_rank(group), dist.get_world_size(group), device)
    trials = [_try_out(candidate.implementation, cases, group) for candidate in candidates]
    passed = torch.cat([result for result, _ in trials])
    try:
        dist.all_reduce(passed, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        names = ", ".join(f"{one.name}{why}" for one, (_, why) in zip(candidates, trials, strict=True))
        raise ExchangeError(f"the self-test of {names} broke off: {error}") from error
    where = f"on a group of {dist.get_world_size(group)} ranks, backend {state.backend}"
    for candidate, (_, reason), good in zip(candidates, trials, passed.tolist(), strict=True):
        if good:
            continue
        if candidate is registry.REFERENCE:
            raise ExchangeError(
                f"the stock exchange itself, {candidate.name}, fails the self-test {where}, on this rank or "
                f"another{reason}: torch.distributed.all_to_all_single is wrong there, and nothing is left to use"
            )
        warn_once(
            f"the stock exchange is used {where}: {candidate.name} failed its self-test on this rank or another{reason}"
        )
        if state.registration is candidate:
            state.registration = registry.REFERENCE
        if state.by_size is not None:
            state.by_size = state.by_size.without([candidate.name])


def _cases(rank: int, ranks: int, device: torch.device) -> list[Case]:
    """A small exchange of random bytes, there and back, uneven and with an empty rank.

    Every rank makes every rank's input, so that it knows what has to come.
    """
    counts = tuple(0 if other == ranks // 2 else 3 + other % 4 for other in range(ranks))
    layout = HeadParallelLayout(counts, rank)
    heads, own = 2 * ranks, slice(2 * rank, 2 * rank + 2)
    inputs = [_random_bytes((tokens, heads, 5), seed) for seed, tokens in enumerate(counts)]
    outer = inputs[rank].to(device)  # [local_tokens, heads, dim]
    inner = torch.cat([tensor[:, own] for tensor in inputs]).to(device)  # [owned_tokens, local_heads, dim]
    return [
        Case(lambda: blocks.dispatch((outer,), layout, outer.dtype), inner),
        Case(lambda: blocks.undispatch(inner, layout, heads), outer),
    ]


def _random_bytes(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)  # its own: the model's random numbers stay what they were
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator, device="cpu")


def _try_out(implementation: Callable[..., Any], cases: Sequence[Case], group: Any) -> tuple[Tensor, str]:
    """Carry out all cases.

    Returns:
        1 or 0 on the device, `[1]` int32: whether the results are right here; and the error, in words, if any.
    """
    passed, reason = torch.ones(1, dtype=torch.int32, device=cases[0].expected.device), ""
    for case in cases:
        exchange = case.make()
        exchange.result.copy_(case.expected.bitwise_not())  # fresh memory may hold right bytes: now all are wrong
        try:  # each by itself: a rank that fails in one still comes to the other
            if implementation(exchange, group).wait() is not exchange.result:
                raise TypeError("wait() did not return the exchange's result")
            passed *= (exchange.result == case.expected).all()
        except Exception as error:
            passed.zero_()
            reason = f"; here it raised {type(error).__name__}: {error}"
    return passed, reason
