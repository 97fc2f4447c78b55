"""PyTorch Distributed Checkpoint on this package's checkpoints: dense state and, given the model, its tables, published together.

Examples:
    >>> import torch.distributed.checkpoint as dcp
    >>> from torchrec_embcache import EmbCacheEmbedding, EmbCacheStorageReader, EmbCacheStorageWriter, TierBudgets, optimizers
    >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
    >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
    >>> model.import_rows([7], [[1.0, 2.0]])
    >>> state = {"over": torch.ones(1)}
    >>> saved = dcp.save(state, storage_writer=EmbCacheStorageWriter("ckpt", model))  # or dcp.async_save
    >>> dcp.load(state, storage_reader=EmbCacheStorageReader("ckpt", model))

`state` is what DCP takes: tensors, `ShardedTensor`, `DTensor`, `Stateful`s, any other object. It loads into any sharding and any
number of ranks. A save never touches the checkpoint before it; a kill at any time leaves that one loadable. Bytes carry checksums,
verified as they are read. Tensors are raw bytes beside a description in JSON. Nothing is unpickled but objects that are no tensors,
which DCP itself pickles and unpickles.

Order of a save: every rank writes a part under a name of its own (`write_data`); names and digests travel to the coordinator with
DCP's results; it gathers the parts into one checkpoint and publishes it (`finish`). With `use_collectives=False` each rank
publishes one of its own, in `<path>/rank-<rank>`.
"""

from .reader import EmbCacheStorageReader
from .writer import EmbCacheStorageWriter

__all__ = ["EmbCacheStorageReader", "EmbCacheStorageWriter"]
