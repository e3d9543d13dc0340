"""The coordinator's status of a `LocalGroup`, which only the coordinator's own thread may compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from gridtrain.sdk.local_group import LocalGroup
from gridtrain_coordinator.daemon import Coordinator

_attaching = threading.Lock()


class _StatusReader:
    """A dashboard of which the coordinator's loop takes requests for the status instead of orders."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.asked: SimpleQueue[Future[dict[str, Any]]] = SimpleQueue()

    def publish(self, status: Mapping[str, Any]) -> None: ...

    def take_orders(self) -> Iterator[Any]:
        while not self.asked.empty():
            self.asked.get().set_result(self._coordinator.status())
        return iter(())


def status_of(group: LocalGroup) -> dict[str, Any]:
    """Return the phase, the members and the latest events of a group, also before and after its run."""
    coordinator, answer = group.coordinator, Future[dict[str, Any]]()
    with _attaching:
        if coordinator._dashboard is None:
            coordinator._dashboard = _StatusReader(coordinator)
    coordinator._dashboard.asked.put(answer)
    group._transport.wake()
    while group._thread.is_alive():
        try:
            return answer.result(0.05)
        except TimeoutError:
            continue
    return coordinator.status()
