"""Allowed paths of checkpoints: all rules on paths, owners and permission bits, for saves and for loads."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchrec_embcache import EmbCacheEmbeddingBag, EmbCacheError, TierBudgets, _native, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.exceptions import PathError, StoragePermissionError


def make_bag() -> EmbCacheEmbeddingBag:
    return EmbCacheEmbeddingBag(
        name="item", embedding_dim=4, tiers=TierBudgets(host_bytes="64KiB"), optimizer=optimizers.SGD(lr=0.1)
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sparse"


@pytest.fixture(autouse=True)
def _private_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_the_directory_is_made_private(root: Path) -> None:
    Saver(0).save(make_bag(), root / "a")
    for made in (root, root / "a"):
        assert stat.S_IMODE(made.stat().st_mode) & ~0o750 == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("api_key", PathError),
        ("KEY", PathError),
        ("my.password", PathError),
        ("privateKey-1", PathError),
        ("a/key/b", PathError),
        ("keys", PathError),
        ("passwords", PathError),
        ("private-keys", PathError),
        ("apiKey", PathError),
        ("secrets", PathError),
        ("passwd", PathError),
        ("credentials", PathError),
        ("id_rsa", PathError),
        (".ssh/x", PathError),
        ("a/../b", PathError),
        ("..", PathError),
        ("x" * 1025, PathError),
        ("monkey", None),
        ("keyboard", None),
        ("MonKey", None),
        ("etc/usr", None),
        ("a..b", None),
    ],
)
def test_paths_are_refused_by_words_and_components(
    name: str, error: type[EmbCacheError] | None, tmp_path: Path
) -> None:
    bag = make_bag()
    path = os.path.join(tmp_path, name)
    if error is None:
        Saver(0).save(bag, path)
        Saver(0).load(bag, path)
        return
    with pytest.raises(error) as caught:
        Saver(0).save(bag, path)
    assert isinstance(caught.value, ValueError)
    assert not list(tmp_path.iterdir())
    with pytest.raises(error):
        Saver(0).load(bag, path)


@pytest.mark.parametrize(
    "path", ["", "/", "/etc", "/etc/embcache", "/usr/local/x", "/bin/x", "/proc/x", "/dev/x", "/lib/x"]
)
def test_system_directories_and_the_empty_path_are_refused(path: str) -> None:
    with pytest.raises(PathError):
        Saver(0).save(make_bag(), path)
    with pytest.raises(PathError):
        Saver(0).load(make_bag(), path)


def test_a_path_that_is_no_text_is_refused() -> None:
    with pytest.raises(PathError):
        Saver(0).save(make_bag(), b"/tmp/x")  # type: ignore[arg-type]


def test_path_of_1024_characters_is_saved_whatever_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bag = make_bag()
    longest = "/".join(["ü" * 127] * 8)
    assert len(longest) == 1023
    for path in (longest, f"{longest}/"):
        Saver().save(bag, path)
        Saver().load(bag, path)
    for path, count in ((f"{longest}//", 1025), ("", 0)):
        with pytest.raises(PathError, match=f"has {count} characters: use 1 to 1024"):
            Saver().save(bag, path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1750, 0o2750, 0o4750])
@pytest.mark.parametrize("what", ["checkpoint", "table", "data", "manifest"])
def test_an_inner_mode_that_is_too_open_is_refused_with_its_cure(mode: int, what: str, root: Path) -> None:
    bag = make_bag()
    bag.import_rows([7], [[1.0, 2.0, 3.0, 4.0]])
    Saver().save(bag, root)
    (checkpoint,) = (path for path in root.iterdir() if path.is_dir())
    entry = {
        "checkpoint": checkpoint,
        "table": next(checkpoint.glob("*+*")),
        "data": next(checkpoint.glob("*/*.safetensors")),
        "manifest": checkpoint / "manifest.json",
    }[what]
    before = entry.stat().st_mode
    entry.chmod(mode)
    with pytest.raises(StoragePermissionError, match=f"chmod 0*{mode & 0o750:o} {re.escape(str(entry))}"):
        Saver().load(make_bag(), root)
    if mode & 0o022:
        with pytest.raises(StoragePermissionError, match="others may write to it"):
            Saver(path_checks="basic").load(make_bag(), root)
    else:
        Saver(path_checks="basic").load(make_bag(), root)
    Saver(path_checks="trusted").load(make_bag(), root)
    entry.chmod(before)
    Saver().load(make_bag(), root)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o777, 0o751, 0o1750, 0o2750, 0o4750])
def test_a_directory_that_is_too_open_is_refused_with_its_cure(mode: int, root: Path) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(StoragePermissionError, match=f"chmod 0*{mode & 0o750:o} "):
        Saver(0).save(make_bag(), root)
    assert not list(root.iterdir())
    with pytest.raises(PermissionError):
        Saver(0).load(make_bag(), root)


def test_a_parent_that_anyone_may_write_to_is_refused_unless_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(StoragePermissionError, match="chmod o-w"):
        Saver(0).save(make_bag(), parent / "sparse")
    parent.chmod(0o1777)
    Saver(0).save(make_bag(), parent / "sparse")


def test_symbolic_links_are_refused_in_any_component(tmp_path: Path, root: Path) -> None:
    bag = make_bag()
    Saver(0).save(bag, root / "a")
    link = tmp_path / "link"
    link.symlink_to(root)
    for path in (link, link / "a"):
        with pytest.raises(PathError, match="symbolic link"):
            Saver(0).save(bag, path)
        with pytest.raises(PathError, match="symbolic link"):
            Saver(0).load(bag, path)


def as_another_user(work: Callable[[], None]) -> int:
    """Run `work` in a child that is not root. Returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user and give files away")
def test_a_load_needs_no_write_permission_and_a_save_does(tmp_path: Path, root: Path) -> None:
    Saver(0).save(make_bag(), root)
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, 65534, 65534)
            os.chmod(path, 0o500)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() != "nobody" and folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o005)

    def load() -> None:
        directory = _native.CheckpointDirectory.open_to_load(str(root), "strict")
        reader = _native.CheckpointReader(directory, _native.latest_checkpoint(directory))
        assert reader.tables()[0].table == "item"

    def save() -> None:
        with pytest.raises(StoragePermissionError):
            _native.CheckpointDirectory.open_to_save(str(root), "strict")

    assert as_another_user(load) == 0
    assert as_another_user(save) == 0
    # For root, who may do anything, the directory belongs to somebody else.
    with pytest.raises(StoragePermissionError, match="belongs to user 65534"):
        Saver(0).load(make_bag(), root)


@pytest.mark.parametrize("path", [None, 5, b"checkpoint"])
def test_a_path_that_is_not_text_is_refused(path: object) -> None:
    bag = make_bag()
    for use in (Saver(0).save, Saver(0).load):
        with pytest.raises(PathError, match="is not text: give a str"):
            use(bag, path)  # type: ignore[arg-type]
