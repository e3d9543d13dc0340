"""A member's side of a newcomer that follows: an image when it is asked for, and each update since.

Decides what a follower gets next, and how fast.  Never captures a state (the trainer's thread does, between
two steps) and never decides who may have one: the coordinator says so (`Donating`).

    Donating(step, followers) --> wanted: the trainer's copy after `step` --> thread: digests --> ImageOutlet
    committed round ------------> UpdateLog ----> Update, at once, to those who subscribed
                                  ImageOutlet --> ImageBlock, at most `rate_Bps`, so that rounds have the line
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime import updates
from gridtrain.runtime.images import Image, ImageOutlet
from gridtrain.runtime.updates import StepUpdate, UpdateLog
from gridtrain.transport.base import Transport
from gridtrain.wire import codec

log = logging.getLogger("gridtrain")

MAX_ASKS = 32
"""How often one follower is sent the updates; an honest one asks again when its donor has gone."""

MOST_UPDATE_BYTES = codec.MAX_PAYLOAD_BYTES
"""Values travel in float32 here, and the sum of many members' entries in one update."""

BACKLOG_BYTES = 2 << 20  # how much is queued in the transport for one follower

Parts = tuple[bytes, bytes]
"""A state's own part and its common one, see `state_sync`."""


class Donating:
    """See the module's text.

    Args:
        rate_Bps: of all blocks together; None: as fast as followers take them.
        wake: called from a thread of ours when an image is ready.
    """

    def __init__(self, rate_Bps: float | None, wake: Callable[[], None]) -> None:
        self._rate_Bps = rate_Bps
        self._wake = wake
        self._outlet = ImageOutlet()
        self._log = UpdateLog()
        self._n = 0
        self._asks: dict[m.PeerId, int] = {}
        self._next: dict[m.PeerId, int] = {}  # the next step for each who has subscribed
        self._followers: tuple[m.PeerId, ...] = ()
        self._wanted_step: int | None = None
        self._making = False
        self._made: list[Image] = []  # by the thread
        self._lock = threading.Lock()
        self._line_free_s = -math.inf
        self.unable = ""

    @property
    def wanted(self) -> int | None:
        """The trainer is to copy its state between two steps, after this one or a later one."""
        return None if self._making else self._wanted_step

    def cannot(self, reason: str) -> None:
        """What this script does in a step is not told by its update."""
        self.unable = reason

    def told(self, donating: io.Donating) -> None:
        self._followers = donating.followers
        self._outlet.only(donating.followers)
        self._next = {peer: step for peer, step in self._next.items() if peer in donating.followers}
        self._asks = {peer: asks for peer, asks in self._asks.items() if peer in donating.followers}
        image = self._outlet.image
        fresh = self._making or (image is not None and self._log.has_after(image.applied))
        self._wanted_step = donating.step if donating.followers and not fresh and not self.unable else None

    def committed(self, update: StepUpdate, n: int) -> None:
        """In the order of steps; n: length of the flat gradient."""
        if len(update.settings) > updates.MAX_SETTINGS_BYTES:
            self.cannot(f"the optimizer's settings of {len(update.settings)} bytes do not fit into an update")
        if not self.unable:
            self._n = n
            self._log.add(update)

    def fill(self, applied: int, history: bytes, parts: Callable[[], Parts]) -> None:
        """The trainer has copied its state; `parts` turns the copy into bytes, in a thread of its own."""
        self._making, self._wanted_step = True, None

        def make() -> None:
            try:
                image = Image.of(applied, history, *parts())
                with self._lock:
                    self._made.append(image)
            except Exception:  # followers then take the state as members do, while the others wait
                log.exception("no image could be made of step %d", applied)
            self._making = False
            self._wake()

        threading.Thread(target=make, name="gridtrain-image", daemon=True).start()

    def heard(self, peer: m.PeerId, message: m.Message) -> list[m.Message]:
        """From a follower; what is to be answered at once."""
        if self.unable:
            return [m.NoImage(self.unable)]
        match message:
            case m.ImageAsk() | m.BlocksAsk():
                return self._outlet.asked(peer, message)
            case m.UpdatesAsk(applied):
                asks = self._asks[peer] = self._asks.get(peer, 0) + 1
                if asks_too_often(asks):
                    return [m.NoImage(f"the updates were asked for {asks} times")]
                if not self._log.has_after(applied):
                    return [m.NoImage(f"the updates after step {applied} are not here")]
                self._next[peer] = applied + 1
        return []

    def turn(self, transport: Transport, now_s: float) -> list[tuple[m.PeerId, m.Message]]:
        """Send what is due; returns what is to be sent besides, as control."""
        with self._lock:
            made, self._made = self._made, []
        answers = [answer for image in made if self._followers for answer in self._outlet.fill(image)]
        for peer in list(self._next):
            self._send_updates(peer, transport)
        for peer in self._outlet.hungry():
            while now_s >= self._line_free_s and transport.backlog_bytes(peer) < BACKLOG_BYTES:
                block = self._outlet.next_block(peer)
                if block is None:
                    break
                self._pay(block, now_s)
                answers.append((peer, block))
                if self._rate_Bps is None:
                    break  # the others have their turn
        return answers

    def due_s(self, transport: Transport) -> float:
        """When `turn` has something to send."""
        ready = any(transport.backlog_bytes(peer) < BACKLOG_BYTES for peer in self._outlet.hungry())
        return self._line_free_s if ready else math.inf

    def _pay(self, block: m.Message, now_s: float) -> None:
        if self._rate_Bps is not None and isinstance(block, m.ImageBlock):
            self._line_free_s = max(self._line_free_s, now_s) + len(block.payload) / self._rate_Bps

    def _send_updates(self, peer: m.PeerId, transport: Transport) -> None:
        while transport.connected(peer) and transport.backlog_bytes(peer) < BACKLOG_BYTES:
            update = self._log.get(self._next[peer])
            if update is None:
                if self._next[peer] <= self._log.latest:  # the follower is slower than the group
                    del self._next[peer]
                    transport.send(peer, m.NoImage("the next update is not here any more"))
                return
            payload = updates.write(update, self._n)
            if len(payload) > MOST_UPDATE_BYTES:
                del self._next[peer]
                transport.send(peer, m.NoImage(f"an update of {len(payload)} bytes fits into no message"))
                return
            transport.send(peer, m.Update(update.step, self._log.latest, payload))
            self._next[peer] += 1


def asks_too_often(asks: int) -> bool:
    """The defence: an answer may be as long as a hundred updates, a request is a few bytes."""
    return asks > MAX_ASKS
