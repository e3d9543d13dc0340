"""Models a network for planning: latencies and rates of links, shared links, and when each link is free.

    src -- its upload -- the pair's own link -- links that several pairs share -- dst's download --> dst
           (shared by all                       (a slow link between two sites)   (shared by all
            messages from src)                                                     messages to dst)

Each link is a first-in, first-out queue with its own rate; the two directions are independent.  A message
flows through all links of its path at the same time: no link waits for a message's last byte before it
forwards the first.  If there is no other traffic, a message therefore takes the latency plus its size divided
by the slowest rate; messages on the same link wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from gridtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction of the link between two ranks.

    Attributes:
        alpha_s: latency of the first byte, in seconds.
        bandwidth_Bps: bytes per second of this pair's own link.
        shared_links: names of the links on the path that other pairs also use; `NetworkModel.shared_Bps`
            contains their rates.
    """

    alpha_s: float
    bandwidth_Bps: float = inf
    shared_links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """A network of `size` ranks and the links between them.

    Attributes:
        link: a function of (src, dst) that returns the link from src to dst.
        up_Bps, down_Bps: bytes per second of each rank's upload and download.
        shared_Bps: bytes per second of each link that several pairs share, by its name.
        entry_shares: the fraction of the k entries of a sparse payload that each rank contributes,
            > 0 and <= 1; empty if each rank contributes all k entries.
        burst_bytes: the number of bytes that a rank's upload or download transfers without delay after a
            pause, as with a token bucket.
        relayed_pairs: the pairs (src, dst) whose messages a relay forwards.  The model does not include the
            relay's own link, whose rate is not measured.

    Raises:
        ConfigError: there are no ranks, a rate is not above 0, or the numbers of uploads and downloads
            differ.
    """

    link: Callable[[int, int], LinkModel]
    up_Bps: Sequence[float]
    down_Bps: Sequence[float]
    shared_Bps: Mapping[str, float] = field(default_factory=dict)
    entry_shares: Sequence[float] = ()
    burst_bytes: float = 0.0
    relayed_pairs: Collection[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        rates = [*self.up_Bps, *self.down_Bps, *self.shared_Bps.values()]
        if len(self.up_Bps) != len(self.down_Bps) or not self.up_Bps or any(not rate > 0 for rate in rates):
            raise ConfigError(
                f"the network has {len(self.up_Bps)} uploads and {len(self.down_Bps)} downloads, and its "
                f"slowest rate is {min(rates, default=0.0):g} bytes per second",
                remedy="give each member an upload rate and a download rate above 0",
            )

    @property
    def size(self) -> int:
        return len(self.up_Bps)

    def path_Bps(self, src: int, dst: int) -> float:
        """Return the rate of the slowest link on the path from src to dst, in bytes per second."""
        link = self.link(src, dst)
        rate_Bps = min(self.up_Bps[src], link.bandwidth_Bps, self.down_Bps[dst])
        if not link.shared_links:
            return rate_Bps
        return min(rate_Bps, *(self.shared_Bps[name] for name in link.shared_links))

    def reordered(self, order: Sequence[int]) -> NetworkModel:
        """Return this network with member `order[rank]` as rank `rank`."""
        link = self.link
        rank_of = {member: rank for rank, member in enumerate(order)}
        return NetworkModel(
            lambda src, dst: link(order[src], order[dst]),
            [self.up_Bps[member] for member in order],
            [self.down_Bps[member] for member in order],
            self.shared_Bps,
            [self.entry_shares[member] for member in order] if self.entry_shares else (),
            self.burst_bytes,
            {(rank_of[a], rank_of[b]) for a, b in self.relayed_pairs if a in rank_of and b in rank_of},
        )


def uniform_network(size: int, alpha_s: float, bandwidth_Bps: float) -> NetworkModel:
    """Return a network of equal links, as on one switch; each upload and download has `bandwidth_Bps`."""
    link = LinkModel(alpha_s)
    return NetworkModel(lambda src, dst: link, (bandwidth_Bps,) * size, (bandwidth_Bps,) * size)


class LinkOccupancy:
    """Tracks when each link of a network is free again.

    A message is queued for all links of its path except the last when its sender is ready (`depart`), and for
    the last link, the receiver's download, when its first byte arrives there (`arrive`).  Calls must be made
    in chronological order.
    """

    __slots__ = ("_free_s", "_network")

    def __init__(self, network: NetworkModel) -> None:
        self._network = network
        self._free_s: dict[Hashable, float] = {}

    def earliest_departure_s(self, src: int, dst: int) -> float:
        """Return the earliest departure of a message from src to dst; 0.0 if its path has no shared links.

        A message is queued for shared links only when it departs, not while it waits for other messages from
        src.
        """
        return self._free_s.get(src, 0.0) if self._network.link(src, dst).shared_links else 0.0

    def depart(self, src: int, dst: int, nbytes: float, ready_s: float) -> tuple[float, float]:
        """Send a message that is ready at `ready_s`.

        Returns when the first byte of the message and, at the earliest, its last byte reach dst.
        """
        network = self._network
        link = network.link(src, dst)
        start_s, last_s = self._reserve(src, network.up_Bps[src], nbytes, ready_s)
        if link.bandwidth_Bps < inf:
            start_s, end_s = self._reserve((src, dst), link.bandwidth_Bps, nbytes, start_s)
            last_s = max(last_s, end_s)
        for name in link.shared_links:
            start_s, end_s = self._reserve(name, network.shared_Bps[name], nbytes, start_s)
            last_s = max(last_s, end_s)
        return start_s + link.alpha_s, last_s + link.alpha_s

    def arrive(self, dst: int, nbytes: float, reached_s: float, not_before_s: float) -> float:
        """Receive a message whose first byte reached dst at `reached_s`; return when its last byte arrives.

        Args:
            not_before_s: the earliest possible arrival of the last byte, as returned by `depart`.
        """
        _, end_s = self._reserve(~dst, self._network.down_Bps[dst], nbytes, reached_s)
        return max(end_s, not_before_s)

    def _reserve(self, link: Hashable, rate_Bps: float, nbytes: float, ready_s: float) -> tuple[float, float]:
        """Queue a message for a link; return the times at which its transfer begins and ends."""
        burst_bytes = self._network.burst_bytes if isinstance(link, int) else 0.0  # of a rank's own link
        credited_s = ready_s - burst_bytes / rate_Bps
        start_s = max(credited_s, self._free_s.get(link, -inf))
        end_s = self._free_s[link] = start_s + nbytes / rate_Bps
        return max(start_s, ready_s), max(end_s, ready_s)
