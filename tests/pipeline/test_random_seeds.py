"""The process's random generators: the draws of a stage's layers do not affect other code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from brisk import WITHIN_S
from pipeline_models import layers_of, run, stages_of

from gridtrain.pipeline.blueprint import _seeded_generator
from gridtrain.pipeline.random_seeds import borrowed_generators
from gridtrain.training.data import sampler

HOST = torch.device("cpu")
Borrow = Callable[[], AbstractContextManager[None]]
BORROWERS: dict[str, Borrow] = {
    "samples": sampler.preserve_random_state,
    "stage": partial(borrowed_generators, HOST),
    "initial values": partial(_seeded_generator, 0, 0),
}


def drawn() -> float:
    return float(torch.rand(()))


@pytest.fixture(autouse=True)
def seeded() -> float:
    """The next draw, if no other code draws in between."""
    torch.manual_seed(4)
    expected = drawn()
    torch.manual_seed(4)
    return expected


def test_a_step_does_not_change_the_generators(seeded: float) -> None:
    stages = stages_of(layers_of(dropout=True), 1)
    torch.manual_seed(4)
    run(stages, (2, 2, 2, 2))
    assert drawn() == seeded


def test_draws_between_two_borrowers_advance_the_generator(seeded: float) -> None:
    """Two stages in a process: one draws its batch while the other one is in the middle of a step."""
    with borrowed_generators(HOST):
        torch.manual_seed(1)
    batch = drawn()
    with borrowed_generators(HOST):
        torch.manual_seed(2)
    assert batch == seeded and drawn() != seeded


def test_a_borrower_that_fails_restores_the_generators(seeded: float) -> None:
    with pytest.raises(ValueError, match="a layer"), borrowed_generators(HOST):
        torch.manual_seed(3)
        raise ValueError("a layer")
    assert drawn() == seeded


def test_a_generator_that_cannot_be_read_does_not_block_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_rng_state", broken)
        with pytest.raises(RuntimeError, match="device"), borrowed_generators(HOST):
            pass
    done = threading.Event()

    def other() -> None:
        with borrowed_generators(HOST):
            done.set()

    threading.Thread(target=other, daemon=True).start()
    assert done.wait(20)


@pytest.mark.parametrize("later", BORROWERS)
@pytest.mark.parametrize("first", BORROWERS)
def test_workers_of_one_process_borrow_the_generators_one_after_the_other(
    first: str, later: str, seeded: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one would draw from the other's seed, and the last one would restore a seed of the other."""
    lock, entered, returned = threading.RLock(), threading.Event(), threading.Event()

    class SeenLock:
        def __enter__(self) -> None:
            if threading.current_thread() is other:
                entered.set()
            lock.acquire()

        def __exit__(self, *exc_info: object) -> None:
            lock.release()

    def borrow() -> None:
        with BORROWERS[later]():
            torch.manual_seed(2)
            entered.set()
            returned.wait(WITHIN_S)

    monkeypatch.setattr(sampler, "GENERATORS_LOCK", SeenLock(), raising=False)
    other = threading.Thread(target=borrow, daemon=True)
    torch.manual_seed(1)
    expected = drawn()
    torch.manual_seed(4)
    try:
        with BORROWERS[first]():
            torch.manual_seed(1)
            other.start()
            assert entered.wait(WITHIN_S)
            assert drawn() == expected
    finally:
        returned.set()
        other.join(WITHIN_S)
    assert drawn() == seeded
