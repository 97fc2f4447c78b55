"""A run of 2,000 steps of a model with admission and eviction, and a reference dict of its rows after each step.

All weights are small multiples of a half, so that every sum of them is exact in any order, for any number of ranks.
"""

import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from lifecycle_cases import decayed, taken
from tables import ssd_tiers
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    RowMetadata,
    TierBudgets,
    admission,
    cache_modules,
    evict,
    eviction,
    flush,
    initializers,
)
from torchrec_embcache.checkpoint import Saver, SaveReport
from torchrec_models import sharded

STEPS, DIM, SAMPLES, THRESHOLD, HALF_LIFE = 2000, 4, 6, 3, 64
INITIAL, LEARNING_RATE = np.float32(1.0), np.float32(0.5)
POLICIES = {
    "old": eviction.Policy([eviction.Ttl(steps=240)], every_steps=40),
    "seldom": eviction.Policy([eviction.All([eviction.Ttl(steps=30), eviction.Score(below=1.5)])]),
}
# Many rows are imported after one step, and evicted together by a later sweep, which lasts several batches.
IMPORTED, IMPORTED_AT = range(10**9, 10**9 + 30_000), 1000
# One step after that sweep.
KILLED_AT = 1241


def batch(step: int) -> tuple[dict[str, list[list[int]]], list[int]]:
    """The ids of each table's feature, and the gradient, for each sample of a step. Identical in every process."""
    dice = random.Random(step)
    pools = [
        lambda: dice.randrange(6),
        lambda: step // 5 + dice.randrange(100, 160),
        lambda: dice.randrange(10**4, 10**4 + 1500),
        lambda: dice.randrange(-(2**63), -(2**62)),
    ]
    weights = [3, 5, 3, 1]
    ids = {
        table: [[dice.choices(pools, weights)[0]() for _ in range(dice.randrange(5))] for _ in range(SAMPLES)]
        for table in POLICIES
    }
    return ids, [dice.choice([-2, -1, 1, 2]) for _ in range(SAMPLES)]


def after(step: int) -> list[str]:
    """The operations after a step, in order."""
    done = {
        "import": step == IMPORTED_AT,
        "evict": step % 170 == 0,
        "flush": step % 110 == 0,
        "wait": step % 300 == 7,
        "save": step in (150, 900),
        "delta": step % 300 == 150 and step != 150,
        "async delta": step % 300 == 0 and step not in (900, STEPS),
    }
    return [what for what, is_now in done.items() if is_now]


# ---- the reference


class Table:
    """The rows of one table and the counts of its pending ids."""

    def __init__(self, policy: eviction.Policy, half_life: int = HALF_LIFE) -> None:
        self.policy, self.half_life = policy, half_life
        self.rows: dict[int, dict[str, Any]] = {}
        self.counts: Counter[int] = Counter()
        self.evicted = 0
        self._as_swept = False

    def read(self, samples: list[list[int]]) -> list[float]:
        """The value that each sample reads in every column, without inserting rows."""
        return [sum(float(self.rows[i]["weights"][0]) for i in ids if i in self.rows) for ids in samples]

    def train(self, step: int, samples: list[list[int]], gradients: list[int]) -> list[float]:
        """Does a step. Returns the value that each sample reads in every column."""
        occurrences = Counter(row_id for ids in samples for row_id in ids)
        for row_id, count in occurrences.items():
            if row_id not in self.rows:
                self.counts[row_id] += count
                if self.counts[row_id] >= THRESHOLD:
                    del self.counts[row_id]
                    self.rows[row_id] = {"weights": [INITIAL] * DIM, "count": 0, "last_step": 0, "score": 0.0}
        read = self.read(samples)
        for row_id, count in occurrences.items():
            if row_id in self.rows:
                row = self.rows[row_id]
                gradient = sum(gradient * ids.count(row_id) for ids, gradient in zip(samples, gradients, strict=True))
                row["weights"] = [row["weights"][0] - LEARNING_RATE * np.float32(gradient)] * DIM
                row["score"] = float(np.float32(decayed(row["score"], row["last_step"], step, self.half_life) + count))
                row["count"], row["last_step"] = row["count"] + count, step
        self._as_swept = False
        return read

    def sweep(self, step: int) -> None:
        dead = taken(self.policy, self.rows, step, shared=self._as_swept, half_life=self.half_life)
        self._as_swept = True
        self.evicted += len(dead)
        for row_id in dead:
            del self.rows[row_id]


class Expected:
    """The tables of one uninterrupted rank, as reference."""

    def __init__(self, step: int = 0) -> None:
        """Creates the tables as they are after a step and its operations."""
        self.tables = {name: Table(policy) for name, policy in POLICIES.items()}
        self.step = 0
        while self.step < step:
            self.train()
            self.after()

    def train(self) -> list[float]:
        """Does the next step. Returns the sum that each sample reads from both tables."""
        self.step += 1
        ids, gradients = batch(self.step)
        read = [table.train(self.step, ids[name], gradients) for name, table in self.tables.items()]
        for table in self.tables.values():
            if table.policy.every_steps is not None and self.step % table.policy.every_steps == 0:
                table.sweep(self.step)
        return [sum(of_tables) for of_tables in zip(*read, strict=True)]

    def after(self) -> None:
        """Does the operations after the step that add or evict rows."""
        for what in after(self.step):
            if what == "import":
                new = {"weights": [np.float32(2)] * DIM, "count": 3, "last_step": self.step, "score": 5.0}
                self.tables["old"].rows.update({row_id: dict(new) for row_id in IMPORTED})
            for table in self.tables.values():
                if what == "evict" or (what in ("save", "delta", "async delta") and table.policy.at_saves):
                    table.sweep(self.step)

    def rows(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        """Every row, in the form of `rows_of`."""
        return {
            (name, row_id): (row["weights"], row["count"], row["last_step"], row["score"])
            for name, table in self.tables.items()
            for row_id, row in table.rows.items()
        }


# ---- the model


class Model(nn.Module):
    """Two tables. With a folder most rows are on SSD; without one they are in RAM, and eviction is off."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()

        def config(name: str, host_bytes: str) -> EmbCacheEmbeddingBagConfig:
            tiers = TierBudgets(host_bytes="16MiB")
            if folder is not None:
                tiers = ssd_tiers(folder, host_bytes=host_bytes, ssd_bytes="16MiB")
            return EmbCacheEmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=10**9,
                total_num_buckets=12,
                feature_names=[name],
                initializer=initializers.Constant(float(INITIAL)),
                admission=admission.Count(THRESHOLD),
                eviction=None if folder is None else POLICIES[name],
                score_half_life_steps=HALF_LIFE,
                tiers=tiers,
            )

        self.bags = EmbCacheEmbeddingBagCollection([config("old", "256KiB"), config("seldom", "4KiB")], name="bags")

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(features)
        return torch.cat([pooled[name] for name in POLICIES], 1)


def features_of(ids: dict[str, list[list[int]]], keys: Iterable[str] = POLICIES) -> KeyedJaggedTensor:
    keys = list(keys)
    samples = [sample for name in keys for sample in ids[name]]
    return KeyedJaggedTensor(
        keys,
        torch.tensor([row_id for sample in samples for row_id in sample], dtype=torch.int64),
        lengths=torch.tensor([len(sample) for sample in samples], dtype=torch.int32),
    )


class Run:
    """One of several ranks, which does the steps and compares its outputs with the reference."""

    def __init__(self, rank: int, world: int, folder: Path, place: str) -> None:
        self.rank, self.world, self.saved = rank, world, folder / "saved"
        shardings = dict.fromkeys(POLICIES, "row_wise")
        self.model = sharded(Model(folder / place), shardings, {"learning_rate": float(LEARNING_RATE)})
        (module,) = cache_modules(self.model).values()
        self.tables = module.tables
        self.expected = Expected()
        self.saves: list[str] = []
        self._beside: Future[SaveReport] | None = None

    def load(self) -> None:
        """Loads the latest checkpoint."""
        Saver().load(self.model, self.saved)
        (step,) = {table.stats().step for table in self.tables.values()}
        self.expected = Expected(step)

    def train(self) -> None:
        """Does a step."""
        expected = self.expected.train()
        ids, gradients = batch(self.expected.step)
        share = SAMPLES // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        out = self.model(features_of({name: samples[mine] for name, samples in ids.items()}))
        read = out[:, 0] + out[:, DIM]
        assert read.tolist() == expected[mine], self.expected.step
        # A backward of several ranks divides by their number.
        (out.sum(1) * torch.tensor(gradients[mine]) * self.world).sum().backward()

    def after(self) -> None:
        """Does the operations after the step."""
        for what in after(self.expected.step):
            if what == "import":
                mine = torch.tensor(IMPORTED[self.rank :: self.world])
                self.tables["old"].import_rows(
                    mine, torch.full((len(mine), DIM), 2.0), None, self._used(len(mine)), collective=True
                )
            elif what == "evict":
                evict(self.model)
            elif what == "flush":
                flush(self.model)
            elif what == "wait":
                self.wait()
            elif what == "async delta":
                self._beside = Saver().save_async(self.model, self.saved, incremental=True)
            else:
                report = Saver().save(self.model, self.saved, incremental=what == "delta")
                self.saves.append(report.kind)
        self.expected.after()

    def wait(self) -> None:
        """Waits for the asynchronous save."""
        if self._beside is not None:
            self.saves.append(f"{self._beside.result().kind} beside")
            self._beside = None

    def _used(self, count: int) -> RowMetadata:
        def same(value: int) -> torch.Tensor:
            return torch.full((count,), value)

        return RowMetadata(same(3), same(self.expected.step), same(5).float(), same(0))


def rows_of(tables: Any) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Every row of this rank by (table, id): weights, count, last step and score."""
    found: dict[tuple[str, int], tuple[Any, ...]] = {}
    for name, table in tables.items():
        for chunk in table.export():
            meta = chunk.metadata
            columns = (chunk.ids, chunk.weights, meta.count, meta.last_step, meta.score)
            for row_id, *values in zip(*(column.tolist() for column in columns), strict=True):
                assert (name, row_id) not in found, "a row is exported twice"
                found[name, row_id] = tuple(values)
    return found


def counts_of(model: Model, waiting: dict[str, list[int]]) -> dict[str, Counter[int]]:
    """The counts of pending ids by table, in a model in RAM. An id with count c gets its row in step THRESHOLD - c."""
    (module,) = cache_modules(model).values()
    found: dict[str, Counter[int]] = {name: Counter() for name in waiting}
    before = set(rows_of(module.tables))
    for count in reversed(range(THRESHOLD)):
        model(features_of({name: [ids] for name, ids in waiting.items()})).sum().backward()
        now = set(rows_of(module.tables))
        for name, row_id in now - before:
            found[name][row_id] = count
        before = now
    return found
