"""`gridtrain invite`: prints a new invitation, valid for a limited number of uses and a limited time.

Instructions for its use go to stderr.

The secret token is generated in this process; the coordinator receives only its public key.
"""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gridtrain.cli.member_lookup import operator_for
from gridtrain.cli.option_flags import default_option, run_options
from gridtrain.cli.output import TEXT_WIDTH
from gridtrain.quantities import format_count, format_duration, parse_duration_s

if TYPE_CHECKING:
    from gridtrain.core.group.invitation import Invitation

MIN_VALIDITY_S = 1.0
MAX_DURATION_S = 1e14
_LOOPBACK = re.compile(r"tcp://(127\.[0-9.]+|localhost|\[::1\]):\d+")


def _parse_duration(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Parse an option's duration, such as "90s", "15m", "12h" or "7d", into seconds."""
    found = parse_duration_s(text)
    if found is None or found > MAX_DURATION_S:
        raise click.BadParameter(f"{text!r} is not a duration; use, for instance, 90s, 15m, 12h or 7d")
    return found


def _validity(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Parse the validity; return it in seconds.  It must not be 0, which would withdraw the invitation."""
    from gridtrain_coordinator.access.authorization_limits import MAX_EXPIRES_S

    value_s = _parse_duration(context, parameter, text)
    if not MIN_VALIDITY_S <= value_s <= MAX_EXPIRES_S:
        bounds = f"{format_duration(MIN_VALIDITY_S)} and {format_duration(MAX_EXPIRES_S)}"
        raise click.BadParameter(f"{text!r} is not between {bounds}")
    return value_s


@click.command()
@run_options
@default_option("--uses", 1, "Number of workers that may join.", type=click.IntRange(1, 10_000), metavar="N")
@default_option(
    "--expires", "7d", "Time until it expires, such as 90s, 15m, 12h or 7d; at most 366d.",
    callback=_validity, metavar="TIME",
)  # fmt: skip
@click.option(
    "--address", metavar="ADDRESS",
    help="Coordinator's address for volunteers.  [default: the advertised address]",
)  # fmt: skip
@click.option(
    "--wait",
    callback=_parse_duration,
    metavar="TIME",
    default="0s",
    help="Wait this long for a coordinator that is starting.",
)
@click.option(
    "--until-joined", callback=_parse_duration, metavar="TIME", default="0s",
    help="Then wait this long for workers to join.",
)  # fmt: skip
@click.option("--withdraw", metavar="INVITATION", help="Withdraw this invitation instead of creating one.")
def invite(
    run: str,
    state: Path | None,
    uses: int,
    expires: float,
    address: str | None,
    wait: float,
    until_joined: float,
    withdraw: str | None,
) -> None:
    """Create an invitation to the run that is coordinated on this machine.

    \b
      gridtrain invite                         for one worker, for a week
      gridtrain invite --uses 20 --expires 2d  for a class
      gridtrain invite --until-joined 10m      and wait until its worker joins

    Prints one line.  Send it to the volunteer over a private channel, because the first person who uses it
    can join.  An admitted worker stays admitted until you kick it.

    --until-joined reports on stderr who joins.  The exit code is 0 when --uses workers are members, and 1 if
    the time runs out first; the invitation then stays valid.
    """
    from gridtrain.cli.invited_workers import await_members
    from gridtrain.core.group.invitation import parse
    from gridtrain.network.addresses import check_reachable, parse_coordinator_address

    old = None if withdraw is None else parse(withdraw)
    if address is not None:
        check_reachable("--address", parse_coordinator_address(address))
    operator = operator_for(run, state, wait)
    if old is not None:
        click.echo(operator.withdraw(old), err=True)
        return
    given = ""
    if address is not None:
        port = int(operator.endpoint.file.address.rpartition(":")[2])
        given = parse_coordinator_address(address, port)
    invitation = operator.invite(uses, expires, given)
    click.echo(invitation.text())  # before anything can fail, because it is valid from now on
    status = operator.status()
    file = operator.endpoint.file
    wider = next((known for known in (file.address, file.here) if not _LOOPBACK.fullmatch(known)), "")
    told = explanation(invitation, uses, expires, time.time(), bool(status.get("bundle")), wider)
    click.echo(told, err=True)
    if status.get("finished"):
        click.echo(
            f'The run "{invitation.run}" has finished: workers that use the invitation are refused.  Start '
            "another coordinator with a new --state.",
            err=True,
        )
    if until_joined:
        await_members(operator.status, invitation, uses, until_joined)


def explanation(
    invitation: Invitation, uses: int, expires_s: float, wall_s: float, has_bundle: bool, wider: str = ""
) -> str:
    """Return instructions for using a new invitation; they do not contain its token.

    Args:
        wall_s: the current time, in seconds since the epoch.
        has_bundle: whether the coordinator serves the script, so that the volunteer needs no command.
        wider: an address of the coordinator that other machines can reach; "" if the coordinator listens only
            on this machine.
    """
    from gridtrain.core.group.invitation import comparable_key

    workers = format_count(uses, "worker")
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_s + expires_s))
    clear = "" if invitation.encrypted else " --unencrypted"
    told = f'An invitation to the run "{invitation.run}" for {workers}, '
    told += f"valid for {format_duration(expires_s)} (until {until}).  The volunteer types:"
    lines = [
        *textwrap.wrap(told, TEXT_WIDTH),
        f"  gridtrain worker INVITATION{clear}{'' if has_bundle else ' -- python train.py'}",
    ]
    if has_bundle:
        lines += ["and compares the coordinator's key:", f"  {comparable_key(invitation.coordinator)}"]
    if _LOOPBACK.fullmatch(invitation.address):
        told = f"It contains the address {invitation.address}, which only this machine can reach; "
        what = "create an invitation with" if wider else "start the coordinator with"
        lines += textwrap.wrap(f"{told}to admit other machines, {what}", TEXT_WIDTH)
        host, _, port = invitation.address.rpartition(":")
        everywhere = f'"tcp://[::]:{port}"' if host.endswith("]") else f"tcp://0.0.0.0:{port}"
        lines.append(f"  --address {wider}" if wider else f"  --listen {everywhere}")
    return "\n".join(lines)
