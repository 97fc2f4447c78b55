"""Ranges of torch's profiler that show the work of the tables in a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

__all__ = ["profiled"]

P = ParamSpec("P")
R = TypeVar("R")


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Records the calls of a function as ranges `name` in torch's profiler. Without a profiler a call costs one comparison."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            if not profiler._is_profiler_enabled:  # noqa: SLF001 - torch's own modules ask this, too
                return function(*arguments, **named)
            with profiler.record_function(name):
                return function(*arguments, **named)

        return call

    return decorate
