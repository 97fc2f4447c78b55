"""Drop-ins for `torch.nn.Embedding` and `torch.nn.EmbeddingBag` over a table larger than memory. They need torch and numpy only."""

from .embedding import EmbCacheEmbedding
from .embedding_bag import EmbCacheEmbeddingBag

__all__ = ["EmbCacheEmbedding", "EmbCacheEmbeddingBag"]
