"""Every published checkpoint of a random chain loads, and has the rows of a plain dictionary."""

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import World
from tables import bucket_of, ssd_tiers
from torchrec_embcache import (
    CacheTable,
    EmbCacheEmbedding,
    Saver,
    TierBudgets,
    evict,
    eviction,
    initializers,
    optimizers,
)
from torchrec_embcache.checkpoint.reports import SaveReport
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import CapacityError
from torchrec_embcache.model import CacheModule

pytestmark = pytest.mark.slow

# Each id has its weight, a number that floats represent exactly, and the step that trained it last.
Rows = dict[int, tuple[float, int]]

SEEDS = int(os.environ.get("EMBCACHE_PYTHON_CHAINS", "10"))
FIRST_SEED = int(os.environ.get("EMBCACHE_PYTHON_CHAINS_SEED", "0"))
BUCKETS, DIM = 13, 64
SETTINGS: dict[str, Any] = {
    "name": "item",
    "optimizer": optimizers.SGD(lr=1.0),
    "initializer": initializers.Constant(0.0),
    "total_num_buckets": BUCKETS,
}
AMPLE = TierBudgets(host_bytes="32MiB")
# A batch of so many new ids has more rows than a full table can make room for.
TOO_MANY = range(10**6, 10**6 + 40_000)


def rows_of(table: CacheTable) -> Rows:
    found: Rows = {}
    for chunk in table.export():
        for row_id, weight, step in zip(
            chunk.ids.tolist(), chunk.weights[:, 0].tolist(), chunk.metadata.last_step.tolist(), strict=True
        ):
            assert row_id not in found, "a row is exported twice"
            found[row_id] = (weight, step)
    return found


class OneRank(CacheModule, nn.Module):
    """One rank's shard of the table, for another number of ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.table = CacheTable(dim=DIM, tiers=AMPLE, rank=rank, world_size=size, **SETTINGS)

    @property
    def tables(self) -> Mapping[str, CacheTable]:
        return {"item": self.table}

    def refresh_buckets(self) -> None:
        """Nothing was derived from them."""


def change_on_ranks(rank: int, size: int, path: str, imported: list[int], removed: list[int]) -> tuple[Rows, str]:
    """Load on `size` ranks, change some rows there, and save a delta. Returns this rank's rows, and the kind of the save."""
    model = OneRank(rank, size)
    Saver().load(model, path)
    table = model.table
    mine = torch.tensor(owned(table, imported), dtype=torch.int64)
    table.import_rows(mine, mine[:, None].to(torch.float32).expand(-1, DIM))
    table.remove_rows(owned(table, removed))
    kind = Saver().save(model, path, incremental=True).kind
    found = rows_of(table)
    table.close()
    return found, kind


def owned(table: CacheTable, ids: list[int]) -> list[int]:
    begin, end = table.buckets
    return [row_id for row_id in ids if begin <= bucket_of(row_id, BUCKETS) < end]


class Run:
    """A model, what its rows are, and which checkpoints there are of it."""

    def __init__(self, seed: int, path: Path, world: Callable[[], World]) -> None:
        self.dice = random.Random(seed)
        self.path, self.world, self.places = path, world, 0
        # Half of the runs have so many rows that ids which left take memory from the rows, and sweeps go on in slices.
        self.is_large = seed % 2 == 1
        self.block = 5000 if self.is_large else 300
        self.ttl = self.dice.randint(6, 9) if self.is_large else self.dice.randint(6, 20)
        self.every_steps = self.dice.choice([None, None, 7 if self.is_large else 2])
        self.kinds: set[str] = set()
        self.rows: Rows = {}
        self.step = 0
        self.root = self.place()
        self.published: dict[str, Rows] = {}
        self.model = self.made()

    def place(self) -> Path:
        self.places += 1
        made = self.path / str(self.places)
        made.mkdir(mode=0o750)
        return made

    def made(self) -> EmbCacheEmbedding:
        self.on_full = "error"
        if self.is_large:
            tiers = ssd_tiers(self.place(), host_bytes="8MiB", ssd_bytes="512MiB")
        else:
            kind = self.dice.choice(["ram", "ssd", "full ram", "full ssd"])
            self.on_full = "evict" if "full" in kind else "error"
            tiers = {
                "ram": lambda: AMPLE,
                "ssd": lambda: ssd_tiers(self.place()),
                "full ram": lambda: TierBudgets(host_bytes="128KiB"),
                "full ssd": lambda: ssd_tiers(self.place(), ssd_bytes="512KiB"),
            }[kind]()
        policy = eviction.Policy([eviction.Ttl(steps=self.ttl)], every_steps=self.every_steps)
        return EmbCacheEmbedding(embedding_dim=DIM, tiers=tiers, on_full=self.on_full, eviction=policy, **SETTINGS)

    # ---- what happens to rows

    def ids(self) -> range:
        first = self.dice.randrange(8) * self.block
        return range(first, first + (self.block if self.dice.random() < 0.8 else self.dice.randint(1, 3)))

    def forget_dropped(self, before: int) -> None:
        """Take the rows out of the dictionary that the full table dropped: which these are is its policy's choice."""
        dropped = self.model.stats().dropped_rows - before
        if dropped:
            assert self.on_full == "evict"
            left = rows_of(self.model.table)
            gone = self.rows.keys() - left.keys()
            assert len(gone) <= dropped, (
                "no more rows left than are counted; of those that were dropped, a sweep took some"
            )
            for row_id in gone:
                del self.rows[row_id]

    def trained(self, ids: range) -> None:
        self.step += 1
        for row_id in ids:
            weight, _ = self.rows.get(row_id, (0.0, 0))
            self.rows[row_id] = (weight + 1.0, self.step)

    def sweep_rows(self, spared: range = range(0)) -> None:
        if self.step >= self.ttl:
            last = self.step - self.ttl
            self.rows = {row_id: value for row_id, value in self.rows.items() if value[1] > last or row_id in spared}

    def train(self, ids: range | None = None, *, sweep_between: bool = False) -> None:
        ids = self.ids() if ids is None else ids
        before = self.model.stats().dropped_rows
        output = self.model(torch.tensor(ids))
        if sweep_between:
            evict(self.model)
            self.sweep_rows(spared=ids)
        (-output.sum()).backward()
        self.trained(ids)
        if self.every_steps is not None and self.step % self.every_steps == 0:
            self.sweep_rows()
        self.forget_dropped(before)

    def pass_steps(self) -> None:
        for _ in range(self.dice.randint(1, 5)):
            self.train(range(1))

    def sweep(self) -> None:
        evict(self.model)
        self.sweep_rows()

    def remove(self) -> None:
        ids = list(self.ids())
        assert self.model.remove_rows(ids) == sum(row_id in self.rows for row_id in ids)
        for row_id in ids:
            self.rows.pop(row_id, None)

    def bring_in(self) -> None:
        ids = self.ids()
        before = self.model.stats().dropped_rows
        weight = float(self.dice.randrange(100))
        self.model.import_rows(list(ids), torch.full((len(ids), DIM), weight))
        self.rows |= dict.fromkeys(ids, (weight, 0))
        self.forget_dropped(before)

    def refused(self) -> None:
        """Train a batch that is too large for the table. It is refused, and nothing has changed."""
        if self.on_full != "evict":
            return
        with pytest.raises(CapacityError):
            self.model(torch.tensor(TOO_MANY))
        self.kinds.add("refused")
        self.check(self.model, self.rows, "after a refused batch")

    # ---- checkpoints

    def note(self, report: SaveReport, expected: Rows, kind: str = "") -> None:
        self.published[report.checkpoint] = expected
        self.kinds.add(f"{kind}{report.kind}")
        self.check_newest()

    def swept_at_save(self) -> Rows:
        """The rows that a save has."""
        if self.every_steps is None:
            self.sweep_rows()
        return dict(self.rows)

    def save(self, *, incremental: bool) -> None:
        report = Saver(0).save(self.model, self.root, incremental, keep=self.dice.randint(1, 3))
        self.note(report, self.swept_at_save())

    def save_async(self) -> None:
        future = Saver(0).save_async(self.model, self.root, self.dice.random() < 0.7, keep=self.dice.randint(1, 3))
        expected = self.swept_at_save()
        for _ in range(self.dice.randint(0, 3)):
            self.dice.choice([self.train, self.pass_steps, self.sweep, self.remove, self.bring_in])()
        self.note(future.result(60), expected, "async ")

    def compact(self) -> None:
        if self.published:
            before = self.published[list(self.published)[-1]]
            self.note(Saver(0).compact(self.root, keep=self.dice.randint(1, 3)), before, "compacted ")

    def load(self) -> None:
        """Load one of the checkpoints, mostly into new tables of other budgets, and go on from there."""
        there = [name for name in self.published if (self.root / name).is_dir()]
        if not there:
            return
        name = there[-1] if self.dice.random() < 0.7 else self.dice.choice(there)
        if self.dice.random() < 0.8:
            self.model.close()
            self.model = self.made()
        before = self.model.stats().dropped_rows
        report = Saver(0).load(self.model, self.root, checkpoint=name)
        self.rows = dict(self.published[name])
        self.step = self.model.table.step()
        self.forget_dropped(before)
        assert report.rows == {"item": len(self.rows)}
        self.kinds.add("loaded" if len(self.rows) == len(self.published[name]) else "dropped at load")
        self.check(self.model, self.rows, f"after the load of {name}")

    def reshard(self) -> None:
        if self.published:
            to = self.place()
            assert main(["reshard", str(self.root), str(to), "--world-size", str(self.dice.randint(1, 4))]) == 0
            (name,) = [entry.name for entry in to.iterdir() if entry.is_dir()]
            self.published = {name: self.published[list(self.published)[-1]]}
            self.root = to
            self.kinds.add("resharded")
            self.check_newest()

    def change_on_ranks(self) -> None:
        if not self.published:
            return
        removed, imported = list(self.ids())[:300], list(self.ids())[:300]
        found = self.world().run(change_on_ranks, str(self.root), imported, removed)
        expected = dict(self.published[list(self.published)[-1]])
        expected |= {row_id: (float(row_id), 0) for row_id in imported}
        for row_id in removed:
            expected.pop(row_id, None)
        assert {kind for _, kind in found} == {"delta"}
        assert sum(len(rows) for rows, _ in found) == len(expected)
        assert {row_id: value for rows, _ in found for row_id, value in rows.items()} == expected
        name = (self.root / "LATEST").read_text().strip()
        self.published[name] = expected
        self.kinds.add("ranks")
        self.check_newest()

    def check_newest(self) -> None:
        name = list(self.published)[-1]
        with EmbCacheEmbedding(embedding_dim=DIM, tiers=AMPLE, **SETTINGS) as fresh:
            assert Saver(0).load(fresh, self.root).checkpoint == name
            self.check(fresh, self.published[name], f"in {name}")

    def check(self, model: EmbCacheEmbedding, expected: Rows, where: str) -> None:
        found = rows_of(model.table)
        differ = [row_id for row_id in found.keys() | expected.keys() if found.get(row_id) != expected.get(row_id)]
        shown = {row_id: (found.get(row_id), expected.get(row_id)) for row_id in sorted(differ)[:5]}
        assert not differ, f"{where}: {len(differ)} of {len(expected)} rows differ: {shown}"

    def go(self, operations: int) -> None:
        choices: list[tuple[int, Callable[[], object]]] = [
            (6, self.train),
            (3, self.pass_steps),
            (2, self.sweep),
            (1, lambda: self.train(sweep_between=True)),
            (2, self.remove),
            (2, self.bring_in),
            (1, self.refused),
            (1, lambda: self.save(incremental=False)),
            (5, lambda: self.save(incremental=True)),
            (3, self.save_async),
            (2, self.load),
            (1, self.compact),
            (1, self.reshard),
        ]
        weights, calls = zip(*choices, strict=True)
        for call in self.dice.choices(calls, weights, k=operations):
            call()
            self.check(self.model, self.rows, f"after {getattr(call, '__name__', call)}")
        self.change_on_ranks()
        self.model.close()


@pytest.mark.filterwarnings("ignore::torchrec_embcache.exceptions.EmbCacheWarning")
def test_every_checkpoint_of_a_random_chain_loads(tmp_path: Path, two_ranks: World) -> None:
    kinds = set()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        path = tmp_path / str(seed)
        path.mkdir(mode=0o750)
        run = Run(seed, path, lambda: two_ranks)
        try:
            run.go(operations=40)
        except BaseException as error:
            error.add_note(f"EMBCACHE_PYTHON_CHAINS_SEED={seed} EMBCACHE_PYTHON_CHAINS=1 is this run")
            raise
        kinds |= run.kinds
    if SEEDS >= 10:
        assert kinds >= {
            "full",
            "delta",
            "async delta",
            "compacted full",
            "loaded",
            "dropped at load",
            "resharded",
            "ranks",
        }
