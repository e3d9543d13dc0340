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


def openapi_document(desk: Any) -> dict[str, Any]:
    found: dict[str, Any] = desk.client.get("/api/v1/openapi.json").json()
    return found


def schema_of(
    document: dict[str, Any], path: str, method: str, status: int, kind: str = "application/json"
) -> Any:
    schema = document["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]
    return schema | {"components": document["components"]}


def checked_body(answer: Any, document: dict[str, Any], path: str, method: str = "get") -> Any:
    """The answer's body, checked against the OpenAPI document."""
    body = answer.json()
    validator = jsonschema.Draft202012Validator(schema_of(document, path, method, answer.status_code))
    wrong = [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(body)]
    assert not wrong, f"{path} {answer.status_code}: {wrong}"
    return body


def test_the_openapi_document_is_valid(desk: Desks) -> None:
    document = openapi_document(desk())
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name
    named = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert named <= set(document["components"]["schemas"])


def test_the_documented_paths_are_those_that_are_served(desk: Desks) -> None:
    here = desk()
    routes = here.client.app._app.routes
    served = {
        (route.path, method.lower()) for route in routes for method in route.methods - {"HEAD"}
        if route.path.startswith(("/api", "/healthz", "/metrics"))
    }  # fmt: skip
    documented = {(path, method) for path, all_ in openapi_document(here)["paths"].items() for method in all_}
    assert served - {("/api/v1/openapi.json", "get")} == documented


@pytest.mark.parametrize("workers", [1, 4, 40, 300])
def test_answers_are_as_documented(desk: Desks, workers: int) -> None:
    here = desk(workers, 20)
    document = openapi_document(here)
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
        checked_body(answer, document, path)
    first = here.client.get("/api/v1/workers").json()["workers"][0]
    checked_body(here.client.get(f"/api/v1/workers/{first['peer']}"), document, "/api/v1/workers/{key}")


def test_workers_are_paged_and_filtered(desk: Desks) -> None:
    here = desk(40, 5)
    page = here.client.get("/api/v1/workers?offset=10&limit=5&state=active").json()
    assert [row["rank"] for row in page["workers"]] == [10, 11, 12, 13, 14]
    assert page["total"] == sum(row["state"] == "active" for row in here.board.workers())
    assert here.client.get("/api/v1/workers?state=nobody").json() == {"total": 0, "workers": []}


def test_events_after_an_id_are_returned(desk: Desks) -> None:
    here = desk(4, 130)  # a worker is lost at second 97 and comes back
    every = here.client.get("/api/v1/events").json()["events"]
    assert [event["event"] for event in every].count("lost") == 1
    later = here.client.get(f"/api/v1/events?after={every[-3]['id']}").json()["events"]
    assert later == every[-2:]


def test_refusals_are_as_documented(desk: Desks) -> None:
    here = desk()
    document = openapi_document(here)
    key = "/api/v1/workers/{key}"
    assert "64 hexadecimal" in checked_body(here.client.get("/api/v1/workers/anna"), document, key)["reason"]
    assert checked_body(here.client.get(f"/api/v1/workers/{'0' * 64}"), document, key)["code"] == "unknown"
    limit = checked_body(here.client.get("/api/v1/workers?limit=-1"), document, "/api/v1/workers")
    assert limit["reason"] == "limit must be an integer >= 0, of at most 15 digits"
    window = checked_body(here.client.get("/api/v1/history?window=foo"), document, "/api/v1/history")
    assert window["reason"] == "window must be recent or whole"
    assert here.client.get("/api/v1/nothing").json()["code"] == "unknown"
    assert here.client.post("/api/v1/run").json()["code"] == "method"


def test_refusals_of_every_address_are_documented(desk: Desks) -> None:
    here = desk()
    document = openapi_document(here)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            address, responses = path.replace("{key}", "0" * 64), operation["responses"]
            for status, headers in ((421, {"host": "elsewhere.example"}), (413, {"content-length": "5000"})):
                answer = here.client.request(method, address, headers=headers)
                assert answer.status_code == status and str(status) in responses, f"{method} {path}"
            assert "503" in responses or path == "/metrics"
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for name, response in document["components"]["responses"].items():
        assert response["content"] == {"application/json": problem}, name
    named = set(re.findall(r"#/components/responses/(\w+)", str(document)))
    assert named == set(document["components"]["responses"])


def test_answers_before_the_first_status(desk: Desks) -> None:
    here = desk(4, 0)
    document = openapi_document(here)
    assert checked_body(here.client.get("/api/v1/run"), document, "/api/v1/run")["code"] == "starting"
    assert here.client.get("/healthz").status_code == 503
    assert here.client.get("/metrics").status_code == 200
    assert here.client.get("/api/v1/workers").json() == {"total": 0, "workers": []}


def test_a_daemon_that_publishes_nothing_is_unhealthy(desk: Desks) -> None:
    here = desk()
    assert here.client.get("/healthz").json() == {"ok": True, "phase": "training", "heard_s": 0.0}
    here.age_s = 60.0
    answer = here.client.get("/healthz")
    assert (answer.status_code, answer.json()["ok"], answer.json()["heard_s"]) == (503, False, 60.0)


def test_commands_with_the_token_reach_the_daemon(desk: Desks) -> None:
    here = desk()
    document = openapi_document(here)
    peer = here.board.workers()[1]["peer"]
    where = f"/api/v1/workers/{peer}"
    answer = here.client.post(f"{where}/kick", headers=here.owner, json={"reason": "too\nslow"})
    assert checked_body(answer, document, "/api/v1/workers/{key}/kick", "post") == {"done": "it is out"}
    here.client.post(f"{where}/ban", headers=here.owner)
    here.client.post(f"{where}/unban", headers=here.owner)
    key = bytes.fromhex(peer)
    assert here.orders == [RemoveWorker(key, False, "too slow"), RemoveWorker(key, True, ""), Unban(key)]


def test_a_refused_command_is_409_and_an_unanswered_one_504(
    desk: Desks, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = desk()
    document = openapi_document(here)
    where, path = f"/api/v1/workers/{here.board.workers()[1]['peer']}/kick", "/api/v1/workers/{key}/kick"
    here.reply = Refused("unknown", "it is no member", "look at the list")
    refused = here.client.post(where, headers=here.owner)
    assert refused.status_code == 409 and checked_body(refused, document, path, "post")["code"] == "unknown"
    here.reply = None
    monkeypatch.setattr("gridtrain_coordinator.dashboard.http_api.ORDER_S", 0.05)
    unanswered = here.client.post(where, headers=here.owner)
    assert (
        unanswered.status_code == 504
        and checked_body(unanswered, document, path, "post")["code"] == "no-answer"
    )


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
    missed = families["gridtrain_worker_missed_steps"]
    assert missed.type == "counter" and {sample.value for sample in missed.samples} == {0.0}
    assert len(missed.samples) == len(families["gridtrain_worker_sent_bytes"].samples) > 0
    events = {s.labels["event"]: s.value for s in families["gridtrain_events"].samples}
    assert events["lost"] == 1 and events["no_room"] == 0  # `increase()` needs a value before the first event
    names = {sample.labels["worker"] for sample in families["gridtrain_worker_step"].samples}
    assert names == {row["name"] for row in here.board.workers()}  # the hostile one too, escaped
    phases = {s.labels["phase"]: s.value for s in families["gridtrain_phase"].samples}
    assert phases == {"waiting": 0, "training": 1, "paused": 0, "finished": 0}


def test_the_grafana_dashboard_queries_served_metrics(desk: Desks) -> None:
    import json
    from importlib.resources import files

    text = (files("gridtrain_coordinator") / "dashboard" / "grafana.json").read_text()
    queried = set(re.findall(r"\bgridtrain_[a-z_]+", json.dumps(json.loads(text)["panels"])))
    served = set(re.findall(r"^(gridtrain_[a-z_]+)", desk(4, 130).client.get("/metrics").text, re.MULTILINE))
    assert len(queried) >= 8 and queried <= served, queried - served
