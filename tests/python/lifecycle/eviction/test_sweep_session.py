"""Agreement of ranks before a sweep, and the tables that a save sweeps. The tables here only record the calls."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from torchrec_embcache._dist.ranks import SingleRank
from torchrec_embcache.eviction import L2Norm, Policy, Ttl
from torchrec_embcache.exceptions import ConfigError, EmbCacheError, ReadOnlyError, StateError, StorageError
from torchrec_embcache.model import _evict
from torchrec_embcache.table._lifecycle import LifecycleConfig


@pytest.fixture(autouse=True)
def _tables_that_only_say_what_they_are_asked(monkeypatch):
    def sweep_together(tables, rules):
        for table, rule in zip(tables, rules, strict=True):
            table.sweep(rule)

    monkeypatch.setattr(_evict, "sweep_prepared", sweep_together)


AT_SAVES = Policy([Ttl(steps=5)])
EVERY = Policy([Ttl(steps=5)], every_steps=3)


@dataclass
class Table:
    """A shard of a table that counts its sweeps."""

    policy: Policy | None = AT_SAVES
    at: int = 7
    world_size: int = 1
    optimizer: object = "sgd"
    no_new_rows: bool = False
    error: Exception | None = None
    sweeps: int = field(default=0, init=False)

    buckets = (0, 1)
    _needs_collective_sweep = False
    total_num_buckets = 2

    @property
    def _settings(self) -> Any:
        return SimpleNamespace(lifecycle=LifecycleConfig(eviction=self.policy))

    @property
    def _native_table(self) -> Any:
        return SimpleNamespace(
            is_read_only=lambda: self.no_new_rows,
            check_writable=self.check_writable,
            prepare_sweep=lambda _rule: None,
        )

    def check_writable(self) -> None:
        if self.no_new_rows:
            raise ReadOnlyError("it could not be written")

    def step(self) -> int:
        return self.at

    def sweep(self, _rule: object = None) -> None:
        if self.error is not None:
            raise self.error
        self.sweeps += 1


class TwoRanks:
    """Two ranks, each a thread, which meet where real ones would."""

    has_all_ranks = True
    world_size = 2

    def __init__(self) -> None:
        self._meet = threading.Barrier(2, timeout=600)
        self._done: dict[int, Any] = {}
        self._own = threading.local()

    @property
    def rank(self) -> int:
        return int(self._own.rank)

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        try:
            mine = (work(), None)
        except EmbCacheError as error:
            mine = (None, error)
        self._done[self.rank] = mine
        self._meet.wait()
        everyone = [self._done[rank] for rank in range(2)]
        self._meet.wait()
        for _, error in everyone:
            if error is not None:
                raise error
        return [value for value, _ in everyone]

    def run(self, work: Callable[[int], None]) -> list[str | None]:
        """Do `work` on both ranks; what each raises, as text."""
        said: list[str | None] = [None, None]

        def one(rank: int) -> None:
            self._own.rank = rank
            try:
                work(rank)
            except EmbCacheError as error:
                said[rank] = f"{type(error).__name__}: {error}"

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said


def swept(tables: dict[str, Any], *, at_save: bool = True) -> list[int]:
    _evict._sweep(tables, SingleRank(), at_save=at_save)
    return [table.sweeps for table in tables.values()]


def test_a_save_sweeps_the_tables_that_are_trained_and_say_so():
    tables = {
        "at saves": Table(),
        "every 3 steps": Table(EVERY),
        "no policy": Table(None),
        "no optimizer": Table(optimizer=None),
        "no step": Table(at=0),
        "read only": Table(no_new_rows=True),
    }
    assert swept(tables) == [1, 0, 0, 0, 0, 0]


def test_a_call_sweeps_every_table_that_has_a_policy():
    tables = {"a": Table(), "b": Table(EVERY), "c": Table(None), "d": Table(optimizer=None), "e": Table(at=0)}
    assert swept(tables, at_save=False) == [1, 1, 0, 1, 1]


def test_save_of_a_table_with_a_failed_disk_says_not_swept(caplog):
    swept({"item": Table(no_new_rows=True)})
    assert "table item is saved without a sweep" in caplog.text


def test_no_tables_are_no_error():
    assert swept({}) == []


def two(first: Table, second: Table, *, at_save: bool = True) -> list[str | None]:
    ranks, tables = TwoRanks(), (first, second)
    return ranks.run(lambda rank: _evict._sweep({"item": tables[rank]}, ranks, at_save=at_save))  # type: ignore[dict-item]


@pytest.mark.parametrize("at_save", [True, False])
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"at": 8}, StateError, "table item is at step 7 on rank 0 and at step 8 on rank 1"),
        ({"at": 0}, StateError, "at step 7 on rank 0 and at step 0 on rank 1"),
        ({"policy": Policy([Ttl(steps=6)])}, ConfigError, "steps=6"),
        ({"policy": None}, ConfigError, "eviction=None on rank 1"),
        ({"policy": EVERY}, ConfigError, "every_steps=3"),
        ({"error": StorageError("the disk is gone")}, StorageError, "the disk is gone"),
    ],
)
def test_what_one_rank_says_otherwise_is_raised_on_both(changes, error, words, at_save):
    first, second = Table(world_size=2), Table(**{"world_size": 2, **changes})
    for said in two(first, second, at_save=at_save):
        assert said is not None
        assert said.startswith(error.__name__)
        assert words in said
    assert second.sweeps == 0
    assert first.sweeps == ("error" in changes)


def test_shards_that_agree_are_swept_on_both_ranks():
    for at_save in (True, False):
        first, second = Table(world_size=2), Table(world_size=2)
        assert two(first, second, at_save=at_save) == [None, None]
        assert (first.sweeps, second.sweeps) == (1, 1)


def test_a_shard_whose_disk_failed_on_one_rank_is_left_out_on_both():
    first, second = Table(world_size=2), Table(world_size=2, no_new_rows=True)
    assert two(first, second) == [None, None]
    assert (first.sweeps, second.sweeps) == (0, 0)


def test_call_sweeps_no_table_if_one_of_any_rank_is_unwritable():
    ranks, healthy, failed = TwoRanks(), Table(world_size=2), Table(world_size=2, no_new_rows=True)
    tables = ({"a": Table(world_size=2), "b": healthy}, {"a": Table(world_size=2), "b": failed})
    said = ranks.run(lambda rank: _evict._sweep(tables[rank], ranks, at_save=False))  # type: ignore[arg-type]
    assert said == ["ReadOnlyError: it could not be written"] * 2
    assert [table.sweeps for rank in tables for table in rank.values()] == [0, 0, 0, 0]


def test_tables_that_ranks_do_not_share_need_not_agree():
    first, second = Table(), Table(Policy([L2Norm(below=2)]), at=9)
    assert two(first, second) == [None, None]
    assert (first.sweeps, second.sweeps) == (1, 1)
    ranks, tables = TwoRanks(), ({"a": Table(world_size=2)}, {"b": Table(None, world_size=2)})
    assert ranks.run(lambda rank: _evict._sweep(tables[rank], ranks, at_save=True)) == [None, None]  # type: ignore[arg-type]
    assert (tables[0]["a"].sweeps, tables[1]["b"].sweeps) == (1, 0)
