"""Sources of `embcache top`: endpoints of Prometheus exporters, and files of JSON lines."""

from __future__ import annotations

import http.client
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torchrec_embcache.exceptions import CorruptionError, InputError, StorageError, UnsupportedError
from torchrec_embcache.monitoring import METRICS, Metric, MetricValue, TableSample
from torchrec_embcache.monitoring._jsonl import sample_from_line
from torchrec_embcache.stats import Histogram

__all__ = ["SampleSource", "SourceReading", "TableRankKey", "open_source"]

#: The module, name and rank of a table.
TableRankKey = tuple[str, str, int]

_TIMEOUT_S = 10.0
#: Bytes read from the end of a JSON lines file: several hundred samples of a hundred tables.
_TAIL_BYTES = 16 << 20
#: Maximum length of a response; anything longer is not an exporter.
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class SourceReading:
    """A sample of a table and when it was taken, in seconds since 1970."""

    time: float
    table: TableSample


class SampleSource(Protocol):
    """A source of samples."""

    @property
    def name(self) -> str:
        """Display name."""

    def read(self) -> dict[TableRankKey, tuple[SourceReading | None, SourceReading]]:
        """Returns the latest and the previous sample of each table.

        Raises `StorageError` if it cannot be read, and `CorruptionError` if its contents have another format.
        """


def open_source(name: str) -> SampleSource:
    """Returns the source for a URL, HOST:PORT, or a path. Raises `InputError` for any other URL."""
    address = urllib.parse.urlsplit(name)
    if address.scheme in ("http", "https"):
        return PrometheusSource(name if address.path not in ("", "/") else urllib.parse.urljoin(name, "/metrics"))
    if "://" in name:
        raise InputError(
            f"{name!r} is not an address of metrics: give http://HOST:PORT, HOST:PORT, or a file of JsonlLogger"
        )
    host, colon, port = name.rpartition(":")
    if colon and port.isdecimal() and "/" not in name and not os.path.exists(name):
        return PrometheusSource(f"http://{host or '127.0.0.1'}:{port}/metrics")
    return JsonlSource(name)


class PrometheusSource:
    """The URL of a `PrometheusExporter`."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._previous: dict[TableRankKey, SourceReading] = {}

    def read(self) -> dict[TableRankKey, tuple[SourceReading | None, SourceReading]]:
        """See `SampleSource.read`. The previous samples are those of the previous call."""
        text, now = self._fetch(), time.time()
        tables = parse_tables(text, self.name)
        newest = {(table.module, table.table, table.rank): SourceReading(now, table) for table in tables}
        before, self._previous = self._previous, newest
        return {key: (before.get(key), reading) for key, reading in newest.items()}

    def _fetch(self) -> str:
        try:
            with urllib.request.urlopen(self.name, timeout=_TIMEOUT_S) as answer:
                return str(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise StorageError(
                f"cannot read {self.name}: {reason}; is the training running, and its exporter there?"
            ) from error


class JsonlSource:
    """A file of a `JsonlLogger`."""

    def __init__(self, path: str) -> None:
        self.name = path

    def read(self) -> dict[TableRankKey, tuple[SourceReading | None, SourceReading]]:
        """Like `SampleSource.read`, for the end of the file. Skips an incomplete last line."""
        found: dict[TableRankKey, tuple[SourceReading | None, SourceReading]] = {}
        lines = self._read_tail()
        for number, line in enumerate(lines):
            try:
                sample = sample_from_line(line)
            except InputError as error:
                # A full disk may have truncated a line. A file without any sample has another format.
                if number == len(lines) - 1 and not found:
                    raise CorruptionError(f"{self.name}: {error}") from error
                continue
            for table in sample.tables:
                key = (table.module, table.table, table.rank)
                before = found.get(key)
                found[key] = (before[1] if before else None, SourceReading(sample.time, table))
        return found

    def _read_tail(self) -> list[str]:
        try:
            with open(self.name, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                data = file.read()
        except OSError as error:
            raise StorageError(f"cannot read {self.name}: {error.strerror or error}") from error
        lines = data.decode("utf-8", "replace").split("\n")[:-1]
        return [line for line in lines[1 if size > _TAIL_BYTES else 0 :] if line.strip()]


# ---- Prometheus' text format

_METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


def parse_tables(text: str, source: str) -> list[TableSample]:
    """Parses the tables in Prometheus' text format. Histograms have the exporter's bounds, fewer than those of `stats()`."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as missing:
        raise UnsupportedError(
            'the text of Prometheus needs prometheus-client: pip install "torchrec-embcache[prometheus]"'
        ) from missing
    values: dict[TableRankKey, dict[str, MetricValue]] = {}
    buckets: dict[tuple[TableRankKey, str], dict[float, float]] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        for sample in samples:
            name, _, part = sample.name.rpartition("_")
            metric = _METRICS_BY_NAME.get(sample.name) or (
                _METRICS_BY_NAME.get(name) if part in ("bucket", "sum", "count") else None
            )
            if metric is None:
                continue
            labels = sample.labels
            key = (labels["module"], labels["table"], int(labels["rank"]))
            of_table = values.setdefault(key, {})
            if metric.kind == "histogram":
                at = labels["le"] if part == "bucket" else part
                buckets.setdefault((key, metric.path), {})[_bucket_bound(at)] = sample.value
            else:
                of_table[metric.path] = _parse_value(metric, labels, sample.value, of_table.get(metric.path))
    except (ValueError, KeyError) as error:
        raise CorruptionError(f"{source} is not an endpoint of PrometheusExporter: {error}") from error
    for (key, path), found in buckets.items():
        values[key][path] = _parse_histogram(found)
    return [TableSample(*key, of_table) for key, of_table in values.items()]


def _parse_value(metric: Metric, labels: Mapping[str, str], value: float, previous: MetricValue | None) -> MetricValue:
    if metric.kind == "text":
        return labels[metric.path.split(".")[-1]]
    if metric.kind == "flag":
        return value != 0.0
    if metric.label is not None:
        others = previous if isinstance(previous, Mapping) else {}
        return {**others, labels[metric.label]: int(value)}
    if metric.path.endswith("_ns"):
        return round(value * 1e9)
    return int(value) if value.is_integer() else value


# Pseudo-bounds for a histogram's sum and count.
_SUM, _COUNT = -1.0, -2.0


def _bucket_bound(at: str) -> float:
    return {"sum": _SUM, "count": _COUNT}[at] if at in ("sum", "count") else float(at)


def _parse_histogram(buckets: dict[float, float]) -> Histogram:
    """Returns a histogram from cumulative counts by bound in seconds. Values above the largest bound are counted there."""
    total, count = buckets.pop(_SUM, 0.0), int(buckets.pop(_COUNT, 0.0))
    finite = sorted(bound for bound in buckets if bound != float("inf"))
    counts: list[tuple[int, int]] = []
    seen = 0
    for bound in finite:
        here = count if bound == finite[-1] else int(buckets[bound])
        if here > seen:
            counts.append((round(bound * 1e9), here - seen))
        seen = here
    return Histogram(count, round(total * 1e9), tuple(counts))
