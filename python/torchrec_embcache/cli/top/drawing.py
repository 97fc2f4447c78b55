"""Draws a frame of `embcache top` with rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from torchrec_embcache.monitoring._rates import TIERS

from .frames import ALL_TABLES, TableFrame, TopFrame

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["draw_frame"]

#: Formats a number for display.
_Formatter = Callable[[float], str]


def draw_frame(frame: TopFrame) -> RenderableType:
    """Returns the frame as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    when = (
        datetime.fromtimestamp(frame.time).strftime("%Y-%m-%d %H:%M:%S") if frame.time is not None else "no samples yet"
    )
    head = Text.assemble(("embcache top  ", "bold"), when, "   ", (", ".join(frame.sources), "dim"))
    parts: list[RenderableType] = [head]
    parts += [Text(problem, style="red") for problem in frame.problems]
    parts.append(Text())
    for part in (_waits_table(frame), _tiers_table(frame), _ssd_table(frame), _lifecycle_table(frame)):
        if part is not None:
            parts.append(part)
    return Group(*parts)


# ---- the tables of a frame

# A column: its title, the name of its metric, and its format.
_GridColumn = tuple[str, str, _Formatter]


def _waits_table(frame: TopFrame) -> Table | None:
    if not frame.tables:
        return None
    columns: list[_GridColumn] = [
        ("rows", "rows", _format_count),
        ("step", "step", _format_integer),
        ("steps/s", "steps_per_second", _format_count),
        ("wait p50", "row_wait/p50_ms", _format_time),
        ("wait p99", "row_wait/p99_ms", _format_time),
        ("lock p50", "lock_held/p50_ms", _format_time),
        ("lock p99", "lock_held/p99_ms", _format_time),
        ("overflow/s", "overflow_plans_per_second", _format_count),
        ("pinned", "pinned_rows", _format_count),
    ]
    return _build_table("waits of a batch for its rows, and under the table's lock", columns, frame.tables)


def _tiers_table(frame: TopFrame) -> Table | None:
    from rich.text import Text

    grid = _empty_table(
        "tiers",
        ["tier", "rows", "bytes", "budget", "hit rate", "hits/s", "misses/s", "evicted/s", "read/s", "written/s"],
    )
    for table in frame.tables:
        first = True
        for tier in TIERS:
            numbers = {
                name.removeprefix(f"{tier}/"): n for name, n in table.numbers.items() if name.startswith(f"{tier}/")
            }
            if "capacity_bytes" not in numbers:
                continue
            budget = numbers["capacity_bytes"]
            cells = [
                _cell(numbers, "rows", _format_count),
                _cell(numbers, "bytes", _format_size),
                Text.assemble(
                    *_usage_bar(numbers["bytes"] / budget if budget else 0.0), f"  {_format_size(budget):>9}"
                ),
                _cell(numbers, "hit_rate", _format_percent),
                *(_cell(numbers, f"{name}_per_second", _format_count) for name in ("hits", "misses", "evictions")),
                *(_cell(numbers, f"{name}_per_second", _format_size) for name in ("read_bytes", "written_bytes")),
            ]
            grid.add_row(
                *(_names(table) if first else ("", "")), tier, *cells, style="bold" if table.title == ALL_TABLES else ""
            )
            first = False
    return grid if grid.rows else None


def _ssd_table(frame: TopFrame) -> Table | None:
    having = [table for table in frame.tables if "ssd/rows" in table.numbers]
    if not having:
        return None
    columns: list[_GridColumn] = [
        ("reads/s", "ssd/reads_per_second", _format_count),
        ("read p50", "ssd/read_latency/p50_ms", _format_time),
        ("read p99", "ssd/read_latency/p99_ms", _format_time),
        ("logical/s", "ssd/logical_written_bytes_per_second", _format_size),
        ("compaction/s", "ssd/compaction_bytes_per_second", _format_size),
        ("write ampl.", "ssd/write_amplification", _format_ratio),
        ("live", "ssd/live_share", _format_percent),
        ("files", "ssd/segments", _format_integer),
        ("space waits/s", "ssd/space_waits_per_second", _format_count),
    ]
    return _build_table("SSD", columns, having, ("state", _state))


def _lifecycle_table(frame: TopFrame) -> Table | None:
    columns: list[_GridColumn] = [
        ("admitted/s", "admission/admitted_per_second", _format_count),
        ("not admitted/s", "admission/not_admitted_per_second", _format_count),
        ("pending", "admission/pending", _format_count),
        ("forgotten/s", "admission/forgotten_per_second", _format_count),
        ("evicted/s", "eviction/evicted_per_second", _format_count),
        ("undelivered", "eviction/undelivered", _format_count),
        ("dropped/s", "dropped_rows_per_second", _format_count),
    ]
    of_life = ("admission/", "eviction/")
    having = [table for table in frame.tables if any(name.startswith(of_life) for name in table.numbers)]
    return _build_table("ids that come and go", columns, having) if having else None


def _build_table(
    title: str,
    columns: Sequence[_GridColumn],
    tables: Sequence[TableFrame],
    last: tuple[str, Callable[[TableFrame], Text]] | None = None,
) -> Table:
    grid = _empty_table(title, [name for name, _, _ in columns], last[0] if last else None)
    for table in tables:
        cells = [_cell(table.numbers, name, shown) for _, name, shown in columns]
        more = [last[1](table)] if last else []
        grid.add_row(*_names(table), *cells, *more, style="bold" if table.title == ALL_TABLES else "")
    return grid


def _empty_table(title: str, columns: Sequence[str], last: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    grid = Table(
        title=title,
        title_justify="left",
        title_style="bold cyan",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    grid.add_column("table", no_wrap=True)
    grid.add_column("rank", no_wrap=True)
    for name in columns:
        grid.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    if last:
        grid.add_column(last, no_wrap=True)
    return grid


def _names(table: TableFrame) -> tuple[Text, Text]:
    from rich.text import Text

    return Text(table.title), Text(table.rank)


def _state(table: TableFrame) -> Text:
    from rich.text import Text

    if table.numbers.get("ssd/read_only"):
        return Text("read-only", style="bold red")
    if table.numbers.get("ssd/has_lost_flush"):
        return Text("last flush lost", style="yellow")
    return Text(table.engine or "ok", style="dim")


# ---- formatting of numbers


def _cell(numbers: object, name: str, formatter: _Formatter) -> Text:
    from rich.text import Text

    value = numbers.get(name) if hasattr(numbers, "get") else None
    return Text("-", style="dim") if value is None else Text(formatter(value))


def _usage_bar(fraction: float) -> tuple[tuple[str, str], tuple[str, str], str]:
    """Returns a bar of eight characters and the percentage."""
    full = min(8, round(fraction * 8))
    return ("━" * full, "green" if fraction <= 1.0 else "yellow"), ("━" * (8 - full), "grey35"), f" {fraction:4.0%}"


def _format_integer(value: float) -> str:
    return f"{value:,.0f}"


def _format_count(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (unit != "k" and abs(value) >= size):
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _format_size(value: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= size * 1000 / 1024:  # at most "999.9", which keeps columns narrow
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def _format_time(milliseconds: float) -> str:
    if milliseconds >= 1_000.0:
        return f"{milliseconds / 1_000.0:,.2f} s"
    if milliseconds >= 1.0:
        return f"{milliseconds:.1f} ms"
    return f"{milliseconds * 1_000.0:.1f} µs"


def _format_percent(value: float) -> str:
    return f"{value:.1%}"


def _format_ratio(value: float) -> str:
    return f"{value:.2f}"
