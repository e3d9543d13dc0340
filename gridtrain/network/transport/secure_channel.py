"""What two peers say to each other through a relay that neither of them trusts.

Decides which bytes are the peer's, and which of them come in their turn.  Never touches a socket or a
clock, and never opens a message: it sees frames.  X25519, XSalsa20-Poly1305 (NaCl's Box) and BLAKE2b.

    offer    1 | nonce 24 | box(half 32, seen 32, greeting)            nonce: random
    sealed   lane 2 or 3 | session 8 | counter 8 | box(more 1, piece)  nonce: the counter

A *half* is a fresh X25519 key pair; a session belongs to one half of each side.  Either side calls:

    anna                                        bert
      | -- offer(half a, seen nothing) ---------> |   "a call"; both may call at once
      | <-- offer(half b, seen a) --------------- |
      |  has seen her own half come back: bert is there now, she derives the session
      | -- offer(half a, seen b), sealed -------> |   derives it likewise
      | <-- offer(half b, seen a), sealed ------- |   the first sealed piece confirms: the session stands

    what a relay may try              why it gets nowhere
    --------------------------------  ---------------------------------------------------------------------
    read, alter, make up              every box is authenticated under a key that only the two can compute
                                      from their own keys; the two halves' shared secret goes into a
                                      session's keys, so a key that leaks later opens nothing old
    reflect, swap two peers' bytes    keys depend on who speaks to whom
    replay or splice sessions         keys depend on both halves; a half serves one session at most
    repeat, reorder within a session  each lane has its own key and counts from 0; a counter is its box's
                                      nonce; a lower one is dropped, a higher one shows that some were lost
    turn bulk into control            the lane chooses the key
    replay a call                     a session that stands answers with a half kept for that, and falls
                                      only to an offer that has seen it; nobody who stands sends one, as
                                      who stands ignores what has seen none of its own halves
    drop, delay                       it can, as any network: the edge goes down or a deadline passes

There are two lanes because control overtakes bulk on its way (see `outbox`).  Bulk is cut into pieces, so
that a relay passes on the first while the second still comes in.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

from nacl import bindings
from nacl.exceptions import CryptoError

from gridtrain.core.messages import PeerId
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.transport.identity import KEY_BYTES, Identity
from gridtrain.network.transport.send_queue import ENCRYPTED_BULK, MAX_ENCRYPTED_CONTROL_BYTES
from gridtrain.network.wire import codec

Frames = list[bytes | memoryview]

PIECE_BYTES = 256 * 1024
MAX_GREETING_BYTES = 256
EMPTY_KEY = bytes(KEY_BYTES)

_OFFER = 1
_NONCE_BYTES = bindings.crypto_secretbox_NONCEBYTES
_BOX_BYTES = bindings.crypto_secretbox_MACBYTES
_OFFER_HEAD_BYTES = 1 + _NONCE_BYTES
_MIN_OFFER_BYTES = _OFFER_HEAD_BYTES + _BOX_BYTES + 2 * KEY_BYTES
_HEAD = struct.Struct("<B8sQ")
_BODY = struct.Struct("<BI")  # number of frames, bytes of frame 0
_MAX_BODY_BYTES = codec.MAX_MESSAGE_BYTES + _BODY.size
_LAST, _MORE = b"\0", b"\1"


class PacketClass(IntEnum):
    CONTROL = 2
    BULK = ENCRYPTED_BULK


class RejectReason(Enum):
    """Why a packet was not taken.  None of these is proof against the peer: the relay may have done it."""

    FORGED = "it does not open"
    REPLAYED = "it was taken already"
    STALE = "it belongs to another session"
    LOST = "some before it are missing"


class PacketRejected(RemoteProtocolError):
    """A packet that nobody can be blamed for.  `why` says what to do about it."""

    def __init__(self, why: RejectReason, detail: str = "") -> None:
        self.reject_reason = why
        super().__init__(f"a sealed packet was dropped: {why.value}{detail}")


# -- the defences, each looked up when it is called ------------------------------------------------


def decrypt(box: bytes, nonce: bytes, key: bytes) -> bytes:
    """The plain bytes.  Raises `CryptoError` unless a holder of the key made exactly this."""
    return bindings.crypto_secretbox_open(box, nonce, key)


def is_replayed(counter: int, next_counter: int) -> bool:
    """A counter is used once in a lane of a session: a lower one is a copy."""
    return counter < next_counter


# -- a session -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SessionKeys:
    """A key pair for one session."""

    secret: bytes
    public: bytes

    @classmethod
    def generate(cls) -> _SessionKeys:
        secret = secrets.token_bytes(KEY_BYTES)
        return cls(secret, bindings.crypto_scalarmult_base(secret))


class SecureSession:
    """Both directions between `me` and `peer`, with keys that nobody else has and that come once."""

    def __init__(self, me: PeerId, peer: PeerId, static: bytes, mine: _SessionKeys, theirs: bytes) -> None:
        """Raises `CryptoError` if `theirs` is a point whose shared secret anybody knows."""
        ephemeral = bindings.crypto_scalarmult(mine.secret, theirs)
        ends = sorted(((me, mine.public), (peer, theirs)))
        halves = b"".join(who + half for who, half in ends)
        root = _derive(static, b"session", ephemeral + halves)
        self.peer_public = theirs
        self.is_confirmed = False
        """Something of the peer's has opened: it holds the session too."""
        self._id = _derive(root, b"name", b"")[:8]
        self._out = {lane: _derive(root, b"lane", me + peer + bytes([lane])) for lane in PacketClass}
        self._in = {lane: _derive(root, b"lane", peer + me + bytes([lane])) for lane in PacketClass}
        self._next_out = dict.fromkeys(PacketClass, 0)
        self._next_in = dict.fromkeys(PacketClass, 0)
        self._pieces: list[memoryview] = []
        self._pieces_bytes = 0

    def encrypt(self, frames: Frames, *, bulk: bool) -> list[bytes]:
        """Packets in which the frames (two at most) travel.  Control that is too long goes as bulk."""
        head = _BODY.pack(len(frames), len(frames[0]) if frames else 0)
        nbytes = len(head) + sum(map(len, frames))
        bulk = bulk or nbytes > codec.MAX_HEADER_BYTES
        if nbytes <= PIECE_BYTES:
            return [self._encrypt_packet(b"".join((_LAST, head, *frames)), bulk)]
        body = memoryview(b"".join((head, *frames)))
        return [
            self._encrypt_packet((_MORE if end < nbytes else _LAST) + body[end - PIECE_BYTES : end], bulk)
            for end in range(PIECE_BYTES, nbytes + PIECE_BYTES, PIECE_BYTES)
        ]

    def decrypt(self, packet: bytes | memoryview) -> Frames | None:
        """The frames; None: more pieces must come first.

        Raises:
            NotTaken: it is not from the peer, or not in its turn.
            RemoteProtocolError: the peer sealed what is no frames.
        """
        if len(packet) < _HEAD.size + _BOX_BYTES:
            raise PacketRejected(RejectReason.FORGED, f" ({len(packet)} bytes)")
        number, session, counter = _HEAD.unpack_from(packet)
        if session != self._id:
            raise PacketRejected(RejectReason.STALE)
        if number not in self._next_in:
            raise PacketRejected(RejectReason.FORGED, f" (lane {number})")
        lane = PacketClass(number)
        if is_replayed(counter, self._next_in[lane]):
            raise PacketRejected(RejectReason.REPLAYED)
        try:
            plain = decrypt(bytes(packet[_HEAD.size :]), _nonce(counter), self._in[lane])
        except CryptoError:
            raise PacketRejected(RejectReason.FORGED) from None
        if counter > self._next_in[lane]:
            raise PacketRejected(
                RejectReason.LOST, f" ({counter - self._next_in[lane]} of the {lane.name.lower()} lane)"
            )
        self._next_in[lane] = max(self._next_in[lane], counter + 1)
        self.is_confirmed = True
        return self._reassemble(memoryview(plain), lane)

    def _encrypt_packet(self, plain: bytes, bulk: bool) -> bytes:
        lane = PacketClass.BULK if bulk else PacketClass.CONTROL
        counter = self._next_out[lane]
        self._next_out[lane] += 1
        return _HEAD.pack(lane, self._id, counter) + bindings.crypto_secretbox_easy(
            plain, _nonce(counter), self._out[lane]
        )

    def _reassemble(self, plain: memoryview, lane: PacketClass) -> Frames | None:
        if (
            not plain
            or plain[:1] not in (_LAST, _MORE)
            or (lane is PacketClass.CONTROL and plain[:1] == _MORE)
        ):
            raise RemoteProtocolError(f"a sealed piece of {len(plain)} bytes begins with no valid mark")
        if lane is PacketClass.CONTROL:
            return _frames(plain[1:])
        self._pieces_bytes += len(plain) - 1
        if self._pieces_bytes > _MAX_BODY_BYTES:
            self._pieces, self._pieces_bytes = [], 0
            raise RemoteProtocolError(f"a sealed message exceeds {_MAX_BODY_BYTES} bytes")
        self._pieces.append(plain[1:])
        if plain[:1] == _MORE:
            return None
        pieces, self._pieces, self._pieces_bytes = self._pieces, [], 0
        return _frames(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))


def _frames(body: memoryview) -> Frames:
    if len(body) < _BODY.size:
        raise RemoteProtocolError(f"a sealed message of {len(body)} bytes, at least {_BODY.size} are needed")
    count, header_bytes = _BODY.unpack_from(body)
    rest = body[_BODY.size :]
    whole = header_bytes == len(rest) if count < 2 else header_bytes <= len(rest)
    if count > codec.MAX_FRAMES or not whole or (count == 0 and len(rest) > 0):
        raise RemoteProtocolError(
            f"a sealed message of {len(rest)} bytes claims {count} frames, the first of {header_bytes}"
        )
    frames: Frames = [bytes(rest[:header_bytes]), rest[header_bytes:]]
    return frames[:count]


# -- the two ends of a relayed edge ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferResult:
    """What an offer leads to: packets to send, and whether a new session began (with whose greeting)."""

    packets: tuple[bytes, ...] = ()
    greeting: bytes | None = None


class SecureChannel:
    """One side's end: at most one session at a time, and how the next one comes about.

    Args:
        greeting: travels sealed in every offer; the peer gets it when a session begins.
    """

    def __init__(self, identity: Identity, peer: PeerId, greeting: bytes) -> None:
        """Raises `TransportError` if `peer` can be nobody's key."""
        try:
            static = bindings.crypto_box_beforenm(peer, identity.secret)
        except (CryptoError, ValueError, TypeError):
            raise TransportError(
                f"{peer.hex()[:8]}... ({len(peer)} bytes) is no public key", remedy="see where it comes from"
            ) from None
        self.session: SecureSession | None = None
        self._me, self._peer, self._greeting = identity.public, peer, greeting
        self._static = _derive(static, b"static", b"")
        self._offer_out = _derive(self._static, b"offer", self._me + peer)
        self._offer_in = _derive(self._static, b"offer", peer + self._me)
        self._session_keys = _SessionKeys.generate()
        self._next_session_keys: _SessionKeys | None = None
        self._opening: tuple[bytes, ...] = ()  # our first packets of this session

    def make_call(self) -> bytes:
        """An offer that asks for a new session.  What there was is over."""
        if self.session is not None:
            self.reset()
        return self._offer(self._session_keys, EMPTY_KEY)

    def reset(self) -> None:
        """The session is over, and nothing that was offered leads to one any more."""
        self.session, self._session_keys, self._next_session_keys = None, _SessionKeys.generate(), None

    def handle_offer(self, offer: bytes | memoryview) -> OfferResult:
        """Raises `NotTaken`.  The session in `self.session` is another one if the answer has a greeting."""
        theirs, seen, greeting = self._open_offer(bytes(offer))
        if self.session is not None and theirs == self.session.peer_public:
            # Of the session that we have.  If the other side still calls, it has not got our answer.
            return OfferResult(() if self.session.is_confirmed or seen != EMPTY_KEY else self._opening)
        if seen == EMPTY_KEY:
            return OfferResult((self._offer(self._keys_for_caller(), theirs),))
        if self.session is None and seen == self._session_keys.public:
            half = self._session_keys
        elif self._next_session_keys is not None and seen == self._next_session_keys.public:
            half = self._next_session_keys
        else:
            return OfferResult()  # it has seen nothing that counts now: an old one, whoever sent it
        try:
            session = SecureSession(self._me, self._peer, self._static, half, theirs)
        except CryptoError:
            raise PacketRejected(RejectReason.FORGED, " (a half that keeps no secret)") from None
        self.session, self._session_keys, self._next_session_keys = session, half, None
        self._opening = (self._offer(half, theirs), *session.encrypt([], bulk=False))
        return OfferResult(self._opening, greeting)

    def decrypt(self, packet: bytes | memoryview) -> Frames | None:
        """As `Session.open`."""
        if self.session is None:
            raise PacketRejected(RejectReason.STALE)
        return self.session.decrypt(packet)

    def _keys_for_caller(self) -> _SessionKeys:
        """A call may be a copy of an old one: a session that stands is not given up for it."""
        if self.session is None:
            return self._session_keys
        if not self.session.is_confirmed:
            self.reset()
            return self._session_keys
        self._next_session_keys = self._next_session_keys or _SessionKeys.generate()
        return self._next_session_keys

    def _offer(self, half: _SessionKeys, seen: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        plain = half.public + seen + self._greeting
        return bytes([_OFFER]) + nonce + bindings.crypto_secretbox_easy(plain, nonce, self._offer_out)

    def _open_offer(self, offer: bytes) -> tuple[bytes, bytes, bytes]:
        if not _MIN_OFFER_BYTES <= len(offer) <= _MIN_OFFER_BYTES + MAX_GREETING_BYTES:
            raise PacketRejected(RejectReason.FORGED, f" (an offer of {len(offer)} bytes)")
        nonce, box = offer[1:_OFFER_HEAD_BYTES], offer[_OFFER_HEAD_BYTES:]
        try:
            plain = decrypt(box, nonce, self._offer_in)
        except CryptoError:
            raise PacketRejected(RejectReason.FORGED, " (an offer)") from None
        return plain[:KEY_BYTES], plain[KEY_BYTES : 2 * KEY_BYTES], plain[2 * KEY_BYTES :]


def is_offer(packet: bytes | memoryview) -> bool:
    return len(packet) > 0 and packet[0] == _OFFER


def _derive(key: bytes, use: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, key=key, person=b"gridtrain" + use).digest()


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(8, "little").ljust(_NONCE_BYTES, b"\0")


assert _HEAD.size + _BOX_BYTES + 1 + _BODY.size + codec.MAX_HEADER_BYTES < MAX_ENCRYPTED_CONTROL_BYTES
