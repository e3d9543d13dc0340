"""Injects faults (fail, kill, freeze, slow, stall, corrupt) into a worker of a real run at a given step.

    faults = Faults()
    faults.kill_at("anna", step=10, point="during")
    faults.slow_at(2, step=12, seconds=0.5)

The points of a step at which a fault can happen:

    before   nothing of the step has been sent
    during   the step's first Data message has been sent
    after    all Data messages have been sent, but not the Vote (rank 0: not the Decision)

A stall affects the training thread, which calls `Faults.stall`; all other faults affect the I/O thread:

    loop --> FlowControlTransport --> FaultyTransport --> direct or relayed connections
                                        |  reads the rank from MemberListPage, the step from each message

Threads share the `Faults` object (`LocalGroup(faults=...)`).  Processes read the plan's text from
GRIDTRAIN_FAULTS, in `gridtrain.join`.  Each fault happens once per process; if GRIDTRAIN_FAULTS is "@FILE",
each fault happens only once across all processes, including restarts.
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

from gridtrain.core.messages import (
    CollectivePhase,
    Data,
    Decision,
    Member,
    MemberListChanges,
    MemberListPage,
    Message,
    PeerId,
    Vote,
)
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.network.transport.in_memory import EndpointKilled
from gridtrain.network.transport.interface import Frames, PeerDown, Received, Transport, TransportEvent
from gridtrain.network.transport.wrapping_transport import WrappingTransport

Action = Literal["fail", "kill", "freeze", "slow", "corrupt", "stall"]
LASTING = ("freeze", "slow", "stall")
"""The actions that have a duration."""

Point = Literal["before", "during", "after"]
Target = int | str

RETRY_S = 0.02
MAX_FAULTS = 10_000
MAX_TEXT = 4 << 20
PARTIAL_SUM_PHASES = frozenset({CollectivePhase.REDUCE, CollectivePhase.FOLD, CollectivePhase.ACTIVATION})


class InjectedFailure(GridtrainError):
    """The error with which `fail_at` ends the training script."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A planned fault of one worker at one step.

    Attributes:
        who: the worker's rank in the generation of the step, or the worker's name.
        point: the point in the step at which the fault happens; see the module's docstring.
        seconds: the duration of a freeze or stall, or the delay of each Data message of a slow step.
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
                f"{asdict(self)!r} is not a valid fault; step must be >= 0, and seconds finite and >= 0",
                remedy=f"use one of the actions {', '.join(get_args(Action))}, one of the points "
                f"{', '.join(get_args(Point))}, and a rank or a name",
            )
        if (self.action in LASTING) != (self.seconds > 0):
            raise ConfigError(
                f"action {self.action} has seconds={self.seconds}; seconds must be above 0 for "
                f"{', '.join(LASTING)}, and 0 for other actions",
                remedy=f"set seconds only for {', '.join(LASTING)}",
            )


class Faults:
    """A plan of faults, and a record of the faults that have happened.  Thread-safe.

    Args:
        planned: the planned faults.
        marks: the plan's file; files next to it record the faults that have happened in any process; None
            if the plan belongs to this process only.

    Attributes:
        fired: the faults that have happened, in order, each with the worker's name.
    """

    def __init__(self, *planned: PlannedFault, marks: Path | None = None) -> None:
        self.fired: list[tuple[PlannedFault, str]] = []
        self._planned = list(planned)
        self._marks = marks
        self._lock = threading.Lock()

    def fail_at(self, who: Target, step: int, point: Point = "before") -> Faults:
        """Plan a failure: `InjectedFailure` ends the training script as any other error would."""
        return self._plan(PlannedFault("fail", who, step, point))

    def kill_at(self, who: Target, step: int, point: Point = "before") -> Faults:
        """Plan a kill: a worker process gets SIGKILL, and a worker in a thread stops as if by SIGKILL."""
        return self._plan(PlannedFault("kill", who, step, point))

    def freeze_at(self, who: Target, step: int, seconds: float, point: Point = "before") -> Faults:
        """Plan a freeze: the worker sends nothing for `seconds`, as if stopped by SIGSTOP; its connections
        stay open."""
        return self._plan(PlannedFault("freeze", who, step, point, seconds))

    def slow_at(self, who: Target, step: int, seconds: float) -> Faults:
        """Plan a slow step: every Data message of the step is sent `seconds` late; other messages are on
        time."""
        return self._plan(PlannedFault("slow", who, step, "before", seconds))

    def stall_at(self, who: Target, step: int, seconds: float) -> Faults:
        """Plan a stall: the training thread sleeps for `seconds` at the step's batch; the I/O thread
        continues."""
        return self._plan(PlannedFault("stall", who, step, "before", seconds))

    def corrupt_at(self, who: Target, step: int) -> Faults:
        """Plan a corruption: one bit in a Data message of the step is flipped, as faulty memory might do.

        Data messages with partial sums are not changed, because all members would continue with the same
        wrong sum, so their digests would agree and the error would go undetected.
        """
        return self._plan(PlannedFault("corrupt", who, step))

    @property
    def pending(self) -> list[PlannedFault]:
        """The planned faults that have not happened in this process."""
        with self._lock:
            struck = [planned for planned, _ in self.fired]
            return [planned for planned in self._planned if planned not in struck]

    def text(self) -> str:
        """Return the plan as text, for GRIDTRAIN_FAULTS or for a file that this variable names ("@FILE")."""
        with self._lock:
            return json.dumps([asdict(planned) for planned in self._planned])

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Parse the plan from its text, or from the file that "@FILE" names.

        Raises:
            ConfigError: the text is not a plan, or the file cannot be read.
        """
        path = Path(text[1:]) if text.startswith("@") else None
        try:
            body = text if path is None else path.read_text(encoding="utf-8")[:MAX_TEXT]
            plan = [PlannedFault(**fault) for fault in json.loads(body)[:MAX_FAULTS]]
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"GRIDTRAIN_FAULTS is {text[:80]!r}, which cannot be parsed as a plan of faults: {error}",
                remedy="set it to the text that gridtrain.testing.Faults.text() returns, or unset it",
            ) from None
        return cls(*plan, marks=path)

    def over(self, inner: Transport, name: str, die: Callable[[], None] | None = None) -> Transport:
        """Return a transport for the worker `name` that adds these faults to `inner`.

        Args:
            inner: the transport without faults.
            name: the worker's name.
            die: terminates the worker when a "kill" is due; the default sends SIGKILL to this process.
        """
        return FaultyTransport(inner, self, name, die or _kill_this_process)

    def stall(self, name: str, rank: int, step: int) -> None:
        """Sleep in a worker's training thread for as long as the stalls planned for this step last."""
        for fault in self.strike(name, rank, step, ("before",), of_trainer=True):
            time.sleep(fault.seconds)

    def strike(
        self, name: str, rank: int | None, step: int, points: Sequence[Point], *, of_trainer: bool = False
    ) -> list[PlannedFault]:
        """Return the faults that are due for a worker, and record that they have happened.

        Args:
            rank: the worker's rank; None if it is not a member.
            of_trainer: whether to return the faults of the training thread rather than those of the I/O
                thread.
        """
        due: list[PlannedFault] = []
        with self._lock:
            struck = {id(planned) for planned, _ in self.fired}
            for number, planned in enumerate(self._planned):
                hit = planned.step == step and planned.point in points and planned.who in (name, rank)
                hit = hit and (planned.action == "stall") == of_trainer
                if hit and id(planned) not in struck and self._mark(number):
                    self.fired.append((planned, name))
                    due.append(planned)
        return due

    def _plan(self, planned: PlannedFault) -> Faults:
        with self._lock:
            self._planned.append(planned)
        return self

    def _mark(self, number: int) -> bool:
        """Record that the fault has happened; return False if another process has already recorded it."""
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


class FaultyTransport(WrappingTransport):
    """Implements `Transport` over `inner`, and injects the planned faults of one worker."""

    def __init__(self, inner: Transport, faults: Faults, name: str, die: Callable[[], None]) -> None:
        super().__init__(inner)
        self._faults, self._name, self._die = faults, name, die
        self._rank: int | None = None
        self._roster_pages: dict[int, MemberListPage] = {}
        self._members: tuple[Member, ...] = ()
        self._begun: set[int] = set()  # steps of which a Data message has been sent
        self._slow_s: dict[int, float] = {}
        self._corrupt: set[int] = set()
        self._delayed: dict[PeerId, deque[_DelayedMessage]] = {}

    def hang_up(self, peer: PeerId) -> None:
        self._delayed.pop(peer, None)
        self._inner.hang_up(peer)

    def close(self) -> None:
        self._delayed.clear()
        super().close()

    def send(self, peer: PeerId, message: Message, frames: Frames | None = None) -> None:
        match message:
            case Data(round_id):
                self._send_data(peer, message, round_id.step)
            case Vote(round_id) | Decision(round_id):
                self._apply_faults(round_id.step, "after")
                self._inner.send(peer, message)
            case _:
                self._inner.send(peer, message, frames)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        due_s = min((queue[0].due_s for queue in self._delayed.values()), default=float("inf"))
        events = self._inner.poll(min(timeout_s, max(0.0, due_s - time.monotonic())))
        for event in events:
            if isinstance(event, PeerDown):
                self._delayed.pop(event.peer, None)
            elif isinstance(event, Received) and isinstance(event.message, MemberListPage):
                self._learn_rank(event.message)
            elif isinstance(event, Received) and isinstance(event.message, MemberListChanges):
                self._set_members(event.message.apply(self._members) or ())
        self._send_delayed(time.monotonic())
        return events

    # -- internal ----------------------------------------------------------------------------------

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
        """Execute the due faults that terminate or pause the worker; return those that affect messages."""
        rest: list[PlannedFault] = []
        for fault in self._faults.strike(self._name, self._rank, step, (point,)):
            match fault.action:
                case "fail":
                    raise InjectedFailure(
                        f"a failure was injected at step {step}, {point} sending",
                        remedy="remove the fault from gridtrain.testing.Faults if it was not intended",
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
            self._set_members(
                tuple(member for _, one in sorted(self._roster_pages.items()) for member in one.members)
            )

    def _set_members(self, members: tuple[Member, ...]) -> None:
        self._members = members
        peers = [member.peer for member in members]
        self._rank = peers.index(self.me) if self.me in peers else None

    def _send_delayed(self, now_s: float) -> None:
        for peer, queue in list(self._delayed.items()):
            while queue and queue[0].due_s <= now_s and self._inner.connected(peer):
                try:
                    self._inner.send(peer, queue[0].message)
                except GridtrainError:  # the peer's queue is full: try again later
                    queue[0] = replace(queue[0], due_s=now_s + RETRY_S)
                    break
                queue.popleft()
            if not queue or not self._inner.connected(peer):
                del self._delayed[peer]


def _flip_bit(payload: bytes | memoryview) -> bytes:
    """Return the payload after flipping the lowest bit of its last float32 value, which remains finite.

    In a payload of float16 values, a value near its end changes.
    """
    changed = bytearray(payload)
    if changed:
        changed[max(0, len(changed) - 4)] ^= 1
    return bytes(changed)
