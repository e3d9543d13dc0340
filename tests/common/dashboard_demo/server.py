"""The real dashboard over a simulated run.

with DemoServer(Run(40)) as demo:  browser.page().open(demo.url);  demo.advance(5)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from dashboard_demo.simulated_run import Run
from gridtrain.core.messages import OperatorReply, RemoveWorker, Unban
from gridtrain_coordinator.dashboard.dashboard_service import DashboardService
from gridtrain_coordinator.dashboard.listen_address import bind, load_token, parse_address, url
from gridtrain_coordinator.log import silent

RecordedTick = tuple[float, Mapping[str, Any], Sequence[tuple[float, str, str, dict[str, Any]]]]


class DemoServer:
    """The dashboard's service with a simulated run; a context manager.

    Args:
        past: the seconds of the run that are shown at the start.

    Attributes:
        url: the address of the page, with the token.
        orders: the operator's commands, each of which was accepted.
    """

    def __init__(self, run: Run, *, past: int = 600, listen: str = "127.0.0.1:0", token: str = "") -> None:
        with tempfile.TemporaryDirectory() as folder:
            token = token or load_token(Path(folder))
        bound = bind(parse_address(listen))
        self.address = url(bound)
        self.url = f"{self.address}#token={token}"
        self.orders: list[RemoveWorker | Unban] = []
        self.service = DashboardService(bound, token, silent)
        run.started_s = time.time() - past
        run.events = [(run.started_s, *event[1:]) for event in run.events]
        self._statuses = run.statuses(10_000_000)
        self._past = past

    def __enter__(self) -> DemoServer:
        self.service.start()
        self._replay([next(self._statuses) for _ in range(self._past)])
        self.advance()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.close()

    def _replay(self, ticks: Sequence[RecordedTick]) -> None:
        """Add recorded statuses and events with their own times, in the dashboard's thread."""
        done: Future[None] = Future()

        def replay() -> None:
            for at_s, status, events in ticks:
                for event in events:
                    self.service._board.add_event(*event)
                self.service._board.update(status, at_s)
            done.set_result(None)

        self.service._call(replay)
        done.result(300.0)

    def advance(self, seconds: int = 1) -> None:
        """Show the next seconds of the run at once and answer the operator's commands as the daemon does."""
        for _ in range(seconds):
            _, status, events = next(self._statuses)
            for _, level, event, fields in events:
                self.service.note(level, event, fields)
            self.service.publish(status)
            for order, answer in self.service.take_orders():
                self.orders.append(order)
                answer.set_result(OperatorReply("accepted; this run is simulated and has no workers"))
