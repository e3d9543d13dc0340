"""A board with the state of a simulated run, and the application over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from gridtrain.core.messages import OperatorReply, Refused, RemoveWorker, Unban

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from gridtrain_coordinator.dashboard.board import Board

TOKEN = "t" * 43


def filled(workers: int, seconds: int, shape: str = "butterfly", stages: int = 1) -> Board:
    from dashboard_demo.simulated_run import Run

    from gridtrain_coordinator.dashboard.board import Board

    board = Board()
    for at_s, status, events in Run(workers, shape, stages=stages).statuses(seconds):
        for event in events:
            board.add_event(*event)
        board.update(status, at_s)
    return board


@dataclass
class Desk:
    """The application, the commands sent through it, and the daemon's answers."""

    board: Board
    client: TestClient
    orders: list[RemoveWorker | Unban] = field(default_factory=list)
    reply: OperatorReply | Refused | None = field(default_factory=lambda: OperatorReply("it is out"))
    age_s: float | None = None  # of the latest status
    token: str = TOKEN

    @property
    def owner(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


Desks = Callable[..., Desk]


@pytest.fixture
def desk() -> Iterator[Desks]:
    """`desk(workers, seconds)`; with `reply = None` the daemon does not answer."""
    for name in ("starlette", "prometheus_client", "httpx"):
        pytest.importorskip(name, reason="the extra `coordinator` or httpx is not installed")
    from starlette.testclient import TestClient

    from gridtrain_coordinator.dashboard.dashboard_service import encoded
    from gridtrain_coordinator.dashboard.event_stream import EventStream
    from gridtrain_coordinator.dashboard.http_api import Api, create_app

    opened: list[TestClient] = []

    def make(workers: int = 4, seconds: int = 30, *, named: tuple[str, ...] = (), **run: object) -> Desk:
        board = filled(workers, seconds, **run)  # type: ignore[arg-type]
        made: Desk

        def handle(order: RemoveWorker | Unban) -> Future[OperatorReply | Refused]:
            made.orders.append(order)
            answer: Future[OperatorReply | Refused] = Future()
            if made.reply is not None:
                answer.set_result(made.reply)
            return answer

        async def stream() -> EventStream:  # an asyncio.Event belongs to a loop only when it is waited for
            return EventStream(lambda: encoded(board.full_state()))

        api = Api(board, asyncio.run(stream()), TOKEN, handle, lambda: made.age_s)
        client = TestClient(create_app(api, allowed_hosts=named), base_url="http://127.0.0.1:7780")
        made = Desk(board, client, age_s=0.0 if board.run else None)
        opened.append(client)
        return made

    yield make
    for client in opened:
        client.close()
