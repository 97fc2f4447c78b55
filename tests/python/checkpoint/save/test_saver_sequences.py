"""After any sequence of saves, loads and merges with training between, a new model loads the state of the last save."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from saver_cases import OPTIMIZERS, make_bag, rows, tiers, train
from torchrec_embcache import optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import MismatchError

pytestmark = pytest.mark.slow

Contents = dict[str, dict[int, tuple[Any, ...]]]
SEEDS = int(os.environ.get("EMBCACHE_PYTHON_SEQUENCES", "3"))
STEPS = 25


class Run:
    """A model of two tables on random tiers, and what each directory should hold."""

    def __init__(self, seed: int, path: Path) -> None:
        self.rng = random.Random(seed)
        self.path, self.directories = path, 0
        self.optimizer: optimizers.OptimizerSpec = self.rng.choice(OPTIMIZERS)
        self.model = self.fresh("ram", "ssd", "device")
        self.roots = [self.directory() for _ in range(1 + seed % 2)]
        self.saved: dict[Path, Contents] = {}
        self.kinds: set[str] = set()

    def directory(self) -> Path:
        self.directories += 1
        made = self.path / str(self.directories)
        made.mkdir(mode=0o750)
        return made

    def fresh(self, *kinds: str) -> nn.ModuleDict:
        bags = {}
        for module, table in (("a", "one"), ("b", "two")):
            budgets = tiers(self.rng.choice(kinds), self.directory())
            bags[module] = make_bag(table, tiers=budgets, optimizer=self.optimizer, seed=self.rng.randrange(3))
        return nn.ModuleDict(bags)

    def contents(self, model: nn.ModuleDict | None = None) -> Contents:
        return {name: rows(bag) for name, bag in (model or self.model).items()}

    def train(self) -> None:
        for bag in self.model.values():
            train(bag, self.rng.randrange(3), seed=self.rng.randrange(99), ids=self.rng.choice([5, 60, 150]))

    def change(self) -> None:
        bag = self.model[self.rng.choice("ab")]
        bag.remove_rows(torch.tensor([self.rng.randrange(-60, 60)]))
        bag.import_rows(torch.tensor([self.rng.randrange(300, 900)]), torch.rand(1, 4))

    def save(self, root: Path, **how: Any) -> None:
        self.saved[root] = self.contents()
        self.kinds.add(Saver(0).save(self.model, root, keep=self.rng.randint(1, 3), **how).kind)

    def save_async(self, root: Path) -> None:
        self.saved[root] = self.contents()
        incremental = self.rng.random() < 0.5
        future = Saver(0).save_async(self.model, root, incremental, keep=self.rng.randint(1, 3))
        self.train()
        self.change()
        self.kinds.add(f"async {future.result(600).kind}")

    def compact(self, root: Path) -> None:
        if root in self.saved:
            Saver(0).compact(root, keep=self.rng.randint(1, 3))

    def load(self, root: Path, **how: Any) -> None:
        if root not in self.saved:
            return
        try:
            Saver(0).load(self.model, root, **how)
        except MismatchError as error:
            if "linked" in str(error) or "SSD tier" in str(error):
                return
            raise
        expected = self.saved[root]
        if how:
            self.kinds.add("renamed")
            expected = {"a": expected["b"], "b": expected["a"]}
        assert self.contents() == expected

    def check(self) -> None:
        for root, expected in self.saved.items():
            model = self.fresh("ssd", "device")
            Saver(0).load(model, root)
            assert self.contents(model) == expected
            for bag in model.values():
                bag.close()

    def go(self) -> None:
        exchanged = {"rename": {"a/one": "b/two", "b/two": "a/one"}}
        operations: list[Callable[[Path], None]] = [
            lambda _: self.train(),
            lambda _: self.change(),
            lambda root: self.save(root),
            lambda root: self.save(root, incremental=True),
            lambda root: self.save(root, incremental=True),
            lambda root: self.save(root, linked=True),
            self.save_async,
            self.compact,
            lambda root: self.load(root),
            lambda root: self.load(root, **exchanged),
        ]
        for _ in range(STEPS):
            self.rng.choice(operations)(self.rng.choice(self.roots))
            self.check()


@pytest.mark.filterwarnings("ignore::torchrec_embcache.exceptions.EmbCacheWarning")
def test_fresh_model_loads_the_last_of_any_saves_and_merges(tmp_path: Path) -> None:
    kinds = set()
    for seed in range(SEEDS):
        path = tmp_path / str(seed)
        path.mkdir(mode=0o750)
        run = Run(seed, path)
        run.go()
        kinds |= run.kinds
    assert kinds == {"full", "delta", "linked", "async full", "async delta", "renamed"}
