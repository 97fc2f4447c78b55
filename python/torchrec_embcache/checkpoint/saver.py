"""Checkpoints of a model's embedding tables: full checkpoints, and deltas of changed rows.

A checkpoint contains the rows of every cache module in the model, sharded or not, with their optimizer slots and metadata. The
dense part of the model is saved with torch or DCP. A checkpoint loads into any number of ranks and any tier budgets. Its data files
are safetensors; `docs/design-checkpoint.md` describes them.

In a save every rank opens the directory. The first rank creates a checkpoint, each rank writes its shards, and the first rank
commits. A crash at any time leaves the previous checkpoint. In a load each rank checks manifests, headers and sizes for its shards;
tables are changed only after all ranks have done so. An error on one rank is raised on every rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future

import torch.distributed as dist
from torch import nn

from torchrec_embcache._dist.collective import is_distributed
from torchrec_embcache._dist.ranks import Ranks, all_ranks
from torchrec_embcache._paths import CheckpointDirectory, PathChecks, open_to_load, open_to_save
from torchrec_embcache._saves_in_flight import wait_for_saves_to
from torchrec_embcache.config import check_choice, check_int, parse_bytes
from torchrec_embcache.exceptions import ConfigError, InputError
from torchrec_embcache.model._evict import sweep_before_save, tables_by_name
from torchrec_embcache.model._shards import same_path_on_all_ranks, shards_to_save, shards_when_idle

from ._async import AsyncSaveSession
from ._background import AsyncSaveRunner, save_ranks, wait_for_saves
from ._intact import CHECKPOINT_NAME
from ._load import LoadSession
from ._log import log_report
from ._merge import CheckpointMerge
from ._plan import FullEvery, check_full_every, plan_save, write_tables
from ._progress import Progress, ProgressOption, ProgressTracker
from ._save import RankPart, SaveSession
from .reports import LoadReport, SaveReport

__all__ = ["LoadReport", "Progress", "SaveReport", "Saver"]

_log = logging.getLogger(__name__)

# Number of tries of a merge that is restarted because a save was committed before it was complete.
_MAX_MERGES = 5


class Saver:
    """Saves the tables of a model to a directory, and loads them.

    With `torch.distributed` every rank calls the same methods with the same arguments; `InputError` is raised on every rank if they
    differ.

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
        """`rank`: this process's rank. By default the rank in `torch.distributed`, or 0 without it. Any other number makes each
        method raise `ConfigError`: a process without `torch.distributed` has the entire model.

        `path_checks`: the requirements on the directories passed to the methods. "strict": no symbolic link or `..` in the path, no
        word such as "key", no system directory, a directory owned by the caller with mode 0750 or less, and no files in it that
        others may write to. "basic" rejects only paths that others can write to: it follows links, once, accepts 0755, and loads a
        checkpoint of another user. "trusted" accepts any owner and mode, and parents that others may write to, as is common for
        volumes of pods: every user who can write there is trusted.
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
        """Saves the rows of every cache module in `module` to `path`. Afterwards loads from `path` find this checkpoint.

        `incremental`: saves only rows that were modified since the latest checkpoint in `path`, with slots and metadata, and the
        ids that were removed. These tables must have been saved as, or loaded from, that checkpoint. The save is full instead if
        they were not, if too many ids were removed since (see `docs/checkpoints.md`), if that checkpoint has admission counts and
        this save omits them or vice versa, or if a load of the delta would find other rows than the tables have. The log and the
        report contain the reason.

        `full_every`: the incremental saves that are full, so that chains of deltas end: with n every nth, with 1 all, with None
        none. "auto" saves a full checkpoint after 64 deltas, or after 8 or more that together have as many rows as the full
        checkpoint on which they are based.

        `linked`: creates a linked checkpoint, for a fast restart. SSD tiers are not written again: rows in RAM are demoted to them,
        and their segment files are hard-linked into the checkpoint (as in RocksDB's Checkpoint). On another file system they are
        copied, and the report contains the number of bytes. A linked checkpoint loads into tables with the same buckets (the same
        number of ranks) and an SSD tier; `embcache compact` converts it to a checkpoint for any tables. Tables without an SSD tier
        are saved as in any checkpoint. A linked checkpoint cannot be the base of a delta.

        `keep`: number of latest checkpoints that are kept, with their bases; older ones are removed. `counters`: False omits the
        admission counts of pending ids (see `torchrec_embcache.admission`), which a checkpoint for serving does not need.
        `progress`: a callable that is called with a `Progress` after each table, on every rank, or True for a bar on rank 0.

        `path` is created (mode 0750) if it is missing. Until the new checkpoint is complete and durable a load finds the previous
        one. A failed save loses nothing for the next delta. Tables with `eviction=Policy(..., every_steps=None)` are swept first;
        if that fails, nothing is written. The tables must not be trained during the call: use `save_async` for that. The call waits
        for a `save_async` in progress.

        Raises `PathError` (length, `..`, symbolic links, a word such as "key", a system directory, different paths on ranks),
        `StoragePermissionError`, `StorageError` (a full disk), `StateError` (of a delta: another process saved to `path`
        concurrently), `InputError` (no cache module in `module`, or two with one path), `ConfigError`.
        """

        def arguments() -> dict[str, object]:
            if linked and incremental:
                raise ConfigError(
                    "incremental=True and linked=True: a linked checkpoint has every row; give one of them"
                )
            common = self._arguments(incremental=incremental, keep=keep, counters=counters, full_every=full_every)
            return {**common, "linked": bool(linked)}

        ranks = all_ranks()
        ranks.agree_on_arguments("Saver.save", arguments)
        shards = ranks.run(lambda: shards_when_idle(module))
        directory = self._open_to_save(ranks, path)
        sweep_before_save(tables_by_name(shards), ranks)
        plan = plan_save(shards, directory, ranks, incremental=incremental, counters=counters, full_every=full_every)

        def write() -> RankPart:
            with ProgressTracker(progress, "save", plan.rows, show_bar=ranks.rank == 0) as tracker:
                return write_tables(plan, session.writer(counters=counters), tracker, linked=linked)

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
        """Saves like `save`, in a background thread during training. The checkpoint is bitwise the state at the call, after the
        sweep of tables that are swept at saves.

        The call returns when every rank has a snapshot of that state. The future, on every rank, returns the report, or raises the
        error that `save` would raise on any rank. An error leaves the previous checkpoint unchanged and never stops training. Once
        this checkpoint exists, the next delta is based on it and contains the rows trained and removed after the call.

        Rows that training changes before they are written are copied first: into 32 MiB of memory per rank, and beyond that into a
        file in the checkpoint's directory. `max_bytes_per_second`: a limit per rank, in bytes or as "200MiB"; by default the thread
        is limited only by the disk and idle CPUs. The thread has the lowest priority. It calls `progress` and the future's
        callbacks. It has its own process group, which the first call creates, so that training collectives never wait for it.

        Only one such save runs at a time: the next `save_async` waits for it. `save` and `load` of one of its tables or of `path`,
        `compact` of `path`, and closing one of its tables wait, too. Ctrl-C interrupts the wait. When called from `progress` they
        raise `StateError`. The future cannot be cancelled. The process exits after the save has finished. In an `atexit` function
        the save is done before the call returns. The call raises the errors of `save`, and `ConfigError` for the rate.
        """
        rate = None

        def arguments() -> dict[str, object]:
            nonlocal rate
            if max_bytes_per_second is not None:
                rate = parse_bytes("max_bytes_per_second", max_bytes_per_second)
                check_int("max_bytes_per_second", rate, 1, (1 << 63) - 1)
            return self._arguments(incremental=incremental, keep=keep, counters=counters, full_every=full_every)

        ranks = all_ranks()
        ranks.agree_on_arguments("Saver.save_async", arguments)
        ranks.run(wait_for_saves)
        shards = ranks.run(lambda: shards_to_save(module))
        directory = self._open_to_save(ranks, path)
        background = save_ranks()
        sweep_before_save(tables_by_name(shards), ranks)
        plan = plan_save(shards, directory, ranks, incremental=incremental, counters=counters, full_every=full_every)
        session = AsyncSaveSession(plan, ranks, background, keep=keep, progress=progress, max_bytes_per_second=rate)
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
        """Replaces the contents of every cache module in `module` by the checkpoint at `path`, saved by any number of ranks.

        From a linked checkpoint (`save(linked=True)`) SSD tiers are rebuilt and its segments are linked into them. It fits tables
        with the same buckets and an SSD tier; otherwise `MismatchError` is raised and explains how to convert it.

        Deltas are loaded with all their bases, with or without `incremental`. That argument exists for RecSDK's signature.

        `tables`: loads only these tables of the model. `rename`: maps names of tables in the checkpoint to names in the model.
        Names are `module/table`, or only the table's name if a single module has it. `strict=False` allows tables that only the
        model or only the checkpoint has. `checkpoint`: the name of a checkpoint kept by `save(keep=...)`; by default the latest.
        `progress`: a callable that is called with a `Progress` as rows are loaded, on every rank, or True for a bar (rank 0).

        `last_intact=True`: if that checkpoint is corrupted or inconsistent, loads the latest intact checkpoint before it.
        `LoadReport.skipped` contains the skipped checkpoints and the reasons. Rank 0 reads all rows of a checkpoint for this check
        before any rank loads it. If a checkpoint was skipped, the next save is full.

        `slots=False`: loads only weights and metadata. The tables may have any optimizer, as for fine-tuning, or none, as for
        evaluation: `Saver(0).load(model.eval(), path, slots=False)`. Slots and Adam's step start at zero. The next save is full.

        The tables must be those of the checkpoint, with the same dim and optimizer (`MismatchError`). Budgets, policy, device, seed
        and initializer may differ. The number of buckets and the table's key are taken from the checkpoint. Step counters are
        restored, and also `lr` and `max_gradient` (with `initial_lr`, which torch's schedulers store there) in the `param_groups`
        of tables that are loaded with their slots; `LoadReport.hyperparameters` contains them. Therefore load before a scheduler's
        state, or set another `lr` after the load. Other hyperparameters keep the values of the model.
        The next delta is based on the checkpoint, unless a table has another name in it, or drops rows because it is full
        (`on_full="evict"`, see `LoadReport.dropped`): then the next save is full. Load before a pipeline takes its first batches,
        because ids of batches in flight were sent to the owners of the old buckets.

        The call waits for a `save_async` of this process to `path`, or of a table that is loaded. A save of another process to
        `path` does not disturb the load: the files that it reads are left to the following save to remove. If such a save replaces
        the latest checkpoint before the load has opened it, the load uses the new one.

        Nothing is changed if the checkpoint is missing (`PathError`) or does not fit, if one of its bases is missing or has
        changed, or if its manifests or headers are corrupted (`CorruptionError`). If its rows turn out to be corrupted, or reading
        fails (`StorageError`), the tables are poisoned on every rank until a load succeeds.
        """

        def arguments() -> dict[str, object]:
            self._check_rank()
            if checkpoint is not None and not CHECKPOINT_NAME.fullmatch(checkpoint):
                raise InputError(f"checkpoint={checkpoint!r} is not the name of one: give SaveReport.checkpoint")
            return {
                "strict": bool(strict),
                # Other types are rejected when they are compared with the checkpoint's tables.
                "tables": sorted(map(repr, tables)) if isinstance(tables, Collection) else tables,
                "rename": sorted(rename.items()) if isinstance(rename, Mapping) else rename,
                "checkpoint": checkpoint,
                "last_intact": bool(last_intact),
                "slots": bool(slots),
            }

        ranks = all_ranks()
        ranks.agree_on_arguments("Saver.load", arguments)
        shards = ranks.run(lambda: shards_when_idle(module))
        given = same_path_on_all_ranks(path)
        directory = ranks.run(lambda: open_to_load(given, self.path_checks))
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
        """Merges the latest checkpoint in `path` and all its bases into a full one. Afterwards loads find the full one.

        The rows are streamed: the memory used does not grow with their number. A run may train and save deltas to `path`
        concurrently. It continues from the merged checkpoint, and a delta that it is writing is then based on that. If it commits a
        delta before the merged checkpoint is complete, the merge restarts with that delta, up to 5 times. Nothing is done if the
        latest checkpoint is full. A linked checkpoint becomes a full one; its index uses 10 bytes of RAM per row during the call.
        `keep`, `counters` and `progress` are those of `save`.

        Raises `PathError` (no checkpoint), `CorruptionError`, `StorageError`, and `StateError` if a save was committed to `path`
        during every try: the saved checkpoint is kept; call this again when saves are less frequent.
        """
        ranks = all_ranks()
        ranks.agree_on_arguments("Saver.compact", lambda: self._arguments(keep=keep, counters=counters))
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

    def _open_to_save(self, ranks: Ranks, path: str | os.PathLike[str]) -> CheckpointDirectory:
        """Opens the directory that all ranks save to; creates it if missing. Waits for asynchronous saves to it. Collective."""
        given = same_path_on_all_ranks(path)

        def open_directory() -> CheckpointDirectory:
            directory = open_to_save(given, self.path_checks)
            wait_for_saves_to(directory.path)
            return directory

        return ranks.run(open_directory)

    def _arguments(
        self, *, keep: int, counters: bool, incremental: bool = False, full_every: FullEvery = None
    ) -> dict[str, object]:
        """Returns the arguments of a save that must be equal on all ranks. Raises `ConfigError` for invalid ones."""
        self._check_rank()
        keep, full_every = check_int("keep", keep, 1, 1 << 20), check_full_every(full_every)
        return {
            "keep": keep,
            "counters": bool(counters),
            "incremental": bool(incremental),
            "full_every": full_every,
        }

    def _check_rank(self) -> None:
        """Raises `ConfigError` if this rank is not `self.rank`."""
        if is_distributed():
            rank = dist.get_rank()
            if self.rank not in (None, rank):
                raise ConfigError(f"rank={self.rank} and torch.distributed says {rank}: leave rank out")
        elif self.rank not in (None, 0):
            raise ConfigError(
                f"rank={self.rank} without torch.distributed, where this process has the whole model: leave rank out, or "
                "call torch.distributed.init_process_group first"
            )
