"""End and continuation of the delivery of evicted rows: Ctrl-C in `close()`, loads, dropped tables, forks."""

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from interrupts import Lines, interrupt_once, is_interrupt, stopped
from lifecycle_cases import embedding, update
from processes import Child
from project_paths import SUPPORT
from tables import ssd_tiers
from torchrec_embcache import EmbCacheEmbedding, EvictedRows, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Policy, Ttl
from torchrec_embcache.exceptions import EvictionHookError, StateError

# Long enough for any machine. It only keeps a hang from lasting for ever.
MOST_S = 600


class Hook:
    """Says which ids it is told of, and waits for the gate first."""

    def __init__(self) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        self.ids: queue.Queue[int] = queue.Queue()

    def __call__(self, rows: EvictedRows) -> None:
        self.began.set()
        assert self.gate.wait(MOST_S)
        for row_id in rows.ids.tolist():
            self.ids.put(row_id)

    def told(self, count: int) -> list[int]:
        """The next ids. `queue.Empty` where they do not come."""
        return [self.ids.get(timeout=MOST_S) for _ in range(count)]


def dying(hook: Callable[[EvictedRows], object], **settings: Any) -> EmbCacheEmbedding:
    """A table of which every step takes the rows that it did not train."""
    return embedding(eviction=Policy([Ttl(steps=1)], every_steps=1), on_evict=hook, **settings)


def train(table: EmbCacheEmbedding, *ids: int) -> None:
    """Train the ids one by one. All rows but the last are dead then, and wait to be told or are told."""
    for row_id in ids:
        update(table(torch.tensor([row_id])))
    assert len(table) == 1


def waits_in_a_join(thread: threading.Thread) -> bool:
    frame = sys._current_frames()[thread.ident or 0]
    names = []
    while frame is not None:
        names.append((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name))
        frame = frame.f_back
    return ("threading.py", "join") in names and ("_evict_callback.py", "closing") in names


def interrupt_until(interrupted: threading.Event) -> None:
    """Send SIGINT until the main thread has taken it.

    Python misses a signal that comes after a thread has begun to wait for a lock and before the system waits for it: the
    thread would see it only after its wait.
    """
    for _ in range(MOST_S * 10):
        os.kill(os.getpid(), signal.SIGINT)
        if interrupted.wait(0.1):
            return
    raise AssertionError("SIGINT did not end the wait of the main thread")


def interrupt_the_wait_of_a_close(say: Callable[[Any], None], fails: bool) -> None:
    hook, main, interrupted = Hook(), threading.current_thread(), threading.Event()
    hook.gate.set()

    def interrupting(rows: EvictedRows) -> None:
        while not waits_in_a_join(main) and not interrupted.is_set():
            pass
        if not interrupted.is_set() and rows.step == 2 and fails:
            raise ValueError("no store")
        if not interrupted.is_set() and rows.step == 3:
            interrupt_until(interrupted)
        hook(rows)

    signal.signal(signal.SIGINT, interrupt_once)
    table = dying(interrupting)
    train(table, 1, 2, 3)
    try:
        table.close()
    except KeyboardInterrupt:
        interrupted.set()
    say(interrupted.is_set())
    if fails:
        try:
            train(table, 4)
        except EvictionHookError as error:
            say(str(error).split(" (")[0])
    # The table is as open as before, and its hook is told before it is closed.
    train(table, 4, 5)
    say(hook.told(3 if fails else 4))
    train(table, 6)
    table.close()
    say(hook.told(1))
    say(hook.ids.qsize())


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_interrupted_close_stops_waiting_and_later_rows_deliver(fails: bool):
    """Ctrl-C while `close()` waits for the callback."""
    child = Child(interrupt_the_wait_of_a_close, fails)
    raised = ["on_evict of table 'item' raised ValueError: no store"] if fails else []
    told = [2, 3, 4] if fails else [1, 2, 3, 4]
    assert child.ended() == ([True, *raised, told, [5], 0], 0)


@pytest.mark.slow
def test_interrupted_close_leaves_the_table_delivering_or_closed():
    def made() -> tuple[EmbCacheEmbedding, Hook]:
        hook = Hook()
        hook.gate.set()
        table = dying(hook)
        train(table, 1, 2)
        return table, hook

    table, _ = made()
    with Lines(None) as lines:
        table.close()
    was_open = set()
    for stop_at in range(lines.count):
        table, hook = made()
        at, error = stopped(table.close, stop_at)
        assert is_interrupt(error), (at.stopped_at, error)
        native = table.table._native_table
        was_open.add(not native.is_closed())
        if native.is_closed():
            table.close()
            assert hook.told(1) == [1], at.stopped_at
        else:
            train(table, 3, 4)
            assert hook.told(3) == [1, 2, 3], at.stopped_at  # before it is closed
            train(table, 5)
            table.close()
            assert hook.told(1) == [4], at.stopped_at
        assert hook.ids.empty(), at.stopped_at
    assert was_open == {True, False}


def saved_elsewhere(path: str) -> None:
    """Save a table with the row 5 that has another number of buckets, so that a load makes the core's table anew."""
    with embedding(total_num_buckets=17) as other:
        update(other(torch.tensor([5])))
        Saver(0).save(other, path)


def close_within_the_hook_after_a_load(say: Callable[[Any], None], path: str) -> None:
    hook = Hook()

    def closing(rows: EvictedRows) -> None:
        hook(rows)
        try:
            table.close()
        except StateError as error:
            say(str(error))

    table = dying(closing)
    train(table, 1, 2)
    assert hook.began.wait(MOST_S)
    Saver(0).load(table, path)
    hook.gate.set()
    assert hook.told(1) == [1]
    train(table, 6)
    say(hook.told(1))
    table.close()


@pytest.mark.slow
def test_a_hook_that_still_runs_after_a_load_cannot_close_the_table(tmp_path: Path):
    saved_elsewhere(str(tmp_path / "saved"))
    child = Child(close_within_the_hook_after_a_load, str(tmp_path / "saved"))
    said, status = child.ended()
    refused = "on_evict of table 'item' runs, and this waits for it: close after it has returned"
    assert (sorted(map(str, said)), status) == (["[5]", refused, refused], 0)


def drop_after_a_load(say: Callable[[Any], None], path: str) -> None:
    hook = Hook()
    table = dying(hook)
    train(table, 1, 2)
    assert hook.began.wait(MOST_S)
    Saver(0).load(table, path)
    train(table, 6, 7)
    del table
    gc.collect()
    hook.gate.set()
    say(hook.told(3))


@pytest.mark.slow
def test_table_dropped_after_a_load_delivers_rows_of_both(tmp_path: Path):
    saved_elsewhere(str(tmp_path / "saved"))
    assert Child(drop_after_a_load, str(tmp_path / "saved")).ended() == ([[1, 5, 6]], 0)


def drop_amid_another_optimizer(say: Callable[[Any], None]) -> None:
    hook = Hook()
    table = dying(hook)
    train(table, 1, 2, 3)
    assert hook.began.wait(MOST_S)
    table.remove_rows([3])
    # The core's table is closed, and the next one is opened at the next use, which does not come.
    table.table.optimizer = optimizers.SGD(lr=0.1)
    assert table.table._native_or_none is None
    del table
    gc.collect()
    hook.gate.set()
    say(hook.told(2))


@pytest.mark.slow
def test_table_dropped_while_core_is_empty_delivers_and_exits():
    assert Child(drop_amid_another_optimizer).ended() == ([[1, 2]], 0)


FORKED = """
import os, sys, threading, torch
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, optimizers
from torchrec_embcache.exceptions import StateError
fails, end = sys.argv[1] == "fails", sys.argv[2]
gate, began, parent = threading.Event(), threading.Event(), os.getpid()
def hook(rows):
    began.set()
    if fails and os.getpid() == parent:
        raise ValueError("no store")
    assert gate.wait(60)
    os.write(1, f"{rows.table} {rows.ids.tolist()} {os.getpid() == parent}\\n".encode())
def table_of(name):
    return EmbCacheEmbedding(name=name, embedding_dim=2, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=1.0),
                             eviction=eviction.Policy([eviction.Ttl(steps=1)], every_steps=1), on_evict=hook)
def train(table, ids):
    for row_id in ids:
        table(torch.tensor([row_id])).sum().backward()
    len(table)
table = table_of("parent")
train(table, [0, 1])
assert began.wait(60)
while fails and not table.table._evict_notifier._errors:
    pass
if not fails:
    train(table, [2])
child = os.fork()
if not child:
    for call in (table.stats, lambda: train(table, [9]), table.close):
        try:
            call()
        except StateError:
            os.write(1, b"refused\\n")
    gate.set()
    mine = table_of("child")
    train(mine, [7, 8])
    if end == "close":
        mine.close()
    elif end == "drop":
        del table
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
gate.set()
"""


def run_forked(*arguments: str) -> tuple[list[str], str]:
    """The lines that a process and the child that it forks print, and what they print as errors."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, *arguments], capture_output=True, text=True, check=True, timeout=MOST_S
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_forked_child_tells_of_its_own_tables_only_and_ends(end: str):
    said, errors = run_forked("works", end)
    refused = [line for line in said if line == "refused"]
    told = ["child [7] False", "0", "parent [0] True", "parent [1] True"]
    assert (said, len(refused) >= 2) == (refused + told, True), errors


@pytest.mark.slow
def test_what_a_hook_raised_before_a_fork_is_said_by_the_parent_only():
    said, errors = run_forked("fails", "drop")
    assert [line for line in said if line != "refused"] == ["child [7] False", "0"], errors
    assert errors.count("unreported error: on_evict of table 'parent' raised ValueError: no store") == 1, errors


AT_THE_END = """
import os, signal, sys, threading, time, torch
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, optimizers
main, waits, told = threading.main_thread(), threading.Event(), []
def hook(rows):
    told.append(len(rows))
    {body}
table = EmbCacheEmbedding(name="t", embedding_dim=2, tiers=TierBudgets(host_bytes="16MiB"), optimizer=optimizers.SGD(lr=1.0),
                          eviction=eviction.Policy([eviction.Ttl(steps=1)], every_steps=1), on_evict=hook)
for first in range(3):
    table(torch.arange(first, first + {ids})).sum().backward()
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_at_the_end_of_a_process():
    # Chunks of 65,536 rows: two wait while the hook has the first. It never returns, and is not called on the main thread. It
    # interrupts the main thread once that waits for it, and again while it still does: Python misses a signal that comes just
    # before the wait.
    body = """print("in", threading.current_thread() is main, flush=True)
    names = set()
    while not {"_notify_at_exit", "join"} <= names:
        time.sleep(0.01)
        frame, names = sys._current_frames()[main.ident], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        waits.wait(0.1)"""
    script = (
        "from interrupts import interrupt_once\n"
        + AT_THE_END.format(body=body, ids=150_000)
        + "signal.signal(signal.SIGINT, interrupt_once)\n"
        + "table(torch.arange(10**6, 10**6 + 9)).sum().backward()\n"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=SUPPORT, capture_output=True, text=True, check=False, timeout=MOST_S)
    assert done.stdout.splitlines() == ["in False"], done.stderr
    assert "evicted rows are lost that on_evict was not given" in done.stderr


@pytest.mark.slow
def test_each_error_of_a_hook_is_said_at_the_end_of_a_process():
    script = AT_THE_END.format(body="main.join(); raise ValueError(f'no {len(told)}')", ids=1)
    script = script.replace("sum().backward()", "sum().backward(); len(table)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=MOST_S)
    for number in (1, 2):
        assert f"unreported error: on_evict of table 't' raised ValueError: no {number}" in done.stderr


def train_until_told(table: EmbCacheEmbedding) -> None:
    """Train until what the hook raised comes."""
    while True:
        train(table, 3, 4)


@pytest.mark.parametrize("how", ["hook", "keep", "hook that raises"])
def test_a_table_that_is_closed_and_dropped_is_freed_at_once(how: str):
    def hook(_rows: EvictedRows) -> None:
        if how == "hook that raises":
            raise ValueError("no store")

    table = dying("keep" if how == "keep" else hook)
    train(table, 1, 2)
    if how == "hook that raises":
        with pytest.raises(EvictionHookError):
            train_until_told(table)
    shard = weakref.ref(table.table)
    native = table.table._native_table
    queue_of = weakref.ref(table.table._evict_notifier)
    gc.collect()
    gc.disable()
    try:
        try:
            table.close()
        except EvictionHookError:
            assert how == "hook that raises"
        references = sys.getrefcount(native)
        del table
        assert (shard(), queue_of()) == (None, None)
        # Those of this function and of the call, and none of what looks after the end of the process.
        assert sys.getrefcount(native) == 2 < references
    finally:
        gc.enable()


def test_dropped_table_frees_its_directory_before_the_callback(tmp_path: Path):
    hook = Hook()
    tiers = ssd_tiers(tmp_path / "ssd", reopen="resume")
    table = dying(hook, tiers=tiers)
    train(table, 1, 2, 3)
    assert hook.began.wait(MOST_S)
    del table
    gc.collect()
    with dying(hook, tiers=tiers) as again:
        assert len(again) == 1
        hook.gate.set()
        assert hook.told(2) == [1, 2]


def test_queues_that_were_told_go_with_the_next_load(tmp_path: Path):
    hook = Hook()
    hook.gate.set()
    table = dying(hook)
    train(table, 1, 2)
    hook.told(1)
    Saver(0).save(table, tmp_path)
    other = optimizers.RowWiseAdagrad(lr=0.1)
    for turn in range(4):
        train(table, 10 * turn + 1, 10 * turn + 2)
        hook.told(2)
        table.optimizer = other if turn % 2 else optimizers.SGD(lr=0.1)
        Saver(0).load(table, tmp_path, slots=False)
    assert len(table.table._evict_notifier._sources) <= 2
    table.close()
