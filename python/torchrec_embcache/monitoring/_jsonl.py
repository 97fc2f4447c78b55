"""Samples as JSON lines: one object per line, for `embcache top`, pandas, or any other program."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrec_embcache._paths import check_path
from torchrec_embcache.exceptions import InputError
from torchrec_embcache.stats import Histogram

from ._background import SampleMonitor
from ._sampling import MetricValue, Sample, TableSample

__all__ = ["JsonlLogger", "sample_from_line", "sample_to_line"]

# The first second of the year 10,000: times from here on cannot be displayed.
_MAX_TIME = 253_402_300_800.0


class JsonlLogger(SampleMonitor):
    """Appends the counters of a model's tables to a file, one JSON object per sample.

    An object has `time` (seconds since 1970), `step`, and `tables`: for each table its `module`, `table`, `rank`, and `values` by
    their path in `TableStats`. A histogram has `count`, `sum_ns` and `buckets`, as in `Histogram`. A line is appended by one write,
    so that several ranks can share a file on a local disk. The file is reopened for each sample, so that it can be rotated.

    Args:
        model: any `nn.Module` with tables of this package.
        path: the file. It is created if missing; its directory must exist.
        interval_s: seconds between samples taken by a thread. None: only `sample(step)` takes samples.

    Raises:
        InputError: `model` is not an `nn.Module`.
        ConfigError: `interval_s` is not above 0.

    Examples:
        >>> import json, tempfile, torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, optimizers
        >>> from torchrec_embcache.monitoring import JsonlLogger
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.1)
        ... )
        >>> with tempfile.NamedTemporaryFile() as file, JsonlLogger(item, file.name, interval_s=None) as logger:
        ...     for step in range(2):
        ...         item(torch.tensor([7, 8])).sum().backward()
        ...         logger.sample(step)
        ...     [json.loads(line)["tables"][0]["values"]["host.hits"] for line in file]
        [0, 2]
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str], *, interval_s: float | None = 10.0) -> None:
        self._path = check_path("path", path)
        self._has_partial_line = False
        super().__init__(model, interval_s)

    def __repr__(self) -> str:
        return f"JsonlLogger({self._path!r})"

    def _write(self, sample: Sample) -> None:
        # A line truncated by a full disk is terminated first, so that the next line is complete.
        line = ("\n" if self._has_partial_line else "") + sample_to_line(sample) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            data = line.encode()
            written = os.write(file, data)
            self._has_partial_line = 0 < written < len(data)
            if self._has_partial_line:
                raise OSError(f"only {written} of {len(data)} bytes could be appended to {self._path}")
        finally:
            os.close(file)


def sample_to_line(sample: Sample) -> str:
    """Returns a sample as one line of JSON, without the newline."""
    tables = [
        {
            "module": table.module,
            "table": table.table,
            "rank": table.rank,
            "values": {path: _to_json_value(value) for path, value in table.values.items()},
        }
        for table in sample.tables
    ]
    return json.dumps({"time": sample.time, "step": sample.step, "tables": tables}, separators=(",", ":"))


def sample_from_line(line: str) -> Sample:
    """Parses a line. Raises `InputError` if the line is not a sample."""
    try:
        found = json.loads(line)
        tables = [
            TableSample(
                str(table["module"]),
                str(table["table"]),
                int(table["rank"]),
                {path: _from_json_value(value) for path, value in table["values"].items()},
            )
            for table in found["tables"]
        ]
        time, step = float(found["time"]), found["step"]
        if not 0.0 <= time < _MAX_TIME or not isinstance(step, int | None):
            raise ValueError(f"time {time} or step {step!r} is none")
        return Sample(time, step, tuple(tables))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"this is not a sample of JsonlLogger: {line[:80]!r} ({error})") from error


def _to_json_value(value: MetricValue) -> Any:
    if isinstance(value, Histogram):
        return {"count": value.count, "sum_ns": value.sum_ns, "buckets": value.buckets}
    return dict(value) if isinstance(value, Mapping) else value


def _from_json_value(value: Any) -> MetricValue:
    if isinstance(value, dict):
        if "buckets" in value:
            buckets = tuple((_check_counter(bound), _check_counter(count)) for bound, count in value["buckets"])
            return Histogram(_check_counter(value["count"]), _check_counter(value["sum_ns"]), buckets)
        return {str(name): _check_counter(number) for name, number in value.items()}
    if isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return _check_counter(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise TypeError(f"{value!r} is not a JSON value")


def _check_counter(value: Any) -> int:
    """Returns the value as an integer that fits 64 bits, like every counter. Raises `ValueError` otherwise."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError("a number does not fit 64 bits")
    return number
