"""Log texts and levels of the core's events (`io.LogEvent`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("gridtrain")

WARNING_EVENTS = ("drifted", "stalled", "offence", "no_route")
LEFT_BEHIND_TEXT = (
    "this worker was away too long, and the others continued without it; it is back, and takes the state of "
    "step %d"
)
UNREACHABLE_TEXT = (
    "other workers cannot connect to this one: a router or a firewall is in between; it dials the others "
    "itself, or is relayed, so it can train all the same"
)
EVENT_TEXTS = {
    "coordinator_away": "the coordinator is unreachable (%(reason)s); this worker keeps trying to reconnect, "
    "and training continues until a member is missing",
    "coordinator_ended": "the coordinator has ended (%(reason)s); the run is finished, and this worker waits "
    "for nobody",
    "named": "another worker of this run is called %(asked)s: this one is called %(name)s here",
    "namesake": "another worker that wanted this one's name has joined: it is called %(other)s, "
    "this one stays %(name)s",
}
"""Events that are warnings; `named` and `namesake` where two workers want one name, to both of them."""


def log_event(event: str, fields: Mapping[str, Any]) -> None:
    """See `member_events.LogEvent`."""
    match event:
        case "run_state":
            is_normal = fields["state"] in ("training", "finished")
            log.log(
                logging.INFO if is_normal else logging.WARNING, "the run is %(state)s: %(reason)s", fields
            )
        case "left_behind":
            log.warning(LEFT_BEHIND_TEXT, fields["step"] + 1)
        case "rejoin":
            log.warning("the coordinator removed this worker while it was away; it joins again")
        case _ if event in EVENT_TEXTS:
            log.warning(EVENT_TEXTS[event], fields)
        case "reach":
            address = fields["address"]
            log.info("%s", f"other workers reach this one at {address}" if address else UNREACHABLE_TEXT)
        case _:
            level = logging.WARNING if event in WARNING_EVENTS else logging.INFO
            log.log(level, "%s %s", event, " ".join(f"{k}={v}" for k, v in fields.items()))
