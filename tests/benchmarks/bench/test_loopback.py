"""Cells on loopback: two real workers and a real coordinator."""

from __future__ import annotations

import pytest

from bench.cells import parse
from bench.measurement import Effort, measure_cells
from gridtrain.network.wire.sparse_payload import encoded_bytes
from gridtrain.network.wire.value_encoding import ValueKind

pytest.importorskip("torch")


@pytest.mark.integration
def test_cells_of_gridtrain_are_measured_and_others_are_skipped() -> None:
    dense, gtopk = parse("dense P=2 n=100k"), parse("gtopk P=2 n=100k density=0.01")
    rival = parse("gloo/all_reduce P=2 n=100k")
    late = parse("dense P=2 n=100k delay=10ms")
    effort = Effort(blocks=2, repeats=2, warmup=1, loopback=True)
    messages: list[str] = []
    results = {
        result.cell: result
        for result in measure_cells([dense, gtopk, rival, late], effort, {"gloo": ""}, messages.append)
    }

    for cell in (dense, gtopk):
        samples = results[cell].samples
        assert [sample.block for sample in samples] == [0, 0, 1, 1], results[cell].skipped
        for sample in samples:
            assert sample.seconds > 0 and sample.cpu_s > 0 and sample.aborts == 0
            assert sample.workspace_s is not None and sample.workspace_s > 0
            assert sample.sent_bytes is not None and sample.payload_bytes is not None
            assert sample.sent_bytes > sample.payload_bytes
    # A ring of two sends each half twice: 400,000 bytes by each member, in a payload for each slice.
    assert 400_000 <= (results[dense].median_of("sent_bytes") or 0) < 410_000
    assert results[gtopk].median_of("payload_bytes") == encoded_bytes(1000, 100_000, ValueKind.FP16)
    assert "rivals are measured in namespaces" in results[rival].skipped
    assert "loopback has no delay" in results[late].skipped
    assert messages[:2] == [
        f"{dense.link}: dense, n = 100,000, block 1 of 2",
        f"{dense.link}: gtopk, n = 100,000, block 1 of 2",
    ]
