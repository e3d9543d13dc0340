"""Which lines a message goes over, and how long they are busy: a network as the planner sees it.

Decides what a path costs in time, message by message.  Never measures, never sends, knows no exchange.

    src -- its upload -- the pair's own link -- lines that several pairs share -- dst's download --> dst
           (shared by                            (a thin line between two sites)  (shared by
            all that src sends)                                                    all that dst gets)

Every line is a queue: first come, first served, at its own rate, both directions apart.  A message flows
through all lines of its path at once (the first byte is not held until the last is there), so alone it
takes alpha + bytes / (the slowest rate), and two that share a line take it in turns.
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
        alpha_s: time of the first byte on its way, in seconds.
        bandwidth_Bps: bytes per second of this pair alone.
        shared: names of lines that other pairs use as well; their rates are in `Network.shared_Bps`.
    """

    alpha_s: float
    bandwidth_Bps: float = inf
    shared_links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """`size` ranks and what lies between them.

    Attributes:
        link: of the direction src -> dst.
        up_Bps, down_Bps: (size,) bytes per second of each rank's own line.
        shared_Bps: bytes per second of lines that several pairs share, by name.
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
                f"the slowest line {min(rates, default=0.0):g} bytes per second",
                remedy="give each member an upload and a download above 0",
            )

    @property
    def size(self) -> int:
        return len(self.up_Bps)

    def path_Bps(self, src: int, dst: int) -> float:
        """Rate of the slowest line from src to dst, if nobody else uses it."""
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
    """All lines alike, as on one switch: `bandwidth_Bps` up and down for each rank."""
    link = LinkModel(alpha_s)
    return NetworkModel(lambda src, dst: link, (bandwidth_Bps,) * size, (bandwidth_Bps,) * size)


class LinkOccupancy:
    """When each line of a network is free again.

    A message is put on the lines at its sender (`leave`) when it is ready, and on the receiver's download
    (`reach`) when its first byte is there; both calls come in the order of time.
    """

    __slots__ = ("_free_s", "_network")

    def __init__(self, network: NetworkModel) -> None:
        self._network = network
        self._free_s: dict[Hashable, float] = {}

    def earliest_departure_s(self, src: int, dst: int) -> float:
        """When a message from src can leave at the earliest, if its path has lines that others share.

        There its turn comes when it leaves, and not when it begins to wait for src's other messages.
        """
        return self._free_s.get(src, 0.0) if self._network.link(src, dst).shared_links else 0.0

    def depart(self, src: int, dst: int, nbytes: float, ready_s: float) -> tuple[float, float]:
        """When its first byte reaches dst, and before when its last one cannot."""
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

    def _reserve(self, line: Hashable, rate_Bps: float, nbytes: float, ready_s: float) -> tuple[float, float]:
        """The line's turn: when it begins and ends."""
        start_s = max(ready_s, self._free_s.get(line, 0.0))
        end_s = self._free_s[line] = start_s + nbytes / rate_Bps
        return start_s, end_s
