"""The soak of serving would see a wrong row: its truth is what a trainer makes, and its servers compare whole rows with it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from torchrec_embcache import Saver, serving

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the soak."""
    monkeypatch.syspath_prepend(str(BENCHES))
    names = ("soak_truth", "soak_trainer", "soak_server")
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
        assert report.steps == [truth.save_every * save for save in range(2, 41)]
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
