"""One state of several tables: they are flushed under one token, which `publish` then marks as complete."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

from . import publish
from .collective import all_gather, rank, together
from .config import TierBudgets
from .exceptions import EmbCacheWarning

__all__ = ["FlushedTable", "flush_tables"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FlushedTable(Protocol):
    """What is asked of a table with an SSD tier here."""

    name: str
    tiers: TierBudgets

    def open(self) -> None:
        """Open it; harmless twice."""

    def __len__(self) -> int: ...

    @property
    def flushing(self) -> AbstractContextManager[Any]:
        """Held from the choice of a flush's token until its state is published."""

    def published(self) -> list[int]:
        """Tokens of its states, oldest first."""

    def known_tokens(self) -> list[int]:
        """These, and tokens of states that it had: a new one is larger."""

    def flush_as(self, token: int | None) -> int:
        """Publish a state; the version of the rows that it has."""

    def note_flushed(self, version: int, *, by_all_ranks: bool = False) -> None:
        """A resume finds the rows of this version; `by_all_ranks`: those of every rank."""


def flush_tables(tables: Sequence[FlushedTable], *, alone: bool = False) -> None:
    """Write every dirty row of `tables`, which have an SSD tier, and publish them as one state.

    Collective: the tables of all ranks are one state. With `alone` this rank asks no other. Raises `StorageError`, on every rank
    when one cannot write; the state before it is then what a resume takes. Threads that flush the same tables take turns.
    """
    with ExitStack() as held:
        # In one order everywhere, so that no two threads wait for each other.
        for table in sorted(tables, key=id):
            held.enter_context(table.flushing)
        _flush_tables(tables, alone=alone)


def _flush_tables(tables: Sequence[FlushedTable], *, alone: bool) -> None:
    """See `flush_tables`; the caller holds the tables' `flushing`."""
    began = time.monotonic()
    gather: Callable[[T], list[T]] = _only_mine if alone else all_gather
    agree: Callable[[Callable[[], T]], T] = _call if alone else together
    me = 0 if alone else rank()
    published: list[int] = []
    known: list[int] = []

    def roots() -> list[publish.Root]:
        return publish.known_roots(str(table.tiers.ssd_dir) for table in tables)

    def look() -> None:
        for table in tables:
            table.open()
            published.extend(table.published())
            known.extend(table.known_tokens())
        known.extend(publish.known_to(roots()))

    agree(look)
    # Looked at again: where two ranks name a new root at once both see both names, and agree.
    everyone = gather(agree(roots))
    token = publish.new_token(token for tokens in gather(known) for token in tokens)
    # Each rank took a random step: the longest is everyone's.
    token = max(gather(token))
    marks = agree(lambda: publish.marks_to_make(me, everyone))

    def each(work: Callable[[T], object], of: Iterable[T]) -> None:
        """`work` for all of `of`, on every rank before any goes on."""

        def all_of_them() -> None:
            for one in of:
                work(one)

        agree(all_of_them)

    coordinators = {mark.coordinator for others in gather(marks) for mark in others}
    if len(coordinators) > 1 and me == 0:
        places = ", ".join(sorted(path for path, _ in coordinators))
        warnings.warn(
            f"no ssd_dir can be reached from all ranks, so that {len(coordinators)} of them ({places}) complete a flush each: "
            "a kill between two may leave it complete for some ranks alone; give one table an ssd_dir that every machine mounts",
            EmbCacheWarning,
            stacklevel=4,
        )
    versions: list[int] = []
    each(lambda table: versions.append(table.flush_as(token)), tables)
    each(lambda mark: mark.prepare(token), marks)
    each(lambda mark: mark.decide(token), marks)
    for table, version in zip(tables, versions, strict=True):
        table.note_flushed(version, by_all_ranks=not alone)
    each(lambda mark: mark.follow(token), marks)
    kept = {token for tokens in gather([token for table in tables for token in table.published()]) for token in tokens}
    old = {token for tokens in gather(published) for token in tokens if publish.is_shared(token)} - kept
    each(lambda mark: mark.forget(old), marks)
    if tables:
        _log.info(
            "flushed %d rows of %s in %.1f s",
            sum(len(table) for table in tables),
            ", ".join(repr(table.name) for table in tables),
            time.monotonic() - began,
        )


def _only_mine(value: T) -> list[T]:
    return [value]


def _call(work: Callable[[], T]) -> T:
    return work()
