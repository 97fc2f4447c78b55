"""Block-level saving and loading, with RecIS's signatures: tables and dense tensors as named blocks, selected by a filter.

Examples:
    >>> import torch
    >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
    >>> from torchrec_embcache.serialize import BlockLoader, BlockSaver
    >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
    >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
    >>> item.import_rows([7], [[1.0, 2.0]])
    >>> over = torch.nn.Linear(2, 1)
    >>> BlockSaver(shard_index=0, shard_num=1, path="ckpt", hashtables={"item": item}, tensors=over.state_dict()).save()
    >>> BlockLoader("ckpt", hashtables={"item": item}, tensors=over.state_dict()).load().tensors
    ['bias', 'weight']

`Saver` and `Loader`, RecIS's names, are aliases of these two classes.

A table is a block of ids and a block for each of its slots: the weights ("embedding"), the optimizer's, by torch's names, and the
metadata. Rows are stored in runs of at most 16 MiB, each sorted by (bucket, `uint64(id)`), so that a shard of any number of shards
reads only its own rows; see `_buckets`. RecIS' indexes name the slice of `uint64(id) mod total_num_buckets` that contains the ids
of a block. `docs/design-checkpoint.md` describes the files. Every byte has a checksum that a load verifies. Names with "@" or "^"
are rejected: RecIS reserves them.
"""

from .checkpoint.recis._arguments import split_sparse_dense_state_dict
from .checkpoint.recis._schema import WriteBlock
from .checkpoint.recis.loader import BlockLoader, LoadedBlocks, LoadInfo
from .checkpoint.recis.saver import BlockSaver

__all__ = [
    "BlockLoader",
    "BlockSaver",
    "LoadInfo",
    "LoadedBlocks",
    "Loader",
    "Saver",
    "WriteBlock",
    "split_sparse_dense_state_dict",
]

# RecIS's names.
Saver = BlockSaver
Loader = BlockLoader
