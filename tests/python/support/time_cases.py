"""Helpers of the tests of event time and of eviction by time."""

import random
from typing import Any

from torchrec_embcache import cache_modules


def now(table: Any) -> float:
    return table._native_table.now() / 1000


# Not a whole number of minutes, so that the times of a test are of two minutes.
BEGIN = 1_700_000_030
TTL = 10


def natives(model: Any) -> list[Any]:
    return [table._native_table for module in cache_modules(model).values() for table in module.tables.values()]


def times_of(rank: int, count: int) -> list[int]:
    """The step times by the clock of a rank, in milliseconds. Now this rank is ahead and now that."""
    dice = random.Random(f"{rank}")
    return [1000 * BEGIN + 2000 * step + dice.randrange(4000) // 1000 * 1000 for step in range(count)]
