"""`gridtrain config show`: each option's value, and who said so.

Decides how that looks: a table on a terminal, a JSON line for each option elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from gridtrain.cli.chosen import options_of, settings_of
from gridtrain.cli.main import EXIT_CODES
from gridtrain.options import PROGRAMS, Settings

STYLES = {"flag": "magenta", "environment": "cyan", "run.toml": "green", "default": "dim"}


@click.group(epilog=EXIT_CODES)
def config() -> None:
    """Show what is configured, and where each value comes from."""


@config.group(invoke_without_command=True, epilog=EXIT_CODES)
@click.pass_context
def show(context: click.Context) -> None:
    """Show each option's value and where it comes from: flag, environment, run.toml or default.

    \b
      gridtrain config show                                    of both programs
      gridtrain config show worker --upload-limit 20Mbit       as if with these flags

    A table on a terminal; elsewhere a JSON object a line, with program, name, value, source and where.
    """
    if context.invoked_subcommand is None:
        _print([settings_of(program, {}) for program in PROGRAMS])


def _of(program: str) -> Callable[..., None]:
    @options_of(program)
    def command(**given: Any) -> None:
        _print([settings_of(program, given)])

    command.__doc__ = f"Those of `gridtrain {program}`, with its flags."
    return command


for _program in PROGRAMS:
    show.command(_program, epilog=EXIT_CODES)(_of(_program))


def _print(found: list[Settings]) -> None:
    if not sys.stdout.isatty():
        for settings in found:
            for line in lines(settings):
                click.echo(json.dumps(line))
        return
    from rich.console import Console

    console = Console()
    for settings in found:
        console.print(table(settings))


def lines(settings: Settings) -> list[dict[str, Any]]:
    """For programs; what is secret is not in them."""
    return [
        {
            "program": settings.program,
            "name": name,
            "value": one.shown if one.option.secret and one.value else one.value,
            "source": one.source,
            "where": one.where,
        }
        for name, one in settings.items()
        if not one.option.hidden
    ]


def table(settings: Settings) -> Any:
    """For people."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=f"gridtrain {settings.program}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("option", "value", "from"):
        shown.add_column(heading, header_style="dim", overflow="fold")
    for name, one in settings.items():
        if not one.option.hidden:
            style = STYLES[one.source]
            shown.add_row(Text(name), Text(one.shown, style=style), Text(one.where or "default", style=style))
    return shown
