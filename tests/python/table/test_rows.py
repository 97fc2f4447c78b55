"""Rows by id: export, read, import and remove, over every tier."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tables import OPTIMIZERS, Contents, jagged, make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbedding, RowMetadata, TierBudgets, initializers, optimizers
from torchrec_embcache.exceptions import CapacityError, ConfigError, InputError, StateError


@pytest.fixture(params=["host", "ssd", "device", "device_ssd"])
def tiers(request, tmp_path):
    """Budgets for every combination of tiers. With an SSD tier the others hold a few rows."""
    small = {"host_bytes": "2KiB"} if "ssd" in request.param else {"host_bytes": "1MiB"}
    if "device" in request.param:
        small["device_bytes"] = "2KiB" if "ssd" in request.param else "1MiB"
    return ssd_tiers(tmp_path / "ssd", **small) if "ssd" in request.param else TierBudgets(**small)


BATCHES = random_batches(12, 4, 120)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_export_has_each_row_of_all_tiers_once_with_slots(kind, tiers):
    with make_bag(tiers=tiers, optimizer=OPTIMIZERS[kind]) as bag:
        train(bag, BATCHES)
        counts, last = {}, {}
        for number, bags in enumerate(BATCHES, 1):
            for row in (row for ids in bags for row in ids):
                counts[row] = counts.get(row, 0) + 1
                last[row] = number
        assert len(bag) == len(counts)
        seen = {}
        for chunk in bag.export(chunk_rows=7):
            assert 1 <= len(chunk) <= 7
            assert chunk.weights.shape == (len(chunk), 4)
            assert set(chunk.slots) == set(OPTIMIZERS[kind].slot_names)
            found = bag.read_rows(chunk.ids)
            assert found.found.all()
            assert torch.equal(found.weights, chunk.weights)
            for name, slot in chunk.slots.items():
                assert torch.equal(found.slots[name], slot)
            for row, count, when in zip(
                chunk.ids.tolist(), chunk.metadata.count.tolist(), chunk.metadata.last_step.tolist(), strict=True
            ):
                assert row not in seen
                seen[row] = (count, when)
        assert seen == {row: (counts[row], last[row]) for row in counts}


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_reading_keeps_the_order_touches_no_policy_and_inserts_nothing(tiers):
    with make_bag(tiers=tiers) as bag:
        train(bag, BATCHES)
        before = bag.stats()
        ids = torch.tensor([BATCHES[0][0][0] if BATCHES[0][0] else 0, 424242, 2**63 - 1, 424242])
        found = bag.read_rows(ids)
        assert torch.equal(found.ids, ids)
        assert found.found.tolist()[1::2] == [False, False]
        assert torch.equal(found.weights[1], found.weights[3])
        with make_bag() as other:
            assert torch.equal(found.weights[1], other.read_rows(ids[1:2]).weights[0])
        after = bag.stats()
        assert (after.rows, after.host.evictions, after.host.hits) == (
            before.rows,
            before.host.evictions,
            before.host.hits,
        )
        assert bag.read_rows(torch.empty(0, dtype=torch.int64)).weights.shape == (0, 4)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_rows_move_from_table_to_table_bit_by_bit(kind, tiers):
    with (
        make_bag(optimizer=OPTIMIZERS[kind]) as source,
        make_bag(tiers=tiers, optimizer=OPTIMIZERS[kind]) as target,
    ):
        train(source, BATCHES[:6])
        step(target, [[0, 424242]])
        for chunk in source.export():
            target.import_rows(chunk.ids, chunk.weights, chunk.slots, chunk.metadata)
        assert target.remove_rows(torch.tensor([424242, 434343])) == 1
        assert Contents.of(target).rows == Contents.of(source).rows
        target.table._native_table.set_step(source.stats().step)
        for module in (source, target):
            train(module, BATCHES[6:])
        assert Contents.of(target) == Contents.of(source)


def test_import_without_slots_resets_existing_ones_to_zero():
    with make_bag(optimizer=optimizers.Adam()) as bag:
        step(bag, [[5]])
        bag.import_rows(torch.tensor([5, 6], dtype=torch.int32), torch.ones(2, 4))
        found = bag.read_rows(torch.tensor([5, 6]))
        assert found.found.all()
        assert found.weights.tolist() == [[1.0] * 4] * 2
        assert all(slot.eq(0).all() for slot in found.slots.values())
        assert found.metadata.count.tolist() == [0, 0]


def test_a_removed_row_is_missing_again(tiers):
    with make_bag(tiers=tiers) as bag:
        born = bag.read_rows(torch.tensor([1])).weights
        step(bag, [[1, 2]])
        assert bag.remove_rows(torch.tensor([1, 1, 7])) == 1
        found = bag.read_rows(torch.tensor([1, 2]))
        assert found.found.tolist() == [False, True]
        assert torch.equal(found.weights[0], born[0])
        assert len(bag) == 1


ONE = torch.tensor([1])
META = RowMetadata(count=torch.ones(1, dtype=torch.int64), last_step=ONE, score=torch.ones(1), modified_epoch=ONE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["a"], torch.ones(1, 4)), "ids is a list of .*: give numbers"),
        (([1.5], torch.ones(1, 4)), "ids has dtype float64: give integers"),
        (([True], torch.ones(1, 4)), "ids has dtype bool: give integers"),
        (([1 << 64], torch.ones(1, 4)), "ids is"),
        (([[1], [2, 3]], torch.ones(3, 4)), "ids is not an array"),
        (({1}, torch.ones(1, 4)), "ids is a set"),
        ((torch.tensor([1.0]), torch.ones(1, 4)), "ids has dtype torch.float32"),
        ((torch.tensor([1, 1]), torch.ones(2, 4)), "id 1 is given twice"),
        ((ONE, torch.ones(2, 4)), r"weights has shape \[2, 4\]"),
        ((ONE, torch.ones(1, 4, dtype=torch.float64)[:, :3]), r"weights has shape \[1, 3\] and dtype float64"),
        ((ONE, [["a"] * 4]), "weights is a list of .*: give numbers"),
        ((ONE, torch.ones(1, 4, dtype=torch.bool)), "weights has .*bool"),
        ((ONE, torch.ones(1, 4, dtype=torch.complex64)), "weights has .*complex"),
        ((ONE, [[1e39, 0, 0, 0]]), "weights holds numbers that float32 does not"),
        ((ONE, None), "weights is a NoneType"),
        ((ONE, torch.ones(1, 4), {}), r"slots has \[\]"),
        ((ONE, torch.ones(1, 4), {"sum": torch.ones(1)}), r"sum has shape \[1\]"),
        ((ONE, torch.ones(1, 4), {"exp_avg": torch.ones(1, 4)}), r"slots has \['exp_avg'\]"),
        ((torch.tensor([1, 2]), torch.ones(2, 4), None, META), r"metadata.score has shape"),
        ((torch.tensor([1]), torch.ones(1, 4), None, "used"), "metadata is a str: give RowMetadata"),
        ((torch.tensor([1]), torch.ones(1, 4), [torch.ones(1)]), "slots is a list: give tensors by name"),
        (
            (
                ONE,
                torch.ones(1, 4),
                None,
                RowMetadata(count=-ONE, last_step=ONE, score=torch.ones(1), modified_epoch=ONE),
            ),
            "metadata.count holds -1",
        ),
        ((ONE, torch.ones(1, 4), None, replace(META, count=[1])), "metadata.count is a list: give a tensor"),
        ((ONE, torch.ones(1, 4), None, replace(META, score=torch.ones(1).to_sparse())), "metadata.score is sparse_coo"),
        ((ONE, torch.ones(1, 4), None, replace(META, last_step=ONE.to("meta"))), "metadata.last_step is on the device"),
    ],
)
def test_a_bad_import_is_refused_and_changes_nothing(arguments, words):
    with make_bag() as bag:
        step(bag, [[1]])
        before = Contents.of(bag)
        with pytest.raises(InputError, match=words):
            bag.import_rows(*arguments)
        assert Contents.of(bag) == before


WEIGHTS = [[1.0, 2.0, 3.0, 4.0], [5.5, 6.0, 7.0, 8.0]]


@pytest.mark.parametrize(
    ("ids", "weights", "sums"),
    [
        ([5, -6], WEIGHTS, [1.0, 2.0]),
        (np.array([5, -6]), np.array(WEIGHTS), np.array([1.0, 2.0])),
        (np.array([5, -6], np.int16), np.array(WEIGHTS, np.float16), np.array([1, 2])),
        (np.array([5, (1 << 64) - 6], np.uint64), np.asfortranarray(WEIGHTS), (1, 2)),
        (torch.tensor([5, -6]), torch.tensor(WEIGHTS, dtype=torch.float64), torch.tensor([1, 2])),
        ((5, -6), torch.tensor(WEIGHTS, dtype=torch.bfloat16), [1.0, 2.0]),
        ((5, -6), torch.tensor(WEIGHTS).to(torch.float8_e4m3fn), [1.0, 2.0]),
    ],
    ids=[
        "lists",
        "float64 arrays",
        "narrow arrays",
        "unsigned and Fortran order",
        "float64 tensors",
        "bfloat16",
        "float8",
    ],
)
def test_an_import_takes_tensors_arrays_and_lists_of_any_numbers(ids, weights, sums):
    with make_bag(optimizer=optimizers.RowWiseAdagrad(lr=0.1)) as bag:
        bag.import_rows(ids, weights, {"sum": sums})
        found = bag.read_rows([5, -6, 7])
        assert found.found.tolist() == [True, True, False]
        assert found.weights[:2].tolist() == WEIGHTS
        assert found.slots["sum"][:2].tolist() == [1.0, 2.0]
        assert bag.remove_rows(np.array([5, 7])) == 1
        bag.import_rows([], [])
        assert len(bag) == 1


def test_exported_chunk_as_numpy_arrays_imports_again(tiers):
    with make_bag(tiers=tiers) as bag:
        assert {name: len(values) for name, values in bag.export().to_numpy().items()}.items() >= {
            "ids": 0,
            "weights": 0,
        }.items()
        step(bag, [[1, 2], [3, -4]])
        step(bag, [[1, 5], [3, 6]])
        whole = bag.export(chunk_rows=2).to_numpy()
        assert whole["weights"].shape == (6, 4)
        assert sorted(whole["ids"].tolist()) == [-4, 1, 2, 3, 5, 6]
        first = next(bag.export(chunk_rows=2))
        for name, values in first.to_numpy().items():
            assert (whole[name][:2] == values).all()
        before = Contents.of(bag)
        slots = {name: whole[name] for name in first.slots}
        ids = torch.from_numpy(whole["ids"])
        metadata = bag.read_rows(ids).metadata
        bag.remove_rows(whole["ids"])
        assert len(bag) == 0
        bag.import_rows(whole["ids"], whole["weights"], slots, metadata)
        assert Contents.of(bag).rows == before.rows
        assert bag.read_rows(whole["ids"]).to_numpy()["found"].all()


def test_rows_of_a_batch_in_flight_cannot_be_replaced():
    with make_bag() as bag:
        step(bag, [[1]])
        out = bag(torch.tensor([[1]]))
        with pytest.raises(StateError):
            bag.import_rows(ONE, torch.ones(1, 4))
        out.sum().backward()
        bag.import_rows(ONE, torch.ones(1, 4))
        assert bag.read_rows(ONE).weights.tolist() == [[1.0] * 4]


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_a_step_ends_an_export_that_streams(tiers):
    with make_bag(tiers=tiers) as bag:
        train(bag, BATCHES)
        stream = bag.export(chunk_rows=3)
        next(stream)
        bag.eval()(*jagged(BATCHES[0]))
        next(stream)
        bag.train()
        step(bag, [[1]])
        with pytest.raises(StateError):
            list(stream)


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_a_full_last_tier_raises_before_anything_is_lost():
    with make_bag(tiers=TierBudgets(host_bytes="4KiB"), initializer=initializers.Constant(1)) as bag:
        number, caught = 0, None
        while caught is None and number < 1000:
            before = Contents.of(bag)
            try:
                step(bag, [[number]])
                number += 1
            except CapacityError as error:
                caught = error
        assert "item" in str(caught)
        assert "rows" in str(caught)
        assert isinstance(caught, RuntimeError)
        assert 4 < number < 100
        assert Contents.of(bag) == before
        assert bag.stats().pinned_rows == 0
        step(bag, [[0, number - 1]])  # existing rows go on training
        assert len(bag) == number
        bag.remove_rows(torch.tensor([0]))
        step(bag, [[number]])


@pytest.mark.filterwarnings("ignore:table 'item'.* did not fit")
def test_a_full_last_tier_can_drop_rows_by_policy_and_counts_them():
    with make_bag(tiers=TierBudgets(host_bytes="4KiB"), on_full="evict", policy="lru") as bag:
        for number in range(200):
            step(bag, [[number]])
        stats = bag.stats()
        assert stats.rows + stats.dropped_rows == 200
        assert stats.dropped_rows > 100
        assert bag.read_rows(torch.tensor([199])).found.all()
        assert not bag.read_rows(torch.tensor([0])).found.any()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("on_ssd", [False, True])
def test_a_refused_batch_of_a_table_that_drops_rows_drops_none(tmp_path, on_ssd, ahead):
    tiers = TierBudgets(host_bytes="32KiB")
    if on_ssd:
        tiers = ssd_tiers(tmp_path / "ssd", host_bytes="32KiB", ssd_bytes="256KiB")
    with make_bag(tiers=tiers, on_full="evict", on_evict="keep") as bag:
        for number in range(60):
            step(bag, [list(range(100 * number, 100 * number + 100))])
        list(bag.drain_evicted())
        before = bag.stats()
        assert before.dropped_rows > 0
        too_many = [list(range(10**6, 10**6 + before.rows + 1))]
        if ahead:
            bag.prefetch(*jagged(too_many))
        with pytest.raises(CapacityError, match="ssd_bytes=" if on_ssd else "host_bytes="):
            step(bag, too_many)
        after = bag.stats()
        assert (after.rows, after.dropped_rows, after.pinned_rows) == (before.rows, before.dropped_rows, 0)
        assert not list(bag.drain_evicted())
        step(bag, [too_many[0][1:]])
        assert len(bag) == before.rows


def test_stats_count_rows_bytes_hits_and_misses_of_each_tier(tmp_path):
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="8KiB"), policy="lru") as bag:
        for number in range(40):
            step(bag, [list(range(10 * number, 10 * number + 10))])
        stats = bag.stats()
        assert (stats.rows, stats.step, stats.pinned_rows, stats.device) == (400, 40, 0, None)
        assert 0 < stats.host.rows < 100
        assert stats.host.bytes - stats.ssd.index_bytes <= stats.host.capacity_bytes == 8192
        assert stats.host.evictions >= 300
        assert stats.ssd.rows + stats.host.rows >= 400
        assert stats.ssd.logical_written_bytes > 0
        hits = stats.host.hits
        step(bag, [list(range(390, 400))])
        assert bag.stats().host.hits == hits + 10
        bag.flush()  # what is in a write buffer is read from there
        fetched = bag.stats().ssd.hits
        step(bag, [list(range(10))])
        assert bag.stats().ssd.hits == fetched + 10
        assert bag.stats().ssd.read_bytes > 0
        assert bag.stats().ssd.write_amplification > 0


def odd_ids() -> list[torch.Tensor]:
    """Ids of the right dtype that do not lie one after the other in memory, or are not in RAM."""
    plain = torch.arange(4)
    with FakeTensorMode():
        fake = torch.arange(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these layouts a prototype
        return [
            plain.view(2, 2).to_sparse(),
            plain.view(2, 2).to_sparse_csr(),
            torch.nested.nested_tensor([plain, plain[:2]]),
            torch.nested.nested_tensor([plain, plain[:2]], layout=torch.jagged),
            fake,
            plain.to(torch.complex64),
            torch.empty(4, dtype=torch.int64, device="meta"),
        ]


def test_ids_and_rows_that_are_no_plain_tensors_are_refused_by_name() -> None:
    bag = make_bag()
    sequence = EmbCacheEmbedding(
        name="item", embedding_dim=4, tiers=TierBudgets(host_bytes="64KiB"), optimizer=optimizers.SGD(lr=0.1)
    )
    for ids in odd_ids():
        for use in (
            lambda ids=ids: bag(ids, torch.tensor([0])),
            lambda ids=ids: bag(torch.arange(4), ids),
            lambda ids=ids: sequence(ids),
            lambda ids=ids: bag.read_rows(ids),
            lambda ids=ids: bag.remove_rows(ids),
            lambda ids=ids: bag.import_rows(ids, torch.zeros(4, 4)),
        ):
            with pytest.raises(InputError):
                use()
    for weights in (torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4, device="meta")):
        with pytest.raises(InputError):
            bag.import_rows(torch.arange(4), weights)
    assert len(bag) == 0


def test_a_device_tier_larger_than_the_devices_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_bytes=1152921504606846976 .*which has \d+: give less"):
        EmbCacheEmbedding(
            name="item",
            embedding_dim=65_536,
            tiers=TierBudgets(device_bytes=2**60, host_bytes="1MiB"),
            optimizer=optimizers.SGD(lr=0.1),
        )
