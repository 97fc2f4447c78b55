"""Lookahead: plans prefetched batches in the order of their forwards, on the calling thread or on a planner thread.

One batch is planned at a time. The planner thread is started with the first batch passed to it and stops with its `PrefetchQueue`.
Everything else is called by the training thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native

from .profiling import profiled

if TYPE_CHECKING:
    from torchrec_embcache._native import Lookup, MissingMode, Plan, PlanMode

__all__ = ["MAX_PREFETCHED", "IdBatch", "PlanOptions", "PrefetchQueue"]

#: Maximum number of batches that a caller prefetches ahead of their forwards. Older batches are stale.
MAX_PREFETCHED = 16


@dataclass(frozen=True, eq=False)
class IdBatch:
    """The ids of one batch, feature after feature.

    `ids` [N] has the ids of F features. `splits` [F + 1] has the bounds of the features in `ids`. `clicks` [N] are the clicks of
    each occurrence; None: no clicks.
    """

    ids: NDArray[np.int64]
    splits: NDArray[np.int64]
    clicks: NDArray[np.uint32] | None = None

    def copy(self) -> IdBatch:
        """Returns a batch with copies of the arrays."""
        return IdBatch(self.ids.copy(), self.splits.copy(), None if self.clicks is None else self.clicks.copy())

    def is_same(self, other: IdBatch) -> bool:
        """True if both have the same ids and clicks."""
        if self.clicks is None or other.clicks is None:
            same_clicks = self.clicks is other.clicks
        else:
            same_clicks = np.array_equal(self.clicks, other.clicks)
        return same_clicks and np.array_equal(self.splits, other.splits) and np.array_equal(self.ids, other.ids)


@dataclass(frozen=True)
class PlanOptions:
    """Options of planning a batch; see `PlanMode` in `_native.pyi`."""

    train: bool
    missing: MissingMode
    threads: int

    @profiled("embcache::plan")
    def plan(self, lookup: Lookup, batch: IdBatch, *, prefetch: bool) -> Plan:
        """Returns a native plan. With `prefetch` it fetches rows only as far as the budget allows."""
        mode = _plan_mode(self.train, prefetch, self.missing)
        return lookup.plan(batch.ids, batch.splits, mode, self.threads, batch.clicks)


@functools.cache
def _plan_mode(train: bool, prefetch: bool, missing: MissingMode) -> PlanMode:
    """Returns a native mode. The few different modes are created once."""
    return _native.PlanMode(train=train, is_prefetch=prefetch, missing=missing)


@dataclass(eq=False)
class _PrefetchedBatch:
    """A prefetched batch. `plan` is None while the budget has no space for it, and if its forward is to plan it again.

    The latter is the case if planning or placing it has `failed`. `ids` is None if they could not be read. A batch that `is_used`
    was prefetched for training and read without it, or vice versa. `forwards_since` counts the training forwards since an
    evaluation batch was prefetched.
    """

    ids: IdBatch | None
    options: PlanOptions
    plan: Plan | None = None
    failed: bool = False
    is_placed: bool = False
    is_used: bool = False
    forwards_since: int = 0

    def matches(self, ids: IdBatch) -> bool:
        return self.ids is not None and self.ids.is_same(ids)


class PrefetchQueue:
    """The prefetched batches of one lookup."""

    def __init__(self) -> None:
        self._batches: list[_PrefetchedBatch] = []
        self._planning: _PrefetchedBatch | None = None
        self._changed = threading.Condition()  # notified when one of the two above changes
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def prefetch(self, lookup: Lookup, ids: IdBatch, options: PlanOptions) -> bool:
        """Plans a batch. Returns False if the budget ended before all of it was fetched, so that the forward fetches the rest.

        Raises the errors of planning.
        """
        self._add(ids, options)
        return self._plan(lookup)

    def prefetch_in_background(
        self, lookup: Lookup, ids: IdBatch, options: PlanOptions, on_error: Callable[[Exception], None]
    ) -> None:
        """Like `prefetch`, but on the planner thread, which calls `on_error` with an error.

        Call `wait_until_planned` before any other use of the tables.
        """
        self._add(ids, options)

        def plan() -> None:
            try:
                self._plan(lookup)
            except Exception as error:
                on_error(error)

        if self._thread is None:
            if not _native.has_memory_for_threads():
                plan()
                return
            self._thread = ThreadPoolExecutor(1, "embcache-plan")
        self._jobs.append(self._thread.submit(plan))

    def wait_until_planned(self) -> None:
        """Waits until the planner thread has planned all prefetched batches."""
        while self._jobs:
            self._jobs[0].result()
            del self._jobs[0]

    def prefetch_unread(self, options: PlanOptions) -> None:
        """Reserves the position of a batch whose ids could not be read. Its forward plans it."""
        with self._changed:
            self._batches.append(_PrefetchedBatch(None, options, failed=True))

    def place(self, ids: IdBatch, place: Callable[[Plan], None], on_error: Callable[[Exception], None]) -> None:
        """Calls `place` to put the rows of a training batch into their slots, if it is the next batch and all its rows are in RAM.

        Rows that were inserted and demoted from RAM since the batch was planned are read in this call. On an error the batch is
        unpinned, and its forward plans it again. An `Exception` is passed to `on_error`; other exceptions are raised.
        """
        with self._changed:
            batch = next((batch for batch in self._batches if batch.options.train), None)
        if batch is None or batch.plan is None or not batch.matches(ids):
            return
        try:
            if batch.plan.is_ready() and batch.plan.is_prefetched():
                place(batch.plan)
                batch.is_placed = True
        except BaseException as error:
            self._unplan(batch, failed=True)
            if not isinstance(error, Exception):
                raise
            on_error(error)

    def unplace(self) -> None:
        """Unpins the rows of placed batches. They are planned again with the next batch, or by their forwards."""
        with self._changed:
            placed = [batch for batch in self._batches if batch.is_placed]
        for batch in placed:
            self._unplan(batch, failed=False)

    def _unplan(self, batch: _PrefetchedBatch, *, failed: bool) -> None:
        with self._changed:
            plan, batch.plan, batch.failed, batch.is_placed = batch.plan, None, failed, False
        if plan is not None:
            plan.release()

    def take_plan(self, ids: IdBatch, *, train: bool, recomputed: bool) -> tuple[Plan | None, int]:
        """Returns the plan of this forward's batch, if it was prefetched and planned, and the number of dropped batches.

        Batches prefetched before it are dropped, because their forwards did not come. A forward that is `recomputed`, within a
        backward, does not affect upcoming batches and drops none. If the batch was prefetched in the other mode, its rows are
        unpinned, and the forward plans it.
        """
        with self._changed:
            if not self._batches:
                return None, 0
            mine = [batch for batch in self._batches if batch.options.train == train]
            found = next((index for index, batch in enumerate(mine) if batch.matches(ids)), None)
            other = self._mark_used_in_other_mode(ids, train=train) if found is None and not recomputed else None
            stale = self._find_stale(mine, found, is_known=other is not None, train=train) if not recomputed else []
            batch = mine[found] if found is not None and (found == 0 or not recomputed) else None
            self._remove([*stale, *([batch] if batch is not None else [])])
        if other is not None:
            self._unplan(other, failed=True)
        _release(stale)
        return (batch.plan if batch is not None else None), _count_unused(stale)

    def _mark_used_in_other_mode(self, ids: IdBatch, *, train: bool) -> _PrefetchedBatch | None:
        """Marks a batch that was prefetched in the other mode and read by a forward, so that it is not planned. Needs the lock."""
        others = [batch for batch in self._batches if batch.options.train != train and not batch.is_used]
        found = next((batch for batch in others if batch.matches(ids)), None)
        if found is not None:
            found.is_used = found.failed = True
            while self._planning is found:
                self._changed.wait()
        return found

    def _find_stale(
        self, same_mode: list[_PrefetchedBatch], found: int | None, *, is_known: bool, train: bool
    ) -> list[_PrefetchedBatch]:
        """Returns the batches that a forward proves stale. Needs the lock. `same_mode` has the batches of its mode, its own at
        `found`.

        Batches prefetched before it are stale. If it was prefetched in neither mode, the first batch is assumed to be its own. An
        evaluation batch is also stale after many training forwards, and so are the oldest batches that were read in the other mode.
        """
        if found is not None or is_known:
            stale = same_mode[: found or 0]
        else:
            stale = same_mode[
                : next((index for index, batch in enumerate(same_mode) if not batch.is_used), len(same_mode)) + 1
            ]
        rest = [
            batch for batch in self._batches if batch not in stale and (found is None or batch is not same_mode[found])
        ]
        for batch in rest if train else ():
            batch.forwards_since += not batch.options.train
        used = [batch for batch in rest if batch.is_used]
        old = [*used[:-MAX_PREFETCHED], *(batch for batch in rest if batch.forwards_since > MAX_PREFETCHED)]
        return [batch for batch in self._batches if batch in stale or batch in old]

    def drop_oldest(self, *, train: bool) -> int:
        """Drops the oldest batches of a mode beyond `MAX_PREFETCHED`. Returns the number of dropped batches without a forward."""
        with self._changed:
            mine = [batch for batch in self._batches if batch.options.train == train and not batch.is_used]
            stale = mine[: max(len(mine) + 1 - MAX_PREFETCHED, 0)]
            self._remove(stale)
        _release(stale)
        return _count_unused(stale)

    def clear(self) -> None:
        """Drops every batch and unpins its rows."""
        with self._changed:
            batches = list(self._batches)
            self._remove(batches)
        _release(batches)

    def _add(self, ids: IdBatch, options: PlanOptions) -> None:
        with self._changed:
            self._batches.append(_PrefetchedBatch(ids.copy(), options))

    def _remove(self, batches: list[_PrefetchedBatch]) -> None:
        """Removes batches, so that no thread plans them. Needs the lock."""
        for batch in batches:
            self._batches.remove(batch)
        while any(self._planning is batch for batch in batches):
            self._changed.wait()

    def _plan(self, lookup: Lookup) -> bool:
        """Plans the prefetched batches in order, as far as the budget allows. Returns True if all are planned.

        A batch whose plan fails does not block the others: its forward plans it again.
        """
        while True:
            with self._changed:
                while self._planning is not None:
                    self._changed.wait()
                batch = None
                for batch in self._batches:
                    if batch.failed:
                        continue
                    if batch.plan is None:
                        break
                    if not batch.plan.is_prefetched():
                        return False
                else:
                    return True
                self._planning = batch
            assert batch.ids is not None, "a batch whose ids could not be read has failed"
            try:
                batch.plan = batch.options.plan(lookup, batch.ids, prefetch=True)
            finally:
                with self._changed:
                    batch.failed = batch.plan is None
                    self._planning = None
                    self._changed.notify_all()


def _count_unused(batches: list[_PrefetchedBatch]) -> int:
    """Returns the number of batches that were prefetched with their ids and read by no forward."""
    return sum(batch.ids is not None and not batch.is_used for batch in batches)


def _release(batches: list[_PrefetchedBatch]) -> None:
    for batch in batches:
        if batch.plan is not None:
            batch.plan.release()
