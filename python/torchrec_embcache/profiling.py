"""Ranges of torch's profiler, by which a trace says what a step of the tables does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

__all__ = ["profiled"]

P = ParamSpec("P")
R = TypeVar("R")


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have the calls of a function be ranges called `name` in a profile of torch's. Without a profiler they cost one comparison."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            if not profiler._is_profiler_enabled:  # noqa: SLF001 - torch's own modules ask this, too
                return function(*arguments, **named)
            with profiler.record_function(name):
                return function(*arguments, **named)

        return call

    return decorate
