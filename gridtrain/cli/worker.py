"""`gridtrain worker`: options only; the work is `gridtrain_worker.agent.supervise`."""

from __future__ import annotations

import sys

import click

from gridtrain.cli.main import EXIT_CODES
from gridtrain.errors import ConfigError

MAX_READ = 4096


@click.command(epilog=EXIT_CODES)
@click.argument("invitation")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--name",
    envvar="GRIDTRAIN_NAME",
    show_envvar=True,
    default="",
    help="This worker's name.  [default: a random one]",
)
@click.option(
    "--upload-limit",
    envvar="GRIDTRAIN_UPLOAD_LIMIT",
    show_envvar=True,
    default="",
    metavar="RATE",
    help="Such as 20Mbit.",
)
@click.option(
    "--download-limit",
    envvar="GRIDTRAIN_DOWNLOAD_LIMIT",
    show_envvar=True,
    default="",
    metavar="RATE",
    help="Such as 100Mbit.",
)
@click.option(
    "--listen",
    envvar="GRIDTRAIN_LISTEN",
    show_envvar=True,
    default="",
    metavar="ADDRESS",
    help="Where to wait for other workers.  [default: a free port towards the coordinator]",
)
@click.option(
    "--advertise",
    envvar="GRIDTRAIN_ADVERTISE",
    show_envvar=True,
    default="",
    metavar="ADDRESS",
    help="The address that other workers should dial instead.",
)
@click.option(
    "--export-dir",
    envvar="GRIDTRAIN_EXPORT_DIR",
    show_envvar=True,
    default="",
    metavar="FOLDER",
    help="Where the final model goes.",
)
@click.option(
    "--state-dir",
    envvar="GRIDTRAIN_STATE_DIR",
    show_envvar=True,
    default="",
    metavar="FOLDER",
    help="Where this worker's own checkpoints go.  [default: under ~/.local/state/gridtrain]",
)
@click.option(
    "--checkpoint-every",
    envvar="GRIDTRAIN_CHECKPOINT_EVERY",
    show_envvar=True,
    type=click.IntRange(min=0),
    metavar="STEPS",
    help="Steps between two checkpoints; 0: none.  [default: 500]",
)
@click.option(
    "--checkpoint-keep",
    envvar="GRIDTRAIN_CHECKPOINT_KEEP",
    show_envvar=True,
    type=click.IntRange(min=1),
    help="So many checkpoints stay.  [default: 2]",
)
@click.option(
    "--relay/--no-relay",
    default=True,
    show_default=True,
    help="Pass on, sealed, what members that cannot reach each other send one another.",
)
@click.option("--unencrypted", is_flag=True, help="Join a run that talks in the clear; for benchmarks.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="After failures of the script.",
)
@click.option("--prefix", is_flag=True, help="Begin each line of the script's output with the worker's name.")
def worker(
    invitation: str,
    command: tuple[str, ...],
    name: str,
    upload_limit: str,
    download_limit: str,
    listen: str,
    advertise: str,
    export_dir: str,
    state_dir: str,
    checkpoint_every: int | None,
    checkpoint_keep: int | None,
    relay: bool,
    unencrypted: bool,
    restarts: int,
    prefix: bool,
) -> None:
    """Join the run that INVITATION is for: start COMMAND and supervise it.

    \b
      gridtrain worker gridtrain1:AbC... --upload-limit 20Mbit -- python train.py

    INVITATION is what the run's owner got from `gridtrain invite`; @FILE reads it from a file, - from
    the standard input.  The first time it lets this machine's key in, which is kept in a file; later the
    same invitation finds the same run, used up or not.  Ctrl-C or SIGTERM lets the script leave the
    run gracefully; a second one kills it.
    """
    from gridtrain.protocol.invitation import parse
    from gridtrain.runtime.client import explicit_address
    from gridtrain.wire.kinds import BoundError
    from gridtrain.wire.schema import NAME
    from gridtrain_worker.agent import Job, supervise

    try:
        NAME.pack(name)
    except BoundError as error:
        raise ConfigError(f"--name is {error.problem}", remedy="choose a shorter, plain one") from None
    job = Job(
        command=command,
        invitation=parse(_read(invitation)),
        name=name,
        listen=explicit_address("--listen", listen, any_port=True) if listen else "",
        advertise=explicit_address("--advertise", advertise) if advertise else "",
        upload_limit=upload_limit,
        download_limit=download_limit,
        export_dir=export_dir,
        state_dir=state_dir,
        checkpoint_every=checkpoint_every,
        checkpoint_keep=checkpoint_keep,
        relay=relay,
        unencrypted=unencrypted,
        restarts=restarts,
        prefix=prefix,
    )
    sys.exit(supervise(job, lambda line: click.echo(f"gridtrain worker: {line}", err=True)))


def _read(text: str) -> str:
    """The invitation itself, from where `text` says."""
    if text == "-":
        return sys.stdin.read(MAX_READ)
    if not text.startswith("@"):
        return text
    try:
        with open(text[1:], encoding="utf-8") as file:
            return file.read(MAX_READ)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the invitation cannot be read from {text[1:]}: {error}", remedy="check the name after the @"
        ) from None
