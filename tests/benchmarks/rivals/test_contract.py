"""The command line and the result file of a rival."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rivals.contract import OPS, TRAINERS, ContractError, Request, Result, combine, parse

ARGUMENTS = [
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


def test_the_command_line_is_parsed() -> None:
    more = ["--density", "0.001", "--repeats", "5", "--warmup", "1", "--out", "FILE"]
    request = parse("gloo", [*ARGUMENTS, *more])
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
    ("arguments", "message"),
    [
        (["--rank", "4"], "rank is 4; it must be at least 0 and below --world 4"),
        (["--n", "0"], "n is 0, repeats 5, warmup 1; they must be at least 1, 1 and 0"),
        (["--repeats", "0"], "repeats 0"),
        (["--density", "1.5"], "density is 1.5; it must be above 0 and at most 1"),
        (["--master", "here"], "master is 'here'; it must be HOST:PORT"),
        (["--master", "here:65535"], "PORT + 1 must be a port"),
        (["--op", "gtopk"], "invalid choice: 'gtopk'"),  # gloo has none
    ],
)
def test_an_invalid_request_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("gloo", [*ARGUMENTS, "--out", "f", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    written = result(0, [1.0, 2.0], [10, 20])
    written.write(tmp_path / "r.json")
    assert Result.read(tmp_path / "r.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rival": "gloo"}', '{"surprise": 1}'])
def test_a_file_without_a_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=r"r\.json has no result of a rival"):
        Result.read(path)
    with pytest.raises(ContractError, match="has no result of a rival"):
        Result.read(tmp_path / "missing.json")


def test_the_time_of_a_group_is_that_of_its_slowest_rank() -> None:
    both = combine([result(1, [1.0, 5.0], [10, 10]), result(0, [2.0, 3.0], [30, 20])])
    assert both.seconds == [2.0, 5.0]
    assert both.cpu_s == [0.5, 0.5]
    assert both.bytes_sent == [20.0, 15.0]


def test_bytes_that_one_rank_does_not_know_are_unknown() -> None:
    assert combine([result(0, [1.0], [10]), result(1, [1.0])]).bytes_sent == []


def test_results_of_different_groups_are_refused() -> None:
    with pytest.raises(ContractError, match=r"ranks \[0\] of 2 have results"):
        combine([result(0, [1.0])])
    with pytest.raises(ContractError, match=r"ranks \[0, 0\] of 2"):
        combine([result(0, [1.0]), result(0, [1.0])])
    with pytest.raises(ContractError, match="of different runs"):
        combine([result(0, [1.0]), replace(result(1, [1.0]), n=99)])
    with pytest.raises(ContractError, match="no results"):
        combine([])


def test_every_trainer_runs_in_a_rival_s_environment() -> None:
    assert set(TRAINERS.values()) <= set(OPS)
