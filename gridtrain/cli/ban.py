"""`gridtrain ban`: remove a member and refuse its key."""

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
def ban(who: str, reason: str, run: str, state: Path | None) -> None:
    """Remove a member, and refuse its key even with an invitation.

    WHO is its name, at least 6 digits of its key, or the complete key of a worker that is unknown here.
    """
    from gridtrain.core.messages import RemoveWorker
    from gridtrain_coordinator.access.authorization_rules import clean_reason

    operator = operator_for(run, state)
    status = operator.status()
    known = known_keys(status)
    peer = resolve_member(who, known, present=present_keys(status), any_key=True)
    click.echo(with_member_name(peer, known, operator.order(RemoveWorker(peer, True, clean_reason(reason)))))
