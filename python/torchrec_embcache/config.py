"""Budgets and the other settings of a table, checked before anything is made."""

import os
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .exceptions import ConfigError

__all__ = [
    "DEFAULT_TOTAL_NUM_BUCKETS",
    "OnFull",
    "Policy",
    "Reopen",
    "TierBudgets",
    "Unseen",
    "bucket_range",
    "check_choice",
    "check_int",
    "check_name",
    "parse_bytes",
]

Policy = Literal["lru", "lfu", "s3fifo"]
OnFull = Literal["error", "evict"]
Unseen = Literal["initial", "zeros"]
Reopen = Literal["resume", "discard"]

# A prime, for ids whose low bits say little. Fixed for the life of a table.
DEFAULT_TOTAL_NUM_BUCKETS = 4093

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(field: str, value: int | str) -> int:
    """A size in bytes from an int or a string such as "8GiB", "1.5GiB", "64MiB", "512KiB", "4096B"; `ConfigError` names `field`."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(
            f'{field}={value!r} is not a size: give bytes as an int, or a string such as "8GiB" or "64MiB"'
        )
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2] not in _UNITS:
            raise ConfigError(
                f'{field}={value!r} is not a size: write a number and B, KiB, MiB, GiB or TiB, such as "8GiB"'
            )
        whole = float(match[1]) * _UNITS[match[2]]
        size = int(match[1]) * _UNITS[match[2]] if match[1].isdigit() else int(whole)
    if not 0 <= size < 1 << 63:
        raise ConfigError(f"{field}={value!r} is out of range: give 0 to 2^63 - 1 bytes")
    return size


def bytes_text(size: int) -> str:
    """A number of bytes in the largest unit that it fills, such as "20 GiB" or "1.5 MiB"."""
    unit = max(
        (unit for unit in _UNITS.items() if unit[1] <= size and unit[0]), key=lambda unit: unit[1], default=("B", 1)
    )
    return f"{size / unit[1]:.4g} {unit[0]}"


def check_choice(field: str, value: object, choices: Any) -> None:
    """`ConfigError` unless `value` is one of the strings of the Literal `choices`."""
    names = get_args(choices)
    if value not in names:
        raise ConfigError(f"{field}={value!r} is not known: use {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")


def check_int(field: str, value: object, low: int, high: int) -> int:
    """`value` as an int; `ConfigError` unless it is one from `low` to `high`, both included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{field}={value!r} is not an integer: give one from {low} to {high}")
    number: int = value.__index__()
    if not low <= number <= high:
        raise ConfigError(f"{field}={value!r} is out of range: give an integer from {low} to {high}")
    return number


def check_name(field: str, value: object) -> str:
    """`value` if it is a string that can name a table or a module: 1 to 200 bytes of UTF-8 without NUL."""
    if not isinstance(value, str):
        raise ConfigError(f"{field}={value!r} is not a name: give a string")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        length = 0
    if not 1 <= length <= 200 or "\0" in value:
        raise ConfigError(f"{field}={value!r} is not a name: give 1 to 200 bytes of UTF-8 without NUL")
    return value


@dataclass(frozen=True, kw_only=True)
class TierBudgets:
    """How many bytes of each tier a table may use on this rank.

    A budget is an int (bytes) or a string ("8GiB", "64MiB", "512KiB"). It counts rows with optimizer slots and metadata and their
    index; the index of the rows on SSD counts in `host_bytes`.

    - `device_bytes`: the device tier. On the CPU 0 (the default) runs the kernels on the host tier's rows in place; a value
      makes a device tier of CPU tensors.
    - `host_bytes`: the host tier. Mandatory.
    - `ssd_bytes`, `ssd_dir`: the SSD tier, all its files together; 0 bytes or no directory: none. The last tier holds every row.
    - `reopen`: a directory that holds a table's files is opened only with "resume" (go on from the last flush) or "discard"
      (remove them).
    """

    device_bytes: int | str = 0
    host_bytes: int | str
    ssd_bytes: int | str = 0
    ssd_dir: str | os.PathLike[str] | None = None
    reopen: Reopen | None = None

    def __post_init__(self) -> None:
        for field in ("device_bytes", "host_bytes", "ssd_bytes"):
            object.__setattr__(self, field, parse_bytes(f"TierBudgets.{field}", getattr(self, field)))
        if self.host_bytes == 0:
            raise ConfigError("TierBudgets.host_bytes=0: the host tier is mandatory, give it at least a few MiB")
        if self.ssd_dir is not None:
            try:
                path = os.fspath(self.ssd_dir)
            except TypeError:
                path = None
            if not isinstance(path, str) or not path or "\0" in path:
                raise ConfigError(
                    f"TierBudgets.ssd_dir={self.ssd_dir!r} is not a path: give a directory as a str or a Path"
                )
            object.__setattr__(self, "ssd_dir", path)
        if self.reopen is not None:
            check_choice("TierBudgets.reopen", self.reopen, Reopen)

    @property
    def device(self) -> int:
        """`device_bytes` in bytes."""
        return int(self.device_bytes)

    @property
    def host(self) -> int:
        """`host_bytes` in bytes."""
        return int(self.host_bytes)

    def describe(self) -> str:
        """The tiers and their budgets, for people, such as "host 256 MiB, ssd 20 GiB in cache"."""
        parts = [("device", self.device, ""), ("host", self.host, ""), ("ssd", self.ssd, f" in {self.ssd_dir}")]
        return ", ".join(f"{tier} {bytes_text(size)}{where}" for tier, size, where in parts if size)

    @property
    def ssd(self) -> int:
        """Bytes of the SSD tier; 0 when there is none."""
        return int(self.ssd_bytes) if self.ssd_dir is not None else 0


def bucket_range(rank: int, world_size: int, total_num_buckets: int) -> tuple[int, int]:
    """The buckets [begin, end) of `rank`, split as TorchRec splits them: the first ranks have one more."""
    share, rest = divmod(total_num_buckets, world_size)
    begin = rank * share + min(rank, rest)
    return begin, begin + share + (rank < rest)
