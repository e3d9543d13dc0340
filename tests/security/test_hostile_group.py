"""Whole groups with one hostile worker: real coordinator, real workers in threads, in-memory links.

The hostile worker runs the real code, too; only the messages of its transport are changed, from some step on.
The others finish with one model, none of them crashes or is removed, and the hostile worker is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from thread_groups import one_thread_for_torch  # noqa: F401
from threaded_group import ThreadedGroup
from training_loop import DATA, digest, linear, sgd, train_batch

import gridtrain
from gridtrain.core import messages as m
from gridtrain.errors import JoinRefused, LocalProtocolError
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer

STEPS, FROM_STEP = 12, 4
HOSTILE = 0

EXCHANGES = {
    "dense": gridtrain.Dense(),
    "topk": gridtrain.TopK(density=1.0),
    "gtopk": gridtrain.GTopK(density=1.0),
}

Change = Callable[[m.Data], list[m.Data]]


def ends_of(folder: Path, exchange: Any, change: Change, *, workers: int) -> list[Any]:
    """What the workers raised or returned: the digest of the model, and the size of the group at each step.

    The first worker sends its payloads changed by `change`.
    """

    def train(grid: gridtrain.Grid, number: int) -> tuple[str, list[int]]:
        model = linear()
        optimizer = sgd(grid, model, exchange)
        if number == HOSTILE:
            turn_hostile(grid, change)
        sizes = []
        for batch in grid.batches(DATA, batch_size=2, steps=STEPS):
            train_batch(model, optimizer, batch)
            sizes.append(grid.world_size)
        return digest(model, optimizer), sizes

    with ThreadedGroup(folder, workers=workers) as group:
        group.start_all(train)
        return group.ends()


def turn_hostile(grid: gridtrain.Grid, change: Change) -> None:
    transport: Any = grid._session.connection.loop._transport
    honest = transport.send

    def send(peer: m.PeerId, message: m.Message) -> None:
        if not isinstance(message, m.Data) or message.round.step < FROM_STEP:
            honest(peer, message)
            return
        for changed in change(message):
            honest(peer, changed)

    transport.send = send


def no_number(message: m.Data) -> list[m.Data]:
    """NaN in a dense slice, a damaged fp16 value in a sparse payload."""
    payload = bytearray(message.payload)
    payload[-4:] = b"\xff" * len(payload[-4:])
    return [replace(message, payload=bytes(payload))]


def too_long(message: m.Data) -> list[m.Data]:
    return [replace(message, payload=bytes(message.payload) + bytes(1000))]


def twice(message: m.Data) -> list[m.Data]:
    return [message, message]


def elsewhere(message: m.Data) -> list[m.Data]:
    return [replace(message, slot=replace(message.slot, hop=2**31 - 1))]


def unknown_channel(message: m.Data) -> list[m.Data]:
    return [replace(message, channel=m.Channel(index=77))]


def far_ahead(message: m.Data) -> list[m.Data]:
    return [message, replace(message, round=replace(message.round, step=2**62))]


CHANGES = [no_number, too_long, twice, elsewhere, unknown_channel, far_ahead]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_others_go_on_and_the_hostile_worker_is_removed(
    kind: str, change: Change, tmp_path: Path
) -> None:
    removed, *others = ends_of(tmp_path, EXCHANGES[kind], change, workers=4)
    assert len({digest for digest, _ in others}) == 1
    # No step is lost: the other three repeat the one that was hit.  (A step may be over before the wrong
    # message is read, and the next generation may exist when the loop looks: one more or less.)
    for _, sizes in others:
        assert len(sizes) == STEPS and set(sizes[: FROM_STEP - 1]) == {4}, sizes
        assert set(sizes[FROM_STEP + 1 :]) == {3}, sizes
    assert isinstance(removed, JoinRefused) and "broke the protocol (violation" in removed.reason, removed


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_local_bug_crashes_its_worker(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker with the bug crashes, and accuses no peer."""

    def buggy(self: Any, effect: Any) -> None:
        raise LocalProtocolError("a local bug")

    for buffer in (DenseRingBuffer, AllGatherBuffer, ButterflyBuffer):
        monkeypatch.setattr(buffer, "apply", buggy)
    end = ends_of(tmp_path, EXCHANGES[kind], lambda message: [message], workers=2)[1]
    assert isinstance(end, LocalProtocolError) and "a local bug" in str(end), end
