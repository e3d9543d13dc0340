"""`gridtrain plan --stages`: how a model would be divided into stages and micro-batches, before anybody
joins.

The figures are predictions of `gridtrain.core.stages.step_time`; nothing is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.table import Table

    from gridtrain.core.planning.network_model import NetworkModel
    from gridtrain.core.stages.stage_cost import Card, ExecutionSettings, Layer
    from gridtrain.core.stages.step_time import MicroBatchProposal, StepEstimate

MOST_STAGES = 256
MOST_BATCH = 1_000_000
MOST_ROWS = 10
PLAIN_WIDTH = 120
OPTION_NAMES = (
    *("layers", "activations", "batch", "micro_batches", "schedule", "memory", "speeds", "optimizer"),
    "keep_activations",
)

_OPTIONS = (
    click.option(
        "--stages", type=click.IntRange(1, MOST_STAGES), help="Divide the model over that many workers."
    ),
    click.option(
        "--layers",
        metavar="FILE|N",
        help="With --stages: a TOML file of the model's layers, or N equal ones [default: 4 per stage].",
    ),
    click.option(
        "--activations",
        default="1MB",
        metavar="SIZE",
        help="Of a sample between two stages, with --layers N.",
    ),
    click.option(
        "--batch",
        type=click.IntRange(1, MOST_BATCH),
        default=32,
        show_default=True,
        help="Samples of a step, with --stages.",
    ),
    click.option(
        "--micro-batches", default="auto", show_default=True, metavar="LIST", help='"auto", or "4,8,16".'
    ),
    click.option("--schedule", type=click.Choice(["1f1b", "fill-drain"]), default="1f1b", show_default=True),
    click.option("--memory", metavar="LIST", help='Of each worker\'s card: "8GB", or one for each stage.'),
    click.option("--speeds", metavar="LIST", help='Of the cards, such as "1,2,1,1".'),
    click.option("--optimizer", default="adam", show_default=True, help="Optimizer whose state counts."),
    click.option("--keep-activations", is_flag=True, help="Without re-materialisation."),
)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def pipeline_options(command: _Command) -> _Command:
    """Decorator that adds the options that only count with --stages."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def show_plan(
    network: NetworkModel,
    parameters: int,
    compute_s: float,
    picture: Path | None,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Plan by the options, and print.

    Args:
        network: of as many ranks as stages.
        parameters, compute_s: of the whole model on a card of speed 1, where --layers is a number.
        options: the options of `pipeline_options` by name.
    """
    from gridtrain.core.stages import partition_chart as drawing
    from gridtrain.core.stages.stage_cost import TIME_TOLERANCE
    from gridtrain.core.stages.step_time import propose_micro_batches

    layers, input_bytes = _layers(parameters, compute_s, options)
    cards = _cards(options)
    running = _running(input_bytes, options)
    numbers = _numbers(options["micro_batches"], options["batch"])
    proposal = propose_micro_batches(
        layers, cards, network, running, options["batch"], numbers=numbers, slack=TIME_TOLERANCE
    )
    if picture:
        picture.write_text(drawing.chart_svg(layers, proposal.chosen))
    if as_json:
        click.echo(json.dumps(_figures(layers, proposal)))
        return
    _print(layers, proposal, drawing.partition_reason(layers, proposal, asked=len(numbers) == 1))
    if picture:
        click.echo(f"picture: {picture}")


# -- the options' values ---------------------------------------------------------------------------


def _layers(parameters: int, compute_s: float, options: dict[str, Any]) -> tuple[list[Layer], int]:
    from gridtrain.cli import layers_file

    words = options["layers"] or str(4 * options["stages"])
    if not words.isdecimal():
        if not Path(words).is_file():
            raise click.BadParameter(f'"{words}" is neither a file nor a number', param_hint="--layers")
        return layers_file.read_layers(Path(words))
    if parameters < 1:
        raise click.UsageError("--parameters is missing: the model's number of parameters, or --layers FILE")
    output_bytes = layers_file.parse_bytes(options["activations"])
    return layers_file.uniform_layers(
        int(words), parameters, compute_s, options["batch"], output_bytes
    ), output_bytes


def _cards(options: dict[str, Any]) -> list[Card]:
    from gridtrain.cli.layers_file import parse_bytes
    from gridtrain.core.stages.stage_cost import Card

    memory = _each("--memory", options["memory"], options["stages"], parse_bytes, float("inf"))
    speeds = _each("--speeds", options["speeds"], options["stages"], float, 1.0)
    return [Card(speed, limit) for speed, limit in zip(speeds, memory, strict=True)]


def _each(
    option: str, text: str | None, stages: int, parse: Callable[[str], float], usual: float
) -> list[float]:
    """One value for all stages, or one for each."""
    if text is None:
        return [usual] * stages
    try:
        values = [parse(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(f'"{text}" is not a list of numbers', param_hint=option) from None
    if len(values) not in (1, stages):
        raise click.BadParameter(f"{len(values)} values for {stages} stages", param_hint=option)
    return values * stages if len(values) == 1 else values


def _running(input_bytes: int, options: dict[str, Any]) -> ExecutionSettings:
    from gridtrain.core.stages.stage_cost import OPTIMIZER_STATE_COPIES, ExecutionSettings, ScheduleKind

    if options["optimizer"] not in OPTIMIZER_STATE_COPIES:
        raise click.BadParameter(
            f'"{options["optimizer"]}"; take one of {", ".join(OPTIMIZER_STATE_COPIES)}',
            param_hint="--optimizer",
        )
    return ExecutionSettings(
        order=ScheduleKind(options["schedule"]),
        rematerialise=not options["keep_activations"],
        copies=1.0 + OPTIMIZER_STATE_COPIES[options["optimizer"]],
        input_bytes=input_bytes,
    )


def _numbers(text: str, batch: int) -> list[int]:
    if text == "auto":
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= batch for word in words):
        raise click.BadParameter(
            f'"{text}"; write auto, or numbers from 1 to {batch} (--batch)', param_hint="--micro-batches"
        )
    return [int(word) for word in words]


# -- output -------------------------------------------------------------------------------------------


def _print(layers: list[Layer], proposal: MicroBatchProposal, reason: str) -> None:
    import sys

    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(_stages(layers, proposal.chosen), markup=False)
    if len(proposal.alternatives) > 1:
        console.print(_alternatives(proposal), markup=False)
    console.print(reason, markup=False, highlight=False, soft_wrap=True)


def _stages(layers: list[Layer], chosen: StepEstimate) -> Table:
    """A row for each stage; the link is the one to the next stage, in bytes of a step each way."""
    from rich.table import Table

    from gridtrain.core.planning.exchange_comparison import format_seconds
    from gridtrain.core.stages.memory_fit import format_bytes

    table = Table()
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for name in ("compute", "transfer", "link, a step", "holds", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(chosen.cut.stages):
        on, back = _link(chosen, index)
        limit = stage.card.memory_bytes
        table.add_row(
            str(index),
            _named(layers, stage.start, stage.stop),
            format_seconds(stage.compute_s),
            format_seconds(stage.transfer_s),
            f"{format_bytes(on)} / {format_bytes(back)}" if on or back else "",
            format_bytes(stage.memory.total),
            format_bytes(limit) if limit < float("inf") else "",
        )
    return table


def _named(layers: list[Layer], start: int, stop: int) -> str:
    first, last = layers[start].name, layers[stop - 1].name
    return first if stop - start == 1 else f"{first} to {last} ({stop - start})"


def _link(estimate: StepEstimate, stage: int) -> tuple[int, int]:
    """Bytes of a step (to the next stage, back from it); all micro-batches count as the largest."""
    stages, count = estimate.cut.stages, estimate.settings.micro_batches
    if stage + 1 == len(stages):
        return 0, 0
    return count * stages[stage].out_bytes, count * stages[stage + 1].back_bytes


def _alternatives(proposal: MicroBatchProposal) -> Table:
    from rich.table import Table

    from gridtrain.core.planning.exchange_comparison import format_seconds

    table = Table()
    for name in ("micro-batches", "samples", "step", "bubble", "of even stages"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in _some(proposal):
        table.add_row(
            str(each.settings.micro_batches),
            str(each.settings.samples),
            format_seconds(each.step_s),
            f"{each.bubble:.1%}",
            f"{each.ideal_bubble:.1%}",
            "proposed" if each is proposal.chosen else "",
        )
    return table


def _some(proposal: MicroBatchProposal) -> list[StepEstimate]:
    """At most `MOST_ROWS` alternatives, every second one left out where there are more, and the proposed
    one."""
    others = list(proposal.alternatives)
    while len(others) > MOST_ROWS:
        halved = [each for i, each in enumerate(others) if i % 2 == 0 or each is proposal.chosen]
        others = halved if len(halved) < len(others) else others[:MOST_ROWS]
    return others


def _figures(layers: list[Layer], proposal: MicroBatchProposal) -> dict[str, Any]:
    chosen = proposal.chosen
    return {
        "micro_batches": proposal.micro_batches,
        "ahead": chosen.settings.ahead,
        "step_s": chosen.step_s,
        "bubble": chosen.bubble,
        "period_s": chosen.cut.period_s,
        "cuts": list(chosen.cut.cuts),
        "stages": [
            {
                "layers": [layer.name for layer in layers[stage.start : stage.stop]],
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "line_s": stage.transfer_s,
                "held_bytes": stage.memory.total,
                "to_next_bytes": _link(chosen, index)[0],
                "from_next_bytes": _link(chosen, index)[1],
            }
            for index, stage in enumerate(chosen.cut.stages)
        ],
        "compared": [
            {"micro_batches": each.settings.micro_batches, "step_s": each.step_s, "bubble": each.bubble}
            for each in proposal.alternatives
        ],
    }
