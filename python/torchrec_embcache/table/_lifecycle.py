"""The lifecycle settings of a table's rows: admission, score decay and eviction."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any, Literal

from torchrec_embcache.admission import Admission, Count, NotAdmitted, ShowClick, check_not_admitted
from torchrec_embcache.config import MissingRead, check_choice, check_int
from torchrec_embcache.eviction import Policy
from torchrec_embcache.exceptions import ConfigError

__all__ = ["DEFAULT_SCORE_HALF_LIFE_STEPS", "MAX_SCORE_HALF_LIFE_STEPS", "LifecycleConfig"]

DEFAULT_SCORE_HALF_LIFE_STEPS = 1024
# Scores decay by 1024ths of the half-life. With this half-life they never decay, because no table runs that many steps.
MAX_SCORE_HALF_LIFE_STEPS = 1 << 53


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Lifecycle settings of a table's rows. `admission=None`: every id is admitted. `eviction=None`: no rows expire.

    `missing=None`: for an id without a row, evaluation reads the same value as training.
    """

    admission: Admission | None = None
    not_admitted: NotAdmitted = "zeros"
    score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS
    eviction: Policy | None = None
    missing: MissingRead | None = None

    owner: InitVar[str] = ""

    def __post_init__(self, owner: str) -> None:
        """Validates a user's settings. Raises `ConfigError` for invalid values; the message starts with `owner`, the table."""
        if not isinstance(self.admission, Admission | None):
            raise ConfigError(
                f"{owner}admission={self.admission!r} is not known: use one of torchrec_embcache.admission, or None"
            )
        if not isinstance(self.eviction, Policy | None):
            raise ConfigError(
                f"{owner}eviction={self.eviction!r} is not known: use torchrec_embcache.eviction.Policy([...]), or None"
            )
        if self.missing is not None:
            check_choice(f"{owner}missing", self.missing, MissingRead)
        value = check_not_admitted(f"{owner}not_admitted", self.not_admitted)
        if self.admission is None and value != "zeros":
            raise ConfigError(
                f"{owner}not_admitted={self.not_admitted!r} without admission has no effect, because every id gets a row: "
                "give admission, or leave it out. The setting `missing` is for evaluation"
            )
        field, steps = f"{owner}score_half_life_steps", self.score_half_life_steps
        object.__setattr__(self, "not_admitted", value)
        object.__setattr__(self, "score_half_life_steps", check_int(field, steps, 1, MAX_SCORE_HALF_LIFE_STEPS))

    @property
    def counts_ids(self) -> bool:
        """True if the admission rule counts pending ids."""
        return isinstance(self.admission, Count | ShowClick)

    @property
    def has_oov_row(self) -> bool:
        """True if ids that are not admitted share the OOV row, which their gradients train."""
        return self.missing_read == "oov"

    @property
    def counts_clicks(self) -> bool:
        """True if the admission rule counts clicks."""
        return isinstance(self.admission, ShowClick)

    @property
    def is_swept_at_saves(self) -> bool:
        """True if a save runs a sweep of the table before it writes."""
        return self.eviction is not None and self.eviction.at_saves

    @property
    def needs_clock(self) -> bool:
        """True if an eviction rule needs the times of the table's steps."""
        return self.eviction is not None and self.eviction.needs_clock

    def native(self) -> dict[str, Any]:
        """Returns the native form."""
        given: dict[str, Any] = {
            "admission": None if self.admission is None else self.admission.native(),
            "not_admitted": self.missing_read,
            "missing_read": self.missing or self.missing_read,
            "score_half_life_steps": self.score_half_life_steps,
        }
        if self.eviction is not None:
            given["eviction"] = self.eviction.native()
            # If ranks have to agree on each sweep, `_sweep` schedules the sweeps.
            given["evict_every_steps"] = None if self.eviction.is_collective else self.eviction.every_steps
        return given

    def describe(self) -> str:
        """Returns the settings that differ from the defaults, for `print(table)`: "" or ", admission=..., eviction=..."."""
        given = {"admission": self.admission, "eviction": self.eviction}
        return "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)

    @property
    def missing_read(self) -> NotAdmitted | Literal["initial"]:
        """The value that ids without a row read: their initial values if every id is admitted."""
        return "initial" if self.admission is None else self.not_admitted
