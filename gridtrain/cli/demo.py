"""`gridtrain demo`: reads the options of the demo, which compares exchanges or trains a pipeline."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from gridtrain.cli.option_flags import default_option
from gridtrain.tools.demo.recipe import DENSITY, MEASURE_EVERY, RECIPES, SIZES

_MODELS = ", ".join(f"{name}: {size.parameters:,}" for name, size in SIZES.items())


@click.command()
@default_option("--workers", 4, "Number of worker processes.", type=click.IntRange(1, 32))
@default_option("--cap", "20Mbit", "Upload and download limit of each worker.")
@default_option(
    "--density",
    DENSITY,
    "Share of the gradient that a sparse exchange sends.",
    type=click.FloatRange(0.0, 1.0, min_open=True),
)
@default_option(
    "--model",
    "small",
    f"Size of the byte GPT, in parameters ({_MODELS}). The settings are tuned for small.",
    type=click.Choice(list(SIZES)),
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of every run.  [default: 250 with dense, 450 with sparse exchanges]",
)
@default_option(
    "--exchanges", "dense,gtopk", f"Exchanges to compare, the first as the baseline: {', '.join(RECIPES)}."
)
@default_option("--seed", 0, "Seed of the initial parameters.", type=int)
@default_option(
    "--out",
    Path("demo-results"),
    "Folder for report.md, loss.svg, metrics.json and the logs.",
    type=click.Path(file_okay=False, path_type=Path),
)
@click.option(
    "--pipeline",
    is_flag=True,
    help="Train a model that exceeds one worker's memory limit, in stages on four workers.",
)
@click.option("--quick", is_flag=True, help="Use a tiny model and a tenth of the steps.")
def demo(
    workers: int,
    cap: str,
    density: float,
    model: str,
    steps: int | None,
    exchanges: str,
    seed: int,
    out: Path,
    pipeline: bool,
    quick: bool,
) -> None:
    """Train a small byte GPT on real text with a coordinator and workers on this machine, each worker
    behind a bandwidth cap: first with a dense ring, then with gTop-k. Needs no download; takes about two
    minutes on two CPU cores. Finally prints a table and writes a chart of the loss against time and bytes.
    """
    from rich.console import Console

    from gridtrain.extras import require_torch
    from gridtrain.tools.demo.main import run_demo
    from gridtrain.tools.demo.orchestrator import DemoPlan

    require_torch("gridtrain demo")  # before starting processes, each of which would fail without it

    names = [name.strip() for name in exchanges.split(",") if name.strip()]
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names or len(set(names)) != len(names):
        raise click.BadParameter(
            f'"{exchanges}" must be a list of distinct exchanges, from {", ".join(RECIPES)}',
            param_hint="--exchanges",
        )

    def steps_of(name: str) -> int:
        recipe = RECIPES[name]
        return steps or (recipe.quick_steps if quick else recipe.steps)

    plan = DemoPlan(
        runs=tuple((name, steps_of(name)) for name in names),
        out=out,
        workers=workers,
        cap=cap,
        density=density,
        model="tiny" if quick else model,
        seed=seed,
        measure_every=5 if quick else MEASURE_EVERY,
    )
    with _unwinding_on_signals():
        if pipeline:
            from gridtrain.tools.demo.pipeline_demo import run_pipeline_demo

            run_pipeline_demo(out, Console(), steps=steps or (5 if quick else 24), quick=quick)
        else:
            run_demo(plan, Console())


@contextlib.contextmanager
def _unwinding_on_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP (the terminal was closed) like Ctrl-C: clean up, then exit with 128 plus the
    signal's number."""
    stopped_by = signal.SIGINT

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = signal.Signals(number)
        raise KeyboardInterrupt

    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in handled}
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be closed
            click.echo(
                f"gridtrain: stopped by {stopped_by.name}; all processes of the demo have ended", err=True
            )
        sys.exit(128 + stopped_by)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
