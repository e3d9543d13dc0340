"""What the workers run: an ordinary training loop that writes down everything that can be checked.

    python -m chaos.train '{"stop": "/path/of/a/file", ...}'         see `Options`

Each line of stdout is one JSON object with a `mark`:

    loaded    torch is imported, the group is joined next; `pid`
    round     an attempt begins: `round` = [generation, step, attempt], its positions and its samples
    outcome   of that attempt; `submitted`: whether the loop took part, before the group went on without it
    state     digest of model and optimizer after the committed step
    end       the step in the file `stop` is reached: digest and ledger

Not a part of the product: it reaches into the session, to see attempts.
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
"""Why a submission does not count that came after the group went on without it."""

EXCHANGES = {
    "dense": (gridtrain.Dense(), 0.9),
    "topk": (gridtrain.TopK(density=0.05, momentum=0.9), 0.0),
    "gtopk": (gridtrain.GTopK(density=0.05, momentum=0.9), 0.0),
    "local": (gridtrain.LocalSteps(every=4, exchange=gridtrain.GTopK(density=0.1)), 0.9),
}


@dataclass(frozen=True)
class Options:
    """One JSON object on the command line.

    Attributes:
        stop: a file that will hold the step to end before; until then there is none.
        stall: a file; while it exists, the loop sleeps.
        compute_s: a pause in each step that stands for a volunteer's GPU: workers share few cores here.
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
    """One write for one line: two threads cannot mix theirs."""
    os.write(1, (json.dumps({"mark": mark, "at_s": time.monotonic(), **fields}) + "\n").encode())


class Points:
    """(features, class, its own index), from a fixed random teacher."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(count, FEATURES, generator=generator)
        self._y = (self._x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._x[index], self._y[index], index


class Text:
    """(bytes, next bytes, its own index), the first windows of the demo's text."""

    def __init__(self, count: int) -> None:
        self._windows, self._count = Windows(load_corpus().train, CONTEXT), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *self._windows[index], index


def task_of(options: Options) -> tuple[nn.Module, Any]:
    """(model, samples).  All workers but the first are given the first one's parameters."""
    width = options.width
    match options.model:
        case "gpt":
            return ByteGPT(seed=os.getpid()), Text(options.samples)
        case "lora":  # the base must be everybody's, the adapters need not be
            base = ByteLlama(64, 128, layers=2, heads=4, context=CONTEXT, seed=0)
            return with_lora(base, rank=8, alpha=16.0, seed=os.getpid()), Text(options.samples)
        case _:
            torch.manual_seed(os.getpid())
            layers = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(width, CLASSES)), Points(options.samples)


class Witness:
    """Wraps `session.run`: tells of every attempt; `committed`: the latest step applied here."""

    def __init__(self, grid: gridtrain.Grid) -> None:
        self.batch: list[int] = []
        self.committed = -1
        self._session: Any = grid._session
        self._run, self._session.run = self._session.run, self.run

    def run(self, plan: Any, workspaces: Any, skip: bool, salt: bytes) -> Any:
        turn = self._session._turn
        name = [turn.open_round.generation, turn.open_round.step, turn.open_round.attempt]
        spans = [[span.start, span.stop] for span in turn.spans]
        samples = self.batch if plan.samples else []  # else: a stand-in, which counts nothing
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
    replicated = getattr(optimizer, "replicated", inner)  # with local steps, moments are each worker's own
    witness = Witness(grid)
    for x, y, indices_B in grid.batches(data, batch_size=options.batch_size, steps=FOREVER):
        last = last_step(stop)
        if last < FOREVER:  # nobody may be left out at the end, when the others take part no more
            grid._session._loop.step_rounds.stop_absences()
        if grid.step >= last:
            break
        time.sleep(options.compute_s)
        while stall.exists():
            time.sleep(STALL_POLL_S)
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        calls = getattr(optimizer, "local_calls", 0)
        witness.batch = witness.batch if calls else []
        if calls < getattr(optimizer, "_calls_with_samples", 1):  # else: a stand-in at the end of a pass
            witness.batch += indices_B.tolist()
        before = witness.committed
        optimizer.step()
        optimizer.zero_grad()
        if witness.committed != before:
            say(
                "state",
                step=witness.committed,
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
        signal.pause()  # SIGTERM ends it: everybody has to reach the end before anybody leaves


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)  # on stderr, which the agents keep
    train(Options(**json.loads(sys.argv[1])))
