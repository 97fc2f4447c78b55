"""Checkpoints of a model's embedding tables: full ones, and deltas of what changed.

    Saver().save(model, "ckpt/sparse")  # with torch.distributed: on every rank
    Saver().save(model, "ckpt/sparse", incremental=True)  # rows modified since the checkpoint that is there
    future = Saver().save_async(model, "ckpt/sparse")  # the state of now, written while training goes on
    Saver().save(model, "ckpt/sparse", snapshot=True)  # for a fast restart of the same ranks: SSD tiers linked, not written again
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
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from . import _native
from .beside import HeldTables, TableToSave, Written, finish_saves, own_group, start
from .cache import CacheTable
from .collective import all_gather, is_distributed, together
from .config import check_choice, check_int, parse_bytes
from .exceptions import ConfigError, CorruptionError, EmbCacheError, InputError, PathError
from .optimizers import check_saved_optimizer
from .paths import PathChecks, Root, given_path
from .progress import Progress, ProgressWanted, Tracker
from .reports import LoadReport, SaveReport
from .save_log import logged
from .table_names import Pair, check_names, check_rows, shown, sources_of
from .whole_model import CacheModule, cache_modules

__all__ = ["LoadReport", "Progress", "SaveReport", "Saver"]

_log = logging.getLogger(__name__)

# A table on this rank: its module's path in the model, the module, the table.
_Shard = tuple[str, CacheModule, CacheTable]


@dataclass(frozen=True)
class _Base:
    """What a delta builds on: the newest checkpoint, and what each table knows it by (before a compaction another name)."""

    identity: _native.Identity
    ancestors: dict[Pair, _native.Ancestor]


class Saver:
    """Saves the tables of a model to a directory, and loads them. With `torch.distributed` every rank calls the same methods."""

    def __init__(self, rank: int | None = None, *, path_checks: PathChecks = "strict") -> None:
        """`rank`: this process's; by default `torch.distributed`'s, and without that it must be given, as 0.

        `path_checks`: what is asked of the directories that the methods are given. "strict": no symbolic link or `..` in the path,
        no word such as "key", no system directory, a directory of the caller's own with mode 0750 or less. "basic" refuses only
        what others can write to: it follows links, once, accepts 0755, and loads a checkpoint of another user.
        """
        self.rank = None if rank is None else check_int("rank", rank, 0, (1 << 31) - 1)
        check_choice("path_checks", path_checks, PathChecks)
        self.path_checks: PathChecks = path_checks

    @logged
    def save(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        incremental: bool = False,
        *,
        snapshot: bool = False,
        keep: int = 1,
        progress: ProgressWanted = None,
    ) -> SaveReport:
        """Write the rows of every cache module in `module` to `path`, as the checkpoint that loads find there from then on.

        `incremental`: only rows modified since the newest checkpoint in `path`, with slots and metadata, and the ids that left.
        That must be what these tables were last saved to `path` as, or loaded from; where it is not, or too much left since
        (see `docs/configuration.md`), the save is full, and says why in the log and in its report.

        `snapshot`: for a fast restart. SSD tiers are not written again: what is in RAM is handed down to them, and the files of
        their segments get a second name in the checkpoint (on another file system: copies, and the report says so). It loads into
        tables with the same buckets (so many ranks as now) and an SSD tier; `embcache compact` makes it a checkpoint for any.
        Tables without an SSD tier are in it as in any checkpoint. Deltas do not build on it.

        `keep`: so many of the newest checkpoints stay, and what those build on; older ones are removed. `progress`: a callable
        that is given a `Progress` after each table, on every rank, or True for a bar (rank 0).

        `path` is made (mode 0750) when missing. Until the new checkpoint is complete and durable a load finds the one before.
        A save that fails loses nothing for the next delta. Training is not to go on meanwhile: `save_async` is for that, and one
        that is under way is waited for. Raises `PathError` (length,
        `..`, symbolic links, a word such as "key", a system directory, ranks that disagree), `StoragePermissionError`,
        `StorageError` (a full disk), `StateError` (of a delta: another process saved to `path` meanwhile), `InputError` (no
        cache module in `module`, or two of one path).
        """
        rank, world_size = self._place()
        keep = check_int("keep", keep, 1, 1 << 20)
        if snapshot and incremental:
            raise ConfigError("incremental=True and snapshot=True: a snapshot has every row; give one of them")
        shards = together(lambda: _at_rest(module))
        root = _agreed_path(path, self.path_checks, to_save=True)
        epoch, base, reason = self._plan(shards, root, incremental)
        begun: _native.CheckpointSave | None = None

        def begin() -> str:
            nonlocal begun
            begun = _begin(root, keep, base, snapshot)
            return begun.name

        def write(name: str) -> _Part:
            total = sum(len(table) for _, _, table in shards) if base is None else None
            with Tracker(progress, "save", total, shown=rank == 0) as tracker:
                return _write(shards, root, name, (rank, world_size), base, snapshot, tracker)

        try:
            name = all_gather(together(begin if rank == 0 else str))[0]
            written = all_gather(together(lambda: write(name)))
            left = together(lambda: begun.publish([part.digest for part in written], epoch) if begun else [])
        except Exception:
            if begun is not None:
                abandon(begun)
            raise
        identity = all_gather(begun.identity if begun is not None else ("", 0))[0]
        warn_of(left, root)
        for _, _, table in shards:
            table.native.set_epoch(epoch)
            if not snapshot:
                table.native.saved_as((*identity, epoch))
        rows, tombstones = sum(part.rows for part in written), sum(part.tombstones for part in written)
        if not snapshot:
            return _report(name, base, reason, rows, tombstones)
        linked, copied = sum(part.linked_bytes for part in written), sum(part.copied_bytes for part in written)
        if copied:
            _log.warning("%s: %d bytes of segments were copied, as its file system cannot link them", root, copied)
        return SaveReport(name, "snapshot", None, None, rows, 0, linked, copied)

    @logged
    def save_async(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        incremental: bool = False,
        *,
        keep: int = 1,
        progress: ProgressWanted = None,
        max_bytes_per_second: int | str | None = None,
    ) -> Future[SaveReport]:
        """As `save`, in a thread, while training goes on: the checkpoint is the state at the call, bit for bit.

        Returns when every rank holds that state. The future, on every rank, gives the report, or the error that `save` would
        raise, of whichever rank; an error leaves the checkpoint before as it is, and never ends training. The next delta builds on
        the checkpoint, once it is there: it holds what was trained, and what left, after the call.

        Rows that training changes before they are written are copied first, in 32 MiB of memory on each rank, and past that in a
        file in the checkpoint's directory. `max_bytes_per_second`: on each rank, in bytes or as "200MiB"; by default as fast as
        the disk and idle processors allow. The thread has the lowest priority, calls `progress` and the future's callbacks, and
        has a process group of its own, which the first call makes: training's collectives never wait for it.

        One at a time: `save`, `save_async` and `load` wait for the one under way, and so does closing a table. The future cannot be
        cancelled. The process ends when the save has ended. Errors at the call as `save`'s; `ConfigError` for the rate.
        """
        rank, world_size = self._place()
        keep = check_int("keep", keep, 1, 1 << 20)
        rate = None
        if max_bytes_per_second is not None:
            rate = parse_bytes("max_bytes_per_second", max_bytes_per_second)
            check_int("max_bytes_per_second", rate, 1, (1 << 63) - 1)
        together(finish_saves)
        shards = together(lambda: shards_of(module))
        root = _agreed_path(path, self.path_checks, to_save=True)
        group = own_group()
        epoch, base, reason = self._plan(shards, root, incremental)
        total = sum(len(table) for _, _, table in shards) if base is None else None
        begun: _native.CheckpointSave | None = None
        held: HeldTables | None = None

        def begin() -> str:
            nonlocal begun
            begun = _begin(root, keep, base)
            return begun.name

        def hold(name: str) -> Tracker:
            nonlocal held
            tables = [
                TableToSave(
                    place,
                    table,
                    numbers_of(owner.hyperparameters(table.name)),
                    None if base is None else base.ancestors[place, table.name],
                )
                for place, owner, table in shards
            ]
            held = HeldTables(root, name, (rank, world_size), tables, epoch, rate)
            return Tracker(progress, "save", total, shown=rank == 0)

        def give_up() -> None:
            if held is not None:
                held.given_up()
            if begun is not None:
                abandon(begun)

        def write(held: HeldTables, tracker: Tracker) -> Written:
            with tracker:

                def told(one: TableToSave, rows: int | None) -> None:
                    if rows is None:
                        tracker.table(shown((one.module, one.table.name)))
                    else:
                        tracker.advance(rows)

                return held.write(told)

        def publish(digests: list[tuple[int, int]]) -> tuple[_native.Identity, list[str]]:
            if begun is None:
                return ("", 0), []
            left = begun.publish(digests, epoch)
            return begun.identity, left

        def save(held: HeldTables, tracker: Tracker) -> SaveReport:
            try:
                written = group.together(lambda: write(held, tracker))
                identity, left = group.together(lambda: publish([one.digest for one in written]))[0]
            except BaseException:
                give_up()
                raise
            held.published(identity)
            warn_of(left, root)
            rows, tombstones = sum(one.rows for one in written), sum(one.tombstones for one in written)
            return _report(identity[0], base, reason, rows, tombstones)

        try:
            name = all_gather(together(begin if rank == 0 else str))[0]
            tracker = together(lambda: hold(name))
        except BaseException:
            give_up()
            raise
        holding = held
        assert holding is not None
        return start([table for _, _, table in shards], lambda: save(holding, tracker))

    @logged
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
        slots: bool = True,
        progress: ProgressWanted = None,
    ) -> LoadReport:
        """Replace the contents of every cache module in `module` by the checkpoint at `path`, which any world size saved.

        Of a snapshot (`save(snapshot=True)`) SSD tiers are made anew, its segments linked into them; it fits tables with the same
        buckets and an SSD tier (`MismatchError` says how to convert it for others).

        Deltas are read with all they build on, with `incremental` or without (it is there for RecSDK's signature).

        `tables`: load only these tables of the model. `rename`: the model's names of tables by those in the checkpoint. Names
        are `module/table`, or the table's alone where only one module has it. `strict=False` allows tables that only one of
        model and checkpoint has. `checkpoint`: the name of one that `save(keep=...)` kept; by default the newest. `progress`: a
        callable that is given a `Progress` as rows are in place, on every rank, or True for a bar (rank 0).

        `slots=False`: weights and metadata alone, into tables with any optimizer, as for fine-tuning, or none, as for evaluation:
        `Saver(0).load(model.eval(), path, slots=False)`. Slots start at zeros, and Adam's step with them; the next save is full.

        Tables must be those of the checkpoint, with the same dim and optimizer (`MismatchError`); budgets, policy, device, seed
        and initializer may differ; the number of buckets and the table's key become the checkpoint's. Step counters are
        restored. Deltas go on from the checkpoint, unless a table has another name in it: then the next save is full. Load before
        a pipeline takes its first batches: those in flight went to the owners of the old buckets.

        Nothing is changed when the checkpoint is missing (`PathError`), does not fit, one that it builds on is missing or
        another, or its manifests or headers are damaged (`CorruptionError`). When its rows turn out to be damaged, or reading fails
        (`StorageError`), the tables refuse use on every rank until a load succeeds.
        """
        rank, _ = self._place()
        shards = together(lambda: _at_rest(module))
        root = _agreed_path(path, self.path_checks, to_save=False)
        if checkpoint is not None and not re.fullmatch(r"\d{10,20}-[0-9a-f]{16}", checkpoint):
            raise InputError(f"checkpoint={checkpoint!r} is not the name of one: give SaveReport.checkpoint")
        # All ranks load what one of them finds, whatever is saved meanwhile.
        latest = all_gather(together(lambda: checkpoint or _native.latest_checkpoint(root.to_load())))[0]
        reader = together(lambda: _native.CheckpointReader(root.to_load(), latest))
        names = {pair for pairs in all_gather([(place, table.name) for place, _, table in shards]) for pair in pairs}
        saved = {(entry["module"], entry["table"]): entry for entry in reader.tables()}
        most_rows = 0

        def check() -> tuple[dict[Pair, Pair], set[Pair]]:
            nonlocal most_rows
            sources = sources_of(names, set(saved), tables, rename)
            unexpected = set(saved) - set(sources.values()) if tables is None else set()
            if strict:
                check_names(names, sources, tables, unexpected, set(saved), root)
            for place, _, table in shards:
                source = sources.get((place, table.name))
                if source is not None:
                    buckets = table.buckets_of(saved[source]["total_num_buckets"])
                    if slots:
                        name = f"{table.name!r} of module {place!r}"
                        check_saved_optimizer(name, table.optimizer, saved[source]["optimizer"])
                    most_rows += reader.check_table(place, table.native, *buckets, source, True, slots)
            return sources, unexpected

        sources, unexpected = together(check)
        reason = f"loading the checkpoint {reader.name} in {root} did not succeed; load one that is whole"
        loaded: dict[Pair, int] = {}

        def load() -> None:
            wanted = [shard for shard in shards if (shard[0], shard[2].name) in sources]
            for _, _, table in wanted:
                table.set_unusable(reason)
            for place, owner, table in wanted:
                entry = saved[sources[place, table.name]]
                numbers = entry["total_num_buckets"], entry["key"], entry["bucket_hash"]
                segments = reader.segments(place, table.name)
                if table.adopt(*numbers, segments):
                    owner.buckets_changed()
                if segments is not None:
                    loaded[place, table.name] = table.stats().rows
            with Tracker(progress, "load", most_rows, shown=rank == 0) as tracker:
                for place, _, table in wanted:
                    tracker.table(shown((place, table.name)))
                    if (place, table.name) in loaded:
                        tracker.advance(loaded[place, table.name])
                        continue
                    loaded[place, table.name] = reader.load_table(place, table.native, tracker.advance)
                    table.native.set_epoch(reader.next_epoch)

        together(load)
        rows = dict.fromkeys(sorted(sources), 0)
        for of_rank in all_gather(loaded):
            for pair, count in of_rank.items():
                rows[pair] += count
        check_rows({pair: (count, saved[sources[pair]]["rows"]) for pair, count in rows.items()}, reader.name, root)
        for place, _, table in shards:
            source = sources.get((place, table.name))
            if source is not None:
                table.loaded_step = saved[source]["step"]
            if source == (place, table.name) and reader.kind != "snapshot" and slots:
                # Neither a snapshot, nor a table of another name or without its slots, is what a delta of this table builds on.
                table.native.saved_as((*reader.identity, reader.next_epoch))
            if source is not None:
                table.set_unusable(None)
        return LoadReport(
            checkpoint=reader.name,
            deltas=len(reader.links) - 1,
            rows={shown(pair): count for pair, count in rows.items()},
            missing=tuple(shown(pair) for pair in sorted(names - set(sources))) if tables is None else (),
            unexpected=tuple(shown(pair) for pair in sorted(unexpected)),
            renamed={shown(source): shown(pair) for pair, source in sorted(sources.items()) if pair != source},
        )

    def compact(self, path: str | os.PathLike[str], *, keep: int = 1, progress: ProgressWanted = None) -> SaveReport:
        """Merge the newest checkpoint in `path` and all it builds on into a full one, which loads find from then on.

        The rows are streamed: extra memory does not grow with them. A run that saves deltas to `path` goes on from the merged
        checkpoint. Nothing is done where the newest is full; a snapshot becomes full (its index takes 10 bytes of RAM a row
        meanwhile). `keep` and `progress` as in `save`. Raises `PathError` (no checkpoint), `CorruptionError`, `StorageError`, and
        `StateError` when something was saved to `path` meanwhile: that stays, call again.
        """
        rank, world_size = self._place()
        keep = check_int("keep", keep, 1, 1 << 20)
        root = _agreed_path(path, self.path_checks, to_save=True)
        latest = all_gather(together(lambda: _native.latest_checkpoint(root.to_load())))[0]
        merged = together(lambda: _native.CheckpointCompaction.open(root.to_save(), latest))
        if merged is None:
            return SaveReport(latest, "full", None, None, 0, 0)
        begun: _native.CheckpointSave | None = None

        def begin() -> str:
            nonlocal begun
            begun = _native.CheckpointSave(root.to_save(), secrets.randbits(64), keep, merged=merged.identity)
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
                abandon(begun)
            raise
        warn_of(left, root)
        return SaveReport(name, "full", None, None, merged.rows, 0)

    def _plan(self, shards: list[_Shard], root: Root, incremental: bool) -> tuple[int, _Base | None, str | None]:
        """The epoch after a save, what a delta builds on, and why a save that was to be incremental is full. Collective."""
        epoch = max(all_gather(max((table.native.epoch() for _, _, table in shards), default=0))) + 1
        base, reason = _base(shards, root, self._place()[0]) if incremental else (None, None)
        if reason is not None:
            _log.warning("%s is saved in full, not as a delta: %s", root, reason)
        return epoch, base, reason

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


def _at_rest(module: nn.Module) -> list[_Shard]:
    """As `shards_of`, when no save beside training has them."""
    found = shards_of(module)
    finish_saves([table for _, _, table in found])
    return found


def _agreed_path(path: str | os.PathLike[str], checks: PathChecks, *, to_save: bool) -> Root:
    """`path`, absolute; `PathError` when ranks differ in the place it names."""
    given = together(lambda: given_path("path", path))
    everyone = all_gather(os.path.normpath(given) if given else "")
    if len(set(everyone)) > 1:
        named = ", ".join(f"rank {rank}: {place!r}" for rank, place in enumerate(everyone))
        raise PathError(f"path differs between ranks: give all the same ({named})")
    return together(lambda: Root.of(given, checks, to_save=to_save))


def _base(shards: list[_Shard], root: Root, rank: int) -> tuple[_Base | None, str | None]:
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
    return _Base(found["identity"], {pair: one for pair, one in ancestors.items() if one is not None}), None


@dataclass(frozen=True)
class _Part:
    """What one rank wrote."""

    digest: tuple[int, int]
    rows: int
    tombstones: int
    linked_bytes: int
    copied_bytes: int


def _write(
    shards: list[_Shard],
    root: Root,
    name: str,
    place_of: tuple[int, int],
    base: _Base | None,
    snapshot: bool,
    tracker: Tracker,
) -> _Part:
    writer = _native.CheckpointWriter(root.to_save(), name, *place_of)
    rows = tombstones = linked = copied = 0
    for place, owner, table in shards:
        pair, numbers = (place, table.name), numbers_of(owner.hyperparameters(table.name))
        tracker.table(shown(pair))
        left = 0
        if snapshot:
            written, more_linked, more_copied = writer.link_table(place, table.native, numbers)
            linked, copied = linked + more_linked, copied + more_copied
        elif base is None:
            written = writer.write_table(place, table.native, numbers)
        else:
            written, left = writer.write_changes(place, table.native, numbers, base.ancestors[pair])
        tracker.advance(written)
        rows, tombstones = rows + written, tombstones + left
    return _Part(writer.finish(), rows, tombstones, linked, copied)


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Hyperparameters one by one: a pair `betas` becomes `beta1` and `beta2`."""

    def each() -> Iterator[tuple[str, float]]:
        for name, value in group.items():
            if name == "betas":
                yield from (("beta1", float(value[0])), ("beta2", float(value[1])))
            elif name != "params":
                yield name, float(value)

    return dict(each())


def _begin(root: Root, keep: int, base: _Base | None, snapshot: bool = False) -> _native.CheckpointSave:
    parent = None if base is None else base.identity
    return _native.CheckpointSave(root.to_save(), secrets.randbits(64), keep, parent, None, snapshot)


def _report(name: str, base: _Base | None, reason: str | None, rows: int, tombstones: int) -> SaveReport:
    kind: Literal["full", "delta"] = "full" if base is None else "delta"
    return SaveReport(name, kind, None if base is None else base.identity[0], reason, rows, tombstones)


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
