"""A checkpoint of the rows of one moment, written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrec_embcache import _native
from torchrec_embcache.collective import Group, together
from torchrec_embcache.paths import Directory
from torchrec_embcache.progress import ProgressWanted, Tracker
from torchrec_embcache.reports import SaveReport
from torchrec_embcache.saving import SavePlan
from torchrec_embcache.shards import numbers_of
from torchrec_embcache.table_names import shown
from torchrec_embcache.table_shard import TableShard

from .ranks import GroupRanks, Ranks
from .save import RankPart, SaveSession

__all__ = ["HeldTables", "MomentSession"]


class HeldTables:
    """This rank's tables as they are when this is made, to be written into a checkpoint while they are trained.

    They are held until `write` or `release`. Rows that training changes before they are written are copied first: into 32 MiB of
    memory, and past that into a file in the checkpoint's directory.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        ranks: Ranks,
        tables: Sequence[tuple[TableShard, _native.TableToSave]],
        next_epoch: int,
        max_bytes_per_second: int | None = None,
        *,
        counters: bool = True,
    ) -> None:
        """Hold them for this rank's part of the checkpoint `name`, which was begun.

        `next_epoch`: of rows trained from now on, the same on all ranks, with which the checkpoint is published. `StateError` where
        one of the tables is held already; then none is held.
        """
        self.next_epoch = next_epoch
        self._tables = [table for table, _ in tables]
        to_save = [one for _, one in tables]
        try:
            self._held = _native.CheckpointMoment(
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
            self._forget()
            raise

    def write(self, tell: Callable[[TableShard, int | None], object] = lambda _table, _rows: None) -> RankPart:
        """Write and sync the rows. `tell` is called with each table before it is written (None) and after, with its rows."""
        rows = tombstones = 0
        try:
            for table in self._tables:
                tell(table, None)
                written = self._held.write_table()
                assert written is not None, "as many tables as are held"
                rows, tombstones = rows + written.rows, tombstones + written.tombstones
                tell(table, written.rows)
            return RankPart(self._held.finish(), rows, tombstones)
        finally:
            # Not only when all ranks are done: training pays for what is held.
            self.release()

    def release(self) -> None:
        """Hold the tables no more. Harmless twice."""
        self._held.release()

    def published(self, published: _native.CheckpointId) -> None:
        """The checkpoint is the newest, on all ranks: a delta can build on it."""
        for table in self._tables:
            table.native.saved_beside(self.next_epoch, _native.Ancestor(published, self.next_epoch))

    def given_up(self) -> None:
        """The checkpoint is not published, and the tables are held no more."""
        self.release()
        self._forget()

    def _forget(self) -> None:
        """What leaves the tables from now on is kept for no delta on the checkpoint."""
        for table in self._tables:
            table.native.saved_beside(self.next_epoch)


class MomentSession:
    """A save beside training: the thread that trains begins it and holds the rows, another thread writes and publishes them."""

    def __init__(
        self,
        plan: SavePlan,
        ranks: Ranks,
        group: Group,
        *,
        keep: int,
        progress: ProgressWanted,
        max_bytes_per_second: int | None,
    ) -> None:
        """`group`: for the thread that writes."""
        self._plan, self._group, self._rate = plan, group, max_bytes_per_second
        self._session = SaveSession(plan.directory, ranks, keep=keep, parent=plan.parent)
        self._tracker = together(lambda: Tracker(progress, "save", plan.rows, shown=ranks.rank == 0))
        self._held: HeldTables | None = None

    def hold(self) -> None:
        """Begin the checkpoint and hold the rows of now, on every rank. Collective."""
        self._session.begin()
        together(self._hold)

    def _hold(self) -> None:
        plan, session = self._plan, self._session
        tables = [
            (
                table,
                _native.TableToSave(
                    module_path,
                    table.native,
                    numbers_of(owner.hyperparameters(table.name)),
                    plan.ancestor(module_path, table),
                ),
            )
            for module_path, owner, table in plan.shards
        ]
        self._held = HeldTables(
            plan.directory, session.name, session.ranks, tables, plan.epoch, self._rate, counters=plan.counters
        )

    def finish(self) -> SaveReport:
        """Write the rows and publish the checkpoint; it is abandoned where that fails. For the thread that writes."""
        held, session = self._held, self._session
        assert held is not None, "hold() comes before"
        session.ranks = GroupRanks(session.ranks, self._group)
        try:
            session.write(lambda: self._write(held))
            published = session.publish(self._plan.epoch)
        except BaseException:
            self.give_up()
            raise
        held.published(published)
        rows, tombstones = (
            sum(part.rows for part in session.parts),
            sum(part.tombstones for part in session.parts),
        )
        return self._plan.report(published.name, session.builds_on, rows, tombstones)

    def _write(self, held: HeldTables) -> RankPart:
        names = {table: shown((module_path, table.name)) for module_path, _, table in self._plan.shards}
        with self._tracker as tracker:

            def tell(table: TableShard, rows: int | None) -> None:
                if rows is None:
                    tracker.table(names[table])
                else:
                    tracker.advance(rows)

            return held.write(tell)

    def give_up(self) -> None:
        """Hold the tables no more, and remove what was begun. Harmless twice."""
        if self._held is not None:
            self._held.given_up()
        self._session.abandon()
