"""One line for each event: text on a terminal, JSON elsewhere, without control characters."""

from __future__ import annotations

import io
import json
from datetime import datetime

import pytest

from gridtrain_coordinator.log import log_to


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_when_not_a_terminal() -> None:
    out = io.StringIO()
    log = log_to(out)
    log("info", "joined", {"name": "anna", "peer": "0a1b"})
    log("warning", "lost", {"name": "anna", "after_s": 5.0})
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert datetime.fromisoformat(first.pop("ts")).tzinfo is not None
    assert first == {"level": "info", "event": "joined", "fields": {"name": "anna", "peer": "0a1b"}}
    assert (second["level"], second["fields"]["after_s"]) == ("warning", 5.0)


def test_text_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    log_to(out)("info", "joined", {"name": "anna", "reason": "two words", "rtt_s": 0.00123})
    assert out.getvalue()[8:] == '  joined          name=anna reason="two words" rtt_s=0.001\n'
    log_to(out)("info", "joined", {"reachable": True, "relay": False, "limit": None, "tried": ["a", "b"]})
    assert out.getvalue().endswith('  joined          reachable=yes relay=no limit=none tried="a, b"\n')


def test_text_says_what_became_of_the_open_step_and_json_names_the_verdict() -> None:
    out = io.StringIO()
    for verdict in ("ABORT", "COMMIT"):
        log_to(out, "text")("info", "generation", {"verdict": verdict, "step": 7})
    assert [line[26:] for line in out.getvalue().splitlines()] == [
        "open_step=repeated step=7",
        "open_step=committed step=7",
    ]
    out = io.StringIO()
    log_to(out)("info", "generation", {"step": 7, "verdict": "ABORT"})
    assert json.loads(out.getvalue())["fields"] == {"step": 7, "verdict": "ABORT"}


def test_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    log_to(out)("error", "waiting", {})
    assert "\x1b[31;1mwaiting" in out.getvalue()


def test_a_workers_name_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    log_to(out)("info", "joined", {"name": "\x1b[2Janna\n\r"})
    assert out.getvalue().rstrip("\n").isprintable()
    assert "\\u001b[2Janna" in out.getvalue()


def test_the_format_can_be_chosen() -> None:
    out = io.StringIO()
    log_to(out, "text")("info", "joined", {"name": "anna"})
    assert out.getvalue().endswith("  joined          name=anna\n") and "\x1b" not in out.getvalue()
