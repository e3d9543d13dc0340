"""`gridtrain unban`: options only; what it does is `protocol.door`."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.chosen import of_a_run
from gridtrain.cli.main import EXIT_CODES
from gridtrain.cli.orders import known_keys, operator_of, whom


@click.command(epilog=EXIT_CODES)
@click.argument("key")
@of_a_run
def unban(key: str, run: str, state: Path | None) -> None:
    """Lift the ban of KEY, at least 6 digits of it: with a new invitation it may come back."""
    from gridtrain.protocol.messages import Pardon

    with operator_of(run, state) as operator:
        peer = whom(key, known_keys(operator.status(), banned=True), any_key=True)
        click.echo(operator.order(Pardon(peer)))
