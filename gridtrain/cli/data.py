"""`gridtrain data index`: writes the index of a sharded data set (see `training.data.shard_index`)."""

from __future__ import annotations

from pathlib import Path

import click

from gridtrain.cli.option_flags import default_option
from gridtrain.errors import ConfigError
from gridtrain.extras import require_torch
from gridtrain.quantities import format_bytes, format_count


@click.group()
def data() -> None:
    """Prepare a sharded data set."""


@data.command(short_help="Write the index of a sharded data set.")
@click.argument("files", nargs=-1, required=True, metavar="FILE|URL...")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default="index.json", show_default=True
)
@click.option(
    "--url", default="", help="URL of the folder that contains all the files.  [default: beside the index]"
)
@click.option(
    "--format",
    "form",
    default="",
    help="jsonl, text, tar, parquet or arrow.  [default: inferred from the file names]",
)
@click.option(
    "--tokenizer",
    default="",
    help='Count tokens, for packing: "bytes", or a name or folder for transformers.AutoTokenizer.',
)
@default_option("--text-field", "text", "The field of a sample that contains its text.")
def index(files: tuple[str, ...], out: Path, url: str, form: str, tokenizer: str, text_field: str) -> None:
    """Write the index of a data set: the number of samples, size and digest of each file.

    \b
      gridtrain data index corpus/*.jsonl --out corpus/index.json
      gridtrain data index corpus/*.jsonl --url https://host/corpus
      gridtrain data index "hf://datasets/org/name@revision/data/*.parquet"
      gridtrain data index corpus/*.jsonl.gz --tokenizer bytes

    Every file is read once, and every sample is decoded.  Scripts pass the index to gridtrain.Shards;
    [run.data] in run.toml names it for volunteers.
    """
    require_torch("gridtrain data index")
    from gridtrain.training.data import shard_index, token_packing
    from gridtrain.training.data.shard_files import ShardFile

    def show(shard: ShardFile) -> None:
        tokens = f", {format_count(shard.tokens, 'token')}" if tokenizer else ""
        samples = format_count(shard.samples, "sample")
        click.echo(f"{shard.url}: {samples}{tokens}, {format_bytes(shard.bytes)}", err=True)

    if not out.parent.is_dir():  # checked before all files are read
        raise ConfigError(
            f"the folder {out.parent} does not exist", remedy="create it, or choose another --out"
        )
    tokenize = token_packing.tokenizer_named(tokenizer, text_field) if tokenizer else None
    made = shard_index.build_index(files, format=form, tokenize=tokenize, tokenizer=tokenizer, progress=show)
    shard_index.write_index(made, out, url)
    samples, count = format_count(made.samples, "sample"), format_count(len(made.shards), "file")
    click.echo(f"{out}: {samples} in {count}, index {made.digest}")
