"""Steps that continue without a stalled trainer: deadlines, reports, requests and decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import LogEvent, MemberEffect, Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.round_flags import SKIP, absent_flag, absent_ranks, is_absent, is_skipped
from gridtrain.core.member.stragglers import (
    FEWEST_DELAYS,
    MAX_ABSENT_S,
    MIN_MARGIN_S,
    Stragglers,
    UsualDelay,
    UsualDelays,
)
from gridtrain.errors import RemoteProtocolError

PEERS = tuple(letter * 32 for letter in (b"a", b"b", b"c", b"d"))
MEMBERS = tuple(m.Member(peer, name, "", 4, False) for peer, name in zip(PEERS, "abcd", strict=True))
SETTINGS = b"lr=0.1"
STEP_S = 0.2


class Group:
    """The `Stragglers` of one member.  Steps take `STEP_S`, and computing takes half of that."""

    def __init__(
        self,
        rank: int,
        *,
        shares: tuple[int, ...] = (4, 4, 4, 4),
        counts: tuple[int, ...] = (4, 4, 4, 4),
        is_enabled: bool = True,
        delays: UsualDelays | None = None,
    ) -> None:
        members = [replace(member, share=share) for member, share in zip(MEMBERS, shares, strict=True)]
        assignment = RankAssignment(PEERS[rank], 1, 1, tuple(members))
        self.rank, self.now_s, self.step = rank, 10.0, 0
        self.delays = UsualDelays() if delays is None else delays
        self.subject = Stragglers(assignment, lambda: counts, self.delays, is_enabled=is_enabled)
        self.subject.started([], self.now_s)

    def round_id(self) -> m.RoundId:
        return m.RoundId(1, 1, self.step, 0)

    def submit(self, at_s: float) -> None:
        assert self.subject.accepts(is_absent=False)
        compute_s = self.subject.submitted(self.round_id(), SETTINGS, self.now_s + at_s)
        assert self.rank in self.subject.absent or compute_s == pytest.approx(at_s)

    def commit(self, flags: int = 0) -> None:
        self.now_s += STEP_S
        self.step += 1
        self.subject.committed(flags, self.now_s)

    def regular_steps(self, count: int) -> None:
        for _ in range(count):
            for rank in range(4):
                if rank != self.rank and self.rank == 0:
                    self.subject.voted(rank, STEP_S / 2)
            self.submit(STEP_S / 2)
            assert self.subject.tick(self.now_s + STEP_S) == []
            self.commit()

    def receive(self, rank: int, message: m.Waiting | m.ProceedWithout, at_s: float) -> list[MemberEffect]:
        return self.subject.receive(rank, message, self.step, self.now_s + at_s)

    def waiting(self, rank: int, at_s: float, settings: bytes = SETTINGS) -> list[MemberEffect]:
        return self.receive(rank, m.Waiting(self.round_id(), settings), at_s)

    def request(self, at_s: float) -> list[MemberEffect]:
        return self.receive(0, m.ProceedWithout(self.round_id(), SETTINGS), at_s)


def requests(effects: list[MemberEffect]) -> list[m.PeerId]:
    return [x.peer for x in effects if isinstance(x, Send) and isinstance(x.message, m.ProceedWithout)]


def test_round_flags_name_absent_ranks() -> None:
    flags = SKIP | absent_flag(0) | absent_flag(3)
    assert is_skipped(flags) and absent_ranks(flags) == (0, 3)
    assert is_absent(flags, 3) and not is_absent(flags, 1)
    assert absent_ranks(SKIP) == () and not is_skipped(absent_flag(0))


def test_a_delay_is_unusual_beyond_six_deviations_above_the_median() -> None:
    usual = UsualDelay()
    for number in range(FEWEST_DELAYS):
        assert usual.limit_s() == math.inf, "too few delays"
        usual.record(1.0 if number % 2 else 1.2)
    assert usual.limit_s() == pytest.approx(1.1 + 6 * 0.1)
    for _ in range(64):
        usual.record(0.01)
    assert usual.limit_s() == pytest.approx(0.01 + MIN_MARGIN_S), "old delays are forgotten"


def test_a_member_reports_once_that_it_waits_longer_than_usual() -> None:
    member = Group(rank=2)
    member.submit(0.1)
    assert member.subject.deadline_s == math.inf, "no usual delay is known yet"
    member.commit()
    member.regular_steps(FEWEST_DELAYS)
    member.submit(0.1)
    due_s = member.subject.deadline_s
    assert due_s == pytest.approx(member.now_s + 0.1 + STEP_S / 2 + MIN_MARGIN_S)
    assert member.subject.tick(due_s - 0.01) == []
    assert member.subject.tick(due_s) == [Send(PEERS[0], m.Waiting(member.round_id(), SETTINGS))]
    assert member.subject.deadline_s == math.inf and member.subject.tick(due_s + 9) == []
    member.subject.attempt_ended()
    member.submit(1.0)
    assert member.subject.tick(member.subject.deadline_s) != [], "in the next attempt again"


def test_the_root_requests_late_members_once_half_of_the_samples_wait() -> None:
    root = Group(rank=0)
    root.regular_steps(FEWEST_DELAYS)
    root.submit(0.1)
    assert requests(root.waiting(1, 0.12)) == [], "4 of 16 samples"
    assert requests(root.waiting(2, 0.12)) == [], "rank 3 is not late yet"
    due_s = root.subject.deadline_s
    assert due_s == pytest.approx(root.now_s + STEP_S / 2 + MIN_MARGIN_S)
    effects = root.subject.tick(due_s)
    assert effects == [Send(PEERS[3], m.ProceedWithout(root.round_id(), SETTINGS))]
    assert root.subject.tick(due_s + 1) == [], "requested once"
    effects = root.subject.committed(absent_flag(3), due_s + 1)
    assert effects == [LogEvent("proceed", {"step": root.step + 1, "without": "d"})]
    assert root.subject.committed(absent_flag(3), due_s + 2) == [], "absent from the step before, too"


def test_the_first_step_of_a_generation_uses_the_delays_known_from_earlier_ones() -> None:
    """The root is another member than before, to which no delays were reported."""
    usual = UsualDelays()
    Group(rank=2, delays=usual).regular_steps(FEWEST_DELAYS)
    usual.compute[PEERS[3]] = usual.compute[PEERS[0]] = usual.compute[PEERS[2]]
    limit_s = STEP_S / 2 + MIN_MARGIN_S
    member, late = Group(rank=2, delays=usual), Group(rank=3, delays=usual)
    member.submit(0.1)
    assert member.subject.tick(member.subject.deadline_s) == [
        Send(PEERS[0], m.Waiting(member.round_id(), SETTINGS))
    ]
    own = UsualDelays()
    own.compute[PEERS[0]] = usual.compute[PEERS[0]]
    root = Group(rank=0, delays=own)
    root.submit(0.1)
    assert requests(root.waiting(1, 0.12)) + requests(root.waiting(2, 0.12)) == []
    assert root.subject.late_s([3]) == math.inf, "an average waits, because the root knows no limit"
    assert requests(root.subject.tick(root.now_s + limit_s)) == [PEERS[3]]
    assert late.request(0.1) == [] and late.subject.absence is None
    late.subject.tick(late.now_s + limit_s)
    assert late.subject.absence == (0, SETTINGS)


def test_a_limit_grows_with_the_members_share() -> None:
    """After a member has left, the others have more samples and take longer."""
    root = Group(rank=0)
    root.regular_steps(FEWEST_DELAYS)
    after = Group(rank=0, shares=(4, 4, 8, 12), delays=root.delays)
    for rank, factor in enumerate((1, 1, 2, 3)):
        usual_s = factor * STEP_S / 2
        assert after.subject.late_s([rank]) - after.now_s == pytest.approx(usual_s + max(0.05, usual_s / 4))


def test_delays_of_departed_members_are_forgotten() -> None:
    delays = UsualDelays()
    for number in range(1000):
        delays.compute[number.to_bytes(32, "big")].record(1.0)
    remaining = delays.compute[PEERS[1]]
    Group(rank=0, delays=delays)
    assert set(delays.compute) == set(PEERS) and delays.compute[PEERS[1]] is remaining


def test_a_newcomer_ignores_requests() -> None:
    newcomer = Group(rank=3)
    newcomer.request(0.1)
    newcomer.subject.tick(newcomer.now_s + 60.0)
    assert newcomer.subject.absence is None


@pytest.mark.parametrize("group", [{"shares": (1, 1, 1, 9)}, {"counts": (0, 0, 0, 9)}])
def test_without_a_quorum_the_group_waits(group: Mapping[str, tuple[int, ...]]) -> None:
    root = Group(rank=0, **group)
    root.regular_steps(FEWEST_DELAYS)
    root.submit(0.1)
    for rank in (1, 2):
        assert requests(root.waiting(rank, 5.0)) == []
    assert requests(root.subject.tick(root.now_s + 9)) == []


def test_few_samples_at_the_end_of_a_pass_are_a_quorum() -> None:
    root = Group(rank=0, counts=(1, 1, 1, 9))
    root.regular_steps(FEWEST_DELAYS)
    root.submit(0.1)
    assert requests([*root.waiting(1, 0.1), *root.waiting(2, 0.1)]) == []
    assert requests(root.subject.tick(root.now_s + 5)) == [PEERS[3]]


def test_a_member_that_was_absent_is_requested_at_once() -> None:
    root = Group(rank=0)
    root.regular_steps(FEWEST_DELAYS)
    root.submit(0.1)
    root.commit(absent_flag(3))
    root.submit(0.01)
    assert root.subject.deadline_s == pytest.approx(root.now_s + 0.01), "it reports at once"
    assert root.subject.tick(root.now_s + 0.01) == []
    effects = root.waiting(1, 0.02)
    assert requests(effects) == [PEERS[3]]
    root.commit()
    root.submit(0.01)
    assert root.subject.deadline_s > root.now_s + 0.1, "all were present"


def test_the_requested_member_decides_about_its_absence() -> None:
    member = Group(rank=3)
    assert not member.subject.accepts(is_absent=True), "the root has not requested it"
    assert member.request(9.0) == [] and member.subject.absence is None, "no usual delay is known yet"
    member.commit()
    member.regular_steps(FEWEST_DELAYS)
    assert member.request(0.1) == [] and member.subject.absence is None, "it is not late"
    assert member.request(0.5) == [] and member.subject.absence == (member.step, SETTINGS)
    assert member.subject.accepts(is_absent=True)
    assert not member.subject.accepts(is_absent=False), "its I/O loop came first"
    member.commit(absent_flag(3))
    assert member.subject.absence is None

    member.submit(0.1)
    member.request(0.5)
    assert member.subject.absence is None, "its trainer came first"
    member.subject.attempt_ended()
    member.request(0.6)
    assert member.subject.absence is None, "for all attempts at the step"


def test_a_submission_in_flight_counts() -> None:
    member = Group(rank=3)
    member.regular_steps(FEWEST_DELAYS)
    member.request(0.5)
    member.submit(0.5)  # the trainer had submitted before the I/O loop contributed nothing
    assert member.subject.absence is None and not member.subject.accepts(is_absent=True)


def test_a_worker_that_becomes_slower_is_awaited_after_some_batches() -> None:
    member = Group(rank=3)
    member.regular_steps(FEWEST_DELAYS)
    for _ in range(40):
        member.request(0.5)
        if member.subject.absence is None:
            break
        for _ in range(4):  # the group is four steps further when the batch is complete
            assert member.subject.accepts(is_absent=True) or member.subject.absent
            member.commit(absent_flag(3))
        assert member.subject.accepts(is_absent=False)
        member.subject.submitted(member.round_id(), SETTINGS, member.now_s + 0.1)
        member.commit()
    else:
        pytest.fail("it stays absent")


def test_an_absence_is_limited() -> None:
    member = Group(rank=3)
    member.regular_steps(FEWEST_DELAYS)
    member.request(0.5)
    member.commit(absent_flag(3))
    member.now_s += MAX_ABSENT_S
    member.commit(absent_flag(3))
    member.request(0.5)
    assert member.subject.absence is None


def test_reports_and_requests_are_repeated() -> None:
    root, member = Group(rank=0), Group(rank=2)
    for each in (root, member):
        each.regular_steps(FEWEST_DELAYS)
        each.submit(0.1)
    for rank in (1, 2):
        root.waiting(rank, 1.0)
    assert requests(root.subject.tick(root.now_s + 2)) == [] and member.subject.tick(member.now_s + 2) != []
    root.subject.repeat()
    member.subject.repeat()
    assert requests(root.subject.tick(root.now_s + 3)) == [PEERS[3]]
    assert member.subject.tick(member.now_s + 3) != []


def test_a_member_that_takes_part_ignores_further_requests() -> None:
    member = Group(rank=3)
    member.regular_steps(FEWEST_DELAYS)
    member.request(0.5)
    member.subject.take_part()
    member.request(0.6)
    assert member.subject.absence is None


def test_a_trainer_that_has_returned_gets_its_usual_time() -> None:
    member = Group(rank=3)
    member.regular_steps(FEWEST_DELAYS)
    member.request(0.5)
    member.commit(absent_flag(3))
    member.subject.trainer_returned(member.now_s + 0.01)
    member.request(0.02)
    assert member.subject.absence is None
    due_s = member.subject.deadline_s
    assert due_s == pytest.approx(member.now_s + 0.01 + STEP_S / 2 + MIN_MARGIN_S)
    member.subject.tick(due_s)
    assert member.subject.absence == (member.step, SETTINGS), "it has stalled again"


def test_the_root_may_be_absent_unless_waiting_members_disagree() -> None:
    for settings in (SETTINGS, b"other"):
        root = Group(rank=0)
        root.regular_steps(FEWEST_DELAYS)
        root.waiting(1, 0.01, settings)
        for rank in (2, 3):
            root.waiting(rank, 0.01)  # before the root is late
        root.subject.tick(root.now_s + 1.0)
        assert root.subject.absence == ((root.step, SETTINGS) if settings == SETTINGS else None)


def test_no_member_is_absent_where_it_is_disabled() -> None:
    member = Group(rank=3, is_enabled=False)
    member.request(0.5)
    assert member.subject.absence is None and member.subject.deadline_s == math.inf
    large = tuple(m.Member(bytes([rank]) * 32, "", "", 1, False) for rank in range(63))
    assignment = RankAssignment(bytes(32), 1, 1, large)
    subject = Stragglers(assignment, lambda: [1] * 63, UsualDelays(), is_enabled=True)
    subject.receive(0, m.ProceedWithout(m.RoundId(1, 1, 0, 0), SETTINGS), 0, 1.0)
    assert subject.absence is None, "there are flags for 62 ranks"


def test_a_message_about_another_step_is_ignored() -> None:
    member = Group(rank=3)
    member.subject.receive(0, m.ProceedWithout(m.RoundId(1, 1, 7, 0), SETTINGS), 0, 1.0)
    assert member.subject.absence is None


@pytest.mark.parametrize(
    ("rank", "sender", "message"),
    [
        (3, 1, m.ProceedWithout(m.RoundId(1, 1, 0, 0), SETTINGS)),
        (3, 0, m.Waiting(m.RoundId(1, 1, 0, 0), SETTINGS)),
        (0, 1, m.Waiting(m.RoundId(1, 1, 0, 0), bytes((1 << 20) + 1))),
    ],
    ids=["a request of another member", "a report to another member", "endless settings"],
)
def test_a_violation_is_refused(rank: int, sender: int, message: m.Waiting | m.ProceedWithout) -> None:
    with pytest.raises(RemoteProtocolError, match=f"rank {sender} sent {type(message).__name__} with"):
        Group(rank=rank).subject.receive(sender, message, 0, 1.0)


def test_settings_of_the_largest_size_are_accepted() -> None:
    Group(rank=0).subject.receive(1, m.Waiting(m.RoundId(1, 1, 0, 0), bytes(1 << 20)), 0, 1.0)


def test_no_deadline_passes_while_this_loop_was_stalled() -> None:
    root = Group(rank=0)
    root.regular_steps(FEWEST_DELAYS)
    root.submit(0.1)
    root.subject.extend_timeouts(root.now_s + 5.0)
    for rank in (1, 2):
        assert requests(root.waiting(rank, 3.0)) == []
    assert root.subject.deadline_s == pytest.approx(root.now_s + 5.0)
    assert requests(root.subject.tick(root.now_s + 5.0)) == [PEERS[3]]
