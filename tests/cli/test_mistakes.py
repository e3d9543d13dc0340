"""Mistakes of users, within this process: one sentence says what to do, with the right exit code."""

from __future__ import annotations

import errno
import json
import os
import pty
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gridtrain._version import __version__
from gridtrain.cli import status
from gridtrain.cli.main import cli, main
from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import ConfigError
from gridtrain.network.transport.identity import Identity

RunCommand = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder for keys and journals of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gridtrain(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs the command to its end, without settings of a run, terminal width or colours."""
    for name in os.environ:
        if name.startswith(("GRIDTRAIN_", "COLUMNS", "FORCE_COLOR")):
            monkeypatch.delenv(name)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert isinstance(ended.value.code, int)
        for stream in (sys.stdout, sys.stderr):  # as at the end of a process
            stream.flush()
        output = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code, output.out, output.err)

    return run


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The last line of stderr: an error with its remedy."""
    assert done.returncode == code, done.stderr
    line = done.stderr.splitlines()[-1]
    if line.startswith("{"):  # a coordinator logs JSON if stderr is no terminal
        line = "gridtrain: " + json.loads(line)["fields"]["text"]
    assert line.startswith("gridtrain: ") and " -> " in line, done.stderr
    return line


def test_version_and_help(gridtrain: RunCommand) -> None:
    assert gridtrain("--version").stdout == f"gridtrain, version {__version__}\n"
    text = gridtrain("--help").stdout
    for expected in (
        "coordinator",
        "worker",
        "status",
        "demo",
        "Exit codes of all",
        "3    the coordinator cannot",
    ):
        assert expected in text


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_that_ends_a_coordinator_has_the_format_of_its_log(
    gridtrain: RunCommand, log_format: str, tmp_path: Path
) -> None:
    nowhere = ("--from-backup", str(tmp_path / "nowhere"), "--state", str(tmp_path / "state"))
    done = gridtrain("coordinator", *nowhere, "--no-dashboard", "--log-format", log_format)
    (line,) = done.stderr.splitlines()
    text = f"there is no backup in {tmp_path / 'nowhere'} -> "
    if log_format == "text":
        assert done.returncode == 2 and line.startswith(f"gridtrain: {text}")
    else:
        entry = json.loads(line)
        assert (done.returncode, entry["event"], entry["level"]) == (2, "error", "error")
        assert entry["fields"]["text"].startswith(text) and entry["fields"]["exit_code"] == 2


def invitation_to(address: str, **fields: Any) -> str:
    keys = {"coordinator": bytes(32), "token": bytes(32), "run": "default"}
    return Invitation(address, **keys | fields).text()


INVITATION = invitation_to("tcp://127.0.0.1:1")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits 1 s for an answer instead of the usual time."""
    monkeypatch.setattr(status, "ANSWER_TIMEOUT_S", 1.0)


def test_a_read_only_disk_is_reported(gridtrain: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/home/anna/worker-0.lock")

    monkeypatch.setattr(cli, "main", refuse)
    done = gridtrain("status")
    error = "/home/anna/worker-0.lock cannot be written: Read-only file system -> make it writable"
    assert (done.returncode, done.stderr) == (1, f"gridtrain: {error}\n")


def test_an_unreachable_coordinator_is_reported(gridtrain: RunCommand, impatient: None) -> None:
    began_s = time.monotonic()
    line = one_sentence(gridtrain("status", invitation_to("tcp://127.0.0.1:1")), code=3)
    assert "the coordinator at tcp://127.0.0.1:1 cannot be reached" in line
    assert "`gridtrain coordinator` is running" in line
    assert time.monotonic() - began_s < 15


@pytest.mark.parametrize("running", ["", "my-run"])
def test_no_coordinator_runs_on_this_machine(gridtrain: RunCommand, home: Path, running: str) -> None:
    """The running coordinator may belong to a run of another name."""
    if running:
        (home / "gridtrain" / running).mkdir(parents=True)
        (home / "gridtrain" / running / "coordinator.json").touch()
    line = one_sentence(gridtrain("status"), code=3)
    assert f'run "default" is running on this machine as this user: {home}/gridtrain/default/coordi' in line
    named = f" (this user's runs: {running})" if running else ""
    assert f"in the folder of the run's run.toml, name the run with --run NAME{named}, or its state" in line


def test_another_program_at_the_address_is_reported(gridtrain: RunCommand, impatient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = one_sentence(gridtrain("status", invitation_to(f"tcp://127.0.0.1:{port}")), code=3)
    assert "did not answer within 1 s" in line


def test_an_address_instead_of_an_invitation_is_refused(gridtrain: RunCommand) -> None:
    """gridtrain 0.1 accepted addresses."""
    for command in (("status", "tcp://10.0.0.5:7700"), ("worker", "tcp://10.0.0.5:7700", "--", "true")):
        line = one_sentence(gridtrain(*command), code=2)
        assert "is not an invitation; an invitation begins with gridtrain1: -> copy the whole line" in line


def test_a_used_port_is_reported(gridtrain: RunCommand, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        state = str(tmp_path / "state")
        line = one_sentence(gridtrain("coordinator", "--listen", address, "--state", state), code=1)
    assert f"{address}: the port is taken -> stop the program that uses the port" in line


def test_a_state_directory_that_cannot_be_created_is_reported(gridtrain: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "state"
    line = one_sentence(gridtrain("coordinator", "--state", str(folder)), code=2)
    assert (
        f"the folder {folder} cannot be created: Not a directory -> choose another folder with --state"
        in line
    )


def test_a_run_name_that_is_no_file_name_is_refused(gridtrain: RunCommand) -> None:
    assert "is not a valid run name" in one_sentence(gridtrain("coordinator", "--run", "../me"), code=2)


@pytest.mark.parametrize("change", ["truncated", "one letter", "another version"])
def test_an_altered_invitation_is_refused(gridtrain: RunCommand, change: str) -> None:
    text = invitation_to("tcp://127.0.0.1:1")
    middle = len(text) // 2
    altered, reason = {
        "truncated": (text[:-3], "was cut short or altered in transit -> copy the whole line again"),
        "one letter": (
            text[:middle] + ("B" if text[middle] != "B" else "C") + text[middle + 1 :],
            "was cut short or altered in transit",
        ),
        "another version": (
            text.replace("1:", "2:", 1),
            "by a newer gridtrain -> run: pip install --upgrade",
        ),
    }[change]
    assert reason in one_sentence(gridtrain("worker", altered, "--", "true"), code=2)


def test_an_unencrypted_coordinator_listens_on_loopback_only(gridtrain: RunCommand) -> None:
    line = one_sentence(gridtrain("coordinator", "--unencrypted", "--listen", "tcp://0.0.0.0:0"), code=1)
    assert "cannot listen on 'tcp://0.0.0.0:0' without encryption" in line and "127.0.0.1" in line


@pytest.mark.parametrize("name", ["coordinator.key", "operator.key"])
def test_a_coordinators_key_that_others_may_read_is_refused(
    gridtrain: RunCommand, tmp_path: Path, name: str
) -> None:
    state = tmp_path / "state"
    Identity.generate().write(state / name)
    (state / name).chmod(0o640)
    line = one_sentence(gridtrain("coordinator", "--state", str(state)), code=2)
    assert f"{state / name} has mode 0640, so others may read it -> chmod 600 {state / name}" in line


@pytest.mark.integration
@pytest.mark.executed
def test_an_invitation_in_the_arguments_is_hidden_from_other_users() -> None:
    hide = "from gridtrain.cli.secret_arguments import hide_invitations; hide_invitations()"
    show = "print(open('/proc/self/cmdline').read())"
    command = [sys.executable, "-c", f"{hide}; {show}", "worker", INVITATION, "--", "true"]
    done = subprocess.run(command, capture_output=True, check=True)
    secret = INVITATION.removeprefix("gridtrain1:")
    assert done.stdout.decode().split("\0")[3:6] == ["worker", "gridtrain1:" + "*" * len(secret), "--"]


@pytest.mark.integration
@pytest.mark.executed
def test_the_terminal_is_read_after_an_invitation_from_a_pipe() -> None:
    script = "from gridtrain.cli.worker import _read; print(_read('-').strip(), 'read', input('Run it? '))"
    pid, master = pty.fork()
    if pid == 0:
        command = f'echo {INVITATION} | {shlex.quote(sys.executable)} -c "{script}"'
        os.execv("/bin/sh", ["/bin/sh", "-c", command])
    seen = b""
    with suppress(OSError):  # Linux: the other end is closed
        while piece := os.read(master, 4096):
            seen += piece
            if seen.endswith(b"Run it? "):
                os.write(master, b"yes\n")
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0 and f"{INVITATION} read yes" in seen.decode(), seen


def test_with_debug_the_exception_is_raised(gridtrain: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRIDTRAIN_DEBUG", "1")
    with pytest.raises(ConfigError, match="is not an invitation"):
        gridtrain("status", "example")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("dance",), "No such command 'dance'"),
        (("worker",), "no invitation was given -> run gridtrain worker INVITATION"),
        (("worker", INVITATION, "--upload-limit", "fast", "--", "true"), "'fast' is not a rate"),
        (("worker", "--", "true"), "no invitation was given -> run gridtrain worker INVITATION"),
        (("worker", "--name", "anna", "--", "true", "--", "x"), "no invitation was given"),
        (("worker", "", "--", "true"), "no invitation was given"),
        (("worker", "@/dev/null", "--", "true"), "no invitation was given -> copy the whole line"),
        (("worker", "true", "--", "true"), "'true' is not an invitation"),
        (("coordinator", "--min-workers", "0"), "0 is not an integer of at least 1"),
        (("coordinator", "--listen", "lab-pc"), "--listen lab-pc has no port -> write tcp://lab-pc:7700"),
        (
            ("coordinator", "--listen", "tcp://127.0.0.1:0", "--backup-to", "/proc/x"),
            "no backup can be written",
        ),
        (("coordinator", "--advertise", "foo"), "--advertise foo has no port -> write tcp://foo:7700"),
        (
            ("coordinator", "--listen", "7700"),
            "--listen 7700 has no host -> write tcp://0.0.0.0:7700 for all",
        ),
        (("coordinator", "--listen", "::1"), "in brackets: tcp://[2001:db8::1]:7700"),
        (
            ("coordinator", "--listen", "tcp:/127.0.0.1:7700"),
            "--listen must be tcp://host:port, got 'tcp:/127.0.0.1:7700' -> write an address such as tcp://",
        ),
        (("coordinator", "--recut-after", "15x"), "15x is not a number of at least 0"),
        (("coordinator", "--recut-after", "-1"), "-1 is not a number of at least 0"),
        (("coordinator", "--recut-after", "nan"), "nan is not a number of at least 0"),
        (
            ("worker", INVITATION, "--accept", "yes"),
            "--accept is yes, which is not a digest -> write sha256:",
        ),
        (
            ("worker", INVITATION, "--accept", "--name", "carl"),
            "--accept is --name, which is not a digest -> write sha256:",
        ),
        (
            ("coordinator", "--advertise", "0.0.0.0:7700"),
            "--advertise tcp://0.0.0.0:7700 is not an address that other machines can connect to -> omit",
        ),
        (("coordinator", "--advertise", "foo:0"), "--advertise must be tcp://host:port, got 'foo:0'"),
        (("worker", INVITATION, "--advertise", "foo", "--", "true"), "--advertise foo has no port"),
        (("invite", "--expires", "0s"), "'0s' is not between 1 s and 366 d"),
        (("invite", "--expires", "367d"), "'367d' is not between 1 s and 366 d"),
        (("config", "show", "worker", "--restarts", "-1"), "-1 is not an integer of at least 0"),
    ],
    ids=lambda value: " ".join(value).replace(INVITATION, "INVITATION") if isinstance(value, tuple) else "",
)
def test_usage_errors_are_exit_code_2(gridtrain: RunCommand, arguments: tuple[str, ...], text: str) -> None:
    done = gridtrain(*arguments)
    assert done.returncode == 2 and text in done.stderr
