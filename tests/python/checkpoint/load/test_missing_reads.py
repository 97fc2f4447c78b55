"""The manifest has the value that evaluation reads for a missing id, so that a server reads the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lifecycle_cases import DIM, DOORS, TIERS, embedding, load_by, save_by, update
from lifecycle_resume_cases import begin, finish, path, save
from torchrec_embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    _native,
    admission,
    initializers,
    optimizers,
    serving,
)
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.cli.checkpoints import OpenCheckpoint
from torchrec_embcache.exceptions import ConfigError, MismatchError
from torchrec_embcache.modules.recsdk import AdmitAndEvictConfig

__all__ = ["path"]  # a fixture

COUNTED = {"admission": admission.Count(2)}
# Settings of a table, and what its manifest says.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "default": ({}, "initial"),
    "missing zeros": ({"missing": "zeros"}, "zeros"),
    "missing initial": ({"missing": "initial"}, "initial"),
    "admission": (COUNTED, "zeros"),
    "not admitted 0.5": ({**COUNTED, "not_admitted": 0.5}, {"value": 0.5}),
    "not admitted 0.1": ({**COUNTED, "not_admitted": 0.1}, {"value": 0.1}),
    "not admitted initial": ({**COUNTED, "not_admitted": "initial"}, "initial"),
    "not admitted 0.5, missing initial": ({**COUNTED, "not_admitted": 0.5, "missing": "initial"}, "initial"),
    "not admitted 0.5, missing zeros": ({**COUNTED, "not_admitted": 0.5, "missing": "zeros"}, "zeros"),
    "shared": ({**COUNTED, "not_admitted": "oov"}, "oov_row"),
    "shared, missing initial": ({**COUNTED, "not_admitted": "oov", "missing": "initial"}, "initial"),
    "shared, missing zeros": ({**COUNTED, "not_admitted": "oov", "missing": "zeros"}, "zeros"),
}
#: An id that no batch has.
MISSING = 999


def manifest_of(path: Path) -> dict[str, Any]:
    """The entry of the one table in the newest checkpoint."""
    (table,) = OpenCheckpoint.open(str(path)).tables
    return table


def served(table: dict[str, Any]) -> list[float]:
    """Returns the vector that a server reads for an id without a row, according to the manifest only."""
    said = table["missing_read"]
    if isinstance(said, dict):
        return [float(np.float32(said["value"]))] * DIM
    if said == "oov_row":
        digits: str = table["oov_row"]
        return [float(np.frombuffer(bytes.fromhex(digits[at : at + 8]), ">f4")[0]) for at in range(0, 8 * DIM, 8)]
    if said == "initial":
        # The rows of these tests are initialized with one constant.
        assert table["initializer"]["name"] == "constant"
        return [table["initializer"]["value"]] * DIM
    assert said == "zeros"
    return [0.0] * DIM


def read_by_server(path: Path) -> list[float]:
    """Returns the vector that a server reads for an id without a row."""
    with serving.open(path) as tables, tables.pin() as version:
        found: list[float] = version.tables[0].lookup([MISSING])[0].tolist()
    return found


def evaluated(table: nn.Module) -> list[float]:
    found: list[float] = table.eval()(torch.tensor([MISSING]))[0].tolist()
    table.train()
    return found


def trained(**settings: Any) -> nn.Module:
    table = embedding(initializer=initializers.Constant(0.25), **settings)
    for _ in range(2):
        update(table(torch.tensor([1, 2, 3])))
    return table


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_save_says_what_evaluation_reads(tmp_path: Path, case: str, door: str) -> None:
    settings, said = CASES[case]
    table = trained(**settings)
    if door in ("delta", "async delta", "compact"):
        Saver(0).save(table, tmp_path)
        update(table(torch.tensor([4])))
    if future := save_by(door, table, tmp_path):
        future.result()
    found = manifest_of(tmp_path)
    assert found["missing_read"] == said
    assert served(found) == evaluated(table)
    if "linked" in door:
        with pytest.raises(MismatchError):
            serving.open(tmp_path)
    else:
        assert read_by_server(tmp_path) == evaluated(table)


@pytest.mark.parametrize("beside", [False, True])
def test_megatrons_checkpoint_says_it(path: Path, *, beside: bool) -> None:
    table = trained(**COUNTED, not_admitted=0.5)
    if beside:
        finish(begin(table, path))
    else:
        save(table, path)
    (latest,) = path.rglob("LATEST")
    found = manifest_of(latest.parent)
    assert found["missing_read"] == {"value": 0.5}
    assert served(found) == evaluated(table)


@pytest.mark.parametrize("door", [*DOORS, "blocks"])
def test_a_table_that_is_loaded_goes_on_as_it_is_configured(tmp_path: Path, door: str) -> None:
    saved, loaded = trained(missing="zeros"), trained(**COUNTED, not_admitted=0.5)
    if door in ("delta", "async delta", "compact"):
        Saver(0).save(saved, tmp_path)
        update(saved(torch.tensor([4])))
    if future := save_by(door, saved, tmp_path):
        future.result()
    load_by(door, loaded, tmp_path)
    assert evaluated(loaded) == [0.5] * DIM
    Saver(0).save(loaded, tmp_path / "again")
    assert manifest_of(tmp_path / "again")["missing_read"] == {"value": 0.5}


def test_the_tables_of_a_collection_say_it(tmp_path: Path) -> None:
    def config(name: str, **settings: Any) -> EmbCacheEmbeddingBagConfig:
        given: dict[str, Any] = {"num_embeddings": 9, "embedding_dim": DIM, "feature_names": [name], **settings}
        return EmbCacheEmbeddingBagConfig(name=name, **given)

    recsdks = AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=0.5)
    module = EmbCacheEmbeddingBagCollection(
        [config("a", admit_and_evict_config=recsdks), config("b"), config("c", **COUNTED)], tiers=TIERS
    )
    Saver(0).save(module, tmp_path)
    tables = {table["table"]: table["missing_read"] for table in OpenCheckpoint.open(str(tmp_path)).tables}
    assert tables == {"a": {"value": 0.5}, "b": "initial", "c": "zeros"}
    module = EmbCacheEmbeddingBagCollection([config("a", missing="zeros")], tiers=TIERS)
    Saver(0).save(module, tmp_path)
    assert manifest_of(tmp_path)["missing_read"] == "zeros"


def test_reshard_and_convert_keep_it(tmp_path: Path) -> None:
    for case, (settings, said) in CASES.items():
        root = tmp_path / case
        root.mkdir()
        table = trained(**settings)
        Saver(0).save(table, root / "saved")
        assert main(["reshard", str(root / "saved"), str(root / "two"), "--world-size", "2"]) == 0
        assert main(["convert", str(root / "saved"), str(root / "files"), "--to", "npy"]) == 0
        assert main(["convert", str(root / "files"), str(root / "back")]) == 0
        for again in ("two", "back"):
            found = manifest_of(root / again)
            assert found["missing_read"] == said, (case, again)
            assert served(found) == evaluated(table)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *(
            (said, "missing_read: expected")
            for said in (
                "Zeros",
                "oov",
                0.5,
                True,
                None,
                [],
                {},
                {"value": "1"},
                {"value": True},
                {"value": 10**400},
            )
        ),
        ({"value": 1e39}, "number out of range"),
        ("oov_row", "it has none"),
    ],
)
def test_what_a_table_json_says_of_it_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: Any, message: str
) -> None:
    Saver(0).save(trained(missing="zeros"), tmp_path / "saved")
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "files"), "--to", "npy"]) == 0
    (description,) = (tmp_path / "files").rglob("table.json")
    described = json.loads(description.read_text())
    assert described["missing_read"] == "zeros"
    description.write_text(json.dumps({**described, "missing_read": said}))
    assert main(["convert", str(tmp_path / "files"), str(tmp_path / "back")]) == 3
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "back" / "LATEST").exists()


def test_inspect_and_diff_speak_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Saver(0).save(trained(missing="zeros"), tmp_path / "zeros")
    Saver(0).save(trained(), tmp_path / "plain")
    assert main(["inspect", str(tmp_path / "zeros")]) == 0
    shown = capsys.readouterr().out
    assert "ids without a row read" in shown
    assert " zeros " in shown
    assert main(["inspect", str(tmp_path / "plain")]) == 0
    assert " initial " in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "zeros"), str(tmp_path / "plain"), "--json"]) == 1
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["settings"] == ["missing_read"]


def test_a_table_cannot_evaluate_a_shared_row_that_it_has_not() -> None:
    settings: dict[str, Any] = {
        "name": "t",
        "key": 1,
        "dim": 2,
        "optimizer": "sgd",
        "initializer": initializers.Constant(0.0).native(),
        "seed": 0,
        "total_num_buckets": 4,
        "bucket_begin": 0,
        "bucket_end": 4,
        "host_bytes": 1 << 20,
        "device_rows": None,
        "device_gather": None,
        "ssd_dir": None,
        "ssd_bytes": 0,
        "reopen": None,
        "resume_commit_id": None,
        "policy": "lru",
        "on_full": "error",
    }
    with pytest.raises(ConfigError, match="cannot read an OOV row"):
        _native.Table(**settings, missing_read="oov")
    with pytest.raises(ConfigError, match="missing_read=inf: give a finite number"):
        _native.Table(**settings, missing_read=float("inf"))
    with pytest.raises(ConfigError, match="missing='ones'"):
        embedding(missing="ones", optimizer=optimizers.SGD(lr=0.1))


def test_table_json_with_oov_row_and_no_missing_reads_reads_oov(tmp_path: Path) -> None:
    Saver(0).save(trained(**COUNTED, not_admitted="oov", missing="zeros"), tmp_path / "saved")
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "files"), "--to", "npy"]) == 0
    (description,) = (tmp_path / "files").rglob("table.json")
    described = json.loads(description.read_text())
    assert described.pop("missing_read") == "zeros"
    description.write_text(json.dumps(described))
    assert main(["convert", str(tmp_path / "files"), str(tmp_path / "back")]) == 0
    found = manifest_of(tmp_path / "back")
    assert (found["missing_read"], found["oov_row"]) == ("oov_row", described["oov_row"])
    del described["oov_row"]
    description.write_text(json.dumps(described))
    assert main(["convert", str(tmp_path / "files"), str(tmp_path / "without")]) == 0
    assert manifest_of(tmp_path / "without")["missing_read"] == "initial"


@pytest.mark.parametrize("said", ["oov_row", "zeros", None])
@pytest.mark.parametrize("dim", [DIM + 1, None])
def test_a_shared_row_of_another_dim_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str | None, dim: int | None
) -> None:
    Saver(0).save(trained(**COUNTED, not_admitted="oov"), tmp_path / "saved")
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "files"), "--to", "npy"]) == 0
    (description,) = (tmp_path / "files").rglob("table.json")
    described = {**json.loads(description.read_text()), "dim": dim, "missing_read": said}
    description.write_text(json.dumps({name: value for name, value in described.items() if value is not None}))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "files"), str(tmp_path / "back"), "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "InputError"
    assert f"has dim {DIM}, and its table.json has the oov_row of dim {dim}" in error["message"]
    assert not (tmp_path / "back" / "LATEST").exists()
