"""What a newcomer types, as real processes over loopback: it works, or one sentence says what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gridtrain._version import __version__

pytestmark = pytest.mark.integration
WITHIN_S = 30.0
CLI = (sys.executable, "-m", "gridtrain.cli")


@dataclass(frozen=True)
class Running:
    """A coordinator that has said where it listens."""

    process: subprocess.Popen[str]
    address: str
    greeting: str


StartCoordinator = Callable[..., Running]


def environment() -> dict[str, str]:
    """Ours without settings of a run, and without a terminal's width and colours."""
    hidden = ("GRIDTRAIN_", "COLUMNS", "FORCE_COLOR")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


def gridtrain(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        (*CLI, *arguments), capture_output=True, text=True, timeout=WITHIN_S, env=environment() | more
    )


@pytest.fixture
def start_coordinator(tmp_path: Path) -> Iterator[StartCoordinator]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> Running:
        place = ("--listen", "tcp://127.0.0.1:0", "--journal", str(tmp_path / "journal.sqlite"))
        process = subprocess.Popen(
            (*CLI, "coordinator", *place, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        started.append(process)
        assert process.stdout is not None
        greeting = "".join(process.stdout.readline() for _ in range(3))
        address = re.search(r"tcp://\S+:\d+", greeting)
        assert address is not None, f"{greeting!r} {process.communicate(timeout=WITHIN_S)}"
        return Running(process, address[0], greeting)

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WITHIN_S)


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The last line of stderr: an error with its remedy; no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("gridtrain: ") and " -> " in line, done.stderr
    return line


# -- it works --------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert gridtrain("--version").stdout == f"gridtrain, version {__version__}\n"
    text = gridtrain("--help").stdout
    for expected in ("coordinator", "worker", "status", "demo", "Exit codes:", "3    the coordinator cannot"):
        assert expected in text


def test_coordinator_status_and_worker(start_coordinator: StartCoordinator, tmp_path: Path) -> None:
    running = start_coordinator("--run", "shakespeare", "--min-workers", "2")
    port = running.address.rpartition(":")[2]
    assert running.greeting == (
        f'run "shakespeare" is coordinated at tcp://127.0.0.1:{port}, journal {tmp_path}/journal.sqlite\n'
        f"  on each worker:  gridtrain worker tcp://127.0.0.1:{port} --run shakespeare -- python train.py\n"
        f"  to watch it:     gridtrain status tcp://127.0.0.1:{port} --watch\n"
    )

    table = gridtrain("status", f"127.0.0.1:{port}")
    assert (table.returncode, table.stderr) == (0, "")
    assert "run shakespeare  waiting  waiting for 2 workers" in table.stdout
    assert "term 1  generation 0  step 0" in table.stdout
    assert "no worker yet" in table.stdout

    picture = json.loads(gridtrain("status", "--json", GRIDTRAIN_COORDINATOR=running.address).stdout)
    assert (picture["run"], picture["phase"], picture["term"]) == ("shakespeare", "waiting", 1)

    code = "import os, sys; print(os.environ['GRIDTRAIN_RUN']); sys.exit(7)"
    script = (sys.executable, "-c", code)
    worker = gridtrain("worker", running.address, "--run", "shakespeare", "--name", "anna", "--", *script)
    assert (worker.returncode, worker.stdout) == (7, "shakespeare\n")
    first, last = worker.stderr.splitlines()
    assert first.startswith("gridtrain worker: anna (")
    assert "the script ended with exit code 7" in last

    running.process.terminate()
    _, err = running.process.communicate(timeout=WITHIN_S)
    assert running.process.returncode == 128 + signal.SIGTERM
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events] == ["started"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_coordinator_comes_back_in_the_next_term(
    start_coordinator: StartCoordinator, number: signal.Signals
) -> None:
    running = start_coordinator()
    running.process.send_signal(number)
    running.process.communicate(timeout=WITHIN_S)
    expected = -number if number is signal.SIGKILL else 128 + number
    assert running.process.returncode == expected
    again = start_coordinator()
    assert json.loads(gridtrain("status", again.address, "--json").stdout)["term"] == 2


def test_a_coordinator_for_containers_takes_its_settings_from_the_environment(tmp_path: Path) -> None:
    settings = {
        "GRIDTRAIN_RUN": "boxed",
        "GRIDTRAIN_LISTEN": "tcp://127.0.0.1:0",
        "GRIDTRAIN_ADVERTISE": "tcp://coordinator:7700",
        "GRIDTRAIN_JOURNAL": str(tmp_path / "journal.sqlite"),
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
    process.terminate()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM


# -- or one sentence says what to do ---------------------------------------------------------------


def test_nobody_is_there() -> None:
    began_s = time.monotonic()
    line = one_sentence(gridtrain("status", "tcp://127.0.0.1:1"), code=3)
    assert "no coordinator can be reached at tcp://127.0.0.1:1" in line
    assert "`gridtrain coordinator` is running" in line
    assert time.monotonic() - began_s < 15


def test_somebody_else_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = one_sentence(gridtrain("status", f"127.0.0.1:{port}"), code=3)
    assert "did not answer within 4 s" in line


def test_a_malformed_address() -> None:
    line = one_sentence(gridtrain("status", "http://example"), code=2)
    assert "an address is tcp://host:port, got 'http://example'" in line


def test_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        journal = tmp_path / "journal.sqlite"
        line = one_sentence(gridtrain("coordinator", "--listen", address, "--journal", str(journal)), code=1)
    assert f"{address}: the port is taken -> stop the program that uses it" in line


def test_the_journal_is_in_use(start_coordinator: StartCoordinator, tmp_path: Path) -> None:
    start_coordinator()
    journal = str(tmp_path / "journal.sqlite")
    line = one_sentence(
        gridtrain("coordinator", "--listen", "tcp://127.0.0.1:0", "--journal", journal), code=1
    )
    assert "is in use" in line and "stop the other coordinator" in line


def test_the_journals_directory_is_missing(tmp_path: Path) -> None:
    line = one_sentence(gridtrain("coordinator", "--journal", str(tmp_path / "no" / "journal")), code=1)
    assert f"-> mkdir -p {tmp_path}/no" in line


def test_a_run_name_that_is_no_file_name() -> None:
    assert "cannot be a run's name" in one_sentence(gridtrain("coordinator", "--run", "../me"), code=2)


def test_another_run(start_coordinator: StartCoordinator) -> None:
    running = start_coordinator()
    done = gridtrain(
        "worker", running.address, "--run", "mine", "--", sys.executable, "-c", "print('started')"
    )
    assert 'serves the run "default", not "mine" -> add --run default' in one_sentence(done, code=4)
    assert done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    done = gridtrain("status", "http://example", GRIDTRAIN_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ConfigError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("dance",), "No such command 'dance'"),
        (("worker", "127.0.0.1"), "no training command was given"),
        (("worker", "127.0.0.1", "--upload-limit", "fast", "--", "true"), "'fast' is not a rate"),
        (("coordinator", "--min-workers", "0"), "0 is not in the range"),
        (("status", "--watch", "--json"), "use --json without it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage(arguments: tuple[str, ...], text: str) -> None:
    done = gridtrain(*arguments)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
