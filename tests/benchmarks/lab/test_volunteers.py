"""`make lab`: its table, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_transfer import send

from lab import volunteers
from lab.group import LabHosts
from lab.net import Net


@pytest.mark.parametrize(
    ("nat", "behind"), [("none", []), ("half", ["anna", "bert"]), ("all", ["anna", "bert", "cleo"])]
)
def test_some_workers_are_behind_nat(net: Net, nat: str, behind: list[str]) -> None:
    """Half of three are two, which cannot dial each other."""
    hosts = LabHosts(net, ["anna", "bert", "cleo"], nat=nat)
    assert sorted(hosts.behind_nat) == behind
    assert [name for name, host in hosts.workers.items() if hosts.uplinks[name] is not host] == behind


def test_the_table_shows_all_settings() -> None:
    def run(step_s: float, worker_bytes: float, hub_bytes: float) -> dict[str, object]:
        workers = [worker_bytes] * 3 + [2 * worker_bytes]
        return {"step_s": [step_s] * 20, "worker_bytes": workers, "hub_bytes": hub_bytes}

    runs = {
        ("none", "on", "gtopk"): [run(0.060, 40_000, 100), run(0.070, 40_000, 100)],
        ("all", "on", "dense"): [run(0.300, 700_000, 160_000)],
    }
    assert volunteers.table(runs).splitlines()[2:] == [
        "| gtopk, NAT none, encryption on | 65 | 60 to 70 | 50.0 | 80.0 | 0.1 |",
        "| dense, NAT all, encryption on | 300 | 300 to 300 | 875.0 | 1400.0 | 160.0 |",
    ]


def test_bytes_are_counted_on_the_link(net: Net) -> None:
    anna, bert = net.host("anna"), net.host("bert")
    before = {host: volunteers.sent_bytes(host) for host in (anna, bert)}
    send(anna, bert, 100_000)
    assert 100_000 < volunteers.sent_bytes(anna) - before[anna] < 110_000
    assert volunteers.sent_bytes(bert) - before[bert] < 10_000, "acknowledgements"


@pytest.mark.integration
def test_a_small_run_through_the_relay(
    lab: None, whole_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two workers behind NAT only the coordinator can relay, so all data passes through it."""
    run = "--workers 2 --exchange dense --steps 30 --model tiny --cap 10Mbit --timeout 100"
    figures = tmp_path / "figures.json"
    assert volunteers.main([*f"--nat none all {run} --out".split(), str(figures)]) == 0
    output = capsys.readouterr()
    print(output.out)
    assert output.err.splitlines() == ["run 1 of 1: none, on, dense", "run 1 of 1: all, on, dense"]
    (direct,), (relayed,) = (each["runs"] for each in json.loads(figures.read_text())["results"])
    assert len(direct["step_s"]) == len(relayed["step_s"]) == 30 - 1 - volunteers.WARM_UP_STEPS
    assert min(direct["step_s"]) > 0 and len(direct["worker_bytes"]) == 2
    assert relayed["hub_bytes"] > 0.9 * sum(direct["worker_bytes"]), "it sends all that it receives"
    assert direct["hub_bytes"] < 0.02 * sum(direct["worker_bytes"]), "it does not relay gradients"
