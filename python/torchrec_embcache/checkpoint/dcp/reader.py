"""The storage reader for `dcp.load`."""

import contextlib
import io
import os
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrec_embcache._dist.ranks import SingleRank, check_arguments_match
from torchrec_embcache._paths import check_path, open_to_load
from torchrec_embcache._saves_in_flight import wait_for_saves
from torchrec_embcache.checkpoint._load import LoadSession
from torchrec_embcache.checkpoint._progress import ProgressTracker
from torchrec_embcache.checkpoint._tensor_bytes import deserialize_tensor, read_box
from torchrec_embcache.exceptions import CorruptionError, MismatchError, StateError
from torchrec_embcache.model import suppress_state_dict_warnings
from torchrec_embcache.model._shards import shards_of

from ._metadata import DenseExtent, from_json
from ._paths import CheckpointPathMixin, rank_path

__all__ = ["EmbCacheStorageReader"]


@dataclass
class _LoadState:
    """A checkpoint that is being loaded."""

    session: LoadSession
    # True if this rank saved the checkpoint on its own.
    is_per_rank: bool


class EmbCacheStorageReader(CheckpointPathMixin, StorageReader):
    """Reads checkpoints of `EmbCacheStorageWriter` for `dcp.load`: into any sharding, dtype and device, tables into any budgets.

    Tensors are verified on reads. They are read without a copy if their target is contiguous host memory.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from torchrec_embcache import EmbCacheEmbedding, EmbCacheStorageReader, EmbCacheStorageWriter, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model = nn.ModuleDict({"item": item, "over": nn.Linear(2, 1)})
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> state = {"over": model["over"].state_dict()}
        >>> saved = dcp.save(state, storage_writer=EmbCacheStorageWriter("ckpt", model))
        >>> item.remove_rows([7])
        1
        >>> dcp.load(state, storage_reader=EmbCacheStorageReader("ckpt", model))
        >>> item.read_rows([7]).weights
        tensor([[1., 2.]])
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module | None = None, *, slots: bool = True) -> None:
        """`path`: the checkpoints' directory. `model`: its tables are loaded too; without it the checkpoint's tables are ignored.
        `slots=False`: loads only weights and metadata of the tables, as `Saver.load(..., slots=False)` does.

        Load before a pipeline takes its first batches. If the checkpoint does not fit the model (`MismatchError`) or its manifests
        are corrupted (`CorruptionError`), nothing is changed; DCP raises its `CheckpointException` with these errors.
        """
        super().__init__()
        self.path = check_path("path", path)
        self.model = model
        self.slots = slots
        suppress_state_dict_warnings(model)
        self.load_id = str(uuid.uuid4())
        self.storage_data: dict[MetadataIndex, DenseExtent] = {}
        self._load: _LoadState | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Sets the path of the following loads to `checkpoint_id`."""
        self._set_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self.storage_data = {}
        self._close_load()

    def _close_load(self) -> None:
        """Ends the load in progress, if there is one."""
        load, self._load = self._load, None
        if load is not None:
            load.session.close()

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the latest checkpoint; with `rank`, of the one this rank saved with `use_collectives=False`."""
        self._check_path()
        rank = kwargs.get("rank")
        directory = open_to_load(self.path)
        if rank is not None:
            directory = open_to_load(rank_path(directory, rank))
        with contextlib.ExitStack() as undo:
            session = undo.enter_context(LoadSession(SingleRank(), slots=self.slots))
            session.open(directory)
            reader = session.reader
            document = reader.dense_metadata()
            if document is None:
                raise MismatchError(f"the checkpoint {reader.name} in {directory} has tables only: load it with Saver")
            path = os.path.join(directory.path, reader.name, "dense.json")
            metadata = from_json(document, path, reader.stream_bytes())
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            self._close_load()
            self._load = _LoadState(session, is_per_rank=rank is not None)
            undo.pop_all()
            return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, **kwargs: Any) -> None:  # noqa: ARG002
        """Stores the location of the items from the `metadata` returned by `read_metadata`."""
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks that the model's tables fit, before any rank changes anything."""
        load = self._active_load()
        if self.model is not None:
            try:
                shards = shards_of(self.model)
                wait_for_saves()
                load.session.check(shards)
            except BaseException:
                self._close_load()
                raise
        if not load.is_per_rank:
            arguments = {"model": "given" if self.model is not None else "left out", "slots": str(bool(self.slots))}
            plan.storage_data = load.session.reader.name, arguments
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks opened the same checkpoint, which a concurrent save may have replaced, with the same arguments.

        Raises `StateError`, or `InputError` if the arguments of the ranks' readers differ.
        """
        said = [plan.storage_data for plan in plans if plan.storage_data is not None]
        names = {name for name, _ in said}
        if said:
            check_arguments_match([("EmbCacheStorageReader", arguments) for _, arguments in said])
        if len(names) > 1:
            raise StateError(
                f"a save replaced the checkpoint in {self.checkpoint_id} while ranks opened it ({sorted(names)}): load again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items and tables."""
        load = self._active_load()
        with load.session as session:
            for item in sorted(plan.items, key=self._stream_offset):
                self._read_item(session, item, planner)
            if self.model is not None:
                session.load(lambda: ProgressTracker(None, "load"))
            session.close()
        self._load = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _active_load(self) -> _LoadState:
        if self._load is None:
            raise StateError("read_metadata() comes before the other calls of a load")
        return self._load

    def _dense_extent(self, item: ReadItem) -> DenseExtent:
        extent = self.storage_data.get(item.storage_index)
        if extent is None:
            raise CorruptionError(
                f"the checkpoint in {self.checkpoint_id} does not say where {item.storage_index} is stored"
            )
        return extent

    def _stream_offset(self, item: ReadItem) -> tuple[int, int]:
        extent = self._dense_extent(item)
        return extent.rank, extent.offset

    def _read_item(self, session: LoadSession, item: ReadItem, planner: LoadPlanner) -> None:
        extent = self._dense_extent(item)

        def read(start: int, into: NDArray[np.uint8]) -> None:
            session.reader.read_dense(extent.rank, extent.offset + start, into)

        def read_all() -> NDArray[np.uint8]:
            into = np.empty(extent.bytes, np.uint8)
            read(0, into)
            return into

        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(read_all().data))
            return
        target = planner.resolve_tensor(item)
        # The tensor is narrowed like in torch: a dimension of the full length starts at 0.
        if extent.kind == "raw" and extent.dtype is not None:
            self._check_box(item, extent.shape, target)
            read_box(read, extent.dtype, extent.shape, tuple(item.storage_offsets), target.detach())
        else:
            saved = deserialize_tensor(read_all())
            self._check_box(item, saved.shape, target)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                if length < saved.size(dim):
                    saved = saved.narrow(dim, offset, length)
            with torch.no_grad():
                target.copy_(saved)
        planner.commit_tensor(item, target)

    def _check_box(self, item: ReadItem, shape: tuple[int, ...], target: torch.Tensor) -> None:
        """Raises `MismatchError` unless the item is a box inside a saved tensor of this shape and its target has its shape."""
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        within = len(offsets) == len(lengths) == len(shape) and all(
            offset >= 0 and length >= 0 and offset + length <= whole
            for offset, length, whole in zip(offsets, lengths, shape, strict=True)
        )
        if not within or tuple(target.shape) != lengths:
            raise MismatchError(
                f"{item.storage_index.fqn!r}: {list(lengths)} at {list(offsets)} of {list(shape)} cannot go into "
                f"{list(target.shape)}"
            )
