"""Replaces the trained modules of a model by modules that read served tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import nn

from torchrec_embcache.exceptions import InputError, StateError, UnsupportedError
from torchrec_embcache.model import CacheModule, path_in_model
from torchrec_embcache.nn import EmbCacheEmbedding, EmbCacheEmbeddingBag

from ._modules import ServingEmbedding, ServingEmbeddingBag, ServingModule, TableRef, pinned
from .tables import Tables
from .version import Pooling, Version, current_version

__all__ = ["replace"]

Model = TypeVar("Model", bound=nn.Module)


def replace(model: Model, tables: Tables, *, modules: Mapping[str, str] | None = None) -> Model | ServingModule:
    """Makes a model read served tables: every module that has tables is replaced by one with the same inputs and outputs.

    The replaced modules are TorchRec's `EmbeddingBagCollection` and `EmbeddingCollection` and this package's modules, unsharded.
    TorchRec collections may be on the "meta" device. A table is found in the checkpoint by the path of its module in the model and
    by its name, as `Saver` stored it. One forward of the model reads one version in all of its modules.

    Args:
        model: changed in place. Its dense part is not touched: load it with torch.
        tables: from `serving.open`.
        modules: maps the path of a module in `model` to its path in the checkpoint, if these differ. "" is the model itself.

    Returns:
        The model, or its replacement if the model itself is such a module.

    Raises:
        InputError: the model has no such module, or `modules` names a module that the model does not have.
        MismatchError: the checkpoint does not have a table, or has it with another width.
        UnsupportedError: a module is sharded, or is weighted with mean pooling. Nothing was replaced.
        StateError: the tables are closed.
        StaleError: the served checkpoint is older than `max_staleness_seconds`, and `on_stale` is "raise".

    Examples:
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> from torchrec_embcache import EmbCacheEmbeddingBagCollection, Saver, TierBudgets, serving
        >>> config = EmbeddingBagConfig(name="item", embedding_dim=2, num_embeddings=100, feature_names=["seen"])
        >>> trained = EmbCacheEmbeddingBagCollection([config], tiers=TierBudgets(host_bytes="1MiB"))
        >>> trained.tables["item"].import_rows([7, 8], [[1.0, 2.0], [3.0, 4.0]])
        >>> report = Saver(0).save(torch.nn.ModuleDict({"bags": trained}), "ckpt")
        >>> model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection([config], device=torch.device("meta"))})
        >>> with serving.open("ckpt") as tables:
        ...     model = serving.replace(model, tables)
        ...     pooled = model["bags"](KeyedJaggedTensor(["seen"], torch.tensor([7, 8]), lengths=torch.tensor([2])))
        >>> pooled["seen"]
        tensor([[4., 6.]])
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: give an nn.Module")
    if not isinstance(tables, Tables):
        raise InputError(f"tables is a {type(tables).__name__}: give what serving.open returned")
    if tables.is_closed:
        raise StateError(f"the tables of {tables.path} are closed: open them again by serving.open")
    found = _find_modules(model)
    paths = _checkpoint_paths({path: path_in_model(model, path) for path in found}, modules)
    _unify_shared_paths(found, paths, modules)
    made: dict[int, ServingModule] = {}
    with pinned(tables):
        for path, module in found.items():
            if id(module) not in made:
                made[id(module)] = _serving_module(tables, module, paths[path])
    if "" in found:
        return made[id(found[""])]
    for path, module in found.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made[id(module)])
    _pin_per_forward(model, tables)
    return model


def _find_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules to replace by path, without modules nested in them. Raises `InputError` and `UnsupportedError`."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{above}.") or above == "" for above in found)
        if inside or isinstance(module, ServingModule):
            continue
        if _is_sharded(module):
            raise UnsupportedError(
                f"module {path!r}, a {type(module).__name__}, is sharded: build the model as it was before it was sharded"
            )
        if _has_tables(module):
            found[path] = module
    if not found:
        raise InputError(
            f"{type(model).__name__} has no module to replace: give a model with an EmbeddingBagCollection, an "
            "EmbeddingCollection, or a module of torchrec_embcache"
        )
    return found


def _has_tables(module: nn.Module) -> bool:
    return (
        isinstance(module, CacheModule)
        or _is_torchrec_module("modules.embedding_modules", "EmbeddingBagCollection", module)
        or _is_torchrec_module("modules.embedding_modules", "EmbeddingCollection", module)
    )


def _is_sharded(module: nn.Module) -> bool:
    return _is_torchrec_module("distributed.types", "ShardedModule", module)


def _is_torchrec_module(module_name: str, kind: str, module: nn.Module) -> bool:
    """True if a module is an instance of a TorchRec class. Always False if TorchRec was not imported."""
    there = sys.modules.get(f"torchrec.{module_name}")
    return there is not None and isinstance(module, getattr(there, kind))


def _checkpoint_paths(paths: dict[str, str], modules: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the checkpoint path of each module by its path in the model. `paths` has the model paths without wrappers."""
    if not isinstance(modules, Mapping | None):
        raise InputError(f"modules is a {type(modules).__name__}: give paths in the checkpoint by paths in the model")
    renames = dict(modules or {})
    unknown = sorted(set(renames) - set(paths.values()))
    if unknown:
        there = ", ".join(map(repr, paths.values()))
        raise InputError(
            f"modules names {', '.join(map(repr, unknown))}, and the modules with tables are {there}: give one of these"
        )
    return {path: renames.get(short, short) for path, short in paths.items()}


def _unify_shared_paths(found: dict[str, nn.Module], paths: dict[str, str], modules: Mapping[str, str] | None) -> None:
    """Assigns one checkpoint path to a module that occurs at several paths of the model: the path that `modules` sets for any."""
    named = set((modules or {}).values())
    for module in {id(module): module for module in found.values()}.values():
        at = [path for path, other in found.items() if other is module]
        said = {paths[path] for path in at if paths[path] in named and paths[path] != path}
        if len(said) > 1:
            raise InputError(
                f"modules gives {', '.join(map(repr, sorted(said)))} for one module, which the model has at "
                f"{', '.join(map(repr, at))}: give one of them"
            )
        for path in at if said else ():
            paths[path] = next(iter(said))


def _serving_module(tables: Tables, module: nn.Module, path: str) -> ServingModule:
    """Returns the replacement for a module with tables whose checkpoint path is `path`."""
    if isinstance(module, EmbCacheEmbedding):
        table = TableRef((path, module.table.name), module.embedding_dim)
        return ServingEmbedding(tables, table, module.padding_idx)
    if isinstance(module, EmbCacheEmbeddingBag):
        table = TableRef((path, module.table.name), module.embedding_dim)
        pooling: Pooling = "mean" if module.mode == "mean" else "sum"
        return ServingEmbeddingBag(tables, table, module.padding_idx, pooling, module.include_last_offset)
    if find_spec("torchrec") is not None:
        from .collections import serving_collection

        made = serving_collection(tables, module, path)
        if made is not None:
            return made
    raise UnsupportedError(
        f"module {path!r} is a {type(module).__name__}, which cannot be replaced: use an EmbeddingBagCollection or an "
        "EmbeddingCollection"
    )


# Versions pinned by running forwards, with the hooks that pinned them; None if the caller had already pinned a version.
_FORWARDS: ContextVar[tuple[tuple[object, Version | None], ...]] = ContextVar("forwards", default=())


class _VersionHooks:
    """Hooks that pin one version for all modules of a model during a forward."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def pin_version(self, *_arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a torch graph has no versions: its operators read the version that is pinned when they run
        version = None if current_version(self.tables) is not None else self.tables.pin().__enter__()
        _FORWARDS.set((*_FORWARDS.get(), (self, version)))

    def unpin_version(self, *_arguments: Any) -> None:
        """Unpins the version. Also called after an error, including an error of `pin_version`, which then pinned nothing."""
        if torch.compiler.is_compiling():
            return
        forwards = _FORWARDS.get()
        if forwards and forwards[-1][0] is self:
            _FORWARDS.set(forwards[:-1])
            version = forwards[-1][1]
            if version is not None:
                version.__exit__(None, None, None)


def _pin_per_forward(model: nn.Module, tables: Tables) -> None:
    hooks = _VersionHooks(tables)
    model.register_forward_pre_hook(hooks.pin_version)
    model.register_forward_hook(hooks.unpin_version, always_call=True)
