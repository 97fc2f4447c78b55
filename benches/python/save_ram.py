"""The RAM that saving takes of a process that trains: the most bytes resident while a save runs, less those before it.

The DLRM and the batches are those of dlrm.py, all rows in RAM. A blocking save and one beside training take turns; the worse of
both counts, what a training step takes for itself with it. Prints one row of results.json.

    python benches/python/save_ram.py [--smoke]
"""

import argparse
import ctypes
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlrm import SAMPLES, TABLES, THREADS, Batches, Scale, Side, Stream, make_ours, one_rank
from dlrm_async import BATCHES_AHEAD, ROW_BYTES
from results import row
from torchrec_embcache import TierBudgets
from torchrec_embcache.saver import Saver

NAME = "save_extra_ram_bytes"
# As in <malloc.h>.
M_MMAP_THRESHOLD = -3


def keep_out_of_the_heap(block_bytes: int) -> None:
    """From now on the C library gives such blocks memory of their own.

    In its heap what a step gave back stays resident or not, as it happens to lie: that alone moves the bytes resident between two
    steps by 200 MiB.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, block_bytes) == 1


def resident(what: str) -> int:
    """Bytes that /proc/self/status gives as VmRSS (now) or VmHWM (the most since the peak was forgotten)."""
    found = re.search(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def most_more(work: Callable[[], object]) -> int:
    """The most bytes resident while `work` runs, less those before."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident("VmHWM") - before


def measure(scale: Scale, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """The bench's row of results.json."""
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
    run = {
        "blocking": round(statistics.median(blocking)),
        "beside_training": round(statistics.median(beside)),
        "steps_alone": round(statistics.median(alone)),
    }
    return row(NAME, "bytes", "lower", extra, run=run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benches; there is one here, which is measured whatever they are")
    parser.add_argument("--smoke", action="store_true", help="small tables, one round: shows that it runs")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables together")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lookahead = 2
    if options.smoke:
        scale = Scale(80_000, 256, 4, 3, 1, lookahead, "s3fifo")
    else:
        scale = Scale(options.rows, SAMPLES, 10, 3, options.rounds, lookahead, "s3fifo")
    keep_out_of_the_heap(1 << 20)
    with one_rank() as (folder, note):
        measured = measure(scale, folder, note)
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
