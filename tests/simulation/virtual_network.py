"""A virtual network for any kind of node and message: seconds of traffic in milliseconds.

Decides when, how often and whether a message arrives: everything is drawn from one seeded generator,
so a seed is a history.  Never opens a message.

    a sends --> [cut? lost? queue at bandwidth] --> delay --> [cut? crashed?] --> b's deliver(a, b, message)

As real networks do it, an edge without `in_order` overtakes itself; a message in flight when the edge
is cut, or when its receiver crashes, is gone.  What a node sent before it crashed still arrives; what was
meant for it then does not, even if it is back by the time.
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
    """One direction of an edge.

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
    """Nodes, the links between them, and what goes wrong with either.

    Args:
        seed: of all delays, losses and duplicates.
        link: every edge that `set_link` does not name.
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

    # -- what nodes do ---------------------------------------------------------------------------

    def attach(self, node: Node, deliver: Callable[[Node, Node, Message], None]) -> None:
        """`deliver(src, dst, message)` is called for each message that reaches `node`."""
        self._receivers[node] = deliver

    def send(self, src: Node, dst: Node, message: Message, nbytes: int = 0) -> None:
        """Never fails and never tells: whether and when it arrives is the network's affair."""
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
        """A timer; one that belongs to a `node` dies with it."""
        deaths = 0 if node is None else self._crash_counts.get(node, 0)

        def due() -> None:
            if node is None or not self._is_dead(node, deaths):
                action()

        self.clock.call_at(when_s, due)

    # -- what goes wrong ---------------------------------------------------------------------------

    def set_link(self, src: Node, dst: Node, link: LinkProperties) -> None:
        """For this direction, from now on."""
        self._links[src, dst] = link

    def crash(self, node: Node) -> None:
        """For ever, or until `revive`; one that comes back has nothing of what it was."""
        self._crashed.add(node)
        self._crash_counts[node] = self._crash_counts.get(node, 0) + 1

    def revive(self, node: Node) -> None:
        """A node of the same name: its old timers, and what was on the way to it, are gone."""
        self._crashed.discard(node)

    def partition(self, side: Iterable[Node], other: Iterable[Node]) -> None:
        """Nothing passes between the two sides, in either direction, until `heal`."""
        others = list(other)
        for a in side:
            for b in others:
                self._partitioned |= {(a, b), (b, a)}

    def heal(self) -> None:
        """All cut edges work again; what was lost stays lost."""
        self._partitioned.clear()

    # -- what happens ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is in flight, no timer runs."""
        return self.clock.idle

    def step(self) -> Delivery[Node, Message] | None:
        """Let the next thing happen.  Returns it if it was a message that reached a living node,
        None if it was a timer or a message that was lost on the way."""
        self._delivery = None
        self.clock.step()
        return self._delivery

    def _is_dead(self, node: Node, deaths: int) -> bool:
        """Is the node, which had died so often when it was looked at, dead now, or another one?"""
        return node in self._crashed or self._crash_counts.get(node, 0) != deaths

    def _arrive(self, src: Node, dst: Node, message: Message, deaths: int) -> None:
        if self._is_dead(dst, deaths) or (src, dst) in self._partitioned:
            return
        self._delivery = Delivery(self.clock.now_s, src, dst, message)
        self._receivers[dst](src, dst, message)
