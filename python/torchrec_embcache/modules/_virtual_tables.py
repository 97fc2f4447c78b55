"""Translates TorchRec's eviction policies of virtual tables to this package's settings.

Fields with an equivalent are translated; docs/eviction-configs.md has the table of fields. A field without one, including fields
that a later version of TorchRec adds, raises an `UnsupportedError` that names it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
    VirtualTableEvictionPolicy,
)

from torchrec_embcache.eviction import All, L2Norm, Policy, Rule, Score, Ttl
from torchrec_embcache.exceptions import ConfigError, UnsupportedError

__all__ = ["TranslatedPolicy", "translate_policy"]

_PER_RANK = "it counts rows of one rank, so that other rows would leave with another number of ranks"
_PER_SWEEP = (
    "it decays at every sweep, so that what a threshold means hangs on how often sweeps run; give 1.0 here and no decay, or "
    "eviction=Policy([Score(below=...)]) and score_half_life_steps"
)
_AT_INFERENCE = "one rule decides for training and serving, so give it the value that training has"
_HEADER = "rows have no header in their weights; give a policy that TorchRec has not initialised"
_FEATURE_SCORES = (
    "scores count occurrences, and have no weight for each feature; give eviction=Policy([Score(below=...)])"
)

# Fields that are accepted only at their default, and the reasons.
_AT_DEFAULT = {
    "meta_header_len": _HEADER,
    "embedding_dim": _HEADER,
    "initialized": _HEADER,
    "training_id_eviction_trigger_count": _PER_RANK,
    "training_id_keep_count": _PER_RANK,
    "max_inference_id_num_per_rank": _PER_RANK,
    "feature_score_mapping": _FEATURE_SCORES,
    "feature_score_default_value": _FEATURE_SCORES,
    "enable_auto_feature_score_collection": _FEATURE_SCORES,
}
# Inference fields, and the training fields that they must equal. TorchRec fills them in that way.
_INFERENCE_FIELDS = {
    "inference_eviction_threshold": "eviction_threshold",
    "inference_eviction_ttl_mins": "eviction_ttl_mins",
}


@dataclass(frozen=True)
class TranslatedPolicy:
    """The equivalent of a TorchRec policy."""

    eviction: Policy | None
    scores_decay: bool
    """False: the scores that it uses must not decay."""


def translate_policy(policy: object, table_prefix: str) -> TranslatedPolicy:
    """Translates `policy` to this package's settings. Error messages start with `table_prefix`, the table.

    Raises `UnsupportedError`, which names a field or a class without an equivalent.
    """
    name = type(policy).__name__
    if not isinstance(policy, VirtualTableEvictionPolicy):
        raise UnsupportedError(
            f"{table_prefix}virtual_table_eviction_policy={policy!r} is not supported: give one of TorchRec's "
            f"policies, or eviction="
        )
    rule_of = _RULES.get(type(policy))
    if rule_of is None:
        raise UnsupportedError(
            f"{table_prefix}virtual_table_eviction_policy={name}(...) is not supported: it is none of TorchRec's "
            f"that are known here; give "
            "eviction= (torchrec_embcache.eviction)"
        )
    if isinstance(policy, FeatureScoreBasedEvictionPolicy) and not policy.enable_eviction:
        return TranslatedPolicy(None, scores_decay=True)
    owner = f"{table_prefix}virtual_table_eviction_policy={name}"
    fields = _PolicyFields(policy, owner)
    try:
        rule = rule_of(fields)
    except ConfigError as error:
        raise ConfigError(f"{owner}(...) means {error}") from None
    fields.check_unused()
    return TranslatedPolicy(
        eviction=None if rule is None else Policy([rule]),
        scores_decay=not isinstance(policy, CountBasedEvictionPolicy | CountTimestampMixedEvictionPolicy),
    )


class _PolicyFields:
    """The fields of a policy. Rejects those that were not read."""

    def __init__(self, policy: Any, owner: str) -> None:
        self._owner = owner
        self._read: dict[str, Any] = {}
        self._values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        self._defaults = {
            field.name: field.default if field.default is not dataclasses.MISSING else None
            for field in dataclasses.fields(policy)
        }

    def read(self, name: str) -> Any:
        """Returns the value of a supported field."""
        self._read[name] = self._values.pop(name)
        return self._read[name]

    def unsupported_error(self, name: str, value: object, reason: str) -> UnsupportedError:
        """Returns the error of an unsupported field."""
        return UnsupportedError(f"{self._owner}({name}={value!r}) is not supported: {reason}")

    def check_unused(self) -> None:
        """Rejects the fields that were not read, unless they have no effect."""
        for name, value in self._values.items():
            if name in _INFERENCE_FIELDS and _INFERENCE_FIELDS[name] in self._read:
                # None: TorchRec did not fill it in.
                if value is not None and value != self._read[_INFERENCE_FIELDS[name]]:
                    raise self.unsupported_error(name, value, _AT_INFERENCE)
            elif name == "inference_eviction_feature_score_threshold":
                if value:
                    raise self.unsupported_error(name, value, _FEATURE_SCORES)
            elif value != self._defaults[name] and value != {}:  # TorchRec fills in {} if scores are to be collected
                raise self.unsupported_error(name, value, _AT_DEFAULT.get(name, "this package does not know the field"))


def _count_rule(fields: _PolicyFields) -> Rule | None:
    threshold = _threshold(fields)
    return Score(below=threshold) if threshold else None


def _threshold(fields: _PolicyFields) -> Any:
    """Returns the bound of counts, which must not decay."""
    threshold, decay = fields.read("eviction_threshold"), fields.read("decay_rate")
    if threshold and decay != 1:
        raise fields.unsupported_error("decay_rate", decay, _PER_SWEEP)
    return threshold


def _timestamp_rule(fields: _PolicyFields) -> Rule | None:
    minutes = fields.read("eviction_ttl_mins")
    return Ttl(seconds=minutes * 60) if minutes else None


def _mixed_rule(fields: _PolicyFields) -> Rule | None:
    minutes, threshold = fields.read("eviction_ttl_mins"), _threshold(fields)
    if minutes and threshold:
        return All([Ttl(seconds=minutes * 60), Score(below=threshold)])
    if minutes or threshold:
        name, value = ("eviction_threshold", threshold) if minutes else ("eviction_ttl_mins", minutes)
        raise fields.unsupported_error(
            name, value, "FBGEMM then evicts nothing at all; give the policy of the other field alone, or none"
        )
    return None


def _norm_rule(fields: _PolicyFields) -> Rule | None:
    threshold = fields.read("eviction_threshold")
    return L2Norm(below=threshold) if threshold else None


def _feature_score_rule(fields: _PolicyFields) -> Rule | None:
    fields.read("enable_eviction")
    fields.read("decay_rate")  # without effect with a time, the only supported kind
    minutes = fields.read("eviction_ttl_mins")
    if not minutes:
        raise fields.unsupported_error(
            "eviction_ttl_mins", minutes, f"it asks for feature scores, and {_FEATURE_SCORES}"
        )
    return Ttl(seconds=minutes * 60)


# By exact class: a derived class may have another meaning.
_RULES: dict[type[Any], Callable[[_PolicyFields], Rule | None]] = {
    CountBasedEvictionPolicy: _count_rule,
    TimestampBasedEvictionPolicy: _timestamp_rule,
    CountTimestampMixedEvictionPolicy: _mixed_rule,
    FeatureL2NormBasedEvictionPolicy: _norm_rule,
    FeatureScoreBasedEvictionPolicy: _feature_score_rule,
    NoEvictionPolicy: lambda _fields: None,
}
