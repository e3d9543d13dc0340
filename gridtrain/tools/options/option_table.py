"""The table of options, from which flags, variables, run.toml keys and the documentation are derived.

upload_limit  ->  --upload-limit    GRIDTRAIN_UPLOAD_LIMIT    [worker] upload_limit    join(upload_limit=)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from gridtrain.config import DEFAULT_PORT, ENV_PREFIX, JoinConfig
from gridtrain.errors import ConfigError

_JOIN = {known.name: str(known.default) for known in fields(JoinConfig)}
_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


class OptionKind(StrEnum):
    """Type of an option's value; in Python str, int, float, bool, or a tuple of str for texts."""

    TEXT = "text"
    FOLDER = "folder"
    COUNT = "whole number"
    NUMBER = "number"
    SWITCH = "yes or no"
    TEXTS = "texts"


OptionValue = str | int | float | bool | tuple[str, ...] | None
"""None: not set; `Option.default_description` says what happens then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: with underscores, as in run.toml.
        default: None if it is determined at run time, see `default_description`.
        choices: allowed values of a TEXT; (): any.
        minimum: of a COUNT or NUMBER.
        each: the repeatable flag for one of TEXTS, if it differs from the name.
        is_comma_separated: TEXTS in the environment may be separated by commas as well as blanks.
        off_word: the value of a TEXT that `--no-...` stands for.
        toml_key: "table.key" in run.toml, if not in the program's own table.
        is_command_line_only: neither the environment nor run.toml may set it.
        has_no_flag: not on the command line.
        is_join_option: `gridtrain.join` takes it as well.
        is_secret: its value is never shown.
        is_hidden: not listed; for tools of this repository.
    """

    name: str
    kind: OptionKind
    help: str
    default: OptionValue = None
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
    is_join_option: bool = False
    is_secret: bool = False
    is_hidden: bool = False

    @property
    def flag(self) -> str:
        return self.each or "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        """The flag that turns the option off; "": there is none."""
        return f"--no-{self.flag[2:]}" if self.off_word or self.default is True else ""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default in words; "": there is none."""
        if self.default in (None, "", ()):
            return self.default_description
        return format_value(self.default)

    def toml_location(self, program: str) -> tuple[str, str]:
        """(table, key) of `program`'s run.toml."""
        table, _, key = (self.toml_key or f"{program}.{self.name}").partition(".")
        return table, key

    def from_text(self, text: str, where: str) -> OptionValue:
        """The value of an environment variable.  Raises `ConfigError` that names `where`."""
        plain = text.strip()
        match self.kind:
            case OptionKind.SWITCH:
                if plain.lower() not in (*_YES, *_NO):
                    raise self._value_error(where, text, "yes or no")
                return plain.lower() in _YES
            case OptionKind.COUNT:
                if not plain.removeprefix("-").isdecimal():
                    raise self._value_error(where, text, "a whole number")
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
        """The value of a TOML key.  Raises `ConfigError` that names `where`."""
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
            OptionKind.COUNT: "a whole number",
            OptionKind.NUMBER: "a number",
        }
        example[OptionKind.TEXTS] = "a list of texts in quotation marks"
        raise self._value_error(where, value, example.get(self.kind, "a text in quotation marks"))

    def _parse(self, text: str, where: str) -> str:
        if self.choices and text not in self.choices:
            raise self._value_error(where, text, " or ".join(self.choices))
        return text

    def _check_minimum(self, value: float, where: str) -> OptionValue:
        if not (self.minimum or 0) <= value < float("inf"):  # NaN is not
            raise self._value_error(where, value, f"a {self.kind.value} >= {self.minimum or 0:g}")
        return value

    def _value_error(self, where: str, value: object, wanted: str) -> ConfigError:
        fix = f"write {wanted}" + (
            f", such as {format_value(self.default)}" if self.default not in (None, "", ()) else ""
        )
        return ConfigError(f"{where} is {value!r}; it must be {wanted}", remedy=f"{fix}, or leave it out")


def format_value(value: OptionValue) -> str:
    """The value as it is typed."""
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

COORDINATOR: tuple[Option, ...] = (
    Option(
        name="listen",
        kind=OptionKind.TEXT,
        default=f"tcp://127.0.0.1:{DEFAULT_PORT}",
        metavar="ADDRESS",
        help="Address for workers; tcp://0.0.0.0:7700: all interfaces.",
    ),
    Option(
        name="advertise",
        kind=OptionKind.TEXT,
        default="",
        default_description="--listen",
        metavar="ADDRESS",
        help="Address that workers use instead.",
    ),
    Option(
        name="run",
        kind=OptionKind.TEXT,
        default="default",
        toml_key="run.name",
        metavar="NAME",
        help="The run's name.",
    ),
    Option(
        name="state",
        kind=OptionKind.FOLDER,
        default_description="~/.local/state/gridtrain/RUN",
        metavar="FOLDER",
        help="Folder of the run's journal and keys.",
    ),
    Option(
        name="min_workers",
        kind=OptionKind.COUNT,
        default=1,
        minimum=1,
        metavar="N",
        help="Start with at least this many workers.",
    ),
    Option(
        name="order",
        kind=OptionKind.TEXT,
        default="planned",
        choices=("planned", "joined"),
        help="Rank order: from measured links, or as joined.",
    ),
    Option(
        name="recut_after",
        kind=OptionKind.NUMBER,
        default=15,
        metavar="SECONDS",
        help="With fewer workers than stages, repartition after this time.",
    ),
    Option(
        name="bundle",
        kind=OptionKind.SWITCH,
        default=True,
        help="Serve the script of run.toml to volunteers.",
    ),
    Option(
        name="unencrypted",
        kind=OptionKind.SWITCH,
        default=False,
        help="No encryption, for benchmarks on this machine.",
    ),
    Option(
        name="benchmark",
        kind=OptionKind.SWITCH,
        default=False,
        is_hidden=True,
        is_command_line_only=True,
        help="With --unencrypted: allow other machines.",
    ),
    Option(
        name="exit_when_finished",
        kind=OptionKind.SWITCH,
        default=False,
        help="Exit when the run has finished and its workers have left.",
    ),
    Option(
        name="backup_to",
        kind=OptionKind.FOLDER,
        default_description="no backups",
        metavar="FOLDER",
        help="Folder on another disk for backups of journal and keys.",
    ),
    Option(
        name="backup_every",
        kind=OptionKind.NUMBER,
        default=5.0,
        minimum=0.1,
        metavar="SECONDS",
        help="Least time between two backups.",
    ),
    Option(
        name="backup_keep",
        kind=OptionKind.COUNT,
        default=3,
        minimum=1,
        metavar="N",
        help="Number of backups to keep.",
    ),
    Option(
        name="from_backup",
        kind=OptionKind.FOLDER,
        metavar="FOLDER",
        is_command_line_only=True,
        help="Start a new --state from the latest backup there.",
    ),
    Option(
        name="dashboard",
        kind=OptionKind.TEXT,
        default="",
        default_description="127.0.0.1:7780, or the next free port",
        metavar="HOST:PORT",
        off_word="off",
        help='Address of the dashboard and /metrics; "off": none.',
    ),
    Option(
        name="dashboard_open",
        kind=OptionKind.SWITCH,
        default=False,
        help="Allow --dashboard on an address of the network.",
    ),
    Option(
        name="dashboard_hosts",
        kind=OptionKind.TEXTS,
        default=(),
        metavar="NAME",
        each="--dashboard-host",
        is_comma_separated=True,
        help="Host name of the dashboard, beside addresses and localhost.",
    ),
    Option(
        name="log_format",
        kind=OptionKind.TEXT,
        default="",
        default_description="json in a pipe or file",
        choices=("text", "json"),
        help="Format of log lines.",
    ),
)

WORKER: tuple[Option, ...] = (
    Option(
        name="invitation",
        kind=OptionKind.TEXT,
        metavar="INVITATION",
        has_no_flag=True,
        is_secret=True,
        help="The invitation of the run's owner, or @FILE; on the command line the first argument.",
    ),
    Option(
        name="name",
        kind=OptionKind.TEXT,
        default="",
        default_description="random",
        metavar="NAME",
        is_join_option=True,
        help="This worker's name.",
    ),
    Option(
        name="upload_limit",
        kind=OptionKind.TEXT,
        default="",
        default_description="none",
        metavar="RATE",
        is_join_option=True,
        help="Limit of sending, such as 20Mbit.",
    ),
    Option(
        name="download_limit",
        kind=OptionKind.TEXT,
        default="",
        default_description="none",
        metavar="RATE",
        is_join_option=True,
        help="Limit of receiving, such as 100Mbit.",
    ),
    Option(
        name="donate_limit",
        kind=OptionKind.TEXT,
        default="",
        default_description=_JOIN["donate_limit"],
        metavar="RATE",
        help="Limit of sending the model to newcomers.",
    ),
    Option(
        name="listen",
        kind=OptionKind.TEXT,
        default="",
        default_description="any free port",
        metavar="ADDRESS",
        is_join_option=True,
        help="Address for other workers.",
    ),
    Option(
        name="advertise",
        kind=OptionKind.TEXT,
        default="",
        default_description="--listen",
        metavar="ADDRESS",
        is_join_option=True,
        help="Address that other workers use instead.",
    ),
    Option(
        name="export_dir",
        kind=OptionKind.FOLDER,
        default="",
        default_description="~/.local/state/gridtrain/RUN",
        metavar="FOLDER",
        is_join_option=True,
        help="Folder for the final model.",
    ),
    Option(
        name="state_dir",
        kind=OptionKind.FOLDER,
        default="",
        default_description="~/.local/state/gridtrain/...",
        metavar="FOLDER",
        is_join_option=True,
        help="Folder for this worker's checkpoints.",
    ),
    Option(
        name="data_dir",
        kind=OptionKind.FOLDER,
        default="",
        default_description="the bundle's",
        metavar="FOLDER",
        help="Folder of the run's data set.",
    ),
    Option(
        name="checkpoint_every",
        kind=OptionKind.COUNT,
        default_description=_JOIN["checkpoint_every"],
        metavar="STEPS",
        is_join_option=True,
        help="Steps between checkpoints; 0: none.",
    ),
    Option(
        name="checkpoint_keep",
        kind=OptionKind.COUNT,
        default_description=_JOIN["checkpoint_keep"],
        minimum=1,
        metavar="N",
        is_join_option=True,
        help="Number of checkpoints to keep.",
    ),
    Option(
        name="handover_mib",
        kind=OptionKind.COUNT,
        default_description=_JOIN["handover_mib"],
        metavar="MIB",
        is_join_option=True,
        help="Limit of the residual sent on leaving.",
    ),
    Option(
        name="relay",
        kind=OptionKind.SWITCH,
        default=True,
        is_join_option=True,
        help="Forward (sealed) messages between other members.",
    ),
    Option(
        name="unencrypted",
        kind=OptionKind.SWITCH,
        default=False,
        is_join_option=True,
        help="Join a run without encryption, for benchmarks.",
    ),
    Option(
        name="restarts",
        kind=OptionKind.COUNT,
        default=0,
        metavar="N",
        help="Restarts of a script that fails.",
    ),
    Option(
        name="prefix",
        kind=OptionKind.SWITCH,
        default=False,
        help="Start each line of output with the worker's name.",
    ),
    Option(
        name="log_format",
        kind=OptionKind.TEXT,
        default="",
        default_description="json in a pipe or file",
        choices=("text", "json"),
        help="Format of own lines.",
    ),
    Option(
        name="set",
        kind=OptionKind.TEXTS,
        default=(),
        default_description="saved ones",
        metavar="KEY=VALUE",
        help="A rule, such as battery=pause.",
    ),
    Option(
        name="sensors",
        kind=OptionKind.TEXT,
        default="",
        default_description="this machine's",
        metavar="FILE",
        help="JSON file of readings, to try rules.",
    ),
    Option(
        name="accept",
        kind=OptionKind.TEXT,
        default="",
        default_description="ask",
        metavar="DIGEST",
        help="Accept the bundle with this digest only.",
    ),
    Option(
        name="dry_run",
        kind=OptionKind.SWITCH,
        default=False,
        is_command_line_only=True,
        help="Show what would run; do not join.",
    ),
)

PROGRAMS: dict[str, tuple[Option, ...]] = {"coordinator": COORDINATOR, "worker": WORKER}

OTHER_VARIABLES: dict[str, str] = {
    "GRIDTRAIN_CONFIG": "the run.toml to read instead of the one in the working folder",
    "GRIDTRAIN_DEBUG": "1: show tracebacks",
    "GRIDTRAIN_FAULTS": "faults to inject, see docs/reliability.md",
    # set by the worker's agent for its script
    "GRIDTRAIN_COORDINATOR": "",
    "GRIDTRAIN_COORDINATOR_KEY": "",
    "GRIDTRAIN_IDENTITY": "",
    "GRIDTRAIN_CONTRIBUTION": "",
    "GRIDTRAIN_CONTROL": "",
    # read by docker/compose*.yaml
    **{
        f"GRIDTRAIN_{name}": ""
        for name in (
            *(
                "INVITATION_FILE",
                "ACCEPT_FILE",
                "COORDINATOR_IMAGE",
                "JOB",
                "SCRIPT",
                "IMAGE",
                "TAG",
                "CPUS",
                "MEMORY",
                "BIND",
                "PORT",
            ),
            *("PROMETHEUS_PORT", "DASHBOARD_PORT", "LOCAL_USES", "LOCAL_EXPIRES"),
        )
    },
    # read by tests and benchmarks
    "GRIDTRAIN_SEED": "",
    "GRIDTRAIN_SEEDS": "",
    "GRIDTRAIN_HOSTILE": "",
    "GRIDTRAIN_RIVALS": "",
    "GRIDTRAIN_AXE": "",
}
"""Other variables: name -> description; "": not set by people."""


def find_option(program: str, name: str) -> Option:
    """Raises `KeyError`."""
    return {one.name: one for one in PROGRAMS[program]}[name]


def known_variables() -> set[str]:
    """All known `GRIDTRAIN_` variables."""
    chosen = {
        one.variable for options in PROGRAMS.values() for one in options if not one.is_command_line_only
    }
    return chosen | set(OTHER_VARIABLES)


def options_markdown(program: str) -> str:
    """The table of docs/configuration.md."""
    lines = ["| flag | variable | run.toml | default | what it is |", "|---|---|---|---|---|"]
    for one in PROGRAMS[program]:
        if one.is_hidden:
            continue
        table, key = one.toml_location(program)
        flag = f"`{one.flag}`" + (f", `{one.off_flag}`" if one.off_flag else "")
        cells = (
            "(the first argument)" if one.has_no_flag else flag,
            "" if one.is_command_line_only else f"`{one.variable}`",
            "" if one.is_command_line_only else f"`[{table}] {key}`",
            one.default_text,
            one.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
