"""The lookup of one sharding on one rank.

Its input is features as they arrive from all ranks; its output is pooled or single rows. The backward updates the rows.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingLookup
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_embcache._device.host_copies import host_copies
from torchrec_embcache._lookup.group import IdBatch, LookupGroup, PlannedBatch
from torchrec_embcache._lookup.prefetch import MAX_PREFETCHED
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.modules._optimizer import TableOptimizer
from torchrec_embcache.modules._tables import ModuleTables, placeholder_parameter

from ._sharding import split_clicks_and_weights

__all__ = ["CacheLookup", "PlannedFeatures"]

I64 = NDArray[np.int64]
# The contents of a batch's weights: clicks, with or without the weights that compute the mean.
ClickLayout = Literal["alone", "with mean weights"]


class HostFeatures:
    """The host copies of one batch of one lookup."""

    def __init__(self, features: KeyedJaggedTensor, clicks: ClickLayout | None, arrival_stream: Any) -> None:
        """`arrival_stream` is the stream on which the batch arrived; see `host_copies`."""
        self.features = features
        self.bags: int = features.stride()
        # Nothing is computed on a device here: the memory would belong to another stream than the forward's.
        counted = [features.weights()] if clicks is not None else []
        ids, lengths, *counted = host_copies([features.values(), features.lengths(), *counted], arrival_stream)
        if clicks == "with mean weights":
            counted = [split_clicks_and_weights(both)[0] for both in counted]
        self.offsets: I64 = np.zeros(lengths.numel() + 1, np.int64)
        np.cumsum(lengths.numpy().reshape(-1), out=self.offsets[1:])
        count = len(features.keys())
        splits = np.ascontiguousarray(self.offsets[:: self.bags]) if self.bags else np.zeros(count + 1, np.int64)
        clicked = counted[0].numpy().astype(np.uint32) if counted else None
        self.ids = IdBatch(ids.numpy(), splits, clicked)


class PlannedFeatures:
    """One batch of one lookup: its ids, and its plan if this rank has tables."""

    def __init__(self, features: HostFeatures, train: bool, clicks: ClickLayout | None) -> None:
        self.train = train
        self.offsets, self.bags, self.ids = features.offsets, features.bags, features.ids
        self.weights = features.features.weights_or_none() if clicks is None else None
        if clicks == "with mean weights":
            self.weights = split_clicks_and_weights(features.features.weights())[1]
        self.batch: PlannedBatch | None = None

    def wait(self) -> None:
        """Waits until every row is in its slot."""
        if self.batch is not None:
            self.batch.wait()

    def release(self) -> None:
        """Unpins the rows. Idempotent."""
        if self.batch is not None:
            self.batch.release()


class CacheLookup(BaseEmbeddingLookup, FusedOptimizerModule):
    """Looks up ids in this rank's tables of one sharding. Without tables its part of each exchange is empty.

    The calls of a batch, in order: `plan`, `PlannedFeatures.wait`, `set_next`, `forward`.
    """

    def __init__(
        self,
        tables: ModuleTables,
        configs: list[Any],
        *,
        spreads_bags: bool,
        pooled: bool,
        after_backward: Callable[[Exception | None], None],
        all_reduce: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """`configs` are in the order in which their features arrive.

        Every backward calls `after_backward` with its error or None. `all_reduce` sums a tensor over all ranks in place, if they
        share the tables.
        """
        super().__init__()
        self._pooled = pooled
        # Bags sharded over ranks have weights that compute the mean: see `sharding`.
        averaged = [pooled and config.pooling == PoolingType.MEAN for config in configs for _ in config.feature_names]
        self._mean = [not spreads_bags and each for each in averaged]
        self._clicks: ClickLayout | None = None
        if tables.counts_clicks:
            self._clicks = "with mean weights" if spreads_bags and any(averaged) else "alone"
        self._params = {
            config.name: placeholder_parameter(config.embedding_dim, tables.device, optimized=True)
            for config in configs
        }
        self._optimizer = tables.optimizer("", self._params, self._params)
        self._group: LookupGroup | None = (
            tables.group(configs, self._optimizer, after_backward, all_reduce) if configs else None
        )
        self._anchor = torch.zeros(0, dtype=torch.float32, device=tables.device, requires_grad=True)
        self._after_backward = after_backward
        self._next: PlannedFeatures | None = None
        self._prefetched: list[HostFeatures] = []

    @property
    def fused_optimizer(self) -> TableOptimizer:
        """The optimizer, with one param group per table."""
        return self._optimizer

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the zero-row parameter of each table."""
        yield from self._params.items()

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Mapping[str, Any]:
        """Returns an empty dict, because `Saver` saves the rows."""
        return {}

    def flush(self) -> None:
        """Does nothing. TorchRec calls this before a state_dict."""

    def purge(self) -> None:
        """Does nothing. TorchRec calls this before a state_dict is loaded."""

    def prefetch_batch(
        self, features: KeyedJaggedTensor, *, train: bool, in_background: bool, on_error: Callable[[Exception], None]
    ) -> None:
        """Starts loading the rows of a batch that a later forward looks up. Call it in the order of the forwards.

        `on_error` is called with an error. With `in_background` a thread plans the batch; call `wait_until_planned` before any
        other use of the tables. The batch has arrived on the caller's stream.
        """
        if self._group is None:
            return
        try:
            there = HostFeatures(features, self._clicks, None)
        except Exception as error:
            self._group.prefetch_queue.prefetch_unread(self._group.plan_options(train))
            on_error(error)
            return
        try:
            # On the CPU the batch was not copied and may change until its forward.
            there.ids = there.ids.copy() if features.device().type == "cpu" else there.ids
            self._prefetched = [*self._prefetched[-MAX_PREFETCHED:], there]
            if in_background:
                self._group.prefetch_in_background(there.ids, train=train, on_error=on_error)
            else:
                self._group.prefetch(there.ids, train=train)
        except Exception as error:
            on_error(error)

    def place_next(self, features: KeyedJaggedTensor, on_error: Callable[[Exception], None]) -> None:
        """Moves the rows of the next batch to the device, if it was prefetched; see `LookupGroup.place_next`."""
        there = next((there for there in self._prefetched if there.features is features), None)
        if self._group is not None and there is not None:
            self._group.place_next(there.ids, on_error)

    def unplace(self) -> None:
        """Unpins the rows that `place_next` moved."""
        if self._group is not None:
            self._group.prefetch_queue.unplace()

    def wait_until_planned(self) -> None:
        """Waits until all prefetched batches are planned."""
        if self._group is not None:
            self._group.prefetch_queue.wait_until_planned()

    def drop_prefetched(self) -> None:
        """Unpins the rows of all prefetched batches."""
        self._prefetched.clear()
        if self._group is not None:
            self._group.drop_prefetched()

    def plan(self, features: KeyedJaggedTensor, *, train: bool, arrival_stream: Any = None) -> PlannedFeatures:
        """Plans the batch of the next forward. `arrival_stream` is the stream on which it arrived; see `host_copies`."""
        planned = PlannedFeatures(self._host_features(features, arrival_stream), train, self._clicks)
        if self._group is not None:
            planned.batch = self._group.plan(planned.ids, train=train)
        return planned

    def _host_features(self, features: KeyedJaggedTensor, arrival_stream: Any) -> HostFeatures:
        """Returns the host copies of a batch, which already exist if it was prefetched."""
        place = next((place for place, there in enumerate(self._prefetched) if there.features is features), None)
        if place is None:
            return HostFeatures(features, self._clicks, arrival_stream)
        found = self._prefetched[place]
        del self._prefetched[: place + 1]  # the previous ones get no forward
        return found

    def set_next(self, planned: PlannedFeatures) -> None:
        """Sets the batch of the next forward."""
        self._next = planned

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns pooled rows [B, C], or one row per id [N, D]; empty if this rank has no table. Consumes the planned batch."""
        planned, self._next = self._next, None
        if planned is None:
            raise StateError("the lookup has no planned batch: call the sharded module, not its lookups")
        del sparse_features
        if self._group is None:
            shape = (planned.bags, 0) if self._pooled else (0,)
            if not planned.train:
                return self._anchor.new_empty(shape)
            empty: torch.Tensor = _EmptyLookup.apply(self._anchor, shape, self._after_backward)
            return empty
        if self._pooled:
            return self._group.pooled(
                planned.ids.ids,
                planned.offsets,
                self._mean,
                planned.weights,
                train=planned.train,
                anchor=self._anchor,
                clicks=planned.ids.clicks,
                planned=planned.batch,
            )
        ids = planned.ids
        return self._group.sequence(
            ids.ids, ids.splits, train=planned.train, anchor=self._anchor, clicks=ids.clicks, planned=planned.batch
        )


class _EmptyLookup(torch.autograd.Function):
    """Makes a rank without a table of the lookup take part in the collective agreement in the backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, shape: tuple[int, ...], after_backward: Callable[[Exception | None], None]
    ) -> torch.Tensor:
        ctx.after_backward = after_backward
        return anchor.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.after_backward(None)
        return None, None, None
