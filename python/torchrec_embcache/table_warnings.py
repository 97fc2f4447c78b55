"""Warnings of a table whose budgets do not fit what it does. They name the setting and the size to give it."""

import warnings

from . import _native
from .exceptions import EmbCacheWarning
from .table_shard import TableShard

__all__ = ["warn_of_a_lost_flush", "warn_of_overflow"]


def warn_of_overflow(table: TableShard, rows: int) -> None:
    """Say that so many rows of a batch did not fit the tier that kernels run on."""
    row_bytes = _native.row_bytes(table.dim, table.spec.kind, table.policy)
    if table.tier is None:
        field, size = "host_bytes", table.tiers.host + rows * row_bytes.host
    else:
        field, size = "device_bytes", table.tiers.device + rows * row_bytes.device
    warnings.warn(
        f"table {table.name!r}: {rows} rows of a batch did not fit TierBudgets.{field} and use memory beyond it; "
        f"set it to {size} or more",
        EmbCacheWarning,
        stacklevel=3,
    )


def warn_of_a_lost_flush(table: TableShard) -> None:
    """Say that the last flush of the table was given up for room."""
    warnings.warn(
        f"table {table.name!r}: TierBudgets.ssd_bytes={table.tiers.ssd} has no room for both the rows and the last "
        "flush: that flush cannot be resumed any more; flush more often, raise ssd_bytes, or keep checkpoints by Saver",
        EmbCacheWarning,
        stacklevel=3,
    )
