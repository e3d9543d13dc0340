"""The dashboard's thread over real sockets: it never blocks the daemon, and its clients are bounded."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from dashboard_demo.chromium import until
from dashboard_demo.simulated_run import Run
from gridtrain.core.messages import OperatorReply, RemoveWorker
from gridtrain_coordinator.dashboard import connection_timeouts
from gridtrain_coordinator.dashboard.listen_address import DashboardAddress, bind

service = pytest.importorskip(
    "gridtrain_coordinator.dashboard.dashboard_service",
    reason="no extra `coordinator` here",
    exc_type=ImportError,
)
TOKEN = "t" * 43
WITHIN_S = 60.0


class Running:
    """A running service, and its log."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, str, Mapping[str, Any]]] = []
        bound = bind(DashboardAddress(port=0))
        self.port = bound.getsockname()[1]
        self.service = service.DashboardService(bound, TOKEN, lambda *line: self.logged.append(line))
        self.service.start()

    def get(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            connection.request(method, path, None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def shown(self, pictures: int = 3, workers: int = 4) -> list[dict[str, Any]]:
        told = [picture for _, picture, _ in islice(Run(workers).statuses(pictures), pictures)]
        for picture in told:
            self.service.publish(picture)
        until(lambda: self.get("/api/v1/run")[0] == 200, "the first picture", WITHIN_S)
        return told


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.service.close()
    assert not [t for t in threading.enumerate() if t.name == "gridtrain-dashboard"]


class Stream:
    """An open page: its events, one by one."""

    def __init__(self, port: int, read: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S)
        self.socket.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        self._file = self.socket.makefile("rb")
        self.status = int(self._file.readline().split()[1]) if read else 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        event = ""
        for line in self._file:
            if line.startswith(b"event: "):
                event = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield event, json.loads(line[6:])

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def test_a_page_hears_everything_once_and_then_what_changes(running: Running) -> None:
    pictures = list(islice(Run(4).statuses(9), 9))
    running.service.publish(pictures[0][1])
    page = Stream(running.port)
    events = iter(page)
    name, whole = next(events)
    assert (name, len(whole["rows"])) == ("whole", 4)
    running.service.note("warning", "lost", {"name": "anna", "reason": "silent"})
    running.service.publish(pictures[5][1])
    for name, tick in events:
        assert name == "tick"
        if tick.get("run", {}).get("step") == pictures[5][1]["step"]:
            break
    assert tick["events"][-1]["event"] == "lost" and len(tick["points"]) == 1
    page.close()


def test_so_many_pages_and_no_more(running: Running) -> None:
    running.shown()
    from gridtrain_coordinator.dashboard.event_stream import MAX_PAGES

    pages = [Stream(running.port) for _ in range(MAX_PAGES)]
    assert [page.status for page in pages] == [200] * MAX_PAGES
    for page in pages:
        next(iter(page))
    refused = Stream(running.port)
    assert refused.status == 503
    for page in (*pages[:5], refused):
        page.close()

    def one_more() -> bool:
        page = Stream(running.port)
        page.close()
        return page.status == 200

    until(one_more, "a page that was closed makes room", WITHIN_S)
    assert running.get("/healthz")[0] == 200
    for page in pages[5:]:
        page.close()


def test_a_page_that_does_not_read_holds_nobody_up(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gridtrain_coordinator.dashboard.event_stream.SEND_TIMEOUT_S", 0.5)
    _, picture, _ = next(Run(300).statuses(1))
    running.service.publish(picture)
    until(lambda: running.get("/api/v1/run")[0] == 200, "the first picture", WITHIN_S)
    stuck = Stream(running.port, read=False)
    stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader = Stream(running.port)
    events = iter(reader)
    next(events)
    stream = running.service._stream
    until(lambda: stream.page_count == 2, "both pages", WITHIN_S)
    pictures = Run(300).statuses(10_000)

    def given_up() -> bool:
        running.service.publish(next(pictures)[1])
        next(events)  # the other page still receives events
        return bool(stream.page_count == 1)

    until(given_up, "the stuck page is cut off", 60.0)
    reader.close()
    stuck.close()


def test_the_daemon_never_waits(running: Running) -> None:
    """Publishing takes no longer with a loop that is blocked."""
    running.shown()
    _, picture, _ = next(Run(300).statuses(1))
    stands, go_on = threading.Event(), threading.Event()
    running.service._loop.call_soon_threadsafe(lambda: (stands.set(), go_on.wait(WITHIN_S)))
    assert stands.wait(WITHIN_S)
    for _ in range(5000):
        running.service.publish(picture)
        running.service.note("info", "joined", {"name": "x"})
        assert list(running.service.take_orders()) == []
    assert not go_on.is_set() and len(running.service._events) == service.MAX_EVENTS
    go_on.set()
    until(lambda: json.loads(running.get("/api/v1/run")[1])["world_size"] == 300, "the latest one", WITHIN_S)


def test_orders_are_fetched_by_the_daemon_and_bounded(running: Running) -> None:
    running.shown()
    peer = "ab" * 32
    answers: list[tuple[int, bytes]] = []
    owner = {"authorization": f"Bearer {TOKEN}"}
    threads = [
        threading.Thread(
            target=lambda: answers.append(running.get(f"/api/v1/workers/{peer}/kick", "POST", **owner))
        )
        for _ in range(service.MAX_ORDERS + 4)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) == 4, "those that are too many", WITHIN_S)
    assert {status for status, _ in answers} == {409} and b"commands are waiting to be handled" in answers[0][
        1
    ]
    fetched = list(running.service.take_orders())
    assert [order for order, _ in fetched] == [
        RemoveWorker(bytes.fromhex(peer), False, "")
    ] * service.MAX_ORDERS
    for _, answer in fetched:
        answer.set_result(OperatorReply("it is out"))
    for thread in threads:
        thread.join(WITHIN_S)
    assert [status for status, _ in answers].count(200) == service.MAX_ORDERS


def test_its_own_fault_is_a_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(service, "create_app", broken)
    made = Running()
    try:
        until(lambda: made.logged, "a line", WITHIN_S)
        level, event, fields = made.logged[0]
        assert (level, event, fields["reason"]) == ("error", "dashboard_failed", "ValueError: no")
        made.service.publish({})  # and the daemon goes on
    finally:
        made.service.close()


def test_it_closes_in_bounded_time_with_pages_open(running: Running) -> None:
    running.shown()
    page = Stream(running.port)
    next(iter(page))
    began_s = time.monotonic()
    running.service.close()
    assert time.monotonic() - began_s < 2 * service.END_S
    assert [name for name, _ in page][-1] == "end"
    page.close()


def test_slow_senders_of_headers_are_bounded(running: Running) -> None:
    running.shown()
    with socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_S) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with pytest.raises(OSError):
            for _ in range(200):
                slow.sendall(b"X-Long: " + b"x" * 4000 + b"\r\n")
                time.sleep(0.001)
            if slow.recv(4096).startswith(b"HTTP/1.1 4"):
                raise OSError
    assert running.get("/healthz")[0] == 200


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """More silent clients than connections, in three ways; an open page beside them is left alone."""
    monkeypatch.setattr(
        connection_timeouts, "REQUEST_S", 2.0
    )  # this process itself may have to wait for a core
    monkeypatch.setattr(connection_timeouts, "LOOK_S", 0.1)
    running = Running()
    try:
        running.shown()
        page = Stream(running.port)
        events = iter(page)
        next(events)
        silent = []
        for i in range(service.MAX_CONNECTIONS + 2):
            one = socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_S)
            with contextlib.suppress(ConnectionError):
                one.sendall((b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nG")[i % 3])
            silent.append(one)
        for one in silent:
            with contextlib.suppress(ConnectionError):  # as good an end as any
                while one.recv(65536):
                    pass
            one.close()
        assert running.get("/api/v1/run")[0] == 200, "there is room again"
        running.shown()
        assert next(events)[0] in ("tick", "whole"), "the page is still served"
        page.socket.close()
    finally:
        running.service.close()


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    taken = connection_timeouts.ConnectionTimeouts(("/lasting",))

    def one(path: str) -> Any:
        return Connection(cycle=asked(path), transport=SimpleNamespace(get_write_buffer_size=lambda: 0))

    def asked(path: str) -> SimpleNamespace:
        return SimpleNamespace(response_complete=False, scope={"path": path})

    stuck, lasting = one("/api/v1/history"), one("/lasting")
    after_s = connection_timeouts.ANSWER_S + 1
    assert (
        taken.expired([stuck, lasting], 0.0)
        == taken.expired([stuck, lasting], connection_timeouts.ANSWER_S)
        == []
    )
    assert taken.expired([stuck, lasting], after_s) == [stuck]
    stuck.cycle = asked("/")
    assert taken.expired([stuck], 2 * after_s) == [], "it is another request"


def test_a_slow_line_is_no_silent_client() -> None:
    """The answer is written; a phone takes it in small parts, and then nothing for too long."""
    taken, unsent = connection_timeouts.ConnectionTimeouts(()), [50_000]
    transport = SimpleNamespace(get_write_buffer_size=lambda: unsent[0])
    slow = Connection(cycle=SimpleNamespace(response_complete=True, scope={"path": "/"}), transport=transport)
    for now_s in range(0, 100, 20):
        assert taken.expired([slow], now_s) == []
        unsent[0] -= 5_000
    assert taken.expired([slow], 100) == taken.expired([slow], 100 + connection_timeouts.ANSWER_S) == []
    assert taken.expired([slow], 101 + connection_timeouts.ANSWER_S) == [slow]


class Connection(SimpleNamespace):
    """One connection is not another that looks the same."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_the_head_of_the_stream_ends(running: Running) -> None:
    running.shown()
    with socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_S) as asks:
        asks.sendall(b"HEAD /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: asks.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")
