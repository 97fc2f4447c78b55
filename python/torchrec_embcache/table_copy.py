"""What is done with a table from outside it: its rows as the core takes them, it in one line, a copy of it in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .exceptions import InputError
from .rows import float32_array

if TYPE_CHECKING:
    from .cache import CacheTable, Values

__all__ = ["described", "in_memory_copy", "vectors_of"]

Table = TypeVar("Table", bound="CacheTable")


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


def vectors_of(
    table: CacheTable, count: int, weights: Values, slots: Mapping[str, Values] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """The vector parts [n, V] and the scalar slot [n] of rows, as the core takes them."""
    spec = table.spec
    if not isinstance(slots, Mapping | None):
        raise InputError(
            f"slots is a {type(slots).__name__}: give tensors by name, or arrays or lists, or leave it out"
        )
    if slots is not None and set(slots) != set(spec.slot_names):
        raise InputError(f"slots has {sorted(slots)} and {spec.given_as} has {sorted(spec.slot_names)}: give these")
    vectors = np.zeros((count, spec.vector_floats(table.dim)), np.float32)
    vectors[:, : table.dim] = float32_array("weights", weights, (count, table.dim))
    scalars = None
    for place, name in enumerate(spec.slot_names if slots is not None else ()):
        assert slots is not None, "the loop is empty without slots"
        if place < spec.vector_slots:
            begin = table.dim * (1 + place)
            vectors[:, begin : begin + table.dim] = float32_array(name, slots[name], (count, table.dim))
        else:
            scalars = float32_array(name, slots[name], (count,))
    return vectors, scalars
