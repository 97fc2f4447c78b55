"""Measures one request through Python, with the size used in the published times of HugeCTR's HPS: 2,000 ids of 630k rows.

    python benches/python/serving_python.py [NAME ...] [--smoke]

A request pins a version, and looks up 2,000 ids drawn from a Zipf distribution, on one thread, with all rows in memory. This prints
one row of results.json, the median time of a request. The 99th percentile is in its `run`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from results import row
from scratch import scratch
from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving

NAME = "serve_python_630k_rows_ms"
DIM = 64
IDS = 2000
# The Zipf exponent of the ids of a request, as in the other serving benches.
EXPONENT = 1.05
IMPORTED_AT_ONCE = 100_000


def distinct(count: int) -> NDArray[np.int64]:
    """Returns `count` distinct ids of 62 bits."""
    found = np.unique(np.random.default_rng(0).integers(0, 1 << 62, count + count // 8, dtype=np.int64))
    return found[:count]


def save(path: Path, ids: NDArray[np.int64]) -> None:
    """Saves a table with these ids."""
    tiers = TierBudgets(host_bytes=f"{len(ids) * 512 >> 20}MiB")
    table = EmbCacheEmbedding(name="item", embedding_dim=DIM, tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
    rng = np.random.default_rng(1)
    for some in np.array_split(ids, max(1, len(ids) // IMPORTED_AT_ONCE)):
        table.import_rows(some, rng.random((len(some), DIM), np.float32))
    Saver(0).save(table, path)


def requests(ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Returns the ids of `count` requests: [count, IDS]."""
    rng = np.random.default_rng(2)
    weights = np.arange(1, len(ids) + 1, dtype=np.float64) ** -EXPONENT
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random((count, IDS)))
    return rng.permutation(ids)[np.minimum(ranks, len(ids) - 1)]


def milliseconds(tables: serving.Tables, asked: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the time of each request."""
    times = np.empty(len(asked))
    for number, ids in enumerate(asked):
        begin = time.perf_counter()
        with tables.pin() as version:
            rows = version["item"].lookup(ids)
        times[number] = (time.perf_counter() - begin) * 1e3
        assert rows.found.all()
    return times


def main() -> int:
    """Measures, and prints the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benches; there is one here, which is measured whatever they are")
    parser.add_argument("--smoke", action="store_true", help="a small table, one round: shows that it runs")
    options = parser.parse_args()
    rows, count, rounds = (20_000, 20, 1) if options.smoke else (630_000, 2000, 5)
    ids = distinct(rows)
    with scratch(2 * rows * DIM * 4) as folder:
        save(folder / "ckpt", ids)
        asked = requests(ids, count)
        with serving.open(folder / "ckpt", preload=True) as tables:
            milliseconds(tables, asked)
            measured = [milliseconds(tables, asked) for _ in range(rounds)]
    medians = [float(np.median(times)) for times in measured]
    late = float(np.median([np.quantile(times, 0.99) for times in measured]))
    print(json.dumps(row(NAME, "ms", "lower", medians, run={"p99_ms": late})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
