"""Reports on the disk of SSD tiers: files of other ranks, missing space, full tiers, and log lines."""

import gc
import logging
import os
import re
import signal
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import Child, World
from serving_cases import until
from tables import AMPLE, make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import CacheTable, EmbCacheEmbeddingBag, TierBudgets, flush, initializers, optimizers
from torchrec_embcache._ssd import autoflush
from torchrec_embcache._ssd.flush import flush_tables
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.config import DEFAULT_TOTAL_NUM_BUCKETS
from torchrec_embcache.exceptions import CapacityError, EmbCacheWarning
from torchrec_embcache.model import CacheModule

BATCHES = random_batches(12, 6, 60, seed=5)


@pytest.fixture(autouse=True)
def _no_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that tables of earlier tests do not count here, and are not dropped during a test, which would be logged."""
    gc.collect()
    monkeypatch.setattr("torchrec_embcache._ssd.autoflush._open_tables", weakref.WeakSet())


def shard(directory: Path | None, rank: int, ranks: int, **settings: Any) -> CacheTable:
    """Open a rank's part of a table."""
    reopen = settings.pop("reopen", None)
    table = CacheTable(
        name="t",
        dim=4,
        tiers=AMPLE if directory is None else ssd_tiers(directory, reopen=reopen),
        initializer=initializers.Constant(1),
        optimizer=optimizers.SGD(),
        rank=rank,
        world_size=ranks,
        **settings,
    )
    table.open()
    return table


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory / "t" / "t"))


@pytest.fixture
def of_two_ranks(tmp_path: Path) -> Path:
    """The files that two ranks left."""
    for rank in range(2):
        shard(tmp_path, rank, 2).close()
    return tmp_path


# ---- files of other ranks


@pytest.mark.parametrize("reopen", [None, "resume"])
def test_files_of_another_rank_count_are_named_with_a_remedy(
    of_two_ranks: Path, reopen: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), shard(of_two_ranks, 0, 1, reopen=reopen):
        pass
    (record,) = caplog.records
    assert record.name == "torchrec_embcache._ssd.diagnostics"
    said = record.getMessage()
    assert f"0-of-2, 1-of-2 in {of_two_ranks}/t/t were left by runs with other ranks" in said
    assert 'reopen="discard"' in said
    assert names(of_two_ranks) == {"0-of-1", "0-of-2", "1-of-2"}


def test_discard_removes_files_of_another_number_of_ranks(of_two_ranks: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), shard(of_two_ranks, 0, 1, reopen="discard"):
        assert names(of_two_ranks) == {"0-of-1"}
    assert [record.getMessage().count("the rows that it flushed last are gone") for record in caplog.records] == [1, 1]


def train_alone(say: Any, directory: Path) -> None:
    table = shard(directory, 0, 1, reopen="auto")
    table.import_rows([1, 2, 3], torch.zeros(3, 4))
    say(len(table))
    signal.pause()


@pytest.mark.slow
def test_auto_removes_files_of_another_rank_count_after_a_flush(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = []
    for rank in range(2):
        with shard(tmp_path, rank, 2) as table:
            ids = torch.arange(100)
            ids = ids[torch.from_numpy(table._owns(ids.numpy()))]
            table.import_rows(ids, torch.ones(len(ids), 4))
            rows.append(len(ids))
    # It was killed before a flush, so the rows are where they were.
    child = Child(train_alone, tmp_path)
    assert child.hear() == 3
    child.kill()
    child.ended()
    assert names(tmp_path) == {"0-of-1", "0-of-2", "1-of-2"}
    for rank in range(2):
        with shard(tmp_path, rank, 2, reopen="resume") as table:
            assert len(table) == rows[rank]
    caplog.clear()
    with caplog.at_level(logging.WARNING), shard(tmp_path, 0, 1, reopen="auto") as table:
        said = caplog.text
        assert "0-of-2, 1-of-2 in" in said
        assert "the first flush of table 't' removes them" in said
        assert names(tmp_path) == {"0-of-1", "0-of-2", "1-of-2"}
        caplog.clear()
        table.import_rows([1], torch.zeros(1, 4))
        table.flush()
        assert names(tmp_path) == {"0-of-1"}
        assert caplog.text.count("the rows that it flushed last are gone") == 2
        caplog.clear()
        table.flush()
        assert caplog.text == ""


def test_auto_removes_at_once_what_lies_beside_rows_that_it_resumes(of_two_ranks: Path) -> None:
    with shard(of_two_ranks, 0, 1):
        pass
    with shard(of_two_ranks, 0, 1, reopen="auto"):
        assert names(of_two_ranks) == {"0-of-1"}


def _flushed_by_ranks(rank: int, _world: int, folder: str) -> list[set[str]]:
    table = shard(Path(folder), rank, 2, reopen="auto")
    seen = []
    torch.distributed.barrier()
    table.flush()
    torch.distributed.barrier()
    seen.append(names(Path(folder)))
    torch.distributed.barrier()
    flush_tables([table])
    torch.distributed.barrier()
    seen.append(names(Path(folder)))
    table.close()
    return seen


def test_auto_waits_for_a_flush_of_all_ranks(tmp_path: Path, two_ranks: World) -> None:
    """A flush of one rank's shard is not one of the table. The rows of the other ranks may still be lost."""
    for rank in range(3):
        shard(tmp_path, rank, 3).close()
    old, new = {"0-of-3", "1-of-3", "2-of-3"}, {"0-of-2", "1-of-2"}
    assert two_ranks.run(_flushed_by_ranks, str(tmp_path)) == [[old | new, new]] * 2


def test_each_of_several_ranks_removes_its_part(of_two_ranks: Path) -> None:
    tables = []
    for rank, left in enumerate([{"1-of-2"}, set(), set()]):
        tables.append(shard(of_two_ranks, rank, 3, reopen="discard"))
        assert names(of_two_ranks) == left | {f"{other}-of-3" for other in range(rank + 1)}
    for table in tables:
        table.close()


def hold(say: Any, directory: Path) -> None:
    table = shard(directory, 0, 2, reopen="resume")
    say(len(table))
    signal.pause()


@pytest.mark.slow
def test_what_another_process_has_open_stays(of_two_ranks: Path, caplog: pytest.LogCaptureFixture) -> None:
    child = Child(hold, of_two_ranks)
    assert child.hear() == 0
    with caplog.at_level(logging.WARNING), shard(of_two_ranks, 0, 1, reopen="auto") as table:
        table.flush()
        assert names(of_two_ranks) == {"0-of-1", "0-of-2"}
    assert re.search(r"0-of-2 was left .* and stays: .* in use by pid \d+", caplog.text)
    child.kill()
    child.ended()


@pytest.mark.parametrize("what", ["no lock", "other file", "link", "file", "other name"])
def test_what_is_no_directory_of_a_table_stays(of_two_ranks: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    place = of_two_ranks / "t" / "t"
    mine = place / "1-of-2"
    if what == "no lock":
        (mine / "lock").unlink()
    elif what == "other file":
        (mine / "thesis.txt").write_text("years of work")
    elif what == "link":
        mine.rename(place / "elsewhere")
        mine.symlink_to(place / "elsewhere")
    elif what == "file":
        mine.rename(place / "elsewhere")
        mine.write_text("a file")
    else:
        mine = mine.rename(place / "1-of-2.backup")
    before = sorted(path.name for path in mine.iterdir()) if mine.is_dir() else []
    with caplog.at_level(logging.WARNING), shard(of_two_ranks, 0, 1, reopen="discard"):
        assert mine.exists()
        assert (sorted(path.name for path in mine.iterdir()) if mine.is_dir() else []) == before
        assert "0-of-2" not in names(of_two_ranks)
    assert ("1-of-2 was left" in caplog.text) == (what in ("no lock", "other file"))


def test_table_moved_to_another_rank_names_its_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with shard(tmp_path, 0, 2, buckets=(0, DEFAULT_TOTAL_NUM_BUCKETS)):
        pass
    with caplog.at_level(logging.WARNING), shard(tmp_path, 1, 2, buckets=(0, DEFAULT_TOTAL_NUM_BUCKETS), reopen="auto"):
        assert names(tmp_path) == {"0-of-2", "1-of-2"}
    assert "0-of-2 in" in caplog.text


# ---- room


def test_budgets_past_the_free_space_of_the_file_system_warn_once(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    free = system.f_bavail * system.f_frsize
    tiers = ssd_tiers(tmp_path / "ssd", ssd_bytes=2 * free + (1 << 40))
    with pytest.warns(EmbCacheWarning, match=r"TierBudgets.ssd_bytes of the open tables .* are free there") as caught:
        first = make_bag(name="first", tiers=tiers)
    assert len(caught) == 1
    with make_bag(name="second", tiers=tiers):  # there is no second warning, which would be an error here
        pass
    first.close()


def test_table_reopens_after_a_warning_raised_as_an_error(
    tmp_path: Path,
) -> None:
    """The error, and with it the frames, are still referenced."""
    system = os.statvfs(tmp_path)
    tiers = ssd_tiers(tmp_path / "ssd", ssd_bytes=2 * system.f_bavail * system.f_frsize + (1 << 40))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EmbCacheWarning, match="are free there") as kept:
            make_bag(tiers=tiers)
    assert not autoflush.open_tables()
    with make_bag(tiers=tiers) as bag:
        assert autoflush.open_tables() == [bag.table]
        assert kept.tb is not None


def test_budgets_of_several_tables_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    free = 150 << 20

    class Small:
        f_frsize = real.f_frsize
        f_bavail = free // real.f_frsize

    monkeypatch.setattr("torchrec_embcache._ssd.diagnostics.os.statvfs", lambda _: Small)
    monkeypatch.setattr("torchrec_embcache._ssd.diagnostics._warned_roots", set())
    tiers = ssd_tiers(tmp_path / "ssd", ssd_bytes="100MiB")
    first = make_bag(name="first", tiers=tiers)
    with pytest.warns(EmbCacheWarning, match="are 200 MiB together"):
        second = make_bag(name="second", tiers=tiers)
    first.close()
    second.close()


def fill(bag: EmbCacheEmbeddingBag) -> str:
    """The error when more rows come than fit."""
    for first in range(0, 1_000_000, 1000):
        try:
            bag.import_rows(torch.arange(first, first + 1000), torch.zeros(1000, bag.embedding_dim))
        except CapacityError as error:
            return str(error)
    raise AssertionError("there is no end to it")


def test_a_full_table_without_an_ssd_tier_says_so_and_how_to_add_one() -> None:
    with make_bag(tiers=TierBudgets(host_bytes="64KiB")) as bag:
        said = fill(bag)
    assert "has no SSD tier" in said
    assert "TierBudgets(ssd_bytes=..., ssd_dir=...)" in said
    assert "host_bytes=65536" in said


def test_a_full_table_with_an_ssd_tier_speaks_of_that(tmp_path: Path) -> None:
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="1MiB", ssd_bytes="1MiB")) as bag:
        said = fill(bag)
    assert "SSD tier" in said
    assert "ssd_bytes" in said
    assert "host_bytes" not in said


def test_an_index_that_fills_the_host_budget_says_how_much_is_needed(tmp_path: Path) -> None:
    with make_bag(tiers=ssd_tiers(tmp_path / "small", host_bytes="32KiB", ssd_bytes="64MiB")) as bag:
        said = fill(bag)
        rows = len(bag)
    found = re.search(
        r"the index of its (\d+) rows on SSD fills host_bytes=32768 .* (\d+) bytes are needed at least, and (\d+) for",
        said,
    )
    assert found is not None, said
    least, whole = int(found[2]), int(found[3])
    assert 32768 < least < whole
    with make_bag(tiers=ssd_tiers(tmp_path / "enough", host_bytes=whole, ssd_bytes="64MiB")) as bag:
        ids = torch.arange(2 * rows)
        for first in range(0, len(ids), 1000):
            part = ids[first : first + 1000]
            bag.import_rows(part, torch.zeros(len(part), 4))
        assert len(bag) == 2 * rows


# ---- what is logged


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Messages logged at INFO or above during the test."""
    said: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    handler = Keeps(logging.INFO)
    logger = logging.getLogger("torchrec_embcache")
    with caplog.at_level(logging.INFO, "torchrec_embcache"):
        logger.addHandler(handler)
        yield said
        logger.removeHandler(handler)


def test_events_are_logged_once_at_info_and_steps_are_not(tmp_path: Path, logged: list[str]) -> None:
    tiers = {"host_bytes": "1MiB", "ssd_bytes": "16MiB"}
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", **tiers)) as bag:
        assert [line for line in logged if "torchrec_embcache.core" not in line] == [
            (
                f"INFO torchrec_embcache._ssd.diagnostics: table 'item': opened without rows, "
                f"with host 1 MiB, ssd 16 MiB in {tmp_path}/ssd"
            )
        ]
        logged.clear()
        train(bag, BATCHES, lookahead=2)
        bag.stats()
        bag.eval()
        step_free = bag(torch.tensor([1]), torch.tensor([0]))
        assert step_free.shape == (1, 4)
        assert logged == []
        bag.flush()
        rows = len(bag)
        (line,) = logged
        assert re.fullmatch(
            rf"INFO torchrec_embcache.table.cache_table: flushed {rows} rows of table 'item' in [\d.]+ s", line
        )
        logged.clear()
        flush(bag)
        (line,) = logged
        assert re.fullmatch(rf"INFO torchrec_embcache._ssd.flush: flushed {rows} rows of 'item' in [\d.]+ s", line)
        logged.clear()
        saved = Saver(0).save(bag, tmp_path / "saved")
        (line,) = logged
        assert re.fullmatch(
            rf"INFO torchrec_embcache.checkpoint.saver: saved {rows} rows in {tmp_path}/saved "
            rf"as {saved.checkpoint} \(full\) in [\d.]+ s",
            line,
        )
        logged.clear()
        Saver(0).save_async(bag, tmp_path / "saved").result()
        # A thread that waits for a future is woken before its callbacks are called, and one of those writes the line.
        until(lambda: any(" saved " in line for line in logged))
        assert len([line for line in logged if " saved " in line]) == 1
        logged.clear()
        Saver(0).load(bag, tmp_path / "saved")
        (line,) = logged
        assert re.fullmatch(
            rf"INFO torchrec_embcache.checkpoint.saver: loaded {rows} rows of 'item' from {tmp_path}/saved \([^)]+\) in [\d.]+ s",
            line,
        )
        logged.clear()
    with make_bag(tiers=ssd_tiers(tmp_path / "ssd", reopen="resume", **tiers)):
        pass
    resumed = f"table 'item': resumed {rows} rows at step {len(BATCHES)} from {tmp_path}/ssd/item/item/0-of-1"
    assert f"INFO torchrec_embcache._ssd.diagnostics: {resumed}" in logged


def save_on(rank: int, _size: int, path: str) -> list[str]:
    """Returns the messages that this rank logs about a save."""
    said: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("torchrec_embcache.checkpoint.saver"), Keeps(logging.INFO)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with shard(None, rank, 2) as table:
        Saver(rank).save(_Holds(table), path)
    logger.removeHandler(handler)
    return said


class _Holds(CacheModule, torch.nn.Module):
    """A module with one rank's part of a table."""

    def __init__(self, table: CacheTable) -> None:
        super().__init__()
        self._table = table

    @property
    def tables(self) -> dict[str, CacheTable]:
        return {"t": self._table}


def test_load_by_another_rank_count_is_logged_by_one_rank(two_ranks: World, tmp_path: Path, logged: list[str]) -> None:
    first, second = two_ranks.run(save_on, str(tmp_path / "saved"))
    assert [line.split(" in ")[0] for line in first] == ["saved 0 rows"]
    assert second == []
    logged.clear()
    with shard(None, 0, 1) as table:
        logged.clear()
        Saver(0).load(_Holds(table), tmp_path / "saved")
    (line,) = logged
    assert line.endswith("; it was saved by 2 ranks and is loaded by 1")
