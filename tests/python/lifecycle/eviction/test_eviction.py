"""Eviction by rule: the rows that leave a table, and the step at which they leave."""

import copy
import random
from pathlib import Path

import pytest
import torch

from lifecycle_cases import (
    DIM,
    HALF_LIFE,
    Ahead,
    Expected,
    budgets,
    come_again,
    embedding,
    ids_of,
    update,
)
from tables import Contents
from torchrec_embcache import EmbCacheEmbedding, RowMetadata, TierBudgets, admission, evict
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import All, Keep, L2Norm, Policy, Score, Share, Ttl

POLICIES = {
    "time": Policy([Ttl(steps=4)], every_steps=3),
    "score": Policy([Score(below=1.6)], every_steps=2),
    "norm": Policy([L2Norm(below=0.62)], every_steps=4),
    "all of two": Policy([All([Ttl(steps=2), Score(below=1.7)])], every_steps=1),
    "any of three": Policy([Ttl(steps=9), L2Norm(below=0.4), All([Ttl(steps=4), Score(below=2.5)])], every_steps=5),
    "at saves": Policy([Ttl(steps=3), L2Norm(below=0.3)]),
    "a cap": Policy([Keep(60)], every_steps=3),
    "a share": Policy([Share(0.15)], every_steps=4),
    "a floor": Policy([Ttl(steps=2)], every_steps=5, at_least_rows=40),
    "a cap at saves, of the old": Policy(
        [All([Keep(30), Ttl(steps=2)]), All([Share(0.3), L2Norm(below=0.7)])], at_least_rows=20
    ),
}


def abandoned(table: EmbCacheEmbedding, ids: list[int]) -> torch.Tensor:
    """A forward that no backward follows."""
    out: torch.Tensor = table(torch.tensor(ids)).detach()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lookahead", [0, 2, 8])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_the_rows_leave_that_the_model_says(tmp_path, tiers, lookahead, policy):
    dice = random.Random(f"{tiers} {lookahead} {policy}")
    model = Expected(POLICIES[policy])
    saves = 0
    made = {"eviction": POLICIES[policy], "score_half_life_steps": HALF_LIFE}
    with embedding(tiers=budgets(tiers, tmp_path / "a"), **made) as table:
        steps = [come_again(dice, 14) for _ in range(40)]
        prefetches = Ahead(table, steps, lookahead)
        for place, ids in enumerate(steps):
            prefetches.of(place)
            match dice.randrange(8):
                case 0:
                    table.evict()
                    model.sweep()
                case 1:
                    other = come_again(dice, 9)
                    with torch.no_grad():
                        assert torch.equal(table(torch.tensor(other)), model.read(other)), place
                case 2:
                    other = come_again(dice, 9)
                    prefetches.forget(place)
                    assert torch.equal(abandoned(table, other), abandoned(model.table, other)), place
                case 3:
                    table.flush()
                case 4 if place:
                    saves += 1
                    saved_and_loaded(table, model, tmp_path, saves, budgets(tiers, tmp_path / f"b{saves}"))
            out = table(torch.tensor(ids))
            update(out)
            assert torch.equal(out.detach(), model.train(ids)), place
        assert model.is_same(table)
        stats = table.stats().eviction
        assert stats is not None
        assert stats.evicted == model.evicted > 0
        assert not stats.is_sweeping
        assert saves
        if tiers == "ssd":
            assert table.stats().ssd.logical_written_bytes > 0


def saved_and_loaded(table: EmbCacheEmbedding, model: Expected, folder: Path, number: int, tiers: TierBudgets) -> None:
    """Save the table, on top of what was saved before, and compare what another table loads."""
    Saver(0).save(table, folder / "saved", incremental=number % 3 != 0)
    if model.policy.at_saves and model.table.stats().step:
        model.sweep()
    with embedding(tiers=tiers, eviction=model.policy, score_half_life_steps=HALF_LIFE) as other:
        Saver(0).load(other, folder / "saved")
        assert model.is_same(other)
    assert model.is_same(table)


def test_a_sweep_comes_after_each_multiple_of_the_number_of_steps():
    table = embedding(eviction=Policy([Ttl(steps=1)], every_steps=3))
    rows = []
    for row_id in range(8):
        update(table(torch.tensor([row_id])))
        rows.append(sorted(ids_of(table)))
    assert rows == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5], [5, 6], [5, 6, 7]]
    assert table.stats().eviction.evicted == 5


def test_a_row_that_expires_after_it_was_prefetched_is_born_again():
    policy = Policy([Ttl(steps=2)], every_steps=1)
    table, model = embedding(eviction=policy, score_half_life_steps=HALF_LIFE), Expected(policy)
    steps = [[1, 2], [2], [3], [1, 2], [1]]
    for ids in steps:
        table.prefetch(torch.tensor(ids))
    for ids in steps:
        out = table(torch.tensor(ids))
        update(out)
        assert torch.equal(out.detach(), model.train(ids))
    assert model.is_same(table)
    assert model.evicted == 2, "1 after step 3, and 3 after step 5; 2 was used every other step"


@pytest.mark.parametrize("trains", [True, False])
def test_rows_of_a_forwarded_batch_outlive_a_sweep(trains):
    table = embedding(eviction=Policy([Ttl(steps=1)]))
    update(table(torch.tensor([1, 2])))
    forwarded = table(torch.tensor([1]))
    update(table(torch.tensor([3])))
    before = table.read_rows([1])
    table.evict()
    if trains:
        update(forwarded)
        after = table.read_rows([1])
        assert after.found.all()
        assert after.metadata.count == 2
        assert not torch.equal(after.weights, before.weights)
    del forwarded
    assert sorted(ids_of(table)) == ([1, 3] if trains else [3])


def test_two_sweeps_after_one_step_do_what_one_does():
    table = embedding(eviction=Policy([Ttl(steps=2), L2Norm(below=0.5)]))
    dice = random.Random(3)
    for _ in range(9):
        update(table(torch.tensor(come_again(dice, 12))))
    table.evict()
    once = Contents.of(table)
    table.evict()
    assert Contents.of(table) == once


def test_rows_that_were_imported_leave_by_what_their_metadata_say():
    table = embedding(eviction=Policy([Ttl(steps=3)]))
    for row_id in (1, 1, 1, 1):
        update(table(torch.tensor([row_id])))
    known = RowMetadata(torch.tensor([1]), torch.tensor([4]), torch.tensor([1.0]), torch.zeros(1, dtype=torch.int64))
    table.import_rows([7], torch.ones(1, DIM))
    table.import_rows([8], torch.ones(1, DIM), metadata=known)
    table.evict()
    assert sorted(ids_of(table)) == [1, 8]


def test_a_table_without_a_policy_is_left_as_it_is():
    table = embedding()
    update(table(torch.tensor([1, 2])))
    table.evict()
    evict(table)
    assert len(table) == 2
    assert table.stats().eviction is None


@pytest.mark.parametrize("lookahead", [0, 4])
def test_an_id_whose_row_left_is_counted_from_0_again(lookahead):
    policy = Policy([Ttl(steps=3)], every_steps=2)
    rule = admission.Count(2)
    dice = random.Random(8)
    model = Expected(policy, admission=rule)
    table = embedding(eviction=policy, admission=rule, score_half_life_steps=HALF_LIFE)
    steps = [come_again(dice, 12) for _ in range(50)]
    prefetches = Ahead(table, steps, lookahead)
    for place, ids in enumerate(steps):
        prefetches.of(place)
        out = table(torch.tensor(ids))
        update(out)
        assert torch.equal(out.detach(), model.train(ids)), place
    assert model.is_same(table)
    assert model.evicted > 0
    assert table.stats().admission.pending == model.table.stats().admission.pending > 0


def test_copy_has_the_remaining_rows_and_continues_alike():
    policy = Policy([Ttl(steps=3)], every_steps=4)
    table, dice = embedding(eviction=policy), random.Random(5)
    for _ in range(10):
        update(table(torch.tensor(come_again(dice, 12))))
    twin = copy.deepcopy(table)
    assert Contents.of(twin) == Contents.of(table)
    for _ in range(10):
        ids = come_again(dice, 12)
        for each in (table, twin):
            update(each(torch.tensor(ids)))
    assert Contents.of(twin) == Contents.of(table)
