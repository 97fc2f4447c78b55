"""The learning rate and `max_gradient` after a load: a resumed run trains with the rates of an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from saver_cases import make_bag, root, rows
from torchrec_embcache import EmbCacheEmbeddingBag, Saver, initializers, optimizers
from torchrec_embcache.exceptions import ConfigError

__all__ = ["root"]  # the fixture

SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.75)],
        milestones=[2],
    ),
}


def make(**numbers: Any) -> EmbCacheEmbeddingBag:
    return make_bag(optimizer=optimizers.SGD(**{"lr": 0.5, **numbers}), initializer=initializers.Constant(0.0))


def group(bag: EmbCacheEmbeddingBag) -> dict[str, Any]:
    return bag.optimizer.param_groups[0]


def train(bag: EmbCacheEmbeddingBag, schedule: Any, steps: int) -> list[float]:
    """Do steps, and return the rates that they had."""
    rates = []
    for _ in range(steps):
        rates.append(group(bag)["lr"])
        bag(torch.tensor([[7]])).sum().mul(-1).backward()
        schedule.step()
    return rates


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_goes_on_where_it_was_stopped(kind: str, made: str, root: Path) -> None:
    straight = make()
    expected = train(straight, SCHEDULERS[kind](straight.optimizer), 7)
    stopped = make()
    schedule = SCHEDULERS[kind](stopped.optimizer)
    rates = train(stopped, schedule, 4)
    Saver(0).save(stopped, root)
    again = make()
    if made == "before":
        resumed = SCHEDULERS[kind](again.optimizer)
    Saver(0).load(again, root)
    assert group(again)["lr"] == group(stopped)["lr"]
    if made == "after":
        resumed = SCHEDULERS[kind](again.optimizer)
        # To make a scheduler sets the rate of its first step, as it does after torch's own load_state_dict.
        group(again)["lr"] = group(stopped)["lr"]
    resumed.load_state_dict(schedule.state_dict())
    assert rates + train(again, resumed, 3) == expected
    assert [values[:3] for values in rows(again).values()] == [values[:3] for values in rows(straight).values()]


def test_a_load_restores_the_rate_and_the_clamp_and_reports_them(root: Path) -> None:
    bag = make(max_gradient=4.0, weight_decay=0.25)
    bag(torch.tensor([[7]])).sum().backward()
    group(bag).update(lr=0.1 * 0.3, max_gradient=1.0)
    Saver(0).save(bag, root)
    other = make(max_gradient=2.0, weight_decay=0.5)
    report = Saver(0).load(other, root)
    assert report.hyperparameters == {"item": {"lr": 0.1 * 0.3, "max_gradient": 1.0}}
    assert {name: group(other)[name] for name in ("lr", "max_gradient", "weight_decay")} == {
        "lr": 0.1 * 0.3,
        "max_gradient": 1.0,
        "weight_decay": 0.5,
    }
    # A rate that is a tensor stays one, because a captured step reads it.
    rate = torch.tensor(9.0)
    tensor = make()
    group(tensor)["lr"] = rate
    Saver(0).load(tensor, root)
    assert group(tensor)["lr"] is rate
    assert float(rate) == pytest.approx(0.03)


def test_a_load_without_slots_leaves_the_rates(root: Path) -> None:
    bag = make(max_gradient=4.0)
    bag(torch.tensor([[7]])).sum().backward()
    Saver(0).save(bag, root)
    other = make(lr=0.125)
    assert Saver(0).load(other, root, slots=False).hyperparameters == {}
    assert group(other)["lr"] == 0.125
    assert "max_gradient" not in group(other)


def test_invalid_saved_rate_is_rejected_before_any_change(root: Path) -> None:
    bag = make()
    bag(torch.tensor([[7]])).sum().backward()
    group(bag)["lr"] = -1.0
    Saver(0).save(bag, root)
    other = make()
    other(torch.tensor([[8]])).sum().backward()
    before = rows(other)
    with pytest.raises(ConfigError, match=r"the checkpoint's table item\.lr=-1\.0"):
        Saver(0).load(other, root)
    assert rows(other) == before
    assert group(other)["lr"] == 0.5
