"""The sharded collections: TorchRec's exchanges of ids and rows between ranks, over the tables of this package."""

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
    get_ec_index_dedup,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_embcache.exceptions import InputError, UnsupportedError

from ._module import ShardedCacheModule
from ._sharding import (
    RowWisePooledSharding,
    RowWiseSequenceSharding,
    TableWisePooledSharding,
    TableWiseSequenceSharding,
    choose_sharding,
)

__all__ = ["EmbCacheShardedEmbeddingBagCollection", "EmbCacheShardedEmbeddingCollection"]


@dataclass
class BagContext(EmbeddingBagCollectionContext):
    """The context of one batch of a bag collection during a step, with its first error."""

    error: Exception | None = None


@dataclass
class SequenceContext(EmbeddingCollectionContext):
    """The context of one batch of a sequence collection during a step, with its first error."""

    error: Exception | None = None


class EmbCacheShardedEmbeddingBagCollection(ShardedCacheModule, ShardedEmbeddingBagCollection):
    """`EmbCacheEmbeddingBagCollection` under `DistributedModelParallel`. Created by `EmbCacheEmbeddingBagCollectionSharder`.

    A table is sharded row-wise, so that each rank owns a range of its buckets, or table-wise, so that one rank has all of it. Every
    rank passes a `KeyedJaggedTensor` of its own samples, `(F, B, L[f][i])`, and gets an awaitable `KeyedTensor` of these samples,
    `(B, C)`, equal to the unsharded module's. An error on one rank is raised on every rank, at the same step.

    - `F`: features (keys). `B`: batch size of this rank. `L[f][i]`: number of ids of feature `f` at index `i`.
    - `C`: the sum of the widths of all features.

    Examples:
        In a world of one rank, with `torch.distributed` initialized:

        >>> import torch
        >>> from torchrec import EmbeddingBagConfig
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec_embcache import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagCollectionSharder
        >>> from torchrec_embcache import TierBudgets, cache_modules
        >>> item = EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=1000, feature_names=["item"])
        >>> ebc = EmbCacheEmbeddingBagCollection(tables=[item], tiers=TierBudgets(host_bytes="1MiB"))
        >>> model = DistributedModelParallel(
        ...     torch.nn.ModuleDict({"tables": ebc}), device=torch.device("cpu"), sharders=[EmbCacheEmbeddingBagCollectionSharder()]
        ... )
        >>> sharded = cache_modules(model)["tables"]
        >>> type(sharded).__name__, list(sharded.tables)
        ('EmbCacheShardedEmbeddingBagCollection', ['item'])
    """

    _prefix = "embedding_bags"

    def _finish(self) -> None:
        # TorchRec's divisor is wrong if a collection mixes row-wise and table-wise. Here weights of 1/L compute the mean.
        self._has_mean_pooling_callback = False
        super()._finish()

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """Returns this package's sharding instead of TorchRec's."""
        del permute_embeddings  # only column-wise sharding needs it
        kind = sharding_infos[0].param_sharding.sharding_type
        sharding = choose_sharding(kind, RowWisePooledSharding, TableWisePooledSharding)
        return sharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    def _shardings(self) -> list[Any]:
        return list(self._embedding_shardings)

    def create_context(self) -> BagContext:
        """Returns the context of one batch."""
        return BagContext()


class EmbCacheShardedEmbeddingCollection(ShardedCacheModule, ShardedEmbeddingCollection):
    """`EmbCacheEmbeddingCollection` under `DistributedModelParallel`. Created by `EmbCacheEmbeddingCollectionSharder`.

    It is sharded like `EmbCacheShardedEmbeddingBagCollection`. Every rank passes a `KeyedJaggedTensor` of its own samples, `(F, B,
    L[f][i])`, and gets an awaitable dict with a `JaggedTensor` for each feature, whose values are `(N[f], D)`.

    - `F`: features (keys). `B`: batch size of this rank, 1 or more. `L[f][i]`: number of ids of feature `f` at index `i`.
    - `N[f]`: the ids of feature `f` on this rank. `D`: the width of the tables.

    Examples:
        In a world of one rank, with `torch.distributed` initialized:

        >>> import torch
        >>> from torchrec import EmbeddingConfig
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec_embcache import EmbCacheEmbeddingCollection, EmbCacheEmbeddingCollectionSharder
        >>> from torchrec_embcache import TierBudgets, cache_modules
        >>> word = EmbeddingConfig(name="word", embedding_dim=4, num_embeddings=1000, feature_names=["word"])
        >>> ec = EmbCacheEmbeddingCollection(tables=[word], tiers=TierBudgets(host_bytes="1MiB"))
        >>> model = DistributedModelParallel(
        ...     torch.nn.ModuleDict({"words": ec}), device=torch.device("cpu"), sharders=[EmbCacheEmbeddingCollectionSharder()]
        ... )
        >>> sharded = cache_modules(model)["words"]
        >>> type(sharded).__name__, list(sharded.tables)
        ('EmbCacheShardedEmbeddingCollection', ['word'])
    """

    _prefix = "embeddings"

    def _prepare(self, module: Any, *rest: Any) -> None:
        # TorchRec would detect this only after `module` has released its tables.
        if get_ec_index_dedup():
            raise UnsupportedError("TorchRec's index dedup (set_ec_index_dedup) is not supported yet: turn it off")
        super()._prepare(module, *rest)

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """Returns this package's sharding instead of TorchRec's."""
        sharding = choose_sharding(sharding_type, RowWiseSequenceSharding, TableWiseSequenceSharding)
        return sharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    def _shardings(self) -> list[Any]:
        return list(self._sharding_type_to_sharding.values())

    def _check(self, features: Any) -> KeyedJaggedTensor:
        features = super()._check(features)
        if features.stride() == 0:
            raise InputError(
                f"{self._owner}: the batch has 0 samples, which TorchRec cannot split into sequences: give each rank one or more"
            )
        return features

    def create_context(self) -> SequenceContext:
        """Returns the context of one batch."""
        return SequenceContext(sharding_contexts=[])
