"""Messages of a worker to its owner about the run."""

from __future__ import annotations

import logging

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import LogEvent, Stop
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.runtime.event_log import log_event


def test_the_ends_of_a_pause_and_of_skipped_steps_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the last message would be that the run is paused, also after it has resumed."""
    link = CoordinatorLink(b"0" * 32, m.Join("r", "a", ""))
    announced = [
        ("waiting", "waiting for 2 workers"),
        ("training", "2 workers since step 0"),
        ("paused", "the coordinator restarted"),
        ("training", "2 workers since step 7"),
        ("training", "nothing is being learned: the last 11 steps were skipped"),
        ("training", "steps are applied again, near step 40"),
        ("training", "2 workers since step 41"),
    ]
    caplog.set_level(logging.WARNING, "gridtrain")
    for state, reason in announced:
        for effect in link.receive(m.RunStateUpdate(state, reason)):
            assert isinstance(effect, LogEvent)
            log_event(effect.event, effect.fields)
    assert caplog.messages == [
        "the run is waiting for 2 workers",
        "the run is paused: the coordinator restarted",
        "the run is training again: 2 workers since step 7",
        "nothing is being learned: the last 11 steps were skipped",
        "the run is training again: steps are applied again, near step 40",
    ]


def test_a_removed_worker_gets_a_complete_sentence() -> None:
    link = CoordinatorLink(b"0" * 32, m.Join("r", "a", ""))
    (stop,) = link.receive(m.Refused("kicked", "was removed from the run: too slow", "ask"))
    assert (
        isinstance(stop, Stop) and str(stop.error) == "this worker was removed from the run: too slow -> ask"
    )


def test_a_warning_is_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    log_event("stalled", {"reason": "no vote from rank 2"})
    log_event("drifted", {"step": 500})
    log_event("left_behind", {"step": 993})
    log_event("set_back", {"step": 993, "to": 806})
    log_event("offline", {})
    assert caplog.messages == [
        "the step is making no progress (no vote from rank 2); a new generation is being requested",
        "this worker's model differs from the other members' models at step 500; this worker is receiving "
        "their model (possible causes: a script changed the weights of one worker only, for example with "
        "load_state_dict; an optimizer keeps values outside of its state_dict, or depends on the number of "
        "threads, as Muon does)",
        "the group continued without this worker, which had completed step 993; this worker has rejoined and "
        "is receiving the group's state",
        "the group returned to step 806 without this worker, which had completed step 993; this worker has "
        "rejoined and is receiving the group's state",
        "this worker reaches neither the coordinator nor any other worker, so its own network is probably "
        "down; it keeps trying to reconnect",
    ]
