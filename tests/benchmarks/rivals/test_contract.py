"""What a rival is asked and what it answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rivals.contract import OPS, TRAINERS, ContractError, Request, Result, combine, parse

WORDS = [
    "--rank",
    "1",
    "--world",
    "4",
    "--master",
    "10.77.0.2:29500",
    "--interface",
    "eth0",
    "--op",
    "all_gather",
    "--n",
    "25600000",
]


def result(rank: int, seconds: list[float], sent: list[int] | None = None) -> Result:
    cpu_s = [0.5] * len(seconds)
    return Result("gloo", "torch 2", "all_reduce", 100, 2, rank, seconds, cpu_s, sent or [], 400)


def test_the_command_line_is_what_the_harness_was_told() -> None:
    more = ["--density", "0.001", "--repeats", "5", "--warmup", "1", "--out", "FILE"]
    request = parse("gloo", [*WORDS, *more])
    assert request == Request(
        rank=1,
        world=4,
        master="10.77.0.2:29500",
        interface="eth0",
        op="all_gather",
        n=25_600_000,
        density=0.001,
        repeats=5,
        warmup=1,
        out=Path("FILE"),
    )
    assert (request.master_host, request.master_port, request.k) == ("10.77.0.2", 29500, 25_600)


def test_a_request_survives_its_command_line() -> None:
    request = Request(3, 8, "127.0.0.1:4000", "gtopk", 1000, Path("/a b/c"), 0.01, 2, 0, "lo")
    assert parse("mpi", request.to_arguments()) == request


def test_k_is_at_least_one() -> None:
    assert Request(0, 1, "h:1", "gtopk", 10, Path("o"), density=0.001).k == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "4"], "rank is 4; it must be at least 0 and below --world 4"),
        (["--n", "0"], "n 0, repeats 5, warmup 1: at least 1, 1 and 0 are needed"),
        (["--repeats", "0"], "repeats 0"),
        (["--density", "1.5"], "density is 1.5; it must be above 0 and at most 1"),
        (["--master", "here"], "master is 'here'; it must be HOST:PORT"),
        (["--master", "here:65535"], "with PORT + 1 a port too"),
        (["--op", "gtopk"], "invalid choice: 'gtopk'"),  # gloo has none
    ],
)
def test_a_request_without_sense_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("gloo", [*WORDS, "--out", "f", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    written = result(0, [1.0, 2.0], [10, 20])
    written.write(tmp_path / "r.json")
    assert Result.read(tmp_path / "r.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rival": "gloo"}', '{"surprise": 1}'])
def test_a_file_that_holds_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=r"r\.json holds no rival's result"):
        Result.read(path)
    with pytest.raises(ContractError, match="holds no rival's result"):
        Result.read(tmp_path / "missing.json")


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    both = combine([result(1, [1.0, 5.0], [10, 10]), result(0, [2.0, 3.0], [30, 20])])
    assert both.seconds == [2.0, 5.0]
    assert both.cpu_s == [0.5, 0.5]
    assert both.bytes_sent == [20.0, 15.0]


def test_bytes_that_one_rank_does_not_know_are_not_known() -> None:
    assert combine([result(0, [1.0], [10]), result(1, [1.0])]).bytes_sent == []


def test_results_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ContractError, match=r"ranks \[0\] of 2 gave results"):
        combine([result(0, [1.0])])
    with pytest.raises(ContractError, match=r"ranks \[0, 0\] of 2"):
        combine([result(0, [1.0]), result(0, [1.0])])
    with pytest.raises(ContractError, match="of different runs"):
        combine([result(0, [1.0]), replace(result(1, [1.0]), n=99)])
    with pytest.raises(ContractError, match="no results"):
        combine([])


def test_every_trainer_runs_in_a_rival_s_environment() -> None:
    assert set(TRAINERS.values()) <= set(OPS)
