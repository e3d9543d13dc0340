"""A leaving worker transfers its residual: no part of a gradient is lost, and none counts twice.

All numbers are integers over a power of two, so that every sum is exact.

worker-0   residual a ........................ a + b, from the next step on .... the end
worker-1   residual b, leaves --HandOver(b)---^
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from brisk import BRISK, WITHIN_S
from torch import nn
from training_loop import sgd

import gridtrain
from gridtrain.core.messages import ResidualBlock
from gridtrain.errors import VERSION, GridtrainError, JoinRefused, RunPaused
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer
from gridtrain.runtime.state_transfer import residual_pieces
from gridtrain.training import residual_departure
from gridtrain.training.model_state import ModelState, ModelStateOptions
from gridtrain.training.worker_residual import WorkerResidual

SIZE, WIDE, STEPS, LEAVES = 64, 32, 24, 9
DATA = [
    torch.randint(-8, 9, (WIDE,), generator=torch.Generator().manual_seed(i)).float() for i in range(SIZE)
]
QUICK = replace(BRISK, handover_s=15.0, regreet_s=0.1)
EXCHANGES = [
    gridtrain.TopK(density=0.1, values="fp32"),
    gridtrain.GTopK(density=0.1, values="fp32"),
    gridtrain.GTopK(density=0.1, momentum=0.5, values="fp32"),
    gridtrain.Dense(values="int8"),
]


class Totals:
    """Sums over the run, by worker: of contributions, and of applied updates."""

    def __init__(self) -> None:
        self.contributed: dict[int, np.ndarray] = {}
        self.applied: dict[int, np.ndarray] = {}
        self.residuals: dict[int, np.ndarray] = {}
        self.commits: Counter[int] = Counter()

    def watch(self, optimizer: gridtrain.GridOptimizer, number: int) -> None:
        feedback = optimizer._exchanger.feedback
        prepare, commit = feedback.prepare, optimizer._exchanger.commit
        prepare_bucket = optimizer._exchanger.prepare_bucket
        self.contributed[number], self.applied[number] = np.zeros(WIDE), np.zeros(WIDE)
        latest: dict[str, Any] = {}

        def prepare_dense(bucket: int, gradient_N: torch.Tensor, plan: Any, *, usable: bool) -> Any:
            latest["added"] = (gradient_N * (plan.weight if plan.samples else 0.0)).double().numpy()
            return prepare_bucket(bucket, gradient_N, plan, usable=usable)

        def prepare_sparse(gradient_N: torch.Tensor, *rest: Any, weight: float, **others: Any) -> Any:
            prepared = prepare(gradient_N, *rest, weight=weight, **others)
            contribution_N = gradient_N * weight if weight else torch.zeros_like(gradient_N)
            added_N = contribution_N if prepared.new_u_N is None else feedback.u_N * 0.5 + contribution_N
            latest["added"] = added_N.double().numpy().copy()
            return prepared

        def commit_counted(attempt: Any) -> Any:
            update = commit(attempt)
            self.contributed[number] += latest["added"]
            self.commits[number] += 1
            if isinstance(update, np.ndarray):
                self.applied[number] += update
            else:
                np.add.at(self.applied[number], update.indices, update.values)
            return update

        if isinstance(optimizer.exchange_config, gridtrain.Dense):
            optimizer._exchanger.prepare_bucket = prepare_dense
        feedback.prepare, optimizer._exchanger.commit = prepare_sparse, commit_counted

    def open_sum(self) -> np.ndarray:
        """What was contributed and is neither applied nor in a remaining worker's residual."""
        applied_N = self.applied[next(iter(self.residuals))]
        return sum(self.contributed.values()) - applied_N - sum(self.residuals.values())


def training(totals: Totals, exchange: Any, stop: Any) -> Any:
    def train(grid: gridtrain.Grid, number: int) -> int:
        model = nn.Linear(WIDE, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = sgd(grid, model, exchange, lr=2.0**-10)
        totals.watch(optimizer, number)
        for batch in grid.batches(DATA, global_batch_size=4, steps=STEPS):
            optimizer.zero_grad()
            if isinstance(exchange, gridtrain.Dense):  # values with more bits than int8 has
                batch = batch + batch.flip(-1) / 1024
            model(batch).mean().backward()
            chosen = stop.get(number) if isinstance(stop, dict) else stop if number == 1 else None
            if chosen is not None and grid.step == LEAVES and chosen(grid, optimizer):
                break
            if number == 0 and grid.step == LEAVES and stop is while_the_other_computes:
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 1, WITHIN_S)
            optimizer.step()
        if grid.finished:
            totals.residuals[number] = optimizer.residual.state()["residual"].double().numpy()
        return grid.step

    return train


def before_the_step(grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer) -> bool:
    return True


def while_the_other_computes(grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer) -> bool:
    """Ctrl-C after this worker has submitted its part, while the other one computes for long."""
    return in_the_middle_of_a_round(grid, optimizer, committed=False)


def in_the_middle_of_a_round(
    grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer, *, committed: bool = True
) -> bool:
    """Ctrl-C after the commit of the round, before the training thread has the outcome."""
    driver = grid._session.connection.loop
    wait = driver.mailbox.wait

    def interrupted(*args: Any) -> Any:
        latest = driver.step_rounds.last_submitted
        if latest is not None and latest.id.step == LEAVES:
            driver.mailbox.wait = wait
            if committed:
                wait(lambda _: latest.outcome is not None, WITHIN_S)
            raise KeyboardInterrupt
        return wait(*args)

    driver.mailbox.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    return True


@pytest.mark.parametrize("stop", [before_the_step, in_the_middle_of_a_round, while_the_other_computes])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
def test_no_part_of_a_gradient_is_lost_or_counts_twice(
    new_group: Any, exchange: Any, stop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    totals = Totals()
    with new_group(workers=2, deadlines=QUICK) as group:
        group.start_all(training(totals, exchange, stop))
        ended = [group.result(number) for number in range(2)]
    assert ended[0] == STEPS, ended
    assert ended[1] == LEAVES, "no update of the interrupted step is in its parameters"
    assert totals.commits[1] == LEAVES + (stop is in_the_middle_of_a_round), "the interrupted step, too"
    assert np.abs(totals.contributed[1]).sum() > 0
    # A dense exchange sends the whole residual, and rounds nothing once its worker is alone.
    assert (np.abs(totals.residuals[0]).sum() > 0) == exchange.sparse
    if getattr(exchange, "momentum", 0.0):  # powers of it have too many bits for float32
        assert np.abs(totals.open_sum()).max() < 2.0**-18
    else:
        assert not totals.open_sum().any(), "to the last bit"
    transferred = [r.message for r in caplog.records if "%) transferred: " in r.message]
    (sent,) = transferred
    assert "(100.0 %) transferred: " in sent and sent.endswith(" entries to worker-0"), caplog.text
    (added,) = (r.message for r in caplog.records if "added to this worker's" in r.message)
    assert added.startswith("the residual of worker-1, ")


def test_a_recipient_that_leaves_early_passes_the_residual_on(
    new_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """worker-1 --b--> its recipient, which leaves at once --b + its own--> the last worker"""
    totals, recipient_known, recipient = Totals(), threading.Event(), []
    take = residual_pieces.IncomingResiduals.receive_piece

    def receive(self: residual_pieces.IncomingResiduals, *args: Any) -> bool:
        whole = take(self, *args)
        if whole:
            recipient.append(self)
            recipient_known.set()
        return whole

    monkeypatch.setattr(residual_pieces.IncomingResiduals, "receive_piece", receive)

    def recipient_leaves(grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer) -> bool:
        return (
            recipient_known.wait(WITHIN_S)
            and grid._session.connection.loop.residuals.incoming is recipient[0]
        )

    stops = {0: recipient_leaves, 1: before_the_step, 2: recipient_leaves}
    with new_group(workers=3, deadlines=replace(QUICK, settle_s=0.3)) as group:
        group.start_all(training(totals, EXCHANGES[0], stops))
        ended = [group.result(number) for number in range(3)]
    assert sorted(ended) == [LEAVES, LEAVES, STEPS] and ended[1] == LEAVES
    assert np.abs(totals.open_sum()).max() < 2.0**-18, "except for rounded thirds: shares may be 3 and 1"
    passed_on = sum("is passed on together with this worker's" in record.message for record in caplog.records)
    added = sum("added to this worker's" in record.message for record in caplog.records)
    assert (passed_on, added) in ((1, 1), (0, 2)), "0, 2: the view arrived first, so it counted already"


def test_a_recipient_that_leaves_without_a_view_reports_the_loss(
    new_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipient = residual_pieces.IncomingResiduals()
    recipient.n = WIDE
    payload = residual_pieces.select_entries(np.full(WIDE, 0.5, np.float32), 1 << 20, 2).payload

    def stop(grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer) -> bool:
        recipient.receive_piece(b"p" * 32, ResidualBlock(1, 1, 0, b"", 0, 1, payload), 2)
        grid._session.connection.loop.residuals.incoming = (
            recipient  # acknowledged, and then the leaving worker is lost
        )
        return True

    with new_group(workers=2, deadlines=replace(QUICK, handover_s=0.5)) as group:
        group.start_all(training(Totals(), EXCHANGES[0], stop))
        group.result(1)
        assert f"magnitude {WIDE / 2:.3g} of other workers' residuals is lost" in caplog.text
        group.result(0)


def test_a_small_budget_transfers_the_largest_entries_and_reports_the_rest(
    new_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = []
    choose = residual_pieces.select_entries
    monkeypatch.setattr(
        residual_pieces, "select_entries", lambda r, _, p: chosen.append(choose(r, 60, p)) or chosen[0]
    )
    totals = Totals()
    with new_group(workers=2, deadlines=QUICK) as group:
        group.start_all(training(totals, EXCHANGES[0], before_the_step))
        assert group.result(0) == STEPS
    assert np.array_equal(totals.open_sum(), chosen[0].remainder_N), "the reported part is missing"
    assert 0 < chosen[0].magnitude_sum < chosen[0].total_magnitude_sum
    assert (
        f"({100 * chosen[0].magnitude_sum / chosen[0].total_magnitude_sum:.1f} %) transferred: "
        in caplog.text
    )


@pytest.mark.parametrize("kind", ["ResidualBlock", "ResidualReply"])
def test_a_recipient_that_does_not_answer_costs_the_deadline_and_is_reported(
    new_group: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A sent residual may have arrived, so it is not stored either: lost, or added once, never twice."""
    totals = Totals()
    with new_group(workers=2, deadlines=replace(QUICK, handover_s=1.0)) as group:
        group.hub.drop(kind)
        group.start_all(training(totals, EXCHANGES[0], before_the_step))
        assert group.result(0) == STEPS
    assert bool(totals.open_sum().any()) == (kind == "ResidualBlock"), "a lost reply changes nothing"
    assert "transferred: no answer within" in caplog.text


def test_the_time_for_the_selection_is_not_the_recipients(
    new_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large residual takes a minute to sort."""
    passed_s, choose, now_s = [0.0], residual_pieces.select_entries, time.monotonic

    def slowly(*args: Any) -> residual_pieces.ResidualSelection:
        passed_s[0] += 60.0
        return choose(*args)

    monkeypatch.setattr(residual_pieces, "select_entries", slowly)
    monkeypatch.setattr(residual_departure, "time", SimpleNamespace(monotonic=lambda: now_s() + passed_s[0]))
    totals = Totals()
    with new_group(workers=2, deadlines=QUICK) as group:
        group.start_all(training(totals, EXCHANGES[0], before_the_step))
        assert group.result(0) == STEPS
    assert "(100.0 %) transferred: " in caplog.text and not totals.open_sum().any()


def test_workers_that_leave_at_once_do_not_wait_long(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    meet = threading.Barrier(2)

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Linear(WIDE, 1, bias=False)
        optimizer = sgd(grid, model, EXCHANGES[0], lr=2.0**-10)
        for batch in grid.batches(DATA, global_batch_size=4, steps=STEPS):
            optimizer.zero_grad()
            model(batch).mean().backward()
            if grid.step == LEAVES:
                meet.wait(WITHIN_S)
                return
            optimizer.step()

    with new_group(workers=2, deadlines=QUICK) as group:
        group.start_all(train)
        assert [group.result(number) for number in range(2)] == [None, None]


def test_the_exit_of_a_forked_child_does_not_affect_the_run(
    new_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy of the grid has no I/O loop, but its parent's residual and disk."""

    def train(grid: gridtrain.Grid, number: int) -> int:
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, lr=0.1)
        for inputs in grid.batches(list(torch.ones(8, 2)), batch_size=2, steps=4):
            if grid.step == 2:
                with monkeypatch.context() as child:
                    child.setattr(os, "getpid", lambda: 1)
                    grid.close()
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return grid.step

    with new_group(workers=1) as group:
        assert group.result(group.start(train)) == 4


# -- residuals on disk ---------------------------------------------------------------------------------

FACTS = (("model", "tiny"), ("exchange", "TopK"))
LEFT = residual_departure.LeftResidual(7, b"seven", np.array([0.0, 3.0, -1.5], np.float32))


def test_a_stored_residual_is_read_back_once(tmp_path: Path) -> None:
    residual_departure.save_left_residual(tmp_path, FACTS, LEFT)
    found = residual_departure.load_left_residual(tmp_path, FACTS, 3)
    assert found is not None and (found.applied, found.history) == (7, b"seven")
    assert np.array_equal(found.residual_N, LEFT.residual_N)
    assert residual_departure.load_left_residual(tmp_path, FACTS, 3) is None


@pytest.mark.parametrize("what", ["other facts", "other size", "truncated", "not finite", "no metadata"])
def test_a_residual_that_does_not_fit_is_not_read_back(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = np.array([0.0, np.nan, 1.0], np.float32)
    residual_departure.save_left_residual(
        tmp_path, FACTS, residual_departure.LeftResidual(7, b"", bad) if what == "not finite" else LEFT
    )
    path = tmp_path / residual_departure.LEFT_FOLDER
    if what == "truncated":
        tensors = path / "residual.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-1])
    if what == "no metadata":
        (path / "note.json").unlink()
    facts = FACTS[:1] if what == "other facts" else FACTS
    assert residual_departure.load_left_residual(tmp_path, facts, 4 if what == "other size" else 3) is None
    assert "will not be read back" in caplog.text and not path.exists()


def alone(group: Any, folder: Path, until: int) -> tuple[list[np.ndarray], int]:
    """One worker with checkpoints: its residual at the first turn and when it stops."""
    seen: list[np.ndarray] = []
    first = -1
    with group.join("one", checkpoint_every=3, state_dir=str(folder), export_dir=str(folder)) as grid:
        model = nn.Linear(WIDE, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = sgd(grid, model, EXCHANGES[0], lr=2.0**-10)
        for batch in grid.batches(DATA, global_batch_size=4, steps=STEPS):
            grid._model_state.checkpoints.wait()
            if first < 0:
                first = grid.step
                seen.append(optimizer.residual.state()["residual"].numpy())
            if grid.step == until:
                break
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
        seen.append(optimizer.residual.state()["residual"].numpy())
    return seen, first


@pytest.mark.parametrize(("until", "back"), [(6, True), (8, False)])
def test_a_restarted_worker_reads_its_residual_back_if_the_run_has_not_moved(
    tmp_path: Path, until: int, back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on from the checkpoint of step 6.  A residual of step 8 is of another history."""
    with gridtrain.sdk.local_group.LocalGroup(deadlines=QUICK) as group:
        (_, left), _ = alone(group, tmp_path, until)
    assert left.any() and (tmp_path / residual_departure.LEFT_FOLDER).is_dir()
    if not back:
        shutil.rmtree(tmp_path / "step-00000008")  # as if its disk had been full
    with gridtrain.sdk.local_group.LocalGroup(deadlines=QUICK) as group, caplog.at_level(logging.WARNING):
        (found, _), first = alone(group, tmp_path, 7 if back else 6)
    assert first == 6
    assert np.array_equal(found, left) == back
    if not back:
        assert found.any(), "the checkpoint's own, of its step"
    assert ("is read back" in caplog.text, "is lost" in caplog.text) == (back, not back)


def test_a_worker_that_leaves_before_its_first_step_keeps_its_residuals_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its checkpoint's residual nor the one with which it left before is transferred or lost."""
    with gridtrain.sdk.local_group.LocalGroup(deadlines=QUICK) as group:
        alone(group, tmp_path, 8)
    stored = (tmp_path / residual_departure.LEFT_FOLDER / "residual.safetensors").read_bytes()
    caplog.clear()

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gridtrain.sdk.batches.Turns, "__iter__", interrupted)
    with (
        caplog.at_level(logging.WARNING),
        gridtrain.sdk.local_group.LocalGroup(deadlines=QUICK, min_workers=2) as group,
        pytest.raises(KeyboardInterrupt),
    ):
        alone(group, tmp_path, 9)
    assert caplog.messages[-1] == "this worker is leaving before taking part in a step"
    assert not any("residual" in message for message in caplog.messages), caplog.messages
    assert (tmp_path / residual_departure.LEFT_FOLDER / "residual.safetensors").read_bytes() == stored


def test_ctrl_c_before_a_round_leaves_the_whole_residual_with_the_worker(
    new_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the step was submitted; the outcome of the previous round does not apply to it."""
    seen: dict[str, np.ndarray] = {}
    take, collective = WorkerResidual.take, ButterflyBuffer.make_collective
    rounds: Counter[str] = Counter()

    def take_recorded(self: Any, settle: Any) -> Any:
        residual_N = self._exchanger.feedback.residual_N.numpy().copy()
        taken_N = take(self, settle)
        seen.setdefault(threading.current_thread().name, residual_N - taken_N)
        return taken_N

    def interrupted(self: Any, *args: Any) -> Any:
        name = threading.current_thread().name
        rounds[name] += 1
        if name == "worker-1" and rounds[name] == 4:
            raise KeyboardInterrupt
        return collective(self, *args)

    monkeypatch.setattr(WorkerResidual, "take", take_recorded)
    monkeypatch.setattr(ButterflyBuffer, "make_collective", interrupted)

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Linear(WIDE, 1, bias=False)
        optimizer = sgd(grid, model, EXCHANGES[1], lr=0.0)
        for batch in grid.batches(DATA, batch_size=2, steps=8):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with new_group(workers=2, deadlines=QUICK) as group:
        group.start(train)
        assert isinstance(group.result(group.start(train)), KeyboardInterrupt)
    assert not seen["worker-1"].any()


def test_a_removed_worker_does_not_repeat_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*, between_steps: bool) -> None:
        raise JoinRefused("kicked", "this worker was removed from the run: too slow", remedy="ask")

    session = SimpleNamespace(tasks=SimpleNamespace(settle_absences=lambda timeout_s: True))
    state: Any = SimpleNamespace(
        _session=session,
        _options=ModelStateOptions(tmp_path, every=0, keep=1),
        _leaves_before_first_step=lambda: False,
        _leave_residual=lambda budget_bytes: None,
        _keep_for_others=refuse,
        _report_kept=lambda: None,
    )
    ModelState.leave(state, 0, between_steps=True)
    assert caplog.messages == [
        "this worker leaves without a checkpoint of its last step: it is no longer a member"
    ]


@pytest.mark.parametrize("where", ["in its step", "between steps"])
@pytest.mark.parametrize(
    ("error", "saves"),
    [
        (JoinRefused(VERSION, "the peer uses protocol version 6", remedy="install it"), True),
        (RunPaused("the run has been paused for 30 minutes", remedy="wait"), True),
        (JoinRefused("kicked", "too slow", remedy="ask"), False),
    ],
    ids=["version", "pause", "removed"],
)
def test_a_worker_that_the_coordinator_no_longer_serves_saves_its_state(
    tmp_path: Path, error: GridtrainError, saves: bool, where: str
) -> None:
    """Such as after an upgrade of the coordinator; the script waits for the group."""

    def end() -> None:
        raise error

    with (
        gridtrain.sdk.local_group.LocalGroup(deadlines=QUICK) as group,
        pytest.raises(type(error)),
        group.join("one", checkpoint_every=500, state_dir=str(tmp_path), export_dir=str(tmp_path)) as grid,
    ):
        model = nn.Linear(WIDE, 1, bias=False)
        optimizer, loop = sgd(grid, model, EXCHANGES[2], lr=2.0**-10), grid._session.connection.loop
        for batch in grid.batches(DATA, global_batch_size=4, steps=STEPS):
            optimizer.zero_grad()
            model(batch).mean().backward()
            if grid.step == 7 and where == "in its step":
                loop.mailbox.submit(end)
            optimizer.step()
            if grid.step == 8:
                loop.mailbox.submit(end)
                loop._thread.join(WITHIN_S)
    expected = ["step-00000007" if where == "in its step" else "step-00000008"]
    assert [path.name for path in tmp_path.glob("step-*")] == (expected if saves else [])
