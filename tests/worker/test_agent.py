"""The agent starts, stops and restarts a script as a user expects, and leaves no process behind.

Where a test waits for "everybody is gone" it reads the output pipe to its end: whoever is alive
still holds it open.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError, CoordinatorUnreachable, JoinRefused
from gridtrain_worker.agent import Job, supervise

pytestmark = pytest.mark.integration
WITHIN_S = 30.0
StartAgent = Callable[..., "subprocess.Popen[str]"]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


# -- exit codes and environment --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    ],
    ids=["fine", "exit code", "killed"],
)
def test_the_scripts_exit_code_is_passed_on(coordinator: str, code: str, expected: int) -> None:
    assert supervise(Job(python(code), coordinator)) == expected


def test_a_script_that_raises_is_reported_in_one_line(
    coordinator: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(Job(python("raise ValueError('no such column')"), coordinator)) == 1
    err = capfd.readouterr().err
    assert "ValueError: no such column" in err, "its own traceback comes through"
    (line,) = [line for line in err.splitlines() if "the script ended" in line]
    assert "with exit code 1 after" in line and "->" in line


def test_a_script_that_was_killed_is_reported(coordinator: str, capfd: pytest.CaptureFixture[str]) -> None:
    supervise(Job(python("import os; os.kill(os.getpid(), 9)"), coordinator))
    assert "was killed by SIGKILL" in capfd.readouterr().err


def test_the_script_finds_its_run_in_the_environment(
    coordinator: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = "{name: value for name, value in os.environ.items() if name.startswith('GRIDTRAIN_')}"
    code = f"import json, os; print(json.dumps({ours}))"
    job = Job(
        python(code),
        coordinator.removeprefix("tcp://"),
        name="anna",
        advertise="tcp://10.0.0.5:7001",
        upload_limit="20Mbit",
        export_dir=str(tmp_path),
    )
    assert supervise(job) == 0
    assert json.loads(capfd.readouterr().out) == {
        "GRIDTRAIN_COORDINATOR": coordinator,
        "GRIDTRAIN_RUN": "default",
        "GRIDTRAIN_NAME": "anna",
        "GRIDTRAIN_LISTEN": "tcp://127.0.0.1:0",
        "GRIDTRAIN_ADVERTISE": "tcp://10.0.0.5:7001",
        "GRIDTRAIN_UPLOAD_LIMIT": "20Mbit",
        "GRIDTRAIN_EXPORT_DIR": str(tmp_path),
    }


def test_a_prefix_only_if_asked(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('one'); print('two'); print('three', file=sys.stderr)"
    assert supervise(Job(python(code), coordinator, name="anna", prefix=True)) == 0
    captured = capsys.readouterr()
    assert captured.out == "[anna] one\n[anna] two\n"
    assert "[anna] three\n" in captured.err


# -- what is found out before the script starts ----------------------------------------------------


def test_no_coordinator(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    job = Job(python(f"open({str(mark)!r}, 'w')"), "127.0.0.1:1", connect_s=0.3)
    with pytest.raises(
        CoordinatorUnreachable, match=r"tcp://127\.0\.0\.1:1.*within 0\.3 s -> check the address"
    ):
        supervise(job)
    assert not mark.exists()


def test_another_run(coordinator: str) -> None:
    with pytest.raises(
        JoinRefused, match='serves the run "default", not "mine" -> add --run default'
    ) as caught:
        supervise(Job(python("pass"), coordinator, run="mine"))
    assert caught.value.code == "wrong-run"


def test_a_program_that_does_not_exist(coordinator: str) -> None:
    with pytest.raises(ConfigError, match="cannot start 'pyhton'"):
        supervise(Job(("pyhton", "train.py"), coordinator))


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ()},
        {"coordinator": "http://127.0.0.1"},
        {"upload_limit": "fast"},
        {"download_limit": "0Mbit"},
    ],
    ids=str,
)
def test_a_job_that_cannot_work_is_refused_at_once(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(**{"command": ("python", "train.py"), "coordinator": "127.0.0.1", **wrong})  # type: ignore[arg-type]
    assert caught.value.remedy


# -- restarts --------------------------------------------------------------------------------------

FAILS_TWICE = """
import pathlib, sys
log = pathlib.Path({path!r})
log.write_text((log.read_text() if log.exists() else "") + "x")
sys.exit(0 if len(log.read_text()) == 3 else 5)
"""


@pytest.mark.parametrize(("restarts", "code", "starts"), [(0, 5, 1), (1, 5, 2), (2, 0, 3), (9, 0, 3)])
def test_a_script_that_failed_is_started_again(
    coordinator: str, tmp_path: Path, restarts: int, code: int, starts: int
) -> None:
    log = tmp_path / "starts"
    job = Job(python(FAILS_TWICE.format(path=str(log))), coordinator, restarts=restarts, backoff_s=0.01)
    lines: list[str] = []
    assert supervise(job, lines.append) == code
    assert len(log.read_text()) == starts
    assert sum("restart" in line and " in " in line for line in lines) == starts - 1


# -- signals, against a real agent process ---------------------------------------------------------

AGENT = """
import json, sys
from gridtrain_worker.agent import Job, supervise
sys.exit(supervise(Job(**json.loads(sys.argv[1]))))
"""
LEAVES_GRACEFULLY = """
import signal, sys, time
def leave(number, frame):
    print("leaving on", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
time.sleep(600)
"""
IGNORES_SIGNALS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(600)
"""
LEAVES_A_CHILD = """
import subprocess, sys
code = "print('up', flush=True); import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
"""


@pytest.fixture
def agent(coordinator: str) -> Iterator[StartAgent]:
    """Start an agent, and come back when its script has said "ready"."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **options: object) -> subprocess.Popen[str]:
        job = json.dumps({"command": python(code), "coordinator": coordinator, **options})
        process = subprocess.Popen(
            (*python(AGENT), job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WITHIN_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_lets_the_script_leave_gracefully(agent: StartAgent, number: signal.Signals) -> None:
    process = agent(LEAVES_GRACEFULLY)
    process.send_signal(number)
    out, err = process.communicate(timeout=WITHIN_S)
    assert out == f"leaving on {number.name}\n"
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in err


def test_a_script_that_ignores_the_signal_is_killed_after_its_grace(agent: StartAgent) -> None:
    process = agent(IGNORES_SIGNALS, grace_s=0.3)
    process.terminate()
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_second_signal_kills_at_once(agent: StartAgent) -> None:
    process = agent(IGNORES_SIGNALS, grace_s=60)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM), "whichever was seen first"


def test_no_restart_after_a_signal(agent: StartAgent) -> None:
    process = agent(LEAVES_GRACEFULLY.replace("sys.exit(0)", "sys.exit(3)"), restarts=5)
    process.terminate()
    out, _ = process.communicate(timeout=WITHIN_S)
    assert (out, process.returncode) == ("leaving on SIGTERM\n", 128 + signal.SIGTERM)


def test_what_a_script_leaves_running_ends_with_it(agent: StartAgent) -> None:
    """The script ends; its child, which would sleep for ten minutes, holds stderr open until it ends too."""
    process = agent(LEAVES_A_CHILD)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0


@pytest.mark.parametrize("code", [LEAVES_GRACEFULLY, IGNORES_SIGNALS], ids=["graceful", "ignores signals"])
def test_a_killed_agent_leaves_no_orphan(agent: StartAgent, code: str) -> None:
    process = agent(code, grace_s=1)
    os.kill(process.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=WITHIN_S)  # ends when the script has ended
    assert out == ("leaving on SIGTERM\n" if code is LEAVES_GRACEFULLY else "")
    assert process.returncode == -signal.SIGKILL
