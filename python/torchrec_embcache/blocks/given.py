"""The tables and tensors that users give to block-level saves and loads, by name."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_embcache.cache import CacheTable, internals
from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.nn import EmbCacheEmbedding, EmbCacheEmbeddingBag
from torchrec_embcache.table_shard import TableShard
from torchrec_embcache.whole_model import CacheModule

from .schema import DTYPES

__all__ = ["checked_modules", "checked_tensors", "refuse_twice", "table_names", "tables_of"]

# What RecIS keeps for its own names of blocks.
RESERVED = "@^"


def checked_modules(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The tables and cache modules of `hashtables`; `InputError` for anything else."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"hashtables is a {type(given).__name__}: give a dict of tables or cache modules by name")
    for name, value in given.items():
        _check_name("hashtables", name)
        if not isinstance(value, CacheTable | CacheModule):
            raise InputError(f"hashtables[{name!r}] is a {type(value).__name__}: give a table or a cache module")
    return dict(given)


def checked_tensors(given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The tensors of `tensors`; `InputError` for anything else, `UnsupportedError` for tensors that are not plain and dense."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"tensors is a {type(given).__name__}: give a dict of tensors by name")
    for name, tensor in given.items():
        _check_name("tensors", name)
        if not isinstance(tensor, Tensor):
            raise InputError(f"tensors[{name!r}] is a {type(tensor).__name__}: give a tensor")
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.dtype in DTYPES
        if not plain or tensor.is_meta:
            raise UnsupportedError(
                f"tensors[{name!r}] is a {type(tensor).__name__} of {tensor.dtype} on {tensor.device}: give a plain dense tensor, "
                "of a distributed one its local part"
            )
    return dict(given)


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not name or "\0" in name or any(mark in name for mark in RESERVED):
        raise InputError(f"{field} has the name {name!r}: give text without '@' and '^', which RecIS keeps for itself")
    if name == "__metadata__":
        raise InputError(f"{field} has the name {name!r}, which safetensors keeps for itself: give another")


def table_names(modules: Mapping[str, Any]) -> list[str]:
    """The names of the tables' blocks: of a module with several tables `<name>.<table>`."""
    names = []
    for name, value in modules.items():
        single = isinstance(value, CacheTable | EmbCacheEmbedding | EmbCacheEmbeddingBag)
        names += [name] if single else [f"{name}.{table}" for table in value.tables]
    return names


def tables_of(modules: Mapping[str, Any]) -> dict[str, TableShard]:
    """The tables of this shard, opened, by the names of their blocks."""
    tables: list[TableShard] = []
    for value in modules.values():
        if isinstance(value, CacheTable):
            tables.append(internals(value))
        else:
            value.settle()
            tables += map(internals, value.tables.values())
    for table in tables:
        table.open()
    return dict(zip(table_names(modules), tables, strict=True))


def refuse_twice(tables: Iterable[str], tensors: Iterable[str]) -> None:
    """`InputError` where two have one name."""
    seen: set[str] = set()
    for name in (*tables, *tensors):
        if name in seen:
            raise InputError(f"{name!r} names two of hashtables and tensors: rename one")
        seen.add(name)
