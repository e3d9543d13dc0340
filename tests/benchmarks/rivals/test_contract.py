"""The argument and the result file of a rival."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rivals.contract import OPS, TRAINERS, Request, Result, combine


def result(rank: int, seconds: list[float], sent: list[int] | None = None) -> Result:
    cpu_s = [0.5] * len(seconds)
    return Result("gloo", "torch 2", "all_reduce", 100, 2, rank, seconds, cpu_s, sent or [], 400)


def test_a_request_survives_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(
        rank=3, world=8, master="127.0.0.1:4000", op="gtopk", n=1000, density=0.01, out="/a b/c"
    )
    monkeypatch.setattr(sys, "argv", ["rival", request.to_text()])
    assert Request.from_argv() == request
    assert (request.master_host, request.master_port, request.k) == ("127.0.0.1", 4000, 10)


def test_k_is_at_least_one() -> None:
    assert Request(op="gtopk", n=10).k == 1


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    written = result(0, [1.0, 2.0], [10, 20])
    written.write(str(tmp_path / "r.json"))
    assert Result.read(str(tmp_path / "r.json")) == written
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_time_of_a_group_is_that_of_its_slowest_rank() -> None:
    both = combine([result(1, [1.0, 5.0], [10, 10]), result(0, [2.0, 3.0], [30, 20])])
    assert both.seconds == [2.0, 5.0]
    assert both.cpu_s == [0.5, 0.5]
    assert both.bytes_sent == [20.0, 15.0]


def test_bytes_that_one_rank_does_not_know_are_unknown() -> None:
    assert combine([result(0, [1.0], [10]), result(1, [1.0])]).bytes_sent == []


def test_every_trainer_runs_in_a_rival_s_environment() -> None:
    assert set(TRAINERS.values()) <= set(OPS)
