"""`gridtrain unban`: lifts a ban."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.member_lookup import known_keys, operator_for, resolve_member, with_member_name
from gridtrain.cli.option_flags import run_options
from gridtrain.cli.output import wrap_text


@click.command()
@click.argument("who")
@run_options
def unban(who: str, run: str, state: Path | None) -> None:
    """Lift a ban, so that the worker can return with a new invitation.

    WHO is the worker's name when it was banned, or at least the first 6 digits of its key.
    """
    from gridtrain.core.messages import Unban

    operator = operator_for(run, state)
    known = known_keys(operator.status(), banned=True)
    peer = resolve_member(who, known, any_key=True, kind="banned ")
    click.echo(wrap_text(with_member_name(peer, known, operator.order(Unban(peer)))))
