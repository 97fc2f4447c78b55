"""One rank's part of a save whose ranks do not communicate before its end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from torchrec_embcache import _native
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.model._shards import ModuleShard, numeric_hyperparameters

from ._begun import AbandonOnError

__all__ = ["PartSession", "next_epoch_of", "table_to_save"]


def next_epoch_of(shards: Iterable[ModuleShard]) -> int:
    """Returns the epoch that follows the epochs of all tables of this rank."""
    return max((table._native_table.epoch() for _, _, table in shards), default=0) + 1


def table_to_save(shard: ModuleShard, base: _native.BaseCheckpoint | None = None) -> _native.AsyncSaveTable:
    """Returns the native form of a table to save, as a delta if it has a `base`."""
    module_path, owner, table = shard
    numbers = numeric_hyperparameters(owner.hyperparameters(table.name))
    return _native.AsyncSaveTable(module_path, table._native_table, numbers, base)


class PartSession(AbandonOnError[_native.CheckpointPart]):
    """A checkpoint part: uniquely named files that `SaveSession.adopt` moves into a checkpoint. No save removes them while this
    exists.

    As a context manager it abandons the part after an error or an interrupt. Order of calls: `begin`, then `write_tables` (or
    `snapshot_tables` and `native.write_snapshot`), `native.append` and `native.end_dense_extent`, then `native.finish`.
    """

    def begin(self, directory: CheckpointDirectory, *, expected_bytes: int = 0) -> None:
        """Creates the part in `directory`. About `expected_bytes` of dense extents will be written."""
        self._native = _native.CheckpointPart(directory, secrets.randbits(64), expected_bytes)

    @property
    def native(self) -> _native.CheckpointPart:
        """The part that has begun."""
        assert self._native is not None, "begin() comes before, and it was not abandoned"
        return self._native

    def write_tables(self, shards: Iterable[ModuleShard], next_epoch: int) -> None:
        """Writes the current rows. Rows that are trained afterwards have the epoch `next_epoch`."""
        shards = list(shards)
        for module_path, owner, table in shards:
            self.native.write_table(
                module_path, table._native_table, numeric_hyperparameters(owner.hyperparameters(table.name))
            )
        for _, _, table in shards:
            table._native_table.set_epoch(next_epoch)

    def snapshot_tables(self, shards: Iterable[ModuleShard], next_epoch: int) -> None:
        """Takes a snapshot of the rows for `write_snapshot`. Rows that are trained afterwards have the epoch `next_epoch`."""
        self.native.snapshot_tables([table_to_save(shard) for shard in shards], next_epoch)
