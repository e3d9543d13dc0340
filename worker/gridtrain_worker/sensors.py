"""Reads the battery, GPU use, idle time and temperature, and decides which load counts as GPU use.

    battery      psutil; a machine without a battery is considered plugged in
    gpu          nvidia-ml-py: other programs' processes; absent if these are hidden (containers)
    idle         logind (Linux desktop), terminals, HIDIdleTime (macOS): the most recent use counts
    temperature  nvidia-ml-py for GPUs, psutil for other components

The sensors are read at most every `EVERY_S` seconds, and only those that a rule needs.  A program that is run
to read a sensor has `ASK_S` seconds to respond.
Use `gridtrain.testing.FakeSensors` in tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from gridtrain.core.group.sensor_readings import NOT_NEEDED, SensorReadings
from gridtrain_worker.training_policy import SENSORS

EVERY_S = 2.0
ASK_S = 1.0
GPU_BUSY_PERCENT = 5
"""The GPU utilization above which another program counts as using the GPU if our script does not use it."""
GPU_DRAWN_PERCENT = 10
"""The utilization above which another program counts as a game, not the desktop, if our script also runs."""

_SYSTEM_SESSION_CLASSES = ("manager", "background")
"""The classes of sessions that systemd opens for services and timers without a login."""

UTMP = Path("/var/run/utmp")
"""The list of logins on Linux; absent in containers and on some newer systems."""

PID_NAMESPACE, OF_THE_HOST = Path("/proc/self/ns/pid"), 0xEFFFFFFC
"""The inode of the host's PID namespace, in which all processes are visible."""

NO_PSUTIL = "psutil is not installed: pip install psutil"
NO_NVML = "nvidia-ml-py is not installed: pip install nvidia-ml-py"

_HID_IDLE = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')


class Sensors(Protocol):
    """The sensors of a machine, read every few seconds; `FakeSensors` is another implementation."""

    def read(self, ours: Collection[int], names: Collection[str] = SENSORS) -> SensorReadings:
        """Read the sensors; must not block for long.

        Args:
            ours: the ids of the worker's own processes, whose GPU use is not counted.
            names: the sensors to read.
        """
        ...


class MachineSensors:
    """This machine's sensors; `SensorReadings.absent` lists the sensors that cannot be read, with reasons."""

    def __init__(self) -> None:
        self._latest: tuple[float, SensorReadings] | None = None
        self._asked: frozenset[str] = frozenset()
        self._psutil = _psutil()
        self._nvml, self._no_nvml = _nvml()

    def read(self, ours: Collection[int], names: Collection[str] = SENSORS) -> SensorReadings:
        now_s, wanted = time.monotonic(), frozenset(names)
        if self._latest is None or now_s >= self._latest[0] + EVERY_S or not wanted <= self._asked:
            self._latest, self._asked = (now_s, self._all(ours, wanted)), wanted
        return self._latest[1]

    def _all(self, ours: Collection[int], wanted: frozenset[str]) -> SensorReadings:
        absent: dict[str, str] = {}

        def asked(name: str, ask: Callable[[], Any]) -> Any:
            if name not in wanted:
                absent[name] = NOT_NEEDED
                return None
            try:
                return ask()
            except _SensorUnavailable as why:
                absent[name] = str(why)
            except Exception as error:  # a driver error: only the sensor fails, not the worker
                absent[name] = f"{type(error).__name__}: {error}"
            return None

        return SensorReadings(
            on_battery=asked("battery", self._on_battery),
            gpu_used=asked("gpu", lambda: self._gpu_used(ours)),
            idle_s=asked("idle", self._idle_s),
            temperature_C=asked("temperature", self._temperature_C),
            absent=absent,
        )

    def _on_battery(self) -> bool:
        if self._psutil is None:
            raise _SensorUnavailable(NO_PSUTIL)
        if not hasattr(self._psutil, "sensors_battery"):
            raise _SensorUnavailable(f"psutil reports no battery on {sys.platform}")
        battery = self._psutil.sensors_battery()
        return battery is not None and battery.power_plugged is False

    # -- GPUs ------------------------------------------------------------------------------------

    def _gpus(self) -> list[Any]:
        if self._nvml is None:
            raise _SensorUnavailable(self._no_nvml)
        return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def _gpu_used(self, ours: Collection[int]) -> bool:
        """Return whether another program computes or draws on a GPU, as most games do."""
        gpus = self._gpus()
        if not _sees_all_processes():
            raise _SensorUnavailable("other programs that use the GPU cannot be detected in a container")
        known = _family(self._psutil, ours)
        for gpu in gpus:
            running = {p.pid for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
            if running - known:
                return True
            if running & known:  # even while our script is paused, because it remains on the GPU
                if self._is_drawn_by_others(gpu, known):
                    return True
            elif self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu > GPU_BUSY_PERCENT:
                return True
        return False

    def _is_drawn_by_others(self, gpu: Any, known: Collection[int]) -> bool:
        since_us = int((time.time() - 2 * EVERY_S) * 1e6)
        try:
            told = self._nvml.nvmlDeviceGetProcessUtilization(gpu, since_us)
        except self._nvml.NVMLError:  # no program has used the GPU since then, or the GPU is too old to tell
            return False
        return any(one.pid not in known and one.smUtil > GPU_DRAWN_PERCENT for one in told)

    def _temperature_C(self) -> float:
        found: list[float] = []
        if self._nvml is not None:
            kind = self._nvml.NVML_TEMPERATURE_GPU
            found += [float(self._nvml.nvmlDeviceGetTemperature(gpu, kind)) for gpu in self._gpus()]
        read = getattr(self._psutil, "sensors_temperatures", None)
        if read is not None:
            found += [part.current for parts in read().values() for part in parts if part.current]
        if not found:
            why = "this machine reports no temperature"
            raise _SensorUnavailable(NO_PSUTIL if self._psutil is None else why)
        return max(found)

    # -- idle time -------------------------------------------------------------------------------

    def _idle_s(self) -> float:
        """Return the seconds since someone last used this machine, at a desktop or a terminal."""
        desktops = [idle_s for ask in (_logind_idle_s, _hid_idle_s) if (idle_s := ask()) is not None]
        terminals_s = self._terminals_idle_s(desktop_told=bool(desktops))
        found = [*desktops, *([] if terminals_s is None else [terminals_s])]
        if not found:
            why = "neither a desktop session nor a terminal reports idle time"
            raise _SensorUnavailable(NO_PSUTIL if self._psutil is None else why)
        return min(found)

    def _terminals_idle_s(self, *, desktop_told: bool) -> float | None:
        """Return the seconds since the last key press at a terminal; `NOBODY_IDLE_S` if no user is logged in.

        Returns None if there is no list of logins, so that the time is unknown, or if a user is at a desktop
        that does not report idle time.
        """
        if self._psutil is None or (sys.platform == "linux" and not UTMP.exists()):
            return None
        idle_s = NOBODY_IDLE_S
        for user in self._psutil.users():
            touched_s = _terminal_touched_s(user.terminal)
            if touched_s is not None:
                idle_s = min(idle_s, max(0.0, time.time() - touched_s))
            elif not desktop_told:
                return None
        return idle_s


NOBODY_IDLE_S = 1e6
"""The idle time of a machine on which no user is logged in."""


class _SensorUnavailable(Exception):
    """A sensor cannot be read; the message is the reason."""


def _psutil() -> Any:
    """Import psutil; return None if it is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def _nvml() -> tuple[Any, str]:
    """Return the initialized NVML library and "", or None and the reason why it cannot be used."""
    try:
        import pynvml
    except ImportError:
        return None, NO_NVML
    library: Any = pynvml
    try:
        library.nvmlInit()
    except Exception as error:  # its error classes are created at run time
        return None, f"no NVIDIA driver answers: {error}"
    return library, ""


def _family(psutil: Any, ours: Collection[int]) -> set[int]:
    """Return the ids of our processes and their descendants, because a launcher's children use the GPU."""
    known = {os.getpid(), *ours}
    if psutil is not None:
        for pid in tuple(known):
            with contextlib.suppress(psutil.Error):
                known |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return known


def _logind_idle_s() -> float | None:
    """Return how many seconds all systemd sessions have been idle; None if unknown.

    Returns `NOBODY_IDLE_S` if no user has a session, unless there is also a list of logins to examine.
    """
    listed = _command_output("loginctl", "list-sessions", "--no-legend")
    if listed is None:
        return None
    idle_s: float | None = None
    nobody = True
    for line in listed.splitlines()[:32]:
        session = line.split()[0] if line.split() else ""
        facts = _command_output(
            *("loginctl", "show-session", session),
            *("-p", "Type", "-p", "Class", "-p", "IdleHint", "-p", "IdleSinceHint", "-p", "TTY"),
        )
        said = dict(fact.partition("=")[::2] for fact in (facts or "").splitlines())
        if said.get("Class", "").startswith(_SYSTEM_SESSION_CLASSES):
            continue
        nobody = False
        if said.get("Type") in ("x11", "wayland", "mir"):
            since_us = said.get("IdleSinceHint", "0")
            is_idle = said.get("IdleHint") == "yes" and since_us.isdecimal()
            one_s = max(0.0, time.time() - int(since_us) / 1e6) if is_idle else 0.0
        elif (touched_s := _terminal_touched_s(said.get("TTY", ""))) is not None:
            one_s = max(0.0, time.time() - touched_s)
        else:
            continue
        idle_s = one_s if idle_s is None else min(idle_s, one_s)
    return NOBODY_IDLE_S if nobody and not UTMP.exists() else idle_s


def _hid_idle_s() -> float | None:
    """Return the seconds since the last key or mouse event on macOS; None on other systems."""
    if sys.platform != "darwin":
        return None
    match = _HID_IDLE.search(_command_output("ioreg", "-c", "IOHIDSystem", "-d", "4") or "")
    return int(match[1]) / 1e9 if match is not None else None


def _terminal_touched_s(terminal: str | None) -> float | None:
    """Return the wall-clock time of the last key press at a terminal; None if there is no such terminal."""
    try:
        return os.stat(f"/dev/{terminal}").st_atime if terminal else None
    except OSError:
        return None


def _sees_all_processes() -> bool:
    """Return whether other users' processes are visible; a container and WSL hide them."""
    if sys.platform != "linux":
        return True
    try:
        return PID_NAMESPACE.stat().st_ino == OF_THE_HOST
    except OSError:
        return False


def _command_output(*command: str) -> str | None:
    """Run a program; return its output, or None if it is not installed, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
