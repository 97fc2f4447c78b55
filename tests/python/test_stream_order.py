"""In no order in which streams may run does anybody read or write rows before those who came before are done."""

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from stream_model import Clock, Event, Queue
from torchrec_embcache import (
    EmbCacheEmbeddingBag,
    TierBudgets,
    device_tier,
    optimizers,
    stream_order,
)
from torchrec_embcache.device_tier import DeviceTier
from torchrec_embcache.lookup import IdBatch
from torchrec_embcache.stream_order import SideStreams, Stream, StreamOrder

SLOTS = (None, (0,), (0, 1), (1,), ())
OPERATIONS = list(itertools.product(range(3), (False, True), SLOTS))


def array(slots):
    return None if slots is None else np.array(slots, np.int64)


def races(program, order: StreamOrder) -> list[tuple[int, int]]:
    """`program`: for each operation its stream, whether it writes, and its slots."""
    clock = Clock()
    queues = [Queue(clock) for _ in range(3)]
    for place, writes, slots in program:
        queue: Stream = queues[place]
        with (order.writing if writes else order.reading)(queue, array(slots)):
            queues[place].put("rows", slots, writes)
    return clock.races()


@pytest.mark.parametrize("first", OPERATIONS, ids=str)
def test_no_program_of_three_operations_on_three_streams_has_a_race(first):
    for rest in itertools.product(OPERATIONS, repeat=2):
        program = (first, *rest)
        assert not races(program, StreamOrder()), program


def test_no_program_of_twelve_operations_that_was_drawn_has_a_race():
    dice = random.Random(5)
    for _ in range(10_000):
        program = dice.choices(OPERATIONS, k=12)
        assert not races(program, StreamOrder()), program


def test_the_model_finds_races():
    class Forgetful(StreamOrder):
        def reading(self, stream, slots=None):
            """Forget the reader."""
            self._readers.clear()
            return super().reading(stream, slots)

    class Careless(StreamOrder):
        def _last_writes(self, _slots):
            return []

    class OfNoSlot(StreamOrder):
        def _last_write(self, _slots):
            return self._all

    program = ((0, True, None), (1, False, None), (2, False, (0,)), (1, True, (0,)))
    assert not races(program, StreamOrder())
    assert (0, 1) in races(program, Careless())
    assert races(((0, False, None), (1, False, None), (2, True, (0,))), Forgetful()) == [(0, 2)]
    assert races(((0, True, (0,)), (1, False, (0,))), OfNoSlot()) == [(0, 1)]


def test_who_uses_other_slots_is_not_waited_for():
    clock = Clock()
    compute, down, up = (Queue(clock) for _ in range(3))
    order = StreamOrder()

    def use(queue, slots, *, writes):
        with (order.writing if writes else order.reading)(queue, array(slots)):
            queue.put("rows", slots, writes)
        return len(clock.uses) - 1

    old = use(compute, (0, 1), writes=True)
    read = use(compute, None, writes=False)
    update = use(compute, (2, 3), writes=True)
    left = use(down, (0,), writes=False)
    arrived = use(up, (0,), writes=True)
    assert (old in clock.before[left], update in clock.before[left]) == (True, False), (
        "the rows that leave are of before"
    )
    assert {old, read, left} <= clock.before[arrived]
    assert update not in clock.before[arrived]
    forward = use(compute, None, writes=False)
    assert {arrived, update} <= clock.before[forward]
    assert not clock.races()


def test_what_is_done_is_forgotten_and_an_error_leaves_the_order_as_it_was():
    clock = Clock()
    queues = [Queue(clock) for _ in range(2)]
    order = StreamOrder()
    for step in range(100):
        with order.writing(queues[0], array((step % 7,))):
            queues[0].put("rows", (step % 7,), True)
        for write in order._writes[:-3]:
            event = write.event
            assert isinstance(event, Event)
            event.is_done = True
    assert len(order._writes) <= 4

    def fail():
        with order.writing(queues[1], array((3,))):
            queues[1].put("rows", (3,), True)  # a part of it was queued
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with order.reading(queues[0], array((3,))):
        queues[0].put("rows", (3,), False)
    assert not clock.races()


def test_two_threads_that_read_on_one_stream_are_both_waited_for():
    clock = Clock()
    compute, up = (Queue(clock) for _ in range(2))
    order = StreamOrder()

    def read():
        with order.reading(compute):
            compute.put("rows", None, False)

    with order.reading(compute):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        compute.put("rows", None, False)  # after the other thread's
    with order.writing(up, array((0,))):
        up.put("rows", (0,), True)
    assert not clock.races()


def test_the_order_holds_when_the_numbers_of_writes_begin_anew(monkeypatch):
    monkeypatch.setattr(stream_order, "_MOST_WRITES", 4)
    dice, anew = random.Random(6), 0
    for _ in range(2_000):
        program = dice.choices(OPERATIONS, k=16)
        order = StreamOrder()
        assert not races(program, order), program
        anew += order._number < sum(writes for _, writes, _ in program)
    assert anew > 100


def test_a_device_without_streams_needs_no_order():
    order = StreamOrder()
    with order.writing(None), order.reading(None):
        assert not order.streams


@pytest.fixture
def model(monkeypatch):
    """The CPU as a device with streams of the model, on which the moves and the kernels of device tiers are noted."""
    clock = Clock()
    compute, down, up = (Queue(clock) for _ in range(3))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    now = [compute]

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            now.append(self.stream)

        def __exit__(self, *_):
            now.pop()

    for module in (stream_order, device_tier):
        monkeypatch.setattr(module, "current_stream", lambda _: now[-1])
        monkeypatch.setattr(module, "side_streams", lambda _: SideStreams(down, up))
        monkeypatch.setattr(module, "on_stream", lambda stream, _: On(stream))

    def noted(owner, name, slots_of, writes):
        real = getattr(owner, name)

        def call(self, *arguments):
            tier = self if isinstance(self, DeviceTier) else arguments[0]
            now[-1].put(f"{id(tier)}", slots_of(arguments), writes)
            return real(self, *arguments)

        monkeypatch.setattr(owner, name, call)

    from torchrec_embcache.triton_backend import TritonMoves

    for moves in (device_tier.TorchMoves, TritonMoves):
        noted(moves, "gather", lambda arguments: arguments[1].tolist(), False)
        noted(moves, "scatter", lambda arguments: arguments[1].tolist(), True)

    class Noted:
        """Kernels that read rows, or change them, are noted here, because no single function runs them."""

        def __init__(self, use, tier, slots, writes):
            self.use, self.tier, self.slots, self.writes = use, tier, slots, writes

        def __enter__(self):
            self.use.__enter__()
            now[-1].put(f"{id(self.tier)}", self.slots, self.writes)

        def __exit__(self, *raised):
            return self.use.__exit__(*raised)

    reads, changes = DeviceTier.reads, DeviceTier.changes

    def changed(tier, slots=None):
        used = None if slots is None else [slot for slot in slots.tolist() if slot >= 0]
        return Noted(changes(tier, slots), tier, used, True)

    monkeypatch.setattr(DeviceTier, "reads", lambda tier: Noted(reads(tier), tier, None, False))
    monkeypatch.setattr(DeviceTier, "changes", changed)
    return clock


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "ahead"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_training_through_a_small_device_tier_has_no_race(model, monkeypatch, kernels, ahead):
    """The whole path of a module, with saves beside it. Work is noted with the slots that it uses in truth."""
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    bag = EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes="64KiB", device_bytes="1KiB"),
        optimizer=optimizers.Adagrad(lr=0.1),
    )
    dice = random.Random(3)
    batches = [torch.tensor([dice.randrange(60) for _ in range(16)]).view(4, 4) for _ in range(12)]
    for step, ids in enumerate(batches):
        if step % 3 == 2:
            with torch.no_grad():
                bag.eval()(ids)
            bag.train()
        bag(ids).sum().backward()
        if ahead and step < 11:
            coming = batches[step + 1]
            bag.prefetch(coming)
            bag._group.place_next(IdBatch(coming.view(-1).numpy(), np.array([0, 16])), pytest.fail)
            assert bag._group.lookahead._batches[0].is_placed
        if step % 4 == 3:
            bag.read_rows(torch.arange(60))
    bag.close()
    kinds = {(writes, slots is None) for _, slots, writes in model.uses}
    assert kinds >= {(True, False), (False, False), (False, True)}
    assert len(model.uses) > 50
    assert not model.races()
