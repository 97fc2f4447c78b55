"""Saves of tables: what a checkpoint is to be, begun, written, and published or given up."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from . import _native
from .beside import HeldTables, TableToSave, Written
from .cache import CacheTable
from .collective import Group, all_gather, together
from .exceptions import CorruptionError, EmbCacheError
from .paths import Root
from .progress import ProgressWanted, Tracker
from .reports import SaveReport
from .shards import Shard, numbers_of
from .table_names import Pair, shown

__all__ = ["AsyncSave", "SavePlan", "SaveSession", "Unfinished", "Written", "abandon", "plan_save", "warn_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """What a delta builds on: the newest checkpoint, and what each table knows it by (before a compaction another name)."""

    identity: _native.Identity
    ancestors: dict[Pair, _native.Ancestor]


@dataclass(frozen=True)
class SavePlan:
    """What a save of `shards` to `root` is to be, the same on all ranks."""

    shards: list[Shard]
    root: Root
    epoch: int
    """Of rows that are trained after it."""
    base: Base | None
    """What it builds on; None: it is full."""
    reason: str | None
    """Why one that was to be a delta is full."""

    @property
    def rows(self) -> int | None:
        """How many rows this rank writes; None where only the writing tells."""
        return sum(len(table) for _, _, table in self.shards) if self.base is None else None

    def report(self, name: str, rows: int, tombstones: int) -> SaveReport:
        """Of the checkpoint that was saved."""
        kind: Literal["full", "delta"] = "full" if self.base is None else "delta"
        parent = None if self.base is None else self.base.identity[0]
        return SaveReport(name, kind, parent, self.reason, rows, tombstones)


def plan_save(shards: list[Shard], root: Root, rank: int, *, incremental: bool) -> SavePlan:
    """Decide what a save is to be; the log says why one is full that was to be a delta. Collective."""
    epoch = max(all_gather(max((table.native.epoch() for _, _, table in shards), default=0))) + 1
    base, reason = _base(shards, root, rank) if incremental else (None, None)
    if reason is not None:
        _log.warning("%s is saved in full, not as a delta: %s", root, reason)
    return SavePlan(shards, root, epoch, base, reason)


def _base(shards: list[Shard], root: Root, rank: int) -> tuple[Base | None, str | None]:
    """What a delta of these tables in `root` builds on, or why there can be none. Collective."""

    def newest() -> tuple[dict[str, Any] | None, str | None]:
        try:
            found = _native.newest_checkpoint(root.to_save())
        except CorruptionError as error:
            return None, f"the newest checkpoint there is damaged ({error})"
        return found, None if found is not None else "there is no checkpoint yet"

    found, reason = all_gather(together(newest if rank == 0 else lambda: (None, None)))[0]
    if found is None:
        return None, reason
    if found["kind"] == "snapshot":
        return None, f"{found['identity'][0]} is a snapshot, and deltas build on checkpoints only"
    names = {(place, table.name) for place, _, table in shards}
    everyone = set().union(*all_gather(names))
    if everyone != set(found["tables"]):
        return None, f"{found['identity'][0]} has other tables than the model"

    def ancestor(table: CacheTable) -> _native.Ancestor | None:
        known = table.native.ancestors()
        return next((one for one in known if one[:2] in (found["identity"], found["merged"])), None)

    ancestors = {(place, table.name): ancestor(table) for place, _, table in shards}
    unknown = sorted(pair for pair, one in ancestors.items() if one is None or one[2] != found["next_epoch"])
    unknown = [pair for pairs in all_gather(unknown) for pair in pairs]
    if unknown:
        return None, (
            f"what changed in table {shown(unknown[0])} since {found['identity'][0]} is not known: another run saved that, "
            "or too long ago, or more rows left since than are remembered"
        )
    return Base(found["identity"], {pair: one for pair, one in ancestors.items() if one is not None}), None


_Begun = TypeVar("_Begun", _native.CheckpointSave, _native.CheckpointPart)


class Unfinished(Generic[_Begun]):
    """A checkpoint, or a part of one, that `begin` makes for a block; abandoned where an error or an interrupt ends the block."""

    def __init__(self, begin: Callable[[], _Begun]) -> None:
        self._begin: Callable[[], _Begun] = begin
        self._begun: _Begun | None = None

    def __enter__(self) -> _Begun:
        try:
            self._begun = self._begin()
            return self._begun
        except BaseException:
            self._abandon()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()

    def _abandon(self) -> None:
        if self._begun is not None:
            abandon(self._begun)


class SaveSession:
    """A checkpoint in `root` from its beginning on: every rank has one, and the coordinator's begins and publishes it.

    As a block it gives the checkpoint up where it is left by an error or an interrupt: a load finds the one before.
    """

    def __init__(
        self,
        root: Root,
        keep: int,
        *,
        parent: _native.Identity | None = None,
        merged: _native.Identity | None = None,
        snapshot: bool = False,
    ) -> None:
        self._root, self._keep = root, keep
        self._parent, self._merged, self._snapshot = parent, merged, snapshot
        self._begun: _native.CheckpointSave | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.give_up()

    def begin(self, rank: int) -> str:
        """The name of the checkpoint, which the coordinator begins. Collective."""
        return all_gather(together(self._begin if rank == 0 else str))[0]

    def _begin(self) -> str:
        self._begun = _native.CheckpointSave(
            self._root.to_save(), secrets.randbits(64), self._keep, self._parent, self._merged, self._snapshot
        )
        return self._begun.name

    def publish(self, digests: Sequence[tuple[int, int]], epoch: int) -> _native.Identity:
        """Where this rank is the coordinator: make the checkpoint the newest. What it is known by from then on."""
        if self._begun is None:
            return "", 0
        warn_of(self._begun.publish(list(digests), epoch), self._root)
        return self._begun.identity

    def give_up(self) -> None:
        """Remove what the coordinator began, if it is not published. Harmless twice."""
        if self._begun is not None:
            abandon(self._begun)


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    digest: tuple[int, int]
    rows: int
    tombstones: int
    linked_bytes: int
    copied_bytes: int


def write_tables(plan: SavePlan, name: str, place_of: tuple[int, int], tracker: Tracker, *, snapshot: bool) -> Part:
    """Write this rank's part (`place_of`: rank, number of ranks) of the checkpoint `name`."""
    writer = _native.CheckpointWriter(plan.root.to_save(), name, *place_of)
    rows = tombstones = linked = copied = 0
    for place, owner, table in plan.shards:
        pair, numbers = (place, table.name), numbers_of(owner.hyperparameters(table.name))
        tracker.table(shown(pair))
        left = 0
        if snapshot:
            written, more_linked, more_copied = writer.link_table(place, table.native, numbers)
            linked, copied = linked + more_linked, copied + more_copied
        elif plan.base is None:
            written = writer.write_table(place, table.native, numbers)
        else:
            written, left = writer.write_changes(place, table.native, numbers, plan.base.ancestors[pair])
        tracker.advance(written)
        rows, tombstones = rows + written, tombstones + left
    return Part(writer.finish(), rows, tombstones, linked, copied)


class AsyncSave:
    """A save beside training: begun and held by the thread that trains, written and published by another."""

    def __init__(
        self,
        plan: SavePlan,
        session: SaveSession,
        group: Group,
        place_of: tuple[int, int],
        progress: ProgressWanted,
        max_bytes_per_second: int | None,
    ) -> None:
        self._plan, self._session, self._group = plan, session, group
        self._place_of, self._rate = place_of, max_bytes_per_second
        self._tracker = together(lambda: Tracker(progress, "save", plan.rows, shown=place_of[0] == 0))
        self._held: HeldTables | None = None

    def hold(self) -> None:
        """Begin the checkpoint and hold the rows of now, on every rank. Collective."""
        name = self._session.begin(self._place_of[0])
        together(lambda: self._hold(name))

    def _hold(self, name: str) -> None:
        base = self._plan.base
        tables = [
            TableToSave(
                place,
                table,
                numbers_of(owner.hyperparameters(table.name)),
                None if base is None else base.ancestors[place, table.name],
            )
            for place, owner, table in self._plan.shards
        ]
        self._held = HeldTables(self._plan.root, name, self._place_of, tables, self._plan.epoch, self._rate)

    def finish(self) -> SaveReport:
        """Write the rows and publish the checkpoint; it is given up where that fails."""
        held = self._held
        assert held is not None, "hold() comes before"
        try:
            written = self._group.together(lambda: self._write(held))
            digests = [one.digest for one in written]
            identity = self._group.together(lambda: self._session.publish(digests, self._plan.epoch))[0]
        except BaseException:
            self.give_up()
            raise
        held.published(identity)
        rows, tombstones = sum(one.rows for one in written), sum(one.tombstones for one in written)
        return self._plan.report(identity[0], rows, tombstones)

    def _write(self, held: HeldTables) -> Written:
        with self._tracker as tracker:

            def told(one: TableToSave, rows: int | None) -> None:
                if rows is None:
                    tracker.table(shown((one.module, one.table.name)))
                else:
                    tracker.advance(rows)

            return held.write(told)

    def give_up(self) -> None:
        """Hold the tables no more, and remove what was begun. Harmless twice."""
        if self._held is not None:
            self._held.given_up()
        self._session.give_up()


def warn_of(left: list[str], root: str) -> None:
    """Say which older checkpoints could not be removed."""
    for what in left:
        _log.warning("an older checkpoint in %s could not be removed: %s", root, what)


def abandon(begun: _native.CheckpointSave | _native.CheckpointPart) -> None:
    """Remove an unfinished checkpoint, or part of one; the error that ended it is on its way, so one here is only logged."""
    try:
        begun.abandon()
    except EmbCacheError as error:
        _log.info("an unfinished checkpoint stays until the next save: %s", error)
