"""Every way to choose the optimizer of a table of TorchRec's collections."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec import KeyedJaggedTensor as Kjt
from torchrec import optim as trec_optim
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.types import DataType

from torchrec_embcache import EmbCacheEmbeddingBagCollection, TierBudgets, optimizers
from torchrec_embcache.exceptions import ConfigError, UnsupportedError
from torchrec_embcache.modules._optimizer_choice import choose_optimizer


def with_optimizer(cls: Any, kwargs: dict[str, Any]) -> nn.Parameter:
    param = nn.Parameter(torch.empty(0, 4))
    apply_optimizer_in_backward(cls, [param], kwargs)
    return param


DEFAULTS = {"lr": 0.01, "eps": 1e-8}


@pytest.mark.parametrize(
    ("cls", "kwargs", "want"),
    [
        (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.1}, optimizers.SGD(lr=0.5, weight_decay=0.1)),
        (trec_optim.SGD, {"lr": 0.5}, optimizers.SGD(lr=0.5)),
        (torch.optim.Adagrad, {}, optimizers.Adagrad(**DEFAULTS)),
        (trec_optim.Adagrad, {"eps": 1e-3}, optimizers.Adagrad(lr=0.01, eps=1e-3)),
        (trec_optim.RowWiseAdagrad, {"lr": 0.02}, optimizers.RowWiseAdagrad(lr=0.02, eps=1e-8)),
        (torch.optim.Adam, {"betas": (0.5, 0.6)}, optimizers.AdamW(**DEFAULTS, betas=(0.5, 0.6), weight_decay=0.0)),
        (trec_optim.Adam, {"lr": 0.1, "weight_decay": 0.2}, optimizers.AdamW(lr=0.1, weight_decay=0.2)),
        (torch.optim.AdamW, {"lr": 0.1}, optimizers.AdamW(lr=0.1, weight_decay=0.01)),
        (
            trec_optim.PartialRowWiseAdam,
            {"betas": (0.5, 0.6), "weight_decay": 0.2},
            optimizers.PartialRowWiseAdam(**DEFAULTS, betas=(0.5, 0.6), weight_decay=0.2),
        ),
        (trec_optim.LAMB, {"weight_decay": 0.2}, optimizers.LAMB(**DEFAULTS, weight_decay=0.2)),
        (
            trec_optim.Adam,
            {"weight_decay": 0.2, "weight_decay_mode": WeightDecayMode.DECOUPLE},
            optimizers.AdamW(**DEFAULTS, weight_decay=0.2),
        ),
    ],
)
def test_optimizers_in_the_backward_are_mapped_with_fbgemms_defaults(cls, kwargs, want):
    assert choose_optimizer("t", with_optimizer(cls, kwargs), None) == want


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({"learning_rate": 0.5}, optimizers.SGD(lr=0.5)),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD}, optimizers.Adagrad(**DEFAULTS)),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-3}, optimizers.RowWiseAdagrad(lr=0.01, eps=1e-3)),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.5, "beta2": 0.6, "weight_decay": 0.1},
            optimizers.AdamW(**DEFAULTS, betas=(0.5, 0.6), weight_decay=0.1),
        ),
        (
            {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "beta1": 0.5, "eps": 1e-3},
            optimizers.PartialRowWiseAdam(lr=0.01, eps=1e-3, betas=(0.5, 0.999)),
        ),
        (
            {"optimizer": EmbOptimType.LAMB, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
            optimizers.LAMB(**DEFAULTS, weight_decay=0.1),
        ),
        (
            {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
            optimizers.Adam(**DEFAULTS, weight_decay=0.1),
        ),
        ({"optimizer": EmbOptimType.EXACT_SGD, "output_dtype": DataType.FP32}, optimizers.SGD(lr=0.01)),
        (None, None),
        ({}, None),
    ],
)
def test_fused_params_are_mapped_with_fbgemms_defaults(params, want):
    assert choose_optimizer("t", nn.Parameter(torch.empty(0, 4)), params) == want


def test_the_optimizer_in_the_backward_goes_before_fused_params():
    chosen = choose_optimizer(
        "t", with_optimizer(torch.optim.Adagrad, {"lr": 0.3}), {"optimizer": EmbOptimType.EXACT_SGD, "eps": 1e-3}
    )
    assert chosen == optimizers.Adagrad(lr=0.3, eps=1e-3)
    # The mode of the decay is that of the optimizer which trains.
    mode = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE}
    chosen = choose_optimizer("t", with_optimizer(trec_optim.LAMB, {"lr": 0.3}), mode)
    assert chosen == optimizers.LAMB(lr=0.3, eps=1e-8, weight_decay=0.1)


def test_adamw_with_coupled_decay_is_rejected():
    param = with_optimizer(torch.optim.AdamW, {"lr": 0.3})
    with pytest.raises(UnsupportedError, match="weight_decay_mode=.* AdamW: give DECOUPLE"):
        choose_optimizer("t", param, {"weight_decay_mode": WeightDecayMode.L2})


@pytest.mark.parametrize(
    ("cls", "kwargs", "error", "words"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, UnsupportedError, "momentum=0.9"),
        (torch.optim.Adam, {"amsgrad": True}, UnsupportedError, "amsgrad=True"),
        (torch.optim.RMSprop, {}, UnsupportedError, "RMSprop"),
        (trec_optim.PartialRowWiseLAMB, {}, UnsupportedError, "PartialRowWiseLAMB"),
        (trec_optim.SGD, {"lr": -1.0}, ConfigError, "lr=-1.0"),
    ],
)
def test_unknown_optimizers_are_rejected_naming_table_and_value(cls, kwargs, error, words):
    with pytest.raises(error, match=words) as caught:
        choose_optimizer("t", with_optimizer(cls, kwargs), None)
    assert "'t'" in str(caught.value)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"optimizer": EmbOptimType.LARS_SGD}, UnsupportedError, "lars_sgd"),
        ({"max_gradient": 1.0}, UnsupportedError, "max_gradient=1.0"),
        ({"cache_load_factor": 0.2}, UnsupportedError, "cache_load_factor=0.2"),
        ({"output_dtype": DataType.FP16}, UnsupportedError, "output_dtype"),
        ({"betas": 0.9}, ConfigError, "betas=0.9"),
        (
            {"optimizer": EmbOptimType.LAMB, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
            UnsupportedError,
            "weight_decay_mode=.* LAMB: give DECOUPLE",
        ),
        (
            {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
            UnsupportedError,
            "weight_decay_mode=.* Adagrad: give L2",
        ),
        ({"eps": "small"}, ConfigError, "eps='small'"),
    ],
)
def test_fused_params_that_are_not_known_are_refused(params, error, words):
    with pytest.raises(error, match=words):
        choose_optimizer("t", None, {"optimizer": EmbOptimType.EXACT_ADAGRAD, **params})


def test_second_optimizer_is_rejected_after_the_first_step_too():
    table = EmbeddingBagConfig(name="t", embedding_dim=2, num_embeddings=9, feature_names=["f"])
    module = EmbCacheEmbeddingBagCollection([table], tiers=TierBudgets(host_bytes="1MiB"))
    batch = Kjt(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    module(batch).values().sum().backward()
    before = module.tables["t"].read_rows([1]).weights
    apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.001})
    with pytest.raises(UnsupportedError, match="table 't' has 2 optimizers in backward"):
        module(batch)
    assert torch.equal(module.tables["t"].read_rows([1]).weights, before)
    assert module.eval()(batch).values().tolist() == before.tolist()
