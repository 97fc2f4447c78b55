"""Lightning's own checkpoints together with the tables."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="requirements/dev.txt has it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning.pytorch.tuner import Tuner

from lightning_cases import IDS, LIGHTNING_WARNINGS, Recommender, callbacks, rows, trainer
from torchrec_embcache import admission
from torchrec_embcache.exceptions import ConfigError, StateError
from torchrec_embcache.integrations.lightning import EmbCacheCheckpoint, EmbCacheMonitor

pytestmark = LIGHTNING_WARNINGS


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


def best(folder: Path, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder / "files", filename="{epoch}", monitor="val_loss", **settings)


def files_with_rows(folder: Path) -> set[str]:
    """Lightning's files. The rows that belong to each are of the file's own step."""
    files = sorted((folder / "files").iterdir())
    for file in files:
        model = Recommender()
        trainer(folder, 1, EmbCacheCheckpoint(folder / "rows")).validate(model, ckpt_path=str(file), verbose=False)
        assert model.items.table.step() == torch.load(file, weights_only=True)["global_step"], file
    return {file.stem for file in files}


def saved_rows(folder: Path) -> int:
    return sum(1 for found in (folder / "rows").iterdir() if found.is_dir())


@pytest.mark.parametrize(
    ("settings", "files", "kept"),
    [
        ({"save_top_k": 1}, {"epoch=1"}, 1),
        ({"save_top_k": 3}, {"epoch=1", "epoch=2", "epoch=5"}, 3),
        ({"save_top_k": 2, "save_last": True}, {"epoch=1", "epoch=2", "last"}, 3),
        ({"save_top_k": 2, "save_last": "link"}, {"epoch=1", "epoch=2", "last"}, 2),
    ],
)
@pytest.mark.parametrize("incremental", [False, True])
def test_every_file_that_lightning_keeps_has_its_rows(tmp_path, settings, files, kept, incremental):
    tmp_path.chmod(0o700)
    callback = EmbCacheCheckpoint(tmp_path / "rows", incremental=incremental)
    trainer(tmp_path, 6, callback, best(tmp_path, **settings)).fit(Recommender())
    assert files_with_rows(tmp_path) == files
    if not incremental:
        assert saved_rows(tmp_path) == kept, "the rows of files that are gone are gone too"


def test_files_that_are_written_in_the_background_have_their_rows(tmp_path):
    tmp_path.chmod(0o700)
    callbacks = EmbCacheCheckpoint(tmp_path / "rows"), best(tmp_path, save_top_k=2, save_last=True)
    trainer(tmp_path, 6, *callbacks, plugins=AsyncCheckpointIO()).fit(Recommender())
    assert files_with_rows(tmp_path) == {"epoch=1", "epoch=2", "last"}


def test_the_learning_rate_finder_leaves_the_rows_of_an_earlier_run(tmp_path):
    tmp_path.chmod(0o700)
    trainer(tmp_path, 1, EmbCacheCheckpoint(tmp_path / "rows"), best(tmp_path)).fit(Recommender())
    tuned = trainer(tmp_path, 1, EmbCacheCheckpoint(tmp_path / "rows"))
    Tuner(tuned).lr_find(Recommender(), num_training=3, update_attr=False)
    assert files_with_rows(tmp_path) == {"epoch=0"}


def test_resumed_run_removes_row_files_of_the_previous_run(tmp_path):
    tmp_path.chmod(0o700)
    first, again = (EmbCacheCheckpoint(tmp_path / "rows") for _ in range(2))
    trainer(tmp_path, 1, first, best(tmp_path, save_last=True)).fit(Recommender())
    assert saved_rows(tmp_path) == 2
    last = str(tmp_path / "files" / "last.ckpt")
    trainer(tmp_path, 2, again, best(tmp_path, save_last=True)).fit(Recommender(), ckpt_path=last)
    assert files_with_rows(tmp_path) == {"epoch=1", "last"}
    assert saved_rows(tmp_path) == 2


def test_a_file_that_could_not_be_replaced_keeps_its_rows(tmp_path, monkeypatch):
    """Also one that is saved by hand, and after the directory of both was moved."""
    tmp_path.chmod(0o700)
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    model, callback = Recommender(), EmbCacheCheckpoint(run / "rows")
    made = trainer(run, 1, callback, best(run, save_top_k=0))
    made.fit(model)
    made.save_checkpoint(run / "files" / "mine.ckpt")
    model.items(IDS).sum().backward()

    def full_disk(*_given: Any, **_named: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", full_disk)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is full"):
                made.save_checkpoint(run / "files" / "mine.ckpt")
    run.rename(tmp_path / "moved")
    run = tmp_path / "moved"
    assert files_with_rows(run) == {"mine"}
    assert saved_rows(run) == 3

    again = trainer(run, 1, EmbCacheCheckpoint(run / "rows"), best(run, save_top_k=0))
    again.fit(Recommender())
    again.save_checkpoint(run / "files" / "mine.ckpt")
    assert files_with_rows(run) == {"mine"}
    assert saved_rows(run) == 1


def test_rows_that_cannot_be_removed_are_a_warning(tmp_path, caplog):
    tmp_path.chmod(0o700)
    model = Recommender()
    made = trainer(tmp_path, 1, EmbCacheCheckpoint(tmp_path / "rows"), best(tmp_path, save_top_k=0))
    made.fit(model)
    made.save_checkpoint(tmp_path / "mine.ckpt")
    (tmp_path / "rows").chmod(0o777)
    made.strategy.remove_checkpoint(str(tmp_path / "mine.ckpt"))
    assert not (tmp_path / "mine.ckpt").exists()
    assert "could not be removed" in caplog.text


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


def test_table_counters_reach_trainer_loggers_at_an_interval(tmp_path):
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


def test_failing_logger_warns_once_and_training_continues(tmp_path, caplog):
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
    with pytest.raises(ConfigError, match="keep=0"):
        EmbCacheCheckpoint("rows", keep=0)
