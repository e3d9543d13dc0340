"""A real coordinator over loopback, in a thread of the test process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from gridtrain.transport.zeromq import ZeroMQTransport
from gridtrain_coordinator.daemon import Coordinator
from gridtrain_coordinator.store import Store


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """Its address; it serves the run "default"."""
    transport = ZeroMQTransport(os.urandom(32), "test")
    address = transport.listen("tcp://127.0.0.1:0")
    daemon = Coordinator.of_run(transport, Store.open(":memory:"), address=address)
    stop = threading.Event()
    thread = threading.Thread(target=daemon.run, args=(stop,))
    thread.start()
    yield address
    stop.set()
    thread.join(10)
    assert not thread.is_alive(), "the daemon notices a stop"
