"""Saves of tables: what a checkpoint is to be, decided before it is begun, and the rows of one rank written into it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Literal

from . import _native
from .collective import all_gather, gathered, together
from .config import check_int
from .exceptions import ConfigError, CorruptionError
from .paths import Directory
from .progress import Tracker
from .reports import SaveReport
from .shards import Shard, numbers_of
from .table_names import Pair, shown
from .table_shard import TableShard

__all__ = ["FullEvery", "SavePlan", "Totals", "check_full_every", "plan_save", "write_tables"]

_log = logging.getLogger("torchrec_embcache.saver")
# Why the first incremental save to a directory is full, which nobody has to act on.
_FIRST = "there is no checkpoint yet"

# Which of the incremental saves are full: every how many, or "auto", or none.
FullEvery = int | Literal["auto"] | None

# With "auto" a chain has at most so many deltas. From the lesser number on it ends where it has outgrown what it builds on.
_MOST_DELTAS, _FEW_DELTAS = 64, 8


def check_full_every(value: object) -> FullEvery:
    """Return `value`. `ConfigError` where it is no `FullEvery`."""
    if value is None or value == "auto":
        return value
    if isinstance(value, str):
        raise ConfigError(f'full_every={value!r} is not known: give a number of saves, "auto", or None')
    return check_int("full_every", value, 1, 1 << 20)


@dataclass(frozen=True)
class Base:
    """What a delta builds on: the newest checkpoint, and what each table knows it by (before a compaction another name)."""

    id: _native.CheckpointId
    ancestors: dict[Pair, _native.Ancestor]


@dataclass(frozen=True)
class SavePlan:
    """What a save of `shards` to `directory` is to be, the same on all ranks."""

    shards: list[Shard]
    directory: Directory
    epoch: int
    """Of rows that are trained after it."""
    base: Base | None
    """What it builds on; None: it is full."""
    reason: str | None
    """Why one that was to be a delta is full."""
    counters: bool
    """Whether the counts of ids that wait for rows are written."""

    @property
    def parent(self) -> _native.CheckpointId | None:
        """The checkpoint that a delta builds on."""
        return None if self.base is None else self.base.id

    @property
    def rows(self) -> int | None:
        """How many rows this rank writes; None where only the writing tells."""
        return sum(len(table) for _, _, table in self.shards) if self.base is None else None

    def ancestor(self, module_path: str, table: TableShard) -> _native.Ancestor | None:
        """What a delta of the table builds on, as the table knows it."""
        return None if self.base is None else self.base.ancestors[module_path, table.name]

    def report(self, name: str, parent: str | None, rows: int, tombstones: int) -> SaveReport:
        """Of the checkpoint `name` that was saved, and builds on `parent`."""
        kind: Literal["full", "delta"] = "full" if self.base is None else "delta"
        return SaveReport(name, kind, parent, self.reason, rows, tombstones)


def plan_save(
    shards: list[Shard],
    directory: Directory,
    rank: int,
    *,
    incremental: bool,
    counters: bool = True,
    full_every: FullEvery = "auto",
) -> SavePlan:
    """Decide what a save is to be; the log says why one is full that was to be a delta. Collective."""
    epoch = max(gathered(lambda: max((table.native.epoch() for _, _, table in shards), default=0))) + 1
    base, reason = None, None
    if incremental:
        found, reason = all_gather(together((lambda: _newest(directory)) if rank == 0 else (lambda: (None, None))))[0]
        if found is not None and (reason := found.chain.ends(full_every)) is not None:
            _log.info("%s is saved in full, so that its chain of deltas ends: %s", directory, reason)
        else:
            if found is not None:
                base, reason = _base(shards, found, counters=counters)
            if reason is not None:
                level = logging.INFO if reason == _FIRST else logging.WARNING
                _log.log(level, "%s is saved in full, not as a delta: %s", directory, reason)
    return SavePlan(shards, directory, epoch, base, reason, counters)


@dataclass(frozen=True)
class _Chain:
    """The deltas that a directory ends with, and what they build on."""

    base: str
    base_rows: int
    deltas: int
    delta_rows: int
    """Rows and tombstones of all deltas."""

    @classmethod
    def of(cls, directory: Directory, newest: str) -> _Chain:
        """The chain of the checkpoint `newest`. `CorruptionError` where it cannot be loaded."""
        links = [json.loads(link) for link in _native.CheckpointRows(directory, newest).links()]
        rows = [sum(table["rows"] + table["tombstones"] for table in link["tables"]) for link in links]
        return cls(links[-1]["name"], rows[-1], len(links) - 1, sum(rows[:-1]))

    def ends(self, full_every: FullEvery) -> str | None:
        """Why the next save is to be full."""
        if full_every == "auto":
            if self.deltas >= _MOST_DELTAS:
                return f"{self.deltas} deltas build on {self.base} (full_every='auto')"
            if self.deltas >= _FEW_DELTAS and self.delta_rows >= self.base_rows:
                return (
                    f"the {self.deltas} deltas that build on {self.base} have {self.delta_rows} rows and tombstones, and it has "
                    f"{self.base_rows} rows (full_every='auto')"
                )
        elif full_every is not None and self.deltas + 1 >= full_every:
            return f"{self.deltas} deltas build on {self.base} (full_every={full_every})"
        return None


@dataclass(frozen=True)
class _Newest:
    """What the newest checkpoint says of itself, as ranks tell each other."""

    id: _native.CheckpointId
    merged: _native.CheckpointId | None
    next_epoch: int
    kind: str
    tables: dict[Pair, bool]
    """Whether it has counts of the ids of each table that wait for rows."""
    rows: dict[Pair, int]
    """How many rows a load finds of each table."""
    chain: _Chain


def _newest(directory: Directory) -> tuple[_Newest | None, str | None]:
    """The newest checkpoint, or why there is none to build on."""
    try:
        found = _native.newest_checkpoint(directory)
        if found is None:
            return None, _FIRST
        chain = _Chain.of(directory, found.id.name)
    except CorruptionError as error:
        return None, f"the newest checkpoint there is damaged ({error})"
    tables = {(entry.module, entry.table): entry.pending is not None for entry in found.tables}
    rows = {(entry.module, entry.table): entry.rows for entry in found.tables}
    return _Newest(found.id, found.merged, found.next_epoch, found.kind, tables, rows, chain), None


def _base(shards: list[Shard], found: _Newest, *, counters: bool) -> tuple[Base | None, str | None]:
    """What a delta of these tables on the newest checkpoint builds on, or why there can be none. Collective."""
    name = found.id.name
    if found.kind == "linked":
        return None, f"{name} is a linked checkpoint (linked=True), and deltas build on others only"
    names = {(module_path, table.name) for module_path, _, table in shards}
    everyone = set().union(*all_gather(names))
    if everyone != found.tables.keys():
        return None, f"{name} has other tables than the model"

    if (differs := _counts_differ(shards, found, counters=counters)) is not None:
        return None, differs

    def ancestor(table: TableShard) -> _native.Ancestor | None:
        known = table.native.ancestors()
        return next((one for one in known if one.id in (found.id, found.merged)), None)

    ancestors: dict[Pair, _native.Ancestor | None] = {}

    def unknown_here() -> list[Pair]:
        ancestors.update({(module_path, table.name): ancestor(table) for module_path, _, table in shards})
        return sorted(pair for pair, one in ancestors.items() if one is None or one.next_epoch != found.next_epoch)

    unknown = [pair for pairs in gathered(unknown_here) for pair in pairs]
    if unknown:
        return None, (
            f"what changed in table {shown(unknown[0])} since {name} is not known: another run saved that, "
            "or too long ago, or more rows left or more sweeps came since than are remembered, or the full table dropped rows "
            "while it was loaded"
        )
    base = Base(found.id, {pair: one for pair, one in ancestors.items() if one is not None})
    if (differs := _sweeps_differ(shards, base)) is None:
        differs = _rows_differ(shards, base, found.rows)
    return (base, None) if differs is None else (None, differs)


def _sweeps_differ(shards: list[Shard], base: Base) -> str | None:
    """Why a delta on `base` cannot say the sweeps since then: ranks have made different ones. Collective.

    A delta says one list of sweeps for all rows of a table. `table.evict()` on one rank alone makes them differ, until the next
    sweep of all ranks.
    """

    def sweeps() -> dict[Pair, list[str]]:
        return {
            (path, table.name): table.native.sweeps_since(base.ancestors[path, table.name]) for path, _, table in shards
        }

    first: dict[Pair, tuple[int, list[str]]] = {}
    for rank, of_rank in enumerate(gathered(sweeps)):
        for pair, made in of_rank.items():
            before, others = first.setdefault(pair, (rank, made))
            if made != others:
                return (
                    f"ranks {before} and {rank} have swept table {shown(pair)} differently since {base.id.name}: sweep on all "
                    "ranks together, with evict(model)"
                )
    return None


def _rows_differ(shards: list[Shard], base: Base, saved: dict[Pair, int]) -> str | None:
    """Why a load of a delta on `base` would find other rows than the tables have. Collective.

    No table should come to that: it keeps an error in the bookkeeping of a table from making a chain that cannot be loaded.
    `saved` is how many rows a load of `base` finds.
    """

    def counts() -> dict[Pair, _native.ChangeCounts]:
        return {
            (path, table.name): table.native.count_changes(base.ancestors[path, table.name])
            for path, _, table in shards
        }

    everyone = gathered(counts)
    for pair, before in sorted(saved.items()):
        of_ranks = [counted[pair] for counted in everyone if pair in counted]
        rows, doomed = sum(one.rows for one in of_ranks), sum(one.doomed for one in of_ranks)
        least = before - sum(one.left + one.swept for one in of_ranks)
        if doomed:
            return (
                f"a load would drop {doomed} rows that table {shown(pair)} has, because a sweep since {base.id.name} takes them: a "
                "bug of torchrec-embcache to report"
            )
        if rows < least:
            return (
                f"a load would find {least} rows or more of table {shown(pair)}, which has {rows}: {base.id.name} has {before}, "
                "and fewer are known to have left. This is a bug of torchrec-embcache to report"
            )
    return None


def _counts_differ(shards: list[Shard], newest: _Newest, *, counters: bool) -> str | None:
    """Why a delta with counts, or one without them, cannot build on the newest checkpoint. Collective.

    A load puts the counts of a chain together, of which a delta has those of the ids that occurred since its parent. So on a parent
    without counts some would be missing, and a delta without counts would leave the old ones of its parent.
    """
    pairs = [(path, table.name) for path, _, table in shards if table.settings.lifecycle.counts_ids]
    differ = sorted(pair for pair in pairs if newest.tables[pair] != counters)
    everywhere = [pair for found in all_gather(differ) for pair in found]
    if not everywhere:
        return None
    of = f"of the ids that wait for rows in table {shown(everywhere[0])}"
    if counters:
        return f"{newest.id.name} has no counts {of}"
    return f"{newest.id.name} has counts {of}, and this save leaves them out (counters=False)"


@dataclass
class Totals:
    """How much one rank wrote."""

    rows: int = 0
    tombstones: int = 0
    linked_bytes: int = 0
    copied_bytes: int = 0

    def add(self, written: _native.TableWritten) -> None:
        """Count what one table came to."""
        self.rows += written.rows
        self.tombstones += written.tombstones
        self.linked_bytes += written.linked_bytes
        self.copied_bytes += written.copied_bytes


def write_tables(plan: SavePlan, writer: _native.CheckpointWriter, tracker: Tracker, *, linked: bool) -> Totals:
    """Write the tables of this rank. `linked`: tables with an SSD tier as their segments."""
    totals = Totals()
    for module_path, owner, table in plan.shards:
        numbers = numbers_of(owner.hyperparameters(table.name))
        tracker.table(shown((module_path, table.name)))
        if linked:
            written = writer.link_table(module_path, table.native, numbers)
        elif (ancestor := plan.ancestor(module_path, table)) is not None:
            written = writer.write_changes(module_path, table.native, numbers, ancestor)
        else:
            written = writer.write_table(module_path, table.native, numbers)
        tracker.advance(written.rows)
        totals.add(written)
    return totals
