"""The doctor's talk with a coordinator, and with a few members: one thread, every wait with a deadline.

Decides what is asked in which order.  Sends at most a burst (256 KiB) to each of four, and takes as much.

    coordinator  <-- the invitation's key: handshake -- Checkup, Ping, Burst, BurstAsk
    members      <-- a key made for the occasion ------ Ping, Burst, BurstAsk
    call-back    --> the same key, where we listen
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from types import TracebackType
from typing import Any

from gridtrain._version import __version__
from gridtrain.errors import GridtrainError, TransportError
from gridtrain.protocol import messages as m
from gridtrain.protocol.invitation import Invitation
from gridtrain.runtime.bursts import LEAST_S, rate_Bps
from gridtrain.runtime.naming import listen_address
from gridtrain.transport.base import Denied, PeerDown, PeerUp, Received, Standing, TransportEvent, Violation
from gridtrain.transport.credits import CreditTransport, needs_credit
from gridtrain.transport.curve import Identity
from gridtrain.transport.stack import over
from gridtrain.transport.zeromq import ZeroMQTransport

SOFTWARE = f"gridtrain {__version__} doctor"
PINGS = 5
SLICE_S = 0.02


@dataclass(slots=True)
class Measured:
    """One other's line; None: not measured.

    Attributes:
        up_Bps, down_Bps: of a burst of 256 KiB: a long fast line is told slower than it is.
    """

    rtt_s: float | None = None
    up_Bps: float | None = None
    down_Bps: float | None = None


@dataclass(slots=True)
class Heard:
    """What came so far."""

    up: set[m.PeerId] = field(default_factory=set)
    denied: bool = False
    violation: str = ""
    refused: m.Refused | None = None
    reply: m.CheckupReply | None = None
    reach: str | None = None
    pongs: dict[int, float] = field(default_factory=dict)
    landed: dict[int, float] = field(default_factory=dict)
    bursts: dict[int, list[float]] = field(default_factory=dict)
    lost: str = ""


class Talk:
    """A context manager over two transports: `front` to the coordinator, `back` for everybody else.

    Args:
        identity: to connect with: the invitation's, or this machine's own.
    """

    def __init__(self, invitation: Invitation, identity: Identity, rng: SystemRandom | None = None) -> None:
        self.heard = Heard()
        self._invitation = invitation
        self._rng = rng or SystemRandom()
        self._mine = Identity.generate()
        self._known = {invitation.coordinator}
        self._front = self._transport(identity)
        self._back = self._transport(self._mine)
        self.address = ""

    def _transport(self, identity: Identity) -> CreditTransport:
        encrypted = self._invitation.encrypted
        sockets = ZeroMQTransport(
            identity,
            SOFTWARE,
            gate=lambda key: Standing.PEER if key in self._known else Standing.STRANGER,
            encrypted=encrypted,
            plain_anywhere=not encrypted,
        )
        return over(sockets, identity)

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._front.close()
        self._back.close()

    # -- questions -------------------------------------------------------------------------------

    def connect(self, until_s: float) -> bool:
        """Greeted by the coordinator: the invitation is valid."""
        self._front.dial(self._invitation.coordinator, self._invitation.address)
        here = self._invitation.coordinator
        self._until(lambda: here in self.heard.up or self.heard.denied or bool(self.heard.violation), until_s)
        return here in self.heard.up

    def check_up(self, until_s: float) -> dict[str, Any] | None:
        """The run's picture; None: the coordinator does not answer, or refuses (`heard.refused`)."""
        try:
            self.address = self._back.listen(listen_address(self._invitation.address))
        except TransportError:
            self.address = ""
        self._send(self._front, self._invitation.coordinator, m.Checkup(self._mine.public, self.address))
        self._until(lambda: self.heard.reply is not None or self.heard.refused is not None, until_s)
        if self.heard.reply is None:
            return None
        self._known |= {peer for peer, _ in self.heard.reply.probe}
        try:
            picture = json.loads(bytes(self.heard.reply.payload))
        except (ValueError, RecursionError):
            return None
        return picture if isinstance(picture, dict) else None

    def called_back(self, until_s: float) -> str | None:
        """The address at which the coordinator got through; "": at none; None: it did not say."""
        self._until(lambda: self.heard.reach is not None, until_s)
        return self.heard.reach

    def coordinator(self, until_s: float) -> Measured:
        return self._measure(self._front, self._invitation.coordinator, until_s)

    def members(self, until_s: float) -> list[tuple[m.PeerId, Measured]]:
        """Those that expect us, one after the other, so that they do not share our line."""
        probe = self.heard.reply.probe if self.heard.reply is not None else ()
        for peer, address in probe:
            try:
                self._back.dial(peer, address)
            except GridtrainError:
                continue
        found: list[tuple[m.PeerId, Measured]] = []
        for index, (peer, _) in enumerate(probe):
            now_s = time.monotonic()
            own_s = now_s + max(0.0, until_s - now_s) / (len(probe) - index)
            if self._until(lambda peer=peer: peer in self.heard.up, own_s):  # type: ignore[misc]
                found.append((peer, self._measure(self._back, peer, own_s)))
            else:
                found.append((peer, Measured()))
        return found

    # -- measuring -------------------------------------------------------------------------------

    def _measure(self, transport: CreditTransport, peer: m.PeerId, until_s: float) -> Measured:
        found = Measured()
        for _ in range(PINGS):
            nonce, sent_s = self._nonce(), time.monotonic()
            if not self._send(transport, peer, m.Ping(nonce)):
                return found
            if not self._until(lambda nonce=nonce: nonce in self.heard.pongs, until_s):  # type: ignore[misc]
                return found
            took_s = self.heard.pongs[nonce] - sent_s
            found.rtt_s = took_s if found.rtt_s is None else min(found.rtt_s, took_s)
        half_s = time.monotonic() + (until_s - time.monotonic()) / 2
        nonce, sent_s = self._nonce(), time.monotonic()
        end = self._rng.randbytes(8)
        for index in range(m.BURSTS):
            tail = end if index == m.BURSTS - 1 else bytes(8)
            self._send(transport, peer, m.Burst(nonce, index, bytes(m.BURST_BYTES - 8) + tail))
        if self._until(lambda: nonce in self.heard.landed, half_s):
            found.up_Bps = rate_Bps(self.heard.landed[nonce] - sent_s, found.rtt_s or 0.0)
        nonce, sent_s = self._nonce(), time.monotonic()
        self._send(transport, peer, m.BurstAsk(nonce))
        if self._until(lambda: len(self.heard.bursts.get(nonce, ())) == m.BURSTS, until_s):
            found.down_Bps = down_Bps(sent_s, self.heard.bursts[nonce], found.rtt_s or 0.0)
        return found

    def _nonce(self) -> int:
        return self._rng.getrandbits(62)

    def _send(self, transport: CreditTransport, peer: m.PeerId, message: m.Message) -> bool:
        try:
            transport.send(peer, message)
        except TransportError:
            return False  # the connection broke: what follows is not measured
        return True

    def _until(self, true: Callable[[], bool], until_s: float) -> bool:
        """Both transports are looked at in turns; False: time is over."""
        while not true():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            for transport in (self._front, self._back):
                for event in transport.poll(min(left_s, SLICE_S if transport is self._front else 0.0)):
                    self._hear(transport, event)
        return True

    def _hear(self, transport: CreditTransport, event: TransportEvent) -> None:
        now_s, heard = time.monotonic(), self.heard
        match event:
            case PeerUp(peer):
                heard.up.add(peer)
            case PeerDown(peer, reason):
                heard.up.discard(peer)
                heard.lost = reason
            case Denied() if transport is self._front:
                heard.denied = True
            case Violation(_, reason) if transport is self._front:
                heard.violation = reason
            case Received(peer, message, nbytes):
                if needs_credit(message):
                    transport.done(peer, nbytes)
                match message:
                    case m.Pong(nonce):
                        heard.pongs[nonce] = now_s
                    case m.Ping(nonce):
                        self._send(transport, peer, m.Pong(nonce))
                    case m.Landed(nonce):
                        heard.landed[nonce] = now_s
                    case m.Burst(nonce, index) if index == len(heard.bursts.setdefault(nonce, [])):
                        heard.bursts[nonce].append(now_s)
                    case m.CheckupReply() if transport is self._front:
                        heard.reply = message
                    case m.Reach(address) if transport is self._front:
                        heard.reach = address
                    case m.Refused() if transport is self._front:
                        heard.refused = message
                    case _:
                        pass


def down_Bps(asked_s: float, times_s: Sequence[float], rtt_s: float) -> float:
    """Of a burst that was asked for, read at these times: what waited in a buffer is read in no time, so it
    counts as no faster than from the asking on."""
    read_Bps = (m.BURSTS - 1) * m.BURST_BYTES / max(LEAST_S, times_s[-1] - times_s[0])
    return min(read_Bps, rate_Bps(times_s[-1] - asked_s, rtt_s))
