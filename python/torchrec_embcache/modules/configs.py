"""Table configs: TorchRec's, with budgets, policy and initializer.

Limits are wider than RecSDK's, which are 1 to 10^9 rows and widths of 8, 16, ... 4096: any number of rows and any width up to
65,536 is supported.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.types import DataType

from torchrec_embcache.config import (
    DEFAULT_TOTAL_NUM_BUCKETS,
    MAX_NUM_BUCKETS,
    CachePolicy,
    OnFull,
    TierBudgets,
    check_choice,
    check_int,
    check_name,
)
from torchrec_embcache.eviction import Policy
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.initializers import Initializer, Uniform
from torchrec_embcache.table._evict_callback import check_on_evict
from torchrec_embcache.table._lifecycle import DEFAULT_SCORE_HALF_LIFE_STEPS, MAX_SCORE_HALF_LIFE_STEPS, LifecycleConfig
from torchrec_embcache.table._settings import TableOptionFields

from ._virtual_tables import translate_policy
from .recsdk import AdmitAndEvictConfig, TranslatedConfig

__all__ = [
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingConfig",
    "as_cache_configs",
    "lifecycle_of",
    "num_buckets",
    "table_initializer",
]

MAX_EMBEDDING_DIM = 65_536

# Unsupported fields of TorchRec: the only accepted value, and the reason.
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("num_embeddings_post_pruning", None, "tables are not pruned"),
    ("need_pos", False, "position-weighted features are not supported"),
    ("input_dim", None, "the special case it serves is not supported"),
    ("use_virtual_table", False, "every table here takes any 64-bit id already: leave it False"),
    ("enable_embedding_update", False, "write rows with `.tables[name].import_rows`"),
    ("stash_weights", False, "the tiers hold the weights"),
)


@dataclass(kw_only=True)
class _CacheConfigFields(TableOptionFields):
    """The fields that the configs of this package add to TorchRec's."""

    total_num_buckets: int | None = DEFAULT_TOTAL_NUM_BUCKETS
    initializer: Initializer | None = None
    tiers: TierBudgets | None = None
    admit_and_evict_config: AdmitAndEvictConfig | None = None


@dataclass
class EmbCacheEmbeddingBagConfig(_CacheConfigFields, EmbeddingBagConfig):
    """A table whose rows are pooled: TorchRec's `EmbeddingBagConfig` with more settings.

    Args:
        name: the table's name, without a dot.
        embedding_dim: the width of a row, from 1 to 65,536.
        num_embeddings: expected number of rows. It affects the sharding plan and the default initializer; ids are any 64-bit
            integers.
        feature_names: the features that look up ids in the table; by default one with the table's name.
        pooling: `PoolingType.SUM` or `PoolingType.MEAN`.
        weight_init_min: the lower bound of TorchRec's default initializer; by default -1/√num_embeddings.
        weight_init_max: the upper bound; by default 1/√num_embeddings.
        initializer: the initializer of new rows; None: `Uniform(weight_init_min, weight_init_max)`.
        tiers: the table's budgets on each rank; None: a portion of the module's, whose tables share RAM as far as possible.
        total_num_buckets: an id is in bucket `hash(id) % total_num_buckets`, where the hash is SplitMix64's finalizer, and each
            rank owns a range of buckets. From 1 to 2^20, and fixed for the table's lifetime.
        virtual_table_eviction_policy: TorchRec's form of `eviction`. Fields with an equivalent are translated, and any other field
            of the policy raises an error that names it; docs/eviction-configs.md lists them.
        admit_and_evict_config: RecSDK's form of `admission`, `not_admitted` and `eviction`; see
            `torchrec_embcache.modules.recsdk`.

    The other fields of this package are those of `TableOptions`. TorchRec's other fields (`data_type`, `init_fn`,
    `use_virtual_table`, `input_dim`, `num_embeddings_post_pruning`, `need_pos`, `enable_embedding_update`, `stash_weights`) are
    supported only at their defaults. The `init_fn` of a TorchRec config may be a `functools.partial` of `torch.nn.init.uniform_`.

    Raises:
        ConfigError: a value is out of range.
        UnsupportedError: an unsupported field of TorchRec is set.

    Examples:
        >>> from torchrec import PoolingType
        >>> from torchrec_embcache import EmbCacheEmbeddingBagConfig, TierBudgets
        >>> item = EmbCacheEmbeddingBagConfig(
        ...     name="item", embedding_dim=64, num_embeddings=1_000_000_000, feature_names=["item_id"],
        ...     pooling=PoolingType.SUM, tiers=TierBudgets(host_bytes="1GiB"),
        ... )
        >>> item.policy
        's3fifo'
    """

    def __post_init__(self) -> None:
        _check_config(self)
        if self.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ConfigError(
                f"table {self.name!r}: pooling={self.pooling!r} is not known: use PoolingType.SUM or PoolingType.MEAN"
            )


@dataclass
class EmbCacheEmbeddingConfig(_CacheConfigFields, EmbeddingConfig):
    """A table whose rows are not pooled. Its settings are those of `EmbCacheEmbeddingBagConfig` without `pooling`.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbeddingConfig, TierBudgets, admission
        >>> word = EmbCacheEmbeddingConfig(
        ...     name="word", embedding_dim=64, num_embeddings=1_000_000_000, feature_names=["query", "title"],
        ...     tiers=TierBudgets(host_bytes="1GiB"), admission=admission.Count(5),
        ... )
        >>> word.feature_names
        ['query', 'title']
    """

    def __post_init__(self) -> None:
        _check_config(self)


CacheConfig = EmbCacheEmbeddingBagConfig | EmbCacheEmbeddingConfig
#: Names that no entry of TorchRec's `nn.ModuleDict` of tables can have.
_RESERVED_NAMES = frozenset(dir(torch.nn.ModuleDict()))


def _check_config(config: CacheConfig) -> None:
    check_name("name", config.name)
    table = f"table {config.name!r}: "
    if "." in config.name:
        raise ConfigError(
            f"{table}name must not hold a dot, which separates modules in parameter names: use another character"
        )
    if config.name in _RESERVED_NAMES:
        raise ConfigError(
            f"{table}name is that of an attribute of torch.nn.ModuleDict, in which TorchRec keeps tables: use another, such as "
            f"{config.name + '_table'!r}"
        )
    check_int(f"{table}num_embeddings", config.num_embeddings, 1, (1 << 63) - 1)
    check_int(f"{table}embedding_dim", config.embedding_dim, 1, MAX_EMBEDDING_DIM)
    if config.total_num_buckets is None:
        config.total_num_buckets = DEFAULT_TOTAL_NUM_BUCKETS
    check_int(f"{table}total_num_buckets", config.total_num_buckets, 1, MAX_NUM_BUCKETS)
    if config.data_type != DataType.FP32:
        raise UnsupportedError(
            f"{table}data_type={config.data_type} is not supported yet: rows are float32, use DataType.FP32"
        )
    _check_features(table, config.feature_names)
    if config.init_fn is not None:
        raise UnsupportedError(
            f"{table}init_fn={config.init_fn!r} is not supported: rows are initialized one by one, after the module is created; "
            "give initializer= (torchrec_embcache.initializers)"
        )
    for name, only, why in _UNSUPPORTED:
        if getattr(config, name) != only:
            raise UnsupportedError(f"{table}{name}={getattr(config, name)!r} is not supported: {why}")
    if config.initializer is not None:
        if not isinstance(config.initializer, Initializer):
            raise ConfigError(f"{table}initializer={config.initializer!r}: give one of torchrec_embcache.initializers")
        if config.weight_init_min is not None or config.weight_init_max is not None:
            raise ConfigError(
                f"{table}initializer and weight_init_min/weight_init_max contradict each other: give one of them"
            )
    else:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ConfigError(
                f"{table}weight_init_min={low!r}, weight_init_max={high!r}: give finite numbers, the smaller one first"
            )
    if config.tiers is not None and not isinstance(config.tiers, TierBudgets):
        raise ConfigError(f"{table}tiers={config.tiers!r}: give a TierBudgets")
    check_choice(f"{table}policy", config.policy, CachePolicy)
    check_choice(f"{table}on_full", config.on_full, OnFull)
    check_on_evict(table, config.on_evict)
    lifecycle_of(config)


def _check_features(table: str, names: object) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) and name and "@" not in name for name in names):
        raise ConfigError(
            f"{table}feature_names={names!r}: give a list of names without '@', which marks shared features"
        )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"{table}feature_names={names!r} names {', '.join(twice)} twice: name each feature once")


def table_initializer(config: CacheConfig) -> Initializer:
    """Returns the initializer of a table."""
    return config.initializer or Uniform(config.get_weight_init_min(), config.get_weight_init_max())


def lifecycle_of(config: CacheConfig) -> LifecycleConfig:
    """Returns a table's lifecycle settings, from its own settings, TorchRec's policy or RecSDK's configuration."""
    of = f"table {config.name!r}: "
    half_life, eviction = _merge_torchrec_policy(config, of)
    recsdks = _recsdk_settings(config, of)
    given = {
        "admission": config.admission is not None,
        "not_admitted": config.not_admitted != "zeros",
        "eviction": config.eviction is not None,
        "virtual_table_eviction_policy": config.virtual_table_eviction_policy is not None,
    }
    if recsdks != TranslatedConfig() and any(given.values()):
        names = " and ".join(name for name, is_given in given.items() if is_given)
        raise ConfigError(f"{of}admit_and_evict_config and {names} contradict each other: give one way to say it")
    return LifecycleConfig(
        admission=recsdks.admission or config.admission,
        not_admitted=recsdks.not_admitted if recsdks != TranslatedConfig() else config.not_admitted,
        score_half_life_steps=half_life,
        eviction=recsdks.eviction or eviction,
        missing=config.missing,
        owner=of,
    )


def _merge_torchrec_policy(config: CacheConfig, owner: str) -> tuple[int, Policy | None]:
    """Returns the half-life of scores in steps, and the eviction policy, from a table's own settings or from TorchRec's policy."""
    given = config.virtual_table_eviction_policy
    if given is None:
        return config.score_half_life_steps, config.eviction
    if config.eviction is not None:
        raise ConfigError(f"{owner}eviction and virtual_table_eviction_policy contradict each other: give one of them")
    meant = translate_policy(given, owner)
    if meant.eviction is None or meant.scores_decay:
        return config.score_half_life_steps, meant.eviction
    if config.score_half_life_steps not in (DEFAULT_SCORE_HALF_LIFE_STEPS, MAX_SCORE_HALF_LIFE_STEPS):
        raise ConfigError(
            f"{owner}score_half_life_steps={config.score_half_life_steps!r} and virtual_table_eviction_policy "
            f"contradict each other: "
            "the counts of that policy do not decay; leave score_half_life_steps out"
        )
    return MAX_SCORE_HALF_LIFE_STEPS, meant.eviction


def _recsdk_settings(config: CacheConfig, owner: str) -> TranslatedConfig:
    """Translates RecSDK's configuration; all defaults without one."""
    given = config.admit_and_evict_config
    if not isinstance(given, AdmitAndEvictConfig | None):
        raise ConfigError(
            f"{owner}admit_and_evict_config={given!r} is not known: give "
            f"torchrec_embcache.modules.recsdk.AdmitAndEvictConfig(...)"
        )
    try:
        return TranslatedConfig() if given is None else given.translate()
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{owner}admit_and_evict_config: {error}") from None


def num_buckets(config: CacheConfig) -> int:
    """Returns the number of buckets of a table."""
    return DEFAULT_TOTAL_NUM_BUCKETS if config.total_num_buckets is None else config.total_num_buckets


def as_cache_configs(tables: object, kind: type[Any]) -> list[Any]:
    """Converts `tables` to configs of `kind`. The fields of TorchRec's own configs are copied.

    A table without feature names gets its own name as the only one. Raises `ConfigError` for a list that is empty, contains other
    objects, or has two tables with one name.
    """
    if not isinstance(tables, Sequence) or isinstance(tables, str) or not tables:
        raise ConfigError(f"tables={tables!r}: give a list of {kind.__name__}")
    configs = []
    seen: set[str] = set()
    for table in tables:
        config = table if isinstance(table, kind) else _copy_from_torchrec(table, kind)
        if config.name in seen:
            raise ConfigError(f"tables names {config.name!r} twice: give every table a name of its own")
        seen.add(config.name)
        if not config.feature_names:
            config.feature_names = [config.name]
            _check_features(f"table {config.name!r}: ", config.feature_names)
        configs.append(config)
    return configs


def _copy_from_torchrec(table: object, kind: type[Any]) -> Any:
    if not isinstance(table, BaseEmbeddingConfig) or not issubclass(kind, type(table)):
        raise ConfigError(f"tables holds {table!r}: give {kind.__name__}")
    names = {field.name for field in dataclasses.fields(kind)}
    values = {field.name: getattr(table, field.name) for field in dataclasses.fields(table) if field.name in names}
    # TorchRec sets init_fn to a `uniform_` between its bounds. With a user's bounds it is equivalent to weight_init_min/max. Any
    # other function of the user stays, and is rejected.
    made = values.get("init_fn")
    if (
        isinstance(made, functools.partial)
        and made.func is torch.nn.init.uniform_
        and not made.args
        and made.keywords.keys() <= {"a", "b"}
    ):
        values["init_fn"] = None
        values["weight_init_min"], values["weight_init_max"] = made.keywords.get("a", 0.0), made.keywords.get("b", 1.0)
    values["feature_names"] = list(table.feature_names)
    return kind(**values)
