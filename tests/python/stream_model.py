"""A model of streams: what is queued on them, and for each piece of work those that are sure to be done before it."""

from collections.abc import Collection


class Event:
    """A point in a queue: the last work that was queued before it."""

    def __init__(self, queue: "Queue", work: list[int]) -> None:
        self.queue = queue
        self.work = work
        self.is_done = False

    def query(self) -> bool:
        """Whether the test says that it is done."""
        if self.is_done:
            self.synchronize()
        return self.is_done

    def synchronize(self) -> None:
        """What is queued anywhere from now on comes after it, because the CPU has waited."""
        self.queue.clock.done.update(work for last in self.work for work in {last, *self.queue.clock.before[last]})


class Clock:
    """The work of all queues, in the order in which it was queued."""

    def __init__(self) -> None:
        # For each work, what is sure to be done before it: directly or not.
        self.before: list[set[int]] = []
        # For each work: what it uses, and whether it writes that.
        self.uses: list[tuple[str, frozenset[int] | None, bool]] = []
        # What the CPU has waited for.
        self.done: set[int] = set()

    def races(self) -> list[tuple[int, int]]:
        """Pairs of works that use the same slots of the same memory, one of them to write, and that may run in either order."""
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
    """A stream of the model."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queued: list[int] = []
        self.waits: set[int] = set()

    def wait_stream(self, stream: "Queue") -> None:
        """See `stream_order.Stream`."""
        self.waits.update(stream.queued[-1:])

    def wait_event(self, event: Event) -> None:
        """See `stream_order.Stream`."""
        self.waits.update(event.work)

    def record_event(self) -> Event:
        """See `stream_order.Stream`."""
        return Event(self, self.queued[-1:])

    def put(self, memory: str, slots: Collection[int] | None, writes: bool) -> None:
        """Queue a piece of work that uses slots of some memory; None stands for all slots."""
        clock = self.clock
        direct = {*self.queued[-1:], *self.waits}
        clock.before.append(direct.union(clock.done, *(clock.before[work] for work in direct)))
        clock.uses.append((memory, None if slots is None else frozenset(slots), writes))
        self.queued.append(len(clock.uses) - 1)
