"""Two peers and the relay between them, which reorders, repeats, alters and forges packets.

    input:  a schedule: one byte for an action, and its arguments

What is decrypted must be what the other side encrypted, each message once and in order.  Keys come from a
seeded generator, so that an input is reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.transport import secure_channel
from gridtrain.network.transport.identity import Identity

ANNA, BERT = Identity.from_secret(b"a" * 32), Identity.from_secret(b"b" * 32)


class Relay:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.ends = (
            secure_channel.SecureChannel(ANNA, BERT.public, b"anna"),
            secure_channel.SecureChannel(BERT, ANNA.public, b"bert"),
        )
        self.packets: tuple[list[bytes], list[bytes]] = ([], [])  # sent packets of each side
        self.made: tuple[list[list[bytes]], list[list[bytes]]] = (
            [],
            [],
        )  # messages of each side that encrypted them
        self.decrypted: tuple[list[int], list[int]] = (
            [],
            [],
        )  # numbers of the messages that each side has decrypted, in one session
        self.sessions: list[object] = [None, None]
        self.garbage_encrypted = False

    def step(self) -> None:
        source = self.source
        side = source.byte() & 1
        end, sent = self.ends[side], self.packets[1 - side]
        match source.byte() % 12:
            case 0:
                self.packets[side].append(end.make_call())
            case 1 | 2 | 3 | 4 if sent:  # the latest ones, as an honest relay forwards them
                for packet in sent[-1 - source.byte() % 3 :]:
                    self.deliver(side, packet)
            case 5 if sent:
                self.deliver(side, source.choice(sent))
            case 6 if sent:
                packet = bytearray(source.choice(sent))
                packet[source.below(len(packet))] ^= 1 << source.byte() % 8
                self.deliver(side, bytes(packet))
            case 7 if sent:
                packet = source.choice(sent)
                lane = bytes([source.choice((0, 1, 2, 3, 4))]) + packet[1:]
                self.deliver(side, source.choice((lane, packet[: source.below(len(packet))], packet + b"\0")))
            case 8 if self.packets[side]:  # reflected
                self.deliver(side, source.choice(self.packets[side]))
            case 9:
                self.deliver(side, source.bytes(source.choice((0, 1, 17, 33, 150))))
            case 10 if end.session is not None:  # an authenticated peer that encrypts garbage
                lane = (
                    secure_channel.PacketClass.BULK
                    if source.one_in(2)
                    else secure_channel.PacketClass.CONTROL
                )
                self.garbage_encrypted = True
                plain = source.choice((b"", b"\0", b"\1", b"\2x", b"\0" + source.bytes(12), b"\0\3\0\0\0\0"))
                self.packets[side].append(
                    end.session._encrypt_packet(plain, lane is secure_channel.PacketClass.BULK)
                )
            case _ if end.session is not None:
                self.encrypt(side)

    def encrypt(self, side: int) -> None:
        source, end = self.source, self.ends[side]
        assert end.session is not None
        number = len(self.made[side])
        frames = [number.to_bytes(4, "little"), bytes(source.choice((0, 5, 300, 600_000)))][
            : 1 + source.byte() % 2
        ]
        bulk = source.one_in(2)
        self.made[side].append(frames)
        self.packets[side].extend(end.session.encrypt(list(frames), bulk=bulk))

    def deliver(self, side: int, packet: bytes) -> None:
        end = self.ends[side]
        try:
            if secure_channel.is_offer(packet):
                answer = end.handle_offer(packet)
                self.packets[side].extend(answer.packets)
                must(answer.greeting in (None, (b"bert", b"anna")[side]), "a greeting of another peer")
            else:
                frames = end.decrypt(packet)
                if frames and not self.garbage_encrypted:
                    self.check(side, [bytes(frame) for frame in frames])
        except RemoteProtocolError:
            pass

    def check(self, side: int, frames: list[bytes]) -> None:
        session = self.ends[side].session
        if session is not self.sessions[side]:
            self.sessions[side] = session
        number = int.from_bytes(frames[0], "little")
        made = self.made[1 - side]
        must(
            number < len(made) and made[number] == frames,
            "a decrypted message differs from the encrypted one",
        )
        must(number not in self.decrypted[side], "a message is delivered twice")
        self.decrypted[side].append(number)


@contextmanager
def keys_from(seed: bytes) -> Iterator[None]:
    real, random = secure_channel.secrets, Random(seed)
    secure_channel.secrets = SimpleNamespace(token_bytes=random.randbytes)  # type: ignore[assignment]
    try:
        yield
    finally:
        secure_channel.secrets = real


def run(data: bytes) -> bool:
    with keys_from(data[:1]):
        relay = Relay(Source(data[1:]))
        for _ in range(60):
            if relay.source.empty:
                break
            relay.step()
    return bool(relay.decrypted[0] or relay.decrypted[1])


def valid(random: Random) -> bytes:
    """One side calls, they establish a session and exchange messages, with the relay's actions in between."""
    talk = bytearray((random.randrange(256), *CALL, *ANSWER, *CONFIRM, *STAND))
    for _ in range(random.randrange(12)):
        side = random.randrange(2)
        talk += bytes((side, 11, random.choice((0, 1, 2, 3)), random.randrange(2), random.randrange(2)))
        talk += bytes((1 - side, 1, 2))
        if random.random() < 0.3:
            talk += bytes((random.randrange(2), random.randrange(12))) + random.randbytes(2)
    return bytes(talk)


CALL, ANSWER, CONFIRM, STAND = (0, 0), (1, 1, 0), (0, 1, 0), (1, 1, 2)

TARGETS = (
    Target(
        "sealed",
        "two peers and a hostile relay",
        run,
        valid,
        ("gridtrain.network.transport.secure_channel",),
        max_bytes=400,
        cpu_s=1.0,
        memory_bytes=64 << 20,
    ),
)
