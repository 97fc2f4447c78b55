"""Flush and resume: the state after a kill, the owner of a directory, and one state of several tables."""

import contextlib
import errno
import gc
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

from processes import Child
from tables import Contents, make_bag, random_batches, ssd_tiers, step, train
from torchrec_embcache import (
    CacheTable,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheWarning,
    TierBudgets,
    _native,
    cache_modules,
    flush,
    initializers,
    optimizers,
)
from torchrec_embcache.exceptions import (
    ConfigError,
    CorruptionError,
    EmbCacheError,
    InputError,
    InUseError,
    MismatchError,
    StateError,
    StorageError,
)

BATCHES = random_batches(12, 5, 150, seed=2)
pytestmark = pytest.mark.filterwarnings("ignore:table '.*' did not fit")


def bag_in(directory, **settings):
    reopen = settings.pop("reopen", None)
    return make_bag(tiers=ssd_tiers(directory, host_bytes="4KiB", reopen=reopen), **settings)


def test_closing_and_resuming_goes_on_with_the_same_bits(tmp_path):
    with make_bag() as straight:
        train(straight, BATCHES)
        expected = Contents.of(straight)
    with bag_in(tmp_path / "ssd") as bag:
        train(bag, BATCHES[:6])
        half = Contents.of(bag)
    with bag_in(tmp_path / "ssd", reopen="resume") as bag:
        assert Contents.of(bag) == half
        train(bag, BATCHES[6:])
        assert Contents.of(bag) == expected


def test_resuming_takes_the_last_flush_whatever_was_trained_since(tmp_path):
    bag = bag_in(tmp_path / "ssd")
    for bags in (BATCHES[:3], BATCHES[3:6]):
        train(bag, bags)
        bag.flush()
    flushed = Contents.of(bag)
    train(bag, BATCHES[6:])
    bag.table._native_table.close()  # like a kill, without a flush
    with bag_in(tmp_path / "ssd", reopen="resume") as bag:
        assert Contents.of(bag) == flushed


def test_a_deleted_module_frees_its_directory_at_once(tmp_path):
    bag = bag_in(tmp_path / "ssd")
    train(bag, BATCHES[:3])
    bag.flush()
    flushed = Contents.of(bag)
    gc.disable()
    try:
        del bag
        with bag_in(tmp_path / "ssd", reopen="resume") as bag:
            assert Contents.of(bag) == flushed
    finally:
        gc.enable()


def killed(_say, directory):
    warnings.simplefilter("ignore")
    bag = make_bag(tiers=ssd_tiers(directory, host_bytes="4KiB"))
    train(bag, BATCHES[:6])
    bag.flush()
    train(bag, BATCHES[6:])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_process_leaves_its_last_flush_and_no_lock(tmp_path):
    _, status = Child(killed, tmp_path / "ssd").ended()
    assert status == -signal.SIGKILL
    with make_bag() as straight:
        train(straight, BATCHES[:6])
        expected = Contents.of(straight)
    with bag_in(tmp_path / "ssd", reopen="resume") as bag:
        assert Contents.of(bag) == expected


def test_a_directory_with_files_wants_to_be_told_what_to_do(tmp_path):
    with bag_in(tmp_path / "ssd") as bag:
        step(bag, [[1]])
    with pytest.raises(EmbCacheError, match="reopen"):
        bag_in(tmp_path / "ssd")
    with bag_in(tmp_path / "ssd", reopen="discard") as bag:
        assert len(bag) == 0
    with bag_in(tmp_path / "new", reopen="resume") as bag:  # nothing is there, so it starts anew
        assert len(bag) == 0


def test_a_directory_in_use_is_refused_at_once_naming_the_process(tmp_path):
    with bag_in(tmp_path / "ssd"):
        for reopen in (None, "resume", "discard"):
            with pytest.raises(InUseError, match=str(os.getpid())) as caught:
                bag_in(tmp_path / "ssd", reopen=reopen)
            assert isinstance(caught.value, OSError)
    with bag_in(tmp_path / "ssd", reopen="resume"):
        pass


@pytest.mark.parametrize(
    "other",
    [
        {"embedding_dim": 8},
        {"seed": 8},
        {"optimizer": optimizers.SGD()},
        {"initializer": initializers.Constant(0)},
        {"total_num_buckets": 7},
    ],
)
def test_resuming_as_another_table_is_refused_pointing_to_saver(other, tmp_path):
    with bag_in(tmp_path / "ssd") as bag:
        step(bag, [[1]])
    with pytest.raises(MismatchError, match="Saver"):
        bag_in(tmp_path / "ssd", reopen="resume", **other)
    with bag_in(tmp_path / "ssd", reopen="resume") as bag:
        assert len(bag) == 1


def test_files_lie_below_module_and_table_with_encoded_names(tmp_path):
    with bag_in(tmp_path / "ssd", name="../a b"):
        pass
    folders = [path.relative_to(tmp_path / "ssd") for path in (tmp_path / "ssd").glob("*/*/*") if path.is_dir()]
    assert [folder.name for folder in folders] == ["0-of-1"]
    assert len(folders[0].parts) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "ssd"]


def two_bags(directory, reopen=None):
    return torch.nn.ModuleDict({name: bag_in(directory, name=name, reopen=reopen) for name in ("first", "second")})


def test_a_flush_of_a_model_is_one_state_of_all_its_tables(tmp_path):
    model = two_bags(tmp_path / "ssd")
    assert list(cache_modules(torch.nn.Sequential(model))) == ["0.first", "0.second"]
    train(model["first"], BATCHES[:3])
    train(model["second"], BATCHES[3:6])
    flush(model)
    flushed = {name: Contents.of(bag) for name, bag in model.items()}
    for bag in model.values():
        train(bag, BATCHES[6:])
        bag.table._native_table.close()
    model = two_bags(tmp_path / "ssd", "resume")
    assert {name: Contents.of(bag) for name, bag in model.items()} == flushed
    for bag in model.values():
        bag.close()


def test_flush_that_ends_between_tables_leaves_the_prior_state(tmp_path, monkeypatch):
    model = two_bags(tmp_path / "ssd")
    for bag in model.values():
        train(bag, BATCHES[:3])
    flush(model)
    flushed = {name: Contents.of(bag) for name, bag in model.items()}
    for bag in model.values():
        train(bag, BATCHES[3:6])
    with monkeypatch.context() as patch:
        patch.setattr(
            "torchrec_embcache._ssd.commit.CommitParticipant.commit_as_coordinator", lambda *_: None
        )  # no mark is made
        flush(model)
    for bag in model.values():
        bag.table._native_table.close()
    model = two_bags(tmp_path / "ssd", "resume")
    assert {name: Contents.of(bag) for name, bag in model.items()} == flushed
    for bag in model.values():
        bag.close()


def test_unfinished_first_flush_leaves_nothing_to_resume(tmp_path, monkeypatch):
    model = two_bags(tmp_path / "ssd")
    with monkeypatch.context() as patch:
        patch.setattr("torchrec_embcache._ssd.commit.CommitParticipant.commit_as_coordinator", lambda *_: None)
        flush(model)
    for bag in model.values():
        bag.table._native_table.close()
    with pytest.raises(StateError, match="did not finish.*discard"):
        bag_in(tmp_path / "ssd", name="first", reopen="resume")


def test_marks_of_states_that_nobody_keeps_are_removed(tmp_path):
    model = two_bags(tmp_path / "ssd")
    for bags in BATCHES[:5]:
        for bag in model.values():
            step(bag, bags)
        flush(model)
    kept = {commit_id for bag in model.values() for commit_id in bag.table.commit_ids()}
    marks = [path.name for path in (tmp_path / "ssd" / ".flushed").iterdir() if path.suffix != ".root"]
    assert {int(mark) for mark in marks} == kept
    assert len(kept) == 2
    for bag in model.values():
        bag.close()


@pytest.mark.parametrize("refused", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_marks_stay_where_tables_cannot_be_looked_for(tmp_path, monkeypatch, refused):
    ssd = tmp_path / "ssd"
    model = two_bags(ssd)
    for bag in model.values():
        train(bag, BATCHES[:3])
    flush(model)
    second = model.pop("second")
    flushed = Contents.of(second)
    second.table._native_table.close()  # it keeps the state that was flushed together with the first table's
    model["third"] = bag_in(ssd, name="third")
    listdir = os.listdir

    def refuse(path):
        if str(path).endswith("second"):
            raise OSError(refused, os.strerror(refused), path)
        return listdir(path)

    def train_and_flush():
        for bag in model.values():
            train(bag, BATCHES[3:4])
        flush(model)

    train_and_flush()
    with monkeypatch.context() as patch:
        patch.setattr("torchrec_embcache._ssd.commit.os.listdir", refuse)
        with pytest.raises(EmbCacheError, match="cannot look for tables in .*second") as caught:
            train_and_flush()
    assert caught.value.errno == refused
    train_and_flush()
    contents = {name: Contents.of(bag) for name, bag in model.items()}
    for bag in model.values():
        bag.close()
    with bag_in(ssd, name="second", reopen="resume") as bag:
        assert Contents.of(bag) == flushed
    for name in contents:
        with bag_in(ssd, name=name, reopen="resume") as bag:
            assert Contents.of(bag) == contents[name]


ROOTS = ("one", "two")


def bags_of_roots(directory, reopen=None):
    """A table below each of two roots."""
    return torch.nn.ModuleDict({name: bag_in(directory / name, name=name, reopen=reopen) for name in ROOTS})


class Killed(BaseException):
    pass


def stop_at(patch, calls):
    """End the process, as it were, at the call of this number to the marks."""
    left = [calls]

    class Counted:
        def __init__(self, *root):
            self.root = _native.CommitDirectory(*root)

        def __getattr__(self, name):
            if name in ("identify", "prepare", "commit", "forget"):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return getattr(self.root, name)

    patch.setattr("torchrec_embcache._ssd.commit.CommitDirectory", Counted)
    return left


@pytest.mark.slow
def test_roots_agree_wherever_a_flush_of_a_model_is_cut_short(tmp_path, monkeypatch):
    states = {"old": 0, "new": 0}
    for calls in range(100):
        directory = tmp_path / str(calls)
        model = bags_of_roots(directory)
        contents = []
        for place, bags in enumerate(BATCHES[:3]):
            for bag in model.values():
                step(bag, bags)
            contents.append({name: Contents.of(bag) for name, bag in model.items()})
            if place < 2:
                flush(model)
        with monkeypatch.context() as patch:
            left = stop_at(patch, calls)
            with contextlib.suppress(Killed):
                flush(model)
        for bag in model.values():
            bag.table._native_table.close()
        model = bags_of_roots(directory, "resume")
        found = {name: Contents.of(bag) for name, bag in model.items()}
        assert found in contents[1:], f"roots differ where the flush ends at call {calls}"
        states["old" if found == contents[1] else "new"] += 1
        for bag in model.values():
            step(bag, BATCHES[6])
        flush(model)
        flushed = {name: Contents.of(bag) for name, bag in model.items()}
        for bag in model.values():
            bag.table._native_table.close()
        model = bags_of_roots(directory, "resume")
        assert {name: Contents.of(bag) for name, bag in model.items()} == flushed
        for bag in model.values():
            bag.close()
        if left[0] > 0:
            break
    assert states["old"] >= 5, states
    assert states["new"] >= 2, states


def test_a_root_whose_coordinator_is_gone_says_where_it_was(tmp_path, monkeypatch):
    model = bags_of_roots(tmp_path)
    for bag in model.values():
        train(bag, BATCHES[:2])
    with monkeypatch.context() as patch:
        patch.setattr("torchrec_embcache._ssd.commit.CommitParticipant.commit_as_participant", lambda *_: None)
        flush(model)
    for bag in model.values():
        bag.table._native_table.close()
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    with pytest.raises(StateError, match=f"{tmp_path / 'one'}, which says whether it was, is not there.*discard"):
        bag_in(tmp_path / "two", name="two", reopen="resume")
    (tmp_path / "one").mkdir(mode=0o700)  # another directory there means nothing
    with pytest.raises(StateError, match="is not there"):
        bag_in(tmp_path / "two", name="two", reopen="resume")
    (tmp_path / "one").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "one")
    with bag_in(tmp_path / "two", name="two", reopen="resume") as bag:
        assert len(bag) > 0


def test_damaged_old_state_warns_and_damaged_newest_fails(tmp_path):
    bag = bag_in(tmp_path / "ssd")
    for bags in (BATCHES[:2], BATCHES[2:4]):
        train(bag, bags)
        bag.flush()
    flushed = Contents.of(bag)
    bag.table._native_table.close()
    older, newest = sorted(Path(bag.table.directory).glob("*.state"))
    intact = newest.read_bytes()
    for state in (older, newest):
        state.write_bytes(state.read_bytes()[:-3])
    with pytest.raises(CorruptionError, match=str(newest)):
        bag_in(tmp_path / "ssd", reopen="resume")
    assert older.exists()
    newest.write_bytes(intact)
    with pytest.warns(EmbCacheWarning, match="of the flush before.*dropped"):
        bag = bag_in(tmp_path / "ssd", reopen="resume")
    assert Contents.of(bag) == flushed
    train(bag, BATCHES[4:6])
    bag.close()


def rank_directory(root):
    return Path(root) / "ssd"


def flush_on_ranks(rank, _size, root, fail_rank, late=False):
    """Do two good flushes, then one that fails on `fail_rank`, with `late` when it is complete.

    Returns the error's words, and whether a resume finds the flush before, with `late` this one.
    """
    settings = {"name": f"shard{rank}"}  # tables of level 1 know no ranks, so each rank has its own
    bag = bag_in(rank_directory(root), **settings)
    train(bag, BATCHES[:2])
    flush(bag)
    train(bag, BATCHES[2:4])
    flush(bag)
    flushed = Contents.of(bag)
    train(bag, BATCHES[4:6])
    words = ""
    if late:
        flushed = Contents.of(bag)
    if rank == fail_rank:
        shard = bag.table
        if late:
            shard._mark_flushed = lambda *_, **__: setattr(shard, "commit_ids", lambda: refuse(None))
        else:
            shard._flush_with_commit_id = refuse
    try:
        flush(bag)
    except StorageError as error:
        words = str(error)
    bag.table._native_table.close()
    torch.distributed.barrier()
    with bag_in(rank_directory(root), reopen="resume", **settings) as bag:
        return words, Contents.of(bag) == flushed


def refuse(_commit_id):
    raise StorageError("no room for the state")


@pytest.mark.parametrize("budgets", [{}, {"reopen": None}, {"reopen": "discard"}])
def test_commit_id_for_a_table_that_resumes_nothing_is_rejected(tmp_path, budgets):
    tiers = ssd_tiers(tmp_path / "ssd", **budgets) if budgets else TierBudgets(host_bytes="1MiB")
    table = CacheTable(name="t", dim=4, tiers=tiers, initializer=initializers.Constant(1), optimizer=None)
    with pytest.raises(StateError, match=r"commit_id=2 of table 't'.*reopen=\"resume\""):
        table.open(commit_id=2)
    with table:
        assert len(table) == 0


@pytest.mark.parametrize("left", ["closed", "unusable"])
def test_closed_or_unusable_tables_do_not_stop_other_flushes(tmp_path, left):
    tiers = ssd_tiers(tmp_path / "ssd", host_bytes="4KiB", flush_every=2)
    first, other = (make_bag(name=name, tiers=tiers) for name in ("first", "other"))
    for bag in (first, other):
        train(bag, BATCHES[:1])
    if left == "closed":
        first.close()
    else:
        first.table._set_unusable("a load did not succeed")
    train(other, BATCHES[1:5])
    assert len(other.table.commit_ids()) == 2
    other.close()


def test_error_in_a_with_block_survives_a_failing_close(tmp_path):
    bag = bag_in(tmp_path / "ssd")
    collection = EmbCacheEmbeddingBagCollection(
        [EmbCacheEmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])],
        tiers=ssd_tiers(tmp_path / "ssd"),
    )
    table = CacheTable(
        name="t",
        dim=4,
        tiers=ssd_tiers(tmp_path / "ssd"),
        initializer=initializers.Constant(1),
        optimizer=None,
    )
    for closed, shard in ((bag, bag.table), (collection, collection.tables["t"]), (table, table)):
        shard.open()
        shard._flush_with_commit_id = refuse
        with pytest.raises(KeyError) as raised, closed:
            raise KeyError("of the user")
        (note,) = raised.value.__notes__
        assert note == f"closing the {type(closed).__name__} failed too: no room for the state"
        assert shard._is_closed


def test_flush_error_on_one_rank_raises_on_all(two_ranks, tmp_path):
    """The state before the flush stays."""
    rank_directory(tmp_path).mkdir(mode=0o700)
    first, second = two_ranks.run(flush_on_ranks, str(tmp_path), 1)
    assert first == ("rank 1: no room for the state", True)
    assert second == ("no room for the state", True)


def test_unlistable_directory_on_one_rank_fails_on_all(two_ranks, tmp_path):
    rank_directory(tmp_path).mkdir(mode=0o700)
    first, second = two_ranks.run(flush_on_ranks, str(tmp_path), 1, True)
    assert first == ("rank 1: no room for the state", True)
    assert second == ("no room for the state", True)


def kill_on_ranks(rank, _size, root, follows):
    """Do two good flushes of ranks with a root each, the second of which is cut short where ranks follow the coordinator.
    Returns what a resume finds.
    """
    settings = {"name": f"shard{rank}"}
    directory = Path(root, f"disk{rank}")
    bag = bag_in(directory, **settings)
    train(bag, BATCHES[:2])
    flush(bag)
    before = Contents.of(bag)
    train(bag, BATCHES[2:4])
    flushed = Contents.of(bag)
    with pytest.MonkeyPatch.context() as patch:
        for cut in (
            ("commit_as_participant",)
            if follows
            else ("commit_as_coordinator", "commit_as_participant", "forget_commits")
        ):
            patch.setattr(f"torchrec_embcache._ssd.commit.CommitParticipant.{cut}", lambda *_: None)
        flush(bag)
    bag.table._native_table.close()
    torch.distributed.barrier()
    with bag_in(directory, reopen="resume", **settings) as bag:
        found = Contents.of(bag)
    return "new" if found == flushed else "old" if found == before else "neither"


@pytest.mark.parametrize("follows", [False, True])
def test_ranks_with_a_root_each_agree_where_a_flush_is_cut_short(two_ranks, tmp_path, follows):
    assert two_ranks.run(kill_on_ranks, str(tmp_path), follows) == ["new" if follows else "old"] * 2


def flush_on_machines(rank, _size, root, action="always"):
    """The words of the warnings, or of the error, of a flush of ranks that see only their own directory."""
    bag = bag_in(Path(root, f"disk{rank}"), name=f"shard{rank}")
    mine = os.path.abspath(Path(root, f"disk{rank}"))

    class OfOneMachine:
        def __init__(self, path, checks):
            self.path, self.root = path, _native.CommitDirectory(path, checks)

        def __getattr__(self, name):
            return getattr(self.root, name)

        def has_id(self, name):
            return self.path == mine and self.root.has_id(name)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr("torchrec_embcache._ssd.commit.CommitDirectory", OfOneMachine)
        train(bag, BATCHES[:2])
        warnings.simplefilter(action)
        if action == "error":
            with pytest.raises((EmbCacheWarning, EmbCacheError)) as raised:
                flush(bag)
            return str(raised.value)
        flush(bag)
    flushed = Contents.of(bag)
    bag.table._native_table.close()
    with bag_in(Path(root, f"disk{rank}"), name=f"shard{rank}", reopen="resume") as bag:
        same = Contents.of(bag) == flushed
    return [str(warning.message) for warning in caught if issubclass(warning.category, EmbCacheWarning)], same


def test_ranks_without_a_shared_directory_warn_about_kills(two_ranks, tmp_path):
    (first, first_same), (second, second_same) = two_ranks.run(flush_on_machines, str(tmp_path))
    assert first_same
    assert second_same
    (told,) = [words for words in first if "complete a flush each" in words]
    assert str(tmp_path / "disk0") in told
    assert str(tmp_path / "disk1") in told
    assert not [words for words in second if "complete a flush each" in words]


def test_a_warning_that_one_rank_makes_an_error_is_raised_on_all(two_ranks, tmp_path):
    first, second = two_ranks.run(flush_on_machines, str(tmp_path), "error")
    assert "complete a flush each" in first
    assert "complete a flush each" in second
    assert second.startswith("rank 0: EmbCacheWarning: ")


def test_a_model_without_tables_has_nothing_to_flush():
    with pytest.raises(InputError, match="Linear has no cache module"):
        flush(torch.nn.Linear(1, 1))
    with make_bag() as bag:
        flush(torch.nn.Sequential(bag))  # no SSD tier, so there is nothing to do
        bag.flush()


def test_an_optimizer_can_be_set_until_there_are_rows(tmp_path):
    def table(**settings):
        return CacheTable(
            name="t", dim=4, tiers=ssd_tiers(tmp_path / "ssd"), initializer=initializers.Constant(1), **settings
        )

    with table(optimizer=None) as late:
        assert late.read_rows(torch.tensor([1])).slots == {}
        late.optimizer = optimizers.Adam()
        assert set(late.read_rows(torch.tensor([1])).slots) == {"exp_avg", "exp_avg_sq"}
        late.import_rows(torch.tensor([1]), torch.ones(1, 4))
        late.optimizer = optimizers.Adam(lr=1)
        with pytest.raises(StateError, match="has rows with the slots of optimizers.Adam"):
            late.optimizer = optimizers.SGD()


def test_optimizer_whose_rows_exceed_budgets_is_rejected():
    """Nothing changes."""
    tiers = TierBudgets(host_bytes="64KiB", device_bytes=400)  # a device tier for one row without slots
    with CacheTable(name="t", dim=64, tiers=tiers, initializer=initializers.Constant(1), optimizer=None) as table:
        table.open()
        with pytest.raises(ConfigError, match=r"device_bytes=400 is too small for one row"):
            table.optimizer = optimizers.Adam()
        assert table.optimizer is None
        assert table.is_open
        table.import_rows([7], torch.ones(1, 64))
        assert table.read_rows([7]).slots == {}


def test_a_forked_child_cannot_use_the_table():
    with make_bag() as bag:
        step(bag, [[1]])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                len(bag)
            except StateError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert len(bag) == 1
