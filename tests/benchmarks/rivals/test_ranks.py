"""Groups of ranks as real processes: over loopback, and on the lab's hosts if the lab is available."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from lab.group import free_port
from lab.net import Net, why_not
from lab.ns import LabError
from rivals import environments
from rivals.contract import OPS, TRAINERS, Rank, Request
from rivals.environments import available
from rivals.hosts import Loopback, measure, run_ranks
from rivals.rendezvous import Rendezvous
from rivals.train import Training

TIMEOUT_S = 200.0
ALL = [(name, op) for name, ops in OPS.items() for op in ops]


def need(rival: str) -> None:
    if reason := available()[rival]:
        pytest.skip(f"{rival} cannot run here: {reason}")


# -- rendezvous ----------------------------------------------------------------------------------


def test_each_rank_receives_all_values_in_the_order_of_ranks() -> None:
    master = f"127.0.0.1:{free_port()}"
    received: dict[int, list[list[str]]] = {}

    def rank(own: Rank) -> None:
        with Rendezvous(own) as group:
            first = group.exchange(f"a{own.rank}")
            group.barrier()
            received[own.rank] = [first, group.exchange(f"b{own.rank}")]

    ranks = [Rank(rank=rank, world=4, master=master) for rank in reversed(range(4))]
    threads = [threading.Thread(target=rank, args=(own,)) for own in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]]
    assert [received[rank] for rank in range(4)] == [expected] * 4


# -- measurements --------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(("rival", "op"), ALL, ids=[f"{name}-{op}" for name, op in ALL])
def test_two_ranks_over_loopback(rival: str, op: str, tmp_path: Path) -> None:
    """Each rank checks its result and ends with an error if it is wrong."""
    need(rival)
    request = Request(op=op, n=20_000, density=0.01, repeats=2)
    figures = measure([Loopback()] * 2, rival, request, tmp_path / "ranks", TIMEOUT_S, free_port())
    assert (figures.rival, figures.op, figures.n, figures.world) == (rival, op, 20_000, 2)
    assert len(figures.seconds) == len(figures.cpu_s) == 2 and min(figures.seconds) > 0
    assert figures.bytes_sent == []  # both use the same interface
    assert figures.version


@pytest.mark.integration
@pytest.mark.parametrize("rival", list(OPS))
def test_ranks_on_the_lab_s_hosts_send_the_bytes_of_the_algorithm(rival: str, tmp_path: Path) -> None:
    """In a ring of two each sends its half twice; headers and other messages add 10 to 20 %."""
    need(rival)
    if reason := why_not():
        pytest.skip(f"the network lab is not available: {reason}")
    n = 1_000_000
    with Net() as net:
        hosts = list(net.make_hosts(["anna", "bert"], "200Mbit").values())
        request = Request(op="all_reduce", n=n, repeats=2)
        figures = measure(hosts, rival, request, tmp_path / "ranks", TIMEOUT_S)
    assert 4 * n < min(figures.bytes_sent) and max(figures.bytes_sent) < 4 * n * 1.3
    assert min(figures.seconds) > 4 * n / 25e6 * 0.95  # none is faster than the link


@pytest.mark.integration
def test_a_rank_that_fails_is_reported_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("gloo")
    correct = environments.variables
    monkeypatch.setattr(environments, "variables", lambda name: correct(name) | {"PYTHONPATH": "/nowhere"})
    with pytest.raises(LabError, match=r"rank \d ended with exit code 1") as failed:
        request = Request(op="all_reduce", n=100)
        measure([Loopback()] * 2, "gloo", request, tmp_path / "ranks", TIMEOUT_S, free_port())
    assert "No module named" in str(failed.value)


@pytest.mark.integration
@pytest.mark.skipif(torch.__version__ < (2, 7), reason="DistributedDataParallel has no init_sync")
@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_a_training_run_learns_and_ends_at_its_loss(trainer: str, tmp_path: Path) -> None:
    need(TRAINERS[trainer])
    if reason := why_not():
        pytest.skip(f"the network lab is not available: {reason}")
    training = Training(trainer=trainer, steps=40, measure_every=5, until_loss=4.5)
    with Net() as net:
        hosts = list(net.make_hosts(["anna", "bert"]).values())
        run_ranks(hosts, TRAINERS[trainer], "rivals.train", training, tmp_path / "run", TIMEOUT_S)
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    held_out = [record["held_out"] for record in records if record["held_out"] is not None]
    assert held_out[-1] <= 4.5 and all(loss > 4.5 for loss in held_out[:-1])
    assert len(records) % 5 == 0 and len(records) < 40
    for name in ("seconds", "sent_bytes"):
        column = [record[name] for record in records]
        assert column == sorted(column) and column[0] > 0
