"""Three pytest processes share a suite: one of them runs each file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any

from work_sharing import BACK, PLAIN, PROCESS, WorkSharing, split


@dataclass(frozen=True)
class Item:
    nodeid: str
    integration: bool = False

    def get_closest_marker(self, name: str) -> Any:
        return self if self.integration and name == "integration" else None


def suite(random: Random) -> list[Any]:
    """Some files have tests of both kinds; a file's tests need not be adjacent."""
    files = [f"tests/test_{number}.py" for number in range(random.randint(1, 9))]
    items = [Item(f"{random.choice(files)}::test_{n}", random.random() < 0.3) for n in range(40)]
    return items if random.random() < 0.5 else sorted(items, key=lambda item: item.nodeid)


def test_every_test_runs_once_and_processes_run_in_one_part(tmp_path, seeds) -> None:
    for seed in seeds(150):
        random = Random(seed)
        items, claims = suite(random), tmp_path / str(seed)
        claims.mkdir()
        parts = {part: WorkSharing(part, claims).batches(items) for part in (PLAIN, BACK, PROCESS)}
        ran: dict[str, list[Item]] = {part: [] for part in parts}
        while parts:
            part = random.choice(sorted(parts))
            batch: Any = next(parts[part], None)
            if batch is None:
                del parts[part]
            else:
                assert len({item.nodeid.partition("::")[0] for item in batch}) == 1
                ran[part] += batch
        assert sorted(chain(*ran.values()), key=id) == sorted(items, key=id), f"seed {seed}"
        assert not any(item.integration for item in ran[PLAIN] + ran[BACK])
        taken_over = [item.integration for item in ran[PROCESS]]
        assert taken_over == sorted(taken_over, reverse=True), "processes come first"


def test_files_of_the_other_parts_are_taken_from_the_back(tmp_path) -> None:
    """
    plain     a b
    back          e
    process     p   d c
    """
    items: list[Any] = [Item(f"{name}.py::test", name == "p") for name in "abpcde"]
    plain, back, process = (WorkSharing(part, tmp_path).batches(items) for part in (PLAIN, BACK, PROCESS))
    order = [next(part)[0].nodeid[0] for part in (plain, plain, process, back, process, process)]
    assert "".join(order) == "abpedc"
    assert next(plain, None) is next(back, None) is next(process, None) is None
    assert [len(batches) for batches in split(items)] == [5, 1]
