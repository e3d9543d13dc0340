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

from gridtrain.protocol import membership_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.routes import Place, candidates
from gridtrain.transport.base import PeerUp, Reached
from gridtrain.transport.doorway import address_range

MOST_OPEN = 32
MOST_OF_ONE_RANGE, IN_S = 6, 60.0
MOST_PINGS = 32
MOST_PROBED = 3

Introduce = Callable[[m.PeerId, int], tuple[list[io.Effect], tuple[tuple[m.PeerId, str], ...]]]
TOO_MANY = m.Refused("too-many", "too many machines are looked at just now", "try again in a minute")


@dataclass(slots=True)
class _Open:
    """One that is looked at."""

    key: m.PeerId
    pings: int = 0
    coming: int = 0  # the Burst that has to come next
    asked: bool = False


@dataclass(slots=True)
class Checkups:
    """See the module's text.

    Attributes:
        introduce: tells some members to expect a key; see `Membership.lend`.
    """

    introduce: Introduce
    _hosts: dict[m.PeerId, str] = field(default_factory=dict)
    _open: dict[m.PeerId, _Open] = field(default_factory=dict)
    _latest: deque[tuple[float, str]] = field(default_factory=deque)

    def came(self, up: PeerUp) -> None:
        if up.host:
            self._hosts[up.peer] = up.host

    def went(self, peer: m.PeerId) -> None:
        self._hosts.pop(peer, None)
        self._open.pop(peer, None)

    def hears(self, peer: m.PeerId, message: m.Message) -> bool:
        """The message is ours."""
        return isinstance(message, m.Checkup) or (
            peer in self._open and isinstance(message, m.Ping | m.Burst | m.BurstAsk)
        )

    def reached(self, event: Reached) -> list[io.Effect] | None:
        """A call back that we asked for; None: it is another one's."""
        for asker, look in self._open.items():
            if look.key == event.peer:
                return [io.Send(asker, m.Reach(event.address))]
        return None

    def hear(
        self, peer: m.PeerId, message: m.Message, status: Callable[[], bytes], now_s: float
    ) -> list[io.Effect]:
        """`hears(peer, message)` has said yes."""
        if isinstance(message, m.Checkup):
            return self._begin(peer, message, status, now_s)
        look = self._open[peer]
        match message:
            case m.Ping(nonce) if look.pings < MOST_PINGS:
                look.pings += 1
                return [io.Send(peer, m.Pong(nonce))]
            case m.Burst(nonce, index, payload) if index == look.coming and _is_whole(payload):
                look.coming += 1
                if look.coming < m.BURSTS:
                    return []
                return [io.Send(peer, m.Landed(nonce, bytes(memoryview(payload)[-8:])))]
            case m.BurstAsk(nonce) if not look.asked:
                look.asked = True
                return [
                    io.Send(peer, m.Burst(nonce, index, bytes(m.BURST_BYTES))) for index in range(m.BURSTS)
                ]
        self.went(peer)
        return [io.Send(peer, TOO_MANY), io.Dismiss(peer)]

    def _begin(
        self, peer: m.PeerId, message: m.Checkup, status: Callable[[], bytes], now_s: float
    ) -> list[io.Effect]:
        host = self._hosts.get(peer, "")
        where = address_range(host)
        while self._latest and not 0 <= now_s - self._latest[0][0] < IN_S:
            self._latest.popleft()
        crowded = sum(one == where for _, one in self._latest) >= MOST_OF_ONE_RANGE
        known = any(look.key == message.peer for look in self._open.values())
        if crowded or known or len(self._open) >= MOST_OPEN or peer in self._open:
            return [io.Send(peer, TOO_MANY)]
        self._latest.append((now_s, where))
        self._open[peer] = _Open(message.peer)
        effects, probe = self.introduce(message.peer, MOST_PROBED)
        reply = io.Send(peer, m.CheckupReply(probe, status()))
        note = io.Note("info", "checkup", {"from": host})
        back = _at(candidates(Place(message.address, host, "")), host)
        # Always answered, also where there is nothing to be tried.
        called: io.Effect = io.CallBack(message.peer, back) if back else io.Send(peer, m.Reach(""))
        return [note, *effects, reply, called]


def _is_whole(payload: object) -> bool:
    return memoryview(payload).nbytes == m.BURST_BYTES  # type: ignore[arg-type]


def _at(addresses: tuple[str, ...], host: str) -> tuple[str, ...]:
    """Only where the connection comes from: this is no way to have others' ports tried."""
    return tuple(
        address
        for address in addresses
        if address.startswith("tcp://") and address[6:].rpartition(":")[0].strip("[]") == host
    )
