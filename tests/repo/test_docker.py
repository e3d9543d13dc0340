"""docker/ without an engine: the entry script, the copied files, and the checks of compose-test.

With an engine: `make compose-test`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gridtrain.cli.status import ANSWER_TIMEOUT_S
from gridtrain.tools.options.option_table import find_option, known_variables

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
INVITATION = "gridtrain1:a-secret"
SPY = """#!/bin/sh
printf 'arguments:'; printf ' [%s]' "$@"
[ "$2" = - ] && printf '\\nread: %s' "$(cat)"
printf '\\nleft: %s\\n' "$(env | grep -c -e ^GRIDTRAIN_INVITATION -e ^GRIDTRAIN_ACCEPT_FILE)"
[ -z "${GRIDTRAIN_ACCEPT:-}" ] || printf 'accepted: %s\\n' "$GRIDTRAIN_ACCEPT"
exit 7
"""


@pytest.fixture(scope="module")
def compose_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compose_test", DOCKER / "test" / "compose_test.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entered(tmp_path: Path, *arguments: str, **variables: str) -> str:
    """The arguments and environment that the entry script passes to `gridtrain`."""
    spy = tmp_path / "gridtrain"
    spy.write_text(SPY)
    spy.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(DOCKER / "worker-entry.sh"), *arguments],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 7, done.stderr  # the program's own exit code, on which restart policies depend
    return done.stdout


def test_an_invitation_from_the_environment_is_read_and_never_an_argument(tmp_path: Path) -> None:
    output = entered(tmp_path, "python", "train.py", GRIDTRAIN_INVITATION=INVITATION)
    assert output == f"arguments: [worker] [-] [--] [python] [train.py]\nread: {INVITATION}\nleft: 0\n"


def test_an_invitation_in_a_file_is_named(tmp_path: Path) -> None:
    output = entered(tmp_path, "python", "a b.py", GRIDTRAIN_INVITATION_FILE="/invitations/local")
    assert output == "arguments: [worker] [@/invitations/local] [--] [python] [a b.py]\nleft: 0\n"


DIGEST = "sha256:" + "0" * 64


def test_an_accepted_digest_takes_the_runs_bundle(tmp_path: Path) -> None:
    """As without a container: no command is given, and `gridtrain worker` reads GRIDTRAIN_ACCEPT."""
    output = entered(tmp_path, "python", "train.py", GRIDTRAIN_INVITATION=INVITATION, GRIDTRAIN_ACCEPT=DIGEST)
    assert output == f"arguments: [worker] [-]\nread: {INVITATION}\nleft: 0\naccepted: {DIGEST}\n"
    file = tmp_path / "digest"
    file.write_text(f"{DIGEST}\n")
    output = entered(
        tmp_path, "python", "train.py",
        GRIDTRAIN_INVITATION_FILE="/invitations/local", GRIDTRAIN_ACCEPT="", GRIDTRAIN_ACCEPT_FILE=str(file),
    )  # fmt: skip
    assert output == f"arguments: [worker] [@/invitations/local]\nleft: 0\naccepted: {DIGEST}\n"


def test_a_volunteer_can_inspect_before_accepting(tmp_path: Path) -> None:
    output = entered(tmp_path, "look", GRIDTRAIN_INVITATION=INVITATION, GRIDTRAIN_ACCEPT="")
    assert output == f"arguments: [worker] [-] [--dry-run]\nread: {INVITATION}\nleft: 0\n"


def test_without_an_invitation_arguments_are_passed_on(tmp_path: Path) -> None:
    assert entered(tmp_path, "plan", "--help") == "arguments: [plan] [--help]\nleft: 0\n"


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_files_that_a_build_copies_exist_and_are_not_ignored(name: str) -> None:
    text = (DOCKER / f"{name}.Dockerfile").read_text()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "pyproject.toml" in copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert [source for source in copied if f"!{source}" not in ignored] == []


def test_compose_test_skips_itself_with_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DOCKER / "test" / "compose_test.py")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "compose-test SKIPPED: `docker` is not installed\n")


@pytest.mark.parametrize(
    ("losses", "at_kill", "falls"),
    [
        ([(20, 3.3), (400, 2.8), (1000, 2.4)], 2.8, True),
        ([(20, 3.3), (400, 2.8), (1000, 2.9)], 2.8, False),  # no further after the fault
        ([(20, 2.7), (400, 2.8), (1000, 2.4)], 2.8, False),  # not before it
    ],
)
def test_compose_test_requires_a_falling_loss_before_and_after_the_fault(
    compose_test: ModuleType, losses: list[tuple[int, float]], at_kill: float, falls: bool
) -> None:
    output: list[str] = []
    if falls:
        compose_test.check_losses(losses, at_kill, output.append)
    else:
        with pytest.raises(compose_test.Failed, match="did not keep falling"):
            compose_test.check_losses(losses, at_kill, output.append)
    assert len(output) == 1


def test_compose_test_waits_no_longer_than_its_limit(compose_test: ModuleType) -> None:
    with pytest.raises(compose_test.Failed, match=r"not seen within 0 s: the moon; instead: clouds"):
        compose_test.until("the moon", lambda: False, 0.0, lambda: "clouds")


def test_images_install_the_packages_of_the_extras() -> None:
    def wanted(extra: str) -> list[str]:
        command = [sys.executable, str(DOCKER / "requirements.py"), extra]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
        return [re.split(r"[<>=\[ ]", line)[0] for line in done.stdout.splitlines()]

    assert {"torch", "safetensors", "pyzmq"} <= set(wanted("worker"))
    assert "torch" not in wanted("coordinator") and "pyzmq" in wanted("coordinator")
    assert "gridtrain" not in wanted("worker")  # its own name is resolved


@pytest.mark.parametrize(
    "file",
    ["docker/compose.yaml", "docker/coordinator.Dockerfile", "gridtrain/tools/templates/new/compose.yaml"],
)
def test_the_health_check_allows_for_a_busy_machine(file: str) -> None:
    """`up` starts no worker beside an unhealthy coordinator.  The limit of a check must exceed its wait for
    an answer, as Python takes time to start on a busy machine."""
    text = (ROOT / file).read_text()
    (limit_s,) = re.findall(
        r"^ +timeout: (\d+)s|--timeout=(\d+)s", text.split("prometheus:")[0], re.MULTILINE
    )
    assert int("".join(limit_s)) >= ANSWER_TIMEOUT_S + 20


TEMPLATES = ROOT / "gridtrain" / "tools" / "templates" / "new"


def test_every_variable_in_these_files_exists() -> None:
    """A program started by `compose exec` would refuse an unknown variable."""
    files = [*DOCKER.glob("*.yaml"), *DOCKER.glob("*.Dockerfile"), *DOCKER.glob("*.sh"), *TEMPLATES.iterdir()]
    files += [*(ROOT / "packaging").rglob("*.service")]
    named = {
        name
        for file in files
        if file.is_file()
        for name in re.findall(r"GRIDTRAIN_[A-Z_]+", file.read_text())
    }
    assert len(named) > 20 and sorted(named - known_variables()) == []


UNITS = sorted((ROOT / "packaging" / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_failed_service_is_started_again_for_ever(unit: Path) -> None:
    """By default, systemd gives up after five starts in ten seconds.  Options that are invalid stay so."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert (settings["Restart"], settings["StartLimitIntervalSec"]) == ("on-failure", "0")
    assert "StartLimitBurst" not in settings and int(settings["RestartSec"]) >= 10
    final = [2, 4] if "worker" in unit.stem else [2]
    assert [int(code) for code in settings["RestartPreventExitStatus"].split()] == final


@pytest.mark.parametrize("folder", [DOCKER, TEMPLATES], ids=["docker", "new"])
@pytest.mark.parametrize("name", ["compose.yaml", "compose.volunteer.yaml"])
def test_the_logs_of_containers_are_limited(folder: Path, name: str) -> None:
    """Docker keeps all output unless the file says otherwise; docs/operations.md says that these files do."""
    first_anchor = (folder / name).read_text().partition("&")[2].partition("\n\n")[0]
    assert "max-size: 10m" in first_anchor


def test_a_volunteer_in_a_container_has_every_limit() -> None:
    """A variable that is not passed on has no effect in .env; hours are in the volunteer's time zone."""
    text = (DOCKER / "compose.volunteer.yaml").read_text()
    limits = ("upload_limit", "download_limit", "donate_limit", "relay", "set", "accept", "name", "data_dir",
              "cache_limit")  # fmt: skip
    for variable in (*(find_option("worker", name).variable for name in limits), "TZ"):
        assert f'    {variable}: "${{{variable}:-}}"' in text, variable


def test_documented_compose_commands_name_the_profile() -> None:
    """Without the profile the plugin does not stop the services of that profile; version 1.29 stops them all.

    docker compose -f compose.volunteer.yaml --profile cpu stop
    """
    files = [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        *DOCKER.glob("*.yaml"),
        *TEMPLATES.glob("*.yaml"),
    ]
    orders = [line for file in files for line in re.findall(r"docker compose (.*)", file.read_text())]
    ends = [line for line in orders if re.search(r"(?:^|\s)(?:stop|down|logs)\b", line)]
    assert len(ends) > 6 and [line for line in ends if "--profile" not in line] == []
