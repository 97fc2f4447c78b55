"""The tables of a model in Megatron's sharded state dicts and in its checkpoint directories."""

import dataclasses
import os
import pickle
import shutil
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import FileSystemReader
from torch import nn

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache._fs import DirectoryHandle
from torchrec_embcache._saves_in_flight import wait_for_saves
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.config import check_name
from torchrec_embcache.exceptions import InputError, MismatchError, StateError
from torchrec_embcache.model import cache_modules

__all__ = [
    "ShardedTables",
    "StateDict",
    "TablesByPath",
    "check_present",
    "check_saved",
    "folder_of",
    "keys_in",
    "load_tables",
    "metadata_of",
    "model_of",
    "remove_leftovers",
    "remove_tensors",
    "save_tables",
    "sharded_tables",
    "take_tables",
]

# Prefix of the directory of a key's tables in a checkpoint.
PREFIX = "embcache-"

StateDict = dict[str, Any]


@dataclass
class ShardedTables(ShardedObject):
    """All tables of a model, as one object of a sharded state dict. `data`: the model; None in metadata.

    The object is a single global one, and each rank's copy is a replica: the number of ranks may differ at the load. `slots`: if
    true, a load includes the optimizer's slots.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.integrations import megatron
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> tables = megatron.sharded_tables(model, slots=False)["embcache"]
        >>> type(tables).__name__, tables.key, tables.slots
        ('ShardedTables', 'embcache', False)
    """

    slots: bool = True


# The tables of a sharded state dict, by the path of keys that leads to them, outermost first.
TablesByPath = dict[tuple[str, ...], ShardedTables]


def sharded_tables(model: nn.Module, key: str = "embcache", *, slots: bool = True) -> dict[str, ShardedTables]:
    """Returns the entries to add to a sharded state dict on every rank: the tables of all cache modules in `model`, under `key`.

    With `slots=False` a load reads only weights and metadata, as `Saver.load(..., slots=False)` does; a save rejects it. Raises
    `InputError` if `model` has no cache module, and `ConfigError` for a key that is not valid in a path.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.integrations import megatron
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> list(megatron.sharded_tables(model, "rows"))  # state = {"model": ..., **megatron.sharded_tables(model)}
        ['rows']
    """
    check_name("key", key)
    folder_of(key)
    if not cache_modules(model):
        raise InputError(f"{type(model).__name__} has no cache module: nothing to save or load")
    replica = all_ranks().rank
    return {key: ShardedTables(key, model, (1,), (0,), replica, slots=slots)}


def folder_of(key: str) -> str:
    """Returns the directory name of a key's tables in a checkpoint. Raises `InputError` if the key is too long."""
    name = PREFIX + urllib.parse.quote(key, safe="")
    if len(name) > 255:
        raise InputError(f"key={key!r} makes a file name of {len(name)} bytes: choose a shorter one")
    return name


def _split_tables(state: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> tuple[StateDict, TablesByPath]:
    """Returns a sharded state dict without its tables, and the tables by key path, outermost first."""
    rest: StateDict = {}
    found: TablesByPath = {}
    for name, value in state.items():
        here = (*prefix, name)
        if isinstance(value, ShardedTables):
            found[here] = value
        elif isinstance(value, dict) and value:
            rest[name], below = _split_tables(value, here)
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


def take_tables(
    call_name: str,
    state: Mapping[str, Any],
    directory: str | os.PathLike[str],
    check: Callable[[TablesByPath, str | os.PathLike[str]], None],
) -> tuple[StateDict, TablesByPath]:
    """Splits the tables from a sharded state dict, once every rank has `check`ed them and passed the same keys. Collective."""
    taken: list[tuple[StateDict, TablesByPath]] = []

    def arguments() -> dict[str, object]:
        rest, tables = _split_tables(state)
        check(tables, directory)
        taken.append((rest, tables))
        return {
            "checkpoint_dir": os.path.abspath(directory),
            "sharded_tables": sorted((each.key, each.slots) for each in tables.values()),
        }

    all_ranks().agree_on_arguments(call_name, arguments)
    return taken[0]


def _holds_tables(value: object) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, ShardedTables) or any(map(_holds_tables, below))


def save_tables(tables: TablesByPath, directory: str | os.PathLike[str]) -> None:
    """Saves the rows of every model. Collective."""
    for each in tables.values():
        Saver(path_checks="basic").save(model_of(each), os.path.join(directory, folder_of(each.key)))


def check_saved(tables: TablesByPath, directory: str | os.PathLike[str]) -> None:
    """Raises `InputError` for tables that are only for a load, `StateError` for tables without their model."""
    del directory
    for each in tables.values():
        if not each.slots:
            raise InputError(
                f"sharded_tables(slots=False) of the key {each.key!r} is for a load: a save writes the slots too, so leave it out"
            )
        model_of(each)


def load_tables(tables: TablesByPath, directory: str | os.PathLike[str], state: StateDict) -> StateDict:
    """Loads the rows into the models. In `state` each model takes the place of its tables."""
    for (*above, name), each in tables.items():
        model = model_of(each)
        Saver(path_checks="basic").load(model, os.path.join(directory, folder_of(each.key)), slots=each.slots)
        target = state
        for part in above:
            target = target.setdefault(part, {})
        target[name] = model
    return state


def check_present(tables: TablesByPath, directory: str | os.PathLike[str]) -> None:
    """Raises `MismatchError` if a checkpoint lacks the tables of a key, `StateError` for tables without their model."""
    known = set(keys_in(directory))
    missing = [each.key for each in tables.values() if each.key not in known]
    if missing:
        raise MismatchError(f"{directory} has no tables of the key {missing}; it has {sorted(known)}")
    for each in tables.values():
        model_of(each)


def remove_leftovers(tables: TablesByPath, directory: str | os.PathLike[str]) -> None:
    """Removes tables of other keys that an unfinished save left in `directory`. Collective."""
    ranks = all_ranks()

    def remove() -> None:
        wait_for_saves()
        # Megatron writes this file last. A directory that has it is a complete checkpoint.
        if ranks.rank == 0 and not os.path.exists(os.path.join(directory, "metadata.json")):
            for key in set(keys_in(directory)) - {each.key for each in tables.values()}:
                shutil.rmtree(os.path.join(directory, folder_of(key)))

    ranks.run(remove)


def model_of(tables: ShardedTables) -> nn.Module:
    """Returns the model of these tables. Raises `StateError` if they have no model, as in metadata."""
    if not isinstance(tables.data, nn.Module):
        raise StateError(f"the tables of the key {tables.key!r} came without their model: give sharded_tables(model)")
    return tables.data


def keys_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the keys of the tables in a checkpoint."""
    names = (entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
    return [urllib.parse.unquote(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)]


def metadata_of(directory: str | os.PathLike[str]) -> dict[str, ShardedTables]:
    """Returns the tables of a checkpoint, without their models."""
    tables = [ShardedTables(key, None, (1,), (0,)) for key in sorted(keys_in(directory))]
    return {each.unique_key: each for each in tables}


def remove_tensors(directory: Path, prefix: str) -> bool:
    """Removes keys from the metadata, then the files that only these keys used. Returns True if there were any.

    Megatron's own implementation calls functions that torch has removed, and only removes files of one name.
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
    with DirectoryHandle(str(directory), os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        folder.write_atomically(".metadata", pickle.dumps(new))
        files = {where.relative_path for where in stored.values()}
        for name in sorted({where.relative_path for where in old.storage_data.values()} - files):
            folder.remove(name)
    return True
