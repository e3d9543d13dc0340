"""The barrier: no member goes on before all have arrived, and missing members are counted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gridtrain.core.planning.exchange_facts import EXCHANGE_CLASSES
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.tools.bench.bench_group import ExchangeSample
from gridtrain.tools.bench.exchange_names import parse_exchange
from gridtrain.tools.bench.process_barrier import BarrierClient, BarrierServer


def start_member(path: Path, places: list[str], answers: list[str], number: int) -> threading.Thread:
    """A member that waits at one barrier after the other."""

    def run() -> None:
        client = BarrierClient(path)
        answers.extend(client.wait_at(place, number=number) for place in places)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_all_members_go_on_together(tmp_path: Path) -> None:
    answers: list[str] = []
    with BarrierServer(tmp_path / "r", 3) as referee:
        threads = [start_member(tmp_path / "r", ["ready", "done"], answers, number) for number in range(3)]
        ready = referee.wait_for_all("ready", 10.0)
        assert answers == []  # all wait
        referee.release("go")
        done = referee.wait_for_all("done", 10.0)
        referee.release("end")
        for thread in threads:
            thread.join(10.0)
    assert [sorted(report["number"] for report in reports) for reports in (ready, done)] == [[0, 1, 2]] * 2
    assert sorted(answers) == ["end"] * 3 + ["go"] * 3


def test_a_missing_member_is_counted(tmp_path: Path) -> None:
    with BarrierServer(tmp_path / "r", 2) as referee:
        start_member(tmp_path / "r", ["ready"], [], 0)
        with pytest.raises(GridtrainError, match="only 1 of 2 members reached 'ready' within 1 s"):
            referee.wait_for_all("ready", 1.0)


def test_a_member_at_another_place_is_named(tmp_path: Path) -> None:
    with BarrierServer(tmp_path / "r", 1) as referee:
        start_member(tmp_path / "r", ["done"], [], 0)
        with pytest.raises(GridtrainError, match=r"members are at \['done'\], but must be at 'ready'"):
            referee.wait_for_all("ready", 10.0)


def test_an_error_of_the_check_ends_the_wait(tmp_path: Path) -> None:
    def check() -> None:
        raise GridtrainError("worker-2 ended")

    with (
        BarrierServer(tmp_path / "r", 2, check) as referee,
        pytest.raises(GridtrainError, match="worker-2 ended"),
    ):
        referee.wait_for_all("ready", 60.0)


def test_a_member_without_a_referee_ends(tmp_path: Path) -> None:
    referee = BarrierServer(tmp_path / "r", 1)
    client = BarrierClient(tmp_path / "r")
    with referee:
        pass  # it has ended
    assert client.wait_at("ready") == "end"


def test_a_repeat_lasts_from_the_first_start_to_the_last_end() -> None:
    done = [{"start_s": 10.0, "end_s": 11.0}, {"start_s": 10.25, "end_s": 12.0}]
    names = ("cpu_s", "sent_bytes", "workspace_s", "payloads", "payload_bytes", "prepare_s", "prepare_cpu_s")
    settled = [dict.fromkeys(names, rank) | {"aborts": rank} for rank in range(2)]

    repeat = ExchangeSample.from_reports(done, settled)

    assert repeat.seconds == 2.0
    assert repeat.cpu_s == 0.5 and repeat.payload_bytes == 1.0
    assert repeat.aborts == 1


@pytest.mark.parametrize("name", sorted(EXCHANGE_CLASSES))
def test_every_exchange_has_a_name(name: str) -> None:
    assert type(parse_exchange(name)).__name__.lower() == name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gtopk:density=much", "density=much is invalid; it must be a number"),
        ("gtopk:chunk=1.5", "chunk=1.5 is invalid; it must be an integer"),
        ("gtopk:warmup=1", "warmup=1: this option cannot be given as text"),
        ("gtopk:density", "'density' does not set an option of gtopk"),
    ],
)
def test_options_that_cannot_be_read_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_exchange(text)
