"""Saves of tables: planning a checkpoint before it is started, and writing the rows of one rank into it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Literal

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import Ranks
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.config import check_int
from torchrec_embcache.exceptions import ConfigError, CorruptionError
from torchrec_embcache.model._names import TablePath, display_name
from torchrec_embcache.model._shards import ModuleShard, numeric_hyperparameters
from torchrec_embcache.table.cache_table import CacheTable

from ._progress import ProgressTracker
from ._save import RankPart
from .reports import SaveReport

__all__ = ["FullEvery", "SavePlan", "check_full_every", "plan_save", "write_tables"]

_log = logging.getLogger("torchrec_embcache.checkpoint.saver")
# The expected reason of the first save to a directory, for which no user action is needed.
_NO_CHECKPOINT = "there is no checkpoint yet"

# Number of incremental saves per full one, or "auto", or none.
FullEvery = int | Literal["auto"] | None

# With "auto" a chain has at most _MAX_DELTAS deltas. From _MIN_DELTAS on it ends if it has outgrown its base.
_MAX_DELTAS, _MIN_DELTAS = 64, 8


def check_full_every(value: object) -> FullEvery:
    """Returns `value`. Raises `ConfigError` if it is not a `FullEvery`."""
    if value is None or value == "auto":
        return value
    if isinstance(value, str):
        raise ConfigError(f'full_every={value!r} is not known: give a number of saves, "auto", or None')
    return check_int("full_every", value, 1, 1 << 20)


@dataclass(frozen=True)
class SaveBase:
    """The base of a delta: the latest checkpoint, and each table's record of it (under another name if compacted since)."""

    id: _native.CheckpointId
    bases: dict[TablePath, _native.BaseCheckpoint]


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save of `shards` to `directory`, equal on all ranks."""

    shards: list[ModuleShard]
    directory: CheckpointDirectory
    epoch: int
    """The epoch of rows that are trained after the save."""
    base: SaveBase | None
    """The base of the delta; None: the save is full."""
    reason: str | None
    """The reason why a save that was to be a delta is full."""
    counters: bool
    """If true, admission counts are written."""

    @property
    def parent(self) -> _native.CheckpointId | None:
        """The checkpoint on which a delta is based."""
        return None if self.base is None else self.base.id

    @property
    def rows(self) -> int | None:
        """Number of rows that this rank writes; None if it is only known after writing."""
        return sum(len(table) for _, _, table in self.shards) if self.base is None else None

    def table_base(self, module_path: str, table: CacheTable) -> _native.BaseCheckpoint | None:
        """Returns the base of a delta of the table, as recorded by the table."""
        return None if self.base is None else self.base.bases[module_path, table.name]

    def report(self, name: str, parent: str | None, rows: int, tombstones: int) -> SaveReport:
        """Returns the report of the saved checkpoint `name`, which is based on `parent`."""
        kind: Literal["full", "delta"] = "full" if self.base is None else "delta"
        return SaveReport(name, kind, parent, self.reason, rows, tombstones)


def plan_save(
    shards: list[ModuleShard],
    directory: CheckpointDirectory,
    ranks: Ranks,
    *,
    incremental: bool,
    counters: bool = True,
    full_every: FullEvery = "auto",
) -> SavePlan:
    """Plans a save; logs the reason if a save that was to be a delta is full. Collective."""
    epoch = max(ranks.gather(lambda: max((table._native_table.epoch() for _, _, table in shards), default=0))) + 1
    base, reason = None, None
    if incremental:
        found, reason = ranks.gather(lambda: _read_newest(directory) if ranks.rank == 0 else (None, None))[0]
        if found is not None and (reason := found.chain.full_reason(full_every)) is not None:
            _log.info("%s is saved in full, so that its chain of deltas ends: %s", directory, reason)
        else:
            if found is not None:
                base, reason = _find_base(directory, shards, ranks, found, counters=counters)
            if reason is not None:
                level = logging.INFO if reason == _NO_CHECKPOINT else logging.WARNING
                _log.log(level, "%s is saved in full, not as a delta: %s", directory, reason)
    return SavePlan(shards, directory, epoch, base, reason, counters)


@dataclass(frozen=True)
class _DeltaChain:
    """The deltas at the end of a directory, and their base."""

    base: str
    base_rows: int
    deltas: int
    delta_rows: int
    """Rows and tombstones of all deltas."""

    @classmethod
    def read(cls, directory: CheckpointDirectory, newest: str) -> _DeltaChain:
        """Reads the coordinators' manifests of the chain of the checkpoint `newest`. Raises `CorruptionError`."""
        links = [json.loads(link) for link in _native.CheckpointRows(directory, newest).chain_manifests()]
        rows = [sum(table["rows"] + table["tombstones"] for table in link["tables"]) for link in links]
        return cls(links[-1]["name"], rows[-1], len(links) - 1, sum(rows[:-1]))

    def full_reason(self, full_every: FullEvery) -> str | None:
        """Returns the reason why the next save is to be full."""
        if full_every == "auto":
            if self.deltas >= _MAX_DELTAS:
                return f"{self.deltas} deltas build on {self.base} (full_every='auto')"
            if self.deltas >= _MIN_DELTAS and self.delta_rows >= self.base_rows:
                return (
                    f"the {self.deltas} deltas that build on {self.base} have {self.delta_rows} rows and tombstones, and it has "
                    f"{self.base_rows} rows (full_every='auto')"
                )
        elif full_every is not None and self.deltas + 1 >= full_every:
            return f"{self.deltas} deltas build on {self.base} (full_every={full_every})"
        return None


@dataclass(frozen=True)
class _NewestInfo:
    """Metadata of the latest checkpoint, as exchanged between ranks."""

    id: _native.CheckpointId
    merged: _native.CheckpointId | None
    next_epoch: int
    kind: str
    tables: dict[TablePath, bool]
    """True for a table with admission counts in the checkpoint."""
    rows: dict[TablePath, int]
    """Number of rows that a load finds, by table."""
    chain: _DeltaChain


def _read_newest(directory: CheckpointDirectory) -> tuple[_NewestInfo | None, str | None]:
    """Reads the latest checkpoint. If there is none to use as a base, returns the reason instead."""
    try:
        found = _native.newest_checkpoint(directory)
        if found is None:
            return None, _NO_CHECKPOINT
        chain = _DeltaChain.read(directory, found.id.name)
    except CorruptionError as error:
        return None, f"the newest checkpoint there is damaged ({error})"
    tables = {(entry.module, entry.table): entry.pending is not None for entry in found.tables}
    rows = {(entry.module, entry.table): entry.rows for entry in found.tables}
    return _NewestInfo(found.id, found.merged, found.next_epoch, found.kind, tables, rows, chain), None


def _damage(directory: CheckpointDirectory, name: str, ranks: Ranks) -> str | None:
    """Reads this rank's part of the manifests of the chain of the checkpoint `name`. Returns the corruption error, if any."""
    try:
        _native.CheckpointRows(directory, name).check_ranks(ranks.rank, ranks.world_size)
    except CorruptionError as error:
        return str(error)
    return None


def _find_base(
    directory: CheckpointDirectory, shards: list[ModuleShard], ranks: Ranks, newest: _NewestInfo, *, counters: bool
) -> tuple[SaveBase | None, str | None]:
    """Returns the base of a delta of these tables on the latest checkpoint, or the reason why there is none. Collective."""
    name = newest.id.name
    if newest.kind == "linked":
        return None, f"{name} is a linked checkpoint (linked=True), and deltas build on others only"
    names = {(module_path, table.name) for module_path, _, table in shards}
    everyone = set().union(*ranks.all_gather(names))
    if everyone != newest.tables.keys():
        return None, f"{name} has other tables than the model"

    if (differs := _counts_differ(shards, ranks, newest, counters=counters)) is not None:
        return None, differs

    def table_base(table: CacheTable) -> _native.BaseCheckpoint | None:
        known = table._native_table.base_checkpoints()
        return next((one for one in known if one.id in (newest.id, newest.merged)), None)

    ancestors: dict[TablePath, _native.BaseCheckpoint | None] = {}

    def unknown_here() -> tuple[str | None, list[TablePath]]:
        ancestors.update({(module_path, table.name): table_base(table) for module_path, _, table in shards})
        unknown = sorted(pair for pair, one in ancestors.items() if one is None or one.next_epoch != newest.next_epoch)
        return _damage(directory, name, ranks), unknown

    found = ranks.gather(unknown_here)
    if damages := [damage for damage, _ in found if damage is not None]:
        return None, f"the newest checkpoint there is damaged ({damages[0]})"
    unknown = [pair for _, pairs in found for pair in pairs]
    if unknown:
        return None, (
            f"what changed in table {display_name(unknown[0])} since {name} is not known: another run saved that, "
            "or too long ago, or more rows left or more sweeps came since than are remembered, or the full table dropped rows "
            "while it was loaded"
        )
    base = SaveBase(newest.id, {pair: one for pair, one in ancestors.items() if one is not None})
    if (differs := _sweeps_differ(shards, ranks, base)) is None:
        differs = _rows_differ(shards, ranks, base, newest.rows)
    return (base, None) if differs is None else (None, differs)


def _sweeps_differ(shards: list[ModuleShard], ranks: Ranks, base: SaveBase) -> str | None:
    """Returns a reason if a delta on `base` cannot record the sweeps since then, because ranks ran different ones. Collective.

    A delta contains one list of sweeps for all rows of a table. `table.evict()` on a single rank makes the lists differ, until the
    next sweep on all ranks.
    """

    def sweeps() -> dict[TablePath, list[str]]:
        return {
            (path, table.name): table._native_table.sweeps_since(base.bases[path, table.name])
            for path, _, table in shards
        }

    first: dict[TablePath, tuple[int, list[str]]] = {}
    for rank, of_rank in enumerate(ranks.gather(sweeps)):
        for pair, made in of_rank.items():
            before, others = first.setdefault(pair, (rank, made))
            if made != others:
                return (
                    f"ranks {before} and {rank} have swept table {display_name(pair)} differently since {base.id.name}: "
                    f"sweep on all "
                    "ranks together, with evict(model)"
                )
    return None


def _rows_differ(shards: list[ModuleShard], ranks: Ranks, base: SaveBase, saved: dict[TablePath, int]) -> str | None:
    """Returns a reason if a load of a delta on `base` would find other rows than the tables have. Collective.

    This should never happen: it prevents a bookkeeping error of a table from creating a chain that cannot be loaded. `saved` is the
    number of rows that a load of `base` finds.
    """

    def counts() -> dict[TablePath, _native.ChangeCounts]:
        return {
            (path, table.name): table._native_table.count_changes(base.bases[path, table.name])
            for path, _, table in shards
        }

    everyone = ranks.gather(counts)
    for pair, before in sorted(saved.items()):
        of_ranks = [counted[pair] for counted in everyone if pair in counted]
        rows, doomed = sum(one.rows for one in of_ranks), sum(one.expiring for one in of_ranks)
        least = before - sum(one.tombstones + one.swept for one in of_ranks)
        if doomed:
            return (
                f"a load would drop {doomed} rows that table {display_name(pair)} has, because a sweep since "
                f"{base.id.name} takes them: a "
                "bug of torchrec-embcache to report"
            )
        if rows < least:
            return (
                f"a load would find {least} rows or more of table {display_name(pair)}, which has {rows}: "
                f"{base.id.name} has {before}, "
                "and fewer are known to have left. This is a bug of torchrec-embcache to report"
            )
    return None


def _counts_differ(shards: list[ModuleShard], ranks: Ranks, newest: _NewestInfo, *, counters: bool) -> str | None:
    """Returns a reason if a delta with counts, or without, cannot be based on the latest checkpoint. Collective.

    A load combines the counts of a chain; a delta has only those of ids that occurred since its parent. With a parent without
    counts some would therefore be missing, and a delta without counts would leave the outdated ones of its parent.
    """
    pairs = [(path, table.name) for path, _, table in shards if table._settings.lifecycle.counts_ids]
    differ = sorted(pair for pair in pairs if newest.tables[pair] != counters)
    everywhere = [pair for found in ranks.all_gather(differ) for pair in found]
    if not everywhere:
        return None
    of = f"of the ids that wait for rows in table {display_name(everywhere[0])}"
    if counters:
        return f"{newest.id.name} has no counts {of}"
    return f"{newest.id.name} has counts {of}, and this save leaves them out (counters=False)"


def write_tables(
    plan: SavePlan, writer: _native.CheckpointWriter, tracker: ProgressTracker, *, linked: bool
) -> RankPart:
    """Writes the tables of this rank. `linked`: tables with an SSD tier are written as links to their segments."""
    totals = dict.fromkeys(("rows", "tombstones", "linked_bytes", "copied_bytes"), 0)
    for module_path, owner, table in plan.shards:
        numbers = numeric_hyperparameters(owner.hyperparameters(table.name))
        tracker.table(display_name((module_path, table.name)))
        if linked:
            written = writer.link_table(module_path, table._native_table, numbers)
        elif (ancestor := plan.table_base(module_path, table)) is not None:
            written = writer.write_changes(module_path, table._native_table, numbers, ancestor)
        else:
            written = writer.write_table(module_path, table._native_table, numbers)
        tracker.advance(written.rows)
        totals = {name: count + getattr(written, name) for name, count in totals.items()}
    return RankPart(writer.finish(), **totals)
