"""`gridtrain bench`: reads the options and calls `gridtrain.tools.bench.main`, which does the rest."""

from __future__ import annotations

import json
import math

import click

from gridtrain.cli.option_flags import default_option

MAX_WORKERS = 32


def _sizes(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Parse group sizes such as "2,4"; return () for ""."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 2 <= int(word) <= MAX_WORKERS for word in words):
        raise click.BadParameter(f'"{text}" is not a list of numbers from 2 to {MAX_WORKERS}, such as 2,4')
    sizes = tuple(int(word) for word in words)
    if len(set(sizes)) < len(sizes):
        raise click.BadParameter(
            f'"{text}" contains a size twice; use --repeats to measure each size more often'
        )
    return sizes


def _share(context: click.Context, option: click.Parameter, value: float) -> float:
    """Refuse a share that is NaN, which click's range check accepts."""
    if math.isnan(value):
        raise click.BadParameter("the share is nan; it must be above 0 and at most 1, such as 0.01")
    return value


@click.command()
@default_option(
    "--parameters", 10_000_000, "Number of parameters of the model.", type=click.IntRange(min=1000)
)
@default_option(
    "--density",
    0.01,
    "Share of the gradient that a sparse exchange sends.",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    callback=_share,
)
@default_option(
    "--workers", "2,4", "Sizes of the local groups; '' measures only the processor.", callback=_sizes
)
@default_option("--repeats", 5, "Number of measurements of each exchange.", type=click.IntRange(min=1))
@click.option("--cap", default="", metavar="RATE", help="Rate limit of each local worker, such as 100Mbit.")
@default_option("--line", "20Mbit", "Link rate for converting bytes into seconds.", metavar="RATE")
@click.option(
    "--unencrypted", is_flag=True, help="Exchange without encryption, to compare with other programs."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(
    parameters: int,
    density: float,
    workers: tuple[int, ...],
    repeats: int,
    cap: str,
    line: str,
    unencrypted: bool,
    as_json: bool,
) -> None:
    """Measure how fast this machine selects gradient elements (on CPU and GPU), encodes them, and
    exchanges gradients among a few local workers. Needs no other machine and no run; takes about a minute.
    """
    from rich.console import Console

    from gridtrain.extras import require_torch
    from gridtrain.network.transport.rate_limiter import parse_rate
    from gridtrain.tools.bench.main import BenchPlan, check_memory, print_result, run_bench

    require_torch("gridtrain bench")
    for rate in (cap, line) if cap else (line,):
        parse_rate(rate)  # raises before anything is started
    plan = BenchPlan(parameters, density, workers, repeats, not unencrypted, cap, line)
    check_memory(plan)
    found = run_bench(plan, lambda text: click.echo(f"measuring {text} ...", err=True))
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        print_result(found, Console())
