"""Eviction by rule on several ranks."""

from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import HALF_LIFE
from processes import process_group
from torchrec_embcache import cache_modules, evict
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import L2Norm, Policy, Ttl
from torchrec_embcache.exceptions import InputError, StateError, StorageError
from torchrec_embcache.model import _evict
from torchrec_models import MIXED, ROW_WISE, TABLE_WISE, Model, Settings, assert_same_rows, batches, rows_of, sharded
from torchrec_models import together as merged
from torchrec_models import train as train_model

SPREAD = Policy([Ttl(steps=3), L2Norm(below=0.02)], every_steps=2)


def trained_with(rank: int, world: int, shardings: Any, policy: Policy, calls: list[int]) -> Any:
    """Train some steps, with `evict(model)` after those in `calls`. Returns the rows, the losses, and how many rows left."""
    model = Model(Settings(options={"eviction": policy, "score_half_life_steps": HALF_LIFE}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, shardings)
    losses = []
    for step, batch in enumerate(batches(12, rank, world), 1):
        losses.append(train_model(model, [batch]))
        if step in calls:
            evict(model)
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    rows = rows_of(model)
    return rows, torch.cat(losses), sum(table.stats().eviction.evicted for table in tables)


@pytest.fixture
def one_rank(tmp_path):
    with process_group(0, 1, str(tmp_path / "store")):
        yield


@pytest.mark.parametrize(
    ("policy", "calls"), [(SPREAD, []), (Policy([Ttl(steps=2)]), [4, 9])], ids=["every 2 steps", "by call"]
)
@pytest.mark.parametrize("shardings", [ROW_WISE, TABLE_WISE, MIXED], ids=["row-wise", "table-wise", "mixed"])
@pytest.mark.usefixtures("one_rank")
def test_the_same_rows_leave_on_two_ranks_as_on_one(two_ranks, shardings, policy, calls):
    rows, losses, left = trained_with(0, 1, shardings, policy, calls)
    results = two_ranks.run(trained_with, shardings, policy, calls)
    assert rows
    assert left == sum(result[2] for result in results) > 0
    assert_same_rows(merged([result[0] for result in results]), rows)
    torch.testing.assert_close(sum(result[1] for result in results) / 2, losses)


def saved_by(rank: int, world: int, path: str) -> Any:
    model = Model(Settings(options={"eviction": Policy([Ttl(steps=2)])}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, MIXED)
    train_model(model, batches(6, rank, world))
    before = rows_of(model)
    saver = Saver()
    saver.save(model, path)
    train_model(model, batches(3, rank, world))
    saver.save(model, path, incremental=True)
    return before, rows_of(model)


@pytest.mark.usefixtures("one_rank")
def test_a_save_of_two_ranks_is_swept_and_one_rank_loads_it(two_ranks, tmp_path):
    results = two_ranks.run(saved_by, str(tmp_path / "saved"))
    left = merged([result[1] for result in results])
    assert 0 < len(left) < len(merged([result[0] for result in results]).keys() | left.keys())
    model = Model(Settings())
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    Saver().load(model, tmp_path / "saved")
    assert_same_rows(rows_of(model), left)


def swept_alone(rank: int, world: int, path: str) -> Any:
    """Rank 0 alone sweeps a table between two saves. Returns what the saves were, and the rows."""
    model = Model(Settings(options={"eviction": Policy([Ttl(steps=2)], every_steps=6)}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, ROW_WISE)
    saver, kinds, steps = Saver(), [], iter(batches(10, rank, world))

    def save() -> None:
        report = saver.save(model, path, incremental=True)
        kinds.append((report.kind, report.reason))

    def train(count: int) -> None:
        train_model(model, [next(steps) for _ in range(count)])

    train(3)
    save()
    train(1)
    (tables,) = [module.tables for module in cache_modules(model).values() if "ta" in module.tables]
    if rank == 0:
        tables["ta"].evict()
    save()
    kept = rows_of(model)
    train(1)
    save()
    if rank == 0:
        tables["ta"].evict()
    train(1)
    save()
    return kinds, kept, rows_of(model)


@pytest.mark.usefixtures("one_rank")
def test_save_after_one_rank_swept_alone_is_full_then_deltas(two_ranks, tmp_path):
    results = two_ranks.run(swept_alone, str(tmp_path / "saved"))
    kinds = results[0][0]
    assert results[1][0] == kinds
    assert [kind for kind, _ in kinds] == ["full", "full", "delta", "delta"], kinds
    assert "ranks 0 and 1 have swept table bags/ta differently since" in kinds[1][1]
    assert any(table == "ta" for _, table, _ in results[1][1]), "rank 1 was not swept"
    model = Model(Settings())
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    Saver().load(model, tmp_path / "saved")
    assert_same_rows(rows_of(model), merged([result[2] for result in results]))


def refused(rank: int, world: int, what: str, path: str) -> Any:
    """Returns the error of this rank if one of the ranks cannot sweep, or is at another step."""
    policy = Policy([Ttl(steps=2)])
    model = sharded(Model(Settings(options={"eviction": policy})), ROW_WISE, {"learning_rate": 0.1})
    train_model(model, batches(3, rank, world))
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    before, sweep_together = rows_of(model), _evict.sweep_prepared
    if rank == 1 and what == "steps":
        tables[0]._native_table.set_step(9)
    if rank == 1 and what == "fails":

        def fail(_tables: object, _rules: object) -> None:
            raise StorageError("the disk is gone")

        _evict.sweep_prepared = fail
    said = []
    for call in (lambda: evict(model), lambda: Saver().save(model, path)):
        try:
            call()
        except (StateError, StorageError) as error:
            said.append(f"{type(error).__name__}: {error}")
    _evict.sweep_prepared = sweep_together
    if what == "steps" and rank == 1:
        tables[0]._native_table.set_step(3)
    unchanged = rows_of(model) == before
    evict(model)
    train_model(model, batches(2, rank, world))
    return said, unchanged


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("fails", "StorageError", "the disk is gone"),
        ("steps", "StateError", "is at step 3 on rank 0 and at step 9 on rank 1"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_both_and_nothing_is_saved(two_ranks, tmp_path, what, error, words):
    path = tmp_path / "saved"
    results = two_ranks.run(refused, what, str(path))
    for said, unchanged in results:
        assert len(said) == 2
        assert all(each.startswith(error) and words in each for each in said), said
        assert unchanged or what == "fails", "before a rank has failed, others may have swept"
    assert not path.exists() or not [entry for entry in path.iterdir() if entry.name != "lock"]


def test_a_model_without_tables_has_nothing_to_evict_from():
    with pytest.raises(InputError, match="has no cache module: nothing to evict from"):
        evict(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match="give an nn.Module"):
        evict(None)
