"""Admission rules: which ids get a row during training.

Without a rule every id is admitted. With a rule, an id that is not admitted has no row in any tier and costs at most a few bytes
for its count. Admission is decided per batch in the forward, from previously committed batches. The same ids are therefore admitted
for any budgets, any number of ranks and threads, and any prefetch depth.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from . import _native
from .config import check_int, parse_bytes
from .exceptions import ConfigError

__all__ = ["Admission", "Count", "NotAdmitted", "Probability", "ReadOnly", "ShowClick", "check_not_admitted"]

NotAdmitted = Literal["zeros", "initial", "oov"] | float
_NAMES_NOT_ADMITTED: tuple[Literal["zeros", "initial", "oov"], ...] = ("zeros", "initial", "oov")

_MAX_COUNT = (1 << 24) - 1
_MAX_WINDOW_STEPS = 1 << 53


class Admission(ABC):
    """Base class of the admission rules, the values of a table's `admission=`.

    Examples:
        >>> from torchrec_embcache import admission
        >>> isinstance(admission.Count(5), admission.Admission)
        True
    """

    @abstractmethod
    def native(self) -> _native.RowAdmission:
        """Returns the native form."""


def _check_window_steps(rule: str, steps: object) -> int | None:
    return None if steps is None else check_int(f"{rule}.window_steps", steps, 1, _MAX_WINDOW_STEPS)


def _check_memory(rule: str, memory: int | str) -> int:
    size = parse_bytes(f"{rule}.memory", memory)
    if size == 0:
        raise ConfigError(f'{rule}.memory={memory!r}: give the counts some bytes, such as "64MiB"')
    return size


def _check_number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{field}={value!r} is not a finite number: give one")
    return float(value)


@dataclass(frozen=True)
class Count(Admission):
    """Admits an id in the training batch in which its occurrences reach `threshold`. That batch trains the new row.

    Occurrences are counted when the backward commits them. Evaluation lookups, and forwards without a backward, do not count. The
    count of an id restarts at 0 after its row is removed.

    Args:
        threshold: from 1 to 2^24 - 1.
        window_steps: forgets an id that did not occur for one to two windows of this many steps. None: no time limit.
        memory: RAM for the counts of the entire table, all shards together: an int (bytes) or a string such as "256MiB". An id uses
            17 bytes of it. When it is full, the least recently seen ids are forgotten, half a bucket at a time.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> from torchrec_embcache import admission
        >>> admission.Count(5, window_steps=100_000)
        Count(threshold=5, window_steps=100000, memory='256MiB')
    """

    threshold: int
    window_steps: int | None = None
    memory: int | str = "256MiB"

    def __post_init__(self) -> None:
        check_int("Count.threshold", self.threshold, 1, _MAX_COUNT)
        _check_window_steps("Count", self.window_steps)
        _check_memory("Count", self.memory)

    def native(self) -> _native.RowAdmission:
        """Returns the native form."""
        memory = _check_memory("Count", self.memory)
        return _native.RowAdmission.count(self.threshold, window_steps=self.window_steps, memory=memory)


@dataclass(frozen=True)
class Probability(Admission):
    """Admits an id with probability `p` at each occurrence without a row.

    The draw is a counter-based random function of (seed, table key, id, step). It is therefore the same on every machine and for
    any number of ranks. An id that occurs n times in a batch is admitted with probability 1 - (1 - p)^n. No counts are kept.

    Args:
        p: more than 0, at most 1.

    Raises:
        ConfigError: `p` is out of range.

    Examples:
        >>> from torchrec_embcache import admission
        >>> admission.Probability(0.1)
        Probability(p=0.1)
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < _check_number("Probability.p", self.p) <= 1:
            raise ConfigError(f"Probability.p={self.p!r} is out of range: give more than 0 and at most 1")

    def native(self) -> _native.RowAdmission:
        """Returns the native form."""
        return _native.RowAdmission.probability(float(self.p))


@dataclass(frozen=True)
class ShowClick(Admission):
    """Admits an id when `alpha * shows + beta * clicks` reaches `threshold`, both summed over training batches.

    A show is an occurrence. The clicks of each occurrence are passed as the weights of the `KeyedJaggedTensor`, or as `clicks` of
    the plain modules: integers from 0. Lookups of such a table are therefore unweighted.

    Args:
        alpha: the weight of a show, 0 or more.
        beta: the weight of a click, 0 or more. At least one of `alpha` and `beta` is above 0.
        threshold: 0 or more.
        window_steps: as in `Count`.
        memory: as in `Count`. An id with clicks uses two counts.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> from torchrec_embcache import admission
        >>> admission.ShowClick(alpha=0.1, beta=1.0, threshold=2.0).threshold
        2.0
    """

    alpha: float
    beta: float
    threshold: float
    window_steps: int | None = None
    memory: int | str = "256MiB"

    def __post_init__(self) -> None:
        for field in ("alpha", "beta", "threshold"):
            if _check_number(f"ShowClick.{field}", getattr(self, field)) < 0:
                raise ConfigError(f"ShowClick.{field}={getattr(self, field)!r} is out of range: give 0 or more")
        if self.alpha == self.beta == 0 and self.threshold > 0:
            raise ConfigError("ShowClick(alpha=0, beta=0) admits no id: give a weight, or use ReadOnly()")
        _check_window_steps("ShowClick", self.window_steps)
        _check_memory("ShowClick", self.memory)

    def native(self) -> _native.RowAdmission:
        """Returns the native form."""
        return _native.RowAdmission.show_click(
            alpha=float(self.alpha),
            beta=float(self.beta),
            threshold=float(self.threshold),
            window_steps=self.window_steps,
            memory=_check_memory("ShowClick", self.memory),
        )


@dataclass(frozen=True)
class ReadOnly(Admission):
    """Admits no ids. Rows that were imported or loaded are still trained.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, optimizers
        >>> item = EmbCacheEmbedding(
        ...     name="item", embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5),
        ...     admission=admission.ReadOnly(),
        ... )
        >>> item.import_rows([7], [[1.0, 2.0]])
        >>> item(torch.tensor([7, 8])).sum().backward()
        >>> len(item), item.read_rows([7]).weights
        (1, tensor([[0.5000, 1.5000]]))
    """

    def native(self) -> _native.RowAdmission:
        """Returns the native form."""
        return _native.RowAdmission.no_new_rows()


def check_not_admitted(field: str, value: object) -> NotAdmitted:
    """Validates `not_admitted`. Raises `ConfigError`, which names `field`."""
    for name in _NAMES_NOT_ADMITTED:
        if value == name:
            return name
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 3.4028234663852886e38:
        raise ConfigError(f'{field}={value!r} is not known: use "zeros", "initial", "oov" or a finite float32')
    return float(value)
