"""`gridtrain unban`: options only; what it does is `protocol.door`."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.chosen import of_a_run
from gridtrain.cli.main import EXIT_CODES
from gridtrain.cli.orders import known_keys, named, operator_of, whom


@click.command(epilog=EXIT_CODES)
@click.argument("who")
@of_a_run
def unban(who: str, run: str, state: Path | None) -> None:
    """Lift a ban: with a new invitation its worker may come back.

    WHO is the name that it had when it was banned, or at least 6 digits of its key.
    """
    from gridtrain.protocol.messages import Pardon

    with operator_of(run, state) as operator:
        known = known_keys(operator.status(), banned=True)
        peer = whom(who, known, any_key=True)
        click.echo(named(peer, known, operator.order(Pardon(peer))))
