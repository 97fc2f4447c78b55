"""The cache modules of a model: finding them, and flushing them together."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache._ssd.flush import flush_tables
from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.table._row_summary import StateDictWatch, check_missing_rows, summarize_tables
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["CacheModule", "cache_modules", "flush", "path_in_model", "suppress_state_dict_warnings"]

# The attribute of a wrapper that contains the wrapped module. These names are omitted from module paths.
_WRAPPER_ATTRIBUTES = {
    "DataParallel": {"module"},
    "DistributedDataParallel": {"module"},
    "DistributedModelParallel": {"_dmp_wrapped_module"},
    "DMPCollection": {"_dmp_wrapped_module"},
    "FullyShardedDataParallel": {"_fsdp_wrapped_module"},
    "OptimizedModule": {"_orig_mod"},
    "CheckpointWrapper": {"_checkpoint_wrapped_module"},
}


# Deeper module trees are rejected as a mistake.
MAX_DEPTH = 500


class CacheModule:
    """Base class of every module with tables of this package, sharded or not: an `nn.Module` with `tables`."""

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, CacheTable]:
        """This rank's shards of the tables, by table name."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Implements `half()`, `to()` etc. Raises `UnsupportedError` for another dtype or device, before this module changes."""
        for parameter in nn.Module.parameters(self):  # type: ignore[arg-type]  # it is one
            probe = fn(torch.empty(0, dtype=torch.float32, device=parameter.device))
            of = f"{type(self).__name__} with tables {', '.join(map(repr, self.tables))}"
            if probe.dtype != torch.float32:
                raise UnsupportedError(
                    f"{of} cannot become {probe.dtype}: rows are float32; convert the dense modules by themselves, and cast the "
                    "results of this one. Modules that come before it in the model have been converted"
                )
            if probe.device.type == "meta":
                raise UnsupportedError(f"{of} cannot move to meta: its rows stay where their tiers are")
            if probe.device != parameter.device:
                raise UnsupportedError(f"{of} cannot move to {probe.device}: make it with device={str(probe.device)!r}")
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def sync_optimizers(self) -> None:
        """Assigns the current optimizers to the tables. Called before rows are saved or loaded."""

    def param_group(self, table: str) -> dict[str, Any] | None:
        """Returns the entry of `param_groups` that training of the table reads; None if its optimizer has none."""

    def hyperparameters(self, table: str) -> dict[str, Any]:
        """Returns the current hyperparameters of a table's optimizer, such as `lr`."""
        group = self.param_group(table)
        return self.tables[table]._spec.param_group() if group is None else dict(group)

    @property
    def table_names(self) -> Iterable[str]:
        """The names of all tables, including those on other ranks."""
        return self.tables

    def suppress_state_dict_warning(self) -> None:
        """Suppresses the warning that state dicts of this module contain no rows. For callers that save the rows."""
        self._state_dict_watch().is_suppressed = True

    def _state_dict_watch(self) -> StateDictWatch:
        watch: StateDictWatch = self.__dict__.setdefault("_notes", StateDictWatch())
        return watch

    def get_extra_state(self) -> Tensor:
        """Returns the summary of the tables' rows and steps for `state_dict()`; see `_row_summary`."""
        note = summarize_tables(self.tables, self.table_names)
        self._state_dict_watch().watch(note, self.tables)
        return note

    def set_extra_state(self, state: object) -> None:
        """Does nothing: `_load_from_state_dict` has already compared the summary with the tables."""

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing_keys: list[str], *lists: Any
    ) -> None:
        key = f"{prefix}_extra_state"
        check_missing_rows(state_dict.get(key), self.tables, key, missing_keys, strict=strict)
        own_missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, own_missing, *lists)  # type: ignore[misc]
        # A state dict without the summary, such as another library's, contains no information about rows.
        missing_keys += [missing for missing in own_missing if missing != key]

    def __prepare_scriptable__(self) -> Any:
        """Raises `UnsupportedError`. `torch.jit.script` calls this on every module before it compiles any."""
        raise UnsupportedError(
            f"torch.jit.script cannot compile lookups of {type(self).__name__}, which run in this package's core: script the dense "
            "part, or serve the saved tables (docs/serving.md)"
        )

    def refresh_buckets(self) -> None:
        """Discards state derived from a table's buckets, after a load changed them."""


def cache_modules(model: nn.Module) -> dict[str, CacheModule]:
    """Returns the cache modules of `model` by module path, in the order of the model.

    Names of wrappers, such as DistributedModelParallel's, are omitted from the paths. The path of the model itself is "".

    Raises `InputError` if two modules have the same path, and for modules that are nested more than 500 deep.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, cache_modules, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model = torch.nn.ModuleDict({"item": item, "over": torch.nn.Linear(2, 1)})
        >>> {path: list(module.tables) for path, module in cache_modules(model).items()}
        {'item': ['item']}
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
        wrapped = _WRAPPER_ATTRIBUTES.get(type(module).__name__, set())
        children = [
            (path if name in wrapped else f"{path}.{name}" if path else name, child, depth + 1)
            for name, child in module.named_children()
        ]
        todo.extend(reversed(children))
    return found


def suppress_state_dict_warnings(model: nn.Module | None) -> None:
    """Calls `suppress_state_dict_warning` on every cache module of a model. Raises `InputError` if it is not a module."""
    for module in cache_modules(model).values() if model is not None else ():
        module.suppress_state_dict_warning()


def path_in_model(model: nn.Module, path: str) -> str:
    """Returns a module path without the names of wrappers, given its path in `named_modules` of `model`."""
    names: list[str] = []
    module = model
    for name in path.split(".") if path else ():
        if name not in _WRAPPER_ATTRIBUTES.get(type(module).__name__, set()):
            names.append(name)
        module = module.get_submodule(name)
    return ".".join(names)


def flush(model: nn.Module, *, also: Callable[[int], object] | None = None) -> None:
    """Writes every dirty row of all tables of all ranks to their SSD tiers, and commits them as one state. Collective.

    After a crash before this returns, a resume finds the previous state of every table. Tables without an SSD tier are skipped.
    Concurrent flushes of the same tables run one after another.

    `also`: a callable that saves the rest of the model under the step passed to it: the largest of the tables' steps on all ranks.
    It is called on every rank before the commit, so that any state found by a resume was saved under its step. If it raises,
    nothing is flushed, and every rank raises. `docs/flushes.md` has a recipe.

    Raises, on every rank, `InputError` for a model without cache modules, or for an `also` that only some ranks pass, and
    `StorageError` if one rank cannot write.

    Examples:
        >>> import os, torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, flush, optimizers
        >>> os.mkdir("cache", mode=0o750)
        >>> tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache", reopen="auto")
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=optimizers.SGD(lr=0.5))
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> flush(model)  # from here on a killed process resumes with these two rows
        >>> model.stats().ssd.rows
        2
        >>> flush(model, also=lambda step: torch.save({}, f"dense-{step}.pt"))
        >>> os.path.exists("dense-1.pt")
        True
    """
    tables: list[CacheTable] = []

    def check() -> dict[str, object]:
        modules = cache_modules(model)
        if not modules:
            raise InputError(f"{type(model).__name__} has no cache module: nothing to flush")
        tables.extend(table for module in modules.values() for table in module.tables.values())
        return {"also": "left out" if also is None else "given"}

    ranks = all_ranks()
    ranks.agree_on_arguments("flush", check)
    if also is not None:
        step = max(ranks.gather(lambda: max((table._native_table.step() for table in tables), default=0)))
        ranks.run(lambda: also(step))
    flush_tables([table for table in tables if table.directory is not None])
