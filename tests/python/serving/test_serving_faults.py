"""After any fault of the directory, of its files or of the process, a published version is served."""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lifecycle_cases import embedding
from project_paths import SUPPORT
from serving_cases import LATEST, command, contents, ended_by_ctrl_c, publish, served, two_saves, value_of
from tables import ssd_tiers
from torchrec_embcache import Saver, serving
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import (
    ConfigError,
    CorruptionError,
    EmbCacheError,
    MismatchError,
    PathError,
    StateError,
)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ckpt"


# ---- what happens to the directory


def test_a_linked_checkpoint_is_refused_with_the_command_that_helps(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with embedding(tiers=ssd_tiers(tmp_path / "ssd")) as table:
        table.import_rows([1, 2], [[1.0] * 4, [2.0] * 4])
        assert Saver(0).save(table, ckpt, linked=True).kind == "linked"
    with pytest.raises(MismatchError, match="embcache compact") as refused:
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


@pytest.mark.slow
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
    table, saver, _ = two_saves(ckpt)
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


def test_missing_delta_of_a_chain_leaves_the_old_version(ckpt: Path) -> None:
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


def command_index(ckpt: Path) -> None:
    """Runs `embcache index`."""
    main(["index", str(ckpt)])


@pytest.mark.parametrize("work", [serving.open, command_index])
def test_ctrl_c_ends_the_wait_for_an_index(work: Callable[[Path], object], ckpt: Path) -> None:
    """Another process that makes the index holds the checkpoint meanwhile."""
    _, _, name = two_saves(ckpt)
    with (ckpt / name / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended_by_ctrl_c(lambda: work(ckpt))
    assert not list(ckpt.glob("*/serve.idx*"))
    with serving.open(ckpt) as tables, tables.pin() as version:
        assert value_of(version) == 1.0


def test_nothing_to_serve_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(PathError):
            serving.open(path)
    with pytest.raises(ConfigError, match="follow="):
        serving.open(tmp_path, follow=1)  # type: ignore[arg-type]


# ---- other processes


FORKED = """
import os, sys, traceback
from torchrec_embcache import Saver, serving
sys.path.insert(0, {tests!r})
from serving_cases import publish, two_saves, until, value_of
from pathlib import Path

ckpt = Path({ckpt!r})
table, saver, _ = two_saves(ckpt)
tables = serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001))
held = tables.pin()
has_begun, begins = os.pipe()
child = os.fork()
if child == 0:
    ended = 1
    try:
        assert value_of(held) == 1.0 == value_of(tables.pin())
        os.write(begins, b"1")
        until(lambda: value_of(tables.pin()) == 20.0)
        assert value_of(held) == 1.0
        tables.close()
        ended = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(ended)
os.close(begins)
os.read(has_begun, 1)  # the child has looked before there is anything newer, or has ended
publish(table, saver, ckpt, 20.0)
_, status = os.waitpid(child, 0)
until(lambda: value_of(tables.pin()) == 20.0)
tables.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_child_serves_and_follows_too(ckpt: Path) -> None:
    script = FORKED.format(tests=str(SUPPORT), ckpt=str(ckpt))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n", done.stderr


def test_tables_cannot_be_pickled_and_copies_share_them(ckpt: Path) -> None:
    import copy
    import pickle

    two_saves(ckpt)
    with serving.open(ckpt) as tables:
        with pytest.raises(StateError, match="serving.open"):
            pickle.dumps(tables)
        assert copy.deepcopy([tables])[0] is tables
