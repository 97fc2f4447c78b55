"""Lookups: ids in, rows out, with the update in the backward.

Steps of a batch:

1. plan: find the distinct ids, pin their rows, and start loading rows from lower tiers.
2. wait: every row is in a slot of the tier that the kernels use.
3. forward.
4. backward: sum the gradients of each row, update it, and unpin the rows. Dropping a plan, or freeing its graph, unpins too.

Shapes: F features, B bags per feature, N occurrences of ids, D a table's width, C columns of the pooled output.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_embcache import _native
from torchrec_embcache._autograd import anchor_gradient, check_backward_updates_rows, clamp_gradient
from torchrec_embcache._device.tier import place_rows, table_memory_errors
from torchrec_embcache._kernels.core import GradientUpdate, KernelBackend, PooledInputs, kernel_threads
from torchrec_embcache._kernels.oov_row import OovGradientSums, OtherRankFailedError, oov_sums_size
from torchrec_embcache._kernels.select import make_backend
from torchrec_embcache._ssd import autoflush
from torchrec_embcache.exceptions import EmbCacheWarning, StateError, UnsupportedError
from torchrec_embcache.optimizers import gradient_limits, native_hyperparameters
from torchrec_embcache.table._sweep import sweep_in_backward, tables_swept_after_steps
from torchrec_embcache.table._warnings import TableWarnings
from torchrec_embcache.table.cache_table import CacheTable
from torchrec_embcache.table.rows import contiguous

from .offsets import check_offsets
from .prefetch import MAX_PREFETCHED, IdBatch, PlanOptions, PrefetchQueue
from .profiling import profiled

__all__ = ["IdBatch", "LookupGroup", "PlannedBatch"]

I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
ParamGroups = Callable[[], Sequence[Mapping[str, Any]]]


class LookupGroup:
    """Looks up ids of several features in several tables.

    `feature_tables[f]` is the table of feature f; features of the same table are adjacent. `param_groups()` returns the optimizer's
    groups, one per table in table order, and every backward calls it.
    """

    def __init__(
        self,
        tables: Sequence[CacheTable],
        feature_tables: Sequence[int],
        param_groups: ParamGroups,
        *,
        kernels: str | None = None,
        after_backward: Callable[[Exception | None], None] | None = None,
        all_reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Every backward calls `after_backward` at its end, with its error or None. It may raise.

        `all_reduce` sums a tensor over all ranks that share the tables, in place; None if only this rank has the tables.
        """
        self.tables = list(tables)
        self.feature_tables = list(feature_tables)
        self.param_groups = param_groups
        # One plan covers all tables, which have the same `missing` setting.
        self.missing = self.tables[0]._settings.lifecycle.missing
        self.device = self.tables[0].device
        self._kernels = kernels
        self.after_backward = after_backward
        # Number of integers in the gradient sums of all OOV rows.
        self._oov_sums_size = sum(
            oov_sums_size(table.dim) for table in self.tables if table._settings.lifecycle.has_oov_row
        )
        self._all_reduce = all_reduce if self._oov_sums_size else None
        # A table with an SSD tier. If the process exits during a training step, its step number shows the progress of that step.
        self.ssd_table = next((table for table in self.tables if table.tiers.ssd), None)
        # Tables with an eviction callback.
        self._evict_notifiers = [table._evict_notifier for table in self.tables if table._evict_notifier.has_callback]
        self._native_lookup: tuple[list[_native.Table], _native.Lookup, KernelBackend] | None = None
        self.prefetch_queue = PrefetchQueue()  # its batches have the options of `plan_options`
        self._warnings = TableWarnings(self.tables)
        self._swept_tables = tables_swept_after_steps(self.tables, by_ranks=False)

    def _open(self) -> tuple[_native.Lookup, KernelBackend]:
        natives = [table._native_table for table in self.tables]
        if self._native_lookup is None or any(
            old is not new for old, new in zip(self._native_lookup[0], natives, strict=True)
        ):
            self.drop_prefetched()
            backend = make_backend(self.tables, self.feature_tables, self.device, self._kernels)
            self._native_lookup = natives, _native.Lookup(natives, self.feature_tables), backend
        return self._native_lookup[1], self._native_lookup[2]

    def oov_gradient_sums(self) -> OovGradientSums:
        """Returns the accumulator of one backward's gradient sums for the OOV rows."""
        return OovGradientSums(self._all_reduce, self._oov_sums_size)

    # ---- lookahead

    def prefetch(self, ids: IdBatch, *, train: bool) -> bool:
        """Prefetches the batch of a later forward, in the order of the forwards. Its rows are loaded while other batches compute.

        Returns False if the budget ended before all rows were loaded; the forward loads the rest.
        """
        lookup, _ = self._open()
        self._warn_of_dropped(self.prefetch_queue.drop_oldest(train=train), f"prefetch at most {MAX_PREFETCHED} ahead")
        return self.prefetch_queue.prefetch(lookup, ids, self.plan_options(train))

    def prefetch_in_background(self, ids: IdBatch, *, train: bool, on_error: Callable[[Exception], None]) -> None:
        """Like `prefetch`, but on a planner thread, which calls `on_error` with an error; see `PrefetchQueue.wait_until_planned`.

        Runs on the calling thread if the order of planning and training affects results: if a full table drops rows, and with a
        device tier.
        """
        lookup, _ = self._open()
        options = self.plan_options(train)
        if all(table.on_full == "error" and table._device_rows is None for table in self.tables):
            self.prefetch_queue.prefetch_in_background(lookup, ids, options, on_error)
            return
        try:
            self.prefetch_queue.prefetch(lookup, ids, options)
        except Exception as error:
            on_error(error)

    def place_next(self, ids: IdBatch, on_error: Callable[[Exception], None]) -> None:
        """Moves the rows of the next training batch to the device, if the batch was prefetched and its rows are in RAM.

        Does nothing if admission is decided at placement. After an error, with which `on_error` is called, the forward moves the
        rows.
        """
        on_device = any(table._device_rows is not None for table in self.tables)
        if on_device and not any(table._settings.is_admission_at_placement for table in self.tables):
            self.prefetch_queue.place(ids, self._place_rows, on_error)

    def drop_prefetched(self) -> None:
        """Drops every prefetched batch and unpins its rows."""
        self.prefetch_queue.clear()

    def plan_options(self, train: bool) -> PlanOptions:
        """Returns the plan options of the group's batches."""
        return PlanOptions(train, self.missing or "not_admitted", kernel_threads())

    def plan(self, ids: IdBatch, *, train: bool) -> PlannedBatch:
        """Plans the batch of the next forward, or returns its prefetched plan."""
        lookup, _ = self._open()
        # With activation checkpointing a forward runs again within a backward.
        recomputed = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        if train and not recomputed:
            for telling in self._evict_notifiers:
                telling.raise_error()
        plan, dropped = self.prefetch_queue.take_plan(ids, train=train, recomputed=recomputed)
        if plan is not None:
            plan.check_space()
        plan = plan or self.plan_options(train).plan(lookup, ids, prefetch=False)
        try:
            self._warn_of_dropped(dropped)
        except BaseException:
            plan.release()
            raise
        return PlannedBatch(self, plan, train)

    def _warn_of_dropped(self, batches: int, remedy: str = "prefetch in the order of the forwards") -> None:
        if batches:
            which = f"{batches} prefetched batch(es) of {self.table_names()} are not the forward's and were dropped"
            warnings.warn(f"{which}: {remedy}", EmbCacheWarning, stacklevel=3)

    def table_names(self) -> str:
        """Returns the names of the tables, for messages."""
        return ", ".join(repr(table.name) for table in self.tables)

    # ---- forward and backward

    def pooled(
        self,
        ids: I64,
        offsets: I64,
        mean: Sequence[bool],
        weights: Tensor | None = None,
        *,
        train: bool,
        anchor: Tensor,
        clicks: U32 | None = None,
        planned: PlannedBatch | None = None,
        unchanged_inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        """Returns [B, C]: the sum or mean of each bag's rows, features concatenated along the columns.

        Args:
            ids: [N], feature after feature.
            offsets: [F * B + 1], the bounds of the bags in `ids`, feature after feature.
            mean: [F], the features that are averaged; the others are summed.
            weights: float32 [N] on the tables' device. They get a gradient.
            train: False: nothing is updated, inserted or kept pinned.
            anchor: any tensor that requires grad. It makes autograd run the update.
            clicks: [N], the clicks of each occurrence, which `ShowClick` counts. None: no clicks.
            planned: the batch's plan, if `plan` was called before.
            unchanged_inputs: tensors that, like `weights`, must not change in place before the backward. If one has changed, the
                backward raises torch's `RuntimeError` and updates nothing.
        """
        features = len(self.feature_tables)
        check_offsets(offsets, len(ids), features)
        if weights is not None and any(mean):
            raise UnsupportedError(
                'per-sample weights with mode "mean": torch has no such thing either; use mode "sum"'
            )
        pooled = PooledInputs(
            np.array(offsets, np.int64),  # copied for the backward
            contiguous(weights.detach()) if weights is not None else None,
            np.array(mean, np.bool_),
        )
        splits = pooled.offsets[:: max(pooled.bags, 1)] if pooled.bags else np.zeros(features + 1, np.int64)
        batch = IdBatch(ids, np.ascontiguousarray(splits), clicks)
        if train:
            return _train(
                _PooledBatch(planned or self.plan(batch, train=True), pooled), anchor, weights, unchanged_inputs
            )
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            return self._weighted_sum(ids, batch.splits, pooled, weights)
        found = planned or self.plan(batch, train=False)
        return found.evaluate(lambda kernels: kernels.forward_pooled(found.plan, pooled))

    def sequence(
        self,
        ids: I64,
        splits: I64,
        *,
        train: bool,
        anchor: Tensor,
        clicks: U32 | None = None,
        planned: PlannedBatch | None = None,
    ) -> Tensor:
        """Returns [N, D]: the row of each id. The tables have the same width.

        `splits` [F + 1]: the bounds of the features in `ids`. See `pooled` for the others.
        """
        batch = IdBatch(ids, splits, clicks)
        if train:
            return _train(_SequenceBatch(planned or self.plan(batch, train=True), splits), anchor, None, ())
        found = planned or self.plan(batch, train=False)
        return found.evaluate(lambda kernels: kernels.forward_sequence(found.plan, len(ids)))

    def _weighted_sum(self, ids: I64, splits: I64, pooled: PooledInputs, weights: Tensor) -> Tensor:
        """Like `pooled` without training, but built from torch ops and differentiable by `weights`. One feature at a time."""
        parts = []
        for feature, table in enumerate(self.feature_tables):
            begin, end = int(splits[feature]), int(splits[feature + 1])
            single = LookupGroup([self.tables[table]], [0], self.param_groups, kernels=self._kernels)
            rows = single.sequence(ids[begin:end], np.array([0, end - begin]), train=False, anchor=weights)
            bounds = pooled.offsets[feature * pooled.bags : (feature + 1) * pooled.bags + 1]
            bag = torch.from_numpy(np.repeat(np.arange(pooled.bags), np.diff(bounds))).to(self.device)
            out = rows.new_zeros(pooled.bags, rows.shape[1])
            parts.append(out.index_add(0, bag, rows * weights[begin:end, None]))
        return torch.cat(parts, 1)

    def sweep_after_step(self) -> None:
        """Runs due sweeps after a committed step, for tables whose sweeps do not depend on other ranks.

        Raises only if there is an `after_backward` that receives the error; see `sweep_in_backward`.
        """
        if self._swept_tables:
            sweep_in_backward(self._swept_tables, until_done=self.after_backward is None)

    @profiled("embcache::rows")
    def _place_rows(self, plan: _native.Plan) -> None:
        """Puts the rows of a plan into their slots. On an error each row stays in its tier."""
        tiers = [table._tier for table in self.tables]
        if not any(tiers):
            plan.wait()
        elif not plan.is_placed():
            plan.wait_for_reads()
            # Exclusive access: a thread that copies rows must not read a slot before its row is there.
            with table_memory_errors(self.table_names(), self.device):
                plan.run_exclusively(lambda: place_rows(plan, tiers))

    def place(self, plan: _native.Plan) -> KernelBackend:
        """Waits for the plan's rows, and puts them into the slots that the kernels read. Returns the kernels."""
        _, backend = self._open()
        self._place_rows(plan)
        self._warnings.warn_after_placement(plan)
        return backend


class PlannedBatch:
    """A planned batch: its rows are pinned and being loaded. Dropping it unpins them."""

    def __init__(self, group: LookupGroup, plan: _native.Plan, train: bool) -> None:
        self.group = group
        self.plan = plan
        self.train = train
        self._backend: KernelBackend | None = None

    def wait(self) -> KernelBackend:
        """Waits until every row is in its slot. Returns the kernels to run."""
        if self._backend is None:
            self._backend = self.group.place(self.plan)
        return self._backend

    def evaluate(self, run: Callable[[KernelBackend], Tensor]) -> Tensor:
        """Returns the result of `run` on the kernels, after every row is in its slot. Unpins the rows."""
        try:
            with table_memory_errors(self.group.table_names(), self.group.device):
                return run(self.wait())
        finally:
            self.release()

    def release(self) -> None:
        """Unpins the rows. Idempotent."""
        self.plan.release()


class _LookupBatch(ABC):
    """One forward and its backward. The autograd graph owns it, so that its rows are unpinned when the graph is freed."""

    def __init__(self, planned: PlannedBatch) -> None:
        self.planned = planned
        self.group = planned.group
        self.plan = planned.plan
        self.oov_sums = planned.group.oov_gradient_sums()
        self._is_done = False
        if self.group.ssd_table is not None:
            autoflush.register_forward(self)

    @profiled("embcache::lookup")
    def forward(self) -> Tensor:
        """Waits for every row, then runs the kernel."""
        with table_memory_errors(self.group.table_names(), self.group.device):
            self.backend = self.planned.wait()
            return self.run()

    @abstractmethod
    def run(self) -> Tensor:
        """Runs the forward's kernel."""

    @abstractmethod
    def backward(self, grad: Tensor, weight_grad: bool) -> Tensor | None:
        """Updates the rows from a contiguous `grad`, commits and unpins. With `weight_grad`, returns the weights' gradient."""

    def check_backward(self) -> None:
        """Raises `StateError` for a second backward of the forward, and `UnsupportedError` for `create_graph=True`."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: the update runs in the backward, which has no derivative of its own"
            )
        if self._is_done:
            raise StateError("the second backward of one forward: its update is done; run the forward again")

    def begin_backward(self) -> tuple[NDArray[np.float64], list[float | None]]:
        """Returns the native hyperparameters and each table's `max_gradient`. Afterwards another backward raises.

        Raises `StateError` if a table has no optimizer, and `ConfigError` if a hyperparameter is out of range, both without effect.
        """
        for table in self.group.tables:
            if table.optimizer is None:
                raise StateError(
                    f"table {table.name!r} has no optimizer: call apply_optimizer_in_backward() on its parameter before "
                    'sharding, or give the sharder fused_params={"optimizer": ..., "learning_rate": ...}'
                )
        groups = self.group.param_groups()
        numbers, limits = native_hyperparameters(groups), gradient_limits(groups)
        if self.group.ssd_table is not None:
            autoflush.begin_backward(self, self.group.ssd_table)
        self._is_done = True
        return numbers, limits

    def clamp_gradient(self, grad: Tensor, limits: Sequence[float | None], sizes: Sequence[int], dim: int) -> Tensor:
        """Returns `grad` with the part of each feature, of `sizes` along `dim`, clamped to the limit of its table."""
        return clamp_gradient(grad, [limits[table] for table in self.group.feature_tables], sizes, dim)

    def abandon(self) -> None:
        """Notifies the other ranks of a failed backward and unpins the rows. The backward cannot be tried again."""
        self._is_done = True
        self.oov_sums.notify_failure()
        self.plan.release()


class _PooledBatch(_LookupBatch):
    def __init__(self, planned: PlannedBatch, pooled: PooledInputs) -> None:
        super().__init__(planned)
        self.pooled = pooled

    def run(self) -> Tensor:
        return self.backend.forward_pooled(self.plan, self.pooled)

    def backward(self, grad: Tensor, weight_grad: bool) -> Tensor | None:
        numbers, limits = self.begin_backward()
        grad = self.clamp_gradient(
            grad, limits, [self.group.tables[table].dim for table in self.group.feature_tables], 1
        )
        update = GradientUpdate(self.plan, grad, numbers, self.oov_sums)
        return self.backend.backward_pooled(update, self.pooled, weight_grad)


class _SequenceBatch(_LookupBatch):
    def __init__(self, planned: PlannedBatch, splits: I64) -> None:
        super().__init__(planned)
        self.splits = splits

    def run(self) -> Tensor:
        return self.backend.forward_sequence(self.plan, int(self.splits[-1]))

    def backward(self, grad: Tensor, weight_grad: bool) -> None:
        del weight_grad  # sequences have no weights
        numbers, limits = self.begin_backward()
        grad = self.clamp_gradient(grad, limits, np.diff(self.splits).tolist(), 0)
        self.backend.backward_sequence(GradientUpdate(self.plan, grad, numbers, self.oov_sums))


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, weights: Tensor | None, batch: _LookupBatch, *unchanged_inputs: Tensor
    ) -> Tensor:
        ctx.batch = batch
        # Autograd records the versions of these tensors. Inference tensors have no version, and autograd rejects them.
        noted = [each for each in (weights, *unchanged_inputs) if each is not None and not each.is_inference()]
        if noted:
            ctx.save_for_backward(*noted)
        return batch.forward()

    @staticmethod
    @profiled("embcache::update")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        batch: _LookupBatch = ctx.batch
        after = batch.group.after_backward
        error: Exception | None = None
        weight_grad = None
        try:
            batch.check_backward()
            _ = ctx.saved_tensors  # raises if one was changed in place after the forward
            check_backward_updates_rows(ctx.next_functions[0][0])
            with table_memory_errors(batch.group.table_names(), batch.group.device):
                weight_grad = batch.backward(contiguous(grads[0]), ctx.needs_input_grad[1])
            batch.group.sweep_after_step()
        except Exception as caught:
            if after is None:
                raise
            # Another rank's error is raised here when the ranks agree.
            error = None if isinstance(caught, OtherRankFailedError) else caught
            batch.abandon()
        try:
            if after is not None:
                after(error)
        finally:
            del error  # breaks a reference cycle with its traceback, which would keep the batch until the next garbage collection
        anchor_grad = anchor_gradient(ctx.next_functions[0][0])
        return anchor_grad, weight_grad, *(None for _ in ctx.needs_input_grad[2:])


def _train(batch: _LookupBatch, anchor: Tensor, weights: Tensor | None, unchanged_inputs: Sequence[Tensor]) -> Tensor:
    try:
        out: Tensor = _FusedLookup.apply(anchor, weights, batch, *unchanged_inputs)
    except BaseException:
        batch.plan.release()
        raise
    return out
