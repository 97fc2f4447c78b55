"""Somebody changes a checkpoint's path, or what lies there, between check and use. There are typed errors, and nothing is made
elsewhere.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from path_cases import (
    BASIC_DOORS,
    DOORS,
    STRICT_DOORS,
    Door,
    Place,
    load,
    load_blocks,
    place,
    save,
    save_beside,
    save_blocks,
    swapping,
    trained,
)
from tables import Contents, make_bag
from torchrec_embcache import _native
from torchrec_embcache.checkpoint.recis import loader, saver
from torchrec_embcache.checkpoint.recis._session import RecisSession
from torchrec_embcache.exceptions import CorruptionError, PathError, StateError, StorageError, StoragePermissionError
from torchrec_embcache.table.cache_table import CacheTable

__all__ = ["place"]  # fixtures


def works_while_swapped(door: Any, bag: Any, place: Place, owner: Any, name: str, after: bool) -> bool:
    """Returns true if a save or a load succeeds although the directory is swapped at a call. Otherwise it must reject the path."""
    with pytest.MonkeyPatch.context() as patched:
        swapping(patched, place, owner, name, after)
        try:
            door(bag, place.root)
        except (PathError, StoragePermissionError):
            return False
        finally:
            assert place.moved.exists(), "the step was not reached"
    return True


SAVE_STAGES = [
    (save, _native, "CheckpointDirectory.open_to_save"), (save, _native, "CheckpointSave"), (save, _native, "CheckpointWriter"),
    (save_blocks, _native, "CheckpointDirectory.open_to_save"), (save_blocks, RecisSession, "begin"),
    (save_blocks, RecisSession, "open_files"),
    (save_blocks, saver, "write_shard"), (save_blocks, RecisSession, "publish"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("door", "owner", "name"), SAVE_STAGES, ids=lambda value: getattr(value, "__name__", value))
def test_directory_swapped_for_a_link_in_a_save_is_not_followed(
    door: Any, owner: Any, name: str, after: bool, place: Place
) -> None:
    bag = trained()
    saved = works_while_swapped(door, bag, place, owner, name, after)
    assert not list(place.victim.iterdir())
    place.back()
    other = make_bag()
    if saved:  # the directory's present path
        (load if door is save else load_blocks)(other, place.root)
        assert Contents.of(other) == Contents.of(bag)


LOAD_STAGES = [
    (load, _native, "CheckpointDirectory.open_to_load"), (load, _native, "latest_checkpoint"), (load, _native, "CheckpointReader"),
    (load_blocks, _native, "CheckpointDirectory.open_to_load"),
    (load_blocks, _native, "RecisReader"),
    (load_blocks, loader, "RecisCheckpoint"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("door", "owner", "name"), LOAD_STAGES, ids=lambda value: getattr(value, "__name__", value))
def test_directory_swapped_for_a_link_in_a_load_is_not_read(
    door: Any, owner: Any, name: str, after: bool, place: Place
) -> None:
    bag, planted = trained(), make_bag()
    planted.import_rows(torch.arange(5), torch.ones(5, 4))
    for path, source in ((place.root, bag), (place.victim, planted)):
        (save if door is load else save_blocks)(source, path)
    other = make_bag()
    loaded = works_while_swapped(door, other, place, owner, name, after)
    assert Contents.of(other) == (Contents.of(bag) if loaded else Contents(0))


@pytest.mark.parametrize("door", DOORS)
def test_pipes_devices_files_and_long_names_are_rejected(door: Door, tmp_path: Path) -> None:
    bag = make_bag()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    wrong = [
        tmp_path / "pipe",
        tmp_path / "file",
        tmp_path / "file" / "below",
        tmp_path / ("x" * 256),
        tmp_path / "pipe" / "x",
    ]
    if os.geteuid() == 0:
        os.mknod(tmp_path / "device", 0o600 | 0o020000, os.makedev(1, 5))
        wrong.append(tmp_path / "device")
    before = sorted(tmp_path.iterdir())
    for path in wrong:
        for use in door:
            with pytest.raises(PathError):
                use(bag, path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("door", STRICT_DOORS)
def test_paths_that_escape_or_name_wrong_files_are_rejected(door: Door, tmp_path: Path) -> None:
    bag = make_bag()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    before = sorted(tmp_path.iterdir())
    wrong = ["link", "link/below", "nowhere", "a/../b", "..", "api_key", "a/password/b", "x" * 1025]
    for path in [*(Path(f"{tmp_path}/{name}") for name in wrong), Path("/etc/embcache"), Path("/proc/x"), Path("/usr")]:
        for use in door:
            # The command finds the files to merge by basic rules, which check no names. It cannot create anything in /proc.
            with pytest.raises((PathError, StorageError) if str(path) == "/proc/x" else PathError):
                use(bag, path)
    assert sorted(tmp_path.iterdir()) == before
    assert not list((tmp_path / "real").iterdir())


@pytest.mark.parametrize("door", BASIC_DOORS)
def test_basic_checks_follow_links_of_the_user_once(door: Door, tmp_path: Path) -> None:
    """Any name and mode is accepted if others cannot write to the path."""
    save_it, load_it = door
    bag = trained()
    base = tmp_path / "api_key"
    base.mkdir(mode=0o755)
    (base / "real").mkdir()
    (base / "real").chmod(0o755)
    (tmp_path / "link").symlink_to("api_key")
    (tmp_path / "up").symlink_to(base / "real" / "..")
    for path in (base / "real", tmp_path / "link" / "real", Path(f"{tmp_path}/up/../link/real")):
        save_it(bag, path)
        load_it(other := make_bag(), path)
        assert Contents.of(other) == Contents.of(bag)
    assert [path.name for path in sorted(base.iterdir())] == ["real"]
    assert len(list((base / "real").iterdir())) > 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("door", BASIC_DOORS)
def test_basic_checks_load_from_other_users_and_do_not_save(door: Door, place: Place) -> None:
    save_it, load_it = door
    bag = trained()
    save_it(bag, place.root)
    for path in (place.root, *place.root.rglob("*")):
        os.chown(path, 12345, -1)
    load_it(other := make_bag(), place.root)
    assert Contents.of(other) == Contents.of(bag)
    with pytest.raises(StoragePermissionError, match="belongs to user 12345.*directory of your own"):
        save_it(bag, place.root)


@pytest.mark.parametrize("door", DOORS)
def test_directories_that_others_may_change_or_own_are_refused(door: Door, place: Place) -> None:
    save_it, load_it = door
    bag = trained()
    save_it(bag, place.root)
    before = sorted(place.root.rglob("*"))
    strict = save_it in (save, save_beside)
    for mode in (*([0o755] if strict else []), 0o770, 0o707, 0o2770):
        place.root.chmod(mode)
        for use in door:
            with pytest.raises(StoragePermissionError, match="chmod"):
                use(bag, place.root)
    place.root.chmod(0o750)
    place.root.parent.chmod(0o777)
    with pytest.raises(StoragePermissionError, match="chmod o-w"):
        save_it(bag, place.root)
    place.root.parent.chmod(0o700)
    if os.geteuid() == 0:  # only root can give a directory away
        os.chown(place.root, 12345, -1)
        for use in door if strict else door[:1]:
            with pytest.raises((StoragePermissionError, PathError), match="own"):
                use(bag, place.root)
        os.chown(place.root, 0, -1)
    assert sorted(place.root.rglob("*")) == before
    other = make_bag()
    load_it(other, place.root)
    assert Contents.of(other) == Contents.of(bag)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", ["link", "pipe", "device", "directory", "nothing"])
def test_wrong_file_types_inside_a_checkpoint_are_rejected(what: str, door: Door, place: Place, tmp_path: Path) -> None:
    if what == "device" and os.geteuid() != 0:
        pytest.skip("only root can make a device")
    save_it, load_it = door
    bag = trained()
    save_it(bag, place.root)
    kept = tmp_path / "kept"
    ignored = {"lock", "begun.json", "index", "tensorkey.json"}  # a load does not read these files
    paths = [path for path in sorted(place.root.rglob("*")) if path.name not in ignored and path.suffix != ".lock"]
    assert len(paths) > 4
    for path in paths:
        path.rename(kept)
        if what == "link":
            path.symlink_to(kept)
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "device":
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # endless zeros
        elif what == "directory":
            path.mkdir()
        other = make_bag()
        with pytest.raises((PathError, CorruptionError, StorageError)) as caught:
            load_it(other, place.root)
        assert "/proc/self" not in str(caught.value)
        assert len(other) == 0
        if what == "directory":
            path.rmdir()
        elif what != "nothing":
            path.unlink()
        kept.rename(path)
    other = make_bag()
    load_it(other, place.root)
    assert Contents.of(other) == Contents.of(bag)


@pytest.mark.parametrize("what", ["link", "pipe", "directory", "shorter"])
def test_data_files_replaced_after_header_check_poison_tables(
    what: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = trained()
    save(bag, place.root)
    data = next(path for path in place.root.rglob("*.safetensors"))
    kept = tmp_path / "kept"
    plain = CacheTable._set_unusable

    def replace(table: Any, reason: str | None) -> None:
        plain(table, reason)
        if kept.exists() or reason is None:
            return
        data.rename(kept)
        if what == "link":
            data.symlink_to(kept)
        elif what == "pipe":
            os.mkfifo(data)
        elif what == "directory":
            data.mkdir()
        else:
            data.write_bytes(kept.read_bytes()[:-4096])

    other = make_bag()
    with monkeypatch.context() as patched:
        patched.setattr(CacheTable, "_set_unusable", replace)
        with pytest.raises((PathError, CorruptionError)):
            load(other, place.root)
    with pytest.raises(StateError, match="did not succeed"):
        len(other.read_rows(torch.arange(3)))
    data.rmdir() if what == "directory" else data.unlink()
    kept.rename(data)
    load(other, place.root)
    assert Contents.of(other) == Contents.of(bag)
