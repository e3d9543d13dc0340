"""The worker's I/O loop: polls the network, executes the core's effects, and does housekeeping at intervals.

The I/O thread owns the transport, the core, and the buffers of the open round.  The training thread submits
commands and waits for snapshots.

    training thread                 I/O thread                                         network
      parts --- commands, in order --> MemberCore.handle --> effects --> parts, Transport.send
      wait <--- WorkerSnapshot <---- SnapshotBuilder <--+    ^--- events <---------- Transport.poll

The loop's state is divided among parts, which do not depend on this module:

    mailbox              commands, the snapshot, and the lock of all data that both threads use
    step_rounds          collectives and their buffers, until their round is over
    state_sender         this worker's state, for members of a generation that is forming
    state_receiver       the state that this worker needs
    catch_up_source      snapshots of the state, and updates, for workers that catch up during rounds
    catch_up             the catch-up of this worker
    residuals            residuals from and to other workers
    checkpoint_requests  the core's requests about stage checkpoints, for the trainer
    checkpoint_copier    copies of stage checkpoints, from and to other workers
    heartbeat            the content of the next heartbeat
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
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.member import MemberCore
from gridtrain.errors import (
    STALLED,
    VERSION,
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
from gridtrain.network.transport.zmq import tcp_options
from gridtrain.runtime.client.coordinator_client import name_error
from gridtrain.runtime.client.worker_defaults import default_listen_address, interface_address
from gridtrain.runtime.event_log import log_event
from gridtrain.runtime.heartbeat import HeartbeatSource
from gridtrain.runtime.link_probes.link_probe import LinkProbe
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.reconnect_policy import ReconnectPolicy
from gridtrain.runtime.snapshot_builder import SnapshotBuilder, make_step_plan
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_BYTES
from gridtrain.runtime.state_transfer.catch_up_session import CatchUpSession
from gridtrain.runtime.state_transfer.catch_up_source import CatchUpSource, donated_Bps
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointCopier
from gridtrain.runtime.state_transfer.checkpoint_requests import CheckpointRequests
from gridtrain.runtime.state_transfer.residual_mailbox import ResidualMailbox
from gridtrain.runtime.state_transfer.state_receiver import StateReceiver
from gridtrain.runtime.state_transfer.state_sender import StateSender
from gridtrain.runtime.step_rounds import StepRounds

log = logging.getLogger("gridtrain")

HOUSEKEEPING_INTERVAL_S = 0.005
"""Shortest housekeeping interval while payloads are in flight.  It applies if housekeeping is due, if this
worker is catching up, or if other workers may catch up from it."""

QUIET_INTERVAL_S = 0.1
"""Longest housekeeping interval while payloads are in flight."""

PEER_EFFECTS = (
    ev.ApplyToBuffer
    | ev.StoreStateBlock
    | ev.StoreCheckpointBlock
    | ev.DeliverCatchUpMessage
    | ev.StoreResidualBlock
)
"""Effects with data from a peer.  If the data are invalid, the peer has violated the protocol."""

ROUND_MESSAGES = frozenset({m.Data, m.Vote, m.Decision})
"""Messages that change only the round to which they belong."""

ROUND_EFFECTS = frozenset(
    {ev.ApplyToBuffer, ev.SendPayload, ev.CollectiveCompleted, ev.ComputeDigest, ev.ResolveRound}
)
"""The effects, besides `Send`, of `ROUND_MESSAGES` and of the trainer's submissions, as long as the round
does not fail.  Of these effects, only `ResolveRound` changes the snapshot, which is then published."""


class IoLoop:
    """Runs a `MemberCore` over a `Transport` in a separate thread.

    Args:
        transport: the transport, which belongs to the I/O thread once `start` is called.
        config: addresses, names and deadlines.
        allowlist: the transport's access policy, which this loop keeps up to date.
        should_interrupt: returns whether the training thread has to stop waiting; that thread calls it.
        budget_exhausted: returns why no more bytes may be sent or received; "" if more bytes are allowed.  It
            is called in each iteration of the loop.
    """

    def __init__(
        self,
        transport: FlowControlTransport,
        config: JoinConfig,
        allowlist: PeerAllowlist,
        *,
        should_interrupt: Callable[[], bool] = lambda: False,
        budget_exhausted: Callable[[], str] = lambda: "",
    ) -> None:
        self._transport = transport
        self._config = config
        self._allowlist = allowlist
        self._budget_exhausted = budget_exhausted
        self._coordinator = bytes.fromhex(config.coordinator_key)
        self._core: MemberCore  # from `start` on
        # By interface: the address that peers can dial.  Earlier addresses stay, because one may return.
        self._addresses: dict[str, str] = {}
        donate_Bps = donated_Bps(config)
        deadlines = config.deadlines
        self.mailbox = Mailbox(transport.wake, should_interrupt)
        self.catch_up_source = CatchUpSource(donate_Bps, self.mailbox.submit, config.update_log_bytes)
        self.heartbeat = HeartbeatSource(self.mailbox)
        self.step_rounds = StepRounds(
            self.mailbox, self.catch_up_source.record_step, self.heartbeat.count_missed_step
        )
        self.state_sender, self.state_receiver = StateSender(self.mailbox), StateReceiver(self.mailbox)
        self.catch_up = CatchUpSession(self.mailbox, self.state_receiver.blobs, idle_s=deadlines.ready_s / 4)
        self.residuals = ResidualMailbox(self.mailbox)
        self.checkpoint_requests = CheckpointRequests(self.mailbox)
        self.checkpoint_copier = CheckpointCopier(None, donate_Bps, MAX_STATE_BYTES)
        self._snapshot_builder = SnapshotBuilder(
            self.state_sender,
            self.state_receiver,
            self.catch_up_source,
            self.catch_up,
            self.residuals,
            self.checkpoint_requests,
            self.step_rounds,
        )
        self._link_probe = LinkProbe(transport, deadlines.probe_s, SystemRandom())
        self._reconnect_policy = ReconnectPolicy(config.coordinator, deadlines.paused_s)
        self._averages: dict[tuple[int, int], ev.DeliverMean] = {}  # for the trainer, by step and index
        self._is_payload_only = False  # only payloads were received and sent since the last iteration
        self._is_snapshot_due = False
        self._housekeeping_s = -math.inf  # when housekeeping was done last
        self._beat_s = deadlines.beat_s
        self._heartbeat_s = 0.0  # when the next heartbeat is due
        self._thread = threading.Thread(target=self._main, name="gridtrain-io", daemon=True)

    # -- training thread -------------------------------------------------------------------------

    def start(self, timeout_s: float | None = None) -> None:
        """Start the I/O thread, connect to the coordinator, and wait until it welcomes this worker.

        Args:
            timeout_s: how long to wait; None for `Deadlines.connect_s`.

        Raises:
            CoordinatorUnreachable: the coordinator did not welcome this worker in time.
            JoinRefused: the coordinator refuses this worker, or uses another version of the protocol.
            TransportError: an address cannot be used.
        """
        config = self._config
        interface = config.listen or default_listen_address(config.coordinator)
        address = self._addresses[interface] = self._transport.listen(interface)
        join = m.Join(config.run, config.name, config.advertise or address, config.relay != "no")
        self._core = MemberCore(self._transport.me, self._coordinator, join, config.deadlines)
        self._transport.dial(self._coordinator, config.coordinator)
        self._thread.start()
        timeout_s = config.deadlines.connect_s if timeout_s is None else timeout_s
        if not self.mailbox.wait(lambda here: here.is_welcomed, timeout_s):
            self.stop()
            raise name_error(config.coordinator) or CoordinatorUnreachable(
                f"no coordinator answered at {self._config.coordinator} within {timeout_s:g} s",
                remedy="check the address and the port, and that `gridtrain coordinator` is running there",
            )

    def request_average(self, step: int, index: int, value: float) -> None:
        """Contribute a value to the mean with this step and index, without waiting for the mean.

        `await_average` returns this mean; means that arrived earlier are dropped.
        """
        with self.mailbox.condition:
            self._averages.clear()
        self.mailbox.submit(ev.RequestMean(step, index, value))

    def await_average(self, step: int, index: int, timeout_s: float) -> ev.DeliverMean | None:
        """Wait for the mean of the members' values and return it.

        Returns None if it does not arrive within `timeout_s`, or if the trainer has to stop waiting while no
        generation is running.
        """
        self.mailbox.wait(
            lambda here: (
                (step, index) in self._averages
                or (here.phase is not ev.MemberPhase.RUNNING and self.mailbox.should_interrupt())
            ),
            timeout_s,
        )
        with self.mailbox.condition:
            return self._averages.get((step, index))

    @property
    def me(self) -> m.PeerId:
        """This worker's key."""
        return self._transport.me

    @property
    def waiting_reason(self) -> str:
        """Why this worker is not training (`ReconnectPolicy.waiting_reason`).  Thread-safe."""
        return self._reconnect_policy.waiting_reason

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """The number of bytes (sent, received) so far by message type."""
        counts = self._transport.traffic
        names = set(counts.sent_bytes) | set(counts.received_bytes)
        return {n: (counts.sent_bytes.get(n, 0), counts.received_bytes.get(n, 0)) for n in names}

    def stop(self, reason: str = "", *, pausing: bool = False) -> None:
        """Stop the I/O thread and release all resources.  Further calls have no effect.

        Args:
            reason: why this worker leaves the run; if it is empty, the coordinator is not notified.
            pausing: whether this worker intends to rejoin with a new I/O loop.
        """
        if reason and self.mailbox.error is None and self._thread.is_alive():
            self.mailbox.submit(self._send_heartbeat)  # so that the coordinator knows this worker's last step
            self.mailbox.submit(ev.LeaveGroup(reason, pausing))
        self.mailbox.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

    # -- I/O thread ------------------------------------------------------------------------------

    def _main(self) -> None:
        tcp_options.keep_freed_pages()
        try:
            while True:
                is_stopping = self.mailbox.is_stopping
                self._run_commands()
                self._publish_if_due()  # before the next wait, because a lone worker's round may be over
                if is_stopping:
                    return
                self._run_once()
        except BaseException as error:  # any error is raised again in the training thread
            if not isinstance(error, GridtrainError):
                log.exception("gridtrain's I/O loop crashed")
            self.mailbox.fail(error)
        finally:
            self._transport.close()
            self.checkpoint_copier.close()  # last, so that no peer waits for this worker's disk

    def _run_commands(self) -> bool:
        """Carry out the submitted commands; return whether there were any."""
        commands = self.mailbox.take_commands()
        if commands:
            self.state_sender.drop_other_generations(self._core.generation)
        for command in commands:
            if callable(command):
                command()
                self._is_payload_only = False  # housekeeping sends the messages that result from the call
            else:
                self._handle(command)
        return bool(commands)

    def _run_once(self) -> None:
        if reason := self._budget_exhausted():
            raise BudgetSpent(reason, remedy="wait until more bytes are allowed, or raise the limit")
        now_s = time.monotonic()
        due_s = self._due_s(now_s)
        wait_s = 0.0 if self.step_rounds.has_hash_work else min(max(0.0, due_s - now_s), self._beat_s)
        events = self._transport.poll(wait_s)
        for event in events:
            self._handle_transport_event(event)
        # Payloads to send, the outcome for the trainer and credit for peers come before housekeeping.
        had_commands = self._run_commands()
        if self.step_rounds.has_ended:
            self._publish()
        self.step_rounds.hash_ahead()
        self._transport.return_credit(self._core.early_bytes)
        now_s = time.monotonic()
        # An iteration without events or commands, such as one that hashes a slice, is idle only at `due_s`.
        is_idle = not (had_commands or events) and now_s >= due_s
        if is_idle or not self._is_payload_only or self._is_housekeeping_due(due_s, now_s):
            self._do_housekeeping(now_s)
        self._is_payload_only = True  # reset here, because commands are also carried out between iterations

    def _due_s(self, now_s: float) -> float:
        """Return the time at which the loop has to act next even if no message arrives."""
        if self.state_sender.has_data(self._transport) or self.state_receiver.forwarder.has_data(
            self._transport
        ):
            return now_s
        return min(
            self._heartbeat_s,
            self._core.deadline_s,
            self.catch_up_source.due_s(self._transport),
            self.checkpoint_copier.due_s,
        )

    def _is_housekeeping_due(self, due_s: float, now_s: float) -> bool:
        """Return whether housekeeping has to interrupt a stream of payloads."""
        since_s = now_s - self._housekeeping_s
        is_transferring = self.catch_up_source.has_receivers or self.catch_up.is_active
        is_due = is_transferring or now_s >= due_s
        return since_s >= (HOUSEKEEPING_INTERVAL_S if is_due else QUIET_INTERVAL_S)

    def _do_housekeeping(self, now_s: float) -> None:
        """Do all work of the loop that does not concern payloads."""
        self._housekeeping_s = now_s
        self._is_snapshot_due = True
        if now_s >= self._heartbeat_s:
            self._heartbeat_s = now_s + self._beat_s
            self._send_heartbeat()
        if now_s >= self._core.deadline_s:
            self._execute(self._core.tick(now_s))
        self._contribute_if_absent()
        self._report_links(now_s)
        self._send_all(self.catch_up_source.send_due(self._transport, now_s))
        self._report_catch_up(now_s)
        sent = self.state_sender.send_pending(self._transport)
        sent += self.state_receiver.forwarder.send_pending(self._transport)
        sent += self.checkpoint_copier.send_next(self._transport, now_s, self._core.generation)
        if sent:
            self.mailbox.count_progress(sent)
        if self._core.phase is ev.MemberPhase.RUNNING:
            self.state_sender.clear()
            self.state_receiver.forwarder.clear()
        is_leaving = self._core.residual_transfer.is_refusing
        has_continued = self.mailbox.is_trainer_waiting and not is_leaving
        if self._reconnect_policy.should_rejoin(now_s, trainer_waiting=has_continued):
            self._transport.dial(self._coordinator, self._config.coordinator)
        self._reconnect_policy.handle_pause(self._core.pause_reason, now_s)

    def _contribute_if_absent(self) -> None:
        """Submit an empty contribution if the group proceeds without this worker's trainer."""
        absent, generation = self._core.absent_round, self._core.current_generation
        if absent is None or generation is None:
            return
        round_id, settings = absent
        plan = make_step_plan(generation, round_id)
        for event in self.step_rounds.contribute_nothing(round_id, plan, settings):
            self._handle(event)

    def _send_heartbeat(self) -> None:
        left_bytes = self.state_receiver.blobs.remaining_bytes(self._core.generation)
        self._handle(self.heartbeat.make_heartbeat(self._transport.traffic, left_bytes))

    def _report_links(self, now_s: float) -> None:
        rates, probed = self._link_probe.poll(now_s)
        if rates is not None:
            self._send(self._coordinator, rates)
        if probed is not None:
            self._handle(probed)

    def _report_catch_up(self, now_s: float) -> None:
        is_member = self._core.rank_assignment is not None
        requests, event = self.catch_up.poll(now_s, is_member=is_member, synced=self._core.is_synced)
        self._send_all(requests)
        if event is not None:
            self._handle(event)

    def _handle_transport_event(self, event: TransportEvent) -> None:
        if type(event) is Received:
            self._handle_message(event.peer, event.message, event.nbytes)
            return
        self._is_payload_only = False
        match event:
            case PeerUp(peer, host=host):
                if peer == self._coordinator:
                    self._reconnect_policy.connected()
                    self._follow_interface(host)
                self._link_probe.peer_up(peer, time.monotonic())
                self._handle(ev.PeerConnected(peer))
            case PeerDown(peer, reason):
                self._link_probe.peer_down(peer)
                self._handle(ev.PeerDisconnected(peer, reason))
            case ConnectionDenied(self._coordinator):
                self._reconnect_policy.handle_denial(time.monotonic(), member=bool(self._core.term))
            case TransportViolation(self._coordinator, reason):
                raise JoinRefused(VERSION, f"{self._config.coordinator}: {reason}")
            case TransportViolation(None, reason):
                log.info("an unknown peer violated the protocol: %s", reason)
            case TransportViolation(peer, reason) if peer is not None:
                self._handle(ev.ProtocolViolation(peer, reason))

    def _follow_interface(self, host: str) -> None:
        """Listen at another address if this machine now uses another address to reach the coordinator, whose
        IP address is `host`, for example after a change of the Wi-Fi network."""
        interface = "" if self._config.listen or not host else interface_address(host)
        if not interface:
            return
        if interface not in self._addresses:
            try:
                self._addresses[interface] = self._transport.listen(interface)
            except TransportError as error:
                log.warning("other workers cannot connect to this machine's new address: %s", error)
                return
            log.info("this machine's address has changed; now listening on %s", self._addresses[interface])
        self._handle(ev.AddressChanged(self._config.advertise or self._addresses[interface]))

    def _handle_message(self, peer: m.PeerId, message: m.Message, nbytes: int) -> None:
        match message:
            case m.Data():
                self._receive_data(peer, message, nbytes)
            case m.Ping(nonce):
                self._send(peer, m.Pong(nonce))
            case m.Pong() | m.Burst() | m.BurstRequest() | m.BurstReceived():
                self._is_payload_only = False  # housekeeping reports the results of the measurement
                answers = self._link_probe.handle_message(peer, message, time.monotonic())
                if isinstance(answers, str):
                    self._handle(ev.ProtocolViolation(peer, answers))
                else:
                    self._send_all([(peer, answer) for answer in answers])
            case _:
                self._handle(ev.MessageReceived(peer, message, nbytes))

    def _handle(self, event: ev.MemberEvent) -> None:
        """Pass an event to the core and execute the effects.

        If a peer has violated the protocol, its connection is closed, and this worker continues.
        """
        try:
            effects = self._core.handle(event, time.monotonic())
        except RemoteProtocolError as error:
            if not isinstance(event, ev.MessageReceived):
                raise
            effects = self._core.handle(ev.ProtocolViolation(event.peer, error.reason), time.monotonic())
        if not (_is_round_event(event) and all(map(_is_round_effect, effects))):
            self._is_payload_only = False
            self._allowlist.replace(self._core.known_peers)
        self._execute(effects)

    def _receive_data(self, peer: m.PeerId, data: m.Data, nbytes: int) -> None:
        """Pass a payload to the core and execute the effects.

        This method is called more often than any other, hundreds of times in a step.  The effects of a
        payload usually concern only the round.
        """
        try:
            effects = self._core.receive_data(peer, data, nbytes, time.monotonic())
        except RemoteProtocolError as error:
            self._handle(ev.ProtocolViolation(peer, error.reason))
            return
        if not all(map(_is_round_effect, effects)):
            self._is_payload_only = False
            self._allowlist.replace(self._core.known_peers)
        self._execute(effects)

    def _execute(self, effects: list[ev.MemberEffect]) -> None:
        """Execute the effects in order, and then the effects that result from executing them."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            try:
                queue.extend(self._execute_one(effect))
            except RemoteProtocolError as error:
                self._is_payload_only = False
                self.step_rounds.mark_failed()
                event: ev.MemberEvent = ev.RoundFailed(str(error))
                if isinstance(effect, PEER_EFFECTS):
                    event = ev.ProtocolViolation(effect.peer, error.reason)
                queue.extend(self._core.handle(event, time.monotonic()))
                self._allowlist.replace(self._core.known_peers)
            except TransportError as error:
                self._is_payload_only = False
                queue.extend(self._core.handle(ev.RoundFailed(str(error)), time.monotonic()))

    def _execute_one(self, effect: ev.MemberEffect) -> list[ev.MemberEffect]:
        """Execute an effect on rounds or connections; return the effects that result from it."""
        match effect:
            case ev.SendPayload(peer):
                if (data := self.step_rounds.payload_to_send(effect)) is not None:
                    self._transport.send(peer, data)
            case ev.ApplyToBuffer(channel, fill):
                self.step_rounds.apply_payload(channel, fill)
            case ev.CollectiveCompleted(channel, flags):
                self.step_rounds.mark_complete(channel, flags)
            case ev.ComputeDigest(flags):
                digest = self.step_rounds.compute_vote_digest(flags)
                if digest is not None:
                    return self._core.handle(ev.DigestComputed(digest), time.monotonic())
            case ev.ResolveRound():
                self.step_rounds.resolve(effect)
            case ev.DeliverMean(step, index):
                with self.mailbox.condition:
                    self._averages[step, index] = effect
                    self.mailbox.condition.notify_all()
            case ev.Send(peer, m.StateRequest() as request):
                self._request_state(peer, request)
            case ev.Send(peer, message):
                self._send(peer, message)
            case ev.Dial(peer, address):
                self._transport.dial(peer, address)
            case ev.Disconnect(peer):
                self._transport.hang_up(peer)
            case ev.ProbePeers():
                self._link_probe.begin(effect, time.monotonic())
            case ev.Stop(error):
                if not (isinstance(error, JoinRefused) and error.code == STALLED):
                    raise error
                return self._await_trainer()
            case ev.LogEvent("offline") if self._reconnect_policy.is_left_out:
                pass  # this worker has disconnected itself, until its training loop continues
            case ev.LogEvent(event, fields):
                log_event(event, fields)
            case _:
                return self._execute_transfer(effect)
        return []

    def _await_trainer(self) -> list[ev.MemberEffect]:
        """Disconnect from the coordinator, which has removed this worker because its training loop stalled;
        return the effects that result.

        The worker reconnects when the loop continues (`ReconnectPolicy.should_rejoin`).
        """
        self._transport.hang_up(self._coordinator)
        self._reconnect_policy.trainer_stalled()
        effects = self._core.handle(ev.PeerDisconnected(self._coordinator, "stalled"), time.monotonic())
        return [effect for effect in effects if not isinstance(effect, ev.LogEvent)]

    def _execute_transfer(self, effect: ev.MemberEffect) -> list[ev.MemberEffect]:
        """Execute an effect that concerns state transfer; return the effects that result from it."""
        match effect:
            case ev.SendState():
                self.state_sender.request(effect)
            case ev.ForwardState(peer, term, generation, blocks_received):
                self.state_receiver.forwarder.request(peer, term, generation, blocks_received)
            case ev.ExpectStateDigest(generation, digest):
                self.state_receiver.set_expected_digest(generation, digest)
                return self._reject_state()
            case ev.SaveCheckpoint() | ev.LoadCheckpoints() | ev.DiscardCheckpoints():
                self.checkpoint_requests.add(effect)
            case ev.SendCheckpoint():
                self.checkpoint_copier.send(effect)
            case ev.StoreCheckpointBlock(_, block):
                self.mailbox.count_progress()
                self.checkpoint_copier.receive(block)
            case ev.BeginCatchUp() | ev.SourceConnected() | ev.SourceDisconnected() | ev.SetCatchUpTarget():
                self._send_all(self.catch_up.execute(effect))
            case ev.DeliverCatchUpMessage(peer, message) if (
                self._core.rank_assignment is None or not self._core.is_synced
            ):
                self._send_all(self.catch_up.handle_message(peer, message, time.monotonic()))
            case ev.DeliverCatchUpMessage(peer, message):
                self._send_all(
                    [(peer, answer) for answer in self.catch_up_source.handle_request(peer, message)]
                )
            case ev.TakeStateSnapshot():
                self.catch_up_source.set_receivers(effect)
            case ev.StoreStateBlock(peer, block):
                current = self._core.current_generation
                if current is not None:
                    incoming = current.incoming_state
                    is_forwarding = incoming.forwarding.downstream is not None
                    vouched = peer == incoming.source
                    if self.state_receiver.receive_block(block, vouched=vouched, is_forwarding=is_forwarding):
                        return incoming.request()
                return self._reject_state()
            case ev.StoreResidualBlock() | ev.AddResidual() | ev.DropResidual() | ev.ResidualTransferEnded():
                event = self.residuals.execute(effect)
                if event is not None:
                    return self._core.handle(event, time.monotonic())
        return []

    def _request_state(self, peer: m.PeerId, request: m.StateRequest) -> None:
        """Send a request for the state, reduced to the blocks that have not arrived yet."""
        current = self._core.current_generation
        if current is not None:
            incoming = current.incoming_state
            position, to_source = incoming.shared_position, peer == incoming.source
            remaining = self.state_receiver.remaining_request(request, position, to_source=to_source)
            if remaining is not None:
                self._send(peer, remaining)

    def _reject_state(self) -> list[ev.MemberEffect]:
        """Drop the received state if it differs from the source's state; return the effects that follow.

        The core then requests the state again, from the state source itself.
        """
        if not self.state_receiver.drop_if_mismatched(self._core.generation):
            return []
        return self._core.handle(ev.StateDigestMismatch(self._core.generation), time.monotonic())

    def _send_all(self, messages: Sequence[tuple[m.PeerId, m.Message]]) -> None:
        for peer, message in messages:
            self._send(peer, message)

    def _send(self, peer: m.PeerId, message: m.Message) -> None:
        """Send a control message.

        A message that cannot be sent now is dropped, because the protocol repeats or supersedes it.
        """
        try:
            self._transport.send(peer, message)
        except TransportError as error:
            log.debug("cannot send %s to %s: %s", type(message).__name__, peer.hex()[:8], error)

    def _publish_if_due(self) -> None:
        is_due = self.mailbox.take_stale() or self._is_snapshot_due or self.step_rounds.has_ended
        if is_due:
            self._is_snapshot_due = False
            self._publish()

    def _publish(self) -> None:
        """Replace the snapshot if it has changed, and wake the trainer."""
        self.state_sender.drop_other_generations(self._core.generation)
        snapshot = self._snapshot_builder.build(self._core)
        with self.mailbox.condition:
            # Both are published together, so that the trainer never sees an outcome with an older snapshot.
            has_ended = self.step_rounds.publish_ended()
            self.mailbox.publish(snapshot, wake=has_ended)


def _is_round_event(event: ev.MemberEvent) -> bool:
    """Return whether the event concerns only a round: a peer's message for it, or a submission."""
    if type(event) is ev.MessageReceived:
        return type(event.message) in ROUND_MESSAGES
    return type(event) is ev.SubmitRound or type(event) is ev.AddCollectives


def _is_round_effect(effect: ev.MemberEffect) -> bool:
    """Return whether the effect concerns only a round."""
    if type(effect) is ev.Send:
        return type(effect.message) in ROUND_MESSAGES
    return type(effect) in ROUND_EFFECTS
