"""Access control: transcripts, the attack that each defence prevents, and recovery from the journal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from defences import disable_defences
from hypothesis import given
from hypothesis import strategies as st

from gridtrain.core import messages as m
from gridtrain.core.group.invitation import invitation_digest
from gridtrain.network.transport.zmq.half_open import address_range
from gridtrain_coordinator.access import authorization as module
from gridtrain_coordinator.access import authorization_rules as rules
from gridtrain_coordinator.access.authorization import (
    AccessReply,
    AccessRole,
    Authorization,
    ViolationOutcome,
    recover_authorization,
)
from gridtrain_coordinator.run.events import JournalEntry

ANNA, BERT, CARL, DORA, EMIL, OPERATOR, US = (
    letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e", b"o", b"u")
)
KEY, OTHER_KEY = b"k" * 32, b"l" * 32
NAMES = {ANNA: "anna", BERT: "bert", CARL: "carl", DORA: "dora", EMIL: "emil"}
DAY_S = 86_400.0
USED_UP = "this invitation is used up"


class House:
    """Access control, its journal, and the time."""

    def __init__(self, *members: m.PeerId, **more: Any) -> None:
        self.door = Authorization(run="r", operator=OPERATOR, coordinator=US, **more)
        self.more = more
        self.journal: list[JournalEntry] = []
        self.now_s = 1_000_000.0
        for number, member in enumerate(members):
            key = bytes([number]) * 31 + b"-"
            assert self.invite(key) == "OperatorReply"
            assert self.enrol(key, member, host=f"10.0.{number}.1") == "Enrolled"

    def write(self, answer: AccessReply | ViolationOutcome) -> None:
        self.journal += answer.entries

    def said(self, answer: AccessReply) -> str:
        self.write(answer)
        reply = answer.reply
        return (
            f"Refused {reply.code}: {reply.reason}" if isinstance(reply, m.Refused) else type(reply).__name__
        )

    def invite(self, key: m.PeerId = KEY, uses: int = 1, expires_s: float = DAY_S) -> str:
        return self.said(self.door.invite(key, uses, expires_s, self.now_s))

    def enrol(self, key: m.PeerId = KEY, peer: m.PeerId = ANNA, host: str = "192.0.2.7") -> str:
        return self.said(self.door.enrol(key, peer, address_range(host), self.now_s))

    def expel(self, peer: m.PeerId, ban: bool = False) -> str:
        return self.said(self.door.expel(peer, ban, ""))

    def pardon(self, peer: m.PeerId) -> str:
        return self.said(self.door.pardon(peer))

    def standing(self, key: m.PeerId) -> str:
        return str(self.door.access_role(key, self.now_s))

    def accuse(self, line: str) -> str:
        """ "bert: anna" is bert's accusation; ": anna" the coordinator saw itself."""
        by, _, of = line.partition(": ")
        keys = {name: key for key, name in NAMES.items()}
        return self.outcome(self.door.record_violation(keys[of], "sent rubbish", keys.get(by), self.now_s))

    def later(self, seconds: float) -> str:
        self.now_s += seconds
        return self.outcome(self.door.tick(self.now_s))

    def outcome(self, judgement: ViolationOutcome) -> str:
        self.write(judgement)
        words = [f"{NAMES[peer]} out" for peer, _ in judgement.removed]
        words += [f"{NAMES[peer]} back" for peer in judgement.restored]
        if judgement.violation_count:
            words.insert(0, str(judgement.violation_count))
        return ", ".join(words)

    def restarted(self) -> Authorization:
        entries = [(entry.kind, json.loads(json.dumps(entry.body))) for entry in self.journal]
        return recover_authorization(entries, run="r", operator=OPERATOR, coordinator=US, **self.more)


# -- invitations -----------------------------------------------------------------------------------


def test_one_volunteer_comes_in() -> None:
    house = House()
    assert [house.standing(key) for key in (KEY, ANNA, OPERATOR)] == ["stranger", "stranger", "peer"]
    assert house.invite(KEY) == "OperatorReply"
    assert [house.standing(key) for key in (KEY, ANNA, OPERATOR)] == ["guest", "stranger", "peer"]
    assert house.enrol(KEY, ANNA) == "Enrolled"
    assert [house.standing(key) for key in (KEY, ANNA, OPERATOR)] == ["guest", "peer", "peer"]
    assert [entry.kind for entry in house.journal] == ["invitation", "enrolled"]


def test_uses_are_counted_once_for_each_key() -> None:
    house = House()
    house.invite(uses=2)
    assert [house.enrol(peer=peer) for peer in (ANNA, ANNA, ANNA)] == ["Enrolled"] * 3
    assert [entry.kind for entry in house.journal] == ["invitation", "enrolled"], "one use"
    assert house.enrol(peer=BERT) == "Enrolled"
    assert house.enrol(peer=CARL) == f"Refused invitation: {USED_UP}"


def test_the_holder_of_an_invitation_that_has_ended_is_told_how_it_ended() -> None:
    house = House()
    expired, withdrawn, unknown = b"x" * 32, b"w" * 32, b"u" * 32
    for key in (KEY, expired, withdrawn):
        house.invite(key)
    house.enrol(KEY, ANNA)
    house.invite(withdrawn, expires_s=0.0)
    house.now_s += DAY_S + 1.0
    for door in (house.door, house.restarted()):
        told = {
            key: (str(door.access_role(key, house.now_s)), door.enrol(key, BERT, "", house.now_s))
            for key in (KEY, expired, withdrawn, unknown)
        }
        assert {key: (role, answer.reply.reason) for key, (role, answer) in told.items()} == {
            KEY: ("guest", USED_UP),
            expired: ("guest", "this invitation has expired"),
            withdrawn: ("guest", "this invitation was withdrawn by the run's owner"),
            unknown: ("stranger", "this coordinator has no such invitation"),
        }
        assert {(answer.reply.code, answer.entries) for _, answer in told.values()} == {("invitation", ())}


def test_an_ended_invitation_is_known_for_thirty_days_and_its_digest_lets_nobody_in() -> None:
    house = House()
    house.invite(expires_s=DAY_S)
    house.now_s += 31 * DAY_S - 1.0
    assert house.standing(KEY) == "guest"
    assert house.standing(bytes.fromhex(invitation_digest(KEY))) == "stranger"
    house.now_s += 1.0
    assert house.standing(KEY) == "stranger"


def test_nobody_enrols_a_key_that_is_something_else() -> None:
    house = House()
    house.invite(uses=9)
    house.invite(OTHER_KEY)
    for key in (KEY, OTHER_KEY, OPERATOR, US):
        assert house.enrol(peer=key) == "Refused key: this key is already in use"
    assert house.standing(US) == "stranger"


def test_an_invitation_is_withdrawn() -> None:
    house = House()
    house.invite(uses=9)
    house.enrol(peer=ANNA)
    assert house.invite(expires_s=0.0) == "OperatorReply"
    assert [house.standing(key) for key in (KEY, ANNA)] == ["guest", "peer"]
    assert house.enrol(peer=BERT) == "Refused invitation: this invitation was withdrawn by the run's owner"
    assert house.invite(expires_s=0.0) == "Refused unknown: this run has no valid invitation with this key"


@pytest.mark.parametrize(
    ("uses", "expires_s", "code"),
    [(10_001, DAY_S, "bounds"), (1, 367 * DAY_S, "bounds"), (10_000, 366 * DAY_S, "")],
)
def test_bounds_of_an_invitation(uses: int, expires_s: float, code: str) -> None:
    assert (
        House()
        .invite(uses=uses, expires_s=expires_s)
        .startswith(f"Refused {code}" if code else "OperatorReply")
    )


def test_a_thousand_invitations_and_no_more_until_some_have_ended() -> None:
    house = House()
    for number in range(1000):
        assert house.invite(number.to_bytes(32, "big")) == "OperatorReply"
    assert house.invite() == "Refused too-many: 1000 invitations are open"
    house.now_s += 2 * DAY_S
    assert house.invite() == "OperatorReply"
    assert len(house.door._invitations) == 1001, "of those that have ended the latest thousand are known"
    house.now_s += 2 * DAY_S
    assert house.invite(OTHER_KEY) == "OperatorReply"
    assert len(house.door._invitations) == 1001 and house.standing(bytes(32)) == "stranger"
    house.now_s += 40 * DAY_S
    assert house.invite(b"n" * 32) == "OperatorReply"
    assert len(house.door._invitations) == 1, "none is known for longer than 30 days"


def test_a_key_cannot_be_invited_twice() -> None:
    house = House(ANNA)
    house.invite()
    for key in (KEY, ANNA, OPERATOR):
        assert house.invite(key) == "Refused known: this key is in use"


# -- kick, ban, unban ------------------------------------------------------------------------------


def test_kick_ban_and_unban() -> None:
    house = House(ANNA)
    house.invite(OTHER_KEY, uses=9)
    assert house.standing(ANNA) == "peer"
    assert house.expel(ANNA) == "OperatorReply"
    assert house.standing(ANNA) == "stranger"
    assert house.enrol(OTHER_KEY, ANNA) == (
        "Refused kicked: this worker was removed from the run: the run's owner gave no reason"
    ), "it was made before the kick"
    house.invite(KEY, uses=9)
    assert house.enrol(KEY, ANNA) == "Enrolled"
    assert house.expel(ANNA, ban=True) == "OperatorReply"
    house.invite(b"n" * 32, uses=9)
    assert house.enrol(b"n" * 32, ANNA).startswith("Refused banned")
    assert house.pardon(ANNA) == "OperatorReply"
    assert house.enrol(b"n" * 32, ANNA).startswith("Refused kicked"), "it was made before the unban"
    house.invite(b"p" * 32)
    assert house.enrol(b"p" * 32, ANNA) == "Enrolled"


def test_the_name_of_a_banned_one_outlives_a_restart_until_the_ban_is_lifted() -> None:
    house = House(ANNA, BERT)
    house.said(house.door.expel(ANNA, True, "spam", "anna\x1b"))
    house.said(house.door.expel(BERT, False, "", "bert"))
    for door in (house.door, house.restarted()):
        assert door.status(0.0)["banned"] == [{"peer": ANNA.hex(), "name": "anna", "reason": "spam"}]
    house.pardon(ANNA), house.expel(ANNA, ban=True)
    assert "name" not in house.restarted().status(0.0)["banned"][0], "nobody knew it by a name any more"


def test_orders_about_nobody() -> None:
    house = House(ANNA)
    assert house.expel(BERT) == f"Refused unknown: {BERT.hex()[:12]} is not a member"
    assert house.pardon(ANNA) == f"Refused unknown: {ANNA.hex()[:12]} is not banned"
    assert house.expel(OPERATOR).startswith("Refused ours") and house.expel(US, ban=True).startswith(
        "Refused ours"
    )
    assert house.expel(BERT, ban=True) == "OperatorReply", "a key can be banned before it comes"
    before = len(house.journal)
    assert house.expel(BERT, ban=True) == "OperatorReply" and len(house.journal) == before, "once is enough"


def test_every_order_is_carried_out_for_the_operator_alone() -> None:
    house = House(ANNA)
    orders = (m.Invite(KEY, 1, DAY_S), m.RemoveWorker(ANNA, True, ""), m.Unban(ANNA))
    for order in orders:
        assert house.said(house.door.handle_order(BERT, order, house.now_s)).startswith("Refused")
    assert [house.said(house.door.handle_order(OPERATOR, order, house.now_s)) for order in orders] == [
        "OperatorReply"
    ] * 3
    assert [entry.kind for entry in house.journal[-3:]] == ["invitation", "expelled", "pardoned"]


def test_bans_are_bounded_and_one_that_is_lifted_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_BANNED", 2)
    house = House(ANNA)
    assert [house.expel(peer, ban=True) for peer in (BERT, CARL)] == ["OperatorReply"] * 2
    assert house.expel(ANNA, ban=True) == "Refused too-many: 2 keys are banned"
    assert house.expel(ANNA) == "OperatorReply", "a kick is no ban"
    house.pardon(BERT)
    assert house.expel(ANNA, ban=True) == "OperatorReply"


def test_the_oldest_kicks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_REMOVED", 2)
    house = House(ANNA, BERT, CARL)
    house.invite(KEY, uses=9)
    for peer in (ANNA, BERT, CARL):
        house.expel(peer)
    answers = [house.enrol(KEY, peer).split(":")[0] for peer in (ANNA, BERT, CARL)]
    assert answers == ["Enrolled", "Refused kicked", "Refused kicked"]


def test_the_daemon_hears_whom_to_send_away() -> None:
    house = House(ANNA)
    assert house.door.expel(ANNA, False, "too slow\x1b[2J").removed == ((ANNA, "too slow [2J"),)


def test_where_everybody_may_come_in_a_kick_still_shuts_out() -> None:
    house = House(open_to_all=True)
    assert house.standing(ANNA) == "peer" and house.standing(US) == "stranger"
    assert house.expel(ANNA) == "OperatorReply" and house.standing(ANNA) == "stranger"
    assert house.pardon(ANNA) == "OperatorReply" and house.standing(ANNA) == "peer"


# -- strikes ---------------------------------------------------------------------------------------

# accuser: accused   what follows ("2": violations that count against the accused)
STORIES = {
    "three strikes are a kick": [
        (": anna", "1"), (": anna", "2"), (": anna", "3, anna out"), (": anna", "3"),
    ],
    "whoever they come from": [
        ("bert: anna", "1"), (": anna", "2"), ("carl: anna", "3, anna out"),
    ],
    "one accuser is enough": [
        ("bert: anna", "1"), ("bert: anna", "2"), ("bert: anna", "3, anna out"),
    ],
    "a liar": [
        ("bert: anna", "1"), ("bert: carl", ""), ("bert: dora", ""), (5.0, "bert out"), ("dora: anna", "1"),
    ],
    "a liar who was believed": [
        ("bert: anna", "1"), ("bert: anna", "2"), ("bert: anna", "3, anna out"), ("bert: carl", ""),
        (5.0, "bert out, anna back"),
    ],
    "a liar in haste does not get a second one": [
        ("bert: anna", "1"), ("bert: carl", ""), ("bert: anna", ""), ("bert: anna", ""), ("bert: carl", ""),
        (5.0, "bert out"),
    ],
    "two that attack everybody at once": [
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
def test_whom_to_believe(story: str) -> None:
    house = House(*NAMES)
    told = []
    for cause, _ in STORIES[story]:
        told.append((cause, house.accuse(cause) if isinstance(cause, str) else house.later(cause)))
    assert told == STORIES[story]
    assert house.restarted().status(house.now_s) == house.door.status(house.now_s)


def test_strikes_are_gone_with_a_new_invitation() -> None:
    house = House(*NAMES)
    assert [house.accuse(": anna") for _ in range(3)][-1] == "3, anna out"
    house.invite()
    house.enrol(peer=ANNA)
    assert house.door.violation_count(ANNA) == 0 and house.accuse(": anna") == "1"


def test_who_is_no_member_gets_no_strike() -> None:
    house = House(ANNA)
    assert house.door.record_violation(BERT, "x", ANNA, 0.0) == ViolationOutcome()


def test_a_kicked_suspect_takes_what_it_said_with_it() -> None:
    house = House(*NAMES)
    for line in (*("bert: anna",) * 3, "bert: carl"):
        house.accuse(line)
    house.expel(BERT)
    assert house.standing(ANNA) == "peer" and house.door.violation_count(CARL) == 0


def test_an_accuser_cannot_make_the_journal_grow() -> None:
    house = House(*NAMES)
    before = len(house.journal)
    for _ in range(1000):
        for victim in ("anna", "carl", "dora", "emil"):
            house.accuse(f"bert: {victim}")
    assert len(house.journal) - before <= 5, "bert is suspected after the second victim"


def test_long_reasons_fit_a_message() -> None:
    house = House(ANNA)
    for _ in range(3):
        judgement = house.door.record_violation(ANNA, "\U0001f600" * 512, None, 0.0)
    ((_, reason),) = judgement.removed
    assert len(reason.encode()) <= 300


# -- limits ----------------------------------------------------------------------------------------


def enrol_many(house: House, count: int, host: Callable[[int], str]) -> list[str]:
    words = [
        house.enrol(peer=(number + 10**9).to_bytes(32, "big"), host=host(number)) for number in range(count)
    ]
    return [word.split(":")[0] for word in words]


def test_one_household_cannot_use_up_an_invitation_for_many() -> None:
    house = House()
    house.invite(uses=1000)
    assert enrol_many(house, 70, lambda n: f"192.0.2.{n}") == ["Enrolled"] * 64 + ["Refused too-many"] * 6
    assert house.enrol(peer=ANNA, host="198.51.100.1") == "Enrolled", "others are not kept out"
    house.now_s += 600.0
    assert house.enrol(peer=BERT, host="192.0.2.1") == "Enrolled"


def test_a_clock_that_is_set_back_shuts_nobody_out() -> None:
    house = House()
    house.invite(uses=1000)
    enrol_many(house, 64, lambda n: "192.0.2.1")
    house.now_s -= 3600.0
    assert house.enrol(peer=ANNA, host="192.0.2.1") == "Enrolled"


def test_a_key_may_join_twenty_times_a_minute() -> None:
    door = House(ANNA, BERT).door
    assert [door.allow_join(ANNA, 100.0 + n) for n in range(22)] == [True] * 20 + [False] * 2
    assert door.allow_join(BERT, 122.0)
    assert [door.allow_join(ANNA, now_s) for now_s in (159.9, 160.0)] == [False, True]


def test_what_is_kept_of_joins_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_JOINERS", 100)
    door = Authorization(open_to_all=True)
    for number in range(1000):
        door.allow_join(number.to_bytes(32, "big"), float(number))
    assert len(door._joins) == 100


# -- each defence, and the attack that succeeds without it -------------------------------------------


def attack_with_an_expired_invitation() -> bool:
    house = House()
    house.invite(expires_s=60.0)
    house.now_s += 61.0
    return house.enrol(peer=ANNA) == "Enrolled"


def attack_with_a_used_invitation() -> bool:
    house = House()
    house.invite(uses=1)
    house.enrol(peer=ANNA)
    return house.enrol(peer=BERT) == "Enrolled"


def attack_with_what_the_journal_holds() -> bool:
    house = House()
    house.invite(KEY)
    return KEY.hex() in json.dumps([entry.body for entry in house.journal])


def attack_of_a_banned_key() -> bool:
    house = House(ANNA)
    house.expel(ANNA, ban=True)
    house.invite(KEY)
    return house.enrol(KEY, ANNA) == "Enrolled"


def attack_of_a_kicked_key() -> bool:
    house = House(ANNA)
    house.invite(KEY)  # kept in reserve
    house.expel(ANNA)
    return house.enrol(KEY, ANNA) == "Enrolled"


def attack_of_a_member_that_gives_orders() -> bool:
    house = House(ANNA, BERT)
    answer = house.door.handle_order(ANNA, m.RemoveWorker(BERT, True, ""), house.now_s)
    return house.standing(BERT) == "stranger" or not isinstance(answer.reply, m.Refused)


def attack_without_end() -> bool:
    house = House(*NAMES)
    for _ in range(3):
        house.accuse(": anna")
    return house.standing(ANNA) == "peer"


def attack_by_lies() -> bool:
    """bert gets all other members removed."""
    house = House(*NAMES)
    for victim in ("anna", "carl", "dora", "emil"):
        for _ in range(3):
            house.accuse(f"bert: {victim}")
    house.later(10.0)
    return house.standing(BERT) == "peer" and house.standing(EMIL) == "stranger"


def attack_of_one_household() -> bool:
    house = House()
    house.invite(uses=100)
    return enrol_many(house, 100, lambda n: "192.0.2.1") == ["Enrolled"] * 100


def attack_of_a_joiner() -> bool:
    door = House(ANNA).door
    return all(door.allow_join(ANNA, 100.0) for _ in range(1000))


DEFENCES: dict[str, Callable[[], bool]] = {
    "invite-expiry": attack_with_an_expired_invitation,
    "invite-uses": attack_with_a_used_invitation,
    "invite-hashed": attack_with_what_the_journal_holds,
    "ban": attack_of_a_banned_key,
    "kick": attack_of_a_kicked_key,
    "operator-only": attack_of_a_member_that_gives_orders,
    "three-strikes": attack_without_end,
    "liar": attack_by_lies,
    "enrol-rate": attack_of_one_household,
    "join-rate": attack_of_a_joiner,
}


@pytest.mark.parametrize("name", DEFENCES)
def test_an_attack_fails_and_succeeds_without_its_defence(name: str) -> None:
    attack = DEFENCES[name]
    assert not attack()
    with disable_defences(name):
        assert attack()


# -- the journal -----------------------------------------------------------------------------------


def live(house: House, seed: int) -> Iterator[None]:
    """Random orders, enrolments and violations."""
    rng = random.Random(seed)
    keys = [bytes([number]) * 32 for number in range(1, 7)]
    peers = list(NAMES)
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1:
                house.invite(rng.choice(keys), rng.choice([1, 1, 2, 5]), rng.choice([0.0, 50.0, DAY_S]))
            case 2 | 3:
                house.enrol(rng.choice(keys), rng.choice(peers), f"10.0.{rng.randrange(3)}.1")
            case 4:
                house.expel(rng.choice(peers), rng.random() < 0.3)
            case 5:
                house.pardon(rng.choice(peers))
            case 6:
                accuser = rng.choice([None, *peers])
                house.write(house.door.record_violation(rng.choice(peers), "x", accuser, house.now_s))
            case 7:
                house.later(rng.choice([0.1, 3.0, 40.0]))
        yield


def test_a_restarted_coordinator_knows_the_same(seeds: Callable[[int], Iterator[int]]) -> None:
    everybody = [bytes([number]) * 32 for number in range(1, 7)] + [*NAMES, OPERATOR, US]
    for seed in seeds(150):
        house = House(open_to_all=seed % 4 == 0)
        for _ in live(house, seed):
            pass
        again = house.restarted()
        house.later(0.0)
        again.tick(house.now_s)
        assert again.status(house.now_s) == house.door.status(house.now_s), f"seed {seed}"
        for wait_s in (0.0, 45.0, 2 * DAY_S):
            for key in everybody:
                wall_s = house.now_s + wait_s
                assert again.access_role(key, wall_s) == house.door.access_role(key, wall_s), f"seed {seed}"


def test_restarts_in_between_change_nothing(seeds: Callable[[int], Iterator[int]]) -> None:
    """A coordinator that restarts after every event gives the same answers."""
    for seed in seeds(30):
        steady, restarting = House(), House()
        for _ in zip(live(steady, seed), live(restarting, seed), strict=True):
            suspects = (
                restarting.door._violations._suspects
            )  # their time for confirmation is not in the journal, so it starts again
            restarting.door = restarting.restarted()
            restarting.door._violations._suspects = suspects
            wall_s = steady.now_s
            assert restarting.door.status(wall_s) == steady.door.status(wall_s), f"seed {seed}"
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
def test_nonsense_in_the_journal_is_refused_or_read(entries: list[tuple[str, dict[str, Any]]]) -> None:
    try:
        door = recover_authorization(entries)
    except (KeyError, TypeError, ValueError):
        return
    json.dumps(door.status(0.0))
    door.tick(0.0)
    assert door.access_role(ANNA, 0.0) in AccessRole


@pytest.mark.parametrize(
    "entry",
    [
        ("invitation", {"key": "ab", "uses": 1, "until_s": 1.0, "at_s": 0.0}),
        ("invitation", {"key": "ab" * 32, "uses": True, "until_s": 1.0, "at_s": 0.0}),
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
def test_entries_that_no_door_wrote(entry: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        recover_authorization([entry])


def test_how_long_invitations_hold_is_shown_in_tenths_of_a_second() -> None:
    house = House()
    house.invite(expires_s=60.04)
    assert house.door.status(house.now_s)["invitations"][0]["left_s"] == 60.0
    assert house.door.status(house.now_s + 0.5)["invitations"][0]["left_s"] == 59.5


def test_the_picture_shows_nothing_to_come_in_with() -> None:
    house = House(ANNA, BERT)
    house.invite(KEY, uses=3)
    house.enrol(KEY, CARL)
    house.accuse("bert: anna")
    house.accuse(": anna")
    house.expel(BERT, ban=True)
    shown = json.loads(json.dumps(house.door.status(house.now_s)))
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
        "banned": [{"peer": BERT.hex(), "reason": "the run's owner gave no reason"}],
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


def test_the_words_are_those_of_the_transport() -> None:
    from gridtrain.network.transport import interface

    assert [interface.ConnectionRole(word) for word in module.AccessRole] == list(interface.ConnectionRole)
