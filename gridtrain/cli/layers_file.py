"""Reads a model's layers for `gridtrain plan --stages` from a TOML file, or makes N equal layers.

A person or `gridtrain.pipeline.profile` writes the file:

input = "2kB"              # per sample, input of the first layer

[[layer]]
name = "block"
repeat = 12                # equal layers: block0, block1 ...
parameters = "28MB"        # bytes, including buffers; `trainable`: the bytes that are not frozen
forward = "1ms"            # per sample, on a device of speed 1; a plain number means seconds
backward = "2ms"           # twice forward if left out
overhead = "50us"          # added to each forward and backward pass of a micro-batch of any size
output = "64kB"            # per sample, to the next layer; `gradient`: the bytes sent back, if fewer
kept = "1MB"               # per sample, kept in the layer for the backward pass
work = "400kB"             # per sample, also held while the layer runs
fixed_work = "1MB"         # the same, for a micro-batch of any size
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtrain.cli.network_file import parse_seconds, read_toml, tables_named
from gridtrain.errors import ConfigError
from gridtrain.quantities import parse_bytes
from gridtrain.tools.options.runfile import check_keys

if TYPE_CHECKING:
    from gridtrain.core.stages.stage_cost import Layer

MAX_LAYERS = 2000
_SIZES = ("parameters", "trainable", "output", "gradient", "kept", "work", "fixed_work")


def parse_size(text: str) -> int:
    """Parse a size such as "28MB"; return it in bytes.  Raises `ConfigError` if `text` is not a size."""
    found = parse_bytes(text)
    if found is None:
        raise ConfigError(
            f"{text!r} is not a size", remedy='write a number and a unit, such as "28MB" or "8GiB"'
        )
    return found


def uniform_layers(
    count: int, parameters: int, compute_s: float, batch: int, output_bytes: int
) -> list[Layer]:
    """Return `count` equal layers of a model with `parameters` float32 parameters.

    Args:
        compute_s: the time in which the whole model computes a step of `batch` samples.
        output_bytes: the size of each layer's output per sample.

    Raises:
        ConfigError: `count` is not from 1 to `MAX_LAYERS`.
    """
    from gridtrain.core.stages.stage_cost import Layer

    if not 1 <= count <= MAX_LAYERS:
        raise ConfigError(f"the number of layers is {count}", remedy=f"give 1 to {MAX_LAYERS} layers")
    sample_s = compute_s / (count * batch)
    nbytes = math.ceil(4 * parameters / count)
    return [Layer(f"layer{i}", sample_s / 3, 2 * sample_s / 3, nbytes, output_bytes) for i in range(count)]


def read_layers(path: Path) -> tuple[list[Layer], int]:
    """Read a file in the format shown at the top of this module.

    Returns the layers, and the bytes of one input sample.

    Raises:
        ConfigError: the file cannot be read, or does not describe layers.
    """
    document = read_toml(path, "pipeline.md", ("input", "layer"))
    entries = tables_named(path, document, "layer")
    layers = [layer for number, entry in enumerate(entries) for layer in _layers(path, number, entry)]
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise ConfigError(f"{path} has {len(layers)} layers", remedy=f"give 1 to {MAX_LAYERS} layers")
    return layers, _bytes(f"{path}: input", document.get("input", 0))


def _layers(path: Path, number: int, entry: dict[str, Any]) -> list[Layer]:
    from gridtrain.core.stages.stage_cost import Layer

    name = entry.get("name", f"layer{number}")
    where = f'{path}: layer "{name}"'
    check_keys(f"{where}:", entry, ("name", "repeat", "forward", "backward", "overhead", *_SIZES))
    repeat = entry.get("repeat", 1)
    if not isinstance(name, str) or type(repeat) is not int or not 1 <= repeat <= MAX_LAYERS:
        raise ConfigError(
            f"{where} has name = {name!r} and repeat = {repeat!r}",
            remedy=f"write the name as a string, and repeat as an integer from 1 to {MAX_LAYERS}",
        )
    forward_s = _seconds(where, entry.get("forward", 0))
    sizes = {key: _bytes(where, entry[key]) for key in _SIZES if key in entry}
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
    return [replace(one, name=f"{name}{i}") for i in range(repeat)] if repeat > 1 else [one]


def _seconds(where: str, value: Any) -> float:
    if isinstance(value, str):
        return parse_seconds(value, where)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6:
        return float(value)
    raise ConfigError(
        f"{where} has the invalid time {value!r}", remedy='write "1.5ms", or seconds as a number'
    )


def _bytes(where: str, value: Any) -> int:
    if isinstance(value, str):
        return parse_size(value)
    if type(value) is int and 0 <= value < 1e18:
        return value
    raise ConfigError(
        f"{where} has the invalid size {value!r}", remedy='write "28MB", or bytes as an integer'
    )
