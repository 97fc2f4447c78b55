"""Pending ids and other data without a row in the output and comparisons of the `embcache` command."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from admission_cases import Counted, counting, train
from cli_cases import run
from lifecycle_cases import embedding, update
from tables import ssd_tiers
from torchrec_embcache import EmbCacheEmbedding, admission, eviction, set_time
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import compare, main
from torchrec_embcache.cli.checkpoints import OpenCheckpoint


def save(table: EmbCacheEmbedding, path: Path, **options: Any) -> None:
    Saver(0).save(nn.ModuleDict({"table": table}), path, **options)


def trained(steps: int) -> EmbCacheEmbedding:
    table = counting()
    train(table, range(steps))
    return table


def test_diff_compares_the_counts_of_ids_that_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, waiting = trained(20), len(Counted(20).counts)
    save(table, tmp_path / "first")
    save(table, tmp_path / "same")
    save(table, tmp_path / "without", counters=False)
    code, found = run(capsys, "diff", tmp_path / "first", tmp_path / "same")
    (same,) = found["tables"]
    assert (code, found["equal"], same["counts"]) == (0, True, "equal")
    assert (same["pending_first"], same["pending_second"], same["pending_counts"]) == (waiting, waiting, 0)

    for pair, said, numbers in (
        (("first", "without"), "only in the first", (waiting, None)),
        (("without", "first"), "only in the second", (None, waiting)),
    ):
        paths = [tmp_path / name for name in pair]
        code, found = run(capsys, "diff", *paths)
        (table_,) = found["tables"]
        assert (code, found["equal"], table_["counts"]) == (1, False, said)
        assert (table_["pending_first"], table_["pending_second"]) == numbers
        code, found = run(capsys, "diff", *paths, "--no-counters")
        assert (code, found["equal"], found["tables"][0]["counts"]) == (0, True, "")
    assert run(capsys, "diff", tmp_path / "without", tmp_path / "without")[1]["tables"][0]["counts"] == ""


def test_diff_finds_single_counts_where_rows_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each table makes three steps in which no id gets a row."""
    for name, steps in (("one", [[1], [2], [3]]), ("other", [[1], [1], [2]]), ("third", [[1], [2, 2, 2], [3]])):
        table = counting()
        for ids in steps:
            table(torch.tensor(ids)).sum().backward()
        save(table, tmp_path / name)
    code, found = run(capsys, "diff", tmp_path / "one", tmp_path / "other", "--ids", 9)
    (table_,) = found["tables"]
    assert (code, table_["counts"]) == (1, "differ")
    assert (table_["pending_first"], table_["pending_second"]) == (3, 2)
    assert (table_["pending_only_first"], table_["pending_only_second"], table_["pending_counts"]) == (1, 0, 1)
    assert (table_["pending_ids"], table_["ids"]) == ([3, 1], [])
    assert (table_["rows_first"], table_["rows_second"], table_["settings"]) == (0, 0, [])
    code, found = run(capsys, "diff", tmp_path / "one", tmp_path / "third", "--ids", 9)
    (table_,) = found["tables"]
    assert (code, table_["counts"], table_["pending_counts"], table_["pending_ids"]) == (1, "differ", 1, [2])
    assert (table_["pending_first"], table_["pending_second"]) == (3, 3)


def test_diff_compares_clicks_and_which_ids_are_forgotten_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    for name, clicks, steps in (("one", 1, 0), ("clicked", 2, 0), ("older", 1, 4)):
        table = counting(admission=admission.ShowClick(1, 1, 99, window_steps=4))
        table(torch.tensor([7]), torch.tensor([clicks])).sum().backward()
        for _ in range(steps):
            table(nothing, nothing).sum().backward()
        table.table._native_table.set_step(9)
        save(table, tmp_path / name)
    code, found = run(capsys, "diff", tmp_path / "one", tmp_path / "clicked", "--ids", 3)
    assert (code, found["tables"][0]["pending_ids"]) == (1, [7])
    code, found = run(capsys, "diff", tmp_path / "one", tmp_path / "older", "--ids", 3)
    assert (code, found["tables"][0]["pending_ids"]) == (1, [7])
    code, found = run(capsys, "diff", tmp_path / "one", tmp_path / "older", "--ignore-metadata")
    assert (code, found["tables"][0]["counts"]) == (0, "equal")


def test_diff_reads_the_counts_of_a_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, waiting = trained(15), len(Counted(20).counts)
    save(table, tmp_path / "chain")
    train(table, range(15, 20))
    save(table, tmp_path / "chain", incremental=True)
    save(table, tmp_path / "full")
    code, found = run(capsys, "diff", tmp_path / "chain", tmp_path / "full", "--ignore-metadata")
    (table_,) = found["tables"]
    assert (code, table_["counts"]) == (0, "equal")
    assert (table_["pending_first"], table_["pending_second"]) == (waiting, waiting)
    assert main(["inspect", str(tmp_path / "chain")]) == 0
    assert "pending since parent" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "full")]) == 0
    assert "since parent" not in capsys.readouterr().out
    save(table, tmp_path / "without", counters=False)
    code, found = run(capsys, "diff", tmp_path / "chain", tmp_path / "without", "--ignore-metadata")
    assert (code, found["tables"][0]["counts"]) == (1, "only in the first")
    assert main(["compact", str(tmp_path / "chain")]) == 0
    capsys.readouterr()
    code, found = run(capsys, "diff", tmp_path / "chain", tmp_path / "full", "--ignore-metadata")
    assert (code, found["tables"][0]["counts"]) == (0, "equal")


def test_diff_of_many_counts_goes_by_windows_of_buckets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(trained(20), tmp_path / "one")
    save(trained(21), tmp_path / "other")
    whole = run(capsys, "diff", tmp_path / "one", tmp_path / "other", "--ids", 1000)[1]
    windows = []
    read = compare._RowWindow.read
    monkeypatch.setattr(compare, "_WINDOW_BYTES", 1 << 12)
    monkeypatch.setattr(compare._RowWindow, "read", lambda *args, **kw: windows.append(args[2:]) or read(*args, **kw))
    parts = run(capsys, "diff", tmp_path / "one", tmp_path / "other", "--ids", 1000)[1]
    assert len(windows) > 4
    for found in (whole, parts):
        for name in ("ids", "pending_ids"):
            found["tables"][0][name].sort()
    assert parts == whole
    assert whole["tables"][0]["pending_counts"] > 0


def test_what_a_taker_of_counts_raises_is_raised(tmp_path: Path) -> None:
    save(trained(20), tmp_path / "one")
    opened = OpenCheckpoint.open(str(tmp_path / "one"))
    (table,) = opened.tables
    where = (table["module"], table["table"], 0, table["total_num_buckets"])

    def refuse(_counts: Any) -> None:
        raise ValueError("no more of these")

    with pytest.raises(ValueError, match="no more of these"):
        opened.rows.read(*where, None, counts=refuse)
    found: list[Any] = []
    opened.rows.read(*where, None, counts=found.append)
    counts = Counted(20).counts
    assert {
        int(row_id): int(shows) for block in found for row_id, shows in zip(block.ids, block.shows, strict=True)
    } == counts


def test_people_see_what_diff_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = trained(20)
    save(table, tmp_path / "with")
    save(table, tmp_path / "without", counters=False)
    assert main(["diff", str(tmp_path / "with"), str(tmp_path / "with")]) == 0
    shown = capsys.readouterr().out
    assert "pending counts" in shown
    assert "they differ" not in shown
    train(table, range(20, 21))
    save(table, tmp_path / "later")
    assert main(["diff", str(tmp_path / "with"), str(tmp_path / "later"), "--ids", "3"]) == 1
    assert "/item: ids that wait for rows [" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "with"), str(tmp_path / "without")]) == 1
    shown = capsys.readouterr().out
    assert "only in the first" in shown
    assert "None" not in shown
    assert "they differ" in shown


def test_convert_says_that_it_leaves_counts_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(trained(20), tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "plain"), "--to", "npy"]) == 0
    assert "the counts of ids that wait for rows are not in" in capsys.readouterr().err
    assert run(capsys, "convert", tmp_path / "plain", tmp_path / "back")[0] == 0
    code, found = run(capsys, "diff", tmp_path / "ours", tmp_path / "back")
    (table,) = found["tables"]
    assert (code, table["counts"], table["only_first"], table["weights"]) == (1, "only in the first", 0, 0)
    assert run(capsys, "diff", tmp_path / "ours", tmp_path / "back", "--no-counters")[0] == 0


def test_inspect_says_which_tables_have_a_shared_row_and_step_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = eviction.Policy([eviction.Ttl(seconds=3600)])
    shared = {"admission": admission.ReadOnly(), "not_admitted": "oov"}
    settings: dict[str, dict[str, Any]] = {
        "both": {"eviction": timed, **shared},
        "neither": {},
        "timed": {"eviction": timed},
    }
    tiers = ssd_tiers(tmp_path / "ssd")
    model = nn.ModuleDict({name: embedding(name=name, tiers=tiers, **given) for name, given in settings.items()})
    expected = {"both": ("yes", 2), "neither": (None, None), "timed": (None, 2)}
    for seconds in (5, 90):
        set_time(model, seconds)
        for table in model.values():
            update(table(torch.tensor([1])))
    for linked in (False, True):
        path = tmp_path / f"saved {linked}"
        Saver(0).save(model, path, linked=linked)
        code, found = run(capsys, "inspect", path)
        assert (code, {each["table"]: (each["oov_row"], each["step_times"]) for each in found["tables"]}) == (
            0,
            expected,
        )
    for table in model.values():
        table.close()
    code, found = run(capsys, "inspect", tmp_path / "ssd")
    assert (code, {each["table"]: (each["oov_row"], each["step_times"]) for each in found["ssd"]}) == (
        0,
        expected,
    )
    for path in (tmp_path / "ssd", tmp_path / "saved False"):
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "OOV row" in shown
        assert "step times" in shown
        (line,) = (line for line in shown.splitlines() if " both " in line or "both/both" in line)
        assert " yes " in line
        assert "None" not in shown


def test_inspect_does_not_speak_of_what_no_table_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with embedding(tiers=ssd_tiers(tmp_path / "ssd")) as table:
        update(table(torch.tensor([1])))
        Saver(0).save(table, tmp_path / "saved")
    for path in (tmp_path / "ssd", tmp_path / "saved"):
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "OOV row" not in shown
        assert "step times" not in shown
