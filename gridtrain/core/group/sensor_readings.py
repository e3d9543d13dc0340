"""Readings of the sensors of a worker's machine: battery, GPU, idle time, temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_READING = {"battery": "on_battery", "gpu": "gpu_used", "idle": "idle_s", "temperature": "temperature_C"}


@dataclass(frozen=True, slots=True)
class SensorReadings:
    """Current sensor values; None: not read.

    Attributes:
        on_battery: the computer runs on its battery.
        gpu_used: another program uses the GPU.
        idle_s: time since the last input of a user.
        temperature_C: of the hottest part that is watched.
        absent: reasons by name of the sensors that cannot be read.
    """

    on_battery: bool | None = None
    gpu_used: bool | None = None
    idle_s: float | None = None
    temperature_C: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def why_absent(self, name: str) -> str:
        """Why this sensor cannot be read; empty: it can."""
        value = getattr(self, _READING[name])
        return "" if value is not None else self.absent.get(name, "it reports no value")


assert set(_READING.values()) < {known.name for known in fields(SensorReadings)}
