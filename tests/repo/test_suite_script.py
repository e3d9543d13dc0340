"""`make test`, which CI runs too: all parts count, and the output of each is printed in all cases."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTEST = """#!{python} -S
import json, os, signal, sys, time
from pathlib import Path
part = os.environ.get("GRIDTRAIN_PART", "retry")
here = Path(__file__).parent
def say(words):
    os.write(1, f"{part} {words}\\n".encode())  # at once: with PYTHONUNBUFFERED each word would be a write
say(" ".join(["began with", *(word for word in sys.argv if word.startswith("tests"))]))
say(f"stores bytecode: {not sys.dont_write_bytecode}")
code = (here / part).read_text()
new = here / f"{part}-failed"
if new.exists():  # pytest adds to what an earlier run has recorded
    recorded = Path(".pytest_cache") / part / "v" / "cache" / "lastfailed"
    recorded.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(recorded.read_text()) if recorded.exists() else {}
    recorded.write_text(json.dumps(before | json.loads(new.read_text())))
if code == "hangs":
    try:
        (here / f"{part}-hangs").touch()
        while not all((here / f"{each}-hangs").exists() for each in ("plain", "process")):
            time.sleep(0.01)
        say("hangs")
        time.sleep(600)
    except KeyboardInterrupt:
        say("cleans up")
        sys.exit(2)
if int(code) < 0:
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""


def suite(folder: Path, plain: str, process: str, *arguments: str) -> subprocess.Popen[str]:
    """The script with a fake pytest whose parts end with these codes, or hang; `back` passes."""
    (folder / "scripts").mkdir()  # its parent is the script's root
    shutil.copy(ROOT / "scripts" / "test-suite", folder / "scripts")
    place = folder / ".venv" / "bin"
    place.mkdir(parents=True, exist_ok=True)
    (place / "pytest").write_text(PYTEST.replace("{python}", sys.executable))
    (place / "pytest").chmod(0o755)
    (place / "plain").write_text(plain)
    (place / "back").write_text("5" if plain == "5" else "0")
    (place / "process").write_text(process)
    command = [sys.executable, "-S", str(folder / "scripts" / "test-suite"), *arguments, "tests"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("plain", "process", "code"),
    [
        ("0", "0", 0),
        ("1", "0", 1),
        ("0", "1", 1),
        ("0", "5", 0),  # a part of the suite that starts no processes
        ("5", "0", 0),
        ("5", "5", 5),  # nothing at all was run
        ("5", "1", 1),
        ("0", "-9", 137),
        ("-9", "0", 137),
    ],
)
def test_the_script_fails_if_a_part_fails_and_prints_all(tmp_path, plain, process, code):
    with suite(tmp_path, plain, process) as script:
        out, _ = script.communicate(timeout=60)
    assert script.returncode == code
    titles = {
        "plain": "from the first file:",
        "back": "from the last file:",
        "process": "with real processes:",
    }
    for part, title in titles.items():
        assert out.index(title) < out.index(f"{part} began with tests")


def test_rewritten_tests_are_stored_for_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with suite(tmp_path, "0", "0") as script:
        out, _ = script.communicate(timeout=60)
    assert out.count("stores bytecode: True") == 3


@pytest.mark.parametrize(
    ("most", "retried", "code"),
    [
        ("0", "0", 1),  # `make test`
        ("1", "0", 1),  # more failed than may be run again
        ("2", "0", 0),
        ("2", "1", 1),  # fails once more
    ],
)
def test_a_few_failed_tests_are_run_again(tmp_path, most, retried, code):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "retry").write_text(retried)
    recorded = tmp_path / ".pytest_cache" / "plain" / "v" / "cache" / "lastfailed"
    recorded.parent.mkdir(parents=True)
    recorded.write_text('{"tests/test_renamed.py::test_of_an_earlier_run": true}')
    failed = '{"tests/test_a.py::test_a": true, "tests/test_b.py::test_b": true}'
    (tmp_path / ".venv" / "bin" / "plain-failed").write_text(failed)
    with suite(tmp_path, "1", "0", "--retry-failed", most) as script:
        out, _ = script.communicate(timeout=60)
    assert script.returncode == code
    retried_line = "retry began with tests/test_a.py::test_a tests/test_b.py::test_b"
    assert (retried_line in out) == (most == "2")


def test_a_part_that_hangs_hides_no_failure_of_another(tmp_path):
    with suite(tmp_path, "hangs", "1") as script:
        assert script.stdout is not None
        seen = "".join(line for line in iter(script.stdout.readline, "process began with tests\n"))
        script.terminate()
        assert "plain cleans up" in script.stdout.read()
    assert "== tests with real processes:" in seen and script.returncode == 2


def test_the_output_of_a_hanging_part_is_printed(tmp_path):
    with suite(tmp_path, "0", "hangs") as script:
        assert script.stdout is not None
        assert any("process began" in line for line in script.stdout)
        script.terminate()
        assert "process cleans up" in script.stdout.read()
    assert script.returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_all_parts_clean_up(tmp_path, number):
    with suite(tmp_path, "hangs", "hangs") as script:
        assert script.stdout is not None
        assert any("plain hangs" in line for line in script.stdout)
        script.send_signal(number)
        out = script.stdout.read()
    assert script.returncode == 2
    assert "plain cleans up" in out and "process cleans up" in out


def test_ci_runs_make_test_which_runs_all_parts():
    def make_output(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", "test", *arguments]
        environ = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        return subprocess.run(
            command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True
        ).stdout

    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    assert "scripts/test-suite tests\n" in make_output("TESTS=tests", "RETRY_FAILED=")
    assert "scripts/test-suite tests --retry-failed 3\n" in make_output("TESTS=tests", "RETRY_FAILED=3")
    part = make_output("TESTS=tests/wire")
    assert "bin/pytest tests/wire\n" in part and "test-suite" not in part
    assert " test; do\n" in (ROOT / ".ci" / "run").read_text()
