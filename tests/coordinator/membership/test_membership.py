"""The coordinator's core alone: cases that simulations of whole groups reach only by chance."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from scripted_coordinator import ME, SETUP, A, B, C, D, E, ScriptedCoordinator, receivers, sent

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.member.generation_entry import with_own_addresses
from gridtrain.core.planning.batch_shares import WorkerSpeeds
from gridtrain.network.wire.codec import MAX_HEADER_BYTES, encode
from gridtrain_coordinator.membership.catch_up import NO_PROGRESS_TIMEOUT_S, choose_snapshot_step
from gridtrain_coordinator.membership.complaints import StalledStep
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.membership.worker_admission import max_workers
from gridtrain_coordinator.run.events import (
    DialBack,
    DialBackResult,
    Disconnect,
    Effect,
    JournalEntry,
    LogEvent,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    RecordViolation,
    RunPhase,
    Send,
    WorkerRemoved,
)
from gridtrain_coordinator.run.journal_recovery import RecoveredRun, recover_run
from gridtrain_coordinator.run.link_failures import REMEMBERED_S, LinkFailures
from gridtrain_coordinator.run.liveness import FEWEST_BEATS, MIN_SILENCE_S
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.unique_names import unique_name


class Run(ScriptedCoordinator):
    """Cooperating workers; each event takes one virtual second."""

    def __init__(self, *peers: m.PeerId) -> None:
        limits = Deadlines(silence_s=1e9, settle_s=0.0, report_s=100.0)
        super().__init__(limits=limits, min_workers=len(peers))
        for peer in peers:
            self.join(peer)
        self.start(*peers)

    def heartbeat(self, *peers: m.PeerId) -> None:
        for number, peer in enumerate(peers):
            self.say(peer, m.Heartbeat(1, 0, int(self.now_s) + number, ()))


def test_a_generation_is_journalled_before_it_is_sent() -> None:
    run = Run(A)
    run.join(B)
    run.report(A)
    kinds = [type(effect) for effect in run.effects]
    assert kinds.index(JournalEntry) < kinds.index(Send)
    assert set(receivers(run.effects, m.MembershipView)) == {A, B}


def test_newcomers_that_keep_joining_delay_a_generation_only_briefly() -> None:
    """A new address is dialled back before a generation is made, but not indefinitely."""
    run = Run(A, B)
    run.join(C)
    run.join(D)
    assert run.core.run.view_change.is_freezing
    for peer in (C, D):
        run.say(peer, m.Join("r", "", f"memory://{peer.hex()}", True, True, 0))
    run.report(A, B)
    began_s, generation = run.now_s, run.core.generation
    for number in range(50):
        peer = (C, D)[number % 2]
        run.hear(DialBackResult(peer, ""))
        run.say(peer, m.Join("r", "", f"memory://{number}", True, True, 0))
        run.tick()
        if run.core.generation > generation:
            break
    assert run.core.generation > generation and run.now_s - began_s < 2 * Deadlines().reach_s
    assert run.roster == "a b c d"


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("shards", [(), (2**40,) * 4096], ids=["whole", "shards"])
def test_the_ledger_of_a_full_run_fits_into_a_message(delay: int, shards: tuple[int, ...]) -> None:
    size = sum(shards) or 2**61
    spec = m.LedgerSpec(size, 1, steps=2**40, delay=delay, shards=shards)
    begun = 2**61 // size * size + 2**32  # positions and steps of the largest encoding
    shares = [(number.to_bytes(32, "big"), 8) for number in range(max_workers(spec))]
    ledger = m.LedgerState(2**33, begun, (), begun)
    for _ in range(3):
        ledger = data_ledger.commit(spec, ledger, data_ledger.assign(spec, ledger, shares), skipped=False)
    ledger = data_ledger.reassign(spec, ledger, data_ledger.assign(spec, ledger, shares), dict(shares).keys())
    report = m.FreezeReport(1, 1, True, ledger.step - 1, bytes(32), ledger, None, b"", 0)
    (header,) = encode(report)
    assert len(header) > MAX_HEADER_BYTES // 2, "the ledger is nearly as large as it can be"


def test_workers_that_join_before_the_run_is_defined_do_not_exceed_its_limit() -> None:
    spec = m.LedgerSpec(4096, 1, steps=100, delay=1, shards=(1,) * 4096)
    setup, most = replace(SETUP, ledger=spec), max_workers(spec)
    peers = [number.to_bytes(32, "big") for number in range(1, most + 3)]
    run = ScriptedCoordinator(event_s=0.0, min_workers=2)
    for peer in peers:
        run.say(peer, m.Join("r", "w", "memory://x", True, False, 0))
    refused = {}
    for peer in peers:
        for message in sent(run.say(peer, setup), m.Refused):
            refused[peer] = message.code, message.reason
    reason = f"the run has {most} workers; it can have at most {most}"
    assert refused == dict.fromkeys(peers[most:], ("full", reason))
    assert not any(isinstance(effect, Disconnect) for effect in run.say(peers[0], setup)), (
        "an admitted worker may send its setup again"
    )


def test_workers_with_the_same_name_get_different_names() -> None:
    run = Run(A)
    for peer in (B, C):
        run.say(peer, m.Join("r", "a", "memory://" + peer.hex()))
        run.say(peer, m.Join("r", "a", "memory://" + peer.hex()))  # again, after a broken connection
    names = [worker.name for worker in run.core.run.workers.values()]
    assert names == ["a", "a-2", "a-3"]
    longest = "é" * 32
    assert unique_name(longest, {longest}) == "é" * 31 + "-2"


def test_a_worker_of_another_run_or_with_another_model_is_refused() -> None:
    run = Run(A)
    (refused,) = [e.message for e in run.say(B, m.Join("other", "b", "")) if isinstance(e, Send)]
    assert isinstance(refused, m.Refused)
    assert (refused.code, refused.reason) == ("wrong-run", 'this coordinator serves the run "r", not "other"')
    run.say(C, m.Join("r", "c", ""))
    other = m.Setup((("model", "huge"),), SETUP.ledger, 4, None)
    (refused,) = [e.message for e in run.say(C, other) if isinstance(e, Send)]
    assert isinstance(refused, m.Refused)
    assert "model is huge here and tiny in the run" in refused.reason
    assert [note.fields["name"] for note in run.notes("refused")] == ["a worker", "c"]


@pytest.mark.parametrize("exchange", ["Dense()", "SignTopK(density=0.1)"])
def test_an_exchange_that_the_coordinator_does_not_know_is_logged_and_not_planned(exchange: str) -> None:
    run = ScriptedCoordinator(min_workers=1)
    facts = ("model", "1000 parameters"), ("exchange", exchange)
    run.join(A, setup=replace(SETUP, facts=facts))
    is_known = exchange == "Dense()"
    notes = [] if is_known else [{"exchange": exchange}]
    assert [note.fields for note in run.notes("exchange_unknown")] == notes
    assert (run.core._planner.exchange_choice.workload is not None) is is_known


UNBALANCED = m.CheckpointInfo(4, b"h" * 32, m.LedgerState(step=5, cursor=20, consumed=19))
OVERLAPPING = m.CheckpointInfo(
    4, b"h" * 32, m.LedgerState(step=5, cursor=20, consumed=16, requeued=(m.Span(0, 2), m.Span(1, 3)))
)
REFUSED_FIRST = {
    "batch-size": replace(SETUP, facts=(("model", "mine"),), batch_size=0),
    "checkpoint": replace(SETUP, facts=(("model", "mine"),), checkpoint=UNBALANCED),
    "overlapping": replace(SETUP, facts=(("model", "mine"),), checkpoint=OVERLAPPING),
    "stage": replace(SETUP, facts=(("model", "mine"),), stages=2, stage_checkpoints=(UNBALANCED,)),
    "ledger": replace(SETUP, facts=(("model", "mine"),), ledger=m.LedgerSpec(0, 0, epochs=1)),
}


@pytest.mark.parametrize("wrong", REFUSED_FIRST.values(), ids=REFUSED_FIRST)
def test_a_refused_worker_does_not_define_the_run(wrong: m.Setup) -> None:
    """Otherwise workers with the right setup would be refused until a restart."""
    core = Membership(me=ME, run="r", term=1, deadlines=Deadlines(), software="")

    def set_up(peer: m.PeerId, setup: m.Setup) -> list[Effect]:
        core.handle(MessageReceived(peer, m.Join("r", peer[:1].decode(), "")), 1.0)
        return core.handle(MessageReceived(peer, setup), 1.0)

    effects = set_up(A, wrong)
    assert [message.code for message in sent(effects, m.Refused)]
    assert core.run.definition is None and not core.status(1.0)["facts"]
    effects = set_up(B, SETUP)
    assert [e.body["facts"] for e in effects if isinstance(e, JournalEntry) and e.kind == "run"] == [
        {"model": "tiny"}
    ]
    assert core.run.accepted_workers == {B}


BALANCED = m.CheckpointInfo(4, b"h" * 32, m.LedgerState(step=5, cursor=20, consumed=20))


class OldRun:
    """A run journalled by a version that described neither bases nor adapters."""

    def __init__(self) -> None:
        recovered = RecoveredRun(SETUP, 3, has_committed=True)
        self.core = Membership(
            me=ME, run="r", term=2, deadlines=Deadlines(), software="", recovered=recovered
        )

    def set_up(
        self, peer: m.PeerId, base: str, model: str = "tiny", origin: str = "", **fields: Any
    ) -> list[Effect]:
        self.core.handle(MessageReceived(peer, m.Join("r", peer[:1].decode(), "")), 1.0)
        self.core.handle(MessageReceived(peer, m.WorkerInfo((("base_origin", origin),))), 1.0)
        fields = {"checkpoint": BALANCED, "facts": (("model", model), ("base", base)), **fields}
        return self.core.handle(MessageReceived(peer, replace(SETUP, **fields)), 1.0)


def refusals(effects: list[Effect]) -> list[str]:
    return [message.reason for message in sent(effects, m.Refused)]


def journalled_facts(effects: list[Effect]) -> list[dict[str, str]]:
    return [e.body["facts"] for e in effects if isinstance(e, JournalEntry) and e.kind == "run"]


def test_a_run_without_a_described_base_gets_that_of_the_first_worker_that_returns() -> None:
    run = OldRun()
    assert refusals(run.set_up(A, "1 MB, digest 01", "large")) and refusals(run.set_up(B, "any"))
    assert run.core.run.definition == SETUP
    effects = run.set_up(C, "1 MB, digest 01")
    assert journalled_facts(effects) == [{"model": "tiny", "base": "1 MB, digest 01"}]
    run.core.handle(MessageReceived(C, m.WorkerInfo((("base_origin", "llama@0123"),))), 1.0)
    effects = run.set_up(D, "1 MB, digest 02", origin="llama@4567")
    (reason,) = refusals(effects)
    (remedy,) = [message.remedy for message in sent(effects, m.Refused)]
    assert "send_frozen=" in remedy and "a seed does not suffice" in remedy
    bases = "base is 1 MB, digest 02 here and 1 MB, digest 01 in the run"
    origins = "the base was loaded from llama@4567 here and llama@0123 in the run"
    assert reason.endswith(f": {bases}; {origins}")
    assert not refusals(run.set_up(E, "1 MB, digest 01", checkpoint=None)), "a newcomer with the run's base"
    assert run.core.run.accepted_workers == {C, E}


def test_a_checkpoint_of_a_stage_defines_the_base_too() -> None:
    run = OldRun()
    run.core.run.define(replace(SETUP, facts=(*SETUP.facts, ("blocks", "4")), stages=2))
    facts = (("model", "tiny"), ("blocks", "4"), ("base", "1 MB, digest 01"))
    found = (replace(BALANCED, layers=m.Span(0, 2)),)
    effects = run.set_up(A, "", facts=facts, checkpoint=None, stages=2, stage_checkpoints=found)
    assert not refusals(effects) and [facts["base"] for facts in journalled_facts(effects)] == [
        "1 MB, digest 01"
    ]


@pytest.mark.parametrize(
    ("wrong", "reason_part"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"checkpoint": UNBALANCED}, "is inconsistent"),
        ({"checkpoint": OVERLAPPING}, "is inconsistent"),
        ({"checkpoint": None}, "base is 1 MB, digest 02 here and missing in the run"),
    ],
    ids=["batch size", "unbalanced checkpoint", "overlapping spans", "no checkpoint"],
)
def test_a_refused_worker_does_not_define_the_base(wrong: dict[str, Any], reason_part: str) -> None:
    run = OldRun()
    effects = run.set_up(A, "1 MB, digest 02", **wrong)
    (reason,) = refusals(effects)
    assert reason_part in reason and run.core.run.definition == SETUP and not journalled_facts(effects)
    effects = run.set_up(B, "1 MB, digest 01")
    assert journalled_facts(effects) == [{"model": "tiny", "base": "1 MB, digest 01"}]
    assert not refusals(effects) and run.core.run.accepted_workers == {B}


def test_missing_facts_are_those_of_the_first_worker_that_returns_with_a_checkpoint() -> None:
    run, later = OldRun(), (("base", "1 MB, digest 01"), ("adapter", "default r=8"))
    effects = run.set_up(A, "", checkpoint=None, facts=(*SETUP.facts, *later))
    assert "adapter is default r=8 here and missing in the run" in refusals(effects)[0]
    effects = run.set_up(B, "", facts=(*SETUP.facts, *later, ("wait", "auto")))
    assert refusals(effects) == [
        "this worker's training setup differs from the run's: wait is auto here and missing in the run"
    ]
    assert journalled_facts(run.set_up(C, "", facts=(*SETUP.facts, *later))) == [dict(SETUP.facts + later)]
    assert "adapter is missing here" in refusals(run.set_up(D, "", facts=(*SETUP.facts, later[0])))[0]


def test_a_run_with_any_base_gets_its_missing_facts_too() -> None:
    run, facts = OldRun(), (*SETUP.facts, ("base", "any"))
    run.core.run.define(replace(SETUP, facts=facts))
    groups = ("groups", "2 groups, digest 01")
    assert journalled_facts(run.set_up(A, "", facts=(*facts, groups))) == [dict((*facts, groups))]


def test_the_reason_of_the_first_generation_names_its_workers() -> None:
    run = ScriptedCoordinator(limits=Deadlines(silence_s=1e9, settle_s=0.0), min_workers=2)
    run.join(A)
    run.say(A, m.Leave("it was the wrong script"))
    run.join(B)
    run.join(C)
    assert run.view.reason == "b, c joined"


OTHER = replace(SETUP, facts=(("model", "large"),))


@pytest.mark.parametrize("has_left", ["before the first generation", "before the first step", "after it"])
def test_before_the_first_step_a_definition_without_workers_is_replaced(
    has_left: str,
) -> None:
    """Otherwise a wrong script that was started first would exclude all others, also after it has left."""
    few = 2 if has_left == "before the first generation" else 1
    run = ScriptedCoordinator(limits=Deadlines(silence_s=1e9, settle_s=0.0), min_workers=few)
    run.join(A)
    if few == 1:
        run.start(A)
    if has_left == "after it":
        run.say(A, m.Heartbeat(1, 1, 1, ()))
    run.say(B, m.Join("r", "b", ""))
    effects = run.say(B, OTHER)
    (refused,) = sent(effects, m.Refused)
    how = (
        "load it in a run with another name in run.toml"
        if has_left == "after it"
        else "setup of a is the wrong one, stop or"
    )
    assert how in refused.remedy
    run.say(A, m.Leave("its script failed"))
    restarted = ScriptedCoordinator(journal=list(run.journal), term=2)
    for coordinator in (run, restarted):
        coordinator.say(B, m.Join("r", "b", ""))
        effects = coordinator.say(B, OTHER)
        assert journalled_facts(effects) == ([] if has_left == "after it" else [{"model": "large"}])
        assert bool(refusals(effects)) is (has_left == "after it")


def test_a_restarted_coordinator_keeps_the_definition_as_steps_may_have_been_committed() -> None:
    limits = Deadlines(silence_s=1e9, settle_s=0.0)
    run = ScriptedCoordinator(limits=limits)
    run.join(A)
    run.start(A)
    restarted = ScriptedCoordinator(limits=limits, journal=list(run.journal), term=2)
    restarted.say(A, m.Join("r", "a", "memory://a"))  # another process, without the model
    restarted.tick(after_s=2 * limits.regather_s)
    assert restarted.core.phase is RunPhase.WAITING and restarted.core.run.highest_step == 0
    for coordinator in (restarted, ScriptedCoordinator(journal=list(restarted.journal), term=3)):
        coordinator.say(B, m.Join("r", "b", ""))
        assert "model is large here" in refusals(coordinator.say(B, OTHER))[0]


def test_waiting_workers_learn_how_many_have_joined() -> None:
    core = Membership(me=ME, run="r", term=1, deadlines=Deadlines(), software="", min_workers=3)
    reasons = [core.run.reason]
    for peer in (A, B):
        effects = core.handle(MessageReceived(peer, m.Join("r", peer[:1].decode(), "")), 1.0)
        reasons += [message.reason for message in sent(effects, m.RunStateUpdate)]
    core.handle(MessageReceived(A, m.Leave("enough")), 1.0)
    reasons.append(core.status(1.0)["reason"])
    assert reasons == [
        "waiting for 3 workers",
        "waiting for 3 workers; 1 of 3 has joined",
        "waiting for 3 workers; 2 of 3 have joined",
        "waiting for 3 workers; 1 of 3 has joined",
    ]


def test_the_name_of_a_worker_that_left_is_remembered() -> None:
    """The worker can be banned, and the ban lifted, by name."""
    run = Run(A, B)
    assert run.core.worker_name(B) == "b" and run.core.worker_name(C) == ""
    run.say(B, m.TemporaryLeave("a game"))
    assert B not in run.core.run.workers and run.core.worker_name(B) == "b"
    run.say(A, m.Leave("enough"))
    assert A not in run.core.run.workers and run.core.worker_name(A) == "a"


def test_a_suspect_without_progress_is_removed() -> None:
    run = Run(A, B, C)
    run.heartbeat(A, B)
    run.now_s += 10.0
    run.heartbeat(A, C)
    run.now_s += 3.0
    run.say(A, m.RoundStalled(m.RoundId(1, 1, 0, 1), (B,), 5.0, "rank 1 is silent"))
    assert Disconnect(B) in run.effects
    assert [member["name"] for member in run.core.status(run.now_s)["members"]] == ["a", "c"]
    assert [refused.reason for refused in sent(run.effects, m.Refused)] == [
        "made no progress for 16.0 s (limit 5.0 s) while other members waited; its share of a step is 4 "
        "samples"
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"no connection to {B.hex()[:8]}, {bytes(32).hex()[:8]}", "no connection to b, 00000000"),
        ("rank 0 voted NO: connection to rank 1 broke", "a voted NO: connection to b broke"),
        ("rank 3, rank 99999999 and {0} %s \\1", "rank 3, rank 99999999 and {0} %s \\1"),
    ],
)
def test_the_reason_of_a_stall_names_members(said: str, shown: str) -> None:
    run = Run(A, B, C)
    run.say(A, m.RoundStalled(m.RoundId(1, 1, 0, 0), (B,), 0.0, said))
    events = run.core.status(run.now_s)["events"]
    logged = [event["reason"] for event in events if event["event"] == "stalled"]
    assert logged == [shown]
    assert {freeze.reason for freeze in sent(run.effects, m.Freeze)} == {f"a reports a stall: {shown}"}


def test_the_reason_of_a_stall_is_cut_if_names_make_it_too_long() -> None:
    run = Run(A, B, C)
    run.core.run.workers[B].name = "b" * 64
    run.say(A, m.RoundStalled(m.RoundId(1, 1, 0, 0), (B,), 0.0, "rank 1 " * 73))
    assert len(run.core.status(run.now_s)["events"][-1]["reason"]) <= 512 + len("a reports a stall: ")
    assert all(encode(freeze) for freeze in sent(run.effects, m.Freeze))


def test_a_member_that_delays_one_step_three_times_is_removed_although_it_progresses() -> None:
    run = Run(A, B)
    for attempt, dismissed in ((1, False), (2, False), (3, True)):
        run.heartbeat(A, B)
        stalled = m.RoundStalled(m.RoundId(1, run.core.generation, 0, 1), (B,), 0.0, "updates differ")
        run.say(A, stalled)
        assert (Disconnect(B) in run.effects) is dismissed, attempt
        run.report(A)
        if not dismissed:
            run.report(B)
            run.start(A, B)
    run.start(A)
    assert run.core.status(run.now_s)["world_size"] == 1


def test_a_report_without_a_freeze_changes_nothing() -> None:
    run = Run(A, B)
    run.report(A)
    assert run.effects == [] and run.core.phase is RunPhase.TRAINING


def test_a_tick_clears_what_was_due() -> None:
    limits = Deadlines(regreet_s=3.0)
    core = Membership(me=ME, run="r", term=1, deadlines=limits, software="")
    core.handle(MessageReceived(A, m.Join("r", "a", "memory://a")), 0.0)
    core.handle(PeerDisconnected(A, "reset"), 1.0)
    assert core.deadline_s == 4.0
    core.tick(4.0)  # the first call since then checks whether the loop has stalled
    assert not core.run.workers and core.deadline_s == math.inf


# -- how members reach each other --------------------------------------------------------------------


def dial_addresses(run: Run, viewer: m.PeerId) -> dict[m.PeerId, str]:
    """The addresses that `viewer` dials according to the latest member list that it received."""
    latest = sent(run.effects, m.MemberListPage, viewer)[-1]
    return {member.peer: member.address for member in with_own_addresses(viewer, latest.members)}


def test_a_member_that_was_lost_by_its_silence_may_be_silent_longer_when_it_returns() -> None:
    limits = Deadlines(settle_s=0.0, generation_gap_s=0.0)
    run, silences_s = ScriptedCoordinator(limits=limits, event_s=0.05), []
    for _ in range(2):
        run.join(A)
        run.start(A)
        for number in range(1, FEWEST_BEATS + 1):
            run.say(A, m.Heartbeat(number, 0, number, ()))
        silences_s.append(run.core.deadline_s - run.now_s)
        run.tick(silences_s[-1])
        assert not run.core.run.workers
    assert silences_s == pytest.approx([MIN_SILENCE_S, limits.silence_s])


def test_a_worker_is_admitted_once_its_reachability_is_known() -> None:
    run = Run(A)
    callback, *_ = [e for e in run.say(B, m.Join("r", "b", "tcp://10.0.0.2:70")) if isinstance(e, DialBack)]
    assert callback == DialBack(B, ("tcp://10.0.0.2:70",))
    assert not sent(run.say(B, SETUP), m.Admitted)
    sends = {type(e.message): e for e in run.hear(DialBackResult(B, "")) if isinstance(e, Send)}
    assert sends[m.Reachability].message == m.Reachability("")
    assert sends[m.ExpectProbes] == Send(A, m.ExpectProbes(((B, ""),)))
    assert sends[m.Admitted] == Send(B, m.Admitted(((A, "memory://a"),)))


def test_workers_that_join_together_measure_each_pair_and_start_with_different_peers() -> None:
    run = Run(A)
    for peer in (D, B, C):
        run.say(peer, m.Join("r", peer[:1].decode(), f"tcp://10.0.0.{peer[0]}:70"))
        run.hear(DialBackResult(peer, f"tcp://10.0.0.{peer[0]}:70"))
    probed = {}
    for peer in (B, C, D):  # none of them has sent its latencies yet
        effects = run.say(peer, SETUP)
        (admitted,) = sent(effects, m.Admitted)
        probed[peer] = [other for other, _ in admitted.probe_targets]
        assert set(receivers(effects, m.ExpectProbes)) == set(probed[peer])
    assert probed == {B: [A], C: [B, A], D: [C, B, A]}


def test_each_member_receives_its_own_route_to_every_other() -> None:
    run = Run(A, B)
    run.join(C, reachable=False)
    run.report(A)
    run.report(B)
    assert dial_addresses(run, A) == {A: "", B: "", C: ""}
    assert dial_addresses(run, B) == {A: "memory://a", B: "", C: ""}
    assert dial_addresses(run, C) == {A: "memory://a", B: "memory://b", C: ""}


def test_a_route_that_failed_is_not_used_again() -> None:
    run = Run(A, B)
    run.now_s += 10.0
    run.say(B, m.PeersUnreachable(1, run.core.generation, (A,)))
    assert sent(run.effects, to=A) == [m.Freeze(1, 1, "b cannot reach a as planned")]
    run.report(A)
    run.report(B)
    assert dial_addresses(run, A) == {A: "", B: "memory://b"}
    assert dial_addresses(run, B) == {A: "", B: ""}
    run.now_s += 10.0
    run.say(A, m.PeersUnreachable(1, run.core.generation, (B,)))  # before any member was ready
    run.report(A)
    run.report(B)
    assert dial_addresses(run, A)[B] == dial_addresses(run, B)[A] == "relay:" + ME.hex()


def test_routes_that_fail_during_a_freeze_are_not_used_again_either() -> None:
    """One link to C fails first, the other while the members are frozen because of it."""
    run = Run(A, B, C)
    run.now_s += 10.0
    run.say(C, m.PeersUnreachable(1, run.core.generation, (A,)))
    assert run.core.run.view_change.is_freezing
    assert not sent(run.say(C, m.PeersUnreachable(1, run.core.generation, (B,))), m.Freeze)
    for peer in (A, B, C):
        run.report(peer)
    assert dial_addresses(run, C) == {A: "", B: "", C: ""}
    assert dial_addresses(run, A)[C] == dial_addresses(run, B)[C] == "memory://c"


@pytest.mark.parametrize("reporter", [A, B])
def test_a_link_that_broke_and_does_not_come_back_is_relayed_at_once(reporter: m.PeerId) -> None:
    """Without the report of a broken connection, A would have to try to connect to B first."""
    run = Run(A, B)
    run.now_s += 10.0
    run.say(reporter, m.ConnectionLost(1, run.core.generation, A if reporter == B else B))
    run.say(B, m.PeersUnreachable(1, run.core.generation, (A,)))
    run.report(A)
    run.report(B)
    assert dial_addresses(run, A)[B] == dial_addresses(run, B)[A] == "relay:" + ME.hex()


def test_a_member_whose_own_connection_is_broken_keeps_its_routes() -> None:
    """Its process has probably ended, so that nobody can connect to it over any route."""
    run = Run(A, B)
    run.now_s += 10.0
    run.core.handle(PeerDisconnected(A, "reset"), run.now_s)
    assert run.say(B, m.PeersUnreachable(1, run.core.generation, (A,))) == []


def test_a_report_about_an_earlier_generation_blocks_no_route() -> None:
    run = Run(A, B)
    run.now_s += 10.0
    assert run.say(B, m.PeersUnreachable(1, run.core.generation - 1, (A,))) == []
    itself_and_no_member = (B, C)
    assert run.say(B, m.PeersUnreachable(1, run.core.generation, itself_and_no_member)) == []


def test_a_returning_member_is_planned_for_once_it_was_dialled_back() -> None:
    """For example after a restart of the coordinator, if all report before the first dial-back result."""
    run = Run(A, B)
    run.now_s += 10.0
    run.core.handle(PeerDisconnected(B, "reset"), run.now_s)
    run.core.handle(PeerConnected(B, "198.51.100.7"), run.now_s)
    again = m.Join("r", "b", "memory://b", is_rejoin=True, generation=1)
    assert [e for e in run.say(B, again) if isinstance(e, DialBack)]
    run.join(C)
    run.report(A)
    run.report(B)
    assert not sent(run.effects, m.MembershipView)
    run.hear(DialBackResult(B, ""))
    assert dial_addresses(run, B) == {A: "memory://a", B: "", C: "memory://c"}


# -- violations --------------------------------------------------------------------------------------


def test_an_accusation_is_passed_to_access_control() -> None:
    run = Run(A, B)
    assert run.say(A, m.ViolationReport(B, "sent NaN")) == [RecordViolation(B, "sent NaN", accuser=A)]
    assert run.say(A, m.ViolationReport(C, "is no member")) == []
    assert run.say(A, m.ViolationReport(A, "itself")) == []
    assert run.say(B, m.Welcome(1, "r", "")) == [
        RecordViolation(B, "sent Welcome, which a worker may not send")
    ]


def test_a_removed_worker_receives_the_reason_and_the_others_continue() -> None:
    run = Run(A, B)
    run.now_s += 10.0
    effects = run.hear(WorkerRemoved(B, "kicked", "was put out of the run", "ask"))
    assert Send(B, m.Refused("kicked", "was put out of the run", "ask")) in effects
    assert Disconnect(B) in effects
    assert Send(A, m.Freeze(1, 1, "b was put out of the run", (B,))) in effects, "it learns of it at once"
    assert LogEvent("info", "removed", {"name": "b", "reason": "was put out of the run"}) in effects
    run.report(A)
    run.start(A)
    assert run.core.status(run.now_s)["world_size"] == 1


def test_a_removed_worker_that_has_left_is_disconnected() -> None:
    run = Run(A)
    assert run.hear(WorkerRemoved(C, "kicked", "", "")) == [Disconnect(C)]


def test_only_members_can_report_a_stall_and_the_step_need_not_match() -> None:
    run = Run(A, B)
    run.now_s += 100.0
    run.say(C, m.Join("r", "c", "memory://c"))
    assert run.say(C, m.RoundStalled(m.RoundId(1, 1, 0, 0), (A, B), 1e-6, "all are silent")) == []
    run.heartbeat(A, B)
    run.say(B, m.RoundStalled(m.RoundId(1, 1, 7, 0), (A,), 1e-6, "a is silent"))
    assert Disconnect(A) not in run.effects, "it has just made progress"


def test_broken_connections_to_a_member_that_left_are_not_recorded() -> None:
    """Its neighbours report the end of the connection after it has left."""
    run = Run(A, B, C)
    run.say(C, m.Leave("tired"))
    break_connections(run, [(A, C), (B, C)])
    assert not run.core._planner.link_failures._times_s


def break_connections(run: Run, pairs: list[tuple[m.PeerId, m.PeerId]]) -> list[Effect]:
    """The first of each pair reports that its connection to the second broke; returns the effects."""
    effects: list[Effect] = []
    for reporter, peer in pairs:
        effects += run.say(reporter, m.ConnectionLost(1, run.core.generation, peer))
    return effects


@pytest.mark.parametrize("pairs", [[(A, C), (B, C)], [(C, A), (C, B)]], ids=["of others", "its own reports"])
def test_the_member_common_to_all_broken_connections_is_dismissed(
    pairs: list[tuple[m.PeerId, m.PeerId]],
) -> None:
    effects = break_connections(Run(A, B, C), pairs * 4)
    assert dismissed(effects) == [C]
    assert not [e for e in effects if isinstance(e, RecordViolation)], "a bad link is no violation"


def dismissed(effects: list[Effect]) -> list[m.PeerId]:
    return [effect.peer for effect in effects if isinstance(effect, Disconnect)]


def neighbours(run: Run, peer: m.PeerId) -> set[m.PeerId]:
    order = [member.peer for member in run.core.run.member_list]
    rank = order.index(peer)
    return {order[rank - 1], order[(rank + 1) % len(order)]}


def accused_by_two() -> Run:
    """D is the neighbour of A and of C, which report that its connections break."""
    run = Run(A, B, C, D)
    assert neighbours(run, D) == {A, C}
    assert dismissed(break_connections(run, [(A, D), (C, D)] * 4)) == []
    for peer in (A, B, C, D):
        run.report(peer)
    run.start(A, B, C, D)
    assert run.core.generation == 2 and B in neighbours(run, D)
    return run


def test_two_members_that_agree_cannot_get_a_third_dismissed() -> None:
    run = accused_by_two()
    assert dismissed(break_connections(run, [(A, D), (C, D)] * 40)) == []
    assert run.core.generation == 2 and not run.core.run.view_change.reason, (
        "their reports cost one generation"
    )


def test_a_member_with_a_bad_link_is_dismissed_at_its_next_neighbour() -> None:
    assert dismissed(break_connections(accused_by_two(), [(B, D)] * 4)) == [D]
    run = accused_by_two()
    assert dismissed(break_connections(run, [(D, B)] * 4)) == [D], "its own reports count as much"


def test_two_members_that_accuse_all_others_are_common_to_the_broken_pairs() -> None:
    run = Run(A, B, C, D)
    assert dismissed(break_connections(run, [(A, C), (A, D), (B, C), (B, D)] * 4)) == []
    for peer in (A, B, C, D):
        run.report(peer)
    run.start(A, B, C, D)
    assert set(dismissed(break_connections(run, [(A, B)] * 4))) <= {A, B}


def stall(run: Run, members: tuple[m.PeerId, ...], *suspects: m.PeerId) -> list[m.PeerId]:
    """The first member reports a stalled round, and the rest form a group; returns the dismissed members."""
    generation = run.core.generation
    effects = run.say(members[0], m.RoundStalled(m.RoundId(1, generation, 0, 0), suspects, 0.0, "voted NO"))
    dismissed = [e.peer for e in effects if isinstance(e, Disconnect)]
    rest = [peer for peer in members if peer not in dismissed]
    for peer in rest:
        run.report(peer)
    run.start(*rest)
    return dismissed


def test_without_a_suspect_the_youngest_member_is_dismissed() -> None:
    run = Run(A, B)
    assert [stall(run, (A, B)) for _ in range(6)] == [[]] * 5 + [[B]]
    assert [stall(run, (A,)) for _ in range(9)] == [[]] * 9, "the last member holds the model"


def test_a_stall_is_logged_with_the_step_that_most_members_have_reached() -> None:
    """Not with the generation's first step, nor with a step that only its reporter claims."""
    run = Run(A, B, C)
    for peer, step in ((A, 71), (B, 71), (C, 500)):
        run.say(peer, m.Heartbeat(1, step, 1, ()))
    effects = run.say(C, m.RoundStalled(m.RoundId(1, 1, 500, 0), (), 0.0, "no connection"))
    steps = [x.fields["step"] for x in effects if isinstance(x, LogEvent) and x.event == "stalled"]
    assert steps == [72]


def test_after_a_dismissal_the_stalls_are_counted_anew() -> None:
    run = Run(A, B, C)
    assert [stall(run, (A, B, C)) for _ in range(6)] == [[]] * 5 + [[C]]
    assert [stall(run, (A, B)) for _ in range(6)] == [[]] * 5 + [[B]]


@pytest.mark.parametrize(("reporters", "dismissed"), [(b"ddadda", D), (b"adadad", E)])
def test_a_member_that_reports_most_stalls_is_dismissed_unless_it_is_the_root(
    reporters: bytes, dismissed: m.PeerId
) -> None:
    """D names another suspect each time, so that none of them is dismissed for it."""
    run, members = Run(A, B, C, D, E), (A, B, C, D, E)
    assert run.core.run.member_order[0] == A
    for number, letter in enumerate(reporters):
        suspects = (members[number % 3],) if letter == D[0] else ()
        reporter = bytes([letter]) * 32
        found = stall(run, (reporter, *(peer for peer in members if peer != reporter)), *suspects)
        assert found == ([dismissed] if number == 5 else []), number


def test_a_member_that_accuses_one_root_after_the_other_costs_the_run_one_of_them() -> None:
    run, dismissed, here = Run(A, B, C, D, E), [], [A, B, C, D, E]
    for _ in range(6):
        root = run.core.run.member_order[0]
        dismissed.append(stall(run, (D, *(peer for peer in here if peer != D)), root))
        here = [peer for peer in here if peer in run.core.run.workers]
    assert dismissed == [[], [], [A], [], [], [D]]


def test_members_that_the_root_suspects_are_dismissed_one_after_the_other() -> None:
    run = Run(A, B, C, D)
    assert run.core.run.member_order[0] == A
    assert [stall(run, (A, B, C, D), B) for _ in range(3)] == [[], [], [B]]
    assert [stall(run, (A, C, D), C) for _ in range(3)] == [[], [], [C]]


def test_a_member_that_votes_no_in_three_generations_is_dismissed() -> None:
    run = Run(A, B, C)
    members = (A, B, C)
    assert [stall(run, members, B), stall(run, members, C), stall(run, members, C)] == [[]] * 3
    assert stall(run, members, C) == [C]


def stall_by_link(
    run: Run, voter: m.PeerId, reports: list[tuple[m.PeerId, m.PeerId]]
) -> tuple[list[m.PeerId], list[Effect]]:
    """Connections break, as reported by the first of each pair, and the voter therefore votes NO.

    Returns the members that are dismissed, and all effects of the root's report.
    """
    effects: list[Effect] = []
    for reporter, peer in reports:
        effects += run.say(reporter, m.ConnectionLost(1, run.core.generation, peer))
    root = run.core.run.member_order[0]
    stalled = m.RoundStalled(m.RoundId(1, run.core.generation, 0, 0), (voter,), 0.0, "voted NO")
    effects += run.say(root, stalled)
    found, rest = dismissed(effects), sorted(run.core.run.members & run.core.run.workers.keys())
    for peer in rest:
        run.report(peer)
    run.start(*rest)
    return found, effects


@pytest.mark.parametrize("voter", [A, B, C], ids=["the root", "another member", "the bad one"])
def test_the_member_whose_connections_break_is_dismissed_whoever_votes_no(voter: m.PeerId) -> None:
    """C's packets get lost; A is the root.  The voter has lost its connection to C."""
    run = Run(A, B, C)
    assert run.core.run.member_order[0] == A
    found = [stall_by_link(run, voter, [(A, C), (B, C)])[0] for _ in range(3)]
    assert found == [[], [], [C]]


def test_two_ends_of_a_broken_connection_use_another_route_before_either_is_dismissed() -> None:
    """After the sixth stall the newer end goes; the other one, if its connection to another member breaks."""
    run = Run(A, B, C, D, E)
    assert run.core.run.member_order[0] == A
    stalls = [stall_by_link(run, C, [(C, B)]) for _ in range(6)]
    assert [found for found, _ in stalls] == [[]] * 5 + [[C]], "not E, the newest member"
    rerouted = [
        any(isinstance(x, LogEvent) and x.event == "no_route" for x in effects) for _, effects in stalls
    ]
    assert rerouted == [False, False, True, True, True, False]
    assert [stall_by_link(run, D, [(B, D)])[0] for _ in range(3)] == [[], [], [B]]


def test_who_is_dismissed_and_comes_back_cannot_cost_the_other_end_its_place() -> None:
    """D alone reports that its connection to B breaks, and votes NO."""
    run = Run(A, B, C, D)
    assert [stall_by_link(run, D, [(D, B)])[0] for _ in range(6)] == [[]] * 5 + [[D]]
    run.join(D)
    for peer in (A, B, C):
        run.report(peer)
    run.start(A, B, C, D)
    assert [stall_by_link(run, D, [(D, B)])[0] for _ in range(6)] == [[]] * 5 + [[D]]


def test_who_stayed_when_another_was_dismissed_is_not_suspected_for_ever() -> None:
    run = Run(A, B, C, D)
    assert [stall_by_link(run, D, [(D, B)])[0] for _ in range(6)] == [[]] * 5 + [[D]]
    run.now_s += REMEMBERED_S
    assert [stall_by_link(run, C, [(C, B)])[0] for _ in range(6)] == [[]] * 5 + [[C]]


def test_the_root_of_a_large_group_is_not_suspected_for_two_bad_links() -> None:
    run = Run(A, B, C, D, E)
    for _ in range(3):
        found, _ = stall_by_link(run, C, [(A, B), (A, C), (D, C)])
    assert found == [C]


def test_the_member_with_the_bad_line_is_dismissed_and_no_other(
    seeds: Callable[[int], Iterable[int]],
) -> None:
    """Mallory's connections break, most of them at each stall, and either end reports each of them."""
    for seed in seeds(200):
        rng = Random(seed)
        members = [bytes([letter]) * 32 for letter in b"abcdef"[: rng.randint(3, 6)]]
        run, mallory, gone = Run(*members), rng.choice(members), []
        others = [peer for peer in members if peer != mallory]
        for _ in range(6):
            run.event_s, run.now_s = 0.05, run.now_s + rng.uniform(0.0, 8.0)
            lost = [peer for peer in others if rng.random() < 0.8] or others[:1]
            reports = [rng.choice([(peer, mallory), (mallory, peer)]) for peer in lost]
            gone += stall_by_link(run, rng.choice((mallory, lost[0])), reports)[0]
            if gone:
                break
        assert gone == [mallory], seed


# -- shares that follow measured speed ---------------------------------------------------------------


class Sharers(Run):
    """Workers of a run with a global batch size; each computes its share at its own speed."""

    def __init__(self, speeds: dict[m.PeerId, float], whole: int, most: dict[m.PeerId, int]) -> None:
        self.speeds, self.whole, self.most = speeds, whole, most
        self.computed = {peer: (0.0, 0.0) for peer in speeds}
        super().__init__(*speeds)

    def join(self, peer: m.PeerId, *, reachable: bool = True) -> list[Effect]:
        address = "memory://" + peer[:1].decode()
        self.say(peer, m.Join("r", peer[:1].decode(), address))
        self.hear(DialBackResult(peer, address))
        spec = m.LedgerSpec(100_000, 0, epochs=1)
        self.say(peer, m.Setup((("model", "tiny"),), spec, self.most.get(peer, 0), self.whole))
        return self.say(peer, m.LinkLatencies(()))

    @property
    def shares(self) -> dict[m.PeerId, int]:
        return {member.peer: member.share for member in self.core.run.member_list}

    def compute(self, heartbeats: int) -> list[Effect]:
        """The effects of that many heartbeats of each worker."""
        effects = []
        for number in range(heartbeats):
            for peer, share in self.shares.items():
                samples, seconds_s = self.computed[peer]
                self.computed[peer] = samples + share, seconds_s + share / self.speeds[peer]
                figures = (
                    ("computed_samples", self.computed[peer][0]),
                    ("computed_s", self.computed[peer][1]),
                )
                effects += self.say(peer, m.Heartbeat(number, 0, int(self.now_s), figures))
        return effects


def freezes(effects: list[Effect]) -> list[str]:
    return sorted({freeze.reason for freeze in sent(effects, m.Freeze)})


def test_shares_follow_the_speed_that_heartbeats_report() -> None:
    run = Sharers({A: 40.0, B: 10.0, C: 10.0}, 60, {})
    assert run.shares == {A: 20, B: 20, C: 20}
    began_s = run.now_s
    effects = run.compute(30)
    assert freezes(effects) == ["shares by measured speed make the computation of a step 2.00 times as fast"]
    assert run.now_s - began_s >= 30.0, "not before 30 s have passed"
    for peer in (A, B, C):
        run.report(peer)
    assert run.core.generation == 2 and run.shares == {A: 40, B: 10, C: 10}
    assert run.core.status(0.0)["plan_reason"].endswith(
        "60 samples shared by measured speed: a 40 (40/s), b 10 (10/s), c 10 (10/s)"
    )
    run.start(A, B, C)
    assert freezes(run.compute(60)) == [], "nothing is left to gain"


def test_a_small_gain_makes_no_generation() -> None:
    run = Sharers({A: 11.0, B: 10.0, C: 10.0}, 600, {})
    assert freezes(run.compute(60)) == []


def test_the_largest_batch_of_a_worker_bounds_its_share() -> None:
    run = Sharers({A: 40.0, B: 10.0, C: 10.0}, 60, {A: 30})
    assert freezes(run.compute(30))
    for peer in (A, B, C):
        run.report(peer)
    assert run.shares == {A: 30, B: 15, C: 15}


def test_a_newcomer_gets_the_median_share_of_the_others() -> None:
    run = Sharers({A: 30.0, B: 10.0}, 60, {})
    run.speeds[C] = 20.0
    run.compute(10)
    run.join(C)
    run.report(A), run.report(B)
    assert run.shares == {A: 30, B: 10, C: 20}


def test_an_exaggerated_batch_size_gets_a_bounded_share() -> None:
    """Otherwise one worker could take all samples of the run, and train on none of them."""
    run = ScriptedCoordinator(min_workers=4)
    sizes = {A: 8, B: 8, C: 2**31 - 1, D: 256}
    for peer, size in sizes.items():
        run.join(peer, setup=replace(SETUP, batch_size=size))
    assert {x.peer: x.share for x in run.core.run.member_list} == sizes | {C: 512}
    reason = "each worker takes its own batch size, but at most 64 times the median batch size"
    assert run.core.status(0.0)["plan_reason"].endswith(f"{reason}: c 512 instead of {2**31 - 1}")


def test_a_newcomer_that_is_too_slow_for_its_share_gets_a_smaller_one_when_it_rejoins() -> None:
    run = Sharers({A: 30.0, B: 30.0}, 60, {})
    run.compute(10)
    for share in (20, 1):
        run.join(C)
        run.report(A), run.report(B)
        run.start(A, B, C)
        assert run.shares[C] == share
        run.say(C, m.Heartbeat(1, 0, int(run.now_s), ()))
        run.now_s += 10.0 - 1.0
        run.say(A, m.RoundStalled(m.RoundId(1, run.core.generation, 0, 1), (C,), 5.0, "c is silent"))
        run.report(A), run.report(B)
        run.start(A, B)
        assert run.shares == {A: 30, B: 30}


CATCHING_UP = m.Setup((("model", "tiny"),), m.LedgerSpec(100, 0, epochs=1), 4, None, can_catch_up=True)


def newcomer(run: Run, peer: m.PeerId) -> list[Effect]:
    """A worker that can catch up joins; returns all effects."""
    effects = run.say(peer, m.Join("r", peer[:1].decode(), "memory://new"))
    effects += run.hear(DialBackResult(peer, "memory://new"))
    return effects + run.say(peer, CATCHING_UP) + run.say(peer, m.LinkLatencies(()))


def serve_orders(effects: list[Effect]) -> list[tuple[m.PeerId, m.ServeCatchUp]]:
    return [*zip(receivers(effects, m.ServeCatchUp), sent(effects, m.ServeCatchUp), strict=True)]


def test_a_worker_that_cannot_catch_up_has_not_received_the_state() -> None:
    """It reports so after a failure, or because it became a member before it had a state."""
    run = Run(A, B)
    newcomer(run, C)
    logged = [e.event for e in run.say(C, m.CatchUpReport(-1, b"")) if isinstance(e, LogEvent)]
    assert "not_following" in logged and "caught_up" not in logged


def test_a_worker_that_catches_up_is_served_until_it_is_a_member() -> None:
    run = Run(A, B)
    orders = serve_orders(newcomer(run, C))
    assert {peer for peer, _ in orders} == {A, B} and all(order.receivers == (C,) for _, order in orders)
    assert run.view.world_size == 2, "the members continue to train"
    assert run.core.deadline_s <= run.now_s + NO_PROGRESS_TIMEOUT_S
    effects = run.say(C, m.CatchUpReport(7, b"h"))
    assert not [order for _, order in serve_orders(effects) if order.receivers == ()], (
        "it still needs updates"
    )
    assert sent(effects, m.Freeze)
    again = run.say(C, m.CatchUpReport(8, b"h"))  # each second until it is a member
    logged = [e.event for e in effects + again if isinstance(e, LogEvent)]
    assert logged.count("caught_up") == 1


def test_a_newcomer_waits_for_the_snapshot_of_a_long_step() -> None:
    """It waits as long as the sources' training loops run: here for 240 s, and then for 60 s."""
    run = Run(A, B)
    newcomer(run, C)
    for _ in range(24):
        run.heartbeat(A, B)
        run.pass_to(run.now_s + 10.0)
    run.pass_to(run.now_s + NO_PROGRESS_TIMEOUT_S - 11.0)
    assert not run.notes("not_following")
    run.pass_to(run.now_s + 2.0)
    assert run.notes("not_following") and sent(run.seen, m.Freeze)


def test_the_first_worker_of_a_run_has_nothing_to_catch_up_with() -> None:
    run = ScriptedCoordinator(limits=Deadlines(settle_s=0.0))
    run.join(A, setup=CATCHING_UP)
    assert run.roster == "a", "at once, not after the next message"


def routes_of(effects: list[Effect], peer: m.PeerId) -> dict[str, list[tuple[str, str]]]:
    """By message type, the addresses that `peer` receives."""
    lists = {
        type(message).__name__: message.sources if isinstance(message, m.CatchUpFrom) else message.peers
        for message in sent(effects, m.CatchUpFrom | m.ExpectProbes, peer)
    }
    return {kind: [(x[:1].decode(), route) for x, route in routes] for kind, routes in lists.items()}


def test_a_worker_that_reaches_no_source_tries_other_routes_and_then_a_relay() -> None:
    """Reports of workers that catch up count as those of members do."""
    run = Run(A, B)
    run.now_s += 10.0
    effects = newcomer(run, C)
    assert routes_of(effects, C)["CatchUpFrom"] == [("a", "memory://a"), ("b", "memory://b")]
    run.now_s -= 2.0
    assert not run.say(C, m.PeersUnreachable(1, 0, (A, B))), "the report precedes the latest routes"
    for _ in range(2):  # seconds pass with each message
        run.now_s += 10.0
        effects = run.say(C, m.PeersUnreachable(1, 0, (A, B)))
    relay = "relay:" + ME.hex()
    assert routes_of(effects, C)["CatchUpFrom"] == [("a", relay), ("b", relay)]
    assert routes_of(effects, A) == {"ExpectProbes": [("c", relay)]} and routes_of(effects, B) == routes_of(
        effects, A
    )
    assert not freezes(effects) and not run.core.run.workers[C].has_caught_up, "the members continue to train"
    run.now_s += 10.0
    assert not routes_of(run.say(C, m.PeersUnreachable(1, 0, (D,))), C), "a stranger"
    run.say(C, m.CatchUpReport(7, b"h")), run.report(A), run.report(B)
    assert dial_addresses(run, C) == {A: relay, B: relay, C: ""}, "the routes stay when it becomes a member"


def test_the_relay_is_a_member_that_the_worker_has_reached() -> None:
    """Three of four members are sources; C reaches the fourth, which may not expect it any more."""
    run = Run(A, B, E, D)
    run.now_s += 10.0
    newcomer(run, C)
    for _ in range(2):
        run.now_s += 10.0
        effects = run.say(C, m.PeersUnreachable(1, 0, (A, B, E)))
    relay = "relay:" + D.hex()
    assert routes_of(effects, C)["CatchUpFrom"] == [("a", relay), ("b", relay), ("e", relay)]
    assert {x for x, _ in routes_of(effects, D)["ExpectProbes"]} == {"a", "b", "c", "e"}
    assert ("d", "") in routes_of(effects, C)["ExpectProbes"], "D, with the larger key, dials C"
    assert ("c", "memory://new") in routes_of(effects, D)["ExpectProbes"]


def test_an_invented_step_delays_no_snapshot() -> None:
    run = Run(A, B, C)
    run.say(A, m.Heartbeat(1, 2**63 - 1, 1, ()))
    run.say(B, m.Heartbeat(1, 5, 1, ()))
    run.say(C, m.Heartbeat(1, 6, 1, ()))
    orders = serve_orders(newcomer(run, b"d" * 32))
    assert orders and all(7 <= order.step < 100 for _, order in orders)


def test_a_group_that_becomes_slower_delays_no_snapshot() -> None:
    """A step was chosen while the group was fast; when the group becomes slower, a nearer one is chosen."""
    run = Run(A, B)
    for peer in (A, B):
        run.say(peer, m.Heartbeat(1, 1000, 1, ()))  # some ninety steps a second
    (step,) = {order.step for _, order in serve_orders(newcomer(run, C))}
    assert step > 1050
    orders: list[tuple[m.PeerId, m.ServeCatchUp]] = []
    for slow in range(10):  # now one in three seconds
        for peer in (A, B):
            orders += serve_orders(run.say(peer, m.Heartbeat(1, 1000 + slow, 1, ())))
        run.say(C, m.Heartbeat(0, -1, 0, ()))
    assert {peer for peer, _ in orders} == {A, B} and all(order.receivers == (C,) for _, order in orders)
    assert min(order.step for _, order in orders) < step and len(orders) <= 2 * 8, "chosen at most every 4 s"


def test_a_late_snapshot_makes_no_tick_due_at_once() -> None:
    run = Run(A, B)
    for peer in (A, B):
        run.say(peer, m.Heartbeat(1, 1, 1, ()))
    newcomer(run, C)
    for _ in range(10):
        run.now_s = run.core.deadline_s
        run.keep(run.core.tick(run.now_s))
        assert run.core.deadline_s > run.now_s


def test_a_few_fast_steps_after_a_generation_do_not_set_the_rate() -> None:
    """150 steps a second, but only for 0.1 s: no more steps are assumed for the next 1.5 s."""
    assert choose_snapshot_step(latest=15, made=15, running_s=0.1) == 30
    assert choose_snapshot_step(latest=1500, made=1500, running_s=10.0) == 1725


def test_the_coordinator_compares_digests_and_the_minority_is_notified() -> None:
    run = Run(A, B, C)
    generation = run.core.generation
    effects = run.say(A, m.ReplicaDigest(1, generation, 9, b"same"))
    effects += run.say(B, m.ReplicaDigest(1, generation, 9, b"other"))
    effects += run.say(b"e" * 32, m.ReplicaDigest(1, generation, 9, b"a stranger's"))
    assert not sent(effects, m.ReplicaDiverged)
    effects = run.say(C, m.ReplicaDigest(1, generation, 9, b"same"))
    assert receivers(effects, m.ReplicaDiverged) == [B]
    assert LogEvent("warning", "drifted", {"name": "b", "step": 10, "so_far": 1}) in effects
    assert run.core.status(run.now_s)["drifts"] == 1
    for peer, digest in ((A, b"same"), (B, b"other"), (C, b"same")):
        effects = run.say(peer, m.ReplicaDigest(1, generation, 19, digest))
        assert not sent(effects, m.ReplicaDiverged), "it awaits the next generation"
    assert run.core.status(run.now_s)["drifts"] == 1


def test_a_diverged_member_is_notified_again_until_it_has_received_the_state() -> None:
    """ReplicaDiverged and Freeze are lost; B's history equals the others', so B would report its state."""
    run = Run(A, B, C)
    run.now_s += 10.0
    for peer, digest in ((A, b"same"), (C, b"same"), (B, b"other")):
        run.say(peer, m.ReplicaDigest(1, 1, 9, digest))
    run.core.handle(PeerDisconnected(B, "reset"), run.now_s)
    run.core.handle(PeerConnected(B, ""), run.now_s)
    again = m.Join("r", "b", "memory://b", is_rejoin=True, generation=1)
    kinds = [type(message).__name__ for message in sent(run.say(B, again), to=B)]
    notices = ["ReplicaDiverged", "MemberListPage", "MembershipView"]
    assert kinds == ["Welcome", "RunStateUpdate", *notices, "Freeze"]
    for peer in (A, B, C):
        run.report(peer)
    assert {x.peer: x.joining for x in run.core.run.member_list} == {A: False, B: True, C: False}
    kinds = [type(message).__name__ for message in sent(run.effects, to=B)]
    assert kinds == notices, "its connection may have been restored only now"
    run.start(A, B, C)
    again = replace(again, generation=2)
    assert not sent(run.say(B, again), m.ReplicaDiverged)
    run.join(D)
    for peer in (A, B, C):
        run.report(peer)
    assert {x.peer: x.joining for x in run.core.run.member_list} == {A: False, B: False, C: False, D: True}


def test_a_heartbeat_checks_only_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """N workers send 2 N heartbeats a second, so none of them may cost a check of all workers."""
    checked: list[m.PeerId] = []
    deadline_s = Worker.deadline_s
    monkeypatch.setattr(
        Worker, "deadline_s", lambda worker, limits: checked.append(worker.peer) or deadline_s(worker, limits)
    )
    run = Run(A, B, C)
    due_s = run.core.deadline_s
    checked.clear()
    for sequence in range(30):
        for peer in (A, B, C):
            run.say(peer, m.Heartbeat(sequence, 5, sequence, ()))
            assert run.core.deadline_s == due_s, "a heartbeat only postpones the deadline"
            assert checked == [peer]
            checked.clear()
    run.core.tick(due_s)
    assert run.core.deadline_s > due_s and len(checked) == 3


def test_shares_are_evaluated_once_per_heartbeat_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation covers all workers."""
    evaluated_s: list[float] = []
    run = Run(A, B, C)
    monkeypatch.setattr(run.core.run, "definition", replace(SETUP, global_batch_size=12))
    monkeypatch.setattr(WorkerSpeeds, "rebalance_reason", lambda *args: evaluated_s.append(run.now_s) or "")
    run.now_s += 100.0
    for sequence in range(10):
        for peer in (A, B, C):
            run.core.handle(MessageReceived(peer, m.Heartbeat(sequence, 5, sequence, ())), run.now_s)
            run.now_s += 0.1
        run.now_s += 0.2
    assert 5 <= len(evaluated_s) <= 10, "30 heartbeats within 5 s"


def test_catch_up_continues_if_its_sources_reconnect_soon() -> None:
    """C must not count as caught up when the second of two connections breaks, as all workers would wait."""
    run = Run(A, B)
    run.now_s += 10.0
    newcomer(run, C)
    for peer in (A, B):
        effects = run.hear(PeerDisconnected(peer, "the coordinator's link"))
        run.now_s -= 0.9
        assert not run.core.run.workers[C].has_caught_up and freezes(effects) == []
    for peer in (A, B):
        run.hear(PeerConnected(peer, ""))
        effects = run.say(
            peer, m.Join("r", peer[:1].decode(), "memory://" + peer[:1].decode(), True, True, 1)
        )
        assert serve_orders(effects), "the earlier order may have been lost with the connection"
    assert not run.core.run.workers[C].has_caught_up


def test_catch_up_ends_if_no_source_returns() -> None:
    run = Run(A)
    run.now_s += 10.0
    newcomer(run, C)
    run.hear(PeerDisconnected(A, "reset"))
    run.now_s += 1.1
    assert run.core.deadline_s <= run.now_s
    run.core.tick(run.now_s)
    assert run.core.run.workers[C].has_caught_up, "no source is left"


def test_a_suspect_that_has_left_is_not_dismissed() -> None:
    run = Run(A, B, C)
    step, left = StalledStep(run.core.run, LinkFailures()), b"x" * 32
    stalled = m.RoundStalled(m.RoundId(1, 1, 7, 0), (left, B), 0.0, "voted NO")
    for number in range(1, 4):
        assert step.record(7, stalled, A, run.now_s) == number
    assert step.find_at_fault(stalled, A, run.now_s) == {B: ("dismissed", "delayed step 7 3 times: voted NO")}
    assert step.record(8, stalled, A, run.now_s) == 1 and step.find_at_fault(stalled, A, run.now_s) == {}
    without_answer = replace(stalled, suspects=(left,), silent_s=5.0)
    assert step.record(8, without_answer, A, run.now_s) == 2
    assert step.find_at_fault(without_answer, A, run.now_s + 1000.0) == {}


@pytest.mark.parametrize(
    ("reporters", "suspect", "dismissed"),
    [(A + A + A, C, C), (B + B + B, A, A), (B + B + B, C, B), (B + D + B, C, C)],
    ids=["of the root", "about the root", "of one member", "of two members"],
)
def test_only_the_root_can_get_a_member_dismissed_alone(
    reporters: bytes, suspect: m.PeerId, dismissed: m.PeerId
) -> None:
    run = Run(A, B, C, D)
    step, found = StalledStep(run.core.run, LinkFailures()), {}
    assert run.core.run.member_order[0] == A
    for at in range(0, len(reporters), 32):
        reporter = reporters[at : at + 32]
        silent_s = 0.0 if A in (reporter, suspect) else 5.0  # not believed of other reporters
        stalled = m.RoundStalled(m.RoundId(1, 1, 7, 0), (suspect,), silent_s, "lost")
        step.record(7, stalled, reporter, run.now_s)
        found = step.find_at_fault(stalled, reporter, run.now_s + 1000.0)
        assert found.keys() == ({dismissed} if at == 64 else set()), at


def test_a_setup_after_the_end_is_refused_as_finished() -> None:
    run = Run(A, B)
    run.core.run.phase = RunPhase.FINISHED
    effects = run.say(A, SETUP)
    codes = [message.code for message in sent(effects, m.Refused)]
    assert codes == ["finished"]


# -- the owner ends the run ----------------------------------------------------------------------------


def end(run: ScriptedCoordinator) -> str:
    entries = run.core.ending_entries()
    effects, answer = run.core.end_run(run.now_s)
    assert effects[: len(entries)] == entries
    run.keep(effects)
    return answer.text if isinstance(answer, m.OperatorReply) else answer.reason


def test_a_run_that_its_owner_ends_is_finished_when_its_members_hold_one_state() -> None:
    run = Run(A, B)
    run.join(C)
    assert "its 2 members write the last checkpoints" in end(run)
    assert receivers(run.seen, m.Freeze) == [A, B]
    run.report(A, B)
    assert run.roster == "a b", "a newcomer would only delay the end"
    run.ready(A)
    assert run.core.phase is RunPhase.TRAINING
    run.ready(B)
    assert run.core.phase is RunPhase.FINISHED
    kinds = [type(effect) for effect in run.effects]
    assert kinds.index(JournalEntry) < kinds.index(Send)
    for peer in (A, B):  # first the end, so that no member begins a round
        state, start = sent(run.effects, m.RunStateUpdate | m.StartGeneration, to=peer)
        assert (state.state, state.reason) == ("finished", "its owner has ended it after 0 steps")
        assert start == m.StartGeneration(1, run.core.generation)
    assert [refused.code for refused in sent(run.effects, m.Refused, to=C)] == ["finished"]
    assert end(run) == 'the run "r" is already finished' and not run.effects


def test_a_run_without_members_ends_at_once() -> None:
    run = ScriptedCoordinator(min_workers=2)
    run.join(A)
    assert end(run) == 'the run "r" is finished; no worker was training'
    assert [refused.code for refused in sent(run.effects, m.Refused, to=A)] == ["finished"]
    assert recover_run(run.journal).is_finished, "also after a restart"


def test_a_run_that_no_worker_has_begun_is_not_ended() -> None:
    run = ScriptedCoordinator()
    effects, answer = run.core.end_run(run.now_s)
    assert not effects and isinstance(answer, m.Refused)
    assert answer.reason == 'there is nothing to finish: no worker has begun to train in the run "r"'
    assert answer.remedy == "stop the coordinator with Ctrl-C, or invite workers"
    run.join(A)
    assert run.roster == "a", "the run is open"


def test_a_coordinator_that_restarts_at_the_end_of_the_run_knows_the_end_once_it_is_announced() -> None:
    run = Run(A, B)
    end(run)
    run.report(A, B)
    run.ready(A)
    recovered = recover_run(run.journal)
    assert recovered.is_ending and not recovered.is_finished
    run.ready(B)
    assert recover_run(run.journal).is_finished
    run = Run(A)
    run.say(A, m.RunFinished(9, b"history"))
    assert recover_run(run.journal).is_finished


def test_a_restarted_coordinator_ends_the_run_whose_end_its_owner_has_ordered() -> None:
    run = Run(A, B)
    end(run), end(run)
    assert len([body for _, body in run.journal if "ending" in body]) == 1
    again = ScriptedCoordinator(term=2, journal=run.journal, min_workers=2)
    for peer in (A, B):
        again.join(peer, generation=1)
    again.report(A, B)
    again.ready(A, B)
    assert again.core.phase is RunPhase.FINISHED
    assert recover_run(again.journal).end_reason == "its owner has ended it after 0 steps"


def test_the_answer_to_the_owner_of_a_run_whose_coordinator_restarted_says_for_whom_it_waits() -> None:
    run = Run(A, B, C)
    again = ScriptedCoordinator(term=2, journal=run.journal, min_workers=3)
    assert end(again).endswith("all of which are disconnected, comes back, or in 60 s without a model")
    again.now_s += 20.0
    assert end(again).endswith("all of which are disconnected, comes back, or in 40 s without a model")
    again.join(A, generation=1)
    rest = (
        "its 3 members write the last checkpoints and the model, and all workers exit; it may first wait for "
        "b, c, for at most 60 s"
    )
    assert end(again) == f'the run "r" ends at its next step: {rest}', "no member has reported its step"
    again.say(A, m.Heartbeat(1, 30, 30, ()))
    assert end(again) == f'the run "r" ends at step 30 or a few later: {rest}'
    status = again.core.status(again.now_s)["reason"]
    assert status.endswith(f"; its owner has ended the run, which ends at step 30 or a few later: {rest}")


@pytest.mark.parametrize("false", [m.Heartbeat(1, 2**63 - 1, 1, ()), m.RunFinished(2**62, bytes(32))])
def test_one_member_alone_cannot_raise_the_step_of_the_run(false: m.Message) -> None:
    """Otherwise the status shows it, and the next generation looks like a return to an earlier step."""
    run = Run(A, B)
    run.say(B, false)
    run.say(A, m.Heartbeat(1, 20, 1, ()))
    assert run.core.run.highest_step == run.core.status(run.now_s)["step"] == 20
    run.say(B, m.Heartbeat(2, 2**63 - 1, 2, ((m.KEPT_STEP, 2.0**60),)))
    run.say(B, m.Leave(""))
    assert run.core.run.highest_step == run.core.run.left_step == 20
    run.report(A)
    run.start(A)
    run.say(A, m.Heartbeat(2, 30, 2, ()))
    assert run.core.run.highest_step == 30, "no other member is left to confirm it"


def test_a_false_step_is_forgotten_when_the_members_have_agreed_on_theirs() -> None:
    """After a restart nobody contradicts the first member that is back."""
    again = ScriptedCoordinator(term=2, journal=Run(A, B).journal, min_workers=2)
    again.join(B, generation=1)
    again.say(B, m.Heartbeat(1, 2**63 - 1, 1, ()))
    again.say(B, m.Leave(""))
    again.join(A, generation=1)
    again.say(A, m.FreezeReport(2, 1, True, 19, bytes(32), m.LedgerState(step=20), None, b"", 0))
    assert again.view.applied == 19 and again.core.run.highest_step == 20
    assert not again.notes("rollback")


def test_the_last_member_to_leave_cannot_raise_the_step_of_the_run_either() -> None:
    run = Run(A, B)
    run.say(A, m.Heartbeat(1, 20, 1, ()))
    run.say(B, m.Heartbeat(1, 2**63 - 1, 1, ()))
    run.say(A, m.Leave("")), run.say(B, m.Leave(""))
    assert run.core.run.highest_step == 20


def test_the_answer_to_the_owner_of_a_run_with_one_member_is_in_the_singular() -> None:
    run = Run(A)
    again = ScriptedCoordinator(term=2, journal=run.journal)
    rest = "ends when its member, which is disconnected, comes back, or in 60 s without a model"
    assert end(again) == f'the run "r" {rest}'


def test_the_status_says_that_the_owner_has_ended_the_run_until_it_is_finished() -> None:
    run = Run(A, B)
    assert run.core.status(run.now_s)["reason"] == "2 workers since step 0"
    end(run)
    assert run.core.status(run.now_s)["reason"] == (
        "2 workers since step 0; its owner has ended the run, which ends at step 0 or a few later: its 2 "
        "members write the last checkpoints and the model, and all workers exit"
    )
    run.report(A, B)
    run.ready(A, B)
    assert run.core.status(run.now_s)["reason"] == "its owner has ended it after 0 steps"


def test_a_run_whose_member_is_lost_while_it_ends_is_finished_by_the_others() -> None:
    run = Run(A, B)
    end(run)
    run.report(A, B)
    run.say(B, m.Leave("Ctrl-C"))
    run.report(A)
    run.ready(A)
    assert run.core.phase is RunPhase.FINISHED and run.roster == "a"


def test_a_run_that_ends_while_its_workers_are_paused_says_where_the_model_is() -> None:
    run = Run(A)
    run.say(A, m.Heartbeat(1, 30, 30, ()))
    run.say(A, m.TemporaryLeave("on battery"))
    missing = (
        "the final model was not written: no worker was training; gridtrain export writes it from any "
        "worker's latest checkpoint, if there is one"
    )
    assert end(run) == f'the run "r" is finished; {missing}; 1 is paused and exits when its pause ends'
    assert run.core.status(run.now_s)["alert"] == missing
    run = Run(A, B)
    for peer in (A, B):
        run.say(peer, m.Heartbeat(1, 30, 30, ()), m.TemporaryLeave("on battery"))
    run.join(A)
    assert missing in end(run), "also if a worker that held it is back, and waits for another one"


def test_the_owner_who_ends_a_run_learns_what_becomes_of_paused_workers() -> None:
    run = Run(A, B, C)
    run.say(A, m.TemporaryLeave("on battery"))
    run.say(B, m.TemporaryLeave("hot"))
    run.report(C)
    run.start(C)
    assert end(run).endswith("; 2 are paused and exit when their pauses end")


def test_a_run_whose_workers_are_all_paused_says_so_until_enough_are_back() -> None:
    run = Run(A, B)
    assert run.core.status(run.now_s)["reason"] == "2 workers since step 0"
    run.say(A, m.TemporaryLeave("on battery"))
    run.report(B)
    run.start(B)
    assert run.core.status(run.now_s)["reason"] == "1 worker since step 0"
    run.say(B, m.TemporaryLeave("hot"))
    assert run.core.reason == (
        "no connected worker holds the model; the next workers continue from a checkpoint, or start at step "
        "0 if they have none; gridtrain finish ends the run"
    )
    assert run.core.status(run.now_s + 60.0)["reason"] == (
        f"{run.core.reason}; no worker is training: 2 are paused (the last one: hot, for 60 s); training "
        "continues with 2 workers"
    )
    assert "paused" not in run.core.reason, "which stays when the last paused worker has ended"
    run.join(B)
    assert run.core.status(run.now_s)["reason"].endswith("; 1 of 2 has joined")


def test_a_restarted_coordinator_that_forgot_the_paused_workers_says_how_they_return() -> None:
    run = Run(A)
    run.say(A, m.TemporaryLeave("on battery"))
    again = ScriptedCoordinator(term=2, journal=run.journal)
    assert again.core.status(0.0)["reason"] == (
        "no worker held the model when the coordinator restarted; waiting for 1 worker; paused workers "
        "rejoin when they resume"
    )


def skips(run: Run, peer: m.PeerId, step: int, in_a_row: int, total: int) -> None:
    """A heartbeat after steps of 8 samples."""
    figures = {m.SKIPPED_IN_A_ROW: in_a_row, m.SKIPPED_SAMPLES: 8 * total, m.COMMITTED_SAMPLES: 8 * step}
    run.say(peer, m.Heartbeat(1, step, step, tuple((name, float(n)) for name, n in figures.items())))


def test_the_status_says_while_no_step_is_applied_that_nothing_is_learned() -> None:
    """Also after a restart of the coordinator, from the heartbeats of its workers."""
    run = Run(A, B)
    skips(run, A, 30, 30, 30)
    skips(run, B, 31, 31, 31)
    status = run.core.status(run.now_s)
    assert (status["skipped_in_a_row"], status["skipped_samples"]) == (31, 248)
    assert "the last 31 steps were skipped" in status["alert"]
    again = ScriptedCoordinator(term=2, journal=run.journal, min_workers=2)
    assert again.core.status(0.0)["alert"] == ""
    again.join(A, generation=1)
    skips(again, A, 35, 35, 35)  # type: ignore[arg-type]
    assert "the last 35 steps were skipped" in again.core.status(again.now_s)["alert"]
    skips(run, A, 36, 0, 35)
    skips(run, B, 36, 0, 35)
    status = run.core.status(run.now_s)
    assert (status["alert"], status["skipped_in_a_row"], status["skipped_samples"]) == ("", 0, 280)


@pytest.mark.parametrize(
    ("spec", "length"),
    [
        (m.LedgerSpec(100, 0, epochs=3), {"total_steps": None, "total_samples": 300, "epochs": 3}),
        (m.LedgerSpec(100, 0, steps=40), {"total_steps": 40, "total_samples": None, "epochs": None}),
        (m.LedgerSpec(100, 0, steps=40, delay=1), {"total_steps": 41, "total_samples": None, "epochs": None}),
    ],
)
def test_the_status_has_the_length_of_the_run(spec: m.LedgerSpec, length: dict[str, int | None]) -> None:
    run = ScriptedCoordinator()
    assert dict.fromkeys(length).items() <= run.core.status(0.0).items(), "not known yet"
    run.join(A, setup=replace(SETUP, ledger=spec))
    run.pass_to(100.0, A)
    run.start(A)
    run.say(A, m.Heartbeat(1, 5, 5, ()))
    assert (length | {"step": 5, "samples": 20}).items() <= run.core.status(run.now_s).items()


@pytest.mark.parametrize(
    ("step_s", "after_s", "said"),
    [
        (0.055, 29, ""),
        (0.055, 41, "no step for 41 s, the latest took 55 ms"),
        (8.0, 79, ""),
        (8.0, 81, "no step for 81 s, the latest took 8 s"),
        (None, 81, ""),
    ],
)
def test_the_status_says_that_no_member_makes_progress(
    step_s: float | None, after_s: float, said: str
) -> None:
    """Not in a long first step, and only as long as it lasts."""
    run = Run(A, B)
    run.event_s = 0.0
    figures = () if step_s is None else (("computing_s", step_s),)

    def alert(progress: int, *, in_s: float = 0.0) -> str:
        run.now_s += in_s
        run.say(A, m.Heartbeat(1, 7, 3, figures))
        run.say(B, m.Heartbeat(1, 7, progress, figures))
        return str(run.core.status(run.now_s)["alert"])

    assert alert(3) == ""
    assert alert(3, in_s=after_s) == (said and f"{said}: check that the training loop of a, b continues")
    assert alert(4) == ""


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("step_s", [0.055, 8.0])
def test_the_status_names_the_member_whose_training_loop_does_not_continue(
    step_s: float, is_new: bool
) -> None:
    """Only members that wait while nobody makes progress wait for it, and not at once."""
    run = Run(A, B)
    run.event_s = 0.0
    figures = (("computing_s", step_s),)

    def alert(progress: int, *, in_s: float = 0.0) -> str:
        run.now_s += in_s
        run.say(A, m.Heartbeat(1, 7, progress, (*figures, (m.IS_WAITING, 1.0))))
        run.say(B, m.Heartbeat(1, 7, 3, () if is_new else figures))
        return str(run.core.status(run.now_s)["alert"])

    said = "no step for {} s, the latest took {}: check that the training loop of b continues"
    assert alert(3) == alert(3, in_s=2.5) == alert(4, in_s=5.5) == alert(5, in_s=10.0) == ""
    assert alert(5, in_s=2.0) == said.format(20, "8 s" if step_s > 1 else "55 ms")


def test_all_workers_and_the_log_are_told_who_causes_skipped_steps_and_when_they_end() -> None:
    run = Run(A, B, C)
    run.event_s = 0.0
    run.event_s = 0.0

    def beats(after_s: float, step: int, in_a_row: int, own: int) -> list[str]:
        """Heartbeats of all members, of which B has caused `own` skipped steps; what is announced."""
        run.now_s += after_s
        begin = len(run.seen)
        for peer, caused in ((A, 0), (B, own), (C, 0)):
            figures = {m.SKIPPED_IN_A_ROW: in_a_row, m.OWN_SKIPPED_STEPS: caused}
            metrics = tuple((name, float(n)) for name, n in figures.items())
            run.say(peer, m.Heartbeat(1, step, step, metrics))
        news = run.seen[begin:]
        told = {peer: [x.reason for x in sent(news, m.RunStateUpdate, to=peer)] for peer in (A, B, C)}
        logged = [x.fields["reason"] for x in news if isinstance(x, LogEvent) and "learning" in x.event]
        assert told == dict.fromkeys((A, B, C), logged)
        return logged

    assert beats(0.0, 20, 0, 0) == beats(1.0, 29, 9, 9) == beats(1.0, 30, 10, 10) == []
    assert beats(2.0, 31, 11, 11) == [], "not all heartbeats of step 31 have arrived"
    (alert,) = beats(2.0, 32, 12, 12)
    assert alert == (
        "nothing is being learned: the last 11 steps were skipped, because a gradient was not finite; "
        "caused by b: check its loss and data, or remove it with gridtrain kick b"
    )
    assert beats(2.0, 33, 13, 13) == [], "once"
    run.join(A, generation=1)
    assert alert in [x.reason for x in sent(run.seen[-8:], m.RunStateUpdate, to=A)], "after a reconnection"
    assert beats(2.0, 40, 0, 15) == []
    assert beats(2.0, 41, 0, 15) == ["steps are applied again, near step 40"]
    assert beats(2.0, 52, 11, 26) == beats(2.0, 54, 13, 28) == beats(2.0, 56, 15, 30) == [], "within a minute"
    assert len(beats(50.0, 60, 19, 34)) == 1


def test_the_end_of_a_run_that_learned_nothing_says_so() -> None:
    run = Run(A)
    skips(run, A, 30, 30, 30)
    answer = end(run)
    assert answer.startswith('the run "r" ends at step 30 or a few later: '), "it waits for the open step"
    assert "; 240 of 240 samples of the first 30 steps were in skipped steps" in answer, "it is not over"
    run.say(A, m.FreezeReport(1, 1, True, 29, bytes(32), m.LedgerState(step=30), None, b"", 0))
    run.ready(A)
    status = run.core.status(run.now_s)
    assert (status["phase"], status["alert"]) == ("finished", "")
    run.say(A, m.Leave("its run is finished"))
    assert run.core.status(run.now_s)["skipped_samples"] == 240, "as when the last member left"
    assert status["reason"].startswith(
        "its owner has ended it after 30 steps; nothing was learned: 240 of 240 samples were in skipped "
        "steps, because"
    )


def test_the_counts_of_skipped_steps_stay_without_a_look_at_them_before_the_members_leave() -> None:
    run = Run(A)
    skips(run, A, 30, 30, 30)
    run.say(A, m.Leave("Ctrl-C"))
    assert run.core.status(run.now_s)["skipped_samples"] == 240


def test_a_member_that_says_too_early_that_it_could_not_write_the_model_is_not_believed() -> None:
    run = Run(A, B)
    run.say(A, m.Leave(f"{m.MODEL_NOT_WRITTEN}: its disk is full"))
    assert "model_not_written" not in [event["event"] for event in run.core.status(run.now_s)["events"]]


def test_a_worker_that_repeats_that_it_has_finished_is_logged_once() -> None:
    run = Run(A, B)
    run.say(A, *[m.RunFinished(9, b"history")] * 3)
    events = [event["event"] for event in run.core.status(run.now_s)["events"]]
    assert events.count("worker_finished") == 1


def test_a_member_that_does_not_write_the_model_cannot_say_that_it_is_missing() -> None:
    run = Run(A, B)
    run.say(A, m.RunFinished(9, b"history"))
    run.say(B, m.RunFinished(9, b"history"), m.Leave(f"{m.MODEL_NOT_WRITTEN}: its disk is full"))
    assert run.core.phase is RunPhase.FINISHED and run.core.status(run.now_s)["alert"] == ""
    assert "model_not_written" not in [event["event"] for event in run.core.status(run.now_s)["events"]]


def test_the_status_of_a_finished_run_names_the_member_that_tries_again_to_write_the_model() -> None:
    """Only a member that is to write it can say so."""
    run = Run(A, B)
    run.say(A, m.RunFinished(9, b"history"))
    run.say(B, m.RunFinished(9, b"history"))
    for peer, attempts, alert in (
        (A, 1.0, ""),
        (B, 2.0, ""),
        (A, 2.0, "the final model is not written yet: a"),
    ):
        run.say(peer, m.Heartbeat(1, 10, 10, ((m.EXPORT_ATTEMPTS, attempts),)))
        assert run.core.status(run.now_s)["alert"].partition(" could")[0] == alert
    run.say(A, m.Heartbeat(2, 10, 10, ((m.EXPORT_ATTEMPTS, 0.0),)))
    assert run.core.status(run.now_s)["alert"] == ""


def test_the_final_model_of_a_run_that_its_owner_has_ended_is_missed() -> None:
    run = Run(A)
    end(run)
    run.report(A)
    run.ready(A)
    run.say(A, m.Leave(f"{m.MODEL_NOT_WRITTEN}: its disk is full"))
    assert run.core.status(run.now_s)["alert"] == (
        "the final model was not written: a: its disk is full; gridtrain export writes it from any worker's "
        "latest checkpoint, if there is one"
    )
    assert recover_run(run.journal).end_reason == (
        "its owner has ended it after 0 steps; " + run.core.status(run.now_s)["alert"]
    ), "also after a restart"


def test_the_final_model_is_not_missed_if_the_next_generation_writes_it() -> None:
    run = Run(A, B)
    run.say(A, m.RunFinished(9, b"history"), m.Leave(f"{m.MODEL_NOT_WRITTEN}: its disk is full"))
    assert "model_not_written" in [event["event"] for event in run.core.status(run.now_s)["events"]]
    assert run.core.status(run.now_s)["alert"] == ""
    run.report(B)
    run.ready(B)
    run.say(B, m.RunFinished(9, b"history"))
    status = run.core.status(run.now_s)
    assert (status["phase"], status["alert"]) == ("finished", "")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_run_whose_members_stay_away_while_it_ends_is_finished_without_a_model(is_known: bool) -> None:
    """The same coordinator has lost them, or has restarted since."""
    run = Run(A, B)
    if is_known:
        assert end(run).endswith("and all workers exit")
        for peer in (A, B):
            run.hear(PeerDisconnected(peer, "died"))
    else:
        run = ScriptedCoordinator(term=2, journal=run.journal, min_workers=2)  # type: ignore[assignment]
        assert "or in 60 s without a model" in end(run)
    for _ in range(100):
        if math.isinf(run.core.deadline_s):
            break
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.keep(run.core.tick(run.now_s))
    assert run.core.phase is RunPhase.FINISHED
    said = "no worker was training; gridtrain export writes it"
    assert said in str(recover_run(run.journal).end_reason)


def restart(run: ScriptedCoordinator, *peers: m.PeerId, is_admitted: bool = True, step: int = 100) -> None:
    """New processes of these workers join with a checkpoint of this step."""
    state = m.LedgerState(step=step, cursor=8 * step, consumed=8 * step)
    setup = replace(SETUP, checkpoint=m.CheckpointInfo(step - 1, b"h" * 32, state))
    for peer in peers:
        run.hear(PeerConnected(peer, "host"))
        run.join(peer, setup=None)
        run.say(peer, setup, *[m.LinkLatencies(())] * is_admitted)


def advance_until(run: ScriptedCoordinator, until_s: float) -> None:
    while run.core.deadline_s <= until_s:
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.tick()
    run.now_s = until_s


def all_left(kept: int = 105, *, min_workers: int = 1) -> ScriptedCoordinator:
    """A and B have left at step 105; A keeps a checkpoint of step `kept`, B none."""
    run = ScriptedCoordinator(min_workers=min_workers, limits=Deadlines(silence_s=1e9))
    run.join(A), run.join(B)
    advance_until(run, run.now_s + 1.0)
    run.start(A, B)
    for peer in (A, B):
        figures = ((m.KEPT_STEP, float(kept)),) if peer == A and kept else ()
        run.say(peer, m.Heartbeat(1, 105, 105, figures))
    return run


def leave(run: ScriptedCoordinator) -> None:
    for peer in (A, B):
        run.say(peer, m.Leave("Ctrl-C"))
    assert run.core.phase is RunPhase.WAITING


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("returns", [True, False])
def test_a_worker_that_left_last_is_awaited_with_its_checkpoint(returns: bool, restarts: bool) -> None:
    """B has an older checkpoint, and comes back first."""
    run = all_left()
    leave(run)
    if restarts:
        limits = Deadlines(silence_s=1e9)
        run = ScriptedCoordinator(term=2, journal=run.journal, min_workers=1, limits=limits)
    generation = run.core.generation
    restart(run, B, step=40)
    joined_s = run.now_s
    advance_until(run, joined_s + 50.0)
    assert run.core.generation == generation, "B alone would lose 65 steps"
    said = run.core.status(run.now_s)["reason"]
    assert re.search(r"; awaiting a worker with the checkpoint of step 105, for at most \d+ s$", said), said
    if returns:
        restart(run, A, step=105)
    advance_until(run, joined_s + 70.0)
    assert run.core.generation == generation + 1
    assert (run.view.applied + 1, run.roster) == ((105, "a b") if returns else (40, "b"))
    assert bool(run.notes("rollback")) == (not returns)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("returning", "step"),
    [
        ("a105 b105 c300", 105),  # the run had reached step 105, and c was not in it
        ("a105 b110 c300", 110),  # b wrote a checkpoint of steps that it had not reported yet
        ("c300 d", 300),  # without another checkpoint the alternative is step 0
        ("a105 c300 d300", 300),  # the journal may be a backup, and older than the run
    ],
)
def test_a_checkpoint_of_a_step_that_the_run_has_not_reached_needs_a_member_or_a_majority(
    returning: str, step: int, restarts: bool
) -> None:
    run = all_left(min_workers=2)
    leave(run)
    if restarts:
        limits = Deadlines(silence_s=1e9)
        run = ScriptedCoordinator(term=2, journal=run.journal, min_workers=2, limits=limits)
    run.core.run._min_workers = len(returning.split())
    for text in returning.split():
        peer = text[:1].encode() * 32
        restart(run, peer, step=int(text[1:])) if text[1:] else run.join(peer)
    advance_until(run, run.now_s + 5.0)
    assert run.view.applied + 1 == step
    ignored = [(note.fields["name"], note.fields["step"]) for note in run.notes("checkpoint_ignored")]
    assert ignored == ([("c", 300)] if step < 300 else [])


def test_a_later_checkpoint_is_used_if_the_others_would_lose_steps() -> None:
    """C may be A on another machine, with a new key and steps that A had not reported yet."""
    run = all_left(min_workers=2)
    leave(run)
    restart(run, B, step=40), restart(run, C, step=108)
    advance_until(run, run.now_s + 70.0)
    assert run.view.applied + 1 == 108
    assert not run.notes("rollback") and not run.notes("checkpoint_ignored")


def test_a_checkpoint_that_is_not_used_does_not_end_the_wait_for_one_that_is() -> None:
    """C has a checkpoint of another history, such as of an earlier run; B has an old one of this run."""
    run = all_left(min_workers=2)
    leave(run)
    generation = run.core.generation
    restart(run, B, step=40), restart(run, C, step=300)
    advance_until(run, run.now_s + 50.0)
    assert run.core.generation == generation, "without A's checkpoint the run would lose 65 steps"
    restart(run, A, step=105)
    advance_until(run, run.now_s + 5.0)
    assert run.view.applied == 104 and not run.notes("rollback")


@pytest.mark.parametrize("returning", [A, E])
def test_a_member_that_cannot_send_the_checkpoint_of_the_run_stays(returning: m.PeerId) -> None:
    """C and D are new, and cannot connect to it: without the checkpoint they would start at step 0.

    E was not a member, so that it may not have the checkpoint at all.
    """
    run = all_left(min_workers=2)
    leave(run)
    run.core.run._min_workers = 3
    restart(run, returning, step=105)
    run.join(C), run.join(D)
    advance_until(run, run.now_s + 1.0)
    assert run.view.applied == 104
    run.ready(returning)
    while run.core.run.view_change.is_forming:
        advance_until(run, run.core.deadline_s)
    assert [note.fields["name"] for note in run.notes("lost")] == (["c", "d"] if returning == A else ["e"])


@pytest.mark.parametrize("restarts", [False, True])
def test_steps_that_are_lost_before_the_checkpoint_is_used_are_a_rollback(restarts: bool) -> None:
    """Also if the coordinator restarts while the generation that would continue from it forms."""
    run = all_left(min_workers=2)
    leave(run)
    restart(run, A, step=105), restart(run, C, step=50)
    advance_until(run, run.now_s + 1.0)
    assert run.view.applied == 104 and not run.core.run.has_started
    if restarts:
        run = ScriptedCoordinator(term=2, journal=run.journal, min_workers=2)
        for peer, step in ((A, 105), (C, 50)):
            restart(run, peer, step=step, is_admitted=False)
    for peer in (A, C):
        run.say(peer, m.Leave(""))
    assert run.core.phase is RunPhase.WAITING and run.core.run.highest_step == 105
    run.join(D), run.join(E)
    run.now_s += 2 * run.core.run.limits.regather_s
    run.tick()
    assert [note.fields for note in run.notes("rollback")] == [{"from": 105, "to": 0}]


def test_the_checkpoint_of_a_worker_that_leaves_before_its_first_step_is_awaited() -> None:
    run = all_left()
    leave(run)
    restart(run, A, step=105)
    advance_until(run, run.now_s + 5.0)
    assert run.roster == "a"
    run.say(A, m.Leave("Ctrl-C"))
    generation = run.core.generation
    restart(run, B, step=40)
    advance_until(run, run.now_s + 50.0)
    assert run.core.generation == generation, "B alone would lose 65 steps"


def test_a_checkpoint_that_no_worker_keeps_is_not_awaited() -> None:
    run = all_left(kept=0)
    leave(run)
    restart(run, B, step=40)
    advance_until(run, run.now_s + 5.0)
    assert (run.core.generation, run.view.applied) == (2, 39)


def test_the_wait_for_a_checkpoint_begins_when_enough_workers_have_joined() -> None:
    run = all_left(min_workers=2)
    leave(run)
    restart(run, B, step=40)
    advance_until(run, run.now_s + 100.0)
    restart(run, C, step=40)
    advance_until(run, run.now_s + 50.0)
    assert run.core.generation == 1
    restart(run, A, step=105)
    advance_until(run, run.now_s + 5.0)
    assert (run.core.generation, run.view.applied) == (2, 104)


def test_the_wait_for_a_checkpoint_begins_when_the_last_member_leaves() -> None:
    """C has been there for long, and is still catching up or preparing its data."""
    run = all_left()
    run.join(C, setup=None)
    for step in range(106, 126):
        advance_until(run, run.now_s + 4.0)
        for peer in (A, B):
            run.say(peer, m.Heartbeat(1, step, step, ((m.KEPT_STEP, 105.0),)))
    leave(run)
    generation = run.core.generation
    run.say(C, SETUP, m.LinkLatencies(()))
    advance_until(run, run.now_s + 50.0)
    assert run.core.generation == generation, "C alone would start at step 0"
    restart(run, A, step=105)
    advance_until(run, run.now_s + 5.0)
    assert (run.core.generation, run.view.applied) == (generation + 1, 104)


def test_a_checkpoint_is_not_awaited_once_the_owner_has_ended_the_run() -> None:
    run = all_left()
    leave(run)
    end(run)
    assert run.core.run.is_finished
    assert "awaiting" not in run.core.status(run.now_s)["reason"]
    assert not run.core.run.awaits_left_step


def test_a_paused_run_ends_with_the_model_of_its_latest_checkpoint() -> None:
    """All workers are killed at step 105; A and B are started again, and C stays away."""
    run = Run(A, B, C)
    for peer in (A, B, C):
        run.say(peer, m.Heartbeat(1, 105, 105, ()))
    for peer in (A, B, C):
        run.hear(PeerDisconnected(peer, "died"))
    while run.core.phase is RunPhase.TRAINING:
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.tick()
    restart(run, A, B)
    said = end(run)
    when = r"ends when c, which is disconnected, comes back, or in \d\d s with the model of step 100"
    assert re.search(f"{when}$", said), said
    while run.core.generation == 1:
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.tick()
    assert (run.roster, run.view.applied, run.view.reason) == ("a b", 99, "the run's owner has ended the run")
    run.ready(A, B)
    status = run.core.status(run.now_s)
    assert (status["phase"], status["alert"], status["step"]) == ("finished", "", 100)
    assert status["reason"] == "its owner has ended it after 100 steps"


def test_a_run_that_waits_for_workers_ends_with_the_model_of_a_checkpoint() -> None:
    run = ScriptedCoordinator(min_workers=3)
    run.join(B)
    restart(run, A, is_admitted=False)
    assert end(run) == 'the run "r" ends when its workers are admitted, with the model of step 100'
    run.say(A, m.LinkLatencies(()))
    assert (run.roster, run.view.applied) == ("a b", 99)
    run.ready(A, B)
    assert run.core.phase is RunPhase.FINISHED and not run.core.run.missing_model


def test_a_run_that_waits_for_workers_ends_with_the_model_of_their_latest_checkpoint() -> None:
    """The worker that holds it is still measuring its links, for a limited time."""
    run = ScriptedCoordinator(min_workers=3, limits=Deadlines(silence_s=1e9))
    restart(run, A)
    restart(run, B, is_admitted=False, step=1200)
    said = "ends when its workers are admitted, with the model of step 1,200"
    assert end(run) == f'the run "r" {said}'
    assert run.core.status(run.now_s)["reason"].endswith(f"; its owner has ended the run, which {said}")
    assert run.roster == ""
    while not run.roster:
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.tick()
    assert (run.roster, run.view.applied) == ("b a", 1199)


def test_workers_with_checkpoints_may_come_back_if_the_coordinator_restarts_before_it_ends_the_run() -> None:
    first = ScriptedCoordinator(min_workers=3)
    restart(first, A, B, is_admitted=False)
    end(first)
    limits = Deadlines(silence_s=1e9)
    run = ScriptedCoordinator(min_workers=3, journal=first.journal, term=2, limits=limits)
    restart(run, A)
    assert re.fullmatch(
        r'the run "r" ends in \d\d s with the model of step 100, unless a worker with a later checkpoint '
        "joins first",
        end(run),
    )
    restart(run, B, step=101)
    assert run.roster == ""
    run.now_s = run.core.deadline_s
    run.tick()
    assert (run.roster, run.view.applied) == ("b a", 100)


def test_a_run_whose_workers_do_not_come_back_after_a_restart_ends_without_a_model() -> None:
    first = ScriptedCoordinator(min_workers=3)
    restart(first, A, is_admitted=False)
    end(first)
    run = ScriptedCoordinator(min_workers=3, journal=first.journal, term=2)
    run.join(B)
    assert re.fullmatch(
        r'the run "r" ends in \d\d s without a model, unless a worker with a checkpoint joins first', end(run)
    )
    run.hear(PeerDisconnected(B, "died"))
    while run.core.phase is not RunPhase.FINISHED and run.core.deadline_s < math.inf:
        run.now_s = max(run.now_s, run.core.deadline_s)
        run.tick()
    assert run.core.phase is RunPhase.FINISHED and run.now_s < 2 * Deadlines().regather_s


def test_the_end_is_delayed_only_by_the_member_that_writes_the_model() -> None:
    """The coordinator exits later if the model is pending."""
    run = Run(A, B)
    run.say(A, m.RunFinished(9, b"history"))
    run.say(B, m.RunFinished(9, b"history"))
    for peer, figure, value, is_pending in (
        (B, m.EXPORT_ATTEMPTS, 1.0, False),
        (B, m.FAILED_CHECKPOINTS, 1.0, False),
        (A, m.EXPORT_ATTEMPTS, math.nan, False),
        (A, m.EXPORT_ATTEMPTS, 1.0, True),
        (A, m.EXPORT_ATTEMPTS, 0.0, False),
        (A, m.FAILED_CHECKPOINTS, 1.0, True),
    ):
        run.say(peer, m.Heartbeat(1, 10, 10, ((figure, value),)))
        assert run.core.is_model_pending == is_pending, (peer, figure)
    run.say(A, m.Leave("the training script has ended"))
    assert not run.core.is_model_pending
