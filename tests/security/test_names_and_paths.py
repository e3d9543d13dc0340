"""Names from other parties, or from the environment, do not lead outside of their folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import BRISK
from torch import nn

import gridtrain
from gridtrain.core.group.invitation import RUN_NAME, Invitation
from gridtrain.errors import ConfigError
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint
from gridtrain.runtime.client.worker_defaults import state_directory
from gridtrain.sdk.local_group import LocalGroup
from gridtrain_coordinator.serving import Settings

HOSTILE = [
    *("../../x", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "~", "~root", "$HOME", "-rf", "--help"),
    *("\x00", "a\x00b", "a\nb", "\x1b[2J", "CON", "con.txt", "nul", "x" * 5000, "é" * 200, "a b", "a.", "*"),
    *("_", "a_b", "x" * 64, "X=1"),
]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "gridtrain"


@pytest.mark.parametrize("run", HOSTILE, ids=lambda name: repr(name[:12]))
def test_a_runs_folder_is_below_the_state_folder(run: str, base: Path) -> None:
    folder = state_directory(run)
    assert folder.parent == base
    assert folder.resolve().parent == base.resolve()
    assert folder.name and not folder.name.startswith((".", "-", "~"))
    folder.mkdir(parents=True)
    (folder / "final.safetensors").write_bytes(b"")


def test_two_runs_never_share_a_folder(base: Path) -> None:
    """They would share keys and overwrite each other's model."""
    assert len({state_directory(run) for run in HOSTILE}) == len(HOSTILE)


def test_a_plain_name_is_the_name_of_its_folder(base: Path) -> None:
    for run in ("demo", "gpt-2.1_b", "7"):
        assert state_directory(run) == base / run


NO_RUN = [name for name in HOSTILE if not RUN_NAME.fullmatch(name)]


@pytest.mark.parametrize("run", NO_RUN, ids=lambda name: repr(name[:12]))
def test_an_invalid_run_name_is_refused(run: str, base: Path) -> None:
    with pytest.raises(ConfigError, match="valid run name"):
        Settings(run=run)
    with pytest.raises(ConfigError, match="valid run name"):
        CoordinatorEndpoint.find(run)
    with pytest.raises(ConfigError, match="valid run name"):
        Invitation("tcp://h:1", bytes(32), bytes(range(32)), run)
    assert not base.exists()


def test_members_with_such_names_write_only_the_model(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["../../x", "a/b", "-rf", "CON"]
    results: dict[str, Any] = {}

    def work(group: LocalGroup, name: str) -> None:
        try:
            with group.join(name, export_dir=str(tmp_path / "export")) as grid:
                net = nn.Linear(1, 1)
                optimizer = grid.optimizer(
                    torch.optim.SGD(net.parameters(), lr=0.1), net, exchange=gridtrain.Dense()
                )
                for x in grid.batches(torch.ones(8, 1), batch_size=1, steps=2):
                    net(x).sum().backward()
                    optimizer.step()
                    grid.report(**{"../../y": 1.0})
            results[name] = "done"
        except BaseException as error:
            results[name] = error

    with LocalGroup(min_workers=len(names), deadlines=BRISK) as group:
        threads = [threading.Thread(target=work, args=(group, name), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
    assert results == dict.fromkeys(names, "done")
    written = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert written == ["export/final.safetensors"]
