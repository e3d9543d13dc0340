"""Which members receive a member list in pages, and which as changes to the list that they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_coordinator import SETUP, A, B, C, D, E, ScriptedCoordinator

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.network.wire.codec import decode, encode
from gridtrain_coordinator.membership import member_lists
from gridtrain_coordinator.run.events import DialBackResult, Effect, PeerConnected, PeerDisconnected, Send

LIMITS = Deadlines(silence_s=1e9, settle_s=0.0, report_s=100.0)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With small pages, lists of three members are sent as changes."""
    monkeypatch.setattr(member_lists, "MEMBERS_PER_PAGE", 2)
    yield


class Run(ScriptedCoordinator):
    """A group of four, whose members store the lists that they receive."""

    def __init__(self, **unreachable: bool) -> None:
        super().__init__(limits=LIMITS, min_workers=4)
        self.lists: dict[m.PeerId, tuple[m.Member, ...]] = {}
        for peer in (A, B, C, D):
            self.join(peer, reachable=peer[:1].decode() not in unreachable)

    def keep(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Send):
                self.receive(effect.peer, decode(encode(effect.message)))
        return super().keep(effects)

    def receive(self, peer: m.PeerId, message: m.Message) -> None:
        match message:
            case m.MemberListPage(page=page, members=members):
                self.lists[peer] = members if page == 0 else self.lists[peer] + members
            case m.MemberListChanges():
                changed = message.apply(self.lists[peer])
                assert changed is not None, "the member does not have the list that is to be changed"
                self.lists[peer] = changed
            case m.MembershipView(world_size=size):
                assert [member.peer for member in self.lists[peer]] == list(self.core.run.member_order)
                assert size == len(self.lists[peer])

    def next_lists(self, *reporters: m.PeerId) -> str:
        """Forms the next generation; returns how its list was sent, such as "a: changes, e: 3 pages"."""
        effects = [effect for peer in reporters for effect in self.report_effects(peer)]
        kinds: dict[m.PeerId, list[str]] = {}
        for effect in effects:
            if isinstance(effect, Send) and isinstance(
                effect.message, m.MemberListPage | m.MemberListChanges
            ):
                kinds.setdefault(effect.peer, []).append(type(effect.message).__name__)
        return ", ".join(
            f"{peer[:1].decode()}: "
            + ("changes" if names == ["MemberListChanges"] else f"{names.count('MemberListPage')} pages")
            for peer, names in sorted(kinds.items())
        )

    def report_effects(self, peer: m.PeerId) -> list[Effect]:
        self.report(peer)
        return self.effects


def test_ready_members_receive_changes_and_newcomers_receive_pages() -> None:
    run = Run()
    run.start(A, B, C, D)
    run.join(E)
    assert run.next_lists(A, B, C, D) == "a: changes, b: changes, c: changes, d: changes, e: 3 pages"
    sent = [effect.message for effect in run.effects if isinstance(effect, Send)]
    changes = next(message for message in sent if isinstance(message, m.MemberListChanges))
    assert changes.order == (m.Span(0, 1), m.Span(4, 8)), "b, c and d were joining before"
    assert [member.peer for member in changes.members] == [B, C, D, E]
    run.start(A, B, C, D, E)
    run.say(C, m.Leave("had enough"))
    assert run.next_lists(A, B, D, E) == "a: changes, b: changes, d: changes, e: changes"


def test_members_that_were_not_ready_receive_pages() -> None:
    run = Run()
    run.ready(A, B)
    run.say(D, m.Leave("had enough"))
    assert run.next_lists(A, B, C) == "a: changes, b: changes, c: 2 pages"


def test_a_list_that_is_sent_again_is_sent_in_pages() -> None:
    """The address of a member may have changed since the others received the list."""
    run = Run()
    run.start(A, B, C, D)
    run.hear(PeerDisconnected(B, "reset"))
    run.hear(PeerConnected(B, ""))
    run.say(A, m.Join("r", "a", "memory://moved", is_rejoin=True, generation=1))
    run.hear(DialBackResult(A, "memory://moved"))
    again = run.say(B, m.Join("r", "b", "memory://b", is_rejoin=True, generation=1))
    assert sum(isinstance(e, Send) and isinstance(e.message, m.MemberListPage) for e in again) == 2
    run.say(B, SETUP, m.LinkLatencies(()))
    run.join(E)
    assert run.next_lists(A, B, C, D) == "a: 3 pages, b: 3 pages, c: changes, d: changes, e: 3 pages"


def test_a_new_process_with_a_members_key_receives_pages() -> None:
    run = Run()
    run.start(A, B, C, D)
    run.join(B)
    assert run.next_lists(A, C, D) == "a: changes, b: 2 pages, c: changes, d: changes"


def test_a_member_that_cannot_be_dialled_has_a_list_of_its_own() -> None:
    run = Run(d=False)
    run.start(A, B, C, D)
    run.join(E)
    assert run.next_lists(A, B, C, D) == "a: changes, b: changes, c: changes, d: 3 pages, e: 3 pages"


def test_a_restarted_coordinator_sends_pages() -> None:
    run = Run()
    run.start(A, B, C, D)
    again = Run.__new__(Run)
    again.lists = dict(run.lists)
    ScriptedCoordinator.__init__(again, limits=LIMITS, min_workers=4, term=2, journal=run.journal)
    for peer in (A, B, C, D):
        again.join(peer, generation=1)
    assert again.next_lists(A, B, C, D) == "a: 2 pages, b: 2 pages, c: 2 pages, d: 2 pages"


def test_a_list_with_mostly_changed_entries_is_sent_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_lists, "MAX_CHANGED", 0)
    run = Run()
    run.start(A, B, C, D)
    run.say(D, m.Leave("had enough"))
    assert run.next_lists(A, B, C) == "a: 2 pages, b: 2 pages, c: 2 pages"


def test_the_largest_changes_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    most, top = member_lists.MAX_CHANGED, 2**31 - 1
    member = m.Member(bytes(32), "n" * 64, "a" * 128, top, True, top, digest=bytes(64))
    order = tuple(m.Span(2**62 + 2 * index, 2**62 + 2 * index + 1) for index in range(most))
    changes = m.MemberListChanges(2**63 - 1, 2**63 - 1, 2**63 - 1, order, (member,) * most, bytes(32))
    assert decode(encode(changes)) == changes
