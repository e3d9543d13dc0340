"""What the sensors of a worker's machine read: battery, GPU, idle time, temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_READING = {"battery": "on_battery", "gpu": "gpu_used", "idle": "idle_s", "temperature": "temperature_C"}


@dataclass(frozen=True, slots=True)
class SensorReadings:
    """What the sensors say now.

    Attributes:
        on_battery: the computer runs on its battery.
        gpu_used: by another program.
        idle_s: since somebody touched the computer.
        temperature_C: of the hottest part that is watched.
        absent: sensors that cannot be read, by name, and why; what they would say is None.
    """

    on_battery: bool | None = None
    gpu_used: bool | None = None
    idle_s: float | None = None
    temperature_C: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def why_absent(self, name: str) -> str:
        """Empty: it can be read."""
        value = getattr(self, _READING[name])
        return "" if value is not None else self.absent.get(name, "it says nothing")


assert set(_READING.values()) < {known.name for known in fields(SensorReadings)}
