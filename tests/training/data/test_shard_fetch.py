"""Files of an HTTP server that disconnects, stalls, or sends false sizes or other bytes."""

from __future__ import annotations

import gzip
import pickle
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.client import IncompleteRead
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import Any
from urllib.parse import quote

import pytest
from faulty_http_server import PIECE, Server

import gridtrain
from gridtrain.errors import ConfigError, DataError
from gridtrain.training.data import shard_fetch
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.shard_fetch import RETRY_AFTER_S, FetchRetries, ServerBusy, refuse_credentials
from gridtrain.training.data.shard_files import ShardCache, ShardFile, expand, public_name
from gridtrain.training.data.shard_index import ShardIndex, build_index, read_index, write_index

pytestmark = pytest.mark.integration
CONTENT = b"".join(b"line %05d\n" % number for number in range(100))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Any) -> ShardCache:
    monkeypatch.setattr(shard_fetch, "READ_TIMEOUT_S", 0.5)
    return ShardCache(tmp_path / "cache", retry_after_s=(0.0, 0.0))


@pytest.mark.parametrize(
    ("fault", "ranges", "fetched"),
    [
        ("plain", ["-"], 1100),
        ("breaks", ["-", "bytes=100-", "bytes=200-"], 1100),
        ("no-ranges", ["-", "bytes=100-", "bytes=100-"], 1300),
        ("busy", ["-", "-"], 1100),
        ("unsized", ["-", "bytes=100-", "bytes=200-"], 1100),
        ("login", ["-", "-"], 1135),
        ("says-more", ["-"], 1100),
    ],
)
def test_a_file_of_a_faulty_server_is_fetched_completely(
    fault: str, ranges: list[str], fetched: int, server: Server, cache: ShardCache, expected: ShardFile
) -> None:
    with cache.open(f"{server.url}/{fault}/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert cache.meter.fetched_bytes == fetched and cache.failed_reads == len(ranges) - 1
    with cache.open(f"{server.url}/{fault}/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert [asked for _, asked in server.stop()] == ranges


@pytest.mark.parametrize(
    ("fault", "words", "ranges"),
    [
        ("missing", r"cannot be read after 0 bytes: HTTP 404", ["-"]),
        ("other", r"has changed: its SHA-256 is [0-9a-f]{12}, but [0-9a-f]{12} in the index", ["-"]),
        ("says-less", r"is truncated: it is 550 bytes long, but 1100", ["-", "-"]),
        ("chunked", r"is truncated: it is 550 bytes long, but 1100", ["-", "-"]),
        ("breaks-short", r"is truncated: it is 550 bytes long, but 1100", ["-", "bytes=100-", "-"]),
        ("unsized-short", r"EOFError: a response without a length ended after 550 of 1100 bytes; less",
         ["-", "bytes=550-", "bytes=550-"]),
        ("endless", r"has changed: it is now larger than 1100 bytes", ["-"]),
        ("deaf", r"cannot be read after 100 bytes: ConnectionError: the connection ended after 100 of 1100",
         ["-", "bytes=100-", "bytes=100-"]),
        ("wrong-range", r"but the server sends 'bytes 101-1099/1100'", ["-", "bytes=100-", "bytes=100-"]),
        ("stalls", r"cannot be read after 300 bytes: TimeoutError", ["-", "bytes=100-", "bytes=200-"]),
        ("trickles", r"TimeoutError: only \d+ bytes arrived in", []),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_fetched_is_refused_and_counted(
    fault: str, words: str, ranges: list[str], server: Server, cache: ShardCache, expected: ShardFile
) -> None:
    name = "b.txt" if fault == "missing" else "a.txt"
    with pytest.raises(DataError, match=re.escape(f"{fault}/{name} ")) as caught:
        cache.open(f"{server.url}/{fault}/{name}", expected)
    assert re.search(words, caught.value.reason) and caught.value.remedy
    assert ("another attempt would also fail" in caught.value.remedy) == (fault == "missing")
    asked = [asked for _, asked in server.stop()]
    assert cache.failed_reads == len(asked) and asked == (ranges or asked)
    assert not (cache.folder / expected.sha256).exists()
    part = cache.folder / f"{expected.sha256}.part"
    assert not part.exists() or CONTENT.startswith(part.read_bytes())


def test_an_attempt_with_enough_progress_does_not_count(
    server: Server, cache: ShardCache, expected: ShardFile, monkeypatch: Any
) -> None:
    monkeypatch.setattr(shard_fetch, "CHUNK_BYTES", PIECE)
    with cache.open(f"{server.url}/often/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert cache.failed_reads == 10 and cache.meter.fetched_bytes == 1100


def test_a_later_start_continues(server: Server, cache: ShardCache, expected: ShardFile) -> None:
    with pytest.raises(DataError):
        cache.open(f"{server.url}/stalls/a.txt", expected)
    with ShardCache(cache.folder).open(f"{server.url}/plain/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert server.stop()[-1] == ("/plain/a.txt", "bytes=300-")


def test_a_redirection_keeps_the_range(server: Server, cache: ShardCache, expected: ShardFile) -> None:
    cache.folder.mkdir()
    (cache.folder / f"{expected.sha256}.part").write_bytes(CONTENT[:500])
    with cache.open(f"{server.url}/moved/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert server.stop() == [("/moved/a.txt", "bytes=500-"), ("/plain/a.txt", "bytes=500-")]


def test_a_loop_of_redirections_is_named_at_once(
    server: Server, cache: ShardCache, expected: ShardFile
) -> None:
    with pytest.raises(DataError, match=r"^\S+ cannot be read after 0 bytes: HTTP 302 .* loop\. -> .+$"):
        cache.open(f"{server.url}/loop/a.txt", expected)
    assert cache.failed_reads == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://localhost:PORT/plain/a.txt", "localhost, which has no public address; only 127.0.0.1"),
        ("http://[::1]:PORT/plain/a.txt", "::1, which has no public address;"),
        ("http://169.254.169.254/latest", "169.254.169.254, which has no public address;"),
        (f"http://{64 * 'a'}.invalid/", f"{64 * 'a'}.invalid, which has no public address;"),
        ("http://a..invalid/", "a..invalid, which has no public address;"),
        ("ftp://127.0.0.1:PORT/a.txt", "ftp://127.0.0.1:PORT/a.txt, which is not an http"),
        ("file:///a.txt", "HTTP 302"),  # refused by urllib itself
    ],
)
def test_a_redirection_into_a_private_network_is_refused(
    target: str, words: str, server: Server, cache: ShardCache, expected: ShardFile
) -> None:
    port = server.url.rpartition(":")[2]
    path = f"/moved-to/{quote(target.replace('PORT', port), safe='')}"
    with pytest.raises(DataError, match="cannot be read after 0 bytes: HTTP 302 ") as caught:
        cache.open(f"{server.url}{path}", expected)
    assert words.replace("PORT", port) in caught.value.reason
    assert server.stop() == [(path, "-")] and cache.failed_reads == 1


def test_a_redirection_to_the_same_host_or_a_public_one_is_followed(
    server: Server, cache: ShardCache, expected: ShardFile, monkeypatch: Any
) -> None:
    own = quote(f"{server.url}/plain/a.txt", safe="")
    with cache.open(f"{server.url}/moved-to/{own}", expected) as file:
        assert file.read() == CONTENT
    other = quote(f"{server.url}/plain/a.txt".replace("127.0.0.1", "localhost"), safe="")
    monkeypatch.setattr(shard_fetch, "_is_public", lambda host: host == "localhost")
    (cache.folder / expected.sha256).unlink()
    with cache.open(f"{server.url}/moved-to/{other}", expected) as file:
        assert file.read() == CONTENT


def test_a_public_host_has_no_private_address(monkeypatch: Any) -> None:
    found = {"one": ["8.8.8.8", "2001:4860:4860::8888"], "mixed": ["8.8.8.8", "10.0.0.1"], "none": None}

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        if (addresses := found[host]) is None:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [shard_fetch._is_public(host) for host in found] == [True, False, True]


def test_a_servers_text_is_printable_and_short(
    server: Server, cache: ShardCache, expected: ShardFile
) -> None:
    with pytest.raises(DataError, match=r"HTTP 410 \N{REPLACEMENT CHARACTER}\[2J-{196} -> ") as caught:
        cache.open(f"{server.url}/unprintable/a.txt", expected)
    assert str(caught.value).isprintable()
    error = shard_fetch.describe(ValueError("of a library:\x1b[31m\nred"))
    assert error == "ValueError: of a library:\N{REPLACEMENT CHARACTER}[31m red"


def test_a_busy_server_is_asked_again_when_it_says(
    server: Server, expected: ShardFile, tmp_path: Path, caplog: Any
) -> None:
    slept: list[float] = []
    cache = ShardCache(tmp_path / "cache")
    cache.meter = FetchMeter(lambda: sum(slept), slept.append)
    with cache.open(f"{server.url}/busy/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert max(slept) <= 1.0, "a pause must be noticed soon"
    assert sum(slept) == 1 + 5 + 25, "the first of these times after 7 s"
    (line,) = caplog.messages
    what = r"a\.txt cannot be read after 0 bytes: HTTP 503 .*; retrying until about \d\d:\d\d:\d\d"
    assert re.search(what, line)


@pytest.mark.parametrize(
    ("error", "waits_s"),
    [
        (ConnectionRefusedError("refused"), [1, 5, 25, *[60] * 9]),
        (IncompleteRead(b""), [1, 5, 25, *[60] * 9]),
        (ServerBusy("HTTP 429", 0.0), [1, 5, 25, *[60] * 9]),
        (ServerBusy("HTTP 503", 60.0), [91, *[60] * 8]),
        (ServerBusy("HTTP 503", 1e6), [571]),
        (KeyError("of a library"), [1, 5, 25]),
        (EOFError("ended"), [1, 5, 25]),
        (SSLCertVerificationError("expired"), []),
    ],
)
def test_an_outage_of_ten_minutes_is_endured(error: Exception, waits_s: list[int]) -> None:
    retries, found = FetchRetries("https://host/a.txt", RETRY_AFTER_S), []
    count = f"in {len(waits_s) + 1} attempts" if waits_s else "another attempt would also fail"
    with pytest.raises(DataError, match=count):
        while len(found) < 100:
            found.append(retries.wait_after(error, 0))
    assert found == waits_s


def test_the_time_at_which_to_ask_again_may_be_a_date() -> None:
    later = datetime.now(UTC) + timedelta(seconds=90)
    assert 60 < shard_fetch._parse_retry_after(format_datetime(later, usegmt=True)) < 91
    assert [shard_fetch._parse_retry_after(text) for text in ("", "soon", "-3", "12")] == [0, 0, 0, 12]


def test_a_compressed_file_at_a_signed_url_is_decompressed(
    server: Server, cache: ShardCache, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(CONTENT))
    index = build_index([f"{server.url}/signed/a.txt.gz?name=b.jsonl#part"], cache=cache)
    assert index.format == "text" and index.samples == 100
    assert "fetched a.txt.gz: " in capsys.readouterr().err


def test_a_url_with_a_password_is_refused_without_showing_it(tmp_path: Path, cache: ShardCache) -> None:
    url, words = "http://me:secret@host.invalid:1/a.txt", r"^a URL at host\.invalid:1 contains a user name"
    (tmp_path / "a.txt").write_bytes(CONTENT)
    index = build_index([str(tmp_path / "a.txt")], cache=cache)
    attempts: list[Callable[[], object]] = [
        lambda: read_index(url),
        lambda: cache.open(url, index.shards[0]),
        lambda: build_index([url], cache=cache),
        lambda: build_index([url.replace("a.txt", "*.txt")], cache=cache),
        lambda: write_index(index, tmp_path / "index.json", url),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match=words) as caught:
            attempt()
        assert "secret" not in str(caught.value) and "use a signed URL" in caught.value.remedy


@pytest.mark.parametrize(
    "url",
    [
        "HTTPS://me:secret@host.invalid/a.txt",
        "simplecache::https://me:secret@host.invalid/a.txt",
        "zip://a.txt::filecache::http://me:secret@host.invalid/a.zip",
    ],
)
def test_a_password_is_found_in_every_form_of_an_http_url(url: str) -> None:
    for attempt in (expand, read_index):
        with pytest.raises(ConfigError, match=r"^a URL at host\.invalid contains a user name or a password"):
            attempt(url)


def test_an_invalid_url_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^the host in the URL '\[x/a\.txt' is invalid -> correct the URL$"
    ):
        expand("http://me:secret@[x/a.txt?sig=secret")
    for name in ("//[data/x.txt", "http://[::1]/x.txt"):
        refuse_credentials(name)
    path = tmp_path / "[data"
    path.mkdir()
    (path / "x.txt").write_bytes(CONTENT)
    assert expand(f"/{path}/x.txt") == [f"/{path}/x.txt"]


def test_other_members_learn_which_file_cannot_be_read(
    server: Server, cache: ShardCache, expected: ShardFile, tmp_path: Path
) -> None:
    places = [
        (f"{server.url}/plain/b.txt?sig=secret", f"{server.url}/plain/b.txt"),
        ("ftp://me:secret@host/b.txt", "ftp://host/b.txt"),
        ("HTTPS://host/b.txt?sig=secret", "HTTPS://host/b.txt"),
        ("abfs://part@host/b.txt?sig=secret", "abfs://host/b.txt"),
        ("s3://bucket/b#1.txt", "s3://bucket/b#1.txt"),
        ("simplecache::https://me:secret@host/b.txt?sig=secret#x", "simplecache::https://host/b.txt"),
        ("zip://b.txt::https://me:secret@host/a.zip#secret", "zip://b.txt::https://host/a.zip"),
        ("sub/b.txt", "sub/b.txt"),
        (str(tmp_path / "b.txt"), "b.txt"),
    ]
    assert [public_name(place) for place, _ in places] == [name for _, name in places]
    index = ShardIndex("text", (replace(expected, url=f"{server.url}/plain/b.txt?sig=secret"),))
    write_index(index, tmp_path / "index.json")
    data = gridtrain.Shards(tmp_path / "index.json", cache=cache.folder)
    with pytest.raises(DataError) as caught:
        data[0]
    assert pickle.loads(pickle.dumps(caught.value)).summary == f"{server.url}/plain/b.txt: HTTP 404"


def test_an_index_of_urls_is_made(server: Server, cache: ShardCache) -> None:
    index = build_index([f"{server.url}/breaks/a.txt"], cache=cache)
    assert index.samples == 100 and index.bytes == len(CONTENT)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown(
    is_terminal: bool, server: Server, cache: ShardCache, expected: ShardFile, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("GRIDTRAIN_PROGRESS", "terminal" if is_terminal else "")
    monkeypatch.setattr(shard_fetch, "LINES_EVERY_S", 0.0)
    cache.open(f"{server.url}/plain/a.txt", expected).close()
    shown = capsys.readouterr().err
    assert re.search(r"fetched a.txt: 1.1 kB of 1.1 kB in \d+\.\d s\n$", shown)
    bar = "\r\x1b[Kfetching a.txt: [####################] 1.1 kB of 1.1 kB\r\x1b[K"
    assert (bar in shown) == ("\r" in shown) == is_terminal and "fetching a.txt: " in shown
