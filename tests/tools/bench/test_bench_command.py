"""`gridtrain bench`: figures of this machine, as a table with sentences and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from gridtrain.cli.main import cli, main
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.tools.bench.bench_group import BenchSetting, ExchangeSample
from gridtrain.tools.bench.main import (
    BenchPlan,
    BenchResult,
    ExchangeResult,
    check_memory,
    measure_exchange,
    print_result,
    summary_sentences,
)

pytest.importorskip("torch")

LOCAL = {"copy_ns": 0.5, "select_ns": 5.0, "encode_ns": 12.0, "decode_ns": 20.0, "merge_ns": 100.0}


def found(workers: tuple[int, ...] = (4,)) -> BenchResult:
    exchanges = [
        ExchangeResult(exchange, P, 0.1, 0.02, sent_bytes)
        for P in workers
        for exchange, sent_bytes in (("dense", 60e6), ("gtopk:density=0.01", 0.5e6))
    ]
    return BenchResult(BenchPlan(10_000_000, workers=workers), 2, "", LOCAL, exchanges)


def test_sentences_explain_the_figures() -> None:
    assert summary_sentences(found()) == [
        "Selecting takes 50.0 ms per step on one CPU thread, 10.0 times as long as a copy.",
        "On a link of 20Mbit a step among 4 workers takes at least 24.0 s with dense and 0.20 s with gTop-k, "
        "counting only the bytes.",
        "5 processes share 2 cores here; on separate machines they are faster.",
    ]


def test_the_tables_are_printed() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_result(found(), console)
    text = console.export_text()
    assert "10,000,000 parameters (40.0 MB of gradient), density 0.01; 2 CPU cores, no GPU" in text
    assert "select entries to send, one CPU thread" in text
    assert "24.00 s" in text and "0.20 s" in text


def test_figures_of_the_processor_are_printed_as_json() -> None:
    done = CliRunner().invoke(cli, ["bench", "--parameters", "20000", "--workers", "", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["plan"]["parameters"] == 20_000 and figures["exchanges"] == []
    assert set(LOCAL) <= set(figures["local"])
    assert all(ns > 0 for ns in figures["local"].values())


@pytest.mark.integration
def test_a_local_group_is_measured() -> None:
    words = ["--parameters", "50000", "--workers", "2", "--repeats", "1", "--json"]
    done = CliRunner().invoke(cli, ["bench", *words])
    assert done.exit_code == 0, done.output
    dense, gtopk = json.loads(done.stdout)["exchanges"]
    assert dense["sent_bytes"] > 200_000 > 50_000 > gtopk["sent_bytes"] > 0
    assert dense["seconds"] > 0 and gtopk["cpu_s"] > 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--workers", "1", "is not a list of numbers from 2 to 32"),
        ("--workers", "two", "is not a list of numbers from 2 to 32"),
        ("--workers", "2,4,2", "contains a size twice"),
        ("--parameters", "9", "not in the range"),
        ("--line", "", "is not a rate"),
        ("--density", "nan", "the share is nan"),
        ("--parameters", "1000000000000000", "a payload has at most 4,294,967,296 elements"),
    ],
)
def test_invalid_options_are_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", option, value])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_vectors_that_do_not_fit_are_refused_before_anything_is_measured() -> None:
    check_memory(BenchPlan(1_000_000, workers=(2, 4)), memory_bytes=64_000_000)
    with pytest.raises(ConfigError, match=r"1,000,001 parameters for 4 local workers need about 0.1 GB"):
        check_memory(BenchPlan(1_000_001, workers=(2, 4)), memory_bytes=64_000_000)
    check_memory(BenchPlan(4_000_000, workers=()), memory_bytes=64_000_000)


def repeat(seconds: float, aborts: int) -> ExchangeSample:
    return ExchangeSample(seconds, seconds, 8.0, 8.0, seconds, seconds, seconds, aborts)


def test_repeats_with_aborted_attempts_are_left_out_and_counted() -> None:
    setting = BenchSetting("dense", 2, 1000)
    made = measure_exchange(setting, [repeat(1.0, 0), repeat(90.0, 1), repeat(80.0, 2), repeat(2.0, 0)])
    assert (made.seconds, made.cpu_s, made.repeats, made.left_out) == (1.5, 1.5, 2, 2)
    shown = found()
    shown.exchanges[0] = replace(shown.exchanges[0], repeats=3, left_out=2)
    assert summary_sentences(shown)[-1] == (
        "dense among 4 workers: 2 of 5 repeats had aborted attempts and are left out."
    )
    with pytest.raises(GridtrainError, match="aborted in every repeat"):
        measure_exchange(setting, [repeat(90.0, 1)])
