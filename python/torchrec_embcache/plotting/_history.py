"""Plots of samples of running tables over time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchrec_embcache.exceptions import CorruptionError, InputError
from torchrec_embcache.monitoring import Sample, TableSample
from torchrec_embcache.monitoring._rates import TIERS, table_rates

from ._panels import AxisUnit, Line, Panel, matches_table

__all__ = ["HistoryAxis", "history_panels"]

#: The x axis of plots. "auto" is "step" if steps increase in all tables, and "time" otherwise.
HistoryAxis = Literal["auto", "step", "time"]

_MIB = float(1 << 20)
_TIER_NAMES = {"device": "device", "host": "host", "ssd": "SSD"}


class _LineSpec(NamedTuple):
    """A line of a plot: its label, the name of a metric of `monitoring.rates.table_rates`, and its color and dash."""

    label: str
    number: str
    color: int
    dash: int = 0


class _PanelSpec(NamedTuple):
    """A kind of plot."""

    title: str
    y_label: str
    lines: tuple[_LineSpec, ...]
    unit: AxisUnit = "number"
    is_log: bool = False


def _by_tier(number: str, label: str = "{}", dash: int = 0) -> tuple[_LineSpec, ...]:
    return tuple(
        _LineSpec(label.format(_TIER_NAMES[tier]), f"{tier}/{number}", color, dash) for color, tier in enumerate(TIERS)
    )


def _quantiles(path: str) -> tuple[_LineSpec, ...]:
    return (_LineSpec("median", f"{path}/p50_ms", 0), _LineSpec("99th percentile", f"{path}/p99_ms", 1))


#: The pattern index of budgets, which no line of a rank has.
_DOTTED = -1
_BYTES = (*_by_tier("bytes"), *_by_tier("capacity_bytes", "{} budget", _DOTTED))
_TRANSFERS = (
    _LineSpec("read", "ssd/read_bytes_per_second", 0),
    _LineSpec("written", "ssd/written_bytes_per_second", 1),
)
_KINDS = (
    _PanelSpec("hit rate by tier", "ids found (share)", _by_tier("hit_rate"), "share"),
    _PanelSpec("rows by tier", "rows", _by_tier("rows"), is_log=True),
    _PanelSpec("bytes by tier", "bytes", _BYTES, "bytes", is_log=True),
    _PanelSpec("SSD reads and writes", "MiB a second", _TRANSFERS),
    _PanelSpec("wait of a batch for its rows", "ms", _quantiles("row_wait"), is_log=True),
    _PanelSpec("time of a read from SSD", "ms", _quantiles("ssd/read_latency"), is_log=True),
)
_NUMBERS = {shown.number for kind in _KINDS for shown in kind.lines}
_SINCE = {number for number in _NUMBERS if number.endswith(("hit_rate", "_per_second", "_ms"))}


@dataclass
class _TableSeries:
    """The metrics of one table of one rank, sample by sample."""

    times: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _last: TableSample | None = None

    def add(self, time: float, step: int | None, table: TableSample) -> None:
        seconds = max(time - self.times[-1], 0.0) if self.times else 0.0
        before = self._last if seconds > 0.0 else None
        found = table_rates(before, table, seconds)
        for number in _NUMBERS:
            # The first sample only has gauges: the time before it may cover days.
            value = math.nan if before is None and number in _SINCE else found.get(number, math.nan)
            self.numbers[number].append(value)
        self.times.append(time)
        self.steps.append(math.nan if step is None else float(step))
        self._last = table

    @property
    def has_steps(self) -> bool:
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return all(before <= after for before, after in pairs) and self.steps[0] < self.steps[-1]


#: The metrics of a table by its rank and the label of the source.
_Ranks = dict[tuple[int, str], _TableSeries]


def history_panels(
    samples: Iterable[Sample] | Mapping[str, Iterable[Sample]],
    *,
    over: HistoryAxis = "auto",
    tables: Collection[str] = (),
) -> list[Panel]:
    """Returns the history of tables as panels: for each table its hit rates, rows and bytes by tier, SSD rates, and waits.

    Rates, ratios and waits cover the time since the previous sample, as in `monitoring.scalars`; they start at a table's second
    sample. Metrics that a table does not have are omitted.

    Args:
        samples: samples in the order in which they were taken; or the samples of several files or ranks by label.
        over: "step", "time" (seconds since the first sample), or "auto": steps if they increase in all tables.
        tables: the tables to show, by "<module>/<table>" or by name; all by default.

    Raises `InputError` if no table has two samples, or if a name matches no table.

    Examples:
        >>> from torchrec_embcache.monitoring import Sample, TableSample
        >>> from torchrec_embcache.plotting import history_panels
        >>> counters = [{"host.hits": 0, "host.misses": 0}, {"host.hits": 30, "host.misses": 10}]
        >>> samples = [Sample(10.0 + n, n, (TableSample("", "item", 0, values),)) for n, values in enumerate(counters)]
        >>> (panel,) = history_panels(samples)
        >>> panel.title, panel.x_label, panel.lines[0].y
        ('item: hit rate by tier', 'training step', (nan, 0.75))
    """
    of_sources = samples if isinstance(samples, Mapping) else {"": samples}
    found: dict[tuple[str, str], _Ranks] = defaultdict(dict)
    for source, of_source in of_sources.items():
        for (module, table, rank), series in _read_series(source, of_source).items():
            if len(series.times) > 1:
                found[module, table][rank, source] = series
    chosen = _select_tables(found, tables)
    if not chosen:
        raise InputError("there is no table with two samples: what happened between them is shown")
    every = [series for ranks in chosen.values() for series in ranks.values()]
    by_step = over == "step" or (over == "auto" and all(series.has_steps for series in every))
    begin = min(series.times[0] for series in every)
    panels = [
        _panel(title, kind, _series_by_label(ranks), None if by_step else begin)
        for title, ranks in chosen.items()
        for kind in _KINDS
    ]
    return [panel for panel in panels if panel.lines]


def _read_series(path: str, samples: Iterable[Sample]) -> dict[tuple[str, str, int], _TableSeries]:
    """Returns the metrics of the tables of one source, by module, name and rank."""
    found: dict[tuple[str, str, int], _TableSeries] = defaultdict(_TableSeries)
    try:
        for sample in samples:
            for table in sample.tables:
                found[table.module, table.table, table.rank].add(sample.time, sample.step, table)
    except (OverflowError, ZeroDivisionError, ValueError) as error:
        raise CorruptionError(f"{path or 'the samples'}: a counter has a value that none can have: {error}") from error
    return found


def _select_tables(found: Mapping[tuple[str, str], _Ranks], tables: Collection[str]) -> dict[str, _Ranks]:
    """Returns the requested tables by display name."""
    titled = {f"{module}/{table}" if module else table: ranks for (module, table), ranks in found.items()}
    missing = [one for one in tables if not any(matches_table(title, [one]) for title in titled)]
    if missing:
        raise InputError(f"table {missing[0]!r} is not there: give one of {', '.join(sorted(titled))}")
    return {title: ranks for title, ranks in titled.items() if matches_table(title, tables)}


def _series_by_label(ranks: _Ranks) -> dict[str, _TableSeries]:
    """Returns the series of a table by label; a single series has an empty label."""
    if len(ranks) == 1:
        return {"": next(iter(ranks.values()))}
    numbers = [rank for rank, _ in ranks]
    return {
        f"rank {rank}" if numbers.count(rank) == 1 else f"rank {rank} of {source}": series
        for (rank, source), series in sorted(ranks.items(), key=lambda one: one[0])
    }


def _panel(title: str, kind: _PanelSpec, ranks: Mapping[str, _TableSeries], begin: float | None) -> Panel:
    lines: list[Line] = []
    for number, (of, series) in enumerate(ranks.items()):
        x = tuple(series.steps) if begin is None else tuple(time - begin for time in series.times)
        for shown in kind.lines:
            divisor = _MIB if shown.number.endswith("bytes_per_second") else 1.0
            y = tuple(value / divisor for value in series.numbers[shown.number])
            # A line of zeros would be invisible on a logarithmic axis.
            if not any(value > 0.0 or (value == 0.0 and not kind.is_log) for value in y):
                continue
            if shown.dash != _DOTTED:
                lines.append(Line(shown.label, x, y, shown.color, number, of))
            # Equal budgets of all ranks are one line.
            elif not any(line.label == shown.label and line.y[0] == y[0] for line in lines):
                lines.append(Line(shown.label, x, y, shown.color, _DOTTED))
    x_label = "training step" if begin is None else "seconds since the first sample"
    return Panel(f"{title}: {kind.title}", x_label, kind.y_label, tuple(lines), y_unit=kind.unit, y_log=kind.is_log)
