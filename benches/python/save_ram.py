"""Measures the RAM that a save adds to a training process: the peak resident bytes during a save minus those before it.

The DLRM and the batches are those of dlrm.py, with all rows in RAM. Blocking and asynchronous saves alternate, and the larger value
counts. The memory of a training step is included. This prints one row of results.json.

    python benches/python/save_ram.py [--smoke]
"""

import ctypes
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlrm import TABLES, THREADS, Batches, Scale, Side, Stream, make_ours
from dlrm_async import BATCHES_AHEAD, ROW_BYTES, run
from results import row
from torchrec_embcache import TierBudgets
from torchrec_embcache.checkpoint import Saver

NAME = "save_extra_ram_bytes"
# The value of M_MMAP_THRESHOLD in <malloc.h>.
M_MMAP_THRESHOLD = -3


def keep_out_of_the_heap(block_bytes: int) -> None:
    """Makes the C library map each large block separately from this call on.

    In its heap, memory that a step has freed stays resident or not by chance. That alone changes the resident bytes between two
    steps by 200 MiB.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, block_bytes) == 1


def resident(what: str) -> int:
    """Returns VmRSS (current) or VmHWM (the peak since its reset) from /proc/self/status, in bytes."""
    found = re.search(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def most_more(work: Callable[[], object]) -> int:
    """Returns the peak resident bytes while `work` runs, minus those before."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident("VmHWM") - before


def measure(scale: Scale, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns the bench's row of results.json."""
    torch.set_num_threads(THREADS)
    stream = Stream(Batches(scale))
    model, pipeline = make_ours(scale, TierBudgets(host_bytes=scale.rows // TABLES * ROW_BYTES))
    note("its rows are there")
    side = Side(pipeline, stream, scale.lookahead + 2)
    side.run(scale.warm_steps)
    path = folder / "save"

    def train_while_saving() -> None:
        future = Saver().save_async(model, path)
        while not future.done():
            side.run(1)
        future.result()

    extra, blocking, beside, alone = [], [], [], []
    for _ in range(scale.rounds):
        stream.make_until(side.next + BATCHES_AHEAD)
        alone.append(most_more(lambda: side.run(scale.steps)))
        blocking.append(most_more(lambda: Saver().save(model, path)))
        shutil.rmtree(path)
        side.run(1)
        beside.append(most_more(train_while_saving))
        shutil.rmtree(path)
        stream.forget_before(side.next)
        extra.append(max(blocking[-1], beside[-1]))
        mib = [f"{most[-1] / 2**20:.0f} MiB more" for most in (blocking, beside, alone)]
        note(f"saving {mib[0]}, beside training {mib[1]}, steps alone {mib[2]}")
    figures = {
        "blocking": round(statistics.median(blocking)),
        "beside_training": round(statistics.median(beside)),
        "steps_alone": round(statistics.median(alone)),
    }
    return row(NAME, "bytes", "lower", extra, run=figures)


if __name__ == "__main__":
    keep_out_of_the_heap(1 << 20)
    sys.exit(run(__doc__, (10, 3), measure))
