"""A model of streams: what is queued on them, and for each piece of work those that are sure to be done before it."""

from collections.abc import Collection, Hashable


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
    """The work of all queues and of the CPU, in the order in which it was queued or done."""

    def __init__(self) -> None:
        # For each work, what is sure to be done before it: directly or not.
        self.before: list[set[int]] = []
        # For each work: what it uses, and whether it writes that.
        self.uses: list[tuple[Hashable, frozenset[int] | None, bool]] = []
        # What the CPU has waited for, and what it has done itself.
        self.done: set[int] = set()

    def note(self, after: set[int], memory: Hashable, slots: Collection[int] | None, writes: bool) -> int:
        """Note a piece of work that comes after others, and after all that the CPU has waited for. Returns its number.

        It uses slots of some memory; None stands for all slots.
        """
        self.before.append(after.union(self.done, *(self.before[work] for work in after)))
        self.uses.append((memory, None if slots is None else frozenset(slots), writes))
        return len(self.uses) - 1

    def by_cpu(self, memory: Hashable, writes: bool) -> None:
        """Note that the CPU uses some memory now. What is queued from now on comes after that."""
        self.done.add(self.note(set(), memory, None, writes))

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

    def last(self) -> set[int]:
        """What is done when all is done that was queued here until now."""
        return {*self.queued[-1:], *self.waits}

    def put(self, memory: Hashable, slots: Collection[int] | None, writes: bool) -> int:
        """Queue a piece of work that uses slots of some memory; None stands for all slots. Returns its number."""
        self.queued.append(self.clock.note(self.last(), memory, slots, writes))
        return self.queued[-1]
