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

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.network.transport.interface import Transport
from gridtrain.network.wire import codec
from gridtrain.runtime.state_transfer import update_log
from gridtrain.runtime.state_transfer.state_snapshot import SnapshotSender, StateSnapshot
from gridtrain.runtime.state_transfer.update_log import StepUpdate, UpdateLog

log = logging.getLogger("gridtrain")

MAX_UPDATE_REQUESTS = 32
"""How often one follower is sent the updates; an honest one asks again when its donor has gone."""

MOST_UPDATE_BYTES = codec.MAX_PAYLOAD_BYTES
"""Values travel in float32 here, and the sum of many members' entries in one update."""

BACKLOG_BYTES = 2 << 20  # how much is queued in the transport for one follower

SnapshotParts = tuple[bytes, bytes]
"""A state's own part and its common one, see `state_sync`."""


class CatchUpSource:
    """See the module's text.

    Args:
        rate_Bps: of all blocks together; None: as fast as followers take them.
        wake: called from a thread of ours when an image is ready.
    """

    def __init__(self, rate_Bps: float | None, wake: Callable[[], None]) -> None:
        self._rate_Bps = rate_Bps
        self._wake = wake
        self._snapshot_sender = SnapshotSender()
        self._log = UpdateLog()
        self._n = 0
        self._request_counts: dict[m.PeerId, int] = {}
        self._next_step: dict[m.PeerId, int] = {}  # the next step for each who has subscribed
        self._followers: tuple[m.PeerId, ...] = ()
        self._snapshot_step: int | None = None
        self._is_building = False
        self._built: list[StateSnapshot] = []  # by the thread
        self._lock = threading.Lock()
        self._next_send_s = -math.inf
        self.disabled_reason = ""

    @property
    def snapshot_requested_after(self) -> int | None:
        """The trainer is to copy its state between two steps, after this one or a later one."""
        return None if self._is_building else self._snapshot_step

    def disable(self, reason: str) -> None:
        """What this script does in a step is not told by its update."""
        self.disabled_reason = reason

    def set_followers(self, donating: io.TakeSnapshot) -> None:
        self._followers = donating.receivers
        self._snapshot_sender.set_receivers(donating.receivers)
        self._next_step = {peer: step for peer, step in self._next_step.items() if peer in donating.receivers}
        self._request_counts = {
            peer: asks for peer, asks in self._request_counts.items() if peer in donating.receivers
        }
        image = self._snapshot_sender.snapshot
        fresh = self._is_building or (image is not None and self._log.has_all_after(image.applied))
        self._snapshot_step = (
            donating.step if donating.receivers and not fresh and not self.disabled_reason else None
        )

    def record_step(self, update: StepUpdate, n: int) -> None:
        """In the order of steps; n: length of the flat gradient."""
        if len(update.settings) > update_log.MAX_SETTINGS_BYTES:
            self.disable(
                f"the optimizer's settings of {len(update.settings)} bytes do not fit into an update"
            )
        if not self.disabled_reason:
            self._n = n
            self._log.add(update)

    def store_copy(self, applied: int, history: bytes, parts: Callable[[], SnapshotParts]) -> None:
        """The trainer has copied its state; `parts` turns the copy into bytes, in a thread of its own."""
        self._is_building, self._snapshot_step = True, None

        def make() -> None:
            try:
                image = StateSnapshot.build(applied, history, *parts())
                with self._lock:
                    self._built.append(image)
            except Exception:  # followers then take the state as members do, while the others wait
                log.exception("no image could be made of step %d", applied)
            self._is_building = False
            self._wake()

        threading.Thread(target=make, name="gridtrain-image", daemon=True).start()

    def handle_request(self, peer: m.PeerId, message: m.Message) -> list[m.Message]:
        """From a follower; what is to be answered at once."""
        if self.disabled_reason:
            return [m.SnapshotUnavailable(self.disabled_reason)]
        match message:
            case m.SnapshotRequest() | m.SnapshotBlocksRequest():
                return self._snapshot_sender.handle_request(peer, message)
            case m.UpdatesRequest(applied):
                asks = self._request_counts[peer] = self._request_counts.get(peer, 0) + 1
                if exceeds_request_limit(asks):
                    return [m.SnapshotUnavailable(f"the updates were asked for {asks} times")]
                if not self._log.has_all_after(applied):
                    return [m.SnapshotUnavailable(f"the updates after step {applied} are not here")]
                self._next_step[peer] = applied + 1
        return []

    def send_due(self, transport: Transport, now_s: float) -> list[tuple[m.PeerId, m.Message]]:
        """Send what is due; returns what is to be sent besides, as control."""
        with self._lock:
            made, self._built = self._built, []
        answers = [
            answer for image in made if self._followers for answer in self._snapshot_sender.store(image)
        ]
        for peer in list(self._next_step):
            self._send_updates(peer, transport)
        for peer in self._snapshot_sender.peers_with_blocks_due():
            while now_s >= self._next_send_s and transport.backlog_bytes(peer) < BACKLOG_BYTES:
                block = self._snapshot_sender.next_block(peer)
                if block is None:
                    break
                self._charge(block, now_s)
                answers.append((peer, block))
                if self._rate_Bps is None:
                    break  # the others have their turn
        return answers

    def due_s(self, transport: Transport) -> float:
        """When `turn` has something to send."""
        ready = any(
            transport.backlog_bytes(peer) < BACKLOG_BYTES
            for peer in self._snapshot_sender.peers_with_blocks_due()
        )
        return self._next_send_s if ready else math.inf

    def _charge(self, block: m.Message, now_s: float) -> None:
        if self._rate_Bps is not None and isinstance(block, m.SnapshotBlock):
            self._next_send_s = max(self._next_send_s, now_s) + len(block.payload) / self._rate_Bps

    def _send_updates(self, peer: m.PeerId, transport: Transport) -> None:
        while transport.connected(peer) and transport.backlog_bytes(peer) < BACKLOG_BYTES:
            update = self._log.get(self._next_step[peer])
            if update is None:
                if self._next_step[peer] <= self._log.latest_step:  # the follower is slower than the group
                    del self._next_step[peer]
                    transport.send(peer, m.SnapshotUnavailable("the next update is not here any more"))
                return
            payload = update_log.encode_update(update, self._n)
            if len(payload) > MOST_UPDATE_BYTES:
                del self._next_step[peer]
                transport.send(
                    peer, m.SnapshotUnavailable(f"an update of {len(payload)} bytes fits into no message")
                )
                return
            transport.send(peer, m.UpdateLogEntry(update.step, self._log.latest_step, payload))
            self._next_step[peer] += 1


def exceeds_request_limit(asks: int) -> bool:
    """The defence: an answer may be as long as a hundred updates, a request is a few bytes."""
    return asks > MAX_UPDATE_REQUESTS
