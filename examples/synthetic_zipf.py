"""Train a table that is ten times its RAM budget, on ids drawn by Zipf's law, and show the cost.

The same batches are trained on two tables: one has all rows in RAM, the other a tenth of them and the rest on SSD. The losses and
all rows must be bitwise identical. This prints steps per second, hits by tier and resident memory.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers

DIM = 64
ROW_BYTES = 4 * DIM + 32  # rowwise Adagrad: weights and header


def zipf_batches(steps: int, size: int, bag: int, rows: int, exponent: float = 1.05) -> Iterator[torch.Tensor]:
    """Yields ids [size, bag]. Rank r is drawn in proportion to r^-exponent, and ranks are scattered over all of int64."""
    generator = torch.Generator().manual_seed(0)
    cumulative = torch.cumsum(torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent, 0)
    for _ in range(steps):
        points = torch.rand(size * bag, generator=generator, dtype=torch.float64) * cumulative[-1]
        rank = torch.searchsorted(cumulative, points).clamp(max=rows - 1)
        yield (rank * 0x1E3779B97F4A7C15).view(size, bag)


def make_table(tiers: TierBudgets) -> EmbCacheEmbeddingBag:
    return EmbCacheEmbeddingBag(
        name="zipf",  # the initial values of rows depend on it
        embedding_dim=DIM,
        mode="sum",
        tiers=tiers,
        initializer=initializers.Uniform(-0.01, 0.01),
        optimizer=optimizers.RowWiseAdagrad(lr=0.02),
        seed=3,
    )


def train(table: EmbCacheEmbeddingBag, batches: list[torch.Tensor]) -> torch.Tensor:
    """Returns the losses [steps]. While a batch computes, the next one is planned and read from SSD."""
    losses = []
    target = torch.linspace(-1, 1, DIM)
    begin = shown = time.perf_counter()
    table.prefetch(batches[0])
    for step, ids in enumerate(batches):
        if step + 1 < len(batches):
            table.prefetch(batches[step + 1])
        loss = ((table(ids) - target) ** 2).mean()
        loss.backward()
        losses.append(loss.detach())
        if time.perf_counter() - shown > 0.5 or step + 1 == len(batches):
            shown = time.perf_counter()
            print(f"\r  step {step + 1}/{len(batches)}, loss {float(losses[-1]):.5f}", end="", flush=True)
    seconds = time.perf_counter() - begin
    print(f", {len(batches) / seconds:.1f} steps/s, {len(batches) * batches[0].numel() / seconds:.3g} ids/s")
    return torch.stack(losses)


def rows_of(table: EmbCacheEmbeddingBag) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = list(table.export())
    ids = torch.cat([chunk.ids for chunk in chunks])
    order = torch.argsort(ids)
    return ids[order], torch.cat([chunk.weights for chunk in chunks])[order]


def mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="ids to draw from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024, help="bags a batch, of 20 ids each")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    batches = list(zipf_batches(options.steps, options.batch, 20, options.rows))
    born = len(torch.unique(torch.cat(batches)))
    table_bytes = born * ROW_BYTES
    ram_bytes = table_bytes // 10
    print(
        f"{born} rows of {ROW_BYTES} bytes: {table_bytes / 2**20:.0f} MiB, of them {ram_bytes / 2**20:.0f} MiB in RAM"
    )
    with tempfile.TemporaryDirectory() as folder:
        ssd_dir = Path(folder) / "ssd"
        ssd_dir.mkdir(mode=0o750)
        tiers = TierBudgets(host_bytes=ram_bytes, ssd_bytes=max(4 * table_bytes, 2**28), ssd_dir=ssd_dir)
        with make_table(tiers) as small:
            print("a tenth in RAM")
            losses = train(small, batches)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            stats = small.stats()
            assert stats.ssd is not None
            for tier, counters in (("host", stats.host), ("SSD", stats.ssd)):
                print(
                    f"  {tier:4} {counters.rows} rows, {mib(counters.bytes)} of {mib(counters.capacity_bytes)} MiB, "
                    f"{counters.hits} hits, read {mib(counters.read_bytes)} MiB, written {mib(counters.written_bytes)} MiB"
                )
            print(f"  {stats.ssd.io_engine}, write amplification {stats.ssd.write_amplification:.2f}")
            print(f"  peak resident so far {peak / 2**10:.0f} MiB, torch and the batches included")
            rows = rows_of(small)
    print("all in RAM")
    with make_table(TierBudgets(host_bytes=3 * table_bytes + 2**24)) as large:
        expected = train(large, batches)
        same = torch.equal(losses, expected) and all(map(torch.equal, rows, rows_of(large)))
    print("the same losses and rows, bit for bit" if same else "DIFFERENT losses or rows")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
