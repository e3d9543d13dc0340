"""A pipeline as it really runs: a coordinator, four agents, their scripts, each on a host of its own.

Decides which groups are started and how a step is timed.  Only the computing is emulated (`stages.emulated`):
the rest is `gridtrain worker INVITE -- python ...`, ZeroMQ, the commit vote, over cables that have a rate.

    hub   gridtrain coordinator          host 1   gridtrain worker -> this file: stage 0   } shaped cables,
                                         ...                                              } one bridge
                                         host 4   gridtrain worker -> this file: stage 3   }

    a step   |-- wait for the turn, read the batch, fill, drain, rows, vote --|   from commit to commit
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
class Cable:
    """Of each host: its rate in each direction, and the delay from one host to another."""

    name: str
    rate: str
    delay_s: float


LAN = Cable("1 Gbit/s", "1000Mbit", 0.0)
FAST = Cable("100 Mbit/s, 5 ms", "100Mbit", 0.005)


@dataclass(frozen=True)
class Steps:
    """Of the first stage, in order: seconds from commit to commit, and what they were made of."""

    step_s: list[float]
    computing_s: list[float]
    waiting_s: list[float]


class Samples:
    """One number a sample: the first stage makes activations of it, as an embedding does."""

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
    """One worker."""
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
    """A group, by a short name for the command line."""

    name: str
    cable: Cable
    micro_batches: int
    ahead: float = 1.0
    encrypted: bool = False
    stages: int = 4

    @property
    def key(self) -> str:
        said = "encrypted" if self.encrypted else "in the clear"
        schedule = f"1F1B {self.ahead:g} ahead"
        return f"{self.stages} stages, {schedule}, M = {self.micro_batches}, {self.cable.name}, {said}"

    @property
    def ideal_s(self) -> float:
        """With nothing but the bubble."""
        return (self.micro_batches + self.stages - 1) * (FORWARD_S + BACKWARD_S)

    @property
    def predicted_s(self) -> float:
        """With the links too: what `stages.timetable` says; without the vote."""
        made = timetable(
            one_forward_one_backward(self.stages, self.micro_batches, ahead=self.ahead),
            FORWARD_S,
            BACKWARD_S,
            send_s=PAYLOAD_BYTES / rate_Bps(self.cable.rate),
            latency_s=self.cable.delay_s,
        )
        return made.makespan_s


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
    """One group; the steps after the warm-up.  Raises `LabError` with the ends of the logs."""
    with tempfile.TemporaryDirectory(prefix="gridtrain-pipeline-") as text, Net() as net:
        folder = Path(text)
        script = [sys.executable, str(Path(__file__).resolve()), "--result", str(folder)]
        script += ["--stages", str(case.stages), "--micro-batches", str(case.micro_batches)]
        script += ["--ahead", str(case.ahead), "--steps", str(steps + WARM_UP_STEPS + 1)]
        plan = Plan(workers=case.stages, encrypted=case.encrypted, link_rate=case.cable.rate)
        group = start(net, plan, folder, lambda name: script)
        _delay(group.uplinks.values(), case.cable)
        group.wait(TIMEOUT_S)
        found = json.loads((folder / "stage-0.json").read_text())
    return Steps(**{name: values[WARM_UP_STEPS:] for name, values in found.items()})


def torch_rows(cable: Cable, rounds: int, stages: int = 4) -> list[dict[str, Any]]:
    """torch.distributed.pipelining over gloo on hosts with the same cables."""
    with tempfile.TemporaryDirectory(prefix="gridtrain-pipeline-") as text, Net() as net:
        hosts = [net.host(f"torch-{rank}") for rank in range(stages)]
        for host in hosts:
            host.shape(up=cable.rate, down=cable.rate)
        _delay(hosts, cable)
        times = torch_side.in_lab(net, Path(text), stages, RIVALS[cable], rounds, PAYLOAD_BYTES)
    return [
        {
            "case": f"torch-{cable.name}-{micro_batches}",
            "key": f"{stages} stages, torch's {name}, M = {micro_batches}, {cable.name}, gloo",
            "ideal_s": (micro_batches + stages - 1) * (FORWARD_S + BACKWARD_S),
            "predicted_s": None,
            "times_s": found,
        }
        for (name, micro_batches), found in times.items()
    ]


def alone_row(rounds: int, micro_batches: int = 24, stages: int = 4) -> dict[str, Any]:
    """The same work on one worker, which waits and does nothing else: no line, no vote."""
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
        "key": f"one stage of {stages} layers, M = {micro_batches}, no line and no vote",
        "ideal_s": micro_batches * stages * (FORWARD_S + BACKWARD_S),
        "predicted_s": None,
        "times_s": [step_s() for _ in range(rounds)],
    }


def rows(steps: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of the cases named."""
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
        found += [row for cable in (LAN, FAST) for row in torch_rows(cable, max(3, steps // 2))]
    if "alone" in names:
        found.append(alone_row(3))
    return found


def goals(table: Sequence[dict[str, Any]], stages: int = 4) -> list[tuple[str, str, str]]:
    """(goal, wanted, reached) as far as it was measured."""
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
    late = (
        alone / ideal_s["alone"] if alone else math.nan
    )  # what a wait really takes, over what was asked for
    found = []

    def add(goal: str, wanted: str, needs: Sequence[str], value: Callable[[], str]) -> None:
        if all(name in median_s or name in torch_s for name in needs):
            found.append((goal, wanted, value()))

    for name in ("lan8", "lan8-encrypted"):
        share = f"M = 8, {name}: share of the bubble-only ideal"
        add(share, ">= 95 %", [name], lambda name=name: f"{ideal_s[name] / median_s[name]:.1%}")
        corrected = f"M = 8, {name}: share of it, with what waiting really takes"
        add(
            corrected,
            ">= 95 %",
            [name, "alone"],
            lambda name=name: f"{late * ideal_s[name] / median_s[name]:.1%}",
        )
    for case in CASES:
        rival = f"torch-{case.cable.name}-{case.micro_batches}"
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


def _delay(hosts: Iterable[Host], cable: Cable) -> None:
    if cable.delay_s:
        for host in hosts:
            host.shape(delay_s=cable.delay_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one worker of the part `runtime`")
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
