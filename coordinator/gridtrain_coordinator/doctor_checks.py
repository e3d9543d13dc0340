"""Serves `gridtrain doctor`: dials back the machine that runs it, and answers a limited number of messages.

    pending or enrolled -- DiagnosticRequest(key, address) --> DialBack --> ReachResult --> Reachability
    member              <-- DiagnosticReply(members that expect the key, status) --
                        -- Ping ------------------> Pong
                        -- Burst 0 .. 15 ---------> BurstReceived      upload
                        -- BurstRequest ----------> Burst 0 .. 15      download

A burst is 16 messages of 16 KiB, which serve to measure the machine's upload or download rate.  A check
does not count as a use of an invitation.  The number of checks per address range and the size of each check
are limited, and only the source address of a connection is dialled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.errors import describe_type
from gridtrain.network.transport.interface import PeerUp, ReachResult
from gridtrain.network.transport.zmq.half_open import address_range
from gridtrain_coordinator.access.request_rate import RequestRate
from gridtrain_coordinator.run import events as ev
from gridtrain_coordinator.run.route_table import PeerLocation, dial_back_addresses

MAX_OPEN_CHECKUPS = 32
MAX_PER_ADDRESS_RANGE, RATE_WINDOW_S, MAX_ADDRESS_RANGES = 6, 60.0, 1000
MAX_PINGS = 32
MAX_PROBED = 3

Introduce = Callable[[m.PeerId, int], tuple[list[ev.Effect], tuple[tuple[m.PeerId, str], ...]]]
TOO_MANY_CHECKUPS = m.Refused(
    "too-many",
    "too many machines are being checked now, or too many checks came from your range of addresses",
    "try again in a minute",
)


@dataclass(slots=True)
class _Checkup:
    """The progress of the check of one machine, which is to use `key` as its own key in the run."""

    key: m.PeerId
    pings: int = 0
    next_burst: int = 0  # index of the next expected `Burst`
    has_requested_burst: bool = False


@dataclass(slots=True)
class Checkups:
    """The checks in progress.

    Attributes:
        introduce: `Membership.introduce_pending_member`, which chooses members for the machine to probe.
    """

    introduce: Introduce
    _hosts: dict[m.PeerId, str] = field(default_factory=dict)
    _open: dict[m.PeerId, _Checkup] = field(default_factory=dict)
    _requests: RequestRate = field(default_factory=lambda: RequestRate(RATE_WINDOW_S, MAX_ADDRESS_RANGES))

    def on_connected(self, up: PeerUp) -> None:
        if up.host:
            self._hosts[up.peer] = up.host

    def on_disconnected(self, peer: m.PeerId) -> None:
        self._hosts.pop(peer, None)
        self._open.pop(peer, None)

    def accepts(self, peer: m.PeerId, message: m.Message) -> bool:
        """Return whether the message belongs to a check."""
        return isinstance(message, m.DiagnosticRequest) or (
            peer in self._open and isinstance(message, m.Ping | m.Burst | m.BurstRequest)
        )

    def on_dial_back_result(self, event: ReachResult) -> list[ev.Effect] | None:
        """Return the effects of a `DialBack` result; None if the result does not belong to a check."""
        for requester, checkup in self._open.items():
            if checkup.key == event.peer:
                return [ev.Send(requester, m.Reachability(event.address))]
        return None

    def handle(
        self, peer: m.PeerId, message: m.Message, status: Callable[[], bytes], now_s: float
    ) -> list[ev.Effect]:
        """Handle a message for which `accepts` returned True.

        A `DiagnosticRequest` for a check that has already begun is refused.  Any other message beyond the
        limits of a check ends the check and the connection.

        Args:
            status: a function that returns the encoded status.
        """
        if isinstance(message, m.DiagnosticRequest):
            return self._begin(peer, message, status, now_s)
        checkup = self._open[peer]
        match message:
            case m.Ping(nonce) if checkup.pings < MAX_PINGS:
                checkup.pings += 1
                return [ev.Send(peer, m.Pong(nonce))]
            case m.Burst(nonce, index, payload) if index == checkup.next_burst and _is_full_burst(payload):
                checkup.next_burst += 1
                if checkup.next_burst < m.BURST_MESSAGES:
                    return []
                return [ev.Send(peer, m.BurstReceived(nonce, bytes(memoryview(payload)[-8:])))]
            case m.BurstRequest(nonce) if not checkup.has_requested_burst:
                checkup.has_requested_burst = True
                return [
                    ev.Send(peer, m.Burst(nonce, index, bytes(m.BURST_MESSAGE_BYTES)))
                    for index in range(m.BURST_MESSAGES)
                ]
        self.on_disconnected(peer)
        return [ev.Send(peer, _beyond_limits(message)), ev.Disconnect(peer)]

    def _begin(
        self, peer: m.PeerId, message: m.DiagnosticRequest, status: Callable[[], bytes], now_s: float
    ) -> list[ev.Effect]:
        host = self._hosts.get(peer, "")
        is_known = peer in self._open or any(known.key == message.peer for known in self._open.values())
        if is_known:
            return [ev.Send(peer, _beyond_limits(message))]
        is_full = len(self._open) >= MAX_OPEN_CHECKUPS
        if is_full or not self._requests.allow(address_range(host), now_s, MAX_PER_ADDRESS_RANGE):
            return [ev.Send(peer, TOO_MANY_CHECKUPS)]
        self._open[peer] = _Checkup(message.peer)
        effects, probe = self.introduce(message.peer, MAX_PROBED)
        reply = ev.Send(peer, m.DiagnosticReply(probe, status()))
        note = ev.LogEvent("info", "checkup", {"from": host})
        addresses = _addresses_at(dial_back_addresses(PeerLocation(message.address, host, "")), host)
        # Always answer, even if there is no address to dial.
        dial_back: ev.Effect = (
            ev.DialBack(message.peer, addresses) if addresses else ev.Send(peer, m.Reachability(""))
        )
        return [note, *effects, reply, dial_back]


def _beyond_limits(message: m.Message) -> m.Refused:
    return m.Refused(
        "check-limits",
        f"this check sent {describe_type(message)} beyond its limits, which are one DiagnosticRequest, "
        f"{MAX_PINGS} Pings, {m.BURST_MESSAGES} full Bursts in order, and one BurstRequest",
        "install the coordinator's version of gridtrain and run `gridtrain doctor` again",
    )


def _is_full_burst(payload: object) -> bool:
    return memoryview(payload).nbytes == m.BURST_MESSAGE_BYTES  # type: ignore[arg-type]


def _addresses_at(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Return the addresses at `host`; a requester must not be able to probe the ports of other machines."""
    return tuple(
        address
        for address in addresses
        if address.startswith("tcp://") and address[6:].rpartition(":")[0].strip("[]") == host
    )
