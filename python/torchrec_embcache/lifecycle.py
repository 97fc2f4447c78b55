"""The life of a table's rows: which ids get one, how their scores decay, and which rows leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, TypedDict

from . import _native
from .admission import Admission, Count, NotAdmitted, ShowClick, check_not_admitted
from .config import MissingRead, check_choice, check_int
from .eviction import Policy
from .exceptions import ConfigError

__all__ = ["DEFAULT_SCORE_HALF_LIFE_STEPS", "MAX_SCORE_HALF_LIFE_STEPS", "LifecycleConfig", "NativeLifecycle"]

DEFAULT_SCORE_HALF_LIFE_STEPS = 1024
# Scores decay by 1024ths of the half life: with this one they never do, because no table sees so many steps.
MAX_SCORE_HALF_LIFE_STEPS = 1 << 53


class NativeLifecycle(TypedDict, total=False):
    """What the core's table is given of it, by its names there. Without eviction the two names of it are left out."""

    admission: _native.RowAdmission | None
    not_admitted: NotAdmitted
    missing_read: NotAdmitted
    score_half_life_steps: int
    eviction: _native.SweepRule
    evict_every_steps: int | None


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """What is set of the life of a table's rows. `admission=None`: every id gets a row. `eviction=None`: no rule takes one.

    `missing=None`: evaluation reads what training reads for an id without a row.
    """

    admission: Admission | None = None
    not_admitted: NotAdmitted = "zeros"
    score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS
    eviction: Policy | None = None
    missing: MissingRead | None = None

    @classmethod
    def checked(
        cls,
        *,
        admission: object,
        not_admitted: object,
        score_half_life_steps: object,
        eviction: object,
        missing: MissingRead | None,
        owner: str = "",
    ) -> Self:
        """From what a user gave. `ConfigError` for a value out of range, which begins with `owner`, the table."""
        if not isinstance(admission, Admission | None):
            raise ConfigError(
                f"{owner}admission={admission!r} is not known: use one of torchrec_embcache.admission, or None"
            )
        if not isinstance(eviction, Policy | None):
            raise ConfigError(
                f"{owner}eviction={eviction!r} is not known: use torchrec_embcache.eviction.Policy([...]), or None"
            )
        if missing is not None:
            check_choice(f"{owner}missing", missing, MissingRead)
        value = check_not_admitted(f"{owner}not_admitted", not_admitted)
        if admission is None and value != "zeros":
            raise ConfigError(
                f"{owner}not_admitted={not_admitted!r} without admission has no effect, because every id gets a row: "
                f"give admission, "
                "or leave it out. What evaluation reads for an id without a row is missing"
            )
        return cls(
            admission=admission,
            not_admitted=value,
            score_half_life_steps=check_int(
                f"{owner}score_half_life_steps", score_half_life_steps, 1, MAX_SCORE_HALF_LIFE_STEPS
            ),
            eviction=eviction,
            missing=missing,
        )

    @property
    def counts_ids(self) -> bool:
        """Whether the admission counts the ids that wait for rows."""
        return isinstance(self.admission, Count | ShowClick)

    @property
    def has_oov_row(self) -> bool:
        """Whether ids that are refused a row share one, which their gradients train."""
        return self.missing_read == "oov"

    @property
    def counts_clicks(self) -> bool:
        """Whether the admission counts clicks."""
        return isinstance(self.admission, ShowClick)

    @property
    def is_swept_at_saves(self) -> bool:
        """Whether a save sweeps the table before it writes."""
        return self.eviction is not None and self.eviction.at_saves

    @property
    def needs_clock(self) -> bool:
        """Whether a rule of eviction needs the times of the table's steps."""
        return self.eviction is not None and self.eviction.needs_clock

    def native(self) -> NativeLifecycle:
        """As the core takes it."""
        given: NativeLifecycle = {
            "admission": None if self.admission is None else self.admission.native(),
            "not_admitted": self.missing_read,
            "missing_read": self.missing or self.missing_read,
            "score_half_life_steps": self.score_half_life_steps,
        }
        if self.eviction is not None:
            given["eviction"] = self.eviction.native()
            # Where ranks agree on each sweep, `sweeping` says when one is due.
            given["evict_every_steps"] = None if self.eviction.is_collective else self.eviction.every_steps
        return given

    def describe(self) -> str:
        """What is set apart from the defaults, for `print(table)`: "" or ", admission=..., eviction=..."."""
        given = {"admission": self.admission, "eviction": self.eviction}
        return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)

    @property
    def missing_read(self) -> NotAdmitted | Literal["initial"]:
        """What ids read without a row: their initial values where every id gets one."""
        return "initial" if self.admission is None else self.not_admitted
