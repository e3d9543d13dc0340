"""`gridtrain worker`: reads its options, arguments and invitation for `gridtrain_worker.agent.supervise`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.option_flags import ALSO_IN_ENVIRONMENT, add_options, resolve_settings
from gridtrain.cli.worker_commands import worker_commands
from gridtrain.errors import ConfigError, GridtrainError

if TYPE_CHECKING:
    from gridtrain.core.group.invitation import Invitation
    from gridtrain.tools.options import OptionValues
    from gridtrain_worker.agent import Job

MAX_READ = 4096
DIGEST = re.compile(r"\s*(sha256:)?[0-9a-f]{64}\s*", re.IGNORECASE)


class WorkerCommand(click.Command):
    """Passes commands such as `gridtrain worker set ...` to `gridtrain.cli.worker_commands`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in worker_commands.commands:
            return worker_commands.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; what follows a "--" is the command, even if there is no invitation."""
        split = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(context, args[:split])
        context.params["command"] += tuple(args[split + 1 :])
        return rest

    def invoke(self, context: click.Context) -> Any:
        return super().invoke(context) if context.command is self else context.command.invoke(context)


def _complete_command(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the control commands that begin with `incomplete`, for shell completion.

    An invitation has no completions.
    """
    return [word for word in worker_commands.commands if incomplete and word.startswith(incomplete)]


@click.command(cls=WorkerCommand, epilog=ALSO_IN_ENVIRONMENT)
@click.argument("invitation", required=False, shell_complete=_complete_command)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@add_options("worker")
def worker(invitation: str | None, command: tuple[str, ...], **given: Any) -> None:
    """Join the run of INVITATION (or @FILE; - prompts or reads a pipe) and train.

    Runs COMMAND, such as `-- python train.py`, or the owner's script once you
    accept it.  Ctrl-C leaves the run; a second Ctrl-C kills the script.

    \b
    While it runs, from another terminal (each has --help):
      gridtrain worker show                         also: pause, resume, stop
      gridtrain worker set battery=pause hours=22:00-07:00 upload=10Mbit
    """
    from gridtrain.cli import consent_prompt
    from gridtrain_worker.agent import supervise
    from gridtrain_worker.console import JsonConsole, console_for

    words = (invitation, *command) if invitation is not None else command
    chosen = resolve_settings("worker", given)
    if invitation is None and not chosen.text("invitation"):
        raise _no_invitation()  # otherwise the command's first word would count as the invitation
    job, console = make_job(words, chosen), console_for(sys.stderr, chosen.text("log_format"))
    ask = (
        partial(consent_prompt.ask_consent, chosen, job)
        if sys.stdin.isatty() and sys.stderr.isatty()
        else None
    )
    show = partial(consent_prompt.show_offer, chosen)
    try:
        sys.exit(supervise(job, console.say, console=console, ask=ask, show=show))
    except GridtrainError as error:
        if not isinstance(console, JsonConsole) or os.environ.get("GRIDTRAIN_DEBUG"):
            raise
        console.report_error(str(error), error.exit_code)
        sys.exit(error.exit_code)
    finally:
        console.flush()


def make_job(words: tuple[str, ...], chosen: OptionValues) -> Job:
    """Return the job that the arguments and options describe.

    Raises `ConfigError` if there is no invitation, or if a value is invalid or contradicts another.
    """
    from gridtrain.core.group.invitation import looks_like
    from gridtrain.core.messages import ADDRESS, NAME
    from gridtrain.network.addresses import parse_explicit_address
    from gridtrain.sdk.reported_figures import check_text
    from gridtrain_worker.agent import Job
    from gridtrain_worker.training_policy import parse_pairs

    invitation = chosen.text("invitation")
    if words and (not invitation or looks_like(words[0]) or words[0][0:1] in ("@", "-")):
        invitation, words = words[0], words[1:]
    if not invitation:
        raise _no_invitation()
    accept = chosen.text("accept")
    if accept and not DIGEST.fullmatch(accept):
        raise ConfigError(
            f"{chosen.where('accept')} is {accept}, which is not a digest",
            remedy="write sha256: and 64 digits, as --dry-run prints them",
        )
    if words and accept:
        raise ConfigError(
            f"{chosen.where('accept')} is {accept}, but the command {shlex.join(words)} was given",
            remedy="to run the bundle with this digest, omit the command; otherwise omit the digest",
        )
    settings = chosen.join_texts()
    name = settings.get("name", "")
    check_text(NAME, chosen.where("name"), name)
    for key in ("listen", "advertise"):
        if key in settings:
            any_port = key == "listen"
            settings[key] = parse_explicit_address(chosen.where(key), settings[key], any_port=any_port)
            check_text(ADDRESS, chosen.where(key), settings[key])
    settings |= {key: text for key in ("data_dir", "cache_limit") if (text := chosen.text(key))}
    return Job(
        command=words,
        invitation=read_invitation(invitation),
        name=name,
        settings=settings,
        unencrypted=chosen.switch("unencrypted"),
        restarts=chosen.count("restarts") or 0,
        controls=tuple(parse_pairs(chosen.texts("set")).items()),
        sensors=chosen.text("sensors"),
        prefix=chosen.switch("prefix"),
        accept=accept,
        dry_run=chosen.switch("dry_run"),
    )


def _no_invitation() -> ConfigError:
    return ConfigError(
        "no invitation was given",
        remedy="run gridtrain worker INVITATION; the run's owner gets one from gridtrain invite "
        "(if this command line runs gridtrain invite, see the message of that command above)",
    )


def read_invitation(text: str) -> Invitation:
    """Return the invitation from an argument: the text itself, @FILE, or - for standard input.

    Raises `ConfigError` if the file cannot be read, or if the text is not an invitation.
    """
    from gridtrain.core.group.invitation import parse

    return parse(_read(text))


def _read(text: str) -> str:
    """Return the invitation: `text` itself, the content of @FILE, or standard input for "-".

    On a terminal, prompts for one line.  If the invitation is piped in, later answers are read from
    the terminal, if there is one.
    """
    if text == "-":
        if sys.stdin.isatty():
            return str(click.prompt("Invitation", err=True))
        text = sys.stdin.read(MAX_READ)
        with suppress(OSError):
            sys.stdin = open("/dev/tty", encoding="utf-8")  # noqa: SIM115  for the rest of the process
        return text
    if not text.startswith("@"):
        return text
    try:
        with open(text[1:], encoding="utf-8") as file:
            return file.read(MAX_READ)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the invitation cannot be read from {text[1:]}: "
            f"{error.strerror if isinstance(error, OSError) else 'it is not a text file'}",
            remedy="check the file name after the @",
        ) from None
