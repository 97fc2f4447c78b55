"""Models the CPU as a device with streams: records each use of its memory, and the reuse of freed memory by others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stream_model import Clock, Queue
from torchrec_embcache import _native
from torchrec_embcache._device import host_copies, streams, tier
from torchrec_embcache._device import pinned as pinned_memory
from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache._kernels import core
from torchrec_embcache._kernels.triton import launch
from torchrec_embcache._kernels.triton_backend import TritonRowMover
from torchrec_embcache._lookup import group


class Memory:
    """The memory of a tensor: device memory, with the `queue` (stream) that allocated it, or pinned memory."""

    def __init__(self, name: str, tensor: torch.Tensor, queue: Queue | None) -> None:
        storage = tensor.untyped_storage()
        self.name = name
        self.queue = queue
        self._storage = StorageWeakRef(storage)
        self._begin, self._bytes = storage.data_ptr(), storage.nbytes()
        self.told: set[Queue] = set()  # streams passed to `record_stream`
        self.copies: set[int] = set()  # copies from or to pinned memory that torch knows

    def has(self, address: int) -> bool:
        """True if the memory contains an address."""
        return self._begin <= address < self._begin + self._bytes

    def is_free(self) -> bool:
        """True if no tensor or array refers to it."""
        return self._storage.expired()

    def free_after(self) -> set[int]:
        """The work items that finish before torch reuses the memory.

        For device memory: the work queued until it was freed, on the allocating stream and on those passed to `record_stream`. For
        pinned memory: the copies that torch knows.
        """
        queues = {self.queue, *self.told} if self.queue is not None else set()
        return self.copies.union(*(queue.last() for queue in queues if queue is not None))


class Model:
    """The streams, the memory, and its uses. All CPU threads count as one, as if they waited for each other."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.compute, self.other = Queue(self.clock), Queue(self.clock)
        self.names: list[str] = []  # of all memory ever allocated
        self._queues: list[Queue | None] = []
        self._now = [self.compute]
        self._memories: list[Memory] = []
        self._lock = threading.RLock()

    @property
    def now(self) -> Queue:
        """The current stream of the caller."""
        return self._now[-1]

    @contextmanager
    def on(self, queue: Queue) -> Iterator[None]:
        """Makes `queue` the current stream in a `with` block."""
        self._now.append(queue)
        try:
            yield
        finally:
            self._now.pop()

    # ---- torch's module of the device

    def Stream(self, _device: torch.device) -> Queue:  # noqa: N802 - torch's name
        """A new stream."""
        return Queue(self.clock)

    def current_stream(self, _device: torch.device) -> Queue:
        """The caller's stream."""
        return self.now

    def device(self, _device: torch.device) -> AbstractContextManager[None]:
        """Does nothing, because there is one device."""
        return nullcontext()

    def stream(self, queue: Queue) -> AbstractContextManager[None]:
        """See `on`."""
        return self.on(queue)

    # ---- memory

    def allocate(self, name: str, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """Records the memory that torch allocates for a tensor: device memory on the caller's stream, or pinned memory."""
        with self._lock:
            self.sweep()
            self.names.append(name)
            self._queues.append(None if pinned else self.now)
            self._memories.append(Memory(f"{name} {len(self.names)}", tensor, self._queues[-1]))

    def allocated_on(self, name: str) -> set[Queue | None]:
        """The streams on which memory with this name was ever allocated."""
        return {queue for other, queue in zip(self.names, self._queues, strict=True) if other == name}

    def sweep(self) -> None:
        """Simulates reuse of freed memory: another user writes to it as soon as torch permits.

        No other work is ordered after that write, because its speed differs between runs.
        """
        with self._lock:
            for memory in [memory for memory in self._memories if memory.is_free()]:
                self._memories.remove(memory)
                self.clock.note(memory.free_after(), memory.name, None, True)

    def live(self) -> list[str]:
        """The names of the memory in use."""
        self.sweep()
        return [memory.name.rpartition(" ")[0] for memory in self._memories]

    def _memory_at(self, address: int) -> Memory | None:
        with self._lock:
            self.sweep()
            return next((memory for memory in self._memories if memory.has(address)), None)

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """The memory of a tensor; None for unpinned CPU memory."""
        return self._memory_at(tensor.data_ptr())

    # ---- uses

    def use(self, tensor: torch.Tensor, slots: list[int] | None, *, writes: bool) -> None:
        """Records work on the caller's stream that uses rows of a device tensor."""
        self.use_address(tensor.data_ptr(), slots, writes=writes)

    def use_address(self, address: int, slots: list[int] | None, *, writes: bool) -> None:
        """Records work on the caller's stream that uses rows of the tensor at an address."""
        with self._lock:
            memory = self._memory_at(address)
            assert memory is not None, "it is on the device"
            self.now.put(memory.name, slots, writes)

    def use_if_known(self, tensor: torch.Tensor, slots: list[int], *, writes: bool) -> None:
        """Like `use`, but ignores tensors that are not on the device, such as a batch's inputs."""
        if self.memory_of(tensor) is not None:
            self.use(tensor, slots, writes=writes)

    def use_tier(self, tier: DeviceTier, slots: list[int] | None, *, writes: bool) -> None:
        """Records work on the caller's stream that uses slots of a tier."""
        for part in parts_of(tier):
            self.use(part, slots, writes=writes)

    def use_by_cpu(self, array: np.ndarray[Any, Any], *, writes: bool) -> None:
        """Records that the CPU reads or writes an array, if the model knows its memory."""
        with self._lock:
            memory = self._memory_at(array.__array_interface__["data"][0])
            if memory is not None:
                assert memory.queue is None, "the CPU has no way to the device's memory"
                self.clock.by_cpu(memory.name, writes)

    def copied(self, to: torch.Tensor, source: torch.Tensor, *, waits: bool) -> None:
        """Records a copy. It is queued if it is from or to the device; if `waits`, the CPU then waits for it."""
        with self._lock:
            uses = [(memory, writes) for of, writes in ((source, False), (to, True)) if (memory := self.memory_of(of))]
            if all(memory.queue is None for memory, _ in uses):
                for memory, writes in uses:
                    self.clock.by_cpu(memory.name, writes)
                return
            for memory, writes in uses:
                work = self.now.put(memory.name, None, writes)
                if memory.queue is None:
                    memory.copies.add(work)
            if waits:
                self.now.record_event().synchronize()


def parts_of(tier: DeviceTier) -> list[torch.Tensor]:
    """The tensors of a tier."""
    return [tier.weights, *tier.vector_slots, *([tier.scalars] if tier.scalars is not None else [])]


class _Plan:
    """A plan whose writes to the caller's staging memory are recorded."""

    def __init__(self, model: Model, plan: Any) -> None:
        self._model, self._plan = model, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def wait(self, lent: list[Any]) -> None:
        for memory in lent:
            if memory is not None:
                self._model.use_by_cpu(memory, writes=True)
        self._plan.wait(lent)

    def fetched(self, table: int, lent: Any) -> Any:
        if lent is not None:
            self._model.use_by_cpu(lent, writes=True)
        return self._plan.fetched(table, lent)


def install(model: Model, monkeypatch: Any) -> None:
    """Makes the CPU a device with the model's streams, and with asynchronous copies."""
    monkeypatch.setattr(streams, "_module_of", lambda _: model)
    _install_copies(model, monkeypatch)
    _install_kernels(model, monkeypatch)
    _install_tiers(model, monkeypatch)


def _install_copies(model: Model, monkeypatch: Any) -> None:
    copy, to = torch.Tensor.copy_, torch.Tensor.to

    def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        model.allocate("pinned", made, pinned=True)
        return made

    def copy_(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        model.copied(into, source, waits=not non_blocking)
        return copy(into, source)

    def sent(tensor: torch.Tensor, *there: Any, non_blocking: bool = False, **named: Any) -> torch.Tensor:
        memory = model.memory_of(tensor)
        if memory is None or memory.queue is not None:
            return to(tensor, *there, non_blocking=non_blocking, **named)
        made = tensor.clone()
        model.allocate("sent", made)
        model.copied(made, tensor, waits=not non_blocking)
        return made

    def record_stream(tensor: torch.Tensor, queue: Queue) -> None:
        memory = model.memory_of(tensor)
        assert memory is not None, "the tensor is on the device"
        memory.told.add(queue)

    gathered = _native.GatheredRows

    def read_by_core(vectors: Any, scalars: Any) -> Any:
        for array in (vectors, scalars):
            model.use_by_cpu(array, writes=False)
        return gathered(vectors, scalars)

    for module in (pinned_memory, host_copies):
        monkeypatch.setattr(module, "has_async_copies", lambda _: True)
    monkeypatch.setattr(pinned_memory, "pinned_empty", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "to", sent)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(_native, "GatheredRows", read_by_core)
    bring = tier.place_rows
    monkeypatch.setattr(group, "place_rows", lambda plan, tiers: bring(_Plan(model, plan), tiers))


def _install_kernels(model: Model, monkeypatch: Any) -> None:
    """Records the memory that torch's operators and the Triton kernels use."""
    select, put, add_up = torch.Tensor.index_select, torch.Tensor.index_copy_, core._segment_sum
    pool, read, update = launch.pool_rows, launch.read_sequence, launch.update_rows

    def index_select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        model.use_if_known(tensor, index.tolist(), writes=False)
        return select(tensor, dim, index)

    def index_copy_(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        model.use_if_known(tensor, index.tolist(), writes=True)
        return put(tensor, dim, index, source)

    def segment_sum(rows: torch.Tensor, index: torch.Tensor, *more: Any) -> torch.Tensor:
        model.use_if_known(rows, index.tolist(), writes=False)
        return add_up(rows, index, *more)

    def read_features(features: torch.Tensor) -> None:
        for address in set(features.view(-1, 4)[:, 0].tolist()):
            model.use_address(address, None, writes=False)

    def pooled(dim: int, members: torch.Tensor, features: torch.Tensor, *more: Any) -> None:
        read_features(features.view(-1, 4)[members.long()])
        pool(dim, members, features, *more)

    def sequence(dim: int, features: torch.Tensor, *more: Any) -> None:
        read_features(features)
        read(dim, features, *more)

    def updated(kind: str, dim: int, tiers: torch.Tensor, numbers: Any, rows: Any, *more: Any, count: int) -> None:
        if count:  # otherwise the kernel is only compiled
            for table, addresses in enumerate(tiers.view(-1, 4).tolist()):
                slots = rows.slots[(rows.tables == table) & (rows.slots >= 0)].tolist()
                for address in addresses:
                    if address:
                        model.use_address(address, slots, writes=True)
        update(kind, dim, tiers, numbers, rows, *more, count=count)

    monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    monkeypatch.setattr(torch.Tensor, "index_copy_", index_copy_)
    monkeypatch.setattr(core, "_segment_sum", segment_sum)
    monkeypatch.setattr(launch, "pool_rows", pooled)
    monkeypatch.setattr(launch, "read_sequence", sequence)
    monkeypatch.setattr(launch, "update_rows", updated)


def _install_tiers(model: Model, monkeypatch: Any) -> None:
    begin, zeros, grown = DeviceTier.__init__, torch.zeros, tier._grow
    opening = []

    def opened(tier: DeviceTier, *args: Any) -> None:
        opening.append(tier)
        begin(tier, *args)
        opening.pop()

    def zeros_of_tier(*args: Any, **named: Any) -> torch.Tensor:
        made = zeros(*args, **named)
        if opening:
            model.allocate("tier", made)
            model.use(made, None, writes=True)
        return made

    def grown_noted(tensor: torch.Tensor, more: int) -> torch.Tensor:
        model.use(tensor, None, writes=False)
        made = grown(tensor, more)
        model.allocate("grown", made)
        model.use(made, None, writes=True)
        return made

    monkeypatch.setattr(DeviceTier, "__init__", opened)
    monkeypatch.setattr(torch, "zeros", zeros_of_tier)
    monkeypatch.setattr(tier, "_grow", grown_noted)
    for moves in (tier.TorchRowMover, TritonRowMover):
        _install_moves(model, monkeypatch, moves)


def _install_moves(model: Model, monkeypatch: Any, moves: Any) -> None:
    gather, scatter = moves.gather, moves.scatter

    def gathered(self: Any, tier: DeviceTier, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.use_tier(tier, slots.tolist(), writes=False)
        rows = gather(self, tier, slots)
        for part in rows[: 1 + (tier.scalars is not None)]:  # otherwise the scalars are zeros on the CPU
            model.allocate("gathered", part)
            model.use(part, None, writes=True)
        return rows

    def scattered(
        self: Any, tier: DeviceTier, slots: torch.Tensor, vectors: torch.Tensor, scalars: torch.Tensor
    ) -> None:
        for part in (vectors, scalars):
            model.use(part, None, writes=False)
        model.use_tier(tier, slots.tolist(), writes=True)
        scatter(self, tier, slots, vectors, scalars)

    monkeypatch.setattr(moves, "gather", gathered)
    monkeypatch.setattr(moves, "scatter", scattered)
