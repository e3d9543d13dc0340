"""The script of an honest worker: an ordinary training loop that reports its progress on stdout.

    python -m hostile.honest '{"steps": 100}'      see `Options`; under `gridtrain worker`

Each line of stdout is one JSON object; `mark` names it:

    loaded    torch is imported, `pid` is this process; next it waits for its gate, if there is one
    joined    the coordinator has admitted this worker; `took_s` since the request
    member    the first step has begun
    outcome   an attempt ended: `round` = [generation, step, attempt], `committed`, `of` = world size
    model     a step was applied: `model` = a digest of the model
    holding   the loop waits before step `held_step` until its gate opens
    end       the data ledger ended the run
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.training.checkpoint import serialization

FEATURES, CLASSES, SAMPLES = 16, 8, 1280


@dataclass(frozen=True)
class Options:
    """One JSON object on the command line.

    Attributes:
        width: of the two hidden layers.
        join_gate, step_gate: FIFOs; the worker reads a byte from one before it joins, from the other before
            step `held_step`.
    """

    exchange: str = "dense"
    width: int = 128
    batch_size: int = 8
    steps: int = 1_000_000
    join_gate: str = ""
    step_gate: str = ""
    held_step: int = -1


EXCHANGES = {
    "dense": gridtrain.Dense(),
    "topk": gridtrain.TopK(density=0.25, momentum=0.9),
    "gtopk": gridtrain.GTopK(density=0.25, momentum=0.9),
}


def say(mark: str, **fields: object) -> None:
    """Print a line with a single write, so that lines of two threads cannot mix."""
    line = {"mark": mark, "at_s": time.monotonic(), **fields}
    os.write(1, (json.dumps(line) + "\n").encode())


def wait_for_gate(path: str) -> None:
    if path:
        with open(path, "rb", buffering=0) as gate:
            gate.read(1)


class Points:
    """Inputs with labels from a fixed random linear map."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._y = (self._x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def train(
    grid: gridtrain.Grid, options: Options, each_step: Callable[[gridtrain.Grid], None] = lambda grid: None
) -> str:
    """Train to the end of the run; return a digest of the model."""
    torch.manual_seed(1)
    width = options.width
    layers = (
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )
    model = nn.Sequential(*layers)
    momentum = 0.9 if options.exchange == "dense" else 0.0  # the sparse exchanges have their own
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    optimizer = grid.optimizer(inner, model, exchange=EXCHANGES[options.exchange])
    report_outcomes(grid)
    for x_BF, y_B in grid.batches(Points(), batch_size=options.batch_size, steps=options.steps):
        if grid.step == options.held_step and options.step_gate:
            with grid.evaluation():
                say("holding", step=grid.step)
                wait_for_gate(options.step_gate)
        each_step(grid)
        nn.functional.cross_entropy(model(x_BF), y_B).backward()
        optimizer.step()
        optimizer.zero_grad()
        say("model", step=grid.step - 1, model=serialization.replica_digest(model, inner).hex()[:16])
    return serialization.replica_digest(model, inner).hex()[:16]


def report_outcomes(grid: gridtrain.Grid) -> None:
    """Report each attempt, by wrapping an internal function of the session."""
    session: Any = grid._session
    run = session.run

    def reported(plan: Any, buffers: Any, skip: bool, salt: bytes) -> Any:
        round_id = session._turn.open_round
        outcome = run(plan, buffers, skip, salt)
        name = [round_id.generation, round_id.step, round_id.attempt]
        say("outcome", round=name, committed=outcome.is_committed, of=plan.world_size)
        return outcome

    session.run = reported


def main() -> None:
    torch.set_num_threads(1)
    options = Options(**json.loads(sys.argv[1]))
    say("loaded", pid=os.getpid())
    wait_for_gate(options.join_gate)
    began_s = time.monotonic()
    with gridtrain.join() as grid:
        say("joined", took_s=time.monotonic() - began_s)
        first = [True]

        def each_step(grid: gridtrain.Grid) -> None:
            if first:
                first.clear()
                say("member", took_s=time.monotonic() - began_s, step=grid.step)

        say("end", digest=train(grid, options, each_step), step=grid.step)


if __name__ == "__main__":
    main()
