"""The chart of a partition, as text and as SVG (partition_chart.svg).

After an intended change this writes the picture again:

    PYTHONPATH=. python tests/core/stages/test_partition_chart.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.stages.partition import partition_at
from gridtrain.core.stages.partition_chart import chart_svg, chart_text
from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer, ScheduleKind, StageCostModel
from gridtrain.core.stages.step_time import StepEstimate, estimate_step

PICTURE = Path(__file__).with_name("partition_chart.svg")
LAYERS = [
    Layer(name, forward_s, 2 * forward_s, parameters, 1_000, kept_bytes)
    for name, forward_s, parameters, kept_bytes in (
        ("embedding", 0.0001, 4_000_000, 1_000),
        ("first", 0.002, 1_000_000, 40_000),
        ("second", 0.002, 1_000_000, 40_000),
        ("head", 0.0005, 50_000, 10),
    )
]


TEXT = """\
stage 0  layer 0, "embedding"                0.6 ms  #.......................  link 2 ms  16 MB of 20 MB   ###################.....
stage 1  layers 1 to 2, "first" to "second"  24 ms   ########################  link 4 ms  8.35 MB          #############...........
stage 2  layer 3, "head"                     3 ms    ###.....................  link 2 ms  216 kB of 30 MB  #......................."""  # noqa: E501


def estimate() -> StepEstimate:
    """Three stages: a large one on a small device, a slow one, and an ordinary one."""
    devices = [Device(memory_bytes=20e6), Device(), Device(memory_bytes=30e6)]
    running = ExecutionSettings(
        samples=2, micro_batches=4, order=ScheduleKind.ONE_F_ONE_B, rematerialise=False, message_s=0.0
    )
    network = uniform_network(3, 0.001, 1e6)
    partition = partition_at(StageCostModel(LAYERS, devices, network, running), (0, 1, 3, 4))
    return estimate_step(LAYERS, devices, network, running, 8, partition)


def test_the_chart_as_text() -> None:
    assert chart_text(LAYERS, estimate()) == TEXT


@pytest.mark.parametrize(
    ("bounds", "begin"), [((0, 4), "layers 0 to 3"), ((0, 1, 4), 'layer 0, "embedding"')]
)
def test_the_chart_of_one_stage_has_no_link(bounds: tuple[int, ...], begin: str) -> None:
    stages = len(bounds) - 1
    network, running, devices = uniform_network(stages, 0.001, 1e6), ExecutionSettings(), [Device()] * stages
    partition = partition_at(StageCostModel(LAYERS, devices, network, running), bounds)
    text = chart_text(LAYERS, estimate_step(LAYERS, devices, network, running, 8, partition))
    assert text.startswith(f"stage 0  {begin}") and text.count("\n") == stages - 1
    assert text.count("link") == (stages if stages > 1 else 0)


def test_the_chart_as_a_picture() -> None:
    assert chart_svg(LAYERS, estimate()) == PICTURE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PICTURE.write_text(chart_svg(LAYERS, estimate()), encoding="utf-8")
