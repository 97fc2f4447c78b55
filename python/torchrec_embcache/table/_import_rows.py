"""Collective import: every rank passes rows of any ids, and each row is stored in the shard of the rank that owns it.

Shapes: n rows that a rank passes, m rows that it receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_embcache import _native
from torchrec_embcache._buckets import buckets_of
from torchrec_embcache._dist.ranks import Ranks, all_ranks
from torchrec_embcache._kernels.core import KernelTable
from torchrec_embcache.exceptions import InputError, StateError
from torchrec_embcache.optimizers import OptimizerSpec

from .rows import IdsLike, RowMetadata, ValuesLike, import_columns, row_ids

__all__ = ["import_on_all_ranks"]


class ImportTarget(KernelTable, Protocol):
    """The attributes of a table's shard that this module uses."""

    @property
    def total_num_buckets(self) -> int: ...
    @property
    def buckets(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class _ShardInfo:
    """A rank's shard, as described to other ranks."""

    buckets: tuple[int, int]
    total_num_buckets: int
    dim: int
    spec: OptimizerSpec

    @classmethod
    def from_shard(cls, shard: ImportTarget | None) -> _ShardInfo | None:
        if shard is None:
            return None
        _ = shard._native_table  # opens the shard, so that one that cannot be opened raises before rows are sent
        return cls(shard.buckets, shard.total_num_buckets, shard.dim, shard._spec)


@dataclass(frozen=True)
class _ImportRows:
    """Rows in native form: `ids` int64 [n], `vectors` float32 [n, V], `scalars` float32 [n] or None, metadata or None."""

    ids: NDArray[np.int64]
    vectors: NDArray[np.float32]
    scalars: NDArray[np.float32] | None
    metadata: _native.RowMetadata | None

    def columns(self) -> list[NDArray[Any]]:
        """Returns the columns, [n] or [n, width] each. Ranks that pass the same parts have the same columns."""
        found: list[NDArray[Any]] = [self.ids, self.vectors]
        if self.scalars is not None:
            found.append(self.scalars)
        if self.metadata is not None:
            known = self.metadata
            found += [known.count, known.last_step, known.score, known.modified_epoch]
        return found


def import_on_all_ranks(
    name: str,
    shard: ImportTarget | None,
    ids: IdsLike,
    weights: ValuesLike,
    slots: Mapping[str, ValuesLike] | None,
    metadata: RowMetadata | None,
) -> None:
    """Imports rows into the shards of the table `name` that own them. Collective over the default process group.

    `shard` is this rank's; None on a rank without a shard. Slots are passed by all ranks or by none, and likewise metadata.
    Malformed rows of one rank raise on all ranks before any row is changed. If the rows do not fit into a shard, the call raises on
    all ranks after the other shards have imported theirs. Once there is space, the same call imports the rest.
    """
    ranks = all_ranks()
    ranks.agree_on_arguments("import_rows", lambda: {"table": name})
    holdings = ranks.gather(lambda: _ShardInfo.from_shard(shard))
    holding = next((holding for holding in holdings if holding is not None), None)
    if holding is None:
        raise StateError(f"no rank has a shard of table {name!r}: shard the model first")

    prepared: list[tuple[_ImportRows, NDArray[np.int64]]] = []

    def prepare() -> dict[str, object]:
        array = row_ids(ids, torch.device("cpu"))
        rows = _ImportRows(array, *import_columns(holding.spec, holding.dim, len(array), weights, slots, metadata))
        prepared.append((rows, _owner_ranks(name, rows.ids, holdings)))
        return {"slots": bool(slots), "metadata": metadata is not None}

    ranks.agree_on_arguments("import_rows", prepare)
    arrived = _exchange(ranks, *prepared[0])

    def check_duplicates() -> None:
        distinct, counts = np.unique(arrived.ids, return_counts=True)
        if (counts > 1).any():
            raise InputError(f"id {distinct[counts > 1][0]} is given twice, by two ranks or by one: give each id once")

    ranks.run(check_duplicates)

    def import_received() -> None:
        if shard is not None and len(arrived.ids):
            shard._native_table.import_rows(arrived.ids, arrived.vectors, arrived.scalars, arrived.metadata)

    ranks.run(import_received)


def _owner_ranks(name: str, ids: NDArray[np.int64], shard_infos: list[_ShardInfo | None]) -> NDArray[np.int64]:
    """Returns the rank that owns each of `ids` [n]."""
    first = next(holding for holding in shard_infos if holding is not None)
    buckets = buckets_of(ids, first.total_num_buckets)
    owners = np.full(len(ids), -1, np.int64)
    for rank, holding in enumerate(shard_infos):
        if holding is not None:
            begin, end = holding.buckets
            owners[(buckets >= begin) & (buckets < end)] = rank
    if (owners < 0).any():
        raise StateError(f"id {ids[owners < 0][0]} has no owner: no rank's shard of table {name!r} has its bucket")
    return owners


def _exchange(ranks: Ranks, rows: _ImportRows, owners: NDArray[np.int64]) -> _ImportRows:
    """Returns the rows that all ranks send to this one, in rank order. Collective."""
    if ranks.world_size == 1:
        return rows
    order = np.argsort(owners, kind="stable")
    sent = np.bincount(owners, minlength=ranks.world_size)
    received = [int(counts[ranks.rank]) for counts in ranks.all_gather(sent)]
    columns = [_send(ranks, column[order], sent.tolist(), received) for column in rows.columns()]
    ids, vectors, *others = columns
    scalars = others.pop(0) if rows.scalars is not None else None
    return _ImportRows(ids, vectors, scalars, _native.RowMetadata(*others) if rows.metadata is not None else None)


def _send(ranks: Ranks, column: NDArray[Any], sent: list[int], received: list[int]) -> NDArray[Any]:
    """Sends one column's rows to their owners. Returns the rows received, [m] or [m, width], with the column's dtype.

    They are sent as bytes, which every backend of torch.distributed supports.
    """
    width = column.dtype.itemsize * (column.shape[1] if column.ndim == 2 else 1)
    own = torch.from_numpy(np.ascontiguousarray(column).reshape(-1).view(np.uint8))
    arrived = ranks.all_to_all(own, [rows * width for rows in sent], [rows * width for rows in received])
    return arrived.numpy().view(column.dtype).reshape(-1, *column.shape[1:])
