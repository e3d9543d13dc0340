"""The workers' script: an ordinary training loop that writes all that the guarantees can be checked by.

    python -m chaos.train '{"stop": "/path/of/a/file", ...}'         see `Options`

Each line of stdout is one JSON object with a `mark`:

    loaded    torch is imported, and joining begins; `pid`
    round     an attempt begins: `round` = [generation, step, attempt], its positions and its samples
    outcome   of that attempt; `submitted`: whether the loop took part, before the group went on without it
    state     digest of model and optimizer after the committed step
    end       the step in the file `stop` is reached: digest and ledger

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
from accuracy.llama import ByteLlama, with_lora
from gridtrain.core.group.member_events import SubmitRound
from gridtrain.core.member.generation import late_submission
from gridtrain.core.messages import RoundId
from gridtrain.tools.demo.byte_gpt import ByteGPT, Windows
from gridtrain.tools.demo.text_corpus import load_corpus
from gridtrain.training.checkpoint import serialization

FEATURES, CLASSES, CONTEXT = 16, 8, 64
FOREVER = 100_000_000
STALL_POLL_S = 0.02
TOO_LATE = late_submission(SubmitRound(RoundId(0, 0, 0, 0), {})).reason
"""The reason why a submission is rejected after the group has proceeded without it."""

EXCHANGES = {
    "dense": (gridtrain.Dense(), 0.9),
    "topk": (gridtrain.TopK(density=0.05, momentum=0.9), 0.0),
    "gtopk": (gridtrain.GTopK(density=0.05, momentum=0.9), 0.0),
    "local": (gridtrain.LocalSteps(every=4, exchange=gridtrain.GTopK(density=0.1)), 0.9),
}


@dataclass(frozen=True)
class Options:
    """The options, a JSON object on the command line.

    Attributes:
        stop: a file that is created with the step before which the loop ends.
        stall: a file; while it exists, the loop sleeps.
        compute_s: a wait in each step instead of computing, because the workers share few cores.
    """

    stop: str
    stall: str
    exchange: str = "dense"
    model: str = "mlp"
    width: int = 256
    samples: int = 3000
    batch_size: int = 8
    compute_s: float = 0.02


def say(mark: str, **fields: object) -> None:
    """Write a line to stdout with one system call, so that lines of two threads are not mixed."""
    os.write(1, (json.dumps({"mark": mark, "at_s": time.monotonic(), **fields}) + "\n").encode())


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


class Text:
    """Samples (bytes, next bytes, index): the first windows of the demo's text."""

    def __init__(self, count: int) -> None:
        self._windows, self._count = Windows(load_corpus().train, CONTEXT), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *self._windows[index], index


def task_of(options: Options) -> tuple[nn.Module, Any]:
    """Return the model and the samples; the group replaces all initial parameters by the first worker's."""
    width = options.width
    match options.model:
        case "gpt":
            return ByteGPT(seed=os.getpid()), Text(options.samples)
        case "lora":  # the base must be equal on all workers, the adapters need not be
            base = ByteLlama(64, 128, layers=2, heads=4, context=CONTEXT, seed=0)
            return with_lora(base, rank=8, alpha=16.0, seed=os.getpid()), Text(options.samples)
        case _:
            torch.manual_seed(os.getpid())
            layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(width, CLASSES)), Points(options.samples)


class AttemptLog:
    """Wraps `session.run` and writes every attempt; `committed` is the latest step that was applied here."""

    def __init__(self, grid: gridtrain.Grid) -> None:
        self.batch: list[int] = []
        self.committed = -1
        self._session: Any = grid._session
        self._run, self._session.run = self._session.run, self.run

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


def last_step(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return FOREVER


def train(options: Options) -> None:
    stop, stall = Path(options.stop), Path(options.stall)
    model, data = task_of(options)
    exchange, momentum = EXCHANGES[options.exchange]
    say("loaded", pid=os.getpid())
    grid = gridtrain.join()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = torch.optim.SGD(trained, lr=0.02, momentum=momentum)
    optimizer = grid.optimizer(inner, model, exchange=exchange, wait="auto")
    replicated = getattr(optimizer, "replicated", inner)  # with local steps, each worker has its own moments
    attempts = AttemptLog(grid)
    for x, y, indices_B in grid.batches(data, batch_size=options.batch_size, steps=FOREVER):
        last = last_step(stop)
        if last < FOREVER:  # at the end no step may proceed without a worker
            grid._session._loop.step_rounds.stop_absences()
        if grid.step >= last:
            break
        time.sleep(options.compute_s)
        while stall.exists():
            time.sleep(STALL_POLL_S)
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        calls = getattr(optimizer, "local_calls", 0)
        attempts.batch = attempts.batch if calls else []
        if calls < getattr(optimizer, "_calls_with_samples", 1):  # not a stand-in batch at the end of a pass
            attempts.batch += indices_B.tolist()
        before = attempts.committed
        optimizer.step()
        optimizer.zero_grad()
        if attempts.committed != before:
            say(
                "state",
                step=attempts.committed,
                digest=serialization.replica_digest(model, replicated).hex()[:16],
            )
    ledger = grid._session.snapshot.ledger
    say(
        "end",
        step=grid.step,
        digest=serialization.replica_digest(model, replicated).hex()[:16],
        cursor=ledger.cursor,
        consumed=ledger.consumed,
        requeued=[[span.start, span.stop] for span in ledger.requeued],
        late=[[span.start, span.stop] for batch in ledger.late for span in batch.spans],
    )
    with grid.evaluation():
        signal.pause()  # until SIGTERM, because no worker may leave before all have reached the end


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)  # to stderr, which the agents save
    train(Options(**json.loads(sys.argv[1])))
