"""Convert from plain TorchRec to this package and back, through PyTorch's distributed checkpoints (DCP).

1. Plain TorchRec trains a model, and `torch.distributed.checkpoint` saves it.
2. `embcache convert --from torchrec-dcp` converts it to a checkpoint of this package. A model with our tables loads it, rows and
   optimizer slots, and its outputs are bitwise identical to TorchRec's. Both then train on the same batches, and still agree.
3. `embcache convert --to torchrec-dcp` converts our trained tables back. A new plain TorchRec model loads them; its outputs agree.

The exit status is 0 only if all results agree.

    python examples/torchrec_dcp.py [--steps 20] [--folder DIR]
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, cast

# Hide warnings that the libraries raise about each other.
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict|torchmetrics).*")
for library in ("torchrec", "torch.fx"):
    logging.getLogger(library).setLevel(logging.ERROR)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from reporting import Checks
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    Saver,
    TierBudgets,
    cache_modules,
)

ROWS = {"user": 5_000, "item": 20_000}
DIM = 16
CPU = torch.device("cpu")


class Model(nn.Module):
    """Tables, and their pooled rows for a batch. (A dense part would be saved and loaded as usual.)"""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
        self.tables = tables

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the pooled rows [B, 2 D]."""
        pooled = self.tables(features)
        values: torch.Tensor = pooled.values()
        return values


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in ROWS.items()
    ]


def plain() -> DistributedModelParallel:
    """Returns the model on TorchRec's own tables."""
    torch.manual_seed(3)
    sharders = [cast("ModuleSharder[nn.Module]", EmbeddingBagCollectionSharder())]
    # By default the planner trains small tables as dense parameters, without the fused optimizer.
    sharded = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(topology=Topology(dist.get_world_size(), "cpu"), constraints=sharded)
    model = Model(EmbeddingBagCollection(tables=configs(), device=torch.device("meta")))
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def ours(ssd_dir: Path) -> DistributedModelParallel:
    """Returns the model on our tables: the same configs, and budgets that do not fit all rows in RAM."""
    tiers = TierBudgets(host_bytes="1MiB", ssd_bytes="128MiB", ssd_dir=ssd_dir)
    tables = EmbCacheEmbeddingBagCollection(tables=configs(), tiers=tiers, name="tables", device=CPU)
    return DistributedModelParallel(Model(tables), device=CPU, sharders=[EmbCacheEmbeddingBagCollectionSharder()])


def batch(step: int) -> KeyedJaggedTensor:
    """Returns 256 samples with up to 4 ids of each feature."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (len(ROWS), 256), generator=generator)
    values = [
        (torch.rand(int(count), generator=generator) ** 3 * rows).long()
        for count, rows in zip(lengths.sum(1).tolist(), ROWS.values(), strict=True)
    ]
    return KeyedJaggedTensor(list(ROWS), torch.cat(values), lengths=lengths.reshape(-1))


def train(model: nn.Module, steps: range) -> None:
    for step in steps:
        out: torch.Tensor = model(batch(step))
        (out - 1).square().mean(1).sum().backward()  # the backward updates the rows, in both packages


def answers(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        out: torch.Tensor = model(batch(1_000_000))
    model.train()
    return out


def state_of(model: DistributedModelParallel) -> dict[str, Any]:
    """Returns the state of a TorchRec model that DCP saves and loads."""
    return {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}


def convert(*arguments: object) -> None:
    """Runs the command `embcache convert`."""
    command = ["embcache", "convert", *map(str, arguments)]
    print("$", " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", "torchrec_embcache", *command[1:]], check=True, stdout=subprocess.DEVNULL)


def there_and_back(folder: Path, steps: int) -> int:
    checks = Checks()
    theirs = plain()
    train(theirs, range(steps))
    save(state_of(theirs), checkpoint_id=str(folder / "theirs"))

    # `--model-key model` is the key of the model's state dict in the saved state.
    convert(folder / "theirs", folder / "ours", "--from", "torchrec-dcp", "--model-key", "model", "--step", steps)
    cached = ours(folder / "ssd")
    Saver(0).load(cached, folder / "ours")
    checks.close("ours answers as TorchRec's does", answers(cached), answers(theirs), 0.0)

    train(theirs, range(steps, 2 * steps))
    train(cached, range(steps, 2 * steps))
    checks.close("after as many steps again", answers(cached), answers(theirs), 1e-5)

    Saver(0).save(cached, folder / "ours")
    rows = [word for name, count in ROWS.items() for word in ("--rows", f"{name}={count}")]
    convert(folder / "ours", folder / "back", "--to", "torchrec-dcp", "--model-key", "model", *rows)
    again = plain()
    state = state_of(again)
    load(state, checkpoint_id=str(folder / "back"))
    again.load_state_dict(state["model"])
    again.fused_optimizer.load_state_dict(state["optim"])
    checks.close("TorchRec's answers as ours does", answers(again), answers(cached), 0.0)
    train(again, range(2 * steps, 2 * steps + 5))
    train(cached, range(2 * steps, 2 * steps + 5))
    checks.close("after five steps more", answers(again), answers(cached), 1e-5)
    for module in cache_modules(cached).values():
        for table in module.tables.values():
            table.close()
    return checks.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each part")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go, kept; by default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        (folder / "ssd").mkdir(mode=0o750)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group("gloo", init_method=f"file://{temporary}/group", rank=0, world_size=1)
        status = there_and_back(folder, options.steps)
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
