"""A worker and its owner: rules are enforced while a script runs, and can be changed.

The script here is a fake that obeys as `gridtrain.training.pause`, without torch; whole groups are in
tests/sdk/test_pausing.py and, as processes, in tests/integration/test_owner.py.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
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
from gridtrain.cli.worker_commands import SLOW_UPLOAD, sensor_lines, state_lines, worker_commands
from gridtrain.core.group.sensor_readings import NOT_NEEDED
from gridtrain.errors import BudgetSpent, ConfigError, DataError
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, AgentLink
from gridtrain.testing import FakeSensors
from gridtrain.testing.fake_sensors import FileSensors
from gridtrain.training.pause import PauseController
from gridtrain_worker import control_socket, policy_enforcer, saved_settings, script_processes
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
from gridtrain_worker.saved_settings import OWNER_FILE, RULES_FILE, SavedSettings
from gridtrain_worker.script_processes import is_from_script

WITHIN_S = 60.0
SAVED_RULES_APPLY = "saved rules of this worker's key apply"
HOW_TO_CHANGE = "(change them with gridtrain worker set)"


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
    """The state folder of an agent."""
    return state / "gridtrain" / "default" / "identities" / "00" / "worker-0"


@pytest.fixture
def make(folder: Path, sensors: FakeSensors, clock: Clock) -> Iterator[Callable[..., PolicyEnforcer]]:
    open_: list[PolicyEnforcer] = []

    def start(**settings: str) -> PolicyEnforcer:
        enforcer = PolicyEnforcer(folder, "anna", settings, lambda link: None, sensors=sensors, now=clock)
        open_.append(enforcer.__enter__())
        return enforcer

    yield start
    for enforcer in open_:
        enforcer.__exit__()


def wait_until(true: Callable[[], bool], what: Callable[[], Any] = lambda: None) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < until_s, what()
        threading.Event().wait(0.02)


def test_only_the_owner_may_use_the_socket_and_it_is_found_by_name(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    make()
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    assert [(path, shown["name"]) for path, shown in running_workers()] == [(folder / SOCKET, "anna")]
    assert find_worker("") == find_worker("anna") == folder / SOCKET
    with pytest.raises(ConfigError, match=r"there is no worker 'bob' -> choose one of: anna"):
        find_worker("bob")


def test_a_disk_that_has_become_read_only_does_not_fail_the_end(
    folder: Path, sensors: FakeSensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as read_only, PolicyEnforcer(folder, "anna", {}, print, sensors=sensors):
        read_only.setattr(Path, "unlink", refuse)
    assert os.path.lexists(folder / SOCKET) and running_workers() == []
    with PolicyEnforcer(folder, "anna", {}, print, sensors=sensors):
        assert find_worker("anna") == folder / SOCKET


def test_workers_of_one_name_are_distinguished(folder: Path, sensors: FakeSensors) -> None:
    """By the name that the run assigns to one of them, or before that by run or key."""
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
            answers = [json.loads(link) for link in done.output.splitlines()]
            assert [answer["run"] for answer in answers] == ["one", "two"], done.output
            assert {answer["state"] for answer in answers} == states
        assert {answer["rules"]["budget"] for answer in answers} == {"5GB"}
        with pytest.raises(ConfigError, match="there is no worker '0a1b2'"):
            find_worker("0a1b2")
        link = AgentLink(first.path, lambda: 0)
        link.report(state="training", name="anna-2")
        wait_until(lambda: "is named" in said[-1])
        assert said[-1:] == ["anna is named anna-2 in this run; use --worker anna-2 in commands"]
        assert find_worker("anna-2") == folder / SOCKET and find_worker("anna") == other / SOCKET


def test_without_a_worker_the_error_says_how_to_start_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"none of your workers is running .* -> start one with gridtrain worker INVITATION$",
    ):
        find_worker("")


ASKS = """
import sys
from pathlib import Path
from gridtrain_worker.control_socket import ask_agent
print(ask_agent(Path(sys.argv[1]), {"ask": sys.argv[2], "settings": {"hours": "off"}})["state"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED and /proc")
def test_a_script_may_not_command_its_worker(
    make: Callable[..., PolicyEnforcer], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It and its children descend from the agent; the scripts of other agents have its variable."""
    enforcer = make(hours="12:00-13:00")
    ask_agent(folder / SOCKET, {"ask": "pause"})
    said = {}
    for ask in ("set", "resume", "pause", "stop", "show"):
        command = [sys.executable, "-c", ASKS, str(folder / SOCKET), ask]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
        said[ask] = (
            (done.stdout or done.stderr).splitlines()[-1].removeprefix("gridtrain.errors.ConfigError: ")
        )
    refusal = (
        "a training script may not pause, stop or resume its worker, nor set its rules -> run the command in "
        "a terminal"
    )
    assert said == {**dict.fromkeys(("set", "resume", "pause", "stop"), refusal), "show": "paused"}
    assert enforcer.decision.text() == "on request" and not enforcer.is_stopping
    assert is_from_script(os.getpid(), "PATH=") and not is_from_script(os.getpid(), "GRIDTRAIN_CONTROL=")
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        assert is_from_script(child.pid, "GRIDTRAIN_CONTROL=")
        with monkeypatch.context() as patch:
            patch.setattr(script_processes, "read_process", read_as_container(child.pid))
            patch.setattr(os, "getpid", lambda: 1)
            assert is_from_script(child.pid, "PATH=") and not is_from_script(child.pid, "GRIDTRAIN_CONTROL=")
    assert is_from_script(child.pid, "GRIDTRAIN_CONTROL="), "it has ended, so nothing is known of it"


def read_as_container(adopted: int) -> Callable[[int], tuple[tuple[int, int], tuple[int, int, str]] | None]:
    """Return a `_read_process` that shows `adopted` as a child of process 1."""
    processes = {1: ((1, 0), (0, 1, "S")), adopted: ((adopted, 9), (1, adopted, "S"))}
    return processes.get


LISTENS = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED and /proc")
def test_a_suspended_worker_is_named_as_such(make: Callable[..., PolicyEnforcer], folder: Path) -> None:
    """Ctrl-Z suspends the agent with its script; it accepts connections, but answers none."""
    (other := folder.parent / "another-key").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as short:
        (other / SOCKET).symlink_to(Path(short) / SOCKET)
        command = [sys.executable, "-c", LISTENS, str(Path(short) / SOCKET)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "listening\n"
            agent.send_signal(signal.SIGSTOP)
            os.waitpid(agent.pid, os.WUNTRACED)
            try:
                remedy = f"-> continue it with fg in its terminal, or with kill -CONT {agent.pid}"
                for words in ("show", "stop"):
                    done = CliRunner().invoke(cli, ["worker", *words.split()])
                    assert f"the worker is suspended (process {agent.pid}) {remedy}" in str(done.exception)
                make()
                with pytest.raises(
                    ConfigError, match=r"2 workers are running: a suspended worker \(run d.*, anna \("
                ):
                    find_worker("")
                assert find_worker("anna") == folder / SOCKET
                for name in ("annna", f"{(run := folder.parents[2].name)}/bob"):
                    with pytest.raises(ConfigError) as refused:
                        find_worker(name)
                    assert str(refused.value) == (
                        f"there is no running worker {name!r}; a suspended one (run {run}, process "
                        f"{agent.pid}) may have this name -> correct the name, or {remedy[3:]}"
                    )
                with pytest.raises(ConfigError, match=r"there is no worker 'other/bob' -> choose one of: "):
                    find_worker("other/bob")
                assert [path.parent for path, _ in running_workers()] == [other, folder]
                done = CliRunner().invoke(cli, ["worker", "pause", "--all"])
                assert '"state": "paused"' in done.output and remedy in str(done.exception)
            finally:
                agent.kill()


def test_a_long_path_has_a_short_alternative(tmp_path: Path, sensors: FakeSensors) -> None:
    folder = tmp_path / ("x" * 90) / ("y" * 90)
    with PolicyEnforcer(folder, "anna", {}, lambda link: None, sensors=sensors) as enforcer:
        assert len(enforcer.path) < 100 and ask_agent(folder / SOCKET, {"ask": "show"})["name"] == "anna"
    assert not (folder / SOCKET).is_symlink() and not Path(enforcer.path).parent.exists()


def test_the_alternative_path_is_visible_to_the_owner_of_a_service(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, sensors: FakeSensors
) -> None:
    """A service has its own /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        monkeypatch.setenv("RUNTIME_DIRECTORY", f"{runtime}:/run/another")
        folder = tmp_path_factory.mktemp("x") / ("y" * 90)
        with PolicyEnforcer(folder, "anna", {}, lambda link: None, sensors=sensors) as enforcer:
            assert (
                enforcer.path.startswith(f"{runtime}/") and len(os.fsencode(enforcer.path)) <= MAX_PATH_BYTES
            )
            assert ask_agent(folder / SOCKET, {"ask": "show"})["name"] == "anna"
        assert os.listdir(runtime) == []
        for gone in (f"{runtime}/gone", ""):
            monkeypatch.setenv("RUNTIME_DIRECTORY", gone)
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)  # it ends with the login
            with PolicyEnforcer(folder, "anna", {}, lambda link: None, sensors=sensors) as enforcer:
                assert not enforcer.path.startswith(runtime), "the folder does not exist"


def test_rules_are_changed_while_running_and_saved(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors
) -> None:
    enforcer = make(upload="20Mbit")
    place = folder / SOCKET
    link = AgentLink(enforcer.path, lambda: 0)
    assert (link.directive.run, link.directive.upload_Bps) == (True, 2.5e6)
    ask_agent(place, {"ask": "set", "settings": {"upload": "8Mbit", "battery": "pause"}})
    wait_until(lambda: link.directive.upload_Bps == 1e6)
    sensors.say(on_battery=True)
    wait_until(lambda: not link.directive.run)
    assert link.directive.reason == "battery"
    link.report(state="paused")
    wait_until(lambda: ask_agent(place, {"ask": "show"})["obeyed"])
    sensors.say(on_battery=False)
    wait_until(lambda: link.directive.run)
    assert json.loads((folder / RULES_FILE).read_text()) == {"upload": "8Mbit", "battery": "pause"}
    again = PolicyEnforcer(folder.parent / "worker-1", "bob", {}, lambda link: None, sensors=sensors)
    assert again._policy.rules.texts()["battery"] == "run", "another worker has its own"
    again._control_socket.close()


@pytest.mark.parametrize("option", ["", "--table", "--json"])
def test_a_state_is_shown_as_json_in_a_pipe_unless_a_table_is_requested(
    make: Callable[..., PolicyEnforcer], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(control_socket, "find_workers", lambda: [Path(make().path)])
    done = CliRunner().invoke(worker_commands, ["show", *option.split()])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("{") == (option != "--table")
    assert ("  rules: none" in done.output) == (option == "--table")


def test_what_cannot_be_read_is_said_once(make: Callable[..., PolicyEnforcer], folder: Path) -> None:
    make(battery="pause")
    answer = ask_agent(folder / SOCKET, {"ask": "show"})
    assert "  rules: battery=pause" in state_lines(answer), "of the rules those that restrict something"
    slow, fast = (state_lines({**answer, "rules": {"upload": upload}}) for upload in ("1kB", SLOW_UPLOAD))
    assert [line for line in slow if line not in fast] == [
        "  rules: upload=1kB",
        "  with upload=1kB a message of 131 kB or more takes at least 2 min, and the group waits for it; set "
        "upload=200kbit or more, or pause this worker",
    ]
    assert sensor_lines(answer) == [
        "  battery: plugged in",
        "  gpu: not used by other programs",
        "  idle: for 2 h 46 min",
        "  temperature: 40 C",
    ]
    absent = dict.fromkeys(("battery", "idle"), "psutil is not installed") | {"gpu": NOT_NEEDED}
    answer |= {"readings": dict.fromkeys(answer["readings"]), "absent": absent}
    assert sensor_lines(answer) == [
        "  battery, idle: not available (psutil is not installed)",
        "  temperature: not available (the sensor reports no value)",
    ]


def test_a_script_knows_that_its_agent_has_ended(make: Callable[..., PolicyEnforcer], tmp_path: Path) -> None:
    assert not AgentLink(make().path, lambda: 0).is_lost
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        agent: list[socket.socket] = []

        def answer() -> None:
            agent.append(server.accept()[0])
            agent[0].sendall(b"{}\n")

        answering = threading.Thread(target=answer)
        answering.start()
        link = AgentLink(str(tmp_path / "s"), lambda: 0)
        answering.join(WITHIN_S)
    assert not link.is_lost
    agent[0].close()
    wait_until(lambda: link.is_lost)


def test_pause_resume_and_stop_are_obeyed(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    enforcer = make()
    link = AgentLink(enforcer.path, lambda: 0)
    shown = ask_agent(folder / SOCKET, {"ask": "pause", "for": "2h"})
    assert (shown["state"], shown["reason"]) == ("paused", "on request, until 14:00")
    wait_until(lambda: not link.directive.run)
    clock.now = datetime(2026, 3, 2, 14, 0)
    wait_until(lambda: link.directive.run)
    ask_agent(folder / SOCKET, {"ask": "pause"})
    wait_until(lambda: not link.directive.run)
    link.report(state="paused")
    wait_until(lambda: enforcer._script_status.get("state") == "paused")
    shown = ask_agent(folder / SOCKET, {"ask": "resume"})
    assert (shown["state"], shown["reason"]) == ("resuming", "")
    wait_until(lambda: link.directive.run)
    ask_agent(folder / SOCKET, {"ask": "stop"})
    wait_until(lambda: link.directive.stop)
    assert enforcer.is_stopping


def test_a_stop_just_before_the_wait_for_it_is_noticed(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    class StoppedLink(AgentLink):
        def wait(self, *args: Any) -> None:
            ask_agent(folder / SOCKET, {"ask": "stop"})
            wait_until(lambda: self.directive.stop)
            super().wait(*args)

    session: Any = None  # a worker that is not paused needs none
    link = StoppedLink(make().path, lambda: 0)
    pauses = PauseController(session, link, None, lambda upload, download: None)
    until_s = time.monotonic() + WITHIN_S
    assert pauses.await_stop(2 * WITHIN_S) and time.monotonic() < until_s


def test_resume_says_that_the_rules_still_pause_the_worker(make: Callable[..., PolicyEnforcer]) -> None:
    make(hours="22:00-07:00")
    for words, hint in (("pause", False), ("resume", True), ("show", False)):
        lines = CliRunner().invoke(cli, ["worker", words, "--table"]).output.splitlines()
        assert lines[0].startswith("anna () is paused: ") and "outside its permitted hours" in lines[0]
        assert (lines[1] == "  its rules pause it; to change them, run gridtrain worker set") is hint
    assert lines[0].endswith("is paused: outside its permitted hours, until 22:00")


def test_a_worker_whose_run_waits_is_not_shown_as_training(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    why = ["the run is waiting for 3 workers; 1 of 3 has joined"]
    enforcer = make()
    link = AgentLink(enforcer.path, lambda: 0, lambda: why[0])

    def shown() -> tuple[str, str]:
        answer = ask_agent(folder / SOCKET, {"ask": "show"})
        return answer["state"], answer["reason"]

    wait_until(lambda: shown() == ("waiting", why[0]), shown)
    why[0] = ""
    wait_until(lambda: shown() == ("joining", ""), shown)
    link.report(state="training")
    wait_until(lambda: shown() == ("training", ""), shown)
    assert enforcer.untrained_text == ""
    why[0] = "the run is waiting for 2 workers"
    wait_until(lambda: shown() == ("waiting", why[0]), shown)
    assert enforcer.untrained_text == f"waiting: {why[0]}"
    ask_agent(folder / SOCKET, {"ask": "pause"})
    assert shown() == ("paused", "on request")
    link.report(state="paused")
    wait_until(lambda: not link.directive.run)
    ask_agent(folder / SOCKET, {"ask": "resume"})
    wait_until(lambda: shown() == ("resuming", ""), shown)


def test_the_traffic_budget_counts_over_restarts_until_midnight(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcer = make(budget="1kB")
    ended = AgentLink(enforcer.path, lambda: 300)
    wait_until(
        lambda: json.loads((folder / FILE).read_text())["bytes"] == 300 if (folder / FILE).exists() else False
    )
    assert ended.directive.most_bytes == ended.directive.day_bytes == 1000
    enforcer.set_script(0)
    ended.report(state="training")  # read only after its end: nothing is counted twice
    moved = [200]  # the script was started again and counts from 0: 700 of the day are left
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    link = AgentLink(enforcer.path, lambda: moved[0])
    ended.report(state="joining")
    assert link.directive.most_bytes == 700
    wait_until(lambda: json.loads((folder / FILE).read_text())["bytes"] == 500)
    assert link.directive.most_bytes == 700 and link.directive.run
    moved[0] = 700
    wait_until(lambda: not link.directive.run)
    assert link.directive.reason == "the day's traffic budget is used up, until 00:00"
    clock.now = datetime(2026, 3, 3, 0, 1)
    wait_until(lambda: link.directive.run and link.directive.most_bytes == 1700)


def test_each_script_is_counted_from_zero_also_with_an_earlier_process_id(
    make: Callable[..., PolicyEnforcer], clock: Clock
) -> None:
    """The second script has connected before the agent records its start."""
    enforcer = make(budget="1kB")
    training = {"state": "training", "moved_bytes": 300}
    enforcer.set_script(7)
    enforcer._on_script_connected({"pid": 7})
    enforcer._on_script_status(7, training)
    assert enforcer._budget.today_bytes(clock.now.date()) == 300
    enforcer.set_script(0)
    enforcer._on_script_connected({"pid": 7})
    enforcer.set_script(7)
    enforcer._on_script_status(7, training)
    assert enforcer._budget.today_bytes(clock.now.date()) == 600


def test_what_the_agent_fetches_is_counted_and_obeys_the_rules(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    enforcer = make(budget="1kB", download="8kbit")
    meter = AgentMeter(enforcer)
    assert meter.request(5000) == 1000, "the budget is less than a piece"
    with pytest.raises(
        DataError, match=r"a\.txt of 1\.5 kB, .* larger than the traffic budget of a day, 1 kB"
    ):
        meter.check_undivided("a.txt", 1500)
    meter.count(600)
    assert enforcer.allow_fetch() == (1000.0, 400)
    wait_until(
        lambda: json.loads((folder / FILE).read_text())["bytes"] == 600 if (folder / FILE).exists() else False
    )
    meter.count(400)
    enforcer.__exit__()
    assert json.loads((folder / FILE).read_text())["bytes"] == 1000
    enforcer = make(budget="1kB", download="8kbit")
    meter = AgentMeter(enforcer)
    with pytest.raises(BudgetSpent, match=r"^the day's traffic budget is used up, until 00:00"):
        meter.request(1)
    clock.now = datetime(2026, 3, 3, 0, 1)
    assert enforcer.allow_fetch() == (1000.0, 1000)
    ask_agent(folder / SOCKET, {"ask": "pause"})
    with pytest.raises(BudgetSpent, match=r"^on request"):
        meter.request(1)


@pytest.mark.parametrize("rule", ["battery=pause", "temperature=80", "gpu=pause", "idle=10m"])
def test_a_rule_without_its_sensor_is_refused(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors, rule: str
) -> None:
    key, _, value = rule.partition("=")
    sensors.say(on_battery=None, temperature_C=None, gpu_used=None, idle_s=None)
    with pytest.raises(ConfigError, match=f'the "{key}" sensor cannot be read: the fake sensors'):
        make(**{key: value})
    make()
    with pytest.raises(ConfigError, match=f'the "{key}" sensor cannot be read'):
        ask_agent(folder / SOCKET, {"ask": "set", "settings": {key: value}})
    assert not (folder / RULES_FILE).exists(), "no rule was changed"


def test_a_broken_link_is_restored_and_nothing_is_counted_twice(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    enforcer = make(budget="1kB")
    link = AgentLink(enforcer.path, lambda: 300)
    wait_until(lambda: enforcer._budget.today_bytes(Clock().now.date()) == 300)
    link._socket.close()
    ask_agent(folder / SOCKET, {"ask": "pause"})
    wait_until(lambda: not link.directive.run)
    assert link.directive.most_bytes == 1000 and enforcer._budget.today_bytes(Clock().now.date()) == 300


@pytest.mark.parametrize("file", [RULES_FILE, OWNER_FILE])
def test_rules_apply_and_are_saved_later_if_they_cannot_be_saved(
    file: str, folder: Path, sensors: FakeSensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk does not keep the owner from setting a stricter rule."""
    said: list[str] = []
    write = saved_settings.replace_private_json

    def fill_disk(path: Path, body: object, remedy: str) -> None:
        if path.name == file:
            raise ConfigError(f"{path} cannot be written: No space left on device", remedy=remedy)
        write(path, body, remedy)

    with PolicyEnforcer(folder, "anna", {"upload": "20Mbit"}, said.append, sensors=sensors) as enforcer:
        with monkeypatch.context() as disk:
            disk.setattr(saved_settings, "replace_private_json", fill_disk)
            ask_agent(folder / SOCKET, {"ask": "set", "settings": {"upload": "1Mbit"}})
        assert enforcer.rules.upload == "1Mbit"
        unsaved = (
            f"{folder / file} cannot be written: No space left on device; therefore this command will not"
        )
        assert said[-2].startswith(unsaved) and said[-1] == "this worker's rules are now upload=1Mbit"
        ask_agent(folder / SOCKET, {"ask": "set", "settings": {"download": "8Mbit"}})
    later = SavedSettings(folder).effective_rules({"upload": "20Mbit"})
    assert later == {"upload": "1Mbit", "download": "8Mbit"}


def test_a_restart_uses_the_owners_latest_settings(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors, clock: Clock
) -> None:
    """A service always starts with the same options; only edited options replace later settings.

    start   upload=20Mbit   download=50Mbit
    set     upload=5Mbit    hours=22:00-07:00      pause
    start   upload=20Mbit   download=50Mbit    ->  5Mbit, 50Mbit, 22:00-07:00, paused
    start   upload=8Mbit                       ->  8Mbit
    """
    said: list[str] = []
    clock.now = datetime(2026, 3, 2, 23, 0)
    first = make(upload="20Mbit", download="50Mbit")
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"upload": "5Mbit", "hours": "22:00-07:00"}})
    ask_agent(folder / SOCKET, {"ask": "pause"})
    first.__exit__()
    settings = {"upload": "20Mbit", "download": "50Mbit"}
    with PolicyEnforcer(folder, "anna", settings, said.append, sensors=sensors, now=clock) as again:
        rules = again._policy.rules.texts()
        assert (rules["upload"], rules["download"], rules["hours"]) == ("5Mbit", "50Mbit", "22:00-07:00")
        assert again.decision.reasons[0] == "on request" and not again.decision.may_train
        assert "upload=5Mbit applies instead of 20Mbit, because it was set later" in said
        ask_agent(folder / SOCKET, {"ask": "resume"})
    with PolicyEnforcer(
        folder, "anna", {"upload": "8Mbit"}, said.append, sensors=sensors, now=clock
    ) as edited:
        assert edited._policy.rules.upload == "8Mbit"
        assert "on request" not in edited.decision.reasons
        assert said[-1] == f"{SAVED_RULES_APPLY}: hours=22:00-07:00 {HOW_TO_CHANGE}"
        ask_agent(folder / SOCKET, {"ask": "set", "settings": {"hours": "off"}})
        ask_agent(folder / SOCKET, {"ask": "pause"})
        ask_agent(folder / SOCKET, {"ask": "stop"})
    said.clear()
    with PolicyEnforcer(folder, "full", {}, said.append, sensors=sensors) as afresh:
        assert afresh.decision.may_train, "a start after `stop` ends the stop"
        assert said == [f"{SAVED_RULES_APPLY}: upload=5Mbit {HOW_TO_CHANGE}"], "hours=off is no rule"


def test_a_timed_pause_ends_also_after_a_restart(
    make: Callable[..., PolicyEnforcer], folder: Path, sensors: FakeSensors, clock: Clock
) -> None:
    first = make()
    ask_agent(folder / SOCKET, {"ask": "pause", "for": "2h"})
    first.__exit__()
    with PolicyEnforcer(folder, "anna", {}, lambda link: None, sensors=sensors, now=clock) as again:
        assert again.decision.text() == "on request, until 14:00"
        clock.now = datetime(2026, 3, 2, 14, 0)
        wait_until(lambda: again.decision.may_train)
    said: list[str] = []
    with PolicyEnforcer(folder, "anna", {}, said.append, sensors=sensors, now=clock) as later:
        assert later.decision.may_train and not said


def test_rules_are_enforced_without_a_log(folder: Path, sensors: FakeSensors, clock: Clock) -> None:
    def full(link: str) -> None:
        raise OSError(28, "No space left on device")

    with PolicyEnforcer(folder, "anna", {"battery": "pause"}, full, sensors=sensors, now=clock) as enforcer:
        for on_battery in (True, False, True):
            sensors.say(on_battery=on_battery)
            wait_until(lambda on=on_battery: enforcer.decision.may_train is not on)  # type: ignore[misc]


def test_the_agent_ends_when_rules_are_no_longer_enforced(
    make: Callable[..., PolicyEnforcer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local fault ends the agent and the script, instead of only the rules."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    enforcer = make()
    enforcer.raise_fault()
    monkeypatch.setattr(enforcer, "_decide", lambda: 1 // 0)
    wait_until(lambda: not enforcer._thread.is_alive())
    with pytest.raises(RuntimeError, match="rules are no longer enforced"):
        enforcer.raise_fault()


def test_a_missing_file_of_sensors_pauses_the_worker(tmp_path: Path, folder: Path) -> None:
    file, said = tmp_path / "sensors.json", list[str]()
    file.write_text('{"on_battery": false}')
    with PolicyEnforcer(
        folder, "anna", {"battery": "pause"}, said.append, sensors=FileSensors(file)
    ) as enforcer:
        assert enforcer.decision.may_train
        file.unlink()
        wait_until(lambda: not enforcer.decision.may_train)
        assert 'the "battery" sensor cannot be read (the sensors in' in enforcer.decision.text()
        file.write_text('{"on_battery": false}')
        wait_until(lambda: enforcer.decision.may_train)
    assert len(said) == 2, said


def test_a_script_that_ends_without_traffic_budget_waits_for_the_next_day(
    make: Callable[..., PolicyEnforcer], folder: Path, clock: Clock
) -> None:
    """A little of the budget is left, too little for a step."""
    enforcer = make(budget="1kB")
    enforcer._on_script_status(0, {"state": BUDGET_EXHAUSTED, "moved_bytes": 900})
    assert not enforcer.decision.may_train
    assert enforcer.decision.text() == "the day's traffic budget is used up, until 00:00"
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"budget": "2kB"}})
    wait_until(lambda: enforcer.decision.may_train)
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"budget": "1kB"}})
    wait_until(lambda: not enforcer.decision.may_train)
    clock.now = datetime(2026, 3, 3, 0, 1)
    wait_until(lambda: enforcer.decision.may_train)


def test_a_script_that_pauses_before_its_budget_is_used_up_is_shown_as_paused(
    make: Callable[..., PolicyEnforcer], folder: Path
) -> None:
    """It keeps a reserve of bytes for the end of its step."""
    enforcer = make(budget="1kB")
    link = AgentLink(enforcer.path, lambda: 900)
    reason = link.directive.spent_text
    link.report(state="paused", reason=reason)
    wait_until(lambda: not enforcer.decision.may_train)
    (shown,) = (shown for _, shown in running_workers())
    assert (shown["state"], shown["reason"]) == ("paused", "the day's traffic budget is used up, until 00:00")
    ask_agent(folder / SOCKET, {"ask": "set", "settings": {"budget": "2kB"}})
    link.report(state="paused", reason=reason)  # before the script has continued
    wait_until(lambda: link.directive.run)
    assert enforcer.decision.may_train


def test_a_budget_pauses_the_worker_if_bytes_cannot_be_counted(
    make: Callable[..., PolicyEnforcer], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcer = make(budget="1kB")

    def full(*_: Any, **__: Any) -> None:
        raise ConfigError("the disk is full, so the day's traffic cannot be counted")

    monkeypatch.setattr(enforcer._budget, "keep", full)
    link = AgentLink(enforcer.path, lambda: 300)
    wait_until(lambda: not link.directive.run)
    assert link.directive.reason == "the disk is full, so the day's traffic cannot be counted"
    monkeypatch.undo()
    wait_until(lambda: link.directive.run)
    assert json.loads((folder / FILE).read_text())["bytes"] == 300, "the disk has space again"


def test_unknown_requests_are_refused_and_noise_is_dropped(
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
                pass  # closed in the middle
    assert ask_agent(folder / SOCKET, {"ask": "show"})["name"] == "anna"


def test_a_script_that_does_not_obey_is_overdue(
    make: Callable[..., PolicyEnforcer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_enforcer, "OBEY_TIMEOUT_S", 0.2)
    enforcer = make()
    enforcer.set_script(os.getpid())
    assert not enforcer.is_overdue
    enforcer._answer({"ask": "pause"})
    wait_until(lambda: enforcer.is_overdue)
    enforcer._on_script_status(0, {"state": "paused"})
    assert not enforcer.is_overdue
    enforcer._answer({"ask": "stop"})
    assert not enforcer.is_overdue, "its deadline begins with stop"
    wait_until(lambda: enforcer.is_overdue)
