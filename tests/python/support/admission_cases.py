"""A reference model of admission counts, and the admission counts of a table, for tests."""

import copy
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from lifecycle_cases import (
    DIM,
    embedding,
    ids_of,
    update,
)
from torchrec_embcache import EmbCacheEmbedding, admission

THRESHOLD = 5


def counting(**settings: Any) -> EmbCacheEmbedding:
    """A table that inserts a row at the fifth occurrence of its id."""
    return embedding(**{"admission": admission.Count(THRESHOLD), **settings})


def batch(step: int) -> list[int]:
    """The ids of a step, some of them frequent. Identical in every process."""
    dice = random.Random(step)
    return [dice.randrange(-25, 25) for _ in range(7)] + [dice.randrange(10**4, 10**4 + 300) for _ in range(6)]


IDS = sorted({row_id for step in range(100) for row_id in batch(step)} | {-(2**63), 2**63 - 1})


def train(table: Any, steps: range) -> None:
    for step in steps:
        update(table(torch.tensor(batch(step))))


class Counted:
    """Reference model: the ids with rows after the steps before `step`, and the counts of pending ids."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: set[int] = set()
        self.counts: Counter[int] = Counter()
        for before in range(step):
            for row_id, occurrences in Counter(batch(before)).items():
                if row_id in self.rows:
                    continue
                self.counts[row_id] += occurrences
                if self.counts[row_id] >= THRESHOLD:
                    self.rows.add(row_id)
                    del self.counts[row_id]

    def check(self, table: EmbCacheEmbedding) -> None:
        """Asserts that a table in RAM has these rows and counts."""
        assert table.stats().step == self.step
        assert set(ids_of(table)) == self.rows
        stats = table.stats().admission
        assert stats is not None
        assert stats.pending == len(self.counts)
        assert counts_of(table, IDS) == self.counts


def counts_of(table: EmbCacheEmbedding, ids: Iterable[int]) -> Counter[int]:
    """The counts of the pending ids among `ids`, in a table in RAM. An id with count c gets its row in step THRESHOLD - c."""
    twin = copy.deepcopy(table)
    found: Counter[int] = Counter()
    before = set(ids_of(twin))
    waiting = torch.tensor(sorted(set(ids) - before))
    for count in reversed(range(THRESHOLD)):
        update(twin(waiting))
        now = set(ids_of(twin))
        found.update({row_id: count for row_id in now - before if count})
        before = now
    assert before >= set(waiting.tolist())
    return found


class Expected:
    """A table that admits every id and is given those alone that a dict of counts admits."""

    def __init__(self, threshold: int, **settings: Any) -> None:
        self.table = embedding(**settings)
        self.threshold = threshold
        self.counts: Counter[int] = Counter()
        self.rows: set[int] = set()

    def read(self, ids: list[int], gets_row: Any) -> torch.Tensor:
        """[n, D]: rows of the ids for which `gets_row`, and zeros for the others."""
        kept = [place for place, each in enumerate(ids) if gets_row(each)]
        out = torch.zeros(len(ids), DIM)
        if kept:
            rows = self.table(torch.tensor([ids[place] for place in kept]))
            out = out.index_put((torch.tensor(kept),), rows)
        else:  # a step all the same
            out = out + self.table(torch.empty(0, dtype=torch.int64)).sum()
        return out

    def train(self, ids: list[int]) -> torch.Tensor:
        here = Counter(ids)
        out = self.read(ids, lambda each: each in self.rows or self.counts[each] + here[each] >= self.threshold)
        update(out)
        for each, occurrences in here.items():
            if each in self.rows or self.counts[each] + occurrences >= self.threshold:
                self.rows.add(each)
                del self.counts[each]
            else:
                self.counts[each] += occurrences
        return out.detach()
