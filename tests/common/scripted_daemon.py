"""A core and a transport that tests script, for the loop of the coordinator's daemon."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gridtrain.core import messages as m
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Frames, TransportEvent
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler
from gridtrain_coordinator.run.events import Effect, Event, JournalEntry

COORDINATOR, OPERATOR, ANNA, BERT, INVITATION = (letter * 32 for letter in (b"c", b"o", b"a", b"b", b"i"))
PENDING = b"g" * 32
NAMES = {
    COORDINATOR: "coordinator",
    OPERATOR: "operator",
    ANNA: "anna",
    BERT: "bert",
    PENDING: "the pending member",
}
JOIN = m.Join("default", "anna", "memory://anna")


class FakeCore:
    """Returns the effects that a test specifies for each type of event."""

    def __init__(self, answers: Mapping[type[Event], list[Effect]] | None = None) -> None:
        self.answers = dict(answers or {})
        self.received: list[Event] = []
        self.received_s: list[float] = []
        self.deadline_s = math.inf
        self.is_model_pending = False
        self.fixed_status: dict[str, Any] = {
            "phase": "waiting", "reason": "", "step": 0, "finished": False, "members": [], "events": [],
            "links": [], "stages": 1, "global_batch_size": None, "total_steps": None, "total_samples": None,
        }  # fmt: skip
        self.at_start: list[Effect] = []
        self.at_tick: list[Effect] = []
        self.at_end: list[JournalEntry] = []
        self.after_end: list[Effect] = []
        self.ends = 0

    def start(self, now_s: float) -> list[Effect]:
        return self.at_start

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        self.received.append(event)
        self.received_s.append(now_s)
        return self.answers.get(type(event), [])

    def tick(self, now_s: float) -> list[Effect]:
        self.deadline_s = math.inf
        return self.at_tick

    def introduce_pending_member(self, pending: m.PeerId, most: int) -> tuple[list[Effect], tuple[()]]:
        return [], ()

    def ending_entries(self) -> list[JournalEntry]:
        return self.at_end

    def end_run(self, now_s: float) -> tuple[list[Effect], m.OperatorReply | m.Refused]:
        self.ends += 1
        return [*self.at_end, *self.after_end], m.OperatorReply("the run ends")

    def status(self, now_s: float) -> dict[str, Any]:
        return copy.deepcopy(self.fixed_status)

    def worker_name(self, peer: m.PeerId) -> str:
        return peer[:4].decode()


class ScriptedTransport:
    """Returns prepared events, one list for each poll, and records what is sent."""

    me = COORDINATOR

    def __init__(self, transcript: list[str], iterations: Iterable[list[TransportEvent]]) -> None:
        self.transcript = transcript
        self.iterations = list(iterations)
        self.refuses: set[m.PeerId] = set()
        self.waits_s: list[float] = []
        self.sent: list[m.Message] = []
        self.frames: list[Frames | None] = []

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        self.waits_s.append(timeout_s)
        return self.iterations.pop(0) if self.iterations else []

    def send(self, peer: m.PeerId, message: m.Message, frames: Frames | None = None) -> None:
        if peer in self.refuses:
            raise TransportError(f"the queue of {NAMES[peer]} is full")
        self.transcript.append(f"send {self.name_of(message)} to {NAMES[peer]}")
        self.sent.append(message)
        self.frames.append(frames)

    def name_of(self, message: m.Message) -> str:
        return type(message).__name__

    def reach(self, peer: m.PeerId, addresses: Iterable[str], timeout_s: float) -> None:
        self.transcript.append(f"call {NAMES[peer]} back at {', '.join(addresses)} for {timeout_s:g} s")

    def hang_up(self, peer: m.PeerId) -> None:
        self.transcript.append(f"hang up on {NAMES[peer]}")

    def close(self) -> None:
        self.transcript.append("close transport")


class Iterations:
    """A stop flag that is set after a number of iterations."""

    def __init__(self, count: int) -> None:
        self.left = count

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def access_handler(core: FakeCore, *members: m.PeerId, uses: int = 2) -> AccessHandler:
    """Access control with an invitation, which these members have used."""
    access = Authorization(open_to_all=True, operator=OPERATOR, coordinator=COORDINATOR)
    access.invite(INVITATION, uses, 600.0, 0.0)
    for member in members:
        access.enrol(INVITATION, member, "", 0.0)
    return AccessHandler(access, core, lambda: 100.0)
