"""Checkpoints of a model's embedding tables: full ones, and deltas of what changed.

A checkpoint holds the rows of every cache module in the model, sharded or not, with their optimizer slots and metadata; the dense
part of the model is torch's or DCP's to save. It loads into any number of ranks and any tier budgets. Its data files are
safetensors; `docs/design-checkpoint.md` describes them.

In a save every rank opens the directory. The first rank begins a checkpoint, each rank writes its shards, and the first rank
publishes. A crash at any time leaves the checkpoint before. In a load each rank checks manifests, headers and sizes for its shards;
tables are touched only when all ranks have done so. An error on one rank is raised on every rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict

import torch.distributed as dist
from torch import nn

from .beside import AsyncSaveRunner, save_group, wait_for_saves
from .collective import agree_on_arguments, is_distributed, run_on_all_ranks
from .config import check_choice, check_int, parse_bytes
from .exceptions import ConfigError, InputError
from .paths import CheckpointDirectory, PathChecks, open_to_load, open_to_save
from .progress import Progress, ProgressOption, ProgressTracker
from .reports import LoadReport, SaveReport
from .save_log import log_report
from .saving import FullEvery, check_full_every, plan_save, write_tables
from .sessions.intact import CHECKPOINT_NAME
from .sessions.load import LoadSession
from .sessions.merge import CheckpointMerge
from .sessions.moment import AsyncSaveSession
from .sessions.ranks import AllRanks
from .sessions.save import RankPart, SaveSession
from .sessions.sweep import sweep_before_save, tables_by_name
from .shards import same_path_on_all_ranks, shards_to_save, shards_when_idle
from .under_way import wait_for_saves_to

__all__ = ["LoadReport", "Progress", "SaveReport", "Saver"]

_log = logging.getLogger(__name__)

# How often a merge begins again where a save was published before it was complete.
_MAX_MERGES = 5


class Saver:
    """Saves the tables of a model to a directory, and loads them. With `torch.distributed` every rank calls the same methods
    with the same arguments: `InputError` on every rank where they differ.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> saver = Saver(0)
        >>> saver.save(model, "ckpt").rows
        2
        >>> model(torch.tensor([8, 9])).sum().backward()
        >>> saver.save(model, "ckpt", incremental=True).rows  # those of this step
        2
        >>> future = saver.save_async(model, "ckpt", incremental=True)  # written while training goes on
        >>> future.result().kind
        'delta'
        >>> saver.compact("ckpt").rows
        3
        >>> saver.load(model, "ckpt").rows
        {'item': 3}
    """

    def __init__(self, rank: int | None = None, *, path_checks: PathChecks = "strict") -> None:
        """`rank`: this process's. By default `torch.distributed`'s, and without that 0. Another number is a `ConfigError` of each
        method: a process without `torch.distributed` has the whole model.

        `path_checks`: what is asked of the directories that the methods are given. "strict": no symbolic link or `..` in the path,
        no word such as "key", no system directory, a directory of the caller's own with mode 0750 or less, and nothing opened in it
        that others may write to. "basic" refuses only what others can write to: it follows links, once, accepts 0755, and loads a
        checkpoint of another user. "trusted" accepts any owner and mode, and parents that others may write to, as volumes of pods
        have them: everybody who can write there is trusted.
        """
        self.rank: int | None = None if rank is None else check_int("rank", rank, 0, (1 << 31) - 1)
        check_choice("path_checks", path_checks, PathChecks)
        self.path_checks: PathChecks = path_checks

    @log_report
    def save(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        incremental: bool = False,
        *,
        linked: bool = False,
        keep: int = 1,
        full_every: FullEvery = "auto",
        counters: bool = True,
        progress: ProgressOption = None,
    ) -> SaveReport:
        """Write the rows of every cache module in `module` to `path`. Loads find this checkpoint there from then on.

        `incremental`: write only rows that were modified since the newest checkpoint in `path`, with slots and metadata, and
        the ids that left. That checkpoint must be what these tables were last saved to `path` as, or loaded from. Where it is
        not, or where too many ids left since (see `docs/configuration.md`), or where it has counts of ids that wait for rows and
        this save has none, or the other way round, or where a load of the delta would find other rows than the tables have, the
        save is full; the log and the report say why.

        `full_every`: which of the incremental saves are full, so that chains of deltas end: with n every nth, with 1 all, with None
        none. With "auto" it is one after 64 deltas, or after 8 or more that together have as many rows as the full checkpoint that
        they build on.

        `linked`: make a linked checkpoint, for a fast restart. SSD tiers are not written again. Rows in RAM are handed down to
        them, and the files of their segments get a second name in the checkpoint. On another file system they are copied, and
        the report says so. A linked checkpoint loads into tables that have the same buckets (as many ranks as now) and an SSD
        tier; `embcache compact` makes it a checkpoint for any tables. Tables without an SSD tier are in it as in any
        checkpoint. Deltas do not build on it.

        `keep`: how many of the newest checkpoints stay, with all that they build on; older ones are removed. `counters`: False
        leaves out the counts of ids that wait for rows (see `torchrec_embcache.admission`), which a checkpoint that only serves
        does not need. `progress`: a callable that is given a `Progress` after each table, on every rank, or True for a bar of
        rank 0.

        `path` is made (mode 0750) when it is missing. Until the new checkpoint is complete and durable a load finds the one before.
        A save that fails loses nothing for the next delta. Tables with `eviction=Policy(..., every_steps=None)` are swept first;
        where that fails nothing is written. The tables must not be trained meanwhile: `save_async` is for that. A `save_async` that
        is under way is waited for.

        Raises `PathError` (length, `..`, symbolic links, a word such as "key", a system directory, ranks that disagree),
        `StoragePermissionError`, `StorageError` (a full disk), `StateError` (of a delta: another process saved to `path`
        meanwhile), `InputError` (no cache module in `module`, or two of one path), `ConfigError`.
        """

        def arguments() -> dict[str, object]:
            if linked and incremental:
                raise ConfigError(
                    "incremental=True and linked=True: a linked checkpoint has every row; give one of them"
                )
            common = self._arguments(incremental=incremental, keep=keep, counters=counters, full_every=full_every)
            return {**common, "linked": bool(linked)}

        agree_on_arguments("Saver.save", arguments)
        ranks = AllRanks()
        shards = run_on_all_ranks(lambda: shards_when_idle(module))
        directory = self._open_to_save(path)
        sweep_before_save(tables_by_name(shards), ranks)
        plan = plan_save(
            shards, directory, ranks.rank, incremental=incremental, counters=counters, full_every=full_every
        )

        def write() -> RankPart:
            with ProgressTracker(progress, "save", plan.rows, show_bar=ranks.rank == 0) as tracker:
                writer = session.writer(counters=counters)
                totals = write_tables(plan, writer, tracker, linked=linked)
                return RankPart(writer.finish(), **asdict(totals))

        with SaveSession(directory, ranks, keep=keep, parent=plan.parent, linked=linked) as session:
            session.begin()
            session.write(write)
            session.publish(plan.epoch, [table for _, _, table in shards])
        parts = session.parts
        rows, tombstones = sum(part.rows for part in parts), sum(part.tombstones for part in parts)
        if not linked:
            return plan.report(session.name, session.parent_id, rows, tombstones)
        linked_bytes, copied_bytes = sum(part.linked_bytes for part in parts), sum(part.copied_bytes for part in parts)
        if copied_bytes:
            _log.warning(
                "%s: %d bytes of segments were copied, because its file system cannot link them",
                directory,
                copied_bytes,
            )
        return SaveReport(session.name, "linked", None, None, rows, 0, linked_bytes, copied_bytes)

    @log_report
    def save_async(
        self,
        module: nn.Module,
        path: str | os.PathLike[str],
        incremental: bool = False,
        *,
        keep: int = 1,
        full_every: FullEvery = "auto",
        counters: bool = True,
        progress: ProgressOption = None,
        max_bytes_per_second: int | str | None = None,
    ) -> Future[SaveReport]:
        """Save as `save` does, in a thread while training goes on. The checkpoint is the state at the call, bit for bit, after the
        sweep of tables that are swept at saves.

        This returns when every rank holds that state. The future, on every rank, gives the report, or the error that `save` would
        raise on whichever rank. An error leaves the checkpoint before as it is and never ends training. The next delta builds on
        this checkpoint once it is there: it holds what was trained, and what left, after the call.

        Rows that training changes before they are written are copied first: into 32 MiB of memory on each rank, and past that
        into a file in the checkpoint's directory. `max_bytes_per_second`: a limit for each rank, in bytes or as "200MiB"; by
        default the thread is as fast as the disk and idle processors allow. The thread has the lowest priority. It calls
        `progress` and the future's callbacks. It has a process group of its own, which the first call makes, so that training's
        collectives never wait for it.

        One such save is under way at a time: the next `save_async` waits for it. So do `save` and `load` of one of its tables or of
        `path`, `compact` of `path`, and closing one of its tables. Ctrl-C ends the wait. Called from `progress` they raise
        `StateError`. The future cannot be cancelled. The process ends when the save has ended. In an `atexit` function
        the save is done before this returns. Errors at the call are those of `save`, and `ConfigError` for the rate.
        """
        rate = None

        def arguments() -> dict[str, object]:
            nonlocal rate
            if max_bytes_per_second is not None:
                rate = parse_bytes("max_bytes_per_second", max_bytes_per_second)
                check_int("max_bytes_per_second", rate, 1, (1 << 63) - 1)
            return self._arguments(incremental=incremental, keep=keep, counters=counters, full_every=full_every)

        agree_on_arguments("Saver.save_async", arguments)
        ranks = AllRanks()
        run_on_all_ranks(wait_for_saves)
        shards = run_on_all_ranks(lambda: shards_to_save(module))
        directory = self._open_to_save(path)
        group = save_group()
        sweep_before_save(tables_by_name(shards), ranks)
        plan = plan_save(
            shards, directory, ranks.rank, incremental=incremental, counters=counters, full_every=full_every
        )
        session = AsyncSaveSession(plan, ranks, group, keep=keep, progress=progress, max_bytes_per_second=rate)
        with AsyncSaveRunner([table for _, _, table in shards], directory.path, session.cancel) as save:
            session.take_snapshot()
            return save.start(session.finish)

    @log_report
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
        last_intact: bool = False,
        slots: bool = True,
        progress: ProgressOption = None,
    ) -> LoadReport:
        """Replace the contents of every cache module in `module` by the checkpoint at `path`, which any number of ranks saved.

        From a linked checkpoint (`save(linked=True)`) SSD tiers are made anew and its segments are linked into them. It fits tables
        with the same buckets and an SSD tier; otherwise `MismatchError` says how to convert it.

        Deltas are read with all that they build on, with `incremental` or without. That argument is there for RecSDK's signature.

        `tables`: load only these tables of the model. `rename`: the model's names of tables by those in the checkpoint. Names are
        `module/table`, or the table's alone where only one module has it. `strict=False` allows tables that only the model or only
        the checkpoint has. `checkpoint`: the name of one that `save(keep=...)` kept; by default the newest. `progress`: a callable
        that is given a `Progress` as rows are loaded, on every rank, or True for a bar (rank 0).

        `last_intact=True`: where that checkpoint is damaged or does not fit together, load the newest before it that is whole.
        `LoadReport.skipped` says which are not, and why. Rank 0 reads all rows of a checkpoint for that before any rank loads it.
        The next save is full where one was skipped.

        `slots=False`: load weights and metadata alone. The tables may have any optimizer, as for fine-tuning, or none, as for
        evaluation: `Saver(0).load(model.eval(), path, slots=False)`. Slots start at zeros, and so does Adam's step. The next
        save is full.

        The tables must be those of the checkpoint, with the same dim and optimizer (`MismatchError`). Budgets, policy, device, seed
        and initializer may differ. The number of buckets and the table's key become the checkpoint's. Step counters are restored,
        and so are `lr` and `max_gradient` (with `initial_lr`, which torch's schedulers keep there) in the `param_groups` of tables
        that are loaded with their slots; `LoadReport.hyperparameters` has them. So load before a scheduler's state, or set another
        `lr` after the load. Other hyperparameters stay as the model was made.
        Deltas go on from the checkpoint, unless a table has another name in it, or drops rows because it is full
        (`on_full="evict"`, see `LoadReport.dropped`): then the next save is full. Load before a pipeline takes its first batches,
        because ids of batches in flight went to the owners of the old buckets.

        A `save_async` of this process to `path`, or of a table that is loaded, is waited for. A save of another process to `path`
        does not disturb the load: what it reads is left to the save after. Where such a save replaces the newest checkpoint before
        the load has opened it, the load takes the next one.

        Nothing is changed where the checkpoint is missing (`PathError`) or does not fit, where one that it builds on is missing
        or has changed, or where its manifests or headers are damaged (`CorruptionError`). Where its rows turn out to be
        damaged, or reading fails (`StorageError`), the tables refuse use on every rank until a load succeeds.
        """

        def arguments() -> dict[str, object]:
            self._check_rank()
            if checkpoint is not None and not CHECKPOINT_NAME.fullmatch(checkpoint):
                raise InputError(f"checkpoint={checkpoint!r} is not the name of one: give SaveReport.checkpoint")
            return {
                "strict": bool(strict),
                # Others than these are refused when they are held against the checkpoint's tables.
                "tables": sorted(map(repr, tables)) if isinstance(tables, Collection) else tables,
                "rename": sorted(rename.items()) if isinstance(rename, Mapping) else rename,
                "checkpoint": checkpoint,
                "last_intact": bool(last_intact),
                "slots": bool(slots),
            }

        agree_on_arguments("Saver.load", arguments)
        ranks = AllRanks()
        shards = run_on_all_ranks(lambda: shards_when_idle(module))
        given = same_path_on_all_ranks(path)
        directory = run_on_all_ranks(lambda: open_to_load(given, self.path_checks))
        with LoadSession(ranks, checkpoint, last_intact=last_intact, slots=slots) as session:
            session.open(directory)
            session.check(shards, tables=tables, rename=rename, strict=strict)
            return session.load(lambda: ProgressTracker(progress, "load", session.max_rows, show_bar=ranks.rank == 0))

    def compact(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 1,
        counters: bool = True,
        progress: ProgressOption = None,
    ) -> SaveReport:
        """Merge the newest checkpoint in `path` and all that it builds on into a full one. Loads find the full one from then on.

        The rows are streamed: extra memory does not grow with their number. A run may train and save deltas to `path` meanwhile. It
        goes on from the merged checkpoint, and a delta that it is writing then builds on that. Where it publishes a delta before
        the merged checkpoint is complete, the merge begins again with that delta, up to 5 times. Nothing is done where the newest
        checkpoint is full. A linked checkpoint becomes a full one; meanwhile its index takes 10 bytes of RAM for each row. `keep`,
        `counters` and `progress` are those of `save`.

        Raises `PathError` (no checkpoint), `CorruptionError`, `StorageError`, and `StateError` where something was saved to `path`
        each time before the merged checkpoint was complete: that stays, so call this again where saves are further apart.
        """
        agree_on_arguments("Saver.compact", lambda: self._arguments(keep=keep, counters=counters))
        ranks = AllRanks()
        given = same_path_on_all_ranks(path)

        def track(rows: int | None) -> ProgressTracker:
            return ProgressTracker(progress, "compact", rows, show_bar=ranks.rank == 0)

        for attempt in range(1, _MAX_MERGES + 1):
            with CheckpointMerge(ranks) as merge:
                merge.open(given, self.path_checks, counters=counters)
                report = merge.save(keep, track, is_last=attempt == _MAX_MERGES)
            if report is not None:
                return report
        raise AssertionError("the last attempt returns or raises")

    def _open_to_save(self, path: str | os.PathLike[str]) -> CheckpointDirectory:
        """The directory that all ranks save to, checked and made when missing, once no save beside training writes there.
        Collective.
        """
        given = same_path_on_all_ranks(path)

        def open_directory() -> CheckpointDirectory:
            directory = open_to_save(given, self.path_checks)
            wait_for_saves_to(directory.path)
            return directory

        return run_on_all_ranks(open_directory)

    def _arguments(
        self, *, keep: int, counters: bool, incremental: bool = False, full_every: FullEvery = None
    ) -> dict[str, object]:
        """The arguments of a save that all ranks have to give alike. `ConfigError` for those that are refused."""
        self._check_rank()
        keep, full_every = check_int("keep", keep, 1, 1 << 20), check_full_every(full_every)
        return {
            "keep": keep,
            "counters": bool(counters),
            "incremental": bool(incremental),
            "full_every": full_every,
        }

    def _check_rank(self) -> None:
        """`ConfigError` where this rank is not the one that was given."""
        if is_distributed():
            rank = dist.get_rank()
            if self.rank not in (None, rank):
                raise ConfigError(f"rank={self.rank} and torch.distributed says {rank}: leave rank out")
        elif self.rank not in (None, 0):
            raise ConfigError(
                f"rank={self.rank} without torch.distributed, where this process has the whole model: leave rank out, or "
                "call torch.distributed.init_process_group first"
            )
