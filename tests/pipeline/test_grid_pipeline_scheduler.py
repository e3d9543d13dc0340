"""`pipe.optimizer` is one object: a scheduler made with it continues when its worker changes its stage."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from pipeline_group import Seen, Workers, layers, loss_fn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_optimizer import StageOptimizer
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.checkpoint.joint_optimizer import as_one

RATE, DECAY = 0.05, 0.9


def sgd(*sizes: int, lr: Any = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(n))]} for n in sizes], lr=lr)


def test_a_scheduler_continues_with_the_next_stage() -> None:
    handle = StageOptimizer(sgd(3))
    scheduler = OneCycleLR(handle, max_lr=1.0, total_steps=10)
    alone = OneCycleLR(plain := sgd(3), max_lr=1.0, total_steps=10)
    for step in range(9):
        if step == 4:
            before = handle.inner
            handle.set_inner(sgd(5))
            assert handle.inner is not before and handle.param_groups[0]["params"][0].shape == (5,)
        handle.apply()
        plain.step()
        scheduler.step()
        alone.step()
        mine, theirs = (
            {k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (handle, plain)
        )
        assert mine == theirs, "learning rate, momentum, all settings that the scheduler changes"


def test_a_learning_rate_tensor_is_not_shared_by_stages() -> None:
    first, second = sgd(3, lr=torch.tensor(0.1)), sgd(5, lr=torch.tensor(0.7))
    handle = StageOptimizer(first)
    handle.set_inner(second)
    second.param_groups[0]["lr"].fill_(0.5)
    assert float(first.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_misuse_of_the_handle_is_refused() -> None:
    handle = StageOptimizer(sgd(3, 2))
    with pytest.raises(ConfigError, match=r"pipe\.optimizer\.step\(\) was called"):
        handle.step()
    with pytest.raises(ConfigError, match="parameter group was added"):
        handle.add_param_group({"params": []})
    handle.set_inner(sgd(3))  # no scheduler exists: other groups are accepted
    LambdaLR(handle, lambda step: 1.0)
    with pytest.raises(
        ConfigError, match=r"scheduler was made for SGD with 1 parameter group, .* has SGD with 2"
    ):
        handle.set_inner(sgd(3, 2))


def grouped(*shapes: tuple[int, ...]) -> torch.optim.SGD:
    """Groups with weight decay for matrices and without for vectors; empty groups are left out."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    decays = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3}
    groups = [decays, {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def listed(*shapes: tuple[int, ...]) -> torch.optim.Optimizer:
    """SGD for matrices and AdamW for the rest; an optimizer without parameters is left out."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    groups = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    kinds = torch.optim.SGD, torch.optim.AdamW
    made = [kind(group, lr=0.1) for kind, group in zip(kinds, groups, strict=True) if group]
    optimizer: torch.optim.Optimizer = as_one(made)
    return optimizer


def test_settings_are_not_loaded_into_another_optimizer() -> None:
    handle = StageOptimizer(listed((2, 2)))
    handle.set_inner(listed((2,)))  # unchanged settings: any optimizer is accepted
    handle.set_inner(listed((2, 2)))
    handle.param_groups[0]["lr"] = 0.5
    for other, text in (
        (listed((2,)), "AdamW with 1 parameter group"),
        (listed((2, 2), (2,)), "SGD with 1 parameter group and AdamW with 1 parameter group"),
    ):
        with pytest.raises(ConfigError) as refusal:
            handle.set_inner(other)
        assert str(refusal.value).startswith(
            "the script has changed settings of SGD with 1 parameter group, but the stage that this worker "
            f"now holds has {text} -> create the same optimizers and groups for every stage"
        )


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def test_a_stage_with_other_groups_has_its_initial_settings() -> None:
    handle = StageOptimizer(grouped((2, 2), (2,)))
    handle.set_inner(grouped((2,)))  # only of norms
    assert decays(handle) == [0.0]
    handle.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        ConfigError, match=r"the script has changed settings of SGD with 1 parameter group, .* has SGD with 2"
    ):
        handle.set_inner(grouped((2, 2), (2,)))


def test_a_changed_setting_applies_to_every_later_stage() -> None:
    whole = sgd(3)
    handle = StageOptimizer(whole)
    handle.param_groups[0]["lr"] = 0.5
    for size in (4, 5, 6):
        handle.set_inner(sgd(size))
        assert handle.param_groups[0]["lr"] == 0.5
        handle.set_inner(whole)  # no reference to a stage is stored


def test_a_run_that_starts_over_has_its_initial_rate_and_scheduler() -> None:
    from types import SimpleNamespace

    from gridtrain.pipeline.blueprint import Blueprint
    from gridtrain.pipeline.model_stages import ModelStages

    options = PipelineOptions(stages=2, micro_batches=1, exchange=gridtrain.Dense(), loss=loss_fn)
    session = SimpleNamespace(
        snapshot=WorkerSnapshot(rank=0, world_size=2),
        tasks=SimpleNamespace(resize_residual=lambda n: None),
        increase_figure=None,
    )
    staging = ModelStages(Blueprint(layers), 2, cuts=None, device=torch.device("cpu"))
    pipe = Pipeline(staging, lambda p: torch.optim.SGD(p, lr=RATE), options, session)  # type: ignore[arg-type]
    scheduler = LambdaLR(pipe.optimizer, lambda step: DECAY**step)
    pipe.track(scheduler=scheduler)
    assert len(list(pipe.module.parameters())) > 0
    for _ in range(3):
        pipe.optimizer.apply()  # type: ignore[attr-defined]
        scheduler.step()
    assert pipe.optimizer.param_groups[0]["lr"] == pytest.approx(RATE * DECAY**3)
    pipe.held.restart()
    assert pipe.optimizer.param_groups[0]["lr"] == RATE and scheduler.last_epoch == 0


def test_all_workers_have_the_rate_of_the_step_after_a_change_of_stage(tmp_path: Path) -> None:
    """2 stages x 2 replicas; both of stage 0 die: one of stage 1 continues it from the copies on its disk.

    stage 0   anna  bert          dead         clara
    stage 1   clara dora   -->    clara dora   dora
    """
    schedulers: dict[str, LambdaLR] = {}
    handles: dict[str, Any] = {}
    killed = threading.Event()

    def made(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        handles[seen.name] = pipe.optimizer
        schedulers[seen.name] = LambdaLR(pipe.optimizer, lambda step: DECAY**step)
        grid.track(scheduler=schedulers[seen.name])

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        seen.more[seen.step] = (
            handles[seen.name].param_groups[0]["lr"],
            handles[seen.name] is pipe.optimizer,
        )
        schedulers[seen.name].step()
        if seen.step == 12 and not killed.is_set() and all(s.step >= 11 for s in workers.seen.values()):
            killed.set()
            for name, other in workers.seen.items():
                if other.stages[11] == 0:
                    workers.kill(name)

    with Workers(tmp_path, 4, steps=30, checkpoint_every=5) as workers:
        workers.made, workers.after = made, after
        workers.add("anna", "bert", "clara", "dora")
        assert killed.wait(WITHIN_S)
        survivors = [seen for seen in workers.seen.values() if seen.stages.get(5) == 1]
        workers.finish(*(seen.name for seen in survivors))
    assert sorted(str(seen.stages[29]) for seen in survivors) == ["0", "1"], "one has changed its stage"
    for seen in survivors:
        assert seen.step == 29
        for step, (rate, same) in seen.more.items():
            assert same and rate == pytest.approx(RATE * DECAY**step), f"{seen.name} at step {step}"
    one, other = survivors
    assert one.losses == other.losses and len(one.losses) == 30
