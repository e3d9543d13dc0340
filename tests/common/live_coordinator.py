"""Fixtures: a real coordinator over loopback, in a thread of the test process, and invitations to it."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gridtrain.config import Deadlines
from gridtrain.core.group.invitation import Invitation
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.stack import build_stack
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.runtime.client.endpoint_file import EndpointFile
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler, connection_gate
from gridtrain_coordinator.daemon import Coordinator, recover_membership
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.log import log_to

SOFTWARE = "gridtrain test"


@dataclass
class LiveCoordinator:
    """Serves the run "default"; creates invitations as its operator."""

    keys: Identity = field(default_factory=Identity.generate)
    operator: Identity = field(default_factory=Identity.generate)
    log: io.StringIO = field(default_factory=io.StringIO)
    min_workers: int = 1
    address: str = ""

    def __enter__(self) -> LiveCoordinator:
        authorization = Authorization(operator=self.operator.public, coordinator=self.keys.public)
        transport = build_stack(
            ZeroMQTransport(self.keys, SOFTWARE, gate=connection_gate(authorization, time.time)), self.keys
        )
        self.address = transport.listen("tcp://127.0.0.1:0")
        store, log = JournalStore.open(":memory:"), log_to(self.log)
        membership = recover_membership(
            store, self.keys.public, "default", Deadlines(), min_workers=self.min_workers, log=log
        )
        access = AccessHandler(authorization, membership)
        daemon = Coordinator(transport, store, membership, access, log=log, address=self.address)
        self.daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=daemon.run, args=(self._stop,))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the daemon ends after a stop"

    def invitation(self, uses: int = 1) -> Invitation:
        return self.operator_client().invite(uses, 600.0)

    def access(self) -> dict[str, Any]:
        """Pending members, invitations and bans, as `gridtrain members` shows them."""
        access = self.operator_client().status()["door"]
        assert isinstance(access, dict)
        return access

    def operator_client(self) -> OperatorClient:
        file = EndpointFile(self.address, self.address, self.keys.public, "default", True)
        return OperatorClient(CoordinatorEndpoint(file, self.operator))


@pytest.fixture
def coordinator() -> Iterator[LiveCoordinator]:
    with LiveCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def invitation(coordinator: LiveCoordinator) -> Invitation:
    """Valid for many workers."""
    return coordinator.invitation(uses=1000)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's worker keys: every test runs as another machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"
