"""Warnings about budgets that are too small. They name the setting and the required size."""

import warnings
from collections.abc import Sequence

from torchrec_embcache import _native
from torchrec_embcache.exceptions import EmbCacheWarning

from .cache_table import CacheTable

__all__ = ["TableWarnings"]


class TableWarnings:
    """The warnings of one lookup's tables. A budget warning is repeated when the excess has doubled; the other is issued once."""

    def __init__(self, tables: Sequence[CacheTable]) -> None:
        self._tables = tables
        self._rows = [0] * len(tables)
        self._flushes: set[str] = set()

    def warn_after_placement(self, plan: _native.Plan) -> None:
        """Warns of overflow and lost flushes, which are known once the rows of a batch are in their slots."""
        for index, rows in enumerate(plan.overflow_rows()):
            # After a failed write no row can be demoted to the SSD tier, and a larger budget would not help.
            if rows > self._rows[index] and not self._tables[index]._native_table.is_read_only():
                self._rows[index] = 2 * rows
                _warn_of_overflow(self._tables[index], rows)
        for table in self._tables:
            if table.tiers.ssd and table.name not in self._flushes and table._native_table.has_lost_flush():
                self._flushes.add(table.name)
                _warn_of_lost_flush(table)


def _warn_of_overflow(table: CacheTable, rows: int) -> None:
    """Warns that `rows` rows of a batch did not fit into the tier that kernels run on."""
    row_bytes = _native.row_bytes(table.dim, table._spec.kind, table.policy)
    if table._tier is None:
        field, size = "host_bytes", table.tiers.host + rows * row_bytes.host
    else:
        field, size = "device_bytes", table.tiers.device + rows * row_bytes.device
    of = ""
    if field == "host_bytes" and (share := table._settings.share) is not None:
        of = f" of the module, which {share.budget.tables} tables share,"
        size = share.budget.host_bytes + rows * row_bytes.host
    warnings.warn(
        f"table {table.name!r}: {rows} rows of a batch did not fit TierBudgets.{field}{of} and use memory beyond it; "
        f"set it to {size} or more",
        EmbCacheWarning,
        stacklevel=4,
    )


def _warn_of_lost_flush(table: CacheTable) -> None:
    """Warns that the last flush of the table was discarded to free space."""
    warnings.warn(
        f"table {table.name!r}: TierBudgets.ssd_bytes={table.tiers.ssd} has no room for both the rows and the last "
        "flush: that flush cannot be resumed any more; flush more often, raise ssd_bytes, or keep checkpoints by Saver",
        EmbCacheWarning,
        stacklevel=4,
    )
