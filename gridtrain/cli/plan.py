"""`gridtrain plan`: predicts step time, bytes and scaling of each exchange on a network before workers join.

The figures are predictions of `gridtrain.core.planning.exchange_recommendation`; nothing is measured.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gridtrain.cli.option_flags import brief_option
from gridtrain.cli.output import make_console, wrap_text
from gridtrain.cli.plan_stages import OPTION_NAMES, pipeline_options, show_plan
from gridtrain.config import DENSE_VALUES, LOCAL_STEPS_DENSITY, VALUES
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gridtrain.cli.live_network import LiveNetwork
    from gridtrain.cli.network_file import DescribedNetwork
    from gridtrain.core.planning.exchange_recommendation import ExchangeEstimate
    from gridtrain.core.planning.worker_memory_estimate import WorkerMemory

Parsed = TypeVar("Parsed")

MAX_ORDERED_WORKERS = 32
"""The maximum number of workers for which the best order on a network of unequal links is sought.

With more workers, the workers of each site stay together."""

DEFAULT_OPTIMIZER = "adamw"
ASSUMED_COMPUTE = "Assumed: a step takes {:g} s to compute; specify your model's time with --compute."
MAX_WORKERS = 8192
MAX_PARAMETERS = 1e15
MAX_COMPUTE_S = 1e6
"""The longest compute time.  With a longer time, or one under a nanosecond, predictions would overflow."""

_COUNT = re.compile(r"\d+(?:\.\d+)?(?:[eE]\d+)?[kMGB]?")
_MULTIPLES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


def _checked_parameters(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    if not _COUNT.fullmatch(text):
        raise click.BadParameter(f'"{text}" is not a number such as 25600000, 25.6e6, 25.6M or 7B')
    count = float(text.rstrip("kMGB")) * _MULTIPLES.get(text[-1], 1.0)
    if not 1 <= count <= MAX_PARAMETERS:
        raise click.BadParameter(f'"{text}" is not between 1 and {MAX_PARAMETERS:g}')
    return round(count)


def _worker_counts(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        counts = _doubled(int(first), int(last)) if dots else [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(2 <= count <= MAX_WORKERS for count in counts):
        raise click.BadParameter(f'"{text}" is not a list such as "2..64" or "2,3,8", each from 2 to 8192')
    return counts


def _doubled(first: int, last: int) -> list[int]:
    """Return `first` and its successive doublings up to `last`, then `last` if it is not one of them; [] if
    the range is invalid."""
    if not 2 <= first <= last <= MAX_WORKERS:
        return []
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == last else [*counts, last]


def _parse(parse: Callable[[str], Parsed], text: str) -> Parsed:
    """Return the parsed value of an option.  Raises `click.BadParameter` if `parse` raises `ConfigError`."""
    try:
        return parse(text)
    except ConfigError as error:
        raise click.BadParameter(f"{error.reason}; {error.remedy}") from None


def _checked_link(_: click.Context, __: click.Parameter, text: str) -> str:
    from gridtrain.cli.network_file import single_site

    _parse(lambda link: single_site(link, "0s"), text)
    return text


def _checked_latency(_: click.Context, __: click.Parameter, text: str) -> str:
    from gridtrain.cli.network_file import parse_seconds

    _parse(parse_seconds, text)
    return text


def _compute_seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    from gridtrain.cli.network_file import parse_seconds

    compute_s = _parse(parse_seconds, text)
    if not 1e-9 <= compute_s <= MAX_COMPUTE_S:
        raise click.BadParameter(f'"{text}" is not between 1e-9 s and {MAX_COMPUTE_S:g} s')
    return compute_s


def _named_exchanges(_: click.Context, __: click.Parameter, text: str) -> list[tuple[str, str]]:
    """Return the (name, encoding of dense values) of each exchange in a list, without duplicates."""
    from gridtrain.core.planning.workload import ExchangeKind

    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {kind.value: (kind.value, "fp32") for kind in ExchangeKind}
    known |= {
        f"{kind}:{values}": (kind.value, values)
        for kind in ExchangeKind
        if not kind.is_sparse
        for values in DENSE_VALUES
    }
    if not names or not known.keys() >= set(names):
        raise click.BadParameter(f'"{text}" is not a list of these exchanges: {", ".join(known)}')
    return list(dict.fromkeys(known[name] for name in names))


def _writable(_: click.Context, __: click.Parameter, picture: Path | None) -> Path | None:
    if picture and not ((folder := picture.absolute().parent).is_dir() and os.access(folder, os.W_OK)):
        raise click.BadParameter(f"{folder} is not a writable folder")
    return picture


@click.command()
@click.option(
    "--parameters",
    callback=_checked_parameters,
    metavar="N",
    help="Parameters: 25600000, 25.6e6, 25.6M or 7B.",
)
@brief_option(
    "--workers",
    "2..64",
    '"2,3,8", or "2..16" for doublings.',
    name="counts",
    metavar="LIST",
    callback=_worker_counts,
)
@brief_option("--link", "100Mbit", "Rate of a worker, or DOWN/UP.", metavar="RATE", callback=_checked_link)
@brief_option(
    "--latency", "10ms", "One-way latency between workers.", metavar="TIME", callback=_checked_latency
)
@click.option(
    "--network",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML file of sites and links, instead of --link.",
)
@click.option(
    "--coordinator", metavar="INVITATION", help="Links, model, optimizer and compute time of a run."
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="The same, for a run on this machine.",
)
@brief_option(
    "--compute",
    "0.5s",
    "Compute time of a step.",
    name="compute_s",
    metavar="TIME",
    callback=_compute_seconds,
)
@brief_option(
    "--exchange",
    "dense,topk,gtopk,star",
    "Names, also dense:int8.",
    name="exchanges",
    metavar="LIST",
    callback=_named_exchanges,
)
@brief_option(
    "--density",
    0.001,
    "Share of elements sent.",
    metavar="SHARE",
    type=click.FloatRange(0.0, 1.0, min_open=True),
)
@click.option("--momentum", is_flag=True, help="Assume that sparse exchanges apply momentum.")
@brief_option("--values", "fp16", f"One of {', '.join(VALUES)}.", metavar="KIND", type=click.Choice(VALUES))
@brief_option("--local-steps", 1, "Steps per exchange.", metavar="N", type=click.IntRange(min=1))
@brief_option(
    "--computing",
    0.9,
    "Target computing time.",
    metavar="SHARE",
    type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True),
)
@pipeline_options
@click.option("--plain", is_flag=True, help="Assume unencrypted connections.")
@click.option(
    "--picture",
    callback=_writable,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write an SVG chart to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.pass_context
def plan(
    context: click.Context,
    /,
    parameters: int | None,
    counts: list[int],
    link: str,
    latency: str,
    network: Path | None,
    coordinator: str | None,
    state: Path | None,
    compute_s: float,
    exchanges: list[tuple[str, str]],
    density: float,
    momentum: bool,
    values: str,
    local_steps: int,
    computing: float,
    plain: bool,
    picture: Path | None,
    as_json: bool,
    **pipeline: Any,
) -> None:
    """Predict the step time of each exchange on a network that you describe.

    \b
      gridtrain plan --parameters 25.6M --link 100Mbit --latency 10ms
      gridtrain plan --parameters 124M --network sites.toml --exchange gtopk,dense
      gridtrain plan --stages 4 --layers layers.toml --batch 64 --memory 8GB

    With --stages, --compute is the whole model's time.  Exchanges: dense, dense-direct, topk,
    gtopk, gtopk-direct, gtopk-tree, star, star-gtopk.
    """
    from gridtrain.cli import network_file
    from gridtrain.core.planning.workload import ExchangeKind, Workload

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT

    if network and (given("link") or given("latency")):
        raise click.UsageError("--network gives each site's link and latency; leave out --link and --latency")
    live = _live(coordinator, state) if coordinator or state else None
    described: DescribedNetwork | LiveNetwork = live or (
        network_file.read_network(network) if network else network_file.single_site(link, latency)
    )
    optimizer = pipeline["optimizer"] or (live.optimizer if live is not None else "")
    pipeline["optimizer"] = optimizer or DEFAULT_OPTIMIZER
    if pipeline["stages"]:
        links = described.network(pipeline["stages"])
        show_plan(links, parameters or 0, compute_s, picture, as_json, pipeline)
        if not (as_json or given("compute_s")) and (pipeline["layers"] or "1").isdecimal():
            click.echo(wrap_text(ASSUMED_COMPUTE.format(compute_s)))
        return
    if extra := [name for name in OPTION_NAMES if given(name)]:
        raise click.UsageError(
            f"--{extra[0].replace('_', '-')} applies only to a model in stages; also specify --stages"
        )
    has_density = given("density")
    if live is not None:
        if live.workload is not None:
            parameters = parameters or live.workload.parameters
            if live.workload.kind.has_density:
                density = density if given("density") else live.workload.density
                has_density = True
                values = values if given("values") else live.workload.values
        compute_s = compute_s if given("compute_s") else live.compute_s or compute_s
        local_steps = local_steps if given("local_steps") else live.local_steps
        momentum = momentum or live.has_exchange_momentum
    if not parameters:
        raise click.UsageError("--parameters is missing; specify the model's number of parameters")
    counts = counts if given("counts") or not (network or live) else [described.workers]
    _check_counts(counts, picture)
    density = density if has_density or local_steps == 1 else LOCAL_STEPS_DENSITY
    loads = [
        Workload(ExchangeKind(name), parameters, density, values, not plain, dense_values)
        for name, dense_values in exchanges
    ]
    rows = [[_estimate(load, described, count, compute_s, local_steps) for load in loads] for count in counts]
    local_rows = rows if has_density else [[_in_local_steps(each, described) for each in row] for row in rows]
    if picture:
        picture.write_text(_chart(rows, _subtitle(parameters, described, link, latency, compute_s)))
    memory_of = partial(_memory, optimizer=optimizer, momentum=momentum)
    if as_json:
        pairs = zip(chain(*rows), chain(*local_rows), strict=True)
        click.echo(json.dumps([_figures(*pair, computing, memory_of(pair[0])) for pair in pairs]))
    else:
        _print(rows, local_rows, described, computing, optimizer, memory_of)
        if not (given("compute_s") or (live is not None and live.compute_s)):
            click.echo(wrap_text(ASSUMED_COMPUTE.format(compute_s)))
        if picture:
            click.echo(f"picture: {picture}")


def _check_counts(counts: list[int], picture: Path | None) -> None:
    if not 2 <= counts[-1] <= MAX_WORKERS:
        raise click.UsageError(
            f"the network has {counts[-1]} worker{'s' if counts[-1] > 1 else ''}: exchanges are predicted "
            f"for 2 to {MAX_WORKERS}; choose another number with --workers"
        )
    if picture and len(counts) < 2:
        raise click.UsageError("--picture shows how exchanges scale; pass at least two numbers to --workers")


def _live(coordinator: str | None, state: Path | None) -> LiveNetwork:
    from gridtrain.cli.live_network import network_from_status
    from gridtrain.cli.status import ANSWER_TIMEOUT_S, client_for

    with client_for(coordinator, "default", state) as client:
        return network_from_status(client.status(ANSWER_TIMEOUT_S))


def _estimate(
    load: Any, described: DescribedNetwork | LiveNetwork, count: int, compute_s: float, local_steps: int
) -> ExchangeEstimate:
    """Estimate a step as in a run, which chooses the topology of `dense` and `gtopk` itself."""
    from gridtrain.core.planning.exchange_recommendation import estimate_best_order, estimate_exchange
    from gridtrain.core.planning.topology_choice import choose_topology
    from gridtrain.core.planning.workload import DIRECT_KIND_OF, CpuCosts

    network = described.network(count)
    ordered = not described.is_uniform and 2 < count <= MAX_ORDERED_WORKERS
    estimate = estimate_best_order if ordered else estimate_exchange
    used, direct_kind = load, DIRECT_KIND_OF.get(load.kind)
    if direct_kind and choose_topology(load, count, network, edges=True).is_direct:
        used = replace(load, kind=direct_kind)
    found = estimate(used, network, CpuCosts(), compute_s, local_steps=local_steps)
    return replace(found, load=load)


def _in_local_steps(each: ExchangeEstimate, described: DescribedNetwork | LiveNetwork) -> ExchangeEstimate:
    """Estimate a sparse exchange with the density for local steps."""
    if not each.load.kind.has_density:
        return each
    load = replace(each.load, density=LOCAL_STEPS_DENSITY)
    return _estimate(load, described, each.world_size, each.compute_s, each.local_steps)


# -- output -------------------------------------------------------------------------------------------


def _print(
    rows: Sequence[Sequence[ExchangeEstimate]],
    local_rows: Sequence[Sequence[ExchangeEstimate]],
    described: DescribedNetwork | LiveNetwork,
    computing: float,
    optimizer: str,
    memory_of: Callable[[ExchangeEstimate], WorkerMemory],
) -> None:
    from gridtrain.cli.live_network import LiveNetwork
    from gridtrain.core.planning.exchange_recommendation import format_exchange, recommend_exchange
    from gridtrain.core.planning.local_steps_proposal import recommend_local_steps

    console = make_console()
    console.print("Step time, bytes sent by the busiest worker, scaling efficiency:", highlight=False)
    for table in _tables(rows, console):
        console.print(table, markup=False)
    if rows[0][0].local_steps > 1:
        console.print(
            f"{format_exchange(rows[0][0])}: bytes are given per exchange, not per step.",
            markup=False,
            highlight=False,
        )
    for at in (0, -1) if len(rows) > 1 else (0,):
        click.echo(wrap_text(recommend_exchange(rows[at]).reason))
        if not optimizer.startswith("sgd"):  # proposals apply to AdamW and similar optimizers
            click.echo(wrap_text(recommend_local_steps(local_rows[at], computing)))
    named = optimizer or f"{DEFAULT_OPTIMIZER} (assumed)"
    text = f"Memory of a worker, bytes for each trainable parameter in float32, with --optimizer {named}:"
    click.echo(wrap_text(text))
    for each in rows[-1]:
        memory = memory_of(each)
        whole = format_bytes(memory.total * each.load.parameters)
        click.echo(wrap_text(f"  {each.load.name} {memory.total:.3g} ({whole}): {memory}", indent=4))
    if not described.is_uniform:
        console.print(
            "For each exchange, members are ordered to minimize its predicted time.", highlight=False
        )
        if rows[-1][0].world_size > described.workers and isinstance(described, LiveNetwork):
            text = f"Above {described.workers} workers, each further worker is assumed to equal a member."
            console.print(text, highlight=False)


def _tables(rows: Sequence[Sequence[ExchangeEstimate]], console: Console) -> list[Table]:
    """Return one table for all exchanges, or several tables with fewer exchanges each on a narrow
    terminal."""
    from rich.measure import Measurement

    unbounded = console.options.update(width=10_000)
    for at_once in range(len(rows[0]), 0, -1):
        firsts = range(0, len(rows[0]), at_once)
        tables = [_table([row[first : first + at_once] for row in rows]) for first in firsts]
        if all(Measurement.get(console, unbounded, table).maximum <= console.width for table in tables):
            break
    return tables


def _table(rows: Sequence[Sequence[ExchangeEstimate]]) -> Table:
    """Return a table with a row for each number of workers: step time, bytes and efficiency of each
    exchange."""
    from rich.table import Table

    from gridtrain.quantities import format_seconds

    table = Table()
    table.add_column("workers", justify="right")
    for each in rows[0]:
        for name in (each.load.name, "sent", "eff."):
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row[0].world_size)]
        for each in row:
            sent = format_bytes(each.cost.sent_bytes)
            cells += (format_seconds(each.step_s), sent, f"{each.efficiency:.1%}")
        table.add_row(*cells)
    return table


def _memory(each: ExchangeEstimate, optimizer: str, momentum: bool) -> WorkerMemory:
    from gridtrain.config import Dense, LocalSteps
    from gridtrain.core.planning.worker_memory_estimate import estimate_worker_memory
    from gridtrain.core.stages.stage_cost import OPTIMIZER_STATE_COPIES

    load, made = each.load, each.load.kind.exchange
    factor = 0.9 if momentum and each.local_steps == 1 else 0.0  # local steps exchange no gradients
    wire = Dense(values=load.dense_values) if issubclass(made, Dense) else made(load.density, momentum=factor)
    return estimate_worker_memory(
        wire,
        parameters=load.parameters,
        workers=each.world_size,
        optimizer_values=OPTIMIZER_STATE_COPIES[optimizer or DEFAULT_OPTIMIZER],
        local=LocalSteps(each.local_steps, wire) if each.local_steps > 1 else None,
    )


def _figures(
    each: ExchangeEstimate, in_local_steps: ExchangeEstimate, computing: float, memory: WorkerMemory
) -> dict[str, Any]:
    from gridtrain.core.planning.local_steps_proposal import propose_for

    return {
        "exchange": each.load.name,
        "workers": each.world_size,
        "density": _density(each),
        "step_s": each.step_s,
        "exchange_s": each.cost.exchange_s,
        "sent_bytes": each.cost.sent_bytes,
        "received_bytes": each.cost.received_bytes,
        "cpu_s": each.cost.cpu_s,
        "memory_bytes_per_parameter": asdict(memory),
        "efficiency": each.efficiency,
        "speedup": each.speedup,
        "proposed_local_steps_density": _density(in_local_steps),
        "proposed_local_steps": propose_for(in_local_steps, computing, overlap=False).every,
        "proposed_overlapped_local_steps": propose_for(in_local_steps, computing, overlap=True).every,
    }


def _density(each: ExchangeEstimate) -> float:
    return each.load.density if each.load.kind.has_density else 1.0


def _subtitle(
    parameters: int, described: DescribedNetwork | LiveNetwork, link: str, latency: str, compute_s: float
) -> str:
    links = f"{link} and {latency} each" if described.is_uniform else described.description
    return f"{parameters:,} parameters; {links}; {compute_s:g} s of computation per step; predicted"


def _chart(rows: Sequence[Sequence[ExchangeEstimate]], subtitle: str) -> str:
    from gridtrain.tools.demo.svg_chart import COLOURS, ChartLine, ChartPanel, draw_chart

    lines: list[tuple[ChartLine, ChartLine]] = []
    for index, first in enumerate(rows[0]):
        name, colour = first.load.name, COLOURS[index % len(COLOURS)]
        each = [row[index] for row in rows]
        efficiency = tuple((float(at.world_size), 100 * at.efficiency) for at in each)
        seconds = tuple((float(at.world_size), at.step_s) for at in each)
        lines.append((ChartLine(name, efficiency, colour), ChartLine(name, seconds, colour)))
    panels = (
        ChartPanel("Scaling efficiency", "workers", "%", tuple(left for left, _ in lines), log_x=True),
        ChartPanel(
            "Step time", "workers", "seconds", tuple(right for _, right in lines), log_x=True, log_y=True
        ),
    )
    return draw_chart("How each exchange scales on this network", subtitle, panels)
