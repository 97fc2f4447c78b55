"""Tier budgets and validation of settings."""

import math
import numbers
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from ._paths import check_path
from .exceptions import ConfigError

__all__ = [
    "DEFAULT_TOTAL_NUM_BUCKETS",
    "CachePolicy",
    "MissingRead",
    "OnFull",
    "Reopen",
    "SsdPathChecks",
    "SsdRoot",
    "TierBudgets",
    "bucket_range",
    "check_choice",
    "check_int",
    "check_name",
    "parse_bytes",
    "parse_interval",
    "to_float",
]

CachePolicy = Literal["lru", "lfu", "s3fifo"]
OnFull = Literal["error", "evict"]
MissingRead = Literal["initial", "zeros"]
Reopen = Literal["resume", "discard", "auto"]
SsdPathChecks = Literal["strict", "trusted"]

# A prime number, so that ids with equal low bits are distributed too. It is fixed for the lifetime of a table.
DEFAULT_TOTAL_NUM_BUCKETS = 4093
MAX_NUM_BUCKETS = 1 << 20

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(field: str, value: int | str) -> int:
    """Returns a size in bytes, from an int or a string such as "8GiB", "1.5GiB", "64MiB", "512KiB" or "4096B".

    Raises `ConfigError`, which names `field`.
    """
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
    """Formats a number of bytes in the largest unit that it reaches, such as "20 GiB" or "1.5 MiB"."""
    unit = max(
        (unit for unit in _UNITS.items() if unit[1] <= size and unit[0]), key=lambda unit: unit[1], default=("B", 1)
    )
    return f"{size / unit[1]:.4g} {unit[0]}"


def parse_interval(field: str, value: object) -> int | float:
    """Returns a number of steps as an int, or the seconds of a duration such as "30s", "10min", "1.5h" or "1d" as a float.

    Raises `ConfigError`, which names `field`.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        seconds = float(match[1]) * _SECONDS[match[2]] if match is not None and match[2] in _SECONDS else 0.0
        if seconds > 0:
            return seconds
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"{field}={value!r} is not an interval: give a number of steps from 1, or a duration above 0 with s, min, h or d, such as "
        '"10min"'
    )


def check_choice(field: str, value: object, choices: Any) -> None:
    """Raises `ConfigError` unless `value` is one of the strings of the Literal `choices`."""
    names = get_args(choices)
    if value not in names:
        raise ConfigError(f"{field}={value!r} is not known: use {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")


def check_int(field: str, value: object, low: int, high: int) -> int:
    """Returns `value` as an int. Raises `ConfigError` unless it is an integer from `low` to `high`, both included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{field}={value!r} is not an integer: give one from {low} to {high}")
    number: int = value.__index__()
    if not low <= number <= high:
        raise ConfigError(f"{field}={value!r} is out of range: give an integer from {low} to {high}")
    return number


def to_float(value: object) -> float | None:
    """Returns `value` as a float if it is a real number of Python or NumPy, else None. Values out of range become infinite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_name(field: str, value: object) -> str:
    """Returns `value` if it is a string of 1 to 200 bytes of UTF-8 without NUL. Else raises `ConfigError`."""
    if not isinstance(value, str):
        raise ConfigError(f"{field}={value!r} is not a name: give a string")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        length = 0
    if not 1 <= length <= 200 or "\0" in value:
        raise ConfigError(f"{field}={value!r} is not a name: give 1 to 200 bytes of UTF-8 without NUL")
    return value


class SsdRoot(NamedTuple):
    """A user's `ssd_dir` and the checks that apply to it."""

    path: str
    checks: SsdPathChecks


@dataclass(frozen=True, kw_only=True)
class TierBudgets:
    """Byte budgets of the tiers of one table, or of all tables of a module together, on this rank.

    A budget is an int (bytes) or a string such as "8GiB", "64MiB" or "512KiB". It covers rows with their optimizer slots and
    metadata, and their index. The index of the rows on SSD is part of `host_bytes`. The last tier holds every row.

    Args:
        device_bytes: the device tier. On the CPU the default, 0, runs the kernels directly on the rows of the host tier; other
            values create a device tier of CPU tensors. Required on other devices.
        host_bytes: the host tier. Required.
        ssd_bytes: the SSD tier, all its files together. Requires `ssd_dir`; without both there is no SSD tier.
        ssd_dir: an existing directory that only this user can write to. A relative path is made absolute by the constructor.
        path_checks: "trusted" accepts an `ssd_dir` of any owner and mode, and parents that others may write to, as is common for
            volumes of pods. Every user who can write there is trusted.
        reopen: how to treat existing files of the table. "resume" continues from the last flush, "discard" removes them, and "auto"
            continues from the last flush or starts empty if there is none. "discard" and "auto" also remove files of the table that
            a run with another number of ranks left. None: a directory with files raises an error.
        flush_every: flushes the SSD tier during training every `n` steps (an int) or at an interval ("30s", "10min", "2h"), before
            the next forward. None: flushes only in `flush` or `close`. A process that is killed loses the training since the last
            flush.
        sizing: measures the miss ratio as a function of the budgets (`CacheTable.miss_ratio_curve`, `advise`) on a sample of the
            ids. Uses at most 8 MiB of RAM per table in addition to its budgets.

    Raises:
        ConfigError: a value is out of range, or one of `ssd_bytes` and `ssd_dir` is missing.
        PathError: `ssd_dir` begins with "~", has a scheme such as "s3://", or has more than 1,024 characters.

    Examples:
        >>> from torchrec_embcache import TierBudgets
        >>> tiers = TierBudgets(host_bytes="1GiB", ssd_bytes="100GiB", ssd_dir="/data/cache", reopen="auto", flush_every="10min")
        >>> tiers.host, tiers.ssd
        (1073741824, 107374182400)
        >>> tiers.describe()
        'host 1 GiB, ssd 100 GiB in /data/cache'

    With these settings a run continues where the previous run stopped, even after a crash.
    """

    device_bytes: int | str = 0
    host_bytes: int | str
    ssd_bytes: int | str = 0
    ssd_dir: str | os.PathLike[str] | None = None
    reopen: Reopen | None = None
    flush_every: int | str | None = None
    sizing: bool = False
    path_checks: SsdPathChecks = "strict"

    def __post_init__(self) -> None:
        for field in ("device_bytes", "host_bytes", "ssd_bytes"):
            object.__setattr__(self, field, parse_bytes(f"TierBudgets.{field}", getattr(self, field)))
        if self.host_bytes == 0:
            raise ConfigError("TierBudgets.host_bytes=0: the host tier is mandatory, give it at least a few MiB")
        if self.ssd_dir is not None:
            path: object = os.fspath(self.ssd_dir) if isinstance(self.ssd_dir, os.PathLike) else self.ssd_dir
            if not isinstance(path, str) or not path or "\0" in path:
                raise ConfigError(
                    f"TierBudgets.ssd_dir={self.ssd_dir!r} is not a path: give a directory as a str or a Path"
                )
            object.__setattr__(self, "ssd_dir", check_path("TierBudgets.ssd_dir", path))
        check_choice("TierBudgets.path_checks", self.path_checks, SsdPathChecks)
        if self.reopen is not None:
            check_choice("TierBudgets.reopen", self.reopen, Reopen)
        if not isinstance(self.sizing, bool):
            raise ConfigError(f"TierBudgets.sizing={self.sizing!r} is not a bool: give True or False")
        self._check_ssd()

    def _check_ssd(self) -> None:
        """Raises `ConfigError` if one of the two SSD settings is missing, or if a setting needs an SSD tier and there is none."""
        if self.ssd_dir is None and self.ssd_bytes:
            raise ConfigError(
                f"TierBudgets.ssd_bytes={self.ssd_bytes} without ssd_dir: give the SSD tier a directory of yours that exists "
                '(ssd_dir="cache"), or leave ssd_bytes out for no SSD tier'
            )
        if self.ssd_dir is not None and not self.ssd_bytes:
            raise ConfigError(
                f"TierBudgets.ssd_dir={self.ssd_dir!r} with ssd_bytes=0: give the SSD tier a budget "
                '(ssd_bytes="20GiB"), or leave ssd_dir out for no SSD tier'
            )
        if self.flush_every is not None:
            parse_interval("TierBudgets.flush_every", self.flush_every)
            if self.ssd_dir is None:
                raise ConfigError(
                    f"TierBudgets.flush_every={self.flush_every!r} without an SSD tier, to which rows are flushed: give ssd_dir "
                    "and ssd_bytes, or leave flush_every out"
                )

    @property
    def device(self) -> int:
        """`device_bytes` as an int."""
        return int(self.device_bytes)

    @property
    def host(self) -> int:
        """`host_bytes` as an int."""
        return int(self.host_bytes)

    def describe(self) -> str:
        """Describes the tiers and their budgets in one line, such as "host 256 MiB, ssd 20 GiB in cache"."""
        parts = [("device", self.device, ""), ("host", self.host, ""), ("ssd", self.ssd, f" in {self.ssd_dir}")]
        return ", ".join(f"{tier} {bytes_text(size)}{where}" for tier, size, where in parts if size)

    @property
    def ssd_root(self) -> SsdRoot:
        """`ssd_dir` and the checks that apply to it. Requires an SSD tier."""
        return SsdRoot(str(self.ssd_dir), self.path_checks)

    @property
    def ssd(self) -> int:
        """The bytes of the SSD tier; 0 if there is none."""
        return int(self.ssd_bytes) if self.ssd_dir is not None else 0

    @property
    def flush_interval(self) -> int | float | None:
        """`flush_every` as steps (an int) or seconds (a float)."""
        return None if self.flush_every is None else parse_interval("TierBudgets.flush_every", self.flush_every)


def bucket_range(rank: int, world_size: int, total_num_buckets: int) -> tuple[int, int]:
    """Returns the buckets [begin, end) of `rank`, split as in TorchRec.

    If the split is uneven, the first ranks have one bucket more.
    """
    share, rest = divmod(total_num_buckets, world_size)
    begin = rank * share + min(rank, rest)
    return begin, begin + share + (rank < rest)
