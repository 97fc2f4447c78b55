"""Histograms of waits: their counts of real tables, and the arithmetic of their buckets."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tables import make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import Histogram
from torchrec_embcache.exceptions import InputError


def is_well_formed(found: Histogram) -> bool:
    bounds = [bound for bound, _ in found.buckets]
    counts = [count for _, count in found.buckets]
    return bounds == sorted(set(bounds)) and all(counts) and sum(counts) == found.count


def test_each_forward_is_one_wait_and_each_read_of_rows_one_latency(tmp_path: Path) -> None:
    with make_bag(tiers=ssd_tiers(tmp_path, host_bytes="256KiB", ssd_bytes="4MiB")) as bag:
        assert (bag.stats().row_wait.count, bag.stats().ssd.read_latency) == (0, Histogram())
        for first in range(0, 12_000, 1_000):
            step(bag, [list(range(first, first + 1_000))])
        bag.flush()
        with torch.no_grad():
            bag(torch.arange(64).view(-1, 1))
        stats = bag.stats()
    assert stats.row_wait.count == 13
    assert stats.ssd.read_latency.count == stats.ssd.reads > 0
    assert stats.ssd.read_latency.sum_ns > 0
    for found in (stats.row_wait, stats.lock_held, stats.ssd.read_latency):
        assert is_well_formed(found)
        # A bound is at most an eighth above its durations.
        bounds = sum(bound * count for bound, count in found.buckets)
        assert found.sum_ns <= bounds <= found.sum_ns * 9 / 8 + found.count


def test_a_batch_whose_rows_are_read_waits_for_the_reads(tmp_path: Path) -> None:
    """A wait is at least as long as the reads that it waits for, where nothing was read ahead. The reads may be done before the
    thread begins to wait, so batches are read until one has waited for all of its reads.
    """
    with make_bag(tiers=ssd_tiers(tmp_path, host_bytes="64KiB", device_bytes="16KiB")) as bag:
        for first in range(0, 6_000, 500):
            step(bag, [list(range(first, first + 500))])
        for turn in range(1_000):
            bag.flush()
            before = bag.stats()
            first = turn % 12 * 500
            step(bag, [list(range(first, first + 500))])
            after = bag.stats()
            wait = after.row_wait - before.row_wait
            reads = after.ssd.read_latency - before.ssd.read_latency
            assert wait.count == 1
            # Reads are under way together, so that the longest of them counts. Rows that compaction has just moved are in RAM.
            shortest = min((bound for bound, _ in reads.buckets), default=float("inf")) * 8 / 9
            if wait.sum_ns >= shortest:
                break
    assert wait.sum_ns >= shortest
    assert after.ssd.read_bytes > before.ssd.read_bytes


def test_each_use_of_the_lock_is_counted_until_it_is_given_up() -> None:
    with make_bag() as bag:
        counts = [bag.stats().lock_held.count for _ in range(3)]
        step(bag, [[1, 2]])
        after = bag.stats().lock_held.count
    assert counts[2] - counts[1] == counts[1] - counts[0] == 1  # `stats` itself takes the lock
    assert after > counts[2] + 1


def test_waits_are_counted_alike_with_and_without_lookahead(tmp_path: Path) -> None:
    counts = []
    for depth in (0, 2):
        with make_bag(tiers=ssd_tiers(tmp_path / str(depth), host_bytes="64KiB")) as bag:
            train(bag, random_batches(6, 8, 60, seed=1), lookahead=depth)
            counts.append(bag.stats().row_wait.count)
    assert counts == [6, 6]


#: Bounds that the core has, and how many durations lie there.
HISTOGRAMS = st.dictionaries(
    st.integers(0, 40).flatmap(lambda power: st.sampled_from([(8 + part) << power for part in range(1, 9)])),
    st.integers(1, 1000),
    max_size=20,
).map(lambda found: Histogram(sum(found.values()), sum(b * c for b, c in found.items()), tuple(sorted(found.items()))))


@given(HISTOGRAMS, HISTOGRAMS)
def test_sum_and_difference_of_histograms_add_and_subtract(one: Histogram, other: Histogram) -> None:
    both = one + other
    assert is_well_formed(both)
    assert (both.count, both.sum_ns) == (one.count + other.count, one.sum_ns + other.sum_ns)
    assert both - other == one
    assert both - one == other
    assert one - one == Histogram()


@given(HISTOGRAMS, st.floats(0, 1))
def test_quantile_bound_is_the_lowest_that_covers_the_share(found: Histogram, q: float) -> None:
    bound = found.quantile(q)
    if not found.count:
        assert bound == 0.0
        return
    assert sum(count for upper, count in found.buckets if upper <= bound) >= q * found.count
    assert sum(count for upper, count in found.buckets if upper < bound) < max(q * found.count, 1e-300)
    assert min(dict(found.buckets)) <= bound <= max(dict(found.buckets))


@pytest.mark.parametrize("q", [-0.1, 1.01, float("nan"), 99])
def test_what_is_no_share_is_refused(q: float) -> None:
    with pytest.raises(InputError, match="give a number from 0 to 1"):
        Histogram().quantile(q)
