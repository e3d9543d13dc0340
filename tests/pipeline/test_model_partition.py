"""`gridtrain.pipeline.partition`: from a model, devices and links to a plan with its reason and a picture."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from gridtrain.errors import ConfigError
from gridtrain.pipeline import Blueprint, Device, Layer, Sequence, partition
from gridtrain.pipeline.model_partition import Partition
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.training.checkpoint.joint_optimizer import as_one

EVEN = [Layer(f"block{i}", 0.001, 0.002, 10**6, 1000, 10**5) for i in range(8)]


def linears(count: int = 8) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def plan(stages: int | list[Device] = 4, **options: Any) -> Partition:
    return partition(linears(), stages, **{"profile": EVEN, "batch_size": 32, **options})


def test_a_measured_model_is_partitioned_and_described() -> None:
    """Wide layers cost much more time and memory than narrow ones; only one partition has equal halves."""
    model = [nn.Linear(512, 512) for _ in range(4)]
    found = partition(model, 2, example=torch.ones(64, 512), device="cpu", micro_batches=4)
    assert len(found.cuts) == 3 and found.cuts[0] == 0 and found.cuts[-1] == 4
    assert found.micro_batches == 4
    assert [str(spec) for spec in found.boundaries] == ["float32 (n, 512)"]
    parameters = [stage.memory.parameters for stage in found.cut.stages]
    assert sum(parameters) == 4 * 4 * (512 * 512 + 512)
    assert [stage.memory.copies for stage in found.cut.stages] == [3 * each for each in parameters]


def test_a_printed_partition_shows_its_stages_and_reasons() -> None:
    found = plan([Device(memory_bytes=2e7), Device(2.0, 4e7), Device(memory_bytes=2e7)], micro_batches=8)
    assert found.cuts == (0, 2, 6, 8)
    lines = str(found).splitlines()
    print(found)
    assert [" ".join(line.split()[:9]) for line in lines[:3]] == [
        'stage 0 layers 0 to 1, "block0" to "block1"',
        'stage 1 layers 2 to 5, "block2" to "block5"',
        'stage 2 layers 6 to 7, "block6" to "block7"',
    ]
    assert "#" * 12 in lines[0] and " of 20 MB" in lines[0] and " of 40 MB" in lines[1]
    assert found.reason.startswith("Stages begin at block2, block6: stage ")
    assert "is slowest (computing)" in found.reason
    assert "As specified: 8 micro-batches of up to 4 samples, 32 in total, over 3 stages" in found.reason


def test_the_number_of_micro_batches_is_proposed() -> None:
    found = plan()
    assert found.micro_batches > 4
    assert f"Proposed: {found.micro_batches} micro-batches of " in found.reason


def test_the_picture_has_a_bar_for_every_stage() -> None:
    root = ElementTree.fromstring(plan([Device(memory_bytes=1e8)] * 4).svg())
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("stage ")] == [f"stage {s}: 2 layers" for s in range(4)]
    assert len([text for text in texts if text.endswith(" of 100 MB")]) == 4
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) == 1 + 3 + 4 + 4 * (3 + 4 + 1)
    width = float(root.attrib["width"])
    assert all(float(b.attrib["x"]) + float(b.attrib["width"]) <= width for b in boxes[1:])


def test_links_are_two_numbers_or_a_network() -> None:
    slow = plan(network=(0.005, 1e5), micro_batches=8)
    assert "is slowest (its link)" in slow.reason
    assert slow.outlook.step_s > 2 * plan(micro_batches=8).outlook.step_s


def test_the_size_of_an_optimizers_state_is_known() -> None:
    parameters = linears(1)[0].parameters
    for optimizer, copies in (
        ("sgd", 1),
        ("adamw", 3),
        (torch.optim.Adam, 3),
        (torch.optim.SGD(parameters(), lr=0.1), 1),
        (torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), 2),
        (torch.optim.AdamW(parameters()), 3),
        (
            as_one(
                [torch.optim.SGD(parameters(), lr=0.1), torch.optim.RMSprop(nn.Linear(2, 2).parameters())]
            ),
            2,
        ),
        (0.5, 1.5),
    ):
        stage = plan(2, optimizer=optimizer).cut.stages[0]
        assert stage.memory.copies == copies * stage.memory.parameters, optimizer
    stage = plan(2, optimizer="sgd", extra_copies=2.0).cut.stages[0]
    assert stage.memory.copies == 3 * stage.memory.parameters


def test_tied_parameters_in_different_stages_are_named() -> None:
    model = linears()
    model[7].weight = model[0].weight
    model[1].weight = model[2].weight
    found = partition(model, 2, profile=EVEN, batch_size=8, schedule="fill-drain")
    assert found.cuts == (0, 4, 8)
    assert found.shared == {"0.weight = 7.weight": (0, 1)}


def test_a_blueprint_is_partitioned_without_building_it() -> None:
    blueprint = Blueprint(lambda: Sequence(nn.Embedding(50, 8), *linears_of(8, 6), nn.Linear(8, 50)))
    found = partition(blueprint, 4, example=torch.zeros(4, dtype=torch.int64), device="cpu", micro_batches=4)
    built = [blueprint.build(start, stop) for start, stop in zip(found.cuts, found.cuts[1:], strict=False)]
    x: Any = torch.zeros(2, dtype=torch.int64)
    for stage in built:
        for block in stage:
            x = block(x)
    assert x.shape == (2, 50)


def linears_of(width: int, count: int) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"profile": None}, "neither an example nor a profile"),
        ({"profile": EVEN[:3]}, "the profile has 3 layers, but the model has 8 blocks"),
        ({"schedule": "zigzag"}, "fill-drain"),
        ({"micro_batches": "many"}, "micro_batches is 'many'"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"optimizer": "lbfgs"}, "the size of the state of lbfgs is unknown"),
        ({"stages": 9}, "8 layers cannot be divided into 9 stages"),
        ({"memory_bytes": 1e6}, "no partition of 8 layers into 4 stages fits"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(options.pop("stages", 4), **options)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import gridtrain.pipeline, sys; assert 'torch' not in sys.modules; gridtrain.pipeline.Device()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert math.isinf(Device().memory_bytes)


def test_every_stage_of_a_partly_frozen_model_has_something_to_train() -> None:
    def make() -> nn.Sequential:
        layers = [nn.Linear(16, 16) for _ in range(8)]
        for layer in layers[:5]:
            layer.requires_grad_(False)
        return nn.Sequential(*layers)

    model = Blueprint(make)
    plan = partition(model, 3, example=torch.randn(4, 16))
    ModelStages(model, 3, cuts=plan.cuts, device=torch.device("cpu"))  # accepted by grid.pipeline
    with pytest.raises(
        ConfigError, match=r"8 layers, of which 3 are trained, cannot be divided into 4 stages"
    ):
        partition(model, 4, example=torch.randn(4, 16))
