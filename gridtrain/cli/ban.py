"""`gridtrain ban`: options only; what it does is `protocol.door`."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.chosen import of_a_run
from gridtrain.cli.main import EXIT_CODES
from gridtrain.cli.orders import known_keys, named, operator_of, whom


@click.command(epilog=EXIT_CODES)
@click.argument("who")
@click.option("--reason", default="", metavar="TEXT", help="Told to the worker, and kept in the journal.")
@of_a_run
def ban(who: str, reason: str, run: str, state: Path | None) -> None:
    """Remove a member, and refuse its key even if it shows an invitation.

    WHO is its name, at least 6 digits of its key, or the whole key of somebody who is not there.
    """
    from gridtrain.protocol.door_rules import tidy
    from gridtrain.protocol.messages import Expel

    with operator_of(run, state) as operator:
        known = known_keys(operator.status())
        peer = whom(who, known, any_key=True)
        click.echo(named(peer, known, operator.order(Expel(peer, True, tidy(reason)))))
