"""`local(train, workers=4)`: a whole group in one process, with a real coordinator and workers in threads.

Use it for tests, notebooks and first steps.  It is not fast, because the threads share one interpreter.  They
also share the random generators of the process, so workers that must begin with equal models should copy a
model that was created beforehand.

    local(train, workers=4)      coordinator thread
                                 4 x thread: train(grid)  --> [result of each]
                                             raises       --> other workers end; local() raises it again
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TypeVar

from gridtrain.config import Deadlines, JoinConfig
from gridtrain.core.messages import PeerId
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.fault_injection import Faults
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import MemoryHub, MemoryTransport
from gridtrain.network.transport.stack import build_stack
from gridtrain.runtime.client.agent_link import AgentControl
from gridtrain.sdk.grid import Grid
from gridtrain_coordinator.access.authorization import Authorization
from gridtrain_coordinator.access_handler import AccessHandler, connection_gate
from gridtrain_coordinator.daemon import Coordinator, recover_membership
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.log import Log, silent
from gridtrain_coordinator.run.events import RunPhase

log = logging.getLogger("gridtrain")

Result = TypeVar("Result")

SHUTDOWN_TIMEOUT_S = 10.0
"""How many seconds to wait for the threads to end.  A thread that is still running user code after this time
is left running."""


PAUSED_TIMEOUT_S = 2 * Deadlines().recut_s
"""How many seconds the other workers of `local` wait after one has left, if training does not continue."""

POLL_S = 1.0


class LocalGroup:
    """A context manager that runs a coordinator in a thread; `join` adds workers.

    At the end of the `with` block, the coordinator stops, and so does every worker that has not left: a
    `Grid` method that is waiting at that time raises `EndpointKilled`.

    Args:
        min_workers: the number of workers for which the start of the run waits.
        hub: the in-memory network.
        faults: the faults to inject into workers at chosen steps (see `gridtrain.testing.Faults`).
        log: a function that is called in the coordinator's thread for each event, with its level, name and
            fields.

    Attributes:
        keys: the workers' public keys by name, for `hub.kill`.
    """

    ADDRESS = "memory://coordinator"

    def __init__(
        self,
        *,
        min_workers: int = 1,
        hub: MemoryHub | None = None,
        deadlines: Deadlines | None = None,
        faults: Faults | None = None,
        log: Log = silent,
    ) -> None:
        self.hub = hub or MemoryHub()
        self._faults = faults or Faults()
        self._deadlines = deadlines or Deadlines()
        identity = Identity.generate()
        self.key = identity.public
        # Every caller of `join` is in this process already, so every worker is admitted.
        authorization = Authorization(open_to_all=True, coordinator=identity.public)
        memory = MemoryTransport(identity.public, self.hub, gate=connection_gate(authorization, time.time))
        self._transport = build_stack(memory, identity, may_relay=lambda origin, to: True)
        self._transport.listen(self.ADDRESS)
        self._stop = threading.Event()
        self.keys: dict[str, PeerId] = {}
        self._joining = threading.Lock()  # guards `keys` and keeps workers from joining during `__exit__`
        store = JournalStore.open(":memory:")
        self._membership = recover_membership(
            store, self.key, "local", self._deadlines, min_workers=min_workers, log=log
        )
        self.coordinator = Coordinator(
            self._transport,
            store,
            self._membership,
            AccessHandler(authorization, self._membership),
            reach_s=self._deadlines.reach_s,
            log=log,
        )
        self._thread = threading.Thread(
            target=self.coordinator.run, args=(self._stop,), name="gridtrain-coordinator", daemon=True
        )

    def __enter__(self) -> LocalGroup:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._joining:
            self._stop.set()
            for key in self.keys.values():
                self.hub.kill(key)
        self._transport.wake()
        self._thread.join(SHUTDOWN_TIMEOUT_S)

    @property
    def halt_reason(self) -> str:
        """The reason why the members are not training; "" if they are, or if the run has finished."""
        is_halted = self._membership.phase in (RunPhase.WAITING, RunPhase.PAUSED)
        return self._membership.reason if is_halted else ""

    def join(
        self,
        name: str = "",
        *,
        export_dir: str | None = "",
        hidden: bool = False,
        checkpoint_every: int = 0,
        state_dir: str | None = "",
        checkpoints: str = "",
        owner: AgentControl | None = None,
    ) -> Grid:
        """Add a worker, which must be used from one thread.

        The other arguments are those of `gridtrain.join`, but by default no checkpoints are written.

        Args:
            export_dir: as in `gridtrain.join`; with None, the final model is not written.
            state_dir: as in `gridtrain.join`; with None, the worker saves nothing when it leaves.
            hidden: whether other workers cannot connect to this worker, as if it were behind NAT.
            owner: an agent that pauses the worker, or None.

        Raises:
            ConfigError: a worker of this name has not left yet.
            EndpointKilled: the group has ended.
        """
        with self._joining:
            name = name or f"worker-{len(self.keys) + 1}"
            if self.keys.get(name) in self.hub.endpoints:
                raise ConfigError(f"the group already has a worker {name!r}", remedy="choose another name")
            identity = Identity.generate()
            self.keys[name] = identity.public
            transport, allowlist = self._make_transport(identity, name, hidden)
        config = JoinConfig(
            coordinator=self.ADDRESS,
            coordinator_key=self.key.hex(),
            run="local",
            name=name,
            listen=f"memory://{name}",
            export_dir=export_dir,
            checkpoint_every=str(checkpoint_every),
            state_dir=state_dir,
            checkpoints=checkpoints,
            deadlines=self._deadlines,
        )
        grid = Grid(transport, config, allowlist, self._faults)
        if owner is not None:
            grid.led_by(owner, partial(self._make_transport, identity, name, hidden), _ignore_limits)
        return grid

    def _make_transport(
        self, identity: Identity, name: str, hidden: bool
    ) -> tuple[FlowControlTransport, PeerAllowlist]:
        allowlist = PeerAllowlist(self.key)
        host = name if hidden else "memory"  # a hidden worker is behind its own router
        memory = MemoryTransport(identity.public, self.hub, gate=allowlist, host=host)
        if self._stop.is_set():
            self.hub.kill(identity.public)
        if hidden:
            self.hub.hide(identity.public)
        faulty = partial(self._faults.over, name=name, die=partial(self.hub.kill, identity.public))
        transport = build_stack(memory, identity, may_relay=allowlist.may_relay, with_faults=faulty)
        return transport, allowlist


def _ignore_limits(upload_Bps: float | None, download_Bps: float | None) -> None:
    """Ignore rate limits, which do not apply in memory."""


def local(
    train: Callable[[Grid], Result],
    workers: int = 4,
    *,
    export_dir: str = "",
    faults: Faults | None = None,
) -> list[Result]:
    """Run `train(grid)` on `workers` workers at the same time and return their results in order.

    The workers are called "worker-0", "worker-1", ...  They are threads of this process: call functions that
    are not thread-safe, such as `from_pretrained` of transformers, before `local` or under a lock.
    Accelerate, and therefore Trainer, counts the accumulated batches of all threads together; if you use
    gradient accumulation, start a process for each worker (`gridtrain worker`).

    If a worker raises an exception, or a planned fault kills it, this function ends the other workers and
    raises the first such exception.  In the other workers, the call to the grid that is waiting, or else the
    next one, raises an exception.  A worker that does not call its grid within `SHUTDOWN_TIMEOUT_S` seconds
    keeps running in its thread.

    Args:
        export_dir: the folder to which the final model is written; if empty, it is not written.
        faults: the faults to inject at chosen steps (see `gridtrain.testing.Faults`).

    Raises:
        ConfigError: `workers` is not a positive integer.
        GridtrainError: training has not continued for `PAUSED_TIMEOUT_S` seconds after a worker had left, for
            example the only worker of a pipeline's stage.
    """
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers is {workers!r}; it must be an integer >= 1", remedy="try workers=4")
    futures: list[Future[Result]] = [Future() for _ in range(workers)]

    def one(number: int) -> None:
        try:
            # Nobody could use what a worker saves when it leaves: it does not come back.
            with group.join(f"worker-{number}", export_dir=export_dir or None, state_dir=None) as grid:
                result = train(grid)
            if export_dir and number == 0 and not grid.finished:
                log.warning("the loop ended before the run did, so no model is written to %s", export_dir)
        except BaseException as error:
            futures[number].set_exception(error)
        else:
            futures[number].set_result(result)

    threads: list[threading.Thread] = []
    try:
        with LocalGroup(min_workers=workers, faults=faults) as group:
            for number in range(workers):
                thread = threading.Thread(target=one, args=(number,), name=f"worker-{number}", daemon=True)
                thread.start()
                threads.append(thread)
            _await_results(futures, group)
        return [future.result() for future in futures]
    finally:
        until_s = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


def _await_results(futures: Collection[Future[Result]], group: LocalGroup) -> None:
    """Wait until all workers have ended; raise the first exception of a worker, or one of our own if the
    remaining workers wait in vain: nobody else can join the group."""
    remaining, training_s = set(futures), time.monotonic()
    while remaining:
        ended, remaining = wait(remaining, POLL_S, FIRST_COMPLETED)
        for each in ended:
            each.result()
        reason = group.halt_reason if len(remaining) < len(futures) else ""
        if not reason:
            training_s = time.monotonic()
        elif time.monotonic() > training_s + PAUSED_TIMEOUT_S:
            raise GridtrainError(
                f"the other workers cannot continue: {reason}",
                remedy="let every worker iterate over grid.batches until the run ends, or use more workers",
            )
