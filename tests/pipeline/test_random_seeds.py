"""The process's random generators: what a stage's layers draw, and that nobody else notices."""

from __future__ import annotations

import threading

import pytest
import torch
from pipeline_models import layers_of, run, stages_of

from gridtrain.pipeline.random_seeds import borrowed_generators

HOST = torch.device("cpu")


def drawn() -> float:
    return float(torch.rand(()))


@pytest.fixture(autouse=True)
def seeded() -> float:
    """What is drawn next, if nobody has drawn meanwhile."""
    torch.manual_seed(4)
    expected = drawn()
    torch.manual_seed(4)
    return expected


def test_a_step_leaves_the_generators_as_they_were(seeded: float) -> None:
    stages = stages_of(layers_of(dropout=True), 1)
    torch.manual_seed(4)
    run(stages, (2, 2, 2, 2))
    assert drawn() == seeded


def test_what_is_drawn_between_two_borrowers_counts(seeded: float) -> None:
    """Two stages in a process: one draws its batch while the other one is in the middle of a step."""
    with borrowed_generators(HOST):
        torch.manual_seed(1)
    batch = drawn()
    with borrowed_generators(HOST):
        torch.manual_seed(2)
    assert batch == seeded and drawn() != seeded


def test_a_borrower_that_fails_puts_back_what_it_found(seeded: float) -> None:
    with pytest.raises(ValueError, match="a layer"), borrowed_generators(HOST):
        torch.manual_seed(3)
        raise ValueError("a layer")
    assert drawn() == seeded


def test_a_generator_that_cannot_be_read_stops_no_other_stage(monkeypatch: pytest.MonkeyPatch) -> None:
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
