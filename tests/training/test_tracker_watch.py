"""Which objects a loop steps after its steps, and whether it has done so after the latest one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from gridtrain.training.tracker_watch import TrackerWatch

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # the optimizer takes no step here
MODEL = torch.nn.Linear(2, 1)


def trackers() -> dict[str, Any]:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    return {"rate": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "average": AveragedModel(MODEL)}


def follow(each: Any) -> None:
    each.update_parameters(MODEL) if isinstance(each, AveragedModel) else each.step()


def test_nothing_to_step_is_always_stepped() -> None:
    watch = TrackerWatch({})
    watch.record_step()
    assert watch.has_followed


@pytest.mark.parametrize("name", ["rate", "average"])
def test_what_a_loop_steps_after_each_step_is_awaited(name: str) -> None:
    tracked = trackers()
    watch = TrackerWatch(tracked)
    watch.record_step()
    follow(tracked[name])
    watch.record_turn()
    watch.record_step()
    assert not watch.has_followed
    follow(tracked[name])
    assert watch.has_followed, "the other object is not stepped by this loop"


def test_before_the_second_step_all_objects_are_awaited() -> None:
    tracked = trackers()
    watch = TrackerWatch(tracked)
    watch.record_step()
    follow(tracked["rate"])
    assert not watch.has_followed
    follow(tracked["average"])
    assert watch.has_followed
