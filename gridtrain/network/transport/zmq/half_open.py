"""Half-open connections: accepted, but nobody has greeted over them yet.  Decides which are closed.

Strangers can open many, and each costs a descriptor and part of a handshake.  So their time and number are
limited, the number for each address range separately.  Pure: times are passed in.

    accepted --> waiting --Hello--> greeted, and no longer here
                    |-------------> closed by the other side
                    +-------------> to be closed: too old, too many of its range, or too many in total

A closed one may return at once, and each accept costs us more than the other side.  So beyond the soft limits
the oldest are closed at a limited rate, and the newest have time to greet meanwhile; only beyond the hard
limit there is no delay.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

HALF_OPEN_S = 5.0
"""Time for connection, handshake and Hello, which take a few round trips."""

MAX_HALF_OPEN = 256
MAX_OF_ONE_RANGE = 64
"""The workers of one household or laboratory have one range, and return all at once after an outage."""

CLOSES_PER_S = 200.0
"""Rate of closing beyond those two limits."""

MAX_TOTAL = 4096
"""Beyond it, or half of the descriptors that this process may have, the rate is not limited."""

IPV4_RANGE_BITS, IPV6_RANGE_BITS = 24, 48


def address_range(host: str) -> str:
    """The network that one party may control as a whole; a host that is not an address is its own range."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    bits = IPV4_RANGE_BITS if address.version == 4 else IPV6_RANGE_BITS
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))


def connections_to_close(waiting: HalfOpenConnections, drained_s: float, now_s: float) -> list[int]:
    """Descriptors of connections to close now, each returned once.

    `drained_s`: everything that arrived before has been read, so a connection that was accepted `HALF_OPEN_S`
    earlier and is still here has sent nothing.
    """
    return waiting.take_expired(drained_s - HALF_OPEN_S) + waiting.take_surplus(now_s)


@dataclass(slots=True)
class HalfOpenConnections:
    """Descriptors of half-open connections, in the order in which they were accepted."""

    max_total: int = MAX_TOTAL
    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)  # range, accepted_s
    _by_range: dict[str, dict[int, None]] = field(default_factory=dict)  # its descriptors, in order
    _last_close_s: float = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def add(self, fd: int, host: str, now_s: float) -> None:
        self.remove(fd)  # descriptors are reused
        name = address_range(host)
        self._waiting[fd] = (name, now_s)
        self._by_range.setdefault(name, {})[fd] = None

    def remove(self, fd: int) -> bool:
        """It has greeted, or is closed.  False: it was not waiting."""
        if fd not in self._waiting:
            return False
        name, _ = self._waiting.pop(fd)
        self._by_range[name].pop(fd)
        if not self._by_range[name]:
            del self._by_range[name]
        return True

    def due_s(self) -> float:
        """When the next one must be closed; infinite: none waits."""
        for _, accepted_s in self._waiting.values():
            crowded = len(self._waiting) > MAX_HALF_OPEN or self._largest() > MAX_OF_ONE_RANGE
            next_s = self._last_close_s + 1.0 / CLOSES_PER_S if crowded else float("inf")
            return min(accepted_s + HALF_OPEN_S, next_s)
        return float("inf")

    def take_expired(self, before_s: float) -> list[int]:
        old = []
        for fd, (_, accepted_s) in self._waiting.items():
            if accepted_s > before_s:
                break
            old.append(fd)
        return self._take(old)

    def take_surplus(self, now_s: float) -> list[int]:
        """The oldest of the largest range, repeatedly, as far as limits and rate say."""
        allowed = int(min((now_s - self._last_close_s) * CLOSES_PER_S, CLOSES_PER_S))
        taken: list[int] = []
        while self._waiting:
            crowded = len(self._waiting) > MAX_HALF_OPEN or self._largest() > MAX_OF_ONE_RANGE
            if not (len(self._waiting) > self.max_total or (crowded and allowed > 0)):
                break
            allowed -= 1
            largest = max(self._by_range.values(), key=len)
            taken += self._take([next(iter(largest))])
        if taken:
            self._last_close_s = now_s
        return taken

    def _largest(self) -> int:
        return max(map(len, self._by_range.values()), default=0)

    def _take(self, fds: list[int]) -> list[int]:
        for fd in fds:
            self.remove(fd)
        return fds
