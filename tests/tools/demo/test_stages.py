"""`gridtrain demo --pipeline`: the partition that its script requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gridtrain.tools.demo import pipeline_model, pipeline_worker


class Asked:
    """A grid that records the requested options."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def pipeline(self, *parts: Any, **options: Any) -> None:
        self.asked = options


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        (("--stages", "4"), pipeline_model.CUTS),  # with which the memory limit is compared
        (("--stages", "2", "--exchange", "gtopk"), None),
        (("--stages", "4", "--quick"), None),
    ],
)
def test_the_partition_does_not_depend_on_the_load_of_the_machine(
    tmp_path: Path, options: tuple[str, ...], cuts: tuple[int, ...] | None
) -> None:
    """With speeds measured on a busy machine, a stage received four blocks, and the demo failed."""
    grid = Asked()
    pipeline_worker.build(grid, pipeline_worker.parse([*options, "--metrics", str(tmp_path)]))  # type: ignore[arg-type]
    assert grid.asked["cuts"] == cuts


def test_the_partition_is_even_and_covers_the_model() -> None:
    blocks = len(pipeline_model.make_model())
    sizes = [end - begin for begin, end in zip(pipeline_model.CUTS, pipeline_model.CUTS[1:], strict=False)]
    assert len(sizes) == 4 and sum(sizes) == blocks and max(sizes) - min(sizes) == 1
