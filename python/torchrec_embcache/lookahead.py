"""Lookahead: batches that are announced for later forwards are planned in that order, on this thread or on one beside.

One batch is planned at a time. The thread beside is made with the first batch that is announced to it, and ends with its
`PrefetchQueue`. Everything else is called by the thread that trains.
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

from . import _native
from .profiling import profiled

if TYPE_CHECKING:
    from ._native import Lookup, MissingMode, Plan, PlanMode

__all__ = ["MAX_PREFETCHED", "IdBatch", "PlanOptions", "PrefetchQueue"]

#: No caller announces so many batches ahead of their forwards. Older ones will not come.
MAX_PREFETCHED = 16


@dataclass(frozen=True, eq=False)
class IdBatch:
    """The ids of one batch, feature after feature.

    `ids` [N] has the ids of F features. `splits` [F + 1] has where those of each feature begin, and where the last ones end.
    `clicks` [N] are those of each occurrence; None: there are none.
    """

    ids: NDArray[np.int64]
    splits: NDArray[np.int64]
    clicks: NDArray[np.uint32] | None = None

    def copy(self) -> IdBatch:
        """A batch that does not change when its arrays do."""
        return IdBatch(self.ids.copy(), self.splits.copy(), None if self.clicks is None else self.clicks.copy())

    def is_same(self, other: IdBatch) -> bool:
        """Whether both have the same ids and clicks."""
        if self.clicks is None or other.clicks is None:
            same_clicks = self.clicks is other.clicks
        else:
            same_clicks = np.array_equal(self.clicks, other.clicks)
        return same_clicks and np.array_equal(self.splits, other.splits) and np.array_equal(self.ids, other.ids)


@dataclass(frozen=True)
class PlanOptions:
    """How a batch is planned; see `PlanMode` in `_native.pyi`."""

    train: bool
    missing: MissingMode
    threads: int

    @profiled("embcache::plan")
    def plan(self, lookup: Lookup, batch: IdBatch, *, prefetch: bool) -> Plan:
        """A plan of the core's. With `prefetch` it fetches only as far as the budget goes."""
        mode = _plan_mode(self.train, prefetch, self.missing)
        return lookup.plan(batch.ids, batch.splits, mode, self.threads, batch.clicks)


@functools.cache
def _plan_mode(train: bool, prefetch: bool, missing: MissingMode) -> PlanMode:
    """A mode of the core's. There are a few, and each is made once."""
    return _native.PlanMode(train=train, is_prefetch=prefetch, missing=missing)


@dataclass(eq=False)
class _PrefetchedBatch:
    """An announced batch. `plan` is None while the budget has no room for it, and where its forward is to plan it again.

    That is so where planning or placing it has `failed`. `ids` is None where they could not be read. A batch `is_used` that was
    announced for training and read without it, or the other way round. `forwards_since` counts training forwards that came before a
    batch that is not trained.
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
    """The announced batches of one lookup."""

    def __init__(self) -> None:
        self._batches: list[_PrefetchedBatch] = []
        self._planning: _PrefetchedBatch | None = None
        self._changed = threading.Condition()  # is notified when one of the two above changes
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def prefetch(self, lookup: Lookup, ids: IdBatch, options: PlanOptions) -> bool:
        """Plan a batch. False where the budget ended before all of it was fetched, so that the forward fetches the rest.

        Raises as planning does.
        """
        self._add(ids, options)
        return self._plan(lookup)

    def prefetch_in_background(
        self, lookup: Lookup, ids: IdBatch, options: PlanOptions, on_error: Callable[[Exception], None]
    ) -> None:
        """Do as `announce` on the thread beside, which calls `on_error` with an error.

        Call `settle` before anyone uses the tables.
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
        """Wait until all that was announced to the thread beside is planned."""
        while self._jobs:
            self._jobs[0].result()
            del self._jobs[0]

    def prefetch_unread(self, options: PlanOptions) -> None:
        """Keep the place of a batch whose ids could not be read. Its forward plans it."""
        with self._changed:
            self._batches.append(_PrefetchedBatch(None, options, failed=True))

    def place(self, ids: IdBatch, place: Callable[[Plan], None], on_error: Callable[[Exception], None]) -> None:
        """Have `place` put the rows of a training batch into their slots, if it is the next one and all its rows are in RAM.

        A row that was born and left RAM since the batch was planned is read now. On an error the batch is unpinned, and its forward
        plans it again. An `Exception` goes to `on_error`, and others are raised.
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
        """Unpin the rows of batches that were placed. They are planned again with the next batch, or by their forwards."""
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
        """The plan of this forward's batch, if it was announced and planned, and how many batches were dropped.

        Those that were announced before it are dropped, because no forward has come for them. A forward that is `recomputed`,
        within a backward, says nothing about the batches to come, and drops none. Where the batch was announced in the other mode,
        its rows are unpinned, and the forward plans it.
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
        """Note, with the lock held, that a forward has read a batch that was announced in the other mode. Nobody plans it then."""
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
        """The batches that a forward shows to be stale, with the lock held. `same_mode` has those of its mode, with its own at
        `found`.

        They were announced before it. Where it was announced in neither mode, the first one was to be this forward's. A batch of
        evaluation is stale too when many training forwards came before it, and so are the oldest that were read in the other mode.
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
        """Drop the oldest batches of a mode where no caller announces so many. Returns how many forwards have not come."""
        with self._changed:
            mine = [batch for batch in self._batches if batch.options.train == train and not batch.is_used]
            stale = mine[: max(len(mine) + 1 - MAX_PREFETCHED, 0)]
            self._remove(stale)
        _release(stale)
        return _count_unused(stale)

    def clear(self) -> None:
        """Forget every batch and unpin its rows."""
        with self._changed:
            batches = list(self._batches)
            self._remove(batches)
        _release(batches)

    def _add(self, ids: IdBatch, options: PlanOptions) -> None:
        with self._changed:
            self._batches.append(_PrefetchedBatch(ids.copy(), options))

    def _remove(self, batches: list[_PrefetchedBatch]) -> None:
        """Remove batches, with the lock held. Afterwards nobody plans them, nor is about to."""
        for batch in batches:
            self._batches.remove(batch)
        while any(self._planning is batch for batch in batches):
            self._changed.wait()

    def _plan(self, lookup: Lookup) -> bool:
        """Plan what was announced, in order, as far as the budget goes. Whether that is all of it.

        A batch whose plan fails does not hold up the others: its forward plans it again.
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
    """The number of batches that were announced, with their ids, and read by no forward."""
    return sum(batch.ids is not None and not batch.is_used for batch in batches)


def _release(batches: list[_PrefetchedBatch]) -> None:
    for batch in batches:
        if batch.plan is not None:
            batch.plan.release()
