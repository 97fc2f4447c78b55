"""Arguments of lookups, the names of their results, and the command."""

import ast
import copy
import inspect
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lifecycle_cases import embedding
from serving_cases import command, publish, two_saves, value_of
from torchrec_embcache import Saver, _native, serving
from torchrec_embcache.exceptions import ConfigError, InputError, MismatchError, PathError


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "ckpt"


# ---- arguments


def test_a_preloaded_checkpoint_reads_the_same(ckpt: Path) -> None:
    table, saver, _ = two_saves(ckpt)
    with serving.open(ckpt, preload=True) as tables:
        assert value_of(tables.pin()) == 1.0
        publish(table, saver, ckpt, 5.0)
        publish(table, saver, ckpt, 6.0, full=True)
        tables.poll()
        assert value_of(tables.pin()) == 6.0
        assert tables.stats().cold_rows == 0
    with pytest.raises(ConfigError, match="preload='yes': give True or False"):
        serving.open(ckpt, preload="yes")  # type: ignore[arg-type]


def test_path_of_one_checkpoint_is_rejected_with_the_right_call(ckpt: Path) -> None:
    name = two_saves(ckpt)[2]
    with pytest.raises(PathError, match="is one checkpoint") as told:
        serving.open(ckpt / name)
    call = f"serving.open({str(ckpt)!r}, at={name!r})"
    assert call in str(told.value)
    with serving.open(str(ckpt), at=name) as tables:
        assert tables.stats().version == name


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda rows: pickle.loads(pickle.dumps(rows))])
def test_rows_can_be_copied_and_pickled(ckpt: Path, copied: Callable[[serving.Rows], serving.Rows]) -> None:
    two_saves(ckpt)
    with serving.open(ckpt, missing="zeros") as tables:
        rows = tables.pin()["item"].lookup([1, 99])
    again = copied(rows)
    assert type(again) is serving.Rows
    assert torch.equal(again, rows)
    assert again.found.tolist() == [True, False]


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1.5]),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        torch.tensor([1, 2], device="meta"),
        torch.tensor([1, 2]).to_sparse(),
        [[1], [2]],
        [1.5],
        ["1"],
        [2**70],
        None,
        "12",
        7,
        {1: 2},
    ],
    ids=repr,
)
def test_ids_that_are_none_are_refused(ckpt: Path, ids: Any) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        for use in (lambda: version["item"].lookup(ids), lambda: version["item"].lookup_pooled(ids, [0, 1])):
            with pytest.raises(InputError):
                use()


@pytest.mark.parametrize(
    "offsets",
    [[], [0], [1, 3], [0, 2], [0, 4], [0, 2, 1, 3], [0, -1, 3], [0, 2**40, 3], [[0, 3]], [0.0, 3.0], None],
    ids=repr,
)
def test_offsets_that_do_not_fit_are_refused(ckpt: Path, offsets: Any) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version, pytest.raises(InputError, match="offsets"):
        version["item"].lookup_pooled([1, 2, 3], offsets)


def test_weights_and_poolings_that_do_not_fit_are_refused(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        item = version["item"]
        for weights in (torch.ones(2), torch.ones(3, dtype=torch.float64), [1.0, 1.0, 1.0], torch.ones(3, 1)):
            with pytest.raises(InputError, match="per_sample_weights"):
                item.lookup_pooled([1, 2, 3], [0, 3], "sum", weights)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="pooling"):
            item.lookup_pooled([1, 2, 3], [0, 3], "max")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="sum"):
            item.lookup_pooled([1, 2, 3], [0, 3], "mean", torch.ones(3))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_are_those_of_torch(ckpt: Path, pooling: Any) -> None:
    table, _, _ = two_saves(ckpt)
    dice = random.Random(1)
    for _ in range(10):
        bags = [dice.choices(range(12), k=dice.randrange(6)) for _ in range(dice.randrange(1, 6))]
        ids = [row_id for bag in bags for row_id in bag]
        offsets = [sum(map(len, bags[:place])) for place in range(len(bags) + 1)]
        weights = torch.rand(len(ids)) if pooling == "sum" else None
        with serving.open(ckpt) as tables, tables.pin() as version:
            got = version["item"].lookup_pooled(ids, offsets, pooling, weights)
        rows = table.read_rows(range(12)).weights
        want = torch.nn.functional.embedding_bag(
            torch.tensor(ids, dtype=torch.int64),
            rows,
            torch.tensor(offsets),
            mode=pooling,
            include_last_offset=True,
            per_sample_weights=weights,
        )
        torch.testing.assert_close(got, want)


def test_ids_come_in_every_form(ckpt: Path) -> None:
    import numpy as np

    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        for ids in (
            [1, 3],
            (1, 3),
            range(1, 4, 2),
            np.array([1, 3], np.uint64),
            np.array([1, 9, 3])[::2],
            torch.tensor([1, 3], dtype=torch.int32),
            torch.tensor([1, 9, 3])[::2],
        ):
            rows = version["item"].lookup(ids)
            assert rows.tolist() == [[1.0] * 4, [3.0] * 4]
        empty = version["item"].lookup([])
        assert (empty.shape, empty.found.shape, empty.dtype) == ((0, 4), (0,), torch.float32)
        assert version["item"].lookup_pooled([], [0, 0, 0]).tolist() == [[0.0] * 4] * 2
        assert version["item"].lookup([1] * 5000).unique().tolist() == [1.0]


def test_rows_are_tensors(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        rows = version["item"].lookup([1, 77])
        assert isinstance(rows, torch.Tensor)
        assert type(rows * 2) is type(rows[0]) is type(rows.clone()) is torch.Tensor
        assert repr(rows).startswith("Rows(")
        first = version["item"].lookup([2])
        version["item"].lookup([3])
        assert first[0, 0] == 2.0, "each has memory of its own"


def test_tables_are_found_by_name_or_by_module_and_name(ckpt: Path) -> None:
    model = torch.nn.ModuleDict({"a": embedding(name="item"), "b": embedding(name="item"), "c": embedding(name="user")})
    for place, table in enumerate(model.values()):
        table.import_rows([1], [[float(place)] * 4])  # type: ignore[operator]
    Saver(0).save(model, ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        assert [(table.module, table.name, table.dim, table.rows) for table in version.tables] == [
            ("a", "item", 4, 1),
            ("b", "item", 4, 1),
            ("c", "user", 4, 1),
        ]
        read = [float(version[name].lookup([1])[0, 0]) for name in ("a/item", "b/item", "c/user", "user")]
        assert read == [0.0, 1.0, 2.0, 2.0]
        assert version["user"] is version["user"]
        for name in ("item", "nothing", "d/item", ""):
            with pytest.raises(MismatchError, match="a/item, b/item, c/user"):
                version[name]
        with pytest.raises(InputError, match="named by text"):
            version[1]  # type: ignore[index]


# ---- the command


def test_the_command_makes_the_index_that_is_served(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, saver, first = two_saves(ckpt)
    second = publish(table, saver, ckpt, 20.0)
    made = json.loads(command(capsys, "index", str(ckpt), "--at", "1", "--json"))
    assert made == {"path": str(ckpt), "checkpoint": first, "rows": 9, "bytes": made["bytes"], "was_there": False}
    assert (ckpt / first / "serve.idx").is_file()
    assert command(capsys, "index", str(ckpt / second)).startswith(f"{second} in {ckpt} is indexed: 9 rows, ")
    assert command(capsys, "index", str(ckpt)).startswith(f"{second} in {ckpt} is indexed already: 9 rows, ")
    stamps = {path: path.stat().st_mtime_ns for path in ckpt.rglob("serve.idx")}
    with serving.open(ckpt) as tables:
        assert value_of(tables.pin()) == 20.0
    assert {path: path.stat().st_mtime_ns for path in ckpt.rglob("serve.idx")} == stamps


def test_the_command_says_what_is_wrong(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_saves(ckpt)
    assert "9999" in command(capsys, "index", str(ckpt), "--at", "9999", status=3)
    assert "nothing" in command(capsys, "index", str(ckpt / "nothing"), status=3)
    assert not (ckpt / "nothing").exists()


# ---- names


def in_stub(name: str) -> set[str]:
    stub = Path(_native.__file__).parent / "_native_serving.pyi"
    (found,) = (
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {inner.target.id for inner in found.body if isinstance(inner, ast.AnnAssign)}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["ServeIndexReport", "ServedTable", "ServedVersion", "ServingStats"])
def test_what_the_stub_says_of_a_class_is_there(name: str) -> None:
    kind = getattr(_native, name)
    assert {member for member, value in vars(kind).items() if inspect.isdatadescriptor(value)} == in_stub(name)


def test_a_counter_has_one_name_everywhere(ckpt: Path) -> None:
    two_saves(ckpt)
    assert [field.name for field in fields(serving.ServingStats)] == [*in_order("ServingStats"), "is_stale"]
    with serving.open(ckpt) as tables:
        stats = tables.stats()
    assert (stats.rows, stats.polls, stats.swaps, stats.lookups) == (9, 0, 0, 0)


def test_a_call_is_one_lookup_however_many_ids_it_has(ckpt: Path) -> None:
    two_saves(ckpt)
    with serving.open(ckpt) as tables, tables.pin() as version:
        item, calls, ids = version["item"], 0, 0
        for count, bag in ((100, 10), (2048, 1), (10_000, 10), (10_000, 10_000), (0, 1)):
            item.lookup_pooled([7] * count, list(range(0, count + 1, bag)))
            item.lookup([7] * count)
            calls, ids = calls + 2, ids + 2 * count
            assert (tables.stats().lookups, tables.stats().ids) == (calls, ids)
        with pytest.raises(InputError):
            item.lookup_pooled([7], [0, 2])
        assert tables.stats().lookups == calls, "it was refused"


def in_order(name: str) -> list[str]:
    stub = (Path(_native.__file__).parent / "_native_serving.pyi").read_text()
    body = stub.split(f"class {name}:")[1].split("@final")[0]
    return [line.split(":")[0].strip() for line in body.splitlines() if ": " in line and "def " not in line]


@pytest.mark.slow
def test_serving_needs_no_torchrec(ckpt: Path) -> None:
    two_saves(ckpt)
    script = (
        "import sys\nsys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        "from torchrec_embcache import serving\n"
        f"with serving.open({str(ckpt)!r}) as tables, tables.pin() as version:\n"
        "    print(version['item'].lookup([3]).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[[3.0, 3.0, 3.0, 3.0]]\n", done.stderr
