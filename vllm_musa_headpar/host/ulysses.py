"""What is patched of vLLM-Omni's Ulysses attention, which every diffusion model but MAGI-2 exchanges heads through.

Each replacement keeps the stock function's signature, results and strides, and leaves to it whatever it would
refuse, a single rank, and tensors that are no plain memory. Shapes are `[batch, tokens, heads, dim]`.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import exchange, ops
from ..agreement import telling
from .ledger import HOST, Binding, NotNeeded, Record, imports_of, load, stock_function

Function = Callable[..., Any]
Maker = Callable[[Function, ModuleType], Function]  # from the stock function, and a module that it asks
COMM = f"{HOST}.diffusion.distributed.comm"
ULYSSES = f"{HOST}.diffusion.attention.parallel.ulysses"
PLATFORMS = f"{HOST}.platforms"


# --- The tensors of one attention, told before the first of them is exchanged ---


class Announcement:
    """The tensors that one `pre_attention` is about to exchange, and the results of those that went along early.

    A tensor that is not one of these very objects has nothing to do with it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.pending = list(tensors)
        self.arrived: list[tuple[Tensor, Any, Tensor]] = []  # tensor, group, result

    def fetch(self, tensor: Tensor, group: Any) -> Tensor | None:
        """The result that an earlier call has brought along for this tensor, once; None if there is none."""
        for number, (announced, over, result) in enumerate(self.arrived):
            if announced is tensor and over is group:
                del self.arrived[number]
                return result
        return None

    def company_of(self, tensor: Tensor, fits: Callable[[Tensor], bool]) -> list[Tensor]:
        """This tensor and the others pending that can go with it; it alone if it was not announced itself."""
        if not any(announced is tensor for announced in self.pending):
            return [tensor]
        company, left, found = [tensor], [], False
        for announced in self.pending:
            if announced is tensor and not found:
                found = True
            elif fits(announced):
                company.append(announced)
            else:
                left.append(announced)
        self.pending = left
        return company


class _Attention(threading.local):
    """Which attention this thread is in. Not a context variable: the compiler can trace this one."""

    def __init__(self) -> None:  # once in each thread; the compiler guards on the attribute being there
        self.announced: Announcement | None = None


_attention = _Attention()


def make_pre_attention(stock: Function, ulysses: ModuleType) -> Function:
    def pre_attention(self: Any, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any) -> Any:
        # Stock breaks the graph in this mode, to gather the token counts: what is told would be guarded on there.
        if torch.compiler.is_compiling() and ulysses.get_ulysses_mode(default="strict") != "strict":
            return stock(self, query, key, value, attn_metadata)
        gate = None if attn_metadata is None else attn_metadata.extra.get("gate_compress")
        before = _attention.announced
        _attention.announced = Announcement((query, key, value) if gate is None else (query, key, value, gate))
        try:
            return stock(self, query, key, value, attn_metadata)
        finally:
            _attention.announced = before

    return pre_attention


def _dispatched(
    tensor: Tensor,
    group: Any,
    counts_of: Callable[[Tensor], tuple[int, ...]],
    fits: Callable[[Tensor], bool],
    head_counts: tuple[int, ...] | None = None,
    room: int | None = None,
) -> Tensor:
    """Dispatch a tensor, and along with it those announced that can go with it: in one launch, where that can be.

    Args:
        counts_of: each rank's token count for a tensor.
        fits: whether an announced tensor can go along, with the same head counts and room.
    """
    announced = _attention.announced
    early = None if announced is None else announced.fetch(tensor, group)
    if early is not None:
        return early
    company = [tensor] if announced is None else announced.company_of(tensor, fits)
    rank = dist.get_rank(group)
    if torch.compiler.is_compiling():
        counts = [counts_of(each) for each in company]
        results = ops.dispatch_each(company, counts, rank, group, head_counts=head_counts, room=room)
    elif len(company) == 1:
        layout = exchange.cached_layout(counts_of(tensor), rank, head_counts)
        return exchange.dispatch((tensor,), group, layout, tensor.dtype, room)
    else:
        layouts = [exchange.cached_layout(counts_of(each), rank, head_counts) for each in company]
        results = exchange.dispatch_each(company, group, layouts, [room] * len(company))
    if announced is not None:
        announced.arrived += [(one, group, result) for one, result in zip(company[1:], results[1:], strict=True)]
    return results[0]


def _returned(
    tensor: Tensor,
    group: Any,
    counts: tuple[int, ...],
    heads: int,
    head_counts: tuple[int, ...] | None = None,
    parts: int = 1,
) -> Tensor:
    rank = dist.get_rank(group)
    if torch.compiler.is_compiling():
        return ops.undispatch(tensor, counts, rank, group, heads, head_counts=head_counts, parts=parts)
    return exchange.undispatch(tensor, group, exchange.cached_layout(counts, rank, head_counts), heads, parts)


# --- The replacements ---


def _is_plain(tensor: Any, dims: int) -> bool:
    """Whether this is a tensor of so many dimensions that an exchange can read where it lies.

    None of them may be empty, which every rank sees alike, but for the tokens: a rank may have none.
    """
    if not isinstance(tensor, Tensor) or tensor.ndim != dims or 0 in (tensor.shape[0], *tensor.shape[2:]):
        return False
    return torch.compiler.is_compiling() or exchange.why_not_dense(tensor) is None


def _refused(stock: Callable[[], Any], name: str, tensor: Tensor, group: Any) -> Any:
    """What stock refuses, it refuses in its own words; with the check on, the other ranks are told."""
    if torch.compiler.is_compiling():
        return stock()
    with telling(group, tensor, name):
        return stock()


def make_all_to_all_4d(stock: Function, comm: ModuleType) -> Function:
    def all_to_all_4D(
        input: Tensor, scatter_idx: int = 2, gather_idx: int = 1, group: Any = None, use_sync: bool = False
    ) -> Any:
        """`[B, S/W, H, D] -> [B, S, H/W, D]` for (2, 1), the reverse for (1, 2); every rank has as many tokens."""
        ranks = dist.get_world_size(group)
        if ranks < 2 or group is None or (scatter_idx, gather_idx) not in ((2, 1), (1, 2)) or not _is_plain(input, 4):
            return stock(input, scatter_idx, gather_idx, group=group, use_sync=use_sync)
        _, tokens, heads, _ = input.shape
        if input.shape[scatter_idx] % ranks:
            as_stock = functools.partial(stock, input, scatter_idx, gather_idx, group=group, use_sync=use_sync)
            return _refused(as_stock, "dispatch" if scatter_idx == 2 else "return", input, group)
        if scatter_idx == 2:
            result = _dispatched(
                input,
                group,
                counts_of=lambda tensor: (tensor.shape[1],) * ranks,
                fits=lambda tensor: _is_plain(tensor, 4) and tensor.shape[2] % ranks == 0,
            )
        else:
            result = _returned(input, group, (tokens // ranks,) * ranks, ranks * heads)
        if use_sync:
            comm.current_omni_platform.synchronize()
        return result

    return all_to_all_4D


def make_all_to_all_5d(stock: Function, comm: ModuleType) -> Function:
    def all_to_all_5D(
        input: Tensor, scatter_idx: int = 3, gather_idx: int = 1, group: Any = None, use_sync: bool = False
    ) -> Any:
        """`[B, S/W, 3, H, D] -> [B, S, 3, H/W, D]` for (3, 1), the reverse for (1, 3): three tensors at once."""
        ranks = dist.get_world_size(group)
        if ranks < 2 or group is None or (scatter_idx, gather_idx) not in ((3, 1), (1, 3)) or not _is_plain(input, 5):
            return stock(input, scatter_idx, gather_idx, group=group, use_sync=use_sync)
        batch, tokens, parts, heads, dim = input.shape
        if parts != 3 or input.shape[scatter_idx] % ranks:
            as_stock = functools.partial(stock, input, scatter_idx, gather_idx, group=group, use_sync=use_sync)
            return _refused(as_stock, "dispatch" if scatter_idx == 3 else "return", input, group)
        if scatter_idx == 3:
            counts, rank = (tokens,) * ranks, dist.get_rank(group)
            if torch.compiler.is_compiling():
                fused = ops.dispatch(input.unbind(2), counts, rank, group)
            else:
                layout = exchange.cached_layout(counts, rank)
                fused = exchange.dispatch(input.unbind(2), group, layout, input.dtype)
            result = fused.view(batch, ranks * tokens, 3, heads // ranks, dim)
        else:
            result = _returned(input.flatten(2, 3), group, (tokens // ranks,) * ranks, ranks * heads, parts=3)
        if use_sync:
            comm.current_omni_platform.synchronize()
        return result

    return all_to_all_5D


def real_heads(heads: int, padded: int, ranks: int) -> tuple[int, ...] | None:
    """The heads of each rank's shard of `padded` heads that are no padding; None where all are real."""
    if heads == padded:
        return None
    shard = padded // ranks
    return tuple(min(shard, max(0, heads - rank * shard)) for rank in range(ranks))


def _counts(seq_lens: Sequence[int], ranks: int) -> tuple[int, ...] | None:
    """Each rank's tokens, None where stock would refuse them."""
    counts = tuple(seq_lens)
    plain = torch.compiler.is_compiling() or all(type(count) is int and count >= 0 for count in counts)
    return counts if plain and len(counts) == ranks else None


def make_uaa_dispatch(stock: Function, platforms: ModuleType) -> Function:
    def _ulysses_all_to_all_any_qkv(
        pg: Any, x: Tensor, *, seq_lens: list[int], use_sync: bool, padded_head_cnt: int | None = None
    ) -> tuple[Tensor, int]:
        """`[B, S_r, H, D] -> [B, sum(S_r), padded H / W, D]`, and H. The padding is made here, not sent."""
        ranks = dist.get_world_size(pg)
        as_stock = functools.partial(
            stock, pg, x, seq_lens=seq_lens, use_sync=use_sync, padded_head_cnt=padded_head_cnt
        )
        if ranks < 2 or not _is_plain(x, 4):
            unchanged: tuple[Tensor, int] = as_stock()
            return unchanged
        _, tokens, heads, _ = x.shape
        padded = -(-heads // ranks) * ranks if padded_head_cnt is None else padded_head_cnt
        counts = _counts(seq_lens, ranks)
        if padded < heads or padded % ranks or counts is None or counts[dist.get_rank(pg)] != tokens:
            refused: tuple[Tensor, int] = _refused(as_stock, "dispatch", x, pg)
            return refused

        def fits(tensor: Tensor) -> bool:
            """The host pads the tensors of one attention alike: those of as many heads, or none of them."""
            alike = tensor.shape[2] == heads or (padded == heads and tensor.shape[2] % ranks == 0)
            return _is_plain(tensor, 4) and tensor.shape[1] == tokens and alike

        head_counts = real_heads(heads, padded, ranks)
        room = None if head_counts is None else padded // ranks
        result = _dispatched(x, pg, lambda tensor: counts, fits, head_counts, room)
        if use_sync:
            platforms.current_omni_platform.synchronize()
        return result, heads

    return _ulysses_all_to_all_any_qkv


def make_uaa_return(stock: Function, platforms: ModuleType) -> Function:
    def _ulysses_all_to_all_any_o(
        pg: Any, x: Tensor, *, seq_lens: list[int], local_seq_len: int, orig_head_cnt: int, use_sync: bool
    ) -> Tensor:
        """`[B, sum(S_r), padded H / W, D] -> [B, S_r, H, D]`. The padding stays here."""
        ranks = dist.get_world_size(pg)
        as_stock = functools.partial(
            stock,
            pg,
            x,
            seq_lens=seq_lens,
            local_seq_len=local_seq_len,
            orig_head_cnt=orig_head_cnt,
            use_sync=use_sync,
        )
        if ranks < 2 or not _is_plain(x, 4):
            unchanged: Tensor = as_stock()
            return unchanged
        counts, padded, rank = _counts(seq_lens, ranks), ranks * x.shape[2], dist.get_rank(pg)
        if counts is None or counts[rank] != local_seq_len or sum(counts) != x.shape[1] or orig_head_cnt < 1:
            refused: Tensor = _refused(as_stock, "return", x, pg)
            return refused
        heads = min(orig_head_cnt, padded)
        head_counts = real_heads(heads, padded, ranks)
        real = x if head_counts is None else x[:, :, : head_counts[rank]]
        result = _returned(real, pg, counts, heads, head_counts)
        if use_sync:
            platforms.current_omni_platform.synchronize()
        return result

    return _ulysses_all_to_all_any_o


# --- The records ---


def _replace_everywhere(
    module: str,
    name: str,
    signature: str,
    fingerprint: str,
    make: Maker,
    asks: str,
) -> Callable[[], list[Binding]]:
    """Bindings of a function, where it is and wherever it has been imported by name.

    Args:
        asks: the module through which the replacement asks for the platform.
    """

    def bindings() -> list[Binding]:
        _, _, original = stock_function(_module(module), name, signature, fingerprint)
        replacement = make(original, load(asks))
        return [Binding(owner, alias, original, replacement) for owner, alias in imports_of(original, HOST)]

    return bindings


def _pre_attention() -> list[Binding]:
    ulysses = _module(ULYSSES)
    owner, name, original = stock_function(
        ulysses, "UlyssesParallelAttention.pre_attention", "(self, query, key, value, attn_metadata)", None
    )
    return [Binding(owner, name, original, make_pre_attention(original, ulysses))]


def _module(name: str) -> ModuleType:
    try:
        known = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        known = False
    if not known:
        raise NotNeeded(f"this host has no {name}")
    return load(name)


_HOSTS = "vLLM-Omni 0.30.0, and versions whose function is still the same"
_UNTIL = "a vLLM-Omni whose Ulysses attention selects the exchange by backend"


def _record(
    name: str,
    module: str,
    function: str,
    signature: str,
    fingerprint: str,
    make: Maker,
    asks: str,
    why: str,
    how: str,
) -> Record:
    return Record(
        name=name,
        replaces=f"{module}:{function}",
        why=why,
        how=f"{how}; rebound wherever it was imported by name",
        hosts=_HOSTS,
        until=_UNTIL,
        bindings=_replace_everywhere(module, function, signature, fingerprint, make, asks),
    )


RECORDS = (
    _record(
        "ulysses.all_to_all_4d",
        COMM,
        "all_to_all_4D",
        "(input, scatter_idx=2, gather_idx=1, group=None, use_sync=False)",
        "12b039289b29c83f",
        make_all_to_all_4d,
        COMM,
        why="attention's exchanges use the one that suits the backend, and copy a payload once per direction",
        how="the exchange with equal token counts",
    ),
    _record(
        "ulysses.all_to_all_5d",
        COMM,
        "all_to_all_5D",
        "(input, scatter_idx=3, gather_idx=1, group=None, use_sync=False)",
        "2c26be733d282f9f",
        make_all_to_all_5d,
        COMM,
        why="the same for queries, keys and values in one tensor",
        how="one exchange of three parts",
    ),
    _record(
        "ulysses.uaa_dispatch",
        ULYSSES,
        "_ulysses_all_to_all_any_qkv",
        "(pg, x, *, seq_lens, use_sync, padded_head_cnt=None)",
        "f508642eab784587",
        make_uaa_dispatch,
        PLATFORMS,
        why="the same for uneven tokens and heads, and no zero heads between ranks",
        how="the exchange of the real heads, zero heads added behind those that arrive",
    ),
    _record(
        "ulysses.uaa_return",
        ULYSSES,
        "_ulysses_all_to_all_any_o",
        "(pg, x, *, seq_lens, local_seq_len, orig_head_cnt, use_sync)",
        "ec502bd260b1e3d2",
        make_uaa_return,
        PLATFORMS,
        why="the same on the way back",
        how="the exchange of the real heads",
    ),
    Record(
        name="ulysses.one_launch",
        replaces=f"{ULYSSES}:UlyssesParallelAttention.pre_attention",
        why="queries, keys and values (and a gate) are one launch where the exchange can: 4 per attention become 2",
        how="wraps the method, same signature, and tells the first of its exchanges which tensors will follow",
        hosts="vLLM-Omni 0.30.0, and versions with that signature",
        until="a vLLM-Omni that exchanges them together",
        bindings=_pre_attention,
    ),
)
