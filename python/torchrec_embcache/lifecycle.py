"""The life of a table's rows: which ids get one, how their scores decay, and which rows leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, TypedDict

from . import _native
from .admission import Admission, Count, NotAdmitted, ShowClick, check_not_admitted
from .config import Unseen, check_choice, check_int
from .eviction import Policy
from .exceptions import ConfigError

__all__ = ["DEFAULT_SCORE_HALF_LIFE_STEPS", "LONGEST_SCORE_HALF_LIFE_STEPS", "Lifecycle", "NativeLifecycle"]

DEFAULT_SCORE_HALF_LIFE_STEPS = 1024
# Scores decay by 1024ths of the half life: with this one they never do, because no table sees so many steps.
LONGEST_SCORE_HALF_LIFE_STEPS = 1 << 53


class NativeLifecycle(TypedDict, total=False):
    """What the core's table is given of it, by its names there. Without eviction the two names of it are left out."""

    admission: _native.RowAdmission | None
    not_admitted: NotAdmitted
    missing_read: NotAdmitted
    score_half_life_steps: int
    eviction: _native.SweepRule
    evict_every_steps: int | None


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """What is set of the life of a table's rows. `admission=None`: every id gets a row. `eviction=None`: no rule takes one.

    `unseen=None`: evaluation reads what training reads for an id without a row.
    """

    admission: Admission | None = None
    not_admitted: NotAdmitted = "zeros"
    score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS
    eviction: Policy | None = None
    unseen: Unseen | None = None

    @classmethod
    def checked(
        cls,
        *,
        admission: object,
        not_admitted: object,
        score_half_life_steps: object,
        eviction: object,
        unseen: Unseen | None,
        of: str = "",
    ) -> Self:
        """From what a user gave. `ConfigError` for a value out of range, which begins with `of`, the table."""
        if not isinstance(admission, Admission | None):
            raise ConfigError(
                f"{of}admission={admission!r} is not known: use one of torchrec_embcache.admission, or None"
            )
        if not isinstance(eviction, Policy | None):
            raise ConfigError(
                f"{of}eviction={eviction!r} is not known: use torchrec_embcache.eviction.Policy([...]), or None"
            )
        if unseen is not None:
            check_choice(f"{of}unseen", unseen, Unseen)
        value = check_not_admitted(f"{of}not_admitted", not_admitted)
        if admission is None and value != "zeros":
            raise ConfigError(
                f"{of}not_admitted={not_admitted!r} without admission has no effect, because every id gets a row: give admission, "
                "or leave it out. What evaluation reads for an id without a row is unseen"
            )
        return cls(
            admission=admission,
            not_admitted=value,
            score_half_life_steps=check_int(
                f"{of}score_half_life_steps", score_half_life_steps, 1, LONGEST_SCORE_HALF_LIFE_STEPS
            ),
            eviction=eviction,
            unseen=unseen,
        )

    @property
    def counts_ids(self) -> bool:
        """Whether the admission counts the ids that wait for rows."""
        return isinstance(self.admission, Count | ShowClick)

    @property
    def shares_a_row(self) -> bool:
        """Whether ids that are refused a row share one, which their gradients train."""
        return self.absent == "shared"

    @property
    def counts_clicks(self) -> bool:
        """Whether the admission counts clicks."""
        return isinstance(self.admission, ShowClick)

    @property
    def swept_at_saves(self) -> bool:
        """Whether a save sweeps the table before it writes."""
        return self.eviction is not None and self.eviction.at_saves

    @property
    def is_timed(self) -> bool:
        """Whether a rule of eviction needs the times of the table's steps."""
        return self.eviction is not None and self.eviction.is_timed

    def native(self) -> NativeLifecycle:
        """As the core takes it."""
        given: NativeLifecycle = {
            "admission": None if self.admission is None else self.admission.native(),
            "not_admitted": self.absent,
            "missing_read": self.unseen or self.absent,
            "score_half_life_steps": self.score_half_life_steps,
        }
        if self.eviction is not None:
            given["eviction"] = self.eviction.native()
            # Where ranks agree on each sweep, `sweeping` says when one is due.
            given["evict_every_steps"] = None if self.eviction.is_agreed else self.eviction.every_steps
        return given

    def describe(self) -> str:
        """What is set apart from the defaults, for `print(table)`: "" or ", admission=..., eviction=..."."""
        given = {"admission": self.admission, "eviction": self.eviction}
        return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)

    @property
    def absent(self) -> NotAdmitted | Literal["initial"]:
        """What ids read without a row: their initial values where every id gets one."""
        return "initial" if self.admission is None else self.not_admitted
