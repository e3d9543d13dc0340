"""The run as the coordinator knows it: who is on the roll, who is a member, and where the run stands.

Decides nothing: it holds what all parts of the coordinator's core share, and says what follows from that
alone.  Each of them alters what it is answerable for, never sends, never makes a generation.

    roll       who has joined                       anna  bert  clara  dora             `workers`
    roster     the generation's members, by rank      0     1     2      -              `roster`, `view`
    stages     who of them sits in which              0     0     1      -              `cuts`

See `protocol.membership` for the parts and who calls whom.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.repartition import defined_cuts
from gridtrain_coordinator.run.events import JournalEntry, RunPhase, Send
from gridtrain_coordinator.run.journal_recovery import RecoveredRun
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.registry import worker_count_text as said

MAX_STEPS = 2**62
"""What a worker may say of a step has to stay a number of the protocol when something is added to it."""


class RunState:
    """See the module's text.

    Args:
        name: joins for another run are refused.
        term: how often the coordinator has started, already journalled.
        min_workers: the run starts only with so many.
        software: this program's version, shown to workers.

    Attributes:
        limits: see `gridtrain.config.Deadlines`.
        phase: what people see, with `reason`.
        generation: the latest; 0: none was made.
        reference: what all workers must agree with; None: nobody has defined the run yet.
        workers: the roll, in the order of joining.
        view: of the latest generation, as its members are told; None: nobody holds the model, or it is known
            from them alone.
        cuts: of the generation, where the model has stages; (): as the run is defined.
        reached: the step that generations and finished workers have told of.
        started: somebody holds, or held, a model worth waiting for.
        departed: members that left, or were dismissed: not waited for.
        accepted: who takes part in the run as this coordinator defines it, or did.
        finished: members that have reached the end of the run.
    """

    def __init__(
        self, name: str, term: int, limits: Deadlines, *, min_workers: int = 1, software: str = ""
    ) -> None:
        self.name = name
        self.term = term
        self.limits = limits
        self.phase = RunPhase.WAITING
        self._reason = f"waiting for {said(min_workers)}"
        self.generation = 0
        self.definition: m.Setup | None = None
        self.workers: dict[m.PeerId, Worker] = {}
        self.view: m.MembershipView | None = None
        self.partition: tuple[int, ...] = ()
        self.highest_step = 0
        self.has_started = False
        self.accepted_workers: set[m.PeerId] = set()
        self.departed_members: set[m.PeerId] = set()
        self.finished_members: set[m.PeerId] = set()
        self._min_workers, self._software = min_workers, software
        self.member_list = ()

    def restore(self, recovered: RecoveredRun) -> None:
        """As an earlier term left it."""
        self.generation, self.definition = recovered.generation, recovered.definition
        view = recovered.view
        self.highest_step = view.applied + 1 if view is not None else recovered.highest_step
        if recovered.is_finished:
            self.phase = RunPhase.FINISHED
            self._reason = "the run was finished before the coordinator restarted"
        elif view is not None:
            self.member_list, self.has_started = recovered.roster, recovered.has_started
            self.view, self.partition = replace(view, term=self.term), view.stage_bounds
            self.phase = RunPhase.PAUSED
            self._reason = (
                f"the coordinator restarted; waiting for {len(self.member_list)} members to come back"
            )

    # -- members -----------------------------------------------------------------------------------

    @property
    def member_list(self) -> tuple[m.Member, ...]:
        """The generation's members in rank order; (): nobody holds the model."""
        return self._member_list

    @member_list.setter
    def member_list(self, members: tuple[m.Member, ...]) -> None:
        self._member_list = members
        self.member_order = tuple(member.peer for member in members)  # their keys
        self.members = frozenset(self.member_order)

    @property
    def present_members(self) -> list[m.PeerId]:
        """Members that are on the roll, in rank order."""
        return [peer for peer in self.member_order if peer in self.workers]

    @property
    def is_finished(self) -> bool:
        return self.phase is RunPhase.FINISHED

    def is_current(self, term: int, generation: int) -> bool:
        """Of a message: it is about the generation that is."""
        return (term, generation) == (self.term, self.generation)

    def seniority(self, peer: m.PeerId) -> tuple[float, m.PeerId]:
        """Sorts the longest-serving first."""
        return (self.workers[peer].joined_s, peer)

    def sort_by_seniority(self, peers: Collection[m.PeerId]) -> list[m.PeerId]:
        return sorted(peers, key=self.seniority)

    def eligible_workers(self) -> list[m.PeerId]:
        """Who may be in the next generation, the longest-serving first."""
        # A member's process that was started anew has no set-up yet: it joins when it has.
        workers = self.workers.values()
        ready = (w for w in workers if w.is_eligible or (w.peer in self.members and w.setup is not None))
        return self.sort_by_seniority([w.peer for w in ready])

    def newcomers(self) -> list[Worker]:
        """Who may enter the next generation, and is in none."""
        return [w for w in self.workers.values() if w.is_eligible and w.peer not in self.members]

    def display_name(self, peer: m.PeerId) -> str:
        """For people; who is not on the roll has a key only."""
        return self.workers[peer].name if peer in self.workers else peer.hex()[:8]

    # -- stages ------------------------------------------------------------------------------------

    @property
    def is_pipeline(self) -> bool:
        return self.definition is not None and self.definition.stages > 1

    @property
    def effective_partition(self) -> tuple[int, ...]:
        """Of the generation: where its stages begin, and the number of blocks."""
        if self.partition or self.definition is None:
            return self.partition or (0, 1)
        return defined_cuts(self.definition)

    @property
    def stage_count(self) -> int:
        """Of the generation; before there is one, and in one piece, as the run is defined."""
        return len(self.effective_partition) - 1

    def is_valid_partition(self, cuts: tuple[int, ...]) -> bool:
        """As a member tells; before the run is defined here nobody can know."""
        if self.definition is None or not cuts:
            return True
        return self.is_pipeline and cuts[-1] == defined_cuts(self.definition)[-1]

    def can_hold(self, blocks: m.Span) -> bool:
        """Of its seat's stage or, where the model was cut anew and that is not done, of another cut's."""
        return (
            blocks.start < blocks.stop <= self.effective_partition[-1]
            if self.is_pipeline
            else blocks == m.Span(0, 1)
        )

    def stage_of(self, peer: m.PeerId) -> int:
        """That a member holds by its rank; 0 where that says nothing."""
        if len(self.member_order) % self.stage_count or peer not in self.member_order:
            return 0
        return RankLayout.for_world_size(self.stage_count, len(self.member_order)).stage_of(
            self.member_order.index(peer)
        )

    @property
    def required_workers(self) -> int:
        """To begin with; a run that has begun may be cut anew."""
        defined = self.definition.stages if self.definition is not None else 1
        begun = self.is_pipeline and self.highest_step > 0
        return max(self._min_workers, 1 if begun else defined)

    def define(self, setup: m.Setup) -> None:
        """The first worker has told what is trained."""
        self.definition = setup
        if not self.is_valid_partition(self.partition):  # as somebody told before the run was defined here
            self.partition = ()

    def set_stage_requirement(self, stages: int) -> None:
        """While workers are waited for: why of so many."""
        if stages > self._min_workers and self.phase is RunPhase.WAITING:
            self._reason = f"waiting for {said(stages)}: the model has so many stages"

    # -- what is said ------------------------------------------------------------------------------

    @property
    def reason(self) -> str:
        """Why the run is where it is; while workers are waited for, how many there are."""
        here = len(self.workers)
        if self.phase is not RunPhase.WAITING or not 0 < here < self.required_workers:
            return self._reason
        return f"{self._reason}; {here} of {self.required_workers} {'has' if here == 1 else 'have'} joined"

    def phase_entry(self, phase: RunPhase, reason: str, **more: Any) -> JournalEntry:
        return JournalEntry("state", {"state": str(phase), "reason": reason, **more})

    def enter_phase(self, phase: RunPhase, reason: str, **more: Any) -> JournalEntry:
        """Another phase, for another reason: its entry in the journal."""
        self.phase, self._reason = phase, reason
        return self.phase_entry(phase, reason, **more)

    def term_entry(self) -> JournalEntry:
        """Before anybody is told the term."""
        return JournalEntry("term", {"term": self.term, "run": self.name, "software": self._software})

    def welcome_message(self, peer: m.PeerId) -> Send:
        return Send(peer, m.Welcome(self.term, self.name, self._software))

    def phase_message(self, peer: m.PeerId) -> Send:
        """What a worker is told of the phase."""
        return Send(peer, m.RunStateUpdate(str(self.phase), self.reason))
