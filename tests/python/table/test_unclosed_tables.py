"""Tables that are never closed: the state after a normal exit, a Ctrl-C, a dropped reference, and between scheduled flushes."""

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from processes import World, process_group
from tables import Contents, jagged, make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, cache_modules, flush, optimizers
from torchrec_embcache._ssd import autoflush
from torchrec_embcache.exceptions import EmbCacheWarning, StateError
from torchrec_embcache.modules import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig
from torchrec_models import MIXED, Model, Settings, batches, rows_of, sharded
from torchrec_models import train as train_model

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
BATCHES = random_batches(12, 6, 60, seed=5)


def bag_in(directory: Path, *, name: str = "item", mode: str = "mean", **tiers: Any) -> EmbCacheEmbeddingBag:
    return make_bag(
        name=name, mode=mode, tiers=ssd_tiers(directory, **{"host_bytes": "4KiB", "reopen": "auto", **tiers})
    )


def killed(*bags: EmbCacheEmbeddingBag) -> None:
    """End the process like a kill, so that what was not flushed is lost."""
    for bag in bags:
        bag.table._native_table.close()


def test_exit_after_a_failed_step_warns_and_flushes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBCACHE_KERNELS", "torch")
    torn = bag_in(tmp_path / "torn", name="torn", device_bytes="64KiB")
    other = bag_in(tmp_path / "other", name="other", device_bytes="64KiB")
    for bag in (torn, other):
        train(bag, BATCHES[:2])
    flushed = len(other.table.commit_ids())

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("asked to fail")

    with monkeypatch.context() as refused:
        refused.setattr(torch.Tensor, "index_copy_", refuse)
        with pytest.raises(RuntimeError, match="asked to fail"):
            train(torn, BATCHES[:1])
    with pytest.warns(EmbCacheWarning, match="nothing is flushed.*'?torn.*failed half-way"):
        autoflush.flush_at_exit()
    assert len(other.table.commit_ids()) == flushed
    killed(torn, other)


def run(source: str, folder: Path, *, sent: signal.Signals | None = None) -> tuple[int, str, str]:
    """Run a program in a process of its own, and send it `sent` when it says "ready". Returns its exit status and its output."""
    head = """
    import sys, torch
    from torchrec_embcache import EmbCacheEmbeddingBag, TierBudgets, flush, optimizers

    def make(name="item", **settings):
        budgets = TierBudgets(host_bytes="1MiB", ssd_bytes="64MiB", ssd_dir=sys.argv[1], reopen="auto")
        return EmbCacheEmbeddingBag(
            name=name, embedding_dim=4, mode="sum", tiers=budgets, optimizer=optimizers.SGD(lr=0.1), **settings
        )

    def train(bag, steps):
        for step in range(steps):
            bag(torch.arange(5 * step, 5 * step + 5), torch.tensor([0])).sum().backward()
    """
    program = textwrap.dedent(head) + textwrap.dedent(source)
    folder.mkdir(mode=0o750, exist_ok=True)
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    said = ""
    if sent is not None:
        said = process.stdout.readline()
        assert said == "ready\n"
        process.send_signal(sent)
    out, err = process.communicate(timeout=300)
    return process.returncode, said + out, err


def rows_and_step(folder: Path, name: str = "item") -> tuple[int, int]:
    """The rows that a new table finds."""
    budgets = ssd_tiers(folder, host_bytes="1MiB", reopen="auto")
    with EmbCacheEmbeddingBag(
        name=name, embedding_dim=4, mode="sum", tiers=budgets, optimizer=optimizers.SGD(lr=0.1)
    ) as bag:
        return len(bag), bag.stats().step


# ---- the end of a process


@pytest.mark.slow
def test_tables_that_nobody_closes_are_flushed_when_the_process_ends(tmp_path: Path) -> None:
    program = """
    def main():
        local = make("local")
        train(local, 3)

    main()
    known = make("known")
    train(known, 4)
    cyclic = make("cyclic")
    cyclic.__dict__["me"] = cyclic
    train(cyclic, 5)
    del cyclic
    """
    assert run(program, tmp_path / "ssd") == (0, "", "")
    found = [rows_and_step(tmp_path / "ssd", name) for name in ("local", "known", "cyclic")]
    assert found == [(15, 3), (20, 4), (25, 5)]


@pytest.mark.slow
def test_ctrl_c_between_two_steps_loses_nothing(tmp_path: Path) -> None:
    program = """
    import time
    first, second = make("first"), make("second")
    train(first, 4); train(second, 4)
    print("ready", flush=True)
    time.sleep(600)
    """
    status, _, err = run(program, tmp_path / "ssd", sent=signal.SIGINT)
    assert status == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert [rows_and_step(tmp_path / "ssd", name) for name in ("first", "second")] == [(20, 4)] * 2


INTERRUPTED = """
first, second = make("first"), make("second")
model = torch.nn.ModuleList([first, second])
train(first, 2); train(second, 2)
flush(model)

class Interrupts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt

ids, offsets = torch.arange(100, 107), torch.tensor([0])
"""


@pytest.mark.slow
def test_ctrl_c_amid_a_step_leaves_the_last_flush_and_says_so(tmp_path: Path) -> None:
    # Autograd runs the backward of the last forward first. So `second` is updated and `first` is not.
    program = INTERRUPTED + "(Interrupts.apply(first(ids, offsets)).sum() + second(ids, offsets).sum()).backward()"
    status, _, err = run(program, tmp_path / "ssd")
    assert status == -signal.SIGINT
    assert "EmbCacheWarning: the process ends amid a step" in err
    assert "nothing is flushed of table 'second'" in err
    assert [rows_and_step(tmp_path / "ssd", name) for name in ("first", "second")] == [(10, 2)] * 2


class Interrupts(torch.autograd.Function):
    """A function whose backward meets a Ctrl-C."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.fixture
def two_flushed(tmp_path: Path) -> list[EmbCacheEmbeddingBag]:
    """Two tables that were flushed at two steps."""
    bags = [bag_in(tmp_path / "ssd", name=name, host_bytes="1MiB", mode="sum") for name in ("first", "second")]
    for bag in bags:
        train(bag, BATCHES[:2])
    flush(torch.nn.ModuleList(bags))
    return bags


def end(bags: list[EmbCacheEmbeddingBag], folder: Path) -> list[int]:
    """The steps that a resume finds once the process has ended."""
    autoflush.flush_at_exit()
    killed(*bags)
    steps = []
    for name in ("first", "second"):
        with bag_in(folder, name=name, reopen="resume") as bag:
            steps.append(bag.stats().step)
    return steps


def test_ctrl_c_before_any_table_has_the_step_flushes_the_steps_before(two_flushed: Any, tmp_path: Path) -> None:
    step(two_flushed[0], BATCHES[3])
    out = Interrupts.apply(sum(bag(*jagged(BATCHES[2])).sum() for bag in two_flushed))
    with pytest.raises(KeyboardInterrupt):
        out.backward()
    assert end(two_flushed, tmp_path / "ssd") == [3, 2]


def test_ctrl_c_when_all_tables_have_the_step_flushes_it(two_flushed: Any, tmp_path: Path) -> None:
    # The gradient of the weights comes last.
    ids, offsets = jagged(BATCHES[2])
    weights = [Interrupts.apply(torch.ones(len(ids), requires_grad=True)) for _ in two_flushed]
    out = sum(bag(ids, offsets, per_sample_weights=own).sum() for bag, own in zip(two_flushed, weights, strict=True))
    step(two_flushed[1], BATCHES[3])
    with pytest.raises(KeyboardInterrupt):
        out.backward()
    assert end(two_flushed, tmp_path / "ssd") == [3, 4]


def test_training_that_goes_on_after_a_half_done_step_is_flushed(two_flushed: Any, tmp_path: Path) -> None:
    first, second = two_flushed
    batch = jagged(BATCHES[2])
    out = Interrupts.apply(first(*batch)).sum() + second(*batch).sum()
    with pytest.raises(KeyboardInterrupt):
        out.backward()
    with pytest.warns(EmbCacheWarning, match="amid a step"):
        autoflush.flush_at_exit()
    step(first, BATCHES[3])
    assert end(two_flushed, tmp_path / "ssd") == [3, 3]


@pytest.mark.slow
def test_a_forked_child_that_ends_flushes_nothing_of_its_parent(tmp_path: Path) -> None:
    program = """
    import os
    bag = make()
    train(bag, 2)
    bag.flush()
    train(bag, 3)
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    print(bag.table.commit_ids() == [bag.table.commit_ids()[0]])
    os._exit(0)
    """
    assert run(program, tmp_path / "ssd")[:2] == (0, "True\n")
    assert rows_and_step(tmp_path / "ssd") == (10, 2)


@pytest.mark.slow
def test_table_of_a_multiprocessing_child_is_flushed_at_its_exit(tmp_path: Path) -> None:
    program = """
    import multiprocessing
    parent = make("parent")

    def work():
        global bag
        bag = make("child")
        train(bag, 2)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    print(child.exitcode)
    """
    assert run(program, tmp_path / "ssd") == (0, "0\n", "")
    assert rows_and_step(tmp_path / "ssd", "child") == (10, 2)


@pytest.mark.slow
def test_table_that_cannot_flush_at_exit_says_what_resumes(tmp_path: Path) -> None:
    program = """
    import resource
    bag = make()
    train(bag, 2)
    bag.flush()
    train(bag, 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    """
    status, _, err = run(program, tmp_path / "ssd")
    assert status == 0
    assert "EmbCacheWarning: table 'item' could not be flushed at the end of the process" in err
    assert rows_and_step(tmp_path / "ssd") == (10, 2)


RANKS = """
import warnings
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=RANK, world_size=2)
warnings.simplefilter("default", ResourceWarning)
bag = make("shardRANK", replicated=True)
train(bag, 2)
flush(bag)
train(bag, 3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_end_without_a_flush_are_told_which_call_is_missing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(lambda rank: run(RANKS.replace("RANK", str(rank)), tmp_path / "ssd"), range(2)))
    for rank, (status, _, err) in enumerate(ended):
        assert status == 0, err
        assert f"ResourceWarning: the steps of table 'shard{rank}' since the last flush are lost" in err
        assert "torchrec_embcache.flush(model)" in err
        assert "flush_every=" in err
        assert rows_and_step(tmp_path / "ssd", f"shard{rank}") == (10, 2)


# ---- the end of a table


def test_a_dropped_table_is_flushed_and_frees_its_directory_at_once(tmp_path: Path) -> None:
    bag = bag_in(tmp_path / "ssd")
    train(bag, BATCHES[:3])
    flushed = Contents.of(bag)
    gc.disable()
    try:
        del bag
        with bag_in(tmp_path / "ssd", reopen="resume") as bag:
            assert Contents.of(bag) == flushed
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong", [{"embedding_dim": 0}, {"policy": "no"}, {"seed": -1}, {"device": "nowhere"}])
def test_a_table_whose_constructor_raises_is_dropped_in_silence(
    wrong: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bag_in(tmp_path / "ssd"):  # now this process looks after its tables
        caplog.clear()
        with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match=next(iter(wrong))):
            make_bag(**wrong)
        gc.collect()
        assert not caplog.records


def test_a_table_that_did_not_change_is_not_flushed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bag = bag_in(tmp_path / "ssd")
    train(bag, BATCHES[:3])
    bag.flush()
    published = bag.table.commit_ids()
    with caplog.at_level(logging.INFO):
        bag(torch.tensor([1, 2]), torch.tensor([0]))  # a forward alone trains nothing
        del bag
    assert not [record for record in caplog.records if "flush" in record.getMessage()]
    bag = bag_in(tmp_path / "ssd", reopen="resume")
    assert bag.table.commit_ids() == published
    bag.close()


def test_only_open_tables_are_looked_after(tmp_path: Path) -> None:
    before = set(autoflush.open_tables())
    bag = bag_in(tmp_path / "ssd")
    table = bag.table
    assert set(autoflush.open_tables()) - before == {table}
    step(bag, BATCHES[0])
    assert table._has_unflushed_rows
    bag.close()
    assert not table._has_unflushed_rows
    assert set(autoflush.open_tables()) <= before


# ---- reopen="auto"


def test_auto_starts_empty_or_resumes_the_published_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bag = bag_in(tmp_path / "ssd")
    train(bag, BATCHES[:4])
    killed(bag)
    left = Path(bag.table.directory or "", "0000000000000007.seg")
    left.write_bytes(b"written and never published")
    with caplog.at_level(logging.WARNING), bag_in(tmp_path / "ssd") as bag:
        assert not left.exists()
        assert len(bag) == 0
        train(bag, BATCHES[:6])
        whole = Contents.of(bag)
    assert "ended before its first flush was complete" in caplog.text
    for _ in range(2):
        with bag_in(tmp_path / "ssd") as bag:
            assert Contents.of(bag) == whole


def test_auto_starts_empty_after_an_unfinished_first_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleDict({name: bag_in(tmp_path / "ssd", name=name) for name in ("first", "second")})
    for bag in model.values():
        train(bag, BATCHES[:3])
    with monkeypatch.context() as patch:
        patch.setattr("torchrec_embcache._ssd.commit.CommitParticipant.commit_as_coordinator", lambda *_: None)
        flush(model)
    killed(*model.values())
    for name in model:
        with bag_in(tmp_path / "ssd", name=name) as bag:
            assert len(bag) == 0


def test_auto_never_discards_what_was_published_after_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bag_in(tmp_path / "ssd") as bag:
        train(bag, BATCHES[:3])
        whole = Contents.of(bag)
    with monkeypatch.context() as patch:
        # As if it had been published just now.
        patch.setattr("torchrec_embcache.table.cache_table.CacheTable.commit_ids", lambda _: [])
        with pytest.raises(OSError, match="published a state .* just now: open the table again"):
            bag_in(tmp_path / "ssd")
    with bag_in(tmp_path / "ssd") as bag:
        assert Contents.of(bag) == whole


# ---- flush_every


def test_flush_every_so_many_steps_a_kill_loses_no_more_than_those(tmp_path: Path) -> None:
    names = ("first", "second")
    model = torch.nn.ModuleDict({name: bag_in(tmp_path / "ssd", name=name, flush_every=4) for name in names})
    contents = []
    for bags in BATCHES[:10]:
        contents.append([Contents.of(bag) for bag in model.values()])
        outs = [bag(*jagged(bags)).sum() for bag in model.values()]
        sum(outs).backward()
    killed(*model.values())
    found = []
    for name in names:
        with bag_in(tmp_path / "ssd", name=name, reopen="resume") as bag:
            found.append(Contents.of(bag))
    assert found == contents[8]


def test_flush_every_so_long_flushes_at_the_first_step_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("torchrec_embcache._ssd.autoflush.time.monotonic", lambda: now[0])
    bag = bag_in(tmp_path / "ssd", flush_every="10min")
    published = []
    for place, bags in enumerate(BATCHES[:9]):
        step(bag, bags)
        published.append(len(bag.table.commit_ids()))
        now[0] += 150.0 if place != 6 else 0.0
    # A step takes 150 s. Before the fifth one 600 s have passed, and 450 s more before the last one.
    assert published == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    bag.close()


def test_evaluation_and_recomputed_activations_flush_nothing(tmp_path: Path) -> None:
    bag = bag_in(tmp_path / "ssd", flush_every=2)
    step(bag, BATCHES[0])
    bag.eval()
    for bags in BATCHES[1:5]:
        bag(*jagged(bags))
    bag.train()
    assert not bag.table.commit_ids()
    ids, offsets = jagged(BATCHES[1])
    checkpoint(bag, ids, offsets, use_reentrant=False).sum().backward()
    assert not bag.table.commit_ids()
    step(bag, BATCHES[2])
    assert len(bag.table.commit_ids()) == 1
    bag.close()


def schedule_on_ranks(rank: int, _size: int, every: Any) -> list[int]:
    """The steps before which a rank flushes when the clocks of the ranks differ."""
    flushed: list[int] = []
    steps = [0]
    now = [1000.0 * rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_embcache._ssd.autoflush.time.monotonic", lambda: now[0])
        patch.setattr("torchrec_embcache._ssd.autoflush.flush_tables", lambda *_, **__: flushed.append(steps[0]))
        schedule = autoflush.FlushSchedule([every], collective=True)
        for steps[0] in range(60):
            schedule.flush_if_due()
            now[0] += 1.0 if rank == 0 else 5.0
    return flushed


@pytest.mark.parametrize(("every", "expected"), [(20, [20, 40]), (20.0, None)])
def test_ranks_flush_at_the_same_steps_whatever_their_clocks_say(
    two_ranks: World, every: Any, expected: list[int] | None
) -> None:
    first, second = two_ranks.run(schedule_on_ranks, every)
    assert first == second
    if expected is not None:
        assert first == expected
    else:
        # By rank 0's clock a step takes a second.
        assert len(first) == 2
        assert all(20 <= later - earlier <= 30 for earlier, later in zip([0, *first], first, strict=False))


def flushed_in_turn(rank: int, world: int, folder: str) -> tuple[Any, Any]:
    """The rows when every third step was trained last, and those that a resume finds two steps later."""

    def made(reopen: Any = None) -> torch.nn.Module:
        tiers = TierBudgets(host_bytes="256KiB", ssd_bytes="32MiB", ssd_dir=folder, reopen=reopen, flush_every=3)
        return sharded(Model(Settings(tiers=tiers)), MIXED, FUSED)

    model = made()
    steps = list(batches(8, rank, world))
    train_model(model, iter(steps[:6]))
    rows = rows_of(model)
    train_model(model, iter(steps[6:]))
    for module in cache_modules(model).values():
        for table in module.tables.values():
            table._native_table.close()  # like a kill
    return rows, rows_of(made("resume"))


def test_ranks_flush_their_tables_together_every_so_many_steps(two_ranks: World, tmp_path: Path) -> None:
    for rows, found in two_ranks.run(flushed_in_turn, str(tmp_path)):
        assert rows
        assert found == rows


# ---- marks


def test_table_keeps_its_joint_flush_while_others_flush_alone(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({name: bag_in(tmp_path / "ssd", name=name) for name in ("first", "second")})
    for bag in model.values():
        train(bag, BATCHES[:2])
    flush(model)
    kept = Contents.of(model["second"])
    for bags in BATCHES[2:6]:
        step(model["first"], bags)
        flush(model["first"])
    killed(*model.values())
    with bag_in(tmp_path / "ssd", name="second", reopen="resume") as bag:
        assert Contents.of(bag) == kept


# ---- several ranks that forgot the sharder


def collection(**settings: Any) -> EmbCacheEmbeddingBagCollection:
    config = EmbCacheEmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=100, feature_names=["f"], pooling=PoolingType.SUM
    )
    made = EmbCacheEmbeddingBagCollection([config], tiers=TierBudgets(host_bytes="1MiB"), **settings)
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
    return made


def train_unsharded(_rank: int, _size: int, settings: dict[str, Any]) -> str:
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([2]))
    made = collection(**settings)
    made.eval()
    made(batch)  # reading does no harm
    made.train()
    try:
        made(batch).values().sum().backward()
    except StateError as error:
        return str(error)
    return f"{len(made.tables['t'])} rows"


def test_unsharded_collection_on_ranks_names_the_sharder(two_ranks: World) -> None:
    for said in two_ranks.run(train_unsharded, {}):
        assert "on each of 2 ranks" in said
        assert "sharders=[EmbCacheEmbeddingBagCollectionSharder()]" in said
        assert "replicated=True" in said
    assert two_ranks.run(train_unsharded, {"replicated": True}) == ["2 rows"] * 2


def test_an_unsharded_collection_of_one_rank_trains(tmp_path: Path) -> None:
    with process_group(0, 1, str(tmp_path / "store")):
        assert train_unsharded(0, 1, {}) == "2 rows"


def warn_of_plain(_rank: int, _size: int) -> list[list[str]]:
    said = []
    for settings in ({}, {"replicated": True}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with make_bag(**settings) as bag:
                train(bag, BATCHES[:3])
        said.append([str(warning.message) for warning in caught])
    return said


def test_plain_table_on_ranks_warns_once_that_each_has_its_own(two_ranks: World) -> None:
    for (said,), silent in two_ranks.run(warn_of_plain):
        assert "each of 2 ranks by itself" in said
        assert "sharders=" in said
        assert "replicated=True" in said
        assert not silent
