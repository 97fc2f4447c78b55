"""What a save has begun, and has to undo where it does not end well."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from torchrec_embcache.exceptions import EmbCacheError

__all__ = ["AbandonOnError"]

_log = logging.getLogger("torchrec_embcache.saver")


class _Abandonable(Protocol):
    """What the core begins."""

    def abandon(self) -> None:
        """Remove what was written."""


N = TypeVar("N", bound=_Abandonable)


class AbandonOnError(Generic[N]):
    """As a block: abandons what the core began where the block is left by an error or an interrupt."""

    def __init__(self) -> None:
        # One assignment sets it: wherever an interrupt comes, either this has it, or it ended and a later save sweeps what it left.
        self._native: N | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()

    def abandon(self) -> None:
        """Remove what was begun, if it is not published. Harmless twice.

        The error that ended the save is on its way to the caller, so an error of the removal is only logged.
        """
        begun, self._native = self._native, None
        if begun is None:
            return
        try:
            begun.abandon()
        except EmbCacheError as error:
            _log.info("an unfinished checkpoint stays until the next save removes it: %s", error)
