"""The same emulated stages with torch.distributed.pipelining over gloo, each in a process on its own host."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rivals.contract import leave
from rivals.gloo import join
from stages.runtime import PAYLOAD_BYTES, STAGES, TorchStage
from stages.waiting import Waiting, elements_of, loss_of, sleep_exactly


def main(own: TorchStage) -> None:
    """Run as one rank: all cases in turn; write begin and end of each step of each case."""
    sleep_exactly()
    join(own)
    rank = own.rank
    rows = torch.zeros(1, elements_of(PAYLOAD_BYTES))
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in own.cases}
    made = {}
    for case in own.cases:
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
    for turn in range(own.rounds + 1):  # connections are made in the first one, which is not counted
        for case, runner in made.items():
            inputs = torch.zeros(int(case.partition(":")[2]), elements_of(PAYLOAD_BYTES))
            dist.barrier()
            begun_s = time.monotonic()
            runner.step(*([inputs] if rank == 0 else []), target=inputs if rank == STAGES - 1 else None)
            if turn:
                found[case].append((begun_s, time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()
    Path(own.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(TorchStage.from_argv())
    leave()
