"""`gridtrain plan --stages`: plans the division of a model into stages and micro-batches before workers join.

The figures are predictions of `gridtrain.core.stages.step_time`; nothing is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.option_flags import Command, brief_option
from gridtrain.cli.output import make_console, wrap_text
from gridtrain.quantities import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from gridtrain.core.planning.network_model import NetworkModel
    from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer
    from gridtrain.core.stages.step_time import MicroBatchProposal, StepEstimate

MAX_PLANNED_STAGES = 256
MAX_BATCH = 1_000_000
MAX_ROWS = 10
OPTION_NAMES = (
    *("layers", "activations", "batch", "micro_batches", "schedule", "memory", "speeds"),
    "keep_activations",
)


def _known_optimizer(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    from gridtrain.core.stages.stage_cost import OPTIMIZER_STATE_COPIES

    if name is not None and name not in OPTIMIZER_STATE_COPIES:
        raise click.BadParameter(f'"{name}" is not one of {", ".join(OPTIMIZER_STATE_COPIES)}')
    return name


_OPTIONS = (
    click.option(
        "--stages",
        type=click.IntRange(1, MAX_PLANNED_STAGES),
        metavar="N",
        help="Divide the model among N workers.",
    ),
    click.option("--layers", metavar="FILE|N", help="TOML file, or N equal layers.  [4 per stage]"),
    brief_option("--activations", "1MB", "Output per sample, with --layers N.", metavar="SIZE"),
    brief_option("--batch", 32, "Samples per step.", metavar="N", type=click.IntRange(1, MAX_BATCH)),
    brief_option("--micro-batches", "auto", '"auto", or "4,8,16".', metavar="LIST"),
    brief_option(
        "--schedule", "1f1b", "1f1b or fill-drain.", metavar="KIND", type=click.Choice(["1f1b", "fill-drain"])
    ),
    click.option("--memory", metavar="LIST", help='Memory per device: "8GB", or a value per stage.'),
    click.option("--speeds", metavar="LIST", help='Speeds of the devices, such as "1,2,1,1".'),
    click.option(
        "--optimizer",
        callback=_known_optimizer,
        metavar="NAME",
        help="Optimizer, for the size of its state.  [adamw]",
    ),
    click.option("--keep-activations", is_flag=True, help="Plan without re-materialization."),
)


def pipeline_options(command: Command) -> Command:
    """Add `--stages`, the options of a model in stages, and `--optimizer` to a command."""
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
    """Plan the stages according to the options and print the plan.

    Args:
        network: a network with one rank per stage.
        parameters: the number of parameters of the whole model; used if --layers is a number.
        compute_s: the compute time of the whole model on a device of speed 1; used if --layers is a number.
        options: the values of the options of `pipeline_options`, by name.
    """
    from gridtrain.core.stages import partition_chart as drawing
    from gridtrain.core.stages.stage_cost import TIME_TOLERANCE
    from gridtrain.core.stages.step_time import propose_micro_batches

    layers, input_bytes = _layers(parameters, compute_s, options)
    devices = _devices(options)
    running = _running(input_bytes, options)
    numbers = _numbers(options["micro_batches"], options["batch"])
    proposal = propose_micro_batches(
        layers, devices, network, running, options["batch"], numbers=numbers, slack=TIME_TOLERANCE
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
        raise click.UsageError(
            "--parameters is missing; specify the model's number of parameters, or --layers FILE"
        )
    output_bytes = layers_file.parse_size(options["activations"])
    return layers_file.uniform_layers(
        int(words), parameters, compute_s, options["batch"], output_bytes
    ), output_bytes


def _devices(options: dict[str, Any]) -> list[Device]:
    from gridtrain.cli.layers_file import parse_size
    from gridtrain.core.stages.stage_cost import Device

    memory = _each("--memory", options["memory"], options["stages"], parse_size, float("inf"))
    speeds = _each("--speeds", options["speeds"], options["stages"], float, 1.0)
    return [Device(speed, limit) for speed, limit in zip(speeds, memory, strict=True)]


def _each(
    option: str, text: str | None, stages: int, parse: Callable[[str], float], usual: float
) -> list[float]:
    """Parse one value for all stages, or one value for each stage; return a value for each stage."""
    if text is None:
        return [usual] * stages
    try:
        values = [parse(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(f'"{text}" is not a list of numbers', param_hint=option) from None
    if len(values) not in (1, stages):
        text = f"{len(values)} values were given for {format_count(stages, 'stage')}"
        raise click.BadParameter(text, param_hint=option)
    return values * stages if len(values) == 1 else values


def _running(input_bytes: int, options: dict[str, Any]) -> ExecutionSettings:
    from gridtrain.core.stages.stage_cost import OPTIMIZER_STATE_COPIES, ExecutionSettings, ScheduleKind

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
            f'"{text}" is neither auto nor a list of numbers from 1 to {batch} (--batch)',
            param_hint="--micro-batches",
        )
    return [int(word) for word in words]


# -- output -------------------------------------------------------------------------------------------


def _print(layers: list[Layer], proposal: MicroBatchProposal, reason: str) -> None:
    console = make_console()
    console.print(_stages(layers, proposal.chosen), markup=False)
    if len(proposal.alternatives) > 1:
        console.print(_alternatives(proposal), markup=False)
    click.echo(wrap_text(reason))


def _stages(layers: list[Layer], chosen: StepEstimate) -> Table:
    """Return a table with a row for each stage: its layers, times and memory, and the bytes to and from the
    next stage."""
    from rich.table import Table

    from gridtrain.quantities import format_seconds

    table = Table()
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for name in ("compute", "transfer", "link, a step", "holds", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, stage in enumerate(chosen.cut.stages):
        on, back = _link(chosen, index)
        limit = stage.device.memory_bytes
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
    """Return (bytes sent to the next stage, bytes received from it) in a step.

    Each micro-batch is assumed to be as large as the largest.
    """
    stages, count = estimate.cut.stages, estimate.settings.micro_batches
    if stage + 1 == len(stages):
        return 0, 0
    return count * stages[stage].out_bytes, count * stages[stage + 1].back_bytes


def _alternatives(proposal: MicroBatchProposal) -> Table:
    from rich.table import Table

    from gridtrain.quantities import format_seconds

    table = Table()
    for name in ("micro-batches", "samples", "step", "bubble", "if balanced"):
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
    """Return at most `MAX_ROWS` of the alternatives, roughly evenly spaced, including the proposed one."""
    others = list(proposal.alternatives)
    while len(others) > MAX_ROWS:
        halved = [each for i, each in enumerate(others) if i % 2 == 0 or each is proposal.chosen]
        others = halved if len(halved) < len(others) else others[:MAX_ROWS]
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
