"""`gridtrain demo --pipeline`: what its script asks of the group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gridtrain.tools.demo import pipeline_model, pipeline_worker


class Asked:
    """A grid that keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def pipeline(self, *parts: Any, **options: Any) -> None:
        self.asked = options


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        (("--stages", "4"), pipeline_model.CUTS),  # which the memory limit is compared with
        (("--stages", "2", "--exchange", "gtopk"), None),
        (("--stages", "4", "--quick"), None),
    ],
)
def test_the_four_stages_are_cut_alike_however_busy_the_machine_is(
    tmp_path: Path, options: tuple[str, ...], cuts: tuple[int, ...] | None
) -> None:
    """By speeds measured beside other work, a stage got four blocks, and the demo ended with an error."""
    grid = Asked()
    pipeline_worker.build(grid, pipeline_worker.parse([*options, "--metrics", str(tmp_path)]))  # type: ignore[arg-type]
    assert grid.asked["cuts"] == cuts


def test_the_cuts_are_of_the_whole_model_and_even() -> None:
    blocks = len(pipeline_model.make_model())
    sizes = [end - begin for begin, end in zip(pipeline_model.CUTS, pipeline_model.CUTS[1:], strict=False)]
    assert len(sizes) == 4 and sum(sizes) == blocks and max(sizes) - min(sizes) == 1
