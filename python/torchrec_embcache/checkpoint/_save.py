"""A save, from the creation of its checkpoint to the publication."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import Ranks
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.table.cache_table import CacheTable

from ._begun import AbandonOnError

__all__ = ["RankPart", "SaveSession"]

_log = logging.getLogger("torchrec_embcache.checkpoint.saver")


@dataclass(frozen=True)
class RankPart:
    """Result of one rank's writing: its digest, for the coordinator to publish, and its size."""

    digest: _native.ManifestDigest
    rows: int = 0
    tombstones: int = 0
    linked_bytes: int = 0
    copied_bytes: int = 0


class SaveSession(AbandonOnError[_native.CheckpointSave]):
    """A checkpoint in `directory`. Every rank has a session; the coordinator's creates the checkpoint and publishes it.

    As a context manager it abandons the checkpoint after an error or an interrupt: a load then finds the previous one. Order of
    calls: `begin`, then `write` (or `adopt` with the parts of all ranks), then `publish`.
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
        """`parent`: base checkpoint of a delta. `merged`: the checkpoint that this one replaces together with its base checkpoints.
        `linked`: tables with an SSD tier are saved as hard links to their segments. `keep`: number of the latest checkpoints to
        keep.
        """
        super().__init__()
        self.directory, self.ranks = directory, ranks
        self._keep, self._parent, self._merged, self._linked = keep, parent, merged, linked
        self.name = ""
        """The checkpoint's name, set by `begin`."""
        self.parent_id: str | None = None
        """Name of the base checkpoint, set by `publish`: the parent may have been merged since `begin`."""
        self.parts: list[RankPart] = []
        """The part of each rank, by rank, set once all ranks have written."""

    def begin(self) -> None:
        """Creates the checkpoint. Collective."""
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
        """Returns the writer of this rank's rows. With `counters` it also writes the admission counts."""
        ranks = self.ranks
        return _native.CheckpointWriter(self.directory, self.name, ranks.rank, ranks.world_size, counters=counters)

    def write(self, work: Callable[[], RankPart]) -> None:
        """Calls `work`, which writes this rank's part, on every rank. Collective."""
        self.parts = self.ranks.gather(work)

    def adopt(self, parts: Sequence[Sequence[_native.WrittenPart]], dense_metadata: bytes) -> None:
        """Adopts the parts written by each rank, by rank, with the metadata of their dense extents. Called by the coordinator."""
        assert self._native is not None, "begin() comes before"
        begun = self._native
        self.parts = [RankPart(begun.adopt(rank, len(parts), list(of_rank))) for rank, of_rank in enumerate(parts)]
        begun.write_dense_metadata(dense_metadata)

    def publish(self, next_epoch: int, tables: Iterable[CacheTable] = ()) -> _native.CheckpointId:
        """Publishes the checkpoint as the latest. Returns its id. Collective.

        After it is published on all ranks, rows of `tables` that are trained have the epoch `next_epoch`, and deltas can be based
        on it (except on a linked one).
        """
        found, self.parent_id = self.ranks.gather(self._publish_with(next_epoch))[0]
        assert found is not None, "the coordinator publishes"
        for table in tables:
            table._native_table.set_epoch(next_epoch)
            if not self._linked:
                table._native_table.record_base(_native.BaseCheckpoint(found, next_epoch))
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
