"""This worker's connection to its group: starts its I/O loop, closes it for a pause, and counts traffic."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from gridtrain.config import JoinConfig
from gridtrain.core.group import member_events as ev
from gridtrain.errors import GridtrainError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.mailbox import Command, WaitCondition
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.state_transfer.catch_up_source import donated_Bps
from gridtrain.runtime.trainer_tasks import TrainerTasks

log = logging.getLogger("gridtrain")


class GroupConnection:
    """Owns one I/O loop at a time.  Only the training thread uses it, unless a method says otherwise.

    Attributes:
        loop: the current I/O loop.
        tasks: performs tasks for the group on the training thread, such as saving a checkpoint.
    """

    def __init__(self, transport: FlowControlTransport, config: JoinConfig, allowlist: PeerAllowlist) -> None:
        self.config = config
        self._should_interrupt: Callable[[], bool] = lambda: False
        self._budget_exhausted: Callable[[], str] = lambda: ""
        self._earlier_traffic: dict[str, tuple[int, int]] = {}  # traffic of the previous loops
        self._is_paused = False  # if True, `_earlier_traffic` already includes this loop's traffic
        self.loop = self._make_loop(transport, allowlist)
        self.tasks = TrainerTasks(self.loop)

    def set_control(self, should_interrupt: Callable[[], bool], budget_exhausted: Callable[[], str]) -> None:
        """Set the functions that tell this worker when to stop.  Both are called often.

        Args:
            should_interrupt: returns whether the training thread has to stop waiting; that thread calls it.
            budget_exhausted: returns why no more bytes may be sent or received; "" if more bytes are allowed.
                The I/O thread calls this function and ends immediately if it returns a reason.
        """
        self._should_interrupt, self._budget_exhausted = should_interrupt, budget_exhausted

    @property
    def should_interrupt(self) -> bool:
        return self._should_interrupt()

    def wait(self, ready: WaitCondition, timeout_s: float = math.inf) -> WorkerSnapshot | None:
        """Wait until `ready` returns True for the snapshot.  See `Mailbox.wait`."""
        return self.loop.mailbox.wait(ready, timeout_s)

    def submit(self, command: Command) -> None:
        """Submit a command to the I/O thread.  See `Mailbox.submit`."""
        self.loop.mailbox.submit(command)

    def limit_upload(self, upload_Bps: float | None) -> None:
        """Apply a new upload limit to the rate at which the state is sent.  Thread-safe."""
        limit = "" if upload_Bps is None else f"{upload_Bps:.0f}B"
        self.config = replace(self.config, upload_limit=limit)
        self._limit_state()

    def _limit_state(self) -> None:
        rate_Bps = donated_Bps(self.config)
        self.loop.catch_up_source.rate_Bps = self.loop.checkpoint_copier.rate_Bps = rate_Bps

    # -- a pause -----------------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Leave the run between two steps.  Nothing is sent or received until `resume`."""
        self.loop.stop(reason, pausing=True)
        self._earlier_traffic = self.traffic
        self._is_paused = True

    def resume(
        self,
        transport: FlowControlTransport,
        allowlist: PeerAllowlist,
        joined: ev.TrainerJoined,
        *,
        reset: bool,
    ) -> None:
        """Rejoin after `pause`, with a new I/O loop.

        Args:
            transport: the transport of the new I/O loop.
            allowlist: the access policy of the transport.
            joined: the event with which the script joined, updated with the checkpoint that it holds now.
            reset: whether the model is neither the initial model of the script nor the model after a step.

        Raises the same errors as `IoLoop.start`.  After an error, the call can be repeated with another
        transport.
        """
        loop = self._make_loop(transport, allowlist)
        self.tasks.connect(loop)
        loop.heartbeat.add_figures(self.loop.heartbeat.figures)
        try:
            loop.start()
        except BaseException:
            loop.stop()
            transport.close()
            raise
        self.loop, self._is_paused = loop, False
        self._limit_state()  # the upload limit may have changed meanwhile
        if reset:
            self.submit(ev.StateSnapshotLoading())
        stored = self.tasks.stored_checkpoints
        if stored is not None:
            joined = replace(joined, setup=replace(joined.setup, stage_checkpoints=stored))
        self.submit(joined)

    def leave_paused(
        self, transport: FlowControlTransport, allowlist: PeerAllowlist, reason: str, timeout_s: float
    ) -> None:
        """After `pause`, notify the coordinator that this worker will not rejoin.

        Raises the same errors as `IoLoop.start`.
        """
        loop = self._make_loop(transport, allowlist)
        try:
            loop.start(timeout_s)
        finally:
            loop.stop(reason)
            transport.close()
            self._earlier_traffic = self._traffic_with(loop)

    def _make_loop(self, transport: FlowControlTransport, allowlist: PeerAllowlist) -> IoLoop:
        return IoLoop(
            transport,
            self.config,
            allowlist,
            should_interrupt=lambda: self._should_interrupt(),
            budget_exhausted=lambda: self._budget_exhausted(),
        )

    # -- traffic -----------------------------------------------------------------------------------

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """The number of bytes (sent, received) so far by message type, including framing."""
        return self._earlier_traffic if self._is_paused else self._traffic_with(self.loop)

    def _traffic_with(self, loop: IoLoop) -> dict[str, tuple[int, int]]:
        total = dict(self._earlier_traffic)
        for kind, (sent, received) in loop.traffic.items():
            before = total.get(kind, (0, 0))
            total[kind] = (before[0] + sent, before[1] + received)
        return total

    @property
    def total_bytes(self) -> tuple[int, int]:
        """The total number of bytes sent so far, and the total number received.  Thread-safe."""
        while True:
            try:
                counts = list(self.traffic.values())
            except RuntimeError:  # the table grew while it was read
                continue
            return sum(sent for sent, _ in counts), sum(received for _, received in counts)

    # -- before this worker leaves -----------------------------------------------------------------

    def take_last_residuals(self, timeout_s: float) -> tuple[list[tuple[str, SparseVector]], float]:
        """Stop accepting residuals, and wait until those that this worker has acknowledged are confirmed or
        dropped, but not longer than `timeout_s`.

        Returns a pair: the confirmed residuals that this worker has not added yet, each with the name of the
        worker that sent it; and the sum of the magnitudes of all entries that are still not confirmed.
        """
        residuals = self.loop.residuals
        try:
            residuals.stop_accepting(timeout_s)
        except GridtrainError as error:
            log.debug("cannot wait for the residuals of other workers: %s", error)
        return residuals.take_confirmed(), residuals.unconfirmed_magnitude

    def transfer_residual(self, pieces: tuple[memoryview, ...], timeout_s: float) -> tuple[bool | None, str]:
        """Transfer this worker's residual to another worker.

        Returns whether another worker has accepted the residual (None if this is unknown), and a text that
        names that worker or says why none has accepted it.
        """
        until_s = time.monotonic() + timeout_s
        if self.wait(lambda here: here.phase is ev.MemberPhase.RUNNING, timeout_s) is None:
            return False, "no generation is running"
        result = self.loop.residuals.transfer(pieces, max(0.0, until_s - time.monotonic()))
        if result is None:
            return None, f"no answer within {timeout_s:.1f} s"
        return result.is_accepted, result.text
