"""Whole groups with one hostile worker: real coordinator, real workers in threads, in-memory links.

The hostile worker runs the real code, too; only the messages of its transport are changed, from some step on.
The others finish with one model, none of them crashes or is removed, and the hostile worker is removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import BRISK
from thread_groups import one_thread_for_torch  # noqa: F401
from torch import nn

import gridtrain
from gridtrain.core import messages as m
from gridtrain.errors import JoinRefused, LocalProtocolError
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training.checkpoint import serialization

WITHIN_S = 60.0
STEPS, FROM_STEP = 12, 4
DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(-6, 6)]
HOSTILE = "mallory"

EXCHANGES = {
    "dense": gridtrain.Dense(),
    "topk": gridtrain.TopK(density=1.0),
    "gtopk": gridtrain.GTopK(density=1.0),
}

Change = Callable[[m.Data], list[m.Data]]


class Run:
    """`workers` workers; `mallory` sends its payloads changed by `change`."""

    def __init__(self, folder: Path, exchange: Any, change: Change, *, workers: int) -> None:
        self.folder = folder
        self.group = LocalGroup(min_workers=workers, deadlines=BRISK)
        self.exchange, self.change = exchange, change
        self.results: dict[str, Any] = {}
        self.sizes: dict[str, list[int]] = {}
        names = [HOSTILE, *(f"worker-{i}" for i in range(1, workers))]
        self.threads = [threading.Thread(target=self._work, args=(n,), name=n, daemon=True) for n in names]

    def __enter__(self) -> Run:
        self.group.__enter__()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.group.__exit__()

    def wait_for_the_honest(self) -> dict[str, str]:
        """Wait for the honest workers; return the digests of their final models."""
        for thread in self.threads[1:]:
            thread.join(WITHIN_S)
            assert thread.name in self.results, f"{thread.name} still runs after {WITHIN_S:.0f} s"
            if isinstance(self.results[thread.name], BaseException):
                raise self.results[thread.name]
        return {name: result for name, result in self.results.items() if name != HOSTILE}

    def _work(self, name: str) -> None:
        try:
            with self.group.join(name, export_dir=str(self.folder)) as grid:
                self.results[name] = self._train(grid, name)
        except BaseException as error:
            self.results[name] = error

    def _train(self, grid: gridtrain.Grid, name: str) -> str:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.25)
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, exchange=self.exchange
        )
        if name == HOSTILE:
            self._turn_hostile(grid)
        sizes = self.sizes.setdefault(name, [])
        for inputs, targets in grid.batches(DATA, batch_size=2, steps=STEPS):
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(grid.world_size)
        return serialization.replica_digest(model, optimizer.inner).hex()[:12]

    def _turn_hostile(self, grid: gridtrain.Grid) -> None:
        transport = grid._session.connection.loop._transport
        honest = transport.send

        def send(peer: m.PeerId, message: m.Message) -> None:
            if not isinstance(message, m.Data) or message.round.step < FROM_STEP:
                honest(peer, message)
                return
            for changed in self.change(message):
                honest(peer, changed)

        transport.send = send  # type: ignore[method-assign]


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
    with Run(tmp_path, EXCHANGES[kind], change, workers=4) as run:
        digests = run.wait_for_the_honest()
        assert len(set(digests.values())) == 1, digests
        # No step is lost: the other three repeat the one that was hit.  (A step may be over before the wrong
        # message is read, and the next generation may exist when the loop looks: one more or less.)
        for name in digests:
            sizes = run.sizes[name]
            assert len(sizes) == STEPS and set(sizes[: FROM_STEP - 1]) == {4}, sizes
            assert set(sizes[FROM_STEP + 1 :]) == {3}, sizes
        run.threads[0].join(WITHIN_S)
        why = run.results[HOSTILE]
        assert isinstance(why, JoinRefused) and "broke the protocol (violation" in why.reason, why


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_local_bug_crashes_its_worker(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker with the bug crashes, and accuses no peer."""

    def buggy(self: Any, effect: Any) -> None:
        raise LocalProtocolError("a local bug")

    for buffer in (DenseRingBuffer, AllGatherBuffer, ButterflyBuffer):
        monkeypatch.setattr(buffer, "apply", buggy)
    with (
        Run(tmp_path, EXCHANGES[kind], lambda message: [message], workers=2) as run,
        pytest.raises(LocalProtocolError, match="a local bug"),
    ):
        run.wait_for_the_honest()
