"""What a volunteer allows: decides from rules and sensor readings whether the script may train now.

    rules (gridtrain worker set) ------+
    readings (sensors.py, testing) ----+--> TrainingPolicy.decide --> PolicyDecision(may_train, reasons)
    bytes moved today, the clock ------+
    pause and resume, from the owner --+

Pure: readings and time are arguments.  A rule whose sensor cannot be read pauses the script, as nobody can
tell whether the rule is kept.  Rate limits are only parsed here; the transport enforces them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import get_close_matches

from gridtrain.core.group.sensor_readings import SensorReadings
from gridtrain.errors import ConfigError
from gridtrain.network.transport.rate_limiter import parse_rate

OFF = "off"
SENSORS = ("battery", "gpu", "idle", "temperature")
"""Sensors, by the name of the rule that needs them."""

COOL_BY_C = 5.0
"""Default distance in degrees Celsius between the limits for pausing and for continuing."""

GPU_QUIET_S = 30.0
"""Time without use of the GPU by others before the script continues: a game between two levels uses none."""

MAX_WINDOWS = 16
MAX_BYTES = 1 << 50

_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
_BYTES = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([kKmMgGtT]?)i?B?")
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_UNIT_s = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DEGREES = re.compile(r"(\d{2,3})(?:/(\d{2,3}))?C?")


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A part of the day, in minutes from midnight, local time; it spans midnight if `until` <= `since`."""

    since: int
    until: int

    def contains(self, minute: int) -> bool:
        if self.since < self.until:
            return self.since <= minute < self.until
        return minute >= self.since or minute < self.until

    def __str__(self) -> str:
        return "-".join(f"{m // 60:02}:{m % 60:02}" for m in (self.since, self.until))


@dataclass(frozen=True, slots=True)
class Rules:
    """One volunteer's rules.

    Attributes:
        upload, download: rates as text, such as "20Mbit"; "": no limit.
        budget_bytes: sent and received in a day, together; 0: no limit.
        hours: train only in these parts of the day, local time; (): at any time.
        battery: pause while the computer runs on battery.
        gpu: pause while another program computes on the GPU.
        idle_s: pause until nobody has used the computer for this long; 0: do not.
        hot_C, cool_C: pause at hot_C, continue below cool_C; infinite: no limit.
    """

    upload: str = ""
    download: str = ""
    budget_bytes: int = 0
    hours: tuple[DailyWindow, ...] = ()
    battery: bool = False
    gpu: bool = False
    idle_s: float = 0.0
    hot_C: float = math.inf
    cool_C: float = math.inf

    @property
    def sensors(self) -> tuple[str, ...]:
        """Sensors that these rules need."""
        needed = {
            "battery": self.battery,
            "gpu": self.gpu,
            "idle": self.idle_s > 0,
            "temperature": self.hot_C < math.inf,
        }
        return tuple(name for name in SENSORS if needed[name])

    def with_settings(self, settings: Mapping[str, str]) -> Rules:
        """These rules with other values by key, see `KEYS`.

        Raises:
            ConfigError: an unknown key (the nearest one is named), or a value that cannot be parsed.
        """
        rules = self
        for key, text in settings.items():
            if key not in KEYS:
                near = get_close_matches(key, KEYS, 1)
                raise ConfigError(
                    f"there is no rule {key!r}",
                    remedy=f"did you mean {near[0]}?" if near else f"the rules are {', '.join(KEYS)}",
                )
            rules = KEYS[key](rules, text.strip())
        return rules

    def texts(self) -> dict[str, str]:
        """Texts by key, such that `Rules().with_settings(rules.texts()) == rules`."""
        hot = f"{self.hot_C:.0f}/{self.cool_C:.0f}" if self.hot_C < math.inf else OFF
        return {
            "upload": self.upload or OFF,
            "download": self.download or OFF,
            "budget": _format_bytes(self.budget_bytes) if self.budget_bytes else OFF,
            "hours": ",".join(map(str, self.hours)) or OFF,
            "battery": "pause" if self.battery else "run",
            "gpu": "pause" if self.gpu else "run",
            "idle": f"{self.idle_s:g}s" if self.idle_s else OFF,
            "temperature": hot,
        }


# -- parsing ---------------------------------------------------------------------------------------------


def _wrong(key: str, text: str, remedy: str) -> ConfigError:
    return ConfigError(f"{key}={text[:80]} cannot be used", remedy=remedy)


def _rate(name: str) -> Callable[[Rules, str], Rules]:
    def change(rules: Rules, text: str) -> Rules:
        if text in (OFF, ""):
            text = ""
        else:
            parse_rate(text)  # raises in its own words
        return replace(rules, upload=text) if name == "upload" else replace(rules, download=text)

    return change


def _budget(rules: Rules, text: str) -> Rules:
    if text in (OFF, ""):
        return replace(rules, budget_bytes=0)
    match = _BYTES.fullmatch(text)
    nbytes = round(float(match[1]) * _PREFIX[match[2].lower()]) if match is not None else 0
    if not 1 <= nbytes <= MAX_BYTES:
        raise _wrong("budget", text, "write bytes a day, such as 500MB or 5GB; off: no limit")
    return replace(rules, budget_bytes=nbytes)


def _format_bytes(nbytes: int) -> str:
    """As `_budget` reads it, exactly: in the largest unit that divides it."""
    unit = next(unit for unit, factor in reversed(_PREFIX.items()) if nbytes % factor == 0)
    return f"{nbytes // _PREFIX[unit]}{unit.upper() if unit != 'k' else unit}B"


def _hours(rules: Rules, text: str) -> Rules:
    if text in (OFF, ""):
        return replace(rules, hours=())
    windows: list[DailyWindow] = []
    for part in text.split(","):
        match = _WINDOW.fullmatch(part.strip())
        numbers = [int(group) for group in match.groups()] if match is not None else []
        if not numbers or numbers[0] > 23 or numbers[2] > 24 or max(numbers[1], numbers[3]) > 59:
            raise _wrong("hours", text, "write for instance 22:00-07:00 or 22:00-07:00,12:00-13:00")
        since, until = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
        if until > 1440 or since == until % 1440:
            raise _wrong("hours", text, "each part has to be shorter than a day; off: at any time")
        windows.append(DailyWindow(since, until % 1440))
    if len(windows) > MAX_WINDOWS:
        raise _wrong("hours", text, f"give at most {MAX_WINDOWS} parts of the day")
    return replace(rules, hours=tuple(windows))


def _switch(name: str) -> Callable[[Rules, str], Rules]:
    def change(rules: Rules, text: str) -> Rules:
        if text not in ("pause", "run", OFF):
            raise _wrong(name, text, f"write {name}=pause or {name}=run")
        pauses = text == "pause"
        return replace(rules, battery=pauses) if name == "battery" else replace(rules, gpu=pauses)

    return change


def parse_duration_s(text: str) -> float | None:
    """Seconds from "90s", "15m", "12h" or "7d"; None: it is not a duration."""
    match = _SPAN.fullmatch(text)
    return float(match[1]) * _UNIT_s[match[2]] if match is not None else None


def _idle(rules: Rules, text: str) -> Rules:
    if text in (OFF, ""):
        return replace(rules, idle_s=0.0)
    idle_s = parse_duration_s(text)
    if idle_s is None or not 1 <= idle_s <= 86_400:
        raise _wrong("idle", text, "write a time without use, such as 10m; off: do not pause for it")
    return replace(rules, idle_s=idle_s)


def _temperature(rules: Rules, text: str) -> Rules:
    if text in (OFF, ""):
        return replace(rules, hot_C=math.inf, cool_C=math.inf)
    match = _DEGREES.fullmatch(text)
    hot_C = float(match[1]) if match is not None else 0.0
    cool_C = float(match[2]) if match is not None and match[2] else hot_C - COOL_BY_C
    if not 30 <= hot_C <= 120 or not 20 <= cool_C < hot_C:
        raise _wrong(
            "temperature", text, "write degrees Celsius: 80, or 80/70 to continue below 70; off: no limit"
        )
    return replace(rules, hot_C=hot_C, cool_C=cool_C)


KEYS: dict[str, Callable[[Rules, str], Rules]] = {
    "upload": _rate("upload"),
    "download": _rate("download"),
    "budget": _budget,
    "hours": _hours,
    "battery": _switch("battery"),
    "gpu": _switch("gpu"),
    "idle": _idle,
    "temperature": _temperature,
}


def parse_pairs(words: Iterable[str]) -> dict[str, str]:
    """Rules from "key=value" words.  Raises `ConfigError`."""
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not KEY=VALUE", remedy=f"the keys are {', '.join(KEYS)}")
        settings[key] = value
    return settings


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether the script may train; if not, the reasons and the expected end (None: not known)."""

    may_train: bool
    reasons: tuple[str, ...] = ()
    until: datetime | None = None

    def text(self) -> str:
        """As "battery, until 22:00"; "" if training is allowed."""
        if self.may_train:
            return ""
        until = f", until {self.until:%H:%M}" if self.until is not None else ""
        return ", ".join(self.reasons) + until


class TrainingPolicy:
    """One worker's rules, its pause by the owner, and what earlier readings still mean.

    Attributes:
        rules: replaced as a whole when they change.
        is_paused: the owner has paused the worker.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.is_paused = False
        self._paused_until: datetime | None = None
        self._hot = False
        self._gpu_last_used: datetime | None = None

    def pause(self, until: datetime | None = None) -> None:
        """Pause for the owner until then, or until `resume`."""
        self.is_paused, self._paused_until = True, until

    def resume(self) -> None:
        """End `pause`; the rules still apply."""
        self.is_paused, self._paused_until = False, None

    def unreadable(self, readings: SensorReadings) -> dict[str, str]:
        """Sensors that a rule needs and that cannot be read, each with the reason."""
        found = {name: readings.why_absent(name) for name in self.rules.sensors}
        return {name: why for name, why in found.items() if why}

    def decide(self, readings: SensorReadings, moved_today_bytes: int, now: datetime) -> PolicyDecision:
        """Apply all rules.  `now`: local time without a time zone; `moved_today_bytes`: since midnight."""
        blocking: list[tuple[str, datetime | None]] = []
        if self.is_paused and self._paused_until is not None and now >= self._paused_until:
            self.resume()
        if self.is_paused:
            blocking.append(("on request", self._paused_until))
        if self.rules.hours and not self._open(now):
            blocking.append(("outside its hours", self._next_open(now)))
        if self.rules.budget_bytes and moved_today_bytes >= self.rules.budget_bytes:
            blocking.append(("the day's traffic budget is used up", _midnight(now)))
        for name in self.rules.sensors:
            why = readings.why_absent(name)
            said = (
                f"the sensor of {name} cannot be read ({why})"
                if why
                else self._sensor_reason(name, readings, now)
            )
            if said:
                blocking.append((said, None))
        known = [until for _, until in blocking]
        until = None if None in known else max((u for u in known if u is not None), default=None)
        return PolicyDecision(not blocking, tuple(reason for reason, _ in blocking), until)

    def _sensor_reason(self, name: str, readings: SensorReadings, now: datetime) -> str:
        """Why the readings of sensor `name` pause the script; "": they do not."""
        match name:
            case "battery":
                return "battery" if readings.on_battery else ""
            case "gpu":
                return self._gpu(bool(readings.gpu_used), now)
            case "idle":
                assert readings.idle_s is not None
                return "the computer is in use" if readings.idle_s < self.rules.idle_s else ""
            case _:
                assert readings.temperature_C is not None
                return self._heat(readings.temperature_C)

    def _gpu(self, used: bool, now: datetime) -> str:
        if used:
            self._gpu_last_used = now
        since = self._gpu_last_used
        # A clock that was set back must not pause the script for ever.
        quiet = since is None or not timedelta() <= now - since < timedelta(seconds=GPU_QUIET_S)
        return "" if quiet else "the GPU is in use"

    def _heat(self, temperature_C: float) -> str:
        """Two limits (hysteresis), so that the script does not start and stop every few seconds."""
        self._hot = temperature_C >= (self.rules.cool_C if self._hot else self.rules.hot_C)
        return f"hot: {temperature_C:.0f} C, continues below {self.rules.cool_C:.0f}" if self._hot else ""

    def _open(self, now: datetime) -> bool:
        minute = now.hour * 60 + now.minute
        return any(window.contains(minute) for window in self.rules.hours)

    def _next_open(self, now: datetime) -> datetime:
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        starts = (today + timedelta(days=d, minutes=w.since) for d in (0, 1) for w in self.rules.hours)
        return min(start for start in starts if start > now)


def _midnight(now: datetime) -> datetime:
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
