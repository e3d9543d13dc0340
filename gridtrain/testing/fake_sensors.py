"""Preset sensor readings (battery, GPU, idle time, temperature) for tests and trials of a volunteer's rules.

If `--sensors` (or `GRIDTRAIN_SENSORS`) names a file, `gridtrain worker` reads this file instead of the
machine's sensors.

    sensors = FakeSensors(on_battery=False)
    sensors.say(on_battery=True)

    FileSensors(path)       the file contains JSON such as {"on_battery": true, "temperature_C": 71.5}
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gridtrain.core.group.sensor_readings import SensorReadings
from gridtrain.errors import ConfigError

MAX_FILE_BYTES = 4096
NO_READING = "the fake sensors have no such reading"
_NAMES = {
    "on_battery": ("battery", bool),
    "gpu_used": ("gpu", bool),
    "idle_s": ("idle", float),
    "temperature_C": ("temperature", float),
}


class FakeSensors:
    """Returns the readings that were last set.  `say` may be called from another thread.

    Args:
        said: any of the readings `on_battery`, `gpu_used`, `idle_s` and `temperature_C`; a reading that is
            None or not given is absent.

    Raises:
        ConfigError: a reading is unknown or has the wrong type.
    """

    def __init__(self, **said: bool | float | None) -> None:
        self._readings = _readings(said)
        self._values: dict[str, Any] = dict(said)

    def say(self, **said: bool | float | None) -> None:
        """Change some readings; None makes a reading absent.  Raises the same errors as the constructor."""
        self._values |= said
        self._readings = _readings(self._values)

    def read(self, ours: Collection[int], names: Collection[str] = ()) -> SensorReadings:
        return self._readings


class FileSensors:
    """Returns the readings in a JSON file, which `read` reads again each time.

    `read` raises `ConfigError` if the file cannot be read or is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, ours: Collection[int], names: Collection[str] = ()) -> SensorReadings:
        try:
            with open(self._path, "rb") as file:
                said = json.loads(file.read(MAX_FILE_BYTES))
            if not isinstance(said, dict):
                raise ValueError("the file does not contain a JSON object")
            return _readings(said)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the sensors in {self._path} cannot be read: {error}",
                remedy="write a JSON object to another file and rename it to this name",
            ) from None


def _readings(said: dict[str, Any]) -> SensorReadings:
    unknown = said.keys() - _NAMES.keys()
    if unknown:
        raise ConfigError(
            f"{min(unknown)!r} is not a known reading", remedy=f"use one of {', '.join(_NAMES)}"
        )
    values: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for field, (name, kind) in _NAMES.items():
        value = said.get(field)
        right = type(value) is bool if kind is bool else isinstance(value, int | float)
        if value is None:
            absent[name] = NO_READING
        elif right:
            values[field] = value if kind is bool else float(value)
        else:
            raise ConfigError(
                f"{field} is {value!r}, which has the wrong type", remedy=f"use the type {kind.__name__}"
            )
    return SensorReadings(**values, absent=absent)
