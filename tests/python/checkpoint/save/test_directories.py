"""Directories of SSD tiers and checkpoints: where a relative path leads, who may change it, and what happens when it cannot be
read.
"""

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tables import Contents, make_bag, random_batches, train
from torchrec_embcache import EmbCacheEmbeddingBag, EmbCacheError, TierBudgets, flush, optimizers, serialize, serving
from torchrec_embcache._paths import PathChecks, open_to_save, path_exists
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.checkpoint.dcp import EmbCacheStorageReader, EmbCacheStorageWriter
from torchrec_embcache.cli import main
from torchrec_embcache.exceptions import ConfigError, PathError, StorageError, StoragePermissionError
from torchrec_embcache.monitoring import JsonlLogger
from torchrec_embcache.sizing import read_traffic, write_traffic
from torchrec_embcache.table.cache_table import CacheTable

BATCHES = random_batches(4, bags=8, ids=400, seed=5)


def tiered(ssd_dir: object, name: str = "item", reopen: Any = None, **budgets: Any) -> EmbCacheEmbeddingBag:
    budgets = {"host_bytes": "32KiB", "ssd_bytes": "1MiB", **budgets}
    return EmbCacheEmbeddingBag(
        name=name,
        embedding_dim=8,
        tiers=TierBudgets(ssd_dir=ssd_dir, reopen=reopen, **budgets),  # type: ignore[arg-type]
        optimizer=optimizers.SGD(lr=0.1),
    )


def grow(bag: EmbCacheEmbeddingBag, rows: int) -> None:
    bag(torch.arange(rows).view(-1, 1)).sum().backward()


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    path = tmp_path / "ssd"
    path.mkdir(mode=0o750)
    return path


# ---- relative paths


def test_relative_ssd_dir_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one/cache", "two/cache"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    bag = tiered("cache")
    unopened = CacheTable(name="later", dim=8, tiers=bag.table.tiers, initializer=bag.table.initializer, optimizer=None)
    grow(bag, 2000)
    bag.flush()
    monkeypatch.chdir(tmp_path / "two")
    for _ in range(3):
        grow(bag, 6000)
        bag.flush()
    unopened.open()
    expected = Contents.of(bag)
    bag.close()
    unopened.close()
    assert not list((tmp_path / "two" / "cache").iterdir())
    monkeypatch.chdir(tmp_path / "one")
    with tiered("cache", reopen="resume") as resumed:
        assert Contents.of(resumed) == expected


def test_relative_checkpoint_paths_are_resolved_when_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    bag = make_bag()
    train(bag, BATCHES)
    monkeypatch.chdir(tmp_path / "one")
    future = Saver(0).save_async(bag, "beside")
    writer, blocks = EmbCacheStorageWriter("dcp", bag), serialize.Saver(path="blocks", hashtables={"item": bag})
    monkeypatch.chdir(tmp_path / "two")
    future.result()
    blocks.save()
    assert writer.checkpoint_id == str(tmp_path / "one" / "dcp")
    assert EmbCacheStorageReader("dcp").checkpoint_id == str(tmp_path / "two" / "dcp")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["beside", "blocks"]
    assert not list((tmp_path / "two").iterdir())


@pytest.mark.parametrize("path", ["~/rows", "~", "~nobody/rows"])
def test_a_leading_tilde_is_refused_with_what_replaces_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bag = make_bag()
    uses: list[Callable[[], object]] = [
        lambda: TierBudgets(host_bytes="1MiB", ssd_bytes="1MiB", ssd_dir=path),
        lambda: TierBudgets(host_bytes="1MiB", ssd_bytes="1MiB", ssd_dir=Path(path)),
        lambda: Saver(0).save(bag, path),
        lambda: Saver(0).load(bag, path),
        lambda: Saver(0, path_checks="basic").save(bag, path),
        lambda: serialize.Saver(path=path, hashtables={"item": bag}),
        lambda: serialize.Loader(path, hashtables={"item": bag}),
        lambda: EmbCacheStorageWriter(path, bag),
        lambda: EmbCacheStorageReader(path, bag),
    ]
    for use in uses:
        with pytest.raises(PathError, match="expanduser"):
            use()
    assert not list(tmp_path.iterdir())
    Saver(0).save(bag, "./~rows")  # a directory of that name
    assert (tmp_path / "~rows" / "LATEST").exists()


SCHEMES = [
    "s3://bucket/z",
    "gs://bucket",
    "hdfs://host:9000/z",
    "file:///tmp/z",
    "abfss://c@account/z",
    Path("s3://bucket/z"),
]


@pytest.mark.parametrize("path", SCHEMES)
def test_path_with_a_scheme_is_rejected_everywhere(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = make_bag()
    train(bag, BATCHES)
    Saver().save(bag, tmp_path / "ckpt")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    writer, reader = EmbCacheStorageWriter("dcp", bag), EmbCacheStorageReader("dcp", bag)
    uses: list[Callable[[], object]] = [
        lambda: TierBudgets(host_bytes="1MiB", ssd_bytes="1MiB", ssd_dir=path),
        lambda: serialize.Saver(path=path, hashtables={"item": bag}),  # type: ignore[arg-type]
        lambda: serialize.Loader(path, hashtables={"item": bag}),  # type: ignore[arg-type]
        lambda: EmbCacheStorageWriter(path, bag),
        lambda: EmbCacheStorageReader(path, bag),
        lambda: (writer.reset(path), writer.set_up_storage_writer(True)),
        lambda: (reader.reset(path), reader.read_metadata()),
        lambda: serving.open(path),
        lambda: serving.open(tmp_path / "ckpt", follow=serving.Follow(source=path)),
        lambda: JsonlLogger(bag, path, interval_s=None),
        lambda: write_traffic([], path),
        lambda: read_traffic(path),
    ]
    for checks in get_args(PathChecks):
        saver = Saver(path_checks=checks)
        uses += [partial(use, bag, path) for use in (saver.save, saver.save_async, saver.load)]
        uses.append(partial(saver.compact, path))
    for use in uses:
        with pytest.raises(PathError, match="has the scheme '?\"?[a-z0-9]+"):
            use()
    assert not EmbCacheStorageWriter.validate_checkpoint_id(path)
    for command in (
        ["ls", path],
        ["inspect", path],
        ["verify", path],
        ["compact", path],
        ["index", path],
        ["prune", path, "--keep", 1],
        ["why", path, "item", 7],
        ["diff", tmp_path / "ckpt", path],
        ["copy", path, "copied"],
        ["copy", tmp_path / "ckpt", path],
        ["reshard", tmp_path / "ckpt", path, "--world-size", 1],
        ["convert", path, "converted"],
        ["convert", tmp_path / "ckpt", path, "--to", "npy"],
        ["convert", tmp_path / "ckpt", path, "--to", "serving"],
        ["plot", path, "-o", "picture.svg"],
        ["plot", "traffic.json", "-o", f"{path}/picture.svg"],
        ["advise", path, "--ram", "1GiB"],
    ):
        assert main([str(word) for word in command]) == 3, command
        assert "PathError" in capsys.readouterr().err, command
    assert not list(work.iterdir())
    Saver().save(bag, "./s3:/rows")  # a directory of that name
    assert (work / "s3:" / "rows" / "LATEST").exists()
    Saver().save(bag, work / "s3:" / "advised")  # as the message advises
    assert (work / "s3:" / "advised" / "LATEST").exists()


@pytest.mark.parametrize("path", [5, None, b"x", "", "a\0b", "~/x", "s3://bucket", "x" * 1025])
def test_dcp_checkpoint_id_is_invalid_if_constructor_rejects_it(path: Any) -> None:
    for kind in (EmbCacheStorageReader, EmbCacheStorageWriter):
        with pytest.raises(PathError):
            kind(path)
        assert kind.validate_checkpoint_id(path) is False
        assert kind.validate_checkpoint_id("x" * 255) is True
        assert kind.validate_checkpoint_id(Path("checkpoint")) is True


# ---- volumes that others may write to


def as_kubernetes_mounts_it(volume: Path) -> None:
    """Give all of a volume to its group, as the kubelet does at each mount of one with an `fsGroup`."""
    for folder, _, names in os.walk(volume):
        os.chmod(folder, os.stat(folder).st_mode | 0o2770)
        for name in names:
            file = os.path.join(folder, name)
            os.chmod(file, os.stat(file).st_mode | 0o660)


@pytest.mark.parametrize("mode", [0o2775, 0o777])
def test_trusted_volumes_are_saved_to_loaded_from_served_and_resumed(
    mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = tmp_path / "volume"
    ssd, root = volume / "ssd", volume / "ckpt"
    for path in (volume, ssd, root):
        path.mkdir()
        path.chmod(mode)
    for use in (lambda: tiered(ssd), lambda: Saver().save(make_bag(), root), lambda: serving.open(root)):
        with pytest.raises(StoragePermissionError):
            use()
    bag = tiered(ssd, path_checks="trusted")
    grow(bag, 1000)
    bag.flush()
    saver = Saver(path_checks="trusted")
    saver.save(bag, root)
    as_kubernetes_mounts_it(volume)
    grow(bag, 2000)
    assert saver.save(bag, root, incremental=True).kind == "delta"
    flush(nn.ModuleList([bag]))
    expected = Contents.of(bag)
    bag.close()
    as_kubernetes_mounts_it(volume)
    with tiered(ssd, path_checks="trusted", reopen="resume") as resumed:
        assert Contents.of(resumed) == expected
    loaded = tiered(ssd, name="loaded", path_checks="trusted")
    saver.load(loaded, root, rename={"item": "loaded"})
    assert len(loaded) == 2000
    loaded.close()
    with serving.open(root, path_checks="trusted") as tables:
        assert (next(root.glob("*-*")) / "serve.idx").exists() or tables
    for refused in ("ls", "verify"):
        assert main([refused, str(root)]) == 3
        assert "path_checks" in capsys.readouterr().err
        assert main([refused, str(root), "--path-checks", "trusted"]) == 0
    assert main(["compact", str(root), "--path-checks", "trusted"]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_trusted_volume_may_belong_to_anybody(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    ssd = volume / "ssd"
    ssd.mkdir(parents=True)
    for path in (volume, ssd):
        os.chown(path, 12345, 54321)
        path.chmod(0o2775)
    refuses(ssd, "trusted")
    with tiered(ssd, path_checks="trusted") as bag:
        grow(bag, 1000)
        Saver(path_checks="trusted").save(bag, volume / "ckpt")
        Saver(path_checks="trusted").load(bag, volume / "ckpt")
    with pytest.raises(ConfigError, match="TierBudgets.path_checks='basic' is not known"):
        tiered(ssd, path_checks="basic")


# ---- who else may change a path


def test_the_rules_of_saver_have_three_names() -> None:
    assert Saver(0).path_checks == "strict"
    with pytest.raises(ConfigError, match="path_checks='loose' is not known"):
        Saver(0, path_checks="loose")  # type: ignore[arg-type]


def refuses(path: Path, match: str) -> None:
    """Make an SSD tier, and a save by any rules, at `path`."""
    for use in (
        lambda: tiered(path),
        lambda: Saver(0).save(make_bag(), path),
        lambda: Saver(0, path_checks="basic").save(make_bag(), path),
        lambda: serialize.Saver(path=str(path), hashtables={"item": make_bag()}).save(),
    ):
        with pytest.raises(StoragePermissionError, match=match):
            use()


def accepts(path: Path) -> None:
    tiered(path).close()
    Saver(0).save(make_bag(), path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_no_directory_is_written_to_whose_parents_others_may_exchange(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    leaf = parent / "leaf"
    leaf.mkdir(parents=True)
    leaf.chmod(0o750)
    for mode, owner, group, match in (
        (0o777, 0, 0, "any user may exchange"),
        (0o775, 0, 12345, "group 12345 may exchange"),
        (0o770, 0, 12345, "group 12345 may exchange"),
        (0o755, 12345, 0, "user 12345 owns"),
        (0o1777, 12345, 0, "user 12345 owns"),
        (0o700, 12345, 12345, "user 12345 owns"),
    ):
        os.chown(parent, owner, group)
        parent.chmod(mode)
        refuses(leaf, match)
        assert not list(leaf.iterdir())
    os.chown(parent, 0, 12345)
    parent.chmod(0o1777)  # like /tmp
    accepts(leaf)


def test_who_gives_a_shared_directory_is_told_to_make_one_in_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for use in (lambda: tiered(shared), lambda: Saver(0).save(make_bag(), shared)):
        with pytest.raises(StoragePermissionError, match="make a directory of your own in it") as caught:
            use()
        assert "chmod" not in str(caught.value)


def test_strict_rules_name_both_cures(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(root)
    for path, error, cures in (
        (root, StoragePermissionError, ["chmod 750", 'path_checks="basic"']),
        (link, PathError, ["name its target", 'path_checks="basic"']),
        (tmp_path / "api_key", PathError, ["choose another path", 'path_checks="basic"']),
    ):
        with pytest.raises(error) as caught:
            Saver(0).save(make_bag(), path)
        assert all(cure in str(caught.value) for cure in cures), caught.value
        Saver(0, path_checks="basic").save(make_bag(), path)


def test_ssd_dir_swapped_for_a_link_gets_nothing_written(ssd: Path, tmp_path: Path) -> None:
    victim, moved = tmp_path / "victim", tmp_path / "moved"
    victim.mkdir(mode=0o750)
    bag = tiered(ssd)
    grow(bag, 1000)
    bag.flush()
    ssd.rename(moved)
    ssd.symlink_to(victim)
    grow(bag, 6000)  # segments are made where the directory is now
    with pytest.raises(EmbCacheError):
        flush(nn.ModuleList([bag]))
    with pytest.raises(PathError, match="symbolic link"):
        tiered(ssd, name="later")
    assert not list(victim.iterdir())
    ssd.unlink()
    moved.rename(ssd)
    bag.flush()
    expected = Contents.of(bag)
    bag.close()
    with tiered(ssd, reopen="resume") as resumed:
        assert Contents.of(resumed) == expected
    assert not list(victim.iterdir())


# ---- what cannot be looked at is not absent


def test_a_path_that_cannot_be_looked_at_is_an_error_and_not_absent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "round").symlink_to("round")
    for absent in ("nothing", "nothing/below", "file/below"):
        assert not path_exists(tmp_path / absent)
    for present in ("file", "round"):
        assert path_exists(tmp_path / present)
    for unknown in ("round/below", "x" * 300):
        with pytest.raises(StorageError, match="cannot look at") as caught:
            path_exists(tmp_path / unknown)
        assert caught.value.errno is not None
    tmp_path.chmod(0o750)
    directory = open_to_save(tmp_path)
    assert not directory.contains("nothing")
    assert directory.contains("round")
    with pytest.raises(StorageError, match="cannot look at"):
        directory.contains("x" * 300)


class Two(nn.Module):
    """Two tables whose flush is one decision. A mark in their directory records it."""

    def __init__(self, ssd: Path, reopen: Any = None) -> None:
        super().__init__()
        self.a, self.b = tiered(ssd, "a", reopen), tiered(ssd, "b", reopen)

    def grow(self, rows: int) -> None:
        grow(self.a, rows)
        grow(self.b, rows)

    def close(self) -> None:
        for bag in (self.a, self.b):
            with contextlib.suppress(EmbCacheError):
                bag.close()


def test_older_state_is_not_resumed_if_newest_is_unreadable(ssd: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            model = Two(ssd)
            for rows in (10, 1000):
                model.grow(rows)
                flush(model)
        finally:
            os._exit(0)  # like a crash: nothing is flushed at the end
    os.waitpid(child, 0)
    marks, kept = ssd / ".flushed", ssd / "kept"
    marks.rename(kept)
    marks.symlink_to("nowhere")
    with pytest.raises(PathError, match=r"\.flushed is a symbolic link"):
        Two(ssd, "resume")
    marks.unlink()
    kept.rename(marks)
    resumed = Two(ssd, "resume")
    assert (len(resumed.a), len(resumed.b)) == (1000, 1000)
    resumed.close()


@contextlib.contextmanager
def files_left(free: int) -> Iterator[None]:
    """Let this process open only about `free` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for fd in taken[len(taken) - free :]:
            os.close(fd)
        del taken[len(taken) - free :]
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_file_handles_is_neither_missing_nor_damaged(ssd: Path, tmp_path: Path) -> None:
    bag = tiered(ssd)
    grow(bag, 1000)
    for name, linked in (("full", False), ("linked", True)):
        Saver(0).save(bag, tmp_path / name, linked=linked)
    expected = Contents.of(bag)
    bag.close()
    for name in ("full", "linked"):
        errors: list[StorageError] = []
        for free in range(10):
            loaded = tiered(ssd, reopen="discard")
            with files_left(free):
                try:
                    Saver(0).load(loaded, tmp_path / name)
                except StorageError as error:
                    errors.append(error)
            with contextlib.suppress(EmbCacheError):
                loaded.close()
        assert errors
        assert all(error.errno == errno.EMFILE for error in errors), errors
        with tiered(ssd, reopen="discard") as loaded:
            Saver(0).load(loaded, tmp_path / name)
            assert Contents.of(loaded) == expected


def grow_tables(ssd: Path, tables: list[EmbCacheEmbeddingBag]) -> None:
    """Make one table after the other, more than there can be files for."""
    while len(tables) < 200:
        tables.append(tiered(ssd, f"t{len(tables)}"))
        grow(tables[-1], 600)


def test_segments_leave_files_free_for_saving_elsewhere(ssd: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tables: list[EmbCacheEmbeddingBag] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 120, hard))
        with pytest.raises(StorageError, match=r"kept for saving.*RLIMIT_NOFILE.*ulimit -n"):
            grow_tables(ssd, tables)
        assert len(tables) > 8
        saved = Saver(0).save(nn.ModuleList(tables[:-1]), tmp_path / "elsewhere")
        assert saved.rows == 600 * (len(tables) - 1)
        serialize.Saver(path=str(tmp_path / "blocks"), hashtables={"item": tables[0]}).save()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for bag in tables:
        with contextlib.suppress(EmbCacheError):
            bag.close()
