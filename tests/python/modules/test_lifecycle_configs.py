"""TorchRec's eviction policies and RecSDK's configuration: each field is converted, or rejected by name."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from torchrec.modules import embedding_configs as torchrecs
from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    EmbeddingBagConfig,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
    VirtualTableEvictionPolicy,
)
from torchrec.types import DataType

from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingConfig,
    TierBudgets,
    admission,
)
from torchrec_embcache.eviction import All, L2Norm, Policy, Score, Share, Ttl
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.modules._virtual_tables import translate_policy
from torchrec_embcache.modules.configs import lifecycle_of
from torchrec_embcache.modules.recsdk import (
    AdmitAndEvictConfig,
    AdmitAndEvictPolicyType,
    ShowClickParams,
    TranslatedConfig,
)
from torchrec_embcache.table._lifecycle import LifecycleConfig

CONFIG = {"name": "item", "embedding_dim": 4, "num_embeddings": 9, "feature_names": ["f"]}
COUNTED = {"admission": admission.Count(3), "not_admitted": 0.25}
NEVER = 1 << 53
SHOW_CLICK = AdmitAndEvictPolicyType.POLICY_SHOWCLICK

# ---- TorchRec's policies


@pytest.mark.parametrize(
    ("policy", "meant"),
    [
        (NoEvictionPolicy(), None),
        (CountBasedEvictionPolicy(eviction_threshold=15, decay_rate=1.0), Score(below=15)),
        (CountBasedEvictionPolicy(eviction_threshold=0), None),
        (TimestampBasedEvictionPolicy(), Ttl(seconds=24 * 3600)),
        (TimestampBasedEvictionPolicy(eviction_ttl_mins=5), Ttl(seconds=300)),
        (TimestampBasedEvictionPolicy(eviction_ttl_mins=0), None),
        (
            CountTimestampMixedEvictionPolicy(eviction_threshold=3, decay_rate=1.0, eviction_ttl_mins=2),
            All([Ttl(seconds=120), Score(below=3)]),
        ),
        (CountTimestampMixedEvictionPolicy(eviction_threshold=0, eviction_ttl_mins=0), None),
        (FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.25), L2Norm(below=0.25)),
        (FeatureL2NormBasedEvictionPolicy(), None),
        (FeatureScoreBasedEvictionPolicy(eviction_ttl_mins=7), Ttl(seconds=420)),
        (FeatureScoreBasedEvictionPolicy(enable_eviction=False, training_id_keep_count=5), None),
    ],
)
def test_a_policy_of_torchrecs_becomes_ours_where_it_means_the_same(policy, meant):
    found = translate_policy(policy, "")
    assert found.eviction == (None if meant is None else Policy([meant]))
    if isinstance(policy, CountBasedEvictionPolicy | CountTimestampMixedEvictionPolicy):
        assert not found.scores_decay


HEADER = [{"meta_header_len": 4}, {"embedding_dim": 4}, {"initialized": True}]
TRIGGER = {"training_id_eviction_trigger_count": 1000}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((CountBasedEvictionPolicy, {"decay_rate": 1.0, **change}) for change in HEADER),
        *((NoEvictionPolicy, change) for change in HEADER),
        (CountBasedEvictionPolicy, {"decay_rate": 1.0, **TRIGGER}),
        (CountBasedEvictionPolicy, {"decay_rate": 0.99}),
        (CountBasedEvictionPolicy, {"decay_rate": 1.0, "inference_eviction_threshold": 3}),
        (TimestampBasedEvictionPolicy, TRIGGER),
        (TimestampBasedEvictionPolicy, {"inference_eviction_ttl_mins": 3}),
        (TimestampBasedEvictionPolicy, {"max_inference_id_num_per_rank": 3}),
        (CountTimestampMixedEvictionPolicy, {"decay_rate": 1.0, **TRIGGER}),
        (CountTimestampMixedEvictionPolicy, {"decay_rate": 0.5}),
        (CountTimestampMixedEvictionPolicy, {"decay_rate": 1.0, "inference_eviction_threshold": 3}),
        (CountTimestampMixedEvictionPolicy, {"decay_rate": 1.0, "inference_eviction_ttl_mins": 3}),
        (CountTimestampMixedEvictionPolicy, {"decay_rate": 1.0, "eviction_threshold": 0}),
        (CountTimestampMixedEvictionPolicy, {"decay_rate": 1.0, "eviction_ttl_mins": 0}),
        (FeatureL2NormBasedEvictionPolicy, {"eviction_threshold": 0.5, **TRIGGER}),
        (FeatureL2NormBasedEvictionPolicy, {"eviction_threshold": 0.5, "inference_eviction_threshold": 0.25}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 0}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, **TRIGGER}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "training_id_keep_count": 3}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "max_inference_id_num_per_rank": 3}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "inference_eviction_feature_score_threshold": 0.5}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "inference_eviction_ttl_mins": 4}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "feature_score_mapping": {"f": 2.0}}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "feature_score_default_value": 1.0}),
        (FeatureScoreBasedEvictionPolicy, {"eviction_ttl_mins": 3, "enable_auto_feature_score_collection": True}),
    ],
)
def test_unsupported_torchrec_fields_are_rejected_by_name(kind, changes):
    field, value = list(changes.items())[-1]
    with pytest.raises(UnsupportedError) as caught:
        EmbCacheEmbeddingBagConfig(**CONFIG, virtual_table_eviction_policy=kind(**changes))
    said = f"table 'item': virtual_table_eviction_policy={kind.__name__}({field}={value!r}) is not supported: "
    assert str(caught.value).startswith(said)


def test_every_field_of_torchrecs_policies_is_taken_or_refused():
    """So none of this TorchRec's is forgotten. The next test is of those that a later one adds."""
    tested = {
        (kind.__name__, name)
        for mark in test_unsupported_torchrec_fields_are_rejected_by_name.pytestmark
        for kind, changes in mark.args[1]
        for name in changes
    }
    taken = {
        ("CountBasedEvictionPolicy", "eviction_threshold"),
        ("TimestampBasedEvictionPolicy", "eviction_ttl_mins"),
        ("CountTimestampMixedEvictionPolicy", "eviction_threshold"),
        ("FeatureScoreBasedEvictionPolicy", "enable_eviction"),
        ("FeatureScoreBasedEvictionPolicy", "decay_rate"),
    }
    header = {field.name for field in dataclasses.fields(VirtualTableEvictionPolicy)}
    kinds = [kind for kind in vars(torchrecs).values() if isinstance(kind, type)]
    fields = {
        (kind.__name__, field.name)
        for kind in kinds
        if issubclass(kind, VirtualTableEvictionPolicy) and kind is not VirtualTableEvictionPolicy
        for field in dataclasses.fields(kind)
        if field.name not in header
    }
    assert fields <= tested | taken


@dataclass
class Later(TimestampBasedEvictionPolicy):
    """As a later TorchRec may have it."""

    fresh: int = 0


def test_what_a_later_torchrec_adds_is_refused_and_not_passed_over(monkeypatch):
    with pytest.raises(UnsupportedError, match="virtual_table_eviction_policy=Later"):
        translate_policy(Later(), "")
    from torchrec_embcache.modules import _virtual_tables

    monkeypatch.setitem(_virtual_tables._RULES, Later, _virtual_tables._timestamp_rule)
    assert translate_policy(Later(), "").eviction == Policy([Ttl(seconds=86_400)])
    with pytest.raises(
        UnsupportedError, match=r"Later\(fresh=3\) is not supported: this package does not know the field"
    ):
        translate_policy(Later(fresh=3), "")


@pytest.mark.parametrize("policy", [VirtualTableEvictionPolicy(), "count", 5])
def test_something_else_than_a_policy_of_torchrecs_is_refused(policy):
    with pytest.raises(UnsupportedError, match="table 'item': virtual_table_eviction_policy="):
        EmbCacheEmbeddingConfig(**CONFIG, virtual_table_eviction_policy=policy)


def test_a_policy_that_torchrec_has_initialised_is_refused():
    policy = FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.5)
    policy.init_metaheader_config(DataType.FP32, 4)
    with pytest.raises(UnsupportedError, match="meta_header_len=4"):
        EmbCacheEmbeddingConfig(**CONFIG, virtual_table_eviction_policy=policy)


def test_a_bound_out_of_range_says_whose_it_is():
    policy = FeatureL2NormBasedEvictionPolicy(eviction_threshold=-0.5)
    with pytest.raises(ConfigError, match="table 'item': .*FeatureL2Norm.* means L2Norm.below=-0.5"):
        EmbCacheEmbeddingConfig(**CONFIG, virtual_table_eviction_policy=policy)


def test_counts_that_do_not_decay_give_scores_that_do_not():
    policy = CountBasedEvictionPolicy(eviction_threshold=15, decay_rate=1.0)
    config = EmbCacheEmbeddingBagConfig(**CONFIG, virtual_table_eviction_policy=policy)
    expected = LifecycleConfig(eviction=Policy([Score(below=15)]), score_half_life_steps=NEVER)
    assert lifecycle_of(config) == expected
    assert lifecycle_of(dataclasses.replace(config, score_half_life_steps=NEVER)) == expected
    with pytest.raises(ConfigError, match="score_half_life_steps=9 .* contradict"):
        dataclasses.replace(config, score_half_life_steps=9)
    none = CountBasedEvictionPolicy(eviction_threshold=0)
    assert lifecycle_of(
        EmbCacheEmbeddingBagConfig(**CONFIG, virtual_table_eviction_policy=none, score_half_life_steps=9)
    ) == LifecycleConfig(score_half_life_steps=9)


def test_a_config_of_torchrecs_own_brings_its_policy_to_the_table():
    given = EmbeddingBagConfig(
        **CONFIG, virtual_table_eviction_policy=FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.5)
    )
    made = EmbCacheEmbeddingBagCollection([given], tiers=TierBudgets(host_bytes="1MiB"))
    assert made.tables["item"].eviction == Policy([L2Norm(below=0.5)])


def test_times_of_torchrec_and_recsdk_become_times_of_the_table():
    for given, policy in (
        (
            {"virtual_table_eviction_policy": TimestampBasedEvictionPolicy(eviction_ttl_mins=5)},
            Policy([Ttl(seconds=300)]),
        ),
        (
            {
                "virtual_table_eviction_policy": CountTimestampMixedEvictionPolicy(
                    eviction_threshold=3, eviction_ttl_mins=2, decay_rate=1.0
                )
            },
            Policy([All([Ttl(seconds=120), Score(below=3)])]),
        ),
        (
            {"admit_and_evict_config": AdmitAndEvictConfig(evict_threshold=60, evict_step_interval=4)},
            Policy([Ttl(seconds=60)], every_steps=4),
        ),
    ):
        config = EmbCacheEmbeddingBagConfig(**CONFIG, **given)
        made = EmbCacheEmbeddingBagCollection([config], tiers=TierBudgets(host_bytes="1MiB"))
        assert made.tables["item"].eviction == policy
        made.tables["item"].import_rows([1], [[1.0] * 4])
        made.tables["item"].evict()
        assert len(made.tables["item"]) == 1


# ---- RecSDK's configuration


def show_click(**params: Any) -> AdmitAndEvictConfig:
    return AdmitAndEvictConfig(showclick_params=ShowClickParams(**params), policy_type=SHOW_CLICK)


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        (AdmitAndEvictConfig(), TranslatedConfig()),
        (AdmitAndEvictConfig(admit_threshold=None, evict_threshold=None, evict_step_interval=None), TranslatedConfig()),
        (AdmitAndEvictConfig(admit_threshold=0, not_admitted_default_value=0.5), TranslatedConfig()),
        (AdmitAndEvictConfig(admit_threshold=2), TranslatedConfig(admission.Count(2))),
        (
            AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=0.999),
            TranslatedConfig(admission.Count(2), not_admitted=0.999),
        ),
        (AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=None), TranslatedConfig(admission.Count(2))),
        (AdmitAndEvictConfig(evict_step_interval=300), TranslatedConfig()),
        (
            AdmitAndEvictConfig(evict_threshold=600, evict_step_interval=300),
            TranslatedConfig(eviction=Policy([Ttl(seconds=600)], every_steps=300)),
        ),
        (AdmitAndEvictConfig(evict_threshold=600), TranslatedConfig(eviction=Policy([Ttl(seconds=600)]))),
        (show_click(), TranslatedConfig()),
        (
            show_click(alpha=0.5, beta=2.0, admit_threshold=1.5, score_decay=0.9),
            TranslatedConfig(admission.ShowClick(0.5, 2.0, 1.5)),
        ),
        (show_click(evict_percentage=0.1), TranslatedConfig(eviction=Policy([Share(0.1)]))),
        (AdmitAndEvictConfig(admit_threshold=2, evict_threshold=5, policy_type=SHOW_CLICK), TranslatedConfig()),
        (
            AdmitAndEvictConfig(
                admit_threshold=2, showclick_params=ShowClickParams(admit_threshold=9.0, evict_percentage=0.5)
            ),
            TranslatedConfig(admission.Count(2)),
        ),
        (AdmitAndEvictConfig(admit_threshold=2, policy_type=AdmitAndEvictPolicyType.NONE), TranslatedConfig()),
    ],
)
def test_recsdks_configuration_becomes_ours_where_it_means_the_same(config, meant):
    assert config.translate() == meant


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (show_click(evict_percentage=0.1, score_decay=0.9), "ShowClickParams.score_decay=0.9"),
        (show_click(evict_percentage=1.0), "ShowClickParams.evict_percentage=1.0"),
        (show_click(evict_percentage=1), "ShowClickParams.evict_percentage=1 "),
        (show_click(evict_percentage=0.1, beta=1.0), "ShowClickParams.beta=1.0"),
        (show_click(evict_percentage=0.1, alpha=0.0), "ShowClickParams.alpha=0.0"),
    ],
)
def test_what_of_recsdks_cannot_be_honoured_is_refused_by_its_name(config, words):
    with pytest.raises(UnsupportedError, match=words) as caught:
        EmbCacheEmbeddingConfig(**CONFIG, admit_and_evict_config=config)
    assert str(caught.value).startswith("table 'item': ")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdmitAndEvictConfig(admit_threshold=-2), "admit_threshold=-2"),
        (lambda: AdmitAndEvictConfig(admit_threshold=1.5), "admit_threshold=1.5"),
        (lambda: AdmitAndEvictConfig(not_admitted_default_value=float("nan")), "not_admitted_default_value=nan"),
        (lambda: AdmitAndEvictConfig(not_admitted_default_value="zeros"), "not_admitted_default_value='zeros'"),
        (lambda: AdmitAndEvictConfig(evict_threshold=-1), "evict_threshold=-1"),
        (lambda: AdmitAndEvictConfig(evict_step_interval=-1), "evict_step_interval=-1"),
        (lambda: AdmitAndEvictConfig(showclick_params=None), "showclick_params=None"),
        (lambda: AdmitAndEvictConfig(policy_type=1), "policy_type=1"),
        (lambda: ShowClickParams(alpha=-1.0), "alpha=-1.0"),
        (lambda: ShowClickParams(beta=float("inf")), "beta=inf"),
        (lambda: ShowClickParams(admit_threshold="1"), "admit_threshold='1'"),
        (lambda: ShowClickParams(evict_percentage=1.5), "evict_percentage=1.5"),
        (lambda: ShowClickParams(score_decay=2), "score_decay=2"),
        (lambda: EmbCacheEmbeddingConfig(**CONFIG, admit_and_evict_config=5), "admit_and_evict_config=5"),
    ],
)
def test_recsdk_fields_out_of_range_are_rejected_with_value(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_recsdks_configuration_reaches_the_table():
    config = EmbCacheEmbeddingConfig(
        **CONFIG, admit_and_evict_config=AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=0.5)
    )
    assert lifecycle_of(config) == LifecycleConfig(admission=admission.Count(2), not_admitted=0.5)
    shared = EmbCacheEmbeddingConfig(**CONFIG, admit_and_evict_config=show_click(evict_percentage=0.25))
    assert lifecycle_of(shared) == LifecycleConfig(eviction=Policy([Share(0.25)]))
    plain = EmbCacheEmbeddingConfig(
        **CONFIG, admit_and_evict_config=AdmitAndEvictConfig(), eviction=Policy([Ttl(steps=5)]), **COUNTED
    )
    assert lifecycle_of(plain) == LifecycleConfig(eviction=Policy([Ttl(steps=5)]), **COUNTED)


def test_missing_reads_are_rejected_if_every_id_gets_a_row():
    """RecSDK's own configuration has that field always, and there it means nothing."""
    given = AdmitAndEvictConfig(not_admitted_default_value=0.5)
    config = EmbCacheEmbeddingConfig(**CONFIG, admit_and_evict_config=given)
    assert lifecycle_of(config) == LifecycleConfig()
    for more in ({}, {"admit_and_evict_config": given}):
        with pytest.raises(ConfigError, match="table 'item': not_admitted=0.25 without admission has no effect"):
            EmbCacheEmbeddingConfig(**CONFIG, not_admitted=0.25, **more)
    assert lifecycle_of(EmbCacheEmbeddingConfig(**CONFIG, **COUNTED)) == LifecycleConfig(**COUNTED)


@pytest.mark.parametrize(
    "other",
    [
        {"admission": admission.Count(3)},
        {"not_admitted": 0.5},
        {"eviction": Policy([Ttl(steps=5)])},
        {"virtual_table_eviction_policy": NoEvictionPolicy()},
    ],
)
def test_two_ways_to_say_it_contradict_each_other(other):
    with pytest.raises(ConfigError, match=f"admit_and_evict_config and {next(iter(other))} contradict"):
        EmbCacheEmbeddingConfig(**CONFIG, admit_and_evict_config=AdmitAndEvictConfig(admit_threshold=2), **other)
    if "virtual_table_eviction_policy" in other:
        with pytest.raises(ConfigError, match="eviction and virtual_table_eviction_policy contradict"):
            EmbCacheEmbeddingConfig(**CONFIG, eviction=Policy([Ttl(steps=5)]), **other)
