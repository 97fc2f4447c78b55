"""Kernel backends: the forward of a plan, and its backward fused with the optimizer.

`CoreBackend` runs the Rust core's kernels on the CPU, directly on the host tier's rows or on a device tier of CPU tensors.
`TorchBackend` runs torch ops over the cache slots of a device tier, on any device. The two agree to float tolerance. The result of
each is bitwise independent of the tier sizes. `triton_backend` has a third backend, bitwise identical to the core's; `select`
selects one.

Shapes: T tables of a lookup, F features, B bags per feature, N occurrences of ids, U distinct rows of a table, D a table's width, V
= D * (1 + vector slots), C columns of the pooled output (the features' widths, in feature order), S cache slots of a device tier.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache.exceptions import ConfigError

from .oov_row import OovGradientSums, exact_sums
from .torch_ops import updated_rows

if TYPE_CHECKING:
    from torchrec_embcache._native import DeviceArrays, Plan, Table
    from torchrec_embcache.optimizers import OptimizerSpec

__all__ = [
    "CoreBackend",
    "GradientUpdate",
    "KernelBackend",
    "KernelTable",
    "PooledInputs",
    "TorchBackend",
    "kernel_threads",
]


def kernel_threads() -> int:
    """Returns the number of threads of the native kernels: `EMBCACHE_THREADS` if set, else `torch.get_num_threads()`."""
    value = os.environ.get("EMBCACHE_THREADS")
    if value is None:
        return torch.get_num_threads()
    if not value.isdigit() or not 1 <= int(value) <= 1024:
        raise ConfigError(f"EMBCACHE_THREADS={value!r} is not a number of threads: give 1 to 1024, or unset it")
    return int(value)


class KernelTable(Protocol):
    """The attributes of a table that a backend uses."""

    @property
    def _native_table(self) -> Table:
        """The native table."""

    @property
    def dim(self) -> int:
        """D."""

    @property
    def _spec(self) -> OptimizerSpec:
        """The optimizer, which defines the update formula."""

    @property
    def _tier(self) -> DeviceTier | None:
        """The device tier's tensors; None if kernels run directly on the host tier's rows."""


@dataclass(frozen=True)
class PooledInputs:
    """The inputs of a pooled lookup besides its ids.

    `offsets` int64 [F * B + 1]: the bounds of the bags in the ids, feature after feature. `weights` float32 [N] on the lookup's
    device, or None. `mean` bool [F]: the features that are averaged.
    """

    offsets: NDArray[np.int64]
    weights: Tensor | None
    mean: NDArray[np.bool_]

    @property
    def bags(self) -> int:
        """B."""
        return (len(self.offsets) - 1) // len(self.mean)


@dataclass(frozen=True)
class GradientUpdate:
    """The inputs of a backward.

    `grad`: the contiguous gradient of the lookup's output. `hyperparameters`: float64, a row for each table. `oov_sums` reduces the
    gradient sums of the OOV rows over all ranks.
    """

    plan: Plan
    grad: Tensor
    hyperparameters: NDArray[np.float64]
    oov_sums: OovGradientSums


class KernelBackend(ABC):
    """The forward and backward of planned lookups over `tables`. `feature_tables[f]` is the table of feature f."""

    name: str

    def __init__(self, tables: Sequence[KernelTable], feature_tables: Sequence[int], device: torch.device) -> None:
        self.tables = tables
        self.feature_tables = feature_tables
        self.device = device
        self.columns = sum(tables[table].dim for table in feature_tables)
        # The tables that have an OOV row.
        self.oov_tables = [number for number, table in enumerate(tables) if table._native_table.has_oov_row]

    def _tier(self, table: int) -> DeviceTier:
        tier = self.tables[table]._tier
        assert tier is not None, "make_backend refuses tables without a device tier"
        return tier

    @abstractmethod
    def forward_pooled(self, plan: Plan, pooled: PooledInputs) -> Tensor:
        """Returns the pooled rows, float32 [B, C]."""

    @abstractmethod
    def forward_sequence(self, plan: Plan, count: int) -> Tensor:
        """Returns the rows of all ids, float32 [N, D], where `count` is N. All tables have the same D."""

    @abstractmethod
    def backward_pooled(self, update: GradientUpdate, pooled: PooledInputs, weight_grad: bool) -> Tensor | None:
        """Updates the rows from gradients [B, C] and commits. With `weight_grad`, returns the weights' gradient [N]."""

    @abstractmethod
    def backward_sequence(self, update: GradientUpdate) -> None:
        """Updates the rows from gradients [N, D] and commits."""

    def _train_oov_row(self, update: GradientUpdate, sums: Callable[[], Tensor]) -> None:
        """Makes the commit update the OOV rows by the gradient sums of all ranks. Updates nothing itself."""
        if self.oov_tables:
            update.plan.train_oov_row(update.oov_sums.all_reduce(sums()).numpy(), update.hyperparameters)


class CoreBackend(KernelBackend):
    """The Rust core's kernels on the CPU. Their results are bitwise identical for any number of threads."""

    name = "core"

    def _run(self, plan: Plan, kernel: Callable[[list[DeviceArrays | None] | None], None]) -> None:
        """Runs a kernel on the device tiers' tensors.

        The tensors are read under exclusive access, so that no other thread can replace them by larger ones; an update of replaced
        tensors would be lost.
        """
        tiers = [table._tier for table in self.tables]
        if any(tiers):
            plan.run_exclusively(lambda: kernel([tier.arrays() if tier is not None else None for tier in tiers]))
        else:
            kernel(None)

    def forward_pooled(self, plan: Plan, pooled: PooledInputs) -> Tensor:
        """Implements `KernelBackend`."""
        out = np.empty((pooled.bags, self.columns), np.float32)
        weights = pooled.weights.numpy() if pooled.weights is not None else None
        threads = kernel_threads()
        self._run(plan, lambda device: plan.forward_pooled(pooled.offsets, weights, pooled.mean, out, device, threads))
        return torch.from_numpy(out)

    def forward_sequence(self, plan: Plan, count: int) -> Tensor:
        """Implements `KernelBackend`."""
        out = np.empty((count, self.tables[0].dim), np.float32)
        threads = kernel_threads()
        self._run(plan, lambda device: plan.forward_sequence(out, device, threads))
        return torch.from_numpy(out)

    def backward_pooled(self, update: GradientUpdate, pooled: PooledInputs, weight_grad: bool) -> Tensor | None:
        """Implements `KernelBackend`."""
        out = np.empty(int(pooled.offsets[-1]), np.float32) if weight_grad else None
        plan, grad, numbers, threads = update.plan, update.grad.numpy(), update.hyperparameters, kernel_threads()
        self._train_oov_row(update, lambda: torch.from_numpy(plan.oov_gradient_sums_pooled(grad, threads)))
        self._run(plan, lambda device: plan.backward_pooled(grad, numbers, out, device, threads))
        return torch.from_numpy(out) if out is not None else None

    def backward_sequence(self, update: GradientUpdate) -> None:
        """Implements `KernelBackend`."""
        plan, grad, numbers, threads = update.plan, update.grad.numpy(), update.hyperparameters, kernel_threads()
        self._train_oov_row(update, lambda: torch.from_numpy(plan.oov_gradient_sums_sequence(grad, threads)))
        self._run(plan, lambda device: plan.backward_sequence(grad, numbers, device, threads))


#: A table, the slots [U] of its distinct rows, where -1 stands for none, and their summed gradients [U, D].
_TableGradient = tuple[int, NDArray[np.int64], Tensor]


class TorchBackend(KernelBackend):
    """Torch ops over the cache slots, on any device. Every table has a device tier.

    Sums run as `embedding_bag` without autograd: the forward's over cache slots, the backward's over the plan's transposed index.
    This avoids sorting, and sums each row's gradients in the order of its occurrences.
    """

    name = "torch"

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def forward_pooled(self, plan: Plan, pooled: PooledInputs) -> Tensor:
        """Implements `KernelBackend`."""
        out = torch.empty(pooled.bags, self.columns, dtype=torch.float32, device=self.device)
        column = 0
        for feature, table in enumerate(self.feature_tables):
            tier = self._tier(table)
            begin, end = feature * pooled.bags, (feature + 1) * pooled.bags
            offsets = pooled.offsets[begin : end + 1] - pooled.offsets[begin]
            weights = (
                pooled.weights[int(pooled.offsets[begin]) : int(pooled.offsets[end])]
                if pooled.weights is not None
                else None
            )
            slots = plan.slots(feature)
            divisor = torch.from_numpy(np.diff(offsets)).clamp_(min=1).to(self.device) if pooled.mean[feature] else None
            present = slots >= 0
            absent: Tensor | float = 0.0
            if not present.all():  # absent rows are excluded from this sum, but count in the mean's divisor
                absent = self._missing_sum(self._missing_row(plan, table), ~present, offsets, weights)
                offsets = np.concatenate([[0], np.cumsum(present)])[offsets]
                slots = slots[present]
                weights = weights[torch.from_numpy(present).to(self.device)] if weights is not None else None
            index, starts = self._tensor(slots), self._tensor(offsets)
            with tier.reading() as table_weights:
                part = _segment_sum(table_weights, index, starts, weights) + absent
            out[:, column : column + tier.dim] = part if divisor is None else part / divisor[:, None]
            column += tier.dim
        return out

    def _missing_row(self, plan: Plan, table: int) -> Tensor | None:
        """Returns the row read by absent occurrences of a table: [D], or None for zeros."""
        row = plan.missing_row(table)
        return None if row is None else torch.from_numpy(row).to(self.device)

    def _missing_sum(
        self, row: Tensor | None, missing: NDArray[np.bool_], offsets: NDArray[np.int64], weights: Tensor | None
    ) -> Tensor | float:
        """Returns the sum per bag of the missing occurrences, bool [n], which read `row`: [B, D], or 0.0 for zeros."""
        if row is None:
            return 0.0
        starts = np.concatenate([[0], np.cumsum(missing)])[offsets]
        index = torch.zeros(int(starts[-1]), dtype=torch.int64, device=self.device)
        weights = weights[torch.from_numpy(missing).to(self.device)] if weights is not None else None
        return _segment_sum(row[None], index, self._tensor(starts), weights)

    def forward_sequence(self, plan: Plan, count: int) -> Tensor:
        """Implements `KernelBackend`."""
        out = torch.empty(count, self.tables[0].dim, dtype=torch.float32, device=self.device)
        begin = 0
        for feature, table in enumerate(self.feature_tables):
            slots = self._tensor(plan.slots(feature))
            out[begin : begin + len(slots)] = self._rows_of(plan, table, slots)
            begin += len(slots)
        return out

    def _rows_of(self, plan: Plan, table: int, slots: Tensor) -> Tensor:
        """Returns the rows read by the occurrences in `slots` [n]: [n, D]. -1 stands for an absent row."""
        tier = self._tier(table)
        with tier.reading() as weights:
            rows, absent = weights.index_select(0, slots.clamp(min=0)), (slots < 0)[:, None]
        row = self._missing_row(plan, table)
        return rows.masked_fill_(absent, 0.0) if row is None else torch.where(absent, row, rows)

    def backward_pooled(self, update: GradientUpdate, pooled: PooledInputs, weight_grad: bool) -> Tensor | None:
        """Implements `KernelBackend`."""
        bags, features = pooled.bags, len(self.feature_tables)
        lengths = np.diff(pooled.offsets)
        bag = np.repeat(np.arange(features * bags), lengths)  # [N], feature-major
        scale = pooled.weights
        if pooled.mean.any():
            divisor = np.where(np.repeat(pooled.mean, bags), np.maximum(lengths, 1), 1).astype(np.float32)
            scale = torch.from_numpy(1.0 / divisor[bag]).to(self.device)
        out = torch.zeros(int(pooled.offsets[-1]), dtype=torch.float32, device=self.device) if weight_grad else None
        columns = np.cumsum([0, *(self.tables[table].dim for table in self.feature_tables)])
        changes = []
        for table in range(len(self.tables)):
            mine = [feature for feature, other in enumerate(self.feature_tables) if other == table]
            if not mine:
                continue
            tier = self._tier(table)
            first, count = mine[0], len(mine)
            # [B * count, D]: the gradient of bag b of the table's feature j is in row b * count + j.
            table_grad = update.grad[:, columns[first] : columns[first + count]].reshape(bags * count, tier.dim)
            rows = update.plan.row_occurrences(table)
            feature_of, bag_of = np.divmod(bag[rows.occurrences], max(bags, 1))
            index = self._tensor(bag_of * count + (feature_of - first))
            positions = self._tensor(rows.occurrences)
            weights = scale.index_select(0, positions) if scale is not None else None
            if out is not None:
                slots = self._tensor(np.repeat(rows.slots, np.diff(rows.starts)))
                used = self._rows_of(update.plan, table, slots)
                out.index_copy_(0, positions, (used * table_grad.index_select(0, index)).sum(1))
            changes.append((table, rows.slots, _segment_sum(table_grad, index, self._tensor(rows.starts), weights)))
        self._update_and_commit(update, changes)
        return out

    def backward_sequence(self, update: GradientUpdate) -> None:
        """Implements `KernelBackend`."""
        changes = []
        for table in range(len(self.tables)):
            rows = update.plan.row_occurrences(table)
            summed = _segment_sum(update.grad, self._tensor(rows.occurrences), self._tensor(rows.starts), None)
            changes.append((table, rows.slots, summed))
        self._update_and_commit(update, changes)

    def _oov_sums(self, changes: list[_TableGradient]) -> Tensor:
        """Returns the gradient sums of ids that were not admitted, for each table with an OOV row."""
        refused = {table: grad[torch.from_numpy(slots < 0).to(self.device)] for table, slots, grad in changes}
        none = {
            table: torch.zeros(0, self.tables[table].dim, dtype=torch.float32, device=self.device)
            for table in self.oov_tables
        }
        return torch.cat([exact_sums(refused.get(table, rows)) for table, rows in none.items()])

    def _update_and_commit(self, update: GradientUpdate, changes: list[_TableGradient]) -> None:
        """Updates and commits with exclusive access, so that no other thread copies a row with new weights and old metadata."""
        self._train_oov_row(update, lambda: self._oov_sums(changes))

        def work() -> None:
            with torch.no_grad(), ExitStack() as changing:
                self._update(update, changes, changing)
            update.plan.commit()

        update.plan.run_exclusively(work)

    def _update(self, update: GradientUpdate, changes: list[_TableGradient], writes: ExitStack) -> None:
        """Applies each table's optimizer to its distinct rows.

        Until `writes` is closed, the rows of all tables are being written on the caller's stream.

        Memory for all tables is allocated first. Until `begin_update` an error leaves every row unchanged.
        """
        written = []
        for table, slots, grad in changes:
            owner, tier = self.tables[table], self._tier(table)
            trained = slots >= 0  # the others have no row and are not inserted
            if not trained.all():
                slots, grad = slots[trained], grad[torch.from_numpy(trained).to(self.device)]
            index = self._tensor(slots)
            writes.enter_context(tier.writing(slots))
            numbers, step = update.hyperparameters[table], owner._native_table.step() + 1
            written += [
                (part, index, values) for part, values in updated_rows(owner._spec, tier, index, grad, numbers, step)
            ]
        update.plan.begin_update()
        for part, index, values in written:
            part.index_copy_(0, index, values)


def _segment_sum(rows: Tensor, index: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """Sums `rows[index[i]] * weights[i]` over each segment `starts[k]:starts[k + 1]` of i: [n, D]. `starts` is [n + 1]."""
    with torch.no_grad():
        return embedding_bag(index, rows, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)
