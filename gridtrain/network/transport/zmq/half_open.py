"""Limits the number and lifetime of half-open connections (accepted, no Hello received yet).

Strangers can open many half-open connections, and each one costs a descriptor and part of a handshake.
Their age and their number are therefore limited, in total and for each address range.  Pure: times are passed
as arguments.

    accepted --> waiting --Hello--> established, and no longer counted
                    |-------------> closed by the other side
                    +-------------> to be closed: too old, too many in its range, or too many in total

A stranger whose connection is closed may reconnect immediately, and accepting a connection costs us more than
it costs the stranger.  Therefore, beyond the soft limits, the oldest connections are closed at a limited
rate, so that the newest connections have time to send Hello.  Beyond the hard limit, connections are closed
without delay.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

HALF_OPEN_S = 5.0
"""The accepting side's time limit for connection, handshake and Hello, which take a few round trips.  The
connecting side waits longer (`dialer.HELLO_TIMEOUT_S`), so this limit applies first."""

MAX_HALF_OPEN = 256
MAX_OF_ONE_RANGE = 64
"""The maximum numbers of half-open connections, in total and from one address range.  All workers in a
household or laboratory share one range, and after an outage they all reconnect at the same time."""

CLOSES_PER_S = 200.0
"""The rate at which connections are closed while `MAX_HALF_OPEN` or `MAX_OF_ONE_RANGE` is exceeded."""

MAX_TOTAL = 4096
"""The number of half-open connections beyond which connections are closed without a rate limit, or
half the number of descriptors that this process may open if that is less."""

IPV4_RANGE_BITS, IPV6_RANGE_BITS = 24, 48


def address_range(host: str) -> str:
    """Return the range of addresses that one party may control: an IPv4 /24, an IPv6 /48, or `host` itself.

    Loopback is a range like any other; the limits are large enough for the workers of one machine.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    bits = IPV4_RANGE_BITS if address.version == 4 else IPV6_RANGE_BITS
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))


def connections_to_close(waiting: HalfOpenConnections, drained_s: float, now_s: float) -> list[int]:
    """Remove from `waiting` the connections that must be closed now, and return their descriptors.

    Args:
        drained_s: the time at which all received data had been read.  A connection that was accepted
            `HALF_OPEN_S` before this time and is still in `waiting` has not sent Hello.
    """
    return waiting.take_expired(drained_s - HALF_OPEN_S) + waiting.take_surplus(now_s)


@dataclass(slots=True)
class HalfOpenConnections:
    """The descriptors of half-open connections, in the order in which the connections were accepted."""

    max_total: int = MAX_TOTAL
    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)  # range, accepted_s
    _by_range: dict[str, dict[int, None]] = field(default_factory=dict)  # the range's descriptors, in order
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
        """Remove a connection that has sent Hello or is closed; return whether it was waiting."""
        if fd not in self._waiting:
            return False
        name, _ = self._waiting.pop(fd)
        self._by_range[name].pop(fd)
        if not self._by_range[name]:
            del self._by_range[name]
        return True

    def due_s(self) -> float:
        """Return the time at which the next connection must be closed; infinity if none is waiting."""
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
        """Remove and return surplus connections, each the oldest of the range with the most connections.

        Their number depends on the limits and on the rate at which connections may be closed.
        """
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
