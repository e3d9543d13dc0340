"""A virtual network for any kind of node and message: seconds of traffic in milliseconds.

One seeded generator decides when, how often and whether a message arrives, so a seed is a history.

    a sends --> [partition? loss? queue at bandwidth] --> delay --> [partition? crash?]
      --> deliver(a, b, message)

As in real networks, messages of a link without `in_order` can overtake each other, and a message in flight is
lost when the link is partitioned or its receiver crashes.  Messages that a node sent before it crashed still
arrive; messages sent to it do not, even if it has been revived by then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Generic, TypeVar

from simulation.virtual_clock import VirtualClock

Node = TypeVar("Node", bound=Hashable)
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class LinkProperties:
    """One direction of a link.

    Attributes:
        delay_s: shortest and longest delay; each message draws its own.
        bandwidth_Bps: bytes per second; messages queue for it.
        loss, duplicate: probability that a message is lost, or arrives twice.
        in_order: no message overtakes an earlier one, as in one TCP connection.
    """

    delay_s: tuple[float, float] = (0.001, 0.010)
    bandwidth_Bps: float = inf
    loss: float = 0.0
    duplicate: float = 0.0
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Node, Message]):
    """A message that reached a living node."""

    at_s: float
    src: Node
    dst: Node
    message: Message


class VirtualNetwork(Generic[Node, Message]):
    """Nodes, the links between them, and their faults.

    Args:
        seed: of all delays, losses and duplicates.
        link: properties of every link that `set_link` does not name.
    """

    def __init__(self, seed: int, link: LinkProperties | None = None) -> None:
        self.clock = VirtualClock()
        self._random = Random(seed)
        self._default = link or LinkProperties()
        self._links: dict[tuple[Node, Node], LinkProperties] = {}
        self._receivers: dict[Node, Callable[[Node, Node, Message], None]] = {}
        self._crashed: set[Node] = set()
        self._crash_counts: dict[Node, int] = {}
        self._partitioned: set[tuple[Node, Node]] = set()
        self._free_at_s: dict[tuple[Node, Node], float] = {}
        self._last_arrival_s: dict[tuple[Node, Node], float] = {}
        self._delivery: Delivery[Node, Message] | None = None

    # -- nodes -------------------------------------------------------------------------------------

    def attach(self, node: Node, deliver: Callable[[Node, Node, Message], None]) -> None:
        """`deliver(src, dst, message)` is called for each message that reaches `node`."""
        self._receivers[node] = deliver

    def send(self, src: Node, dst: Node, message: Message, nbytes: int = 0) -> None:
        """Send a message; the sender never learns whether it arrives."""
        edge, link = (src, dst), self._links.get((src, dst), self._default)
        if src in self._crashed or edge in self._partitioned or self._random.random() < link.loss:
            return
        deaths = self._crash_counts.get(dst, 0)
        begins_s = max(self.clock.now_s, self._free_at_s.get(edge, 0.0))
        sent_s = self._free_at_s[edge] = begins_s + nbytes / link.bandwidth_Bps
        for _ in range(2 if self._random.random() < link.duplicate else 1):
            arrives_s = sent_s + self._random.uniform(*link.delay_s)
            if link.in_order:
                arrives_s = max(arrives_s, self._last_arrival_s.get(edge, 0.0))
                self._last_arrival_s[edge] = arrives_s
            self.clock.call_at(arrives_s, lambda: self._arrive(src, dst, message, deaths))

    def call_at(self, when_s: float, action: Callable[[], None], *, node: Node | None = None) -> None:
        """Set a timer; one of a `node` ends when that crashes."""
        deaths = 0 if node is None else self._crash_counts.get(node, 0)

        def due() -> None:
            if node is None or not self._is_dead(node, deaths):
                action()

        self.clock.call_at(when_s, due)

    # -- faults ------------------------------------------------------------------------------------

    def set_link(self, src: Node, dst: Node, link: LinkProperties) -> None:
        """Set the properties of this direction, from now on."""
        self._links[src, dst] = link

    def crash(self, node: Node) -> None:
        """End a node; after `revive` it has no state of before."""
        self._crashed.add(node)
        self._crash_counts[node] = self._crash_counts.get(node, 0) + 1

    def revive(self, node: Node) -> None:
        """Start a node of the same name, without its old timers and the messages that were in flight to
        it."""
        self._crashed.discard(node)

    def partition(self, side: Iterable[Node], other: Iterable[Node]) -> None:
        """Lose all messages between the two sides, in both directions, until `heal`."""
        others = list(other)
        for a in side:
            for b in others:
                self._partitioned |= {(a, b), (b, a)}

    def heal(self) -> None:
        """End all partitions."""
        self._partitioned.clear()

    # -- events ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and no timer is set."""
        return self.clock.idle

    def step(self) -> Delivery[Node, Message] | None:
        """Process the next event; the message if one reached a living node, None for a timer or a lost
        message."""
        self._delivery = None
        self.clock.step()
        return self._delivery

    def _is_dead(self, node: Node, deaths: int) -> bool:
        """Whether the node has crashed since its number of crashes was `deaths`."""
        return node in self._crashed or self._crash_counts.get(node, 0) != deaths

    def _arrive(self, src: Node, dst: Node, message: Message, deaths: int) -> None:
        if self._is_dead(dst, deaths) or (src, dst) in self._partitioned:
            return
        self._delivery = Delivery(self.clock.now_s, src, dst, message)
        self._receivers[dst](src, dst, message)
