"""The console of a volunteer while the script runs, and at its end."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from brisk import WITHIN_S

from gridtrain.runtime.contribution import REPORT_INTERVAL_S, Contribution, ContributionReporter
from gridtrain.tools import log_output
from gridtrain_worker import agent
from gridtrain_worker.console import (
    CLEAR,
    Console,
    JsonConsole,
    TerminalConsole,
    TextConsole,
    console_for,
    live_line,
)
from gridtrain_worker.contribution_stats import LOOK_EVERY_S, ContributionStats

CONTRIBUTION = Contribution(
    step=410,
    steps=380,
    samples=12160,
    run_samples=50_000,
    sent_bytes=9_100_000,
    received_bytes=950,
    world_size=4,
)
LINE = "step 410, 4 workers | here: 380 steps, 12,160 samples (24.3 % of the run), 9.1 MB up, 950 B down"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (120, LINE),
        (96, LINE.removesuffix(", 950 B down")),
        (80, "step 410, 4 workers | here: 380 steps, 12,160 samples (24.3 % of the run)"),
        (60, "step 410, 4 workers | here: 380 steps, 12,160 samples"),
        (20, "step 410, 4 workers"),
        (10, "step 410"),
        (5, "step"),
    ],
)
def test_the_live_line_has_whole_figures(monkeypatch: pytest.MonkeyPatch, columns: int, shown: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    TerminalConsole(out).show_progress(CONTRIBUTION, 0.0)
    assert out.getvalue() == shown + "\n", "so that after kill -9 the next output has a line of its own"


def test_the_live_line_says_that_the_script_does_not_train_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    console = TerminalConsole(out)
    for untrained in ("", "paused: on battery, until 22:00", "joining", ""):
        console.show_progress(CONTRIBUTION, 0.0, untrained)
    assert out.getvalue().split(CLEAR) == [
        "step 410, 4 workers | here: 380 steps, 12,160 samples (24.3 % of the run)\n",
        "paused: on battery, until 22:00 | step 410 | here: 380 steps, 12,160 samples\n",
        "joining | step 410 | here: 380 steps, 12,160 samples (24.3 % of the run)\n",
        "step 410, 4 workers | here: 380 steps, 12,160 samples (24.3 % of the run)\n",
    ]


def test_the_figures_stay_while_no_script_runs(tmp_path: Path) -> None:
    """An overdue script was ended; until the next one trains, the line is not that of the last step."""
    out = io.StringIO()
    stats = ContributionStats(tmp_path / "worker.key", TerminalConsole(out))
    stats.update(0.0, "joining")
    assert not out.getvalue(), "nothing has been contributed"
    CONTRIBUTION.write(stats.path)
    stats.update(LOOK_EVERY_S)
    stats.script_ended()
    stats.update(2 * LOOK_EVERY_S, "paused: on battery")
    assert out.getvalue().split(CLEAR)[1].startswith("paused: on battery | step 410 | here: 380 steps")


def test_the_live_line_is_below_the_scripts_output() -> None:
    out = io.StringIO()
    console = TerminalConsole(out)
    console.show_progress(CONTRIBUTION, 0.0)
    console.write_output("loss 1.0\n", out)
    console.say("hello")
    console.write_output("no end", out)  # nothing may be appended to it
    console.show_progress(CONTRIBUTION, 1.0)
    console.write_output(" of the line\n", out)
    console.show_summary(CONTRIBUTION, CONTRIBUTION)
    assert out.getvalue().split(CLEAR) == [
        LINE + "\n",
        "loss 1.0\n" + LINE + "\n",
        "gridtrain worker: hello\n" + LINE + "\n",
        "no end of the line\n" + LINE + "\n",
        "gridtrain worker: thank you: 380 steps, 12,160 samples (24.3 % of the run), "
        "9.1 MB sent, 950 B received\n",
    ]


def test_steps_without_samples_are_not_presented_as_work() -> None:
    """A worker that returns at the end of a pass computes only stand-in batches, which count nothing."""
    given = Contribution(step=50, steps=1, run_samples=400, world_size=2)
    assert "here: 1 step without samples of its own (0.0 % of the run)" in live_line(given)
    assert "here: 0 steps, 0 samples (0.0 % of the run)" in live_line(Contribution(step=50))


def test_the_scripts_output_stays_in_a_terminal_that_has_become_narrower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some terminals rewrap the live line, which then has further rows, and others cut it off."""
    out = io.StringIO()
    console = TerminalConsole(out)
    console.show_progress(CONTRIBUTION, 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    console.say("hello")
    assert out.getvalue().startswith(LINE + "\n" + CLEAR + "gridtrain worker: hello\n")


def test_the_live_line_fits_its_own_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if standard output is not a terminal."""
    monkeypatch.delenv("COLUMNS")
    master, slave = pty.openpty()
    with open(master, "rb", 0) as screen, open(slave, "w") as out:
        termios.tcsetwinsize(slave, (24, 40))
        TerminalConsole(out).show_progress(CONTRIBUTION, 0.0)
        assert screen.read(1000) == b"step 410, 4 workers | here: 380 steps\r\n"


def test_a_json_log_has_few_progress_lines() -> None:
    out = io.StringIO()
    console = JsonConsole(out)
    console.say("hello")
    console.show_progress(CONTRIBUTION, 0.0)
    console.show_progress(Contribution(step=411), 9.9)
    console.show_progress(CONTRIBUTION, 10.0)  # nothing new
    console.show_summary(CONTRIBUTION, CONTRIBUTION)
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in said] == ["says", "contribution", "contributed"]
    assert said[0]["fields"] == {"text": "hello"}
    assert (said[1]["fields"]["samples"], said[1]["fields"]["share"]) == (12160, 0.2432)


class Full(io.StringIO):
    """A file on a full disk, or a pipe without a reader."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error: OSError | None = error

    def flush(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "kind", [TerminalConsole, TextConsole, lambda stream: Console()], ids=["terminal", "lines", "none"]
)
def test_a_full_disk_and_a_closed_pipe_cost_only_lines_of_the_log(
    kind: Callable[[TextIO], Console],
) -> None:
    out = Full(OSError(errno.ENOSPC, "no room"))
    console = kind(out)
    console.say("hello")
    console.show_progress(CONTRIBUTION, 0.0)
    console.write_output("loss 1.0\n", out)
    console.show_summary(CONTRIBUTION, CONTRIBUTION)
    out.error = BrokenPipeError(errno.EPIPE, "no reader")
    console.write_output("loss 0.9\n", out)
    out.error = None
    console.write_output("loss 0.8\n", out)
    assert out.getvalue().endswith("loss 0.8\n")


@pytest.fixture
def stuck() -> Iterator[tuple[int, TextIO]]:
    """A terminal that is stopped, as by Ctrl-S, until its other end is read."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    os.set_blocking(slave, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(slave, b"\n")
    os.set_blocking(slave, True)
    with open(slave, "w") as out:
        yield master, out
        os.close(master)


@pytest.mark.parametrize("kind", [TerminalConsole, TextConsole, JsonConsole])
def test_a_stopped_terminal_costs_nothing_of_what_the_script_writes_to_a_file(
    kind: Callable[[TextIO], Console], stuck: tuple[int, TextIO], tmp_path: Path
) -> None:
    """`gridtrain worker ... > results.txt`"""
    console = kind(stuck[1])
    for _ in range(200):
        console.say("x" * 100)
    results = tmp_path / "results.txt"
    with results.open("w") as file:
        for number in range(200):
            console.write_output(f"{number:9999}\n", file)
        console.say("it ends")
        assert [int(line) for line in results.read_text().splitlines()] == list(range(200))


def test_a_reader_of_the_scripts_output_who_stops_delays_only_the_script(
    stuck: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message is written while a copier waits; once the terminal continues, nothing is missing."""
    monkeypatch.setattr(log_output, "ROOM", 1000)
    master, out = stuck
    console, is_waiting = TerminalConsole(out), threading.Event()

    def copy() -> None:
        for number in range(200):
            if number == 5:
                is_waiting.set()
            console.write_output(f"{number:999}\n", out)

    copier = threading.Thread(target=copy, daemon=True)
    console.show_progress(CONTRIBUTION, 0.0)
    for _ in range(10):
        console.say("x" * 100)  # no room for output is left
    copier.start()
    console.say("paused by its owner")
    console.show_progress(Contribution(step=411), 1.0)
    assert not is_waiting.is_set()
    shown = ""
    while "    199\n" not in shown:
        shown += os.read(master, 1 << 16).decode()
    copier.join(WITHIN_S)
    written = [line for line in shown.replace(CLEAR, "").splitlines() if line.startswith("    ")]
    assert [int(line) for line in written] == list(range(200))
    assert "gridtrain worker: paused by its owner\n" in shown


def test_in_a_json_log_the_lines_of_the_script_are_json_too() -> None:
    out, other = io.StringIO(), io.StringIO()
    console = JsonConsole(out)
    for piece in ("Traceback:\n  fi", "le\r\n\n", "x" * 70_000, " no end"):
        console.write_output(piece, out)
        console.show_progress(CONTRIBUTION, 0.0)
    console.write_output("loss 1.0\n", other)
    console.end_output()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    texts = [line["fields"]["text"] for line in lines if line["event"] == "output"]
    assert texts == ["Traceback:", "  file", "", "x" * 65_536, "x" * 4_464 + " no end"]
    assert other.getvalue() == "loss 1.0\n", "stdout belongs to the script"


OF_RUN = Contribution(run_samples=64, sent_bytes=10, received_bytes=20, world_size=2)


def test_a_tally_is_written_once_a_second_and_read_back(tmp_path: Path) -> None:
    tally = ContributionReporter(tmp_path / "now.json")
    assert tally.is_due(0.0)
    tally.step_committed(1, 32)
    tally.step_committed(2, 0)
    tally.report(0.0, replace(OF_RUN, step=7), last=True)
    assert not tally.is_due(REPORT_INTERVAL_S - 0.1) and tally.is_due(REPORT_INTERVAL_S)
    found = Contribution.read(tmp_path / "now.json")
    assert found == Contribution(7, 2, 32, 64, 10, 20, 2) and found.share == 0.5
    assert not ContributionReporter(None).is_due(0.0)


def test_a_hanging_disk_delays_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above all not the I/O thread, which sends heartbeats and votes; the last report is written."""
    going_on, write = threading.Event(), Contribution.write

    def slow(given: Contribution, path: Path) -> None:
        assert going_on.wait(WITHIN_S)
        write(given, path)

    monkeypatch.setattr(Contribution, "write", slow)
    tally = ContributionReporter(tmp_path / "now.json")
    tally.report(0.0, replace(OF_RUN, step=1))
    tally.report(1.0, replace(OF_RUN, step=2))
    assert Contribution.read(tmp_path / "now.json") is None
    going_on.set()
    tally.report(1.5, replace(OF_RUN, step=3), last=True)
    found = Contribution.read(tmp_path / "now.json")
    assert found is not None and found.step == 3


NAMES = Contribution.__slots__
NOT_FIGURES = {
    "empty": "",
    "cut": "{",
    "a list": "[]",
    "nothing": "{}",
    "not all": '{"step": 1}',
    "too deep": "[" * 100_000,
    "negative": json.dumps({**dict.fromkeys(NAMES, 1), "step": -1}),
    "for the terminal": json.dumps(dict.fromkeys(NAMES, "\x1b[2J")),
    "true": json.dumps(dict.fromkeys(NAMES, True)),
}


@pytest.mark.parametrize("text", NOT_FIGURES.values(), ids=NOT_FIGURES)
def test_a_malformed_contribution_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "now.json").write_text(text)
    assert Contribution.read(tmp_path / "now.json") is None


def test_contributions_of_scripts_and_stays_add_up(tmp_path: Path) -> None:
    identity = tmp_path / "worker-0.key"

    def stay(scripts: list[Contribution]) -> list[str]:
        out = io.StringIO()
        giving = ContributionStats(identity, JsonConsole(out))
        for number, given in enumerate(scripts):
            given.write(giving.path)
            giving.update(number * LOOK_EVERY_S)
            giving.script_ended()
        giving.finish()
        giving.finish()  # once only
        return out.getvalue().splitlines()

    assert stay([Contribution(sent_bytes=5)]) == [], "joined without a contribution: no thanks"
    first = Contribution(
        step=5, steps=5, samples=50, run_samples=100, sent_bytes=1, received_bytes=2, world_size=2
    )
    again = Contribution(
        step=9, steps=2, samples=20, run_samples=200, sent_bytes=1, received_bytes=2, world_size=2
    )
    *_, end = stay([first, again])
    fields = json.loads(end)["fields"]
    assert (fields["steps"], fields["samples"], fields["share"], fields["sent_bytes"]) == (7, 70, 0.35, 2)
    *_, end = stay([Contribution(step=12, steps=1, samples=30, run_samples=400, world_size=1)])
    fields = json.loads(end)["fields"]
    assert (fields["samples"], fields["total"]["samples"], fields["total"]["share"]) == (30, 100, 0.25)


def test_the_contributions_of_a_killed_agent_count_in_later_starts(tmp_path: Path) -> None:
    """One of its scripts has ended, and one is running."""
    identity = tmp_path / "worker-0.key"
    killed = ContributionStats(identity, JsonConsole(io.StringIO()))
    Contribution(step=5, steps=5, samples=50, run_samples=50).write(killed.path)
    killed.script_ended()
    Contribution(step=8, steps=3, samples=30, run_samples=80).write(killed.path)

    stats = ContributionStats(identity, JsonConsole(out := io.StringIO()))
    Contribution(step=9, steps=1, samples=10, run_samples=90).write(stats.path)
    stats.script_ended()
    stats.finish()
    fields = json.loads(out.getvalue().splitlines()[-1])["fields"]
    assert (fields["steps"], fields["total"]["steps"], fields["total"]["samples"]) == (1, 9, 90)


def test_a_full_disk_does_not_lose_the_contributions_of_a_killed_agent(tmp_path: Path) -> None:
    identity = tmp_path / "worker-0.key"
    killed = ContributionStats(identity, JsonConsole(io.StringIO()))
    Contribution(step=5, steps=5, samples=50, run_samples=50).write(killed.path)

    def no_room(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as full:
        full.setattr(os, "replace", no_room)
        ContributionStats(identity, JsonConsole(io.StringIO())).finish()

    stats = ContributionStats(identity, JsonConsole(out := io.StringIO()))
    Contribution(step=6, steps=1, samples=10, run_samples=60).write(stats.path)
    stats.script_ended()
    stats.finish()
    assert json.loads(out.getvalue().splitlines()[-1])["fields"]["total"]["steps"] == 6


def test_a_script_counts_once_if_the_disk_has_become_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = ContributionStats(tmp_path / "worker-0.key", JsonConsole(out := io.StringIO()))
    Contribution(step=5, steps=5, samples=50, run_samples=50).write(stats.path)
    stats.update(0.0)

    def refuse(*paths: Path, **options: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert [stats.script_ended() for _ in range(3)] == [True, False, False], "the last two committed no step"
    stats.finish()
    assert json.loads(out.getvalue().splitlines()[-1])["fields"]["total"]["steps"] == 5


def test_the_live_line_includes_earlier_starts_without_the_steps_that_a_run_repeats(tmp_path: Path) -> None:
    """The first start is in steps 1 to 8.  Then all end; the run returns from step 8 to step 5."""
    identity, shown = tmp_path / "worker-0.key", []
    for number, given in enumerate(
        [
            Contribution(step=9, steps=8, samples=80, run_samples=125),
            Contribution(step=6, steps=1, samples=20, run_samples=120),
            Contribution(step=7, steps=1, samples=20, run_samples=140),
        ]
    ):
        out = io.StringIO()
        stats = ContributionStats(identity, TerminalConsole(out))
        given.write(stats.path)
        stats.update(number * LOOK_EVERY_S)
        shown.append(out.getvalue().partition(" | ")[2].partition("run)")[0])
        stats.script_ended()
        stats.finish()
    assert shown == [
        "here: 8 steps, 80 samples (64.0 % of the ",
        "here: 5 steps, 60 samples (50.0 % of the ",
        "here: 6 steps, 80 samples (57.1 % of the ",
    ]


def test_a_script_without_a_step_between_others_does_not_hide_which_steps_are_repeated(
    tmp_path: Path,
) -> None:
    """The run returns from step 100 to step 50; the first script that rejoins ends before its first step."""
    stats = ContributionStats(tmp_path / "worker-0.key", JsonConsole(out := io.StringIO()))
    for given in (
        Contribution(step=100, steps=100, samples=1000, run_samples=1000, sent_bytes=4),
        Contribution(step=50, run_samples=500, sent_bytes=2),
        Contribution(step=100, steps=50, samples=500, run_samples=1000, sent_bytes=1),
    ):
        given.write(stats.path)
        stats.script_ended()
    stats.finish()
    fields = json.loads(out.getvalue().splitlines()[-1])["fields"]
    assert (fields["steps"], fields["samples"], fields["sent_bytes"]) == (100, 1000, 7)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_format_of_the_log_can_be_chosen() -> None:
    kinds = {
        (type(console_for(stream(), log_format)), stream, log_format)
        for stream in (io.StringIO, FakeTerminal)
        for log_format in ("", "text", "json")
    }
    assert kinds == {
        (JsonConsole, io.StringIO, ""),
        (TextConsole, io.StringIO, "text"),
        (JsonConsole, io.StringIO, "json"),
        (TerminalConsole, FakeTerminal, ""),
        (TerminalConsole, FakeTerminal, "text"),
        (JsonConsole, FakeTerminal, "json"),
    }


class Pieces(Console):
    """Records the pieces of the script's output, and says so."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.changed = threading.Condition()

    def write_output(self, text: str, stream: TextIO) -> None:
        with self.changed:
            self.pieces.append(text)
            self.changed.notify_all()

    def wait_for(self, *pieces: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.pieces == list(pieces), WITHIN_S), self.pieces


@pytest.mark.parametrize("partial_line_s", [0.0, WITHIN_S])
def test_a_line_that_the_script_writes_in_parts_is_shown_whole_but_a_prompt_appears(
    monkeypatch: pytest.MonkeyPatch, partial_line_s: float
) -> None:
    monkeypatch.setattr(agent, "PARTIAL_LINE_S", partial_line_s)
    console, (end, script) = Pieces(), os.pipe()
    copier = threading.Thread(target=agent._copy, args=(os.fdopen(end, "rb"), io.StringIO(), "", console))
    copier.start()
    os.write(script, b"first\nloss ")
    console.wait_for("first\n", *(() if partial_line_s else ("loss ",)))
    os.write(script, b"0.5")
    if not partial_line_s:
        console.wait_for("first\n", "loss ", "0.5")
    os.write(script, b"\nlast")
    os.close(script)
    copier.join(WITHIN_S)
    if partial_line_s:
        assert console.pieces == ["first\n", "loss 0.5\n", "last"]
    else:
        assert "".join(console.pieces) == "first\nloss 0.5\nlast"


def test_a_text_log_has_whole_lines_and_few_figures() -> None:
    out = io.StringIO()
    console = TextConsole(out)
    console.say("hello")
    for now_s in (0.0, 1.0, 2.0, 10.0):
        console.show_progress(Contribution(step=int(now_s), steps=1, samples=1, run_samples=4), now_s)
    lines = out.getvalue().splitlines()
    assert lines[0] == "gridtrain worker: hello"
    assert [line.split(",")[0] for line in lines[1:]] == [
        "gridtrain worker: step 0",
        "gridtrain worker: step 10",
    ]


def test_the_error_that_ends_the_process_is_json_too() -> None:
    out = io.StringIO()
    JsonConsole(out).report_error("no", 4)
    line = json.loads(out.getvalue())
    assert (line["level"], line["fields"]) == ("error", {"text": "no", "exit_code": 4})


def test_steps_that_a_run_repeats_are_counted_once(tmp_path: Path) -> None:
    """A pipeline returns from step 5 to step 3, and this worker has other samples the second time."""
    tally = ContributionReporter(tmp_path / "now.json")
    for step, samples in ((1, 10), (2, 10), (3, 10), (4, 10), (3, 7), (4, 0), (5, 7)):
        tally.step_committed(step, samples)
    tally.report(0.0, Contribution(step=6, run_samples=68, world_size=2), last=True)
    found = Contribution.read(tmp_path / "now.json")
    assert found is not None and (found.steps, found.samples, found.share) == (5, 34, 0.5)
