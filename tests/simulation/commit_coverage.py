"""Which commit rules (docs/architecture.md) a simulated history has reached.

It reads the events and effects of the real cores, so that the product needs no markers, and asserts what must
hold at each of them.
    event --> core --> effects          rule                                          histories   times
          \\________/                     3 COMMIT: all voted YES for one digest              2000   19204
             |                           6 ABORT by Freeze                                   1311    2630
             v                          ...
       CommitCoverage.reached  --> table(...)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.round_flags import is_skipped
from gridtrain.core.member.member import MemberCore
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run import events as cio

RULES = (
    "1 an older round's message is dropped",
    "1 a later round's message is stored",
    "2 PREPARED, then YES",
    "2 skipped: a committed empty update",
    "3 COMMIT: all voted YES for one digest",
    "3 ABORT: a member voted NO",
    "3 ABORT: timeout",
    "3 ABORT: digests differ",
    "3 the decision is repeated after a break",
    "3 a message of the next step proves the commit",
    "4 a retry commits in the same generation",
    "4 two aborts: the root asks for a Freeze",
    "4 the link is at fault: the next plan avoids it",
    "5 Freeze: FreezeReport",
    "5 frozen: neither votes nor applies",
    "6 at A - 1, prepared: applies A",
    "6 COMMIT by Freeze: all of S are prepared",
    "6 ABORT by Freeze: some of S are prepared",
    "6 ABORT by Freeze: no member is prepared",
    "6 the MembershipView ends an open round",
    "7 journalled, then MembershipView",
    "8 Ready by all, then StartGeneration",
    "8 a death before StartGeneration: the verdict stands",
    "9 rejoins with the decided state",
    "9 rejoins prepared: applies it",
    "9 rejoins as a newcomer",
    "10 a step commits while the coordinator is down",
    "10 PAUSED: a member fails while it is down",
    "11 term + 1 is journalled first",
    "11 all of the generation rejoin: adopted",
    "11 some do not: Freeze without them",
    "11 from a backup: reports are ahead of the journal",
    "11 a lower term is refused",
    "12 a newcomer receives the state and is ready",
    "12 a newcomer is not ready: the next MembershipView without it",
    "13 all are away: the run waits for them",
    "13 ROLLBACK to a checkpoint",
    "13 ROLLBACK to the beginning",
)
"""The cases of the commit rules that are counted, each with the number of its rule."""

_NUMBER_OF = {rule: number for number, rule in enumerate(RULES)}


def open_round(core: MemberCore) -> m.RoundId | None:
    """The round that the trainer has submitted to and that is not decided yet."""
    generation = core.current_generation
    attempt = generation.attempts.open_attempt if generation is not None else None
    return attempt.round_id if attempt is not None else None


@dataclass(frozen=True, slots=True)
class MemberBefore:
    """A member's state before an event."""

    phase: ev.MemberPhase
    generation: int
    here: m.RoundId | None
    is_open: bool
    is_synced: bool
    is_finished: bool

    @classmethod
    def of(cls, core: MemberCore) -> MemberBefore:
        opened, generation = open_round(core), core.current_generation
        due = generation.attempts.next_round if generation is not None else None
        here = opened if opened is not None else due
        return cls(core.phase, core.generation, here, opened is not None, core.is_synced, core.is_finished)


@dataclass(slots=True)
class CommitCoverage:
    """Counts of one history; `reached`: how often, by rule."""

    reached: Counter[str] = field(default_factory=Counter)
    _reports: dict[m.PeerId, m.FreezeReport] = field(default_factory=dict)
    _view: m.MembershipView | None = None
    _members: frozenset[m.PeerId] = frozenset()
    _started: bool = True
    _restarted: bool = False
    _with_setup: set[m.PeerId] = field(default_factory=set)
    _ready: dict[m.PeerId, m.Ready] = field(default_factory=dict)  # the latest of each process

    def mark(self, rule: str) -> None:
        """Raises `KeyError` for a rule that is not in `RULES`."""
        self.reached[RULES[_NUMBER_OF[rule]]] += 1

    # -- members -------------------------------------------------------------------------------------

    def record_member(
        self,
        core: MemberCore,
        before: MemberBefore,
        event: ev.MemberEvent | None,
        effects: Sequence[ev.MemberEffect],
        *,
        coordinator_up: bool,
    ) -> None:
        """A member's core has handled `event` (None: a tick)."""
        if core.pause_reason:
            self.mark("10 PAUSED: a member fails while it is down")
        match event:
            case ev.MessageReceived(peer, m.MembershipView() as view) if peer == core.coordinator and effects:
                self._record_view(core, before, view, effects)
            case ev.MessageReceived(_, message) if isinstance(message, m.Data | m.Vote | m.Decision):
                self._record_message(before, message, effects)
            case ev.StateLoaded() if any(_is(effect, m.Ready) for effect in effects):
                self.mark("12 a newcomer receives the state and is ready")
            case _:
                pass
        for effect in effects:
            match effect:
                case ev.Send(_, message):
                    self._record_sent(message)
                case ev.ResolveRound(round_id, True, flags, reason):
                    self._record_commit(round_id, is_skipped(flags), reason, coordinator_up=coordinator_up)
                case ev.LogEvent("old_coordinator"):
                    self.mark("11 a lower term is refused")

    def _record_message(
        self, before: MemberBefore, message: m.Data | m.Vote | m.Decision, effects: Sequence[object]
    ) -> None:
        if before.here is None:
            return
        if before.phase is ev.MemberPhase.FROZEN:
            answers = [effect for effect in effects if not isinstance(effect, ev.LogEvent)]
            assert not answers, f"a frozen member answers {message} with {answers}"
            self.mark("5 frozen: neither votes nor applies")
        elif message.round < before.here:
            self.mark("1 an older round's message is dropped")
        elif message.round > before.here or not before.is_open:
            self.mark("1 a later round's message is stored")

    def _record_sent(self, message: m.Message) -> None:
        match message:
            case m.Vote(_, True, _, reason, _):
                self.mark(
                    "2 PREPARED, then YES" if not reason else "3 the decision is repeated after a break"
                )
            case m.Decision(_, m.Verdict.COMMIT, reason) if reason != "repeated":
                self.mark("3 COMMIT: all voted YES for one digest")
            case m.Decision(_, _, reason) if "voted NO" in reason:
                self.mark("3 ABORT: a member voted NO")
            case m.Decision(_, _, reason) if "updates differ" in reason:
                self.mark("3 ABORT: digests differ")
            case m.Decision(_, m.Verdict.ABORT, reason) if reason != "repeated":
                self.mark("3 ABORT: timeout")
            case m.RoundStalled(_, _, _, reason) if reason.startswith("attempts at step"):
                self.mark("4 two aborts: the root asks for a Freeze")
            case m.FreezeReport():
                self.mark("5 Freeze: FreezeReport")
            case _:
                pass

    def _record_commit(self, round_id: m.RoundId, skip: bool, reason: str, *, coordinator_up: bool) -> None:
        if skip:
            self.mark("2 skipped: a committed empty update")
        if round_id.attempt:
            self.mark("4 a retry commits in the same generation")
        if reason.startswith("a message of the next step"):
            self.mark("3 a message of the next step proves the commit")
        if not coordinator_up:
            self.mark("10 a step commits while the coordinator is down")

    def _record_view(
        self,
        core: MemberCore,
        before: MemberBefore,
        view: m.MembershipView,
        effects: Sequence[ev.MemberEffect],
    ) -> None:
        ended = next((effect for effect in effects if isinstance(effect, ev.ResolveRound)), None)
        away = 0 < before.generation < view.generation - 1
        if ended is None:
            pass
        elif not ended.committed:
            self.mark("6 the MembershipView ends an open round")
        elif away:
            self.mark("9 rejoins prepared: applies it")
        elif view.verdict is m.Verdict.COMMIT:
            self.mark("6 COMMIT by Freeze: all of S are prepared")
        else:
            self.mark("6 at A - 1, prepared: applies A")
        if away and before.is_synced:
            stayed = "9 rejoins with the decided state"
            self.mark(stayed if core.is_synced else "9 rejoins as a newcomer")

    # -- the coordinator -----------------------------------------------------------------------------

    def record_coordinator(
        self, core: Membership, event: cio.Event | None, effects: Sequence[cio.Effect], *, from_backup: bool
    ) -> None:
        """The coordinator's core has handled `event` (None: a tick, or the start)."""
        if isinstance(event, cio.MessageReceived):
            self._record_received(event.peer, event.message)
        journalled = False
        for effect in effects:
            match effect:
                case cio.JournalEntry("term", {"term": int(term)}) if term > 1:
                    self._restarted = True
                    self.mark("11 term + 1 is journalled first")
                case cio.JournalEntry("generation", body):
                    journalled = True
                    self._record_generation(body, from_backup=from_backup)
                case cio.Send(_, m.MembershipView() as view) if view != self._view:
                    assert journalled or self._restarted or self._view is None, (
                        "sent before its journal entry"
                    )
                    self._view = view
                case cio.Send(_, m.StartGeneration(_, generation)) if not self._started:
                    self._started = True
                    for peer in self._members:
                        ready = self._ready.get(peer)
                        is_ready = (
                            ready is not None
                            and self._view is not None
                            and ((ready.generation, ready.history) == (generation, self._view.history))
                        )
                        assert is_ready, f"started before {peer.hex()[:4]} is ready: {ready}"
                    self.mark("8 Ready by all, then StartGeneration")
                case cio.LogEvent(_, name, fields):
                    self._record_note(name, fields)
        limits = core.run.limits
        due_s = min((worker.deadline_s(limits) for worker in core.run.workers.values()), default=math.inf)
        assert core.deadline_s <= due_s, "a worker is due before the coordinator's next tick"

    def _record_received(self, peer: m.PeerId, message: m.Message) -> None:
        match message:
            case m.FreezeReport():
                self._reports[peer] = message
            case m.Setup():
                self._with_setup.add(peer)
            case m.Ready():
                self._ready[peer] = message
            case m.Join(generation=0):  # another process with this key, or one without a rank
                self._ready.pop(peer, None)

    def _record_note(self, name: str, fields: Mapping[str, object]) -> None:
        reason = str(fields.get("reason", ""))
        if name == "no_route":
            self.mark("4 the link is at fault: the next plan avoids it")
        elif name == "lost" and reason.startswith("was not ready"):
            self.mark("12 a newcomer is not ready: the next MembershipView without it")
        elif name == "paused" and "are disconnected" in reason:
            self.mark("13 all are away: the run waits for them")
        elif name == "rollback":
            to = "a checkpoint" if fields["to"] else "the beginning"
            self.mark(f"13 ROLLBACK to {to}")

    def _record_generation(self, body: Mapping[str, object], *, from_backup: bool) -> None:
        self.mark("7 journalled, then MembershipView")
        members = body["members"]
        assert isinstance(members, list)
        members_now = frozenset(bytes.fromhex(entry["peer"]) for entry in members)
        assert members_now and members_now <= self._with_setup, "a worker without a setup has a rank"
        reports = [r for p, r in self._reports.items() if r.is_synced and p in self._members]
        if body["verdict"] == "ABORT" and reports:
            prepared = any(report.prepared is not None for report in reports)
            self.mark(f"6 ABORT by Freeze: {'some of S are' if prepared else 'no member is'} prepared")
        if not self._started and self._members:
            self.mark("8 a death before StartGeneration: the verdict stands")
        if self._restarted and self._members:
            back = self._members <= members_now
            self.mark(
                "11 all of the generation rejoin: adopted" if back else "11 some do not: Freeze without them"
            )
            if from_backup:
                self.mark("11 from a backup: reports are ahead of the journal")
        self._reports.clear()
        self._members, self._started, self._restarted = members_now, False, False


def _is(effect: ev.MemberEffect, kind: type[m.Message]) -> bool:
    return isinstance(effect, ev.Send) and isinstance(effect.message, kind)


def table(histories: Sequence[Counter[str]]) -> str:
    """A table: in how many histories each rule was reached, and how often in all."""
    width = max(map(len, RULES))
    lines = [f"{'rule':<{width}}  histories      times"]
    for rule in RULES:
        times = [counter[rule] for counter in histories if counter[rule]]
        lines.append(f"{rule:<{width}}  {len(times):9d}  {sum(times):9d}")
    return "\n".join(lines)


def unreached_rules(histories: Sequence[Counter[str]]) -> list[str]:
    return [rule for rule in RULES if not any(counter[rule] for counter in histories)]
