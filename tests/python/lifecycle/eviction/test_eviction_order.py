"""Eviction by number: `Keep`, `Share` and `at_least_rows`."""

import random
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import DIM, HALF_LIFE, Expected, budgets, come_again, embedding, ids_of, load_by, save_by, update
from processes import process_group
from tables import Contents
from torchrec_embcache import RowMetadata, cache_modules, evict
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import All, Keep, L2Norm, Policy, Score, Share, Ttl, _select
from torchrec_embcache.exceptions import ConfigError
from torchrec_models import MIXED, ROW_WISE, TABLE_WISE, Model, Settings, assert_same_rows, batches, rows_of, sharded
from torchrec_models import together as merged
from torchrec_models import train as train_model


def trained(table: Any, seed: int, count: int = 12) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        update(table(torch.tensor(come_again(dice, 15))))


def imported(table: Any, rows: dict[int, float]) -> None:
    """Put rows in by their scores, trained last at step 0."""
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    table.import_rows(
        list(rows),
        torch.ones(len(rows), DIM),
        metadata=RowMetadata(zeros, zeros, torch.tensor(list(rows.values())), zeros),
    )


def settled(policy: Policy, rows: dict[int, float]) -> Any:
    """A table without any step whose scores do not decay, with rows of these scores."""
    table = embedding(eviction=policy, score_half_life_steps=1 << 53)
    imported(table, rows)
    return table


TEN = {row_id: float(row_id) for row_id in range(1, 11)}


@pytest.mark.parametrize(
    ("policy", "stay"),
    [
        (Policy([Keep(3)]), {8, 9, 10}),
        (Policy([Keep(10)]), set(TEN)),
        (Policy([Keep(11)]), set(TEN)),
        (Policy([Share(0.3)]), set(range(3, 11))),  # the float64 below 0.3: 2.99... rows
        (Policy([Share(0.5)]), set(range(6, 11))),
        (Policy([Share(0.05)]), set(TEN)),
        (Policy([Score(below=8.5)], at_least_rows=5), set(range(6, 11))),
        (Policy([Score(below=8.5)], at_least_rows=1), {9, 10}),
        (Policy([Score(below=99.0)], at_least_rows=10), set(TEN)),
        (Policy([Score(below=99.0)], at_least_rows=12), set(TEN)),
        (Policy([Share(0.5), Score(below=8.5)], at_least_rows=4), set(range(7, 11))),
        (Policy([All([Share(0.5), Score(below=3.5)])]), set(range(4, 11))),
        (Policy([All([Keep(4), Score(below=3.5)]), All([Share(0.2), L2Norm(below=9.0)])]), set(range(4, 11))),
        # Cuts are of the rows before the sweep, and do not hang on what other rules take.
        (Policy([Keep(5), Score(below=5.5)]), set(range(6, 11))),
    ],
)
def test_the_rows_that_stay_are_the_highest(policy, stay):
    table = settled(policy, TEN)
    evict(table)
    assert set(ids_of(table)) == stay
    evict(table)
    assert set(ids_of(table)) == stay, "a second sweep takes none"
    assert table.stats().eviction.evicted == len(TEN) - len(stay)


def test_a_share_is_taken_again_once_something_has_changed():
    table = settled(Policy([Share(0.5)]), TEN)
    evict(table)
    imported(table, {20: 20.0})
    evict(table)
    assert set(ids_of(table)) == {9, 10, 20}, "3 of 6"
    update(table(torch.tensor([30])))
    evict(table)
    assert set(ids_of(table)) == {10, 20}, "2 of 4, of which the new one has the lowest score"


def test_an_empty_table_is_swept():
    for policy in (Policy([Keep(3)]), Policy([Share(0.5)]), Policy([Ttl(steps=1)], at_least_rows=3)):
        table = embedding(eviction=policy)
        evict(table)
        assert len(table) == 0


def test_fewer_rows_than_one_batch_cannot_be_kept():
    table = embedding(eviction=Policy([Keep(3)]))
    update(table(torch.tensor([1, 2, 3])))
    update(table(torch.tensor([4, 5, 5])))
    table.evict()
    assert sorted(ids_of(table)) == [3, 4, 5]
    update(table(torch.tensor([6, 7, 8, 9])))
    before = Contents.of(table)
    with pytest.raises(ConfigError, match=r"Keep\(rows=3\) keeps fewer rows than one batch trains: .* trained 4 rows"):
        evict(table)
    with pytest.raises(ConfigError, match="than one batch trains"):
        table.evict()
    assert Contents.of(table) == before
    update(table(torch.tensor([6])))
    table.evict()
    assert len(table) == 3
    # Beside another rule that spares the batch it may be less.
    both = embedding(eviction=Policy([All([Keep(1), Ttl(steps=1)])]))
    update(both(torch.tensor([1, 2, 3])))
    update(both(torch.tensor([4, 5])))
    both.evict()
    assert sorted(ids_of(both)) == [4, 5]


def test_sweep_that_keeps_too_few_rows_fails_after_the_step(tmp_path):
    table = embedding(eviction=Policy([Keep(2)], every_steps=2), tiers=budgets("ssd", tmp_path))
    update(table(torch.tensor([1, 2, 3])))
    with pytest.raises(ConfigError, match="trained 3 rows"):
        update(table(torch.tensor([4, 5, 6])))
    assert table.stats().step == 2
    assert len(table) == 6
    update(table(torch.tensor([7])))
    update(table(torch.tensor([8])))
    assert sorted(ids_of(table)) == [7, 8]
    table.close()


# ---- saves


AT_SAVES = {
    "keep": Policy([Keep(60)]),
    "share": Policy([Share(0.2)]),
    "floor": Policy([Ttl(steps=2), L2Norm(below=0.4)], at_least_rows=50),
}


@pytest.mark.slow
@pytest.mark.parametrize("door", ["full", "delta", "async delta", "linked", "dcp", "compact", "blocks"])
@pytest.mark.parametrize("name", AT_SAVES)
def test_every_door_saves_what_a_sweep_leaves(tmp_path, name, door):
    policy, path = AT_SAVES[name], tmp_path / "saved"
    made = {"eviction": policy, "score_half_life_steps": HALF_LIFE}
    model = Expected(policy)
    with (
        embedding(tiers=budgets("ssd", tmp_path / "one"), **made) as one,
        embedding(tiers=budgets("ssd", tmp_path / "two"), **made) as two,
    ):
        for each in (one, model.table):
            trained(each, 1)
        if "delta" in door or door == "compact":
            save_by("full", one, path)
            model.sweep()
            for seed in (2, 3):  # a chain of several deltas
                for each in (one, model.table):
                    trained(each, seed)
                if seed == 2:
                    save_by("delta", one, path)
                    model.sweep()
        model.sweep()
        assert model.evicted > 0
        future = save_by(door, one, path)
        if future is not None:
            future.result()
        assert model.is_same(one)
        load_by(door, two, path)
        assert model.is_same(two)
        # The loaded rows were already swept: a save without any step evicts none.
        save_by("full", two, tmp_path / "again")
        assert model.is_same(two)
        save_by("full", one, tmp_path / "again")
        assert model.is_same(one)
        for each in (one, two, model.table):
            trained(each, 5)
        two.evict()
        save_by("full", one, tmp_path / "later")
        model.sweep()
        assert model.is_same(one)
        assert model.is_same(two)


def test_a_save_that_would_keep_too_few_rows_writes_nothing(tmp_path):
    table = embedding(eviction=Policy([Keep(2)]))
    update(table(torch.tensor([1, 2, 3])))
    path = tmp_path / "saved"
    with pytest.raises(ConfigError, match="than one batch trains"):
        Saver(0).save(table, path)
    assert not path.exists() or not [entry for entry in path.iterdir() if entry.name != "lock"]
    assert len(table) == 3
    update(table(torch.tensor([1, 2])))
    assert Saver(0).save(table, path).rows == 2


# ---- ranks


def trained_with(
    rank: int, world: int, shardings: Any, policy: Policy, calls: list[int], listed: int, path: str
) -> Any:
    """Train some steps, with `evict(model)` after those in `calls`, and save. Returns the rows and how many left."""
    before, _select.MAX_LISTED_ROWS = _select.MAX_LISTED_ROWS, listed
    try:
        model = Model(Settings(options={"eviction": policy, "score_half_life_steps": HALF_LIFE}))
        apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
        model = sharded(model, shardings)
        saver = Saver()
        for step, batch in enumerate(batches(12, rank, world, size=12), 1):
            train_model(model, [batch])
            if step in calls:
                evict(model)
            if step in (5, 9, 12):
                saver.save(model, path, incremental=True)
        tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
        return rows_of(model), sum(table.stats().eviction.evicted for table in tables)
    finally:
        _select.MAX_LISTED_ROWS = before


@pytest.fixture
def one_rank(tmp_path):
    with process_group(0, 1, str(tmp_path / "store")):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("listed", [1, 1 << 18])
@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (Policy([Keep(40)], every_steps=2), []),
        (Policy([Share(0.2)]), [4, 10]),
        (Policy([Ttl(steps=1), All([Share(0.5), L2Norm(below=0.05)])], every_steps=3, at_least_rows=20), [5]),
    ],
    ids=["keep", "share", "floor"],
)
@pytest.mark.parametrize("shardings", [ROW_WISE, TABLE_WISE, MIXED], ids=["row-wise", "table-wise", "mixed"])
@pytest.mark.usefixtures("one_rank")
def test_the_same_rows_leave_on_any_number_of_ranks(two_ranks, three_ranks, tmp_path, shardings, policy, calls, listed):
    rows, left = trained_with(0, 1, shardings, policy, calls, listed, str(tmp_path / "one"))
    assert rows
    assert left > 0
    for world in (two_ranks, three_ranks):
        path = tmp_path / str(world.size)
        results = world.run(trained_with, shardings, policy, calls, listed, str(path))
        assert left == sum(result[1] for result in results)
        assert_same_rows(merged([result[0] for result in results]), rows)
        model = Model(Settings())
        apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
        Saver().load(model, path)
        assert_same_rows(rows_of(model), rows)


def kept_too_few(rank: int, world: int) -> Any:
    model = Model(Settings(options={"eviction": Policy([Keep(2)])}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, ROW_WISE)
    train_model(model, batches(3, rank, world))
    before = rows_of(model)
    try:
        evict(model)
    except ConfigError as error:
        return str(error), rows_of(model) == before
    return None


def test_too_few_rows_for_the_batch_of_all_ranks_is_an_error_on_all(two_ranks):
    results = two_ranks.run(kept_too_few)
    assert "Keep(rows=2) keeps fewer rows than one batch trains" in results[0][0]
    assert results[0] == results[1]
    assert results[0][1]
