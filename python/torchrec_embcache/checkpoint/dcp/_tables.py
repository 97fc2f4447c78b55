"""A model's tables in DCP saves."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import SingleRank, all_ranks
from torchrec_embcache._paths import CheckpointDirectory, open_to_save
from torchrec_embcache.checkpoint._background import AsyncSaveRunner, wait_for_saves
from torchrec_embcache.checkpoint._part import PartSession, next_epoch_of
from torchrec_embcache.exceptions import EmbCacheError, InputError, PathError, StateError
from torchrec_embcache.model._evict import sweep_before_save, tables_by_name
from torchrec_embcache.model._shards import ModuleShard, shards_of, shards_unopened

__all__ = ["PartResult", "StagedTables", "TableWriter"]


@dataclass(frozen=True)
class PartResult:
    """A part written by a rank, as sent to the coordinator. `epoch`: epoch of rows that are trained afterwards; None without
    tables.
    """

    part: _native.WrittenPart
    epoch: int | None


@dataclass(frozen=True)
class StagedTables:
    """A snapshot of the tables taken by `stage()`, being written into a part. Pickling it waits until they are written."""

    outcome: Future[PartResult] | PartResult | EmbCacheError

    def __getstate__(self) -> dict[str, Any]:
        """Waits until the tables are written. DCP pickles a writer in a background thread, so training does not wait."""
        outcome: PartResult | EmbCacheError
        try:
            outcome = self.result()
        except EmbCacheError as error:
            outcome = error
        return {"outcome": outcome}

    def wait(self) -> None:
        """Waits until the tables are written or the write has failed."""
        if isinstance(self.outcome, Future):
            self.outcome.exception()

    def result(self) -> PartResult:
        """Waits for the part and returns it. Raises the error if it could not be written."""
        outcome = self.outcome.result() if isinstance(self.outcome, Future) else self.outcome
        if isinstance(outcome, EmbCacheError):
            raise outcome
        return outcome


class TableWriter:
    """Writes the tables of a model into parts. Pickling transfers the staged tables, without the model."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.has_model = model is not None
        self._staged: StagedTables | None = None
        # Kept until the next save, so that no other save removes the part.
        self._snapshot_part: PartSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Transfers the staged tables to the unpickled object; this object does not have them afterwards."""
        staged, self._staged = self._staged, None
        return {**self.__dict__, "model": None, "_staged": staged, "_snapshot_part": None}

    def stage(self, path: str, check: Callable[[], object]) -> None:
        """Takes a snapshot of the tables once no asynchronous save is in progress; a thread writes it to a part.

        The part is for the next save of this writer, here or unpickled. `check` raises if `path` is invalid.

        An error, which may occur on a single rank, makes that save fail on every rank. With a single rank, `PathError` and
        `InputError` are raised immediately.
        """
        if not self.has_model:
            return
        self.close()
        directories: list[CheckpointDirectory] = []

        def open_all() -> None:
            check()
            wait_for_saves()
            directories.append(open_to_save(path))
            self._shards()

        try:
            shards = shards_unopened(self._require_model())
            sweep_before_save(tables_by_name(shards), SingleRank(), open_all)
            self._staged = StagedTables(self._snapshot(directories[0], shards, next_epoch_of(shards)))
        except EmbCacheError as error:
            if isinstance(error, InputError | PathError) and all_ranks().world_size == 1:
                raise
            self._staged = StagedTables(error)

    def _snapshot(self, directory: CheckpointDirectory, shards: list[ModuleShard], epoch: int) -> Future[PartResult]:
        part = PartSession()

        def release() -> None:
            # No delta is based on this checkpoint, so removed rows need not be recorded.
            for _, _, table in shards:
                table._native_table.finish_background_save(epoch)

        def cancel() -> None:
            part.abandon()
            release()

        def write() -> PartResult:
            try:
                with part:
                    part.native.write_snapshot()
                    return PartResult(part.native.finish(), epoch)
            finally:
                release()

        with AsyncSaveRunner([table for _, _, table in shards], directory.path, cancel) as save:
            part.begin(directory)
            part.snapshot_tables(shards, epoch)
            self._snapshot_part = part
            return save.start(write)

    def take_staged(self) -> StagedTables | None:
        """Returns the staged tables for the save that starts, and forgets them."""
        staged, self._staged = self._staged, None
        if staged is None:
            self._snapshot_part = None
        return staged

    def sweep(self) -> None:
        """Sweeps the tables that are swept at saves, before any rank writes. Staged tables were already swept.

        Raises `StateError` if the model is in another process.
        """
        if self.has_model:

            def open_all() -> None:
                wait_for_saves()
                self._shards()

            sweep_before_save(tables_by_name(shards_unopened(self._require_model())), SingleRank(), open_all)

    def write(self, part: PartSession) -> int | None:
        """Writes the current rows. Returns the epoch of rows trained afterwards; None without tables.

        Raises `StateError` if the model is in another process, or is trained during the write.
        """
        if not self.has_model:
            return None
        wait_for_saves()
        shards = self._shards()
        epoch = next_epoch_of(shards)
        part.write_tables(shards, epoch)
        return epoch

    def close(self) -> None:
        """Waits for the staged tables and discards them."""
        if self._staged is not None:
            self._staged.wait()
        self._staged = self._snapshot_part = None

    def abandon(self, staged: StagedTables | None) -> None:
        """Waits for the part that was `staged` for a failed save, and removes it."""
        if staged is not None:
            staged.wait()
        held, self._snapshot_part = self._snapshot_part, None
        if held is not None:
            held.abandon()

    def _shards(self) -> list[ModuleShard]:
        """Opens this rank's tables and returns them."""
        return shards_of(self._require_model())

    def _require_model(self) -> nn.Module:
        if self.model is None:
            raise StateError(
                "the tables are in the process that trains: leave async_stager out, so that the writer stages them"
            )
        return self.model
