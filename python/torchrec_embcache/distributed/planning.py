"""Measurements of tables in the form of TorchRec's planner."""

import numpy as np
import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams

from torchrec_embcache.exceptions import InputError
from torchrec_embcache.sizing import BudgetAdvice, TableTraffic

__all__ = ["offload_stats", "planner_constraints"]

_BINS = 1000


def offload_stats(traffic: TableTraffic, world_size: int = 1) -> EmbeddingOffloadStats:
    """Converts the miss ratios of a table to the form of TorchRec's planner.

    TorchRec requires a miss rate as a function of the cached fraction of the table, which is 0 for the entire table. New rows are
    therefore excluded, as in `MissRatioCurve.reads_at`.

    Args:
        traffic: the traffic of one rank's shard.
        world_size: number of ranks with similar shards. TorchRec counts the lookups of the global batch.

    Examples:
        >>> from torchrec_embcache.distributed import offload_stats
        >>> from torchrec_embcache.sizing import TableTraffic
        >>> stats = offload_stats(TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536), world_size=2)
        >>> stats.height, stats.expected_miss_rate(1.0)
        (1000000, 0.0)
    """
    height = traffic.rows
    misses = np.array([traffic.curve.reads_at(share * height) for share in np.linspace(0.0, 1.0, _BINS + 1)])
    misses[0], misses[-1] = 1.0 - traffic.curve.new_row_ratio, 0.0
    misses = np.minimum.accumulate(misses)
    return EmbeddingOffloadStats(
        cacheability=float(np.trapezoid(misses, dx=1.0 / _BINS)),
        expected_lookups=round(traffic.lookups_per_batch * world_size),
        mrc_hist_counts=torch.from_numpy(-np.diff(misses)),
        height=height,
    )


def planner_constraints(
    traffic: list[TableTraffic], advice: BudgetAdvice | None = None, *, world_size: int = 1
) -> dict[str, ParameterConstraints]:
    """Returns constraints for `EmbeddingShardingPlanner(constraints=...)`, by table name, with their cache parameters.

    Args:
        traffic: the traffic of the tables, such as `traffic_of(model)`.
        advice: defines each table's load factor: the fraction of its rows that fit in RAM. None: the current budgets.
        world_size: number of ranks with similar shards.

    Raises `InputError` if two modules have tables with the same name, because TorchRec names tables without their module.

    Examples:
        With TorchRec installed:

        >>> from torchrec_embcache.distributed import planner_constraints
        >>> from torchrec_embcache.sizing import TableTraffic
        >>> item = TableTraffic.assumed("tables/item", rows=1_000_000, dim=64, ids_per_batch=65_536)
        >>> constraints = planner_constraints([item])
        >>> stats = constraints["item"].cache_params.stats
        >>> stats.expected_miss_rate(0.0), stats.expected_miss_rate(0.1) < 0.5
        (1.0, True)
    """
    made = {}
    for table in traffic:
        name = table.name.rpartition("/")[2]
        if name in made:
            raise InputError(
                f"two modules have a table {name!r}, which TorchRec's planner cannot tell apart: rename one"
            )
        if advice is not None:
            in_ram = advice.tables[table.name].rows_in_ram
        else:
            row = table.row_bytes
            in_ram = int(table.device_bytes / row.device + table.host_bytes / row.host)
        factor = min(in_ram / table.rows, 1.0)
        stats = offload_stats(table, world_size)
        # TorchRec rejects factors of 0 and 1: without a factor the table is cached entirely.
        made[name] = ParameterConstraints(
            cache_params=CacheParams(load_factor=factor if 0.0 < factor < 1.0 else None, stats=stats)
        )
    return made
