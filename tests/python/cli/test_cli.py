"""The `embcache` command: its output, searches, conversions and budget splits, and the meaning of its exit status."""

import json
import math
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import nn

from cli_cases import flip, loaded, run, save
from saver_cases import OPTIMIZERS, make_bag, rows, train
from torchrec_embcache import EmbCacheEmbedding, RowMetadata, TierBudgets, _native, optimizers
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A directory of checkpoints with mode 0750, as `Saver` wants it."""
    return tmp_path / "ckpt"


SLOTS_OF_ADAM = {"adamw", "lamb"}


def test_inspect_lists_checkpoints_and_tables_of_the_newest(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = save(ckpt)
    code, found = run(capsys, "inspect", ckpt)
    assert code == 0
    (entry,) = found["checkpoints"]
    assert entry["latest"]
    assert entry["kind"] == "full"
    assert entry["ranks"] == 1
    assert entry["rows"] == len(bag)
    assert entry["bytes"] == sum(file.stat().st_size for file in (ckpt / entry["name"]).rglob("*") if file.is_file())
    (table,) = found["tables"]
    assert (table["table"], table["dim"], table["optimizer"]) == ("item", 4, "rowwise_adagrad")
    assert table["rows"] == len(bag)
    assert table["step"] == 5
    assert table["hyperparameters"]["lr"] == 0.1
    assert run(capsys, "inspect", ckpt / entry["name"])[1]["tables"] == found["tables"]


def test_people_see_tables(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = save(ckpt)
    train(bag, steps=1, seed=9)
    Saver(0).save(nn.Sequential(bag), str(ckpt), incremental=True)
    full, delta = (entry["name"] for entry in run(capsys, "inspect", ckpt)[1]["checkpoints"])
    assert main(["inspect", str(ckpt)]) == 0
    shown = capsys.readouterr().out
    assert "rowwise_adagrad" in shown
    assert "item" in shown
    (line,) = (line for line in shown.splitlines() if "LATEST" in line)
    assert line.split()[:3] == [delta, "delta", full]  # one line each in a pipe, however long


def test_verify_reads_everything_and_damage_is_status_one(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(ckpt)
    code, found = run(capsys, "verify", ckpt)
    assert code == 0
    assert found["whole"]
    flip(ckpt)
    code, found = run(capsys, "verify", ckpt)
    assert code == 1
    assert not found["whole"]
    assert ".safetensors" in found["tables"][0]["error"]
    assert "checksum" in found["tables"][0]["error"]
    (manifest,) = ckpt.rglob("manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    code, found = run(capsys, "verify", ckpt)
    assert code == 1
    assert "manifest.json" in found["error"]


def test_diff_counts_what_differs_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = save(tmp_path / "first")
    Saver(0).save(nn.Sequential(bag), str(tmp_path / "same"))
    code, found = run(capsys, "diff", tmp_path / "first", tmp_path / "same")
    assert code == 0
    assert found["equal"]
    assert found["tables"][0]["rows_first"] == len(bag)

    some = torch.tensor(sorted(rows(bag))[:3])
    before = bag.read_rows(some)
    bag.import_rows(some, before.weights + 0.5, slots=before.slots, metadata=before.metadata)
    bag.remove_rows(torch.tensor([sorted(rows(bag))[7]]))
    Saver(0).save(nn.Sequential(bag), str(tmp_path / "other"))
    code, found = run(capsys, "diff", tmp_path / "first", tmp_path / "other", "--ids", 9)
    (table,) = found["tables"]
    assert code == 1
    assert not found["equal"]
    assert (table["only_first"], table["only_second"], table["weights"], table["slots"]) == (1, 0, 3, 0)
    assert table["max_weight_difference"] == pytest.approx(0.5)
    assert set(some.tolist()) < set(table["ids"])


def test_diff_compares_bits_also_of_what_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, scores in (("nan", [math.nan, 0.0]), ("again", [math.nan, 0.0]), ("zero", [math.nan, -0.0])):
        bag, none = make_bag(), torch.zeros(2, dtype=torch.int64)
        bag.import_rows(torch.arange(2), torch.ones(2, 4), metadata=RowMetadata(none, none, torch.tensor(scores), none))
        Saver(0).save(nn.Sequential(bag), str(tmp_path / path))
    assert run(capsys, "diff", tmp_path / "nan", tmp_path / "again")[0] == 0
    code, found = run(capsys, "diff", tmp_path / "nan", tmp_path / "zero", "--ids", 9)
    assert (code, found["tables"][0]["metadata"], found["tables"][0]["ids"]) == (1, 1, [1])


def test_diff_of_other_tables_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "first")
    save(tmp_path / "second", name="user")
    code, found = run(capsys, "diff", tmp_path / "first", tmp_path / "second")
    assert code == 1
    assert found["only_first"] == [["0", "item"]]
    assert found["only_second"] == [["0", "user"]]
    save(tmp_path / "wide", embedding_dim=8)
    code, found = run(capsys, "diff", tmp_path / "first", tmp_path / "wide")
    assert code == 3
    assert found["error"]["type"] == "MismatchError"
    assert "dim" in found["error"]["message"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_resharded_checkpoint_holds_the_same_rows_and_loads(
    tmp_path: Path, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = save(tmp_path / "one")
    code, found = run(capsys, "reshard", tmp_path / "one", tmp_path / "many", "--world-size", world_size)
    assert code == 0
    assert len(list((tmp_path / "many" / found["checkpoint"]).glob("*-of-*.json"))) == world_size
    assert run(capsys, "diff", tmp_path / "one", tmp_path / "many")[0] == 0
    assert rows(loaded(tmp_path / "many")) == rows(bag)


def test_reshard_refuses_its_own_directory_and_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one")
    code, found = run(capsys, "reshard", tmp_path / "one", tmp_path / "one", "--world-size", 2)
    assert code == 3
    assert found["error"]["type"] == "PathError"
    code, found = run(capsys, "reshard", tmp_path / "one", tmp_path / "two", "--world-size", 0)
    assert code == 3
    assert found["error"]["type"] == "InputError"
    assert not list((tmp_path / "two").rglob("*.safetensors"))


def test_compact_merges_a_chain_and_the_rows_stay(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bag = save(ckpt)
    train(bag, steps=1, seed=9)
    Saver(0).save(nn.Sequential(bag), str(ckpt), incremental=True)
    code, found = run(capsys, "inspect", ckpt)
    assert code == 0
    assert [entry["kind"] for entry in found["checkpoints"]] == ["full", "delta"]
    assert run(capsys, "convert", ckpt, ckpt.parent / "plain", "--to", "npy")[0] == 0
    assert run(capsys, "convert", ckpt.parent / "plain", ckpt.parent / "back")[1]["tables"][0]["rows"] == len(bag)
    assert run(capsys, "diff", ckpt, ckpt.parent / "back")[1]["equal"]
    code, found = run(capsys, "compact", ckpt)
    assert code == 0
    assert found["rows"] == len(bag)
    (entry,) = run(capsys, "inspect", ckpt)[1]["checkpoints"]
    assert (entry["kind"], entry["name"]) == ("full", found["checkpoint"])
    assert rows(loaded(ckpt)) == rows(bag)


@pytest.mark.parametrize("layout", ["safetensors", "npy"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_a_table_goes_out_to_plain_files_and_back_bit_for_bit(
    tmp_path: Path, layout: str, optimizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = save(tmp_path / "ours", optimizer=optimizer)
    assert run(capsys, "convert", tmp_path / "ours", tmp_path / "plain", "--to", layout)[0] == 0
    code, found = run(capsys, "convert", tmp_path / "plain", tmp_path / "back")
    assert code == 0
    assert found["from"] == layout
    assert found["tables"][0]["rows"] == len(bag)
    assert run(capsys, "diff", tmp_path / "ours", tmp_path / "back")[1]["equal"]
    assert rows(loaded(tmp_path / "back", optimizer=optimizer)) == rows(bag)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_plain_files_without_description_infer_the_optimizer(
    tmp_path: Path, optimizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bag = save(tmp_path / "ours", optimizer=optimizer)
    run(capsys, "convert", tmp_path / "ours", tmp_path / "plain", "--to", "npy")
    (described,) = (tmp_path / "plain").glob("*/table.json")
    described.unlink()
    # Those that share Adam's slots must be named.
    named = ("--optimizer", optimizer.kind) if optimizer.kind in SLOTS_OF_ADAM else ()
    code, found = run(
        capsys, "convert", tmp_path / "plain", tmp_path / "back", *named, "--rename", f"{described.parent.name}=item"
    )
    assert code == 0, found
    assert found["tables"][0]["optimizer"] == optimizer.kind
    other = make_bag(optimizer=optimizer)
    Saver(0).load(other, str(tmp_path / "back"))
    assert {row_id: row[:-4] for row_id, row in rows(other).items()} == {
        row_id: row[:-4] for row_id, row in rows(bag).items()
    }


@pytest.mark.parametrize("of_a_row", [(), ("exp_avg",), ("exp_avg", "exp_avg_sq")])
def test_wrong_slot_widths_of_partial_rowwise_adam_are_rejected(
    tmp_path: Path, of_a_row: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ids, (weight, one, two) = made()
    (tmp_path / "theirs/item").mkdir(parents=True)
    columns = {"id": ids, "weight": weight, "exp_avg": one, "exp_avg_sq": two}
    for name, values in columns.items():
        np.save(tmp_path / f"theirs/item/{name}.npy", values[:, 0] if name in of_a_row else values)
    code, found = run(capsys, "convert", tmp_path / "theirs", tmp_path / "ours", "--optimizer", "partial_rowwise_adam")
    assert code == 3
    assert found["error"]["type"] == "InputError"
    assert "partial_rowwise_adam needs" in found["error"]["message"]
    assert not list((tmp_path / "ours").rglob("*.json"))


def made(rows_: int = 50, dim: int = 4, seed: int = 0) -> tuple[NDArray[np.int64], list[NDArray[np.float32]]]:
    random = np.random.default_rng(seed)
    ids = random.choice(np.arange(-500, 500), rows_, replace=False)
    return ids, [random.random((rows_, dim), np.float32) for _ in range(3)]


def write_recsdk(folder: Path, ids: NDArray[np.int64], columns: dict[str, NDArray[np.float32]]) -> None:
    """Write a file as RecSDK's EmbcacheManager::Save does."""
    for name, values in {"key": ids, **columns}.items():
        (folder / name).mkdir(parents=True)
        attribute = [values.itemsize, *values.shape]
        np.array(attribute, np.int64).tofile(folder / name / "slice.attribute")
        values.tofile(folder / name / "slice.data")


@pytest.mark.parametrize("ranks", [0, 2])
def test_recsdks_layout_converts_merged_and_by_rank(
    tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, (weight, one, two) = made()
    parts = [slice(None)] if not ranks else [slice(0, 20), slice(20, None)]
    for rank, part in enumerate(parts):
        folder = tmp_path / "theirs" / "item" / (f"rank{rank}" if ranks else "")
        columns = {"embedding": weight[part], "momentum1": one[part], "momentum2": two[part]}
        write_recsdk(folder, ids[part], columns)
    target = tmp_path / "ours"
    code, found = run(capsys, "convert", tmp_path / "theirs", target, "--module", "0", "--step", 7)
    assert code == 0
    assert found["from"] == "recsdk"
    assert found["tables"][0]["optimizer"] == "adam"
    bag = loaded(target, optimizer=optimizers.Adam(lr=0.1))
    kept = bag.read_rows(torch.from_numpy(ids))
    assert len(bag) == len(ids)
    assert bag.table.step() == 7
    np.testing.assert_array_equal(kept.weights.numpy(), weight)
    np.testing.assert_array_equal(kept.slots["exp_avg"].numpy(), one)
    np.testing.assert_array_equal(kept.slots["exp_avg_sq"].numpy(), two)


def test_reciss_layout_converts_and_dense_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids, (weight, one, two) = made()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for shard, part in enumerate((slice(0, 30), slice(30, None))):
        suffix = f"/part_{shard}_2"
        tensors = {
            f"item.id{suffix}": ids[part],
            f"item.embedding{suffix}": weight[part],
            f"item.sparse_adamw_tf_exp_avg{suffix}": one[part],
            f"item.sparse_adamw_tf_exp_avg_sq{suffix}": two[part],
        }
        if shard == 0:
            tensors["top.0.weight^ "] = np.ones((2, 2), np.float32)
        safetensors.numpy.save_file(tensors, theirs / f"model-{shard:06}-of-000002.safetensors")
    (theirs / "index").write_text("{}")
    code, found = run(
        capsys, "convert", theirs, tmp_path / "ours", "--module", "0", "--optimizer", "adamw", "--rename", "item=user"
    )
    assert code == 0
    assert found["from"] == "recis"
    assert found["skipped"] == ["top.0.weight^ "]
    bag = loaded(tmp_path / "ours", name="user", optimizer=optimizers.AdamW(lr=0.1))
    kept = bag.read_rows(torch.from_numpy(ids))
    assert len(bag) == len(ids)
    np.testing.assert_array_equal(kept.weights.numpy(), weight)
    np.testing.assert_array_equal(kept.slots["exp_avg_sq"].numpy(), two)


def test_damaged_and_unfit_layouts_are_refused_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, (weight, one, _) = made()
    write_recsdk(tmp_path / "cut/item", ids, {"embedding": weight, "momentum1": one})
    with (tmp_path / "cut/item/embedding/slice.data").open("r+b") as file:
        file.truncate(100)
    code, found = run(capsys, "convert", tmp_path / "cut", tmp_path / "ours")
    assert code == 3
    assert found["error"]["type"] == "CorruptionError"
    assert "slice.data" in found["error"]["message"]

    write_recsdk(tmp_path / "twice/item", np.repeat(ids[:1], 50), {"embedding": weight})
    code, found = run(capsys, "convert", tmp_path / "twice", tmp_path / "ours")
    assert code == 3
    assert "twice" in found["error"]["message"]

    write_recsdk(tmp_path / "slots/item", ids, {"embedding": weight, "momentum1": one})
    code, found = run(capsys, "convert", tmp_path / "slots", tmp_path / "ours", "--optimizer", "adam")
    assert code == 3
    assert found["error"]["type"] == "InputError"
    assert "exp_avg" in found["error"]["message"]
    code, found = run(capsys, "convert", tmp_path / "slots", tmp_path / "ours", "--skip", "momentum1", "--module", "0")
    assert code == 0
    assert found["tables"][0]["optimizer"] == "sgd"
    assert len([path for path in (tmp_path / "ours").iterdir() if path.is_dir()]) == 1

    (tmp_path / "empty").mkdir()
    code, found = run(capsys, "convert", tmp_path / "empty", tmp_path / "other")
    assert code == 3
    assert "--from" in found["error"]["message"]


def test_what_a_conversion_could_not_publish_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful:
        """A writer whose digests are wrong."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.made = made_by(*arguments, **settings)

        def write_rows(self, *arguments: Any) -> int:
            written: int = self.made.write_rows(*arguments)
            return written

        def finish(self) -> _native.ManifestDigest:
            return _native.ManifestDigest(self.made.finish().bytes, 1)

    ids, (weight, *_) = made()
    write_recsdk(tmp_path / "theirs/item", ids, {"embedding": weight})
    made_by = _native.CheckpointWriter
    monkeypatch.setattr(_native, "CheckpointWriter", Forgetful)
    code, found = run(capsys, "convert", tmp_path / "theirs", tmp_path / "ours")
    assert (code, found["error"]["type"]) == (3, "CorruptionError")


@pytest.mark.slow
def test_the_command_is_installed_and_errors_go_to_standard_error(tmp_path: Path) -> None:
    embcache = Path(sys.executable).parent / "embcache"
    missing = subprocess.run([embcache, "inspect", tmp_path / "nothing"], capture_output=True, text=True, check=False)
    assert missing.returncode == 3
    assert not missing.stdout
    assert "PathError" in missing.stderr
    wrong = subprocess.run([embcache, "frobnicate"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "inspect" in subprocess.run([embcache, "--help"], capture_output=True, text=True, check=True).stdout


def test_inspect_shows_save_times_and_reads_any_readable_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ckpt"
    save(root)
    root.chmod(0o755)
    (tmp_path / "link").symlink_to(root)
    before = datetime.now(UTC)
    code, found = run(capsys, "inspect", tmp_path / "link")
    assert (code, found["path"]) == (0, str(root))
    saved = datetime.fromisoformat(found["checkpoints"][0]["saved"])
    assert before - timedelta(hours=1) < saved <= before


def test_inspect_reads_the_directories_of_ssd_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir(mode=0o755)
    tiers = TierBudgets(host_bytes="64KiB", ssd_bytes="1MiB", ssd_dir=ssd)
    with EmbCacheEmbedding(name="item", embedding_dim=4, tiers=tiers, optimizer=optimizers.SGD(lr=0.1)) as bag:
        bag(torch.arange(300)).sum().backward()
    with EmbCacheEmbedding(name="user", embedding_dim=8, tiers=tiers, optimizer=optimizers.SGD(lr=0.1)):
        pass
    shard = ssd / "item" / "item" / "0-of-1"
    for path in (ssd, ssd / "item", ssd / "item" / "item", shard):
        code, found = run(capsys, "inspect", path)
        item = found["ssd"][0]
        assert (code, item["table"], item["rows"], item["dim"], item["step"]) == (0, "item", 300, 4, 1)
        assert item["bytes"] == sum(file.stat().st_size for file in shard.iterdir())
    (shard / "lock").unlink()  # somebody tidied up, but the state exists
    assert [entry["directory"] for entry in run(capsys, "inspect", ssd)[1]["ssd"]] == [
        "item/item/0-of-1",
        "user/user/0-of-1",
    ]
    state = next(shard.glob("*.state"))
    state.write_bytes(state.read_bytes().replace(b'"rows":300', b'"rows":301'))
    damaged = run(capsys, "inspect", ssd)[1]["ssd"][0]
    assert "rows" not in damaged
    assert "checksum" in damaged["error"]
    assert main(["inspect", str(ssd)]) == 0
    assert "DAMAGED" in capsys.readouterr().out
    for other in (b"0", b"2", b"01"):
        line, _, body = state.read_bytes().partition(b"\n")
        words = line.split(b" ")
        state.write_bytes(b" ".join([words[0], other, *words[2:]]) + b"\n" + body)
        refused = run(capsys, "inspect", ssd)[1]["ssd"][0]
        assert f"has format {other.decode()} and this release reads 1" in refused["error"]
        assert main(["inspect", str(ssd)]) == 0
        assert "ANOTHER FORMAT" in capsys.readouterr().out


@pytest.mark.parametrize("saved", [(1 << 64) - 1, 1 << 53])
def test_a_time_that_no_calendar_has_is_shown_as_unknown(
    ckpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    save(ckpt)
    read = _native.CheckpointRows

    class Forged:
        """The rows of a checkpoint whose manifest has another time."""

        def __init__(self, *given: Any) -> None:
            self.rows = read(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.rows, name)

        def manifest(self) -> str:
            return json.dumps({**json.loads(self.rows.manifest()), "saved_unix_ms": saved})

    monkeypatch.setattr(_native, "CheckpointRows", Forged)
    code, found = run(capsys, "inspect", ckpt)
    assert (code, found["checkpoints"][0]["saved"]) == (0, "unknown")
    assert main(["inspect", str(ckpt)]) == 0
    assert "unknown" in capsys.readouterr().out
