"""End-to-end encryption between two peers through a relay that they do not trust.

Pure: converts frames to packets and back, with X25519, XSalsa20-Poly1305 (NaCl's secretbox) and BLAKE2b.

    offer       1 | nonce 24 | box(session key 32, seen 32, greeting)       nonce: random
    encrypted   class 2 or 3 | session 8 | counter 8 | box(more 1, piece)   nonce: the counter

Sizes are in bytes; the first byte is the packet's class.  box(...) is encrypted and authenticated.
`SecureChannel` describes `greeting`.

Each side has a fresh X25519 key pair for each session, its *session key*; a session is derived from one
session key of each side.  `seen` is a session key of the other side, or zeros.  Either side may call:

    anna                                           bert
      | -- offer(key a, seen nothing) --------------> |   a call; both sides may call at the same time
      | <-- offer(key b, seen a) -------------------- |
      |  the offer has seen key a, so it is not a replay: anna derives the session
      | -- offer(key a, seen b), encrypted ---------> |   bert derives the session
      | <-- offer(key b, seen a), encrypted --------- |   the first encrypted piece confirms the session

    attack by a relay                 defence
    --------------------------------  ---------------------------------------------------------------------
    read, alter, forge                every box is authenticated under a key that only the two peers can
                                      compute, from their own keys and the session keys' shared secret; a key
                                      that leaks later therefore cannot decrypt older packets
    reflect, swap packets of peers    keys depend on sender and receiver
    replay or splice sessions         keys depend on both session keys; a key serves at most one session
    repeat, reorder within a session  each packet class has its own key and counter from 0, and the counter
                                      is the nonce; a packet with a lower counter is dropped, and a higher
                                      counter means that packets were lost
    turn bulk into control            the packet class selects the key
    replay a call                     a peer in a confirmed session answers with a spare session key, and ends
                                      the session only at an offer that has seen the spare key; a peer in a
                                      confirmed session never sends such an offer, because it ignores offers
                                      that have seen none of its keys
    drop, delay                       not prevented, as in any network: the connection goes down

There are two packet classes because control messages overtake bulk messages (see `send_queue`), which are
split into pieces, so that a relay can forward the first piece while the second piece arrives.
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
from gridtrain.network.transport.interface import Frames
from gridtrain.network.transport.send_queue import ENCRYPTED_BULK, MAX_ENCRYPTED_CONTROL_BYTES
from gridtrain.network.wire import codec

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
    """The reason for rejecting a packet.  In each case, either the peer or the relay may be at fault."""

    FORGED = "it cannot be decrypted"
    REPLAYED = "it is a copy"
    STALE = "it belongs to another session"
    LOST = "packets before it are missing"


class PacketRejected(RemoteProtocolError):
    """Raised for a rejected packet; whether the peer or the relay is at fault cannot be determined."""

    def __init__(self, why: RejectReason, detail: str = "") -> None:
        self.reject_reason = why
        super().__init__(f"an encrypted packet was dropped: {why.value}{detail}")


def decrypt(box: bytes, nonce: bytes, key: bytes) -> bytes:
    """Return the plaintext of `box`; raise `CryptoError` if authentication fails."""
    return bindings.crypto_secretbox_open(box, nonce, key)


def is_replayed(counter: int, next_counter: int) -> bool:
    """Return whether the counter was already used in this packet class of the session."""
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
    """A session between `me` and `peer`; it encrypts and decrypts with keys that no other session uses."""

    def __init__(self, me: PeerId, peer: PeerId, static: bytes, mine: _SessionKeys, theirs: bytes) -> None:
        """Derive the session's keys; raise `CryptoError` if `theirs` is a point of low order."""
        ephemeral = bindings.crypto_scalarmult(mine.secret, theirs)
        ends = sorted(((me, mine.public), (peer, theirs)))
        session_keys = b"".join(peer_key + key for peer_key, key in ends)
        root = _derive(static, b"session", ephemeral + session_keys)
        self.peer_public = theirs
        self.is_confirmed = False
        """Whether a packet from the peer was decrypted; this proves that the peer also has the session."""
        self._id = _derive(root, b"name", b"")[:8]
        self._out = {kind: _derive(root, b"lane", me + peer + bytes([kind])) for kind in PacketClass}
        self._in = {kind: _derive(root, b"lane", peer + me + bytes([kind])) for kind in PacketClass}
        self._next_out = dict.fromkeys(PacketClass, 0)
        self._next_in = dict.fromkeys(PacketClass, 0)
        self._pieces: list[memoryview] = []
        self._pieces_bytes = 0

    def encrypt(self, frames: Frames, *, bulk: bool) -> list[bytes]:
        """Return the packets for these frames; an overlong control message is encrypted as a bulk message."""
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
        """Return the frames of the message that this packet completes; None if more pieces must follow.

        Raises:
            PacketRejected: the packet is not from the peer, or it is out of order.
            RemoteProtocolError: the peer encrypted invalid frames.
        """
        if len(packet) < _HEAD.size + _BOX_BYTES:
            raise PacketRejected(RejectReason.FORGED, f" ({len(packet)} bytes)")
        number, session, counter = _HEAD.unpack_from(packet)
        if session != self._id:
            raise PacketRejected(RejectReason.STALE)
        if number not in self._next_in:
            raise PacketRejected(RejectReason.FORGED, f" (class {number})")
        kind = PacketClass(number)
        if is_replayed(counter, self._next_in[kind]):
            raise PacketRejected(RejectReason.REPLAYED)
        try:
            plain = decrypt(bytes(packet[_HEAD.size :]), _nonce(counter), self._in[kind])
        except CryptoError:
            raise PacketRejected(RejectReason.FORGED) from None
        if counter > self._next_in[kind]:
            raise PacketRejected(
                RejectReason.LOST, f" ({counter - self._next_in[kind]} of the {kind.name.lower()} class)"
            )
        self._next_in[kind] = max(self._next_in[kind], counter + 1)
        self.is_confirmed = True
        return self._reassemble(memoryview(plain), kind)

    def _encrypt_packet(self, plain: bytes, bulk: bool) -> bytes:
        kind = PacketClass.BULK if bulk else PacketClass.CONTROL
        counter = self._next_out[kind]
        self._next_out[kind] += 1
        return _HEAD.pack(kind, self._id, counter) + bindings.crypto_secretbox_easy(
            plain, _nonce(counter), self._out[kind]
        )

    def _reassemble(self, plain: memoryview, kind: PacketClass) -> Frames | None:
        if (
            not plain
            or plain[:1] not in (_LAST, _MORE)
            or (kind is PacketClass.CONTROL and plain[:1] == _MORE)
        ):
            raise RemoteProtocolError(f"an encrypted piece of {len(plain)} bytes has an invalid first byte")
        if kind is PacketClass.CONTROL:
            return _frames(plain[1:])
        self._pieces_bytes += len(plain) - 1
        if self._pieces_bytes > _MAX_BODY_BYTES:
            self._pieces, self._pieces_bytes = [], 0
            raise RemoteProtocolError(f"an encrypted message is longer than {_MAX_BODY_BYTES} bytes")
        self._pieces.append(plain[1:])
        if plain[:1] == _MORE:
            return None
        pieces, self._pieces, self._pieces_bytes = self._pieces, [], 0
        return _frames(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))


def _frames(body: memoryview) -> Frames:
    if len(body) < _BODY.size:
        raise RemoteProtocolError(
            f"an encrypted message is {len(body)} bytes long; the minimum is {_BODY.size}"
        )
    count, header_bytes = _BODY.unpack_from(body)
    rest = body[_BODY.size :]
    whole = header_bytes == len(rest) if count < 2 else header_bytes <= len(rest)
    if count > codec.MAX_FRAMES or not whole or (count == 0 and len(rest) > 0):
        raise RemoteProtocolError(
            f"an encrypted message of {len(rest)} bytes claims to consist of {count} frames, the first of "
            f"which is {header_bytes} bytes long"
        )
    frames: Frames = [bytes(rest[:header_bytes]), rest[header_bytes:]]
    return frames[:count]


# -- one end of a relayed connection ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferResult:
    """The answer to an offer: the packets to send, and the peer's greeting if a new session has begun."""

    packets: tuple[bytes, ...] = ()
    greeting: bytes | None = None


class SecureChannel:
    """One end of a relayed connection.  It has at most one session at a time and establishes new sessions.

    Args:
        identity: our key pair.
        peer: the key of the other end.
        greeting: bytes that are encrypted in every offer; the peer receives them when a session begins.
    """

    def __init__(self, identity: Identity, peer: PeerId, greeting: bytes) -> None:
        """Generate the first session key; raise `TransportError` if `peer` is not a valid key."""
        try:
            static = bindings.crypto_box_beforenm(peer, identity.secret)
        except (CryptoError, ValueError, TypeError):
            raise TransportError(
                f"{peer.hex()[:8]}... ({len(peer)} bytes) is not a public key",
                remedy="check the source of the key",
            ) from None
        self.session: SecureSession | None = None
        self._me, self._peer, self._greeting = identity.public, peer, greeting
        self._static = _derive(static, b"static", b"")
        self._offer_out = _derive(self._static, b"offer", self._me + peer)
        self._offer_in = _derive(self._static, b"offer", peer + self._me)
        self._session_keys = _SessionKeys.generate()
        self._next_session_keys: _SessionKeys | None = None
        self._opening: tuple[bytes, ...] = ()  # our first packets in this session

    def make_call(self) -> bytes:
        """End the current session and return an offer to begin a new session."""
        if self.session is not None:
            self.reset()
        return self._offer(self._session_keys, EMPTY_KEY)

    def reset(self) -> None:
        """End the session and invalidate all earlier offers."""
        self.session, self._session_keys, self._next_session_keys = None, _SessionKeys.generate(), None

    def handle_offer(self, offer: bytes | memoryview) -> OfferResult:
        """Process an offer; if the result has a greeting, `self.session` is a new session.

        Raises:
            PacketRejected: the offer cannot be decrypted, or its session key is invalid.
        """
        theirs, seen, greeting = self._open_offer(bytes(offer))
        if self.session is not None and theirs == self.session.peer_public:
            # The offer belongs to the current session.  If it is a call, our answer was lost.
            return OfferResult(() if self.session.is_confirmed or seen != EMPTY_KEY else self._opening)
        if seen == EMPTY_KEY:
            return OfferResult((self._offer(self._keys_for_caller(), theirs),))
        if self.session is None and seen == self._session_keys.public:
            own = self._session_keys
        elif self._next_session_keys is not None and seen == self._next_session_keys.public:
            own = self._next_session_keys
        else:
            return OfferResult()  # an old offer or a copy, because it has seen none of our current keys
        try:
            session = SecureSession(self._me, self._peer, self._static, own, theirs)
        except CryptoError:
            raise PacketRejected(RejectReason.FORGED, " (an invalid session key)") from None
        self.session, self._session_keys, self._next_session_keys = session, own, None
        self._opening = (self._offer(own, theirs), *session.encrypt([], bulk=False))
        return OfferResult(self._opening, greeting)

    def decrypt(self, packet: bytes | memoryview) -> Frames | None:
        """See `SecureSession.decrypt`; `PacketRejected` is also raised if there is no session."""
        if self.session is None:
            raise PacketRejected(RejectReason.STALE)
        return self.session.decrypt(packet)

    def _keys_for_caller(self) -> _SessionKeys:
        """Return the session keys for the answer to a call.

        A call does not end a confirmed session, because the call may be a replay.
        """
        if self.session is None:
            return self._session_keys
        if not self.session.is_confirmed:
            self.reset()
            return self._session_keys
        self._next_session_keys = self._next_session_keys or _SessionKeys.generate()
        return self._next_session_keys

    def _offer(self, own: _SessionKeys, seen: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        plain = own.public + seen + self._greeting
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
