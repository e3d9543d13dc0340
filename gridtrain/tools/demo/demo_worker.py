"""The training script of each worker of the demo: an ordinary loop that uses the public SDK.

The script makes the model, reads the data and measures losses and times; it handles no sockets or ranks.

    gridtrain worker INVITATION -- python -m gridtrain.tools.demo.demo_worker --metrics FOLDER
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor

import gridtrain
from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.recipe import (
    BATCH_SIZE,
    DENSITY,
    HELD_OUT_WINDOWS,
    MEASURE_EVERY,
    RECIPES,
    SIZES,
    exchange_for,
)
from gridtrain.tools.demo.step_records import STEPS_FILE, SentBytes, StepRecord, StepTimes, write_sent
from gridtrain.tools.demo.text_corpus import load_corpus


class StepRecorder:
    """Measures the time that each step takes and, on the first worker, writes a record of the step.

    The clock starts with the first batch and is paused while the held-out loss is being measured.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS_FILE
        self._started_s = time.perf_counter()
        self._paused_s = 0.0
        self._loss: float | None = None
        self._times = StepTimes()

    def exclude_time(self, elapsed_s: float) -> None:
        """Exclude from the clock the time that a held-out evaluation took."""
        self._paused_s += elapsed_s

    def count_step(self, loss: float, timings: dict[str, float]) -> float:
        """Record a step; return the clock's time in seconds.

        Args:
            timings: the optimizer's timings of the step, in seconds by name.
        """
        self._loss = loss if self._loss is None else 0.9 * self._loss + 0.1 * loss
        seconds = time.perf_counter() - self._started_s - self._paused_s
        select = self._times.select + timings["selecting_s"]
        communicate = self._times.communicate + timings["communicating_s"]
        wait = self._times.wait + timings["waiting_s"]
        # The model accounts for the rest: reading the batch, forward, backward, applying the update.
        self._times = StepTimes(seconds - select - communicate - wait, select, communicate, wait)
        return seconds

    def write(self, step: int, seconds: float, held_out: float | None, sent: SentBytes) -> None:
        assert self._loss is not None
        record = StepRecord(step, seconds, self._loss, held_out, sent, self._times)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.to_line())


@torch.no_grad()
def held_out_loss(model: ByteGPT, held_out: tuple[Tensor, Tensor]) -> float:
    """Return the mean cross entropy over `held_out`, (x, y), in nats per byte."""
    return float(model.loss(*held_out))


def sent_bytes_so_far(grid: gridtrain.Grid) -> SentBytes:
    return SentBytes.of_traffic({name: sent for name, (sent, _) in grid.traffic.items()})


def train(options: argparse.Namespace) -> None:
    recipe, size = RECIPES[options.exchange], SIZES[options.model]
    corpus = load_corpus()
    held_out = Windows(corpus.held_out, size.context).evenly_spaced(HELD_OUT_WINDOWS)
    windows = Windows(corpus.train, size.context)

    grid = gridtrain.join()
    model = ByteGPT(size, seed=options.seed)
    momentum = recipe.momentum if options.exchange == "dense" else 0.0
    sgd = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=momentum)
    exchange = exchange_for(options.exchange, options.density)
    optimizer = grid.optimizer(sgd, model, exchange=exchange, clip_norm=recipe.clip_norm)

    recorder: StepRecorder | None = None
    for x_BT, y_BT in grid.batches(windows, batch_size=BATCH_SIZE, steps=options.steps):
        recorder = recorder or StepRecorder(options.metrics)
        loss = model.loss(x_BT, y_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

        seconds = recorder.count_step(loss.item(), optimizer.timings)
        grid.report(loss=loss.item())
        if not grid.is_first:
            continue
        step, sent, measured = grid.step, sent_bytes_so_far(grid), None
        if step % options.measure_every == 0 or step == options.steps:
            began_s = time.perf_counter()
            with grid.evaluation():
                measured = held_out_loss(model, held_out)
            recorder.exclude_time(time.perf_counter() - began_s)
        recorder.write(step, seconds, measured, sent)
    write_sent(options.metrics, str(os.getpid()), sent_bytes_so_far(grid))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one worker of `gridtrain demo`")
    parser.add_argument("--exchange", choices=sorted(RECIPES), default="gtopk")
    parser.add_argument("--density", type=float, default=DENSITY)
    parser.add_argument("--model", choices=sorted(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--measure-every", type=int, default=MEASURE_EVERY, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, required=True, metavar="FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # several workers share this machine's cores
    train(parse())
