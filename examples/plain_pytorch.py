"""Train a table larger than its RAM budget in plain PyTorch, without TorchRec and without a process group.

`EmbCacheEmbeddingBag` replaces `torch.nn.EmbeddingBag`. Ids may be any 64-bit integers, and the table's own optimizer runs in the
backward. Run this twice, or stop it with Ctrl-C and run it again: it resumes. The table resumes from its SSD tier, and the dense
part from a file next to it. Both are in `--folder`, by default `plain_pytorch_rows` in the current directory. Remove that folder to
start from scratch.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, initializers, optimizers

BAG = 8


class Model(nn.Module):
    """Predicts if the sum of the ids' hidden values is positive."""

    def __init__(self, ssd_dir: Path) -> None:
        super().__init__()
        self.ids = EmbCacheEmbeddingBag(
            name="ids",
            embedding_dim=32,
            mode="sum",
            # "auto" resumes from the previous run, or starts empty if there is none.
            tiers=TierBudgets(
                host_bytes="4MiB", ssd_bytes="256MiB", ssd_dir=ssd_dir, reopen="auto", flush_every="1min"
            ),
            initializer=initializers.Uniform(-0.05, 0.05),
            optimizer=optimizers.Adagrad(lr=0.1),
            seed=1,
        )
        self.over = nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits [B] of ids [B, 8]."""
        logits: torch.Tensor = self.over(self.ids(ids))[:, 0]
        return logits


def batch(size: int, ids: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids [B, 8], skewed and scattered over all of int64, and labels [B], which depend on a hidden sign of each id."""
    rank = (torch.rand(size, BAG, generator=generator) ** 3 * ids).long()
    hidden = (rank * 2_654_435_761 >> 7) % 2 * 2 - 1
    return rank * 0x1E3779B97F4A7C15, (hidden.sum(1) > 0).float()


def train(folder: Path, steps: int, ids: int) -> float:
    """Trains. Returns the accuracy on the last batches, measured before each is trained."""
    model = Model(folder)
    dense = folder / "dense.pt"
    if dense.exists():
        model.over.load_state_dict(torch.load(dense, weights_only=True))
    print(f"the table has {len(model.ids)} rows and {model.ids.stats().step} steps")
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(model.ids.stats().step)
    right: list[float] = []
    try:
        for step in range(steps):
            right.append(train_step(model, optimizer, *batch(512, ids, generator)))
            if (step + 1) % min(max(steps // 5, 1), 100) == 0:
                stats = model.ids.stats()
                print(
                    f"step {stats.step:4}: {100 * right[-1]:.1f}% right, {stats.rows} rows, of them {stats.host.rows} in RAM, "
                    f"{stats.ssd.rows if stats.ssd else 0} on SSD"
                )
    finally:
        # Ctrl-C leads here too. A table that is not closed would be flushed at process exit anyway.
        torch.save(model.over.state_dict(), dense)
    model.ids.close()
    last = right[-max(steps // 5, 1) :]
    return sum(last) / len(last)


def train_step(model: Model, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """Trains on a batch. Returns the accuracy on the batch before this step."""
    logits = model(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
    optimizer.zero_grad()
    loss.backward()  # this updates the table's rows
    optimizer.step()
    return float(((logits > 0) == (y > 0.5)).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ids", type=int, default=50_000)
    parser.add_argument(
        "--folder", type=Path, default=Path("plain_pytorch_rows"), help="where the rows are, for the next run to go on"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny
    options.folder.mkdir(mode=0o750, exist_ok=True)
    share = train(options.folder, options.steps, options.ids)
    print(
        f"right before training on it: {100 * share:.1f}% (a coin: about 50%); run it again to go on, from {options.folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
