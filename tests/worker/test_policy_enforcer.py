"""A worker and its owner: rules are kept while a real script runs, and changed while it does.

The script here is a stand-in that obeys as `gridtrain.training.pause` does, without torch; whole groups
are in
tests/sdk/test_pausing.py and, as processes, in tests/integration/test_owner.py.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gridtrain.cli.main import cli
from gridtrain.errors import BudgetSpent, ConfigError
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentLink
from gridtrain.testing import FakeSensors
from gridtrain.testing.fake_sensors import FileSensors
from gridtrain_worker import policy_enforcer
from gridtrain_worker.budget import FILE
from gridtrain_worker.control_socket import (
    MAX_PATH_BYTES,
    SOCKET,
    ask_agent,
    find_worker,
    find_workers,
    running_workers,
)
from gridtrain_worker.policy_enforcer import AgentMeter, PolicyEnforcer
from gridtrain_worker.saved_settings import RULES_FILE

WITHIN_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 3, 2, 12, 0)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def sensors() -> FakeSensors:
    return FakeSensors(on_battery=False, gpu_used=False, idle_s=1e4, temperature_C=40.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(state: Path) -> Path:
    """Where an agent's would be."""
    return state / "gridtrain" / "default" / "identities" / "00" / "worker-0"


@pytest.fixture
def make(folder: Path, sensors: FakeSensors, clock: Clock) -> Iterator[Callable[..., PolicyEnforcer]]:
    open_: list[PolicyEnforcer] = []

    def start(**given: str) -> PolicyEnforcer:
        enforcer = PolicyEnforcer(folder, "anna", given, lambda line: None, sensors=sensors, now=clock)
        open_.append(enforcer.__enter__())
        return enforcer

    yield start
    for enforcer in open_:
        enforcer.__exit__()


def until(true: Callable[[], bool], what: Callable[[], Any] = lambda: None) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < until_s, what()
        threading.Event().wait(0.02)


def test_the_socket_is_the_owners_alone_and_is_found_by_name(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    make()
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    assert [(path, shown["name"]) for path, shown in running_workers()] == [(folder / SOCKET, "anna")]
    assert find_worker("") == find_worker("anna") == folder / SOCKET
    with pytest.raises(ConfigError, match=r"there is no worker 'bob' -> choose one of: anna"):
        find_worker("bob")


def test_two_of_one_name_are_told_apart(folder: Path, sensors: FakeSensors) -> None:
    """By the name that the run gives to one of them, or before that by run or key."""
    said: list[str] = []
    other = folder.parent / "worker-1"
    with (
        PolicyEnforcer(
            folder, "anna", {}, said.append, run="one", key="0a1b2c3d4e5f", sensors=sensors
        ) as first,
        PolicyEnforcer(other, "anna", {}, said.append, run="two", key="ffeeddccbbaa", sensors=sensors),
    ):
        with pytest.raises(ConfigError) as caught:
            find_worker("anna")
        for words in (
            "'anna' matches 2 workers",
            "anna (run one, key 0a1b2c3d4e5f)",
            "--worker RUN/NAME",
        ):
            assert words in str(caught.value)
        with pytest.raises(ConfigError, match=r"2 workers are running: .*-> .*--worker NAME, or add --all"):
            find_worker("")
        assert find_worker("one/anna") == find_worker("0a1b2c") == find_worker("0A1B2C3D") == folder / SOCKET
        assert find_worker("two/anna") == other / SOCKET
        assert find_workers() == [folder / SOCKET, other / SOCKET]
        for words, states in (
            ("pause --all", {"paused"}),
            ("show", {"paused"}),
            ("resume --all", {"starting"}),
            ("set budget=5GB --all", {"starting"}),
        ):
            done = CliRunner().invoke(cli, ["worker", *words.split()])
            answers = [json.loads(line) for line in done.output.splitlines()]
            assert [answer["run"] for answer in answers] == ["one", "two"], done.output
            assert {answer["state"] for answer in answers} == states
        assert {answer["rules"]["budget"] for answer in answers} == {"5GB"}
        with pytest.raises(ConfigError, match="there is no worker '0a1b2'"):
            find_worker("0a1b2")
        line = AgentLink(first.path, lambda: 0)
        line.report(state="training", name="anna-2")
        until(lambda: "is named" in said[-1])
        assert said[-1:] == ["anna is named anna-2 in this run: gridtrain worker show --worker anna-2"]
        assert find_worker("anna-2") == folder / SOCKET and find_worker("anna") == other / SOCKET


def test_without_a_worker_it_is_said_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match=r"none of your workers is running .* -> start one"):
        find_worker("")


def test_a_long_path_gets_a_short_stand_in(tmp_path: Path, sensors: FakeSensors) -> None:
    folder = tmp_path / ("x" * 90) / ("y" * 90)
    with PolicyEnforcer(folder, "anna", {}, lambda line: None, sensors=sensors) as enforcer:
        assert len(enforcer.path) < 100 and ask_agent(folder / SOCKET, {"ask": "show"})["name"] == "anna"
    assert not (folder / SOCKET).is_symlink() and not Path(enforcer.path).parent.exists()


def test_the_stand_in_lies_where_a_services_owner_sees_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, sensors: FakeSensors
) -> None:
    """A service has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        monkeypatch.setenv("RUNTIME_DIRECTORY", f"{runtime}:/run/another")
        folder = tmp_path_factory.mktemp("x") / ("y" * 90)
        with PolicyEnforcer(folder, "anna", {}, lambda line: None, sensors=sensors) as enforcer:
            assert (
                enforcer.path.startswith(f"{runtime}/") and len(os.fsencode(enforcer.path)) <= MAX_PATH_BYTES
            )
            assert ask_agent(folder / SOCKET, {"ask": "show"})["name"] == "anna"
        assert os.listdir(runtime) == []
        for gone in (f"{runtime}/gone", ""):
            monkeypatch.setenv("RUNTIME_DIRECTORY", gone)
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)  # it ends with the login
            with PolicyEnforcer(folder, "anna", {}, lambda line: None, sensors=sensors) as enforcer:
                assert not enforcer.path.startswith(runtime), "there is none after all"


def test_rules_are_changed_live_and_kept(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors
) -> None:
    enforcer = make(upload="20Mbit")
    place = folder / SOCKET
    line = AgentLink(enforcer.path, lambda: 0)
    assert (line.directive.run, line.directive.upload_Bps) == (True, 2.5e6)
    ask_agent(place, {"ask": "set", "settings": {"upload": "8Mbit", "battery": "pause"}})
    until(lambda: line.directive.upload_Bps == 1e6)
    sensors.say(on_battery=True)
    until(lambda: not line.directive.run)
    assert line.directive.reason == "battery"
    line.report(state="paused")
    until(lambda: ask_agent(place, {"ask": "show"})["obeyed"])
    sensors.say(on_battery=False)
    until(lambda: line.directive.run)
    assert json.loads((folder / RULES_FILE).read_text()) == {"upload": "8Mbit", "battery": "pause"}
    again = PolicyEnforcer(folder.parent / "worker-1", "bob", {}, lambda line: None, sensors=sensors)
    assert again._policy.rules.texts()["battery"] == "run", "another worker has its own"
    again._control_socket.close()


def test_pause_resume_and_stop_are_the_owners_word(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    enforcer = make()
    line = AgentLink(enforcer.path, lambda: 0)
    shown = ask_agent(folder / SOCKET, {"ask": "pause", "for": "2h"})
    assert (shown["state"], shown["reason"]) == ("paused", "on request, until 14:00")
    until(lambda: not line.directive.run)
    clock.now = datetime(2026, 3, 2, 14, 0)
    until(lambda: line.directive.run)
    ask_agent(folder / SOCKET, {"ask": "pause"})
    until(lambda: not line.directive.run)
    line.report(state="paused")
    until(lambda: enforcer._script_status.get("state") == "paused")
    shown = ask_agent(folder / SOCKET, {"ask": "resume"})
    assert (shown["state"], shown["reason"]) == ("resuming", "")
    until(lambda: line.directive.run)
    ask_agent(folder / SOCKET, {"ask": "stop"})
    until(lambda: line.directive.stop)
    assert enforcer.is_stopping


def test_the_days_bytes_are_counted_over_restarts_and_end_at_midnight(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    moved = [300]
    enforcer = make(budget="1kB")
    line = AgentLink(enforcer.path, lambda: moved[0])
    until(
        lambda: json.loads((folder / FILE).read_text())["bytes"] == 300 if (folder / FILE).exists() else False
    )
    assert line.directive.most_bytes == 1000
    enforcer.set_script(0)
    moved[0] = 200  # the script was started anew, and counts from nothing: 700 of the day are left
    line = AgentLink(enforcer.path, lambda: moved[0])
    assert line.directive.most_bytes == 700
    until(lambda: json.loads((folder / FILE).read_text())["bytes"] == 500)
    assert line.directive.most_bytes == 700 and line.directive.run
    moved[0] = 700
    until(lambda: not line.directive.run)
    assert line.directive.reason == "the day's traffic budget is used up, until 00:00"
    clock.now = datetime(2026, 3, 3, 0, 1)
    until(lambda: line.directive.run and line.directive.most_bytes == 1700)


def test_what_the_agent_fetches_is_counted_and_obeys_the_rules(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    enforcer = make(budget="1kB", download="8kbit")
    meter = AgentMeter(enforcer)
    assert meter.request(5000) == 1000, "the budget is less than a piece"
    meter.count(600)
    assert json.loads((folder / FILE).read_text())["bytes"] == 600
    assert enforcer.allow_fetch() == (1000.0, 400)
    meter.count(400)
    with pytest.raises(BudgetSpent, match=r"^the day's traffic budget is used up, until 00:00"):
        meter.request(1)
    clock.now = datetime(2026, 3, 3, 0, 1)
    assert enforcer.allow_fetch() == (1000.0, 1000)
    ask_agent(folder / SOCKET, {"ask": "pause"})
    with pytest.raises(BudgetSpent, match=r"^on request"):
        meter.request(1)


@pytest.mark.parametrize("rule", ["battery=pause", "temperature=80", "gpu=pause", "idle=10m"])
def test_a_rule_without_its_sensor_is_refused_by_name(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors, rule: str
) -> None:
    key, _, value = rule.partition("=")
    sensors.say(on_battery=None, temperature_C=None, gpu_used=None, idle_s=None)
    with pytest.raises(ConfigError, match=f'the "{key}" sensor cannot be read: the fake sensors'):
        make(**{key: value})
    make()
    with pytest.raises(ConfigError, match=f'the "{key}" sensor cannot be read'):
        ask_agent(folder / SOCKET, {"ask": "set", "settings": {key: value}})
    assert not (folder / RULES_FILE).exists(), "nothing of it was taken on"


def test_a_line_that_broke_is_made_anew_and_nothing_is_counted_twice(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    enforcer = make(budget="1kB")
    line = AgentLink(enforcer.path, lambda: 300)
    until(lambda: enforcer._budget.today_bytes(Clock().now.date()) == 300)
    line._socket.close()
    ask_agent(folder / SOCKET, {"ask": "pause"})
    until(lambda: not line.directive.run)
    assert line.directive.most_bytes == 1000 and enforcer._budget.today_bytes(Clock().now.date()) == 300


def test_a_restart_knows_what_its_owner_said_last(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors
) -> None:
    """A service starts with the same options again and again; whoever edits them says something new.

    start   upload=20Mbit   download=50Mbit
    set     upload=5Mbit    hours=22:00-07:00      pause
    start   upload=20Mbit   download=50Mbit    ->  5Mbit, 50Mbit, 22:00-07:00, paused
    start   upload=8Mbit                       ->  8Mbit
    """
    said: list[str] = []
    first = make(upload="20Mbit", download="50Mbit")
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"upload": "5Mbit", "hours": "22:00-07:00"}})
    ask_agent(folder / SOCKET, {"ask": "pause"})
    first.__exit__()
    given = {"upload": "20Mbit", "download": "50Mbit"}
    with PolicyEnforcer(folder, "anna", given, said.append, sensors=sensors) as again:
        rules = again._policy.rules.texts()
        assert (rules["upload"], rules["download"], rules["hours"]) == ("5Mbit", "50Mbit", "22:00-07:00")
        assert again.decision.reasons[0] == "on request" and not again.decision.may_train
        assert "upload=5Mbit applies instead of 20Mbit, because it was set later" in said
        ask_agent(folder / SOCKET, {"ask": "resume"})
    with PolicyEnforcer(folder, "anna", {"upload": "8Mbit"}, said.append, sensors=sensors) as edited:
        assert edited._policy.rules.upload == "8Mbit"
        assert "on request" not in edited.decision.reasons
        ask_agent(folder / SOCKET, {"ask": "set", "settings": {"hours": "off"}})
        ask_agent(folder / SOCKET, {"ask": "pause"})
        ask_agent(folder / SOCKET, {"ask": "stop"})
    with PolicyEnforcer(folder, "anna", {}, said.append, sensors=sensors) as afresh:
        assert afresh.decision.may_train, "who starts a worker again after `stop` means it"


def test_a_pause_with_an_end_ends_over_a_restart_too(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors, clock: Clock
) -> None:
    first = make()
    ask_agent(folder / SOCKET, {"ask": "pause", "for": "2h"})
    first.__exit__()
    with PolicyEnforcer(folder, "anna", {}, lambda line: None, sensors=sensors, now=clock) as again:
        assert again.decision.text() == "on request, until 14:00"
        clock.now = datetime(2026, 3, 2, 14, 0)
        until(lambda: again.decision.may_train)
    said: list[str] = []
    with PolicyEnforcer(folder, "anna", {}, said.append, sensors=sensors, now=clock) as later:
        assert later.decision.may_train and not said


def test_a_log_that_cannot_be_written_costs_no_rule(folder: Path, sensors: FakeSensors, clock: Clock) -> None:
    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    with PolicyEnforcer(folder, "anna", {"battery": "pause"}, full, sensors=sensors, now=clock) as enforcer:
        for on_battery in (True, False, True):
            sensors.say(on_battery=on_battery)
            until(lambda on=on_battery: enforcer.decision.may_train is not on)  # type: ignore[misc]


def test_rules_that_nobody_keeps_any_more_are_no_secret(
    make: Callable[..., PolicyEnforcer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of our own ends the agent, and with it the script, instead of the rules alone."""
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    enforcer = make()
    enforcer.raise_fault()
    monkeypatch.setattr(enforcer, "_decide", lambda: 1 // 0)
    until(lambda: not enforcer._thread.is_alive())
    with pytest.raises(RuntimeError, match="rules are no longer enforced"):
        enforcer.raise_fault()


def test_a_file_of_sensors_that_goes_away_pauses(tmp_path: Path, folder: Path) -> None:
    file, said = tmp_path / "sensors.json", list[str]()
    file.write_text('{"on_battery": false}')
    with PolicyEnforcer(
        folder, "anna", {"battery": "pause"}, said.append, sensors=FileSensors(file)
    ) as enforcer:
        assert enforcer.decision.may_train
        file.unlink()
        until(lambda: not enforcer.decision.may_train)
        assert 'the "battery" sensor cannot be read (the sensors in' in enforcer.decision.text()
        file.write_text('{"on_battery": false}')
        until(lambda: enforcer.decision.may_train)
    assert len(said) == 2, said


def test_a_script_that_ends_itself_for_want_of_bytes_waits_for_the_next_day(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    """A little of the budget is left, which its step did not fit into."""
    enforcer = make(budget="1kB")
    enforcer._on_script_status({"state": BUDGET_EXHAUSTED, "moved_bytes": 900})
    assert not enforcer.decision.may_train
    assert enforcer.decision.text() == "the day's traffic budget is used up, until 00:00"
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"budget": "2kB"}})
    until(lambda: enforcer.decision.may_train)
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"budget": "1kB"}})
    until(lambda: not enforcer.decision.may_train)
    clock.now = datetime(2026, 3, 3, 0, 1)
    until(lambda: enforcer.decision.may_train)


def test_where_bytes_cannot_be_counted_a_budget_pauses(
    make: Callable[..., PolicyEnforcer], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcer = make(budget="1kB")

    def full(*_: Any, **__: Any) -> None:
        raise ConfigError("the disk is full, so the day's traffic cannot be counted")

    monkeypatch.setattr(enforcer._budget, "keep", full)
    line = AgentLink(enforcer.path, lambda: 300)
    until(lambda: not line.directive.run)
    assert line.directive.reason == "the disk is full, so the day's traffic cannot be counted"
    monkeypatch.undo()
    until(lambda: line.directive.run)
    assert json.loads((folder / FILE).read_text())["bytes"] == 300, "there is room again"


def test_what_is_no_question_is_refused_and_noise_is_dropped(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    import socket

    enforcer = make()
    with pytest.raises(ConfigError, match="unknown request 'dance'"):
        ask_agent(folder / SOCKET, {"ask": "dance"})
    with pytest.raises(ConfigError, match="did you mean battery"):
        ask_agent(folder / SOCKET, {"ask": "set", "settings": {"batery": "pause"}})
    for noise in (b"\n", b"[]\n", b"x" * 100_000, b'{"role": "script"}\n'):
        with socket.socket(socket.AF_UNIX) as talk:
            talk.connect(enforcer.path)
            try:
                talk.sendall(noise)
                talk.shutdown(socket.SHUT_WR)
                talk.settimeout(WITHIN_S)
                while talk.recv(4096):
                    pass
            except OSError:
                pass  # cut off in the middle
    assert ask_agent(folder / SOCKET, {"ask": "show"})["name"] == "anna"


def test_who_does_not_obey_is_overdue(
    make: Callable[..., PolicyEnforcer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_enforcer, "OBEY_TIMEOUT_S", 0.2)
    enforcer = make()
    enforcer.set_script(os.getpid())
    assert not enforcer.is_overdue
    enforcer._answer({"ask": "pause"})
    until(lambda: enforcer.is_overdue)
    enforcer._on_script_status({"state": "paused"})
    assert not enforcer.is_overdue
    enforcer._answer({"ask": "stop"})
    assert not enforcer.is_overdue, "its time begins with stop"
    until(lambda: enforcer.is_overdue)
