"""The storage writer: what `dcp.save` and `dcp.async_save` write checkpoints by."""

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
from torchrec_embcache.collective import check_arguments_match
from torchrec_embcache.exceptions import StateError, UnsupportedError
from torchrec_embcache.paths import CheckpointDirectory, check_path, open_to_save
from torchrec_embcache.sessions.part import PartSession
from torchrec_embcache.sessions.ranks import SingleRank
from torchrec_embcache.sessions.save import SaveSession
from torchrec_embcache.tensor_bytes import byte_windows, is_raw, serialize_tensor
from torchrec_embcache.whole_model import suppress_state_dict_warnings

from .metadata import DenseExtent, to_json
from .paths import CheckpointPathMixin, has_checkpoint, open_rank_to_save
from .tables import PartResult, StagedTables, TableWriter
from .threads import check_async_save_group

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
    # Held until the save is over, so that no other save sweeps it.
    part: PartSession | None = None

    # Both are checked and made at their first use. All of this save works in what their paths lead to then.

    @functools.cached_property
    def root(self) -> CheckpointDirectory:
        """The directory at `path`."""
        return open_to_save(self.path)

    @functools.cached_property
    def directory(self) -> CheckpointDirectory:
        """The directory of the checkpoints: that at `path`, or where each rank saves alone this rank's own below it."""
        return self.root if self.use_collectives else open_rank_to_save(self.root, self.rank)


class EmbCacheStorageWriter(CheckpointPathMixin, BlockingAsyncStager, StorageWriter):
    """Writes what `dcp.save` and `dcp.async_save` are given, and a model's tables, as one checkpoint of this package.

    One save at a time goes through a writer; it may be used for any number of saves, each of which replaces the checkpoint before.

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
        """`path`: the checkpoints' directory, the same on every rank, by the rules of `Saver(path_checks="basic")`. `model`: its
        tables are saved too.

        `overwrite=False` refuses a `path` that holds a checkpoint (`StateError`). `cache_staged_state_dict` keeps the memory that
        `dcp.async_save` copies dense tensors into for the next one, pinned where there is a device.

        `single_file_per_rank`, `sync_files`, `thread_count` and `per_thread_copy_ahead` are those of torch's `FileSystemWriter`, in
        whose place this class can stand by its name alone. They change nothing: every save is synced, and divided by bytes.
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
        """The configuration, and the name of the part with the tables that were staged: for the process that saves."""
        return {**self.__dict__, "model": None, "state_dict_cache": None, "_save": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save to `checkpoint_id`, a path, from now on."""
        self._set_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """For `dcp.async_save`: a copy of `state_dict` in host memory, and the tables' rows, as of now.

        `InputError` where several ranks save in threads and `async_save` was given no process group of its own.
        """
        check_async_save_group()
        # The tables first, because there ranks may wait for each other, and what comes before may fail on one of them.
        self._tables.stage(self.path, self._check_path)
        try:
            staged: dict[str, Any] = super().stage(state_dict)
        except BaseException:
            self._tables.close()
            raise
        return staged

    def close(self) -> None:
        """Forget what was staged and not saved. What a failed save has written is no longer held, so that a later save removes
        it.
        """
        self._tables.close()
        self._save = None
        self.state_dict_cache: dict[str, Any] | None = None

    def storage_meta(self) -> StorageMeta:
        """The checkpoint's path and this save's id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin a save, as `rank` of those that save together. `PathError` where `reset` was given no path."""
        self._check_path()
        staged = self._tables.take_staged()
        self._save = _SaveState(self.path, kwargs.get("rank") or 0, kwargs.get("use_collectives", True), staged)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, with what all ranks have to give alike."""
        self._active_save()
        return dataclasses.replace(plan, storage_data={"model": "given" if self._tables.has_model else "left out"})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the directory, and remove what killed saves left there. The coordinator does this before any rank writes.

        `InputError` where some ranks give a model and others do not.
        """
        save = self._active_save()
        with self._abandon_on_error(save):
            self._prepare(save, plans)
        return plans

    def _prepare(self, save: _SaveState, plans: list[SavePlan]) -> None:
        # A plan that DCP has cached says nothing.
        if said := [plan.storage_data for plan in plans if plan.storage_data is not None]:
            check_arguments_match([("EmbCacheStorageWriter", each) for each in said])
        if not save.use_collectives:
            if self._tables.has_model and dist.is_initialized() and dist.get_world_size() > 1:
                raise UnsupportedError(
                    "use_collectives=False saves each rank alone, and tables are whole over all: leave model out"
                )
            if has_checkpoint(save.root):
                raise StateError(
                    f"{self.path!r} holds a checkpoint of all ranks, which a load would find first: "
                    "give use_collectives=False a path of its own"
                )
        if not self.overwrite and has_checkpoint(save.directory):
            raise StateError(f"Checkpoint already exists in {save.directory} and overwrite=False: give another path")
        _native.remove_stale_parts(save.directory)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and tables durably into a part, which the coordinator takes over in `finish`.

        Before that, tables that are swept at saves are swept. Here, because all ranks come here or none: where one fails before,
        in its planner for one, DCP has ended the save on all. So no rank waits for another that does not sweep.
        """
        save = self._active_save()
        with self._abandon_on_error(save):
            if save.staged is None:
                self._tables.sweep()
            save.part = part = PartSession()
            part.begin(save.directory, expected_bytes=sum(_tensor_bytes(item) for item in plan.items))
            results = [_write_item(part, item, planner) for item in plan.items]
            epoch = self._tables.write(part) if save.staged is None else None
            parts = [PartResult(part.finish(), epoch)]
            if save.staged is not None:
                parts.append(save.staged.result())
        results += [WriteResult(MetadataIndex(each.part.name), 0, each) for each in parts]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Gather the ranks' parts into a checkpoint and publish it. Until then a load finds the one before."""
        save = self._active_save()
        with self._abandon_on_error(save):
            self._publish(save.directory, metadata, results)
        self._save = None

    @contextlib.contextmanager
    def _abandon_on_error(self, save: _SaveState) -> Iterator[None]:
        """Abandon this rank's parts where an error or an interrupt ends the save."""
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
        # The least epoch counts, so that rows that any rank trains from now on count as modified after this checkpoint.
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
        part.append(np.frombuffer(data.getbuffer(), np.uint8))
    elif is_raw(data):
        extent = DenseExtent(0, 0, "raw", data.dtype, tuple(data.shape))
        for window in byte_windows(data.detach()):
            part.append(window)
    else:
        extent = DenseExtent(0, 0, "saved")
        part.append(np.frombuffer(serialize_tensor(data.detach()), np.uint8))
    stored = part.end_dense_extent()
    return WriteResult(item.index, stored.bytes, dataclasses.replace(extent, offset=stored.offset, bytes=stored.bytes))


def _tensor_bytes(item: WriteItem) -> int:
    """Bytes of an item's tensor; 0 for one that is none."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
