"""The checkpoints published by the trainer of the serving soak, and the resulting constraints on the servers' answers.

Times are wall-clock times in seconds since 1970, like the publication time. The parent process does not know the exact publication
time, only that it is between the save command and the answer.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Checkpoint", "Published"]

# Maximum tick interval of the clock of file timestamps.
TICK_SECONDS = 0.05


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, the step at which it was saved, and the start and end times of the save."""

    name: str
    step: int
    begun: float
    over: float


@dataclass
class Published:
    """The published checkpoints, and the corrupted ones among them."""

    max_staleness: float
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    # Violated guarantees, except for wrong rows.
    problems: list[str] = field(default_factory=list)

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that was published last."""
        return next(reversed(self.checkpoints.values()))

    def add(self, checkpoint: Checkpoint) -> None:
        """Records a publication. Call `damage` too if it is based on a corrupted checkpoint."""
        self.checkpoints[checkpoint.name] = checkpoint

    def damage(self, name: str) -> None:
        """Records that servers may not answer from a checkpoint: it is corrupted, or based on a corrupted one."""
        self.damaged.add(name)

    def may_answer(self, name: str, step: int) -> bool:
        """True if a server may answer from this checkpoint, and its rows belong to this step."""
        return name in self.checkpoints and name not in self.damaged and self.checkpoints[name].step == step

    def is_too_old(self, checkpoint: Checkpoint) -> bool:
        """True if no server may answer from it, for any publication time between the command and the answer."""
        return time.time() - checkpoint.over > self.max_staleness + TICK_SECONDS

    def is_wrong_answer(self, name: str, step: int, moment: float) -> bool:
        """True if a server must not have answered from this checkpoint at that time. A name "" means no answer."""
        if not name:
            return False
        return (
            not self.may_answer(name, step) or moment - self.checkpoints[name].over > self.max_staleness + TICK_SECONDS
        )

    def check_restart(self, name: str | None, step: int) -> None:
        """Checks that a starting trainer has loaded the latest checkpoint, with the rows of its step."""
        newest = self.newest if self.checkpoints else None
        if (name, step) != (newest and newest.name, newest.step if newest else 0):
            self.problems.append(f"a trainer started from {name}, step {step}, and {newest} was published last")

    def check(self, windows: list[dict[str, Any]]) -> Iterator[str]:
        """Yields the violations of servers: answers from an unpublished, corrupted or too old checkpoint, and rejections of a
        checkpoint that is recent enough.
        """
        for window in windows:
            who = f"server {window['process']}"
            for name, step, _, last in window["served"]:
                if name in self.damaged:
                    yield f"{who} answered from {name}, which is damaged or builds on a damaged one"
                elif not self.may_answer(name, step):
                    yield f"{who} answered from {name} at step {step}: {self._known(name)}"
                elif self.is_wrong_answer(name, step, last):
                    age = last - self.checkpoints[name].over
                    yield f"{who} answered from {name}, published {age:.2f} s ago: at most {self.max_staleness} s are allowed"
            for name, first in window["refused"]:
                known = self.checkpoints.get(name)
                if name in self.damaged:
                    yield f"{who} refused {name} as too old, and not because it is damaged or builds on a damaged one"
                elif known is None or first - known.begun < self.max_staleness - TICK_SECONDS:
                    yield f"{who} refused {name} as too old at {first:.2f}: {self._known(name)}"

    def _known(self, name: str) -> str:
        return str(self.checkpoints.get(name, "it was never published"))
