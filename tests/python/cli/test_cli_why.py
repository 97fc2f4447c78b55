"""`embcache why` and `inspect`: the history of an id in a chain of checkpoints, compared with the operations that were done."""

import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cli_cases import run
from lifecycle_cases import HALF_LIFE, Expected, come_again, decayed, embedding, ids_of, update
from project_paths import ROOT
from tables import Contents
from torchrec_embcache import admission, eviction
from torchrec_embcache.checkpoint import Saver
from torchrec_embcache.cli import main
from torchrec_embcache.cli.rules import describe_rule
from torchrec_embcache.eviction import All, L2Norm, Policy, Score, Ttl


class Chain:
    """A table that is saved again and again: one full checkpoint, then deltas."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.table = embedding(score_half_life_steps=HALF_LIFE, **settings)
        self.model = nn.ModuleDict({"t": self.table})

    def train(self, *batches: list[int]) -> "Chain":
        for ids in batches:
            update(self.table(torch.tensor(ids)))
        return self

    def save(self) -> "Chain":
        Saver(0).save(self.model, self.path, incremental=True)
        return self


def why(capsys: pytest.CaptureFixture[str], path: Path, row_id: int) -> dict[str, Any]:
    code, found = run(capsys, "why", path, "item", row_id)
    assert code == 0
    return found


def whats(found: dict[str, Any]) -> list[list[str]]:
    """The names of what became of an id, of each checkpoint."""
    return [[event["event"] for event in link["events"]] for link in found["links"]]


def test_an_id_is_counted_admitted_and_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(tmp_path, admission=admission.Count(3), eviction=Policy([Ttl(steps=4)]))
    chain.train([1, 1]).save().train([2], [2]).save().train([1]).save()
    row = chain.table.read_rows([1])
    for batch in ([2], [3], [3], [3]):
        chain.train(batch)
    chain.save().train([1]).save().train([4], [4]).save()
    found = why(capsys, tmp_path, 1)
    assert (found["id"], found["state"], found["module"], found["table"]) == (1, "pending", "t", "item")
    assert [link["kind"] for link in found["links"]] == ["full", *["delta"] * 5]
    assert [link["step"] for link in found["links"]] == [1, 3, 4, 8, 9, 11]
    assert whats(found) == [["counted"], [], ["inserted"], ["swept"], ["counted"], []]
    assert [link["state"] for link in found["links"]] == ["pending", "pending", "row", "nothing", "pending", "pending"]
    assert [link["count"] and link["count"]["shows"] for link in found["links"]] == [2, 2, None, None, 1, 1]
    got = found["links"][2]
    assert got["events"][0]["text"] == "it got its row after step 3 and by step 4"
    assert (got["row"]["last_step"], got["row"]["count"], got["row"]["score"]) == (4, 1, 1.0)
    expected = np.sqrt(np.float64(sum(float(weight) ** 2 for weight in row.weights[0])))
    assert got["row"]["l2_norm"] == pytest.approx(expected, rel=1e-15)
    (taken,) = found["links"][3]["sweeps"]
    assert (taken["step"], taken["rule"], taken["words"]) == (8, {"last_step": 4}, "trained last at step 4 or before")

    assert main(["why", str(tmp_path), "item", "1"]) == 0
    shown = capsys.readouterr().out
    assert "the sweep after step 8, or one of the same rule before it, took its row: trained last at step 4" in shown
    assert "It waits for a row (1 occurrence)." in shown
    # A checkpoint by its name, as of then.
    second = tmp_path / found["links"][2]["checkpoint"]
    assert whats(why(capsys, second, 1)) == [["counted"], [], ["inserted"]]


def test_norms_along_the_chain_are_those_that_the_row_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, norms, steps = Chain(tmp_path), [], []
    for batches in ([[7]], [[8]], [[7, 7], [9]], [[7]]):
        chain.train(*batches).save()
        row = chain.table.read_rows([7])
        norms.append(float(np.linalg.norm(row.weights.numpy().astype(np.float64))))
        steps.append(int(row.metadata.last_step[0]))
    found = why(capsys, tmp_path, 7)
    assert [link["row"]["l2_norm"] for link in found["links"]] == pytest.approx(norms, rel=1e-14)
    assert [link["row"]["last_step"] for link in found["links"]] == steps == [1, 1, 3, 5]
    assert [link["has_row"] for link in found["links"]] == [True, False, True, True]
    assert whats(found) == [["inserted"], [], ["modified"], ["modified"]]
    assert main(["why", str(tmp_path), "item", "7"]) == 0
    assert "It has a row, which was trained last at step 5." in capsys.readouterr().out


def test_a_tombstone_tells_that_a_row_was_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(tmp_path).train([5, 6]).save()
    chain.table.remove_rows([5, 6])
    chain.train([6], [9]).save()
    chain.table.remove_rows([9, 6])
    chain.train([9]).save()
    assert whats(why(capsys, tmp_path, 5)) == [["inserted"], ["tombstone"], []]
    assert whats(why(capsys, tmp_path, 6)) == [["inserted"], ["tombstone", "inserted"], ["tombstone"]]
    assert whats(why(capsys, tmp_path, 9)) == [[], ["inserted"], ["tombstone", "inserted"]]
    text = why(capsys, tmp_path, 5)["links"][1]["events"][0]["text"]
    assert "removed by hand, or dropped because the table was full" in text
    assert "sweep" not in text, "no delta has one"
    assert main(["why", str(tmp_path), "item", "5"]) == 0
    assert "It has no row and no count: a tombstone says that its row left" in capsys.readouterr().out


def test_what_was_born_again_after_a_sweep_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(tmp_path, eviction=Policy([Ttl(steps=2)], every_steps=1))
    chain.train([1], [1], [1], [1], [1, 5, 8]).save()
    # All three die after step 7, and two of them are born again.
    chain.train([9], [9], [1, 5, 5]).save()
    one, five, eight = (why(capsys, tmp_path, row_id) for row_id in (1, 5, 8))
    assert whats(eight) == [["inserted"], ["swept"]]
    assert whats(one) == [["inserted"], ["swept", "inserted"]], "it has fewer occurrences than before"
    assert whats(five) == [["inserted"], ["modified or swept"]], "it has more, and may have been trained in time"
    assert [found["state"] for found in (one, five, eight)] == ["row", "row", "nothing"]
    # A row that was trained in time looks the same.
    chain.train([5], [3], [9], [9], [9]).save()
    five = why(capsys, tmp_path, 5)
    assert five["state"] == "nothing"
    assert whats(five)[2] == ["swept"]


RULES = [
    [Ttl(steps=9)],
    [Score(below=0.4)],
    [L2Norm(below=0.45)],
    [All([Ttl(steps=3), Score(below=0.7), L2Norm(below=0.6)])],
    [Ttl(steps=12), All([Score(below=0.6), L2Norm(below=0.5)])],
]


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES, ids=["ttl", "score", "norm", "all", "any"])
def test_every_id_is_what_the_table_has_and_merged_chains_are_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rules: list[eviction.Rule]
) -> None:
    """A chain with sweeps of each kind of rule: id by id, merged, divided between ranks, and gone on with."""
    chain, model = Chain(tmp_path / "chain", eviction=Policy(rules)), Expected(Policy(rules))
    dice, ever, left = random.Random(1), set(), 0
    for _ in range(4):
        for _ in range(8):
            ids = come_again(dice, 12)
            ever.update(ids)
            chain.train(ids)
            update(model.table(torch.tensor(ids)))
        model.sweep()
        chain.save()
    assert model.is_same(chain.table)
    rows = set(ids_of(chain.table))
    for row_id in random.Random(2).sample(sorted(ever), 60):
        found = why(capsys, tmp_path / "chain", row_id)
        assert (found["state"] == "row") == (row_id in rows)
        check_taken(found)
        # The rule of norms takes rows that were just trained, which a tombstone names.
        left += any(name in ("swept", "tombstone") for names in whats(found) for name in names)
    assert left > 3
    sweeps = run(capsys, "inspect", tmp_path / "chain")[1]["tables"][0]["sweeps"]
    assert [sweep["step"] for sweep in sweeps] == [16, 24, 32]
    check_rewritten(tmp_path, capsys, chain, model, dice)


def check_taken(found: dict[str, Any]) -> None:
    """Hold each sweep that is said to take a row against that row, as the checkpoint before has it."""
    for before, link in itertools.pairwise(found["links"]):
        for taken in link["sweeps"]:
            row = before["row"]
            for rule in taken["rule"].get("all", [taken["rule"]]):
                if "last_step" in rule:
                    assert row["last_step"] <= rule["last_step"]
                elif "norm_below" in rule:
                    assert row["l2_norm"] < rule["norm_below"]
                else:
                    below = rule["score_below"]["below"]
                    assert taken["score"] == decayed(row["score"], row["last_step"], taken["step"], HALF_LIFE) < below
            assert (taken["score"] is None) == ("score_below" not in json.dumps(taken["rule"]))


def check_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chain: Chain, model: Expected, dice: random.Random
) -> None:
    """Compact and reshard the chain, and go on with it."""
    shutil.copytree(tmp_path / "chain", tmp_path / "before")
    assert run(capsys, "reshard", tmp_path / "chain", tmp_path / "divided", "--world-size", 3)[0] == 0
    assert run(capsys, "compact", tmp_path / "chain")[0] == 0
    for path in (tmp_path / "chain", tmp_path / "divided"):
        found = run(capsys, "inspect", path)[1]
        assert found["checkpoint"]["kind"] == "full"
        assert found["tables"][0]["sweeps"] == []
        assert run(capsys, "diff", tmp_path / "before", path)[0] == 0
        assert run(capsys, "verify", path)[0] == 0
        loaded = embedding(score_half_life_steps=HALF_LIFE)
        Saver(0).load(nn.ModuleDict({"t": loaded}), path)
        assert Contents.of(loaded) == Contents.of(model.table)
    # A delta on the merged checkpoint has the sweeps since the chain that was merged, and no others.
    for _ in range(9):
        ids = come_again(dice, 12)
        chain.train(ids)
        update(model.table(torch.tensor(ids)))
    model.sweep()
    chain.save()
    found = run(capsys, "inspect", chain.path)[1]
    assert found["checkpoint"]["kind"] == "delta"
    assert [sweep["step"] for sweep in found["tables"][0]["sweeps"]] == [41]
    loaded = embedding(score_half_life_steps=HALF_LIFE)
    Saver(0).load(nn.ModuleDict({"t": loaded}), chain.path)
    assert Contents.of(loaded) == Contents.of(model.table)


@pytest.mark.slow
def test_counts_age_along_the_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reported counts are those that the table would load, also if they are forgotten without being touched."""
    chain = Chain(tmp_path, admission=admission.Count(4, window_steps=10))
    dice, pending = random.Random(3), []
    for _ in range(5):
        for _ in range(6):
            chain.train(come_again(dice, 9))
        chain.save()
        stats = chain.table.stats().admission
        assert stats is not None
        pending.append(stats.pending)
    ids = set(range(90))
    assert pending[-1] > 0
    loaded = embedding(admission=admission.Count(4, window_steps=10))
    Saver(0).load(nn.ModuleDict({"t": loaded}), tmp_path)
    events = set()
    for row_id in sorted(ids):
        found = why(capsys, tmp_path, row_id)
        events.update(name for names in whats(found) for name in names)
        count = found["links"][-1]["count"]
        assert (count is not None) == (found["state"] == "pending")
        twin = embedding(admission=admission.Count(4, window_steps=10))
        Saver(0).load(nn.ModuleDict({"t": twin}), tmp_path)
        needed = 0
        if found["state"] == "row":
            assert twin.read_rows([row_id]).found[0]
            continue
        while not twin.read_rows([row_id]).found[0]:
            update(twin(torch.tensor([row_id])))
            needed += 1
        assert needed == 4 - (count["shows"] if count else 0), found
    assert {"counted", "inserted", "forgotten"} <= events


def test_clicks_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(tmp_path, admission=admission.ShowClick(1, 1, 9))
    update(chain.table(torch.tensor([4, 4]), torch.tensor([1, 2])))
    chain.save()
    assert why(capsys, tmp_path, 4)["links"][0]["count"] == {"shows": 2, "clicks": 3, "is_older": False}
    assert main(["why", str(tmp_path), "item", "4"]) == 0
    assert "waits: 2 occurrences, 3 clicks" in capsys.readouterr().out


def test_ids_are_signed_or_unsigned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    least, most = -(2**63), 2**63 - 1
    chain = Chain(tmp_path).train([-1, least, most]).save()
    for given, row_id in (
        (-1, -1),
        (2**64 - 1, -1),
        ("0xffffffffffffffff", -1),
        (least, least),
        (2**63, least),
        (most, most),
    ):
        found = run(capsys, "why", tmp_path, "t/item", given)[1]
        assert (found["id"], found["state"]) == (row_id, "row")
    assert main(["why", str(tmp_path), "item", "-1"]) == 0
    assert "Id -1 (18446744073709551615 unsigned) of table item" in capsys.readouterr().out
    for wrong in ("1.5", str(2**64), str(least - 1), "one"):
        with pytest.raises(SystemExit) as ended:
            main(["why", str(chain.path), "item", wrong])
        assert ended.value.code == 2


def test_an_id_that_is_nowhere_and_tables_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Chain(tmp_path).train([1]).save().train([2]).save()
    found = why(capsys, tmp_path, 77)
    assert (found["state"], whats(found)) == ("nothing", [[], []])
    assert main(["why", str(tmp_path), "item", "77"]) == 0
    assert "No checkpoint of the chain has anything of it." in capsys.readouterr().out
    code, found = run(capsys, "why", tmp_path, "user", 1)
    assert (code, found["error"]["type"]) == (3, "MismatchError")
    assert "it has [t/item]" in found["error"]["message"]
    both = nn.ModuleDict({"a": embedding(), "b": embedding()})
    for module in both.values():
        update(module(torch.tensor([3])))
    Saver(0).save(both, tmp_path / "both")
    code, found = run(capsys, "why", tmp_path / "both", "item", 3)
    assert (code, found["error"]["type"]) == (3, "InputError")
    assert "a/item, b/item" in found["error"]["message"]
    assert run(capsys, "why", tmp_path / "both", "b/item", 3)[1]["module"] == "b"


def test_only_the_files_of_the_ids_bucket_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(tmp_path / "one", admission=admission.Count(2)).train(list(range(40)), list(range(0, 40, 2))).save()
    assert run(capsys, "reshard", chain.path, tmp_path / "three", "--world-size", 3)[0] == 0
    expected = {row_id: why(capsys, tmp_path / "three", row_id)["state"] for row_id in range(40)}
    assert set(expected.values()) == {"row", "pending"}
    files = {file.name.split("-of-")[0] for file in (tmp_path / "three").rglob("*.safetensors")}
    assert len(files) == 3
    for file in (tmp_path / "three").rglob("*.safetensors"):
        if not file.name.startswith(f"{min(files)}-of-"):
            file.unlink()
    read = 0
    for row_id, now in expected.items():
        code, found = run(capsys, "why", tmp_path / "three", "item", row_id)
        if code == 0:
            assert found["state"] == now
            read += 1
        else:
            assert found["error"]["type"] == "StorageError"
    assert 3 < read < 40


def test_a_linked_checkpoint_is_told_of_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lifecycle_cases import budgets

    with embedding(tiers=budgets("ssd", tmp_path / "ssd")) as table:
        for ids in ([1, 2], [1], [3]):
            update(table(torch.tensor(ids)))
        Saver(0).save(nn.ModuleDict({"t": table}), tmp_path / "linked", linked=True)
    found = why(capsys, tmp_path / "linked", 1)
    assert (found["state"], found["links"][0]["kind"], found["links"][0]["row"]["last_step"]) == ("row", "linked", 2)
    assert why(capsys, tmp_path / "linked", 9)["state"] == "nothing"
    assert main(["why", str(tmp_path / "linked"), "item", "1"]) == 0
    assert "Every row of the rank that has the id was read" in capsys.readouterr().out


def test_inspect_shows_the_sweeps_of_each_delta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy([Ttl(steps=2), All([Score(below=0.5), L2Norm(below=0.25)])])
    chain = Chain(tmp_path, eviction=policy).train([1], [2], [3]).save().train([4]).save().train([5]).save()
    code, found = run(capsys, "inspect", tmp_path)
    assert code == 0
    (table,) = found["tables"]
    names = [entry["name"] for entry in found["checkpoints"]]
    assert [(sweep["checkpoint"], sweep["step"]) for sweep in table["sweeps"]] == [(names[1], 4), (names[2], 5)]
    rule = {"any": [{"last_step": 3}, {"all": [{"score_below": {"below": 0.5, "half_life": 3}}, {"norm_below": 0.25}]}]}
    assert table["sweeps"][1]["rule"] == rule
    words = "trained last at step 3 or before or (score below 0.5 (half life 3 steps) and L2 norm below 0.25)"
    assert table["sweeps"][1]["words"] == words
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert "after step" in shown
    # As of the first delta, and of a checkpoint without sweeps.
    assert len(run(capsys, "inspect", tmp_path / names[1])[1]["tables"][0]["sweeps"]) == 1
    assert run(capsys, "inspect", tmp_path / names[0])[1]["tables"][0]["sweeps"] == []
    assert main(["inspect", str(tmp_path / names[0])]) == 0
    assert "after step" not in capsys.readouterr().out
    assert len(ids_of(chain.table)) < 5


def test_rules_in_words() -> None:
    assert describe_rule({"any": []}) == "no rows"
    assert describe_rule({"norm_below": 0.1}) == "L2 norm below 0.1"
    assert describe_rule({"of_a_later_version": 5}) == json.dumps({"of_a_later_version": 5})


def test_the_example_of_the_documentation_is_what_the_command_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "eviction.md").read_text()
    part = text.split("## The life of one id\n")[1].split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    exec(part.split("```python\n")[1].split("```")[0], {})
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    assert main(["why", "ckpt", "item", "1"]) == 0
    shown = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    told = [[cell for cell in line[1:] if not cell.startswith("0.")] for line in shown if line[0].startswith("00")]
    assert told == [[cell for cell in line if cell] for line in table[2:]]
    sweeps = run(capsys, "inspect", "ckpt")[1]["tables"][0]["sweeps"]
    assert [sweep["step"] for sweep in sweeps] == [3, 7]
    assert sweeps[0]["words"] == "no rows"
