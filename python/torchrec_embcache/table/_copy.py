"""Describes a table in one line, and copies a table in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrec_embcache.config import bytes_text
from torchrec_embcache.exceptions import EmbCacheError, StateError
from torchrec_embcache.optimizers import OptimizerSpec

from ._shard import TableShard

__all__ = ["copy_in_memory", "describe_table", "inherited_step"]


def _rows_text(table: TableShard) -> str:
    """Returns the number of rows, or the state in which it is unknown. Opens and raises nothing."""
    try:
        if table.is_closed or (table.native_or_none is not None and table.native_or_none.is_closed()):
            return "closed"
        if table.unusable is not None:
            return "unusable"
        return str(len(table)) if table.is_open else "not opened yet"
    except EmbCacheError:  # failed during an update, or used in a forked process; the next use raises the reason
        return "unusable"


def describe_table(
    table: TableShard, hyperparameters: Mapping[str, Any] | None, chosen_optimizer: OptimizerSpec | None = None
) -> str:
    """Returns settings, optimizer, rows and budgets in one line.

    `hyperparameters`: the current ones of the optimizer. `chosen_optimizer`: the optimizer that a table without one will get.
    """
    spec = table.optimizer or chosen_optimizer
    optimizer = "none"
    if spec is not None:
        lr = (hyperparameters or spec.param_group()).get("lr")
        optimizer = f"{type(spec).__name__}(lr={lr})"
    return (
        f"{table.name!r}, embedding_dim={table.dim}, optimizer={optimizer}, policy={table.policy}"
        f"{table.settings.lifecycle.describe()}, rows={_rows_text(table)}, tiers=({_tiers_text(table)})"
    )


def _tiers_text(table: TableShard) -> str:
    share, text = table.settings.share, table.tiers.describe()
    if share is None:
        return text
    return f"{text} of {bytes_text(share.budget.host_bytes)} that {share.budget.tables} tables share"


def copy_in_memory(table: TableShard, memo: dict[int, Any]) -> TableShard:
    """Copies a table with its settings, rows, slots, metadata, counts, step and epoch. Raises `StateError` if it cannot be copied.

    Copies with the same `memo` of tables that share a budget share one new budget.
    """
    if table.directory is not None:
        raise StateError(
            f"table {table.name!r} cannot be copied: the files of its SSD tier have one owner. Make a second module with "
            "budgets of its own (in RAM, or another ssd_dir), and give it the rows: Saver(rank).save(model, path), then "
            "Saver(rank).load(copy, path)"
        )
    if table.is_closed:
        raise StateError(f"table {table.name!r} is closed: make a new module to use it again")
    table.check_usable()
    settings = replace(
        table.settings,
        total_num_buckets=table.total_num_buckets,
        buckets=table.buckets,
        key=table.key,
        share=copy.deepcopy(table.settings.share, memo),
    )
    made = TableShard(settings, table.optimizer)
    if table.is_open:
        made.open()
        for chunk in table.export():
            made.import_rows(chunk.ids, chunk.weights, chunk.slots, chunk.metadata)
        made.native.adopt_lifecycle(table.native)
        made.native.set_step(table.native.step())
        made.native.set_epoch(table.native.epoch())
        made.loaded_step = inherited_step(table)
    return made


def inherited_step(table: TableShard) -> int:
    """Returns the `loaded_step` of a table that continues with the rows of an open one.

    It prevents a second save from evicting another fraction of rows that were not trained since the first.
    """
    return table.native.step() if table.native.is_unchanged_since_sweep() else table.loaded_step
