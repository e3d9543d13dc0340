"""Two peers that cannot be dialled, and a relay between them, first honest, then hostile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from faulty_hub import FaultyHub

from gridtrain.core.messages import (
    RELAY_PREFIX,
    Channel,
    CollectivePhase,
    Data,
    Hello,
    Leave,
    Message,
    PayloadSlot,
    Ping,
    RelayedMessage,
    RelayFailed,
    RelayRequest,
    RoundId,
)
from gridtrain.errors import LocalProtocolError, TransportError
from gridtrain.network.transport import relay_forwarder
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import MemoryTransport
from gridtrain.network.transport.interface import (
    RELAYED_PIECE,
    PeerDown,
    PeerUp,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
    allow_all,
)
from gridtrain.network.transport.relay import CONFIRM_S, RelayTransport, relay_for_nobody
from gridtrain.network.transport.secure_channel import PIECE_BYTES
from gridtrain.network.transport.send_queue import ENCRYPTED_BULK, MAX_ENCRYPTED_CONTROL_BYTES, is_bulk
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.network.wire import codec

SOON_S = CONFIRM_S / 2
"""At most: what is only noticed by a deadline takes longer."""


def everybody(origin: bytes, to: bytes) -> bool:
    return True


def data(index: int, payload: object = b"x") -> Data:
    return Data(
        RoundId(1, 1, 0, 0), Channel(), PayloadSlot(CollectivePhase.REDUCE, segment=index), 0, payload
    )


class Party:
    """An endpoint and what it reported."""

    def __init__(self, name: str, identity: Identity, transport: Transport, world: World) -> None:
        self.name, self.identity, self.transport, self.world = name, identity, transport, world
        self.key = identity.public
        self.events: list[TransportEvent] = []

    def story(self) -> list[str]:
        lines = []
        for event in self.events:
            who = self.world.names.get(event.peer, "?")
            match event:
                case PeerUp():
                    lines.append(f"up {who}")
                case PeerDown():
                    lines.append(f"down {who}")
                case Received(message=Ping(nonce=nonce)):
                    lines.append(f"Ping {nonce} from {who}")
                case Received(message=message):
                    lines.append(f"{type(message).__name__} from {who}")
                case TransportViolation():
                    lines.append(f"violation {who}")
        return lines

    def about(self, other: Party) -> list[str]:
        return [line for line in self.story() if line.endswith(other.name)]

    def got(self, kind: type[Message]) -> list[Message]:
        return [e.message for e in self.events if isinstance(e, Received) and isinstance(e.message, kind)]


class World:
    """anna and bert dial out only; carl is the relay."""

    def __init__(self) -> None:
        self.hub = FaultyHub()
        self.names: dict[bytes | None, str] = {}
        self.parties: list[Party] = []

    def add(self, name: str, build: Callable[[Transport, Identity], Transport], **options: object) -> Party:
        identity = Identity.generate()
        self.names[identity.public] = name
        inner = MemoryTransport(identity.public, self.hub, **options)  # type: ignore[arg-type]
        party = Party(name, identity, build(inner, identity), self)
        self.parties.append(party)
        return party

    def relaying(
        self, name: str, may_relay: relay_forwarder.RelayPolicy = relay_for_nobody, **options: object
    ) -> Party:
        return self.add(
            name, lambda inner, identity: RelayTransport(inner, identity, may_relay=may_relay), **options
        )

    def turn(self, parties: list[Party] | None = None) -> None:
        for party in self.parties if parties is None else parties:
            party.events += party.transport.poll(0.001)

    def until(self, condition: Callable[[], object], deadline_s: float = 10.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            stories = {party.name: party.story()[-10:] for party in self.parties}
            assert time.monotonic() < end_s, f"not within {deadline_s} s; so far {stories}"
            self.turn()

    def close(self) -> None:
        for party in self.parties:
            party.transport.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def meet(world: World, anna: Party, bert: Party, carl: Party) -> None:
    """Both dial carl, and each other through carl."""
    carl.transport.listen("memory://carl")
    for party, other in ((anna, bert), (bert, anna)):
        party.transport.dial(carl.key, "memory://carl")
        party.transport.dial(other.key, relay_address(carl.key))
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))


def relay_address(relay: bytes) -> str:
    return RELAY_PREFIX + relay.hex()


def three(world: World, **options: object) -> tuple[Party, Party, Party]:
    anna, bert = world.relaying("anna", **options), world.relaying("bert")
    carl = world.relaying("carl", everybody)
    meet(world, anna, bert, carl)
    return anna, bert, carl


# -- an honest relay ---------------------------------------------------------------------------------


def test_two_that_cannot_be_dialled_talk_through_a_third(world):
    anna, bert, carl = three(world)
    anna.transport.send(bert.key, Ping(1))
    bert.transport.send(anna.key, data(7, b"payload"))
    world.until(lambda: bert.got(Ping) and anna.got(Data))
    assert anna.about(bert) == ["up bert", "Data from bert"]
    assert bert.about(anna) == ["up anna", "Ping 1 from anna"]
    assert bytes(anna.got(Data)[0].payload) == b"payload"
    assert carl.story() == ["up anna", "up bert"], "what is relayed is no event for the relay's loop"
    assert (
        "RelayRequest" in anna.transport.traffic.sent_bytes
        and "Data" not in anna.transport.traffic.sent_bytes
    )
    assert carl.transport.traffic.received_messages.keys() >= {"RelayRequest"}
    assert carl.transport.traffic.sent_messages.keys() >= {"RelayedMessage"}


def test_the_two_ends_count_relayed_messages_by_type_and_the_relay_counts_none_as_its_own(world):
    anna, bert, carl = three(world)
    anna.transport.send(bert.key, Ping(1))
    anna.transport.send(bert.key, data(0, bytes(2 * PIECE_BYTES)))
    world.until(lambda: bert.got(Ping) and bert.got(Data))
    sent, received = anna.transport.traffic.relayed_sent_bytes, bert.transport.traffic.relayed_received_bytes
    assert sent.keys() == {"Ping", "Data"} and received.keys() == {"Ping", "Data", RELAYED_PIECE}
    assert received["Data"] == sent["Data"] > 2 * PIECE_BYTES < received[RELAYED_PIECE]
    relay = carl.transport.traffic
    assert relay.sent_bytes["RelayedMessage"] > sent["Data"]
    assert not relay.relayed_sent_bytes and not relay.relayed_received_bytes


def test_the_relay_sees_no_plain_text(world):
    """Searches everything that the relay receives for what was sent."""
    anna, bert = world.relaying("anna"), world.relaying("bert")
    carl, spy = hostile(world)
    spy.behave = spy.honest
    meet(world, anna, bert, carl)
    gradient = random.Random(1).randbytes(700_000)
    anna.transport.send(bert.key, data(0, gradient))
    anna.transport.send(bert.key, Leave("bert-laptop.example.org goes home"))
    world.until(lambda: bert.got(Data) and bert.got(Leave))
    seen = b"".join(spy.seen)
    assert len(seen) > len(gradient)
    for plain in (gradient[:8], gradient[5000:5008], b"laptop", b"gridtrain", anna.key, bert.key):
        assert plain not in seen, plain
    assert bytes(bert.got(Data)[0].payload) == gradient


def test_order_is_kept_and_control_overtakes(world):
    anna, bert, _carl = three(world, upload_Bps=4e6)
    for index in range(6):
        anna.transport.send(bert.key, data(index, bytes(300_000)))
    anna.transport.send(bert.key, Ping(1))
    world.until(lambda: len(bert.got(Data)) == 6)
    assert [message.slot.segment for message in bert.got(Data)] == list(range(6))
    assert bert.about(anna)[:2] == ["up anna", "Ping 1 from anna"]


def test_the_relay_comes_late(world):
    anna, bert = world.relaying("anna"), world.relaying("bert")
    carl = world.relaying("carl", everybody)
    for party, other in ((anna, bert), (bert, anna)):
        party.transport.dial(other.key, relay_address(carl.key))
        party.transport.dial(carl.key, "memory://carl")
    world.turn()
    assert not anna.transport.connected(bert.key)
    with pytest.raises(TransportError, match="not connected"):
        anna.transport.send(bert.key, Ping(1))
    carl.transport.listen("memory://carl")
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))


def test_the_other_dials_late(world):
    anna, bert = world.relaying("anna"), world.relaying("bert")
    carl = world.relaying("carl", everybody)
    carl.transport.listen("memory://carl")
    anna.transport.dial(carl.key, "memory://carl")
    anna.transport.dial(bert.key, relay_address(carl.key))
    world.until(lambda: "RelayFailed" in anna.transport.traffic.received_messages)
    bert.transport.dial(carl.key, "memory://carl")
    bert.transport.dial(anna.key, relay_address(carl.key))
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))
    assert anna.about(bert) == ["up bert"] and bert.about(anna) == ["up anna"]


def test_the_relay_dies_and_comes_back(world):
    anna, bert, carl = three(world)
    for party in (anna, bert):
        world.hub.disconnect(party.key, carl.key)
    world.until(lambda: "down bert" in anna.story() and "down anna" in bert.story())
    for party in (anna, bert):
        world.hub.reconnect(party.key, carl.key)
    world.until(lambda: anna.about(bert)[-1] == "up bert" and bert.about(anna)[-1] == "up anna")
    anna.transport.send(bert.key, Ping(5))
    world.until(lambda: bert.got(Ping))


def test_the_other_end_dies(world):
    """Without the relay's message only a deadline would show it: see `SOON_S`."""
    anna, bert, _carl = three(world)
    world.hub.kill(bert.key)
    world.parties.remove(bert)
    world.until(lambda: "down bert" in anna.story(), deadline_s=SOON_S)
    assert not anna.transport.connected(bert.key)


def test_one_side_starts_again_at_once(world):
    """bert's new process has the same key."""
    anna, bert, carl = three(world)
    bert.transport.close()
    world.parties.remove(bert)
    inner = MemoryTransport(bert.key, world.hub)
    again = Party("bert", bert.identity, RelayTransport(inner, bert.identity), world)
    world.parties.append(again)
    again.transport.dial(carl.key, "memory://carl")
    again.transport.dial(anna.key, relay_address(carl.key))
    world.until(
        lambda: again.transport.connected(anna.key) and anna.about(bert)[-2:] == ["down bert", "up bert"]
    )
    anna.transport.send(bert.key, Ping(1))
    world.until(lambda: again.got(Ping))


def test_hanging_up_is_heard_and_dialling_anew_works(world):
    anna, bert, carl = three(world)
    anna.transport.hang_up(bert.key)
    world.until(lambda: "down anna" in bert.story(), deadline_s=SOON_S)
    assert anna.about(bert) == ["up bert"]  # who hangs up knows
    anna.transport.dial(bert.key, relay_address(carl.key))
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))


def test_a_direct_connection_takes_the_place_of_a_relayed_one(world):
    anna, bert, carl = three(world)
    bert.transport.listen("memory://bert")
    anna.transport.dial(bert.key, "memory://bert")
    world.until(lambda: len(anna.about(bert)) == 3 and len(bert.about(anna)) == 3)
    before = anna.transport.traffic.sent_messages["RelayRequest"]
    anna.transport.send(bert.key, Ping(1))
    bert.transport.send(anna.key, Ping(2))
    world.until(lambda: bert.got(Ping) and anna.got(Ping))
    assert anna.about(bert) == ["up bert", "down bert", "up bert", "Ping 2 from bert"]
    assert bert.about(anna) == ["up anna", "down anna", "up anna", "Ping 1 from anna"]
    assert anna.transport.traffic.sent_messages["RelayRequest"] == before
    world.hub.disconnect(anna.key, bert.key)  # bert still knows the way through carl, anna was told another
    world.until(lambda: bert.about(anna)[-1] == "down anna")
    anna.transport.dial(bert.key, relay_address(carl.key))
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))


def test_another_relay_takes_over(world):
    anna, bert, carl = three(world)
    dora = world.relaying("dora", everybody)
    dora.transport.listen("memory://dora")
    for party, other in ((anna, bert), (bert, anna)):
        party.transport.dial(dora.key, "memory://dora")
        party.transport.dial(other.key, relay_address(dora.key))
    world.until(lambda: anna.about(bert)[1:] and bert.about(anna)[1:])
    world.until(lambda: all(p.about(o)[-1] == f"up {o.name}" for p, o in ((anna, bert), (bert, anna))))
    world.hub.kill(carl.key)
    world.parties.remove(carl)
    anna.transport.send(bert.key, Ping(1))
    world.until(lambda: bert.got(Ping))


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("relay:xyz", "cannot dial"),
        ("relay:" + "AB" * 32, "cannot dial"),
        ("relay:{me}", "the relay must be a third peer"),
        ("relay:{peer}", "the relay must be a third peer"),
    ],
)
def test_an_address_that_cannot_work_is_an_error(world, address, problem):
    anna, bert = world.relaying("anna"), world.relaying("bert")
    address = address.format(me=anna.key.hex(), peer=bert.key.hex())
    with pytest.raises(TransportError, match=problem):
        anna.transport.dial(bert.key, address)


def test_the_keys_must_fit(world):
    with pytest.raises(LocalProtocolError, match="use the same identity for both"):
        RelayTransport(MemoryTransport(b"k" * 32, world.hub), Identity.generate())


# -- what a relay refuses ----------------------------------------------------------------------------


def raw(world: World, name: str, carl: Party) -> Party:
    """A peer of carl that sends arbitrary messages."""
    party = world.add(name, lambda inner, identity: inner)
    party.transport.dial(carl.key, "memory://carl")
    world.until(lambda: party.transport.connected(carl.key))
    return party


def test_a_relay_passes_on_only_between_those_it_may(world):
    allowed: set[bytes] = set()
    carl = world.relaying("carl", lambda origin, to: {origin, to} <= allowed)
    carl.transport.listen("memory://carl")
    anna, bert, mallory = (raw(world, name, carl) for name in ("anna", "bert", "mallory"))
    allowed |= {anna.key, bert.key}
    mallory.transport.send(carl.key, RelayRequest(anna.key, b"hello"))
    anna.transport.send(carl.key, RelayRequest(mallory.key, b"hello"))
    anna.transport.send(carl.key, RelayRequest(anna.key, b"to myself"))
    world.until(lambda: len(anna.got(RelayFailed)) == 2 and mallory.got(RelayFailed))
    anna.transport.send(carl.key, RelayRequest(bert.key, b"hello"))
    world.until(lambda: bert.got(RelayedMessage))
    assert bert.got(RelayedMessage) == [RelayedMessage(anna.key, b"hello")]
    assert not mallory.got(RelayedMessage) and not anna.got(RelayedMessage)
    assert {lost.to for lost in anna.got(RelayFailed)} == {mallory.key, anna.key}
    assert anna.got(RelayFailed)[0].reason == "this relay does not permit packets between the two peers"
    allowed.discard(bert.key)
    anna.transport.send(carl.key, RelayRequest(bert.key, b"again"))
    world.until(lambda: len(anna.got(RelayFailed)) == 3)
    assert len(bert.got(RelayedMessage)) == 1, "whoever is no member any more is cut off at once"


def test_a_relay_holds_a_bounded_number_of_bytes(world, monkeypatch):
    monkeypatch.setattr(relay_forwarder, "RELAY_BACKLOG_BYTES", 3 * 2**20)
    monkeypatch.setattr("gridtrain.network.transport.in_memory.MAILBOX_BYTES", 2**20)
    carl = world.relaying("carl", everybody)
    carl.transport.listen("memory://carl")
    anna, bert = raw(world, "anna", carl), raw(world, "bert", carl)
    for _ in range(40):
        anna.transport.send(carl.key, RelayRequest(bert.key, bytes(2**19)))
        world.turn([anna, carl])  # bert does not read
        assert carl.transport.backlog_bytes(bert.key) <= 3 * 2**20
    world.until(lambda: anna.got(RelayFailed))
    assert "would wait for the destination" in anna.got(RelayFailed)[0].reason
    assert len(bert.got(RelayedMessage)) < 12


def test_refusals_are_few_however_many_messages_are_refused(world):
    carl = world.relaying("carl", everybody)
    carl.transport.listen("memory://carl")
    anna = raw(world, "anna", carl)
    start_s = time.monotonic()
    for n in range(500):
        anna.transport.send(carl.key, RelayRequest(n.to_bytes(32, "big"), b""))
        anna.transport.send(carl.key, RelayRequest(bytes(32), b""))
    world.until(lambda: carl.transport.traffic.received_messages.get("RelayRequest") == 1000)
    world.turn()
    windows = 1 + (time.monotonic() - start_s) / relay_forwarder.REFUSAL_INTERVAL_S
    assert 0 < len(anna.got(RelayFailed)) <= relay_forwarder.MAX_REFUSALS * windows


def test_sealed_bulk_does_not_pass_for_control():
    bulk, small = bytes([ENCRYPTED_BULK]), b"\2"
    assert is_bulk(RelayRequest(bytes(32), bulk + b"x")) and is_bulk(
        RelayedMessage(bytes(32), memoryview(bulk))
    )
    assert not is_bulk(RelayRequest(bytes(32), small)) and not is_bulk(RelayedMessage(bytes(32), b""))
    assert is_bulk(RelayRequest(bytes(32), small * (MAX_ENCRYPTED_CONTROL_BYTES + 1)))


# -- a hostile relay ---------------------------------------------------------------------------------

Parcel = tuple[bytes, bytes, bytes]  # origin, to, payload


class Spy:
    """A hostile relay: `behave` turns each packet into those that it sends."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.me, self.traffic = inner.me, inner.traffic
        self.seen: list[bytes] = []
        self.packets: list[Parcel] = []
        self.behave: Callable[[Parcel], list[Parcel]] = self.honest

    def honest(self, packet: Parcel) -> list[Parcel]:
        return [packet]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        for event in self.inner.poll(timeout_s):
            if isinstance(event, Received) and isinstance(event.message, RelayRequest):
                payload = bytes(event.message.payload)
                self.seen.append(payload)
                self.packets.append((event.peer, event.message.to, payload))
                self.deliver(self.behave(self.packets[-1]))
        return []

    def deliver(self, packets: list[Parcel]) -> None:
        for origin, to, payload in packets:
            self.inner.send(to, RelayedMessage(origin, payload))


def hostile(world: World, name: str = "carl") -> tuple[Party, Spy]:
    party = world.add(name, lambda inner, identity: Spy(inner))  # type: ignore[arg-type, return-value]
    assert isinstance(party.transport, Spy)
    return party, party.transport


@pytest.fixture
def mean(world: World) -> tuple[Party, Party, Party, Spy]:
    """anna and bert are connected through carl's spy, which has been honest so far."""
    anna, bert = world.relaying("anna"), world.relaying("bert")
    carl, spy = hostile(world)
    meet(world, anna, bert, carl)
    return anna, bert, carl, spy


def test_silence(world, mean):
    anna, bert, _carl, spy = mean
    spy.behave = lambda packet: []
    anna.transport.send(bert.key, Ping(1))
    spy_saw = len(spy.seen)
    world.until(lambda: len(spy.seen) > spy_saw)
    world.turn()
    assert bert.about(anna) == ["up anna"]
    spy.behave = spy.honest
    anna.transport.send(bert.key, Ping(2))
    world.until(lambda: "down anna" in bert.story())  # one is missing: it is noticed
    world.until(lambda: bert.about(anna)[-1] == "up anna" and anna.about(bert)[-1] == "up bert")
    assert not bert.got(Ping)


def test_copies_are_dropped_and_the_edge_stays(world, mean):
    anna, bert, _carl, spy = mean
    spy.behave = lambda packet: [packet] * 3
    for n in range(50):
        anna.transport.send(bert.key, Ping(n))
        bert.transport.send(anna.key, data(n))
    world.until(lambda: len(bert.got(Ping)) == 50 and len(anna.got(Data)) == 50)
    spy.deliver(spy.packets)  # everything since the beginning, the openings too
    world.turn()
    world.turn()
    assert bert.about(anna) == ["up anna"] + [f"Ping {n} from anna" for n in range(50)]
    assert anna.about(bert) == ["up bert"] + ["Data from bert"] * 50
    assert bert.transport.dropped_packets["it is a copy"] >= 100


def test_altered_bytes_take_the_edge_down_and_blame_nobody(world, mean):
    anna, bert, _carl, spy = mean

    def flip(packet: Parcel) -> list[Parcel]:
        origin, to, payload = packet
        return [(origin, to, payload[:-1] + bytes([payload[-1] ^ 1]))]

    spy.behave = flip
    for n in range(30):
        anna.transport.send(bert.key, Ping(n))
    world.until(lambda: "down anna" in bert.story())
    spy.behave = spy.honest
    world.until(lambda: bert.about(anna)[-1] == "up anna" and anna.about(bert)[-1] == "up bert")
    assert not bert.got(Ping)
    assert not [line for line in anna.story() + bert.story() if "violation" in line]


def test_reflection_and_other_origins(world, mean):
    """carl sends anna her own bytes back, sends bert's to anna as dora's, and invents packets."""
    anna, bert, carl, spy = mean
    dora = world.relaying("dora")
    dora.transport.dial(carl.key, "memory://carl")
    for party, other in ((anna, dora), (dora, anna), (bert, dora), (dora, bert)):
        party.transport.dial(other.key, relay_address(carl.key))
    world.until(lambda: all(p.transport.connected(dora.key) for p in (anna, bert)))
    world.until(lambda: all(dora.transport.connected(p.key) for p in (anna, bert)))

    def confuse(packet: Parcel) -> list[Parcel]:
        origin, to, payload = packet
        stranger = Identity.generate().public
        others = [p.key for p in (anna, bert, dora)]
        return [
            (to, origin, payload),
            (stranger, to, payload),
            (carl.key, to, payload),
            *((o, t, payload) for o in others for t in others if (o, t) not in ((origin, to), (o, o))),
            packet,
        ]

    spy.behave = confuse
    anna.transport.send(bert.key, Ping(1))
    bert.transport.send(dora.key, Ping(2))
    dora.transport.send(anna.key, Ping(3))
    world.until(lambda: bert.got(Ping) and dora.got(Ping) and anna.got(Ping))
    spy.behave = spy.honest
    world.turn()
    assert [ping.nonce for party in (bert, dora, anna) for ping in party.got(Ping)] == [1, 2, 3]
    assert bert.about(anna)[-1] == "Ping 1 from anna"
    assert dora.about(bert)[-1] == "Ping 2 from bert"


def test_another_peer_cannot_speak_for_the_relay(world):
    anna, bert, _carl = three(world)
    mallory = world.add("mallory", lambda inner, identity: inner)
    mallory.transport.listen("memory://mallory")
    anna.transport.dial(mallory.key, "memory://mallory")
    world.until(lambda: mallory.transport.connected(anna.key))
    mallory.transport.send(anna.key, RelayFailed(bert.key, "gone"))
    mallory.transport.send(anna.key, RelayedMessage(bert.key, b"\1hello"))
    world.until(lambda: anna.transport.dropped_packets["not expected"] == 2)
    assert anna.about(bert) == ["up bert"]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_false_is_delivered_whatever_the_relay_does(world, mean, seed, monkeypatch):
    monkeypatch.setattr("gridtrain.network.transport.relay.CONFIRM_S", 0.5)  # what was lost is missed soon
    anna, bert, _carl, spy = mean
    rng = random.Random(seed)
    print("seed", seed)
    held: list[Parcel] = []

    def mischief(packet: Parcel) -> list[Parcel]:
        out = [packet] if rng.random() < 0.9 else []
        match rng.randrange(8):
            case 0:
                held.append(packet)
                out = []
            case 1 if held:
                out.append(held.pop(rng.randrange(len(held))))
            case 2:
                out.append(rng.choice(spy.packets))
            case 3:
                origin, to, payload = rng.choice(spy.packets)
                out.append((to, origin, payload))
            case 4:
                altered = bytearray(packet[2])
                altered[rng.randrange(len(altered))] ^= 1 << rng.randrange(8)
                out.insert(0, (packet[0], packet[1], bytes(altered)))
            case 5:
                out.append((packet[0], packet[1], rng.randbytes(rng.randrange(200))))
        return out

    spy.behave = mischief
    for n in range(300):
        for party, other in ((anna, bert), (bert, anna)):
            if party.transport.connected(other.key):
                party.transport.send(other.key, Ping(n) if n % 3 else data(n, b"%d" % n))
        world.turn()
    for party, other in ((anna, bert), (bert, anna)):
        lines = party.about(other)
        assert "violation" not in " ".join(lines)
        nonces = [ping.nonce for ping in party.got(Ping)]
        numbers = [message.slot.segment for message in party.got(Data)]
        for heard in (nonces, numbers):
            assert heard == sorted(set(heard)), "a copy, or out of order"
            assert set(heard) <= set(range(300))
        assert all(bytes(m.payload) == b"%d" % m.slot.segment for m in party.got(Data))
    assert anna.got(Ping) or bert.got(Ping), "the test shows nothing if nothing came through"
    spy.behave = spy.honest
    held.clear()
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))
    # After the mischief both are up and mean the same session, or find out with the next message.
    world.until(lambda: _ping_through(anna, bert) and _ping_through(bert, anna))


def _ping_through(party: Party, other: Party) -> bool:
    if party.transport.connected(other.key):
        party.transport.send(other.key, Ping(10**6))
    return any(ping.nonce == 10**6 for ping in other.got(Ping))


# -- a hostile peer behind an honest relay -----------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1"], "not valid msgpack"),
        ([codec.encode(Hello(bytes(32), 1, "x"))[0]], "Hello must not be sent encrypted through a relay"),
        (
            [codec.encode(RelayFailed(bytes(32), "x"))[0]],
            "RelayFailed must not be sent encrypted through a relay",
        ),
        (
            [*codec.encode(RelayRequest(bytes(32), b"x"))],
            "RelayRequest must not be sent encrypted through a relay",
        ),
    ],
    ids=["garbage", "hello", "relay-lost", "relay"],
)
def test_nonsense_inside_the_seal_is_its_authors_fault(world, frames, reason):
    anna, bert, _carl = three(world)
    edge = anna.transport._relayed[bert.key]
    anna.transport._post(edge, frames, bulk=False)
    world.until(lambda: "violation anna" in bert.story())
    (violation,) = [event for event in bert.events if isinstance(event, TransportViolation)]
    assert reason in violation.reason
    assert bert.about(anna) == ["up anna", "violation anna"]


def test_another_version_is_told_in_words(world, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr("gridtrain.network.transport.relay.PROTOCOL_VERSION", 99)
        anna = world.relaying("anna")
    bert, carl = world.relaying("bert"), world.relaying("carl", everybody)
    carl.transport.listen("memory://carl")
    for party, peer in ((anna, bert), (bert, anna)):
        party.transport.dial(carl.key, "memory://carl")
        party.transport.dial(peer.key, relay_address(carl.key))
    world.until(lambda: [event for event in bert.events if isinstance(event, TransportViolation)])
    reason = next(event.reason for event in bert.events if isinstance(event, TransportViolation))
    assert "the peer uses protocol version 99, but this software uses version 6" in reason
    assert not bert.transport.connected(anna.key)


# -- the whole stack ---------------------------------------------------------------------------------


def stacked(inner: Transport, identity: Identity) -> Transport:
    return FlowControlTransport(RelayTransport(inner, identity, may_relay=everybody), window_bytes=4 * 2**20)


def move(world: World, anna: Party, bert: Party, count: int, payload: bytes) -> None:
    """`count` messages in both directions at once; the loops process each at once."""
    for index in range(count):
        anna.transport.send(bert.key, data(index, payload))
        bert.transport.send(anna.key, data(index, payload))
    settled = {anna: 0, bert: 0}
    end_s = time.monotonic() + 30
    while min(settled.values()) < count:
        assert time.monotonic() < end_s, settled
        world.turn()
        for party, other in ((anna, bert), (bert, anna)):
            for event in party.events:
                if isinstance(event, Received) and isinstance(event.message, Data):
                    assert event.message.slot.segment == settled[party]
                    assert bytes(event.message.payload) == payload
                    settled[party] += 1
                    party.transport.mark_processed(other.key, event.nbytes)  # type: ignore[attr-defined]
            party.events.clear()


def test_the_stack_moves_megabytes_through_a_relay_with_credit(world):
    """More than the window, in both directions at once, with a relay in between."""
    anna, bert, carl = (world.add(name, stacked) for name in ("anna", "bert", "carl"))
    meet(world, anna, bert, carl)
    move(world, anna, bert, 20, random.Random(3).randbytes(2**20))


def test_the_stack_over_tcp(world):
    """Encrypted sockets; then the relay loses one of the two, which returns."""
    parties = []
    for name in ("anna", "bert", "carl"):
        identity = Identity.generate()
        world.names[identity.public] = name
        inner = ZeroMQTransport(identity, "gridtrain test", gate=allow_all)
        parties.append(Party(name, identity, stacked(inner, identity), world))
    world.parties += parties
    anna, bert, carl = parties
    address = carl.transport.listen("tcp://127.0.0.1:0")
    for party, other in ((anna, bert), (bert, anna)):
        party.transport.dial(carl.key, address)
        party.transport.dial(other.key, relay_address(carl.key))
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))
    move(world, anna, bert, 12, random.Random(4).randbytes(2**20))
    bert.transport.hang_up(carl.key)
    world.until(lambda: "down bert" in anna.story())
    bert.transport.dial(carl.key, address)
    world.until(lambda: anna.transport.connected(bert.key) and bert.transport.connected(anna.key))
    move(world, anna, bert, 6, b"again" * 100_000)
    assert not [event for party in parties for event in party.events if isinstance(event, TransportViolation)]
