"""Measures the steps of real pipelines: a coordinator and four workers with agents, each on its own host.

Only the computing is emulated (`stages.waiting`).  torch.distributed.pipelining over gloo has the same hosts.

    hub   gridtrain coordinator          host 1   gridtrain worker -> this file: stage 0   } shaped links,
                                         ...                                              } one bridge
                                         host 4   gridtrain worker -> this file: stage 3   }

    a step   |-- wait for the turn, read the batch, fill, drain, exchange, vote --|   from commit to commit
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gridtrain
from lab.group import run_in_lab
from lab.net import Net
from rivals.contract import Rank
from rivals.hosts import run_ranks
from stages.waiting import BACKWARD_S, FORWARD_S, Waiting, elements_of, loss_of, sleep_exactly

WARM_UP_STEPS = 2
PAYLOAD_BYTES = 125_000
STAGES = 4
TIMEOUT_S = 120.0
LAN = {"name": "1 Gbit/s", "rate": "1000Mbit", "delay_s": 0.0}
FAST = {"name": "100 Mbit/s, 5 ms", "rate": "100Mbit", "delay_s": 0.005}
Network = dict[str, Any]


def links_of(network: Network) -> dict[str, Any]:
    return {key: network[key] for key in ("rate", "delay_s")}


def model() -> nn.Sequential:
    wide, last = elements_of(PAYLOAD_BYTES), STAGES - 1
    return nn.Sequential(*(Waiting(elements=0 if s else wide, last=s == last) for s in range(STAGES)))


def zeros(block: nn.Module, number: int) -> None:
    for parameter in block.parameters():
        nn.init.zeros_(parameter)


def work(options: dict[str, Any]) -> dict[str, Any]:
    """Train as one worker; return the seconds from commit to commit, and their parts."""
    sleep_exactly()
    micro_batches = options["micro_batches"]
    ends_s, computing_s, waiting_s = [], [], []
    with gridtrain.join() as grid:
        pipe = grid.pipeline(
            model,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            stages=STAGES,
            loss_fn=loss_of,
            micro_batches=micro_batches,
            exchange=gridtrain.Dense(),
            schedule="1f1b",
            ahead=options["ahead"],
            rematerialise=False,
            init=zeros,
        )
        samples = [(torch.zeros(1), torch.zeros(1))] * (64 * micro_batches)  # `model` expands the number
        steps = options["steps"] + WARM_UP_STEPS + 1
        for inputs, targets in grid.batches(samples, batch_size=micro_batches, steps=steps):
            pipe.step(inputs, targets)
            ends_s.append(time.monotonic())
            computing_s.append(pipe.timings["computing_s"])
            waiting_s.append(pipe.timings["pipeline_waiting_s"])
    return {
        "stage": pipe.stage,
        "times_s": [b - a for a, b in pairwise(ends_s)][WARM_UP_STEPS:],
        "computing_s": computing_s[WARM_UP_STEPS:],
        "waiting_s": waiting_s[WARM_UP_STEPS:],
    }


@dataclass(frozen=True)
class Case:
    """A pipeline to measure, with a short name for the command line."""

    name: str
    network: Network
    micro_batches: int
    ahead: float = 1.0

    def measure(self, steps: int) -> dict[str, Any]:
        """Return the row of one group.  Raises `LabError` with the ends of the logs."""
        options = {"micro_batches": self.micro_batches, "ahead": self.ahead, "steps": steps}
        workers = run_in_lab(work, options, STAGES, TIMEOUT_S, encrypted=False, **links_of(self.network))
        (first,) = (found for found in workers.values() if found.pop("stage") == 0)
        key = f"1F1B {self.ahead:g} ahead, M = {self.micro_batches}, {self.network['name']}"
        return {"case": self.name, "key": key, "ideal_s": ideal_s(self.micro_batches), **first}


def ideal_s(micro_batches: int) -> float:
    """Return the duration of a step with only the bubble."""
    return (micro_batches + STAGES - 1) * (FORWARD_S + BACKWARD_S)


CASES = (
    Case("lan8", LAN, 8),
    Case("lan16", LAN, 16),
    Case("lan24", LAN, 24),
    Case("fast16", FAST, 16, ahead=4.0),
)
TORCH = ((LAN, (8, 24)), (FAST, (16,)))
NAMES = (*(case.name for case in CASES), "torch", "alone")


@dataclass(frozen=True, kw_only=True)
class TorchStage(Rank):
    """A rank of torch's pipeline: executes each case, such as "GPipe:8", so many times in turn."""

    rounds: int
    cases: list[str]


def torch_rows(network: Network, micro_batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measure both schedules of torch on hosts with the same links.  Raises `LabError` if a rank fails."""
    cases = [f"{schedule}:{count}" for count in micro_batches for schedule in ("GPipe", "1F1B")]
    with tempfile.TemporaryDirectory(prefix="gridtrain-pipeline-") as text, Net() as net:
        made = net.make_hosts([f"torch-{rank}" for rank in range(STAGES)], **links_of(network))
        common = TorchStage(rounds=rounds, cases=cases)
        outs = run_ranks(list(made.values()), "gloo", "stages.torch_side", common, Path(text), TIMEOUT_S)
        spans = [json.loads(Path(out).read_text()) for out in outs]
    rows = []
    for case in cases:
        schedule, _, count = case.partition(":")
        rounds_of_ranks = zip(*(rank[case] for rank in spans), strict=True)
        rows.append(
            {
                "case": f"torch-{network['name']}-{count}",
                "key": f"torch's {schedule}, M = {count}, {network['name']}, gloo",
                "ideal_s": ideal_s(int(count)),
                "times_s": [
                    max(stop_s for _, stop_s in each) - min(start_s for start_s, _ in each)
                    for each in rounds_of_ranks
                ],
            }
        )
    return rows


def alone_row(rounds: int, micro_batches: int = 24) -> dict[str, Any]:
    """Measure the same work in one process, which only waits, without links and vote."""
    sleep_exactly()
    layers = nn.Sequential(*(Waiting(last=layer == STAGES - 1) for layer in range(STAGES)))
    row = torch.zeros(1, elements_of(PAYLOAD_BYTES))

    def step_s() -> float:
        begun_s = time.monotonic()
        for _ in range(micro_batches):
            loss_of(layers(row), row).backward()  # type: ignore[no-untyped-call]
        return time.monotonic() - begun_s

    step_s()  # not counted: libraries are loaded in it
    return {
        "case": "alone",
        "key": f"one stage of {STAGES} layers, M = {micro_batches}, no link and no vote",
        "ideal_s": micro_batches * STAGES * (FORWARD_S + BACKWARD_S),
        "times_s": [step_s() for _ in range(rounds)],
    }


def measure(steps: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the named cases."""
    found = []
    for case in CASES:
        if case.name in names:
            found.append(case.measure(steps))
            median_s = statistics.median(found[-1]["times_s"])
            print(f"{found[-1]['key']}: median {median_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
    if "torch" in names:
        found += [row for network, counts in TORCH for row in torch_rows(network, counts, max(3, steps // 2))]
    if "alone" in names:
        found.append(alone_row(3))
    return found
