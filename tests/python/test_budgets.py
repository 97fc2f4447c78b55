"""The budgets of a collection, which its tables share."""

import re

import numpy as np
import pytest

from test_modules import bags
from torchrec_embcache import EmbCacheEmbeddingBagConfig, TierBudgets
from torchrec_embcache.exceptions import ConfigError


def unequal(**rows: int) -> list[EmbCacheEmbeddingBagConfig]:
    """Tables of 8 columns for which so many rows are expected."""
    return [
        EmbCacheEmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=count, feature_names=[f"of_{name}"])
        for name, count in rows.items()
    ]


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
def test_a_budget_without_room_for_a_row_of_each_table_is_named_with_what_it_needs(field):
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
