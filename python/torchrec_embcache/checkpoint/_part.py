"""One rank's part of a save whose ranks do not communicate before its end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.model._shards import ModuleShard, numeric_hyperparameters

from ._begun import AbandonOnError

__all__ = ["PartSession", "next_epoch_of"]


def next_epoch_of(shards: Iterable[ModuleShard]) -> int:
    """Returns the epoch that follows the epochs of all tables of this rank."""
    return max((table._native_table.epoch() for _, _, table in shards), default=0) + 1


def _table_to_save(shard: ModuleShard) -> _native.AsyncSaveTable:
    module_path, owner, table = shard
    return _native.AsyncSaveTable(
        module_path, table._native_table, numeric_hyperparameters(owner.hyperparameters(table.name))
    )


class PartSession(AbandonOnError[_native.CheckpointPart]):
    """A checkpoint part: uniquely named files that `SaveSession.adopt` moves into a checkpoint. No save removes them while this
    exists.

    As a context manager it abandons the part after an error or an interrupt. Order of calls: `begin`, then `write_tables` (or
    `snapshot_tables` and `write_snapshot`), `append` and `end_dense_extent`, then `finish`.
    """

    def begin(self, directory: CheckpointDirectory, *, expected_bytes: int = 0) -> None:
        """Creates the part in `directory`. About `expected_bytes` of dense extents will be written."""
        self._native = _native.CheckpointPart(directory, secrets.randbits(64), expected_bytes)

    @property
    def _part(self) -> _native.CheckpointPart:
        assert self._native is not None, "begin() comes before, and it was not abandoned"
        return self._native

    def write_tables(self, shards: Iterable[ModuleShard], next_epoch: int) -> None:
        """Writes the current rows. Rows that are trained afterwards have the epoch `next_epoch`."""
        shards = list(shards)
        for module_path, owner, table in shards:
            self._part.write_table(
                module_path, table._native_table, numeric_hyperparameters(owner.hyperparameters(table.name))
            )
        for _, _, table in shards:
            table._native_table.set_epoch(next_epoch)

    def snapshot_tables(self, shards: Iterable[ModuleShard], next_epoch: int) -> None:
        """Takes a snapshot of the rows for `write_snapshot`. Rows that are trained afterwards have the epoch `next_epoch`."""
        self._part.snapshot_tables([_table_to_save(shard) for shard in shards], next_epoch)

    def write_snapshot(self) -> None:
        """Writes the rows of the snapshot while training continues."""
        self._part.write_snapshot()

    def append(self, data: NDArray[np.uint8]) -> None:
        """Appends bytes to the current dense extent."""
        self._part.append(data)

    def end_dense_extent(self) -> _native.StreamRange:
        """Ends the current dense extent. Returns its range in this rank's stream."""
        return self._part.end_dense_extent()

    def finish(self) -> _native.WrittenPart:
        """Makes all files durable. Returns the part for the coordinator to adopt."""
        return self._part.finish()
