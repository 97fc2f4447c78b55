"""TorchRec collections that read served tables. This module requires TorchRec.

Shapes: F features, B samples per batch, N ids, D a table's width, C the sum of the widths of all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_embcache.exceptions import UnsupportedError
from torchrec_embcache.modules._features import check_features, reorder_features

from ._modules import ServingModule, TableRef, pinned
from ._ops import ModuleReader, is_traced, pooled_op, rows_op
from .tables import Tables
from .version import Pooling, Version

__all__ = ["ServingEmbeddingBagCollection", "ServingEmbeddingCollection", "serving_collection"]


class _ServingCollection(ServingModule):
    """Base of both collections."""

    def __init__(self, served: Tables, tables: Sequence[TableRef], configs: list[Any], device: torch.device) -> None:
        super().__init__(served, tables)
        self._device = device
        self._configs = configs
        self._reader = ModuleReader(served, self._tables)
        self._counts = [len(config.feature_names) for config in configs]
        self._features = [name for config in configs for name in config.feature_names]
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(configs)
        self._names = [name for names in self._names_by_table for name in names]

    @property
    def device(self) -> torch.device:
        """The device of the replaced module. Results are on the device of the features."""
        return self._device

    def _reorder(self, features: Any, *, weighted: bool) -> KeyedJaggedTensor:
        """Returns the batch, checked and in the order of the tables' features."""
        is_plain = isinstance(features, KeyedJaggedTensor) and not (
            features.variable_stride_per_key() or features.inverse_indices_or_none() is not None
        )
        if is_plain and not weighted and features.weights_or_none() is not None:
            # Weights of an unweighted module are clicks, which only training counts, or unused.
            features = KeyedJaggedTensor(
                keys=features.keys(), values=features.values(), lengths=features.lengths(), stride=features.stride()
            )
        owner = f"{type(self).__name__} of {self.served.path}"
        device = features.values().device if isinstance(features, KeyedJaggedTensor) else self._device
        checked = check_features(features, self._features, weighted=weighted, clicks=False, owner=owner, device=device)
        return reorder_features(checked, self._features)


class ServingEmbeddingBagCollection(_ServingCollection, EmbeddingBagCollectionInterface):
    """TorchRec's `EmbeddingBagCollection` over served tables: the same batches in, the same `KeyedTensor` out."""

    def __init__(
        self,
        served: Tables,
        tables: Sequence[TableRef],
        configs: list[EmbeddingBagConfig],
        device: torch.device,
        *,
        is_weighted: bool,
    ) -> None:
        averaged = [config.name for config in configs if config.pooling == PoolingType.MEAN]
        if is_weighted and averaged:
            raise UnsupportedError(
                f"is_weighted=True with pooling MEAN (tables {', '.join(averaged)}): as in torch, use PoolingType.SUM"
            )
        super().__init__(served, tables, configs, device)
        self._is_weighted = is_weighted
        self._pooling: list[Pooling] = ["mean" if config.pooling == PoolingType.MEAN else "sum" for config in configs]
        self._widths = [config.embedding_dim for config in configs for _ in config.feature_names]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the table configs of the replaced module."""
        return self._configs

    def is_weighted(self) -> bool:
        """True if features carry weights."""
        return self._is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Returns the pooled rows of a batch, float32 `(B, C)`, on the device of the batch. Raises like `Table.lookup_pooled`."""
        values = self._traced(features) if is_traced(features) else self._pooled(features)
        return KeyedTensor(keys=self._names, values=values, length_per_key=self._widths)

    def _traced(self, features: Any) -> Tensor:
        """Builds the graph seen by a tracer: one operator per feature."""
        by_name, parts = features.to_dict(), []
        for place, (config, pooling) in enumerate(zip(self._configs, self._pooling, strict=True)):
            for name in config.feature_names:
                own = by_name[name]
                weights = own.weights() if self._is_weighted else None
                parts.append(
                    pooled_op(own.values(), own.offsets(), weights, self._reader, place, is_mean=pooling == "mean")
                )
        return torch.cat(parts, dim=1)

    def _pooled(self, features: KeyedJaggedTensor) -> Tensor:
        """Pools every feature and concatenates the features along the columns: [B, C]."""
        features = self._reorder(features, weighted=self._is_weighted)
        stride = features.stride()
        ids, bounds = features.values().cpu().numpy(), features.offsets().cpu().numpy().astype(np.int64)
        weights = features.weights().detach().cpu().numpy() if self._is_weighted else None
        out = torch.empty(stride, sum(self._widths), dtype=torch.float32, device="cpu")
        first = column = 0
        with pinned(self.served) as version:
            for table, count, pooling in zip(self._tables, self._counts, self._pooling, strict=True):
                own = bounds[first * stride : (first + count) * stride + 1]
                chosen = slice(int(own[0]), int(own[-1]))
                part = table.in_version(version).pool_array(
                    ids[chosen], own - own[0], pooling, None if weights is None else weights[chosen]
                )
                columns = out[:, column : column + count * table.dim].view(stride, count, table.dim)
                columns.copy_(part.view(count, stride, table.dim).transpose(0, 1))
                first, column = first + count, column + count * table.dim
        return out.to(features.values().device)


class ServingEmbeddingCollection(_ServingCollection, EmbeddingCollectionInterface):
    """TorchRec's `EmbeddingCollection` over served tables: the same batches in, the same `JaggedTensor`s out."""

    def __init__(
        self,
        served: Tables,
        tables: Sequence[TableRef],
        configs: list[EmbeddingConfig],
        device: torch.device,
        *,
        need_indices: bool,
    ) -> None:
        super().__init__(served, tables, configs, device)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the table configs of the replaced module."""
        return self._configs

    def need_indices(self) -> bool:
        """True if results carry their ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Returns the width of all tables."""
        return self._tables[0].dim if self._tables else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the result names of each table."""
        return self._names_by_table

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns the rows of each feature's ids, float32 `(N[f], D)`, on the device of the batch. Raises like `Table.lookup`."""
        return self._traced(features) if is_traced(features) else self._lookup_features(features)

    def _traced(self, features: Any) -> dict[str, JaggedTensor]:
        """Builds the graph seen by a tracer: one operator per feature."""
        by_name, found = features.to_dict(), {}
        for place, (config, names) in enumerate(zip(self._configs, self._names_by_table, strict=True)):
            for feature, name in zip(config.feature_names, names, strict=True):
                own = by_name[feature]
                found[name] = JaggedTensor(
                    values=rows_op(own.values(), self._reader, place),
                    lengths=own.lengths(),
                    weights=own.values() if self._need_indices else None,
                )
        return found

    def _lookup_features(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        features = self._reorder(features, weighted=False)
        counts = features.length_per_key()
        lengths = features.lengths().view(len(counts), -1)
        with pinned(self.served) as version:
            rows = self._rows(version, features.values(), counts)
        parts = zip(self._names, rows, torch.split(features.values(), counts), strict=True)
        return {
            name: JaggedTensor(values=part, lengths=lengths[index], weights=own if self._need_indices else None)
            for index, (name, part, own) in enumerate(parts)
        }

    def _rows(self, version: Version, values: Tensor, counts: list[int]) -> list[Tensor]:
        """Returns the rows [N[f], D] of each feature."""
        ids = values.cpu().numpy()
        found: list[Tensor] = []
        first = begin = 0
        for table, features in zip(self._tables, self._counts, strict=True):
            own = counts[first : first + features]
            rows = table.in_version(version).lookup_array(ids[begin : begin + sum(own)]).as_subclass(Tensor)
            found += torch.split(rows.to(values.device), own)
            first, begin = first + features, begin + sum(own)
        return found


def serving_collection(served: Tables, module: Any, path: str) -> _ServingCollection | None:
    """Returns the replacement for the TorchRec collection with checkpoint path `path`; None for any other module."""
    if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        return None
    device = torch.device(module.device)
    device = torch.device("cpu") if device.type == "meta" else device
    if isinstance(module, EmbeddingBagCollection):
        bags = module.embedding_bag_configs()
        return ServingEmbeddingBagCollection(
            served, _tables(path, bags), bags, device, is_weighted=module.is_weighted()
        )
    configs = module.embedding_configs()
    return ServingEmbeddingCollection(
        served, _tables(path, configs), configs, device, need_indices=module.need_indices()
    )


def _tables(path: str, configs: Sequence[Any]) -> list[TableRef]:
    return [TableRef((path, config.name), config.embedding_dim) for config in configs]
