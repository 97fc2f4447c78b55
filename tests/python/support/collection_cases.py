"""Collections of TorchRec's configs with budgets."""

from typing import Any

from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_embcache import EmbCacheEmbeddingBagCollection, TierBudgets

TIERS = TierBudgets(host_bytes="4MiB")


def bag_tables() -> list[EmbeddingBagConfig]:
    """Two tables of different widths that share a feature."""
    return [
        EmbeddingBagConfig(name="t1", embedding_dim=6, num_embeddings=20, feature_names=["a", "b"]),
        EmbeddingBagConfig(
            name="t2", embedding_dim=4, num_embeddings=30, feature_names=["b", "c"], pooling=PoolingType.MEAN
        ),
    ]


def bags(tables: list[Any] | None = None, **settings: Any) -> EmbCacheEmbeddingBagCollection:
    return EmbCacheEmbeddingBagCollection(bag_tables() if tables is None else tables, **{"tiers": TIERS, **settings})
