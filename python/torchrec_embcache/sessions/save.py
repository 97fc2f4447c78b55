"""A checkpoint from its beginning to its publication."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchrec_embcache import _native
from torchrec_embcache.paths import CheckpointDirectory
from torchrec_embcache.table_shard import TableShard

from .begun import AbandonOnError
from .ranks import Ranks

__all__ = ["RankPart", "SaveSession"]

_log = logging.getLogger("torchrec_embcache.saver")


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote: its digest, for the coordinator to publish, and how much it was."""

    digest: _native.ManifestDigest
    rows: int = 0
    tombstones: int = 0
    linked_bytes: int = 0
    copied_bytes: int = 0


class SaveSession(AbandonOnError[_native.CheckpointSave]):
    """A checkpoint in `directory`. Every rank has a session; the coordinator's begins the checkpoint and publishes it.

    As a block it abandons the checkpoint where the block is left by an error or an interrupt: a load finds the one before. The
    order of calls: `begin`, then `write` (or `adopt` for each rank, where ranks wrote parts), then `publish`.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        ranks: Ranks,
        *,
        keep: int = 1,
        parent: _native.CheckpointId | None = None,
        merged: _native.CheckpointId | None = None,
        linked: bool = False,
    ) -> None:
        """`parent`: what a delta builds on. `merged`: the checkpoint that this one replaces with all it builds on. `linked`: tables
        with an SSD tier are in it as their segments. `keep`: so many of the newest checkpoints stay.
        """
        super().__init__()
        self.directory, self.ranks = directory, ranks
        self._keep, self._parent, self._merged, self._linked = keep, parent, merged, linked
        self.name = ""
        """The checkpoint's name, once it is begun."""
        self.parent_id: str | None = None
        """The name of the checkpoint that it builds on, once it is published: its parent may have been merged meanwhile."""
        self.parts: list[RankPart] = []
        """What each rank wrote, by rank, once all have."""

    def begin(self) -> None:
        """Begin the checkpoint. Collective."""
        self.name = self.ranks.gather(self._begin if self.ranks.rank == 0 else str)[0]

    def _begin(self) -> str:
        self._native = _native.CheckpointSave(
            self.directory,
            secrets.randbits(64),
            keep=self._keep,
            parent=self._parent,
            merged=self._merged,
            linked=self._linked,
        )
        return self._native.name

    def writer(self, *, counters: bool = True) -> _native.CheckpointWriter:
        """What writes this rank's rows into the checkpoint, and with `counters` the counts of ids that wait for rows."""
        ranks = self.ranks
        return _native.CheckpointWriter(self.directory, self.name, ranks.rank, ranks.world_size, counters=counters)

    def write(self, work: Callable[[], RankPart]) -> None:
        """Do `work`, which writes this rank's part, on every rank. Collective."""
        self.parts = self.ranks.gather(work)

    def adopt(self, parts: Sequence[Sequence[_native.WrittenPart]], dense_metadata: bytes) -> None:
        """Take over what each rank wrote into parts of its own, by rank, with what describes their extents. The coordinator's."""
        assert self._native is not None, "begin() comes before"
        begun = self._native
        self.parts = [RankPart(begun.adopt(rank, len(parts), list(of_rank))) for rank, of_rank in enumerate(parts)]
        begun.write_dense_metadata(dense_metadata)

    def publish(self, next_epoch: int, tables: Iterable[TableShard] = ()) -> _native.CheckpointId:
        """Make the checkpoint the newest one; what it is known by. Collective.

        Once it is published on all ranks, rows of `tables` that are trained carry `next_epoch`, and deltas can build on it (not on
        a linked one).
        """
        found, self.parent_id = self.ranks.gather(self._publish_with(next_epoch))[0]
        assert found is not None, "the coordinator publishes"
        for table in tables:
            table.native.set_epoch(next_epoch)
            if not self._linked:
                table.native.record_base(_native.BaseCheckpoint(found, next_epoch))
        return found

    def _publish_with(self, next_epoch: int) -> Callable[[], tuple[_native.CheckpointId | None, str | None]]:
        begun, digests = self._native, [part.digest for part in self.parts]

        def publish() -> tuple[_native.CheckpointId | None, str | None]:
            if begun is None:
                return None, None
            published = begun.publish(digests, next_epoch)
            self._native = None
            for what in published.cleanup_errors:
                _log.warning("an older checkpoint in %s could not be removed: %s", self.directory, what)
            return published.id, None if published.parent is None else published.parent.name

        return publish
