"""A stream of who liked what, day after day, from a world that changes: items are born and die, users come and go.

Each user and each item has hidden factors, which decide who likes what, so that there is something to learn. How often they occur
follows Zipf's law. Both stay for some weeks, and some come back later. Only who is there, or will come back, is in memory: samples
are drawn a day at a time, and those who have left for ever are forgotten.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Day", "Drift", "mixed"]

FACTORS: Final = 4  # K
# The exponent of Zipf's law by which users and items occur.
EXPONENT: Final = 0.9
# How much hidden factors, and what somebody likes or is liked for anyway, count in the log odds.
OF_FACTORS: Final = 1.3
OF_BIAS: Final = 0.7


@dataclass(frozen=True)
class Day:
    """The S samples of a day: ids int64 [S, 2] of a user and an item, labels float32 [S], and the chances float64 [S] of a label of
    1, which no model is told.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    chances: NDArray[np.float64]


def mixed(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """A different id for each number, over all of int64, by the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = numbers.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


@dataclass(frozen=True)
class Habits:
    """How many arrive a day, for how many days they stay, what share of them comes back, and after how many days. The numbers of
    days are averages.
    """

    arrivals: float
    stay: float
    returning: float
    away: float


class Population:
    """Users, or items: those who are there, and those who are away and will come back."""

    def __init__(self, random: np.random.Generator, habits: Habits, kind: int) -> None:
        self._random = random
        self._habits = habits
        self._kind = kind
        self.ever = 0
        self._until = np.zeros(0)  # the day on which each one leaves, or comes back
        self._is_here = np.zeros(0, bool)
        self._weight = np.zeros(0)  # how often each one occurs
        self.ids = np.zeros(0, np.int64)
        self.factors = np.zeros((0, FACTORS), np.float32)
        self.bias = np.zeros(0, np.float32)

    def begin_day(self, day: int) -> None:
        """Let those leave, come back and arrive whose day it is."""
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
        """Positions [count] of those who occur, each one who is here as often as its weight says."""
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
        # By this power of a uniform number the weights, ranked, follow Zipf's law.
        self._weight = np.concatenate([self._weight, (1 - random.random(count)) ** -EXPONENT])
        self.factors = np.concatenate([self.factors, random.standard_normal((count, FACTORS), np.float32)])
        self.bias = np.concatenate([self.bias, random.standard_normal(count, np.float32)])


class Drift:
    """The stream. With the same seed it is the same, day by day.

    At `scale` 1 a day has 100,000 samples, 750 new users and 375 new items. All three grow with `scale`.
    """

    def __init__(self, scale: float, seed: int) -> None:
        seeds = np.random.SeedSequence(seed).spawn(3)
        self._random, users, items = (np.random.default_rng(each) for each in seeds)
        self.samples = max(1000, int(100_000 * scale))
        self._users = Population(users, Habits(750 * scale, stay=30, returning=0.5, away=45), kind=0)
        self._items = Population(items, Habits(375 * scale, stay=30, returning=0.2, away=60), kind=1)
        # The world is older than the stream, so that on its first day as many leave as come.
        self._day = -250
        while self._day < 0:
            self._begin_day()

    @property
    def ever(self) -> int:
        """Users and items who have been there so far, drawn or not."""
        return self._users.ever + self._items.ever

    def _begin_day(self) -> None:
        for population in (self._users, self._items):
            population.begin_day(self._day)
        self._day += 1

    def next_day(self) -> Day:
        """The samples of the next day."""
        self._begin_day()
        users, items = self._users, self._items
        user, item = users.draw(self.samples), items.draw(self.samples)
        common = np.einsum("sk,sk->s", users.factors[user], items.factors[item], dtype=np.float64)
        odds = OF_FACTORS * common + OF_BIAS * (users.bias[user] + items.bias[item])
        chances = 1 / (1 + np.exp(-odds))
        labels = (self._random.random(self.samples) < chances).astype(np.float32)
        return Day(np.stack([users.ids[user], items.ids[item]], axis=1), labels, chances)
