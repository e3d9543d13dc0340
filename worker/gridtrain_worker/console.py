"""Prints the agent's messages, figures (a live line, or lines at intervals) and summary, as text or as JSON.

terminal    the script's output, and below it one live line:
            step 410, 4 workers | here: 380 steps, 12160 samples (24 % of the run), 9.1 MB up
            paused: battery | step 410 | here: 380 steps, ...
text        the same in ordinary lines, for files and pipes with --log-format text
JSON        {"ts": ..., "level": "info", "event": "contribution", "fields": {"step": 410, ...}}
            one object per line, as in the coordinator's log, including lines that the script writes to
            the same stream: {..., "event": "output", "fields": {"text": "step 47 is skipped ..."}}
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import TextIO

from gridtrain.quantities import format_bytes, format_count
from gridtrain.runtime.contribution import Contribution
from gridtrain.tools.log_output import LineWriter, is_json, is_same_file, json_line, put

CLEAR = "\x1b[A\r\x1b[J"
"""Erases the last row of the live line and anything below it, such as ^C.

Other rows are left, because they may be the script's output: a terminal that has become narrower does not
always rewrap the line.  The live line ends with a newline, so that output after a `kill -9` starts on a new
line."""

LINES_EVERY_S = 10.0
"""The shortest time between two lines of figures, as text or as JSON."""

MAX_LINE = 1 << 16
"""The maximum length of incomplete output that is kept; longer output is divided among several objects."""


class Console:
    """A console for an agent that is embedded in a program: writes only the script's output."""

    def say(self, text: str) -> None:
        """Write a message."""

    def report_error(self, text: str, exit_code: int) -> bool:
        """Write the error that ends this process, if this console formats errors differently from messages;
        return whether it was written."""
        return False

    def show_progress(self, given: Contribution, now_s: float, untrained: str = "") -> None:
        """Show the current figures and, on a terminal, what the script is doing if it is not training."""

    def show_summary(self, given: Contribution, total: Contribution) -> None:
        """Show the contributions since this start (`given`) and over all starts on this machine (`total`)."""

    def write_output(self, text: str, stream: TextIO) -> None:
        """Write a piece of the script's output, however long it takes.

        A console that writes to the same file inserts the text between its own lines.
        """
        put(stream, text)

    def flush(self) -> None:
        """Wait until everything is written, but at most for a few seconds."""

    def end_output(self) -> None:
        """Write the rest of the script's last line; called once the script has ended."""


class _StreamConsole(Console):
    """A console that writes to a stream; only `write_output` and `flush` wait for its reader."""

    def __init__(self, stream: TextIO, log_format: str) -> None:
        self._stream = stream
        self._writer = LineWriter(stream, log_format)

    def write_output(self, text: str, stream: TextIO) -> None:
        if self._is_own(stream):
            self._writer.wait_for_room()
            self._insert_output(text)
        else:
            put(stream, text)

    def _is_own(self, stream: TextIO) -> bool:
        return is_same_file(stream, self._stream)

    def _insert_output(self, text: str) -> None:
        self._writer.write(text, keep=True)

    def flush(self) -> None:
        self._writer.flush()


class _LogConsole(_StreamConsole):
    """A console that writes lines, with figures only occasionally."""

    def __init__(self, stream: TextIO, log_format: str) -> None:
        super().__init__(stream, log_format)
        self._next_s = float("-inf")
        self._shown: Contribution | None = None

    def show_progress(self, given: Contribution, now_s: float, untrained: str = "") -> None:
        if now_s >= self._next_s and given != self._shown:
            self._next_s, self._shown = now_s + LINES_EVERY_S, given
            self._write_figures(given)

    def _write_figures(self, given: Contribution) -> None:
        raise NotImplementedError


class JsonConsole(_LogConsole):
    """A console that writes one JSON object per line, for programs to read.

    The script's output to a stream other than this console's is left unchanged.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "json")
        self._unended = ""  # the incomplete last line that the script has written so far

    def say(self, text: str) -> None:
        self._line("says", {"text": text})

    def report_error(self, text: str, exit_code: int) -> bool:
        self._line("error", {"text": text, "exit_code": exit_code}, "error")
        return True

    def _write_figures(self, given: Contribution) -> None:
        self._line("contribution", _figures(given))

    def show_summary(self, given: Contribution, total: Contribution) -> None:
        self._line("contributed", {**_figures(given), "total": _figures(total)})

    def _is_own(self, stream: TextIO) -> bool:
        return stream is self._stream

    def _insert_output(self, text: str) -> None:
        *lines, unended = (self._unended + text).split("\n")
        while len(unended) > MAX_LINE:
            lines.append(unended[:MAX_LINE])
            unended = unended[MAX_LINE:]
        self._unended = unended
        for line in lines:
            self._output_line(line.rstrip("\r"))

    def end_output(self) -> None:
        if self._unended:
            self._output_line(self._unended)
            self._unended = ""

    def _output_line(self, text: str) -> None:
        self._writer.write(json_line("info", "output", {"text": text}) + "\n", keep=True)

    def _line(self, event: str, fields: dict[str, object], level: str = "info") -> None:
        self._writer.write(json_line(level, event, fields) + "\n")


class TextConsole(_LogConsole):
    """A console for files and pipes that writes messages and figures as lines of text."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "text")

    def say(self, text: str) -> None:
        self._writer.write(f"gridtrain worker: {text}\n")

    def _write_figures(self, given: Contribution) -> None:
        self.say(live_line(given))

    def show_summary(self, given: Contribution, total: Contribution) -> None:
        self.say(summary(given, total))


class TerminalConsole(_StreamConsole):
    """A console for a terminal, whose last line shows live figures and is erased before other output."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "text")
        self._live = ""
        self._is_drawn = False  # whether the live line is on the screen
        self._mid_line = False  # whether the script's last line is incomplete; if so, nothing may follow it
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            line = f"{chr(10) if self._mid_line else ''}gridtrain worker: {text}\n"
            self._mid_line = False
            self._write_above(line)

    def show_progress(self, given: Contribution, now_s: float, untrained: str = "") -> None:
        with self._lock:
            line = live_line(given, untrained)
            if line != self._live:
                self._live = line
                self._write_above("")

    def show_summary(self, given: Contribution, total: Contribution) -> None:
        self._live = ""
        self.say(summary(given, total))

    def _insert_output(self, text: str) -> None:
        with self._lock:
            self._mid_line = not text.endswith("\n")
            self._write_above(text, keep=True)

    def _write_above(self, text: str, *, keep: bool = False) -> None:
        """Erase the live line, write the text, and draw the live line again."""
        live = ""
        if self._live and not self._mid_line:
            live = fit_line(self._live, _columns(self._stream) - 1) + "\n"
        text = (CLEAR if self._is_drawn else "") + text + live
        self._is_drawn = bool(text) and self._writer.write(text, keep=keep) and bool(live)


def console_for(stream: TextIO, log_format: str = "") -> TerminalConsole | TextConsole | JsonConsole:
    """Create the console for a stream.

    Args:
        log_format: "text" or "json"; by default text on a terminal and JSON elsewhere.
    """
    if is_json(stream, log_format):
        return JsonConsole(stream)
    return TerminalConsole(stream) if stream.isatty() else TextConsole(stream)


def _columns(stream: TextIO) -> int:
    """Return the width of the terminal, even if only `stream` is connected to one; 80 if it is unknown."""
    columns = 0
    with suppress(OSError):
        columns = os.get_terminal_size(stream.fileno()).columns
    return shutil.get_terminal_size((columns or 80, 24)).columns


def fit_line(line: str, columns: int) -> str:
    """Return the line, without its last figures if it is longer than `columns`."""
    if len(line) <= columns:
        return line
    ends = [found.start() for found in re.finditer(r", | \| | \(", line)]
    return line[: max((end for end in ends if end <= columns), default=max(1, columns))]


def live_line(given: Contribution, untrained: str = "") -> str:
    """Format the current figures on one line; while the script is not training, begin with the reason."""
    members = f", {format_count(given.world_size, 'worker')}" if not untrained else ""
    return (
        f"{untrained and f'{untrained} | '}step {given.step:,}{members} | here: {_work(given)} "
        f"({_share(given)} of the run), {format_bytes(given.sent_bytes)} up, "
        f"{format_bytes(given.received_bytes)} down"
    )


def summary(given: Contribution, total: Contribution) -> str:
    """Format the figures since this start (`given`), and those of all starts if there were earlier ones."""
    text = (
        f"thank you: {_work(given)} ({_share(given)} of the run), "
        f"{format_bytes(given.sent_bytes)} sent, {format_bytes(given.received_bytes)} received"
    )
    if total.steps > given.steps:
        text += f"; including earlier starts, {format_count(total.samples, 'sample')} ({_share(total)})"
    return text


def _work(given: Contribution) -> str:
    steps = format_count(given.steps, "step")
    if given.steps and not given.samples:
        return f"{steps} without samples of its own"
    return f"{steps}, {format_count(given.samples, 'sample')}"


def _figures(given: Contribution) -> dict[str, object]:
    return {**asdict(given), "share": round(given.share, 6)}


def _share(given: Contribution) -> str:
    return f"{100 * given.share:.1f} %"
