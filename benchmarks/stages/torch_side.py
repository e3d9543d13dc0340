"""The same emulated stages with torch.distributed.pipelining over gloo, each in a process on its own host.

python torch_side.py --rank 2 --stages 4 --meet tcp://10.77.0.2:29500 --cases GPipe:8 1F1B:8 --result FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from stages.emulated import Emulated, elements_of, loss_of, sleep_exactly

if TYPE_CHECKING:
    from lab.net import Net

Case = tuple[str, int]
Spans = dict[Case, list[tuple[float, float]]]
"""Begin and end of each step on this rank, by case (schedule, micro-batches)."""

PORT = 29500
TIMEOUT_S = 120.0


def work(rank: int, stages: int, meet: str, cases: Sequence[Case], rounds: int, payload_bytes: int) -> Spans:
    """Run as one rank: all cases in turn, `rounds` times after a round that is not counted."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    sleep_exactly()
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=stages)
    rows = torch.zeros(1, elements_of(payload_bytes))
    found: Spans = {case: [] for case in cases}
    made = {}
    for name, micro_batches in cases:
        stage = PipelineStage(
            Emulated(last=rank == stages - 1),
            rank,
            stages,
            torch.device("cpu"),
            input_args=rows.clone().requires_grad_(rank > 0),
            output_args=rows.clone().requires_grad_(),
        )
        schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name]
        made[name, micro_batches] = schedule(stage, micro_batches, loss_fn=loss_of, scale_grads=False)
    for turn in range(rounds + 1):  # connections are made in the first one, which is not counted
        for case, runner in made.items():
            inputs = torch.zeros(case[1], elements_of(payload_bytes))
            dist.barrier()
            begun_s = time.monotonic()
            runner.step(*([inputs] if rank == 0 else []), target=inputs if rank == stages - 1 else None)
            if turn:
                found[case].append((begun_s, time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()
    return found


def longest_s(parts: Sequence[Spans]) -> dict[Case, list[float]]:
    """Return the duration of each round by case, from the first begin to the last end of all ranks."""
    return {
        case: [
            max(stop_s for _, stop_s in spans) - min(start_s for start_s, _ in spans)
            for spans in zip(*(part[case] for part in parts), strict=True)
        ]
        for case in parts[0]
    }


def in_lab(
    net: Net, folder: Path, stages: int, cases: Sequence[Case], rounds: int, payload_bytes: int
) -> dict[Case, list[float]]:
    """Measure on the lab's hosts `torch-0`, ...  Raises `LabError` if a rank fails."""
    from lab.ns import LabError

    hosts = [net.hosts[f"torch-{rank}"] for rank in range(stages)]
    script = [sys.executable, str(Path(__file__).resolve()), "--stages", str(stages), "--rounds", str(rounds)]
    script += ["--meet", f"tcp://{hosts[0].address}:{PORT}", "--payload", str(payload_bytes), "--cases"]
    script += [f"{name}:{micro_batches}" for name, micro_batches in cases]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": hosts[0].interface, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    results = [folder / f"torch-{rank}.json" for rank in range(stages)]
    group = [
        host.run([*script, "--rank", str(rank), "--result", str(results[rank])], folder, env=environment)
        for rank, host in enumerate(hosts)
    ]
    until_s = time.monotonic() + TIMEOUT_S
    for process in group:
        if process.wait(max(0.0, until_s - time.monotonic())):
            raise LabError(process.stderr_path.read_text()[-2000:])
    parts = [json.loads(result.read_text()) for result in results]
    return longest_s([{_case(key): spans for key, spans in part.items()} for part in parts])


def _case(text: str) -> Case:
    name, _, micro_batches = text.partition(":")
    return name, int(micro_batches)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a rank of torch.distributed.pipelining")
    for name in ("rank", "stages", "rounds", "payload"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--cases", nargs="+", type=_case, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = work(options.rank, options.stages, options.meet, options.cases, options.rounds, options.payload)
    spans = {f"{name}:{micro_batches}": each for (name, micro_batches), each in found.items()}
    options.result.write_text(json.dumps(spans))


if __name__ == "__main__":
    main()
    os._exit(0)  # see rivals.contract.leave
