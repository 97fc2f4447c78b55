"""Orders reads and writes of device-tier tensors across streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "DeviceStream",
    "SlotIds",
    "StreamEvent",
    "StreamOrder",
    "TransferStreams",
    "current_stream",
    "on_stream",
    "transfer_streams",
]


# Cache slots, as int32 from a plan or as int64 from a tier.
SlotIds = NDArray[np.signedinteger[Any]]

# Write numbers are stored as int32.
_MAX_WRITES = (1 << 31) - 2


class StreamEvent(Protocol):
    """A point in a stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """True if all work queued before it is done."""

    def synchronize(self) -> None:
        """Blocks the CPU until that work is done."""


class DeviceStream(Protocol):
    """A queue of work on a device, such as `torch.cuda.Stream`. Two are equal if they are the same queue."""

    def wait_stream(self, stream: Any) -> None:
        """Makes work queued on this stream after the call wait for all work currently queued on another stream."""

    def wait_event(self, event: Any) -> None:
        """Makes work queued on this stream after the call wait for an event."""

    def record_event(self) -> Any:
        """Returns an event after all work currently queued."""


class TransferStreams:
    """The device streams that copy rows from and to the device, separate from the compute stream."""

    def __init__(self, to_host: DeviceStream, to_device: DeviceStream) -> None:
        self.to_host = to_host
        self.to_device = to_device


def _module_of(device: torch.device) -> Any:
    """Returns torch's module for `device`, such as `torch.cuda`, which has its streams; None for the CPU, which has none."""
    return torch.get_device_module(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> DeviceStream | None:
    """Returns the caller's stream on `device`; None if it has no streams."""
    current = getattr(_module_of(device), "current_stream", None)
    stream: DeviceStream | None = current(device) if current is not None else None
    return stream


@cache
def transfer_streams(device: torch.device) -> TransferStreams | None:
    """Returns the streams that move rows to and from `device`, the same for all tables; None if it has no streams."""
    made = getattr(_module_of(device), "Stream", None)
    return TransferStreams(made(device), made(device)) if made is not None else None


@contextmanager
def on_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """Makes torch queue its work on `stream`, a stream of `device`. None: the caller's stream."""
    if stream is None:
        yield
        return
    module = _module_of(device)
    # A native thread has no current device. Torch would restore the first device afterwards, and initialize it.
    with module.device(device), module.stream(stream):
        yield


class _MemoryUse:
    """A use of the memory. `event` is None until its work is queued on its stream."""

    def __init__(self, stream: DeviceStream, number: int) -> None:
        self.stream = stream
        self.number = number
        self.event: StreamEvent | None = None

    def is_done(self) -> bool:
        return self.event is not None and self.event.query()

    def make_wait(self, stream: DeviceStream) -> None:
        """Makes work queued on `stream` after the call wait for this use. A stream's own work is ordered anyway."""
        if stream == self.stream:
            return
        if self.event is not None:
            stream.wait_event(self.event)
        else:
            stream.wait_stream(self.stream)


class StreamOrder:
    """Tracks the uses of slots of device memory across streams, and makes a stream wait for earlier conflicting uses.

    A reader waits for the last writers of its slots; a writer waits for those and for all readers. Readers are not tracked per
    slot, because reads are short and come first in a step. No stream waits for its own work, and the CPU never waits.

    Slots are integers [n]; None stands for all slots. Callers have exclusive access to the rows until their work is queued, except
    readers of rows that no other thread changes. Several threads may read at the same time. No lock is used: the garbage collector
    can run at any time, and code run by it could wait for a held lock. Each step below that is shared by readers is therefore one
    operation of a dict or a list.
    """

    def __init__(self) -> None:
        self._number = 0
        # Writes that are not known to be done, oldest first; and the last read of each thread on each stream.
        self._writes: list[_MemoryUse] = []
        self._readers: dict[tuple[DeviceStream, int], _MemoryUse] = {}
        # The number of the last write of all slots, and, by slot, the number of the last partial write that included it.
        self._min_write = 0
        self._slot_writes: NDArray[np.int32] = np.zeros(0, np.int32)

    @contextmanager
    def reading(self, stream: DeviceStream | None, slots: SlotIds | None = None) -> Iterator[None]:
        """Registers the work queued on `stream` within the block as a read. None: the device has no streams."""
        if stream is None:
            yield
            return
        for write in self._last_writes(slots):
            write.make_wait(stream)
        use = self._readers[stream, get_ident()] = _MemoryUse(stream, self._number)
        try:
            yield
        finally:
            use.event = stream.record_event()

    @contextmanager
    def writing(self, stream: DeviceStream | None, slots: SlotIds | None = None) -> Iterator[None]:
        """Registers the work queued on `stream` within the block as a write. None: the device has no streams."""
        if stream is None:
            yield
            return
        for before in [*self._last_writes(slots), *self._readers.values()]:
            before.make_wait(stream)
        use = self._record_write(stream, slots)
        try:
            yield
        finally:
            use.event = stream.record_event()

    def _last_writes(self, slots: SlotIds | None) -> list[_MemoryUse]:
        """Returns, for each stream, the last write that may have set the current contents of these slots, or a later one."""
        writes = tuple(self._writes)
        last = self._number if slots is None else self._last_write(slots)
        return list({write.stream: write for write in writes if write.number <= last}.values())

    def _last_write(self, slots: SlotIds) -> int:
        known = slots[slots < len(self._slot_writes)]
        return max(self._min_write, int(self._slot_writes[known].max()) if len(known) else 0)

    def _record_write(self, stream: DeviceStream, slots: SlotIds | None) -> _MemoryUse:
        if self._number >= _MAX_WRITES:
            self._renumber()
        self._number += 1
        while self._writes and self._writes[0].is_done():
            del self._writes[0]
        use = _MemoryUse(stream, self._number)
        if slots is None:
            # All earlier work is done before this write.
            self._min_write = self._number
            self._writes = [use]
            self._readers.clear()
            return use
        if len(slots):
            most = int(slots.max()) + 1
            if most > len(self._slot_writes):
                more = max(most - len(self._slot_writes), len(self._slot_writes))
                self._slot_writes = np.concatenate([self._slot_writes, np.zeros(more, np.int32)])
            self._slot_writes[slots] = self._number
        self._writes.append(use)
        return use

    def _renumber(self) -> None:
        """Restarts the numbering at small numbers. All slots then count as written by the last pending write."""
        for number, write in enumerate(self._writes, 1):
            write.number = number
        self._min_write = self._number = len(self._writes)
        self._slot_writes[:] = 0
