"""Batches on a device that does not exist are checked: torch's fake tensors have a device and no memory."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec import KeyedJaggedTensor

from torchrec_embcache.exceptions import InputError
from torchrec_embcache.modules import _features


@pytest.fixture
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fake tensors be checked, whose lengths cannot be read."""
    monkeypatch.setattr(_features, "check_dense", lambda *_: None)
    lengths = torch.ones(2, dtype=torch.int64)
    monkeypatch.setattr(_features, "host_copies", lambda _: [lengths])


@pytest.mark.usefixtures("fake_devices")
def test_a_batch_on_another_device_of_a_kind_is_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        values, lengths = (torch.empty(2, dtype=torch.int64, device="cuda:1") for _ in range(2))
        batch = KeyedJaggedTensor(["a"], values, lengths=lengths)
        check = partial(_features.check_features, batch, ["a"], weighted=False, clicks=False, owner="bags 'shop'")
        for accepted in ("cuda:1", "cuda"):
            assert check(device=torch.device(accepted)).keys() == ["a"]
        with pytest.raises(InputError, match=r"values are on cuda:1 and the module on cuda:0: call .to\('cuda:0'\)"):
            check(device=torch.device("cuda:0"))


def test_the_cpu_is_one_device_whatever_its_number() -> None:
    values, lengths = (torch.ones(2, dtype=torch.int64, device="cpu:0") for _ in range(2))
    batch = KeyedJaggedTensor(["a"], values, lengths=lengths)
    for device in ("cpu", "cpu:0"):
        checked = _features.check_features(
            batch, ["a"], weighted=False, clicks=False, owner="bags 'shop'", device=torch.device(device)
        )
        assert checked.values() is values
        assert checked.lengths().data_ptr() == lengths.data_ptr()
