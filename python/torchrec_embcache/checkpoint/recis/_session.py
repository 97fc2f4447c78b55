"""One shard's part of a RecIS-format save, from its creation to its publication."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import Ranks
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.checkpoint._begun import AbandonOnError

__all__ = ["RecisSession"]

_log = logging.getLogger("torchrec_embcache.serialize")


class RecisSession(AbandonOnError[_native.RecisSave]):
    """One shard's part of a save. The last shard to finish publishes the save; until then a load finds the previous save.

    As a context manager it abandons the part after an error or an interrupt. Order of calls: `begin` or `begin_on_all_ranks`,
    `open_files`, `append` and `append_rows` for each block in order, `publish`.
    """

    def __init__(self, directory: CheckpointDirectory, shard: int, shards: int, steps: Mapping[str, int]) -> None:
        """`steps`: steps of the tables to save, by which shards without a common process group identify their save."""
        super().__init__()
        self._directory, self._shard, self._shards = directory, shard, shards
        self._steps = [_native.TableStep(name, step) for name, step in steps.items()]

    def begin(self) -> None:
        """Joins the latest save that waits for this shard and has the tables at the same steps, or starts a new save."""
        self._native = _native.RecisSave.join_or_begin(
            self._directory, self._shard, self._shards, self._steps, secrets.randbits(64)
        )

    def begin_on_all_ranks(self, ranks: Ranks) -> None:
        """Starts a save on the first rank and joins it on the others. Collective."""
        name = ranks.gather(self._begin_new if ranks.rank == 0 else str)[0]
        ranks.gather(lambda: self._join(name))

    def _begin_new(self) -> str:
        self._native = _native.RecisSave(self._directory, self._shard, self._shards, self._steps, secrets.randbits(64))
        return self._native.name

    def _join(self, name: str) -> None:
        if self._native is None:
            self._native = _native.RecisSave.join(self._directory, self._shard, self._shards, self._steps, name)

    @property
    def native(self) -> _native.RecisSave:
        """The save that has begun. Any thread can call `append` and `append_rows`; calls for one block must not overlap."""
        assert self._native is not None, "begin() comes before, and it was not abandoned"
        return self._native

    def open_files(self, parallel: int, blocks: Sequence[_native.RecisBlockSpec]) -> None:
        """Creates the data files of the shard's blocks, at most `parallel`; each file is written by its own thread."""
        self.native.open_files(parallel, list(blocks))

    def publish(self, tables: Sequence[_native.RecisWrittenTable]) -> bool:
        """Makes the blocks durable and writes the shard's manifest. Returns True if this was the last shard, which publishes the
        save.
        """
        saved = self.native.publish(list(tables))
        self._native = None
        for what in saved.cleanup_errors:
            _log.info("an older RecIS-format save in %s could not be removed: %s", self._directory, what)
        return saved.is_last
