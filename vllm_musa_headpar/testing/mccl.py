"""A simulated MCCL: process group "mccl" for the simulated MUSA device, carried by Gloo.

It moves the bytes that MCCL would move and refuses what MCCL does not take, or would hang on. Every
breach is an `MCCLRuleError` that names its rule:

    element type     MCCL takes a fixed list of types, which depends on the architecture
    device           tensors must be on the group's device
    contiguous       MCCL sends elements from the data pointer on, whatever the strides
    disjoint         buffers that one launch writes must not overlap its others
    first batch      all ranks take part in a group's first batch, unless a collective ran before
    matched          each send has its receive, of the same type and count, in order per pair of ranks
    always batch     a lone isend or irecv would build a communicator for its pair
    wait first       buffers in flight are not touched before wait() (see `musa.begin_flight`)
    no host sync     see `musa.forbid_host_sync`

Ranks tell each other what they are about to send and receive through the group's store before they
transfer anything, and wait for each other's word a bounded time only, so that a mistake is an error on the
rank that waits, not a hang. That makes a launch block until its peers have launched; on the device only
the stream would wait.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from vllm_musa_headpar.implementations import p2p
from vllm_musa_headpar.testing import musa
from vllm_musa_headpar.testing.musa import HostSyncError, MCCLRuleError

__all__ = ["HostSyncError", "MCCLGroup", "MCCLRuleError", "create", "install", "without_coalescing"]

# Element type -> the first architecture on which MCCL takes it. From torch_musa's ProcessGroupMCCL.
_ELEMENT_TYPES = {
    torch.float32: 0,
    torch.float16: 0,
    torch.float64: 0,
    torch.int8: 0,
    torch.uint8: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.bool: 0,
    torch.bfloat16: 22,
    torch.float8_e4m3fn: 31,
    torch.float8_e5m2: 31,
}
# torch's stubs overload nearly every method of a group, and miss some.
_ProcessGroup: Any = dist.ProcessGroup
# Tags of the simulator's messages start here: those of CPU tensors on a mixed group are small.
_FIRST_TAG = 1 << 24


@dataclass
class _Settings:
    architecture: int = 31
    coalescing: bool = True
    patience: timedelta = timedelta(seconds=20)


_settings = _Settings()
_installed = False


def install(
    *, architecture: int | None = None, coalescing: bool | None = None, patience: timedelta | None = None
) -> None:
    """Make backend "mccl" and device "musa" known to torch in this process.

    Calling it again changes the given settings only.

    Args:
        architecture: of the device, 31 (MTT S5000) at first; decides which element types MCCL takes.
        coalescing: whether `batch_isend_irecv` is one grouped launch, true at first.
        patience: how long a rank waits for the others' word before it calls it a breach; 20 s at first.
    """
    global _installed
    if architecture is not None:
        _settings.architecture = architecture
    if coalescing is not None:
        _settings.coalescing = coalescing
    if patience is not None:
        _settings.patience = patience
    if _installed:
        return
    _installed = True
    musa.install()
    dist.Backend.register_backend("mccl", create, devices=["musa"])
    _wrap_batch()


@contextlib.contextmanager
def without_coalescing() -> Iterator[None]:
    """Inside the block the backend cannot group point-to-point operations."""
    before, _settings.coalescing = _settings.coalescing, False
    try:
        yield
    finally:
        _settings.coalescing = before


def create(store: Store, rank: int, size: int, timeout: timedelta) -> MCCLGroup:
    """The group that torch asks for; the signature is that of `Backend.register_backend`."""
    return MCCLGroup(store, rank, size, timeout)


def _wrap_batch() -> None:
    """Let a batch on an `MCCLGroup` be one launch with one Work, as it is on a coalescing backend.

    torch never coalesces on a group written in Python: it calls `send` and `recv` one by one. The group
    collects those calls, so whatever else wraps `batch_isend_irecv`, before or after, still sees the call.
    """
    inner = dist.batch_isend_irecv

    @functools.wraps(inner)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group if p2p_op_list else None
        if not (isinstance(group, MCCLGroup) and group.coalesces(p2p_op_list[0].tensor)):
            return inner(p2p_op_list)
        with group.collect() as messages:
            inner(p2p_op_list)
        return [group.launch(messages)]

    p2p.GROUPED.add(MCCLGroup)
    dist.batch_isend_irecv = batch_isend_irecv
    distributed_c10d.batch_isend_irecv = batch_isend_irecv


@dataclass
class _Message:
    """One send or receive of a grouped launch. `peer` is a rank in the group."""

    is_send: bool
    tensor: torch.Tensor
    peer: int

    @property
    def bytes(self) -> torch.Tensor:
        """The elements as a 1-D uint8 CPU tensor that shares their memory."""
        return _bytes(self.tensor)

    @property
    def signature(self) -> str:
        return f"{self.tensor.numel()} x {str(self.tensor.dtype).removeprefix('torch.')}"


@dataclass
class _Mail:
    """What this rank and one peer have told each other so far."""

    posted: int = 0  # notes that this rank has written for the peer
    read: int = 0  # notes of the peer that this rank has read
    sends: collections.deque[str] = field(default_factory=collections.deque)  # the peer's, not matched yet
    receives: collections.deque[str] = field(default_factory=collections.deque)
    sent: int = 0  # messages to the peer
    received: int = 0  # messages from the peer


@dataclass
class _Transfer:
    """A launch: the Gloo works that carry it, and the buffers that it holds."""

    works: list[Any]
    flight: musa.Flight
    dropped: bool = False


class MCCLWork(dist.Work):
    """The one handle of a launch."""

    def __init__(self, group: MCCLGroup, transfer: _Transfer) -> None:
        super().__init__()
        self._group = group
        self._transfer = transfer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order everything that follows after the transfer. With a timeout, MCCL blocks the host."""
        if timeout:
            musa.host_sync("Work.wait(timeout)")
        self._group.finish(self._transfer)
        return True

    def is_completed(self) -> bool:
        return not self._transfer.works

    def is_success(self) -> bool:
        return self.is_completed()

    def __del__(self) -> None:
        self._transfer.dropped = True


class _BackendView:
    """What programs ask of a group's backend for a device."""

    def __init__(self, timeout: timedelta) -> None:
        self.options = _Options(timeout)

    @property
    def supports_coalescing(self) -> bool:
        return _settings.coalescing

    def name(self) -> str:
        return "mccl"


@dataclass
class _Options:
    _timeout: timedelta


class MCCLGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that enforces MCCL's rules and moves bytes with Gloo."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = PrefixStore("mccl-rules", store)
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._timeout = timeout
        self._names = {"group_name": "", "group_desc": ""}
        self._connected = False  # whether all ranks have built the communicator
        self._mail = [_Mail() for _ in range(size)]
        self._collected: list[_Message] | None = None
        self._transfers: list[_Transfer] = []

    # --- What torch and programs ask ---

    def getBackendName(self) -> str:
        return "mccl"

    # torch keeps name and description in its own backends, which a group written in Python has none of.
    def _set_group_name(self, name: str) -> None:
        self._names["group_name"] = name

    def _set_group_desc(self, description: str) -> None:
        self._names["group_desc"] = description

    @property
    def group_name(self) -> str:
        return self._names["group_name"]

    @property
    def group_desc(self) -> str:
        return self._names["group_desc"]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("musa")] + [torch.device("cpu")] * self._takes_cpu()

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu":
            if self._takes_cpu():
                return self._gloo
            raise RuntimeError("No backend type associated with device type cpu")
        return _BackendView(self._timeout)

    def coalesces(self, tensor: torch.Tensor) -> bool:
        """Whether a batch that starts with this tensor is grouped into one launch."""
        return _settings.coalescing and not self._is_gloos(tensor)

    def shutdown(self) -> None:
        for transfer in self._transfers:
            musa.end_flight(transfer.flight)
        self._transfers.clear()

    def abort(self) -> None:
        self.shutdown()

    def _takes_cpu(self) -> bool:
        return "cpu:gloo" in dist.get_backend_config(self)

    def _is_gloos(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self._takes_cpu()

    # --- Point to point ---

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._single(_Message(True, tensors[0], peer), tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._single(_Message(False, tensors[0], peer), tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        raise MCCLRuleError("matched", "MCCL cannot receive from any source, name the sending rank")

    def _single(self, message: _Message, tag: int) -> Any:
        if self._collected is not None:
            self._collected.append(message)
            return None
        if self._is_gloos(message.tensor):
            call = self._gloo.send if message.is_send else self._gloo.recv
            return call([message.tensor], message.peer, tag)
        name = "isend" if message.is_send else "irecv"
        raise MCCLRuleError(
            "always batch", f"a lone {name} builds a communicator for ranks {self.rank()} and {message.peer}"
        )

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[_Message]]:
        """Inside the block `send` and `recv` are not carried out but collected."""
        messages: list[_Message] = []
        self._collected = messages
        try:
            yield messages
        finally:
            self._collected = None

    def launch(self, messages: Sequence[_Message]) -> MCCLWork:
        """Carry out a batch as one grouped launch."""
        sends = [message for message in messages if message.is_send]
        receives = [message for message in messages if not message.is_send]
        reads, writes = [message.tensor for message in sends], [message.tensor for message in receives]
        self._check(reads, writes)
        self._meet_for_first_batch()
        return self._work(reads, writes, self._exchange(sends, receives))

    def _meet_for_first_batch(self) -> None:
        if self._connected:
            return
        self._store.set(f"first/{self.rank()}", "here")
        keys = [f"first/{rank}" for rank in range(self.size())]
        if not self._within_patience(*keys):
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise MCCLRuleError(
                "first batch",
                f"rank(s) {absent} take no part in the first batch of a group of {self.size()} on which no "
                "collective ran before",
            )
        self._connected = True

    def _exchange(self, sends: list[_Message], receives: list[_Message]) -> list[Any]:
        """Match all messages with the peers' and start them. Returns the Gloo works."""
        self._match(sends, receives)
        works = []
        with _quietly():
            here = [message for message in receives if message.peer == self.rank()]
            own = [message for message in sends if message.peer == self.rank()]
            for source, target in zip(own, here, strict=True):
                target.bytes.copy_(source.bytes)
            for message in receives:
                if message.peer != self.rank():
                    mail = self._mail[message.peer]
                    mail.received += 1
                    if message.tensor.numel():
                        tag = _FIRST_TAG + mail.received
                        works.append(self._gloo.recv([message.bytes], message.peer, tag))
            for message in sends:
                if message.peer != self.rank():
                    mail = self._mail[message.peer]
                    mail.sent += 1
                    if message.tensor.numel():
                        works.append(self._gloo.send([message.bytes], message.peer, _FIRST_TAG + mail.sent))
        return works

    def _match(self, sends: list[_Message], receives: list[_Message]) -> None:
        for peer in sorted({message.peer for message in (*sends, *receives)}):
            note = {
                "sends": [message.signature for message in sends if message.peer == peer],
                "receives": [message.signature for message in receives if message.peer == peer],
            }
            mail = self._mail[peer]
            self._store.set(f"{self.rank()}>{peer}/{mail.posted}", json.dumps(note))
            mail.posted += 1
        for message in (*sends, *receives):
            theirs = self._next_from(message)
            if theirs != message.signature:
                raise MCCLRuleError("matched", self._story(message, f"{theirs}"))

    def _next_from(self, message: _Message) -> str:
        """The peer's counterpart of a message of this rank, as a signature."""
        mail = self._mail[message.peer]
        queue = mail.receives if message.is_send else mail.sends
        while not queue:
            key = f"{message.peer}>{self.rank()}/{mail.read}"
            caught_up = message.peer == self.rank() and mail.read == mail.posted
            if caught_up or not self._within_patience(key):
                raise MCCLRuleError("matched", self._story(message, "nothing"))
            note = json.loads(self._store.get(key))
            mail.read += 1
            mail.sends.extend(note["sends"])
            mail.receives.extend(note["receives"])
        return queue.popleft()

    def _story(self, message: _Message, theirs: str) -> str:
        mine, their = ("sends", "receives") if message.is_send else ("receives", "sends")
        where = "to" if message.is_send else "from"
        return f"rank {self.rank()} {mine} {message.signature} {where} rank {message.peer}, which {their} {theirs}"

    def _within_patience(self, *keys: str) -> bool:
        try:
            self._store.wait(list(keys), min(_settings.patience, self._timeout))
        except RuntimeError:  # torch's DistStoreError and its elders are RuntimeErrors
            return False
        return True

    # --- Completion ---

    def _work(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], works: Sequence[Any]) -> MCCLWork:
        flight = musa.begin_flight([musa.raw_of(t) for t in reads], [musa.raw_of(t) for t in writes])
        transfer = _Transfer(list(works), flight)
        self._transfers.append(transfer)
        return MCCLWork(self, transfer)

    def finish(self, transfer: _Transfer) -> None:
        """Complete a transfer and, as they are on one stream, all that were launched before it.

        Buffers of earlier transfers stay guarded while somebody still holds their handle.
        """
        if transfer not in self._transfers:
            return
        for earlier in self._transfers[: self._transfers.index(transfer) + 1]:
            while earlier.works:
                self._complete(earlier.works[0])
                del earlier.works[0]
            if earlier is transfer or earlier.dropped:
                musa.end_flight(earlier.flight)
                self._transfers.remove(earlier)

    def _complete(self, work: Any) -> None:
        try:
            work.wait(min(_settings.patience, self._timeout))
        except RuntimeError as error:
            raise MCCLRuleError(
                "matched", f"a message of rank {self.rank()} was not completed by its peer: {error}"
            ) from error

    # --- Collectives ---

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        """One group of sends and receives, the own block included, zero counts left out."""
        if self._is_gloos(input):
            return self._gloo.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
        self._check([input], [output])
        return self.alltoall(
            _blocks(output, output_split_sizes, self.size()),
            _blocks(input, input_split_sizes, self.size()),
            opts,
        )

    alltoall_base = all_to_all_single  # its name before torch 2.12

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if self._is_gloos(inputs[0]):
            return self._gloo.alltoall(outputs, inputs, opts)
        self._check(inputs, outputs)
        sends = [_Message(True, tensor, peer) for peer, tensor in enumerate(inputs) if tensor.numel()]
        receives = [_Message(False, tensor, peer) for peer, tensor in enumerate(outputs) if tensor.numel()]
        self._connected = True
        return self._collective(inputs, outputs, self._exchange(sends, receives), opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if self._is_gloos(tensors[0]):
            return self._gloo.allreduce(tensors, opts)
        self._check([], tensors)
        raws = [musa.raw_of(tensor) for tensor in tensors]
        # MCCL reduces booleans as bytes.
        raws = [raw.view(torch.uint8) if raw.dtype == torch.bool else raw for raw in raws]
        return self._by_gloo([], tensors, opts, lambda: self._gloo.allreduce(raws, opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        if self._is_gloos(tensors[0]):
            return self._gloo.broadcast(tensors, opts)
        self._check([], tensors)
        raws = [_bytes(tensor) for tensor in tensors]
        return self._by_gloo([], tensors, opts, lambda: self._gloo.broadcast(raws, opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if self._is_gloos(inputs[0]):
            return self._gloo.allgather(outputs, inputs, opts)
        self._check(inputs, outputs[0])
        return self._by_gloo(inputs, outputs[0], opts, lambda: self._gather(outputs[0], inputs[0]))

    def _gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        sizes = {output.numel() for output in outputs}
        targets = [_bytes(output) for output in outputs]
        if len(sizes) == 1:
            return self._gloo.allgather([targets], [_bytes(tensor)])
        # As NCCL's group does it for unequal sizes: one broadcast from every rank.
        targets[self.rank()].copy_(_bytes(tensor))
        for rank, target in enumerate(targets):
            options = distributed_c10d.BroadcastOptions()
            options.rootRank = rank
            self._gloo.broadcast([target], options).wait()
        return None

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        if self._is_gloos(input):
            return self._gloo._allgather_base(output, input, opts)
        self._check([input], [output])
        if output.numel() != self.size() * input.numel():
            raise ValueError(f"output of {output.numel()} elements cannot hold {self.size()} x {input.numel()}")
        targets = list(_bytes(output).chunk(self.size())) if input.numel() else []
        return self._by_gloo(
            [input],
            [output],
            opts,
            lambda: self._gloo.allgather([targets], [_bytes(input)]) if targets else None,
        )

    _allgather_base = all_gather_single  # its name before torch 2.12

    def barrier(self, opts: Any = None) -> Any:
        musa.host_sync("barrier")
        self._connected = True
        return self._by_gloo([], [], opts, lambda: self._gloo.barrier())

    def _by_gloo(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], opts: Any, run: Any) -> Any:
        """Run a collective of Gloo on CPU memory, to its end."""
        self._connected = True
        with _quietly():
            work = run()
            if work is not None:
                work.wait()
        return self._collective(reads, writes, [], opts)

    def _collective(
        self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], works: Sequence[Any], opts: Any
    ) -> MCCLWork:
        work = self._work(reads, writes, works)
        if not getattr(opts, "asyncOp", False):
            work.wait()
        return work

    # --- Rules on what is handed over ---

    def _check(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        for tensor in (*reads, *writes):
            _check_tensor(tensor)
        raw_reads, raw_writes = [[musa.raw_of(t) for t in tensors] for tensors in (reads, writes)]
        for raw in raw_reads:
            musa.check_access(raw, False, "a send")
        for position, raw in enumerate(raw_writes):
            musa.check_access(raw, True, "a receive")
            others = raw_reads + raw_writes[:position]
            if any(musa.overlap(raw, other) for other in others):
                raise MCCLRuleError("disjoint", "a launch receives into memory that it also uses elsewhere")


def _check_tensor(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, musa.MusaTensor):
        raise MCCLRuleError("device", f"a group for musa was given a tensor on {tensor.device}")
    if _ELEMENT_TYPES.get(tensor.dtype, _settings.architecture + 1) > _settings.architecture:
        raise MCCLRuleError(
            "element type", f"MCCL on architecture {_settings.architecture} does not take {tensor.dtype}"
        )
    if not tensor.is_contiguous():
        raise MCCLRuleError("contiguous", f"tensor of shape {list(tensor.shape)} has strides {list(tensor.stride())}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous device tensor as the 1-D uint8 CPU tensor that shares its memory."""
    return musa.raw_of(tensor).view(-1).view(torch.uint8)


def _blocks(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """The rows of a tensor for each rank; no sizes means equal shares."""
    if not sizes:
        if tensor.size(0) % ranks:
            raise ValueError(f"{tensor.size(0)} rows cannot be split equally over {ranks} ranks")
        sizes = [tensor.size(0) // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != tensor.size(0):
        raise ValueError(f"split sizes {list(sizes)} do not fit {tensor.size(0)} rows and {ranks} ranks")
    with _quietly():
        return list(torch.split(tensor, list(sizes)))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Work on CPU memory that no counter and no autograd sees; inference tensors may be written."""
    with _disable_current_modes(), torch.inference_mode():
        yield
