"""Inputs of an eviction rule: statistics of this shard, and the ranks over which they are combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrec_embcache import _native
from torchrec_embcache._dist.ranks import Ranks

__all__ = ["SweepInputs"]


@dataclass(frozen=True)
class SweepInputs:
    """Inputs of one eviction pass over one table, on one of the ranks that share it.

    `Rule.resolve` receives these inputs on each rank and returns the same rule on every rank. The ranks call `ranks.gather` the
    same number of times in the same order. Work that can fail runs inside such a call, so that an error on one rank is raised on
    all ranks and no rank waits for another.

    Attributes:
        step: the training step after which the sweep runs.
        table: this rank's shard; None if this rank has no shard and only takes part in the collectives.
        ranks: the ranks that share the table.
        thresholds: the thresholds found so far, by rule.
    """

    step: int
    table: _native.Table | None
    ranks: Ranks
    thresholds: Mapping[object, _native.SweepRule] = field(default_factory=dict)
