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
from gridtrain.errors import (
    BudgetSpent,
    CoordinatorUnreachable,
    GridtrainError,
    JoinRefused,
    RemoteProtocolError,
    TransportError,
)
from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.member import MemberCore
from gridtrain.runtime.acquaintances import Acquaintances
from gridtrain.runtime.catching_up import CatchingUp
from gridtrain.runtime.disk_duties import DiskDuties
from gridtrain.runtime.donating import Donating
from gridtrain.runtime.giving import Giving
from gridtrain.runtime.measuring import Measuring
from gridtrain.runtime.meeting import Meeting
from gridtrain.runtime.owed import Owed
from gridtrain.runtime.painter import Painter
from gridtrain.runtime.patience import Patience
from gridtrain.runtime.picture import Picture
from gridtrain.runtime.residuals import Residuals
from gridtrain.runtime.rounds import Rounds
from gridtrain.runtime.saying import say
from gridtrain.runtime.signs import Signs
from gridtrain.runtime.taking import Taking
from gridtrain.transport import buffering
from gridtrain.transport.base import Denied, PeerDown, PeerUp, Received, TransportEvent, Violation
from gridtrain.transport.credits import CreditTransport, needs_credit
from gridtrain.transport.limits import parse_rate

log = logging.getLogger("gridtrain")

CHORES_S = 0.005
"""While payloads come and go one after the other, everything that is not theirs waits for so long."""

FROM_PEERS = io.Fill | io.TakeBlock | io.TakeCopy | io.Feed | io.TakePiece
"""What a peer has sent: it answers for what is wrong with it."""

OF_PAYLOADS = io.Fill | io.Ship | io.Reached
"""What follows from a payload while a round goes its way; the trainer is told of it without a picture."""

OF_ROUNDS = (m.Data, m.Vote)
"""Messages that change nothing but the round they are of: a vote, until the last one is there."""


class Driver:
    """Runs a `MemberCore` over a `Transport` in a thread of its own.

    Args:
        transport: owned by this driver's thread from `start` on.
        config: addresses, names and deadlines.
        acquaintances: the transport's gate; this driver keeps it up to date.

    Attributes:
        spent: asked each turn: why nothing more may be sent or received.
    """

    def __init__(self, transport: CreditTransport, config: JoinConfig, acquaintances: Acquaintances) -> None:
        self._transport = transport
        self._config = config
        self._acquaintances = acquaintances
        self._coordinator = bytes.fromhex(config.coordinator_key)
        self._core: MemberCore  # from `start` on
        donate_Bps = parse_rate(config.donate_limit) if config.donate_limit else None
        deadlines = config.deadlines
        self.meeting = Meeting(transport.wake)
        self.donating = Donating(donate_Bps, self.meeting.stir)
        self.rounds = Rounds(self.meeting, self.donating.committed)
        self.giving, self.taking = Giving(self.meeting), Taking(self.meeting)
        self.catching_up = CatchingUp(self.meeting, self.taking.intake, idle_s=deadlines.ready_s / 4)
        self.residuals = Residuals(self.meeting)
        self.disk = DiskDuties(self.meeting, donate_Bps)
        self.signs = Signs(self.meeting)
        self._painter = Painter(
            self.giving, self.taking, self.donating, self.catching_up, self.residuals, self.disk
        )
        self._owed = Owed(transport)
        self._measuring = Measuring(transport, deadlines.probe_s, SystemRandom())
        self._patience = Patience(config.coordinator, deadlines.paused_s)
        self._mean: list[float | None] = []  # the answer that the trainer waits for
        self._only_payloads = False  # all that came in this turn went into numbers and on to others, or left
        self._chores_s = -math.inf  # when they were done last
        self._pulse_s = 0.0  # when the next sign of life is due
        self.spent: Callable[[], str] = lambda: ""
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
        if not self.wait(lambda p: p.welcomed, timeout_s):
            self.stop()
            raise CoordinatorUnreachable(
                f"no coordinator answered at {self._config.coordinator} within {timeout_s:g} s",
                remedy="check the address and the port, and that `gridtrain coordinator` is running there",
            )

    def wait(self, ready: Callable[[Picture], bool], timeout_s: float = math.inf) -> Picture | None:
        """See `Meeting.wait`."""
        return self.meeting.wait(ready, timeout_s)

    def look(self) -> Picture:
        """See `Meeting.look`."""
        return self.meeting.look()

    @property
    def last(self) -> Picture:
        """As `look`, also when the loop has ended."""
        return self.meeting.picture

    def command(self, event: io.Event) -> None:
        """See `Meeting.command`."""
        self.meeting.command(event)

    def mean(self, step: int, index: int, value: float, timeout_s: float) -> float | None:
        """The group's average of `value`; None if the generation ended, or nobody answered in time."""
        with self.meeting.changed:
            self._mean = []
        self.command(io.AskMean(step, index, value))
        self.wait(lambda _: bool(self._mean), timeout_s)
        return self._mean[0] if self._mean else None

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
        if reason and self.meeting.error is None and self._thread.is_alive():
            self.command(io.Depart(reason, pausing))
        self.meeting.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)

    # -- this thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        buffering.keep_pages()
        try:
            while True:
                stopping = self.meeting.stopping
                brought = self.giving.brought()
                self._obey()
                self.giving.fill(brought, self._core.generation)
                if self.meeting.stale or self.rounds.has_ended:
                    self.meeting.stale = False  # first: what others change meanwhile is published next
                    self._publish()  # before the next wait: a lone worker's round is over already
                if stopping:
                    return
                self._turn()
        except BaseException as error:  # the trainer must hear of it, whatever it is
            if not isinstance(error, GridtrainError):
                log.exception("gridtrain's loop crashed")
            self.meeting.fail(error)
        finally:
            self._transport.close()

    def _obey(self) -> bool:
        """Do what the trainer's thread has brought; True: it was something."""
        commands = self.meeting.commands()
        for command in commands:
            self._handle(command)
        return bool(commands)

    def _turn(self) -> None:
        if why := self.spent():
            raise BudgetSpent(why, remedy="nothing: this worker trains again when there are bytes again")
        events = self._transport.poll(self._wait_s(time.monotonic()))
        self._only_payloads = True
        for event in events:
            if not (type(event) is Received and type(event.message) in OF_ROUNDS):
                self._only_payloads = False
            self._transport_event(event)
        brought = self._obey()  # a payload that is to leave waits for no chore
        self._only_payloads = self._only_payloads and (brought or bool(events))
        if self.rounds.has_ended:
            self._publish()  # nor does the trainer, which waits for the outcome
        self.rounds.hash_ahead()
        now_s = time.monotonic()
        self._owed.give_back(self._core.held_bytes)  # nor do those who want to send more
        if not self._only_payloads or now_s >= self._chores_s + CHORES_S:
            self._do_chores(now_s)

    def _wait_s(self, now_s: float) -> float:
        """How long the network may be waited for."""
        at_once = (
            self.giving.ready(self._transport)
            or self.rounds.may_hash
            or self.taking.passing.ready(self._transport)
        )
        due_s = min(
            self._pulse_s,
            self._core.deadline_s,
            self.donating.due_s(self._transport),
            self.disk.due_s,
        )
        return 0.0 if at_once else min(max(0.0, due_s - now_s), self._config.deadlines.beat_s)

    def _do_chores(self, now_s: float) -> None:
        """All that is of no payload."""
        self._chores_s = now_s
        self.meeting.stale = True
        if now_s >= self._pulse_s:
            self._pulse_s = now_s + self._config.deadlines.beat_s
            self._beat()
        if now_s >= self._core.deadline_s:
            self._carry_out(self._core.tick(now_s))
        self._tell_measured(now_s)
        self._post(self.donating.turn(self._transport, now_s))
        self._tell_how_it_follows(now_s)
        sent = self.giving.pump(self._transport)
        sent += self.taking.passing.pump(self._transport)
        sent += self.disk.pump(self._transport, now_s, self._core.generation)
        with self.meeting.changed:
            self.meeting.progress += sent
        if self._core.stage is io.Stage.RUNNING:
            self.giving.forget()
            self.taking.passing.forget()
        self._patience.paused(self._core.paused, now_s)

    def _beat(self) -> None:
        left_bytes = self.taking.intake.left_bytes(self._core.generation)
        self._handle(self.signs.pulse(self.traffic, left_bytes))

    def _tell_measured(self, now_s: float) -> None:
        rates, probed = self._measuring.turn(now_s)
        if rates is not None:
            self._send(self._coordinator, rates)
        if probed is not None:
            self._handle(probed)

    def _tell_how_it_follows(self, now_s: float) -> None:
        seated = self._core.seat is not None
        standing = self.catching_up.turn(now_s, seated=seated, synced=self._core.synced)
        if standing is None:
            return
        self._post(standing.asks)
        if standing.event is not None:
            self._handle(standing.event)
        self.catching_up.show(standing, now_s)

    def _transport_event(self, event: TransportEvent) -> None:
        match event:
            case PeerUp(peer):
                if peer == self._coordinator:
                    self._patience.let_in()
                self._measuring.peer_up(peer, time.monotonic())
                self._handle(io.EdgeUp(peer))
            case PeerDown(peer, reason):
                self._owed.forget(peer)
                self._measuring.peer_down(peer)
                self._handle(io.EdgeDown(peer, reason))
            case Denied(self._coordinator):
                self._patience.denied(time.monotonic(), member=bool(self._core.term))
            case Violation(self._coordinator, reason):
                raise JoinRefused("version", f"{self._config.coordinator}: {reason}")
            case Violation(None, reason):
                log.info("a stranger broke the protocol: %s", reason)
            case Violation(peer, reason) if peer is not None:
                self._handle(io.Offence(peer, reason))
            case Received(peer, message, nbytes):
                if needs_credit(message):
                    self._owed.came(peer, nbytes)
                self._received(peer, message, nbytes)

    def _received(self, peer: m.PeerId, message: m.Message, nbytes: int) -> None:
        match message:
            case m.Ping(nonce):
                self._send(peer, m.Pong(nonce))
            case m.Pong() | m.Burst() | m.BurstAsk() | m.Landed():
                answers = self._measuring.heard(peer, message, time.monotonic())
                if isinstance(answers, str):
                    self._handle(io.Offence(peer, answers))
                else:
                    self._post([(peer, answer) for answer in answers])
            case _:
                self._handle(io.Heard(peer, message, nbytes))

    def _handle(self, event: io.Event) -> None:
        """What a peer did wrong costs the round and the peer, never this worker."""
        try:
            effects = self._core.handle(event, time.monotonic())
        except RemoteProtocolError as error:
            if not isinstance(event, io.Heard):
                raise
            effects = self._core.handle(io.Offence(event.peer, error.reason), time.monotonic())
        # The usual thing, hundreds of times in a step: numbers are summed and sent on, and nothing else.
        if not (_is_payload(event) and all(isinstance(effect, OF_PAYLOADS) for effect in effects)):
            self._only_payloads = False
            self._acquaintances.replace(self._core.acquaintances)
        self._carry_out(effects)

    def _carry_out(self, effects: list[io.Effect]) -> None:
        """Effects in order; what an effect leads to comes after the ones already returned."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            try:
                queue.extend(self._do(effect))
            except RemoteProtocolError as error:
                self._only_payloads = False
                self.rounds.spoil()
                culprit = effect.peer if isinstance(effect, FROM_PEERS) else None
                event = io.Broke(str(error)) if culprit is None else io.Offence(culprit, error.reason)
                queue.extend(self._core.handle(event, time.monotonic()))
                self._acquaintances.replace(self._core.acquaintances)
            except TransportError as error:
                self._only_payloads = False
                queue.extend(self._core.handle(io.Broke(str(error)), time.monotonic()))

    def _do(self, effect: io.Effect) -> list[io.Effect]:
        match effect:
            case io.Post(peer, m.StateRequest() as ask):
                if (lacked := self.taking.still_lacked(ask)) is not None:
                    self._send(peer, lacked)
            case io.Post(peer, message):
                self._send(peer, message)
            case io.Ship(peer):
                if (data := self.rounds.data(effect)) is not None:
                    self._transport.send(peer, data)
            case io.Fill(channel, fill):
                self.rounds.fill(channel, fill)
            case io.Reached(channel, skip):
                self.rounds.reached(channel, skip)
            case io.Seal(skip):
                digest = self.rounds.seal(skip)
                return [] if digest is None else self._core.handle(io.Sealed(digest), time.monotonic())
            case io.Resolve(round_id, committed, skip, reason):
                self.rounds.resolve(round_id, committed, skip, reason)
            case io.MeanKnown(value):
                with self.meeting.changed:
                    self._mean.append(value)
                    self.meeting.changed.notify_all()
            case io.Dial(peer, address):
                self._transport.dial(peer, address)
            case io.HangUp(peer):
                self._owed.forget(peer)
                self._transport.hang_up(peer)
            case io.Probe():
                self._measuring.begin(effect, time.monotonic())
            case io.GiveState():
                self.giving.ask(effect, self._core.term)
            case io.PassOn(peer, term, generation, have):
                self.taking.passing.ask(peer, term, generation, have)
            case io.TakeDigest(generation, due):
                self.taking.expect(generation, due)
                return self._refuted()
            case io.PutAside() | io.Reload() | io.Discard() | io.SendCopy() | io.TakeCopy():
                self.disk.do(effect)
            case io.Follow() | io.DonorUp() | io.DonorDown() | io.Arrive():
                self._post(self.catching_up.do(effect))
            case io.Feed(peer, message) if self._core.seat is None or not self._core.synced:
                self._post(self.catching_up.heard(peer, message, time.monotonic()))
            case io.Feed(peer, message):
                self._post([(peer, answer) for answer in self.donating.heard(peer, message)])
            case io.Donating():
                self.donating.told(effect)
            case io.TakeBlock(peer, block):
                vouched = peer == self._core.donor
                self.taking.block(block, vouched=vouched, passes_on=self._core.passes_on)
                return self._refuted()
            case io.TakePiece() | io.Inherit() | io.Forget() | io.Handed():
                follows = self.residuals.do(effect)
                return [] if follows is None else self._core.handle(follows, time.monotonic())
            case io.Stop(error):
                raise error
            case io.Note(event, fields):
                say(event, fields)
        return []

    def _refuted(self) -> list[io.Effect]:
        """What has come is not the donor's state: begin anew, with the donor itself."""
        if not self.taking.refuted(self._core.generation):
            return []
        return self._core.handle(io.Refuted(self._core.generation), time.monotonic())

    def _post(self, messages: Sequence[tuple[m.PeerId, m.Message]]) -> None:
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
        self.giving.forget_others(self._core.generation)
        picture = self._painter.paint(self._core)
        with self.meeting.changed:
            # Together, so that the trainer never sees an outcome beside the picture from before it.
            told = self.rounds.tell()
            self.meeting.show(picture, anyway=told)


def _is_payload(event: io.Event) -> bool:
    """Of a round alone: what a peer sends for it, what the trainer adds to it or begins before it."""
    if type(event) is io.Heard:
        return type(event.message) in OF_ROUNDS
    return type(event) is io.Extend or (type(event) is io.Submit and not event.whole)
