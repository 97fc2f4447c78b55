"""A training process killed in a step, flush or save resumes bit for bit like one that was not killed."""

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest

from processes import Child
from tables import Contents, make_bag, random_batches, ssd_tiers, train
from torchrec_embcache import CacheTable, initializers, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.config import TierBudgets

BATCHES = random_batches(60, 40, 3000, seed=5)
pytestmark = pytest.mark.filterwarnings("ignore:table '.*' did not fit", "ignore:table .* has no room for both")


def a_bag(root, reopen=None):
    return make_bag(tiers=ssd_tiers(Path(root, "ssd"), host_bytes="24KiB", reopen=reopen))


def train_until_killed(say, root):
    """Do steps from the last flush on, with a flush every other step and a save every fourth, and then wait."""
    warnings.simplefilter("ignore")
    with a_bag(root, "resume") as bag:
        for done in range(bag.stats().step, len(BATCHES)):
            train(bag, BATCHES[done : done + 1], lookahead=1)
            say(("trained", done + 1))
            if done % 2:
                bag.flush()
                say(("flushed", done + 1))
            if done % 4 == 3:
                Saver(0).save(bag, f"{root}/saved")
                say(("saved", done + 1))
        say(("ended", len(BATCHES)))
        signal.pause()


def load_shard(rank, size, root):
    """The rows of a rank's shard of the checkpoint, and the checkpoint's step."""
    from torch import nn

    from torchrec_embcache.model import CacheModule

    table = CacheTable(
        name="item",
        dim=4,
        tiers=TierBudgets(host_bytes="16MiB"),
        initializer=initializers.Uniform(-0.5, 0.5),
        optimizer=optimizers.Adagrad(lr=0.1),
        rank=rank,
        world_size=size,
        seed=7,
    )

    class Shard(CacheModule, nn.Module):
        tables = {"item": table}  # noqa: RUF012

    Saver(rank).load(Shard(), f"{root}/saved")
    return {
        row_id: (chunk.weights[place].numpy().tobytes(), chunk.slots["sum"][place].numpy().tobytes())
        for chunk in table.export()
        for place, row_id in enumerate(chunk.ids.tolist())
    }, table.stats().step


def test_a_training_process_killed_at_random_goes_on_bit_for_bit(two_ranks, tmp_path):
    draw = random.Random(11)
    last = {"trained": 0, "flushed": 0, "saved": 0, "ended": 0}
    for _round in range(int(os.environ.get("EMBCACHE_PYTHON_KILLS", "2"))):
        child = Child(train_until_killed, str(tmp_path))
        for _word in range(draw.randrange(8, 18)):
            what, number = child.hear()
            last[what] = number
            if what == "ended":
                break
        time.sleep(draw.random() * 0.02)
        child.kill()
        said, status = child.ended()
        assert status == -9, "the process ended by itself"
        last.update(said)
        with a_bag(tmp_path, "resume") as bag, make_bag() as straight:
            done = bag.stats().step
            assert done >= last["flushed"]
            train(straight, BATCHES[:done])
            assert Contents.of(bag) == Contents.of(straight)

    with make_bag() as bag, make_bag() as straight:
        Saver(0).load(bag, tmp_path / "saved")
        saved = bag.stats().step
        assert saved >= last["saved"] > 0
        train(straight, BATCHES[:saved])
        assert Contents.of(bag) == Contents.of(straight)
        for going_on in (bag, straight):
            train(going_on, BATCHES[saved:])
        expected = Contents.of(straight)
        assert Contents.of(bag) == expected

    shards = two_ranks.run(load_shard, str(tmp_path))
    with make_bag() as straight:
        train(straight, BATCHES[:saved])
        rows = {row_id: row[:2] for row_id, row in Contents.of(straight).rows.items()}
    assert all(step == saved for _, step in shards)
    assert {**shards[0][0], **shards[1][0]} == rows
    assert len(shards[0][0]) + len(shards[1][0]) == len(rows)

    with a_bag(tmp_path, "resume") as bag:
        train(bag, BATCHES[bag.stats().step :])
        assert Contents.of(bag) == expected
