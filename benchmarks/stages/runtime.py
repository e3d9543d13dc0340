"""Measures the steps of real pipelines: a coordinator and four workers with agents, each on its own host.

Only the computing is emulated (`stages.emulated`).

    hub   gridtrain coordinator          host 1   gridtrain worker -> this file: stage 0   } shaped links,
                                         ...                                              } one bridge
                                         host 4   gridtrain worker -> this file: stage 3   }

    a step   |-- wait for the turn, read the batch, fill, drain, exchange, vote --|   from commit to commit
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.core.stages.schedule import one_forward_one_backward
from lab.group import Plan, start
from lab.net import Host, Net
from lab.shape import rate_Bps
from stages import torch_side
from stages.emulated import BACKWARD_S, FORWARD_S, Emulated, elements_of, loss_of, sleep_exactly
from stages.timetable import timetable

WARM_UP_STEPS = 2
PAYLOAD_BYTES = 125_000
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Network:
    """The rate of each host's link in each direction, and the delay from one host to another."""

    name: str
    rate: str
    delay_s: float


LAN = Network("1 Gbit/s", "1000Mbit", 0.0)
FAST = Network("100 Mbit/s, 5 ms", "100Mbit", 0.005)


@dataclass(frozen=True)
class Steps:
    """The steps of the first stage: seconds from commit to commit, and their parts."""

    step_s: list[float]
    computing_s: list[float]
    waiting_s: list[float]


class Samples:
    """A number for each sample, of which the first stage makes activations, like an embedding."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros(1)


def model(stages: int, payload_bytes: int) -> nn.Sequential:
    wide = elements_of(payload_bytes)
    last = stages - 1
    return nn.Sequential(*(Emulated(elements=0 if s else wide, last=s == last) for s in range(stages)))


def zeros(block: nn.Module, number: int) -> None:
    for parameter in block.parameters():
        nn.init.zeros_(parameter)


def work(options: argparse.Namespace) -> None:
    """Train as one worker."""
    torch.set_num_threads(1)
    sleep_exactly()
    grid = gridtrain.join()
    pipe = grid.pipeline(
        lambda: model(options.stages, options.payload),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        stages=options.stages,
        loss_fn=loss_of,
        micro_batches=options.micro_batches,
        exchange=gridtrain.Dense(),
        schedule=options.schedule,
        ahead=options.ahead,
        rematerialise=False,
        init=zeros,
    )
    ends_s: list[float] = []
    found = Steps([], [], [])
    batch = options.micro_batches
    for inputs, targets in grid.batches(Samples(64 * batch), batch_size=batch, steps=options.steps):
        pipe.step(inputs, targets)
        ends_s.append(time.monotonic())
        found.computing_s.append(pipe.timings["computing_s"])
        found.waiting_s.append(pipe.timings["pipeline_waiting_s"])
    found.step_s.extend(b - a for a, b in pairwise(ends_s))
    (options.result / f"stage-{pipe.stage}.json").write_text(json.dumps(vars(found)))


@dataclass(frozen=True)
class Case:
    """A pipeline to measure, with a short name for the command line."""

    name: str
    network: Network
    micro_batches: int
    ahead: float = 1.0
    encrypted: bool = False
    stages: int = 4

    @property
    def key(self) -> str:
        encryption = "encrypted" if self.encrypted else "in the clear"
        schedule = f"1F1B {self.ahead:g} ahead"
        return (
            f"{self.stages} stages, {schedule}, M = {self.micro_batches}, {self.network.name}, {encryption}"
        )

    @property
    def ideal_s(self) -> float:
        """The duration of a step with only the bubble."""
        return (self.micro_batches + self.stages - 1) * (FORWARD_S + BACKWARD_S)

    @property
    def predicted_s(self) -> float:
        """The duration with the links, too, but without the vote, by `stages.timetable`."""
        predicted = timetable(
            one_forward_one_backward(self.stages, self.micro_batches, ahead=self.ahead),
            FORWARD_S,
            BACKWARD_S,
            send_s=PAYLOAD_BYTES / rate_Bps(self.network.rate),
            latency_s=self.network.delay_s,
        )
        return predicted.makespan_s


CASES = (
    Case("lan8", LAN, 8),
    Case("lan16", LAN, 16),
    Case("lan24", LAN, 24),
    Case("lan48", LAN, 48),
    Case("fast16", FAST, 16, ahead=4.0),
    Case("lan8-encrypted", LAN, 8, encrypted=True),
    Case("fast16-encrypted", FAST, 16, ahead=4.0, encrypted=True),
)
RIVALS = {LAN: [("GPipe", 8), ("1F1B", 8), ("GPipe", 24), ("1F1B", 24)], FAST: [("GPipe", 16), ("1F1B", 16)]}
NAMES = (*(case.name for case in CASES), "torch", "alone")


def measure(case: Case, steps: int) -> Steps:
    """Return the steps after the warm-up of one group.  Raises `LabError` with the ends of the logs."""
    with tempfile.TemporaryDirectory(prefix="gridtrain-pipeline-") as text, Net() as net:
        folder = Path(text)
        script = [sys.executable, str(Path(__file__).resolve()), "--result", str(folder)]
        script += ["--stages", str(case.stages), "--micro-batches", str(case.micro_batches)]
        script += ["--ahead", str(case.ahead), "--steps", str(steps + WARM_UP_STEPS + 1)]
        plan = Plan(workers=case.stages, encrypted=case.encrypted, link_rate=case.network.rate)
        group = start(net, plan, folder, lambda name: script)
        _delay(group.uplinks.values(), case.network)
        group.wait(TIMEOUT_S)
        found = json.loads((folder / "stage-0.json").read_text())
    return Steps(**{name: values[WARM_UP_STEPS:] for name, values in found.items()})


def torch_rows(network: Network, rounds: int, stages: int = 4) -> list[dict[str, Any]]:
    """Measure torch.distributed.pipelining over gloo on hosts with the same links."""
    with tempfile.TemporaryDirectory(prefix="gridtrain-pipeline-") as text, Net() as net:
        hosts = [net.host(f"torch-{rank}") for rank in range(stages)]
        for host in hosts:
            host.shape(up=network.rate, down=network.rate)
        _delay(hosts, network)
        times = torch_side.in_lab(net, Path(text), stages, RIVALS[network], rounds, PAYLOAD_BYTES)
    return [
        {
            "case": f"torch-{network.name}-{micro_batches}",
            "key": f"{stages} stages, torch's {name}, M = {micro_batches}, {network.name}, gloo",
            "ideal_s": (micro_batches + stages - 1) * (FORWARD_S + BACKWARD_S),
            "predicted_s": None,
            "times_s": found,
        }
        for (name, micro_batches), found in times.items()
    ]


def alone_row(rounds: int, micro_batches: int = 24, stages: int = 4) -> dict[str, Any]:
    """Measure the same work in one process, which only waits, without links and vote."""
    sleep_exactly()
    layers = nn.Sequential(*(Emulated(last=layer == stages - 1) for layer in range(stages)))
    row = torch.zeros(1, elements_of(PAYLOAD_BYTES))

    def step_s() -> float:
        begun_s = time.monotonic()
        for _ in range(micro_batches):
            loss_of(layers(row), row).backward()  # type: ignore[no-untyped-call]
        return time.monotonic() - begun_s

    step_s()  # not counted: libraries are loaded in it
    return {
        "case": "alone",
        "key": f"one stage of {stages} layers, M = {micro_batches}, no link and no vote",
        "ideal_s": micro_batches * stages * (FORWARD_S + BACKWARD_S),
        "predicted_s": None,
        "times_s": [step_s() for _ in range(rounds)],
    }


def rows(steps: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the named cases."""
    found = []
    for case in CASES:
        if case.name in names:
            took = measure(case, steps)
            print(
                f"{case.key}: median {statistics.median(took.step_s) * 1e3:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
            found.append(
                {
                    "case": case.name,
                    "key": case.key,
                    "ideal_s": case.ideal_s,
                    "predicted_s": case.predicted_s,
                    "times_s": took.step_s,
                    "computing_s": took.computing_s,
                    "waiting_s": took.waiting_s,
                }
            )
    if "torch" in names:
        found += [row for network in (LAN, FAST) for row in torch_rows(network, max(3, steps // 2))]
    if "alone" in names:
        found.append(alone_row(3))
    return found


def goals(table: Sequence[dict[str, Any]], stages: int = 4) -> list[tuple[str, str, str]]:
    """Return (goal, bound, result) of all goals whose cases were measured."""
    median_s = {
        row["case"]: statistics.median(row["times_s"]) for row in table if not row["case"].startswith("torch")
    }
    ideal_s = {row["case"]: row["ideal_s"] for row in table}
    torch_s: dict[str, float] = {}
    for row in table:
        if row["case"].startswith("torch"):
            took_s = statistics.median(row["times_s"])
            torch_s[row["case"]] = min(took_s, torch_s.get(row["case"], took_s))
    alone = median_s.get("alone")
    late = alone / ideal_s["alone"] if alone else math.nan  # duration of waits over the requested duration
    found = []

    def add(goal: str, wanted: str, needs: Sequence[str], value: Callable[[], str]) -> None:
        if all(name in median_s or name in torch_s for name in needs):
            found.append((goal, wanted, value()))

    for name in ("lan8", "lan8-encrypted"):
        share = f"M = 8, {name}: share of the bubble-only ideal"
        add(share, ">= 95 %", [name], lambda name=name: f"{ideal_s[name] / median_s[name]:.1%}")
        corrected = f"M = 8, {name}: share of it, with the measured duration of waits"
        add(
            corrected,
            ">= 95 %",
            [name, "alone"],
            lambda name=name: f"{late * ideal_s[name] / median_s[name]:.1%}",
        )
    for case in CASES:
        rival = f"torch-{case.network.name}-{case.micro_batches}"
        if not case.encrypted:
            add(
                f"{case.name}: torch's time over ours",
                ">= 1",
                [case.name, rival],
                lambda case=case, rival=rival: f"{torch_s[rival] / median_s[case.name]:.3f}",
            )
    for micro_batches in (24, 48):
        name = f"lan{micro_batches}"
        add(
            f"M = {micro_batches}: {stages} workers against one",
            ">= 3.5x",
            [name, "alone"],
            lambda name=name, m=micro_batches: f"{alone * m / 24 / median_s[name]:.2f}x",
        )
    add(
        f"M = 16: {FAST.name} against {LAN.name}",
        ">= 85 %",
        ["lan16", "fast16"],
        lambda: f"{median_s['lan16'] / median_s['fast16']:.1%}",
    )
    return found


def _delay(hosts: Iterable[Host], network: Network) -> None:
    if network.delay_s:
        for host in hosts:
            host.shape(delay_s=network.delay_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a worker of the part `runtime`")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--payload", type=int, default=PAYLOAD_BYTES)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--ahead", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--result", type=Path, required=True)
    work(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
