"""Plots of miss ratio curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
        _TableCurve(table, names.index(table.name), dash, source if len(of_sources) > 1 else "")
        for dash, (source, tables) in enumerate(of_sources.items())
        for table in tables
        if table.curve.lookups and len(table.curve.rows)
    ]
    if not found:
        raise InputError("there is no miss ratio curve: train some batches with TierBudgets(sizing=True) first")
    return [
        _panel(found, advice, "the share of rows in RAM", "rows in RAM (share of all rows of the table)", "share"),
        _panel(found, advice, "the bytes of rows in RAM", "bytes of rows in RAM", "bytes"),
    ]


class _TableCurve(NamedTuple):
    """A table to show, with the color, dash and owner of its line."""

    table: TableTraffic
    color: int
    dash: int
    source: str


def _panel(
    curves: Sequence[_TableCurve], advice: BudgetAdvice | None, x_values: str, x_label: str, unit: AxisUnit
) -> Panel:
    lines, marks = [], []
    for table, color, dash, source in curves:
        curve = table.curve
        scale = 1.0 / table.rows if unit == "share" else float(table.row_bytes.host)
        # A cache larger than all rows is useless. The curve ends at the table's row count.
        inside = curve.rows <= table.rows
        points = dict(zip(curve.rows[inside].tolist(), curve.miss_ratios[inside].tolist(), strict=True))
        points.setdefault(table.rows, curve.at(table.rows))
        x = tuple(rows * scale for rows in points)
        lines.append(Line(table.name, x, tuple(points.values()), color, dash, source))
        now, advised = current_advice(table), advice.tables.get(table.name) if advice is not None else None
        for shape, (label, made) in enumerate((("budget of now", now), ("advised budget", advised))):
            if made is not None:
                rows = max(made.rows_in_ram, 1)
                marks.append(Mark(label, lines[-1].title, rows * scale, curve.at(rows), color, shape))
    title, y_label = f"Miss ratio by {x_values}", "misses (share of lookups)"
    return Panel(title, x_label, y_label, tuple(lines), tuple(marks), unit, "share", x_log=True)
