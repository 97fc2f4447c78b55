"""The time of tables: what a user gives as the time of the events that are trained, in place of the system's."""

from __future__ import annotations

from torch import nn

from torchrec_embcache.exceptions import InputError
from torchrec_embcache.shards import shards_of
from torchrec_embcache.sweeping import to_milliseconds
from torchrec_embcache.table_shard import TableShard
from torchrec_embcache.whole_model import cache_modules

from .ranks import AllRanks

__all__ = ["set_time"]


def set_time(model: nn.Module, seconds: float) -> None:
    """Say what time it is for the rules in seconds of all tables of `model`, from now on until the next call. Collective.

    Without it the time is the system's. With it, it is that of the events which are trained next: call it before the first step,
    and then before each step, or as often as time is to go on. Every rank calls it between the same two steps. Where ranks give
    different times the greatest counts, on all of them. A table that was loaded keeps the last time until the next call.
    Time does not go back, so a time that was too great by mistake cannot be taken back.

    Args:
        model: the model. Tables whose `eviction` has no `Ttl(seconds=...)` have no time, and are left as they are.
        seconds: since whatever the times begin with, such as 1970; from 0 to 2^52. Thousandths count.

    Raises on every rank, whichever rank has the error, and no table has another time then:
        InputError: `seconds` is no such number, is before the time of a table's last step or the one that was set
            last, or `model` has no cache module.
        StateError: a table is closed or cannot be used.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, evict, eviction, optimizers, set_time
        >>> model = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     eviction=eviction.Policy([eviction.Ttl(seconds=3600)]),
        ... )
        >>> for seconds, id in ((0, 7), (7200, 8)):
        ...     set_time(model, seconds)
        ...     model(torch.tensor([id])).sum().backward()
        >>> evict(model)
        >>> [chunk.ids.tolist() for chunk in model.export()]
        [[8]]
    """
    ranks = AllRanks()

    def tables() -> list[TableShard]:
        if not cache_modules(model):
            raise InputError(f"{type(model).__name__} has no cache module: nothing has a time")
        return [table for _, _, table in shards_of(model) if table.settings.lifecycle.needs_clock]

    greatest = max(ranks.gather(lambda: to_milliseconds("set_time", seconds)))
    timed: list[TableShard] = []

    def check() -> None:
        timed.extend(tables())
        for table in timed:
            table.native.check_time(greatest)

    ranks.gather(check)
    for table in timed:
        table.native.set_time(greatest)
