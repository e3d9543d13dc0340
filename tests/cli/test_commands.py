"""Options of commands reach their programs, and commands are imported only when used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gridtrain_coordinator.__main__
import gridtrain_coordinator.serving
import gridtrain_worker.agent
from gridtrain.cli.main import COMMANDS, cli
from gridtrain.cli.worker_commands import worker_commands
from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import ConfigError, CoordinatorUnreachable, GridtrainError, JoinRefused, TransportError
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress
from gridtrain_coordinator.serving import Settings
from gridtrain_worker.agent import Job

INVITATION = Invitation("tcp://lab-pc:7700", bytes(range(32)), bytes(range(32, 64)), "mine")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that the command would have supervised."""
    seen: list[Job] = []

    def supervise(job: Job, tell: Callable[[str], None], **_: object) -> int:
        seen.append(job)
        return 7

    monkeypatch.setattr(gridtrain_worker.agent, "supervise", supervise)
    return seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("worker --upload-limit foo", "upload_limit: 'foo' is not a rate"),
        ("worker --cache-limit foo", "cache_limit is 'foo'"),
        ("worker --set battery=foo", "battery=foo is not valid"),
        ("worker --listen foo", "--listen foo has no port"),
        ("worker --name " + 65 * "x", "--name is 65 bytes"),
        ("worker --advertise tcp://" + 120 * "a" + ":7700", "--advertise is 131 bytes"),
        ("coordinator --listen foo", "--listen foo has no port"),
    ],
)
def test_config_show_refuses_what_the_program_refuses(options: str, words: str) -> None:
    done = CliRunner().invoke(cli, ["config", "show", *options.split()])
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    assert '"source": "flag"' in done.stdout, "the output names the source of the value"


@pytest.mark.parametrize(
    "module", ["gridtrain.config", "click", "gridtrain.cli.main", "gridtrain.cli.status"]
)
def test_ctrl_c_during_imports_ends_without_a_traceback(module: str) -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from gridtrain.cli import main\n"
        "main(['status'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.strip(), ended.stdout) == (130, "", "")


def test_worker_options_become_a_job(jobs: list[Job]) -> None:
    options = "--upload-limit 20Mbit --download-limit 100Mbit --restarts 2 --export-dir out --prefix"
    options += " --no-relay --unencrypted --state-dir mine --checkpoint-every 50"
    arguments = f"worker {INVITATION.text()} {options} -- python train.py --name theirs -v"
    result = CliRunner().invoke(
        cli, arguments.split(), env={"GRIDTRAIN_NAME": "anna", "GRIDTRAIN_CHECKPOINT_KEEP": "9"}
    )
    assert result.exit_code == 7, result.output
    assert jobs == [
        Job(
            command=("python", "train.py", "--name", "theirs", "-v"),
            invitation=INVITATION,
            name="anna",
            settings={
                "name": "anna",
                "upload_limit": "20Mbit",
                "download_limit": "100Mbit",
                "export_dir": "out",
                "state_dir": "mine",
                "checkpoint_every": "50",
                "checkpoint_keep": "9",
                "relay": "no",
                "unencrypted": "yes",
            },
            unencrypted=True,
            restarts=2,
            prefix=True,
        )
    ]


def test_a_bundle_is_not_accepted_beside_a_command(jobs: list[Job]) -> None:
    digest = "sha256:" + 64 * "0"
    arguments = ["worker", INVITATION.text(), "--accept", digest, "--", "python", "train.py"]
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, ConfigError) and not jobs
    assert done.exception.reason == f"--accept is {digest}, but the command python train.py was given"
    assert CliRunner().invoke(cli, arguments[:4]).exit_code == 7


@pytest.mark.parametrize("source", ["argument", "file", "-"])
def test_an_invitation_is_read_from_the_argument_a_file_or_standard_input(
    jobs: list[Job], tmp_path: Path, source: str
) -> None:
    """From a file or a pipe it does not appear in lists of processes."""
    text = INVITATION.text()
    (tmp_path / "invitation").write_text(f"{text}\n")
    argument = {"argument": text, "file": f"@{tmp_path / 'invitation'}", "-": "-"}[source]
    result = CliRunner().invoke(cli, ["worker", argument, "--", "true"], input=f"{text}\n")
    assert result.exit_code == 7, result.output
    assert [job.invitation for job in jobs] == [INVITATION]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "it is not a text file"),
        (b"", "no invitation was given"),
        (b"gridtrain1:" + b"A" * 5000, "was cut short or altered"),
    ],
    ids=["missing", "no text", "empty", "endless"],
)
def test_a_file_without_an_invitation_is_refused(
    jobs: list[Job], tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "invitation"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(cli, ["worker", f"@{path}", "--", "true"])
    assert isinstance(result.exception, ConfigError) and reason in result.exception.reason
    assert result.exception.remedy and jobs == []


def test_coordinator_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(settings: Settings, **_: Any) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(gridtrain_coordinator.serving, "serve", serve)
    arguments = "coordinator --listen tcp://0.0.0.0:7701 --advertise lab-pc:7701 --run mine --state j"
    result = CliRunner().invoke(
        cli, [*arguments.split(), "--min-workers", "4", "--exit-when-finished", "--unencrypted"]
    )
    assert result.exit_code == 0, result.output
    assert seen == [
        Settings(
            run="mine",
            listen="tcp://0.0.0.0:7701",
            advertise="tcp://lab-pc:7701",
            state=Path("j"),
            unencrypted=True,
            min_workers=4,
            exit_when_finished=True,
            dashboard=DashboardAddress(),
        )
    ]


@pytest.mark.parametrize(
    ("flags", "environ", "dashboard"),
    [
        ("", {}, DashboardAddress()),
        ("--no-dashboard", {"GRIDTRAIN_DASHBOARD": ":7781"}, None),
        ("", {"GRIDTRAIN_DASHBOARD": "off"}, None),
        ("--dashboard :7782", {"GRIDTRAIN_DASHBOARD": "off"}, DashboardAddress(port=7782, is_required=True)),
        (
            "--dashboard-host a --dashboard-host b",
            {"GRIDTRAIN_DASHBOARD_HOSTS": "c"},
            DashboardAddress(allowed_hosts=("a", "b")),
        ),
        (
            "",
            {
                "GRIDTRAIN_DASHBOARD": "0.0.0.0:7780",
                "GRIDTRAIN_DASHBOARD_OPEN": "1",
                "GRIDTRAIN_DASHBOARD_HOSTS": "coordinator,lab",
            },
            DashboardAddress(
                "0.0.0.0", 7780, is_required=True, allows_network=True, allowed_hosts=("coordinator", "lab")
            ),
        ),
    ],
)
def test_the_dashboards_address_is_read_from_flags_and_variables(
    flags: str, environ: dict[str, str], dashboard: DashboardAddress | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags, and the variables of docker/compose.yaml, in both ways to start a coordinator."""
    seen: list[Settings] = []

    def serve(settings: Settings, **_: Any) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(gridtrain_coordinator.serving, "serve", serve)
    result = CliRunner().invoke(cli, ["coordinator", *flags.split()], env=environ)
    assert result.exit_code == 0, result.output
    if not flags:
        for name, text in environ.items():
            monkeypatch.setenv(name, text)
        assert gridtrain_coordinator.__main__.main() == 0
    assert {settings.dashboard for settings in seen} == {dashboard}


def test_dashboard_and_no_dashboard_exclude_each_other() -> None:
    result = CliRunner().invoke(cli, ["coordinator", "--dashboard", ":0", "--no-dashboard"])
    assert result.exit_code == 2 and "both given" in result.output


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
def test_errors_have_exit_codes(error: GridtrainError, code: int) -> None:
    assert error.exit_code == code


def test_journal_and_keys_are_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory("mine") == tmp_path / "gridtrain" / "mine"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_directory("a.b") == tmp_path / ".local/state/gridtrain/a.b"


@pytest.mark.parametrize(
    "name",
    [*COMMANDS, *(f"worker {each}" for each in worker_commands.commands), "data index", "config show", ""],
)
def test_the_help_of_every_command_fits_one_screen(name: str) -> None:
    # On a terminal of 80 columns click uses 78, but CliRunner sets 80.
    result = CliRunner().invoke(cli, [*name.split(), "--help"], terminal_width=78)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80 and "..." not in lines[-1], result.output


def test_the_general_help_has_the_exit_codes_and_every_command_in_one_line() -> None:
    output = CliRunner().invoke(cli, ["--help"], terminal_width=78).output
    assert len(output.splitlines()) <= 40 and "Exit codes of all commands" in output
    assert all(f"  {name:<11}  {text}" in output for name, text in COMMANDS.items())
    for word in worker_commands.commands:
        assert word in COMMANDS["worker"]


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
