"""Names that say nothing about a person, and addresses that other workers can reach."""

from __future__ import annotations

import os
import socket

import pytest

from gridtrain_worker.session import Machine, listen_address


def test_a_random_name_by_default() -> None:
    names = {Machine.here().name for _ in range(20)}
    assert len(names) > 10
    assert not any(socket.gethostname() in name for name in names)
    assert Machine.here("anna").name == "anna"


def test_only_the_cpus_that_we_may_use() -> None:
    assert 1 <= Machine.here().cpus <= (os.cpu_count() or 1)


def test_beside_its_coordinator_a_worker_listens_on_loopback() -> None:
    assert listen_address("tcp://127.0.0.1:7700") == "tcp://127.0.0.1:0"


def test_without_a_way_to_the_coordinator_it_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> object:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    assert listen_address("tcp://coordinator.invalid:7700") == "tcp://127.0.0.1:0"
