"""Served tables give the values of the trainer's tables at each save, version by version."""

import gc
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import embedding, update
from processes import World, process_group
from serving_cases import LATEST, Rows, contents, followers, publish, served, two_saves, until, value_of
from tables import EXTREME_IDS
from torchrec_embcache import Saver, admission, cache_modules, serving
from torchrec_embcache.eviction import L2Norm, Policy, Ttl
from torchrec_embcache.exceptions import ConfigError, MismatchError, PathError, StaleError, StateError
from torchrec_models import IDS, MIXED, Model, Settings, batches, rows_of, sharded
from torchrec_models import together as merged
from torchrec_models import train as train_model

WIDTHS = {"ta": 16, "tb": 8, "tc": 4}
ASKED = sorted({*IDS, *EXTREME_IDS, 1, 2, 3, 99, 160, -(2**40)})


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


@pytest.mark.slow
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
            with pytest.raises(StateError, match="unpinned"):
                use()
        with pytest.raises(StateError, match="unpinned"), version:
            pass
        kept = tables.pin()
    assert value_of(kept) == 1.0, "a pin outlives the tables"
    for use in (tables.pin, tables.poll, tables.rollback, tables.stats):
        with pytest.raises(StateError, match="closed"):
            use()
    tables.close()
    kept.close()
    assert repr(tables).endswith(", closed)")
    assert repr(kept).endswith(", unpinned)")


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
    until(lambda: not followers())


def test_requests_come_before_the_thread_that_follows(ckpt: Path) -> None:
    two_saves(ckpt)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001)) as tables:
        until(lambda: tables.stats().polls > 0)
        until(lambda: len(followers()) == 1)
        (follower,) = followers()
        assert os.getpriority(os.PRIO_PROCESS, follower) == max(own, 10)
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_closing_does_not_wait_for_the_next_look(ckpt: Path) -> None:
    two_saves(ckpt)
    for _ in range(100):  # also where the thread has hardly begun
        with serving.open(ckpt, follow=serving.Follow(poll_seconds=100_000)) as tables:
            assert value_of(tables.pin()) == 1.0
    until(lambda: not followers())


@pytest.mark.slow
def test_requests_in_threads_see_one_version_whole_while_versions_swap(ckpt: Path) -> None:
    """Each save gives every row of two tables its own number. No request may see two numbers."""
    count, ids = 40, list(range(300))
    model = torch.nn.ModuleDict({"a": embedding(name="a"), "b": embedding(name="b")})
    saver = Saver(0)

    def save(number: int) -> None:
        for table in model.values():
            table.import_rows(ids, [[float(number)] * 4] * len(ids))  # type: ignore[operator]
        saver.save(model, ckpt, incremental=number % 10 != 0, keep=9999)

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
    with pytest.raises(MismatchError, match="OOV row"):
        serving.open(ckpt, missing="oov")


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"missing": "zeros"}, 0.0),
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
    table = embedding(admission=admission.Count(3), not_admitted="oov")
    for _ in range(3):
        update(table(torch.tensor([7])))
    update(table(torch.tensor([8, 9])))
    Saver(0).save(table, ckpt)
    table.eval()
    asked = torch.tensor([7, 8, 4711])
    for missing in (None, "oov"):
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
        assert tables.pin().published_at == 1e9
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


def test_what_nobody_holds_is_freed_without_the_collector(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    gc.disable()
    try:
        with serving.open(ckpt) as tables:
            for value in range(5):
                publish(table, saver, ckpt, float(value))
                tables.poll()
                assert tables.pin()["item"].lookup([1])[0, 0] == value
            assert tables.stats().versions == 2, "the one before is kept for a rollback"
    finally:
        gc.enable()


def test_a_version_that_another_thread_let_go_is_passed_over(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables:
        model = serving.replace(torch.nn.ModuleDict({"item": embedding()}), tables, modules={"item": ""})
        version = tables.pin().__enter__()
        thread = threading.Thread(target=version.close)
        thread.start()
        thread.join()
        assert model["item"](torch.tensor([1])).tolist() == [[1.0] * 4]
        version.__exit__(None, None, None)
