"""Groups without faults: 100 steps over ZeroMQ leave bit-identical replicas, and traffic is as in theory.

One group of processes for each exchange and size serves several tests.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from gridtrain.network.wire.sparse_payload import encoded_bytes
from gridtrain.network.wire.value_encoding import ValueKind

pytestmark = pytest.mark.integration
STEPS = 100
HASH_SEEDS = ("", "", "1", "2", "3")
"""Of the workers: the order of a set must not make replicas differ.  Forked ones ("") share theirs."""

EXCHANGES = ("dense", "topk", "butterfly", "direct")
DENSITY = 0.05  # of the sparse ones, in scripts/train.py

# In units of one payload, what each rank sends in a step.
#                       P = 4                P = 5: rank 4 folds into rank 0, which hands the result back
BUTTERFLY_PAYLOADS = {4: (2, 2, 2, 2), 5: (3, 2, 2, 2, 1)}


@dataclass(frozen=True)
class Trained:
    """What a group printed: `rounds` of one of its workers, `ends` in rank order."""

    ends: list[dict]
    rounds: list[dict]
    group: Any


@pytest.fixture(scope="module", params=[4, 5], ids=["4 workers", "5 workers"])
def trained(request: pytest.FixtureRequest, new_group) -> dict[str, Trained]:
    """By exchange.  One group for each; the same processes run all groups, to import torch once."""
    world_size = request.param
    with ExitStack() as stack:
        groups = {name: stack.enter_context(new_group(min_workers=world_size)) for name in EXCHANGES}
        same = {"batch_size": 8, "steps": STEPS, "batch_norm": True}
        first, *others = ({"exchange": name, **same} for name in EXCHANGES)
        for other in others:  # the agent uses the first invitation, the script itself the others
            other["invitation"] = groups[other["exchange"]].invitation()
        workers = [
            groups["dense"].add(f"worker-{number}", *others, hash_seed=HASH_SEEDS[number], **first)
            for number in range(world_size)
        ]
        for group in groups.values():
            group.finish()
    return {
        name: Trained(
            ends=sorted((end for w in workers for end in w.marked("end", name)), key=lambda end: end["rank"]),
            rounds=workers[0].marked("round", name),
            group=groups[name],
        )
        for name in EXCHANGES
    }


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_100_steps_leave_bit_identical_replicas(trained: dict[str, Trained], exchange: str) -> None:
    """Every process began with different random parameters; all receive those of rank 0."""
    ends, rounds = trained[exchange].ends, trained[exchange].rounds
    assert [end["rank"] for end in ends] == list(range(rounds[0]["of"]))
    assert {end["step"] for end in ends} == {STEPS}
    assert len({end["digest"] for end in ends}) == 1, "parameters and optimizer state"
    assert len({end["buffers"] for end in ends}) == 1, "batch norm's, averaged in steps 50 and 100"
    assert {end["skipped_steps"] for end in ends} == {0}
    assert {line["round"][0] for line in rounds} == {1}, "one generation: no worker was lost"
    first, last = (sum(line["loss"] for line in part) / 20 for part in (rounds[:20], rounds[-20:]))
    assert last < 0.7 * first, f"it learns: {first:.2f} -> {last:.2f}"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_data_bytes_are_those_of_the_role(trained: dict[str, Trained], exchange: str) -> None:
    """The table is shown by `pytest -rP`."""
    ends, attempts = trained[exchange].ends, len(trained[exchange].rounds)
    P, n = len(ends), ends[0]["n"]
    sparse_bytes = encoded_bytes(round(DENSITY * n), n, ValueKind.FP16)
    payloads, payload_bytes = {
        "dense": ([2 * (P - 1)] * P, 4 * n / P),
        "topk": ([P - 1] * P, sparse_bytes),
        "butterfly": (BUTTERFLY_PAYLOADS[P], sparse_bytes),
        "direct": ([2 * (P - 1)] * P, sparse_bytes / P),
    }[exchange]

    print(f"{exchange}, {P} workers, n = {n}: bytes that each sends in a step, over {attempts} attempts")
    print("rank   payloads x bytes = theory     Data           votes   beats   all else (rank 0: the state)")
    for end, count in zip(ends, payloads, strict=True):
        sent = {kind: total / attempts for kind, total in end["sent_bytes"].items()}
        data, votes, heartbeats = (
            sum(sent.pop(kind, 0.0) for kind in kinds)
            for kinds in (("Data",), ("Vote", "Decision"), ("Heartbeat", "RoundProgress"))
        )
        theory, rest = count * payload_bytes, sum(sent.values())
        role = f"{end['rank']:4}   {count:8} x {payload_bytes:5.0f} = {theory:6.0f}"
        print(
            f"{role}   {data:6.0f} {data / theory - 1:+6.1%}   {votes:5.0f}   {heartbeats:5.0f}   {rest:8.0f}"
        )
        assert data == pytest.approx(theory, rel=0.10), f"rank {end['rank']}"


def test_the_run_ends_by_its_ledger(trained: dict[str, Trained]) -> None:
    """`finish` has checked that all exit codes are 0, the coordinators' too."""
    for exchange in EXCHANGES:
        group = trained[exchange].group
        assert len(group.events("finished")) == 1
        assert len(group.events("left")) == len(trained[exchange].ends) and not group.events("lost")
