"""Fetches obey a download limit and a budget, counted at a real HTTP server against a clock that is set."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_http_server import Server

from gridtrain.errors import BudgetSpent, DataError
from gridtrain.training.data.fetch_meter import MIN_PIECE_BYTES, FetchMeter
from gridtrain.training.data.shard_files import ShardCache, ShardFile

CONTENT = b"".join(b"line %06d\n" % number for number in range(9000))  # 108 kB
RATE_Bps = 50_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert 0 < duration_s <= 1.0, "a change of the limit must be noticed soon"
        self.now_s += duration_s


class Watched(FetchMeter):
    """Records (time, bytes so far)."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, clock.sleep)
        self.now, self.seen = clock, [(clock(), 0)]

    def count(self, nbytes: int) -> None:
        super().count(nbytes)
        self.seen.append((self.now(), self.fetched_bytes))


def cache_with(meter: FetchMeter, folder: Path) -> ShardCache:
    cache = ShardCache(folder / "cache", retry_after_s=())
    cache.meter = meter
    return cache


@pytest.mark.integration
def test_a_fetch_obeys_the_download_limit(server: Server, expected: ShardFile, tmp_path: Path) -> None:
    meter = Watched(Clock())
    meter.limit(RATE_Bps, math.inf)
    with cache_with(meter, tmp_path).open(f"{server.url}/plain/a.txt", expected) as file:
        assert file.read() == CONTENT
    piece_bytes = max(MIN_PIECE_BYTES, RATE_Bps * 0.1)
    for since_s, before in meter.seen:
        for until_s, after in meter.seen:
            assert after - before <= (until_s - since_s + 0.02) * RATE_Bps + 2 * piece_bytes
    took_s = meter.seen[-1][0] - meter.seen[0][0]
    assert took_s == pytest.approx(len(CONTENT) / RATE_Bps, rel=0.1), "and it uses the limit"


@pytest.mark.integration
def test_a_fetch_ends_within_the_budget_and_is_continued(
    server: Server, expected: ShardFile, tmp_path: Path
) -> None:
    meter = FetchMeter()
    meter.limit(None, 60_000)
    meter.note_exchanges(received_bytes=4_000, moved_bytes=20_000)
    cache = cache_with(meter, tmp_path)
    with pytest.raises(BudgetSpent, match="more bytes than remain in the traffic budget -> wait"):
        cache.open(f"{server.url}/plain/a.txt", expected)
    assert cache.meter.fetched_bytes == 40_000 and cache.failed_reads == 0
    meter.limit(None, math.inf)  # the next day
    with cache.open(f"{server.url}/plain/a.txt", expected) as file:
        assert file.read() == CONTENT
    assert cache.meter.fetched_bytes == len(CONTENT), "each byte once"
    assert server.stop()[-1] == ("/plain/a.txt", "bytes=40000-")


@pytest.mark.integration
def test_a_file_that_cannot_be_continued_is_not_begun_beyond_the_budget(
    server: Server, expected: ShardFile, tmp_path: Path
) -> None:
    """The server knows no ranges, so that each day would begin anew."""
    meter, url = FetchMeter(), f"{server.url}/no-ranges/a.txt"
    cache = cache_with(meter, tmp_path)
    what = r"no-ranges/a\.txt of 108 kB, whose fetch cannot be continued later, "
    meter.limit(None, math.inf)
    with pytest.raises(DataError, match="after 100 bytes"):
        cache.open(url, expected)  # the server breaks the first two connections
    meter.limit(None, 50_000, 200_000)
    with pytest.raises(BudgetSpent, match=what + "needs more than the 49.9 kB left in the traffic budget"):
        cache.open(url, expected)
    meter.limit(None, 50_000, 100_000)
    with pytest.raises(
        DataError, match=what + "is larger than the traffic budget of a day, 100 kB -> raise the"
    ):
        cache.open(url, expected)
    assert cache.meter.fetched_bytes == 100
    meter.limit(None, 110_000, 110_000)
    with cache.open(url, expected) as file:
        assert file.read() == CONTENT


def test_it_waits_for_what_the_exchanges_have_received() -> None:
    clock = Clock()
    meter = FetchMeter(clock, clock.sleep)
    meter.limit(RATE_Bps, math.inf)
    assert meter.request(1 << 20) == 5000 and clock() == 100.0
    meter.count(5000)
    meter.note_exchanges(received_bytes=45_000, moved_bytes=90_000)
    meter.request(1)
    assert clock() == pytest.approx(101.0, abs=0.03)


def test_what_arrived_long_ago_is_not_waited_for() -> None:
    clock = Clock()
    meter = FetchMeter(clock, clock.sleep)
    meter.limit(RATE_Bps, math.inf)
    meter.request(1)
    clock.now_s += 600.0
    meter.note_exchanges(int(300 * RATE_Bps), 0)  # half of what the limit allowed meanwhile
    began_s = clock.now_s
    meter.request(1)
    assert clock.now_s == began_s


def test_a_limit_that_is_lifted_ends_the_wait() -> None:
    clock = Clock()
    meter = FetchMeter(clock, clock.sleep)
    meter.limit(10.0, math.inf)
    meter.request(1)
    meter.count(10_000)  # 1,000 s

    def sleep(duration_s: float) -> None:
        clock.sleep(duration_s)
        meter.limit(None, math.inf)

    meter._sleep = sleep
    assert meter.request(77) == 77 and clock() < 102.0


def _reader(meter: FetchMeter, number: int) -> None:
    meter.is_reader(number)
    meter.count(100 + number)


@pytest.mark.integration
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_readers_in_other_processes_are_counted_and_bounded(method: str) -> None:
    meter = FetchMeter()
    meter.limit(None, 1000)
    meter.count(50)
    made = multiprocessing.get_context(method)
    readers = [made.Process(target=_reader, args=(meter, number)) for number in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60.0)
        assert reader.exitcode == 0
    assert meter.fetched_bytes == 251 and meter.request(10_000) == 749
    pickle.loads(pickle.dumps(meter)).count(7)
    assert meter.fetched_bytes == 251, "a copy shares nothing"


def test_a_thread_that_reads_the_meter_does_not_abort_a_process_that_ends() -> None:
    """The thread of the agent's link does, and it is a daemon thread."""
    program = (
        "import threading, time\n"
        "from gridtrain.training.data.fetch_meter import FetchMeter\n"
        "meter, read = FetchMeter(), threading.Event()\n"
        "def read_on():\n"
        "    while True:\n"
        "        meter.fetched_bytes\n"
        "        read.set()\n"
        "for _ in range(3):\n"
        "    threading.Thread(target=read_on, daemon=True).start()\n"
        "read.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, "")
