"""The root of the command line: lists all commands, and reports an error as a message and an exit code."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click

from gridtrain._version import __version__
from gridtrain.cli.secret_arguments import hide_invitations
from gridtrain.errors import DISK_FULL, GridtrainError

# name -> one line for `gridtrain --help`; the command is `gridtrain.cli.<name>.<name>`.
COMMANDS = {
    "coordinator": "Start a run's coordinator; workers join it.",
    "worker": "Join a run; or set, show, pause, resume or stop a worker.",
    "doctor": "Check whether this machine can join a run.",
    "status": "Show a run's members, steps and rates.",
    "invite": "Print an invitation that admits volunteers to a run.",
    "members": "List a run's members, open invitations and bans.",
    "kick": "Remove a member until it has a new invitation.",
    "ban": "Remove a member and refuse its key.",
    "unban": "Lift a ban.",
    "finish": "End a run now: its workers save the model and exit.",
    "data": "Write the index of a sharded data set.",
    "export": "Write a checkpoint's model as a plain file.",
    "bench": "Measure selection, codec and exchanges on this machine.",
    "plan": "Predict step times on a network before workers join.",
    "new": "Create a folder with a script that is ready to train.",
    "config": "Show the configuration and the source of each value.",
    "completion": "Print a script that completes commands in your shell.",
    "demo": "Train a small model with four workers on this machine.",
}

EXIT_CODES = """\b
Exit codes of all commands except doctor:
  0    success
  1    any other error; a failed script's own code is passed on
  2    the options or the configuration are invalid
  3    the coordinator cannot be reached
  4    the coordinator refused
  5    the run's bundle was not accepted on this machine
  129  stopped by SIGHUP (closed terminal)
  130  stopped by SIGINT (Ctrl-C);  143  stopped by SIGTERM

GRIDTRAIN_DEBUG=1 shows tracebacks."""


class LazyGroup(click.Group):
    """A group that imports a command only when the command is used, not when commands are listed."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"gridtrain.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; if its name is unknown, suggest the nearest names."""
        try:
            return super().resolve_command(context, arguments)
        except click.UsageError as error:
            near = difflib.get_close_matches(arguments[0], COMMANDS)
            if near and "Did you mean" not in error.message:
                message = f"{error.message} Did you mean {' or '.join(near)}?"
                raise click.UsageError(message, error.ctx) from None
            raise

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="gridtrain")
def cli() -> None:
    """Train a PyTorch model together on ordinary computers and internet connections."""


def _near(word: str, options: Sequence[str]) -> list[str]:
    """Return the options similar to `word`, ignoring the dashes, which click includes in the comparison."""
    by_name = {option.lstrip("-"): option for option in options}
    return [by_name[name] for name in difflib.get_close_matches(word.lstrip("-"), by_name)]


def _prepare_streams() -> None:
    """Open those of the three standard streams that are closed, on the null device, so that no other file or
    socket gets their numbers.  Escape what stdout's encoding lacks, as Python does on stderr."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
        name, mode = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))[number]
        setattr(sys, name, os.fdopen(number, mode))
    os.close(number)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `gridtrain` program.  Always raises `SystemExit`."""
    _prepare_streams()
    hide_invitations()
    try:
        result = cli.main(args=arguments, prog_name="gridtrain", standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            error.possibilities[:] = _near(error.option_name, error.possibilities)
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C
        sys.exit(128 + signal.SIGINT)
    except GridtrainError as error:
        if os.environ.get("GRIDTRAIN_DEBUG"):
            raise
        click.echo(f"gridtrain: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (*DISK_FULL, errno.EROFS) or os.environ.get("GRIDTRAIN_DEBUG"):
            raise
        what = error.filename or "the output"
        remedy = "make it writable" if error.errno == errno.EROFS else "free disk space"
        click.echo(f"gridtrain: {what} cannot be written: {error.strerror} -> {remedy}", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)
