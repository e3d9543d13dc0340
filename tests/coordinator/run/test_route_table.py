"""How each pair of workers connects: which address each is told."""

from __future__ import annotations

import itertools

import pytest

from gridtrain.core import messages as m
from gridtrain.core.member.generation_entry import with_own_addresses
from gridtrain.core.messages import relay_of
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.liveness import Liveness
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.route_table import PeerLocation, RouteTable, dial_back_addresses

COORDINATOR = b"0" * 32
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
NAMES = {COORDINATOR: "coordinator", A: "a", B: "b", C: "c", D: "d"}


def at(name: str) -> str:
    """ "a" is at 10.0.0.1, "b" at 10.0.0.2 and so on."""
    return f"tcp://10.0.0.{ord(name) - ord('a') + 1}:1"


def open_place(name: str) -> PeerLocation:
    return PeerLocation(at(name), name, at(name))


def behind(router: str, name: str) -> PeerLocation:
    return PeerLocation(at(name), router, "")


def routes(**places: PeerLocation) -> RouteTable:
    made = RouteTable(COORDINATOR)
    for name, place in places.items():
        made.set_location(name.encode() * 32, place)
    return made


def told(made: RouteTable, *peers: bytes) -> dict[str, str]:
    """What each is told about each other: "a>b": the address."""
    relays = made.relay_candidates(peers)
    ways = {}
    for viewer in peers:
        for other in peers:
            if viewer != other:
                way = made.address(viewer, other, relays)
                relay = relay_of(way)
                ways[f"{NAMES[viewer]}>{NAMES[other]}"] = f"through {NAMES[relay]}" if relay else way
    return ways


def test_of_two_that_can_both_be_dialled_one_dials() -> None:
    assert told(routes(a=open_place("a"), b=open_place("b")), A, B) == {"a>b": "", "b>a": "tcp://10.0.0.1:1"}


def test_whoever_is_behind_nat_dials() -> None:
    made = routes(a=open_place("a"), b=behind("router", "b"))
    assert told(made, A, B) == {"a>b": "", "b>a": "tcp://10.0.0.1:1"}
    made = routes(a=behind("router", "a"), b=open_place("b"))
    assert told(made, A, B) == {"a>b": "tcp://10.0.0.2:1", "b>a": ""}


def test_two_behind_different_routers_meet_at_a_third() -> None:
    made = routes(a=behind("r1", "a"), b=behind("r2", "b"), c=open_place("c"))
    assert told(made, A, B, C) == {
        "a>b": "through c",
        "b>a": "through c",
        "a>c": "tcp://10.0.0.3:1",
        "b>c": "tcp://10.0.0.3:1",
        "c>a": "",
        "c>b": "",
    }


def test_the_coordinator_relays_where_nobody_else_can() -> None:
    made = routes(a=behind("r1", "a"), b=behind("r2", "b"))
    assert told(made, A, B) == {"a>b": "through coordinator", "b>a": "through coordinator"}


def test_a_worker_that_will_not_relay_is_not_asked_to() -> None:
    unwilling = PeerLocation("tcp://10.0.0.3:1", "c", "tcp://10.0.0.3:1", can_relay=False)
    made = routes(a=behind("r1", "a"), b=behind("r2", "b"), c=unwilling)
    assert told(made, A, B, C)["a>b"] == "through coordinator"


def test_two_behind_one_router_try_each_other_first_and_then_a_relay() -> None:
    made = routes(a=behind("r1", "a"), b=behind("r1", "b"), c=open_place("c"))
    assert told(made, A, B, C)["b>a"] == "tcp://10.0.0.1:1"
    relays = made.relay_candidates((A, B, C))
    assert made.block(B, A, relays) == "tcp://10.0.0.1:1"  # the router keeps its guests apart
    assert told(made, A, B, C)["a>b"] == "tcp://10.0.0.2:1"  # the other way round
    assert made.block(A, B, relays) == "tcp://10.0.0.2:1"
    assert told(made, A, B, C)["a>b"] == "through c"
    assert told(made, A, B, C)["b>a"] == "through c"
    made.block(A, B, relays)  # c cannot connect them either
    assert told(made, A, B, C)["b>a"] == "through coordinator"


def test_an_address_that_only_some_can_reach_is_given_up_pair_by_pair() -> None:
    made = routes(a=open_place("a"), b=open_place("b"), c=open_place("c"))
    assert made.block(B, A, ()) == "tcp://10.0.0.1:1"
    ways = told(made, A, B, C)
    assert (ways["a>b"], ways["b>a"]) == ("tcp://10.0.0.2:1", "")
    assert (ways["a>c"], ways["c>a"]) == ("", "tcp://10.0.0.1:1")


def test_a_worker_that_has_moved_is_tried_again() -> None:
    made = routes(a=open_place("a"), b=open_place("b"))
    made.block(B, A, ())
    made.set_location(A, open_place("z"))
    assert told(made, A, B)["b>a"] == "tcp://10.0.0.26:1"


def test_a_name_is_nobodys_proof_and_is_looked_up_by_nobody() -> None:
    named = PeerLocation("tcp://slow.example:1", "r1", "")
    made = routes(a=named, b=behind("r1", "b"))
    assert told(made, A, B) == {"a>b": "tcp://10.0.0.2:1", "b>a": ""}


def test_both_sides_are_told_what_fits_together() -> None:
    """Exactly one dials, or both use the same relay, for every mix of locations and failures."""
    kinds = (open_place("x"), behind("r1", "x"), behind("r2", "x"))
    for i, a in enumerate(kinds):
        for b in kinds:
            for c in kinds:
                made = routes(a=a, b=b, c=c)
                for _ in range(8):
                    ways = told(made, A, B, C)
                    for x, y in (("a", "b"), ("a", "c"), ("b", "c")):
                        pair = {ways[f"{x}>{y}"], ways[f"{y}>{x}"]}
                        relayed = any(way.startswith("through") for way in pair)
                        assert len(pair) == 1 if relayed else "" in pair and len(pair) == 2, (i, ways)
                    made.block(A, B, made.relay_candidates((A, B, C)))
                    made.block(C, B, made.relay_candidates((A, B, C)))


@pytest.mark.parametrize(
    ("place", "expected"),
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
def test_the_coordinator_calls_back_where_a_worker_says_and_where_it_came_from(
    place: PeerLocation, expected: tuple[str, ...]
) -> None:
    assert dial_back_addresses(place) == expected


def test_of_each_member_two_lines_are_kept_however_many_read_them() -> None:
    """Routes over relays differ for nearly each pair: for 1,000 members that would be a million entries."""
    where, peers = AddressBook(COORDINATOR), [bytes([number]) * 32 for number in range(1, 41)]
    for number, peer in enumerate(peers):
        worker = Worker(peer, "", f"tcp://10.0.0.{number}:1", 0.0, Liveness(0.0))
        where.on_connected(peer, f"198.51.100.{number}")
        where.request_dial_back(worker, can_relay=True)
        where.on_dial_back_result(worker, worker.address if number % 2 else "")
    where.begin_generation(peers)
    roster = tuple(m.Member(peer, "", "", 1, False) for peer in peers)
    ways = {(x.peer, x.address) for viewer in peers for x in where.members_for(viewer, roster)}
    assert len(ways) > 5 * len(peers), "over many relays"
    assert len(where._address_cache) <= 2 * len(peers)


def test_the_list_for_all_that_can_be_dialled_says_what_the_list_for_each_says() -> None:
    """For every mix of locations and failures; in a list of its own a worker has no address itself."""
    kinds = [PeerLocation("", "", ""), open_place("x"), behind("r1", "x"), None]
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
            roster = tuple(m.Member(peer, "", "claimed", 1, False) for peer in peers)
            book.begin_generation(peers)
            for pair in blocked:
                book.block_routes(pair[0], pair[1:])
            for viewer in peers:
                own = book.members_for(viewer, roster)
                assert with_own_addresses(viewer, own) == own
                if book.has_shared_list(viewer):
                    shared += 1
                    assert book.shared_list(roster) is book.shared_list(roster)
                    assert with_own_addresses(viewer, book.shared_list(roster)) == own
    assert shared > 500


def test_a_shared_list_follows_a_worker_that_moves() -> None:
    book, roster = AddressBook(COORDINATOR), (m.Member(A, "", "", 1, False),)
    for address in (at("a"), at("b")):
        worker = Worker(A, "", address, 0.0, Liveness(0.0))
        book.request_dial_back(worker, can_relay=True)
        book.on_dial_back_result(worker, address)
        assert [member.address for member in book.shared_list(roster)] == [address]


def test_of_a_worker_that_has_left_no_route_is_kept() -> None:
    made = routes(a=open_place("a"), b=open_place("b"))
    assert made.location(A) == open_place("a")
    made.forget(A)
    assert made.location(A) is None and told(made, A, B)["b>a"] == ""


def test_a_route_that_failed_blocks_the_direct_exchange_until_its_worker_moves() -> None:
    made = routes(a=open_place("a"), b=open_place("b"))
    made.block(B, A, ())
    made.set_location(A, open_place("a"))
    assert not made.is_directly_reachable(A), "it has not moved"
    made.set_location(A, open_place("z"))
    assert made.is_directly_reachable(A) and not made.is_directly_reachable(C)


def test_an_answer_about_an_earlier_address_is_ignored() -> None:
    book, worker = AddressBook(COORDINATOR), Worker(A, "a", at("a"), 0.0, Liveness(0.0))
    assert book.on_dial_back_result(worker, at("a")) == [], "it has left"
    assert book.request_dial_back(worker, False) and not worker.is_addressable
    assert book.on_dial_back_result(worker, at("z")) == [] and not worker.is_addressable
    assert book.on_dial_back_result(worker, at("a")) and worker.is_addressable
    assert book.reachability_text(A) == "direct"
    assert book.on_dial_back_result(worker, "") == [], "a second one"
    assert book.reachability_text(A) == "direct"
