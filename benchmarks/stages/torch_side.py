"""The same emulated stages with torch.distributed.pipelining over gloo, each in a process on its own host.

python -m stages.torch_side RANK FOLDER tcp://10.77.0.2:29500 ROUNDS GPipe:8 1F1B:8     writes spans-RANK.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rivals.contract import leave
from stages.runtime import PAYLOAD_BYTES, STAGES
from stages.waiting import Waiting, elements_of, loss_of, sleep_exactly


def main(rank: int, folder: str, meet: str, rounds: int, cases: Sequence[str]) -> None:
    """Run as one rank: all cases in turn; write begin and end of each step of each case."""
    torch.set_num_threads(1)
    sleep_exactly()
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=STAGES)
    rows = torch.zeros(1, elements_of(PAYLOAD_BYTES))
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    made = {}
    for case in cases:
        name, _, micro_batches = case.partition(":")
        stage = PipelineStage(
            Waiting(last=rank == STAGES - 1),
            rank,
            STAGES,
            torch.device("cpu"),
            input_args=rows.clone().requires_grad_(rank > 0),
            output_args=rows.clone().requires_grad_(),
        )
        schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name]
        made[case] = schedule(stage, int(micro_batches), loss_fn=loss_of, scale_grads=False)
    for turn in range(rounds + 1):  # connections are made in the first one, which is not counted
        for case, runner in made.items():
            inputs = torch.zeros(int(case.partition(":")[2]), elements_of(PAYLOAD_BYTES))
            dist.barrier()
            begun_s = time.monotonic()
            runner.step(*([inputs] if rank == 0 else []), target=inputs if rank == STAGES - 1 else None)
            if turn:
                found[case].append((begun_s, time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"spans-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
    leave()
