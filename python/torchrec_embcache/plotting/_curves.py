"""Plots of miss ratio curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_embcache.exceptions import InputError
from torchrec_embcache.sizing import BudgetAdvice, TableTraffic
from torchrec_embcache.sizing._advice import current_advice

from ._panels import AxisUnit, Line, Mark, Panel

__all__ = ["curve_panels"]


def curve_panels(
    traffic: Sequence[TableTraffic] | Mapping[str, Sequence[TableTraffic]], advice: BudgetAdvice | None = None
) -> list[Panel]:
    """Returns panels of the miss ratio curves of tables: one by the fraction of rows in RAM, and one by the bytes of these rows.

    A mark on a curve is the current budget of its table, device tier and host tier together.

    Args:
        traffic: traffic of the tables, as returned by `sizing.traffic_of(model)` or `sizing.read_traffic(path)`; or the traffic of
            several ranks by label, such as `{"rank 0": ..., "rank 1": ...}`.
        advice: budgets to mark in addition, for the tables with these names.

    Raises `InputError` if there is no curve.

    Examples:
        >>> from torchrec_embcache import plotting, sizing
        >>> item = sizing.TableTraffic.assumed("item", rows=1_000_000, dim=64, ids_per_batch=65_536)
        >>> by_share, by_bytes = plotting.curve_panels([item], sizing.advise([item], ram="64MiB", ssd="1GiB"))
        >>> [line.title for line in by_share.lines], by_share.marks[0].label
        (['item'], 'advised budget')
        >>> by_bytes.lines[0].x[0] == int(item.curve.rows[0]) * item.row_bytes.host
        True
    """
    of_sources = traffic if isinstance(traffic, Mapping) else {"": traffic}
    names = list(dict.fromkeys(table.name for tables in of_sources.values() for table in tables))
    found = [
        _TableCurve.from_table(table, source if len(of_sources) > 1 else "", names.index(table.name), dash, advice)
        for dash, (source, tables) in enumerate(of_sources.items())
        for table in tables
        if table.curve.lookups and len(table.curve.rows)
    ]
    if not found:
        raise InputError("there is no miss ratio curve: train some batches with TierBudgets(sizing=True) first")
    return [
        _panel(found, "the share of rows in RAM", "rows in RAM (share of all rows of the table)", "share"),
        _panel(found, "the bytes of rows in RAM", "bytes of rows in RAM", "bytes"),
    ]


@dataclass(frozen=True)
class _TableCurve:
    """The points of a table by number of rows, and the size of a row in each unit."""

    line: Line
    marks: tuple[Mark, ...]
    scales: dict[AxisUnit, float]

    @classmethod
    def from_table(
        cls, table: TableTraffic, source: str, color: int, dash: int, advice: BudgetAdvice | None
    ) -> _TableCurve:
        curve = table.curve
        # A cache larger than all rows is useless. The curve ends at the table's row count.
        inside = curve.rows <= table.rows
        x = curve.rows[inside].astype(float).tolist()
        y = curve.miss_ratios[inside].tolist()
        if not x or x[-1] < table.rows:
            x.append(float(table.rows))
            y.append(curve.at(table.rows))
        line = Line(table.name, tuple(x), tuple(y), color, dash, source)
        marks = []
        now, advised = current_advice(table), advice.tables.get(table.name) if advice is not None else None
        for shape, (label, made) in enumerate((("budget of now", now), ("advised budget", advised))):
            if made is not None:
                rows = max(made.rows_in_ram, 1)
                marks.append(Mark(label, line.title, float(rows), curve.at(rows), color, shape))
        return cls(line, tuple(marks), {"share": 1.0 / table.rows, "bytes": float(table.row_bytes.host)})


def _panel(curves: Sequence[_TableCurve], x_values: str, x_label: str, unit: AxisUnit) -> Panel:
    def scaled(curve: _TableCurve) -> Line:
        line = curve.line
        x = tuple(rows * curve.scales[unit] for rows in line.x)
        return Line(line.label, x, line.y, line.color, line.dash, line.table)

    marks = tuple(
        Mark(mark.label, mark.table, mark.x * curve.scales[unit], mark.y, mark.color, mark.shape)
        for curve in curves
        for mark in curve.marks
    )
    y_label = "misses (share of lookups)"
    return Panel(
        f"Miss ratio by {x_values}", x_label, y_label, tuple(map(scaled, curves)), marks, unit, "share", x_log=True
    )
