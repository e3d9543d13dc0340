"""`gridtrain export`: writes a checkpoint's model for other programs (see `checkpoint.model_export`)."""

from __future__ import annotations

import click

from gridtrain.cli.layers_file import parse_size
from gridtrain.cli.output import wrap_text
from gridtrain.extras import require_torch
from gridtrain.quantities import describe_skipped, format_count


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT_OR_STATE_DIR")
@click.argument("out", metavar="OUT.pt|OUT.safetensors|FOLDER")
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint.  [default: the latest]")
@click.option(
    "--shard-size", default="5GB", metavar="SIZE", help="Largest file of a whole model in FOLDER.  [5GB]"
)
def export(checkpoint: str, out: str, step: int | None, shard_size: str) -> None:
    """Write a checkpoint's model as a plain state_dict file, or as a folder for `from_pretrained`.

    \b
      gridtrain export ~/.local/state/gridtrain/default model.safetensors
      gridtrain export checkpoints/step-00000500 model.pt
      gridtrain export checkpoints adapter
      gridtrain export s3://bucket/run s3://bucket/model.safetensors

    CHECKPOINT_OR_STATE_DIR is a checkpoint, or a folder that contains checkpoints: a worker's --state-dir,
    the run's state directory, or the URL of --checkpoints.  A .pt file is loaded with
    torch.load(path, weights_only=True).  FOLDER is loaded with PeftModel.from_pretrained(base, FOLDER) if
    adapters were trained, and otherwise with AutoModel...from_pretrained(FOLDER); the model must be one of
    PEFT's or transformers'.
    """
    require_torch("gridtrain export")
    from gridtrain.training.checkpoint.model_export import export_by_url
    from gridtrain.training.checkpoint.remote_store import shown_url

    done = export_by_url(checkpoint, out, step, parse_size(shard_size))
    size = f"{format_count(done.tensors, 'tensor')} with {format_count(done.elements, 'element')}"
    text = f"the model after step {done.step}, {size}"
    click.echo(wrap_text(f"{shown_url(out)}: {text}, from {done.source}"))
    if learned := describe_skipped(done.ledger.skipped, done.ledger.consumed):
        click.echo(learned, err=True)
    if done.left_out:
        click.echo(
            f"left out {format_count(len(done.left_out), 'frozen tensor')}, such as {done.left_out[0]!r}, "
            "which no checkpoint contains: load the adapter into the base that the run used",
            err=True,
        )
