"""The daemon with a dashboard: the status that it publishes, and commands from it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import ANNA, COORDINATOR, INVITATION, OPERATOR, Iterations

from gridtrain.config import Deadlines
from gridtrain.core.messages import OperatorReply, Refused, RemoveWorker, Unban
from gridtrain.errors import ConfigError
from gridtrain.extras import install_command
from gridtrain.network.transport.in_memory import MemoryHub, MemoryTransport
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler, connection_gate
from gridtrain_coordinator.daemon import Coordinator, recover_membership
from gridtrain_coordinator.dashboard import startup
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress, bind, parse_address
from gridtrain_coordinator.journal.store import JournalFull, JournalStore


class RecordingDashboard:
    """Records what is published and returns these commands when it is first asked."""

    def __init__(self, *orders: RemoveWorker | Unban) -> None:
        self.published: list[Mapping[str, Any]] = []
        self.orders = [(order, Future[OperatorReply | Refused]()) for order in orders]
        self._left = list(self.orders)

    def publish(self, status: Mapping[str, Any]) -> None:
        self.published.append(status)

    def take_orders(self) -> Iterator[tuple[RemoveWorker | Unban, Future[OperatorReply | Refused]]]:
        while self._left:
            yield self._left.pop(0)

    def replies(self) -> list[OperatorReply | Refused]:
        return [answer.result(0) for _, answer in self.orders]


def coordinator(dashboard: RecordingDashboard, store: JournalStore) -> Coordinator:
    access = Authorization(operator=OPERATOR, coordinator=COORDINATOR)
    access.invite(INVITATION, 2, 600.0, time.time())
    access.enrol(INVITATION, ANNA, "", time.time())
    transport = MemoryTransport(COORDINATOR, MemoryHub(), gate=connection_gate(access, time.time))
    transport.listen("memory://c")
    core = recover_membership(store, COORDINATOR, "default", Deadlines())
    return Coordinator(transport, store, core, AccessHandler(access, core), dashboard=dashboard)


def test_the_dashboard_receives_the_operators_status() -> None:
    dashboard = RecordingDashboard()
    coordinator(dashboard, JournalStore.open(":memory:")).run(Iterations(2))
    (status,) = dashboard.published
    assert (status["phase"], status["step"], status["members"]) == ("waiting", 0, [])
    assert status["door"]["enrolled_total"] == 1
    assert {"stages", "relayed", "links", "steps_per_s", "uptime_s"} <= set(status)


def test_commands_from_the_dashboard_are_the_operators_and_are_journalled(tmp_path: Path) -> None:
    dashboard = RecordingDashboard(
        RemoveWorker(ANNA, True, "why"),
        RemoveWorker(ANNA, False, ""),
        RemoveWorker(OPERATOR, True, ""),
        Unban(ANNA),
    )
    path = tmp_path / "journal.sqlite"
    coordinator(dashboard, JournalStore.open(path)).run(Iterations(2))
    banned, again, ours, pardoned = dashboard.replies()
    assert isinstance(banned, OperatorReply) and "is banned" in banned.text
    assert isinstance(again, OperatorReply) and "already banned" in again.text
    assert isinstance(ours, Refused) and ours.code == "ours"
    assert isinstance(pardoned, OperatorReply)
    again_open = JournalStore.open(path)
    kinds = [entry.kind for entry in again_open.entries()]
    again_open.close()
    assert kinds[-2:] == ["expelled", "pardoned"]


def test_a_command_that_finds_the_disk_full_is_refused() -> None:
    store = JournalStore.open(":memory:")
    dashboard = RecordingDashboard(RemoveWorker(ANNA, True, "why"))
    daemon = coordinator(dashboard, store)
    real = store.append_all

    def full(entries: Any) -> None:
        if any(kind == "expelled" for kind, _ in entries):
            raise JournalFull("no room")
        real(entries)

    store.append_all = full  # type: ignore[method-assign]
    daemon.run(Iterations(2))
    (reply,) = dashboard.replies()
    assert isinstance(reply, Refused) and reply.code == "no-room"


def test_a_cancelled_command_is_not_carried_out() -> None:
    dashboard = RecordingDashboard(RemoveWorker(ANNA, True, "why"))
    dashboard.orders[0][1].cancel()
    store = JournalStore.open(":memory:")
    coordinator(dashboard, store).run(Iterations(2))
    assert dashboard.orders[0][1].cancelled()


# -- whether a dashboard is served ---------------------------------------------------------------


def test_two_coordinators_that_start_at_once_choose_different_ports() -> None:
    with bind(DashboardAddress(port=0)) as first:
        port = first.getsockname()[1]
        with bind(DashboardAddress(port=port)) as second:
            assert second.getsockname()[1] > port


def test_a_missing_extra_is_an_error_only_if_a_dashboard_was_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "missing_packages", lambda: ["starlette", "uvicorn"])
    found = startup.open_dashboard(DashboardAddress(), tmp_path, lambda *line: None)
    assert found.service is None
    (line,) = found.startup_lines(is_terminal=True)
    expected = "the dashboard needs packages that are not installed: starlette, uvicorn"
    assert f"{expected}; {install_command('coordinator')}" in line
    with pytest.raises(ConfigError, match="the dashboard needs"):
        startup.open_dashboard(parse_address("127.0.0.1:0"), tmp_path, lambda *line: None)
    assert startup.open_dashboard(None, tmp_path, lambda *line: None).startup_lines(is_terminal=True) == []


def test_the_token_is_printed_to_a_terminal_only(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="no extra `coordinator` here")
    found = startup.open_dashboard(parse_address("127.0.0.1:0"), tmp_path, lambda *line: None)
    token = (tmp_path / "dashboard.token").read_text().strip()
    assert f"/#token={token}" in found.startup_lines(is_terminal=True)[0]
    assert token not in "".join(found.startup_lines(is_terminal=False))
    found.close()
    wide = startup.open_dashboard(
        parse_address("0.0.0.0:0", open_to_network=True), tmp_path, lambda *line: None
    )
    assert "OPEN TO THE NETWORK" in wide.startup_lines(is_terminal=False)[1]
    wide.close()


def test_the_daemon_imports_no_web_server_without_a_dashboard() -> None:
    code = (
        "import sys, gridtrain_coordinator.serving\n"
        "names = ('starlette', 'uvicorn', 'prometheus_client', 'torch')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
