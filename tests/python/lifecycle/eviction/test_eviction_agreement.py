"""Rules that ranks agree on at each sweep: the tables asked at each step, and that all ranks sweep or none."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dcp_cases
from admission_rank_cases import PIPELINES, drain, pipeline_of, pipelines_on_a_cpu
from processes import process_group
from torchrec_embcache import _native, cache_modules, evict
from torchrec_embcache._dist.ranks import SingleRank
from torchrec_embcache.admission import Count, ShowClick
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.config import TierBudgets
from torchrec_embcache.eviction import All, L2Norm, Policy, Rule, Ttl
from torchrec_embcache.eviction._inputs import SweepInputs
from torchrec_embcache.exceptions import ConfigError, StateError, StorageError
from torchrec_embcache.initializers import Constant
from torchrec_embcache.model._evict import sweep_before_save
from torchrec_embcache.optimizers import SGD
from torchrec_embcache.table.cache_table import CacheTable
from torchrec_models import (
    MIXED,
    ROW_WISE,
    TABLE_WISE,
    Model,
    Settings,
    assert_same_rows,
    batches,
    rows_of,
    sharded,
)
from torchrec_models import together as merged
from torchrec_models import train as train_model

LAG = 3


@dataclass(frozen=True)
class Least(Rule):
    """Takes what `Ttl(steps=LAG)` takes, by the least step that a rank says. Rank 1 says a later one than rank 0."""

    def native(self) -> _native.SweepRule:
        return _native.SweepRule.per_sweep()

    @property
    def is_collective(self) -> bool:
        return True

    def resolve(self, on: SweepInputs) -> _native.SweepRule:
        least = min(on.ranks.gather(lambda: on.step - LAG + 2 * on.ranks.rank))
        return _native.SweepRule.trained_until(least) if least >= 0 else _native.SweepRule.nothing()


@dataclass(frozen=True)
class Fails(Least):
    """Fails on rank 1, which has no table-wise table, or of which others share the table."""

    def resolve(self, on: SweepInputs) -> _native.SweepRule:
        def fail() -> None:
            if on.ranks.rank == 1:
                raise StorageError("the disk is gone")

        on.ranks.gather(fail)
        return super().resolve(on)


def made(shardings: Any, policy: Policy) -> Any:
    model = Model(Settings(options={"eviction": policy}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    return sharded(model, shardings)


def trained_with(rank: int, world: int, shardings: Any, policy: Policy, calls: list[int]) -> Any:
    """Train some steps, with `evict(model)` after those in `calls`: the rows after each step, and the losses."""
    model = made(shardings, policy)
    seen, losses = [], []
    for step, batch in enumerate(batches(10, rank, world), 1):
        losses.append(train_model(model, [batch]))
        if step in calls:
            evict(model)
        seen.append(rows_of(model))
    return seen, torch.cat(losses)


@pytest.fixture
def one_rank(tmp_path):
    with process_group(0, 1, str(tmp_path / "store")):
        yield


@pytest.mark.parametrize(("every", "calls"), [(2, []), (None, [4, 5, 9])], ids=["every 2 steps", "by call"])
@pytest.mark.parametrize("shardings", [ROW_WISE, TABLE_WISE, MIXED], ids=["row-wise", "table-wise", "mixed"])
@pytest.mark.usefixtures("one_rank")
def test_ranks_agree_on_a_sweep_and_rows_leave_after_the_step(two_ranks, shardings, every, calls):
    rules = [L2Norm(below=0.02)]
    expected, losses = trained_with(0, 1, shardings, Policy([Ttl(steps=LAG), *rules], every_steps=every), calls)
    policy = Policy([Least(), *rules], every_steps=every)
    alone_seen, alone_losses = trained_with(0, 1, shardings, policy, calls)
    results = two_ranks.run(trained_with, shardings, policy, calls)
    for step, rows in enumerate(expected):
        assert_same_rows(alone_seen[step], rows)
        assert_same_rows(merged([result[0][step] for result in results]), rows)
    torch.testing.assert_close(alone_losses, losses)
    torch.testing.assert_close(sum(result[1] for result in results) / 2, losses)
    assert len(expected[-1]) < len(set().union(*(rows.keys() for rows in expected)))


def piped(rank: int, world: int, pipeline: str, policy: Policy) -> Any:
    with pipelines_on_a_cpu():
        model = made(MIXED, policy)
        drain(pipeline_of(pipeline, model), iter(batches(9, rank, world)))
        return rows_of(model)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_ranks_agree_under_pipelines(two_ranks, pipeline):
    expected = two_ranks.run(piped, pipeline, Policy([Ttl(steps=LAG)], every_steps=2))
    assert two_ranks.run(piped, pipeline, Policy([Least()], every_steps=2)) == expected


def refused(rank: int, world: int, when: str) -> Any:
    """Returns the errors of this rank if a rank fails while the ranks agree, the number of evicted rows, and the table steps."""
    every = 3 if when == "step" else None
    model = made(MIXED, Policy([All([Fails(), L2Norm(below=100)])], every_steps=every))
    said = []
    train_model(model, batches(2, rank, world))
    try:
        train_model(model, itertools.islice(batches(3, rank, world), 2, None))
        if when == "evict":
            evict(model)
    except StorageError as error:
        said.append(str(error))
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    left = sum(table.stats().eviction.evicted for table in tables if table.buckets != (0, table.total_num_buckets))
    steps = [table.step() for table in tables]
    train_model(model, batches(2, rank, world))  # the ranks are in step
    return said, left, steps


@pytest.mark.parametrize("when", ["step", "evict"])
def test_error_on_one_rank_aborts_the_sweep_on_all(two_ranks, when):
    """It is raised on both ranks, and no row leaves."""
    for said, left, steps in two_ranks.run(refused, when):
        assert len(said) == 1
        assert "the disk is gone" in said[0]
        assert left == 0
        assert set(steps) == {3}, "the step itself was made"


def with_others_settings(rank: int, world: int, options: dict[str, Any], of_rank_1: dict[str, Any]) -> Any:
    """Returns the error of this rank if rank 1 has other settings, and the number of tables of its model that can still be used."""
    model = Model(Settings(options=of_rank_1 if rank == 1 else options))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    with pytest.raises(ConfigError) as refusal:
        sharded(model, MIXED)
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    for table in tables:
        table.import_rows([7], torch.ones(1, table.dim))  # nobody has closed it
    other = made(MIXED, Policy([Least()]))
    train_model(other, batches(2, rank, world))  # the ranks are in step
    return str(refusal.value), len(tables)


COUNTED: dict[str, Any] = {"admission": Count(3)}


@pytest.mark.parametrize(
    ("options", "of_rank_1", "said"),
    [
        (COUNTED, {**COUNTED, "not_admitted": "oov"}, ["not_admitted='zeros'", "not_admitted='oov'"]),
        (COUNTED, {"admission": Count(4)}, ["admission=Count(threshold=3,", "admission=Count(threshold=4,"]),
        (COUNTED, {"admission": ShowClick(1, 1, 3)}, ["admission=Count(threshold=3,", "admission=ShowClick("]),
        ({}, {"score_half_life_steps": 9}, ["score_half_life_steps=1024", "score_half_life_steps=9"]),
        ({}, {"eviction": Policy([Least()])}, ["eviction=None", "eviction=Policy(rules=(Least(),), every_steps=None"]),
        (
            {"eviction": Policy([Ttl(steps=5)], every_steps=2)},
            {"eviction": Policy([Ttl(steps=5)], every_steps=3)},
            ["every_steps=2", "every_steps=3"],
        ),
    ],
    ids=["OOV row", "threshold", "clicks", "half life", "no eviction", "every_steps"],
)
def test_ranks_with_different_rules_see_all_of_them_when_sharded(three_ranks, options, of_rank_1, said):
    for refusal, tables in three_ranks.run(with_others_settings, options, of_rank_1):
        first, second = (refusal.index(words) for words in said)
        assert "'bags': table 'ta' has " in refusal
        assert first < refusal.index(" on ranks 0, 2 and ") < second
        assert refusal.endswith(" on rank 1: give all ranks the same")
        assert tables == 3


def one_shard(rank: int, world: int) -> tuple[str, int]:
    model = made(ROW_WISE, Policy([Least()]))
    train_model(model, batches(6, rank, world))
    table = next(table for module in cache_modules(model).values() for table in module.tables.values())
    before = len(table)
    with pytest.raises(StateError, match="shared by 2 ranks.*evict.model") as refusal:
        table.evict()
    assert len(table) == before
    evict(model)
    return str(refusal.value), before - len(table)


def test_one_shard_alone_cannot_be_swept(two_ranks):
    assert sum(left for _, left in two_ranks.run(one_shard)) > 0


def test_lone_shard_of_an_agreed_rule_is_not_saved_alone():
    table = CacheTable(
        name="item",
        dim=2,
        tiers=TierBudgets(host_bytes="1MiB"),
        initializer=Constant(0.0),
        optimizer=SGD(),
        eviction=Policy([Least()]),
        rank=0,
        world_size=2,
    )
    shard = table
    ids = np.arange(20)[shard._owns(np.arange(20))]
    table.import_rows(ids, np.ones((len(ids), 2), np.float32))
    shard._native_table.set_step(9)
    for sweep in (table.evict, lambda: sweep_before_save({"item": shard}, SingleRank())):
        with pytest.raises(StateError, match="shared by 2 ranks"):
            sweep()
    assert len(table) == len(ids) > 0


def saved_by(rank: int, world: int, door: str, path: str) -> Any:
    model = made(MIXED, Policy([Least()]))
    train_model(model, batches(6, rank, world))
    if door == "saver":
        Saver().save(model, path)
        train_model(model, batches(3, rank, world))
        Saver().save(model, path, incremental=True)
    else:
        dcp_cases.save(dcp_cases.dense_state(), path, model)
    return rows_of(model)


@pytest.mark.parametrize("door", ["saver", "dcp"])
@pytest.mark.usefixtures("one_rank")
def test_ranks_agree_before_they_save(two_ranks, tmp_path, door):
    path = str(tmp_path / "saved")
    left = merged(two_ranks.run(saved_by, door, path))
    model = Model(Settings())
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    if door == "saver":
        Saver().load(model, path)
    else:
        dcp_cases.load(dcp_cases.dense_state(), path, model)
    assert_same_rows(rows_of(model), left)
