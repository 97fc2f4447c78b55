"""Megatron's strategies, extended by tables."""

import os
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.checkpoint import Saver, SaveReport
from torchrec_embcache.exceptions import EmbCacheWarning, StorageError, UnsupportedError

from ._tables import (
    StateDict,
    check_present,
    check_saved,
    folder_of,
    keys_in,
    load_tables,
    metadata_of,
    model_of,
    remove_leftovers,
    remove_tensors,
    save_tables,
    take_tables,
)

__all__ = ["STRATEGY", "LoadCommonStrategy", "LoadShardedStrategy", "SaveCommonStrategy", "SaveShardedStrategy"]

# Backend and version: the argument of `dist_checkpointing.save`, also stored in a checkpoint's metadata.json.
STRATEGY = ("torchrec_embcache", 1)
# Backends whose checkpoints the load strategies read: without tables the files are the same.
READABLE_BACKENDS = {STRATEGY[0], "torch_dist", "torch"}


class _ShardedObjectsMixin:
    """A strategy that handles `ShardedObject`s too, as reported by a property of Megatron's interface."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True


class _LoadChecksMixin(_ShardedObjectsMixin):
    """Checks the checkpoint's strategy, for a strategy that loads."""

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raises `UnsupportedError` for checkpoints of a backend other than this one and Megatron's."""
        if loaded_backend not in READABLE_BACKENDS:
            raise UnsupportedError(
                f"the checkpoint was written by {loaded_backend!r}: this strategy reads {sorted(READABLE_BACKENDS)}"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises `UnsupportedError` for other versions."""
        if loaded_version != STRATEGY[1]:
            raise UnsupportedError(
                f"the checkpoint is of version {loaded_version}: this strategy reads version {STRATEGY[1]}"
            )


class SaveShardedStrategy(_ShardedObjectsMixin, TorchDistSaveShardedStrategy):
    """Megatron's strategy for tensors and objects, extended by tables; synchronous or asynchronous.

    With `async_save`, the checkpoint is a snapshot taken at the call. Tensors are written when the request is executed, as in
    Megatron; tables are written by `Saver.save_async` in a background thread that starts at the call. The first finalize function
    of the request waits for them: a checkpoint whose tables could not be written is never published. A request that is never
    executed leaves the tables' files, which the next save to the same directory removes.

    Examples:
        >>> from torchrec_embcache.integrations import megatron
        >>> megatron.SaveShardedStrategy().backend  # `register` makes one of it known to megatron
        'torchrec_embcache'
    """

    def __init__(self, backend: str = STRATEGY[0], version: int = STRATEGY[1], *args: Any, **kwargs: Any) -> None:
        """Accepts the same arguments as Megatron's strategy."""
        super().__init__(backend, version, *args, **kwargs)
        self._writer: Any = None  # the writer of the last request

    def async_save(
        self, sharded_state_dict: StateDict, checkpoint_dir: Path, *args: Any, **kwargs: Any
    ) -> AsyncRequest:
        """Takes a snapshot of the tables. Returns the request that writes the rest. Collective. Raises like `Saver.save_async`."""
        rest, tables = take_tables("SaveShardedStrategy.async_save", sharded_state_dict, checkpoint_dir, check_saved)
        # If objects are left to the common strategy, it has already saved the tables.
        if self.can_handle_sharded_objects:
            remove_leftovers(tables, checkpoint_dir)
        under_way = [
            Saver(path_checks="basic").save_async(model_of(each), os.path.join(checkpoint_dir, folder_of(each.key)))
            for each in tables.values()
        ]
        request = super().async_save(rest, checkpoint_dir, *args, **kwargs)
        return request._replace(
            finalize_fns=[partial(_wait_for_tables, under_way, self._writer), *request.finalize_fns]
        )

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *args: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *args)
        self._writer = writer
        if torch.cuda.is_available():
            return request
        preload = request.preload_fn and partial(writer.preload_tensors, writer.write_buckets, False)
        return request._replace(preload_fn=preload, finalize_fns=[partial(_finish, *save_state_dict_ret)])


def _wait_for_tables(saves: Sequence[Future[SaveReport]], writer: Any) -> None:
    """Waits for the tables. After a failure, removes the result of the tensors from Megatron's queue, because no caller reads it.

    That queue is shared by the process. A result left in it would be taken for the result of the next save, which would publish
    locations in files of this save.
    """
    try:
        for save in saves:
            save.result()
    except BaseException:
        writer.retrieve_write_results()
        raise


def _finish(writer: Any, metadata: Any, ranks: Any) -> None:
    """Finishes a save once all ranks have written, like Megatron but without a GPU tensor: the coordinator writes the metadata.

    A failure of one rank raises `StorageError` on all of them.
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

    all_ranks().run(publish)


class LoadShardedStrategy(_LoadChecksMixin, TorchDistLoadShardedStrategy):
    """Megatron's strategy for tensors and objects, extended by tables.

    Examples:
        >>> from torchrec_embcache.integrations import megatron
        >>> megatron.LoadShardedStrategy().check_backend_compatibility("torch_dist")  # megatron's own checkpoints are read too
    """

    def load(self, sharded_state_dict: StateDict, checkpoint_dir: Path, *args: Any, **kwargs: Any) -> StateDict:
        """Loads the state dict. Tables are loaded into their model, which takes their place in the state dict. Collective.

        Raises `MismatchError` before anything is loaded if the checkpoint has no tables of a key; otherwise raises like
        `Saver.load`.
        """
        rest, tables = take_tables("LoadShardedStrategy.load", sharded_state_dict, checkpoint_dir, check_present)
        loaded = super().load(rest, checkpoint_dir, *args, **kwargs) if rest else {}
        return load_tables(tables, checkpoint_dir, loaded)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> StateDict:
        """Returns the tensors, objects and tables of the checkpoint, without data."""
        found: StateDict = super().load_sharded_metadata(checkpoint_dir)
        # If objects are left to the common strategy, tables are too.
        return found | metadata_of(checkpoint_dir) if self.can_handle_sharded_objects else found

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        """Removes tensors, objects and tables whose key starts with `key_prefix`, and the files that contain nothing else.

        After a crash they are either removed or not, and at most unreferenced files remain. Emits an `EmbCacheWarning` if there are
        none.
        """
        removed = remove_tensors(Path(checkpoint_dir), key_prefix)
        for key in (key for key in keys_in(checkpoint_dir) if key.startswith(key_prefix)):
            shutil.rmtree(os.path.join(checkpoint_dir, folder_of(key)))
            removed = True
        if not removed:
            message = f"nothing was removed from {checkpoint_dir}: it has no key that begins with {key_prefix!r}"
            warnings.warn(message, EmbCacheWarning, stacklevel=2)


class SaveCommonStrategy(_ShardedObjectsMixin, TorchCommonSaveStrategy):
    """Megatron's strategy for common state, extended by tables, for strategies that leave objects to it.

    Examples:
        >>> from torchrec_embcache.integrations import megatron
        >>> megatron.SaveCommonStrategy().backend  # `register` makes one of it known to megatron
        'torchrec_embcache'
    """

    def __init__(self, backend: str = STRATEGY[0], version: int = STRATEGY[1]) -> None:
        """Accepts the same arguments as Megatron's strategy."""
        super().__init__(backend, version)

    def save_sharded_objects(
        self, sharded_objects_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> None:
        """Saves objects like Megatron, and tables with `Saver`. Collective."""
        call = "SaveCommonStrategy.save_sharded_objects"
        rest, tables = take_tables(call, sharded_objects_state_dict, checkpoint_dir, check_saved)
        remove_leftovers(tables, checkpoint_dir)
        super().save_sharded_objects(rest, checkpoint_dir)
        save_tables(tables, checkpoint_dir)


class LoadCommonStrategy(_LoadChecksMixin, TorchCommonLoadStrategy):
    """Megatron's strategy for common state, extended by tables, for strategies that leave objects to it.

    Examples:
        >>> from torchrec_embcache.integrations import megatron
        >>> megatron.LoadCommonStrategy().can_handle_sharded_objects  # `register` makes one of it known to megatron
        True
    """

    def load_sharded_objects(
        self, sharded_objects_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        """Loads objects like Megatron, and tables into their models. Collective."""
        call = "LoadCommonStrategy.load_sharded_objects"
        rest, tables = take_tables(call, sharded_objects_state_dict, checkpoint_dir, check_present)
        return load_tables(tables, checkpoint_dir, super().load_sharded_objects(rest, checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Returns the objects and tables of the checkpoint, without data."""
        found: StateDict = super().load_sharded_metadata(checkpoint_dir)
        return found | metadata_of(checkpoint_dir)
