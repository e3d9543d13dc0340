"""The JSON API answers what its OpenAPI document says, at every address in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gridtrain.core.messages import Refused, RemoveWorker, Unban

pytest.importorskip("starlette", reason="the extra `coordinator` is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
Desks = Callable[..., Any]


def document(desk: Any) -> dict[str, Any]:
    found: dict[str, Any] = desk.client.get("/api/v1/openapi.json").json()
    return found


def schema_of(
    told: dict[str, Any], path: str, method: str, status: int, kind: str = "application/json"
) -> Any:
    schema = told["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]
    return schema | {"components": told["components"]}


def holds(answer: Any, told: dict[str, Any], path: str, method: str = "get") -> Any:
    """The answer's body, checked against the document."""
    body = answer.json()
    validator = jsonschema.Draft202012Validator(schema_of(told, path, method, answer.status_code))
    wrong = [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(body)]
    assert not wrong, f"{path} {answer.status_code}: {wrong}"
    return body


def test_the_document_is_sound(desk: Desks) -> None:
    told = document(desk())
    for name, schema in told["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name
    named = set(re.findall(r"#/components/schemas/(\w+)", str(told)))
    assert named <= set(told["components"]["schemas"])


def test_every_address_is_documented_and_every_documented_one_is_there(desk: Desks) -> None:
    here = desk()
    routes = here.client.app._app.routes
    served = {
        (route.path, method.lower()) for route in routes for method in route.methods - {"HEAD"}
        if route.path.startswith(("/api", "/healthz", "/metrics"))
    }  # fmt: skip
    documented = {(path, method) for path, all_ in document(here)["paths"].items() for method in all_}
    assert served - {("/api/v1/openapi.json", "get")} == documented


@pytest.mark.parametrize("workers", [1, 4, 40, 300])
def test_answers_are_as_documented(desk: Desks, workers: int) -> None:
    here = desk(workers, 20)
    told = document(here)
    for path in (
        "/api/v1/run",
        "/api/v1/workers",
        "/api/v1/topology",
        "/api/v1/events",
        "/api/v1/history",
        "/healthz",
    ):
        answer = here.client.get(path)
        assert answer.status_code == 200, path
        holds(answer, told, path)
    first = here.client.get("/api/v1/workers").json()["workers"][0]
    holds(here.client.get(f"/api/v1/workers/{first['peer']}"), told, "/api/v1/workers/{key}")


def test_workers_are_paged_and_filtered(desk: Desks) -> None:
    here = desk(40, 5)
    page = here.client.get("/api/v1/workers?offset=10&limit=5&state=active").json()
    assert [row["rank"] for row in page["workers"]] == [10, 11, 12, 13, 14]
    assert page["total"] == sum(row["state"] == "active" for row in here.board.workers())
    assert here.client.get("/api/v1/workers?state=nobody").json() == {"total": 0, "workers": []}


def test_events_after_one(desk: Desks) -> None:
    here = desk(4, 130)  # a worker is lost at second 97 and comes back
    every = here.client.get("/api/v1/events").json()["events"]
    assert [event["event"] for event in every].count("lost") == 1
    later = here.client.get(f"/api/v1/events?after={every[-3]['id']}").json()["events"]
    assert later == every[-2:]


def test_refusals_are_as_documented(desk: Desks) -> None:
    here = desk()
    told = document(here)
    key = "/api/v1/workers/{key}"
    assert "64 hexadecimal" in holds(here.client.get("/api/v1/workers/anna"), told, key)["reason"]
    assert holds(here.client.get(f"/api/v1/workers/{'0' * 64}"), told, key)["code"] == "unknown"
    assert here.client.get("/api/v1/workers?limit=-1").status_code == 400
    assert here.client.get("/api/v1/nothing").json()["code"] == "unknown"
    assert here.client.post("/api/v1/run").json()["code"] == "method"


def test_before_the_first_picture(desk: Desks) -> None:
    here = desk(4, 0)
    told = document(here)
    assert holds(here.client.get("/api/v1/run"), told, "/api/v1/run")["code"] == "starting"
    assert here.client.get("/healthz").status_code == 503
    assert here.client.get("/metrics").status_code == 200
    assert here.client.get("/api/v1/workers").json() == {"total": 0, "workers": []}


def test_a_daemon_that_says_nothing_is_not_healthy(desk: Desks) -> None:
    here = desk()
    assert here.client.get("/healthz").json() == {"ok": True, "phase": "training", "heard_s": 0.0}
    here.now_s += 60
    answer = here.client.get("/healthz")
    assert (answer.status_code, answer.json()["ok"], answer.json()["heard_s"]) == (503, False, 60.0)


def test_orders_reach_the_daemon_with_the_token(desk: Desks) -> None:
    here = desk()
    told = document(here)
    peer = here.board.workers()[1]["peer"]
    where = f"/api/v1/workers/{peer}"
    answer = here.client.post(f"{where}/kick", headers=here.owner, json={"reason": "too\nslow"})
    assert holds(answer, told, "/api/v1/workers/{key}/kick", "post") == {"done": "it is out"}
    here.client.post(f"{where}/ban", headers=here.owner)
    here.client.post(f"{where}/unban", headers=here.owner)
    key = bytes.fromhex(peer)
    assert here.orders == [RemoveWorker(key, False, "too�slow"), RemoveWorker(key, True, ""), Unban(key)]


def test_what_the_daemon_refuses_and_what_it_does_not_answer(
    desk: Desks, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = desk()
    told = document(here)
    where, path = f"/api/v1/workers/{here.board.workers()[1]['peer']}/kick", "/api/v1/workers/{key}/kick"
    here.reply = Refused("unknown", "it is no member", "look at the list")
    refused = here.client.post(where, headers=here.owner)
    assert refused.status_code == 409 and holds(refused, told, path, "post")["code"] == "unknown"
    here.reply = None
    monkeypatch.setattr("gridtrain_coordinator.dashboard.http_api.ORDER_S", 0.05)
    silent = here.client.post(where, headers=here.owner)
    assert silent.status_code == 504 and holds(silent, told, path, "post")["code"] == "no-answer"


def test_addresses_are_shown_with_the_token_only(desk: Desks) -> None:
    here = desk()
    where = f"/api/v1/workers/{here.board.workers()[0]['peer']}"
    assert here.client.get(where, headers=here.owner).json()["address"] == "tcp://192.0.2.1:7701"
    for path in (where, "/api/v1/workers", "/api/v1/events", "/metrics"):
        assert "192.0.2.1" not in here.client.get(path).text, path


def test_metrics_can_be_read_by_prometheus(desk: Desks) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    here = desk(4, 130)
    families = {each.name: each for each in text_string_to_metric_families(here.client.get("/metrics").text)}
    assert families["gridtrain_step"].samples[0].value == here.board.run["step"]
    assert families["gridtrain_world_size"].samples[0].value == 4
    assert families["gridtrain_worker_missed_steps"].type == "counter"
    assert {s.labels["event"]: s.value for s in families["gridtrain_events"].samples}["lost"] == 1
    names = {sample.labels["worker"] for sample in families["gridtrain_worker_step"].samples}
    assert names == {row["name"] for row in here.board.workers()}  # the hostile one too, escaped
    phases = {s.labels["phase"]: s.value for s in families["gridtrain_phase"].samples}
    assert phases == {"waiting": 0, "training": 1, "paused": 0, "finished": 0}


def test_the_grafana_dashboard_asks_for_metrics_that_there_are(desk: Desks) -> None:
    import json
    from importlib.resources import files

    text = (files("gridtrain_coordinator") / "dashboard" / "grafana.json").read_text()
    asked = set(re.findall(r"\bgridtrain_[a-z_]+", json.dumps(json.loads(text)["panels"])))
    served = set(re.findall(r"^(gridtrain_[a-z_]+)", desk(4, 130).client.get("/metrics").text, re.MULTILINE))
    assert len(asked) >= 8 and asked <= served, asked - served
