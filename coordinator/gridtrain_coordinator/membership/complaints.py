"""Decides when members' reports about each other (broken links, stalls, digests) lead to a dismissal.

    ConnectionLost     repeatedly -----------------> the member that all broken connections share is dismissed
    RoundStalled       a round makes no progress --> a member that repeatedly delays a step is dismissed, or
                                                     two members whose connection breaks use another route
    PeersUnreachable   cannot connect as planned --> another route in the next generation
    ReplicaDigest      differs from most others ---> the member is notified, and receives the state again
    ViolationReport    broke the protocol ---------> a violation (`access.accusations`)

One member's report about another is never by itself sufficient to dismiss either of them, unless the same
step stalls six times: in that case, the newer member is dismissed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median_low

from gridtrain.core import messages as m
from gridtrain.errors import DISMISSED, STALLED
from gridtrain.quantities import format_count, insert_names, shorten
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.link_failures import (
    FAILURES_BEFORE_AVOIDING,
    REMEMBERED_S,
    WINDOW_S,
    LinkFailures,
)
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState

MAX_NAMED_REASON_BYTES = 512  # as in messages
STALLS_BEFORE_REMOVAL, STALLS_BEFORE_REMOVING_NEWEST = 3, 6


@dataclass(slots=True, eq=False)
class Complaints:
    """Handles the members' reports about each other."""

    _run: RunState
    _planner: GenerationPlanner
    _departures: Departures
    _addresses: AddressBook
    _divergence: DivergenceDetector
    _stalled_step: StalledStep

    def handle_no_route(self, worker: Worker, message: m.PeersUnreachable, now_s: float) -> list[Effect]:
        """Give up the routes over which a member cannot connect; the next generation uses other routes.

        If a generation is forming, it is replaced only if its members do not connect after all.  While the
        members are being frozen, because another link has failed or a step stalls, the next generation has
        already been requested.  Routes to members that the coordinator has lost are kept.
        """
        run = self._run
        is_current = run.is_current(message.term, message.generation)
        if not is_current or worker.peer not in run.members:
            return []
        others = sorted({*run.connected_members} & set(message.peers) - {worker.peer})
        if not others:
            return []
        effects = self._give_up_routes(worker, others, now_s)
        names = ", ".join(run.workers.display_name(peer) for peer in others)
        reason = f"{worker.name} cannot reach {names} as planned"
        if run.view_change.is_forming:
            # Other members report at about the same time; each report saves a generation.
            run.view_change.mark_unrouted(reason, now_s + run.limits.settle_s)
        elif not run.view_change.is_freezing:
            run.view_change.request(reason)
        return effects

    def _give_up_routes(self, worker: Worker, others: Sequence[m.PeerId], now_s: float) -> list[Effect]:
        failures = self._planner.link_failures
        broken = {other for other in others if failures.has_broken(worker.peer, other, now_s)}
        tried = self._addresses.block_routes(worker.peer, others, broken)
        names = ", ".join(self._run.workers.display_name(peer) for peer in others)
        return [LogEvent("warning", "no_route", {"name": worker.name, "to": names, "tried": tried})]

    def handle_broken_link(self, worker: Worker, message: m.ConnectionLost, now_s: float) -> list[Effect]:
        """Handle a broken connection between two members.

        If connections break repeatedly, the member that they have in common is dismissed, or the next ring
        avoids the pairs of members concerned.
        """
        run, failures, size = self._run, self._planner.link_failures, len(self._run.members)
        is_current = run.is_current(message.term, message.generation)
        # Sent before this generation's MembershipView arrived; the lost peer may belong to both generations.
        is_previous = run.is_current(message.term, message.generation + 1)
        are_members = {worker.peer, message.peer} <= run.members and worker.peer != message.peer
        if not (is_current or is_previous) or not are_members:
            return []
        if message.peer not in run.workers:
            return []  # the peer has left and is no longer registered
        run.workers[message.peer].liveness.record_link_broken(now_s)
        failures.record(worker.peer, message.peer, now_s)
        if not is_current:
            return []
        centre = run.member_order[0] if self._planner.exchange_choice.is_star else None
        flapping = failures.common_endpoint(now_s, size, centre)
        if flapping is not None:
            reason = f"lost connections {FAILURES_BEFORE_AVOIDING} times within {WINDOW_S:.0f} s"
            return self._departures.dismiss(flapping, reason)
        if not run.view_change.reason and (common := failures.next_to_avoid(now_s, size)) is not None:
            name = run.workers.display_name(common)
            reason = f"connections of {name} broke repeatedly, so the next topology avoids them"
            run.view_change.request(reason, can_wait=True)
        return []

    def handle_stall(self, worker: Worker, stalled: m.RoundStalled, now_s: float) -> list[Effect]:
        """Handle a round that makes no progress: dismiss members at fault, and request another generation."""
        run, view = self._run, self._run.view
        is_current = run.is_current(stalled.round.term, stalled.round.generation)
        if not (is_current and run.view_change.is_idle) or worker.peer not in run.members or view is None:
            return []
        stalled = replace(stalled, reason=_with_names(stalled.reason, run))
        # Identified by the step that most members have reported, because no single reporter can choose it.
        steps = [run.workers[peer].step for peer in run.present_members]
        step, reason = max(view.applied + 1, median_low(steps)) + 1, stalled.reason
        times = self._stalled_step.record(step, stalled, worker.peer, now_s)
        fields = {"name": worker.name, "step": step, "times": times, "reason": reason}
        effects: list[Effect] = [LogEvent("warning", "stalled", fields)]
        for peer, (code, why) in self._stalled_step.find_at_fault(stalled, worker.peer, now_s).items():
            if code == STALLED:
                waited_s = now_s - run.workers[peer].progressed_s
                self._planner.worker_speeds.observe_unfinished(peer, run.share_of(peer), waited_s)
            effects += self._departures.dismiss(peer, why, code=code)
        for pair in combinations(
            sorted(self._stalled_step.rerouted_ends.intersection(run.present_members)), 2
        ):
            if self._planner.link_failures.has_broken(*pair, now_s):
                dialler, other = pair if self._addresses.address(*pair) else reversed(pair)
                effects += self._give_up_routes(run.workers[dialler], [other], now_s)
        run.view_change.request(f"{worker.name} reports a stall: {reason}")
        return effects

    def compare_digest(self, peer: m.PeerId, message: m.ReplicaDigest) -> list[Effect]:
        """Compare a member's digest with the others'; request a generation if a member's state differs.

        A member whose state differs from that of most members receives the state again.
        """
        run = self._run
        if not run.is_current(message.term, message.generation) or not run.view_change.is_idle:
            return []
        effects: list[Effect] = []
        for diverged in self._divergence.add(peer, message.step, message.digest):
            if (worker := run.workers.get(diverged)) is None:
                continue
            run.view_change.request(f"the state of {worker.name} differs from the state of most members")
            if self._divergence.has_notified(diverged, run.generation):
                continue
            diverged_message = m.ReplicaDiverged(run.term, run.generation, message.step)
            notice = self._divergence.notify(diverged, diverged_message)
            so_far = self._divergence.divergence_count
            fields = {"name": worker.name, "step": message.step + 1, "so_far": so_far}
            effects += [LogEvent("warning", "drifted", fields), notice]
        return effects

    def handle_accusation(self, peer: m.PeerId, message: m.ViolationReport) -> list[Effect]:
        """Return a `RecordViolation` for the member that `peer` accuses.

        Returns no effects if either of them is not a member, or if the member accuses itself.
        """
        are_members = {peer, message.peer} <= self._run.members and peer != message.peer
        return [RecordViolation(message.peer, message.reason, accuser=peer)] if are_members else []


def _with_names(reason: str, run: RunState) -> str:
    """Return a member's text with the names of members instead of their ranks and the beginnings of their
    keys."""
    order = run.member_order
    peers = {f"rank {rank}": peer for rank, peer in enumerate(order)}
    peers |= {peer.hex()[:8]: peer for peer in order}

    named = insert_names(reason, lambda key: run.workers.display_name(peers[key]) if key in peers else None)
    return shorten(named, MAX_NAMED_REASON_BYTES)


class StalledStep:
    """Decides which member delays a step, based on the reports and on the generations in which it stalled.

    stall of step 7   reporter   suspect    has progressed  dismissed
    1st               root       bert       no              bert
    1st, 2nd          root       clara      yes             no member
    3rd               root       clara      yes             clara      she was suspected three times
    3rd               dora       clara      no              dora       the only accuser, and not the root
    6th               root       dora       yes             erik       the newest, presumed to be at fault
    6th               dora       any        yes             dora       reported most stalls, and is not root

    A member may also be suspected because its connection broke: it voted NO, or another member is not
    connected to it.  The accusation then concerns those members whose connections break most
    (`LinkFailures.suspected_ends`), regardless of the reporter.  If the two ends are equally suspect, they
    use another route from the third stall on, and after the sixth the newer end is dismissed.  If the other
    end then loses a connection to another member within `REMEMBERED_S`, it is the suspect.

    The root, which counts the votes, knows which member is late.  Another member knows only whether the root
    is late, and which members it is not connected to.  After a dismissal the count restarts, but the reports
    of members other than the root are kept if a suspect was dismissed.
    """

    def __init__(self, run: RunState, failures: LinkFailures) -> None:
        self._run, self._failures = run, failures
        self._step = -1
        self._reporters: Counter[m.PeerId | None] = Counter()  # None: the root at that time
        self._accusers: defaultdict[m.PeerId, list[m.PeerId]] = defaultdict(list)
        self._accused: frozenset[m.PeerId] = frozenset()  # in the latest stall
        self._ends: frozenset[m.PeerId] = frozenset()  # of the connections that caused the latest stall
        # For each end that stayed: the other end, which was dismissed, and when.
        self._spared: dict[m.PeerId, tuple[m.PeerId, float]] = {}

    def record(self, step: int, stalled: m.RoundStalled, reporter: m.PeerId, now_s: float) -> int:
        """Record a stall; return the number of generations in which the step has stalled."""
        run = self._run
        if step != self._step:
            self._step = step
            self._reporters.clear()
            self._accusers.clear()
        self._reporters[None if reporter == run.member_order[0] else reporter] += 1
        self._accused = run.members & set(stalled.suspects)
        self._ends = frozenset()
        if not stalled.silent_s:
            root, size = run.member_order[0], len(run.members)
            ends = {
                p: self._failures.suspected_ends(p, root, size, now_s) & run.members for p in self._accused
            }
            self._ends = frozenset().union(*ends.values())
            self._ends = self._find_spared(now_s) or self._ends
            self._accused = frozenset(peer for peer in ends if not ends[peer]) | self._ends
        for peer in self._accused:
            self._accusers[peer].append(reporter)
        return self._reporters.total()

    def _find_spared(self, now_s: float) -> frozenset[m.PeerId]:
        """Return the ends of an earlier broken connection whose other end was dismissed because of it.

        If that member comes back and accuses the same end again, this does not count.
        """
        self._spared = {
            end: (dismissed, at_s)
            for end, (dismissed, at_s) in self._spared.items()
            if end in self._run.members and now_s < at_s + REMEMBERED_S
        }
        return frozenset(
            end for end in self._ends & self._spared.keys() if self._spared[end][0] not in self._ends
        )

    @property
    def rerouted_ends(self) -> frozenset[m.PeerId]:
        """The members that are to use other routes to each other, because one of them may be at fault for the
        latest stalls."""
        is_due = all(len(self._accusers[end]) >= STALLS_BEFORE_REMOVAL for end in self._ends)
        return self._ends if len(self._ends) > 1 and is_due else frozenset()

    def find_at_fault(
        self, stalled: m.RoundStalled, reporter: m.PeerId, now_s: float
    ) -> dict[m.PeerId, tuple[str, str]]:
        """Map the members to dismiss because of this stall to the code and the reason for the `Refused`."""
        if found := self._find_suspected_reporter(stalled.reason):
            self._step = -1  # the count restarts
        elif found := self._find_suspects(stalled, reporter, now_s):
            self._accusers.clear()
            del self._reporters[None]  # keeps the reports of a member that accuses one root after another
        elif found := self._find_newest(stalled.reason, now_s):
            self._step = -1
        return found

    @property
    def _has_stalled_often(self) -> bool:
        is_often = self._reporters.total() >= STALLS_BEFORE_REMOVING_NEWEST
        return is_often and len(self._run.present_members) > 1

    def _find_suspected_reporter(self, reason: str) -> dict[m.PeerId, tuple[str, str]]:
        """Return the member other than the root that reported most of many stalls; empty if none did.

        A false report comes before the root's, which waits for a timeout, and must not lead to the
        dismissal of another member.
        """
        ((most, reports),) = self._reporters.most_common(1)
        times = self._reporters.total()
        if not self._has_stalled_often or most not in self._run.present_members or 2 * reports <= times:
            return {}
        return {most: (DISMISSED, f"reported {reports} of {times} stalls of step {self._step}: {reason}")}

    def _find_newest(self, reason: str, now_s: float) -> dict[m.PeerId, tuple[str, str]]:
        """Return the newest member if the step has stalled in many generations.

        If a broken connection caused the latest stall, only its ends are considered.
        """
        if not self._has_stalled_often:
            return {}
        times, ends = self._reporters.total(), self._ends.intersection(self._run.present_members)
        newest = max(ends or self._run.present_members, key=self._run.workers.seniority)
        self._spared |= {end: (newest, now_s) for end in ends - {newest}}
        what = "newer of two members whose connection breaks" if ends else "newest member"
        text = f"is the {what}, and step {self._step} failed in {times} generations: {reason}"
        return {newest: (DISMISSED, text)}

    def _find_suspects(
        self, stalled: m.RoundStalled, reporter: m.PeerId, now_s: float
    ) -> dict[m.PeerId, tuple[str, str]]:
        """Return the suspects that are at fault, or the reporter if it alone suspects a member."""
        workers, step, reason = self._run.workers, self._step, stalled.reason
        root = self._run.member_order[0]
        patience_s = max(stalled.silent_s, self._run.limits.patience_floor_s)
        found: dict[m.PeerId, tuple[str, str]] = {}
        for peer in sorted(self._accused):
            if peer not in workers:
                continue
            accusers, may_know = self._accusers[peer], root in (reporter, peer) or peer in self._ends
            waited_s = now_s - workers[peer].progressed_s
            if may_know and stalled.silent_s > 0 and patience_s <= waited_s:
                share = format_count(self._run.share_of(peer), "sample")
                waited = f"for {waited_s:.1f} s (limit {patience_s:.1f} s) while other members waited"
                found[peer] = STALLED, f"made no progress {waited}; its share of a step is {share}"
            elif len(accusers) < STALLS_BEFORE_REMOVAL or (peer in self._ends and len(self._ends) > 1):
                continue
            elif may_know or set(accusers) != {reporter}:
                how = " with broken connections" if peer in self._ends else ""
                found[peer] = DISMISSED, f"delayed step {step} {len(accusers)} times{how}: {reason}"
            else:
                name = workers.display_name(peer)
                text = f"alone reported {len(accusers)} times that {name} delays step {step}: {reason}"
                found[reporter] = DISMISSED, text
        return found
