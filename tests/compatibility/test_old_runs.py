"""Runs that were interrupted under commit 330f465 are finished by later code, in real processes.

The folders of the coordinator and the workers are copies of those of the old programs, which were killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from oldformats.files import DATA, private_copy, recorded
from oldformats.positions import keys_of

pytestmark = pytest.mark.integration

CLI = (sys.executable, "-m", "gridtrain")
COORDINATOR = Path(__file__).parent / "oldformats" / "brisk_coordinator.py"
WITHIN_S = 120.0
KNOWN = recorded("coordinator/known.json")
WHOLE_STEPS, STAGES_STEPS = 700, 150
"""The steps of the recorded runs."""


class Programs:
    """The coordinator's folder, the workers' homes, and the processes that use them."""

    def __init__(self, folder: Path, state: str, workers: tuple[str, ...]) -> None:
        self.folder = folder
        self.state = private_copy(DATA / "coordinator" / state, folder / "state")
        for name in workers:
            private_copy(DATA / "workers" / name, folder / name)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, name: str) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("GRIDTRAIN_")}
        more = {"XDG_STATE_HOME": str(self.folder / name), "PAUSE_FILE": str(self.folder / "pause")}
        return inherited | more | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment(name),
            )

    def coordinate(self, *words: str) -> None:
        """Start the coordinator at a free port; the contact file has another one."""
        place = ("--listen", "tcp://127.0.0.1:0", "--state", str(self.state), "--min-workers", "2")
        self.start("coordinator", sys.executable, str(COORDINATOR), *place, "--no-dashboard", *words)
        self.wait(lambda: "coordinated at tcp://" in self.log("coordinator"), "the coordinator listens")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (*CLI, *words),
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            cwd=self.folder,
            env=self.environment("owner"),
        )

    def ask(self, *words: str) -> str:
        done = self.run(*words, "--state", str(self.state))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return shown

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def wait(self, true: Callable[[], Any], what: str) -> Any:
        until_s = time.monotonic() + WITHIN_S
        while not (found := true()):
            assert time.monotonic() < until_s, f"{what}\n{self.logs()}"
            time.sleep(0.1)
        return found

    def finish(self) -> None:
        """Wait until all programs have ended with exit code 0."""
        for name, process in list(self.running.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WITHIN_S)
            assert process.poll() == 0, f"{name}: {process.returncode}\n{self.logs()}"
            del self.running[name]


@contextlib.contextmanager
def programs(folder: Path, state: str, *workers: str) -> Iterator[Programs]:
    made = Programs(folder, state, workers)
    try:
        yield made
    finally:
        for process in made.running.values():
            process.terminate()
        for process in made.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WITHIN_S / 4)
            process.kill()
            process.wait()


def test_an_interrupted_run_is_finished(tmp_path: Path) -> None:
    """anna has the bundle on its disk, bert has to fetch it; both have accepted it, and are admitted."""
    with programs(tmp_path, "interrupted", "anna", "bert") as run:
        (tmp_path / "pause").write_text("0.05")
        for name in ("train.py", "run.toml"):
            shutil.copy(DATA / "scripts" / name, tmp_path)
        run.coordinate("--exit-when-finished")
        invitation = run.ask("invite")
        for name in ("anna", "bert"):
            run.start(name, *CLI, "worker", invitation, "--name", name, "--checkpoint-every", "20")
        shown = run.wait(lambda: training(run, "anna", "bert"), "both train")
        assert_status_has_its_names(shown)
        (tmp_path / "pause").unlink()
        run.finish()
        begin = latest_step("anna")
        for name in ("anna", "bert"):
            steps = [int(step) for step in re.findall(r"STEP (\d+)", run.log(name))]
            assert steps[0] == begin and steps[-1] == WHOLE_STEPS - 1
            assert f"END {WHOLE_STEPS}" in run.log(name)
        (final,) = tmp_path.glob("*/gridtrain/whole/final.safetensors")
        assert set(safetensors.torch.load_file(final)) >= {"0.weight", "1.running_mean", "3.bias"}


def latest_step(name: str) -> int:
    """The latest step of the recorded worker's checkpoints."""
    return max(int(path.name[5:]) for path in (DATA / "workers" / name).glob("**/step-*"))


def training(run: Programs, *names: str) -> dict[str, Any] | None:
    """The status as soon as these workers train and have reported their figures."""
    shown = run.status()
    members = {each["name"]: each for each in shown["members"] if each["rank"] is not None}
    here = shown["phase"] == "training" and set(members) == set(names)
    have_reported = all(
        "loss" in each["figures"] and each["sent_Bps"] is not None for each in members.values()
    )
    return shown if here and have_reported else None


def assert_status_has_its_names(shown: dict[str, Any]) -> None:
    """Events have their own fields, and no worker is paused here."""
    known = keys_of(recorded("interfaces/status.json")["status"])
    varying = ("events[].", "resting[].", "backup")
    missing = {key for key in known - keys_of(shown) if not key.startswith(varying)}
    assert missing == set()
    assert [each["name"] for each in shown["door"]["banned"]] == ["dora"]
    assert {each["peer"][:12] for each in shown["door"]["enrolled"]} == {
        KNOWN["keys"][name] for name in ("anna", "bert", "gina")
    }


def test_an_interrupted_run_in_stages_is_finished(tmp_path: Path) -> None:
    with programs(tmp_path, "stages", "hugo", "ines") as run:
        shutil.copy(DATA / "scripts" / "pipeline.py", tmp_path)
        run.coordinate("--run", "stages", "--exit-when-finished")
        invitation = run.ask("invite", "--run", "stages")
        command = (sys.executable, str(tmp_path / "pipeline.py"), str(STAGES_STEPS))
        for name in ("hugo", "ines"):
            run.start(
                name, *CLI, "worker", invitation, "--name", name, "--checkpoint-every", "20", "--", *command
            )
        run.finish()
        for name in ("hugo", "ines"):
            steps = [int(step) for step in re.findall(r"STEP (\d+) ", run.log(name))]
            assert steps[0] == latest_step(name) and steps[-1] == STAGES_STEPS - 1
        parts = list(tmp_path.glob("*/gridtrain/stages/final*.safetensors"))
        names = {name for part in parts for name in safetensors.torch.load_file(part)}
        assert len(parts) == 2 and len(names) == 6


@pytest.mark.parametrize(
    ("state", "words", "what"),
    [
        pytest.param("finished", ("--run", "whole"), "finished", id="a run that is finished"),
        pytest.param("stages", ("--run", "whole"), "stages", id="another run's folder"),
    ],
)
def test_a_journal_that_cannot_continue_is_refused_with_a_remedy(
    state: str, words: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    with programs(tmp_path, state) as run:
        place = ("--listen", "tcp://127.0.0.1:0", "--state", str(run.state), "--no-dashboard")
        done = run.run("coordinator", *words, *place)
        assert done.returncode == 1 and what in done.stderr
        assert "->" in done.stderr and "--state" in done.stderr.partition("->")[2]
        assert "Traceback" not in done.stderr
