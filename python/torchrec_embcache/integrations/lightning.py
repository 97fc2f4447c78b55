"""Tables in checkpoints and loggers of PyTorch Lightning.

`docs/lightning.md` has a complete program.

Works with either `lightning` or `pytorch_lightning`. Neither is a dependency of this package.
"""

import logging
import os
from typing import Any

from torch import nn

from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint._references import add_reference, remove_references
from torchrec_embcache.config import check_int
from torchrec_embcache.exceptions import EmbCacheError, UnsupportedError
from torchrec_embcache.model import cache_modules
from torchrec_embcache.monitoring import Sample, Sampler, scalars
from torchrec_embcache.monitoring._background import FailureLogger
from torchrec_embcache.table._row_summary import get_checkpoint_name, set_checkpoint_name

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins import CheckpointIO
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
        from pytorch_lightning.plugins import CheckpointIO
    except ImportError as _cause:
        raise UnsupportedError(
            "torchrec_embcache.integrations.lightning needs PyTorch Lightning: pip install lightning"
        ) from _cause

__all__ = ["EmbCacheCheckpoint", "EmbCacheMonitor"]

_log = logging.getLogger(__name__)
# Key of the rows' checkpoint name in Lightning's files.
_ROWS_KEY = "torchrec_embcache_rows"


class EmbCacheCheckpoint(Callback):
    """Saves the rows of every cache module with each Lightning checkpoint, and loads them before Lightning loads its file.

    Rows are saved to `path` by `Saver`, on every rank, and Lightning's file contains the name of the row checkpoint that belongs to
    it. The row checkpoint is removed when Lightning removes or replaces the file. `keep`: number of latest row checkpoints that are
    kept in any case. `incremental`: as in `Saver.save`. Raises `ConfigError` if `keep` is below 1.

    A weights-only checkpoint (`save_weights_only=True`) has no rows; loading it reports this. `docs/lightning.md` has a program.

    Examples:
        >>> from torchrec_embcache.integrations.lightning import EmbCacheCheckpoint
        >>> rows = EmbCacheCheckpoint("ckpt/rows")  # then Trainer(callbacks=[rows, ModelCheckpoint("ckpt", save_top_k=3)])
        >>> rows.path, rows.keep
        ('ckpt/rows', 1)
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 1, incremental: bool = False) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.keep = check_int("keep", keep, 1, 1 << 20)
        self.incremental = incremental
        self._hook: Any = None
        # The row checkpoint named by the file that Lightning read last, until its state dict is loaded.
        self._checkpoint_to_load: str | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Called before Lightning loads anything. Afterwards rows are loaded before the state dict that they belong to."""
        del stage
        files = trainer.strategy.checkpoint_io
        if not isinstance(files, _RowsCheckpointIO):
            trainer.strategy.checkpoint_io = _RowsCheckpointIO(files, self)
        for module in cache_modules(pl_module).values():
            module.suppress_state_dict_warning()
        if self._hook is None:
            self._hook = pl_module.register_load_state_dict_pre_hook(self._load_rows)  # type: ignore[no-untyped-call]

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Called after a run. Stops loading rows with state dicts."""
        del trainer, pl_module, stage
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Saves the rows. Collective. Raises the errors of `Saver.save`, and Lightning then writes no file."""
        del trainer
        report = Saver().save(pl_module, self.path, self.incremental, keep=self.keep)
        checkpoint[_ROWS_KEY] = report.checkpoint
        set_checkpoint_name(checkpoint["state_dict"], self.path, report.checkpoint)

    def _load_rows(self, module: nn.Module, state_dict: dict[str, Any], *_args: Any) -> None:
        """Loads the rows that belong to a state dict, before `module` loads it. Raises the errors of `Saver.load`."""
        name, self._checkpoint_to_load = self._checkpoint_to_load, None
        name = get_checkpoint_name(state_dict) or name
        if name is not None:
            Saver().load(module, self.path, checkpoint=name)


class _RowsCheckpointIO(CheckpointIO):
    """Writes and removes Lightning's files through `checkpoint_io`, and keeps the rows of each file until it is removed."""

    def __init__(self, checkpoint_io: Any, rows: EmbCacheCheckpoint) -> None:
        super().__init__()
        self._checkpoint_io, self._rows = checkpoint_io, rows

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a file, then removes the rows of the file that it replaces.

        Raises the errors of `add_reference`, and then writes no file.
        """
        name = checkpoint.get(_ROWS_KEY)
        if name is not None:
            add_reference(self._rows.path, name, os.fspath(path))
        self._checkpoint_io.save_checkpoint(checkpoint, path, *args, **kwargs)
        # A `checkpoint_io` that writes in the background may not have replaced the file yet.
        self._release(path, except_checkpoint=name, keep_newest=hasattr(self._checkpoint_io, "checkpoint_io"))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Reads a file; its rows are loaded before its state dict."""
        checkpoint = self._checkpoint_io.load_checkpoint(*args, **kwargs)
        self._rows._checkpoint_to_load = checkpoint.get(_ROWS_KEY)  # noqa: SLF001 - its own callback
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file, then its rows."""
        self._checkpoint_io.remove_checkpoint(path)
        self._release(path)

    def teardown(self) -> None:
        """Called at the end of a run."""
        self._checkpoint_io.teardown()

    def _release(self, path: Any, *, except_checkpoint: str | None = None, keep_newest: bool = False) -> None:
        """Removes the rows that `path` referred to, except the checkpoint `except_checkpoint`.

        An error is logged as a warning.
        """
        rows = self._rows
        try:
            left = remove_references(
                rows.path, os.fspath(path), keep=rows.keep, except_checkpoint=except_checkpoint, keep_newest=keep_newest
            )
        except EmbCacheError as error:
            left = [str(error)]
        for why in left:
            _log.warning("rows of %s in %s could not be removed: %s", path, rows.path, why)


class EmbCacheMonitor(Callback):
    """Logs the counters of the model's tables to the trainer's loggers, as "embcache/<module>/<table>/host/hit_rate".

    The values are those of `torchrec_embcache.monitoring.TensorBoardLogger`: rates and waits since the previous sample, and gauges
    as they are. Lightning's loggers write on rank 0 only and therefore show its tables; for every rank, give each a
    `PrometheusExporter`. An error of a logger is logged once as a warning and does not stop the training.

    `every_n_steps`: the number of optimizer steps between samples. Raises `ConfigError` if it is below 1.

    Examples:
        >>> from torchrec_embcache.integrations.lightning import EmbCacheMonitor
        >>> monitor = EmbCacheMonitor(every_n_steps=100)  # Trainer(callbacks=[monitor]); docs/monitoring.md has a whole program
        >>> monitor.every_n_steps
        100
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__()
        self.every_n_steps = check_int("every_n_steps", every_n_steps, 1, 1 << 62)
        self._previous: Sample | None = None
        self._last_step = 0
        self._failure_logger = FailureLogger("EmbCacheMonitor")

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Called before the first step of a run, from which the first sample is measured."""
        self._previous = Sampler(pl_module).sample(trainer.global_step)
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs a sample if `every_n_steps` steps have passed since the previous one."""
        del outputs, batch, batch_idx
        step = trainer.global_step
        if step - self._last_step < self.every_n_steps or not trainer.loggers:
            return
        self._last_step = step
        try:
            sample = Sampler(pl_module).sample(step)
            numbers, self._previous = scalars(self._previous, sample), sample
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)
        except Exception as error:
            self._failure_logger.log_failure(error)
        else:
            self._failure_logger.reset()
