"""Groups that read their data by shards: the files that each worker opens, a restart, a file that is missing.

`test_every_sample_once` has shards with joins, leaves and kills.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from checkpointed_group import run
from group_status import status_of
from sharded_data import SIZES, number_of, write_shards
from torch import nn
from training_loop import sgd

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.core.commit.shard_leases import locate
from gridtrain.core.messages import LedgerSpec
from gridtrain.errors import DataError
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.data import shard_files

TOTAL = sum(SIZES)


def take_steps(
    grid: gridtrain.Grid, data: Any, until: int = -1, **options: Any
) -> list[tuple[int, list[int]]]:
    """Train until step `until` or the end; return the samples of each step."""
    model = nn.Linear(1, 1)
    optimizer = sgd(grid, model, lr=0.001)
    counted = []
    for numbers in grid.batches(data, **{"epochs": 1, "global_batch_size": 12, **options}):
        step = grid.step
        grid._model_state.checkpoints.wait()  # type: ignore[union-attr]
        model(numbers[:, None].float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if grid._session._turn.spans:  # not the placeholder of a worker without samples
            counted.append((step, numbers.tolist()))
        if grid.step == until:
            break
    return counted


def test_each_file_but_the_last_ones_is_opened_by_one_worker(together: Any, tmp_path: Path) -> None:
    index = write_shards(tmp_path / "data")

    def train(grid: gridtrain.Grid, number: int) -> tuple[list[str], list[int]]:
        data = gridtrain.Shards(index, decode=number_of)
        counted = take_steps(grid, data, batch_size=4, global_batch_size=None)
        return data.opened, [sample for _, samples in counted for sample in samples]

    results = together(train, 3)
    assert sorted(sample for _, samples in results for sample in samples) == list(range(TOTAL))
    openings = Counter(name for opened, _ in results for name in set(opened))
    assert len(openings) == len(SIZES)
    assert sum(count > 1 for count in openings.values()) <= 2, openings
    assert max(len(opened) for opened, _ in results) < len(SIZES), "no worker has opened all"
    assert all(len(opened) == len(set(opened)) for opened, _ in results), "no file is opened twice"


def test_a_run_is_resumed_in_the_middle_of_its_shards(tmp_path: Path) -> None:
    """Two workers stop after step 6; three others continue from the checkpoint."""
    index = write_shards(tmp_path / "data")

    def work(grid: gridtrain.Grid, until: int) -> list[tuple[int, list[int]]]:
        return take_steps(grid, gridtrain.Shards(index, decode=number_of), until)

    first = run(tmp_path, 2, lambda grid: work(grid, 7))
    ledger = checkpoint_store.read(tmp_path / "worker-0" / "step-00000006").position.ledger
    spec = LedgerSpec(TOTAL, 0, 1, shards=SIZES)
    assert ledger.leases and all(locate(spec, lease.start)[1] > 0 for _, lease in ledger.leases)
    counted = [samples for steps in first for step, samples in steps if step < 6]
    assert sum(map(len, counted)) == ledger.consumed == 72
    counted += [samples for steps in run(tmp_path, 3, lambda grid: work(grid, -1)) for _, samples in steps]
    assert sorted(sample for samples in counted for sample in samples) == list(range(TOTAL))


def test_the_others_read_files_that_a_worker_cannot_read(new_group: Any, tmp_path: Path) -> None:
    """A worker without some files ends, and the status has the first one's name; the others read them."""
    index = write_shards(tmp_path / "data")
    incomplete = tmp_path / "incomplete"
    write_shards(incomplete)
    for path in sorted(incomplete.glob("*.jsonl"))[2:]:
        path.unlink()
    figures: dict[str, float] = {}

    def train(grid: gridtrain.Grid, number: int) -> list[tuple[int, list[int]]]:
        root = incomplete if number == 1 else ""
        data = gridtrain.Shards(index, root=root, decode=number_of)
        try:
            return take_steps(grid, data)
        finally:
            figures[f"{number}"] = data.failed_reads

    with new_group(workers=3) as group:
        group.start_all(train)
        results = group.ends()
        events = str(status_of(group)["events"])
    what = (
        r"its data cannot be read \(part-\d\d\.jsonl: No such file or directory; failed reads: 1\); see its"
    )
    assert re.search(what, events) and str(tmp_path) not in events
    assert isinstance(results[1], DataError) and "cannot be read: No such file" in str(results[1])
    assert figures == {"0": 0, "1": 1, "2": 0}
    counted = [samples for number in (0, 2) for _, samples in results[number]]
    read = Counter(sample for samples in counted for sample in samples)
    assert max(read.values()) == 1 and sum(read.values()) > TOTAL - 60, (
        "except for samples that worker 1 has counted"
    )


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_a_loader_reads_packed_sequences_by_shards(
    together: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    from gridtrain.training.data.shard_index import build_index, write_index
    from gridtrain.training.data.token_packing import tokenizer_named

    names = []
    for number in range(3):
        names.append(tmp_path / f"part-{number}.txt")
        names[-1].write_text("".join(f"{number} line {line}\n" for line in range(20 + number)))
    index = build_index(map(str, names), tokenize=tokenizer_named("bytes"), tokenizer="bytes")
    write_index(index, tmp_path / "index.json")

    def train(grid: gridtrain.Grid, number: int) -> int:
        data = gridtrain.Shards(tmp_path / "index.json", pack=16)
        model = nn.Embedding(257, 1)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        read = 0
        for tokens in grid.batches(data, batch_size=2, epochs=1, **options):
            assert tokens.shape[1:] == (16,) and tokens.dtype is torch.int64
            read += len(tokens) * bool(grid._session._turn.spans)
            model(tokens).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return read

    assert sum(together(train, 2)) == sum(shard.tokens // 16 for shard in index.shards)


def test_the_others_go_on_without_a_worker_whose_server_does_not_answer(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 1 cannot fetch its second file until worker 0 trains alone, and rejoins with the file."""
    monkeypatch.setattr(shard_files, "BRIEF_S", 0.2)
    index = write_shards(tmp_path / "data", (4,) * 8)
    is_alone, last_step = threading.Event(), math.inf

    def train(grid: gridtrain.Grid, number: int) -> int:
        nonlocal last_step
        data = gridtrain.Shards(index, root="memory://none", decode=number_of, cache=tmp_path / f"{number}")
        data._cache._retry_after_s = (0.1,) * int(10 * WITHIN_S)

        def copy(place: str, part: Path, *_: object) -> None:
            if number == 1 and len(data.opened) == 2 and not is_alone.is_set():
                raise ConnectionRefusedError("refused")
            part.write_bytes((tmp_path / "data" / Path(place).name).read_bytes())

        data._copy = copy
        model = nn.Linear(1, 1)
        optimizer = sgd(grid, model, lr=0.001)
        for numbers in grid.batches(data, batch_size=2, steps=1_000_000):
            if number == 0 and grid.world_size == 1 and grid.step > 2:
                is_alone.set()
            elif number == 0 and is_alone.is_set():
                last_step = min(last_step, grid.step + 3)
            if grid.step == last_step:
                break
            model(numbers[:, None].float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return grid.step

    impatient = Deadlines(
        beat_s=0.05,
        settle_s=0.02,
        probe_s=0.2,
        generation_gap_s=0.02,
        patience_floor_s=1.5,
        patience_factor=1.0,
    )
    stayed, returned = together(train, 2, deadlines=impatient)
    assert stayed == returned == last_step
    assert any(text.startswith("the group no longer waits for the file: ") for text in caplog.messages)
