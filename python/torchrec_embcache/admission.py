"""Which ids get a row when they are trained.

Without admission every id does. With it an id that is not admitted has no row in any tier, and costs at most some bytes for its
count. It is decided for each batch when it is forwarded, by what was committed before. So the same ids are
admitted whatever the budgets, the number of ranks and threads, and however far ahead batches are prefetched.
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

_MAX_COUNT = (1 << 24) - 1
_MAX_WINDOW_STEPS = 1 << 53


class Admission(ABC):
    """Base of the rules of admission: what `admission=` of a table takes.

    Examples:
        >>> from torchrec_embcache import admission
        >>> isinstance(admission.Count(5), admission.Admission)
        True
    """

    @abstractmethod
    def native(self) -> _native.RowAdmission:
        """As the core takes it."""


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
    """An id gets a row in the batch in which its occurrences in training reach `threshold`. That batch trains it.

    Occurrences are counted when the backward commits them. Those of evaluations, and of forwards that no backward follows, do not
    count. An id that had a row and lost it starts at 0.

    Args:
        threshold: from 1 to 2^24 - 1.
        window_steps: an id that did not occur for one to two windows of so many steps is forgotten. None: never for that.
        memory: RAM for the counts of the whole table, all its shards together: an int (bytes) or a string such as "256MiB". An id
            counts as 17 bytes of it. When they are full, ids that did not occur for long are forgotten, half a bucket at once.

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
        """As the core takes it."""
        memory = _check_memory("Count", self.memory)
        return _native.RowAdmission.count(self.threshold, window_steps=self.window_steps, memory=memory)


@dataclass(frozen=True)
class Probability(Admission):
    """Each occurrence of an id that has no row gives it one with probability `p`.

    The throw is a counter-based random function of (seed, table key, id, step), so it is the same on every machine and for any
    number of ranks. An id that occurs n times in a batch is admitted with probability 1 - (1 - p)^n. Nothing is counted.

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
        """As the core takes it."""
        return _native.RowAdmission.probability(float(self.p))


@dataclass(frozen=True)
class ShowClick(Admission):
    """An id gets a row when `alpha * shows + beta * clicks` reaches `threshold`, both summed over training batches.

    A show is an occurrence. The clicks of an occurrence ride in the weights of the `KeyedJaggedTensor`, or in `clicks` of the plain
    modules: integers from 0. So the lookups of the table are not weighted.

    Args:
        alpha: the weight of a show, 0 or more.
        beta: the weight of a click, 0 or more. Not both are 0.
        threshold: 0 or more.
        window_steps: as for `Count`.
        memory: as for `Count`. An id with clicks takes two counts.

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
        """As the core takes it."""
        return _native.RowAdmission.show_click(
            alpha=float(self.alpha),
            beta=float(self.beta),
            threshold=float(self.threshold),
            window_steps=self.window_steps,
            memory=_check_memory("ShowClick", self.memory),
        )


@dataclass(frozen=True)
class ReadOnly(Admission):
    """No id gets a row. Rows that the table has, imported or loaded ones, are trained.

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
        """As the core takes it."""
        return _native.RowAdmission.no_new_rows()


def check_not_admitted(field: str, value: object) -> NotAdmitted:
    """`value` if it says what ids read that are not admitted. Else `ConfigError`, which names `field`."""
    if value == "zeros":
        return "zeros"
    if value == "initial":
        return "initial"
    if value == "oov":
        return "oov"
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 3.4028234663852886e38:
        raise ConfigError(f'{field}={value!r} is not known: use "zeros", "initial", "oov" or a finite float32')
    return float(value)
