"""Formats log lines as JSON, and keeps a process from waiting for the reader of its output.

    write() --> queue, at most MAX_QUEUED_BYTES --> thread --> stdout, stderr
                |
                full: dropped, and counted in a line that is written once somebody reads again

A write to a pipe that nobody reads, or to a stopped terminal, never returns.  The agent would no longer obey
its owner, and the coordinator would no longer serve its workers.
"""

from __future__ import annotations

import atexit
import io
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from gridtrain.quantities import format_count

MAX_QUEUED_BYTES = 1 << 20
MAX_WRITE_BYTES = 1 << 12
"""The size of a single write, after which a reader counts as reading."""

STALLED_S = 1.0
"""If nothing has been read for this long while output was awaited, output is awaited no longer."""

MAX_WAIT_S = 5.0
"""The longest time that `flush` waits for a slow reader."""


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
    """Write text at once, or drop it if it cannot be written (full disk, closed pipe or terminal)."""
    with suppress(OSError):
        stream.write(text)
        if not isinstance(stream, QueuedStream):
            stream.flush()


class _Writer:
    """The queue of one or more streams, and the thread that writes it in order."""

    def __init__(self) -> None:
        self._queue: deque[tuple[QueuedStream, bytes]] = deque()
        self._queued_bytes = 0
        self._written_bytes = 0
        self._is_stalled = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="gridtrain-output", daemon=True).start()

    def put(self, stream: QueuedStream, data: bytes) -> None:
        with self._changed:
            if self._queued_bytes < MAX_QUEUED_BYTES // 2:
                self._report_dropped(stream)
            is_full = self._queue and self._queued_bytes + len(data) > MAX_QUEUED_BYTES
            if stream.dropped_lines or is_full:
                stream.dropped_lines += max(1, data.count(b"\n"))
            else:
                self._append(stream, data)

    def _report_dropped(self, stream: QueuedStream) -> None:
        if stream.dropped_lines:
            notice, stream.dropped_lines = stream.describe_dropped(), 0
            self._append(stream, notice)

    def _append(self, stream: QueuedStream, data: bytes) -> None:
        self._queue.append((stream, data))
        self._queued_bytes += len(data)
        self._changed.notify_all()

    def wait(self, most_s: float = MAX_WAIT_S) -> None:
        """Wait until everything is written, or nobody reads, at most `most_s`."""
        until_s = time.monotonic() + most_s
        with self._changed:
            while self._queue and not self._is_stalled and time.monotonic() < until_s:
                before = self._written_bytes
                self._is_stalled = not self._changed.wait_for(
                    lambda before=before: self._written_bytes != before,  # type: ignore[misc]
                    STALLED_S,
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                stream, data = self._queue[0]
            written = stream.write_now(data[:MAX_WRITE_BYTES])
            with self._changed:
                self._queue.popleft()
                if data[written:]:
                    self._queue.appendleft((stream, data[written:]))
                self._queued_bytes -= written
                self._written_bytes += written
                self._is_stalled = False
                if not self._queue:
                    self._report_dropped(stream)
                self._changed.notify_all()


class QueuedStream(io.TextIOBase):
    """A text stream whose writes never wait; only `flush` and `wait_for_reader` wait.

    Attributes:
        dropped_lines: how many lines were dropped since the last line that reported them.
    """

    encoding: str = ""  # the base class's attributes cannot be set
    errors: str | None = None

    def __init__(self, stream: TextIO, writer: _Writer, log_format: str = "") -> None:
        self._stream = stream
        self._fd = stream.fileno()
        self._writer = writer
        self._is_json = is_json(stream, log_format)
        self.encoding = stream.encoding or "utf-8"
        self.errors = stream.errors or "backslashreplace"
        self.dropped_lines = 0

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = str.encode(text, self.encoding, self.errors or "strict")  # TypeError for bytes
        if data:
            self._writer.put(self, data)
        return len(text)

    def flush(self) -> None:
        """Wait until everything is written, unless nobody reads or it takes too long."""
        self._writer.wait()

    def wait_for_reader(self) -> None:
        """Wait until everything is written, however long it takes, unless nobody reads."""
        self._writer.wait(math.inf)

    def write_now(self, data: bytes) -> int:
        """Write data; return how many bytes are done, which is all of them if they cannot be written."""
        try:
            return os.write(self._fd, data)
        except OSError:
            return len(data)

    def describe_dropped(self) -> bytes:
        text = f"{format_count(self.dropped_lines, 'line')} of output dropped, because nobody was reading"
        if self._is_json:
            text = json_line("warning", "dropped", {"lines": self.dropped_lines, "text": text})
        else:
            text = f"gridtrain: {text}"
        return f"{text}\n".encode()


def queue_output(log_format: str = "") -> None:
    """Replace `sys.stdout` and `sys.stderr` for the rest of this process by streams that do not block it.

    Their last lines are written before the process exits, if somebody reads them.  A stream that is not
    an open file is left as it is.

    Args:
        log_format: the format of the line that reports dropped lines; see `is_json`.
    """
    writer = None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, QueuedStream):
            return
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
            writer = writer or _Writer()
            setattr(sys, name, QueuedStream(stream, writer, log_format))
    if writer is not None:
        atexit.register(writer.wait)
