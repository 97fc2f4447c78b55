"""A checkpoint of a snapshot of the tables, written asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import Ranks
from torchrec_embcache._paths import CheckpointDirectory
from torchrec_embcache.model._names import display_name
from torchrec_embcache.table.cache_table import CacheTable

from ._part import table_to_save
from ._plan import SavePlan
from ._progress import ProgressOption, ProgressTracker
from ._save import RankPart, SaveSession
from .reports import SaveReport

__all__ = ["AsyncSaveSession", "TableSnapshots"]


class TableSnapshots:
    """Snapshots of this rank's tables, taken by the constructor and written into a checkpoint while the tables are trained.

    They are held until `write` or `release`. Rows that training changes before they are written are copied first: into 32 MiB of
    memory, then into a file in the checkpoint's directory.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        name: str,
        ranks: Ranks,
        tables: Sequence[tuple[CacheTable, _native.AsyncSaveTable]],
        next_epoch: int,
        max_bytes_per_second: int | None = None,
        *,
        counters: bool = True,
    ) -> None:
        """Takes the snapshots for this rank's part of the unfinished checkpoint `name`.

        `next_epoch`: epoch of rows trained after this call, the same on all ranks; the checkpoint is published with it. Raises
        `StateError` if a table already has a snapshot; then none is taken.
        """
        self.next_epoch = next_epoch
        self._tables = [table for table, _ in tables]
        to_save = [one for _, one in tables]
        try:
            self._native = _native.CheckpointSnapshot(
                directory,
                name,
                ranks.rank,
                ranks.world_size,
                to_save,
                next_epoch,
                max_bytes_per_second,
                counters=counters,
            )
        except BaseException:
            self._drop_history()
            raise

    def write(self, on_progress: Callable[[CacheTable, int | None], object] = lambda _table, _rows: None) -> RankPart:
        """Writes and syncs the rows. Calls `on_progress` for each table before it is written (None) and after, with its rows."""
        rows = tombstones = 0
        try:
            for table in self._tables:
                on_progress(table, None)
                written = self._native.write_table()
                assert written is not None, "as many tables as are held"
                rows, tombstones = rows + written.rows, tombstones + written.tombstones
                on_progress(table, written.rows)
            return RankPart(self._native.finish(), rows, tombstones)
        finally:
            # Without waiting for the other ranks: snapshots slow down training.
            self.release()

    def release(self) -> None:
        """Releases the snapshots. Idempotent."""
        self._native.release()

    def committed(self, published: _native.CheckpointId) -> None:
        """Records that the checkpoint is the latest on all ranks: a delta can be based on it."""
        for table in self._tables:
            table._native_table.finish_background_save(
                self.next_epoch, _native.BaseCheckpoint(published, self.next_epoch)
            )

    def discarded(self) -> None:
        """Records that the checkpoint is not published, and releases the snapshots."""
        self.release()
        self._drop_history()

    def _drop_history(self) -> None:
        """Stops recording removed rows for a delta based on the checkpoint."""
        for table in self._tables:
            table._native_table.finish_background_save(self.next_epoch)


class AsyncSaveSession:
    """An asynchronous save: the training thread creates it and takes the snapshots, a background thread writes and publishes it."""

    def __init__(
        self,
        plan: SavePlan,
        ranks: Ranks,
        save_ranks: Ranks,
        *,
        keep: int,
        progress: ProgressOption,
        max_bytes_per_second: int | None,
    ) -> None:
        """`save_ranks`: the ranks as the writing threads reach each other."""
        self._plan, self._save_ranks, self._rate = plan, save_ranks, max_bytes_per_second
        self._session = SaveSession(plan.directory, ranks, keep=keep, parent=plan.parent)
        self._tracker = ranks.run(lambda: ProgressTracker(progress, "save", plan.rows, show_bar=ranks.rank == 0))
        self._snapshots: TableSnapshots | None = None

    def take_snapshot(self) -> None:
        """Creates the checkpoint and takes a snapshot of the tables on every rank. Collective."""
        self._session.begin()
        self._session.ranks.run(self._take_snapshot)

    def _take_snapshot(self) -> None:
        plan, session = self._plan, self._session
        tables = [(shard[2], table_to_save(shard, plan.table_base(shard[0], shard[2]))) for shard in plan.shards]
        self._snapshots = TableSnapshots(
            plan.directory, session.name, session.ranks, tables, plan.epoch, self._rate, counters=plan.counters
        )

    def finish(self) -> SaveReport:
        """Writes the rows and publishes the checkpoint, or abandons it after an error. Called by the writing thread."""
        held, session = self._snapshots, self._session
        assert held is not None, "call take_snapshot() before"
        session.ranks = self._save_ranks
        try:
            session.write(lambda: self._write(held))
            published = session.publish(self._plan.epoch)
        except BaseException:
            self.cancel()
            raise
        held.committed(published)
        rows, tombstones = (
            sum(part.rows for part in session.parts),
            sum(part.tombstones for part in session.parts),
        )
        return self._plan.report(published.name, session.parent_id, rows, tombstones)

    def _write(self, snapshots: TableSnapshots) -> RankPart:
        names = {table: display_name((module_path, table.name)) for module_path, _, table in self._plan.shards}
        with self._tracker as tracker:

            def on_progress(table: CacheTable, rows: int | None) -> None:
                if rows is None:
                    tracker.table(names[table])
                else:
                    tracker.advance(rows)

            return snapshots.write(on_progress)

    def cancel(self) -> None:
        """Releases the snapshots and removes the unpublished checkpoint. Idempotent."""
        if self._snapshots is not None:
            self._snapshots.discarded()
        self._session.abandon()
