"""Output of the examples: comparisons, and the tiers' counters."""

from dataclasses import dataclass

import numpy as np
import torch

from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["Checks", "Course", "rows_of", "show_tiers"]


@dataclass(frozen=True)
class Course:
    """Results of a training: the loss [S] of each of S steps, and the seconds of each."""

    losses: torch.Tensor
    times: list[float]

    @property
    def mean_ms(self) -> float:
        """Mean milliseconds per step."""
        return 1e3 * sum(self.times) / max(len(self.times), 1)


class Checks:
    """Records comparisons. The run fails if any of them fails."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.found: list[tuple[str, bool, str]] = []  # name, result, figures

    def __call__(self, what: str, agrees: bool, figures: str = "") -> None:
        """Prints and records one comparison."""
        print(f"  {'agrees  ' if agrees else 'DIFFERS '} {what}{': ' if figures else ''}{figures}", flush=True)
        self.note(what, agrees, figures)

    def note(self, what: str, agrees: bool, figures: str = "") -> None:
        """Records one comparison that another process has printed."""
        self.found.append((what, agrees, figures))
        if not agrees:
            self.failed.append(what)

    def close(self, what: str, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
        """Compares two tensors."""
        difference = float((a.double() - b.double()).abs().max()) if a.shape == b.shape and a.numel() else float("nan")
        self(what, difference <= tolerance, f"greatest difference {difference:.2g}, {tolerance:g} allowed")

    def mostly_close(self, what: str, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
        """Compares two tensors of rows [n, D]. A few rows may differ, because rounding can move a sample to the other side of a
        ReLU.
        """
        difference = (a.double() - b.double()).abs().amax(1)
        share = float((difference <= tolerance).double().mean())
        self(
            what,
            share >= 0.995,
            f"{100 * share:.2f}% within {tolerance:g}, greatest difference {float(difference.max()):.2g}",
        )

    def end(self) -> int:
        """Returns the exit status: 0 if all comparisons succeeded."""
        if self.failed:
            print(f"{len(self.failed)} of the checks failed: {'; '.join(self.failed)}")
        return 1 if self.failed else 0


def show_tiers(tables: dict[str, CacheTable], checks: Checks) -> None:
    """Prints the counters of each tier of each table. All three tiers must have served rows."""
    heads = f"{'hits':>9} {'hit %':>6} {'evicted':>8} {'read MiB':>9} {'written MiB':>12} {'s':>7}"
    print(f"  {'table':6} {'tier':7} {'rows':>7} {'KiB':>7} {heads}")
    for name, table in tables.items():
        stats = table.stats()
        for tier, counters in (("device", stats.device), ("host", stats.host), ("SSD", stats.ssd)):
            if counters is None:
                continue
            asked = counters.hits + counters.misses
            print(
                f"  {name:6} {tier:7} {counters.rows:7} {counters.bytes / 2**10:7.0f} {counters.hits:9} "
                f"{100 * counters.hits / max(asked, 1):6.1f} {counters.evictions:8} {counters.read_bytes / 2**20:9.2f} "
                f"{counters.written_bytes / 2**20:12.2f} {counters.time_ns / 1e9:7.2f}"
            )
        if stats.ssd is not None:
            print(f"  {name:6} SSD by {stats.ssd.io_engine}, write amplification {stats.ssd.write_amplification:.2f}")
    for tier in ("device", "host", "ssd"):
        served = [getattr(table.stats(), tier).hits > 0 for table in tables.values() if getattr(table.stats(), tier)]
        checks(f"the {tier} tier served", any(served))


def rows_of(table: CacheTable) -> dict[str, np.ndarray]:
    """Returns every row of this rank, sorted by id."""
    chunks = list(table.export())
    columns = {
        "ids": [chunk.ids for chunk in chunks],
        "weights": [chunk.weights for chunk in chunks],
        "sum": [chunk.slots["sum"] for chunk in chunks],
        "count": [chunk.metadata.count for chunk in chunks],
        "last_step": [chunk.metadata.last_step for chunk in chunks],
    }
    whole = {name: torch.cat(parts).numpy() for name, parts in columns.items() if parts}
    order = np.argsort(whole.get("ids", np.zeros(0, np.int64)))
    return {name: column[order] for name, column in whole.items()}
