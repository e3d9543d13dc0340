"""`gridtrain coordinator`: options only; the work is `gridtrain_coordinator.daemon.serve`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gridtrain.cli.main import EXIT_CODES
from gridtrain.config import DEFAULT_PORT


@click.command(epilog=EXIT_CODES)
@click.option(
    "--listen",
    default=f"tcp://127.0.0.1:{DEFAULT_PORT}",
    show_default=True,
    metavar="ADDRESS",
    help="Where to accept workers; tcp://0.0.0.0:7700 for all interfaces, port 0 for any free one.",
)
@click.option(
    "--advertise", default="", metavar="ADDRESS", help="The address that workers should use instead."
)
@click.option("--run", default="default", show_default=True, metavar="NAME", help="The run's name.")
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Journal and keys of the run.  [default: ~/.local/state/gridtrain/RUN]",
)
@click.option(
    "--min-workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Start only with so many workers.",
)
@click.option(
    "--unencrypted",
    is_flag=True,
    help="Talk in the clear, for benchmarks; on this machine only, unless --benchmark is given too.",
)
@click.option("--benchmark", is_flag=True, hidden=True)
@click.option(
    "--exit-when-finished", is_flag=True, help="Exit once the run is finished and its workers have left."
)
@click.option(
    "--backup-to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Keep backups of journal and keys there, on another disk, for a standby.",
)
@click.option(
    "--backup-every",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="At most one backup in this time.",
)
@click.option(
    "--backup-keep", type=click.IntRange(min=1), default=3, show_default=True, help="So many backups stay."
)
@click.option(
    "--from-backup",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Take a run over: begin a new --state from the latest backup there.",
)
def coordinator(
    listen: str,
    advertise: str,
    run: str,
    state: Path | None,
    min_workers: int,
    unencrypted: bool,
    benchmark: bool,
    exit_when_finished: bool,
    backup_to: Path | None,
    backup_every: float,
    backup_keep: int,
    from_backup: Path | None,
) -> None:
    """Coordinate a run: admit workers, assign ranks, keep the journal.

    Prints how to invite workers; then one log line for each event, as JSON if the log is not
    a terminal.  Sees no gradient and needs no torch.
    """
    from gridtrain.runtime.client import explicit_address
    from gridtrain_coordinator.daemon import Settings, serve

    settings = Settings(
        run=run,
        listen=explicit_address("--listen", listen, any_port=True),
        advertise=explicit_address("--advertise", advertise) if advertise else "",
        state=state,
        unencrypted=unencrypted,
        benchmark=benchmark,
        min_workers=min_workers,
        exit_when_finished=exit_when_finished,
        backup_to=backup_to,
        backup_every_s=backup_every,
        backup_keep=backup_keep,
        from_backup=from_backup,
    )
    sys.exit(serve(settings, out=sys.stdout, err=sys.stderr))
