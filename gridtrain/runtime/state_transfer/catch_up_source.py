"""The member's side of a catch-up: sends updates immediately, and a snapshot's blocks within `donate_limit`.

The coordinator decides which workers receive a snapshot (`TakeStateSnapshot`).  The trainer copies the state
between two steps; a separate thread computes the digests of the copy's blocks.

    TakeStateSnapshot(step, receivers) --> CopyStateSnapshot --> trainer --> digests --> SnapshotSender
    committed round ---------------> UpdateLog -------> UpdateLogEntry, immediately, to subscribed workers
                                     SnapshotSender --> SnapshotBlock, at most `rate_Bps`, so that rounds are
                                                        not delayed
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from gridtrain.config import DEFAULT_DONATE_LIMIT, DEFAULT_DONATE_SHARE, JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.stragglers import MAX_SETTINGS_BYTES
from gridtrain.core.planning.worker_memory_estimate import MAX_LOGGED_BYTES
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.network.wire import codec
from gridtrain.runtime.mailbox.worker_task import CopyStateSnapshot
from gridtrain.runtime.state_transfer import update_log
from gridtrain.runtime.state_transfer.state_snapshot import PeerMessages, SnapshotSender, StateSnapshot
from gridtrain.runtime.state_transfer.update_log import StepUpdate, UpdateLog

log = logging.getLogger("gridtrain")

MAX_REQUESTS = 64
"""Maximum number of requests, for the table of a snapshot or for updates, that are answered for one receiver.
A correct receiver repeats its requests only when a source has left.  A limit is needed because a request is
only a few bytes long, while the reply may consist of hundreds of updates or of the table of a large snapshot,
to which the rate cap does not apply."""

MAX_UPDATE_BYTES = codec.MAX_PAYLOAD_BYTES
"""Maximum size of an encoded update in bytes.  An update is the sum of many members' entries, in float32."""

BACKLOG_BYTES = 2 << 20
"""While at least this many bytes are queued in the transport for a receiver, no more messages are queued for
it."""


def donated_Bps(config: JoinConfig) -> float:
    """Return the rate, in bytes per second, at which a worker sends its state to newcomers.

    Exchanges of the members wait for the slowest upload, so the default leaves most of a limited upload to
    the exchanges.
    """
    if config.donate_limit:
        return parse_rate(config.donate_limit)
    rate_Bps = parse_rate(DEFAULT_DONATE_LIMIT)
    if not config.upload_limit:
        return rate_Bps
    return min(rate_Bps, DEFAULT_DONATE_SHARE * parse_rate(config.upload_limit))


class CatchUpSource:
    """Sends the snapshot and the updates to the receivers that the coordinator has named.

    Args:
        rate_Bps: the initial value of the attribute.
        submit: a function that schedules a callable on the I/O thread; it is called from several threads.
        log_bytes: the maximum size of the update log in memory.

    Attributes:
        disabled_reason: why no worker can catch up from this worker; empty if workers can catch up from it.
        rate_Bps: the rate cap for all blocks together in bytes per second; None for no cap.  Any thread may
            change it.
    """

    def __init__(
        self,
        rate_Bps: float | None,
        submit: Callable[[Callable[[], None]], None],
        log_bytes: int = MAX_LOGGED_BYTES,
    ) -> None:
        self.rate_Bps = rate_Bps
        self._submit = submit
        self._snapshot_sender = SnapshotSender()
        self._log = UpdateLog(max_bytes=log_bytes)
        self._n = 0
        self._request_counts: Counter[m.PeerId] = Counter()
        self._next_step: dict[m.PeerId, int] = {}  # by receiver that has requested updates
        self._receivers: tuple[m.PeerId, ...] = ()
        self._snapshot_step: int | None = None
        self._copied_step = -1
        self._is_building = False
        self._announcements: PeerMessages = []  # the table of a new snapshot
        self._next_send_s = -math.inf
        self.disabled_reason = ""

    # -- training thread -------------------------------------------------------------------------

    def disable(self, reason: str) -> None:
        """Stop serving workers that catch up.  `reason` says why they cannot catch up from this worker."""
        self.disabled_reason = reason

    def store_copy(self, applied: int, history: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Start building a snapshot from the trainer's copy of its state, in a separate thread.

        Args:
            applied: the step of the state.
            history: the history of the state.
            parts: the private and the shared part; see `gridtrain.training.checkpoint.serialization`.
        """

        def start() -> None:
            self._is_building, self._snapshot_step, self._copied_step = True, None, applied
            threading.Thread(target=build, name="gridtrain-image", daemon=True).start()

        def build() -> None:
            snapshot = None
            try:
                snapshot = StateSnapshot.build(applied, history, *parts)
            except Exception:  # the receivers then receive the state while the members wait
                log.exception("cannot build the snapshot of step %d", applied + 1)
            self._submit(lambda: self._store_built(snapshot))

        self._submit(start)

    # -- I/O thread ------------------------------------------------------------------------------

    def state_snapshot_task(self, applied: int) -> CopyStateSnapshot | None:
        """Return the task to copy the state if it is due after the step `applied`, otherwise None."""
        step = self._snapshot_step
        is_due = step is not None and not self._is_building and step <= applied != self._copied_step
        return CopyStateSnapshot(step) if is_due and step is not None else None

    def set_receivers(self, effect: ev.TakeStateSnapshot) -> None:
        """Set the workers that may catch up from this worker, and stop serving all other workers."""
        receivers = self._receivers = effect.receivers
        self._snapshot_sender.set_receivers(receivers)
        self._next_step = {peer: step for peer, step in self._next_step.items() if peer in receivers}
        self._request_counts = Counter({peer: self._request_counts[peer] for peer in receivers})
        snapshot = self._snapshot_sender.snapshot
        is_fresh = self._is_building or (snapshot is not None and self._log.has_all_after(snapshot.applied))
        is_needed = receivers and not is_fresh and not self.disabled_reason
        self._snapshot_step = effect.step if is_needed else None

    def record_step(self, update: StepUpdate, n: int) -> None:
        """Add the update of a committed step to the log.  Call this method in the order of the steps.

        Args:
            update: the update.
            n: the length of the flat gradient.
        """
        if len(update.settings) > MAX_SETTINGS_BYTES:
            self.disable(
                f"the optimizer's settings have {len(update.settings)} bytes; an update can hold at most "
                f"{MAX_SETTINGS_BYTES} bytes"
            )
        if not self.disabled_reason:
            self._n = n
            self._log.add(update)

    def handle_request(self, peer: m.PeerId, message: m.Message) -> list[m.Message]:
        """Handle a receiver's message; return the messages to send in reply immediately."""
        if self.disabled_reason:
            return [m.SnapshotUnavailable(self.disabled_reason)]
        if not isinstance(message, m.SnapshotBlocksRequest):
            self._request_counts[peer] += 1
            if (count := self._request_counts[peer]) > MAX_REQUESTS:
                reason = (
                    f"the snapshot or the updates were requested {count} times; at most {MAX_REQUESTS} "
                    "requests are answered"
                )
                return [m.SnapshotUnavailable(reason)]
        match message:
            case m.SnapshotRequest() | m.SnapshotBlocksRequest():
                return self._snapshot_sender.handle_request(peer, message)
            case m.UpdatesRequest(applied):
                if not self._log.has_all_after(applied):
                    return [m.SnapshotUnavailable(f"the updates after step {applied + 1} are not available")]
                self._next_step[peer] = applied + 1
        return []

    def send_due(self, transport: Transport, now_s: float) -> PeerMessages:
        """Send the updates that are due; return the other messages that the caller has to send."""
        answers, self._announcements = self._announcements, []
        for peer in list(self._next_step):
            with contextlib.suppress(TransportError):  # the connection broke: continue when it is back
                self._send_updates(peer, transport)
        for peer in self._snapshot_sender.peers_with_blocks_due():
            while now_s >= self._next_send_s and transport.backlog_bytes(peer) < BACKLOG_BYTES:
                block = self._snapshot_sender.next_block(peer)
                if block is None:
                    break
                self._charge(block, now_s)
                answers.append((peer, block))
                if self.rate_Bps is None:
                    break  # without a rate cap, receivers get one block each in turn
        return answers

    @property
    def has_receivers(self) -> bool:
        """Whether any worker may catch up from this worker."""
        return bool(self._receivers)

    def due_s(self, transport: Transport) -> float:
        """Return the time from which `send_due` can send a block; infinity if it has no block to send."""
        ready = any(
            transport.backlog_bytes(peer) < BACKLOG_BYTES
            for peer in self._snapshot_sender.peers_with_blocks_due()
        )
        return self._next_send_s if ready else math.inf

    def _store_built(self, snapshot: StateSnapshot | None) -> None:
        self._is_building = False
        if snapshot is not None and self._receivers:
            self._announcements += self._snapshot_sender.store(snapshot)

    def _charge(self, block: m.Message, now_s: float) -> None:
        if (rate_Bps := self.rate_Bps) is not None and isinstance(block, m.SnapshotBlock):
            self._next_send_s = max(self._next_send_s, now_s) + len(block.payload) / rate_Bps

    def _send_updates(self, peer: m.PeerId, transport: Transport) -> None:
        """Send the updates that are due; raise `TransportError` if the connection breaks."""
        while transport.connected(peer) and transport.backlog_bytes(peer) < BACKLOG_BYTES:
            update = self._log.get(self._next_step[peer])
            if update is None:
                if self._next_step[peer] <= self._log.latest_step:  # the receiver is slower than the group
                    del self._next_step[peer]
                    transport.send(peer, m.SnapshotUnavailable("the next update is no longer available"))
                return
            payload = update_log.encode_update(update, self._n)
            if len(payload) > MAX_UPDATE_BYTES:
                del self._next_step[peer]
                reason = f"an update of {len(payload)} bytes does not fit into a message"
                transport.send(peer, m.SnapshotUnavailable(reason))
                return
            transport.send(peer, m.UpdateLogEntry(update.step, self._log.latest_step, payload))
            self._next_step[peer] += 1
