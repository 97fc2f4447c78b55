"""Lookups of replaced modules as torch operators, for models under torch.compile, torch.export and torch.fx.

A tracer cannot see the tables that a module reads. The graph refers to them by the module's key, which is resolved when it runs.
Shapes: N ids, B bags, D a table's width.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from torchrec_embcache._lookup.offsets import check_offsets
from torchrec_embcache.exceptions import MismatchError, StateError
from torchrec_embcache.table.rows import contiguous, ids_array

from ._modules import TableRef, pinned
from .tables import Tables

__all__ = ["ModuleReader", "is_traced", "pooled_op", "rows_op"]


class ModuleReader:
    """The tables of a replaced module. Copies of the module share it.

    Its key is the path of the module in the checkpoint and a number that makes the key unique among live modules. An exported graph
    contains only the path, so that another process resolves it to its own module.
    """

    def __init__(self, served: Tables, tables: tuple[TableRef, ...]) -> None:
        self.served = served
        self.tables = tables
        self.path = tables[0].pair[0] if tables else ""
        keys = (f"{self.path}#{number}" for number in itertools.count())
        self.key = next(key for key in keys if key not in _READERS)
        _READERS[self.key] = self

    @property
    def name(self) -> str:
        """Name of the module in the graph that is being built."""
        return self.path if torch.compiler.is_exporting() else self.key

    def table_ref(self, table: str, dim: int) -> TableRef:
        """Returns a table by its name. Raises `MismatchError` if the module has no table of this name and width."""
        found = next((own for own in self.tables if own.pair[1] == table), None)
        if found is None or found.dim != dim:
            there = ", ".join(f"{own.pair[1]!r} of {own.dim} columns" for own in self.tables)
            raise MismatchError(
                f"the graph reads table {table!r} of {dim} columns of module {self.path!r}, which has {there}: make the model as "
                "the one that was exported"
            )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleReader:
        return self


_READERS: weakref.WeakValueDictionary[str, ModuleReader] = weakref.WeakValueDictionary()


def _find_reader(key: str) -> ModuleReader:
    found = _READERS.get(key)
    if found is not None:
        return found
    # The key of an exported graph is a path. If several modules have this path, the most recently created one is used.
    readers = [reader for reader in list(_READERS.values()) if reader.path == key]
    if not readers:
        raise StateError(
            f"the graph reads tables of module {key!r}, and no such module is served in this process: call serving.replace on a "
            "model with it, and keep that model"
        )
    return readers[-1]


def is_traced(value: object) -> bool:
    """True if a call with `value` is being traced rather than run."""
    return isinstance(value, fx.Proxy) or torch.compiler.is_compiling()


@torch.library.custom_op("torchrec_embcache::served_bags", mutates_args=())
def served_bags(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, key: str, table: str, dim: int, is_mean: bool
) -> Tensor:
    """Pooled rows [B, D] of ids [N] in the bags given by offsets [B + 1]."""
    reader = _find_reader(key)
    own = reader.table_ref(table, dim)
    flat, bounds = ids_array(ids, "ids", ids.device), ids_array(offsets, "offsets", offsets.device)
    check_offsets(bounds, len(flat), 1)
    factors = None if weights is None else contiguous(weights.detach().cpu()).numpy().astype(np.float32, copy=False)
    with pinned(reader.served) as version:
        pooled = own.in_version(version).pool_array(flat, bounds, "mean" if is_mean else "sum", factors)
    return pooled.to(ids.device)


@served_bags.register_fake
def _(ids: Tensor, offsets: Tensor, weights: Tensor | None, key: str, table: str, dim: int, is_mean: bool) -> Tensor:
    del weights, key, table, is_mean
    return ids.new_empty(offsets.shape[0] - 1, dim, dtype=torch.float32)


@torch.library.custom_op("torchrec_embcache::served_rows", mutates_args=())
def served_rows(ids: Tensor, key: str, table: str, dim: int) -> Tensor:
    """Rows [N, D] of ids [N]."""
    reader = _find_reader(key)
    own = reader.table_ref(table, dim)
    with pinned(reader.served) as version:
        rows = own.in_version(version).lookup_array(ids_array(ids, "ids", ids.device))
    return rows.as_subclass(Tensor).to(ids.device)


@served_rows.register_fake
def _(ids: Tensor, key: str, table: str, dim: int) -> Tensor:
    del key, table
    return ids.new_empty(ids.shape[0], dim, dtype=torch.float32)


def pooled_op(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, reader: ModuleReader, table: int, *, is_mean: bool
) -> Tensor:
    """Adds the operator for pooled rows to a graph. The arguments may be a tracer's proxies."""
    own = reader.tables[table]
    call = torch.ops.torchrec_embcache.served_bags
    return cast(Tensor, call(ids, offsets, weights, reader.name, own.pair[1], own.dim, is_mean))


def rows_op(ids: Tensor, reader: ModuleReader, table: int) -> Tensor:
    """Adds the operator for rows to a graph. The arguments may be a tracer's proxies."""
    own = reader.tables[table]
    call = torch.ops.torchrec_embcache.served_rows
    return cast(Tensor, call(ids, reader.name, own.pair[1], own.dim))
