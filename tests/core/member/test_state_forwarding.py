"""Several joining members, one state: blocks from the preceding member, the digest from the source.

rank   0  source    1  c    2  a (this worker)    3  d
"""

from __future__ import annotations

import math
from dataclasses import replace

from scripted_member import SETUP, ScriptedMember

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.state_forwarding import BLOCK_TIMEOUT_S, MAX_FIRST_BLOCK_TIMEOUT_S, StateForwarding

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
NAMES = {A: "a", B: "source", C: "c", D: "d"}


class Newcomer(ScriptedMember):
    """A member core in a forming generation of four, and its effects on the state transfer."""

    def __init__(
        self, setup: m.Setup = SETUP, joining: str = "cad", applied: int = 4, source: int = -1
    ) -> None:
        super().__init__(A, setup, neighbours=lambda rank, size: {(rank + 1) % size, (rank - 1) % size})
        members = (
            m.Member(p, NAMES[p], f"{NAMES[p]}:1" if p != A else "", 4, joins, source if joins else -1)
            for p, joins in ((p, NAMES[p] in joining) for p in (B, C, A, D))
        )
        state = m.LedgerState(step=applied + 1, cursor=4 * applied + 4, consumed=4 * applied + 4)
        self.dialled = self.install(1, members, applied=applied, history=b"h" * 32, ledger=state)

    def hear(self, event: ev.MemberEvent) -> list[str]:  # type: ignore[override]
        return self.describe(super().hear(event))

    def tick(self, now_s: float) -> list[str]:
        self.now_s = now_s
        return self.describe(self.core.tick(now_s))

    def describe(self, effects: list[ev.MemberEffect]) -> list[str]:
        words = []
        for effect in effects:
            match effect:
                case ev.Send(peer, m.StateRequest() as ask):
                    words.append(f"ask {NAMES[peer]} for {'the digest' if ask.digest_only else 'blocks'}")
                case ev.Dial(peer):
                    words.append(f"dial {NAMES[peer]}")
                case ev.StoreStateBlock(peer):
                    words.append(f"store a block of {NAMES[peer]}'s")
                case ev.ExpectStateDigest(_, digest):
                    words.append(f"expect {digest.decode()}")
                case ev.ForwardState(peer, _, _, have):
                    words.append(f"forward to {NAMES[peer]} from {have}")
                case ev.SendState(peer):
                    words.append(f"send our state to {NAMES[peer]}")
        return words


def block(index: int = 0) -> m.StateBlock:
    return m.StateBlock(1, 1, index, 9, b"")


def test_blocks_come_from_upstream_and_the_digest_from_the_source() -> None:
    a = Newcomer()
    assert sorted(a.dialled) == ["dial c", "dial d", "dial source"]
    assert a.hear(ev.PeerConnected(B)) == ["ask source for the digest"]
    assert a.hear(ev.PeerConnected(C)) == ["ask c for blocks"]
    assert a.say(m.StateDigest(1, 1, b"77"), B) == ["expect 77"]
    assert a.say(m.StateDigest(1, 1, b"66"), C) == [], "only the source may send it"
    assert a.say(block(), C) == ["store a block of c's"]
    a.hear(ev.PeerConnected(D))
    assert a.say(m.StateRequest(1, 1, blocks_received=3), D) == ["forward to d from 3"]
    assert a.say(block(), D) == [], "d was not asked"


def test_the_first_joining_member_gets_all_from_the_source() -> None:
    a = Newcomer(joining="ad")
    assert a.hear(ev.PeerConnected(B)) == ["ask source for blocks"]
    assert a.hear(ev.PeerConnected(C)) == []
    assert a.say(block(), B) == ["store a block of source's"]


def test_the_source_is_the_one_that_the_member_list_names() -> None:
    """The lowest rank only reports that it holds the state."""
    a = Newcomer(joining="a", applied=-1, source=3)
    assert a.hear(ev.PeerConnected(B)) == []
    assert a.hear(ev.PeerConnected(D)) == ["ask d for blocks"]
    assert a.say(block(), B) == []
    assert a.say(block(), D) == ["store a block of d's"]


def test_an_upstream_member_that_sends_nothing_is_replaced_by_the_source() -> None:
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C)), a.hear(ev.PeerConnected(D))
    assert a.tick(50.0) == [], "the source may need long for its copy"
    a.now_s = 60.0
    a.say(m.StateDigest(1, 1, b"77"), B)
    a.now_s = 65.0
    a.say(block(), C)
    assert a.tick(64.9 + BLOCK_TIMEOUT_S) == [], "counted from the latest block"
    assert a.tick(65.0 + BLOCK_TIMEOUT_S) == ["ask source for blocks"]
    assert a.tick(99.0 + BLOCK_TIMEOUT_S) == [], "once"
    assert a.say(block(1), C) == [], "blocks of c are no longer accepted"
    assert a.say(block(1), B) == ["store a block of source's"]


def test_repeated_blocks_are_no_progress() -> None:
    """c sends its first block repeatedly, which would delay the generation until its deadline."""
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C)), a.hear(ev.PeerConnected(D))
    a.say(m.StateDigest(1, 1, b"77"), B)
    requests: list[str] = []
    for second in range(1, 2 * round(BLOCK_TIMEOUT_S)):
        requests += a.tick(float(second))
        a.say(block(second // 100), C)
        a.say(block(7), C)
    assert requests == ["ask source for blocks"]


def test_blocks_lost_with_a_connection_are_accepted_after_later_ones() -> None:
    """c had sent blocks 1 to 4, and sends block 5 over the new connection before it reads the new request."""
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C))
    a.say(block(0), C)
    a.hear(ev.PeerDisconnected(C, "reset"))
    assert a.hear(ev.PeerConnected(C)) == ["ask c for blocks"]
    a.say(block(5), C)
    assert a.say(block(1), C) == ["store a block of c's"]


def test_a_slow_but_steady_upstream_member_is_not_bypassed() -> None:
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C))
    for index in range(5):
        assert a.tick(9.0 * index) == []
        assert a.say(block(index), C) == ["store a block of c's"]


def test_the_timeout_of_the_first_block_grows_with_the_position_in_the_chain() -> None:
    """At 10 Mbit/s the 15th of 15 has it after 12 s; a fixed timeout would send the last to the source."""
    peers = [bytes([number]) * 32 for number in range(16)]
    members = tuple(m.Member(peer, "", "", 1, joining=peer != peers[0]) for peer in peers)
    last = {
        at: StateForwarding(RankAssignment(peers[at], 1, 1, members), chained=True) for at in (1, 2, 4, 15)
    }
    for forwarding in last.values():
        forwarding.record_progress(100.0)
    assert [x.deadline_s for x in last.values()] == [
        math.inf,
        100 + BLOCK_TIMEOUT_S,
        100 + 3 * BLOCK_TIMEOUT_S,
        100 + MAX_FIRST_BLOCK_TIMEOUT_S,
    ]
    last[15].extend_timeouts(120.0)
    assert last[15].deadline_s == 100 + MAX_FIRST_BLOCK_TIMEOUT_S, "late enough already"
    last[15].record_block(peers[14], 0, 112.0)
    assert last[15].deadline_s == 112 + BLOCK_TIMEOUT_S


def test_after_a_stall_of_its_own_a_member_does_not_bypass_upstream() -> None:
    """What c has sent meanwhile has not been read yet."""
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C)), a.hear(ev.PeerConnected(D))
    a.say(m.StateDigest(1, 1, b"77"), B)
    assert a.tick(30.0) == [] and a.core.deadline_s == 31.0
    assert a.tick(31.0) == ["ask source for blocks"]


def test_an_upstream_member_that_violates_the_protocol_is_bypassed_at_once() -> None:
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C))
    assert a.hear(ev.ProtocolViolation(C, "a block of another size")) == ["ask source for blocks"]


def test_a_state_with_another_digest_is_requested_from_the_source() -> None:
    a = Newcomer()
    a.hear(ev.PeerConnected(B)), a.hear(ev.PeerConnected(C))
    assert a.hear(ev.StateDigestMismatch(7)) == [], "of another generation"
    assert a.hear(ev.StateDigestMismatch(1)) == ["ask source for blocks"]


def test_a_member_that_holds_the_state_waits_for_no_block() -> None:
    a = Newcomer(joining="cd")
    assert a.core.deadline_s == 8.0, "only for its connections"
    generation = a.core.current_generation
    assert generation is not None and generation.incoming_state.forwarding.downstream is None


def test_after_catch_up_the_remaining_state_is_requested_from_the_source() -> None:
    """It is requested from the source, as the preceding member may lack the state itself."""
    a = Newcomer(replace(SETUP, can_catch_up=True))
    assert a.hear(ev.PeerConnected(B)) == ["ask source for blocks"]
    assert a.hear(ev.PeerConnected(C)) == []


def test_before_the_first_step_there_is_no_catch_up() -> None:
    a = Newcomer(replace(SETUP, can_catch_up=True), applied=-1)
    assert a.hear(ev.PeerConnected(B)) == ["ask source for the digest"]
