"""DDP with the gTop-k hook, in real processes over loopback.

P = 4, 105 integers in buckets:  residuals before + contributions == residuals after + update, exactly
P = 3, 4, a small network:       equal bits everywhere after each step, and it learns
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).parent / "scripts" / "ddp_hook.py"
WITHIN_S = 240.0


def train(folder: Path, world_size: int, kind: str) -> list[list[dict]]:
    """The lines of each rank."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"rank{rank}.jsonl" for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), str(rank), str(world_size)),
                *(str(folder / "rendezvous"), str(output), kind),
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        errors = [process.communicate(timeout=WITHIN_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(errors)
    return [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]


@pytest.mark.parametrize("world_size", [3, 4])
def test_replicas_are_equal_bit_for_bit_and_learn(tmp_path, world_size) -> None:
    ranks = train(tmp_path, world_size, "real")
    ends = [lines.pop() for lines in ranks]
    for at_step in zip(*ranks, strict=True):
        assert len({line["digest"] for line in at_step}) == 1, f"step {at_step[0]['step']}"
    losses = [sum(line["loss"] for line in at_step) / world_size for at_step in zip(*ranks, strict=True)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert all(end["reloaded"] and len(end["saved"]) == 6 for end in ends)
    assert all(end["seen"] and end["unchanged"] for end in ends)


@pytest.mark.parametrize("world_size", [3, 4])
def test_no_gradient_is_lost_also_where_ddp_rebuilds_its_buckets(tmp_path, world_size) -> None:
    ranks = train(tmp_path, world_size, "whole")
    layouts = [line["buckets"] for line in ranks[0]]
    assert layouts[0] != layouts[1] and all(layout == layouts[1] for layout in layouts[1:])
    for lines in ranks:
        assert all(0 < line["sent"] < 105 for line in lines)
        assert lines[-1]["left"] > 0
        if world_size == 4:  # every weight is a power of two
            assert [line["error"] for line in lines] == [0.0] * len(lines)
        bound = (2 + 3) * 2.0**-23  # (log2 P + 3) units in the last place of all that is summed
        assert max(line["relative"] for line in lines) <= bound
