"""A flush of several tables: each is flushed under one token, and then `publish` marks the token as complete."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

from . import publish
from .collective import all_gather, rank, run_on_all_ranks
from .config import TierBudgets
from .exceptions import EmbCacheWarning

__all__ = ["FlushableTable", "flush_tables"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FlushableTable(Protocol):
    """What is asked here of a table with an SSD tier."""

    name: str
    tiers: TierBudgets

    def open(self) -> None:
        """Open the table; harmless twice."""

    def __len__(self) -> int: ...

    @property
    def flush_lock(self) -> AbstractContextManager[Any]:
        """Held from the choice of a flush's token until its state is published."""

    def commit_ids(self) -> list[int]:
        """Tokens of the states in its directory, oldest first."""

    def known_commit_ids(self) -> list[int]:
        """These, and tokens of states that it had. A new token is larger than all of them."""

    def flush_with_commit_id(self, commit_id: int | None) -> int:
        """Publish a state under `commit_id`. Returns the version of the rows that it has."""

    def mark_flushed(self, version: int, *, by_all_ranks: bool = False) -> None:
        """Note that a resume finds the rows of this version; `by_all_ranks`: the rows of every rank."""


def flush_tables(tables: Sequence[FlushableTable], *, single_rank: bool = False) -> None:
    """Write every dirty row of `tables`, which have an SSD tier, and publish them as one state.

    Collective: the tables of all ranks become one state. With `single_rank` this rank asks no other. `StorageError` is raised on
    every rank when one cannot write, and a resume then takes the state before. Threads that flush the same tables take turns.
    """
    with ExitStack() as held:
        # In the same order in every thread, so that no two wait for each other.
        for table in sorted(tables, key=id):
            held.enter_context(table.flush_lock)
        _flush_tables(tables, single_rank=single_rank)


def _flush_tables(tables: Sequence[FlushableTable], *, single_rank: bool) -> None:
    """Do as `flush_tables`. The caller holds `flushing` of each table."""
    began = time.monotonic()
    gather: Callable[[T], list[T]] = _values_of_single_rank if single_rank else all_gather
    agree: Callable[[Callable[[], T]], T] = _run_single_rank if single_rank else run_on_all_ranks
    me = 0 if single_rank else rank()
    published: list[int] = []
    known: list[int] = []

    def commit_roots() -> list[publish.CommitRoot]:
        return publish.identify_roots(table.tiers.ssd_root for table in tables)

    def read_known_ids() -> None:
        for table in tables:
            table.open()
            published.extend(table.commit_ids())
            known.extend(table.known_commit_ids())
        known.extend(publish.commit_ids_of_roots(commit_roots()))

    agree(read_known_ids)
    # The roots are looked at again: where two ranks name a new root at the same time, both see both names, and agree.
    everyone = gather(agree(commit_roots))
    token = publish.new_commit_id(token for tokens in gather(known) for token in tokens)
    # The token of each rank is a random step ahead. All take the largest.
    token = max(gather(token))
    marks = agree(lambda: publish.commit_participants(me, everyone))

    def for_each(work: Callable[[T], object], of: Iterable[T]) -> None:
        """Do `work` for each of `of`. No rank goes on before all have done it."""

        def all_of_them() -> None:
            for one in of:
                work(one)

        agree(all_of_them)

    coordinators = {mark.coordinator for others in gather(marks) for mark in others}
    if len(coordinators) > 1:
        # Agreed on, because a warning may be made an error.
        agree(lambda: _warn_of_coordinators(sorted(root.path for root, _ in coordinators)) if me == 0 else None)
    versions: list[int] = []
    for_each(lambda table: versions.append(table.flush_with_commit_id(token)), tables)
    for_each(lambda mark: mark.prepare(token), marks)
    for_each(lambda mark: mark.commit_as_coordinator(token), marks)
    for table, version in zip(tables, versions, strict=True):
        table.mark_flushed(version, by_all_ranks=not single_rank)
    for_each(lambda mark: mark.commit_as_participant(token), marks)
    mine = agree(lambda: [token for table in tables for token in table.commit_ids()])
    kept = {token for tokens in gather(mine) for token in tokens}
    old = {token for tokens in gather(published) for token in tokens if publish.is_multi_table(token)} - kept
    for_each(lambda mark: mark.forget_commits(old), marks)
    if tables:
        _log.info(
            "flushed %d rows of %s in %.1f s",
            sum(len(table) for table in tables),
            ", ".join(repr(table.name) for table in tables),
            time.monotonic() - began,
        )


def _warn_of_coordinators(roots: Sequence[str]) -> None:
    warnings.warn(
        f"no ssd_dir can be reached from all ranks, so that {len(roots)} of them ({', '.join(roots)}) complete a flush each. A "
        "kill between two may leave the flush complete for some ranks alone: give one table an ssd_dir that every machine mounts",
        EmbCacheWarning,
        stacklevel=8,
    )


def _values_of_single_rank(value: T) -> list[T]:
    return [value]


def _run_single_rank(work: Callable[[], T]) -> T:
    return work()
