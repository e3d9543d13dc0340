"""Decides from a volunteer's rules (times of day, battery, GPU, idle, temperature, budget) whether to train.

    rules (gridtrain worker set) ------+
    readings (sensors.py, testing) ----+--> TrainingPolicy.decide --> PolicyDecision(may_train, reasons)
    bytes moved today, the clock ------+
    pause and resume, from the owner --+

This module is pure: readings and time are arguments.  `sensors` decides which load counts as GPU use.  A rule
whose sensor cannot be read pauses the script, because training might break the rule.
This module only parses rate limits; the transport enforces them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, NamedTuple

from gridtrain.core.group.sensor_readings import SensorReadings
from gridtrain.core.messages import ON_REQUEST
from gridtrain.errors import ConfigError
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.quantities import parse_bytes, parse_duration_s

OFF = "off"
SENSORS = ("battery", "gpu", "idle", "temperature")
"""The sensors; each has the name of the rule that needs it."""

COOL_BY_C = 5.0
"""How far, by default, the temperature must fall below the limit for pausing before training continues, in
degrees Celsius."""

GPU_QUIET_S = 30.0
"""How long the GPU must be unused by other programs before the script continues; a game may leave it unused
between two levels."""

MAX_WINDOWS = 16
MAX_BYTES = 1 << 50

_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
_UNITS = ("B", "kB", "MB", "GB", "TB")
_DEGREES = re.compile(r"(\d{2,3})(?:/(\d{2,3}))?C?")


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A part of the day, in minutes from midnight, local time; spans midnight if `until` <= `since`."""

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
        upload, download: the rate limits as text, such as "20Mbit"; empty for no limit.
        budget_bytes: the limit on the bytes sent and received per day; 0 for no limit.
        hours: the parts of the day in which training is allowed, in local time; empty for any time.
        battery: whether to pause while the computer is running on battery power.
        gpu: whether to pause while another program is using the GPU.
        idle_s: how long the computer must be unused before training is allowed; 0 for no such rule.
        hot_C: the temperature at which training pauses; infinite for no limit.
        cool_C: the temperature below which training continues after such a pause.
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
        """The sensors that these rules need."""
        needed = {
            "battery": self.battery,
            "gpu": self.gpu,
            "idle": self.idle_s > 0,
            "temperature": self.hot_C < math.inf,
        }
        return tuple(name for name in SENSORS if needed[name])

    def with_settings(self, settings: Mapping[str, str]) -> Rules:
        """Return these rules with new values for some keys; see `KEYS`.

        Raises:
            ConfigError: a key is unknown (the remedy suggests the closest one), or a value cannot be parsed.
        """
        rules = self
        for key, text in settings.items():
            if key not in KEYS:
                near = get_close_matches(key, KEYS, 1)
                raise ConfigError(
                    f"there is no rule {key!r}",
                    remedy=f"did you mean {near[0]}?" if near else f"use one of {', '.join(KEYS)}",
                )
            names, off_texts, parse = KEYS[key]
            values: tuple[Any, ...]
            if (word := text.strip()) in off_texts:
                values = tuple(getattr(Rules(), name) for name in names)
            else:
                values = parse(key, word)
            rules = replace(rules, **dict(zip(names, values, strict=True)))
        return rules

    def texts(self) -> dict[str, str]:
        """Return these rules as strings by key, so that `Rules().with_settings(rules.texts()) == rules`."""
        hot = f"{self.hot_C:.0f}/{self.cool_C:.0f}" if self.hot_C < math.inf else OFF
        return {
            "upload": self.upload or OFF,
            "download": self.download or OFF,
            "budget": _exact_bytes(self.budget_bytes) if self.budget_bytes else OFF,
            "hours": ",".join(map(str, self.hours)) or OFF,
            "battery": "pause" if self.battery else "run",
            "gpu": "pause" if self.gpu else "run",
            "idle": f"{self.idle_s:g}s" if self.idle_s else OFF,
            "temperature": hot,
        }


# -- parsing ---------------------------------------------------------------------------------------------


def _wrong(key: str, text: str, remedy: str) -> ConfigError:
    return ConfigError(f"{key}={text[:80]} is not valid", remedy=remedy)


def _rate(key: str, text: str) -> tuple[str]:
    parse_rate(text, key)  # raises its own ConfigError
    return (text,)


def _budget(key: str, text: str) -> tuple[int]:
    nbytes = parse_bytes(text) or 0
    if not 1 <= nbytes <= MAX_BYTES or text[-1:].isdigit():  # "5" would mean 5 bytes
        raise _wrong(key, text, 'use a number of bytes per day, such as 500MB or 5GB, or "off"')
    return (nbytes,)


def _exact_bytes(nbytes: int) -> str:
    """Format a number of bytes exactly, in the largest unit of which it is a multiple."""
    power = max(power for power in range(len(_UNITS)) if nbytes % 1000**power == 0)
    return f"{nbytes // 1000**power}{_UNITS[power]}"


def _hours(key: str, text: str) -> tuple[tuple[DailyWindow, ...]]:
    windows: list[DailyWindow] = []
    for part in text.split(","):
        match = _WINDOW.fullmatch(part.strip())
        numbers = [int(group) for group in match.groups()] if match is not None else []
        if not numbers or numbers[0] > 23 or numbers[2] > 24 or max(numbers[1], numbers[3]) > 59:
            raise _wrong(key, text, "use a value such as 22:00-07:00 or 22:00-07:00,12:00-13:00")
        since, until = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
        if until > 1440 or since == until % 1440:
            raise _wrong(key, text, 'use parts shorter than a day, or "off" to train at any time')
        windows.append(DailyWindow(since, until % 1440))
    if len(windows) > MAX_WINDOWS:
        raise _wrong(key, text, f"use at most {MAX_WINDOWS} parts of the day")
    return (tuple(windows),)


def _pause(key: str, text: str) -> tuple[bool]:
    if text != "pause":
        raise _wrong(key, text, f"use {key}=pause or {key}=run")
    return (True,)


def _idle(key: str, text: str) -> tuple[float]:
    idle_s = parse_duration_s(text)
    if idle_s is None or not 1 <= idle_s <= 86_400:
        raise _wrong(
            key,
            text,
            'use a time from 1s to 24h, such as 10m, or "off" to train while the computer is in use',
        )
    return (idle_s,)


def _temperature(key: str, text: str) -> tuple[float, float]:
    match = _DEGREES.fullmatch(text)
    hot_C = float(match[1]) if match is not None else 0.0
    cool_C = float(match[2]) if match is not None and match[2] else hot_C - COOL_BY_C
    if not 30 <= hot_C <= 120 or not 20 <= cool_C < hot_C:
        raise _wrong(key, text, 'use degrees Celsius, such as 80, or 80/70 to continue below 70, or "off"')
    return hot_C, cool_C


class _RuleForm(NamedTuple):
    """How the text of a rule is parsed.

    Attributes:
        names: the attributes of `Rules` that the rule sets.
        off_texts: the values that reset these attributes to their defaults.
        parse: a function of (the rule's key, any other value) that returns the values of the attributes.
    """

    names: tuple[str, ...]
    off_texts: tuple[str, ...]
    parse: Callable[[str, str], tuple[object, ...]]


_NO_LIMIT = (OFF, "")
KEYS = {
    "upload": _RuleForm(("upload",), _NO_LIMIT, _rate),
    "download": _RuleForm(("download",), _NO_LIMIT, _rate),
    "budget": _RuleForm(("budget_bytes",), _NO_LIMIT, _budget),
    "hours": _RuleForm(("hours",), _NO_LIMIT, _hours),
    "battery": _RuleForm(("battery",), (OFF, "run"), _pause),
    "gpu": _RuleForm(("gpu",), (OFF, "run"), _pause),
    "idle": _RuleForm(("idle_s",), _NO_LIMIT, _idle),
    "temperature": _RuleForm(("hot_C", "cool_C"), _NO_LIMIT, _temperature),
}


def parse_pairs(words: Iterable[str]) -> dict[str, str]:
    """Parse words of the form "key=value"; raise `ConfigError` if a word does not have this form."""
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{word!r} does not have the form KEY=VALUE", remedy=f"use one of the keys {', '.join(KEYS)}"
            )
        settings[key] = value
    return settings


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """The decision whether the script may train, with reasons and the expected end of a pause.

    Attributes:
        may_train: whether the script may train.
        reasons: the reasons why the script may not train.
        until: when training is expected to be allowed again; None if not known.
    """

    may_train: bool
    reasons: tuple[str, ...] = ()
    until: datetime | None = None

    def text(self) -> str:
        """Return the reasons as text, such as "battery, until 22:00"; empty if training is allowed."""
        if self.may_train:
            return ""
        until = f", until {self.until:%H:%M}" if self.until is not None else ""
        return ", ".join(self.reasons) + until


class TrainingPolicy:
    """Decides whether one worker may train, from its rules, its owner's pause and the sensors' readings.

    Attributes:
        rules: the worker's rules, replaced as a whole when they change.
        is_paused: whether the owner has paused the worker.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.is_paused = False
        self._paused_until: datetime | None = None
        self._hot = False
        self._gpu_last_used: datetime | None = None

    def pause(self, until: datetime | None = None) -> None:
        """Pause at the owner's request, until the given time or until `resume`."""
        self.is_paused, self._paused_until = True, until

    def resume(self) -> None:
        """End the pause that the owner requested; the rules still apply."""
        self.is_paused, self._paused_until = False, None

    def unreadable(self, readings: SensorReadings) -> dict[str, str]:
        """Map each sensor that a rule needs but that cannot be read to the reason why it cannot."""
        found = {name: readings.why_absent(name) for name in self.rules.sensors}
        return {name: why for name, why in found.items() if why}

    def decide(self, readings: SensorReadings, moved_today_bytes: int, now: datetime) -> PolicyDecision:
        """End the owner's pause if it has expired, apply all rules, and return the decision.

        Args:
            readings: the current readings of the sensors.
            moved_today_bytes: the bytes sent and received since midnight.
            now: local time without a time zone.
        """
        blocking: list[tuple[str, datetime | None]] = []
        if self.is_paused and self._paused_until is not None and now >= self._paused_until:
            self.resume()
        if self.is_paused:
            blocking.append((ON_REQUEST, self._paused_until))
        if self.rules.hours and not self._open(now):
            blocking.append(("outside its permitted hours", self._next_open(now)))
        if self.rules.budget_bytes and moved_today_bytes >= self.rules.budget_bytes:
            blocking.append(("the day's traffic budget is used up", _midnight(now)))
        for name in self.rules.sensors:
            why = readings.why_absent(name)
            unreadable = f'the "{name}" sensor cannot be read ({why})'
            said = unreadable if why else self._sensor_reason(name, readings, now)
            if said:
                blocking.append((said, None))
        known = [until for _, until in blocking]
        until = None if None in known else max((u for u in known if u is not None), default=None)
        return PolicyDecision(not blocking, tuple(reason for reason, _ in blocking), until)

    def _sensor_reason(self, name: str, readings: SensorReadings, now: datetime) -> str:
        """Return why the reading of the sensor `name` pauses the script; empty if it does not."""
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
        # If the clock was set back, this must not pause the script forever.
        quiet = since is None or not timedelta() <= now - since < timedelta(seconds=GPU_QUIET_S)
        return "" if quiet else "the GPU is in use"

    def _heat(self, temperature_C: float) -> str:
        """Return why the temperature pauses the script; empty if it does not.

        Two limits (hysteresis) prevent the script from pausing and continuing every few seconds.
        """
        self._hot = temperature_C >= (self.rules.cool_C if self._hot else self.rules.hot_C)
        limit_C = self.rules.cool_C
        return f"too hot: {temperature_C:.0f} C; continues below {limit_C:.0f} C" if self._hot else ""

    def _open(self, now: datetime) -> bool:
        minute = now.hour * 60 + now.minute
        return any(window.contains(minute) for window in self.rules.hours)

    def _next_open(self, now: datetime) -> datetime:
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        starts = (today + timedelta(days=d, minutes=w.since) for d in (0, 1) for w in self.rules.hours)
        return min(start for start in starts if start > now)


def _midnight(now: datetime) -> datetime:
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
