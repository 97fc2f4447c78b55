"""Budgets: their split, the stored traffic, and the input of TorchRec's planner."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from torchrec_embcache import (
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    MissRatioCurve,
    TierBudgets,
    initializers,
    optimizers,
)
from torchrec_embcache.cli import main
from torchrec_embcache.distributed import offload_stats, planner_constraints
from torchrec_embcache.exceptions import ConfigError, CorruptionError, InputError, StateError
from torchrec_embcache.sizing import BudgetAdvice, TableTraffic, advise, read_traffic, traffic_of, write_traffic
from torchrec_embcache.sizing._split import BudgetRequest, divide_budget


def curve(rows: list[int], ratios: list[float], births: float = 0.0) -> MissRatioCurve:
    return MissRatioCurve(
        policy="lru",
        rows=np.array(rows),
        miss_ratios=np.array(ratios),
        first_use_ratio=births,
        new_row_ratio=births,
        lookups=1000,
        batches=10,
        largest_batch=100,
        distinct_ids=rows[-1],
        sampling_rate=1.0,
    )


ITEM = TableTraffic.assumed("m/item", rows=2_000_000, dim=64, ids_per_batch=32_768, exponent=1.05)
USER = TableTraffic.assumed("m/user", rows=4_000_000, dim=32, ids_per_batch=4_096, exponent=0.8)
PAGE = TableTraffic.assumed("m/page", rows=100_000, dim=64, ids_per_batch=8_192, exponent=0.0, optimizer="adam")
TABLES = [ITEM, USER, PAGE]


# ---- curves


def test_a_curve_gives_the_ratio_of_any_size():
    made = curve([100, 400], [0.5, 0.25], births=0.125)
    assert made.at(0) == 1.0
    assert made.at(50) == pytest.approx(0.75)  # half way along the line from 1 to 0.5
    assert made.at(200) == pytest.approx(0.375)  # half way in the logarithm
    assert made.at(1e9) == 0.25
    assert made.reads_at(100) == pytest.approx(0.375)


@pytest.mark.slow
def test_the_curve_of_a_zipf_distribution_agrees_with_draws_from_it():
    traffic = TableTraffic.assumed("item", rows=5_000, dim=4, ids_per_batch=500, exponent=0.9)
    shares = np.arange(1, 5_001) ** -0.9
    numbers = np.random.default_rng(1)
    bag = EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes="1MiB", sizing=True),
        optimizer=optimizers.SGD(lr=0.1),
        policy="lru",
    )
    with bag:
        for step in range(900):
            if step == 400:
                bag.miss_ratio_curve(reset=True)
            ids = numbers.choice(5_000, 500, p=shares / shares.sum())
            bag(torch.from_numpy(ids).view(1, -1)).sum().backward()
        drawn = bag.miss_ratio_curve()
    assert traffic.lookups_per_batch == pytest.approx(drawn.lookups / drawn.batches, rel=0.02)
    # Budgets hold two batches at least, so the formula need not be right below that.
    for rows in (700, 1000, 2000, 4000):
        assert traffic.curve.at(rows) == pytest.approx(drawn.at(rows), abs=0.02)


# ---- the division


def cost_of(shares: list[BudgetRequest], sizes: list[int]) -> float:
    return sum(share.cost(size) for share, size in zip(shares, sizes, strict=True))


def test_no_division_of_the_whole_on_a_grid_is_better():
    shares = [
        BudgetRequest(1_000, 90_000, 100, 500, 0.0, curve([10, 100, 900], [0.9, 0.3, 0.0]), 3.0),
        BudgetRequest(2_000, 90_000, 100, 0, 50.0, curve([10, 400, 900], [0.8, 0.5, 0.0]), 10.0),
        BudgetRequest(500, 50_000, 50, 0, 0.0, curve([30, 200, 1000], [0.6, 0.1, 0.0]), 5.0),
    ]
    for budget in (5_000, 20_000, 60_000, 120_000):
        given = divide_budget(budget, shares, "ram")
        assert sum(given) == budget or cost_of(shares, given) == 0.0
        assert all(size >= share.min_bytes for size, share in zip(given, shares, strict=True))
        step = budget // 60
        grid = [
            cost_of(shares, [a, b, budget - a - b])
            for a, b in itertools.product(range(1_000, budget, step), range(2_000, budget, step))
            if budget - a - b >= 500
        ]
        # The curves between the points are no straight lines, and hulls leave out dents.
        assert cost_of(shares, given) <= min(grid) * 1.03 + 1e-9


def test_more_than_all_can_use_is_divided_by_what_they_can_use():
    shares = [
        BudgetRequest(0, 100, 1, 0, 0.0, curve([100], [0.0]), 1.0),
        BudgetRequest(0, 300, 1, 0, 0.0, curve([300], [0.0]), 1.0),
    ]
    assert divide_budget(4_000, shares, "ram") == [1_000, 3_000]


def test_a_budget_below_what_batches_need_is_refused():
    with pytest.raises(ConfigError, match=r"ram=1048576 is too small: the 3 tables need \d+ bytes at least"):
        advise(TABLES, ram="1MiB", ssd="100GiB")
    with pytest.raises(ConfigError, match="ssd=1048576 is too small"):
        advise(TABLES, ram="1GiB", ssd="1MiB")
    with pytest.raises(ConfigError, match="with ssd=0 is too small: all rows take"):
        advise(TABLES, ram="1GiB")
    with pytest.raises(ConfigError, match="device=1000 is too small"):
        advise(TABLES, ram="1GiB", ssd="100GiB", device=1000)
    with pytest.raises(InputError, match="no tables"):
        advise([], ram="1GiB")
    with pytest.raises(InputError, match="two tables have one name"):
        advise([ITEM, ITEM], ram="1GiB", ssd="100GiB")


def test_budgets_are_spent_and_more_of_them_saves_reads():
    advices = [advise(TABLES, ram=f"{mib}MiB", ssd="20GiB") for mib in (400, 600, 1_000)]
    for advice, mib in zip(advices, (400, 600, 1_000), strict=True):
        assert (mib << 20) - 3 <= sum(table.host_bytes for table in advice.tables.values()) <= mib << 20
        assert sum(table.ssd_bytes for table in advice.tables.values()) <= 20 << 30
        assert advice.reads_per_batch_doubled < advice.reads_per_batch
        assert advice.reads_per_batch_now is None
    assert [advice.reads_per_batch for advice in advices] == sorted(
        (advice.reads_per_batch for advice in advices), reverse=True
    )
    now = [replace(table, host_bytes=134 << 20, ssd_bytes=7 << 30) for table in TABLES]
    same = advise(now, ram="402MiB", ssd="20GiB")
    assert same.reads_per_batch_now is not None
    assert same.reads_per_batch < same.reads_per_batch_now


def test_a_device_holds_rows_that_ram_then_need_not_hold():
    without = advise(TABLES, ram="500MiB", ssd="20GiB")
    with_device = advise(TABLES, ram="500MiB", ssd="20GiB", device="200MiB")
    assert sum(table.device_bytes for table in with_device.tables.values()) <= 200 << 20
    assert with_device.reads_per_batch < without.reads_per_batch
    assert with_device.moves_per_batch > with_device.reads_per_batch
    assert "would move to the device" in str(with_device)


def test_advised_budgets_open_and_train(tmp_path: Path):
    small = [
        TableTraffic.assumed("item", rows=20_000, dim=16, ids_per_batch=1_000),
        TableTraffic.assumed("page", rows=100, dim=8, ids_per_batch=1_000, optimizer="adam", exponent=0.0),
    ]
    advice = advise(small, ram="2MiB", ssd="64MiB", device="300KiB")
    for table, spec in zip(small, (optimizers.RowWiseAdagrad(lr=0.1), optimizers.Adam(lr=0.1)), strict=True):
        tiers = advice.tables[table.name].tiers(TierBudgets(host_bytes=1, ssd_bytes=1, ssd_dir=tmp_path))
        with EmbCacheEmbeddingBag(name=table.name, embedding_dim=table.dim, tiers=tiers, optimizer=spec) as bag:
            for begin in range(0, table.rows, 500):
                bag(torch.arange(begin, min(begin + 500, table.rows)).view(1, -1)).sum().backward()
            stats = bag.stats()
            assert stats.rows == table.rows
            assert stats.overflow_plans == 0


# ---- of a model, and of files


def trained_model(sizing: bool = True) -> nn.Module:
    tiers = TierBudgets(host_bytes="4MiB", sizing=sizing)
    bags = {
        name: EmbCacheEmbeddingBag(name=name, embedding_dim=8, tiers=tiers, optimizer=optimizers.RowWiseAdagrad(lr=0.1))
        for name in ("item", "user")
    }
    model = nn.ModuleDict(bags)
    for step in range(3):
        for bag in bags.values():
            bag(torch.arange(step * 10, step * 10 + 100).view(1, -1)).sum().backward()
    return model


def test_the_traffic_of_a_model_is_that_of_its_tables(tmp_path: Path):
    traffic = traffic_of(trained_model())
    assert [(table.name, table.rows, table.host_bytes) for table in traffic] == [
        ("item/item", 120, 4 << 20),
        ("user/user", 120, 4 << 20),
    ]
    assert all(table.lookups_per_batch == 100 for table in traffic)
    write_traffic(traffic, tmp_path / "traffic.json")
    again = read_traffic(tmp_path / "traffic.json")
    assert [table.as_dict() for table in again] == [table.as_dict() for table in traffic]
    assert isinstance(advise(trained_model(), ram="8MiB"), BudgetAdvice)


@pytest.mark.slow
def test_traffic_that_cannot_be_written_leaves_the_file_of_before(small_disk: str):
    path = Path(small_disk) / "traffic.json"
    write_traffic([ITEM], path)
    with pytest.raises(OSError, match="No space left"):
        write_traffic([ITEM] * 8_000, path)
    assert [table.name for table in read_traffic(path)] == [ITEM.name]
    assert [file.name for file in path.parent.iterdir()] == ["traffic.json"]


def test_tables_that_measure_nothing_are_refused():
    with pytest.raises(StateError, match=r"table 'item' does not measure .* TierBudgets\(sizing=True\)"):
        advise(trained_model(sizing=False), ram="8MiB")
    with pytest.raises(InputError, match="Linear has no cache module"):
        traffic_of(nn.Linear(1, 1))
    bag = EmbCacheEmbeddingBag(
        name="item",
        embedding_dim=4,
        tiers=TierBudgets(host_bytes="1MiB", sizing=True),
        optimizer=optimizers.SGD(lr=0.1),
    )
    with bag, pytest.raises(StateError, match="has no lookups"):
        traffic_of(bag)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("format",), 2),
        (("tables",), None),
        (("tables", 0, "dim"), -1),
        (("tables", 0, "dim"), "wide"),
        (("tables", 0, "optimizer"), "rprop"),
        (("tables", 0, "rows"), 0),
        (("tables", 0, "policy"), "fifo"),
        (("tables", 0, "curve"), []),
        (("tables", 0, "curve", "policy"), "fifo"),
        (("tables", 0, "curve", "rows"), [3, 2]),
        (("tables", 0, "curve", "miss_ratios"), [0.5]),
        (("tables", 0, "curve", "miss_ratios"), [7.0] * 64),
        (("tables", 0, "curve", "first_use_ratio"), "nan"),
        (("tables", 0, "curve", "new_row_ratio"), 2.0),
        (("tables", 0, "curve", "lookups"), 1e400),
    ],
)
def test_a_damaged_file_of_traffic_is_refused(tmp_path: Path, at: tuple[Any, ...], value: object):
    path = tmp_path / "traffic.json"
    write_traffic([ITEM], path)
    content = json.loads(path.read_text())
    inside = content
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptionError):
        read_traffic(path)
    path.write_text("{")
    with pytest.raises(CorruptionError, match="expected what write_traffic writes"):
        read_traffic(path)


# ---- the command


def test_the_command_advises_by_files_and_by_assumed_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_traffic(TABLES, tmp_path / "rank0.json")
    assert main(["advise", str(tmp_path / "rank0.json"), "--ram", "500MiB", "--ssd", "20GiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)[str(tmp_path / "rank0.json")]
    assert told == json.loads(json.dumps(advise(TABLES, ram="500MiB", ssd="20GiB").as_dict()))
    assumed = "name=item,rows=1e8,dim=128,ids=262144,optimizer=adam"
    assert main(["advise", "--table", assumed, "--ranks", "4", "--ram", "16GiB", "--ssd", "100GiB"]) == 0
    shown = capsys.readouterr().out
    assert "each of 4 ranks" in shown
    assert "25,000,000" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give files of traffic, or tables by --table"),
        (["--table", "name=item,rows=1e9,dim=64"], "'ids' is missing"),
        (["--table", "name=item,rows=many,dim=64,ids=1"], "rows, dim, ids and zipf are numbers"),
        (["--table", "name=item,rows=1e400,dim=64,ids=1"], "rows, dim, ids and zipf are numbers"),
        (["--table", "name=item,rows=1e9,dim=64,ids=1,colour=red"], "'colour' is not known"),
        (["--table", "name=item,rows=1e9,dim=64,ids=1,zipf=9"], "exponent=9.0 is out of range"),
        (["--table", "name=item,rows=1e9,dim=64,ids=1,optimizer=rprop"], "optimizer='rprop' is not known"),
        (["--table", "name=item,rows=1e3,dim=64,ids=1", "--ranks", "0"], "--ranks 0 is out of range"),
    ],
)
def test_what_cannot_be_advised_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["advise", *arguments, "--ram", "64GiB"]) == 3
    assert message in capsys.readouterr().err


# ---- TorchRec's planner


def test_torchrecs_statistics_have_the_miss_ratios_of_the_curve():
    stats = offload_stats(ITEM, world_size=4)
    assert stats.height == ITEM.rows
    assert stats.expected_lookups == round(4 * ITEM.lookups_per_batch)
    for share in (0.001, 0.01, 0.1, 0.3, 0.7):
        assert stats.expected_miss_rate(share) == pytest.approx(ITEM.curve.reads_at(share * ITEM.rows), abs=0.02)
    assert offload_stats(PAGE).cacheability > stats.cacheability  # ids without skew are the hardest to cache
    assert stats.stable_fingerprint()


def test_torchrecs_planner_takes_the_constraints():
    configs = [
        EmbCacheEmbeddingBagConfig(
            name=table.name.rpartition("/")[2],
            embedding_dim=table.dim,
            num_embeddings=table.rows,
            feature_names=[table.name],
            initializer=initializers.Constant(0.0),
        )
        for table in TABLES
    ]
    collection = EmbCacheEmbeddingBagCollection(configs, name="m", tiers=TierBudgets(host_bytes="1MiB"))
    advice = advise(TABLES, ram="500MiB", ssd="20GiB")
    constraints = planner_constraints(TABLES, advice)
    factor = constraints["item"].cache_params.load_factor
    assert factor == pytest.approx(advice.tables["m/item"].rows_in_ram / ITEM.rows)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, local_world_size=2, compute_device="cpu"), constraints=constraints
    )
    plan = planner.plan(collection, [EmbCacheEmbeddingBagCollectionSharder()])
    assert set(plan.plan[""]) == {"item", "user", "page"}
    with pytest.raises(InputError, match="two modules have a table 'item'"):
        planner_constraints([ITEM, replace(ITEM, name="other/item")])


def test_every_table_of_a_module_measures_where_the_module_is_told_to():
    configs = [
        EmbCacheEmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=100, feature_names=[name])
        for name in ("item", "user")
    ]
    collection = EmbCacheEmbeddingBagCollection(configs, tiers=TierBudgets(host_bytes="2MiB", sizing=True))
    assert all(table.tiers.sizing for table in collection.tables.values())
