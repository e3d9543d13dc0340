"""Formats log lines as JSON, and keeps threads from waiting for the reader of their log.

    LineWriter.write() --> queue, at most MAX_QUEUED characters --> its thread --> put() --> stream
                           |
                           full: dropped, and counted in a line that is written once the queue is empty

A write to a pipe that nobody reads, or to a stopped terminal, never returns.  The agent would no longer obey
its owner, and the coordinator would no longer serve its workers.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from gridtrain.quantities import format_count

MAX_QUEUED = 1 << 20
ROOM = 1 << 16
"""How much may be queued when output that must not be dropped is added."""

MAX_WAIT_S = 5.0
"""The longest time that `flush` waits for a slow or absent reader."""


def is_json(stream: TextIO, log_format: str = "") -> bool:
    """Return whether a log on this stream consists of JSON lines.

    Args:
        log_format: "text" or "json"; by default text on a terminal and JSON elsewhere.
    """
    return log_format == "json" or (not log_format and not stream.isatty())


def json_line(level: str, event: str, fields: Mapping[str, Any]) -> str:
    """Return an event as a line of JSON, without the newline."""
    ts = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"ts": ts, "level": level, "event": event, "fields": dict(fields)}, default=str)


def put(stream: TextIO, text: str) -> None:
    """Write text, however long it takes, or drop it if it cannot be written (full disk, closed pipe).

    The stream's buffer is not used: it would keep unwritable text, and its lock would be held by a
    thread that waits for the reader when the process ends.
    """
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        if not _has_file(stream):
            stream.write(text)
            stream.flush()
            return
        data = text.encode(stream.encoding, "backslashreplace")
        while data:
            try:
                data = data[os.write(stream.fileno(), data) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                ready = select.poll()
                ready.register(stream.fileno(), select.POLLOUT)
                ready.poll()


def is_same_file(one: TextIO, other: TextIO) -> bool:
    """Return whether both streams write to the same file, pipe or terminal."""
    if one is other or not (_has_file(one) and _has_file(other)):
        return one is other
    return os.path.sameopenfile(one.fileno(), other.fileno())


def _has_file(stream: TextIO) -> bool:
    with suppress(OSError):
        return stream.fileno() >= 0
    return False


class LineWriter:
    """Writes to a stream in a thread of its own; `write` never waits.

    A stream without a file, such as `io.StringIO`, is written to directly.

    Args:
        log_format: the format of the line that reports dropped lines; see `is_json`.
    """

    def __init__(self, stream: TextIO, log_format: str = "") -> None:
        self.stream = stream
        self.is_json = is_json(stream, log_format)
        self._queue: deque[str] = deque()
        self._queued = 0
        self._dropped_lines = 0
        self._changed = threading.Condition()
        self._has_thread = _has_file(stream)
        if self._has_thread:
            threading.Thread(target=self._run, name="gridtrain-log", daemon=True).start()

    def write(self, text: str, *, keep: bool = False) -> bool:
        """Queue text, or drop it if the queue is full; return whether it is queued.

        Text of any length is queued if nothing else is queued, or if it must be kept (see `wait_for_room`).
        """
        if not self._has_thread:
            put(self.stream, text)
            return True
        with self._changed:
            is_full = self._dropped_lines or (self._queue and self._queued + len(text) > MAX_QUEUED)
            if is_full and not keep:
                self._dropped_lines += max(1, text.count("\n"))
                return False
            self._append(text)
            return True

    def wait_for_room(self) -> None:
        """Wait, however long it takes, until text that must be kept can be added."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued <= ROOM and not self._dropped_lines)

    def flush(self) -> None:
        """Wait until everything is written, but at most `MAX_WAIT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, MAX_WAIT_S)

    def _append(self, text: str) -> None:
        self._queue.append(text)
        self._queued += len(text)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                text = self._queue[0]
            put(self.stream, text)
            with self._changed:
                self._queue.popleft()
                self._queued -= len(text)
                if self._dropped_lines and not self._queue:
                    self._append(self._describe_dropped())
                    self._dropped_lines = 0
                self._changed.notify_all()

    def _describe_dropped(self) -> str:
        text = f"{format_count(self._dropped_lines, 'line')} of output dropped, because nobody was reading"
        if self.is_json:
            return json_line("warning", "dropped", {"lines": self._dropped_lines, "text": text}) + "\n"
        return f"gridtrain: {text}\n"
