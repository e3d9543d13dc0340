"""`gridtrain ban`: removes a worker and refuses its key from then on."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.member_lookup import remove_member
from gridtrain.cli.option_flags import run_options


@click.command()
@click.argument("who")
@click.option("--reason", default="", metavar="TEXT", help="Sent to the worker and recorded in the journal.")
@run_options
def ban(who: str, reason: str, run: str, state: Path | None) -> None:
    """Remove a member and refuse its key even with an invitation.

    WHO is the member's name, at least the first 6 digits of its key, or the whole key of an unknown worker.
    """
    remove_member(who, reason, run, state, ban=True)
