"""The coordinator's only loop: it carries out what the membership core decides.

Decides nothing about members, generations or verdicts; never touches a gradient, and never imports
torch.  What the core wants journalled is on the disk before anything that follows is sent.

                  poll                    handle, tick                   in order
    Transport ------------> Coordinator --------------> Membership ---------------------+
        ^                        |  ^                                                   |
        |      guests, orders,   |  +---- Lost, if a send failed                        |
        |            strikes     +----------------------> Reception (the door) ---------+
        |                                                                               v
        +------- Send, Dismiss, CallBack -------------------- Store <-- Journal, all of a turn at once
                                                                |
                                no room: Standstill, then the same effects; from time to time: Backups
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gridtrain._version import __version__
from gridtrain.config import Deadlines
from gridtrain.errors import JournalError, TransportError
from gridtrain.protocol import membership_io as io
from gridtrain.protocol.door import Door
from gridtrain.protocol.membership import Membership
from gridtrain.protocol.messages import (
    BundleAsk,
    Done,
    Expel,
    Pardon,
    PeerId,
    Refused,
    RunState,
    StatusReply,
    StatusRequest,
)
from gridtrain.protocol.recovery import recover
from gridtrain.transport.base import (
    Denied,
    PeerDown,
    PeerUp,
    Reached,
    Received,
    Transport,
    TransportEvent,
    Violation,
)
from gridtrain_coordinator.backups import Backups
from gridtrain_coordinator.checkups import Checkups
from gridtrain_coordinator.log import Log, silent
from gridtrain_coordinator.reception import Reception
from gridtrain_coordinator.shelf import Shelf
from gridtrain_coordinator.standstill import RETRY_S, Standstill
from gridtrain_coordinator.store import JournalFull, Store
from gridtrain_coordinator.views import Speedometer, payload, status_picture, withhold_places

SOFTWARE = f"gridtrain {__version__}"
MAX_WAIT_S = 0.25
"""The longest single wait, so that a stop is noticed within it."""

FAREWELL_S = 5.0
"""After the end of the run, workers get so long to hear of it and to leave."""


class Stop(Protocol):
    """A `threading.Event`, or anything else that can tell."""

    def is_set(self) -> bool: ...


class Core(Protocol):
    """What the loop needs of `Membership`."""

    @property
    def deadline_s(self) -> float: ...
    def start(self, now_s: float) -> list[io.Effect]: ...
    def handle(self, event: io.Event, now_s: float) -> list[io.Effect]: ...
    def tick(self, now_s: float) -> list[io.Effect]: ...
    def snapshot(self, now_s: float) -> dict[str, Any]: ...
    def lend(self, guest: PeerId, most: int) -> tuple[list[io.Effect], tuple[tuple[PeerId, str], ...]]: ...


class Window(Protocol):
    """Where people look in: the dashboard.  None of it may wait."""

    def show(self, picture: Mapping[str, Any]) -> None: ...
    def orders(self) -> Iterable[tuple[Expel | Pardon, Future[Done | Refused]]]: ...


class Coordinator:
    """Owns a transport, a core and a store, and closes transport and store when `run` returns.

    May be constructed in one thread and run in another.

    Args:
        transport: any `Transport`, listening already, with the door as its gate.
        store: the journal; `Store.open(":memory:")` for a group that lives in one process.
        membership: the core; its term must come from `store.next_term()`.
        reception: the door, over the same core.
        log: gets one call for each event.
        exit_when_finished: `run` returns when the run is finished and its workers have left.
        address: where workers find it, for `gridtrain status`.
        clock: seconds, monotonic.
        backups: None: none are made.
        window: shown the picture once a second; gives the operator's orders.
        shelf: the bundle that workers may fetch; None: there is none.
    """

    def __init__(
        self,
        transport: Transport,
        store: Store,
        membership: Core,
        reception: Reception,
        *,
        reach_s: float = Deadlines().reach_s,
        log: Log = silent,
        exit_when_finished: bool = False,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
        backups: Backups | None = None,
        window: Window | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self._shelf = shelf or Shelf()
        self._transport = transport
        self._store = store
        self._core = membership
        self._reception = reception
        self._reach_s = reach_s
        self._log = log
        self._exit_when_finished = exit_when_finished
        self._real_clock = clock
        self._behind_s = 0.0  # the core's clock stood still for so long
        self._standstill: Standstill | None = None
        self._checkups = Checkups(lambda guest, most: membership.lend(guest, most))
        self._present: set[PeerId] = set()  # workers that are connected
        self._backups = backups
        self._window = window
        self._speed = Speedometer()
        self._address = address
        self._started_s = self._clock()
        self._farewell_until_s: float | None = None

    @classmethod
    def of_run(
        cls,
        transport: Transport,
        store: Store,
        door: Door,
        *,
        run: str = "default",
        operator: PeerId | None = None,
        min_workers: int = 1,
        deadlines: Deadlines | None = None,
        log: Log = silent,
        exit_when_finished: bool = False,
        address: str = "",
        backups: Backups | None = None,
        shelf: Shelf | None = None,
        plans: bool = True,
        window: Window | None = None,
    ) -> Coordinator:
        """A coordinator with the real core, in the journal's next term; `door` is the transport's gate.

        Raises `JournalError` if the journal is that of another run, or cannot be understood.
        """
        entries = [(entry.kind, entry.body) for entry in store.entries()]
        runs = {body["run"] for kind, body in entries if kind == "term" and "run" in body}
        if runs - {run}:
            raise JournalError(
                f'the journal is that of the run "{runs.pop()}", not "{run}"',
                remedy="name another folder with --state, or the other run with --run",
            )
        try:
            recovered = recover(entries)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(
                f"the journal holds an entry that no coordinator wrote: {error!r}",
                remedy="restore it from a backup, or begin a new run with another --state",
            ) from None
        deadlines = deadlines or Deadlines()
        membership = Membership(
            me=transport.me,
            run=run,
            term=store.next_term(),
            min_workers=min_workers,
            deadlines=deadlines,
            software=SOFTWARE,
            recovered=recovered,
            plans=plans,
        )
        if recovered.finished:
            raise JournalError(
                f'the run "{run}" of this journal is finished',
                remedy="begin a new one: name another run with --run, or another folder with --state",
            )
        return cls(
            transport,
            store,
            membership,
            Reception(door, membership, operator, time.time),
            reach_s=deadlines.reach_s,
            log=log,
            exit_when_finished=exit_when_finished,
            address=address,
            backups=backups,
            window=window,
            shelf=shelf,
        )

    def run(self, stop: Stop) -> None:
        """Serve until `stop` is set, or the run is over (`exit_when_finished`).

        Raises `JournalError` if something cannot be made durable: it is then not sent either.  Where there
        is only no room it is kept, and tried again; see `standstill`.
        """
        try:
            now_s = self._clock()
            self._perform(self._core.start(now_s), now_s)
            while not stop.is_set() and not self._over():
                self._turn()
            if self._backups is not None and self._backups.wanted and self._standstill is None:
                self._back_up(self._backups)  # so that the latest one knows all that this one knew
        finally:
            self._transport.close()
            self._store.close()

    # -- one turn ------------------------------------------------------------------------------

    def _clock(self) -> float:
        """The core's: it stands still while nothing can be decided."""
        standing = self._standstill
        return standing.core_s if standing is not None else self._real_clock() - self._behind_s

    def _turn(self) -> None:
        if self._window is not None:
            self._take_orders(self._window)
        if self._standstill is not None:
            self._stand_still(self._standstill)
            return
        wait_s = self._core.deadline_s - self._clock()
        events = self._transport.poll(min(max(wait_s, 0.0), MAX_WAIT_S))
        now_s = self._clock()
        effects = [effect for event in events for effect in self._take(event, now_s)]
        if now_s >= self._core.deadline_s:
            effects += self._core.tick(now_s)
        self._perform(effects, now_s)
        if now_s >= self._speed.due_s():
            self._look_around(now_s)
        if self._backups is not None and now_s >= self._backups.due_s:
            self._back_up(self._backups)

    def _take(self, event: TransportEvent, now_s: float) -> Sequence[io.Effect]:
        self._see(event)
        match event:
            case Received(peer) if not self._reception.may_speak(peer):
                return []  # it was put out by an earlier message of this turn
            case Received(peer, StatusRequest()) if not self._reception.is_guest(peer):
                return [io.Send(peer, StatusReply(self._status(peer, now_s)))]
            case Received(peer, message) if self._checkups.hears(peer, message):
                asker: PeerId = peer
                return self._checkups.hear(asker, message, lambda: self._status(asker, now_s), now_s)
            case Received(peer, BundleAsk() as ask) if not self._reception.is_guest(peer):
                return self._shelf.answer(peer, ask, now_s)
            case Received(peer, message):
                answered = self._reception.hear(peer, message, now_s)
                return answered if answered is not None else self._core.handle(io.Heard(peer, message), now_s)
            case PeerUp(peer, _, host):
                return [] if self._reception.came(event) else self._core.handle(io.Up(peer, host), now_s)
            case PeerDown(peer, reason):
                return [] if self._reception.went(peer) else self._core.handle(io.Lost(peer, reason), now_s)
            case Reached(peer, address):
                if (told := self._checkups.reached(event)) is not None:
                    return told
                return self._core.handle(io.CalledBack(peer, address), now_s)
            case Violation(peer, reason):
                return self._violation(peer, reason, now_s)
            case Denied(peer, address):
                return [io.Note("info", "denied", {"peer": peer.hex()[:12], "address": address})]

    def _violation(self, peer: PeerId | None, reason: str, now_s: float) -> Sequence[io.Effect]:
        guest = peer is not None and self._reception.went(peer)
        name = "not greeted" if peer is None else "a guest" if guest else peer.hex()[:12]
        note = io.Note("warning", "violation", {"peer": name, "reason": reason})
        if peer is None or guest:
            return [note, *([io.Dismiss(peer)] if peer is not None else [])]
        return [note, *self._core.handle(io.Offended(peer, reason), now_s)]

    def _perform(self, effects: Sequence[io.Effect], now_s: float) -> None:
        """Carry out effects in order; the journal's first, all in one transaction.

        Writing an entry before an effect that precedes it is harmless: to everybody else it looks
        as if we had been killed in between.  A peer that cannot be sent to is lost, and the core
        hears it once; as peers are finite, so is this loop.
        """
        failed: set[PeerId] = set()
        while effects:
            effects = [further for effect in effects for further in self._judged(effect, now_s)]
            try:
                self._make_durable(effects)
            except JournalFull as full:
                self._begin_standstill(full, effects, now_s)
                return
            losses = self._carry_out(effects, failed)
            effects = [effect for loss in losses for effect in self._core.handle(loss, now_s)]

    def _make_durable(self, effects: Sequence[io.Effect]) -> None:
        entries = [(effect.kind, effect.body) for effect in effects if isinstance(effect, io.Journal)]
        if entries:
            self._store.append_all(entries)
            if self._backups is not None:
                self._backups.want()

    def _carry_out(self, effects: Sequence[io.Effect], failed: set[PeerId]) -> list[io.Lost]:
        """What follows the journal; who could not be sent to."""
        losses: list[io.Lost] = []
        for effect in effects:
            match effect:
                case io.Send(peer, message) if peer not in failed:
                    try:
                        self._transport.send(peer, message)
                    except TransportError as error:
                        failed.add(peer)
                        losses.append(io.Lost(peer, error.reason))
                case io.Dismiss(peer):
                    self._transport.hang_up(peer)
                case io.CallBack(peer, addresses):
                    self._transport.reach(peer, addresses, self._reach_s)
                case io.Note(level, event, fields):
                    self._log(level, event, fields)
        return losses

    def _judged(self, effect: io.Effect, now_s: float) -> Sequence[io.Effect]:
        """A strike becomes what the door makes of it; a member that it removes gives no further ones."""
        return self._reception.strike(effect, now_s) if isinstance(effect, io.Strike) else [effect]

    # -- no room, and backups ------------------------------------------------------------------

    def _see(self, event: TransportEvent) -> None:
        if isinstance(event, PeerUp):
            self._checkups.came(event)
        elif isinstance(event, PeerDown):
            self._checkups.went(event.peer)
        if (
            isinstance(event, PeerUp)
            and event.guest_of is None
            and not self._reception.is_operator(event.peer)
        ):
            self._present.add(event.peer)
        elif isinstance(event, PeerDown):
            self._present.discard(event.peer)

    def _begin_standstill(self, full: JournalFull, effects: Sequence[io.Effect], now_s: float) -> None:
        standing = Standstill(full.reason, effects, began_s=self._real_clock(), core_s=now_s)
        self._standstill = standing
        self._log(
            "error", "no_room", {"reason": full.reason, "remedy": "make room: it is tried every second"}
        )
        self._carry_out([io.Send(peer, standing.state()) for peer in sorted(self._present)], set())

    def _stand_still(self, standing: Standstill) -> None:
        """A turn without decisions."""
        for event in self._transport.poll(MAX_WAIT_S):
            self._see(event)
            self._carry_out(self._meanwhile(standing, event), set())
        if self._real_clock() < standing.retry_at_s:
            return
        standing.retry_at_s = self._real_clock() + RETRY_S
        self._show(self._core.snapshot(standing.core_s), standing.core_s)
        try:
            self._make_durable(standing.effects)
        except JournalFull:
            return
        self._go_on(standing)

    def _meanwhile(self, standing: Standstill, event: TransportEvent) -> Sequence[io.Effect]:
        match event:
            case Received(peer) if not self._reception.may_speak(peer):
                return []
            case Received(peer, StatusRequest()) if not self._reception.is_guest(peer):
                return [io.Send(peer, StatusReply(self._status(peer, standing.core_s)))]
            case Received(peer) if self._reception.is_guest(peer) or self._reception.is_operator(peer):
                return [io.Send(peer, standing.refusal())]
            case PeerUp(peer):
                if self._reception.came(event):
                    return []
                return [io.Send(peer, standing.state()), *standing.keep(event)]
            case PeerDown(peer) if self._reception.went(peer):
                return []
            case Denied():
                return self._take(event, standing.core_s)
            case _:
                return standing.keep(event)

    def _go_on(self, standing: Standstill) -> None:
        """There is room: what was decided is durable, and now told; then comes what was kept."""
        self._standstill = None
        self._behind_s += self._real_clock() - standing.began_s
        now_s = self._clock()
        self._log("info", "room_again", {"after_s": round(self._real_clock() - standing.began_s, 1)})
        losses = self._carry_out(standing.effects, set())
        effects = [effect for loss in losses for effect in self._core.handle(loss, now_s)]
        effects += [effect for event in standing.events for effect in self._take(event, now_s)]
        snapshot = self._core.snapshot(now_s)
        state = RunState(snapshot["phase"], snapshot["reason"])
        self._perform([*effects, *(io.Send(peer, state) for peer in sorted(self._present))], now_s)

    def _back_up(self, backups: Backups) -> None:
        failed_before, began_s = backups.failed, self._clock()
        try:
            path = backups.make(self._store, began_s)
        except JournalError as error:
            if error.reason != failed_before:
                self._log("error", "backup_failed", {"reason": error.reason, "remedy": error.remedy})
            return
        backups.done(self._clock(), self._clock() - began_s)
        if failed_before:
            self._log("info", "backup", {"path": str(path), "reason": "there is room again"})

    # -- what is seen from outside -------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What the core knows; for a window's `orders`, and for anybody once `run` has returned."""
        return self._core.snapshot(self._clock())

    def _status(self, asker: PeerId, now_s: float) -> bytes:
        return payload(
            self._picture(self._core.snapshot(now_s), now_s, places=self._reception.is_operator(asker))
        )

    def _show(self, snapshot: dict[str, Any], now_s: float) -> None:
        if self._window is not None:
            self._window.show(self._picture(snapshot, now_s, places=True))

    def _take_orders(self, window: Window) -> None:
        for order, answer in window.orders():
            now_s = self._clock()
            if not answer.set_running_or_notify_cancel():
                continue  # whoever asked has gone
            standing = self._standstill
            if standing is None:
                effects, reply = self._reception.obey(order, now_s)
                self._perform(effects, now_s)
                standing = self._standstill  # there was no room for it: it is kept, and done later
            answer.set_result(reply if standing is None else standing.refusal())

    def _picture(self, snapshot: dict[str, Any], now_s: float, *, places: bool) -> dict[str, Any]:
        for member in snapshot["members"]:
            member["strikes"] = self._reception.strikes(bytes.fromhex(member["peer"]))
        if places:
            snapshot["door"] = self._reception.picture()
            if self._backups is not None:
                snapshot["backup"] = self._backups.picture(now_s)
        else:
            withhold_places(snapshot)
        snapshot["bundle"] = self._shelf.picture()
        if self._standstill is not None:
            snapshot |= {"phase": self._standstill.phase, "reason": self._standstill.reason}
        return status_picture(
            snapshot,
            self._speed,
            software=SOFTWARE,
            address=self._address,
            now_s=now_s,
            uptime_s=now_s - self._started_s,
        )

    def _look_around(self, now_s: float) -> None:
        """Once a second: the door looks at its suspects, counters are sampled, the end is noticed."""
        self._perform(self._reception.tick(now_s), now_s)
        snapshot = self._core.snapshot(now_s)
        self._speed.observe(snapshot, now_s)
        self._show(snapshot, now_s)
        if not snapshot["finished"]:
            self._farewell_until_s = None
        elif not snapshot["members"]:
            self._farewell_until_s = now_s
        elif self._farewell_until_s is None:
            self._farewell_until_s = now_s + FAREWELL_S

    def _over(self) -> bool:
        until_s = self._farewell_until_s
        return self._exit_when_finished and until_s is not None and self._clock() >= until_s
