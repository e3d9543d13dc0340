"""The memory of real workers, counted tensor by tensor and array by array, against `estimate_worker_memory`.

Two workers in one process stop at the same points, so that each number is twice that of one worker.
"""

from __future__ import annotations

import gc
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gridtrain
from gridtrain.config import JoinConfig
from gridtrain.core.group.member_events import ResolveRound
from gridtrain.core.planning.worker_memory_estimate import (
    MAX_LOGGED_BYTES,
    estimate_worker_memory,
)
from gridtrain.errors import ConfigError
from gridtrain.runtime.step_rounds import StepRounds

WIDTH = 1200
N = WIDTH * WIDTH
STEPS, WORKERS, WITHIN_S, MIN_BYTES = 3, 2, 60.0, 1 << 14
DATA = [(torch.ones(WIDTH), torch.ones(WIDTH) * i) for i in range(64)]
GTOPK = gridtrain.GTopK(density=0.01)
# Agents of earlier tests wait in their threads, each with a buffer of 16 KiB; these workers have none.
NO_AGENTS = [tracemalloc.Filter(False, f"*/{name}.py") for name in ("agent_link", "control_socket")]
CASES: dict[str, tuple[Any, str, float]] = {  # the exchange, the optimizer, its values for each parameter
    "dense, sgd": (gridtrain.Dense(), "sgd", 0),
    "dense, int8": (gridtrain.Dense(values="int8", topology="ring"), "momentum", 1),
    "gtopk with momentum": (gridtrain.GTopK(density=0.001, momentum=0.9), "sgd", 0),
    "topk": (gridtrain.TopK(density=0.01), "sgd", 0),
    "local steps": (gridtrain.LocalSteps(2, gridtrain.Dense(), outer_momentum=0.9), "adamw", 2),
    "overlapped local steps": (gridtrain.LocalSteps(2, GTOPK, overlap=True), "adamw", 2),
}


def make(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if name == "momentum" else 0.0)


@pytest.fixture(autouse=True)
def frozen() -> None:
    """What was there before a test is neither counted nor looked at, nor after it: looking takes a second."""
    gc.collect()
    gc.freeze()


def allocated_bytes(models: list[nn.Module]) -> int:
    """Bytes of all tensors, and of all arrays and bytes that were allocated since `tracemalloc` was started.

    Smaller ones than `MIN_BYTES` are left out: modules are imported meanwhile.
    """
    gc.collect()
    gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)] + gradients
    tensors = [each for each in tensors if each.layout is torch.strided and each.device.type == "cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    traces = tracemalloc.take_snapshot().filter_traces(NO_AGENTS).traces if tracemalloc.is_tracing() else ()
    return sum(storages.values()) + sum(each.size for each in traces if each.size >= MIN_BYTES)


class Meter:
    """Counts while both workers wait for each other."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.counts: dict[str, int] = {}
        self._barrier = threading.Barrier(WORKERS)

    def count(self, what: str) -> None:
        if self._barrier.wait(WITHIN_S) == 0:
            self.counts[what] = allocated_bytes(self.models)
        self._barrier.wait(WITHIN_S)


def counts_of(together: Any, case: str, width: int, meter: Meter, *, traced: bool = True) -> dict[str, int]:
    """Bytes of two workers whose models have width x width parameters; without arrays if not `traced`."""
    exchange, optimizer_name, _ = CASES[case]

    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Linear(width, width, bias=False)
        meter.models.append(model)
        optimizer = grid.optimizer(make(optimizer_name, model), model, exchange=exchange, compare_every=0)
        for x, y in grid.batches(DATA, batch_size=1, steps=STEPS):
            (model(x[..., :width]) - y[..., :width]).square().mean().backward()
            optimizer.step()
        meter.count("always")
        state = optimizer.capture_state()
        meter.count("state")
        del state
        copies = optimizer.pack(), (exchanger := optimizer._exchanger).feedback and exchanger.feedback.state()
        meter.count("checkpoint")
        del copies

    meter.models.clear()
    before = allocated_bytes([])
    if traced:
        tracemalloc.start()
    try:
        together(train, WORKERS)
    finally:
        tracemalloc.stop()
    return {what: count - before for what, count in meter.counts.items()}


@pytest.mark.parametrize("case", CASES)
def test_workers_use_as_much_memory_as_the_table_says(
    case: str, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, _, values = CASES[case]
    meter, resolve = Meter(), StepRounds.resolve

    def resolve_counted(self: StepRounds, effect: ResolveRound) -> None:
        if effect.round.step == STEPS - 1:
            meter.count("exchange")  # its buffers are complete
        resolve(self, effect)

    monkeypatch.setattr(StepRounds, "resolve", resolve_counted)
    counts_of(together, case, 8, meter, traced=False)  # imports much, which tracing would slow down
    other = counts_of(together, case, 8, meter)  # of the interpreter, which tests before this one have filled
    counts = counts_of(together, case, WIDTH, meter)
    found = {what: (count - other[what]) / (WORKERS * N) for what, count in counts.items()}
    local = exchange if isinstance(exchange, gridtrain.LocalSteps) else None
    wire = exchange if local is None else local.exchange
    size = {"parameters": N, "workers": WORKERS, "optimizer_values": values}
    documented = estimate_worker_memory(wire, **size, local=local, logged_steps=STEPS)
    assert found["always"] == pytest.approx(documented.always, abs=0.3)
    assert found["state"] - found["always"] == pytest.approx(documented.state, abs=0.05)
    assert found["checkpoint"] - found["always"] == pytest.approx(documented.checkpoint, abs=0.05)
    if local is None or not local.overlap:  # otherwise the next turn computes meanwhile
        in_flight = 1.0  # a payload of a quarter of the elements
        assert found["exchange"] == pytest.approx(
            documented.always + documented.exchange, abs=in_flight + 0.5
        )


def test_the_documented_table_is_that_of_the_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    rows = re.findall(r"^\| `(.+?)`.* \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for text, *cells in rows:
        exchange = eval(text, vars(gridtrain))  # in this repository's own document
        local = exchange if isinstance(exchange, gridtrain.LocalSteps) else None
        wire = exchange if local is None else local.exchange
        found = estimate_worker_memory(wire, parameters=10**8, workers=4, optimizer_values=0, local=local)
        figures = (found.flat_gradient, found.residual, found.local_steps, found.exchange)
        assert cells == [f"{figure:.3g}" for figure in figures], text


def test_a_state_is_captured_with_one_copy() -> None:
    from gridtrain.training.checkpoint import serialization

    model = nn.Linear(WIDTH, WIDTH)
    optimizer = make("adamw", model)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    tracemalloc.start()
    try:
        size = sum(len(part) for part in serialization.capture_state(model, optimizer, {}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 12 * N and peak < 1.05 * size


def test_the_update_log_is_as_long_as_its_setting_says(
    together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert JoinConfig("", "").update_log_bytes == MAX_LOGGED_BYTES
    for wrong in ("0", "-1", "1.5", "much", "16385"):
        with pytest.raises(ConfigError, match=f"update_log_mib is '{wrong}'; it must be from 1 to 16384"):
            assert JoinConfig("", "", update_log_mib=wrong).update_log_bytes
    monkeypatch.setattr(JoinConfig, "update_log_bytes", property(lambda config: 1 << 20))

    def train(grid: gridtrain.Grid, number: int) -> int:
        model = nn.Linear(250, 250, bias=False)  # an update has 0.5 MB
        optimizer = grid.optimizer(make("sgd", model), model, exchange=gridtrain.TopK(density=1.0))
        for _ in grid.batches(DATA, batch_size=1, steps=6):
            model(torch.ones(1, 250)).square().sum().backward()
            optimizer.step()
        return len(grid._session.connection.loop.catch_up_source._log._updates)

    assert together(train, WORKERS) == [2, 2]
