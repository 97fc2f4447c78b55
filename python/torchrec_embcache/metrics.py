"""Counters of a table and its tiers, as plain dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

__all__ = ["SsdStats", "TableStats", "TierStats"]


@dataclass(frozen=True)
class TierStats:
    """Counters of one tier of one table since it was opened; `rows`, `bytes` and `capacity_bytes` are of now.

    `hits` and `misses` count the distinct ids of plans; `time_ns` is what plans spent on the tier, waits included.
    """

    rows: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    read_bytes: int
    written_bytes: int
    time_ns: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From the core's counters, by name."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class SsdStats(TierStats):
    """Further counters of the SSD tier.

    `io_engine` is "io_uring" or "pread", with "+direct" where O_DIRECT is in use; `row_bytes_given` counts the bytes of the rows
    handed to the tier, `compaction_bytes` those that compaction wrote; `live_share` is live bytes / bytes of sealed segments;
    `published_given_up`: the last flush can no longer be resumed, its segments were needed for space.
    """

    io_engine: str
    row_bytes_given: int
    compaction_bytes: int
    live_share: float
    segments: int
    index_bytes: int
    dropped_rows: int
    published_given_up: bool

    @property
    def write_amplification(self) -> float:
        """Bytes written by the tier / bytes of rows given to it; 0 before the first."""
        return self.written_bytes / self.row_bytes_given if self.row_bytes_given else 0.0


@dataclass(frozen=True)
class TableStats:
    """Counters of one table shard. `host` is the last tier unless there is an `ssd`.

    `rows` counts all tiers; `step` the training steps; `pinned_rows` the cache slots that batches in flight hold; `overflow_plans`
    the batches whose rows did not fit the tier that kernels run on; `dropped_rows` those that `on_full="evict"` removed.
    """

    rows: int
    step: int
    pinned_rows: int
    overflow_plans: int
    dropped_rows: int
    device: TierStats | None
    host: TierStats
    ssd: SsdStats | None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From the core's counters, by name."""
        device, ssd = values["device"], values["ssd"]
        return cls(
            rows=values["rows"],
            step=values["step"],
            pinned_rows=values["pinned_rows"],
            overflow_plans=values["overflow_plans"],
            dropped_rows=values["dropped_rows"],
            device=TierStats.of(device) if device is not None else None,
            host=TierStats.of(values["host"]),
            ssd=SsdStats.of(ssd) if ssd is not None else None,
        )
