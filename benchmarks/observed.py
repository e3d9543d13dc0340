"""The script of the workers of `chaos` and `hostile`: a training loop that reports all that can be checked.

    python -m observed '{"exchange": "gtopk", "stop": "/path/of/a/file", ...}'         see `Options`

Each line of stdout is one JSON object with a `mark`:

    loaded    torch is imported, `pid` is this process; then it waits for its gate, if it has one
    joined    the coordinator has admitted this worker; `took_s` since the request
    member    the first step has begun
    round     an attempt begins: `round` = [generation, step, attempt], its positions and its samples
    outcome   of that attempt; `submitted`: whether the loop took part, before the group went on without it
    state     digest of model and optimizer after the committed step
    end       the step in the file `stop`, or the end of the run, is reached: digest and ledger

It uses private attributes of the session to observe attempts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.core.group.member_events import SubmitRound
from gridtrain.core.member.generation import late_submission
from gridtrain.core.messages import RoundId
from gridtrain.training.checkpoint import serialization
from lab.group import say

FEATURES, CLASSES = 16, 8
FOREVER = 100_000_000
STALL_POLL_S = 0.02
TOO_LATE = late_submission(SubmitRound(RoundId(0, 0, 0, 0), {})).reason
"""The reason why a submission is rejected after the group has proceeded without it."""

EXCHANGES: dict[str, Any] = {
    "dense": gridtrain.Dense(),
    "topk": gridtrain.TopK(density=0.1, momentum=0.9),
    "gtopk": gridtrain.GTopK(density=0.1, momentum=0.9),
    "local": gridtrain.LocalSteps(every=4, exchange=gridtrain.GTopK(density=0.1)),
}


@dataclass(frozen=True)
class Options:
    """The options, a JSON object on the command line.

    Attributes:
        wait: as in `grid.optimizer`.
        compute_s: a wait in each step instead of computing, because the workers share few cores.
        join_gate: a FIFO; the worker reads a byte from it before it joins.
        stop: a file that is created with the step before which the loop ends; then the worker stays.
        stall: a file; while it exists, the loop sleeps.
    """

    exchange: str = "dense"
    width: int = 128
    samples: int = 1280
    batch_size: int = 8
    wait: str = "all"
    compute_s: float = 0.0
    join_gate: str = ""
    stop: str = ""
    stall: str = ""


def wait_for_gate(path: str) -> None:
    if path:
        with open(path, "rb", buffering=0) as gate:
            gate.read(1)


class Points:
    """Samples (features, class, index), labelled by a fixed random linear model."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(count, FEATURES, generator=generator)
        self._y = (self._x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._x[index], self._y[index], index


def task_of(options: Options) -> tuple[nn.Module, Points]:
    """Return the model and the samples; the group replaces all initial parameters by the first worker's."""
    torch.manual_seed(os.getpid())
    width = options.width
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), Points(options.samples)


class AttemptLog:
    """Wraps `session.run` and writes every attempt; `committed` is the latest step that was applied here."""

    def __init__(self, grid: gridtrain.Grid) -> None:
        self.batch: list[int] = []
        self.committed = -1
        session: Any = grid._session
        self._session, self._run, session.run = session, session.run, self.run

    def run(self, plan: Any, workspaces: Any, skip: bool, salt: bytes) -> Any:
        turn = self._session._turn
        name = [turn.open_round.generation, turn.open_round.step, turn.open_round.attempt]
        spans = [[span.start, span.stop] for span in turn.spans]
        samples = self.batch if plan.samples else []  # a stand-in batch has no samples that count
        say("round", round=name, of=plan.world_size, spans=spans, samples=samples)
        outcome = self._run(plan, workspaces, skip, salt)
        latest = self._session._loop.step_rounds.last_submitted
        begun = latest is not None and latest.id == turn.open_round
        submitted = begun and latest.failure_reason != TOO_LATE
        say("outcome", round=name, committed=outcome.is_committed, submitted=submitted)
        if outcome.is_committed:
            self.committed = plan.step
        return outcome


def last_step(path: str) -> int:
    try:
        return int(Path(path).read_text()) if path else FOREVER
    except FileNotFoundError:
        return FOREVER


def train(
    grid: gridtrain.Grid, options: Options, task: tuple[nn.Module, Points], asked_s: float = 0.0
) -> None:
    """Train to the end of the run, or to the step in the file `stop`.

    Args:
        asked_s: when the worker asked to join.
    """
    model, data = task
    exchange = EXCHANGES[options.exchange]
    momentum = 0.0 if getattr(exchange, "momentum", 0.0) else 0.9
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    optimizer = grid.optimizer(inner, model, exchange=exchange, wait=options.wait)
    replicated = getattr(optimizer, "replicated", inner)  # with local steps, each worker has its own moments
    attempts = AttemptLog(grid)

    def digest() -> str:
        return serialization.replica_digest(model, replicated).hex()[:16]

    for number, (x, y, indices_B) in enumerate(
        grid.batches(data, batch_size=options.batch_size, steps=FOREVER)
    ):
        if number == 0:
            say("member", took_s=time.monotonic() - asked_s, step=grid.step)
        last = last_step(options.stop)
        if last < FOREVER:  # at the end no step may proceed without a worker
            grid._session._loop.step_rounds.stop_absences()
        if grid.step >= last:
            break
        time.sleep(options.compute_s)
        while options.stall and os.path.exists(options.stall):
            time.sleep(STALL_POLL_S)
        nn.functional.cross_entropy(model(x), y).backward()
        calls = getattr(optimizer, "local_calls", 0)
        attempts.batch = attempts.batch if calls else []
        if calls < getattr(optimizer, "_calls_with_samples", 1):  # not a stand-in batch at the end of a pass
            attempts.batch += indices_B.tolist()
        before = attempts.committed
        optimizer.step()
        optimizer.zero_grad()
        if attempts.committed != before:
            say("state", step=attempts.committed, digest=digest())
    ledger = grid._session.snapshot.ledger
    say(
        "end",
        step=grid.step,
        digest=digest(),
        cursor=ledger.cursor,
        consumed=ledger.consumed,
        requeued=[[span.start, span.stop] for span in ledger.requeued],
        late=[[span.start, span.stop] for batch in ledger.late for span in batch.spans],
    )


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)  # to stderr, which the agents save
    options = Options(**json.loads(sys.argv[1]))
    task = task_of(options)
    say("loaded", pid=os.getpid())
    wait_for_gate(options.join_gate)
    asked_s = time.monotonic()
    with gridtrain.join() as grid:
        say("joined", took_s=time.monotonic() - asked_s)
        train(grid, options, task, asked_s)
        if options.stop:
            with grid.evaluation():
                signal.pause()  # until SIGTERM, because no worker may leave before all have reached the end


if __name__ == "__main__":
    main()
