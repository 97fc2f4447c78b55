"""Tables in Megatron-Core's distributed checkpoints: strategies that save and load them beside the tensors.

Examples:
    >>> import os
    >>> from megatron.core import dist_checkpointing
    >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, megatron, optimizers
    >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
    >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
    >>> model.import_rows([7], [[1.0, 2.0]])
    >>> megatron.register()  # once, before saves and loads
    >>> os.mkdir("ckpt")
    >>> state = {"over": torch.ones(1), **megatron.sharded_tables(model)}
    >>> dist_checkpointing.save(state, "ckpt", megatron.STRATEGY)
    >>> model.remove_rows([7])
    1
    >>> loaded = dist_checkpointing.load(state, "ckpt")  # finds the strategy by the checkpoint's own metadata
    >>> len(model)
    1

Tensors, objects and common state are megatron's own, files and all; the tables of `model` lie in `<directory>/embcache-<key>` as
`torchrec_embcache.saver.Saver` writes them, for any number of ranks and budgets. A load puts their rows in place.

Written for megatron-core 0.16, the newest for Python 3.11. Where there is no CUDA, the calls to it in a save are left out. Imported
without megatron-core, or without psutil, this module raises `UnsupportedError`.
"""

import dataclasses
import importlib.util
import os
import pickle
import shutil
import urllib.parse
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .collective import is_distributed, together
from .config import check_name
from .exceptions import EmbCacheWarning, InputError, MismatchError, StateError, StorageError, UnsupportedError
from .folder import Folder
from .saver import Saver, SaveReport
from .whole_model import cache_modules

try:
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
    from megatron.core.dist_checkpointing.strategies.torch import (
        FileSystemReader,
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )
except ImportError as _cause:
    raise UnsupportedError(
        "torchrec_embcache.megatron needs megatron-core, with its registry of strategies: pip install 'megatron-core>=0.16,<0.17'"
    ) from _cause

if importlib.util.find_spec("psutil") is None:
    raise UnsupportedError(
        "torchrec_embcache.megatron needs psutil, without which megatron-core's saves never end: pip install psutil"
    )

__all__ = [
    "STRATEGY",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "ShardedTables",
    "register",
    "sharded_tables",
]

# Backend and version: what `dist_checkpointing.save` is given, and what a checkpoint's metadata.json says.
STRATEGY = ("torchrec_embcache", 1)
# Backends whose checkpoints the load strategies read: without tables they are the same files.
READABLE = {STRATEGY[0], "torch_dist", "torch"}
# How the directory of the tables of a key begins in a checkpoint.
PREFIX = "embcache-"

_State = dict[str, Any]


@dataclass
class ShardedTables(ShardedObject):
    """All tables of a model, as one object of a sharded state dict. `data`: the model; None in metadata.

    There is one of it, and each rank's is a replica: ranks may be other ones when it is loaded. `slots`: whether a load takes the
    optimizer's slots.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, megatron, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> tables = megatron.sharded_tables(model, slots=False)["embcache"]
        >>> type(tables).__name__, tables.key, tables.slots
        ('ShardedTables', 'embcache', False)
    """

    slots: bool = True


def sharded_tables(model: nn.Module, key: str = "embcache", *, slots: bool = True) -> dict[str, ShardedTables]:
    """What to add to a sharded state dict, on every rank: the tables of every cache module in `model`, under `key`.

    With `slots=False` a load takes weights and metadata alone, as `Saver.load(..., slots=False)` does; a save refuses it.
    `InputError` where `model` has none; `ConfigError` for a key that cannot be in a path.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, megatron, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> list(megatron.sharded_tables(model, "rows"))  # state = {"model": ..., **megatron.sharded_tables(model)}
        ['rows']
    """
    check_name("key", key)
    _folder(key)
    if not cache_modules(model):
        raise InputError(f"{type(model).__name__} has no cache module: nothing to save or load")
    replica = dist.get_rank() if is_distributed() else 0
    return {key: ShardedTables(key, model, (1,), (0,), replica, slots=slots)}


def _folder(key: str) -> str:
    name = PREFIX + urllib.parse.quote(key, safe="")
    if len(name) > 255:
        raise InputError(f"key={key!r} makes a file name of {len(name)} bytes: choose a shorter one")
    return name


def _take(state: Mapping[str, Any], above: tuple[str, ...] = ()) -> tuple[_State, dict[tuple[str, ...], ShardedTables]]:
    """A sharded state dict without its tables, and the tables by their keys in it, from the outermost to their own."""
    rest: _State = {}
    found: dict[tuple[str, ...], ShardedTables] = {}
    for name, value in state.items():
        here = (*above, name)
        if isinstance(value, ShardedTables):
            found[here] = value
        elif isinstance(value, dict) and value:
            rest[name], below = _take(value, here)
            found |= below
            if not rest[name]:
                del rest[name]
        elif _holds_tables(value):
            raise InputError(
                f"tables lie in a list at {'.'.join(map(str, here))!r} of the state dict: put them into a dict"
            )
        else:
            rest[name] = value
    keys = [tables.key for tables in found.values()]
    if len(set(keys)) != len(keys):
        raise InputError(f"several tables of the state dict have one key, of {keys}: give each a key of its own")
    return rest, found


def _holds_tables(value: object) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, ShardedTables) or any(map(_holds_tables, below))


def _save(tables: Mapping[tuple[str, ...], ShardedTables], directory: str | os.PathLike[str]) -> None:
    _refuse_without_slots(tables)
    for each in tables.values():
        Saver(path_checks="basic").save(_model(each), os.path.join(directory, _folder(each.key)))


def _refuse_without_slots(tables: Mapping[tuple[str, ...], ShardedTables]) -> None:
    for each in tables.values():
        if not each.slots:
            raise InputError(
                f"sharded_tables(slots=False) of the key {each.key!r} is for a load: a save writes the slots too, so leave it out"
            )


def _load(tables: Mapping[tuple[str, ...], ShardedTables], directory: str | os.PathLike[str], into: _State) -> _State:
    """Load the rows into the models. In `into` each model stands where its tables stood."""
    for (*above, name), each in tables.items():
        model = _model(each)
        Saver(path_checks="basic").load(model, os.path.join(directory, _folder(each.key)), slots=each.slots)
        target = into
        for part in above:
            target = target.setdefault(part, {})
        target[name] = model
    return into


def _check_there(tables: Mapping[tuple[str, ...], ShardedTables], directory: str | os.PathLike[str]) -> None:
    known = set(_keys(directory))
    missing = [each.key for each in tables.values() if each.key not in known]
    if missing:
        raise MismatchError(f"{directory} has no tables of the key {missing}; it has {sorted(known)}")


def _model(tables: ShardedTables) -> nn.Module:
    if not isinstance(tables.data, nn.Module):
        raise StateError(f"the tables of the key {tables.key!r} came without their model: give sharded_tables(model)")
    return tables.data


def _keys(directory: str | os.PathLike[str]) -> list[str]:
    """The keys of the tables in a checkpoint."""
    names = (entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
    return [urllib.parse.unquote(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)]


def _metadata(directory: str | os.PathLike[str]) -> dict[str, ShardedTables]:
    tables = [ShardedTables(key, None, (1,), (0,)) for key in sorted(_keys(directory))]
    return {each.unique_key: each for each in tables}


def _remove_tensors(directory: Path, prefix: str) -> bool:
    """Take keys out of the metadata, then remove the files that were theirs alone. Whether there were any.

    Megatron's own way asks torch for what it no longer has, and removes files of one name only.
    """
    old = FileSystemReader(directory).read_metadata()
    stored = {index: where for index, where in old.storage_data.items() if not index.fqn.startswith(prefix)}
    if len(stored) == len(old.storage_data):
        return False

    def kept(by_key: Any) -> Any:
        return (
            {key: value for key, value in by_key.items() if not key.startswith(prefix)} if by_key is not None else None
        )

    new = dataclasses.replace(
        old,
        state_dict_metadata=kept(old.state_dict_metadata),
        planner_data=kept(old.planner_data),
        storage_data=stored,
    )
    with Folder(str(directory), os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        folder.publish(".metadata", pickle.dumps(new))
        files = {where.relative_path for where in stored.values()}
        for name in sorted({where.relative_path for where in old.storage_data.values()} - files):
            folder.remove(name)
    return True


def _check_backend(loaded: str) -> None:
    if loaded not in READABLE:
        raise UnsupportedError(f"the checkpoint was written by {loaded!r}: this strategy reads {sorted(READABLE)}")


def _check_version(loaded: int) -> None:
    if loaded != STRATEGY[1]:
        raise UnsupportedError(f"the checkpoint is of version {loaded}: this strategy reads version {STRATEGY[1]}")


class SaveShardedStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy for tensors and objects, and tables beside; synchronous or asynchronous.

    With `async_save` all is of the moment of the call. Tensors are written when the request is executed, as megatron does, tables
    by `Saver.save_async`, from the call on, in a thread beside training. The first that finalizes the request waits for them: a
    checkpoint whose tables could not be written is never published.

    Examples:
        >>> from torchrec_embcache import megatron
        >>> megatron.SaveShardedStrategy().backend  # `register` makes one of it known to megatron
        'torchrec_embcache'
    """

    def __init__(self, backend: str = STRATEGY[0], version: int = STRATEGY[1], *args: Any, **named: Any) -> None:
        """Take the same arguments as megatron's strategy."""
        super().__init__(backend, version, *args, **named)
        self._writer: Any = None  # of the last request

    def async_save(self, sharded_state_dict: _State, checkpoint_dir: Path, *args: Any, **named: Any) -> AsyncRequest:
        """Hold the tables' rows, and return the request that writes the rest. Collective. Raises what `Saver.save_async` does."""
        rest, tables = _take(sharded_state_dict)
        _refuse_without_slots(tables)
        under_way = [
            Saver(path_checks="basic").save_async(_model(each), os.path.join(checkpoint_dir, _folder(each.key)))
            for each in tables.values()
        ]
        request = super().async_save(rest, checkpoint_dir, *args, **named)
        return request._replace(finalize_fns=[partial(_wait_for, under_way, self._writer), *request.finalize_fns])

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *more: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *more)
        self._writer = writer
        if torch.cuda.is_available():
            return request
        preload = request.preload_fn and partial(writer.preload_tensors, writer.write_buckets, False)
        return request._replace(preload_fn=preload, finalize_fns=[partial(_finish, *save_state_dict_ret)])


def _wait_for(saves: Sequence[Future[SaveReport]], writer: Any) -> None:
    """Wait for the tables. Where one fails, nobody asks for what became of the tensors: it is taken out of megatron's queue here.

    That queue is the process's. What stays in it would be taken for the result of the next save, which would publish places in
    files of this one.
    """
    try:
        for save in saves:
            save.result()
    except BaseException:
        writer.retrieve_write_results()
        raise


def _finish(writer: Any, metadata: Any, ranks: Any) -> None:
    """What megatron does when all ranks have written, without a tensor on a GPU: the coordinator writes the metadata.

    A rank's failure is a `StorageError` on all of them.
    """
    gathered = ranks.gather_object(writer.retrieve_write_results())

    def publish() -> None:
        if ranks.is_coordinator:
            failed = {rank: each[0] for rank, each in enumerate(gathered) if not isinstance(each, list)}
            if failed:
                raise StorageError(
                    "tensors could not be written by " + ", ".join(f"rank {r}: {e}" for r, e in failed.items())
                )
            writer.finish(metadata, gathered)

    together(publish)


class LoadShardedStrategy(TorchDistLoadShardedStrategy):
    """Megatron's strategy for tensors and objects, and tables beside.

    Examples:
        >>> from torchrec_embcache import megatron
        >>> megatron.LoadShardedStrategy().check_backend_compatibility("torch_dist")  # megatron's own checkpoints are read too
    """

    def load(self, sharded_state_dict: _State, checkpoint_dir: Path, *args: Any, **named: Any) -> _State:
        """Load the state dict. Tables are loaded into their model, which stands in it where they stood. Collective.

        Raises `MismatchError` where the checkpoint has no tables of a key, before anything is loaded, and what `Saver.load` does.
        """
        rest, tables = _take(sharded_state_dict)
        _check_there(tables, checkpoint_dir)
        loaded = super().load(rest, checkpoint_dir, *args, **named) if rest else {}
        return _load(tables, checkpoint_dir, loaded)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> _State:
        """Tensors, objects and tables of the checkpoint, without data."""
        found: _State = super().load_sharded_metadata(checkpoint_dir)
        # Where objects are left to the common strategy, so are the tables.
        return found | _metadata(checkpoint_dir) if self.can_handle_sharded_objects else found

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        """Remove tensors, objects and tables whose key starts with `key_prefix`, and the files that hold nothing else.

        A crash leaves them removed or not, and at most files that nothing refers to. An `EmbCacheWarning` where there are none.
        """
        removed = _remove_tensors(Path(checkpoint_dir), key_prefix)
        for key in (key for key in _keys(checkpoint_dir) if key.startswith(key_prefix)):
            shutil.rmtree(os.path.join(checkpoint_dir, _folder(key)))
            removed = True
        if not removed:
            message = f"nothing was removed from {checkpoint_dir}: it has no key that begins with {key_prefix!r}"
            warnings.warn(message, EmbCacheWarning, stacklevel=2)

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """`UnsupportedError` for checkpoints of another backend than ours or megatron's."""
        _check_backend(loaded_version)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """`UnsupportedError` for other versions."""
        _check_version(loaded_version)


class SaveCommonStrategy(TorchCommonSaveStrategy):
    """Megatron's strategy for common state, and tables beside, for strategies that leave objects to it.

    Examples:
        >>> from torchrec_embcache import megatron
        >>> megatron.SaveCommonStrategy().backend  # `register` makes one of it known to megatron
        'torchrec_embcache'
    """

    def __init__(self, backend: str = STRATEGY[0], version: int = STRATEGY[1]) -> None:
        """Take the same arguments as megatron's strategy."""
        super().__init__(backend, version)

    def save_sharded_objects(self, sharded_objects_state_dict: _State, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save objects as megatron does, and tables by `Saver`. Collective."""
        rest, tables = _take(sharded_objects_state_dict)
        super().save_sharded_objects(rest, checkpoint_dir)
        _save(tables, checkpoint_dir)


class LoadCommonStrategy(TorchCommonLoadStrategy):
    """Megatron's strategy for common state, and tables beside, for strategies that leave objects to it.

    Examples:
        >>> from torchrec_embcache import megatron
        >>> megatron.LoadCommonStrategy().can_handle_sharded_objects  # `register` makes one of it known to megatron
        True
    """

    def load_sharded_objects(
        self, sharded_objects_state_dict: _State, checkpoint_dir: str | os.PathLike[str]
    ) -> _State:
        """Load objects as megatron does, and tables into their models. Collective."""
        rest, tables = _take(sharded_objects_state_dict)
        _check_there(tables, checkpoint_dir)
        return _load(tables, checkpoint_dir, super().load_sharded_objects(rest, checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> _State:
        """Objects and tables of the checkpoint, without data."""
        found: _State = super().load_sharded_metadata(checkpoint_dir)
        return found | _metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """`UnsupportedError` for checkpoints of another backend than ours or megatron's."""
        _check_backend(loaded_version)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """`UnsupportedError` for other versions."""
        _check_version(loaded_version)


def register() -> None:
    """Make the strategies known to megatron under `STRATEGY`, for saves by name and for loads of what they saved. Harmless twice.

    The common ones also stand in for megatron's own ("torch", 1), whose files they read and write: its `save` takes no other name.

    Examples:
        >>> from torchrec_embcache import megatron
        >>> megatron.register()
        >>> megatron.STRATEGY  # what dist_checkpointing.save takes as its strategy
        ('torchrec_embcache', 1)
    """
    for action, strategy in (
        (StrategyAction.SAVE_SHARDED, SaveShardedStrategy()),
        (StrategyAction.LOAD_SHARDED, LoadShardedStrategy()),
        (StrategyAction.SAVE_COMMON, SaveCommonStrategy()),
        (StrategyAction.LOAD_COMMON, LoadCommonStrategy()),
    ):
        register_default_strategy(action, *STRATEGY, strategy)
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, SaveCommonStrategy("torch", 1))
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, LoadCommonStrategy())
