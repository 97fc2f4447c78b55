"""What one rank writes of a save whose ranks agree on nothing before its end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache.paths import Directory
from torchrec_embcache.shards import Shard, numbers_of

from .begun import Begun

__all__ = ["PartSession", "next_epoch_of"]


def next_epoch_of(shards: Iterable[Shard]) -> int:
    """The epoch after those of the tables of this rank."""
    return max((table.native.epoch() for _, _, table in shards), default=0) + 1


def _table_to_save(shard: Shard) -> _native.TableToSave:
    module_path, owner, table = shard
    return _native.TableToSave(module_path, table.native, numbers_of(owner.hyperparameters(table.name)))


class PartSession(Begun[_native.CheckpointPart]):
    """A part: files under a name of their own, which `SaveSession.adopt` takes over. No save sweeps it as long as this lives.

    As a block it abandons the part where the block is left by an error or an interrupt. The order of calls: `begin`, then
    `write_tables` (or `hold_tables` and `write_held_tables`), `append` and `end_extent`, then `finish`.
    """

    def begin(self, directory: Directory, *, expected_bytes: int = 0) -> None:
        """Make the part in `directory`. About `expected_bytes` of extents will be written."""
        self._begun = _native.CheckpointPart(directory, secrets.randbits(64), expected_bytes)

    @property
    def _part(self) -> _native.CheckpointPart:
        assert self._begun is not None, "begin() comes before, and it was not abandoned"
        return self._begun

    def write_tables(self, shards: Iterable[Shard], next_epoch: int) -> None:
        """Write the rows as of now. Rows that are trained from then on carry `next_epoch`."""
        shards = list(shards)
        for module_path, owner, table in shards:
            self._part.write_table(module_path, table.native, numbers_of(owner.hyperparameters(table.name)))
        for _, _, table in shards:
            table.native.set_epoch(next_epoch)

    def hold_tables(self, shards: Iterable[Shard], next_epoch: int) -> None:
        """Hold the rows as of now, for `write_held_tables`. Rows that are trained from now on carry `next_epoch`."""
        self._part.hold_tables([_table_to_save(shard) for shard in shards], next_epoch)

    def write_held_tables(self) -> None:
        """Write the rows that are held, while training goes on."""
        self._part.write_held_tables()

    def append(self, data: NDArray[np.uint8]) -> None:
        """Add bytes to the extent that is being written."""
        self._part.append(data)

    def end_extent(self) -> _native.StreamRange:
        """End the extent; where it lies in this rank's stream."""
        return self._part.end_extent()

    def finish(self) -> _native.WrittenPart:
        """Make everything durable; what the coordinator takes over."""
        return self._part.finish()
