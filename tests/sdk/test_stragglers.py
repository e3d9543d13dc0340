"""`wait="auto"` in real groups: a training loop stalls until the others have gone on without it."""

from __future__ import annotations

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from brisk import BRISK, WITHIN_S
from next_exchange import choose_next_exchange
from torch import nn

import gridtrain
from gridtrain.core.commit.data_ledger import MAX_LATE_STEPS
from gridtrain.core.member.stragglers import FEWEST_DELAYS
from gridtrain.core.messages import ReplicaDigest
from gridtrain.core.planning.batch_shares import SECONDS_FIGURE
from gridtrain.sdk import local_group
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training.absence import Absence
from gridtrain.training.overlap_trial import TRIAL_STEPS, WARM_UP_STEPS

NET = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
DATA = torch.utils.data.TensorDataset(
    torch.randn(640, 6, generator=torch.Generator().manual_seed(1)), torch.arange(640) % 3
)
STALLED_AT, STEPS_WITHOUT, COMPARE_EVERY = FEWEST_DELAYS + 4, 6, 2
STALL_S = 1e6
"""The duration of a stall by the clock of the worker's compute figures."""
IN_BUCKETS = gridtrain.Overlap(buckets=4, least=16, adaptive=False)
ABSENCE = re.compile(
    r"the group went on for (\d+) steps without this worker, whose training loop had stalled; "
    r"its batch of (.*)"
)
AFTER_A_TRIAL = WARM_UP_STEPS + TRIAL_STEPS + 4


@dataclass
class Stall:
    """One worker stalls at its batch `STALLED_AT` until the group is `wanted` steps further.

    Attributes:
        steps_without: the steps that the group has taken when the stall ended.
        steps_counted: by how many steps `grid.step` of that worker has grown in this time.
        batches: the number of batches of the worker that stalled.
        computed_s: the compute time that this worker has reported at its end, in seconds.
        digests: by step, the digests of the workers' states that were compared after it.
    """

    wanted: int = STEPS_WITHOUT
    steps_without: int = -1
    steps_counted: int = -1
    batches: int = 0
    computed_s: float = 0.0
    digests: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    _claim: threading.Lock = field(default_factory=threading.Lock)
    _gone_on: threading.Condition = field(default_factory=threading.Condition)
    _step: int = 0

    def claim(self) -> bool:
        return self._claim.acquire(blocking=False)

    def step_taken(self, step: int) -> None:
        with self._gone_on:
            self._step = max(self._step, step)
            self._gone_on.notify_all()

    def stall(self, timeout_s: float) -> None:
        with self._gone_on:
            before = self._step
            self._gone_on.wait_for(lambda: self._step >= before + self.wanted, timeout_s)
            self.steps_without = self._step - before


def train(
    stall: Stall,
    exchange: Any,
    *,
    wait: str = "auto",
    timeout_s: float = 60.0,
    schedule: Callable[[gridtrain.Grid, torch.optim.Optimizer], Any] = lambda grid, optimizer: None,
    averages: bool = False,
    overlap: gridtrain.Overlap | None = None,
    stalled_at: int = STALLED_AT,
    amid_backward: bool = False,
    between: Callable[[gridtrain.Grid], None] = lambda grid: None,
) -> list[tuple[bytes, float, int]]:
    """Train with three workers; return each one's parameters, learning rate, and consumed samples.

    Args:
        between: is called after each step by the workers that do not stall.
    """

    def one(grid: gridtrain.Grid) -> tuple[bytes, float, int]:
        is_stalling, model = stall.claim(), copy.deepcopy(NET)
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            exchange=exchange,
            wait=wait,
            compare_every=COMPARE_EVERY,
            overlap=overlap,
        )
        session: Any = grid._session
        transport = session.connection.loop._transport
        send = transport.send

        def seen(peer: bytes, message: Any, *frames: Any) -> None:
            if isinstance(message, ReplicaDigest):
                stall.digests[message.step].append(message.digest)
            send(peer, message, *frames)

        transport.send = seen
        scheduler = schedule(grid, optimizer)
        number = 0

        def stall_once(*gradient: torch.Tensor) -> None:
            if is_stalling and number == stalled_at * optimizer.calls_per_turn:
                before = grid.step
                session._compute_rate._began_s -= STALL_S
                stall.stall(timeout_s)
                stall.steps_counted = grid.step - before

        if amid_backward:  # the last layer's gradients are complete then
            model[0].weight.register_hook(stall_once)
        for inputs, labels in grid.batches(DATA, batch_size=4, epochs=1):
            number += 1
            if not amid_backward:
                stall_once()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if averages:
                grid.mean(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if not is_stalling:
                stall.step_taken(grid.step)
                between(grid)
        if is_stalling:
            stall.batches, stall.computed_s = number, session._compute_rate.figures()[SECONDS_FIGURE]
        parameters = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        return parameters, optimizer.param_groups[0]["lr"], grid._session.snapshot.ledger.consumed

    return gridtrain.local(one, workers=3)


def long_absence(caplog: pytest.LogCaptureFixture, least: int) -> tuple[int, str]:
    """The number of missed steps that a worker has logged, and what became of its batch; of at least `least`
    steps, because a loaded machine may delay other workers, too."""
    logged = [ABSENCE.fullmatch(record.getMessage()) for record in caplog.records]
    (found,) = [(int(each[1]), each[2]) for each in logged if each is not None and int(each[1]) >= least]
    return found


def exponential(grid: gridtrain.Grid, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    grid.track(scheduler=scheduler)
    return scheduler


def chained(grid: gridtrain.Grid, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler that does not count its steps."""
    part = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([part])
    grid.track(scheduler=scheduler)
    return scheduler


@pytest.mark.parametrize(
    "exchange",
    [
        gridtrain.GTopK(density=0.1, momentum=0.9),
        gridtrain.GTopK(density=0.1, topology="tree"),
        gridtrain.TopK(density=0.1),
        gridtrain.Dense(),
        gridtrain.Dense(topology="ring", values="int8"),
        gridtrain.LocalSteps(every=2, exchange=gridtrain.Dense()),
        gridtrain.Auto(density=0.1),
    ],
    ids=["gtopk", "tree", "topk", "dense", "dense int8", "local steps", "auto"],
)
def test_the_group_goes_on_without_a_stalled_loop(exchange: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gridtrain")  # a loaded machine may have delayed this worker before
    stall = Stall()
    results = train(stall, exchange)
    missed, fate = long_absence(caplog, STEPS_WITHOUT - 1)
    first, used = map(int, re.findall(r"\d+", fate))
    assert fate == f"step {first} is used in step {used}" and used == first + missed
    assert stall.steps_without >= STEPS_WITHOUT, "the group has waited"
    assert stall.steps_counted == 0, "its model does not contain them yet"
    assert stall.computed_s < STALL_S, "a stall does not count as slow computing"
    assert len(set(results)) == 1, "models, learning rates and ledgers are equal"
    assert results[0][2] == len(DATA), "every sample counts once"
    assert len(stall.digests) > STEPS_WITHOUT // COMPARE_EVERY
    for step, digests in stall.digests.items():
        assert len(digests) == 3 and len(set(digests)) == 1, f"states after step {step}"


def test_the_exchange_may_change_while_a_loop_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each evaluation the coordinator chooses the next exchange; the missed updates are of all kinds."""
    kinds, apply = set(), Absence.apply

    def record(absence: Absence, steps: Any) -> None:
        kinds.update(type(step.update).__name__ for step in steps)
        apply(absence, steps)

    def await_change(grid: gridtrain.Grid) -> None:
        if grid.step > STALLED_AT and grid.step % 3 == 0:
            before = grid._session.snapshot.generation
            grid._session._loop.mailbox.wait(lambda p: p.generation > before, WITHIN_S)

    choose_next_exchange(monkeypatch)
    monkeypatch.setattr(Absence, "apply", record)
    monkeypatch.setattr(local_group, "Deadlines", lambda: replace(BRISK, reshare_s=0.05))
    stall = Stall(wanted=MAX_LATE_STEPS - 3)
    results = train(stall, gridtrain.Auto(density=0.1), between=await_change)
    assert stall.steps_without >= stall.wanted and kinds == {"ndarray", "SparseVector"}
    assert len(set(results)) == 1 and results[0][2] == len(DATA)
    assert all(len(set(digests)) == 1 for digests in stall.digests.values())


@pytest.mark.parametrize(
    ("exchange", "overlap"),
    [
        (gridtrain.GTopK(density=0.1, momentum=0.9), IN_BUCKETS),
        (gridtrain.TopK(density=0.1), IN_BUCKETS),
        (gridtrain.Dense(topology="ring"), IN_BUCKETS),
        (gridtrain.Dense(topology="ring", values="int8"), IN_BUCKETS),
        (gridtrain.Dense(), replace(IN_BUCKETS, adaptive=True)),
        (gridtrain.GTopK(density=0.1), replace(IN_BUCKETS, adaptive=True)),
    ],
    ids=["gtopk", "topk", "dense", "dense int8", "dense, adaptive", "gtopk, adaptive"],
)
def test_the_group_goes_on_without_a_loop_that_has_sent_no_bucket(
    exchange: Any, overlap: gridtrain.Overlap
) -> None:
    stall = Stall()
    results = train(stall, exchange, overlap=overlap, stalled_at=AFTER_A_TRIAL)
    assert stall.steps_without >= STEPS_WITHOUT, "the group has waited"
    assert len(set(results)) == 1 and results[0][2] == len(DATA)
    assert all(len(set(digests)) == 1 for digests in stall.digests.values())


@pytest.mark.parametrize(
    ("overlap", "options"),
    [(IN_BUCKETS, {"amid_backward": True}), (replace(IN_BUCKETS, adaptive=True), {})],
    ids=["a bucket is sent", "a trial"],
)
def test_the_group_waits_where_it_needs_the_loop(overlap: gridtrain.Overlap, options: Any) -> None:
    stall = Stall()
    results = train(stall, gridtrain.Dense(topology="ring"), overlap=overlap, timeout_s=0.7, **options)
    assert stall.steps_without <= 1 and len(set(results)) == 1


def test_a_worker_whose_batch_came_too_late_says_that_it_was_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "gridtrain")
    stall = Stall(wanted=MAX_LATE_STEPS + 2)
    results = train(stall, gridtrain.Dense())
    assert len(set(results)) == 1 and results[0][2] == len(DATA), "every sample counts once"
    _, fate = long_absence(caplog, MAX_LATE_STEPS)
    assert fate.endswith("came too late and is dropped, and other workers get the samples")


def test_a_tracked_scheduler_is_repeated_for_missed_steps() -> None:
    stall = Stall()
    results = train(stall, gridtrain.GTopK(density=0.1), schedule=exponential)
    assert stall.steps_without >= STEPS_WITHOUT
    assert len(set(results)) == 1 and results[0][1] < 0.05


def test_an_average_does_not_wait_for_a_stalled_loop() -> None:
    stall = Stall()
    results = train(stall, gridtrain.GTopK(density=0.1), averages=True)
    assert stall.steps_without >= STEPS_WITHOUT and len(set(results)) == 1


@pytest.mark.parametrize(
    ("wait", "schedule"),
    [
        ("all", exponential),
        ("auto", lambda grid, optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)),
        ("auto", chained),
    ],
    ids=["as usual", "an untracked scheduler", "a chained scheduler"],
)
def test_the_group_waits_for_a_loop_that_cannot_be_left_out(wait: str, schedule: Callable[..., Any]) -> None:
    stall = Stall()
    results = train(stall, gridtrain.GTopK(density=0.1), wait=wait, schedule=schedule, timeout_s=0.7)
    assert stall.steps_without <= 1, "only the step before the stall was still under way"
    assert len(set(results)) == 1


def test_an_unknown_wait_is_refused() -> None:
    with pytest.raises(
        gridtrain.ConfigError,
        match='wait is \'never\'; it must be one of all, auto -> use wait="all" or wait="auto"',
    ):
        train(Stall(), gridtrain.Dense(), wait="never")


def test_the_default_is_the_option_of_the_worker() -> None:
    with LocalGroup() as group, group.join("anna") as grid:
        grid._config = replace(grid._config, wait="auto")
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        assert grid.optimizer(inner, model).wait == "auto"


@pytest.mark.parametrize(
    ("wait", "options", "messages"),
    [
        ("auto", {"exchange": gridtrain.Dense()}, []),
        ("all", {"exchange": "auto"}, []),
        ("auto", {"exchange": "auto"}, []),
        (
            "auto",
            {"exchange": gridtrain.Dense(), "by_hand": True},
            ["its script may change updates between exchange() and step()"],
        ),
    ],
    ids=["none", "not asked", "auto exchange", "exchange() by hand"],
)
def test_a_worker_for_which_the_group_waits_logs_the_reason_once(
    wait: str, options: dict[str, Any], messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = options.get("by_hand", False)
    options = {name: value for name, value in options.items() if name != "by_hand"}

    def one(grid: gridtrain.Grid) -> None:
        model = copy.deepcopy(NET)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, wait=wait, **options)
        for inputs, labels in grid.batches(DATA, batch_size=4, steps=4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if by_hand:
                optimizer.exchange()
            optimizer.step()

    with caplog.at_level("INFO", "gridtrain"):
        gridtrain.local(one, workers=1)
    prefix = "the group will wait for this worker if its loop stalls: "
    assert [text.removeprefix(prefix) for text in caplog.messages if text.startswith(prefix)] == messages


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def move_teacher(model: Any) -> None:
    for own, student in zip(model[3].parameters(), model[0].parameters(), strict=True):
        own.lerp_(student, 0.1)


@pytest.mark.parametrize(
    ("change", "is_before_step", "exchange", "is_found"),
    [
        (None, False, gridtrain.GTopK(density=0.1), False),
        (clamp, False, gridtrain.GTopK(density=0.1), True),
        (clamp, True, gridtrain.Dense(), True),
        (move_teacher, False, gridtrain.Dense(), True),
        (None, False, gridtrain.LocalSteps(every=3, exchange=gridtrain.Dense(), overlap=2), False),
        (clamp, True, gridtrain.LocalSteps(every=2, exchange=gridtrain.Dense()), True),
    ],
    ids=["none", "after", "before", "a frozen teacher", "overlapped local steps", "local steps"],
)
def test_the_updates_of_a_script_that_changes_parameters_are_not_applied_for_other_steps(
    change: Any, is_before_step: bool, exchange: Any, is_found: bool
) -> None:
    """A worker that has missed such a step would lack the change."""

    def one(grid: gridtrain.Grid) -> tuple[str, str]:
        model = nn.Sequential(*copy.deepcopy(NET), nn.Linear(6, 16).requires_grad_(False))
        inner = torch.optim.SGD(model[:3].parameters(), lr=0.1)
        optimizer: Any = grid.optimizer(inner, model, exchange=exchange, wait="auto", send_frozen=["3.*"])
        for inputs, labels in grid.batches(DATA, batch_size=4, steps=3):
            nn.functional.cross_entropy(model[:3](inputs), labels).backward()
            if change and is_before_step:
                change(model)
            optimizer.step()
            optimizer.zero_grad()
            if change and not is_before_step:
                change(model)
        return grid._session.tasks._replay_obstacle, optimizer.absence.find_obstacle()

    reason = "its script changes parameters outside of its steps" if is_found else ""
    assert gridtrain.local(one, workers=1) == [(reason, reason)]
