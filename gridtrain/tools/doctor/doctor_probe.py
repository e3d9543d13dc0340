"""Doctor's measurements: connects to the coordinator and a few members, and measures the links.

    to the coordinator, with the invitation's key        DiagnosticRequest, Ping, Burst, BurstRequest
    to members, with a new key                           Ping, Burst, BurstRequest
    from the coordinator, as a check ("dial-back")       a connection to doctor's address, with the new key

Doctor requests at most one burst (256 KiB) from the coordinator and from each of at most three members, and
then sends one to each.  It sends none to a member if that would take too long at the rate of the upload to
the coordinator: the rest of a burst on this machine's link would distort all later measurements.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gridtrain._version import SOFTWARE
from gridtrain.core import messages as m
from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import GridtrainError, TransportError
from gridtrain.network.transport.flow_control import FlowControlTransport, needs_credit
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import (
    ConnectionDenied,
    ConnectionRole,
    PeerDown,
    PeerUp,
    Received,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.stack import build_stack
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.runtime.client.worker_defaults import default_listen_address
from gridtrain.runtime.link_probes.bandwidth_probe import MIN_BURST_S, estimate_rate_Bps

PING_COUNT = 5
POLL_S = 0.02


@dataclass(slots=True)
class LinkMeasurement:
    """The measurements of one link; None for a value that was not measured.

    Attributes:
        rtt_s: the shortest round-trip time of several pings, in seconds.
        up_Bps, down_Bps: the rates at which 256 KiB were sent and received; they are too low for a fast link
            with high latency.
        is_up_bound, is_down_bound: whether the burst did not arrive in time; the rate is then an upper bound.
    """

    rtt_s: float | None = None
    up_Bps: float | None = None
    down_Bps: float | None = None
    is_up_bound: bool = False
    is_down_bound: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether pings were answered, but no burst was acknowledged and no message of 16 KiB arrived."""
        return self.rtt_s is not None and self.is_up_bound and self.down_Bps is None


@dataclass(slots=True)
class ProbeResponses:
    """What the coordinator and the members have sent so far.

    Attributes:
        connected: the processes with which there is a connection.
        is_denied: whether the coordinator refused the key in the handshake.
        violation: how the coordinator violated the protocol; "" if it did not.
        refused: the coordinator's refusal after the handshake; None if it has sent none.
        reply: the coordinator's reply to the DiagnosticRequest; None until it arrives.
        reached_address: the address at which the coordinator reached this machine, "" if it reached none;
            None until it reports.
        pongs, burst_acks: the time at which each answer arrived, by nonce.
        bursts: the times at which the messages of each requested burst arrived, by nonce.
    """

    connected: set[m.PeerId] = field(default_factory=set)
    is_denied: bool = False
    violation: str = ""
    refused: m.Refused | None = None
    reply: m.DiagnosticReply | None = None
    reached_address: str | None = None
    pongs: dict[int, float] = field(default_factory=dict)
    burst_acks: dict[int, float] = field(default_factory=dict)
    bursts: dict[int, list[float]] = field(default_factory=dict)


class DoctorProbe:
    """Connects to the coordinator over one transport and to members over another; must be closed.

    The methods wait at most until `until_s`, a time of `time.monotonic`.

    Args:
        identity: the key pair for the coordinator: the invitation's, or that of a worker on this machine.
    """

    def __init__(self, invitation: Invitation, identity: Identity) -> None:
        self.responses = ProbeResponses()
        self._invitation = invitation
        self._own_identity = Identity.generate()
        self._known_peers = {invitation.coordinator}
        self._coordinator_transport = self._transport(identity)
        self._peer_transport = self._transport(self._own_identity)
        self.address = ""

    def _transport(self, identity: Identity) -> FlowControlTransport:
        encrypted = self._invitation.encrypted
        sockets = ZeroMQTransport(
            identity,
            f"{SOFTWARE} doctor",
            gate=lambda key: ConnectionRole.MEMBER if key in self._known_peers else ConnectionRole.STRANGER,
            encrypted=encrypted,
            plain_anywhere=not encrypted,
        )
        return build_stack(sockets, identity)

    def close(self) -> None:
        self._coordinator_transport.close()
        self._peer_transport.close()

    # -- requests --------------------------------------------------------------------------------

    def connect(self, until_s: float) -> bool:
        """Connect to the coordinator; return whether it accepts the handshake."""
        self._coordinator_transport.dial(self._invitation.coordinator, self._invitation.address)
        here, heard = self._invitation.coordinator, self.responses
        self._poll_until(lambda: here in heard.connected or heard.is_denied or bool(heard.violation), until_s)
        return here in heard.connected

    def request_checkup(self, until_s: float) -> dict[str, Any] | None:
        """Ask the coordinator to check whether it can reach this machine; return the run's status.

        Returns None if the coordinator does not answer, answers without a valid status, or refuses
        (`responses.refused`).
        """
        try:
            self.address = self._peer_transport.listen(default_listen_address(self._invitation.address))
        except TransportError:
            self.address = ""
        request, heard = m.DiagnosticRequest(self._own_identity.public, self.address), self.responses
        self._send(self._coordinator_transport, self._invitation.coordinator, request)
        self._poll_until(lambda: heard.reply is not None or heard.refused is not None, until_s)
        if heard.reply is None:
            return None
        self._known_peers |= {peer for peer, _ in heard.reply.probe_targets}
        try:
            picture = json.loads(bytes(heard.reply.payload))
        except (ValueError, RecursionError):
            return None
        return picture if isinstance(picture, dict) else None

    def wait_for_callback(self, until_s: float) -> str | None:
        """Return the address at which the coordinator reached this machine.

        Returns "" if the coordinator could not reach the machine, and None if it did not report a result.
        """
        self._poll_until(lambda: self.responses.reached_address is not None, until_s)
        return self.responses.reached_address

    def measure_coordinator(self, until_s: float, upload_until_s: float) -> LinkMeasurement:
        """Measure the link to the coordinator; a burst that it has not received yet is awaited until
        `upload_until_s`."""
        coordinator = self._invitation.coordinator
        return self._measure(self._coordinator_transport, coordinator, until_s, upload_until_s)

    def measure_members(
        self, until_s: float, up_Bps: float | None, excluded: Collection[m.PeerId]
    ) -> list[tuple[m.PeerId, LinkMeasurement]]:
        """Measure the links to the members that the coordinator has named, except those in `excluded`.

        The links are measured one after the other, because all of them use this machine's connection.  A
        measurement is empty if the member cannot be reached in time.

        Args:
            up_Bps: the rate of the upload to the coordinator; None if it is unknown.
        """
        named = self.responses.reply.probe_targets if self.responses.reply is not None else ()
        probe = [(peer, address) for peer, address in named if peer not in excluded]
        for peer, address in probe:
            try:
                self._peer_transport.dial(peer, address)
            except GridtrainError:
                continue
        found: list[tuple[m.PeerId, LinkMeasurement]] = []
        for index, (peer, _) in enumerate(probe):
            now_s = time.monotonic()
            own_s = now_s + max(0.0, until_s - now_s) / (len(probe) - index)
            connected = partial(self.responses.connected.__contains__, peer)
            if self._poll_until(connected, own_s, self._peer_transport):
                found.append((peer, self._measure(self._peer_transport, peer, own_s, own_s, up_Bps)))
            else:
                found.append((peer, LinkMeasurement()))
        return found

    # -- measuring -------------------------------------------------------------------------------

    def _measure(
        self,
        transport: FlowControlTransport,
        peer: m.PeerId,
        until_s: float,
        upload_until_s: float,
        up_Bps: float | None = None,
    ) -> LinkMeasurement:
        """Measure the round-trip time, the download, and then the upload, whose burst may fill the link.

        Args:
            up_Bps: the upload is measured only if a burst at this rate would arrive by `upload_until_s`.
        """
        found = LinkMeasurement()
        for _ in range(PING_COUNT):
            nonce, sent_s = secrets.randbits(62), time.monotonic()
            if not self._send(transport, peer, m.Ping(nonce)):
                return found
            if not self._poll_until(partial(self.responses.pongs.__contains__, nonce), until_s, transport):
                return found
            took_s = self.responses.pongs[nonce] - sent_s
            found.rtt_s = took_s if found.rtt_s is None else min(found.rtt_s, took_s)
        nonce, asked_s = secrets.randbits(62), time.monotonic()
        times_s = self.responses.bursts.setdefault(nonce, [])
        self._send(transport, peer, m.BurstRequest(nonce))
        half_s = asked_s + (until_s - asked_s) / 2
        self._poll_until(lambda: len(times_s) == m.BURST_MESSAGES, half_s, transport)
        burst_s = m.BURST_MESSAGES * m.BURST_MESSAGE_BYTES / up_Bps if up_Bps else 0.0
        if time.monotonic() + burst_s < upload_until_s:
            self._measure_upload(transport, peer, upload_until_s, found)
        if len(times_s) == m.BURST_MESSAGES:
            found.down_Bps = download_rate_Bps(asked_s, times_s, found.rtt_s or 0.0)
        elif times_s:  # the next message has not arrived completely
            nbytes = len(times_s) * m.BURST_MESSAGE_BYTES
            found.down_Bps = nbytes / max(MIN_BURST_S, time.monotonic() - times_s[0])
            found.is_down_bound = True
        return found

    def _measure_upload(
        self, transport: FlowControlTransport, peer: m.PeerId, until_s: float, found: LinkMeasurement
    ) -> None:
        nonce, sent_s = secrets.randbits(62), time.monotonic()
        end = secrets.token_bytes(8)
        for index in range(m.BURST_MESSAGES):
            tail = end if index == m.BURST_MESSAGES - 1 else bytes(8)
            burst = m.Burst(nonce, index, bytes(m.BURST_MESSAGE_BYTES - 8) + tail)
            if not self._send(transport, peer, burst):
                return
        received = partial(self.responses.burst_acks.__contains__, nonce)
        found.is_up_bound = not self._poll_until(received, until_s, transport)
        ended_s = self.responses.burst_acks.get(nonce, time.monotonic())
        found.up_Bps = estimate_rate_Bps(ended_s - sent_s, found.rtt_s or 0.0)

    def _send(self, transport: FlowControlTransport, peer: m.PeerId, message: m.Message) -> bool:
        try:
            transport.send(peer, message)
        except TransportError:
            return False  # the connection broke, so the rest is not measured
        return True

    def _poll_until(
        self, true: Callable[[], bool], until_s: float, measured: FlowControlTransport | None = None
    ) -> bool:
        """Poll both transports in turn until `true` returns True; return False if the time runs out.

        Args:
            measured: the transport whose messages are timed, the coordinator's by default; the messages of
                the other one may be read up to `POLL_S` late.
        """
        awaited = measured or self._coordinator_transport
        while not true():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            for transport in (self._coordinator_transport, self._peer_transport):
                for event in transport.poll(min(left_s, POLL_S if transport is awaited else 0.0)):
                    self._handle_event(transport, event)
        return True

    def _handle_event(self, transport: FlowControlTransport, event: TransportEvent) -> None:
        now_s, heard = time.monotonic(), self.responses
        match event:
            case PeerUp(peer):
                heard.connected.add(peer)
            case PeerDown(peer):
                heard.connected.discard(peer)
            case ConnectionDenied() if transport is self._coordinator_transport:
                heard.is_denied = True
            case TransportViolation(_, reason) if transport is self._coordinator_transport:
                heard.violation = reason
            case Received(peer, message, nbytes):
                if needs_credit(message):
                    transport.mark_processed(peer, nbytes)
                match message:
                    case m.Pong(nonce):
                        heard.pongs[nonce] = now_s
                    case m.Ping(nonce):
                        self._send(transport, peer, m.Pong(nonce))
                    case m.BurstReceived(nonce):
                        heard.burst_acks[nonce] = now_s
                    case m.Burst(nonce, index) if index == len(heard.bursts.setdefault(nonce, [])):
                        heard.bursts[nonce].append(now_s)
                    case m.DiagnosticReply() if transport is self._coordinator_transport:
                        heard.reply = message
                    case m.Reachability(address) if transport is self._coordinator_transport:
                        heard.reached_address = address
                    case m.Refused() if transport is self._coordinator_transport:
                        heard.refused = message
                    case _:
                        pass


def download_rate_Bps(asked_s: float, times_s: Sequence[float], rtt_s: float) -> float:
    """Return the rate of a burst that was requested at `asked_s` and whose messages were read at `times_s`.

    Messages that waited in a buffer are read all at once, so the rate is capped by the average rate since the
    request.
    """
    read_Bps = (m.BURST_MESSAGES - 1) * m.BURST_MESSAGE_BYTES / max(MIN_BURST_S, times_s[-1] - times_s[0])
    return min(read_Bps, estimate_rate_Bps(times_s[-1] - asked_s, rtt_s))
