"""Exit of the interpreter, Ctrl-C and forks: nothing hangs, nothing breaks, and no pin stays."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tables import jagged, make_bag

BEFORE = """
import gc, itertools, os, signal, sys, threading
import numpy as np
import torch
from torchrec_embcache import _native
from torchrec_embcache.exceptions import StateError
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers

def make(directory, **more):
    tiers = TierBudgets(host_bytes="64KiB", ssd_bytes="8MiB", ssd_dir=directory, reopen="discard", **more)
    return EmbCacheEmbeddingBag(
        name="item", embedding_dim=8, tiers=tiers, optimizer=optimizers.Adagrad(lr=0.1), seed=7
    )

def ids(step, count=512):
    return (torch.arange(count) * 7919 + step * 131) % 6000

offsets = torch.arange(0, 512, 4)

def train(bag, step):
    bag(ids(step), offsets).sum().backward()
"""


def run(script: str, directory: Path) -> str:
    """The output of a script in a process of its own, which must end well and soon."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(script), str(directory)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "panicked" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("device_bytes", [0, "16KiB"])
def test_an_interpreter_can_end_with_plans_reads_and_graphs_in_flight(tmp_path: Path, device_bytes: int | str) -> None:
    out = run(
        f"""
        bag = make(sys.argv[1], device_bytes={device_bytes!r})
        for step in range(40):
            train(bag, step)
        bag.flush()
        held = bag(ids(1), offsets)
        for step in range(3):
            bag.prefetch(ids(step), offsets)
        export = bag.export(chunk_rows=64)
        next(export)

        # Torch's operators end the process when the interpreter ends under a daemon thread in them; the core's calls do not. With a
        # device tier these call torch.
        lookup = _native.Lookup([bag.table._native_table], [0])
        reading = _native.PlanMode(train=False, is_prefetch=False, missing="initial")
        batches = [ids(step).numpy() for step in range(100, 200)]
        splits = np.array([0, len(batches[0])])

        def work():
            for batch in itertools.cycle(batches):
                plan = lookup.plan(batch, splits, reading, 2)
                plan.wait()
                plan.release()

        if not {device_bytes!r}:
            threading.Thread(target=work, daemon=True).start()
        cycle = [held, export]
        cycle.append(cycle)
        print("ends")
        """,
        tmp_path,
    )
    assert out.strip() == "ends"


@pytest.mark.parametrize("device_bytes", [0, "16KiB"])
def test_ctrl_c_at_any_moment_of_a_step_leaves_a_table_that_trains_on(tmp_path: Path, device_bytes: int | str) -> None:
    out = run(
        f"""
        bag = make(sys.argv[1], device_bytes={device_bytes!r})
        for step in range(20):
            train(bag, step)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        interrupted = 0
        main = threading.main_thread().ident
        for step in range(300):
            # At another moment of each step: as many switches between threads later.
            timer = threading.Thread(
                target=lambda step=step: ([None for _ in range(step * 300)], signal.pthread_kill(main, signal.SIGINT))
            )
            try:
                timer.start()
                train(bag, step)
                if step % 10 == 0:
                    bag.flush()
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            try:
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
        gc.collect()
        assert bag.stats().pinned_rows == 0, bag.stats()
        train(bag, 1000)
        bag.flush()
        rows = sum(len(chunk.ids) for chunk in bag.export())
        assert rows == len(bag), (rows, len(bag))
        bag.close()
        assert interrupted == 300, interrupted
        print("trained on")
        """,
        tmp_path,
    )
    assert out.strip() == "trained on"


def test_forked_loader_workers_do_not_touch_the_table(tmp_path: Path) -> None:
    out = run(
        """
        bag = make(sys.argv[1])

        class Batches(torch.utils.data.Dataset):
            # A data set that holds the model, as some do: its workers inherit it.
            model = bag
            def __len__(self):
                return 24
            def __getitem__(self, step):
                try:
                    bag.stats()
                except StateError as error:
                    refused = "fork" in str(error)
                else:
                    refused = False
                if step % 3 == 0:
                    Batches.model = None
                    gc.collect()
                return ids(step), refused

        def batches():
            return torch.utils.data.DataLoader(
                Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork"
            )

        train(bag, 0)
        for epoch in range(2):
            for batch, refused in batches():
                assert refused
                bag(batch, offsets).sum().backward()
            bag.flush()
        rows = sum(len(chunk.ids) for chunk in bag.export())
        assert rows == len(bag) and bag.stats().pinned_rows == 0
        bag.close()
        print("left alone")
        """,
        tmp_path,
    )
    assert out.strip() == "left alone"


def test_a_forward_that_is_given_up_returns_its_pins_with_its_graph() -> None:
    with make_bag() as bag:
        out = bag(*jagged([[1, 2], [3]]))
        assert bag.stats().pinned_rows == 3
        with pytest.raises(ZeroDivisionError):
            _ = [out, 1 // 0]
        del out
        gc.collect()
        assert bag.stats().pinned_rows == 0
        assert len(bag) == 0
