"""`gridtrain coordinator`: options only; the work is `gridtrain_coordinator.serving.serve`."""

from __future__ import annotations

import sys
from typing import Any

import click

from gridtrain.cli.main import EXIT_CODES
from gridtrain.cli.option_flags import add_options, resolve_settings


@click.command(epilog=EXIT_CODES)
@add_options("coordinator")
def coordinator(**given: Any) -> None:
    """Coordinate a run: admit workers, assign ranks, keep the journal.

    Prints how to invite workers; then one log line for each event, as JSON if the log is not
    a terminal.  Sees no gradient and needs no torch.
    """
    from gridtrain_coordinator.serving import serve
    from gridtrain_coordinator.settings import settings_from

    settings = settings_from(resolve_settings("coordinator", given))
    sys.exit(serve(settings, out=sys.stdout, err=sys.stderr))
