"""Commit ids of flushes increase for any clock, process and leftover files."""

import threading
import time
from pathlib import Path

import pytest
from torch import nn

from tables import Contents, make_bag, ssd_tiers, step
from torchrec_embcache import EmbCacheEmbeddingBag, flush
from torchrec_embcache._ssd import commit
from torchrec_embcache.config import SsdRoot
from torchrec_embcache.exceptions import EmbCacheError, StateError


def bag_in(root: Path, name: str = "item", reopen: str | None = None) -> EmbCacheEmbeddingBag:
    return make_bag(name=name, tiers=ssd_tiers(root, host_bytes="4KiB", reopen=reopen))


def model_in(root: Path, names: tuple[str, ...] = ("one", "two"), reopen: str | None = None) -> nn.ModuleList:
    return nn.ModuleList([bag_in(root, name, reopen) for name in names])


def close(model: nn.ModuleList) -> None:
    for bag in model:
        bag.close()


def test_flush_follows_one_without_a_state_despite_the_clock(tmp_path, monkeypatch):
    """The clock went backward in between."""
    now = time.time_ns()
    with bag_in(tmp_path / "ssd") as bag:
        step(bag, [[1, 2]])
        bag.flush()
        flush(bag)
        last = max(bag.table.commit_ids())
        # This is as if space were short and states were dropped.
        for commit_id in bag.table.commit_ids():
            bag.table._native_table.forget_commit(commit_id)
        monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)
        monkeypatch.setattr(time, "time", lambda: now / 1e9 - 3600)
        step(bag, [[3, 4]])
        bag.flush()
        (commit_id,) = bag.table.commit_ids()
        assert commit_id > last
        flush(bag)
        assert max(bag.table.commit_ids()) > commit_id
        held = Contents.of(bag)
    with bag_in(tmp_path / "ssd", reopen="resume") as bag:
        assert Contents.of(bag) == held


def test_threads_that_flush_one_table_or_its_model_take_turns(tmp_path):
    model = model_in(tmp_path / "ssd")
    for bag in model:
        step(bag, [[1, 2], [3]])
    failed: list[BaseException] = []
    begin = threading.Barrier(4)

    def work(which: int) -> None:
        try:
            begin.wait()
            for _ in range(12):
                flush(model) if which == 0 else model[which % 2].flush()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    step(model[0], [[7]])
    flush(model)
    held = [Contents.of(bag) for bag in model]
    for bag in model:
        bag.table._native_table.close()  # like a kill: nothing is flushed
    model = model_in(tmp_path / "ssd", reopen="resume")
    assert [Contents.of(bag) for bag in model] == held
    close(model)


def test_a_mark_that_an_earlier_run_left_is_no_mark_of_a_new_flush(tmp_path):
    root = tmp_path / "ssd"
    model = model_in(root)
    for bag in model:
        step(bag, [[1]])
    flush(model)
    marked = max(commit.commit_ids_of_roots(commit.identify_roots([SsdRoot(str(root), "strict")])))
    close(model)
    model = model_in(root, reopen="discard")
    for bag in model:
        step(bag, [[2]])
    flush(model)
    commit_ids = [max(bag.table.commit_ids()) for bag in model]
    assert commit_ids[0] == commit_ids[1] > marked
    close(model)


def test_jobs_that_flush_into_one_root_get_distinct_commit_ids():
    known = [4, 9, 7]
    commit_ids = [commit.new_commit_id(known) for _ in range(8)]
    assert all(commit_id > 9 and commit.is_multi_table(commit_id) for commit_id in commit_ids)
    assert len(set(commit_ids)) == len(commit_ids)


def test_where_no_commit_id_is_left_the_error_says_what_to_do():
    with pytest.raises(StateError, match="Saver") as caught:
        commit.new_commit_id([2**64 - 3])
    assert isinstance(caught.value, EmbCacheError)
