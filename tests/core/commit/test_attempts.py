"""Early, late, repeated and invalid messages around the attempts of a member."""

from __future__ import annotations

from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.commit import attempts as module
from gridtrain.core.commit.attempts import NO_VOTE, Attempts, StepCommitted
from gridtrain.core.group.member_events import Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.round_flags import SKIP, absent_flag
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

PEERS = [bytes([rank]) * 32 for rank in range(3)]
MEMBERS = tuple(m.Member(peer, f"w{rank}", "", 1, False) for rank, peer in enumerate(PEERS))
DIGEST = b"d" * 32
SLOT = m.PayloadSlot(m.CollectivePhase.SWAP)


def member(rank: int, world_size: int = 3) -> Attempts:
    return Attempts(RankAssignment(PEERS[rank], 1, 1, MEMBERS[:world_size]), 0)


def at(step: int, attempt: int = 0) -> m.RoundId:
    return m.RoundId(1, 1, step, attempt)


def data(round_id: m.RoundId, group: int = 0, flags: int = 0) -> m.Data:
    return m.Data(round_id, m.Channel(group), SLOT, flags, b"")


def yes(round_id: m.RoundId) -> m.Vote:
    return m.Vote(round_id, True, DIGEST, "")


def sent(effects: list[Any]) -> list[tuple[m.PeerId, m.Message]]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]


def test_early_messages_are_counted_and_bounded_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EARLY_BYTES", 400)
    mine = member(2)
    for nbytes, stored_bytes in ((100, 100), (250, 350), (50, 400)):
        assert mine.receive(PEERS[0], data(at(0)), nbytes, 0.0) == []
        assert mine.early_bytes(PEERS[0]) == stored_bytes
    mine.receive(PEERS[1], data(at(1)), 400, 0.0)
    with pytest.raises(RemoteProtocolError, match="rank 0 has sent 4 early messages, 401 bytes in all"):
        mine.receive(PEERS[0], data(at(0)), 1, 0.0)
    mine.drop_early(PEERS[0])
    assert (mine.early_bytes(PEERS[0]), mine.early_bytes(PEERS[1])) == (0, 400)
    for _ in range(module.MAX_EARLY_MESSAGES):
        mine.receive(PEERS[0], data(at(1)), 0, 0.0)
    with pytest.raises(RemoteProtocolError, match=f"sent {module.MAX_EARLY_MESSAGES + 1} early messages"):
        mine.receive(PEERS[0], data(at(1)), 0, 0.0)


def test_a_message_beyond_the_next_step_is_refused() -> None:
    mine = member(2)
    for ahead in (at(2), at(0, attempt=2), at(1, attempt=2)):
        with pytest.raises(RemoteProtocolError, match="no member can be past step 2"):
            mine.receive(PEERS[0], data(ahead), 1, 0.0)
    assert mine.early_bytes(PEERS[0]) == 0
    with pytest.raises(RemoteProtocolError, match="no member can be past step 2"):
        mine.record_progress(PEERS[0], m.RoundProgress(at(2), 1), 0.0)
    mine.record_progress(
        PEERS[0], m.RoundProgress(at(1, attempt=2), 1), 0.0
    )  # the next step, which has not begun
    mine.record_progress(PEERS[0], m.RoundProgress(m.RoundId(1, 0, 9, 0), 1), 0.0)  # of another generation


def test_messages_of_past_rounds_are_dropped_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STALE_MESSAGES", 2)
    mine = member(2)
    for past in (m.RoundId(1, 0, 9, 0), m.RoundId(0, 1, 0, 0)):
        assert mine.receive(PEERS[0], data(past), 1, 0.0) == []
    with pytest.raises(RemoteProtocolError, match="rank 0 has sent 3 messages of past rounds"):
        mine.receive(PEERS[0], data(m.RoundId(1, 0, 9, 0)), 1, 0.0)
    assert mine.receive(PEERS[1], data(m.RoundId(1, 0, 9, 0)), 1, 0.0) == []
    mine.submit(at(0), {}, 10.0, 0.0)
    mine.prepare(DIGEST, 0.0)
    mine.receive(PEERS[0], m.Decision(at(0), m.Verdict.COMMIT, ""), 1, 0.0)
    assert mine.next_round == at(1)
    assert mine.receive(PEERS[0], data(at(0)), 1, 0.0) == [], "the bound is for each step"


def test_data_of_an_unknown_channel_waits_only_while_more_collectives_follow() -> None:
    mine = member(2)
    mine.submit(at(0), {}, 10.0, 0.0, has_more=True)
    assert mine.receive(PEERS[0], data(at(0), group=5), 7, 0.0) == []
    assert mine.early_bytes(PEERS[0]) == 7
    mine = member(2)
    mine.submit(at(0), {}, 10.0, 0.0)
    with pytest.raises(RemoteProtocolError, match="which is not a channel of round"):
        mine.receive(PEERS[0], data(at(0), group=5), 7, 0.0)


@pytest.mark.parametrize(
    ("may_be_absent", "flags", "possible"),
    [(False, absent_flag(2), "0x1"), (True, absent_flag(3), "0xf"), (True, absent_flag(61), "0xf")],
)
def test_impossible_flags_are_refused_on_arrival(may_be_absent: bool, flags: int, possible: str) -> None:
    mine = Attempts(RankAssignment(PEERS[0], 1, 1, MEMBERS), 0, may_be_absent=may_be_absent)
    mine.submit(at(0), {m.Channel(): ButterflyExchange(0, 3, 0)}, 10.0, 0.0)
    only = (
        f"rank 1 sent data with the flags {flags:#x}; in this generation only the flags {possible} can be set"
    )
    for deliver in (
        lambda message: mine.deliver_data(1, message),
        lambda message: mine.receive(PEERS[1], message, 1, 0.0),
    ):
        with pytest.raises(RemoteProtocolError, match=only):
            deliver(data(at(0), flags=flags))
    mine.deliver_data(1, data(at(0), flags=SKIP | absent_flag(1) * may_be_absent))


def test_a_vote_is_repeated_only_to_a_root_that_reconnects() -> None:
    mine = member(2)
    assert mine.prepared_vote == NO_VOTE and mine.peer_connected(PEERS[0]) == []
    mine.submit(at(0), {}, 10.0, 0.0)
    assert mine.prepared_vote == NO_VOTE and mine.peer_connected(PEERS[0]) == []
    assert sent(mine.prepare(DIGEST, 0.0)) == [(PEERS[0], yes(at(0)))]
    assert mine.prepared_vote == (at(0), DIGEST, False)
    assert sent(mine.peer_connected(PEERS[0])) == [(PEERS[0], m.Vote(at(0), True, DIGEST, "repeated"))]
    assert mine.peer_connected(PEERS[1]) == []


def test_the_root_repeats_its_decision_to_a_member_that_votes_again() -> None:
    root = member(0, world_size=2)
    root.submit(at(0), {}, 10.0, 0.0)
    root.fail("a connection broke", 0.0)
    assert root.next_round == at(0, attempt=1)
    aborted = m.Decision(at(0), m.Verdict.ABORT, "repeated")
    assert sent(root.receive(PEERS[1], yes(at(0)), 1, 0.0)) == [(PEERS[1], aborted)]
    root.submit(at(0, attempt=1), {}, 10.0, 0.0)
    root.prepare(DIGEST, 0.0)
    effects = root.receive(PEERS[1], yes(at(0, attempt=1)), 1, 0.0)
    assert [effect.round for effect in effects if isinstance(effect, StepCommitted)] == [at(0, attempt=1)]
    committed = m.Decision(at(0, attempt=1), m.Verdict.COMMIT, "repeated")
    assert sent(root.receive(PEERS[1], yes(at(0, attempt=1)), 1, 0.0)) == [(PEERS[1], committed)]
    assert root.receive(PEERS[1], yes(at(0)), 1, 0.0) == [], "an earlier attempt of a committed step"


def test_a_message_of_the_next_step_proves_the_commit() -> None:
    mine = member(1)
    mine.submit(at(0), {}, 10.0, 0.0)
    mine.prepare(DIGEST, 0.0)
    proof = "a message of the next step proves the commit"
    assert mine.receive(PEERS[0], data(at(1)), 1, 0.0) == [StepCommitted(at(0), DIGEST, 0, proof)]


def test_a_round_is_submitted_once_and_cannot_begin_afterwards() -> None:
    mine = member(2)
    mine.submit(at(0), {}, 10.0, 0.0)
    with pytest.raises(LocalProtocolError, match="was submitted while"):
        mine.submit(at(0), {}, 10.0, 0.0)
    with pytest.raises(LocalProtocolError, match="was begun while"):
        mine.begin({}, 0.0)
