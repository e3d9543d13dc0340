"""Draws the pictures of how-it-works.md: `python docs/pictures.py` writes docs/images/*.svg.

The butterfly's partners come from `core.collectives.butterfly`, the pipeline's work from
`core.stages.schedule`.  Each picture has a background of its own and follows the reader's theme.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from gridtrain.core.collectives.butterfly import schedule as butterfly
from gridtrain.core.stages.schedule import ActionKind, one_forward_one_backward

HERE = Path(__file__).resolve().parent
IMAGES = HERE / "images"

sys.path.insert(0, str(HERE.parent / "tests" / "common"))
from timetable import timetable  # noqa: E402  needs the path

STYLE = """
.ground { fill: #ffffff; } .box { fill: #f1f4f8; stroke: #5b6b7f; } .first { fill: #e4eefb; stroke: #2b6cb0; }
.back { fill: #fdebdc; stroke: #b05a1e; } text { fill: #1d2733; } .dim { fill: #55616f; }
.line { stroke: #2b6cb0; fill: none; } .order { stroke: #7a8796; fill: none; stroke-dasharray: 5 4; }
.tip { fill: #2b6cb0; } .edge { stroke: #b05a1e; fill: none; }
@media (prefers-color-scheme: dark) {
.ground { fill: #14181d; } .box { fill: #222a33; stroke: #8fa1b5; } .first { fill: #17324f; stroke: #6fb0f0; }
.back { fill: #44270f; stroke: #f0a15f; } text { fill: #e8edf3; } .dim { fill: #a9b6c4; }
.line { stroke: #6fb0f0; } .order { stroke: #8795a5; } .tip { fill: #6fb0f0; } .edge { stroke: #f0a15f; }
}
""".strip()

TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
)


class Canvas:
    """Collects the elements of a picture of the given size, in pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._title, self._width, self._height = title, width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str, kind: str = "box") -> None:
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )
        lines = text.split("\n")
        for i, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 17 * (i - (len(lines) - 1) / 2), line, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        cls = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{cls} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line", tips: int = 0) -> None:
        ends = ("", ' marker-end="url(#tip)"', ' marker-end="url(#tip)" marker-start="url(#tip)"')[tips]
        self._parts.append(
            f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke-width="1.6"{ends}/>'
        )

    def svg(self) -> str:
        size = f'width="{self._width}" height="{self._height}" viewBox="0 0 {self._width} {self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-size="14"'
        return "\n".join(
            [
                f'{head} font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                f"<defs>{TIP}</defs>",
                '<rect class="ground" width="100%" height="100%" rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def architecture() -> str:
    """Who talks to whom, about what."""
    picture = Canvas(
        "A coordinator gives orders to four workers, which exchange gradients directly", 760, 330
    )
    picture.box(255, 20, 250, 58, "coordinator\nadmits, ranks, plans, journals", "first")
    places = [(20, 150), (190, 240), (400, 240), (570, 150)]
    for x, y in places:
        picture.line(380, 78, x + 85, y, "order")
    centres = [(x + 85, y + 26) for x, y in places]
    for i, a in enumerate(centres):
        for b in centres[i + 1 :]:
            picture.line(*a, *b)
    for number, (x, y) in enumerate(places):
        picture.box(x, y, 170, 52, f"worker, rank {number}\nyour loop, your data")
    picture.line(20, 22, 60, 22, "order")
    picture.text(68, 27, "orders: who, when", kind="dim")
    picture.line(20, 46, 60, 46)
    picture.text(68, 51, "gradients, votes", kind="dim")
    return picture.svg()


def gtopk(world_size: int = 8) -> str:
    """The hops of a butterfly, as `core.collectives.butterfly` makes them."""
    hops = [butterfly(rank, world_size) for rank in range(world_size)]
    count = len(hops[0])
    wide, high, left, top = 215, 38, 100, 58
    title = f"gTop-k among {world_size} workers: {count} hops"
    picture = Canvas(title, 170 + wide * count, 110 + high * world_size)
    for hop in range(count + 1):
        x = left + wide * hop
        covers = 2**hop
        told = "own top k" if hop == 0 else f"top k of {covers}"
        picture.text(x, 30, told, "middle", "dim")
    for rank in range(world_size):
        y = top + high * rank
        picture.text(18, y + 5, f"rank {rank}")
        for hop in range(count):
            x = left + wide * hop
            picture.line(x, y, x + wide, top + high * hops[rank][hop].partner, tips=1)
            picture.line(x, y, x + wide, y, "order")
    for hop in range(count + 1):
        for rank in range(world_size):
            x, y = left + wide * hop, top + high * rank
            picture.box(x - 9, y - 9, 18, 18, "", "first" if hop == count else "box")
    told = "Both sides merge the same two payloads: after the last hop all hold the same bits."
    picture.text(18, top + high * world_size + 22, told, kind="dim")
    return picture.svg()


def commit() -> str:
    """One round: from the gradient to the update, or back."""
    picture = Canvas("A round commits on all workers or on none", 860, 285)
    steps = ["gradient", "select the\nlargest k", "exchange,\nmerge"]
    steps += ["vote YES\nwith a digest", "all YES,\none digest?"]
    for i, step in enumerate(steps):
        picture.box(20 + 152 * i, 40, 122, 56, step, "first" if i == 4 else "box")
        if i:
            picture.line(20 + 152 * i - 30, 68, 20 + 152 * i - 2, 68, tips=1)
    picture.line(689, 96, 689, 166, tips=1)
    picture.text(700, 138, "yes: COMMIT")
    picture.box(560, 168, 258, 56, "apply the update,\nkeep the new residual", "first")
    picture.line(645, 96, 350, 190, "edge")
    picture.text(330, 132, "no, or a time-out: ABORT", kind="dim")
    picture.box(
        20,
        168,
        330,
        56,
        "drop the new residual, keep the gradient,\ntry again: nothing has been lost",
        "back",
    )
    picture.line(81, 168, 81, 98, tips=1)
    told = "What was not selected, dropped or rounded stays in the residual, and is sent in a later step."
    picture.text(20, 262, told, kind="dim")
    return picture.svg()


def pipeline(stages: int = 4, micro_batches: int = 8) -> str:
    """1F1B, backward twice as long as forward, as `core.stages.schedule` makes it."""
    table = timetable(one_forward_one_backward(stages, micro_batches), 1.0, 2.0)
    scale, high, left, top = 22.0, 40, 80, 50
    width = int(left + scale * table.makespan_s + 20)
    picture = Canvas("A pipeline of four stages", width, top + high * stages + 50)
    picture.text(
        20, 28, f"{stages} stages, {micro_batches} micro-batches, 1F1B; time to the right", kind="dim"
    )
    for stage, slots in enumerate(table.slots):
        y = top + high * stage
        picture.text(14, y + 22, f"stage {stage}")
        for slot in slots:
            kind = "first" if slot.action.kind is ActionKind.FORWARD else "back"
            lasts = scale * (slot.stop_s - slot.start_s)
            picture.box(
                left + scale * slot.start_s, y, lasts - 1, high - 8, str(slot.action.micro_batch), kind
            )
    busy = table.busy_share(0)
    under = f"blue: forward, brown: backward; each stage computes {100 * busy:.0f} % of the time"
    picture.text(20, top + high * stages + 26, under, kind="dim")
    return picture.svg()


def generations() -> str:
    """Members come and go: one generation after the other."""
    picture = Canvas("Members over time: each change begins a generation", 820, 300)
    lives = [("anna", 100, 790), ("ben", 100, 430), ("carla", 100, 790), ("dora", 250, 790)]
    for row, (name, begin, end) in enumerate(lives):
        y = 60 + 46 * row
        picture.text(20, y + 5, name)
        picture.box(begin, y - 13, end - begin, 26, "", "box")
        if name == "dora":
            picture.box(250, y - 13, 90, 26, "receives", "back")
        if name == "ben":
            picture.text(442, y + 5, "dies", kind="dim")
    for x, told in ((100, "generation 1"), (340, "generation 2"), (560, "generation 3")):
        picture.line(x, 36, x, 222, "edge")
        picture.text(x + 6, 28, told)
    picture.text(100, 252, "dora receives the model while the others train; then she enters.", kind="dim")
    told = "Between ben's end and generation 3 no step commits: the open one is repeated without him."
    picture.text(100, 274, told, kind="dim")
    return picture.svg()


PICTURES = {
    "architecture.svg": architecture,
    "gtopk.svg": gtopk,
    "commit.svg": commit,
    "pipeline.svg": pipeline,
    "generations.svg": generations,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
        print(IMAGES / name)
