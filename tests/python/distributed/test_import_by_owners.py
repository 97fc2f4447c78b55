"""Imports of rows on any rank, which their owners take: `import_rows` of sharded modules, and `collective=True` of shards."""

from typing import Any

import pytest
import torch

from torchrec_embcache.exceptions import InputError, StateError
from torchrec_models import MIXED, ROW_WISE, Model, Rows, rows_of, sharded, together

IDS = [-1, -2, -(1 << 63), (1 << 63) - 1, 0, 5, (1 << 40) + 3, *range(100, 160)]


def weights_of(ids: list[int], dim: int) -> list[list[float]]:
    return [[float(id_ % 1000) + column for column in range(dim)] for id_ in ids]


def _given(rank: int, world: int) -> list[int]:
    """The ids that a rank gives. They belong to all owners, and the last rank gives none."""
    return IDS[rank :: max(world - 1, 1)] if rank < world - 1 or world == 1 else []


def _import(rank: int, world: int, shardings: dict[str, str], *, by_shard: bool) -> Rows:
    model = sharded(Model(), shardings)
    module = model.module.bags
    ids = _given(rank, world)
    if by_shard:
        module.tables["tb"].import_rows(ids, weights_of(ids, 8), collective=True)
    else:
        for name, dim in (("ta", 16), ("tb", 8)):
            module.import_rows(
                name, torch.tensor(ids, dtype=torch.int64), torch.tensor(weights_of(ids, dim)).view(-1, dim)
            )
    return rows_of(model)


def _by_module(rank: int, world: int, shardings: dict[str, str]) -> Rows:
    return _import(rank, world, shardings, by_shard=False)


def _by_shard(rank: int, world: int) -> Rows:
    return _import(rank, world, ROW_WISE, by_shard=True)


@pytest.mark.parametrize("shardings", [ROW_WISE, MIXED], ids=["row_wise", "mixed"])
def test_every_row_goes_to_its_owner_whichever_rank_gives_it(two_ranks: Any, shardings: dict[str, str]) -> None:
    parts = two_ranks.run(_by_module, shardings)
    rows = together(parts)
    want = {("bags", "ta", id_): row for id_, row in zip(IDS, weights_of(IDS, 16), strict=True)}
    want |= {("bags", "tb", id_): row for id_, row in zip(IDS, weights_of(IDS, 8), strict=True)}
    assert rows == want
    assert all({name for _, name, _ in part} >= {"tb"} for part in parts)


def test_a_shard_sends_rows_to_the_other_shards(three_ranks: Any) -> None:
    rows = together(three_ranks.run(_by_shard))
    assert rows == {("bags", "tb", id_): row for id_, row in zip(IDS, weights_of(IDS, 8), strict=True)}


def _refused(rank: int, _world: int) -> list[Any]:
    """Errors of one rank alone, one after the other. Returns the error on this rank, and its rows after it."""
    model = sharded(Model(), ROW_WISE)
    module = model.module.bags
    module.import_rows("tb", [7 + rank], weights_of([7 + rank], 8))
    before = rows_of(model)
    zero = torch.zeros(1, 8)
    attempts: list[tuple[Any, ...]] = [
        ("tb", [1.5] if rank else [3], zero),
        ("tb", [3 + rank], torch.zeros(1, 7 + rank)),
        ("tb", [3, 4] if rank else [4], torch.zeros(2 if rank else 1, 8)),  # twice, by two ranks
        ("tb", [3 + rank], zero, None if rank else "used"),
        ("nothing", [3], zero),
    ]
    found: list[Any] = []
    for attempt in attempts:
        try:
            module.import_rows(*attempt)
        except (InputError, StateError) as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(None)
    assert rows_of(model) == before
    return found


def test_invalid_rows_on_one_rank_raise_on_all(two_ranks: Any) -> None:
    """Nothing changes."""
    for answers in two_ranks.run(_refused):
        words = ["give integers", "weights has shape", "given twice", "slots is a str", "no table 'nothing'"]
        for answer, word in zip(answers, words, strict=True):
            assert answer is not None
            assert answer[0] == "InputError"
            assert word in answer[1]
