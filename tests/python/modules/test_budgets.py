"""The budgets of a collection, shared by its tables."""

import copy
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import KeyedJaggedTensor

import dcp_cases
from collection_cases import bags
from processes import process_group
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheWarning,
    TierBudgets,
    cache_modules,
    optimizers,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import CapacityError, ConfigError
from torchrec_embcache.table import _host_memory
from torchrec_embcache.table._settings import row_bytes
from torchrec_embcache.table.cache_table import CacheTable
from torchrec_models import sharded

MIB = 1 << 20
ROW = row_bytes(8, "sgd", "s3fifo").host


def unequal(*, evicting: str = "", **rows: int) -> list[EmbCacheEmbeddingBagConfig]:
    """Tables of 8 columns with these numbers of expected rows. The one named `evicting` drops rows when it is full."""
    return [
        EmbCacheEmbeddingBagConfig(
            name=name,
            embedding_dim=8,
            num_embeddings=count,
            feature_names=[f"of_{name}"],
            on_full="evict" if name == evicting else "error",
        )
        for name, count in rows.items()
    ]


def trained(tiers: TierBudgets, *, evicting: str = "", **rows: int) -> EmbCacheEmbeddingBagCollection:
    """A module of such tables, which SGD trains."""
    module = bags(unequal(evicting=evicting, **rows), tiers=tiers)
    for table in module.tables.values():
        table.optimizer = optimizers.SGD(lr=0.5)
    return module


def step(module: Any, **ids: range) -> None:
    """Train rows of some tables. A sharded model has the tables `few` and `many`."""
    names = list(module.tables) if hasattr(module, "tables") else ["few", "many"]
    values = [list(ids.get(name, ())) for name in names]
    lengths = torch.tensor([len(some) for some in values])
    features = KeyedJaggedTensor(
        [f"of_{name}" for name in names], torch.tensor([id_ for some in values for id_ in some]), lengths=lengths
    )
    module(features).values().sum().backward()


def fill(module: Any, name: str, at_once: int = 500) -> tuple[int, CapacityError]:
    """Train new rows of a table until it is refused. Returns how many it has then, and the error."""
    for count in range(0, 10**6, at_once):
        try:
            step(module, **{name: range(count, count + at_once)})
        except CapacityError as error:
            return count, error
    raise AssertionError("the table was never full")


def free(table: CacheTable) -> int:
    """Bytes of the budget that the tables of its module share and none has taken."""
    share = table._settings.share
    assert share is not None
    return share.budget.free


def named(error: CapacityError) -> int:
    """The `host_bytes` that an error says to give."""
    return int(re.findall(r"shared by its \d+ tables\) to (\d+) or more", str(error))[0])


def test_tables_without_budgets_share_the_modules_by_rows_and_width():
    own = TierBudgets(host_bytes="1MiB")
    tables = unequal(small=100, large=300)
    tables.append(
        EmbCacheEmbeddingBagConfig(name="own", embedding_dim=8, num_embeddings=10**6, feature_names=["x"], tiers=own)
    )
    module = bags(tables, tiers=TierBudgets(host_bytes=(2 << 20) + 4_000_000, device_bytes=800_000))
    shares = {name: (table.tiers.host, table.tiers.device) for name, table in module.tables.items()}
    least = 1 << 20, 200_000  # half of an equal share is less
    of_small, of_large = (1_000_000, 100_000), (3_000_000, 300_000)
    assert shares == {
        "small": (least[0] + of_small[0], least[1] + of_small[1]),
        "large": (least[0] + of_large[0], least[1] + of_large[1]),
        "own": (1 << 20, 0),
    }


def test_a_table_of_few_expected_rows_has_room_beside_a_large_one():
    with bags(unequal(tiny=3, huge=100_000_000), tiers=TierBudgets(host_bytes="200MiB")) as module:
        tiny = module.tables["tiny"]
        tiny.import_rows(range(8000), np.ones((8000, 8), np.float32))
        assert len(tiny) == 8000
        together = sum(table.tiers.host for table in module.tables.values())
        assert (200 << 20) - 2 <= together <= 200 << 20


def test_wider_rows_get_a_share_with_what_is_kept_of_each_row():
    tables = unequal(narrow=50_000)
    tables += [EmbCacheEmbeddingBagConfig(name="wide", embedding_dim=256, num_embeddings=50_000, feature_names=["w"])]
    with bags(tables, tiers=TierBudgets(host_bytes="66MiB")) as module:
        for table, dim in ((module.tables["narrow"], 8), (module.tables["wide"], 256)):
            table.import_rows(range(50_000), np.ones((50_000, dim), np.float32))
            assert len(table) == 50_000


@pytest.mark.parametrize("field", ["host_bytes", "device_bytes"])
def test_budget_too_small_for_one_row_per_table_is_reported(field):
    tables = unequal(a=10, b=1000, c=1)
    with pytest.raises(
        ConfigError, match=rf"TierBudgets.{field}=333 of the module is too small for its 3 tables"
    ) as told:
        bags(tables, tiers=TierBudgets(**{"host_bytes": "1MiB", field: 333}))
    needed = int(re.findall(r"give (\d+) or more", str(told.value))[0])
    bags(tables, tiers=TierBudgets(**{"host_bytes": "1MiB", field: needed}))


def test_files_are_below_the_modules_name(tmp_path):
    tmp_path.chmod(0o700)
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="16MiB", ssd_dir=tmp_path)
    with bags(tiers=tiers, name="shop") as module:
        assert not list(tmp_path.iterdir()), "opened at first use"
        assert len(module.tables["t1"]) == 0
        assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*/*")] == ["shop/t1/0-of-1"]


# ---- tables without an SSD tier that share RAM


@pytest.mark.parametrize("device_bytes", [0, "4MiB"])
def test_table_guessed_too_small_takes_unused_budget(device_bytes):
    with trained(TierBudgets(host_bytes="4MiB", device_bytes=device_bytes), few=10, many=10**9) as module:
        few, many = module.tables["few"], module.tables["many"]
        step(module, many=range(2000))
        before = many.export().to_numpy()
        count, error = fill(module, "few")
        room = 3 * MIB // ROW
        assert room - 500 < count <= room, "all but the least that the other table has"
        assert f"TierBudgets(host_bytes={4 * MIB}), shared by its 2 tables" in str(error)
        assert f"holds {room} rows, {count} are there and 500 new ones are to be added" in str(error)
        assert named(error) == 4 * MIB + (count + 500) * ROW - 3 * MIB
        assert len(few) == count
        after = many.export().to_numpy()
        assert all(np.array_equal(after[name], before[name]) for name in before)
        step(module, few=range(count), many=range(2000))
        # The other table has what is its own.
        step(module, many=range(2000, MIB // ROW))
        with pytest.raises(CapacityError):
            step(module, many=range(20_000, 20_000 + room - count + 2))


@pytest.mark.parametrize("host_bytes", ["4MiB", "256KiB"])
@pytest.mark.parametrize("evicting", ["", "third"])
def test_the_budget_that_an_error_names_is_enough(host_bytes, evicting):
    tables = {"few": 10, "many": 1000, "third": 2000}
    with trained(TierBudgets(host_bytes=host_bytes), evicting=evicting, **tables) as module:
        step(module, many=range(300))
        count, error = fill(module, "few")
    with trained(TierBudgets(host_bytes=named(error)), evicting=evicting, **tables) as module:
        step(module, many=range(300))
        assert fill(module, "few")[0] >= count + 500
    with trained(TierBudgets(host_bytes=host_bytes), evicting=evicting, **tables) as module:
        step(module, many=range(300))
        assert fill(module, "few")[0] == count


def test_tables_that_drop_rows_keep_their_part_whatever_others_do():
    tiers = TierBudgets(host_bytes="4MiB")
    with trained(tiers, evicting="many", few=10, more=10, many=10**9) as module:
        many = module.tables["many"]
        part = many.tiers.host
        assert part > MIB * 2 - 1000
        fill(module, "few")
        for first in range(0, part // ROW + 1000, 1000):
            step(module, many=range(first, first + 1000))
        assert len(many) == part // ROW
    with trained(tiers, evicting="few", few=10, many=10**9) as module:
        part = module.tables["many"].tiers.host
        count, error = fill(module, "many")
        assert part // ROW - 500 < count <= part // ROW, "a table that shares with itself has its part"
    with trained(TierBudgets(host_bytes=named(error)), evicting="few", few=10, many=10**9) as module:
        assert fill(module, "many")[0] >= count + 500


def test_what_is_said_of_the_budgets_adds_up_to_the_modules():
    with trained(TierBudgets(host_bytes="4MiB"), few=10, many=10**5) as module:
        step(module, few=range(15_000), many=range(10))
        tables = module.tables.values()
        assert sum(table.tiers.host for table in tables) <= 4 * MIB
        capacities = [table.stats().host.capacity_bytes for table in tables]
        assert 4 * MIB - 2 <= sum(capacities) <= 4 * MIB
        assert capacities[0] > 15_000 * ROW, "what it has taken"
        assert "of 4 MiB that 2 tables share" in repr(module)
        known = list(tables)
        assert sum(table.tiers.host for table in known if table in _host_memory._tables) <= 4 * MIB


def test_an_evaluation_past_the_budget_names_that_of_the_module():
    with trained(TierBudgets(host_bytes="2MiB"), few=10, many=10**5) as module:
        module.eval()
        with torch.no_grad():
            step_of = KeyedJaggedTensor(
                ["of_few", "of_many"], torch.arange(12_000), lengths=torch.tensor([10_000, 2000])
            )
            module(step_of)
            assert free(module.tables["few"]) == MIB, "it takes none of the shared bytes"
            more = KeyedJaggedTensor(["of_few", "of_many"], torch.arange(30_000), lengths=torch.tensor([30_000, 0]))
            with pytest.warns(EmbCacheWarning, match=r"TierBudgets.host_bytes of the module, which 2 tables share,"):
                module(more)


def test_closed_tables_give_back_what_they_took():
    module = trained(TierBudgets(host_bytes="4MiB"), few=10, many=10**5)
    step(module, few=range(20_000))
    with pytest.raises(CapacityError):
        step(module, many=range(25_000))
    few = module.tables["few"]
    few.close()
    many = module.tables["many"]
    assert free(few) == 3 * MIB - MIB
    many.import_rows(torch.arange(25_000), torch.ones(25_000, 8))
    module.close()


def test_tables_that_grow_at_once_never_exceed_the_budget():
    with trained(TierBudgets(host_bytes="4MiB"), a=10, b=10, c=10) as module:
        counts: dict[str, int] = {}

        def work(name: str) -> None:
            table = module.tables[name]
            for count in range(0, 10**6, 100):
                try:
                    table.import_rows(torch.arange(count, count + 100), torch.ones(100, 8))
                except CapacityError:
                    counts[name] = count
                    return

        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 4 * MIB // ROW - 3 * 101 <= sum(counts.values()) <= 4 * MIB // ROW
        assert all(len(module.tables[name]) == count for name, count in counts.items())


def test_a_copy_of_a_module_shares_a_budget_of_its_own():
    with trained(TierBudgets(host_bytes="4MiB"), few=10, many=10**5) as module:
        step(module, few=range(15_000))
        left = free(module.tables["few"])
        with copy.deepcopy(module) as made:
            assert free(made.tables["few"]) == left
            assert fill(made, "few")[0] == fill(module, "few")[0]
            assert free(made.tables["many"]) == free(made.tables["few"])
            with pytest.raises(CapacityError):
                step(made, many=range(2 * MIB // ROW))
        with copy.deepcopy(module.tables["few"]) as alone:
            assert len(alone) == len(module.tables["few"])


def test_an_optimizer_with_slots_takes_room_for_them():
    with bags(unequal(few=10, many=10**5), tiers=TierBudgets(host_bytes="4MiB")) as module:
        module.tables["few"].import_rows(range(15_000), np.ones((15_000, 8), np.float32))
        tables: Any = module.tables
        tables.set_optimizer("few", optimizers.Adam(lr=0.1))
        taken = 15_000 * row_bytes(8, "adam", "s3fifo").host - MIB
        assert free(module.tables["few"]) == 2 * MIB - taken
        tables.set_optimizer("many", optimizers.SGD(lr=0.1))
        step(module, few=range(15_000))


def save(by: str, model: nn.Module, path: Path) -> None:
    if by == "dcp":
        dcp_cases.save(model.state_dict(), path, model, no_dist=True)
    else:
        Saver(0).save(model, path)


def load(by: str, model: nn.Module, path: Path) -> None:
    if by == "dcp":
        dcp_cases.load(model.state_dict(), path, model, no_dist=True)
    else:
        Saver(0).load(model, path)


@pytest.mark.parametrize("by", ["saver", "dcp"])
@pytest.mark.parametrize(("saved_in", "there_in"), [("a", "b"), ("b", "a"), ("a", "a")])
def test_a_checkpoint_is_loaded_whichever_table_had_taken_the_room(
    tmp_path: Path, saved_in: str, there_in: str, by: str
):
    with trained(TierBudgets(host_bytes="4MiB"), a=10, b=10) as saved:
        step(saved, **{saved_in: range(25_000)})
        save(by, nn.ModuleDict({"bags": saved}), tmp_path)
        with trained(TierBudgets(host_bytes="4MiB"), a=10, b=10) as other:
            step(other, **{there_in: range(10_000, 35_000)})
            load(by, nn.ModuleDict({"bags": other}), tmp_path)
            for name, table in other.tables.items():
                assert len(table) == (25_000 if name == saved_in else 0)
            assert free(other.tables["b"]) == 2 * MIB - (25_000 * ROW - MIB)
            for name in "ab":
                step(other, **{name: range(MIB // ROW)})
            assert fill(other, saved_in)[0] == fill(saved, saved_in)[0]


def test_a_batch_that_is_refused_takes_no_room_for_its_other_tables():
    with trained(TierBudgets(host_bytes="4MiB"), few=10, many=10**5) as module:
        step(module, few=range(10_000), many=range(10_000))
        before, rows = free(module.tables["few"]), {name: len(table) for name, table in module.tables.items()}
        with pytest.raises(CapacityError):
            step(module, few=range(20_000, 25_000), many=range(20_000, 40_000))
        with pytest.raises(CapacityError):
            step(module, few=range(20_000, 40_000), many=range(20_000, 25_000))
        assert free(module.tables["few"]) == before
        assert {name: len(table) for name, table in module.tables.items()} == rows
        module.tables["few"].remove_rows(range(10_000))
        step(module, many=range(10_000, 20_000))


# ---- sharding


def _sharded_by(kind: str) -> tuple[Any, Any]:
    """A sharded model with 15,000 rows in the table `few`, and its sharded module."""
    module = trained(TierBudgets(host_bytes="4MiB"), few=10, many=10**5)
    module.tables["few"].import_rows(range(15_000), np.ones((15_000, 8), np.float32))
    model = sharded(module, dict.fromkeys(("few", "many"), kind), {"optimizer": EmbOptimType.SGD, "learning_rate": 0.5})
    return model, cache_modules(model).popitem()[1]


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_a_table_that_is_sharded_counts_once(tmp_path: Path, kind: str):
    with process_group(0, 1, str(tmp_path / "store")):
        model, module = _sharded_by(kind)
        few, many = module.tables["few"], module.tables["many"]
        assert len(few) == 15_000
        assert free(few) == free(many) == 2 * MIB - (15_000 * ROW - MIB)
        count, _ = fill(model, "few")
        assert 3 * MIB // ROW - 500 < count <= 3 * MIB // ROW
        for table in (few, many):
            table.close()
        assert free(few) == 2 * MIB


def _of_two_ranks(_rank: int, _world: int, kind: str) -> tuple[int, int]:
    model, module = _sharded_by(kind)
    there = sum(len(table) for table in module.tables.values())
    try:
        for count in range(15_000, 80_000, 500):
            step(model, few=range(count, count + 500))
    except CapacityError:
        return there, sum(len(table) for table in module.tables.values())
    raise AssertionError("the table was never full")


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_two_ranks_share_each_a_budget_of_their_own(two_ranks: Any, kind: str):
    results = two_ranks.run(_of_two_ranks, kind)
    there, full = (sum(counts) for counts in zip(*results, strict=True))
    assert there == 15_000
    room = 2 * 3 * MIB // ROW if kind == "row_wise" else 4 * MIB // ROW
    assert 0.93 * room < full <= room
