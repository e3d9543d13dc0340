"""The options of the coordinator and the worker: names, defaults, bounds and help of flags and variables.

upload_limit  ->  --upload-limit    GRIDTRAIN_UPLOAD_LIMIT    [worker] upload_limit    join(upload_limit=)
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from enum import StrEnum
from typing import Any

from gridtrain.config import BASES, DEFAULT_DONATE_LIMIT, DEFAULT_PORT, ENV_PREFIX, WAITS, JoinConfig
from gridtrain.errors import ConfigError

_JOIN = {known.name: str(known.default) for known in fields(JoinConfig)}
_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


class OptionKind(StrEnum):
    """The type of an option's value; in Python a str, int, float or bool, or a tuple of str for TEXTS."""

    TEXT = "text"
    FOLDER = "folder"
    COUNT = "whole number"
    NUMBER = "number"
    SWITCH = "yes or no"
    TEXTS = "texts"

    @property
    def with_article(self) -> str:
        """The kind of a number, as messages name it."""
        return "an integer" if self is OptionKind.COUNT else f"a {self.value}"


OptionValue = str | int | float | bool | tuple[str, ...] | None
"""None means that the option is not set; `Option.default_text` describes what applies then."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: the name with underscores, as in run.toml.
        default: the default value; None if it is determined at run time; see `default_description`.
        unset_value: the value that applies if the option has no value; None if it is not a constant.
        default_description: what applies if the option has no value, as text for the help.
        choices: the allowed values of a TEXT; () allows any.
        minimum: the smallest value of a COUNT or NUMBER.
        each: the flag that adds one string to TEXTS each time it is given; "" to derive it from `name`.
        is_comma_separated: whether commas as well as spaces separate TEXTS in the environment.
        off_word: the value that the flag `--no-...` sets; "" if a TEXT has no such flag.
        toml_key: "table.key" in run.toml, if the key is not in the program's own table.
        is_command_line_only: whether the option can be set only on the command line.
        has_no_flag: whether the option has no command-line flag.
        is_secret: whether the value must not be shown.
        is_hidden: whether help omits the option, because only tools of this repository need it.
    """

    name: str
    kind: OptionKind
    help: str
    _: KW_ONLY
    default: OptionValue = None
    unset_value: OptionValue = None
    default_description: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    each: str = ""
    is_comma_separated: bool = False
    off_word: str = ""
    toml_key: str = ""
    is_command_line_only: bool = False
    has_no_flag: bool = False
    is_secret: bool = False
    is_hidden: bool = False

    @property
    def flag(self) -> str:
        return self.each or "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        """The flag that turns the option off; "" if there is none."""
        return f"--no-{self.flag[2:]}" if self.off_word or self.default is True else ""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default, or what applies if the option is not set, as text; "" if there is neither."""
        if self.default in (None, "", ()):
            return self.default_description or format_value(self.unset_value)
        return format_value(self.default)

    def toml_location(self, program: str) -> tuple[str, str]:
        """Return the (table, key) in run.toml that sets the option of `program`."""
        table, _, key = (self.toml_key or f"{program}.{self.name}").partition(".")
        return table, key

    def from_text(self, text: str, where: str) -> OptionValue:
        """Parse the value of an environment variable or of an argument of `gridtrain.join`.

        Raises a `ConfigError` that names `where` if the value is invalid.
        """
        plain = text.strip()
        match self.kind:
            case OptionKind.SWITCH:
                if plain.lower() not in (*_YES, *_NO):
                    raise self._value_error(where, text, "yes or no")
                return plain.lower() in _YES
            case OptionKind.COUNT:
                if not plain.removeprefix("-").isdecimal():
                    raise self._value_error(where, text, self.kind.with_article)
                return self._check_minimum(int(plain), where)
            case OptionKind.NUMBER:
                try:
                    return self._check_minimum(float(plain), where)
                except ValueError:
                    raise self._value_error(where, text, "a number") from None
            case OptionKind.TEXTS:
                return tuple((text.replace(",", " ") if self.is_comma_separated else text).split())
            case _:
                return self._parse(text, where)

    def from_toml(self, value: object, where: str) -> OptionValue:
        """Check and return the value of a TOML key.

        Raises a `ConfigError` that names `where` if the value is invalid.
        """
        if isinstance(value, bool):
            if self.kind is OptionKind.SWITCH:
                return value
        elif isinstance(value, str):
            if self.kind in (OptionKind.TEXT, OptionKind.FOLDER):
                return self._parse(value, where)
        elif isinstance(value, list):
            if self.kind is OptionKind.TEXTS and all(isinstance(one, str) for one in value):
                return tuple(value)
        elif (isinstance(value, int) and self.kind in (OptionKind.COUNT, OptionKind.NUMBER)) or (
            isinstance(value, float) and self.kind is OptionKind.NUMBER
        ):
            return self._check_minimum(value, where)
        example = {
            OptionKind.SWITCH: "true or false",
            OptionKind.COUNT: OptionKind.COUNT.with_article,
            OptionKind.NUMBER: OptionKind.NUMBER.with_article,
        }
        example[OptionKind.TEXTS] = "a list of strings in quotation marks"
        raise self._value_error(where, value, example.get(self.kind, "a string in quotation marks"))

    def _parse(self, text: str, where: str) -> str:
        if self.choices and text not in self.choices:
            raise self._value_error(where, text, " or ".join(self.choices))
        return text

    def _check_minimum(self, value: float, where: str) -> OptionValue:
        if not (self.minimum or 0) <= value < float("inf"):  # also refuses NaN
            raise self._value_error(where, value, f"{self.kind.with_article} >= {self.minimum or 0:g}")
        return value

    def _value_error(self, where: str, value: object, wanted: str) -> ConfigError:
        has_example = self.kind is not OptionKind.SWITCH and self.default not in (None, "", ())
        fix = f"write {wanted}" + (f", such as {format_value(self.default)}" if has_example else "")
        return ConfigError(f"{where} is {value!r}; it must be {wanted}", remedy=f"{fix}, or leave it out")


def format_value(value: OptionValue) -> str:
    """Format a value as it is typed on a command line."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case None:
            return ""
        case tuple():
            return " ".join(value)
        case _:
            return str(value)


# -- the table ---------------------------------------------------------------------------------------

TEXT, FOLDER, COUNT, NUMBER, SWITCH, TEXTS = OptionKind


def _optional(name: str, kind: OptionKind, help: str, unset: str, **more: Any) -> Option:
    """Return an option whose default is ""; `unset` describes what applies if the option is not set.

    If `unset` is "", help shows `unset_value` instead.
    """
    return Option(name, kind, help, default="", default_description=unset, **more)


_LOG_FORMAT = _optional(
    "log_format", TEXT, "Format of log lines.", "json in a pipe or file", choices=("text", "json")
)

COORDINATOR: tuple[Option, ...] = (
    Option(
        "listen",
        TEXT,
        "Address to listen on; tcp://0.0.0.0:7700 for all interfaces.",
        default=f"tcp://127.0.0.1:{DEFAULT_PORT}",
        metavar="ADDRESS",
    ),
    _optional("advertise", TEXT, "Address announced to workers.", "--listen", metavar="ADDRESS"),
    Option("run", TEXT, "The run's name.", default="default", toml_key="run.name", metavar="NAME"),
    Option(
        "state",
        FOLDER,
        "Folder of the run's journal and keys.",
        default_description="~/.local/state/gridtrain/RUN",
    ),
    Option("min_workers", COUNT, "Number of workers needed to start the run.", default=1, minimum=1),
    Option(
        "order",
        TEXT,
        '"planned": ranks by measured links; "joined": in join order.',
        default="planned",
        choices=("planned", "joined"),
    ),
    Option("recut_after", NUMBER, "With fewer workers than stages, repartition after this time.", default=15),
    Option("bundle", SWITCH, "Serve the script of run.toml to volunteers.", default=True),
    Option("unencrypted", SWITCH, "Do not encrypt, for benchmarks on this machine.", default=False),
    Option(
        "benchmark",
        SWITCH,
        "With --unencrypted: allow other machines.",
        default=False,
        is_hidden=True,
        is_command_line_only=True,
    ),
    Option("exit_when_finished", SWITCH, "Exit when the run is over and all have left.", default=False),
    Option(
        "backup_to",
        FOLDER,
        "Folder on another disk for backups of journal and keys.",
        default_description="no backups",
    ),
    Option("backup_every", NUMBER, "Minimum time between two backups.", default=5.0, minimum=0.1),
    Option("backup_keep", COUNT, "Number of backups to keep.", default=3, minimum=1),
    Option(
        "from_backup", FOLDER, "Start a new --state from FOLDER's latest backup.", is_command_line_only=True
    ),
    _optional(
        "dashboard",
        TEXT,
        'Address of the dashboard and /metrics; "off" disables it.',
        "127.0.0.1:7780, or the next free port",
        unset_value="127.0.0.1:7780",
        metavar="HOST:PORT",
        off_word="off",
    ),
    Option("dashboard_open", SWITCH, "Allow --dashboard to use a network address.", default=False),
    Option(
        "dashboard_hosts",
        TEXTS,
        "Additional host name of the dashboard.",
        default=(),
        metavar="NAME",
        each="--dashboard-host",
        is_comma_separated=True,
    ),
    _LOG_FORMAT,
)

WORKER: tuple[Option, ...] = (
    Option(
        "invitation",
        TEXT,
        "The invitation from the run's owner, or @FILE; the first argument on the command line.",
        metavar="INVITATION",
        has_no_flag=True,
        is_secret=True,
    ),
    _optional("name", TEXT, "This worker's name.", "random", metavar="NAME"),
    _optional("upload_limit", TEXT, "Upload limit, such as 20Mbit.", "none", metavar="RATE"),
    _optional("download_limit", TEXT, "Download limit, such as 100Mbit.", "none", metavar="RATE"),
    _optional(
        "donate_limit",
        TEXT,
        "Upload limit for sending the model.",
        "",
        unset_value=DEFAULT_DONATE_LIMIT,
        metavar="RATE",
    ),
    _optional("listen", TEXT, "Address to listen on.", "any free port", metavar="ADDRESS"),
    _optional("advertise", TEXT, "Address announced to members.", "--listen", metavar="ADDRESS"),
    _optional("export_dir", FOLDER, "Folder for the final model.", "~/.local/state/..."),
    _optional("state_dir", FOLDER, "Folder of the checkpoints.", "~/.local/state/..."),
    _optional("data_dir", FOLDER, "Folder of the run's data set.", "the bundle's"),
    _optional("cache_limit", TEXT, "Disk space for fetched data.", "", unset_value="20GB", metavar="SIZE"),
    Option(
        "checkpoint_every",
        COUNT,
        "Steps between checkpoints; 0 writes none.",
        unset_value=int(_JOIN["checkpoint_every"]),
        metavar="STEPS",
    ),
    Option(
        "checkpoint_keep",
        COUNT,
        "Number of checkpoints to keep.",
        unset_value=int(_JOIN["checkpoint_keep"]),
        minimum=1,
    ),
    _optional("checkpoints", TEXT, "Also upload checkpoints to this URL.", "none", metavar="URL"),
    Option(
        "handover_mib",
        COUNT,
        "Maximum residual to send on leaving.",
        unset_value=int(_JOIN["handover_mib"]),
        metavar="MIB",
    ),
    Option("relay", SWITCH, "Forward encrypted messages between other members.", default=True),
    Option("unencrypted", SWITCH, "Join a run without encryption, for benchmarks.", default=False),
    Option(
        "wait", TEXT, '"auto": do not wait for stalled workers.', unset_value=_JOIN["wait"], choices=WAITS
    ),
    Option("base", TEXT, '"any": frozen values may differ.', unset_value=_JOIN["base"], choices=BASES),
    Option("restarts", COUNT, "Consecutive restarts of a failing script.", default=0),
    Option("prefix", SWITCH, "Start each line of output with the worker's name.", default=False),
    _LOG_FORMAT,
    Option(
        "set",
        TEXTS,
        "A rule, such as battery=pause.",
        default=(),
        default_description="saved rules",
        metavar="KEY=VALUE",
    ),
    _optional("sensors", TEXT, "File with sensor readings.", "this machine's", metavar="FILE"),
    _optional("accept", TEXT, "Run only this bundle, without asking.", "ask", metavar="DIGEST"),
    Option("dry_run", SWITCH, "Show what would run; do not join.", default=False, is_command_line_only=True),
)

PROGRAMS: dict[str, tuple[Option, ...]] = {"coordinator": COORDINATOR, "worker": WORKER}

JOIN_OPTIONS: dict[str, Option] = {one.name: one for one in WORKER if one.name in _JOIN}
"""The options that are fields of `gridtrain.config.JoinConfig`, by name."""

_INTERNAL_VARIABLES = (
    # set by the worker's agent for its script
    "GRIDTRAIN_COORDINATOR GRIDTRAIN_COORDINATOR_KEY GRIDTRAIN_IDENTITY GRIDTRAIN_CONTRIBUTION "
    "GRIDTRAIN_CONTROL GRIDTRAIN_PROGRESS "
    # read by docker/compose*.yaml
    "GRIDTRAIN_INVITATION_FILE GRIDTRAIN_ACCEPT_FILE GRIDTRAIN_COORDINATOR_IMAGE GRIDTRAIN_JOB "
    "GRIDTRAIN_SCRIPT GRIDTRAIN_IMAGE GRIDTRAIN_TAG GRIDTRAIN_CPUS GRIDTRAIN_MEMORY GRIDTRAIN_BIND "
    "GRIDTRAIN_PORT GRIDTRAIN_PROMETHEUS_PORT GRIDTRAIN_DASHBOARD_PORT GRIDTRAIN_LOCAL_USES "
    "GRIDTRAIN_LOCAL_EXPIRES "
    # read by tests and benchmarks
    "GRIDTRAIN_SEED GRIDTRAIN_SEEDS GRIDTRAIN_HOSTILE GRIDTRAIN_RIVALS GRIDTRAIN_AXE "
)

OTHER_VARIABLES: dict[str, str] = {
    "GRIDTRAIN_CONFIG": "the run.toml to read instead of the one in the working directory",
    "GRIDTRAIN_DEBUG": "1: show tracebacks",
    "GRIDTRAIN_FAULTS": "faults to inject; see docs/reliability.md",
    "GRIDTRAIN_UPDATE_LOG_MIB": "size of the update log, 128 by default; see docs/planning.md",
    **dict.fromkeys(_INTERNAL_VARIABLES.split(), ""),
}
"""Other variables: name -> description; "" for a variable that users do not set."""


def find_option(program: str, name: str) -> Option:
    """Return the option `name` of `program`.  Raises `KeyError` if there is none."""
    return {one.name: one for one in PROGRAMS[program]}[name]


def known_variables() -> set[str]:
    """Return the names of all `GRIDTRAIN_` variables that may be set."""
    chosen = {
        one.variable for options in PROGRAMS.values() for one in options if not one.is_command_line_only
    }
    return chosen | set(OTHER_VARIABLES)
