"""In any order in which streams run, each read or write of rows comes after those that it depends on."""

import gc
import itertools
import random
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from device_model import Model, install
from stream_model import Clock, Event, Queue
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
from torchrec_embcache._device import streams
from torchrec_embcache._device.host_copies import host_copies
from torchrec_embcache._device.pinned import copy_staged_to_device, staging_empty
from torchrec_embcache._device.streams import DeviceStream, StreamOrder
from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache._lookup.group import IdBatch

SLOTS = (None, (0,), (0, 1), (1,), ())
OPERATIONS = list(itertools.product(range(3), (False, True), SLOTS))


def array(slots):
    return None if slots is None else np.array(slots, np.int64)


def races(program, order: StreamOrder) -> list[tuple[int, int]]:
    """`program`: for each operation its stream, whether it writes, and its slots."""
    clock = Clock()
    queues = [Queue(clock) for _ in range(3)]
    for place, writes, slots in program:
        queue: DeviceStream = queues[place]
        with (order.writing if writes else order.reading)(queue, array(slots)):
            queues[place].put("rows", slots, writes)
    return clock.races()


@pytest.mark.parametrize("first", OPERATIONS, ids=str)
def test_no_program_of_three_operations_on_three_streams_has_a_race(first):
    for rest in itertools.product(OPERATIONS, repeat=2):
        program = (first, *rest)
        assert not races(program, StreamOrder()), program


@pytest.mark.slow
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
            return self._min_write

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


def test_finished_work_is_dropped_and_errors_keep_the_order():
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
    monkeypatch.setattr(streams, "_MAX_WRITES", 4)
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
        assert not order._writes
        assert not order._readers


@pytest.fixture
def model(monkeypatch):
    """The CPU as a device with streams, whose uses of memory are noted."""
    streams.transfer_streams.cache_clear()
    made = Model()
    install(made, monkeypatch)
    yield made
    streams.transfer_streams.cache_clear()


def races_of(model):
    """Returns the uses of the two works of each race."""
    uses = model.clock.uses
    return sorted({tuple(str(uses[work]) for work in pair) for pair in model.clock.races()})


def make_bag():
    return EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes="64KiB", device_bytes="1KiB"),
        optimizer=optimizers.Adagrad(lr=0.1),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "ahead"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_training_through_a_small_device_tier_has_no_race(model, monkeypatch, kernels, ahead):
    """The whole path of a module, with evaluations on another stream, saves, and a tier that grows on both streams.

    Work is noted with the slots that it uses in truth. The table is closed with work on three streams that nobody waited for.
    """
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    bag = make_bag()
    # So few rows that the tier need not grow for them.
    bag(torch.arange(4).view(1, 4)).sum().backward()
    assert "grown" not in model.names
    dice = random.Random(3)
    batches = [torch.tensor([dice.randrange(60) for _ in range(16)]).view(4, 4) for _ in range(13)]
    for step, ids in enumerate(batches):
        if step % 3 == 2:
            many = torch.arange(32 + 8 * step).view(-1, 4)
            with torch.no_grad(), model.on(model.other):
                bag.eval()(many if step in (5, 11) else ids)
            bag.train()
        if step == 7:
            bag(torch.arange(100).view(-1, 4)).sum().backward()
        bag(ids).sum().backward()
        if ahead:
            coming = batches[(step + 1) % len(batches)]
            bag.prefetch(coming)
            bag._group.place_next(IdBatch(coming.view(-1).numpy(), np.array([0, 16])), pytest.fail)
            assert bag._group.prefetch_queue._batches[0].is_placed
        if step % 4 == 3:
            bag.read_rows(torch.arange(60))
    bag.close()
    del bag
    gc.collect()
    assert not model.live(), "all memory was given away"
    kinds = {(writes, slots is None) for _, slots, writes in model.clock.uses}
    assert kinds >= {(True, False), (False, False), (False, True)}
    assert {"grown", "pinned", "sent", "gathered"} <= set(model.names)
    assert model.allocated_on("grown") == {model.compute, model.other}
    assert not races_of(model)


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_memory_of_a_table_is_not_given_away_before_it_is_read(model, monkeypatch, kernels):
    """The tier grows on another stream than that of the forward, which nobody waits for."""
    monkeypatch.setenv("EMBCACHE_KERNELS", kernels)
    bag = make_bag()
    ids = torch.arange(100).view(-1, 4)
    with torch.no_grad():
        with model.on(model.other):
            bag.train()(ids)
        assert model.allocated_on("grown") == {model.other}
        bag.eval()(ids[:1])
    bag.close()
    del bag
    gc.collect()
    assert not model.live()
    assert not races_of(model)


def test_rows_are_read_right_while_another_thread_grows_the_tier(model, monkeypatch):
    """Torch's operators, unlike the other kernels, read rows while others may replace the tier's tensors."""
    monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    bag = make_bag()
    ids = torch.arange(16).view(4, 4)
    bag(ids).sum().backward()
    want = bag.eval()(ids)
    tier, reads, before = bag.table._tier, DeviceTier.reading, model.names.count("grown")
    for grows_before in (True, False):

        def grow(wanted=tier.weights.shape[0] + 9):
            with model.on(model.other):
                tier.ensure_capacity(wanted)

        @contextmanager
        def amid(tier, grow=grow, grows_before=grows_before):
            if grows_before:
                grow()
            with reads(tier) as weights:
                if not grows_before:
                    grow()
                yield weights

        monkeypatch.setattr(DeviceTier, "reading", amid)
        with torch.no_grad():
            assert torch.equal(bag(ids), want)
    assert model.names.count("grown") == before + 4
    bag.close()
    assert not races_of(model)


def test_rows_leave_and_arrive_on_two_streams_that_all_tables_share(model):
    device = torch.device("cpu")
    sides = streams.transfer_streams(device)
    assert sides is streams.transfer_streams(device)
    assert len({sides.to_host, sides.to_device, model.compute}) == 3


def test_cpu_waits_only_for_work_before_the_ids_on_their_stream(model):
    brought = Queue(model.clock)
    ids, lengths = torch.arange(5), torch.ones(5, dtype=torch.int32)
    with model.on(brought):
        for tensor in (ids, lengths):
            model.allocate("batch", tensor)
            model.use(tensor, None, writes=True)
    model.compute.put("step before", None, writes=True)
    for arrived_on, waited_for in ((brought, False), (None, True)):
        if arrived_on is None:
            model.compute.wait_stream(brought)
        copies = host_copies([ids, lengths], arrived_on)
        for copy, tensor in zip(copies, (ids, lengths), strict=True):
            assert torch.equal(copy, tensor)
            assert copy.data_ptr() != tensor.data_ptr()
            model.use_by_cpu(copy.numpy(), writes=False)
        step_before = next(work for work, use in enumerate(model.clock.uses) if use[0] == "step before")
        assert (step_before in model.clock.done) is waited_for
    assert not races_of(model)


def test_pinned_memory_is_reused_only_after_its_copies(model):
    def send(*, known):
        filled = staging_empty((3, 4), torch.float32, torch.device("cpu"))
        model.use_by_cpu(filled.numpy(), writes=True)
        sent = copy_staged_to_device(filled, torch.device("cpu"))
        assert sent.data_ptr() != filled.data_ptr()
        memory = model.memory_of(filled)
        if not known:
            memory.copies.clear()
        return filled

    for known in (True, False):
        send(known=known)
        model.sweep()
        assert (not races_of(model)) is known
    before = len(races_of(model))
    kept = send(known=True)
    model.use_by_cpu(kept.numpy(), writes=True)
    assert len(races_of(model)) == before + 1, "it changes while the device copies from it"
