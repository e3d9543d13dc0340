"""`gridtrain coordinator`: reads the options and calls `gridtrain_coordinator.serving.serve`."""

from __future__ import annotations

import sys
from typing import Any

import click

from gridtrain.cli.option_flags import ALSO_IN_ENVIRONMENT, add_options, resolve_settings


@click.command(epilog=ALSO_IN_ENVIRONMENT)
@add_options("coordinator")
def coordinator(**given: Any) -> None:
    """Coordinate a run: admit workers, assign ranks, keep the journal.

    Prints how to invite workers, then logs each event.  Receives no gradients and does not need PyTorch.
    """
    from gridtrain_coordinator.serving import serve_and_log_errors
    from gridtrain_coordinator.settings import settings_from

    settings = settings_from(resolve_settings("coordinator", given))
    sys.exit(serve_and_log_errors(settings, out=sys.stdout, err=sys.stderr))
