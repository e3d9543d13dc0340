"""Makes command-line flags and their help from `gridtrain.tools.options`, and resolves their values."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gridtrain.tools.options import PROGRAMS, Option, OptionKind, OptionValues, RunFile, resolve
from gridtrain.tools.options.option_table import find_option

ALSO_IN_ENVIRONMENT = "Defaults are in brackets.  See also `gridtrain config show`."

METAVARS = {OptionKind.FOLDER: "FOLDER", OptionKind.COUNT: "N", OptionKind.NUMBER: "SECONDS"}

Command = TypeVar("Command", bound=Callable[..., Any])


def add_options(program: str) -> Callable[[Command], Command]:
    """Return a decorator that adds all flags of `program`, without defaults: a flag that is not given has no
    value."""

    def decorate(command: Command) -> Command:
        for one in reversed(PROGRAMS[program]):
            if not one.has_no_flag:
                command = make_flag(one)(command)
        return command

    return decorate


def make_flag(one: Option) -> Callable[[Command], Command]:
    """Return a decorator that adds the flag of one option."""
    shows_default = one.default_text and one.kind is not OptionKind.SWITCH
    text = one.help + (f"  [{one.default_text}]" if shows_default else "")
    names = [one.flag + (f"/{one.off_flag}" if one.default is True else "")]
    if one.kind is OptionKind.SWITCH:
        return click.option(*names, one.name, is_flag=True, default=None, hidden=one.is_hidden, help=text)
    value = click.option(
        *names,
        one.name,
        type=_type(one),
        default=None,
        multiple=one.kind is OptionKind.TEXTS,
        metavar=one.metavar or METAVARS.get(one.kind),
        hidden=one.is_hidden,
        help=text,
    )
    if not one.off_word:
        return value
    off = click.option(
        one.off_flag, f"no_{one.name}", is_flag=True, help=f"Same as {one.flag} {one.off_word}."
    )
    return lambda command: value(off(command))


def default_option(flag: str, default: Any, help: str, **more: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds an option; click appends the option's default to the help."""
    return click.option(flag, default=default, show_default=True, help=help, **more)


def brief_option(
    flag: str, default: Any, help: str, *, name: str | None = None, **more: Any
) -> Callable[[Command], Command]:
    """Return a decorator that adds an option whose help ends with its default in brackets."""
    names = (flag, name) if name else (flag,)
    return click.option(*names, default=default, help=f"{help}  [{default}]", **more)


class _AtLeast(click.ParamType):  # type: ignore[type-arg]  # click before 8.4 refuses [float]
    """A number with a minimum.  The help does not show the minimum, which would take another line."""

    def __init__(self, kind: OptionKind, minimum: float) -> None:
        self.name, self._minimum, self._kind = kind.value, minimum, kind
        self._parse = int if kind is OptionKind.COUNT else float

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        try:
            number: float = self._parse(value)
        except ValueError:
            number = math.nan
        if not self._minimum <= number < math.inf:  # also refuses NaN
            self.fail(
                f"{value} is not {self._kind.with_article} of at least {self._minimum:g}", param, context
            )
        return number


def _type(one: Option) -> click.ParamType[Any]:
    if one.choices:
        return click.Choice(one.choices)
    match one.kind:
        case OptionKind.COUNT | OptionKind.NUMBER:
            return _AtLeast(one.kind, one.minimum or 0)
        case OptionKind.FOLDER:
            return click.Path(file_okay=False)
        case _:
            return click.STRING


def resolve_settings(program: str, given: dict[str, Any]) -> OptionValues:
    """Return the values of all options, from flags, environment and run.toml.

    Raises `ConfigError` as `resolve` and `RunFile.find` do, and `click.UsageError` if an option was given
    together with its `--no-...` flag.
    """
    for one in PROGRAMS[program]:
        if one.off_word and given.pop(f"no_{one.name}", False):
            if given.get(one.name) is not None:
                raise click.UsageError(f"{one.flag} and {one.off_flag} were both given")
            given[one.name] = one.off_word
    return resolve(program, given, os.environ, RunFile.find(os.environ))


def run_options(command: Command) -> Command:
    """Add `--run` and `--state`, which select a coordinator on this machine, to a command."""

    @functools.wraps(command)
    def resolved(*args: Any, run: str | None, state: str | None, **rest: Any) -> Any:
        found = resolve_settings("coordinator", {"run": run, "state": state})
        folder = found.text("state")
        if run is not None and found["state"].source == "run.toml":
            folder = ""  # run.toml describes another run
        return command(*args, run=found.text("run"), state=Path(folder) if folder else None, **rest)

    for name in ("state", "run"):
        resolved = make_flag(find_option("coordinator", name))(resolved)
    return resolved  # type: ignore[return-value]
