"""The sealed road, packet by packet: what a relay may try with what it sees, and what comes of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from defences import disable_defences

from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.transport import secure_channel
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.secure_channel import PacketRejected, RejectReason, SecureChannel
from gridtrain.network.transport.send_queue import MAX_ENCRYPTED_CONTROL_BYTES
from gridtrain.network.wire import codec

Packet = bytes


class End:
    """A channel, and all that came out of it."""

    def __init__(self, mine: Identity, theirs: Identity, name: str) -> None:
        self.channel = SecureChannel(mine, theirs.public, name.encode())
        self.greetings: list[bytes] = []
        self.got: list[list[bytes]] = []
        self.refused: list[RejectReason] = []

    def take(self, packet: Packet) -> list[Packet]:
        """Returns what it answers."""
        try:
            if secure_channel.is_offer(packet):
                answer = self.channel.handle_offer(packet)
                if answer.greeting is not None:
                    self.greetings.append(answer.greeting)
                return list(answer.packets)
            frames = self.channel.decrypt(packet)
            if frames:
                self.got.append([bytes(frame) for frame in frames])
        except PacketRejected as problem:
            self.refused.append(problem.reject_reason)
        return []

    def seal(self, *frames: bytes, bulk: bool = False) -> list[Packet]:
        assert self.channel.session is not None
        return self.channel.session.encrypt(list(frames), bulk=bulk)


class Road:
    """anna and bert, and every packet that passed between them."""

    def __init__(self) -> None:
        a, b = Identity.generate(), Identity.generate()
        self.identities = a, b
        self.anna, self.bert = End(a, b, "anna"), End(b, a, "bert")
        self.seen: list[tuple[End, Packet]] = []  # (to whom, what)

    def other(self, end: End) -> End:
        return self.bert if end is self.anna else self.anna

    def carry(self, to: End, *packets: Packet) -> None:
        """Deliver, and all that is answered, until nobody says any more."""
        queue = [(to, packet) for packet in packets]
        while queue:
            to, packet = queue.pop(0)
            self.seen.append((to, packet))
            queue += [(self.other(to), answer) for answer in to.take(packet)]

    def standing(self) -> bool:
        sessions = self.anna.channel.session, self.bert.channel.session
        return all(session is not None and session.is_confirmed for session in sessions)

    def open(self) -> Road:
        self.carry(self.bert, self.anna.channel.make_call())
        assert self.standing()
        return self


@pytest.fixture
def road() -> Road:
    return Road().open()


# -- without an attacker -----------------------------------------------------------------------------


def test_one_call_opens_a_session_and_carries_both_greetings(road):
    assert road.anna.greetings == [b"bert"] and road.bert.greetings == [b"anna"]
    road.carry(road.bert, *road.anna.seal(b"h1", b"payload"))
    road.carry(road.anna, *road.bert.seal(b"h2"))
    assert road.bert.got == [[b"h1", b"payload"]]
    assert road.anna.got == [[b"h2"]]
    assert road.anna.refused == road.bert.refused == []


def test_both_call_at_once():
    road = Road()
    to_bert, to_anna = road.anna.channel.make_call(), road.bert.channel.make_call()
    road.carry(road.anna, to_anna)
    road.carry(road.bert, to_bert)
    assert road.standing()
    assert len(road.anna.greetings) == len(road.bert.greetings) == 1


def test_calling_again_before_an_answer_is_the_same_call(road):
    road = Road()
    calls = [road.anna.channel.make_call() for _ in range(3)]
    road.carry(road.bert, *calls)
    assert road.standing() and len(road.bert.greetings) == 1


def test_an_answer_that_was_lost_is_given_again():
    road = Road()
    road.seen.clear()
    (from_bert,) = road.bert.take(road.anna.channel.make_call())
    opening = road.anna.take(from_bert)  # lost
    assert len(opening) == 2 and not road.standing()
    road.carry(road.anna, road.bert.channel.make_call())
    assert road.standing() and road.anna.greetings == [b"bert"]
    road.carry(road.bert, *road.anna.seal(b"after"), *opening)
    assert road.bert.got == [[b"after"]] and road.bert.refused == [RejectReason.REPLAYED]


@pytest.mark.parametrize("who", ["anna", "bert"])
def test_a_side_that_lost_its_session_gets_a_new_one(road, who):
    end = getattr(road, who)
    end.channel.reset()
    road.carry(road.other(end), end.channel.make_call())
    assert road.standing()
    assert len(road.anna.greetings) == len(road.bert.greetings) == 2
    road.carry(road.bert, *road.anna.seal(b"after"))
    assert road.bert.got == [[b"after"]]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"header"],
        [b"header", b""],
        [b"header", b"x" * (secure_channel.PIECE_BYTES - 11)],
        [b"header", b"x" * (secure_channel.PIECE_BYTES - 10)],
        [b"header", bytes(range(256)) * 4099],
        [b"h" * codec.MAX_HEADER_BYTES],
    ],
    ids=lambda frames: "+".join(str(len(frame)) for frame in frames) or "none",
)
@pytest.mark.parametrize("bulk", [False, True])
def test_frames_come_out_as_they_went_in(road, frames, bulk):
    packets = road.anna.seal(*frames, bulk=bulk)
    opened = [road.bert.channel.decrypt(memoryview(packet)) for packet in packets]
    assert opened[:-1] == [None] * (len(packets) - 1)
    assert [bytes(frame) for frame in opened[-1]] == frames
    assert max(map(len, packets)) < secure_channel.PIECE_BYTES + 64


def test_the_largest_message_of_the_protocol_goes_through(road):
    frames = [b"h" * codec.MAX_HEADER_BYTES, bytes(codec.MAX_PAYLOAD_BYTES)]
    for packet in road.anna.seal(*frames, bulk=True):
        opened = road.bert.channel.decrypt(packet)
    assert [len(frame) for frame in opened] == [len(frame) for frame in frames]


def test_control_fits_what_a_relay_lets_go_first(road):
    (packet,) = road.anna.seal(b"h" * (codec.MAX_HEADER_BYTES - 5))
    assert packet[0] == secure_channel.PacketClass.CONTROL and len(packet) <= MAX_ENCRYPTED_CONTROL_BYTES


def test_control_may_overtake_bulk(road):
    bulk = road.anna.seal(b"bulk", bytes(600_000), bulk=True)
    control = road.anna.seal(b"vote")
    road.carry(road.bert, bulk[0], *control, *bulk[1:])
    assert [frames[0] for frames in road.bert.got] == [b"vote", b"bulk"]
    assert road.bert.refused == []


# -- what a relay may try ----------------------------------------------------------------------------


def test_it_reads_nothing(road):
    secret = b"gradient of anna" * 4
    packets = [*road.anna.seal(b"header", secret), *road.anna.seal(b"header", secret, bulk=True)]
    everything = b"".join([packet for _, packet in road.seen] + packets)
    for plain in (secret[:16], b"header", b"anna", b"bert"):
        assert plain not in everything
    assert packets[0][17:] != packets[1][17:]


def test_one_flipped_bit_anywhere_is_noticed(road):
    offer = road.anna.channel.make_call()
    road = Road().open()
    (packet,) = road.anna.seal(b"header", b"payload")
    for kind, whole in (("sealed", packet), ("offer", offer)):
        for bit in range(8 * len(whole)):
            altered = bytearray(whole)
            altered[bit // 8] ^= 1 << bit % 8
            answers = road.bert.take(bytes(altered))
            assert (road.bert.got, answers) == ([], []), f"bit {bit} of the {kind} packet"
    road.carry(road.bert, packet)
    assert road.bert.got == [[b"header", b"payload"]] and road.standing()


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (lambda packets: [packets[0], packets[0]], [RejectReason.REPLAYED]),
        (lambda packets: [packets[1]], [RejectReason.LOST]),
        (lambda packets: [packets[1], packets[0]], [RejectReason.LOST]),
        (lambda packets: [packets[0][:-1]], [RejectReason.FORGED]),
        (lambda packets: [packets[0] + b"\0"], [RejectReason.FORGED]),
        (lambda packets: [b""], [RejectReason.FORGED]),
        (
            lambda packets: [bytes([secure_channel.PacketClass.BULK]) + packets[0][1:]],
            [RejectReason.FORGED],
        ),  # control as bulk
        (lambda packets: [b"\x09" + packets[0][1:]], [RejectReason.FORGED]),
        (lambda packets: [packets[0][:9] + packets[1][9:17] + packets[0][17:]], [RejectReason.FORGED]),
    ],
    ids=["repeat", "skip", "reorder", "cut", "append", "empty", "other-lane", "no-lane", "other-counter"],
)
def test_within_a_session(road, attack, why):
    packets = [packet for n in range(2) for packet in road.anna.seal(b"%d" % n)]
    for packet in attack(packets):
        road.bert.take(packet)
    assert road.bert.refused[: len(why)] == why
    assert road.bert.got in ([], [[b"0"]])


def test_reflecting(road):
    offer = road.anna.channel.make_call()
    assert road.anna.take(offer) == []
    road.open()
    for packet in road.anna.seal(b"mine"):
        road.anna.take(packet)
    assert road.anna.got == [] and road.anna.refused == [RejectReason.FORGED, RejectReason.FORGED]


def test_a_recorded_session_means_nothing_to_the_next(road):
    road.carry(road.bert, *road.anna.seal(b"pay 5"))
    recorded = list(road.seen)
    road.anna.channel.reset()
    road.carry(road.bert, road.anna.channel.make_call())
    road.bert.got.clear()
    for to, packet in recorded:
        road.carry(to, packet)
    assert road.bert.got == [] and road.standing()
    assert len(road.bert.greetings) == 2, "a recorded handshake has opened a session"


def test_splicing_two_pairs(road):
    """carl and dora's bytes, given to bert as anna's, and anna's to dora."""
    other = Road().open()
    for packet in (*other.anna.seal(b"for dora"), other.anna.channel.make_call()):
        assert road.bert.take(packet) == []
    assert road.bert.got == [] and road.standing()


def test_an_old_call_does_not_end_a_session_that_stands(road):
    old_calls = [(road.bert, road.anna.channel.make_call())]
    road.carry(*old_calls[0])
    old_calls.append((road.anna, road.bert.channel.make_call()))
    road.carry(*old_calls[1])
    assert road.standing()
    sessions = road.anna.channel.session, road.bert.channel.session
    for to, call in old_calls * 3:
        road.carry(to, call)
    assert (road.anna.channel.session, road.bert.channel.session) == sessions


def test_an_answer_that_was_held_back_does_not_end_a_session_that_stands():
    """bert answered one call twice, with a restart in between; the relay brings the older answer last."""
    road = Road()
    call = road.anna.channel.make_call()
    (held,) = road.bert.take(call)
    road.bert.channel.reset()
    road.carry(road.bert, call)
    assert road.standing()
    session = road.anna.channel.session
    road.carry(road.anna, held)
    assert road.anna.channel.session is session


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_everything_at_any_time_change_nothing(seed):
    """The relay carries what is sent, in order, and puts in copies of whatever it has ever seen."""
    rng = random.Random(seed)
    print("seed", seed)
    road = Road()
    wires: dict[str, list[Packet]] = {"anna": [], "bert": [], "copies": []}
    ends = {"anna": road.anna, "bert": road.bert}
    recorded: list[tuple[str, Packet]] = []
    sent: dict[str, list[list[bytes]]] = {"anna": [], "bert": []}
    genuine = {"anna": 0, "bert": 0}  # sessions that somebody asked for

    def put(to: str, packets: list[Packet]) -> None:
        wires[to] += packets
        recorded.extend((to, packet) for packet in packets)

    def other(name: str) -> str:
        return "bert" if name == "anna" else "anna"

    def deliver_all(copies: int) -> None:
        while wires["anna"] or wires["bert"]:
            to = rng.choice([name for name in ends if wires[name]])
            put(other(to), ends[to].take(wires[to].pop(0)))
            for _ in range(rng.randrange(copies + 1)):
                name, packet = rng.choice(recorded)
                put(other(name), ends[name].take(packet))

    for _ in range(6):
        caller = rng.choice(["anna", "bert"])
        put(other(caller), [ends[caller].channel.make_call()])
        deliver_all(0)
        assert road.standing()
        sessions = road.anna.channel.session, road.bert.channel.session
        for name in genuine:
            genuine[name] += 1
        for n in range(20):
            name = rng.choice(["anna", "bert"])
            frames = [b"%s %d" % (name.encode(), n), bytes(rng.randrange(3000))]
            sent[name].append(frames)
            put(other(name), ends[name].seal(*frames, bulk=True))
            deliver_all(2)
        assert (road.anna.channel.session, road.bert.channel.session) == sessions
    assert {name: len(end.greetings) for name, end in ends.items()} == genuine
    assert road.bert.got == sent["anna"] and road.anna.got == sent["bert"]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_a_relay_does_only_a_beginning_of_what_was_sent_comes_out(seed):
    """Drops, copies, any order, altered bits, packets to the wrong end: all at once."""
    rng = random.Random(seed)
    print("seed", seed)
    road = Road()
    pool: list[Packet] = []
    said: dict[End, set[bytes]] = {road.anna: set(), road.bert: set()}
    for n in range(400):
        end = rng.choice([road.anna, road.bert])
        choice = rng.random()
        session = end.channel.session
        if choice < 0.05:
            pool.append(end.channel.make_call())
        elif choice < 0.3 and session is not None:
            words = b"%d" % n
            said[end].add(words)
            pool += end.seal(words, bulk=rng.random() < 0.5)
        elif pool:
            packet = rng.choice(pool[-6:] if rng.random() < 0.7 else pool)
            if rng.random() < 0.1:
                altered = bytearray(packet)
                altered[rng.randrange(len(packet))] ^= 1 << rng.randrange(8)
                packet = bytes(altered)
            pool += end.take(packet)
    for end in (road.anna, road.bert):
        heard = [frames[0] for frames in end.got]
        assert len(set(heard)) == len(heard), "something came twice"
        assert set(heard) <= said[road.other(end)], "something was made up"


# -- a peer that breaks the rules inside its own seal ------------------------------------------------


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"\2",
        b"\0",
        b"\0\1\0\0\0",
        b"\0\3\0\0\0\0",
        b"\0\1\5\0\0\0abc",
        b"\0\2\xff\xff\xff\xffab",
        b"\0\0\0\0\0\0x",
    ],
    ids=lambda plain: plain.hex() or "nothing",
)
def test_nonsense_inside_is_the_peers_fault(road, plain):
    packet = road.anna.channel.session._encrypt_packet(plain, bulk=True)
    with pytest.raises(RemoteProtocolError) as raised:
        road.bert.channel.decrypt(packet)
    assert not isinstance(raised.value, PacketRejected)


def test_pieces_without_end_are_refused(road):
    piece = b"\1" + bytes(8 * 2**20)
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        for _ in range(10):
            road.bert.channel.decrypt(road.anna.channel.session._encrypt_packet(piece, bulk=True))


def test_a_key_that_is_nobodys_is_refused():
    for key in (bytes(32), b"short"):
        with pytest.raises(TransportError, match="is not a public key"):
            SecureChannel(Identity.generate(), key, b"")


# -- the defences can be switched off ----------------------------------------------------------------


def tamper(road: Road) -> None:
    (packet,) = road.anna.seal(b"header", b"pay 5")
    road.bert.take(packet[:-1] + bytes([packet[-1] ^ 3]))


def repeat(road: Road) -> None:
    for packet in road.anna.seal(b"pay 5") * 2:
        road.bert.take(packet)


@pytest.mark.parametrize(
    ("name", "attack", "defended", "undefended"),
    [
        ("seal", tamper, [], [[b"header", b"pay 6"]]),
        ("replay", repeat, [[b"pay 5"]], [[b"pay 5"]] * 2),
    ],
)
def test_the_attack_succeeds_only_without_the_defence(
    name: str, attack: Callable[[Road], None], defended: list[list[bytes]], undefended: list[list[bytes]]
) -> None:
    road = Road().open()
    attack(road)
    assert road.bert.got == defended
    with disable_defences(name):
        road = Road().open()
        attack(road)
    assert road.bert.got == undefended
