"""Several processes serve one directory of checkpoints while a trainer saves deltas into it, and the rows that they read are
compared.

    python examples/serve_processes.py --processes 4 --seconds 30

The trainer sets every row of two tables to the number of the save. A request that reads two versions, or a partially written row,
would therefore read two numbers. The clock starts when every process has answered a request. Each process prints one line per
second and one at the end: the version, the delay between its publication and the first request that reads it, and the median and
99th percentile of lookups. At the end, the total memory of the processes is printed.
"""

import argparse
import contextlib
import multiprocessing
import queue
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import torch

from reporting import Checks
from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers, serving

TABLES = ("user", "item")
DIM = 16
# Timeouts, longer than any machine needs to start the processes, and to serve the latest version.
START_SECONDS, END_SECONDS = 600, 300


def make_table(name: str) -> EmbCacheEmbedding:
    return EmbCacheEmbedding(
        name=name, embedding_dim=DIM, tiers=TierBudgets(host_bytes="256MiB"), optimizer=optimizers.SGD(lr=0.1)
    )


class Trainer:
    """Saves a full checkpoint, and then deltas with some changed rows. All values of a row are the number of the save."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.rows, self.saves = path, rows, 0
        self.model = torch.nn.ModuleDict({name: make_table(name) for name in TABLES})
        self._saver = Saver(0)

    def save(self) -> None:
        """Changes some rows and saves. Rows that one request reads are changed together: their ids have the same remainder."""
        ids = torch.arange(self.rows) if self.saves == 0 else torch.arange(self.saves % 10, self.rows, 10)
        for table in self.model.values():
            assert isinstance(table, EmbCacheEmbedding)
            table.import_rows(ids, torch.full((len(ids), DIM), float(self.saves)))
        self._saver.save(self.model, str(self.path), incremental=self.saves > 0, keep=3)
        self.saves += 1


@dataclass
class Served:
    """Results of a serving process."""

    number: int
    requests: int = 0
    mixed: int = 0  # requests that read two numbers
    lost: int = 0  # ids that were not found
    versions: int = 0
    failed_polls: int = 0
    delays: list[float] = field(default_factory=list)  # seconds from a publication to the first read of it
    p50_us: float = 0.0
    p99_us: float = 0.0
    pss_kib: int = 0


def pss_kib() -> int:
    """Returns the memory of this process in KiB, each shared page divided by the number of processes that share it."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


def quantiles(times: list[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile of seconds, in microseconds."""
    if not times:
        return 0.0, 0.0
    p50, p99 = (
        torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    )
    return p50 * 1e6, p99 * 1e6


def serve(number: int, path: str, rows: int, batch: int, ready: Barrier, ends: Event, results: "Queue[Served]") -> None:
    """Answers requests until `ends`, and then until a later version than the first was served.

    Each request reads the same number of rows from both tables, of one version.
    """
    torch.set_num_threads(1)
    served, random = Served(number), torch.Generator().manual_seed(number)
    with serving.open(path, follow=serving.Follow(poll_seconds=0.05)) as tables:
        name, times, all_times, said = "", list[float](), list[float](), time.monotonic()

        def say() -> None:
            p50, p99 = quantiles(times)
            delay = f"{1e3 * served.delays[-1]:.0f} ms" if served.delays else "-"
            stale = tables.stats().staleness_seconds
            print(
                f"process {number}: version {name[:10]}, served {delay} after its publication, {stale:.1f} s old now; "
                f"{len(times)} requests, p50 {p50:.0f} us, p99 {p99:.0f} us",
                flush=True,
            )

        while not ends.is_set() or served.versions < 2:
            last = int(torch.randint(10, (1,), generator=random))
            ids = torch.randint(rows // 10, (batch,), generator=random) * 10 + last
            begin = time.perf_counter()
            with tables.pin() as version:
                found = [version[table].lookup(ids) for table in TABLES]
            times.append(time.perf_counter() - begin)
            served.requests += 1
            read = torch.stack([part[:] for part in found])
            served.mixed += bool(read.min() != read.max())
            served.lost += sum(int((~part.found).sum()) for part in found)
            if version.name != name:
                if name:  # the first version was published before this process started
                    served.delays.append(max(0.0, time.time() - tables.pin().published_at))
                else:
                    ready.wait(START_SECONDS)
                    said = time.monotonic()
                name, served.versions = version.name, served.versions + 1
            if time.monotonic() - said >= 1.0:
                say()
                all_times, times, said = all_times + times, [], time.monotonic()
        say()
        served.p50_us, served.p99_us = quantiles(all_times + times)
        served.failed_polls, served.pss_kib = tables.stats().failed_polls, pss_kib()
        results.put(served)


def run(options: argparse.Namespace, path: Path) -> int:
    """Trains and serves, and compares. Returns exit status 0 if all checks succeed."""
    trainer, checks = Trainer(path, options.rows), Checks()
    trainer.save()
    context: Any = multiprocessing.get_context("spawn")
    ready, ends, results = context.Barrier(options.processes + 1), context.Event(), context.Queue()
    processes = [
        # Daemon processes end with this one, for any reason.
        context.Process(
            target=serve, args=(number, str(path), options.rows, options.batch, ready, ends, results), daemon=True
        )
        for number in range(options.processes)
    ]
    for process in processes:
        process.start()
    ready.wait(START_SECONDS)
    stop = time.monotonic() + options.seconds
    while time.monotonic() < stop:
        next_save = time.monotonic() + options.every
        trainer.save()
        time.sleep(max(0.0, min(next_save, stop) - time.monotonic()))
    ends.set()
    found: list[Served] = []
    with contextlib.suppress(queue.Empty):
        found.extend(results.get(timeout=END_SECONDS) for _ in processes)
    for process in processes:
        process.join(END_SECONDS)
    print(f"{trainer.saves} saves of {options.rows} rows in each of {len(TABLES)} tables")
    for served in sorted(found, key=lambda served: served.number):
        slowest = max(served.delays, default=0.0)
        print(
            f"process {served.number}: {served.requests} requests over {served.versions} versions, p50 {served.p50_us:.0f} us, "
            f"p99 {served.p99_us:.0f} us, a version is served at most {1e3 * slowest:.0f} ms after its publication, "
            f"{served.pss_kib} KiB"
        )
    checks("every process served to the end", len(found) == options.processes, f"{len(found)} of {options.processes}")
    checks("no request read two versions", not any(served.mixed for served in found))
    checks("every id was found", not any(served.lost for served in found))
    checks("every process saw later versions", all(served.versions > 1 for served in found))
    checks("no look for a newer version failed", not any(served.failed_polls for served in found))
    return checks.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two saves")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--batch", type=int, default=1000, help="ids of a request, in each table")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go, kept; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return run(options, (options.folder or Path(temporary)) / "ckpt")


if __name__ == "__main__":
    sys.exit(main())
