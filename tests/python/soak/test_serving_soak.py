"""The soak of serving would see a wrong row, and a version that may not be served: its truth is what a trainer makes, its servers
compare whole rows with it, and its parent knows what was published. It also runs here, short, with all its faults.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from project_paths import ROOT
from torchrec_embcache import Saver, serving

BENCHES = ROOT / "benches" / "python"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the soak."""
    monkeypatch.syspath_prepend(str(BENCHES))
    names = ("soak_truth", "soak_trainer", "soak_server", "soak_published", "soak_faults", "serving_soak", "plots")
    before = set(sys.modules)
    yield {name: __import__(name) for name in names}
    for name in set(sys.modules) - before:
        if str(BENCHES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_truth_is_what_touches_and_sweeps_make(soak: dict[str, ModuleType]) -> None:
    truth = soak["soak_truth"].Truth(300)
    last: dict[int, int] = {}
    touches: dict[int, int] = {}
    ids = np.arange(301)
    lives = 0
    for step in range(1, 3 * truth.cycle):
        for row_id in truth.touched(step).tolist():
            lives += row_id not in touches
            last[row_id], touches[row_id] = step, touches.get(row_id, 0) + 1
        if step % truth.save_every == 0:
            for row_id in [row_id for row_id in touches if step - last[row_id] >= truth.ttl]:
                del touches[row_id]
            values, found = truth.rows(ids, step)
            assert values.tolist() == [touches.get(row_id, 0) for row_id in range(301)]
            assert found.tolist() == [row_id in touches for row_id in range(301)]
    assert lives > 2 * 300, "ids come back after their rows left"


def test_a_server_follows_a_trainer_and_sees_a_row_that_is_wrong(soak: dict[str, ModuleType], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path, truth = tmp_path / "ckpt", soak["soak_truth"].Truth(400)
    trainer = soak["soak_trainer"].Trainer(path, truth)
    assert "checkpoint" in trainer.save(full=True)
    with serving.open(path) as tables:
        server = soak["soak_server"].Server(tables, truth, seed=3)
        for save in range(1, 40):
            # The trainer ends now and then, and another one goes on from what it saved.
            trainer = soak["soak_trainer"].Trainer(path, truth) if save % 7 == 0 else trainer
            said = trainer.save(full=save % 10 == 0)
            assert tables.poll() == said["checkpoint"]
            server.request()
        report = server.report()
        assert (report.wrong, report.requests) == ([], 39)
        assert [step for _, step, _, _ in report.served] == [truth.save_every * save for save in range(2, 41)]
        assert len({name for name, _, _, _ in report.served}) == 39
        assert len(report.swapped) == 38
        assert report.versions == 2, "the one that is served, and the one that a rollback serves again"
        # One column of one row.
        item = trainer.table("item")
        row_id = int(truth.touched(trainer.step)[1])
        row = item.read_rows([row_id])
        weights = row.weights.clone()
        weights[0, 5] += 1.0
        item.import_rows([row_id], weights, metadata=row.metadata)
        Saver(0).save(trainer.model, path)
        assert tables.poll() is not None
        while not report.wrong:
            server.request()
            report = server.report()
        assert f"id {row_id}:" in report.wrong[0]
        assert torch.equal(tables.pin()["item"].lookup([row_id])[:], weights)


# ---- what the parent knows


def answer(name: str, step: int, last: float) -> dict[str, Any]:
    """A window in which a server answered from a checkpoint."""
    return {"process": 0, "served": [(name, step, last, last)], "refused": []}


def refusal(name: str, first: float) -> dict[str, Any]:
    """A window in which a server refused a checkpoint as too old."""
    return {"process": 0, "served": [], "refused": [(name, first)]}


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (answer("first", 4, 109.9), None),
        (answer("first", 8, 101.0), "answered from first at step 8: Checkpoint"),
        (answer("other", 4, 101.0), "answered from other at step 4: it was never published"),
        (answer("damaged", 8, 103.0), "damaged"),
        (answer("on it", 12, 105.0), "damaged"),
        (answer("mended", 16, 107.0), None),
        (answer("first", 4, 111.2), "at most 10 s are allowed"),
        (refusal("first", 110.1), None),
        (refusal("first", 109.0), "refused first as too old"),
        (refusal("other", 190.0), "it was never published"),
        (refusal("damaged", 190.0), "damaged"),
    ],
)
def test_the_parent_knows_what_may_be_served(
    soak: dict[str, ModuleType], window: dict[str, Any], said: str | None
) -> None:
    published = soak["soak_published"].Published(max_staleness=10)
    for number, name in enumerate(("first", "damaged", "on it", "mended")):
        begun = 100.0 + 2 * number
        published.add(soak["soak_published"].Checkpoint(name, 4 * (number + 1), begun, begun + 1))
    published.damage("damaged")
    published.damage("on it")
    problems = list(published.check([window]))
    assert bool(problems) == (said is not None)
    assert (said or "") in "".join(problems)


def test_a_trainer_starts_from_what_was_published_last(soak: dict[str, ModuleType]) -> None:
    published = soak["soak_published"].Published(max_staleness=10)
    published.check_restart(None, 0)
    for number, name in enumerate(("first", "second")):
        published.add(soak["soak_published"].Checkpoint(name, 4 * (number + 1), 0.0, 0.0))
    published.check_restart("second", 8)
    assert not published.problems
    for name, step in (("first", 4), ("second", 4), ("killed", 12), (None, 0)):
        published.check_restart(name, step)
    assert len(published.problems) == 4


def test_memory_that_grows_fails_the_run(soak: dict[str, ModuleType]) -> None:
    scale = dataclasses.replace(soak["serving_soak"].FULL, growth=1.5, growth_bytes=100)
    first = [{"process": number % 2, "own": 1000} for number in range(20)]
    for own, problems in ((1600, 0), (1601, 1)):
        second = [{"process": 0, "own": 1000}, {"process": 1, "own": own}] * 10
        said = list(soak["serving_soak"].grown([*first, *second], scale))
        assert len(said) == problems
    assert said[0].startswith("server 1 had 1000 bytes")
    moment = [{"process": 0, "own": 9000}]
    assert not list(soak["serving_soak"].grown([*first, *first, *moment], scale))
    figures = {"wrong": 0, "problems": 0, "requests": 1}
    assert soak["serving_soak"].is_right(figures)
    for worse in ({"wrong": 1}, {"problems": 1}, {"requests": 0}):
        assert not soak["serving_soak"].is_right(figures | worse)


# ---- the faults


def test_damage_is_in_one_weight_and_would_be_served_unverified(soak: dict[str, ModuleType], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path, truth = tmp_path / "ckpt", soak["soak_truth"].Truth(200)
    clock = soak["soak_truth"].CLOCK
    trainer = soak["soak_trainer"].Trainer(path, truth)
    trainer.save(full=True)
    checkpoint = path / str(trainer.save(full=False)["checkpoint"])
    before = {file: load(file.read_bytes()) for file in checkpoint.rglob("*.safetensors")}
    # Bytes are verified when a delta is opened, and not at each lookup. So this server answers what is damaged after that.
    with serving.open(path) as tables:
        server = soak["soak_server"].Server(tables, truth, seed=3)
        server.request()
        assert server.report().wrong == []
        soak["soak_faults"].change_weight(checkpoint, clock)
        server.request()
        assert f"at step {2 * truth.save_every}, id {clock}:" in server.report().wrong[0]
    changed = []
    for file, columns in before.items():
        after = load(file.read_bytes())
        assert columns.keys() == after.keys()
        for name, column in columns.items():
            places = torch.nonzero(column != after[name]).tolist()
            changed += [(file.parent.name.split("+")[0], name, int(columns["id"][place[0]])) for place in places]
    assert changed == [("item", "weight", clock)]


def test_two_servers_live_through_all_faults(soak: dict[str, ModuleType], tmp_path: Path) -> None:
    serving_soak, log = soak["serving_soak"], tmp_path / "log.jsonl"
    scale = dataclasses.replace(
        serving_soak.SMOKE,
        saves=10,
        save_seconds=0.0,
        window_seconds=0.2,
        ids=600,
        max_staleness_with_faults=2,
        disk_mib=24,
    )
    tmp_path.chmod(0o700)
    with soak["soak_faults"].small_disk(scale.disk_mib) as disk:
        path = (disk or tmp_path) / "faults"
        ran = serving_soak.run(path, scale, log, with_faults=True, disk=disk is not None)
    figures = serving_soak.found(ran)
    assert serving_soak.is_right(figures), figures
    happened = " ".join(what for _, what in ran.marks)
    assert happened.count("killed") == 4
    for what in ("LATEST", "damaged", "mended", "all refuse", "all answer", *(("a save failed",) if disk else ())):
        assert what in happened
    # Each server has seen the damaged delta and what built on it, has refused, and serves the newest one at last.
    for process in range(2):
        windows = [window for window in ran.windows if window["process"] == process]
        assert windows[-1]["failed_polls"] >= 6
        assert sum(window["stale"] for window in windows) > 0
        assert windows[-1]["version"] == ran.published.newest.name
    assert len(ran.published.damaged) == 3
    # A save that was killed is not among the published checkpoints, and each run of the trainer resumed from a published one.
    assert figures["saves"] + 1 == figures["failed_saves"] + len(ran.published.checkpoints)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line for line in lines if "process" in line] == json.loads(json.dumps(ran.windows))
    plot = soak["plots"].soak_plot(ran.windows, ran.marks)
    assert plot.count("another version</title>") == 3 * figures["swaps"]
    assert "all refuse" in plot
    # Had one of the checkpoints that were served not been published, the run would have failed.
    del ran.published.checkpoints[next(name for window in ran.windows for name, *_ in window["served"])]
    assert not serving_soak.is_right(serving_soak.found(ran))
