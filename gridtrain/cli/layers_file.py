"""A model's layers as people, or `gridtrain.pipeline.profile`, describe them: a TOML file, or N equal ones.

input = "2kB"              # of one sample, of the first layer

[[layer]]
name = "block"
repeat = 12                # equal layers: block0, block1 ...
parameters = "28MB"        # bytes, buffers too; trainable = less, where some are frozen
forward = "1ms"            # of one sample, on a card of speed 1; or a number of seconds
backward = "2ms"           # left out: twice forward
overhead = "50us"          # of each forward and each backward of a micro-batch of any size
output = "64kB"            # of one sample, to the next layer; gradient = of what comes back, if less
kept = "1MB"               # of one sample, kept for backward inside the layer
work = "400kB"             # of one sample, held beside that while the layer runs
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtrain.errors import ConfigError

if TYPE_CHECKING:
    from gridtrain.core.stages.stage_cost import Layer

MOST_LAYERS = 2000
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_KNOWN_KEYS = {"name", "repeat", "parameters", "trainable", "forward", "backward", "overhead"}
_KNOWN_KEYS |= {"output", "gradient", "kept", "work", "fixed_work"}


def parse_bytes(text: str) -> int:
    """Bytes from "8GB", "64kB", "512MiB".

    Raises:
        ConfigError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size", remedy='write a number and B, kB, MB, GB, or "8GiB"')
    binary = text.rstrip().endswith("iB")
    scale = 1024.0 ** " kMGT".index(match[2] or " ") if binary else _PREFIX[match[2]]
    return round(float(match[1]) * scale)


def uniform_layers(
    count: int, parameters: int, compute_s: float, batch: int, output_bytes: int
) -> list[Layer]:
    """`count` equal layers of a model with float32 `parameters` that computes a step in `compute_s`."""
    from gridtrain.core.stages.stage_cost import Layer

    if not 1 <= count <= MOST_LAYERS:
        raise ConfigError(f"{count} layers", remedy=f"give 1 to {MOST_LAYERS}")
    sample_s = compute_s / (count * batch)
    nbytes = math.ceil(4 * parameters / count)
    return [Layer(f"layer{i}", sample_s / 3, 2 * sample_s / 3, nbytes, output_bytes) for i in range(count)]


def read_layers(path: Path) -> tuple[list[Layer], int]:
    """(layers, bytes of a sample of the input) of a file as shown at the top of this module.

    Raises:
        ConfigError: the file cannot be read, or describes no layers.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", remedy="write it as docs/pipeline-partition.md shows") from None
    entries = document.get("layer", [])
    unknown = set(document) - {"input", "layer"}
    if unknown or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"{path}: {sorted(unknown) or 'layer'}", remedy="a file has input and [[layer]] only"
        )
    layers = [layer for number, entry in enumerate(entries) for layer in _layers(path, number, entry)]
    if not 1 <= len(layers) <= MOST_LAYERS:
        raise ConfigError(f"{path}: {len(layers)} layers", remedy=f"give 1 to {MOST_LAYERS}")
    return layers, _bytes(f"{path}: input", document.get("input", 0))


def _layers(path: Path, number: int, entry: dict[str, Any]) -> list[Layer]:
    from gridtrain.core.stages.stage_cost import Layer

    name = entry.get("name", f"layer{number}")
    where = f'{path}: layer "{name}"'
    if unknown := set(entry) - _KNOWN_KEYS:
        raise ConfigError(
            f"{where} has {sorted(unknown)}", remedy=f"a layer has {', '.join(sorted(_KNOWN_KEYS))}"
        )
    repeat = entry.get("repeat", 1)
    if not isinstance(name, str) or type(repeat) is not int or not 1 <= repeat <= MOST_LAYERS:
        raise ConfigError(f"{where} is repeated {repeat!r} times", remedy=f"give repeat = 1 to {MOST_LAYERS}")
    forward_s = _seconds(where, entry.get("forward", 0))
    named = ("parameters", "trainable", "output", "gradient", "kept", "work", "fixed_work")
    sizes = {key: _bytes(where, entry[key]) for key in named if key in entry}
    one = Layer(
        name,
        forward_s,
        _seconds(where, entry["backward"]) if "backward" in entry else 2 * forward_s,
        sizes.get("parameters", 0),
        sizes.get("output", 0),
        sizes.get("kept", 0),
        _seconds(where, entry.get("overhead", 0)),
        sizes.get("trainable"),
        sizes.get("gradient"),
        sizes.get("work"),
        sizes.get("fixed_work", 0),
    )
    return [_renamed(one, f"{name}{i}") for i in range(repeat)] if repeat > 1 else [one]


def _renamed(layer: Layer, name: str) -> Layer:
    from dataclasses import replace

    return replace(layer, name=name)


def _seconds(where: str, value: Any) -> float:
    from gridtrain.cli.network_file import parse_seconds

    if isinstance(value, str):
        return parse_seconds(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6:
        return float(value)
    raise ConfigError(f"{where} has a time of {value!r}", remedy='write "1.5ms", or seconds as a number')


def _bytes(where: str, value: Any) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if type(value) is int and 0 <= value < 1e18:
        return value
    raise ConfigError(f"{where} has a size of {value!r}", remedy='write "28MB", or bytes as an integer')
