"""How each pair of workers connects: which address each of them receives."""

from __future__ import annotations

import itertools

import pytest

from gridtrain.core import messages as m
from gridtrain.core.member.generation_entry import with_own_addresses
from gridtrain.core.messages import relay_of
from gridtrain_coordinator.run import route_table
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.liveness import Liveness
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.route_table import PeerLocation, RouteTable, dial_back_addresses

COORDINATOR = b"0" * 32
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
NAMES = {COORDINATOR: "coordinator", A: "a", B: "b", C: "c", D: "d"}


def at(name: str) -> str:
    """The address of "a" is 10.0.0.1, that of "b" 10.0.0.2 and so on."""
    return f"tcp://10.0.0.{ord(name) - ord('a') + 1}:1"


def public(name: str) -> PeerLocation:
    return PeerLocation(at(name), name, at(name))


def behind(router: str, name: str) -> PeerLocation:
    return PeerLocation(at(name), router, "")


def routes(**locations: PeerLocation) -> RouteTable:
    made = RouteTable(COORDINATOR)
    for name, location in locations.items():
        made.set_location(name.encode() * 32, location)
    return made


def addresses(made: RouteTable, *peers: bytes) -> dict[str, str]:
    """What each worker receives about each other one, such as {"a>b": "tcp://10.0.0.2:1"}."""
    relays = made.relay_candidates(peers)
    found = {}
    for viewer in peers:
        for other in peers:
            if viewer != other:
                address = made.address(viewer, other, relays)
                relay = relay_of(address)
                found[f"{NAMES[viewer]}>{NAMES[other]}"] = f"through {NAMES[relay]}" if relay else address
    return found


def test_of_two_public_workers_one_dials() -> None:
    assert addresses(routes(a=public("a"), b=public("b")), A, B) == {"a>b": "", "b>a": "tcp://10.0.0.1:1"}


def test_a_worker_behind_nat_dials() -> None:
    made = routes(a=public("a"), b=behind("router", "b"))
    assert addresses(made, A, B) == {"a>b": "", "b>a": "tcp://10.0.0.1:1"}
    made = routes(a=behind("router", "a"), b=public("b"))
    assert addresses(made, A, B) == {"a>b": "tcp://10.0.0.2:1", "b>a": ""}


def test_two_workers_behind_different_routers_use_a_third_as_relay() -> None:
    made = routes(a=behind("r1", "a"), b=behind("r2", "b"), c=public("c"))
    assert addresses(made, A, B, C) == {
        "a>b": "through c",
        "b>a": "through c",
        "a>c": "tcp://10.0.0.3:1",
        "b>c": "tcp://10.0.0.3:1",
        "c>a": "",
        "c>b": "",
    }


def test_the_coordinator_relays_if_no_worker_can() -> None:
    made = routes(a=behind("r1", "a"), b=behind("r2", "b"))
    assert addresses(made, A, B) == {"a>b": "through coordinator", "b>a": "through coordinator"}


def test_a_worker_that_refuses_to_relay_is_no_relay() -> None:
    unwilling = PeerLocation("tcp://10.0.0.3:1", "c", "tcp://10.0.0.3:1", can_relay=False)
    made = routes(a=behind("r1", "a"), b=behind("r2", "b"), c=unwilling)
    assert addresses(made, A, B, C)["a>b"] == "through coordinator"


def test_two_workers_behind_one_router_try_each_other_before_a_relay() -> None:
    made = routes(a=behind("r1", "a"), b=behind("r1", "b"), c=public("c"))
    assert addresses(made, A, B, C)["b>a"] == "tcp://10.0.0.1:1"
    relays = made.relay_candidates((A, B, C))
    assert made.block(B, A, relays) == "tcp://10.0.0.1:1"  # the router isolates its clients
    assert addresses(made, A, B, C)["a>b"] == "tcp://10.0.0.2:1"  # the other way round
    assert made.block(A, B, relays) == "tcp://10.0.0.2:1"
    assert addresses(made, A, B, C)["a>b"] == "through c"
    assert addresses(made, A, B, C)["b>a"] == "through c"
    made.block(A, B, relays)  # c cannot connect them either
    assert addresses(made, A, B, C)["b>a"] == "through coordinator"


def test_an_unreachable_address_is_abandoned_for_each_pair_separately() -> None:
    made = routes(a=public("a"), b=public("b"), c=public("c"))
    assert made.block(B, A, ()) == "tcp://10.0.0.1:1"
    found = addresses(made, A, B, C)
    assert (found["a>b"], found["b>a"]) == ("tcp://10.0.0.2:1", "")
    assert (found["a>c"], found["c>a"]) == ("", "tcp://10.0.0.1:1")


def test_a_worker_that_has_moved_is_tried_again() -> None:
    made = routes(a=public("a"), b=public("b"))
    made.block(B, A, ())
    made.set_location(A, public("z"))
    assert addresses(made, A, B)["b>a"] == "tcp://10.0.0.26:1"


def test_a_host_name_is_neither_verified_nor_resolved() -> None:
    named = PeerLocation("tcp://slow.example:1", "r1", "")
    made = routes(a=named, b=behind("r1", "b"))
    assert addresses(made, A, B) == {"a>b": "tcp://10.0.0.2:1", "b>a": ""}


def test_both_sides_receive_matching_routes() -> None:
    """Exactly one dials, or both use the same relay, for every mix of locations and failures."""
    kinds = (public("x"), behind("r1", "x"), behind("r2", "x"))
    for i, a in enumerate(kinds):
        for b in kinds:
            for c in kinds:
                made = routes(a=a, b=b, c=c)
                for _ in range(8):
                    found = addresses(made, A, B, C)
                    for x, y in (("a", "b"), ("a", "c"), ("b", "c")):
                        pair = {found[f"{x}>{y}"], found[f"{y}>{x}"]}
                        relayed = any(address.startswith("through") for address in pair)
                        assert len(pair) == 1 if relayed else "" in pair and len(pair) == 2, (i, found)
                    made.block(A, B, made.relay_candidates((A, B, C)))
                    made.block(C, B, made.relay_candidates((A, B, C)))


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (PeerLocation("tcp://10.0.0.5:70", "1.2.3.4", ""), ("tcp://10.0.0.5:70", "tcp://1.2.3.4:70")),
        (PeerLocation("tcp://1.2.3.4:70", "1.2.3.4", ""), ("tcp://1.2.3.4:70",)),
        (
            PeerLocation("tcp://[fe80::1]:70", "2001:db8::1", ""),
            ("tcp://[fe80::1]:70", "tcp://[2001:db8::1]:70"),
        ),
        (PeerLocation("memory://a", "memory", ""), ("memory://a",)),
        (PeerLocation("", "1.2.3.4", ""), ()),
    ],
)
def test_a_worker_is_dialled_back_at_its_claimed_and_at_its_source_address(
    location: PeerLocation, expected: tuple[str, ...]
) -> None:
    assert dial_back_addresses(location) == expected


def test_a_worker_that_a_dial_back_reached_late_is_reachable() -> None:
    book, worker = AddressBook(COORDINATOR), Worker(A, "a", at("a"), 0.0, Liveness(0.0))
    book.request_dial_back(worker, can_relay=True)
    for address, is_news in (("", True), ("", False), (at("b"), False), (at("a"), True), (at("a"), False)):
        assert bool(book.on_dial_back_result(worker, address)) is is_news
    location = book.route_table.location(A)
    assert location is not None and location.verified_address == at("a")


def test_two_entries_are_cached_per_member() -> None:
    """Routes over relays differ for nearly each pair: for 1,000 members that would be a million entries."""
    book, peers = AddressBook(COORDINATOR), [bytes([number]) * 32 for number in range(1, 41)]
    for number, peer in enumerate(peers):
        worker = Worker(peer, "", f"tcp://10.0.0.{number}:1", 0.0, Liveness(0.0))
        book.on_connected(peer, f"198.51.100.{number}")
        book.request_dial_back(worker, can_relay=True)
        book.on_dial_back_result(worker, worker.address if number % 2 else "")
    book.begin_generation(peers, peers)
    members = tuple(m.Member(peer, "", "", 1, False) for peer in peers)
    entries = {(x.peer, x.address) for viewer in peers for x in book.members_for(viewer, members)}
    assert len(entries) > 5 * len(peers), "many relays are used"
    assert len(book._address_cache) <= 2 * len(peers)


def test_the_shared_list_equals_the_list_of_each_dialable_member() -> None:
    """For every mix of locations and failures.  In its own list a worker has no address."""
    kinds = [PeerLocation("", "", ""), public("x"), behind("r1", "x"), None]
    peers, shared = (A, B, C, D), 0
    for mix in itertools.product(kinds, repeat=len(peers)):
        for blocked in ((), ((A, B),), ((B, A), (C, D))):
            book = AddressBook(COORDINATOR)
            for peer, location in zip(peers, mix, strict=True):
                if location is not None:
                    worker = Worker(peer, "", location.claimed_address, 0.0, Liveness(0.0))
                    book.on_connected(peer, location.host)
                    book.request_dial_back(worker, can_relay=True)
                    book.on_dial_back_result(worker, location.verified_address)
            members = tuple(m.Member(peer, "", "claimed", 1, False) for peer in peers)
            book.begin_generation(peers, peers)
            for pair in blocked:
                book.block_routes(pair[0], pair[1:])
            for viewer in peers:
                own = book.members_for(viewer, members)
                assert with_own_addresses(viewer, own) == own
                if book.has_shared_list(viewer):
                    shared += 1
                    assert book.shared_list(members) is book.shared_list(members)
                    assert with_own_addresses(viewer, book.shared_list(members)) == own
    assert shared > 500


def test_the_shared_list_has_the_new_address_of_a_worker_that_moved() -> None:
    book, members = AddressBook(COORDINATOR), (m.Member(A, "", "", 1, False),)
    for address in (at("a"), at("b")):
        worker = Worker(A, "", address, 0.0, Liveness(0.0))
        book.request_dial_back(worker, can_relay=True)
        book.on_dial_back_result(worker, address)
        assert [member.address for member in book.shared_list(members)] == [address]


def test_the_routes_of_a_worker_that_left_are_dropped() -> None:
    made = routes(a=public("a"), b=public("b"))
    assert made.location(A) == public("a")
    made.forget(A)
    assert made.location(A) is None and addresses(made, A, B)["b>a"] == ""
    made.set_location(C, behind("r1", "c"))
    assert made.block(C, A, ()), "a late report"
    assert not made.is_directly_reachable(B)
    made.set_aside_absent((B, C))
    assert made.is_directly_reachable(B)


def test_a_failed_route_of_an_absent_worker_counts_again_when_it_returns() -> None:
    made = routes(a=public("a"), b=public("b"), c=public("c"))
    for other in (B, C):
        made.block(other, A, ())
    before = addresses(made, A, B)
    made.set_aside_absent((B, C))
    assert made.location(A) is None and made.follows_key_rule(B) and made.is_directly_reachable(B)
    made.forget(C)
    made.restore(A)
    assert addresses(made, A, B) == before and not made.follows_key_rule(B)
    made.set_aside_absent((A,))
    assert made.follows_key_rule(A), "C has left"
    made.set_location(B, public("b"))
    assert made.follows_key_rule(A), "B has moved"
    made.set_aside_absent((A,))
    made.forget(B)
    made.restore(B)
    assert made.location(B) is None


@pytest.mark.parametrize("returning", [(A, B), (B, A)])
def test_a_failed_route_counts_again_once_both_ends_have_returned(returning: tuple[bytes, bytes]) -> None:
    made = routes(a=public("a"), b=public("b"), c=public("c"))
    made.block(B, A, ())
    before = addresses(made, A, B)
    made.set_aside_absent((C,))
    made.restore(returning[0])
    assert made.is_directly_reachable(C), "one end is still absent"
    made.restore(returning[1])
    assert addresses(made, A, B) == before and not made.is_directly_reachable(C)


@pytest.mark.parametrize("leaving", [(A,), (A, B)])
def test_a_failed_route_is_void_if_the_other_end_moved_meanwhile(leaving: tuple[bytes, ...]) -> None:
    made = routes(a=public("a"), b=public("b"), c=public("c"))
    made.block(B, A, ())
    made.set_aside_absent({A, B, C}.difference(leaving))
    made.restore(B)
    made.set_location(B, public("z"))
    made.restore(A)
    assert made.is_directly_reachable(C) and made.follows_key_rule(A)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_failed_routes_of_absent_workers_count_towards_the_limit(
    monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    monkeypatch.setattr(route_table, "MAX_BLOCKED", 1)
    monkeypatch.setattr(route_table, "MAX_LOST", 1)
    made = routes(a=public("a"), b=public("b"), c=public("c"), d=public("d"))
    made.block(B, A, ())
    made.set_aside_absent((B, C, D))
    made.block(C, B, ())
    made.block_direct(C, B)
    assert made.is_directly_reachable(B), "the limit is reached"
    if is_forgotten:
        made.forget(A)
    else:
        made.set_aside_absent((B, C))  # D takes the place of A
    made.block(C, B, ())
    assert not made.is_directly_reachable(B)


def test_a_failed_route_blocks_direct_connections_until_the_worker_moves() -> None:
    made = routes(a=public("a"), b=public("b"))
    made.block(B, A, ())
    made.set_location(A, public("a"))
    assert not made.is_directly_reachable(A), "it has not moved"
    made.set_location(A, public("z"))
    assert made.is_directly_reachable(A) and not made.is_directly_reachable(C)


def test_a_result_for_an_earlier_address_is_ignored() -> None:
    book, worker = AddressBook(COORDINATOR), Worker(A, "a", at("a"), 0.0, Liveness(0.0))
    assert book.on_dial_back_result(worker, at("a")) == [], "it has left"
    assert book.request_dial_back(worker, False) and not worker.is_addressable
    assert book.on_dial_back_result(worker, at("z")) == [] and not worker.is_addressable
    assert book.on_dial_back_result(worker, at("a")) and worker.is_addressable
    assert book.route_table.reachability_text(A) == "direct"
    assert book.on_dial_back_result(worker, "") == [], "a second one"
    assert book.route_table.reachability_text(A) == "direct"
