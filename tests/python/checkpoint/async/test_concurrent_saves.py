"""Saves during other work of the process: loads of the same directory, closing tables, forks, and interpreter exit."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes import Child
from saver_cases import root
from tables import Contents, make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import _native, optimizers
from torchrec_embcache.checkpoint import Progress, Saver
from torchrec_embcache.checkpoint.recis import _writer
from torchrec_embcache.exceptions import CorruptionError, PathError, StateError
from torchrec_embcache.serialize import Loader
from torchrec_embcache.serialize import Saver as BlockSaver

pytestmark = pytest.mark.slow

__all__ = ["root"]  # the fixture

BATCHES = random_batches(6, bags=8, ids=60, seed=9)
SECONDS = 600.0


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


# ---- loads beside saves


@pytest.mark.parametrize("incremental", [False, True])
def test_checkpoint_in_use_stays_until_the_save_after_the_load(root: Path, incremental: bool) -> None:
    bag, other = make_bag(), make_bag()
    train(bag, BATCHES[:2])
    first = Saver(0).save(bag, root)
    if incremental:
        train(bag, BATCHES[2:3])
        Saver(0).save(bag, root, incremental=True)
    read, expected = checkpoints(root), Contents.of(bag)
    step(bag, BATCHES[3])
    newer = []

    def save_meanwhile(_progress: Progress) -> None:
        if not newer:
            newer.append(Saver(0).save(bag, root).checkpoint)

    report = Saver(0).load(other, root, progress=save_meanwhile)
    assert report.checkpoint == read[-1]
    assert Contents.of(other) == expected
    assert checkpoints(root) == [*read, *newer], "what was read was not removed"
    last = Saver(0).save(bag, root)
    assert checkpoints(root) == [last.checkpoint]
    assert first.checkpoint in read


def test_load_whose_checkpoint_is_replaced_takes_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bag, other = make_bag(), make_bag()
    train(bag, BATCHES[:2])
    Saver(0).save(bag, root)
    reader, saves = _native.CheckpointReader, []

    def overtaken(path: str, name: str) -> _native.CheckpointReader:
        if len(saves) < 3:
            step(bag, BATCHES[3])
            saves.append(Saver(0).save(bag, root).checkpoint)
        return reader(path, name)

    monkeypatch.setattr(_native, "CheckpointReader", overtaken)
    report = Saver(0).load(other, root)
    assert report.checkpoint == saves[-1]
    assert Contents.of(other) == Contents.of(bag)
    # A load of a named checkpoint loads that one or nothing.
    saves.clear()
    with pytest.raises(PathError, match="there is no checkpoint .*keep="):
        Saver(0).load(other, root, checkpoint=report.checkpoint)
    assert other.table._unusable is None


def save_again_and_again(say: Callable[[Any], None], path: str, times: int) -> None:
    bag = make_bag(embedding_dim=16)
    for turn in range(times):
        bag.import_rows(torch.arange(3000), torch.full((3000, 16), float(turn)))
        Saver(0).save(bag, path)
        say(turn)


@pytest.mark.slow
def test_every_load_during_saves_finds_a_whole_checkpoint(root: Path) -> None:
    child = Child(save_again_and_again, str(root), 40)
    turn, loads = child.hear(), 0
    bag = make_bag(embedding_dim=16)
    while turn < 39:
        Saver(0).load(bag, root)
        weights = bag.read_rows(torch.arange(3000)).weights
        assert torch.equal(weights, torch.full_like(weights, float(weights[0, 0])))
        assert int(weights[0, 0]) >= turn, "older than one that was published before the load"
        loads += 1
        turn = child.hear()
    assert child.ended() == ([], 0)
    assert loads == 39
    Saver(0).save(bag, root)
    assert len(checkpoints(root)) == 1


# ---- reads that fail


def test_unreadable_rows_under_a_block_load_poison_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_writer, "RUN_BYTES", 4_000)
    source = make_bag()
    ids = torch.arange(20_000)
    source.import_rows(ids, torch.ones(20_000, 4))
    BlockSaver(path=str(tmp_path / "blocks"), hashtables={"item": source}).save()
    bag = make_bag(tiers=ssd_tiers(tmp_path / "ssd", host_bytes="512KiB"))
    bag.import_rows(ids, torch.zeros(20_000, 4))
    bag.flush()
    # The read of one record fails, when others have been loaded.
    segments = sorted((tmp_path / "ssd").rglob("*.seg"))
    assert segments
    for segment in segments[:1]:
        data = np.memmap(segment, np.uint8, "r+")
        data[len(data) // 3] ^= 1
        data.flush()

    def some_slots(info: Any) -> Any:
        return {to: {name: ["id", "embedding"] for name in sources} for to, sources in info.items()}

    version = bag.table._native_table.version()
    with pytest.raises(CorruptionError):
        Loader(str(tmp_path / "blocks"), {"item": bag}, filter_func=some_slots, strict=False).load()
    assert bag.table._native_table.version() != version, "rows were loaded before"
    with pytest.raises(StateError, match="did not succeed"):
        bag.read_rows(ids[:1])
    with pytest.raises(StateError, match="did not succeed"):
        bag(ids[:1], ids[:1] * 0)


# ---- the end of a table, of a worker, of the interpreter

BEFORE = """
import atexit, faulthandler, linecache, os, signal, sys, threading
faulthandler.dump_traceback_later(240, exit=True)
path, how = sys.argv[1], sys.argv[2]

def last():
    report = Saver(0).save_async(bag, path + "/ck").result()
    assert report.rows == len(bag) > 0

if how == "early":
    atexit.register(last)
import torch
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers, _native
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.serialize import Saver as BlockSaver
bag = EmbCacheEmbeddingBag(
    name="item", embedding_dim=4, mode="sum", tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.1)
)
bag(torch.arange(500).reshape(100, 5)).sum().backward()
"""


def run(script: str, path: Path, how: str = "") -> str:
    """The output of a script in a process of its own, which must end well. A script that hangs ends itself."""
    path.chmod(0o750)
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(script), str(path), how],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_close_from_the_progress_callback_of_its_save_fails(tmp_path: Path) -> None:
    out = run(
        """
        future = Saver(0).save_async(bag, path + "/ck", progress=lambda _: bag.close())
        error = future.exception()
        assert isinstance(error, StateError) and "close after its future is done" in str(error), error
        bag(torch.arange(5).reshape(1, 5)).sum().backward()
        assert Saver(0).save_async(bag, path + "/ck").result().rows == len(bag) == 500
        bag.close()
        print("closed")
        """,
        tmp_path,
    )
    assert out.strip() == "closed"


@pytest.mark.slow
def test_interrupted_close_stops_waiting_and_can_be_repeated(tmp_path: Path) -> None:
    """Ctrl-C while `close()` waits for a save."""
    out = run(
        """
        go = threading.Event()
        _native.work_in_background = go.wait  # the save writes nothing until then
        armed = True

        def interrupt(_signal, _frame):
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        main = threading.main_thread().ident

        def watch():
            # When the thread that closes is within the core's call.
            while True:
                frame = sys._current_frames()[main]
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                if frame.f_code.co_name == "close" and "native.close()" in line:
                    signal.pthread_kill(main, signal.SIGINT)
                    return

        future = Saver(0).save_async(bag, path + "/ck")
        threading.Thread(target=watch).start()
        try:
            bag.close()
            print("was not interrupted")
        except KeyboardInterrupt as error:
            kept = error
        assert not future.done()
        bag(torch.arange(5).reshape(1, 5)).sum().backward()
        go.set()
        bag.close()
        print(future.result().rows)
        """,
        tmp_path,
    )
    assert out.strip() == "500"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["early", "late"])
def test_a_save_that_an_atexit_function_begins_is_completed(how: str, tmp_path: Path) -> None:
    run("\nif how == 'late':\n    atexit.register(last)\n", tmp_path, how)
    again = make_bag(mode="sum", optimizer=optimizers.SGD(lr=0.1))
    Saver(0).load(again, tmp_path / "ck", strict=True)
    assert len(again) == 500


@pytest.mark.slow
def test_worker_forked_in_a_block_save_does_not_block_later_ones(tmp_path: Path) -> None:
    out = run(
        """
        from torchrec_embcache.checkpoint.recis._session import RecisSession

        children = []

        def fork():
            pid = os.fork()
            if pid == 0:
                faulthandler.cancel_dump_traceback_later()
                while True:
                    signal.pause()
            children.append(pid)

        def forking(session, *given):
            fork()
            open_files(session, *given)

        open_files, RecisSession.open_files = RecisSession.open_files, forking
        for _ in range(3):
            BlockSaver(0, 1, 2, path + "/blocks", {"item": bag}).save()
        assert all(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children), "they live"
        print(len([name for name in os.listdir(path + "/blocks") if name.startswith("blocks-")]))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        """,
        tmp_path,
    )
    assert out.strip() == "1", "saves before the last are removed"
