"""`gridtrain members`: prints the table of members, open invitations, bans and violations.

Names and reasons come from workers.  They are never interpreted as markup, and the client has already removed
control characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.member_lookup import NO_NAME, SHOWN_KEY_DIGITS, known_keys, operator_for
from gridtrain.cli.option_flags import run_options
from gridtrain.cli.output import make_console
from gridtrain.quantities import format_duration
from gridtrain.status_fields import by_rank, count, rows

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

COLUMNS = ("name", "key", "state", "violations", "reach")
MIN_WIDTH = 56
"""On a narrower terminal, the last two columns are omitted; all columns but the name have a fixed width."""

MAX_LINES = 50  # per kind of line below the table


@click.command()
@run_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print members, invitations and bans as one JSON object."
)
def members(run: str, state: Path | None, as_json: bool) -> None:
    """List the members, invitations and bans of the run that is coordinated on this machine.

    A member is an admitted key; "away" means that its worker is not connected.
    """
    status = operator_for(run, state).status()
    if as_json:
        click.echo(json.dumps({name: status.get(name) for name in ("run", "members", "door")}))
    else:
        console = make_console()
        console.print(render(status, console.width))


def render(status: Mapping[str, Any], width: int = 80) -> Group:
    """Return the table of members, followed by open invitations, banned keys and violations."""
    from rich.console import Group
    from rich.text import Text

    access = status.get("door")
    below = [
        *_invitations(access),
        *_removed(access),
        *_banned(access),
        *_violations(access, known_keys(status)),
    ]
    if not any(member_rows(status)):
        below.insert(0, "no worker has been admitted yet; create an invitation with gridtrain invite")
        return Group(*map(Text, below))
    return Group(
        members_table(status, width), *(Text(line, no_wrap=True, overflow="ellipsis") for line in below)
    )


def members_table(status: Mapping[str, Any], width: int) -> Table:
    """Return a table that lists the connected members by rank, and then the members that are away."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    drawn.add_column("rank", justify="right", no_wrap=True)
    drawn.add_column("name", overflow="fold")
    shown = COLUMNS if width >= MIN_WIDTH else COLUMNS[:-2]
    for heading in shown[1:]:
        drawn.add_column(heading, justify="right" if heading == "violations" else "left", no_wrap=True)
    for cells in member_rows(status):
        drawn.add_row(*(Text(cell) for cell in cells[: 1 + len(shown)]))
    return drawn


def member_rows(status: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    joined = rows(status, "members")
    here = {line.get("peer") for line in joined if isinstance(line.get("peer"), str)}
    for line in sorted(joined, key=by_rank):
        yield (
            count(line.get("rank")),
            str(line.get("name", "?")),
            _key(line),
            str(line.get("state", "?")),
            count(line.get("strikes")),
            str(line.get("reach") or "-"),
        )
    for line in rows(status.get("door"), "enrolled"):
        if _key(line) and line.get("peer") not in here:
            yield ("-", str(line.get("name", NO_NAME)), _key(line), "away", count(line.get("strikes")), "-")


def _invitations(access: Any) -> Iterator[str]:
    for line in rows(access, "invitations")[:MAX_LINES]:
        left_s = line.get("left_s")
        left = format_duration(left_s) if isinstance(left_s, int | float) else "?"
        used = f"{count(line.get('used'))} of {count(line.get('uses'))} uses"
        yield f"invitation {line.get('id', '?')!s}: {used}, {left} left"


def _removed(access: Any) -> Iterator[str]:
    for line in rows(access, "removed")[-MAX_LINES:]:
        yield f"removed {line.get('name', NO_NAME)!s} {_key(line)}: a new invitation admits it again"


def _banned(access: Any) -> Iterator[str]:
    for line in rows(access, "banned")[:MAX_LINES]:
        name = f"{line['name']!s} " if line.get("name") else ""
        yield f"banned {name}{_key(line)}: {line.get('reason', '')!s}"


def _violations(access: Any, known: Mapping[str, str]) -> Iterator[str]:
    for line in rows(access, "strikes")[:MAX_LINES]:
        who = known.get(str(line.get("peer")), NO_NAME)
        for one in rows(line, "said"):
            by, reason = one.get("by", "?"), one.get("reason", "")
            yield f"violation by {who} {_key(line)}, reported by {by!s}: {reason!s}"


def _key(line: Mapping[str, Any]) -> str:
    return str(line.get("peer", "?"))[:SHOWN_KEY_DIGITS]
