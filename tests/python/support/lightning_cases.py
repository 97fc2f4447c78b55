"""A recommender in Lightning, its trainer and its rows."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="requirements/dev.txt has it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers
from torchrec_embcache.integrations.lightning import EmbCacheCheckpoint

# Lightning gives advice about workers, loggers and devices.
LIGHTNING_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]
IDS = torch.arange(40).view(10, 4)
LOSSES = [1.0, 0.5, 0.6, 0.9, 0.8, 0.7]  # of each epoch: the best one is not among the last three


class Recommender(LightningModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = EmbCacheEmbeddingBag(
            name="item",
            embedding_dim=4,
            mode="sum",
            tiers=TierBudgets(host_bytes="1MiB"),
            optimizer=optimizers.Adagrad(lr=0.1),
            **settings,
        )
        self.dense = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.dense(self.items(batch)).square().sum()

    def validation_step(self, batch: Any) -> None:
        del batch
        self.log("val_loss", LOSSES[self.current_epoch], logger=False)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, batch_size=10)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.dense.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, batch_size=2)


def trainer(folder: Path, epochs: int, *callbacks: Any, plugins: Any = None) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        plugins=plugins,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def rows(model: Recommender) -> torch.Tensor:
    found = model.items.read_rows(IDS.flatten())
    return torch.cat([found.weights, found.slots["sum"]], 1)


def callbacks(folder: Path) -> tuple[EmbCacheCheckpoint, ModelCheckpoint]:
    every = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    return EmbCacheCheckpoint(folder / "rows", keep=3), every
