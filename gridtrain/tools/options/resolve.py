"""Takes each option's value from its flag, `GRIDTRAIN_*` variable, run.toml or default, in this order.

Flags, environment and run.toml are arguments; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gridtrain.config import ENV_PREFIX
from gridtrain.errors import ConfigError
from gridtrain.tools.options.option_table import (
    JOIN_OPTIONS,
    OTHER_VARIABLES,
    PROGRAMS,
    Option,
    OptionKind,
    OptionValue,
    format_value,
    known_variables,
)
from gridtrain.tools.options.runfile import RunFile, nearest_word

HIDDEN_TEXT = "(set, not shown)"


@dataclass(frozen=True, slots=True)
class ResolvedValue:
    """The value of one option and its source.

    Attributes:
        source: the source of the value: "flag", "environment", "run.toml" or "default".
        where: where the value was set: "--upload-limit", "GRIDTRAIN_UPLOAD_LIMIT", "run.toml [worker]
            upload_limit", or "" for a default.
    """

    option: Option
    value: OptionValue
    source: str
    where: str

    @property
    def effective(self) -> OptionValue:
        """The value, or the constant that applies if the option is not set."""
        unset = self.option.unset_value
        return unset if unset is not None and self.value in (None, "") else self.value

    @property
    def shown(self) -> str:
        """The value, or what applies if the option is not set, as text; a secret value is replaced."""
        if self.option.is_secret and self.value:
            return HIDDEN_TEXT
        return format_value(self.value) or self.option.default_text


class OptionValues(dict[str, ResolvedValue]):
    """The values of one program, by option name."""

    def __init__(self, program: str, values: Mapping[str, ResolvedValue], runfile: RunFile) -> None:
        super().__init__(values)
        self.program = program
        self.runfile = runfile

    def text(self, name: str) -> str:
        """Return the value of a TEXT or FOLDER option; "" if the option is not set."""
        value = self[name].value
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the values of a TEXTS option; () if the option is not set."""
        value = self[name].value
        return value if isinstance(value, tuple) else ()

    def count(self, name: str) -> int | None:
        value = self[name].value
        return value if isinstance(value, int) else None

    def number(self, name: str) -> float:
        """Return the value of a NUMBER option that has a default."""
        value = self[name].value
        assert isinstance(value, int | float)
        return float(value)

    def switch(self, name: str) -> bool:
        return bool(self[name].value)

    def join_texts(self) -> dict[str, str]:
        """Return a worker's fields of `gridtrain.config.JoinConfig` as strings; unset fields are left out."""
        texts = {name: format_value(self[name].value) for name in JOIN_OPTIONS}
        texts["unencrypted"] = "yes" if self.switch("unencrypted") else ""
        return {name: text for name, text in texts.items() if text}

    def where(self, name: str) -> str:
        """Return where the value was set; the option's flag if the value is the default."""
        return self[name].where or self[name].option.flag


def resolve(
    program: str, given: Mapping[str, OptionValue], environ: Mapping[str, str], runfile: RunFile
) -> OptionValues:
    """Return the values of all options of `program`.

    Args:
        given: the values on the command line or in the call to `gridtrain.join`, by option name; None or ()
            if a value is not given.

    Raises:
        ConfigError: a value is invalid, or a `GRIDTRAIN_` variable is unknown.
    """
    check_variables(environ)
    values = {one.name: _one(program, one, given, environ, runfile) for one in PROGRAMS[program]}
    return OptionValues(program, values, runfile)


def join_settings(
    given: Mapping[str, str | None], environ: Mapping[str, str], runfile: RunFile
) -> dict[str, str]:
    """Return the fields of `gridtrain.config.JoinConfig` as strings, for a script that no agent has started.

    Unset fields are left out.

    Args:
        given: the arguments of `gridtrain.join`; None for an argument that is not given.

    Raises:
        ConfigError: an argument is invalid, or `resolve` raises it.
    """
    flags = {
        name: one.from_text(text, f"gridtrain.join({name}=)")
        for name, one in JOIN_OPTIONS.items()
        if (text := given.get(name)) is not None
        and (text or one.kind in (OptionKind.TEXT, OptionKind.FOLDER))
    }
    return resolve("worker", flags, environ, runfile).join_texts()


def _one(
    program: str, one: Option, given: Mapping[str, OptionValue], environ: Mapping[str, str], runfile: RunFile
) -> ResolvedValue:
    if (value := given.get(one.name)) not in (None, ()):
        return ResolvedValue(one, value, "flag", one.flag)
    if not one.is_command_line_only and (text := environ.get(one.variable)):
        return ResolvedValue(one, one.from_text(text, one.variable), "environment", one.variable)
    if (found := runfile.option_value(program, one)) is not None:
        return ResolvedValue(one, found[0], "run.toml", found[1])
    return ResolvedValue(one, one.default, "default", "")


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for the first unknown `GRIDTRAIN_` variable."""
    known = known_variables()
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            meant = {other.removeprefix(ENV_PREFIX) for other in known if OTHER_VARIABLES.get(other) != ""}
            word = nearest_word(name.removeprefix(ENV_PREFIX), meant)  # the prefix makes all names similar
            near = word and ENV_PREFIX + word
            raise ConfigError(
                f"{name} is set, but gridtrain has no such variable",
                remedy=f"did you mean {near}?  Otherwise unset {name}" if near else f"unset {name}",
            )
