"""What people read in the log of what the core notes.

Decides the words and how loud they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("gridtrain")

WARNING_EVENTS = ("drifted", "stalled", "offence", "no_route")
LEFT_BEHIND_TEXT = (
    "this worker was away for so long that the others went on without it; it is back, and takes over "
    "the state of step %d"
)
UNREACHABLE_TEXT = (
    "nobody from outside can reach this worker: a router or a firewall is in between; "
    "it dials the others itself, or is relayed, so it can train all the same"
)
EVENT_TEXTS = {
    "coordinator_away": "the coordinator is away (%(reason)s); this worker tries to reach it again, and the "
    "training goes on until a member is missing",
    "coordinator_ended": "the coordinator has ended (%(reason)s); the run is finished, and this worker waits "
    "for nobody",
    "named": "another worker of this run is called %(asked)s: this one is called %(name)s here",
    "namesake": "another worker that wanted this one's name has joined: it is called %(other)s, "
    "this one stays %(name)s",
}
"""Events in words; `named` and `namesake` where two workers want one name, to both of them."""


def log_event(event: str, fields: Mapping[str, Any]) -> None:
    """See `member_io.Note`."""
    match event:
        case "run_state":
            quiet = fields["state"] in ("training", "finished")
            log.log(logging.INFO if quiet else logging.WARNING, "the run is %(state)s: %(reason)s", fields)
        case "left_behind":
            log.warning(LEFT_BEHIND_TEXT, fields["step"] + 1)
        case "rejoin":
            log.warning("the coordinator has let this worker go while it was away; it joins again")
        case _ if event in EVENT_TEXTS:
            log.warning(EVENT_TEXTS[event], fields)
        case "reach":
            address = fields["address"]
            log.info("%s", f"others reach this worker at {address}" if address else UNREACHABLE_TEXT)
        case _:
            level = logging.WARNING if event in WARNING_EVENTS else logging.INFO
            log.log(level, "%s %s", event, " ".join(f"{k}={v}" for k, v in fields.items()))
