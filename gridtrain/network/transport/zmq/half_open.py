"""Half-open connections: accepted, and nobody has greeted over them yet.

Decides which of them have to go.  Never touches a socket or a clock: times are passed in.  Strangers
can open as many as they like, and each costs a descriptor and some of a handshake; so they have little
time, little room, and the room of one address range is not the others'.

    accepted --> waiting --Hello--> greeted, no longer ours
                    |------------> gone: closed by the other side
                    +------------> cut: too old, or too many of its range, or too many at all

Whoever is cut may well come back at once, and each coming costs us more than the other side.  So beyond
the soft limits the oldest are cut at a moderate pace, and whoever came last has time to greet meanwhile;
only beyond the hard limit is there no delay.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

HALF_OPEN_S = 5.0
"""Connection, handshake and Hello take a few round trips."""

MOST_HALF_OPEN = 256
MOST_OF_ONE_RANGE = 64
"""The workers of one household or one laboratory come from one range, all at once after an outage."""

CUTS_PER_S = 200.0
"""The pace, beyond those two."""

MOST_AT_ALL = 4096
"""Beyond it, or half of the descriptors that this process may have, there is no pace."""

IPV4_RANGE_BITS, IPV6_RANGE_BITS = 24, 48


def address_range(host: str) -> str:
    """The range that one party may well control altogether; what is no address is a range by itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    bits = IPV4_RANGE_BITS if address.version == 4 else IPV6_RANGE_BITS
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))


def connections_to_cut(doorway: HalfOpenConnections, heard_s: float, now_s: float) -> list[int]:
    """Descriptors of connections to cut now, each named once.

    Args:
        heard_s: everything that was said until then has been read, so whoever came `HALF_OPEN_S` before
            and is still here said nothing.
    """
    return doorway.take_expired(heard_s - HALF_OPEN_S) + doorway.take_surplus(now_s)


@dataclass(slots=True)
class HalfOpenConnections:
    """Descriptors of half-open connections, in the order in which they came.

    `most_at_all`: see `MOST_AT_ALL`.
    """

    max_total: int = MOST_AT_ALL
    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)  # range, accepted_s
    _by_range: dict[str, dict[int, None]] = field(default_factory=dict)  # its descriptors, in order
    _last_cut_s: float = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def add(self, fd: int, host: str, now_s: float) -> None:
        self.remove(fd)  # numbers are reused
        name = address_range(host)
        self._waiting[fd] = (name, now_s)
        self._by_range.setdefault(name, {})[fd] = None

    def remove(self, fd: int) -> bool:
        """It greeted, or it is gone.  False: it was not waiting."""
        if fd not in self._waiting:
            return False
        name, _ = self._waiting.pop(fd)
        self._by_range[name].pop(fd)
        if not self._by_range[name]:
            del self._by_range[name]
        return True

    def due_s(self) -> float:
        """When there is somebody to cut, by time alone; infinite: nobody waits."""
        for _, accepted_s in self._waiting.values():
            crowded = len(self._waiting) > MOST_HALF_OPEN or self._largest() > MOST_OF_ONE_RANGE
            next_s = self._last_cut_s + 1.0 / CUTS_PER_S if crowded else float("inf")
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
        """The oldest of the largest range, again and again, as far as limits and pace say."""
        pace = int(min((now_s - self._last_cut_s) * CUTS_PER_S, CUTS_PER_S))
        taken: list[int] = []
        while self._waiting:
            crowded = len(self._waiting) > MOST_HALF_OPEN or self._largest() > MOST_OF_ONE_RANGE
            if not (len(self._waiting) > self.max_total or (crowded and pace > 0)):
                break
            pace -= 1
            largest = max(self._by_range.values(), key=len)
            taken += self._take([next(iter(largest))])
        if taken:
            self._last_cut_s = now_s
        return taken

    def _largest(self) -> int:
        return max(map(len, self._by_range.values()), default=0)

    def _take(self, fds: list[int]) -> list[int]:
        for fd in fds:
            self.remove(fd)
        return fds
