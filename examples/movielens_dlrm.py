"""Train a DLRM on MovieLens-100K with tables in three tiers, and verify the results.

1. The same DLRM is trained twice from the same initial values: on plain TorchRec (`EmbeddingBagCollection`), and on
   `EmbCacheEmbeddingBagCollection` with budgets so small that device tier, host tier and SSD all serve rows.
2. The losses of every step, the AUC on later ratings, and every row must agree.
3. The tables are saved, and loaded by two new processes. Every row and every prediction is compared. Then training continues there.
4. A page shows the results: `target/demo/report.html`.

    python examples/movielens_dlrm.py [--epochs 1] [--ratings 100000] [--folder DIR] [--report FILE]

The exit status is 0 only if all results agree.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# Hide warnings that the libraries raise about each other.
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|tensordict|torchmetrics).*")
for library in ("torchrec", "torch.fx"):
    logging.getLogger(library).setLevel(logging.ERROR)

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tqdm import tqdm

from movielens import FEATURES, TABLES, Ratings, read_ratings
from report import Run, write_report
from reporting import Checks, Course, rows_of, show_tiers
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingBagConfig,
    EmbCacheTrainPipelineSparseDist,
    TierBudgets,
    __version__,
    cache_modules,
    flush,
    initializers,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import UnsupportedError
from torchrec_embcache.monitoring import JsonlLogger
from torchrec_embcache.sizing import traffic_of
from torchrec_embcache.table.cache_table import CacheTable

DIM = 16
BATCH = 512
CPU = torch.device("cpu")
# This eps is near the size of the gradients. With a tiny eps, Adagrad amplifies gradients that are mere rounding errors to full
# steps.
SPARSE_LR = {"lr": 0.05, "eps": 1e-5}
DENSE_LR = 0.01
# Row counts of the plain tables. Cached tables have one row per id.
SIZES = {"user": 1_000, "item": 2_000, "cross": 50_000}
# The budgets of each table. A row uses 96 bytes: 64 of weights, and 32 of its header with the optimizer's sum.
DEVICE_BYTES = {"user": "64KiB", "item": "192KiB", "cross": "384KiB"}
HOST_BYTES = {"user": "192KiB", "item": "192KiB", "cross": "384KiB"}
SSD_BYTES = "64MiB"
# Number of samples of the tables' counters in the report.
SAMPLES = 50
REPORT = Path(__file__).resolve().parents[1] / "target" / "demo" / "report.html"


def make_dlrm(tables: EmbeddingBagCollection) -> DLRMTrain:
    torch.manual_seed(0)
    return DLRMTrain(
        DLRM(tables, dense_in_features=4, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[64, 32, 1])
    )


def make_plain() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table,
                embedding_dim=DIM,
                num_embeddings=SIZES[table],
                feature_names=features,
                pooling=PoolingType.MEAN,
            )
            for table, features in TABLES.items()
        ],
        device=CPU,
    )


def make_cached(ssd_dir: Path, *, device_tier: bool) -> EmbCacheEmbeddingBagCollection:
    return EmbCacheEmbeddingBagCollection(
        tables=[
            EmbCacheEmbeddingBagConfig(
                name=table,
                embedding_dim=DIM,
                num_embeddings=SIZES[table],
                feature_names=features,
                pooling=PoolingType.MEAN,
                initializer=initializers.Uniform(-0.1, 0.1),
                tiers=TierBudgets(
                    device_bytes=DEVICE_BYTES[table] if device_tier else 0,
                    host_bytes=HOST_BYTES[table],
                    ssd_bytes=SSD_BYTES,
                    ssd_dir=ssd_dir,
                    sizing=device_tier,  # the report shows the miss ratios of the training
                ),
            )
            for table, features in TABLES.items()
        ],
        name="tables",
        device=CPU,
        seed=7,
    )


def shard(model: DLRMTrain) -> DistributedModelParallel:
    tables = model.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), SPARSE_LR)
    return DistributedModelParallel(model, device=CPU, sharders=[EmbCacheEmbeddingBagCollectionSharder()])


def tables_of(model: torch.nn.Module) -> dict[str, CacheTable]:
    """Returns this rank's shard of every table."""
    return {name: table for module in cache_modules(model).values() for name, table in module.tables.items()}


def collection_of(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the collection itself, within which tables are identified by name only."""
    (collection,) = cache_modules(model).values()
    assert isinstance(collection, torch.nn.Module)
    return collection


def dense_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of the MLPs, by their names in the bare model."""
    found = {}
    for name, parameter in model.named_parameters():
        bare = name[name.index("model.dense_arch") :] if "model.dense_arch" in name else name
        bare = name[name.index("model.over_arch") :] if "model.over_arch" in name else bare
        if bare.startswith(("model.dense_arch", "model.over_arch")):
            found[bare] = parameter
    return found


@torch.no_grad()
def predict(model: torch.nn.Module, batches: Iterator[Batch]) -> torch.Tensor:
    """Returns the logits of all ratings."""
    model.eval()
    logits = [model(batch)[1][1] for batch in batches]
    model.train()
    return torch.cat(logits)


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the fraction of pairs (liked, not liked) that are in order; a tie counts half (the Mann-Whitney statistic)."""
    _, inverse, counts = torch.unique(logits.double(), return_inverse=True, return_counts=True)
    rank = (torch.cumsum(counts, 0) - (counts - 1) / 2)[inverse]
    liked = labels > 0.5
    positive, negative = int(liked.sum()), int((~liked).sum())
    return (float(rank[liked].sum()) - positive * (positive + 1) / 2) / (positive * negative)


@contextmanager
def process_group() -> Generator[None]:
    """Creates torchrun's process group, or a process group of a single rank."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def remap(batch: Batch, known: dict[str, torch.Tensor]) -> Batch:
    """Replaces each id by its index among the table's known ids, as a plain table requires."""
    features = batch.sparse_features
    of_feature = {feature: table for table, names in TABLES.items() for feature in names}
    values = [torch.searchsorted(known[of_feature[feature]], features[feature].values()) for feature in FEATURES]
    plain = KeyedJaggedTensor(keys=FEATURES, values=torch.cat(values), lengths=features.lengths())
    return Batch(dense_features=batch.dense_features, sparse_features=plain, labels=batch.labels)


def train_plain(model: DLRMTrain, train: Ratings, known: dict[str, torch.Tensor], epochs: int) -> Course:
    """Trains on plain TorchRec. Returns the loss and the seconds of every step."""
    tables = model.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), SPARSE_LR)
    optimizer = torch.optim.Adagrad(dense_parameters(model).values(), lr=DENSE_LR)
    losses, times = [], []
    with tqdm(total=epochs * (len(train) // BATCH), desc="plain TorchRec ", unit="step", mininterval=0.5) as bar:
        for epoch in range(epochs):
            for batch in train.batches(BATCH, shuffle_seed=epoch):
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss, _ = model(remap(batch, known))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                times.append(time.perf_counter() - begin)
                bar.set_postfix(loss=f"{float(losses[-1]):.4f}", refresh=False)
                bar.update()
    return Course(torch.stack(losses), times)


def train_cached(
    model: DistributedModelParallel,
    train: Ratings,
    epochs: int,
    lookahead: int,
    *,
    show: bool = True,
    after_step: Callable[[int], None] = lambda _step: None,
) -> Course:
    """Trains on cached tables. Returns the loss and the seconds of every step. Calls `after_step` with the number of steps."""
    optimizer = torch.optim.Adagrad(dense_parameters(model).values(), lr=DENSE_LR)
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, CPU, lookahead=lookahead, execute_all_batches=True)
    batches = (batch for epoch in range(epochs) for batch in train.batches(BATCH, shuffle_seed=epoch))
    losses, times = [], []
    with tqdm(
        total=epochs * (len(train) // BATCH), desc="three tiers    ", unit="step", mininterval=0.5, disable=not show
    ) as bar:
        while True:
            begin = time.perf_counter()
            try:
                loss, _, _ = pipeline.progress(batches)
            except StopIteration:
                break
            losses.append(loss)
            times.append(time.perf_counter() - begin)
            after_step(len(losses))
            bar.set_postfix(loss=f"{float(loss):.4f}", refresh=False)
            bar.update()
    pipeline.detach()  # restores the model's own forward
    return Course(torch.stack(losses), times)


def sampled_training(
    model: DistributedModelParallel, train: Ratings, options: argparse.Namespace, metrics: Path
) -> Course:
    """Trains, and writes samples of the tables' counters to the file `metrics`."""
    every = max(1, options.epochs * (len(train) // BATCH) // SAMPLES)
    with JsonlLogger(collection_of(model), metrics, interval_s=None) as logger:
        return train_cached(
            model,
            train,
            options.epochs,
            options.lookahead,
            after_step=lambda step: logger.sample(step) if step == 1 or step % every == 0 else None,
        )


def demonstrate(options: argparse.Namespace, folder: Path) -> int:
    """Runs steps 1 to 3. The last one runs in separate processes."""
    checks = Checks()
    print("reading MovieLens-100K", flush=True)
    ratings = read_ratings()
    ratings = ratings.take(torch.arange(min(options.ratings, len(ratings))))
    train, later = ratings.split(0.8)
    known = {table: ratings.ids(table) for table in TABLES}
    (folder / "ssd").mkdir(mode=0o750)

    plain = make_dlrm(make_plain())
    with process_group():
        model = shard(make_dlrm(make_cached(folder / "ssd", device_tier=True)))
        tables = tables_of(model)
        bags = dict(plain.model.sparse_arch.embedding_bag_collection.embedding_bags.named_parameters())
        with torch.no_grad():
            for name, ids in known.items():
                bags[f"{name}.weight"][: len(ids)] = tables[name].read_rows(ids).weights
        checks("reading rows that were never trained makes none", all(len(table) == 0 for table in tables.values()))

        print(f"training on {len(train)} ratings, {options.epochs} epochs, batches of {BATCH}", flush=True)
        in_ram = train_plain(plain, train, known, options.epochs)
        course = sampled_training(model, train, options, folder / "metrics.jsonl")
        traffic = traffic_of(collection_of(model))
        print(f"  {in_ram.mean_ms:.1f} ms a step in RAM, {course.mean_ms:.1f} ms over three tiers")
        show_tiers(tables, checks)

        print("against plain TorchRec", flush=True)
        checks.close("the loss of every step", course.losses, in_ram.losses, 1e-3)
        plain_logits = predict(plain, (remap(batch, known) for batch in later.batches(BATCH)))
        logits = predict(model, later.batches(BATCH))
        scores = auc(logits, later.labels), auc(plain_logits, later.labels)
        checks(
            f"AUC on the {len(later)} later ratings",
            abs(scores[0] - scores[1]) < 1e-3,
            f"{scores[0]:.5f} and {scores[1]:.5f} (0.5 is chance)",
        )
        checks("the model learned", options.epochs * len(train) < 50_000 or scores[0] > 0.7, f"AUC {scores[0]:.3f}")
        for name, table in tables.items():
            found = table.read_rows(known[name])
            checks.mostly_close(
                f"the {len(table)} rows of {name}", found.weights, bags[f"{name}.weight"][: len(found)].detach(), 1e-3
            )

        print("saving", flush=True)
        Saver(rank=0).save(model, str(folder / "checkpoint"))
        torch.save(
            {name: parameter.detach() for name, parameter in dense_parameters(model).items()}, folder / "dense.pt"
        )
        torch.save(logits, folder / "logits.pt")
        for name, table in tables.items():
            torch.save(rows_of(table), folder / f"{name}.pt")
    for table in tables.values():
        table.close()

    print("loading in two fresh processes", flush=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__),
        *("--verify", str(folder), "--ratings", str(options.ratings)),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, check=False)
    if (folder / "verified.json").exists():
        for finding in json.loads((folder / "verified.json").read_text()):
            checks.note(*finding)
    checks("two processes hold what one saved", done.returncode == 0)
    facts = {
        "ratings": f"{len(train):,} to train on, {len(later):,} later ones",
        "steps": f"{len(course.losses):,}, of {BATCH} ratings each",
        "lookahead": f"{options.lookahead} batches",
        "versions": f"torch {torch.__version__}, torchrec-embcache {__version__}",
    }
    report(Run(facts, checks, course, in_ram, scores, folder / "metrics.jsonl", traffic), options.report)
    return checks.end()


def report(run: Run, path: Path) -> None:
    """Writes the page, if matplotlib is installed."""
    try:
        write_report(run, path)
    except UnsupportedError as error:
        print(f"there is no report: {error}")


def verify(options: argparse.Namespace, folder: Path) -> int:
    """Compares this rank's shard of every loaded table bitwise with the saved rows, in one of two processes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ratings = read_ratings()
    _, later = ratings.take(torch.arange(min(options.ratings, len(ratings)))).split(0.8)
    ssd = folder / f"ssd-{world}"
    if rank == 0:
        ssd.mkdir(mode=0o750)
    dist.barrier()
    model = shard(make_dlrm(make_cached(ssd, device_tier=False)))  # with other budgets too
    Saver(rank).load(model, str(folder / "checkpoint"))
    with torch.no_grad():
        saved_dense = torch.load(folder / "dense.pt")
        for name, parameter in dense_parameters(model).items():
            parameter.copy_(saved_dense[name])

    # All ranks take part in every exchange, and rank 0 reports.
    findings: list[tuple[str, bool, str]] = []
    for name in TABLES:
        table = tables_of(model).get(name)
        mine = rows_of(table) if table is not None else {}
        saved = torch.load(folder / f"{name}.pt", weights_only=False)
        ids = mine.get("ids", np.zeros(0, np.int64))
        at = np.minimum(np.searchsorted(saved["ids"], ids), len(saved["ids"]) - 1)
        same = all(np.array_equal(mine[column], saved[column][at]) for column in mine)
        counts = [(0, False)] * world
        dist.all_gather_object(counts, (len(ids), same))
        total = sum(count for count, _ in counts)
        figures = f"{' + '.join(str(count) for count, _ in counts)} of {len(saved['ids'])}"
        findings.append(
            (f"rows of {name}, bit for bit", total == len(saved["ids"]) and all(ok for _, ok in counts), figures)
        )

    mine_rows = torch.arange(rank, len(later) // world * world, world)
    logits = predict(model, later.take(mine_rows).batches(BATCH))
    difference = (logits - torch.load(folder / "logits.pt")[mine_rows]).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    findings.append(("predictions", float(difference) < 1e-4, f"greatest difference {float(difference):.2g}"))

    before = torch.nn.functional.binary_cross_entropy_with_logits(logits, later.labels[mine_rows])
    train_cached(model, later.take(mine_rows), 1, options.lookahead, show=rank == 0)
    trained = predict(model, later.take(mine_rows).batches(BATCH))
    after = torch.nn.functional.binary_cross_entropy_with_logits(trained, later.labels[mine_rows])
    both = torch.stack([before, after])
    dist.all_reduce(both)
    better = bool(both[1] < both[0])
    findings.append(
        ("training goes on", better, f"loss on the later ratings {both[0] / world:.4f}, then {both[1] / world:.4f}")
    )

    if rank == 0:
        (folder / "verified.json").write_text(json.dumps(findings))
    flush(model)  # flushes the training since the load, on all ranks together
    checks = Checks()
    for finding in findings:
        if rank == 0:
            checks(*finding)
        elif not finding[1]:
            checks.failed.append(finding[0])
    return 1 if checks.failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--ratings", type=int, default=100_000, help="of the 100,000, the first so many")
    parser.add_argument("--lookahead", type=int, default=4, help="batches planned ahead")
    parser.add_argument("--folder", type=Path, help="an empty directory to work in, kept; by default a temporary one")
    parser.add_argument(
        "--report", type=Path, default=REPORT, help="the page that shows the run; by default %(default)s"
    )
    parser.add_argument("--verify", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    if options.verify:
        with process_group():
            return verify(options, options.verify)
    if options.folder:
        return demonstrate(options, options.folder)
    with tempfile.TemporaryDirectory() as folder:
        return demonstrate(options, Path(folder))


if __name__ == "__main__":
    begin = time.perf_counter()
    given = arguments()
    if not given.verify:
        given.report.unlink(missing_ok=True)  # the report of a previous run
    status = main(given)
    if not given.verify:
        print(f"{'all of it agrees' if status == 0 else 'FAILED'} ({time.perf_counter() - begin:.0f} s)")
        if given.report.exists():
            print(f"the report is in {given.report}")
    sys.exit(status)
