"""Batches that are planned on a thread beside training: their order, their errors, and forwards that come before the plan is
made.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from torchrec_embcache._lookup.prefetch import IdBatch, PlanOptions, PrefetchQueue
from torchrec_embcache.exceptions import StorageError

WAIT_S = 600


class Plan:
    def __init__(self, first: int, complete: bool) -> None:
        self.first = first
        self.complete = complete
        self.released = False

    def is_prefetched(self) -> bool:
        return self.complete

    def release(self) -> None:
        self.released = True


class Lookup:
    """Plan a batch when it is permitted to. The batch is known by its first id."""

    def __init__(self, *, incomplete: int | None = None, bad: int | None = None) -> None:
        self.incomplete, self.bad = incomplete, bad
        self.plans: list[Plan] = []
        self.threads: set[str] = set()
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def plan(self, ids: Any, *_options: Any) -> Plan:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.let.acquire(timeout=WAIT_S)
        if ids[0] == self.bad:
            raise StorageError("the disk is gone")
        plan = Plan(int(ids[0]), ids[0] != self.incomplete)
        self.plans.append(plan)
        return plan

    def begins(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)


def batch(first: int, clicks: int | None = None) -> IdBatch:
    given = None if clicks is None else np.array([clicks, 0], np.uint32)
    return IdBatch(np.array([first, 7]), np.array([0, 2]), given)


def beside(
    lookahead: PrefetchQueue, lookup: Any, *firsts: int, failed: Callable[[Exception], None] = pytest.fail
) -> None:
    for first in firsts:
        lookahead.prefetch_in_background(
            lookup, batch(first), PlanOptions(train=True, missing="initial", threads=1), failed
        )


def take(lookahead: PrefetchQueue, first: int) -> Any:
    return lookahead.take_plan(batch(first), train=True, recomputed=False)


def until_none_is_announced(lookahead: PrefetchQueue) -> None:
    while lookahead._batches:
        os.sched_yield()


def test_batches_are_planned_in_order_on_another_thread():
    lookahead, lookup = PrefetchQueue(), Lookup()
    beside(lookahead, lookup, 1, 2, 3)
    lookup.let.release(3)
    lookahead.wait_until_planned()
    assert [plan.first for plan in lookup.plans] == [1, 2, 3]
    assert threading.current_thread().name not in lookup.threads
    assert [take(lookahead, first) for first in (1, 2, 3)] == [(plan, 0) for plan in lookup.plans]


def test_forward_waits_for_its_own_plan_only():
    lookahead, lookup = PrefetchQueue(), Lookup()
    beside(lookahead, lookup, 1, 2)
    lookup.begins()
    with ThreadPoolExecutor(1) as forward:
        taken = forward.submit(take, lookahead, 1)
        lookup.let.release()
        plan, dropped = taken.result(WAIT_S)
    assert (plan.first, dropped) == (1, 0)
    lookup.begins()  # the second batch, which nobody permitted
    lookup.let.release()
    lookahead.wait_until_planned()
    assert [plan.first for plan in lookup.plans] == [1, 2]


def test_a_batch_whose_planning_has_not_begun_is_left_to_its_forward():
    lookahead, lookup = PrefetchQueue(), Lookup()
    beside(lookahead, lookup, 1, 2)
    lookup.begins()
    assert lookahead.take_plan(batch(2), train=False, recomputed=False) == (None, 0), "another mode's"
    with ThreadPoolExecutor(1) as forward:
        taken = forward.submit(take, lookahead, 2)
        until_none_is_announced(lookahead)
        lookup.let.release()
        assert taken.result(WAIT_S) == (None, 1)
    lookahead.wait_until_planned()
    assert [(plan.first, plan.released) for plan in lookup.plans] == [(1, True)], "the first was no forward's"


def test_dropping_waits_for_the_plan_under_way_and_releases_it():
    lookahead, lookup = PrefetchQueue(), Lookup()
    beside(lookahead, lookup, 1, 2, 3)
    lookup.begins()
    with ThreadPoolExecutor(1) as other:
        dropped = other.submit(lookahead.clear)
        until_none_is_announced(lookahead)
        lookup.let.release()
        dropped.result(WAIT_S)
    lookahead.wait_until_planned()
    assert [(plan.first, plan.released) for plan in lookup.plans] == [(1, True)]


def test_an_error_is_told_and_holds_up_no_other_batch():
    lookahead, lookup = PrefetchQueue(), Lookup(bad=2)
    errors: list[Exception] = []
    beside(lookahead, lookup, 1, 2, 3, failed=errors.append)
    lookup.let.release(3)
    lookahead.wait_until_planned()
    assert [str(error) for error in errors] == ["the disk is gone"]
    assert [plan.first for plan in lookup.plans] == [1, 3]
    assert take(lookahead, 1) == (lookup.plans[0], 0)
    assert take(lookahead, 2) == (None, 0), "its forward plans it again"
    assert take(lookahead, 3) == (lookup.plans[1], 0)


def test_batches_past_the_budget_are_planned_once_it_is_free():
    lookahead, lookup = PrefetchQueue(), Lookup(incomplete=1)
    lookup.let.release(4)
    beside(lookahead, lookup, 1, 2)
    lookahead.wait_until_planned()
    assert [plan.first for plan in lookup.plans] == [1]
    assert take(lookahead, 1) == (lookup.plans[0], 0)
    beside(lookahead, lookup, 3)
    lookahead.wait_until_planned()
    assert [plan.first for plan in lookup.plans] == [1, 2, 3]
