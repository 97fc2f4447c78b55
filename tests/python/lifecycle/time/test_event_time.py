"""Event time set by the user: it survives a new table and a load, and continues from the saved time."""

from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import DOORS, budgets, embedding, ids_of, load_by, save_by, update
from time_cases import now
from torchrec_embcache import TierBudgets, cache_modules, evict, set_time
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Policy, Ttl
from torchrec_embcache.exceptions import InputError
from torchrec_models import MIXED, Model, Settings, batches, rows_of, sharded
from torchrec_models import train as train_model

BEGIN = 1_700_000_000
TTL = 10
POLICY = Policy([Ttl(seconds=TTL)], every_steps=1 << 40)


def trained(table: Any, ids: list[int]) -> None:
    update(table(torch.tensor(ids)))


@pytest.mark.parametrize("with_rows", [False, True], ids=["empty", "with rows"])
def test_a_time_that_is_set_before_the_optimizer_is_the_time_after_it(tmp_path, with_rows):
    model = Model(Settings(options={"eviction": POLICY}))
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    if with_rows:
        for table in tables:
            table.import_rows([-7], torch.ones(1, table.dim))
    set_time(model, BEGIN)
    apply_optimizer_in_backward(torch.optim.Adam, model.table_parameters(), {"lr": 0.1})
    train_model(model, batches(2))
    assert {now(table) for table in tables} == {BEGIN}, "no step is one of the system's time"
    Saver(0).save(model, tmp_path / "saved")
    other = Model(Settings(options={"eviction": POLICY}))
    apply_optimizer_in_backward(torch.optim.Adam, other.table_parameters(), {"lr": 0.1})
    Saver(0).load(other, tmp_path / "saved")
    for loaded in (model, other):
        tables = [table for module in cache_modules(loaded).values() for table in module.tables.values()]
        assert {now(table) for table in tables} == {BEGIN}, "the checkpoint says whose the time is"
        set_time(loaded, BEGIN + TTL)
        evict(loaded)
        assert len(rows_of(loaded)) == 0


def sharded_after_a_time(rank: int, world: int) -> Any:
    model = Model(Settings(options={"eviction": POLICY}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    set_time(model, BEGIN)
    model = sharded(model, MIXED)
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    found = [now(table) for table in tables]
    train_model(model, batches(2, rank, world))
    found += [now(table) for table in tables]
    set_time(model, BEGIN + TTL)
    evict(model)
    return found, len(rows_of(model))


def test_a_time_that_is_set_before_sharding_is_the_time_after_it(two_ranks):
    for found, left in two_ranks.run(sharded_after_a_time):
        assert set(found) == {BEGIN}
        assert left == 0


@pytest.mark.parametrize("kind", ["same", "other buckets"])
@pytest.mark.parametrize("door", DOORS)
def test_a_table_that_goes_back_to_a_checkpoint_goes_on_from_its_time(tmp_path, door, kind):
    """The time that was set after the save is of steps that are gone: those that come again may be before it."""
    made = {"eviction": POLICY, "tiers": budgets("ssd", tmp_path / "a")}
    with embedding(**made) as table:
        table.table.set_time(BEGIN)
        trained(table, [1])
        Saver(0).save(table, tmp_path / "saved")
        table.table.set_time(BEGIN + 1)
        trained(table, [2])
        future = save_by(door, table, tmp_path / "saved")
        if future is not None:
            future.result()
    other_budget = TierBudgets(host_bytes="4KiB", ssd_bytes="64MiB", ssd_dir=tmp_path / "a", reopen="discard")
    buckets = {"total_num_buckets": 5} if kind == "other buckets" else {}
    with embedding(eviction=POLICY, tiers=other_budget, **buckets) as table:
        table.table.set_time(BEGIN + 100)
        trained(table, [3])
        load_by(door, table, tmp_path / "saved")
        assert now(table.table) == BEGIN + 1, "it stands still until it is set"
        with pytest.raises(InputError, match="time does not go back"):
            table.table.set_time(BEGIN)
        table.table.set_time(BEGIN + 2)
        trained(table, [4])
        table.table.set_time(BEGIN + 1 + TTL)
        table.table.evict()
        assert ids_of(table) == [4]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("steps", [0, 1], ids=["not trained", "trained"])
def test_checkpoint_without_times_keeps_event_time(tmp_path, door, steps):
    with embedding(eviction=Policy([Ttl(steps=1 << 40)]), tiers=budgets("ssd", tmp_path / "a")) as table:
        trained(table, [1])
        Saver(0).save(table, tmp_path / "saved")
        trained(table, [2])
        future = save_by(door, table, tmp_path / "saved")
        if future is not None:
            future.result()
    other_budget = TierBudgets(host_bytes="4KiB", ssd_bytes="64MiB", ssd_dir=tmp_path / "a", reopen="discard")
    with embedding(eviction=POLICY, tiers=other_budget) as table:
        table.table.set_time(BEGIN)
        for _ in range(steps):
            trained(table, [9])
        load_by(door, table, tmp_path / "saved")
        assert now(table.table) == BEGIN
        trained(table, [3])
        assert now(table.table) == BEGIN
        table.table.set_time(BEGIN + TTL - 1)
        table.table.evict()
        assert sorted(ids_of(table)) == [1, 2, 3], "steps before count as made with the first one after the load"
        table.table.set_time(BEGIN + TTL)
        table.table.evict()
        assert ids_of(table) == []


def test_times_after_a_load_may_precede_the_set_time(tmp_path):
    with embedding() as table:
        trained(table, [1])
        Saver(0).save(table, tmp_path / "saved")
    with embedding(eviction=POLICY) as table:
        table.table.set_time(BEGIN)
        Saver(0).load(table, tmp_path / "saved")
        table.table.set_time(BEGIN - 50)
        trained(table, [2])
        assert now(table.table) == BEGIN - 50


def test_a_table_whose_time_is_the_systems_has_it_after_a_load_too(tmp_path):
    with embedding(eviction=POLICY) as table:
        trained(table, [1])
        Saver(0).save(table, tmp_path / "saved")
        before = now(table.table)
        Saver(0).load(table, tmp_path / "saved")
        assert now(table.table) >= before > BEGIN
