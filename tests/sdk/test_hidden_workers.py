"""Workers that no peer can dial take part; pairs that cannot connect use an encrypted relay.

hidden: 2 of 4     0 1 | 2 3      2 and 3 dial 0 and 1; between 2 and 3 one of the others relays
hidden: all 4      | 0 1 2 3      every pair through the coordinator
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from group_status import status_of
from torch import nn
from torch.utils.data import TensorDataset
from training_loop import digest, sgd, train_steps

import gridtrain
from gridtrain.network.transport.in_memory import EndpointKilled

DATA = TensorDataset(torch.arange(480.0).reshape(120, 4) / 480, torch.arange(120.0).reshape(120, 1) / 120)
WORKERS, STEPS = 4, 30
PROBES_BYTES = 10_000
"""Link probes before any member can relay take some 2 kB, the data of a run 30 kB and more."""
Result = tuple[str, int, dict[str, tuple[int, int]]]


def train(exchange: Any, grid: gridtrain.Grid, number: int) -> Result:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = sgd(grid, model, exchange, lr=0.05)
    list(train_steps(grid, model, optimizer, DATA, steps=STEPS))
    return digest(model, optimizer), grid.step, grid.traffic


@pytest.mark.parametrize("hidden", [0, 2, WORKERS], ids=["none", "half", "all"])
@pytest.mark.parametrize(
    "exchange",
    [
        gridtrain.Dense(),
        gridtrain.GTopK(density=0.1),
        gridtrain.Dense(topology="star"),
        gridtrain.GTopK(density=0.1, values="int8", topology="star"),
        gridtrain.GTopK(density=0.1, values="bf16", topology="tree"),
    ],
    ids=["dense", "gtopk", "dense star", "gtopk star", "gtopk tree"],
)
def test_hidden_workers_end_with_the_same_model(new_group: Any, exchange: Any, hidden: int) -> None:
    with new_group(workers=WORKERS) as group:
        for number in range(WORKERS):
            group.start(partial(train, exchange), hidden=number >= WORKERS - hidden)
        results = group.finish()
        by_coordinator = group._transport.traffic.sent_bytes.get("RelayedMessage", 0)
    digests, steps, traffic = zip(*results, strict=True)
    assert len(set(digests)) == 1 and set(steps) == {STEPS}
    relayed = [
        sum(counts.get(kind, (0, 0))[0] for kind in ("RelayRequest", "RelayedMessage")) for counts in traffic
    ]
    if hidden == 0:
        assert not any(relayed) and not by_coordinator
    elif hidden == WORKERS:
        assert all(relayed) and by_coordinator > PROBES_BYTES, "there is no other relay"
        assert not any("Data" in counts for counts in traffic), "all data goes through it"
    else:
        assert by_coordinator < PROBES_BYTES, "a member that both can dial is preferred"


def test_the_status_shows_which_workers_can_be_dialled(new_group: Any) -> None:
    with new_group(workers=2) as group:
        for hidden in (False, True):
            group.start(partial(train, gridtrain.Dense()), hidden=hidden)
        group.finish()
        seen = {
            event["name"]: event["reachable"]
            for event in status_of(group)["events"]
            if event["event"] == "called_back"
        }
    assert seen == {"worker-0": True, "worker-1": False}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_others_go_on_when_a_hidden_worker_dies(new_group: Any) -> None:
    """It used a relay; the relay's threads end without an error, as the others."""

    with new_group(workers=3) as group:
        dense = partial(train, gridtrain.Dense())
        for role in (dense, dense, partial(killed_at, group, 5)):
            group.start(role, hidden=True)
        first, second, dead = group.ends()
    assert isinstance(dead, EndpointKilled)
    assert isinstance(first, tuple) and isinstance(second, tuple)
    assert first[:2] == second[:2] and first[1] == STEPS


def killed_at(group: Any, step: int, grid: gridtrain.Grid, number: int) -> Result:
    run = grid._session.run

    def run_or_die(plan: Any, *rest: Any) -> Any:
        if plan.step == step:
            group.hub.kill(group.keys[f"worker-{number}"])
        return run(plan, *rest)

    grid._session.run = run_or_die  # type: ignore[method-assign]
    return train(gridtrain.Dense(), grid, number)
