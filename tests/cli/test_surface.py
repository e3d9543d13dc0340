"""Guarantees of the whole command line: documented exit codes, errors with a remedy, completion."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gridtrain import errors, extras
from gridtrain._version import __version__
from gridtrain.cli import doctor
from gridtrain.cli.main import COMMANDS, EXIT_CODES, cli, main
from gridtrain.config import DEFAULT_DONATE_LIMIT, JoinConfig
from gridtrain.tools.options import PROGRAMS
from gridtrain.training.data.shard_files import DEFAULT_LIMIT_BYTES, parse_limit
from gridtrain_coordinator.dashboard.listen_address import HOST, PORT

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_exit_codes_are_those_of_the_help_and_of_the_program() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| (\d+) \| (.+) \|$", text, flags=re.MULTILINE))
    helped = dict(re.findall(r"(\d+)  +(.+?)(?=\n|;  \d)", EXIT_CODES + "\n"))
    helped |= dict(re.findall(r"; +(\d+)  +(.+)", EXIT_CODES))
    assert documented == helped
    of_doctor = dict(re.findall(r"^\| `gridtrain doctor`: (\d+) \| (.+) \|$", text, flags=re.MULTILINE))
    assert of_doctor == dict(re.findall(r"^  (\d+)  +(.+)$", doctor.EXIT_CODES, flags=re.MULTILINE))
    assert {"0", str(doctor.EXIT_WARNINGS), str(doctor.EXIT_FAILURES), "130"} == set(of_doctor)
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.GridtrainError)
    ]
    raised = {kind.exit_code for kind in kinds}
    assert {str(code) for code in (0, *raised)} == set(documented) - {"129", "130", "143"}


def raised_errors() -> Iterator[tuple[str, str, bool]]:
    """Each error that a command may raise: its place, its type, and whether it has a remedy."""
    kinds = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    kinds -= {"LocalProtocolError"}  # a bug of gridtrain, with a traceback
    places = [
        "gridtrain/cli",
        *(f"gridtrain/tools/{name}" for name in ("options", "bundle", "demo", "bench")),
    ]
    places += ["worker/gridtrain_worker", "gridtrain/training/checkpoint/model_export.py"]
    places += ["gridtrain/runtime/client", "gridtrain/network/addresses.py"]
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                    has = any(word.arg == "remedy" and _is_not_empty(word.value) for word in node.keywords)
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node.func.id, has


def _is_not_empty(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and not value.value)


def test_every_error_of_a_command_has_a_remedy() -> None:
    found = list(raised_errors())
    assert len(found) > 60, "the pattern does not match"
    assert [f"{place}: {kind} without remedy=" for place, kind, has in found if not has] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0 and "_GRIDTRAIN_COMPLETE" in done.output
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(done.output)
    subprocess.run([shell, "-n", str(script)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gridtrain con", {"config"}),
        ("gridtrain co", {"coordinator", "config", "completion"}),
        ("gridtrain worker --upl", {"--upload-limit"}),
        ("gridtrain config show w", {"worker"}),
        ("gridtrain completion f", {"fish"}),
        ("gridtrain worker s", {"set", "show", "stop"}),
        ("gridtrain worker set ba", {"battery="}),
        ("gridtrain worker stop --work", {"--worker"}),
    ],
)
def test_bash_completes_words(words: str, expected: set[str]) -> None:
    environment = {**os.environ, "_GRIDTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run(
        [sys.executable, "-m", "gridtrain"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert {line.split(",")[1] for line in done.stdout.splitlines()} == expected, done.stderr


def test_the_error_of_an_unknown_command_names_a_similar_one() -> None:
    for word, meant in (("stat", "status"), ("invitation", "invite"), ("cordinator", "coordinator")):
        done = CliRunner().invoke(cli, [word])
        assert done.exit_code == 2 and re.search(rf"Did you mean .*{meant}", done.output), done.output
    for word in ("xyzzy", "train", "run", "end"):
        assert "Did you mean" not in CliRunner().invoke(cli, [word]).output


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("coordinator --frob", ""),
        ("new --runs", ""),
        ("coordinator --runs", "--run"),
        ("worker --restart 1", "--restarts"),
    ],
)
def test_the_error_of_an_unknown_option_names_only_a_similar_one(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    text = capsys.readouterr().err
    suggested = re.findall(r"mean\W+(--[\w-]+)\W*$", text)
    assert "No such option" in text and suggested == ([meant] if meant else []), text


def test_config_show_names_the_source_of_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "mine"\n[worker]\nrestarts = 3\n')
    monkeypatch.chdir(tmp_path)
    environment = {"GRIDTRAIN_NAME": "anna", "GRIDTRAIN_INVITATION": "gridtrain1:secret"}
    done = CliRunner().invoke(cli, ["config", "show", "worker", "--upload-limit", "1Mbit"], env=environment)
    found = {line["name"]: line for line in map(json.loads, done.output.splitlines())}
    picked = {name: (found[name]["value"], found[name]["source"], found[name]["where"]) for name in
              ("upload_limit", "name", "restarts", "relay", "invitation")}  # fmt: skip
    assert picked == {
        "upload_limit": ("1Mbit", "flag", "--upload-limit"),
        "name": ("anna", "environment", "GRIDTRAIN_NAME"),
        "restarts": (3, "run.toml", "run.toml [worker] restarts"),
        "relay": (True, "default", ""),
        "invitation": ("(set, not shown)", "environment", "GRIDTRAIN_INVITATION"),
    }
    both = CliRunner().invoke(cli, ["config", "show"])
    programs = {json.loads(line)["program"] for line in both.output.splitlines()}
    assert programs == set(PROGRAMS) and "secret" not in done.output


def test_config_show_prints_the_defaults_that_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("GRIDTRAIN_RUN", "mine")
    found = {
        line["name"]: line["value"]
        for line in map(json.loads, CliRunner().invoke(cli, ["config", "show"]).output.splitlines())
    }
    joined = JoinConfig("", "")
    expected = {
        "state": str(tmp_path / "gridtrain" / "mine"),
        "dashboard": f"{HOST}:{PORT}",
        "donate_limit": DEFAULT_DONATE_LIMIT,
        "checkpoint_every": int(joined.checkpoint_every),
        "checkpoint_keep": int(joined.checkpoint_keep),
        "handover_mib": int(joined.handover_mib),
        "wait": joined.wait,
        "base": joined.base,
        "backup_to": None,
        "name": "",
    }
    assert {name: found[name] for name in expected} == expected
    assert parse_limit("cache_limit", found["cache_limit"]) == DEFAULT_LIMIT_BYTES


def test_a_run_is_found_by_the_run_toml_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "mine"\n[coordinator]\nstate = "saved"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(cli, ["invite"])
    assert isinstance(done.exception, errors.CoordinatorUnreachable)
    assert "saved/coordinator.json" in done.exception.reason
    done = CliRunner().invoke(cli, ["status", "--run", "other"])
    assert isinstance(done.exception, errors.CoordinatorUnreachable)
    assert "home/gridtrain/other/coordinator.json" in done.exception.reason, (
        "the state of run.toml belongs to another run"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.search(rf"`(?:gridtrain )?{name}`", text), f"docs/cli.md does not name {name}"
    assert isinstance(cli.get_command(click.Context(cli), name), click.Command)


def test_the_install_command_fits_a_checkout_and_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extras.install_command("torch") == f"pip install -e {shlex.quote(f'{ROOT}[torch]')}"
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert extras.install_command("torch") == f"pip install 'gridtrain-{__version__}-py3-none-any.whl[torch]'"


def test_no_message_installs_gridtrain_from_an_index() -> None:
    """Neither does a unit or a template, as gridtrain is on no index."""
    found = [
        path
        for folder in ("gridtrain", "coordinator", "worker", "packaging", "docker", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and re.search(rb"""pip install ['"]?gridtrain\[""", path.read_bytes())
    ]
    assert found == []
