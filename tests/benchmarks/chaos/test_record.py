"""The record of a run: each violation of a guarantee is found, and stalls are measured."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.execution import InjectedFault, RunResult
from chaos.record import Record
from chaos.report import by_kind
from chaos.schedule import BAG, LASTS_S, draw

WORKERS = ("anna", "bert")
SIZE, STEPS = 8, 4  # two passes over the data, in steps of 2 + 2 samples


def whole_run() -> list[tuple[str, dict[str, Any]]]:
    """Return (worker, line) of two workers that train 4 steps; anna takes the lower positions of each."""
    lines: list[tuple[str, dict[str, Any]]] = []
    for step in range(STEPS):
        name, at_s = [1, step, 0], 10.0 + step
        for number, worker in enumerate(WORKERS):
            start = 4 * step + 2 * number
            samples = [(3 * position) % SIZE for position in (start, start + 1)]
            lines += [
                (
                    worker,
                    {
                        "mark": "round",
                        "round": name,
                        "of": 2,
                        "spans": [[start, start + 2]],
                        "samples": samples,
                    },
                ),
                (worker, {"mark": "outcome", "round": name, "committed": True, "at_s": at_s + 0.1 * number}),
                (worker, {"mark": "state", "step": step, "digest": f"digest-{step}"}),
            ]
    end = {"mark": "end", "step": STEPS, "digest": "d", "cursor": 16, "consumed": 16, "requeued": []}
    return lines + [(worker, dict(end)) for worker in WORKERS]


def findings(lines: list[tuple[str, dict[str, Any]]]) -> list[str]:
    record = Record()
    for worker, line in lines:
        record.take(worker, line)
    return record.violations(WORKERS, SIZE)


def test_a_correct_run_has_no_findings() -> None:
    assert findings(whole_run()) == []


def line_of(lines: list[tuple[str, dict[str, Any]]], worker: str, mark: str, step: int) -> dict[str, Any]:
    return next(
        line
        for name, line in lines
        if name == worker
        and line["mark"] == mark
        and step in (line.get("step"), line.get("round", [0, -1])[1])
    )


def two_rounds(lines: list[tuple[str, dict[str, Any]]]) -> None:
    line_of(lines, "bert", "outcome", 2)["round"] = [2, 2, 1]


def another_model(lines: list[tuple[str, dict[str, Any]]]) -> None:
    line_of(lines, "bert", "state", 2)["digest"] = "another"


def counted_twice(lines: list[tuple[str, dict[str, Any]]]) -> None:
    line_of(lines, "bert", "round", 2)["spans"] = [[8, 10]]


def not_counted(lines: list[tuple[str, dict[str, Any]]]) -> None:
    line_of(lines, "bert", "round", 2).update(spans=[[10, 11]], samples=[6])


def same_sample(lines: list[tuple[str, dict[str, Any]]]) -> None:
    line_of(lines, "bert", "round", 2)["samples"] = [0, 3]


def missing_end(lines: list[tuple[str, dict[str, Any]]]) -> None:
    lines.pop()


def another_end(lines: list[tuple[str, dict[str, Any]]]) -> None:
    lines[-1][1]["digest"] = "another"


def uncommitted_step(lines: list[tuple[str, dict[str, Any]]]) -> None:
    for worker in WORKERS:
        line_of(lines, worker, "outcome", 2)["committed"] = False


@pytest.mark.parametrize(
    ("violate", "finding"),
    [
        (two_rounds, "step 2 was committed in several rounds"),
        (another_model, "after step 2 the models differ"),
        (counted_twice, "position 8 was counted 2 times"),
        (not_counted, "position 11 was counted 0 times"),
        (same_sample, "different samples of 8"),
        (missing_end, "bert did not reach the end"),
        (another_end, "the workers end differently"),
        (uncommitted_step, "no worker learned of the commit of steps"),
    ],
)
def test_each_violation_is_found(violate: Any, finding: str) -> None:
    lines = whole_run()
    violate(lines)
    assert any(finding in found for found in findings(lines)), findings(lines)


def test_samples_that_are_requeued_at_the_end_are_not_missing() -> None:
    lines = whole_run()
    not_counted(lines)
    for _, line in lines[-2:]:
        line.update(consumed=15, requeued=[[11, 12]])
    assert findings(lines) == []


def left_out(lines: list[tuple[str, dict[str, Any]]]) -> None:
    """Let the group continue without bert in step 1; bert's batch joins step 3, in which it had none."""
    line_of(lines, "bert", "outcome", 1).update(committed=False, submitted=False)
    late, last = line_of(lines, "bert", "round", 1), line_of(lines, "bert", "round", 3)
    last.update(spans=late["spans"], samples=late["samples"])
    for _, line in lines[-2:]:
        line.update(consumed=14, requeued=[[14, 16]])


def test_a_batch_that_joins_a_later_step_counts_once() -> None:
    lines = whole_run()
    left_out(lines)
    assert findings(lines) == []
    line_of(lines, "bert", "outcome", 1)["submitted"] = True
    assert any("was counted 2 times" in found for found in findings(lines))


def test_a_batch_that_is_late_at_the_end_is_not_missing() -> None:
    lines = whole_run()
    left_out(lines)
    for _, line in lines[-2:]:
        line.update(requeued=[], late=[[14, 16]])
    assert findings(lines) == []


def test_a_schedule_is_a_function_of_its_seed() -> None:
    first = draw(7, length_s=1200.0, every_s=5.0, workers=6)
    assert (
        first
        == draw(7, length_s=1200.0, every_s=5.0, workers=6)
        != draw(8, length_s=1200.0, every_s=5.0, workers=6)
    )
    assert len(first) == 240 and all(0 <= fault.at_s - 5.0 * i < 5.0 for i, fault in enumerate(first))
    assert {fault.kind for fault in first} == set(BAG) < set(LASTS_S)
    bags = len(first) // len(BAG)
    kills = sum(fault.kind == "kill" for fault in first[: bags * len(BAG)])
    assert kills == bags * BAG.count("kill"), "each bag is used up before the next"
    only = draw(7, length_s=60.0, every_s=5.0, workers=6, kinds={"kill", "stop"})
    assert {fault.kind for fault in only} == {"kill", "stop"}


def test_stalls_are_read_from_the_commits() -> None:
    """Steps take 0.1 s; after a kill at 1.05 the next commit is at 1.5; the gap at 3.0 is of its return."""
    record = Record()
    at_s = [round(0.1 * i, 1) for i in range(11)] + [round(1.5 + 0.1 * i, 1) for i in range(16)] + [3.3, 3.4]
    for step, committed_s in enumerate(at_s):
        record.take(
            "anna", {"mark": "outcome", "round": [1, step, 0], "committed": True, "at_s": committed_s}
        )
    result = RunResult(
        record, begin_s=0.0, end_s=4.0, injected=[InjectedFault("kill", "bert", 1.05, 1.05, 0.0)]
    )
    assert by_kind(result)["kill"] == {
        "count": 1,
        "stalls_s": [0.5],
        "stall_median_s": 0.5,
        "stall_worst_s": 0.5,
    }
