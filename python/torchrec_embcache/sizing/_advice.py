"""Division of budgets between tables and tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchrec_embcache.config import TierBudgets, bytes_text, check_int, parse_bytes
from torchrec_embcache.exceptions import ConfigError, InputError

from ._split import BudgetRequest, divide_budget
from ._traffic import TableTraffic, traffic_of

__all__ = ["BudgetAdvice", "TableAdvice", "advise", "current_advice"]

# A record of this size costs twice as much to read as its seek: a disk reads entire pages.
_PAGE_BYTES = 4096
# Fraction of an SSD tier that may be live, so that compaction writes each byte a few times at most.
_LIVE_RATIO = 0.8
# Minimum size of the files of an SSD tier, which are larger than its rows if it has few rows.
_MIN_SSD_BYTES = 16 << 20
# Memory of a table in addition to its rows, such as its record of rows removed since the last save.
_FIXED_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class TableAdvice:
    """Recommended budgets for one shard of a table, and their predicted effect.

    - `name`: "<module>/<table>".
    - `rows`: number of rows of the shard.
    - `table_bytes`: bytes of all its rows in RAM.
    - `device_bytes`, `host_bytes`, `ssd_bytes`: the budgets; 0 for no tier.
    - `rows_in_ram`: number of rows that fit in the device and host tiers together.
    - `miss_ratio`: fraction of lookups that would miss these tiers, first uses included.
    - `reads_per_batch`: rows that a batch would read from SSD.

    Examples:
        >>> from torchrec_embcache import TierBudgets
        >>> from torchrec_embcache.sizing import TableTraffic, advise
        >>> item = TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536)
        >>> advised = advise([item], ram="200MiB", ssd="1GiB").tables["item"]
        >>> tiers = advised.tiers(TierBudgets(host_bytes="1GiB", ssd_bytes="8GiB", ssd_dir="cache", reopen="auto"))
        >>> tiers.host == 200 << 20, tiers.ssd == 1 << 30, tiers.reopen
        (True, True, 'auto')
    """

    name: str
    rows: int
    table_bytes: int
    device_bytes: int
    host_bytes: int
    ssd_bytes: int
    rows_in_ram: int
    miss_ratio: float
    reads_per_batch: float

    def tiers(self, like: TierBudgets) -> TierBudgets:
        """Returns `like` with these budgets."""
        return replace(like, device_bytes=self.device_bytes, host_bytes=self.host_bytes, ssd_bytes=self.ssd_bytes)


@dataclass(frozen=True, kw_only=True)
class BudgetAdvice:
    """Result of `advise`: the division of the budgets, and the savings from a larger budget.

    - `tables`: the budgets of each table, by its name.
    - `ram`, `ssd`, `device`: the bytes that were divided.
    - `reads_per_batch`: rows that a batch would read from SSD, over all tables.
    - `reads_per_batch_now`: the same with the tables' current budgets; None if they have none.
    - `reads_per_batch_doubled`: the same with twice the RAM.
    - `moves_per_batch`: rows that a batch would move to the device.

    `print(advice)` shows it as a table.

    Examples:
        >>> from torchrec_embcache.sizing import TableTraffic, advise
        >>> item = TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536)
        >>> advice = advise([item], ram="1GiB", ssd="10GiB")
        >>> advice.reads_per_batch, advice.reads_per_batch_now  # all rows fit, and there are no budgets yet
        (0.0, None)
        >>> advice.sentences()
        ['A batch would read 0.0 rows from SSD.', 'With twice the RAM it would read 0.0.']
        >>> sorted(advice.as_dict())[:3]
        ['device', 'moves_per_batch', 'ram']
    """

    tables: dict[str, TableAdvice]
    ram: int
    ssd: int
    device: int
    reads_per_batch: float
    reads_per_batch_now: float | None
    reads_per_batch_doubled: float
    moves_per_batch: float

    def __str__(self) -> str:
        columns = ["table", "rows", "all rows", "device", "host", "ssd", "in RAM", "reads a batch"]
        cells = [
            [
                table.name,
                f"{table.rows:,}",
                *map(bytes_text, (table.table_bytes, table.device_bytes, table.host_bytes, table.ssd_bytes)),
                f"{table.rows_in_ram / table.rows:.1%}",
                f"{table.reads_per_batch:,.1f}",
            ]
            for table in self.tables.values()
        ]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        lines = [
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [columns, *cells]
        ]
        return "\n".join([*lines, *self.sentences()])

    def sentences(self) -> list[str]:
        """Returns the predicted effect of the budgets as sentences."""
        said = [f"A batch would read {self.reads_per_batch:,.1f} rows from SSD."]
        if self.reads_per_batch_now is not None:
            said.append(f"With the budgets of now it reads {self.reads_per_batch_now:,.1f}.")
        said.append(f"With twice the RAM it would read {self.reads_per_batch_doubled:,.1f}.")
        if self.device:
            said.append(f"{self.moves_per_batch:,.1f} rows a batch would move to the device.")
        return said

    def as_dict(self) -> dict[str, Any]:
        """Returns its fields in a JSON-serializable form."""
        return {**vars(self), "tables": {name: vars(table) for name, table in self.tables.items()}}


def advise(
    model: nn.Module | Iterable[TableTraffic],
    *,
    ram: int | str,
    ssd: int | str = 0,
    device: int | str = 0,
    batches_in_flight: int = 2,
) -> BudgetAdvice:
    """Divides the budgets of this rank between its tables and their tiers so that batches wait least for the SSD.

    Args:
        model: a model whose tables measure their traffic (`TierBudgets(sizing=True)`) and were trained for a while; or traffic,
            such as `TableTraffic.assumed(...)`.
        ram: total of all host tiers, such as "64GiB".
        ssd: total of all SSD tiers. 0: there is no SSD tier, and RAM must fit every row.
        device: total of all device tiers. 0: there is no device tier, and the kernels run on the host tiers.
        batches_in_flight: number of batches that pin their rows at the same time: 1 plus the number that a pipeline plans ahead.

    Raises:
        ConfigError: a budget is too small for the tables.
        InputError: there is no table.
        StateError: a table does not measure its traffic, or was not used yet.

    Examples:
        >>> from torchrec_embcache.sizing import TableTraffic, advise
        >>> item = TableTraffic.assumed("item", rows=10_000_000, dim=64, ids_per_batch=65_536)
        >>> user = TableTraffic.assumed("user", rows=50_000_000, dim=32, ids_per_batch=8_192)
        >>> advice = advise([item, user], ram="2GiB", ssd="100GiB")
        >>> sum(table.host_bytes for table in advice.tables.values()) == 2 << 30
        True
        >>> advice.reads_per_batch_doubled < advice.reads_per_batch
        True
    """
    tables = traffic_of(model) if isinstance(model, nn.Module) else list(model)
    if not tables:
        raise InputError("there are no tables to size")
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise InputError(f"two tables have one name: {sorted(names)}")
    budget = _RankBudget(parse_bytes("ram", ram), parse_bytes("ssd", ssd), parse_bytes("device", device))
    batches = check_int("batches_in_flight", batches_in_flight, 1, 1 << 20)
    chosen = _choose_budgets(tables, budget, batches)
    doubled = _choose_budgets(tables, replace(budget, ram=2 * budget.ram), batches)
    now = None
    if all(table.host_bytes for table in tables):
        now = sum(
            _table_advice(table, table.device_bytes, table.host_bytes, table.ssd_bytes).reads_per_batch
            for table in tables
        )
    return BudgetAdvice(
        tables={table.name: table for table in chosen},
        ram=budget.ram,
        ssd=budget.ssd,
        device=budget.device,
        reads_per_batch=sum(table.reads_per_batch for table in chosen),
        reads_per_batch_now=now,
        reads_per_batch_doubled=sum(table.reads_per_batch for table in doubled),
        moves_per_batch=_moves_per_batch(tables, chosen) if budget.device else 0.0,
    )


@dataclass(frozen=True)
class _RankBudget:
    ram: int
    ssd: int
    device: int


def _choose_budgets(tables: Sequence[TableTraffic], budget: _RankBudget, batches: int) -> list[TableAdvice]:
    on_device = [0] * len(tables)
    if budget.device:
        wants = [_device_request(table, batches) for table in tables]
        on_device = divide_budget(budget.device, wants, "device")
    wants = [_host_request(table, bytes_, budget, batches) for table, bytes_ in zip(tables, on_device, strict=True)]
    if not budget.ssd and budget.ram < sum(want.max_bytes for want in wants):
        raise ConfigError(
            f"ram={budget.ram} with ssd=0 is too small: all rows take {sum(want.max_bytes for want in wants)} bytes of RAM. Give "
            "an SSD budget, or more RAM"
        )
    in_host = divide_budget(budget.ram, wants, "ram")
    on_ssd = _ssd_bytes(tables, budget.ssd)
    return [_table_advice(*numbers) for numbers in zip(tables, on_device, in_host, on_ssd, strict=True)]


def _batch_rows(table: TableTraffic, batches: int) -> int:
    return min(table.curve.largest_batch * batches, table.rows)


def _device_request(table: TableTraffic, batches: int) -> BudgetRequest:
    row = table.row_bytes.device
    cost = table.lookups_per_batch * row
    return BudgetRequest(
        _batch_rows(table, batches) * row + row, table.rows * row + row, row, 0, 0.0, table.curve, cost
    )


def _index_bytes(table: TableTraffic, has_ssd: bool) -> int:
    return table.rows * table.row_bytes.index if has_ssd else 0


def _host_request(table: TableTraffic, device_bytes: int, budget: _RankBudget, batches: int) -> BudgetRequest:
    row = table.row_bytes.host
    held = device_bytes / table.row_bytes.device
    fixed = _index_bytes(table, bool(budget.ssd)) + _FIXED_BYTES
    least = fixed + _batch_rows(table, batches) * row
    most = max(fixed + round(max(table.rows - held, 0.0)) * row, least)
    # Each read has a fixed cost, plus a cost per page.
    cost = table.lookups_per_batch * (1.0 + table.row_bytes.ssd / _PAGE_BYTES)
    return BudgetRequest(least, most, row, fixed, held, table.curve, cost)


def _ssd_bytes(tables: Sequence[TableTraffic], ssd: int) -> list[int]:
    if not ssd:
        return [0] * len(tables)
    needs = [max(round(table.rows * table.row_bytes.ssd / _LIVE_RATIO), _MIN_SSD_BYTES) for table in tables]
    if sum(needs) > ssd:
        raise ConfigError(
            f"ssd={ssd} is too small: the SSD tier holds every row, and {sum(needs)} bytes are needed for those of the "
            f"{len(tables)} tables and the room for compaction"
        )
    return [ssd * need // sum(needs) for need in needs]


def _table_advice(table: TableTraffic, device_bytes: int, host_bytes: int, ssd_bytes: int) -> TableAdvice:
    """Returns the predicted effect of a table's budgets."""
    row = table.row_bytes
    # Without an SSD tier all rows are in RAM.
    beside = _index_bytes(table, bool(ssd_bytes)) + (_FIXED_BYTES if ssd_bytes else 0)
    in_ram = device_bytes / row.device + max(host_bytes - beside, 0) / row.host
    rows = min(in_ram, table.rows) if ssd_bytes else table.rows
    return TableAdvice(
        name=table.name,
        rows=table.rows,
        table_bytes=table.rows * row.host,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        ssd_bytes=ssd_bytes,
        rows_in_ram=int(rows),
        miss_ratio=table.curve.at(rows),
        # Once all rows are in RAM, the remaining misses are first uses since the start of the measurement.
        reads_per_batch=table.lookups_per_batch * table.curve.reads_at(rows) if rows < table.rows else 0.0,
    )


def current_advice(table: TableTraffic) -> TableAdvice | None:
    """Returns the predicted effect of a table's current budgets; None if it has none."""
    if not (table.host_bytes or table.device_bytes):
        return None
    return _table_advice(table, table.device_bytes, table.host_bytes, table.ssd_bytes)


def _moves_per_batch(tables: Sequence[TableTraffic], chosen: Sequence[TableAdvice]) -> float:
    on_device = [made.device_bytes / table.row_bytes.device for table, made in zip(tables, chosen, strict=True)]
    return sum(table.lookups_per_batch * table.curve.at(rows) for table, rows in zip(tables, on_device, strict=True))
