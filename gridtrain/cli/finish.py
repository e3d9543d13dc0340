"""`gridtrain finish`: ends a run before its script reaches the last step."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.member_lookup import operator_for
from gridtrain.cli.option_flags import run_options
from gridtrain.cli.output import wrap_text


@click.command()
@run_options
def finish(run: str, state: Path | None) -> None:
    """End the run now, as if its script had reached its last step.

    After the current step, the workers write their last checkpoints, the first worker also writes the model,
    and all exit with code 0.  A pipeline that lacks a stage for a minute ends without a model.  Workers
    that join later are refused.
    """
    from gridtrain.core.messages import EndRun

    click.echo(wrap_text(operator_for(run, state).order(EndRun())))
