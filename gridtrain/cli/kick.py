"""`gridtrain kick`: remove a member until it has a new invitation."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.operator_arguments import (
    known_keys,
    operator_for,
    present_keys,
    resolve_member,
    with_member_name,
)
from gridtrain.cli.option_flags import run_options


@click.command()
@click.argument("who")
@click.option("--reason", default="", metavar="TEXT", help="Sent to the worker and recorded in the journal.")
@run_options
def kick(who: str, reason: str, run: str, state: Path | None) -> None:
    """Remove a member from the run: WHO is its name, or at least 6 digits of its key.

    It is disconnected at once, and needs a new invitation to join again.  An open invitation with uses left
    admits the same person with another key: see `gridtrain invite --withdraw`.
    """
    from gridtrain.core.messages import RemoveWorker
    from gridtrain_coordinator.access.authorization_rules import clean_reason

    operator = operator_for(run, state)
    status = operator.status()
    known = known_keys(status)
    peer = resolve_member(who, known, present=present_keys(status))
    click.echo(with_member_name(peer, known, operator.order(RemoveWorker(peer, False, clean_reason(reason)))))
