"""`make lab`: its table, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import volunteers
from lab.group import Plan
from lab.net import Net
from lab.volunteers import Result, Setting


def test_a_plan_names_the_workers_behind_nat() -> None:
    assert Plan(3, "none").behind_nat == set()
    assert Plan(3, "half").behind_nat == {"worker-1", "worker-2"}, "two that cannot dial each other"
    assert Plan(4, "half").behind_nat == {"worker-1", "worker-2"}
    assert Plan(2, "all", names=("anna", "bert")).behind_nat == {"anna", "bert"}
    with pytest.raises(ValueError, match="nat is 'some'; it must be one of none, half, all"):
        Plan(3, "some")


def test_the_table_shows_all_settings_and_their_ratios() -> None:
    def result(step_s: float, worker_bytes: float, hub_bytes: float) -> Result:
        times = ([0.02], [0.005], [step_s - 0.03], [0.005])
        return Result([step_s] * 20, [step_s], *times, [worker_bytes] * 3 + [2 * worker_bytes], [hub_bytes])

    results = {
        Setting("none", "on", "gtopk"): result(0.060, 40_000, 100),
        Setting("all", "on", "gtopk"): result(0.090, 40_000, 160_000),
        Setting("none", "on", "dense"): result(0.300, 700_000, 300),
    }
    text = "\n".join(line.rstrip() for line in volunteers.table(results).splitlines())
    print(text)
    assert text == TABLE


TABLE = """\
                                step      runs   p90 | compute select comm wait | worker kB    most  hub kB
gtopk NAT none encryption on      60     60-60    60 |      20      5   30    5 |      50.0    80.0     0.1
gtopk NAT all  encryption on      90     90-90    90 |      20      5   60    5 |      50.0    80.0   160.0
dense NAT none encryption on     300   300-300   300 |      20      5  270    5 |     875.0  1400.0     0.3
gtopk NAT all  encryption on   +50.0% against gtopk NAT none encryption on"""


def test_bytes_are_counted_on_the_link(net: Net) -> None:
    anna, bert = net.host("anna"), net.host("bert")
    before = {host: volunteers.sent_bytes(host) for host in (anna, bert)}
    with bert.listen() as listener:
        outgoing = anna.dial(bert.address, listener.getsockname()[1])
        incoming, _ = listener.accept()
    with outgoing, incoming:
        incoming.settimeout(30)
        outgoing.sendall(bytes(100_000))
        left = 100_000
        while left:
            left -= len(incoming.recv(1 << 16))
    assert 100_000 < volunteers.sent_bytes(anna) - before[anna] < 110_000
    assert volunteers.sent_bytes(bert) - before[bert] < 10_000, "acknowledgements"


@pytest.mark.integration
def test_a_small_run_through_the_relay(
    lab: None, whole_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two workers behind NAT only the coordinator can relay, so all data passes through it."""
    run = "--workers 2 --exchange dense --steps 30 --model tiny --cap 10Mbit --timeout 100"
    figures = tmp_path / "figures.json"
    assert volunteers.main([*f"--nat none all {run} --json".split(), str(figures)]) == 0
    output = capsys.readouterr()
    print(output.out)
    assert output.err.splitlines() == [
        "run 1 of 1: dense NAT none encryption on ",
        "run 1 of 1: dense NAT all  encryption on ",
    ]
    direct, relayed = json.loads(figures.read_text())["results"]
    assert len(direct["step_s"]) == len(relayed["step_s"]) == 30 - 1 - volunteers.WARM_UP_STEPS
    assert min(direct["step_s"]) > 0 and len(direct["worker_bytes"]) == 2
    assert relayed["hub_bytes"][0] > 0.9 * sum(direct["worker_bytes"]), "it sends all that it receives"
    assert direct["hub_bytes"][0] < 0.02 * sum(direct["worker_bytes"]), "it does not relay gradients"
