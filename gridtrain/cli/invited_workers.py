"""`gridtrain invite --until-joined`: waits until all invited workers are members, and reports each of them.

Asks the coordinator twice a second, and keeps waiting while the coordinator restarts.  A worker is admitted
when it enrols its key with the invitation, and becomes a member when it has joined and its setup was
accepted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.member_lookup import SHOWN_KEY_DIGITS
from gridtrain.errors import CoordinatorUnreachable, GridtrainError
from gridtrain.quantities import format_count, format_duration
from gridtrain.status_fields import rows

if TYPE_CHECKING:
    from gridtrain.core.group.invitation import Invitation

POLL_S = 0.5
ANSWER_TIMEOUT_S = 5.0
MEMBER_STATES = ("admitted", "spare", "following", "active")
"""The states in `gridtrain status` of workers whose setup was accepted."""

StatusQuery = Callable[[float], dict[str, Any]]
EventPrinter = Callable[[str, str, dict[str, Any]], None]


class JoinTimeout(GridtrainError):
    """Fewer workers than expected became members in time."""


@dataclass
class JoinProgress:
    """The workers that joined with one invitation.

    Attributes:
        id: the first 8 digits of the invitation's digest, by which a status refers to it.
        wanted: the number of workers to wait for.
        print_event: called with each event: its name, a text and the fields of the JSON line.
        admitted: the keys of the workers that were admitted.
        members: the names of the workers that have become members, by key.
    """

    id: str
    wanted: int
    print_event: EventPrinter
    admitted: set[str] = field(default_factory=set)
    members: dict[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.members) >= self.wanted

    def update(self, status: Mapping[str, Any]) -> None:
        """Record and report the workers that were admitted or have become members since the last call."""
        for line in rows(status.get("door"), "enrolled"):
            peer = str(line.get("peer"))
            if line.get("invitation") == self.id and peer not in self.admitted:
                self.admitted.add(peer)
                key = peer[:SHOWN_KEY_DIGITS]
                self.print_event("let_in", f"key {key} was admitted; its script is starting", {"peer": key})
        for line in rows(status, "members"):
            peer, state = str(line.get("peer")), str(line.get("state"))
            if peer in self.admitted and peer not in self.members and state in MEMBER_STATES:
                name, rank = str(line.get("name")), line.get("rank")
                self.members[peer] = name
                place = f"rank {rank}" if isinstance(rank, int) else state
                of = f"{len(self.members)} of {self.wanted}"
                fields = {"peer": peer[:SHOWN_KEY_DIGITS], "name": name, "state": state, "rank": rank}
                self.print_event("member", f"{name} is a member ({place}); {of}", fields)

    def text(self) -> str:
        """Return the progress as text."""
        here = f"{len(self.members)} of {format_count(self.wanted, 'worker')} joined"
        coming = len(self.admitted) - len(self.members)
        return here + (f", {coming} more {'was' if coming == 1 else 'were'} admitted" if coming else "")


def await_members(
    ask: StatusQuery,
    invitation: Invitation,
    uses: int,
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    say: EventPrinter | None = None,
) -> None:
    """Wait until `uses` workers that joined with the invitation are members.

    Raises:
        JoinTimeout: fewer workers are members after `patience_s`, or when the run finishes.
        CoordinatorUnreachable: the coordinator does not answer when the time runs out.
    """
    from gridtrain.core.group.invitation import invitation_digest
    from gridtrain.network.transport.identity import Identity

    arrivals = JoinProgress(
        invitation_digest(Identity.from_secret(invitation.token).public)[:8],
        uses,
        say or print_event_on_stderr,
    )
    until_s, away = clock() + patience_s, False
    arrivals.print_event(
        "waiting",
        f"waiting {format_duration(patience_s)} for workers to join (Ctrl-C stops waiting)",
        {"workers": uses},
    )
    while True:
        try:
            status = ask(min(ANSWER_TIMEOUT_S, max(POLL_S, until_s - clock())))
            away = False
        except CoordinatorUnreachable as error:
            if clock() >= until_s:
                raise
            if not away:
                arrivals.print_event("away", f"the coordinator does not answer: {error.reason}", {})
            away, status = True, {}
        arrivals.update(status)
        if arrivals.is_complete:
            return
        if status.get("finished"):
            raise JoinTimeout(f"{arrivals.text()}, and the run has finished", remedy="start a new run")
        if clock() >= until_s:
            raise JoinTimeout(
                f"{arrivals.text()} within {format_duration(patience_s)}",
                remedy="run `gridtrain doctor INVITATION` on the volunteer's machine to find the reason, and "
                "`gridtrain members` to see who has joined; the invitation stays valid",
            )
        pause(min(POLL_S, max(0.0, until_s - clock())))


def print_event_on_stderr(event: str, text: str, fields: dict[str, Any]) -> None:
    """Print a sentence on a terminal; elsewhere print a JSON line as in the logs of workers and
    the coordinator."""
    if sys.stderr.isatty():
        click.echo(text, err=True)
        return
    from gridtrain_coordinator.log import log_to

    log_to(sys.stderr, "json")("info", event, {"text": text, **fields})
