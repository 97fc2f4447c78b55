"""Lightning's own checkpoints with the tables beside them."""

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
    from lightning.pytorch.loggers.logger import Logger

from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, admission, optimizers
from torchrec_embcache.exceptions import ConfigError, StateError
from torchrec_embcache.lightning import EmbCacheCheckpoint, EmbCacheMonitor

# Lightning gives advice about workers, loggers and devices.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]
IDS = torch.arange(40).view(10, 4)


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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.dense.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, batch_size=2)


def trainer(folder: Path, epochs: int, *callbacks: Any) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
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


def test_a_run_that_goes_on_from_lightnings_file_has_the_rows_of_then(tmp_path):
    tmp_path.chmod(0o700)
    whole, first, again = Recommender(), Recommender(), Recommender()
    trainer(tmp_path, 3).fit(whole)
    trainer(tmp_path, 2, *callbacks(tmp_path)).fit(first)
    trainer(tmp_path, 3, *callbacks(tmp_path)).fit(again, ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert torch.equal(rows(again), rows(whole))
    assert torch.equal(again.dense.weight, whole.dense.weight)


def test_an_older_file_has_its_own_rows(tmp_path):
    tmp_path.chmod(0o700)
    one, model, again = Recommender(), Recommender(), Recommender()
    trainer(tmp_path, 1).fit(one)
    trainer(tmp_path, 3, *callbacks(tmp_path)).fit(model)
    trainer(tmp_path, 1, *callbacks(tmp_path)).fit(again, ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert torch.equal(rows(again), rows(one))


def test_a_run_that_goes_on_admits_the_ids_that_a_whole_run_admits(tmp_path):
    """Every id occurs once an epoch, so that ids get rows in the third one if those of the first two were counted."""
    tmp_path.chmod(0o700)
    whole, first, again = (Recommender(admission=admission.Count(3)) for _ in range(3))
    trainer(tmp_path, 3).fit(whole)
    trainer(tmp_path, 2, *callbacks(tmp_path)).fit(first)
    assert (len(first.items), first.items.stats().admission.pending) == (0, IDS.numel())
    trainer(tmp_path, 3, *callbacks(tmp_path)).fit(again, ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert (len(again.items), again.items.stats().admission.pending) == (IDS.numel(), 0)
    assert torch.equal(rows(again), rows(whole))
    assert torch.equal(again.dense.weight, whole.dense.weight)


def test_a_file_without_its_rows_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    trainer(tmp_path, 1, *callbacks(tmp_path)).fit(Recommender())
    with pytest.raises(StateError, match=rf"Saver\(rank\)\.load\(model, path\), where path is {tmp_path}"):
        trainer(tmp_path, 2).fit(Recommender(), ckpt_path=str(tmp_path / "epoch=0.ckpt"))


class Recording(Logger):
    """A logger that keeps what it is given, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.fails = False

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.fails:
            raise OSError("the disk of the logger is full")
        if any(name.startswith("embcache/") for name in metrics):
            self.logged.append((step, dict(metrics)))


def monitored(folder: Path, epochs: int, logger: Any, monitor: EmbCacheMonitor) -> Recommender:
    model = Recommender()
    made = Trainer(
        max_epochs=epochs,
        callbacks=[monitor],
        default_root_dir=folder,
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(model)
    return model


def test_the_tables_counters_go_to_the_trainers_loggers_every_so_many_steps(tmp_path):
    logger = Recording()
    model = monitored(tmp_path, 3, logger, EmbCacheMonitor(every_n_steps=4))  # 5 steps an epoch
    assert [step for step, _ in logger.logged] == [4, 8, 12]
    for step, found in logger.logged:
        assert found["embcache/items/item/step"] == step
    assert logger.logged[-1][1]["embcache/items/item/rows"] == len(model.items) == 40
    # The first sample has the misses of 4 batches with new ids, the second the hits of ids that were seen.
    assert logger.logged[0][1]["embcache/items/item/host/hit_rate"] == 0.0
    assert logger.logged[2][1]["embcache/items/item/host/hit_rate"] == 1.0
    assert logger.logged[0][1]["embcache/items/item/row_wait/p99_ms"] > 0


def test_tensorboard_reads_what_lightnings_logger_was_given(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path), name="runs", version=0)
    monitored(tmp_path, 2, logger, EmbCacheMonitor(every_n_steps=5))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("embcache/items/item/rows")] == [(5, 40.0), (10, 40.0)]


def test_a_logger_that_fails_is_a_warning_once_and_the_training_goes_on(tmp_path, caplog):
    logger = Recording()
    logger.fails = True
    with caplog.at_level("WARNING", "torchrec_embcache"):
        model = monitored(tmp_path, 2, logger, EmbCacheMonitor(every_n_steps=1))
    assert len(model.items) == 40
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("torchrec_embcache")]
    assert "EmbCacheMonitor" in said
    assert "the disk of the logger is full" in said


def test_a_number_of_steps_is_checked():
    with pytest.raises(ConfigError, match="every_n_steps"):
        EmbCacheMonitor(every_n_steps=0)
