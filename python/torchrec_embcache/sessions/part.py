"""What one rank writes of a save whose ranks agree on nothing before its end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.paths import CheckpointDirectory
from torchrec_embcache.shards import ModuleShard, numeric_hyperparameters

from .begun import AbandonOnError

__all__ = ["PartSession", "next_epoch_of"]


def next_epoch_of(shards: Iterable[ModuleShard]) -> int:
    """The epoch after those of the tables of this rank."""
    return max((table.native.epoch() for _, _, table in shards), default=0) + 1


def _table_to_save(shard: ModuleShard) -> _native.AsyncSaveTable:
    module_path, owner, table = shard
    return _native.AsyncSaveTable(module_path, table.native, numeric_hyperparameters(owner.hyperparameters(table.name)))


class PartSession(AbandonOnError[_native.CheckpointPart]):
    """A part: files under a name of their own, which `SaveSession.adopt` takes over. No save sweeps it as long as this lives.

    As a block it abandons the part where the block is left by an error or an interrupt. The order of calls: `begin`, then
    `write_tables` (or `snapshot_tables` and `write_snapshot`), `append` and `end_extent`, then `finish`.
    """

    def begin(self, directory: CheckpointDirectory, *, expected_bytes: int = 0) -> None:
        """Make the part in `directory`. About `expected_bytes` of extents will be written."""
        self._native = _native.CheckpointPart(directory, secrets.randbits(64), expected_bytes)

    @property
    def _part(self) -> _native.CheckpointPart:
        assert self._native is not None, "begin() comes before, and it was not abandoned"
        return self._native

    def write_tables(self, shards: Iterable[ModuleShard], next_epoch: int) -> None:
        """Write the rows as of now. Rows that are trained from then on carry `next_epoch`."""
        shards = list(shards)
        for module_path, owner, table in shards:
            self._part.write_table(
                module_path, table.native, numeric_hyperparameters(owner.hyperparameters(table.name))
            )
        for _, _, table in shards:
            table.native.set_epoch(next_epoch)

    def snapshot_tables(self, shards: Iterable[ModuleShard], next_epoch: int) -> None:
        """Hold the rows as of now, for `write_snapshot`. Rows that are trained from now on carry `next_epoch`."""
        self._part.snapshot_tables([_table_to_save(shard) for shard in shards], next_epoch)

    def write_snapshot(self) -> None:
        """Write the rows that are held, while training goes on."""
        self._part.write_snapshot()

    def append(self, data: NDArray[np.uint8]) -> None:
        """Add bytes to the extent that is being written."""
        self._part.append(data)

    def end_dense_extent(self) -> _native.StreamRange:
        """End the extent; where it lies in this rank's stream."""
        return self._part.end_dense_extent()

    def finish(self) -> _native.WrittenPart:
        """Make everything durable; what the coordinator takes over."""
        return self._part.finish()
