"""A model of streams: their queued work, and for each work item the items that always finish before it."""

from collections.abc import Collection, Hashable


class Event:
    """A point in a queue: the last work item queued before it."""

    def __init__(self, queue: "Queue", work: list[int]) -> None:
        self.queue = queue
        self.work = work
        self.is_done = False

    def query(self) -> bool:
        """True if the test has marked it as done."""
        if self.is_done:
            self.synchronize()
        return self.is_done

    def synchronize(self) -> None:
        """Orders all work that is queued later, on any queue, after this event, because the CPU has waited for it."""
        self.queue.clock.done.update(work for last in self.work for work in {last, *self.queue.clock.before[last]})


class Clock:
    """The work of all queues and of the CPU, in the order of queueing or execution."""

    def __init__(self) -> None:
        # For each work item, all items that always finish before it.
        self.before: list[set[int]] = []
        # For each work item: the memory, its slots, and True if it writes them.
        self.uses: list[tuple[Hashable, frozenset[int] | None, bool]] = []
        # The work that the CPU has waited for or done itself.
        self.done: set[int] = set()

    def note(self, after: set[int], memory: Hashable, slots: Collection[int] | None, writes: bool) -> int:
        """Records a work item that runs after the items `after` and after all that the CPU has waited for. Returns its number.

        It uses `slots` of `memory`; None means all slots.
        """
        self.before.append(after.union(self.done, *(self.before[work] for work in after)))
        self.uses.append((memory, None if slots is None else frozenset(slots), writes))
        return len(self.uses) - 1

    def by_cpu(self, memory: Hashable, writes: bool) -> None:
        """Records that the CPU uses some memory. Work that is queued later runs after that."""
        self.done.add(self.note(set(), memory, None, writes))

    def races(self) -> list[tuple[int, int]]:
        """Pairs of unordered work items that use the same slots of the same memory, at least one of them for writing."""
        return [
            (first, second)
            for second, (memory, slots, writes) in enumerate(self.uses)
            for first, (other, theirs, wrote) in enumerate(self.uses[:second])
            if memory == other
            and (writes or wrote)
            and (slots is None or theirs is None or slots & theirs)
            and first not in self.before[second]
        ]


class Queue:
    """A stream."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queued: list[int] = []
        self.waits: set[int] = set()

    def wait_stream(self, stream: "Queue") -> None:
        """See `DeviceStream` in `_device/streams.py`."""
        self.waits.update(stream.queued[-1:])

    def wait_event(self, event: Event) -> None:
        """See `DeviceStream` in `_device/streams.py`."""
        self.waits.update(event.work)

    def record_event(self) -> Event:
        """See `DeviceStream` in `_device/streams.py`."""
        return Event(self, self.queued[-1:])

    def last(self) -> set[int]:
        """The work items that finish last among all that was queued here."""
        return {*self.queued[-1:], *self.waits}

    def put(self, memory: Hashable, slots: Collection[int] | None, writes: bool) -> int:
        """Queues a work item that uses `slots` of `memory`; None means all slots. Returns its number."""
        self.queued.append(self.clock.note(self.last(), memory, slots, writes))
        return self.queued[-1]
