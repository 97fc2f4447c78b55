"""Both ranks of a sharded model are killed at random, one shortly after the other. They resume one complete flush of both."""

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from processes import Child, process_group
from torchrec_embcache import TierBudgets, cache_modules, flush
from torchrec_models import MIXED, Model, Rows, Settings, batches, rows_of, sharded

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
STEPS = 40
RAM = TierBudgets(host_bytes="4MiB")
pytestmark = pytest.mark.filterwarnings("ignore:table .* did not fit", "ignore:table .* has no room for both")


def a_model(tiers: TierBudgets) -> Any:
    """A model whose linear layer does not change, so that training changes the tables alone."""
    return sharded(Model(Settings(tiers=tiers)), MIXED, FUSED)


def on_ssd(folder: str) -> TierBudgets:
    return TierBudgets(host_bytes="2KiB", ssd_bytes="8MiB", ssd_dir=folder, reopen="resume")


def train(model: Any, rank: int, steps: range) -> None:
    for batch in list(batches(steps.stop, rank, 2))[steps.start :]:
        loss, _ = model(batch)
        loss.backward()


def steps_done(model: Any) -> int:
    """The step of all tables of this rank, which is the same."""
    (done,) = {table.stats().step for module in cache_modules(model).values() for table in module.tables.values()}
    return int(done)


def train_until_killed(say: Callable[[tuple[str, int]], None], rank: int, folder: str, store: str) -> None:
    """Do steps from the last flush on, with a flush after every other one, and then wait."""
    warnings.simplefilter("ignore")
    with process_group(rank, 2, store):
        model = a_model(on_ssd(folder))
        for done in range(steps_done(model), STEPS):
            train(model, rank, range(done, done + 1))
            say(("trained", done + 1))
            if done % 2:
                flush(model)
                say(("flushed", done + 1))
        say(("ended", STEPS))
        signal.pause()


def _resumed(_rank: int, _world: int, folder: str) -> tuple[int, Rows]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = a_model(on_ssd(folder))
        found = steps_done(model), rows_of(model)
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table._native_table.close()  # without a flush, so that the next process finds what this one did
    return found


def _straight(rank: int, _world: int, steps: int) -> Rows:
    model = a_model(RAM)
    train(model, rank, range(steps))
    return rows_of(model)


def _to_the_end(rank: int, _world: int, folder: str) -> Rows:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = a_model(on_ssd(folder))
        train(model, rank, range(steps_done(model), STEPS))
        return rows_of(model)


def test_two_ranks_killed_at_random_resume_one_flush_of_both(two_ranks, tmp_path):
    folder = tmp_path / "ssd"
    folder.mkdir(mode=0o700)
    draw = random.Random(5)
    flushed, progress = 0, set()
    for number in range(int(os.environ.get("EMBCACHE_PYTHON_KILLS", "2"))):
        ranks = [Child(train_until_killed, rank, str(folder), str(tmp_path / f"store{number}")) for rank in range(2)]
        said: list[list[tuple[str, int]]] = [[], []]
        first = draw.randrange(2)
        for _word in range(draw.randrange(5, 12)):
            said[first].append(ranks[first].hear())
            if said[first][-1][0] == "ended":
                break
        time.sleep(draw.random() * 0.02)
        for place in (first, 1 - first):
            ranks[place].kill()
            time.sleep(draw.random() * 0.005)
        for place, child in enumerate(ranks):
            rest, status = child.ended()
            said[place].extend(rest)
            # The second rank may have found the first one gone, and be about to end.
            assert status == -9 or place != first, "a rank ended by itself"
        # A flush that returned on one rank is complete for both.
        told = [done for words in said for what, done in words if what == "flushed"]
        flushed = max([flushed, *told])
        found = two_ranks.run(_resumed, str(folder))
        (done,) = {steps for steps, _ in found}
        assert done >= flushed > 0
        assert done % 2 == 0
        assert [rows for _, rows in found] == two_ranks.run(_straight, done)
        progress.add(done)
    assert len(progress) > 1 or progress == {STEPS}, "each process goes on from where the one before was"
    assert two_ranks.run(_to_the_end, str(folder)) == two_ranks.run(_straight, STEPS)
