"""Defences of the dashboard: hosts, tokens, headers, sizes of requests, hostile workers."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashboard_demo.simulated_run import HOSTILE

from gridtrain.errors import AddressTaken, ConfigError, TransportError
from gridtrain_coordinator.dashboard import sanitize
from gridtrain_coordinator.dashboard.listen_address import TOKEN_FILE, bind, load_token, parse_address, url

guard = pytest.importorskip(
    "gridtrain_coordinator.dashboard.guard",
    reason="the extra `coordinator` is not installed",
    exc_type=ImportError,
)
Desks = Callable[..., Any]
PATHS = (
    "/", "/static/app.js", "/static/app.css", "/healthz", "/metrics", "/api/v1/run", "/api/v1/workers",
    "/api/v1/nothing", "/api/v1/door",
)  # fmt: skip


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:7780", True),
        ("localhost:7780", True),
        ("LOCALHOST", True),
        ("[::1]:7780", True),
        ("192.168.1.4:7780", True),  # an address cannot be made to point elsewhere
        ("watch.example.org", True),  # named by the owner
        ("evil.example.com", False),
        ("evil.example.com:7780", False),
        ("localhost.evil.example.com", False),
        ("127.0.0.1.evil.example.com", False),
        ("evil.example.com#localhost", False),
        ("", False),
    ],
)
def test_dns_rebinding_is_refused(desk: Desks, host: str, allowed: bool) -> None:
    assert guard.is_host_allowed(host, {"watch.example.org"}) is allowed
    here = desk(named=("Watch.example.org",))
    for path in ("/", "/api/v1/run", "/metrics", "/healthz"):
        assert here.client.get(path, headers={"host": host}).status_code == (200 if allowed else 421), path


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_carries_the_headers(desk: Desks, path: str) -> None:
    answer = desk().client.get(path)
    policy = dict(
        part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer " + "x" * 43},
        {"authorization": "Bearer " + "t" * 42},
        {"authorization": "Basic " + "t" * 43},
        {"authorization": "Bearer \xff\xfe".encode("latin-1")},
        {"cookie": "token=" + "t" * 43},
        {"x-auth-token": ""},
        {"x-auth-token": "t" * 42},
    ],
)
def test_a_command_without_the_token_is_refused(desk: Desks, headers: Any) -> None:
    here = desk()
    where = f"/api/v1/workers/{here.board.workers()[0]['peer']}"
    for verb in ("kick", "ban", "unban"):
        answer = here.client.post(f"{where}/{verb}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "token")
    assert here.client.get("/api/v1/door", headers=headers).status_code == 401
    assert here.client.get(f"{where}/kick", headers=here.owner).status_code == 405  # a link changes nothing
    assert here.orders == []


def test_a_proxy_may_use_the_authorization_header_itself(desk: Desks) -> None:
    here = desk()
    headers = {"authorization": "Basic YTpi", "x-auth-token": "t" * 43}
    assert here.client.get("/api/v1/door", headers=headers).status_code == 200
    where = f"/api/v1/workers/{here.board.workers()[0]['peer']}/kick"
    assert here.client.post(where, headers=headers).status_code == 200 and here.orders


@pytest.mark.parametrize("body", [b"x" * 5000, b"[1]", b"{", b'{"reason": 5}', b"[" * 4000, b'"\xff"'])
def test_bodies_are_bounded_and_checked(desk: Desks, body: bytes) -> None:
    here = desk()
    where = f"/api/v1/workers/{here.board.workers()[0]['peer']}/kick"
    answer = here.client.post(where, headers=here.owner, content=body)
    assert answer.status_code == (413 if len(body) > 4096 else 400)
    assert here.orders == []


def test_a_body_of_unknown_length_is_refused(desk: Desks) -> None:
    here = desk()
    where = f"/api/v1/workers/{here.board.workers()[0]['peer']}/kick"
    answer = here.client.post(where, headers=here.owner, content=iter([b"{}"]))
    assert answer.status_code == 413 and "its length is unknown" in answer.json()["reason"]


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/uplot.LICENSE", "/app.py"]
)
def test_only_files_of_the_page_are_served(desk: Desks, path: str) -> None:
    assert desk().client.get(path).status_code == 404


def test_the_page_has_no_inline_code_and_loads_nothing_from_other_hosts(desk: Desks) -> None:
    here = desk()
    page = here.client.get("/").text
    assert "<style" not in page and "style=" not in page and "onclick" not in page and "http" not in page
    scripts = [name for name in ("app", "format", "plots", "table", "topology", "timeline", "details")]
    for name in scripts:
        text = here.client.get(f"/static/{name}.js").text
        for dangerous in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert dangerous not in text, f"{name}.js: {dangerous}"


def test_the_page_is_below_300_kB(desk: Desks) -> None:
    here = desk()
    page = here.client.get("/")
    parts = [part for part in page.text.replace("'", '"').split('"') if part.startswith("static/")]
    names = {
        *parts,
        *(f"static/{name}.js" for name in ("format", "plots", "table", "topology", "timeline", "details")),
    }
    sizes = {name: len(here.client.get(f"/{name}").content) for name in names}
    assert sum(sizes.values()) + len(page.content) < 300_000, sizes


# -- hostile workers -----------------------------------------------------------------------------


def test_bidirectional_controls_are_removed_from_names(desk: Desks) -> None:
    here = desk(4, 3)
    assert HOSTILE.startswith("<img") and "\u202e" in HOSTILE
    served = json.dumps(here.board.full_state(), ensure_ascii=False) + here.client.get("/metrics").text
    assert "\u202e" not in served
    assert "<img src=x onerror=alert(1)>\ufffdgnp.exe" in [row["name"] for row in here.board.workers()]


@pytest.mark.parametrize(
    "hostile", ["a" * 10_000, "a\x00b\x1b[31m", "\u202e\u2066\u200f", "\ud800", "a\nb\u2028c", ""]
)
def test_texts_are_bounded_and_printable(hostile: str) -> None:
    shown = sanitize.text(hostile)
    assert len(shown) <= sanitize.MAX_CHARACTERS and (shown.isprintable() or not hostile)
    shown.encode("utf-8")


def test_values_that_are_not_finite_numbers_become_none() -> None:
    assert [sanitize.number(x) for x in (1, 0.5, True, "1", float("nan"), float("inf"), None, [1])] == [
        1, 0.5, None, None, None, None, None, None,
    ]  # fmt: skip


def test_deep_and_wide_values_are_truncated() -> None:
    deep: Any = "end"
    for _ in range(500):
        deep = {"in": deep}
    assert len(json.dumps(sanitize.tree(deep))) < 1000
    assert len(sanitize.tree({str(n): n for n in range(10_000)})) == sanitize.MAX_ITEMS


# -- listen address and token --------------------------------------------------------------------


def test_a_full_disk_leaves_no_token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, *args: Any, **options: Any) -> Any:
        os.close(handle)
        return open("/dev/full", "wb")

    with (
        monkeypatch.context() as patched,
        pytest.raises(ConfigError, match="No space left on device") as error,
    ):
        patched.setattr(os, "fdopen", full)
        load_token(tmp_path)
    assert error.value.remedy == "free disk space" and not (tmp_path / TOKEN_FILE).exists()
    assert load_token(tmp_path)


def test_the_token_is_private_and_persistent(tmp_path: Path) -> None:
    token = load_token(tmp_path)
    assert len(token) >= 40 and load_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    (tmp_path / TOKEN_FILE).chmod(0o640)
    with pytest.raises(ConfigError, match="read by others"):
        load_token(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o600)
    (tmp_path / TOKEN_FILE).write_text("short\n")
    with pytest.raises(ConfigError, match="does not contain a valid token"):
        load_token(tmp_path)


@pytest.mark.parametrize(
    "text", ["0.0.0.0:7780", "0.0.0.0", "192.168.1.4:80", "[::]:7780", "watch.example.org:80"]
)
def test_an_address_open_to_the_network_needs_a_second_option(text: str) -> None:
    with pytest.raises(ConfigError, match="other machines could open") as refused:
        parse_address(text)
    assert "--dashboard-open" in str(refused.value)
    assert parse_address(text, open_to_network=True).is_required


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "127.0.0.1", 7780),
        (":0", "127.0.0.1", 0),
        ("7781", "127.0.0.1", 7781),
        ("127.0.0.1", "127.0.0.1", 7780),
        ("localhost:99", "localhost", 99),
        ("[::1]:99", "::1", 99),
    ],
)
def test_listen_addresses_are_parsed(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port, address.is_required) == (host, port, bool(text))


@pytest.mark.parametrize("text", ["127.0.0.1:70000", "70000", "a b", "http://127.0.0.1:80/", "127.0.0.1:"])
def test_an_invalid_listen_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text)


def test_the_next_free_port_is_used_unless_a_port_was_requested() -> None:
    with bind(parse_address("127.0.0.1:0")) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=rf"port {port}: the port is taken -> choose a free port"):
            bind(parse_address(f"127.0.0.1:{port}"))
        by_default = parse_address("").__class__("127.0.0.1", port)
        with bind(by_default) as other:
            assert port < other.getsockname()[1] < port + 20
            assert url(other) == f"http://127.0.0.1:{other.getsockname()[1]}/"


@pytest.mark.parametrize(
    ("host", "why"),
    [("192.0.2.1", "no interface of this machine has that address"), ("no..name", "cannot be resolved")],
)
def test_an_address_of_no_interface_is_not_an_invalid_option(host: str, why: str) -> None:
    """The interface may come up later, so the exit code is not 2, with which systemd does not restart."""
    with pytest.raises(TransportError, match=why) as caught:
        bind(parse_address(f"{host}:0", open_to_network=True))
    assert caught.value.exit_code == 1 and "Errno" not in str(caught.value)
    assert "choose an address of this machine with --dashboard" in caught.value.remedy
