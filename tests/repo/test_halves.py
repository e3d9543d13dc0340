"""`make test` is what CI runs: both halves count, and what each has said is heard, whatever becomes of it."""

from __future__ import annotations

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
half = "again" if sys.argv[1] != "-m" else "process" if sys.argv[2] == "integration" else "plain"
here = Path(__file__).parent
def say(words):
    os.write(1, f"{half} {words}\\n".encode())  # at once: with PYTHONUNBUFFERED each word would be a write
say(" ".join(["began with", *(word for word in sys.argv if word.startswith("tests"))]))
code, _, lost = (here / half).read_text().partition(" ")
if lost:
    cache = Path(sys.argv[sys.argv.index("-o") + 1].removeprefix("cache_dir=")) / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({test: True for test in lost.split()}))
if code == "hangs":
    try:
        (here / f"{half}-hangs").touch()
        while half != "again" and not all((here / f"{each}-hangs").exists() for each in ("plain", "process")):
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


def halves(folder: Path, plain: str, process: str, again: str = "0") -> subprocess.Popen[str]:
    """The script beside a pytest whose halves end as these say: a code, or "hangs"; then who failed."""
    (folder / "scripts").mkdir()  # its parent is the script's root, where the halves' caches are, too
    shutil.copy(ROOT / "scripts" / "test-halves", folder / "scripts")
    place = folder / ".venv" / "bin"
    place.mkdir(parents=True)
    (place / "pytest").write_text(PYTEST.replace("{python}", sys.executable))
    (place / "pytest").chmod(0o755)
    (place / "plain").write_text(plain)
    (place / "process").write_text(process)
    (place / "again").write_text(again)
    command = [sys.executable, "-S", str(folder / "scripts" / "test-halves"), "tests"]
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
def test_it_fails_if_a_half_fails_and_both_are_heard(tmp_path, plain, process, code):
    with halves(tmp_path, plain, process) as both:
        out, _ = both.communicate(timeout=60)
    assert both.returncode == code
    assert "plain began with tests" in out and "process began with tests" in out
    assert out.index("== and with real processes:") < out.index("process began")


@pytest.mark.parametrize(
    ("plain", "process", "again", "code"),
    [
        ("0", "1 tests/a.py::one", "0", 0),
        ("1 tests/a.py::one", "1 tests/b.py::two", "0", 0),
        ("0", "1 tests/a.py::one", "1", 1),
        ("0", "1 tests/a.py::one", "-9", 137),
    ],
)
def test_a_few_that_failed_are_run_once_more_alone(tmp_path, plain, process, again, code):
    with halves(tmp_path, plain, process, again) as both:
        out, _ = both.communicate(timeout=60)
    lost = [word for word in f"{plain} {process}".split() if "::" in word]
    assert both.returncode == code
    assert f"again began with {' '.join(lost)}\n" in out
    assert out.index("exit codes") < out.index("again began")
    assert ("unsteady, passed alone" in out) == (code == 0)


@pytest.mark.parametrize(
    ("plain", "process", "code"),
    [
        ("0", "1 tests/a.py::1 tests/a.py::2 tests/a.py::3 tests/a.py::4", 1),  # no accident
        ("1", "1 tests/a.py::one", 1),  # one half could not say which
        ("-9", "1 tests/a.py::one", 137),
        ("2", "1 tests/a.py::one", 2),  # pytest was interrupted
    ],
)
def test_what_is_worse_fails_at_once(tmp_path, plain, process, code):
    with halves(tmp_path, plain, process) as both:
        out, _ = both.communicate(timeout=60)
    assert both.returncode == code and "again" not in out


def test_who_is_stopped_while_it_runs_alone_lets_it_clean_up(tmp_path):
    with halves(tmp_path, "0", "1 tests/a.py::one", "hangs") as both:
        assert both.stdout is not None
        assert any("again hangs" in line for line in both.stdout)
        both.terminate()
        assert "again cleans up" in both.stdout.read()
    assert both.returncode == 2


def test_one_that_hangs_has_said_so_before_the_end(tmp_path):
    with halves(tmp_path, "0", "hangs") as both:
        assert both.stdout is not None
        assert any("process began" in line for line in both.stdout)
        both.terminate()
        assert "process cleans up" in both.stdout.read()
    assert both.returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_stopped_lets_both_clean_up(tmp_path, number):
    with halves(tmp_path, "hangs", "hangs") as both:
        assert both.stdout is not None
        assert any("plain hangs" in line for line in both.stdout)
        both.send_signal(number)
        out = both.stdout.read()
    assert both.returncode == 2
    assert "plain cleans up" in out and "process cleans up" in out


def test_ci_runs_make_test_which_runs_both_halves():
    def told(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", "test", *arguments]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    assert "scripts/test-halves tests\n" in told("TESTS=tests")
    part = told("TESTS=tests/wire")
    assert "bin/pytest tests/wire\n" in part and "halves" not in part
    assert " test; do\n" in (ROOT / ".ci" / "run").read_text()
