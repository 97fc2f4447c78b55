"""Load of a checkpoint, and tables that are unusable while their rows are replaced."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from torchrec_embcache import _native
from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._dist.collective import is_distributed
from torchrec_embcache._dist.ranks import Ranks
from torchrec_embcache._hyperparameters import (
    check_hyperparameters,
    check_max_gradient,
    restore_hyperparameters,
    restored_hyperparameters,
)
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache._saves_in_flight import wait_for_saves_to
from torchrec_embcache.exceptions import EmbCacheError, MismatchError, PathError, StateError
from torchrec_embcache.model._names import TablePath, check_names, check_rows, display_name, load_sources
from torchrec_embcache.model._shards import ModuleShard
from torchrec_embcache.optimizers import check_saved_optimizer
from torchrec_embcache.table.cache_table import CacheTable

from ._intact import find_intact
from ._progress import ProgressTracker
from .reports import LoadReport

__all__ = ["LoadSession", "LoadingTables", "open_newest", "release"]

_log = logging.getLogger("torchrec_embcache.checkpoint.saver")

# A load starts again if a save replaced the checkpoint before it was opened. Each retry means that a save was completed.
MAX_ATTEMPTS = 100


class _Releasable(Protocol):
    """An object that prevents saves from removing a checkpoint."""

    def release(self) -> None:
        """Allows saves to remove the checkpoint; no more reads follow. Idempotent."""


T = TypeVar("T", bound=_Releasable | None)


class _LoadCounts(NamedTuple):
    """Rows of one table on one rank: the number read, and the number of those dropped because the table was full."""

    rows: int
    dropped: int


class LoadingTables:
    """A context manager for tables whose rows are replaced: they raise `StateError` with `reason` until the block succeeds.

    If an error or an interrupt leaves the block before any table has changed, the tables become usable again. With `by_all_ranks`,
    ranks replace their rows together, and an error that all ranks raise leaves the tables of all ranks unusable.
    """

    def __init__(self, tables: Iterable[CacheTable], reason: str, *, by_all_ranks: bool = False) -> None:
        # The reason contains a path, which may not be valid UTF-8.
        self._reason = reason.encode(errors="backslashreplace").decode()
        self._by_all_ranks = by_all_ranks and is_distributed()
        self._before = [
            (table, table._unusable, table._native_table, table._native_table.version()) for table in tables
        ]

    @property
    def has_changes(self) -> bool:
        """True if the contents of any of the tables have changed."""
        return any(
            table._native_or_none is not native or native.is_closed() or native.version() != version
            for table, _, native, version in self._before
        )

    def __enter__(self) -> Self:
        try:
            for table, *_ in self._before:
                table._set_unusable(self._reason)
            return self  # inside the try, or an interrupt here would reach neither the except clause nor __exit__
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            for table, *_ in self._before:
                table._set_unusable(None)
        elif not (self.has_changes or (self._by_all_ranks and isinstance(error, Exception))):
            self._restore()

    def _restore(self) -> None:
        for table, unusable, *_ in self._before:
            table._set_unusable(unusable)


def open_newest(
    ranks: Ranks,
    find: Callable[[], tuple[CheckpointDirectory, str]],
    open_checkpoint: Callable[[CheckpointDirectory, str], T],
    *,
    newest: bool = True,
) -> tuple[CheckpointDirectory, str, T]:
    """Returns the directory, the checkpoint name, and the result of `open_checkpoint` for both. Collective.

    `find` returns a directory and the name of a checkpoint on each rank; all ranks open the one found by the first rank. If a save
    replaces the checkpoint before every rank has opened it, this retries with the next one, provided that the `newest` is requested
    rather than a checkpoint by name. After an error, nothing stays open.
    """
    path = ""
    for _ in range(MAX_ATTEMPTS):
        opened: list[T] = []
        directories: list[CheckpointDirectory] = []

        def find_name(directories: list[CheckpointDirectory] = directories) -> str:
            directory, name = find()
            directories.append(directory)
            return name

        name = ranks.gather(find_name)[0]
        directory = directories[0]
        path = directory.path

        def open_here(directory: CheckpointDirectory = directory, name: str = name, opened: list[T] = opened) -> bool:
            try:
                opened.append(open_checkpoint(directory, name))
            except EmbCacheError as error:
                if not newest:
                    _raise_if_removed(directory, name, error)
                    raise
                if not _was_replaced(directory, name, error):
                    raise
            return bool(opened)

        try:
            if all(ranks.gather(open_here)):
                return directory, name, opened[0]
        except BaseException:
            release(opened)
            raise
        release(opened)
    raise StateError(
        f"saves replaced the newest checkpoint in {path} {MAX_ATTEMPTS} times while it was being opened: load "
        f"between saves, or save "
        "with keep=2 or more"
    )


def release(opened: Iterable[_Releasable | None]) -> None:
    """Allows saves to remove the opened checkpoints."""
    for each in opened:
        if each is not None:
            each.release()


def _was_replaced(directory: CheckpointDirectory, name: str, error: EmbCacheError) -> bool:
    """True if `error`, raised while opening the checkpoint `name`, was caused by a save that replaced it."""
    if _native.latest_checkpoint(directory) == name:
        return False
    _log.info("%s was replaced before it was open (%s): opening the newest again", name, error)
    return True


def _raise_if_removed(directory: CheckpointDirectory, name: str, error: EmbCacheError) -> None:
    """Raises `PathError` if a checkpoint requested by name could not be opened because it does not exist."""
    if not directory.contains(name):
        raise PathError(
            f"there is no checkpoint {name} in {directory}: a later save may have removed it; save with a greater keep=, or leave "
            "checkpoint= out to load the newest"
        ) from error


class LoadSession(CloseOnExitMixin):
    """Loads a checkpoint, the latest or a named one, into tables on every rank.

    As a context manager it prevents saves from removing the checkpoint. Order of calls: `open`, `check`, `load`. Nothing is changed
    before `load`.
    """

    def __init__(
        self, ranks: Ranks, checkpoint: str | None = None, *, last_intact: bool = False, slots: bool = True
    ) -> None:
        """`slots`: if true, rows are loaded with the optimizer's slots; without slots they fit tables with any optimizer.
        `last_intact`: instead of a corrupted checkpoint, the latest intact one before it is opened.
        """
        self._ranks, self._checkpoint, self._slots = ranks, checkpoint, slots
        self._last_intact = last_intact
        self._skipped: dict[str, str] = {}
        self._shards: list[ModuleShard] = []
        self._names: set[TablePath] = set()
        self._sources: dict[TablePath, TablePath] = {}
        self._unexpected: set[TablePath] = set()
        self._requested: Collection[str] | None = None
        # For each table of this rank, an upper bound of its row count; exact without deltas.
        self._rows: dict[TablePath, int] = {}
        self._opened: _native.CheckpointReader | None = None

    def close(self) -> None:
        """Closes the checkpoint and allows saves to remove it. Idempotent."""
        release([self._opened])

    def open(self, directory: CheckpointDirectory) -> None:
        """Opens the checkpoint in `directory` and prevents its removal. Collective."""
        if self._last_intact:
            wait_for_saves_to(directory.path)
            is_first = self._ranks.rank == 0
            look = self._ranks.gather(lambda: find_intact(directory, self._checkpoint) if is_first else None)[0]
            assert look is not None, "the first rank looks"
            self._checkpoint, self._skipped = look

        def find() -> tuple[CheckpointDirectory, str]:
            wait_for_saves_to(directory.path)
            return directory, self._checkpoint or _native.latest_checkpoint(directory)

        self.directory, _, self._opened = open_newest(
            self._ranks, find, _native.CheckpointReader, newest=self._checkpoint is None
        )
        self._saved = {(entry.module, entry.table): entry for entry in self.reader.tables()}

    @property
    def reader(self) -> _native.CheckpointReader:
        """The open checkpoint."""
        assert self._opened is not None, "open() comes before"
        return self._opened

    @property
    def max_rows(self) -> int:
        """Upper bound of the number of rows that this rank loads."""
        return sum(self._rows.values())

    def check(
        self,
        shards: list[ModuleShard],
        *,
        tables: Collection[str] | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> None:
        """Checks that the requested tables of `shards` exist and fit, and the headers of their files. Collective."""
        self._shards, self._requested = shards, tables
        mine = [(module_path, table.name) for module_path, _, table in shards]
        self._names = {pair for pairs in self._ranks.gather(lambda: mine) for pair in pairs}
        self._ranks.gather(lambda: self._check(tables, rename, strict=strict))

    def _check(self, tables: Collection[str] | None, rename: Mapping[str, str] | None, *, strict: bool) -> None:
        names, saved = self._names, self._saved
        self._sources = load_sources(names, set(saved), tables, rename)
        # A single rank of several knows only its own tables: those of other ranks are in the checkpoint but not in `names`.
        whole = tables is None and self._ranks.has_all_ranks
        self._unexpected = set(saved) - set(self._sources.values()) if whole else set()
        if strict and not self._ranks.has_all_ranks:
            self._check_own_names()
        elif strict:
            check_names(names, self._sources, tables, self._unexpected, set(saved), self.directory.path)
        for module_path, _, table in self._shards:
            source = self._sources.get((module_path, table.name))
            if source is not None:
                self._rows[module_path, table.name] = self._check_table(module_path, table, source)

    def _check_own_names(self) -> None:
        for module, table in sorted(self._names - set(self._sources)):
            there = ", ".join(f"{name!r} of module {path!r}" for path, name in sorted(self._saved)) or "none"
            raise MismatchError(
                f"the checkpoint in {self.directory} has no table {table!r} of module {module!r}; it has {there}: "
                "leave model out, or give the one that was saved"
            )

    def _check_table(self, module_path: str, table: CacheTable, source: TablePath) -> int:
        saved = self._saved[source]
        buckets = table._buckets_of(saved.total_num_buckets)
        if self._slots:
            check_saved_optimizer(f"{table.name!r} of module {module_path!r}", table.optimizer, saved.optimizer)
            self._check_hyperparameters(f"the checkpoint's table {display_name(source)}", table, saved)
        # A rank that is coordinated by another program cannot open the tables of all ranks from segments at the same time.
        return self.reader.check_table(
            module_path,
            table._native_table,
            *buckets,
            saved=saved,
            segments=self._ranks.has_all_ranks,
            slots=self._slots,
        )

    @staticmethod
    def _check_hyperparameters(owner: str, table: CacheTable, saved: _native.SavedTable) -> None:
        """Raises `ConfigError` if training could not use the hyperparameters that the load restores."""
        group = table._spec.param_group() | restored_hyperparameters(saved.hyperparameters)
        check_hyperparameters(owner, group)
        check_max_gradient(owner, group)

    def load(self, tracker: Callable[[], ProgressTracker]) -> LoadReport:
        """Replaces the contents of the tables. After an error they are unusable until a load succeeds. Collective."""
        reader, sources, ranks = self.reader, self._sources, self._ranks
        wanted = [shard for shard in self._shards if (shard[0], shard[2].name) in sources]
        reason = f"loading the checkpoint {reader.name} in {self.directory} did not succeed; load one that is whole"
        with contextlib.ExitStack() as undo:
            under_load = LoadingTables([table for *_, table in wanted], reason, by_all_ranks=True)

            def refuse() -> None:
                # Pushed first, so that an interrupt after the next line restores the tables too.
                undo.push(under_load)
                under_load.__enter__()

            ranks.gather(refuse)
            rows, dropped = dict.fromkeys(sorted(sources), 0), dict.fromkeys(sorted(sources), 0)
            for of_rank in ranks.gather(lambda: self._replace_all(wanted, tracker)):
                for pair, loaded in of_rank.items():
                    rows[pair] += loaded.rows
                    dropped[pair] += loaded.dropped
            self._check_loaded(rows)
            for module_path, owner, table in wanted:
                pair = module_path, table.name
                saved = self._saved[sources[pair]]
                table._loaded_step = saved.step
                if self._slots and (group := owner.param_group(table.name)) is not None:
                    restore_hyperparameters(group, saved.hyperparameters)
                if self._is_delta_base(sources[pair], pair) and not dropped[pair]:
                    table._native_table.record_base(_native.BaseCheckpoint(reader.id, reader.next_epoch))
        # Not only at the end of the block: an interrupt between its last line and `__exit__` does not run `__exit__`.
        self.close()
        return self._report(rows, dropped)

    def _is_delta_base(self, source: TablePath, pair: TablePath) -> bool:
        """True if a delta of the table can be based on the checkpoint that it was loaded from.

        False for a linked checkpoint, for one in which the table has another name, and for a load without slots. A DCP checkpoint
        cannot be a base either: see docs/design-checkpoint.md. A full table drops rows during the load, and no tombstones record
        them, so it has no base checkpoint.
        """
        return source == pair and self.reader.kind != "linked" and self._slots and self._ranks.has_all_ranks

    def _replace_all(
        self, shards: Sequence[ModuleShard], tracker: Callable[[], ProgressTracker]
    ) -> dict[TablePath, _LoadCounts]:
        loaded: dict[TablePath, _LoadCounts] = {}
        for *_, table in shards:
            if table._settings.share is not None:
                table._native_table.clear()  # rows of another table may need the part of the shared budget that this table uses
        with tracker() as told:
            for shard in shards:
                pair = shard[0], shard[2].name
                told.table(display_name(pair))
                loaded[pair] = self._replace(shard, self._saved[self._sources[pair]], told.advance)
        return loaded

    def _replace(self, shard: ModuleShard, saved: _native.SavedTable, advance: Callable[[int], object]) -> _LoadCounts:
        """Replaces the contents of one table. `advance` is called with the number of rows after they are in the table."""
        module_path, owner, table = shard
        segments = self.reader.segments(module_path, table.name)
        table._adopt(saved.total_num_buckets, saved.key, segments)
        # Also if nothing changed in this call: an interrupted load may have changed it without reaching this line.
        owner.refresh_buckets()
        if segments is None:
            dropped_before = table.stats().dropped_rows
            rows = self.reader.load_table(module_path, table._native_table, advance)
            table._native_table.set_epoch(self.reader.next_epoch)
            return _LoadCounts(rows, table.stats().dropped_rows - dropped_before)
        rows = table.stats().rows
        advance(rows)
        return _LoadCounts(rows, 0)

    def _check_loaded(self, rows: Mapping[TablePath, int]) -> None:
        """Raises `CorruptionError` unless the tables have the rows that the checkpoint has for these ranks."""
        whole, saved, sources = self._ranks.has_all_ranks, self._saved, self._sources
        counts = {
            pair: (count, saved[sources[pair]].rows if whole else self._rows[pair]) for pair, count in rows.items()
        }
        check_rows(counts, self.reader.name, self.directory.path)

    def _report(self, rows: Mapping[TablePath, int], dropped: Mapping[TablePath, int]) -> LoadReport:
        missing = sorted(self._names - set(self._sources)) if self._requested is None else ()
        return LoadReport(
            checkpoint=self.reader.name,
            deltas=len(self.reader.chain_names) - 1,
            rows={display_name(pair): count - dropped[pair] for pair, count in rows.items()},
            skipped=self._skipped,
            hyperparameters={
                display_name(pair): restored_hyperparameters(self._saved[self._sources[pair]].hyperparameters)
                for pair in rows
                if self._slots
            },
            dropped={display_name(pair): count for pair, count in dropped.items() if count},
            missing=tuple(display_name(pair) for pair in missing),
            unexpected=tuple(display_name(pair) for pair in sorted(self._unexpected)),
            renamed={
                display_name(source): display_name(pair)
                for pair, source in sorted(self._sources.items())
                if pair != source
            },
        )
