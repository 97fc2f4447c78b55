"""Loads of tables: a checkpoint held while it is read, and tables that refuse use while their rows are replaced."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from . import _native
from .cache import CacheTable
from .collective import all_gather, is_distributed, together
from .exceptions import EmbCacheError, StateError
from .optimizers import check_saved_optimizer
from .paths import Root
from .progress import Tracker
from .reports import LoadReport
from .shards import Shard
from .table_names import Pair, check_names, check_rows, shown, sources_of

__all__ = ["LoadSession", "TablesUnderLoad", "open_newest", "open_together", "replace_contents"]

_log = logging.getLogger(__name__)

# A load begins again where a save replaced what it was about to read. Each time means a save that was completed meanwhile.
ATTEMPTS = 100


class TablesUnderLoad:
    """Tables whose rows are replaced in a block: they refuse use (`StateError` with `reason`) until the block has succeeded.

    Where it is left by an error or an interrupt before it changed any of them, they are as before. `by_all_ranks`: ranks replace
    their rows together, and an error that all raise leaves the tables of all refusing use.
    """

    def __init__(self, tables: Iterable[CacheTable], reason: str, *, by_all_ranks: bool = False) -> None:
        self._reason, self._by_all_ranks = reason, by_all_ranks and is_distributed()
        self._before = [(table, table.unusable, table.native, table.native.version()) for table in tables]

    @property
    def changed(self) -> bool:
        """Whether the contents of any of the tables are others than before."""
        return any(
            table.native_or_none is not native or native.is_closed() or native.version() != version
            for table, _, native, version in self._before
        )

    def __enter__(self) -> Self:
        try:
            for table, *_ in self._before:
                table.set_unusable(self._reason)
            return self  # within, or an interrupt here would come neither to the lines below nor to __exit__
        except BaseException:
            self._put_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for table, *_ in self._before:
                table.set_unusable(None)
        elif not (self.changed or (self._by_all_ranks and isinstance(error, Exception))):
            self._put_back()

    def _put_back(self) -> None:
        for table, unusable, *_ in self._before:
            table.set_unusable(unusable)


T = TypeVar("T")


def _was_replaced(root: str, name: str, error: EmbCacheError) -> bool:
    """Whether `error`, of opening the checkpoint `name`, only says that a save replaced it meanwhile."""
    if _native.latest_checkpoint(root) == name:
        return False
    _log.info("%s was replaced before it was open (%s): opening the newest again", name, error)
    return True


def open_newest(root: str, open_it: Callable[[str], T]) -> T:
    """What `open_it` gives for the name of the newest checkpoint in `root` (a checked path).

    Where a save replaces the checkpoint before it is open this begins again, with the next. Raises what `open_it` does otherwise.
    """
    for _ in range(ATTEMPTS):
        name = _native.latest_checkpoint(root)
        try:
            return open_it(name)
        except EmbCacheError as error:
            if not _was_replaced(root, name, error):
                raise
    raise _always_replaced(root)


def open_together(
    find: Callable[[], tuple[str, str]], open_it: Callable[[str, str], T], *, newest: bool = True
) -> tuple[str, T]:
    """As `open_newest`, on all ranks: the name, and what `open_it` gives for a checked path and the name. Collective.

    `find` gives the path and the name on each rank; all open the one that the first rank finds. This begins again for the `newest`
    only, and not for one that was asked for by its name.
    """
    path = ""
    for _ in range(ATTEMPTS):
        path, found = together(find)
        # Whatever is saved meanwhile, and found by other ranks.
        name = all_gather(found)[0]

        def opened(path: str = path, name: str = name) -> list[T]:
            try:
                return [open_it(path, name)]
            except EmbCacheError as error:
                if not newest or not _was_replaced(path, name, error):
                    raise
                return []

        mine = together(opened)
        if all(all_gather(bool(mine))):
            return name, mine[0]
    raise _always_replaced(path)


def _always_replaced(root: str) -> StateError:
    return StateError(
        f"saves replaced the newest checkpoint in {root} {ATTEMPTS} times while it was being opened: load between saves, or save "
        "with keep=2 or more"
    )


def replace_contents(
    reader: _native.CheckpointReader,
    shard: Shard,
    entry: Mapping[str, Any],
    advance: Callable[[int], object] | None = None,
) -> int:
    """Replace the contents of a table, which is under load, by those of the checkpoint's table `entry`; how many rows it has then.

    `check_table` comes before. `advance` is told of rows as they are in place.
    """
    place, owner, table = shard
    segments = reader.segments(place, table.name)
    table.adopt(entry["total_num_buckets"], entry["key"], entry["bucket_hash"], segments)
    # Also where nothing changed now: a load that was interrupted may have changed it and not come to here.
    owner.buckets_changed()
    if segments is None:
        rows = reader.load_table(place, table.native, advance)
        table.native.set_epoch(reader.next_epoch)
        return rows
    rows = table.stats().rows
    if advance is not None:
        advance(rows)
    return rows


class LoadSession:
    """A load of `shards` from a checkpoint in `root`, the newest or the one named, on every rank.

    As a block it keeps saves from removing the checkpoint until it is left.
    """

    def __init__(self, shards: list[Shard], root: Root, checkpoint: str | None, *, slots: bool) -> None:
        """`slots`: whether rows come with the optimizer's slots; without them they fit tables with any optimizer."""
        self._shards, self._root, self._checkpoint, self._slots = shards, root, checkpoint, slots
        self._undo = contextlib.ExitStack()
        self._names: set[Pair] = set()
        self._sources: dict[Pair, Pair] = {}
        self._unexpected: set[Pair] = set()
        self._only: Collection[str] | None = None
        self.most_rows = 0
        """No fewer rows than this rank will load."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def open(self) -> None:
        """Open the checkpoint and keep it from being removed. Collective."""

        def find() -> tuple[str, str]:
            path = self._root.to_load()
            return path, self._checkpoint or _native.latest_checkpoint(path)

        _, self._reader = open_together(find, _native.CheckpointReader, newest=self._checkpoint is None)
        self._undo.callback(self._reader.release)
        self._saved = {(entry["module"], entry["table"]): entry for entry in self._reader.tables()}

    def check(self, tables: Collection[str] | None, rename: Mapping[str, str] | None, *, strict: bool) -> None:
        """Check that the tables wanted are there and fit, and the headers of their files. Nothing is changed. Collective."""
        everyone = all_gather([(place, table.name) for place, _, table in self._shards])
        self._names, self._only = {pair for pairs in everyone for pair in pairs}, tables
        together(lambda: self._check(tables, rename, strict=strict))

    def _check(self, tables: Collection[str] | None, rename: Mapping[str, str] | None, *, strict: bool) -> None:
        names, saved = self._names, self._saved
        self._sources = sources_of(names, set(saved), tables, rename)
        self._unexpected = set(saved) - set(self._sources.values()) if tables is None else set()
        if strict:
            check_names(names, self._sources, tables, self._unexpected, set(saved), self._root)
        for place, _, table in self._shards:
            source = self._sources.get((place, table.name))
            if source is not None:
                buckets = table.buckets_of(saved[source]["total_num_buckets"])
                if self._slots:
                    name = f"{table.name!r} of module {place!r}"
                    check_saved_optimizer(name, table.optimizer, saved[source]["optimizer"])
                self.most_rows += self._reader.check_table(place, table.native, *buckets, source, True, self._slots)

    def load(self, tracker: Callable[[], Tracker]) -> LoadReport:
        """Replace the contents of the tables. Collective."""
        reader, saved, sources = self._reader, self._saved, self._sources
        wanted = [shard for shard in self._shards if (shard[0], shard[2].name) in sources]
        reason = f"loading the checkpoint {reader.name} in {self._root} did not succeed; load one that is whole"
        loaded: dict[Pair, int] = {}

        def load() -> None:
            with tracker() as told:
                for shard in wanted:
                    pair = shard[0], shard[2].name
                    told.table(shown(pair))
                    loaded[pair] = replace_contents(reader, shard, saved[sources[pair]], told.advance)

        with contextlib.ExitStack() as undo:
            under_load = TablesUnderLoad([table for *_, table in wanted], reason, by_all_ranks=True)
            together(lambda: undo.enter_context(under_load))
            together(load)
            rows = dict.fromkeys(sorted(sources), 0)
            for of_rank in all_gather(loaded):
                for pair, count in of_rank.items():
                    rows[pair] += count
            check_rows(
                {pair: (count, saved[sources[pair]]["rows"]) for pair, count in rows.items()}, reader.name, self._root
            )
            for place, _, table in wanted:
                source = sources[place, table.name]
                table.loaded_step = saved[source]["step"]
                if source == (place, table.name) and reader.kind != "snapshot" and self._slots:
                    # Neither a snapshot, nor a table of another name or without its slots, is what a delta of this table builds on.
                    table.native.saved_as((*reader.identity, reader.next_epoch))
        return self._report(rows)

    def _report(self, rows: Mapping[Pair, int]) -> LoadReport:
        missing = sorted(self._names - set(self._sources)) if self._only is None else ()
        return LoadReport(
            checkpoint=self._reader.name,
            deltas=len(self._reader.links) - 1,
            rows={shown(pair): count for pair, count in rows.items()},
            missing=tuple(shown(pair) for pair in missing),
            unexpected=tuple(shown(pair) for pair in sorted(self._unexpected)),
            renamed={shown(source): shown(pair) for pair, source in sorted(self._sources.items()) if pair != source},
        )
