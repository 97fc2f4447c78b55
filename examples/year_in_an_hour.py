"""Train on a stream of a year, in which users and items arrive and leave, with a table that evicts rows.

Two tables are trained on the same samples (drift.py). One keeps every id in RAM. The other is limited by rules: an id is admitted
when it has occurred twice, and its row expires when it was not trained for a long time, or earlier if it occurred rarely. Its rows
are stored in a small RAM budget and on SSD. Each day is predicted before it is trained on (progressive validation). This prints the
accuracy and the memory use of both tables, month by month.

`--full` is a larger world, whose year takes about an hour on two cores. `--admission` instead shows the savings from admission
only, on ids drawn by Zipf's law, 60% of which occur once.

Shapes: B samples per batch, S per day, D columns.
"""

import argparse
import logging
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from drift import Day, Drift, mixed
from reporting import Checks
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, admission, eviction, initializers, optimizers
from torchrec_embcache.stats import TableStats

DIM = 8  # the last column is a bias
BATCH = 2000  # B
MONTH = 30  # days
FULL_SCALE = 24.0
# The rules, in days: a row expires when it was not trained for this long, or for a shorter time if its score is low.
TTL_DAYS = 90
SELDOM_DAYS = 20
SELDOM_SCORE = 2.0
HALF_LIFE_DAYS = 30
THRESHOLD = 2


class Model(nn.Module):
    """The log odds that a user likes an item: the product of their factors, plus the bias of each."""

    def __init__(self, table: EmbCacheEmbedding) -> None:
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the log odds [B] of ids [B, 2]."""
        user_BD, item_BD = self.table(ids).unbind(1)
        odds: torch.Tensor = (user_BD[:, :-1] * item_BD[:, :-1]).sum(1) + user_BD[:, -1] + item_BD[:, -1] + self.bias
        return odds


def make_table(
    tiers: TierBudgets,
    admit: admission.Admission | None = None,
    policy: eviction.Policy | None = None,
    half_life_steps: int = 1024,
) -> EmbCacheEmbedding:
    return EmbCacheEmbedding(
        name="people and things",  # the initial values of rows depend on it
        embedding_dim=DIM,
        tiers=tiers,
        initializer=initializers.Uniform(-0.3, 0.3),
        optimizer=optimizers.RowWiseAdagrad(lr=0.25),
        missing="zeros",
        admission=admit,
        eviction=policy,
        score_half_life_steps=half_life_steps,
        total_num_buckets=256,  # a small number: the counts of a bucket use at least 256 bytes
        seed=3,
    )


def auc(odds: NDArray[np.float64], labels: NDArray[np.float32]) -> float:
    """Returns the probability that a sample of label 1 has greater odds than one of label 0. Equal odds count half."""
    _, inverse, counts = np.unique(odds, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    ones = int(labels.sum())
    zeros = len(labels) - ones
    return float((rank[labels > 0].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def log_loss(odds: NDArray[np.float64], labels: NDArray[np.float32]) -> float:
    """Returns the log loss in nats per sample."""
    return float(np.mean(np.logaddexp(0, odds) - odds * labels))


@dataclass
class Learner:
    """A model in training, and its metrics on each day of the month, measured before the day was trained."""

    name: str
    model: Model
    aucs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dense = torch.optim.Adagrad([self.model.bias], lr=0.05)

    def live(self, day: Day) -> None:
        """Predicts a day, and then trains on it. While a batch computes, the next one is planned and read from SSD."""
        ids, labels = torch.split(torch.from_numpy(day.ids), BATCH), torch.split(torch.from_numpy(day.labels), BATCH)
        self.model.eval()
        with torch.no_grad():
            odds = torch.cat([self.model(part) for part in ids]).double().numpy()
        self.aucs.append(auc(odds, day.labels))
        self.losses.append(log_loss(odds, day.labels))
        self.model.train()
        self.model.table.prefetch(ids[0])
        for at, (batch, wanted) in enumerate(zip(ids, labels, strict=True)):
            if at + 1 < len(ids):
                self.model.table.prefetch(ids[at + 1])
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), wanted, reduction="sum")
            self._dense.zero_grad()
            torch.autograd.backward(loss)
            self._dense.step()

    def month(self) -> tuple[float, float]:
        """Returns the mean AUC and the mean log loss of the days since the last call."""
        found = float(np.mean(self.aucs)), float(np.mean(self.losses))
        self.aucs.clear()
        self.losses.clear()
        return found


def ram_bytes(stats: TableStats) -> int:
    """Returns the bytes of RAM of the rows and their index, of the index of the rows on SSD, and of admission counts."""
    counts = stats.admission.pending_bytes if stats.admission else 0
    # The host tier's bytes include at most 12 bytes per row of the index of the rows on SSD, beyond its first 64 KiB.
    index = stats.ssd.index_bytes if stats.ssd else 0
    index -= max(0, min(index, 12 * stats.ssd.rows) - 2**16) if stats.ssd else 0
    return stats.host.bytes + index + counts


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def steps_a_day(drift: Drift) -> int:
    return math.ceil(drift.samples / BATCH)


def capped_table(drift: Drift, scale: float, folder: Path) -> EmbCacheEmbedding:
    daily = steps_a_day(drift)
    rules: list[eviction.Rule] = [
        eviction.Ttl(steps=TTL_DAYS * daily),
        eviction.All([eviction.Ttl(steps=SELDOM_DAYS * daily), eviction.Score(below=SELDOM_SCORE)]),
    ]
    # The RAM fits the rows of a batch and some more, and the index of the rows on SSD.
    tiers = TierBudgets(host_bytes=int(2**18 + 2**22 * scale), ssd_bytes=int(2**25 * max(0.5, scale)), ssd_dir=folder)
    admit = admission.Count(THRESHOLD, window_steps=SELDOM_DAYS * daily)
    policy = eviction.Policy(rules, every_steps=daily)
    return make_table(tiers, admit, policy, HALF_LIFE_DAYS * daily)


HEADS = (
    "month  best AUC | AUC all  capped | log loss all  capped |     rows all    capped | RAM MiB all  capped "
    "| SSD MiB capped |   admitted    evicted |     s"
)


def show_month(month: int, best: float, learners: Sequence[Learner], seconds: float) -> None:
    (auc_all, loss_all), (auc_capped, loss_capped) = (learner.month() for learner in learners)
    every, capped = (learner.model.table.stats() for learner in learners)
    assert capped.ssd is not None
    assert capped.admission is not None
    assert capped.eviction is not None
    print(
        f"{month:5}  {best:8.4f} | {auc_all:7.4f} {auc_capped:7.4f} | {loss_all:12.4f} {loss_capped:7.4f} "
        f"| {every.rows:12} {capped.rows:9} | {mib(ram_bytes(every)):>11} {mib(ram_bytes(capped)):>7} "
        f"| {mib(capped.ssd.bytes):>14} | {capped.admission.admitted:10} {capped.eviction.evicted:10} | {seconds:5.0f}",
        flush=True,
    )


def year(days: int, hours: float, scale: float, seed: int) -> int:
    """Trains both tables, and prints one row per month. Returns exit status 0 if all checks succeed."""
    begin = time.monotonic()
    drift = Drift(scale, seed)
    checks = Checks()
    print(f"{days} days of {drift.samples} samples; a row after each {MONTH} days\n{HEADS}")
    with tempfile.TemporaryDirectory() as folder:
        ssd_dir = Path(folder) / "ssd"
        ssd_dir.mkdir(mode=0o750)
        all_tiers = TierBudgets(host_bytes=int(2**28 * max(1.0, scale)))  # fits every row
        with make_table(all_tiers) as every, capped_table(drift, scale, ssd_dir) as capped:
            learners = [Learner("all", Model(every)), Learner("capped", Model(capped))]
            best: list[float] = []
            done = 0
            while done < days and time.monotonic() - begin < hours * 3600:
                day = drift.next_day()
                best.append(auc(day.chances, day.labels))
                for learner in learners:
                    learner.live(day)
                done += 1
                if done % MONTH == 0 or done == days:
                    show_month(math.ceil(done / MONTH), float(np.mean(best)), learners, time.monotonic() - begin)
                    best.clear()
            print(f"{done} days; {drift.ever} users and items have been in the world")
            check_capped(checks, every, capped, TTL_DAYS * steps_a_day(drift))
    return checks.end()


def check_capped(checks: Checks, every: EmbCacheEmbedding, capped: EmbCacheEmbedding, ttl_steps: int) -> None:
    stats = capped.stats()
    assert stats.ssd is not None
    host, ssd = stats.host, stats.ssd
    checks("the capped table has fewer rows", len(capped) < len(every), f"{len(capped)} of {len(every)}")
    checks("its RAM is within its budget", host.bytes <= host.capacity_bytes, f"{host.bytes} of {host.capacity_bytes}")
    checks("its SSD is within its budget", ssd.bytes <= ssd.capacity_bytes, f"{ssd.bytes} of {ssd.capacity_bytes}")
    # A sweep follows the last step of each day.
    oldest = min((int(chunk.metadata.last_step.min()) for chunk in capped.export()), default=stats.step)
    waits = stats.step - oldest
    checks("its rows were trained lately", waits < ttl_steps, f"{waits} steps ago at most, {ttl_steps} allowed")


def zipf_cumulative(ids: int, exponent: float) -> NDArray[np.float64]:
    cumulative = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -exponent)
    return np.asarray(cumulative / cumulative[-1])


def expected_once(ids: int, exponent: float, draws: int) -> float:
    """Returns the expected fraction of the drawn ids, among `ids` ids, that occur exactly once in `draws` draws."""
    chance = np.diff(zipf_cumulative(ids, exponent), prepend=0)
    never = np.exp(draws * np.log1p(-chance))
    once = draws * chance / (1 - chance) * never
    return float(once.sum() / (1 - never).sum())


def ids_for_share(share: float, exponent: float, draws: int) -> int:
    """Returns the number of ids for which this fraction of the distinct drawn ids occurs once in `draws` draws."""
    low, high = 2, 4 * draws
    while high - low > low // 1000 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if expected_once(middle, exponent, draws) < share else (low, middle)
    return high


def show_admission(steps: int, exponent: float, share: float, seed: int) -> int:
    """Trains tables with and without admission on the same ids, and prints their memory use."""
    checks = Checks()
    ids = ids_for_share(share, exponent, steps * 2 * BATCH)
    cumulative = zipf_cumulative(ids, exponent)
    drawn = np.zeros(ids, np.int64)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        drawn += np.bincount(np.searchsorted(cumulative, random.random(2 * BATCH)).clip(max=ids - 1), minlength=ids)
    distinct, once = int((drawn > 0).sum()), int((drawn == 1).sum())
    print(f"{drawn.sum()} ids drawn by Zipf's law (exponent {exponent}) of {ids}: {distinct} distinct ones")
    checks(
        f"{share:.0%} of these come once, or 2% more or less",
        abs(once / distinct - share) <= 0.02,
        f"{once / distinct:.2%}",
    )
    print(
        "  admission     rows   saved   written to SSD MiB   saved   on SSD MiB   RAM MiB   admitted    pending     s"
    )
    first: tuple[int, int] | None = None
    for admit in (None, admission.Count(2), admission.Count(3), admission.Count(5)):
        begin = time.monotonic()
        stats = trained(admit, cumulative, steps, seed, budget=distinct * 24)
        assert stats.ssd is not None
        first = first or (stats.rows, stats.ssd.written_bytes)
        rows, written = 1 - stats.rows / first[0], 1 - stats.ssd.written_bytes / first[1]
        said = stats.admission
        print(
            f"  {f'Count({admit.threshold})' if admit else 'none':9} {stats.rows:8} {rows:7.1%} "
            f"{mib(stats.ssd.written_bytes):>20} {written:7.1%} {mib(stats.ssd.bytes):>12} {mib(ram_bytes(stats)):>9} "
            f"{said.admitted if said else stats.rows:10} {said.pending if said else 0:10} {time.monotonic() - begin:5.0f}",
            flush=True,
        )
        expected = int((drawn >= (admit.threshold if admit else 1)).sum())
        checks("a row for each id that came so often", stats.rows == expected, f"{stats.rows} of {expected}")
    return checks.end()


def trained(
    admit: admission.Admission | None, cumulative: NDArray[np.float64], steps: int, seed: int, budget: int
) -> TableStats:
    """Returns the counters of a table that was trained on the stream and flushed."""
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        ssd_dir = Path(folder) / "ssd"
        ssd_dir.mkdir(mode=0o750)
        tiers = TierBudgets(host_bytes=2**20 + budget, ssd_bytes=2**26 + 40 * budget, ssd_dir=ssd_dir)
        with make_table(tiers, admit) as table:
            for _ in range(steps):
                ranks = np.searchsorted(cumulative, random.random(2 * BATCH)).clip(max=len(cumulative) - 1)
                out = table(torch.from_numpy(mixed(ranks)))
                out.backward(torch.full_like(out, 0.01))
            table.flush()
            return table.stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--hours", type=float, default=math.inf, help="stop after so many hours, at the end of a day")
    parser.add_argument("--scale", type=float, default=1.0, help="users, items and samples of a day, as a multiple")
    parser.add_argument("--full", action="store_true", help=f"as --scale {FULL_SCALE:g}: about an hour on two cores")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--admission", action="store_true", help="show what admission saves on a stream of Zipf's law")
    parser.add_argument("--steps", type=int, default=1000, help="with --admission: batches, of 4000 ids each")
    parser.add_argument("--exponent", type=float, default=1.05, help="with --admission: of Zipf's law")
    options = parser.parse_args()
    torch.set_num_threads(1)  # batches are too small for a second thread
    # The tables are discarded at the end, so the warning that a resume would find no counts is irrelevant.
    logging.getLogger("torchrec_embcache").setLevel(logging.ERROR)
    if options.admission:
        return show_admission(options.steps, options.exponent, share=0.6, seed=options.seed)
    return year(options.days, options.hours, FULL_SCALE if options.full else options.scale, options.seed)


if __name__ == "__main__":
    sys.exit(main())
