"""The topology of `Dense()` and `GTopK()`: how it is chosen, and how it gets into the membership view."""

from __future__ import annotations

import pytest

from gridtrain.config import Deadlines, Dense
from gridtrain.core import messages as m
from gridtrain.core.planning.exchange_choice import ExchangeChoice
from gridtrain.core.planning.exchange_facts import (
    DIRECT_DENSE,
    DIRECT_GTOPK,
    name_direct,
    parse_exchange,
)
from gridtrain.core.planning.network_model import LinkModel, NetworkModel, uniform_network
from gridtrain.core.planning.topology_choice import (
    MAX_DIRECT_BYTES,
    MAX_DIRECT_MEMBERS,
    choose_topology,
)
from gridtrain.core.planning.workload import ExchangeKind, Workload
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run.events import DialBackResult, MessageReceived, PeerConnected

Mbit = 125_000.0
SMALL = Workload(ExchangeKind.DENSE, 120_576)
LAN = uniform_network(4, 0.0001, 1000 * Mbit)
HOMES = uniform_network(4, 0.010, 20 * Mbit)


def test_the_texts_are_those_of_dense() -> None:
    assert (Dense().describe(), Dense(topology="direct").describe()) == ("Dense()", DIRECT_DENSE)


def test_the_direct_topology_is_chosen_for_small_models_and_groups() -> None:
    large = Workload(ExchangeKind.DENSE, MAX_DIRECT_BYTES // 4 + 1)
    many = uniform_network(MAX_DIRECT_MEMBERS + 1, 0.0001, 1000 * Mbit)
    is_direct = {
        "small, four": choose_topology(SMALL, 4, LAN, True).is_direct,
        "not measured": choose_topology(SMALL, 4, None, True).is_direct,
        "far away": choose_topology(SMALL, 4, uniform_network(4, 0.020, 100 * Mbit), True).is_direct,
        "large": choose_topology(large, 4, LAN, True).is_direct,
        "two": choose_topology(SMALL, 2, uniform_network(2, 0.0001, 1000 * Mbit), True).is_direct,
        "seventeen": choose_topology(SMALL, MAX_DIRECT_MEMBERS + 1, many, True).is_direct,
        "a pair without an edge": choose_topology(SMALL, 4, LAN, False).is_direct,
        "gTop-k, few entries": choose_topology(Workload(ExchangeKind.GTOPK, 120_576), 4, LAN, True).is_direct,
        "gTop-k, many": choose_topology(Workload(ExchangeKind.GTOPK, 2**25), 4, HOMES, True).is_direct,
        "as a tree": choose_topology(Workload(ExchangeKind.TREE, 2**25), 4, HOMES, True).is_direct,
        "unknown size": choose_topology(None, 4, LAN, True).is_direct,
    }
    assert [name for name, direct in is_direct.items() if direct] == [
        "small, four",
        "not measured",
        "far away",
        "gTop-k, many",
    ]


def two_sites(thin_Bps: float) -> NetworkModel:
    def link(src: int, dst: int) -> LinkModel:
        return LinkModel(0.001, 1000 * Mbit if src // 2 == dst // 2 else thin_Bps)

    return NetworkModel(link, [1000 * Mbit] * 4, [1000 * Mbit] * 4)


def test_a_slow_link_that_pairs_may_share_leads_to_a_ring() -> None:
    """A ring uses the link between the sites once each way, a direct exchange four times."""
    assert choose_topology(SMALL, 4, two_sites(800 * Mbit), True).is_direct
    thin = choose_topology(SMALL, 4, two_sites(100 * Mbit), True)
    assert (
        thin.reason == "around a ring, because a link has only 10% of the rate that its ends reach otherwise"
    )
    assert not thin.is_direct


def test_a_slow_home_connection_does_not_count_as_a_slow_link() -> None:
    """The link has the full rate of its member, which is the same in both topologies."""
    rates = [20 * Mbit, *[1000 * Mbit] * 3]
    network = NetworkModel(lambda a, b: LinkModel(0.005, min(rates[a], rates[b])), rates, rates)
    assert choose_topology(SMALL, 4, network, True).is_direct


def test_the_choice_has_a_reason() -> None:
    assert choose_topology(SMALL, 4, LAN, True).reason.startswith("direct: 1")
    assert " ms, around a ring 1" in choose_topology(SMALL, 4, LAN, True).reason
    assert "482304 bytes is small" in choose_topology(SMALL, 4, None, True).reason
    large = Workload(ExchangeKind.GTOPK, 2**25, 0.05)
    assert choose_topology(large, 4, None, True).reason == "direct: no link has been measured"


def exchanging(exchange: str, parameters: int = 120_576, stages: int = 1) -> ExchangeChoice:
    facts = (("model", f"{parameters} parameters in 4 tensors"), ("exchange", exchange))
    made = ExchangeChoice()
    made.configure(m.Setup(facts, m.LedgerSpec(100, 0, epochs=1), 4, None, stages=stages))
    return made


@pytest.mark.parametrize(
    ("exchange", "stages", "named"),
    [
        ("Dense()", 1, DIRECT_DENSE),
        ("Dense(values=int8)", 1, DIRECT_DENSE),
        ("Dense(topology=ring, values=int8)", 1, ""),
        ("LocalSteps(every=4, exchange=Dense(), lr=1.0)", 1, DIRECT_DENSE),
        ("Dense(topology=ring)", 1, ""),
        ("Dense()", 2, ""),
        ("GTopK(density=0.01, momentum=0.0, values=fp16)", 1, DIRECT_GTOPK),
        ("LocalSteps(every=4, exchange=GTopK(density=0.01), lr=1.0)", 1, DIRECT_GTOPK),
        ("GTopK(density=0.01, momentum=0.0, values=fp16, topology=butterfly)", 1, ""),
        ("GTopK(density=0.01)", 2, ""),
        ("TopK(density=0.01)", 1, ""),
    ],
)
def test_a_topology_named_in_the_script_is_not_changed(exchange: str, stages: int, named: str) -> None:
    made = exchanging(exchange, stages=stages)
    made.choose_topology(4, HOMES, True)
    assert made.view_exchange == named
    assert (made.workload is not None and made.workload.kind.topology == "direct") == bool(named)
    made.choose_topology(2, LAN, True)
    assert (
        made.view_exchange == ""
        and made.effective_setup is not None
        and dict(made.effective_setup.facts)["exchange"] == exchange
    )


@pytest.mark.parametrize(
    ("exchange", "named"),
    [
        ("Dense()", "Dense(topology=direct)"),
        ("Dense(values=int8)", "Dense(topology=direct, values=int8)"),
        ("LocalSteps(every=4, exchange=Dense(values=bf16), x=1)", None),
        ("Dense(topology=star, values=int8)", "Dense(topology=star, values=int8)"),
        ("GTopK(density=0.1)", "GTopK(topology=direct, density=0.1)"),
    ],
)
def test_the_chosen_topology_is_named_with_the_other_options(exchange: str, named: str | None) -> None:
    text = name_direct(exchange)
    assert text == (named or "LocalSteps(every=4, exchange=Dense(topology=direct, values=bf16), x=1)")
    assert named is None or parse_exchange(text) == parse_exchange(named)


def test_a_slow_link_found_later_leads_to_a_new_generation() -> None:
    made = exchanging("Dense()")
    made.choose_topology(4, None, True)
    assert made.view_exchange == DIRECT_DENSE and made.usual_topology_reason(4, LAN) == ""
    assert made.usual_topology_reason(4, two_sites(100 * Mbit)).startswith(
        "links have changed: around a ring, because a link"
    )
    made.choose_topology(4, two_sites(100 * Mbit), True)
    assert made.view_exchange == "" and made.usual_topology_reason(4, two_sites(100 * Mbit)) == "", (
        "the ring is in use now"
    )


def test_a_ring_that_is_a_little_faster_leads_to_no_generation() -> None:
    """With 130,000 more parameters a ring has two slices, which hide the latency of a hop."""
    made = exchanging("Dense()", parameters=250_000)
    made.choose_topology(4, None, True)
    found = choose_topology(Workload(ExchangeKind.DENSE, 250_000), 4, LAN, True)
    assert made.view_exchange == DIRECT_DENSE and not found.is_direct and 1 < found.usual_speedup < 1.2
    assert made.usual_topology_reason(4, LAN) == ""


def test_a_dense_exchange_chosen_by_auto_gets_a_topology_too() -> None:
    made, peers = exchanging("auto(dense alone)"), [bytes([n]) * 32 for n in range(4)]
    made.choose_first(peers, dict.fromkeys(peers, 0.1), LAN, 0.0)
    assert made.view_exchange == "Dense()"
    made.choose_topology(4, LAN, True)
    assert (
        made.view_exchange == DIRECT_DENSE
        and made.description.startswith(DIRECT_DENSE)
        and made.chosen == Dense()
    )
    again = exchanging("auto(dense alone)")
    again.configure(made._setup, DIRECT_DENSE)  # type: ignore[arg-type]
    assert again.view_exchange == DIRECT_DENSE and not again.is_open


def test_gtop_k_goes_back_to_a_butterfly_behind_a_slow_link() -> None:
    made = exchanging("GTopK(density=0.01, momentum=0.9, values=fp16)")
    made.choose_topology(4, HOMES, True)
    assert made.view_exchange == DIRECT_GTOPK and " ms, in a butterfly " in made.topology.reason
    assert made.effective_setup is not None
    exchange = dict(made.effective_setup.facts)["exchange"]
    assert exchange == "GTopK(topology=direct, density=0.01, momentum=0.9, values=fp16)"
    assert made.usual_topology_reason(4, two_sites(100 * Mbit)).startswith(
        "links have changed: in a butterfly, because a link has only 10%"
    )
    made.choose_topology(4, two_sites(100 * Mbit), True)
    assert made.view_exchange == ""


def test_gtop_k_chosen_by_auto_gets_a_topology_too() -> None:
    made, peers = (
        exchanging("auto(density=0.001, values=fp16)", 25_600_000),
        [bytes([n]) * 32 for n in range(4)],
    )
    made.choose_first(peers, dict.fromkeys(peers, 0.1), HOMES, 0.0)
    usual, chosen = made.view_exchange, made.chosen
    assert usual == "GTopK(density=0.001, momentum=0.0, values=fp16)"
    made.choose_topology(4, HOMES, True)
    assert made.view_exchange == f"{usual[:-1]}, topology=direct)" and made.chosen == chosen
    assert dict(made.effective_setup.facts)["exchange"] == made.view_exchange  # type: ignore[union-attr]
    again = exchanging("auto(density=0.001, values=fp16)", 25_600_000)
    again.configure(again._setup, made.view_exchange)
    assert again.view_exchange == made.view_exchange and again.chosen == chosen and not again.is_open


PEERS = A, B, C, D = tuple(name.encode() * 32 for name in "abcd")


def formed(*behind_nat: bytes) -> Membership:
    """A coordinator and four workers on hosts of their own, before the first step."""
    limits = Deadlines(silence_s=1e9, settle_s=0.0, report_s=100.0)
    core = Membership(me=b"0" * 32, run="r", term=1, deadlines=limits, software="", min_workers=4)
    facts = (("model", "120576 parameters in 4 tensors"), ("exchange", "Dense()"))
    for now, peer in enumerate(PEERS):
        address = "memory://" + peer[:1].decode()
        core.handle(PeerConnected(peer, f"192.0.2.{now}"), 10.0 * now)
        core.handle(MessageReceived(peer, m.Join("r", peer[:1].decode(), address)), 10.0 * now)
        core.handle(DialBackResult(peer, "" if peer in behind_nat else address), 10.0 * now + 1)
        core.handle(
            MessageReceived(peer, m.Setup(facts, m.LedgerSpec(100, 0, epochs=1), 4, None)), 10.0 * now + 2
        )
        links = tuple((other, 0.001) for other in PEERS if other != peer)
        core.handle(MessageReceived(peer, m.LinkLatencies(links)), 10.0 * now + 3)
    return core


def test_the_view_names_the_topology_and_the_status_its_reason() -> None:
    core = formed()
    assert core.run.view is not None and core.run.view.exchange == DIRECT_DENSE
    status = core.status(100.0)
    assert "direct: 482304 bytes is small" in status["plan_reason"]
    assert status["facts"]["exchange"] == DIRECT_DENSE


def test_two_members_that_cannot_be_dialled_lead_to_a_ring() -> None:
    one, two = formed(A), formed(A, C)
    assert one.run.view is not None and one.run.view.exchange == DIRECT_DENSE, "A dials the others"
    assert two.run.view is not None and two.run.view.exchange == ""
    assert "some members cannot connect directly" in two.status(100.0)["plan_reason"]


def test_the_topology_is_in_the_journal() -> None:
    """A restarted coordinator names the topology that the members use."""
    made = exchanging("Dense()")
    made.configure(made._setup, DIRECT_DENSE)  # type: ignore[arg-type]
    assert made.view_exchange == DIRECT_DENSE and made.topology.reason == "direct, as in the journal"
