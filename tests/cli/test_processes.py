"""Commands as real processes over loopback: they work, or one sentence says what to do.

Mistakes that are found before a process is needed are in test_mistakes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gridtrain.core.group.invitation import parse
from gridtrain.runtime.client.endpoint_file import EndpointFile

pytestmark = pytest.mark.integration
WITHIN_S = 60.0
CLI = (sys.executable, "-m", "gridtrain")


@dataclass(frozen=True)
class Running:
    """A running coordinator that has printed its address."""

    process: subprocess.Popen[str]
    address: str
    greeting: str
    state: Path

    def invitation(self, *options: str) -> str:
        done = gridtrain("invite", "--state", str(self.state), *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


StartCoordinator = Callable[..., Running]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder for keys and journals of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def environment() -> dict[str, str]:
    """The environment without settings of a run, terminal width and colours."""
    hidden = ("GRIDTRAIN_", "COLUMNS", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


def gridtrain(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        (*CLI, *arguments), capture_output=True, text=True, timeout=WITHIN_S, env=environment() | more
    )


@pytest.fixture
def start_coordinator(tmp_path: Path) -> Iterator[StartCoordinator]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, stderr: int = subprocess.PIPE) -> Running:
        state = tmp_path / "state"
        options = ("--listen", "tcp://127.0.0.1:0", "--state", str(state))
        process = subprocess.Popen(
            (*CLI, "coordinator", *options, *arguments),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(),
        )
        started.append(process)
        assert process.stdout is not None
        greeting = "".join(process.stdout.readline() for _ in range(4))
        address = re.search(r"tcp://\S+:\d+", greeting)
        assert address is not None, f"{greeting!r} {process.communicate(timeout=WITHIN_S)}"
        return Running(process, address[0], greeting, state)

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WITHIN_S)


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The last line of stderr: an error with its remedy; no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    if line.startswith("{"):
        line = "gridtrain: " + json.loads(line)["fields"]["text"]
    assert line.startswith("gridtrain: ") and " -> " in line, done.stderr
    return line


# -- commands that work ----------------------------------------------------------------------------


@pytest.mark.executed
def test_coordinator_invitation_status_and_worker(start_coordinator: StartCoordinator) -> None:
    running = start_coordinator("--run", "shakespeare", "--min-workers", "2")
    here = f" --state {running.state}"
    assert running.greeting == (
        f'run "shakespeare" is coordinated at {running.address}, state in {running.state}\n'
        f"  to invite a worker:  gridtrain invite{here}\n"
        "  on the worker:       gridtrain worker INVITATION -- python train.py\n"
        f"  to watch it:         gridtrain status{here} --watch\n"
    )

    table = gridtrain("status", "--table", "--state", str(running.state))
    assert (table.returncode, table.stderr) == (0, "")
    assert "run shakespeare  waiting  waiting for 2 workers" in table.stdout
    assert "term 1  generation 0  step 0" in table.stdout
    assert "no worker has joined yet" in table.stdout

    invitation = running.invitation()
    code = "import os, sys; print(os.environ['GRIDTRAIN_RUN']); sys.exit(7)"
    worker = gridtrain("worker", invitation, "--name", "anna", "--", sys.executable, "-c", code)
    assert (worker.returncode, worker.stdout) == (7, "shakespeare\n")
    first, last = worker.stderr.splitlines()
    assert json.loads(first)["fields"]["text"].startswith("anna is joining the run")
    assert "the script ended with exit code 7" in json.loads(last)["fields"]["text"]

    running.process.terminate()
    _, err = running.process.communicate(timeout=WITHIN_S)
    assert running.process.returncode == 128 + signal.SIGTERM
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events if event["level"] != "info"] == []
    logged = [event["event"] for event in events if event["event"] != "denied"]
    assert logged == ["started", "enrolled", "stopped"]


def test_without_options_all_commands_find_the_run_of_this_machine(home: Path) -> None:
    """The default state directory is the same for coordinator, operator and workers."""
    listen = (*CLI, "coordinator", "--listen", "tcp://127.0.0.1:0")
    coordinator = subprocess.Popen(
        listen, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    )
    try:
        invited = gridtrain("invite", "--wait", "20s")
        assert invited.returncode == 0, invited.stderr
        script = (sys.executable, "-c", "print('trained')")
        assert gridtrain("worker", invited.stdout.strip(), "--", *script).stdout == "trained\n"
        shown = json.loads(gridtrain("status", "--json").stdout)
        assert (shown["run"], shown["phase"], shown["term"]) == ("default", "waiting", 1)
        assert shown["door"]["enrolled_total"] == 1
        assert not EndpointFile.is_abandoned(home / "gridtrain" / "default"), "it holds the file's lock"
    finally:
        coordinator.terminate()
        coordinator.communicate(timeout=WITHIN_S)
    files = sorted(path for path in home.rglob("*") if path.is_file())
    secret = [path.name for path in files if path.suffix == ".key"]
    assert secret == ["coordinator.key", "worker-0.key", "operator.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files if path.suffix == ".key"} == {0o600}
    assert not (home / "gridtrain" / "default" / "coordinator.json").exists(), (
        "no coordinator listens any more"
    )


def test_the_status_for_an_invitation_contains_less_than_the_operators(
    start_coordinator: StartCoordinator,
) -> None:
    """The holder of an invitation sees the run's progress, but neither addresses nor access control."""
    running = start_coordinator()
    invitation = running.invitation()
    shown = json.loads(gridtrain("status", invitation, "--json").stdout)
    own = json.loads(gridtrain("status", "--state", str(running.state), "--json").stdout)
    assert "door" in own and "door" not in shown
    assert (shown["run"], shown["phase"]) == (own["run"], own["phase"]) == ("default", "waiting")
    (row,) = own["door"]["invitations"] or [None]
    assert row is None or row["used"] == 1
    assert "waiting for 1 worker" in gridtrain("status", "--table", invitation).stdout, (
        "its key is enrolled now"
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name
)
def test_a_restarted_coordinator_has_the_next_term(
    start_coordinator: StartCoordinator, number: signal.Signals
) -> None:
    running = start_coordinator()
    running.process.send_signal(number)
    running.process.communicate(timeout=WITHIN_S)
    expected = -number if number is signal.SIGKILL else 128 + number
    assert running.process.returncode == expected
    again = start_coordinator()
    assert json.loads(gridtrain("status", "--state", str(again.state), "--json").stdout)["term"] == 2


def test_a_coordinator_for_containers_reads_its_settings_from_the_environment(tmp_path: Path) -> None:
    settings = {
        "GRIDTRAIN_RUN": "boxed",
        "GRIDTRAIN_LISTEN": "tcp://127.0.0.1:0",
        "GRIDTRAIN_ADVERTISE": "tcp://coordinator:7700",
        "GRIDTRAIN_STATE": str(tmp_path / "state"),
    }
    process = subprocess.Popen(
        (sys.executable, "-m", "gridtrain_coordinator"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | settings,
    )
    assert process.stdout is not None
    assert 'run "boxed" is coordinated at tcp://coordinator:7700' in process.stdout.readline()
    invited = gridtrain("invite", GRIDTRAIN_STATE=str(tmp_path / "state"))
    assert parse(invited.stdout).address == "tcp://coordinator:7700", "as in the container's environment"
    process.terminate()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM


def full_pipe() -> tuple[int, int]:
    """A pipe to which nothing more can be written, as that of a log that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n")
    os.set_blocking(writer, True)
    return reader, writer


def test_nobody_needs_to_read_the_logs_of_coordinator_and_worker(
    start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    """Both serve commands and signals, also once the pipe is closed."""
    reader, writer = full_pipe()
    running = start_coordinator(stderr=writer)
    code = (
        "import sys, time; print('x' * 100_000, file=sys.stderr); print('ready', flush=True); time.sleep(600)"
    )
    worker = subprocess.Popen(
        (*CLI, "worker", running.invitation(), "--name", "anna", "--", sys.executable, "-c", code),
        stdout=subprocess.PIPE,
        stderr=writer,
        env=environment(),
        text=True,
    )
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    shown = gridtrain("worker", "pause", "--worker", "anna")
    assert shown.returncode == 0, shown.stderr
    os.close(writer)
    os.close(reader)
    assert gridtrain("worker", "resume", "--worker", "anna").returncode == 0
    assert gridtrain("status", "--state", str(running.state)).returncode == 0
    for process in (worker, running.process):
        process.terminate()
        process.communicate(timeout=WITHIN_S)
        assert process.returncode == 128 + signal.SIGTERM


# -- errors ----------------------------------------------------------------------------------------


def test_a_journal_that_is_in_use_is_an_error(start_coordinator: StartCoordinator) -> None:
    """Not that the ports are taken, which the same command also finds."""
    running = start_coordinator()
    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        options = ("--listen", running.address, "--dashboard", f"127.0.0.1:{dashboard.getsockname()[1]}")
        line = one_sentence(gridtrain("coordinator", *options, "--state", str(running.state)), code=1)
    assert "is in use" in line and "stop the other coordinator" in line


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        (lambda journal: journal.write_bytes(journal.read_bytes()[:5000]), 1, "is damaged"),
        (lambda journal: journal.write_bytes(b"notes" * 999), 1, "is damaged (file is not a database)"),
        (lambda journal: journal.write_bytes(b""), 1, "it is empty, although"),
        (lambda journal: (journal.parent / "coordinator.key").unlink(), 1, "belongs to the key"),
    ],
    ids=["truncated", "other bytes", "empty", "no key"],
)
def test_an_unusable_journal_is_not_changed(
    start_coordinator: StartCoordinator, damage: Callable[[Path], object], code: int, text: str
) -> None:
    running = start_coordinator()
    running.process.terminate()
    running.process.communicate(timeout=WITHIN_S)
    damage(running.state / "journal.sqlite")
    before = {path.name: path.read_bytes() for path in running.state.iterdir()}
    line = one_sentence(gridtrain("coordinator", "--state", str(running.state)), code)
    assert text in line
    assert {path.name: path.read_bytes() for path in running.state.iterdir()} == before


def test_a_standby_continues_as_the_same_coordinator(
    start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    """It has the same invitations, members and keys; impossible restores are errors."""
    backups, standby = str(tmp_path / "backups"), tmp_path / "standby"
    running = start_coordinator("--backup-to", backups, "--backup-every", "0.1")
    invitation = running.invitation()
    assert gridtrain("worker", invitation, "--", "true").returncode == 0
    running.process.terminate()
    running.process.communicate(timeout=WITHIN_S)

    options = ("--listen", running.address, "--state", str(standby))
    line = one_sentence(gridtrain("coordinator", *options, "--from-backup", str(tmp_path / "none")), 2)
    assert "there is no backup in" in line
    line = one_sentence(gridtrain("coordinator", "--state", str(running.state), "--from-backup", backups), 2)
    assert "which a backup must not replace -> omit --from-backup" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dashboard = ("--dashboard", f"127.0.0.1:{taken.getsockname()[1]}")
        failed = gridtrain("coordinator", *options, "--from-backup", backups, *dashboard)
    assert (failed.returncode, "the port is taken" in failed.stderr) == (1, True), "a later start can succeed"
    standby_running = start_coordinator(*options[2:], "--listen", running.address, "--from-backup", backups)
    assert standby_running.address == running.address
    shown = json.loads(gridtrain("status", "--state", str(standby), "--json").stdout)
    assert (shown["term"], shown["door"]["enrolled_total"]) == (2, 1)
    assert gridtrain("worker", invitation, "--", "true").returncode == 0, "its key is enrolled"
    standby_running.process.terminate()
    log = standby_running.process.communicate(timeout=WITHIN_S)[1]
    assert "the same command without --from-backup continues the run" in log


def test_an_unencrypted_run_is_joined_with_the_same_flag(start_coordinator: StartCoordinator) -> None:
    running = start_coordinator("--unencrypted")
    assert "NOT ENCRYPTED: anyone on the network path can read and alter" in running.greeting
    clear = running.invitation()
    agreed = gridtrain("worker", clear, "--unencrypted", "--", sys.executable, "-c", "print('trained')")
    assert (agreed.returncode, agreed.stdout) == (0, "trained\n"), agreed.stderr
    assert gridtrain("status", "--state", str(running.state)).returncode == 0
    done = gridtrain("status", replace(parse(clear), encrypted=True).text())
    assert done.returncode == 3, "an unencrypted coordinator does not answer an encrypted client"


@pytest.mark.parametrize("under_worker", [True, False])
def test_ctrl_c_while_torch_is_imported_is_one_sentence(under_worker: bool, tmp_path: Path) -> None:
    """Only under `gridtrain worker`; otherwise Python's traceback stays."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("GRIDTRAIN_COORDINATOR", None)
    if under_worker:
        environment["GRIDTRAIN_COORDINATOR"] = "tcp://127.0.0.1:1"
    script = [sys.executable, "-c", "import gridtrain\nimport torch"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and ("Traceback" not in done.stderr) == under_worker
    assert not under_worker or done.stderr == "gridtrain: interrupted; this worker is leaving the run\n"


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ('"$@" config show >&- <&-', 0, ""),
        ('"$@" config show >&- 2>&- <&-', 0, ""),
        ('PYTHONIOENCODING=latin-1 "$@" new 日 --name sun | grep -F "\\u65e5"', 0, ""),
        (
            '"$@" --help >/dev/full',
            1,
            "the output cannot be written: No space left on device -> free disk space\n",
        ),
    ],
)
def test_a_command_whose_output_cannot_be_written_shows_no_traceback(
    line: str, code: int, error: str, tmp_path: Path
) -> None:
    command = ["sh", "-c", line, "sh", *CLI]
    done = subprocess.run(command, capture_output=True, timeout=WITHIN_S, cwd=tmp_path, env=environment())
    assert (done.returncode, done.stderr.decode().removeprefix("gridtrain: ")) == (code, error)
