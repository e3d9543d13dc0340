"""Options arrive where they belong, and commands are imported only when they are used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import gridtrain_coordinator.daemon
import gridtrain_worker.agent
from gridtrain.cli.main import COMMANDS, cli, exit_code
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused, TransportError
from gridtrain_coordinator.daemon import Settings, default_journal
from gridtrain_worker.agent import Job


def test_worker_options_become_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def supervise(job: Job, tell: Callable[[str], None]) -> int:
        jobs.append(job)
        return 7

    monkeypatch.setattr(gridtrain_worker.agent, "supervise", supervise)
    options = "--upload-limit 20Mbit --download-limit 100Mbit --restarts 2 --export-dir out --prefix"
    line = f"worker lab-pc --run mine {options} -- python train.py --name theirs -v"
    result = CliRunner().invoke(cli, line.split(), env={"GRIDTRAIN_NAME": "anna"})
    assert result.exit_code == 7, result.output
    assert jobs == [
        Job(
            command=("python", "train.py", "--name", "theirs", "-v"),
            coordinator="tcp://lab-pc:7700",
            run="mine",
            name="anna",
            upload_limit="20Mbit",
            download_limit="100Mbit",
            export_dir="out",
            restarts=2,
            prefix=True,
        )
    ]


def test_coordinator_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, **_: Any) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(gridtrain_coordinator.daemon, "serve", serve)
    line = "coordinator --listen tcp://0.0.0.0:7701 --advertise lab-pc:7701 --run mine --journal j"
    result = CliRunner().invoke(cli, [*line.split(), "--min-workers", "4", "--exit-when-finished"])
    assert result.exit_code == 0, result.output
    assert seen == [
        Settings(
            run="mine",
            listen="tcp://0.0.0.0:7701",
            advertise="tcp://lab-pc:7701",
            journal=Path("j"),
            min_workers=4,
            exit_when_finished=True,
        )
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GridtrainError("x"), 1),
        (TransportError("x"), 1),
        (ConfigError("x"), 2),
        (CoordinatorUnreachable("x"), 3),
        (JoinRefused("wrong-run", "x"), 4),
    ],
)
def test_exit_codes(error: GridtrainError, code: int) -> None:
    assert exit_code(error) == code


def test_the_journal_lies_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_journal("mine") == tmp_path / "gridtrain" / "mine" / "journal.sqlite"
    assert (tmp_path / "gridtrain" / "mine").is_dir()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_the_exit_codes(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Exit codes:" in result.output
    assert isinstance(cli.get_command(click.Context(cli), name), click.Command)


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from gridtrain.cli.main import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "gridtrain.cli.main" in loaded
    assert not loaded & {"torch", "zmq", "numpy", "rich", *(f"gridtrain.cli.{name}" for name in COMMANDS)}
