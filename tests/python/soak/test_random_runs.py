"""Random runs on one to four ranks, one after the other, with different budgets and lookahead. Their rows equal those of a dict."""

import copy
import gc
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lifecycle_cases import HALF_LIFE, budgets
from long_run import DIM, INITIAL, LEARNING_RATE, THRESHOLD, Table, features_of, rows_of
from processes import World
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    admission,
    cache_modules,
    evict,
    flush,
    initializers,
)
from torchrec_embcache.checkpoint import Saver, SaveReport
from torchrec_embcache.cli import main
from torchrec_embcache.eviction import All, Keep, L2Norm, Policy, Score, Share, Ttl
from torchrec_models import CPU, Batch, sharded

TABLES, SAMPLES, WORLDS = ("old", "seldom"), 12, (1, 2, 3, 4)
POLICIES = [
    Policy([Ttl(steps=6)], every_steps=3),
    Policy([Ttl(steps=5), L2Norm(below=0.9)]),
    Policy([All([Ttl(steps=3), Score(below=1.5)])], every_steps=2),
    Policy([Keep(rows=80)], every_steps=4),
    Policy([Share(0.2)], at_least_rows=50),
    Policy([Score(below=0.6), All([Share(0.5), Ttl(steps=4)])], every_steps=5, at_least_rows=40),
]
SAVES = ("full", "delta", "async delta", "linked")


@dataclass
class Step:
    """A training step: what is done before it and after it, in this order."""

    ids: dict[str, list[list[int]]]
    gradients: list[int]
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class Phase:
    """Steps by so many ranks, which begin with the newest checkpoint."""

    world: int
    lookahead: int
    threads: int
    tiers: str
    shardings: dict[str, str]
    steps: list[Step]


@dataclass
class Program:
    policies: dict[str, Policy]
    phases: list[Phase]


def program(seed: int) -> Program:
    """The same for the same seed, in every process."""
    dice = random.Random(seed)
    pools = [lambda: dice.randrange(6), lambda: dice.randrange(6, 120), lambda: dice.randrange(-(2**63), 2**63)]

    def step(*, is_ahead: bool, is_ssd: bool) -> Step:
        samples = {
            table: [[dice.choices(pools, [3, 8, 1])[0]() for _ in range(dice.randrange(5))] for _ in range(SAMPLES)]
            for table in TABLES
        }
        made = Step(samples, [dice.choice([-2, -1, 1, 2]) for _ in range(SAMPLES)])
        if not is_ahead:
            made.before = [what for what in ("evaluate", "abandon") if dice.random() < 0.2]
        doors = [door for door in SAVES if is_ssd or door != "linked"]
        chances = {"evict": 0.15, "flush": 0.1 * is_ssd, dice.choice(doors): 0.3, "load": 0.0 if is_ahead else 0.06}
        made.after = [what for what, chance in chances.items() if dice.random() < chance]
        return made

    def phase(world: int) -> Phase:
        lookahead, tiers = dice.choice([0, 0, 1, 2, 5, 8]), dice.choice(["ram", "ssd", "ssd", "device"])
        steps = [step(is_ahead=lookahead > 0, is_ssd=tiers == "ssd") for _ in range(dice.randrange(12, 24))]
        shardings = {table: dice.choice(["row_wise", "table_wise"]) for table in TABLES}
        return Phase(world, lookahead, dice.choice([1, 2]), tiers, shardings, steps)

    policies = dict(zip(TABLES, dice.sample(POLICIES, 2), strict=True))
    worlds = dice.sample(WORLDS, len(WORLDS))
    return Program(policies, [phase(world) for world in worlds])


# ---- the dict


class Expected:
    """The tables of one rank."""

    def __init__(self, policies: dict[str, Policy]) -> None:
        self.step = 0
        self.tables = {name: Table(policy, HALF_LIFE) for name, policy in policies.items()}
        self._saved = copy.deepcopy((self.step, self.tables))

    def load(self) -> None:
        self.step, self.tables = copy.deepcopy(self._saved)

    def _sum(self, read: Iterator[list[float]]) -> list[float]:
        return [sum(of_tables) for of_tables in zip(*read, strict=True)]

    def before(self, what: str, step: Step) -> list[float]:
        """Returns the sum of the values that each sample reads from both tables."""
        if what == "evaluate":
            return self._sum(table.read(step.ids[name]) for name, table in self.tables.items())
        abandoned = copy.deepcopy(self.tables)
        return self._sum(
            table.train(self.step + 1, step.ids[name], step.gradients) for name, table in abandoned.items()
        )

    def train(self, step: Step) -> list[float]:
        self.step += 1
        read = self._sum(
            iter([table.train(self.step, step.ids[name], step.gradients) for name, table in self.tables.items()])
        )
        for table in self.tables.values():
            if table.policy.every_steps is not None and self.step % table.policy.every_steps == 0:
                table.sweep(self.step)
        return read

    def after(self, what: str) -> None:
        if what == "load":
            self.load()
        for table in self.tables.values():
            if what == "evict" or (what in SAVES and table.policy.at_saves):
                table.sweep(self.step)
        if what in SAVES:
            self._saved = copy.deepcopy((self.step, self.tables))

    def rows(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        """Every row as `rows_of` has it."""
        return {
            (name, row_id): (row["weights"], row["count"], row["last_step"], row["score"])
            for name, table in self.tables.items()
            for row_id, row in table.rows.items()
        }


# ---- the model


class Model(nn.Module):
    """Two tables, and a loss whose gradients are whole numbers."""

    def __init__(self, policies: dict[str, Policy], tiers: str, folder: Path, world: int) -> None:
        super().__init__()
        self.world = world

        def config(name: str, policy: Policy) -> EmbCacheEmbeddingBagConfig:
            return EmbCacheEmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=10**9,
                total_num_buckets=12,
                feature_names=[name],
                initializer=initializers.Constant(float(INITIAL)),
                admission=admission.Count(THRESHOLD),
                eviction=policy,
                score_half_life_steps=HALF_LIFE,
                tiers=budgets(tiers, folder),
            )

        self.bags = EmbCacheEmbeddingBagCollection([config(*each) for each in policies.items()], name="bags")

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(batch.features)
        out = torch.cat([pooled[name] for name in TABLES], 1)
        # A backward of several ranks divides by their number.
        return (out.sum(1) * batch.target * self.world).sum(), (out[:, 0] + out[:, DIM]).detach()


class Ranks:
    """One of the ranks of a phase, which compares what it reads with the dict."""

    def __init__(self, rank: int, phase: Phase, policies: dict[str, Policy], folder: Path) -> None:
        self._saved = folder / "saved"
        place = folder / f"tiers-{phase.world}"
        fused = {"learning_rate": float(LEARNING_RATE)}
        self.model = sharded(Model(policies, phase.tiers, place, phase.world), phase.shardings, fused)
        share = SAMPLES // phase.world
        self._mine = slice(rank * share, (rank + 1) * share)
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        self._steps = iter([self._batch(step) for step in phase.steps])
        self._pipeline: Any = None
        if phase.lookahead:
            self._pipeline = EmbCacheTrainPipelineSparseDist(
                self.model, self._optimizer, CPU, lookahead=phase.lookahead
            )
        (module,) = cache_modules(self.model).values()
        self.tables = module.tables
        self._beside: Future[SaveReport] | None = None

    def _batch(self, step: Step) -> Batch:
        features = features_of({name: step.ids[name][self._mine] for name in TABLES}, TABLES)
        return Batch(features, torch.tensor(step.gradients[self._mine]))

    def load(self) -> None:
        self.wait()
        if self._saved.exists():
            Saver().load(self.model, self._saved)

    def before(self, what: str, step: Step, expected: list[float]) -> None:
        self.model.train(what == "abandon")
        with torch.set_grad_enabled(what == "abandon"):
            loss, read = self.model(self._batch(step))
        self.model.train()
        assert read.tolist() == expected[self._mine], what
        del loss
        # On several ranks the graph of an abandoned batch is part of a cycle, and its rows are in use until it is gone.
        gc.collect()

    def train(self, expected: list[float]) -> None:
        if self._pipeline is not None:
            read = self._pipeline.progress(self._steps)
        else:
            loss, read = self.model(next(self._steps))
            loss.backward()
        assert read.tolist() == expected[self._mine]

    def after(self, what: str) -> None:
        if what == "evict":
            evict(self.model)
        elif what == "flush":
            flush(self.model)
        elif what == "load":
            self.load()
        elif what == "async delta":
            self.wait()
            self._beside = Saver().save_async(self.model, self._saved, incremental=True)
        else:
            self.wait()
            Saver().save(self.model, self._saved, incremental=what == "delta", linked=what == "linked")

    def wait(self) -> None:
        """Wait for the save beside training."""
        if self._beside is not None:
            self._beside.result()
            self._beside = None


def play(expected: Expected, phase: Phase, ranks: Ranks | None) -> None:
    """Do the steps of a phase, by the dict and by this rank, if one is given."""
    expected.load()
    if ranks is not None:
        ranks.load()
    for step in phase.steps:
        for what in step.before:
            read = expected.before(what, step)
            if ranks is not None:
                ranks.before(what, step, read)
        read = expected.train(step)
        if ranks is not None:
            ranks.train(read)
        for what in step.after:
            expected.after(what)
            if ranks is not None:
                ranks.after(what)
    if ranks is not None:
        ranks.wait()


def played(rank: int, world: int, seed: int, number: int, folder: str) -> Any:
    """Do one phase of a program. Returns this rank's rows and how many ids wait for one in each of its tables."""
    made, threads = program(seed), torch.get_num_threads()
    phase, expected = made.phases[number], Expected(made.policies)
    assert phase.world == world
    for before in made.phases[:number]:
        play(expected, before, None)
    torch.set_num_threads(phase.threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tables of some KiB say that they are small
            ranks = Ranks(rank, phase, made.policies, Path(folder))
            play(expected, phase, ranks)
            pending = {name: table.stats().admission.pending for name, table in ranks.tables.items()}
            return rows_of(ranks.tables), pending
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    world = World(1)
    yield world
    world.stop()


@pytest.mark.parametrize("seed", range(6))
def test_random_runs_on_one_to_four_ranks_have_the_rows_of_a_dict(
    alone: World, two_ranks: World, three_ranks: World, four_ranks: World, tmp_path: Path, seed: int
) -> None:
    worlds = {world.size: world for world in (alone, two_ranks, three_ranks, four_ranks)}
    made = program(seed)
    expected = Expected(made.policies)
    for number, phase in enumerate(made.phases):
        play(expected, phase, None)
        if (tmp_path / "saved").exists():
            # Other ranks than those that made a linked checkpoint load it when it is compacted.
            assert main(["compact", str(tmp_path / "saved")]) == 0
        found = worlds[phase.world].run(played, seed, number, str(tmp_path))
        rows: dict[tuple[str, int], tuple[Any, ...]] = {}
        for of_rank, _ in found:
            assert not rows.keys() & of_rank.keys()
            rows.update(of_rank)
        assert rows == expected.rows(), number
        for name, table in expected.tables.items():
            assert sum(pending.get(name, 0) for _, pending in found) == len(table.counts), (number, name)
    assert all(table.evicted > 0 for table in expected.tables.values())
