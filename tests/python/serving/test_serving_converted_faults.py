"""A served conversion follows its trainer through damage, forks, eviction, removed checkpoints, and two ranks."""

import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import HALF_LIFE, come_again, embedding, ids_of, update
from processes import World
from project_paths import SUPPORT
from serving_cases import PRECISIONS, contents, convert, publish, served, two_saves, until, value_of
from torchrec_embcache import Saver, serving
from torchrec_embcache.eviction import All, Keep, L2Norm, Policy, Score, Share, Ttl
from torchrec_embcache.exceptions import CorruptionError, MismatchError, PathError
from torchrec_models import IDS, MIXED, TABLES, Model, Settings, batches, rows_of, sharded, together
from torchrec_models import train as train_model

pytestmark = pytest.mark.slow


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "trained"


def bits(version: serving.Version, name: str, ids: list[int]) -> tuple[bytes, list[bool]]:
    """Returns the vectors of the ids, bit for bit, and which ids have a row."""
    rows = version[name].lookup(ids)
    return rows[:].contiguous().numpy().tobytes(), rows.found.tolist()


# ---- damage


def test_damaged_delta_is_reported_until_conversion_replaces_it(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, _ = two_saves(ckpt)
    target = convert(capsys, ckpt, "int8")
    with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt)) as tables:
        second = publish(table, saver, ckpt, 2.0)
        assert tables.poll() == second
        third = publish(table, saver, ckpt, 3.0)
        (file,) = (ckpt / third).rglob("*.safetensors")
        whole = file.read_bytes()
        for look, damaged in enumerate((whole[: len(whole) // 2], bytes([*whole[:-1], whole[-1] ^ 1]), b""), 1):
            file.write_bytes(damaged)
            for _ in range(2):
                with pytest.raises(CorruptionError, match=third):
                    tables.poll()
            stats = tables.stats()
            assert stats.failed_polls == 2 * look
            assert third in (stats.last_error or "")
            assert (tables.pin().name, value_of(tables.pin())) == (second, 2.0)
            # Whoever opens it now serves what was converted, and says why.
            with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt)) as late:
                assert third in (late.stats().last_error or "")
                assert value_of(late.pin()) == 1.0
        full = publish(table, saver, ckpt, 4.0, full=True)
        with pytest.raises(MismatchError, match=f"checkpoint {full} does not build on {second}"):
            tables.poll()
        assert value_of(tables.pin()) == 2.0
        convert(capsys, ckpt, "int8")
        assert tables.poll() is not None
        assert (value_of(tables.pin()), tables.stats().last_error) == (4.0, None)
        last = publish(table, saver, ckpt, 5.0)
        assert (tables.poll(), value_of(tables.pin())) == (last, 5.0)


# ---- forks

FORKED = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from serving_cases import publish, served, two_saves, until, value_of
from torchrec_embcache import serving
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import StateError

ckpt, target, ids = Path({ckpt!r}), Path({target!r}), list(range(12))
table, saver, _ = two_saves(ckpt)
assert main(["convert", str(ckpt), str(target), "--to", "serving", "--precision", "int8"]) == 0
second = publish(table, saver, ckpt, 2.0)
tables = serving.open(target, follow=serving.Follow(poll_seconds=0.001, source=ckpt))
held, native = tables.pin(), tables._native
assert held.name == second
before = served(held, ids)
told, tell = os.pipe()
child = os.fork()
if child == 0:
    ended = 1
    try:
        # What was opened before the fork answers as in the parent, and does not follow.
        assert served(held, ids) == before
        for refused in (native.poll, native.rollback):
            try:
                refused()
            except StateError as error:
                assert "forked" in str(error)
            else:
                raise AssertionError("it looked for a newer checkpoint")
        # What is asked now is opened anew, with its source and a thread of its own.
        assert served(tables.pin(), ids) == before
        for value in (3.0, 4.0):
            os.write(tell, b".")
            until(lambda: value_of(tables.pin()) == value)
        assert served(held, ids) == before
        assert tables.stats().failed_polls == 0
        tables.close()
        ended = 0
    except BaseException as error:
        print(repr(error), flush=True)
    finally:
        os._exit(ended)
os.close(tell)
for value in (3.0, 4.0):
    # The child has seen all that was published before, or has ended.
    os.read(told, 1)
    publish(table, saver, ckpt, value)
    until(lambda: value_of(tables.pin()) == value)
_, status = os.waitpid(child, 0)
assert served(held, ids) == before
tables.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_forked_child_answers_as_its_parent_and_reopens_source(ckpt: Path) -> None:
    script = FORKED.format(tests=str(SUPPORT), ckpt=str(ckpt), target=str(ckpt.parent / "served"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0", done.stdout + done.stderr


# ---- rules of eviction


def with_rules(policy: Policy) -> Any:
    return embedding(eviction=policy, score_half_life_steps=HALF_LIFE)


@pytest.mark.parametrize(
    "rules",
    [
        [Score(below=0.6)],
        [Keep(rows=30)],
        [Share(0.3)],
        [All([Ttl(steps=3), Score(below=1.5)])],
        [Ttl(steps=4), Score(below=0.3)],
    ],
    ids=["score", "keep", "share", "all", "any"],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_left_by_a_score_are_those_that_a_conversion_lacks(
    precision: str, rules: list[Any], ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice, saver, table = random.Random(3), Saver(0), with_rules(Policy(rules))
    for _ in range(6):
        update(table(torch.tensor(come_again(dice, 15))))
    saver.save(table, ckpt, keep=9)
    target, ever = convert(capsys, ckpt, precision), set(ids_of(table))
    with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt)) as tables:
        for save in range(4):
            for _ in range(4):
                update(table(torch.tensor(come_again(dice, 15))))
                ever |= set(ids_of(table))
            before = len(table)
            report = saver.save(table, ckpt, incremental=True, keep=9)
            assert (report.kind, tables.poll()) == ("delta", report.checkpoint)
            assert len(table) < before, "rows left"
            ids = sorted(ever)
            again = convert(capsys, ckpt, precision, f"again {save}")
            late = serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt))
            with late, serving.open(again) as converted:
                wanted = bits(converted.pin(), "item", ids)
                assert wanted[1] == [row_id in set(ids_of(table)) for row_id in ids]
                assert bits(tables.pin(), "item", ids) == wanted
                assert bits(late.pin(), "item", ids) == wanted
        assert tables.stats().last_error is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rule_by_norm_is_refused_where_weights_are_not_the_trainers(
    precision: str, ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, table = Saver(0), with_rules(Policy([L2Norm(below=2.5), Score(below=1e-3)]))
    table.import_rows([1, 2], [[1.0] * 4, [2.0] * 4])
    update(table(torch.tensor([2, 2, 2])))
    saver.save(table, ckpt, keep=9)
    target = convert(capsys, ckpt, precision)
    table.import_rows([1, 3], [[0.25] * 4, [9.0] * 4])
    update(table(torch.tensor([1, 2, 3])))
    before = ids_of(table)
    name = saver.save(table, ckpt, incremental=True, keep=9).checkpoint
    assert len(table) < len(before)
    with serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt)) as tables:
        if precision == "fp32":
            assert served(tables.pin(), [1, 2, 3]) == contents(table)
            return
        with pytest.raises(MismatchError, match=f"checkpoint {name} looks at weights.*embcache convert"):
            tables.poll()
        convert(capsys, ckpt, precision)
        assert tables.poll() is not None
        assert sorted(served(tables.pin(), [1, 2, 3])) == sorted(contents(table))


# ---- a trainer that removes what is older


def test_a_trainer_that_keeps_one_checkpoint_takes_nothing_away(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, _ = two_saves(ckpt)
    target = convert(capsys, ckpt, "fp16")
    wrong: list[Any] = []
    ended = threading.Event()
    with serving.open(target, follow=serving.Follow(poll_seconds=0.001, source=ckpt)) as tables:

        def ask() -> None:
            last = 0.0
            while not ended.is_set():
                rows = tables.pin()["item"].lookup([1, 2, 77])
                value = float(rows[0, 0])
                if rows.found.tolist() != [True, True, False] or value < last or float(rows[1, 3]) != 2.0:
                    wrong.append((last, rows[:].tolist()))
                last = value

        askers = [threading.Thread(target=ask) for _ in range(2)]
        for asker in askers:
            asker.start()
        try:
            for save in range(2, 42):
                is_full = save % 8 == 0
                table.import_rows([1], [[float(save)] * 4])
                name = saver.save(table, ckpt, incremental=not is_full, keep=1).checkpoint
                if is_full:
                    assert [path.parent.name for path in ckpt.glob("0*-*/manifest.json")] == [name]
                    convert(capsys, ckpt, "fp16")
                until(lambda save=save: value_of(tables.pin()) == save)  # type: ignore[misc]
        finally:
            ended.set()
            for asker in askers:
                asker.join()
        assert wrong == []
        rows = contents(table)
        shutil.rmtree(ckpt)
        shutil.rmtree(target)
        assert served(tables.pin(), list(range(12))) == rows
        # A forked worker, or anybody else, that opens them now is told that they are gone.
        with pytest.raises(PathError):
            serving.open(target, follow=serving.Follow(source=ckpt))


# ---- several ranks

LIVES: dict[str, Any] = {}


def begin(rank: int, world: int, path: str) -> Any:
    """Trains and saves in full. The trained model stays in this process."""
    policy = Policy([Ttl(steps=4), Score(below=0.05)])
    model = Model(Settings(options={"eviction": policy, "score_half_life_steps": HALF_LIFE}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, MIXED)
    LIVES.update(model=model, steps=batches(200, rank, world), saver=Saver())
    return go_on(rank, world, path, 4, incremental=False)


def go_on(_rank: int, _world: int, path: str, steps: int, *, incremental: bool = True) -> Any:
    """Train some steps and save. Returns the name of the checkpoint, its kind, and the rows of this rank."""
    model, batch = LIVES["model"], LIVES["steps"]
    train_model(model, [next(batch) for _ in range(steps)])
    report = LIVES["saver"].save(model, path, incremental=incremental, keep=2)
    return report.checkpoint, report.kind, rows_of(model)


def end(_rank: int, _world: int) -> None:
    """Forget what was trained."""
    LIVES.clear()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_deltas_of_two_ranks_are_followed(
    precision: str, two_ranks: World, ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = together([result[2] for result in two_ranks.run(begin, str(ckpt))])
    target = convert(capsys, ckpt, precision)
    gone = 0
    with serving.open(target, follow=serving.Follow(poll_seconds=0.01, source=ckpt)) as tables:
        modules = sorted(f"{table.module}/{table.name}" for table in tables.pin().tables)
        assert [name.rsplit("/")[-1] for name in modules] == sorted(TABLES)
        for save in range(8):
            results = two_ranks.run(go_on, str(ckpt), 1 + save % 3)
            (name, kind), rows = results[0][:2], together([result[2] for result in results])
            assert kind == "delta"
            until(lambda name=name: tables.pin().name == name)  # type: ignore[misc]
            again = convert(capsys, ckpt, precision, f"again {save}")
            late = serving.open(target, follow=serving.Follow(poll_seconds=3600, source=ckpt))
            with late, serving.open(again) as converted, tables.pin() as version:
                for table in modules:
                    wanted = bits(converted.pin(), table, IDS)
                    assert bits(version, table, IDS) == wanted
                    assert bits(late.pin(), table, IDS) == wanted
                    assert wanted[1] == [(*table.rsplit("/", 1), row_id) in rows for row_id in IDS]
            gone += len(before.keys() - rows.keys())
            before = rows
        assert (tables.stats().failed_polls, gone > 0) == (0, True)
        # Ranks save in full: that is served when it was converted, and their deltas after it.
        two_ranks.run(begin, str(ckpt))
        with pytest.raises(MismatchError, match="does not build on"):
            tables.poll()
        convert(capsys, ckpt, precision)
        name, _, _ = two_ranks.run(go_on, str(ckpt), 2)[0]
        until(lambda: tables.pin().name == name)
    two_ranks.run(end)
