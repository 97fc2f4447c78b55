"""Counters and log lines of sweeps: the number of rows that each rule removed."""

import logging
import random
from collections import Counter

import pytest
import torch

from callback_cases import POLICIES, Told
from lifecycle_cases import HALF_LIFE, Ahead, budgets, come_again, embedding, update
from torchrec_embcache import _native, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Keep, Policy, Ttl


@pytest.mark.slow
@pytest.mark.parametrize("on_evict", [None, "keep"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_each_row_counts_for_the_rule_that_took_it(tmp_path, tiers, lookahead, policy, on_evict):
    dice = random.Random(f"{tiers} {lookahead} {policy}")
    made = {"optimizer": optimizers.Adam(lr=0.1), "score_half_life_steps": HALF_LIFE}
    model = Told(POLICIES[policy], optimizer=optimizers.Adam(lr=0.1))
    with embedding(tiers=budgets(tiers, tmp_path / "a"), eviction=POLICIES[policy], on_evict=on_evict, **made) as table:
        assert table.stats().eviction.evicted_by_rule == {}
        steps = [come_again(dice, 14) for _ in range(40)]
        prefetches = Ahead(table, steps, lookahead)
        for place, ids in enumerate(steps):
            prefetches.of(place)
            match dice.randrange(6):
                case 0:
                    table.evict()
                    model.sweep()
                case 1:
                    table.flush()
                case 2 if place:
                    Saver(0).save(table, tmp_path / "saved", incremental=place % 2 == 0)
                    if model.policy.at_saves:
                        model.sweep()
            out = table(torch.tensor(ids))
            update(out)
            assert torch.equal(out.detach(), model.train(ids)), place
        assert model.is_same(table)  # it looks at all rows, so that no sweep is under way
        found = table.stats().eviction
        assert found.evicted_by_rule == Counter(reason for _, reason, _ in model.rows)
        assert sum(found.evicted_by_rule.values()) == found.evicted > 0
        if policy == "any of three":
            assert len(found.evicted_by_rule) > 1


def test_rows_cut_by_keep_count_as_standing_in_counters():
    table = embedding(eviction=Policy([Ttl(steps=2), Keep(rows=8)]))
    update(table(torch.arange(5)))
    update(table(torch.arange(10, 16)))
    update(table(torch.arange(20, 24)))
    table.evict()  # the first five are too old; of the rest, and of all, the eight highest stay
    assert len(table) == 8
    assert table.stats().eviction.evicted_by_rule == {"ttl": 5, "lowest": 2}
    spared = embedding(eviction=Policy([Ttl(steps=1)], at_least_rows=4))
    update(spared(torch.arange(7)))
    update(spared(torch.arange(7, 9)))
    spared.evict()
    assert len(spared) == 4
    assert spared.stats().eviction.evicted_by_rule == {"ttl": 5}


def test_the_log_says_at_debug_what_each_sweep_took(caplog):
    table = embedding(eviction=Policy([Ttl(steps=2)], every_steps=1))
    with caplog.at_level(logging.DEBUG, "torchrec_embcache"):
        _native.drain_log()  # the core takes the level over
        for row_id in (1, 2, 3):
            update(table(torch.tensor([row_id])))
        assert len(table) == 2
        _native.drain_log()
    said = [record for record in caplog.records if "the sweep after step" in record.getMessage()]
    assert {record.levelno for record in said} == {logging.DEBUG}, "a table may sweep after each step"
    assert [record.getMessage() for record in said][-1] == (
        'table "item": the sweep after step 3 has ended and took 1 rows: LastStep(1)'
    )
