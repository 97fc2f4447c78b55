"""A stream of users' likes of items, day by day, from a changing world: users and items arrive, leave, and sometimes return.

Each user and item has hidden factors, which determine the likes, so that there is something to learn. Their frequencies follow
Zipf's law. Both stay for some weeks, and some return later. Only those that are present or will return are in memory: samples are
drawn day by day, and those that left permanently are dropped.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Day", "Drift", "mixed"]

FACTORS: Final = 4  # K
# The exponent of Zipf's law for users and items.
EXPONENT: Final = 0.9
# Weights in the log odds of the hidden factors, and of the biases of users and items.
OF_FACTORS: Final = 1.3
OF_BIAS: Final = 0.7


@dataclass(frozen=True)
class Day:
    """The S samples of a day: ids int64 [S, 2] of a user and an item, labels float32 [S], and the probabilities float64 [S] of a
    label of 1, which are hidden from models.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    chances: NDArray[np.float64]


def mixed(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Maps numbers to distinct ids over all of int64, by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = numbers.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


@dataclass(frozen=True)
class Habits:
    """Arrivals per day, mean stay in days, the fraction that returns, and the mean absence in days."""

    arrivals: float
    stay: float
    returning: float
    away: float


class Population:
    """Users, or items: those that are present, and those that are away and will return."""

    def __init__(self, random: np.random.Generator, habits: Habits, kind: int) -> None:
        self._random = random
        self._habits = habits
        self._kind = kind
        self.ever = 0
        self._until = np.zeros(0)  # the day on which each one leaves or returns
        self._is_here = np.zeros(0, bool)
        self._weight = np.zeros(0)  # the frequency of each one
        self.ids = np.zeros(0, np.int64)
        self.factors = np.zeros((0, FACTORS), np.float32)
        self.bias = np.zeros(0, np.float32)

    def begin_day(self, day: int) -> None:
        """Applies the departures, returns and arrivals of the day."""
        random, habits = self._random, self._habits
        ends = self._until <= day
        leaving, waking = ends & self._is_here, ends & ~self._is_here
        comes_back = random.random(len(ends)) < habits.returning
        stay = random.exponential(habits.stay, len(ends))
        away = random.exponential(habits.away, len(ends))
        self._until = np.where(waking, day + stay, np.where(leaving, day + away, self._until))
        self._is_here = np.where(waking, True, np.where(leaving, False, self._is_here))
        self._keep(~leaving | comes_back)
        self._arrive(day, int(random.poisson(habits.arrivals)))

    def draw(self, count: int) -> NDArray[np.int64]:
        """Draws positions [count] of those that are present, in proportion to their weights."""
        here = np.flatnonzero(self._is_here)
        cumulative = np.cumsum(self._weight[here])
        drawn = np.searchsorted(cumulative, self._random.random(count) * cumulative[-1], side="right")
        return np.asarray(here[drawn])

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self._until, self._is_here, self._weight = self._until[kept], self._is_here[kept], self._weight[kept]
        self.ids, self.factors, self.bias = self.ids[kept], self.factors[kept], self.bias[kept]

    def _arrive(self, day: int, count: int) -> None:
        random = self._random
        numbers = np.arange(self.ever, self.ever + count, dtype=np.int64)
        self.ever += count
        self.ids = np.concatenate([self.ids, mixed(numbers * 2 + self._kind)])
        self._until = np.concatenate([self._until, day + random.exponential(self._habits.stay, count)])
        self._is_here = np.concatenate([self._is_here, np.ones(count, bool)])
        # With this power of a uniform number, the ranked weights follow Zipf's law.
        self._weight = np.concatenate([self._weight, (1 - random.random(count)) ** -EXPONENT])
        self.factors = np.concatenate([self.factors, random.standard_normal((count, FACTORS), np.float32)])
        self.bias = np.concatenate([self.bias, random.standard_normal(count, np.float32)])


class Drift:
    """The stream. It is deterministic for a seed.

    At `scale` 1 a day has 100,000 samples, 750 new users and 375 new items. All three grow with `scale`.
    """

    def __init__(self, scale: float, seed: int) -> None:
        seeds = np.random.SeedSequence(seed).spawn(3)
        self._random, users, items = (np.random.default_rng(each) for each in seeds)
        self.samples = max(1000, int(100_000 * scale))
        self._users = Population(users, Habits(750 * scale, stay=30, returning=0.5, away=45), kind=0)
        self._items = Population(items, Habits(375 * scale, stay=30, returning=0.2, away=60), kind=1)
        # The world starts before the stream, so that departures and arrivals are balanced on its first day.
        self._day = -250
        while self._day < 0:
            self._begin_day()

    @property
    def ever(self) -> int:
        """Number of users and items that have ever been present, drawn or not."""
        return self._users.ever + self._items.ever

    def _begin_day(self) -> None:
        for population in (self._users, self._items):
            population.begin_day(self._day)
        self._day += 1

    def next_day(self) -> Day:
        """Returns the samples of the next day."""
        self._begin_day()
        users, items = self._users, self._items
        user, item = users.draw(self.samples), items.draw(self.samples)
        common = np.einsum("sk,sk->s", users.factors[user], items.factors[item], dtype=np.float64)
        odds = OF_FACTORS * common + OF_BIAS * (users.bias[user] + items.bias[item])
        chances = 1 / (1 + np.exp(-odds))
        labels = (self._random.random(self.samples) < chances).astype(np.float32)
        return Day(np.stack([users.ids[user], items.ids[item]], axis=1), labels, chances)
