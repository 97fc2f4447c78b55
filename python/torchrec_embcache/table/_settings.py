"""The options of a table, and its validated settings."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict, TypeVar

import torch

from torchrec_embcache import _native
from torchrec_embcache.admission import Admission, NotAdmitted
from torchrec_embcache.config import (
    MAX_NUM_BUCKETS,
    CachePolicy,
    MissingRead,
    OnFull,
    TierBudgets,
    bucket_range,
    check_choice,
    check_int,
    check_name,
)
from torchrec_embcache.eviction import Policy as EvictionPolicy
from torchrec_embcache.exceptions import ConfigError
from torchrec_embcache.initializers import Initializer
from torchrec_embcache.optimizers import BY_KIND, OptimizerKind, OptimizerSpec

from ._evict_callback import OnEvict, check_on_evict
from ._lifecycle import DEFAULT_SCORE_HALF_LIFE_STEPS, LifecycleConfig

__all__ = [
    "ModuleShare",
    "RowBytes",
    "SharedBudget",
    "TableOptionFields",
    "TableOptions",
    "TableSettings",
    "check_device_memory",
    "check_optimizer",
    "device_rows",
    "list_options",
    "row_bytes",
]

RowBytes = _native.RowBytes
SharedBudget = _native.SharedBudget
F = TypeVar("F", bound=Callable[..., object])


class TableOptions(TypedDict, total=False):
    """The options of a table: keyword arguments of modules and tables, and fields of TorchRec's configs.

    Args:
        policy: the replacement policy of a full tier: "s3fifo" (the default), "lru" or "lfu".
        on_full: behavior when the last tier is full: "error" (the default) raises `CapacityError` and loses no rows, "evict" drops
            rows.
        missing: value that evaluation reads for an id without a row: its "initial" value or "zeros". None: the same as in training,
            which is the initial value if every id is admitted, and else `not_admitted`.
        admission: the admission rule; one of `torchrec_embcache.admission`. None: every id is admitted.
        not_admitted: value that training reads for an id that is not admitted: "zeros" (the default), its "initial" value, a number
            for every column, or "oov": one row of the table (the OOV row), which the gradients of all such ids train. The id counts
            in the length of a mean. Unless the value is "oov", its gradient is discarded. Requires `admission`.
        score_half_life_steps: half-life in steps of a row's score, which is the decayed sum of its occurrences; 1,024 by default.
        eviction: the rules that expire rows, and when they run; a `torchrec_embcache.eviction.Policy`. None: no rows expire.
        on_evict: receiver of evicted rows: a callable, which a thread calls with `EvictedRows`; "keep", to queue them for
            `drain_evicted()`; or None.

    Examples:
        >>> from torchrec_embcache import EmbCacheEmbedding, TableOptions, TierBudgets, admission, optimizers
        >>> options: TableOptions = {"policy": "lru", "admission": admission.Count(3)}  # the same for several tables
        >>> tiers, sgd = TierBudgets(host_bytes="1MiB"), optimizers.SGD(lr=0.5)
        >>> item = EmbCacheEmbedding(name="item", embedding_dim=2, tiers=tiers, optimizer=sgd, **options)
        >>> item.table.policy
        'lru'
    """

    policy: CachePolicy
    on_full: OnFull
    missing: MissingRead | None
    admission: Admission | None
    not_admitted: NotAdmitted
    score_half_life_steps: int
    eviction: EvictionPolicy | None
    on_evict: OnEvict | None


@dataclass(kw_only=True)
class TableOptionFields:
    """The values of `TableOptions`, with the defaults."""

    policy: CachePolicy = "s3fifo"
    on_full: OnFull = "error"
    missing: MissingRead | None = None
    admission: Admission | None = None
    not_admitted: NotAdmitted = "zeros"
    score_half_life_steps: int = DEFAULT_SCORE_HALF_LIFE_STEPS
    eviction: EvictionPolicy | None = None
    on_evict: OnEvict | None = None


def list_options(taken_by: Callable[..., object]) -> Callable[[F], F]:
    """Decorates a function with `**options` that go to `taken_by`: its signature lists their names and defaults, as for `help`."""

    def listed(function: F) -> F:
        own = inspect.signature(function)
        parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = inspect.signature(taken_by).parameters.values()
        parameters += [each for each in options if each.default is not each.empty and each.name not in own.parameters]
        function.__dict__["__signature__"] = own.replace(parameters=parameters)
        return function

    return listed


@dataclass(frozen=True, kw_only=True)
class ModuleShare:
    """A table's portion of its module's `host_bytes`: `own_bytes`, and the shared budget."""

    own_bytes: int
    budget: SharedBudget


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """The settings of one shard of a table. `buckets`, [begin, end), are those that the shard owns; None: those of its rank.

    `is_sharded`: true if the table is sharded over ranks, even if a loaded checkpoint has fewer buckets than there are ranks, so
    that some own none, or one owns all; None: found from the buckets. `lifecycle`: that of the `options`. A table with a `share`
    may use that much RAM; `tiers` then has its portion of the module's budgets by expected rows.
    """

    options: TableOptionFields
    name: str
    module: str
    dim: int
    tiers: TierBudgets
    initializer: Initializer
    seed: int
    total_num_buckets: int
    buckets: tuple[int, int] | None
    rank: int
    world_size: int
    device: torch.device
    key: int | None
    is_sharded: bool | None = None
    share: ModuleShare | None = None
    lifecycle: LifecycleConfig = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Validates the settings of `CacheTable`. Raises `ConfigError` for a value that is out of range or of another type."""
        given = self.options
        lifecycle = LifecycleConfig(
            admission=given.admission,
            not_admitted=given.not_admitted,
            score_half_life_steps=given.score_half_life_steps,
            eviction=given.eviction,
            missing=given.missing,
        )
        check_name("name", self.name)
        check_name("module", self.module)
        checked: dict[str, Any] = {"lifecycle": lifecycle, "device": _checked_device(self.device)}
        checked["dim"] = check_int("embedding_dim", self.dim, 1, 65_536)
        checked["seed"] = check_int("seed", self.seed, 0, (1 << 64) - 1)
        checked["world_size"] = ranks = check_int("world_size", self.world_size, 1, 1 << 20)
        checked["rank"] = rank = check_int("rank", self.rank, 0, ranks - 1)
        checked["total_num_buckets"] = total = check_int(
            "total_num_buckets", self.total_num_buckets, 1, MAX_NUM_BUCKETS
        )
        begin, end = self.buckets if self.buckets is not None else bucket_range(rank, ranks, total)
        if not 0 <= begin <= end <= total:
            raise ConfigError(f"buckets={self.buckets!r} is not a range of the {total} buckets: give (begin, end)")
        if self.is_sharded is None:
            checked["is_sharded"] = ranks > 1 and (self.buckets is None or (begin, end) != (0, total))
        if not isinstance(self.tiers, TierBudgets):
            raise ConfigError(f"tiers={self.tiers!r} is not TierBudgets: give TierBudgets(host_bytes=...)")
        if not isinstance(self.initializer, Initializer):
            raise ConfigError(
                f"initializer={self.initializer!r} is not known: use one of torchrec_embcache.initializers"
            )
        check_choice("policy", given.policy, CachePolicy)
        check_choice("on_full", given.on_full, OnFull)
        check_on_evict("", given.on_evict)
        for name, value in {**checked, "buckets": (begin, end)}.items():
            object.__setattr__(self, name, value)

    @property
    def is_admission_at_placement(self) -> bool:
        """True if the rows of a batch are decided when it gets its slots, so that results depend on when batches are placed."""
        return (
            self.lifecycle.admission is not None
            or self.lifecycle.eviction is not None
            or self.options.on_full == "evict"
        )

    def host_budget(self) -> dict[str, Any]:
        """Returns the RAM budget in native form."""
        if self.share is None:
            return {"host_bytes": self.tiers.host}
        return {"host_bytes": self.share.own_bytes, "shared_budget": self.share.budget}

    def with_device_index(self) -> Self:
        """Returns the settings with a device index, if `device` is only "cuda". Raises `ConfigError` if the device is unusable."""
        try:
            return replace(self, device=torch.empty(0, dtype=torch.float32, device=self.device).device)
        except (RuntimeError, AssertionError) as cause:
            raise ConfigError(f"device={str(self.device)!r} cannot be used: {cause}") from cause


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise ConfigError(f"device={device!r} is not a device: give one such as 'cpu' or 'cuda:0'") from cause


def row_bytes(dim: int, kind: OptimizerKind, policy: CachePolicy) -> _native.RowBytes:
    """Returns the bytes per row of each budget: `host`, `device`, `ssd`, and `index`, the bytes of RAM for a row on SSD."""
    return _native.row_bytes(dim, kind, policy)


def device_rows(settings: TableSettings, spec: OptimizerSpec) -> int | None:
    """Returns the number of rows in the device tier; None without one. Raises `ConfigError` if a budget is too small for a row."""
    tiers = settings.tiers
    bytes_of_row = row_bytes(settings.dim, spec.kind, settings.options.policy)
    for field, budget, row in (
        ("host_bytes", tiers.host, bytes_of_row.host),
        ("device_bytes", tiers.device, bytes_of_row.device),
        ("ssd_bytes", tiers.ssd, spec.record_floats(settings.dim) * 4),
    ):
        if budget < row and (budget or field == "host_bytes"):
            raise ConfigError(
                f"TierBudgets.{field}={budget} is too small for one row of table {settings.name!r}: {row} bytes at least"
            )
    if settings.device.type != "cpu" and not tiers.device:
        raise ConfigError(
            f"TierBudgets.device_bytes=0 on {settings.device}: give the device tier of table {settings.name!r} a budget"
        )
    return min(tiers.device // bytes_of_row.device, (1 << 31) - 1) if tiers.device else None


def check_device_memory(settings: TableSettings, spec: OptimizerSpec, rows: int) -> None:
    """Raises `ConfigError` if `rows` rows of a device tier exceed the total memory of the device.

    The OS may overcommit such memory, and kill the process when it is used.
    """
    device = settings.device
    if device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[1])
    elif device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    wanted = rows * spec.record_floats(settings.dim) * 4
    if wanted > memory:
        raise ConfigError(
            f"TierBudgets.device_bytes={settings.tiers.device} of table {settings.name!r} takes {wanted} bytes on {device}, "
            f"which has {memory}: give less"
        )


def check_optimizer(optimizer: object) -> OptimizerSpec | None:
    """Returns `optimizer` if it is one, or None. Raises `ConfigError` for any other value."""
    if isinstance(optimizer, OptimizerSpec | None):
        return optimizer
    given = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, type | str):
        given = repr(optimizer)
    named = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
    ours = {kind.__name__.lower(): kind.__name__ for kind in BY_KIND.values()}
    call = ours.get(named.replace("_", "").lower(), "RowWiseAdagrad")
    raise ConfigError(
        f"optimizer={given} is not one of torchrec_embcache.optimizers: write, for example, optimizer=optimizers.{call}(lr=0.02)"
    )
