"""Lookups in threads during open, close, release and rollback: each reads one whole version, or raises a typed error."""

import copy
import fcntl
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lifecycle_cases import embedding
from serving_cases import LATEST, ended_by_ctrl_c, followers, publish, served, two_saves, until, value_of
from torchrec_embcache import Saver, TierBudgets, serving
from torchrec_embcache.exceptions import StateError
from torchrec_embcache.monitoring import ServingCollector

LIMIT = 600
# Seconds in which what should not wait is over, however busy the machine is.
STILL = 20
IDS = [3, 1, 9, 3]
ROWS = [[float(row_id)] * 4 for row_id in IDS]


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ckpt"


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextmanager
def index_made_elsewhere(ckpt: Path, name: str) -> Iterator[None]:
    """Another process makes the index of a checkpoint, for as long as this lasts."""
    with (ckpt / name / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextmanager
def look_that_stands_still(
    ckpt: Path, tables: serving.Tables, name: str, seconds: float
) -> Iterator[Callable[[], bool]]:
    """A thread looks for a newer checkpoint, whose index another process makes, until this ends or for so many seconds.

    Gives what ends it, and says whether it still stood.
    """
    begun, ended = threading.Event(), threading.Event()

    def hold() -> bool:
        with index_made_elsewhere(ckpt, name):
            polled = pool.submit(tables.poll)
            until(lambda: tables.stats().polls == 1)
            begun.set()
            still = ended.wait(seconds)
        assert polled.result(LIMIT) in (name, None)
        return still

    def end() -> bool:
        ended.set()
        return held.result(LIMIT)

    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(hold)
        assert begun.wait(LIMIT)
        try:
            yield end
        finally:
            ended.set()


class Users:
    """Threads that use something until it refuses. `faults` has what they saw that they must not."""

    def __init__(self, uses: list[Callable[[], object]], wanted: list[list[float]], told: str) -> None:
        self.faults: list[str] = []
        self.count = 0
        self._wanted, self._told = wanted, told
        self._threads = [threading.Thread(target=self._run, args=(use,)) for use in uses]
        for thread in self._threads:
            thread.start()

    def _run(self, use: Callable[[], object]) -> None:
        try:
            while True:
                got = use()
                if got != self._wanted:
                    self.faults.append(f"it read {got}")
                    return
                self.count += 1
        except StateError as error:
            if self._told not in str(error):
                self.faults.append(repr(error))
        except BaseException as error:
            self.faults.append(repr(error))

    def wait_for(self, count: int) -> None:
        until(lambda: self.count >= count or bool(self.faults))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert not self.faults


# ---- lookups go on


def test_lookups_go_on_while_a_newer_checkpoint_waits_for_its_index(ckpt: Path) -> None:
    """The look holds what no lookup, no rollback and no figure waits for."""
    table, saver, first = two_saves(ckpt)
    with serving.open(ckpt, preload=True) as tables:
        second = publish(table, saver, ckpt, 20.0, full=True)
        with look_that_stands_still(ckpt, tables, second, LIMIT) as end:
            for _ in range(1000):
                with tables.pin() as version:
                    assert version.name == first
                    rows = version["item"].lookup(IDS)
                    assert (rows.tolist(), bool(rows.found.all())) == (ROWS, True)
                    pooled = version["item"].lookup_pooled(IDS, range(5))
                    assert pooled.tolist() == ROWS
            stats = tables.stats()
            assert (stats.lookups, stats.missing, stats.swaps, stats.version) == (2000, 0, 0, first)
            assert list(ServingCollector(tables).collect())
            with pytest.raises(StateError, match="no version before"):
                tables.rollback()
            assert end()
        assert tables.pin().name == second
        assert value_of(tables.pin()) == 20.0


def test_closing_does_not_wait_for_an_index_that_another_process_makes(ckpt: Path) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0, full=True)
    (ckpt / LATEST).write_text(f"{first}\n")
    tables = serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001))

    def stands_still() -> bool:
        polls = tables.stats().polls
        threading.Event().wait(0.2)
        return polls == tables.stats().polls

    with index_made_elsewhere(ckpt, second):
        (ckpt / "newer").write_text(f"{second}\n")
        (ckpt / "newer").replace(ckpt / LATEST)
        until(stands_still)
        held = tables.pin()
        assert value_of(held) == 1.0
        closing = threading.Thread(target=tables.close)
        closing.start()
        closing.join(LIMIT)
        assert not closing.is_alive()
        until(lambda: not followers())
        assert value_of(held) == 1.0
    assert not list((ckpt / second).glob("serve.idx*"))
    with serving.open(ckpt) as tables:
        assert value_of(tables.pin()) == 20.0


def test_ctrl_c_ends_a_look_that_waits_for_the_look_of_a_thread(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt) as tables:
        second = publish(table, saver, ckpt, 20.0, full=True)
        with look_that_stands_still(ckpt, tables, second, STILL) as end:
            ended_by_ctrl_c(tables.poll)
            assert end()


def test_closing_does_not_wait_for_the_look_of_a_thread(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    tables = serving.open(ckpt, follow=serving.Follow(poll_seconds=3600))
    second = publish(table, saver, ckpt, 20.0, full=True)
    with look_that_stands_still(ckpt, tables, second, STILL) as end:
        # The thread that follows looks from now on, too.
        native: Any = tables._native
        native.follow(0.001)
        threading.Event().wait(0.3)
        tables.close()
        assert end()
    until(lambda: not followers())


def test_lookups_go_on_while_large_checkpoints_are_opened_beside(ckpt: Path) -> None:
    """Each full checkpoint gives every row its own number. All rows of a lookup have that of the version, and none is missing."""
    count, rounds = 60_000, 4
    table, saver = embedding(tiers=TierBudgets(host_bytes="64MiB")), Saver(0)
    ids = torch.arange(count)
    names: list[str] = []

    def save() -> None:
        table.import_rows(ids, torch.full((count, 4), float(len(names))))
        names.append(saver.save(table, ckpt, keep=9).checkpoint)

    save()
    faults: list[str] = []
    ended = threading.Event()
    with serving.open(ckpt, preload=True) as tables:

        def ask() -> None:
            asked = torch.randint(count, (2000,))
            try:
                while not ended.is_set():
                    with tables.pin() as version:
                        rows = version["item"].lookup(asked)
                        wanted = float(names.index(version.name))
                        if not bool(rows.found.all()) or rows.unique().tolist() != [wanted]:
                            faults.append(f"{version.name} read {rows.unique().tolist()}")
            except Exception as error:
                faults.append(repr(error))

        askers = [threading.Thread(target=ask) for _ in range(2)]
        for asker in askers:
            asker.start()
        try:
            for _ in range(rounds):
                save()
                with serving.open(ckpt) as beside:
                    assert tables.poll() == names[-1] == beside.pin().name
                asked = tables.stats().lookups
                until(lambda asked=asked: tables.stats().lookups > asked + 1 or bool(faults))  # type: ignore[misc]
        finally:
            ended.set()
            for asker in askers:
                asker.join(LIMIT)
        assert not faults
        stats = tables.stats()
        assert (stats.missing, stats.swaps, stats.version) == (0, rounds, names[-1])


# ---- ends amid lookups


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_take_turns_often")
def test_tables_closed_during_lookups_give_rows_or_an_error(ckpt: Path) -> None:
    two_saves(ckpt)
    for turn in range(60):
        tables = serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001))

        def look_up(tables: serving.Tables = tables) -> object:
            with tables.pin() as version:
                return version["item"].lookup(IDS).tolist()

        def pool(tables: serving.Tables = tables) -> object:
            with tables.pin() as version:
                return version["item"].lookup_pooled(IDS, range(5), "mean").tolist()

        def poll(tables: serving.Tables = tables) -> object:
            assert tables.poll() is None
            return tables.stats().rows == 9 and ROWS

        module = serving.replace(embedding(), tables)

        def forward(module: torch.nn.Module = module) -> object:
            return module(torch.tensor(IDS)).tolist()

        held = tables.pin()
        users = Users([look_up, pool, poll, forward], ROWS, "closed")
        users.wait_for(turn % 7)
        tables.close()
        users.join()
        assert served(held, IDS) == {row_id: [float(row_id)] * 4 for row_id in IDS}
        with pytest.raises(StateError, match="closed"):
            tables.pin()
    until(lambda: not followers())


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_take_turns_often")
def test_version_released_during_lookups_gives_rows_or_an_error(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables:
        for turn in range(150):
            version = tables.pin()
            item = version["item"] if turn % 2 else None

            def of_name(version: serving.Version = version) -> object:
                return version["item"].lookup(IDS).tolist()

            def of_all(version: serving.Version = version) -> object:
                return version.tables[0].lookup_pooled(IDS, range(5)).tolist()

            def of_table(version: serving.Version = version, item: serving.Table | None = item) -> object:
                return (item or version["item"]).lookup(IDS).tolist()

            def of_with(version: serving.Version = version) -> object:
                # A thread that enters a version also exits it, so the version is entered only after it was released.
                if version.is_pinned:
                    return version.published_at > 0 and ROWS
                with version:
                    return "a version that was let go was entered"

            users = Users([of_name, of_all, of_table, of_with], ROWS, "unpinned")
            users.wait_for(turn % 7)
            version.close()
            users.join()
            with pytest.raises(StateError, match="unpinned"):
                version.tables[0].lookup(IDS)
            with pytest.raises(StateError, match="unpinned"):
                version["item"].lookup(IDS)
        assert tables.stats().versions == 1
        assert value_of(tables.pin()) == 1.0


@pytest.mark.parametrize("use", [lambda version: version["item"], lambda version: version.tables], ids=["name", "all"])
def test_a_version_that_is_let_go_amid_its_first_use_keeps_no_file(
    use: Callable[[serving.Version], object], ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_saves(ckpt)

    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(ckpt) in line]

    with serving.open(ckpt) as tables:
        version = tables.pin()

        def made(*arguments: Any) -> serving.Table:
            # Another thread lets it go at this place.
            version.close()
            return serving.Table(*arguments)

        with monkeypatch.context() as patch, suppress(StateError):
            patch.setattr(sys.modules[serving.Version.__module__], "Table", made)
            use(version)
        assert mapped()
    assert not mapped()
    with pytest.raises(StateError, match="unpinned"):
        use(version)


# ---- rollbacks


@pytest.mark.slow
def test_rollbacks_amid_looks_give_whole_published_versions(ckpt: Path) -> None:
    """Each save gives every row of two tables its own number. A version reads the number that was saved under its name."""
    ids = list(range(200))
    model = torch.nn.ModuleDict({"a": embedding(name="a"), "b": embedding(name="b")})
    saver, published = Saver(0), {}

    def save(number: int) -> str:
        for table in model.values():
            table.import_rows(ids, [[float(number)] * 4] * len(ids))  # type: ignore[operator]
        name = saver.save(model, ckpt, incremental=number % 10 != 0, keep=9999).checkpoint
        published[name] = float(number)
        return name

    save(0)
    seen: set[tuple[str, float]] = set()
    rolled_back: list[str] = []
    dice = random.Random(5)
    faults: list[str] = []
    ended = threading.Event()

    def over_and_over(work: Callable[[], None]) -> None:
        try:
            while not ended.wait(0.001):
                work()
        except BaseException as error:
            faults.append(repr(error))

    with serving.open(ckpt, follow=serving.Follow(poll_seconds=0.001)) as tables:

        def ask() -> None:
            with tables.pin() as version:
                parts = [version[name].lookup(ids) for name in ("a", "b")]
            found = all(bool(part.found.all()) for part in parts)
            numbers = torch.cat([part[:] for part in parts]).unique().tolist()
            if len(numbers) != 1 or not found:
                faults.append(f"{version.name} read {numbers}")
            seen.add((version.name, numbers[0]))

        def roll_back() -> None:
            ended.wait(dice.random() / 20)
            with suppress(StateError):  # where none before is kept
                rolled_back.append(tables.rollback())

        workers = [threading.Thread(target=over_and_over, args=(work,)) for work in (ask, ask, tables.poll, roll_back)]
        for worker in workers:
            worker.start()
        try:
            number = 0
            while number < 30 or (len(rolled_back) < 10 and number < 3000 and not faults):
                number += 1
                save(number)
        finally:
            ended.set()
            for worker in workers:
                worker.join(LIMIT)
        assert not faults
        last = save(number + 1)
        until(lambda: tables.pin().name == last)
        ask()
        assert not faults
        assert len(rolled_back) >= 10
        assert dict(seen) == {name: published[name] for name, _ in seen}
        assert len(seen) == len({name for name, _ in seen})
        assert set(rolled_back) <= published.keys()
        assert tables.stats().failed_polls == 0


# ---- copies


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"])
@pytest.mark.parametrize("which", ["version", "table"])
def test_versions_and_their_tables_say_that_they_cannot_be_copied(
    which: str, copied: Callable[[object], object], ckpt: Path
) -> None:
    """A copy of a version would let go what it was copied from."""
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        for _ in range(2):  # before it was used, and after
            with pytest.raises(StateError):
                copied(version if which == "version" else version["item"])
            assert len(version.tables) == 1
        assert value_of(version) == 1.0


# ---- processes at the same moment

AT_ONCE = """
import os, sys
from pathlib import Path
import torch
from torchrec_embcache import serving

ckpt, count = Path({ckpt!r}), {count}
gates = [os.pipe() for _ in range(2)]
told, tell = os.pipe()

def inode():
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if "serve.idx" in line]
    return line.split()[4], line.rsplit("/", 1)[1]

def serve():
    os.read(gates[0][0], 1)  # it ends for all at once
    with serving.open(ckpt) as tables, tables.pin() as version:
        rows = version["item"].lookup(torch.arange(-1, count))
        assert not bool(rows.found[0]) and bool(rows.found[1:].all())
        assert torch.equal(rows[1:], torch.arange(float(count))[:, None].expand(count, 4))
        stats = tables.stats()
        assert stats.private_bytes == 0 and stats.shared_index_bytes > 17 * count, stats
        assert inode()[1] == "serve.idx"
        os.write(tell, (inode()[0] + "\\n").encode())
        os.read(gates[1][0], 1)
        assert inode()[1] == "serve.idx", "it was made again"
        assert int(version["item"].lookup([count - 1])[0, 0]) == count - 1

children = []
for _ in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        ended = 1
        try:
            for _, write in gates:
                os.close(write)
            serve()
            ended = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(ended)
os.close(tell)
os.close(gates[0][1])
with os.fdopen(told) as lines:
    inodes = [lines.readline().strip() for _ in children]
    os.close(gates[1][1])
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
(made,) = ckpt.rglob("serve.idx*")
print(ends, set(inodes) == {{str(made.stat().st_ino)}}, made.name)
"""


@pytest.mark.slow
def test_processes_that_open_a_checkpoint_at_once_make_its_index_once(ckpt: Path) -> None:
    count = 100_000
    table = embedding(tiers=TierBudgets(host_bytes="64MiB"))
    table.import_rows(torch.arange(count), torch.arange(float(count))[:, None].expand(count, 4).contiguous())
    Saver(0).save(table, ckpt)
    assert not list(ckpt.rglob("serve.idx*"))
    script = AT_ONCE.format(ckpt=str(ckpt), count=count)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "[0, 0, 0, 0] True serve.idx\n", done.stdout + done.stderr
