"""Builds a generation's member list for each recipient, as pages or as changes to the recipient's last list.

    every worker can dial the recipient     pages of the list shared by all such recipients, or changes to it
    otherwise                               pages of the recipient's own list (`AddressBook.members_for`)

A member receives changes only if this coordinator has sent it the list to which they apply, and the member
was ready in that list's generation.  It then holds the list, even if messages have been lost since.  A list
that is resent is always sent in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.run_state import RunState

MEMBERS_PER_PAGE = 256

MAX_CHANGED = MEMBERS_PER_PAGE
"""The maximum number of entries, and of spans of entries, in `MemberListChanges`.

A list that fits on one page is always sent in full.
"""


@dataclass(slots=True)
class _Announced:
    """A generation's shared list, and the members to which it was sent; they hold it once they are ready."""

    generation: int = 0
    members: tuple[m.Member, ...] = ()
    receivers: set[m.PeerId] = field(default_factory=set)


class MemberLists:
    """Builds the messages that contain member lists.

    Recipients of equal messages receive the same object, which is encoded only once.
    """

    def __init__(self, run: RunState, addresses: AddressBook) -> None:
        self._run, self._addresses = run, addresses
        self._announced = _Announced()
        self._changes: m.MemberListChanges | None = None
        self._may_receive_changes: frozenset[m.PeerId] = frozenset()
        self._shared_pages: tuple[m.MembershipView | None, tuple[m.Member, ...], list[m.MemberListPage]]
        self._shared_pages = None, (), []

    def end_generation(self) -> None:
        """Determine which members hold the current list.  Call before the next generation is installed."""
        run, announced = self._run, self._announced
        ready = run.view_change.ready_histories.keys() - run.departed_members
        is_current = announced.generation == run.generation
        self._may_receive_changes = frozenset(announced.receivers & ready) if is_current else frozenset()

    def begin_generation(self) -> None:
        """Prepare the list of the generation that was just installed."""
        run, base = self._run, self._announced
        assert run.view is not None
        shared = self._addresses.shared_list(run.member_list)
        receivers = {peer for peer in run.member_order if self._addresses.has_shared_list(peer)}
        self._announced = _Announced(run.generation, shared, receivers)
        self._changes = _changes(run.view, base, shared) if self._may_receive_changes else None

    def messages_for(self, viewer: m.PeerId) -> Sequence[m.MemberListPage | m.MemberListChanges]:
        """Return the list of the generation that was just installed, as it is first sent to this member."""
        holds_base = viewer in self._may_receive_changes
        if self._changes is not None and holds_base and viewer in self._announced.receivers:
            return [self._changes]
        return self._pages_for(viewer)

    def repeat_for(self, viewer: m.PeerId) -> Sequence[m.MemberListPage]:
        """Return the generation's whole list, for a member that may have missed it."""
        self._announced.receivers.discard(viewer)  # an address may have changed since the list was sent
        return self._pages_for(viewer)

    def _pages_for(self, viewer: m.PeerId) -> list[m.MemberListPage]:
        run = self._run
        assert run.view is not None
        if not self._addresses.has_shared_list(viewer):
            return _pages(run.view, self._addresses.members_for(viewer, run.member_list))
        members = self._addresses.shared_list(run.member_list)
        if self._shared_pages[:2] != (run.view, members):
            self._shared_pages = run.view, members, _pages(run.view, members)
        return self._shared_pages[2]


def _pages(view: m.MembershipView, members: tuple[m.Member, ...]) -> list[m.MemberListPage]:
    size = MEMBERS_PER_PAGE if not any(member.pieces for member in members) else max(MEMBERS_PER_PAGE // 8, 1)
    parts = [members[i : i + size] for i in range(0, len(members), size)]
    return [m.MemberListPage(view.term, view.generation, n, len(parts), part) for n, part in enumerate(parts)]


def _changes(
    view: m.MembershipView, base: _Announced, members: tuple[m.Member, ...]
) -> m.MemberListChanges | None:
    """Return the changes from the list `base` to `members`; None if the whole list is to be sent instead."""
    if len(members) <= MEMBERS_PER_PAGE or any(member.pieces for member in members):
        return None
    place_of = {member.peer: place for place, member in enumerate(base.members)}
    order: list[m.Span] = []
    new: list[m.Member] = []
    for member in members:
        place = place_of.get(member.peer, -1)
        if place < 0 or base.members[place] != member:
            place = len(base.members) + len(new)
            new.append(member)
        if order and order[-1].stop == place:
            order[-1] = m.Span(order[-1].start, place + 1)
        else:
            order.append(m.Span(place, place + 1))
    if max(len(order), len(new)) > MAX_CHANGED:
        return None
    digest = m.member_list_digest(members)
    return m.MemberListChanges(view.term, view.generation, base.generation, tuple(order), tuple(new), digest)
