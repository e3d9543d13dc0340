"""`grid.mean` in a pipeline whose members change during the call, or which repeats steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from brisk import WITHIN_S
from pipeline_group import Seen, Workers

from gridtrain.runtime.client.agent_link import AgentDirective


def test_members_and_newcomers_receive_the_same_mean_although_the_group_changes(tmp_path: Path) -> None:
    means: dict[str, dict[int, float]] = {}
    is_reached = threading.Event()

    def before(seen: Seen, grid: Any, pipe: Any) -> None:
        if seen.name == "bert" and grid.step == 4 and not is_reached.is_set():
            is_reached.set()
            assert grid._session.connection.wait(lambda here: here.generation > 1, WITHIN_S)
        step = grid.step
        means.setdefault(seen.name, {})[step] = grid.mean({"anna": 0.0, "bert": 1.0}.get(seen.name, 0.5))

    with Workers(tmp_path, 2, steps=7, cuts=(0, 2, 4)) as workers:
        workers.before = before
        workers.add("anna"), workers.add("bert")
        assert is_reached.wait(WITHIN_S)
        workers.add("clara"), workers.add("dora")
        workers.finish("anna", "bert", "clara", "dora")
    assert means["anna"] == means["bert"] == dict.fromkeys(range(7), 0.5)
    assert means["clara"] == means["dora"] == dict.fromkeys(range(4, 7), 0.5)


def test_a_mean_of_a_repeated_step_has_no_value_from_before(tmp_path: Path) -> None:
    is_dead, victim = threading.Event(), [""]
    means: dict[str, list[tuple[int, float]]] = {}

    def before(seen: Seen, grid: Any, pipe: Any) -> None:
        step = grid.step
        mean = grid.mean(2.0 if seen.name == "carl" else 0.0 if is_dead.is_set() else 100.0)
        if is_dead.is_set():
            means.setdefault(seen.name, []).append((step, mean))
        elif step == 11 and pipe.stage == 1:
            victim[0] = seen.name
            group.kill(seen.name)
            is_dead.set()

    with Workers(tmp_path, 2, checkpoint_every=5, steps=13, cuts=(0, 2, 4)) as group:
        group.before = before
        group.add("anna"), group.add("bert")
        assert is_dead.wait(WITHIN_S)
        group.threads[victim[0]].join(WITHIN_S)
        (tmp_path / victim[0]).rename(tmp_path / "carl")
        group.add("carl")
        survivor = "anna" if victim[0] == "bert" else "bert"
        group.finish(survivor, "carl")
    assert means["carl"] == means[survivor][-3:] == [(step, 1.0) for step in (10, 11, 12)]


def test_a_worker_is_stopped_in_a_call_that_the_group_cannot_answer(tmp_path: Path) -> None:
    """The other stage has paused, so that no generation follows the one that was frozen."""
    is_called = threading.Event()

    def before(seen: Seen, grid: Any, pipe: Any) -> None:
        if seen.name == "anna" and seen.step >= 6:
            is_called.set()
            grid.mean(5.0)

    def after(seen: Seen, grid: Any, pipe: Any) -> None:
        if seen.name == "bert" and seen.step == 6:
            seen.owner.directive = AgentDirective(run=False, reason="its owner said so")

    with Workers(tmp_path, 2, checkpoint_every=100, steps=20, cuts=(0, 2, 4)) as workers:
        workers.before, workers.after = before, after
        workers.add("anna"), workers.add("bert")
        workers.wait(lambda: is_called.is_set() and workers.status()["phase"] == "paused")
        for name in ("anna", "bert"):
            workers.seen[name].owner.directive = AgentDirective(run=False, stop=True, reason="stop")
        for name in ("anna", "bert"):
            workers.threads[name].join(WITHIN_S)
            assert not workers.threads[name].is_alive()
