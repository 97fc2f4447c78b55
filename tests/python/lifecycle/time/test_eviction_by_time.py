"""Eviction by time in seconds: rows expire by their last training time, on any ranks and after any resume."""

import random
from typing import Any

import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dcp_cases
from admission_rank_cases import PIPELINES, pipeline_of, pipelines_on_a_cpu
from lifecycle_cases import (
    DOORS,
    HALF_LIFE,
    Ahead,
    Expected,
    budgets,
    come_again,
    embedding,
    ids_of,
    load_by,
    save_by,
    update,
)
from processes import process_group
from time_cases import BEGIN, TTL, natives, times_of
from torchrec_embcache import TierBudgets, cache_modules, evict, set_time
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import All, Policy, Score, Ttl
from torchrec_embcache.exceptions import InputError, StateError
from torchrec_models import MIXED, ROW_WISE, Model, Settings, batches, rows_of, sharded
from torchrec_models import together as merged
from torchrec_models import train as train_model

POLICIES = {
    "every 3 steps": Policy([Ttl(seconds=TTL)], every_steps=3),
    "any": Policy([Ttl(seconds=3 * TTL), All([Ttl(seconds=TTL), Score(below=1.7)])], every_steps=1),
    "at saves": Policy([Ttl(seconds=TTL)]),
}


class Timed(Expected):
    """A table from which the rows are removed whose step was made too long ago."""

    def __init__(self, policy: Policy, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.times = [0]
        self.now = 0

    def train(self, ids: list[int]) -> torch.Tensor:
        self.times.append(self.now)
        return super().train(ids)

    def sweep(self) -> None:
        rules, steps = self.policy.rules, [step for step, time in enumerate(self.times)]
        self.policy = Policy(
            [self._in_steps(rule, len(steps) - 1) for rule in rules], every_steps=self.policy.every_steps
        )
        try:
            super().sweep()
        finally:
            self.policy = Policy(rules, every_steps=self.policy.every_steps)

    def _in_steps(self, rule: Any, step: int) -> Any:
        """The rule, with the time in steps that it comes to after `step`."""
        if isinstance(rule, All):
            return All([self._in_steps(each, step) for each in rule.rules])
        if not isinstance(rule, Ttl):
            return rule
        made = [at for at, time in enumerate(self.times) if at and time <= self.now - rule.seconds]
        return Ttl(steps=step - max(made)) if made and max(made) < step else Ttl(steps=1 << 40)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_rows_leave_by_the_time_of_their_step(tmp_path, tiers, lookahead, policy):
    dice = random.Random(f"{tiers} {lookahead} {policy}")
    model = Timed(POLICIES[policy])
    saves = 0
    made = {"eviction": POLICIES[policy], "score_half_life_steps": HALF_LIFE}
    with embedding(tiers=budgets(tiers, tmp_path / "a"), **made) as table:
        steps = [come_again(dice, 14) for _ in range(40)]
        prefetches = Ahead(table, steps, lookahead)
        model.now = BEGIN
        for place, ids in enumerate(steps):
            model.now += dice.randrange(4)
            table.set_time(model.now)
            prefetches.of(place)
            match dice.randrange(6):
                case 0:
                    table.evict()
                    model.sweep()
                case 1:
                    table.flush()
                case 2 if place:
                    saves += 1
                    Saver(0).save(table, tmp_path / "saved", incremental=saves % 3 != 0)
                    if model.policy.at_saves:
                        model.sweep()
                    with embedding(tiers=budgets(tiers, tmp_path / f"b{saves}"), **made) as other:
                        Saver(0).load(other, tmp_path / "saved")
                        assert model.is_same(other)
            out = table(torch.tensor(ids))
            update(out)
            assert torch.equal(out.detach(), model.train(ids)), place
        assert model.is_same(table)
        assert table.stats().eviction.evicted == model.evicted > 0
        assert saves


def aged(table: Any, first: int, count: int, *, every: int = 2) -> None:
    """Train id s in step s, each `every` seconds after the one before."""
    for step in range(first, first + count):
        table.set_time(BEGIN + every * step)
        update(table(torch.tensor([step])))


@pytest.mark.parametrize("door", DOORS)
def test_a_checkpoint_has_the_times_of_steps(tmp_path, door):
    policy = Policy([Ttl(seconds=TTL)], every_steps=1 << 40)
    budget = budgets("ssd", tmp_path / "a")
    with embedding(eviction=policy, tiers=budget) as table:
        aged(table, 1, 8)
        Saver(0).save(table, tmp_path / "saved")
        aged(table, 9, 8)
        future = save_by(door, table, tmp_path / "saved")
        if future is not None:
            future.result()
    other_budget = TierBudgets(host_bytes="4KiB", ssd_bytes="64MiB", ssd_dir=tmp_path / "a", reopen="discard")
    with embedding(eviction=policy, tiers=other_budget) as other:
        load_by(door, other, tmp_path / "saved")
        other.evict()
        assert sorted(ids_of(other)) == [12, 13, 14, 15, 16], (
            "time stands still until it is set: step 11 was 10 seconds ago"
        )
        other.set_time(BEGIN + 36)
        other.evict()
        assert sorted(ids_of(other)) == [14, 15, 16]
        with pytest.raises(InputError, match="the time 1700000061.5 is before 1700000066"):
            other.set_time(BEGIN + 31.5)


def test_what_a_flush_publishes_has_the_times_of_steps(tmp_path):
    policy = Policy([Ttl(seconds=TTL)])
    folder = tmp_path / "a"
    with embedding(eviction=policy, tiers=budgets("ssd", folder)) as table:
        aged(table, 1, 9)
        table.flush()
    again = TierBudgets(host_bytes="4KiB", ssd_bytes="64MiB", ssd_dir=folder, reopen="resume")
    with embedding(eviction=policy, tiers=again) as table:
        assert len(table) == 9
        table.set_time(BEGIN + 2 * 9 + 2)
        table.evict()
        assert sorted(ids_of(table)) == [6, 7, 8, 9]
        aged(table, 11, 1)
        table.evict()
        assert sorted(ids_of(table)) == [7, 8, 9, 11]


def test_the_steps_of_a_checkpoint_without_times_count_as_of_the_next(tmp_path):
    def has_times() -> bool:
        manifests = sorted((tmp_path / "saved").glob("*/manifest.json"))
        return b'"clock"' in manifests[-1].read_bytes()

    table = embedding(eviction=Policy([Ttl(steps=100)]))
    for step in range(1, 6):
        update(table(torch.tensor([step])))
    Saver(0).save(table, tmp_path / "saved")
    assert not has_times()
    other = embedding(eviction=Policy([Ttl(seconds=TTL)]))
    Saver(0).load(other, tmp_path / "saved")
    other.set_time(BEGIN)
    other.evict()
    assert len(other) == 5, "when they were made is not known"
    update(other(torch.tensor([6])))
    other.set_time(BEGIN + TTL - 1)
    update(other(torch.tensor([7])))
    other.evict()
    assert len(other) == 7
    other.set_time(BEGIN + TTL)
    other.evict()
    assert ids_of(other) == [7]
    Saver(0).save(other, tmp_path / "saved")
    assert has_times()


def test_set_time_expires_rows_trained_under_system_time():
    table = embedding(eviction=Policy([Ttl(seconds=3600)]))
    native = table.table._native_table
    before = native.now() / 1000
    update(table(torch.tensor([1, 2])))
    now = native.now() / 1000
    table.evict()
    assert len(table) == 2
    table.set_time(before + 3599)
    table.evict()
    assert len(table) == 2
    table.set_time(now + 3602)
    table.evict()
    assert len(table) == 0
    with pytest.raises(InputError, match="time does not go back"):
        table.set_time(now)


@pytest.mark.parametrize("seconds", [0.001, 0.29, 1.001, 1.005, 4.35, 1_700_000_000.123])
def test_thousandths_of_times_and_of_a_time_to_live_count(seconds):
    table = embedding(eviction=Policy([Ttl(seconds=seconds)]))
    table.set_time(0)
    update(table(torch.tensor([1])))
    table.set_time(seconds - 0.001)
    table.evict()
    assert len(table) == 1
    table.set_time(seconds)
    assert table.table._native_table.now() == round(seconds * 1000)
    table.evict()
    assert len(table) == 0


@pytest.mark.parametrize("seconds", [-1, 10**400, float("nan"), float("inf"), "1", None, True, 2**53])
def test_what_is_no_time_is_refused(seconds):
    table = embedding(eviction=Policy([Ttl(seconds=5)]))
    for call in (lambda: table.set_time(seconds), lambda: set_time(table, seconds)):
        with pytest.raises(InputError, match="give seconds as a number"):
            call()
    with pytest.raises(InputError, match="no cache module"):
        set_time(torch.nn.Linear(1, 1), 5)


# ---- ranks


def made(shardings: Any, policy: Policy) -> Any:
    model = Model(Settings(options={"eviction": policy}))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    return sharded(model, shardings)


def trained(rank: int, world: int, policy: Policy, count: int) -> Any:
    """A model whose ranks have clocks of their own, as clocks of systems differ."""
    model, times = made(ROW_WISE, policy), times_of(rank, count)
    for step, batch in enumerate(batches(count, rank, world)):
        for native in natives(model):
            native.set_time(max(times[: step + 1]))  # what the rank's own clock says, which does not go back
        train_model(model, iter([batch]))
    return model


def expected(count: int, ttl: float, later: float = 0) -> set[tuple[str, int]]:
    """By definition: the table and id of the rows whose last step was made, by the greatest time of the ranks, within the ttl."""
    times = [max(max(times_of(rank, count)[: step + 1]) for rank in (0, 1)) for step in range(count)]
    last: dict[tuple[str, int], int] = {}
    for step, batch in enumerate(batches(count)):
        for key, tables in {"a": ["ta", "tc"], "b": ["ta", "tb"], "c": ["tb"]}.items():
            for row_id in batch.features[key].values().tolist():
                last.update({(table, row_id): times[step] for table in tables})
    left = {row for row, time in last.items() if time > times[-1] + 1000 * later - 1000 * ttl}
    assert 0 < len(left) < len(last)
    return left


def left_of(parts: list[Any]) -> set[tuple[str, int]]:
    return {(table, row_id) for _, table, row_id in merged(parts)}


def swept_with_clocks(rank: int, world: int, every: int | None) -> Any:
    model = trained(rank, world, Policy([Ttl(seconds=TTL)], every_steps=every), 14)
    if every is None:
        evict(model)
    return rows_of(model)


@pytest.mark.parametrize("every", [2, None])
def test_ranks_whose_clocks_differ_agree_on_what_is_too_old(two_ranks, every):
    assert left_of(two_ranks.run(swept_with_clocks, every)) == expected(14, TTL)


def saved_with_clocks(rank: int, world: int, door: str, path: str) -> None:
    model = trained(rank, world, Policy([Ttl(seconds=1000)], every_steps=1 << 40), 9)
    saver = Saver()
    saver.save(model, path)
    times = times_of(rank, 14)
    for step, batch in list(enumerate(batches(14, rank, world)))[9:]:
        for native in natives(model):
            native.set_time(max(times[: step + 1]))
        train_model(model, iter([batch]))
    if door == "dcp":
        dcp_cases.save(dcp_cases.dense_state(), f"{path}/dcp", model)
    elif door.startswith("async"):
        saver.save_async(model, path, incremental="delta" in door).result()
    else:
        saver.save(model, path, incremental=door == "delta")


def loaded_and_swept(rank: int, world: int, door: str, path: str) -> Any:
    model = made(ROW_WISE, Policy([Ttl(seconds=TTL)]))
    if door == "dcp":
        dcp_cases.load(dcp_cases.dense_state(), f"{path}/dcp", model)
    else:
        Saver().load(model, path)
    evict(model)
    now = rows_of(model)
    latest = max(native.now() for native in natives(model)) / 1000
    set_time(model, latest + 4 + rank - world)  # the greatest counts
    evict(model)
    return now, rows_of(model)


@pytest.mark.parametrize("door", ["full", "delta", "async", "async delta", "dcp"])
def test_a_resume_on_another_number_of_ranks_knows_the_times_of_steps(two_ranks, three_ranks, tmp_path, door):
    path = str(tmp_path / "saved")
    two_ranks.run(saved_with_clocks, door, path)
    with process_group(0, 1, str(tmp_path / "store")):
        alone = [loaded_and_swept(0, 1, door, path)]
    for results in (alone, three_ranks.run(loaded_and_swept, door, path)):
        assert left_of([result[0] for result in results]) == expected(14, TTL)
        assert left_of([result[1] for result in results]) == expected(14, TTL, later=3)


def one_time(rank: int, world: int) -> Any:
    """`set_time` on ranks that say different times, and what is refused."""
    model = made(MIXED, Policy([Ttl(seconds=TTL)]))
    said = []
    set_time(model, BEGIN + 5 * rank)
    train_model(model, batches(1, rank, world))
    nows = {native.now() for native in natives(model)}
    for seconds in (BEGIN + 4 - rank, -5 if rank else BEGIN + 50):
        try:
            set_time(model, seconds)
        except InputError as error:
            said.append(str(error))
    nows |= {native.now() for native in natives(model)}
    table = next(
        table for module in cache_modules(model).values() for table in module.tables.values() if table.name == "tb"
    )
    with pytest.raises(StateError, match="shared by 2 ranks.*set_time.model"):
        table.set_time(BEGIN + 60)
    set_time(model, BEGIN + 5)
    train_model(model, batches(1, rank, world))
    return said, nows


def test_time_backward_or_missing_on_one_rank_fails_on_both(two_ranks):
    """The time of both stays."""
    for said, nows in two_ranks.run(one_time):
        assert ["does not go back" in said[0], "give seconds as a number" in said[1]] == [True, True]
        assert nows == {1000 * (BEGIN + 5)}


def piped(rank: int, world: int, pipeline: str, policy: Policy) -> Any:
    with pipelines_on_a_cpu():
        model = made(MIXED, policy)
        runner, steps = pipeline_of(pipeline, model), iter(batches(9, rank, world))
        for step in range(9):
            if policy.needs_clock:
                set_time(model, BEGIN + TTL * step)
            runner.progress(steps)
        return rows_of(model)


@pytest.mark.parametrize("pipeline", [kind for kind in PIPELINES if kind != "semi-sync"])
def test_rows_leave_by_time_under_pipelines(two_ranks, pipeline):
    """A step every ten seconds: three steps are thirty seconds. The semi-synchronous pipeline trains a batch with the next one."""
    expected = two_ranks.run(piped, pipeline, Policy([Ttl(steps=3)], every_steps=2))
    assert two_ranks.run(piped, pipeline, Policy([Ttl(seconds=3 * TTL)], every_steps=2)) == expected
