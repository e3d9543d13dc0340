"""Workers of a pipeline that leave or are paused: no step is lost, and no residual.

2 stages x 1 worker each, bert is paused:      anna waits with the reason; bert rejoins: they go on,
                                               bit for bit as without the pause
... and clara is a standby:                    clara takes the stage, bert rejoins as a standby
2 stages x 2 workers each, dora leaves:        the stage's other worker sends dora's residual
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brisk import LOSING
from pipeline_group import DATA, Seen, Workers, loss_fn, pipeline_of, undisturbed

import gridtrain
from gridtrain.core.messages import CheckpointInfo
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_model_state import StageModelState
from gridtrain.runtime.client.agent_link import AgentDirective
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.checkpoint_store import checkpoint_step, list_checkpoints
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore

SPARSE = gridtrain.GTopK(density=0.2)
CUTS = (0, 2, 4)
"""Given where runs are compared: a sparse exchange selects in each stage, so its update depends on the
partition, which the coordinator would otherwise choose by the workers' measured speeds."""
REST = AgentDirective(run=False, reason="its owner said so")


def stage_1(disk: Path) -> Path:
    """The folder of checkpoints of the second of two stages, with four blocks."""
    (found,) = disk.glob("blocks-*-004")
    return found


class Leaves(Exception):
    """The script ends between two steps."""


@pytest.mark.parametrize("exchange", [gridtrain.Dense(), SPARSE], ids=["dense", "gtopk"])
@pytest.mark.parametrize(("stage", "every"), [(0, 100), (1, 0)])
def test_a_run_goes_on_where_it_was_after_a_stages_only_worker_is_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, exchange: Any, stage: int, every: int
) -> None:
    """Also without periodic checkpoints."""

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if seen.step == 6 and pipe.stage == stage:
            seen.owner.directive = REST

    def paused_worker() -> Seen | None:
        states = {
            s.name: s.owner.reported[-1]["state"] if s.owner.reported else "" for s in workers.seen.values()
        }
        return next((workers.seen[name] for name, state in states.items() if state == "paused"), None)

    run: dict[str, Any] = {"steps": 20, "exchange": exchange, "cuts": CUTS}
    with Workers(tmp_path / "paused", 2, checkpoint_every=every, **run) as workers:
        workers.after = after
        workers.add("anna", "bert")
        workers.wait(lambda: paused_worker() is not None and workers.status()["phase"] == "paused")
        status, seen = workers.status(), paused_worker()
        assert seen is not None
        reason = status["reason"]  # of which the start depends on whether the other one has a copy
        assert f"stage {stage} of 2 " in reason and "1 worker is present, but 2 are needed" in reason
        assert [line["name"] for line in status["resting"]] == [seen.name]
        assert (
            f"stage {stage} is held only by this worker: step 7 is on this worker's disk; unless another "
            "worker has this state, the others wait for this worker, or continue from earlier checkpoints"
        ) in caplog.messages
        assert "the other workers continue without this worker" not in caplog.text
        seen.owner.directive = AgentDirective()
        workers.finish("anna", "bert")
        assert not [e for e in workers.status()["events"] if "rollback" in str(e)]
    losses, model = undisturbed(tmp_path / "plain", **run)
    for one in workers.seen.values():
        assert one.losses == losses, "each step once, as without the pause"
    assert all(torch.equal(workers.assembled()[name], value) for name, value in model.items())


@pytest.mark.parametrize(
    ("is_in_step", "micro_batches"),
    [(False, 2), (False, "auto"), (True, 2)],
    ids=["after a step", "after a step, auto", "in a step"],
)
def test_a_run_goes_on_where_it_was_after_a_stages_only_worker_was_interrupted(
    tmp_path: Path, is_in_step: bool, micro_batches: int | str
) -> None:
    """Ctrl-C in the script, or sys.exit: the stage is saved as it was after the last committed step."""
    calls: list[int] = []

    def interrupted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if is_in_step and len(calls) == 14:  # the second micro-batch of the seventh step
            raise KeyboardInterrupt
        return loss_fn(outputs, targets)

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if not is_in_step and seen.step == 6 and pipe.stage == 1 and not interrupted:
            interrupted.append(seen.name)
            raise KeyboardInterrupt

    interrupted: list[str] = []
    run: dict[str, Any] = {"steps": 20, "cuts": CUTS, "micro_batches": micro_batches}
    with Workers(tmp_path / "left", 2, checkpoint_every=100, loss_fn=interrupted_loss, **run) as workers:
        workers.after = after
        workers.add("anna", "bert")
        workers.wait(lambda: any(seen.end for seen in workers.seen.values()), ("anna", "bert"))
        (name,) = (seen.name for seen in workers.seen.values() if seen.end)
        (other,) = {"anna", "bert"} - {name}
        workers.threads[name].join()
        assert isinstance(workers.seen[name].end, KeyboardInterrupt)
        stage = stage_1(tmp_path / "left" / name)
        assert [checkpoint_step(path) for path in list_checkpoints(stage)] == [6 if is_in_step else 7]
        workers.add(name)
        workers.finish("anna", "bert")
        assert not [e for e in workers.status()["events"] if "rollback" in str(e)]
    losses, model = undisturbed(tmp_path / "plain", **run)
    assert workers.seen[other].losses == losses, "each step once, as without the interruption"
    assert all(torch.equal(workers.assembled()[name], value) for name, value in model.items())


class StepCount:
    """A tracked object that is no scheduler: how often the script has taken a step."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize(
    ("where", "tracks_count", "is_saved"),
    [
        ("while the update is recorded", False, False),
        ("before the scheduler's step", False, False),
        ("after the scheduler's step", False, True),
        ("after the scheduler's step", True, False),
        ("with the next batch", True, True),
        ("after a scheduler's step with the next batch", False, False),
    ],
)
def test_a_stage_is_saved_only_if_what_the_script_tracks_belongs_to_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, tracks_count: bool, is_saved: bool
) -> None:
    """The script of a stage's only worker is interrupted around its seventh step.  A count, unlike a
    scheduler, does not show whether the script has changed it since the update."""
    schedulers: dict[str, torch.optim.lr_scheduler.LRScheduler] = {}
    rates: dict[int, float] = {}
    ended: list[str] = []

    def interrupt(seen: Seen, here: str) -> None:
        if here == where and seen.name == "bert" and not ended:
            ended.append(here)
            raise KeyboardInterrupt

    def made(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        count, step, record = StepCount(), pipe.step, pipe._update_micro_batches
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        schedulers[seen.name] = scheduler
        grid.track(scheduler=scheduler, **({"count": count} if tracks_count else {}))

        def recorded(*args: Any) -> None:
            record(*args)
            if grid.step == 7:
                interrupt(seen, "while the update is recorded")

        def stepped(*batch: Any) -> float | None:
            if seen.name == "bert":
                rates[grid.step] = pipe.optimizer.param_groups[0]["lr"]
            loss = step(*batch)
            if grid.step == 7:
                interrupt(seen, "before the scheduler's step")
            scheduler.step()
            count.steps += 1
            if grid.step == 7:
                interrupt(seen, "after the scheduler's step")
            return loss

        monkeypatch.setattr(pipe, "_update_micro_batches", recorded)
        monkeypatch.setattr(pipe, "step", stepped)

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if grid.step == 7 and seen.name == "bert" and not ended:
            interrupt(seen, "with the next batch")
            schedulers[seen.name].step()  # none of the other cases gets here
            interrupt(seen, "after a scheduler's step with the next batch")

    with Workers(tmp_path, 2, checkpoint_every=100, steps=12, cuts=CUTS) as workers:
        workers.made, workers.before = made, before
        workers.add("anna", "bert")
        workers.join("bert")
        assert isinstance(workers.seen["bert"].end, KeyboardInterrupt) and ended == [where]
        saved = [checkpoint_step(path) for path in (tmp_path / "bert").glob("blocks-*/step-*")]
        assert saved == ([7] if is_saved else [])
        if is_saved:
            workers.add("bert")
            workers.finish("anna", "bert")
            assert rates == {step: pytest.approx(0.05 * 0.9**step) for step in range(12)}


def test_a_worker_that_waits_in_a_step_of_a_pipeline_obeys_its_owner(tmp_path: Path) -> None:
    """One is paused; the other has its batch already, and waits in `pipe.step` when its owner pauses it, too.
    Its stage is then on its disk, as is the scheduler, which the script steps after the failed step."""
    rates: dict[str, dict[int, float]] = {"anna": {}, "bert": {}}

    def made(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)
        grid.track(scheduler=scheduler)
        step = pipe.step

        def stepped(*batch: Any) -> float | None:
            rates[seen.name][grid.step] = pipe.optimizer.param_groups[0]["lr"]
            loss = step(*batch)
            scheduler.step()
            return loss

        pipe.step = stepped  # type: ignore[method-assign]

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if pipe.stage == 0 and grid.step == 7 and not seen.more:
            seen.more[7] = "its batch is here"
            workers.wait(lambda: is_paused(1))

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if seen.step == 6 and pipe.stage == 1:
            seen.owner.directive = REST

    def at(stage: int) -> Seen:
        return next(seen for seen in workers.seen.values() if seen.stages.get(6) == stage)

    def is_paused(stage: int) -> bool:
        return any(
            s.stages.get(6) == stage and s.owner.reported[-1]["state"] == "paused"
            for s in workers.seen.values()
        )

    run: dict[str, Any] = {"steps": 20, "exchange": SPARSE, "cuts": CUTS}
    with Workers(tmp_path / "paused", 2, checkpoint_every=100, **run) as workers:
        workers.group._deadlines = replace(LOSING, handover_s=0.2)  # no worker can receive a residual
        workers.made, workers.before, workers.after = made, before, after
        workers.add("anna", "bert")
        workers.wait(lambda: is_paused(1) and workers.status()["phase"] == "paused")
        at(0).owner.directive = REST
        workers.wait(lambda: is_paused(0))
        (stage_0,) = (tmp_path / "paused" / at(0).name).glob("blocks-000-*")
        assert [checkpoint_step(path) for path in list_checkpoints(stage_0)] == [7]
        assert {line["name"] for line in workers.status()["resting"]} == {"anna", "bert"}
        for seen in workers.seen.values():
            seen.owner.directive = AgentDirective()
        workers.finish("anna", "bert")
        assert not [e for e in workers.status()["events"] if "rollback" in str(e)]
    plain = {name: dict(seen.losses) for name, seen in workers.seen.items()}
    with Workers(tmp_path / "plain", 2, **run) as undisturbed:
        rates_before = {name: dict(seen) for name, seen in rates.items()}
        undisturbed.made = made
        undisturbed.add("anna", "bert")
        undisturbed.finish("anna", "bert")
    assert plain["anna"] == plain["bert"] == undisturbed.seen["anna"].losses, "each step once"
    assert rates_before == rates, "as without the pauses"
    model = undisturbed.assembled()
    assert all(torch.equal(workers.assembled()[name], value) for name, value in model.items())


@pytest.mark.parametrize("way", ["fails", "leaves the loop"])
def test_a_worker_of_a_local_group_saves_nothing_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """No later worker could read it, because each group has a coordinator's key of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    have_batch = threading.Barrier(2)

    def train(grid: gridtrain.Grid) -> int:
        pipe = pipeline_of(grid)
        for batch in grid.batches(DATA, batch_size=4, steps=6):
            if grid.step == 3:
                have_batch.wait(60)  # otherwise one may leave before the other one's step has begun
                if way == "leaves the loop":
                    break
                if pipe.stage == 1:
                    raise Leaves
            pipe.step(*batch)
        return grid.step

    if way == "fails":
        with pytest.raises(Leaves):
            gridtrain.local(train, workers=2)
    else:
        assert gridtrain.local(train, workers=2) == [3, 3]
    assert not list(tmp_path.iterdir())
    assert "on this worker's disk" not in caplog.text and "without a checkpoint" not in caplog.text


def test_a_standby_takes_the_stage_of_a_paused_worker(tmp_path: Path) -> None:
    """Only copies of its stage remain: the run goes back to the latest step that all stages have."""
    resting: list[Seen] = []

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if seen.step == 12 and pipe.stage == 1 and not resting:
            resting.append(seen)
            seen.owner.directive = REST

    with Workers(tmp_path, 2, steps=30, checkpoint_every=5) as workers:
        workers.after = after
        workers.add("anna", "bert", "clara")
        workers.wait(lambda: bool(resting) and bool(resting[0].owner.reported))
        others = [seen for seen in workers.seen.values() if seen is not resting[0]]
        workers.wait(lambda: all(seen.step >= 20 for seen in others))
        resting[0].owner.directive = AgentDirective()
        workers.finish("anna", "bert", "clara")
    one, other = others
    common = one.losses.keys() & other.losses.keys()
    assert common >= set(range(15, 30)) and all(one.losses[step] == other.losses[step] for step in common)
    assert one.step == other.step == 29


@pytest.mark.parametrize("way", ["leaves", "is paused"])
def test_the_replica_of_a_leaving_worker_sends_its_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Five workers, one of them a standby, which takes the rank, so that no other worker changes its rank."""
    absorbed: dict[int | None, np.ndarray] = {}
    residuals: list[np.ndarray] = []
    leaver: list[Seen] = []
    real = StageModelState._add_residual

    def absorb(self: StageModelState, name: str, entries: Any) -> None:
        assert self._held.residual is not None
        dense_N = np.zeros(self._held.residual.size, np.float32)
        dense_N[entries.indices] = entries.values
        absorbed[self._held.stage] = dense_N
        real(self, name, entries)

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        with workers.changed:
            if grid.step == 6 and pipe.stage == 1 and not leaver:
                leaver.append(seen)
                residuals.append(pipe.held.in_memory().residual.state()["residual"].numpy().copy())
                if way == "leaves":
                    raise Leaves

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if way == "is paused" and [seen] == leaver and seen.step == 6:
            residuals[:] = [pipe.held.in_memory().residual.state()["residual"].numpy().copy()]
            seen.owner.directive = REST

    monkeypatch.setattr(StageModelState, "_add_residual", absorb)
    with Workers(tmp_path, 5, steps=15, exchange=SPARSE) as workers:
        workers.before, workers.after = before, after
        workers.add("anna", "bert", "clara", "dora", "emil")
        workers.wait(lambda: bool(leaver))
        others = [seen for seen in workers.seen.values() if seen not in leaver]
        workers.wait(lambda: all(seen.step >= 10 or not seen.losses for seen in others))
        leaver[0].owner.directive = AgentDirective()
        workers.finish(*(seen.name for seen in others))
    assert residuals[0].any() and set(absorbed) == {1}
    np.testing.assert_array_equal(absorbed[1], residuals[0])
    ends = [seen for seen in others if seen.stages.get(14) == 1]
    assert len(ends) == 2 and all(
        torch.equal(value, ends[1].state[name]) for name, value in ends[0].state.items()
    )


def test_a_residual_that_is_lost_with_a_change_of_stage_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both of stage 0 die: one of stage 1 is needed stored, and its residual of stage 1 is lost."""
    figures: dict[str, dict[str, float]] = {}
    killed: list[str] = []

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        figures[seen.name] = dict(grid._session.connection.loop.heartbeat.figures)
        if seen.step == 12 and not killed and all(s.step >= 11 for s in workers.seen.values()):
            killed.extend(name for name, other in workers.seen.items() if other.stages[11] == 0)
            for name in killed:
                workers.kill(name)

    with Workers(tmp_path, 4, steps=25, checkpoint_every=5, exchange=SPARSE) as workers:
        workers.after = after
        workers.add("anna", "bert", "clara", "dora")
        workers.wait(lambda: len(killed) == 2, dead=killed)
        survivors = [seen for seen in workers.seen.values() if seen.name not in killed]
        workers.finish(*(seen.name for seen in survivors))
    (moved,) = [seen for seen in survivors if seen.stages[24] == 0]
    assert figures[moved.name]["lost_mass"] > 0
    assert (
        "the residual, of magnitude" in caplog.text
        and "lost, because this worker now holds another stage" in caplog.text
    )


def test_a_checkpoint_at_a_pause_does_not_replace_a_common_one(tmp_path: Path) -> None:
    """Only checkpoints of steps that all stages have are useful after a death; others replace each other."""
    pauses: list[int] = []
    stored: list[list[int]] = []

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if pipe.stage == 1 and seen.step in (12, 13, 14) and seen.step not in pauses:
            pauses.append(seen.step)
            seen.owner.directive = REST

    with Workers(tmp_path, 2, steps=22, checkpoint_every=5) as workers:
        workers.after = after
        workers.add("anna", "bert")
        for count in (1, 2, 3):
            workers.wait(
                lambda count=count: (
                    len(pauses) == count
                    and any(
                        s.owner.reported and s.owner.reported[-1]["state"] == "paused"
                        for s in workers.seen.values()
                    )
                )
            )
            (seen,) = [s for s in workers.seen.values() if s.stages[5] == 1]
            stored.append([checkpoint_step(path) for path in list_checkpoints(stage_1(tmp_path / seen.name))])
            seen.owner.directive = AgentDirective()
            workers.wait(lambda seen=seen, count=count: seen.step > 11 + count or seen.end is not None)
        workers.finish("anna", "bert")
        stored.append([checkpoint_step(path) for path in list_checkpoints(stage_1(tmp_path / seen.name))])
    assert stored[:2] == [[5, 10, 13], [5, 10, 14]], "step 10 stays until all have 15"
    assert stored[2:] == [[5, 10, 15], [20, 22]], "all have step 15, and 22 is the last"
    assert list(workers.seen["anna"].losses) == list(range(22))


def test_a_residual_that_stays_with_its_worker_is_read_back_at_the_same_step(tmp_path: Path) -> None:
    """Two workers, no replica: bert's script ends with a residual, its stage is on its disk; its next process
    goes on with both, as if the script had not ended."""

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if seen.step == 6 and seen.name == "bert" and not seen.owner.directive.stop:
            seen.owner.directive = AgentDirective(stop=True)

    run: dict[str, Any] = {"steps": 16, "exchange": SPARSE, "cuts": CUTS}
    with Workers(tmp_path / "ended", 2, checkpoint_every=100, **run) as workers:
        workers.before = before
        workers.add("anna", "bert")
        workers.finish("bert")
        first = workers.seen["bert"]
        assert first.step < 15
        left = next((tmp_path / "ended" / "bert").glob("blocks-*/left/note.json"))
        assert json.loads(left.read_text())["applied"] == first.step
        workers.before = lambda seen, grid, pipe: None
        workers.add("bert")
        workers.finish("anna", "bert")
        assert not left.exists(), "it cannot be read twice"
    losses, model = undisturbed(tmp_path / "plain", **run)
    assert first.losses | workers.seen["bert"].losses == workers.seen["anna"].losses == losses
    assert all(torch.equal(workers.assembled()[name], value) for name, value in model.items())


def test_a_source_that_sends_a_false_state_is_removed_and_no_worker_trains_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bert, which trained stage 1, dies; anna has a copy and sends clara something else under its name."""
    victims: list[str] = []

    def load_changed(self: StageCheckpointStore, info: CheckpointInfo) -> Any:
        found = self.load(info)
        tensors = {
            name: value + 1 if value.is_floating_point() else value for name, value in found.tensors.items()
        }
        return serialization.frame_state(found.document, tensors)

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        copied = list(tmp_path.glob("*/blocks-*-004/step-*"))
        if seen.step > 10 and len({path.parent.parent for path in copied}) == 2 and not victims:
            victims.extend(s.name for s in workers.seen.values() if s.stages[5] == 1)
            workers.kill(victims[0])

    monkeypatch.setattr(StageCheckpointStore, "read_for_peer", load_changed)
    with Workers(tmp_path, 2, steps=10_000, checkpoint_every=5) as workers:
        workers.after = after
        workers.add("anna", "bert")
        workers.wait(lambda: bool(victims), dead=["anna", "bert"])
        (liar,) = {"anna", "bert"} - set(victims)
        workers.add("clara")
        workers.join(liar)
    assert "sent a state that does not belong to this stage" in str(workers.seen[liar].end)
    assert "has the digest" in str(workers.seen[liar].end)
    assert workers.seen["clara"].losses == {}, "no step from false weights"
