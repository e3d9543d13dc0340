"""Two pytest processes share a suite: one of them runs each file."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from work_sharing import PLAIN, PROCESS, WorkSharing, split


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


def test_every_test_runs_once_and_processes_run_in_one_half(tmp_path, seeds) -> None:
    for seed in seeds(150):
        random = Random(seed)
        items, claims = suite(random), tmp_path / str(seed)
        claims.mkdir()
        halves = {half: WorkSharing(half, claims).batches(items) for half in (PLAIN, PROCESS)}
        ran: dict[str, list[Item]] = {PLAIN: [], PROCESS: []}
        while halves:
            half = random.choice(sorted(halves))
            batch: Any = next(halves[half], None)
            if batch is None:
                del halves[half]
            else:
                assert len({item.nodeid.partition("::")[0] for item in batch}) == 1
                ran[half] += batch
        assert sorted(ran[PLAIN] + ran[PROCESS], key=id) == sorted(items, key=id), f"seed {seed}"
        assert not any(item.integration for item in ran[PLAIN])
        taken_over = [item.integration for item in ran[PROCESS]]
        assert taken_over == sorted(taken_over, reverse=True), "processes come first"


def test_files_of_the_other_half_are_taken_from_the_back(tmp_path) -> None:
    """
    plain     a b
    process     p d c
    """
    items: list[Any] = [Item(f"{name}.py::test", name == "p") for name in "abpcd"]
    plain = WorkSharing(PLAIN, tmp_path).batches(items)
    process = WorkSharing(PROCESS, tmp_path).batches(items)
    order = [next(half)[0].nodeid[0] for half in (plain, plain, process, process, process)]
    assert "".join(order) == "abpdc"
    assert next(plain, None) is next(process, None) is None
    assert [len(batches) for batches in split(items)] == [4, 1]
