"""Access control: transcripts, limits, and recovery from the journal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridtrain.core import messages as m
from gridtrain.core.group.invitation import invitation_digest
from gridtrain.network.transport.zmq.half_open import address_range
from gridtrain_coordinator.access import authorization as module
from gridtrain_coordinator.access import authorization_limits as rules
from gridtrain_coordinator.access.authorization import (
    AccessReply,
    AccessRole,
    Authorization,
    ViolationOutcome,
)
from gridtrain_coordinator.run.events import JournalEntry

ANNA, BERT, CARL, DORA, EMIL, OPERATOR, US = (
    letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e", b"o", b"u")
)
KEY, OTHER_KEY = b"k" * 32, b"l" * 32
NAMES = {ANNA: "anna", BERT: "bert", CARL: "carl", DORA: "dora", EMIL: "emil"}
DAY_S = 86_400.0
USED_UP = "this invitation has no uses left"


class Access:
    """Access control, its journal, and the time."""

    def __init__(self, *members: m.PeerId, **more: Any) -> None:
        self.rules = Authorization(run="r", operator=OPERATOR, coordinator=US, **more)
        self.more = more
        self.journal: list[JournalEntry] = []
        self.now_s = 1_000_000.0
        for number, member in enumerate(members):
            key = bytes([number]) * 31 + b"-"
            assert self.invite(key) == "OperatorReply"
            assert self.enrol(key, member, host=f"10.0.{number}.1") == "Enrolled"

    def write(self, answer: AccessReply | ViolationOutcome) -> None:
        self.journal += answer.entries

    def reply_text(self, answer: AccessReply) -> str:
        self.write(answer)
        reply = answer.reply
        return (
            f"Refused {reply.code}: {reply.reason}" if isinstance(reply, m.Refused) else type(reply).__name__
        )

    def invite(self, key: m.PeerId = KEY, uses: int = 1, expires_s: float = DAY_S) -> str:
        return self.reply_text(self.rules.invite(key, uses, expires_s, self.now_s))

    def enrol(self, key: m.PeerId = KEY, peer: m.PeerId = ANNA, host: str = "192.0.2.7") -> str:
        return self.reply_text(self.rules.enrol(key, peer, address_range(host), self.now_s))

    def expel(self, peer: m.PeerId, ban: bool = False) -> str:
        return self.reply_text(self.rules.expel(peer, ban, ""))

    def pardon(self, peer: m.PeerId) -> str:
        return self.reply_text(self.rules.pardon(peer))

    def role(self, key: m.PeerId) -> str:
        return str(self.rules.access_role(key, self.now_s))

    def accuse(self, accusation: str) -> str:
        """Records "bert: anna", bert's accusation, or ": anna", what the coordinator observed itself."""
        by, _, of = accusation.partition(": ")
        keys = {name: key for key, name in NAMES.items()}
        return self.outcome_text(
            self.rules.record_violation(keys[of], "sent rubbish", keys.get(by), self.now_s)
        )

    def pass_time(self, seconds: float) -> str:
        self.now_s += seconds
        return self.outcome_text(self.rules.tick(self.now_s))

    def outcome_text(self, outcome: ViolationOutcome) -> str:
        self.write(outcome)
        words = [f"{NAMES[peer]} out" for peer, _ in outcome.removed]
        words += [f"{NAMES[peer]} back" for peer in outcome.restored]
        if outcome.violation_count:
            words.insert(0, str(outcome.violation_count))
        return ", ".join(words)

    def restarted(self) -> Authorization:
        entries = [(entry.kind, json.loads(json.dumps(entry.body))) for entry in self.journal]
        return Authorization(entries=entries, run="r", operator=OPERATOR, coordinator=US, **self.more)


# -- invitations -----------------------------------------------------------------------------------


def test_an_invitation_enrols_one_volunteer() -> None:
    access = Access()
    assert [access.role(key) for key in (KEY, ANNA, OPERATOR)] == ["stranger", "stranger", "peer"]
    assert access.invite(KEY) == "OperatorReply"
    assert [access.role(key) for key in (KEY, ANNA, OPERATOR)] == ["guest", "stranger", "peer"]
    assert access.enrol(KEY, ANNA) == "Enrolled"
    assert [access.role(key) for key in (KEY, ANNA, OPERATOR)] == ["guest", "peer", "peer"]
    assert [entry.kind for entry in access.journal] == ["invitation", "enrolled"]


def test_uses_are_counted_once_for_each_key() -> None:
    access = Access()
    access.invite(uses=2)
    assert [access.enrol(peer=peer) for peer in (ANNA, ANNA, ANNA)] == ["Enrolled"] * 3
    assert [entry.kind for entry in access.journal] == ["invitation", "enrolled"], "one use"
    assert access.enrol(peer=BERT) == "Enrolled"
    assert access.enrol(peer=CARL) == f"Refused invitation: {USED_UP}"


def test_a_refusal_says_how_an_invitation_ended() -> None:
    access = Access()
    expired, withdrawn, unknown = b"x" * 32, b"w" * 32, b"u" * 32
    for key in (KEY, expired, withdrawn):
        access.invite(key)
    access.enrol(KEY, ANNA)
    access.invite(withdrawn, expires_s=0.0)
    access.now_s += DAY_S + 1.0
    for rules_now in (access.rules, access.restarted()):
        answers = {
            key: (str(rules_now.access_role(key, access.now_s)), rules_now.enrol(key, BERT, "", access.now_s))
            for key in (KEY, expired, withdrawn, unknown)
        }
        assert {key: (role, answer.reply.reason) for key, (role, answer) in answers.items()} == {
            KEY: ("guest", USED_UP),
            expired: ("guest", "this invitation has expired"),
            withdrawn: ("guest", "this invitation was withdrawn by the run's owner"),
            unknown: ("stranger", "this coordinator has no such invitation"),
        }
        assert {(answer.reply.code, answer.entries) for _, answer in answers.values()} == {("invitation", ())}
        assert answers[KEY][1].reply.remedy.startswith("start a worker that it admitted before")


def test_an_ended_invitation_is_remembered_for_thirty_days_and_its_digest_grants_no_access() -> None:
    access = Access()
    access.invite(expires_s=DAY_S)
    access.now_s += 31 * DAY_S - 1.0
    assert access.role(KEY) == "guest"
    assert access.role(bytes.fromhex(invitation_digest(KEY))) == "stranger"
    access.now_s += 1.0
    assert access.role(KEY) == "stranger"


def test_a_key_that_is_in_use_cannot_be_enrolled() -> None:
    access = Access()
    access.invite(uses=9)
    access.invite(OTHER_KEY)
    for key in (KEY, OTHER_KEY, OPERATOR, US):
        assert access.enrol(peer=key) == "Refused key: this key is already in use"
    assert access.role(US) == "stranger"


def test_an_invitation_is_withdrawn() -> None:
    access = Access()
    access.invite(uses=9)
    access.enrol(peer=ANNA)
    assert access.invite(expires_s=0.0) == "OperatorReply"
    assert [access.role(key) for key in (KEY, ANNA)] == ["guest", "peer"]
    assert access.enrol(peer=BERT) == "Refused invitation: this invitation was withdrawn by the run's owner"
    assert access.invite(expires_s=0.0) == "Refused unknown: this run has no valid invitation with this key"


@pytest.mark.parametrize(
    ("uses", "expires_s", "code"),
    [(10_001, DAY_S, "bounds"), (1, 367 * DAY_S, "bounds"), (10_000, 366 * DAY_S, "")],
)
def test_bounds_of_an_invitation(uses: int, expires_s: float, code: str) -> None:
    assert (
        Access()
        .invite(uses=uses, expires_s=expires_s)
        .startswith(f"Refused {code}" if code else "OperatorReply")
    )


def test_at_most_a_thousand_invitations_are_open() -> None:
    access = Access()
    for number in range(1000):
        assert access.invite(number.to_bytes(32, "big")) == "OperatorReply"
    assert access.invite() == "Refused too-many: 1000 invitations are open"
    access.now_s += 2 * DAY_S
    assert access.invite() == "OperatorReply"
    assert len(access.rules._invitations) == 1001, "the latest thousand of the ended ones are remembered"
    access.now_s += 2 * DAY_S
    assert access.invite(OTHER_KEY) == "OperatorReply"
    assert len(access.rules._invitations) == 1001 and access.role(bytes(32)) == "stranger"
    access.now_s += 40 * DAY_S
    assert access.invite(b"n" * 32) == "OperatorReply"
    assert len(access.rules._invitations) == 1, "none is remembered for longer than 30 days"


def test_a_key_cannot_be_invited_twice() -> None:
    access = Access(ANNA)
    access.invite()
    for key in (KEY, ANNA, OPERATOR):
        assert access.invite(key) == "Refused known: this key is in use"


# -- kick, ban, unban ------------------------------------------------------------------------------


def test_kick_ban_and_unban() -> None:
    access = Access(ANNA)
    access.invite(OTHER_KEY, uses=9)
    assert access.role(ANNA) == "peer"
    assert access.expel(ANNA) == "OperatorReply"
    assert access.role(ANNA) == "stranger"
    assert access.enrol(OTHER_KEY, ANNA) == (
        "Refused kicked: this worker was removed from the run: no reason was given"
    ), "the invitation was made before the kick"
    assert access.rules.removed_members() == [ANNA]
    access.invite(KEY, uses=9)
    assert access.enrol(KEY, ANNA) == "Enrolled" and access.rules.removed_members() == []
    assert access.expel(ANNA, ban=True) == "OperatorReply"
    access.invite(b"n" * 32, uses=9)
    assert access.enrol(b"n" * 32, ANNA).startswith("Refused banned")
    assert access.pardon(ANNA) == "OperatorReply"
    assert access.enrol(b"n" * 32, ANNA).startswith("Refused kicked"), (
        "the invitation was made before the unban"
    )
    access.invite(b"p" * 32)
    assert access.enrol(b"p" * 32, ANNA) == "Enrolled"


def test_the_name_of_a_banned_worker_survives_a_restart_until_the_ban_is_lifted() -> None:
    access = Access(ANNA, BERT)
    access.reply_text(access.rules.expel(ANNA, True, "spam", "anna\x1b"))
    access.reply_text(access.rules.expel(BERT, False, "", "bert"))
    for rules_now in (access.rules, access.restarted()):
        assert rules_now.status(0.0)["banned"] == [{"peer": ANNA.hex(), "name": "anna", "reason": "spam"}]
    access.pardon(ANNA), access.expel(ANNA, ban=True)
    assert "name" not in access.restarted().status(0.0)["banned"][0], "the second ban named no worker"


def test_commands_about_unknown_keys_are_refused() -> None:
    access = Access(ANNA)
    assert access.expel(BERT) == f"Refused unknown: {BERT.hex()[:12]} is not a member"
    assert access.pardon(ANNA) == f"Refused unknown: {ANNA.hex()[:12]} is not banned"
    assert access.expel(OPERATOR).startswith("Refused ours") and access.expel(US, ban=True).startswith(
        "Refused ours"
    )
    assert access.expel(BERT, ban=True) == "OperatorReply", "a key can be banned before it joins"
    before = len(access.journal)
    assert access.expel(BERT, ban=True) == "OperatorReply" and len(access.journal) == before, (
        "a second ban adds no entry"
    )


def test_commands_are_accepted_from_the_operator_only() -> None:
    access = Access(ANNA)
    orders = (m.Invite(KEY, 1, DAY_S), m.RemoveWorker(ANNA, True, ""), m.Unban(ANNA))
    for order in orders:
        assert access.reply_text(access.rules.handle_order(BERT, order, access.now_s)).startswith("Refused")
    assert [
        access.reply_text(access.rules.handle_order(OPERATOR, order, access.now_s)) for order in orders
    ] == ["OperatorReply"] * 3
    assert [entry.kind for entry in access.journal[-3:]] == ["invitation", "expelled", "pardoned"]


def test_bans_are_bounded_and_a_lifted_ban_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_BANNED", 2)
    access = Access(ANNA)
    assert [access.expel(peer, ban=True) for peer in (BERT, CARL)] == ["OperatorReply"] * 2
    assert access.expel(ANNA, ban=True) == "Refused too-many: 2 keys are banned"
    assert access.expel(ANNA) == "OperatorReply", "a kick is no ban"
    access.pardon(BERT)
    assert access.expel(ANNA, ban=True) == "OperatorReply"


def test_the_oldest_kicks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_REMOVED", 2)
    access = Access(ANNA, BERT, CARL)
    access.invite(KEY, uses=9)
    for peer in (ANNA, BERT, CARL):
        access.expel(peer)
    answers = [access.enrol(KEY, peer).split(":")[0] for peer in (ANNA, BERT, CARL)]
    assert answers == ["Enrolled", "Refused kicked", "Refused kicked"]


def test_a_kick_returns_the_worker_to_disconnect() -> None:
    access = Access(ANNA)
    assert access.rules.expel(ANNA, False, "too slow\x1b[2J").removed == ((ANNA, "too slow [2J"),)


def test_a_kick_excludes_a_worker_also_where_access_is_open_to_all() -> None:
    access = Access(open_to_all=True)
    assert access.role(ANNA) == "peer" and access.role(US) == "stranger"
    assert access.expel(ANNA) == "OperatorReply" and access.role(ANNA) == "stranger"
    assert access.pardon(ANNA) == "OperatorReply" and access.role(ANNA) == "peer"


# -- violations ------------------------------------------------------------------------------------

# accuser: accused   expected outcome ("2": violations that count against the accused)
STORIES = {
    "three violations are a kick": [
        (": anna", "1"), (": anna", "2"), (": anna", "3, anna out"), (": anna", "3"),
    ],
    "from different accusers": [
        ("bert: anna", "1"), (": anna", "2"), ("carl: anna", "3, anna out"),
    ],
    "one accuser is enough": [
        ("bert: anna", "1"), ("bert: anna", "2"), ("bert: anna", "3, anna out"),
    ],
    "a liar": [
        ("bert: anna", "1"), ("bert: carl", ""), ("bert: dora", ""), (4.9, ""), (0.1, "bert out"),
        ("dora: anna", "1"),
    ],
    "a liar that was believed": [
        ("bert: anna", "1"), ("bert: anna", "2"), ("bert: anna", "3, anna out"), ("bert: carl", ""),
        (5.0, "bert out, anna back"),
    ],
    "a suspect's further accusations do not count": [
        ("bert: anna", "1"), ("bert: carl", ""), ("bert: anna", ""), ("bert: anna", ""), ("bert: carl", ""),
        (5.0, "bert out"),
    ],
    "two accusers of the same members confirm each other": [
        ("anna: dora", "1"), ("anna: emil", ""), ("bert: dora", "2"), ("bert: emil", "2"),
        ("carl: dora", "3, dora out"), ("carl: emil", "3, emil out"), (60.0, ""),
    ],
    "confirmed in time": [
        ("anna: dora", "1"), ("anna: emil", ""), (4.0, ""), ("bert: emil", "2"), (60.0, ""),
    ],
    "confirmed by us": [
        ("anna: dora", "1"), (": emil", "1"), ("anna: emil", "2"), (60.0, ""), (": emil", "3, emil out"),
    ],
    "nobody accuses itself": [("anna: anna", ""), ("anna: anna", "")],
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_accusations_are_judged(story: str) -> None:
    access = Access(*NAMES)
    outcomes = []
    for cause, _ in STORIES[story]:
        outcomes.append((cause, access.accuse(cause) if isinstance(cause, str) else access.pass_time(cause)))
    assert outcomes == STORIES[story]
    assert access.restarted().status(access.now_s) == access.rules.status(access.now_s)


def test_a_new_invitation_clears_violations() -> None:
    access = Access(*NAMES)
    assert [access.accuse(": anna") for _ in range(3)][-1] == "3, anna out"
    access.invite()
    access.enrol(peer=ANNA)
    assert access.rules.violation_count(ANNA) == 0 and access.accuse(": anna") == "1"


def test_no_violation_is_recorded_for_a_key_that_is_no_member() -> None:
    access = Access(ANNA)
    assert access.rules.record_violation(BERT, "x", ANNA, 0.0) == ViolationOutcome()


def test_a_kick_of_a_suspect_withdraws_its_accusations() -> None:
    access = Access(*NAMES)
    for accusation in (*("bert: anna",) * 3, "bert: carl"):
        access.accuse(accusation)
    access.expel(BERT)
    assert access.role(ANNA) == "peer" and access.rules.violation_count(CARL) == 0


def test_an_accuser_cannot_make_the_journal_grow() -> None:
    access = Access(*NAMES)
    before = len(access.journal)
    for _ in range(1000):
        for victim in ("anna", "carl", "dora", "emil"):
            access.accuse(f"bert: {victim}")
    assert len(access.journal) - before <= 5, "bert is suspected after the second victim"


def test_long_reasons_fit_a_message() -> None:
    access = Access(ANNA)
    for _ in range(3):
        outcome = access.rules.record_violation(ANNA, "\U0001f600" * 512, None, 0.0)
    ((_, reason),) = outcome.removed
    assert len(reason.encode()) <= 300


# -- limits ----------------------------------------------------------------------------------------


def enrol_many(access: Access, count: int, host: Callable[[int], str]) -> list[str]:
    words = [
        access.enrol(peer=(number + 10**9).to_bytes(32, "big"), host=host(number)) for number in range(count)
    ]
    return [word.split(":")[0] for word in words]


def test_one_address_range_cannot_use_up_an_invitation_for_many() -> None:
    access = Access()
    access.invite(uses=1000)
    assert enrol_many(access, 70, lambda n: f"192.0.2.{n}") == ["Enrolled"] * 64 + ["Refused too-many"] * 6
    assert access.enrol(peer=ANNA, host="198.51.100.1") == "Enrolled", "other address ranges are not affected"
    access.now_s += 600.0
    assert access.enrol(peer=BERT, host="192.0.2.1") == "Enrolled"


def test_waiting_is_not_advised_when_the_list_of_members_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(ANNA, BERT)
    access.invite()
    monkeypatch.setattr(rules, "MAX_MEMBERS", 2)
    refused = access.rules.enrol(KEY, CARL, address_range("192.0.2.7"), access.now_s).reply
    assert isinstance(refused, m.Refused) and "gridtrain kick" in refused.remedy
    access.expel(ANNA)
    assert access.enrol(peer=CARL) == "Enrolled"


def test_a_clock_that_is_set_back_refuses_nobody() -> None:
    access = Access()
    access.invite(uses=1000)
    enrol_many(access, 64, lambda n: "192.0.2.1")
    access.now_s -= 3600.0
    assert access.enrol(peer=ANNA, host="192.0.2.1") == "Enrolled"


def test_a_key_may_join_twenty_times_a_minute() -> None:
    access = Access(ANNA, BERT).rules
    assert [access.allow_join(ANNA, 100.0 + n) for n in range(22)] == [True] * 20 + [False] * 2
    assert access.allow_join(BERT, 122.0)
    assert [access.allow_join(ANNA, now_s) for now_s in (159.9, 160.0)] == [False, True]


def test_records_of_joins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_JOINERS", 100)
    access = Authorization(open_to_all=True)
    for number in range(1000):
        access.allow_join(number.to_bytes(32, "big"), float(number))
    assert len(access._joins._times_s) == 100


# -- the journal -----------------------------------------------------------------------------------


def random_history(access: Access, seed: int) -> Iterator[None]:
    """Random orders, enrolments and violations."""
    rng = random.Random(seed)
    keys = [bytes([number]) * 32 for number in range(1, 7)]
    peers = list(NAMES)
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1:
                access.invite(rng.choice(keys), rng.choice([1, 1, 2, 5]), rng.choice([0.0, 50.0, DAY_S]))
            case 2 | 3:
                access.enrol(rng.choice(keys), rng.choice(peers), f"10.0.{rng.randrange(3)}.1")
            case 4:
                access.expel(rng.choice(peers), rng.random() < 0.3)
            case 5:
                access.pardon(rng.choice(peers))
            case 6:
                accuser = rng.choice([None, *peers])
                access.write(access.rules.record_violation(rng.choice(peers), "x", accuser, access.now_s))
            case 7:
                access.pass_time(rng.choice([0.1, 3.0, 40.0]))
        yield


def test_a_restart_restores_the_same_access_rules(seeds: Callable[[int], Iterator[int]]) -> None:
    all_keys = [bytes([number]) * 32 for number in range(1, 7)] + [*NAMES, OPERATOR, US]
    for seed in seeds(150):
        access = Access(open_to_all=seed % 4 == 0)
        for _ in random_history(access, seed):
            pass
        again = access.restarted()
        access.pass_time(0.0)
        again.tick(access.now_s)
        assert again.status(access.now_s) == access.rules.status(access.now_s), f"seed {seed}"
        for wait_s in (0.0, 45.0, 2 * DAY_S):
            for key in all_keys:
                wall_s = access.now_s + wait_s
                assert again.access_role(key, wall_s) == access.rules.access_role(key, wall_s), f"seed {seed}"


def test_a_restart_after_every_event_changes_nothing(seeds: Callable[[int], Iterator[int]]) -> None:
    for seed in seeds(30):
        steady, restarting = Access(), Access()
        for _ in zip(random_history(steady, seed), random_history(restarting, seed), strict=True):
            suspects = (
                restarting.rules._violations._suspects
            )  # their time for confirmation is not in the journal, so it starts again
            restarting.rules = restarting.restarted()
            restarting.rules._violations._suspects = suspects
            wall_s = steady.now_s
            assert restarting.rules.status(wall_s) == steady.rules.status(wall_s), f"seed {seed}"
        assert restarting.journal == steady.journal


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("ab" * 32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("key", "peer", "uses", "until_s", "at_s", "invitation", "ban", "reason", "cause", "accuser")
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=10) | st.fixed_dictionaries(
    dict.fromkeys(FIELDS, VALUES)
)
KINDS = st.sampled_from(["invitation", "enrolled", "expelled", "pardoned", "strike", "generation", "gossip"])


@given(st.lists(st.tuples(KINDS, BODIES), max_size=6))
def test_random_entries_of_the_journal_are_read_or_refused(entries: list[tuple[str, dict[str, Any]]]) -> None:
    try:
        access = Authorization(entries=entries)
    except (KeyError, TypeError, ValueError):
        return
    json.dumps(access.status(0.0))
    access.tick(0.0)
    assert access.access_role(ANNA, 0.0) in AccessRole


@pytest.mark.parametrize(
    "entry",
    [
        ("invitation", {"key": "ab", "uses": 1, "until_s": 1.0, "at_s": 0.0}),
        ("invitation", {"key": "ab" * 32, "uses": True, "until_s": 1.0, "at_s": 0.0}),
        ("invitation", {"key": "ab" * 32, "uses": 0, "until_s": 1.0, "at_s": 0.0}),
        ("invitation", {"key": "ab" * 32, "uses": 2**31, "until_s": 1.0, "at_s": 0.0}),
        ("invitation", {"key": "ab" * 32, "uses": 1, "until_s": float("nan"), "at_s": 0.0}),
        ("invitation", {"key": "ab" * 32, "uses": 1, "until_s": 10**400, "at_s": 0.0}),
        ("enrolled", {"peer": "ab" * 32}),
        ("enrolled", {"peer": "xy" * 32, "invitation": ""}),
        ("expelled", {"peer": "ab" * 32, "ban": 1, "reason": "", "cause": "order"}),
        ("expelled", {"peer": "ab" * 32, "ban": True, "reason": "", "cause": "mood"}),
        ("pardoned", {}),
        ("strike", {"peer": "ab" * 32, "accuser": 7, "reason": ""}),
    ],
)
def test_invalid_entries_are_refused(entry: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Authorization(entries=[entry])


def test_the_status_shows_the_time_left_in_tenths_of_a_second() -> None:
    access = Access()
    access.invite(expires_s=60.04)
    assert access.rules.status(access.now_s)["invitations"][0]["left_s"] == 60.0
    assert access.rules.status(access.now_s + 0.5)["invitations"][0]["left_s"] == 59.5


def test_the_status_reveals_no_invitation() -> None:
    access = Access(ANNA, BERT)
    access.invite(KEY, uses=3)
    access.enrol(KEY, CARL)
    access.accuse("bert: anna")
    access.accuse(": anna")
    access.expel(BERT, ban=True)
    shown = json.loads(json.dumps(access.rules.status(access.now_s)))
    name = invitation_digest(KEY)
    assert name not in json.dumps(shown) and KEY.hex() not in json.dumps(shown)
    assert shown == {
        "open_to_all": False,
        "invitations": [{"id": name[:8], "uses": 3, "used": 1, "left_s": DAY_S}],
        "enrolled_total": 2,
        "enrolled": [
            {"peer": ANNA.hex(), "invitation": invitation_digest(bytes(31) + b"-")[:8], "strikes": 2},
            {"peer": CARL.hex(), "invitation": name[:8], "strikes": 0},
        ],
        "banned": [{"peer": BERT.hex(), "reason": "no reason was given"}],
        "strikes": [
            {
                "peer": ANNA.hex(),
                "strikes": 2,
                "said": [
                    {"by": BERT.hex()[:12], "reason": "sent rubbish"},
                    {"by": "coordinator", "reason": "sent rubbish"},
                ],
            }
        ],
    }


def test_the_roles_are_those_of_the_transport() -> None:
    from gridtrain.network.transport import interface

    assert [interface.ConnectionRole(word) for word in module.AccessRole] == list(interface.ConnectionRole)
