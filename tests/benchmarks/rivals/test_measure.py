"""A rival's time covers only the operation, in the same way for all rivals."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from rivals import measure
from rivals.contract import Request
from rivals.measure import Prepared, measured

RIVALS = Path(measure.__file__).parent


def test_only_the_operation_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, calls = [0.0], []

    def part(name: str, takes_s: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            now_s[0] += takes_s

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(measure.time, "process_time", lambda: now_s[0])
    request = Request(world=2, op="all_gather", n=100, repeats=2, warmup=1, interface="lo")
    prepared = Prepared(part("operation", 0.5), 800, part("prepare", 10.0), part("finish", 100.0))
    result = measured(request, "gloo", "torch", prepared, part("barrier", 1000.0))
    assert result.seconds == result.cpu_s == [0.5, 0.5]
    assert calls == ["prepare", "barrier", "operation", "barrier", "finish"] * 3
    assert result.payload_bytes == 800


def test_a_wrong_result_raises() -> None:
    def finish() -> None:
        raise ArithmeticError("the update of 3 entries is not the one of 4 expected")

    request = Request(op="gtopk", n=100, interface="lo")
    with pytest.raises(ArithmeticError, match="not the one of 4"):
        measured(request, "mpi", "1", Prepared(lambda: None, 8, finish=finish), lambda: None)


@pytest.mark.parametrize("rival", ["gloo", "mpi"])
def test_no_sparse_operation_uses_the_dense_vector(rival: str) -> None:
    """The source is inspected, because MPI is not installed everywhere."""
    functions = {
        outer.name: inner
        for outer in ast.parse((RIVALS / f"{rival}.py").read_text()).body
        if isinstance(outer, ast.FunctionDef)
        for inner in outer.body
        if isinstance(inner, ast.FunctionDef) and inner.name == "operation"
    }
    sparse = functions.keys() & {"all_gather", "gtopk"}
    assert sparse
    for name in sparse:
        assert "update_N" not in {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)}, name
