"""`make gpu` without a GPU: each part runs on the CPU, and the failure of a part is recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gridtrain  # noqa: E402
import selection  # noqa: E402
from gpu import __main__ as program  # noqa: E402
from gpu import exact, parts, report, runs, speed  # noqa: E402
from gpu.parts import PARTS, Part, Setting  # noqa: E402
from gridtrain.sparsify.cuda_selection import CudaSelection  # noqa: E402
from gridtrain.sparsify.tensor_selection import AccumulationTerms, SelectedEntries, TensorSelection  # noqa: E402

SMALL = Setting("cpu", small=True)
Function = Callable[[Setting, Callable[[str, Any], None]], None]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures_of(function: Function) -> dict[str, Any]:
    found: dict[str, Any] = {}
    function(SMALL, found.__setitem__)
    return found


# -- the parts -----------------------------------------------------------------------------------------


def test_each_part_is_a_function_and_all_fit_into_the_time() -> None:
    for part in PARTS.values():
        module, name = part.function.split(":")
        assert callable(getattr({"gpu.exact": exact, "gpu.speed": speed, "gpu.runs": runs}[module], name))
    assert program.BUDGET_S + program.GRACE_S < 600


def test_all_files_with_tests_for_a_gpu_are_found() -> None:
    root = Path(__file__).resolve().parents[2]
    marked = {path.name for path in root.rglob("test_*.py") if exact.MARK in path.read_text()}
    assert {"test_cuda_selection.py", "test_selection.py", "test_local_sgd.py", "test_gradients.py"} <= marked


def test_a_difference_of_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_of(exact.bits)["bits"]
    assert (figures["differing"], figures["problem"]) == ([], "")
    assert figures["compared"] == 60 * len(figures["ways"])

    class Wrong(TensorSelection):
        def select(self, terms: AccumulationTerms, k: int) -> SelectedEntries:
            return super().select(terms, max(1, k - 1))

    monkeypatch.setattr(exact, "selections", lambda device: ({"wrong": Wrong}, ""))
    found: dict[str, Any] = {}
    with pytest.raises(
        RuntimeError, match=r"of 60 differ, such as wrong, FP16, momentum 0.0, normal, n = 2049"
    ):
        exact.bits(SMALL, found.__setitem__)
    assert found["bits"]["differing"]  # written before the part failed


def test_what_was_compared_before_the_time_ended_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter((True, False))
    monkeypatch.setattr(exact, "agree", lambda *arguments, **options: next(results))
    found: dict[str, Any] = {}
    with pytest.raises(StopIteration):
        exact.bits(SMALL, found.__setitem__)
    assert found["bits"]["compared"] == 2 and len(found["bits"]["differing"]) == 1


@pytest.mark.integration
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed, so that no test is marked")
def test_only_tests_that_use_the_gpu_are_run_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels of other GPUs are compiled without one."""
    (tmp_path / "gpu_present.py").write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_present", "-m", "gpu"]
    file = exact.ROOT / "tests" / "sparsify" / "test_cuda_selection.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run(
        [*argv, "--collect-only", str(file)],
        cwd=exact.ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "::test_steps_are_those_of_the_host" in done.stdout, done.stdout + done.stderr
    assert "::test_the_kernels_compile" not in done.stdout


@pytest.mark.integration
@pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed, so that its kernels cannot be interpreted"
)
def test_interpreted_kernels_give_the_same_bits(tmp_path: Path) -> None:
    into = tmp_path / "outcome.json"
    command = [sys.executable, "-m", "gpu", "--child", "gpu.exact:bits", "--into", str(into)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    argv = [*command, "--device", "cpu", "--small"]
    done = subprocess.run(argv, env=environment, cwd=program.BENCHMARKS, timeout=280)
    figures = json.loads(into.read_text())["figures"]["bits"]
    assert (done.returncode, figures["differing"]) == (0, []) and "triton" in figures["ways"]


def test_unusable_kernels_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(exact, "are_kernels_correct", lambda device: True)
    assert exact.selections(torch.device("cpu"))[0]["triton"] is CudaSelection
    monkeypatch.setattr(exact, "are_kernels_correct", lambda device: False)
    with pytest.raises(RuntimeError, match="Triton is not installed"):
        figures_of(exact.bits)


def test_selection_is_timed_beside_other_methods() -> None:
    figures = figures_of(speed.selection)
    cases = figures["blocks"][-1]["cases"]
    assert [block["n"] for block in figures["blocks"]] == speed.sizes(SMALL)
    assert {"memory copy", "torch.topk(abs)", "sampled threshold (DGC), momentum"} <= set(cases)
    goal = figures["goal"]
    assert goal["met"] is (max(goal[name] for name in speed.GOAL_CASES) <= speed.GOAL)
    # 20 bytes an element with momentum, 8 of a copy
    ours, copy = cases["ours: weight, momentum, carried"], cases["memory copy"]
    assert ours["x_bytes"] == pytest.approx(ours["wall_ns_median"] / copy["wall_ns_min"] / 2.5, rel=0.05)


def test_a_length_without_enough_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = selection.measure

    def limited(n: int, *arguments: Any, **options: Any) -> Any:
        if n > 4096:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return measure(n, *arguments, **options)

    monkeypatch.setattr(selection, "measure", limited)
    found: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match=r"not enough memory for n = \[20000\]"):
        speed.selection(SMALL, found.__setitem__)
    assert found["blocks"][1] == {"n": 20_000, "error": "CUDA out of memory."}
    assert "n = 20000: CUDA out of memory." in list(report.of_figure("blocks", found["blocks"], "cpu"))


def test_lengths_depend_on_the_free_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * 2_000_000, 1 << 40))  # takes no "cuda"
    assert speed.sizes(Setting("cuda")) == [1_000_000, 2_000_000] and current == ["cuda"]


def test_sampled_selection_sends_about_k_entries_and_stores_the_others() -> None:
    vectors = selection.Vectors(20_000, torch.device("cpu"))
    sampled = selection.Sampled(vectors, 200)
    sampled.step()
    sent = int((sampled._v == 0).sum())
    assert 160 <= sent <= 260 and torch.equal(sampled._v == 0, sampled._u == 0)
    assert torch.equal(sampled._v[sampled._v != 0], vectors.gradients[1][sampled._v != 0])


def test_a_sparse_exchange_that_copies_whole_vectors_to_the_host_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = figures_of(speed.transfers)
    assert set(figures["steps"]) == {"gtopk", "gtopk, momentum", "dense"}
    for step in figures["steps"].values():
        assert min(step["ms"].values()) > 0 and set(step["ms"]) == {
            "gather",
            "select, encode",
            "commit, load",
            "optimizer",
        }
    entries = {"DtoH (Device -> Pinned)": {"count": 1, "bytes": 4 * (1 + 2 * 4), "us": 2.0}}
    monkeypatch.setattr(speed, "copies_of", lambda run, setting: entries)
    assert figures_of(speed.transfers)["steps"]["gtopk"]["copies"] == entries
    entries["DtoH (Device -> Pinned)"]["bytes"] = 4 * 4096
    with pytest.raises(RuntimeError, match="gtopk: 16384 bytes were copied to the host for k = 4 entries"):
        figures_of(speed.transfers)


def test_a_gpu_whose_copies_are_not_recorded_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "one_worker", lambda setting, n, exchange: {"copies": {"HtoD": {"bytes": 9}}})
    monkeypatch.setattr(speed, "to_host_ms", lambda *arguments: 1.0)
    with pytest.raises(RuntimeError, match="gtopk: torch's profiler recorded no copy to the host"):
        speed.transfers(Setting("cuda", small=True), lambda name, value: None)


def test_copies_are_read_from_a_trace() -> None:
    def copy(name: str, nbytes: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": f"Memcpy {name}",
            "dur": 1.5,
            "args": {"bytes": nbytes},
        }

    events = [copy("DtoH (Device -> Pinned)", 36), copy("DtoH (Device -> Pinned)", 4), copy("DtoD (...)", 9)]
    events += [
        copy("HtoD (Pageable -> Device)", 8),
        {"ph": "X", "cat": "kernel", "name": "x", "dur": 3},
        {"ph": "M"},
    ]
    assert speed.copies_in({"traceEvents": events}) == {
        "DtoH (Device -> Pinned)": {"count": 2, "bytes": 40, "us": 3.0},
        "HtoD (Pageable -> Device)": {"count": 1, "bytes": 8, "us": 1.5},
    }


def test_a_failed_way_of_training_is_recorded_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(model: Any, setting: Setting) -> Any:
        raise ValueError("no such kernel")

    names = ("float16 autocast, GradScaler", "LoRA")
    ways = {"broken": runs.Way(change=broken)} | {name: runs.WAYS[name] for name in names}
    monkeypatch.setattr(runs, "WAYS", ways)
    found: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match=r"1 of 4 failed: broken \(ValueError: no such kernel\)"):
        runs.training(SMALL, found.__setitem__)
    scaled, adapted = (found["ways"][name] for name in names)
    assert scaled["skipped"] >= 1 and scaled["last_loss"] < scaled["first_loss"]
    assert 0 < adapted["parameters"] < scaled["parameters"]
    assert found["ways"]["pipeline, 2 stages"]["step_ms"] > 0


def test_figures_are_of_the_chosen_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Chosen(Setting):
        is_gpu = True

    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 0)
    load = replace(runs.LOADS["tiny"], is_profiled=False)
    gridtrain.local(partial(runs.train, way=runs.Way(), setting=Chosen("cpu", True), load=load, steps=4), 1)
    assert asked == ["cpu"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", "the card {}".format)
    monkeypatch.setattr(program.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(exact, "bits", lambda setting, store: None)
    assert program.child("gpu.exact:bits", Setting("cuda:1"), tmp_path / "outcome.json") == 0
    assert json.loads((tmp_path / "outcome.json").read_text())["machine"]["gpu"] == "the card cuda:1"


def test_workers_that_differ_and_losses_that_rise_are_failures() -> None:
    worker = {"equal": ["ab", 1.0], "first_loss": 3.0, "last_loss": 2.0}
    assert "error" not in runs.summary([worker, worker])
    assert "different" in runs.summary([worker, worker | {"equal": ["ab", 2.0]}])["error"]
    worse = worker | {"last_loss": 3.5}
    assert runs.summary([worse])["error"] == "the loss went from 3.000 to 3.500"
    assert "error" not in runs.summary([worse], learns=False)


@pytest.mark.integration
def test_processes_train_and_report_the_duration_of_each_phase() -> None:
    run = figures_of(runs.processes)["runs"]["gTop-k, 20 Mbit/s"]
    assert {"computing", "selecting", "communicating", "waiting", "applying", "copies"} == set(run["share"])
    assert run["sent_bytes"] > 0 and run["step_ms"] > 0 and "error" not in run


# -- the program ---------------------------------------------------------------------------------------


def test_without_cuda_the_program_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--out", str(tmp_path / "results")]) == 0
    assert re.match(r"make gpu: skipped, no CUDA device: torch \S+ is built ", capsys.readouterr().out)
    assert not (tmp_path / "results").exists()


def test_a_cpu_needs_small_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--device", "cpu"])
    assert "--device cpu needs --small" in capsys.readouterr().err


def test_missing_packages_are_reported_by_their_names_in_the_package_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        parts.importlib.util, "find_spec", lambda name: None if name in ("zmq", "nacl") else 1
    )
    assert parts.missing_packages(("numpy", "zmq", "nacl")) == ["pyzmq", "pynacl"]
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: name != "_cffi_backend" or None)
    assert parts.missing_packages(parts.TRAINING) == ["cffi"]
    monkeypatch.setattr(
        parts.importlib.util, "find_spec", lambda name: None if name in ("zmq", "nacl") else 1
    )
    skipped = program.run_part(PARTS["training"], SMALL, 60.0)
    assert skipped == {"skipped": "needs pynacl, pyzmq: not installed"}


FAKE = """
import os, threading

def good(setting, store):
    store("answer", {"device": setting.device, "small": setting.small})

def bad(setting, store):
    store("answer", {"before": 1})
    raise ValueError("first\\nthe last line | of it")

def crashing(setting, store):
    store("answer", {"before": 2})
    os._exit(3)

def hanging(setting, store):
    store("answer", {"before": 3})
    open(os.environ["HANGS"], "w").close()
    threading.Event().wait()
"""


class LimitFromHang(subprocess.Popen[bytes]):
    """A part's process; a limit of 5 s counts as exceeded as soon as `hanging` hangs."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout == 5.0:
            Path(os.environ["HANGS"]).read_bytes()  # a FIFO
            timeout = 0.0
        return super().wait(timeout)


@pytest.mark.integration
def test_the_failure_of_a_part_is_recorded_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fakeparts.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HANGS", str(tmp_path / "hangs"))
    os.mkfifo(tmp_path / "hangs")
    monkeypatch.setattr(program.subprocess, "Popen", LimitFromHang)
    monkeypatch.setattr(program, "MIN_S", 0.0)
    fakes = {name: Part(f"fakeparts:{name}", (), 60.0) for name in ("bad", "crashing")}
    fakes["hanging"] = Part("fakeparts:hanging", (), 5.0)
    fakes["elsewhere"] = Part("fakeparts:good", ("no_such_package",), 60.0)
    monkeypatch.setattr(program, "PARTS", fakes)
    out = tmp_path / "out"
    assert program.main(["--device", "cpu", "--small", "--out", str(out)]) == 1
    record = json.loads((out / "gpu.json").read_text())
    outcomes = {
        name: part.get("error", part.get("skipped", "done")) for name, part in record["parts"].items()
    }
    assert outcomes == {
        "bad": "the last line | of it",
        "crashing": "its process ended with exit code 3",
        "hanging": "took more than 5 s",
        "elsewhere": "needs no_such_package: not installed",
    }
    figures = [record["parts"][name]["figures"]["answer"] for name in ("bad", "crashing", "hanging")]
    assert figures == [{"before": 1}, {"before": 2}, {"before": 3}]
    assert torch.__version__.startswith(record["machine"]["torch"])
    page = (out / "gpu.md").read_text()
    assert "FAILED: the last line \\| of it |" in page and "| elsewhere |  | skipped: needs no_such" in page

    # a later run of one part adds to the file
    fakes["bad"] = Part("fakeparts:good", (), 60.0)
    assert program.main(["--device", "cpu", "--small", "--out", str(out), "--part", "bad"]) == 0
    again = json.loads((out / "gpu.json").read_text())["parts"]
    assert "error" not in again["bad"]
    assert again["bad"]["figures"]["answer"] == {"device": "cpu", "small": True}
    assert again["hanging"] == record["parts"]["hanging"]


def test_a_part_is_not_started_without_enough_time() -> None:
    assert program.run_part(PARTS["bits"], SMALL, 3.0) == {
        "error": "not started: only 3 s of 540 s were left"
    }


def test_the_report_shows_all_methods() -> None:
    record = {"device": "cpu", "small": True, "machine": {}, "parts": {}}
    record["parts"] = {"selection": {"figures": figures_of(speed.selection)}}
    assert "| ours: weight, momentum, carried |" in report.markdown(record)


def test_make_gpu_with_a_given_python_makes_no_environment() -> None:
    command = ["make", "-n", "gpu", "PYTHON=/opt/python3", "GPU=--part bits"]
    done = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True, check=True)
    assert "scripts/setup" not in done.stdout and "/opt/python3 -m gpu --part bits" in done.stdout
    assert sys.executable not in done.stdout
