"""The exchange that the coordinator chooses with `exchange="auto"`, when it changes the choice, and why."""

from __future__ import annotations

import re

import pytest

from gridtrain.config import Auto, Dense, Exchange, GTopK, LocalSteps
from gridtrain.core import messages as m
from gridtrain.core.planning import exchange_choice
from gridtrain.core.planning.exchange_choice import ExchangeChoice
from gridtrain.core.planning.exchange_facts import exchange_of, local_steps_of, parameter_count
from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.planning.workload import ExchangeKind

PEERS = tuple(bytes([number]) * 32 for number in range(1, 9))
RESNET50, DEMO = 25_600_000, 120_576
Mbit = 1e6 / 8


def setup_of(parameters: int = RESNET50, exchange: str = "auto(values=fp16)") -> m.Setup:
    facts = (("model", f"{parameters} parameters in 10 tensors"), ("exchange", exchange))
    return m.Setup(facts, m.LedgerSpec(100, 0, epochs=1), 4, None)


def opened(parameters: int = RESNET50, auto: Auto | None = None) -> ExchangeChoice:
    exchanging = ExchangeChoice()
    exchanging.configure(setup_of(parameters, (auto or Auto()).describe()))
    return exchanging


def chosen(
    workers: int, rate_Mbit: float, compute_s: float, *, alpha_s: float = 0.005, parameters: int = RESNET50
) -> str:
    exchanging, peers = opened(parameters), PEERS[:workers]
    network = uniform_network(workers, alpha_s, rate_Mbit * Mbit)
    assert exchanging.choose_first(peers, dict.fromkeys(peers, compute_s), network, 0.0) == exchanging.reason
    return type(exchanging.chosen).__name__


def test_the_exchange_is_chosen_by_rate_and_computing_time() -> None:
    """ResNet-50 with four workers: steps with a second, a minute and an hour of computing, by rate."""
    chosen_by_rate = {
        rate: [chosen(4, rate, compute_s) for compute_s in (1.0, 60.0, 3600.0)] for rate in (10, 100, 1000)
    }
    assert chosen_by_rate == {
        10: ["GTopK", "GTopK", "Dense"],
        100: ["GTopK", "GTopK", "Dense"],
        1000: ["GTopK", "Dense", "Dense"],
    }


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("rate_Mbit", [20, 100, 1000, 10_000])
@pytest.mark.parametrize("compute_s", [0.02, 0.5, 5.0])
def test_dense_is_chosen_if_it_is_at_most_a_tenth_slower(
    workers: int, rate_Mbit: float, compute_s: float
) -> None:
    exchanging, peers = opened(DEMO), PEERS[:workers]
    network = uniform_network(workers, 0.001, rate_Mbit * Mbit)
    exchanging.choose_first(peers, dict.fromkeys(peers, compute_s), network, 0.0)
    estimates = exchanging._estimates(workers, network, compute_s, False)
    dense, fastest = estimates[0], min(each.step_s for each in estimates)
    assert (exchanging.chosen == Dense()) == (dense.step_s <= 1.1 * fastest)


def test_an_open_topology_is_estimated_as_it_will_be_used() -> None:
    """In a butterfly of 16 each member sends four payloads, directly 2 * 15 / 16 of one."""
    network = uniform_network(16, 0.010, 20 * Mbit)
    exchanging = opened(auto=Auto(density=0.01))
    usual, direct = (exchanging._estimates(16, network, 1.0, edges) for edges in (False, True))
    kinds = [ExchangeKind.DENSE, ExchangeKind.GTOPK_DIRECT, ExchangeKind.TOPK]
    assert [each.load.kind for each in direct] == kinds, "a dense vector of this size takes the ring"
    assert direct[1].cost.exchange_s < 0.6 * usual[1].cost.exchange_s
    assert [direct[0].cost, direct[2].cost] == [usual[0].cost, usual[2].cost]


def test_the_choice_has_a_description() -> None:
    exchanging, peers = opened(), PEERS[:4]
    exchanging.choose_first(peers, dict.fromkeys(peers, 1.0), uniform_network(4, 0.005, 100 * Mbit), 0.0)
    text = exchanging.description
    assert text.startswith("GTopK(density=0.001, momentum=0.0, values=fp16): a step takes 1.")
    assert " with 4 workers, 1 s of it computing; topk at density 0.001 1." in text and ", dense 13" in text
    assert "LocalSteps" not in text, "nearly all of a step is computing"


def test_the_description_proposes_local_steps_on_slow_links() -> None:
    exchanging = opened(auto=Auto(sparse=False))
    exchanging.choose_first(
        PEERS[:4], dict.fromkeys(PEERS[:4], 2.0), uniform_network(4, 0.02, 20 * Mbit), 0.0
    )
    assert exchanging.chosen == Dense()
    assert (
        "LocalSteps(every=" in exchanging.description
        and "this optimizer can use sparse exchanges" in exchanging.description
    )


def local(every: int, auto: Auto | None = None, *, overlap: bool = False) -> ExchangeChoice:
    """The choice for `LocalSteps` of ResNet-50."""
    exchanging = ExchangeChoice()
    exchange = LocalSteps(every, auto or Auto(), overlap=overlap)
    exchanging.configure(setup_of(exchange=exchange.describe()))
    return exchanging


def chosen_for_turns(choice: ExchangeChoice, rate_Mbit: float, turn_s: float) -> str:
    peers, network = PEERS[:4], uniform_network(4, 0.020, rate_Mbit * Mbit)
    assert choice.choose_first(peers, dict.fromkeys(peers, turn_s), network, 0.0)
    return choice.chosen_text.replace(", momentum=0.0, values=fp16", "")


def test_with_local_steps_the_densest_exchange_with_enough_computing_is_chosen() -> None:
    """Four workers at 20 Mbit/s: dense takes 62 s, GTopK at 0.1, 0.03 and 0.01 takes 5.9, 2.0 and 0.8 s."""
    turns_s = (1.0, 10.0, 30.0, 100.0, 1000.0)

    def densities(auto: Auto | None = None, *, overlap: bool = False) -> list[str]:
        made = [chosen_for_turns(local(32, auto, overlap=overlap), 20, turn_s) for turn_s in turns_s]
        return [each.removeprefix("GTopK(density=").rstrip("()") for each in made]

    assert densities() == ["0.01", "0.01", "0.03", "0.1", "Dense"]
    assert densities(overlap=True) == ["0.01", "0.1", "0.1", "Dense", "Dense"]
    assert densities(Auto(computing=0.5)) == ["0.01", "0.1", "0.1", "Dense", "Dense"]
    fits, reaches_nothing = local(32), local(32)
    chosen_for_turns(fits, 20, 100.0)
    chosen_for_turns(reaches_nothing, 20, 1.0)
    assert "; it is the densest exchange that leaves 90% of the time for computing" in fits.description
    assert "densest" not in reaches_nothing.description
    assert densities(Auto(density=0.2)) == ["0.2", "0.2", "0.2", "0.2", "Dense"]


def test_a_denser_exchange_is_chosen_when_it_leaves_enough_computing() -> None:
    """GTopK at 0.1 from 112 s on (95 % computing), until another exchange is 20 % faster below 25 s."""
    choice, network = local(32), uniform_network(4, 0.020, 20 * Mbit)
    assert chosen_for_turns(choice, 20, 30.0) == "GTopK(density=0.03)"
    seen = []
    for turn_s in (60.0, 105.0, 120.0, 60.0, 30.0, 20.0, 2000.0, 600.0, 400.0, 300.0):
        choice.reconsider(4, network, [turn_s] * 4)
        seen.append(getattr(choice.chosen, "density", 1.0))
    assert seen == [0.03, 0.03, 0.1, 0.1, 0.1, 0.03, 1.0, 1.0, 1.0, 0.1]


def test_advice_for_local_steps_counts_steps_of_the_loop() -> None:
    choice = local(8, Auto(density=0.1))
    chosen_for_turns(choice, 20, 0.8)
    advised = re.search(
        r"LocalSteps\(every=(\d+)\) in the script would raise this to (\d+)%", choice.description
    )
    assert advised is not None and int(advised[1]) > 8 and int(advised[2]) >= 90, choice.description


def test_the_facts_have_the_chosen_exchange_within_local_steps() -> None:
    choice = local(32, overlap=True)
    assert choice.is_auto and choice.workload is None
    chosen_for_turns(choice, 20, 10.0)
    assert choice.effective_setup is not None
    facts = dict(choice.effective_setup.facts)
    assert facts["exchange"] == LocalSteps(32, choice.chosen, overlap=True).describe()
    assert exchange_of(facts) == choice.chosen
    assert local_steps_of(facts) == choice._local == (32, 32)
    assert local_steps_of(dict(setup_of().facts)) is None and local_steps_of({}) is None
    assert local(7)._local == (7, False)


def test_the_choice_waits_for_figures_of_all_workers_and_for_a_rate() -> None:
    exchanging, peers = opened(), PEERS[:2]
    network = uniform_network(2, 0.005, 100 * Mbit)
    assert not exchanging.choose_first(peers, {peers[0]: 1.0}, network, 0.0) and exchanging.is_open
    step_s = dict.fromkeys(peers, 1.0)
    assert not exchanging.choose_first(peers, step_s, None, 10.0), "a rate may still be reported"
    assert not exchanging.choose_first(peers, step_s, None, 11.9)
    assert "no link has been measured; 100 Mbit/s are assumed" in exchanging.choose_first(
        peers, step_s, None, 12.1
    )
    assert not exchanging.is_open and not exchanging.choose_first(peers, step_s, network, 13.0), "chosen once"


def test_a_worker_that_reports_no_figures_delays_the_choice_for_a_limited_time() -> None:
    exchanging, peers = opened(), PEERS[:3]
    step_s, network = dict.fromkeys(peers[:2], 1.0), uniform_network(3, 0.005, 100 * Mbit)
    assert not exchanging.choose_first(peers, {}, network, 0.0), "no worker has reported yet"
    assert not exchanging.choose_first(peers, step_s, network, 10.0)
    assert not exchanging.choose_first(peers, step_s, network, 9.0 + exchanging.report_timeout_s)
    assert (
        exchanging.choose_first(peers, step_s, network, 10.0 + exchanging.report_timeout_s)
        and not exchanging.is_open
    )


def test_an_exaggerated_computing_time_counts_in_part() -> None:
    """One of four reports that a step takes a day, beside which a dense exchange would be short."""
    exchanging, peers = opened(), PEERS[:4]
    step_s = dict.fromkeys(peers, 1.0) | {peers[3]: 86_400.0}
    exchanging.choose_first(peers, step_s, uniform_network(4, 0.005, 100 * Mbit), 0.0)
    assert isinstance(exchanging.chosen, GTopK) and "4 s of it computing" in exchanging.description


def test_another_exchange_is_chosen_if_the_gain_is_large() -> None:
    exchanging, peers = opened(), PEERS[:4]
    fast, slow = uniform_network(4, 0.0002, 1000 * Mbit), uniform_network(4, 0.005, 100 * Mbit)
    exchanging.choose_first(
        peers, dict.fromkeys(peers, 60.0), fast, 0.0
    )  # the first batch included compilation
    assert exchanging.chosen == Dense()
    assert not exchanging.reconsider(4, fast, [60.0] * 4)
    assert exchanging.reconsider(4, fast, [1.0] * 4).startswith("GTopK")
    assert not exchanging.reconsider(4, slow, [1.0] * 4)
    assert not exchanging.reconsider(4, fast, [16.0] * 4), "dense would take 8 % longer"
    assert exchanging.reconsider(4, fast, [60.0] * 4).startswith("Dense()")
    assert not exchanging.reconsider(4, fast, [16.0] * 4), "the choice stays, as the sparse one stayed"


def test_a_small_gain_is_described_but_not_used() -> None:
    exchanging, peers = opened(), PEERS[:4]
    network = uniform_network(4, 0.0002, 1000 * Mbit)
    exchanging.choose_first(peers, dict.fromkeys(peers, 60.0), network, 0.0)
    assert not exchanging.reconsider(4, network, [9.0] * 4)
    assert (
        "would now make steps 1" in exchanging.description and "at least 20% faster" in exchanging.description
    )
    assert exchanging.chosen == Dense()


def test_the_choice_of_a_single_worker_is_open_again_for_two() -> None:
    exchanging = opened()
    assert "one worker" in exchanging.choose_first(PEERS[:1], {}, None, 0.0)
    assert exchanging.reconsider(2, None, []) and exchanging.is_open
    alone = opened()
    alone.choose_first(PEERS[:1], {}, None, 0.0)
    assert alone.reconsider(2, uniform_network(2, 0.005, 100 * Mbit), [1.0]).startswith("GTopK"), (
        "the known figures suffice"
    )
    restarted = ExchangeChoice()
    restarted.configure(setup_of(), chosen_alone(), alone=True)
    assert restarted.reconsider(2, None, []) and restarted.is_open, "also after a restart of the coordinator"


def chosen_alone() -> str:
    """The exchange chosen for one worker."""
    exchanging = opened()
    exchanging.choose_first(PEERS[:1], {}, None, 0.0)
    return exchanging.chosen_text


def test_the_facts_name_the_chosen_exchange() -> None:
    exchanging, peers = opened(), PEERS[:4]
    assert exchanging.workload is None and not exchanging.is_sparse
    exchanging.choose_first(peers, dict.fromkeys(peers, 1.0), uniform_network(4, 0.005, 100 * Mbit), 0.0)
    assert exchanging.effective_setup is not None
    assert dict(exchanging.effective_setup.facts)["exchange"] == exchanging.chosen_text
    assert exchanging.workload is not None and exchanging.workload.density == 0.001 and exchanging.is_sparse


def test_the_choice_is_restored_from_the_journal() -> None:
    """An exchange that `auto` cannot have chosen is not restored."""
    again = ExchangeChoice()
    again.configure(setup_of(), "GTopK(density=0.001, momentum=0.0, values=fp16)")
    assert not again.is_open and again.description.endswith("as in the journal")
    again.configure(setup_of(), "GTopK(density=0.5, momentum=0.0, values=fp16)")
    assert again.is_open


def test_a_named_exchange_leaves_nothing_to_choose() -> None:
    exchanging = ExchangeChoice()
    exchanging.configure(setup_of(exchange="GTopK(density=0.01, momentum=0.0, values=fp16)"))
    assert not exchanging.is_open and not exchanging.description and exchanging.workload is not None
    assert not exchanging.choose_first(
        PEERS[:2], dict.fromkeys(PEERS[:2], 1.0), uniform_network(2, 0.0, 1e6), 0.0
    )
    assert exchange_of({}) is None


def test_dense_is_chosen_for_a_model_of_unknown_size() -> None:
    exchanging = ExchangeChoice()
    facts = (("model", "large"), ("exchange", "auto(values=fp16)"))
    exchanging.configure(m.Setup(facts, m.LedgerSpec(100, 0, epochs=1), 4, None))
    exchanging.choose_first(PEERS[:2], dict.fromkeys(PEERS[:2], 1.0), uniform_network(2, 0.0, 1e6), 0.0)
    assert exchanging.chosen == Dense() and "size is not known" in exchanging.description


def test_the_number_of_parameters_is_read_from_facts() -> None:
    assert parameter_count(dict(setup_of(5).facts)) == 5


@pytest.mark.parametrize("exchange", Auto().exchanges(RESNET50))
def test_every_exchange_of_auto_has_an_estimate(exchange: Exchange) -> None:
    network: NetworkModel = uniform_network(2, 0.001, 1e7)
    estimates = opened()._estimates(2, network, 1.0, False)
    assert exchange.describe().partition("(")[0].lower() in {str(each.load.kind) for each in estimates}


def test_no_heartbeat_parses_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every heartbeat asks whether the coordinator chooses the exchange."""
    choice = opened()
    monkeypatch.setattr(exchange_choice, "exchange_of", lambda facts: pytest.fail("the facts were parsed"))
    assert choice.is_auto and choice.is_open and choice.workload is None


def test_a_model_of_one_parameter_can_be_exchanged_and_one_of_none_cannot() -> None:
    for parameters, is_known in ((0, False), (1, True), (2, True)):
        exchanging = ExchangeChoice()
        exchanging.configure(setup_of(parameters, "Dense()"))
        assert (exchanging.workload is not None) is is_known
