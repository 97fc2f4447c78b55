"""Ctrl-C at any line of what sweeps several tables whose rules ranks agree on: all of them are swept, or none, and the next call
goes on.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor

from interrupts import PACKAGE, Lines, is_interrupt, points, result, stopped
from processes import Child, World, process_group
from torchrec_embcache import (
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    TierBudgets,
    cache_modules,
    evict,
    initializers,
    set_time,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import Keep, Policy, Rule, Share, Ttl
from torchrec_models import ROW_WISE, sharded

BEGIN = 1_700_000_030
# One table of each kind of rule that ranks agree on. Each takes some of the 60 ids of these steps and leaves some.
RULES: dict[str, Rule] = {"ta": Keep(40), "tb": Share(0.3), "tc": Ttl(seconds=3)}
STEPS = 5
Operation = Callable[[Any, Path], object]
OPERATIONS: dict[str, Operation] = {
    "evict": lambda model, _path: evict(model),
    "save": lambda model, path: (Saver() if dist.get_world_size() > 1 else Saver(0)).save(model, path),
    "step": lambda model, _path: train(model, STEPS),
}


def made(name: str) -> Any:
    """A model that is trained until it is to be swept: by a call or a save now, or by the step that comes next."""
    every = STEPS if name == "step" else None
    configs = [
        EmbCacheEmbeddingConfig(
            name=table,
            embedding_dim=4,
            num_embeddings=10**9,
            feature_names=[table],
            total_num_buckets=7,
            initializer=initializers.Uniform(-0.5, 0.5),
            eviction=Policy([rule], every_steps=every),
            score_half_life_steps=2,
        )
        for table, rule in RULES.items()
    ]
    model = sharded(
        EmbCacheEmbeddingCollection(configs, tiers=TierBudgets(host_bytes="4MiB"), name="life"),
        ROW_WISE,
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
    )
    for step in range(1, STEPS if name == "step" else STEPS + 1):
        train(model, step)
    return model


def train(model: Any, step: int) -> None:
    """A step a second, of 20 ids of each table on each rank. Half of these come in the next step too."""
    set_time(model, BEGIN + step)
    ids = (torch.arange(20) + 10 * step + 200 * dist.get_rank()) % 260
    features = KeyedJaggedTensor(list(RULES), ids.repeat(3), lengths=torch.full((3,), 20))
    out = model(features)
    torch.stack([(jagged.values() + 1).square().sum() for jagged in out.values()]).sum().backward()


Rows = dict[str, dict[int, bytes]]


def rows_of(model: Any) -> Rows:
    """Every bit of every row of this rank, by table and id."""
    (module,) = cache_modules(model).values()
    return {
        name: {
            int(row_id): torch.cat([chunk.weights[n], chunk.slots["sum"][n].view(-1)]).numpy().tobytes()
            for chunk in table.export()
            for n, row_id in enumerate(chunk.ids)
        }
        for name, table in module.tables.items()
    }


def step_of(model: Any) -> int:
    (module,) = cache_modules(model).values()
    (step,) = {table.step() for table in module.tables.values()}
    return step


def agreed(value: Any) -> Any:
    """Returns `value`, and checks that all ranks have the same one."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    assert everyone == [value] * len(everyone)
    return value


def check_a_stop(name: str, stop_at: int, within: str, folder: Path, references: list[Rows]) -> bool:
    """Stops an operation at a line, and repeats it. Returns true if the tables were swept when it was stopped."""
    before, swept, expected = references
    model = made(name)
    at, error = stopped(lambda: OPERATIONS[name](model, folder), stop_at, within)
    assert is_interrupt(error), (at.stopped_at, error)
    assert at.stopped_at
    try:
        if name == "step":
            del error  # the frames of a step hold its batch, whose rows a sweep spares
        gc.collect()
        agreed(at.stopped_at)
        is_made = agreed(step_of(model) == STEPS)
        now = rows_of(model)
        if is_made:
            states = {table: now[table] == rows for table, rows in swept.items()}
            assert agreed(len(set(states.values()))) == 1, f"some tables are swept and others are not: {states}"
            assert set(states.values()) == {True} or now == before
        (OPERATIONS[name] if not is_made else OPERATIONS["evict"])(model, folder)
        if name == "save":
            OPERATIONS[name](model, folder)
        assert rows_of(model) == swept
        train(model, STEPS + 1)
        evict(model)
        assert rows_of(model) == expected
    except BaseException as wrong:
        raise AssertionError(f"after an interrupt at {at.stopped_at}, line {stop_at}") from wrong
    return agreed(now == swept)


def interrupt(name: str, within: str, base: Path, turn: int, say: Callable[[Any], None] = lambda _: None) -> Any:
    """Stop an operation at one line after the other. How many lines were tried, and how the tables were at them."""
    # A step whose sweep is never due says what the rows are before it.
    model = made("evict")
    before = rows_of(model)
    model = made(name)
    with Lines(None, within) as lines:
        OPERATIONS[name](model, base / "count")
    swept = rows_of(model)
    for table, rows in swept.items():
        assert 0 < len(rows) < len(before[table]), table
    train(model, STEPS + 1)
    evict(model)
    expected, found = rows_of(model), set()
    count = agreed(lines.count)
    tried = sorted(
        {*points(count, turn), count - 1}
    )  # the last line is one that comes after the sweep, where there is one
    for stop_at in tried:
        folder = base / str(stop_at)
        found.add(check_a_stop(name, stop_at, within, folder, [before, swept, expected]))
        say(None)  # it goes on; a listener waits for one line at most
    return len(tried), found


def interrupt_alone(say: Callable[[Any], None], name: str, base: Path) -> None:
    with process_group(0, 1, str(base / "store")):
        say(interrupt(name, PACKAGE, base, list(OPERATIONS).index(name) * 7, say))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_line_sweeps_all_tables_or_none(name: str, tmp_path: Path) -> None:
    tried, found = result(Child(interrupt_alone, name, tmp_path, daemon=False))
    assert tried > 20
    assert found == {False, True}


def interrupt_ranks(_rank: int, _world: int, name: str, file: str, base: Path) -> Any:
    return interrupt(name, f"{PACKAGE}/{file}", base, 0)


@pytest.mark.parametrize(
    ("name", "file"),
    [("evict", "_dist/ranks.py"), ("save", "model/_evict.py"), ("step", "table/_sweep.py")],
)
def test_interrupt_of_all_ranks_sweeps_all_tables_or_none(
    two_ranks: World, name: str, file: str, tmp_path: Path
) -> None:
    """As Ctrl-C comes to all processes of a terminal."""
    (tried, found), other = two_ranks.run(interrupt_ranks, name, file, tmp_path)
    assert (tried, found) == other
    assert tried > 20
    # The sweep is the last that this file does.
    assert found == ({False} if file == "model/_evict.py" else {False, True})
