"""This worker's connection to its group: the I/O loop, and the next one after a pause."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from gridtrain.config import JoinConfig
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.errors import GridtrainError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.mailbox import Command
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.step_plan import RoundOutcome
from gridtrain.runtime.trainer_tasks import TrainerTasks

log = logging.getLogger("gridtrain")


class GroupConnection:
    """Owns one I/O loop at a time.  Used by the training thread, unless said otherwise.

    Attributes:
        loop: the present I/O loop.
        tasks: what the script has attached, and the tasks that are done with it.
    """

    def __init__(self, transport: FlowControlTransport, config: JoinConfig, allowlist: PeerAllowlist) -> None:
        self.config = config
        self._should_interrupt: Callable[[], bool] = lambda: False
        self._budget_exhausted: Callable[[], str] = lambda: ""
        self._earlier_traffic: dict[str, tuple[int, int]] = {}  # of the loops before this one
        self._is_paused = False  # this loop's traffic is in `_earlier_traffic` already
        self.loop = self._make_loop(transport, allowlist)
        self.tasks = TrainerTasks(self.loop)

    def start(self) -> None:
        """See `IoLoop.start`."""
        self.loop.start()

    def set_control(self, should_interrupt: Callable[[], bool], budget_exhausted: Callable[[], str]) -> None:
        """Both are called often, and for as long as this object lives.

        Args:
            should_interrupt: whether the training thread is needed elsewhere; called by that thread.
            budget_exhausted: why nothing more may be sent or received, which ends everything at once; "": it
                may.  Called by the I/O thread.
        """
        self._should_interrupt, self._budget_exhausted = should_interrupt, budget_exhausted

    @property
    def should_interrupt(self) -> bool:
        return self._should_interrupt()

    def wait(
        self, ready: Callable[[WorkerSnapshot], bool], timeout_s: float = math.inf
    ) -> WorkerSnapshot | None:
        """See `Mailbox.wait`."""
        return self.loop.mailbox.wait(ready, timeout_s)

    def submit(self, command: Command) -> None:
        """See `Mailbox.submit`."""
        self.loop.mailbox.submit(command)

    # -- a pause -----------------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Leave the run between two steps, and mean to come back: nothing is sent or received any more."""
        self.loop.stop(reason, pausing=True)
        self._earlier_traffic = self.traffic
        self._is_paused = True

    def resume(
        self,
        transport: FlowControlTransport,
        allowlist: PeerAllowlist,
        joined: io.TrainerJoined,
        *,
        reset: bool,
    ) -> None:
        """After `pause`: join again, with a new I/O loop.

        Args:
            joined: what the script has said when it joined, with the checkpoints that it has now.
            reset: the model is no longer the one that the script made, and it is of no step either.

        Raises as `IoLoop.start`; it can be called again then, with another transport.
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
        if reset:
            self.submit(io.SnapshotLoading())
        stored = self.tasks.stored_checkpoints
        if stored is not None:
            joined = replace(joined, setup=replace(joined.setup, stage_checkpoints=stored))
        self.submit(joined)

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
        """Bytes (sent, received) so far by message type, framing included."""
        total = dict(self._earlier_traffic)
        for kind, (sent, received) in ({} if self._is_paused else self.loop.traffic).items():
            before = total.get(kind, (0, 0))
            total[kind] = (before[0] + sent, before[1] + received)
        return total

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received so far; for any thread."""
        while True:
            try:
                return sum(sent + received for sent, received in self.traffic.values())
            except RuntimeError:  # the table grew while it was read
                continue

    # -- before this worker leaves -----------------------------------------------------------------

    def resolve_last_round(self, timeout_s: float) -> RoundOutcome | None:
        """See `StepRounds.resolve_last`."""
        return self.loop.step_rounds.resolve_last(timeout_s)

    def take_last_residuals(self, timeout_s: float) -> tuple[list[tuple[m.PeerId, SparseVector]], float]:
        """Residuals from others that this worker has not added yet, and the magnitude of those that it has
        acknowledged and that do not count within `timeout_s`."""
        residuals = self.loop.residuals
        try:
            residuals.stop_accepting(timeout_s)
        except GridtrainError as error:
            log.debug("residuals from other workers are not waited for: %s", error)
        return residuals.take_confirmed(), residuals.unconfirmed_magnitude

    def transfer_residual(self, pieces: tuple[memoryview, ...], timeout_s: float) -> tuple[bool | None, str]:
        """Give this worker's residual to another.

        Returns whether another worker has it (None: unknown), and who, or why not."""
        until_s = time.monotonic() + timeout_s
        if self.wait(lambda here: here.phase is io.MemberPhase.RUNNING, timeout_s) is None:
            return False, "no generation is running"
        result = self.loop.residuals.transfer(pieces, max(0.0, until_s - time.monotonic()))
        if result is None:
            return None, f"no answer within {timeout_s:.1f} s"
        return result.is_accepted, result.text
