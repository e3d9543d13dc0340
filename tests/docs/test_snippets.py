"""What README and docs/ show can be typed: Python compiles, marked blocks run, TOML parses, options exist.

A block after a line `<!-- run -->` is run; the marked blocks of a page share one namespace, in their order.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = "<!-- run -->"
_BLOCK = re.compile(
    r"^(?P<before>[^\n]*)\n```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?gridtrain (?P<rest>[a-z].*)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = "\n" + page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        yield Block(page, line, found["language"], found["text"], found["before"].strip() == RUN)


EVERY = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in EVERY if block.language == "python"]
RUNNING = sorted({block.page for block in PYTHON if block.run})


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile(textwrap.dedent(block.text), str(block), "exec")


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_marked_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the snippets train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # a group writes its final model there
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.run:
            # blank lines before it, so that a traceback shows the page's own lines
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


def test_every_run_mark_stands_before_a_python_block() -> None:
    marks = sum(page.read_text(encoding="utf-8").split("\n").count(RUN) for page in PAGES)
    assert marks == sum(block.run for block in PYTHON) > 0


@pytest.mark.parametrize("block", [block for block in EVERY if block.language == "toml"], ids=str)
def test_toml_parses(block: Block) -> None:
    tomllib.loads(block.text)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(place, words) of every `gridtrain ...` line in a block without a language, comments cut off."""
    for block in EVERY:
        if block.language not in ("", "bash", "sh"):
            continue
        for line in block.text.replace("\\\n", " ").split("\n"):
            match = _COMMAND.match(line)
            if match is not None:
                for part in re.split(r" && | > | >> | \| ", match["rest"])[:1]:
                    yield str(block), shlex.split(part, comments=True)


def test_options_of_commands_exist() -> None:
    shown = list(commands())
    assert shown, "no document shows a command: is the pattern right?"
    assert [wrong for place, words in shown if (wrong := complaint(place, words))] == []


def complaint(place: str, words: list[str]) -> str:
    """What is wrong with this command line, up to the `--` before a script's own; "": nothing to be seen."""
    from gridtrain.cli.main import cli
    from gridtrain.cli.worker_commands import worker_commands

    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        sub = command.get_command(click.Context(command), words[0])
        if sub is None:
            break
        command, words = sub, words[1:]
    if command.name == "worker" and words and words[0] in worker_commands.commands:
        command, words = worker_commands.commands[words[0]], words[1:]
    if command is cli:
        return f"{place}: gridtrain has no command {words[:1]}"
    ours = words[: words.index("--")] if "--" in words else words
    given = {word.split("=")[0] for word in ours if word.startswith("--")}
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = sorted(given - known - {"--help"})
    return f"{place}: gridtrain {command.name} has no {unknown}" if unknown else ""


def test_a_wrong_option_is_found() -> None:
    assert complaint("page:1", ["status", "--wach"]) == "page:1: gridtrain status has no ['--wach']"
    assert complaint("page:1", ["fly"]) == "page:1: gridtrain has no command ['fly']"
    assert (
        complaint("page:1", ["worker", "X", "--name", "anna", "--", "python", "train.py", "--size=1"]) == ""
    )
