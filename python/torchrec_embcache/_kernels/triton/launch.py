"""Arguments of the kernels, and their launches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache._device.pinned import copy_staged_to_device, staging_empty
from torchrec_embcache.exceptions import UnsupportedError

from .gradients import gradient_places, gradient_sums
from .lookups import pooled_rows, sequence_rows, weight_gradients
from .moves import move_rows
from .updates import update_by_columns, update_by_rows

if TYPE_CHECKING:
    from torchrec_embcache._device.tier import DeviceTier
    from torchrec_embcache._hyperparameters import Hyperparameters

__all__ = [
    "BY_COLUMNS",
    "BY_ROWS",
    "EXACT",
    "IS_INTERPRETED",
    "ColumnLayout",
    "DeviceBags",
    "DeviceGradients",
    "DeviceTransfer",
    "DistinctRows",
    "OccurrenceRanges",
    "fill_weight_gradients",
    "find_gradients",
    "gather_rows",
    "pool_rows",
    "read_sequence",
    "scatter_rows",
    "send",
    "sum_gradients",
    "tier_addresses",
    "update_numbers",
    "update_rows",
]

# Triton decides this when a kernel is declared.
IS_INTERPRETED = not isinstance(move_rows, triton.JITFunction)

# The optimizers that require a sum over a row, and those that do not.
BY_ROWS = ("rowwise_adagrad", "partial_rowwise_adam", "lamb")
BY_COLUMNS = ("sgd", "adagrad", "adam", "adamw", "ftrl")

# Maximum number of columns of a row that a program holds in registers.
_MAX_BLOCK = 1024
# Registers per thread in updates that need many: a multiprocessor then runs 24 warps.
_MAX_REGISTERS = 80
# Triton's compiler for ROCm, whose devices torch also calls "cuda", rejects this option.
_HAS_MAX_REGISTERS = torch.version.hip is None
# Floats that a program copies if rows are short.
_COPY_BLOCK = 1024


@dataclass(frozen=True)
class ColumnLayout:
    """The division of a row's D columns: `blocks` blocks of `block` columns."""

    dim: int

    @property
    def block(self) -> int:
        """Columns of a row that a program processes at a time."""
        return min(max(16, 1 << (self.dim - 1).bit_length()), _MAX_BLOCK)

    @property
    def blocks(self) -> int:
        """Number of blocks per row."""
        return -(-self.dim // self.block)

    @property
    def rows_in_flight(self) -> int:
        """Rows that a program loads before it adds the first of them. More would not fit a thread's registers."""
        if IS_INTERPRETED:
            return 2  # sequential in any case
        return max(4, min(16, 1024 // self.block))

    @property
    def rows(self) -> int:
        """Rows that a program copies."""
        return max(1, _COPY_BLOCK // self.block)

    @property
    def options(self) -> dict[str, Any]:
        """Compile options of kernels over one row."""
        return {"num_warps": max(1, self.block // 128), **EXACT}

    @property
    def options_of_update(self) -> dict[str, Any]:
        """Compile options of updates.

        The assembler minimizes registers so that more programs run concurrently. For rows that are unaligned or wider than a block,
        it then spills registers to memory. An explicit register limit avoids that.
        """
        if _HAS_MAX_REGISTERS and (self.blocks > 1 or self.dim % 4):
            return {**self.options, "maxnreg": _MAX_REGISTERS}
        return self.options


# No multiplication is fused with an addition, because the Rust kernels fuse none.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class DeviceBags:
    """The bags of a batch on the device.

    `offsets` int32 [F * B + 1]; `weights` float32 [N] or None; `bags`: B; `columns`: C; `aligned`: 4 if it divides the widths of
    all features, else 1.
    """

    offsets: Tensor
    weights: Tensor | None
    bags: int
    columns: int
    aligned: int


@dataclass(frozen=True)
class DeviceGradients:
    """The gradients of a batch on the device: `grad` float32 [B, C], or [N, D] if the other two are None.

    `places` int64 [N]: start of each occurrence's gradient in `grad`. `scale` float32 [N]: its factor; None: 1. `aligned` divides
    the places.
    """

    grad: Tensor
    aligned: int = 1
    places: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True)
class OccurrenceRanges:
    """Ranges of occurrences on the device, by their begin and end: both int32 [n]."""

    begins: Tensor
    ends: Tensor


@dataclass(frozen=True)
class DistinctRows:
    """The distinct rows of tables of one width, all int32 on the device.

    `tables` [U]: index of each row's table among the tables of the launch. `slots` [U], -1 for a row that is not updated. The
    occurrences of row u are `occurrences[starts[u]:starts[u + 1]]`.
    """

    tables: Tensor
    slots: Tensor
    starts: Tensor
    occurrences: Tensor


# The interpreter shares one grid between all threads.
_INTERPRETER = threading.RLock()


def _launch_context(device: torch.device) -> AbstractContextManager[Any]:
    """Context of a launch: Triton launches on the current device, and interprets one kernel at a time."""
    made: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else _INTERPRETER
    return made


class DeviceTransfer:
    """Arrays to be copied to a device. They are filled in memory that the device can read, and transferred by one copy.

    `kinds` has the dtype and the length of each. `arrays` must be filled before `send`, and not changed afterwards.
    """

    def __init__(self, device: torch.device, kinds: Sequence[tuple[Any, int]]) -> None:
        self._device = device
        sizes = [np.dtype(dtype).itemsize * count for dtype, count in kinds]
        starts = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
        self._staged = staging_empty((starts[-1],), torch.uint8, device)
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        memory = self._staged.numpy()
        of_kinds = zip(kinds, self._places, strict=True)
        self.arrays: list[NDArray[Any]] = [memory[place].view(dtype) for (dtype, _), place in of_kinds]

    def send(self) -> list[Tensor]:
        """Returns the arrays on the device. On CUDA the copy is queued on the caller's stream, without waiting."""
        there = copy_staged_to_device(self._staged, self._device)
        types = [torch.from_numpy(array[:0]).dtype for array in self.arrays]
        return [there[place].view(dtype) for place, dtype in zip(self._places, types, strict=True)]


def send(device: torch.device, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Copies `arrays` to the device with `DeviceTransfer`, each as a vector."""
    sending = DeviceTransfer(device, [(array.dtype, array.size) for array in arrays])
    for memory, array in zip(sending.arrays, arrays, strict=True):
        memory[:] = array.reshape(-1)
    return sending.send()


def tier_addresses(tier: DeviceTier) -> list[int]:
    """Returns the addresses of a tier's weights, its two vector slots, and its scalar slot, with 0 for missing slots.

    Kernels receive these addresses instead of tensors. They are valid until another thread may replace the tensors.
    """
    vectors = [slot.data_ptr() for slot in tier.vector_slots]
    scalars = tier.scalars.data_ptr() if tier.scalars is not None else 0
    return [tier.weights.data_ptr(), *vectors, *[0] * (2 - len(vectors)), scalars]


def pool_rows(dim: int, members: Tensor, features: Tensor, slots: Tensor, bags: DeviceBags, out: Tensor) -> None:
    """Fills the columns of `members` [m], features of one width, in `out` [B, C]."""
    columns = ColumnLayout(dim)
    weighted = bags.weights is not None
    with _launch_context(out.device):
        pooled_rows[(bags.bags, len(members), columns.blocks)](
            members, features, slots, bags.offsets, bags.weights if weighted else out, out, bags.bags, bags.columns,
            D=dim, BLOCK=columns.block, ALIGNED=bags.aligned, WEIGHTED=weighted, AT_ONCE=columns.rows_in_flight, **columns.options,
        )  # fmt: skip


def read_sequence(dim: int, features: Tensor, slots: Tensor, starts: Tensor, longest: int, out: Tensor) -> None:
    """Fills `out` [N, D] with the rows of all occurrences. `longest`: maximum number of occurrences of a feature."""
    columns = ColumnLayout(dim)
    with _launch_context(out.device):
        sequence_rows[(-(-longest // columns.rows), len(starts) - 1, columns.blocks)](
            features, slots, starts, out, D=dim, BLOCK=columns.block, ROWS=columns.rows, num_warps=4, **EXACT,
        )  # fmt: skip


def fill_weight_gradients(
    dim: int, members: Tensor, features: Tensor, slots: Tensor, bags: DeviceBags, grad: Tensor, out: Tensor
) -> None:
    """Fills the entries of `members` [m], features of one width, in the gradient `out` [N] of the per-sample weights."""
    columns = ColumnLayout(dim)
    with _launch_context(out.device):
        weight_gradients[(bags.bags, len(members))](
            members, features, slots, bags.offsets, grad, out, bags.bags, bags.columns,
            D=dim, BLOCK=columns.block, BLOCKS=columns.blocks, ALIGNED=bags.aligned, **columns.options,
        )  # fmt: skip


def find_gradients(features: Tensor, bags: DeviceBags, occurrences: int, grad: Tensor, scaled: bool) -> DeviceGradients:
    """Finds the gradient of each occurrence in `grad` [B, C]. `scaled`: bags are weighted or averaged."""
    places = torch.empty(occurrences, dtype=torch.int64, device=grad.device)
    scale = torch.empty(occurrences if scaled else 0, dtype=torch.float32, device=grad.device)
    weighted = bags.weights is not None
    with _launch_context(grad.device):
        gradient_places[(bags.bags, len(features) // 4)](
            features, bags.offsets, bags.weights if weighted else grad, places, scale, bags.bags, bags.columns,
            SCALED=scaled, WEIGHTED=weighted, BLOCK=32, num_warps=1, **EXACT,
        )  # fmt: skip
    return DeviceGradients(grad, bags.aligned, places, scale if scaled else None)


def _gradient_arguments(gradients: DeviceGradients) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """Returns the arguments and the flags of a kernel that reads gradients."""
    grad, places, scale = gradients.grad, gradients.places, gradients.scale
    flags = {"ALIGNED": gradients.aligned, "POOLED": places is not None, "SCALED": scale is not None}
    return (grad, places if places is not None else grad, scale if scale is not None else grad), flags


def sum_gradients(
    dim: int, ranges: OccurrenceRanges, occurrences: Tensor, gradients: DeviceGradients
) -> DeviceGradients:
    """Returns the sums of the gradients of each non-empty range of `occurrences`, int32 [N']: [n, D]."""
    columns = ColumnLayout(dim)
    out = torch.empty(len(ranges.begins), dim, dtype=torch.float32, device=occurrences.device)
    arguments, flags = _gradient_arguments(gradients)
    with _launch_context(out.device):
        gradient_sums[(len(out), columns.blocks)](
            ranges.begins, ranges.ends, occurrences, *arguments, out,
            D=dim, BLOCK=columns.block, AT_ONCE=columns.rows_in_flight, **flags, **columns.options,
        )  # fmt: skip
    return DeviceGradients(out)


def update_rows(
    kind: str, dim: int, tiers: Tensor, numbers: Tensor, rows: DistinctRows, gradients: DeviceGradients, *, count: int
) -> None:
    """Updates the first `count` rows with the optimizer `kind`. If `count` is 0, the kernel is compiled but does not run.

    Raises:
        UnsupportedError: the kernels have no update of this kind.
    """
    if kind not in (*BY_COLUMNS, *BY_ROWS):
        known = ", ".join((*BY_COLUMNS, *BY_ROWS))
        raise UnsupportedError(f"the Triton kernels have no optimizer {kind!r}: give one of {known}")
    columns = ColumnLayout(dim)
    arguments, flags = _gradient_arguments(gradients)
    kernel = update_by_rows if kind in BY_ROWS else update_by_columns
    with _launch_context(rows.slots.device):
        kernel[(count,)](
            tiers, numbers, rows.tables, rows.slots, rows.starts, rows.occurrences, *arguments,
            KIND=kind, D=dim, BLOCK=columns.block, BLOCKS=columns.blocks, AT_ONCE=columns.rows_in_flight, **flags,
            **columns.options_of_update,
        )  # fmt: skip


def _move(tier: DeviceTier, slots: NDArray[np.int64], vectors: Tensor, scalars: Tensor, *, into_slots: bool) -> None:
    columns, parts = ColumnLayout(tier.dim), 1 + len(tier.vector_slots)
    sending = DeviceTransfer(tier.device, [(np.int64, 4), (np.int32, len(slots))])
    sending.arrays[0][:], sending.arrays[1][:] = tier_addresses(tier), slots
    addresses, places = sending.send()
    with _launch_context(tier.device):
        move_rows[(-(-len(slots) // columns.rows), columns.blocks, parts)](
            addresses, places, vectors, scalars, len(slots), D=tier.dim, PARTS=parts, HAS_SCALAR=tier.scalars is not None,
            INTO_SLOTS=into_slots, BLOCK=columns.block, ROWS=columns.rows, num_warps=4, **EXACT,
        )  # fmt: skip


def gather_rows(tier: DeviceTier, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Returns the rows in cache slots [n]: their vectors [n, V], and their scalars [n], which are zeros if rows have none."""
    made: dict[str, Any] = {"dtype": torch.float32, "device": tier.device}
    vectors = torch.empty(len(slots), tier.dim * (1 + len(tier.vector_slots)), **made)
    scalars = (torch.zeros if tier.scalars is None else torch.empty)(len(slots), **made)
    _move(tier, slots, vectors, scalars, into_slots=False)
    return vectors, scalars


def scatter_rows(tier: DeviceTier, slots: NDArray[np.int64], vectors: Tensor, scalars: Tensor) -> None:
    """Writes rows from `vectors` [n, V] and `scalars` [n] into distinct cache slots [n]."""
    _move(tier, slots, vectors, scalars, into_slots=True)


def update_numbers(kind: str, hyperparameters: Hyperparameters, step: int) -> list[float]:
    """Returns the parameters of an update in the order of the kernels. Step-dependent values are computed in float64, as in Rust.

    `step` is the table's step counter, which is 1 at the first update.
    """
    if kind == "ftrl":
        return [
            hyperparameters.lr,
            0.0,
            hyperparameters.weight_decay,
            1.0 / hyperparameters.lr,
            hyperparameters.beta,
            hyperparameters.l1,
            hyperparameters.l2,
            0.0,
            0.0,
        ]
    fresh = [1.0 - hyperparameters.beta1, 1.0 - hyperparameters.beta2]
    corrections = [1.0 / (1.0 - _power(beta, step)) for beta in (hyperparameters.beta1, hyperparameters.beta2)]
    return [
        hyperparameters.lr,
        hyperparameters.eps,
        hyperparameters.weight_decay,
        hyperparameters.beta1,
        hyperparameters.beta2,
        *fresh,
        *corrections,
    ]


def _power(base: float, exponent: int) -> float:
    """Returns `base` to the power of `exponent`, by the same repeated squaring as the Rust kernels."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
