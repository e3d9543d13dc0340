"""The trainer's place in the group: turns, rounds and chores, seen from the training thread.

Decides when the training thread may go on and which chore it does while it waits (capture its state
for a joiner, restore a donor's).  Never touches a socket, a protocol rule or a tensor.

    batches:  await_turn -> spans ----> the user's loop computes -----> optimizer.step
                                                                          begin -> StepPlan
                                                                          run   -> RoundOutcome
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from gridtrain.config import JoinConfig
from gridtrain.errors import ConfigError, GridtrainError, RemoteProtocolError
from gridtrain.protocol import ledger
from gridtrain.protocol import member_io as io
from gridtrain.protocol import messages as m
from gridtrain.runtime.acquaintances import Acquaintances
from gridtrain.runtime.buckets import BucketedWorkspace
from gridtrain.runtime.buffers import Workspace
from gridtrain.runtime.donating import Parts
from gridtrain.runtime.driver import Driver, Picture
from gridtrain.runtime.following import ImageWork
from gridtrain.runtime.pace import Pace
from gridtrain.runtime.plan import RoundOutcome, StepPlan
from gridtrain.runtime.statefeed import MAX_STATE_BYTES
from gridtrain.runtime.updates import StepUpdate
from gridtrain.transport.credits import CreditTransport
from gridtrain.wire.sparse import Sparse

log = logging.getLogger("gridtrain")

Capture = Callable[[bool], Sequence[bytes | memoryview]]
Restore = Callable[[Sequence[bytes]], None]
Replay = Callable[[StepUpdate], None]
CopyParts = Callable[[], Callable[[], Parts]]
Inherit = Callable[[m.PeerId, Sparse], None]
Edges = Callable[[int, int], frozenset[int]]

LOOK_AGAIN_S = 0.05  # the loop's thread may not have noticed yet that there is nothing left to do
FAREWELL_S = 15.0  # how long a finished worker stays for the others' sake


def _no_data_named() -> ConfigError:
    return ConfigError(
        "a step was begun before the data was named",
        remedy="iterate over grid.batches(dataset, ...), or use grid.sampler(dataset, ...)",
    )


class GroupSession:
    """One worker's place in a run, over a `Driver`.  All methods belong to the training thread.

    Raises, from every method that waits: `JoinRefused` when the coordinator dismissed this worker,
    `RunPaused` when the run cannot go on, or whatever else ended the loop's thread.
    """

    def __init__(self, transport: CreditTransport, config: JoinConfig, acquaintances: Acquaintances) -> None:
        self.config = config
        self._driver = Driver(transport, config, acquaintances)
        self._capture: Capture | None = None
        self._restore: Restore | None = None
        self._given_for = (0, False)
        self._copy: CopyParts | None = None
        self._replay: Replay | None = None
        self._image_of = -1
        self._inherit: Inherit | None = None
        self._turn: Picture | None = None
        self._turn_taken = False
        self._early: tuple[m.RoundId, StepPlan] | None = None  # the round that buckets were sent for
        self._spec: m.LedgerSpec | None = None
        self._ended = False
        self._mean_step = self._mean_index = 0
        self._pace = Pace()

    def start(self) -> None:
        """See `Driver.start`."""
        self._driver.start()

    def attach(self, capture: Capture, restore: Restore, max_state_bytes: int = MAX_STATE_BYTES) -> None:
        """How to take a copy of this worker's state, and how to load another's, which is no larger."""
        self._capture, self._restore = capture, restore
        self._driver.allow_state(max_state_bytes)

    def attach_following(self, copy: CopyParts, replay: Replay, max_state_bytes: int, elements: int) -> None:
        """How to copy this worker's state between two steps (bytes are made of it in another thread), and how
        to apply what the members did in a step; `elements`: of the flat gradient."""
        self._copy, self._replay = copy, replay
        self._driver.allow_following(max_state_bytes, elements)

    def cannot_replay(self, reason: str) -> None:
        """See `optim.session.Session.cannot_replay`."""
        self._driver.cannot_replay(reason)

    def attach_residual(self, n: int, inherit: Inherit) -> None:
        """How to add what another worker has not sent to what this one has not: of n elements each."""
        self._inherit = inherit
        self._driver.allow_residual(n)

    def enter(self, setup: m.Setup, edges: Edges) -> None:
        """Ask for a place in the run.  The coordinator refuses a set-up that differs from the run's."""
        if self._spec is not None:
            raise ConfigError(
                "a second data set was given to this run; its ledger has one",
                remedy="call grid.batches(...) or grid.sampler(...) once",
            )
        self._spec = setup.ledger
        self._driver.command(io.Enter(setup, edges))

    # -- turns -----------------------------------------------------------------------------------

    def await_turn(self) -> Picture | None:
        """Block until a step is open; None when the ledger has ended the run.  Does chores meanwhile."""
        if self._spec is None:
            raise _no_data_named()
        self._turn, self._turn_taken = None, False
        while (picture := self._wait_for_more()).offered_state:
            self._take_state()
        if picture.finished:
            return None
        self._turn = picture
        self._pace.begin(time.monotonic(), sum(span.stop - span.start for span in picture.spans))
        return picture

    @property
    def turn_spans(self) -> tuple[m.Span, ...]:
        """This worker's positions of the latest turn; (): it takes part without samples."""
        return self._turn.spans if self._turn is not None else ()

    def foresee(self, count: int) -> list[tuple[m.Span, ...]]:
        """This worker's positions in the steps after the latest turn's, unless the group changes."""
        turn = self._turn
        if turn is None or self._spec is None:
            return []
        return ledger.foresee(self._spec, turn.ledger, turn.shares, self._driver.me, count)

    def _wait_for_more(self) -> Picture:
        """Until a step is open, the run has ended, or a state is offered; hands out its own meanwhile."""
        while True:
            picture = self._driver.wait(self._has_something)
            assert picture is not None
            self._driver.busy(True)  # what follows may take long, and others wait for it
            try:
                if not self._do_chores(picture):
                    return picture
            finally:
                self._driver.busy(False)

    def _do_chores(self, picture: Picture) -> bool:
        """What others wait for, and what this worker lacks; True: the picture is another one now."""
        if picture.offered_work and self._replay is not None:
            self._follow()
        elif picture.inherited and self._inherit is not None and not self._has_begun(picture):
            for peer, entries in self._driver.take_inheritance():  # between two rounds: none is prepared
                self._inherit(peer, entries)
            self._driver.wait(lambda p: not p.inherited)
        elif picture.offered_state:
            return False
        elif self._owes_state(picture):
            self._give_state(picture.wanted_state)
        elif self._owes_image(picture):
            self._give_image(picture)
        else:
            return False
        return True

    def _follow(self) -> None:
        """Load an image, or replay updates: the members go on meanwhile."""
        assert self._restore is not None and self._replay is not None
        while (work := self._driver.take_work()) is not None:
            try:
                if isinstance(work, ImageWork):
                    self._restore([bytes(work.own), bytes(work.common)])
                else:
                    for step in work.steps:
                        self._replay(step)
            except RemoteProtocolError as error:
                self._driver.fail_work(error.reason)
                break
            self._driver.did_work(work)
        self._driver.wait(lambda p: not p.offered_work, LOOK_AGAIN_S)

    def _owes_image(self, picture: Picture) -> bool:
        wanted = picture.wanted_image
        return wanted is not None and self._copy is not None and wanted <= picture.applied != self._image_of

    def _give_image(self, picture: Picture) -> None:
        assert self._copy is not None
        self._image_of = picture.applied
        self._driver.give_image(picture.applied, picture.history, self._copy())

    def _has_something(self, picture: Picture) -> bool:
        return (
            picture.open_round is not None
            or picture.finished
            or picture.offered_state
            or picture.offered_work
            or picture.inherited
            or self._owes_state(picture)
            or self._owes_image(picture)
        )

    def _owes_state(self, picture: Picture) -> bool:
        return picture.wanted_state > self._given_for and self._capture is not None

    def _give_state(self, wanted: tuple[int, bool]) -> None:
        assert self._capture is not None
        self._given_for = wanted
        generation, whole = wanted
        self._driver.give_state(generation, self._capture(whole))

    def _take_state(self) -> None:
        if self._restore is None:
            raise ConfigError(
                "a state arrived before the optimizer was wrapped",
                remedy="call grid.optimizer(optimizer, model, ...) before grid.batches(...)",
            )
        term, generation, blobs = self._driver.take_state()
        self._driver.busy(True)
        try:
            self._restore(blobs)
        finally:
            self._driver.busy(False)
        self._driver.command(io.Restored(term, generation))
        self._driver.wait(lambda p: not p.offered_state)

    # -- one step (gridtrain.optim.session.Session) ------------------------------------------------

    def early(self) -> StepPlan | None:
        """See `optim.session.Session.early`."""
        picture, turn = self._driver.look(), self._turn
        if turn is None or self._turn_taken or picture.open_round is None or picture.open_round.attempt:
            return None
        if (picture.open_round, picture.spans) != (turn.open_round, turn.spans):
            return None
        plan = _plan(picture, picture.open_round)
        self._early = picture.open_round, plan
        return plan

    def send_early(self, plan: StepPlan, bucket: int, workspace: Workspace, skip: bool) -> None:
        """See `optim.session.Session.send_early`."""
        if self._early is not None and self._early[1] is plan:
            self._driver.begin_round(self._early[0], m.Channel(group=bucket), workspace, skip)

    def _has_begun(self, picture: Picture) -> bool:
        """Buckets of the open round are under way: what they were made of may not change."""
        return self._early is not None and self._early[0] == picture.open_round

    def begin(self) -> StepPlan | None:
        """See `optim.session.Session.begin`."""
        if self._spec is None:
            raise _no_data_named()
        if self._turn is None or self._turn.open_round is None:
            raise ConfigError(
                "optimizer.step() was called after the end of the run",
                remedy="leave the loop when grid.batches(...) ends; it ends the run",
            )
        step = self._turn.open_round.step
        if self._turn_taken:
            raise ConfigError(
                f"optimizer.step() was called 2 times for the batch of step {step}; each batch is one step",
                remedy="call it once for each batch, or once for every a batches of "
                "grid.batches(..., accumulate=a)",
            )
        if self._pace.end(time.monotonic()):
            self._driver.note(self._pace.figures())
        picture = self._wait_for_more()
        moved_on = picture.open_round is None or picture.open_round.step != step
        other_samples = picture.spans not in ((), self._turn.spans)
        if picture.offered_state or moved_on or other_samples:
            # Away for a while: the group went on without this batch.  A state is loaded between batches only.
            self._turn_taken = True
            return None
        assert picture.open_round is not None
        self._turn = picture
        self._driver.begin_attempt()
        if self._early is not None and self._has_begun(picture):
            return self._early[1]
        return _plan(picture, picture.open_round)

    def run(
        self,
        plan: StepPlan,
        workspaces: Sequence[Workspace | BucketedWorkspace],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """See `optim.session.Session.run`."""
        assert self._turn is not None and self._turn.open_round is not None
        self._early = None
        outcome = self._driver.run_round(self._turn.open_round, workspaces, skip, settings)
        self._turn_taken = outcome.committed
        return outcome

    @property
    def turn_taken(self) -> bool:
        """The batch of the latest turn went into its step, or came too late for it."""
        return self._turn_taken

    def compare(self, step: int, digest: bytes) -> None:
        """See `optim.session.Session.compare`."""
        self._driver.compare(step, digest)

    def note(self, figures: Mapping[str, float]) -> None:
        """Figures for `gridtrain status`."""
        self._driver.note(figures)

    def mean(self, value: float) -> float:
        """Average over the workers, for people: `value` itself where the group changes meanwhile."""
        picture = self._driver.look()
        step = picture.applied + 1
        self._mean_index = self._mean_index + 1 if self._mean_step == step else 0
        self._mean_step = step
        mean = self._driver.mean(step, self._mean_index, value, self.config.deadlines.first_step_s)
        return value if mean is None else mean

    # -- what people ask ---------------------------------------------------------------------------

    @property
    def picture(self) -> Picture:
        return self._driver.look()

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes (sent, received) so far by message type, framing included."""
        return self._driver.traffic

    def busy(self, inside: bool) -> None:
        self._pace.drop()  # an evaluation is no computing of samples
        self._driver.busy(inside)

    def settle(self, timeout_s: float) -> RoundOutcome | None:
        """See `Driver.settle`."""
        return self._driver.settle(timeout_s)

    def last_inheritance(self, timeout_s: float) -> tuple[list[tuple[m.PeerId, Sparse]], float]:
        """Before this worker leaves: what others have handed over to it and it has not added yet; and the
        mass of what was acknowledged, but does not count within `timeout_s`."""
        driver = self._driver
        try:
            driver.last_call(timeout_s)
        except GridtrainError as error:
            log.debug("what was handed over to this worker is not waited for: %s", error)
        return driver.take_inheritance(), driver.open_mass

    def hand_on(self, pieces: tuple[memoryview, ...], timeout_s: float) -> tuple[bool | None, str]:
        """Give this worker's residual away before it leaves: whether somebody has it (None: perhaps); who, or
        why not."""
        until_s = time.monotonic() + timeout_s
        if self._driver.wait(lambda p: p.stage is io.Stage.RUNNING, timeout_s) is None:
            return False, "no generation is running"
        handed = self._driver.hand_on(pieces, max(0.0, until_s - time.monotonic()))
        return (
            (None, f"no answer within {timeout_s:.1f} s") if handed is None else (handed.taken, handed.text)
        )

    def farewell(self) -> bool:
        """After the end: stay until all members have finished, so that none misses the last decision.

        Returns whether the coordinator declared the run finished in time.
        """
        until_s = time.monotonic() + FAREWELL_S
        try:
            while True:
                picture = self._driver.wait(
                    lambda p: p.run_state[0] == "finished" or self._owes_state(p),
                    until_s - time.monotonic(),
                )
                if picture is None or picture.run_state[0] == "finished":
                    return picture is not None
                self._give_state(picture.wanted_state)
        except GridtrainError:
            return False  # the run is over for this worker; nothing depends on what failed

    def close(self, reason: str = "") -> None:
        """Leave and release everything; idempotent."""
        if not self._ended:
            self._ended = True
            self._driver.stop(reason)


def _plan(picture: Picture, open_round: m.RoundId) -> StepPlan:
    return StepPlan(
        step=open_round.step,
        attempt=open_round.attempt,
        rank=picture.rank,
        world_size=picture.world_size,
        samples=sum(span.stop - span.start for span in picture.spans),
        total_samples=picture.total_samples,
        compare=picture.compares_next,
    )
