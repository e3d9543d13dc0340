"""The availability, installation and start of rivals."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

import rivals
from rivals import environments
from rivals.__main__ import main
from rivals.contract import ContractError, parse
from rivals.environments import ENVIRONMENTS, Environment


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRIDTRAIN_RIVALS", str(tmp_path / "rivals"))
    return tmp_path / "rivals"


def test_the_reason_for_a_missing_rival_is_reported(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    reasons = rivals.available()
    assert list(reasons) == list(rivals.NAMES)
    place = nothing_installed / "hivemind"
    assert (
        reasons["hivemind"] == f"not installed in {place} (python -m rivals setup hivemind, in benchmarks/)"
    )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert rivals.available()["mpi"].startswith("there is no command 'mpirun' (on Debian or Ubuntu: apt")


def test_gloo_is_available_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    assert rivals.available()["gloo"] == ""
    gone = Environment(packages=(), modules=("no_such_module.part",))
    monkeypatch.setitem(ENVIRONMENTS, "gloo", gone)
    assert rivals.available()["gloo"] == f"{sys.executable} has no no_such_module.part"


def test_an_environment_with_other_packages_is_not_available(nothing_installed: Path) -> None:
    (nothing_installed / "hivemind").mkdir(parents=True)
    (nothing_installed / "hivemind" / environments.READY).write_text("hivemind==0.1")
    assert "was made for 'hivemind==0.1'" in rivals.available()["hivemind"]


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


def test_a_rival_can_parse_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRIDTRAIN_SECRET", "ours")
    prefix = ("ip", "netns", "exec", "space")
    argv, env = rivals.command(
        "mpi", 1, 4, "10.77.0.2:29500", "gtopk", 1000, out=Path("r.json"), prefix=prefix, interface="eth0"
    )
    python = environments.folder() / "mpi" / "bin" / "python"
    assert argv[:7] == [*prefix, str(python), "-m", "rivals.mpi"]
    request = parse("mpi", argv[7:])
    assert (request.rank, request.world, request.op, request.n) == (1, 4, "gtopk", 1000)
    assert request.out == Path.cwd() / "r.json"
    assert env["GLOO_SOCKET_IFNAME"] == "eth0" and env["OMP_NUM_THREADS"] == "1"
    assert env["PATH"] == os.environ["PATH"] and "GRIDTRAIN_SECRET" not in env


def test_a_command_with_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ContractError, match=r"gloo has no operation 'gtopk'; there are: gloo all_reduce, "):
        rivals.command("gloo", 0, 1, "h:1", "gtopk", 10)
    with pytest.raises(ContractError, match="rank is 2"):
        rivals.command("gloo", 2, 2, "h:1", "all_reduce", 10)


def test_running_a_missing_rival_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hivemind", "--op", "all_reduce"]) == 1
    assert "hivemind cannot run here: not installed in" in capsys.readouterr().err


def test_list_shows_all_rivals_and_operations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for name, ops in rivals.OPS.items():
        assert f"{name}: " in output
        assert all(op in output for op in ops)
