"""Progress reporting by callback or progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torchrec_embcache.exceptions import ConfigError

__all__ = ["Progress", "ProgressOption", "ProgressTracker"]


@dataclass(frozen=True)
class Progress:
    """Progress of one operation on this rank.

    Examples:
        >>> import torch
        >>> from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, optimizers
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> model = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd)
        >>> model(torch.tensor([7, 8])).sum().backward()
        >>> told = []
        >>> report = Saver(0).save(model, "ckpt", progress=told.append)
        >>> told[-1]
        Progress(work='save', table='item', rows=2, total_rows=2)
    """

    work: str
    """"save", "load" or "compact"."""
    table: str
    """The current table, as `module/table`; "" if the operation is on all tables together."""
    rows: int
    """Number of rows done, of all tables together."""
    total_rows: int | None
    """Maximum number of rows; None if unknown beforehand."""


ProgressOption = Callable[[Progress], object] | bool | None


class ProgressTracker:
    """Counts the rows of one operation. A context manager. An exception of the callable ends the operation and is raised."""

    def __init__(
        self, option: ProgressOption, work: str, total_rows: int | None = None, *, show_bar: bool = True
    ) -> None:
        """`option`: a callable, True for a bar (only if `show_bar`; requires tqdm), None or False. Raises `ConfigError`."""
        self._callback: Callable[[Progress], object] | None = None
        self._bar: Any = None
        self._work, self._table, self._rows, self.total_rows = work, "", 0, total_rows
        if option is True:
            if show_bar:
                try:
                    from tqdm.auto import tqdm
                except ImportError as cause:
                    raise ConfigError("progress=True needs tqdm: install it, or give a callable") from cause
                total = total_rows if total_rows is not None else math.inf
                self._bar = tqdm(total=total, desc=work, unit=" rows", unit_scale=True)
        elif callable(option):
            self._callback = option
        elif option not in (None, False):
            raise ConfigError(f"progress={option!r} is not known: give a callable, or True for a bar")

    def table(self, name: str) -> None:
        """Sets the table of the following rows."""
        self._table = name
        self.advance(0)

    def advance(self, rows: int) -> None:
        """Reports `rows` more rows as done."""
        self._rows += rows
        if self._callback is not None:
            self._callback(Progress(self._work, self._table, self._rows, self.total_rows))
        if self._bar is not None:
            self._bar.set_postfix_str(self._table, refresh=False)
            self._bar.update(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
