"""The core accepts arrays of rows in C order and of its own width, and rejects all others before any change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from torchrec_embcache import EmbCacheEmbedding, Saver, TierBudgets, _native, initializers, optimizers, serving
from torchrec_embcache.exceptions import InputError
from torchrec_embcache.table.cache_table import CacheTable

DIM = 4
IDS = np.array([3, 1, 2, 3, 7, 9], np.int64)
#: In bags of two.
OFFSETS = np.array([0, 2, 4, 6], np.int64)
NUMBERS = np.array([[0.5, 1e-8, 0.9, 0.999, 0.0, 0.0, 0.0, 0.0]])
Make = Callable[[NDArray[Any]], NDArray[Any]]

FORMS: dict[str, Make] = {
    "Fortran order": np.asfortranarray,
    "another width": lambda array: np.zeros((array.shape[1], array.shape[0]), array.dtype),
    "every other column": lambda array: np.zeros((array.shape[0], 2 * array.shape[1]), array.dtype)[:, ::2],
    "rows from the last to the first": lambda array: array[::-1],
}


@pytest.fixture
def native() -> _native.Table:
    table = CacheTable(
        name="t",
        dim=DIM,
        tiers=TierBudgets(host_bytes="1MiB"),
        initializer=initializers.Constant(1.0),
        optimizer=optimizers.SGD(lr=0.5),
    )
    return table._native_table


def plan_of(native: _native.Table) -> _native.Plan:
    """A plan whose rows are in their slots."""
    mode = _native.PlanMode(train=True, is_prefetch=False, missing="initial")
    plan = _native.Lookup([native], [0]).plan(IDS, np.array([0, len(IDS)]), mode, 1)
    plan.wait()
    return plan


@pytest.fixture(params=list(FORMS))
def other(request: pytest.FixtureRequest) -> Make:
    return FORMS[request.param]


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=r"array \[\d+, \d+\].*: pass a contiguous array \[n, \d+\] in C order"):
        call()


def test_rows_to_import_are_taken_in_c_order_alone(native, other):
    ids, rows = np.array([10, 11, 12]), np.arange(12, dtype=np.float32).reshape(3, DIM)
    refused(lambda: native.import_rows(ids, other(rows), None, None))
    assert len(native) == 0
    native.import_rows(ids, rows, None, None)
    assert native.read_rows(ids).vectors.tolist() == rows.tolist()
    native.import_rows(ids[:0], np.zeros((0, 0), np.float32), None, None)


def test_the_output_of_a_forward_is_filled_in_c_order_alone(native, other):
    plan = plan_of(native)
    pooled, sequence = np.zeros((3, DIM), np.float32), np.zeros((len(IDS), DIM), np.float32)
    refused(lambda: plan.forward_pooled(OFFSETS, None, np.array([False]), other(pooled), None, 1))
    refused(lambda: plan.forward_sequence(other(sequence), None, 1))
    plan.forward_pooled(OFFSETS, None, np.array([False]), pooled, None, 1)
    plan.forward_sequence(sequence, None, 1)
    assert (set(pooled.ravel()), set(sequence.ravel())) == ({2.0}, {1.0})


@pytest.mark.parametrize("pooled", [True, False])
def test_a_gradient_is_read_in_c_order_alone(native, other, pooled):
    plan, grad = plan_of(native), np.arange((3 if pooled else 6) * DIM, dtype=np.float32).reshape(-1, DIM)

    def backward(grad: NDArray[Any], numbers: NDArray[Any]) -> None:
        if pooled:
            plan.backward_pooled(grad, numbers, None, None, 1)
        else:
            plan.backward_sequence(grad, numbers, None, 1)

    plan.forward_pooled(OFFSETS, None, np.array([False]), np.zeros((3, DIM), np.float32), None, 1)
    refused(lambda: backward(other(grad), NUMBERS))
    refused(lambda: backward(grad, other(np.concatenate([NUMBERS] * 2))))
    assert native.step() == 0
    backward(grad, NUMBERS)
    expected = 1 - 0.5 * grad[2 if pooled else 5]
    assert native.read_rows(np.array([9])).vectors[0].tolist() == expected.tolist()


@pytest.mark.parametrize("stored", [True, False])
def test_rows_that_are_served_are_written_in_c_order_alone(other, tmp_path: Path, stored: bool) -> None:
    tmp_path.chmod(0o700)
    table = EmbCacheEmbedding(
        name="t", embedding_dim=DIM, tiers=TierBudgets(host_bytes="1MiB"), optimizer=optimizers.SGD(lr=0.5)
    )
    rows = np.arange(12, dtype=np.float32).reshape(3, DIM)
    table.import_rows([1, 2, 3], rows.tolist())
    Saver(0).save(table, tmp_path / "saved")
    with serving.open(tmp_path / "saved") as tables, tables.pin() as version:
        served = version["t"]._ready()
        ids, found = np.array([1, 2, 3]), np.zeros(3, np.bool_)
        out = np.zeros((3, 4 * DIM), np.uint8) if stored else np.zeros((3, DIM), np.float32)
        lookup: Any = served.lookup_stored if stored else served.lookup
        refused(lambda: lookup(ids, other(out), found))
        bags = np.array([0, 1, 2, 3])
        refused(lambda: served.lookup_pooled(ids, bags, "sum", None, other(np.zeros((3, DIM), np.float32))))
        assert tables.stats().lookups == 0
        assert lookup(ids, out, found) == 0
        assert out.view(np.float32).tolist() == rows.tolist()
