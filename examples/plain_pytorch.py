"""A table larger than its RAM budget in plain PyTorch: no TorchRec, no process group.

`EmbCacheEmbeddingBag` stands where `torch.nn.EmbeddingBag` stood; ids may be any 64-bit integers, and the table's own optimizer
runs in the backward. The SSD tier is resumed by a second run of the same program: `--folder DIR`, twice.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers

BAG = 8


class Model(nn.Module):
    """Is the sum of what the ids stand for positive?"""

    def __init__(self, ssd_dir: Path) -> None:
        super().__init__()
        self.ids = EmbCacheEmbeddingBag(
            name="ids",
            embedding_dim=32,
            mode="sum",
            tiers=TierBudgets(host_bytes="4MiB", ssd_bytes="256MiB", ssd_dir=ssd_dir, reopen="resume"),
            initializer=initializers.Uniform(-0.05, 0.05),
            optimizer=optimizers.Adagrad(lr=0.1),
            seed=1,
        )
        self.over = nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, 8] ids: [B] logits."""
        logits: torch.Tensor = self.over(self.ids(ids))[:, 0]
        return logits


def batch(size: int, ids: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, 8], skewed and scattered over all of int64, and labels [B] that a hidden sign of each id decides."""
    rank = (torch.rand(size, BAG, generator=generator) ** 3 * ids).long()
    hidden = (rank * 2_654_435_761 >> 7) % 2 * 2 - 1
    return rank * 0x1E3779B97F4A7C15, (hidden.sum(1) > 0).float()


def train(folder: Path, steps: int, ids: int) -> float:
    """The share of the last batches that the model gets right before it has trained on them."""
    model = Model(folder)
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(len(model.ids))
    right = []
    for step in range(steps):
        x, y = batch(512, ids, generator)
        logits = model(x)
        right.append(float(((logits > 0) == (y > 0.5)).float().mean()))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        dense.zero_grad()
        loss.backward()  # the table's rows change here
        dense.step()
        if (step + 1) % max(steps // 5, 1) == 0:
            stats = model.ids.stats()
            print(
                f"step {step + 1:4}: loss {float(loss.detach()):.4f}, {stats.rows} rows, of them {stats.host.rows} in RAM, "
                f"{stats.ssd.rows if stats.ssd else 0} on SSD"
            )
    model.ids.close()  # flushes: the next run goes on from here
    last = right[-max(steps // 5, 1) :]
    return sum(last) / len(last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ids", type=int, default=50_000)
    parser.add_argument(
        "--folder", type=Path, help="keeps the SSD tier, so that the next run resumes; by default a temporary one"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "ssd"
        folder.mkdir(mode=0o750, exist_ok=True)
        share = train(folder, options.steps, options.ids)
    print(f"right before training on it: {100 * share:.1f}% (a coin: about 50%)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
