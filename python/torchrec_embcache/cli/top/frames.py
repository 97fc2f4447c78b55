"""The contents of a frame of `embcache top`, computed from readings, independent of drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchrec_embcache.model._names import display_name
from torchrec_embcache.monitoring import MetricValue, TableSample
from torchrec_embcache.monitoring._rates import table_rates
from torchrec_embcache.stats import Histogram

from .sources import SourceReading, TableRankKey

__all__ = ["ALL_TABLES", "TableFrame", "TopFrame", "build_frame"]

#: Title of the sum of all tables and ranks.
ALL_TABLES = "all"
#: Metrics that cannot be summed.
_NOT_SUMMABLE = {"step", "ssd.live_share"}


@dataclass(frozen=True)
class TableFrame:
    """Metrics of one table on one rank, or of all together, as in `monitoring.rates.table_rates`.

    - `title`, `rank`: display names.
    - `seconds`: the interval of the metrics; 0.0 if they cover the time since the table was opened.
    - `numbers`: metrics by name, as "host/hit_rate".
    - `engine`: the I/O engine; "" without an SSD tier.
    """

    title: str
    rank: str
    seconds: float
    numbers: Mapping[str, float]
    engine: str = ""


@dataclass(frozen=True)
class TopFrame:
    """Contents of one frame.

    - `time`: time of the latest sample, in seconds since 1970; None if there is none.
    - `sources`: the names of the sources.
    - `tables`: one entry for each table and rank, and one for their sum if there are several.
    - `problems`: errors of sources that could not be read.
    """

    time: float | None
    sources: tuple[str, ...]
    tables: tuple[TableFrame, ...]
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the complete frame in a JSON-serializable form."""
        return asdict(self)


def build_frame(
    sources: Sequence[str],
    readings: Sequence[Mapping[TableRankKey, tuple[SourceReading | None, SourceReading]]],
    problems: Sequence[str] = (),
) -> TopFrame:
    """Builds the frame from the readings of each of `sources`, in their order."""
    found = [(number, key, pair) for number, of_source in enumerate(readings) for key, pair in of_source.items()]
    # Two trainings may have a table of the same name and rank. In that case the rank column includes the source.
    twice = {key for key, count in Counter(key for _, key, _ in found).items() if count > 1}
    tables = []
    for number, key, (before, after) in sorted(found, key=lambda one: (one[1], one[0])):
        seconds = after.time - before.time if before else 0.0
        numbers = table_rates(before.table if before else None, after.table, seconds)
        rank = f"{key[2]} of {sources[number]}" if key in twice else str(key[2])
        engine = after.table.values.get("ssd.io_engine", "")
        tables.append(
            TableFrame(display_name(key[:2]), rank, seconds, numbers, engine if isinstance(engine, str) else "")
        )
    if len(tables) > 1:
        tables.append(_total_frame([pair for _, _, pair in found]))
    newest = max((after.time for _, _, (_, after) in found), default=None)
    return TopFrame(newest, tuple(sources), tuple(tables), tuple(problems))


def _total_frame(pairs: Sequence[tuple[SourceReading | None, SourceReading]]) -> TableFrame:
    """Sums all tables and ranks. Rates are summed, because samples of several ranks have different times."""
    added: Counter[str] = Counter()
    lasting = [pair for pair in pairs if pair[0] is not None] or list(pairs)
    for before, after in lasting:
        seconds = after.time - before.time if before else 0.0
        numbers = table_rates(before.table if before else None, after.table, seconds)
        added.update({name: value for name, value in numbers.items() if name.endswith("_per_second")})
    earlier = _sum_tables([before.table for before, _ in lasting if before is not None])
    numbers = table_rates(
        earlier, _sum_tables([after.table for _, after in lasting]) or TableSample("", ALL_TABLES, 0, {}), 0.0
    )
    added.pop("steps_per_second", None)
    return TableFrame(ALL_TABLES, "", 0.0, {**numbers, **added})


def _sum_tables(tables: Sequence[TableSample]) -> TableSample | None:
    """Returns a sample with the summed counters of all tables."""
    if not tables:
        return None
    values: dict[str, MetricValue] = {}
    for table in tables:
        for path, value in table.values.items():
            before = values.get(path)
            if isinstance(value, Histogram):
                values[path] = value + before if isinstance(before, Histogram) else value
            elif isinstance(value, int | float) and path not in _NOT_SUMMABLE:
                values[path] = value + (before if isinstance(before, int | float) else 0)
    return TableSample("", ALL_TABLES, 0, values)
