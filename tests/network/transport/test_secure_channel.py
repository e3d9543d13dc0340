"""End-to-end encryption, packet by packet: attacks of a relay, and their results."""

from __future__ import annotations

import random

import pytest

from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.transport import secure_channel
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.secure_channel import PacketRejected, RejectReason, SecureChannel
from gridtrain.network.transport.send_queue import MAX_ENCRYPTED_CONTROL_BYTES
from gridtrain.network.wire import codec

Packet = bytes


class End:
    """A channel, and all messages that it has decrypted."""

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


class PacketPath:
    """anna and bert, and every packet between them."""

    def __init__(self) -> None:
        a, b = Identity.generate(), Identity.generate()
        self.identities = a, b
        self.anna, self.bert = End(a, b, "anna"), End(b, a, "bert")
        self.seen: list[tuple[End, Packet]] = []  # (to whom, what)

    def other(self, end: End) -> End:
        return self.bert if end is self.anna else self.anna

    def carry(self, to: End, *packets: Packet) -> None:
        """Deliver packets and the answers to them, until there are none."""
        queue = [(to, packet) for packet in packets]
        while queue:
            to, packet = queue.pop(0)
            self.seen.append((to, packet))
            queue += [(self.other(to), answer) for answer in to.take(packet)]

    def standing(self) -> bool:
        sessions = self.anna.channel.session, self.bert.channel.session
        return all(session is not None and session.is_confirmed for session in sessions)

    def open(self) -> PacketPath:
        self.carry(self.bert, self.anna.channel.make_call())
        assert self.standing()
        return self


@pytest.fixture
def path() -> PacketPath:
    return PacketPath().open()


# -- without an attacker -----------------------------------------------------------------------------


def test_one_call_opens_a_session_and_carries_both_greetings(path):
    assert path.anna.greetings == [b"bert"] and path.bert.greetings == [b"anna"]
    path.carry(path.bert, *path.anna.seal(b"h1", b"payload"))
    path.carry(path.anna, *path.bert.seal(b"h2"))
    assert path.bert.got == [[b"h1", b"payload"]]
    assert path.anna.got == [[b"h2"]]
    assert path.anna.refused == path.bert.refused == []


def test_both_call_at_once():
    path = PacketPath()
    to_bert, to_anna = path.anna.channel.make_call(), path.bert.channel.make_call()
    path.carry(path.anna, to_anna)
    path.carry(path.bert, to_bert)
    assert path.standing()
    assert len(path.anna.greetings) == len(path.bert.greetings) == 1


def test_calling_again_before_an_answer_is_the_same_call(path):
    path = PacketPath()
    calls = [path.anna.channel.make_call() for _ in range(3)]
    path.carry(path.bert, *calls)
    assert path.standing() and len(path.bert.greetings) == 1


def test_an_answer_that_was_lost_is_given_again():
    path = PacketPath()
    path.seen.clear()
    (from_bert,) = path.bert.take(path.anna.channel.make_call())
    opening = path.anna.take(from_bert)  # lost
    assert len(opening) == 2 and not path.standing()
    path.carry(path.anna, path.bert.channel.make_call())
    assert path.standing() and path.anna.greetings == [b"bert"]
    path.carry(path.bert, *path.anna.seal(b"after"), *opening)
    assert path.bert.got == [[b"after"]] and path.bert.refused == [RejectReason.REPLAYED]


@pytest.mark.parametrize("who", ["anna", "bert"])
def test_a_side_that_lost_its_session_gets_a_new_one(path, who):
    end = getattr(path, who)
    end.channel.reset()
    path.carry(path.other(end), end.channel.make_call())
    assert path.standing()
    assert len(path.anna.greetings) == len(path.bert.greetings) == 2
    path.carry(path.bert, *path.anna.seal(b"after"))
    assert path.bert.got == [[b"after"]]


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
def test_frames_come_out_as_they_went_in(path, frames, bulk):
    packets = path.anna.seal(*frames, bulk=bulk)
    opened = [path.bert.channel.decrypt(memoryview(packet)) for packet in packets]
    assert opened[:-1] == [None] * (len(packets) - 1)
    assert [bytes(frame) for frame in opened[-1]] == frames
    assert max(map(len, packets)) < secure_channel.PIECE_BYTES + 64


def test_the_largest_message_of_the_protocol_goes_through(path):
    frames = [b"h" * codec.MAX_HEADER_BYTES, bytes(codec.MAX_PAYLOAD_BYTES)]
    for packet in path.anna.seal(*frames, bulk=True):
        opened = path.bert.channel.decrypt(packet)
    assert [len(frame) for frame in opened] == [len(frame) for frame in frames]


def test_control_fits_what_a_relay_lets_go_first(path):
    (packet,) = path.anna.seal(b"h" * (codec.MAX_HEADER_BYTES - 5))
    assert packet[0] == secure_channel.PacketClass.CONTROL and len(packet) <= MAX_ENCRYPTED_CONTROL_BYTES


def test_control_may_overtake_bulk(path):
    bulk = path.anna.seal(b"bulk", bytes(600_000), bulk=True)
    control = path.anna.seal(b"vote")
    path.carry(path.bert, bulk[0], *control, *bulk[1:])
    assert [frames[0] for frames in path.bert.got] == [b"vote", b"bulk"]
    assert path.bert.refused == []


# -- what a relay may try ----------------------------------------------------------------------------


def test_it_reads_nothing(path):
    secret = b"gradient of anna" * 4
    packets = [*path.anna.seal(b"header", secret), *path.anna.seal(b"header", secret, bulk=True)]
    everything = b"".join([packet for _, packet in path.seen] + packets)
    for plain in (secret[:16], b"header", b"anna", b"bert"):
        assert plain not in everything
    assert packets[0][17:] != packets[1][17:]


def test_one_flipped_bit_anywhere_is_noticed(path):
    offer = path.anna.channel.make_call()
    path = PacketPath().open()
    (packet,) = path.anna.seal(b"header", b"payload")
    for kind, whole in (("sealed", packet), ("offer", offer)):
        for bit in range(8 * len(whole)):
            altered = bytearray(whole)
            altered[bit // 8] ^= 1 << bit % 8
            answers = path.bert.take(bytes(altered))
            assert (path.bert.got, answers) == ([], []), f"bit {bit} of the {kind} packet"
    path.carry(path.bert, packet)
    assert path.bert.got == [[b"header", b"payload"]] and path.standing()


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
def test_within_a_session(path, attack, why):
    packets = [packet for n in range(2) for packet in path.anna.seal(b"%d" % n)]
    for packet in attack(packets):
        path.bert.take(packet)
    assert path.bert.refused[: len(why)] == why
    assert path.bert.got in ([], [[b"0"]])


def test_reflecting(path):
    offer = path.anna.channel.make_call()
    assert path.anna.take(offer) == []
    path.open()
    for packet in path.anna.seal(b"mine"):
        path.anna.take(packet)
    assert path.anna.got == [] and path.anna.refused == [RejectReason.FORGED, RejectReason.FORGED]


def test_a_recorded_session_means_nothing_to_the_next(path):
    path.carry(path.bert, *path.anna.seal(b"pay 5"))
    recorded = list(path.seen)
    path.anna.channel.reset()
    path.carry(path.bert, path.anna.channel.make_call())
    path.bert.got.clear()
    for to, packet in recorded:
        path.carry(to, packet)
    assert path.bert.got == [] and path.standing()
    assert len(path.bert.greetings) == 2, "a recorded handshake has opened a session"


def test_splicing_two_pairs(path):
    """Packets of carl and dora, sent to bert as anna's, and anna's sent to dora."""
    other = PacketPath().open()
    for packet in (*other.anna.seal(b"for dora"), other.anna.channel.make_call()):
        assert path.bert.take(packet) == []
    assert path.bert.got == [] and path.standing()


def test_an_old_call_does_not_end_a_session_that_stands(path):
    old_calls = [(path.bert, path.anna.channel.make_call())]
    path.carry(*old_calls[0])
    old_calls.append((path.anna, path.bert.channel.make_call()))
    path.carry(*old_calls[1])
    assert path.standing()
    sessions = path.anna.channel.session, path.bert.channel.session
    for to, call in old_calls * 3:
        path.carry(to, call)
    assert (path.anna.channel.session, path.bert.channel.session) == sessions


def test_an_answer_that_was_held_back_does_not_end_a_session_that_stands():
    """bert answers one call twice, with a restart in between; the relay delivers the older answer last."""
    path = PacketPath()
    call = path.anna.channel.make_call()
    (held,) = path.bert.take(call)
    path.bert.channel.reset()
    path.carry(path.bert, call)
    assert path.standing()
    session = path.anna.channel.session
    path.carry(path.anna, held)
    assert path.anna.channel.session is session


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_everything_at_any_time_change_nothing(seed):
    """The relay forwards everything in order and adds copies of what it has seen."""
    rng = random.Random(seed)
    print("seed", seed)
    path = PacketPath()
    wires: dict[str, list[Packet]] = {"anna": [], "bert": [], "copies": []}
    ends = {"anna": path.anna, "bert": path.bert}
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
        assert path.standing()
        sessions = path.anna.channel.session, path.bert.channel.session
        for name in genuine:
            genuine[name] += 1
        for n in range(20):
            name = rng.choice(["anna", "bert"])
            frames = [b"%s %d" % (name.encode(), n), bytes(rng.randrange(3000))]
            sent[name].append(frames)
            put(other(name), ends[name].seal(*frames, bulk=True))
            deliver_all(2)
        assert (path.anna.channel.session, path.bert.channel.session) == sessions
    assert {name: len(end.greetings) for name, end in ends.items()} == genuine
    assert path.bert.got == sent["anna"] and path.anna.got == sent["bert"]


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
def test_nonsense_inside_is_the_peers_fault(path, plain):
    packet = path.anna.channel.session._encrypt_packet(plain, bulk=True)
    with pytest.raises(RemoteProtocolError) as raised:
        path.bert.channel.decrypt(packet)
    assert not isinstance(raised.value, PacketRejected)


def test_pieces_without_end_are_refused(path):
    piece = b"\1" + bytes(8 * 2**20)
    with pytest.raises(RemoteProtocolError, match="is longer than"):
        for _ in range(10):
            path.bert.channel.decrypt(path.anna.channel.session._encrypt_packet(piece, bulk=True))


def test_a_key_that_is_nobodys_is_refused():
    for key in (bytes(32), b"short"):
        with pytest.raises(TransportError, match="is not a public key"):
            SecureChannel(Identity.generate(), key, b"")
