"""Merges a chain of deltas, or a linked checkpoint, into a full checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchrec_embcache import _native
from torchrec_embcache._closing import CloseOnExitMixin
from torchrec_embcache._dist.ranks import Ranks
from torchrec_embcache._paths import CheckpointDirectory, PathChecks, open_to_load, open_to_save
from torchrec_embcache._saves_in_flight import wait_for_saves_to
from torchrec_embcache.exceptions import StateError

from ._load import open_newest, release
from ._progress import ProgressTracker
from ._save import RankPart, SaveSession
from .reports import SaveReport

__all__ = ["CheckpointMerge"]

_log = logging.getLogger(__name__)


class CheckpointMerge(CloseOnExitMixin):
    """The latest checkpoint of a directory with its base checkpoints, to be rewritten as a full one.

    As a context manager it prevents saves from removing the merged checkpoints. Order of calls: `open`, `save`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.chain: _native.ChainCompaction | None = None
        """The chain to merge; None if the latest checkpoint is already a full one."""

    def close(self) -> None:
        """Allows the removal of the checkpoints of the chain."""
        release([self.chain])

    def open(self, path: str, checks: PathChecks, *, counters: bool = True) -> None:
        """Opens the checkpoint, and the directory to save to. `counters`: admission counts are merged too. Collective."""

        def open_chain(directory: CheckpointDirectory, latest: str) -> _native.ChainCompaction | None:
            return _native.ChainCompaction.open(directory, latest, counters=counters)

        def find() -> tuple[CheckpointDirectory, str]:
            # This is called first because it does not create a missing directory.
            directory = open_to_load(path, checks)
            wait_for_saves_to(directory.path)
            latest = _native.latest_checkpoint(directory)
            return open_to_save(path, checks), latest

        self.directory, self.newest, self.chain = open_newest(self._ranks, find, open_chain, newest=True)

    def save(self, keep: int, tracker: Callable[[int | None], ProgressTracker], *, is_last: bool) -> SaveReport | None:
        """Writes the merged checkpoint and publishes it, if there is a chain to merge. Collective.

        `tracker` is called with the number of rows that this rank writes; None if it is only known after writing.

        Returns None if another checkpoint was published to the directory since `open`. The last attempt raises `StateError`
        instead.
        """
        try:
            return self._write(keep, tracker)
        except StateError as error:
            if is_last or not self._was_overtaken():
                raise
            _log.info("%s was saved to while its chain was merged (%s): merging again", self.directory.path, error)
            return None

    def _write(self, keep: int, tracker: Callable[[int | None], ProgressTracker]) -> SaveReport:
        chain, ranks = self.chain, self._ranks
        if chain is None:
            return SaveReport(self.newest, "full", None, None, 0, 0)

        def write() -> RankPart:
            with tracker(chain.rows if ranks.world_size == 1 else None) as told:
                digest = chain.write(session.name, ranks.rank, ranks.world_size, told.advance)
            # Once the new checkpoint is published, the merged ones can be removed.
            chain.release()
            return RankPart(digest)

        with SaveSession(self.directory, ranks, keep=keep, merged=chain.id) as session:
            session.begin()
            session.write(write)
            session.publish(chain.next_epoch)
        return SaveReport(session.name, "full", None, None, chain.rows, 0)

    def _was_overtaken(self) -> bool:
        """True if another checkpoint has become the latest, as seen by the first rank. Collective."""
        return self._ranks.gather(lambda: _native.latest_checkpoint(self.directory) != self.newest)[0]
