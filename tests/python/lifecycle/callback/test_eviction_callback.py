"""Delivery of evicted rows: `on_evict` and `drain_evicted`."""

import copy
import gc
import random
import subprocess
import sys
import threading
import weakref
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from callback_cases import POLICIES, Row, Told, rows_of
from lifecycle_cases import DIM, HALF_LIFE, Ahead, budgets, come_again, embedding, ids_of, update
from processes import process_group
from torchrec_embcache import EmbCacheEmbedding, EvictedRows, RowMetadata, TierBudgets, cache_modules, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import L2Norm, Policy, Ttl
from torchrec_embcache.exceptions import ConfigError, EmbCacheError, EvictionHookError, StateError
from torchrec_models import MIXED, ROW_WISE, Model, Settings, batches, sharded
from torchrec_models import train as train_model


def told(chunk: EvictedRows) -> list[Row]:
    return [(chunk.step, chunk.reason, row) for row in rows_of(chunk)]


class Hook:
    """Keeps what it is told, and fails where it is to."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.threads: set[int] = set()
        self.failures: list[BaseException] = []

    def __call__(self, chunk: EvictedRows) -> None:
        assert 0 < len(chunk) <= 65_536
        assert chunk.table == "item"
        self.threads.add(threading.get_ident())
        self.rows += told(chunk)
        if self.failures:
            raise self.failures.pop()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hook", "keep"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_each_row_that_leaves_is_told_once_with_its_bits(tmp_path, tiers, lookahead, policy, how):
    dice = random.Random(f"{tiers} {lookahead} {policy} {how}")
    made = {"optimizer": optimizers.Adam(lr=0.1), "score_half_life_steps": HALF_LIFE}
    model = Told(POLICIES[policy], optimizer=optimizers.Adam(lr=0.1))
    hook = Hook()
    on_evict = hook if how == "hook" else "keep"
    table = embedding(tiers=budgets(tiers, tmp_path / "a"), eviction=POLICIES[policy], on_evict=on_evict, **made)
    steps = [come_again(dice, 14) for _ in range(40)]
    prefetches = Ahead(table, steps, lookahead)
    for place, ids in enumerate(steps):
        prefetches.of(place)
        match dice.randrange(7):
            case 0:
                table.evict()
                model.sweep()
            case 1:
                table.flush()
            case 2:
                Saver(0).save(table, tmp_path / "saved", incremental=place % 2 == 0)
                if model.policy.at_saves and place:
                    model.sweep()
            case 3 if how == "keep":
                hook.rows += [row for chunk in table.drain_evicted() for row in told(chunk)]
                assert sorted(hook.rows) == sorted(model.rows)
        out = table(torch.tensor(ids))
        update(out)
        assert torch.equal(out.detach(), model.train(ids)), place
    assert model.is_same(table)
    table.close()
    if how == "keep":
        hook.rows += [row for chunk in table.drain_evicted() for row in told(chunk)]
        assert not list(table.drain_evicted())
    assert model.rows
    assert sorted(hook.rows) == sorted(model.rows)
    assert threading.get_ident() not in hook.threads
    assert len(hook.threads) == (how == "hook")


@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_rows_that_a_full_table_drops_are_told_too(tmp_path, tiers):
    dice, hook = random.Random(tiers), Hook()
    given = {
        "ram": TierBudgets(host_bytes="16KiB"),
        "device": TierBudgets(host_bytes="16KiB", device_bytes="4KiB"),
        "ssd": TierBudgets(host_bytes="16KiB", ssd_bytes="128KiB", ssd_dir=tmp_path),
    }[tiers]
    policy = Policy([Ttl(steps=30)], every_steps=7)
    table = embedding(tiers=given, on_full="evict", eviction=policy, on_evict=hook)
    before: dict[int, Row] = {}
    gone: list[Row] = []
    for _ in range(80):
        ids = [dice.randrange(4000) for _ in range(100)]
        update(table(torch.tensor(ids)))
        now = {
            row_id: row
            for chunk in table.export()
            for row_id, row in zip(chunk.ids.tolist(), rows_of(chunk), strict=True)
        }
        assert set(ids) <= now.keys()
        gone += [row for row_id, row in before.items() if row_id not in now]
        before = now
    dropped = table.stats().dropped_rows
    table.close()
    assert sorted(row for _, _, row in hook.rows) == sorted(gone)
    assert sum(reason == "full" for _, reason, _ in hook.rows) == dropped > 100
    assert {reason for _, reason, _ in hook.rows} <= {"full", "ttl"}


def dying(hook: Any, **settings: Any) -> EmbCacheEmbedding:
    """A table of which every step takes the rows that it did not train."""
    return embedding(eviction=Policy([Ttl(steps=1)], every_steps=1), on_evict=hook, **settings)


def test_what_a_chunk_says():
    chunks: list[EvictedRows] = []
    with dying(chunks.append) as table:
        update(table(torch.tensor([1, 2, 2])))
        before = table.read_rows([1, 2])
        update(table(torch.tensor([3])))
    (chunk,) = chunks
    assert (chunk.table, chunk.step, chunk.reason, len(chunk)) == ("item", 2, "ttl", 2)
    assert sorted(chunk.ids.tolist()) == [1, 2]
    order = [chunk.ids.tolist().index(row_id) for row_id in (1, 2)]
    assert torch.equal(chunk.weights[order], before.weights)
    assert torch.equal(chunk.slots["sum"][order], before.slots["sum"])
    for each in fields(RowMetadata):
        assert torch.equal(getattr(chunk.metadata, each.name)[order], getattr(before.metadata, each.name)), each.name


def test_rows_that_go_by_another_way_are_not_told(tmp_path):
    hook = Hook()
    with dying(hook) as table:
        update(table(torch.tensor([1, 2, 3])))
        Saver(0).save(table, tmp_path)
        table.import_rows([1], torch.ones(1, DIM))
        table.remove_rows([2])
        with torch.no_grad():
            table(torch.tensor([8]))
        table(torch.tensor([9])).detach()
        Saver(0).load(table, tmp_path)
        assert sorted(ids_of(table)) == [1, 2, 3]
    assert not hook.rows


def test_rows_that_a_sweep_took_before_a_load_are_told(tmp_path):
    for buckets in (4093, 17):  # with another number of buckets the core's table is made anew
        hook = Hook()
        with embedding(total_num_buckets=buckets) as other:
            update(other(torch.tensor([5])))
            Saver(0).save(other, tmp_path / str(buckets))
        with dying(hook) as table:
            update(table(torch.tensor([1, 2])))
            update(table(torch.tensor([3])))
            Saver(0).load(table, tmp_path / str(buckets))
            assert ids_of(table) == [5]
            update(table(torch.tensor([6])))
        assert [step for step, _, _ in hook.rows] == [2, 2, 2], "1 and 2, and then 5, which was trained at step 1"


def test_the_hook_may_use_the_table_and_not_close_it():
    said: list[Any] = []

    def hook(chunk: EvictedRows) -> None:
        table.flush()
        said.append((table.read_rows(chunk.ids).found.any().item(), len(table), table.table.step()))
        table.evict()
        for call in (table.close, lambda: list(table.drain_evicted())):
            with pytest.raises(StateError) as refused:
                call()
            said.append(str(refused.value))

    table = dying(hook)
    update(table(torch.tensor([1])))
    update(table(torch.tensor([2])))
    len(table)
    table.close()
    assert said[0] == (False, 1, 2)
    assert "close after it has returned" in said[1]
    assert "go to its on_evict" in said[2]


def raised_by(table: EmbCacheEmbedding) -> EvictionHookError:
    """Returns the error of a hook that has just raised, or is about to, as a training forward raises it. Evaluations do not."""
    for _ in range(1_000_000):
        with torch.no_grad():
            table(torch.tensor([2]))
        try:
            table(torch.tensor([2])).detach()
        except EvictionHookError as error:
            return error
    raise AssertionError("no forward raised")


def test_callback_error_is_raised_by_the_next_step_and_continues():
    """The rows after it are delivered."""
    hook, raised = Hook(), threading.Event()
    cause = ValueError("the store is gone")
    hook.failures.append(cause)

    def failing(chunk: EvictedRows) -> None:
        try:
            hook(chunk)
        finally:
            raised.set()

    table = dying(failing)
    update(table(torch.tensor([1])))
    update(table(torch.tensor([2])))
    assert len(table) == 1
    assert raised.wait(60)
    error = raised_by(table)
    assert str(error).startswith(
        "on_evict of table 'item' raised ValueError: the store is gone (it was given 1 rows of step 2"
    )
    assert error.__cause__ is cause
    assert isinstance(error, EmbCacheError)
    assert table.table.step() == 2
    update(table(torch.tensor([3])))
    update(table(torch.tensor([4])))
    table.close()
    assert len(hook.rows) == 3, "1, 2 and 3, each once"


def test_callback_error_during_close_is_raised_after_delivery():
    hook = Hook()
    hook.failures += [ValueError("no space"), SystemExit(3)]
    gate = threading.Event()

    def gated(chunk: EvictedRows) -> None:
        assert gate.wait(60)
        hook(chunk)

    table = dying(gated, optimizer=optimizers.SGD(lr=0.5))
    for row_id in range(4):
        update(table(torch.tensor([row_id])))
        len(table)
    gate.set()
    with pytest.raises(EvictionHookError) as error:
        table.close()
    assert len(hook.rows) == 3
    assert [str(note).split(" (")[0] for note in (error.value, *error.value.__notes__)] == [
        "on_evict of table 'item' raised SystemExit: 3",
        "on_evict of table 'item' raised ValueError: no space",
    ]
    table.close()


def test_sweeps_wait_for_a_slow_callback_and_counters_do_not():
    started, gate = threading.Event(), threading.Event()
    counted: list[int] = []

    def hook(chunk: EvictedRows) -> None:
        started.set()
        assert gate.wait(60)
        counted.append(len(chunk))

    rows = 700_000
    with embedding(
        embedding_dim=1, tiers=TierBudgets(host_bytes="256MiB"), eviction=Policy([Ttl(steps=1)]), on_evict=hook
    ) as table:
        table.import_rows(torch.arange(rows), torch.ones(rows, 1))
        update(table(torch.tensor([-1])))
        table.evict()
        update(table(torch.tensor([-1])))
        assert started.wait(60)
        left = [0]
        while left[-1] != (now := table.stats().eviction.evicted):
            left.append(now)
            for _ in range(3):
                update(table(torch.tensor([-1])))
        assert 4 * 65_536 <= table.stats().eviction.undelivered < rows / 2
        assert table.stats().eviction.is_sweeping
        assert len(table) == 1
        assert table.stats().eviction.undelivered >= rows - 2 * 65_536, (
            "beyond the bound, because len() does not wait for the hook"
        )
        gate.set()
    assert sum(counted) == rows
    assert max(counted) <= 65_536


def test_kept_rows_can_be_drained_in_parts():
    """Without `on_evict` and `keep_evicted` nothing is kept."""
    table = embedding(eviction=Policy([Ttl(steps=1)], every_steps=1))
    with pytest.raises(StateError, match='keeps no evicted rows: make it with on_evict="keep"'):
        table.drain_evicted()
    with dying("keep") as table:
        for row_id in range(5):
            update(table(torch.tensor([row_id])))
            len(table)
        assert table.stats().eviction.undelivered == 4
        assert next(table.drain_evicted()).ids.tolist() == [0]
        assert table.stats().eviction.undelivered == 3
        assert [chunk.ids.tolist() for chunk in table.drain_evicted()] == [[1], [2], [3]]
        assert not list(table.drain_evicted())
    with embedding(on_full="evict", on_evict="keep", tiers=TierBudgets(host_bytes="4KiB")) as full:
        for first in range(0, 400, 40):
            update(full(torch.arange(first, first + 40)))
        assert full.stats().eviction.undelivered == full.stats().dropped_rows > 0
        assert full.stats().eviction.evicted == 0


@pytest.mark.parametrize("given", ["drop", 3, ["keep"], np.array(["keep"]), np.array([1, 2])])
def test_what_is_no_hook_is_refused(given):
    with pytest.raises(ConfigError, match=r"on_evict=.* is not known: give a function of one argument"):
        embedding(on_evict=given)


def test_a_copy_tells_the_same_hook():
    hook = Hook()
    table = dying(hook)
    update(table(torch.tensor([1])))
    twin = copy.deepcopy(table)
    for each in (table, twin):
        update(each(torch.tensor([2])))
        each.close()
    assert len(hook.rows) == 2
    assert hook.rows[0] == hook.rows[1]


def test_a_table_that_is_dropped_is_freed_and_its_rows_are_told():
    rows: list[int] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = dying(self.told)

        def told(self, chunk: EvictedRows) -> None:
            rows.extend(chunk.ids.tolist())

    model = Model()
    update(model.table(torch.tensor([1])))
    update(model.table(torch.tensor([2])))
    gone = weakref.ref(model)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "embcache-evicted-item"]
    del model
    gc.collect()
    thread.join(60)
    assert rows == [1]
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()


SCRIPT = """
import sys, torch
from torchrec_embcache import EmbCacheEmbedding, TierBudgets, eviction, optimizers
def hook(rows):
    print(rows.step, sorted(rows.ids.tolist()), flush=True)
    {body}
table = EmbCacheEmbedding(name="t", embedding_dim=2, tiers=TierBudgets({tiers}), optimizer=optimizers.SGD(lr=1.0),
                          eviction=eviction.Policy([eviction.Ttl(steps=1)], every_steps=1), on_evict=hook)
for row_id in range(3):
    table(torch.tensor([row_id])).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("on_ssd", [False, True])
def test_a_process_that_ends_tells_what_is_left(tmp_path, on_ssd, fails):
    tiers = f"host_bytes='1MiB', ssd_bytes='64MiB', ssd_dir={str(tmp_path)!r}" if on_ssd else "host_bytes='1MiB'"
    text = SCRIPT.format(body="raise ValueError('no store')" if fails else "", tiers=tiers)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 [0]", "3 [1]"], done.stderr
    assert ("unreported error: on_evict of table 't' raised ValueError: no store" in done.stderr) == fails


def told_on(rank: int, world: int, shardings: Any, fails: bool) -> tuple[list[Row], int, list[tuple[int, str]]]:
    """Trains some batches.

    Returns the rows delivered to the hooks of this rank, the number of evicted rows, and the errors raised with their steps.
    """
    rows: list[Row] = []
    failures = [ValueError("no store")] if fails and rank == 1 else []

    def hook(chunk: EvictedRows) -> None:
        rows.extend((chunk.table, row_id, chunk.step, chunk.reason) for row_id in chunk.ids.tolist())
        if failures:
            raise failures.pop()

    policy = Policy([Ttl(steps=3), L2Norm(below=0.02)], every_steps=2)
    options = {"eviction": policy, "score_half_life_steps": HALF_LIFE, "on_evict": hook}
    model = Model(Settings(options=options))
    apply_optimizer_in_backward(torch.optim.SGD, model.table_parameters(), {"lr": 0.5})
    model = sharded(model, shardings)
    raised: list[tuple[int, str]] = []
    steps = 0
    while steps < 12 or (fails and not raised and steps < 3000):
        for batch in batches(12, rank, world):
            try:
                train_model(model, [batch])
            except EvictionHookError as error:
                raised.append((steps, str(error).split(" (")[0]))
            steps += 1
    tables = [table for module in cache_modules(model).values() for table in module.tables.values()]
    for table in tables:
        len(table)
    evicted = sum(table.stats().eviction.evicted for table in tables)
    for table in tables:
        table.close()
    return rows, evicted, raised


@pytest.mark.parametrize("shardings", [ROW_WISE, MIXED], ids=["row-wise", "mixed"])
def test_two_ranks_tell_the_rows_that_one_rank_tells(two_ranks, tmp_path, shardings):
    with process_group(0, 1, str(tmp_path / "store")):
        rows, evicted, raised = told_on(0, 1, shardings, fails=False)
    results = two_ranks.run(told_on, shardings, False)
    assert (len(rows), raised) == (evicted, [])
    assert rows
    assert sorted(row for result in results for row in result[0]) == sorted(rows)
    assert all(result[0] and result[2] == [] for result in results)


def test_callback_error_on_one_rank_is_raised_on_both(two_ranks):
    first, second = two_ranks.run(told_on, ROW_WISE, True)
    for rows, evicted, _ in (first, second):
        assert len(rows) == evicted > 0
    ((step, said),) = first[2]
    ((other_step, other_said),) = second[2]
    assert step == other_step
    assert said == f"rank 1: {other_said}"
    assert other_said.endswith("raised ValueError: no store")


@pytest.mark.slow
def test_modules_with_a_hook_are_compiled_and_traced_and_copied():
    hook = Hook()
    table = dying(hook)
    compiled = torch.compile(table, backend="eager")
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(copy.deepcopy(table)))
    for module in (compiled, traced):
        for row_id in range(3):
            update(module(torch.tensor([row_id])))
    table.close()
    dict(traced.named_modules())["0"].close()
    assert len(hook.rows) == 4
    assert sorted(hook.rows)[::2] == sorted(hook.rows)[1::2], "each told rows 0 and 1"
