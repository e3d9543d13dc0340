"""Interfaces to other programs keep their names: the status, the dashboard's JSON, Prometheus, the log.

Recorded is the status of a real run, with members, a paused worker, bans and violations.  test_old_runs.py
tests that later code gives such a status itself.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from oldformats.files import recorded
from oldformats.positions import keys_of

pytest.importorskip("starlette", reason="the extra `coordinator` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `coordinator` is not installed")

KNOWN = recorded("interfaces/status.json")
AT_S = 1.0
PACKAGES = ("gridtrain", "gridtrain_coordinator", "gridtrain_worker")


@pytest.fixture
def board() -> Any:
    """The dashboard of the recorded status, to which the coordinator now adds the mean loss."""
    from oldformats.dashboard import Board, mean_loss

    made, status = Board(), json.loads(json.dumps(KNOWN["status"]))
    made.add_event(AT_S, "info", "joined", {"name": "anna"})
    made.update(status | {"loss": mean_loss(status["members"])}, AT_S)
    return made


def test_an_old_status_is_shown(board: Any) -> None:
    assert board.run["run"] == "whole" and board.run["phase"] == "training"
    rows = {row["name"]: row for row in board.workers()}
    assert {name: row["state"] for name, row in rows.items()} == {
        "anna": "active",
        "bert": "active",
        "gina": "paused",
    }
    assert rows["anna"]["loss"] and rows["bert"]["loss"] and rows["gina"]["loss"] is None


def test_the_dashboard_shows_the_same_as_before(board: Any) -> None:
    whole = board.full_state()
    assert set(KNOWN["board"]) <= keys_of(whole)
    assert set(KNOWN["columns"]) <= set(whole["columns"])
    assert list(whole["point"]) == KNOWN["points"]
    assert set(KNOWN["worker"]) <= set(board.workers()[0])


def test_prometheus_metrics_have_their_names_types_and_labels(board: Any) -> None:
    from oldformats.dashboard import exposition

    lines = exposition(board).decode().splitlines()
    types = [line.removeprefix("# TYPE ").split() for line in lines if line.startswith("# TYPE")]
    samples = [re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line) for line in lines if not line.startswith("#")]
    labels = {(found[1], *re.findall(r'(\w+)="', found[2] or "")) for found in samples if found is not None}
    for metric in KNOWN["prometheus types"]:
        assert metric in types
    assert {tuple(each) for each in KNOWN["prometheus labels"]} <= labels


def test_the_json_interface_has_its_paths_and_fields() -> None:
    from oldformats.dashboard import PACKAGE

    document = json.loads((resources.files(PACKAGE) / "openapi.json").read_text(encoding="utf-8"))
    known = recorded("interfaces/openapi.json")
    for path, methods in known["paths"].items():
        assert set(methods) <= set(document["paths"].get(path, {})), path
    schemas = document["components"]["schemas"]
    for name, properties in known["schemas"].items():
        assert name in schemas and set(properties) <= set(schemas[name].get("properties", {})), name


def test_lines_of_the_log_keep_their_names() -> None:
    """They are the label `event` of a metric, and users search for them."""
    sources = [
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in Path(str(resources.files(package))).rglob("*.py")
    ]
    logged = {name for text in sources for name in re.findall(r'"(?:info|warning|error)",\s*"(\w+)"', text)}
    assert set(recorded("interfaces/events.json")) <= logged
