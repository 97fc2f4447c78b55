"""The storage writer for `dcp.save` and `dcp.async_save`."""

import contextlib
import dataclasses
import functools
import io
import math
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import SingleRank, check_arguments_match
from torchrec_embcache._paths import CheckpointDirectory, check_path, open_to_save
from torchrec_embcache.checkpoint._part import PartSession
from torchrec_embcache.checkpoint._save import SaveSession
from torchrec_embcache.checkpoint._tensor_bytes import byte_windows, is_raw, serialize_tensor
from torchrec_embcache.exceptions import StateError, UnsupportedError
from torchrec_embcache.model import suppress_state_dict_warnings

from ._metadata import DenseExtent, to_json
from ._paths import CheckpointPathMixin, rank_path
from ._tables import PartResult, StagedTables, TableWriter
from ._threads import check_async_save_group

__all__ = ["EmbCacheStorageWriter"]

# The version of DCP's metadata that torch's own storage writes.
_DCP_VERSION = "1.0.0"


@dataclass
class _SaveState:
    """The state of one save on this rank."""

    path: str
    rank: int
    use_collectives: bool
    staged: StagedTables | None
    # Kept until the end of the save, so that no other save removes the part.
    part: PartSession | None = None

    # Both directories are validated and created on first use. The entire save uses the directories opened then.

    @functools.cached_property
    def root(self) -> CheckpointDirectory:
        """The directory at `path`."""
        return open_to_save(self.path)

    @functools.cached_property
    def directory(self) -> CheckpointDirectory:
        """The checkpoint directory: the one at `path`, or this rank's own below it if each rank saves on its own."""
        return self.root if self.use_collectives else open_to_save(rank_path(self.root, self.rank))


class EmbCacheStorageWriter(CheckpointPathMixin, BlockingAsyncStager, StorageWriter):
    """Writes the state of `dcp.save` and `dcp.async_save` and a model's tables as one checkpoint of this package.

    A writer handles one save at a time; it may be used for any number of saves, each of which replaces the previous checkpoint.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from torchrec_embcache import EmbCacheEmbedding, EmbCacheStorageWriter, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model = nn.ModuleDict({"item": item, "over": nn.Linear(2, 1)})
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> saved = dcp.save({"over": model["over"].state_dict()}, storage_writer=EmbCacheStorageWriter("ckpt", model))
        >>> sorted(saved.state_dict_metadata)
        ['over.bias', 'over.weight']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        single_file_per_rank: bool = True,  # noqa: ARG002
        sync_files: bool = True,  # noqa: ARG002
        thread_count: int = 1,  # noqa: ARG002
        per_thread_copy_ahead: int = 0,  # noqa: ARG002
    ) -> None:
        """`path`: the checkpoints' directory, the same on every rank, subject to the rules of `Saver(path_checks="basic")`.
        `model`: its tables are saved too.

        `overwrite=False` rejects a `path` that contains a checkpoint (`StateError`). `cache_staged_state_dict` keeps the host
        memory into which `dcp.async_save` copies dense tensors for the next save; it is pinned if there is a device.

        `single_file_per_rank`, `sync_files`, `thread_count` and `per_thread_copy_ahead` are accepted for compatibility with torch's
        `FileSystemWriter` and have no effect: every save is synced, and divided by bytes.
        """
        super().__init__(cache_staged_state_dict=cache_staged_state_dict)
        self.path = check_path("path", path)
        self.model = model
        self.overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self._tables = TableWriter(model)
        suppress_state_dict_warnings(model)
        self._save: _SaveState | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the configuration and the staged part's name, for the process that saves."""
        return {**self.__dict__, "model": None, "state_dict_cache": None, "_save": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Sets the path of the following saves to `checkpoint_id`."""
        self._set_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies `state_dict` into host memory and takes a snapshot of the tables, for `dcp.async_save`.

        Raises `InputError` if several ranks save in threads and `async_save` has no separate process group.
        """
        check_async_save_group()
        # The tables are first: ranks may wait for each other there, and an earlier step might fail on only one of them.
        self._tables.stage(self.path, self._check_path)
        try:
            staged: dict[str, Any] = super().stage(state_dict)
        except BaseException:
            self._tables.close()
            raise
        return staged

    def close(self) -> None:
        """Discards staged state that was not saved. Files of a failed save are released, so that a later save removes them."""
        self._tables.close()
        self._save = None
        self.state_dict_cache: dict[str, Any] | None = None

    def storage_meta(self) -> StorageMeta:
        """Returns the checkpoint's path and this save's id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Starts a save, as `rank` of the ranks that save together. Raises `PathError` if `reset` got an invalid path."""
        self._check_path()
        staged = self._tables.take_staged()
        self._save = _SaveState(self.path, kwargs.get("rank") or 0, kwargs.get("use_collectives", True), staged)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan, with the arguments that must be equal on all ranks."""
        self._active_save()
        return dataclasses.replace(plan, storage_data={"model": "given" if self._tables.has_model else "left out"})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Checks the directory and removes files of killed saves. The coordinator calls this before any rank writes.

        Raises `InputError` if some ranks have a model and others do not.
        """
        save = self._active_save()
        with self._abandon_on_error(save):
            self._prepare(save, plans)
        return plans

    def _prepare(self, save: _SaveState, plans: list[SavePlan]) -> None:
        # A plan cached by DCP has no arguments.
        if said := [plan.storage_data for plan in plans if plan.storage_data is not None]:
            check_arguments_match([("EmbCacheStorageWriter", each) for each in said])
        if not save.use_collectives:
            if self._tables.has_model and dist.is_initialized() and dist.get_world_size() > 1:
                raise UnsupportedError(
                    "use_collectives=False saves each rank alone, and tables are whole over all: leave model out"
                )
            if save.root.contains("LATEST"):
                raise StateError(
                    f"{self.path!r} holds a checkpoint of all ranks, which a load would find first: "
                    "give use_collectives=False a path of its own"
                )
        if not self.overwrite and save.directory.contains("LATEST"):
            raise StateError(f"Checkpoint already exists in {save.directory} and overwrite=False: give another path")
        _native.remove_stale_parts(save.directory)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and tables durably into a part, which the coordinator adopts in `finish`.

        First sweeps the tables that are swept at saves. It is done here because either all ranks reach this call or none: after an
        earlier failure, for example in a planner, DCP ends the save on all ranks. So no rank waits for a rank that does not sweep.
        """
        save = self._active_save()
        with self._abandon_on_error(save):
            if save.staged is None:
                self._tables.sweep()
            save.part = part = PartSession()
            part.begin(save.directory, expected_bytes=sum(_tensor_bytes(item) for item in plan.items))
            results = [_write_item(part, item, planner) for item in plan.items]
            epoch = self._tables.write(part) if save.staged is None else None
            parts = [PartResult(part.native.finish(), epoch)]
            if save.staged is not None:
                parts.append(save.staged.result())
        results += [WriteResult(MetadataIndex(each.part.name), 0, each) for each in parts]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Gathers the ranks' parts into a checkpoint and publishes it. Until then a load finds the previous one."""
        save = self._active_save()
        with self._abandon_on_error(save):
            self._publish(save.directory, metadata, results)
        self._save = None

    @contextlib.contextmanager
    def _abandon_on_error(self, save: _SaveState) -> Iterator[None]:
        """Abandons this rank's parts if an error or an interrupt ends the save."""
        try:
            yield
        except BaseException:
            self._save = None
            if save.part is not None:
                save.part.abandon()
            self._tables.abandon(save.staged)
            raise

    def _publish(self, directory: CheckpointDirectory, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [[result.storage_data for result in of_rank] for of_rank in results]
        parts = [[entry for entry in of_rank if isinstance(entry, PartResult)] for of_rank in written]
        metadata.version = _DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {
            result.index: dataclasses.replace(result.storage_data, rank=rank)
            for rank, of_rank in enumerate(results)
            for result in of_rank
            if isinstance(result.storage_data, DenseExtent)
        }
        document = to_json(metadata)
        # The minimum epoch applies: rows that any rank trains afterwards are then modified after this checkpoint.
        epochs = [part.epoch for of_rank in parts for part in of_rank if part.epoch is not None]
        with SaveSession(directory, SingleRank()) as session:
            session.begin()
            session.adopt([[part.part for part in of_rank] for of_rank in parts], document)
            session.publish(min(epochs, default=1))

    def _active_save(self) -> _SaveState:
        if self._save is None:
            raise StateError("set_up_storage_writer() comes before the other calls of a save")
        return self._save


def _write_item(part: PartSession, item: WriteItem, planner: SavePlanner) -> WriteResult:
    data = planner.resolve_data(item)
    extent = DenseExtent(0, 0, "bytes")
    if isinstance(data, io.BytesIO):
        part.native.append(np.frombuffer(data.getbuffer(), np.uint8))
    elif is_raw(data):
        extent = DenseExtent(0, 0, "raw", data.dtype, tuple(data.shape))
        for window in byte_windows(data.detach()):
            part.native.append(window)
    else:
        extent = DenseExtent(0, 0, "saved")
        part.native.append(np.frombuffer(serialize_tensor(data.detach()), np.uint8))
    stored = part.native.end_dense_extent()
    return WriteResult(item.index, stored.bytes, dataclasses.replace(extent, offset=stored.offset, bytes=stored.bytes))


def _tensor_bytes(item: WriteItem) -> int:
    """Returns the bytes of an item's tensor; 0 for an item that is not a tensor."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
