"""Tables that are served give what the trainer's tables gave when the checkpoint was saved, whatever happens to its directory."""

import ast
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lives import embedding, update
from tables import EXTREME_IDS, ssd_tiers
from torchrec_embcache import EmbCacheEmbedding, Saver, _native, admission, cache_modules, serving
from torchrec_embcache.cli import main
from torchrec_embcache.eviction import L2Norm, Policy, Ttl
from torchrec_embcache.exceptions import (
    ConfigError,
    CorruptionError,
    EmbCacheError,
    HostMemoryError,
    InputError,
    MismatchError,
    PathError,
    StaleError,
    StateError,
)
from torchrec_models import IDS, MIXED, Model, Settings, batches, rows_of, sharded
from torchrec_models import together as merged
from torchrec_models import train as train_model
from world import World, process_group

WIDTHS = {"ta": 16, "tb": 8, "tc": 4}
ASKED = sorted({*IDS, *EXTREME_IDS, 1, 2, 3, 99, 160, -(2**40)})
LATEST = "LATEST"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ckpt"


# ---- what several ranks save


def saves_of(rank: int, world: int, path: str) -> list[tuple[str, str, Any]]:
    """Train, and save a full checkpoint and three deltas. Returns the name, the kind and the rows of each."""
    options = {"eviction": Policy([Ttl(steps=3), L2Norm(below=0.01)], every_steps=2), "score_half_life_steps": 3}
    model = Model(Settings(options=options))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    if world > 1:
        model = sharded(model, MIXED)
    saver, steps, made = Saver(), iter(batches(12, rank, world)), []
    for save in range(4):
        train_model(model, [next(steps) for _ in range(3)])
        if save == 2:  # rows that leave by hand are tombstones
            for module in cache_modules(model).values():
                for table in module.tables.values():
                    table.remove_rows([row_id for chunk in table.export() for row_id in chunk.ids.tolist()][:3])
        report = saver.save(model, path, incremental=save > 0, keep=10)
        made.append((report.checkpoint, report.kind, rows_of(model)))
    return made


def check_version(version: serving.Version, want: Any, fresh: Model) -> None:
    """Every id of every table reads its row, and every other id what the trainer's evaluation reads."""
    for table in version.tables:
        rows = table.lookup(ASKED)
        born = cache_modules(fresh)[table.module].tables[table.name].read_rows(ASKED).weights
        assert rows.shape == (len(ASKED), WIDTHS[table.name])
        for place, row_id in enumerate(ASKED):
            row = want.get((table.module, table.name, row_id))
            assert bool(rows.found[place]) == (row is not None)
            expected = born[place] if row is None else torch.tensor(row[: table.dim])
            assert torch.equal(rows[place], expected), (table, row_id)
        known = [row_id for module, name, row_id in want if (module, name) == (table.module, table.name)]
        assert table.rows == len(known)
        assert bool(table.lookup(known).found.all())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_id_of_every_checkpoint_reads_what_the_ranks_had(ranks: int, request, ckpt: Path) -> None:
    if ranks == 1:
        with process_group(0, 1, str(ckpt.parent / "store")):
            results = [saves_of(0, 1, str(ckpt))]
    else:
        world: World = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[ranks])
        results = world.run(saves_of, str(ckpt))
    names = [name for name, _, _ in results[0]]
    wanted = [merged([result[save][2] for result in results]) for save in range(len(names))]
    assert [kind for _, kind, _ in results[0]] == ["full", "delta", "delta", "delta"]
    fresh = Model()
    for name, want in zip(names, wanted, strict=True):
        with serving.open(ckpt, at=name) as tables, tables.pin() as version:
            assert version.name == name
            check_version(version, want, fresh)
    # The same checkpoints, one after the other in one process, as when they are published.
    (ckpt / LATEST).write_text(f"{names[0]}\n")
    with serving.open(ckpt) as tables:
        versions = [tables.pin()]
        for name in names[1:]:
            (ckpt / LATEST).write_text(f"{name}\n")
            assert tables.poll() == name
            assert tables.poll() is None
            versions.append(tables.pin())
        for version, want in zip(versions, wanted, strict=True):
            check_version(version, want, fresh)


# ---- one process that trains, and one that serves


Rows = dict[int, list[float]]


def contents(table: EmbCacheEmbedding) -> Rows:
    return {
        row_id: chunk.weights[place].tolist()
        for chunk in table.export()
        for place, row_id in enumerate(chunk.ids.tolist())
    }


def served(version: serving.Version, ids: list[int]) -> Rows:
    rows = version["item"].lookup(ids)
    return {row_id: rows[place].tolist() for place, row_id in enumerate(ids) if bool(rows.found[place])}


def test_random_chains_serve_every_version_whole_whatever_came_after(ckpt: Path) -> None:
    """Versions stay pinned over swaps, sweeps, tombstones, full saves and merged chains."""
    dice = random.Random(3)
    pool = [*EXTREME_IDS, *range(100, 220)]
    table = embedding(eviction=Policy([Ttl(steps=6), L2Norm(below=0.05)], every_steps=4), score_half_life_steps=3)
    saver = Saver(0)
    pinned: list[tuple[serving.Version, Rows]] = []
    tables = None
    for turn in range(24):
        for _ in range(dice.randrange(1, 4)):
            update(table(torch.tensor(dice.choices(pool, k=20))))
        if turn % 3 == 2:
            table.remove_rows(dice.sample(sorted(contents(table)), 3))
        name = saver.save(table, ckpt, incremental=turn % 9 != 0, keep=3).checkpoint
        if turn % 7 == 6:
            name = saver.compact(ckpt, keep=3).checkpoint
        if tables is None:
            tables = serving.open(ckpt)
        else:
            assert tables.poll() == name
        version = tables.pin()
        assert version.name == name
        pinned.append((version, contents(table)))
        if len(pinned) > 8:
            pinned.pop(0)[0].close()
        for held, want in pinned:
            assert served(held, pool) == want
    assert tables is not None
    assert tables.stats().swaps >= 23
    for version, _ in pinned:
        version.close()
    tables.close()


def two_saves(ckpt: Path) -> tuple[EmbCacheEmbedding, Saver, str]:
    """A table of the rows 1 to 9, whose weights are their ids, that was saved."""
    table, saver = embedding(), Saver(0)
    table.import_rows(list(range(1, 10)), [[float(row_id)] * 4 for row_id in range(1, 10)])
    return table, saver, saver.save(table, ckpt, keep=5).checkpoint


def publish(table: EmbCacheEmbedding, saver: Saver, ckpt: Path, value: float, *, full: bool = False) -> str:
    """Save the row 1 with another value."""
    table.import_rows([1], [[value] * 4])
    return saver.save(table, ckpt, incremental=not full, keep=5).checkpoint


def value_of(version: serving.Version, row_id: int = 1) -> float:
    return float(version["item"].lookup([row_id])[0, 0])


def test_a_pin_stays_while_versions_swap_and_rollback_goes_one_back(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        old = tables.pin()
        second = publish(table, saver, ckpt, 20.0)
        assert tables.poll() == second
        assert (value_of(old), value_of(tables.pin())) == (1.0, 20.0)
        assert tables.rollback() == first
        assert value_of(tables.pin()) == 1.0
        assert tables.poll() is None, "what was left is not served again by itself"
        with pytest.raises(StateError, match="no version before"):
            tables.rollback()
        third = publish(table, saver, ckpt, 30.0)
        assert tables.poll() == third
        assert (value_of(old), value_of(tables.pin())) == (1.0, 30.0)
        stats = tables.stats()
        assert (stats.version, stats.seq, stats.failed_polls, stats.last_error) == (third, 3, 0, None)


def test_a_version_that_was_let_go_refuses_use(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables:
        with tables.pin() as version:
            item = version["item"]
            assert item.lookup([3])[0, 0] == 3.0
        for use in (lambda: item.lookup([3]), lambda: item.lookup_pooled([3], [0, 1]), lambda: version["item"]):
            with pytest.raises(StateError, match="let go"):
                use()
        with pytest.raises(StateError, match="let go"), version:
            pass
        kept = tables.pin()
    assert value_of(kept) == 1.0, "a pin outlives the tables"
    for use in (tables.pin, tables.poll, tables.rollback, tables.stats):
        with pytest.raises(StateError, match="closed"):
            use()
    tables.close()
    kept.close()
    assert repr(tables).endswith(", closed)")
    assert repr(kept).endswith(", let go)")


def test_versions_that_nobody_pins_go(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        for value in range(20, 30):
            publish(table, saver, ckpt, float(value))
            tables.poll()
        assert tables.stats().versions == 2, "the one that is served, and the one for a rollback"
        with tables.pin(), tables.pin():
            assert tables.stats().versions == 2


def test_at_serves_one_checkpoint_for_good(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0)
    for at in (first, 1, "1", "0000000001"):
        with serving.open(ckpt, at=at) as tables:
            assert (tables.pin().name, value_of(tables.pin()), tables.poll()) == (first, 1.0, None)
    with serving.open(ckpt, at=2) as tables:
        assert tables.pin().name == second
    with pytest.raises(PathError, match=first):
        serving.open(ckpt, at=7)
    for at in (True, -1, 1.5):
        with pytest.raises(ConfigError, match="at="):
            serving.open(ckpt, at=at)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="follow="):
        serving.open(ckpt, at=1, follow=serving.Follow())


def test_a_thread_takes_up_what_is_published(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001)) as tables:
        for value in (20.0, 30.0, 40.0):
            name = publish(table, saver, ckpt, value)
            until(lambda name=name: tables.pin().name == name)
            assert value_of(tables.pin()) == value
        polls = tables.stats().polls
        until(lambda: tables.stats().polls > polls)
    assert "embcache-follow" not in threads()


def until(holds: Callable[[], bool]) -> None:
    """Ask until it holds."""
    for _ in range(10_000_000):
        if holds():
            return
    raise AssertionError("it never comes true")


def threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_requests_in_threads_see_one_version_whole_while_versions_swap(ckpt: Path) -> None:
    """Each save gives every row of two tables its own number. No request may see two numbers."""
    count, ids = 40, list(range(300))
    model = torch.nn.ModuleDict({"a": embedding(name="a"), "b": embedding(name="b")})
    saver = Saver(0)

    def save(number: int) -> None:
        for table in model.values():
            table.import_rows(ids, [[float(number)] * 4] * len(ids))  # type: ignore[operator]
        saver.save(model, ckpt, incremental=number % 10 != 0, keep=2)

    save(0)
    faults: list[str] = []
    seen: set[float] = set()
    ended = threading.Event()

    def ask() -> None:
        try:
            while not ended.is_set():
                with tables.pin() as version:
                    parts = [version[name].lookup(ids) for name in ("a", "b")]
                    parts.append(version["a"].lookup_pooled(ids, list(range(len(ids) + 1)), "mean"))
                numbers = torch.cat(parts).unique().tolist()
                if len(numbers) != 1 or not all(bool(part.found.all()) for part in parts[:2]):
                    faults.append(f"one request read {numbers}")
                seen.update(numbers)
        except Exception as error:
            faults.append(repr(error))

    with serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001)) as tables:
        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        for number in range(1, count):
            save(number)
        newest = (ckpt / LATEST).read_text().strip()
        until(lambda: tables.pin().name == newest)
        until(lambda: float(count - 1) in seen or bool(faults))
        ended.set()
        for asker in askers:
            asker.join()
        assert not faults
        assert tables.stats().failed_polls == 0


# ---- ids without a row


def test_what_ids_without_a_row_read_is_chosen(ckpt: Path) -> None:
    table, _, _ = two_saves(ckpt)
    asked = [3, 1000, -5]
    wanted = {
        "zeros": torch.zeros(2, 4),
        "initial": table.read_rows(asked[1:]).weights,
        None: table.read_rows(asked[1:]).weights,
        0.25: torch.full((2, 4), 0.25),
    }
    for missing, want in wanted.items():
        with serving.open(ckpt, missing=missing) as tables, tables.pin() as version:  # type: ignore[arg-type]
            rows = version["item"].lookup(asked)
            assert rows.found.tolist() == [True, False, False]
            assert torch.equal(rows, torch.cat([torch.full((1, 4), 3.0), want]))
            pooled = version["item"].lookup_pooled(asked, [0, 3], "sum")
            torch.testing.assert_close(pooled[0], rows.sum(0))
            assert tables.stats().missing == 4
    with pytest.raises(ConfigError, match="missing="):
        serving.open(ckpt, missing="nothing")  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="shared row"):
        serving.open(ckpt, missing="shared")


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"unseen": "zeros"}, 0.0),
        ({"admission": admission.Count(3), "not_admitted": 0.25}, 0.25),
        ({"admission": admission.Count(3)}, 0.0),
    ],
)
def test_ids_without_a_row_read_what_the_trainers_evaluation_reads(
    ckpt: Path, settings: dict[str, Any], value: float
) -> None:
    table = embedding(**settings)
    table.import_rows([7], [[1.0] * 4])
    Saver(0).save(table, ckpt)
    asked = torch.tensor([7, 8])
    table.eval()
    with serving.open(ckpt) as tables, tables.pin() as version, torch.no_grad():
        rows = version["item"].lookup(asked)
        assert rows.tolist() == [[1.0] * 4, [value] * 4] == table(asked).tolist()


def test_ids_that_were_refused_a_row_read_the_shared_one(ckpt: Path) -> None:
    table = embedding(admission=admission.Count(3), not_admitted="shared")
    for _ in range(3):
        update(table(torch.tensor([7])))
    update(table(torch.tensor([8, 9])))
    Saver(0).save(table, ckpt)
    table.eval()
    asked = torch.tensor([7, 8, 4711])
    for missing in (None, "shared"):
        with serving.open(ckpt, missing=missing) as tables, tables.pin() as version:  # type: ignore[arg-type]
            rows = version["item"].lookup(asked)
            assert rows.found.tolist() == [True, False, False]
            with torch.no_grad():
                assert torch.equal(rows, table(asked))
            assert bool(rows[1].any())


# ---- staleness


def test_what_was_published_long_ago_is_told_or_raises(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    os.utime(ckpt / first / "manifest.json", (1e9, 1e9))
    kept = serving.Follow(poll_seconds=3600, max_staleness_seconds=300)
    with serving.open(ckpt, follow=kept) as tables:
        assert value_of(tables.pin()) == 1.0
        assert tables.stats().staleness_seconds > 1e8
        assert tables.stats().is_stale
        assert tables.pin().published == 1e9
    refused = serving.Follow(poll_seconds=3600, max_staleness_seconds=300, on_stale="raise")
    with serving.open(ckpt, follow=refused) as tables:
        with pytest.raises(StaleError, match=first):
            tables.pin()
        publish(table, saver, ckpt, 20.0)
        tables.poll()
        assert value_of(tables.pin()) == 20.0
        assert tables.stats().staleness_seconds < 300
        assert not tables.stats().is_stale


@pytest.mark.parametrize(
    "wrong",
    [
        {"poll_seconds": 0},
        {"poll_seconds": "1s"},
        {"max_staleness_seconds": -1},
        {"on_stale": "wait"},
        {"on_stale": "raise"},
        {"poll_seconds": float("nan")},
    ],
)
def test_a_follow_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Follow"):
        serving.Follow(**wrong)


# ---- what happens to the directory


def test_a_linked_checkpoint_is_refused_with_the_command_that_helps(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with embedding(tiers=ssd_tiers(tmp_path / "ssd")) as table:
        table.import_rows([1, 2], [[1.0] * 4, [2.0] * 4])
        assert Saver(0).save(table, ckpt, linked=True).kind == "snapshot"
    with pytest.raises(EmbCacheError, match="embcache compact") as refused:
        serving.open(ckpt)
    wanted = str(refused.value).split("embcache compact ")[1].split()[0].strip("`;:,.")
    assert Path(wanted) == ckpt
    command(capsys, "compact", wanted)
    with serving.open(ckpt) as tables:
        assert value_of(tables.pin(), 2) == 2.0


def test_a_directory_that_is_removed_is_served_on(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        publish(table, saver, ckpt, 20.0)
        tables.poll()
        want = contents(table)
        shutil.rmtree(ckpt)
        assert served(tables.pin(), list(range(12))) == want
        with pytest.raises(EmbCacheError):
            tables.poll()
        assert served(tables.pin(), list(range(12))) == want
        stats = tables.stats()
        assert stats.failed_polls == 1
        assert stats.last_error is not None


def test_retention_of_the_trainer_takes_nothing_away(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        version = tables.pin()
        for value in (20.0, 30.0):
            table.import_rows([1], [[value] * 4])
            saver.save(table, ckpt, keep=1)
        assert len(list(ckpt.glob("0*-*"))) == 1
        assert served(version, [1, 2, 3]) == {1: [1.0] * 4, 2: [2.0] * 4, 3: [3.0] * 4}
        tables.poll()
        assert value_of(tables.pin()) == 30.0


def test_a_directory_that_cannot_be_written_is_served_from_memory(ckpt: Path) -> None:
    two_saves(ckpt)
    # In a user's namespace the directory is mounted read-only: root writes wherever it is allowed to read otherwise.
    script = f"""
from torchrec_embcache import serving
with serving.open({str(ckpt)!r}) as tables:
    stats = tables.stats()
    print(tables.pin()["item"].lookup([3]).tolist(), stats.shared_index_bytes, stats.private_bytes > 0)
"""
    mount = f'mount --bind {ckpt} {ckpt} && mount -o remount,ro,bind {ckpt} && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, script], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"a directory cannot be mounted read-only here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[3.0, 3.0, 3.0, 3.0]] 0 True\n"
    assert not list(ckpt.rglob("serve.idx"))
    with serving.open(ckpt) as tables:
        assert tables.stats().shared_index_bytes > 0
        assert list(ckpt.rglob("serve.idx"))


def test_memory_of_its_own_is_bounded(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    with serving.open(ckpt, host_bytes="64KiB") as tables:
        ids = list(range(10_000, 30_000))
        table.import_rows(ids, torch.ones(len(ids), 4))
        saver.save(table, ckpt, incremental=True, keep=5)
        # Where the index of all can be shared, it takes the place of what would be held here.
        tables.poll()
        assert tables.stats().private_bytes <= 64 << 10
        assert bool(tables.pin()["item"].lookup(ids).found.all())
    for wrong in ("a lot", -1, True):
        with pytest.raises(ConfigError, match="host_bytes"):
            serving.open(ckpt, host_bytes=wrong)
    assert first
    assert issubclass(HostMemoryError, EmbCacheError)


def test_a_damaged_delta_leaves_the_old_version_serving(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        second = publish(table, saver, ckpt, 20.0)
        (file,) = (ckpt / second).rglob("*.safetensors")
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], bytes([*whole[:-1], whole[-1] ^ 1]), b""):
            file.write_bytes(damaged)
            with pytest.raises(CorruptionError):
                tables.poll()
            assert tables.pin().name == first
            assert value_of(tables.pin()) == 1.0
        stats = tables.stats()
        assert stats.failed_polls == 3
        assert file.name in (stats.last_error or "")
        file.write_bytes(whole)
        assert tables.poll() == second
        assert tables.stats().last_error is None
        assert value_of(tables.pin()) == 20.0


@pytest.mark.parametrize("what", ["manifest.json", "0-of-1.json", LATEST])
def test_a_damaged_manifest_leaves_the_old_version_serving(ckpt: Path, what: str) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        second = publish(table, saver, ckpt, 20.0)
        file = ckpt / LATEST if what == LATEST else ckpt / second / what
        whole = file.read_bytes()
        file.write_bytes(whole[:-7])
        with pytest.raises(EmbCacheError):
            tables.poll()
        assert value_of(tables.pin()) == 1.0
        file.write_bytes(whole)
        assert tables.poll() == second


def test_a_delta_that_is_missing_from_a_chain_leaves_the_old_version_serving(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        second = publish(table, saver, ckpt, 20.0)
        third = publish(table, saver, ckpt, 30.0)
        (ckpt / second).rename(ckpt / "elsewhere")
        with pytest.raises(EmbCacheError):
            tables.poll()
        assert value_of(tables.pin()) == 1.0
        (ckpt / "elsewhere").rename(ckpt / second)
        assert tables.poll() == third
        assert value_of(tables.pin()) == 30.0


def test_checkpoints_that_go_back_are_not_taken_up(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0)
    with serving.open(ckpt) as tables:
        (ckpt / LATEST).write_text(f"{first}\n")
        with pytest.raises(MismatchError, match="not after"):
            tables.poll()
        assert tables.pin().name == second


def test_a_damaged_index_is_made_anew(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_saves(ckpt)
    command(capsys, "index", ckpt)
    (index,) = ckpt.rglob("serve.idx")
    whole = index.read_bytes()
    for damaged in (whole[: len(whole) // 2], bytes([*whole[:-1], whole[-1] ^ 255]), b""):
        index.write_bytes(damaged)
        with serving.open(ckpt) as tables:
            assert served(tables.pin(), list(range(12))) == {n: [float(n)] * 4 for n in range(1, 10)}


def test_nothing_to_serve_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(PathError):
            serving.open(path)
    with pytest.raises(ConfigError, match="follow="):
        serving.open(tmp_path, follow=1)  # type: ignore[arg-type]


# ---- other processes


FORKED = """
import os, sys
from torchrec_embcache import Saver, serving
sys.path.insert(0, {tests!r})
from test_serving import publish, two_saves, until, value_of
from pathlib import Path

ckpt = Path({ckpt!r})
table, saver, _ = two_saves(ckpt)
tables = serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001))
held = tables.pin()
child = os.fork()
if child == 0:
    ended = 1
    try:
        assert value_of(held) == 1.0 == value_of(tables.pin())
        until(lambda: value_of(tables.pin()) == 20.0)
        assert value_of(held) == 1.0
        tables.close()
        ended = 0
    finally:
        os._exit(ended)
publish(table, saver, ckpt, 20.0)
_, status = os.waitpid(child, 0)
until(lambda: value_of(tables.pin()) == 20.0)
tables.close()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_serves_and_follows_too(ckpt: Path) -> None:
    script = FORKED.format(tests=str(Path(__file__).parent), ckpt=str(ckpt))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"


def test_tables_say_that_they_cannot_be_pickled_and_are_shared_by_copies(ckpt: Path) -> None:
    import copy
    import pickle

    two_saves(ckpt)
    with serving.open(ckpt) as tables:
        with pytest.raises(StateError, match="serving.open"):
            pickle.dumps(tables)
        assert copy.deepcopy([tables])[0] is tables


# ---- arguments


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1.5]),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        torch.tensor([1, 2], device="meta"),
        torch.tensor([1, 2]).to_sparse(),
        [[1], [2]],
        [1.5],
        ["1"],
        [2**70],
        None,
        "12",
        7,
        {1: 2},
    ],
    ids=repr,
)
def test_ids_that_are_none_are_refused(ckpt: Path, ids: Any) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        for use in (lambda: version["item"].lookup(ids), lambda: version["item"].lookup_pooled(ids, [0, 1])):
            with pytest.raises(InputError):
                use()


@pytest.mark.parametrize(
    "offsets",
    [[], [0], [1, 3], [0, 2], [0, 4], [0, 2, 1, 3], [0, -1, 3], [0, 2**40, 3], [[0, 3]], [0.0, 3.0], None],
    ids=repr,
)
def test_offsets_that_do_not_fit_are_refused(ckpt: Path, offsets: Any) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version, pytest.raises(InputError, match="offsets"):
        version["item"].lookup_pooled([1, 2, 3], offsets)


def test_weights_and_poolings_that_do_not_fit_are_refused(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        item = version["item"]
        for weights in (torch.ones(2), torch.ones(3, dtype=torch.float64), [1.0, 1.0, 1.0], torch.ones(3, 1)):
            with pytest.raises(InputError, match="per_sample_weights"):
                item.lookup_pooled([1, 2, 3], [0, 3], "sum", weights)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="pooling"):
            item.lookup_pooled([1, 2, 3], [0, 3], "max")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="sum"):
            item.lookup_pooled([1, 2, 3], [0, 3], "mean", torch.ones(3))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_are_those_of_torch(ckpt: Path, pooling: Any) -> None:
    table, _, _ = two_saves(ckpt)
    dice = random.Random(1)
    for _ in range(10):
        bags = [dice.choices(range(12), k=dice.randrange(6)) for _ in range(dice.randrange(1, 6))]
        ids = [row_id for bag in bags for row_id in bag]
        offsets = [sum(map(len, bags[:place])) for place in range(len(bags) + 1)]
        weights = torch.rand(len(ids)) if pooling == "sum" else None
        with serving.open(ckpt) as tables, tables.pin() as version:
            got = version["item"].lookup_pooled(ids, offsets, pooling, weights)
        rows = table.read_rows(range(12)).weights
        want = torch.nn.functional.embedding_bag(
            torch.tensor(ids, dtype=torch.int64),
            rows,
            torch.tensor(offsets),
            mode=pooling,
            include_last_offset=True,
            per_sample_weights=weights,
        )
        torch.testing.assert_close(got, want)


def test_ids_come_in_every_form(ckpt: Path) -> None:
    import numpy as np

    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        for ids in (
            [1, 3],
            (1, 3),
            range(1, 4, 2),
            np.array([1, 3], np.uint64),
            np.array([1, 9, 3])[::2],
            torch.tensor([1, 3], dtype=torch.int32),
            torch.tensor([1, 9, 3])[::2],
        ):
            rows = version["item"].lookup(ids)
            assert rows.tolist() == [[1.0] * 4, [3.0] * 4]
        empty = version["item"].lookup([])
        assert (empty.shape, empty.found.shape, empty.dtype) == ((0, 4), (0,), torch.float32)
        assert version["item"].lookup_pooled([], [0, 0, 0]).tolist() == [[0.0] * 4] * 2
        assert version["item"].lookup([1] * 5000).unique().tolist() == [1.0]


def test_rows_are_tensors(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        rows = version["item"].lookup([1, 77])
        assert isinstance(rows, torch.Tensor)
        assert type(rows * 2) is type(rows[0]) is type(rows.clone()) is torch.Tensor
        assert repr(rows).startswith("Rows(")
        first = version["item"].lookup([2])
        version["item"].lookup([3])
        assert first[0, 0] == 2.0, "each has memory of its own"


def test_tables_are_found_by_name_or_by_module_and_name(ckpt: Path) -> None:
    model = torch.nn.ModuleDict({"a": embedding(name="item"), "b": embedding(name="item"), "c": embedding(name="user")})
    for place, table in enumerate(model.values()):
        table.import_rows([1], [[float(place)] * 4])  # type: ignore[operator]
    Saver(0).save(model, ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        assert [(table.module, table.name, table.dim, table.rows) for table in version.tables] == [
            ("a", "item", 4, 1),
            ("b", "item", 4, 1),
            ("c", "user", 4, 1),
        ]
        read = [float(version[name].lookup([1])[0, 0]) for name in ("a/item", "b/item", "c/user", "user")]
        assert read == [0.0, 1.0, 2.0, 2.0]
        assert version["user"] is version["user"]
        for name in ("item", "nothing", "d/item", ""):
            with pytest.raises(MismatchError, match="a/item, b/item, c/user"):
                version[name]
        with pytest.raises(InputError, match="named by text"):
            version[1]  # type: ignore[index]


# ---- the command


def command(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """What a command says."""
    assert main([str(argument) for argument in arguments]) == status
    said = capsys.readouterr()
    return said.out + said.err


def test_the_command_makes_the_index_that_is_served(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0)
    made = json.loads(command(capsys, "index", str(ckpt), "--at", "1", "--json"))
    assert made == {"path": str(ckpt), "checkpoint": first, "rows": 9, "bytes": made["bytes"], "was_there": False}
    assert (ckpt / first / "serve.idx").is_file()
    assert command(capsys, "index", str(ckpt / second)).startswith(f"{second} in {ckpt} is indexed: 9 rows, ")
    assert command(capsys, "index", str(ckpt)).startswith(f"{second} in {ckpt} is indexed already: 9 rows, ")
    stamps = {path: path.stat().st_mtime_ns for path in ckpt.rglob("serve.idx")}
    with serving.open(ckpt) as tables:
        assert value_of(tables.pin()) == 20.0
    assert {path: path.stat().st_mtime_ns for path in ckpt.rglob("serve.idx")} == stamps


def test_the_command_says_what_is_wrong(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_saves(ckpt)
    assert "9999" in command(capsys, "index", str(ckpt), "--at", "9999", status=3)
    assert "nothing" in command(capsys, "index", str(ckpt / "nothing"), status=3)
    assert not (ckpt / "nothing").exists()


# ---- names


def in_stub(name: str) -> set[str]:
    stub = Path(_native.__file__).parent / "_native_serving.pyi"
    (found,) = (
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {inner.target.id for inner in found.body if isinstance(inner, ast.AnnAssign)}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["IndexMade", "ServedTable", "ServedVersion", "ServingStats"])
def test_what_the_stub_says_of_a_class_is_there(name: str) -> None:
    kind = getattr(_native, name)
    assert {member for member, value in vars(kind).items() if inspect.isdatadescriptor(value)} == in_stub(name)


def test_a_counter_has_one_name_everywhere(ckpt: Path) -> None:
    two_saves(ckpt)
    assert [field.name for field in fields(serving.ServingStats)] == [*in_order("ServingStats"), "is_stale"]
    with serving.open(ckpt) as tables:
        stats = tables.stats()
    assert (stats.rows, stats.polls, stats.swaps, stats.lookups) == (9, 0, 0, 0)


def in_order(name: str) -> list[str]:
    stub = (Path(_native.__file__).parent / "_native_serving.pyi").read_text()
    body = stub.split(f"class {name}:")[1].split("@final")[0]
    return [line.split(":")[0].strip() for line in body.splitlines() if ": " in line and "def " not in line]


def test_serving_needs_no_torchrec(ckpt: Path) -> None:
    two_saves(ckpt)
    script = (
        "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        "from torchrec_embcache import serving\n"
        f"with serving.open({str(ckpt)!r}) as tables, tables.pin() as version:\n"
        "    print(version['item'].lookup([3]).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[[3.0, 3.0, 3.0, 3.0]]\n", done.stderr
