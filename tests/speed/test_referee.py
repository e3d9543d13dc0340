"""The barrier: nobody goes on before all are there, and whoever is missing is said."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.speed.group import Repeat
from gridtrain.speed.named import FAMILIES, exchange_named
from gridtrain.speed.referee import Player, Referee


def play(path: Path, places: list[str], heard: list[str], number: int) -> threading.Thread:
    """A member that goes from place to place."""

    def run() -> None:
        player = Player(path)
        heard.extend(player.at(place, number=number) for place in places)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_all_go_on_together(tmp_path: Path) -> None:
    heard: list[str] = []
    with Referee(tmp_path / "r", 3) as referee:
        threads = [play(tmp_path / "r", ["ready", "done"], heard, number) for number in range(3)]
        ready = referee.gather("ready", 10.0)
        assert heard == []  # all wait for the word
        referee.tell("go")
        done = referee.gather("done", 10.0)
        referee.tell("end")
        for thread in threads:
            thread.join(10.0)
    assert [sorted(report["number"] for report in reports) for reports in (ready, done)] == [[0, 1, 2]] * 2
    assert sorted(heard) == ["end"] * 3 + ["go"] * 3


def test_a_missing_member_is_counted(tmp_path: Path) -> None:
    with Referee(tmp_path / "r", 2) as referee:
        play(tmp_path / "r", ["ready"], [], 0)
        with pytest.raises(GridtrainError, match="1 of 2 members are at 'ready' after 1 s"):
            referee.gather("ready", 1.0)


def test_a_member_at_another_place_is_named(tmp_path: Path) -> None:
    with Referee(tmp_path / "r", 1) as referee:
        play(tmp_path / "r", ["done"], [], 0)
        with pytest.raises(GridtrainError, match=r"members are at \['done'\], expected at 'ready'"):
            referee.gather("ready", 10.0)


def test_what_the_check_finds_ends_the_wait(tmp_path: Path) -> None:
    def check() -> None:
        raise GridtrainError("worker-2 ended")

    with Referee(tmp_path / "r", 2, check) as referee, pytest.raises(GridtrainError, match="worker-2 ended"):
        referee.gather("ready", 60.0)


def test_a_member_without_a_referee_ends(tmp_path: Path) -> None:
    referee = Referee(tmp_path / "r", 1)
    player = Player(tmp_path / "r")
    with referee:
        pass  # it is gone
    assert player.at("ready") == "end"


def test_a_repeat_lasts_from_the_first_start_to_the_last_end() -> None:
    done = [{"start_s": 10.0, "end_s": 11.0}, {"start_s": 10.25, "end_s": 12.0}]
    names = ("cpu_s", "sent_bytes", "workspace_s", "payloads", "payload_bytes", "prepare_s", "prepare_cpu_s")
    settled = [dict.fromkeys(names, rank) | {"commit_s": 0.0, "aborts": rank} for rank in range(2)]

    repeat = Repeat.of(done, settled)

    assert repeat.seconds == 2.0
    assert repeat.cpu_s == [0, 1]
    assert repeat.aborts == 1


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_exchange_has_a_name(name: str) -> None:
    assert type(exchange_named(name)).__name__.lower() == name


@pytest.mark.parametrize("text", ["gtopk:density=much", "gtopk:warmup=1", "gtopk:density"])
def test_options_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        exchange_named(text)
