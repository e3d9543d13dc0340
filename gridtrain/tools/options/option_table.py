"""The one table of options: every other list of them is derived from it.

Decides what an option is called, what it may hold and what it is by default.  Reads nothing.

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
    """What an option holds; in Python: str, int, float, bool, and a tuple of str for texts."""

    TEXT = "text"
    FOLDER = "folder"
    COUNT = "whole number"
    NUMBER = "number"
    SWITCH = "yes or no"
    TEXTS = "texts"


OptionValue = str | int | float | bool | tuple[str, ...] | None
"""None: nobody has chosen, and what happens then is in `Option.otherwise`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One choice.

    Attributes:
        name: with underscores, as in run.toml.
        default: None where the default is found out at run time; `otherwise` says how.
        choices: of a TEXT; (): any.
        least: of a COUNT or NUMBER.
        each: flag for one of TEXTS, which may be given often, where it is not called as all of them.
        commas: TEXTS in the environment may have commas between them, not only blanks.
        off: the value of a TEXT that `--no-...` stands for.
        place: "table.key" in run.toml where that is not the program's own table.
        line_only: good for one command, so that neither the environment nor run.toml may hold it.
        no_line: not on the command line.
        join: `gridtrain.join` takes it as well.
        secret: not shown.
        hidden: not listed; for our own tools.
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
        """ "" where there is none."""
        return f"--no-{self.flag[2:]}" if self.off_word or self.default is True else ""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """For people; "" where nothing is."""
        if self.default in (None, "", ()):
            return self.default_description
        return format_value(self.default)

    def toml_location(self, program: str) -> tuple[str, str]:
        """(table, key) of `program`'s run.toml."""
        table, _, key = (self.toml_key or f"{program}.{self.name}").partition(".")
        return table, key

    def from_text(self, text: str, where: str) -> OptionValue:
        """From the environment.  Raises `ConfigError` that names `where`."""
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
        """As TOML has read it.  Raises `ConfigError` that names `where`."""
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
    """As it would be typed."""
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
        help="Where to accept workers; tcp://0.0.0.0:7700 for all interfaces, port 0 for any free one.",
    ),
    Option(
        name="advertise",
        kind=OptionKind.TEXT,
        default="",
        default_description="the address listened at",
        metavar="ADDRESS",
        help="The address that workers should use instead.",
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
        help="Journal and keys of the run.",
    ),
    Option(
        name="min_workers",
        kind=OptionKind.COUNT,
        default=1,
        minimum=1,
        metavar="N",
        help="Start only with so many workers.",
    ),
    Option(
        name="order",
        kind=OptionKind.TEXT,
        default="planned",
        choices=("planned", "joined"),
        help="Ranks by a plan from measured links, or in the order of joining (to compare).",
    ),
    Option(
        name="recut_after",
        kind=OptionKind.NUMBER,
        default=15,
        metavar="SECONDS",
        help="With fewer workers than the model has stages, wait so long before it is cut anew.",
    ),
    Option(
        name="bundle",
        kind=OptionKind.SWITCH,
        default=True,
        help="Give volunteers the script that run.toml names, for them to accept and run.",
    ),
    Option(
        name="unencrypted",
        kind=OptionKind.SWITCH,
        default=False,
        help="Talk in the clear, for benchmarks; on this machine only, unless --benchmark is given too.",
    ),
    Option(
        name="benchmark",
        kind=OptionKind.SWITCH,
        default=False,
        is_hidden=True,
        is_command_line_only=True,
        help="See above.",
    ),
    Option(
        name="exit_when_finished",
        kind=OptionKind.SWITCH,
        default=False,
        help="Exit once the run is finished and its workers have left.",
    ),
    Option(
        name="backup_to",
        kind=OptionKind.FOLDER,
        default_description="no backups",
        metavar="FOLDER",
        help="Keep backups of journal and keys there, on another disk, for a standby.",
    ),
    Option(
        name="backup_every",
        kind=OptionKind.NUMBER,
        default=5.0,
        minimum=0.1,
        metavar="SECONDS",
        help="At most one backup in this time.",
    ),
    Option(
        name="backup_keep",
        kind=OptionKind.COUNT,
        default=3,
        minimum=1,
        metavar="N",
        help="So many backups stay.",
    ),
    Option(
        name="from_backup",
        kind=OptionKind.FOLDER,
        metavar="FOLDER",
        is_command_line_only=True,
        help="Take a run over: begin a new --state from the latest backup there.",
    ),
    Option(
        name="dashboard",
        kind=OptionKind.TEXT,
        default="",
        default_description="127.0.0.1:7780, or the next free port",
        metavar="HOST:PORT",
        off_word="off",
        help='Where a browser shows the run; "off": no page and no /metrics.',
    ),
    Option(
        name="dashboard_open",
        kind=OptionKind.SWITCH,
        default=False,
        help="--dashboard may be reached from other machines.",
    ),
    Option(
        name="dashboard_hosts",
        kind=OptionKind.TEXTS,
        default=(),
        metavar="NAME",
        each="--dashboard-host",
        is_comma_separated=True,
        help="A host name by which the dashboard may be opened; addresses and localhost always may.",
    ),
)

WORKER: tuple[Option, ...] = (
    Option(
        name="invitation",
        kind=OptionKind.TEXT,
        metavar="INVITATION",
        has_no_flag=True,
        is_secret=True,
        help="What the run's owner got from `gridtrain invite`; @FILE reads it from a file.  On the command "
        "line it is the first word.",
    ),
    Option(
        name="name",
        kind=OptionKind.TEXT,
        default="",
        default_description="a random one",
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
        help="Such as 20Mbit.",
    ),
    Option(
        name="download_limit",
        kind=OptionKind.TEXT,
        default="",
        default_description="none",
        metavar="RATE",
        is_join_option=True,
        help="Such as 100Mbit.",
    ),
    Option(
        name="donate_limit",
        kind=OptionKind.TEXT,
        default="",
        default_description=_JOIN["donate_limit"],
        metavar="RATE",
        help="At most so much goes into states for newcomers while this worker trains.",
    ),
    Option(
        name="listen",
        kind=OptionKind.TEXT,
        default="",
        default_description="a free port towards the coordinator",
        metavar="ADDRESS",
        is_join_option=True,
        help="Where to wait for other workers.",
    ),
    Option(
        name="advertise",
        kind=OptionKind.TEXT,
        default="",
        default_description="the address listened at",
        metavar="ADDRESS",
        is_join_option=True,
        help="The address that other workers should dial instead.",
    ),
    Option(
        name="export_dir",
        kind=OptionKind.FOLDER,
        default="",
        default_description="~/.local/state/gridtrain/RUN",
        metavar="FOLDER",
        is_join_option=True,
        help="Where the final model goes.",
    ),
    Option(
        name="state_dir",
        kind=OptionKind.FOLDER,
        default="",
        default_description="under ~/.local/state/gridtrain",
        metavar="FOLDER",
        is_join_option=True,
        help="Where this worker's own checkpoints go.",
    ),
    Option(
        name="data_dir",
        kind=OptionKind.FOLDER,
        default="",
        default_description="the run's folder",
        metavar="FOLDER",
        help="Where the data set lies that the run's owner names.",
    ),
    Option(
        name="checkpoint_every",
        kind=OptionKind.COUNT,
        default_description=_JOIN["checkpoint_every"],
        metavar="STEPS",
        is_join_option=True,
        help="Steps between two checkpoints; 0: none.",
    ),
    Option(
        name="checkpoint_keep",
        kind=OptionKind.COUNT,
        default_description=_JOIN["checkpoint_keep"],
        minimum=1,
        metavar="N",
        is_join_option=True,
        help="So many checkpoints stay.",
    ),
    Option(
        name="handover_mib",
        kind=OptionKind.COUNT,
        default_description=_JOIN["handover_mib"],
        metavar="MIB",
        is_join_option=True,
        help="When this worker leaves, it hands over at most so much of what it has not sent; 0: nothing.",
    ),
    Option(
        name="relay",
        kind=OptionKind.SWITCH,
        default=True,
        is_join_option=True,
        help="Pass on, sealed, what members that cannot reach each other send one another.",
    ),
    Option(
        name="unencrypted",
        kind=OptionKind.SWITCH,
        default=False,
        is_join_option=True,
        help="Join a run that talks in the clear; for benchmarks.",
    ),
    Option(
        name="restarts",
        kind=OptionKind.COUNT,
        default=0,
        metavar="N",
        help="So often the script is started again after it failed.",
    ),
    Option(
        name="prefix",
        kind=OptionKind.SWITCH,
        default=False,
        help="Begin each line of the script's output with the worker's name.",
    ),
    Option(
        name="set",
        kind=OptionKind.TEXTS,
        default=(),
        default_description="none but those of `gridtrain worker set`",
        metavar="KEY=VALUE",
        help="A rule of yours, such as battery=pause or hours=22:00-07:00; see docs/volunteering.md.",
    ),
    Option(
        name="sensors",
        kind=OptionKind.TEXT,
        default="",
        default_description="this machine's",
        metavar="FILE",
        help="A JSON file that speaks for this machine's sensors, to try rules out.",
    ),
    Option(
        name="accept",
        kind=OptionKind.TEXT,
        default="",
        default_description="ask",
        metavar="DIGEST",
        help="Run the bundle with this digest without asking; another one is not run.",
    ),
    Option(
        name="dry_run",
        kind=OptionKind.SWITCH,
        default=False,
        is_command_line_only=True,
        help="Do all but join: show what would run, and what it would be told.",
    ),
)

PROGRAMS: dict[str, tuple[Option, ...]] = {"coordinator": COORDINATOR, "worker": WORKER}

OTHER_VARIABLES: dict[str, str] = {
    "GRIDTRAIN_CONFIG": "the run.toml to read instead of the one in the working folder",
    "GRIDTRAIN_DEBUG": "1: show tracebacks",
    "GRIDTRAIN_FAULTS": "what is to go wrong on purpose, see docs/reliability.md",
    # what the worker's agent tells its script
    "GRIDTRAIN_COORDINATOR": "",
    "GRIDTRAIN_COORDINATOR_KEY": "",
    "GRIDTRAIN_IDENTITY": "",
    "GRIDTRAIN_CONTRIBUTION": "",
    "GRIDTRAIN_CONTROL": "",
    # what docker/compose*.yaml are told
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
    # our own tests and benchmarks
    "GRIDTRAIN_SEED": "",
    "GRIDTRAIN_SEEDS": "",
    "GRIDTRAIN_HOSTILE": "",
    "GRIDTRAIN_RIVALS": "",
    "GRIDTRAIN_AXE": "",
}
"""What else may be in the environment: name -> for people; "": nothing that people set."""


def find_option(program: str, name: str) -> Option:
    """Raises `KeyError`."""
    return {one.name: one for one in PROGRAMS[program]}[name]


def known_variables() -> set[str]:
    """Every `GRIDTRAIN_` variable that means something."""
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
            "(the first word)" if one.has_no_flag else flag,
            "" if one.is_command_line_only else f"`{one.variable}`",
            "" if one.is_command_line_only else f"`[{table}] {key}`",
            one.default_text,
            one.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
