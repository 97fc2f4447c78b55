"""The tables that a rank saves or loads, and collective checks before that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache._paths import CheckedPath, check_path
from torchrec_embcache._saves_in_flight import wait_for_saves
from torchrec_embcache.exceptions import InputError, PathError
from torchrec_embcache.table.cache_table import CacheTable

from . import CacheModule, cache_modules, suppress_state_dict_warnings

__all__ = [
    "ModuleShard",
    "numeric_hyperparameters",
    "same_path_on_all_ranks",
    "shards_of",
    "shards_to_save",
    "shards_unopened",
    "shards_when_idle",
]

# A table on this rank: its module's path in the model, the module, the table.
ModuleShard = tuple[str, CacheModule, CacheTable]


def shards_of(module: nn.Module) -> list[ModuleShard]:
    """Returns the tables of this rank, opened, by module path and name."""
    found = shards_unopened(module)
    for owner in cache_modules(module).values():
        owner.sync_optimizers()
    for _, _, table in found:
        table.open()
    return found


def shards_unopened(module: nn.Module) -> list[ModuleShard]:
    """Returns the tables of this rank, opened or not, by module path and name. Raises `InputError` without a cache module."""
    modules = cache_modules(module)
    if not modules:
        raise InputError(f"{type(module).__name__} has no cache module: nothing to save or load")
    found = [(module_path, owner, table) for module_path, owner in modules.items() for table in owner.tables.values()]
    found.sort(key=lambda shard: (shard[0], shard[2].name))
    return found


def shards_when_idle(module: nn.Module) -> list[ModuleShard]:
    """Like `shards_of`, after waiting for asynchronous saves of the tables."""
    found = shards_to_save(module)
    wait_for_saves([table for _, _, table in found])
    return found


def shards_to_save(module: nn.Module) -> list[ModuleShard]:
    """Like `shards_of`, for tables that are saved. State dicts of the modules then cause no warnings."""
    suppress_state_dict_warnings(module)
    return shards_of(module)


def same_path_on_all_ranks(path: str | os.PathLike[str]) -> CheckedPath:
    """Returns `path` as an absolute path. Raises `PathError` if ranks pass different directories. Collective."""
    ranks = all_ranks()
    given = ranks.run(lambda: check_path("path", path))
    everyone = ranks.all_gather(os.path.normpath(given))
    if len(set(everyone)) > 1:
        named = ", ".join(f"rank {rank}: {each!r}" for rank, each in enumerate(everyone))
        raise PathError(f"path differs between ranks: give all the same ({named})")
    return given


def numeric_hyperparameters(group: dict[str, Any]) -> dict[str, float]:
    """Returns the numeric hyperparameters by name. A pair `betas` becomes `beta1` and `beta2`.

    The groups of torch's optimizers also contain others, such as `foreach=None`, which select an implementation and are not needed
    in a checkpoint.
    """

    def each() -> Iterator[tuple[str, float]]:
        for name, value in group.items():
            if name == "betas":
                yield from (("beta1", float(value[0])), ("beta2", float(value[1])))
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                yield name, float(value)

    return dict(each())
