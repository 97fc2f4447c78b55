"""The unsharded collections: TorchRec's classes over tables larger than memory.

Shapes: F features, B samples per batch, N ids, D a table's width, C the sum of the widths of all features.
"""

from collections.abc import Sequence
from typing import Self, cast

import numpy as np
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_embcache._device.host_copies import host_copies
from torchrec_embcache.config import TierBudgets
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.nn._fx import trace_as_call

from ._collection import CacheCollection, TrainingOptimizer, match_configs, placeholder_configs
from ._features import clicks_of, ids_and_offsets
from .configs import EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig, as_cache_configs, lifecycle_of

__all__ = ["EmbCacheEmbeddingBagCollection", "EmbCacheEmbeddingCollection"]


class EmbCacheEmbeddingBagCollection(CacheCollection, EmbeddingBagCollection):
    """TorchRec's `EmbeddingBagCollection` over tables larger than memory: pooled rows of several features.

    It takes a `KeyedJaggedTensor` of shape `(F, B, L[f][i])` and returns a `KeyedTensor` whose values have shape `(B, C)`:

    - `F`: features (keys). `B`: batch size. `N`: ids of the batch, of all features together.
    - `L[f][i]`: number of ids of feature `f` at batch index `i`. It may differ for each.
    - `C`: the sum of the widths of all features. A table used by two features counts twice.

    Columns are ordered by feature, in the order of `tables` and of each table's `feature_names`. In feature `f`'s columns, row `i`
    is the sum or the mean of the rows of the ids of `f` at batch index `i`, and zeros if there are none.

    `loss.backward()` updates the rows, with the optimizer of `apply_optimizer_in_backward` or of the sharder's `fused_params`.
    After `eval()` and under `torch.no_grad()` nothing is updated or inserted.

    Args:
        tables: the tables, as `EmbCacheEmbeddingBagConfig`s. TorchRec's own configs are accepted, with default settings.
        is_weighted: features have weights, one per id. Only for tables with `PoolingType.SUM`.
        device: the device of results; by default the CPU. "meta" for a module that is to be sharded.
        tiers: budgets of the tables without their own. Each of these gets a minimum. Tables with rows only in RAM use the rest as
            needed; among other tables it is split by expected rows times bytes per row.
        name: names the module's SSD directory. 1 to 200 bytes of UTF-8.
        seed: the seed of the rows' initial values. The same seed, table name and id give the same row everywhere.
        replicated: the module is not sharded, and each of several ranks has separate rows, which are not averaged. Without it,
            training unsharded on several ranks raises `StateError`, because the sharder was forgotten.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
        UnsupportedError: a setting of TorchRec's that is not supported.

    The first use raises errors of an SSD directory (`InUseError`, `PathError`, `StoragePermissionError`, `MismatchError`).

    Examples:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor, PoolingType
        >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> from torchrec_embcache import (
        ...     EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, TierBudgets, initializers
        ... )
        >>> table_1 = EmbCacheEmbeddingBagConfig(
        ...     name="t1", embedding_dim=3, num_embeddings=1000, feature_names=["f1"], pooling=PoolingType.SUM,
        ...     initializer=initializers.Linear(0.0, 1.0),  # every row is born as 0.0, 0.5, 1.0
        ... )
        >>> table_2 = EmbCacheEmbeddingBagConfig(
        ...     name="t2", embedding_dim=2, num_embeddings=1000, feature_names=["f2"], pooling=PoolingType.SUM,
        ...     initializer=initializers.Constant(1.0),
        ... )
        >>> ebc = EmbCacheEmbeddingBagCollection(tables=[table_1, table_2], tiers=TierBudgets(host_bytes="1MiB"))
        >>> apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
        >>> #         i = 0   i = 1   i = 2   <- batch index
        >>> # "f1"   [0, 1]    []      [2]
        >>> # "f2"    [3]     [4]   [5, 6, 7]
        >>> features = KeyedJaggedTensor(
        ...     keys=["f1", "f2"],
        ...     values=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]),
        ...     offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]),  # the bags of "f1" are values[0:2], values[2:2] and values[2:3]
        ... )
        >>> pooled = ebc(features)
        >>> pooled.values().detach()  # [B, C]: 3 columns of "f1", then 2 of "f2"
        tensor([[0.0000, 1.0000, 2.0000, 1.0000, 1.0000],
                [0.0000, 0.0000, 0.0000, 1.0000, 1.0000],
                [0.0000, 0.5000, 1.0000, 3.0000, 3.0000]])
        >>> pooled.keys(), pooled.offset_per_key()
        (['f1', 'f2'], [0, 3, 5])
        >>> pooled.values().sum().backward()  # the update happens here
        >>> ebc.tables["t1"].read_rows([0, 2]).weights
        tensor([[-0.5000,  0.0000,  0.5000],
                [-0.5000,  0.0000,  0.5000]])
        >>> ebc.close()
    """

    _prefix = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        tiers: TierBudgets | None = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> None:
        configs = as_cache_configs(tables, EmbCacheEmbeddingBagConfig)
        averaged = [config.name for config in configs if config.pooling == PoolingType.MEAN]
        if is_weighted and averaged:
            raise UnsupportedError(
                f"is_weighted=True with pooling MEAN (tables {', '.join(averaged)}): as in torch, use PoolingType.SUM"
            )
        clicked = [config.name for config in configs if lifecycle_of(config).counts_clicks]
        if is_weighted and clicked:
            raise ConfigError(
                f"is_weighted=True with admission ShowClick (tables {', '.join(clicked)}): clicks are the batch's weights; put "
                "these tables into a collection that is not weighted"
            )
        EmbeddingBagCollection.__init__(self, placeholder_configs(configs), is_weighted, torch.device("meta"))
        self._embedding_bag_configs = configs
        self._prepare(configs, tiers, name, seed, device, replicated)
        self._mean = [config.pooling == PoolingType.MEAN for config in configs for _ in config.feature_names]

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingBagCollection,
        tiers: TierBudgets | None = None,
        *,
        tables: Sequence[EmbeddingBagConfig] | None = None,
        optimizer: TrainingOptimizer = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> Self:
        """Creates a module with the rows of TorchRec's `collection`, which are copied in chunks. Shard it afterwards, if needed.

        Args:
            collection: unsharded, with float32 weights.
            tiers: budgets, as for the class.
            tables: further settings of each table, such as its policy. Names, dims and features are those of the collection.
            optimizer: the optimizer that trained the collection: a torch optimizer with its parameters, or "in_backward" for the
                one of `apply_optimizer_in_backward`. The tables continue training with its kind, hyperparameters, slots and step.
                None omits all of these.
            name: as for the class.
            seed: as for the class.
            replicated: as for the class.

        Raises:
            ConfigError: `tables` does not match the collection, or `optimizer` does not have its weights.
            InputError: the optimizer's state is not that of such weights.
            UnsupportedError: the weights are not float32, or the optimizer is not supported.

        Examples:
            >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
            >>> from torchrec_embcache import EmbCacheEmbeddingBagCollection, TierBudgets
            >>> config = EmbeddingBagConfig(name="item", embedding_dim=4, num_embeddings=100, feature_names=["item"])
            >>> ebc = EmbeddingBagCollection([config])
            >>> adagrad = torch.optim.Adagrad(ebc.parameters())
            >>> ours = EmbCacheEmbeddingBagCollection.from_torchrec(ebc, TierBudgets(host_bytes="1MiB"), optimizer=adagrad)
            >>> rows = ours.tables["item"].read_rows(range(100))
            >>> torch.equal(rows.weights, ebc.embedding_bags["item"].weight)
            True
        """
        configs = match_configs(tables, collection.embedding_bag_configs(), EmbCacheEmbeddingBagConfig)
        made = cls(configs, collection.is_weighted(), tiers=tiers, name=name, seed=seed, replicated=replicated)
        made.import_from_torchrec(collection.embedding_bags, optimizer)
        return made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows of a batch, float32 `(B, C)`. Causes a graph break in `torch.compile`.

        Keys of `features` that no table reads are ignored. Raises `InputError` for a malformed batch, `StateError` if a table to be
        trained has no optimizer, and `CapacityError` if the last tier is full and `on_full` is "error".
        """
        traced = trace_as_call(self, features)
        if traced is not None:
            return traced
        features, lookup, train = self._begin_forward(features, weighted=self._is_weighted)
        ids, offsets = ids_and_offsets(features)
        values = lookup.pooled(
            ids,
            offsets,
            self._mean,
            features.weights() if self._is_weighted else None,
            train=train,
            anchor=self._anchor,
            clicks=clicks_of(features) if self._counts_clicks else None,
        )
        return KeyedTensor(keys=self._embedding_names, values=values, length_per_key=self._lengths_per_embedding)


class EmbCacheEmbeddingCollection(CacheCollection, EmbeddingCollection):
    """TorchRec's `EmbeddingCollection` over tables larger than memory: one row per id, not pooled.

    It takes a `KeyedJaggedTensor` of shape `(F, B, L[f][i])` and returns a `JaggedTensor` for each feature `f`, whose values have
    shape `(N[f], D)`:

    - `F`: features (keys). `B`: batch size. `N`: ids of the batch, of all features together.
    - `L[f][i]`: number of ids of feature `f` at batch index `i`. It may differ for each.
    - `N[f]`: the ids of feature `f`, `sum(L[f])`. `D`: the width of the tables, which is the same for all.

    Training and evaluation are those of `EmbCacheEmbeddingBagCollection`.

    Args:
        tables: the tables, as `EmbCacheEmbeddingConfig`s. TorchRec's own configs are accepted, with default settings.
        device: the device of results; by default the CPU. "meta" for a module that is to be sharded.
        need_indices: results have their ids as weights.
        tiers: budgets of the tables without their own. Each of these gets a minimum. Tables with rows only in RAM use the rest as
            needed; among other tables it is split by expected rows times bytes per row.
        name: names the module's SSD directory. 1 to 200 bytes of UTF-8.
        seed: the seed of the rows' initial values. The same seed, table name and id give the same row everywhere.
        replicated: the module is not sharded, and each of several ranks has separate rows, which are not averaged. Without it,
            training unsharded on several ranks raises `StateError`, because the sharder was forgotten.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
        UnsupportedError: a setting of TorchRec's that is not supported.

    The first use raises errors of an SSD directory (`InUseError`, `PathError`, `StoragePermissionError`, `MismatchError`).

    Examples:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> from torchrec_embcache import EmbCacheEmbeddingCollection, EmbCacheEmbeddingConfig, TierBudgets, initializers
        >>> table = EmbCacheEmbeddingConfig(
        ...     name="t", embedding_dim=3, num_embeddings=1000, feature_names=["f1", "f2"],
        ...     initializer=initializers.Linear(0.0, 1.0),  # every row is born as 0.0, 0.5, 1.0
        ... )
        >>> ec = EmbCacheEmbeddingCollection(tables=[table], tiers=TierBudgets(host_bytes="1MiB"))
        >>> apply_optimizer_in_backward(torch.optim.SGD, ec.parameters(), {"lr": 0.5})
        >>> #         i = 0   i = 1   i = 2   <- batch index
        >>> # "f1"   [0, 1]    []      [2]
        >>> # "f2"    [3]     [4]   [5, 6, 7]
        >>> features = KeyedJaggedTensor(
        ...     keys=["f1", "f2"],
        ...     values=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7]),
        ...     offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]),  # the bags of "f1" are values[0:2], values[2:2] and values[2:3]
        ... )
        >>> rows = ec(features)
        >>> rows["f1"].values().detach()  # [N["f1"], D]: the rows of the ids 0, 1 and 2
        tensor([[0.0000, 0.5000, 1.0000],
                [0.0000, 0.5000, 1.0000],
                [0.0000, 0.5000, 1.0000]])
        >>> rows["f2"].lengths()
        tensor([1, 1, 3])
        >>> rows["f1"].values().sum().backward()  # the update happens here
        >>> ec.tables["t"].read_rows([0]).weights
        tensor([[-0.5000,  0.0000,  0.5000]])
        >>> ec.close()
    """

    _prefix = "embeddings"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        tiers: TierBudgets | None = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> None:
        configs = as_cache_configs(tables, EmbCacheEmbeddingConfig)
        widths = {config.name: config.embedding_dim for config in configs}
        if len(set(widths.values())) > 1:
            raise ConfigError(
                f"embedding_dim differs between tables ({widths}): the tables of a sequence collection have one width"
            )
        EmbeddingCollection.__init__(self, placeholder_configs(configs), torch.device("meta"), need_indices)
        self._embedding_configs = configs
        self._prepare(configs, tiers, name, seed, device, replicated)

    @classmethod
    def from_torchrec(
        cls,
        collection: EmbeddingCollection,
        tiers: TierBudgets | None = None,
        *,
        tables: Sequence[EmbeddingConfig] | None = None,
        optimizer: TrainingOptimizer = None,
        name: str = "embeddings",
        seed: int = 0,
        replicated: bool = False,
    ) -> Self:
        """Creates a module with the rows of TorchRec's `collection`; see `EmbCacheEmbeddingBagCollection.from_torchrec`.

        Examples:
            >>> from torchrec import EmbeddingCollection, EmbeddingConfig
            >>> from torchrec_embcache import EmbCacheEmbeddingCollection, TierBudgets
            >>> config = EmbeddingConfig(name="word", embedding_dim=4, num_embeddings=100, feature_names=["word"])
            >>> ours = EmbCacheEmbeddingCollection.from_torchrec(EmbeddingCollection([config]), TierBudgets(host_bytes="1MiB"))
            >>> len(ours.tables["word"])
            100
        """
        configs = match_configs(tables, collection.embedding_configs(), EmbCacheEmbeddingConfig)
        made = cls(
            configs, need_indices=collection.need_indices(), tiers=tiers, name=name, seed=seed, replicated=replicated
        )
        made.import_from_torchrec(collection.embeddings, optimizer)
        return made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the rows of each feature's ids, float32 `(N[f], D)`, by feature. Causes a graph break in `torch.compile`.

        Raises the errors of `EmbCacheEmbeddingBagCollection.forward`.
        """
        traced = trace_as_call(self, features)
        if traced is not None:
            return cast(dict[str, JaggedTensor], traced)
        features, lookup, train = self._begin_forward(features, weighted=False)
        ids, lengths = features.values(), features.lengths().view(len(features.keys()), -1)
        ids_there, lengths_there = (copy.numpy() for copy in host_copies([ids, lengths]))
        counts = lengths_there.sum(1).tolist()
        splits = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        clicks = clicks_of(features) if self._counts_clicks else None
        rows = lookup.sequence(ids_there, splits, train=train, anchor=self._anchor, clicks=clicks)
        names = [name for names in self._embedding_names_by_table for name in names]
        return {
            name: JaggedTensor(values=part, lengths=lengths[index], weights=own if self._need_indices else None)
            for index, (name, part, own) in enumerate(
                zip(names, torch.split(rows, counts), torch.split(ids, counts), strict=True)
            )
        }
