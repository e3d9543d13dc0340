"""The real dashboard over a simulated run, for whoever looks at it: tests, pictures, measurements.

Decides nothing.  `steps` of them are played at once, further ones when they are asked for.

    with Stage(Run(40)) as stage:  browser.page().open(stage.url);  stage.play(5)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from gridtrain.core.messages import OperatorReply, RemoveWorker, Unban
from gridtrain_coordinator.dashboard.dashboard_service import DashboardService
from gridtrain_coordinator.dashboard.listen_address import bind, load_token, parse_address, url
from gridtrain_coordinator.log import silent
from showing.simulated import Run

RecordedTick = tuple[float, Mapping[str, Any], Sequence[tuple[float, str, str, dict[str, Any]]]]


class Stage:
    """A context manager.

    Attributes:
        url: with the token.
        orders: what was ordered on the page, and answered with a plain yes.
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
        self._pictures = run.pictures(10_000_000)
        self._past = past

    def __enter__(self) -> Stage:
        self.service.start()
        self._replay([next(self._pictures) for _ in range(self._past)])
        self.play()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.close()

    def _replay(self, ticks: Sequence[RecordedTick]) -> None:
        """Add recorded statuses and events with their own times, in the dashboard's thread."""
        done: Future[None] = Future()

        def take() -> None:
            for at_s, status, events in ticks:
                for event in events:
                    self.service._board.add_event(*event)
                self.service._board.update(status, at_s)
            done.set_result(None)

        self.service._call(take)
        done.result(300.0)

    def play(self, pictures: int = 1) -> None:
        """The next seconds of the run, now; and the daemon's part, which looks for orders."""
        for _ in range(pictures):
            _, picture, events = next(self._pictures)
            for _, level, event, fields in events:
                self.service.note(level, event, fields)
            self.service.publish(picture)
            for order, answer in self.service.take_orders():
                self.orders.append(order)
                answer.set_result(OperatorReply("nobody is there who could go: this run is simulated"))
