"""The order in which streams of a device use the tensors of a device tier."""

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

# Numbers of writes are kept as int32.
_MAX_WRITES = (1 << 31) - 2


class StreamEvent(Protocol):
    """A point in a stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether all is done that was queued before it."""

    def synchronize(self) -> None:
        """Have the CPU wait until that is done."""


class DeviceStream(Protocol):
    """A queue of work on a device, such as `torch.cuda.Stream`. Two are equal if they are the same queue."""

    def wait_stream(self, stream: Any) -> None:
        """Have what is queued here from now on wait for what is queued on another stream until now."""

    def wait_event(self, event: Any) -> None:
        """Have what is queued here from now on wait for an event."""

    def record_event(self) -> Any:
        """An event after what is queued here until now."""


class TransferStreams:
    """The streams of a device on which rows leave it and come to it, beside what computes."""

    def __init__(self, to_host: DeviceStream, to_device: DeviceStream) -> None:
        self.to_host = to_host
        self.to_device = to_device


def _module_of(device: torch.device) -> Any:
    """Torch's module for `device`, such as `torch.cuda`, which has its streams; None for the CPU, where torch queues nothing."""
    return torch.get_device_module(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> DeviceStream | None:
    """The caller's stream on `device`; None where it has no streams."""
    current = getattr(_module_of(device), "current_stream", None)
    stream: DeviceStream | None = current(device) if current is not None else None
    return stream


@cache
def transfer_streams(device: torch.device) -> TransferStreams | None:
    """The streams on which rows move to and from `device`, the same for all tables; None where it has no streams."""
    made = getattr(_module_of(device), "Stream", None)
    return TransferStreams(made(device), made(device)) if made is not None else None


@contextmanager
def on_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """Have torch queue what it does on `stream`, which is one of `device`. None: the caller's stream."""
    if stream is None:
        yield
        return
    module = _module_of(device)
    # A thread of the core's has no device of its own. Torch would go back to the first one then, and set it up.
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
        """Have what is queued on `stream` from now on wait for this. A stream's own work runs in its order anyway."""
        if stream == self.stream:
            return
        if self.event is not None:
            stream.wait_event(self.event)
        else:
            stream.wait_stream(self.stream)


class StreamOrder:
    """Who has used which slots of some memory on a device: who uses them next waits for those whose work it must not overtake.

    A reader waits for those who wrote its slots last, and a writer for them and for all readers. Who read which slots is not kept,
    because what reads is short and comes first in a step. Nobody waits for work on its own stream, and the CPU waits for nobody.

    Slots are integers [n]; None stands for all slots. Callers hold the rows exclusively until their work is queued, but for readers
    of rows that nobody else changes. Several threads may read at once, and no lock is taken: one that is held while Python collects
    garbage could be waited for by what the collector runs. Each step below that readers share is one operation of a dict or a list.
    """

    def __init__(self) -> None:
        self._number = 0
        # Writes that are not known to be done, the oldest first; and the last read of each thread on each stream.
        self._writes: list[_MemoryUse] = []
        self._readers: dict[tuple[DeviceStream, int], _MemoryUse] = {}
        # The number of the last write of all slots, and of each slot the number of the last write of some that it was among.
        self._min_write = 0
        self._slot_writes: NDArray[np.int32] = np.zeros(0, np.int32)

    @contextmanager
    def reading(self, stream: DeviceStream | None, slots: SlotIds | None = None) -> Iterator[None]:
        """Say that what is queued on `stream` meanwhile reads. None: the device has no streams."""
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
        """Say that what is queued on `stream` meanwhile writes. None: the device has no streams."""
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
        """On each stream the last of the writes after which these slots are as they are now, or a later one."""
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
            # All that came before is done before this is.
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
        """Begin with small numbers again. All slots count as written by the last of the writes that are not done."""
        for number, write in enumerate(self._writes, 1):
            write.number = number
        self._min_write = self._number = len(self._writes)
        self._slot_writes[:] = 0
