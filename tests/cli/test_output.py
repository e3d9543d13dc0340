"""Paragraphs on a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gridtrain.cli import doctor, output
from gridtrain.cli.main import main
from gridtrain.cli.output import wrap_text
from gridtrain.tools.doctor.findings import warning

WORDS = ["plan", "--parameters", "10M", "--workers", "4"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stdout = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=stdout))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(words)
    return capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_paragraphs_are_broken_at_the_edge_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(WORDS, capsys)
    assert "Use gtopk" in text and max(map(len, text.splitlines())) <= 80, text
    assert "\n    flat gradient" in text or "\n    exchange" in text or "\n    residual" in text, text


def test_in_a_pipe_a_paragraph_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(WORDS, capsys).splitlines()
    assert any(line.startswith("Use gtopk") and line.endswith("s.") for line in lines), lines


@pytest.mark.usefixtures("terminal")
def test_findings_of_the_doctor_keep_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._show(warning("disk", "a" + " long" * 20, "free" + " some" * 20), plain=False)
    first, *others = capsys.readouterr().out.splitlines()
    assert "disk         a long" in first
    assert [line[:26] for line in others] == [" " * 22 + "long", " " * 22 + "-> f"], "a command stays whole"


@pytest.mark.usefixtures("terminal")
def test_a_long_word_such_as_a_path_stays_whole() -> None:
    path = "/" + "x" * 100
    assert wrap_text(f"it is in {path} now") == f"it is in\n{path}\nnow"
