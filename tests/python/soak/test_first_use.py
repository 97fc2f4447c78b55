"""Problems that first-time users of the package had with only README.md at hand.

The tests start programs in an empty folder, as a newcomer does. Every message names the remedy, in words that can be typed.
"""

import contextlib
import copy
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from cli_cases import run
from project_paths import ROOT
from torchrec_embcache import (
    EmbCacheEmbedding,
    EmbCacheEmbeddingBag,
    EmbCacheEmbeddingBagCollection,
    EmbCacheWarning,
    Saver,
    TierBudgets,
    cache_modules,
    optimizers,
)
from torchrec_embcache.exceptions import (
    CapacityError,
    ConfigError,
    InputError,
    InUseError,
    MismatchError,
    PathError,
    StateError,
    StoragePermissionError,
    UnsupportedError,
)

RAM = TierBudgets(host_bytes="1MiB")


@pytest.fixture(autouse=True)
def in_a_bare_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def programs() -> list[str]:
    """The programs of README.md as they stand."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def start(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as if it was pasted into a file, and returns the finished process."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)


def collection(optimizer: Any = RowWiseAdagrad, **changes: Any) -> EmbCacheEmbeddingBagCollection:
    table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=1000, feature_names=["item"])
    made = EmbCacheEmbeddingBagCollection(**{"name": "tables", "tables": [table], "tiers": RAM} | changes)
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    return made


def batch(ids: Any, feature: str = "item") -> KeyedJaggedTensor:
    values = torch.as_tensor(ids)
    return KeyedJaggedTensor(keys=[feature], values=values, lengths=torch.tensor([len(values)]))


def trained(ids: Any = (1, 2, 3), **changes: Any) -> nn.Sequential:
    model = nn.Sequential(collection(**changes))
    model(batch(ids))["item"].sum().backward()
    return model


def rows(model: nn.Module) -> int:
    return sum(len(table) for module in cache_modules(model).values() for table in module.tables.values())


@contextlib.contextmanager
def told(kind: type[BaseException], *words: str) -> Iterator[None]:
    """An error of this kind whose message has these words, and is no longer than somebody reads."""
    with pytest.raises(kind) as found:
        yield
    message = str(found.value)
    for word in words:
        assert word in message, message
    assert len(message) < 600, message


# ---- README


@pytest.mark.parametrize("number", [0, 1], ids=["TorchRec", "plain PyTorch"])
def test_readme_program_runs_and_resumes(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir("cache")  # as `mkdir cache` makes it
    assert len(programs()) == 2
    for steps in (1, 2):
        done = start(programs()[number])
        assert done.returncode == 0, done.stderr
        assert "EmbCacheWarning" not in done.stderr
        (table,) = run(capsys, "inspect", "cache")[1]["ssd"]
        assert (table["rows"], table["step"]) == (3, steps)


def test_readme_program_without_its_folder_names_the_command(tmp_path: Path) -> None:
    makes = 'os.makedirs("cache", mode=0o750, exist_ok=True)\n'
    program = programs()[1]
    assert makes in program
    done = start(program.replace(makes, ""))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "PathError: ssd_dir" in last
    command = last.partition("make it (")[2].rstrip(")")
    assert command.split()[-1] == str(tmp_path / "cache")
    subprocess.run(command.split(), check=True)
    assert start(program.replace(makes, "")).returncode == 0


def test_readme_torchrec_program_without_torchrec_says_so() -> None:
    block = "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
    done = start(block + "from torchrec_embcache import EmbCacheEmbeddingBagCollection\n")
    assert done.returncode == 1
    assert "pip install 'torchrec-embcache[torchrec]'" in done.stderr.splitlines()[-1]


ENDLESS = """
import torch
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, optimizers

tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache", reopen="auto")
bag = EmbCacheEmbeddingBag(name="item", embedding_dim=8, mode="sum", tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
print(len(bag), bag.stats().step, flush=True)
while True:
    bag(torch.arange(100)[:, None]).sum().backward()
    if bag.stats().step % 10 == 0:
        print("trains", flush=True)
"""


def test_interrupted_simple_program_loses_nothing() -> None:
    """Ctrl-C; no warning appears."""
    os.mkdir("cache")
    began = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        began.append(tuple(map(int, process.stdout.readline().split())))
        assert process.stdout.readline() == "trains\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
        assert "KeyboardInterrupt" in err
        assert "Warning" not in err
    assert began[0] == (0, 0)
    assert began[1][0] == 100
    assert began[1][1] >= 10


# ---- making a model


def test_a_forgotten_half_of_the_ssd_tier_is_told_with_the_other_half() -> None:
    with told(ConfigError, 'ssd_dir="cache"'):
        TierBudgets(host_bytes="1MiB", ssd_bytes="1GiB")
    with told(ConfigError, 'ssd_bytes="20GiB"'):
        TierBudgets(host_bytes="1MiB", ssd_dir="cache")
    with told(ConfigError, "'256MB'", "MiB"):
        TierBudgets(host_bytes="256MB")
    with told(PathError, "expanduser()"):
        TierBudgets(host_bytes="1MiB", ssd_bytes="1GiB", ssd_dir="~/cache")


def test_what_torch_nn_takes_is_refused_with_the_call_to_write() -> None:
    for kind in (EmbCacheEmbedding, EmbCacheEmbeddingBag):
        with told(ConfigError, f"Write {kind.__name__}(name='item', embedding_dim=64, tiers="):
            kind(1000, 64)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "call"),
    [
        ("adam", "optimizers.Adam(lr=0.02)"),
        (optimizers.Adagrad, "optimizers.Adagrad(lr=0.02)"),
        (torch.optim.Adam, "optimizers.Adam(lr=0.02)"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), "optimizers.SGD(lr=0.02)"),
        ("sparse_adam", "optimizers.RowWiseAdagrad(lr=0.02)"),
    ],
    ids=str,
)
def test_an_optimizer_of_another_kind_is_refused_with_one_to_write(given: Any, call: str) -> None:
    with told(ConfigError, f"write, for example, optimizer={call}"):
        EmbCacheEmbeddingBag(name="a", embedding_dim=4, tiers=RAM, optimizer=given)
    kind, arguments = re.fullmatch(r"optimizers\.(\w+)\(lr=([\d.]+)\)", call).groups()  # type: ignore[union-attr]
    made = getattr(optimizers, kind)(lr=float(arguments))
    EmbCacheEmbeddingBag(name="a", embedding_dim=4, tiers=RAM, optimizer=made).close()


def test_unsupported_optimizer_is_listed_at_the_first_step() -> None:
    with told(UnsupportedError, "RMSprop", "torchrec.optim.RowWiseAdagrad"):
        trained(optimizer=torch.optim.RMSprop)


@pytest.mark.parametrize("name", ["items", "keys", "training", "a.b"])
def test_table_name_invalid_in_torch_is_rejected_first(name: str) -> None:
    table = EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=10, feature_names=["item"])
    with told(ConfigError, repr(name), "use another"):
        collection(tables=[table])


def test_missing_optimizer_names_a_remedy_and_eval_needs_none() -> None:
    with told(StateError, "apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad", "model.eval()"):
        trained(optimizer=None)
    model = nn.Sequential(collection(optimizer=None)).eval()
    assert model(batch([1]))["item"].shape == (1, 8)


def test_torch_optimizer_of_the_model_is_not_the_table_one() -> None:
    model = nn.Sequential(collection(optimizer=None))
    torch.optim.Adam(model.parameters(), lr=0.1)
    with told(StateError, "apply_optimizer_in_backward"):
        model(batch([1]))["item"].sum().backward()


def test_repr_shows_the_optimizer_and_changes_nothing() -> None:
    os.mkdir("cache")
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache")
    model = nn.Sequential(collection(tiers=tiers))
    first, second = str(model), str(model)
    assert first == second
    assert "optimizer=RowWiseAdagrad(lr=0.1)" in first
    assert "rows=not opened yet" in first
    assert not os.listdir("cache")
    # The printed optimizer is not final: another one may be applied until the first step.
    other = nn.Sequential(collection(optimizer=None))
    assert "optimizer=none" in str(other)
    apply_optimizer_in_backward(torch.optim.Adagrad, other.parameters(), {"lr": 0.3})
    assert "optimizer=Adagrad(lr=0.3)" in str(other)
    assert "optimizer=none" in str(nn.Sequential(collection(optimizer=torch.optim.RMSprop)))
    for one in (model, other):
        one(batch([5, 6]))["item"].sum().backward()
        assert "rows=2" in str(one)
    model[0].close()


def _train_without_a_sharder(rank: int, size: int) -> str:
    del rank, size
    model = DistributedModelParallel(
        nn.Sequential(collection()), device=torch.device("cpu"), sharders=[], init_data_parallel=False
    )
    with pytest.raises(StateError) as refused:
        model(batch([1]))
    return str(refused.value)


def test_two_ranks_without_the_sharder_are_told_its_name(two_ranks: Any) -> None:
    for message in two_ranks.run(_train_without_a_sharder):
        assert "sharders=[EmbCacheEmbeddingBagCollectionSharder()]" in message
        assert "replicated=True" in message


# ---- batches


def test_any_integer_is_an_id_and_nothing_else_is() -> None:
    model = trained(torch.tensor([1, 2], dtype=torch.int32))
    model(batch([-1, -(2**63), 2**63 - 1]))["item"].sum().backward()
    assert rows(model) == 5
    assert model[0].tables["item"].read_rows([-1, -(2**63), 2**63 - 1]).found.all()
    with told(InputError, "torch.float32", "give int64"):
        model(batch([1.0, 2.0]))
    with told(InputError, "['other']", "lacks ['item']"):
        model(batch([1], "other"))


def test_a_table_that_is_full_says_the_three_ways_out() -> None:
    bag = EmbCacheEmbeddingBag(name="item", embedding_dim=64, mode="sum", tiers=RAM, optimizer=optimizers.SGD(lr=0.1))
    with told(CapacityError, "TierBudgets(ssd_bytes=..., ssd_dir=...)", "raise host_bytes", 'on_full="evict"'):
        bag(torch.arange(20_000)[:, None]).sum().backward()


def test_rows_come_as_lists_and_arrays_and_go_as_arrays() -> None:
    table = trained()[0].tables["item"]
    table.import_rows([7, 8], [[0.5] * 8, [1.5] * 8])
    table.import_rows(np.array([9]), np.full((1, 8), 2.5))
    columns = table.export().to_numpy()
    found = dict(zip(columns["ids"].tolist(), columns["weights"][:, 0].tolist(), strict=True))
    assert {row: found[row] for row in (7, 8, 9)} == {7: 0.5, 8: 1.5, 9: 2.5}


def test_a_copy_of_a_model_in_ram_is_a_model_of_its_own() -> None:
    model = trained()
    average = copy.deepcopy(model)
    model(batch([4, 5]))["item"].sum().backward()
    assert (rows(model), rows(average)) == (5, 3)


# ---- the second run


def bag_on_ssd(reopen: Any = None) -> EmbCacheEmbeddingBag:
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir="cache", reopen=reopen)
    bag = EmbCacheEmbeddingBag(name="item", embedding_dim=8, mode="sum", tiers=tiers, optimizer=optimizers.SGD(lr=0.1))
    bag(torch.tensor([[len(bag)]])).sum().backward()
    return bag


def test_second_run_without_reopen_lists_its_values() -> None:
    os.mkdir("cache")
    bag_on_ssd().close()
    with told(StateError, 'reopen = "resume"', 'reopen = "discard"', 'reopen = "auto"'):
        bag_on_ssd()
    again = bag_on_ssd("auto")
    assert len(again) == 2
    again.close()


def test_two_programs_on_one_folder_are_told_of_each_other() -> None:
    os.mkdir("cache")
    first = bag_on_ssd()
    with told(InUseError, f"pid {os.getpid()}", "a directory of its own"):
        bag_on_ssd("auto")
    first.close()


def test_a_relative_folder_is_meant_as_of_then() -> None:
    for name in ("cache", "elsewhere"):
        os.mkdir(name)
    bag = bag_on_ssd()
    os.chdir("elsewhere")
    bag.close()
    assert not os.listdir(".")
    os.chdir("..")
    again = bag_on_ssd("resume")
    assert len(again) == 2
    again.close()


# ---- saving and loading


def test_second_save_is_a_newer_checkpoint_that_loads() -> None:
    model = trained()
    Saver(rank=0).save(model, "checkpoint")
    model(batch([50]))["item"].sum().backward()
    Saver(rank=0).save(model, "checkpoint")
    again = nn.Sequential(collection())
    assert sum(Saver(rank=0).load(again, "checkpoint").rows.values()) == 4
    assert rows(again) == 4


def test_paths_that_no_checkpoint_goes_to_are_refused_with_a_cure() -> None:
    model = trained()
    Path("file").write_text("")
    with told(PathError, "file is a file", "give another path"):
        Saver(rank=0).save(model, "file")
    os.mkdir("mine", 0o755)
    os.chmod("mine", 0o755)
    with told(StoragePermissionError, 'path_checks="basic"', f"chmod 750 {os.getcwd()}/mine"):
        Saver(rank=0).save(model, "mine")
    Saver(rank=0, path_checks="basic").save(model, "mine")
    os.mkdir("shared")
    os.chmod("shared", 0o1777)
    with told(StoragePermissionError, "make a directory of your own in it (mkdir -m 750"):
        Saver(rank=0).save(model, "shared")
    with told(ConfigError, "leave rank out"):
        Saver(rank=1).save(model, "checkpoint")


def test_a_load_from_where_nothing_is_says_so_and_leaves_the_rows() -> None:
    model = trained()
    with told(PathError, "there is not a directory", "check the path"):
        Saver(rank=0).load(model, "checkpoint")
    os.mkdir("checkpoint", 0o750)
    with told(PathError, "there is no checkpoint in", "save one first"):
        Saver(rank=0).load(model, "checkpoint")
    assert rows(model) == 3


def test_evaluation_loads_what_another_optimizer_trained() -> None:
    Saver(rank=0).save(trained(), "checkpoint")
    for optimizer in (None, torch.optim.Adam):
        model = nn.Sequential(collection(optimizer=optimizer))
        with told(MismatchError, "torchrec.optim.RowWiseAdagrad", "slots=False"):
            Saver(rank=0).load(model, "checkpoint")
        assert sum(Saver(rank=0).load(model, "checkpoint", slots=False).rows.values()) == 3


def test_a_state_dict_alone_does_not_pass_for_a_model() -> None:
    model = trained()
    with pytest.warns(EmbCacheWarning, match=r"save them with Saver\(rank\)\.save\(model, path\)"):
        torch.save(model.state_dict(), "model.pt")
    state = torch.load("model.pt")
    with told(StateError, "Saver(rank).load(model, path)", "strict=False"):
        nn.Sequential(collection()).load_state_dict(state)


def test_log_tells_opens_resumes_flushes_saves_and_loads(caplog: pytest.LogCaptureFixture) -> None:
    os.mkdir("cache")
    with caplog.at_level(logging.INFO, "torchrec_embcache"):
        bag_on_ssd().close()
        bag = bag_on_ssd("auto")
        Saver(rank=0).save(bag, "checkpoint")
        Saver(rank=0).load(bag, "checkpoint")
        bag.close()
    said = " ".join(record.getMessage() for record in caplog.records)
    for word in ("open", "resume", "flush", "save", "load"):
        assert word in said, said


# ---- the command


WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
from torchrec_embcache.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_without_its_extra_says_the_extra() -> None:
    Saver(rank=0).save(trained(), "checkpoint")
    for options, code in (([], 3), (["--json"], 0)):
        command = [sys.executable, "-c", WITHOUT_RICH, "inspect", "checkpoint", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == code, done.stderr
        assert ('pip install "torchrec-embcache[cli]"' in done.stderr) == (code == 3)
        assert "Traceback" not in done.stderr
