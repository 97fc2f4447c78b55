"""Logs one line per save and load: the number of rows, the tables, the path and the duration."""

import functools
import inspect
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from torchrec_embcache._dist.ranks import all_ranks

from .reports import LoadReport, SaveReport

__all__ = ["log_report"]

P = ParamSpec("P")
R = TypeVar("R")

_RANKS = re.compile(r"0-of-(\d+)\.json")


def log_report(call: Callable[P, R]) -> Callable[P, R]:
    """Logs the report of `call` at INFO, on rank 0. `call` is a save or load with an argument `path`, and returns a report or
    future.
    """
    log, signature = logging.getLogger(call.__module__), inspect.signature(call)

    @functools.wraps(call)
    def wrapper(*args: P.args, **more: P.kwargs) -> R:
        began = time.monotonic()
        result = call(*args, **more)
        if all_ranks().rank == 0:
            path = signature.bind(*args, **more).arguments["path"]
            if isinstance(result, Future):
                result.add_done_callback(lambda done: _log_result(log, done, path, began))
            else:
                _log(log, result, path, began)
        return result

    return wrapper


def _log_result(log: logging.Logger, future: Future[object], path: str | os.PathLike[str], started: float) -> None:
    if future.exception() is None:
        _log(log, future.result(), path, started)


def _log(log: logging.Logger, report: object, path: str | os.PathLike[str], started: float) -> None:
    seconds = time.monotonic() - started
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
            "loaded %d rows of %s from %s (%s) in %.1f s%s%s",
            sum(report.rows.values()),
            _table_names_text(report.rows),
            path,
            report.checkpoint,
            seconds,
            f"; full tables dropped {sum(report.dropped.values())} more" if report.dropped else "",
            _saved_ranks_text(os.path.join(path, report.checkpoint)),
        )


def _table_names_text(rows: Mapping[str, int]) -> str:
    return ", ".join(map(repr, rows)) or "no table"


def _saved_ranks_text(checkpoint: str) -> str:
    """Returns a clause for the log if another number of ranks saved the checkpoint, else an empty string."""
    try:
        ranks = [int(found[1]) for name in os.listdir(checkpoint) if (found := _RANKS.fullmatch(name))]
    except OSError:  # the checkpoint was replaced since
        return ""
    now = all_ranks().world_size
    return f"; it was saved by {ranks[0]} ranks and is loaded by {now}" if ranks and ranks[0] != now else ""
