"""Fault injection into a worker of a real run: at one step, before, during or after it sends.

    faults = Faults()                                   before   nothing of the step was sent
    faults.kill_at("anna", step=10, point="during")     during   its first Data was sent
    faults.slow_at(2, step=12, seconds=0.5)             after    all of its Data were sent; its Vote, or
                                                                 as rank 0 its Decision, was not

    loop --> FlowControlTransport --> FaultyTransport --> direct or relayed connections
                                        |  learns its rank from MemberListPage, the step from each message

Threads use the object itself (`LocalGroup(faults=...)`), processes its text in GRIDTRAIN_FAULTS, which
`gridtrain.join` reads.  Each fault happens once; given as "@FILE", once over all restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, get_args

from gridtrain.core.messages import CollectivePhase, Data, Decision, MemberListPage, Message, PeerId, Vote
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.network.transport.interface import PeerDown, Received, Transport, TransportEvent

Action = Literal["fail", "kill", "freeze", "slow", "corrupt"]
Point = Literal["before", "during", "after"]
Target = int | str

RETRY_S = 0.02
MOST_FAULTS = 10_000
MAX_TEXT = 4 << 20
PARTIAL_SUM_PHASES = frozenset({CollectivePhase.REDUCE, CollectivePhase.FOLD, CollectivePhase.ACTIVATION})


class InjectedFailure(GridtrainError):
    """The error with which `fail_at` ends the training script."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault.

    Attributes:
        who: a rank in the generation of the step, or a worker's name.
        seconds: duration of a freeze, or delay of each Data of a slow step.
    """

    action: Action
    who: Target
    step: int
    point: Point = "before"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        known = self.action in get_args(Action) and self.point in get_args(Point)
        named = isinstance(self.who, str | int) and not isinstance(self.who, bool)
        numbers = isinstance(self.step, int) and isinstance(self.seconds, int | float)
        if not (known and named and numbers and self.step >= 0 and 0.0 <= self.seconds < float("inf")):
            raise ConfigError(
                f"{asdict(self)!r} is not a fault: the step must be >= 0, the seconds >= 0",
                remedy=f"actions are {', '.join(get_args(Action))}, points {', '.join(get_args(Point))}",
            )
        if (self.action in ("freeze", "slow")) != (self.seconds > 0):
            raise ConfigError(
                f"{self.action} with seconds={self.seconds}", remedy="freeze and slow take > 0, others none"
            )


class Faults:
    """A plan of faults, and those that have happened.  Thread-safe.

    Attributes:
        fired: the faults that have happened, in order, each with the name of the worker.
    """

    def __init__(self, *planned: PlannedFault, marks: Path | None = None) -> None:
        self.fired: list[tuple[PlannedFault, str]] = []
        self._planned = list(planned)
        self._marks = marks
        self._lock = threading.Lock()

    def fail_at(self, who: Target, step: int, point: Point = "before") -> Faults:
        """The training script ends with `InjectedFailure`, as with any other error."""
        return self._plan(PlannedFault("fail", who, step, point))

    def kill_at(self, who: Target, step: int, point: Point = "before") -> Faults:
        """As by SIGKILL; in a worker process, SIGKILL."""
        return self._plan(PlannedFault("kill", who, step, point))

    def freeze_at(self, who: Target, step: int, seconds: float, point: Point = "before") -> Faults:
        """The worker sends nothing for this time, as under SIGSTOP; its connections stay open."""
        return self._plan(PlannedFault("freeze", who, step, point, seconds))

    def slow_at(self, who: Target, step: int, seconds: float) -> Faults:
        """Every Data of the step is sent this much later; everything else is sent in time."""
        return self._plan(PlannedFault("slow", who, step, "before", seconds))

    def corrupt_at(self, who: Target, step: int) -> Faults:
        """One bit of a Data of the step is flipped, as by broken memory or a dishonest worker.

        Not of a partial sum: all members would continue with the same wrong one, as with a wrong gradient.
        """
        return self._plan(PlannedFault("corrupt", who, step))

    @property
    def pending(self) -> list[PlannedFault]:
        """Faults that have not happened here: no worker of that rank or name has reached that step."""
        with self._lock:
            struck = [planned for planned, _ in self.fired]
            return [planned for planned in self._planned if planned not in struck]

    def text(self) -> str:
        """The plan as text, for GRIDTRAIN_FAULTS of worker processes, or a file that it names as "@FILE"."""
        with self._lock:
            return json.dumps([asdict(planned) for planned in self._planned])

    @classmethod
    def parse(cls, text: str) -> Faults:
        """The plan from its text, or from "@FILE".  Raises `ConfigError`."""
        path = Path(text[1:]) if text.startswith("@") else None
        try:
            body = text if path is None else path.read_text(encoding="utf-8")[:MAX_TEXT]
            plan = [PlannedFault(**fault) for fault in json.loads(body)[:MOST_FAULTS]]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"GRIDTRAIN_FAULTS is {text[:80]!r}: {error}",
                remedy="take it from gridtrain.testing.Faults.text(), or unset it",
            ) from None
        return cls(*plan, marks=path)

    def over(self, inner: Transport, name: str, die: Callable[[], None] | None = None) -> Transport:
        """The transport of the worker `name` with these faults.  `die`: default SIGKILL."""
        return FaultyTransport(inner, self, name, die or _kill_this_process)

    def strike(self, name: str, rank: int | None, step: int, points: Sequence[Point]) -> list[PlannedFault]:
        """The faults that are due at a worker; each is returned once."""
        due: list[PlannedFault] = []
        with self._lock:
            struck = {id(planned) for planned, _ in self.fired}
            for number, planned in enumerate(self._planned):
                hit = planned.step == step and planned.point in points and planned.who in (name, rank)
                if hit and id(planned) not in struck and self._mark(number):
                    self.fired.append((planned, name))
                    due.append(planned)
        return due

    def _plan(self, planned: PlannedFault) -> Faults:
        with self._lock:
            self._planned.append(planned)
        return self

    def _mark(self, number: int) -> bool:
        """False: it has happened in another or an earlier process."""
        if self._marks is None:
            return True
        with contextlib.suppress(FileExistsError):
            self._marks.with_name(f"{self._marks.name}.struck-{number}").touch(exist_ok=False)
            return True
        return False


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _DelayedMessage:
    due_s: float
    message: Message


class FaultyTransport:
    """Implements `Transport` over `inner`, for one worker."""

    def __init__(self, inner: Transport, faults: Faults, name: str, die: Callable[[], None]) -> None:
        self.me, self.traffic = inner.me, inner.traffic
        self._inner, self._faults, self._name, self._die = inner, faults, name, die
        self._rank: int | None = None
        self._roster_pages: dict[int, MemberListPage] = {}
        self._begun: set[int] = set()  # steps of which a Data was sent
        self._slow_s: dict[int, float] = {}
        self._corrupt: set[int] = set()
        self._delayed: dict[PeerId, deque[_DelayedMessage]] = {}

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        self._inner.dial(peer, address)

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        self._inner.reach(peer, addresses, timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        self._delayed.pop(peer, None)
        self._inner.hang_up(peer)

    def connected(self, peer: PeerId) -> bool:
        return self._inner.connected(peer)

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._inner.backlog_bytes(peer)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._delayed.clear()
        self._inner.close()

    def send(self, peer: PeerId, message: Message) -> None:
        match message:
            case Data(round_id):
                self._send_data(peer, message, round_id.step)
            case Vote(round_id) | Decision(round_id):
                self._apply_faults(round_id.step, "after")
                self._inner.send(peer, message)
            case _:
                self._inner.send(peer, message)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        due_s = min((queue[0].due_s for queue in self._delayed.values()), default=float("inf"))
        events = self._inner.poll(min(timeout_s, max(0.0, due_s - time.monotonic())))
        for event in events:
            if isinstance(event, PeerDown):
                self._delayed.pop(event.peer, None)
            elif isinstance(event, Received) and isinstance(event.message, MemberListPage):
                self._learn_rank(event.message)
        self._send_delayed(time.monotonic())
        return events

    # -- inside ------------------------------------------------------------------------------------

    def _send_data(self, peer: PeerId, message: Data, step: int) -> None:
        if step not in self._begun:
            for fault in self._apply_faults(step, "before"):
                if fault.action == "slow":
                    self._slow_s[step] = fault.seconds
                elif fault.action == "corrupt":
                    self._corrupt.add(step)
        if step in self._corrupt and message.slot.phase not in PARTIAL_SUM_PHASES:
            self._corrupt.discard(step)
            message = replace(message, payload=_flip_bit(message.payload))
        queue = self._delayed.get(peer)
        if step in self._slow_s or queue:
            due_s = time.monotonic() + self._slow_s.get(step, 0.0)
            queue = self._delayed.setdefault(peer, deque())
            queue.append(_DelayedMessage(max(due_s, queue[-1].due_s if queue else 0.0), message))
        else:
            self._inner.send(peer, message)
        if step not in self._begun:
            self._begun = {step}
            self._apply_faults(step, "during")

    def _apply_faults(self, step: int, point: Point) -> list[PlannedFault]:
        """Carry out faults that end or stop the worker; returns those that change messages."""
        rest: list[PlannedFault] = []
        for fault in self._faults.strike(self._name, self._rank, step, (point,)):
            match fault.action:
                case "fail":
                    raise InjectedFailure(
                        f"a failure was injected at step {step}, {point} sending",
                        remedy="it was planned by gridtrain.testing.Faults",
                    )
                case "kill":
                    self._terminate()
                case "freeze":
                    time.sleep(fault.seconds)  # the loop's thread, so no heartbeat is sent either
                case _:
                    rest.append(fault)
        return rest

    def _terminate(self) -> NoReturn:
        self._die()
        raise EndpointKilled(f"{self._name} was killed by a planned fault")

    def _learn_rank(self, page: MemberListPage) -> None:
        if self._roster_pages and next(iter(self._roster_pages.values())).generation != page.generation:
            self._roster_pages.clear()
        self._roster_pages[page.page] = page
        if len(self._roster_pages) == page.pages:
            members = [member.peer for _, one in sorted(self._roster_pages.items()) for member in one.members]
            self._rank = members.index(self.me) if self.me in members else None

    def _send_delayed(self, now_s: float) -> None:
        for peer, queue in list(self._delayed.items()):
            while queue and queue[0].due_s <= now_s and self._inner.connected(peer):
                try:
                    self._inner.send(peer, queue[0].message)
                except GridtrainError:  # its queue is full: later
                    queue[0] = replace(queue[0], due_s=now_s + RETRY_S)
                    break
                queue.popleft()
            if not queue or not self._inner.connected(peer):
                del self._delayed[peer]


def _flip_bit(payload: bytes | memoryview) -> bytes:
    """The lowest bit of one value near the end, float32 or fp16: still a number, and a wrong one."""
    changed = bytearray(payload)
    if changed:
        changed[max(0, len(changed) - 4)] ^= 1
    return bytes(changed)
