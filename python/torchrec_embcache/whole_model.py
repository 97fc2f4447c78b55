"""A model's cache modules, found and flushed together."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from .cache import CacheTable, internals
from .exceptions import InputError
from .flushing import flush_tables

__all__ = ["CacheModule", "cache_modules", "flush"]

# The attribute by which a wrapper holds the module that it wraps; such names are left out of paths.
_WRAPPED = {
    "DataParallel": {"module"},
    "DistributedDataParallel": {"module"},
    "DistributedModelParallel": {"_dmp_wrapped_module"},
    "DMPCollection": {"_dmp_wrapped_module"},
    "FullyShardedDataParallel": {"_fsdp_wrapped_module"},
    "OptimizedModule": {"_orig_mod"},
    "CheckpointWrapper": {"_checkpoint_wrapped_module"},
}


# Deeper trees than this are taken for a mistake.
MAX_DEPTH = 500


class CacheModule:
    """What every module with cached tables is, sharded or not: an `nn.Module` with `tables`, this rank's shards by table name."""

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, CacheTable]:
        """This rank's shards, by the tables' names."""

    def settle(self) -> None:
        """Before rows are saved or loaded: give the tables the optimizers that were set by now."""

    def hyperparameters(self, table: str) -> dict[str, Any]:
        """The optimizer's numbers for a table, as training uses them now."""
        return internals(self.tables[table]).spec.param_group()

    def buckets_changed(self) -> None:
        """A load gave a table another number of buckets: forget whatever was derived from the one before."""


def cache_modules(model: nn.Module) -> dict[str, CacheModule]:
    """The cache modules of `model` by module path, wrappers' names left out; the model itself is "". In the model's order.

    `InputError` for two of one path, and for modules nested more than 500 deep.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: give an nn.Module")
    found: dict[str, CacheModule] = {}
    seen = set()
    todo: list[tuple[str, nn.Module, int]] = [("", model, 0)]
    while todo:
        path, module, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"modules are nested more than {MAX_DEPTH} deep at {path[:80]!r}: flatten the model")
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, CacheModule):
            if path in found:
                raise InputError(f"two cache modules have the path {path!r} once wrappers are left out: rename one")
            found[path] = module
            continue
        wrapped = _WRAPPED.get(type(module).__name__, set())
        children = [
            (path if name in wrapped else f"{path}.{name}" if path else name, child, depth + 1)
            for name, child in module.named_children()
        ]
        todo.extend(reversed(children))
    return found


def flush(model: nn.Module) -> None:
    """Write every dirty row of all tables of all ranks to their SSD tiers and publish them as one state. Collective.

    A kill before it returns leaves the state before it for a resume, of every table. Tables without an SSD tier have nothing to do.
    Threads that flush the same tables take turns.
    Raises `InputError` for a model without cache modules, `StorageError` on every rank when one cannot write.
    """
    modules = cache_modules(model)
    if not modules:
        raise InputError(f"{type(model).__name__} has no cache module: nothing to flush")
    flush_tables(
        [
            internals(table)
            for module in modules.values()
            for table in module.tables.values()
            if table.directory is not None
        ]
    )
