"""A model's tables in DCP's saves and loads."""

import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchrec_embcache import _native
from torchrec_embcache.beside import BesideTraining, finish_saves
from torchrec_embcache.cache import CacheTable
from torchrec_embcache.exceptions import CorruptionError, EmbCacheError, MismatchError, StateError
from torchrec_embcache.loading import TablesUnderLoad, replace_contents
from torchrec_embcache.optimizers import check_saved_optimizer
from torchrec_embcache.paths import basic_root
from torchrec_embcache.saving import abandon
from torchrec_embcache.shards import Shard, numbers_of, shards_of
from torchrec_embcache.whole_model import CacheModule

__all__ = ["PartResult", "Staged", "TableReader", "TableWriter"]


@dataclass(frozen=True)
class PartResult:
    """What a rank tells the coordinator of a part that it wrote.

    Directory, name, digest, and the epoch of rows trained from then on (None without tables).
    """

    root: str
    part: str
    digest: tuple[int, int]
    epoch: int | None


@dataclass(frozen=True)
class Staged:
    """Tables of the moment of `stage()`, on their way into a part: what becomes of them, in this process or another."""

    outcome: Future[PartResult] | PartResult | EmbCacheError

    def __getstate__(self) -> dict[str, Any]:
        """DCP pickles a writer in a thread beside training: there it waits until they are written."""
        outcome: PartResult | EmbCacheError
        try:
            outcome = self.result()
        except EmbCacheError as error:
            outcome = error
        return {"outcome": outcome}

    def result(self) -> PartResult:
        """The part, when it is written; or why it is not."""
        outcome = self.outcome.result() if isinstance(self.outcome, Future) else self.outcome
        if isinstance(outcome, EmbCacheError):
            raise outcome
        return outcome


class TableWriter:
    """Writes the tables of a model into parts. Pickled, it is what was staged, handed over, without the model."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.expected = model is not None
        self._staged: Staged | None = None
        # Held until the next save, so that no other save sweeps it.
        self._held: _native.CheckpointPart | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What was staged goes to whoever unpickles this, and is no longer here."""
        staged, self._staged = self._staged, None
        return {**self.__dict__, "model": None, "_staged": staged, "_held": None}

    def stage(self, root: str) -> None:
        """Hold the rows as of now, when no save beside training is under way; a thread writes them to a part.

        It is for the next save of this writer, here or unpickled.

        What fails, as it may on one rank alone, fails that save, on every rank. Raises `PathError`.
        """
        if not self.expected:
            return
        self.close()
        finish_saves()
        shards, epoch = self._shards()
        root = basic_root(root, to_save=True).to_save()
        try:
            self._staged = Staged(self._hold(root, shards, epoch))
        except EmbCacheError as error:
            self._staged = Staged(error)

    def _hold(self, root: str, shards: list[Shard], epoch: int) -> Future[PartResult]:
        part: _native.CheckpointPart | None = None

        def give_up() -> None:
            if part is not None:
                abandon(part)
            release()

        def release() -> None:
            # No delta builds on this checkpoint: nothing is to be kept for one.
            for _, _, table in shards:
                table.native.saved_beside(epoch)

        def write(part: _native.CheckpointPart) -> PartResult:
            try:
                part.write_held_tables()
                return PartResult(root, part.name, part.finish(), epoch)
            except BaseException:
                abandon(part)
                raise
            finally:
                release()

        with BesideTraining([table for _, _, table in shards], give_up) as save:
            part = held = _native.CheckpointPart(root, secrets.randbits(64), 0)
            held.hold_tables([(place, table.native, _numbers(owner, table)) for place, owner, table in shards], epoch)
            self._held = held
            return save.start(lambda: write(held))

    def take_staged(self) -> Staged | None:
        """What was staged, once: for the save that begins."""
        staged, self._staged = self._staged, None
        if staged is None:
            self._held = None
        return staged

    def write(self, part: _native.CheckpointPart) -> int | None:
        """Write the rows, as of now; the epoch of rows trained from now on, None where there are no tables.

        `StateError` where the model is in another process, or is trained meanwhile.
        """
        if not self.expected:
            return None
        finish_saves()
        shards, epoch = self._shards()
        for place, owner, table in shards:
            part.write_table(place, table.native, _numbers(owner, table))
        for _, _, table in shards:
            table.native.set_epoch(epoch)
        return epoch

    def close(self) -> None:
        """Forget what was staged, when it is written."""
        if self._staged is not None and isinstance(self._staged.outcome, Future):
            self._staged.outcome.exception()
        self._staged = self._held = None

    def _shards(self) -> tuple[list[Shard], int]:
        """This rank's tables, and the epoch after theirs."""
        if self.model is None:
            raise StateError(
                "the tables are in the process that trains: leave async_stager out, so that the writer stages them"
            )
        shards = shards_of(self.model)
        return shards, max((table.native.epoch() for _, _, table in shards), default=0) + 1


def _numbers(owner: CacheModule, table: CacheTable) -> dict[str, float]:
    return numbers_of(owner.hyperparameters(table.name))


class TableReader:
    """Loads the tables of a model from a checkpoint."""

    def __init__(self, model: nn.Module, root: str, reader: _native.CheckpointReader, *, slots: bool = True) -> None:
        """`slots`: whether rows come with the optimizer's slots; without them they fit tables with any optimizer."""
        self._root = root
        self._slots = slots
        self._reader = reader
        self._saved = {(entry["module"], entry["table"]): entry for entry in reader.tables()}
        self._shards = shards_of(model)
        self._rows: dict[tuple[str, str], int] = {}

    def check(self) -> None:
        """Whether the checkpoint has the model's tables, fitting, and its headers are whole. No table is touched."""
        finish_saves()
        # Each rank sees its own tables: those of other ranks are in the checkpoint and not here.
        for place, _, table in self._shards:
            saved = self._saved.get((place, table.name))
            if saved is None:
                there = ", ".join(f"{name!r} of module {module!r}" for module, name in sorted(self._saved)) or "none"
                raise MismatchError(
                    f"the checkpoint in {self._root} has no table {table.name!r} of module {place!r}; it has {there}: "
                    "leave model out, or give the one that was saved"
                )
            buckets = table.buckets_of(saved["total_num_buckets"])
            if self._slots:
                check_saved_optimizer(f"{table.name!r} of module {place!r}", table.optimizer, saved["optimizer"])
            self._rows[place, table.name] = self._reader.check_table(place, table.native, *buckets, slots=self._slots)

    def load(self) -> None:
        """Replace the tables' contents. After an error they refuse use until a load succeeds."""
        reason = f"loading the checkpoint {self._reader.name} in {self._root} did not succeed; load one that is whole"
        with TablesUnderLoad([table for _, _, table in self._shards], reason, by_all_ranks=True):
            for shard in self._shards:
                place, _, table = shard
                loaded = replace_contents(self._reader, shard, self._saved[place, table.name])
                expected = self._rows[place, table.name]
                if loaded != expected:
                    raise CorruptionError(
                        f"the checkpoint {self._reader.name} in {self._root} is damaged: table {table.name!r} of module "
                        f"{place!r} should have {expected} rows here and has {loaded}"
                    )
                table.loaded_step = self._saved[place, table.name]["step"]
