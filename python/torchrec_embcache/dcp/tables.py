"""A model's tables in DCP's saves."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchrec_embcache import _native
from torchrec_embcache.beside import AsyncSaveRunner, wait_for_saves
from torchrec_embcache.collective import world_size
from torchrec_embcache.exceptions import EmbCacheError, InputError, PathError, StateError
from torchrec_embcache.paths import CheckpointDirectory, open_to_save
from torchrec_embcache.sessions.part import PartSession, next_epoch_of
from torchrec_embcache.sessions.ranks import SingleRank
from torchrec_embcache.sessions.sweep import sweep_before_save, tables_by_name
from torchrec_embcache.shards import ModuleShard, shards_of, shards_unopened

__all__ = ["PartResult", "StagedTables", "TableWriter"]


@dataclass(frozen=True)
class PartResult:
    """A part that a rank wrote, as it tells the coordinator. `epoch`: of rows that are trained from then on; None without
    tables.
    """

    part: _native.WrittenPart
    epoch: int | None


@dataclass(frozen=True)
class StagedTables:
    """The tables at the moment of `stage()`, on their way into a part. This can be pickled, and then waits until they are
    written.
    """

    outcome: Future[PartResult] | PartResult | EmbCacheError

    def __getstate__(self) -> dict[str, Any]:
        """Wait until the tables are written. DCP pickles a writer in a thread beside training, so training does not wait."""
        outcome: PartResult | EmbCacheError
        try:
            outcome = self.result()
        except EmbCacheError as error:
            outcome = error
        return {"outcome": outcome}

    def wait(self) -> None:
        """Wait until the tables are written, or have failed to be."""
        if isinstance(self.outcome, Future):
            self.outcome.exception()

    def result(self) -> PartResult:
        """Wait for the part and return it. Raises what kept it from being written."""
        outcome = self.outcome.result() if isinstance(self.outcome, Future) else self.outcome
        if isinstance(outcome, EmbCacheError):
            raise outcome
        return outcome


class TableWriter:
    """Writes the tables of a model into parts. Pickling hands over what was staged, without the model."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.has_model = model is not None
        self._staged: StagedTables | None = None
        # Held until the next save, so that no other save sweeps it.
        self._snapshot_part: PartSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Hand over what was staged to whoever unpickles this. It is no longer here then."""
        staged, self._staged = self._staged, None
        return {**self.__dict__, "model": None, "_staged": staged, "_snapshot_part": None}

    def stage(self, path: str, check: Callable[[], object]) -> None:
        """Hold the rows as of now, when no save beside training is under way; a thread writes them to a part.

        It is for the next save of this writer, here or unpickled. `check` raises where `path` is no path.

        What fails, as it may on one rank alone, fails that save, on every rank. Where there is one rank, `PathError` and
        `InputError` are raised.
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
            if isinstance(error, InputError | PathError) and world_size() == 1:
                raise
            self._staged = StagedTables(error)

    def _snapshot(self, directory: CheckpointDirectory, shards: list[ModuleShard], epoch: int) -> Future[PartResult]:
        part = PartSession()

        def release() -> None:
            # No delta builds on this checkpoint, so nothing has to be kept for one.
            for _, _, table in shards:
                table.native.finish_background_save(epoch)

        def cancel() -> None:
            part.abandon()
            release()

        def write() -> PartResult:
            try:
                with part:
                    part.write_snapshot()
                    return PartResult(part.finish(), epoch)
            finally:
                release()

        with AsyncSaveRunner([table for _, _, table in shards], directory.path, cancel) as save:
            part.begin(directory)
            part.snapshot_tables(shards, epoch)
            self._snapshot_part = part
            return save.start(write)

    def take_staged(self) -> StagedTables | None:
        """Return what was staged, for the save that begins, and forget it here."""
        staged, self._staged = self._staged, None
        if staged is None:
            self._snapshot_part = None
        return staged

    def sweep(self) -> None:
        """Sweep the tables that are swept at saves, before any rank writes. What was staged was swept then.

        `StateError` where the model is in another process.
        """
        if self.has_model:

            def open_all() -> None:
                wait_for_saves()
                self._shards()

            sweep_before_save(tables_by_name(shards_unopened(self._require_model())), SingleRank(), open_all)

    def write(self, part: PartSession) -> int | None:
        """Write the rows, as of now; the epoch of rows trained from now on, None where there are no tables.

        `StateError` where the model is in another process, or is trained meanwhile.
        """
        if not self.has_model:
            return None
        wait_for_saves()
        shards = self._shards()
        epoch = next_epoch_of(shards)
        part.write_tables(shards, epoch)
        return epoch

    def close(self) -> None:
        """Forget what was staged, when it is written."""
        if self._staged is not None:
            self._staged.wait()
        self._staged = self._snapshot_part = None

    def abandon(self, staged: StagedTables | None) -> None:
        """Remove the part that was `staged` for a save that failed, when it is written."""
        if staged is not None:
            staged.wait()
        held, self._snapshot_part = self._snapshot_part, None
        if held is not None:
            held.abandon()

    def _shards(self) -> list[ModuleShard]:
        """This rank's tables, opened."""
        return shards_of(self._require_model())

    def _require_model(self) -> nn.Module:
        if self.model is None:
            raise StateError(
                "the tables are in the process that trains: leave async_stager out, so that the writer stages them"
            )
        return self.model
