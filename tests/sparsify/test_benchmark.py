"""benchmarks/selection.py runs, on a vector far too small to say anything about time."""

import json

import torch

import selection


def test_the_benchmark_measures_every_case_and_writes_its_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.json"
    arguments = ["--n", "3000", "--rounds", "2", "--threads", "1", "--density", "0.01", "--out", str(path)]
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["selection.py", *arguments])
    try:
        selection.main()
    finally:
        torch.set_num_threads(threads)
    (block,) = json.loads(path.read_text())["results"]
    assert (block["n"], block["threads"]) == (3000, 1)
    printed = capsys.readouterr().out
    for name, row in block["cases"].items():
        assert row["rounds"] == 2 and row["cpu_ns_min"] > 0
        assert f"| {name} |" in printed
    assert {"memory copy", "torch.topk(abs)", "ours: residual update, carried"} <= set(block["cases"])


def test_each_step_of_a_case_is_one_of_error_feedback():
    """What is selected leaves the residual, the rest stays: the benchmark measures what training does."""
    vectors = selection.Vectors(2000, torch.device("cpu"))
    steps = selection.Steps(vectors, 20, weight=0.5)
    steps.step()
    expected = vectors.gradients[1] * 0.5
    expected[expected.abs().topk(20).indices] = 0.0
    assert torch.equal(steps._now, expected)
