"""A log that nobody reads does not delay the process that writes it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest
from brisk import WITHIN_S

from gridtrain.tools import log_output
from gridtrain.tools.log_output import QueuedStream, _Writer, put, queue_output

PIPE_BYTES = 4096


class Unread:
    """A pipe that is full, and a stream that writes to it."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.write(writer, b"\n" * PIPE_BYTES)
        self.file = open(writer, "w")  # noqa: SIM115  the fixture closes it
        self.stream = QueuedStream(self.file, _Writer())

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
    monkeypatch.setattr(log_output, "STALLED_S", 0.05)
    monkeypatch.setattr(log_output, "MAX_QUEUED_BYTES", 1000)
    pipe = Unread()
    yield pipe
    os.close(pipe.reader)
    pipe.file.close()


def test_lines_are_dropped_while_nobody_reads_and_counted_afterwards(unread: Unread) -> None:
    for number in range(100):
        put(unread.stream, f"{number:99}\n")
    unread.stream.flush()
    unread.stream.wait_for_reader()  # neither waits for long
    said = unread.read('reading"}}')
    assert [int(line) for line in said[:-1]] == list(range(10)), "the first ones, in order"
    report = json.loads(said[-1])
    assert (report["level"], report["event"], report["fields"]["lines"]) == ("warning", "dropped", 90)
    put(unread.stream, "read again\n")
    assert unread.read("again") == ["read again"]


def test_a_script_that_waits_for_the_reader_loses_nothing(
    unread: Unread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that writes faster than a terminal shows."""
    monkeypatch.setattr(log_output, "STALLED_S", WITHIN_S)

    def script() -> None:
        for number in range(200):
            unread.stream.wait_for_reader()
            put(unread.stream, f"{number:1999}\n")  # longer than the queue

    writing = threading.Thread(target=script)
    writing.start()
    assert [int(line) for line in unread.read("199")] == list(range(200))
    writing.join(WITHIN_S)


def test_a_closed_pipe_and_a_full_disk_cost_lines() -> None:
    read, write = os.pipe()
    os.close(read)
    for target in (write, os.open("/dev/full", os.O_WRONLY)):
        with open(target, "w") as file:
            stream = QueuedStream(file, _Writer())
            put(stream, "lost\n")
            stream.flush()  # does not wait


def test_the_streams_of_a_test_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    out: TextIO = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    queue_output()
    assert sys.stdout is out and sys.stderr is None


PROGRAM = """
import sys
from gridtrain.tools.log_output import queue_output
queue_output("text")
print("one")
print("two", file=sys.stderr)
print("three", end="")
raise ValueError("four")
"""


@pytest.mark.integration
def test_the_last_lines_and_a_traceback_are_written_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("one\ntwo\nthreeTraceback")
    assert done.stdout.endswith("ValueError: four\n")
