"""`gridtrain export`: options for `gridtrain.training.checkpoint.model_export.export_model`."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.errors import ConfigError
from gridtrain.extras import install_command


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CHECKPOINT_OR_STATE_DIR")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT.pt|OUT.safetensors")
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint.  [default: the latest]")
def export(checkpoint: Path, out: Path, step: int | None) -> None:
    """Write a checkpoint's model as a plain state_dict file.

    \b
      gridtrain export ~/.local/state/gridtrain/default model.safetensors
      gridtrain export checkpoints/step-00000500 model.pt

    CHECKPOINT_OR_STATE_DIR is a checkpoint, or a folder that contains checkpoints: a worker's --state-dir, or
    the run's state directory.  A .pt file is loaded with torch.load(path, weights_only=True).
    """
    try:
        from gridtrain.training.checkpoint.model_export import export_model as export_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, but is needed to read checkpoints",
            remedy=install_command("torch"),
        ) from None
    done = export_model(checkpoint, out, step)
    click.echo(
        f"{out}: the model after step {done.step}, {done.tensors} tensors with {done.elements} elements, "
        f"from {done.source}"
    )
