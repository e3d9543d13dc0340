"""Half-open connections: accepted, and nobody has greeted over them yet.

Decides which of them have to go.  Never touches a socket or a clock: times are passed in.  Strangers
can open as many as they like, and each costs a descriptor and some of a handshake; so they have little
time, little room, and the room of one address range is not the others'.

    accepted --> waiting --Hello--> greeted, no longer ours
                    |------------> gone: closed by the other side
                    +------------> cut: too old, or too many of its range, or too many at all
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

HALF_OPEN_S = 5.0
"""Connection, handshake and Hello take a few round trips."""

MOST_HALF_OPEN = 256
MOST_OF_ONE_RANGE = 64
"""The workers of one household or one laboratory come from one range, all at once after an outage."""

HANDSHAKES_OF_ONE_RANGE_PER_S = 256.0
BURST_OF_ONE_RANGE = 512.0
"""A handshake takes a fraction of a millisecond of computing: this much, and no more, for one range."""

MOST_RANGES = 4096
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


def may_shake_hands(bucket: Bucket, now_s: float) -> bool:
    """Whether a range has not used up its handshakes; takes one."""
    return bucket.take(now_s)


def overstayers(doorway: Doorway, heard_s: float) -> list[int]:
    """Descriptors of connections to cut now, each named once.

    Args:
        heard_s: everything that was said until then has been read, so whoever came `HALF_OPEN_S` before
            and is still here said nothing.
    """
    return doorway.take_refused() + doorway.take_old(heard_s - HALF_OPEN_S) + doorway.take_surplus()


@dataclass(slots=True)
class Bucket:
    """How many handshakes a range has left."""

    tokens: float
    since_s: float

    def take(self, now_s: float) -> bool:
        grown = self.tokens + (now_s - self.since_s) * HANDSHAKES_OF_ONE_RANGE_PER_S
        self.tokens, self.since_s = min(BURST_OF_ONE_RANGE, grown), now_s
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


@dataclass(slots=True)
class Doorway:
    """Descriptors of half-open connections, in the order in which they came."""

    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)  # range, accepted_s
    _ranges: dict[str, dict[int, None]] = field(default_factory=dict)  # its descriptors, in order
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _refused: dict[int, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def accepted(self, fd: int, host: str, now_s: float) -> None:
        self.left(fd)  # numbers are reused
        name = address_range(host)
        self._waiting[fd] = (name, now_s)
        self._ranges.setdefault(name, {})[fd] = None
        bucket = self._buckets.pop(name, None) or Bucket(BURST_OF_ONE_RANGE, now_s)
        self._buckets[name] = bucket  # the latest is last
        if len(self._buckets) > MOST_RANGES:
            del self._buckets[next(iter(self._buckets))]
        if not may_shake_hands(bucket, now_s):
            self._refused[fd] = None

    def left(self, fd: int) -> bool:
        """It greeted, or it is gone.  False: it was not waiting."""
        if fd not in self._waiting:
            return False
        name, _ = self._waiting.pop(fd)
        self._ranges[name].pop(fd)
        if not self._ranges[name]:
            del self._ranges[name]
        self._refused.pop(fd, None)
        return True

    def due_s(self) -> float:
        """When the oldest will be too old; infinite: nobody waits."""
        for _, accepted_s in self._waiting.values():
            return accepted_s + HALF_OPEN_S
        return float("inf")

    def take_refused(self) -> list[int]:
        return self._take(list(self._refused))

    def take_old(self, before_s: float) -> list[int]:
        old = []
        for fd, (_, accepted_s) in self._waiting.items():
            if accepted_s > before_s:
                break
            old.append(fd)
        return self._take(old)

    def take_surplus(self) -> list[int]:
        taken = []
        for members in list(self._ranges.values()):
            surplus = max(0, len(members) - MOST_OF_ONE_RANGE)
            taken += self._take(list(members)[:surplus])
        while len(self._waiting) > MOST_HALF_OPEN:
            largest = max(self._ranges.values(), key=len)
            taken += self._take([next(iter(largest))])
        return taken

    def _take(self, fds: list[int]) -> list[int]:
        for fd in fds:
            self.left(fd)
        return fds
