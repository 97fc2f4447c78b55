"""Python code that runs while the core reads or changes device rows: signal handlers, finalizers, destructors. Nothing hangs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BEFORE = """
import gc, os, signal, sys, threading
import torch
from torchrec_embcache import _native, EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers
from torchrec_embcache.exceptions import StateError
from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache._kernels.core import TorchBackend
from torchrec_embcache.checkpoint import Saver

directory = sys.argv[1]

def make(module="m", **settings):
    os.makedirs(directory + "/" + module, 0o700, exist_ok=True)
    tiers = TierBudgets(host_bytes="64KiB", device_bytes="8KiB", ssd_bytes="16MiB", ssd_dir=directory + "/" + module)
    return EmbCacheEmbeddingBag(
        name="item", embedding_dim=8, tiers=tiers, optimizer=optimizers.Adagrad(lr=0.1), seed=7, **settings
    )

def ids(step, count=96):
    return ((torch.arange(count) * 7919 + step * 131) % 900).view(-1, 1)

def train(bag, step):
    bag(ids(step)).sum().backward()

def rows(bag):
    found = bag.read_rows(torch.arange(900))
    return found.found.tolist(), found.weights.tolist(), found.slots["sum"].tolist()

def patched(owner, name, before):
    real = getattr(owner, name)
    def call(*arguments):
        before(*arguments)
        return real(*arguments)
    setattr(owner, name, call)
"""


def run(script: str, directory: Path, kernels: str = "torch") -> str:
    """The output of a script in a process of its own, which must end well. A script that hangs is ended."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", BEFORE + textwrap.dedent(script), str(directory)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"EMBCACHE_KERNELS": kernels, **_environment()},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "EMBCACHE_KERNELS"}


@pytest.mark.parametrize("kernels", ["core", "torch"])
def test_signal_handler_that_uses_the_table_runs_unlocked(tmp_path: Path, kernels: str) -> None:
    """A signal comes during each read, scatter and update of device rows. Its handler does what a handler of preemption does."""
    out = run(
        """
        bag = make()
        sent = ran = 0
        errors = []

        def handler(*_):
            global ran
            ran += 1
            try:
                assert len(bag) <= 900
                bag.stats()
                bag.read_rows(torch.arange(4))
                if ran % 5 == 0:
                    bag.flush()
                if ran % 20 == 0:
                    Saver(0).save(bag, directory + "/checkpoint")
            except BaseException as error:
                errors.append(repr(error))

        signal.signal(signal.SIGUSR1, handler)

        def signalled(*_):
            global sent
            # Not amid what the handler itself does.
            if sent == ran:
                sent += 1
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            for _ in range(100):  # instructions between which a handler could run
                pass

        undisturbed = make("undisturbed")
        for step in range(25):
            train(undisturbed, step)
        expected = rows(undisturbed)
        undisturbed.close()
        for owner, name in (
            (DeviceTier, "gather"), (DeviceTier, "scatter"), (DeviceTier, "arrays"), (TorchBackend, "_update")
        ):
            patched(owner, name, signalled)
        for step in range(25):
            train(bag, step)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert not errors, errors[0]
        assert ran >= 40, (sent, ran)
        sent = -1
        assert rows(bag) == expected
        bag.close()
        print("ran")
        """,
        tmp_path,
        kernels,
    )
    assert out.strip() == "ran"


@pytest.mark.parametrize("kernels", ["core", "torch"])
def test_forwards_collected_while_rows_are_read_are_released(tmp_path: Path, kernels: str) -> None:
    out = run(
        """
        class Holder:
            pass

        collected = []
        patched(DeviceTier, "gather", lambda *_: collected.append(gc.collect()))
        gc.disable()
        bag = make()
        for step in range(30):
            holder = Holder()
            holder.itself = holder
            holder.out = bag(ids(step, 4) + 5000)  # a forward that is given up, in a cycle
            del holder
            train(bag, step)
        assert sum(collected) > 30, collected
        gc.collect()
        assert bag.stats().pinned_rows == 0, bag.stats()
        assert not any(bag.read_rows(torch.arange(5000, 5900)).found), "rows that were never trained"
        bag.close()
        print("closed")
        """,
        tmp_path,
        kernels,
    )
    assert out.strip() == "closed"


def test_destructor_that_uses_rows_under_a_read_gets_an_error(tmp_path: Path) -> None:
    out = run(
        """
        held = []
        patched(DeviceTier, "gather", lambda *_: held.clear())  # the table knows the method from when it is opened
        bag = make()
        for step in range(10):
            train(bag, step)
        errors = []

        def tried(work):
            try:
                work()
            except StateError as error:
                assert "wait for itself" in str(error), error
                errors.append(error)

        worked = []

        def works(work):
            worked.append(work())

        class Uses:
            def __del__(self):
                works(lambda: len(bag))
                works(bag.stats)
                tried(bag.flush)
                tried(bag.table._native_table.clear)
                tried(bag.table._native_table.close)
                tried(lambda: bag.read_rows(torch.arange(2)))
                tried(lambda: bag(ids(0)))
                tried(lambda: next(bag.export()))

        held.append(Uses())
        before = len(bag)
        bag.read_rows(torch.arange(900))
        assert (len(errors), len(worked), worked[0]) == (6, 2, before), errors
        train(bag, 11)
        bag.flush()
        assert len(bag) >= before
        bag.close()
        print("closed")
        """,
        tmp_path,
    )
    assert out.strip() == "closed"


def test_finalizer_waiting_for_a_thread_of_the_table_ends(tmp_path: Path) -> None:
    """The thread plans a batch and asks for the table's counters, which take its lock. No lock of the table is held meanwhile."""
    out = run(
        """
        held = []
        patched(DeviceTier, "gather", lambda *_: (held.clear(), gc.collect()))
        bag = make()
        for step in range(10):
            train(bag, step)

        done = []

        def uses():
            stats = bag.stats()
            done.append((len(bag), stats.step))

        class Waits:
            def __del__(self):
                thread = threading.Thread(target=uses)
                thread.start()
                thread.join()

        for work in (
            lambda: bag.read_rows(torch.arange(900)),
            lambda: train(bag, 40),
            bag.flush,
            lambda: list(bag.export()),
            lambda: Saver(0).save(bag, directory + "/checkpoint"),
        ):
            train(bag, 41)  # dirty rows, of which some are on the device
            cycle = Waits()
            cycle.itself = cycle
            held.append(cycle)
            del cycle
            work()
        assert len(done) == 5, done
        bag.close()
        print("closed")
        """,
        tmp_path,
    )
    assert out.strip() == "closed"


@pytest.mark.parametrize("kernels", ["core", "torch"])
def test_finalizer_waiting_for_a_trainer_of_the_same_rows_ends(tmp_path: Path, kernels: str) -> None:
    """The collector runs as often as it can. It waits while rows on the device are placed, read or updated."""
    out = run(
        """
        bag = make()
        train(bag, 0)
        gc.set_threshold(1, 1, 1)
        trained = []

        class Waits:
            def __init__(self):
                self.itself = self

            def __del__(self):
                thread = threading.Thread(target=lambda: trained.append(train(bag, 100 + len(trained))))
                thread.start()
                thread.join()

        def litter(*_):  # by the steps of this thread alone, because each finaliser makes a step, too
            if threading.current_thread() is threading.main_thread():
                Waits()

        patched(DeviceTier, "gather", litter)
        patched(DeviceTier, "scatter", litter)
        for step in range(1, 12):
            train(bag, step)
            assert gc.isenabled()
        bag.read_rows(torch.arange(900))
        bag.flush()
        gc.set_threshold(700, 10, 10)
        assert len(trained) > 10, len(trained)
        assert gc.isenabled() and bag.stats().step >= 12 + len(trained)
        gc.collect()
        gc.disable()
        train(bag, 50)
        assert not gc.isenabled(), "it stays off where its user has turned it off"
        gc.collect()
        bag.close()
        print("trained")
        """,
        tmp_path,
        kernels,
    )
    assert out.strip() == "trained"


def test_child_forked_while_rows_are_read_can_collect_garbage(tmp_path: Path) -> None:
    out = run(
        """
        codes = []

        def forked(*_):
            assert not gc.isenabled()
            child = os.fork()
            if child == 0:
                os._exit(7 if gc.isenabled() else 8)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        patched(DeviceTier, "gather", forked)
        bag = make()
        for step in range(3):
            train(bag, step)
        assert codes, "no row was read"
        assert set(codes) == {7}
        assert gc.isenabled()
        bag.close()
        print("collected")
        """,
        tmp_path,
    )
    assert out.strip() == "collected"


def test_snapshots_dropped_while_rows_are_read_block_no_thread(
    tmp_path: Path,
) -> None:
    out = run(
        """
        held = []
        patched(DeviceTier, "gather", lambda *_: held.clear())
        bag = make()
        for step in range(10):
            train(bag, step)
        native = bag.table._native_table
        root, name = _native.CheckpointDirectory.open_to_save(directory + "/checkpoints", "strict"), "0000000001-0000000000000001"
        os.mkdir(root.path + "/" + name, 0o750)

        def part():
            made = _native.CheckpointPart(root, 7, 0)
            made.snapshot_tables([_native.AsyncSaveTable("m", native, {})], native.epoch() + 1)
            return made

        def snapshot():
            return _native.CheckpointSnapshot(root, name, 0, 1, [_native.AsyncSaveTable("m", native, {})], native.epoch() + 1, None)

        for make_one in (part, snapshot):
            held.append(make_one())
            native.read_rows(torch.arange(900).numpy())
            assert not held
            make_one()  # it would be refused while another is held
        native.clear()  # waits for a save that is under way
        bag.close()
        print("closed")
        """,
        tmp_path,
    )
    assert out.strip() == "closed"
