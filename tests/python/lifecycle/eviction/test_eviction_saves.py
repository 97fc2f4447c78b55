"""Tables that evict by rule, in every kind of save and load."""

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import dcp_cases
from lifecycle_cases import (
    DIM,
    DOORS,
    HALF_LIFE,
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
from tables import Contents, ssd_tiers
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    EmbCacheStorageWriter,
    TierBudgets,
    evict,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.eviction import L2Norm, Policy, Score, Share, Ttl
from torchrec_embcache.exceptions import StorageError
from torchrec_embcache.model import _evict

AT_SAVES = Policy([Ttl(steps=4), L2Norm(below=0.4)])


def trained(table: Any, seed: int, count: int = 12) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        update(table(torch.tensor(come_again(dice, 15))))


def on_ssd(folder: Path, **settings: Any) -> EmbCacheEmbedding:
    return embedding(tiers=budgets("ssd", folder), score_half_life_steps=HALF_LIFE, **settings)


@pytest.mark.parametrize("door", [*DOORS, "blocks"])
def test_every_door_saves_swept_tables(tmp_path, door):
    path = tmp_path / "saved"
    model = Expected(AT_SAVES)
    with on_ssd(tmp_path / "one", eviction=AT_SAVES) as one, on_ssd(tmp_path / "two", eviction=AT_SAVES) as two:
        for each in (one, model.table):
            trained(each, 1)
        if door in ("delta", "async delta", "compact"):
            save_by("full", one, path)
            model.sweep()
            for each in (one, model.table):
                trained(each, 2)
        before = len(model.table)
        model.sweep()
        assert 0 < len(model.table) < before
        expected = Contents.of(model.table)
        future = save_by(door, one, path)
        if future is not None:
            trained(one, 3, 5)
            assert future.result().rows
        else:
            assert Contents.of(one) == expected
        if door != "blocks":  # which put rows beside those that are there, where others replace them
            trained(two, 4, 3)
        load_by(door, two, path)
        assert Contents.of(two) == expected
        if future is None:
            for each in (one, two, model.table):
                trained(each, 5)
            save_by("full", one, tmp_path / "again")
            two.evict()
            model.sweep()
            assert Contents.of(one) == Contents.of(two) == Contents.of(model.table)


@pytest.mark.parametrize("door", ["megatron", "megatron async", "lightning", "dcp async"])
def test_the_doors_of_other_libraries_save_swept_tables_too(tmp_path, door):
    model, table, other = Expected(AT_SAVES), embedding(eviction=AT_SAVES, score_half_life_steps=HALF_LIFE), embedding()
    for each in (table, model.table):
        trained(each, 1)
    model.sweep()
    expected = Contents.of(model.table)
    path = tmp_path / "saved"
    with process_group(0, 1, str(tmp_path / "store")):
        from_library = {"lightning": by_lightning, "dcp async": by_dcp_async}.get(door, by_megatron)
        path = from_library(table, path, asynchronous="async" in door)
        if door == "dcp async":
            dcp_cases.load(dcp_cases.blank(dcp_cases.stageable(dcp_cases.dense_state())), path, other)
        else:
            Saver(path_checks="basic").load(other, path)
    assert Contents.of(other) == Contents.of(table) == expected


def by_lightning(table: EmbCacheEmbedding, path: Path, *, asynchronous: bool) -> Path:
    assert not asynchronous
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec_embcache.integrations.lightning import EmbCacheCheckpoint

        # Lightning saves after a validation, with the model in eval mode.
        EmbCacheCheckpoint(path).on_save_checkpoint(None, table.eval(), {"state_dict": table.state_dict()})
    return path


def by_dcp_async(table: EmbCacheEmbedding, path: Path, *, asynchronous: bool) -> Path:
    assert asynchronous
    state = dcp_cases.stageable(dcp_cases.dense_state(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.async_save(state, storage_writer=EmbCacheStorageWriter(path, table)).result()
    return path


def by_megatron(table: EmbCacheEmbedding, path: Path, *, asynchronous: bool) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing

        from torchrec_embcache.integrations import megatron
    megatron.register()
    path.mkdir()
    state = {"model": {}, **megatron.sharded_tables(table)}
    request = dist_checkpointing.save(state, str(path), megatron.STRATEGY, async_sharded_save=asynchronous)
    if asynchronous:
        assert request.async_fn is None, "there are no tensors, which another process would write"
        for finalize in request.finalize_fns:
            finalize()
    return path / "embcache-embcache"


@pytest.mark.parametrize("door", ["full", "async", "dcp", "blocks"])
def test_save_whose_sweep_fails_writes_nothing_and_next_works(tmp_path, monkeypatch, door):
    path = tmp_path / "saved"
    table = embedding(eviction=AT_SAVES)
    trained(table, 1)
    before = Contents.of(table)

    def fail(_tables: object, _rules: object) -> None:
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(_evict, "sweep_prepared", fail)
        with pytest.raises((Exception, CheckpointException), match="the disk is gone"):
            save_by(door, table, path)
    assert Contents.of(table) == before
    assert not path.exists() or not [entry for entry in path.iterdir() if entry.name != "lock"]
    future = save_by(door, table, path)
    if future is not None:
        future.result()
    assert len(table) < len(before.rows)


def test_a_policy_with_a_number_of_steps_is_not_applied_at_saves(tmp_path):
    table = embedding(eviction=Policy([Ttl(steps=1)], every_steps=100))
    trained(table, 1)
    rows = len(table)
    Saver(0).save(table, tmp_path / "saved")
    assert len(table) == rows
    evict(table)
    assert len(table) < rows


def test_saving_twice_after_one_step_gives_the_same_rows(tmp_path):
    table = embedding(eviction=AT_SAVES)
    trained(table, 1)
    saver = Saver(0)
    first = saver.save(table, tmp_path / "saved")
    contents = Contents.of(table)
    second = saver.save(table, tmp_path / "saved", incremental=True)
    assert Contents.of(table) == contents
    assert first.rows == len(contents.rows)
    assert (second.kind, second.rows, second.tombstones) == ("delta", 0, 0)


def test_what_is_not_trained_is_saved_as_it_is(tmp_path):
    """Pretrained rows of a module that saw no step, and tables without an optimizer, as for evaluation."""
    policy = Policy([Score(below=0.5)])
    imported = embedding(eviction=policy)
    imported.import_rows([1, 2], torch.ones(2, DIM))
    assert Saver(0).save(imported, tmp_path / "imported").rows == 2
    update(imported(torch.tensor([7])))
    Saver(0).save(imported, tmp_path / "imported")
    assert ids_of(imported) == [7], "rows that were imported without metadata have the score 0"

    def collection(**settings: Any) -> EmbCacheEmbeddingCollection:
        config = EmbCacheEmbeddingConfig(name="s", embedding_dim=DIM, num_embeddings=9, feature_names=["f"], **settings)
        return EmbCacheEmbeddingCollection([config], tiers=TierBudgets(host_bytes="1MiB"))

    first, second = collection(), collection(eviction=Policy([L2Norm(below=1e9)]))
    apply_optimizer_in_backward(torch.optim.SGD, first.parameters(), {"lr": 0.1})
    first.sync_optimizers()
    first.tables["s"]._native_table.set_step(5)
    first.tables["s"].import_rows([1, 2, 3], torch.ones(3, DIM))
    Saver(0).save(first, tmp_path / "trained")
    Saver(0).load(second.eval(), tmp_path / "trained", slots=False)
    assert Saver(0).save(second, tmp_path / "evaluated").rows == 3
    evict(second)
    assert len(second.tables["s"]) == 0


def test_a_load_goes_on_with_the_rules_of_the_table_that_loads(tmp_path):
    first, model = embedding(eviction=AT_SAVES, score_half_life_steps=HALF_LIFE), Expected(AT_SAVES)
    for each in (first, model.table):
        trained(each, 1)
    Saver(0).save(first, tmp_path / "saved")
    model.sweep()
    later = Policy([Ttl(steps=1)], every_steps=2)
    second = embedding(eviction=later, score_half_life_steps=HALF_LIFE)
    Saver(0).load(second, tmp_path / "saved")
    assert model.is_same(second)
    model.policy = later
    dice = random.Random(6)
    for _ in range(7):
        ids = come_again(dice, 12)
        out = second(torch.tensor(ids))
        update(out)
        assert torch.equal(out.detach(), model.train(ids))
    assert model.is_same(second)


@pytest.mark.parametrize("swept", ["by a call", "by a save"])
def test_share_taken_before_a_flush_is_not_taken_after_resume(tmp_path, swept):
    def made(reopen: str | None) -> EmbCacheEmbedding:
        tiers = ssd_tiers(tmp_path / "tiers", host_bytes="16KiB", ssd_bytes="64MiB", reopen=reopen)
        return embedding(tiers=tiers, eviction=Policy([Share(0.2)]), score_half_life_steps=HALF_LIFE)

    def sweep(table: EmbCacheEmbedding) -> None:
        if swept == "by a call":
            evict(table)
        else:
            Saver(0).save(table, tmp_path / "saved")

    with made(None) as table:
        trained(table, 1)
        before = len(table)
        sweep(table)
        after = len(table)
        assert after == before - before // 5
    with made("resume") as table:
        sweep(table)
        assert len(table) == after
        trained(table, 2, 1)
        grown = len(table)
        sweep(table)
        assert len(table) == grown - grown // 5


@pytest.mark.parametrize("before", ["a save", "a load", "a call"])
def test_a_copy_gives_no_second_share_of_rows_that_were_not_trained(tmp_path, before):
    table = embedding(eviction=Policy([Share(0.2)]), score_half_life_steps=HALF_LIFE)
    trained(table, 1)
    if before == "a call":
        evict(table)
    else:
        Saver(0).save(table, tmp_path / "saved")
    if before == "a load":
        table = embedding(eviction=Policy([Share(0.2)]), score_half_life_steps=HALF_LIFE)
        Saver(0).load(table, tmp_path / "saved")
    rows = len(table)
    made = copy.deepcopy(table)
    assert Saver(0).save(made, tmp_path / "of the copy").rows == len(made) == rows
    trained(made, 2, 1)
    grown = len(made)
    assert Saver(0).save(made, tmp_path / "of the copy").rows == grown - grown // 5


@pytest.mark.parametrize("flushed", ["before", "after", "closed"])
def test_a_resume_has_the_rows_of_the_flush(tmp_path, flushed):
    def made(reopen: str | None) -> EmbCacheEmbedding:
        tiers = ssd_tiers(tmp_path, host_bytes="16KiB", ssd_bytes="64MiB", reopen=reopen)
        return embedding(tiers=tiers, eviction=AT_SAVES, score_half_life_steps=HALF_LIFE)

    model = Expected(AT_SAVES)
    with made(None) as table:
        for each in (table, model.table):
            trained(each, 1, 40)
        if flushed == "before":
            table.flush()
        expected = Contents.of(table)
        table.evict()
        if flushed != "before":
            model.sweep()
            expected = Contents.of(model.table)
        if flushed == "after":
            table.flush()
        if flushed != "closed":
            table.table._set_unflushable()
    with made("resume") as table:
        assert Contents.of(table) == expected
        if flushed == "before":
            model.sweep()
            table.evict()
        for each in (table, model.table):
            trained(each, 2)
        assert model.is_same(table)
