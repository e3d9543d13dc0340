"""What a member holds, drops, repeats and refuses around its attempts, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.commit import attempts as module
from gridtrain.core.commit.attempts import Attempts, StepCommitted
from gridtrain.core.commit.two_phase_commit import Failed, Prepared
from gridtrain.core.group.member_events import Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

PEERS = [bytes([rank]) * 32 for rank in range(3)]
MEMBERS = tuple(m.Member(peer, f"w{rank}", "", 1, False) for rank, peer in enumerate(PEERS))
DIGEST = b"d" * 32
SLOT = m.PayloadSlot(m.CollectivePhase.SWAP)


def member(rank: int, world_size: int = 3) -> Attempts:
    return Attempts(RankAssignment(PEERS[rank], 1, 1, MEMBERS[:world_size]), 0)


def at(step: int, attempt: int = 0) -> m.RoundId:
    return m.RoundId(1, 1, step, attempt)


def data(round_id: m.RoundId, group: int = 0) -> m.Data:
    return m.Data(round_id, m.Channel(group), SLOT, 0, b"")


def yes(round_id: m.RoundId) -> m.Vote:
    return m.Vote(round_id, True, DIGEST, "")


def sent(effects: list[Any]) -> list[tuple[m.PeerId, m.Message]]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]


def test_early_messages_are_counted_and_bounded_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EARLY_BYTES", 400)
    here = member(2)
    for nbytes, held in ((100, 100), (250, 350), (50, 400)):
        assert here.receive(PEERS[0], data(at(0)), nbytes, 0.0) == []
        assert here.early_bytes(PEERS[0]) == held
    here.receive(PEERS[1], data(at(1)), 400, 0.0)
    with pytest.raises(RemoteProtocolError, match="rank 0 has sent 4 early messages of 401 bytes"):
        here.receive(PEERS[0], data(at(0)), 1, 0.0)
    here.drop_early(PEERS[0])
    assert (here.early_bytes(PEERS[0]), here.early_bytes(PEERS[1])) == (0, 400)


def test_nobody_is_further_ahead_than_the_next_step() -> None:
    here = member(2)
    for ahead in (at(2), at(0, attempt=2), at(1, attempt=2)):
        with pytest.raises(RemoteProtocolError, match="no member can be past step 1"):
            here.receive(PEERS[0], data(ahead), 1, 0.0)
    assert here.early_bytes(PEERS[0]) == 0
    with pytest.raises(RemoteProtocolError, match="no member can be past step 1"):
        here.record_progress(PEERS[0], m.RoundProgress(at(2), 1), 0.0)
    here.record_progress(PEERS[0], m.RoundProgress(at(1, attempt=2), 1), 0.0)  # the next, never begun


def test_messages_of_past_rounds_are_dropped_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STALE_MESSAGES", 2)
    here = member(2)
    for past in (m.RoundId(1, 0, 9, 0), m.RoundId(0, 1, 0, 0)):
        assert here.receive(PEERS[0], data(past), 1, 0.0) == []
    with pytest.raises(RemoteProtocolError, match="rank 0 has sent 3 messages of past rounds"):
        here.receive(PEERS[0], data(m.RoundId(1, 0, 9, 0)), 1, 0.0)
    assert here.receive(PEERS[1], data(m.RoundId(1, 0, 9, 0)), 1, 0.0) == []


def test_data_of_an_unknown_channel_waits_only_while_more_collectives_follow() -> None:
    here = member(2)
    here.submit(at(0), {}, 10.0, 0.0, has_more=True)
    assert here.receive(PEERS[0], data(at(0), group=5), 7, 0.0) == []
    assert here.early_bytes(PEERS[0]) == 7
    here = member(2)
    here.submit(at(0), {}, 10.0, 0.0)
    with pytest.raises(RemoteProtocolError, match="not one of the 0 channels"):
        here.receive(PEERS[0], data(at(0), group=5), 7, 0.0)


def test_a_vote_is_repeated_to_the_root_that_is_back_and_to_nobody_else() -> None:
    here = member(2)
    assert here.prepared_vote is None and here.peer_connected(PEERS[0]) == []
    here.submit(at(0), {}, 10.0, 0.0)
    assert here.prepared_vote is None and here.peer_connected(PEERS[0]) == []
    assert sent(here.advance(Prepared(DIGEST), 0.0)) == [(PEERS[0], yes(at(0)))]
    assert here.prepared_vote == (at(0), DIGEST, False)
    assert sent(here.peer_connected(PEERS[0])) == [(PEERS[0], m.Vote(at(0), True, DIGEST, "repeated"))]
    assert here.peer_connected(PEERS[1]) == []


def test_the_root_repeats_its_decision_to_one_that_votes_again() -> None:
    root = member(0, world_size=2)
    root.submit(at(0), {}, 10.0, 0.0)
    root.advance(Failed("a connection broke"), 0.0)
    assert root.next_round == at(0, attempt=1)
    aborted = m.Decision(at(0), m.Verdict.ABORT, "repeated")
    assert sent(root.receive(PEERS[1], yes(at(0)), 1, 0.0)) == [(PEERS[1], aborted)]
    root.submit(at(0, attempt=1), {}, 10.0, 0.0)
    root.advance(Prepared(DIGEST), 0.0)
    effects = root.receive(PEERS[1], yes(at(0, attempt=1)), 1, 0.0)
    assert [effect.round for effect in effects if isinstance(effect, StepCommitted)] == [at(0, attempt=1)]
    committed = m.Decision(at(0, attempt=1), m.Verdict.COMMIT, "repeated")
    assert sent(root.receive(PEERS[1], yes(at(0, attempt=1)), 1, 0.0)) == [(PEERS[1], committed)]
    assert root.receive(PEERS[1], yes(at(0)), 1, 0.0) == [], "an earlier attempt of a committed step"


def test_a_round_is_submitted_once_and_begun_before_that() -> None:
    here = member(2)
    here.submit(at(0), {}, 10.0, 0.0)
    with pytest.raises(LocalProtocolError, match="was submitted while"):
        here.submit(at(0), {}, 10.0, 0.0)
    with pytest.raises(LocalProtocolError, match="was begun while"):
        here.begin({}, 0.0)


def test_an_early_message_that_breaks_the_protocol_aborts_the_attempt_that_it_is_for() -> None:
    here = member(2)
    assert here.receive(PEERS[0], data(at(0), group=5), 7, 0.0) == []
    effects = here.submit(at(0), {}, 10.0, 0.0)
    (violation,) = [effect for effect in effects if isinstance(effect, module.EarlyViolation)]
    assert violation.peer == PEERS[0] and here.early_bytes(PEERS[0]) == 0
    (no,) = [message for peer, message in sent(effects) if isinstance(message, m.Vote)]
    assert not no.yes and no.reason.startswith("rank 0 violated the protocol: ")
