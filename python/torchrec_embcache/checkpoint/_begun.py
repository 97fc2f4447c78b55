"""Abandons an unfinished save after an error."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from torchrec_embcache.exceptions import EmbCacheError

__all__ = ["AbandonOnError"]

_log = logging.getLogger("torchrec_embcache.checkpoint.saver")


class _Abandonable(Protocol):
    """A native object of an unfinished save."""

    def abandon(self) -> None:
        """Removes the files written so far."""


N = TypeVar("N", bound=_Abandonable)


class AbandonOnError(Generic[N]):
    """A context manager that abandons the native save if the block is left by an error or an interrupt."""

    def __init__(self) -> None:
        # Set by one assignment: after an interrupt, either this field has the save or a later save removes its files.
        self._native: N | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()

    def abandon(self) -> None:
        """Removes the save if it is not published. Idempotent.

        The error that ended the save is already propagating to the caller, so an error of the removal is only logged.
        """
        begun, self._native = self._native, None
        if begun is None:
            return
        try:
            begun.abandon()
        except EmbCacheError as error:
            _log.info("an unfinished checkpoint stays until the next save removes it: %s", error)
