"""What the trainer of the soak of serving published, and what servers may therefore answer from.

Its times are of the wall clock, in seconds since 1970, as publication is. The parent does not know the moment of a publication, but
that it lies between the command to save and the answer.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Checkpoint", "Published"]

# Of the clock by which a file system marks when a file was written: it ticks so often at least.
TICK_SECONDS = 0.05


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was published, the step at which it was saved, and when that began and was over."""

    name: str
    step: int
    begun: float
    over: float


@dataclass
class Published:
    """The published checkpoints, and those of them that are damaged."""

    max_staleness: float
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    # What went against a promise, apart from rows.
    problems: list[str] = field(default_factory=list)

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that was published last."""
        return next(reversed(self.checkpoints.values()))

    def add(self, checkpoint: Checkpoint) -> None:
        """It was published. Call `damage` too where it builds on a damaged one."""
        self.checkpoints[checkpoint.name] = checkpoint

    def damage(self, name: str) -> None:
        """Servers may not answer from it: it is damaged, or builds on a damaged one."""
        self.damaged.add(name)

    def may_answer(self, name: str, step: int) -> bool:
        """Whether a server may answer from this checkpoint, and its rows are those of this step."""
        return name in self.checkpoints and name not in self.damaged and self.checkpoints[name].step == step

    def is_too_old(self, checkpoint: Checkpoint) -> bool:
        """Whether no server may answer from it any more, whenever between the command and the answer it was published."""
        return time.time() - checkpoint.over > self.max_staleness + TICK_SECONDS

    def is_wrong_answer(self, name: str, step: int, moment: float) -> bool:
        """Whether a server may not have answered from this checkpoint then. A name "" is of no answer."""
        if not name:
            return False
        return (
            not self.may_answer(name, step) or moment - self.checkpoints[name].over > self.max_staleness + TICK_SECONDS
        )

    def check_restart(self, name: str | None, step: int) -> None:
        """Check what a trainer that starts has loaded: the newest one, with the rows of its step."""
        newest = self.newest if self.checkpoints else None
        if (name, step) != (newest and newest.name, newest.step if newest else 0):
            self.problems.append(f"a trainer started from {name}, step {step}, and {newest} was published last")

    def check(self, windows: list[dict[str, Any]]) -> Iterator[str]:
        """What servers did that they may not do: answer from what is not published, or is damaged, or is too old; or refuse what is
        young enough.
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
