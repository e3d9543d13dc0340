"""The worker's only loop: carries effects of the member core to the transport, and events back.

Decides nothing about the protocol.  One thread (this one) owns the transport, the core and the
workspaces while a round is open; the trainer's thread hands in commands and waits for pictures.

    trainer's thread                this thread                                        network
      parts --- commands, in order --> MemberCore.handle --> effects --> parts, Transport.send
      wait <--- Picture (immutable) <-- Painter <--+    ^--- events <---------- Transport.poll

The state lies in parts, each in a module of its own, of which none knows this one:

    meeting       where the two threads meet: commands, the picture, the lock of all that both touch
    rounds        collectives and their numbers, until their round is over
    giving        the state of this worker, for members of a generation that forms
    taking        the state that it lacks itself, then
    donating      its state and each update, for followers, while rounds go on
    catching_up   as a follower itself
    residuals     that change hands
    disk_duties   checkpoints of stages
    signs         of life, and figures
    owed, measuring, patience: this thread's alone
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import SystemRandom

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.core.member.member import MemberCore
from gridtrain.errors import (
    BudgetSpent,
    CoordinatorUnreachable,
    GridtrainError,
    JoinRefused,
    RemoteProtocolError,
    TransportError,
)
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    PeerDown,
    PeerUp,
    Received,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.network.transport.zmq import tcp_options
from gridtrain.runtime.event_log import log_event
from gridtrain.runtime.heartbeat import HeartbeatSource
from gridtrain.runtime.link_probe import LinkProbe
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.reconnect_policy import ReconnectPolicy
from gridtrain.runtime.snapshot_builder import SnapshotBuilder
from gridtrain.runtime.state_transfer.catch_up_session import CatchUpSession
from gridtrain.runtime.state_transfer.catch_up_source import CatchUpSource
from gridtrain.runtime.state_transfer.checkpoint_requests import CheckpointRequests
from gridtrain.runtime.state_transfer.residuals import ResidualExchange
from gridtrain.runtime.state_transfer.state_receiver import StateReceiver
from gridtrain.runtime.state_transfer.state_sender import StateSender
from gridtrain.runtime.step_rounds import StepRounds

log = logging.getLogger("gridtrain")

HOUSEKEEPING_INTERVAL_S = 0.005
"""While payloads come and go one after the other, everything that is not theirs waits for so long."""

PEER_EFFECTS = (
    io.ApplyToBuffer
    | io.StoreStateBlock
    | io.StoreCheckpointBlock
    | io.DeliverCatchUpMessage
    | io.StoreResidualBlock
)
"""What a peer has sent: it answers for what is wrong with it."""

PAYLOAD_EFFECTS = io.ApplyToBuffer | io.SendPayload | io.CollectiveCompleted
"""What follows from a payload while a round goes its way; the trainer is told of it without a picture."""

ROUND_MESSAGES = (m.Data, m.Vote)
"""Messages that change nothing but the round they are of: a vote, until the last one is there."""


class IoLoop:
    """Runs a `MemberCore` over a `Transport` in a thread of its own.

    Args:
        transport: owned by this driver's thread from `start` on.
        config: addresses, names and deadlines.
        acquaintances: the transport's gate; this driver keeps it up to date.

    Attributes:
        spent: asked each turn: why nothing more may be sent or received.
    """

    def __init__(
        self, transport: FlowControlTransport, config: JoinConfig, acquaintances: PeerAllowlist
    ) -> None:
        self._transport = transport
        self._config = config
        self._allowlist = acquaintances
        self._coordinator = bytes.fromhex(config.coordinator_key)
        self._core: MemberCore  # from `start` on
        donate_Bps = parse_rate(config.donate_limit) if config.donate_limit else None
        deadlines = config.deadlines
        self.mailbox = Mailbox(transport.wake)
        self.catch_up_source = CatchUpSource(donate_Bps, self.mailbox.mark_stale)
        self.step_rounds = StepRounds(self.mailbox, self.catch_up_source.record_step)
        self.state_sender, self.state_receiver = StateSender(self.mailbox), StateReceiver(self.mailbox)
        self.catch_up = CatchUpSession(self.mailbox, self.state_receiver.blobs, idle_s=deadlines.ready_s / 4)
        self.residuals = ResidualExchange(self.mailbox)
        self.checkpoint_requests = CheckpointRequests(self.mailbox, donate_Bps)
        self.heartbeat = HeartbeatSource(self.mailbox)
        self._snapshot_builder = SnapshotBuilder(
            self.state_sender,
            self.state_receiver,
            self.catch_up_source,
            self.catch_up,
            self.residuals,
            self.checkpoint_requests,
        )
        self._link_probe = LinkProbe(transport, deadlines.probe_s, SystemRandom())
        self._reconnect_policy = ReconnectPolicy(config.coordinator, deadlines.paused_s)
        self._average: list[float | None] = []  # the answer that the trainer waits for
        self._is_payload_only = (
            False  # all that came in this turn went into numbers and on to others, or left
        )
        self._housekeeping_s = -math.inf  # when they were done last
        self._heartbeat_s = 0.0  # when the next sign of life is due
        self.budget_exhausted: Callable[[], str] = lambda: ""
        self._thread = threading.Thread(target=self._main, name="gridtrain-io", daemon=True)

    # -- the trainer's thread --------------------------------------------------------------------

    def start(self) -> None:
        """Listen, dial the coordinator and wait for its welcome.

        Raises `CoordinatorUnreachable`, `JoinRefused`, `TransportError`.
        """
        config = self._config
        address = self._transport.listen(config.listen)
        join = m.Join(config.run, config.name, config.advertise or address, config.relay != "no")
        self._core = MemberCore(self._transport.me, self._coordinator, join, config.deadlines)
        self._transport.dial(self._coordinator, config.coordinator)
        self._thread.start()
        timeout_s = self._config.deadlines.connect_s
        if not self.wait(lambda p: p.is_welcomed, timeout_s):
            self.stop()
            raise CoordinatorUnreachable(
                f"no coordinator answered at {self._config.coordinator} within {timeout_s:g} s",
                remedy="check the address and the port, and that `gridtrain coordinator` is running there",
            )

    def wait(
        self, ready: Callable[[WorkerSnapshot], bool], timeout_s: float = math.inf
    ) -> WorkerSnapshot | None:
        """See `Meeting.wait`."""
        return self.mailbox.wait(ready, timeout_s)

    def snapshot(self) -> WorkerSnapshot:
        """See `Meeting.look`."""
        return self.mailbox.read()

    @property
    def last_snapshot(self) -> WorkerSnapshot:
        """As `look`, also when the loop has ended."""
        return self.mailbox.snapshot

    def submit(self, event: io.MemberEvent) -> None:
        """See `Meeting.command`."""
        self.mailbox.submit(event)

    def average(self, step: int, index: int, value: float, timeout_s: float) -> float | None:
        """The group's average of `value`; None if the generation ended, or nobody answered in time."""
        with self.mailbox.condition:
            self._average = []
        self.submit(io.RequestMean(step, index, value))
        self.wait(lambda _: bool(self._average), timeout_s)
        return self._average[0] if self._average else None

    @property
    def me(self) -> m.PeerId:
        """This worker's key."""
        return self._transport.me

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes sent and received so far by message type."""
        counts = self._transport.traffic
        names = set(counts.sent_bytes) | set(counts.received_bytes)
        return {n: (counts.sent_bytes.get(n, 0), counts.received_bytes.get(n, 0)) for n in names}

    def stop(self, reason: str = "", *, pausing: bool = False) -> None:
        """Leave (if `reason` is given), flush and release everything; idempotent.

        `pausing`: this worker means to come back, over another driver.
        """
        if reason and self.mailbox.error is None and self._thread.is_alive():
            self.submit(io.LeaveGroup(reason, pausing))
        self.mailbox.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

    # -- this thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        tcp_options.keep_freed_pages()
        try:
            while True:
                stopping = self.mailbox.is_stopping
                brought = self.state_sender.take_supplied()
                self._run_commands()
                self.state_sender.store_supplied(brought, self._core.generation)
                if self.mailbox.is_stale or self.step_rounds.has_ended:
                    self.mailbox.is_stale = False  # first: what others change meanwhile is published next
                    self._publish()  # before the next wait: a lone worker's round is over already
                if stopping:
                    return
                self._run_once()
        except BaseException as error:  # the trainer must hear of it, whatever it is
            if not isinstance(error, GridtrainError):
                log.exception("gridtrain's loop crashed")
            self.mailbox.fail(error)
        finally:
            self._transport.close()

    def _run_commands(self) -> bool:
        """Do what the trainer's thread has brought; True: it was something."""
        commands = self.mailbox.take_commands()
        for command in commands:
            self._handle(command)
        return bool(commands)

    def _run_once(self) -> None:
        if why := self.budget_exhausted():
            raise BudgetSpent(why, remedy="nothing: this worker trains again when there are bytes again")
        events = self._transport.poll(self._wait_s(time.monotonic()))
        self._is_payload_only = True
        for event in events:
            if not (type(event) is Received and type(event.message) in ROUND_MESSAGES):
                self._is_payload_only = False
            self._handle_transport_event(event)
        brought = self._run_commands()  # a payload that is to leave waits for no chore
        self._is_payload_only = self._is_payload_only and (brought or bool(events))
        if self.step_rounds.has_ended:
            self._publish()  # nor does the trainer, which waits for the outcome
        self.step_rounds.hash_ahead()
        now_s = time.monotonic()
        self._transport.return_credit(self._core.early_bytes)  # nor do those who want to send more
        if not self._is_payload_only or now_s >= self._housekeeping_s + HOUSEKEEPING_INTERVAL_S:
            self._do_housekeeping(now_s)

    def _wait_s(self, now_s: float) -> float:
        """How long the network may be waited for."""
        at_once = (
            self.state_sender.has_data(self._transport)
            or self.step_rounds.has_hash_work
            or self.state_receiver.forwarder.has_data(self._transport)
        )
        due_s = min(
            self._heartbeat_s,
            self._core.deadline_s,
            self.catch_up_source.due_s(self._transport),
            self.checkpoint_requests.due_s,
        )
        return 0.0 if at_once else min(max(0.0, due_s - now_s), self._config.deadlines.beat_s)

    def _do_housekeeping(self, now_s: float) -> None:
        """All that is of no payload."""
        self._housekeeping_s = now_s
        self.mailbox.is_stale = True
        if now_s >= self._heartbeat_s:
            self._heartbeat_s = now_s + self._config.deadlines.beat_s
            self._send_heartbeat()
        if now_s >= self._core.deadline_s:
            self._execute(self._core.tick(now_s))
        self._report_links(now_s)
        self._send_all(self.catch_up_source.send_due(self._transport, now_s))
        self._report_catch_up(now_s)
        sent = self.state_sender.send_pending(self._transport)
        sent += self.state_receiver.forwarder.send_pending(self._transport)
        sent += self.checkpoint_requests.pump(self._transport, now_s, self._core.generation)
        with self.mailbox.condition:
            self.mailbox.progress += sent
        if self._core.phase is io.MemberPhase.RUNNING:
            self.state_sender.clear()
            self.state_receiver.forwarder.clear()
        self._reconnect_policy.handle_pause(self._core.pause_reason, now_s)

    def _send_heartbeat(self) -> None:
        left_bytes = self.state_receiver.blobs.remaining_bytes(self._core.generation)
        self._handle(self.heartbeat.make_heartbeat(self.traffic, left_bytes))

    def _report_links(self, now_s: float) -> None:
        rates, probed = self._link_probe.poll(now_s)
        if rates is not None:
            self._send(self._coordinator, rates)
        if probed is not None:
            self._handle(probed)

    def _report_catch_up(self, now_s: float) -> None:
        seated = self._core.rank_assignment is not None
        standing = self.catch_up.poll(now_s, seated=seated, synced=self._core.is_synced)
        if standing is None:
            return
        self._send_all(standing.requests)
        if standing.event is not None:
            self._handle(standing.event)
        self.catch_up.show_progress(standing, now_s)

    def _handle_transport_event(self, event: TransportEvent) -> None:
        match event:
            case PeerUp(peer):
                if peer == self._coordinator:
                    self._reconnect_policy.connected()
                self._link_probe.peer_up(peer, time.monotonic())
                self._handle(io.PeerConnected(peer))
            case PeerDown(peer, reason):
                self._link_probe.peer_down(peer)
                self._handle(io.PeerDisconnected(peer, reason))
            case ConnectionDenied(self._coordinator):
                self._reconnect_policy.handle_denial(time.monotonic(), member=bool(self._core.term))
            case TransportViolation(self._coordinator, reason):
                raise JoinRefused("version", f"{self._config.coordinator}: {reason}")
            case TransportViolation(None, reason):
                log.info("a stranger broke the protocol: %s", reason)
            case TransportViolation(peer, reason) if peer is not None:
                self._handle(io.ProtocolViolation(peer, reason))
            case Received(peer, message, nbytes):
                self._handle_message(peer, message, nbytes)

    def _handle_message(self, peer: m.PeerId, message: m.Message, nbytes: int) -> None:
        match message:
            case m.Ping(nonce):
                self._send(peer, m.Pong(nonce))
            case m.Pong() | m.Burst() | m.BurstRequest() | m.BurstReceived():
                answers = self._link_probe.handle_message(peer, message, time.monotonic())
                if isinstance(answers, str):
                    self._handle(io.ProtocolViolation(peer, answers))
                else:
                    self._send_all([(peer, answer) for answer in answers])
            case _:
                self._handle(io.MessageReceived(peer, message, nbytes))

    def _handle(self, event: io.MemberEvent) -> None:
        """What a peer did wrong costs the round and the peer, never this worker."""
        try:
            effects = self._core.handle(event, time.monotonic())
        except RemoteProtocolError as error:
            if not isinstance(event, io.MessageReceived):
                raise
            effects = self._core.handle(io.ProtocolViolation(event.peer, error.reason), time.monotonic())
        # The usual thing, hundreds of times in a step: numbers are summed and sent on, and nothing else.
        if not (_is_round_event(event) and all(isinstance(effect, PAYLOAD_EFFECTS) for effect in effects)):
            self._is_payload_only = False
            self._allowlist.replace(self._core.known_peers)
        self._execute(effects)

    def _execute(self, effects: list[io.MemberEffect]) -> None:
        """Effects in order; what an effect leads to comes after the ones already returned."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            try:
                queue.extend(self._execute_one(effect))
            except RemoteProtocolError as error:
                self._is_payload_only = False
                self.step_rounds.mark_failed()
                culprit = effect.peer if isinstance(effect, PEER_EFFECTS) else None
                event = (
                    io.RoundFailed(str(error))
                    if culprit is None
                    else io.ProtocolViolation(culprit, error.reason)
                )
                queue.extend(self._core.handle(event, time.monotonic()))
                self._allowlist.replace(self._core.known_peers)
            except TransportError as error:
                self._is_payload_only = False
                queue.extend(self._core.handle(io.RoundFailed(str(error)), time.monotonic()))

    def _execute_one(self, effect: io.MemberEffect) -> list[io.MemberEffect]:
        match effect:
            case io.Send(peer, m.StateRequest() as ask):
                if (lacked := self.state_receiver.remaining_request(ask)) is not None:
                    self._send(peer, lacked)
            case io.Send(peer, message):
                self._send(peer, message)
            case io.SendPayload(peer):
                if (data := self.step_rounds.payload_to_send(effect)) is not None:
                    self._transport.send(peer, data)
            case io.ApplyToBuffer(channel, fill):
                self.step_rounds.apply_payload(channel, fill)
            case io.CollectiveCompleted(channel, skip):
                self.step_rounds.mark_complete(channel, skip)
            case io.ComputeDigest(skip):
                digest = self.step_rounds.compute_vote_digest(skip)
                return (
                    [] if digest is None else self._core.handle(io.DigestComputed(digest), time.monotonic())
                )
            case io.ResolveRound(round_id, committed, skip, reason):
                self.step_rounds.resolve(round_id, committed, skip, reason)
            case io.DeliverMean(value):
                with self.mailbox.condition:
                    self._average.append(value)
                    self.mailbox.condition.notify_all()
            case io.Dial(peer, address):
                self._transport.dial(peer, address)
            case io.Disconnect(peer):
                self._transport.hang_up(peer)
            case io.ProbePeers():
                self._link_probe.begin(effect, time.monotonic())
            case io.SendState():
                self.state_sender.request(effect, self._core.term)
            case io.ForwardState(peer, term, generation, have):
                self.state_receiver.forwarder.request(peer, term, generation, have)
            case io.ExpectStateDigest(generation, due):
                self.state_receiver.set_expected_digest(generation, due)
                return self._reject_state()
            case (
                io.SaveCheckpoint()
                | io.LoadCheckpoints()
                | io.DiscardCheckpoints()
                | io.SendCheckpoint()
                | io.StoreCheckpointBlock()
            ):
                self.checkpoint_requests.execute(effect)
            case io.BeginCatchUp() | io.SourceConnected() | io.SourceDisconnected() | io.SetCatchUpTarget():
                self._send_all(self.catch_up.execute(effect))
            case io.DeliverCatchUpMessage(peer, message) if (
                self._core.rank_assignment is None or not self._core.is_synced
            ):
                self._send_all(self.catch_up.handle_message(peer, message, time.monotonic()))
            case io.DeliverCatchUpMessage(peer, message):
                self._send_all(
                    [(peer, answer) for answer in self.catch_up_source.handle_request(peer, message)]
                )
            case io.TakeSnapshot():
                self.catch_up_source.set_followers(effect)
            case io.StoreStateBlock(peer, block):
                vouched = peer == self._core.state_source
                self.state_receiver.receive_block(
                    block, vouched=vouched, passes_on=self._core.is_forwarding_state
                )
                return self._reject_state()
            case io.StoreResidualBlock() | io.AddResidual() | io.DropResidual() | io.ResidualTransferEnded():
                follows = self.residuals.execute(effect)
                return [] if follows is None else self._core.handle(follows, time.monotonic())
            case io.Stop(error):
                raise error
            case io.LogEvent(event, fields):
                log_event(event, fields)
        return []

    def _reject_state(self) -> list[io.MemberEffect]:
        """What has come is not the donor's state: begin anew, with the donor itself."""
        if not self.state_receiver.drop_if_mismatched(self._core.generation):
            return []
        return self._core.handle(io.StateDigestMismatch(self._core.generation), time.monotonic())

    def _send_all(self, messages: Sequence[tuple[m.PeerId, m.Message]]) -> None:
        for peer, message in messages:
            self._send(peer, message)

    def _send(self, peer: m.PeerId, message: m.Message) -> None:
        """Control messages: what cannot be sent now is repeated by the protocol or superseded."""
        try:
            self._transport.send(peer, message)
        except TransportError as error:
            log.debug("not sent: %s to %s: %s", type(message).__name__, peer.hex()[:8], error)

    def _publish(self) -> None:
        """Replace the picture if it changed, and wake the trainer."""
        self.state_sender.drop_other_generations(self._core.generation)
        picture = self._snapshot_builder.build(self._core)
        with self.mailbox.condition:
            # Together, so that the trainer never sees an outcome beside the picture from before it.
            told = self.step_rounds.publish_ended()
            self.mailbox.publish(picture, anyway=told)


def _is_round_event(event: io.MemberEvent) -> bool:
    """Of a round alone: what a peer sends for it, what the trainer adds to it or begins before it."""
    if type(event) is io.MessageReceived:
        return type(event.message) in ROUND_MESSAGES
    return type(event) is io.AddCollectives or (type(event) is io.SubmitRound and not event.is_complete)
