"""A log that nobody reads does not delay the threads that write it, and the end of a process is bounded."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from brisk import WITHIN_S

from gridtrain.tools import log_output
from gridtrain.tools.log_output import LineWriter, is_same_file, put

PIPE_BYTES = 4096


class Unread:
    """A pipe that is full, and a file object that writes to it."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.write(writer, b"\n" * PIPE_BYTES)
        self.file = open(writer, "w")  # noqa: SIM115  the fixture closes it

    def read(self, ending: str) -> list[str]:
        """Read up to a line that ends so."""
        with open(self.reader, closefd=False) as lines:
            found = []
            for line in lines:
                found += [line.rstrip("\n")] if line != "\n" else []
                if found and found[-1].endswith(ending):
                    break
        return found


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unread]:
    monkeypatch.setattr(log_output, "MAX_QUEUED", 1000)
    monkeypatch.setattr(log_output, "MAX_WAIT_S", 0.05)
    pipe = Unread()
    yield pipe
    os.close(pipe.reader)
    pipe.file.close()


def test_lines_are_dropped_while_nobody_reads_and_counted_afterwards(unread: Unread) -> None:
    writer = LineWriter(unread.file)
    queued = [writer.write(f"{number:99}\n") for number in range(100)]
    assert queued == [True] * 10 + [False] * 90
    writer.flush()  # does not wait for long
    said = unread.read('reading"}}')
    assert [int(line) for line in said[:-1]] == list(range(10)), "the first ones, in order"
    report = json.loads(said[-1])
    assert (report["level"], report["event"], report["fields"]["lines"]) == ("warning", "dropped", 90)
    writer.wait_for_room()
    assert writer.write("read again\n")
    assert unread.read("again") == ["read again"]


def test_output_that_waits_for_room_is_not_dropped(unread: Unread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that writes faster than a terminal shows, in lines longer than the queue."""
    monkeypatch.setattr(log_output, "ROOM", 0)
    writer = LineWriter(unread.file)

    def script() -> None:
        for number in range(200):
            writer.wait_for_room()
            writer.write("so far: ")
            writer.write(f"{number:1999}\n", keep=True)

    writing = threading.Thread(target=script)
    writing.start()
    assert [int(line.split()[-1]) for line in unread.read("199")] == list(range(200))
    writing.join(WITHIN_S)


def test_a_text_longer_than_the_queue_does_not_end_the_log(unread: Unread) -> None:
    writer = LineWriter(unread.file)
    assert writer.write(f"{'long':>1999}\n")
    assert unread.read("long")
    writer.flush()
    assert writer.write("later\n") and unread.read("later")


def test_a_non_blocking_pipe_loses_nothing(unread: Unread) -> None:
    """The flag belongs to the pipe, so that another process can set it."""
    os.set_blocking(unread.file.fileno(), False)
    text = "".join(f"{number:019}\n" for number in range(2000))
    writing = threading.Thread(target=put, args=(unread.file, text))
    writing.start()
    assert "\n".join(unread.read("1999")) + "\n" == text
    writing.join(WITHIN_S)


@pytest.mark.parametrize("fault", ["closed pipe", "full disk"])
def test_a_closed_pipe_and_a_full_disk_cost_lines(
    unread: Unread, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(log_output, "MAX_WAIT_S", WITHIN_S)
    if fault == "closed pipe":
        read, bad = os.pipe()
        os.close(read)
    else:
        bad = os.open("/dev/full", os.O_WRONLY)
    with open(bad, "w") as file:
        writer = LineWriter(file)
        writer.write("lost\n")
        writer.flush()
        assert not writer._queue, "the thread goes on"
        os.dup2(unread.file.fileno(), bad)  # such as a disk with room again
        writer.write("kept\n")
        assert unread.read("kept") == ["kept"]
        writer.flush()


def test_streams_are_compared_by_their_files(tmp_path: Path) -> None:
    text = io.StringIO()
    with open(tmp_path / "one", "w") as one, open(tmp_path / "one", "a") as again, open(os.devnull) as other:
        assert is_same_file(one, again) and not is_same_file(one, other)
        assert is_same_file(text, text) and not is_same_file(text, one)


ENDS = """
import sys, threading
from gridtrain.tools import log_output
from gridtrain.tools.log_output import LineWriter, put
log_output.MAX_WAIT_S = 0.1  # the log is never empty
log = LineWriter(sys.stderr, "text")
def repeat(write):
    while True:
        write("copied line\\n")
        started.release()
started = threading.Semaphore(0)
for write in (log.write, lambda line: put(sys.stdout, line)):
    threading.Thread(target=repeat, args=(write,), daemon=True).start()
for _ in range(1000):
    started.acquire()
log.flush()
"""


@pytest.mark.integration
def test_a_process_ends_while_daemon_threads_write() -> None:
    """One of them may then hold any lock that it takes, for ever."""
    for _ in range(3):
        with open(os.devnull, "w") as null:
            subprocess.run(
                [sys.executable, "-c", ENDS], stdout=null, stderr=null, timeout=WITHIN_S, check=True
            )


CRASHES = """
import sys
from gridtrain.tools.log_output import LineWriter
log = LineWriter(sys.stderr, "text")
try:
    for number in range(2000):
        log.write(f"{number}\\n")
    raise ValueError("why")
finally:
    log.flush()
"""


@pytest.mark.integration
def test_the_last_lines_are_written_before_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHES], stderr=subprocess.PIPE, text=True, timeout=WITHIN_S
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[:2000]) == (1, [str(number) for number in range(2000)])
    assert lines[2000].startswith("Traceback") and lines[-1] == "ValueError: why"
