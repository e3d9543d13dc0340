"""`gridtrain.testing.Faults`: planned faults at planned steps, and what follows from them."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import LOSING, WITHIN_S
from group_status import status_of
from threaded_group import ThreadedGroup
from torch import nn
from training_loop import digest, flat, sgd, train_batch

import gridtrain
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.testing import Faults, InjectedFailure

NAMES = ("anna", "bert", "carl")
SAMPLES, STEP = 120, 5
EXCHANGES = {
    "dense": gridtrain.Dense(topology="ring"),
    "direct": gridtrain.Dense(topology="direct"),
    "int8": gridtrain.Dense(topology="ring", values="int8"),
    "topk": gridtrain.TopK(density=0.3),
    "gtopk": gridtrain.GTopK(density=0.3),
}


class Numbered:
    """Sample i is the number i, so that a batch says which ones it holds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index), 1.0]), index


torch.manual_seed(3)
NET = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


class Runs:
    """Three workers under a plan of faults."""

    def __init__(self, folder: Path, faults: Faults, exchange: str) -> None:
        self.exchange = exchange
        self.attempts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.committed: set[tuple[int, ...]] = set()
        with ThreadedGroup(folder, workers=3, deadlines=LOSING, faults=faults) as group:
            for name in NAMES:
                group.start(self._train, name=name)
            self.ends: dict[str, Any] = dict(zip(NAMES, group.ends(), strict=True))

    def _train(self, grid: gridtrain.Grid, number: int) -> str:
        model = copy.deepcopy(NET)  # seeding in several threads at once would give several models
        optimizer = sgd(grid, model, EXCHANGES[self.exchange], lr=0.001)
        session: Any = grid._session
        run, batch = session.run, []

        def seen(plan: Any, *rest: Any) -> Any:
            name = session._turn.open_round
            self.attempts[name.generation, name.step, name.attempt] += batch[0] if plan.samples else []
            outcome = run(plan, *rest)
            if outcome.is_committed:
                self.committed.add((name.generation, name.step, name.attempt))
            return outcome

        session.run = seen
        for inputs, indices in grid.batches(Numbered(), batch_size=4, epochs=1):
            batch[:] = [indices.tolist()]
            train_batch(model, optimizer, inputs)
        self.weights_N = flat(model)
        return digest(model, optimizer)

    def assert_whole(self, *, survivors: int) -> None:
        """The survivors have one model, and every sample is in exactly one committed attempt."""
        digests = [end for end in self.ends.values() if isinstance(end, str)]
        assert len(digests) == survivors and len(set(digests)) == 1, self.ends
        taken = sorted(index for name in self.committed for index in self.attempts[name])
        assert taken == list(range(SAMPLES))


@pytest.mark.parametrize("exchange", ["dense", "int8", "direct", "gtopk"])
@pytest.mark.parametrize("point", ["before", "during", "after"])
@pytest.mark.parametrize(("action", "left_with"), [("kill", EndpointKilled), ("fail", InjectedFailure)])
def test_a_worker_ends_at_the_planned_step_and_point(
    tmp_path: Path, action: str, left_with: type[Exception], point: Any, exchange: str
) -> None:
    faults = Faults()
    getattr(faults, f"{action}_at")("bert", STEP, point)
    run = Runs(tmp_path, faults, exchange)
    assert isinstance(run.ends["bert"], left_with), run.ends["bert"]
    run.assert_whole(survivors=2)
    ((planned, name),) = faults.fired
    assert (planned.action, planned.point, name) == (action, point, "bert") and not faults.pending
    generations = {committed[0] for committed in run.committed}
    assert len(generations) == 2 and max(name[1] for name in run.committed if name[0] == 1) <= STEP


@pytest.mark.parametrize("point", ["before", "during", "after"])
def test_a_fault_can_name_rank_0(tmp_path: Path, point: Any) -> None:
    faults = Faults().kill_at(0, STEP, point)
    run = Runs(tmp_path, faults, "dense")
    run.assert_whole(survivors=2)
    ((_, name),) = faults.fired
    assert isinstance(run.ends[name], EndpointKilled)


@pytest.mark.parametrize("exchange", ["dense", "direct", "topk"])  # gtopk may drop the wrong entry
def test_one_corrupt_payload_costs_one_attempt(tmp_path: Path, exchange: str) -> None:
    """All vote, the digests differ, ABORT; a later attempt commits with the same gradient.

    A retried ring continues from the received values, the wrong one included; so it takes another generation.
    """
    faults = Faults().corrupt_at(1, STEP)
    run = Runs(tmp_path, faults, exchange)
    run.assert_whole(survivors=3)
    assert len(faults.fired) == 1
    attempts = sorted(name for name in run.attempts if name[1] == STEP)
    again = [(2, STEP, 0)] if exchange == "dense" else []
    assert attempts == [(1, STEP, 0), (1, STEP, 1), *again] and attempts[-1] in run.committed


def test_a_retried_ring_never_continues_from_a_refused_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusing rank lacks a part that the others believe sent: all would agree on a wrong sum."""
    apply, refused = DenseRingBuffer.apply, []

    def refuse_one(self: DenseRingBuffer, effect: Any) -> None:
        begun[threading.current_thread()] += 1
        if not refused and begun[threading.current_thread()] == 5:
            refused.append(effect)
            raise RemoteProtocolError("cannot be")
        apply(self, effect)

    begun = Counter[threading.Thread]()
    monkeypatch.setattr(DenseRingBuffer, "apply", refuse_one)
    monkeypatch.setattr("gridtrain.runtime.io_loop.PEER_EFFECTS", ())  # the retry is in the generation
    run = Runs(tmp_path, Faults(), "dense")
    run.assert_whole(survivors=3)
    calm = Runs(tmp_path, Faults(), "dense")
    # Not bit for bit: ranks, and with them the order of sums, may differ from run to run.
    assert refused and torch.allclose(run.weights_N, calm.weights_N, rtol=1e-5, atol=1e-6)
    assert {name[0] for name in run.attempts} == {1, 2}


def test_the_group_waits_for_a_slow_worker(tmp_path: Path) -> None:
    faults = Faults().slow_at(1, STEP, seconds=0.4)
    run = Runs(tmp_path, faults, "dense")
    run.assert_whole(survivors=3)
    assert len(faults.fired) == 1 and {name[0] for name in run.committed} == {1}


def test_a_worker_that_freezes_for_long_is_removed_and_rejoins(tmp_path: Path) -> None:
    faults = Faults().freeze_at("carl", STEP, seconds=2.5, point="during")
    run = Runs(tmp_path, faults, "dense")
    assert len(faults.fired) == 1
    generations = {name[0] for name in run.committed}
    assert len(generations) >= 2, "the others went on without it"
    if len(generations) == 2:  # the run has ended before it was a member again
        del run.ends["carl"]
    run.assert_whole(survivors=sum(isinstance(end, str) for end in run.ends.values()))
    assert isinstance(run.ends["anna"], str) and isinstance(run.ends["bert"], str)


def train_and_wait(grid: gridtrain.Grid, wait: str) -> str:
    """Train on `Numbered`, in steps that take a while; return the digest of the model."""
    model = copy.deepcopy(NET)
    optimizer = sgd(grid, model, EXCHANGES["gtopk"], lr=0.001, compare_every=0, wait=wait)
    for inputs, _ in grid.batches(Numbered(), batch_size=1, steps=120):
        time.sleep(0.005)
        train_batch(model, optimizer, inputs)
    return digest(model, optimizer)


def missed_steps(group: LocalGroup) -> dict[str, float]:
    members = status_of(group)["members"]
    return {each["name"]: each["figures"].get("missed_steps", 0.0) for each in members}


def test_the_status_counts_the_steps_without_a_stalled_loop(new_group: Any) -> None:
    """The stall lasts until the status shows it, which it does while the loop still sleeps."""
    shown = threading.Event()
    faults = Faults().stall_at("bert", 30, seconds=0.001)
    stall = faults.stall

    def stall_until_shown(name: str, rank: int, step: int) -> None:
        is_due = bool(faults.pending)
        stall(name, rank, step)
        if is_due and not faults.pending:
            assert shown.wait(WITHIN_S)

    faults.stall = stall_until_shown  # type: ignore[method-assign]
    with new_group(workers=3, faults=faults) as group:
        for name in NAMES:
            group.start(lambda grid, number: train_and_wait(grid, "auto"), name=name)
        until_s = time.monotonic() + WITHIN_S
        while not missed_steps(group).get("bert") and time.monotonic() < until_s:
            time.sleep(0.02)
        rows = status_of(group)["members"]
        shown.set()
        digests = group.finish()
    ((planned, name),) = faults.fired
    assert (planned.action, name) == ("stall", "bert") and not faults.pending
    (bert,) = [row for row in rows if row["name"] == "bert"]
    assert bert["figures"]["missed_steps"] >= 1
    assert bert["reason"].startswith("was left out of ") and "its training loop had stalled" in bert["reason"]
    assert len(set(digests)) == 1


def test_a_group_of_threads_injects_faults() -> None:
    faults = Faults().stall_at("worker-1", 5, seconds=0.01)
    digests = gridtrain.local(lambda grid: train_and_wait(grid, "all"), workers=2, faults=faults)
    assert len(set(digests)) == 1 and [name for _, name in faults.fired] == ["worker-1"]


def test_a_stall_delays_only_the_training_thread() -> None:
    faults = Faults().stall_at("anna", 3, seconds=0.001).slow_at("anna", 3, seconds=0.001)
    assert [each.action for each in faults.strike("anna", 0, 3, ["before"])] == ["slow"]
    faults.stall("anna", 0, 2)
    assert [each.action for each in faults.pending] == ["stall"]
    faults.stall("anna", 0, 3)
    assert not faults.pending


def test_a_plan_survives_its_text_form(tmp_path: Path) -> None:
    plan = Faults().kill_at("anna", 3, "after").slow_at(2, 4, 0.5).freeze_at(0, 9, 1.5).corrupt_at(1, 1)
    plan.stall_at("bert", 7, 2.0)
    assert Faults.parse(plan.text()).pending == plan.pending
    path = tmp_path / "faults.json"
    path.write_text(plan.text())
    first, again = Faults.parse(f"@{path}"), Faults.parse(f"@{path}")
    assert [fault.action for fault in first.strike("anna", 5, 3, ["after"])] == ["kill"]
    assert again.strike("anna", 5, 3, ["after"]) == [], "it was injected before the process was started again"


@pytest.mark.parametrize(
    "text", ["no json", "[3]", '[{"action": "explode", "who": 1, "step": 2}]', "@/no/such/file", '{"a": 1}']
)
def test_a_malformed_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"fault|GRIDTRAIN_FAULTS"):
        Faults.parse(text)


def test_an_impossible_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="step"):
        Faults().kill_at(1, -1)
    with pytest.raises(ConfigError, match="seconds"):
        Faults().freeze_at(1, 1, 0.0)
    with pytest.raises(ConfigError, match="seconds"):
        Faults().stall_at(1, 1, 0.0)
