"""What users hold: `grid = gridtrain.join()` and the few calls on it.

Decides how an ordinary PyTorch loop maps to steps of the run.  The work is done elsewhere: rounds in
`runtime`, updates in `optim.wrapper`, samples in `optim.sampler`.

    grid = gridtrain.join()
    optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.GTopK(density=0.01, momentum=0.9))
    for batch in grid.batches(dataset, batch_size=32, epochs=3):
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gridtrain._version import __version__
from gridtrain.config import (
    Deadlines,
    Exchange,
    GTopK,
    JoinConfig,
    LocalSteps,
    Overlap,
    round_exchange,
)
from gridtrain.errors import ConfigError, GridtrainError, RemoteProtocolError
from gridtrain.optim import reading, sampler, state_sync
from gridtrain.optim.checkpoint import Checkpoints, Snapshot
from gridtrain.optim.figures import Figures, check_names
from gridtrain.optim.flat import model_digest
from gridtrain.optim.leaving import Left, hand_over, pick_up, put_down
from gridtrain.optim.local_steps import LocalStepsOptimizer
from gridtrain.optim.prefetch import Prefetcher
from gridtrain.optim.scaler import GridScaler
from gridtrain.optim.wrapper import GridOptimizer
from gridtrain.protocol import allgather, gtopk, ledger, ring, star, tree
from gridtrain.protocol.invitation import parse
from gridtrain.protocol.messages import Held, LedgerSpec, Setup, Span
from gridtrain.runtime import handover
from gridtrain.runtime.acquaintances import Acquaintances
from gridtrain.runtime.api import Edges, GroupSession
from gridtrain.runtime.client import coordinator_address
from gridtrain.runtime.driver import Picture
from gridtrain.runtime.entry import enter
from gridtrain.runtime.hooks import leave_on_sigterm, speak_plainly
from gridtrain.runtime.naming import folder_name, listen_address, random_name, state_directory
from gridtrain.transport.credits import CreditTransport
from gridtrain.transport.curve import Identity
from gridtrain.transport.injection import Faults
from gridtrain.transport.limits import parse_rate
from gridtrain.transport.stack import over
from gridtrain.transport.zeromq import ZeroMQTransport
from gridtrain.wire.sparse import Sparse

log = logging.getLogger("gridtrain")

Facts = tuple[tuple[str, str], ...]
CHECKPOINT_S = 30.0
"""A checkpoint that is being written when the grid is closed gets so long."""

_NEIGHBOURS: dict[str, Edges] = {
    "ring": ring.neighbours,
    "all-gather": allgather.neighbours,
    "butterfly": gtopk.neighbours,
    "tree": tree.neighbours,
    "star": star.neighbours,
}


def join(
    invitation: str | None = None,
    *,
    name: str | None = None,
    listen: str | None = None,
    advertise: str | None = None,
    upload_limit: str | None = None,
    download_limit: str | None = None,
    export_dir: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
    handover_mib: int | None = None,
    state_dir: str | None = None,
    relay: bool | None = None,
    unencrypted: bool | None = None,
) -> Grid:
    """Join a run.  Whatever is not given comes from `GRIDTRAIN_*`, which `gridtrain worker` sets.

    Args:
        invitation: "gridtrain1:...", as the run's owner made it; not needed under `gridtrain worker`.
        name: what others see of this worker; a random one by default.
        listen: where peers connect to, "tcp://interface:port"; port 0 takes a free one.  By default a
            free port of the interface that leads to the coordinator.
        advertise: the address that peers are told, where it differs from `listen`.
        upload_limit, download_limit: such as "20Mbit"; always obeyed, also for what is relayed.
        export_dir: where the first worker puts the final model; the state directory by default.
        checkpoint_every: steps between two checkpoints on this worker's disk, 500 by default; 0: none.  A run
            whose workers are all gone goes on from the latest that comes back.
        checkpoint_keep: so many of the latest are kept, 2 by default.
        handover_mib: when this worker leaves before the end, it hands over at most so much of what it has not
            sent yet to another one, the largest values first; 16 by default, which is the most.
        state_dir: the folder of the checkpoints.
        relay: pass on what members that cannot reach each other send one another (sealed, so that
            nothing of it can be read here).  True by default.
        unencrypted: talk in the clear, with a coordinator that does so too; for benchmarks.

    Raises:
        ConfigError: an argument or variable is malformed, or there is no invitation.
        CoordinatorUnreachable: nobody answered in time.
        JoinRefused: the coordinator does not want this worker; the text says why.
    """
    speak_plainly()
    given: dict[str, str | None] = {
        "name": name or os.environ.get("GRIDTRAIN_NAME") or random_name(),
        "listen": listen,
        "advertise": advertise,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
        "export_dir": export_dir,
        "checkpoint_every": None if checkpoint_every is None else str(checkpoint_every),
        "checkpoint_keep": None if checkpoint_keep is None else str(checkpoint_keep),
        "handover_mib": None if handover_mib is None else str(handover_mib),
        "state_dir": state_dir,
        "relay": None if relay is None else "yes" if relay else "no",
        "unencrypted": "yes" if unencrypted else None,
    }
    with ExitStack() as held:
        if invitation is not None:
            in_the_clear = given["unencrypted"] == "yes"
            entry = held.enter_context(
                enter(parse(invitation), Deadlines().connect_s, unencrypted=in_the_clear)
            )
            given |= entry.variables()
        config = JoinConfig.from_environment(None, **given)
        config = replace(config, coordinator=coordinator_address(config.coordinator))
        check_names(config)
        identity, encrypted = Identity.read(Path(config.identity)), config.unencrypted != "yes"
        acquaintances = Acquaintances(bytes.fromhex(config.coordinator_key), relays=config.relay != "no")
        sockets = ZeroMQTransport(
            identity,
            f"gridtrain {__version__}",
            gate=acquaintances,
            encrypted=encrypted,
            plain_anywhere=not encrypted,  # where the coordinator may, which has to be told too
            upload_Bps=parse_rate(config.upload_limit) if config.upload_limit else None,
            download_Bps=parse_rate(config.download_limit) if config.download_limit else None,
        )
        planned = Faults.parse(config.faults) if config.faults else None
        transport = over(
            sockets,
            identity,
            may_relay=acquaintances.may_relay,
            with_faults=partial(planned.over, name=config.name) if planned is not None else None,
        )
        grid = Grid(transport, config, acquaintances)
        grid.held = held.pop_all()  # the identity is this worker's until its grid is closed
        return grid


class Grid:
    """This worker's hold on the run.  Used from the thread that trains."""

    def __init__(self, transport: CreditTransport, config: JoinConfig, acquaintances: Acquaintances) -> None:
        self._config = replace(config, listen=config.listen or listen_address(config.coordinator))
        self.held = ExitStack()  # what is released when the grid is closed
        self._session = GroupSession(transport, self._config, acquaintances)
        try:
            self._session.start()
        except BaseException:
            self._session.close()
            transport.close()  # nobody has yet if the session's thread never ran
            raise
        self._optimizer: GridOptimizer | None = None
        self._spec: LedgerSpec | None = None
        self._clip_norm: float | None = None
        self._figures = Figures()
        self._done = self._closed = False
        self._share = 0  # samples of a step that this worker asks for; 0: its part of the whole
        self._full = 0  # this worker's share of a full step, in samples
        self._coming: deque[tuple[Span, ...]] = deque()  # of the turn: for the next calls of step()
        self._checkpoints: Checkpoints | None = None
        self._facts: Facts = ()
        self._inherited_mass = 0.0
        self._left: Left | None = None  # the residual with which this worker left, not added yet
        self._held_step: int | None = None  # of the checkpoint that was found
        self._resumed = False  # state and residual are a checkpoint's, and no step was taken since
        atexit.register(self.close)
        leave_on_sigterm()

    # -- where we are ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank in the generation that runs; 0 before the first."""
        return self._session.picture.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the generation that runs; 0 before the first."""
        return self._session.picture.world_size

    @property
    def is_first(self) -> bool:
        """True on exactly one worker of a generation: for logging and saving."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps committed so far, over the whole run."""
        return self._session.picture.applied + 1

    @property
    def finished(self) -> bool:
        """The ledger has ended the run."""
        return self._done

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes (sent, received) by message type, counted on the socket with framing."""
        return self._session.traffic

    # -- what a loop calls -------------------------------------------------------------------------

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        exchange: Exchange | LocalSteps | None = None,
        clip_norm: float | None = None,
        average_buffers_every: int = 100,
        compare_every: int = 500,
        overlap: Overlap | None = None,
    ) -> GridOptimizer:
        """Wrap `optimizer`, so that `step()` applies the group's update.  See `GridOptimizer`.

        Args:
            exchange: `Dense()`, `TopK(...)`, `GTopK(...)`, or `LocalSteps(...)` around one of them, the same
                on all workers; `GTopK()` by default.
            clip_norm: largest 2-norm of the exchanged update; not with `LocalSteps`.
            average_buffers_every: steps between two averages of floating buffers (batch norm).
            compare_every: steps between two comparisons of the workers' states; one that differs (a flipped
                bit, another kind of processor) is replaced by that of most workers.  0: never.
            overlap: `Overlap()`: exchange while backward still computes, the same on all workers.  Gradients
                must then not be changed between backward and `step` (clip with `clip_norm=`).
        """
        if self._optimizer is not None:
            raise ConfigError("grid.optimizer was called twice", remedy="one run trains one model")
        chosen = exchange if exchange is not None else GTopK()
        options: dict[str, Any] = {
            "clip_norm": clip_norm,
            "average_buffers_every": average_buffers_every,
            "compare_every": compare_every,
            "overlap": overlap,
        }
        if isinstance(chosen, LocalSteps):
            wrapped: GridOptimizer = LocalStepsOptimizer(optimizer, model, chosen, self._session, **options)
        else:
            wrapped = GridOptimizer(optimizer, model, chosen, self._session, **options)
        self._optimizer, self._clip_norm = wrapped, clip_norm
        largest_bytes = _largest_state_bytes(model)
        self._session.attach(wrapped.capture, self._restore, largest_bytes)
        self._session.attach_residual(wrapped.residual_size, self._inherit)
        self._session.attach_following(self._copy_state, wrapped.replay, largest_bytes, wrapped.elements)
        return wrapped

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        max_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        length: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], Any] = sampler.collate,
    ) -> Iterator[Any]:
        """Yield this worker's batches until the run's ledger ends it; every sample counts once.

        One yielded batch is one step: the loop body calls `optimizer.step()` once for each batch, or
        once for every `accumulate` batches.  In a step in which this worker holds no samples (the tail
        of a pass) it gets a stand-in batch, whose gradient counts nothing, so that schedulers and the
        like take the same number of steps everywhere.

        With `LocalSteps(every=H)` a step of the run (`steps=`, `grid.step`, what is due every so many steps)
        is H of the loop's steps; sizes and `accumulate` are of one of these.

        Args:
            dataset: the same on all workers.  One that can only be iterated over must give the same samples
                each time.  It is taken in its own order (`set_epoch(pass)` is called if there is one), and
                every worker reads past the samples of the others.
            batch_size: samples of one yielded batch on this worker.
            global_batch_size: samples of a step over all workers; held constant as workers come and go, and
                shared out by the speed that each of them shows.
            max_batch_size: with `global_batch_size`, the largest yielded batch that fits this worker.
            epochs, steps: exactly one of them ends the run, for all workers together.
            accumulate: yielded batches in one step.
            seed: of the order of the samples, the same on all workers.
            length: samples of a pass over an iterable data set without `__len__`.
            num_workers: processes that read batches ahead; at most 1 for an iterable data set.  What they
                have read in vain when the group changes is dropped: a sample counts where its step commits.
            prefetch_factor: steps that each of them reads ahead.
        """
        _check_readers(dataset, num_workers, prefetch_factor)
        sizes = _Sizes(batch_size, global_batch_size, max_batch_size, accumulate, self._calls)
        self._enter(dataset, sizes, epochs, steps, seed, length)
        assert self._spec is not None
        self._wrapped().expect_backwards(accumulate)
        kind = reading.IterableReader if reading.is_iterable(dataset) else reading.MapReader
        reader = kind(dataset, self._spec, accumulate, collate_fn)
        ahead = Prefetcher(reader, num_workers, prefetch_factor) if num_workers else None
        try:
            for spans in self._turns():
                if ahead is not None and self._session.turn_spans:
                    yield from ahead.read(tuple(spans), self._foresee(ahead.depth))
                else:
                    yield from reader.read(spans)
        finally:
            if ahead is not None:
                ahead.close()

    def sampler(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        max_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int = 0,
    ) -> sampler.GridSampler:
        """For `DataLoader(dataset, batch_sampler=grid.sampler(dataset, ...))`; arguments as in `batches`.

        The loader must not run ahead of the steps: use it with `num_workers=0`.  To read ahead use
        `grid.batches(..., num_workers=...)`, which knows what to drop when the group changes.
        """
        sizes = _Sizes(batch_size, global_batch_size, max_batch_size, every=self._calls)
        if reading.is_iterable(dataset):
            raise ConfigError(
                f"a {type(dataset).__name__} has no index, so there is nothing to sample from",
                remedy="use grid.batches(dataset, ...)",
            )
        self._enter(dataset, sizes, epochs, steps, seed)
        assert self._spec is not None
        return sampler.GridSampler(self._spec, self._turns)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around a long evaluation: tells the others that this worker is busy, not hung."""
        self._session.busy(True)
        try:
            yield
        finally:
            self._session.busy(False)

    def mean(self, value: float | torch.Tensor) -> float:
        """Average of a number over all workers, for logs; all of them must call it at the same place.

        It is no replicated state: if the group changes in that moment, or a worker does not call it,
        a worker gets its own number back.
        """
        return self._session.mean(value.item() if isinstance(value, torch.Tensor) else float(value))

    def report(self, **figures: float) -> None:
        """Numbers for `gridtrain status` and the run's owner, such as `loss=...`.

        Those that are not finite are left out.  Raises `ConfigError` for a name of more than 64 bytes or
        with control characters, and for more than `figures.MAX_FIGURES` names.
        """
        self._session.note(self._figures.fitting(figures))

    def track(self, **trackers: state_sync.Stateful) -> None:
        """Schedulers, weight averages and the like that a joining worker must receive."""
        self._wrapped().track(**trackers)

    def scaler(self, **kwargs: Any) -> GridScaler:
        """A `torch.amp.GradScaler` whose scale stays equal on all workers."""
        return GridScaler(**kwargs)

    def close(self, reason: str = "the training script ended") -> None:
        """Leave the run; idempotent, and done by itself when the script ends."""
        atexit.unregister(self.close)
        try:
            if not self._done and not self._closed:
                self._closed = True
                self._hand_over()
        finally:
            self._release(reason)

    def _release(self, reason: str) -> None:
        self._session.close("its run is finished" if self._done else reason)
        if self._checkpoints is not None:
            self._checkpoints.wait(CHECKPOINT_S)
        self.held.close()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _wrapped(self) -> GridOptimizer:
        if self._optimizer is None:
            raise ConfigError(
                "the optimizer has not been wrapped yet",
                remedy="call optimizer = grid.optimizer(optimizer, model, ...) first",
            )
        return self._optimizer

    def _enter(
        self,
        dataset: Any,
        sizes: _Sizes,
        epochs: int | None,
        steps: int | None,
        seed: int,
        length: int | None = None,
    ) -> None:
        wrapped = self._wrapped()
        sizes.check()
        self._export_folder()
        size, data_text = reading.measure(dataset, length)
        self._spec = LedgerSpec(size=size, seed=seed, epochs=epochs, steps=steps)
        ledger.validate(self._spec)
        facts = (
            ("model", model_digest(wrapped.model)[0]),
            ("buffers", wrapped.averages.describe()),
            ("exchange", wrapped.describe_exchange()),
            ("optimizer", _optimizer_text(wrapped.inner)),
            ("clip_norm", str(self._clip_norm)),
            ("compared", f"every {wrapped.compare_every} steps" if wrapped.compare_every else "never"),
            ("data", data_text),
        )
        share = self._share = sizes.share
        neighbours = _NEIGHBOURS[round_exchange(wrapped.exchange_config).topology]
        self._session.enter(
            Setup(
                facts,
                self._spec,
                share,
                sizes.whole_step,
                self._resume(facts),
                follows=round_exchange(wrapped.exchange_config).sparse,
            ),
            # Averages of buffers and, in retries, settings go round the ring, whatever the exchange is.
            lambda rank, world_size: neighbours(rank, world_size) | ring.neighbours(rank, world_size),
        )

    def _turns(self) -> Iterator[Sequence[Span]]:
        """This worker's spans for each call of `optimizer.step`; a stand-in where it holds none."""
        assert self._spec is not None
        # Batch norm, for one, cannot take a batch of one sample.
        stand_in: tuple[Span, ...] = (Span(0, min(self._spec.size, max(2, self._share // self._calls))),)
        while (picture := self._session.await_turn()) is not None:
            assert picture.open_round is not None
            self._settle_checkpoints(picture.applied + 1)
            self._take_back(picture)
            self._checkpoint(picture)
            self._coming = deque(self._begin_turn(picture, stand_in))
            stand_in = self._coming[-1]
            while self._coming:
                yield self._coming.popleft()
            if not self._session.turn_taken:
                raise self._called_too_seldom(picture.open_round.step)
        self._finish()

    def _begin_turn(self, picture: Picture, stand_in: tuple[Span, ...]) -> list[tuple[Span, ...]]:
        """This worker's positions, cut for the turn's calls of `optimizer.step`."""
        self._full = picture.shares[picture.rank][1]
        self._wrapped().turn_begins(self._trained(picture.spans))
        return self._pieces(picture.spans) if picture.spans else [stand_in] * self._calls

    @property
    def _calls(self) -> int:
        return self._wrapped().calls_per_turn

    def _trained(self, spans: Sequence[Span]) -> int:
        """So many of a turn's calls have samples: a short step has fewer of them, not smaller batches."""
        samples = ledger.samples(spans)
        return min(self._calls, samples, -(-self._calls * samples // max(1, self._full)))

    def _pieces(self, spans: Sequence[Span]) -> list[tuple[Span, ...]]:
        """For each of a turn's calls; those that have no samples are given the last ones again."""
        pieces = sampler.cut(spans, self._trained(spans))
        return pieces + [pieces[-1]] * (self._calls - len(pieces))

    def _foresee(self, count: int) -> list[tuple[Span, ...]]:
        """What `_turns` yields next, at least so many unless the run ends or the group changes."""
        ahead = list(self._coming)
        for spans in self._session.foresee(-(-count // self._calls)):
            ahead += self._pieces(spans) if spans else [()]
        return ahead

    def _called_too_seldom(self, step: int) -> ConfigError:
        had = self._wrapped().local_calls
        batches = "the batch" if self._calls == 1 else f"the {self._calls} batches"
        return ConfigError(
            f"optimizer.step() was called {had} times for {batches} of step {step}; each batch is one step",
            remedy="call it once for each batch, or once for every a batches of "
            "grid.batches(..., accumulate=a)",
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def _resume(self, facts: Facts) -> Held | None:
        """Load the latest checkpoint of this training from the disk; what the group holds may be later."""
        assert self._spec is not None
        self._facts = (*facts, ("order", f"{self._spec.size} samples, seed {self._spec.seed}"))
        self._checkpoints = Checkpoints(
            self._checkpoint_folder(),
            every=_whole("checkpoint_every", self._config.checkpoint_every),
            keep=_whole("checkpoint_keep", self._config.checkpoint_keep),
        )
        self._checkpoints.claim()
        self.held.callback(self._checkpoints.release)
        found = self._checkpoints.latest(self._facts)
        self._left = pick_up(self._checkpoint_folder(), self._facts, self._wrapped().residual_size)
        if found is None:
            return None
        try:
            self._wrapped().unpack(found.document, found.tensors)
        except RemoteProtocolError as error:
            raise ConfigError(
                f"the checkpoint {found.path} of step {found.step} cannot be used: {error.reason}",
                remedy="move it away: this worker then begins from an older one, or takes the others' state",
            ) from None
        if found.residual:  # none: another worker has it (`leaving.void`)
            self._wrapped().load_residual_state(found.residual)
        if self._left is not None and self._left.history == found.held.history:
            self._wrapped().forget_residual()  # what was left is what remains of it
        self._resumed, self._held_step = True, found.step
        log.warning("this worker holds a checkpoint of step %d: %s", found.step, found.path)
        return found.held

    def _settle_checkpoints(self, step: int) -> None:
        """At the first turn: what was found on the disk is this training's past, or it is left alone."""
        assert self._checkpoints is not None
        if self._resumed:
            self._checkpoints.adopt()
        elif self._held_step is not None:
            text = (
                "the run goes on from step %d, not from this worker's checkpoint of step %d: it stays in %s"
            )
            log.warning(text, step, self._held_step, self._checkpoints.folder)
        self._resumed, self._held_step = False, None

    def _restore(self, blobs: Sequence[bytes]) -> None:
        """Another worker's state.  A residual from a checkpoint belongs to the checkpoint's step alone: what
        was sent since would be sent twice."""
        if self._resumed:
            self._wrapped().forget_residual()
            self._resumed = False
        self._wrapped().restore(blobs)

    def _copy_state(self) -> Callable[[], tuple[bytes, bytes]]:
        """Between two steps; what is returned makes bytes of the copy."""
        copy = self._wrapped().copy()
        return lambda: (copy.own(), copy.common())

    def _take_back(self, picture: Picture) -> None:
        """At the first turn: the residual with which this worker left, if no step was committed since."""
        left, self._left = self._left, None
        if left is None:
            return
        fits = (left.applied, left.history) == (picture.applied, picture.history)
        indices_K = np.flatnonzero(left.residual_N)
        entries = Sparse(indices_K, left.residual_N[indices_K])
        back = fits and self._wrapped().absorb(entries, picture.world_size)
        mass = handover.mass_of([entries])
        self._session.note({"read_back_mass": mass if back else 0.0, "lost_mass": 0.0 if back else mass})
        where = f"step {left.applied + 1}; the run is at step {picture.applied + 1}"
        log.warning("the residual of %s: mass %.3g is %s", where, mass, "read back" if back else "lost")

    def _inherit(self, peer: bytes, entries: Sparse) -> None:
        """What a member that has left had not sent is sent from here."""
        picture = self._session.picture
        added, mass = self._wrapped().absorb(entries, picture.world_size), handover.mass_of([entries])
        self._inherited_mass += mass if added else 0.0
        self._session.note({"inherited_mass": self._inherited_mass})
        what = "added to this worker's" if added else "lost: a sum with this worker's is too large to travel"
        log.warning(
            "residual of %s, %d entries, mass %.3g: %s", peer.hex()[:8], len(entries.values), mass, what
        )

    def _hand_over(self) -> None:
        """The others go on: give them what this worker has not sent.  What stops that costs the residual."""
        if self._optimizer is None or self._spec is None:
            return
        try:
            keeps = _whole("checkpoint_every", self._config.checkpoint_every) > 0
            folder = self._checkpoint_folder() if keeps else None
            if self._left is not None and folder is not None:
                put_down(folder, self._facts, self._left)  # no turn has come
                return
            budget_bytes = _whole("handover_mib", self._config.handover_mib) << 20
            hand_over(self._session, self._optimizer, budget_bytes, folder, self._facts)
        except GridtrainError as error:
            log.debug("nothing handed over: %s", error)  # this worker is no member (any more)

    def _checkpoint(self, picture: Picture) -> None:
        """Between two steps: copy what is due to be written."""
        assert self._checkpoints is not None
        if self._checkpoints.due(picture.applied + 1):
            wrapped = self._wrapped()
            document, tensors = wrapped.pack()
            held = Held(picture.applied, picture.history, picture.ledger)
            residual = wrapped.residual_state()
            self._checkpoints.write(Snapshot(held, self._facts, document, tensors, residual))

    def _checkpoint_folder(self) -> Path:
        """Each worker of a machine has its own, under the key that its coordinator has."""
        if self._config.state_dir:
            return Path(self._config.state_dir)
        worker = Path(self._config.identity).stem or self._config.name
        run = state_directory(self._config.run)
        return run / "checkpoints" / self._config.coordinator_key[:16] / folder_name(worker)

    def _finish(self) -> None:
        self._done = True
        exports = self.is_first
        if exports:
            self._export()
        if not self._session.farewell():
            log.warning("left before the coordinator had declared the run finished")
        if not exports and self._became_first():
            self._export()

    def _became_first(self) -> bool:
        """The first worker was lost after the last step, perhaps before its export: this one follows it."""
        with suppress(GridtrainError):  # what ended the session; who knows nothing of the group is not first
            return self.world_size > 0 and self.is_first
        return False

    def _export_folder(self) -> Path:
        """Made and tried before the training, since after it is too late to choose another."""
        folder = Path(self._config.export_dir or state_directory(self._config.run))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            raise ConfigError(
                f"the final model cannot be written to {folder}: {error.strerror or error}",
                remedy="name a folder with --export-dir (or gridtrain.join(export_dir=...))",
            ) from None

    def _export(self) -> None:
        """The final model as safetensors, written aside and renamed."""
        import safetensors.torch

        path = self._export_folder() / "final.safetensors"
        state = {
            name: value.detach().cpu().clone() for name, value in self._wrapped().model.state_dict().items()
        }
        safetensors.torch.save_file(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
        log.warning("the run is finished; the model is in %s", path)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How many samples a step takes, as `Grid.batches` was told: `each` worker's, or a `whole` step's."""

    each: int | None
    whole: int | None
    most: int | None = None
    accumulate: int = 1
    every: int = 1  # calls of `optimizer.step` in a step of the run

    @property
    def whole_step(self) -> int | None:
        """For `Setup.global_batch_size`."""
        return None if self.whole is None else self.whole * self.every

    @property
    def share(self) -> int:
        """For `Setup.batch_size`: of a step on this worker, or the most of it; 0: any number."""
        return ((self.each if self.whole is None else self.most) or 0) * self.accumulate * self.every

    def check(self) -> None:
        """Raises `ConfigError`."""
        if (self.each is None) == (self.whole is None):
            raise ConfigError(
                f"batch_size={self.each}, global_batch_size={self.whole}; exactly one must be given",
                remedy="batch_size=32 for 32 samples on each worker",
            )
        if self.most is not None and self.whole is None:
            raise ConfigError(
                f"max_batch_size={self.most} without global_batch_size: this worker's batch size is fixed",
                remedy="leave max_batch_size out",
            )
        named = {"batch_size": self.each, "global_batch_size": self.whole, "max_batch_size": self.most}
        for name, value in named.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be >= 1", remedy="try batch_size=32")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}; it must be >= 1", remedy="try accumulate=1")


def _largest_state_bytes(model: nn.Module) -> int:
    """What a donor may send: optimizers keep two or three copies of the model, averages one more each."""
    tensors = (*model.parameters(), *model.buffers())
    return (64 << 20) + 16 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_readers(dataset: Any, num_workers: int, prefetch_factor: int) -> None:
    most = 1 if reading.is_iterable(dataset) else None
    if num_workers < 0 or (most is not None and num_workers > most):
        bound = "0 or 1 for a data set that is read from the front" if most else ">= 0"
        raise ConfigError(f"num_workers is {num_workers}; it must be {bound}", remedy="try num_workers=1")
    if prefetch_factor < 1:
        raise ConfigError(
            f"prefetch_factor is {prefetch_factor}; it must be >= 1", remedy="try prefetch_factor=2"
        )


def _optimizer_text(inner: torch.optim.Optimizer) -> str:
    """For comparison and for people: the kind, and what the first group has other than by default."""
    defaults = {name: p.default for name, p in inspect.signature(type(inner)).parameters.items()}
    first, *others = inner.param_groups
    options = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in first.items()}
    shown = ", ".join(
        f"{name}={value}"
        for name, value in sorted(options.items())
        if name == "lr" or (isinstance(value, int | float | str | tuple) and value != defaults.get(name))
    )
    text, settings = f"{type(inner).__name__}({shown})", state_sync.hyper_digest(inner).hex()[:12]
    if others:
        text += f" and {len(others)} more group{'s' * (len(others) > 1)}, settings {settings}"
    return text if len(text) <= 400 else f"{text[:360]}... {settings}"


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be a whole number >= 0", remedy=f"try {name}=500")
    return int(text)
