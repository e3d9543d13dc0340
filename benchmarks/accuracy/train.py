"""What each of our workers runs: an ordinary loop over the SDK.  The first one writes steps.jsonl.

    gridtrain worker INVITATION -- python -m accuracy.train --workload gpt --road gtopk --folder FOLDER

The lines are those of `rivals.train`: step, seconds (from the first batch on, without measuring), loss,
held_out (null where it is not measured), sent_bytes (by this worker's interface, headers included).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import gridtrain
from accuracy.workloads import WORKLOADS
from rivals.measure import sent_bytes

ROADS = ("dense", "dense-adamw", "topk", "gtopk", "local", "local-int8")
"""Exchanges and the optimizer family that each takes."""


def exchange_of(options: argparse.Namespace) -> tuple[str, object]:
    """(family of settings, exchange)."""
    density, every = options.density, options.every
    match options.road:
        case "dense":
            return "dense", gridtrain.Dense()
        case "dense-adamw":
            return "adamw", gridtrain.Dense()
        case "topk":
            return "sparse", gridtrain.TopK(density=density, momentum=0.9)
        case "gtopk":
            return "sparse", gridtrain.GTopK(density=density, momentum=0.9)
        case "local":
            return "local", gridtrain.LocalSteps(every=every, exchange=gridtrain.GTopK(density=density))
        case _:
            sparse = gridtrain.GTopK(density=density, values="int8")
            return "local", gridtrain.LocalSteps(every=every, exchange=sparse)


def train(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.workload]()
    grid = gridtrain.join()
    model = workload.model(options.seed)
    family, exchange = exchange_of(options)
    settings = workload.settings[family]
    inner = settings.build(model, momentum=family != "sparse")
    clip = {} if family == "local" else {"clip_norm": settings.clip_norm}
    optimizer = grid.optimizer(inner, model, exchange=exchange, compare_every=0, **clip)  # type: ignore[arg-type]
    recorder: Recorder | None = None
    rounds = -(-options.steps // options.every) if family == "local" else options.steps
    for x, y in grid.batches(workload.train, batch_size=workload.batch_size, steps=rounds):
        recorder = recorder or Recorder(options.folder)
        loss = workload.loss(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        recorder.step += 1
        if not grid.is_first:
            continue
        seconds, held_out = recorder.seconds(), None
        if recorder.step % options.measure_every == 0:
            with grid.evaluation():
                held_out = workload.held_out(model)
            recorder.paused_s += recorder.seconds() - seconds
        recorder.write(seconds, loss.item(), held_out)


class Recorder:
    """The clock from the first batch on, without measuring; the first worker's lines."""

    def __init__(self, folder: Path) -> None:
        self._path, self._sent = folder / "steps.jsonl", sent_bytes("eth0") or 0
        self._began_s = time.perf_counter()
        self.paused_s = 0.0
        self.step = 0

    def seconds(self) -> float:
        return time.perf_counter() - self._began_s - self.paused_s

    def write(self, seconds: float, loss: float, held_out: float | None) -> None:
        record = {
            "step": self.step,
            "seconds": seconds,
            "loss": loss,
            "held_out": held_out,
            "sent_bytes": (sent_bytes("eth0") or 0) - self._sent,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one of our workers in a run to a target")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--road", choices=ROADS, required=True)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=16, help="local steps of one exchange")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--measure-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # several workers share this machine's cores
    train(parse())
