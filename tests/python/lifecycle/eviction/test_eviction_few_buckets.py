"""Checkpoints with fewer buckets than ranks: all ranks take part in agreements, also those without a bucket."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dcp_cases
from processes import World, process_group
from torchrec_embcache import admission, cache_modules, evict, set_time
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Keep, Policy, Share, Ttl
from torchrec_models import (
    ROW_WISE,
    Model,
    Rows,
    Settings,
    assert_same_rows,
    batches,
    rows_of,
    sharded,
    together,
    train,
)

BEGIN = 1_700_000_000
BEFORE, STEPS = 4, 7
RULES = {"time": Ttl(seconds=6), "keep": Keep(rows=35), "share": Share(0.25)}
WHEN = {"save": None, "call": 1 << 40, "step": 2}
SHARED = {"admission": admission.Count(2), "not_admitted": "oov"}


def made(options: dict[str, Any], buckets: int = 7) -> Any:
    model = Model(Settings(buckets=buckets, options=options))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    return sharded(model, ROW_WISE)


def step(model: Any, batch: Any, at: int) -> None:
    set_time(model, BEGIN + 2 * at)
    train(model, iter([batch]))


def saved(rank: int, world: int, path: str, options: dict[str, Any], buckets: int) -> Rows:
    """A checkpoint after `BEFORE` steps, of tables with so many buckets."""
    model = made(options, buckets)
    for at, batch in enumerate(batches(BEFORE, rank, world, size=12), 1):
        step(model, batch, at)
    Saver().save(model, path)
    return rows_of(model)


def life(rank: int, world: int, path: str, options: dict[str, Any], when: str) -> list[Rows]:
    """Go on from a checkpoint: the rows after each step, and after each kind of save."""
    model = made(options)
    Saver().load(model, path)
    seen = []
    for at, batch in enumerate(batches(BEFORE + STEPS, rank, world, size=12), 1):
        if at <= BEFORE:
            continue
        step(model, batch, at)
        if when == "call" and at % 2 == 0:
            evict(model)
        if at == BEFORE + 3:
            Saver().save(model, f"{path} {world} saver")
        if at == BEFORE + 5:
            dcp_cases.save(dcp_cases.dense_state(), f"{path} {world} dcp", model)
        seen.append(rows_of(model))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("rule", RULES)
def test_rows_leave_as_on_one_rank(tmp_path, two_ranks, three_ranks, rule, when, buckets):
    options = {"eviction": Policy([RULES[rule]], every_steps=WHEN[when])}
    path = str(tmp_path / "saved")
    with process_group(0, 1, str(tmp_path / "store")):
        saved(0, 1, path, {}, buckets)
        expected = life(0, 1, path, options, when)
    assert any(len(after) < len(before) for before, after in itertools.pairwise(expected)), "rows leave"
    for ranks in (two_ranks, three_ranks):
        results = ranks.run(life, path, options, when)
        for at, rows in enumerate(expected):
            assert_same_rows(together([result[at] for result in results]), rows)


def shared_rows(rank: int, world: int, path: str) -> dict[str, list[float]]:
    model = made(SHARED)
    Saver().load(model, path)
    for at, batch in enumerate(batches(BEFORE + STEPS, rank, world, size=12), 1):
        if at > BEFORE:
            step(model, batch, at)
    return {
        name: table.oov_row().tolist()
        for module in cache_modules(model).values()
        for name, table in module.tables.items()
    }


@pytest.mark.parametrize("buckets", [1, 2])
def test_all_ranks_have_the_row_that_refused_ids_share(tmp_path, two_ranks, three_ranks, buckets):
    path = str(tmp_path / "saved")
    with process_group(0, 1, str(tmp_path / "store")):
        saved(0, 1, path, SHARED, buckets)
        expected = shared_rows(0, 1, path)
    assert any(any(row) for row in expected.values())
    for ranks in (two_ranks, three_ranks):
        for found in ranks.run(shared_rows, path):
            for name, row in expected.items():
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(row))


def loaded_after(rank: int, world: int, first: str, second: str) -> tuple[Rows, list[tuple[int, int]]]:
    del rank, world
    model = made({})
    Saver().load(model, first)
    Saver().load(model, second)
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    return rows_of(model), [table.buckets for table in tables]


@pytest.mark.parametrize("buckets", [1, 2])
def test_load_of_more_buckets_spreads_them_over_all_ranks(
    tmp_path: Path, two_ranks: World, three_ranks: World, buckets: int
) -> None:
    few, many = str(tmp_path / "few"), str(tmp_path / "many")
    with process_group(0, 1, str(tmp_path / "store")):
        saved(0, 1, few, {}, buckets)
        expected = saved(0, 1, many, {}, 7)
    for ranks, owned in ((two_ranks, [(0, 4), (4, 7)]), (three_ranks, [(0, 3), (3, 5), (5, 7)])):
        results = ranks.run(loaded_after, few, many)
        assert_same_rows(together([rows for rows, _ in results]), expected)
        assert [found for _, found in results] == [[own] * 3 for own in owned]
