"""Values of a machine's sensors (battery, GPU, idle time, temperature), and reasons why some are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_READING = {"battery": "on_battery", "gpu": "gpu_used", "idle": "idle_s", "temperature": "temperature_C"}
NOT_NEEDED = "not read, because no rule needs it"
NO_VALUE = "the sensor reports no value"


@dataclass(frozen=True, slots=True)
class SensorReadings:
    """Current sensor values; None for each sensor that was not read.

    Attributes:
        on_battery: whether the computer is running on battery power.
        gpu_used: whether another program is using the GPU.
        idle_s: time since the last user input.
        temperature_C: temperature of the hottest monitored component.
        absent: the reasons why sensors were not read, by sensor name.
    """

    on_battery: bool | None = None
    gpu_used: bool | None = None
    idle_s: float | None = None
    temperature_C: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def why_absent(self, name: str) -> str:
        """Return the reason why this sensor has no value, or an empty string if it has one."""
        value = getattr(self, _READING[name])
        return "" if value is not None else self.absent.get(name, NO_VALUE)


assert set(_READING.values()) < {known.name for known in fields(SensorReadings)}
