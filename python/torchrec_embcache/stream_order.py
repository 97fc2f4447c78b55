"""The order in which streams of a device use the tensors of a device tier."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Stream", "StreamOrder", "current_stream"]


class Stream(Protocol):
    """A queue of work on a device, such as `torch.cuda.Stream`. Two are equal if they are the same queue."""

    def wait_stream(self, stream: Any) -> None:
        """Have what is queued here from now on wait for what is queued on another stream until now."""


def current_stream(device: torch.device) -> Stream | None:
    """The caller's stream on `device`; None where it has no streams."""
    if device.type == "cpu":
        return None
    current = getattr(torch.get_device_module(device), "current_stream", None)
    stream: Stream | None = current(device) if current is not None else None
    return stream


class StreamOrder:
    """Who has used some memory on a device, so that who uses it next waits for those whose work it must not overtake.

    A reader waits for the last writer, and a writer for the last writer and for all readers since. Nobody waits for work on its own
    stream, which runs in its order anyway, and the CPU waits for nobody.

    Callers hold the rows exclusively until their work is queued, but for readers of rows that nobody else changes. Several threads
    may come at once, and no lock is taken: one that is held while Python collects garbage could be waited for by what the collector
    runs. Each step below is one operation of a dict.
    """

    def __init__(self) -> None:
        self.writer: Stream | None = None
        self._readers: dict[Stream, None] = {}

    def read(self, stream: Stream | None) -> None:
        """Say that what is queued on `stream` next reads. None: the device has no streams."""
        if stream is None:
            return
        writer = self.writer
        if writer is not None and stream != writer:
            stream.wait_stream(writer)
        self._readers[stream] = None

    def write(self, stream: Stream | None) -> None:
        """Say that what is queued on `stream` next writes. None: the device has no streams."""
        if stream is None:
            return
        before = [] if self.writer is None else [self.writer]
        while self._readers:
            before.append(self._readers.popitem()[0])
        for other in before:
            if other != stream:
                stream.wait_stream(other)
        self.writer = stream
