"""What a frame of `embcache top` shows, decided from readings and without drawing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchrec_embcache.monitoring import MetricValue, TableSample
from torchrec_embcache.monitoring.rates import table_rates
from torchrec_embcache.stats import Histogram
from torchrec_embcache.table_names import display_name

from .top_sources import SourceReading, TableRankKey

__all__ = ["ALL_TABLES", "TableFrame", "TopFrame", "build_frame"]

#: What the sum of all tables and ranks is called.
ALL_TABLES = "all"
#: Numbers that mean nothing when they are added up.
_NOT_SUMMABLE = {"step", "ssd.live_share"}


@dataclass(frozen=True)
class TableFrame:
    """The numbers of one table on one rank, or of all together: those of `monitoring.rates.between`.

    - `title`, `rank`: as a person reads them.
    - `seconds`: the time that the numbers are about; 0.0 where they are about all since the table was opened.
    - `numbers`: by name, as "host/hit_rate".
    - `engine`: how files are read; "" without an SSD tier.
    """

    title: str
    rank: str
    seconds: float
    numbers: Mapping[str, float]
    engine: str = ""


@dataclass(frozen=True)
class TopFrame:
    """All that is shown at one moment.

    - `time`: of the newest sample, in seconds since 1970; None where there is none.
    - `sources`: what was read.
    - `tables`: one for each table and rank, and one for all where there are several.
    - `problems`: what could not be read, and why.
    """

    time: float | None
    sources: tuple[str, ...]
    tables: tuple[TableFrame, ...]
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All of it for programs."""
        return asdict(self)


def build_frame(
    sources: Sequence[str],
    readings: Sequence[Mapping[TableRankKey, tuple[SourceReading | None, SourceReading]]],
    problems: Sequence[str] = (),
) -> TopFrame:
    """The frame of what was read of each of `sources`, in their order."""
    found = [(number, key, pair) for number, of_source in enumerate(readings) for key, pair in of_source.items()]
    # Two trainings may have a table of the same name and rank each. Then the source is told with the rank.
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
    """All tables and ranks together. Rates are added up, because samples of several ranks are not of one moment."""
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
    """A table with the counters of all."""
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
