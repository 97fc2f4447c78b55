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

__all__ = ["Event", "SideStreams", "Slots", "Stream", "StreamOrder", "current_stream", "on_stream", "side_streams"]


# Cache slots, as int32 from a plan or as int64 from a tier.
Slots = NDArray[np.signedinteger[Any]]

# Numbers of writes are kept as int32.
_MOST_WRITES = (1 << 31) - 2


class Event(Protocol):
    """A point in a stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether all is done that was queued before it."""

    def synchronize(self) -> None:
        """Have the CPU wait until that is done."""


class Stream(Protocol):
    """A queue of work on a device, such as `torch.cuda.Stream`. Two are equal if they are the same queue."""

    def wait_stream(self, stream: Any) -> None:
        """Have what is queued here from now on wait for what is queued on another stream until now."""

    def wait_event(self, event: Any) -> None:
        """Have what is queued here from now on wait for an event."""

    def record_event(self) -> Any:
        """An event after what is queued here until now."""


class SideStreams:
    """The streams of a device on which rows leave it and come to it, beside what computes."""

    def __init__(self, down: Stream, up: Stream) -> None:
        self.down = down
        self.up = up


def _module_of(device: torch.device) -> Any:
    """Torch's module for `device`, such as `torch.cuda`, which has its streams; None for the CPU, where torch queues nothing."""
    return torch.get_device_module(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> Stream | None:
    """The caller's stream on `device`; None where it has no streams."""
    current = getattr(_module_of(device), "current_stream", None)
    stream: Stream | None = current(device) if current is not None else None
    return stream


@cache
def side_streams(device: torch.device) -> SideStreams | None:
    """The streams on which rows move to and from `device`, the same for all tables; None where it has no streams."""
    made = getattr(_module_of(device), "Stream", None)
    return SideStreams(made(device), made(device)) if made is not None else None


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


class _Use:
    """A use of the memory. `event` is None until its work is queued on its stream."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self.number = number
        self.event: Event | None = None

    def is_done(self) -> bool:
        return self.event is not None and self.event.query()

    def is_before(self, stream: Stream) -> None:
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
        self._writes: list[_Use] = []
        self._readers: dict[tuple[Stream, int], _Use] = {}
        # The number of the last write of all slots, and of each slot the number of the last write of some that it was among.
        self._all = 0
        self._of_slots: NDArray[np.int32] = np.zeros(0, np.int32)

    @contextmanager
    def reading(self, stream: Stream | None, slots: Slots | None = None) -> Iterator[None]:
        """Say that what is queued on `stream` meanwhile reads. None: the device has no streams."""
        if stream is None:
            yield
            return
        for write in self._last_writes(slots):
            write.is_before(stream)
        use = self._readers[stream, get_ident()] = _Use(stream, self._number)
        try:
            yield
        finally:
            use.event = stream.record_event()

    @contextmanager
    def writing(self, stream: Stream | None, slots: Slots | None = None) -> Iterator[None]:
        """Say that what is queued on `stream` meanwhile writes. None: the device has no streams."""
        if stream is None:
            yield
            return
        for before in [*self._last_writes(slots), *self._readers.values()]:
            before.is_before(stream)
        use = self._note_write(stream, slots)
        try:
            yield
        finally:
            use.event = stream.record_event()

    def _last_writes(self, slots: Slots | None) -> list[_Use]:
        """On each stream the last of the writes after which these slots are as they are now, or a later one."""
        writes = tuple(self._writes)
        last = self._number if slots is None else self._last_write(slots)
        return list({write.stream: write for write in writes if write.number <= last}.values())

    def _last_write(self, slots: Slots) -> int:
        known = slots[slots < len(self._of_slots)]
        return max(self._all, int(self._of_slots[known].max()) if len(known) else 0)

    def _note_write(self, stream: Stream, slots: Slots | None) -> _Use:
        if self._number >= _MOST_WRITES:
            self._count_anew()
        self._number += 1
        while self._writes and self._writes[0].is_done():
            del self._writes[0]
        use = _Use(stream, self._number)
        if slots is None:
            # All that came before is done before this is.
            self._all = self._number
            self._writes = [use]
            self._readers.clear()
            return use
        if len(slots):
            most = int(slots.max()) + 1
            if most > len(self._of_slots):
                more = max(most - len(self._of_slots), len(self._of_slots))
                self._of_slots = np.concatenate([self._of_slots, np.zeros(more, np.int32)])
            self._of_slots[slots] = self._number
        self._writes.append(use)
        return use

    def _count_anew(self) -> None:
        """Begin with small numbers again. All slots count as written by the last of the writes that are not done."""
        for number, write in enumerate(self._writes, 1):
            write.number = number
        self._all = self._number = len(self._writes)
        self._of_slots[:] = 0
