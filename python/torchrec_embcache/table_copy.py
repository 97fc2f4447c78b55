"""What is done with a table from outside it: it in one line, and a copy of it in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .cache import CacheTable

from .exceptions import EmbCacheError

__all__ = ["described", "in_memory_copy", "rows_text"]

Table = TypeVar("Table", bound="CacheTable")


def rows_text(table: CacheTable, *, closed: bool) -> str:
    """How many rows it has, or the state that keeps it from telling. Opens and raises nothing."""
    try:
        if closed or (table.native_or_none is not None and table.native_or_none.is_closed()):
            return "closed"
        if table.unusable is not None:
            return "unusable"
        return str(len(table)) if table.is_open else "not opened yet"
    except EmbCacheError:  # an update failed half-way, or the process is a fork of its own: its next use says which
        return "unusable"


def described(table: CacheTable, rows: str, numbers: Mapping[str, Any] | None) -> str:
    """Settings, optimizer, rows and budgets in one line. `numbers`: the optimizer's as they are now."""
    optimizer = "none"
    if table.optimizer is not None:
        lr = (numbers or table.optimizer.param_group()).get("lr")
        optimizer = f"{type(table.optimizer).__name__}(lr={lr})"
    return (
        f"{table.name!r}, embedding_dim={table.dim}, optimizer={optimizer}, policy={table.policy}, rows={rows}, "
        f"tiers=({table.tiers.describe()})"
    )


def in_memory_copy(table: Table, memo: dict[int, Any]) -> Table:
    """A table with the same settings, rows, slots, metadata, step and epoch. The caller checks that `table` can be copied."""
    made = type(table)(
        name=table.name,
        module=table.module,
        dim=table.dim,
        tiers=table.tiers,
        initializer=table.initializer,
        optimizer=table.optimizer,
        seed=table.seed,
        policy=table.policy,
        on_full=table.on_full,
        total_num_buckets=table.total_num_buckets,
        buckets=table.buckets,
        rank=table.rank,
        world_size=table.world_size,
        device=table.device,
        key=table.key,
    )
    made.bucket_hash = table.bucket_hash
    memo[id(table)] = made
    if table.is_open:
        made.open()
        for chunk in table.export():
            made.import_rows(chunk.ids, chunk.weights, chunk.slots, chunk.metadata)
        made.native.set_step(table.native.step())
        made.native.set_epoch(table.native.epoch())
    return made
