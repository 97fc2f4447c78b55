"""The public names, and the cost of their import."""

import inspect
import os
import subprocess
import sys
import tomllib

import pytest
import torch
from packaging.requirements import Requirement

import torchrec_embcache
from project_paths import ROOT
from tables import AMPLE, make_bag, step
from torchrec_embcache import EmbCacheEmbedding, EmbCacheEmbeddingBag, TierBudgets, optimizers
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import ConfigError, StateError

PUBLIC_WITHOUT_TORCHREC = {
    "AdmissionStats",
    "admission",
    "CacheTable",
    "EmbCacheEmbedding",
    "EmbCacheEmbeddingBag",
    "EmbCacheError",
    "EmbCacheWarning",
    "EvictedRows",
    "EvictionStats",
    "FoundRows",
    "Histogram",
    "MissRatioCurve",
    "RowChunk",
    "RowMetadata",
    "SsdStats",
    "TableOptions",
    "TableStats",
    "TierBudgets",
    "TierStats",
    "cache_modules",
    "close_all",
    "evict",
    "eviction",
    "exceptions",
    "flush",
    "initializers",
    "optimizers",
    "set_time",
}


def test_the_public_names_are_all_there_and_sorted():
    assert torchrec_embcache.__all__ == sorted(torchrec_embcache.__all__)
    assert set(torchrec_embcache.__all__) == PUBLIC_WITHOUT_TORCHREC | set(torchrec_embcache._LAZY)
    for name in torchrec_embcache.__all__:
        assert getattr(torchrec_embcache, name) is not None
        assert name in dir(torchrec_embcache)


@pytest.mark.slow
def test_importing_and_training_without_torchrec_imports_no_torchrec():
    script = (
        "import sys, torch, torchrec_embcache as e\n"
        "bag = e.EmbCacheEmbeddingBag(name='a', embedding_dim=2, tiers=e.TierBudgets(host_bytes='1MiB'),\n"
        "                             optimizer=e.optimizers.SGD(lr=1.0))\n"
        "bag(torch.tensor([[1]])).sum().backward()\n"
        "assert len(bag) == 1\n"
        "print(sorted(set(sys.modules) & {'torchrec', 'fbgemm_gpu', 'torch.distributed.checkpoint'}))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def run_without_torchrec(script: str) -> str:
    """Returns the output of `script` if TorchRec cannot be imported."""
    block = "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
    done = subprocess.run([sys.executable, "-c", block + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_star_import_without_torchrec_gives_what_works_there():
    names = run_without_torchrec("from torchrec_embcache import *\nprint(*sorted(set(dir()) - {'sys'}))\n").split()
    assert {"EmbCacheEmbeddingBag", "Saver", "TierBudgets", "EmbCacheStorageWriter", "optimizers"} <= set(names)
    assert not [name for name in names if "Collection" in name or "Pipeline" in name]


@pytest.mark.slow
def test_a_name_that_needs_torchrec_says_how_to_install_it():
    script = (
        "import torchrec_embcache\n"
        "try:\n"
        "    torchrec_embcache.EmbCacheEmbeddingBagCollection\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    told = run_without_torchrec(script)
    assert "EmbCacheEmbeddingBagCollection needs TorchRec" in told
    assert "pip install 'torchrec-embcache[torchrec]'" in told


@pytest.mark.slow
def test_saving_needs_no_torchrec_either(tmp_path):
    script = (
        "import torch\n"
        "from torchrec_embcache import EmbCacheEmbeddingBag, Saver, TierBudgets, optimizers\n"
        "bag = EmbCacheEmbeddingBag(name='a', embedding_dim=2, tiers=TierBudgets(host_bytes='1MiB'),\n"
        "                           optimizer=optimizers.SGD(lr=1.0))\n"
        "bag(torch.tensor([[1]])).sum().backward()\n"
        f"Saver(0).save(bag, {str(tmp_path / 'rows')!r})\n"
        "print(len(bag))\n"
    )
    assert run_without_torchrec(script) == "1"


def test_the_version_is_the_packages_and_the_command_says_it(capsys):
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert torchrec_embcache.__version__ == version
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"embcache {version}\n"


def test_extra_keeps_torch_below_the_version_fbgemm_rejects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {one.name: one.specifier for one in map(Requirement, project["optional-dependencies"]["torchrec"])}
    assert torch.__version__.split("+")[0] in extra["torch"]
    assert "2.15.0" not in extra["torch"]
    # Without TorchRec nothing keeps a newer torch out.
    alone = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    assert "2.15.0" in alone["torch"]


@pytest.mark.parametrize("kind", [EmbCacheEmbedding, EmbCacheEmbeddingBag])
def test_torch_style_arguments_are_rejected_with_the_right_call(kind):
    for make in (lambda: kind(1000, 64), lambda: kind(num_embeddings=1000, embedding_dim=64)):
        with pytest.raises(ConfigError, match="no num_embeddings") as refused:
            make()
        call = str(refused.value).split("Write ")[1]
        names = {kind.__name__: kind, "TierBudgets": TierBudgets, "optimizers": optimizers}
        made = eval(call, names)
        assert made.embedding_dim == 64


@pytest.mark.parametrize("kind", [EmbCacheEmbedding, EmbCacheEmbeddingBag])
def test_signatures_name_every_setting(kind):
    parameters = inspect.signature(kind).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert {"name", "embedding_dim", "tiers", "optimizer", "initializer", "seed", "policy", "on_full"} <= set(
        parameters
    )
    settings = set(parameters) - {"mode", "include_last_offset"}
    assert settings == set(inspect.signature(EmbCacheEmbedding).parameters)


def test_a_printed_bag_shows_rows_budgets_and_optimizer(tmp_path):
    tiers = TierBudgets(device_bytes="64KiB", host_bytes="1.5MiB", ssd_bytes="32MiB", ssd_dir=str(tmp_path))
    with make_bag(tiers=tiers, optimizer=optimizers.Adam(lr=0.1)) as bag:
        assert "rows=0" in repr(bag)
        step(bag, [[1, 2]])
        bag.optimizer.param_groups[0]["lr"] = 0.05
        shown = repr(bag)
    for words in (
        "'item'",
        "embedding_dim=4",
        "rows=2",
        "Adam(lr=0.05)",
        "device 64 KiB, host 1.5 MiB, ssd 32 MiB in ",
        "mode='mean'",
    ):
        assert words in shown
    assert str(tmp_path) in shown
    assert "rows=closed" in repr(bag)
    assert "rows=closed" in repr(bag.table)


def test_collection_repr_shows_settings_and_opens_nothing(tmp_path):
    from torchrec import KeyedJaggedTensor
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    ebc = torchrec_embcache.EmbCacheEmbeddingBagCollection(
        [
            torchrec_embcache.EmbCacheEmbeddingBagConfig(
                name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]
            )
        ],
        tiers=TierBudgets(host_bytes="1MiB", ssd_bytes="32MiB", ssd_dir=str(tmp_path)),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    with ebc:
        assert (
            "'t', embedding_dim=4, optimizer=RowWiseAdagrad(lr=0.1), policy=s3fifo, rows=not opened yet, tiers=(host 1 MiB, ssd"
            in repr(ebc)
        )
        assert not os.listdir(tmp_path)
        ebc(KeyedJaggedTensor(["f"], torch.tensor([1, 5]), lengths=torch.tensor([2]))).values().sum().backward()
        assert "optimizer=RowWiseAdagrad(lr=0.1), policy=s3fifo, rows=2" in repr(ebc)


def test_a_table_whose_tiers_are_closed_or_torn_can_be_printed(monkeypatch):
    bag = make_bag(tiers=AMPLE)
    bag.table._native_table.close()
    assert "rows=closed" in repr(bag)
    monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    torn = make_bag(tiers=TierBudgets(device_bytes="64KiB", host_bytes="1MiB"), optimizer=optimizers.Adam(lr=0.1))
    step(torn, [[1, 2]])

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("asked to fail")

    with monkeypatch.context() as refused:
        refused.setattr(torch.Tensor, "index_copy_", refuse)
        with pytest.raises(RuntimeError, match="asked to fail"):
            step(torn, [[1, 2]])
    with pytest.raises(StateError, match="failed half-way"):
        len(torn.table)
    assert "rows=unusable" in repr(torn)


def test_a_table_that_cannot_be_used_can_be_printed():
    with make_bag(tiers=AMPLE) as bag:
        bag.table._set_unusable("a load did not succeed")
        assert "rows=unusable" in repr(bag)
