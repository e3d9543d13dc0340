"""The messages that a worker logs for events of its core, for example when a step stalls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gridtrain.quantities import MAX_NAMES, list_first

log = logging.getLogger("gridtrain")

UNREACHABLE_TEXT = (
    "other workers cannot connect to this worker because of a router or a firewall; this worker connects to "
    "them directly or through a relay, so it can still train"
)
EVENT_TEXTS = {
    "drifted": "this worker's model differs from the other members' models at step %(step)s; this worker is "
    "receiving their model "
    "(possible causes: a script changed the weights of one worker only, for example with load_state_dict; "
    "an optimizer keeps values outside of its state_dict, or depends on the number of threads, as Muon does)",
    "stalled": "the step is making no progress (%(reason)s); a new generation is being requested",
    "dismissed": "the group continues without this worker: it %(reason)s",
    "left_out": "the group continues without this worker, which %(reason)s; it will rejoin when its training "
    "loop continues (if its batches take that long: global_batch_size gives a slow worker fewer samples, and "
    "with LocalSteps the limit is longer)",
    "left_behind": "the group continued without this worker, which had completed step %(step)s; this worker "
    "has rejoined and is receiving the group's state",
    "set_back": "the group returned to step %(to)s without this worker, which had completed step %(step)s; "
    "this worker has rejoined and is receiving the group's state",
    "offence": "%(peer)s violated the protocol: %(reason)s",
    "no_route": "these workers are away, or cannot be reached directly and need a relay: %(peers)s",
    "offline": "this worker reaches neither the coordinator nor any other worker, so its own network is "
    "probably down; it keeps trying to reconnect",
    "not_learning": "%(reason)s",
    "resumed": "the run is training again: %(reason)s",
    "coordinator_away": "the coordinator is unreachable (%(reason)s); this worker keeps trying to reconnect, "
    "and training continues until a member is missing",
    "coordinator_ended": "the coordinator has stopped (%(reason)s); the run has finished, and this worker "
    "is no longer waiting",
    "named": "another worker of this run is called %(asked)s, so this worker is called %(name)s",
    "namesake": "another worker that requested the same name has joined; it is called %(other)s, "
    "and this worker is still called %(name)s",
}
"""The messages of events that are logged as warnings.  If two workers request the same name, the worker that
gets another name logs `named`, and the worker that keeps the name logs `namesake`."""


def describe_run_state(state: str, reason: str) -> str:
    """Return a text about the run's state, such as "the run is waiting for 2 workers".

    The state is left out if `reason`, the coordinator's explanation of it, begins with the state.
    """
    return f"the run is {'' if reason.startswith(state) else f'{state}: '}{reason}"


def describe_awaited(names: Sequence[str]) -> str:
    return f"the members wait for the state to reach {list_first(names, MAX_NAMES)}"


def log_event(event: str, fields: Mapping[str, Any]) -> None:
    """Log an event of the core with its fields.  See `member_events.LogEvent`."""
    match event:
        case "run_state":
            level = logging.INFO if fields["state"] in ("training", "finished") else logging.WARNING
            log.log(level, "%s", describe_run_state(fields["state"], fields["reason"]))
        case "rejoin":
            log.warning("the coordinator removed this worker while it was disconnected; it is rejoining")
        case _ if event in EVENT_TEXTS:
            log.warning("%s", EVENT_TEXTS[event] % fields)
        case "awaited":
            log.info("%s", describe_awaited(fields["names"]))
        case "reach":
            address = fields["address"]
            log.info("%s", f"other workers reach this worker at {address}" if address else UNREACHABLE_TEXT)
        case _:
            log.info("%s %s", event, " ".join(f"{k}={v}" for k, v in fields.items()))
