"""The file between the workers and the demo: complete lines only, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridtrain.errors import GridtrainError
from gridtrain.tools.demo.step_records import (
    RecordReader,
    SentBytes,
    StepRecord,
    StepTimes,
    mean_sent,
    write_sent,
)


def record(step: int, held_out: float | None = None) -> StepRecord:
    return StepRecord(step, 0.5 * step, 3.25, held_out, SentBytes(100, 10, 1), StepTimes(0.1, 0.2, 0.3, 0.4))


def test_a_record_is_read_back_from_its_line() -> None:
    for original in (record(1), record(2, held_out=2.5)):
        assert StepRecord.from_line(original.to_line()) == original


def test_the_reader_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    reader = RecordReader(path)
    assert reader.new_records() == []

    half = record(2).to_line()
    path.write_text(record(1).to_line() + half[:20])
    assert reader.new_records() == [record(1)]
    assert reader.new_records() == []

    with path.open("a") as file:
        file.write(half[20:] + record(3).to_line())
    assert reader.new_records() == [record(2), record(3)]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"step": 1}', "not json"])
def test_a_foreign_line_is_refused(line: str) -> None:
    with pytest.raises(GridtrainError, match="not a step record"):
        StepRecord.from_line(line)


def test_traffic_is_divided_into_data_votes_and_the_rest() -> None:
    traffic = {"Data": 1000, "Vote": 30, "Decision": 12, "Heartbeat": 5, "Hello": 2}

    assert SentBytes.of_traffic(traffic) == SentBytes(data=1000, votes=42, control=7)


def test_sent_bytes_are_averaged_over_the_workers(tmp_path: Path) -> None:
    write_sent(tmp_path, "101", SentBytes(1000, 30, 4))
    write_sent(tmp_path, "102", SentBytes(2000, 10, 0))

    assert mean_sent(tmp_path) == {"data": 1500.0, "votes": 20.0, "control": 2.0}
