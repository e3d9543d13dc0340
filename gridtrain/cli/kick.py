"""`gridtrain kick`: removes a worker until it has a new invitation."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.member_lookup import remove_member
from gridtrain.cli.option_flags import run_options


@click.command()
@click.argument("who")
@click.option("--reason", default="", metavar="TEXT", help="Sent to the worker and recorded in the journal.")
@run_options
def kick(who: str, reason: str, run: str, state: Path | None) -> None:
    """Remove a member from the run: WHO is the member's name, or at least the first 6 digits of its key.

    The member is disconnected immediately, and needs a new invitation to rejoin.  An open invitation with
    uses left admits the same person with another key: see `gridtrain invite --withdraw`.
    """
    remove_member(who, reason, run, state, ban=False)
