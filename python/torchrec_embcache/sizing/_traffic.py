"""Properties of a table and its traffic: the inputs of the choice of budgets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from torchrec_embcache._paths import check_path
from torchrec_embcache.config import CachePolicy, check_choice, check_int
from torchrec_embcache.exceptions import ConfigError, CorruptionError, EmbCacheError, InputError, StateError
from torchrec_embcache.model import cache_modules
from torchrec_embcache.optimizers import BY_KIND, OptimizerKind
from torchrec_embcache.table._settings import RowBytes, row_bytes
from torchrec_embcache.table.cache_table import CacheTable
from torchrec_embcache.table.miss_ratio_curve import MissRatioCurve

from ._zipf import zipf_curve

__all__ = ["TableTraffic", "read_traffic", "traffic_of", "write_traffic"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TableTraffic:
    """One shard of a table, and the usage of its rows.

    - `name`: "<module>/<table>".
    - `dim`: D, the width of a row.
    - `optimizer`: the optimizer whose slots the rows have, as in `torchrec_embcache.optimizers`: "rowwise_adagrad", "adam", ...
    - `rows`: number of rows of the shard, in all tiers.
    - `policy`: the cache policy of full tiers, which affects the bytes of a row.
    - `curve`: the miss ratios of caches of any size.
    - `device_bytes`, `host_bytes`, `ssd_bytes`: its current budgets; 0 for a tier that it does not have.

    `traffic_of(model)` measures the traffic, and `TableTraffic.assumed(...)` models it before anything runs.

    Examples:
        >>> from torchrec_embcache.sizing import TableTraffic
        >>> item = TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536, optimizer="sgd")
        >>> TableTraffic.from_dict(item.as_dict()).rows
        1000000
        >>> item.row_bytes.ssd, round(item.lookups_per_batch) < 65_536  # a batch looks a repeated id up once
        (296, True)
    """

    name: str
    dim: int
    optimizer: OptimizerKind
    rows: int
    curve: MissRatioCurve
    policy: CachePolicy = "s3fifo"
    device_bytes: int = 0
    host_bytes: int = 0
    ssd_bytes: int = 0

    @classmethod
    def from_table(cls, name: str, table: CacheTable) -> Self:
        """Returns the measured traffic of a table. Raises `StateError` if it is not measured or has no lookups yet."""
        if table.optimizer is None:
            raise StateError(
                f"table {table.name!r} has no optimizer yet, so the bytes of its rows are not known: set one"
            )
        curve = table.miss_ratio_curve()
        if curve.lookups == 0:
            raise StateError(f"table {table.name!r} has no lookups since it is measured: train some batches first")
        return cls(
            name=name,
            dim=table.dim,
            optimizer=table.optimizer.kind,
            rows=max(table.stats().rows, 1),
            curve=curve,
            policy=table.policy,
            device_bytes=table.tiers.device,
            host_bytes=table.tiers.host,
            ssd_bytes=table.tiers.ssd,
        )

    @classmethod
    def assumed(
        cls,
        name: str,
        *,
        rows: int,
        dim: int,
        ids_per_batch: int,
        optimizer: str = "rowwise_adagrad",
        exponent: float = 1.05,
    ) -> Self:
        """Models a table whose ids are drawn independently from a Zipf distribution, under "lru".

        Args:
            name: the table's name.
            rows: number of rows that the shard will have.
            dim: D.
            ids_per_batch: ids of a batch, repetitions included.
            optimizer: the optimizer whose slots the rows have.
            exponent: exponent of the distribution, 0 (uniform) to 4. Clicks and users of shops and videos have about 0.7 to 1.1.

        Raises `ConfigError` for a value that is out of range.

        Examples:
            >>> from torchrec_embcache.sizing import TableTraffic
            >>> item = TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536)
            >>> item.row_bytes.host, item.row_bytes.ssd
            (335, 300)
            >>> item.curve.at(100_000) < 0.5  # a tenth of the rows in RAM serves more than half of the lookups
            True
        """
        check_int("rows", rows, 1, 1 << 48)
        check_int("dim", dim, 1, 65_536)
        check_int("ids_per_batch", ids_per_batch, 1, 1 << 30)
        kind = _check_optimizer(optimizer)
        if not 0.0 <= exponent <= 4.0:
            raise ConfigError(f"exponent={exponent!r} is out of range: give 0 to 4")
        return cls(name=name, dim=dim, optimizer=kind, rows=rows, curve=zipf_curve(rows, ids_per_batch, exponent))

    @property
    def row_bytes(self) -> RowBytes:
        """Bytes of a row in each budget: `host`, `device`, `ssd`, and `index`, the part of `host_bytes` for a row on SSD."""
        return row_bytes(self.dim, self.optimizer, self.policy)

    @property
    def lookups_per_batch(self) -> float:
        """Average number of distinct ids per batch."""
        return self.curve.lookups / max(self.curve.batches, 1)

    def as_dict(self) -> dict[str, Any]:
        """Returns its fields in a JSON-serializable form."""
        return {**vars(self), "curve": self.curve.as_dict()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Parses the result of `as_dict`. Raises `CorruptionError` for anything else."""
        try:
            numbers = {
                field: int(fields[field]) for field in ("dim", "rows", "device_bytes", "host_bytes", "ssd_bytes")
            }
            check_int("dim", numbers["dim"], 1, 65_536)
            check_int("rows", numbers["rows"], 1, 1 << 48)
            kind = _check_optimizer(fields["optimizer"])
            curve = MissRatioCurve.from_dict(fields["curve"])
            for name in (curve.policy, fields["policy"]):
                check_choice("policy", name, CachePolicy)
            policy: CachePolicy = fields["policy"]
            return cls(name=str(fields["name"]), optimizer=kind, policy=policy, curve=curve, **numbers)
        except (KeyError, TypeError, ValueError, OverflowError, EmbCacheError) as cause:
            raise CorruptionError(f"no traffic of a table: {cause}") from cause


def _check_optimizer(optimizer: object) -> OptimizerKind:
    for kind, spec in BY_KIND.items():
        if kind == optimizer:
            return spec.kind
    raise ConfigError(f"optimizer={optimizer!r} is not known: use one of {', '.join(map(repr, BY_KIND))}")


def traffic_of(model: nn.Module) -> list[TableTraffic]:
    """Returns the traffic of every table of `model` that this rank has a shard of.

    Raises `InputError` for a model without cache modules, and `StateError` if a table does not measure its miss ratios
    (`TierBudgets(sizing=True)`) or was not used yet.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
        >>> from torchrec_embcache.sizing import traffic_of
        >>> tiers = TierBudgets(host_bytes="1MiB", sizing=True)
        >>> bag = EmbCacheEmbeddingBag(name="item", embedding_dim=4, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
        >>> bag(torch.arange(100).view(1, -1)).sum().backward()
        >>> [(table.name, table.rows, table.lookups_per_batch) for table in traffic_of(bag)]
        [('item', 100, 100.0)]
    """
    modules = cache_modules(model)
    if not modules:
        raise InputError(f"{type(model).__name__} has no cache module: there are no tables to size")
    return [
        TableTraffic.from_table(f"{path}/{name}" if path else name, table)
        for path, module in modules.items()
        for name, table in module.tables.items()
    ]


def write_traffic(traffic: Iterable[TableTraffic], path: str | os.PathLike[str]) -> None:
    """Writes traffic to a JSON file, for `embcache advise` and `embcache plot`. Replaces an existing file atomically.

    Raises `PathError` for a path that is not local, and `OSError` if the file cannot be written.

    Examples:
        >>> from torchrec_embcache.sizing import TableTraffic, read_traffic, write_traffic
        >>> item = TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536)
        >>> write_traffic([item], "traffic.json")
        >>> [table.name for table in read_traffic("traffic.json")]
        ['item']
    """
    text = json.dumps({"format": _FORMAT, "tables": [table.as_dict() for table in traffic]}, indent=1)
    target = check_path("path", path)
    unfinished = Path(f"{target}.unfinished")
    try:
        unfinished.write_text(text + "\n")
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_traffic(path: str | os.PathLike[str]) -> list[TableTraffic]:
    """Reads the traffic written by `write_traffic`.

    Raises `CorruptionError` for a file with other content, `PathError` for a path that is not local, and `OSError` if it cannot be
    read.

    Examples:
        >>> from torchrec_embcache.sizing import TableTraffic, advise, read_traffic, write_traffic
        >>> write_traffic([TableTraffic.assumed("item", rows=1_000, dim=64, ids_per_batch=100)], "traffic.json")
        >>> advise(read_traffic("traffic.json"), ram="1MiB").tables["item"].host_bytes
        1048576
    """
    file = Path(check_path("path", path))
    try:
        content = json.loads(file.read_text())
        if content["format"] != _FORMAT:
            raise CorruptionError(f"{os.fspath(path)}: expected format {_FORMAT}, found {content['format']!r}")
        return [TableTraffic.from_dict(fields) for fields in content["tables"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as cause:
        raise CorruptionError(f"{os.fspath(path)}: expected what write_traffic writes, found {cause!r}") from cause
