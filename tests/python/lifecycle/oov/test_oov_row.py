"""`not_admitted="oov"`: one row of a table for all ids that are not admitted, trained by their gradients."""

import copy
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lifecycle_cases import DIM, DOORS, TIERS, Ahead, budgets, embedding, features, load_by, random_ids, save_by, update
from oov_cases import state_of
from tables import OPTIMIZERS, Contents, jagged, make_bag, ssd_tiers
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingConfig,
    TierBudgets,
    _native,
    admission,
    optimizers,
)
from torchrec_embcache._kernels.oov_row import exact_sums
from torchrec_embcache._lookup.group import IdBatch, LookupGroup
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import ConfigError, InputError, StateError

SHARED = {"admission": admission.Count(3), "not_admitted": "oov"}
# An id of a table without admission that takes the part of the OOV row.
STAND_IN = 2**50


def bag(**settings: Any) -> EmbCacheEmbeddingBag:
    return make_bag(**{"name": "bag", "tiers": TIERS, "optimizer": optimizers.SGD(lr=0.1), **settings})


def shared_row(table: Any) -> torch.Tensor:
    return torch.from_numpy(table.table.oov_row())


class Plain(nn.Module):
    """A dict of parameters, one for each id that a dict of counts has admitted, and one for all others."""

    def __init__(self, births: EmbCacheEmbedding | EmbCacheEmbeddingBag, threshold: int, lr: float) -> None:
        super().__init__()
        self.births, self.threshold = births, threshold
        self.counts: Counter[int] = Counter()
        self.rows: dict[int, nn.Parameter] = {}
        self.shared = nn.Parameter(torch.zeros(DIM))
        self.optimizer = torch.optim.SGD([self.shared], lr=lr)

    def read(self, ids: list[int]) -> torch.Tensor:
        """[n, D]: what a training batch of `ids` reads."""
        for row_id, occurrences in Counter(ids).items():
            if row_id not in self.rows and self.counts[row_id] + occurrences >= self.threshold:
                birth = self.births.read_rows([row_id]).weights[0]
                self.rows[row_id] = nn.Parameter(birth.clone())
                self.optimizer.add_param_group({"params": [self.rows[row_id]]})
        self.counts.update(ids)
        return torch.stack([self.rows.get(row_id, self.shared) for row_id in ids])

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def pooled(rows: torch.Tensor, bags: list[list[int]], mode: str, weights: torch.Tensor | None) -> torch.Tensor:
    parts = torch.split(rows if weights is None else rows * weights[:, None], [len(bag) for bag in bags])
    return torch.stack([part.mean(0) if mode == "mean" and len(part) else part.sum(0) for part in parts])


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_bags_of_refused_ids_train_what_a_model_of_plain_torch_trains(backend, mode):
    dice = random.Random(1)
    torch.manual_seed(1)
    made = bag(mode="mean" if mode == "mean" else "sum", **SHARED, **backend)
    model = Plain(bag(), 3, 0.1)
    for _ in range(12):
        bags = [random_ids(dice, dice.randrange(4)) for _ in range(6)] + [random_ids(dice, 2)]
        ids, offsets = jagged(bags)
        weights = torch.rand(len(ids), requires_grad=True) if mode == "weighted" else None
        theirs = weights.detach().clone().requires_grad_() if weights is not None else None
        out = made(ids, offsets, weights)
        want = pooled(model.read(ids.tolist()), bags, mode, theirs)
        torch.testing.assert_close(out, want)
        target = torch.rand(out.shape)
        ((out - target) ** 2).mean().backward()
        model.update(((want - target) ** 2).mean())
        torch.testing.assert_close(shared_row(made), model.shared.detach())
        if weights is not None:
            torch.testing.assert_close(weights.grad, theirs.grad)
    assert len(made) == len(model.rows) > 0
    assert shared_row(made).abs().min() > 0
    torch.testing.assert_close(
        made.read_rows(list(model.rows)).weights, torch.stack(list(model.rows.values())).detach()
    )
    with torch.no_grad():
        made.eval()
        torch.testing.assert_close(made(torch.tensor([2**40]), torch.tensor([0])), model.shared.detach()[None])


@pytest.mark.parametrize("lookahead", [0, 4])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "device"])
def test_sequences_of_rejected_ids_train_as_in_plain_torch(tmp_path, tiers, lookahead):
    dice = random.Random(2)
    made = embedding(optimizer=optimizers.SGD(lr=0.02), tiers=budgets(tiers, tmp_path), **SHARED)
    model = Plain(embedding(), 3, 0.02)
    steps = [random_ids(dice, 12) for _ in range(25)]
    ahead = Ahead(made, steps, lookahead)
    for place, ids in enumerate(steps):
        ahead.of(place)
        out, want = made(torch.tensor(ids)), model.read(ids)
        torch.testing.assert_close(out, want)
        update(out)
        model.update((want * want + want).sum())
        torch.testing.assert_close(shared_row(made), model.shared.detach())
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_every_optimizer_trains_it_as_it_trains_a_row(backend, kind):
    dice = random.Random(3)
    made = bag(mode="sum", optimizer=OPTIMIZERS[kind], **{**SHARED, "admission": admission.ReadOnly()}, **backend)
    other = bag(mode="sum", optimizer=OPTIMIZERS[kind], **backend)
    other.import_rows([STAND_IN], np.zeros((1, DIM), np.float32))
    for table in (made, other):
        table.import_rows(range(6), np.full((6, DIM), 0.25, np.float32))
    for step in range(10):
        # The OOV row is not in every batch, and what decays decays only where it is.
        bags = [random_ids(dice, 3) if step % 3 else [dice.randrange(6)] for _ in range(5)]
        ids, offsets = jagged(bags)
        stood_in = torch.tensor([row_id if 0 <= row_id < 6 else STAND_IN for row_id in ids.tolist()])
        out, want = made(ids, offsets), other(stood_in, offsets)
        torch.testing.assert_close(out, want)
        update(out)
        update(want)
        rows = other.read_rows([STAND_IN])
        slots = [slot[0].reshape(-1) for slot in rows.slots.values()]
        state = torch.from_numpy(made.table._native_table.oov_row())
        torch.testing.assert_close(state, torch.cat([rows.weights[0], *slots]))
    assert len(made) == 6


def test_max_gradient_clamps_what_it_is_trained_by(backend):
    made = bag(mode="sum", optimizer=optimizers.SGD(lr=1.0, max_gradient=0.5), **SHARED, **backend)
    out = made(torch.tensor([1, 2]), torch.tensor([0, 1]))
    (out * 100).sum().backward()
    assert made.table.oov_row().tolist() == [-1.0] * DIM


def run(table: EmbCacheEmbedding, steps: list[list[int]], lookahead: int) -> tuple[bytes, Contents]:
    ahead = Ahead(table, steps, lookahead)
    for place, ids in enumerate(steps):
        ahead.of(place)
        update(table(torch.tensor(ids)))
    found = state_of(table), Contents.of(table)
    table.close()
    return found


def test_budgets_lookahead_and_threads_do_not_change_a_bit(tmp_path, monkeypatch):
    dice = random.Random(4)
    steps = [random_ids(dice, 700) for _ in range(12)]
    given = {"embedding_dim": 33, "optimizer": optimizers.Adam(lr=0.1), **SHARED}
    want = run(embedding(**given), steps, 0)
    for threads in ("1", "5"):
        monkeypatch.setenv("EMBCACHE_THREADS", threads)
        for tiers in ("ram", "ssd", "device"):
            for lookahead in (0, 3):
                table = embedding(**given, tiers=budgets(tiers, tmp_path / f"{threads}{tiers}{lookahead}"))
                assert run(table, steps, lookahead) == want, (threads, tiers, lookahead)


def test_sums_are_exact_and_the_same_in_torch_and_in_the_core():
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(300, 5, generator=generator) * torch.exp2(
        torch.randint(-140, 120, (300, 5), generator=generator)
    )
    rows[7, 0], rows[8, 1] = float("nan"), float("-inf")
    rows[9] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38])
    with bag(embedding_dim=5, mode="sum", **{**SHARED, "admission": admission.ReadOnly()}) as table:
        group = LookupGroup([table.table], [0], lambda: table.optimizer.param_groups)
        ids = np.arange(300)
        planned = group.plan(IdBatch(ids, np.array([0, len(ids)]), None), train=True)
        planned.wait()
        sums = torch.from_numpy(planned.plan.oov_gradient_sums_sequence(rows.numpy(), 1))
        planned.release()
    assert torch.equal(sums, exact_sums(rows))
    assert torch.equal(sums, exact_sums(rows[:100]) + exact_sums(rows[100:]))
    # The last of ten integers of a column counts what is not finite.
    exact = sum(value << 32 * place for place, value in enumerate(sums[20:29].tolist()))
    assert exact == sum(int(float(value) * 2.0**149) for value in rows[:, 2].double().tolist())
    assert sums[[9, 19, 29, 39, 49, 50]].tolist() == [1, 1, 0, 0, 0, 300]


def test_a_forward_that_no_backward_follows_and_an_evaluation_leave_it():
    made = embedding(**SHARED)
    update(made(torch.tensor([1, 2])))
    before = state_of(made)
    made(torch.tensor([3, 4]))
    with torch.no_grad():
        assert torch.equal(made(torch.tensor([5]))[0], shared_row(made))
    made.eval()
    assert torch.equal(made(torch.tensor([5]))[0], shared_row(made))
    assert state_of(made) == before
    assert made.stats().step == 1
    assert embedding(**SHARED, missing="zeros").eval()(torch.tensor([5])).tolist() == [[0.0] * DIM]


def test_a_batch_reads_it_as_it_was_at_its_forward():
    """As `TrainPipelineSemiSync` does: a forward before the backward of the batch before."""
    made = bag(mode="sum", optimizer=optimizers.SGD(lr=1.0), **SHARED)
    weights = torch.tensor([2.0], requires_grad=True)
    ids, offsets = torch.tensor([1]), torch.tensor([0])
    first, second = made(ids, offsets), made(torch.tensor([2]), offsets, weights)
    first.sum().backward()
    assert made.table.oov_row().tolist() == [-1.0] * DIM
    second.sum().backward()
    assert weights.grad.tolist() == [0.0], "of the row as the forward read it"
    assert made.table.oov_row().tolist() == [-3.0] * DIM


def test_a_backward_that_is_refused_leaves_it():
    made = bag(mode="sum", **SHARED)
    offsets, weights = torch.tensor([0]), torch.tensor([2.0], requires_grad=True)
    update(made(torch.tensor([1]), offsets))
    before = state_of(made)
    scaled = weights * 1.0
    out = made(torch.tensor([1]), offsets, scaled)
    with torch.no_grad():
        scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert state_of(made) == before
    assert made.stats().step == 1


def test_an_update_that_fails_leaves_it_and_every_row(monkeypatch):
    monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    tiers = TierBudgets(host_bytes="16MiB", device_bytes="64KiB")
    made = embedding(**{**SHARED, "admission": admission.ReadOnly()}, tiers=tiers)
    made.import_rows([1], np.ones((1, DIM), np.float32))
    update(made(torch.tensor([1, 2])))
    before, rows = state_of(made), Contents.of(made)

    def no_memory(*_args: Any) -> Any:
        raise MemoryError("no memory for the new values")

    with monkeypatch.context() as patch:
        patch.setattr("torchrec_embcache._kernels.core.updated_rows", no_memory)
        with pytest.raises(MemoryError):
            update(made(torch.tensor([1, 2])))
    assert (state_of(made), Contents.of(made)) == (before, rows)
    update(made(torch.tensor([1, 2])))
    assert state_of(made) != before


# ---- checkpoints


def some(seed: int, steps: int, table: EmbCacheEmbedding) -> None:
    dice = random.Random(seed)
    for _ in range(steps):
        update(table(torch.tensor(random_ids(dice, 15))))


@pytest.mark.parametrize("door", DOORS)
def test_it_comes_back_with_every_kind_of_checkpoint(tmp_path, door):
    def made(name: str) -> EmbCacheEmbedding:
        tiers = ssd_tiers(tmp_path / name, host_bytes="64KiB", ssd_bytes="64MiB")
        return embedding(tiers=tiers, optimizer=optimizers.PartialRowWiseAdam(lr=0.1), **SHARED)

    path = tmp_path / "saved"
    with made("one") as one, made("two") as two:
        some(1, 20, one)
        model, other = nn.ModuleDict({"table": one}), nn.ModuleDict({"table": two})
        if door in ("delta", "async delta", "compact"):
            save_by("full", model, path)
            some(2, 10, one)
        expected = state_of(one), Contents.of(one)
        future = save_by(door, model, path)
        if future is not None:
            some(4, 10, one)
            assert state_of(one) != expected[0]
            future.result()
        assert main(["verify", str(path)]) == 0
        some(3, 5, two)
        load_by(door, other, path)
        assert (state_of(two), Contents.of(two)) == expected
        if future is None:
            for table in (one, two):
                some(5, 10, table)
            assert (state_of(two), Contents.of(two)) == (state_of(one), Contents.of(one))


@pytest.mark.parametrize("door", DOORS)
def test_one_with_numbers_that_are_none_is_saved_and_comes_back(tmp_path, door):
    def made(name: str) -> EmbCacheEmbedding:
        return embedding(tiers=ssd_tiers(tmp_path / name, ssd_bytes="64MiB"), **SHARED)

    path = tmp_path / "saved"
    with made("one") as one, made("two") as two:
        model, other = nn.ModuleDict({"table": one}), nn.ModuleDict({"table": two})
        some(1, 3, one)
        out = one(torch.tensor([2**40]))
        (out * torch.tensor([1.0, torch.nan, torch.inf, 1.0])).sum().backward()
        assert shared_row(one).isnan().any()
        if door in ("delta", "async delta", "compact"):
            save_by("full", model, path)
            some(2, 1, one)
        expected = state_of(one)
        future = save_by(door, model, path)
        if future is not None:
            future.result()
        assert main(["verify", str(path)]) == 0
        load_by(door, other, path)
        assert state_of(two) == expected


def test_a_resume_finds_it(tmp_path):
    def made(reopen: str | None) -> EmbCacheEmbedding:
        tiers = ssd_tiers(tmp_path, host_bytes="64KiB", ssd_bytes="64MiB", reopen=reopen)
        return embedding(tiers=tiers, **SHARED)

    with made(None) as table:
        some(1, 20, table)
        table.flush()
        flushed = state_of(table)
        some(2, 5, table)
        assert state_of(table) != flushed
        table.table._close_unflushed()
    with made("resume") as table:
        assert state_of(table) == flushed


def test_resharding_and_converting_keep_it(tmp_path, capsys):
    made, other = embedding(**SHARED), embedding(**SHARED)
    some(1, 20, made)
    Saver(0).save(made, tmp_path / "saved")
    assert main(["inspect", str(tmp_path / "saved")]) == 0
    assert "OOV row" in capsys.readouterr().out
    assert main(["reshard", str(tmp_path / "saved"), str(tmp_path / "again"), "--world-size", "3"]) == 0
    Saver(0).load(other, tmp_path / "again")
    assert state_of(other) == state_of(made)
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "columns"), "--to", "npy"]) == 0
    assert main(["convert", str(tmp_path / "columns"), str(tmp_path / "back"), "--to", "embcache"]) == 0
    some(2, 3, other)
    Saver(0).load(other, tmp_path / "back")
    assert state_of(other) == state_of(made)


def test_tables_of_other_settings_leave_it_and_begin_anew_without_it(tmp_path, caplog):
    made, plain = embedding(**SHARED), embedding(admission=admission.Count(3))
    some(1, 20, made)
    some(1, 20, plain)
    Saver(0).save(made, tmp_path / "with")
    Saver(0).save(plain, tmp_path / "without")
    Saver(0).load(plain, tmp_path / "with")
    assert Contents.of(plain) == Contents.of(made)
    with pytest.raises(StateError, match="has no OOV row"):
        plain.table.oov_row()
    with caplog.at_level("INFO", logger="torchrec_embcache"):
        # Each of these calls reads the levels of the loggers and hands over what the core has logged. Without the first one the
        # core may leave the line out, and without the second one the log's thread may hand it over too late.
        _native.drain_log()
        Saver(0).load(made, tmp_path / "without")
        _native.drain_log()
    assert made.table.oov_row().tolist() == [0.0] * DIM
    assert "it begins with zeros" in caplog.text


def test_a_load_without_slots_keeps_its_weights(tmp_path):
    made, other = embedding(**SHARED), embedding(optimizer=optimizers.Adam(lr=0.1), **SHARED)
    some(1, 20, made)
    Saver(0).save(made, tmp_path)
    Saver(0).load(other, tmp_path, slots=False)
    state = other.table._native_table.oov_row()
    assert state[:DIM].tolist() == made.table.oov_row().tolist()
    assert not state[DIM:].any()


@pytest.mark.parametrize("given", ["initial", "oov"])
def test_only_the_checkpoint_of_a_table_with_it_has_it(tmp_path, given):
    made = embedding(admission=admission.ReadOnly(), not_admitted=given)
    Saver(0).save(made, tmp_path)
    manifests = [manifest.read_text().replace(" ", "") for manifest in tmp_path.rglob("*.json")]
    assert manifests
    for manifest in manifests:
        assert ("oov_row" in manifest) == (given == "oov")


def test_a_copy_takes_it_over():
    made = embedding(**SHARED)
    some(1, 20, made)
    twin = copy.deepcopy(made)
    assert state_of(twin) == state_of(made)
    for table in (made, twin):
        some(2, 5, table)
    assert state_of(twin) == state_of(made)


def test_an_optimizer_that_is_set_after_a_load_leaves_its_weights(tmp_path):
    def collection() -> EmbCacheEmbeddingCollection:
        config = EmbCacheEmbeddingConfig(
            name="s",
            embedding_dim=DIM,
            num_embeddings=9,
            feature_names=["f"],
            admission=admission.ReadOnly(),
            not_admitted="oov",
        )
        return EmbCacheEmbeddingCollection([config], tiers=TIERS)

    first, second = collection(), collection()
    apply_optimizer_in_backward(torch.optim.SGD, first.parameters(), {"lr": 0.1})
    update(first(features([1, 2], None))["f"].values())
    trained = first.tables["s"].oov_row()
    assert trained.all()
    Saver(0).save(first, tmp_path)
    Saver(0).load(second, tmp_path, slots=False)
    apply_optimizer_in_backward(torch.optim.Adagrad, second.parameters(), {"lr": 0.1})
    none = KeyedJaggedTensor(["f"], torch.empty(0, dtype=torch.int64), lengths=torch.tensor([0]))
    update(second(none)["f"].values())
    assert second.tables["s"].stats().step == 1
    assert second.tables["s"].oov_row().tolist() == trained.tolist()


# ---- bad settings


def test_settings_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not_admitted='oov' without admission"):
        embedding(not_admitted="oov")
    tiers = ssd_tiers(tmp_path, ssd_bytes="1MiB")
    with pytest.raises(ConfigError, match="no room in a flush for the OOV row.*set it to .* lower embedding_dim"):
        embedding(embedding_dim=512, tiers=tiers, **SHARED)
    with pytest.raises(StateError, match="not_admitted"):
        embedding().table.oov_row()
    with pytest.raises(InputError, match="has 5 values, not 3"):
        embedding(**SHARED).table._native_table.set_oov_row(np.zeros(3, np.float32))
