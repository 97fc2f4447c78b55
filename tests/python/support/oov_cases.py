"""Helpers of the OOV row tests: models of several ranks, and the OOV rows of all of them."""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torchrec_embcache import cache_modules
from torchrec_models import (
    Model,
    Settings,
    sharded,
)


def state_of(table: Any) -> bytes:
    """Every bit of the OOV row and its slots."""
    return table.table._native_table.oov_row().tobytes()


FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
Shared = dict[tuple[str, str], list[float]]


def shared_of(model: Any) -> Shared:
    """The OOV row and its slots of each table of this rank."""
    return {
        (path, name): table._native_table.oov_row().tolist()
        for path, module in cache_modules(model).items()
        for name, table in module.tables.items()
    }


def assert_same_shared(parts: list[Shared], want: Shared, tolerance: float = 1e-5) -> None:
    """All ranks have the same bits of a table's OOV row, and these are near to those that are wanted."""
    assert {table for part in parts for table in part} == want.keys()
    for part in parts:
        for table, row in part.items():
            assert all(other.get(table, row) == row for other in parts), table
            assert any(row), table
            torch.testing.assert_close(torch.tensor(row), torch.tensor(want[table]), atol=tolerance, rtol=tolerance)


def made(settings: Settings, shardings: Any) -> Any:
    return sharded(Model(settings), shardings, FUSED)
