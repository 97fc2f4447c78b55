"""One line in the log for each save and each load: how many rows, of which tables, where, and how long it took."""

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, TypeVar

from .collective import rank, world_size
from .reports import LoadReport, SaveReport

__all__ = ["logged"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M")

_RANKS = re.compile(r"0-of-(\d+)\.json")


def logged(
    call: Callable[Concatenate[S, M, str | os.PathLike[str], P], R],
) -> Callable[Concatenate[S, M, str | os.PathLike[str], P], R]:
    """`call(self, module, path, ...)`, which saves or loads and gives a report or the future of one; rank 0 logs it at INFO."""
    log = logging.getLogger(call.__module__)

    @functools.wraps(call)
    def saying(owner: S, module: M, path: str | os.PathLike[str], *args: P.args, **more: P.kwargs) -> R:
        began = time.monotonic()
        result = call(owner, module, path, *args, **more)
        if rank() == 0:
            if isinstance(result, Future):
                result.add_done_callback(lambda done: done.exception() or _say(log, done.result(), path, began))
            else:
                _say(log, result, path, began)
        return result

    return saying


def _say(log: logging.Logger, report: object, path: str | os.PathLike[str], began: float) -> None:
    seconds = time.monotonic() - began
    if isinstance(report, SaveReport):
        left = f" and {report.tombstones} ids that left" if report.tombstones else ""
        log.info(
            "saved %d rows%s in %s as %s (%s) in %.1f s",
            report.rows,
            left,
            path,
            report.checkpoint,
            report.kind,
            seconds,
        )
    elif isinstance(report, LoadReport):
        log.info(
            "loaded %d rows of %s from %s (%s) in %.1f s%s",
            sum(report.rows.values()),
            _names(report.rows),
            path,
            report.checkpoint,
            seconds,
            _other_ranks(os.path.join(path, report.checkpoint)),
        )


def _names(rows: Mapping[str, int]) -> str:
    return ", ".join(map(repr, rows)) or "no table"


def _other_ranks(checkpoint: str) -> str:
    """That another number of ranks saved it, if so."""
    try:
        ranks = [int(found[1]) for name in os.listdir(checkpoint) if (found := _RANKS.fullmatch(name))]
    except OSError:  # it was replaced since
        return ""
    if not ranks or ranks[0] == world_size():
        return ""
    return f"; it was saved by {ranks[0]} ranks and is loaded by {world_size()}"
