"""Helpers of the admission and eviction tests: a small table, its budgets, a model of eviction, and every way to save."""

import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import dcp_cases
from tables import Contents, ssd_tiers
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, initializers, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import All, Keep, Policy, Score, Share, Ttl
from torchrec_embcache.serialize import BlockLoader, BlockSaver

DIM = 4
TIERS = TierBudgets(host_bytes="4MiB")
HALF_LIFE = 3
# Methods to save and load a table. "blocks" is another one; Megatron and Lightning use `Saver`.
DOORS = ["full", "delta", "async", "async delta", "linked", "dcp", "compact"]


def embedding(**settings: Any) -> EmbCacheEmbedding:
    """A small table. Every setting can be overridden."""
    defaults = {
        "name": "item",
        "embedding_dim": DIM,
        "tiers": TIERS,
        "optimizer": optimizers.RowWiseAdagrad(lr=0.1),
        "initializer": initializers.Uniform(-0.5, 0.5),
        "seed": 7,
    }
    return EmbCacheEmbedding(**{**defaults, **settings})


def budgets(tiers: str, folder: Path) -> TierBudgets:
    """Budgets for tables of a few hundred rows: all in RAM, most of them on SSD, or with a device tier of CPU tensors."""
    if tiers == "ssd":
        return ssd_tiers(folder, host_bytes="4KiB", ssd_bytes="64MiB")
    return {"ram": TIERS, "device": TierBudgets(host_bytes="1MiB", device_bytes="16KiB")}[tiers]


def update(out: torch.Tensor) -> None:
    """Does a training step from the forward's result."""
    (out * out + out).sum().backward()


def random_ids(dice: random.Random, count: int) -> list[int]:
    """Ids of which some are frequent and most occur once."""
    return [dice.randrange(6) if dice.random() < 0.3 else dice.randrange(-(2**63), 2**63) for _ in range(count)]


def ids_of(table: Any) -> list[int]:
    return [row_id for chunk in table.export() for row_id in chunk.ids.tolist()]


def features(ids: list[int], clicks: list[float] | None) -> KeyedJaggedTensor:
    weights = None if clicks is None else torch.tensor(clicks)
    return KeyedJaggedTensor(["f"], torch.tensor(ids), weights=weights, lengths=torch.tensor([len(ids)]))


class Ahead:
    """Prefetches the batches of a program, `lookahead` batches before each is trained."""

    def __init__(self, table: EmbCacheEmbedding, steps: list[list[int]], lookahead: int) -> None:
        self._table, self._steps, self._lookahead = table, steps, lookahead
        self._next = 0

    def of(self, place: int) -> None:
        """Prefetches the batches that are due before the step at this position."""
        if self._lookahead and place + self._lookahead < len(self._steps):
            for ahead in range(self._next, place + self._lookahead + 1):
                self._table.prefetch(torch.tensor(self._steps[ahead]))
            self._next = place + self._lookahead + 1

    def forget(self, place: int) -> None:
        """Drops the prefetched batches, as before a forward of other ids than those of the step at this position."""
        self._table._group.drop_prefetched()
        self._next = place


def save_by(door: str, model: nn.Module, path: Path) -> Any:
    """Saves `model` to `path` by one of `DOORS`, or by "blocks".

    Returns the future of an asynchronous save, for which the caller waits.
    "delta" and "compact" require an earlier save in `path`.
    """
    saver = Saver(0)
    if door == "dcp":
        dcp_cases.save(dcp_cases.dense_state(1), path, model)
    elif door == "blocks":
        BlockSaver(path=str(path), hashtables={"item": model}).save()
    elif door.startswith("async"):
        return saver.save_async(model, path, incremental=door == "async delta")
    else:
        report = saver.save(model, path, incremental=door in ("delta", "compact"), linked=door == "linked")
        assert report.kind == (door if door in ("full", "linked") else "delta")
        if door == "compact":
            saver.compact(path)
    return None


def load_by(door: str, model: nn.Module, path: Path) -> None:
    """Loads a save of `save_by`."""
    if door == "dcp":
        dcp_cases.load(dcp_cases.blank(dcp_cases.dense_state()), path, model)
    elif door == "blocks":
        BlockLoader(str(path), hashtables={"item": model}).load()
    else:
        Saver(0).load(model, path)


# ---- a model of eviction: the documented rules, row by row


def factor(parts: int) -> float:
    """2^(-parts / 1024) in float64, from roots and products in the documented order."""
    product, root = 1.0, 0.5
    for bit in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        root = root**0.5
        if parts & bit:
            product *= root
    return product


def decayed(score: float, last_step: int, step: int, half_life: int) -> float:
    """A score at `step`, as float32."""

    def point(at: int) -> int:
        return at // half_life * 1024 + at % half_life * 1024 // half_life

    parts = point(step) - point(last_step)
    return float(np.float32(score * (factor(parts % 1024) * 2.0 ** -(parts // 1024))))


def takes(rule: eviction.Rule, row: dict[str, Any], step: int, half_life: int = HALF_LIFE) -> bool:
    """True if a sweep after `step` evicts a row by this rule."""
    if isinstance(rule, All):
        return all(takes(each, row, step, half_life) for each in rule.rules)
    if isinstance(rule, Ttl):
        return row["last_step"] <= step - rule.steps
    if isinstance(rule, Score):
        return decayed(row["score"], row["last_step"], step, half_life) < np.float32(rule.below)
    return sum(float(weight) ** 2 for weight in row["weights"]) < rule.below**2


def lowest_first(rows: dict[int, dict[str, Any]], step: int, half_life: int = HALF_LIFE) -> list[int]:
    """The ids in eviction order."""

    def key(row_id: int) -> tuple[float, int, int]:
        score, last_step = rows[row_id]["score"], rows[row_id]["last_step"]
        return decayed(score, last_step, step, half_life), last_step, row_id % (1 << 64)

    return sorted(rows, key=key)


def taken(
    policy: Policy, rows: dict[int, dict[str, Any]], step: int, *, shared: bool = False, half_life: int = HALF_LIFE
) -> set[int]:
    """The ids that a sweep after `step` evicts. If `shared`, an earlier sweep of exactly these rows has evicted its `Share`."""
    order = lowest_first(rows, step, half_life)

    def by(rule: eviction.Rule) -> set[int]:
        if isinstance(rule, All):
            return set.intersection(*(by(each) for each in rule.rules))
        if isinstance(rule, Keep):
            return set(order[: max(0, len(order) - rule.rows)])
        if isinstance(rule, Share):
            return set(order[: 0 if shared else math.floor(Fraction(rule.fraction) * len(order))])
        return {row_id for row_id, row in rows.items() if takes(rule, row, step, half_life)}

    spared = set(order[max(0, len(order) - policy.at_least_rows) :])
    return set.union(*(by(rule) for rule in policy.rules)) - spared


class Expected:
    """A table without eviction, from which the rows that the model evicts are removed."""

    def __init__(self, policy: Policy, **settings: Any) -> None:
        self.policy = policy
        self.table = embedding(score_half_life_steps=HALF_LIFE, **settings)
        self.evicted = 0
        self._as_swept: int | None = None

    def sweep(self) -> None:
        step, rows = self.table.stats().step, {}
        for chunk in self.table.export():
            for place, row_id in enumerate(chunk.ids.tolist()):
                rows[row_id] = {
                    "last_step": int(chunk.metadata.last_step[place]),
                    "score": float(chunk.metadata.score[place]),
                    "weights": chunk.weights[place].tolist(),
                }
        native = self.table.table._native_table
        dead = taken(self.policy, rows, step, shared=native.version() == self._as_swept)
        self.evicted += len(dead)
        self.table.remove_rows(list(dead))
        self._as_swept = native.version()

    def train(self, ids: list[int]) -> torch.Tensor:
        out = self.table(torch.tensor(ids))
        update(out)
        every = self.policy.every_steps
        if every is not None and self.table.stats().step % every == 0:
            self.sweep()
        return out.detach()

    def read(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.table(torch.tensor(ids))

    def is_same(self, table: EmbCacheEmbedding) -> bool:
        """True if the rows are bitwise identical. Finishes a sweep in progress."""
        return Contents.of(table) == Contents.of(self.table) and len(table) == len(self.table)


def come_again(dice: random.Random, count: int) -> list[int]:
    """Ids of which some are frequent, some occur again after a while, and some occur once."""
    pools = [lambda: dice.randrange(6), lambda: dice.randrange(6, 90), lambda: dice.randrange(-(2**63), 2**63)]
    return [dice.choice(pools)() for _ in range(count)]
