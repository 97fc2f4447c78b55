"""Helpers of the serving tests: a small saved table, and reads of it."""

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lifecycle_cases import embedding
from torchrec_embcache import EmbCacheEmbedding, Saver, serving
from torchrec_embcache.cli import main

LATEST = "LATEST"
PRECISIONS = ["fp32", "fp16", "bf16", "int8"]
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


def two_saves(ckpt: Path) -> tuple[EmbCacheEmbedding, Saver, str]:
    """A saved table with rows 1 to 9, whose weights equal their ids."""
    table, saver = embedding(), Saver(0)
    table.import_rows(list(range(1, 10)), [[float(row_id)] * 4 for row_id in range(1, 10)])
    return table, saver, saver.save(table, ckpt, keep=5).checkpoint


def publish(table: EmbCacheEmbedding, saver: Saver, ckpt: Path, value: float, *, full: bool = False) -> str:
    """Saves row 1 with another value."""
    table.import_rows([1], [[value] * 4])
    return saver.save(table, ckpt, incremental=not full, keep=5, full_every=None).checkpoint


def value_of(version: serving.Version, row_id: int = 1) -> float:
    return float(version["item"].lookup([row_id])[0, 0])


def until(holds: Callable[[], bool]) -> None:
    """Polls until `holds()` is true."""
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline, "it never comes true"
        time.sleep(0.001)


def ended_by_ctrl_c(work: Callable[[], object]) -> None:
    """Runs `work`, which waits until Ctrl-C comes, and checks that it raises `KeyboardInterrupt`."""

    def interrupt(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
        work()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def followers() -> list[int]:
    """The ids of the threads that follow. A thread that was joined may be listed for a moment."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if (task / "comm").read_text().strip() == "embcache-follow":
                found.append(int(task.name))
    return found


def command(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """The output of a command."""
    assert main([str(argument) for argument in arguments]) == status
    said = capsys.readouterr()
    return said.out + said.err


def convert(capsys: pytest.CaptureFixture[str], ckpt: Path, precision: str, to: str = "served") -> Path:
    """Converts the latest checkpoint. Returns the path of the result."""
    target = ckpt.parent / to
    command(capsys, "convert", ckpt, target, "--to", "serving", "--precision", precision)
    return target
