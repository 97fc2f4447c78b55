"""A model of streams: in no order in which they may run does anybody read or write before those who came before are done."""

import itertools

import pytest

from torchrec_embcache.stream_order import Stream, StreamOrder


class Queue:
    """A stream of the model: the numbers of the operations that are queued on it, and for each those that it waits for."""

    def __init__(self) -> None:
        self.queued: list[int] = []
        self.waits: list[int] = []
        self.after: dict[int, list[int]] = {}

    def wait_stream(self, stream: "Queue") -> None:
        self.waits += stream.queued[-1:]

    def put(self, operation: int) -> None:
        # An event that was waited for stands for all that was queued before it on its stream.
        self.after[operation] = [*self.queued[-1:], *self.waits]
        self.queued.append(operation)


def unordered(program: tuple[tuple[int, bool], ...], order: StreamOrder) -> list[tuple[int, int]]:
    """Pairs of operations that conflict and may run in either order. `program`: for each its stream, and whether it writes."""
    queues = [Queue(), Queue(), Queue()]
    before: list[set[int]] = []
    for number, (place, writes) in enumerate(program):
        queue: Stream = queues[place]
        (order.write if writes else order.read)(queue)
        queues[place].put(number)
        direct = queues[place].after[number]
        before.append(set(direct).union(*(before[other] for other in direct)))
    return [
        (first, second)
        for second, (_, writes) in enumerate(program)
        for first in range(second)
        if (writes or program[first][1]) and first not in before[second]
    ]


OPERATIONS = list(itertools.product(range(3), (False, True)))


@pytest.mark.parametrize("first", OPERATIONS, ids=str)
def test_no_program_of_six_operations_on_three_streams_has_a_race(first):
    for rest in itertools.product(OPERATIONS, repeat=5):
        program = (first, *rest)
        assert not unordered(program, StreamOrder()), program


def test_the_model_finds_races():
    class Forgetful(StreamOrder):
        def read(self, stream: Stream | None) -> None:
            """Forget the reader."""
            super().read(stream)
            self._readers.clear()

    class Careless(StreamOrder):
        def read(self, _stream: Stream | None) -> None:
            """Wait for nobody."""

    program = ((0, True), (1, False), (2, True))
    assert unordered(program, Forgetful()) == [(1, 2)]
    assert (0, 1) in unordered(program, Careless())
    assert not unordered(program, StreamOrder())


def test_readers_do_not_wait_for_each_other_and_nobody_for_its_own_stream():
    queues, order = [Queue(), Queue()], StreamOrder()
    for place, writes in ((0, True), (0, False), (1, False), (0, False), (1, False)):
        waited = len(queues[place].waits)
        (order.write if writes else order.read)(queues[place])
        queues[place].put(len(queues[0].queued) + len(queues[1].queued))
        assert place == 1 or len(queues[place].waits) == waited
    assert len(order._readers) == 2


def test_a_device_without_streams_needs_no_order():
    order = StreamOrder()
    order.write(None)
    order.read(None)
    assert order.writer is None
