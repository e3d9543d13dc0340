"""`gridtrain worker`: options only; the work is `gridtrain_worker.agent.supervise`."""

from __future__ import annotations

import sys

import click

from gridtrain.cli.main import EXIT_CODES


@click.command(epilog=EXIT_CODES)
@click.argument("address")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--run", envvar="GRIDTRAIN_RUN", default="default", show_default=True, help="The run's name.")
@click.option(
    "--name", envvar="GRIDTRAIN_NAME", default="", help="This worker's name.  [default: a random one]"
)
@click.option(
    "--upload-limit", envvar="GRIDTRAIN_UPLOAD_LIMIT", default="", metavar="RATE", help="Such as 20Mbit."
)
@click.option(
    "--download-limit", envvar="GRIDTRAIN_DOWNLOAD_LIMIT", default="", metavar="RATE", help="Such as 100Mbit."
)
@click.option(
    "--listen",
    envvar="GRIDTRAIN_LISTEN",
    default="",
    metavar="ADDRESS",
    help="Where to wait for other workers.  [default: a free port towards the coordinator]",
)
@click.option(
    "--advertise",
    envvar="GRIDTRAIN_ADVERTISE",
    default="",
    metavar="ADDRESS",
    help="The address that other workers should dial instead.",
)
@click.option(
    "--export-dir",
    envvar="GRIDTRAIN_EXPORT_DIR",
    default="",
    metavar="FOLDER",
    help="Where the final model goes.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="After failures of the script.",
)
@click.option("--prefix", is_flag=True, help="Begin each line of the script's output with the worker's name.")
def worker(
    address: str,
    command: tuple[str, ...],
    run: str,
    name: str,
    upload_limit: str,
    download_limit: str,
    listen: str,
    advertise: str,
    export_dir: str,
    restarts: int,
    prefix: bool,
) -> None:
    """Join the run coordinated at ADDRESS: start COMMAND and supervise it.

    \b
      gridtrain worker tcp://192.168.1.20:7700 --upload-limit 20Mbit -- python train.py

    ADDRESS is tcp://host:port, host:port or host.  Ctrl-C or SIGTERM lets the script leave the run
    gracefully; a second one kills it.
    """
    from gridtrain_worker.agent import Job, supervise

    job = Job(
        command=command,
        coordinator=address,
        run=run,
        name=name,
        listen=listen,
        advertise=advertise,
        upload_limit=upload_limit,
        download_limit=download_limit,
        export_dir=export_dir,
        restarts=restarts,
        prefix=prefix,
    )
    sys.exit(supervise(job, lambda line: click.echo(f"gridtrain worker: {line}", err=True)))
