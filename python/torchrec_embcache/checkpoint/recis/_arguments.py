"""Validation of the tables and tensors passed to RecIS-format saves and loads."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.model import CacheModule, cache_modules, path_in_model, suppress_state_dict_warnings
from torchrec_embcache.nn import EmbCacheEmbedding, EmbCacheEmbeddingBag
from torchrec_embcache.table._row_summary import is_placeholder, summaries_in
from torchrec_embcache.table.cache_table import CacheTable

from ._schema import DTYPES

__all__ = [
    "check_distinct_names",
    "check_hashtables",
    "check_tensors",
    "split_sparse_dense_state_dict",
    "table_names",
    "tables_of",
]

_REMEDY = (
    "give the tables in hashtables, and the dense part alone here; split_sparse_dense_state_dict(model) gives both"
)
# Characters that RecIS reserves for its own block names.
RESERVED_CHARACTERS = "@^"


def check_hashtables(hashtables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the tables and cache modules of `hashtables`. Raises `InputError` for anything else."""
    if hashtables is None:
        return {}
    if not isinstance(hashtables, Mapping):
        raise InputError(f"hashtables is a {type(hashtables).__name__}: give a dict of tables or cache modules by name")
    for name, value in hashtables.items():
        _check_name("hashtables", name)
        if not isinstance(value, CacheTable | CacheModule):
            raise InputError(f"hashtables[{name!r}] is a {type(value).__name__}: give a table or a cache module")
    return dict(hashtables)


def check_tensors(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Returns the tensors of `tensors`. Raises `InputError` for non-tensors, `UnsupportedError` for tensors that are not plain and
    dense.
    """
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping):
        raise InputError(f"tensors is a {type(tensors).__name__}: give a dict of tensors by name")
    for key, notes in summaries_in(tensors):
        raise InputError(
            f"tensors[{key!r}] is what a state dict says of the tables {', '.join(notes)}, whose [0, D] weights beside it hold no "
            f"rows: {_REMEDY}"
        )
    for name, tensor in tensors.items():
        _check_name("tensors", name)
        if is_placeholder(tensor):
            raise InputError(f"tensors[{name!r}] is the [0, D] weight of a table, which holds no rows: {_REMEDY}")
        if not isinstance(tensor, Tensor):
            raise InputError(f"tensors[{name!r}] is a {type(tensor).__name__}: give a tensor")
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.dtype in DTYPES
        if not plain or tensor.is_meta:
            raise UnsupportedError(
                f"tensors[{name!r}] is a {type(tensor).__name__} of {tensor.dtype} on {tensor.device}: give a plain dense tensor, "
                "of a distributed one its local part"
            )
    return dict(tensors)


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not name or "\0" in name or any(mark in name for mark in RESERVED_CHARACTERS):
        raise InputError(f"{field} has the name {name!r}: give text without '@' and '^', which RecIS keeps for itself")
    if name == "__metadata__":
        raise InputError(f"{field} has the name {name!r}, which safetensors keeps for itself: give another")


def table_names(modules: Mapping[str, Any]) -> list[str]:
    """Returns the block names of the tables; `<name>.<table>` for a module with several tables."""
    names = []
    for name, value in modules.items():
        single = isinstance(value, CacheTable | EmbCacheEmbedding | EmbCacheEmbeddingBag)
        names += [name] if single else [f"{name}.{table}" for table in value.tables]
    return names


def tables_of(modules: Mapping[str, Any]) -> dict[str, CacheTable]:
    """Opens the tables of this shard and returns them by block name."""
    tables: list[CacheTable] = []
    for value in modules.values():
        if isinstance(value, CacheTable):
            tables.append(value)
        else:
            value.sync_optimizers()
            value.suppress_state_dict_warning()
            tables += value.tables.values()
    for table in tables:
        table.open()
    return dict(zip(table_names(modules), tables, strict=True))


def split_sparse_dense_state_dict(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a model into the `hashtables` and `tensors` of `BlockSaver` and `BlockLoader`.

    Unlike RecIS' function of the same name, it takes the model instead of a state dict, because a state dict does not contain
    tables here. The first dict has the cache modules by their paths, or the tables by their names if the model itself is a cache
    module. The second is the rest of `model.state_dict()`. Raises `InputError` if `model` is not an `nn.Module`.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.serialize import split_sparse_dense_state_dict
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model = torch.nn.ModuleDict({"item": item, "over": torch.nn.Linear(2, 1)})
        >>> sparse, dense = split_sparse_dense_state_dict(model)
        >>> list(sparse), list(dense)
        (['item'], ['over.weight', 'over.bias'])
    """
    suppress_state_dict_warnings(model)
    modules = cache_modules(model)
    if "" in modules:
        return dict(modules[""].tables), {}
    names = [name for name, module in model.named_modules() if isinstance(module, CacheModule)]
    # Some wrappers omit their own names from the keys of a state dict, and some do not.
    tables = tuple(f"{prefix}." for name in names for prefix in (name, path_in_model(model, name)))
    return dict(modules), {key: value for key, value in model.state_dict().items() if not key.startswith(tables)}


def check_distinct_names(tables: Iterable[str], tensors: Iterable[str]) -> None:
    """Raises `InputError` if two entries have the same name."""
    seen: set[str] = set()
    for name in (*tables, *tensors):
        if name in seen:
            raise InputError(f"{name!r} names two of hashtables and tensors: rename one")
        seen.add(name)
