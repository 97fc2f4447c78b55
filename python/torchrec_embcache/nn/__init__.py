"""Drop-in replacements of `torch.nn.Embedding` and `torch.nn.EmbeddingBag` over a table larger than memory.

They require only torch and numpy.
"""

from .embedding import EmbCacheEmbedding
from .embedding_bag import EmbCacheEmbeddingBag

__all__ = ["EmbCacheEmbedding", "EmbCacheEmbeddingBag"]
