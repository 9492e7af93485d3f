"""What is patched of MAGI-2 on hosts of vLLM-Omni 0.30.0's kind. Each patch keeps every bit of its output.

Functions here are made for the host's module that they serve: groups are found through that module at call
time, as the host finds them. Shapes are `[tokens, heads, dim]`.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, reduce
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import exchange, ops
from ..agreement import telling
from ..agreement.trial import Trial
from ..layout import HeadParallelLayout
from .head_parallel import MAGI2, host_has_module, load_users, require_stock_wrappers
from .ledger import Binding, NotNeeded, Record, Refused, imports_of, load, stock_function
from .on_trial import packed_wire, trying
from .stock import why_not_stock

Function = Callable[..., Any]
Maker = Callable[[ModuleType, Function], Function]  # from the host's `parallel` and the stock function


def process_group_of(group: Any) -> Any:
    """The torch group of a `Magi2ParallelGroup`; None within means the default group, as torch reads it."""
    return dist.group.WORLD if group.group is None else group.group


def _layout(counts: Iterable[Any], group: Any, head_counts: tuple[int, ...] | None = None) -> HeadParallelLayout:
    """The layout for counts as MAGI-2 has them, any integers, checked against the group."""
    layout = exchange.cached_layout(tuple(int(operator.index(count)) for count in counts), group.rank, head_counts)
    layout.validate_group(process_group_of(group))
    return layout


# --- What the compiler sees: operators, and stock's own function for what that refuses or has to find out first ---


def _describes(sizes: Any, group: Any, local_tokens: Any) -> bool:
    return sizes is not None and len(sizes) == group.world_size and sizes[group.rank] == local_tokens


def _traced_dispatch(stock: Function, tensor: Tensor, group: Any, sizes: Any) -> Any:
    if tensor.ndim != 3 or tensor.shape[1] % group.world_size or not _describes(sizes, group, tensor.shape[0]):
        return stock(tensor, group, sizes)
    return ops.dispatch((tensor,), sizes, group.rank, process_group_of(group))


def _traced_return(stock: Function, tensor: Tensor, group: Any, sizes: Any, as_called: tuple[Any, ...]) -> Any:
    if tensor.ndim != 3 or sizes is None or len(sizes) != group.world_size or sum(sizes) != tensor.shape[0]:
        return stock(*as_called)
    heads = group.world_size * tensor.shape[1]
    return ops.undispatch(tensor, sizes, group.rank, process_group_of(group), heads)


def _traced_attention_dispatch(stock: Function, tensors: list[Tensor], sizes: Any, group: Any) -> Any:
    ranks, first = group.world_size, tensors[0]
    for tensor in tensors:
        fits = tensor.ndim == 3 and tensor.shape[-1] == first.shape[-1] and tensor.shape[1] % ranks == 0
        if not fits or tensor.device != first.device or not _describes(sizes, group, tensor.shape[0]):
            return stock(tensors, sizes, group)
    fused = ops.dispatch(tensors, sizes, group.rank, process_group_of(group))
    return list(torch.split(fused, [tensor.shape[1] // ranks for tensor in tensors], dim=1))


# --- The replacements ---


def make_ep_dispatch(parallel: ModuleType, stock: Function | None = None) -> Function:
    def ep_dispatch(tensor: Tensor, group: Any = None, sequence_split_sizes: Sequence[int] | None = None) -> Any:
        """Dispatch `[S, H, D] -> [sum(S_r), H / ranks, D]` through the group's exchange."""
        group = group or parallel.get_magi2_ep_group()
        if group.world_size == 1:
            return tensor
        if torch.compiler.is_compiling() and stock is not None:
            return _traced_dispatch(stock, tensor, group, sequence_split_sizes)
        torch_group = process_group_of(group)
        with telling(torch_group, tensor, "dispatch"):
            exchange.require_dense(tensor)
            if tensor.ndim != 3 or tensor.shape[1] % group.world_size:
                heads = tensor.shape[1] if tensor.ndim >= 2 else "?"
                raise ValueError(f"MoE head count {heads} must divide by EP size {group.world_size}")
            sizes = sequence_split_sizes
            if sizes is None:
                sizes = exchange.discover_counts(tensor.shape[0], torch_group, tensor.device)
            if len(sizes) != group.world_size or sizes[group.rank] != tensor.shape[0]:
                raise ValueError("EP sequence split sizes do not describe the local tensor")
            layout = _layout(sizes, group)
        return exchange.dispatch((tensor,), torch_group, layout, tensor.dtype)

    return ep_dispatch


def make_ep_undispatch(parallel: ModuleType, stock: Function | None = None) -> Function:
    def ep_undispatch(tensor: Tensor, group: Any = None, sequence_split_sizes: Sequence[int] | None = None) -> Any:
        """Return `[sum(S_r), H, D] -> [S_rank, ranks * H, D]` through the group's exchange."""
        group = group or parallel.get_magi2_ep_group()
        if group.world_size == 1:
            return tensor
        if torch.compiler.is_compiling() and stock is not None:
            return _traced_return(stock, tensor, group, sequence_split_sizes, (tensor, group, sequence_split_sizes))
        torch_group = process_group_of(group)
        sizes = sequence_split_sizes
        with telling(torch_group, tensor, "return"):
            exchange.require_dense(tensor)
            if tensor.ndim != 3:
                raise ValueError("EP-dispatched tensor must be [global_tokens,local_heads,dim]")
            if sizes is None:
                if tensor.shape[0] % group.world_size:
                    raise ValueError("uneven EP sequence requires explicit split sizes")
                sizes = [tensor.shape[0] // group.world_size] * group.world_size
            if len(sizes) != group.world_size or sum(sizes) != tensor.shape[0]:
                raise ValueError("EP sequence split sizes do not partition the global tensor")
            layout = _layout(sizes, group)
        return exchange.undispatch(tensor, torch_group, layout, group.world_size * tensor.shape[1])

    return ep_undispatch


def make_scatter_heads_gather_seqlen(parallel: ModuleType, stock: Function | None = None) -> Function:
    def scatter_heads_gather_seqlen(tensors: Iterable[Tensor], split_sizes: Sequence[int], group: Any = None) -> Any:
        """Dispatch Q, K and V, `[S_rank, ranks * H_i, D]` each, as one exchange straight from where they lie.

        Returns:
            Views `[sum(S_r), H_i, D]` of one buffer, strides included: attention kernels read them so.
        """
        group = group or parallel.get_magi2_ulysses_group()
        tensors = list(tensors)
        if group.world_size == 1:
            return tensors
        if not tensors:
            return []
        if torch.compiler.is_compiling() and stock is not None:
            return _traced_attention_dispatch(stock, tensors, split_sizes, group)
        torch_group = process_group_of(group)
        with telling(torch_group, tensors[0], "dispatch"):
            for tensor in tensors:
                exchange.require_dense(tensor)
            if len(split_sizes) != group.world_size:
                raise ValueError("split_sizes length must equal the Ulysses world size")
            local_tokens = split_sizes[group.rank]
            if any(tensor.ndim != 3 or tensor.shape[0] != local_tokens for tensor in tensors):
                raise ValueError("all Ulysses inputs must be [local_tokens, heads, dim]")
            dim = tensors[0].shape[-1]
            if any(tensor.shape[-1] != dim or tensor.shape[1] % group.world_size for tensor in tensors):
                raise ValueError("attention heads must divide evenly across Ulysses ranks")
            if any(tensor.device != tensors[0].device for tensor in tensors):
                devices = ", ".join(str(tensor.device) for tensor in tensors)
                raise ValueError(f"all Ulysses inputs must be on one device, got {devices}")
            layout = _layout(split_sizes, group)
        local_heads = [tensor.shape[1] // group.world_size for tensor in tensors]
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        fused = exchange.dispatch(tuple(tensors), torch_group, layout, dtype)
        return list(torch.split(fused, local_heads, dim=1))

    return scatter_heads_gather_seqlen


def make_scatter_seqlen_gather_heads(parallel: ModuleType, stock: Function | None = None) -> Function:
    def scatter_seqlen_gather_heads(tensor: Tensor, split_sizes: Sequence[int], group: Any = None) -> Any:
        """Return the attention output, `[sum(S_r), H, D] -> [S_rank, ranks * H, D]`."""
        group = group or parallel.get_magi2_ulysses_group()
        if group.world_size == 1:
            return tensor
        if torch.compiler.is_compiling() and stock is not None:
            return _traced_return(stock, tensor, group, split_sizes, (tensor, split_sizes, group))
        torch_group = process_group_of(group)
        with telling(torch_group, tensor, "return"):
            exchange.require_dense(tensor)
            if tensor.ndim != 3 or not tensor.is_contiguous():
                raise ValueError("Ulysses attention input must be contiguous [S,H,D]")
            if len(split_sizes) != group.world_size or sum(split_sizes) != tensor.shape[0]:
                raise ValueError("split_sizes must partition the input sequence")
            layout = _layout(split_sizes, group)
        return exchange.undispatch(tensor, torch_group, layout, group.world_size * tensor.shape[1])

    return scatter_seqlen_gather_heads


def make_scatter_packed_heads(parallel: ModuleType, stock: Function) -> Function:
    """The dispatch of hosts whose Q, K and V may come as `[S_rank, ranks, H_i, D]`, views of one send buffer."""
    plain = make_scatter_heads_gather_seqlen(parallel, stock)

    def scatter_heads_gather_seqlen(tensors: Iterable[Tensor], split_sizes: Sequence[int], group: Any = None) -> Any:
        group = group or parallel.get_magi2_ulysses_group()
        tensors = list(tensors)
        if not all(tensor.ndim == 4 for tensor in tensors):
            return plain(tensors, split_sizes, group)
        torch_group = process_group_of(group)
        with telling(torch_group, tensors[0], "dispatch"):
            for tensor in tensors:
                exchange.require_dense(tensor)
            expected = (split_sizes[group.rank], group.world_size)
            if any(tuple(tensor.shape[:2]) != expected for tensor in tensors):
                raise ValueError(f"packed Ulysses inputs must be [{expected[0]}, {expected[1]}, heads, dim]")
            layout = _layout(split_sizes, group)
        wire = packed_wire(tensors)
        if wire is None:
            return plain([tensor.flatten(1, 2) for tensor in tensors], split_sizes, group)
        fused = exchange.dispatch_shards(wire, torch_group, layout)
        return list(torch.split(fused, [tensor.shape[2] for tensor in tensors], dim=1))

    return scatter_heads_gather_seqlen


def make_scatter_seqlen_gather_head_shards(parallel: ModuleType, stock: Function) -> Function:
    def scatter_seqlen_gather_head_shards(tensor: Tensor, split_sizes: Sequence[int], group: Any = None) -> Tensor:
        """Return the attention output, `[sum(S_r), H, D] -> [S_rank, ranks, H, D]`, without unpacking it."""
        group = group or parallel.get_magi2_ulysses_group()
        torch_group = process_group_of(group)
        with telling(torch_group, tensor, "return"):
            exchange.require_dense(tensor)
            if tensor.ndim != 3 or sum(split_sizes) != tensor.shape[0]:
                raise ValueError(f"expected [{sum(split_sizes)}, heads, dim], got {list(tensor.shape)}")
            layout = _layout(split_sizes, group)
        return exchange.undispatch_shards(tensor, torch_group, layout)

    return scatter_seqlen_gather_head_shards


# How the layer that is being computed has split the tokens over the Ulysses group; None outside of a layer.
_token_split: ContextVar[Any] = ContextVar("headpar_token_split", default=None)


def make_layer_forward(stock: Function) -> Function:
    @functools.wraps(stock)
    def forward(
        self: Any,
        hidden_states: Tensor,
        rope: Tensor,
        varlen_handler: Any,
        modality_dispatcher: Any,
        cp_split_sizes: Any,
    ) -> Tensor:
        if torch.compiler.is_compiling():  # the MoE layer's stock forward is what is traced then
            traced: Tensor = stock(self, hidden_states, rope, varlen_handler, modality_dispatcher, cp_split_sizes)
            return traced
        held = _token_split.set(cp_split_sizes)
        try:
            output: Tensor = stock(self, hidden_states, rope, varlen_handler, modality_dispatcher, cp_split_sizes)
            return output
        finally:
            _token_split.reset(held)

    return forward


def known_counts(parallel: ModuleType, group: Any, local_tokens: int) -> tuple[int, ...] | None:
    """The token counts that the layer's split already tells, or None where it does not tell this group's.

    The experts may be spread over fewer ranks than the tokens: the split tells of those ranks too.
    All ranks come to the same answer: it depends on the groups and the split alone, which are the same for all.

    Raises:
        ValueError: the split tells of this group and contradicts the local length.
    """
    split = _token_split.get()
    ulysses = parallel.get_magi2_ulysses_group()
    if type(split) is not list or len(split) != ulysses.world_size or not all(type(size) is int for size in split):
        return None
    places = _places_within(ulysses, group)
    if places is None:
        return None
    if split[ulysses.rank] != local_tokens:
        raise ValueError(
            f"the layer's token split {split} gives rank {ulysses.rank} {split[ulysses.rank]} tokens, "
            f"but its MoE input has {local_tokens}"
        )
    return tuple(split[place] for place in places)


def _places_within(ulysses: Any, group: Any) -> Sequence[int] | None:
    """Each rank of a group as a rank of the Ulysses group; None where one of them, or this one, is not there."""
    if ulysses.group is group.group and (ulysses.world_size, ulysses.rank) == (group.world_size, group.rank):
        return range(group.world_size)
    if group.world_size >= ulysses.world_size:
        return None
    wide, narrow = (dist.get_process_group_ranks(process_group_of(each)) for each in (ulysses, group))
    places = [wide.index(rank) if rank in wide else None for rank in narrow]
    if None in places or places[group.rank] != ulysses.rank:
        return None
    return [place for place in places if place is not None]


@lru_cache(maxsize=64)
def real_head_counts(heads: int, heads_per_rank: int, ranks: int) -> tuple[int, ...] | None:
    """The host's padded head shards, clipped to the heads that there are; None where no shard is padded.

    12 heads in shards of 2 on 8 ranks: (2, 2, 2, 2, 2, 2, 0, 0).
    """
    if heads == heads_per_rank * ranks:
        return None
    return tuple(min(heads_per_rank, max(0, heads - rank * heads_per_rank)) for rank in range(ranks))


def make_moe_forward(stock: Function, parallel: ModuleType, mh_moe: ModuleType) -> Function:
    # The forward below goes past these two. If someone lays a patch over them later, it must not be lost.
    gone_past = (mh_moe.ep_dispatch, mh_moe.ep_undispatch)

    @functools.wraps(stock)
    def forward(self: Any, x: Tensor) -> Tensor:
        group = self.ep_group
        patched_over = (mh_moe.ep_dispatch, mh_moe.ep_undispatch) != gone_past
        traced = torch.compiler.is_compiling()
        if group.world_size == 1 or group.replicated_sequence or patched_over or traced:
            output: Tensor = stock(self, x)
            return output
        torch_group = process_group_of(group)
        x_heads = x.view(-1, self.num_heads, self.d_head)
        with telling(torch_group, x, "dispatch"):
            counts = known_counts(parallel, group, x_heads.shape[0])
            if counts is None:
                counts = exchange.discover_counts(x_heads.shape[0], torch_group, x.device)
            layout = _layout(counts, group, real_head_counts(self.num_heads, self.local_num_heads, group.world_size))
        # With zero heads behind the real ones, as the host pads before the exchange.
        routed = exchange.dispatch((x_heads,), torch_group, layout, x.dtype, room=self.local_num_heads)
        if self.has_real_moe_heads:
            routed = self._local_forward(routed)
        if layout.head_counts is not None:
            routed = routed[:, : layout.head_counts[group.rank]]
        combined = exchange.undispatch(routed, torch_group, layout, self.num_heads)
        return combined.view(-1, self.num_heads * self.d_head)

    return forward


def _replace_function(
    record: str, name: str, fingerprint: str, signature: str, user: str, make: Maker
) -> Callable[[], list[Binding]]:
    """Bindings of a function of `parallel`, there and wherever it was imported by name.

    It only moves data: with another body than the known one it is taken on trial.
    """

    def bindings() -> list[Binding]:
        parallel = require_stock_wrappers()
        trial = None
        try:
            _, _, original = stock_function(parallel, name, signature, fingerprint)
        except Refused:
            _, _, original = stock_function(parallel, name, signature, None)
            trial = Trial(record)
        importer = load(f"{MAGI2}.{user}")
        importers = imports_of(original, MAGI2)
        if not any(module is importer for module, _ in importers):
            found = getattr(importer, name, "nothing of that name")
            raise Refused(f"{importer.__name__} does not use {parallel.__name__}.{name}, but {found!r}")
        return _bind(parallel, original, make(parallel, original), trial)

    return bindings


def _take_on_trial(
    record: str, name: str, signatures: Sequence[str], make: Maker, otherwise: Callable[[], list[Binding]] | None
) -> Callable[[], list[Binding]]:
    """Bindings of an attention function of hosts with the exchange module, whose attention does without that.

    Args:
        signatures: any of them will do.
        otherwise: what other hosts get; None where they have no such function.
    """

    def bindings() -> list[Binding]:
        if not host_has_module():
            if otherwise is None:
                raise NotNeeded(f"this host's MAGI-2 has no {name}")
            return otherwise()
        load_users()
        parallel = sys.modules.get(f"{MAGI2}.parallel")
        if parallel is None or name not in vars(parallel):
            raise NotNeeded(
                f"this host's MAGI-2 has no {name}: its attention goes through the plugin only where it calls the "
                "exchange module"
            )
        reasons = [why_not_stock(vars(parallel)[name], parallel, signature, None) for signature in signatures]
        if None not in reasons:
            raise Refused(f"{parallel.__name__}.{name} cannot be taken on trial: {reasons[0]}")
        original = vars(parallel)[name]
        return _bind(parallel, original, make(parallel, original), Trial(record))

    return bindings


def _bind(parallel: ModuleType, original: Function, replacement: Function, trial: Trial | None) -> list[Binding]:
    if trial is not None:
        is_moe = original.__name__ in _EP_FINGERPRINTS
        default = "get_magi2_ep_group" if is_moe else "get_magi2_ulysses_group"
        replacement = trying(
            trial, original, replacement, lambda group: group or getattr(parallel, default)(), process_group_of
        )
    return [Binding(module, name, original, replacement, trial) for module, name in imports_of(original, MAGI2)]


def _layer_split() -> list[Binding]:
    require_stock_wrappers()
    _require_no_counts_parameter(load(f"{MAGI2}.mh_moe"))
    owner, name, original = stock_function(
        load(f"{MAGI2}.modeling_magi2"),
        "Magi2TransformerLayer.forward",
        "(self, hidden_states, rope, varlen_handler, modality_dispatcher, cp_split_sizes)",
        None,
    )
    return [Binding(owner, name, original, make_layer_forward(original))]


def _moe_forward() -> list[Binding]:
    parallel = require_stock_wrappers()
    mh_moe = load(f"{MAGI2}.mh_moe")
    owner, name, original = stock_function(mh_moe, "Magi2MultiHeadMoE.forward", "(self, x)", "dd7b8587f8f84245")
    for helper, fingerprint in _EP_FINGERPRINTS.items():
        used = getattr(mh_moe, helper, None)
        used = getattr(used, "headpar_stock", used)  # on trial: its body is not known
        foreign = why_not_stock(used, parallel, _EP_SIGNATURE, fingerprint)
        # A wrapper may claim any module as its own, but its globals tell where it was written.
        if foreign is not None and getattr(used, "__globals__", None) is not globals():
            raise Refused(f"{mh_moe.__name__}.{helper}, which it would go past, is another's: {foreign}")
    return [Binding(owner, name, original, make_moe_forward(original, parallel, mh_moe))]


def _require_no_counts_parameter(mh_moe: ModuleType) -> None:
    forward = getattr(getattr(mh_moe, "Magi2MultiHeadMoE", None), "forward", None)
    code = getattr(forward, "__code__", None)
    if code is not None and "sequence_split_sizes" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        raise NotNeeded("this host's MoE layer takes sequence_split_sizes itself")


_EP_SIGNATURE = "(tensor, group=None, sequence_split_sizes=None)"
_SIGNATURES = {
    "ep_dispatch": _EP_SIGNATURE,
    "ep_undispatch": _EP_SIGNATURE,
    "scatter_heads_gather_seqlen": "(tensors, split_sizes, group=None)",
    "scatter_seqlen_gather_heads": "(tensor, split_sizes, group=None)",
}
_EP_FINGERPRINTS = {"ep_dispatch": "b17c2f13713e39c0", "ep_undispatch": "b3f09ecb14ac1e99"}
_HOSTS = "vLLM-Omni 0.30.0, and versions without the exchange module whose function is still the same"
_ALSO_ON_TRIAL = "; with the expected signature and another body, on trial"
_UNTIL = "a vLLM-Omni with vllm_omni.diffusion.distributed.head_parallel"


def _wrapper_record(name: str, function: str, user: str, fingerprint: str, make: Maker, why: str, how: str) -> Record:
    """The record of a function of `parallel` that one of MAGI-2's modules imports by name and calls."""
    return Record(
        name=name,
        replaces=f"{MAGI2}.parallel:{function}",
        why=why,
        how=f"same checks and messages{how}; rebound in {user}",
        hosts=_HOSTS + _ALSO_ON_TRIAL,
        until=_UNTIL,
        bindings=_replace_function(name, function, fingerprint, _SIGNATURES[function], user, make),
    )


def _attention_record(*known: Any, make_newer: Maker | None = None, **told: Any) -> Record:
    """The same for attention's functions, which are taken on trial on hosts with the exchange module too."""
    record = _wrapper_record(*known, **told)
    name, function, make = record.name, known[1], make_newer or known[4]
    return replace(
        record,
        hosts=f"{record.hosts}; also on development versions with that module",
        bindings=_take_on_trial(name, function, (_SIGNATURES[function],), make, record.bindings),
    )


RECORDS = (
    _wrapper_record(
        "magi2.ep_dispatch",
        "ep_dispatch",
        "mh_moe",
        _EP_FINGERPRINTS["ep_dispatch"],
        make_ep_dispatch,
        why="MoE dispatch uses the exchange that suits the backend, and packs with one copy",
        how=" and count discovery, then the exchange",
    ),
    _wrapper_record(
        "magi2.ep_undispatch",
        "ep_undispatch",
        "mh_moe",
        _EP_FINGERPRINTS["ep_undispatch"],
        make_ep_undispatch,
        why="MoE return uses the exchange that suits the backend",
        how=" and equal-split default, then the exchange",
    ),
    Record(
        name="magi2.known_counts",
        replaces=f"{MAGI2}.modeling_magi2:Magi2TransformerLayer.forward",
        why="a MoE layer needs no collective and no host sync to learn counts that the transformer knows",
        how="wraps the forward, same signature, and holds cp_split_sizes for the time of the call",
        hosts=_HOSTS,
        until="a vLLM-Omni whose MoE layer takes sequence_split_sizes",
        bindings=_layer_split,
    ),
    Record(
        name="magi2.moe_forward",
        replaces=f"{MAGI2}.mh_moe:Magi2MultiHeadMoE.forward",
        why="head counts that the ranks do not divide send no zero heads and need no padded copy",
        how="uses the held counts where they describe its group, and sends each rank its real heads only; "
        "pads after the transfer; tensor parallelism and single ranks go to the stock forward",
        hosts=_HOSTS,
        until="a vLLM-Omni that passes known counts and does not pad",
        bindings=_moe_forward,
    ),
    _attention_record(
        "magi2.attention_dispatch",
        "scatter_heads_gather_seqlen",
        "attention",
        "4a3bc4625f8fbae3",
        make_scatter_heads_gather_seqlen,
        why="Q, K and V are copied once, straight into place, instead of packed and then concatenated",
        how=", then one exchange of three tensors",
        make_newer=make_scatter_packed_heads,
    ),
    _attention_record(
        "magi2.attention_return",
        "scatter_seqlen_gather_heads",
        "attention",
        "e20b9d68b01e929a",
        make_scatter_seqlen_gather_heads,
        why="attention's return uses the exchange that suits the backend",
        how=", then the exchange; contiguous also with one local head, where stock leaves a permuted view",
    ),
    Record(
        name="magi2.attention_shards",
        replaces=f"{MAGI2}.parallel:scatter_seqlen_gather_head_shards",
        why="attention's return uses the exchange that suits the backend, and is not unpacked",
        how="the exchange into the buffer that the result is a view of; on trial",
        hosts="vLLM-Omni development versions with that function",
        until="a vLLM-Omni whose attention uses its exchange module",
        bindings=_take_on_trial(
            "magi2.attention_shards",
            "scatter_seqlen_gather_head_shards",
            ("(tensor, split_sizes, group=None)", "(tensor, split_sizes, group)"),
            make_scatter_seqlen_gather_head_shards,
            None,
        ),
    ),
)
