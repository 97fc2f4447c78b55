"""Thresholds that keep a number of rows in eviction order, compared with a sorted list."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lifecycle_cases import DIM, HALF_LIFE, budgets, decayed, embedding
from torchrec_embcache import EmbCacheEmbedding, RowMetadata
from torchrec_embcache._dist.ranks import ProcessGroupRanks, SingleRank
from torchrec_embcache.eviction import _select
from torchrec_embcache.eviction._inputs import SweepInputs
from torchrec_embcache.eviction._select import RankKey, TableRowCounts, find_thresholds
from torchrec_embcache.exceptions import ConfigError, StateError

STEP = 40
# (score, last step) by id.
Known = dict[int, tuple[float, int]]


def filled(known: Known, *, step: int = STEP, **settings: Any) -> EmbCacheEmbedding:
    """A table at a step, with rows of which so much is known."""
    table = embedding(score_half_life_steps=HALF_LIFE, **settings)
    native = table.table._native_table
    native.set_step(step)
    put(table, known)
    return table


def put(table: EmbCacheEmbedding, known: Known) -> None:
    if known:
        metadata = RowMetadata(
            count=torch.ones(len(known), dtype=torch.int64),
            last_step=torch.tensor([last_step for _, last_step in known.values()]),
            score=torch.tensor([score for score, _ in known.values()]),
            modified_epoch=torch.zeros(len(known), dtype=torch.int64),
        )
        table.import_rows(list(known), torch.ones(len(known), DIM), metadata=metadata)


def key(row_id: int, known: tuple[float, int]) -> tuple[float, int, int]:
    """By what rows are ordered. Both zeros are one score, one below 0 stays below 0, and what is no number comes last."""
    score, last_step = known
    left = score if math.isnan(score) else decayed(float(np.float32(score)), last_step, STEP, HALF_LIFE)
    if score < 0:
        left = min(left, -5e-324) if left <= 0 else -5e-324  # above all that is left of other scores below 0
    return math.inf if math.isnan(left) else left, last_step, row_id % (1 << 64)


def in_order(known: Known) -> list[int]:
    """The ids that a sweep looks at, the lowest first."""
    return sorted(
        (row_id for row_id in known if known[row_id][1] <= STEP), key=lambda row_id: key(row_id, known[row_id])
    )


def agreement(table: EmbCacheEmbedding) -> SweepInputs:
    return SweepInputs(STEP, table.table._native_table, SingleRank())


def ids_of(standings: Sequence[RankKey | None]) -> list[int | None]:
    """The ids of the rows at some standings."""
    return [None if standing is None else int(np.uint64(standing.id).astype(np.int64)) for standing in standings]


def exactly(counts: Sequence[int]) -> list[Callable[[TableRowCounts], int]]:
    return [lambda _, count=count: count for count in counts]


def random_ids(dice: random.Random, count: int) -> set[int]:
    near = [dice.randrange(-50, 50) for _ in range(count // 3)]
    return {*near, *(dice.randrange(-(2**63), 2**63) for _ in range(count - len(near)))}


def tables_of(dice: random.Random, count: int) -> dict[str, Known]:
    """Random rows, and rows that are equal in ever more of what they are ordered by."""
    ids = random_ids(dice, count)
    at = lambda: dice.randrange(STEP + 1)  # noqa: E731
    return {
        "any": {row_id: (dice.expovariate(0.2), at()) for row_id in ids},
        "whole scores": {row_id: (float(dice.randrange(1, 4)), at()) for row_id in ids},
        "one score": {row_id: (2.0, STEP - HALF_LIFE * dice.randrange(4)) for row_id in ids},
        "one score and step": dict.fromkeys(ids, (0.0, 0)),
        "ids that follow": dict.fromkeys(range(-count // 2, count // 2), (1.0, 7)),
        "every kind of score": {
            row_id: (dice.choice([0.0, -0.0, -3.5, -1e-45, 1e-45, 3.4e38, math.nan, 1.0]), at()) for row_id in ids
        },
        "some too new": {row_id: (1.0, dice.randrange(STEP + 20)) for row_id in ids},
    }


@pytest.mark.parametrize("listed", [1, 30, _select.MAX_LISTED_ROWS])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_a_cut_is_where_a_sorted_list_has_it(tmp_path, monkeypatch, tiers, listed):
    monkeypatch.setattr(_select, "MAX_LISTED_ROWS", listed)
    dice = random.Random(f"{tiers} {listed}")
    for number, (name, known) in enumerate(tables_of(dice, 300).items()):
        order = in_order(known)
        with filled(known, tiers=budgets(tiers, tmp_path / f"{number}")) as table:
            counts = [0, 1, 2, len(order) - 1, *(dice.randrange(len(order)) for _ in range(9))]
            found = find_thresholds(agreement(table), exactly(counts))
            assert ids_of(found) == [order[count] if count else None for count in counts], name
            assert [find_thresholds(agreement(table), exactly([count]))[0] for count in counts[:6]] == found[:6], name


def test_rows_that_differ_in_their_ids_alone_take_few_passes(monkeypatch):
    monkeypatch.setattr(_select, "MAX_LISTED_ROWS", 64)
    table = filled(dict.fromkeys(range(5000), (1.0, 3)))
    rounds = []

    class Counting(SingleRank):
        def gather(self, work: Callable[[], Any]) -> list[Any]:
            rounds.append(1)
            return super().gather(work)

    on = SweepInputs(STEP, table.table._native_table, Counting())
    assert ids_of(find_thresholds(on, exactly([1, 777, 4999]))) == [1, 777, 4999]
    # How many rows there are; how far they differ, in two calls; then they are told apart, in two calls again.
    assert len(rounds) == 5


def test_an_empty_table_and_one_of_which_none_goes_have_no_cut():
    empty = filled({})
    assert find_thresholds(agreement(empty), [lambda rows: rows.rows // 2]) == [None]
    with filled({1: (1.0, STEP + 1), 2: (1.0, STEP + 2)}) as table:
        seen: list[int] = []

        def all_but_one(rows: TableRowCounts) -> int:
            seen.append(rows.rows)
            return max(0, rows.rows - 1)

        assert find_thresholds(agreement(table), [all_but_one]) == [None]
        assert seen == [2, 0], "those that were trained after the step are not looked at"


def test_cut_gets_row_count_and_rows_of_the_last_step():
    known = {1: (1.0, STEP), 2: (5.0, STEP), 3: (1.0, 2), 4: (1.0, STEP + 1)}
    seen: list[TableRowCounts] = []

    def one(rows: TableRowCounts) -> int:
        seen.append(rows)
        return 1

    assert ids_of(find_thresholds(agreement(filled(known)), [one])) == [1]
    assert seen[-1] == TableRowCounts(rows=3, newest=2, is_swept=False)


def test_a_table_that_changes_between_two_passes_is_counted_anew(monkeypatch):
    monkeypatch.setattr(_select, "MAX_LISTED_ROWS", 1)
    known = {row_id: (1.0 + row_id / 2**20, 0) for row_id in range(100)}
    table = filled(known)
    changes = iter([lambda: None, lambda: None, lambda: table.remove_rows([5]), lambda: put(table, {200: (1.0, 0)})])

    class Changing(SingleRank):
        def gather(self, work: Callable[[], Any]) -> list[Any]:
            next(changes, lambda: None)()
            return super().gather(work)

    on = SweepInputs(STEP, table.table._native_table, Changing())
    # The first pass finds them all in one part. 0 and 200 have the same score and step.
    assert ids_of(find_thresholds(on, exactly([1, 2, 6, 7]))) == [200, 1, 6, 7]
    assert next(changes, None) is None

    added = iter(range(100))
    changes = itertools.repeat(lambda: put(table, {1000 + next(added): (1.0, 0)}))
    always = SweepInputs(STEP, table.table._native_table, Changing())
    with pytest.raises(
        StateError, match="a table changed 16 times while its rows were counted for a sweep after step 40"
    ):
        find_thresholds(always, exactly([7]))


def test_a_table_at_another_step_is_refused():
    table = filled({1: (1.0, 1), 2: (1.0, 1)}, step=STEP + 1)
    with pytest.raises(StateError, match="is at step 41, and a sweep after step 40 is asked for"):
        find_thresholds(agreement(table), exactly([1]))


# ---- ranks


def cut_by(rank: int, world: int, known: Known, counts: list[int], listed: int) -> Any:
    """The cuts of a table whose rows are dealt to the ranks. Where there are three, the middle one has no shard."""
    _select.MAX_LISTED_ROWS = listed
    holders = [other for other in range(world) if (world, other) != (3, 1)]
    mine = {row_id: row for row_id, row in known.items() if holders[row_id % len(holders)] == rank}
    table = filled(mine) if rank in holders else None
    rounds = 0

    class Counting(ProcessGroupRanks):
        def gather(self, work: Callable[[], Any]) -> list[Any]:
            nonlocal rounds
            rounds += 1
            return super().gather(work)

    native = None if table is None else table.table._native_table
    try:
        return find_thresholds(SweepInputs(STEP, native, Counting()), exactly(counts)), rounds
    finally:
        _select.MAX_LISTED_ROWS = 1 << 18


@pytest.mark.parametrize("listed", [1, 50])
def test_ranks_together_find_the_cuts_of_the_whole_table(two_ranks, three_ranks, listed):
    dice = random.Random(listed)
    for name, known in tables_of(dice, 240).items():
        order = in_order(known)
        counts = [0, 1, len(order) // 2, len(order) - 1]
        expected = [order[count] if count else None for count in counts]
        for world in (two_ranks, three_ranks):
            results = world.run(cut_by, known, counts, listed)
            assert all(ids_of(standings) == expected for standings, _ in results), name
            assert len({rounds for _, rounds in results}) == 1


def failing(rank: int, world: int) -> list[str]:
    """Returns the errors of this rank if another rank fails, or all of them do."""
    table = filled(dict.fromkeys(range(rank, 100, world), (1.0, STEP)), step=STEP + (rank == 1))
    said = []
    for step in (STEP, STEP + 1):
        try:
            find_thresholds(SweepInputs(step, table.table._native_table, ProcessGroupRanks()), exactly([4]))
        except StateError as error:
            said.append(str(error))
    table.table._native_table.set_step(STEP)

    def refuse(rows: TableRowCounts) -> int:
        if rows.newest:
            raise ConfigError(f"{rows.newest} rows")
        return 1

    try:
        find_thresholds(SweepInputs(STEP, table.table._native_table, ProcessGroupRanks()), [refuse])
    except ConfigError as error:
        said.append(str(error))
    return said


def test_an_error_of_one_rank_is_raised_on_all(two_ranks):
    for said in two_ranks.run(failing):
        assert len(said) == 3
        assert "is at step 41, and a sweep after step 40" in said[0]
        assert "is at step 40, and a sweep after step 41" in said[1]
        assert said[2] == "100 rows"
