"""The board after a run's status updates: curves, bytes, topology, departed workers, changes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from dashboard_demo.simulated_run import Run

from gridtrain_coordinator.dashboard.board import DEPARTED_RETENTION_S, LIVE_COLUMNS, Board
from gridtrain_coordinator.dashboard.history import RECENT_POINTS, WHOLE_POINTS, History, Point
from gridtrain_coordinator.dashboard.prometheus import exposition
from gridtrain_coordinator.dashboard.topology_graph import build_graph
from gridtrain_coordinator.status_report import RateMeter, build_status


def status(step: int = 0, members: tuple[dict[str, Any], ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "run": "r", "phase": "training", "reason": "", "term": 1, "generation": 1, "step": step,
        "world_size": sum(member["rank"] is not None for member in members), "members": list(members), **more,
    }  # fmt: skip


def member(name: str, rank: int | None = 0, **figures: float) -> dict[str, Any]:
    return {
        "name": name, "peer": name.encode().hex().ljust(64, "0"), "rank": rank, "state": "active", "share": 8,
        "step": 0, "figures": figures, "last_heard_s": 0.1,
    }  # fmt: skip


FACTS = {"model": "1000 parameters", "exchange": "GTopK(density=0.01, values=fp16)"}


def test_bytes_saved_against_a_dense_ring() -> None:
    """3 workers, 10 steps of 1000 float32: a dense ring sends 10 x 2 x 2 x 4000 bytes in all."""
    board = Board()
    for step, sent in ((100, 5000.0), (110, 7000.0)):  # what precedes the first status does not count
        members = [member(name, rank, exchanged_bytes=sent) for rank, name in enumerate(("a", "b", "c"))]
        board.update(status(step, tuple(members), facts=FACTS), float(step))
    assert (board.exchanged_bytes, board.dense_bytes) == (3 * 2000.0, 10 * 2 * 2 * 4000.0)
    board.update(status(105, tuple(members), facts=FACTS), 111.0)  # a rollback is no negative saving
    assert board.dense_bytes == 160_000.0


def test_a_restarted_worker_counts_from_zero() -> None:
    board = Board()
    for at_s, sent in enumerate((1000.0, 4000.0, 500.0)):
        board.update(status(0, (member("a", exchanged_bytes=sent),)), float(at_s))
    assert board.exchanged_bytes == 3000.0 + 500.0


def test_states_have_the_names_of_the_glossary_and_a_reason() -> None:
    board = Board()
    standby = member("bert", None) | {"state": "spare", "spare": "every stage has a worker"}
    board.update(status(1, (member("anna", None) | {"state": "following"}, standby)), 0.0)
    assert [(row["state"], row["reason"]) for row in board.workers()] == [
        ("catching up", "is receiving the state while the others train"),
        ("standby", "every stage has a worker"),
    ]


def test_figures_that_are_not_finite_are_dropped() -> None:
    board = Board()
    strange = member("a", loss=float("nan"), computing_s=float("inf"))
    board.update(status(1, (strange,), loss=float("nan")), 0.0)
    row = board.workers()[0]
    assert (row["loss"], row["computing_s"], board.run["loss"]) == (None, None, None)
    json.dumps(board.full_state(), allow_nan=False)


def test_a_departed_worker_stays_for_a_while_with_the_reason() -> None:
    board = Board()
    board.update(status(1, (member("anna"), member("bert", 1))), 0.0)
    board.add_event(1.0, "warning", "lost", {"name": "bert", "reason": "silent for 10.0 s"})
    board.update(status(2, (member("anna"),)), 2.0)
    gone = board.workers()[1]
    assert (gone["name"], gone["state"], gone["rank"], gone["reason"]) == (
        "bert",
        "lost",
        None,
        "silent for 10.0 s",
    )
    assert board.run["workers"] == {"active": 1}
    board.update(status(3, (member("anna"), member("bert", 1))), 3.0)
    assert [row["state"] for row in board.workers()] == ["active", "active"]
    board.update(status(4, (member("anna"),)), 4.0)
    board.update(status(5, (member("anna"),)), 5.0 + DEPARTED_RETENTION_S)
    assert [row["name"] for row in board.workers()] == ["anna"]


def test_a_departed_worker_has_no_metrics() -> None:
    """bert leaves; then anna, the only member, is kicked."""
    board, reached = Board(), {"reach": "direct"}
    anna, bert = member("anna") | reached, member("bert", 1) | reached
    for step, members in enumerate(((anna, bert), (anna,), ())):
        board.update(status(step, members), step)
        assert exposition(board).count(b"gridtrain_worker_step{") == len(members)
    assert len(board.workers()) == 2, "the table still has both"


def test_a_removed_worker_is_no_fault() -> None:
    board = Board()
    board.update(status(1, (member("anna"), member("bert", 1))), 0.0)
    board.add_event(1.0, "info", "removed", {"name": "bert", "reason": "was removed from the run: slow"})
    board.update(status(2, (member("anna"),)), 2.0)
    row, event = board.workers()[1], board.events[-1]
    assert (row["state"], row["reason"]) == ("removed", "was removed from the run: slow")
    assert (event["kind"], event["text"]) == ("worker", "bert was removed from the run: slow")


def test_a_refused_worker_is_shown_with_the_reason() -> None:
    board = Board()
    board.update(status(1, (member("anna"), member("bert") | {"rank": None, "state": "joining"})), 0.0)
    assert board.workers()[1]["reason"] == "its links are being measured"
    board.add_event(1.0, "warning", "refused", {"name": "bert", "reason": "its data differs"})
    board.update(status(2, (member("anna"),)), 2.0)
    assert (board.workers()[1]["state"], board.workers()[1]["reason"]) == ("refused", "its data differs")
    assert board.events[-1]["text"] == "bert was refused: its data differs"


def ended_run() -> Board:
    """One worker, of which the status has step 29 when it ends its run with step 30 at 2.0 and leaves."""
    board = Board()
    anna = member("anna", loss=2.7) | {"step": 29, "sent_Bps": 5.0, "received_Bps": 5.0}
    board.update(status(29, (anna,), facts=FACTS, steps_per_s=3.0), 1.0)
    board.add_event(1.5, "info", "worker_finished", {"name": "anna", "step": 30})
    board.update(status(30, (anna,), facts=FACTS), 1.6)
    board.add_event(1.7, "info", "left", {"name": "anna", "reason": "its run is finished"})
    board.update(status(30, facts=FACTS) | {"phase": "finished", "world_size": 1}, 2.0)
    return board


def test_a_worker_that_finished_keeps_its_last_step_and_the_time_at_which_it_left() -> None:
    board = ended_run()
    for at_s in (3.0, 3.0 + 2 * DEPARTED_RETENTION_S):  # who took part remains in the table
        board.update(status(30) | {"phase": "finished", "world_size": 1}, at_s)
        anna = board.workers()[0]
        expected = {"state": "left", "step": 30, "departed_s": 2.0, "heard_s": None, "loss": 2.7}
        assert expected.items() <= anna.items()
        assert (anna["sent_Bps"], anna["received_Bps"]) == (None, None)
    board.update(status(30, (member("anna"),)), 9999.0)
    assert "departed_s" not in board.workers()[0] and board.workers()[0]["step"] == 0


def test_the_curves_end_with_the_run() -> None:
    board = ended_run()
    assert [point.at_s for point in board.history.recent] == [1.0, 1.6, 2.0]
    assert board.take_changes()["points"] == [board.history.recent[-1].row()]
    board.update(status(30) | {"phase": "finished"}, 3.0)
    assert [point.at_s for point in board.history.recent] == [1.0, 1.6, 2.0]
    assert "points" not in board.take_changes()


def test_the_topology_shows_members_that_are_not_connected_and_none_after_the_run() -> None:
    board = Board()
    board.update(status(1, (member("anna"), member("cleo", 2)), facts=FACTS) | {"world_size": 3}, 0.0)
    assert (board.topology["size"], board.topology["ids"]) == (3, [0, None, 1])
    assert [edge[:2] for edge in board.topology["edges"]] == [[0, 1], [0, 2]]
    topology = ended_run().topology
    assert (topology["size"], topology["ids"], topology["edges"]) == (0, [], [])


def test_events_have_the_sentences_of_the_status() -> None:
    board = Board()
    board.add_event(
        0.0, "info", "called_back", {"name": "an\u202ena", "reachable": True, "address": "tcp://x"}
    )
    board.add_event(1.0, "info", "left", {"name": "bert", "reason": "its run is finished"})
    assert [event["text"] for event in board.events] == [
        "other workers can connect to an\ufffdna",
        "bert has left: its run is finished",
    ]


def test_a_worker_paused_by_its_owner_stays_while_it_is_paused() -> None:
    board = Board()
    board.update(status(1, (member("anna"), member("bert", 1) | {"about": {"device": "GPU"}})), 0.0)
    resting = {
        "name": "bert",
        "peer": member("bert")["peer"],
        "state": "paused",
        "reason": "paused by its owner: night",
        "since_s": 3.0,
    }
    for at_s in (1.0, 1.0 + 2 * DEPARTED_RETENTION_S):
        board.update(status(2, (member("anna"),), resting=[resting]), at_s)
        paused = board.workers()[1]
        assert [paused[name] for name in ("name", "state", "rank", "device", "reason", "heard_s")] == [
            "bert", "paused", None, "GPU", "paused by its owner: night", 3,
        ]  # fmt: skip
        assert board.run["workers"] == {"active": 1, "paused": 1}
    board.update(status(3, (member("anna"), member("bert", 1))), 9999.0)
    assert [row["state"] for row in board.workers()] == ["active", "active"]


def test_skipped_steps_are_in_the_headline_and_the_metrics() -> None:
    board = Board()
    board.update(status(58, skipped_samples=50, skipped_in_a_row=41, alert="nothing is being learned"), 0.0)
    assert board.run["alert"] == "nothing is being learned"
    lines = exposition(board).decode().splitlines()
    assert {"gridtrain_skipped_samples 50.0", "gridtrain_skipped_in_a_row 41.0"} <= set(lines)


def test_a_stage_is_shown_only_for_a_partitioned_model() -> None:
    for stages, expected in ((1, None), (3, 2)):
        board = Board()
        board.update(status(1, (member("a") | {"stage": 2},), stages=stages), 0.0)
        assert board.workers()[0]["stage"] == expected


def test_the_page_names_the_same_slow_member_as_the_status() -> None:
    """b computes for long, but c applies its updates for longer."""
    members = (
        member("a", 0, computing_s=0.1, waiting_s=0.9),
        member("b", 1, computing_s=0.5, waiting_s=0.5),
        member("c", 2, computing_s=0.1, applying_s=0.9),
    )
    board = Board()
    slow = {"id": 2, "reason": "is busy for 1.00 s per step; the median is 500 ms"}
    for phase, named in (("training", slow), ("paused", None)):
        report = status(
            1, members, stages=1, links=[], global_batch_size=8, total_steps=None, total_samples=None
        ) | {"phase": phase}
        report = build_status(report, RateMeter(), software="", address="", now_s=0.0, uptime_s=0.0)
        board.update(report, 0.0)
        assert board.run["waited_for"] == named
        assert board.topology["waited_for"] == (named and named["id"])
    board.update(status(1, members, waited_for={"peer": "left", "name": "d", "reason": "is busy"}), 0.0)
    assert board.run["waited_for"] is None


def applied(whole: dict[str, Any], tick: dict[str, Any]) -> dict[str, Any]:
    """Applies a tick as the page does."""
    run = whole["run"] | tick.get("run", {})
    who = {each["id"]: each for each in (*whole["who"], *tick.get("who", ()))}
    rows = {each[0]: each for each in (*whole["rows"], *tick.get("rows", ()))}
    for gone in tick.get("gone", ()):
        del who[gone], rows[gone]
    events = [*whole["events"], *tick.get("events", ())]
    shape = tick.get("shape", whole["shape"])
    return {"run": run, "who": who, "rows": rows, "events": events, "shape": shape}


def test_a_page_that_applies_every_tick_equals_a_page_that_opens_now() -> None:
    board = Board()
    run = Run(12)
    page: dict[str, Any] | None = None
    for second, (at_s, report, events) in enumerate(run.statuses(260)):
        for event in events:
            board.add_event(*event)
        if second == 200:
            report["members"] = report["members"][:5]
        board.update(report, at_s)
        tick = board.take_changes()
        if second == 5:
            page = board.full_state()
        elif page is not None:
            new = applied(page, tick)
            page |= new | {"who": list(new["who"].values()), "rows": list(new["rows"].values())}
    assert page is not None
    fresh = board.full_state()
    for name in ("run", "shape"):
        assert page[name] == fresh[name]
    by_id = lambda rows: {json.dumps(row) for row in rows}  # noqa: E731
    assert by_id(page["rows"]) == by_id(fresh["rows"]) and by_id(page["who"]) == by_id(fresh["who"])
    assert [event["id"] for event in page["events"]] == [event["id"] for event in fresh["events"]]


def test_a_tick_contains_only_changes() -> None:
    board = Board()
    for at_s in (0.0, 1.0, 2.0):
        board.update(status(7, (member("a"),), now_s=at_s), at_s)
        tick = board.take_changes()
    assert set(tick) == {"run", "points"} and set(tick["run"]) == {"now_s"}


def test_300_workers_fit_in_a_small_tick() -> None:
    board = Board()
    for at_s, report, _ in Run(300).statuses(4):
        board.update(report, at_s)
        tick = board.take_changes()
    assert len(tick["rows"]) == 300  # all of them have moved on
    assert len(json.dumps(tick, separators=(",", ":"))) < 60_000


def test_events_are_bounded_and_numbered() -> None:
    board = Board()
    for at in range(5000):
        board.add_event(float(at), "warning", "violation", {"peer": "x" * 100_000, "reason": "y"})
    assert len(board.events) == 600 and board.event_counts["violation"] == 5000
    assert board.events[-1]["id"] == 5000 and len(json.dumps(board.events[-1])) < 1000


def test_the_history_of_a_long_run_is_thinned_evenly() -> None:
    history = History()
    for at in range(20_000):
        history.add(Point(float(at), float(at), at * 2.0, at * 9.0, 20_000.0 - at, 1.0, None, None))
    whole = history.all_points()
    assert len(history.recent) == RECENT_POINTS and len(whole) <= WHOLE_POINTS and history.stride == 16
    assert whole[-1].at_s == 19_999 and whole[0].at_s == 15
    assert all(one.at_s < other.at_s for one, other in pairwise(whole))
    for point in whole[:-1]:
        assert point.loss is not None and abs(point.loss - (20_000 - point.at_s)) < 16


def test_edges_are_those_of_the_exchange() -> None:
    def pairs(shape: str, size: int, stages: int = 1) -> list[tuple[int, int]]:
        from gridtrain.core.planning.exchange_facts import workload_of

        _, report, _ = next(Run(size, shape, stages=stages, hostile=False).statuses(1))
        return [tuple(edge[:2]) for edge in build_graph(report, workload_of(report["facts"]))["edges"]]

    assert pairs("ring", 4) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert pairs("butterfly", 4) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert pairs("star", 4) == [(0, 1), (0, 2), (0, 3)]
    assert len(pairs("tree", 8)) == 7
    assert pairs("ring", 6, 3) == [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 5), (4, 5)]
    assert pairs("ring", 41) == []


def test_rows_have_the_live_columns() -> None:
    board = Board()
    board.update(status(1, (member("a", computing_s=0.25, sent_bytes=10.0, missed_steps=7.0),)), 0.0)
    row = dict(zip(LIVE_COLUMNS, board.full_state()["rows"][0][1:], strict=True))
    assert (row["state"], row["rank"], row["computing_s"], row["sent_bytes"]) == ("active", 0, 0.25, 10.0)
    assert row["missed_steps"] == 7.0 and "missed_steps" not in board.workers()[0]["figures"]
