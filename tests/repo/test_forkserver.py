"""A forked program behaves as an executed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest

pytestmark = pytest.mark.integration
WITHIN_S = 120.0

PROGRAM = """
import atexit, os, signal, sys, threading, time
sys.stderr.write("an error\\n")
atexit.register(print, "from atexit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("from a thread"))).start()
import json
import random

def of(it: random.Random) -> None: ...

if sys.argv[1:] == ["raises"]:
    raise ValueError("what it raised")
if sys.argv[1:] == ["waits"]:
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # `signal.pause` would miss a signal that comes just before it
import torch
print(json.dumps({
    "argv": sys.argv,
    "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
    "path": [path for path in sys.path if path],
    "folder": os.getcwd(),
    "environment": sorted(os.environ.items()),
    "parent": os.getppid(),
    "group": "own" if os.getpgid(0) == os.getpid() else os.getpgid(0),
    "session": "own" if os.getsid(0) == os.getpid() else os.getsid(0),
    "files": len(os.listdir("/proc/self/fd")),
    "input": sys.stdin.read(),
    "streams": [
        [one.encoding, one.errors, one.line_buffering, one.write_through] for one in (sys.stdout, sys.stderr)
    ],
    "signals": [str(signal.getsignal(number)) for number in (2, 1, 15, 17, 10, 12, 13)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": torch.get_num_threads(),
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "annotations": str(of.__annotations__),  # no future feature of the server's is inherited
}))
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def both(client: Any, *command: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run a command executed, and forked."""
    done = []
    for way in (forkserver.executing(), client.forking()):
        with way:
            settings = {"stdin": subprocess.DEVNULL} | options
            done.append(subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, **settings))
    return done


@pytest.mark.parametrize(
    ("flags", "options"),
    [((), {}), (("-u",), {"start_new_session": True}), ((), {"process_group": 0})],
    ids=str,
)
def test_a_forked_program_has_the_environment_of_an_executed_one(
    client, program, tmp_path, flags, options
) -> None:
    program = "program.py" if flags else program  # a path relative to the working directory, too
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SOME": "words", "PYTHONUNBUFFERED": ""}
    executed, forked = both(
        client, sys.executable, *flags, program, "a b", "--c", env=environment, cwd=tmp_path, **options
    )
    assert executed.returncode == forked.returncode == 7
    assert executed.stderr == forked.stderr == "an error\n"
    (said, *last), (expected, *_) = forked.stdout.splitlines(), executed.stdout.splitlines()
    assert json.loads(said) == json.loads(expected)
    assert last == ["from a thread", "from atexit"] == executed.stdout.splitlines()[1:]


def test_an_exception_ends_a_forked_program(client, program) -> None:
    executed, forked = both(client, sys.executable, program, "raises")
    assert executed.returncode == forked.returncode == 1
    assert forked.stderr.splitlines()[-3:] == executed.stderr.splitlines()[-3:]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_reach_a_forked_program(client, program, number) -> None:
    with client.forking():
        process = subprocess.Popen(
            (sys.executable, program, "waits"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(WITHIN_S) == -number


def test_modules_are_forked_and_may_start_programs(client, program) -> None:
    """An agent starts the script as its own child, in a separate process group."""
    command = (sys.executable, "-m", "gridtrain", "worker", "--help")
    executed, forked = both(client, *command)
    assert executed.returncode == forked.returncode == 0
    assert executed.stdout == forked.stdout


def test_programs_are_forked_after_torch_has_set_variables(client, tmp_path, monkeypatch) -> None:
    """torch._dynamo does, which the first step of an optimizer imports in the process of the tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text("import sys; print('torch' in sys.modules)")
    with client.forking():
        done = subprocess.run((sys.executable, program), capture_output=True, text=True, timeout=WITHIN_S)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (("-c", "import sys; print('torch' in sys.modules)"), {}),
        (("-m", "site", "--user-base"), {}),
        (("PROGRAM",), {"PYTHONPATH": "/elsewhere"}),
        (("PROGRAM",), {"LC_ALL": "C"}),
        (("-X", "dev", "PROGRAM"), {}),
    ],
    ids=str,
)
def test_a_program_for_another_interpreter_is_executed(
    client, tmp_path, command, environment, monkeypatch
) -> None:
    (tmp_path / "program.py").touch()
    words = [str(tmp_path / "program.py") if word == "PROGRAM" else word for word in command]
    monkeypatch.setattr(client, "_ask", lambda *_: pytest.fail("it was forked"))
    with client.forking():
        subprocess.run(
            (sys.executable, *words), capture_output=True, env=os.environ | environment, timeout=WITHIN_S
        )


def test_a_missing_folder_is_an_error(client, program, tmp_path) -> None:
    with client.forking(), pytest.raises(FileNotFoundError, match="missing"):
        subprocess.run((sys.executable, program), cwd=tmp_path / "missing")
