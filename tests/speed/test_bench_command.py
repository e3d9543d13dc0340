"""`gridtrain bench`: figures of this machine, as a table with sentences and as JSON."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from gridtrain.cli.main import cli
from gridtrain.speed.main import Exchanged, Found, Plan, sentences, show

pytest.importorskip("torch")

LOCAL = {"copy_ns": 0.5, "select_ns": 5.0, "encode_ns": 12.0, "decode_ns": 20.0, "merge_ns": 100.0}


def found(workers: tuple[int, ...] = (4,)) -> Found:
    exchanges = [
        Exchanged(exchange, P, 0.1, 0.02, sent_bytes)
        for P in workers
        for exchange, sent_bytes in (("dense", 60e6), ("gtopk:density=0.01", 0.5e6))
    ]
    return Found(Plan(10_000_000, workers=workers), 2, "", LOCAL, exchanges)


def test_sentences_say_what_the_figures_mean() -> None:
    assert sentences(found()) == [
        "Selecting takes 50.0 ms a step on one CPU thread, 10.0 times a plain copy.",
        "On a line of 20Mbit a step among 4 workers takes at least 24.0 s dense and 0.20 s with gTop-k, "
        "for the bytes alone.",
        "5 processes share 2 cores here: on machines of their own they are faster.",
    ]


def test_the_tables() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    show(found(), console)
    text = console.export_text()
    assert "10,000,000 parameters (40.0 MB of gradient), density 0.01; 2 CPU cores, no GPU" in text
    assert "select what to send, one CPU thread" in text
    assert "24.00 s" in text and "0.20 s" in text


def test_the_processor_alone_as_json() -> None:
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
    ("option", "value"), [("--workers", "1"), ("--workers", "two"), ("--parameters", "9")]
)
def test_options_that_cannot_work(option: str, value: str) -> None:
    assert CliRunner().invoke(cli, ["bench", option, value]).exit_code == 2
