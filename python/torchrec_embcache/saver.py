"""Full checkpoints of a model's embedding tables.

    Saver().save(model, "ckpt/sparse")  # with torch.distributed: on every rank
    Saver(0).load(model, "ckpt/sparse")  # without it: the one rank is 0

A checkpoint holds the rows of every cache module in the model, sharded or not, with their optimizer slots and metadata; the dense
part of the model is torch's or DCP's to save. It loads into any number of ranks and any tier budgets. Its data files are
safetensors; `docs/design.md` describes them.

What ranks do, in a save: the first checks the directory and begins a checkpoint; each writes its shards; the first publishes. A
crash at any time leaves the checkpoint before. In a load: each checks manifests, headers and sizes for its shards; only when all
ranks have done so are tables touched. An error on one rank is raised on every rank.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from . import _native
from .cache import CacheTable
from .collective import all_gather, is_distributed, together
from .config import check_int
from .exceptions import ConfigError, EmbCacheError, InputError, MismatchError, PathError, UnsupportedError
from .whole_model import CacheModule, cache_modules

__all__ = ["Saver"]

_log = logging.getLogger(__name__)

# A table on this rank: its module's path in the model, the module, the table.
_Shard = tuple[str, CacheModule, CacheTable]


class Saver:
    """Saves the tables of a model to a directory, and loads them. With `torch.distributed` every rank calls the same methods."""

    def __init__(self, rank: int | None = None) -> None:
        """`rank`: this process's; by default `torch.distributed`'s, and without that it must be given, as 0."""
        self.rank = None if rank is None else check_int("rank", rank, 0, (1 << 31) - 1)

    def save(self, module: nn.Module, path: str | os.PathLike[str], incremental: bool = False) -> None:
        """Write every row of every cache module in `module` to `path`, in place of the checkpoint that is there.

        `path` is made (mode 0750) when missing. Until the new checkpoint is complete and durable a load finds the one before.
        Training is not to go on meanwhile. Raises `PathError` (length, `..`, symbolic links, a word such as "key", a system
        directory, ranks that disagree), `StoragePermissionError`, `StorageError` (a full disk), `StateError`, `InputError` (no
        cache module in `module`, or two of one path).
        """
        rank, world_size = self._place()
        _refuse_incremental(incremental)
        shards = together(lambda: _shards(module))
        root = _agreed_path(path)
        epoch = max(all_gather(max((table.native.epoch() for _, _, table in shards), default=0))) + 1
        begun: _native.CheckpointSave | None = None

        def begin() -> str:
            nonlocal begun
            checked = _native.check_save_dir(root)
            begun = _native.CheckpointSave(checked, secrets.randbits(64))
            return begun.name

        try:
            name = all_gather(together(begin if rank == 0 else str))[0]
            digests = all_gather(together(lambda: _write(shards, root, name, rank, world_size)))
            left = together(lambda: begun.publish(digests, epoch) if begun is not None else [])
        except Exception:
            if begun is not None:
                _abandon(begun)
            raise
        for what in left:
            _log.warning("an older checkpoint in %s could not be removed: %s", root, what)
        for _, _, table in shards:
            table.native.set_epoch(epoch)

    def load(self, module: nn.Module, path: str | os.PathLike[str], incremental: bool = False) -> None:
        """Replace the contents of every cache module in `module` by the checkpoint at `path`, which any world size saved.

        Tables must be those of the checkpoint, by module path and name, with the same dim and optimizer (`MismatchError`); budgets,
        policy and device may differ; the number of buckets and the table's key become the checkpoint's. Step counters are
        restored. Load before a pipeline takes its first batches: those in flight went to the owners of the old buckets.

        Nothing is changed when the checkpoint is missing (`PathError`), does not fit, or its manifests or headers are damaged
        (`CorruptionError`). When its rows turn out to be damaged, or reading fails (`StorageError`), the tables refuse use on
        every rank until a load succeeds.
        """
        self._place()
        _refuse_incremental(incremental)
        shards = together(lambda: _shards(module))
        root = _agreed_path(path)
        # All ranks load what one of them finds, whatever is saved meanwhile.
        latest = all_gather(together(lambda: _native.latest_checkpoint(_native.check_load_dir(root))))[0]
        reader = together(lambda: _native.CheckpointReader(_native.check_load_dir(root), latest))
        names = {pair for pairs in all_gather([(place, table.name) for place, _, table in shards]) for pair in pairs}
        saved = {(entry["module"], entry["table"]): entry for entry in reader.tables()}

        def check() -> None:
            _check_names(names, set(saved), root)
            for place, _, table in shards:
                buckets = table.buckets_of(saved[place, table.name]["total_num_buckets"])
                reader.check_table(place, table.native, *buckets)

        together(check)
        reason = f"loading the checkpoint {reader.name} in {root} did not succeed; load one that is whole"

        def load() -> None:
            for _, _, table in shards:
                table.set_unusable(reason)
            for place, owner, table in shards:
                entry = saved[place, table.name]
                if table.adopt(entry["total_num_buckets"], entry["key"]):
                    owner.buckets_changed()
            for place, _, table in shards:
                reader.load_table(place, table.native)
                table.native.set_epoch(reader.next_epoch)

        together(load)
        for _, _, table in shards:
            table.set_unusable(None)

    def _place(self) -> tuple[int, int]:
        """This process's rank, and how many there are."""
        if is_distributed():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            if self.rank not in (None, rank):
                raise ConfigError(f"rank={self.rank} and torch.distributed says {rank}: leave rank out")
            return rank, world_size
        if self.rank is None:
            raise ConfigError(
                "rank=None and torch.distributed is not initialised: give Saver(rank=0), or initialise it first"
            )
        if self.rank != 0:
            raise ConfigError(
                f"rank={self.rank} without torch.distributed, where there is one rank: give Saver(rank=0)"
            )
        return 0, 1


def _refuse_incremental(incremental: bool) -> None:
    if incremental:
        raise UnsupportedError("incremental=True is not supported yet: save and load full checkpoints")


def _shards(module: nn.Module) -> list[_Shard]:
    """The tables of this rank, opened, by module path and name."""
    modules = cache_modules(module)
    if not modules:
        raise InputError(f"{type(module).__name__} has no cache module: nothing to save or load")
    for owner in modules.values():
        owner.settle()
    found = [(place, owner, table) for place, owner in modules.items() for table in owner.tables.values()]
    found.sort(key=lambda shard: (shard[0], shard[2].name))
    for _, _, table in found:
        table.open()
    return found


def _agreed_path(path: str | os.PathLike[str]) -> str:
    """`path` as a string; `PathError` when ranks differ in the place it names."""

    def text() -> tuple[str, str]:
        given: object = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(given, str):
            raise PathError(f"path={given!r} is not text: give a str")
        return given, os.path.abspath(given) if given else ""

    given, absolute = together(text)
    everyone = all_gather(absolute)
    if len(set(everyone)) > 1:
        named = ", ".join(f"rank {rank}: {place!r}" for rank, place in enumerate(everyone))
        raise PathError(f"path differs between ranks: give all the same ({named})")
    return given


def _write(shards: list[_Shard], root: str, name: str, rank: int, world_size: int) -> tuple[int, int]:
    writer = _native.CheckpointWriter(_native.check_save_dir(root), name, rank, world_size)
    for place, owner, table in shards:
        writer.write_table(place, table.native, dict(_numbers(owner.hyperparameters(table.name))))
    return writer.finish()


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Hyperparameters one by one: a pair `betas` becomes `beta1` and `beta2`."""
    for name, value in group.items():
        if name == "betas":
            yield from (("beta1", float(value[0])), ("beta2", float(value[1])))
        elif name != "params":
            yield name, float(value)


def _abandon(begun: _native.CheckpointSave) -> None:
    """Remove an unfinished checkpoint; the error that ended it is on its way, so one here is only logged."""
    try:
        begun.abandon()
    except EmbCacheError as error:
        _log.info("an unfinished checkpoint stays until the next save: %s", error)


def _check_names(model: set[tuple[str, str]], saved: set[tuple[str, str]], root: str) -> None:
    def listed(pairs: set[tuple[str, str]]) -> str:
        return ", ".join(f"{table!r} of module {module!r}" for module, table in sorted(pairs))

    if model - saved:
        raise MismatchError(f"the checkpoint in {root} has no table {listed(model - saved)}; it has {listed(saved)}")
    if saved - model:
        raise MismatchError(f"the model has no table {listed(saved - model)}, which the checkpoint in {root} holds")
