"""Trains a table of 100M rows, larger than the RAM of many machines, from its first row on within 4 GiB of resident memory.

Every row is inserted by a training step: batches of new ids are trained until the table has 1M, 10M and 100M rows. At each size the
table is trained on batches that are drawn by Zipf's law over all existing rows. This prints rows of results.json: the peak resident
bytes of this process, including torch, and the training rate at each size.

    python benches/python/train_100m.py [NAME ...] [--smoke]

`EMBCACHE_BENCH_BIG_ROWS` sets another number of rows. Shapes: B bags of L ids, D columns.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from results import row
from scratch import die_with_parent, scratch
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers

PEAK = "train_100m_rows_peak_rss_bytes"
RATES = ("train_ssd_zipf105_1m", "train_ssd_zipf105_10m", "train_ssd_zipf105_100m")
DIM = 64
BAGS = 8192  # B
BAG = 20  # L
ROUNDS = 5
STEPS = 20  # per round
THREADS = 2
# With this budget, the total of torch, the write buffers and the batches in flight stays below 4 GiB.
HOST_BYTES = 5 << 29
BYTES_A_ROW = 368  # a record and its entry in a footer, at most 323, and headroom


def scattered(ranks: NDArray[np.int64]) -> torch.Tensor:
    """Returns an id for each rank, by the finalizer of SplitMix64, so neither neighboring ids nor low bits depend on the rank."""
    x = ranks.astype(np.uint64) ^ np.uint64(0x5851F42D4C957F2D)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64)).view(-1, BAG)


def zipf_ranks(random: np.random.Generator, count: int, rows: int) -> NDArray[np.int64]:
    """Draws `count` ranks below `rows`, rank r in proportion to (r + 1)^-1.05. Ranks past `rows` are drawn again."""
    parts: list[NDArray[np.int64]] = []
    while (missing := count - sum(map(len, parts))) > 0:
        drawn = random.zipf(1.05, 2 * missing + 64)
        parts.append(drawn[drawn <= rows][:missing] - 1)
    return np.concatenate(parts)


def resident() -> dict[str, int]:
    """Returns VmRSS (current) and VmHWM (the peak), in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")}


def train(table: EmbCacheEmbeddingBag, batches: Iterator[torch.Tensor]) -> int:
    """Trains on each batch while the next one is fetched. Returns the number of ids."""
    count = 0
    waiting = next(batches, None)
    if waiting is not None:
        table.prefetch(waiting)
    while waiting is not None:
        ids, waiting = waiting, next(batches, None)
        if waiting is not None:
            table.prefetch(waiting)
        out_BD = table(ids)
        out_BD.backward(torch.full_like(out_BD, 0.01))
        count += ids.numel()
    return count


def born(begin: int, end: int, bags: int) -> Iterator[torch.Tensor]:
    """Yields batches of the ids of ranks begin..end, each id once."""
    for first in range(begin, end, bags * BAG):
        yield scattered(np.arange(first, min(end, first + bags * BAG), dtype=np.int64))


def measure(rows: int, bags: int, steps: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of results.json, with the peak last."""
    torch.set_num_threads(THREADS)
    ssd_bytes = rows * BYTES_A_ROW + (512 << 20)
    table = EmbCacheEmbeddingBag(
        name="big",
        embedding_dim=DIM,
        mode="sum",
        tiers=TierBudgets(host_bytes=HOST_BYTES, ssd_bytes=ssd_bytes, ssd_dir=folder),
        initializer=initializers.Uniform(-0.01, 0.01),
        optimizer=optimizers.RowWiseAdagrad(lr=0.02),
        seed=3,
    )
    random = np.random.default_rng(9)
    zipf: list[list[float]] = []
    birth_rates: list[float] = []
    here = 0
    for size in (rows // 100, rows // 10, rows):
        begin, before = time.perf_counter(), here
        train(table, born(here, size, bags))
        here = size
        birth_rates.append((size - before) / (time.perf_counter() - begin))
        print(f"{size} rows: {birth_rates[-1]:.0f} born/s, {resident()}", file=sys.stderr, flush=True)
        rates = []
        for _ in range(1 + (ROUNDS if steps > 1 else 1)):  # the first is not counted: it reads recently inserted rows
            batches = [scattered(zipf_ranks(random, bags * BAG, size)) for _ in range(steps)]
            begin = time.perf_counter()
            rates.append(train(table, iter(batches)) / (time.perf_counter() - begin))
        zipf.append(rates[1:])
        print(f"{size} rows: zipf {rates[-1]:.0f} rows/s, {resident()}", file=sys.stderr, flush=True)
        yield row(RATES[len(zipf) - 1], "rows/s", "higher", zipf[-1], run={"born_per_second": round(birth_rates[-1])})
    begin = time.perf_counter()
    table.flush()
    flushed = time.perf_counter() - begin
    stats = table.stats()
    assert len(table) == rows, (len(table), rows)
    assert stats.ssd is not None
    run = {
        "rows": rows,
        "rows_per_second_zipf105": round(statistics.median(zipf[-1])),
        "rows_per_second_born": round(birth_rates[-1]),
        "flush_seconds": round(flushed, 2),
        "rows_on_ssd": stats.ssd.rows,
        "rows_in_ram": stats.host.rows,
        "ssd_index_bytes": stats.ssd.index_bytes,
        "written_bytes": stats.ssd.written_bytes,
        "read_bytes": stats.ssd.read_bytes,
    }
    table.close()
    yield row(PEAK, "bytes", "lower", [float(resident()["VmHWM"])], run=run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of the rows to print; all when there are none")
    parser.add_argument("--smoke", action="store_true", help="few rows, one round: shows that it runs")
    options = parser.parse_args()
    die_with_parent()
    rows = int(os.environ.get("EMBCACHE_BENCH_BIG_ROWS") or (60_000 if options.smoke else 100_000_000))
    bags, steps = (64, 1) if options.smoke else (BAGS, STEPS)
    with scratch(rows * BYTES_A_ROW + (2 << 30)) as folder:
        for found in measure(rows, bags, steps, folder):
            if not options.names or found["name"] in options.names:
                print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
