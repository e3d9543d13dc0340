"""Only the first worker writes, and the next one goes on when it is first."""

import json
import math
import struct

import pytest

from gridtrain.adapters import loggers
from gridtrain.errors import ConfigError


class Grid:
    """`first` and `step` are set by the test."""

    def __init__(self) -> None:
        self.is_first, self.step, self.reported = True, 0, []
        self.traffic = {"data": (700, 10), "vote": (30, 10)}

    def report(self, **figures: float) -> None:
        self.reported.append(figures)


class Paper:
    def __init__(self) -> None:
        self.lines, self.closed = [], False

    def write(self, step, figures) -> None:
        self.lines.append((step, figures))

    def close(self) -> None:
        self.closed = True


def test_only_the_first_worker_writes_and_all_report() -> None:
    grid, paper = Grid(), Paper()
    log = loggers.Log(grid, paper)
    for grid.step, grid.is_first in ((1, True), (2, False), (3, True)):
        log(loss=grid.step / 2, odd=math.nan)
    log.close()
    assert grid.reported == [{"loss": 0.5}, {"loss": 1.0}, {"loss": 1.5}]
    assert paper.lines == [(1, {"loss": 0.5, "sent_bytes": 730.0}), (3, {"loss": 1.5, "sent_bytes": 730.0})]
    assert paper.closed


def test_each_worker_may_have_writers_of_its_own() -> None:
    grid, common, own = Grid(), Paper(), Paper()
    log = loggers.Log(grid, common, own=[own])
    for grid.step, grid.is_first in ((1, True), (2, False)):
        log(loss=1.0)
    log.close()
    assert [step for step, _ in common.lines] == [1]
    assert own.lines == [(step, {"loss": 1.0, "sent_bytes": 730.0}) for step in (1, 2)]
    assert common.closed and own.closed


def test_mlflow_continues_one_run_on_the_next_first_worker(tmp_path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    from mlflow.tracking import MlflowClient

    uri, written = f"sqlite:///{tmp_path / 'mlflow.db'}", {"mine-0a": (1, 2, 3), "mine-0b": (7,)}
    for run, first_steps in (("mine-0a", (1, 2)), ("mine-0b", (7,)), ("mine-0a", (3,))):
        grid = Grid()  # of another worker each time
        log = loggers.Log(grid, loggers.MLflow("gpt", run=run, tracking_uri=uri))
        for grid.step in first_steps:
            log(loss=1.0 / grid.step)
        log.close()
    client = MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("gpt").experiment_id])
    assert {run.data.tags["gridtrain.run"] for run in found} == set(written) and len(found) == 2
    for run in found:
        history = client.get_metric_history(run.info.run_id, "loss")
        expected = [(step, 1.0 / step) for step in written[run.data.tags["gridtrain.run"]]]
        assert sorted((metric.step, metric.value) for metric in history) == expected
        assert run.info.status == "FINISHED"


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make test-adapters")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    grid = Grid()
    log = loggers.Log(grid, loggers.TensorBoard(str(tmp_path)))
    for grid.step in (10, 20):
        log(loss=1.0 / grid.step)
    log.close()
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, round(event.value, 3)) for event in found] == [(10, 0.1), (20, 0.05)]


def test_nothing_is_opened_on_a_worker_that_is_not_first(tmp_path) -> None:
    grid = Grid()
    grid.is_first = False
    log = loggers.Log(grid, loggers.TensorBoard(str(tmp_path / "none")), loggers.WeightsAndBiases())
    log(loss=1.0)
    log.close()
    assert not (tmp_path / "none").exists()


def test_weights_and_biases_is_driven_as_it_wants(monkeypatch) -> None:
    """A stand-in for the package: what is called, with what."""
    calls = []

    class Run:
        def log(self, figures, step):
            calls.append(("log", step, figures["loss"]))

        def finish(self):
            calls.append(("finish",))

    def init(**options):
        calls.append(("init", options))
        return Run()

    import sys
    import types

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=object()))
    grid = Grid()
    log = loggers.Log(grid, loggers.WeightsAndBiases(project="mine", run="mine-0a"))
    log(loss=2.0)
    log.close()
    options = {"project": "mine", "id": "mine-0a", "resume": "allow"}
    assert calls == [("init", options), ("log", 0, 2.0), ("finish",)]


def records(content: bytes):
    """The documents in a file of W&B's: a head of 7 bytes, then LevelDB's log format in blocks of 32 KiB.

    Each piece: checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last), its bytes.
    """
    assert content.startswith(b":W&B")
    at, held = 7, b""
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if kind == 0:
            return
        held = (
            content[at + 7 : at + 7 + length] if kind in (1, 2) else held + content[at + 7 : at + 7 + length]
        )
        at += 7 + length
        if kind in (1, 4):
            yield held


def test_weights_and_biases_itself_keeps_a_run_offline(tmp_path, monkeypatch) -> None:
    """The real package, without its service: what it has written down is read back from its own file."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    grid = Grid()
    log = loggers.Log(grid, loggers.WeightsAndBiases(project="mine", dir=str(tmp_path)))
    for grid.step in (10, 20):
        log(loss=1.0 / grid.step)
    log.close()
    wandb.teardown()  # ends its service process, which may not have written everything yet
    (file,) = tmp_path.rglob("run-*.wandb")
    found = []
    for record in map(Record.FromString, records(file.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            figures = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            step = figures.get("_step", record.history.step.num)
            found.append((step, figures["loss"], figures["sent_bytes"]))
    assert found == [(10, 0.1, 730.0), (20, 0.05, 730.0)]


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr("gridtrain.extras.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs wandb to be installed"):
        loggers.WeightsAndBiases().write(0, {"loss": 1.0})
