"""The budgets of a table, and checks of settings."""

import math
import numbers
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from .exceptions import ConfigError
from .paths import check_path

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

# A prime number, so that ids whose low bits are alike are spread too. It is fixed for the life of a table.
DEFAULT_TOTAL_NUM_BUCKETS = 4093
# Every file of 16 MiB of rows says in 8 bytes where each bucket begins: with more buckets that would be most of the file.
MAX_NUM_BUCKETS = 1 << 20

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(field: str, value: int | str) -> int:
    """A size in bytes, from an int or a string such as "8GiB", "1.5GiB", "64MiB", "512KiB" or "4096B".

    `ConfigError` names `field`.
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
    """A number of bytes in the largest unit that it fills, such as "20 GiB" or "1.5 MiB"."""
    unit = max(
        (unit for unit in _UNITS.items() if unit[1] <= size and unit[0]), key=lambda unit: unit[1], default=("B", 1)
    )
    return f"{size / unit[1]:.4g} {unit[0]}"


def parse_interval(field: str, value: object) -> int | float:
    """A number of steps as an int, or the seconds of a duration such as "30s", "10min", "1.5h" or "1d" as a float.

    `ConfigError` names `field`.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        seconds = float(match[1]) * _SECONDS[match[2]] if match is not None and match[2] in _SECONDS else 0.0
        if seconds > 0:
            return seconds
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"{field}={value!r} is no interval: give a number of steps from 1, or a duration above 0 with s, min, h or d, such as "
        '"10min"'
    )


def check_choice(field: str, value: object, choices: Any) -> None:
    """`ConfigError` unless `value` is one of the strings of the Literal `choices`."""
    names = get_args(choices)
    if value not in names:
        raise ConfigError(f"{field}={value!r} is not known: use {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")


def check_int(field: str, value: object, low: int, high: int) -> int:
    """`value` as an int. `ConfigError` unless it is an integer from `low` to `high`, both included."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{field}={value!r} is not an integer: give one from {low} to {high}")
    number: int = value.__index__()
    if not low <= number <= high:
        raise ConfigError(f"{field}={value!r} is out of range: give an integer from {low} to {high}")
    return number


def to_float(value: object) -> float | None:
    """`value` as a float if it is a real number, of Python's or NumPy's, else None. What is too great for a float is infinite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_name(field: str, value: object) -> str:
    """`value` if it can name a table or a module: a string of 1 to 200 bytes of UTF-8 without NUL. Else `ConfigError`."""
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
    """A user's `ssd_dir`, and the rules that it is held to."""

    path: str
    checks: SsdPathChecks


@dataclass(frozen=True, kw_only=True)
class TierBudgets:
    """How many bytes of each tier a table, or all tables of a module together, may use on this rank.

    A budget is an int (bytes) or a string such as "8GiB", "64MiB" or "512KiB". It counts rows with their optimizer slots and
    metadata, and their index. The index of the rows on SSD counts in `host_bytes`. The last tier holds every row.

    Args:
        device_bytes: the device tier. On the CPU 0, the default, runs the kernels on the host tier's rows in place, and another
            value makes a device tier of CPU tensors. On other devices it is mandatory.
        host_bytes: the host tier. Mandatory.
        ssd_bytes: the SSD tier, all its files together. It needs `ssd_dir`; without both there is no SSD tier.
        ssd_dir: an existing directory that only this user can write to. A relative path is made absolute at this call.
        path_checks: "trusted" accepts an `ssd_dir` of any owner and mode, and parents that others may write to, as volumes of pods
            have them. Everybody who can write there is trusted.
        reopen: what is done with files of the table that are there already. "resume" goes on from the last flush, "discard" removes
            them, and "auto" goes on from the last flush and starts anew where there is none. The last two also remove what a run
            with another number of ranks left of the table. None: a directory that holds files is refused.
        flush_every: flush the SSD tier while training, after so many steps (an int) or so often ("30s", "10min", "2h"), before the
            next forward. None: only when `flush` or `close` is called. A process that is killed loses what it trained since the
            last flush.
        sizing: measure how the miss ratio depends on the budgets (`CacheTable.miss_ratio_curve`, `advise`), on a sample of the
            ids. It takes at most 8 MiB of RAM for each table, beyond its budgets.

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

    With these a run goes on where the one before stopped, however it stopped.
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
        """`ConfigError` for an SSD tier with one of its two settings, and for what needs an SSD tier where there is none."""
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
        """`device_bytes` as a number."""
        return int(self.device_bytes)

    @property
    def host(self) -> int:
        """`host_bytes` as a number."""
        return int(self.host_bytes)

    def describe(self) -> str:
        """The tiers and their budgets in one line for people, such as "host 256 MiB, ssd 20 GiB in cache"."""
        parts = [("device", self.device, ""), ("host", self.host, ""), ("ssd", self.ssd, f" in {self.ssd_dir}")]
        return ", ".join(f"{tier} {bytes_text(size)}{where}" for tier, size, where in parts if size)

    @property
    def ssd_root(self) -> SsdRoot:
        """`ssd_dir` with the rules that it is held to. There must be an SSD tier."""
        return SsdRoot(str(self.ssd_dir), self.path_checks)

    @property
    def ssd(self) -> int:
        """The bytes of the SSD tier; 0 where there is none."""
        return int(self.ssd_bytes) if self.ssd_dir is not None else 0

    @property
    def flush_interval(self) -> int | float | None:
        """`flush_every` as steps (an int) or seconds (a float)."""
        return None if self.flush_every is None else parse_interval("TierBudgets.flush_every", self.flush_every)


def bucket_range(rank: int, world_size: int, total_num_buckets: int) -> tuple[int, int]:
    """The buckets [begin, end) of `rank`, split as TorchRec splits them.

    Where the shares do not come out even, the first ranks have one more.
    """
    share, rest = divmod(total_num_buckets, world_size)
    begin = rank * share + min(rank, rest)
    return begin, begin + share + (rank < rest)
