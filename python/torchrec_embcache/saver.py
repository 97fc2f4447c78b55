"""Checkpoints of a model's embedding tables: full ones, and deltas of what changed.

    Saver().save(model, "ckpt/sparse")  # with torch.distributed: on every rank
    Saver().save(model, "ckpt/sparse", incremental=True)  # rows modified since the checkpoint that is there
    Saver(0).load(model, "ckpt/sparse")  # without torch.distributed: the one rank is 0

A checkpoint holds the rows of every cache module in the model, sharded or not, with their optimizer slots and metadata; the dense
part of the model is torch's or DCP's to save. It loads into any number of ranks and any tier budgets. Its data files are
safetensors; `docs/design.md` describes them.

What ranks do, in a save: the first checks the directory and begins a checkpoint; each writes its shards; the first publishes. A
crash at any time leaves the checkpoint before. In a load: each checks manifests, headers and sizes for its shards; only when all
ranks have done so are tables touched. An error on one rank is raised on every rank.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from . import _native
from .cache import CacheTable
from .collective import all_gather, is_distributed, together
from .config import check_int
from .exceptions import ConfigError, CorruptionError, EmbCacheError, InputError, MismatchError, PathError
from .progress import Progress, ProgressWanted, Tracker
from .whole_model import CacheModule, cache_modules

__all__ = ["LoadReport", "Progress", "SaveReport", "Saver"]

_log = logging.getLogger(__name__)

# A table on this rank: its module's path in the model, the module, the table.
_Shard = tuple[str, CacheModule, CacheTable]
# A table of a model or checkpoint: its module's path and its name.
_Pair = tuple[str, str]


@dataclass(frozen=True)
class SaveReport:
    """What a save, or a compaction, made. Counts are of all ranks."""

    checkpoint: str
    """Name of the checkpoint: its directory in the path."""
    kind: Literal["full", "delta"]
    """Whether it holds every row, or those modified since `parent`."""
    parent: str | None
    """Name of the checkpoint that a delta builds on."""
    reason: str | None
    """Why a save that was to be incremental is full."""
    rows: int
    """Rows in its files."""
    tombstones: int
    """Ids in it that left their table since the parent."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did, the same on every rank. Tables are named `module/table`, as in the model."""

    checkpoint: str
    """Name of the newest checkpoint that was read."""
    deltas: int
    """Deltas that were read on top of the full one."""
    rows: dict[str, int]
    """Rows of each table that was loaded, all ranks together."""
    missing: tuple[str, ...]
    """Tables of the model that the checkpoint does not have: they are as they were."""
    unexpected: tuple[str, ...]
    """Tables of the checkpoint, by its names, that the model does not have."""
    renamed: dict[str, str]
    """Tables whose name in the checkpoint is another, that name first."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that were loaded."""
        return tuple(self.rows)


@dataclass(frozen=True)
class _Base:
    """What a delta builds on: the newest checkpoint, and what each table knows it by (before a compaction another name)."""

    identity: _native.Identity
    ancestors: dict[_Pair, _native.Ancestor]


class Saver:
    """Saves the tables of a model to a directory, and loads them. With `torch.distributed` every rank calls the same methods."""

    def __init__(self, rank: int | None = None) -> None:
        """`rank`: this process's; by default `torch.distributed`'s, and without that it must be given, as 0."""
        self.rank = None if rank is None else check_int("rank", rank, 0, (1 << 31) - 1)

    def save(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        incremental: bool = False,
        *,
        keep: int = 1,
        progress: ProgressWanted = None,
    ) -> SaveReport:
        """Write the rows of every cache module in `module` to `path`, as the checkpoint that loads find there from then on.

        `incremental`: only rows modified since the newest checkpoint in `path`, with slots and metadata, and the ids that left.
        That must be what these tables were last saved to `path` as, or loaded from; where it is not, or too much left since
        (see `docs/configuration.md`), the save is full, and says why in the log and in its report.

        `keep`: so many of the newest checkpoints stay, and what those build on; older ones are removed. `progress`: a callable
        that is given a `Progress` after each table, on every rank, or True for a bar (rank 0).

        `path` is made (mode 0750) when missing. Until the new checkpoint is complete and durable a load finds the one before.
        A save that fails loses nothing for the next delta. Training is not to go on meanwhile. Raises `PathError` (length,
        `..`, symbolic links, a word such as "key", a system directory, ranks that disagree), `StoragePermissionError`,
        `StorageError` (a full disk), `StateError` (of a delta: another process saved to `path` meanwhile), `InputError` (no
        cache module in `module`, or two of one path).
        """
        rank, world_size = self._place()
        keep = check_int("keep", keep, 1, 1 << 20)
        shards = together(lambda: shards_of(module))
        root = _agreed_path(path)
        epoch = max(all_gather(max((table.native.epoch() for _, _, table in shards), default=0))) + 1
        base, reason = _base(shards, root, rank) if incremental else (None, None)
        if reason is not None:
            _log.warning("%s is saved in full, not as a delta: %s", root, reason)
        begun: _native.CheckpointSave | None = None

        def begin() -> str:
            nonlocal begun
            checked = _native.check_save_dir(root)
            parent = None if base is None else base.identity
            begun = _native.CheckpointSave(checked, secrets.randbits(64), keep, parent)
            return begun.name

        def write(name: str) -> tuple[tuple[int, int], int, int]:
            total = sum(len(table) for _, _, table in shards) if base is None else None
            with Tracker(progress, "save", total, shown=rank == 0) as tracker:
                return _write(shards, root, name, (rank, world_size), base, tracker)

        try:
            name = all_gather(together(begin if rank == 0 else str))[0]
            written = all_gather(together(lambda: write(name)))
            left = together(lambda: begun.publish([digest for digest, _, _ in written], epoch) if begun else [])
        except Exception:
            if begun is not None:
                _abandon(begun)
            raise
        identity = all_gather(begun.identity if begun is not None else ("", 0))[0]
        for what in left:
            _log.warning("an older checkpoint in %s could not be removed: %s", root, what)
        for _, _, table in shards:
            table.native.set_epoch(epoch)
            table.native.saved_as((*identity, epoch))
        return SaveReport(
            checkpoint=name,
            kind="full" if base is None else "delta",
            parent=None if base is None else base.identity[0],
            reason=reason,
            rows=sum(rows for _, rows, _ in written),
            tombstones=sum(tombstones for _, _, tombstones in written),
        )

    def load(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        incremental: bool = False,  # noqa: ARG002  deltas are told from full checkpoints by their manifests
        *,
        strict: bool = True,
        tables: Collection[str] | None = None,
        rename: Mapping[str, str] | None = None,
        checkpoint: str | None = None,
        progress: ProgressWanted = None,
    ) -> LoadReport:
        """Replace the contents of every cache module in `module` by the checkpoint at `path`, which any world size saved.

        Deltas are read with all they build on, with `incremental` or without (it is there for RecSDK's signature).

        `tables`: load only these tables of the model. `rename`: the model's names of tables by those in the checkpoint. Names
        are `module/table`, or the table's alone where only one module has it. `strict=False` allows tables that only one of
        model and checkpoint has. `checkpoint`: the name of one that `save(keep=...)` kept; by default the newest. `progress`: a
        callable that is given a `Progress` as rows are in place, on every rank, or True for a bar (rank 0).

        Tables must be those of the checkpoint, with the same dim and optimizer (`MismatchError`); budgets,
        policy and device may differ; the number of buckets and the table's key become the checkpoint's. Step counters are
        restored. Load before a pipeline takes its first batches: those in flight went to the owners of the old buckets.

        Nothing is changed when the checkpoint is missing (`PathError`), does not fit, one that it builds on is missing or
        another, or its manifests or headers are damaged (`CorruptionError`). When its rows turn out to be damaged, or reading fails
        (`StorageError`), the tables refuse use on every rank until a load succeeds.
        """
        rank, _ = self._place()
        shards = together(lambda: shards_of(module))
        root = _agreed_path(path)
        if checkpoint is not None and not re.fullmatch(r"\d{10,20}-[0-9a-f]{16}", checkpoint):
            raise InputError(f"checkpoint={checkpoint!r} is not the name of one: give SaveReport.checkpoint")
        # All ranks load what one of them finds, whatever is saved meanwhile.
        latest = all_gather(together(lambda: checkpoint or _native.latest_checkpoint(_native.check_load_dir(root))))[0]
        reader = together(lambda: _native.CheckpointReader(_native.check_load_dir(root), latest))
        names = {pair for pairs in all_gather([(place, table.name) for place, _, table in shards]) for pair in pairs}
        saved = {(entry["module"], entry["table"]): entry for entry in reader.tables()}
        most_rows = 0

        def check() -> tuple[dict[_Pair, _Pair], set[_Pair]]:
            nonlocal most_rows
            sources = _sources(names, set(saved), tables, rename)
            unexpected = set(saved) - set(sources.values()) if tables is None else set()
            if strict:
                _check_names(names, sources, tables, unexpected, set(saved), root)
            for place, _, table in shards:
                source = sources.get((place, table.name))
                if source is not None:
                    buckets = table.buckets_of(saved[source]["total_num_buckets"])
                    most_rows += reader.check_table(place, table.native, *buckets, source)
            return sources, unexpected

        sources, unexpected = together(check)
        reason = f"loading the checkpoint {reader.name} in {root} did not succeed; load one that is whole"
        loaded: dict[_Pair, int] = {}

        def load() -> None:
            wanted = [shard for shard in shards if (shard[0], shard[2].name) in sources]
            for _, _, table in wanted:
                table.set_unusable(reason)
            for place, owner, table in wanted:
                entry = saved[sources[place, table.name]]
                if table.adopt(entry["total_num_buckets"], entry["key"]):
                    owner.buckets_changed()
            with Tracker(progress, "load", most_rows, shown=rank == 0) as tracker:
                for place, _, table in wanted:
                    tracker.table(_shown((place, table.name)))
                    loaded[place, table.name] = reader.load_table(place, table.native, tracker.advance)
                    table.native.set_epoch(reader.next_epoch)

        together(load)
        rows = dict.fromkeys(sorted(sources), 0)
        for of_rank in all_gather(loaded):
            for pair, count in of_rank.items():
                rows[pair] += count
        _check_rows({pair: (count, saved[sources[pair]]["rows"]) for pair, count in rows.items()}, reader.name, root)
        for place, _, table in shards:
            if (place, table.name) in sources:
                table.native.saved_as((*reader.identity, reader.next_epoch))
                table.set_unusable(None)
        return LoadReport(
            checkpoint=reader.name,
            deltas=len(reader.links) - 1,
            rows={_shown(pair): count for pair, count in rows.items()},
            missing=tuple(_shown(pair) for pair in sorted(names - set(sources))) if tables is None else (),
            unexpected=tuple(_shown(pair) for pair in sorted(unexpected)),
            renamed={_shown(source): _shown(pair) for pair, source in sorted(sources.items()) if pair != source},
        )

    def compact(self, path: str | os.PathLike[str], *, keep: int = 1, progress: ProgressWanted = None) -> SaveReport:
        """Merge the newest checkpoint in `path` and all it builds on into a full one, which loads find from then on.

        The rows are streamed: extra memory does not grow with them. A run that saves deltas to `path` goes on from the merged
        checkpoint. Nothing is done where the newest is full. `keep` and `progress` as in `save`. Raises `PathError` (no
        checkpoint), `CorruptionError`, `StorageError`, and `StateError` when something was saved to `path` meanwhile: that
        stays, call again.
        """
        rank, world_size = self._place()
        keep = check_int("keep", keep, 1, 1 << 20)
        root = _agreed_path(path)
        latest = all_gather(together(lambda: _native.latest_checkpoint(_native.check_save_dir(root))))[0]
        merged = together(lambda: _native.CheckpointCompaction.open(_native.check_save_dir(root), latest))
        if merged is None:
            return SaveReport(latest, "full", None, None, 0, 0)
        begun: _native.CheckpointSave | None = None

        def begin() -> str:
            nonlocal begun
            begun = _native.CheckpointSave(
                _native.check_save_dir(root), secrets.randbits(64), keep, merged=merged.identity
            )
            return begun.name

        def write(name: str) -> tuple[int, int]:
            total = merged.rows if world_size == 1 else None
            with Tracker(progress, "compact", total, shown=rank == 0) as tracker:
                return merged.write(name, rank, world_size, tracker.advance)

        try:
            name = all_gather(together(begin if rank == 0 else str))[0]
            digests = all_gather(together(lambda: write(name)))
            left = together(lambda: begun.publish(digests, merged.next_epoch) if begun is not None else [])
        except Exception:
            if begun is not None:
                _abandon(begun)
            raise
        for what in left:
            _log.warning("an older checkpoint in %s could not be removed: %s", root, what)
        return SaveReport(name, "full", None, None, merged.rows, 0)

    def _place(self) -> tuple[int, int]:
        """This process's rank, and how many there are."""
        if is_distributed():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            if self.rank not in (None, rank):
                raise ConfigError(f"rank={self.rank} and torch.distributed says {rank}: leave rank out")
            return rank, world_size
        if self.rank is None:
            raise ConfigError(
                "rank=None and torch.distributed is not initialised: give Saver(rank=0), or initialise it first"
            )
        if self.rank != 0:
            raise ConfigError(
                f"rank={self.rank} without torch.distributed, where there is one rank: give Saver(rank=0)"
            )
        return 0, 1


def shards_of(module: nn.Module) -> list[_Shard]:
    """The tables of this rank, opened, by module path and name."""
    modules = cache_modules(module)
    if not modules:
        raise InputError(f"{type(module).__name__} has no cache module: nothing to save or load")
    for owner in modules.values():
        owner.settle()
    found = [(place, owner, table) for place, owner in modules.items() for table in owner.tables.values()]
    found.sort(key=lambda shard: (shard[0], shard[2].name))
    for _, _, table in found:
        table.open()
    return found


def _agreed_path(path: str | os.PathLike[str]) -> str:
    """`path` as a string; `PathError` when ranks differ in the place it names."""

    def text() -> tuple[str, str]:
        given: object = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(given, str):
            raise PathError(f"path={given!r} is not text: give a str")
        return given, os.path.abspath(given) if given else ""

    given, absolute = together(text)
    everyone = all_gather(absolute)
    if len(set(everyone)) > 1:
        named = ", ".join(f"rank {rank}: {place!r}" for rank, place in enumerate(everyone))
        raise PathError(f"path differs between ranks: give all the same ({named})")
    return given


def _base(shards: list[_Shard], root: str, rank: int) -> tuple[_Base | None, str | None]:
    """What a delta of these tables in `root` builds on, or why there can be none. Collective."""

    def newest() -> tuple[dict[str, Any] | None, str | None]:
        try:
            found = _native.newest_checkpoint(_native.check_save_dir(root))
        except CorruptionError as error:
            return None, f"the newest checkpoint there is damaged ({error})"
        return found, None if found is not None else "there is no checkpoint yet"

    found, reason = all_gather(together(newest if rank == 0 else lambda: (None, None)))[0]
    if found is None:
        return None, reason
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
            f"what changed in table {_shown(unknown[0])} since {found['identity'][0]} is not known: another run saved that, "
            "or too long ago, or more rows left since than are remembered"
        )
    return _Base(found["identity"], {pair: one for pair, one in ancestors.items() if one is not None}), None


def _write(
    shards: list[_Shard], root: str, name: str, place_of: tuple[int, int], base: _Base | None, tracker: Tracker
) -> tuple[tuple[int, int], int, int]:
    """This rank's part; its digest, rows and tombstones."""
    writer = _native.CheckpointWriter(_native.check_save_dir(root), name, *place_of)
    rows = tombstones = 0
    for place, owner, table in shards:
        pair, numbers = (place, table.name), dict(numbers_of(owner.hyperparameters(table.name)))
        tracker.table(_shown(pair))
        if base is None:
            written, left = writer.write_table(place, table.native, numbers), 0
        else:
            written, left = writer.write_changes(place, table.native, numbers, base.ancestors[pair])
        tracker.advance(written)
        rows, tombstones = rows + written, tombstones + left
    return writer.finish(), rows, tombstones


def numbers_of(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Hyperparameters one by one: a pair `betas` becomes `beta1` and `beta2`."""
    for name, value in group.items():
        if name == "betas":
            yield from (("beta1", float(value[0])), ("beta2", float(value[1])))
        elif name != "params":
            yield name, float(value)


def _abandon(begun: _native.CheckpointSave) -> None:
    """Remove an unfinished checkpoint; the error that ended it is on its way, so one here is only logged."""
    try:
        begun.abandon()
    except EmbCacheError as error:
        _log.info("an unfinished checkpoint stays until the next save: %s", error)


def _shown(pair: _Pair) -> str:
    """A table as users name it."""
    return f"{pair[0]}/{pair[1]}" if pair[0] else pair[1]


def _named(name: object, pairs: Collection[_Pair], field: str, where: str) -> _Pair:
    """The table of `pairs` that a user names; `InputError`."""
    found = [pair for pair in pairs if _shown(pair) == name] or [pair for pair in pairs if pair[1] == name]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(sorted(_shown(pair) for pair in (found or pairs)))
    problem = f"names several tables of {where}" if found else f"is no table of {where}"
    raise InputError(f"{field}: {name!r} {problem}: give one of {listed}")


def _sources(
    model: set[_Pair], saved: set[_Pair], tables: Collection[str] | None, rename: Mapping[str, str] | None
) -> dict[_Pair, _Pair]:
    """Which table of the checkpoint each table of the model is loaded from, where there is one. `InputError`."""
    if isinstance(tables, str):
        raise InputError(f"tables={tables!r} is text: give a collection of names")
    if not isinstance(rename, Mapping | None):
        raise InputError(f"rename is a {type(rename).__name__}: give names in the model by names in the checkpoint")
    renamed: dict[_Pair, _Pair] = {}
    for old, new in (rename or {}).items():
        source = _named(old, saved, "rename", "the checkpoint")
        target = _named(new, model, "rename", "the model")
        if target in renamed:
            raise InputError(f"rename: {new!r} is named twice")
        renamed[target] = source
    wanted = model if tables is None else {_named(name, model, "tables", "the model") for name in tables}
    taken = set(renamed.values())
    own = {pair: pair for pair in wanted if pair in saved and pair not in taken}
    return {**own, **{pair: source for pair, source in renamed.items() if pair in wanted}}


def _check_names(
    model: set[_Pair],
    sources: Mapping[_Pair, _Pair],
    tables: Collection[str] | None,
    unexpected: set[_Pair],
    saved: set[_Pair],
    root: str,
) -> None:
    def listed(pairs: set[_Pair]) -> str:
        return ", ".join(f"{table!r} of module {module!r}" for module, table in sorted(pairs))

    wanted = model if tables is None else {_named(name, model, "tables", "the model") for name in tables}
    missing = wanted - set(sources)
    if missing:
        raise MismatchError(
            f"the checkpoint in {root} has no table {listed(missing)}; it has {listed(saved)}: give rename=, or strict=False "
            "to leave tables as they are"
        )
    if unexpected:
        raise MismatchError(
            f"the model has no table {listed(unexpected)}, which the checkpoint in {root} holds: give rename=, tables=, or "
            "strict=False to leave them out"
        )


def _check_rows(counts: Mapping[_Pair, tuple[int, int]], name: str, root: str) -> None:
    """Whether all ranks together loaded the rows that there should be."""
    for pair, (loaded, expected) in counts.items():
        if loaded != expected:
            raise CorruptionError(
                f"the checkpoint {name} in {root} is damaged: table {_shown(pair)} should have {expected} rows and has {loaded}"
            )
