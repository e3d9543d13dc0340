"""Conclusions from the readings of a machine; its libraries and programs are fakes here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain_worker import sensors as module
from gridtrain_worker.sensors import MachineSensors

ME = os.getpid()
GAME = 4711


class NvmlError(Exception):
    pass


class Card:
    """nvidia-ml-py with one GPU.

    computing: ids of the processes that compute; drawing: id -> percent of each process, as NVML reports
    it for the last seconds; None: an old card, which does not report it.
    """

    NVMLError = NvmlError

    def __init__(self, computing: tuple[int, ...], drawing: dict[int, int] | None, busy: int = 0) -> None:
        self._computing, self._drawing, self._busy = computing, drawing, busy

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU {index}"

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self._computing]

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        return SimpleNamespace(gpu=self._busy)

    def nvmlDeviceGetProcessUtilization(self, gpu: str, since_us: int) -> list[Any]:
        assert time.time() * 1e6 - since_us < 60e6, "of the last seconds"
        if self._drawing is None:
            raise NvmlError("not supported")
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self._drawing.items()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., MachineSensors]:
    """Sensors of a machine that is no container and has no users, unless given otherwise."""
    utmp = tmp_path / "utmp"
    utmp.touch()
    monkeypatch.setattr(module, "UTMP", utmp)
    monkeypatch.setattr(module, "_sees_all_processes", lambda: True)
    monkeypatch.setattr(module, "_command_output", lambda *command: None)
    monkeypatch.setattr(module.sys, "platform", "linux")

    def made(card: Card | None = None, users: tuple[str, ...] = ()) -> MachineSensors:
        found = MachineSensors()
        found._nvml, found._no_nvml = card, "no card"
        listed = [SimpleNamespace(terminal=terminal) for terminal in users]
        found._psutil = SimpleNamespace(users=lambda: listed, Error=OSError, Process=lambda pid: NoChildren())
        return found

    return made


class NoChildren:
    def children(self, recursive: bool) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("card", "used"),
    [
        (Card((), {}), False),
        (Card((GAME,), {}), True),
        (Card((), {}, busy=60), True),
        (Card((ME,), {ME: 95}, busy=99), False),
        (Card((ME,), {ME: 40, GAME: 45}, busy=99), True),
        (Card((ME,), {ME: 95, GAME: 4}, busy=99), False),
        (Card((ME,), {GAME: 45}, busy=45), True),
        (Card((ME,), None, busy=99), False),
    ],
    ids=[
        "nobody", "another computes", "another draws", "we compute", "we compute, a game draws",
        "we compute, there is a desktop", "we rest on it, a game draws", "an old card does not tell",
    ],
)  # fmt: skip
def test_use_of_the_gpu_by_other_programs_is_found(
    machine: Callable[..., MachineSensors], card: Card, used: bool
) -> None:
    assert machine(card).read((ME,), ("gpu",)).gpu_used is used


def test_in_a_container_use_of_the_gpu_is_unknown(
    machine: Callable[..., MachineSensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_sees_all_processes", lambda: False)
    readings = machine(Card((), {})).read((), ("gpu",))
    assert readings.gpu_used is None and "container" in readings.why_absent("gpu")


def test_the_hosts_process_ids_are_recognized_by_the_pid_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "pid"
    place.touch()
    monkeypatch.setattr(module, "PID_NAMESPACE", place)
    assert not module._sees_all_processes()
    monkeypatch.setattr(module, "OF_THE_HOST", place.stat().st_ino)
    assert module._sees_all_processes()


@pytest.fixture
def terminal(tmp_path: Path) -> str:
    """A terminal at which a key was pressed a minute ago, as a path below /dev."""
    file = tmp_path / "terminal"
    file.touch()
    os.utime(file, (time.time() - 60, time.time()))
    return os.path.relpath(file, "/dev")


def test_idle_time_begins_at_the_last_key(machine: Callable[..., MachineSensors], terminal: str) -> None:
    idle_s = machine(users=(terminal,)).read((), ("idle",)).idle_s
    assert idle_s is not None and 55 < idle_s < 600
    assert machine().read((), ("idle",)).idle_s == module.NOBODY_IDLE_S, "no user has logged in"


def test_without_a_list_of_users_the_sensor_is_absent(
    machine: Callable[..., MachineSensors], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: str
) -> None:
    """Containers and some systems have no such list, which is not the same as an empty one."""
    monkeypatch.setattr(module, "UTMP", tmp_path / "none")
    found = machine()
    assert "neither a desktop session nor a terminal reports idle time" in found.read(
        (), ("idle",)
    ).why_absent("idle")
    sessions = {"list-sessions": "3 1000 anna - pts/0\n", "show-session": f"Type=tty\nTTY={terminal}\n"}
    monkeypatch.setattr(module, "_command_output", lambda *command: sessions[command[1]])
    idle_s = machine().read((), ("idle",)).idle_s
    assert idle_s is not None and 55 < idle_s < 600, "systemd knows the terminal"


@pytest.mark.parametrize(
    ("listed", "shown", "idle_s"),
    [
        ("", "", module.NOBODY_IDLE_S),
        ("c1 990 root -\n", "Type=unspecified\nClass=manager\n", module.NOBODY_IDLE_S),
        ("7 1000 anna -\n", "Type=unspecified\nClass=user\nTTY=\n", None),
    ],
    ids=["no user has logged in", "services of root", "a user at an unknown terminal"],
)
def test_systemd_reports_users_where_no_list_exists(
    machine: Callable[..., MachineSensors],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    listed: str,
    shown: str,
    idle_s: float | None,
) -> None:
    """Such a machine trains if no user is present, also after its start."""
    monkeypatch.setattr(module, "UTMP", tmp_path / "none")
    output = {"list-sessions": listed, "show-session": shown}
    monkeypatch.setattr(module, "_command_output", lambda *command: output[command[1]])
    assert machine().read((), ("idle",)).idle_s == idle_s


def test_a_user_at_a_desktop_without_idle_time_may_be_present(
    machine: Callable[..., MachineSensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine(users=(":0",)).read((), ("idle",)).why_absent("idle")
    monkeypatch.setattr(module, "_command_output", lambda *command: "")
    assert machine(users=(":0",)).read((), ("idle",)).why_absent("idle"), "systemd does not know this session"
    output = {"list-sessions": "2 1000 anna seat0\n", "show-session": "Type=x11\nIdleHint=no\nTTY=\n"}
    monkeypatch.setattr(module, "_command_output", lambda *command: output[command[1]])
    assert machine(users=(":0",)).read((), ("idle",)).idle_s == 0.0, "systemd reports this session"
