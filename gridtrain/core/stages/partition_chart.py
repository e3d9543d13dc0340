"""Draws a partition (times and memory of stages) as a bar chart, in text for a terminal or as SVG.

stage 0   layers 0 to 3, "embed" to "block2"      12.1 ms  #############...  2.1 of 8 GB  ####......
stage 1   layers 4 to 7, "block3" to "head"       11.8 ms  ############....  1.9 of 8 GB  ###.......
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gridtrain.core.planning.svg_elements import FAINT, INK, svg_page, svg_text
from gridtrain.core.stages.memory_fit import format_layers
from gridtrain.core.stages.stage_cost import Layer, StageCost
from gridtrain.core.stages.step_time import MicroBatchProposal, StepEstimate
from gridtrain.quantities import format_bytes, format_count, format_seconds

BAR = 24
MAX_NAMES = 44

TIMES = (("forward", "#0072B2"), ("backward", "#5BA3D0"), ("link", "#D55E00"))
BYTES = (
    ("parameters", "#007A5A"),
    ("gradients and optimizer", "#5BB89C"),
    ("activations", "#8A4F7D"),
    ("in transit", "#D55E00"),
)
TOP, ROW = 116.0, 54.0
LEFT, WIDTH = 220.0, 360.0  # of the panel of times
MEMORY_LEFT, MEMORY_WIDTH = 640.0, 480.0  # of the panel of bytes


def chart_text(layers: Sequence[Layer], outlook: StepEstimate) -> str:
    """Return the chart as text, with a row for each stage.

    A row has the stage's layers, its time per micro-batch and its peak memory.
    """
    stages = outlook.cut.stages
    longest_s = max(max(stage.compute_s, stage.transfer_s) for stage in stages) or 1.0
    largest = max(stage.memory.total for stage in stages)
    rows = []
    for index, stage in enumerate(stages):
        limit = stage.device.memory_bytes
        bounded = limit < math.inf
        held = format_bytes(stage.memory.total) + (f" of {format_bytes(limit)}" if bounded else "")
        cells = (
            f"stage {index}",
            _shortened(format_layers(layers, stage.start, stage.stop)),
            format_seconds(stage.compute_s),
            _bar(stage.compute_s / longest_s),
            f"link {format_seconds(stage.transfer_s)}" if len(stages) > 1 else "",
            held,
            _bar(stage.memory.total / (limit if bounded else largest or 1)),
        )
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_NAMES else text[: MAX_NAMES - 3] + "..."


def _bar(share: float) -> str:
    """Return a bar of `BAR` characters, full for a share of 1; a share above 0 fills at least one."""
    filled = min(BAR, max(share > 0, round(BAR * share)))
    return "#" * filled + "." * (BAR - filled)


def partition_reason(layers: Sequence[Layer], proposal: MicroBatchProposal, *, asked: bool) -> str:
    """Return a text that explains a partition and its number of micro-batches.

    The text names the slowest stage, the stage that needs the most memory, and the reason for the number of
    micro-batches.

    Args:
        asked: whether the user specified the number of micro-batches.
    """
    stages = proposal.chosen.cut.stages
    slowest, stage = max(enumerate(stages), key=lambda each: max(each[1].compute_s, each[1].transfer_s))
    what = "computing" if stage.compute_s >= stage.transfer_s else "its link"
    work_s = sum(each.compute_s * each.device.speed for each in stages)
    even_s = work_s / sum(each.device.speed for each in stages)
    before = ", ".join(layers[each.start].name for each in stages[1:])
    fullest, largest = max(enumerate(stages), key=lambda each: each[1].memory.total)
    limit = largest.device.memory_bytes
    return (
        f"{f'Stages begin at {before}' if before else 'One stage'}: stage {slowest} is slowest ({what}), "
        f"{format_seconds(max(stage.compute_s, stage.transfer_s))} per micro-batch; "
        f"with perfectly balanced stages, computing would take {format_seconds(even_s)}; "
        f"stage {fullest} needs the most memory, {format_bytes(largest.memory.total)}"
        f"{f' of {format_bytes(limit)}' if limit < math.inf else ''}. "
        f"{'As specified' if asked else 'Proposed'}: {proposal.reason}."
    )


# -- SVG -------------------------------------------------------------------------------------------


def chart_svg(layers: Sequence[Layer], outlook: StepEstimate) -> str:
    """Return the chart as SVG, with two panels: each stage's time per micro-batch, and its peak memory."""
    stages = outlook.cut.stages
    running = outlook.settings
    subtitle = (
        f"{running.micro_batches} micro-batch{'' if running.micro_batches == 1 else 'es'} of "
        f"{running.samples}, {running.order}; a step takes "
        f"{format_seconds(outlook.step_s)} and its bubble is {outlook.bubble:.0%} (predicted)"
    )
    parts = [*_legend(LEFT, TIMES), *_legend(MEMORY_LEFT, BYTES)]
    longest_s = max(max(stage.compute_s, stage.transfer_s) for stage in stages) or 1.0
    limits = [stage.device.memory_bytes for stage in stages if stage.device.memory_bytes < math.inf]
    largest = max(*limits, *(stage.memory.total for stage in stages), 1)
    for index, stage in enumerate(stages):
        top = TOP + ROW * index
        names = _shortened(format_layers(layers, stage.start, stage.stop).partition(", ")[2])
        parts.append(
            svg_text(
                20,
                top + 14,
                f"stage {index}: {format_count(stage.stop - stage.start, 'layer')}",
                weight="bold",
            )
        )
        parts.append(svg_text(20, top + 30, names[:28], colour=FAINT))
        parts += _time_bars(stage, top, longest_s)
        parts += _memory_bars(stage, top, float(largest))
    title = "How the model is divided into stages"
    heading = f"{format_count(len(layers), 'layer')} in {format_count(len(stages), 'stage')}"
    size = MEMORY_LEFT + MEMORY_WIDTH + 60, TOP + ROW * len(stages) + 20
    return svg_page(title, heading, subtitle, 20, size, parts)


def _legend(left: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    parts = []
    for name, colour in entries:
        parts.append(_box(left, TOP - 32, 11, 11, colour))
        parts.append(svg_text(left + 16, TOP - 22, name))
        left += 34 + 7.0 * len(name)
    return parts


def _time_bars(stage: StageCost, top: float, longest_s: float) -> list[str]:
    """Return the bars of a stage's times: compute time above transfer time, because the two overlap."""
    scale = WIDTH / longest_s
    forward, backward, transfer = (s * scale for s in (stage.forward_s, stage.backward_s, stage.transfer_s))
    return [
        _box(LEFT, top, forward, 20, TIMES[0][1]),
        _box(LEFT + forward, top, backward, 20, TIMES[1][1]),
        _box(LEFT, top + 22, transfer, 8, TIMES[2][1]),
        svg_text(LEFT + forward + backward + 8, top + 15, format_seconds(stage.compute_s)),
    ]


def _memory_bars(stage: StageCost, top: float, largest: float) -> list[str]:
    left, held, scale = MEMORY_LEFT, stage.memory, MEMORY_WIDTH / largest
    parts = []
    for nbytes, (_, colour) in zip(
        (held.parameters, held.copies, held.activations, held.transit), BYTES, strict=True
    ):
        parts.append(_box(left, top, nbytes * scale, 20, colour))
        left += nbytes * scale
    label = format_bytes(held.total)
    if stage.device.memory_bytes < math.inf:
        parts.append(_box(MEMORY_LEFT + stage.device.memory_bytes * scale - 1, top - 4, 2, 28, INK))
        label += f" of {format_bytes(stage.device.memory_bytes)}"
    parts.append(svg_text(MEMORY_LEFT, top + 36, label))
    return parts


def _box(left: float, top: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.0, width):.1f}" height="{height:g}" '
        f'fill="{colour}"/>'
    )
