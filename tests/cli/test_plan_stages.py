"""`gridtrain plan --stages`: a described model partitioned over described devices and links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from gridtrain.cli.layers_file import parse_size, read_layers
from gridtrain.cli.main import cli
from gridtrain.errors import ConfigError
from gridtrain.pipeline import profile

LAYERS = """
input = "512B"

[[layer]]
name = "embed"
parameters = "20MB"
forward = "0.1ms"
output = "64kB"

[[layer]]
name = "block"
repeat = 6
parameters = "28MB"
trainable = "14MB"
forward = "1ms"
backward = 0.003
overhead = "50us"
output = "64kB"
gradient = 32000
kept = "1MB"

[[layer]]
name = "head"
forward = "0.8ms"
"""


@pytest.fixture
def layers(tmp_path: Path) -> str:
    path = tmp_path / "layers.toml"
    path.write_text(LAYERS)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def figures(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_a_file_of_layers_is_read(layers: str) -> None:
    found, input_bytes = read_layers(Path(layers))
    assert [layer.name for layer in found] == ["embed", *(f"block{i}" for i in range(6)), "head"]
    assert input_bytes == 512
    embed, block, head = found[0], found[1], found[7]
    assert (embed.forward_s, embed.backward_s, embed.trainable) == pytest.approx((1e-4, 2e-4, 20e6))
    assert (block.backward_s, block.overhead_s) == pytest.approx((0.003, 5e-5))
    assert (block.trainable, block.gradient, block.kept_bytes) == (14_000_000, 32_000, 1_000_000)
    assert (head.parameter_bytes, head.output_bytes) == (0, 0)


def test_the_table_has_the_expected_figures() -> None:
    """12 even layers, 4 stages, fill-drain, ideal links: (8 + 3) x a quarter of 0.96 s, forward twice."""
    arguments = (
        "--stages",
        "4",
        "--layers",
        "12",
        "--parameters",
        "12M",
        "--compute",
        "0.96s",
        "--batch",
        "8",
    )
    arguments += (
        "--activations",
        "1B",
        "--schedule",
        "fill-drain",
        "--micro-batches",
        "8",
        "--latency",
        "0ms",
    )
    found = figures(*arguments)
    period_s = 0.96 / 4 / 8 * 4 / 3 + 4 * 90e-6
    assert found["step_s"] == pytest.approx(11 * period_s, rel=0.01)
    assert found["bubble"] == pytest.approx(3 / 11, abs=0.01)
    assert [len(stage["layers"]) for stage in found["stages"]] == [3, 3, 3, 3]
    done = run(*arguments).output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.splitlines() if "│" in line]
    assert [row[1] for row in cells] == [f"layer{i} to layer{i + 2} (3)" for i in (0, 3, 6, 9)]
    assert [row[4] for row in cells] == ["8 B / 8 B"] * 3 + [""]
    assert [row[5] for row in cells] == ["48 MB"] * 4  # parameters, gradients, Adam's two
    assert "As specified: 8 micro-batches of up to 1 sample, 8 in total, over 4 stages" in done


def test_a_number_of_micro_batches_is_proposed(layers: str) -> None:
    found = figures("--stages", "3", "--layers", layers, "--batch", "48")
    assert found["micro_batches"] in [each["micro_batches"] for each in found["compared"]]
    fastest_s = min(each["step_s"] for each in found["compared"])
    assert found["step_s"] <= 1.02 * fastest_s
    done = run("--stages", "3", "--layers", layers, "--batch", "48").output
    assert "proposed" in done and f"Proposed: {found['micro_batches']} micro-batches" in done
    some = figures("--stages", "3", "--layers", layers, "--batch", "48", "--micro-batches", "4,12")
    assert [each["micro_batches"] for each in some["compared"]] == [4, 12]


def test_cards_links_and_settings_change_the_figures(layers: str) -> None:
    base = ("--stages", "3", "--layers", layers, "--batch", "24", "--micro-batches", "8")
    usual = figures(*base)
    fast = figures(*base, "--speeds", "1,2,1")
    counts = [len(stage["layers"]) for stage in fast["stages"]]
    assert counts[1] > max(counts[0], counts[2])
    assert figures(*base, "--link", "10Mbit")["step_s"] > usual["step_s"]
    assert figures(*base, "--keep-activations")["step_s"] < usual["step_s"]
    held_bytes = [
        sum(stage["held_bytes"] for stage in figures(*base, "--optimizer", o)["stages"])
        for o in ("sgd", "adam")
    ]
    assert held_bytes[1] - held_bytes[0] == 2 * (20_000_000 + 6 * 14_000_000)
    assert usual["stages"][0]["to_next_bytes"] == 24 * 64_000
    assert usual["stages"][0]["from_next_bytes"] in (24 * 32_000, 24 * 64_000)


def test_a_model_that_does_not_fit_is_refused_with_a_remedy(layers: str) -> None:
    done = run("--stages", "3", "--layers", layers, "--memory", "150MB")
    assert isinstance(done.exception, ConfigError)
    assert "no partition of 8 layers into 3 stages fits" in str(done.exception)
    assert "stages, the additional ones on devices of 150 MB" in str(done.exception)
    assert run("--stages", "3", "--layers", layers, "--memory", "200MB,300MB,200MB").exit_code == 0


def test_the_picture_shows_the_stages(layers: str, tmp_path: Path) -> None:
    picture = tmp_path / "stages.svg"
    done = run("--stages", "2", "--layers", layers, "--picture", str(picture))
    assert done.exit_code == 0 and f"picture: {picture}" in done.output
    texts = [
        each.text for each in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "8 layers in 2 stages" in texts


def test_a_profile_becomes_a_file_of_layers(tmp_path: Path) -> None:
    measured = profile([nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)], torch.ones(4, 8), device="cpu")
    path = tmp_path / "measured.toml"
    path.write_text(measured.toml())
    found, input_bytes = read_layers(path)
    assert tuple(found) == measured.layers
    assert input_bytes == measured.input_bytes == 32
    assert figures("--stages", "2", "--layers", str(path))["cuts"][-1] == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--stages", "4"), "--parameters is missing"),
        (("--stages", "0"), "not in the range"),
        (("--layers", "12"), "also specify --stages"),
        (("--batch", "12"), "--batch applies only to a model in stages; also specify --stages"),
        (("--stages", "2", "--layers", "nowhere.toml"), "neither a file nor a number"),
        (
            ("--stages", "2", "--parameters", "1M", "--memory", "8GB,8GB,8GB"),
            "3 values were given for 2 stages",
        ),
        (("--stages", "2", "--parameters", "1M", "--speeds", "fast"), '"fast" is not a list of numbers'),
        (("--stages", "2", "--parameters", "1M", "--optimizer", "lbfgs"), '"lbfgs" is not one of sgd'),
        (("--stages", "2", "--parameters", "1M", "--micro-batches", "64"), "numbers from 1 to 32"),
        (
            ("--stages", "2", "--parameters", "1M", "--micro-batches", "some"),
            "neither auto nor a list of numbers",
        ),
    ],
)
def test_invalid_options_are_refused(arguments: tuple[str, ...], error: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert error in done.output


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "0 layers"),
        ("[[layer]]\ncolour = 1", "'colour' is not a known key"),
        ("[[layer]]\nrepeat = 0", "has name = 'layer0' and repeat = 0"),
        ("[[layer]]\nforward = true", "has the invalid time True"),
        ("[[layer]]\nforward = 'soon'", "is not a time"),
        ("[[layer]]\nkept = 1.5", "has the invalid size 1.5"),
        ("[[layer]]\nkept = 'much'", "is not a size"),
        ("[[block]]\nname = 'a'", "block"),
        ("layer = 3", "layer is not a list of tables"),
        ("][", "Expected|Invalid"),
    ],
)
def test_an_invalid_layers_file_is_refused(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_layers(path)


def test_sizes_are_parsed() -> None:
    sizes = [parse_size(text) for text in ("8GB", "1.5kB", "100B", "512 MiB", "1TB")]
    assert sizes == [8 * 10**9, 1500, 100, 512 * 2**20, 10**12]
