"""Decides what a newcomer requests, loads and replays until it has caught up, and shows a progress bar.

This module decides which data are requested from which source, what the trainer has to do next, and when the
worker has caught up or cannot catch up.  The module neither opens sockets nor accesses the model.

    source_up(peer)                                members keep training       S, T, A: numbers of steps
      |  blocks of a snapshot, from several sources    |
      |  later updates, from one source  <-------------+---- as they commit
      v
    take_work() -> StateSnapshotWork -> loaded by the trainer     -> position S
    take_work() -> ReplayWork [S+1, S+2, ..., T] -> replayed -> position T; is_caught_up near the latest step
    set_target(A, history)   the membership view names this worker; updates up to A arrive as before
    has_reached_target       the position is A, and the chained history equals the view's history
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.planning.worker_memory_estimate import MAX_LOGGED_STEPS
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.state_transfer import update_log
from gridtrain.runtime.state_transfer.state_snapshot import PeerMessages, SnapshotReceiver
from gridtrain.runtime.state_transfer.update_log import StepUpdate

log = logging.getLogger("gridtrain")

CAUGHT_UP_STEPS = 2
"""Maximum number of steps by which a worker that has caught up may be behind its update source.  The
remaining updates arrive while the generation is forming."""

PROGRESS_INTERVAL_S = 2.0
MAX_PENDING_BYTES = 4 << 30
MAX_UPDATES_PER_WORK = 64


@dataclass(frozen=True, slots=True)
class StateSnapshotWork:
    """The private and the shared part of the snapshot of step `applied`, which the trainer has to load."""

    applied: int
    private_part: memoryview
    shared_part: memoryview


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """The updates that the trainer has to replay next, in order."""

    steps: tuple[StepUpdate, ...]


CatchUpWork = StateSnapshotWork | ReplayWork


class CatchUpReceiver:
    """The state of one catch-up.

    Args:
        max_bytes: the size in bytes of the largest state that this worker's model can have.
        n: the number of elements in the flat gradient.

    Attributes:
        failure: the reason why the catch-up has failed; empty if it has not failed.
        latest_step: the latest step that the update source has reported; -1 if there is none.
        position: the step and the history of the trainer's model; None until a snapshot is loaded.
    """

    def __init__(self, max_bytes: int, n: int) -> None:
        self._n = n
        self._snapshot = SnapshotReceiver(max_bytes)
        self._sources: list[m.PeerId] = []
        self._update_source: m.PeerId | None = None
        # Step and history of the last received update, or of the snapshot:
        self._received: tuple[int, bytes] | None = None
        # Updates to replay, each with the history after it and its payload's size in bytes:
        self._pending: deque[tuple[StepUpdate, bytes, int]] = deque()
        self._pending_bytes = 0
        self.position: tuple[int, bytes] | None = None
        self._current_work: CatchUpWork | None = None
        self._target: tuple[int, bytes] | None = None
        self.failure = ""
        self.latest_step = -1

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """The number of received blocks, the total number of blocks, the step of the trainer's model (-1 if
        no snapshot has been loaded), and the latest step."""
        here, total = self._snapshot.progress
        return here, total, -1 if self.position is None else self.position[0], self.latest_step

    @property
    def is_caught_up(self) -> bool:
        return (
            self.position is not None
            and not self.failure
            and self.position[0] >= self.latest_step - CAUGHT_UP_STEPS
        )

    @property
    def has_reached_target(self) -> bool:
        """Whether the trainer's model has the step and the history that the membership view names."""
        return self._target is not None and self.position == self._target

    @property
    def idle_key(self) -> object | None:
        """A value that is constant while no data arrive, by which the caller detects silent sources.

        None if this worker is not waiting for data, because the trainer has work to do or the target has been
        reached.
        """
        is_busy = self._current_work is not None or self.has_work
        return None if is_busy or self.has_reached_target else (self.progress, self._received)

    def fail(self, reason: str) -> None:
        """Record that this worker cannot catch up, and why.  Only the first reason is kept."""
        self.failure = self.failure or reason

    # -- I/O thread --------------------------------------------------------------------------------

    def source_up(self, peer: m.PeerId) -> PeerMessages:
        if peer not in self._sources:
            self._sources.append(peer)
        return [] if self.failure else [*self._snapshot.source_up(peer), *self._subscribe()]

    def source_down(self, peer: m.PeerId) -> PeerMessages:
        if peer in self._sources:
            self._sources.remove(peer)
        if self._update_source == peer:
            self._update_source = None
        return [] if self.failure else [*self._snapshot.source_down(peer), *self._subscribe()]

    def handle_message(self, peer: m.PeerId, message: m.Message, now_s: float) -> PeerMessages:
        """Handle a source's message; return the requests to send to sources.

        Raises `RemoteProtocolError` if the message is invalid.
        """
        if self.failure:
            return []
        match message:
            case m.SnapshotDigests():
                return [*self._snapshot.receive_table(peer, message, now_s), *self._subscribe()]
            case m.SnapshotBlock():
                return self._snapshot.receive_block(peer, message, now_s)
            case m.UpdateLogEntry(step, latest, payload):
                self.latest_step = max(step, min(latest, step + MAX_LOGGED_STEPS))
                if self._received is not None and step == self._received[0] + 1:
                    self._receive_update(update_log.decode_update(step, payload, self._n), len(payload))
                return []
            case m.SnapshotUnavailable(reason):
                requests = self.source_down(peer)
                if not self._sources:
                    self.failure = reason
                return requests
            case _:
                raise RemoteProtocolError(
                    f"a state source sent {type(message).__name__}, which state sources must not send"
                )

    def tick(self, now_s: float) -> PeerMessages:
        return [*self._snapshot.tick(now_s), *self._subscribe()]

    def replace_update_source(self, reason: str) -> PeerMessages:
        """Replace an update source that sends no updates; return the requests to send.

        If there is no other source, the catch-up fails for `reason`.
        """
        silent = self._update_source
        if silent is None or len(self._sources) < 2:
            self.fail(reason)
            return []
        log.warning("state source %s is not sending updates; switching to another source", silent.hex()[:8])
        return self.source_down(silent)

    def set_target(self, applied: int, history: bytes) -> None:
        """Set the step and the history that this worker has to reach, from the membership view."""
        self._target = (applied, history)
        self._check_target()

    # -- training thread ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        if self._current_work is not None or self.failure:
            return False
        return self._snapshot.is_complete if self.position is None else bool(self._pending)

    def take_work(self) -> CatchUpWork:
        """Return the trainer's next work: the snapshot, or else the next updates.

        Call this method only if `has_work` is true, and `finish_work` after the work is done.
        """
        if self.position is None:
            assert self._snapshot.applied is not None
            self._current_work = StateSnapshotWork(self._snapshot.applied, *self._snapshot.take_parts())
        else:
            self._current_work = ReplayWork(
                tuple(update for update, _, _ in itertools.islice(self._pending, MAX_UPDATES_PER_WORK))
            )
        return self._current_work

    def finish_work(self, work: CatchUpWork) -> None:
        """Record that the trainer has finished `work`."""
        if work is not self._current_work:
            return  # the work belongs to a catch-up that was replaced
        self._current_work = None
        if isinstance(work, StateSnapshotWork):
            self.position = (work.applied, self._snapshot.history)
            self.latest_step = max(self.latest_step, self.position[0])
            self._discard_before(self.position)
        for _ in work.steps if isinstance(work, ReplayWork) else ():
            self.position = self._drop_first()
        self._check_target()

    # -- internal ----------------------------------------------------------------------------------

    def _receive_update(self, update: StepUpdate, nbytes: int) -> None:
        assert self._received is not None
        history = extend_history(self._received[1], update.digest)
        self._received = (update.step, history)
        self._pending.append((update, history, nbytes))
        self._pending_bytes += nbytes
        if self._pending_bytes > MAX_PENDING_BYTES:
            count = f"{self._pending_bytes} bytes of updates"
            self.failure = f"{count} are pending; at most {MAX_PENDING_BYTES} bytes may be pending"
        self._check_target()

    def _discard_before(self, at: tuple[int, bytes]) -> None:
        """Drop the updates up to the snapshot's step.

        If the remaining updates do not start with the next step, drop them too, so that they are requested
        again.
        """
        while self._pending and self._pending[0][0].step <= at[0]:
            self._drop_first()
        continues = self._received == at or (self._pending and self._pending[0][0].step == at[0] + 1)
        if not continues:
            self._drop_all()
            self._received, self._update_source = at, None

    def _drop_first(self) -> tuple[int, bytes]:
        """Remove the next pending update; return its step and the history after this step."""
        update, history, nbytes = self._pending.popleft()
        self._pending_bytes -= nbytes
        return update.step, history

    def _drop_all(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    def _check_target(self) -> None:
        """Fail the catch-up if the received history differs from the view's history at the target's step.

        Histories are chained, so a difference in any update up to this step is detected.
        """
        if self._target is None or self._received is None:
            return
        if self._received[0] == self._target[0] and self._received != self._target:
            self.failure = "the received updates differ from the updates of the group"

    def _subscribe(self) -> PeerMessages:
        """Choose a source for the updates after the snapshot's step, unless a source already sends updates.

        Returns the requests to send.
        """
        if self._snapshot.applied is None or self._update_source is not None or not self._sources:
            return []
        if self._received is None or (self.position is None and self._received[0] < self._snapshot.applied):
            self._received = (self._snapshot.applied, self._snapshot.history)
            self._drop_all()
        self._update_source = self._sources[0]
        return [(self._update_source, m.UpdatesRequest(self._received[0]))]


class ProgressBar:
    """Logs the progress of a catch-up at intervals."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._last_text = ""

    def show(self, progress: Sequence[int], now_s: float, *, over: bool) -> None:
        """Log the progress if the interval has passed or the catch-up is over.

        Args:
            progress: the value of `CatchUpReceiver.progress`.
            now_s: the current time.
            over: whether the catch-up is over.
        """
        if now_s < self._next_s and not over:
            return
        self._next_s = now_s + PROGRESS_INTERVAL_S
        text = "this worker has the state of the last step" if over else progress_line(progress)
        if text != self._last_text:
            self._last_text = text
            log.warning("joining while the other workers train: %s", text)


def progress_line(progress: Sequence[int], width: int = 24) -> str:
    """Return `CatchUpReceiver.progress` as one line of text, with a bar of `width` characters while blocks of
    a snapshot are being received."""
    here, total, at, latest = progress
    if total == 0:
        return "waiting for a snapshot of the state"
    if at < 0:
        filled = width * here // total
        return f"[{'#' * filled}{'.' * (width - filled)}] {here} of {total} blocks of the state"
    return f"at step {at + 1}; the other workers are at step {latest + 1}"
