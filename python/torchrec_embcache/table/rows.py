"""Rows in Python: chunks of exports, values of imports, and conversions to arrays.

Shapes: n rows, D the table's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torchrec_embcache import _native
from torchrec_embcache.exceptions import InputError, UnsupportedError
from torchrec_embcache.optimizers import OptimizerSpec

__all__ = [
    "MAX_CLICKS",
    "EvictedRows",
    "FoundRows",
    "IdsLike",
    "RowChunk",
    "RowExport",
    "RowMetadata",
    "ValuesLike",
    "as_array",
    "check_dense",
    "check_float32",
    "check_not_recording",
    "clicks_array",
    "contiguous",
    "float32_array",
    "ids_array",
    "import_columns",
    "row_ids",
    "row_parts",
]

#: Maximum number of clicks of one occurrence.
MAX_CLICKS = (1 << 24) - 1

#: Ids [n]: 64-bit integers.
IdsLike = Tensor | NDArray[Any] | Sequence[int]
#: Numbers of one or more rows; may be nested lists.
ValuesLike = Tensor | NDArray[Any] | Sequence[Any]


def ids_array(ids: object, field: str, device: torch.device) -> NDArray[np.int64]:
    """Returns ids of any shape as a flat int64 array.

    Raises `InputError`, which names `field`, unless they are an int32 or int64 tensor on the CPU or on `device`.
    """
    if not isinstance(ids, Tensor):
        raise InputError(f"{field} is a {type(ids).__name__}: give a tensor of int64 or int32 ids")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{field} has dtype {ids.dtype}: give int64 or int32")
    check_dense(field, ids)
    if ids.device.type != "cpu" and ids.device != device:
        raise InputError(f"{field} is on {ids.device} and the table on {device}: move one of them")
    flat: NDArray[np.int64] = contiguous(ids.detach().to("cpu", torch.int64).reshape(-1)).numpy()
    return flat


def clicks_array(clicks: object, field: str, count: int) -> NDArray[np.uint32]:
    """Returns the clicks of `count` occurrences, from a tensor of any shape with `count` numbers: uint32 [count].

    Raises `InputError`, which names `field`, unless they are integers from 0 to 2^24 - 1. Float and boolean dtypes are accepted.
    """
    if not isinstance(clicks, Tensor):
        raise InputError(f"{field} is a {type(clicks).__name__}: give a tensor, a number for each id")
    check_dense(field, clicks)
    if clicks.numel() != count:
        raise InputError(f"{field} has {clicks.numel()} numbers for {count} ids: give each id one")
    given = contiguous(clicks.detach().cpu().reshape(-1))
    exact = given.to(torch.int64)
    wrong = (exact != given) | (exact < 0) | (exact > MAX_CLICKS)
    if bool(wrong.any()):
        raise InputError(f"{field} holds {given[wrong][0].item()}: give integers from 0 to {MAX_CLICKS}")
    return exact.numpy().astype(np.uint32)


def check_dense(field: str, tensor: Tensor) -> None:
    """Raises `InputError` for a tensor without data or without strided layout: sparse, nested, meta and fake tensors.

    Also raises the errors of `check_not_recording`.
    """
    kind = None
    if tensor.is_nested:
        kind = "nested: give tensor.values()"
    elif tensor.layout is not torch.strided:
        kind = f"{str(tensor.layout).removeprefix('torch.')}: give tensor.to_dense()"
    elif tensor.is_meta:
        kind = "on the device meta, where no numbers are: give the real tensor"
    elif isinstance(tensor, FakeTensor):
        kind = "a FakeTensor, which has no numbers: give the real one, and keep the table out of what is traced with fake tensors"
    if kind is not None:
        raise InputError(f"{field} is {kind}")
    check_not_recording(field)


def check_not_recording(field: str) -> None:
    """Raises `UnsupportedError` if torch is tracing or transforming the call, and would not see the lookup of `field`."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UnsupportedError(
            f"{field} is given under torch.jit.trace, which would record the rows of these ids in place of the lookup: use "
            "torchrec.fx.symbolic_trace, or torch.export of tables that are served (docs/serving.md)"
        )
    # While dynamo compiles the caller, the stack contains its own transforms.
    in_transform = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack()  # noqa: SLF001 - no public way
    if in_transform:
        raise UnsupportedError(
            f"{field} is given under torch.vmap or a transform of torch.func, such as grad, which cannot see the lookup: look the "
            "rows up before, and transform what is computed of them"
        )


def contiguous(tensor: Tensor) -> Tensor:
    """Returns the tensor with contiguous memory, as fbgemm and the native extension read it. Differentiable.

    A strided view, or one with lazy negation or conjugation, is copied. Other tensors are returned unchanged.
    """
    return tensor.contiguous().resolve_conj().resolve_neg()


def row_ids(ids: object, device: torch.device) -> NDArray[np.int64]:
    """Returns the ids of rows as an int64 array [n], from a tensor, a numpy array or a list of integers.

    A `uint64` array is reinterpreted, because an id is any 64-bit integer. Raises `InputError` for values that are not integers.
    """
    if isinstance(ids, Tensor):
        return ids_array(ids, "ids", device)
    array = as_array("ids", ids)
    if array.size == 0 and not isinstance(ids, np.ndarray):
        return np.empty(0, np.int64)  # numpy converts an empty list to floats
    if array.dtype.kind not in "iu":
        raise InputError(f"ids has dtype {array.dtype}: give integers, as an int64 tensor or array or a list of int")
    return np.ascontiguousarray(array.reshape(-1)).astype(np.int64, casting="unsafe")


def check_float32(field: str, value: object, shape: tuple[int, ...]) -> None:
    """Raises `InputError` unless `value` is a float32 tensor of `shape`."""
    if not isinstance(value, Tensor):
        raise InputError(f"{field} is a {type(value).__name__}: give a float32 tensor {list(shape)}")
    if value.dtype != torch.float32 or tuple(value.shape) != shape:
        raise InputError(f"{field} has shape {list(value.shape)} and dtype {value.dtype}: give float32 {list(shape)}")
    check_dense(field, value)


def float32_array(field: str, value: object, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns numbers of `shape` as a float32 array, from a tensor, a numpy array or nested lists of any floating or integer dtype.

    float64 is rounded to float32. Raises `InputError` for another shape, for values that are not numbers, and for a finite number
    that is too large for float32.
    """
    if isinstance(value, Tensor):
        check_dense(field, value)
        tensor = contiguous(value.detach().cpu())
        # numpy lacks some of torch's floating dtypes.
        array = tensor.float().numpy() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor.numpy()
    else:
        array = as_array(field, value)
    if array.size == 0 and 0 in shape and not isinstance(value, Tensor | np.ndarray):
        array = array.reshape(shape)
    if array.dtype.kind not in "fiu" or array.shape != shape:
        raise InputError(
            f"{field} has shape {list(array.shape)} and dtype {array.dtype}: give numbers {list(shape)}, as a float32 tensor, a "
            "numpy array or lists"
        )
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, np.float32)
    if array.dtype != np.float32 and bool((np.isinf(narrow) & np.isfinite(array)).any()):
        raise InputError(f"{field} holds numbers that float32 does not: give at most 3.4e38")
    return narrow


def import_columns(
    spec: OptimizerSpec,
    dim: int,
    count: int,
    weights: ValuesLike,
    slots: Mapping[str, ValuesLike] | None,
    metadata: RowMetadata | None,
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None, _native.RowMetadata | None]:
    """Returns the vector parts [n, V], the scalar slots [n] and the metadata of n = `count` rows to import, in native form.

    Omitted slots are zeros.
    """
    if not isinstance(metadata, RowMetadata | None):
        raise InputError(f"metadata is a {type(metadata).__name__}: give RowMetadata, or leave it out")
    if not isinstance(slots, Mapping | None):
        raise InputError(
            f"slots is a {type(slots).__name__}: give tensors by name, or arrays or lists, or leave it out"
        )
    if slots is not None and set(slots) != set(spec.slot_names):
        raise InputError(f"slots has {sorted(slots)} and {spec.display_name} has {sorted(spec.slot_names)}: give these")
    vectors = np.zeros((count, spec.vector_floats(dim)), np.float32)
    vectors[:, :dim] = float32_array("weights", weights, (count, dim))
    scalars = None
    for number, name in enumerate(spec.slot_names if slots is not None else ()):
        assert slots is not None, "the loop is empty without slots"
        if number < spec.vector_slots:
            begin = dim * (1 + number)
            vectors[:, begin : begin + dim] = float32_array(name, slots[name], (count, dim))
        else:
            scalars = float32_array(name, slots[name], (count,))
    return vectors, scalars, metadata.native(count) if metadata is not None else None


def as_array(field: str, value: object) -> NDArray[Any]:
    """Returns numbers as an array. Raises `InputError`, which names `field`, for other values."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as cause:
        raise InputError(f"{field} is not an array of numbers: {cause}") from cause
    if array.dtype.kind in "OUSV":
        raise InputError(f"{field} is a {type(value).__name__} of {array.dtype}: give numbers")
    return array


@dataclass(frozen=True)
class RowMetadata:
    """Metadata of n rows.

    - `count`, int64 [n]: number of occurrences of the row's id in training batches.
    - `last_step`, int64 [n]: the table's step at which the row was last trained.
    - `score`, float32 [n]: the decayed number of occurrences.
    - `modified_epoch`, int64 [n]: the checkpoint epoch in which the row was last trained.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import RowMetadata
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
        >>> table = CacheTable(
        ...     name="item", dim=2, tiers=TierBudgets(host_bytes="1MiB"), initializer=initializers.Constant(0.5),
        ...     optimizer=optimizers.RowWiseAdagrad(lr=0.1),
        ... )
        >>> used = RowMetadata(
        ...     count=torch.tensor([3]), last_step=torch.tensor([40]), score=torch.tensor([2.5]), modified_epoch=torch.tensor([0])
        ... )
        >>> table.import_rows([7], [[1.0, 2.0]], metadata=used)
        >>> table.read_rows([7]).metadata.count
        tensor([3])
    """

    count: Tensor
    last_step: Tensor
    score: Tensor
    modified_epoch: Tensor

    @classmethod
    def from_native(cls, native: _native.RowMetadata) -> Self:
        """Converts the native arrays."""

        def to_int64(column: NDArray[Any]) -> Tensor:
            return torch.from_numpy(column.astype(np.int64))

        return cls(
            count=to_int64(native.count),
            last_step=to_int64(native.last_step),
            score=torch.from_numpy(native.score),
            modified_epoch=to_int64(native.modified_epoch),
        )

    def native(self, rows: int) -> _native.RowMetadata:
        """Returns the native form. Raises `InputError` if there are not `rows` entries, and for values out of range."""

        def column(field: str, bits: int) -> NDArray[np.int64]:
            values = self._column(field)
            if values.shape != (rows,) or values.is_floating_point() or values.is_complex():
                raise InputError(
                    f"metadata.{field} has shape {tuple(values.shape)} of {values.dtype}: give int64 [{rows}]"
                )
            if rows and (int(values.min()) < 0 or int(values.max()) >= 1 << bits):
                raise InputError(
                    f"metadata.{field} holds {int(values.min())} to {int(values.max())}: give 0 to 2^{bits} - 1"
                )
            return values.numpy()

        score = self._column("score")
        if score.shape != (rows,) or score.dtype != torch.float32:
            raise InputError(f"metadata.score has shape {tuple(score.shape)} of {score.dtype}: give float32 [{rows}]")
        return _native.RowMetadata(
            column("count", 32).astype(np.uint32),
            column("last_step", 63).astype(np.uint64),
            score.numpy(),
            column("modified_epoch", 32).astype(np.uint32),
        )

    def _column(self, field: str) -> Tensor:
        """Returns a field as a contiguous tensor in RAM. Raises `InputError` if it is not a tensor of numbers."""
        values = getattr(self, field)
        if not isinstance(values, Tensor):
            raise InputError(f"metadata.{field} is a {type(values).__name__}: give a tensor")
        check_dense(f"metadata.{field}", values)
        return contiguous(values.detach().cpu())


@dataclass(frozen=True)
class RowChunk:
    """A chunk of n rows with their slots and metadata, in newly allocated CPU memory.

    - `ids`, int64 [n].
    - `weights`, float32 [n, D].
    - `slots`: the optimizer's slots by torch's names, such as "exp_avg"; float32 [n, D] each. Rowwise Adagrad's "sum" and partial
      rowwise Adam's "exp_avg_sq" are [n].
    - `metadata`: see `RowMetadata`.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
        >>> table = CacheTable(
        ...     name="item", dim=2, tiers=TierBudgets(host_bytes="1MiB"), initializer=initializers.Constant(0.5),
        ...     optimizer=optimizers.RowWiseAdagrad(lr=0.1),
        ... )
        >>> table.import_rows([7, -1], [[1.0, 2.0], [3.0, 4.0]])
        >>> [(len(chunk), tuple(chunk.weights.shape), tuple(chunk.slots["sum"].shape)) for chunk in table.export()]
        [(2, (2, 2), (2,))]
        >>> list(next(table.export()).to_numpy())
        ['ids', 'weights', 'sum', 'count', 'last_step', 'score', 'modified_epoch']
    """

    ids: Tensor
    weights: Tensor
    slots: dict[str, Tensor]
    metadata: RowMetadata

    def __len__(self) -> int:
        return len(self.ids)

    def to_numpy(self) -> dict[str, NDArray[Any]]:
        """Returns the columns as numpy arrays that share the memory, by name: "ids", "weights", each slot, and each metadata field.

        For example `np.savez("rows.npz", **chunk.to_numpy())`.
        """
        columns = {"ids": self.ids, "weights": self.weights, **self.slots}
        columns |= {field.name: getattr(self.metadata, field.name) for field in fields(self.metadata)}
        return {name: values.numpy() for name, values in columns.items()}


@dataclass(frozen=True)
class FoundRows(RowChunk):
    """Rows read by id, in the order of the ids.

    If `found` (bool [n]) is False, the id has no row, and the weights are its initial value.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
        >>> table = CacheTable(
        ...     name="item", dim=2, tiers=TierBudgets(host_bytes="1MiB"), initializer=initializers.Constant(0.5),
        ...     optimizer=optimizers.RowWiseAdagrad(lr=0.1),
        ... )
        >>> table.import_rows([7], [[1.0, 2.0]])
        >>> rows = table.read_rows([8, 7])
        >>> rows.found, rows.weights
        (tensor([False,  True]), tensor([[0.5000, 0.5000],
                [1.0000, 2.0000]]))
        >>> rows.to_numpy()["found"]
        array([False,  True])
    """

    found: Tensor

    def to_numpy(self) -> dict[str, NDArray[Any]]:
        """Returns the columns of `RowChunk.to_numpy`, and "found"."""
        return super().to_numpy() | {"found": self.found.numpy()}


@dataclass(frozen=True)
class EvictedRows(RowChunk):
    """Rows that were evicted from a table by a rule or because it was full, with their last values. At most 65,536 rows.

    - `table`: the table's name.
    - `step`: the training step after which they were evicted.
    - `reason`: the kind of the first rule that matched, "ttl", "score", "l2_norm", "lowest" (`Keep`, `Share`) or "all", or "full"
      if `on_full="evict"` dropped them.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, optimizers
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     eviction=eviction.Policy([eviction.Ttl(steps=1)], every_steps=2), on_evict="keep",
        ... )
        >>> for id in (7, 8):
        ...     item(torch.tensor([id])).sum().backward()
        >>> [(rows.table, rows.step, rows.reason, rows.ids.tolist()) for rows in item.table.drain_evicted()]
        [('item', 2, 'ttl', [7])]
    """

    table: str = field(kw_only=True)
    step: int = field(kw_only=True)
    reason: str = field(kw_only=True)


def row_parts(
    spec: OptimizerSpec, dim: int, vectors: NDArray[np.float32], scalars: NDArray[np.float32]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the weights [n, D] and the slots of n native rows: vector parts [n, V] and scalar slots [n]."""
    columns = torch.split(torch.from_numpy(vectors), dim, 1)
    slots = {name: part.contiguous() for name, part in zip(spec.slot_names, columns[1:], strict=False)}
    if spec.scalar_slot():
        slots[spec.slot_names[-1]] = torch.from_numpy(scalars)
    return columns[0].contiguous(), slots


class RowExport(Iterator[RowChunk]):
    """The rows of a table, chunk by chunk: the result of `CacheTable.export`.

    Examples:
        >>> from torchrec_embcache import CacheTable, TierBudgets, initializers, optimizers
        >>> table = CacheTable(
        ...     name="item", dim=2, tiers=TierBudgets(host_bytes="1MiB"), initializer=initializers.Constant(0.5),
        ...     optimizer=optimizers.RowWiseAdagrad(lr=0.1),
        ... )
        >>> table.import_rows([7, -1], [[1.0, 2.0], [3.0, 4.0]])
        >>> table.export().to_numpy()["weights"].shape  # [n, D]
        (2, 2)
    """

    def __init__(self, chunks: Iterator[RowChunk], empty: Callable[[], RowChunk]) -> None:
        """`empty` creates a chunk without rows, which defines the columns of `to_numpy` for an empty table."""
        self._chunks = chunks
        self._empty = empty

    def __next__(self) -> RowChunk:
        return next(self._chunks)

    def to_numpy(self) -> dict[str, NDArray[Any]]:
        """Returns the columns of all remaining chunks, concatenated in RAM, by name; see `RowChunk.to_numpy`."""
        parts = [self._empty().to_numpy(), *(chunk.to_numpy() for chunk in self)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
