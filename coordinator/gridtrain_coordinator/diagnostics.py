"""`gridtrain doctor` at the coordinator: how a machine would fare, before it is a member, and for little.

Decides what who asks may cost: few questions from one range of addresses, few bytes each, calls back only to
where the connection comes from.  Spends no use of an invitation.  Never decides who is a member.

    guest or member -- Checkup(key, address) --> CallBack --> Reached --> Reach(address)
                    <-- CheckupReply(members that expect the key, status) --
                    -- Ping ------------------> Pong
                    -- Burst 0 .. 15 ---------> Landed             the way up
                    -- BurstAsk --------------> Burst 0 .. 15      the way down
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import PeerUp, ReachResult
from gridtrain.network.transport.zmq.half_open import address_range
from gridtrain_coordinator.run import events as io
from gridtrain_coordinator.run.route_table import PeerLocation, dial_back_addresses

MAX_OPEN_CHECKUPS = 32
MAX_PER_ADDRESS_RANGE, RATE_WINDOW_S = 6, 60.0
MAX_PINGS = 32
MAX_PROBED = 3

Introduce = Callable[[m.PeerId, int], tuple[list[io.Effect], tuple[tuple[m.PeerId, str], ...]]]
TOO_MANY_CHECKUPS = m.Refused("too-many", "too many machines are looked at just now", "try again in a minute")


@dataclass(slots=True)
class _Checkup:
    """One that is looked at."""

    key: m.PeerId
    pings: int = 0
    next_burst: int = 0  # the Burst that has to come next
    has_requested_burst: bool = False


@dataclass(slots=True)
class Checkups:
    """See the module's text.

    Attributes:
        introduce: tells some members to expect a key; see `Membership.lend`.
    """

    introduce: Introduce
    _hosts: dict[m.PeerId, str] = field(default_factory=dict)
    _open: dict[m.PeerId, _Checkup] = field(default_factory=dict)
    _recent: deque[tuple[float, str]] = field(default_factory=deque)

    def on_connected(self, up: PeerUp) -> None:
        if up.host:
            self._hosts[up.peer] = up.host

    def on_disconnected(self, peer: m.PeerId) -> None:
        self._hosts.pop(peer, None)
        self._open.pop(peer, None)

    def accepts(self, peer: m.PeerId, message: m.Message) -> bool:
        """The message is ours."""
        return isinstance(message, m.DiagnosticRequest) or (
            peer in self._open and isinstance(message, m.Ping | m.Burst | m.BurstRequest)
        )

    def on_dial_back_result(self, event: ReachResult) -> list[io.Effect] | None:
        """A call back that we asked for; None: it is another one's."""
        for asker, look in self._open.items():
            if look.key == event.peer:
                return [io.Send(asker, m.Reachability(event.address))]
        return None

    def handle(
        self, peer: m.PeerId, message: m.Message, status: Callable[[], bytes], now_s: float
    ) -> list[io.Effect]:
        """`hears(peer, message)` has said yes."""
        if isinstance(message, m.DiagnosticRequest):
            return self._begin(peer, message, status, now_s)
        look = self._open[peer]
        match message:
            case m.Ping(nonce) if look.pings < MAX_PINGS:
                look.pings += 1
                return [io.Send(peer, m.Pong(nonce))]
            case m.Burst(nonce, index, payload) if index == look.next_burst and _is_full_burst(payload):
                look.next_burst += 1
                if look.next_burst < m.BURST_MESSAGES:
                    return []
                return [io.Send(peer, m.BurstReceived(nonce, bytes(memoryview(payload)[-8:])))]
            case m.BurstRequest(nonce) if not look.has_requested_burst:
                look.has_requested_burst = True
                return [
                    io.Send(peer, m.Burst(nonce, index, bytes(m.BURST_MESSAGE_BYTES)))
                    for index in range(m.BURST_MESSAGES)
                ]
        self.on_disconnected(peer)
        return [io.Send(peer, TOO_MANY_CHECKUPS), io.Disconnect(peer)]

    def _begin(
        self, peer: m.PeerId, message: m.DiagnosticRequest, status: Callable[[], bytes], now_s: float
    ) -> list[io.Effect]:
        host = self._hosts.get(peer, "")
        where = address_range(host)
        while self._recent and not 0 <= now_s - self._recent[0][0] < RATE_WINDOW_S:
            self._recent.popleft()
        crowded = sum(one == where for _, one in self._recent) >= MAX_PER_ADDRESS_RANGE
        known = any(look.key == message.peer for look in self._open.values())
        if crowded or known or len(self._open) >= MAX_OPEN_CHECKUPS or peer in self._open:
            return [io.Send(peer, TOO_MANY_CHECKUPS)]
        self._recent.append((now_s, where))
        self._open[peer] = _Checkup(message.peer)
        effects, probe = self.introduce(message.peer, MAX_PROBED)
        reply = io.Send(peer, m.DiagnosticReply(probe, status()))
        note = io.LogEvent("info", "checkup", {"from": host})
        back = _addresses_at(dial_back_addresses(PeerLocation(message.address, host, "")), host)
        # Always answered, also where there is nothing to be tried.
        called: io.Effect = io.DialBack(message.peer, back) if back else io.Send(peer, m.Reachability(""))
        return [note, *effects, reply, called]


def _is_full_burst(payload: object) -> bool:
    return memoryview(payload).nbytes == m.BURST_MESSAGE_BYTES  # type: ignore[arg-type]


def _addresses_at(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Only where the connection comes from: this is no way to have others' ports tried."""
    return tuple(
        address
        for address in addresses
        if address.startswith("tcp://") and address[6:].rpartition(":")[0].strip("[]") == host
    )
