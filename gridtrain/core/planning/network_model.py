"""The network as the planner sees it: links, and when each of them is free.

    src -- its upload -- the pair's own link -- links that several pairs share -- dst's download --> dst
           (shared by                            (a slow link between two sites)  (shared by
            all that src sends)                                                    all that dst receives)

Each is a queue: first come, first served, at its own rate, both directions apart.  A message flows through
all of its path at once (the first byte is not held until the last has arrived), so alone it takes
alpha + bytes / (the slowest rate), and two messages on one link wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from gridtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction between two ranks.

    Attributes:
        alpha_s: latency of the first byte, in seconds.
        bandwidth_Bps: bytes per second of this pair alone.
        shared_links: names of links that other pairs use as well; rates are in `NetworkModel.shared_Bps`.
    """

    alpha_s: float
    bandwidth_Bps: float = inf
    shared_links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """`size` ranks and the links between them.

    Attributes:
        link: the link from src to dst.
        up_Bps, down_Bps: (size,) bytes per second of each rank's upload and download.
        shared_Bps: bytes per second of links that several pairs share, by name.

    Raises:
        ConfigError: a rate is not above 0, or uploads and downloads differ in number.
    """

    link: Callable[[int, int], LinkModel]
    up_Bps: Sequence[float]
    down_Bps: Sequence[float]
    shared_Bps: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = [*self.up_Bps, *self.down_Bps, *self.shared_Bps.values()]
        if len(self.up_Bps) != len(self.down_Bps) or not self.up_Bps or any(not rate > 0 for rate in rates):
            raise ConfigError(
                f"a network of {len(self.up_Bps)} uploads and {len(self.down_Bps)} downloads, "
                f"the slowest link {min(rates, default=0.0):g} bytes per second",
                remedy="give each member an upload and a download above 0",
            )

    @property
    def size(self) -> int:
        return len(self.up_Bps)

    def path_Bps(self, src: int, dst: int) -> float:
        """Rate of the slowest link on the path from src to dst, if nobody else uses it."""
        link = self.link(src, dst)
        rates = (self.shared_Bps[name] for name in link.shared_links)
        return min(self.up_Bps[src], link.bandwidth_Bps, self.down_Bps[dst], *rates)

    def reordered(self, order: Sequence[int]) -> NetworkModel:
        """The same network with `order[rank]` of this one as rank `rank`."""
        link = self.link
        return NetworkModel(
            lambda src, dst: link(order[src], order[dst]),
            [self.up_Bps[member] for member in order],
            [self.down_Bps[member] for member in order],
            self.shared_Bps,
        )


def uniform_network(size: int, alpha_s: float, bandwidth_Bps: float) -> NetworkModel:
    """Equal links, as on one switch: `bandwidth_Bps` up and down for each rank."""
    link = LinkModel(alpha_s)
    return NetworkModel(lambda src, dst: link, (bandwidth_Bps,) * size, (bandwidth_Bps,) * size)


class LinkOccupancy:
    """When each link of a network is free again.

    A message occupies the links of its path but the last (`depart`) when its sender is ready, and the
    receiver's download (`arrive`) when its first byte is there; calls must come in the order of time.
    """

    __slots__ = ("_free_s", "_network")

    def __init__(self, network: NetworkModel) -> None:
        self._network = network
        self._free_s: dict[Hashable, float] = {}

    def earliest_departure_s(self, src: int, dst: int) -> float:
        """When a message from src can depart at the earliest, if its path has shared links.

        It queues for a shared link when it departs, not when it begins to wait for other messages of src.
        """
        return self._free_s.get(src, 0.0) if self._network.link(src, dst).shared_links else 0.0

    def depart(self, src: int, dst: int, nbytes: float, ready_s: float) -> tuple[float, float]:
        """(time of its first byte at dst, earliest time of its last byte)."""
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
        """When its last byte is at dst."""
        _, end_s = self._reserve(~dst, self._network.down_Bps[dst], nbytes, reached_s)
        return max(end_s, not_before_s)

    def _reserve(self, link: Hashable, rate_Bps: float, nbytes: float, ready_s: float) -> tuple[float, float]:
        """Queue for a link; (when the transfer begins, when it ends)."""
        start_s = max(ready_s, self._free_s.get(link, 0.0))
        end_s = self._free_s[link] = start_s + nbytes / rate_Bps
        return start_s, end_s
