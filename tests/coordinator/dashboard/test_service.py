"""The dashboard's thread over real sockets: it does not block the daemon, and its clients are bounded."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
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
from gridtrain.event_text import event_text
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
        self.service = service.DashboardService(bound, TOKEN, lambda *record: self.logged.append(record))
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

    def publish(self, count: int = 3, workers: int = 4) -> list[dict[str, Any]]:
        published = [status for _, status, _ in islice(Run(workers).statuses(count), count)]
        for status in published:
            self.service.publish(status)
        until(lambda: self.get("/api/v1/run")[0] == 200, "the first status", WITHIN_S)
        return published


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


def test_a_page_receives_the_whole_state_once_and_then_changes(running: Running) -> None:
    statuses = list(islice(Run(4).statuses(9), 9))
    running.service.publish(statuses[0][1])
    page = Stream(running.port)
    events = iter(page)
    name, whole = next(events)
    assert (name, len(whole["rows"])) == ("whole", 4)
    running.service.note("warning", "lost", {"name": "anna", "reason": "silent"})
    running.service.publish(statuses[5][1])
    for name, tick in events:
        assert name == "tick"
        if tick.get("run", {}).get("step") == statuses[5][1]["step"]:
            break
    assert tick["events"][-1]["event"] == "lost" and len(tick["points"]) == 1
    page.close()


def test_open_pages_are_bounded(running: Running) -> None:
    running.publish()
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

    until(one_more, "a closed page makes room", WITHIN_S)
    assert running.get("/healthz")[0] == 200
    for page in pages[5:]:
        page.close()


def test_a_page_that_does_not_read_delays_nobody(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gridtrain_coordinator.dashboard.event_stream.SEND_TIMEOUT_S", 0.5)
    _, status, _ = next(Run(300).statuses(1))
    running.service.publish(status)
    until(lambda: running.get("/api/v1/run")[0] == 200, "the first status", WITHIN_S)
    stuck = Stream(running.port, read=False)
    stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader = Stream(running.port)
    events = iter(reader)
    next(events)
    stream = running.service._stream
    until(lambda: stream.page_count == 2, "both pages", WITHIN_S)
    statuses = Run(300).statuses(10_000)

    def disconnected() -> bool:
        running.service.publish(next(statuses)[1])
        next(events)  # the other page still receives events
        return bool(stream.page_count == 1)

    until(disconnected, "the stuck page is disconnected", 60.0)
    reader.close()
    stuck.close()


def test_publishing_does_not_wait_for_the_dashboard(running: Running) -> None:
    """The dashboard's loop is blocked meanwhile."""
    running.publish()
    _, status, _ = next(Run(300).statuses(1))
    blocked, go_on = threading.Event(), threading.Event()
    running.service._loop.call_soon_threadsafe(lambda: (blocked.set(), go_on.wait(WITHIN_S)))
    assert blocked.wait(WITHIN_S)
    for _ in range(5000):
        running.service.publish(status)
        running.service.note("info", "joined", {"name": "x"})
        assert list(running.service.take_orders()) == []
    assert not go_on.is_set() and len(running.service._events) == service.MAX_EVENTS
    go_on.set()
    until(
        lambda: json.loads(running.get("/api/v1/run")[1])["world_size"] == 300, "the latest status", WITHIN_S
    )


def test_commands_are_fetched_by_the_daemon_and_bounded(running: Running) -> None:
    running.publish()
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
    until(lambda: len(answers) == 4, "the commands over the limit", WITHIN_S)
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


def test_a_fault_of_the_dashboard_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(service, "create_app", broken)
    made = Running()
    try:
        until(lambda: made.logged, "a log record", WITHIN_S)
        level, event, fields = made.logged[0]
        assert (level, event, fields["reason"]) == ("error", "dashboard_failed", "ValueError: no")
        made.service.publish({})  # the daemon continues
    finally:
        made.service.close()


class OutOfFiles(socket.socket):
    """A listening socket that cannot accept at first, as at the limit of open files."""

    left = 100

    def accept(self) -> tuple[socket.socket, Any]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_the_limit_of_open_files_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listening = bind(DashboardAddress(port=0))
    monkeypatch.setitem(globals(), "bind", lambda address: OutOfFiles(fileno=listening.detach()))
    made = Running()
    assert made.get("/healthz")[0] in (200, 503)
    made.service.close()
    (reason,) = [fields["reason"] for _, _, fields in made.logged]
    text = event_text({"event": "dashboard_failed", "reason": reason})
    assert text.startswith("an error in the dashboard: "), "it answers again"
    assert reason.startswith("socket.accept() out of system resource OSError(24")
    assert not caplog.messages


def test_an_error_that_repeats_hides_no_other_and_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, logged = 0.0, list[Mapping[str, Any]]()
    monkeypatch.setattr(service.time, "monotonic", lambda: now_s)
    errors = service._ErrorHandler(lambda level, event, fields: logged.append(fields))

    def fail(*reasons: str) -> list[Mapping[str, Any]]:
        logged.clear()
        for reason in reasons:
            errors.emit(logging.LogRecord("asyncio", logging.ERROR, "", 0, reason, (), None))
        return [*logged]

    assert fail(*64 * ["no file"], "no page") == [{"reason": "no file"}, {"reason": "no page"}]
    now_s = service.LOG_EVERY_S
    assert fail("no file", "no file") == [{"reason": "no file", "times_before": 64}]
    now_s *= 3
    assert fail("no page") == [{"reason": "no page"}]
    assert len(fail(*map(str, range(1000)))) == service.MAX_LOGGED_ERRORS - 1


def test_it_closes_in_bounded_time_with_pages_open(running: Running) -> None:
    running.publish()
    page = Stream(running.port)
    next(iter(page))
    began_s = time.monotonic()
    running.service.close()
    assert time.monotonic() - began_s < 2 * service.END_S
    assert [name for name, _ in page][-1] == "end"
    page.close()


def test_slow_senders_of_headers_are_bounded(running: Running) -> None:
    running.publish()
    with socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_S) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with pytest.raises(OSError):
            for _ in range(200):
                slow.sendall(b"X-Long: " + b"x" * 4000 + b"\r\n")
                time.sleep(0.001)
            if slow.recv(4096).startswith(b"HTTP/1.1 4"):
                raise OSError
    assert running.get("/healthz")[0] == 200


def test_silent_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """More silent clients than connections, in three ways; an open page beside them is left alone."""
    monkeypatch.setattr(
        connection_timeouts, "REQUEST_S", 2.0
    )  # this process itself may have to wait for a core
    monkeypatch.setattr(connection_timeouts, "LOOK_S", 0.1)
    running = Running()
    try:
        running.publish()
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
            with contextlib.suppress(ConnectionError):  # a reset is an end too
                while one.recv(65536):
                    pass
            one.close()
        assert running.get("/api/v1/run")[0] == 200, "there is room again"
        running.publish()
        assert next(events)[0] in ("tick", "whole"), "the page is still served"
        page.socket.close()
    finally:
        running.service.close()


def test_monitoring_is_answered_while_silent_clients_hold_all_connections(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_timeouts, "REQUEST_S", 10 * WITHIN_S)
    running.publish()
    with contextlib.ExitStack() as silent:
        for _ in range(service.MAX_CONNECTIONS):
            silent.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_S))
        until(lambda: running.get("/api/v1/run")[0] == 503, "the limit", WITHIN_S)
        refusal = json.loads(running.get("/api/v1/run")[1])
        assert refusal["code"] == "busy" and "at most 128 are served" in refusal["reason"]
        assert running.get("/healthz")[0] == running.get("/metrics")[0] == 200
    until(lambda: running.get("/api/v1/run")[0] == 200, "room again", WITHIN_S)


def test_an_answer_that_is_not_read_times_out() -> None:
    timeouts = connection_timeouts.ConnectionTimeouts(("/stream",))

    def one(path: str) -> Any:
        return Connection(cycle=asked(path), transport=SimpleNamespace(get_write_buffer_size=lambda: 0))

    def asked(path: str) -> SimpleNamespace:
        return SimpleNamespace(response_complete=False, scope={"path": path})

    stuck, stream = one("/api/v1/history"), one("/stream")
    after_s = connection_timeouts.ANSWER_S + 1
    assert (
        timeouts.expired([stuck, stream], 0.0)
        == timeouts.expired([stuck, stream], connection_timeouts.ANSWER_S)
        == []
    )
    assert timeouts.expired([stuck, stream], after_s) == [stuck]
    stuck.cycle = asked("/")
    assert timeouts.expired([stuck], 2 * after_s) == [], "a new request has its own time"


def test_a_slow_link_is_no_silent_client() -> None:
    """A phone reads a written answer in small parts, and then nothing for too long."""
    timeouts, unsent = connection_timeouts.ConnectionTimeouts(()), [50_000]
    transport = SimpleNamespace(get_write_buffer_size=lambda: unsent[0])
    slow = Connection(cycle=SimpleNamespace(response_complete=True, scope={"path": "/"}), transport=transport)
    for now_s in range(0, 100, 20):
        assert timeouts.expired([slow], now_s) == []
        unsent[0] -= 5_000
    assert timeouts.expired([slow], 100) == timeouts.expired([slow], 100 + connection_timeouts.ANSWER_S) == []
    assert timeouts.expired([slow], 101 + connection_timeouts.ANSWER_S) == [slow]


class Connection(SimpleNamespace):
    """Compared by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_a_reverse_proxy_is_told_to_pass_events_on_at_once(running: Running) -> None:
    running.publish()
    page = Stream(running.port)
    assert b"x-accel-buffering: no\r\n" in list(iter(page._file.readline, b"\r\n"))
    page.close()


def test_a_head_request_for_the_stream_ends(running: Running) -> None:
    running.publish()
    with socket.create_connection(("127.0.0.1", running.port), timeout=WITHIN_S) as asks:
        asks.sendall(b"HEAD /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: asks.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")


def test_a_clock_that_is_set_back_hides_no_stuck_daemon(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.publish()
    assert running.get("/healthz")[0] == 200
    later_s, earlier_s = time.monotonic() + 60, time.time() - 3600
    clocks = SimpleNamespace(time=lambda: earlier_s, monotonic=lambda: later_s)
    monkeypatch.setattr(service, "time", clocks)
    assert running.get("/healthz")[0] == 503
