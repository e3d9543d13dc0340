"""`gridtrain status`: prints a run's state, a table of its members, problems and events, or JSON.

Names, facts and events come from workers.  They are never interpreted as markup, and the client has already
removed control characters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.option_flags import run_options
from gridtrain.cli.output import PLAIN_WIDTH, make_console
from gridtrain.event_text import event_text
from gridtrain.quantities import format_age, format_bytes, format_count, format_worker_state
from gridtrain.status_fields import by_rank, count, mapping, number, rows

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.table import Table

    from gridtrain.runtime.client.coordinator_client import CoordinatorClient
    from gridtrain.runtime.client.operator_client import OperatorClient

ANSWER_TIMEOUT_S = 4.0
REFRESH_S = 1.0
RECONNECT_TIMEOUT_S = 30.0
"""With --watch, how long a coordinator may take to restart before the command fails."""

RECENT_EVENTS = 5
PHASE_STYLES = {"waiting": "yellow", "training": "green", "paused": "red", "finished": "cyan"}
COLUMNS = ("share", "step", "up/s", "down/s", "comp.", "select", "comm.", "wait", "heard")
DROP_ORDER = ("select", "wait", "reach", "comm.", "comp.", "heard", "down/s")
"""The columns to drop on a narrow terminal, in this order.  Names must stay readable for use in commands."""

NAME_WIDTH = 16
SECONDS = ("computing_s", "selecting_s", "communicating_s", "waiting_s")


@click.command()
@click.argument("invitation", required=False)
@run_options
@click.option("--watch", is_flag=True, help="Refresh once a second until Ctrl-C or the end of the run.")
@click.option(
    "--json/--table",
    "as_json",
    default=None,
    help="Output format: a table, or one line of JSON per refresh.  [default: a table on a terminal]",
)
def status(invitation: str | None, run: str, state: Path | None, watch: bool, as_json: bool | None) -> None:
    """Show the members, generation, step and rates of a run.

    \b
      gridtrain status                    the run coordinated on this machine
      gridtrain status gridtrain1:AbC...  another run, with this machine's key
      gridtrain status @FILE              the same, from a file; -: from stdin

    Prints a table on a terminal; elsewhere the coordinator's answer, one JSON object per line.
    """
    as_json = not sys.stdout.isatty() if as_json is None else as_json
    with client_for(invitation, run, state) as client:
        if not watch:
            status = client.status(ANSWER_TIMEOUT_S)
            click.echo(json.dumps(status)) if as_json else make_console().print(render(status))
        elif as_json:
            _follow(client.status)
        else:
            _watch(client.status)


@contextmanager
def client_for(
    invitation: str | None, run: str, state: Path | None
) -> Iterator[CoordinatorClient | OperatorClient]:
    """Yield a client of the coordinator that `invitation` names; if it is None, an operator's client of this
    machine's coordinator."""
    from gridtrain.cli.worker import read_invitation
    from gridtrain.runtime.client.enrollment import enroll
    from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient

    if invitation is None:
        yield OperatorClient(CoordinatorEndpoint.find(run, state))
        return
    invited = read_invitation(invitation)
    with (
        enroll(invited, ANSWER_TIMEOUT_S, unencrypted=not invited.encrypted) as entry,
        entry.connect() as client,
    ):
        yield client


def _follow(ask: Any) -> None:
    while not (status := ask(RECONNECT_TIMEOUT_S)).get("finished"):
        click.echo(json.dumps(status))
        time.sleep(REFRESH_S)
    click.echo(json.dumps(status))


def _watch(ask: Any) -> None:
    from rich.live import Live

    with Live(render(ask(ANSWER_TIMEOUT_S)), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            status = ask(RECONNECT_TIMEOUT_S)
            live.update(render(status), refresh=True)
            if status.get("finished"):
                return


def render(status: Mapping[str, Any]) -> Group:
    """Return a summary of the run, the table of members, and the latest events."""
    from rich.console import Group
    from rich.text import Text

    phase, alert = str(status.get("phase", "?")), str(status.get("alert") or "")
    head = Text.assemble(
        ("run ", "dim"), (str(status.get("run", "?")), "bold"), "  ",
        (phase, "red" if alert else PHASE_STYLES.get(phase, "")), "  ",
        (f"{alert}; " if alert else "", "red"), str(status.get("reason", "")),
    )  # fmt: skip
    samples, loss = status.get("skipped_samples"), status.get("loss")
    skipped = f" ({count(samples)} samples skipped)" if samples else ""
    figures = Text(
        f"term {count(status.get('term'))}  generation {count(status.get('generation'))}  "
        f"step {count(status.get('step'))}{_total(status)}{skipped}  "
        f"{number(status.get('steps_per_s'), '{:.2f}'.format)} steps/s{_remaining(status)}"
        + (f"  loss {loss:.4g}" if isinstance(loss, int | float) else "")
    )
    facts = [f"{name}: {value}" for name, value in mapping(status.get("facts")).items()]
    if why := str(status.get("exchange_reason") or ""):
        facts.append(f"exchange chosen: {why}")
    if why := str(status.get("entry_shares_reason") or ""):
        facts.append(why)
    now_s = status.get("now_s")
    spare = next((str(m["spare"]) for m in rows(status, "members") if m.get("spare")), "")
    facts += [spare] if spare else []
    recent = rows(status, "events")[-RECENT_EVENTS:]
    events = [_event(event, now_s) for event in recent]

    def dim(lines: list[str]) -> list[Text]:
        return [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in lines]

    facts += base_lines(status) + received_states(status)
    notes = [Text(line, no_wrap=True, overflow="ellipsis") for line in paused_lines(status)]
    notes += [Text(line, style="yellow") for line in problem_lines(status) + refused_lines(status)]
    if slow := mapping(status.get("waited_for")):
        notes.append(Text(f"the others wait for {slow.get('name')}, which {slow.get('reason')}"))
    return Group(head, figures, *dim(facts), MembersTable(status), *notes, *dim(events))


class MembersTable:
    """The table of members, with as many columns as fit."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.measure import Measurement

        unbounded, without = options.update(width=10_000), 0
        if options.max_width < PLAIN_WIDTH:
            for without in range(len(DROP_ORDER) + 1):
                table = members_table(self._status, DROP_ORDER[:without], NAME_WIDTH)
                if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                    break
        yield members_table(self._status, DROP_ORDER[:without])


def members_table(
    status: Mapping[str, Any], without: Sequence[str] = (), name_width: int | None = None
) -> Table:
    """Return a table with a row for each member.

    Among other things, a row shows whether others can connect to the member, its bytes per second, the times
    of its latest step (computing, selecting, communicating, waiting), and the time since its last message.
    The stage is shown only in a pipeline, and violations (see `gridtrain members`) only if there are any.

    Args:
        without: the headings of columns to leave out.
        name_width: the largest width of names; None for no limit.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    members = sorted(rows(status, "members"), key=by_rank)
    in_stages = isinstance(status.get("stages"), int) and status["stages"] > 1
    has_violations = any(member.get("strikes") for member in members)
    headings = (
        *("rank", *(("stage",) if in_stages else ()), "name", "state", "reach"),
        *(*(("violations",) if has_violations else ()), *COLUMNS),
    )
    for heading in headings:
        if heading == "name":  # the column that shrinks if there is not enough room
            table.add_column(heading, min_width=4, max_width=name_width)
        elif heading not in without:
            left = heading in ("state", "reach")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for member in members:
        figures = mapping(member.get("figures"))
        rank = member.get("rank")
        cells = [
            "-" if rank is None else count(rank),
            *([count(member.get("stage"))] if in_stages else []),
            str(member.get("name", "?")),
            format_worker_state(str(member.get("state", "?"))),
            str(member.get("reach") or "-"),
            *([count(member.get("strikes"))] if has_violations else []),
            count(member.get("share")),
            count(member.get("step")),
            number(member.get("sent_Bps"), format_bytes),
            number(member.get("received_Bps"), format_bytes),
            *(number(figures.get(name), _format_step_part) for name in SECONDS),
            number(member.get("last_heard_s"), "{:.0f} s".format),
        ]
        kept = [cell for heading, cell in zip(headings, cells, strict=True) if heading not in without]
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in kept))
    if not table.row_count:
        nobody = "no worker is connected" if status.get("generation") else "no worker has joined yet"
        nobody = "all workers have left" if status.get("finished") else nobody
        table.add_row("-", *([""] if in_stages else []), Text(nobody, style="dim"))
    return table


def base_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line that says where the base was loaded from; if workers are allowed to have different bases,
    a line for each member."""
    from gridtrain.core.messages import BASE_FACT, BASE_ORIGIN

    about = {m.get("name", "?"): mapping(m.get("about")) for m in rows(status, "members")}
    origins = {name: str(texts.get(BASE_ORIGIN) or "") for name, texts in about.items()}
    if mapping(status.get("facts")).get(BASE_FACT) != "any":
        different = sorted({*origins.values()} - {""})
        return [f"base loaded from {', '.join(different)}"] if different else []
    return [
        f"base of {name}: {base}" + (f", from {origins[name]}" if origins[name] else "")
        for name, texts in about.items()
        if (base := texts.get(BASE_FACT))
    ]


def received_states(status: Mapping[str, Any]) -> list[str]:
    """Return a line with the size of the state that each member received on joining; [] if none did."""
    from gridtrain.core.messages import STATE_BYTES

    received = [
        f"{member.get('name', '?')} {number(nbytes, format_bytes)}"
        for member in rows(status, "members")
        if (nbytes := mapping(member.get("figures")).get(STATE_BYTES)) is not None
    ]
    return ["state received to join: " + ", ".join(received)] if received else []


def paused_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each worker that its owner has paused.

    Such a worker is not a member and has no connection, so the coordinator cannot tell whether it is
    still running.
    """
    lines, ends = [], "; it exits when its pause ends" if status.get("finished") else ""
    for line in rows(status, "resting"):
        what, _, why = str(line.get("reason", "paused")).partition(": ")
        lines.append(
            f"{line.get('name', '?')} was {what} {_age(line)} ago" + (f": {why}" if why else "") + ends
        )
    return lines


def problem_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each member that reports problems, such as failed checkpoints."""
    members = rows(status, "members")
    return [f"{member.get('name', '?')} {member['reason']}" for member in members if member.get("reason")]


def refused_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each protocol version whose workers were refused in the last 24 hours."""
    return [
        f"refused in the last 24 hours: {format_count(workers, 'worker')} with {row.get('software')} "
        f"(protocol version {row.get('version')}) -> install the coordinator's version of gridtrain there"
        for row in rows(status, "refused_versions")
        if isinstance(workers := row.get("workers"), int)
    ]


def _age(line: Mapping[str, Any]) -> str:
    since_s = line.get("since_s")
    return format_age(since_s) if isinstance(since_s, int | float) else "?"


def _event(event: Mapping[str, Any], now_s: Any) -> str:
    at_s = event.get("at_s")
    known = isinstance(at_s, int | float) and isinstance(now_s, int | float)
    age = f"{now_s - at_s:5.0f} s ago" if known else "?"
    return f"{age}  {event_text(event)}"


def _total(status: Mapping[str, Any]) -> str:
    """Return how long the whole run is, as text to append to the step."""
    if isinstance(steps := status.get("total_steps"), int):
        return f" of {steps}"
    samples, total, epochs = (status.get(name) for name in ("samples", "total_samples", "epochs"))
    if not (isinstance(samples, int) and isinstance(total, int) and isinstance(epochs, int) and total > 0):
        return ""
    samples = min(samples, total)
    return f" in pass {min(epochs, samples * epochs // total + 1)} of {epochs} ({100 * samples // total} %)"


def _remaining(status: Mapping[str, Any]) -> str:
    left_s = status.get("remaining_s")
    return f", {format_age(left_s)} left" if isinstance(left_s, int | float) else ""


def _format_step_part(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
