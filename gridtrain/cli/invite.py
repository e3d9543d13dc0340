"""`gridtrain invite`: a new invitation on stdout, what it is good for on stderr.

Decides how that is told.  The token is made in this process; the coordinator is only told its public half.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gridtrain.cli.main import EXIT_CODES
from gridtrain.cli.orders import of_a_run, operator_of, seconds, shown_duration

if TYPE_CHECKING:
    from gridtrain.protocol.invitation import Invitation

LEAST_VALID_S = 1.0
_LOOPBACK = re.compile(r"tcp://(127\.[0-9.]+|localhost|\[::1\]):\d+")


def _validity(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """As `seconds`; an invitation for no time at all would be a withdrawal."""
    from gridtrain.protocol.door_rules import MAX_EXPIRES_S

    value_s = seconds(context, parameter, text)
    if not LEAST_VALID_S <= value_s <= MAX_EXPIRES_S:
        bounds = f"{shown_duration(LEAST_VALID_S)} and {shown_duration(MAX_EXPIRES_S)}"
        raise click.BadParameter(f"{text!r} is not between {bounds}")
    return value_s


@click.command(epilog=EXIT_CODES)
@of_a_run
@click.option(
    "--uses", type=click.IntRange(1, 10_000), default=1, show_default=True, metavar="N",
    help="How many workers may come in with it.",
)  # fmt: skip
@click.option(
    "--expires", callback=_validity, metavar="TIME", default="7d",
    show_default=True, help="How long it is valid: 90s, 15m, 12h, 7d; 366d at most.",
)  # fmt: skip
@click.option(
    "--address", default="", metavar="ADDRESS",
    help="Where the volunteer reaches the coordinator.  [default: what the coordinator advertises]",
)  # fmt: skip
@click.option(
    "--wait", callback=seconds, metavar="TIME", default="0s", help="For a coordinator that is starting."
)
@click.option("--withdraw", default="", metavar="INVITATION", help="Make this one invalid instead.")
def invite(
    run: str, state: Path | None, uses: int, expires: float, address: str, wait: float, withdraw: str
) -> None:
    """Let volunteers into the run that is coordinated on this machine.

    \b
      gridtrain invite                         for one worker, for a week
      gridtrain invite --uses 20 --expires 2d  for a class

    Prints one line: give it to the volunteer over a channel that you trust, as whoever reads it first
    may come in.  A worker that came in stays in until you kick it.
    """
    from gridtrain.protocol.invitation import parse
    from gridtrain.runtime.client import coordinator_address

    given = coordinator_address(address) if address else ""
    old = parse(withdraw) if withdraw else None
    with operator_of(run, state, wait) as operator:
        if old is not None:
            click.echo(operator.withdraw(old), err=True)
            return
        invitation = operator.invite(uses, expires, given)
    click.echo(invitation.text())
    click.echo(explained(invitation, uses, expires, time.time()), err=True)


def explained(invitation: Invitation, uses: int, expires_s: float, wall_s: float) -> str:
    """For the person who has just made it; the token is not in it."""
    workers = "one worker" if uses == 1 else f"{uses} workers"
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_s + expires_s))
    clear = "" if invitation.encrypted else " --unencrypted"
    lines = [
        f'An invitation to the run "{invitation.run}" for {workers}, valid for '
        f"{shown_duration(expires_s)} (until {until}).  The volunteer types:",
        f"  gridtrain worker INVITATION{clear} -- python train.py",
    ]
    if _LOOPBACK.fullmatch(invitation.address):
        lines.append(
            f"It leads to {invitation.address}, which only this machine can reach; for others start the "
            "coordinator with --listen tcp://0.0.0.0:7700."
        )
    return "\n".join(lines)
