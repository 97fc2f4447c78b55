"""Sends ids to the rank that owns their bucket, and pooled rows back.

These are TorchRec's own shardings, with its exchanges of inputs and outputs, changed in two ways. Row-wise, an id is sent unchanged
to the rank that owns its bucket (see `_buckets`). The ids of an averaged bag of length L get weights of 1/L before the bag is split
over ranks. Every rank then sums, and no divisor is needed at the end. If the batch has clicks, L is packed into the same number as
the clicks.

Shapes: F features, B bags per feature, N ids.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import (
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    RwSparseFeaturesDist,
)
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding, TwSparseFeaturesDist
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_embcache._buckets import hash_ids_, unhash_ids_
from torchrec_embcache.config import bucket_range
from torchrec_embcache.exceptions import UnsupportedError
from torchrec_embcache.modules._features import copy_features

__all__ = ["SHARDING_TYPES", "choose_sharding", "split_clicks_and_weights"]

SHARDING_TYPES = (ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value)

# Clicks and a bag's length are packed into one float64. Both are exact: lengths are smaller than this, and clicks below 2^24.
_DIVISORS = 2.0**28

# Creates the lookup of one sharding, from this rank's tables as TorchRec's sharded configs. True: bags are split over ranks.
LookupFactory = Callable[[list[Any], bool], nn.Module]


class BucketFeaturesDist(RwSparseFeaturesDist):
    """Sends each id to the rank that owns its bucket.

    TorchRec takes its input modulo the number of buckets, so that it is given the hashes of the ids. The hash is a bijection, and
    the ids are restored from their hashes before they are sent.
    """

    def __init__(
        self,
        pg: Any,
        num_buckets: list[int],
        mean: list[bool],
        device: torch.device | None,
        is_sequence: bool,
    ) -> None:
        """For the table of feature f, `num_buckets[f]` is the number of buckets, and `mean[f]` is true if bags are averaged."""
        ranks = pg.size()
        accepted = [max(buckets, ranks) for buckets in num_buckets]
        # zch_sizes and block sizes of 0 make fbgemm compute remainders. Without zch_sizes it rejects ranges of different sizes.
        super().__init__(
            pg=pg,
            num_features=len(num_buckets),
            feature_hash_sizes=[0] * len(num_buckets),
            feature_total_num_buckets=accepted,
            device=device,
            is_sequence=is_sequence,
            keep_original_indices=True,
            zch_sizes=accepted,
        )
        if accepted != num_buckets:
            # TorchRec rejects fewer buckets than ranks, which a loaded checkpoint may have. fbgemm supports them: a rank without
            # buckets receives no ids.
            begins = [[bucket_range(rank, ranks, buckets)[0] for rank in range(ranks)] for buckets in num_buckets]
            self.zch_bucketize_row_pos = [
                torch.tensor([*begin, buckets], dtype=torch.int64, device="cpu")
                for begin, buckets in zip(begins, num_buckets, strict=True)
            ]
            self._feature_total_num_blocks_tensor = torch.tensor([num_buckets], device=device, dtype=torch.int64)
        self._mean = mean
        # A hook runs before the exchange even if a pipeline replaces the exchange's forward.
        self._dist.register_forward_pre_hook(self._restore_ids)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        """Starts the exchange, with weights if bags are averaged."""
        if any(self._mean):
            sparse_features = _with_mean_weights(sparse_features, self._mean)
        return super().forward(_with_hashes(sparse_features))

    def _restore_ids(self, _exchange: nn.Module, features: tuple[KeyedJaggedTensor]) -> None:
        """Restores the ids from their hashes in place."""
        unhash_ids_(features[0].values())


def _with_hashes(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the batch with hashes instead of ids."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=hash_ids_(features.values().clone(memory_format=torch.contiguous_format)),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride(),
    )


def _with_mean_weights(features: KeyedJaggedTensor, mean: list[bool]) -> KeyedJaggedTensor:
    lengths = features.lengths()
    divisors = torch.ones(len(mean), lengths.numel() // len(mean), dtype=torch.float32, device=lengths.device)
    rows = [row for row, averaged in enumerate(mean) if averaged]
    divisors[rows] = lengths.view(len(mean), -1)[rows].clamp(min=1).to(torch.float32)
    each = torch.repeat_interleave(divisors.view(-1), lengths.long())
    clicks = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=each.reciprocal() if clicks is None else clicks * _DIVISORS + each,
        lengths=lengths,
        stride=features.stride(),
    )


def split_clicks_and_weights(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacks the float64 [N] of `BucketFeaturesDist`: the clicks [N], and the float32 weights [N] that compute the mean."""
    return packed.div(_DIVISORS).floor(), packed.remainder(_DIVISORS).to(torch.float32).reciprocal()


class PaddedPooledDist(RwPooledEmbeddingDist):
    """Sums the pooled rows of all ranks, and returns to each rank those of its own bags. Batch sizes may differ between ranks.

    TorchRec supports different sizes only with NCCL. The bags of every rank are therefore padded with zeros to the largest batch.
    """

    def forward(self, local_embs: torch.Tensor, sharding_ctx: Any = None) -> Any:
        """Converts `local_embs` [B of rank 0 + B of rank 1 + ..., C] to an awaitable [B of this rank, C]."""
        sizes: list[int] = list(sharding_ctx.batch_size_per_rank) if sharding_ctx is not None else []
        if len(set(sizes)) <= 1:
            return super().forward(local_embs, sharding_ctx)
        most, own = max(sizes), sizes[dist.get_rank(self._pg)]
        padded = [nn.functional.pad(part, (0, 0, 0, most - len(part))) for part in torch.split(local_embs, sizes)]
        pooled = super().forward(torch.cat(padded), None)
        pooled.callbacks.append(lambda values: values[:own])
        return pooled


class _CacheSharding:
    """The base of the four shardings, which creates the lookup of this package.

    `make_lookup` is set before any other use.
    """

    make_lookup: LookupFactory
    spreads_bags = False
    _grouped_embedding_configs: list[Any]

    def sharded_tables(self) -> list[Any]:
        """Returns TorchRec's configs of this rank's tables, in the order in which their features arrive."""
        return [table for group in self._grouped_embedding_configs for table in group.embedding_tables]

    def create_lookup(self, *_args: Any, **_kwargs: Any) -> nn.Module:
        """Creates the lookup of this rank's tables, in the order in which their features arrive."""
        return self.make_lookup(self.sharded_tables(), self.spreads_bags)


class _RowWise(_CacheSharding):
    spreads_bags = True
    is_sequence = False
    _pg: Any
    _device: torch.device

    def create_input_dist(self, device: torch.device | None = None) -> BucketFeaturesDist:
        """Creates the exchange that sends ids to the owners of their buckets."""
        tables = self.sharded_tables()
        buckets = [table.total_num_buckets for table in tables for _ in table.feature_names]
        mean = [table.pooling == PoolingType.MEAN for table in tables for _ in table.feature_names]
        return BucketFeaturesDist(self._pg, buckets, mean, device or self._device, self.is_sequence)


class RowWisePooledSharding(_RowWise, RwPooledEmbeddingSharding):
    """The buckets of a table are sharded over all ranks. Each rank pools its own rows, and a reduce-scatter sums them."""

    def create_output_dist(self, device: torch.device | None = None) -> PaddedPooledDist:
        """Creates the exchange that sends pooled rows back to the ranks of their bags."""
        del device
        return PaddedPooledDist(
            self._pg, embedding_dims=self.embedding_dims(), qcomm_codecs_registry=self.qcomm_codecs_registry
        )


class RowWiseSequenceSharding(_RowWise, RwSequenceEmbeddingSharding):
    """The buckets of a table are sharded over all ranks. Rows are returned by an all-to-all."""

    is_sequence = True


class TableFeaturesDist(TwSparseFeaturesDist):
    """Sends each id to the rank of its table."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
        """Starts the exchange. A pipeline with `clear_data_dist_inputs` frees the sent tensors, which are then a copy."""
        if PipelinedForward._use_main_stream_for_dist_init:  # noqa: SLF001 - such a pipeline sets it
            sparse_features = copy_features(sparse_features)
        return super().forward(sparse_features)


class _TableWise(_CacheSharding):
    _pg: Any
    features_per_rank: Callable[[], list[int]]

    def create_input_dist(self, device: torch.device | None = None) -> TableFeaturesDist:
        """Creates the exchange that sends ids to the ranks of their tables."""
        del device
        return TableFeaturesDist(self._pg, self.features_per_rank())


class TableWisePooledSharding(_TableWise, TwPooledEmbeddingSharding):
    """A table is on one rank, which pools entire bags."""


class TableWiseSequenceSharding(_TableWise, TwSequenceEmbeddingSharding):
    """A table is on one rank. Rows are returned by an all-to-all."""


def choose_sharding(sharding_type: str, row_wise: type[Any], table_wise: type[Any]) -> type[Any]:
    """Returns the class for `sharding_type`. Raises `UnsupportedError` for unsupported types."""
    if sharding_type not in SHARDING_TYPES:
        raise UnsupportedError(
            f"sharding_type={sharding_type!r} is not supported yet: use {' or '.join(map(repr, SHARDING_TYPES))}"
        )
    return row_wise if sharding_type == ShardingType.ROW_WISE.value else table_wise
