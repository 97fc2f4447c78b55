"""EmbCacheEmbedding and EmbCacheEmbeddingBag: arguments, modes and training are those of `torch.nn`."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import embedding_bag

from tables import AMPLE, OPTIMIZERS, Contents, bags_strategy, jagged, make_bag, step
from torchrec_embcache import EmbCacheEmbedding, EmbCacheWarning, TierBudgets, initializers, optimizers
from torchrec_embcache.exceptions import (
    ConfigError,
    EmbCacheError,
    InputError,
    PathError,
    StateError,
    StoragePermissionError,
    UnsupportedError,
)


def make_embedding(**settings):
    defaults = {"name": "item", "embedding_dim": 4, "tiers": AMPLE, "optimizer": optimizers.SGD(lr=0.1), "seed": 7}
    return EmbCacheEmbedding(**{**defaults, **settings})


def rows_of(module, ids):
    return module.read_rows(torch.as_tensor(ids, dtype=torch.int64)).weights


def pinned(module):
    return module.stats().pinned_rows


# ---- the forward


@pytest.mark.parametrize("mode", ["sum", "mean"])
@settings(deadline=None, max_examples=30)
@given(bags=bags_strategy())
def test_a_bag_is_the_sum_or_mean_of_its_rows(mode, bags):
    ids, offsets = jagged(bags)
    with make_bag(mode=mode) as bag:
        out = bag(ids, offsets)
        expected = embedding_bag(torch.arange(len(ids)), rows_of(bag, ids), offsets, mode=mode)
        torch.testing.assert_close(out.detach(), expected)


def test_the_default_mode_is_mean():
    with make_bag() as bag:
        assert bag.mode == "mean"
        torch.testing.assert_close(bag(torch.tensor([[1, 2]])).detach()[0], rows_of(bag, [1, 2]).mean(0))


def test_the_default_initializer_is_uniform_within_one_over_root_dim():
    with make_embedding(embedding_dim=16) as embedding:
        rows = rows_of(embedding, range(1000))
        assert rows.abs().max() <= 0.25
        assert rows.abs().max() > 0.24
        assert abs(rows.mean()) < 0.01


def test_defaults_of_seed_policy_and_a_full_table():
    with (
        make_embedding(seed=0) as embedding,
        EmbCacheEmbedding(name="item", embedding_dim=4, tiers=AMPLE, optimizer=optimizers.SGD()) as default,
    ):
        assert (default.table.policy, default.table.on_full) == ("s3fifo", "error")
        assert torch.equal(rows_of(embedding, range(5)), rows_of(default, range(5)))


def test_an_embedding_takes_ids_of_any_shape():
    with make_embedding() as embedding:
        for shape in [(), (0,), (3,), (2, 3), (2, 0, 3)]:
            ids = torch.arange(torch.Size(shape).numel()).view(shape)
            out = embedding(ids)
            assert out.shape == (*shape, 4)
            assert torch.equal(out.detach().view(-1, 4), rows_of(embedding, ids.flatten()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_and_two_dimensional_inputs_and_both_integer_types_agree(dtype):
    ids = torch.tensor([[5, 6, 5], [7, 7, 8]], dtype=dtype)
    with make_bag(mode="sum") as bag, make_bag(mode="sum", include_last_offset=True) as last:
        expected = rows_of(bag, ids.flatten()).view(2, 3, 4).sum(1)
        torch.testing.assert_close(bag(ids).detach(), expected)
        torch.testing.assert_close(bag(ids.flatten(), torch.tensor([0, 3], dtype=dtype)).detach(), expected)
        torch.testing.assert_close(last(ids.flatten(), torch.tensor([0, 3, 6], dtype=dtype)).detach(), expected)
        assert bag(ids[:0]).shape == (0, 4)
        assert bag(ids[:, :0]).shape == (2, 4)
        assert bag(torch.empty(0, dtype=dtype), torch.zeros(3, dtype=dtype)).tolist() == [[0.0] * 4] * 3
        assert bag(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)).shape == (0, 4)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_is_left_out_of_bags_as_in_torch(mode):
    ids, offsets = torch.tensor([3, 9, 3, 4, 9, 9]), torch.tensor([0, 3, 4, 6])
    reference = torch.nn.EmbeddingBag(10, 4, mode=mode, padding_idx=9)
    with make_bag(mode=mode, padding_idx=9, optimizer=optimizers.SGD(lr=0.5)) as bag:
        with torch.no_grad():
            reference.weight.copy_(rows_of(bag, range(10)))
        for module in (bag, reference):
            (module(ids, offsets) * torch.arange(16.0).view(4, 4)).sum().backward()
        torch.optim.SGD(reference.parameters(), lr=0.5).step()
        assert sorted(Contents.of(bag).rows) == [3, 4]
        torch.testing.assert_close(rows_of(bag, range(9)), reference.weight.detach()[:9])
        torch.testing.assert_close(bag(ids, offsets), reference(ids, offsets))


def test_padding_of_an_embedding_reads_zeros_and_is_not_trained():
    with make_embedding(padding_idx=-1) as embedding:
        out = embedding(torch.tensor([[1, -1], [-1, 2]]))
        assert out[0, 1].tolist() == out[1, 0].tolist() == [0.0] * 4
        assert torch.equal(out[0, 0].detach(), rows_of(embedding, [1])[0])
        out.sum().backward()
        assert sorted(Contents.of(embedding).rows) == [1, 2]


# ---- training against torch


def reference_optimizer(spec, parameters):
    name = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }[spec.kind]
    return name(parameters, **spec.param_group())


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_training_agrees_with_torch(kind, mode, decay, backend):
    # Every row is in every batch, because torch's dense optimizers decay and age all rows, and ours those of the batch.
    spec = type(OPTIMIZERS[kind])(lr=0.05, weight_decay=decay)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 5, 2, 0])
    offsets = torch.tensor([0, 4, 4, 7])
    with make_bag(mode=mode, optimizer=spec, **backend) as bag:
        reference = torch.nn.EmbeddingBag(6, 4, mode=mode)
        with torch.no_grad():
            reference.weight.copy_(rows_of(bag, range(6)))
        optimizer = reference_optimizer(spec, reference.parameters())
        for number in range(6):
            scale = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            for module in (bag, reference):
                out = module(ids, offsets)
                (out * scale + out.square()).sum().backward()
            optimizer.step()
            torch.testing.assert_close(rows_of(bag, range(6)), reference.weight.detach(), rtol=1e-5, atol=1e-6)
        slots = bag.read_rows(torch.arange(6)).slots
        assert set(slots) == set(spec.slot_names)
        for name, slot in slots.items():
            torch.testing.assert_close(slot, optimizer.state[reference.weight][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_rows_outside_the_batch_stay_as_with_sparse_gradients(kind, backend):
    spec = type(OPTIMIZERS[kind])(lr=0.05)
    with make_embedding(optimizer=spec, **backend) as embedding:
        reference = torch.nn.Embedding(8, 4, sparse=True)
        with torch.no_grad():
            reference.weight.copy_(rows_of(embedding, range(8)))
        name = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}[kind]
        optimizer = name(reference.parameters(), lr=0.05)
        for number in range(8):
            ids = torch.randint(0, 8, (5,), generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            for module in (embedding, reference):
                (module(ids) + 1).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(rows_of(embedding, range(8)), reference.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weight_decay_touches_rows_of_the_batch_only(kind, backend):
    spec = type(OPTIMIZERS[kind])(lr=1e-4, weight_decay=0.5)
    with make_embedding(optimizer=spec, **backend) as embedding:
        for ids in ([1, 2], [2, 3]):
            before = rows_of(embedding, range(5))
            (embedding(torch.tensor(ids)) * 0).sum().backward()
            after = rows_of(embedding, range(5))
            moved = (before != after).any(1).nonzero().flatten().tolist()
            assert moved == ids
            assert ((after - before)[ids] * before[ids] < 0).all()  # rounded towards zero


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_rowwise_adagrad_follows_its_formula(decay, backend):
    spec = optimizers.RowWiseAdagrad(lr=0.05, weight_decay=decay, eps=1e-3)
    ids, offsets = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2])
    with make_bag(mode="sum", optimizer=spec, **backend) as bag:
        rows, total = rows_of(bag, range(3)), torch.zeros(3)
        for number in range(4):
            scale = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
            (bag(ids, offsets) * scale).sum().backward()
            grad = torch.stack([scale[0], scale[0] + scale[1], scale[1]]) + decay * rows
            total += grad.square().mean(1)
            rows -= 0.05 * grad / (total.sqrt() + 1e-3)[:, None]
        found = bag.read_rows(torch.arange(3))
        torch.testing.assert_close(found.weights, rows, rtol=1e-5, atol=1e-6)
        assert found.slots["sum"].shape == (3,)
        torch.testing.assert_close(found.slots["sum"], total)


def test_learning_rate_set_before_backward_applies_to_prefetched():
    with make_bag(optimizer=optimizers.SGD(lr=1.0)) as bag:
        ids = torch.tensor([[1]])
        before = rows_of(bag, [1])
        bag.prefetch(ids)
        out = bag(ids)
        bag.optimizer.param_groups[0]["lr"] = 0.25
        out.sum().backward()
        torch.testing.assert_close(rows_of(bag, [1]), before - 0.25)


def test_per_sample_weight_gradient_uses_rows_before_the_update(backend):
    ids, offsets, scale = torch.tensor([1, 2, 1, 3]), torch.tensor([0, 3]), torch.randn(2, 4)
    for training in (True, False):
        with make_bag(mode="sum", **backend) as bag:
            rows = rows_of(bag, [1, 2, 3])
            weights = torch.tensor([0.5, -1.0, 2.0, 1.5], requires_grad=True)
            (bag.train(training)(ids, offsets, per_sample_weights=weights) * scale).sum().backward()
            got, weights.grad = weights.grad, None
            table = rows.clone().requires_grad_()
            (embedding_bag(ids - 1, table, offsets, mode="sum", per_sample_weights=weights) * scale).sum().backward()
            torch.testing.assert_close(got, weights.grad)
            assert len(bag) == (3 if training else 0)
            assert pinned(bag) == 0


def test_weights_of_padding_get_no_gradient_and_no_say():
    with make_bag(mode="sum", padding_idx=2) as bag:
        weights = torch.tensor([[1.0, 5.0, 2.0]], requires_grad=True)
        out = bag(torch.tensor([[1, 2, 3]]), per_sample_weights=weights)
        torch.testing.assert_close(out.detach()[0], rows_of(bag, [1])[0] + 2 * rows_of(bag, [3])[0])
        out.sum().backward()
        assert weights.grad[0, 1] == 0
        assert weights.grad[0, 0] != 0


def test_weights_alone_can_be_differentiated_without_an_update():
    with make_bag(mode="sum") as bag:
        weights = torch.ones(1, 2, requires_grad=True)
        out = bag.eval()(torch.tensor([[1, 2]]), per_sample_weights=weights)
        torch.autograd.grad(out.sum(), weights)
        assert (len(bag), bag.stats().step) == (0, 0)


# ---- when rows are born, and who holds them


def test_a_row_joins_the_table_at_its_first_backward():
    with make_bag() as bag:
        out = bag(torch.tensor([[1, 2]]))
        assert len(bag) == 0
        assert pinned(bag) == 2
        out.sum().backward()
        assert len(bag) == 2
        del out
        assert pinned(bag) == 0


@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_evaluation_reads_missing_ids_and_inserts_nothing(missing, backend):
    with make_bag(missing=missing, initializer=initializers.Constant(3), **backend) as bag:
        value = 3.0 if missing == "initial" else 0.0
        ids = torch.tensor([[1, 2]])
        for out in (bag.eval()(ids), bag.train().requires_grad_(False)(ids)):
            assert out.tolist() == [[value] * 4]
            assert not out.requires_grad
        bag.requires_grad_(True)
        with torch.no_grad():
            assert bag(ids).tolist() == [[value] * 4]
        with torch.inference_mode():
            assert bag(ids).tolist() == [[value] * 4]
        assert bag(ids).tolist() == [[3.0] * 4]  # about to be trained, so it is born with its initial value
        assert bag.read_rows(torch.tensor([1])).found.tolist() == [False]
        assert (len(bag), bag.stats().step) == (0, 0)
        assert pinned(bag) == 0


def test_an_abandoned_batch_changes_nothing_and_is_unpinned():
    with make_bag() as bag:
        step(bag, [[1, 2]])
        before = Contents.of(bag)
        try:
            out = bag(torch.tensor([[1, 9]]))
            raise RuntimeError("the loss failed")
        except RuntimeError:
            del out
        assert pinned(bag) == 0
        assert Contents.of(bag) == before


def test_every_backward_is_a_step_with_or_without_ids():
    with make_bag() as bag:
        step(bag, [[]])
        assert (bag.stats().step, len(bag)) == (1, 0)
        step(bag, [[4]])
        assert (bag.stats().step, len(bag)) == (2, 1)
        bag.eval()(torch.tensor([[4]]))
        assert bag.stats().step == 2


def test_two_forwards_before_a_backward_are_two_updates():
    with make_bag(mode="sum", optimizer=optimizers.SGD(lr=1.0)) as bag:
        before = rows_of(bag, [1])
        first, second = bag(torch.tensor([[1]])), bag(torch.tensor([[1, 1]]))
        (first.sum() + second.sum()).backward()
        torch.testing.assert_close(rows_of(bag, [1]), before - 3)
        assert bag.stats().step == 2
        del first, second
        assert pinned(bag) == 0


def test_a_second_backward_of_one_forward_is_refused():
    with make_bag() as bag:
        out = bag(torch.tensor([[1]]))
        out.sum().backward(retain_graph=True)
        after = Contents.of(bag)
        with pytest.raises(StateError, match="second backward"):
            out.sum().backward()
        assert Contents.of(bag) == after


def test_a_derivative_of_the_update_is_refused_before_it_runs():
    with make_bag() as bag:
        out = bag(torch.tensor([[1]]))
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            out.sum().backward(create_graph=True)
        assert len(bag) == 0
        out.sum().backward()
        assert len(bag) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_update_and_prefetch(reentrant, recwarn):
    batches = [torch.tensor([[1, 2]]), torch.tensor([[2, 3]])]
    plain, checkpointed = make_bag(), make_bag()
    for ids in batches:
        plain(ids).square().sum().backward()
    anchor = torch.ones(1, requires_grad=True)
    checkpointed.prefetch(batches[0])
    for place, ids in enumerate(batches):
        out = torch.utils.checkpoint.checkpoint(
            lambda ids, anchor: checkpointed(ids).square() * anchor, ids, anchor, use_reentrant=reentrant
        )
        if place == 0:
            checkpointed.prefetch(batches[1])
        out.sum().backward()
    assert Contents.of(checkpointed) == Contents.of(plain)
    assert not [warning for warning in recwarn if warning.category is EmbCacheWarning]
    del out
    assert pinned(checkpointed) == 0


def test_gradients_asked_of_other_tensors_update_nothing():
    with make_bag() as bag:
        other = torch.ones(1, requires_grad=True)
        torch.autograd.grad((bag(torch.tensor([[1]])) * other).sum(), other)
        assert len(bag) == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"mode": "max"}, UnsupportedError, "mode='max'"),
        ({"mode": "min"}, ConfigError, "mode='min'"),
        ({"max_norm": 1.0}, UnsupportedError, "max_norm=1.0"),
        ({"scale_grad_by_freq": True}, UnsupportedError, "scale_grad_by_freq=True"),
        ({"sparse": True}, UnsupportedError, "sparse=True"),
        ({"dtype": torch.float16}, UnsupportedError, "dtype=torch.float16"),
        ({"embedding_dim": 0}, ConfigError, "embedding_dim=0"),
        ({"embedding_dim": 65537}, ConfigError, "embedding_dim=65537"),
        ({"embedding_dim": 4.0}, ConfigError, "embedding_dim=4.0"),
        ({"name": ""}, ConfigError, "name=''"),
        ({"name": 3}, ConfigError, "name=3"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"policy": "random"}, ConfigError, "policy='random'"),
        ({"on_full": "drop"}, ConfigError, "on_full='drop'"),
        ({"missing": "ones"}, ConfigError, "missing='ones'"),
        ({"padding_idx": 2**63}, ConfigError, "padding_idx="),
        ({"total_num_buckets": 0}, ConfigError, "total_num_buckets=0"),
        ({"tiers": "8GiB"}, ConfigError, "tiers='8GiB'"),
        ({"tiers": TierBudgets(host_bytes=10)}, ConfigError, "TierBudgets.host_bytes=10"),
        ({"tiers": TierBudgets(host_bytes="1MiB", device_bytes=10)}, ConfigError, "TierBudgets.device_bytes=10"),
        ({"tiers": TierBudgets(host_bytes="1MiB", ssd_bytes=10, ssd_dir="x")}, ConfigError, "TierBudgets.ssd_bytes=10"),
        ({"optimizer": None}, ConfigError, "optimizer=None"),
        ({"optimizer": torch.optim.SGD}, ConfigError, "optimizer=<class"),
        ({"initializer": "uniform"}, ConfigError, "initializer='uniform'"),
        ({"device": "bogus"}, ConfigError, "device='bogus' is not a device"),
        ({"device": "cuda:0"}, ConfigError, "device_bytes=0 on cuda:0"),
        (
            {"device": "cuda:99", "tiers": TierBudgets(host_bytes="1MiB", device_bytes="1MiB")},
            ConfigError,
            "device='cuda:99' cannot be used",
        ),
    ],
)
def test_a_bad_setting_is_refused_naming_field_and_value(settings, error, words):
    with pytest.raises(error, match=words):
        make_bag(**settings)


def test_an_ssd_directory_is_checked_before_anything_is_written(tmp_path):
    good = tmp_path / "good"
    good.mkdir(mode=0o750)
    wide = tmp_path / "wide"
    wide.mkdir()
    wide.chmod(0o777)
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "file").touch()
    for name, error, words in [
        ("absent", PathError, "missing"),
        ("link", PathError, "symbolic link"),
        ("file", PathError, "file"),
        ("wide", StoragePermissionError, "chmod"),
    ]:
        with pytest.raises(error, match=words) as caught:
            make_bag(tiers=TierBudgets(host_bytes="1MiB", ssd_bytes="8MiB", ssd_dir=tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)
    assert [path for folder in (good, wide) for path in folder.iterdir()] == []


I = torch.tensor  # noqa: E741


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 2], I([0])), "input is a list"),
        ((I([1.0]), I([0])), "input has dtype torch.float32"),
        ((I([1], dtype=torch.int16), I([0])), "input has dtype torch.int16"),
        ((I([1], device="meta"), I([0])), "input is on the device meta"),
        ((I(1),), r"input has shape \[\]"),
        ((I([[[1]]]),), r"input has shape \[1, 1, 1\]"),
        ((I([1, 2]),), "offsets=None"),
        ((I([[1, 2]]), I([0])), "offsets with a 2-D input"),
        ((I([1, 2]), I([])), "offsets has dtype"),
        ((I([1, 2]), I([], dtype=torch.int64)), "offsets is empty"),
        ((I([1, 2]), I([0.0])), "offsets has dtype torch.float32"),
        ((I([1, 2]), I([[0]])), r"offsets has shape \[1, 1\]"),
        ((I([1, 2]), I([1])), r"offsets\[0\]=1"),
        ((I([1, 2]), I([0, 2, 1])), r"offsets\[2\]=1 is below offsets\[1\]=2"),
        ((I([1, 2]), I([0, 3])), r"offsets\[1\]=3 and there are 2 ids"),
        ((I([1, 2]), I([0, -1])), r"offsets\[1\]=-1"),
        ((I([1, 2]), I([0]), [1.0, 1.0]), "per_sample_weights is a list"),
        ((I([1, 2]), I([0]), I([1.0])), r"per_sample_weights has shape \[1\]"),
        ((I([1, 2]), I([0]), I([1, 1])), "per_sample_weights has .* dtype torch.int64"),
        ((I([1, 2]), I([0]), torch.ones(2, dtype=torch.float64)), "per_sample_weights has .* dtype torch.float64"),
        ((I([1, 2]), I([0]), torch.ones(2, device="meta")), "per_sample_weights is on the device meta"),
    ],
)
def test_a_bad_argument_is_refused_naming_it_and_its_value(arguments, words):
    with make_bag(mode="sum") as bag:
        with pytest.raises(InputError, match=words):
            bag(*arguments)
        assert (len(bag), pinned(bag)) == (0, 0)


def test_the_last_offset_is_the_number_of_ids():
    with (
        make_bag(include_last_offset=True) as bag,
        pytest.raises(InputError, match=r"offsets\[1\]=1 and there are 2 ids"),
    ):
        bag(torch.tensor([1, 2]), torch.tensor([0, 1]))


def test_weights_with_mean_are_refused_as_in_torch():
    with make_bag(mode="mean") as bag, pytest.raises(UnsupportedError, match="mode='mean'"):
        bag(torch.tensor([[1]]), per_sample_weights=torch.ones(1, 1))


def test_a_module_stays_in_its_type_its_device_and_its_process_memory():
    with make_bag() as bag:
        for move, words in [(bag.half, "float16"), (bag.double, "float64"), (lambda: bag.to("meta"), "meta")]:
            with pytest.raises(UnsupportedError, match=words):
                move()
        with pytest.raises(StateError, match="cannot be pickled"):
            pickle.dumps(bag)
        assert bag.float().to("cpu") is bag
        step(bag, [[1]])


def test_a_state_dict_warns_once_that_rows_are_elsewhere():
    with make_bag() as bag:
        model = torch.nn.ModuleDict({"bag": bag, "dense": torch.nn.Linear(4, 1)})
        assert set(model.state_dict()) == {"bag.weight", "bag._extra_state", "dense.weight", "dense.bias"}
        step(bag, [[1, 2]])
        with pytest.warns(EmbCacheWarning, match=r"no rows of tables 'item' \(2\).*Saver"):
            assert model.state_dict()["bag.weight"].shape == (0, 4)
        model.load_state_dict(model.state_dict())  # there is no second warning; warnings are errors here


def test_use_after_close_is_refused():
    bag = make_bag()
    bag.close()
    bag.close()
    for use in (lambda: bag(torch.tensor([[1]])), bag.stats, lambda: len(bag), lambda: list(bag.export())):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_dense_optimizer_over_all_parameters_passes_the_table_by():
    with make_bag() as bag:
        dense = torch.optim.AdamW([*bag.parameters(), torch.nn.Parameter(torch.ones(1))])
        out = step(bag, [[1]])
        dense.step()
        dense.zero_grad()
        assert bag.weight.grad is None
        assert not torch.equal(bag(torch.tensor([[1]])).detach(), out)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_whatever_is_refused_leaves_the_table_as_it_was(data):
    with make_bag(mode="sum") as bag:
        step(bag, [[1, 2]])
        before = Contents.of(bag)
        ids = torch.tensor(data.draw(st.lists(st.integers(-3, 3), max_size=4)), dtype=torch.int64)
        offsets = torch.tensor(data.draw(st.lists(st.integers(-2, 5), max_size=4)), dtype=torch.int64)
        good = len(offsets) > 0 or len(ids) == 0
        bounds = [*offsets.tolist(), len(ids)]
        good = good and bounds[0] == 0 and bounds == sorted(bounds)
        if good:
            assert bag(ids, offsets).shape == (len(offsets), 4)
        else:
            with pytest.raises(EmbCacheError, match="offsets"):
                bag(ids, offsets)
        assert Contents.of(bag) == before
        assert pinned(bag) == 0
