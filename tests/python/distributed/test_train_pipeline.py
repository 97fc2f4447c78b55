"""TorchRec's pipelines and the lookahead pipeline on two ranks match a plain loop bit for bit."""

import gc
import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from torchrec_embcache import EmbCacheTrainPipelineSparseDist, TierBudgets, admission, cache_modules, eviction
from torchrec_embcache._device.tier import DeviceTier
from torchrec_embcache._lookup.group import IdBatch, LookupGroup
from torchrec_embcache.exceptions import ConfigError, InputError
from torchrec_models import (
    CPU,
    MIXED,
    TABLE_WISE,
    Batch,
    Model,
    Settings,
    batches,
    dense_optimizer,
    drain,
    pinned_rows,
    rows_of,
    sharded,
    train,
)

FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}
STEPS = 12


def made(settings: Settings | None = None) -> Any:
    return sharded(Model(settings or Settings()), MIXED, FUSED)


def _pipelines(rank: int, world: int, kind: str, lookahead: int, settings: Settings | None = None) -> Any:
    plain = made(settings)
    want = train(plain, batches(STEPS, rank, world))
    model = made(settings)
    optimizer = dense_optimizer(model)
    pipelines = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}
    if kind in pipelines:
        pipeline = pipelines[kind](model, optimizer, CPU)
    else:
        pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, CPU, lookahead=lookahead)
    got = drain(pipeline, batches(STEPS, rank, world))
    pinned = pinned_rows(model)
    dense = {name: value for name, value in plain.state_dict().items() if "linear" in name}
    same_dense = all(torch.equal(value, model.state_dict()[name]) for name, value in dense.items())
    return torch.equal(got, want), rows_of(model) == rows_of(plain), same_dense, pinned, len(rows_of(plain))


@pytest.mark.parametrize(
    ("kind", "lookahead"), [("base", 0), ("sparse", 0), *(("ahead", depth) for depth in range(1, 9))]
)
def test_a_pipeline_gives_the_bits_of_the_plain_loop(two_ranks, kind, lookahead):
    for losses, rows, dense, pinned, count in two_ranks.run(_pipelines, kind, lookahead):
        assert losses
        assert rows
        assert dense
        assert pinned == 0
        assert count


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lookahead"), [("base", 0), ("sparse", 0), ("ahead", 1), ("ahead", 5)])
@pytest.mark.parametrize(
    "options",
    [
        {"admission": admission.Count(3)},
        {"admission": admission.Probability(0.3)},
        {"eviction": eviction.Policy([eviction.Ttl(steps=2)], every_steps=2)},
        {"eviction": eviction.Policy([eviction.Score(below=1.5)], every_steps=3), "score_half_life_steps": 3},
    ],
    ids=["count", "coin", "time", "score"],
)
def test_a_pipeline_admits_and_evicts_the_ids_that_the_plain_loop_does(two_ranks, kind, lookahead, options):
    everything = sum(result[4] for result in two_ranks.run(_pipelines, "base", 0))
    left = 0
    for losses, rows, dense, pinned, count in two_ranks.run(_pipelines, kind, lookahead, Settings(options=options)):
        assert losses
        assert rows
        assert dense
        assert pinned == 0
        left += count
    assert 0 < left < everything


def _plans_ahead(rank: int, world: int) -> Any:
    model = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=3)
    steps = batches(STEPS, rank, world)
    pipeline.progress(steps)
    queued = len(pipeline.batches)
    pinned = pinned_rows(model)
    pipeline.reset()
    gc.collect()
    forgotten = pinned_rows(model)
    rest = drain(pipeline, batches(2, rank, world))
    return queued, pinned, forgotten, len(rest)


def test_lookahead_pins_rows_of_next_batches_and_reset_unpins(two_ranks):
    for queued, pinned, forgotten, rest in two_ranks.run(_plans_ahead):
        assert queued == 4
        assert pinned > 0
        assert forgotten == 0
        assert rest == 2


def _evaluated(rank: int, world: int) -> Any:
    model = made()
    train(model, batches(3, rank, world))
    before = rows_of(model)
    model.eval()
    with torch.no_grad():
        want = torch.stack([model(batch)[1][0] for batch in batches(STEPS, rank, world)])
    results = []
    for pipeline in (
        EvalPipelineSparseDist(model, dense_optimizer(model), CPU),
        EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=2),
    ):
        with torch.no_grad():
            results.append(torch.equal(drain(pipeline, batches(STEPS, rank, world)), want))
        pipeline.detach()
    return results, rows_of(model) == before, pinned_rows(model)


def test_evaluation_pipelines_give_the_same_bits_and_change_nothing(two_ranks):
    for results, unchanged, pinned in two_ranks.run(_evaluated):
        assert results == [True, True]
        assert unchanged
        assert pinned == 0


def _interrupted(rank: int, world: int) -> Any:
    """Evaluate by hand in the middle of training."""
    plain = made()
    want = train(plain, batches(STEPS, rank, world))
    model = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=2)
    steps = batches(STEPS, rank, world)
    losses = [pipeline.progress(steps)[0] for _ in range(4)]
    pipeline.detach()
    model.eval()
    with torch.no_grad():
        model(next(batches(1, rank, world)))
    model.train()
    pipeline.attach()
    losses += list(drain(pipeline, steps))
    return torch.equal(torch.stack(losses), want), rows_of(model) == rows_of(plain)


def test_training_goes_on_after_an_evaluation_in_between(two_ranks):
    for losses, rows in two_ranks.run(_interrupted):
        assert losses
        assert rows


def _one_bad_batch(rank: int, world: int) -> Any:
    good = list(batches(STEPS, rank, world))
    steps = list(good)
    if rank == 0:
        features = good[5].features
        bad = KeyedJaggedTensor(features.keys(), features.values().float(), lengths=features.lengths())
        steps[5] = Batch(bad, good[5].target)
    model = made()
    pipeline = EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=3)
    source = iter(steps)
    failed = []
    losses = []
    for step in range(STEPS):
        try:
            losses.append(pipeline.progress(source)[0])
        except InputError as error:
            failed.append((step, "float32" in str(error)))
    plain = made()
    want = train(plain, iter([batch for place, batch in enumerate(good) if place != 5]))
    gc.collect()
    return failed, torch.equal(torch.stack(losses), want), rows_of(model) == rows_of(plain), pinned_rows(model)


def test_bad_batch_of_one_rank_fails_its_step_on_all_ranks(two_ranks):
    for failed, losses, rows, pinned in two_ranks.run(_one_bad_batch):
        assert failed == [(5, True)]
        assert losses
        assert rows
        assert pinned == 0


def _crowded(rank: int, world: int, folder: str, lookahead: int) -> Any:

    warnings.simplefilter("ignore")
    plain = made()
    train(plain, batches(STEPS, rank, world))
    tiers = TierBudgets(host_bytes="12KiB", ssd_bytes="32MiB", ssd_dir=folder)
    model = made(Settings(tiers=tiers))
    drain(
        EmbCacheTrainPipelineSparseDist(model, dense_optimizer(model), CPU, lookahead=lookahead),
        batches(STEPS, rank, world),
    )
    result = rows_of(model) == rows_of(plain), pinned_rows(model)
    evicted = sum(
        table.stats().host.evictions for module in cache_modules(model).values() for table in module.tables.values()
    )
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table.close()
    return (*result, evicted)


@pytest.mark.parametrize("lookahead", [1, 8])
def test_lookahead_over_an_ssd_tier_gives_the_bits_of_memory(two_ranks, tmp_path, lookahead):
    tmp_path.chmod(0o700)
    results = two_ranks.run(_crowded, str(tmp_path), lookahead)
    for rows, pinned, _ in results:
        assert rows
        assert pinned == 0
    assert sum(evicted for *_, evicted in results) > 0


def _one_rank_cannot_move_ahead(rank: int, world: int, lookahead: int) -> Any:
    plain = made()
    want = train(plain, batches(STEPS, rank, world))
    model = made(Settings(tiers=TierBudgets(device_bytes="3KiB", host_bytes="4MiB")))
    optimizer = dense_optimizer(model)
    moved: list[int] = []
    failures: list[Exception] = []
    place_next, scatter = LookupGroup.place_next, DeviceTier.scatter

    def some_fail(self: LookupGroup, ids: IdBatch, _: Any) -> None:
        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        moved.append(1)
        DeviceTier.scatter = fails if rank == 0 and len(moved) % 3 else scatter  # type: ignore[method-assign]
        place_next(self, ids, failures.append)
        DeviceTier.scatter = scatter  # type: ignore[method-assign]

    LookupGroup.place_next = some_fail  # type: ignore[method-assign]
    try:
        pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, CPU, lookahead=lookahead)
        got = drain(pipeline, batches(STEPS, rank, world))
    finally:
        LookupGroup.place_next = place_next  # type: ignore[method-assign]
    return torch.equal(got, want), rows_of(model) == rows_of(plain), pinned_rows(model), len(failures)


@pytest.mark.parametrize("lookahead", [1, 5])
def test_rank_that_cannot_prefetch_keeps_pace_with_others(two_ranks, lookahead):
    results = two_ranks.run(_one_rank_cannot_move_ahead, lookahead)
    for losses, rows, pinned, _ in results:
        assert losses
        assert rows
        assert pinned == 0
    assert results[0][3] > STEPS // 2
    assert results[1][3] == 0


@pytest.mark.parametrize("lookahead", [0, 9, -1, 1.5, True])
def test_a_lookahead_out_of_range_is_refused(lookahead):
    with pytest.raises(ConfigError, match="lookahead="):
        EmbCacheTrainPipelineSparseDist(torch.nn.Linear(1, 1), None, CPU, lookahead=lookahead)


def test_the_other_options_and_their_defaults_are_torchrecs():
    ours, theirs = (
        {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        for kind in (EmbCacheTrainPipelineSparseDist, TrainPipelineSparseDist)
    )
    assert ours.pop("lookahead") == 1
    assert ours == theirs


OPTIONS = ("free_features_storage_early", "clear_data_dist_inputs", "enqueue_batch_after_forward")


def _with_options(rank: int, world: int, kind: str, shardings: dict[str, str], names: tuple[str, ...]) -> Any:
    want = train(sharded(Model(), shardings, FUSED), batches(STEPS, rank, world))
    model, steps, events, cleared = sharded(Model(), shardings, FUSED), [], [], []
    model.register_forward_hook(lambda *_: events.append("forward"))

    def loader() -> Any:
        for step in batches(STEPS, rank, world):
            events.append("load")
            steps.append(step)
            yield step

    def clear_inputs(self: KJTAllToAllTensorsAwaitable) -> int:
        cleared.append(clear(self))
        return cleared[-1]

    clear = KJTAllToAllTensorsAwaitable.clear_inputs
    pipelines = {"sparse": TrainPipelineSparseDist, "ahead": partial(EmbCacheTrainPipelineSparseDist, lookahead=2)}
    try:
        KJTAllToAllTensorsAwaitable.clear_inputs = clear_inputs
        pipeline = pipelines[kind](model, dense_optimizer(model), CPU, **dict.fromkeys(names, True))
        got = drain(pipeline, loader())
    finally:
        KJTAllToAllTensorsAwaitable.clear_inputs = clear
        PipelinedForward._use_main_stream_for_dist_init = False
    kept = sum(step.features.values().untyped_storage().size() for step in steps)
    return torch.equal(got, want), pinned_rows(model), kept, sum(cleared), events.index("forward")


@pytest.mark.parametrize("names", [*((name,) for name in OPTIONS), OPTIONS], ids=["free", "clear", "enqueue", "all"])
@pytest.mark.parametrize("shardings", [TABLE_WISE, MIXED], ids=["table-wise", "mixed"])
@pytest.mark.parametrize("kind", ["sparse", "ahead"])
def test_torchrec_memory_options_are_kept_with_the_same_bits(two_ranks, kind, shardings, names):
    for same, pinned, kept, cleared, loaded_before in two_ranks.run(_with_options, kind, shardings, names):
        assert same
        assert pinned == 0
        assert (kept == 0) == ("free_features_storage_early" in names)
        assert (cleared > 0) == ("clear_data_dist_inputs" in names)
        assert loaded_before == {"sparse": 3, "ahead": 4}[kind] - ("enqueue_batch_after_forward" in names)
