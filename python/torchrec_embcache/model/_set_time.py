"""Event time of tables: a time set by the user instead of the system time."""

from __future__ import annotations

from torch import nn

from torchrec_embcache._dist.ranks import all_ranks
from torchrec_embcache.exceptions import InputError
from torchrec_embcache.table.cache_table import CacheTable, to_milliseconds

from . import cache_modules
from ._shards import shards_of

__all__ = ["set_time"]


def set_time(model: nn.Module, seconds: float) -> None:
    """Sets the event time that the rules in seconds of all tables of `model` use until the next call. Collective.

    Without it, tables use the system time. The event time is the time of the events that are trained next: call this before the
    first step and then before each step, or as often as time is to advance. Every rank calls it between the same two steps. If
    ranks pass different times, the greatest applies on all of them. A loaded table keeps its last time until the next call. Time
    never decreases, so a time that was too great cannot be corrected.

    Args:
        model: the model. Tables whose `eviction` has no `Ttl(seconds=...)` have no time and are not changed.
        seconds: seconds since any fixed origin, such as 1970; from 0 to 2^52, with millisecond resolution.

    Raises on every rank, regardless of the rank with the error, and then no table's time has changed:
        InputError: `seconds` is not such a number, or is before the time of a table's last step or the last time that was set; or
            `model` has no cache module.
        StateError: a table is closed or unusable.

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
    ranks = all_ranks()

    def tables() -> list[CacheTable]:
        if not cache_modules(model):
            raise InputError(f"{type(model).__name__} has no cache module: nothing has a time")
        return [table for _, _, table in shards_of(model) if table._settings.lifecycle.needs_clock]

    greatest = max(ranks.gather(lambda: to_milliseconds("set_time", seconds)))
    timed: list[CacheTable] = []

    def check() -> None:
        timed.extend(tables())
        for table in timed:
            table._native_table.check_time(greatest)

    ranks.gather(check)
    for table in timed:
        table._native_table.set_time(greatest)
