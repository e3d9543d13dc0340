"""How long a generation may take to form while members receive the state, and which members receive it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_coordinator import ME, A, B, C, D, ScriptedCoordinator, sent
from scripted_member import ScriptedMember

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.member import MemberCore
from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain_coordinator.membership import readiness
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Effect,
    Event,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
)

SETUP = m.Setup((("model", "100 parameters"),), m.LedgerSpec(100, 0, epochs=1), 4, None)
HELD = m.CheckpointInfo(4, b"h" * 32, m.LedgerState(step=5, cursor=20, consumed=20))


class Group(ScriptedCoordinator):
    """Workers join 0.1 virtual seconds after each other."""

    def __init__(self, min_workers: int) -> None:
        limits = Deadlines(silence_s=1e9, settle_s=0.0)
        super().__init__(limits=limits, event_s=0.1, min_workers=min_workers)
        self.left = dict.fromkeys((A, B, C, D), 0.0)

    def hear(self, event: Event) -> list[Effect]:
        effects = super().hear(event)
        if self.now_s >= self.core.deadline_s:  # as the daemon does after each round of its loop
            effects = effects + self.tick()
        assert self.core.deadline_s > self.now_s, "a tick has done all that was due"
        return effects

    def join(self, peer: m.PeerId, setup: m.Setup, *, reachable: bool = True) -> None:
        self.hear(PeerConnected(peer, peer.hex()[:8]))
        self.say(peer, m.Join("r", peer[:1].decode(), "memory://x"))
        self.hear(DialBackResult(peer, "memory://x" if reachable else ""))
        self.say(peer, setup, m.LinkLatencies(()))

    def route(self, viewer: m.PeerId, other: m.PeerId) -> str:
        """The address of `other` in the latest member list of `viewer`."""
        latest = sent(self.seen, m.MemberListPage, viewer)[-1]
        return next(member.address for member in latest.members if member.peer == other)

    def heartbeats(self, seconds: float, **arriving_Bps: float) -> None:
        """All workers send heartbeats; the named ones receive so many bytes of the state each second."""
        for _ in range(round(seconds)):
            for peer in self.left:
                self.left[peer] = max(0.0, self.left[peer] - arriving_Bps.get(peer[:1].decode(), 0.0))
                figures = ((m.STATE_LEFT, self.left[peer]),) if self.left[peer] else ()
                self.say(peer, m.Heartbeat(1, 0, round(1000 * self.now_s), figures))
            self.now_s = round(self.now_s + 1.0 - 0.4, 3)

    @property
    def members(self) -> str:
        """ "a b C": c receives the state."""
        letters = {x.peer: x.peer[:1].decode() for x in self.core.run.member_list}
        return " ".join(sorted(letters[x.peer].upper() if x.joining else letters[x.peer]
                               for x in self.core.run.member_list))  # fmt: skip

    @property
    def frozen(self) -> int:
        return len(sent(self.seen, m.Freeze, A))


def test_a_worker_that_built_the_same_state_receives_none() -> None:
    """16 newcomers with 100 MB each over the source's link of 100 Mbit/s would take two minutes."""
    group = Group(4)
    same = replace(SETUP, initial_state_digest=b"3f" * 16)
    for peer, setup in (
        (A, same),
        (B, same),
        (C, replace(SETUP, initial_state_digest=b"77" * 16)),
        (D, SETUP),
    ):
        group.join(peer, setup)
    assert group.members == "C D a b"


def test_a_worker_that_only_reports_the_same_digest_is_no_source() -> None:
    """Otherwise a newcomer that reports the same digest could send its own state to most of the others."""
    group = Group(4)
    same = replace(SETUP, initial_state_digest=b"3f" * 16)
    for peer, setup in ((A, same), (B, same), (C, SETUP), (D, SETUP)):
        group.join(peer, setup)
    order = [member.peer for member in group.core.run.member_list]
    sources = {member.peer: member.donor for member in group.core.run.member_list}
    assert sources == {A: -1, B: -1, C: order.index(A), D: order.index(A)}
    group.say(B, m.Leave(""))
    view = group.view
    for peer in (A, C, D):
        group.say(peer, m.FreezeReport(1, 1, peer == A, -1, view.history, m.LedgerState(), None, b"", 0))
    order = [member.peer for member in group.core.run.member_list]
    assert {x.donor for x in group.core.run.member_list if x.joining} == {order.index(A)}


def test_no_digest_of_the_eldest_matches_none() -> None:
    group = Group(2)
    group.join(A, SETUP), group.join(B, SETUP)
    assert group.members == "B a"


def test_an_initial_state_counts_until_the_first_step_is_committed() -> None:
    group = Group(1)
    same = replace(SETUP, initial_state_digest=b"3f" * 16)
    group.join(A, same)
    group.ready(A)
    group.join(B, same)
    group.heartbeats(2)
    view = group.view
    assert group.frozen == 1
    group.say(A, m.FreezeReport(1, 1, True, -1, view.history, m.LedgerState(), None, b"", 0))
    assert group.members == "a b"
    group.ready(A, B)
    group.join(C, same)
    group.heartbeats(2)
    after = m.LedgerState(step=1, cursor=8, consumed=8)
    for peer in (A, B):
        group.say(peer, m.FreezeReport(1, 2, True, 0, b"1" * 32, after, None, b"", 0))
    assert group.members == "C a b", "after a step c's initial state is out of date"


def test_a_checkpoint_outranks_an_initial_state() -> None:
    group = Group(2)
    group.join(A, replace(SETUP, initial_state_digest=b"3f" * 16))
    group.join(B, replace(SETUP, initial_state_digest=b"3f" * 16, checkpoint=HELD))
    assert group.members == "A b", "the run continues from b's checkpoint"


def test_an_abandoned_run_clears_the_digests_of_initial_states() -> None:
    group = Group(2)
    same = replace(SETUP, initial_state_digest=b"3f" * 16)
    group.join(A, same), group.join(B, same)
    group.ready(A, B)
    group.join(C, same)
    group.say(A, m.Leave("")), group.say(B, m.Leave(""))
    assert [w.setup.initial_state_digest for w in group.core.run.workers.values() if w.setup] == [b""]


def one_pair_without_a_route() -> Group:
    """b cannot reach c, and d has 40 of the 100 MB that a sends to each of the others."""
    group = Group(4)
    for peer in (A, B, C, D):
        group.join(peer, SETUP)
    assert group.members == "B C D a"
    group.left[D] = 60e6
    group.heartbeats(1)
    group.say(B, m.PeersUnreachable(1, 1, (C,)))
    return group


def test_no_generation_is_remade_while_a_state_arrives() -> None:
    """In the next generation all 100 MB would be sent again."""
    group = one_pair_without_a_route()
    group.heartbeats(29, d=2e6)
    assert group.frozen == 0 and group.core.generation == 1
    group.heartbeats(3, d=2e6)
    assert group.frozen == 1, "d has received everything, so b and c can get another route"


def test_a_stalled_state_transfer_delays_nobody() -> None:
    group = one_pair_without_a_route()
    group.heartbeats(15)
    assert group.frozen == 0
    group.heartbeats(8)
    assert group.frozen == 1


def test_a_pair_that_connects_late_needs_no_other_generation() -> None:
    group = one_pair_without_a_route()
    group.heartbeats(5, d=2e6)
    group.ready(A, B, C, D)
    group.heartbeats(5)
    assert group.frozen == 0 and group.core.phase == "training"


def test_a_route_is_abandoned_only_when_it_was_reported() -> None:
    """Both ends report a relay that does not work, one of them twice; the other relay was not tried."""
    group = Group(4)
    for peer in (A, B, C, D):
        group.join(peer, SETUP, reachable=peer in (A, B))
    relays = {f"relay:{peer.hex()}" for peer in (A, B)}
    first = group.route(C, D)
    assert first == group.route(D, C) and first in relays
    group.left[B] = 20e6
    group.heartbeats(1)
    for peer, other in ((C, D), (D, C), (C, D)):
        group.say(peer, m.PeersUnreachable(1, 1, (other,)))
    group.heartbeats(9, b=2e6)
    assert not group.frozen
    group.heartbeats(1, b=2e6)
    assert group.frozen
    view = group.view
    for peer in (A, B, C, D):
        group.say(peer, m.FreezeReport(1, 1, peer == A, -1, view.history, m.LedgerState(), None, b"", 0))
    assert group.core.generation == 2 and {group.route(C, D)} == relays - {first}


def test_the_forming_deadline_grows_with_the_bytes_to_send() -> None:
    assert readiness.max_forming_s(0, 25_600_000, None) == readiness.MAX_FORMING_S
    few, many = (readiness.max_forming_s(count, 25_600_000, 12.5e6) for count in (1, 15))
    assert many - readiness.MAX_FORMING_S > 15 * 102.4e6 / 12.5e6
    assert round(many - readiness.MAX_FORMING_S) == round(15 * (few - readiness.MAX_FORMING_S))
    assert readiness.max_forming_s(1, 1000, 1.0) == readiness.max_forming_s(
        1, 1000, readiness.MIN_RATE_Bps
    ), "the reported rate has a lower bound"


# -- a state that arrives slowly or not at all ----------------------------------------------------


class Trained(Group):
    """`holders` have trained five steps; `newcomers` then join and lack the state.

    All send heartbeats once a second; a newcomer's progress counter does not advance.
    """

    def __init__(self, holders: str, newcomers: str) -> None:
        self.holders = holders
        self.by_letter = {letter: letter.encode() * 32 for letter in holders + newcomers}
        super().__init__(len(holders))
        self.left = dict.fromkeys(self.by_letter.values(), 0.0)
        self.applied = 4
        for letter in holders:
            self.join(self.by_letter[letter], SETUP)
        self.ready(*self.peers(holders))
        for letter in newcomers:
            self.join(self.by_letter[letter], SETUP)
        while not self.core.run.view_change.is_freezing:
            assert self.seconds(5) < 5
        self.form(holders)

    def peers(self, letters: str) -> list[m.PeerId]:
        return [self.by_letter[letter] for letter in letters]

    def form(self, holders: str) -> None:
        """All connected members answer the `Freeze`; the holders are ready at once."""
        here = [peer for peer in self.core.run.member_order if peer in self.core.run.workers]
        at = self.core.generation
        for peer in here:
            holds_state = peer in self.peers(holders)
            ledger = m.LedgerState(step=self.applied + 1, cursor=20, consumed=20)
            report = m.FreezeReport(1, at, holds_state, self.applied, b"h" * 32, ledger, None, b"", 0)
            self.say(peer, report)
        assert self.core.generation == at + 1
        self.ready(*self.peers(holders))

    def seconds(self, seconds: int, *, busy: str = "", **arriving_Bps: float) -> int:
        """Heartbeats until another generation is requested or the time is over; returns the seconds."""
        frozen, generation = self.frozen, self.core.run.view_change.phase
        for second in range(seconds):
            for letter, peer in self.by_letter.items():
                self.left[peer] = max(0.0, self.left[peer] - arriving_Bps.get(letter, 0.0))
                is_moving = letter in busy or arriving_Bps.get(letter) or letter in self.holders
                figures = ((m.STATE_LEFT, self.left[peer]),) if self.left[peer] else ()
                progress = round(1000 * self.now_s) if is_moving else 1
                if peer in self.core.run.workers:
                    self.core.handle(MessageReceived(peer, m.Heartbeat(1, 0, progress, figures)), self.now_s)
            self.now_s += 1.0
            self.tick()
            if self.frozen > frozen or self.core.run.view_change.phase != generation:
                return second + 1
        return seconds

    @property
    def source(self) -> str:
        """The member that sends the state."""
        members = self.core.run.member_list
        named = next((x.donor for x in members if x.joining), -1)
        rank = named if named >= 0 else next(i for i, x in enumerate(members) if not x.joining)
        return members[rank].peer[:1].decode()

    @property
    def present(self) -> str:
        return "".join(sorted(peer[:1].decode() for peer in self.core.run.workers))


def test_a_source_that_sends_nothing_is_replaced_and_the_newcomer_stays() -> None:
    run = Trained("ab", "c")
    assert (run.members, run.source) == ("C a b", "a")
    assert run.seconds(60) <= 21
    run.form("ab")
    assert (run.present, run.source) == ("abc", "b")
    notes = [x.fields for x in run.notes("source_replaced")]
    assert notes == [{"source": "a", "names": "c"}]
    assert "did not arrive from a" in run.view.reason
    run.ready(*run.peers("c"))
    assert run.core.phase == "training" and run.members == "C a b"


def test_the_next_newcomer_gets_a_source_that_has_not_failed() -> None:
    run = Trained("ab", "c")
    run.seconds(60), run.form("ab"), run.ready(*run.peers("c"))
    run.by_letter["d"] = D
    run.left[D] = 0.0
    run.join(D, SETUP)
    run.seconds(3)
    run.form("abc")
    assert (run.members, run.source) == ("D a b c", "b")


def lose(run: Trained, *pairs: str) -> None:
    """Both ends of each pair report that their connection broke; a second passes."""
    for one, other in pairs:
        for reporter, peer in ((one, other), (other, one)):
            lost = m.ConnectionLost(1, run.core.generation, run.by_letter[peer])
            run.say(run.by_letter[reporter], lost)
    run.seconds(1)


def test_a_newcomer_whose_large_packets_vanish_does_not_delay_the_others() -> None:
    """Each connection breaks as soon as the state is sent; small messages, such as heartbeats, arrive."""
    run = Trained("ab", "c")
    run.left[C] = 121e3
    run.seconds(6)
    assert run.core.run.reason == "2 workers since step 0; waiting for the state to reach c"
    lose(run, "ac")
    assert run.core.run.view_change.is_forming, "one failure may be chance"
    run.seconds(6)
    lose(run, "ac")
    assert run.core.run.view_change.is_freezing
    run.form("ab")
    assert (run.present, run.source) == ("abc", "b")
    run.seconds(6)
    lose(run, "bc")
    assert run.present == "ab" and run.now_s < 30
    (refused,) = sent(run.seen, m.Refused, C)
    assert "its connections to the members break" in refused.reason and "MTU" in refused.remedy


def test_a_newcomer_that_receives_the_state_is_waited_for_although_connections_break() -> None:
    run = Trained("ab", "c")
    run.left[C] = 100e6
    run.seconds(3, c=1e6)
    lose(run, "ac", "ac", "bc")
    assert run.core.run.view_change.is_forming and run.present == "abc"


def test_only_who_sends_the_state_can_end_the_wait_for_a_newcomer() -> None:
    """b, which does not send it, reports that its connection to c breaks."""
    run = Trained("abd", "c")
    assert run.source == "a"
    for _ in range(4):
        run.say(run.by_letter["b"], m.ConnectionLost(1, run.core.generation, C))
    run.seconds(1)
    assert run.core.run.view_change.is_forming and run.source == "a" and run.present == "abcd"


def test_newcomers_are_not_dismissed_for_the_connections_of_their_source() -> None:
    run = Trained("abe", "cd")
    run.seconds(3)
    lose(run, "ac", "ad", "ac")
    run.form("abe")
    assert run.present == "abcde" and run.source != "a"
    run.ready(*run.peers("cd"))
    assert run.core.phase == "training"


def test_a_source_that_sends_too_slowly_is_replaced() -> None:
    """A newcomer that receives 1 MiB in 15 s does not delay the generation for 15 minutes."""
    run = Trained("ab", "c")
    run.left[C] = 500e6
    assert run.seconds(900, c=70e3) <= 42
    run.form("ab")
    assert (run.present, run.source) == ("abc", "b")


def test_a_slow_link_is_waited_for() -> None:
    """The rate is a little above the least one, a sixteenth of the rate assumed for an unmeasured link."""
    run = Trained("ab", "c")
    run.left[C] = 100e6
    assert run.seconds(600, c=readiness.MIN_RATE_SHARE * readiness.DEFAULT_RATE_Bps * 1.2) >= 500
    assert run.core.generation == 2


def test_a_newcomer_is_dismissed_after_three_sources_have_failed() -> None:
    run = Trained("abde", "c")
    tried = []
    for _ in range(3):
        tried.append(run.source)
        run.seconds(60)
        if "c" in run.present:
            run.form("abde")
    assert len(set(tried)) == 3 and run.present == "abde"
    assert run.now_s < 100


def test_a_newcomer_is_at_fault_if_its_sources_serve_others() -> None:
    """The second newcomer receives the state from both sources that fail with the first one."""
    run = Trained("ab", "cd")
    run.ready(*run.peers("d"))
    run.seconds(60)
    run.form("ab")
    assert (run.present, run.source) == ("abcd", "b")
    run.ready(*run.peers("d"))
    run.seconds(60)
    assert run.present == "abd"


def test_a_newcomer_that_stays_busy_is_dismissed_without_blaming_a_source() -> None:
    """It has received all bytes and does not wait for the source; the others continue without it."""
    run = Trained("ab", "c")
    assert 100 < run.seconds(900, busy="c") <= (readiness.LOADING_PERIODS + 2) * 20
    assert run.present == "ab"
    assert not run.notes("source_replaced")


def test_a_large_state_may_take_long_to_load() -> None:
    run = Trained("ab", "c")
    run.left[C] = 100e6
    run.seconds(50, c=2e6)
    assert run.left[C] == 0 and run.seconds(100, busy="c") == 100 and run.core.generation == 2


def test_the_only_source_stays() -> None:
    """No other member holds the state, and nothing shows which of the two is at fault."""
    run = Trained("a", "c")
    run.seconds(60)
    assert run.present == "a"


def test_a_newcomer_that_waits_for_an_idle_holder_is_told_what_its_owner_can_do() -> None:
    """Such as a script in a notebook, between two cells."""
    run = Trained("a", "c")
    source = run.core.run.workers[A]
    source.figures = {SAMPLES_FIGURE: 100.0, SECONDS_FIGURE: 2.5}
    source.progressed_s = -1.0
    while C in run.core.run.workers:
        run.now_s += 1.0
        source.liveness.last_heard_s = run.now_s
        run.tick()
    (refused,) = sent(run.seen, m.Refused, C)
    assert refused.reason == (
        "did not receive the model within 20 s from a, the worker that holds it, whose training loop makes "
        "no progress"
    )
    assert refused.remedy == (
        "ask the owner of a to continue its loop (in a notebook, to run the cell again) or to stop that "
        "worker (grid.close()), then restart this worker"
    )


def test_a_source_in_a_long_step_is_waited_for_according_to_its_step_time() -> None:
    """Its counter does not advance until the step is over; a source that sends nothing looks the same."""
    for step_s, least, most in ((20.0, 160, 200), (0.1, 19, 41)):
        run = Trained("ab", "c")
        for worker in run.core.run.workers.values():
            worker.figures = {SAMPLES_FIGURE: 100.0, SECONDS_FIGURE: 25.0 * step_s}
            worker.progressed_s = -1.0
        source = run.core.run.workers[A]
        elapsed = 0
        while run.core.run.view_change.is_forming and elapsed < 400:
            run.now_s += 1.0
            elapsed += 1
            source.liveness.last_heard_s = run.now_s
            run.tick()
        assert least <= elapsed <= most, (step_s, elapsed)


@pytest.mark.parametrize("source_is_ready", [True, False])
def test_a_checkpoint_that_reaches_none_of_two_workers_costs_its_owner_the_membership(
    source_is_ready: bool,
) -> None:
    """A claims a checkpoint that the run has not reached, and sends it to nobody."""
    group = Group(3)
    group.join(A, replace(SETUP, checkpoint=HELD))
    group.join(B, SETUP), group.join(C, SETUP)
    assert group.members == "B C a"
    if source_is_ready:
        group.ready(A)
    due_s = group.core.run.view_change.deadline_s
    while group.core.run.view_change.is_forming:
        group.now_s = max(group.now_s, group.core.deadline_s)
        group.tick()
    assert group.now_s <= due_s + group.core.run.limits.first_step_s
    assert [note.fields["name"] for note in group.notes("lost")] == ["a"]
    group.report(B, C, synced=False)
    group.join(D, SETUP)
    assert group.members == "B C d" or group.members == "C D b"
    assert not group.notes("rollback"), "nobody has reached a's step"


# -- a member's side -------------------------------------------------------------------------------


def member() -> MemberCore:
    scripted = ScriptedMember(A, replace(SETUP, initial_state_digest=b"3f" * 16), address="tcp://a:1")
    scripted.install(1, (m.Member(B, "b", "tcp://b:1", 4, False), m.Member(A, "a", "", 4, True)))
    return scripted.core


def messages_sent(effects: list[ev.MemberEffect], kind: type[m.Message]) -> list[m.Message]:
    return [x.message for x in effects if isinstance(x, ev.Send) and isinstance(x.message, kind)]


def test_a_connection_that_breaks_late_has_the_full_time_to_return() -> None:
    """The time counts from the disconnection, not from the view."""
    core = member()
    core.handle(ev.PeerConnected(B), 1.0)
    core.handle(ev.PeerDisconnected(B, "the link is full"), 40.0)
    assert not messages_sent(core.tick(47.9), m.PeersUnreachable)
    assert messages_sent(core.tick(48.1), m.PeersUnreachable)
    core.handle(ev.PeerConnected(B), 50.0)
    core.handle(ev.PeerDisconnected(B, "again"), 60.0)
    assert messages_sent(core.tick(68.1), m.PeersUnreachable), "a new disconnection is reported again"


def test_a_member_that_received_a_state_stops_reporting_its_initial_one() -> None:
    core = member()
    again = core.handle(ev.MessageReceived(ME, m.Welcome(1, "r", "")), 1.0)
    assert [x.initial_state_digest for x in messages_sent(again, m.Setup)] == [b"3f" * 16]  # type: ignore[attr-defined]
    core.handle(ev.PeerConnected(B), 1.0)
    core.handle(ev.StateLoaded(1, 1), 2.0)
    again = core.handle(ev.MessageReceived(ME, m.Welcome(1, "r", "")), 3.0)
    assert [x.initial_state_digest for x in messages_sent(again, m.Setup)] == [b""]  # type: ignore[attr-defined]


def test_nothing_is_stored_of_strangers_that_left() -> None:
    group = Group(1)
    for number in range(100):
        stranger = number.to_bytes(32, "big")
        group.hear(PeerConnected(stranger, "192.0.2.7"))
        group.hear(PeerDisconnected(stranger, "gone"))
    assert group.core._addresses._hosts == {}


def test_a_newcomer_waits_no_longer_than_a_first_step_may_take() -> None:
    """b lacks the state; a reports no progress, as in a first step, which may take `first_step_s`."""
    group = Group(2)
    group.join(A, SETUP), group.join(B, SETUP)
    limits, installed_s = group.core.run.limits, group.now_s
    group.ready(A)
    while B in group.core.run.workers and group.now_s < installed_s + 3 * limits.first_step_s:
        group.now_s += 1.0
        group.say(A, m.Heartbeat(1, 0, 0, ()))
        group.say(B, m.Heartbeat(1, 0, 0, ()))
    assert limits.first_step_s <= group.now_s - installed_s <= limits.first_step_s + limits.ready_s + 2.0


def test_a_source_that_is_not_ready_is_not_taken_to_compute() -> None:
    """Only a source among holders that are all ready may be in a long step."""
    for ready, stays in (((), False), ((A,), True)):
        group = Group(2)
        group.join(A, SETUP), group.join(B, SETUP)
        group.ready(*ready)
        due_s = group.core.run.view_change.deadline_s
        assert due_s < group.now_s + group.core.run.limits.first_step_s
        group.core.tick(due_s)
        assert A in group.core.run.workers and (B in group.core.run.workers) is stays
