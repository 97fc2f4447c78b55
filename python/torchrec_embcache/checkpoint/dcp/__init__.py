"""PyTorch Distributed Checkpoint (DCP) in this package's format: dense state and the model's tables, published together.

Examples:
    >>> import torch.distributed.checkpoint as dcp
    >>> from torchrec_embcache import EmbCacheEmbedding, EmbCacheStorageReader, EmbCacheStorageWriter, TierBudgets, optimizers
    >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
    >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
    >>> model.import_rows([7], [[1.0, 2.0]])
    >>> state = {"over": torch.ones(1)}
    >>> saved = dcp.save(state, storage_writer=EmbCacheStorageWriter("ckpt", model))  # or dcp.async_save
    >>> dcp.load(state, storage_reader=EmbCacheStorageReader("ckpt", model))

`state` is any state dict that DCP accepts: tensors, `ShardedTensor`, `DTensor`, `Stateful`s, any other object. It can be loaded
into any sharding and any number of ranks. A save never changes the previous checkpoint, which stays loadable if the process is
killed at any time. All bytes have checksums, which are verified on reads. Tensors are raw bytes with a description in JSON. Only
objects that are not tensors are unpickled; DCP itself pickles and unpickles them.

Order of a save: every rank writes a uniquely named part (`write_data`); the names and digests are sent to the coordinator with
DCP's results; it gathers the parts into one checkpoint and publishes it (`finish`). With `use_collectives=False` each rank
publishes its own checkpoint in `<path>/rank-<rank>`.
"""

from .reader import EmbCacheStorageReader
from .writer import EmbCacheStorageWriter

__all__ = ["EmbCacheStorageReader", "EmbCacheStorageWriter"]
