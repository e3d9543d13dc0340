"""The coordinator's loop: receives messages, executes effects, and decides when to exit after the run's end.

                  poll                    handle, tick                   in order
    Transport ------------> Coordinator --------------> Membership ---------------------+
        ^                        |  ^                                                   |
        |    pending members,    |  +---- PeerDisconnected, if a send failed            |
        |  commands, violations  +----------------------> AccessHandler ----------------+
        |                                                                               v
        +------- Send, Disconnect, DialBack ----------- JournalStore <-- JournalEntry, all of a poll at once
                                                                |
                            disk full: DiskFullMode, then the same effects; from time to time: Backups

Journal entries are on disk before any effect that follows is carried out.  The entries of an operator's
command are on disk before it changes anything; if the disk is full, the command is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from gridtrain._version import SOFTWARE
from gridtrain.config import Deadlines
from gridtrain.core.messages import (
    BundleRequest,
    OperatorReply,
    PeerId,
    Refused,
    RunStateUpdate,
    StatusReply,
    StatusRequest,
)
from gridtrain.errors import VERSION, JournalError, TransportError
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    PeerDown,
    PeerUp,
    ReachResult,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
    VersionMismatch,
)
from gridtrain_coordinator.access.request_rate import RequestRate
from gridtrain_coordinator.access_handler import AccessHandler, Order
from gridtrain_coordinator.bundle_server import BundleServer
from gridtrain_coordinator.doctor_checks import Checkups
from gridtrain_coordinator.journal.backups import Backups
from gridtrain_coordinator.journal.disk_full_mode import DEFERRED, RETRY_S, DiskFullMode, refusal
from gridtrain_coordinator.journal.store import JournalFull, JournalStore
from gridtrain_coordinator.log import Log, silent
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.message_batch import MessageBatch
from gridtrain_coordinator.run import events as ev
from gridtrain_coordinator.run.journal_recovery import (
    RecoveredRun,
    SupersededEntries,
    compacted_entry,
    is_same_run,
    recover_run,
)
from gridtrain_coordinator.status_report import (
    RateMeter,
    RefusedVersions,
    build_status,
    encode_status,
    redact_addresses,
)

MAX_WAIT_S = 0.25
"""The longest single wait; a stop request is detected within this time."""

EXIT_DELAY_S = 5.0
"""How long the coordinator keeps running after the run's end, so that workers can be notified and leave."""

WRITING_DELAY_S = 3600.0
"""The delay that replaces `EXIT_DELAY_S` while a worker that is to write the final model is still writing it,
or could not write its last checkpoint."""

MAX_STATUS_REQUESTS, STATUS_WINDOW_S, MAX_STATUS_ASKERS = 50, 10.0, 1000
"""How many status requests from one key, other than the operator's, are answered within the window, and for
how many keys they are counted.  `gridtrain status --watch` asks once a second."""

COMPACTION_BYTES = 2**20
"""At startup, superseded entries of at least this total size are removed; reading them takes 0.02 s."""

JOURNAL_MISSING = "the journal was moved or removed, and a coordinator that is started again lacks this run"
MISSING_REMEDY = "move it back; if it is lost, let this coordinator run until the end, or use a backup"


class StopFlag(Protocol):
    """A `threading.Event`, or any other object with an `is_set` method."""

    def is_set(self) -> bool: ...


class DashboardPort(Protocol):
    """The dashboard's methods that the loop calls; none of them may block."""

    def publish(self, status: Mapping[str, Any]) -> None: ...
    def take_orders(self) -> Iterable[tuple[Order, Future[OperatorReply | Refused]]]: ...


def _recover(store: JournalStore, run: str, superseded: SupersededEntries | None = None) -> RecoveredRun:
    """Return the run that the journal records, and pass its entries to `superseded`.

    Raises `JournalError` if the run cannot continue from the journal.
    """

    def entries() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for entry in store.entries():
            if entry.kind == "term" and "run" in entry.body and entry.body["run"] != run:
                raise JournalError(
                    f'the journal belongs to the run "{entry.body["run"]}", not to the run "{run}"',
                    remedy="choose another folder with --state, or specify the journal's run with --run",
                )
            yield entry.kind, entry.body
            if superseded is not None:
                superseded.add(entry.id, entry.kind, entry.body)

    try:
        recovered = recover_run(entries())
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_entry(error) from None
    if recovered.is_finished:
        raise JournalError(
            f'the run "{run}" of this journal has finished: {recovered.end_reason}',
            remedy="to train its model further, start the coordinator with another --state and the workers "
            "with the --state-dir of their checkpoints (docs/operations.md); to start a new run, use --run",
        )
    return recovered


def _recover_and_compact(store: JournalStore, run: str, log: Log) -> RecoveredRun:
    """Return the run that the journal records; remove superseded entries that take up much space.

    The journal is left unchanged if another run would be recovered from the remaining entries.  Raises
    `JournalError` if the run cannot continue from the journal.
    """
    superseded = SupersededEntries()
    recovered = _recover(store, run, superseded)
    removed_bytes = store.total_bytes(superseded.ids)
    if removed_bytes < COMPACTION_BYTES:
        return recovered
    try:
        with store.compaction(superseded.ids, compacted_entry(recovered)):
            if not is_same_run(_recover(store, run), recovered):
                raise JournalError("another run would be recovered from the remaining entries")
    except JournalError as error:
        log("warning", "not_compacted", {"reason": error.reason})
    else:
        log("info", "compacted", {"entries": len(superseded.ids), "MB": round(removed_bytes / 1e6, 1)})
    return recovered


def invalid_entry(error: Exception) -> JournalError:
    """Return the error for a journal with an invalid entry, which raised `error` when it was parsed."""
    return JournalError(
        f"the journal contains an invalid entry: {error!r}",
        remedy="restore the journal from a backup, or start a new run with another --state",
    )


def recover_membership(
    store: JournalStore,
    me: PeerId,
    run: str,
    deadlines: Deadlines,
    *,
    min_workers: int = 1,
    plans: bool = True,
    log: Log = silent,
) -> Membership:
    """Return a coordinator's core that continues the journal's run with the next term.

    Raises `JournalError` if the journal belongs to another run or to a finished one, if an entry is invalid,
    or if the next term cannot be written.
    """
    recovered = _recover_and_compact(store, run, log)
    return Membership(
        me=me,
        run=run,
        term=store.next_term(),
        deadlines=deadlines,
        software=SOFTWARE,
        min_workers=min_workers,
        recovered=recovered,
        plans=plans,
    )


class Coordinator:
    """Owns a transport, a core and a store; closes the transport and the store when `run` returns.

    A coordinator may be constructed in one thread and run in another.

    Args:
        transport: a `Transport` that is already listening, with access control as its gate.
        store: the journal; `JournalStore.open(":memory:")` for a group within one process.
        membership: the coordinator's core; its term must come from `store.next_term()`.
        access: access control for `membership`.
        reach_s: the time limit for a dial-back, in seconds.
        log: a function that is called once per event.
        exit_when_finished: whether `run` returns when the run is finished and its workers have left.
        address: the address that workers use, as `gridtrain status` shows it.
        clock: a function that returns monotonic time in seconds.
        backups: the backups of the journal; None for no backups.
        dashboard: the dashboard, which receives the status once a second and passes on the operator's
            commands; None if there is no dashboard.
        bundle_server: the server of the bundle that workers may fetch; None if there is no bundle.
    """

    def __init__(
        self,
        transport: Transport,
        store: JournalStore,
        membership: Membership,
        access: AccessHandler,
        *,
        reach_s: float = Deadlines().reach_s,
        log: Log = silent,
        exit_when_finished: bool = False,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
        backups: Backups | None = None,
        dashboard: DashboardPort | None = None,
        bundle_server: BundleServer | None = None,
    ) -> None:
        self._bundle_server = bundle_server or BundleServer()
        self._transport = transport
        self._store = store
        self._membership = membership
        self._access = access
        self._dial_back_timeout_s = reach_s
        self._log = log
        self._exit_when_finished = exit_when_finished
        self._real_clock = clock
        self._core_clock_lag_s = 0.0  # total time for which the core's clock was stopped
        self._disk_full: DiskFullMode | None = None
        self._checkups = Checkups(membership.introduce_pending_member)
        self._status_requests = RequestRate(STATUS_WINDOW_S, MAX_STATUS_ASKERS)
        self._connected: set[PeerId] = set()  # workers, excluding pending members and the operator
        self._backups = backups
        self._dashboard = dashboard
        self._rates = RateMeter()
        self._refused_versions = RefusedVersions()
        self._address = address
        self._started_s = self._clock()
        self._is_journal_missing = False
        self._finished_s = math.inf  # when housekeeping first found that the run is finished
        self._exit_deadline_s = math.inf

    def run(self, stop: StopFlag) -> None:
        """Serve until `stop` is set or, with `exit_when_finished`, until the run has finished.

        Raises `JournalError` if a decision cannot be made durable; such a decision is not sent.  If the disk
        is full, decisions are instead held in memory, and the write is retried; see `DiskFullMode`.
        """
        try:
            now_s = self._clock()
            self._perform(self._membership.start(now_s), now_s)
            while not stop.is_set() and not self._should_exit():
                self._run_once()
            if self._backups is not None and self._disk_full is None:
                self._finish_backups(self._backups)
        finally:
            self._transport.close()
            self._store.close()

    # -- one iteration -------------------------------------------------------------------------

    def _clock(self) -> float:
        """Return the time of the core's clock, which is stopped in disk-full mode."""
        mode = self._disk_full
        return mode.core_stopped_s if mode is not None else self._real_clock() - self._core_clock_lag_s

    def _run_once(self) -> None:
        if self._dashboard is not None:
            self._take_orders(self._dashboard)
        if self._disk_full is not None:
            self._run_once_disk_full(self._disk_full)
            return
        wait_s = self._membership.deadline_s - self._clock()
        events = self._transport.poll(min(max(wait_s, 0.0), MAX_WAIT_S))
        now_s = self._clock()
        effects = self._handle_events(events, now_s)
        if now_s >= self._membership.deadline_s and self._disk_full is None:
            effects += self._membership.tick(now_s)
        self._perform(effects, now_s)
        if now_s >= self._rates.due_s:
            self._run_housekeeping(now_s)
        if self._backups is not None:
            self._poll_backup(self._backups, now_s)
            if now_s >= self._backups.due_s:
                self._backups.begin(self._store, now_s)

    def _handle_events(self, events: Iterable[TransportEvent], now_s: float) -> list[ev.Effect]:
        """Handle the events of one poll, in order; return the effects that are still to be carried out.

        Effects before an operator's command are carried out first, so that it can be refused on its own.
        """
        effects: list[ev.Effect] = []
        for event in events:
            if self._disk_full is not None:  # since an operator's command of this poll
                self._carry_out(self._handle_event_disk_full(self._disk_full, event), set())
                continue
            match event:
                case Received(peer, order) if isinstance(order, Order) and self._access.is_operator(peer):
                    self._perform(effects, now_s)
                    effects = []
                    self._carry_out([ev.Send(peer, self._execute_order(order, now_s))], set())
                case _:
                    effects += self._handle_event(event, now_s)
        return effects

    def _handle_event(self, event: TransportEvent, now_s: float) -> Sequence[ev.Effect]:
        self._track_connection(event)
        match event:
            case Received(peer) if not self._access.may_send(peer):
                return []  # an earlier message of this poll removed the peer
            case Received(peer) if (refused := self._access.refuse_ended_invitation(peer)) is not None:
                return refused
            case Received(peer, StatusRequest()) if not self._access.is_pending(peer):
                return self._answer_status(peer, now_s)
            case Received(peer, message) if self._checkups.accepts(peer, message):
                return self._checkups.handle(peer, message, partial(self._encoded_status, peer, now_s), now_s)
            case Received(peer, BundleRequest() as request) if not self._access.is_pending(peer):
                return self._bundle_server.answer(peer, request, now_s)
            case Received(peer, message):
                if (effects := self._access.handle(peer, message, now_s)) is not None:
                    return effects
                return self._membership.handle(ev.MessageReceived(peer, message), now_s)
            case PeerUp(peer, _, host):
                if self._access.on_connected(event):
                    return []
                return self._membership.handle(ev.PeerConnected(peer, host), now_s)
            case PeerDown(peer, reason):
                if self._access.on_disconnected(peer):
                    return []
                return self._membership.handle(ev.PeerDisconnected(peer, reason), now_s)
            case ReachResult(peer, address):
                if (handled := self._checkups.on_dial_back_result(event)) is not None:
                    return handled
                return self._membership.handle(ev.DialBackResult(peer, address), now_s)
            case VersionMismatch(_, reason, key):
                self._refused_versions.record(event, now_s)
                fields = {"name": "a worker", "peer": key.hex()[:12], "code": VERSION, "reason": reason}
                return [ev.LogEvent("warning", "refused", fields)]
            case TransportViolation(peer, reason):
                return self._handle_violation(peer, reason, now_s)
            case ConnectionDenied(peer, address):
                return [ev.LogEvent("info", "denied", {"peer": peer.hex()[:12], "address": address})]

    def _handle_violation(self, peer: PeerId | None, reason: str, now_s: float) -> Sequence[ev.Effect]:
        def note(name: str) -> ev.LogEvent:
            return ev.LogEvent("warning", "violation", {"peer": name, "reason": reason})

        if peer is None:
            return [note("unknown, before the handshake")]
        if self._access.on_disconnected(peer):
            return [note("a pending member"), ev.Disconnect(peer)]
        effects = self._membership.handle(ev.ProtocolViolation(peer, reason), now_s)
        return [note(peer.hex()[:12]), *effects]

    def _perform(self, effects: Sequence[ev.Effect], now_s: float) -> None:
        """Write all journal entries in one transaction, then carry out the other effects in order.

        Writing an entry before the effects that precede the entry is harmless: to the peers, it looks as if
        the coordinator had been killed in between.  If a send fails, the core is notified once that the peer
        is disconnected; because the number of peers is finite, the loop ends.
        """
        failed: set[PeerId] = set()
        while effects:
            effects = self._record_violations(effects, now_s)
            try:
                self._make_durable(effects)
            except JournalFull as full:
                self._enter_disk_full_mode(full, effects, now_s)
                return
            losses = self._carry_out(effects, failed)
            effects = [effect for loss in losses for effect in self._membership.handle(loss, now_s)]

    def _make_durable(self, effects: Sequence[ev.Effect]) -> None:
        entries = [(effect.kind, effect.body) for effect in effects if isinstance(effect, ev.JournalEntry)]
        if entries:
            self._store.append_all(entries)
            if self._backups is not None:
                self._backups.request()

    def _carry_out(self, effects: Sequence[ev.Effect], failed: set[PeerId]) -> list[ev.PeerDisconnected]:
        """Carry out all effects except journal entries.

        Returns a `PeerDisconnected` for each peer to which a send failed, and adds these peers to `failed`;
        nothing more is sent to the peers in `failed`.
        """
        losses: list[ev.PeerDisconnected] = []
        batch = MessageBatch()
        for effect in effects:
            match effect:
                case ev.Send(peer, message) if peer not in failed:
                    try:
                        self._transport.send(peer, message, batch.encode(message))
                    except TransportError as error:
                        failed.add(peer)
                        losses.append(ev.PeerDisconnected(peer, error.reason))
                case ev.Disconnect(peer):  # no `PeerDown` follows
                    self._transport.hang_up(peer)
                    self._checkups.on_disconnected(peer)
                    self._access.on_disconnected(peer)
                case ev.DialBack(peer, addresses):
                    self._transport.reach(peer, addresses, self._dial_back_timeout_s)
                case ev.LogEvent(level, event, fields):
                    self._log(level, event, fields)
        return losses

    def _record_violations(self, effects: Iterable[ev.Effect], now_s: float) -> list[ev.Effect]:
        """Record each `RecordViolation`, and replace it by the effects of recording it."""
        replaced: list[ev.Effect] = []
        for effect in effects:
            if isinstance(effect, ev.RecordViolation):
                replaced += self._access.record_violation(effect, now_s)
            else:
                replaced.append(effect)
        return replaced

    # -- full disk, and backups ----------------------------------------------------------------

    def _track_connection(self, event: TransportEvent) -> None:
        if isinstance(event, PeerUp):
            self._checkups.on_connected(event)
            self._refused_versions.discard(event)
            if event.pending_key is None and not self._access.is_operator(event.peer):
                self._connected.add(event.peer)
        elif isinstance(event, PeerDown):
            self._checkups.on_disconnected(event.peer)
            self._connected.discard(event.peer)

    def _enter_disk_full_mode(self, full: JournalFull, effects: Sequence[ev.Effect], now_s: float) -> None:
        mode = DiskFullMode(full.reason, effects, began_s=self._real_clock(), core_s=now_s)
        self._disk_full = mode
        self._rates.restart(now_s)
        self._log_no_room(full, "free disk space; writing is retried every second")
        # A pending member does not wait for its reply, which is sent once its enrolment is durable.
        asked = {effect.peer for effect in effects if isinstance(effect, ev.Send)} - self._connected
        refusals = [ev.Send(peer, refusal(mode.cause)) for peer in sorted(asked)]
        states = [ev.Send(peer, mode.state()) for peer in sorted(self._connected)]
        self._carry_out([*refusals, *states], set())

    def _log_no_room(self, full: JournalFull, remedy: str) -> None:
        self._log("error", "no_room", {"reason": full.reason, "remedy": remedy})

    def _run_once_disk_full(self, mode: DiskFullMode) -> None:
        """Run one iteration that makes no decisions; retry writing those that are not yet durable."""
        for event in self._transport.poll(MAX_WAIT_S):
            self._carry_out(self._handle_event_disk_full(mode, event), set())
        if self._real_clock() < mode.retry_at_s:
            return
        mode.retry_at_s = self._real_clock() + RETRY_S
        self._update_dashboard(self._membership.status(mode.core_stopped_s), mode.core_stopped_s)
        try:
            self._make_durable(mode.effects)
        except JournalFull:
            return
        self._leave_disk_full_mode(mode)

    def _handle_event_disk_full(self, mode: DiskFullMode, event: TransportEvent) -> Sequence[ev.Effect]:
        self._track_connection(event)
        match event:
            case Received(peer) if not self._access.may_send(peer):
                return []
            case Received(peer, StatusRequest()) if not self._access.is_pending(peer):
                return self._answer_status(peer, mode.core_stopped_s)
            case Received(peer) if self._access.is_pending(peer) or self._access.is_operator(peer):
                return [ev.Send(peer, refusal(mode.cause))]
            case PeerUp(peer):
                if self._access.on_connected(event):
                    return []
                return [ev.Send(peer, mode.state()), *mode.queue_event(event, self._real_clock())]
            case PeerDown(peer) if self._access.on_disconnected(peer):
                return []
            case ConnectionDenied() | VersionMismatch():
                return self._handle_event(event, mode.core_stopped_s)
            case _:
                return mode.queue_event(event, self._real_clock())

    def _leave_disk_full_mode(self, mode: DiskFullMode) -> None:
        """Carry out the held-back effects, whose entries are now durable, then handle the queued events."""
        self._disk_full = None
        self._core_clock_lag_s += self._real_clock() - mode.began_s
        now_s = self._clock()
        self._log("info", "room_again", {"after_s": round(self._real_clock() - mode.began_s, 1)})
        losses = self._carry_out(mode.effects, set())
        effects = [effect for loss in losses for effect in self._membership.handle(loss, now_s)]
        effects += [effect for event in mode.events for effect in self._handle_event(event, now_s)]
        status = self._membership.status(now_s)
        state = RunStateUpdate(status["phase"], status["reason"])
        self._perform([*effects, *(ev.Send(peer, state) for peer in sorted(self._connected))], now_s)

    def _poll_backup(self, backups: Backups, now_s: float) -> None:
        failed_before = backups.failure
        try:
            path = backups.poll(now_s)
        except JournalError as error:
            if error.reason != failed_before:
                self._log("error", "backup_failed", {"reason": error.reason, "remedy": error.remedy})
            return
        if failed_before and path is not None:
            self._log("info", "backup", {"path": str(path), "reason": "the folder is writable again"})

    def _finish_backups(self, backups: Backups) -> None:
        """Wait for the backup that is being written; then make another if there are later entries."""
        backups.wait(self._clock())
        self._poll_backup(backups, self._clock())
        if backups.is_pending and not backups.is_writing:
            backups.begin(self._store, self._clock())
            backups.wait(self._clock())
            self._poll_backup(backups, self._clock())

    # -- status and orders ---------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the core's status.  Call only from the loop's thread, or after `run` has returned."""
        return self._membership.status(self._clock())

    def _answer_status(self, requester: PeerId, now_s: float) -> Sequence[ev.Effect]:
        """Return the effect that sends the status, or none if the requester has asked too often.

        Requests that are not answered are read quickly, so that the transport notices a flood of them.
        """
        is_allowed = self._access.is_operator(requester) or self._status_requests.allow(
            requester, self._real_clock(), MAX_STATUS_REQUESTS
        )
        return [ev.Send(requester, StatusReply(self._encoded_status(requester, now_s)))] if is_allowed else []

    def _encoded_status(self, requester: PeerId, now_s: float) -> bytes:
        is_operator = self._access.is_operator(requester)
        status = self._membership.status(now_s)
        return encode_status(self._build_status(status, now_s, with_addresses=is_operator))

    def _update_dashboard(self, status: dict[str, Any], now_s: float) -> None:
        if self._dashboard is not None:
            self._dashboard.publish(self._build_status(status, now_s, with_addresses=True))

    def _take_orders(self, dashboard: DashboardPort) -> None:
        for order, answer in dashboard.take_orders():
            now_s = self._clock()
            if not answer.set_running_or_notify_cancel():
                continue  # the request was cancelled
            answer.set_result(self._execute_order(order, now_s))

    def _execute_order(self, order: Order, now_s: float) -> OperatorReply | Refused:
        """Carry out an operator's command and return the reply, or refuse it if it cannot be recorded.

        A command that is refused changes nothing, so that the operator can decide again once there is room.
        """
        if self._disk_full is not None:
            return refusal(self._disk_full.cause)
        try:
            effects, reply = self._access.execute_order(order, now_s, self._make_durable)
        except JournalFull as full:
            self._log_no_room(full, "free disk space, and repeat the command, which was refused")
            return refusal(full.reason)
        self._perform(effects, now_s)
        return reply if self._disk_full is None else DEFERRED

    def _build_status(self, status: dict[str, Any], now_s: float, *, with_addresses: bool) -> dict[str, Any]:
        for member in status["members"]:
            member["strikes"] = self._access.violation_count(bytes.fromhex(member["peer"]))
        if with_addresses:
            status["door"] = self._access.status()
            if self._backups is not None:
                status["backup"] = self._backups.status(now_s)
            if self._is_journal_missing:
                status["alert"] = f"{JOURNAL_MISSING}; {MISSING_REMEDY}"
        else:
            redact_addresses(status)
        status["bundle"] = self._bundle_server.status()
        status["refused_versions"] = self._refused_versions.rows(now_s)
        if self._disk_full is not None:
            self._disk_full.update_status(status, self._connected, self._real_clock())
        return build_status(
            status,
            self._rates,
            software=SOFTWARE,
            address=self._address,
            now_s=now_s,
            uptime_s=now_s - self._started_s,
        )

    def _run_housekeeping(self, now_s: float) -> None:
        """Review suspected accusers, sample counters, update the dashboard, and determine when to exit.

        Called once a second.
        """
        self._perform(self._access.tick(now_s), now_s)
        status = self._membership.status(now_s)
        self._rates.observe(status, now_s)
        self._update_dashboard(status, now_s)
        was_missing, self._is_journal_missing = self._is_journal_missing, self._store.is_missing
        if self._is_journal_missing and not was_missing:
            self._log("error", "journal_missing", {"reason": JOURNAL_MISSING, "remedy": MISSING_REMEDY})
        self._finished_s = min(self._finished_s, now_s) if status["finished"] else math.inf
        is_pending = self._membership.is_model_pending
        delay_s = (WRITING_DELAY_S if is_pending else EXIT_DELAY_S) if status["members"] else 0.0
        self._exit_deadline_s = self._finished_s + delay_s

    def _should_exit(self) -> bool:
        return self._exit_when_finished and self._clock() >= self._exit_deadline_s
