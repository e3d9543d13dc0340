"""The availability, installation and start of rivals."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from rivals import environments
from rivals.__main__ import main
from rivals.contract import NAMES
from rivals.environments import ENVIRONMENTS, Environment, available


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRIDTRAIN_RIVALS", str(tmp_path / "rivals"))
    return tmp_path / "rivals"


def test_the_reason_for_a_missing_rival_is_reported(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    reasons = available()
    assert list(reasons) == list(NAMES)
    place = nothing_installed / "hivemind"
    assert (
        reasons["hivemind"] == f"not installed in {place} (python -m rivals setup hivemind, in benchmarks/)"
    )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert available()["mpi"].startswith("there is no command 'mpirun' (on Debian or Ubuntu: apt")


def test_gloo_is_available_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    assert available()["gloo"] == ""
    gone = Environment(packages=(), modules=("no_such_module.part",))
    monkeypatch.setitem(ENVIRONMENTS, "gloo", gone)
    assert available()["gloo"] == f"{sys.executable} has no no_such_module.part"


def test_an_environment_with_other_packages_is_not_available(nothing_installed: Path) -> None:
    (nothing_installed / "hivemind").mkdir(parents=True)
    (nothing_installed / "hivemind" / environments.READY).write_text("hivemind==0.1")
    assert "was made for 'hivemind==0.1'" in available()["hivemind"]


def test_setup_reports_a_failed_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment is real; the package is a missing folder, so that no package index is used."""
    monkeypatch.setitem(ENVIRONMENTS, "hivemind", Environment(("./no-such-folder",), ("hivemind",)))
    assert main(["setup", "hivemind"]) == 1
    output = capsys.readouterr().out
    assert "hivemind: installing into" in output
    assert "pip install" in output and "no-such-folder" in output
    assert not (environments.folder() / "hivemind" / environments.READY).exists()


def test_an_unknown_rival_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["setup", "nccl"])
    assert "there is no rival nccl; there are gloo, mpi, hivemind" in capsys.readouterr().err


def test_a_rival_has_the_variables_of_the_machine_but_not_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRIDTRAIN_SECRET", "ours")
    env = environments.variables("eth0")
    assert env["GLOO_SOCKET_IFNAME"] == "eth0" and env["OMP_NUM_THREADS"] == "1"
    assert env["PATH"] == os.environ["PATH"] and "GRIDTRAIN_SECRET" not in env
