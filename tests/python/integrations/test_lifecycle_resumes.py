"""The OOV row and step times in checkpoints of Megatron-Core and Lightning: a resumed run equals an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from lifecycle_cases import embedding, ids_of, update
from lifecycle_resume_cases import begin, finish, megatrons, path, save
from lightning_cases import LIGHTNING_WARNINGS, Recommender, callbacks, rows, trainer
from oov_cases import assert_same_shared, made, shared_of, state_of
from processes import World
from tables import Contents
from time_cases import now
from torchrec_embcache import EmbCacheEmbedding, admission, cache_modules, eviction, optimizers, set_time
from torchrec_embcache.integrations import megatron
from torchrec_models import ROW_WISE, Settings, assert_same_rows, batches, rows_of, together

__all__ = ["path"]  # fixtures

pytestmark = [*LIGHTNING_WARNINGS, pytest.mark.slow]
BEGIN = 1_700_000_030
SHARED = {"admission": admission.Count(4), "not_admitted": "oov"}


def swept_after(seconds: float) -> dict[str, Any]:
    """Settings of a table whose rows leave `seconds` after their last step, after each step."""
    return {"eviction": eviction.Policy([eviction.Ttl(seconds=seconds)], every_steps=1)}


# ---- Megatron


def refused(table: EmbCacheEmbedding, step: int) -> None:
    """A training step with an id that comes in each of them, and so gets a row in the fourth one, and ids that come once."""
    update(table(torch.tensor([7, *range(100 * step, 100 * step + 5)])))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "optimizer", [optimizers.Adam(lr=0.1), optimizers.RowWiseAdagrad(lr=0.1)], ids=lambda o: o.kind
)
def test_megatrons_checkpoint_has_the_shared_row_and_its_slots(
    path: Path, optimizer: optimizers.OptimizerSpec, asynchronous: bool
) -> None:
    straight, again, without_slots = (embedding(optimizer=optimizer, **SHARED) for _ in range(3))
    for step in range(5):
        refused(straight, step)
    weights, state = straight.table.oov_row(), state_of(straight)
    assert weights.all()
    assert len(straight) == 1
    if asynchronous:
        request = begin(straight, path)
        refused(straight, 5)
        finish(request)
    else:
        save(straight, path)
        refused(straight, 5)
    refused(again, 50)  # the load replaces what is there
    assert state_of(again) != state
    dist_checkpointing.load(megatrons(again), str(path))
    assert again.table.oov_row().tobytes() == weights.tobytes()
    assert state_of(again) == state
    refused(again, 5)
    assert state_of(again) == state_of(straight) != state
    assert Contents.of(again) == Contents.of(straight)
    # The slots are what makes the step the same.
    dist_checkpointing.load(megatron.sharded_tables(without_slots, slots=False), str(path))
    assert without_slots.table.oov_row().tobytes() == weights.tobytes()
    refused(without_slots, 5)
    assert without_slots.table.oov_row().tobytes() != straight.table.oov_row().tobytes()


def lives_on(table: EmbCacheEmbedding, first: int, last: int) -> list[list[int]]:
    """Train id s in step s, each two seconds after the one before: the ids that are left after each step."""
    left = []
    for step in range(first, last):
        table.set_time(BEGIN + 2 * step)
        update(table(torch.tensor([step])))
        left.append(sorted(ids_of(table)))
    return left


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_expire_at_the_same_step_after_a_megatron_load(path: Path, asynchronous: bool) -> None:
    straight, again = (embedding(**swept_after(10)) for _ in range(2))
    lives_on(straight, 1, 9)
    if asynchronous:
        request = begin(straight, path)
        expected = lives_on(straight, 9, 16)
        finish(request)
    else:
        save(straight, path)
        expected = lives_on(straight, 9, 16)
    dist_checkpointing.load(megatrons(again), str(path))
    assert now(again.table) == BEGIN + 2 * 8, "it stands still until it is set"
    assert sorted(ids_of(again)) == [4, 5, 6, 7, 8]
    assert lives_on(again, 9, 16) == expected
    assert expected[0] == [5, 6, 7, 8, 9], "one row leaves with each step"
    assert Contents.of(again) == Contents.of(straight)


OPTIONS = {**SHARED, "admission": admission.Count(3), **swept_after(30)}


def go_on(model: Any, rank: int, world: int, first: int, last: int) -> list[tuple[Any, Any]]:
    """Train the tables alone, a step every ten seconds: the rows and the OOV rows of this rank after each step.

    Ranks have the same number of samples, so that each sample counts the same on any number of them.
    """
    found = []
    for step, batch in list(enumerate(batches(last, rank, world, size=12)))[first:]:
        set_time(model, BEGIN + 10 * step)
        loss, _ = model(batch)
        loss.backward()
        found.append((rows_of(model), shared_of(model)))
    return found


def saved_by_ranks(rank: int, world: int, path: str, asynchronous: bool) -> Any:
    megatron.register()
    # Megatron writes by processes of its own, which the tests' processes may not start, because they are daemons.
    mp.current_process()._config["daemon"] = False
    model = made(Settings(options=OPTIONS), ROW_WISE)
    before = go_on(model, rank, world, 0, 7)[-1]
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=rank),
        **megatron.sharded_tables(model),
    }
    request = dist_checkpointing.save(state, path, megatron.STRATEGY, async_sharded_save=asynchronous)
    after = go_on(model, rank, world, 7, 12)
    if asynchronous:
        request.execute_sync()
    return before, after


def loaded_by_ranks(rank: int, world: int, path: str) -> Any:
    megatron.register()
    model = made(Settings(options=OPTIONS), ROW_WISE)
    go_on(model, rank, world, 0, 2)
    dist_checkpointing.load(megatron.sharded_tables(model), path)
    times = {now(table) for module in cache_modules(model).values() for table in module.tables.values()}
    return times, (rows_of(model), shared_of(model)), go_on(model, rank, world, 7, 12)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_number_of_ranks_goes_on_from_megatrons_checkpoint_of_two(
    path: Path, two_ranks: World, three_ranks: World, asynchronous: bool
) -> None:
    saved = two_ranks.run(saved_by_ranks, str(path), asynchronous)
    rows_then, shared_then = together([rows for (rows, _), _ in saved]), saved[0][0][1]
    steps = [together([after[step][0] for _, after in saved]) for step in range(5)]
    gone = [
        row for before, after in zip([rows_then, *steps], steps, strict=False) for row in before.keys() - after.keys()
    ]
    assert len(set(gone)) > 5, "rows leave after the load"
    assert any(any(row) for row in shared_then.values())
    same_ranks = two_ranks.run(loaded_by_ranks, str(path))
    assert [found[2] for found in same_ranks] == [after for _, after in saved]
    for found in (same_ranks, [loaded_by_ranks(0, 1, str(path))], three_ranks.run(loaded_by_ranks, str(path))):
        assert [times for times, _, _ in found] == [{BEGIN + 60}] * len(found)
        assert together([rows for _, (rows, _), _ in found]) == rows_then
        assert [shared for _, (_, shared), _ in found] == [shared_then] * len(found)
        for step, expected in enumerate(steps):
            assert_same_rows(together([after[step][0] for _, _, after in found]), expected)
            assert_same_shared([after[step][1] for _, _, after in found], saved[0][1][step][1])


# ---- Lightning


class Remembers(Recommender):
    """Records the state that a run started with."""

    begun: Any = None

    def on_train_start(self) -> None:
        self.begun = self.state()

    def state(self) -> Any:
        return self.items.table.oov_row().tobytes(), state_of(self.items)


def test_run_resumed_from_lightning_trains_the_saved_oov_row(tmp_path: Path) -> None:
    """Every id occurs once an epoch, so that each is refused in the first three."""
    tmp_path.chmod(0o700)
    whole, first, again = (Remembers(**SHARED) for _ in range(3))
    trainer(tmp_path, 4).fit(whole)
    trainer(tmp_path, 2, *callbacks(tmp_path)).fit(first)
    saved = first.state()
    assert first.items.table.oov_row().all()
    trainer(tmp_path, 4, *callbacks(tmp_path)).fit(again, ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert again.begun == saved != whole.begun
    assert again.state() == whole.state() != saved
    assert len(again.items) == 40, "the fourth epoch admits"
    assert torch.equal(rows(again), rows(whole))
    assert torch.equal(again.dense.weight, whole.dense.weight)


class Timed(Recommender):
    """A step a second. `left` has the ids that are left after each step, and `begun` the time that a run began with."""

    def __init__(self) -> None:
        super().__init__(**swept_after(3))
        self.left: dict[int, list[int]] = {}
        self.begun = 0.0

    def on_train_start(self) -> None:
        self.begun = now(self.items.table)

    def training_step(self, batch: Any) -> torch.Tensor:
        set_time(self, BEGIN + self.global_step)
        return super().training_step(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.left[self.global_step] = sorted(ids_of(self.items))


def test_rows_expire_at_the_same_step_after_a_lightning_resume(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    whole, first, again = (Timed() for _ in range(3))
    trainer(tmp_path, 3).fit(whole)
    trainer(tmp_path, 2, *callbacks(tmp_path)).fit(first)
    trainer(tmp_path, 3, *callbacks(tmp_path)).fit(again, ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert again.begun == BEGIN + 9
    assert first.left | again.left == whole.left
    assert (min(again.left), max(again.left)) == (11, 15)
    assert whole.left[11] == [*range(8), *range(24, 40)], (
        "the rows of the first step after the load, and of two before it"
    )
    assert torch.equal(rows(again), rows(whole))
