"""What a hostile member sends while it is a member: one class for each attack.

`mallory` calls the methods.  They use internal parts of the transport, as an attacker can.

    a message of the core    --> send:   returns the messages that leave instead
    the digest of the round  --> digest: returns the digest of the vote instead
    a poll of the loop       --> burst:  sends at line rate what no honest worker sends
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq import sockets
from gridtrain.network.wire import codec
from hostile.strangers import open_dealer
from hostile.wire import CurveConnection, Refused

BURST_S = 0.02
"""Longest duration of a burst; after it the loop sends heartbeats and what else keeps the membership."""

LARGEST = bytes(codec.MAX_PAYLOAD_BYTES)


@dataclass
class Internals:
    """The parts of the hostile worker that attacks use: core and transports of its loop, and its key."""

    core: Any
    zeromq: Any  # ZeroMQTransport
    identity: Identity
    victim: str = ""

    @property
    def round(self) -> m.RoundId:
        return self.core.current_generation.attempts._current_round  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        return self.core.rank_assignment.rank  # type: ignore[no-any-return]

    def peers(self) -> list[bytes]:
        """Return the connected members, or only the victim."""
        members = [
            x
            for x in self.core.rank_assignment.members
            if x.peer != self.core.own_id and self.victim in ("", x.name)
        ]
        return [member.peer for member in members if self.zeromq.connected(member.peer)]

    def targets(self) -> list[bytes]:
        """Return the connected members and the coordinator, or only the victim."""
        hub = self.core.coordinator
        chosen = self.victim in ("", "coordinator") and self.zeromq.connected(hub)
        return self.peers() + ([hub] if chosen else [])

    def addresses(self) -> dict[bytes, str]:
        """Return the known addresses by peer, or only the victim's."""
        names = {x.peer: x.name for x in self.core.rank_assignment.members} | {
            self.core.coordinator: "coordinator"
        }
        listed = {x.peer: x.address for x in self.core.rank_assignment.members if x.peer != self.core.own_id}
        dialled = {dial.peer: dial.address for dial in self.zeromq._dialer}
        return {
            peer: address
            for peer, address in {**listed, **dialled}.items()
            if address.startswith("tcp") and self.victim in ("", names.get(peer))
        }

    def write(self, peer: bytes, frames: list[bytes]) -> bool:
        """Write into libzmq's queue, without rate limits and credits; return whether it had room."""
        links = self.zeromq._connections.get(peer)
        if not links:
            return False
        link = links[0]
        with contextlib.suppress(zmq.ZMQError):
            if link.outgoing is None:
                return sockets.write(self.zeromq._listener.router, list(frames), link.routing_id)
            if link.outgoing.socket is not None:
                return sockets.write(link.outgoing.socket, list(frames))
        return False

    def flood(self, to: Callable[[], list[bytes]], frames_for: Callable[[bytes], list[bytes]]) -> int:
        """Write to the peers until all queues are full, at most for `BURST_S`; return the message count."""
        until_s, count, busy = time.monotonic() + BURST_S, 0, True
        while busy:
            busy = False
            for peer in to():
                for _ in range(32):
                    if time.monotonic() >= until_s:
                        return count
                    if not self.write(peer, frames_for(peer)):
                        break
                    count, busy = count + 1, True
        return count


class Attack:
    """The base of all attacks: sends what a correct member sends.

    Attributes:
        sent: number of messages or connections of the bursts.
        over: set at the end of the attack, so that its threads end.
    """

    def __init__(self, internals: Internals) -> None:
        self.at, self.sent, self.over = internals, 0, False

    def send(self, peer: bytes, message: m.Message) -> list[m.Message]:
        return self.changed(message) if isinstance(message, m.Data) else [message]

    def changed(self, data: m.Data) -> list[m.Message]:
        """Return what leaves instead of a payload of a round."""
        return [data]

    def digest(self, digest: bytes) -> bytes:
        """Return the digest of the vote.  Raises `RemoteProtocolError` for a NO."""
        return digest

    def burst(self) -> None: ...

    def data(self, **changes: Any) -> m.Data:
        return replace(
            m.Data(self.at.round, m.Channel(), m.PayloadSlot(m.CollectivePhase.REDUCE), 0, b"x"),
            **changes,
        )


# -- floods ------------------------------------------------------------------------------------------


class Illegal(Attack):
    """(a) Well-formed messages that a member may not send, to the members and to the coordinator."""

    def burst(self) -> None:
        there = self.at.round
        to_member = codec.encode(m.StartGeneration(there.term, there.generation))
        to_hub = codec.encode(m.Welcome(there.term, "mine", "mine"))
        hub = self.at.core.coordinator
        self.sent += self.at.flood(self.at.targets, lambda peer: to_hub if peer == hub else to_member)


class Garbage(Attack):
    """(b) Frames that are not a message."""

    def burst(self) -> None:
        frames = [os.urandom(200), os.urandom(2000)]
        self.sent += self.at.flood(self.at.targets, lambda peer: frames)


class Frames(Attack):
    """(b) Messages of 1,000 frames, and frames of 64 MiB."""

    def burst(self) -> None:
        many = [b"x"] * 1000
        large = [b"x", LARGEST]
        self.sent += self.at.flood(self.at.targets, lambda peer: many if self.sent % 8 else large)


class Endless(Attack):
    """(g) A message without an end: libzmq stores what it has received and delivers nothing.

    It is sent over further connections, so that no other message ends it.
    """

    frame = bytes(2**20)
    most_frames = 1024
    """Sent to each peer; a bound, because a peer without one would run out of memory."""

    def __init__(self, internals: Internals) -> None:
        super().__init__(internals)
        self._threads: dict[bytes, threading.Thread] = {}

    def burst(self) -> None:
        for peer, address in self.at.addresses().items():
            if peer not in self._threads:
                self._threads[peer] = threading.Thread(
                    target=self._send_frames, args=(peer, address), daemon=True
                )
                self._threads[peer].start()

    def _send_frames(self, peer: bytes, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(OSError, Refused):
            connection = CurveConnection(self.at.identity, peer, host, int(port))
            connection.send(codec.encode(m.Hello(self.at.core.own_id, m.PROTOCOL_VERSION, "endless")))  # type: ignore[arg-type]
            for _ in range(self.most_frames):
                if self.over:
                    break
                connection.send([self.frame], more=True)
                self.sent += 1
            while not self.over:
                time.sleep(0.1)  # the connection stays open


# -- changed payloads and votes ------------------------------------------------------------------------


class BadIndices(Attack):
    """(c) Indices of a sparse payload out of range and order, and a payload that is too short."""

    def changed(self, data: m.Data) -> list[m.Message]:
        payload = bytearray(data.payload)
        middle = len(payload) // 4
        payload[8:middle] = b"\xff" * (middle - 8)
        return [replace(data, payload=bytes(payload[:-3]))]


class NoNumber(Attack):
    """(c) NaN among the values."""

    def changed(self, data: m.Data) -> list[m.Message]:
        payload = bytearray(data.payload)
        payload[-4:] = b"\xff" * len(payload[-4:])
        return [replace(data, payload=bytes(payload))]


class Twice(Attack):
    """(d) Each payload twice."""

    def changed(self, data: m.Data) -> list[m.Message]:
        return [data, data]


class WrongPlace(Attack):
    """(e) A payload with a slot that the sender's rank cannot have."""

    def changed(self, data: m.Data) -> list[m.Message]:
        return [replace(data, slot=replace(data.slot, hop=2**31 - 1))]


class WrongChannel(Attack):
    """(e) A payload of a channel that the round does not have."""

    def changed(self, data: m.Data) -> list[m.Message]:
        return [replace(data, channel=m.Channel(index=77))]


class FarAhead(Attack):
    """(e) A payload of a step that no member can have reached."""

    def changed(self, data: m.Data) -> list[m.Message]:
        return [data, replace(data, round=replace(data.round, step=data.round.step + 1000))]


class FalseVotes(Attack):
    """(f) YES to an update that no other member has, as a worker with broken memory would."""

    def digest(self, digest: bytes) -> bytes:
        return os.urandom(32)


class NoVotes(Attack):
    """(f) NO to each attempt, which the protocol permits."""

    def digest(self, digest: bytes) -> bytes:
        raise RemoteProtocolError("on purpose")


# -- memory ------------------------------------------------------------------------------------------


class Held(Attack):
    """(g) Payloads of 60 MiB for the next step, which the receiver stores until it begins; without credit."""

    def burst(self) -> None:
        early = replace(self.at.round, step=self.at.round.step + 1)
        frames = codec.encode(self.data(round=early, payload=memoryview(LARGEST)[: 60 * 2**20]))
        self.sent += self.at.flood(self.at.peers, lambda peer: frames)  # type: ignore[arg-type]


# -- connections -------------------------------------------------------------------------------------


class Flapping(Attack):
    """(h) Closes each connection to a member and dials again at once."""

    spares_coordinator = True

    def burst(self) -> None:
        for dial in list(self.at.zeromq._dialer):
            if dial.peer == self.at.core.coordinator and self.spares_coordinator:
                continue
            if dial.connection is not None:
                self.at.zeromq._redial(dial, "on purpose")
                self.sent += 1
            dial.attempt, dial.due_s = 0, min(dial.due_s, time.monotonic() + 5.0)
            if dial.socket is None:
                dial.due_s = 0.0
        for peer in self.at.peers():
            for link in self.at.zeromq._connections.get(peer, []):
                if link.outgoing is None:
                    self.at.zeromq._listener.shut(link)
                    self.sent += 1


class FlappingEverywhere(Flapping):
    """(h) The same, also with the coordinator."""

    spares_coordinator = False


class Crowd(Attack):
    """(i) 200 connections with one key to each known address, each with its Hello."""

    connections = 200

    def __init__(self, internals: Internals) -> None:
        super().__init__(internals)
        self._context: sockets.Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8000)
        self._open: list[Any] = []

    def burst(self) -> None:
        hello = codec.encode(m.Hello(self.at.core.own_id, m.PROTOCOL_VERSION, "crowd"))
        for peer, address in self.at.addresses().items():
            if len(self._open) >= 4 * self.connections:
                break
            dealer = open_dealer(self._context, self.at.identity, peer)
            dealer.connect(address)
            dealer.send_multipart(hello)
            self._open.append(dealer)
            self.sent += 1


# -- permitted messages at line rate -------------------------------------------------------------------


class Pings(Attack):
    """Pings and heartbeats at line rate: each is permitted, and each Ping is answered."""

    def burst(self) -> None:
        ping = codec.encode(m.Ping(7))
        heartbeat = codec.encode(m.Heartbeat(7, self.at.round.step, 7, ()))
        hub = self.at.core.coordinator
        self.sent += self.at.flood(self.at.targets, lambda peer: heartbeat if peer == hub else ping)


ATTACKS: dict[str, type[Attack]] = {
    "illegal": Illegal,
    "garbage": Garbage,
    "frames": Frames,
    "endless": Endless,
    "bad-indices": BadIndices,
    "no-number": NoNumber,
    "twice": Twice,
    "wrong-place": WrongPlace,
    "wrong-channel": WrongChannel,
    "far-ahead": FarAhead,
    "false-votes": FalseVotes,
    "no-votes": NoVotes,
    "held": Held,
    "flapping": Flapping,
    "flapping-everywhere": FlappingEverywhere,
    "crowd": Crowd,
    "pings": Pings,
}
