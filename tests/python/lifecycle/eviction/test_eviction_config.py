"""Settings of eviction: rejected values, and how the settings reach the core from every kind of module."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_embcache import (
    CacheTable,
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    TierBudgets,
    eviction,
    initializers,
    optimizers,
)
from torchrec_embcache.eviction import All, Keep, L2Norm, Policy, Score, Share, Ttl
from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.table._lifecycle import LifecycleConfig

TIERS = TierBudgets(host_bytes="1MiB")
POLICY = Policy([Ttl(steps=9), L2Norm(below=0.5)], every_steps=4)
CONFIG = {"name": "item", "embedding_dim": 4, "num_embeddings": 9, "feature_names": ["f"]}

# ---- the rules


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Ttl(), "exactly one"),
        (lambda: Ttl(steps=1, seconds=1), "exactly one"),
        (lambda: Ttl(steps=0), "Ttl.steps=0"),
        (lambda: Ttl(steps=-1), "Ttl.steps=-1"),
        (lambda: Ttl(steps=1.5), "Ttl.steps=1.5"),
        (lambda: Ttl(steps=True), "Ttl.steps=True"),
        (lambda: Ttl(steps=(1 << 53) + 1), "Ttl.steps="),
        (lambda: Ttl(seconds=0), "Ttl.seconds=0"),
        (lambda: Ttl(seconds=-2.5), "Ttl.seconds=-2.5"),
        (lambda: Ttl(seconds=float("nan")), "Ttl.seconds=nan"),
        (lambda: Ttl(seconds=float("inf")), "Ttl.seconds=inf"),
        (lambda: Ttl(seconds="1d"), "Ttl.seconds='1d'"),
        (lambda: Score(below=0), "Score.below=0"),
        (lambda: Score(below=-0.5), "Score.below=-0.5"),
        (lambda: Score(below=float("nan")), "Score.below=nan"),
        (lambda: Score(below=1e39), "Score.below=1e[+]39"),
        (lambda: Score(below=None), "Score.below=None"),
        (lambda: Score(below=True), "Score.below=True"),
        (lambda: L2Norm(below=0.0), "L2Norm.below=0.0"),
        (lambda: L2Norm(below=float("inf")), "L2Norm.below=inf"),
        (lambda: L2Norm(below="1"), "L2Norm.below='1'"),
        (lambda: Keep(rows=0), "Keep.rows=0"),
        (lambda: Keep(rows=1.0), "Keep.rows=1.0"),
        (lambda: Share(0), "Share.fraction=0"),
        (lambda: Share(1), "every row"),
        (lambda: Share(1.1), "Share.fraction=1.1"),
        (lambda: Share(float("nan")), "Share.fraction=nan"),
        # Too great for a float, and too small for a float32.
        (lambda: Ttl(seconds=10**400), "Ttl.seconds=1000.*out of range"),
        (lambda: Score(below=10**400), "Score.below=1000.*out of range"),
        (lambda: L2Norm(below=-(10**400)), "L2Norm.below=-1000.*out of range"),
        (lambda: Share(10**400), "Share.fraction=1000.*out of range"),
        (lambda: Score(below=1e-50), "Score.below=1e-50 is 0 as a float32"),
        (lambda: L2Norm(below=1e-50), "L2Norm.below=1e-50 is 0 as a float32"),
        (lambda: Ttl(seconds=np.array([60])), "give an int or a float"),
        (lambda: Ttl(seconds=np.bool_(True)), "give an int or a float"),
    ],
)
def test_a_rule_out_of_range_is_refused_naming_field_and_value(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


@pytest.mark.parametrize("number", [np.int64, np.float32, np.float64])
def test_numbers_of_numpy_are_taken_as_pythons(number):
    policy = Policy([Ttl(seconds=number(9)), All([Score(number(2)), L2Norm(number(1)), Ttl(steps=np.int64(2))])])
    assert policy == Policy([Ttl(seconds=9), All([Score(2), L2Norm(1), Ttl(steps=2)])])
    table = EmbCacheEmbedding(
        name="item", embedding_dim=4, tiers=TIERS, optimizer=optimizers.SGD(lr=0.1), eviction=policy
    )
    table.set_time(number(5))
    table(torch.tensor([1, 2])).sum().backward()
    table.set_time(number(13))
    table.evict()
    assert len(table) == 2
    table.set_time(number(14))
    table.evict()
    assert len(table) == 0
    share = EmbCacheEmbedding(
        name="item",
        embedding_dim=4,
        tiers=TIERS,
        optimizer=optimizers.SGD(lr=0.1),
        eviction=Policy([Share(np.float32(0.5))]),
    )
    share(torch.tensor([1, 2, 3, 4])).sum().backward()
    share.evict()
    assert len(share) == 2


@pytest.mark.parametrize("kind", [Policy, All])
@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ([], r"rules=\[\]"),
        (None, "rules=None"),
        ("Ttl", "rules='Ttl'"),
        (Ttl(steps=1), "give a list"),
        ([Ttl(steps=1), 5], "holds 5"),
        ([Ttl], "give rules"),
        ([Policy([Ttl(steps=1)])], "holds a Policy"),
        ([Ttl(steps=1), Ttl(steps=2)], "contradict"),
        ([Ttl(seconds=1), L2Norm(1), Ttl(seconds=2)], "contradict"),
        ([Score(1), Score(1)], "contradict"),
        ([L2Norm(1), Score(3), L2Norm(2)], "contradict"),
        ([Keep(5), Keep(6)], "contradict"),
        ([Keep(5), Share(0.5)], "contradict"),
    ],
)
def test_a_list_of_rules_that_is_none_or_contradicts_itself_is_refused(kind, rules, what):
    with pytest.raises(ConfigError, match=what) as caught:
        kind(rules)
    assert str(caught.value).startswith(f"{kind.__name__}.rules")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: All([Ttl(steps=1)]), "one rule"),
        (lambda: All([All([Ttl(steps=1), Score(1)]), L2Norm(1)]), "All holds an All"),
        (lambda: Policy([Ttl(steps=1)], every_steps=0), "every_steps=0"),
        (lambda: Policy([Ttl(steps=1)], every_steps=2.0), "every_steps=2.0"),
        (lambda: Policy([Ttl(steps=1)], at_least_rows=-1), "at_least_rows=-1"),
        (lambda: Policy([Ttl(steps=1)], at_least_rows=None), "at_least_rows=None"),
        (lambda: Policy([Keep(5)], at_least_rows=6), "contradict"),
    ],
)
def test_a_policy_out_of_range_is_refused(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


def test_rules_that_measure_different_things_stand_side_by_side():
    both = All([Ttl(steps=5), Score(1)])
    policy = Policy(
        [Ttl(steps=9), Ttl(seconds=60), Score(2), L2Norm(0.1), both, All([Ttl(steps=3), L2Norm(1)]), Keep(9)]
    )
    assert len(policy.rules) == 7
    assert policy.at_saves
    assert not Policy([both], every_steps=1).at_saves
    assert Policy([Keep(5)], at_least_rows=5).at_least_rows == 5


def test_rules_are_frozen_and_equal_by_value():
    given = [Ttl(steps=5), Score(1)]
    policy = Policy(given)
    given.clear()
    assert policy == Policy((Ttl(steps=5), Score(1)))
    assert hash(policy) == hash(Policy([Ttl(steps=5), Score(1)]))
    assert copy.deepcopy(policy) == policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.every_steps = 3


# ---- how they reach the core


@dataclass(frozen=True)
class FakeRule:
    """A rule as text, in place of the native `SweepRule`."""

    text: str

    @classmethod
    def last_step(cls, steps: int) -> "FakeRule":
        return cls(f"last_step({steps})")

    @classmethod
    def score(cls, below: float) -> "FakeRule":
        return cls(f"score({below})")

    @classmethod
    def l2_norm(cls, below: float) -> "FakeRule":
        return cls(f"l2_norm({below})")

    @classmethod
    def any(cls, rules: list["FakeRule"]) -> "FakeRule":
        return cls(f"any({', '.join(rule.text for rule in rules)})")

    @classmethod
    def all(cls, rules: list["FakeRule"]) -> "FakeRule":
        return cls(f"all({', '.join(rule.text for rule in rules)})")


def test_the_core_is_given_the_rules_as_they_stand(monkeypatch):
    monkeypatch.setattr(eviction._native, "SweepRule", FakeRule, raising=False)
    policy = Policy([Ttl(steps=5), All([Score(2), L2Norm(0.5)])])
    assert policy.native().text == "any(last_step(5), all(score(2.0), l2_norm(0.5)))"
    life = LifecycleConfig(eviction=policy)
    assert life.is_swept_at_saves
    assert life.native()["evict_every_steps"] is None
    life = LifecycleConfig(eviction=POLICY)
    assert not life.is_swept_at_saves
    assert life.native()["evict_every_steps"] == 4
    assert life.native()["eviction"].text == "any(last_step(9), l2_norm(0.5))"
    assert not {"eviction", "evict_every_steps"} & LifecycleConfig().native().keys()
    assert not LifecycleConfig().is_swept_at_saves


def embedding(**settings: Any) -> EmbCacheEmbedding:
    return EmbCacheEmbedding(
        **{"name": "item", "embedding_dim": 4, "tiers": TIERS, "optimizer": optimizers.SGD(lr=0.1), **settings}
    )


def table(**settings: Any) -> CacheTable:
    defaults = {"name": "item", "dim": 4, "tiers": TIERS, "initializer": initializers.Constant(0), "optimizer": None}
    return CacheTable(**{**defaults, **settings})


@pytest.mark.parametrize("given", ["Ttl", Ttl(steps=5), [Ttl(steps=5)], Policy, 5, {}])
@pytest.mark.parametrize(
    "make",
    [
        embedding,
        table,
        lambda **given: EmbCacheEmbeddingBagConfig(**CONFIG, **given),
        lambda **given: EmbCacheEmbeddingConfig(**CONFIG, **given),
    ],
    ids=["module", "table", "bag config", "config"],
)
def test_something_else_than_a_policy_is_refused(make, given):
    with pytest.raises(ConfigError, match="eviction=.* is not known: use torchrec_embcache.eviction.Policy"):
        make(eviction=given)


def test_a_table_says_its_policy_and_a_copy_has_it():
    made = table(eviction=POLICY)
    assert made.eviction == copy.deepcopy(made).eviction == POLICY
    assert f"eviction={POLICY!r}" in repr(made)
    assert "eviction" not in repr(table())
    assert table().eviction is None


def test_every_kind_of_module_hands_the_policy_to_its_tables(monkeypatch):
    # The tables are not opened: what they would give to the core is looked at.
    monkeypatch.setattr(CacheTable, "open", lambda _table: None)
    bag = EmbCacheEmbeddingBag(
        name="item", embedding_dim=4, tiers=TIERS, optimizer=optimizers.SGD(lr=0.1), eviction=POLICY
    )
    modules = [
        embedding(eviction=POLICY),
        bag,
        EmbCacheEmbeddingBagCollection([EmbCacheEmbeddingBagConfig(**CONFIG, eviction=POLICY)], tiers=TIERS),
        EmbCacheEmbeddingCollection([EmbCacheEmbeddingConfig(**CONFIG, eviction=POLICY)], tiers=TIERS),
    ]
    for module in modules:
        (made,) = module.tables.values()
        assert made.eviction == POLICY
        assert made._settings.lifecycle == LifecycleConfig(eviction=POLICY)
        assert repr(POLICY) in repr(module)
    for kind in (EmbCacheEmbedding, EmbCacheEmbeddingBag):
        monkeypatch.setattr(kind, "import_rows", lambda *_given: None)
        pretrained = kind.from_pretrained([1], torch.zeros(1, 4), name="item", tiers=TIERS, eviction=POLICY)
        assert pretrained.table.eviction == POLICY


def test_tables_of_a_collection_have_policies_of_their_own():
    other = Policy([Score(below=2.0)])
    configs = [
        EmbCacheEmbeddingBagConfig(**CONFIG, eviction=POLICY),
        EmbCacheEmbeddingBagConfig(**{**CONFIG, "name": "user"}, eviction=other),
        EmbCacheEmbeddingBagConfig(**{**CONFIG, "name": "shop"}),
    ]
    made = EmbCacheEmbeddingBagCollection(configs, tiers=TIERS).tables
    assert [table.eviction for table in made.values()] == [POLICY, other, None]
