"""Events of the core in Python's `logging`: names, levels and texts, from any thread, after a fork, and at process exit."""

import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tables import make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import CacheTable, _native, initializers, optimizers

PACKAGE = "torchrec_embcache"
MOST_WAITING = 1024  # of rust/pyext/src/logging.rs


@pytest.fixture(autouse=True)
def _levels_as_before() -> Iterator[None]:
    """The core follows the levels of the test, and afterwards those of before."""
    yield
    for name in (PACKAGE, f"{PACKAGE}.core", f"{PACKAGE}.core.ssd", f"{PACKAGE}.core.cache"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
    _native.drain_log()


def opened(directory: Path, name: str = "t") -> CacheTable:
    """A small table on SSD."""
    table = CacheTable(
        name=name,
        dim=4,
        tiers=ssd_tiers(directory),
        initializer=initializers.Constant(1),
        optimizer=optimizers.SGD(),
    )
    table.open()
    return table


def of_the_core(caplog: pytest.LogCaptureFixture, name: str = f"{PACKAGE}.core.ssd") -> list[logging.LogRecord]:
    _native.drain_log()
    return [record for record in caplog.records if record.name == name and record.pathname.endswith(".rs")]


def test_an_event_has_its_logger_level_text_and_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = time.time()
    with caplog.at_level(logging.DEBUG, PACKAGE):
        opened(tmp_path).close()
        (record,) = [record for record in of_the_core(caplog) if "opened" in record.getMessage()]
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == f"opened an SSD tier table=t dir={tmp_path}/t/t/0-of-1 rows=0 segments=0"
    assert before - 0.1 <= record.created <= time.time()
    assert record.pathname.startswith("rust/core/src/ssd/")
    assert record.lineno > 0
    assert record.threadName == "MainThread"


def test_events_come_by_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, PACKAGE):
        opened(tmp_path).close()
        until = time.monotonic() + 600
        while not any(record.pathname.endswith(".rs") for record in caplog.records):
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("name", [PACKAGE, f"{PACKAGE}.core", f"{PACKAGE}.core.ssd", None])
def test_the_level_of_a_logger_governs(name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As for any logger: its own level, else that of the package, else that of the root."""
    with caplog.at_level(logging.DEBUG, name):
        opened(tmp_path).close()
        assert of_the_core(caplog)
    caplog.clear()
    opened(tmp_path, "u").close()
    assert not of_the_core(caplog)


def test_disabled_levels_and_other_loggers_log_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, f"{PACKAGE}.core.cache"):
        opened(tmp_path).close()
        assert not of_the_core(caplog)
    with caplog.at_level(logging.DEBUG, PACKAGE):
        logging.disable(logging.DEBUG)
        opened(tmp_path, "u").close()
        assert not of_the_core(caplog)


def test_steps_take_a_new_level_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table that is open already: within a second of steps."""
    bag = make_bag(tiers=ssd_tiers(tmp_path))
    train(bag, random_batches(2, 4, 20, seed=1))
    with caplog.at_level(logging.DEBUG, PACKAGE):
        time.sleep(1.1)
        train(bag, random_batches(2, 4, 20, seed=2))
        bag.table.flush()
        assert any("published" in record.getMessage() for record in of_the_core(caplog))


def test_ordinary_steps_and_flushes_log_nothing_at_info_or_above(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, PACKAGE):
        bag = make_bag(tiers=ssd_tiers(tmp_path))
        for seed in range(4):
            train(bag, random_batches(4, 6, 60, seed=seed))
            bag.table.flush()
        bag.table.close()
        _native.drain_log()
        assert not [record for record in caplog.records if record.pathname.endswith(".rs")]


def test_levels_may_be_any_integers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, PACKAGE):
        logging.disable(sys.maxsize)
        opened(tmp_path).close()
        logging.disable(logging.NOTSET)
        logging.getLogger(f"{PACKAGE}.core.ssd").setLevel(2**70)
        opened(tmp_path, "u").close()
        assert not of_the_core(caplog)
        logging.getLogger(f"{PACKAGE}.core.ssd").setLevel(logging.NOTSET)
        opened(tmp_path, "v").close()
        assert of_the_core(caplog)


@pytest.mark.slow
def test_ctrl_c_while_levels_are_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs signal handlers in the code of loggers too. The interrupted call can be repeated."""
    table = opened(tmp_path)
    bag = make_bag(tiers=ssd_tiers(tmp_path))
    calls = {
        "open": lambda: opened(tmp_path, "u"),
        "flush": lambda: table._native_table.flush(None),
        "step": lambda: train(bag, random_batches(1, 4, 20, seed=1)),
    }

    def raises() -> int:
        raise KeyboardInterrupt

    calls["step"]()
    for name, call in calls.items():
        time.sleep(0 if name == "open" else 1.1)
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(f"{PACKAGE}.core.io"), "getEffectiveLevel", raises)
            with pytest.raises(KeyboardInterrupt):
                call()
        call()


def test_a_handler_may_use_the_table_and_log_and_ask_for_the_rest(tmp_path: Path) -> None:
    """It runs under no lock of the core's, and what it logs or drains itself comes to an end."""
    table = opened(tmp_path)
    seen: list[int] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.pathname.endswith(".rs"):
                _native.drain_log()
                seen.append(len(table))

    handler = Handler()
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        _native.drain_log()
        for _ in range(20):
            table._native_table.flush(None)
        _native.drain_log()
    finally:
        logger.removeHandler(handler)
    assert len(seen) >= 20
    assert set(seen) == {0}


@pytest.mark.slow
def test_what_overflows_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = opened(tmp_path)
    stuck, go_on = threading.Event(), threading.Event()

    class Handler(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            stuck.set()
            go_on.wait()

    handler = Handler()
    logger = logging.getLogger(f"{PACKAGE}.core.ssd")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG, PACKAGE):
            _native.drain_log()
            table._native_table.flush(None)
            assert stuck.wait(300)
            for _ in range(MOST_WAITING + 10):
                table._native_table.flush(None)
            go_on.set()
            _native.drain_log()
            (said,) = [record for record in caplog.records if "were dropped" in record.getMessage()]
            assert said.levelno == logging.WARNING
            assert said.name == f"{PACKAGE}.core"
            flushes = [record for record in of_the_core(caplog) if "published" in record.getMessage()]
            dropped = int(said.getMessage().split()[0])
            assert len(flushes) + dropped >= MOST_WAITING + 11
            assert dropped >= 10
    finally:
        go_on.set()
        logger.removeHandler(handler)


BEFORE = """
import logging, os, sys, threading, time
from torchrec_embcache import CacheTable, TierBudgets, _native, initializers, optimizers

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(process)d %(name)s %(message)s", force=True)
logging.getLogger("torchrec_embcache").setLevel(logging.DEBUG)
core = logging.getLogger("torchrec_embcache.core.ssd")

def opened(name):
    tiers = TierBudgets(host_bytes="64KiB", ssd_bytes="16MiB", ssd_dir=sys.argv[1])
    table = CacheTable(name=name, dim=4, tiers=tiers, initializer=initializers.Constant(1), optimizer=optimizers.SGD())
    table.open()
    return table
"""


def run(script: str, directory: Path, errors: str = "") -> list[str]:
    """The lines that a script in a process of its own prints. It must end well, and soon, and say no other errors."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", BEFORE + textwrap.dedent(script), str(directory)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert errors in done.stderr if errors else not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_end_of_a_process_logs_what_is_left_and_does_not_hang(tmp_path: Path) -> None:
    lines = run("for number in range(50): opened(f't{number}')", tmp_path)
    assert sum("opened an SSD tier" in line for line in lines) == 50


@pytest.mark.slow
def test_slow_handlers_and_those_that_raise_lose_nothing_at_the_end(tmp_path: Path) -> None:
    """The queued records together take longer than the exit waits for a running handler."""
    script = """
    class Handler(logging.Handler):
        def emit(self, record):
            time.sleep(0.25)
            print("seen", flush=True)
            if "published" in record.getMessage():
                raise ValueError
    sys.unraisablehook = lambda raised: print(raised.exc_type.__name__, flush=True)
    core.propagate = False
    core.addHandler(Handler())
    table = opened("t")
    for _ in range(28):
        table._native_table.flush(None)
    """
    lines = run(script, tmp_path)
    assert (lines.count("seen"), lines.count("ValueError")) == (29, 28)


@pytest.mark.slow
def test_a_panic_below_a_handler_stops_nothing(tmp_path: Path) -> None:
    script = """
    numbers, seen = iter(range(10**9)), threading.Event()
    class Handler(logging.Handler):
        def emit(self, record):
            number = next(numbers)
            if number == 0:
                raise ValueError  # from now on there is a class of panics
            if number == 1:
                raise next(c for c in BaseException.__subclasses__() if c.__name__ == "PanicException")("below")
            seen.set()
    sys.unraisablehook = lambda raised: None
    core.propagate = False
    core.addHandler(Handler())
    table = opened("t")
    for _ in range(3000):
        table._native_table.flush(None)
        if seen.wait(0.1):
            break
    _native.drain_log()
    print(seen.is_set())
    """
    assert run(script, tmp_path, errors="resuming a panic")[-1] == "True"


@pytest.mark.slow
def test_a_logger_whose_level_cannot_be_read_keeps_no_thread_busy(tmp_path: Path) -> None:
    script = """
    core.isEnabledFor(logging.DEBUG)  # the logger keeps the answer
    def level():
        if threading.current_thread() is threading.main_thread():
            return logging.DEBUG
        raise ValueError
    core.getEffectiveLevel = level
    raised = []
    sys.unraisablehook = lambda what: raised.append(what.exc_type.__name__)
    table = opened("t")
    for _ in range(3):
        table._native_table.flush(None)
    time.sleep(0.5)
    print("raised", len(raised))
    """
    lines = run(script, tmp_path)
    assert "raised 0" in lines
    assert sum("published" in line for line in lines) == 3


@pytest.mark.slow
def test_handler_that_logs_for_each_event_does_not_loop(tmp_path: Path) -> None:
    script = """
    table = opened("t")
    class Handler(logging.Handler):
        def emit(self, record):
            table._native_table.flush(None)
    core.propagate = False
    core.addHandler(Handler())
    table._native_table.flush(None)
    for _ in range(3):
        _native.drain_log()
    core.handlers.clear()
    print("done")
    """
    assert run(script, tmp_path)[-1] == "done"


@pytest.mark.slow
def test_a_forked_child_takes_new_levels_over_within_a_second(tmp_path: Path) -> None:
    """However long its parent has lived."""
    script = """
    table = opened("parent")
    table._native_table.flush(None)
    time.sleep(1.1)
    table._native_table.flush(None)
    core.setLevel(logging.WARNING)
    _native.drain_log()
    child = os.fork()
    if child == 0:
        table = opened("child")
        table._native_table.flush(None)
        core.setLevel(logging.DEBUG)
        time.sleep(1.1)
        table._native_table.flush(None)
        _native.drain_log()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    assert any("published" in line and "table=child" in line for line in run(script, tmp_path))


@pytest.mark.slow
def test_a_forked_child_logs_its_own_events(tmp_path: Path) -> None:
    script = """
    kept = opened("parent")
    child = os.fork()
    if child == 0:
        logged = threading.Event()
        class Later(logging.Handler):
            def emit(self, record):
                if "table=later" in record.getMessage():
                    logged.set()
        opened("child")
        _native.drain_log()
        logging.getLogger().addHandler(Later())  # after the one that prints
        opened("later")  # by the thread that the child started
        assert logged.wait(300)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(os.getpid(), child)
    """
    lines = run(script, tmp_path)
    parent, child = next(line for line in lines if line.replace(" ", "").isdigit()).split()
    opened_by = {line.split("table=")[1].split()[0]: line.split()[0] for line in lines if "opened an SSD tier" in line}
    assert opened_by == {"parent": parent, "child": child, "later": child}


@pytest.mark.slow
def test_a_process_that_forks_while_events_come_does_not_hang(tmp_path: Path) -> None:
    script = """
    import threading
    logging.getLogger().handlers[0].setLevel(logging.CRITICAL)
    table, going = opened("parent"), True
    def flush():
        while going:
            table._native_table.flush(None)
    threads = [threading.Thread(target=flush) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(30):
        child = os.fork()
        if child == 0:
            opened(f"child{number}")
            _native.drain_log()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    going = False
    for thread in threads:
        thread.join()
    print("done")
    """
    assert run(script, tmp_path)[-1] == "done"


@pytest.mark.slow
def test_a_failed_write_is_a_warning(tmp_path: Path) -> None:
    """The user should act on it: from then on the table refuses steps."""
    script = """
    import resource, signal, torch
    logging.getLogger("torchrec_embcache").setLevel(logging.WARNING)
    table = opened("t")
    ids = torch.arange(100)
    table.import_rows(ids, torch.ones(100, 4))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        table.flush()
    except OSError as error:
        print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    (line,) = [line for line in run(script, tmp_path) if "only reads from now on" in line]
    assert f"{tmp_path}/t/t/0-of-1/" in line
    assert "File too large" in line


def test_what_compaction_chooses_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, f"{PACKAGE}.core.ssd"):
        table = CacheTable(
            name="t",
            dim=4,
            tiers=ssd_tiers(tmp_path, ssd_bytes="1MiB"),
            initializer=initializers.Constant(1),
            optimizer=optimizers.SGD(),
        )
        table.open()
        random = torch.Generator().manual_seed(1)
        for version in range(12):
            ids = torch.randperm(9000, generator=random)[: 9000 if version == 0 else 3000]
            table.import_rows(ids, torch.full((len(ids), 4), float(version)))
            table.flush()
        table.close()
        chosen = [r.getMessage() for r in of_the_core(caplog) if "compaction moves a segment" in r.getMessage()]
    assert chosen
    reasons = {
        re.search(r"reason=(make room|free tombstones|thin|merge) serial=\d+ live=\d+ records=\d+", text)
        for text in chosen
    }
    assert None not in reasons
    assert all(re.search(r"share=\d\.\d{3} .* free_bytes=\d+ rows_to_move=\d+", text) for text in chosen)


def test_space_waits_and_dropped_states_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first wait is logged, and not each of those within a minute of it. Compaction may keep ahead of a few imports, so they
    are repeated until two have waited and the last flush is lost.
    """
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, f"{PACKAGE}.core"):
        table = CacheTable(
            name="t",
            dim=4,
            tiers=ssd_tiers(tmp_path, ssd_bytes="1MiB"),
            initializer=initializers.Constant(1),
            optimizer=optimizers.SGD(),
        )
        table.open()
        random = torch.Generator().manual_seed(1)
        for version in range(1000):
            ids = torch.randperm(9000, generator=random)[: 9000 if version == 0 else 3000]
            table.import_rows(ids, torch.full((len(ids), 4), float(version)))
            if version % 4 == 0:
                table.flush()
            stats = table.stats().ssd
            if stats is not None and stats.space_waits > 1 and stats.has_lost_flush:
                break
        said = [record.getMessage() for record in of_the_core(caplog)]
        table.close()
    elapsed = time.monotonic() - begin
    assert stats is not None
    assert stats.space_waits > 1
    assert stats.has_lost_flush
    waits = [text for text in said if "waits until its SSD tier has room" in text]
    assert 1 <= len(waits) <= 1 + elapsed // 60
    assert re.search(r"raise ssd_bytes.* table=t waits=1 free_bytes=\d+ needed_bytes=\d+", waits[0])
    given_up = [text for text in said if "drops its oldest published state" in text]
    assert given_up
    assert all(
        re.search(r"table=t commit_id=\d+ states=\d+ free_bytes=\d+ retained_bytes=\d+", text) for text in given_up
    )
    assert not stats.read_only
