"""The trainer of the serving soak. It reads commands and answers each with a line of JSON.

    python benches/python/soak_trainer.py CHECKPOINTS IDS

`begin` loads the latest checkpoint, and returns its name, or null, and its step. `save` trains some steps and saves the changes,
`full` saves all rows. The answer is {"checkpoint", "kind", "step"}, or {"failed", "step"} with the error.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from scratch import die_with_parent
from soak_truth import CLOCK, Truth
from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, eviction, initializers, optimizers
from torchrec_embcache.exceptions import EmbCacheError

TABLES = ("user", "item")
DIM = 32
# Checkpoints that a save keeps, in addition to their base checkpoints.
KEEP = 2


class Trainer:
    """Two tables whose rows have the values of `Truth`."""

    def __init__(self, path: Path, truth: Truth) -> None:
        self.path, self.truth, self.step = path, truth, 0
        self.model = torch.nn.ModuleDict({name: make_table(name, truth) for name in TABLES})
        self.loaded: str | None = None
        self._saver = Saver(0)
        if (path / "LATEST").exists():
            self.loaded = self._saver.load(self.model, path).checkpoint
            self.step = int(self.table("user").read_rows([CLOCK]).weights[0, 0])

    def table(self, name: str) -> EmbCacheEmbedding:
        """Returns the table of this name."""
        table = self.model[name]
        assert isinstance(table, EmbCacheEmbedding)
        return table

    def train(self) -> None:
        """Trains the steps until the next save."""
        for _ in range(self.truth.save_every):
            ids = torch.from_numpy(self.truth.touched(self.step + 1))
            for name in TABLES:
                out_ND = self.table(name)(ids)
                out_ND.backward(torch.full_like(out_ND, -1.0))
            self.step += 1

    def save(self, *, full: bool) -> dict[str, object]:
        """Trains, and saves. An eviction rule expires rows before the save writes."""
        self.train()
        try:
            report = self._saver.save(self.model, self.path, incremental=not full, keep=KEEP)
        except EmbCacheError as error:
            return {"failed": str(error), "step": self.step}
        return {"checkpoint": report.checkpoint, "kind": report.kind, "step": self.step}


def make_table(name: str, truth: Truth) -> EmbCacheEmbedding:
    return EmbCacheEmbedding(
        name=name,
        embedding_dim=DIM,
        tiers=TierBudgets(host_bytes=(truth.ids + 1) * (DIM * 4 + 64) + (8 << 20)),
        optimizer=optimizers.SGD(lr=1.0),
        initializer=initializers.Constant(0.0),
        eviction=eviction.Policy([eviction.Ttl(steps=truth.ttl)]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("ids", type=int)
    given = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    sys.stdin.readline()
    trainer = Trainer(given.path, Truth(given.ids))
    print(json.dumps({"checkpoint": trainer.loaded, "step": trainer.step}), flush=True)
    for line in sys.stdin:
        print(json.dumps(trainer.save(full=line.strip() == "full")), flush=True)


if __name__ == "__main__":
    main()
