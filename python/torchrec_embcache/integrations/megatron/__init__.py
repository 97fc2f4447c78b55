"""Tables in Megatron-Core's distributed checkpoints: strategies that save and load them together with the tensors.

Examples:
    >>> import os
    >>> from megatron.core import dist_checkpointing
    >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
    >>> from torchrec_embcache.integrations import megatron
    >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
    >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
    >>> model.import_rows([7], [[1.0, 2.0]])
    >>> megatron.register()  # once, before saves and loads
    >>> os.mkdir("ckpt")
    >>> state = {"over": torch.ones(1), **megatron.sharded_tables(model)}
    >>> dist_checkpointing.save(state, "ckpt", megatron.STRATEGY)
    >>> model.remove_rows([7])
    1
    >>> loaded = dist_checkpointing.load(state, "ckpt")  # finds the strategy by the checkpoint's own metadata
    >>> len(model)
    1

Tensors, objects and common state are stored in Megatron's own files; the tables of `model` are stored in
`<directory>/embcache-<key>` in the format of `Saver`, for any number of ranks and budgets. A load replaces the rows of the
model's tables.

Written for megatron-core 0.16, the latest version for Python 3.11. Without CUDA, a save omits the calls to it; an asynchronous save
is then finished by `request.execute_sync()`, because Megatron's queue of such requests requires CUDA. Without megatron-core or
psutil, the import of this module raises `UnsupportedError`.

`LoadStrategyBase`, `SaveStrategyBase` and `AsyncSaveShardedStrategy` are Megatron's base classes of the strategies.
"""

import importlib.util

from torchrec_embcache.exceptions import UnsupportedError

try:
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadStrategyBase,
        SaveStrategyBase,
        StrategyAction,
        register_default_strategy,
    )
except ImportError as _cause:
    raise UnsupportedError(
        "torchrec_embcache.integrations.megatron needs megatron-core, with its registry of strategies: "
        "pip install 'megatron-core>=0.16,<0.17'"
    ) from _cause

if importlib.util.find_spec("psutil") is None:
    raise UnsupportedError(
        "torchrec_embcache.integrations.megatron needs psutil, without which megatron-core's saves never end: pip install psutil"
    )

from ._strategies import STRATEGY, LoadCommonStrategy, LoadShardedStrategy, SaveCommonStrategy, SaveShardedStrategy
from ._tables import ShardedTables, sharded_tables

__all__ = [
    "STRATEGY",
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "ShardedTables",
    "register",
    "sharded_tables",
]


def register() -> None:
    """Registers the strategies with Megatron under `STRATEGY`, for saves by name and for loads of their checkpoints. Idempotent.

    The common strategies also replace Megatron's own ("torch", 1), whose files they read and write: its `save` accepts no other
    name.

    Examples:
        >>> from torchrec_embcache.integrations import megatron
        >>> megatron.register()
        >>> megatron.STRATEGY  # what dist_checkpointing.save takes as its strategy
        ('torchrec_embcache', 1)
    """
    for action, strategy in (
        (StrategyAction.SAVE_SHARDED, SaveShardedStrategy()),
        (StrategyAction.LOAD_SHARDED, LoadShardedStrategy()),
        (StrategyAction.SAVE_COMMON, SaveCommonStrategy()),
        (StrategyAction.LOAD_COMMON, LoadCommonStrategy()),
    ):
        register_default_strategy(action, *STRATEGY, strategy)
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, SaveCommonStrategy("torch", 1))
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, LoadCommonStrategy())
