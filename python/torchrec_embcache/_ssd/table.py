"""The operations of a table that modules below it use, to flush, resume and count tables."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torchrec_embcache.config import TierBudgets

__all__ = ["SsdTable"]


class SsdTable(Protocol):
    """A table, whose rows may be on SSD."""

    @property
    def name(self) -> str: ...
    @property
    def tiers(self) -> TierBudgets: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    @property
    def directory(self) -> str | None:
        """The directory of its files; None without an SSD tier."""

    @property
    def is_open(self) -> bool:
        """True if its tiers were opened."""

    def __len__(self) -> int: ...

    def step(self) -> int:
        """Returns the number of training steps."""

    def open(self) -> None:
        """Opens the table. Idempotent."""

    def close(self) -> None:
        """Flushes and closes the table."""

    def commit_ids(self) -> list[int]:
        """Returns the commit ids of the states in its directory, oldest first."""

    @property
    def _is_sharded(self) -> bool:
        """True if other ranks own the remaining buckets of the table."""

    @property
    def _is_multi_rank(self) -> bool:
        """True if it was opened in a process that is one of several ranks."""

    @property
    def _is_closed(self) -> bool:
        """True if it was closed and cannot be used again."""

    @property
    def _unusable(self) -> str | None:
        """The reason why the table is poisoned, such as a failed load; None if it is usable."""

    @property
    def _ssd_bytes_held(self) -> int:
        """Size of its files in bytes."""

    @property
    def _has_unflushed_rows(self) -> bool:
        """True if it is open in this process and has rows that changed since the last state that can be resumed."""

    @property
    def _flush_lock(self) -> AbstractContextManager[Any]:
        """Lock held from the choice of a flush's commit id until its state is committed."""

    def _known_commit_ids(self) -> list[int]:
        """Returns the commit ids of its states and of its former states. A new commit id is larger than all of them."""

    def _flush_with_commit_id(self, commit_id: int | None) -> int:
        """Commits a state under `commit_id`. Returns its row version."""

    def _mark_flushed(self, version: int, *, by_all_ranks: bool = False) -> None:
        """Records that a resume finds the rows of this version; `by_all_ranks`: the rows of every rank."""
