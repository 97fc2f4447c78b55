"""RecSDK's configuration of admission and eviction, under RecSDK's names.

Examples:
    >>> from torchrec_embcache import EmbCacheEmbeddingConfig
    >>> from torchrec_embcache.modules.recsdk import AdmitAndEvictConfig
    >>> item = EmbCacheEmbeddingConfig(
    ...     name="item", embedding_dim=64, num_embeddings=1000, admit_and_evict_config=AdmitAndEvictConfig(admit_threshold=2)
    ... )

Fields with an equivalent in this package become `admission`, `not_admitted` and `eviction` of the table. A field without one raises
an `UnsupportedError` that names it. docs/eviction-configs.md has the table of fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torchrec_embcache.admission import Admission, Count, NotAdmitted, ShowClick
from torchrec_embcache.config import check_int
from torchrec_embcache.eviction import Policy, Rule, Share, Ttl
from torchrec_embcache.exceptions import ConfigError, UnsupportedError

__all__ = ["AdmitAndEvictConfig", "AdmitAndEvictPolicyType", "ShowClickParams", "TranslatedConfig"]

_MAX_COUNT = (1 << 24) - 1
_MAX_STEPS = 1 << 53
_MAX_FLOAT32 = 3.4028234663852886e38


class AdmitAndEvictPolicyType(Enum):
    """The admission and eviction policy, in RecSDK's terms.

    Examples:
        >>> from torchrec_embcache.modules.recsdk import AdmitAndEvictConfig, AdmitAndEvictPolicyType
        >>> AdmitAndEvictConfig(admit_threshold=2, policy_type=AdmitAndEvictPolicyType.NONE).translate().admission is None
        True
    """

    NONE = 0
    """Neither admission nor eviction."""
    POLICY_COUNT = 1
    """Admission by occurrences, eviction by time."""
    POLICY_SHOWCLICK = 2
    """Admission by shows and clicks, eviction of a fraction of the rows."""


def _check_float32(name: str, value: object) -> float:
    """Returns `value` as a float. Raises `ConfigError` unless it is a number in the range of float32."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_FLOAT32:
        raise ConfigError(f"{name}={value!r} is not a finite float32: give a number")
    return float(value)


@dataclass(frozen=True)
class ShowClickParams:
    """Parameters of `POLICY_SHOWCLICK`.

    Args:
        alpha: the weight of a show.
        beta: the weight of a click.
        admit_threshold: an id is admitted when `alpha * shows + beta * clicks` reaches it. 0: every id is admitted.
        evict_percentage: the fraction of the rows that a sweep evicts, from 0 (none) to 1. A table rejects 1, which is all rows.
        score_decay: RecSDK's factor for scores at every sweep. Only 1 is independent of the sweep schedule.

    Raises:
        ConfigError: a value is out of range.

    Examples:
        >>> from torchrec_embcache.modules.recsdk import ShowClickParams
        >>> ShowClickParams(alpha=0.1, beta=1.0, admit_threshold=2.0).admit_threshold
        2.0
    """

    alpha: float = 1.0
    beta: float = 0.0
    admit_threshold: float = 0.0
    evict_percentage: float = 0.0
    score_decay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "admit_threshold", "evict_percentage", "score_decay"):
            if _check_float32(f"ShowClickParams.{name}", getattr(self, name)) < 0:
                raise ConfigError(f"ShowClickParams.{name}={getattr(self, name)!r} is out of range: give 0 or more")
        for name in ("evict_percentage", "score_decay"):
            if getattr(self, name) > 1:
                raise ConfigError(f"ShowClickParams.{name}={getattr(self, name)!r} is out of range: give 0 to 1")


@dataclass(frozen=True)
class TranslatedConfig:
    """The table settings equivalent to a configuration with RecSDK's names.

    Examples:
        >>> from torchrec_embcache.modules.recsdk import AdmitAndEvictConfig
        >>> AdmitAndEvictConfig(admit_threshold=2, evict_threshold=3600).translate().eviction
        Policy(rules=(Ttl(steps=None, seconds=3600),), every_steps=None, at_least_rows=0)
    """

    admission: Admission | None = None
    not_admitted: NotAdmitted = "zeros"
    eviction: Policy | None = None


@dataclass(frozen=True)
class AdmitAndEvictConfig:
    """Admission and eviction of one table, as in RecSDK's configuration of this name.

    Args:
        admit_threshold: an id is admitted when its occurrences reach this. -1, 0 and None: every id is admitted.
        not_admitted_default_value: the value of every column for an id that is not admitted. None: zeros.
        evict_threshold: seconds without training after which a row is evicted; see `eviction.Ttl`. 0 and None: no eviction.
        evict_step_interval: runs a sweep after each step whose number is a multiple of this. 0 and None: at saves, and when called.
        showclick_params: for `POLICY_SHOWCLICK`.
        policy_type: the kind of policy. Fields of other kinds are ignored.

    Raises:
        ConfigError: a value is out of range.

    Examples:
        >>> from torchrec_embcache.modules.recsdk import AdmitAndEvictConfig
        >>> AdmitAndEvictConfig(admit_threshold=2).translate().admission
        Count(threshold=2, window_steps=None, memory='256MiB')
    """

    admit_threshold: int | None = -1
    not_admitted_default_value: float | None = 0.0
    evict_threshold: int | None = 0
    evict_step_interval: int | None = 0
    showclick_params: ShowClickParams = field(default_factory=ShowClickParams)
    policy_type: AdmitAndEvictPolicyType = AdmitAndEvictPolicyType.POLICY_COUNT

    def __post_init__(self) -> None:
        if self.admit_threshold is not None:
            check_int("AdmitAndEvictConfig.admit_threshold", self.admit_threshold, -1, _MAX_COUNT)
        for name in ("evict_threshold", "evict_step_interval"):
            if getattr(self, name) is not None:
                check_int(f"AdmitAndEvictConfig.{name}", getattr(self, name), 0, _MAX_STEPS)
        if self.not_admitted_default_value is not None:
            _check_float32("AdmitAndEvictConfig.not_admitted_default_value", self.not_admitted_default_value)
        if not isinstance(self.showclick_params, ShowClickParams):
            raise ConfigError(
                f"AdmitAndEvictConfig.showclick_params={self.showclick_params!r} is not known: give ShowClickParams(...)"
            )
        if not isinstance(self.policy_type, AdmitAndEvictPolicyType):
            raise ConfigError(
                f"AdmitAndEvictConfig.policy_type={self.policy_type!r} is not known: give one of AdmitAndEvictPolicyType"
            )

    def translate(self) -> TranslatedConfig:
        """Returns the equivalent table settings. Raises `UnsupportedError`, which names a field without an equivalent."""
        admission: Admission | None = None
        rule: Rule | None = None
        if self.policy_type == AdmitAndEvictPolicyType.POLICY_COUNT:
            admission, rule = self._count_rule(), self._ttl_rule()
        elif self.policy_type == AdmitAndEvictPolicyType.POLICY_SHOWCLICK:
            admission, rule = self._show_click_rule(), self._fraction_rule()
        value = self.not_admitted_default_value
        return TranslatedConfig(
            admission=admission,
            not_admitted=float(value) if value and admission is not None else "zeros",
            eviction=None if rule is None else Policy([rule], every_steps=self.evict_step_interval or None),
        )

    def _count_rule(self) -> Admission | None:
        threshold = self.admit_threshold
        return Count(threshold) if threshold is not None and threshold > 0 else None

    def _ttl_rule(self) -> Ttl | None:
        return Ttl(seconds=self.evict_threshold) if self.evict_threshold else None

    def _show_click_rule(self) -> Admission | None:
        given = self.showclick_params
        if not given.admit_threshold:
            return None
        return ShowClick(alpha=given.alpha, beta=given.beta, threshold=given.admit_threshold)

    def _fraction_rule(self) -> Share | None:
        given = self.showclick_params
        if not given.evict_percentage:
            return None
        if given.evict_percentage == 1:
            raise UnsupportedError(
                f"ShowClickParams.evict_percentage={given.evict_percentage!r} is not supported: each sweep would take every row. "
                "Give less than 1, or 0 for no eviction"
            )
        if given.score_decay != 1:
            raise UnsupportedError(
                f"ShowClickParams.score_decay={given.score_decay!r} is not supported: it decays scores at every sweep, so what "
                "a score means hangs on how often sweeps run. Leave it at 1, and give the table score_half_life_steps"
            )
        if given.beta:
            raise UnsupportedError(
                f"ShowClickParams.beta={given.beta!r} with evict_percentage={given.evict_percentage!r} is not supported: the score "
                "that eviction looks at counts shows alone. Give beta=0, or leave evict_percentage at 0"
            )
        if not given.alpha:
            raise UnsupportedError(
                f"ShowClickParams.alpha={given.alpha!r} with evict_percentage={given.evict_percentage!r} is not supported: every "
                "score would be 0. Give it a weight"
            )
        return Share(given.evict_percentage)
