"""`gridtrain config show`: shows the value and the source of each option.

Prints a table on a terminal, and one JSON object per line elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from gridtrain.cli.option_flags import add_options, resolve_settings
from gridtrain.tools.options import PROGRAMS, OptionValues

STYLES = {"flag": "magenta", "environment": "cyan", "run.toml": "green", "default": "dim"}


@click.group()
def config() -> None:
    """Show the configuration and the source of each value."""


@config.group(invoke_without_command=True, short_help="Show each option's value and its source.")
@click.pass_context
def show(context: click.Context) -> None:
    """Show each option's value and its source: flag, environment, run.toml or default.

    \b
      gridtrain config show                               both programs
      gridtrain config show worker --upload-limit 20Mbit  with this flag

    Prints a table on a terminal; elsewhere one JSON object per line, with program, name, value, source and
    where.  Ends with an error if the program would refuse a value.
    """
    if context.invoked_subcommand is None:
        _print([_resolve(program, {}) for program in PROGRAMS])


def _resolve(program: str, given: dict[str, Any]) -> OptionValues:
    """Return the values of all options.  If the coordinator's `state` is not set, its value is the folder
    that the coordinator would use."""
    from gridtrain.runtime.client.worker_defaults import state_directory

    found = resolve_settings(program, given)
    if program != "coordinator" or found.text("state"):
        return found
    state = replace(found["state"], value=str(state_directory(found.text("run"))))
    return OptionValues(program, {**found, "state": state}, found.runfile)


def _of(program: str) -> Callable[..., None]:
    @add_options(program)
    def command(**given: Any) -> None:
        _print([_resolve(program, given)])

    command.__doc__ = f"Show the options of the {program} with these flags."
    return command


for _program in PROGRAMS:
    show.command(_program)(_of(_program))


def _print(found: list[OptionValues]) -> None:
    """Print the options; then raise `ConfigError` if the program would refuse one of them."""
    if not sys.stdout.isatty():
        for settings in found:
            for line in json_lines(settings):
                click.echo(json.dumps(line))
    else:
        from rich.console import Console

        console = Console()
        for settings in found:
            console.print(settings_table(settings))
    for settings in found:
        _check(settings)


def _check(settings: OptionValues) -> None:
    from gridtrain.cli.worker import make_job
    from gridtrain.core.group.invitation import Invitation
    from gridtrain_coordinator.settings import settings_from

    if settings.program == "coordinator":
        settings_from(settings)
        return
    invitation = settings.text("invitation")
    if invitation[:1] in ("", "@", "-"):  # none, or one that is read from a file
        invitation = Invitation("tcp://localhost:7700", bytes(32), bytes(32), "default").text()
    make_job((invitation,), settings)


def json_lines(settings: OptionValues) -> list[dict[str, Any]]:
    """Return a JSON object for each option that is not hidden; a placeholder replaces secret values."""
    return [
        {
            "program": settings.program,
            "name": name,
            "value": one.shown if one.option.is_secret and one.value else one.effective,
            "source": one.source,
            "where": one.where,
        }
        for name, one in settings.items()
        if not one.option.is_hidden
    ]


def settings_table(settings: OptionValues) -> Any:
    """Return a table of the options with their values and sources, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=f"gridtrain {settings.program}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("option", "value", "from"):
        shown.add_column(heading, header_style="dim", overflow="fold")
    for name, one in settings.items():
        if not one.option.is_hidden:
            style = STYLES[one.source]
            shown.add_row(Text(name), Text(one.shown, style=style), Text(one.where or "default", style=style))
    return shown
