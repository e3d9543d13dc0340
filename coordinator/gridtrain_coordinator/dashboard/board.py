"""The content of the web page: figures (loss, rates), rows of workers, and a limited number of events.

    update(status)   --> rows, run, topology, history --> full_state()    everything, for a page that opens
    add_event(event) --> events                       --> take_changes()  the changes since the last call

The board uses no clock, socket or thread.  Everything that workers report is sanitized.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gridtrain.core.planning.exchange_facts import workload_of
from gridtrain.event_text import event_text
from gridtrain.quantities import format_worker_state
from gridtrain_coordinator.dashboard import sanitize
from gridtrain_coordinator.dashboard.history import COLUMNS as POINT
from gridtrain_coordinator.dashboard.history import History, Point, shortened
from gridtrain_coordinator.dashboard.topology_graph import build_graph

MAX_EVENTS = 600
MAX_EVENTS_A_TICK = 60
MAX_DEPARTED = 50
DEPARTED_RETENTION_S = 600.0
"""How long workers that have left remain in the table of an unfinished run, with the reason for leaving."""

_FIGURES = "loss", "computing_s", "selecting_s", "communicating_s", "waiting_s", "applying_s"
_RATES = "sent_Bps", "received_Bps"
_COUNTERS = "sent_bytes", "received_bytes", "missed_steps"
_STATE = "state", "rank", "share", "step", "strikes", "heard_s", "stage"
LIVE_COLUMNS = (*_STATE, *_FIGURES, *_RATES, *_COUNTERS)
_OWN_FIGURES = {*LIVE_COLUMNS, "computed_samples", "computed_s", "exchanged_bytes"}

_RUN_COUNTS = "term", "generation", "step", "world_size", "skipped_samples", "skipped_in_a_row", "drifts"
_RUN_NUMBERS = "total_steps", "samples", "total_samples", "epochs"
_RUN_CURVES = "steps_per_s", "samples_per_s", "sent_Bps", "loss"  # of `Point`

FAULTS = {
    "lost", "stalled", "drifted", "rollback", "violation", "refused", "no_route", "no_room", "backup_failed",
    "recalled", "restored", "superseded", "not_following", "source_replaced", "loop_stalled",
    "dashboard_failed", "step_skipped", "step_missed", "lone_mean", "checkpoint_failed", "upload_failed",
    "model_not_written", "not_learning", "journal_missing",
}  # fmt: skip
CHANGES = {
    "generation", "training", "paused", "waiting", "finished", "started", "freeze", "room_again",
    "learning_again",
}  # fmt: skip
ARRIVAL_EVENTS = {
    "joined", "left", "removed", "caught_up", "following", "enrolled", "readmitted", "worker_finished",
    "checkpoint_written", "checkpoint_uploaded",
}  # fmt: skip
DEPARTURE_EVENTS = "lost", "left", "removed", "refused"
"""The events after which a worker is no longer registered; the event's name becomes the worker's state."""

EVENT_FIELDS = 12
PAUSED_STATE = "paused"
"""The state of a worker that its owner has paused."""

STATE_REASONS = {
    "joining": "its links are being measured",
    "catching up": "is receiving the state while the others train",
    "admitted": "will enter the next generation",
}


def event_kind(event: str) -> str:
    """Return the kind of an event on the timeline."""
    if event in FAULTS:
        return "fault"
    return "change" if event in CHANGES else "worker" if event in ARRIVAL_EVENTS else "other"


@dataclass(slots=True)
class WorkerRow:
    """One worker's row in the table.

    Attributes:
        id: a short number, which is never reused.
        description: the values that rarely change.
        live: the values of `LIVE_COLUMNS`, in this order.
    """

    id: int
    description: dict[str, Any]
    live: dict[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    address: str = ""
    departed_s: float | None = None  # wall clock
    finished_step: float | None = None  # its last step, which no heartbeat reports if it leaves at once


class Board:
    """The data that the pages show."""

    def __init__(self) -> None:
        self.history = History()
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        # By name, from 0: Prometheus does not count the increase from no value to the first one.
        self.event_counts = Counter(dict.fromkeys(FAULTS | CHANGES, 0))
        self.run: dict[str, Any] = {}
        self.topology: dict[str, Any] = {"kind": "ring", "size": 0, "stages": 1, "edges": []}
        self.access: dict[str, Any] = {}
        self.exchanged_bytes = 0.0
        self.dense_bytes = 0.0
        self._rows: dict[str, WorkerRow] = {}
        self._next_id = 0
        self._next_event = 1
        self._exchanged_bytes_of: dict[str, float] = {}  # latest counter by worker
        self._step: int | None = None
        self._staged = False
        self._last_sent: tuple[dict[str, Any], dict[str, Any], int, Point | None] = ({}, {}, 0, None)
        self._last_sent_rows: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    # -- input ---------------------------------------------------------------------------------

    def add_event(self, at_s: float, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """Add an event from the coordinator's log."""
        name = sanitize.text(event, 40)
        some = list(fields.items())[:EVENT_FIELDS]
        shown = {key: value for key, value in some if key not in ("address", "tried")}
        self.event_counts[name] += 1
        safe = sanitize.tree(shown)
        self.events.append(
            {
                "id": self._next_event,
                "at_s": round(at_s, 3),
                "level": sanitize.text(level, 10),
                "event": name,
                "kind": event_kind(name),
                "fields": safe,
                "text": sanitize.text(event_text({**safe, "event": name})),
            }
        )
        self._next_event += 1
        who = sanitize.text(fields.get("name", ""), 64)
        if name in (*DEPARTURE_EVENTS, "stalled", "no_route") and who:
            self._explain(who, name, sanitize.text(fields.get("reason", name)))
        if name == "worker_finished":
            for row in self._present():
                if row.description["name"] == who:
                    row.finished_step = sanitize.number(fields.get("step"))

    def _explain(self, name: str, event: str, reason: str) -> None:
        for row in self._rows.values():
            if row.description["name"] == name and row.departed_s is None:
                row.description = {**row.description, "reason": reason}
                if event in DEPARTURE_EVENTS:
                    row.description["ended"] = event

    def update(self, status: Mapping[str, Any], at_s: float) -> None:
        """Replace the content with that of the coordinator's latest status.

        Args:
            at_s: the wall-clock time of the status, in seconds.
        """
        self.access = sanitize.tree(status.get("door", {}), 6)
        facts = {sanitize.text(k, 64): sanitize.text(v) for k, v in status.get("facts", {}).items()}
        run_load = workload_of(facts)
        members = [entry for entry in status["members"] if isinstance(entry, Mapping)]
        self._count_bytes(members, int(status["step"]), status, run_load)
        self._staged = int(status.get("stages", 1)) > 1
        is_finished = status["phase"] == "finished"
        self._update_rows([*members, *_paused_rows(status)], at_s, is_finished)
        slow = self._waited_for(status)
        ids = {row.live["rank"]: row.id for row in self._active()}
        graph = build_graph(status if ids else {**status, "world_size": 0}, run_load)
        self.topology = {
            **graph,
            "ids": [ids.get(rank) for rank in range(graph["size"])],
            "waited_for": slow["id"] if slow else None,
        }
        share = self._share()
        steps_per_s = sanitize.number(status.get("steps_per_s"))
        sent_Bps = [x for row in self._present() if (x := row.live["sent_Bps"]) is not None]
        point = Point(
            at_s=round(at_s, 2),
            step=int(status["step"]),
            bytes=round(self.exchanged_bytes),
            dense_bytes=round(self.dense_bytes),
            loss=sanitize.number(status.get("loss")),
            steps_per_s=steps_per_s,
            samples_per_s=steps_per_s * share if steps_per_s is not None else None,
            sent_Bps=sum(sent_Bps) if sent_Bps else None,
        )
        if not (is_finished and self.run.get("phase") == "finished"):  # the curves end with the run
            self.history.add(point)
        self.run = self._run(status, facts, point, slow)

    def _run(
        self, status: Mapping[str, Any], facts: dict[str, str], point: Point, slow: dict[str, Any] | None
    ) -> dict[str, Any]:
        states = Counter(row.live["state"] for row in self._present())
        return {
            "run": sanitize.text(status["run"], 64),
            "phase": sanitize.text(status["phase"], 20),
            "reason": sanitize.text(status["reason"]),
            "alert": sanitize.text(status.get("alert", "")),
            **{name: int(status.get(name, 0)) for name in _RUN_COUNTS},
            **{name: sanitize.number(status.get(name)) for name in _RUN_NUMBERS},
            "remaining_s": shortened(sanitize.number(status.get("remaining_s"))),
            "workers": dict(sorted(states.items())),
            **{name: shortened(getattr(point, name)) for name in _RUN_CURVES},
            "exchanged_bytes": round(self.exchanged_bytes),
            "dense_bytes": round(self.dense_bytes),
            "plan_reason": _plan_text(status),
            "facts": facts,
            "software": sanitize.text(status.get("software", ""), 64),
            "uptime_s": round(float(status.get("uptime_s", 0.0))),
            "now_s": point.at_s,
            "waited_for": slow,
            "backup": sanitize.tree(status["backup"]) if "backup" in status else None,
        }

    def _update_rows(self, members: list[Mapping[str, Any]], at_s: float, is_finished: bool) -> None:
        present = set()
        for member in members:
            peer = sanitize.text(member["peer"], 64)
            present.add(peer)
            row = self._rows.get(peer)
            if row is None:
                row = self._rows[peer] = WorkerRow(self._next_id, {}, {})
                self._next_id += 1
            self._fill(row, peer, member)
        for peer, row in list(self._rows.items()):
            if peer not in present and row.departed_s is None:
                row.departed_s = at_s
                ended = {"state": row.description.pop("ended", "gone"), "rank": None, "heard_s": None}
                row.live = {**row.live, **ended, "sent_Bps": None, "received_Bps": None}
                if row.finished_step is not None:
                    row.live["step"] = row.finished_step
                row.description = {
                    **row.description,
                    "departed_s": round(at_s, 2),
                    "reason": row.description.get("reason") or "it is no longer registered",
                }
        departed = {peer: row.departed_s for peer, row in self._rows.items() if row.departed_s is not None}
        # Once the run is finished, all workers that took part remain listed.
        retention_s = math.inf if is_finished else DEPARTED_RETENTION_S
        expired = {peer for peer, since_s in departed.items() if at_s - since_s > retention_s}
        for peer in expired | set([*departed][: max(0, len(departed) - MAX_DEPARTED)]):
            del self._rows[peer]

    def _fill(self, row: WorkerRow, peer: str, member: Mapping[str, Any]) -> None:
        figures = member.get("figures", {})
        state = format_worker_state(sanitize.text(member["state"], 20))
        about = {
            sanitize.text(k, 32): sanitize.text(v, 120) for k, v in dict(member.get("about", {})).items()
        }
        if state == PAUSED_STATE:
            about = row.description.get("about", {})  # a paused worker reports nothing
        if row.departed_s is not None:
            row.departed_s, row.finished_step, row.description = None, None, {}
        heard_s = sanitize.number(member.get("last_heard_s")) or 0.0
        reason = member.get("reason") or member.get("spare") or STATE_REASONS.get(state, "")
        if state == "suspect":
            reason = row.description.get("reason") or "its connection broke; it may come back"
        row.description = {
            "id": row.id,
            "peer": peer,
            "name": sanitize.text(member["name"], 64),
            "reach": sanitize.text(member.get("reach") or "", 20),
            "device": about.get("device", ""),
            "about": about,
            "reason": sanitize.text(reason),
        }
        row.address = sanitize.text(member.get("address", ""), 120)
        row.figures = {
            sanitize.text(name, 64): value
            for name, reported in list(figures.items())[: sanitize.MAX_ITEMS]
            if name not in _OWN_FIGURES and (value := sanitize.number(reported)) is not None
        }
        row.live = {
            "state": state,
            "rank": member.get("rank"),
            "share": member.get("share"),
            "step": member.get("step"),
            "strikes": member.get("strikes", 0),
            # Constant while heartbeats arrive every second as usual.
            "heard_s": round(heard_s) if heard_s >= 2 else 0,
            "stage": member.get("stage") if self._staged else None,
            **{name: _brief(sanitize.number(figures.get(name))) for name in _FIGURES},
            **{name: _brief(sanitize.number(member.get(name)), 3) for name in _RATES},
            **{name: sanitize.number(figures.get(name)) for name in _COUNTERS},
        }

    def _count_bytes(
        self, members: list[Mapping[str, Any]], step: int, status: Mapping[str, Any], run_load: Any
    ) -> None:
        """Count the bytes sent in exchanges, and the bytes that a dense float32 ring would have sent."""
        for member in members:
            reported = member.get("figures", {})
            sent = sanitize.number(reported.get("exchanged_bytes", reported.get("sent_bytes")))
            if sent is not None:
                before = self._exchanged_bytes_of.get(member["peer"], sent)  # excludes earlier bytes
                self.exchanged_bytes += sent - before if sent >= before else sent
                self._exchanged_bytes_of[member["peer"]] = sent
        here = {member["peer"] for member in members}
        self._exchanged_bytes_of = {
            peer: sent for peer, sent in self._exchanged_bytes_of.items() if peer in here
        }
        said = any(member.get("figures") for member in members)
        if self._step is not None and step > self._step and run_load is not None and status["world_size"] > 1:
            ring_bytes = 2 * (status["world_size"] - 1) * 4.0 * run_load.parameters
            self.dense_bytes += (step - self._step) * ring_bytes
        self._step = step if said else None

    # -- derived values ------------------------------------------------------------------------

    def _present(self) -> list[WorkerRow]:
        return [row for row in self._rows.values() if row.departed_s is None]

    def _active(self) -> list[WorkerRow]:
        """Return the members in rank order."""
        members = (row for row in self._present() if row.live["rank"] is not None)
        return sorted(members, key=lambda row: row.live["rank"])

    def _share(self) -> int:
        return sum(row.live["share"] or 0 for row in self._active())

    def _waited_for(self, status: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row id of the member for which the others wait, and the reason; or None."""
        slow = status.get("waited_for") or {}
        row = self._rows.get(sanitize.text(slow.get("peer", ""), 64))
        return {"id": row.id, "reason": sanitize.text(slow["reason"])} if row is not None else None

    # -- output --------------------------------------------------------------------------------

    def workers(self) -> list[dict[str, Any]]:
        """Return one object per worker for the JSON API: the members in rank order, then the others."""
        others = [row for row in self._rows.values() if row.live["rank"] is None]
        rows = [*self._active(), *sorted(others, key=lambda row: row.id)]
        return [row.description | row.live | {"figures": row.figures} for row in rows]

    def address(self, peer: str) -> str:
        row = self._rows.get(peer)
        return row.address if row is not None else ""

    def full_state(self) -> dict[str, Any]:
        """Return everything that a page needs when it opens."""
        return {
            "run": self.run,
            "columns": LIVE_COLUMNS,
            "who": [row.description for row in self._rows.values()],
            "rows": [[row.id, *row.live.values()] for row in self._rows.values()],
            "shape": self.topology,
            "point": POINT,
            "recent": [point.row() for point in self.history.recent],
            "whole": [point.row() for point in self.history.all_points()],
            "stride": self.history.stride,
            "events": list(self.events),
        }

    def take_changes(self) -> dict[str, Any]:
        """Return the changes since the last call, including the latest point of the curves."""
        last_run, last_topology, last_event, last_point = self._last_sent
        point = self.history.recent[-1] if self.history.recent else None
        last_rows = self._last_sent_rows
        rows = {row.id: (row.description, row.live) for row in self._rows.values()}
        events = [event for event in self.events if event["id"] > last_event]
        changes: dict[str, Any] = {
            "run": {name: value for name, value in self.run.items() if last_run.get(name) != value},
            "points": [point.row()] if point is not None and point is not last_point else [],
            "shape": self.topology if self.topology != last_topology else None,
            "events": events[-MAX_EVENTS_A_TICK:],
            "who": [who for at, (who, _) in rows.items() if at not in last_rows or last_rows[at][0] != who],
            "rows": [
                [at, *live.values()]
                for at, (_, live) in rows.items()
                if at not in last_rows or last_rows[at][1] != live
            ],
            "gone": [at for at in last_rows if at not in rows],
        }
        self._last_sent = self.run, self.topology, self._next_event - 1, point
        self._last_sent_rows = rows
        return {name: value for name, value in changes.items() if value}


def _paused_rows(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the paused workers as rows without a rank."""
    reported = [entry for entry in status.get("resting", ()) if isinstance(entry, Mapping)]
    return [{**entry, "state": PAUSED_STATE, "last_heard_s": entry.get("since_s")} for entry in reported]


def _brief(value: float | None, digits: int = 4) -> float | None:
    """Round a value to the precision that the table shows, to send fewer bytes."""
    if value is None or value == 0:
        return value
    return float(f"{value:.{digits}g}")


def _plan_text(status: Mapping[str, Any]) -> str:
    """Return the reasons for the rank order and, if the coordinator chose it, for the exchange."""
    why = (status.get("exchange_reason"), status.get("plan_reason"))
    return sanitize.text("; ".join(str(entry) for entry in why if entry), 2 * sanitize.MAX_CHARACTERS)
