"""Train TorchRec's DLRM in PyTorch Lightning, with tables in RAM and on SSD. Run it again, and it resumes from its checkpoint.

`EmbCacheCheckpoint` is a callback: with each checkpoint that Lightning writes it saves the rows, and before Lightning loads a
checkpoint it loads the rows saved with it. Lightning does not handle rows: `configure_optimizers` only returns an optimizer of the
dense parameters, because the backward itself updates the rows.

    python examples/lightning_dlrm.py --epochs 1
    python examples/lightning_dlrm.py --epochs 2  # trains one more

Both are in `--folder`, by default `lightning_rows` in the current directory. Remove it to start from scratch.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

# Hide warnings that the libraries raise about each other.
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict|torchmetrics|lightning).*")
for library in ("torchrec", "torch.fx", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(library).setLevel(logging.ERROR)

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_embcache import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, TierBudgets, cache_modules
from torchrec_embcache.integrations.lightning import EmbCacheCheckpoint

FEATURES = ["who", "what"]
IDS = 6_000  # per feature
DENSE = 4
Clicks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tables(ssd_dir: Path) -> EmbCacheEmbeddingBagCollection:
    """Creates a table for each feature, with half of the RAM that the rows need."""
    configs = [
        EmbCacheEmbeddingBagConfig(name=name, embedding_dim=32, num_embeddings=IDS, feature_names=[name])
        for name in FEATURES
    ]
    # "discard": the rows are loaded from Lightning's checkpoint. Rows that an earlier run left on SSD have another state.
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="128MiB", ssd_dir=ssd_dir, reopen="discard")
    collection = EmbCacheEmbeddingBagCollection(
        tables=configs, tiers=tiers, name="tables", device=torch.device("cpu"), seed=1
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    return collection


class Recommender(LightningModule):
    """Predicts clicks from two ids."""

    def __init__(self, ssd_dir: Path) -> None:
        super().__init__()
        self.model = DLRM(
            embedding_bag_collection=tables(ssd_dir),
            dense_in_features=DENSE,
            dense_arch_layer_sizes=[16, 32],
            over_arch_layer_sizes=[16, 1],
        )

    def loss(self, clicks: Clicks) -> torch.Tensor:
        """Returns the mean loss of some clicks: ids [B, 2], dense features [B, 4], labels [B]."""
        ids, dense, labels = clicks
        ones = torch.ones(ids.numel(), dtype=torch.int32)
        features = KeyedJaggedTensor(FEATURES, ids.t().reshape(-1), lengths=ones)
        logits: torch.Tensor = self.model(dense, features)[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def training_step(self, clicks: Clicks, _index: int) -> torch.Tensor:
        """Runs a step. Its backward also updates the rows."""
        return self.loss(clicks)

    def validation_step(self, clicks: Clicks, _index: int) -> None:
        """Logs the loss of clicks that are never trained."""
        self.log("loss", self.loss(clicks), batch_size=len(clicks[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer of the dense parameters only."""
        dense = [parameter for name, parameter in self.named_parameters() if "embedding" not in name]
        return torch.optim.Adam(dense, lr=0.005)


def clicks(count: int, seed: int) -> TensorDataset:
    """Returns clicks whose labels depend on hidden values of the ids, and slightly on the dense features."""
    tastes = torch.randn(2, IDS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    rank = (torch.rand(count, 2, generator=generator) ** 2 * IDS).long()
    dense = torch.randn(count, DENSE, generator=generator)
    liking = tastes[0, rank[:, 0]] + tastes[1, rank[:, 1]] + 0.3 * dense.sum(1)
    return TensorDataset(rank * 0x1E3779B97F4A7C15, dense, (liking > 0).float())


def train(folder: Path, epochs: int, count: int) -> None:
    seed_everything(1, verbose=False)
    (folder / "ssd").mkdir(mode=0o750, exist_ok=True)
    model = Recommender(folder / "ssd")
    newest = folder / "newest.ckpt"
    every_epoch = ModelCheckpoint(dirpath=folder, filename="newest", enable_version_counter=False)
    trainer = Trainer(
        max_epochs=epochs,
        # The rows that belong to Lightning's file are kept until Lightning has replaced the file.
        callbacks=[EmbCacheCheckpoint(folder / "rows"), every_epoch],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    print(f"continues from {newest}" if newest.exists() else f"starts in {folder}", flush=True)
    training = DataLoader(clicks(count, 1), batch_size=256)
    validation = DataLoader(clicks(4096, 2), batch_size=4096)
    trainer.fit(model, training, validation, ckpt_path=str(newest) if newest.exists() else None)
    (collection,) = cache_modules(model).values()
    for name, table in collection.tables.items():
        stats = table.stats()
        on_ssd = stats.ssd.rows if stats.ssd else 0
        print(f"{name}: {stats.rows} rows, {stats.host.rows} in RAM, {on_ssd} on SSD")
        table.close()
    print(
        f"epoch {trainer.current_epoch}: loss of new clicks {float(trainer.callback_metrics['loss']):.6f} (a coin: 0.69)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="how many in all, those of earlier runs included")
    parser.add_argument("--clicks", type=int, default=60_000)
    parser.add_argument("--folder", type=Path, default=Path("lightning_rows"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny
    options.folder.mkdir(mode=0o750, exist_ok=True)
    train(options.folder, options.epochs, options.clicks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
