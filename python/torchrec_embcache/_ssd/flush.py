"""Flushes several tables as one state: flushes each under one commit id, then records the commit id as complete."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from torchrec_embcache._dist.ranks import Ranks, SingleRank, all_ranks
from torchrec_embcache.exceptions import EmbCacheWarning

from . import commit
from .table import SsdTable

__all__ = ["flush_tables"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


def flush_tables(tables: Sequence[SsdTable], *, single_rank: bool = False) -> None:
    """Writes every dirty row of `tables`, which have an SSD tier, and commits them as one state.

    Collective: the tables of all ranks form one state. With `single_rank` this rank commits on its own. If one rank cannot write,
    `StorageError` is raised on every rank, and a resume finds the previous state. Concurrent flushes of the same tables run one
    after another.
    """
    with ExitStack() as held:
        # In the same order in every thread, to prevent a deadlock.
        for table in sorted(tables, key=id):
            held.enter_context(table._flush_lock)
        _flush_tables(tables, single_rank=single_rank)


def _flush_tables(tables: Sequence[SsdTable], *, single_rank: bool) -> None:
    """Implements `flush_tables`. The caller holds `_flush_lock` of each table."""
    began = time.monotonic()
    ranks: Ranks = SingleRank() if single_rank else all_ranks()
    published: list[int] = []
    known: list[int] = []

    def commit_roots() -> list[commit.CommitRoot]:
        return commit.identify_roots(table.tiers.ssd_root for table in tables)

    def read_known_ids() -> None:
        for table in tables:
            table.open()
            published.extend(table.commit_ids())
            known.extend(table._known_commit_ids())
        known.extend(commit.commit_ids_of_roots(commit_roots()))

    ranks.run(read_known_ids)
    # Read again: if two ranks name a new root at the same time, both then see both names, and agree.
    everyone = ranks.gather(commit_roots)
    commit_id = commit.new_commit_id(commit_id for commit_ids in ranks.all_gather(known) for commit_id in commit_ids)
    # Each rank's commit id is a random step ahead. All ranks take the largest.
    commit_id = max(ranks.all_gather(commit_id))
    marks = ranks.run(lambda: commit.commit_participants(ranks.rank, everyone))

    def for_each(work: Callable[[T], object], of: Iterable[T]) -> None:
        """Calls `work` for each of `of`. No rank continues before all have finished."""

        def all_of_them() -> None:
            for one in of:
                work(one)

        ranks.run(all_of_them)

    coordinators = {mark.coordinator for others in ranks.all_gather(marks) for mark in others}
    if len(coordinators) > 1:
        # Collective, because a warning may be turned into an error.
        ranks.run(
            lambda: _warn_of_coordinators(sorted(root.path for root, _ in coordinators)) if ranks.rank == 0 else None
        )
    versions: list[int] = []
    for_each(lambda table: versions.append(table._flush_with_commit_id(commit_id)), tables)
    for_each(lambda mark: mark.prepare(commit_id), marks)
    for_each(lambda mark: mark.commit_as_coordinator(commit_id), marks)
    for table, version in zip(tables, versions, strict=True):
        table._mark_flushed(version, by_all_ranks=not single_rank)
    for_each(lambda mark: mark.commit_as_participant(commit_id), marks)
    mine = ranks.run(lambda: [commit_id for table in tables for commit_id in table.commit_ids()])
    kept = {commit_id for commit_ids in ranks.all_gather(mine) for commit_id in commit_ids}
    everywhere = {commit_id for commit_ids in ranks.all_gather(published) for commit_id in commit_ids}
    old = set(filter(commit.is_multi_table, everywhere - kept))
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
