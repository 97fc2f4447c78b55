"""The Triton kernel backend, over the cache slots of device tiers.

Importing this module imports triton. `select` handles the case that it is not installed. Shapes are those of `core`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache._hyperparameters import Hyperparameters
from torchrec_embcache.exceptions import InputError

from .core import GradientUpdate, KernelBackend, KernelTable, PooledInputs
from .oov_row import exact_sums
from .triton import launch
from .triton.parts import PART_OCCURRENCES, split_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrec_embcache._device.tier import DeviceTier
    from torchrec_embcache._native import Plan

__all__ = ["IS_INTERPRETED", "TritonBackend", "TritonRowMover"]

# True if the kernels run in Triton's interpreter, on CPU tensors.
IS_INTERPRETED: bool = launch.IS_INTERPRETED


class TritonRowMover:
    """Moves rows of a device tier with one kernel per direction; see `RowMover`."""

    kernels = "triton"

    def gather(self, tier: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `RowMover`."""
        return launch.gather_rows(tier, slots.numpy())

    def scatter(self, tier: DeviceTier, slots: Tensor, vectors: Tensor, scalars: Tensor) -> None:
        """Implements `RowMover`."""
        launch.scatter_rows(tier, slots.numpy(), vectors, scalars)


@dataclass(frozen=True)
class _TableGroup:
    """Tables of a lookup with the same width and optimizer, whose rows are updated by one launch."""

    kind: str
    dim: int
    tables: tuple[int, ...]


@dataclass(frozen=True)
class _SplitRows:
    """Rows with many occurrences, whose gradients are summed in two levels: within parts, and then over parts.

    `parts` are ranges of a batch's occurrences. `rows`: the rows, whose occurrences are indices of parts.
    """

    parts: launch.OccurrenceRanges
    rows: launch.DistinctRows
    count: int


@dataclass(frozen=True)
class _GroupUpdate:
    """The `count` distinct rows of a table group. The `split` rows are updated separately.

    `oov`: for each table with an OOV row, the rows of ids that were not admitted, which are not updated. `slots`: the slots of each
    table's rows, int32 [U], where -1 stands for none.
    """

    group: _TableGroup
    slots: dict[int, NDArray[np.int32]]
    rows: launch.DistinctRows
    count: int
    split: _SplitRows | None
    oov: dict[int, _SplitRows]


@dataclass(frozen=True)
class _UpdateLaunch:
    """The update of `count` rows by their gradients."""

    group: _TableGroup
    rows: launch.DistinctRows
    gradients: launch.DeviceGradients
    count: int

    def run(self, tiers: Tensor, numbers: Tensor) -> None:
        """Updates the rows."""
        self._run(tiers, numbers, self.count)

    def compile(self, tiers: Tensor, numbers: Tensor) -> None:
        """Compiles the kernel if needed. Runs nothing."""
        self._run(tiers, numbers, 0)

    def _run(self, tiers: Tensor, numbers: Tensor, count: int) -> None:
        alike = self.group
        launch.update_rows(alike.kind, alike.dim, tiers, numbers, self.rows, self.gradients, count=count)


@dataclass(frozen=True)
class _DeviceBatch:
    """A pooled batch on the device. `members`: the features of each width.

    The kernels receive the addresses of the rows in `kept`, which must stay alive until they are launched.
    """

    bags: launch.DeviceBags
    features: Tensor
    slots: Tensor
    members: dict[int, Tensor]
    kept: list[Tensor]


class TritonBackend(KernelBackend):
    """Triton's kernels on CUDA, and in Triton's interpreter on the CPU. Every table has a device tier."""

    name = "triton"

    def __init__(self, tables: Sequence[KernelTable], feature_tables: Sequence[int], device: torch.device) -> None:
        super().__init__(tables, feature_tables, device)
        dims = [tables[table].dim for table in feature_tables]
        self._columns = np.cumsum([0, *dims])
        self._aligned = 4 if all(dim % 4 == 0 for dim in dims) else 1
        # One launch per feature width.
        self._members = {dim: [f for f, other in enumerate(dims) if other == dim] for dim in dict.fromkeys(dims)}
        kinds = [(table._spec.kind, table.dim) for table in tables]
        self._groups = [
            _TableGroup(*kind, tuple(number for number, other in enumerate(kinds) if other == kind))
            for kind in dict.fromkeys(kinds)
        ]

    def _features(self, plan: Plan, mean: NDArray[np.bool_]) -> tuple[NDArray[np.int64], list[Tensor]]:
        """Returns the kernels' description of each feature, int64 [F, 4], and the tensors whose addresses it contains."""
        absent: dict[int, Tensor] = {}
        for table in dict.fromkeys(self.feature_tables):
            row = plan.missing_row(table)
            if row is not None:
                (absent[table],) = launch.send(self.device, [row])
        weights = {table: launch.tier_addresses(self._tier(table))[0] for table in dict.fromkeys(self.feature_tables)}
        features = [
            [weights[table], absent[table].data_ptr() if table in absent else 0, int(column), int(averaged)]
            for table, column, averaged in zip(self.feature_tables, self._columns[:-1], mean, strict=True)
        ]
        return np.array(features, np.int64), list(absent.values())

    def _send_batch(self, plan: Plan, pooled: PooledInputs, *, with_slots: bool) -> _DeviceBatch:
        """Sends the batch to the device. Its addresses are valid while no other thread can replace the tiers' tensors."""
        _check_count(len(pooled.offsets), int(pooled.offsets[-1]))
        if pooled.weights is not None and pooled.weights.device != self.device:
            raise InputError(
                f"per-sample weights are on {pooled.weights.device} and the tables on {self.device}: move them there"
            )
        features, kept = self._features(plan, pooled.mean)
        members = self._members.values()
        lengths = [len(pooled.offsets), int(pooled.offsets[-1]) if with_slots else 0, *map(len, members)]
        sending = launch.DeviceTransfer(
            self.device, [(np.int64, features.size), *((np.int32, length) for length in lengths)]
        )
        sending.arrays[0][:], sending.arrays[1][:] = features.reshape(-1), pooled.offsets
        if with_slots:
            plan.fill_slots(sending.arrays[2])
        for memory, of_width in zip(sending.arrays[3:], members, strict=True):
            memory[:] = of_width
        sent = sending.send()
        bags = launch.DeviceBags(sent[1], pooled.weights, pooled.bags, self.columns, self._aligned)
        return _DeviceBatch(bags, sent[0], sent[2], dict(zip(self._members, sent[3:], strict=True)), kept)

    def forward_pooled(self, plan: Plan, pooled: PooledInputs) -> Tensor:
        """Implements `KernelBackend`. Has exclusive access until the work is queued, so the tiers' tensors are not replaced."""
        out = torch.empty(pooled.bags, self.columns, dtype=torch.float32, device=self.device)

        def work() -> None:
            batch = self._send_batch(plan, pooled, with_slots=True)
            with self._reading_tiers():
                for dim, members in batch.members.items():
                    launch.pool_rows(dim, members, batch.features, batch.slots, batch.bags, out)

        plan.run_exclusively(work)
        return out

    def forward_sequence(self, plan: Plan, count: int) -> Tensor:
        """Implements `KernelBackend`. Has exclusive access, as in `forward_pooled`."""
        dim = self.tables[0].dim
        out = torch.empty(count, dim, dtype=torch.float32, device=self.device)
        _check_count(count)

        def work() -> None:
            features, _kept = self._features(plan, np.zeros(len(self.feature_tables), np.bool_))
            splits = plan.splits()
            sending = launch.DeviceTransfer(
                self.device, [(np.int64, features.size), (np.int32, count), (np.int32, len(splits))]
            )
            sending.arrays[0][:], sending.arrays[2][:] = features.reshape(-1), splits
            plan.fill_slots(sending.arrays[1])
            sent = sending.send()
            with self._reading_tiers():
                launch.read_sequence(dim, sent[0], sent[1], sent[2], int(np.diff(splits).max()), out)

        plan.run_exclusively(work)
        return out

    def backward_pooled(self, update: GradientUpdate, pooled: PooledInputs, weight_grad: bool) -> Tensor | None:
        """Implements `KernelBackend`."""
        batch = self._send_batch(update.plan, pooled, with_slots=False)
        occurrences = int(pooled.offsets[-1])
        scaled = pooled.weights is not None or bool(pooled.mean.any())
        gradients = launch.find_gradients(batch.features, batch.bags, occurrences, update.grad, scaled)
        out = torch.empty(occurrences, dtype=torch.float32, device=self.device) if weight_grad else None

        def before_update() -> None:
            if out is not None:
                batch, grad = self._send_batch(update.plan, pooled, with_slots=True), update.grad
                with self._reading_tiers():
                    for dim, members in batch.members.items():
                        launch.fill_weight_gradients(dim, members, batch.features, batch.slots, batch.bags, grad, out)

        self._update_and_commit(update, gradients, before_update)
        return out

    def backward_sequence(self, update: GradientUpdate) -> None:
        """Implements `KernelBackend`."""
        self._update_and_commit(update, launch.DeviceGradients(update.grad), lambda: None)

    def _update_and_commit(
        self, update: GradientUpdate, gradients: launch.DeviceGradients, before_update: Callable[[], None]
    ) -> None:
        """Updates and commits with exclusive access, so that no other thread copies a row with new weights and old metadata.

        Memory for all tables is allocated first. Until `begin_update` an error leaves every row unchanged.
        """
        plan = update.plan
        groups = [self._distinct_rows(plan, alike) for alike in self._groups]
        self._train_oov_row(update, lambda: self._oov_sums(groups, gradients))
        ready = [_launches(group, gradients) for group in groups]

        def work() -> None:
            before_update()
            numbers = [self._update_hyperparameters(each.group, update.hyperparameters) for each in groups]
            given = [(each, *of_group) for each_of, of_group in zip(ready, numbers, strict=True) for each in each_of]
            for each, tiers, values in given:
                each.compile(tiers, values)
            with ExitStack() as changing:
                for group in groups:
                    for table, slots in group.slots.items():
                        changing.enter_context(self._tier(table).writing(slots))
                plan.begin_update()
                for each, tiers, values in given:
                    each.run(tiers, values)
            plan.commit()

        plan.run_exclusively(work)

    def _reading_tiers(self) -> ExitStack:
        """Reads the rows of all tables within the block, on the caller's stream."""
        with ExitStack() as stack:
            for table in dict.fromkeys(self.feature_tables):
                stack.enter_context(self._tier(table).reading())
            return stack.pop_all()

    def _distinct_rows(self, plan: Plan, group: _TableGroup) -> _GroupUpdate:
        """Returns the distinct rows of a table group, on the device."""
        of_tables = plan.row_counts()
        counts = [of_tables[table] for table in group.tables]
        lengths_of_features = np.diff(plan.splits())[np.isin(self.feature_tables, group.tables)]
        total, occurrences = sum(counts), int(lengths_of_features.sum())
        sending = launch.DeviceTransfer(
            self.device, [(np.int32, count) for count in (total, total, total + 1, occurrences)]
        )
        tables, sent_slots, starts, _ = sending.arrays
        starts[-1] = 0
        if total:  # empty arrays share one address, and outputs must not alias
            plan.fill_row_occurrences(list(group.tables), *sending.arrays)
        slots = sent_slots.copy()
        lengths = np.diff(starts)
        frequent = np.flatnonzero((lengths > PART_OCCURRENCES) & (slots >= 0))
        sent_slots[frequent] = -1
        rows = launch.DistinctRows(*sending.send())
        refused = {
            table: np.flatnonzero((tables == number) & (slots < 0) & (lengths > 0))
            for number, table in enumerate(group.tables)
            if table in self.oov_tables
        }

        def send_split_rows(numbers: NDArray[np.signedinteger[Any]]) -> _SplitRows:
            parts = split_rows(starts[numbers], starts[numbers + 1])
            of_parts = np.arange(len(parts.begins))
            arrays = (parts.begins, parts.ends, tables[numbers], slots[numbers], parts.starts, of_parts)
            sent = launch.send(self.device, [array.astype(np.int32) for array in arrays])
            return _SplitRows(launch.OccurrenceRanges(*sent[:2]), launch.DistinctRows(*sent[2:]), len(numbers))

        apart = send_split_rows(frequent) if len(frequent) else None
        slots_of = dict(zip(group.tables, np.split(slots, np.cumsum(counts)[:-1]), strict=True))
        sums = {table: send_split_rows(numbers) for table, numbers in refused.items()}
        return _GroupUpdate(group, slots_of, rows, total, apart, sums)

    def _oov_sums(self, updates: Sequence[_GroupUpdate], gradients: launch.DeviceGradients) -> Tensor:
        """Returns the gradient sums of ids that were not admitted, for each table with an OOV row."""
        sums = {}
        for update in updates:
            dim = update.group.dim
            for table, refused in update.oov.items():
                of_parts = launch.sum_gradients(dim, refused.parts, update.rows.occurrences, gradients)
                ranges = launch.OccurrenceRanges(refused.rows.starts[:-1], refused.rows.starts[1:])
                sums[table] = exact_sums(launch.sum_gradients(dim, ranges, refused.rows.occurrences, of_parts).grad)
        return torch.cat([sums[table] for table in self.oov_tables])

    def _update_hyperparameters(
        self, group: _TableGroup, hyperparameters: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Returns the addresses of the tables' tiers, int64 [T, 4], and the update values, float32 [T, 9], on the device.

        The tensors are read under exclusive access, so that no other thread can replace them by larger ones; an update of replaced
        tensors would be lost.
        """
        tiers, numbers = [], []
        for table in group.tables:
            tiers.append(launch.tier_addresses(self._tier(table)))
            given = Hyperparameters(*hyperparameters[table].tolist())
            numbers.append(launch.update_numbers(group.kind, given, self.tables[table]._native_table.step() + 1))
        addresses, values = launch.send(self.device, [np.array(tiers, np.int64), np.array(numbers, np.float32)])
        return addresses, values


def _check_count(*counts: int) -> None:
    """Raises `InputError` if a count exceeds the 32-bit positions of the kernels."""
    if max(counts) >= 1 << 31:
        raise InputError(
            f"a batch has {max(counts)} ids or bags, and Triton's kernels take fewer than 2^31: use smaller batches"
        )


def _launches(update: _GroupUpdate, gradients: launch.DeviceGradients) -> list[_UpdateLaunch]:
    """Returns the launches that update the rows of a table group: one for all rows, and one for the split rows."""
    of_rows = [(update.rows, gradients, update.count)]
    if update.split is not None:
        frequent = update.split
        of_parts = launch.sum_gradients(update.group.dim, frequent.parts, update.rows.occurrences, gradients)
        of_rows.append((frequent.rows, of_parts, frequent.count))
    return [_UpdateLaunch(update.group, *each) for each in of_rows]
