"""Measures what stalled training loops cost the other workers, with `wait="all"` and `wait="auto"`.

    python stragglers.py one  [--out FILE]    four workers, 20 ms a batch; one stalls 3 s every 40 batches
    python stragglers.py many [--out FILE]    eight workers, 50 ms a batch; each stalls 10 % of the time
    python stragglers.py hivemind             as `one`, with hivemind's optimizer (make rivals NAMES=hivemind)

Workers are threads of one process with connections in memory; hivemind's are processes on loopback.
Computing and stalls are waits, so that they do not use the processors.  `one`: the time in which the other
three take 400 batches, over that of the calm run with wait="all" (hivemind: over that of its own calm run).
`many`: the samples per second of the whole group, over those of the calm run and over the share of time in
which workers do not stall; and the held-out loss after the same samples.
"""

from __future__ import annotations

import copy
import json
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gridtrain
import record
from lab.group import free_port
from rivals.hosts import Loopback, run_ranks
from stalls import (
    BATCH_SIZE,
    ONE_COMPUTE_S,
    ONE_EVERY,
    ONE_STALL_S,
    WARM_UP_BATCHES,
    Stalls,
    Straggling,
    make_model,
)

EXCHANGES: dict[str, Any] = {
    "gtopk": gridtrain.GTopK(density=0.05),
    "local steps": gridtrain.LocalSteps(every=8, exchange=gridtrain.GTopK(density=0.05)),
    "dense": gridtrain.Dense(),
}
HIVEMIND_S = 600.0
MANY_COMPUTE_S, MANY_STALL_S, MANY_SHARE = 0.05, 3.0, 0.1


def make_data(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (size, 20) and labels from a fixed random network, a tenth of them at random."""
    dice = torch.Generator().manual_seed(seed)
    teacher = torch.randn(20, 10, generator=torch.Generator().manual_seed(77))
    inputs = torch.randn(size, 20, generator=dice)
    labels = (inputs.tanh() @ teacher).argmax(1)
    noise = torch.rand(size, generator=dice) < 0.1
    return inputs, torch.where(noise, torch.randint(0, 10, (size,), generator=dice), labels)


def run(
    exchange: Any, wait: str, stalls: list[Stalls], compute_s: float, data: Any, **length: int
) -> dict[str, Any]:
    """Train with one worker for each of `stalls`; return seconds, steps, samples and the held-out loss."""
    initial, numbers = make_model(), count()
    results: dict[int, dict[str, Any]] = {}
    lock = threading.Lock()
    held_out = make_data(4000, 999)

    def train(grid: gridtrain.Grid) -> None:
        with lock:
            number = next(numbers)
        model = copy.deepcopy(initial)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = grid.optimizer(inner, model, exchange=exchange, wait=wait)
        taken, began_s, ended_s = 0, 0.0, 0.0
        for inputs, labels in grid.batches(data, batch_size=BATCH_SIZE, **length):
            taken += 1
            if taken == WARM_UP_BATCHES:
                began_s, first = time.monotonic(), grid.step
            stalls[number].batch(compute_s)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended_s = time.monotonic()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(held_out[0]), held_out[1]))
        digest = hash(tuple(float(each.detach().double().sum()) for each in model.parameters()))
        results[number] = {
            "seconds": ended_s - began_s,
            "steps": grid.step - first,
            "batches": taken,
            "loss": loss,
            "digest": digest,
        }

    gridtrain.local(train, workers=len(stalls))
    assert len({each["digest"] for each in results.values()}) == 1, "the replicas differ"
    return results[0] | {"batches": [results[number]["batches"] for number in sorted(results)]}


def one(steps: int) -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(*make_data(8192, 1))
    found: dict[str, Any] = {}
    for name, exchange in EXCHANGES.items():
        turns = max(1, steps // getattr(exchange, "every", 1))
        seconds: dict[str, float] = {}
        for wait, is_stalled in (("all", False), ("auto", False), ("all", True), ("auto", True)):
            stalls = [Stalls() for _ in range(4)]
            if is_stalled:
                stalls[3] = Stalls(every=ONE_EVERY, stall_s=ONE_STALL_S)
            seen = run(exchange, wait, stalls, ONE_COMPUTE_S, data, steps=turns)
            key = f"{wait}, {'stalled' if is_stalled else 'calm'}"
            seconds[key] = seen["seconds"]
            print(f"{name:12} {key:14} {seen['seconds']:6.1f} s  batches {seen['batches']}", flush=True)
        found[name] = seconds | {
            "waiting_ratio": seconds["all, stalled"] / seconds["all, calm"],
            "auto_ratio": seconds["auto, stalled"] / seconds["all, calm"],
        }
        print(f"{name:12} all x{found[name]['waiting_ratio']:.2f}, auto x{found[name]['auto_ratio']:.3f}")
    return found


def many(seeds: int) -> dict[str, Any]:
    data = torch.utils.data.TensorDataset(*make_data(12_800, 1))
    found: dict[str, Any] = {"runs": []}
    for seed in range(seeds):
        by_name: dict[str, dict[str, Any]] = {}
        for name, wait, share in (
            ("calm", "all", 0.0),
            ("all", "all", MANY_SHARE),
            ("auto", "auto", MANY_SHARE),
        ):
            stalls = [Stalls(stall_s=MANY_STALL_S, share=share, seed=100 * seed + i) for i in range(8)]
            exchange = gridtrain.GTopK(density=0.05)
            seen = run(exchange, wait, stalls, MANY_COMPUTE_S, data, epochs=1, seed=seed)
            by_name[name] = seen
            print(f"seed {seed} {name:5} {seen['seconds']:6.1f} s  loss {seen['loss']:.4f}", flush=True)
        calm, auto = by_name["calm"], by_name["auto"]
        rate = calm["seconds"] / auto["seconds"]
        found["runs"].append(
            {
                "seconds": {name: seen["seconds"] for name, seen in by_name.items()},
                "loss": {name: seen["loss"] for name, seen in by_name.items()},
                "of_awake": rate / (1 - MANY_SHARE),
                "loss_ratio": auto["loss"] / calm["loss"],
            }
        )
        print(f"seed {seed}: {rate / (1 - MANY_SHARE):.3f} of the awake workers' rate", flush=True)
    return found


def hivemind(batches: int) -> dict[str, Any]:
    calm, stalled = (_hivemind_seconds(batches, is_stalled=each) for each in (False, True))
    for name, figures in (("calm", calm), ("stalled", stalled)):
        print(f"hivemind {name:8} {figures['seconds']:6.1f} s, {figures['epochs']} averagings", flush=True)
    print(f"hivemind x{stalled['seconds'] / calm['seconds']:.2f}")
    return {"calm": calm, "stalled": stalled, "ratio": stalled["seconds"] / calm["seconds"]}


def _hivemind_seconds(batches: int, *, is_stalled: bool) -> dict[str, float]:
    """Run four workers; return the longest time of the three that do not stall, and the averagings."""
    with tempfile.TemporaryDirectory(prefix="gridtrain-stragglers-") as place:
        common = Straggling(batches=batches, is_stalled=is_stalled)
        hosts = [Loopback()] * 4
        outs = run_ranks(hosts, "hivemind", "rivals.straggler", common, Path(place), HIVEMIND_S, free_port())
        others = [json.loads(Path(out).read_text()) for out in outs[:3]]
    return {name: max(each[name] for each in others) for name in ("seconds", "epochs")}


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("what", choices=("one", "many", "hivemind"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "many":
        found = many(options.seeds)
    else:
        found = one(options.steps) if options.what == "one" else hivemind(options.steps)
    record.write(options.out, None, **{options.what: found})


if __name__ == "__main__":
    main()
